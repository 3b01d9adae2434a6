"""`assert_same_answer` as the tests know it; it lives in the package, whose conformance run uses it too."""

from xgr_runtime.conformance.same_answer import (
    Answer,
    BeamTrace,
    Reference,
    SameAnswerStats,
    SameAnswerTotals,
    assert_same_answer,
)

__all__ = [
    "Answer",
    "BeamTrace",
    "Reference",
    "SameAnswerStats",
    "SameAnswerTotals",
    "assert_same_answer",
]
