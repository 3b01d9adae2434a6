"""A batch as plain data: numpy arrays, ints and names. It can be pickled and sent to another process or host.

It holds no tensor, catalogue or rule object: slots, versions and tag expressions stand for them. Packed tokens of all
histories come one after the other and are prefilled once. The searches are in groups of one catalogue slot and one
normalisation, hence one depth; each group is its own sequence of rounds, and in it every search owns a range of packed
beam rows per level.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

import numpy as np
import numpy.typing as npt

from xgr_runtime.kvcache.allocator import NULL_PAGE
from xgr_runtime.types import Int64Array, Normalization
from xgr_runtime.xbeam.rules import TagExpression
from xgr_runtime.xschedule.stage_times import StageTimes

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class RuleRow:
    """Which row of a slot's alive bits a search uses.

    row: the rule set's row. scratch: index of the scratch row the search needs, or None without exclusions.
    cleared: per level the edges its exclusions kill.
    """

    row: int
    scratch: int | None
    cleared: tuple[npt.NDArray[np.integer], ...]


@dataclass(frozen=True)
class PackedHistories:
    """H histories with T new tokens in all.

    token_ids_T, positions_T int64; kv_slots_T int64 (page * page size + offset) of every new token. q_start_H1: range
    of each history's new tokens; kv_lens_H: all its tokens in the shared KV, cached ones first; page_table_HP int32,
    padded with the null page. copies_3H int32, before the prefill: the page that each history's copy reads, its own page that
    the copy writes, and how many of the first tokens; null pages and 0 where nothing is copied.
    """

    token_ids_T: Int64Array
    positions_T: Int64Array
    kv_slots_T: Int64Array
    q_start_H1: Int32Array
    kv_lens_H: Int32Array
    page_table_HP: Int32Array
    copies_3H: Int32Array

    @property
    def has_copies(self) -> bool:
        return bool(self.copies_3H[2].any())

    @property
    def num_histories(self) -> int:
        return len(self.kv_lens_H)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all histories, cached ones included."""
        return int(self.kv_lens_H.sum())

    @property
    def num_scheduled_tokens(self) -> int:
        """New tokens, which the prefill runs over."""
        return len(self.token_ids_T)


@dataclass(frozen=True)
class SearchGroup:
    """S searches over one catalogue slot with one normalisation, in the order of their histories.

    history_of_S int32, never descending: the rows of one history lie together, as the shared attention reads them.
    A history may have none or several. widths_SL int32 [S, L]. rules: one per search. rule_loads: (row, expression)
    to write before the group runs.
    """

    slot_index: int
    catalog_version: str
    normalization: Normalization
    history_of_S: Int32Array
    widths_SL: Int32Array
    rules: tuple[RuleRow, ...]
    rule_loads: tuple[tuple[int, TagExpression], ...]

    def __post_init__(self) -> None:
        assert (self.history_of_S[1:] >= self.history_of_S[:-1]).all(), self.history_of_S
        assert len(self.history_of_S) == len(self.widths_SL) == len(self.rules) > 0

    @property
    def num_searches(self) -> int:
        return len(self.history_of_S)

    @property
    def num_levels(self) -> int:
        return int(self.widths_SL.shape[1])

    def row_starts(self, level: int) -> Int32Array:
        """int32 [S + 1]: rows of each search after round `level`; level -1 is the root, one row a search."""
        if level < 0:
            return np.arange(self.num_searches + 1, dtype=np.int32)
        return _starts(self.widths_SL[:, level])

    def slot_starts(self) -> Int32Array:
        """int32 [S + 1]: unshared KV slots of each search, as many as its largest width."""
        return _starts(self.widths_SL.max(axis=1))


@dataclass(frozen=True)
class Batch:
    """Histories, the request that each belongs to, and their searches by group."""

    batch_id: int
    kind: Literal["full"]
    request_ids: tuple[str, ...]
    histories: PackedHistories
    groups: tuple[SearchGroup, ...]

    @property
    def num_histories(self) -> int:
        return self.histories.num_histories


@dataclass(frozen=True)
class GroupOutput:
    """What came back of one group. scores_LN fp32, nodes_LN and parents_LN int32 by level and packed row, of as many rows as the
    largest level has at least.

    status_S: 0, or 1 + the round that failed. num_live_rows, num_rows_skipped: counters of the selection, the live
    parent rows over all rounds and how many of them early termination passed over.
    """

    scores_LN: npt.NDArray[np.float32]
    nodes_LN: Int32Array
    parents_LN: Int32Array
    status_S: Int32Array
    num_live_rows: int
    num_rows_skipped: int


@dataclass(frozen=True)
class BatchOutput:
    """What came back, in the order of the batch's groups, and how long the stages took."""

    groups: tuple[GroupOutput, ...]
    times: StageTimes = field(default_factory=StageTimes)


def _starts(sizes: npt.NDArray[np.integer]) -> Int32Array:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


def pack_histories(
    prompts: Sequence[Int64Array],
    pages: Sequence[Sequence[int]],
    page_size: int,
    num_cached_tokens: Sequence[int] | None = None,
    sources: Sequence[int | None] | None = None,
) -> PackedHistories:
    """Pack prompts (token ids) whose tokens go to `pages`, in order, `page_size` tokens a page.

    The first num_cached_tokens of each are in their pages already (default: none), but never a whole prompt. sources: pages to
    copy those of them from that do not fill a page; None where they are there as well.
    """
    lengths = [len(prompt) for prompt in prompts]
    cached = [int(n) for n in num_cached_tokens or [0] * len(prompts)]
    assert all(n < length for n, length in zip(cached, lengths, strict=True)), (cached, lengths)
    num_pages = max((len(p) for p in pages), default=1)
    table = np.full((len(prompts), num_pages), NULL_PAGE, dtype=np.int32)
    starts = [0, *accumulate(length - n for n, length in zip(cached, lengths, strict=True))]
    token_ids, positions, slots = (np.empty(starts[-1], dtype=np.int64) for _ in range(3))
    copies = np.zeros((3, len(prompts)), dtype=np.int32)
    for row, owned in zip(table, pages, strict=True):
        row[: len(owned)] = owned
    first_slots = table.astype(np.int64) * page_size
    counting, in_page = np.arange(max(lengths, default=0)), np.arange(page_size)
    # History by history, in slices: the host does this while the device waits for it.
    for number, (prompt, owned, first) in enumerate(zip(prompts, pages, cached, strict=True)):
        own = slice(starts[number], starts[number + 1])
        token_ids[own] = prompt[first:]
        positions[own] = counting[first : len(prompt)]
        skipped = first // page_size  # pages before the one that its first new token goes to
        own_slots = np.add.outer(first_slots[number, skipped : len(owned)], in_page).reshape(-1)
        slots[own] = own_slots[first - skipped * page_size :][: len(prompt) - first]
        source = sources[number] if sources else None
        if source is not None:
            copies[:, number] = source, owned[skipped], first - skipped * page_size
    return PackedHistories(
        token_ids_T=token_ids,
        positions_T=positions,
        kv_slots_T=slots,
        q_start_H1=np.asarray(starts, dtype=np.int32),
        kv_lens_H=np.asarray(lengths, dtype=np.int32),
        page_table_HP=table,
        copies_3H=copies,
    )
