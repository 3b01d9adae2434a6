"""RecRequest <-> message: round trips over the wire's bytes, and every violation by its field path."""

import numpy as np
import pytest
from hypothesis import given

from tests.service.strategies import plain, requests
from xgr_runtime.config import LimitsConfig, RuntimeConfig
from xgr_runtime.errors import InvalidRequest
from xgr_runtime.service._pb.xgr.v1 import recommend_pb2 as pb
from xgr_runtime.service.translate import request_from_proto, request_to_proto
from xgr_runtime.service.wire_arrays import Violations
from xgr_runtime.types import RecRequest, Rules, Search
from xgr_runtime.xschedule.request_check import check_request

LIMITS = LimitsConfig(
    max_beam_width=1024,
    max_num_results=2048,
    max_input_items=6,
    max_prompt_tokens=6,
    max_exclusions=10,
    max_tags=12,
)
HISTORY = pb.Int64Values(values=[1, 2])


def parse(message: pb.RecommendRequest, limits: LimitsConfig = LIMITS) -> RecRequest:
    return request_from_proto(message, limits, message.request_id, None, Violations())


def faults(message: pb.RecommendRequest, limits: LimitsConfig = LIMITS) -> dict[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        parse(message, limits)
    assert len(dict(caught.value.violations)) == len(caught.value.violations)
    return dict(caught.value.violations)


def with_search(**fields: object) -> pb.RecommendRequest:
    return pb.RecommendRequest(history_item_ids=HISTORY, searches=[pb.Search(**fields)])  # type: ignore[arg-type]


def asked(rules: Rules) -> RecRequest:
    return RecRequest(history_item_ids=np.ones(1, np.int64), searches=(Search(rules=rules),))


@given(requests())
def test_a_request_survives_the_wire(request: RecRequest) -> None:
    data = request_to_proto(request).SerializeToString()
    assert plain(parse(pb.RecommendRequest.FromString(data))) == plain(request)


def test_defaults_are_left_to_the_engine() -> None:
    request = parse(pb.RecommendRequest(history_item_ids=HISTORY, searches=[pb.Search()]))
    assert request.searches == (Search(),)
    assert (request.on_overflow, request.on_unknown) == (None, None)
    assert request.history_item_ids is not None
    assert request.history_item_ids.tolist() == [1, 2]


def test_request_id_and_deadline_come_from_the_call() -> None:
    message = pb.RecommendRequest(request_id="x", history_item_ids=HISTORY, searches=[pb.Search()])
    request = request_from_proto(message, LIMITS, "chosen", 12.5, Violations())
    assert (request.request_id, request.deadline_s) == ("chosen", 12.5)


@pytest.mark.parametrize(
    "name", ["history_item_ids", "history_keys", "history_sids", "prompt_token_ids"]
)
def test_a_present_empty_input_is_not_an_absent_one(name: str) -> None:
    message = pb.RecommendRequest(searches=[pb.Search()])
    getattr(message, name).SetInParent()
    if name == "history_sids":
        message.history_sids.num_levels = 3
    request = parse(pb.RecommendRequest.FromString(message.SerializeToString()))
    assert getattr(request, name) is not None
    assert len(getattr(request, name)) == 0


def test_no_input_and_two_inputs_are_refused() -> None:
    names = "history_item_ids, history_keys, history_sids, prompt_token_ids"
    assert faults(pb.RecommendRequest(searches=[pb.Search()])) == {
        "history": f"exactly one of {names} must be given, got none"
    }
    both = pb.RecommendRequest(searches=[pb.Search()], history_item_ids=HISTORY)
    both.prompt_token_ids.SetInParent()
    assert faults(both) == {
        "history": f"exactly one of {names} must be given, got history_item_ids, prompt_token_ids"
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"beam_width": 4, "beam_widths": [4]},
            {"searches[0]": "beam_width or beam_widths must be given, got both"},
        ),
        ({"beam_width": 0}, {"searches[0].beam_width": "must be in [1, 1024], got 0"}),
        (
            {"beam_width": 1025},
            {
                "searches[0].beam_width": "must be in [1, 1024], got 1025; "
                "raise limits.max_beam_width to allow"
            },
        ),
        (
            {"beam_widths": [1, 0, 2000]},
            {
                "searches[0].beam_widths[1]": "must be in [1, 1024], got 0",
                "searches[0].beam_widths[2]": "must be in [1, 1024], got 2000; "
                "raise limits.max_beam_width to allow",
            },
        ),
        (
            {"beam_widths": [1] * 9},
            {"searches[0].beam_widths": "must hold one width per level, at most 8, got 9"},
        ),
        ({"num_results": 0}, {"searches[0].num_results": "must be in [1, 2048], got 0"}),
        (
            {"num_results": 5000},
            {
                "searches[0].num_results": "must be in [1, 2048], got 5000; "
                "raise limits.max_num_results to allow"
            },
        ),
        ({"max_items_per_sid": 0}, {"searches[0].max_items_per_sid": "must be at least 1, got 0"}),
        (
            {"normalization": 9},
            {"searches[0].normalization": "must be one of the numbers 0, 1, 2, 3, got 9"},
        ),
        (
            {"rules": pb.Rules(require=[pb.TagGroup()])},
            {"searches[0].rules.require[0].any_of": "must name at least one tag, got none"},
        ),
        (
            {"rules": pb.Rules(require=[pb.TagGroup(any_of=["a", ""])], exclude_tags=[""])},
            {
                "searches[0].rules.require[0].any_of[1]": "a tag must not be empty",
                "searches[0].rules.exclude_tags[0]": "a tag must not be empty",
            },
        ),
        (
            {"rules": pb.Rules(exclude_tags=["t"] * 7, require=[pb.TagGroup(any_of=["t"] * 6)])},
            {
                "searches[0].rules.require and exclude_tags": "must hold at most 12 entries, "
                "got 13; raise limits.max_tags to allow"
            },
        ),
        (
            {"rules": pb.Rules(require=[pb.TagGroup()] * 13)},
            {
                "searches[0].rules.require and exclude_tags": "must hold at most 12 entries, "
                "got 13; raise limits.max_tags to allow"
            },
        ),
        (
            {"rules": pb.Rules(exclude_item_ids=pb.Int64Values(values=range(11)))},
            {
                "searches[0].rules.exclude_item_ids": "must hold at most 10 entries, got 11; "
                "raise limits.max_exclusions to allow"
            },
        ),
        (
            {"rules": pb.Rules(exclude_item_ids=pb.Int64Values(values_le=b"123"))},
            {
                "searches[0].rules.exclude_item_ids.values_le": "must be int64 little-endian, "
                "a multiple of 8 bytes, got 3 bytes"
            },
        ),
        (
            {"rules": pb.Rules(exclude_keys=["k"] * 11)},
            {
                "searches[0].rules.exclude_keys": "must hold at most 10 entries, got 11; "
                "raise limits.max_exclusions to allow"
            },
        ),
        (
            {
                "rules": pb.Rules(
                    exclude_keys=["k"] * 6, exclude_item_ids=pb.Int64Values(values=range(6))
                )
            },
            {
                "searches[0].rules.exclude_item_ids and exclude_keys": "must hold at most 10 "
                "entries, got 12; raise limits.max_exclusions to allow"
            },
        ),
    ],
)
def test_every_fault_of_a_search_is_named(
    fields: dict[str, object], expected: dict[str, str]
) -> None:
    assert faults(with_search(**fields)) == expected


