"""Launchers of the normalisers and of the failure flags.

S searches, N packed rows, C codes of the level.
"""

from typing import Any

import torch

from xgr_runtime.hal.ops.beam import BeamRows, LevelTrie

from .beam_kernels import (
    children_logsumexp_kernel,
    flag_failed_kernel,
    flagged_level_logsumexp_kernel,
    level_logsumexp_kernel,
)
from .launch import LaunchRules, next_power_of_two
from .select import TILE_CANDIDATES, level_arrays, most_children, row_arrays

# A row is read in tiles of as many logits: 32 registers a thread of 8 warps.
LOGSUMEXP_TILE = 8192
FLAG_TILE = 1024


def _of_whole_rows(num_codes: int, rules: LaunchRules) -> dict[str, Any]:
    """Tile and options of a kernel that reads rows from end to end, one a program."""
    tile = min(LOGSUMEXP_TILE, next_power_of_two(max(1, num_codes)))
    return {"TILE": tile, **rules.behind, "num_warps": max(1, min(8, tile // 512))}


def launch_level_logsumexp(logits_NC: torch.Tensor, rules: LaunchRules) -> torch.Tensor:
    """See `xgr_runtime.hal.ops.beam.level_logsumexp`; rules: of the device."""
    num_rows, num_codes = logits_NC.shape
    out_N = torch.empty(num_rows, dtype=torch.float32, device=logits_NC.device)
    rules.kernel(level_logsumexp_kernel)[(num_rows,)](
        logits_NC,
        out_N,
        num_codes,
        logits_NC.stride(0),
        logits_NC.stride(1),
        **_of_whole_rows(num_codes, rules),
    )
    return out_N


def launch_flagged_level_logsumexp(
    logits_NC: torch.Tensor,
    rows: BeamRows,
    status_S1: torch.Tensor,
    round: int,
    rules: LaunchRules,
) -> torch.Tensor:
    """See `xgr_runtime.hal.ops.beam.flagged_level_logsumexp`; rules: of the device."""
    num_rows, num_codes = logits_NC.shape
    out_N = torch.empty(num_rows, dtype=torch.float32, device=logits_NC.device)
    rules.kernel(flagged_level_logsumexp_kernel)[(num_rows,)](
        logits_NC,
        out_N,
        rows.scores_N,
        rows.search_of_row_N,
        rows.start_S1,
        status_S1,
        1 + round,
        status_S1.shape[0] - 1,
        num_codes,
        logits_NC.stride(0),
        logits_NC.stride(1),
        FLAG_TILE=FLAG_TILE,
        **_of_whole_rows(num_codes, rules),
    )
    return out_N


def launch_children_logsumexp(
    logits_NC: torch.Tensor,
    parents: BeamRows,
    rule_row_S: torch.Tensor,
    trie: LevelTrie,
    rules: LaunchRules,
) -> torch.Tensor:
    """See `xgr_runtime.hal.ops.beam.children_logsumexp`; rules: of the device."""
    num_rows = logits_NC.shape[0]
    out_N = torch.empty(num_rows, dtype=torch.float32, device=logits_NC.device)
    columns = min(TILE_CANDIDATES, next_power_of_two(max(1, most_children(trie))))
    rows = min(16, TILE_CANDIDATES // columns)
    rules.kernel(children_logsumexp_kernel)[(max(1, -(-num_rows // rows)),)](
        **level_arrays(trie),
        **row_arrays(logits_NC, parents, rule_row_S),
        out_ptr=out_N,
        TILE_ROWS=rows,
        TILE_COLUMNS=columns,
        **rules.behind,
    )
    return out_N


def launch_flag_failed(
    lse_N: torch.Tensor, rows: BeamRows, status_S1: torch.Tensor, round: int, rules: LaunchRules
) -> None:
    """See `xgr_runtime.hal.ops.beam.flag_failed_searches`; rules: of the device."""
    num_searches = status_S1.shape[0] - 1
    rules.kernel(flag_failed_kernel)[(num_searches + 1,)](
        lse_N,
        rows.scores_N,
        rows.start_S1,
        status_S1,
        1 + round,
        rows.scores_N.shape[0],
        num_searches,
        TILE=FLAG_TILE,
        **rules.behind,
    )
