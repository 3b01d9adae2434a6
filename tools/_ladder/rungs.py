"""The rungs: what each checks, in which environments its processes run, and how long they may take."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tools._ladder.processes import Processes, junit_counts
from tools._ladder.venvs import MAIN, NPU, Environments, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tools._ladder.report import Pair

SCRIPTS = Path("tools") / "_ladder"
# Read by the parity test: where to note which provider of which op ran, and as what rung.
PROVIDERS_VARIABLE = "XGR_LADDER_PROVIDERS"
RUNG_VARIABLE = "XGR_LADDER_RUNG"

L0_TESTS = (
    "tests/hal",
    "tests/test_doctor.py",
    "tests/test_config_cli.py",
)
L1_TESTS = (
    "tests/ops",
    "tests/models",
    "tests/kvcache",
    "tests/xbeam/test_ranking.py",
    "tests/xbeam/test_rules.py",
    "tests/xbeam/test_search_edges.py",
    "tests/xbeam/test_search_oracle.py",
    "tests/xbeam/test_slot.py",
    "tests/xbeam/test_trie.py",
)
# Everything here runs on the stand-in device: functions alone, the worker, whole engines. L3's own tests do not need it.
L2_TESTS = (
    "tests/ascend",
    "--ignore=tests/ascend/l3",
    "tests/ops",
    "tests/conformance",
    "tests/test_tiny.py",
    "tests/hal",
    "tests/xschedule",
    "tests/e2e/test_bad_logits.py",
    "tests/e2e/test_batching.py",
    "tests/e2e/test_half_precision.py",
    "tests/e2e/test_kv_bytes.py",
    "tests/e2e/test_prefix_reuse.py",
    "tests/e2e/test_rules.py",
    "tests/e2e/test_swaps.py",
)
# Providers for CUDA launch the kernels of ops/triton that those for the NPU launch.
L6_TESTS = ("tests/ops/test_parity.py", "-k", "triton")


class RungFailed(Exception):
    """A rung did not hold; the text says what, the rung's log says more."""


class NotRun(Exception):
    """A rung cannot run on this machine, and why."""


@dataclass(frozen=True)
class Context:
    """What a rung works with. log: where its processes write; folder: for its own files."""

    rung: str
    log: Path
    folder: Path
    environments: Environments
    processes: Processes

    @property
    def noted(self) -> Path:
        """The file in which the rung's processes note the (op, provider) pairs that they executed."""
        return self.folder / f"{self.rung}-providers.jsonl"

    def run(self, place: Place, command: Sequence[str], limit_s: float) -> int:
        """The exit code of a Python command, which may note pairs. Raises TimeoutError after the limit."""
        names = {PROVIDERS_VARIABLE: str(self.noted), RUNG_VARIABLE: self.rung}
        environment = {**place.environment(), **names}
        return self.processes.run([str(place.python), *command], environment, self.log, limit_s)


@dataclass(frozen=True)
class Checked:
    """What a rung executed: numbers by name, and (op, provider) pairs."""

    counts: dict[str, int]
    providers: tuple[Pair, ...] = ()


@dataclass(frozen=True)
class Rung:
    """A rung by name. lane: rungs of one lane run one after another, the lanes beside each other."""

    name: str
    checked: str
    lane: int
    run: Callable[[Context], Checked]


def run_pytest(context: Context, paths: Sequence[str], *options: str, limit_s: float) -> Checked:
    """Run tests in .venv; every one must pass."""
    junit = context.folder / f"{context.rung}.xml"
    junit.unlink(missing_ok=True)
    command = ["-m", "pytest", "-q", f"--junitxml={junit}", *options, *paths]
    code = context.run(MAIN, command, limit_s)
    if not junit.is_file():
        raise RungFailed(f"pytest ended with exit code {code} before any test")
    counts = junit_counts(junit)
    if code != 0 or counts["failed"]:
        raise RungFailed(f"{counts['failed']} tests failed, pytest's exit code {code}")
    if not counts["passed"]:
        raise RungFailed("no test ran")
    kept = {"tests": counts["passed"]}
    if counts["skipped"]:
        kept["skipped"] = counts["skipped"]
    return Checked(kept, read_pairs(context.noted))


def run_script(
    context: Context, script: Path, place: Place, label: str = "", *, limit_s: float
) -> Checked:
    """Run a rung's script, which writes its counts as JSON; an absent script is a failure."""
    where = f"{script.name} ({label})" if label else script.name
    if not script.is_file():
        raise RungFailed(f"{script} is missing")
    answer = context.folder / f"{context.rung}-{script.stem}-{label or 'main'}.json"
    answer.unlink(missing_ok=True)
    code = context.run(place, [str(script), "--json", str(answer)], limit_s)
    if not answer.is_file():
        raise RungFailed(f"{where}: exit code {code} and no report")
    return read_answer(answer, where, code, read_pairs(context.noted))


