"""Catalogue slots: fixed-capacity device arrays that a captured graph can keep reading while versions change.

A level is laid out densely (one entry per node and code: the precomputed valid-path mask) where the measured fan-out
is a good share of the codes and the table fits a budget, and as CSR children elsewhere. Each rule set is a row of
`alive` bits in the level's own layout. Row 0 is "everything alive"; then come rows for cached rule sets, then one
scratch row per search of the batches in flight, into which a row is copied before a request's exclusions are cleared.

Rows are written while batches run, on the lane that the caller has entered, out of pinned memory: the host waits only where
more is to be written at once than `_STAGED_BYTES` hold. A load has its own lane and waits at its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from xgr_runtime.config import CacheConfig
from xgr_runtime.hal.device import Device
from xgr_runtime.hal.memory import allocate
from xgr_runtime.hal.ops.beam import LevelTrie
from xgr_runtime.hal.pinned_ring import PinnedRing
from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xbeam.rules import RuleSet

_DENSE_LEVELS = 2
_DENSE_MIN_SHARE = 0.125
_DENSE_BYTES_PER_ENTRY = 5
_OPTIONS = "cache.catalog_slots, cache.catalog_headroom, cache.rule_rows or cache.dense_level_bytes"
ALL_ALIVE_ROW = 0
_STAGED_BYTES = 64 * 1024 * 1024  # about 24 rows of a catalogue of a million items
_NUM_INDEXES = 16384  # edges that are cleared at once


@dataclass(frozen=True)
class LevelPlan:
    """Capacities of one level, and whether it is laid out densely."""

    num_codes: int
    is_dense: bool
    num_nodes: int
    num_edges: int
    max_fanout: int

    @property
    def row_length(self) -> int:
        """Entries of an `alive` row; the last one is never alive and absorbs padding."""
        return (self.num_nodes * self.num_codes if self.is_dense else self.num_edges) + 1


@dataclass(frozen=True)
class SlotPlan:
    """The shape of a slot. A slot never changes it, so a graph that read the slot may go on reading it."""

    levels: tuple[LevelPlan, ...]

    def fits(self, catalog: Catalog) -> bool:
        """True when `catalog` can be loaded without changing any address or static size."""
        if catalog.num_levels != len(self.levels) or catalog.num_codes != tuple(
            p.num_codes for p in self.levels
        ):
            return False
        return all(
            len(catalog.offsets[level]) - 1 <= plan.num_nodes
            and len(catalog.codes[level]) <= plan.num_edges
            and catalog.max_fanout[level] <= plan.max_fanout
            for level, plan in enumerate(self.levels)
        )


def mean_fanout_share(catalog: Catalog, level: int) -> float:
    """Children per node of `level`, as a share of the level's codes."""
    num_nodes = len(catalog.offsets[level]) - 1
    return len(catalog.codes[level]) / (num_nodes * catalog.num_codes[level])


def plan_slot(catalog: Catalog, config: CacheConfig) -> SlotPlan:
    """Capacities for `catalog` with the configured head-room, and the dense/CSR switch by measured fan-out."""
    levels = []
    for level, num_codes in enumerate(catalog.num_codes):
        full = len(catalog.offsets[level]) - 1
        num_nodes = 1 if level == 0 else int(full * config.catalog_headroom)
        num_edges = min(
            int(len(catalog.codes[level]) * config.catalog_headroom), num_nodes * num_codes
        )
        fits = num_nodes * num_codes * _DENSE_BYTES_PER_ENTRY <= config.dense_level_bytes
        is_dense = level == 0 or (
            level < _DENSE_LEVELS and fits and mean_fanout_share(catalog, level) >= _DENSE_MIN_SHARE
        )
        max_fanout = min(int(catalog.max_fanout[level] * config.catalog_headroom), num_codes)
        levels.append(LevelPlan(num_codes, is_dense, num_nodes, num_edges, max_fanout))
    return SlotPlan(tuple(levels))