@pytest.mark.parametrize(
    ("message", "field", "limit"),
    [
        (
            pb.RecommendRequest(history_item_ids=pb.Int64Values(values=range(7))),
            "history_item_ids",
            "max_input_items",
        ),
        (
            pb.RecommendRequest(history_keys=pb.StringValues(values=["k"] * 7)),
            "history_keys",
            "max_input_items",
        ),
        (
            pb.RecommendRequest(history_sids=pb.SidValues(num_levels=2, values_le=bytes(56))),
            "history_sids",
            "max_input_items",
        ),
        (
            pb.RecommendRequest(prompt_token_ids=pb.Int64Values(values=range(7))),
            "prompt_token_ids",
            "max_prompt_tokens",
        ),
    ],
)
def test_a_long_input_is_refused_by_its_limit(
    message: pb.RecommendRequest, field: str, limit: str
) -> None:
    message.searches.add()
    assert faults(message) == {
        field: f"must hold at most 6 entries, got 7; raise limits.{limit} to allow"
    }


def test_the_number_of_searches_is_limited() -> None:
    message = pb.RecommendRequest(history_item_ids=HISTORY, searches=[pb.Search()] * 2)
    assert faults(message, LimitsConfig()) == {
        "searches": "at most limits.max_searches = 1 can be given, got 2"
    }
    assert faults(pb.RecommendRequest(history_item_ids=HISTORY)) == {
        "searches": "at least one search must be given, got none"
    }


