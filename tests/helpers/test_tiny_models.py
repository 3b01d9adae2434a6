"""transformers' constrained search is the oracles' search: two independent witnesses of the same contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.helpers.catalogs import random_catalog, scattered_tokens
from tests.helpers.oracle import beam_search
from tests.helpers.tiny_models import (
    CONFIGS,
    TinyShape,
    hf_constrained_generate,
    hf_logits,
    hf_reference,
    load_hf,
    write_tiny_model,
)
from xgr_runtime.conformance.same_answer import (
    Answer,
    BeamTrace,
    SameAnswerTotals,
    assert_same_answer,
)

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from tests.helpers.oracle import Sid


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_generate_equals_the_plain_beam_search(tmp_path: Path, family: str) -> None:
    folder = write_tiny_model(tmp_path, family, TinyShape(vocab_size=48), seed=3)  # type: ignore[arg-type]
    model = load_hf(folder)
    token_of = scattered_tokens([12, 12, 12], 48, seed=5)
    catalog = random_catalog(7, 300, token_of)
    prompts = [[1, 2, 3, 4], [9], [7, 40, 2, 2, 2, 31, 8]]
    generated = hf_constrained_generate(
        model, prompts, catalog.children.__getitem__, token_of, width=8
    )
    totals = SameAnswerTotals()
    for prompt, rows in zip(prompts, generated, strict=True):
        ref = hf_reference(model, prompt, catalog.children.__getitem__, token_of)
        totals.add(assert_same_answer(Answer(rows, 8), ref, 1e-4, [8, 8, 8]))

        def logits_of(prefix: Sid, prompt: list[int] = prompt) -> npt.NDArray[np.float64]:
            tokens = [token_of[level][code] for level, code in enumerate(prefix)]
            return hf_logits(model, [*prompt, *tokens])[-1].double().numpy()

        plain = beam_search(catalog, logits_of, 8)
        assert_same_answer(Answer.from_trace(BeamTrace(plain.levels)), ref, 1e-4, [8, 8, 8])
        assert plain.sids == [sid for sid, _ in rows]
    assert totals.share_identical == 1.0


def test_positions_can_start_anywhere(tmp_path: Path) -> None:
    model = load_hf(write_tiny_model(tmp_path, "llama"))
    near, far = hf_logits(model, [1, 2, 3]), hf_logits(model, [1, 2, 3], first_position=1000)
    assert float((near - far).abs().max()) < 1e-3
