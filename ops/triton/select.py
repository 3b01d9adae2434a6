"""Launchers of the kernels that select beams: tile sizes from host numbers alone, a bounded workspace, five launches.

Workspace: GROUPS keys of 4 bytes for each stretch of a row, at most one for 8 children of a short row or 128 of a long
one; SEGMENTS lists of W + ROOM_BESIDES_WIDTH entries of 12 bytes a search. Nothing grows with rows x codes beyond that.

S searches, N packed parent rows, M packed child rows, C codes of the level.
"""

from dataclasses import dataclass
from typing import Any

import torch

from xgr_runtime.hal.ops.beam import BeamRows, LevelTrie

from .launch import LaunchRules, next_power_of_two
from .select_kernels import LAST_PLACE, collect_kernel, group_bests_kernel, threshold_kernel
from .select_rank_kernels import rank_kernel, stream_kernel

SEGMENTS = 8
# Entries of a list beside W. A tile of one row may have no more columns: a full list is cut to W, then takes a tile.
ROOM_BESIDES_WIDTH = 1024
TILE_CANDIDATES = 1024
# Programs that fill a device and still are one wave or two.
PROGRAMS_WANTED = 512
# Groups of a search for each of its W beams: more make the threshold tighter and take longer to search.
GROUPS_FOR_A_BEAM = 4
# Programs of a search that count its rows while others rank.
COUNTERS = 8


@dataclass(frozen=True)
class SelectionTiles:
    """How candidates are cut: rows x columns of a tile, stretches of a row, programs that share them, groups of one."""

    rows: int
    columns: int
    stretches: int
    parts: int
    groups: int

    @property
    def bests(self) -> int:
        """Keys that a row keeps."""
        return self.stretches * self.groups


