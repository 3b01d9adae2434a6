"""Norms, embeddings, rotary embedding and gated activation against numpy in float64."""

import numpy as np
import pytest
import torch

from xgr_runtime.hal.ops.activation import silu_mul
from xgr_runtime.hal.ops.embedding import embedding_rms_norm_cos_sin
from xgr_runtime.hal.ops.norm import add_rms_norm, rms_norm
from xgr_runtime.hal.ops.rope import rotary_embedding
from xgr_runtime.hal.tolerances import TOLERANCES

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


def assert_near(got: torch.Tensor, expected: np.ndarray, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    tolerance = TOLERANCES[dtype]
    np.testing.assert_allclose(
        got.double().numpy(), expected, atol=tolerance.atol, rtol=tolerance.rtol
    )


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 7), (5, 32), (3, 4, 16)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype) * 3, random(shape[-1], dtype=dtype, seed=1)
    got = rms_norm.reference(x, weight, EPS)
    assert_near(got, normed(x.double().numpy(), weight.double().numpy()), dtype)


def test_eps_counts_where_values_are_small() -> None:
    x = random(3, 8, dtype=torch.float32) * 1e-3
    got = rms_norm.reference(x, torch.ones(8), EPS)
    assert_near(got, normed(x.double().numpy(), np.ones(8)), torch.float32)


def test_rms_norm_of_large_fp16_values_does_not_overflow() -> None:
    x = torch.full((1, 8), 30000.0, dtype=torch.float16)
    got = rms_norm.reference(x, torch.ones(8, dtype=torch.float16), EPS)
    assert_near(got, np.ones((1, 8)), torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_adds_in_place(dtype: torch.dtype) -> None:
    x, residual = random(5, 16, dtype=dtype), random(5, 16, dtype=dtype, seed=2)
    weight, before = random(16, dtype=dtype, seed=1), residual.clone()
    got = add_rms_norm.reference(x, residual, weight, EPS)
    assert torch.equal(residual, before + x)
    assert_near(got, normed(residual.double().numpy(), weight.double().numpy()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code_dtype", [torch.int32, torch.int64])
def test_embeddings_of_codes_with_their_norm_and_angles(
    code_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    embedding, weight = random(11, 20, dtype=dtype), random(20, dtype=dtype, seed=1)
    token_of, codes = [7, 0, 10, 3], [2, 2, 0, 3, 1]
    positions = np.array([0, 1, 4095, 32767, 131071])
    frequency = np.array([1.0, 0.37, 1e-3] * 2, np.float32)
    given = (weight, EPS, torch.from_numpy(positions), torch.from_numpy(frequency))
    by_code = embedding_rms_norm_cos_sin.reference(
        embedding, torch.tensor(codes, dtype=code_dtype), torch.tensor(token_of), *given
    )
    residual, rows, cos, sin = by_code
    tokens = [token_of[code] for code in codes]
    assert torch.equal(residual, torch.stack([embedding[token] for token in tokens]))
    assert_near(rows, normed(residual.double().numpy(), weight.double().numpy()), dtype)
    # the product is fp32's, as the checkpoints were trained: what follows is as good as from float64
    angle = (positions.astype(np.float32)[:, None] * frequency).astype(np.float64)
    np.testing.assert_allclose(cos.numpy(), np.cos(angle), atol=2e-7, rtol=0)
    np.testing.assert_allclose(sin.numpy(), np.sin(angle), atol=2e-7, rtol=0)
    by_token = embedding_rms_norm_cos_sin.reference(embedding, torch.tensor(tokens), None, *given)
    assert all(torch.equal(got, want) for got, want in zip(by_token, by_code, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_embedding_turns_pairs_by_their_angle(dtype: torch.dtype) -> None:
    dim, positions, theta = 6, np.array([0, 1, 4095, 32767]), 1e4
    fused = random(4, 5, dim, dtype=dtype)
    q, k = (
        fused[:, :3],
        fused[:, 3:],
    )  # views with another stride over tokens, as a fused product gives
    angle = positions[:, None] * theta ** (-np.arange(0, dim, 2) / dim)
    angle = np.concatenate((angle, angle), -1)
    cos, sin = torch.from_numpy(np.cos(angle)).float(), torch.from_numpy(np.sin(angle)).float()
    got_q, got_k = rotary_embedding.reference(q, k, cos, sin)
    for got, given in ((got_q, q), (got_k, k)):
        x = given.double().numpy()
        # As complex numbers: the pair (i, i + D / 2) is one number, rotation is one product.
        pairs = x[..., : dim // 2] + 1j * x[..., dim // 2 :]
        turned = pairs * np.exp(1j * angle[:, None, : dim // 2])
        assert_near(got, np.concatenate((turned.real, turned.imag), -1), dtype)
        assert got.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = random(4, 14, dtype=dtype) * 2
    gate, up = np.split(gate_up.double().numpy(), 2, axis=-1)
    assert_near(silu_mul.reference(gate_up), gate / (1 + np.exp(-gate)) * up, dtype)