def test_all_faults_are_collected() -> None:
    message = pb.RecommendRequest(
        on_overflow=7,  # type: ignore[arg-type]
        on_unknown=-1,  # type: ignore[arg-type]
        history_item_ids=pb.Int64Values(values_le=b"1"),
        searches=[
            pb.Search(beam_width=0, num_results=0, rules=pb.Rules(exclude_tags=[""])),
        ],
    )
    message.history_keys.SetInParent()
    found = Violations()
    found.add("request_id", "is bad")
    with pytest.raises(InvalidRequest) as caught:
        request_from_proto(message, LIMITS, "", None, found)
    assert [field for field, _ in caught.value.violations] == [
        "request_id",
        "history_item_ids.values_le",
        "history",
        "searches[0].beam_width",
        "searches[0].num_results",
        "searches[0].rules.exclude_tags[0]",
        "on_overflow",
        "on_unknown",
    ]
    assert "history_item_ids.values_le: must be int64 little-endian" in str(caught.value)


def test_a_request_that_the_wire_cannot_carry_is_refused_by_the_client() -> None:
    request = RecRequest(
        history_item_ids=np.zeros(1, np.int64),
        searches=(
            Search(beam_width=-1, num_results=2**32, normalization="softmax"),  # type: ignore[arg-type]
            Search(beam_widths=(1, -2), max_items_per_sid=-3),
        ),
        on_unknown="ignore",  # type: ignore[arg-type]
    )
    with pytest.raises(InvalidRequest) as caught:
        request_to_proto(request)
    assert dict(caught.value.violations) == {
        "on_unknown": "must be one of skip, error, got 'ignore'",
        "searches[0].beam_width": "must be in [0, 2^32), got -1",
        "searches[0].num_results": "must be in [0, 2^32), got 4294967296",
        "searches[0].normalization": "must be one of vocab, level, valid, got 'softmax'",
        "searches[1].beam_widths[1]": "must be in [0, 2^32), got -2",
        "searches[1].max_items_per_sid": "must be in [0, 2^32), got -3",
    }


def test_exclusions_may_be_a_tuple_or_an_array() -> None:
    for ids in ((5, -6), np.array([5, -6])):
        request = RecRequest(history_keys=(), searches=(Search(rules=Rules(exclude_item_ids=ids)),))
        exclude = parse(request_to_proto(request)).searches[0].rules.exclude_item_ids
        assert np.asarray(exclude).tolist() == [5, -6]


def test_text_that_utf8_cannot_carry_is_refused_by_field() -> None:
    bad = "\ud800"
    rules = Rules(require=(("a",), ("b", bad)), exclude_tags=(bad,), exclude_keys=("c", bad))
    searches = (Search(), Search(catalog=bad, catalog_version=bad, rules=rules))
    with pytest.raises(InvalidRequest) as caught:
        request_to_proto(RecRequest(bad, history_keys=("a", bad), searches=searches))
    assert set(caught.value.violations) == {
        (field, "must be Unicode characters, got '\\ud800'")
        for field in (
            "request_id",
            "history_keys",
            "searches[1].catalog",
            "searches[1].catalog_version",
            "searches[1].rules.require[1]",
            "searches[1].rules.exclude_tags",
            "searches[1].rules.exclude_keys",
        )
    }


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (asked(Rules(exclude_tags="category:shoes")), "searches[0].rules.exclude_tags"),  # type: ignore[arg-type]
        (asked(Rules(exclude_keys="B001")), "searches[0].rules.exclude_keys"),  # type: ignore[arg-type]
        (asked(Rules(require=("a:b",))), "searches[0].rules.require[0]"),  # type: ignore[arg-type]
        (asked(Rules(exclude_item_ids=101)), "searches[0].rules.exclude_item_ids"),  # type: ignore[arg-type]
        (asked(Rules(exclude_item_ids=(2**64,))), "searches[0].rules.exclude_item_ids"),
        (RecRequest(history_keys="B001"), "history_keys"),  # type: ignore[arg-type]
        (RecRequest(history_item_ids=np.ones((2, 2), np.int64)), "history_item_ids"),
        (RecRequest(history_item_ids=np.asarray([1.5])), "history_item_ids"),
    ],
)
def test_client_and_engine_refuse_wrong_types_alike(request_: RecRequest, field: str) -> None:
    """A string in place of a tuple of strings would travel as its letters, and exclude nothing."""
    with pytest.raises(InvalidRequest) as caught:
        request_to_proto(request_)
    assert [name for name, _ in caught.value.violations] == [field]
    assert list(caught.value.violations) == check_request(request_, RuntimeConfig())
