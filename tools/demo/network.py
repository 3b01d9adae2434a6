"""A small Qwen3 decoder in plain torch, for training and offline evaluation of the demo's model.

It carries the parameter names of Hugging Face's Qwen3ForCausalLM, so `state_dict()` is the
checkpoint. transformers' own class would do as well; this one trains faster at this size, takes its
dropout masks and initial weights from numpy's generator (the same numbers on every CPU, which
torch does not promise) and keeps keys and values in the form the beam search wants.

Letters: B rows, T tokens, V vocabulary, M hidden size, Q query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class NetworkConfig:
    """The sizes of the decoder; `to_hugging_face` gives the content of config.json."""

    vocab_size: int
    hidden_size: int = 96
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 224
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    max_positions: int = 128

    def to_hugging_face(self, pad_token_id: int, bos_token_id: int) -> dict[str, object]:
        """The same sizes under Hugging Face's names."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": bos_token_id,
            "dtype": "float32",
            "eos_token_id": None,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_positions,
            "max_window_layers": self.num_layers,
            "model_type": "qwen3",
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "pad_token_id": pad_token_id,
            "rms_norm_eps": self.norm_eps,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
        }


class Dropout:
    """Inverted dropout with masks from numpy; the rate is rounded to a multiple of 1 / 256."""

    def __init__(self, rate: float, seed: int) -> None:
        self.cut = round(rate * 256)
        self.rng = np.random.default_rng(seed)

    def __call__(self, x: Tensor) -> Tensor:
        if self.cut == 0:
            return x
        drawn = np.frombuffer(bytearray(self.rng.bytes(x.numel())), dtype=np.uint8)
        kept = torch.from_numpy(drawn).view(x.shape) >= self.cut
        return x * (kept * (256.0 / (256 - self.cut)))


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


KeyValues = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Causal attention with normalised queries and keys, over `past` keys and the new ones."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        size, dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(size, config.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(size, config.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(size, config.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * dim, size, bias=False)
        self.q_norm = RMSNorm(dim, config.norm_eps)
        self.k_norm = RMSNorm(dim, config.norm_eps)

    def forward(
        self, x_BTM: Tensor, rope: KeyValues, past: KeyValues | None
    ) -> tuple[Tensor, KeyValues]:
        rows, tokens, _ = x_BTM.shape
        shape = (rows, tokens, -1, self.config.head_dim)
        q_BQTD = rotate(self.q_norm(self.q_proj(x_BTM).view(shape)).transpose(1, 2), rope)
        k_BGTD = rotate(self.k_norm(self.k_proj(x_BTM).view(shape)).transpose(1, 2), rope)
        v_BGTD = self.v_proj(x_BTM).view(shape).transpose(1, 2)
        if past is not None:
            k_BGTD = torch.cat([past[0], k_BGTD], dim=2)
            v_BGTD = torch.cat([past[1], v_BGTD], dim=2)
        group = self.config.num_heads // self.config.num_kv_heads
        out_BQTD = functional.scaled_dot_product_attention(
            q_BQTD,
            k_BGTD.repeat_interleave(group, dim=1),
            v_BGTD.repeat_interleave(group, dim=1),
            is_causal=past is None,
        )
        out_BTM = self.o_proj(out_BQTD.transpose(1, 2).reshape(rows, tokens, -1))
        return out_BTM, (k_BGTD, v_BGTD)


def rotate(x_BHTD: Tensor, rope: KeyValues) -> Tensor:
    """Rotary position embedding in Hugging Face's half-split layout."""
    cos_TD, sin_TD = rope
    low, high = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * cos_TD + torch.cat([-high, low], dim=-1) * sin_TD


class FeedForward(nn.Module):
    """Gated SiLU."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BTM: Tensor) -> Tensor:
        out_BTM: Tensor = self.down_proj(
            functional.silu(self.gate_proj(x_BTM)) * self.up_proj(x_BTM)
        )
        return out_BTM


class Layer(nn.Module):
    """One decoder layer; dropout falls on what its two halves add to the residual stream."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(
        self, x_BTM: Tensor, rope: KeyValues, past: KeyValues | None, dropout: Dropout
    ) -> tuple[Tensor, KeyValues]:
        attended_BTM, key_values = self.self_attn(self.input_layernorm(x_BTM), rope, past)
        x_BTM = x_BTM + dropout(attended_BTM)
        x_BTM = x_BTM + dropout(self.mlp(self.post_attention_layernorm(x_BTM)))
        return x_BTM, key_values


class Decoder(nn.Module):
    """Token embedding, layers, final norm."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class Network(nn.Module):
    """The decoder with its tied head: logits over the whole vocabulary."""

    def __init__(self, config: NetworkConfig, seed: int) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        rng = np.random.default_rng(seed)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                drawn = rng.standard_normal(tuple(parameter.shape)) * 0.02
                parameter.data.copy_(torch.from_numpy(drawn))

    def forward(
        self, tokens_BT: Tensor, past: list[KeyValues] | None = None, dropout: Dropout | None = None
    ) -> tuple[Tensor, list[KeyValues]]:
        """(logits [B, T, V], keys and values per layer, the past ones included).

        Without `past`, positions start at 0; with it, they go on behind it and T is 1.
        """
        dropout = dropout or Dropout(0.0, 0)
        start = 0 if past is None else past[0][0].shape[2]
        rope = self.rope(start, tokens_BT.shape[1])
        x_BTM = dropout(self.model.embed_tokens(tokens_BT))
        key_values = []
        for index, layer in enumerate(self.model.layers):
            x_BTM, kept = layer(x_BTM, rope, past[index] if past else None, dropout)
            key_values.append(kept)
        return functional.linear(self.model.norm(x_BTM), self.model.embed_tokens.weight), key_values

    def rope(self, start: int, num_tokens: int) -> KeyValues:
        """(cos, sin), each [T, D]."""
        half = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32) / self.config.head_dim
        positions = torch.arange(start, start + num_tokens, dtype=torch.float32)
        angles = torch.outer(positions, 1.0 / self.config.rope_theta**half).repeat(1, 2)
        return angles.cos(), angles.sin()