class CatalogSlot:
    """Device arrays of one catalogue version, at fixed addresses.

    levels[l] is the trie of level l; token_of[l] int64 [C] maps a code to a token (0 for codes without one: they are
    never selected). Rows of `alive`: 0 all alive, 1 .. num_rule_rows - 1 cached rule sets, then scratch rows.
    Rows are written and cleared by one thread; `load` may be called from another.
    """

    def __init__(
        self, plan: SlotPlan, device: Device, num_rule_rows: int, num_scratch_rows: int
    ) -> None:
        self.plan = plan
        self.num_rule_rows = num_rule_rows
        self._device = device
        self._num_rows = num_rule_rows + num_scratch_rows
        self.levels = tuple(self._allocate(level) for level in plan.levels)
        self.token_of = tuple(self._zeros((level.num_codes,), torch.int64) for level in plan.levels)
        self._dense_positions: list[npt.NDArray[np.int64] | None] = [None] * len(plan.levels)
        self._index = self._zeros((_NUM_INDEXES,), torch.int64)
        row_bytes = sum(level.row_length + 64 for level in plan.levels)
        staged = min(_STAGED_BYTES, num_scratch_rows * row_bytes)
        self._ring = PinnedRing(
            device,
            max(2 * row_bytes, staged) + 4 * self._index.nbytes,
            what="rows of rule sets",
            lower=_OPTIONS,
        )
        self.catalog: Catalog | None = None

    @property
    def nbytes(self) -> int:
        """Device bytes of the slot's arrays."""
        tensors = [
            t
            for level in self.levels
            for t in (level.offsets, level.codes, level.child_node, level.alive_RE)
        ]
        return sum(t.nbytes for t in (*tensors, *self.token_of) if t is not None)

    def scratch_row(self, index: int) -> int:
        """The row of the scratch space for search number `index` of all batches in flight."""
        row = self.num_rule_rows + index
        assert row < self._num_rows, (row, self._num_rows)
        return row

    def load(self, catalog: Catalog) -> None:
        """Fill the slot from a verified catalogue that the plan fits; waits until the device has it.

        Also when it fails half-way: a copy that is still to come would write into whatever has the slot's memory by then.
        """
        assert catalog.is_verified, catalog.path
        assert self.plan.fits(catalog), catalog.path
        with self._device.on("loads"):
            try:
                self._fill(catalog)
            finally:
                self._device.record_event().wait()
        self.catalog = catalog

    def _fill(self, catalog: Catalog) -> None:
        for level, plan in enumerate(self.plan.levels):
            trie = self.levels[level]
            offsets, codes = catalog.offsets[level], catalog.codes[level]
            if plan.is_dense:
                assert trie.child_node is not None
                dense = _dense_positions(offsets, codes, plan.num_codes)
                self._dense_positions[level] = dense
                table = np.full(trie.child_node.numel(), -1, dtype=np.int32)
                table[dense] = np.arange(len(codes), dtype=np.int32)
                self._put(trie.child_node, table)
            else:
                assert trie.offsets is not None
                assert trie.codes is not None
                padded = np.full(trie.offsets.numel(), offsets[-1], dtype=np.int64)
                padded[: len(offsets)] = offsets
                self._put(trie.offsets, padded)
                self._put(trie.codes[: len(codes)], codes.astype(np.int32))
            tokens = np.maximum(catalog.token_of[level], 0).astype(np.int64)
            self._put(self.token_of[level], tokens)
            self.write_alive(ALL_ALIVE_ROW, level, np.ones(len(codes), dtype=bool))

    def free(self) -> None:
        """Let go of the device arrays, whoever still holds the slot. It cannot be used afterwards."""
        self.levels, self.token_of, self.catalog = (), (), None
        self._dense_positions = []

    def write_alive(self, row: int, level: int, alive: npt.NDArray[np.bool_]) -> None:
        """Write the bits of the level's edges (CSR order) into `row`, out of memory of its own."""
        target = self.levels[level].alive_RE[row]
        line = np.empty(target.numel(), dtype=bool)
        self._lay_out(line, level, alive)
        self._put(target, line)

    def write_rule_set(self, row: int, rule_set: RuleSet) -> None:
        """Issue the copies of a rule set into `row` (not row 0)."""
        assert 0 < row < self._num_rows, row
        for level, alive in enumerate(rule_set.alive):
            target = self.levels[level].alive_RE[row]
            piece = self._ring.take(target.numel())
            self._lay_out(piece.array.view(bool), level, alive)
            self._device.copy(target, piece.tensor.view(torch.bool))
        self._ring.issued()

    def copy_row(self, source: int, target: int) -> None:
        """Issue the copies of row to row on the device."""
        for level in self.levels:
            self._device.copy(level.alive_RE[target], level.alive_RE[source])

    def clear(self, row: int, edges: Sequence[npt.NDArray[np.integer]]) -> None:
        """Issue the clearing of the given edges (CSR positions per level) of `row`."""
        for level, cleared in enumerate(edges):
            dense = self._dense_positions[level]
            for start in range(0, len(cleared), _NUM_INDEXES):
                some = cleared[start : start + _NUM_INDEXES]
                piece = self._ring.take(8 * len(some))
                piece.array.view(np.int64)[:] = some if dense is None else dense[some]
                # One lane uses the one buffer: a copy into it comes after the fill before.
                index = self._index[: len(some)]
                self._device.copy(index, piece.tensor.view(torch.int64))
                self.levels[level].alive_RE[row].index_fill_(0, index, False)
        self._ring.issued()

    def _lay_out(
        self, line: npt.NDArray[np.bool_], level: int, alive: npt.NDArray[np.bool_]
    ) -> None:
        """Make `line` a row of the level's layout, with the bits of its edges (CSR order)."""
        dense = self._dense_positions[level]
        if dense is None:
            line[: len(alive)] = alive
            line[len(alive) :] = False
        else:
            line[:] = False
            line[dense] = alive

    def describe(self) -> list[dict[str, object]]:
        """Per level: layout, measured mean fan-out share, largest fan-out, nodes and edges."""
        assert self.catalog is not None
        return [
            {
                "level": level,
                "layout": "dense" if plan.is_dense else "csr",
                "mean_fanout_share": round(mean_fanout_share(self.catalog, level), 6),
                "max_fanout": int(self.catalog.max_fanout[level]),
                "num_nodes": len(self.catalog.offsets[level]) - 1,
                "num_edges": len(self.catalog.codes[level]),
            }
            for level, plan in enumerate(self.plan.levels)
        ]

    def _put(self, target: torch.Tensor, source: npt.NDArray[np.generic]) -> None:
        self._device.copy(target, torch.from_numpy(np.require(source, requirements=["C", "W"])))

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return allocate(
            shape,
            dtype,
            self._device.torch_device,
            what="a slot of a catalogue",
            lower=_OPTIONS,
        )

    def _allocate(self, plan: LevelPlan) -> LevelTrie:
        alive = self._zeros((self._num_rows, plan.row_length), torch.bool)
        if plan.is_dense:
            child_node = self._zeros((plan.num_nodes * plan.num_codes,), torch.int32)
            return LevelTrie(plan.num_codes, plan.max_fanout, True, None, None, child_node, alive)
        wide = torch.int64 if plan.num_edges >= 2**31 else torch.int32
        offsets = self._zeros((plan.num_nodes + 1,), wide)
        return LevelTrie(
            plan.num_codes,
            plan.max_fanout,
            False,
            offsets,
            self._zeros((plan.num_edges,), torch.int32),
            None,
            alive,
        )


def _dense_positions(
    offsets: npt.NDArray[np.integer], codes: npt.NDArray[np.integer], num_codes: int
) -> npt.NDArray[np.int64]:
    """Position node * num_codes + code of every edge."""
    nodes = np.repeat(np.arange(len(offsets) - 1, dtype=np.int64), np.diff(offsets))
    return nodes * num_codes + codes.astype(np.int64)
