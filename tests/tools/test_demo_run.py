"""What the demo's exit code depends on: each promise broken alone is named."""

import copy
from typing import Any

import pytest

from tools.demo.run import shortfalls

GOOD: dict[str, Any] = {
    "recall_at_10": 0.17,
    "popularity": {"recall_at_10": 0.05},
    "markov1": {"recall_at_10": 0.15},
    "num_invalid_items": 0,
}


def test_a_report_that_keeps_every_promise() -> None:
    assert shortfalls(GOOD) == []


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("num_invalid_items",), 1, "1 invalid items"),
        (("recall_at_10",), 0.2501, "a leak"),
        (("popularity", "recall_at_10"), 0.0567, "below 3 x popularity 0.0567"),
        (("markov1", "recall_at_10"), 0.1701, "below Markov-1 0.1701"),
    ],
)
def test_each_broken_promise_is_named(path: tuple[str, ...], value: float, text: str) -> None:
    report = copy.deepcopy(GOOD)
    target = report
    for name in path[:-1]:
        target = target[name]
    target[path[-1]] = value
    found = shortfalls(report)
    assert len(found) == 1
    assert text in found[0]
