"""Both entry points of the decoder against transformers' full forward pass on the same checkpoint."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.tiny import (
    CPU,
    REFERENCE_OPS,
    VOCAB,
    PackedBatch,
    expected_logits,
    head_logits,
    make_checkpoint,
)
from xgr_runtime.hal.bound import bind_ops
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.hal.tolerances import TOLERANCES
from xgr_runtime.kvcache.shared import SharedKV
from xgr_runtime.kvcache.unshared import UnsharedKV
from xgr_runtime.models.base import KVCaches
from xgr_runtime.models.decoder import FEW_TOKENS
from xgr_runtime.models.registry import load_model

VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3-gqa2-wide-heads": {"family": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3-gqa1": {"family": "qwen3", "num_heads": 4, "num_kv_heads": 4, "head_dim": 8},
    "qwen3-attention-bias": {"family": "qwen3", "head_dim": 8, "attention_bias": True},
    "qwen3-gqa8-one-kv-head": {
        "family": "qwen3",
        "num_heads": 8,
        "num_kv_heads": 1,
        "head_dim": 4,
        "theta": 1e6,
    },
    "qwen2-gqa4": {"family": "qwen2", "num_heads": 8, "num_kv_heads": 2, "theta": 1e6},
    "qwen2-gqa2-tied": {"family": "qwen2", "tie_word_embeddings": True, "rms_norm_eps": 0.03},
    "llama-gqa2": {"family": "llama"},
    "llama-gqa4-theta-1e6": {"family": "llama", "num_heads": 4, "num_kv_heads": 1, "theta": 1e6},
    "llama-biases-tied": {
        "family": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
}
HISTORIES = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 26, 43]]


def assert_logits(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Within the tolerance table; its relative part refers to the row's largest logit, as sums cancel."""
    tolerance = TOLERANCES[dtype]
    largest = expected.abs().amax(-1, keepdim=True)
    worst = ((got - expected).abs() - tolerance.rtol * largest).max()
    assert got.isfinite().all()
    assert worst <= tolerance.atol, f"off by {worst} beyond the relative tolerance"
    assert expected.std() > 0.3, "logits that hardly vary prove nothing"


