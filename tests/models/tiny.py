"""Tiny random checkpoints written by transformers, and packed inputs for both entry points of a model."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from xgr_runtime.hal.registry import all_ops
from xgr_runtime.kvcache.allocator import num_pages_of
from xgr_runtime.kvcache.shared import SharedKV
from xgr_runtime.kvcache.unshared import UnsharedKV
from xgr_runtime.models.base import ContextInputs, KVCaches, PackedInputs, RecModel, StepInputs

CPU = torch.device("cpu")
REFERENCE_OPS: Any = SimpleNamespace(**{name: op.reference for name, op in all_ops().items()})
VOCAB = 67
_CLASSES: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


def make_checkpoint(
    folder: Path,
    family: str,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    theta: float = 1e4,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    seed: int = 0,
    **options: Any,
) -> PreTrainedModel:
    """Save a random model of two layers to `folder` and return it; weights are large enough for varied logits."""
    config_class, model_class = _CLASSES[family]
    torch.manual_seed(seed)
    if head_dim is not None:
        options["head_dim"] = head_dim
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        **options,
    )
    model = model_class(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            spread = 0.3 if "norm" in name or "bias" in name else 0.25
            weight.copy_(torch.randn_like(weight) * spread + (1.0 if "norm" in name else 0.0))
    model.to(dtype=dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    # Read back, so that what transformers keeps in fp32 (the rotary frequencies) is in fp32 for every dtype.
    reloaded: PreTrainedModel = model_class.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    reloaded.train(False)
    return reloaded


def expected_logits(
    model: PreTrainedModel, tokens: Sequence[int], first_position: int = 0
) -> torch.Tensor:
    """transformers' logits fp32 [T, V] of one sequence whose first token is at first_position."""
    ids = torch.tensor([list(tokens)])
    positions = torch.arange(first_position, first_position + len(tokens))[None]
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, position_ids=positions).logits
    return logits[0].float()


def head_logits(model: RecModel, hidden: torch.Tensor) -> torch.Tensor:
    """fp32 [rows, V] logits of hidden states."""
    return hidden.float() @ model.head.weight_VM.float().T * model.head.scale


class PackedBatch:
    """Histories packed into pages in a shuffled order, between pages that hold NaN, with padding everywhere.

    Each history has `padding_tokens` extra rows at the end of T, there is one padding history, and one padding beam
    row. Page tables are longer than needed and name a poisoned page where nothing is used.
    """

    def __init__(
        self,
        model: RecModel,
        histories: Sequence[Sequence[int]],
        *,
        page_size: int = 5,
        num_rounds: int = 3,
        num_slots: int = 32,
        first_position: int = 0,
        padding_tokens: int = 3,
    ) -> None:
        self.histories = [list(history) for history in histories]
        self.first_position = first_position
        num_pages = 1 + 2 * sum(num_pages_of(len(h), page_size) for h in self.histories) + 1
        shared = SharedKV(model.kv_spec, num_pages, page_size, CPU)
        unshared = UnsharedKV(model.kv_spec, num_slots, num_rounds, CPU, tile_rows=4)
        shared.all_pages.fill_(torch.nan)
        unshared.all_rows.fill_(torch.nan)
        self.kv = KVCaches(shared, unshared)
        self.max_kv = max(len(h) for h in self.histories) + 2
        width = num_pages_of(self.max_kv, page_size) + 1
        order = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(3)) + 1
        free = [int(page) for page in order]
        poisoned = free.pop()
        self.page_table = torch.full((len(self.histories) + 1, width), poisoned, dtype=torch.int32)
        for h, history in enumerate(self.histories):
            for i in range(num_pages_of(len(history), page_size)):
                self.page_table[h, i] = free.pop()
        self.kv_len = torch.tensor([len(h) for h in self.histories] + [0], dtype=torch.int32)
        self.page_size = page_size
        self.padding_tokens = padding_tokens

    def context_inputs(self, num_cached: Sequence[int] | None = None) -> ContextInputs:
        """A prefill of the tokens after the first num_cached of each history."""
        cached = num_cached if num_cached is not None else [0] * len(self.histories)
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, last = [0], []
        for h, history in enumerate(self.histories):
            for i in range(cached[h], len(history)):
                page = int(self.page_table[h, i // self.page_size])
                tokens.append(history[i])
                positions.append(self.first_position + i)
                slots.append(page * self.page_size + i % self.page_size)
            starts.append(len(tokens))
            last.append(len(tokens) - 1)
        padding = self.padding_tokens
        return ContextInputs(
            packed=PackedInputs(torch.tensor(tokens + [1] * padding)),
            positions_T=torch.tensor(positions + [0] * padding),
            slot_T=torch.tensor(slots + [2] * padding),
            q_start_H1=torch.tensor([*starts, starts[-1]], dtype=torch.int32),
            kv_len_H=self.kv_len,
            page_table_HP=self.page_table,
            last_row_H=torch.tensor([*last, 0]),
            last_start_H1=torch.arange(len(last) + 2, dtype=torch.int32),
            max_q=max(len(h) - c for h, c in zip(self.histories, cached, strict=True)) + 1,
            max_kv=self.max_kv,
            q_starts=(*starts, starts[-1]),
            kv_lens=tuple(self.kv_len.tolist()),
        )

    def step_inputs(
        self, tokens: Sequence[Sequence[int]], slots: torch.Tensor, round_: int
    ) -> StepInputs:
        """One step of tokens[h] (one per beam of history h), plus one padding row."""
        flat = [token for row in tokens for token in row]
        positions = [
            self.first_position + len(history) + round_ - 1
            for history, row in zip(self.histories, tokens, strict=True)
            for _ in row
        ]
        starts = [0]
        for row in tokens:
            starts.append(starts[-1] + len(row))
        dummy = torch.tensor([self.kv.unshared.dummy_slot], dtype=torch.int32)
        return StepInputs(
            ids_N=torch.tensor([*flat, 0]),
            positions_N=torch.tensor([*positions, 0]),
            page_table_HP=self.page_table,
            kv_len_H=self.kv_len,
            row_start_H1=torch.tensor([*starts, starts[-1]], dtype=torch.int32),
            slot_N=torch.cat((slots.int(), dummy)),
            max_rows=max(len(row) for row in tokens) + 1,
            max_kv=self.max_kv,
            kv_lens=tuple(self.kv_len.tolist()),
            round=round_,
        )
