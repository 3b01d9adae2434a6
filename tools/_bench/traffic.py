"""Requests as callers send them: users who come back with a longer history, rules, impatient callers, and mistakes.

A population of users is drawn from with a long tail: few come often, most come rarely. Each visit takes the history the
user has by now, which then grows by one to three items; a user whose recorded or longest history is used up makes room
for a new one. The sequence depends on the seed alone, so that two runs send the same requests in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from xgr_runtime.files import parse_json
from xgr_runtime.service.json_lines import request_from_json
from xgr_runtime.types import RecRequest, Rules, Search

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

MAX_GROWTH = 3
TAIL = 1.2  # of the visits per user: a Pareto tail
UNKNOWN_ITEM = 2**62
TOO_WIDE = 2**30


@dataclass(frozen=True)
class TrafficOptions:
    """What is sent. Shares are of all requests; `bad_share` of them break the contract and must be refused.

    num_items: random histories draw from ids 1 to num_items. max_length: of a random history, items. cancel_after_s: the
    mean time after which a cancelled request is given up. tags: what rules name; without any, rules exclude items only.
    """

    num_users: int = 1000
    num_items: int = 1000
    max_length: int = 20
    search: Search = field(default_factory=Search)
    tags: tuple[str, ...] = ()
    rules_share: float = 0.0
    bad_share: float = 0.0
    cancel_share: float = 0.0
    cancel_after_s: float = 0.05


@dataclass(frozen=True)
class Planned:
    """A request, when its caller gives it up (None: never), and whether it breaks the contract."""

    request: RecRequest
    cancel_after_s: float | None = None
    is_bad: bool = False


class Traffic:
    """An endless sequence of requests; the same seed gives the same one.

    histories: recorded ones, of which users replay a growing part; without them histories are random items.
    """

    def __init__(
        self, options: TrafficOptions, seed: int, histories: Sequence[NDArray[np.int64]] = ()
    ) -> None:
        self._options, self._recorded = options, histories
        self._rng = np.random.default_rng(seed)
        self._num_made = 0
        self._users: dict[int, tuple[NDArray[np.int64], int]] = {}

    def next(self) -> Planned:
        """The next request."""
        options, rng = self._options, self._rng
        self._num_made += 1
        request_id = f"load-{self._num_made}"
        if rng.random() < options.bad_share:
            return Planned(self._bad(request_id), is_bad=True)
        history = self._visit()
        search = options.search
        if rng.random() < options.rules_share:
            search = Search(**{**search.__dict__, "rules": self._rules()})
        cancel_after_s = None
        if rng.random() < options.cancel_share:
            cancel_after_s = float(rng.exponential(options.cancel_after_s))
        request = RecRequest(request_id, history_item_ids=history, searches=(search,))
        return Planned(request, cancel_after_s)

    def _visit(self) -> NDArray[np.int64]:
        """The history that a user has at this visit."""
        rank = min(int(self._rng.pareto(TAIL) * 8), 2**40) % self._options.num_users
        items, length = self._users.get(rank) or self._new_user()
        grown = length + int(self._rng.integers(1, MAX_GROWTH + 1))
        if grown <= len(items):
            self._users[rank] = (items, grown)
        else:
            self._users.pop(rank, None)
        return items[:length]

    def _new_user(self) -> tuple[NDArray[np.int64], int]:
        """All the items of a user to come, and how many of them are there at the first visit."""
        rng, options = self._rng, self._options
        if self._recorded:
            items = self._recorded[int(rng.integers(len(self._recorded)))]
        else:
            items = rng.integers(1, options.num_items + 1, options.max_length)
        return items, int(rng.integers(min(1, len(items)), len(items) + 1))

    def _rules(self) -> Rules:
        rng, options = self._rng, self._options
        few = rng.integers(1, options.num_items + 1, int(rng.integers(1, 20)))
        if not options.tags or rng.random() < 0.4:
            return Rules(exclude_item_ids=few, exclude_history=bool(rng.random() < 0.5))
        some = [options.tags[i] for i in rng.integers(len(options.tags), size=3)]
        if rng.random() < 0.5:
            return Rules(require=((some[0], some[1]),), exclude_item_ids=few)
        return Rules(exclude_tags=tuple(some))

    def _bad(self, request_id: str) -> RecRequest:
        """One of the mistakes that callers make."""
        items = np.array([1, UNKNOWN_ITEM], dtype=np.int64)
        kinds = (
            RecRequest(request_id, history_item_ids=items, on_unknown="error"),
            RecRequest(request_id, history_item_ids=items, searches=(Search(beam_width=TOO_WIDE),)),
            RecRequest(
                request_id, history_item_ids=items, searches=(Search(catalog="no such one"),)
            ),
            RecRequest(request_id, prompt_token_ids=np.array([-1])),
            RecRequest(request_id, history_sids=np.zeros((1, 9), dtype=np.uint32)),
        )
        return kinds[int(self._rng.integers(len(kinds)))]


def read_histories(path: Path) -> list[NDArray[np.int64]]:
    """Histories of item ids from JSON lines: a request each, as `xgr client --input` takes them, or a bare list of ids.

    Raises ValueError naming the line (InvalidRequest, which is one, for a line that is no request), OSError.
    """
    histories = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                data = parse_json(line)
                fields = data if isinstance(data, dict) else {"history_item_ids": data}
                history = request_from_json(fields, Search()).history_item_ids
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            if history is None or not len(history):
                raise ValueError(f"{path}, line {number}: needs history_item_ids, one at least")
            histories.append(history)
    if not histories:
        raise ValueError(f"{path} has no line; expected one history a line")
    return histories
