"""What a selection by lists asks for: memory that does not grow with searches times candidates, and no kernel without need.

Nothing is started: what stands for the kernels notes their arguments.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from math import ceil
from typing import Any

import pytest
import torch

from xgr_runtime.hal.ops.beam import BeamRows, LevelTrie

ENTRY_BYTES = 12
KERNELS = ("group_bests", "threshold", "collect", "stream", "rank", "select_few")


class Noted:
    """Stands for a kernel and keeps what it would have been started with."""

    def __init__(self, kernel: Any, started: dict[str, dict[str, Any]]) -> None:
        self.arg_names, self.__name__, self._started = kernel.arg_names, kernel.__name__, started

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda **given: self._started.update({self.__name__: given})


def started_for(num_rows: int, num_searches: int, num_children: int, fanout: int) -> dict[str, Any]:
    """Arguments of each kernel of a selection by the kernel's name."""
    select = import_module("xgr_ops.triton.select")
    started: dict[str, dict[str, Any]] = {}
    kernels = [getattr(select, f"{name}_kernel") for name in KERNELS]
    early = {kernel.__name__: Noted(kernel, started) for kernel in kernels}
    rules = replace(import_module("xgr_ops.cuda.launch_rules").RULES, early=early)

    def rows(count: int) -> BeamRows:
        index = torch.zeros(1, dtype=torch.int32)
        of_rows, starts = index.expand(count), index.expand(num_searches + 1)
        return BeamRows(torch.zeros(1).expand(count), of_rows, of_rows, of_rows, starts, of_rows)

    edges = torch.zeros(1, dtype=torch.int32)
    trie = LevelTrie(8192, fanout, False, edges, edges, None, torch.zeros(1, 1, dtype=torch.bool))
    logits_NC, lse_N = torch.zeros(1, 1).expand(num_rows, 8192), torch.zeros(1).expand(num_rows)
    rule_S, counters = edges.expand(num_searches), torch.zeros(2, dtype=torch.int64)
    arrays = (logits_NC, lse_N, rows(num_rows), rule_S, trie, rows(num_children), counters)
    select.launch_select_beams(*arrays, rules)
    return started


def list_bytes(collect: dict[str, Any]) -> int:
    return sum(collect[name].nbytes for name in ("entry_ptr", "entry_node_ptr"))


@pytest.mark.triton
@pytest.mark.parametrize(
    ("num_rows", "num_searches", "fanout"),
    [
        (32_768, 64, 2),
        (32_768, 512, 2),
        (4096, 64, 16),
        (16_384, 256, 4),
        (8192, 512, 8),
        (4096, 8, 8),
        (2048, 1, 32),
        (512, 1, 225),
    ],
)
def test_memory_of_lists_is_bounded_whatever_the_number_of_searches(
    num_rows: int, num_searches: int, fanout: int
) -> None:
    """Twelve bytes an entry: a width and ROOM_BESIDES_WIDTH in each of a search's eight lists, and at most three MB beyond."""
    started = started_for(num_rows, num_searches, num_rows, fanout)
    least = 8 * ENTRY_BYTES * (num_rows + num_searches * 1024)
    assert least <= list_bytes(started["collect_kernel"]) <= least + 8 * ENTRY_BYTES * 32_768


@pytest.mark.triton
@pytest.mark.parametrize(
    ("num_rows", "num_searches", "fanout", "has_room"),
    [
        (4096, 8, 4, True),
        (4096, 8, 8, True),
        (8192, 4, 8, True),
        (8192, 8, 8, False),  # room for each search's all: 64 Ki entries
        (2500, 500, 3, True),  # no more than there is anyway
        (4096, 1, 32, False),  # more candidates than are ranked at once
        (512, 1, 225, False),
    ],
)
def test_lists_are_made_anew_only_where_they_may_be_too_short(
    num_rows: int, num_searches: int, fanout: int, has_room: bool
) -> None:
    """A list that has room for its share of all candidates, an eighth in whole tiles, cannot be: nothing is started for that."""
    started = started_for(num_rows, num_searches, num_rows, fanout)
    collect = started["collect_kernel"]
    tile_rows = collect["TILE_ROWS"]
    share = ceil(ceil(num_rows / tile_rows) / 8) * tile_rows * fanout
    assert ("stream_kernel" not in started) == has_room
    assert not has_room or collect["ROOM_BESIDES_WIDTH"] >= share
    final = started["rank_kernel"]["final_count_ptr"].data_ptr()
    assert (final == collect["count_ptr"].data_ptr()) == has_room
    room = collect["ROOM_BESIDES_WIDTH"]
    assert collect["entry_ptr"].numel() == 8 * (num_rows + num_searches * room)


@pytest.mark.triton
@pytest.mark.parametrize(
    ("num_rows", "num_searches", "fanout", "is_few"),
    [
        (1, 1, 8192, True),
        (1, 1, 8193, False),
        (2, 2, 8192, False),
        (128, 1, 4, True),
        (256, 1, 3, True),  # 4 with the gap
        (257, 1, 3, False),
        (512, 1, 4, False),
        (1024, 8, 4, False),
    ],
)
def test_few_candidates_are_one_kernels(
    num_rows: int, num_searches: int, fanout: int, is_few: bool
) -> None:
    started = started_for(num_rows, num_searches, num_rows, fanout)
    assert set(started) == {"select_few_kernel"} or not is_few
    assert ("select_few_kernel" in started) == is_few
