"""What `bench_engine` measures: the rows of its table, each with both normalisations, and their names."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Literal

from tools._bench.floor import SHAPES, ModelShape

Kind = Literal["search", "miss", "hit", "rules", "unconstrained"]
Normalised = Literal["level", "vocab"]
NORMALIZATIONS: tuple[Normalised, ...] = ("level", "vocab")
NUM_EXCLUSIONS = 100

RULES_TEXT: dict[Kind, str] = {
    "search": "none",
    "miss": "none",
    "hit": "none",
    "rules": f"two required tag groups, one excluded tag, {NUM_EXCLUSIONS} excluded items a request",
    "unconstrained": "none, and no catalogue: exact top-W over W x codes per round, same kernels otherwise",
}


@dataclass(frozen=True)
class Row:
    """One batch shape. hit_tokens: of each history, asked before as a request of its own. target_ms: of `level`."""

    model: str
    width: int
    history: int
    requests: int
    kind: Kind = "search"
    hit_tokens: int = 0
    target_ms: float | None = None

    @property
    def name(self) -> str:
        """As `--rows` takes it."""
        what = "" if self.kind == "search" else f"-{self.kind}"
        model = self.model.removeprefix("qwen3-")
        return f"{model}-w{self.width}-h{self.history}-b{self.requests}{what}"

    @property
    def engine(self) -> tuple[str, int, bool, bool]:
        """Rows with an equal key share an engine: model, requests of a batch, prefix cache, catalogue ignored."""
        is_caching = self.kind in ("miss", "hit")
        return (self.model, self.requests, is_caching, self.kind == "unconstrained")


ROWS = (
    Row("qwen3-0.6B", 512, 1024, 1, target_ms=5.8),
    Row("qwen3-0.6B", 512, 1024, 8, target_ms=34.0),
    Row("qwen3-0.6B", 128, 1024, 8),
    Row("qwen3-0.6B", 256, 1024, 8),
    Row("qwen3-0.6B", 1024, 1024, 8),
    Row("qwen3-0.6B", 512, 1024, 8, "rules"),
    Row("qwen3-0.6B", 512, 1024, 8, "unconstrained"),
    Row("qwen3-1.7B", 256, 1000, 1, target_ms=8.8),
    Row("qwen3-1.7B", 256, 1000, 8, target_ms=58.0),
    Row("qwen3-1.7B", 256, 5000, 1, target_ms=32.0),
    Row("qwen3-1.7B", 256, 5000, 8, target_ms=240.0),
    Row("qwen3-1.7B", 128, 1024, 1, "miss", target_ms=8.0),
    Row("qwen3-1.7B", 128, 1024, 1, "hit", hit_tokens=1000, target_ms=4.0),
)

# The same table in seconds on a CPU: to try the tool, never for figures.
TINY_SHAPE = ModelShape(64, 128, 2, 4, 2, 16, text_vocabulary=32, num_codes=64)
TINY_ROWS = (
    Row("tiny", 16, 40, 1),
    Row("tiny", 16, 40, 2),
    Row("tiny", 16, 40, 2, "rules"),
    Row("tiny", 16, 40, 2, "unconstrained"),
    Row("tiny", 8, 40, 1, "miss"),
    Row("tiny", 8, 40, 1, "hit", hit_tokens=36),
)

# Engines measured in a process of their own, and the tokens of their longest prompt.
MEMORY_ROW, MEMORY_PROMPT_TOKENS = Row("qwen3-0.6B", 512, 3000, 1), 3072
LOAD_ROW, LOAD_PROMPT_TOKENS = Row("qwen3-0.6B", 512, 1024, 8), 1024
TINY_MEMORY_ROW, TINY_LOAD_ROW, TINY_PROMPT_TOKENS = (
    Row("tiny", 8, 40, 1),
    Row("tiny", 8, 40, 2),
    64,
)

ALL_SHAPES = {**SHAPES, "tiny": TINY_SHAPE}


def choose(rows: tuple[Row, ...], patterns: list[str]) -> list[Row]:
    """The rows whose names match one of the patterns (shell style), in the table's order; none given: all."""
    if not patterns:
        return list(rows)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(row.name, pattern) for row in rows):
            raise SystemExit(
                f"no row is named {pattern!r}; rows: {', '.join(r.name for r in rows)}"
            )
    return [r for r in rows if any(fnmatch.fnmatchcase(r.name, pattern) for pattern in patterns)]
