"""JSON requests and results of the command line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given

from tests.service.strategies import plain, requests, results
from xgr_runtime.errors import InvalidRequest
from xgr_runtime.service.json_lines import request_from_json, result_to_json
from xgr_runtime.types import Rules, Search

if TYPE_CHECKING:
    from xgr_runtime.types import RecRequest, RecResult

FROM_ARGUMENTS = Search(num_results=7)


def to_plain_json(value: Any) -> Any:
    """A request in the JSON that the command reads, written from the types' definition alone."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, tuple):
        return [to_plain_json(element) for element in value]
    if hasattr(value, "__dataclass_fields__"):
        fields = {name: getattr(value, name) for name in value.__dataclass_fields__}
        return {k: to_plain_json(v) for k, v in fields.items() if k != "deadline_s"}
    return value


@given(requests())
def test_a_request_is_read_from_its_json(request: RecRequest) -> None:
    text = json.dumps(to_plain_json(request))
    got = plain(request_from_json(json.loads(text), FROM_ARGUMENTS))
    expected = plain(request)
    for found, wanted in (
        (got, expected),
        *zip(got["searches"], expected["searches"], strict=True),
    ):
        if "rules" in wanted:  # JSON has lists; a tuple and an array of ids are the same list
            for rules in (found["rules"], wanted["rules"]):
                ids = rules["exclude_item_ids"]
                rules["exclude_item_ids"] = ids if ids and ids[2:] != (b"",) else ()
    if request.history_sids is not None and not len(request.history_sids):
        assert got["history_sids"][2] == b""
        got["history_sids"] = expected["history_sids"]
    assert got == expected


def test_lines_without_searches_use_the_given_one() -> None:
    request = request_from_json({"history_item_ids": [1, -2]}, FROM_ARGUMENTS)
    assert request.searches == (FROM_ARGUMENTS,)
    assert request.history_item_ids is not None
    assert request.history_item_ids.tolist() == [1, -2]
    own = {"history_keys": ["a"], "searches": [{"rules": {"require": [["x", "y"]]}}]}
    search = Search(rules=Rules(require=(("x", "y"),)))
    assert request_from_json(own, FROM_ARGUMENTS).searches == (search,)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([1], [("request", "must be an object, got [1]")]),
        (
            {"history_ids": [1]},
            [
                (
                    "history_ids",
                    "is not a field; known: request_id, history_item_ids, history_keys, history_sids, "
                    "prompt_token_ids, searches, on_overflow, on_unknown",
                )
            ],
        ),
        (
            {"history_item_ids": [1, "2", True, 2**63]},
            [
                ("history_item_ids[1]", "must be a 64-bit whole number, got '2'"),
                ("history_item_ids[2]", "must be a 64-bit whole number, got True"),
                (
                    "history_item_ids[3]",
                    "must be a 64-bit whole number, got 9223372036854775808",
                ),
            ],
        ),
        (
            {"history_sids": [[1, 2], [3]]},
            [("history_sids", "must be rows of the same number of codes")],
        ),
        (
            {"history_sids": [[1, -2]]},
            [("history_sids[0][1]", "must be a code in [0, 2^32), got -2")],
        ),
        (
            {"request_id": 5, "searches": [{"beam_width": 1.5, "rules": {"exclude_history": 1}}]},
            [
                ("request_id", "must be a string of Unicode characters, got 5"),
                ("searches[0].beam_width", "must be a whole number, got 1.5"),
                ("searches[0].rules.exclude_history", "must be true or false, got 1"),
            ],
        ),
        (
            {"searches": {"rules": {}}},
            [("searches", "must be a list, got {'rules': {}}")],
        ),
    ],
)
def test_faults_are_named_by_path(data: Any, expected: list[tuple[str, str]]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_from_json(data, FROM_ARGUMENTS)
    assert list(caught.value.violations) == expected


@given(results())
def test_a_result_is_rows_of_items(result: RecResult) -> None:
    data = result_to_json(result)
    json.dumps(data)
    assert data["request_id"] == result.request_id
    for found, search in zip(data["results"], result.results, strict=True):
        assert [item["item_id"] for item in found["items"]] == search.item_ids.tolist()
        assert [item["sid"] for item in found["items"]] == search.sids.tolist()
        got = np.array([item["score"] for item in found["items"]], np.float32)
        np.testing.assert_array_equal(got, search.scores)
        keys = [item["key"] for item in found["items"] if "key" in item]
        assert keys == list(search.keys or ())
        assert found["num_valid"] == search.num_valid
        assert found["normalization"] == search.normalization
        assert "scores" not in found
