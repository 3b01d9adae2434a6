"""Many changed inputs, one verdict each: what the suites of damaged and forged files have in common."""

from __future__ import annotations

import collections
import sys
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import pytest

T = TypeVar("T")


def put_on_trial(
    drawn: Iterable[tuple[str, T]], judge: Callable[[T], str]
) -> collections.Counter[str]:
    """Counts verdicts, alone and by the kind of change. drawn: (kind, case). What a judge raises names the case."""
    counts: collections.Counter[str] = collections.Counter()
    for number, (kind, case) in enumerate(drawn):
        try:
            verdict = judge(case)
        except Exception as error:
            raise AssertionError(
                f"case {number}, {kind}: {type(error).__name__}: {error}"
            ) from error
        counts[f"{kind} {verdict}"] += 1
        counts[verdict] += 1
    return counts


def show(capsys: pytest.CaptureFixture[str], title: str, counts: collections.Counter[str]) -> None:
    """Past the capture, so that a long run leaves its figures."""
    with capsys.disabled():
        sys.stdout.write(f"\n{title}: {dict(sorted(counts.items()))}\n")
