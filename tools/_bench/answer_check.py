"""One answer against its reference by `assert_same_answer`; free of torch, so that many run at once in small processes.

As a command it reads a pickled question from standard input and writes its pickled verdict.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xgr_runtime.conformance.difference import Difference
from xgr_runtime.conformance.same_answer import (
    Answer,
    BeamTrace,
    Reference,
    SameAnswerStats,
    Sid,
    assert_same_answer,
)

ROOT = Path(__file__).resolve().parents[2]

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class LevelScores:
    """Prefixes of one length with what follows each: codes and log-probabilities (float64) of prefix i are those from
    starts[i] to starts[i + 1]."""

    prefixes: NDArray[np.int64]
    starts: NDArray[np.int64]
    codes: NDArray[np.int64]
    log_probs: NDArray[np.float64]


@dataclass(frozen=True)
class Question:
    """An answer to check: its beams after each level, best first (codes [beams, l + 1] and scores), and what it says.

    scores: what `foresee` found. limit: possible sets are checked while they stay within limit * width; None: always.
    """

    name: str
    codes: Sequence[NDArray[np.int64]]
    own_scores: Sequence[NDArray[np.float32]]
    num_valid: int
    widths: tuple[int, ...]
    t: float
    limit: int | None
    scores: Sequence[LevelScores]


@dataclass(frozen=True)
class Verdict:
    """violation: "" where the answer is right. num_swapped: ranks at which the reference's own list has another row, as it may where scores are near."""

    name: str
    violation: str
    stats: SameAnswerStats | None = None
    num_swapped: int = 0


def judge(question: Question) -> Verdict:
    """Runs the helper."""
    behind = [_as_lookup(level) for level in question.scores]

    def of(prefix: Sid) -> tuple[list[int], NDArray[np.float64]]:
        if prefix not in behind[len(prefix)]:
            raise Difference(f"{prefix} was not foreseen: the run kept what cannot survive")
        codes, log_probs = behind[len(prefix)][prefix]
        return codes, log_probs

    reference = Reference(
        len(behind), lambda prefix: of(prefix)[0], lambda prefixes: [of(p)[1] for p in prefixes]
    )
    levels = [
        list(zip(map(tuple, codes.tolist()), scores.tolist(), strict=True))
        for codes, scores in zip(question.codes, question.own_scores, strict=True)
    ]
    answer = Answer(levels[-1], question.num_valid, BeamTrace(levels))
    try:
        stats = assert_same_answer(answer, reference, question.t, question.widths, question.limit)
    except AssertionError as violation:
        return Verdict(question.name, str(violation)[:1000] or "assertion failed")
    wanted = [sid for sid, _ in reference.search(question.widths).levels[-1]]
    got = [sid for sid, _ in answer.rows]
    num_swapped = sum(one != two for one, two in zip(got, wanted, strict=False))
    return Verdict(question.name, "", stats, num_swapped)


def _as_lookup(level: LevelScores) -> dict[tuple[int, ...], tuple[list[int], NDArray[np.float64]]]:
    """Prefix -> codes and log-probabilities behind it."""
    starts, codes = level.starts.tolist(), level.codes.tolist()
    return {
        tuple(prefix): (codes[first:end], level.log_probs[first:end])
        for prefix, first, end in zip(level.prefixes.tolist(), starts, starts[1:], strict=False)
    }


class Judges:
    """Answers checked beside each other, each in a process of its own."""

    def __init__(self, num_processes: int) -> None:
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="judge")

    def ask(self, question: Question) -> Future[Verdict]:
        """The verdict to come."""
        return self._threads.submit(_judge_elsewhere, question)

    def close(self) -> None:
        """Wait for the checks that run."""
        self._threads.shutdown()


def _judge_elsewhere(question: Question) -> Verdict:
    command = [sys.executable, "-m", "tools._bench.answer_check"]
    done = subprocess.run(
        command, input=pickle.dumps(question), capture_output=True, check=False, cwd=ROOT
    )
    if done.returncode:
        raise RuntimeError(f"a check died: {done.stderr.decode(errors='replace')[-2000:]}")
    verdict: Verdict = pickle.loads(done.stdout)
    return verdict


def main() -> None:
    """One question, one verdict."""
    sys.stdout.buffer.write(pickle.dumps(judge(pickle.load(sys.stdin.buffer))))


if __name__ == "__main__":
    # pickled by its importable name
    from tools._bench import answer_check

    answer_check.main()
