"""The driver of the ladder with small rungs in place of the real ones: what it writes, and what it does not let pass."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tools import ascend_ladder
from tools._ladder import processes, report, rungs, venvs
from tools._ladder.coverage import Registered, registered
from tools._ladder.readme import Row
from tools._ladder.rungs import Checked, Context, NotRun, Rung, RungFailed
from tools._packaging import environments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tools._ladder.report import Pair

    Run = Callable[[Context], Checked]

REQUIRED = ("L0", "L1", "L2", "L3", "L4")
PAIRS: tuple[Pair, ...] = (("norm", "torch_npu"), ("norm", "triton"))


def ran(context: Context) -> Checked:
    return Checked({"tests": 3})


def ran_nothing(context: Context) -> Checked:
    return Checked({"tests": 0, "calls": 0})


def did_not_run(context: Context) -> Checked:
    raise NotRun("no such machine")


def failed(context: Context) -> Checked:
    context.log.write_text("the last line of the log\n", encoding="utf-8")
    raise RungFailed("2 tests failed")


@dataclass(frozen=True)
class Executing:
    """A rung that executes these pairs."""

    pairs: tuple[Pair, ...]

    def __call__(self, context: Context) -> Checked:
        return Checked({"tests": 3}, self.pairs)


def executing(*pairs: Pair) -> Executing:
    return Executing(pairs)


def rungs_of_pairs(runs: Mapping[str, Run]) -> dict[Pair, str]:
    """Of each pair the names of those rungs from L2 to L5 that execute it."""
    judged = {name: runs[name] for name in ("L2", "L3", "L4", "L5")}
    return {
        pair: " ".join(
            name for name, run in judged.items() if isinstance(run, Executing) and pair in run.pairs
        )
        for pair in PAIRS
    }


def climb(
    folder: Path,
    changed: Mapping[str, Run],
    *,
    only: tuple[str, ...] = report.NAMES,
    pairs: tuple[Pair, ...] = PAIRS,
    claimed: dict[Pair, str] | None = None,
    failures: tuple[str, ...] = (),
) -> tuple[int, list[dict[str, Any]]]:
    """The exit code and the report of a ladder in which L2 executes every pair, but for the changed rungs.

    claimed: the rungs that the README names for a pair; by default those that execute it, if one of L2 to L5 does.
    """
    runs: dict[str, Run] = dict.fromkeys(report.NAMES, ran)
    runs |= {"L2": executing(*PAIRS), **changed}
    ladder = [
        Rung(name, f"what {name} checks", number % 2, runs[name])
        for number, name in enumerate(report.NAMES)
    ]
    path = folder / "ascend-ladder.json"
    names = rungs_of_pairs(runs) if claimed is None else claimed
    rows = [Row(*pair, "", "", tuple(names.get(pair, "").split()), "") for pair in PAIRS]
    code = ascend_ladder.climb(
        ladder, only, folder, path, lambda *_: Registered(pairs, failures), lambda: rows
    )
    return code, json.loads(path.read_text(encoding="utf-8"))


def test_the_report_is_a_list_with_an_entry_per_rung_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, entries = climb(tmp_path, {"L6": did_not_run, "L7": did_not_run})
    assert code == 0
    assert [entry["rung"] for entry in entries] == ["L0", "L1", "L2", "L3", "L4", "L5", "L6", "L7"]
    assert [entry["result"] for entry in entries] == ["passed"] * 6 + ["not_run"] * 2
    assert entries[0]["checked"] == "what L0 checks"
    assert entries[0]["counts"] == {"tests": 3}
    assert entries[6]["reason"] == "no such machine"
    assert entries[2]["providers"] == [
        {"op": "norm", "provider": "torch_npu"},
        {"op": "norm", "provider": "triton"},
    ]
    assert "nothing ran on an NPU" in capsys.readouterr().out


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize(
    ("run", "text"),
    [
        (did_not_run, "{} did not run: no such machine"),
        (ran_nothing, "{} executed nothing"),
        (failed, "{} failed: 2 tests failed"),
    ],
)
def test_a_required_rung_that_did_not_hold_fails_the_run(
    name: str,
    run: Callable[[Context], Checked],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pairs = () if name == "L2" else PAIRS
    code, _ = climb(tmp_path, {name: run}, pairs=pairs)
    assert code == 1
    assert text.format(name) in capsys.readouterr().out


@pytest.mark.parametrize("name", report.MAY_NOT_RUN)
def test_another_rung_may_not_run_but_not_fail(name: str, tmp_path: Path) -> None:
    assert climb(tmp_path, {name: did_not_run})[0] == 0
    assert climb(tmp_path, {name: failed})[0] == 1
    assert climb(tmp_path, {name: ran_nothing})[0] == 1


def test_of_a_failed_rung_the_end_of_its_log_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, entries = climb(tmp_path, {"L5": failed})
    assert code == 1
    assert entries[5]["result"] == "failed"
    assert "the last line of the log" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("executed", "rung", "text"),
    [
        (PAIRS[:1], "L4", "no rung executed provider triton of op norm"),
        (PAIRS[1:], "L2", "no rung executed provider torch_npu of op norm"),
    ],
)
def test_a_provider_that_no_rung_executed_fails_the_run_by_name(
    executed: tuple[Pair, ...],
    rung: str,
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """That it was compiled (L5) or ran without an NPU's ways (L1) does not count."""
    runs: dict[str, Run] = {
        "L2": executing(*executed),
        "L5": executing(*PAIRS),
        "L1": executing(*PAIRS),
    }
    code, entries = climb(tmp_path, runs)
    assert code == 1
    assert [e["reason"] for e in entries if e["result"] == "failed"] == [text]
    assert [e["rung"] for e in entries if e["result"] == "failed"] == [rung]
    assert f"{rung} failed: {text}" in capsys.readouterr().out


