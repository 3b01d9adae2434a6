"""Vectors and decoder through whole engines: right on a strict device, and wrong providers and vectors are seen.

`test_run.py` runs all of it on the device of the session.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.conformance.providers import provided
from tests.helpers.strict_device import StrictDevice
from xgr_runtime.conformance.decoder_check import PROMPT_LENGTHS, DecoderCheck
from xgr_runtime.conformance.decoder_reference import DecoderShape, PlainDecoder, random_weights
from xgr_runtime.conformance.engines import EngineEntry, EngineShape
from xgr_runtime.conformance.searches import SearchCheck
from xgr_runtime.conformance.vectors import Vector, VectorSet, load_vectors
from xgr_runtime.hal.cpu import CpuDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from xgr_runtime.hal.device import Device, Graph


FLOAT, HALF = torch.float32, torch.bfloat16
FEW = ("three levels", "three levels, valid", "shrinking widths, a long prompt", "eight levels", "NaN later", "all logits equal", "+inf")  # fmt: skip


def few(names: Sequence[str] = FEW) -> VectorSet:
    vectors = load_vectors()
    chosen = tuple(v for v in vectors.vectors if v.name in names)
    assert len(chosen) == len(names)
    return dataclasses.replace(vectors, vectors=chosen)


def search(folder: Path, vectors: VectorSet) -> EngineEntry:
    return SearchCheck(vectors, folder).run(
        CpuDevice(), EngineShape(FLOAT, 4), allow_reference=False
    )


def test_captured_graphs_in_half_precision_and_csr(tmp_path: Path) -> None:
    """The second catalogue has fewer codes: a round captured on rows of the first one's batch would read beyond it."""
    strict = StrictDevice(is_graph_per_round=True)
    check = SearchCheck(few(("three levels", "eight levels")), tmp_path)
    entry = check.run(strict, EngineShape(HALF, 128, is_dense=False), allow_reference=True)
    assert entry.result == "passed", entry.failures
    assert entry.num_graph_captures > 0


def keep_slots(reference: Callable[..., Any]) -> Callable[..., Any]:
    """A reorder that leaves every row's keys and values where they are."""

    def wrong(*args: Any, **options: Any) -> None:
        kv_rows = args[0].clone()
        reference(*args, **options)
        args[0].copy_(kv_rows)

    return wrong


