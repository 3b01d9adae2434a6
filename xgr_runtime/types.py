"""Frozen request and result types. No torch, no protobuf: only `service/` knows the wire types.

Letters in shapes: n rows of one request, L levels of the semantic id (SID).
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Int64Array: TypeAlias = npt.NDArray[np.int64]
Uint32Array: TypeAlias = npt.NDArray[np.uint32]
Float32Array: TypeAlias = npt.NDArray[np.float32]

Normalization = Literal["vocab", "level", "valid"]
NORMALIZATIONS: tuple[Normalization, ...] = ("vocab", "level", "valid")
OnOverflow = Literal["truncate", "error"]
OnUnknown = Literal["skip", "error"]
SearchStatus = Literal["ok", "failed"]


@dataclass(frozen=True)
class Rules:
    """What one search may return. An item is kept when every rule holds.

    require: any-of groups of tags, all of which must hold. exclude_tags: no such tag. exclude_item_ids, exclude_keys:
    not these items. exclude_history: not the items of the request's own history.
    """

    require: tuple[tuple[str, ...], ...] = ()
    exclude_tags: tuple[str, ...] = ()
    exclude_item_ids: tuple[int, ...] | Int64Array = ()
    exclude_keys: tuple[str, ...] = ()
    exclude_history: bool = False


@dataclass(frozen=True)
class Search:
    """One search over one catalogue. `None` and empty values mean the configuration's default."""

    catalog: str = ""
    catalog_version: str = ""
    beam_width: int | None = None
    beam_widths: tuple[int, ...] | None = None
    num_results: int | None = None
    normalization: Normalization | None = None
    rules: Rules = field(default_factory=Rules)
    max_items_per_sid: int | None = None
    return_level_scores: bool = False


@dataclass(frozen=True)
class RecRequest:
    """One user's history and the searches to run on it (history oldest first).

    Exactly one of the four inputs is given: history_item_ids int64 [n], history_keys (n strings), history_sids
    uint32 [n, L], or prompt_token_ids int64 [n] (already rendered). An empty array is a legal empty history.
    deadline_s: seconds of `time.monotonic()`; None = no deadline.
    """

    request_id: str = ""
    history_item_ids: Int64Array | None = None
    history_keys: tuple[str, ...] | None = None
    history_sids: Uint32Array | None = None
    prompt_token_ids: Int64Array | None = None
    searches: tuple[Search, ...] = (Search(),)
    on_overflow: OnOverflow | None = None
    on_unknown: OnUnknown | None = None
    deadline_s: float | None = None


@dataclass(frozen=True)
class SearchResult:
    """The items of one search, best first, as parallel arrays of num_items rows.

    scores: float32 sums of log-probabilities. num_valid: live beams (SIDs) after the last round. status "failed":
    the model gave NaN or +inf (`reason` names the round); the arrays are then empty. `reason` also says why an answer
    is empty. num_unknown_exclusions: excluded ids, keys and tags that the catalogue does not know.
    level_scores: float32 [n, L] per-level log-probabilities, when asked for.
    """

    item_ids: Int64Array
    keys: tuple[str, ...] | None
    sids: Uint32Array
    scores: Float32Array
    level_scores: Float32Array | None
    num_valid: int
    num_items: int
    status: SearchStatus
    reason: str
    catalog: str
    catalog_version: str
    normalization: Normalization
    temperature: float
    beam_widths: tuple[int, ...]
    num_unknown_exclusions: int


@dataclass(frozen=True)
class Timings:
    """Milliseconds a request spent waiting, in its batch, and in all."""

    queue_ms: float
    run_ms: float
    total_ms: float


@dataclass(frozen=True)
class RecResult:
    """The answer to one RecRequest: one SearchResult per search, in order."""

    request_id: str
    results: tuple[SearchResult, ...]
    num_history_used: int
    num_history_unknown: int
    num_prompt_tokens: int
    num_cached_tokens: int
    model_version: str
    template_version: str
    timings: Timings
