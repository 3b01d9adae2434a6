"""The kernels of `beam`, each of which but a selection's first is started while the kernel in front of it ends.

In front of a selection stands a mark of time, behind which nothing starts early in a graph. Why nobody reads or writes too early:
`early_kernels.py`.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from triton.runtime.interpreter import InterpretedFunction

from xgr_runtime.hal.ops.beam import (
    BeamRows,
    LevelTrie,
    children_logsumexp,
    flag_failed_searches,
    flagged_level_logsumexp,
    level_logsumexp,
    select_beams,
)
from xgr_runtime.hal.registry import OpSpec, impl

from ..triton.beam import (
    launch_children_logsumexp,
    launch_flag_failed,
    launch_flagged_level_logsumexp,
    launch_level_logsumexp,
)
from ..triton.select import launch_select_beams
from .early_kernels import EARLY, wait_for_kernel_in_front
from .hopper import why_generation_refused
from .launch_rules import RULES

if TYPE_CHECKING:
    import torch

EARLY_RULES = replace(RULES, early=EARLY, early_options={"launch_pdl": True})


def _accepts(spec: OpSpec) -> str | None:
    if isinstance(wait_for_kernel_in_front, InterpretedFunction):
        return "interpreted kernels start one after the other"
    return why_generation_refused(spec)


@impl(select_beams, provider="triton-pdl", device="cuda", accepts=_accepts)
def select_beams_by_threshold_early(
    logits_NC: "torch.Tensor",
    lse_N: "torch.Tensor",
    parents: BeamRows,
    rule_row_S: "torch.Tensor",
    trie: LevelTrie,
    children: BeamRows,
    counters: "torch.Tensor",
) -> None:
    """Few candidates at once; of more, bests of groups, a threshold from them, then only what reaches it is listed and ranked."""
    launch_select_beams(
        logits_NC, lse_N, parents, rule_row_S, trie, children, counters, EARLY_RULES
    )


@impl(level_logsumexp, provider="triton-pdl", device="cuda", accepts=_accepts)
def level_logsumexp_in_one_pass_early(
    logits_NC: "torch.Tensor",
) -> "torch.Tensor":
    """Each logit is read once."""
    return launch_level_logsumexp(logits_NC, EARLY_RULES)


@impl(flagged_level_logsumexp, provider="triton-pdl", device="cuda", accepts=_accepts)
def flagged_level_logsumexp_in_one_pass_early(
    logits_NC: "torch.Tensor", rows: BeamRows, status_S1: "torch.Tensor", round: int
) -> "torch.Tensor":
    """A program a row, which flags its search."""
    return launch_flagged_level_logsumexp(logits_NC, rows, status_S1, round, EARLY_RULES)


@impl(children_logsumexp, provider="triton-pdl", device="cuda", accepts=_accepts)
def children_logsumexp_in_one_pass_early(
    logits_NC: "torch.Tensor", parents: BeamRows, rule_row_S: "torch.Tensor", trie: LevelTrie
) -> "torch.Tensor":
    """Only the children of live rows are looked at."""
    return launch_children_logsumexp(logits_NC, parents, rule_row_S, trie, EARLY_RULES)


@impl(flag_failed_searches, provider="triton-pdl", device="cuda", accepts=_accepts)
def flag_failed_searches_in_one_kernel_early(
    lse_N: "torch.Tensor", rows: BeamRows, status_S1: "torch.Tensor", round: int
) -> None:
    """A program a search."""
    launch_flag_failed(lse_N, rows, status_S1, round, EARLY_RULES)