@pytest.mark.parametrize("rung", report.COVERING)
def test_any_of_three_rungs_covers_a_provider(rung: str, tmp_path: Path) -> None:
    runs: dict[str, Run] = {"L2": ran, rung: executing(*PAIRS)}
    assert climb(tmp_path, runs)[0] == 0


def test_a_module_of_providers_that_cannot_be_imported_fails_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = climb(tmp_path, {}, failures=("xgr_ops.ascend.norm could not be imported",))
    assert code == 1
    assert "L2 failed: xgr_ops.ascend.norm could not be imported" in capsys.readouterr().out


def test_the_table_of_the_readme_says_what_was_executed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: dict[str, Run] = {"L2": executing(*PAIRS), "L4": executing(PAIRS[1])}
    code, _ = climb(tmp_path, runs, claimed={PAIRS[0]: "L2 L3", PAIRS[1]: "L2"})
    assert code == 1
    printed = capsys.readouterr().out
    assert "L3 failed: ops/ascend/README.md says that L3 checks torch_npu of norm" in printed
    assert "L4 failed: ops/ascend/README.md does not say that L4 checks triton of norm" in printed
    assert climb(tmp_path, runs, claimed={PAIRS[0]: "L2", PAIRS[1]: "L2 L4"})[0] == 0


def test_chosen_rungs_alone_leave_the_run_incomplete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, entries = climb(tmp_path, {}, only=("L3", "L4"))
    assert code == 1
    assert [e["rung"] for e in entries if e["result"] == "passed"] == ["L3", "L4"]
    assert "L0 did not run: left out by --only" in capsys.readouterr().out


def test_a_ladder_that_breaks_off_leaves_no_report_of_an_earlier_one(tmp_path: Path) -> None:
    assert climb(tmp_path, {})[0] == 0

    def broken(context: Context) -> Checked:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        climb(tmp_path, {"L3": broken})
    assert not (tmp_path / "ascend-ladder.json").exists()


def test_an_unknown_rung_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ascend_ladder.main(["--only", "L3,L9"])
    assert "unknown rung 'L9'; known: L0, L1, L2, L3, L4, L5, L6, L7" in capsys.readouterr().err


def test_the_rungs_are_those_of_the_report() -> None:
    assert tuple(rung.name for rung in rungs.RUNGS) == report.NAMES


def context(folder: Path, name: str = "L3") -> Context:
    made = venvs.Environments(folder)
    return Context(name, folder / "log", folder, made, processes.Processes(folder))


def script(folder: Path, text: str) -> Path:
    """A rung's script; FILE in its text is where the report goes."""
    path = folder / "some_run.py"
    head = "import json, os, sys\nfrom pathlib import Path\nFILE = Path(sys.argv[2])\n"
    path.write_text(head + text, encoding="utf-8")
    return path


def test_an_absent_script_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RungFailed, match=r"l9_run\.py is missing"):
        rungs.run_script(context(tmp_path), tmp_path / "l9_run.py", venvs.MAIN, limit_s=300)


