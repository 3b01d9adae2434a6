"""A selection without a catalogue, for comparison alone: the exact top W of W x C continuations, as fast as torch does it.

Two stages. A group of 64 neighbouring codes is stood for by its largest logit; the top W continuations lie in the W groups
with the largest ones, since at most W groups hold a continuation as good as the W-th best. So one pass over the logits, a
top-k over groups, and a top-k over the codes of the chosen groups. Equal scores come in any order. Node ids are codes.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from xgr_runtime.hal.ops.beam import select_beams
from xgr_runtime.hal.registry import impl

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xgr_runtime.hal.ops.beam import BeamRows, LevelTrie

PROVIDER = "unconstrained"
GROUP = 64


def select_top(
    logits_NC: torch.Tensor,
    lse_N: torch.Tensor,
    parents: BeamRows,
    rule_row_S: torch.Tensor,
    trie: LevelTrie,
    children: BeamRows,
    counters: torch.Tensor,
) -> None:
    """As `select_beams`, with every code a valid child; all searches of the batch have the same width and no padding."""
    num_searches, (num_rows, num_codes) = rule_row_S.shape[0], logits_NC.shape
    width = children.scores_N.shape[0] // num_searches
    rows = num_rows // num_searches
    shift_N1 = (parents.scores_N - lse_N)[:, None]
    groups = num_codes // GROUP
    best_NG = logits_NC.view(num_rows, groups, GROUP).amax(-1) + shift_N1
    num_chosen = min(width, rows * groups)
    chosen = best_NG.view(num_searches, -1).topk(num_chosen, sorted=False).indices
    first = torch.arange(num_searches, device=chosen.device)[:, None] * rows * groups
    group = (chosen + first).flatten()  # of all groups of all rows
    scores = logits_NC.view(-1, GROUP)[group] + shift_N1[group // groups]
    top = scores.view(num_searches, -1).topk(width)
    place = top.indices // GROUP
    group_SW = chosen.gather(1, place)
    row_SW = group_SW // groups + torch.arange(num_searches, device=chosen.device)[:, None] * rows
    code = ((group_SW % groups) * GROUP + top.indices % GROUP).flatten()
    children.scores_N.copy_(top.values.flatten())
    children.nodes_N.copy_(code)
    children.codes_N.copy_(code)
    children.parents_N.copy_(row_SW.flatten())
    counters[0].add_(num_rows)


@contextmanager
def unconstrained_selection(device_kind: str) -> Iterator[None]:
    """Inside, engines are built with `select_top` in place of the runtime's selection."""
    impl(select_beams, provider=PROVIDER, device=device_kind)(select_top)
    try:
        yield
    finally:
        select_beams.impls[:] = [i for i in select_beams.impls if i.provider != PROVIDER]
