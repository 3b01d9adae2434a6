"""A stand-in for the engine's queue, so that the service's own behaviour is tested apart from the model.

It answers from the request alone: item i of n has id `sum of the history + i`. The catalogue's name asks for behaviour:
"wait" never answers, "wait:0.2" answers after that many seconds, "held" once `let_go` was called, "held:FOLDER" as `Hold` says,
"raise:Overloaded" raises, and so on.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.service.scrape import make_stats
from xgr_runtime import errors
from xgr_runtime.types import RecResult, SearchResult, Timings

if TYPE_CHECKING:
    from xgr_runtime.types import RecRequest
    from xgr_runtime.xschedule.engine_stats import EngineStats

RAISED = {
    "InvalidRequest": errors.InvalidRequest(
        [("history_item_ids[1]", "unknown item"), ("searches[0].beam_widths", "expected 3")]
    ),
    "ControlCharacters": errors.InvalidRequest([("field\x1b", "\x1b[31m\nsecond line")]),
    "Overloaded": errors.Overloaded("8 requests are waiting"),
    "DeadlineExceeded": errors.DeadlineExceeded("too late by 2 ms"),
    "EngineClosed": errors.EngineClosed("secret reason of the machine"),
    "NotFound": errors.NotFound("catalogue 'x' is not loaded; known: films"),
    "OpUnavailable": errors.OpUnavailable("secret detail of the machine"),
    "ZeroDivisionError": ZeroDivisionError("secret detail of the code"),
}


POLL_S = 0.002


class Hold:
    """A folder that holds requests of the stand-in, whichever process it is in: a file for each that came, one that lets them go."""

    def __init__(self, folder: Path) -> None:
        self.catalog = f"held:{folder}"
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def num_come(self) -> int:
        return len(list(self._folder.glob("came-*")))

    def let_go(self) -> None:
        (self._folder / "go").touch()

    async def keep(self, number: int) -> None:
        """In the stand-in: until they may go."""
        (self._folder / f"came-{number}").touch()
        while not (self._folder / "go").exists():
            await asyncio.sleep(POLL_S)


class StandInEngine:
    """See the module; keeps every request, and those whose waiting was cancelled."""

    def __init__(self) -> None:
        self.requests: list[RecRequest] = []
        self.cancelled: list[RecRequest] = []
        self.stopped = asyncio.Event()
        self._are_let_go = False

    def let_go(self) -> None:
        """Answer those that are held; from any thread."""
        self._are_let_go = True

    async def wait_stopped(self) -> None:
        await self.stopped.wait()

    def stats(self) -> EngineStats:
        return make_stats()

    def describe(self) -> dict[str, Any]:
        return {"catalogs": {}}

    def load_catalog(self, name: str, path: str) -> str:
        raise errors.CatalogError(f"{path} is no catalogue")

    def activate_catalog(self, name: str, version: str) -> str:
        raise errors.NotFound(f"version {version!r} is not loaded")

    def retire_catalog(self, name: str, version: str) -> None:
        raise errors.NotFound(f"version {version!r} is not loaded")

    async def submit(self, request: RecRequest) -> RecResult:
        self.requests.append(request)
        behaviour, _, argument = request.searches[0].catalog.partition(":")
        if behaviour == "raise":
            raise RAISED[argument]
        if behaviour in ("wait", "held"):
            try:
                await self._wait(behaviour, argument)
            except asyncio.CancelledError:
                self.cancelled.append(request)
                raise
        return answer(request)

    async def _wait(self, behaviour: str, argument: str) -> None:
        if behaviour == "wait":
            await asyncio.sleep(float(argument or 3600))
        elif argument:
            await Hold(Path(argument)).keep(len(self.requests))
        else:
            while not self._are_let_go:
                await asyncio.sleep(POLL_S)


def answer(request: RecRequest) -> RecResult:
    """The result that `submit` gives."""
    search = request.searches[0]
    n = search.num_results or 3
    ids = request.history_item_ids if request.history_item_ids is not None else np.zeros(0, int)
    failed = search.catalog == "failed"
    rows = 0 if failed else n
    found = SearchResult(
        item_ids=int(ids.sum()) + np.arange(rows, dtype=np.int64),
        keys=tuple(f"k{i}" for i in range(rows)) if search.catalog == "keys" else None,
        sids=np.arange(rows * 3, dtype=np.uint32).reshape(rows, 3),
        scores=(-np.arange(rows) / 4).astype(np.float32),
        level_scores=np.ones((rows, 3), np.float32) if search.return_level_scores else None,
        num_valid=rows,
        num_items=rows,
        status="failed" if failed else "ok",
        reason="the model gave NaN in round 1" if failed else "",
        catalog=search.catalog,
        catalog_version="v1",
        normalization=search.normalization or "vocab",
        temperature=1.0,
        beam_widths=search.beam_widths or (search.beam_width or 50,) * 3,
        num_unknown_exclusions=0,
    )
    return RecResult(
        request.request_id, (found,), len(ids), 0, 3 * len(ids), 0, "m", "t", Timings(1, 2, 3)
    )
