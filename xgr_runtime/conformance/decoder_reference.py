"""A small random decoder of the Qwen3 kind as a checkpoint, and the same decoder written down plainly in float64.

The second shares no code with the runtime: numpy, one sequence after the other, no pages, no kernels.

B sequences, n tokens of each, p tokens before them, M hidden size, Q query heads, G KV heads, D head dim, V vocabulary.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

Array = npt.NDArray[np.float64]
Past = tuple[tuple[Array, Array], ...]  # per layer keys and values [p, G, D]

_SEED = 20
_SPREAD = 1.0  # of weights: attention and logits are far from uniform
_HEAD_SPREAD = 0.8


@dataclass(frozen=True)
class DecoderShape:
    """Sizes that kernels on matrix units take: every dim is a multiple of 16."""

    vocab_size: int = 96
    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    eps: float = 1e-6
    rope_theta: float = 10000.0


def random_weights(shape: DecoderShape, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """fp32 tensors by their names in a checkpoint, with values that `dtype` holds exactly."""
    m, f, d = shape.hidden_size, shape.intermediate_size, shape.head_dim
    q, kv = shape.num_heads * d, shape.num_kv_heads * d
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab_size, m),
        "lm_head.weight": (shape.vocab_size, m),
        "model.norm.weight": (m,),
    }
    for layer in range(shape.num_layers):
        name = f"model.layers.{layer}"
        sizes |= {
            f"{name}.input_layernorm.weight": (m,),
            f"{name}.post_attention_layernorm.weight": (m,),
            f"{name}.self_attn.q_proj.weight": (q, m),
            f"{name}.self_attn.k_proj.weight": (kv, m),
            f"{name}.self_attn.v_proj.weight": (kv, m),
            f"{name}.self_attn.o_proj.weight": (m, q),
            f"{name}.self_attn.q_norm.weight": (d,),
            f"{name}.self_attn.k_norm.weight": (d,),
            f"{name}.mlp.gate_proj.weight": (f, m),
            f"{name}.mlp.up_proj.weight": (f, m),
            f"{name}.mlp.down_proj.weight": (m, f),
        }
    generator = torch.Generator().manual_seed(_SEED)
    weights = {}
    for name, size in sizes.items():
        drawn = torch.randn(*size, generator=generator)
        spread = _HEAD_SPREAD if name == "lm_head.weight" else _SPREAD
        weight = 1 + 0.2 * drawn if len(size) == 1 else drawn * spread / size[-1] ** 0.5
        weights[name] = weight.to(dtype).float()
    return weights


def write_checkpoint(
    folder: Path, shape: DecoderShape, weights: Mapping[str, torch.Tensor]
) -> None:
    """config.json and model.safetensors in an existing folder."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 1024,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(dict(weights), folder / "model.safetensors")


class PlainDecoder:
    """The decoder in float64."""

    def __init__(self, shape: DecoderShape, weights: Mapping[str, torch.Tensor]) -> None:
        self._shape = shape
        self._weights = {name: weight.double().numpy() for name, weight in weights.items()}

    def read(self, prompt: Sequence[int]) -> tuple[Array, Past]:
        """Logits [V] behind a prompt, and its keys and values."""
        logits, past = self._forward(np.array([prompt]), ())
        return logits[0], tuple((k[0], v[0]) for k, v in past)

    def continue_from(self, past: Past, tokens: Sequence[Sequence[int]]) -> Array:
        """Logits [B, V] behind the prompt and each of B continuations of one length."""
        return self._forward(np.array(tokens), past)[0]

    def _forward(self, tokens: npt.NDArray[np.int64], past: Past) -> tuple[Array, Past]:
        """Logits [B, V] of the last token and the new keys and values [B, n, G, D] of every layer."""
        x = self._weights["model.embed_tokens.weight"][tokens]
        new = []
        for layer in range(self._shape.num_layers):
            name = f"model.layers.{layer}"
            normed = self._norm(x, f"{name}.input_layernorm")
            attended, keys_values = self._attention(
                normed, f"{name}.self_attn", past[layer] if past else None
            )
            new.append(keys_values)
            x = x + attended
            normed = self._norm(x, f"{name}.post_attention_layernorm")
            gate, up = (self._linear(normed, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
            x = x + self._linear(gate / (1 + np.exp(-gate)) * up, f"{name}.mlp.down_proj")
        return self._linear(self._norm(x[:, -1], "model.norm"), "lm_head"), tuple(new)

    def _attention(
        self, x: Array, name: str, past: tuple[Array, Array] | None
    ) -> tuple[Array, tuple[Array, Array]]:
        size, (num_rows, num_new) = self._shape, x.shape[:2]
        num_past = 0 if past is None else len(past[0])
        q, k, v = (
            self._linear(x, f"{name}.{part}_proj").reshape(num_rows, num_new, -1, size.head_dim)
            for part in "qkv"
        )
        position = num_past + np.arange(num_new)
        q = self._rotated(self._norm(q, f"{name}.q_norm"), position)
        k = self._rotated(self._norm(k, f"{name}.k_norm"), position)
        keys, values = k, v
        if past is not None:
            before = [np.broadcast_to(part, (num_rows, *part.shape)) for part in past]
            keys, values = (
                np.concatenate(pair, axis=1) for pair in zip(before, (k, v), strict=True)
            )
        group = size.num_heads // size.num_kv_heads
        keys, values = np.repeat(keys, group, axis=2), np.repeat(values, group, axis=2)
        scores = np.einsum("bnqd,bkqd->bqnk", q, keys) * size.head_dim**-0.5
        is_later = np.arange(keys.shape[1]) > position[:, None]
        scores = np.where(is_later, -np.inf, scores)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("bqnk,bkqd->bnqd", weights, values).reshape(num_rows, num_new, -1)
        return self._linear(out, f"{name}.o_proj"), (k, v)

    def _norm(self, x: Array, name: str) -> Array:
        scaled: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + self._shape.eps)
        return np.asarray(scaled * self._weights[f"{name}.weight"])

    def _linear(self, x: Array, name: str) -> Array:
        product: Array = x @ self._weights[f"{name}.weight"].T
        return product

    def _rotated(self, x: Array, position: npt.NDArray[np.int64]) -> Array:
        """Pair i of each head, elements i and D / 2 + i, turned by position * theta^(-2 i / D)."""
        half = self._shape.head_dim // 2
        frequency = self._shape.rope_theta ** (-np.arange(half) / half)
        angle = (position[:, None] * frequency)[:, None, :]
        one, two = x[..., :half], x[..., half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate((one * cos - two * sin, two * cos + one * sin), axis=-1)
