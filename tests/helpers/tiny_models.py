"""Tiny random checkpoints of the supported families, and what transformers says they compute.

transformers is the oracle of the models and, through its constrained `generate`, of the whole search. Its beam search
fills up with beams of -1e9 when a round has fewer valid continuations than beams, so the widths given to it must not
exceed the valid continuations of any round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from xgr_runtime.conformance.same_answer import Reference

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from tests.helpers.oracle import Normalization, Sid

Family = Literal["qwen3", "qwen2", "llama"]
CONFIGS: dict[str, Any] = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig}
MODELS: dict[str, Any] = {
    "qwen3": Qwen3ForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "llama": LlamaForCausalLM,
}


@dataclass(frozen=True)
class TinyShape:
    """The sizes of a tiny model. head_dim None = hidden_size / num_heads."""

    vocab_size: int = 64
    hidden_size: int = 32
    intermediate_size: int = 48
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int | None = None
    rope_theta: float = 10000.0
    max_positions: int = 4096
    is_tied: bool = False


def write_tiny_model(
    folder: Path,
    family: Family = "qwen3",
    shape: TinyShape | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    logit_spread: float = 4.0,
    max_shard_size: str = "5GB",
) -> Path:
    """Writes config.json and safetensors of a random model, as transformers saves it; returns `folder`.

    The weights are larger than at a usual initialisation, so that attention and logits are far from uniform:
    `logit_spread` scales the head.
    """
    shape = shape or TinyShape()
    options: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "max_position_embeddings": shape.max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": shape.is_tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if shape.head_dim is not None:
        options["head_dim"] = shape.head_dim
    torch.manual_seed(seed)
    model: Any = MODELS[family](CONFIGS[family](**options))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(1.0 + 0.2 * torch.randn_like(weight))
            elif name.endswith("bias"):
                weight.copy_(0.2 * torch.randn_like(weight))
            else:
                weight.copy_(torch.randn_like(weight) * 1.5 / weight.shape[-1] ** 0.5)
        model.get_output_embeddings().weight.mul_(logit_spread)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def load_hf(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint in transformers, in evaluation mode on the CPU."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.eval()


@torch.no_grad()
def hf_logits(model: Any, token_ids: Sequence[int], first_position: int = 0) -> torch.Tensor:
    """float32 [tokens, vocabulary]; positions count from `first_position`."""
    tokens = torch.tensor([list(token_ids)])
    positions = torch.arange(first_position, first_position + tokens.shape[1])[None]
    logits: torch.Tensor = model(input_ids=tokens, position_ids=positions).logits[0].float()
    return logits


def hf_reference(
    model: Any,
    prompt: Sequence[int],
    children_of: Callable[[Sid], Sequence[int]],
    token_of: Sequence[Sequence[int]],
    normalization: Normalization = "vocab",
    max_batch: int = 512,
) -> Reference:
    """Teacher-forced scores under transformers: one forward over prompt + prefix for every prefix asked for."""
    prompt_tokens = list(prompt)

    @torch.no_grad()
    def last_logits(prefixes: Sequence[Sid]) -> npt.NDArray[np.float64]:
        rows = [
            prompt_tokens + [int(token_of[level][code]) for level, code in enumerate(prefix)]
            for prefix in prefixes
        ]
        logits: npt.NDArray[np.float64] = (
            model(input_ids=torch.tensor(rows), logits_to_keep=1).logits[:, -1].double().numpy()
        )
        return logits

    def child_log_probs(prefixes: Sequence[Sid]) -> list[npt.NDArray[np.float64]]:
        result: dict[Sid, npt.NDArray[np.float64]] = {}
        for length in sorted({len(prefix) for prefix in prefixes}):
            group = [prefix for prefix in prefixes if len(prefix) == length]
            for start in range(0, len(group), max_batch):
                chunk = group[start : start + max_batch]
                for prefix, logits in zip(chunk, last_logits(chunk), strict=True):
                    wanted = logits[[token_of[length][code] for code in children_of(prefix)]]
                    read = {
                        "vocab": logits,
                        "level": logits[[token for token in token_of[length] if token >= 0]],
                        "valid": wanted,
                    }[normalization]
                    result[prefix] = wanted - np.logaddexp.reduce(read)
        return [result[prefix] for prefix in prefixes]

    return Reference(len(token_of), children_of, child_log_probs)


def hf_cache(model: Any, tokens: torch.Tensor, mask: torch.Tensor, width: int) -> Any:
    """What `generate` would otherwise compute once per beam: keys and values of prompts, a row for every beam."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = model(
        input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=True
    ).past_key_values
    cache.batch_repeat_interleave(width)
    return cache


@torch.no_grad()
def hf_constrained_generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    children_of: Callable[[Sid], Sequence[int]],
    token_of: Sequence[Sequence[int]],
    width: int,
) -> list[list[tuple[Sid, float]]]:
    """`generate` under a prefix constraint, for each prompt its `width` rows (SID, summed log-probability), best first.

    Prompts are padded on the left; the padding token is any token, since it is masked.
    """
    num_levels = len(token_of)
    longest = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, longest - len(prompt) :] = 1
    code_of = [
        {int(token): code for code, token in enumerate(table) if token >= 0} for table in token_of
    ]

    def to_sid(generated: Sequence[int]) -> Sid:
        return tuple(code_of[level][token] for level, token in enumerate(generated))

    def allowed(_row: int, sequence: torch.Tensor) -> list[int]:
        prefix = to_sid(sequence[longest:].tolist())
        return [int(token_of[len(prefix)][code]) for code in children_of(prefix)]

    cache = None
    if min(map(len, prompts)) > 1:  # else a row would see nothing
        cache = hf_cache(model, tokens[:, :-1], mask[:, :-1], width)
    output = model.generate(
        input_ids=tokens,
        attention_mask=mask,
        past_key_values=cache,
        prefix_allowed_tokens_fn=allowed,
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=num_levels,
        min_new_tokens=num_levels,
        length_penalty=0.0,
        early_stopping=False,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    sids = [to_sid(row) for row in output.sequences[:, longest:].tolist()]
    scores = output.sequences_scores.tolist()
    rows = list(zip(sids, scores, strict=True))
    return [rows[start : start + width] for start in range(0, len(rows), width)]
