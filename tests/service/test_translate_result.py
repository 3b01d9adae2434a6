"""RecResult <-> message: bit-equal round trips, the layout of the bytes, and refusal of inconsistent replies."""

import struct

import numpy as np
import pytest
from hypothesis import given

from tests.service.strategies import plain, results
from xgr_runtime.service._pb.xgr.v1 import recommend_pb2 as pb
from xgr_runtime.service.translate_result import result_from_proto, result_to_proto
from xgr_runtime.types import RecResult, SearchResult, Timings


def example() -> RecResult:
    search = SearchResult(
        item_ids=np.array([7, -1], dtype=np.int64),
        keys=("a", ""),
        sids=np.array([[1, 2, 3], [4, 5, 4294967295]], dtype=np.uint32),
        scores=np.array([-0.5, -2.25], dtype=np.float32),
        level_scores=None,
        num_valid=2,
        num_items=2,
        status="ok",
        reason="",
        catalog="films",
        catalog_version="v1",
        normalization="level",
        temperature=1.0,
        beam_widths=(4, 4, 4),
        num_unknown_exclusions=1,
    )
    return RecResult("r-1", (search,), 3, 1, 12, 0, "m", "t", Timings(0.5, 2.0, 2.5))


@given(results())
def test_a_result_survives_the_wire(result: RecResult) -> None:
    data = result_to_proto(result).SerializeToString()
    assert plain(result_from_proto(pb.RecommendResponse.FromString(data))) == plain(result)


def test_arrays_are_little_endian_rows() -> None:
    search = result_to_proto(example()).results[0]
    assert search.item_ids == struct.pack("<2q", 7, -1)
    assert search.sids == struct.pack("<6I", 1, 2, 3, 4, 5, 4294967295)
    assert search.scores == struct.pack("<2f", -0.5, -2.25)
    assert (search.num_items, search.num_levels, search.status) == (2, 3, pb.SEARCH_STATUS_OK)
    assert not search.HasField("level_scores")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("item_ids", b"123", r"results\[0\]\.item_ids must be 16 bytes for 2 items, got 3"),
        ("sids", bytes(20), r"results\[0\]\.sids must be 24 bytes for 2 items, got 20"),
        ("scores", b"", r"results\[0\]\.scores must be 8 bytes for 2 items, got 0"),
        ("level_scores", b"", r"results\[0\]\.level_scores must be 24 bytes for 2 items, got 0"),
        ("status", 0, r"results\[0\]\.status 0 is not known to this client"),
        ("normalization", 77, r"results\[0\]\.normalization 77 is not known to this client"),
        ("num_items", 3, r"results\[0\]\.item_ids must be 24 bytes for 3 items, got 16"),
    ],
)
def test_an_inconsistent_reply_is_refused(field: str, value: object, message: str) -> None:
    reply = result_to_proto(example())
    setattr(reply.results[0], field, value)
    with pytest.raises(ValueError, match=message):
        result_from_proto(reply)


def test_missing_keys_are_refused() -> None:
    reply = result_to_proto(example())
    reply.results[0].keys.pop()
    with pytest.raises(ValueError, match=r"results\[0\]\.keys must hold 2 keys, got 1"):
        result_from_proto(reply)
