"""The counted floor of a request: its floating-point operations at the rate of a bf16 product, nothing else.

FLOPs of one request = 2 P (T + W (L - 1)) + 4 layers Hq D (T^2 / 2 + T W (L - 1)) + head, where P counts the parameters of the
layers, T the history's tokens, W the beams, L the levels. Round 1 needs no forward of its own. The head is
2 (1 + W (L - 1)) hidden x rows, of which `level` normalisation needs those of one level, `vocab` all of the vocabulary. Of
a history whose first C tokens are cached only the others are counted, and T^2 / 2 becomes (T^2 - C^2) / 2.
"""

from __future__ import annotations

from dataclasses import dataclass

BF16_TFLOPS = 779.0  # a product of 8192^3 on one H200, measured 2026-11-29
NUM_LEVELS = 3
NUM_CODES = 8192
TEXT_VOCABULARY = 151_936


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Qwen3 decoder with a tied head over a text vocabulary and three ranges of codes behind it."""

    hidden_size: int
    intermediate_size: int
    num_layers: int = 28
    num_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128
    text_vocabulary: int = TEXT_VOCABULARY
    num_codes: int = NUM_CODES
    num_levels: int = NUM_LEVELS

    @property
    def vocab_size(self) -> int:
        return self.text_vocabulary + self.num_levels * self.num_codes

    @property
    def layer_parameters(self) -> int:
        """Weights of all matrices of all layers; norms and the embedding are not counted."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (q + 2 * kv) + q * self.hidden_size
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)


SHAPES = {
    "qwen3-0.6B": ModelShape(hidden_size=1024, intermediate_size=3072),
    "qwen3-1.7B": ModelShape(hidden_size=2048, intermediate_size=6144),
}


@dataclass(frozen=True)
class Work:
    """What a batch asks for: equal requests of `history` tokens, the first cached_tokens of each known already."""

    history: int
    width: int
    requests: int = 1
    cached_tokens: int = 0
    is_vocab: bool = False


def flops(shape: ModelShape, work: Work) -> float:
    """Floating-point operations of the whole batch."""
    rows = work.width * (shape.num_levels - 1)
    tokens = work.history - work.cached_tokens
    linear = 2.0 * shape.layer_parameters * (tokens + rows)
    pairs = (work.history**2 - work.cached_tokens**2) / 2 + work.history * rows
    attention = 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
    head_rows = shape.vocab_size if work.is_vocab else shape.num_codes
    head = 2.0 * (1 + rows) * shape.hidden_size * head_rows
    return work.requests * (linear + attention + head)


def floor_ms(shape: ModelShape, work: Work, tflops: float = BF16_TFLOPS) -> float:
    """Milliseconds of the batch at that rate."""
    return flops(shape, work) / tflops / 1e9
