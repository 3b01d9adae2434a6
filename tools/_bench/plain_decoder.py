"""The reference of an engine's answers: the same decoder in plain torch, float32 unless told otherwise, nothing fused.

It shares no code with the runtime: tensors by their names in a checkpoint, the whole history at once, then prefixes of codes
behind it, many at a time. Products are float32 ones: `strict_float32` keeps a GPU from rounding their inputs.

T history tokens, B prefixes, n tokens of a prefix, M hidden size, Q query heads, G KV heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from tools._bench.drawn_model import EPS, ROPE_THETA

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools._bench.floor import ModelShape

MAX_SCORES = 1 << 28  # attention scores held at once


class Weights(Protocol):
    """Tensors by their names in a checkpoint."""

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor: ...


@contextmanager
def strict_float32() -> Iterator[None]:
    """Products of float32 with float32's own significand (no TF32)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class Read:
    """A history: hidden_M behind its last token after the last norm, and per layer keys and values [G, T, D]."""

    hidden_M: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def num_tokens(self) -> int:
        return self.keys[0].shape[1]


class PlainDecoder:
    """Holds its weights in `dtype` on `device`, whatever dtype and device they are drawn in."""

    def __init__(
        self,
        shape: ModelShape,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._shape = shape
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        m, f = shape.hidden_size, shape.intermediate_size

        def take(name: str, *size: int) -> torch.Tensor:
            return weights.take(f"model.{name}.weight", size).to(device, dtype)

        self.head_VM = take("embed_tokens", shape.vocab_size, m)
        self._final_norm = take("norm", m)
        self._layers = [
            {
                "norm": take(f"layers.{layer}.input_layernorm", m),
                "mlp_norm": take(f"layers.{layer}.post_attention_layernorm", m),
                "q_norm": take(f"layers.{layer}.self_attn.q_norm", shape.head_dim),
                "k_norm": take(f"layers.{layer}.self_attn.k_norm", shape.head_dim),
                "q": take(f"layers.{layer}.self_attn.q_proj", q, m),
                "k": take(f"layers.{layer}.self_attn.k_proj", kv, m),
                "v": take(f"layers.{layer}.self_attn.v_proj", kv, m),
                "o": take(f"layers.{layer}.self_attn.o_proj", m, q),
                "gate": take(f"layers.{layer}.mlp.gate_proj", f, m),
                "up": take(f"layers.{layer}.mlp.up_proj", f, m),
                "down": take(f"layers.{layer}.mlp.down_proj", m, f),
            }
            for layer in range(shape.num_layers)
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        layers = sum(tensor.nbytes for layer in self._layers for tensor in layer.values())
        return layers + self.head_VM.nbytes + self._final_norm.nbytes

    def read(self, prompt: list[int]) -> Read:
        """Run over a history."""
        hidden_1M, new = self._forward(torch.tensor([prompt], device=self.head_VM.device), None)
        keys, values = zip(*new, strict=True)
        return Read(hidden_1M[0], [k[0] for k in keys], [v[0] for v in values])

    def continue_from(self, read: Read, tokens_Bn: torch.Tensor) -> torch.Tensor:
        """[B, M] after the last norm, behind the history and each prefix (int64 [B, n])."""
        per_prefix = self._shape.num_heads * tokens_Bn.shape[1] * (read.num_tokens + 8)
        step = max(1, MAX_SCORES // per_prefix)
        parts = [self._forward(part, read)[0] for part in torch.split(tokens_Bn, step)]
        return torch.cat(parts)

    def _forward(
        self, tokens_Bn: torch.Tensor, past: Read | None
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        x = self.head_VM[tokens_Bn]
        new = []
        for number, layer in enumerate(self._layers):
            history = None if past is None else (past.keys[number], past.values[number])
            attended, keys_values = self._attention(layer, _norm(x, layer["norm"]), history)
            if past is None:
                new.append(keys_values)
            x = x + attended
            normed = _norm(x, layer["mlp_norm"])
            gated = torch.nn.functional.silu(normed @ layer["gate"].T) * (normed @ layer["up"].T)
            x = x + gated @ layer["down"].T
        return _norm(x[:, -1], self._final_norm), new

    def _attention(
        self,
        layer: dict[str, torch.Tensor],
        x: torch.Tensor,
        history: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """[B, n, M] of the layer's attention, and keys and values [B, G, n, D] of the new tokens."""
        size, (num_rows, num_new) = self._shape, x.shape[:2]
        q, k, v = (
            (x @ layer[part].T).view(num_rows, num_new, -1, size.head_dim).transpose(1, 2)
            for part in "qkv"
        )
        first = 0 if history is None else history[0].shape[1]
        q = self._rotated(_norm(q, layer["q_norm"]), first)
        k = self._rotated(_norm(k, layer["k_norm"]), first)
        group = size.num_heads // size.num_kv_heads
        # rows of one KV head: its query heads, then the new tokens
        q = (
            q.reshape(num_rows, size.num_kv_heads, group * num_new, size.head_dim)
            * size.head_dim**-0.5
        )
        is_later = torch.ones(num_new, num_new, dtype=torch.bool, device=x.device).triu(1)
        if history is None:
            out = _causal(q, k, v, is_later, group)
        else:
            out = _behind_history(q, k, v, history, is_later.repeat(group, 1))
        out = out.reshape(num_rows, size.num_heads, num_new, size.head_dim).transpose(1, 2)
        return out.reshape(num_rows, num_new, -1) @ layer["o"].T, (k, v)

    def _rotated(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """Pair i of each head, elements i and D / 2 + i, turned by position * theta^(-2 i / D); x is [B, heads, n, D]."""
        half = self._shape.head_dim // 2
        position = torch.arange(first, first + x.shape[2], device=x.device, dtype=torch.float64)
        pair = torch.arange(half, device=x.device, dtype=torch.float64)
        angle = position[:, None] * ROPE_THETA ** (-pair / half)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        one, two = x[..., :half], x[..., half:]
        return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def _causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_later: torch.Tensor, group: int
) -> torch.Tensor:
    """One query head of each group at a time: that bounds the scores."""
    num_new, parts = k.shape[2], []
    for member in range(group):
        scores = q[:, :, member * num_new : (member + 1) * num_new] @ k.transpose(2, 3)
        parts.append(scores.masked_fill_(is_later, -torch.inf).softmax(-1) @ v)
    return torch.cat(parts, dim=2)


def _behind_history(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    history: tuple[torch.Tensor, torch.Tensor],
    is_later: torch.Tensor,
) -> torch.Tensor:
    """Queries [B, G, rows, D] over the history's keys, the same for all B, and their own."""
    keys_GTD, values_GTD = history
    num_prefixes, num_kv_heads, rows, dim = q.shape
    folded = q.transpose(0, 1).reshape(num_kv_heads, num_prefixes * rows, dim)
    shape = (num_kv_heads, num_prefixes, rows)
    on_history = (folded @ keys_GTD.transpose(1, 2)).view(*shape, -1).transpose(0, 1)
    on_own = (q @ k.transpose(2, 3)).masked_fill_(is_later, -torch.inf)
    weights = torch.cat((on_history, on_own), dim=-1).softmax(-1)
    num_tokens = keys_GTD.shape[1]
    of_history = (
        weights[..., :num_tokens].transpose(0, 1).reshape(num_kv_heads, num_prefixes * rows, -1)
    )
    out = (of_history @ values_GTD).view(*shape, dim).transpose(0, 1)
    return out + weights[..., num_tokens:] @ v