@pytest.mark.parametrize("first_position", [0, 4095, 32767])
@pytest.mark.parametrize("variant", VARIANTS)
def test_context_then_steps_equal_transformers(
    tmp_path: Path, variant: str, first_position: int
) -> None:
    reference = make_checkpoint(tmp_path, **VARIANTS[variant])
    model = load_model(tmp_path, CPU, torch.float32)
    check_both_paths(model, reference, first_position, torch.float32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prefill_of_many_tokens_ends_with_the_last_ones_alone(
    tmp_path: Path, variant: str
) -> None:
    reference = make_checkpoint(tmp_path, **VARIANTS[variant])
    model = load_model(tmp_path, CPU, torch.float32)
    check_both_paths(model, reference, 0, torch.float32, padding_tokens=FEW_TOKENS)


@pytest.mark.parametrize("num_tokens", [FEW_TOKENS, FEW_TOKENS + 1])
def test_where_the_last_tokens_are_picked_changes_no_answer(
    tmp_path: Path, num_tokens: int
) -> None:
    """Of few tokens behind the last norm, of more in front of the last layer's attention; into a given tensor or a new one."""
    make_checkpoint(tmp_path, "qwen3", head_dim=8)
    model, taken = load_model(tmp_path, CPU, torch.float32), list[int]()

    def attend(q_TQD: torch.Tensor, *rest: Any) -> torch.Tensor:
        taken.append(q_TQD.shape[0])
        attended: torch.Tensor = REFERENCE_OPS.prefill_attention(q_TQD, *rest)
        return attended

    padding = num_tokens - sum(map(len, HISTORIES))
    num_histories = len(HISTORIES)
    batch = PackedBatch(model, HISTORIES, padding_tokens=padding)
    inputs = batch.context_inputs()
    ops: Any = SimpleNamespace(**{**vars(REFERENCE_OPS), "prefill_attention": attend})
    got = model.context(ops, inputs, batch.kv)
    assert got is not None
    is_few = num_tokens == FEW_TOKENS
    assert taken[-1] == (num_tokens if is_few else num_histories + 1)
    out = torch.full_like(got, torch.nan)
    again = model.context(ops, dataclasses.replace(inputs, out_HM=out), batch.kv)
    assert again is not None
    assert (again is out) == is_few
    assert torch.equal(again[:num_histories], got[:num_histories])
    few = PackedBatch(model, HISTORIES)
    expected = model.context(ops, few.context_inputs(), few.kv)
    assert expected is not None
    torch.testing.assert_close(got[:num_histories], expected[:num_histories], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("first_position", [0, 32767])
@pytest.mark.parametrize("variant", ["qwen3-gqa2-wide-heads", "qwen2-gqa4", "llama-gqa2"])
def test_sixteen_bit_models_equal_transformers(
    tmp_path: Path, variant: str, first_position: int, dtype: torch.dtype
) -> None:
    reference = make_checkpoint(tmp_path, **VARIANTS[variant], dtype=dtype)
    model = load_model(tmp_path, CPU, dtype)
    assert model.head.weight_VM.dtype == dtype
    check_both_paths(model, reference, first_position, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_sixteen_bit_errors_are_no_larger_than_those_of_transformers(
    tmp_path: Path, variant: str, dtype: torch.dtype
) -> None:
    """Both against transformers in fp32 on the same rounded weights, root mean square over all logits."""
    reference = make_checkpoint(tmp_path, **VARIANTS[variant], dtype=dtype)
    exact = type(reference).from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    ours, theirs = [], []
    for logits_V, sequence in both_paths(load_model(tmp_path, CPU, dtype), 0, REFERENCE_OPS):
        expected_V = expected_logits(exact, sequence)[-1]
        ours.append(logits_V - expected_V)
        theirs.append(expected_logits(reference, sequence)[-1] - expected_V)
    ratio = torch.cat(ours).square().mean().sqrt() / torch.cat(theirs).square().mean().sqrt()
    assert ratio < 1.3


def check_both_paths(
    model: Any,
    reference: Any,
    first_position: int,
    dtype: torch.dtype,
    ops: Any = REFERENCE_OPS,
    padding_tokens: int = 3,
) -> None:
    for logits_V, sequence in both_paths(model, first_position, ops, padding_tokens):
        expected_V = expected_logits(reference, sequence, first_position)[-1]
        assert_logits(logits_V[None], expected_V[None], dtype)


def both_paths(
    model: Any, first_position: int, ops: Any, padding_tokens: int = 3
) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """(logits fp32 [V], the whole sequence they follow) of a prefill, then of two steps of several beams."""
    batch = PackedBatch(
        model, HISTORIES, first_position=first_position, padding_tokens=padding_tokens
    )
    hidden = model.context(ops, batch.context_inputs(), batch.kv)
    for h, history in enumerate(HISTORIES):
        yield head_logits(model, hidden[h]), history

    first = [[11, 12, 13], [14, 15], [16, 17, 18, 19]]
    second = [[21, 22, 23], [24, 25], [26, 27, 28, 29]]
    slots = torch.tensor([4, 2, 9, 0, 7, 5, 31, 6, 1])
    for round_, tokens in ((1, first), (2, second)):
        inputs = batch.step_inputs(tokens, slots, round_)
        hidden = model.step(ops, inputs, batch.kv)
        row = 0
        for h, history in enumerate(HISTORIES):
            for beam in range(len(first[h])):
                path = [first[h][beam], second[h][beam]][:round_]
                yield head_logits(model, hidden[row]), [*history, *path]
                row += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_ops_bound_on_the_cpu_equal_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    reference = make_checkpoint(tmp_path, "qwen3", head_dim=16, dtype=dtype)
    model = load_model(tmp_path, CPU, dtype)
    ops = bind_ops(CpuDevice(), dtype, {}, allow_reference=False)
    assert {b.op_name for b in ops.bindings if b.provider == "torch"} >= {
        "prefill_attention",
        "shared_attention",
    }
    check_both_paths(model, reference, 0, dtype, ops)


@pytest.mark.parametrize("ops_of", ["reference", "cpu"])
def test_beams_keep_their_own_tokens_through_reorders(tmp_path: Path, ops_of: str) -> None:
    """Four rounds of a search with random parents and changing widths; every row against its whole sequence."""
    reference = make_checkpoint(tmp_path, "qwen3", head_dim=8)
    model = load_model(tmp_path, CPU, torch.float32)
    bound = bind_ops(CpuDevice(), torch.float32, {}, allow_reference=False)
    ops = bound if ops_of == "cpu" else REFERENCE_OPS
    rng = np.random.default_rng(7)
    histories, widths = HISTORIES[:2], [(3, 2), (5, 4), (2, 6), (4, 1)]
    batch = PackedBatch(model, histories, num_rounds=5, num_slots=11)
    model.context(ops, batch.context_inputs(), batch.kv)
    slot_start = torch.tensor([0, 5, 11], dtype=torch.int32)
    slots = torch.tensor([0, 1, 2, 5, 6], dtype=torch.int32)
    paths = [[[int(rng.integers(VOCAB))] for _ in range(width)] for width in widths[0]]
    for round_ in range(1, 5):
        tokens = [[path[-1] for path in rows] for rows in paths]
        hidden = model.step(ops, batch.step_inputs(tokens, slots, round_), batch.kv)
        flat = [[*h, *path] for h, rows in zip(histories, paths, strict=True) for path in rows]
        for row, sequence in enumerate(flat):
            expected = expected_logits(reference, sequence)[-1:]
            assert_logits(head_logits(model, hidden[row : row + 1]), expected, torch.float32)
        if round_ == 4:
            break
        starts = (0, len(paths[0]))
        parents = [
            rng.integers(0, len(rows), width)
            for rows, width in zip(paths, widths[round_], strict=True)
        ]
        search = torch.tensor([s for s, p in enumerate(parents) for _ in p] + [2]).int()
        packed = np.concatenate(
            [*(p + start for p, start in zip(parents, starts, strict=True)), [99]]
        )
        slots_out = torch.empty(len(packed), dtype=torch.int32)
        rows_kv, tile = batch.kv.unshared.all_rows, batch.kv.unshared.tile
        parents_N = torch.from_numpy(packed).int()
        ops.reorder_unshared_kv(
            rows_kv, parents_N, slots, search, slot_start, round_, slots_out, tile
        )
        slots = slots_out[:-1]
        paths = [
            [[*rows[p], int(rng.integers(VOCAB))] for p in chosen]
            for rows, chosen in zip(paths, parents, strict=True)
        ]


def test_context_over_a_cached_prefix_equals_the_whole(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", head_dim=8)
    model = load_model(tmp_path, CPU, torch.float32)
    whole, parts = PackedBatch(model, HISTORIES), PackedBatch(model, HISTORIES)
    expected = model.context(REFERENCE_OPS, whole.context_inputs(), whole.kv)
    assert expected is not None
    cached = [4, 0, 10]
    shorter = PackedBatch(model, HISTORIES)
    prefix = [h[:c] if c else h for h, c in zip(HISTORIES, cached, strict=True)]
    parts.histories, parts.kv_len = prefix, torch.tensor([4, 1, 10, 0], dtype=torch.int32)
    model.context(REFERENCE_OPS, parts.context_inputs(), parts.kv)
    parts.histories, parts.kv_len = shorter.histories, shorter.kv_len
    got = model.context(REFERENCE_OPS, parts.context_inputs(cached), parts.kv)
    assert got is not None
    torch.testing.assert_close(got[:3], expected[:3], atol=2e-5, rtol=2e-5)


def test_embedded_rows_replace_tokens(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, "qwen3", head_dim=8)
    model = load_model(tmp_path, CPU, torch.float32)
    history = [3, 1, 4, 1, 5]
    rows = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    batch = PackedBatch(model, [history])
    inputs = batch.context_inputs()
    packed = type(inputs.packed)(inputs.packed.token_ids_T, rows, torch.tensor([1, 3]))
    got = model.context(REFERENCE_OPS, type(inputs)(**{**vars(inputs), "packed": packed}), batch.kv)
    assert got is not None
    embeds = reference.get_input_embeddings()(torch.tensor([history])).detach()
    embeds[0, 1], embeds[0, 3] = rows[0], rows[1]
    with torch.no_grad():
        expected = reference(inputs_embeds=embeds).logits[0, -1]
    assert_logits(head_logits(model, got[:1]), expected[None], torch.float32)


def test_tokens_at_the_top_of_the_vocabulary(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, "llama")
    model = load_model(tmp_path, CPU, torch.float32)
    assert model.vocab_size == VOCAB
    history = [VOCAB - 1, 0, VOCAB - 1]
    batch = PackedBatch(model, [history])
    hidden = model.context(REFERENCE_OPS, batch.context_inputs(), batch.kv)
    assert hidden is not None
    assert_logits(
        head_logits(model, hidden[:1]), expected_logits(reference, history)[-1:], torch.float32
    )


def to_meta(value: Any) -> Any:
    """A copy of a dataclass of tensors (nested) without their content."""
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: to_meta(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return type(value)(**parts)
    return value


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_both_paths_run_without_any_content(tmp_path: Path, family: str) -> None:
    """On the meta device a host read or a shape that depends on data raises; only shapes are left."""
    make_checkpoint(tmp_path, family)
    meta = torch.device("meta")
    batch = PackedBatch(load_model(tmp_path, CPU, torch.float32), HISTORIES)
    model = load_model(tmp_path, meta, torch.float32)
    shared = SharedKV(model.kv_spec, batch.kv.shared.num_pages, batch.page_size, meta)
    unshared = UnsharedKV(model.kv_spec, batch.kv.unshared.num_slots, 3, meta)
    kv = KVCaches(shared, unshared)
    context = to_meta(batch.context_inputs())
    hidden = model.context(REFERENCE_OPS, context, kv)
    assert hidden is not None
    assert hidden.shape == (len(HISTORIES) + 1, model.hidden_size)
    tokens = [[11, 12, 13], [14, 15], [16, 17, 18, 19]]
    step = to_meta(batch.step_inputs(tokens, torch.arange(9), 2))
    hidden = model.step(REFERENCE_OPS, step, kv)
    assert hidden.shape == (9 + 1, model.hidden_size)
    rows = torch.empty(10, dtype=torch.int32, device=meta)
    starts = torch.empty(4, dtype=torch.int32, device=meta)
    all_rows, tile = unshared.all_rows, unshared.tile
    REFERENCE_OPS.reorder_unshared_kv(all_rows, rows, rows, rows, starts, 1, rows, tile)
    catalog = model.head.for_catalog([np.array([3, -1], np.int32)])
    assert catalog.level_logits(REFERENCE_OPS, hidden, 0).shape == (10, 2)
    assert catalog.vocab_logsumexp(REFERENCE_OPS, hidden).shape == (10,)
