"""A Qwen3 checkpoint with random weights: the sizes of a real model, none of its knowledge."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Qwen3Shape:
    """Sizes of a decoder. num_kv_heads divides num_heads; the head is tied to the embedding."""

    num_layers: int = 12
    hidden_size: int = 512
    intermediate_size: int = 1536
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 64
    vocab_size: int = 4096
    max_positions: int = 4096

    def config(self) -> dict[str, object]:
        """The content of config.json."""
        return {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_positions,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "torch_dtype": "float32",
        }


def write_random_model(folder: Path, shape: Qwen3Shape, seed: int = 0) -> Path:
    """Write config.json and model.safetensors in fp32; returns `folder`.

    Weights are normal with variance 1.5 / inputs and the embedding 2.0, so that attention and scores are far from uniform.
    """
    generator = torch.Generator().manual_seed(seed)

    def matrix(num_out: int, num_in: int) -> torch.Tensor:
        scale: float = (1.5 / num_in) ** 0.5
        return torch.randn((num_out, num_in), generator=generator).mul_(scale)

    hidden, dim = shape.hidden_size, shape.head_dim
    tensors = {
        "model.embed_tokens.weight": 2.0 * torch.randn((shape.vocab_size, hidden), generator=generator)
        / hidden**0.5,
        "model.norm.weight": torch.ones(hidden),
    }  # fmt: skip
    for layer in range(shape.num_layers):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.input_layernorm.weight": torch.ones(hidden),
            f"{name}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{name}.self_attn.q_norm.weight": torch.ones(dim),
            f"{name}.self_attn.k_norm.weight": torch.ones(dim),
            f"{name}.self_attn.q_proj.weight": matrix(shape.num_heads * dim, hidden),
            f"{name}.self_attn.k_proj.weight": matrix(shape.num_kv_heads * dim, hidden),
            f"{name}.self_attn.v_proj.weight": matrix(shape.num_kv_heads * dim, hidden),
            f"{name}.self_attn.o_proj.weight": matrix(hidden, shape.num_heads * dim),
            f"{name}.mlp.gate_proj.weight": matrix(shape.intermediate_size, hidden),
            f"{name}.mlp.up_proj.weight": matrix(shape.intermediate_size, hidden),
            f"{name}.mlp.down_proj.weight": matrix(hidden, shape.intermediate_size),
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
