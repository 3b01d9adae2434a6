"""The selection benchmark on a trained model's logits: the demo checkpoint searches its own catalogue.

The repository holds no user's history, so the history is the first items of the committed catalogue: the logits are
the trained model's, the user is made up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tools._bench.beam_search import Beams, DenseSearch, Workload, load_catalog
from tools.demo.checkpoint import read_checkpoint
from tools.demo.semantic_ids import NUM_CODES, NUM_LEVELS, read_items
from xgr_runtime.xbeam.trie import Trie, leaf_sids

if TYPE_CHECKING:
    from pathlib import Path


@torch.no_grad()
def trained_work(model_folder: Path, items_path: Path, width: int) -> Workload:
    """A whole search; the logits of each round are those of the beams that the rounds before it kept."""
    network, hyper, _ = read_checkpoint(model_folder)
    template = hyper.template
    sids = list(read_items(items_path).values())
    catalog = load_catalog(np.array(sids, np.int64), NUM_CODES)
    history = torch.tensor(template.tokens(sids[: template.max_history_items]))
    prefixes = torch.zeros((1, 0), dtype=torch.int64)
    logits: list[torch.Tensor] = []
    for level in range(NUM_LEVELS):
        first_tokens = torch.tensor([template.first_token(i) for i in range(level)])
        own_tokens = prefixes + first_tokens.to(torch.int64)
        tokens = torch.cat((history.expand(len(prefixes), -1), own_tokens), dim=1)
        first = template.first_token(level)
        logits.append(network(tokens)[0][:, -1, first : first + NUM_CODES].contiguous())
        beams = DenseSearch(Workload(catalog, 0, logits, Beams.root(), width)).run()
        above = Trie(catalog.trie.offsets[: level + 1], catalog.trie.codes[: level + 1])
        prefixes = torch.from_numpy(leaf_sids(above, beams.nodes).astype(np.int64))
    return Workload(catalog, 0, logits, Beams.root(), width)
