"""The vectors of the package are what the oracle says, and they cover what they are there for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.conformance.make_vectors import TARGET, make, text_of
from tests.helpers.oracle import Catalog, Item, Rules, brute_force
from xgr_runtime.conformance.vectors import VectorSet, load_vectors, parse_vectors
from xgr_runtime.types import NORMALIZATIONS

if TYPE_CHECKING:
    import numpy.typing as npt

    from tests.helpers.oracle import Sid
    from xgr_runtime.conformance.vectors import Vector


@pytest.fixture(scope="module")
def vectors() -> VectorSet:
    return load_vectors()


def test_the_file_is_what_the_oracle_makes() -> None:
    expected = text_of(make())
    assert TARGET.read_text(encoding="utf-8") == expected, (
        "run python -m tests.conformance.make_vectors and look at what changed"
    )
    assert len(expected) < 300_000


def final_scores(vectors: VectorSet, vector: Vector) -> list[tuple[float, float]]:
    """(score of the vector, score of the exhaustive float64 search) of each of its final rows."""
    raw = vectors.catalogs[vector.catalog]
    items = [Item(i.item_id, i.sid, i.weight, frozenset(i.tags), i.is_servable) for i in raw.items]
    rules = vector.rules
    kept = Catalog(tuple(items), raw.token_of).keep(
        Rules(rules.require, rules.exclude_tags, list(rules.exclude_item_ids))
    )

    def logits_of(prefix: Sid) -> npt.NDArray[np.float32]:
        return vector.logits[tuple(raw.token_of[lv][code] for lv, code in enumerate(prefix))]

    exact = dict(brute_force(kept, logits_of, vector.normalization))
    return [(score, exact[sid]) for sid, score in vector.levels[-1]]


def test_every_final_score_is_that_of_the_exhaustive_search(vectors: VectorSet) -> None:
    for vector in vectors.vectors:
        if vector.failed_round is None:
            for got, exact in final_scores(vectors, vector):
                assert got == pytest.approx(exact, rel=1e-5, abs=1e-4), vector.name


def test_they_cover_the_contract(vectors: VectorSet) -> None:
    all_vectors = vectors.vectors
    assert len({v.name for v in all_vectors}) == len({v.prompt for v in all_vectors}) == 40
    assert {v.normalization for v in all_vectors} == set(NORMALIZATIONS)
    assert {len(v.widths) for v in all_vectors} >= {1, 2, 3, 4, 8}
    assert {v.failed_round for v in all_vectors} >= {None, 0, 1, 2}
    assert max(len(v.levels[-1]) for v in all_vectors) == 128
    assert any(list(v.widths) == sorted(v.widths, reverse=True) and v.widths[0] > v.widths[-1] for v in all_vectors)  # fmt: skip
    assert any(v.widths[0] < v.widths[-1] for v in all_vectors)
    assert any(0 < len(v.levels[0]) < v.widths[0] for v in all_vectors)
    assert any(v.failed_round is None and not v.levels[-1] for v in all_vectors)
    assert {len(v.prompt) for v in all_vectors} >= {1, 3, 129, 130, 150}
    tied = [v for v in all_vectors if v.levels[-1] and len({s for _, s in v.levels[-1]}) == 1]
    assert {v.name for v in tied} >= {"all logits equal, a cut inside a tie"}
    values = np.concatenate([row for v in all_vectors for row in v.logits.values()])
    assert np.isnan(values).any()
    assert np.isposinf(values).any()
    assert np.isneginf(values).any()
    assert np.abs(values[np.isfinite(values)]).max() > 1e30


def test_a_file_of_another_format_is_refused() -> None:
    data = json.loads(TARGET.read_text(encoding="utf-8"))
    with pytest.raises(ValueError, match="format 2"):
        parse_vectors({**data, "format": 2})
    data["vectors"][0]["logits"][""].pop()
    with pytest.raises(ValueError, match="47 entries, expected 48"):
        parse_vectors(data)
