"""Run the ladder: what can be shown about the Ascend backend without an NPU. Needs the network once, for its environments.

Prints a table and writes ascend-ladder.json: a list of {rung, checked, counts, result, ...}, result being passed, failed or
not_run. Exit code 0: L0 to L4 passed and executed something, nothing failed, and every provider for the NPU was executed by L2,
L3 or L4. None of it ran on an NPU: `ops/ascend/README.md` says what each rung proves and what it cannot.
"""

import argparse
import fcntl
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools._ladder import coverage, readme, report  # noqa: E402
from tools._ladder.coverage import Registered  # noqa: E402
from tools._ladder.processes import Processes, tail  # noqa: E402
from tools._ladder.readme import Row  # noqa: E402
from tools._ladder.report import NAMES, Outcome  # noqa: E402
from tools._ladder.rungs import RUNGS, Checked, Context, NotRun, Rung, RungFailed, read_pairs  # noqa: E402
from tools._ladder.venvs import Environments  # noqa: E402

FOLDER = ROOT / ".ladder"
REPORT = ROOT / "ascend-ladder.json"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only",
        type=chosen_names,
        default=NAMES,
        metavar="RUNGS",
        help="some rungs alone, as L3,L4; the exit code still says what was left out",
    )
    args = parser.parse_args(argv)
    # As ctrl-C: the processes of the rungs are ended before this one is.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        FOLDER.mkdir(exist_ok=True)
        return locked(args.only)
    except OSError as error:  # a full disk, or something else where a file or folder should be
        print(f"the ladder broke off without a report: {error}", file=sys.stderr)
        return 1


def locked(only: Sequence[str]) -> int:
    """Climb unless another ladder does; the exit code."""
    with (FOLDER / "lock").open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another ladder runs in {FOLDER}", file=sys.stderr)
            return 1
        try:
            return climb(RUNGS, only, FOLDER, REPORT)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130


def chosen_names(text: str) -> tuple[str, ...]:
    """The rungs named in 'L3,L4'."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in NAMES:
            raise argparse.ArgumentTypeError(f"unknown rung {name!r}; known: {', '.join(NAMES)}")
    return names


def climb(
    rungs: Sequence[Rung],
    only: Sequence[str],
    folder: Path,
    path: Path,
    read_registry: Callable[[Environments, Processes, Path], Registered] = coverage.registered,
    read_rows: Callable[[], Sequence[Row]] = readme.read_rows,
) -> int:
    """Run rungs, compare them with the registry and the rows of the README, print, write the report; the exit code."""
    start_s = time.monotonic()
    path.unlink(missing_ok=True)
    for name in ("logs", "run"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
    environments, processes = Environments(folder), Processes(ROOT)
    try:
        outcomes = run_lanes(rungs, only, folder, environments, processes)
        registered = read_registry(environments, processes, folder)
    finally:
        processes.stop()
    if set(report.COVERING) <= set(only):
        missing = report.uncovered(registered.pairs, outcomes)
        outcomes = coverage.judged(outcomes, coverage.causes(missing, registered.failures))
    outcomes = coverage.judged(outcomes, readme.differences(read_rows(), outcomes))
    report.write_json(path, outcomes)
    print(
        f"\n{report.rung_table(outcomes)}\n\n{report.provider_table(registered.pairs, outcomes)}\n"
    )
    found = report.problems(outcomes)
    for text in found:
        print(text)
    verdict = "the ladder did not pass" if found else "the ladder passed; nothing ran on an NPU"
    print(f"{verdict}, in {time.monotonic() - start_s:.0f} s; {path.name} holds the report")
    return 1 if found else 0


def run_lanes(
    rungs: Sequence[Rung],
    only: Sequence[str],
    folder: Path,
    environments: Environments,
    processes: Processes,
) -> list[Outcome]:
    """Run the lanes beside each other; the outcomes in the order of the rungs."""

    def run_lane(lane: int) -> list[Outcome]:
        outcomes = []
        for rung in rungs:
            if rung.lane == lane:
                log = folder / "logs" / f"{rung.name}.log"
                context = Context(rung.name, log, folder / "run", environments, processes)
                outcomes.append(run_rung(rung, context, is_chosen=rung.name in only))
        return outcomes

    lanes = sorted({rung.lane for rung in rungs})
    with ThreadPoolExecutor(len(lanes)) as pool:
        try:
            done = [outcome for lane in pool.map(run_lane, lanes) for outcome in lane]
        except BaseException:
            processes.stop()
            raise
    order = [rung.name for rung in rungs]
    return sorted(done, key=lambda outcome: order.index(outcome.rung))


def run_rung(rung: Rung, context: Context, *, is_chosen: bool) -> Outcome:
    """Run one rung and say how it ended; of a failed one the end of its log is printed."""
    if not is_chosen:
        return Outcome(rung.name, rung.checked, {}, "not_run", "left out by --only")
    start_s = time.monotonic()
    checked = Checked({})
    result: report.Result = "passed"
    reason = ""
    try:
        checked = rung.run(context)
    except NotRun as error:
        result, reason = "not_run", str(error)
    except (RungFailed, RuntimeError, TimeoutError, OSError, ValueError, KeyError) as error:
        result, reason = "failed", str(error) or repr(error)
        checked = Checked({}, read_pairs(context.noted))
    seconds = time.monotonic() - start_s
    text = f"{rung.name} {result} in {seconds:.0f} s {reason}".rstrip()
    if result == "failed":
        text += f"\n--- end of {context.log}\n{tail(context.log)}\n---"
    print(text, flush=True)
    return Outcome(
        rung.name, rung.checked, checked.counts, result, reason, seconds, checked.providers
    )


if __name__ == "__main__":
    sys.exit(main())
