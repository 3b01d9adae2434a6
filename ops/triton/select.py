"""Launchers of the kernels that select beams: tile sizes from host numbers alone, a bounded workspace, one to five launches.

A start costs time whatever the kernel does, so few candidates are one kernel's (`few_tiles`), few groups need no kernel for the
threshold, and lists that hold whatever there may be are not made anew.

Workspace: GROUPS keys of 4 bytes for each stretch of a row, at most one for 8 children of a short row or 128 of a long
one; SEGMENTS lists of W + ROOM_BESIDES_WIDTH entries of 12 bytes a search. Lists with room for every candidate of the round have
up to W + LARGEST_ROOM entries each, while what they have beside W is no more than ROOM_OF_SEARCHES in one list of all searches.
Nothing grows with rows x codes beyond that.

S searches, N packed parent rows, M packed child rows, C codes of the level.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from xgr_runtime.hal.ops.beam import BeamRows, LevelTrie

from .candidate_kernels import LAST_PLACE
from .launch import LaunchRules, next_power_of_two
from .select_few_kernels import select_few_kernel
from .select_kernels import collect_kernel, group_bests_kernel
from .select_rank_kernels import rank_kernel, stream_kernel
from .threshold_kernels import threshold_kernel

SEGMENTS = 8
# Entries of a list beside W. A tile of one row may have no more columns: a full list is cut to W, then takes a tile.
ROOM_BESIDES_WIDTH = 1024
TILE_CANDIDATES = 1024
# Programs that fill a device and still are one wave or two.
PROGRAMS_WANTED = 512
# A tile has rows beside the first only where as many tiles are left: few rows would wait for each other's children.
LEAST_PROGRAMS = 128
# Groups of a search for each of its W beams: more make the threshold tighter and take longer to search.
GROUPS_FOR_A_BEAM = 4
# Programs of a search that count its rows while others rank.
COUNTERS = 8
# Candidates of a round, gaps among them included, that each program of one kernel holds, 16 a thread: of several rows, and of one.
# On an H200, the selection alone, in one kernel and by lists, us: 128 rows of 4 children 4.7 and 7.3; 512 12.2 and 8.8; 8 x 128
# 18.8 and 9.0; one row of 8,192 children for 128 beams 10.8 and 10.0, for 512 17.1 and 17.7. Beside lists as they were before they
# started early: 256 rows 7.1 and 11.3, 8 x 256 44.9 and 14.3.
FEW_CANDIDATES, FEW_OF_ONE_ROW = 1024, 8192
FEW_OF_A_WARP, MOST_FEW_WARPS = 512, 16
# Programs of a search that share their ranks, and of all searches: each scores all candidates of its search.
LEAST_FEW_PROGRAMS, FEW_PROGRAMS, MOST_FEW_PROGRAMS = 8, 128, 512
# Groups of a search whose bests each program that lists candidates reads, to find the threshold itself. On an H200, with that and
# with a kernel for it, us: a search of 128 beams, third round, 7.3 and 7.9; 8 of them 9.0 and 9.2. Of 8 searches of 256 beams, 2,048
# groups, the second round took 60 and 35 (`tools/bench_engine.py` at 839c4c6 and 19656f0).
OWN_THRESHOLD_TILE = 1024
# Entries beside W of a list that has room for every candidate: were all equal, all would be ranked, one against each other.
LARGEST_ROOM = 8192
# Likewise of one list of each search together. A search may have all candidates, so that all searches have that room each.
ROOM_OF_SEARCHES = 4 * LARGEST_ROOM


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
    while rows > 1 and -(-num_rows // rows) < LEAST_PROGRAMS:
        rows //= 2
    if stretches > 1:
        rows = 1
    programs = -(-num_rows // rows)
    parts = max(1, min(stretches, PROGRAMS_WANTED // programs))
    wanted = GROUPS_FOR_A_BEAM * num_children // (num_rows * stretches)
    least = columns // 32 if stretches == 1 else columns // 128
    groups = min(columns, max(8, least, next_power_of_two(max(1, wanted))))
    return SelectionTiles(rows, columns, stretches, parts, groups)


def few_tiles(num_rows: int, num_searches: int, fanout: int) -> dict[str, int] | None:
    """Sizes of the one kernel of a round of few candidates, or None where there are more. A search may have all rows."""
    rows, columns = next_power_of_two(max(1, num_rows)), next_power_of_two(max(1, fanout))
    if rows * columns > (FEW_OF_ONE_ROW if rows == 1 else FEW_CANDIDATES):
        return None
    share = MOST_FEW_PROGRAMS // next_power_of_two(max(1, num_searches))
    programs = max(LEAST_FEW_PROGRAMS, min(FEW_PROGRAMS, share))
    return {
        "TILE_ROWS": rows,
        "TILE_COLUMNS": columns,
        "PROGRAMS": min(programs, rows * columns),
        "DEAD_ROWS": 128,
    }


def room_of_all(tiles: SelectionTiles, num_rows: int, num_searches: int, fanout: int) -> int | None:
    """Room of a list for every candidate that may be put there, where that is little for all searches, or None.

    Tiles take lists in turn.
    """
    if tiles.stretches > 1:
        return None
    num_tiles = -(-num_rows // tiles.rows)
    most = -(-num_tiles // SEGMENTS) * tiles.rows * fanout
    if most > LARGEST_ROOM:
        return None
    if most <= ROOM_BESIDES_WIDTH:
        return ROOM_BESIDES_WIDTH
    room = next_power_of_two(most)
    return room if num_searches * room <= ROOM_OF_SEARCHES else None


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
    num_rows, num_searches = logits_NC.shape[0], rule_row_S.shape[0]
    given: dict[str, Any] = {
        **level_arrays(trie),
        **row_arrays(logits_NC, parents, rule_row_S),
        "lse_ptr": lse_N,
        "child_ptr": trie.alive_RE.view(torch.uint8)
        if trie.child_node is None
        else trie.child_node,
        "parent_start_ptr": parents.start_S1,
        "child_start_ptr": children.start_S1,
        "child_search_ptr": children.search_of_row_N,
        "counters_ptr": counters,
        "score_out_ptr": children.scores_N,
        "node_out_ptr": children.nodes_N,
        "parent_out_ptr": children.parents_N,
        "code_out_ptr": children.codes_N,
        "num_children": children.scores_N.shape[0],
    }
    few = few_tiles(num_rows, num_searches, most_children(trie))
    if few is None:
        _launch_by_lists(given, most_children(trie), logits_NC.device, rules)
    else:
        warps = few["TILE_ROWS"] * few["TILE_COLUMNS"] // FEW_OF_A_WARP
        warps = max(4, min(MOST_FEW_WARPS, warps))
        options = {**rules.options, "num_warps": warps}
        _start(
            rules.kernel(select_few_kernel),
            num_searches * few["PROGRAMS"],
            {**given, **few},
            options,
        )


def _launch_by_lists(
    given: Mapping[str, Any], fanout: int, device: torch.device, rules: LaunchRules
) -> None:
    """Bests of groups, thresholds, lists of what reaches them, ranks. given: the arguments of these kernels but for scratch."""
    num_rows, num_children, num_searches = (
        given[name] for name in ("num_rows", "num_children", "num_searches")
    )
    tiles = selection_tiles(num_rows, num_children, fanout)
    programs = max(1, -(-num_rows // tiles.rows)) * tiles.parts
    room = room_of_all(tiles, num_rows, num_searches, fanout)
    beside = ROOM_BESIDES_WIDTH if room is None else room
    num_listed = SEGMENTS * (num_children + num_searches * beside)
    num_lists = SEGMENTS * num_searches
    counts = torch.empty(2 * num_lists + num_searches, dtype=torch.int32, device=device)
    count, final_count = counts[:num_lists], counts[num_lists : 2 * num_lists]
    least_tile = next_power_of_two(max(1, num_rows * tiles.bests // max(1, num_searches)))
    is_threshold_own = least_tile <= OWN_THRESHOLD_TILE
    count_bests = next_power_of_two(min(tiles.bests, 64))
    given = {
        **given,
        "best_ptr": torch.empty(num_rows * tiles.bests, dtype=torch.int32, device=device),
        "threshold_ptr": counts[2 * num_lists :],
        "count_ptr": count,
        "final_count_ptr": count if room is not None else final_count,
        "entry_ptr": torch.empty(num_listed, dtype=torch.int64, device=device),
        "entry_node_ptr": torch.empty(num_listed, dtype=torch.int32, device=device),
        "num_counts": counts.numel(),
        "TILE_ROWS": tiles.rows,
        "TILE_COLUMNS": tiles.columns,
        "STRETCHES": tiles.stretches,
        "PARTS": tiles.parts,
        "GROUPS": tiles.groups,
        "BESTS": tiles.bests,
        "DEAD_ROWS": next_power_of_two(max(1, -(-num_children // programs))),
        "COUNTS": next_power_of_two(max(1, -(-counts.numel() // programs))),
        "THRESHOLD_TILE": least_tile if is_threshold_own else 0,
        "SEGMENTS": SEGMENTS,
        "ROOM_BESIDES_WIDTH": beside,
        "COUNTERS": COUNTERS,
        "COUNT_ROWS": max(1, 2048 // count_bests),
        "COUNT_BESTS": count_bests,
    }
    _start(rules.kernel(group_bests_kernel), programs, given, rules.options)
    if not is_threshold_own:
        tile = min(16384, least_tile)
        options = {**rules.behind, "num_warps": max(4, min(16, tile // 512))}
        _start(rules.kernel(threshold_kernel), num_searches, {**given, "TILE": tile}, options)
    _start(rules.kernel(collect_kernel), programs, given, rules.behind)
    if room is None:
        _start(rules.kernel(stream_kernel), num_searches * SEGMENTS, given, rules.behind)
    ranks = rank_tiles(num_children, num_searches)
    rank_programs = num_searches * (ranks["PROGRAMS"] + COUNTERS)
    _start(rules.kernel(rank_kernel), rank_programs, {**given, **ranks}, rules.behind)


def _start(
    kernel: Any, num_programs: int, given: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Start a kernel with those of the arguments that it has."""
    kernel[(num_programs,)](
        **{name: given[name] for name in kernel.arg_names if name in given}, **options
    )
