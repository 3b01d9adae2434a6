"""Level logits and the vocabulary's normaliser against numpy in float64."""

import gc
import weakref

import numpy as np
import pytest
import torch

from tests.models.tiny import REFERENCE_OPS
from xgr_runtime.errors import CheckpointError
from xgr_runtime.models.head import Head

VOCAB, HIDDEN = 5000, 12


def make(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> tuple[Head, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    return Head(weight, scale), torch.randn(4, HIDDEN, generator=generator).to(dtype)


def table(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_level_logits_are_fp32_sums_in_code_order(dtype: torch.dtype, scale: float) -> None:
    head, hidden = make(dtype, scale)
    levels = [table(7, 3, 4999, 0), table(3, 3, 4)]  # ranges may overlap, also inside a level
    catalog = head.for_catalog(levels)
    logits = hidden.double().numpy() @ head.weight_VM.double().numpy().T * scale
    for level, tokens in enumerate(levels):
        got = catalog.level_logits(REFERENCE_OPS, hidden, level)
        assert got.dtype == torch.float32
        np.testing.assert_allclose(got.numpy(), logits[:, tokens], atol=1e-5, rtol=1e-5)
    expected = np.log(np.exp(logits).sum(-1))
    got = catalog.vocab_logsumexp(REFERENCE_OPS, hidden)
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-5, rtol=1e-5)


def test_a_level_of_several_tiles() -> None:
    head, hidden = make()
    tokens = np.random.default_rng(0).permutation(VOCAB).astype(np.int32)
    got = head.for_catalog([tokens]).level_logits(REFERENCE_OPS, hidden, 0)
    logits = hidden.double().numpy() @ head.weight_VM.double().numpy().T
    np.testing.assert_allclose(got.numpy(), logits[:, tokens], atol=1e-5, rtol=1e-5)


def test_absent_codes_are_minus_infinity() -> None:
    head, hidden = make()
    catalog = head.for_catalog([table(-1, 5, -1), table(2, 3)])
    got = catalog.level_logits(REFERENCE_OPS, hidden, 0)
    assert torch.equal(got[:, [0, 2]], torch.full((4, 2), -torch.inf))
    assert got[:, 1].isfinite().all()
    assert catalog.level_tokens(0).tolist() == [0, 5, 0]
    hidden[0] = torch.nan
    assert catalog.level_logits(REFERENCE_OPS, hidden, 0)[0, 0] == -torch.inf


@pytest.mark.parametrize(("level", "code", "token"), [(0, 1, VOCAB), (1, 2, 2**31 - 1), (1, 0, -2)])
def test_tokens_outside_the_vocabulary_are_refused(level: int, code: int, token: int) -> None:
    head, _ = make()
    levels = [table(1, 2, 3), table(4, 5, VOCAB - 1)]
    levels[level][code] = token
    message = f"token {token} .level {level}, code {code}.*has {VOCAB} tokens"
    with pytest.raises(CheckpointError, match=message):
        head.for_catalog(levels)


def test_catalogues_with_one_token_table_share_rows_until_both_are_gone() -> None:
    head, hidden = make()
    first, second = head.for_catalog([table(1, 2, -1)]), head.for_catalog([table(1, 2, -1)])
    other = head.for_catalog([table(1, 2, 0)])
    assert first.levels[0].weight_CM is second.levels[0].weight_CM
    assert other.levels[0].weight_CM is not first.levels[0].weight_CM
    rows = weakref.ref(first.levels[0])
    expected = first.level_logits(REFERENCE_OPS, hidden, 0)
    del first
    gc.collect()
    assert rows() is not None
    assert torch.equal(second.level_logits(REFERENCE_OPS, hidden, 0), expected)
    del second
    gc.collect()
    assert rows() is None
