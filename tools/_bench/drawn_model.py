"""A Qwen3 decoder whose weights are drawn on the device itself: named sizes, recorded seed, no checkpoint on disk.

Every tensor has a generator of its own, seeded by the seed and the tensor's name, so that it is the same whoever asks for it
and in whatever order. Matrices have variance 1 / inputs. The embedding, which is the head too, has rows of length
`LOGIT_SPREAD`: behind the last norm, whose rows have length sqrt(hidden), the logits have that standard deviation, so that a
level's probabilities are neither flat nor decided by one code.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from xgr_runtime.models.decoder import Decoder, load_decoder
from xgr_runtime.models.decoder_config import DecoderConfig
from xgr_runtime.models.layers.parallel import ParallelContext

if TYPE_CHECKING:
    from tools._bench.floor import ModelShape
    from xgr_runtime.models.weights import WeightReader

LOGIT_SPREAD = 1.0
EPS = 1e-6
ROPE_THETA = 1e6
MAX_POSITIONS = 40_960


class DrawnWeights:
    """Stands where a `WeightReader` stands: tensors by their names in a checkpoint, drawn when taken."""

    folder = Path("drawn")

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
        place: torch.device | None = None,
        held_in: torch.dtype | None = None,
    ) -> None:
        """Drawn on `device`, rounded to `dtype`; then held on `place` and in `held_in`, if these are others."""
        self.dtype, self.seed = dtype, seed
        self._device, self._place, self._held_in = device, place or device, held_in or dtype

    def __contains__(self, name: str) -> bool:
        """The head is the embedding."""
        return name != "lm_head.weight"

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor of that name. A norm's weights are 1 on average and differ by 10 %."""
        seed = self.seed * 2**32 + zlib.crc32(name.encode())
        generator = torch.Generator(self._device).manual_seed(seed)
        drawn = torch.randn(shape, generator=generator, device=self._device)
        if len(shape) == 1:
            drawn.mul_(0.1).add_(1.0)
        else:
            spread = LOGIT_SPREAD if name == "model.embed_tokens.weight" else 1.0
            drawn.mul_(spread / shape[-1] ** 0.5)
        return drawn.to(self.dtype).to(self._place, self._held_in)

    def discard(self, suffix: str) -> None:
        """There is nothing that nobody asks for."""

    def finish(self) -> None:
        """Likewise."""


def decoder_config(shape: ModelShape) -> DecoderConfig:
    """What config.json would say."""
    return DecoderConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_positions=MAX_POSITIONS,
        eps=EPS,
        rope_theta=ROPE_THETA,
        is_tied=True,
        has_qk_norm=True,
        has_qkv_bias=False,
        has_out_bias=False,
        has_mlp_bias=False,
    )


def draw_decoder(shape: ModelShape, weights: DrawnWeights) -> Decoder:
    """The runtime's own decoder over drawn weights, in their dtype on their device."""
    return load_decoder(decoder_config(shape), cast("WeightReader", weights), ParallelContext())