def test_a_script_tells_what_it_executed_in_either_of_two_ways(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "note = {'op': 'rope', 'provider': 'aten', 'rung': os.environ['XGR_LADDER_RUNG']}\n"
        "Path(os.environ['XGR_LADDER_PROVIDERS']).write_text(json.dumps(note) + chr(10))\n"
        "pairs = [{'op': 'norm', 'provider': 'triton'}]\n"
        "report = {'counts': {'calls': 7}, 'result': 'passed', 'providers': pairs}\n"
        "FILE.write_text(json.dumps(report))\n",
    )
    checked = rungs.run_script(context(tmp_path), path, venvs.MAIN, "here", limit_s=300)
    assert checked.counts == {"calls": 7}
    assert checked.providers == (("norm", "triton"), ("rope", "aten"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "exit code 0 and no report"),
        ("sys.exit('no')", "exit code 1 and no report"),
        ('FILE.write_text(\'{"counts": {"calls": 1}, "result": "failed"}\')', "0 failures"),
        ('FILE.write_text(\'{"counts": {"calls": 0}, "result": "passed"}\')', "nothing"),
        (
            'FILE.write_text(\'{"counts": {"calls": 1}, "result": "passed"}\')\nsys.exit(1)',
            "exit code 1, 0 failures",
        ),
        (
            'FILE.write_text(\'{"result": "passed", "failures": ["rope is off"]}\')',
            "1 failures: rope is off",
        ),
    ],
)
def test_a_script_that_did_not_hold_is_a_failure(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(RungFailed, match=reason):
        rungs.run_script(context(tmp_path), script(tmp_path, text), venvs.MAIN, limit_s=300)


def test_a_process_past_its_limit_is_ended_with_its_children(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        "import subprocess, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('started', child.pid, flush=True)\ntime.sleep(600)\n",
    )
    limit_s, pids = 1, list[str]()
    while not pids:  # a busy machine may take longer to start the two
        limit_s *= 2
        assert limit_s < 300
        with pytest.raises(TimeoutError, match=f"longer than {limit_s} s"):
            rungs.run_script(context(tmp_path), path, venvs.MAIN, limit_s=limit_s)
        pids = re.findall(r"^started (\d+)$", processes.tail(tmp_path / "log"), re.MULTILINE)
    (pid,) = pids
    end_s = time.monotonic() + 60
    while is_running(int(pid)):
        assert time.monotonic() < end_s, "the child outlived its parent"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether there is such a process that is not a dead one nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_interruption_ends_what_runs(tmp_path: Path) -> None:
    runner, log = processes.Processes(tmp_path), tmp_path / "log"
    command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(runner.run, command, {}, log, 500)
        while "up" not in processes.tail(log).splitlines():
            assert not running.done()
            time.sleep(0.01)
        runner.stop()
        assert running.result(timeout=60) == -signal.SIGKILL


def test_nothing_starts_after_an_interruption(tmp_path: Path) -> None:
    stopped = processes.Processes(tmp_path)
    stopped.stop()
    with pytest.raises(TimeoutError, match="interrupted"):
        stopped.run([sys.executable, "-c", ""], {}, tmp_path / "log", 30)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def test_a(): pass\ndef test_b(): pass\n", ""),
        ("def test_a(): pass\ndef test_b(): assert 0\n", "1 tests failed, pytest's exit code 1"),
        ("x = 1\n", "no test ran|exit code 5"),
        ("import nothing_of_this_name\n", "1 tests failed"),
    ],
)
def test_tests_are_counted_and_must_pass(source: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "test_some.py"
    path.write_text(source, encoding="utf-8")
    if reason:
        with pytest.raises(RungFailed, match=reason):
            rungs.run_pytest(context(tmp_path), [str(path)], limit_s=300)
    else:
        checked = rungs.run_pytest(context(tmp_path), [str(path)], limit_s=300)
        assert checked.counts == {"tests": 2}


def test_an_environment_is_kept_while_its_stamp_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installs: list[list[str]] = []

    def install(command: list[str], folder: Path) -> None:
        target = Path(command[command.index("--target") + 1])
        target.mkdir()
        (target / f"file-{len(installs)}").touch()
        installs.append(command)

    monkeypatch.setattr(environments, "run", install)
    made = venvs.Environments(tmp_path / "ladder")
    assert made.ready() == []
    place = made.place("triton-3.6")
    assert made.place("triton-3.6") == place
    assert len(installs) == 1
    assert made.ready() == [place]
    monkeypatch.setitem(venvs.OVERLAYS, "triton-3.6", ("triton==3.6.1",))
    made.place("triton-3.6")
    assert len(installs) == 2
    assert sorted(path.name for path in place.first[0].iterdir()) == ["file-1", "stamp"]


def test_every_package_of_the_npu_environment_is_pinned() -> None:
    lines = venvs.CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0] for line in lines if not line.startswith("#")}
    assert pinned == {*venvs.NPU_PACKAGES, "torch"}


def test_the_registry_is_read_in_a_process_of_its_own(tmp_path: Path) -> None:
    for name in ("run", "logs"):
        (tmp_path / name).mkdir()
    runner = processes.Processes(ascend_ladder.ROOT)
    found = registered(venvs.Environments(tmp_path), runner, tmp_path)
    assert ("shared_attention", "torch_npu") in found.pairs
    assert all(op and provider for op, provider in found.pairs)


def test_a_folder_that_cannot_be_made_ends_it_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(ascend_ladder, "FOLDER", tmp_path / "file" / "ladder")
    assert ascend_ladder.main(["--only", "L7"]) == 1
    assert capsys.readouterr().err.startswith("the ladder broke off without a report: ")
