"""Teacher-forced scores of many prefixes in one forward of transformers: a tree of tokens under one mask.

One forward a prefix (`hf_reference`) takes minutes for hundreds of users. Here the prompt and every wanted prefix are
one sequence; a token sees the prompt and its own ancestors only, at the position it would have alone. Equal to one
forward a prefix, which a test asserts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from xgr_runtime.conformance.same_answer import Reference

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from tests.helpers.oracle import Sid


@torch.no_grad()
def tree_logits(
    model: Any, prompt: Sequence[int], prefixes: Sequence[Sid], token_of: Sequence[Sequence[int]]
) -> npt.NDArray[np.float64]:
    """float64 [prefixes, vocabulary]: the logits behind prompt + prefix."""
    ancestors = {prefix[:length] for prefix in prefixes for length in range(1, len(prefix) + 1)}
    nodes = sorted(ancestors, key=lambda node: (len(node), node))
    place = {node: len(prompt) + index for index, node in enumerate(nodes)}
    place[()] = len(prompt) - 1
    size = len(prompt) + len(nodes)
    tokens = [*prompt, *(int(token_of[len(node) - 1][node[-1]]) for node in nodes)]
    positions = [*range(len(prompt)), *(len(prompt) + len(node) - 1 for node in nodes)]
    is_seen = np.tril(np.ones((size, size), dtype=bool))
    is_seen[len(prompt) :, len(prompt) :] = False
    for node in nodes:
        row = place[node]
        is_seen[row, [place[node[:length]] for length in range(1, len(node) + 1)]] = True
    mask = torch.zeros(1, 1, size, size).masked_fill(~torch.from_numpy(is_seen), -torch.inf)
    output = model(
        input_ids=torch.tensor([tokens]),
        attention_mask=mask,
        position_ids=torch.tensor([positions]),
        use_cache=False,
        logits_to_keep=torch.tensor([place[prefix] for prefix in prefixes]),
    )
    logits: npt.NDArray[np.float64] = output.logits[0].double().numpy()
    return logits


def tree_reference(
    model: Any,
    prompt: Sequence[int],
    children_of: Callable[[Sid], Sequence[int]],
    token_of: Sequence[Sequence[int]],
) -> Reference:
    """Like `hf_reference` with the normalisation 'vocab'."""

    def child_log_probs(prefixes: Sequence[Sid]) -> list[npt.NDArray[np.float64]]:
        log_probs = []
        for prefix, logits in zip(
            prefixes, tree_logits(model, prompt, prefixes, token_of), strict=True
        ):
            largest = logits.max()
            lse = largest + np.log(np.exp(logits - largest).sum())
            tokens = [token_of[len(prefix)][code] for code in children_of(prefix)]
            log_probs.append(logits[tokens] - lse)
        return log_probs

    return Reference(len(token_of), children_of, child_log_probs)
