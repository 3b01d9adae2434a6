"""The Ascend normalisers of a round and the failing of searches: NaN, infinities, extreme logits, dead rows."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from xgr_ops.ascend.beam import (
    children_logsumexp_aten,
    flag_failed_searches_aten,
    level_logsumexp_aten,
)

from tests.ascend.beam_rounds import single
from tests.ops.beam_cases import DEAD, INF, NAN, empty_rows, oracle_lse
from xgr_runtime.hal.tolerances import TOLERANCES

ROWS = {
    "plain": [1.0, 2.0, 3.0],
    "large": [3e38, -3e38, 3e38],
    "tiny": [-3e38, -3e38, -3e38],
    "one left": [DEAD, -5.0, DEAD],
    "nothing left": [DEAD, DEAD, DEAD],
    "NaN": [1.0, NAN, INF],
    "infinite": [INF, 1.0, DEAD],
}


@pytest.mark.parametrize("name", ROWS)
def test_logsumexp_of_special_values(name: str) -> None:
    want = torch.tensor([oracle_lse(ROWS[name])], dtype=torch.float32)
    row = torch.tensor([ROWS[name]])
    case = single([ROWS[name]])
    tolerance = TOLERANCES[torch.float32]
    for got in (
        level_logsumexp_aten(row),
        children_logsumexp_aten(row, case.parent_rows(), case.rules(), case.csr()),
        children_logsumexp_aten(row, case.parent_rows(), case.rules(), case.dense()),
    ):
        torch.testing.assert_close(
            got, want, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True
        )


def test_children_logsumexp_reads_living_children_alone() -> None:
    case = single([[1.0, NAN, 2.0], [INF, 0.5, 0.5]], alive=[[True, False, True]])
    rows = (case.parent_rows(), case.rules(), case.csr())
    got = children_logsumexp_aten(torch.from_numpy(case.logits), *rows).tolist()
    assert got == [pytest.approx(oracle_lse([1.0, 2.0])), INF]
    dead = dataclasses.replace(case, parents=[DEAD, 0.0])
    got_dead = children_logsumexp_aten(torch.from_numpy(case.logits), dead.parent_rows(), *rows[1:])
    assert got_dead.tolist() == [DEAD, INF]


def test_a_bad_normaliser_fails_its_search_alone_and_names_the_round() -> None:
    rows = empty_rows([2, 2, 1, 1], 1)
    rows.scores_N.copy_(torch.tensor([0.0, DEAD, -1.0, -2.0, 0.0, DEAD, 0.0]))
    status = torch.tensor([0, 0, 4, 0, 0], dtype=torch.int32)
    lse_N = torch.tensor([1.0, NAN, 1.0, INF, 1.0, NAN, NAN])
    flag_failed_searches_aten(lse_N, rows, status, 2)
    assert status.tolist() == [0, 3, 4, 0, 0]
    assert rows.scores_N.tolist() == [0.0, DEAD, DEAD, DEAD, DEAD, DEAD, 0.0]
