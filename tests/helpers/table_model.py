"""A model that is a table: it gives drawn logits for every prompt and every own token sequence, exactly.

It keeps the token ids themselves as its keys and values, one head of one dim, and looks its logits up by what it reads
back. So a wrong page, slot, reorder, position or row range gives a wrong prefix, hence other logits; a beam that is not
alive gives NaN. Its hidden state is the row of logits, its head passes them on. CPU only: it reads what it wrote.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from xgr_runtime.kvcache.layout import KVGroup, KVSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.helpers.oracle import Catalog, LogitsOf, Sid
    from xgr_runtime.models.base import ContextInputs, KVCaches, StepInputs

Tokens = tuple[int, ...]
Row = npt.NDArray[np.float32]


@dataclass
class LogitTable:
    """Logits float32 [V] of (prompt, own tokens): drawn once, or set by hand in `fixed`.

    quantum > 0 rounds them to its multiples, which makes exact ties. known: the own token sequences that a live beam
    can have; any other gives NaN. None knows all.
    """

    vocab_size: int
    seed: int = 0
    scale: float = 3.0
    quantum: float = 0.0
    known: set[Tokens] | None = None
    fixed: dict[tuple[Tokens, Tokens], Row] = field(default_factory=dict)
    fixed_for_all: dict[Tokens, Row] = field(default_factory=dict)

    def row(self, prompt: Tokens, own: Tokens) -> Row:
        if self.known is not None and own not in self.known:
            return np.full(self.vocab_size, np.nan, np.float32)
        if own in self.fixed_for_all:
            return self.fixed_for_all[own]
        if (prompt, own) not in self.fixed:
            rng = np.random.default_rng([self.seed, len(prompt), *prompt, len(own), *own])
            drawn = rng.standard_normal(self.vocab_size) * self.scale
            if self.quantum:
                drawn = np.round(drawn / self.quantum) * self.quantum
            self.fixed[prompt, own] = drawn.astype(np.float32)
        return self.fixed[prompt, own]

    def logits_of(self, catalog: Catalog, prompt: Sequence[int]) -> LogitsOf:
        """The same logits for an oracle, by prefix of codes."""

        def logits(prefix: Sid) -> Row:
            own = tuple(catalog.token_of[level][code] for level, code in enumerate(prefix))
            return self.row(tuple(prompt), own)

        return logits


def exact_lse(logits_NV: torch.Tensor) -> torch.Tensor:
    """float32 of a float64 log-sum-exp."""
    return torch.logsumexp(logits_NV.double(), dim=1).float()


def oracle_lse(logits_of: LogitsOf) -> Callable[[Sid], float]:
    """The table head's own normaliser, for exact comparisons with the `vocab` normalisation."""
    return lambda prefix: float(exact_lse(torch.from_numpy(logits_of(prefix))[None])[0])


class TableCatalogHead:
    """Satisfies the search's `LevelHead`."""

    levels: tuple[Any, ...] = ()

    def __init__(self, token_of: Sequence[npt.NDArray[np.int32]]) -> None:
        self._tokens = [torch.from_numpy(np.asarray(table, np.int64)) for table in token_of]

    def level_logits(self, ops: Any, hidden_NM: torch.Tensor, level: int) -> torch.Tensor:
        tokens = self._tokens[level]
        return hidden_NM[:, tokens.clamp(min=0)].masked_fill(tokens < 0, -torch.inf)

    def vocab_logsumexp(self, ops: Any, hidden_NM: torch.Tensor) -> torch.Tensor:
        return exact_lse(hidden_NM)


class TableHead:
    """Makes a catalogue's head."""

    def for_catalog(self, token_of: Sequence[npt.NDArray[np.int32]]) -> TableCatalogHead:
        return TableCatalogHead(token_of)


class TableRecModel:
    """See the head of the file; satisfies `RecModel`."""

    first_scores_from: Literal["context", "step"] = "context"
    max_positions = 2**31

    def __init__(self, table: LogitTable) -> None:
        self.table = table
        self.hidden_size = self.vocab_size = table.vocab_size
        self.op_sizes = {"M": table.vocab_size, "V": table.vocab_size}
        self.kv_spec = KVSpec(
            KVGroup("shared", "paged", 1, 1, 1, torch.float32),
            KVGroup("unshared", "rows", 1, 1, 1, torch.float32),
        )
        self.head: Any = TableHead()

    def context(self, ops: Any, inputs: ContextInputs, kv: KVCaches) -> torch.Tensor:
        k_pages, v_pages = kv.shared.k_pages(0), kv.shared.v_pages(0)
        values = inputs.packed.token_ids_T.float()[:, None, None]
        ops.write_shared_kv(values, values, k_pages, v_pages, inputs.slot_T)
        prompts = self._prompts(inputs.page_table_HP, inputs.kv_len_H, kv)
        rows = [self.table.row(prompt, ()) for prompt in prompts]
        for history, (prompt, last) in enumerate(
            zip(prompts, inputs.last_row_H.tolist(), strict=True)
        ):
            if prompt:
                assert int(inputs.packed.token_ids_T[last]) == prompt[-1], history
                assert int(inputs.positions_T[last]) == len(prompt) - 1, history
        return torch.from_numpy(np.stack(rows))

    def step(self, ops: Any, inputs: StepInputs, kv: KVCaches) -> torch.Tensor:
        k_rows, v_rows = kv.unshared.k_rows(0), kv.unshared.v_rows(0)
        values = inputs.token_ids.float()[:, None, None]
        ops.write_unshared_kv(values, values, k_rows, v_rows, inputs.slot_N, inputs.round - 1)
        prompts = self._prompts(inputs.page_table_HP, inputs.kv_len_H, kv)
        starts, positions = inputs.row_start_H1.tolist(), inputs.positions_N.tolist()
        hidden = torch.full((len(positions), self.hidden_size), torch.nan)
        for history, prompt in enumerate(prompts):
            for row in range(starts[history], starts[history + 1]):
                own = k_rows[int(inputs.slot_N[row]), : inputs.round, 0, 0]
                hidden[row] = torch.from_numpy(
                    self.table.row(prompt, tuple(int(token) for token in own.tolist()))
                )
                assert positions[row] == len(prompt) + inputs.round - 1, row
        return hidden

    def _prompts(
        self, page_table_HP: torch.Tensor, kv_len_H: torch.Tensor, kv: KVCaches
    ) -> list[Tokens]:
        pages, size = kv.shared.k_pages(0), kv.shared.page_size
        prompts = []
        for table, length in zip(page_table_HP.tolist(), kv_len_H.tolist(), strict=True):
            places = [(table[place // size], place % size) for place in range(length)]
            prompts.append(tuple(int(pages[page, offset, 0, 0]) for page, offset in places))
        return prompts