def drop_last(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Writes all keys and values but the last token's."""

    def wrong(k: torch.Tensor, v: torch.Tensor, *rest: Any) -> None:
        *pages, slots = rest
        is_real = slots >= pages[0].shape[1]
        last = int(is_real.nonzero().max()) if bool(is_real.any()) else 0
        reference(k[:last], v[:last], *pages, slots[:last])

    return wrong


def swap_keys_and_values(reference: Callable[..., Any]) -> Callable[..., Any]:
    return lambda k, v, *rest: reference(v, k, *rest)


def ties_backwards(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Later codes win ties: the last children come first where scores are equal."""

    def wrong(*args: Any) -> None:
        children = args[5]
        reference(*args)
        scores = children.scores_N
        for first in range(len(scores) - 1):
            if scores[first] == scores[first + 1] > -torch.inf:
                for name in ("nodes_N", "parents_N", "codes_N"):
                    rows = getattr(children, name)
                    rows[[first, first + 1]] = rows[[first + 1, first]]

    return wrong


def ignore_failures(reference: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: None


def half_off(reference: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: reference(*args) + 0.5


def fails(reference: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(*args: Any) -> None:
        raise RuntimeError("kernel 7 did not start")

    return wrong


@pytest.mark.parametrize(
    ("op", "make", "text"),
    [
        ("reorder_unshared_kv", keep_slots, "failed round: expected None, got"),
        ("write_shared_kv", drop_last, "failed round: expected None, got 0"),
        ("write_unshared_kv", swap_keys_and_values, "failed round: expected None, got 1"),
        ("select_beams", ties_backwards, "rank 0: expected"),
        ("flag_failed_searches", ignore_failures, "failed round: expected"),
        ("children_logsumexp", half_off, "round 0, rank 0: expected"),
    ],
)
def test_a_wrong_provider_is_seen_by_the_vectors(
    op: str, make: Callable[[Callable[..., Any]], Callable[..., Any]], text: str, tmp_path: Path
) -> None:
    with provided(op, make):
        entry = search(tmp_path, few())
    assert entry.result == "failed"
    assert entry.providers[op] == ["temporary"]
    assert any(text in message for _, message in entry.failures), entry.failures


def test_a_provider_that_raises_fails_and_is_named(tmp_path: Path) -> None:
    with provided("select_beams", fails):
        entry = search(tmp_path, few(FEW[:1]))
    assert entry.result == "failed"
    assert "kernel 7 did not start" in entry.failures[0][1]


def test_a_device_without_a_provider_is_refused_with_every_reason(tmp_path: Path) -> None:
    check = SearchCheck(few(FEW[:1]), tmp_path)
    entry = check.run(StrictDevice(), EngineShape(FLOAT, 4), allow_reference=False)
    assert (entry.result, entry.num_checked) == ("refused", 0)
    assert "op 'select_beams' has no provider on strict" in entry.reason


def worse(vector: Vector) -> Vector:
    """With the score of the best final row changed by the smallest step."""
    (sid, score), *rest = vector.levels[-1]
    other = float(np.nextafter(np.float32(score), np.float32(0)))
    return dataclasses.replace(vector, levels=(*vector.levels[:-1], ((sid, other), *rest)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (worse, "round 2, rank 0: expected"),
        (lambda v: dataclasses.replace(v, item_ids=v.item_ids[::-1]), "items: expected"),
        (lambda v: dataclasses.replace(v, failed_round=1), "failed round: expected 1, got None"),
        (
            lambda v: dataclasses.replace(v, levels=(v.levels[0][:-1], *v.levels[1:])),
            "round 0: expected 3 beams, got 4",
        ),
    ],
)
def test_a_wrong_vector_is_seen(
    change: Callable[[Vector], Vector], text: str, tmp_path: Path
) -> None:
    vectors = few(FEW[:1])
    wrong = dataclasses.replace(vectors, vectors=tuple(map(change, vectors.vectors)))
    entry = search(tmp_path, wrong)
    assert entry.result == "failed"
    assert text in entry.failures[0][1]


def without_the_last_key(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Attends to all tokens of a history but its last."""

    def wrong(*args: Any) -> Any:
        *head, kv_len_H, scale, max_rows, max_kv, kv_lens = args
        return reference(*head, (kv_len_H - 1).clamp(min=0), scale, max_rows, max_kv, kv_lens)

    return wrong


def first_only(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Takes the first of two partial attentions for the whole."""
    return lambda out_a, lse_a, out_b, lse_b: (out_a.clone(), lse_a.clone())


def one_position_late(reference: Callable[..., Any]) -> Callable[..., Any]:
    """Turns queries, not keys."""
    return lambda q, k, cos, sin: (reference(q, k, cos, sin)[0], k.contiguous())


@pytest.mark.parametrize(
    ("op", "make"),
    [
        ("shared_attention", without_the_last_key),
        ("merge_attention_states", first_only),
        ("rotary_embedding", one_position_late),
        ("rms_norm", lambda reference: lambda x, w, eps: reference(x, w * 1.01, eps)),
    ],
)
def test_a_wrong_provider_is_seen_by_the_decoder(
    op: str, make: Callable[[Callable[..., Any]], Callable[..., Any]], tmp_path: Path
) -> None:
    with provided(op, make):
        entry = DecoderCheck(FLOAT, tmp_path).run(
            CpuDevice(), EngineShape(FLOAT, 128), allow_reference=False
        )
    assert entry.result == "failed"
    assert entry.num_failed > 3


@pytest.mark.fake_npu
def test_a_graph_that_keeps_the_lengths_of_its_capture_is_seen(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = type(device).capture

    def capture_once_and_for_all(self: Device, name: str, fn: Callable[[], None]) -> Graph:
        graph = capture(self, name, fn)
        replay, lengths = graph.replay, list[tuple[int, ...]]()

        def with_the_first_lengths(kv_lens: Sequence[int] = ()) -> None:
            lengths.append(tuple(kv_lens))
            replay(lengths[0])

        graph.replay = with_the_first_lengths  # type: ignore[method-assign]
        return graph

    monkeypatch.setattr(type(device), "capture", capture_once_and_for_all)
    check = DecoderCheck(torch.float16, tmp_path)
    entry = check.run(device, EngineShape(torch.float16, 128), allow_reference=False)
    assert entry.result == "failed"
    failed = [what.partition(" tokens, ")[::2] for what, _ in entry.failures]
    seen = {int(n) for n, way in failed if way == "captured"}
    # 250 and 129 meet the graph that the very first length was replayed in, all others one of their own line
    assert seen == {length for line in PROMPT_LENGTHS for length in line} - {1, 17, 127, 300}
    assert "alone" not in {way for _, way in failed}


def test_the_plain_decoder_is_that_of_transformers(tmp_path: Path) -> None:
    from tests.helpers.tiny_models import hf_logits, load_hf  # noqa: PLC0415 - seconds to import

    sizes = DecoderShape()
    DecoderCheck(FLOAT, tmp_path)
    tokens = [5, 90, 1, 33, 33, 7]
    expected = hf_logits(load_hf(tmp_path), tokens)
    decoder = PlainDecoder(sizes, random_weights(sizes, FLOAT))
    logits, past = decoder.read(tokens[:4])
    assert logits == pytest.approx(expected[3].numpy(), abs=1e-4)
    assert decoder.continue_from(past, [[33], [2]])[0] == pytest.approx(expected[4].numpy(), abs=1e-4)  # fmt: skip
    assert decoder.continue_from(past, [tokens[4:]])[0] == pytest.approx(expected[5].numpy(), abs=1e-4)  # fmt: skip
