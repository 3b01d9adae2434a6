"""One round of the search on the device: logits, normaliser, failure flags, exact selection.

The model's head is an argument (`LevelHead`), so that this package knows no model. Nothing here is read by the host;
every shape is the bucket's.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from xgr_runtime.hal.bound import BoundOps
from xgr_runtime.hal.ops.beam import BeamRows, LevelTrie
from xgr_runtime.types import Normalization


class LevelHead(Protocol):
    """Scores hidden states against a catalogue's tokens."""

    def level_logits(self, ops: BoundOps, hidden_NM: torch.Tensor, level: int) -> torch.Tensor:
        """fp32 [N, C] logits of the level's codes; -inf for a code without a token."""
        ...

    def vocab_logsumexp(self, ops: BoundOps, hidden_NM: torch.Tensor) -> torch.Tensor:
        """fp32 [N] log-sum-exp over the whole vocabulary, padding rows of the head included."""
        ...


def run_round(
    ops: BoundOps,
    head: LevelHead,
    hidden_NM: torch.Tensor,
    level: int,
    normalization: Normalization,
    parents: BeamRows,
    children: BeamRows,
    trie: LevelTrie,
    rule_row_S: torch.Tensor,
    status_S1: torch.Tensor,
    counters: torch.Tensor,
    before_select: Callable[[], None],
) -> None:
    """Expand `parents` by the level's valid children and write the best rows into `children`.

    hidden_NM: one row per parent row. status_S1 and counters are updated in place. before_select is called
    when everything but the selection has been issued; it may only record times.
    """
    logits_NC = head.level_logits(ops, hidden_NM, level)
    if normalization == "level":
        lse_N = ops.flagged_level_logsumexp(logits_NC, parents, status_S1, level)
    else:
        if normalization == "vocab":
            lse_N = head.vocab_logsumexp(ops, hidden_NM)
        else:
            lse_N = ops.children_logsumexp(logits_NC, parents, rule_row_S, trie)
        ops.flag_failed_searches(lse_N, parents, status_S1, level)
    before_select()
    ops.select_beams(logits_NC, lse_N, parents, rule_row_S, trie, children, counters)