def read_answer(answer: Path, where: str, code: int, noted: Sequence[Pair]) -> Checked:
    """The counts and pairs of a script's report. Raises RungFailed where it failed or executed nothing."""
    report = json.loads(answer.read_text(encoding="utf-8"))
    failures = list(report.get("failures", []))
    if code != 0 or failures or report.get("result") != "passed":
        first = f": {failures[0][:300]}" if failures else ""
        raise RungFailed(f"{where}: exit code {code}, {len(failures)} failures{first}")
    counts = {str(name): int(number) for name, number in report["counts"].items()}
    if not any(counts.values()):
        raise RungFailed(f"{where} executed nothing")
    pairs = {(entry["op"], entry["provider"]) for entry in report.get("providers", [])}
    return Checked(counts, tuple(sorted(pairs.union(noted))))


def read_pairs(noted: Path) -> tuple[Pair, ...]:
    """The (op, provider) pairs of a file with a JSON object per line."""
    lines = noted.read_text(encoding="utf-8").splitlines() if noted.is_file() else []
    entries = [json.loads(line) for line in lines if line]
    return tuple(sorted({(entry["op"], entry["provider"]) for entry in entries}))


def joined(parts: dict[str, Checked]) -> Checked:
    """Several steps as one: their counts by 'step name', the union of their pairs."""
    counts = {
        f"{label} {name}".strip(): number
        for label, part in parts.items()
        for name, number in part.counts.items()
    }
    pairs = {pair for part in parts.values() for pair in part.providers}
    return Checked(counts, tuple(sorted(pairs)))


def l0(context: Context) -> Checked:
    script = run_script(context, SCRIPTS / "l0_checks.py", MAIN, limit_s=600)
    return joined({"": run_pytest(context, L0_TESTS, limit_s=600), "install": script})


def l1(context: Context) -> Checked:
    return run_pytest(context, L1_TESTS, limit_s=1200)


def l2(context: Context) -> Checked:
    return run_pytest(context, L2_TESTS, "--device", "npu", "--fake-npu", limit_s=1800)


def l3(context: Context) -> Checked:
    place = context.environments.place(NPU)
    calls = run_script(context, SCRIPTS / "l3_run.py", place, limit_s=1200)
    errors = run_script(context, SCRIPTS / "errors_run.py", place, limit_s=1200)
    return joined({"": calls, "errors": errors})


def l4(context: Context) -> Checked:
    """Interpreted Triton kernels under three versions of Triton; those of CUDA through the compiler that their users have."""
    parts = {}
    for name in ("triton-3.9", "triton-3.6", NPU):
        label = "triton-ascend-3.2" if name == NPU else name
        place = context.environments.place(name)
        parts[label] = run_script(context, SCRIPTS / "l4_run.py", place, label, limit_s=1800)
    place = context.environments.place("triton-3.6")
    parts["sm_90"] = run_script(context, SCRIPTS / "l4_compile.py", place, "sm_90", limit_s=1800)
    return joined(parts)


def l5(context: Context) -> Checked:
    script = SCRIPTS / "l5_run.py"
    if not script.is_file():
        raise NotRun("no run through the vendor's compiler has been written")
    return run_script(context, script, context.environments.place(NPU), limit_s=1200)


def l6(context: Context) -> Checked:
    probe = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
    if context.run(MAIN, ["-c", probe], limit_s=300) != 0:
        raise NotRun("no CUDA device on this machine")
    return run_pytest(context, L6_TESTS, "--device", "cuda", limit_s=1200)


def l7(context: Context) -> Checked:
    raise NotRun("there are no AscendC kernels yet")


RUNGS = (
    Rung("L0", "installs, imports and says what is missing without torch_npu", 0, l0),
    Rung("L1", "the algorithm: references and search against independent oracles", 0, l1),
    Rung("L2", "routing, placement and capture discipline on a strict stand-in device", 0, l2),
    Rung("L3", "calls of torch_npu against its schemas and shape rules; errors by name", 1, l3),
    Rung(
        "L4",
        "Triton kernels interpreted, under three versions of Triton; compiled for sm_90",
        1,
        l4,
    ),
    Rung("L5", "Triton kernels through the vendor's compiler for 910B2", 1, l5),
    Rung("L6", "the same Triton kernels on a CUDA GPU", 1, l6),
    Rung("L7", "AscendC kernels on an emulator", 1, l7),
)
