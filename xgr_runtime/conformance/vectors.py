"""Searches with known answers: the logits behind every prefix of a small catalogue, and what each round must keep.

The answers in vectors.json were computed in float64 by a plain beam search that shares no code with the runtime
(tests/conformance computes them again and compares). With the `vocab` normalisation a score is `parent + (logit - lse)`
in fp32, step by step, with an lse that is given; so it is known to the last bit. With the others the device computes the
lse, and no two beams are nearer than the tolerance unless they tie exactly in one row.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import Any

import numpy as np

from xgr_runtime.conformance.same_answer import Sid
from xgr_runtime.types import Float32Array, Normalization, RecRequest, Rules, Search

FILE = "vectors.json"
FORMAT = 1
SCORE_TOLERANCE = 1e-4  # of fp32, where the device computes the normaliser
Tokens = tuple[int, ...]
Level = tuple[tuple[Sid, float], ...]


@dataclass(frozen=True)
class VectorItem:
    """An item of a vector's catalogue."""

    item_id: int
    sid: Sid
    weight: float
    is_servable: bool
    tags: tuple[str, ...]


@dataclass(frozen=True)
class VectorCatalog:
    """token_of: per level the token of each code, -1 where it has none."""

    name: str
    token_of: tuple[tuple[int, ...], ...]
    items: tuple[VectorItem, ...]

    @cached_property
    def prefixes(self) -> tuple[tuple[Sid, ...], ...]:
        """Per level the prefix of each trie node: nodes are numbered in the order of their codes."""
        sids = [item.sid for item in self.items if item.is_servable]
        levels = range(1, len(self.token_of) + 1)
        return tuple(tuple(sorted({sid[:length] for sid in sids})) for length in levels)


@dataclass(frozen=True)
class Vector:
    """One search. logits: fp32 [V] behind each own token sequence that a live beam can have.

    levels: per round the surviving (prefix, score), best first, up to the round before failed_round. item_ids: the
    answer. failed_round: the round whose normaliser reads NaN or +inf, None where the search succeeds.
    """

    name: str
    catalog: str
    prompt: Tokens
    widths: tuple[int, ...]
    normalization: Normalization
    rules: Rules
    num_results: int
    max_items_per_sid: int | None
    logits: Mapping[Tokens, Float32Array]
    levels: tuple[Level, ...]
    item_ids: tuple[int, ...]
    failed_round: int | None

    @property
    def score_tolerance(self) -> float:
        """By how much a score may differ."""
        return 0.0 if self.normalization == "vocab" else SCORE_TOLERANCE

    def request(self) -> RecRequest:
        """The search as a request."""
        search = Search(
            catalog=self.catalog,
            beam_widths=self.widths,
            num_results=self.num_results,
            normalization=self.normalization,
            rules=self.rules,
            max_items_per_sid=self.max_items_per_sid,
        )
        prompt = np.array(self.prompt, np.int64)
        return RecRequest(self.name, prompt_token_ids=prompt, searches=(search,))


@dataclass(frozen=True)
class VectorSet:
    """All vectors and the catalogues they search."""

    vocab_size: int
    catalogs: Mapping[str, VectorCatalog]
    vectors: tuple[Vector, ...]


def load_vectors() -> VectorSet:
    """The vectors that come with the package."""
    text = resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    return parse_vectors(json.loads(text))


def parse_vectors(data: Mapping[str, Any]) -> VectorSet:
    """Vectors from the file's content."""
    if data["format"] != FORMAT:
        raise ValueError(f"{FILE} has format {data['format']}, this version reads {FORMAT}")
    catalogs = {name: _catalog(name, raw) for name, raw in data["catalogs"].items()}
    vectors = tuple(_vector(raw, data["vocab_size"]) for raw in data["vectors"])
    return VectorSet(data["vocab_size"], catalogs, vectors)


def _catalog(name: str, raw: Mapping[str, Any]) -> VectorCatalog:
    items = (
        VectorItem(item_id, tuple(sid), weight, bool(servable), tuple(tags))
        for item_id, sid, weight, servable, tags in raw["items"]
    )
    return VectorCatalog(name, tuple(map(tuple, raw["token_of"])), tuple(items))


def _vector(raw: Mapping[str, Any], vocab_size: int) -> Vector:
    rules = raw["rules"]
    logits = {
        tuple(map(int, key.split())): row_of(row, raw["scale"], vocab_size)
        for key, row in raw["logits"].items()
    }
    return Vector(
        name=raw["name"],
        catalog=raw["catalog"],
        prompt=tuple(raw["prompt"]),
        widths=tuple(raw["widths"]),
        normalization=raw["normalization"],
        rules=Rules(
            require=tuple(map(tuple, rules.get("require", ()))),
            exclude_tags=tuple(rules.get("exclude_tags", ())),
            exclude_item_ids=tuple(rules.get("exclude_item_ids", ())),
        ),
        num_results=raw["num_results"],
        max_items_per_sid=raw["max_items_per_sid"],
        logits=logits,
        levels=tuple(
            tuple((tuple(codes), float(np.float32(score))) for *codes, score in level)
            for level in raw["levels"]
        ),
        item_ids=tuple(raw["item_ids"]),
        failed_round=raw["failed_round"],
    )


def row_of(row: Sequence[int | str], scale: float, vocab_size: int) -> Float32Array:
    """fp32 [V] from the file's multiples of `scale`; "-inf", "inf" and "nan" stand for themselves."""
    values = [float(entry) if isinstance(entry, str) else entry * scale for entry in row]
    if len(values) != vocab_size:
        raise ValueError(f"a row of logits has {len(values)} entries, expected {vocab_size}")
    return np.array(values, np.float32)
