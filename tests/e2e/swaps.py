"""Catalogue swaps under load: clients that check every answer, files that are bad in every way, and who swaps.

Version k has the item ids of [k * RANGE, (k + 1) * RANGE) and SIDs of its own, so an answer made from two versions cannot
go unseen: each of its items must be, with its SID, in the version that the answer names.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.helpers.catalogs import TAGS, contiguous_tokens, random_catalog
from tests.helpers.engines import write_catalog
from tests.helpers.oracle import Catalog
from tests.helpers.versions import VOCAB, Versions
from xgr_runtime.errors import CatalogError, CheckpointError, XgrError
from xgr_runtime.types import RecRequest, Rules, Search

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from xgr_runtime.types import RecResult

WAIT_S = 60.0
NUM_CLIENTS = 3
BAD_KINDS = (
    "truncated",
    "bit flipped",
    "foreign",
    "missing",
    "too long",
    "too deep",
    "beyond the vocabulary",
    "empty",
)


@dataclass
class Clients:
    """Threads that ask without a pause and keep what is wrong with any answer."""

    ask: Callable[[RecRequest], RecResult]
    versions: Versions
    answers: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Clients:
        for seed in range(NUM_CLIENTS):
            self._threads.append(threading.Thread(target=self._run, args=(seed,)))
            self._threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in self._threads)

    def wait_for(self, number: int) -> None:
        """Until a request was answered by version `number`."""
        end = time.monotonic() + WAIT_S
        while not self.answers[number]:
            assert not self.faults, self.faults
            assert time.monotonic() < end, f"no answer from version {number}"
            time.sleep(0.001)

    def _run(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not self._stop.is_set() and not self.faults:
            request, excluded = random_request(rng)
            try:
                result = self.ask(request).results[0]
            except XgrError as error:
                self.faults.append(f"{type(error).__name__}: {error}")
                return
            number = int(result.catalog_version[1:])
            items = {item.item_id: item for item in self.versions.catalogs[number].items}
            for item_id, sid in zip(result.item_ids.tolist(), result.sids.tolist(), strict=True):
                item = items.get(item_id)
                if item is None or item.sid != tuple(sid) or not item.servable:
                    self.faults.append(f"version {number} has no item {item_id} with SID {sid}")
                elif excluded & item.tags:
                    self.faults.append(f"item {item_id} of version {number} is excluded")
            if not result.num_items:
                self.faults.append(f"version {number} gave no items")
            self.answers[number] += 1


def random_request(rng: np.random.Generator) -> tuple[RecRequest, set[str]]:
    """A history of SIDs, which means the same to every version, and sometimes an excluded tag."""
    sids = rng.integers(0, 8, (rng.integers(1, 12), 3)).astype(np.uint32)
    excluded = {str(rng.choice(TAGS))} if rng.random() < 0.4 else set()
    width = int(rng.choice([4, 16, 64]))
    search = Search(
        beam_width=width, num_results=30, rules=Rules(exclude_tags=tuple(sorted(excluded)))
    )
    return RecRequest(history_sids=sids, searches=(search,)), excluded


def write_bad(kind: str, good: Path, path: Path) -> None:
    """A file at `path` that no server may take; `good` is a sound one."""
    content = bytearray(good.read_bytes())
    path.unlink(missing_ok=True)
    if kind == "truncated":
        path.write_bytes(content[:-100])
    elif kind == "bit flipped":
        content[-len(content) // 3] ^= 4
        path.write_bytes(content)
    elif kind == "foreign":
        path.write_bytes(b"PK" + bytes(5000))
    elif kind == "too long":
        path.write_bytes(content + bytes(64))
    elif kind == "too deep":
        write_catalog(path, random_catalog(9, 50, contiguous_tokens([4] * 4, 2)), "deep")
    elif kind == "beyond the vocabulary":
        items = random_catalog(9, 50, contiguous_tokens([8, 8, 8], 2)).items
        write_catalog(path, Catalog(items, contiguous_tokens([8, 8, 8], VOCAB - 20)), "wide")
    elif kind == "empty":
        path.write_bytes(b"")
    else:
        assert kind == "missing"


@dataclass
class Operator:
    """What is done to the catalogues. state: everything that a refused load must leave as it was."""

    load: Callable[[Path], object]
    activate: Callable[[str], object]
    retire: Callable[[str], object]
    state: Callable[[], Any]


def swap(operator: Operator, clients: Clients, folder: Path, num_swaps: int) -> None:
    """Versions 2, 3, ... one after the other under load; at each of them a bad file first, at every third a way back."""
    clients.wait_for(1)
    for number in range(2, num_swaps + 2):
        good = folder / f"{number}.xgr"
        assert clients.versions.path(number) == str(good)
        bad = folder / "bad.xgr"
        write_bad(BAD_KINDS[number % len(BAD_KINDS)], good, bad)
        before = operator.state()
        try:
            operator.load(bad)
        except (CatalogError, CheckpointError):
            pass
        else:
            raise AssertionError(f"{BAD_KINDS[number % len(BAD_KINDS)]}: the file was loaded")
        assert operator.state() == before
        patiently(operator.load, good)
        operator.activate(f"v{number}")
        clients.wait_for(number)
        if number % 3 == 0:
            clients.answers[number - 1] = 0
            operator.activate(f"v{number - 1}")
            clients.wait_for(number - 1)
            operator.activate(f"v{number}")
        if number % 2 == 0:
            patiently(operator.retire, f"v{number - 1}")
    assert not clients.faults, clients.faults


def patiently(action: Callable[[Any], object], argument: Any) -> None:
    """Again while a version is in use by requests that are about to end."""
    end = time.monotonic() + WAIT_S
    while True:
        try:
            action(argument)
        except CatalogError as error:
            if not ("use" in str(error) and time.monotonic() < end):
                raise
            time.sleep(0.002)
        else:
            return
