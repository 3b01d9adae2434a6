"""The client's side: lines that people type and replies of a server that is none end in named errors only."""

from __future__ import annotations

import collections
import json
import random
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from tests.service.stand_in import answer
from xgr_runtime.errors import InvalidRequest
from xgr_runtime.files import parse_json
from xgr_runtime.service._pb.xgr.v1 import recommend_pb2 as pb
from xgr_runtime.service.json_lines import (
    REQUEST,
    RULES,
    SEARCH,
    request_from_json,
    result_to_json,
)
from xgr_runtime.service.translate import request_to_proto
from xgr_runtime.service.translate_result import result_from_proto, result_to_proto
from xgr_runtime.types import RecRequest, Search

NAMES = (*REQUEST, *SEARCH, *RULES, "x", "\ud800", "a" * 100)
PLAIN = (None, True, 0, -1, 2**63, 2**64, 10**4000, 1.5, float("nan"), "", "\ud800", "k" * 300)
COUNTS = pytest.mark.parametrize("count", [2000, pytest.param(40_000, marks=pytest.mark.slow)])


def random_value(draw: random.Random, depth: int) -> Any:
    choice = draw.randrange(len(PLAIN) + 2)
    if choice < len(PLAIN) or not depth:
        return PLAIN[choice % len(PLAIN)]
    values = [random_value(draw, depth - 1) for _ in range(draw.randrange(4))]
    return values if choice == len(PLAIN) else {draw.choice(NAMES): value for value in values}


def refused(error: ValueError) -> str:
    """A refusal is short in each of its parts."""
    if isinstance(error, InvalidRequest):
        assert all(len(field) < 1000 and len(text) < 2000 for field, text in error.violations)
        return "refused"
    assert len(str(error)) < 500
    return "no JSON"


def read(value: Any) -> str:
    try:
        message = request_to_proto(request_from_json(value, Search()))
    except InvalidRequest as error:
        return refused(error)
    assert message.SerializeToString()
    return "sent"


def mutated(draw: random.Random, good: bytes, odd: tuple[bytes, ...]) -> bytes:
    data = bytearray(good)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at, choice = draw.randrange(len(data) + 1), draw.randrange(4)
        if choice == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif choice == 1:
            data[at:at] = draw.choice(odd)
        elif choice == 2:
            del data[at : at + draw.randrange(1, 9)]
        else:
            data[at:at] = draw.randbytes(draw.randrange(1, 6))
    return bytes(data)


@COUNTS
def test_values_of_any_kind(count: int) -> None:
    draw = random.Random(1)
    counts: collections.Counter[str] = collections.Counter()
    for _ in range(count):
        history = {"history_item_ids": [1, 2]} if draw.random() < 0.7 else {}
        search = {draw.choice(tuple(SEARCH)): random_value(draw, 3)}
        value = {**history, "searches": [search]} if draw.random() < 0.6 else random_value(draw, 4)
        counts[read(value)] += 1
    assert min(counts["sent"], counts["refused"]) > count / 20, counts


@COUNTS
def test_lines_of_any_bytes(count: int) -> None:
    draw = random.Random(2)
    good = b'{"history_item_ids": [1, 2], "searches": [{"beam_width": 3}]}'
    odd = (b"[", b"{", b"1" * 5000, b"NaN", b"\xff", b"1e999", b"[" * 100_000, b'"\\ud800"')
    counts: collections.Counter[str] = collections.Counter()
    for _ in range(count):
        try:
            value = parse_json(mutated(draw, good, odd))
        except ValueError as error:
            counts[refused(error)] += 1
            continue
        counts[read(value)] += 1
    assert counts["no JSON"] > count / 4
    assert counts["refused"] > count / 20


@COUNTS
def test_replies_of_any_bytes(count: int) -> None:
    draw = random.Random(3)
    search = Search(catalog="keys", return_level_scores=True)
    request = RecRequest("a", history_item_ids=np.array([1, 2]), searches=(search,))
    good = result_to_proto(answer(request)).SerializeToString()
    counts: collections.Counter[str] = collections.Counter()
    for _ in range(count):
        try:
            result = result_from_proto(
                pb.RecommendResponse.FromString(mutated(draw, good, (b"\xff" * 10, b"\x80" * 11)))
            )
        except (ValueError, DecodeError) as error:
            counts[type(error).__name__] += 1
            continue
        json.dumps(result_to_json(result))
        counts["read"] += 1
    assert counts["read"] > count / 20


def test_a_number_of_thousands_of_digits_is_refused_by_field() -> None:
    history = np.zeros(0, np.int64)
    request = RecRequest("a", history_item_ids=history, searches=(Search(beam_width=10**5000),))
    with pytest.raises(InvalidRequest) as caught:
        request_to_proto(request)
    assert caught.value.violations == (
        ("searches[0].beam_width", "must be in [0, 2^32), got an integer of 16610 bits"),
    )
