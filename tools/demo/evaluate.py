"""Offline evaluation of the demo's model: exact constrained beam search in dense tensors.

With 3 levels of 64 codes the whole tree of a user is a [64, 64, 64] boolean (does an item outside
the user's history sit there), so no index is needed. Scores are sums of log-softmax over the whole
vocabulary; ties go to the better parent, then to the smaller code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .semantic_ids import NUM_CODES, NUM_LEVELS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from .network import Network
    from .template import Template

BEAM_WIDTH = 50
USERS_PER_BATCH = 32


@torch.inference_mode()
def recommend(
    network: Network,
    template: Template,
    sids: Mapping[int, Sequence[int]],
    histories: Mapping[int, Sequence[int]],
    num_results: int = 10,
) -> dict[int, list[int]]:
    """user -> best items outside the whole history; the prompt holds its latest items only."""
    network.eval()
    leaf_of = {item: leaf_index(sid) for item, sid in sids.items()}
    item_at = {leaf: item for item, leaf in leaf_of.items()}
    by_length: dict[int, list[int]] = {}
    for user, items in histories.items():
        by_length.setdefault(min(len(items), template.max_history_items), []).append(user)
    ranked: dict[int, list[int]] = {}
    for users in by_length.values():
        for start in range(0, len(users), USERS_PER_BATCH):
            batch = users[start : start + USERS_PER_BATCH]
            tokens = torch.tensor(
                [template.tokens([sids[item] for item in histories[user]]) for user in batch]
            )
            alive = torch.zeros(len(batch), NUM_CODES**NUM_LEVELS, dtype=torch.bool)
            alive[:, list(leaf_of.values())] = True
            for row, user in enumerate(batch):
                alive[row, [leaf_of[item] for item in histories[user]]] = False
            found = beam_search(network, template, tokens, alive)
            for row, user in enumerate(batch):
                ranked[user] = [item_at[leaf_index(sid)] for sid in found[row][:num_results]]
    return {user: ranked[user] for user in histories}


def leaf_index(sid: Sequence[int]) -> int:
    """Place of the SID among all code combinations."""
    index = 0
    for code in sid:
        index = index * NUM_CODES + code
    return index


def beam_search(
    network: Network, template: Template, tokens_BT: Tensor, alive: Tensor
) -> list[list[list[int]]]:
    """Per row the SIDs of the surviving beams, best first. alive: bool [B, NUM_CODES ** 3]."""
    rows = len(tokens_BT)
    logits, past = network(tokens_BT)
    log_probs = logits[:, -1].log_softmax(-1)[:, None]
    scores = torch.zeros(rows, 1)
    codes = torch.zeros(rows, 1, 0, dtype=torch.long)
    for level in range(NUM_LEVELS):
        first = template.first_token(level)
        children = alive.reshape(rows, NUM_CODES ** (level + 1), -1).any(-1)
        children = children.view(rows, -1, NUM_CODES)
        prefix = torch.zeros(codes.shape[:2], dtype=torch.long)
        for column in codes.unbind(-1):
            prefix = prefix * NUM_CODES + column
        open_children = children.gather(1, prefix[..., None].expand(-1, -1, NUM_CODES))
        candidates = scores[..., None] + log_probs[..., first : first + NUM_CODES]
        candidates = candidates.masked_fill(~open_children, -torch.inf).flatten(1)
        order = candidates.sort(dim=1, descending=True, stable=True)
        scores, kept = order.values[:, :BEAM_WIDTH], order.indices[:, :BEAM_WIDTH]
        parents = kept // NUM_CODES
        picked = codes.gather(1, parents[..., None].expand(-1, -1, level))
        codes = torch.cat([picked, (kept % NUM_CODES)[..., None]], dim=-1)
        if level + 1 == NUM_LEVELS:
            break
        width = log_probs.shape[1]
        source = (torch.arange(rows)[:, None] * width + parents).flatten()
        past = [(keys[source], values[source]) for keys, values in past]
        step_tokens = (kept % NUM_CODES + first).view(-1, 1)
        logits, past = network(step_tokens, past)
        log_probs = logits[:, -1].log_softmax(-1).view(rows, -1, logits.shape[-1])
    finite = scores.isfinite()
    return [codes[row][finite[row]].tolist() for row in range(rows)]
