"""Two ranks of a model, each with half of the heads and of the feed-forward layer, compute what one rank computes."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.models.tiny import CPU, REFERENCE_OPS, PackedBatch, make_checkpoint
from xgr_runtime.errors import CheckpointError
from xgr_runtime.models.layers.parallel import ParallelContext
from xgr_runtime.models.registry import load_model

HISTORIES = [[3, 1, 4, 1, 5], [9, 2]]
TOKENS = [[11, 12], [13]]
TIMEOUT_S = 120.0


class ThreadSum:
    """Sums over ranks that are threads, in rank order."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._parts: list[torch.Tensor | None] = [None] * size

    def of_rank(self, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
            self._parts[rank] = x
            self._barrier.wait(TIMEOUT_S)
            total = torch.stack([part for part in self._parts if part is not None]).sum(0)
            self._barrier.wait(TIMEOUT_S)
            return total

        return sum_over_ranks


def run(folder: Path, parallel: ParallelContext) -> list[torch.Tensor]:
    model = load_model(folder, CPU, torch.float32, parallel)
    batch = PackedBatch(model, HISTORIES)
    context = model.context(REFERENCE_OPS, batch.context_inputs(), batch.kv)
    assert context is not None
    slots = torch.tensor([2, 0, 1])
    step = model.step(REFERENCE_OPS, batch.step_inputs(TOKENS, slots, 1), batch.kv)
    return [context[:2], step[:3], batch.kv.shared.k_pages(1)[batch.page_table[0, 0].long()]]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_two_ranks_equal_one(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family, head_dim=16, attention_bias=True)
    expected = run(tmp_path, ParallelContext())
    sums, results = ThreadSum(2), dict[int, list[torch.Tensor]]()

    def rank_main(rank: int) -> None:
        results[rank] = run(tmp_path, ParallelContext(rank, 2, sums.of_rank(rank)))

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert sorted(results) == [0, 1]
    for rank in range(2):
        for got, want in zip(results[rank][:2], expected[:2], strict=True):
            torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    keys = torch.cat([results[rank][2] for rank in range(2)], dim=1)
    torch.testing.assert_close(keys, expected[2], atol=2e-5, rtol=2e-5)


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", num_heads=4, num_kv_heads=2, head_dim=3 * 2)
    sums = ThreadSum(4)
    with pytest.raises(CheckpointError, match=r"num_key_value_heads \(2\).* got 4 ranks"):
        load_model(tmp_path, CPU, torch.float32, ParallelContext(0, 4, sums.of_rank(0)))
