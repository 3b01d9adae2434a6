"""Trains the demo's model and writes its checkpoint and semantic ids. From the repository root:

  OMP_NUM_THREADS=1 python -m tools.demo.train --validate   trains on items[:-2], prints validation
  OMP_NUM_THREADS=1 python -m tools.demo.train --write      trains on items[:-1], writes the files
  OMP_NUM_THREADS=1 python -m tools.demo.train --test       evaluates the written files on items[-1]

Three commands, so that looking at the test items is a step of its own: the one configuration was validated
with the first, the second has no metric to look at.

Each epoch cuts every user's sequence into chunks at a fresh random offset; a chunk starts with the
start token at position 0, exactly as a history does in serving. A history of n items is answered at
item position n, so serving takes one item fewer than a chunk holds: no untrained position is read.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional
from tqdm import tqdm

from .checkpoint import (
    ITEMS_PATH,
    MODEL_FOLDER,
    HyperParameters,
    read_checkpoint,
    write_checkpoint,
)
from .evaluate import recommend
from .metrics import ndcg_at_k, recall_at_k
from .movielens import load_sequences, load_titles, without_last
from .network import Dropout, Network, NetworkConfig
from .semantic_ids import NUM_LEVELS, read_items, semantic_ids, write_items
from .template import PAD_TOKEN, START_TOKEN, VOCAB_SIZE, Template

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True)
class TrainingInput:
    """All that training reads: users int32 [U], item counts int32 [U], tokens int32 [items, 3]."""

    users: NDArray[np.int32]
    lengths: NDArray[np.int32]
    tokens: NDArray[np.int32]

    def digest(self) -> str:
        """sha256 over the three arrays as little-endian int32."""
        sha = hashlib.sha256()
        for array in (self.users, self.lengths, self.tokens):
            sha.update(array.astype("<i4").tobytes())
        return sha.hexdigest()


def training_input(
    sequences: Mapping[int, Sequence[int]], sids: Mapping[int, Sequence[int]]
) -> TrainingInput:
    """Renders whole sequences, users in the order given."""
    item_tokens = {item: Template.item_tokens(sid) for item, sid in sids.items()}
    return TrainingInput(
        users=np.array(list(sequences), dtype=np.int32),
        lengths=np.array([len(items) for items in sequences.values()], dtype=np.int32),
        tokens=np.array(
            [item_tokens[item] for items in sequences.values() for item in items], dtype=np.int32
        ),
    )


def epoch_rows(
    data: TrainingInput, chunk_items: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """One epoch's chunks, shuffled: [rows, 1 + 3 * chunk_items], padded on the right."""
    rows: list[NDArray[np.int32]] = []
    ends = np.cumsum(data.lengths)
    for end, length in zip(ends, data.lengths, strict=True):
        tokens = data.tokens[end - length : end]
        cuts = np.arange(int(rng.integers(chunk_items)), length, chunk_items)
        rows.extend(chunk for chunk in np.split(tokens, cuts) if len(chunk))
    table = np.full((len(rows), 1 + NUM_LEVELS * chunk_items), PAD_TOKEN, dtype=np.int64)
    table[:, 0] = START_TOKEN
    for row, chunk in enumerate(rows):
        table[row, 1 : 1 + chunk.size] = chunk.ravel()
    return table[rng.permutation(len(table))]


def learning_rate_share(epoch: float, hyper: HyperParameters) -> float:
    """Linear warm-up, then half a cosine down to zero at the last epoch."""
    if epoch < hyper.warmup_epochs:
        return epoch / hyper.warmup_epochs
    done = (epoch - hyper.warmup_epochs) / (hyper.epochs - hyper.warmup_epochs)
    return 0.5 * (1.0 + math.cos(math.pi * done))


def training_steps(
    network: Network, data: TrainingInput, hyper: HyperParameters
) -> Iterator[tuple[float, float]]:
    """Trains the network in place; yields (epochs done, loss) after every step."""
    rng = np.random.default_rng(hyper.seed + 1)
    dropout = Dropout(hyper.dropout, hyper.seed + 2)
    matrices = [parameter for parameter in network.parameters() if parameter.dim() == 2]
    norms = [parameter for parameter in network.parameters() if parameter.dim() == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": hyper.weight_decay},
            {"params": norms, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.98),
    )
    for epoch in range(hyper.epochs):
        table = torch.from_numpy(epoch_rows(data, hyper.chunk_items, rng))
        batches = torch.split(table, hyper.rows_per_step)
        for index, batch in enumerate(batches, start=1):
            progress = epoch + index / len(batches)
            for group in optimizer.param_groups:
                group["lr"] = hyper.learning_rate * learning_rate_share(progress, hyper)
            logits, _ = network(batch[:, :-1], dropout=dropout)
            loss = functional.cross_entropy(
                logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=PAD_TOKEN
            )
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            yield progress, float(loss.detach())


def make_deterministic() -> None:
    """One thread and deterministic kernels only."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def train(data: TrainingInput, hyper: HyperParameters) -> tuple[Network, list[float]]:
    """(trained network, loss of every step)."""
    make_deterministic()
    network = Network(NetworkConfig(VOCAB_SIZE), hyper.seed)
    losses = []
    with tqdm(total=hyper.epochs, unit="epoch", mininterval=5.0) as bar:
        for progress, loss in training_steps(network, data, hyper):
            losses.append(loss)
            bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            bar.update(progress - bar.n)
    return network, losses


def first_losses(data: TrainingInput, hyper: HyperParameters, num_steps: int) -> list[float]:
    """Losses of the first steps of `train` with the same input and hyper-parameters."""
    make_deterministic()
    network = Network(NetworkConfig(VOCAB_SIZE), hyper.seed)
    steps = itertools.islice(training_steps(network, data, hyper), num_steps)
    return [loss for _, loss in steps]


def metrics(
    network: Network,
    hyper: HyperParameters,
    sids: Mapping[int, Sequence[int]],
    sequences: dict[int, list[int]],
    num_held_out: int,
) -> dict[str, float]:
    """Recall@10 and NDCG@10 on each user's item at -num_held_out, given all before it."""
    histories = without_last(sequences, num_held_out)
    ranked = recommend(network, hyper.template, sids, histories)
    targets = [sequences[user][-num_held_out] for user in ranked]
    lists = list(ranked.values())
    return {
        "recall_at_10": recall_at_k(lists, targets),
        "ndcg_at_10": ndcg_at_k(lists, targets),
    }


def main() -> None:
    """Command line; see the head of the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    for name in ("validate", "write", "test"):
        action.add_argument(f"--{name}", action="store_true")
    for name, value in asdict(HyperParameters()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = vars(parser.parse_args())
    hyper = HyperParameters(**{name: options[name] for name in asdict(HyperParameters())})
    sequences = load_sequences()
    if options["test"]:
        make_deterministic()
        network, hyper, _ = read_checkpoint(MODEL_FOLDER)
        sids = read_items(ITEMS_PATH)
        print(json.dumps(metrics(network, hyper, sids, sequences, 1)))
        return
    seen = without_last(sequences, 1 if options["write"] else 2)
    sids = semantic_ids(seen, list(load_titles()))
    data = training_input(seen, sids)
    network, losses = train(data, hyper)
    print(f"{time.process_time():.0f} s of processor time, last loss {losses[-1]:.4f}")
    if options["write"]:
        write_items(ITEMS_PATH, sids)
        write_checkpoint(MODEL_FOLDER, network, hyper, data.digest(), losses)
    else:
        print(json.dumps({**asdict(hyper), **metrics(network, hyper, sids, sequences, 2)}))


if __name__ == "__main__":
    main()
