"""Writes the package's search vectors: `python -m tests.conformance.make_vectors`. Nothing of the runtime computes them.

Catalogues and logits are drawn, answers are the oracle's: with the `vocab` normalisation in fp32 step by step from a
float64 log-sum-exp, elsewhere in float64, where draws in which beams come nearer than a device may err are drawn again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.helpers.catalogs import TAGS, contiguous_tokens, random_catalog, scattered_tokens
from tests.helpers.oracle import (
    BeamAnswer,
    Catalog,
    Item,
    Normalization,
    Rules,
    Sid,
    beam_search,
    expand_items,
    logsumexp,
    read_by_normalizer,
)
from xgr_runtime.conformance.vectors import FILE, FORMAT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

TARGET = Path(__file__).resolve().parents[2] / "xgr_runtime" / "conformance" / FILE
VOCAB = 48
MARGIN = 1e-3  # ten times what a device may err
SPECIAL = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
Row = list[Any]  # multiples of the scale, and names of SPECIAL


@dataclass(frozen=True)
class Spec:
    """What a vector is to be. change(own tokens, row): the drawn row of multiples, or another one."""

    name: str
    catalog: str
    widths: Sequence[int]
    normalization: Normalization = "vocab"
    prompt_length: int = 3
    rules: Mapping[str, Any] = field(default_factory=dict)
    num_results: int = 500
    max_items_per_sid: int | None = None
    scale: float = 1 / 16
    change: Callable[[tuple[int, ...], Row], Row] = lambda own, row: row


def catalogs() -> dict[str, Catalog]:
    doubles = [Item(100 + n, (n % 3, n // 3 % 2), float(n % 4)) for n in range(40)]
    return {
        "flat": random_catalog(1, 30, contiguous_tokens([20], 3)),
        "tagged": random_catalog(
            2, 60, scattered_tokens([6, 5, 7], VOCAB, 2, 0.15), share_hidden=0.15
        ),
        "deep": random_catalog(3, 14, scattered_tokens([2, 3, 2, 3, 2, 3, 2, 3], VOCAB, 3)),
        "hub": random_catalog(4, 40, contiguous_tokens([1, 24], 5)),
        "one item": Catalog((Item(7, (0, 2, 0, 1)),), scattered_tokens([1, 3, 2, 2], VOCAB, 4)),
        "doubles": Catalog(tuple(doubles), contiguous_tokens([3, 3], 40)),
        "large": random_catalog(5, 500, scattered_tokens([12, 10, 10], VOCAB, 5)),
        "top": random_catalog(6, 25, (tuple(range(30, VOCAB)), tuple(range(VOCAB - 1, 33, -1)))),
    }


def flat(own: tuple[int, ...], row: Row) -> Row:
    """Every logit equal: every choice is a tie."""
    return [3] * len(row)


def few_values(own: tuple[int, ...], row: Row) -> Row:
    """Many ties inside a row."""
    return [value // 16 * 16 for value in row]


def at(depth: int, token: int | None, value: Any) -> Callable[[tuple[int, ...], Row], Row]:
    """`value` for one token (None: all) behind the prefixes of a depth."""

    def change(own: tuple[int, ...], row: Row) -> Row:
        if len(own) != depth:
            return row
        return [value if token in (None, number) else old for number, old in enumerate(row)]

    return change


def alternate(own: tuple[int, ...], row: Row) -> Row:
    """-inf for one token of three."""
    return ["-inf" if number % 3 == 0 else old for number, old in enumerate(row)]


def dead_half(own: tuple[int, ...], row: Row) -> Row:
    """Rows of -inf behind every other prefix: dead beams."""
    return ["-inf"] * len(row) if own and sum(own) % 2 else row


SPECS = (
    Spec("one level", "flat", [5]),
    Spec("one level, wider than its codes", "flat", [64], prompt_length=1),
    Spec("one level, one beam, level", "flat", [1], "level"),
    Spec("three levels", "tagged", [4, 4, 4]),
    Spec("three levels, level", "tagged", [4, 6, 8], "level", prompt_length=21),
    Spec("three levels, valid", "tagged", [4, 6, 8], "valid", prompt_length=5),
    Spec("greedy, valid", "tagged", [1, 1, 1], "valid", prompt_length=4),
    Spec("growing widths", "tagged", [1, 5, 40], prompt_length=7),
    Spec("shrinking widths", "tagged", [40, 9, 2], prompt_length=8),
    Spec("shrinking widths, a long prompt", "tagged", [6, 3, 1], "level", prompt_length=150),
    Spec("exhaustive", "tagged", [128, 128, 128], prompt_length=130),
    Spec("eight levels", "deep", [2, 4, 3, 6, 5, 4, 8, 3], prompt_length=17),
    Spec("eight levels, valid", "deep", [3] * 8, "valid", prompt_length=2),
    Spec("a hub below one code", "hub", [3, 10]),
    Spec("a hub, more beams than children, level", "hub", [9, 40], "level", prompt_length=6),
    Spec("a single item", "one item", [3, 3, 3, 3], "valid"),
    Spec("items that share a SID", "doubles", [3, 6], prompt_length=9),
    Spec("cut inside the items of a SID", "doubles", [3, 9], num_results=7, prompt_length=4),
    Spec("two items per SID", "doubles", [2, 5], max_items_per_sid=2, prompt_length=5),
    Spec("all logits equal", "tagged", [3, 7, 9], change=flat, prompt_length=10),
    Spec("all logits equal, a cut inside a tie", "hub", [1, 7], "valid", change=flat),
    Spec("ties in a row", "tagged", [3, 4, 6], change=few_values, prompt_length=11),
    Spec("tokens at the top, in overlapping ranges", "top", [6, 8], prompt_length=12),
    Spec("overlapping ranges, valid", "top", [5, 30], "valid", prompt_length=13),
    Spec("-inf on allowed tokens", "tagged", [9, 9, 9], change=alternate, prompt_length=14),
    Spec("-inf on allowed tokens, valid", "top", [9, 9], "valid", change=alternate),
    Spec("dead beams", "top", [12, 12], change=dead_half, prompt_length=15),
    Spec("everything -inf", "hub", [2, 4], "level", change=at(1, None, "-inf"), prompt_length=16),
    Spec("NaN at once", "tagged", [4, 4, 4], change=at(0, 47, "nan"), prompt_length=18),
    Spec("NaN later", "tagged", [4, 4, 4], change=at(2, 1, "nan"), prompt_length=19),
    Spec("+inf", "top", [4, 4], "level", change=at(1, 40, "inf"), prompt_length=20),
    Spec("NaN that no normaliser reads", "hub", [1, 5], "valid", change=at(1, 1, "nan")),
    Spec("extreme logits", "tagged", [5, 5, 5], scale=1e29, prompt_length=22),
    Spec("beyond half precision", "tagged", [5, 5, 5], scale=2500.0, prompt_length=23),
    Spec("one of two tags", "tagged", [9, 9, 9], "valid", 24, {"require": [[TAGS[0], TAGS[1]]]}),
    Spec(
        *("two tags, not a third, not these items", "tagged", [4, 6, 9], "vocab", 25),
        {"require": [[TAGS[0]], [TAGS[2], TAGS[3]]], "exclude_tags": [TAGS[4]], "exclude_item_ids": 5},
    ),
    Spec("items excluded", "large", [5, 9, 9], "level", 26, {"exclude_item_ids": 60}),
    Spec("all excluded", "tagged", [4, 4, 4], "vocab", 27, {"exclude_item_ids": 60}),
    Spec("nothing has the tag", "tagged", [4, 4, 4], "vocab", 28, {"require": [["no such tag"]]}),
    Spec("wide", "large", [12, 100, 128], prompt_length=129),
)  # fmt: skip


def draw_logits(spec: Spec, kept: Catalog, rng: np.random.Generator) -> dict[tuple[int, ...], Row]:
    """Rows for every prefix that a live beam can have."""
    rows = {}
    for prefix in sorted(kept.children, key=lambda sid: (len(sid), sid)):
        own = tuple(kept.token_of[level][code] for level, code in enumerate(prefix))
        rows[own] = spec.change(own, rng.integers(-60, 61, VOCAB).tolist())
    return rows


def floats(row: Row, scale: float) -> npt.NDArray[np.float32]:
    return np.array([SPECIAL[v] if isinstance(v, str) else v * scale for v in row], np.float32)


def answer_of(
    spec: Spec, kept: Catalog, catalog: Catalog, rows: dict[tuple[int, ...], Row]
) -> BeamAnswer | None:
    """The oracle's answer; None where a device's own normaliser could decide otherwise."""

    def logits_of(prefix: Sid) -> npt.NDArray[np.float32]:
        own = tuple(catalog.token_of[level][code] for level, code in enumerate(prefix))
        return floats(rows[own], spec.scale)

    def lse_of(prefix: Sid) -> float:
        return float(np.float32(logsumexp(logits_of(prefix))))

    if spec.normalization == "vocab":
        return beam_search(kept, logits_of, spec.widths, "vocab", "float32", lse_of)
    answer = beam_search(kept, logits_of, spec.widths, spec.normalization)
    parents: list[tuple[Sid, float]] = [((), 0.0)]
    for level in answer.levels[: answer.failed_round]:
        scored = []
        for prefix, score in parents:
            logits = logits_of(prefix)
            lse = logsumexp(read_by_normalizer(kept, prefix, logits, spec.normalization))
            for code in kept.children[prefix]:
                logit = float(logits[kept.token_of[len(prefix)][code]])
                scored.append((score + logit - lse, prefix, logit))
        scored.sort(key=lambda entry: -entry[0])
        for one, two in pairwise(scored):
            if one[0] - two[0] < MARGIN and one[1:] != two[1:]:
                return None
        parents = list(level)
    return answer


def make_vector(number: int, spec: Spec, catalog: Catalog) -> dict[str, Any]:
    rules = dict(spec.rules)
    if "exclude_item_ids" in rules:
        ids = sorted(item.item_id for item in catalog.items)
        count = rules["exclude_item_ids"]
        rules["exclude_item_ids"] = ids[:: max(1, len(ids) // count)][:count]
    kept = catalog.keep(Rules(**rules))
    for attempt in range(100):
        rng = np.random.default_rng([number, attempt])
        prompt = rng.integers(0, VOCAB, spec.prompt_length).tolist()
        rows = draw_logits(spec, kept, rng)
        answer = answer_of(spec, kept, catalog, rows)
        if answer is not None:
            break
    else:
        raise ValueError(f"{spec.name}: every draw has beams that are too near")
    items = expand_items(answer.rows, kept, spec.num_results, spec.max_items_per_sid)
    digits: Callable[[float], float] = lambda score: float(str(np.float32(score)))  # noqa: E731
    return {
        "name": spec.name,
        "catalog": spec.catalog,
        "prompt": prompt,
        "widths": list(spec.widths),
        "normalization": spec.normalization,
        "rules": rules,
        "num_results": spec.num_results,
        "max_items_per_sid": spec.max_items_per_sid,
        "scale": spec.scale,
        "logits": {" ".join(map(str, own)): row for own, row in rows.items()},
        "failed_round": answer.failed_round,
        "levels": [[[*sid, digits(score)] for sid, score in level] for level in answer.levels],
        "item_ids": [row.item_id for row in items],
    }


def make() -> dict[str, Any]:
    """The content of the file."""
    made = catalogs()
    return {
        "format": FORMAT,
        "vocab_size": VOCAB,
        "catalogs": {
            name: {
                "token_of": [list(table) for table in catalog.token_of],
                "items": [
                    [i.item_id, list(i.sid), i.weight, int(i.servable), sorted(i.tags)]
                    for i in catalog.items
                ],
            }
            for name, catalog in made.items()
        },
        "vectors": [
            make_vector(number, spec, made[spec.catalog]) for number, spec in enumerate(SPECS)
        ],
    }


def text_of(content: dict[str, Any]) -> str:
    """One line per catalogue and vector, so that a change is seen where it is."""
    lines = ["{", f'"format":{content["format"]},', f'"vocab_size":{content["vocab_size"]},']
    compact = (",", ":")
    catalogs = [
        f"{json.dumps(name)}:{json.dumps(catalog, separators=compact)}"
        for name, catalog in content["catalogs"].items()
    ]
    vectors = [json.dumps(vector, separators=compact) for vector in content["vectors"]]
    lines += ['"catalogs":{', ",\n".join(catalogs), "},", '"vectors":[', ",\n".join(vectors), "]}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text_of(make()), encoding="utf-8")
