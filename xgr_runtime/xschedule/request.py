"""A request inside the engine: what was asked, what it became, where its answer goes."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from xgr_runtime.kvcache.prefix_cache import NOTHING_FOUND, Found
from xgr_runtime.kvcache.prefix_keys import PrefixKeys
from xgr_runtime.types import Int64Array, Normalization, RecRequest, RecResult
from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xbeam.rules import Cleared, RuleSet, TagExpression
from xgr_runtime.xschedule.rule_rows import RuleRowTable

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class PinnedCatalog(Protocol):
    """The version of a catalogue that a search started with; it stays loaded until the search ends."""

    name: str
    version: str
    catalog: Catalog
    slot_index: int
    rule_rows: RuleRowTable


@dataclass(frozen=True)
class SearchState:
    """One search with every default filled in and its rules resolved against the pinned catalogue."""

    pinned: PinnedCatalog
    normalization: Normalization
    widths: tuple[int, ...]
    num_results: int
    max_items_per_sid: int | None
    return_level_scores: bool
    expression: TagExpression
    rule_set: RuleSet
    cleared: Cleared
    num_unknown_exclusions: int

    @property
    def num_rows(self) -> int:
        """Packed rows, and unshared KV slots, the search needs at most."""
        return max(self.widths)

    @property
    def group(self) -> tuple[int, Normalization]:
        """Searches of one group can share a batch."""
        return (self.pinned.slot_index, self.normalization)

    @property
    def is_excluding(self) -> bool:
        """True when exclusions kill edges, so that the search needs a scratch row of its own."""
        return any(len(edges) for edges in self.cleared.edges)


@dataclass(eq=False)
class RequestState:
    """A request from submission to its result. due_s orders the queue; the request's own deadline ends it.

    is_scheduled: it is or was part of a batch, whose end gives back what it holds; before, its own end does.
    prefix: the prefix-cache keys of its prompt, None with the cache off. Once scheduled: pages, in order; found, what of the
    prompt is cached, and source_page, the page that the last of it is copied from; num_cached_tokens, how many tokens that is.
    """

    request: RecRequest
    prompt_token_ids: Int64Array
    searches: tuple[SearchState, ...]
    num_history_used: int
    num_history_unknown: int
    arrival_s: float
    due_s: float
    prefix: PrefixKeys | None = None
    future: "Future[RecResult]" = field(default_factory=Future)
    pages: Sequence[int] = ()
    found: Found = NOTHING_FOUND
    source_page: int | None = None
    num_cached_tokens: int = 0
    start_s: float = 0.0
    is_scheduled: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_rows(self) -> int:
        return sum(search.num_rows for search in self.searches)


def settle(future: "Future[_T]", outcome: "_T | BaseException") -> None:
    """Set a future's outcome unless it was cancelled meanwhile. What its owner's callbacks raise is logged: others' requests go on."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except BaseException:  # a Future itself catches and logs Exception alone
        logger.exception("a callback of a request's future failed")


def as_int64(values: Sequence[int] | npt.NDArray[np.integer]) -> Int64Array:
    """The values as an int64 array."""
    return np.asarray(values, dtype=np.int64).reshape(-1)
