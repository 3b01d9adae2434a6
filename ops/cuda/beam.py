"""Beam selection, normalisers and failure flags: exact, of a fixed number of launches, nothing read by the host."""

from typing import TYPE_CHECKING

from xgr_runtime.hal.ops.beam import (
    BeamRows,
    LevelTrie,
    children_logsumexp,
    flag_failed_searches,
    flagged_level_logsumexp,
    level_logsumexp,
    select_beams,
)
from xgr_runtime.hal.registry import impl

from ..triton.beam import (
    launch_children_logsumexp,
    launch_flag_failed,
    launch_flagged_level_logsumexp,
    launch_level_logsumexp,
)
from ..triton.select import launch_select_beams
from .launch_rules import RULES

if TYPE_CHECKING:
    import torch


@impl(select_beams, provider="triton", device="cuda")
def select_beams_by_threshold(
    logits_NC: "torch.Tensor",
    lse_N: "torch.Tensor",
    parents: BeamRows,
    rule_row_S: "torch.Tensor",
    trie: LevelTrie,
    children: BeamRows,
    counters: "torch.Tensor",
) -> None:
    """Few candidates at once; of more, bests of groups, a threshold from them, then only what reaches it is listed and ranked."""
    launch_select_beams(logits_NC, lse_N, parents, rule_row_S, trie, children, counters, RULES)


@impl(level_logsumexp, provider="triton", device="cuda")
def level_logsumexp_in_one_pass(
    logits_NC: "torch.Tensor",
) -> "torch.Tensor":
    """Each logit is read once."""
    return launch_level_logsumexp(logits_NC, RULES)


@impl(flagged_level_logsumexp, provider="triton", device="cuda")
def flagged_level_logsumexp_in_one_pass(
    logits_NC: "torch.Tensor", rows: BeamRows, status_S1: "torch.Tensor", round: int
) -> "torch.Tensor":
    """A program a row, which flags its search."""
    return launch_flagged_level_logsumexp(logits_NC, rows, status_S1, round, RULES)


@impl(children_logsumexp, provider="triton", device="cuda")
def children_logsumexp_in_one_pass(
    logits_NC: "torch.Tensor", parents: BeamRows, rule_row_S: "torch.Tensor", trie: LevelTrie
) -> "torch.Tensor":
    """Only the children of live rows are looked at."""
    return launch_children_logsumexp(logits_NC, parents, rule_row_S, trie, RULES)


@impl(flag_failed_searches, provider="triton", device="cuda")
def flag_failed_searches_in_one_kernel(
    lse_N: "torch.Tensor", rows: BeamRows, status_S1: "torch.Tensor", round: int
) -> None:
    """A program a search."""
    launch_flag_failed(lse_N, rows, status_S1, round, RULES)