def selection_tiles(num_rows: int, num_children: int, fanout: int) -> SelectionTiles:
    """Tiles for a round of that many packed rows, none with more than `fanout` children."""
    num_rows, fanout = max(1, num_rows), max(1, fanout)
    columns = min(next_power_of_two(fanout), TILE_CANDIDATES)
    if num_rows * -(-fanout // columns) < PROGRAMS_WANTED // 4:
        columns = min(columns, TILE_CANDIDATES // 4)
    stretches = -(-fanout // columns)
    rows = max(1, min(16, TILE_CANDIDATES // columns, next_power_of_two(num_rows)))
    if stretches > 1:
        rows = 1
    programs = -(-num_rows // rows)
    parts = max(1, min(stretches, PROGRAMS_WANTED // programs))
    wanted = GROUPS_FOR_A_BEAM * num_children // (num_rows * stretches)
    least = columns // 32 if stretches == 1 else columns // 128
    groups = min(columns, max(8, least, next_power_of_two(max(1, wanted))))
    return SelectionTiles(rows, columns, stretches, parts, groups)


def rank_tiles(num_children: int, num_searches: int) -> dict[str, int]:
    """Programs that rank a search's entries (about 1.2 a beam), entries of a program, entries it holds beside them."""
    each = next_power_of_two(max(1, num_children // max(1, num_searches)))
    tile = 8 if each <= 1024 else 32
    programs = max(8, min(1024, 2 * each // tile))
    return {"PROGRAMS": programs, "TILE": tile, "OTHERS": max(128, min(1024, 2 * each))}


def level_arrays(trie: LevelTrie) -> dict[str, Any]:
    """The arrays of a level by the kernels' names; those that its layout lacks are stood in for and never read."""
    alive_RE = trie.alive_RE.view(torch.uint8)
    return {
        "offset_ptr": alive_RE if trie.offsets is None else trie.offsets,
        "code_ptr": alive_RE if trie.codes is None else trie.codes,
        "alive_ptr": alive_RE,
        "num_codes": trie.num_codes,
        "alive_row_stride": alive_RE.stride(0),
        "IS_DENSE": trie.is_dense,
    }


def row_arrays(
    logits_NC: torch.Tensor, parents: BeamRows, rule_row_S: torch.Tensor
) -> dict[str, Any]:
    """The arrays of the rows to expand by the kernels' names."""
    return {
        "logit_ptr": logits_NC,
        "logit_row_stride": logits_NC.stride(0),
        "logit_column_stride": logits_NC.stride(1),
        "score_ptr": parents.scores_N,
        "node_ptr": parents.nodes_N,
        "search_ptr": parents.search_of_row_N,
        "rule_ptr": rule_row_S,
        "num_rows": logits_NC.shape[0],
        "num_searches": rule_row_S.shape[0],
    }


def most_children(trie: LevelTrie) -> int:
    """Columns that the widest row of a level may have."""
    return trie.num_codes if trie.is_dense else trie.max_fanout


def launch_select_beams(
    logits_NC: torch.Tensor,
    lse_N: torch.Tensor,
    parents: BeamRows,
    rule_row_S: torch.Tensor,
    trie: LevelTrie,
    children: BeamRows,
    counters: torch.Tensor,
    rules: LaunchRules,
) -> None:
    """See `xgr_runtime.hal.ops.beam.select_beams`; rules: of the device.

    Raises:
        ValueError: more rows x codes than places of an entry.
    """
    if logits_NC.shape[0] * trie.num_codes > LAST_PLACE.value + 1:
        raise ValueError(
            f"rows x codes must be at most {LAST_PLACE.value + 1}, got "
            f"{logits_NC.shape[0]} x {trie.num_codes}"
        )
    num_rows, num_children = logits_NC.shape[0], children.scores_N.shape[0]
    num_searches, device = rule_row_S.shape[0], logits_NC.device
    tiles = selection_tiles(num_rows, num_children, most_children(trie))
    cut = {"TILE_COLUMNS": tiles.columns, "STRETCHES": tiles.stretches, "GROUPS": tiles.groups}
    shares = {"TILE_ROWS": tiles.rows, "PARTS": tiles.parts}
    lists = {"SEGMENTS": SEGMENTS, "ROOM_BESIDES_WIDTH": ROOM_BESIDES_WIDTH}
    room = SEGMENTS * (num_children + num_searches * ROOM_BESIDES_WIDTH)
    bests = torch.empty(num_rows * tiles.bests, dtype=torch.int32, device=device)
    threshold = torch.empty(num_searches, dtype=torch.int32, device=device)
    counts = torch.empty((2, num_searches * SEGMENTS), dtype=torch.int32, device=device)
    count, final_count = counts[0], counts[1]
    entries = torch.empty(room, dtype=torch.int64, device=device)
    entry_nodes = torch.empty(room, dtype=torch.int32, device=device)
    listed = {"entry_ptr": entries, "entry_node_ptr": entry_nodes}
    starts = {"parent_start_ptr": parents.start_S1, "child_start_ptr": children.start_S1}
    bounds = {"best_ptr": bests, "threshold_ptr": threshold}
    written = {
        "score_out_ptr": children.scores_N,
        "node_out_ptr": children.nodes_N,
        "parent_out_ptr": children.parents_N,
        "code_out_ptr": children.codes_N,
    }
    level = {**level_arrays(trie), **row_arrays(logits_NC, parents, rule_row_S), "lse_ptr": lse_N}
    child = {"child_ptr": level["alive_ptr"] if trie.child_node is None else trie.child_node}
    programs = max(1, -(-num_rows // tiles.rows)) * tiles.parts
    group_bests_kernel[(programs,)](
        **level,
        best_ptr=bests,
        parent_start_ptr=parents.start_S1,
        child_search_ptr=children.search_of_row_N,
        **written,
        num_children=num_children,
        **cut,
        **shares,
        DEAD_ROWS=next_power_of_two(max(1, -(-num_children // programs))),
        **rules.options,
    )
    bests_each = num_rows * tiles.bests // max(1, num_searches)
    threshold_tile = min(16384, next_power_of_two(max(1, bests_each)))
    threshold_kernel[(num_searches,)](
        **bounds,
        **starts,
        count_ptr=count,
        BESTS=tiles.bests,
        SEGMENTS=SEGMENTS,
        TILE=threshold_tile,
        **{**rules.options, "num_warps": max(4, min(16, threshold_tile // 512))},
    )
    collect_kernel[(programs,)](
        **level,
        **child,
        **bounds,
        child_start_ptr=children.start_S1,
        count_ptr=count,
        **listed,
        **cut,
        **shares,
        **lists,
        **rules.options,
    )
    stream_kernel[(num_searches * SEGMENTS,)](
        **level,
        **child,
        **bounds,
        **starts,
        count_ptr=count,
        final_count_ptr=final_count,
        **listed,
        **cut,
        **lists,
        **rules.options,
    )
    ranks = rank_tiles(num_children, num_searches)
    count_bests = next_power_of_two(min(tiles.bests, 64))
    rank_kernel[(num_searches * (ranks["PROGRAMS"] + COUNTERS),)](
        **bounds,
        score_ptr=parents.scores_N,
        **starts,
        final_count_ptr=final_count,
        **listed,
        counters_ptr=counters,
        **written,
        num_codes=trie.num_codes,
        **lists,
        **ranks,
        COUNTERS=COUNTERS,
        BESTS=tiles.bests,
        COUNT_ROWS=max(1, 2048 // count_bests),
        COUNT_BESTS=count_bests,
        **rules.options,
    )
