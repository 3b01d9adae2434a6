"""Rung L3, second part: what `xgr` says where real torch_npu is installed and something of an NPU is missing or fails.

Run in the environment with torch_npu, as `errors_run.py --json FILE`. CANN's libraries are absent, or stand-ins whose devices,
SoC and return codes are chosen (`stubs.py`, `faults.py`). Everything is asked of processes of their own, as a user would type
it, with torch's autoload as the user finds it. Each check is a function that raises AssertionError.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools._ladder import faults, stubs  # noqa: E402 - a script finds the checkout by the lines above

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
XGR = (sys.executable, "-m", "xgr_runtime.cli")
SERVE = ("serve", "--config", "demo", "--port", "0")
LIMIT_S = 300.0
# What a child does under a fault: the error of torch_npu as this runtime names it.
EXPLAIN = """
import sys
import torch
import torch_npu
from xgr_runtime.hal.ascend_probe import explain_npu_error
try:
    torch.npu.current_device()
    {call}
except Exception as error:
    explained = explain_npu_error(error)
    print(type(explained).__name__, explained, sep="\\n")
"""


@dataclass(frozen=True)
class Done:
    """How a process ended, and what it said."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class World:
    """libraries: the stand-ins for CANN. mismatched: goes first on the path, and says that torch-npu is another version.

    package: the runtime as it is installed, since this environment need not have it.
    """

    libraries: Path
    mismatched: Path
    package: Path

    def without_cann(self, names: dict[str, str] | None = None) -> dict[str, str]:
        """The environment of a user who has torch_npu and no CANN; torch's autoload is not set."""
        kept = {name: value for name, value in os.environ.items() if name != AUTOLOAD}
        return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": self.path(), **(names or {})}

    def path(self, *first: Path) -> str:
        """PYTHONPATH of the runtime and of this process, behind other folders."""
        own = os.environ.get("PYTHONPATH", "")
        return os.pathsep.join(filter(None, [*map(str, first), str(self.package), own]))

    def with_cann(
        self, names: dict[str, str] | None = None, *, num_devices: int = 1, soc: str = "Ascend910B2"
    ) -> dict[str, str]:
        """The same with CANN's stand-ins."""
        base = stubs.environment(
            self.libraries, self.without_cann(), num_devices=num_devices, soc=soc
        )
        del base[AUTOLOAD]
        return {**base, **(names or {})}


def run(command: Sequence[str], environment: dict[str, str]) -> Done:
    done = subprocess.run(
        command,
        cwd=tempfile.gettempdir(),  # a checkout as the working folder would go before the package
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def refused(done: Done, *words: str) -> None:
    """Exit code 2 and one line on standard error that holds the words, beside what torch_npu itself prints as warnings."""
    assert done.code == 2, done
    assert "Traceback" not in done.err + done.out, done
    lines = [line for line in done.err.splitlines() if not line.startswith(("Warning: ", "[W"))]
    assert len(lines) == 1, done
    assert lines[0].startswith("xgr: "), done
    for word in words:
        assert word in lines[0], (word, lines[0])


def asked(environment: dict[str, str], *words: str) -> None:
    refused(run([*XGR, "doctor", "--device", "npu"], environment), "DeviceError", *words)


def asked_twice(environment: dict[str, str], *words: str) -> None:
    """Both commands that ask for an NPU refuse alike."""
    asked(environment, *words)
    refused(run([*XGR, *SERVE, "--device", "npu"], environment), "DeviceError", *words)


def torch_alone_fails_without_cann(world: World) -> None:
    """The situation is the real one: nobody's `import torch` works here, and what breaks it is named."""
    done = run([sys.executable, "-c", "import torch"], world.without_cann())
    assert done.code == 1, done
    assert "libhccl.so: cannot open shared object file" in done.err, done.err[-500:]


def no_cann(world: World) -> None:
    asked_twice(
        world.without_cann(), "CANN is not found (libhccl.so)", "set_env.sh", "LD_LIBRARY_PATH"
    )
    done = run([*XGR, *SERVE], world.without_cann({AUTOLOAD: "1"}))
    assert done.code == 2, done
    assert "Traceback" not in done.err, done.err
    assert "Failed to load the backend extension: torch_npu" in done.err, done.err


def served(environment: dict[str, str], *arguments: str) -> str:
    """The log of a service that was started, listened and was told to stop."""
    with subprocess.Popen(
        [*XGR, "serve", "--port", "0", *arguments],
        cwd=tempfile.gettempdir(),  # a checkout as the working folder would go before the package
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as service:
        assert service.stdout is not None
        line = service.stdout.readline()
        service.send_signal(signal.SIGTERM)
        _, log = service.communicate(timeout=LIMIT_S)
    assert line.startswith("xgr serve: listening on "), (line, log)
    assert service.returncode == 0, log
    assert "Traceback" not in log, log
    return log


def auto_moves_on_and_says_why(world: World) -> None:
    log = served(world.without_cann(), "--config", "demo", "--device", "auto")
    assert any("npu" in row and "CANN is not found" in row for row in log.splitlines()), log


def no_card(world: World) -> None:
    asked_twice(world.with_cann(num_devices=0), "no NPU", "npu-smi info", "/dev/davinci_manager")


def unknown_soc(world: World) -> None:
    asked(world.with_cann(soc="Ascend999"), "Unsupported soc version: Ascend999")


def driver_of_another_release(world: World) -> None:
    asked(
        world.with_cann({"XGR_STUB_ACL_INIT": "507008"}),
        "aclInit, error code 507008",
        "npu-smi info",
    )


def versions_that_do_not_belong_together(world: World) -> None:
    path = world.path(world.mismatched)
    words = ("torch-npu 0.9.0 belongs to torch 0.9.0", "pip install 'torch-npu==")
    asked(world.with_cann({"PYTHONPATH": path}), *words)
    code = (
        "import sys; from xgr_runtime.hal.ascend_probe import why_no_npu; why_no_npu(); "
        "sys.exit('torch_npu' in sys.modules)"
    )
    environment = world.with_cann({"PYTHONPATH": path, AUTOLOAD: "0"})
    assert run([sys.executable, "-c", code], environment).code == 0, "torch_npu was imported"


def a_cann_without_settings(world: World) -> None:
    """set_env.sh of a CANN that was removed; torch_npu has registered half of itself by then, and is not taken for whole."""
    environment = world.with_cann({"ASCEND_HOME_PATH": str(world.libraries / "removed")})
    asked(environment, "ASCEND_HOME_PATH", "does not exist")
    code = (
        "from xgr_runtime.hal.ascend_probe import why_no_npu; first = why_no_npu(); "
        "assert first and why_no_npu() == first, (first, why_no_npu())"
    )
    done = run([sys.executable, "-c", code], {**environment, AUTOLOAD: "0"})
    assert done.code == 0, done


def an_npu_is_opened(world: World) -> None:
    """With CANN in place, whether torch loads torch_npu (as the user sets it) or this runtime does."""
    situations: tuple[dict[str, str], ...] = ({}, {AUTOLOAD: "1"})
    for names in situations:
        command = [*XGR, "doctor", "--device", "npu", "--dtype", "bfloat16", "--json"]
        done = run(command, world.with_cann(names))
        assert done.code == 0, (names, done)
        report: Any = json.loads(done.out[done.out.index("{") :])
        (device,) = report["devices"]
        assert (device["is_usable"], device["capability"]) == (True, "Ascend910B2"), device
        assert report["packages"]["torch-npu"] == importlib.metadata.version("torch-npu")
        assert {row["device"] for row in report["ops"]} == {"npu"}


def a_service_starts_on_an_npu(world: World) -> None:
    """Both demos as the first day's page has them: every op has a provider, every buffer its place."""
    float32 = ("--config", "demo", "--device", "npu")
    for arguments in (("--config", "demo-ascend-910b"), float32):
        log = served(world.with_cann(), *arguments)
        for op, provider in (("rms_norm", "torch_npu"), ("select_beams", "aten")):
            assert f"op {op}: provider {provider}" in log, log


def a_soc_that_no_provider_takes(world: World) -> None:
    """An older SoC opens; every provider that was written for another one says so, and no op is bound silently."""
    environment = world.with_cann(soc="Ascend310P3")
    done = run([*XGR, "doctor", "--device", "npu", "--dtype", "bfloat16", "--json"], environment)
    report: Any = json.loads(done.out)
    unbound = {row["op"]: row["refusals"] for row in report["ops"] if not row["provider"]}
    by_soc = {op for op, reasons in unbound.items() if any("Ascend310P3" in r for r in reasons)}
    assert by_soc, [(row["op"], row["provider"]) for row in report["ops"]]
    for op in (
        unbound.keys() - by_soc
    ):  # a fused op names its parts: each has the reason, or parts of its own
        (parts,) = (text for text in unbound[op] if text.startswith("parts: no provider of "))
        assert unbound.keys() >= set(parts.partition(" of ")[2].split(", ")), (op, unbound[op])
    command = [*XGR, *SERVE, "--device", "npu", "--set", "ops.allow_reference=false"]
    refused(run(command, environment), "OpUnavailable", "has no provider on npu", "Ascend310P3")


def explained(world: World, call: str, faults_by_name: dict[str, int]) -> tuple[str, str]:
    names = {f"XGR_FAULT_{name}": str(code) for name, code in faults_by_name.items()}
    environment = world.with_cann({**names, AUTOLOAD: "0"})
    done = run([sys.executable, "-c", EXPLAIN.format(call=call)], environment)
    assert done.code == 0, done
    kind, _, text = done.out[done.out.rindex("Warning: ") :].partition("\n")[2].partition("\n")
    return kind, text.strip()


def memory_that_runs_out(world: World) -> None:
    codes = {"aclrtMalloc": 207001, "aclrtMallocAlign32": 207001}
    kind, text = explained(world, "torch.empty(1 << 28, device='npu')", codes)
    assert kind == "DeviceError", (kind, text)
    assert "Ascend910B2 has no memory left: NPU out of memory. Tried to allocate 1.00 GiB" in text
    assert "lower cache.num_pages" in text, text


def a_core_that_faults(world: World) -> None:
    codes = {"aclrtSynchronizeStreamWithTimeout": 507035}
    kind, text = explained(world, "torch.npu.Stream().synchronize()", codes)
    assert kind == "DeviceLost", (kind, text)
    assert "error code 507035: The vector core execution is abnormal" in text, text
    kind, text = explained(world, "torch.npu.synchronize()", {"aclrtSynchronizeDevice": 507015})
    assert (kind, "507015" in text) == ("DeviceLost", True), (kind, text)


def streams_that_run_out(world: World) -> None:
    codes = {"aclrtCreateStreamWithConfig": 207008}
    kind, text = explained(world, "[torch.npu.Stream() for _ in range(64)]", codes)
    assert kind == "DeviceError", (kind, text)
    assert "has no more streams" in text, text
    assert "graphs=false" in text, text


def an_op_that_refuses(world: World) -> None:
    call = "torch.empty(2, device='npu') + torch.empty(2, device='npu')"
    for code, words in ((161002, "refused its arguments"), (561103, "found no kernel")):
        kind, text = explained(world, call, {"aclnnAddGetWorkspaceSize": code})
        assert kind == "OpUnavailable", (kind, text)
        assert text.startswith(f"aclnnAdd {words}"), text
        assert "Ascend910B2" in text, text
        assert f"error code {code}" in text, text


def a_service_that_fails_at_its_start(world: World) -> None:
    """What fails in the first batch, or before it, ends the command with the named error as its last line."""
    command = [*XGR, *SERVE[:1], "--port", "0", "--config", "demo-ascend-910b"]
    situations = {
        "aclrtSynchronizeStreamWithTimeout": (507035, "DeviceLost: Ascend910B2 failed: "),
        "aclnnRmsNormGetWorkspaceSize": (161002, "OpUnavailable: aclnnRmsNorm refused its argu"),
        "aclmdlRICaptureEnd": (107041, "DeviceError: capturing a graph failed on Ascend910B2: "),
    }
    for name, (code, words) in situations.items():
        done = run(command, world.with_cann({f"XGR_FAULT_{name}": str(code)}))
        last = done.err.splitlines()[-1]
        assert done.code == 2, (name, done)
        assert last.startswith(f"xgr: {words}"), (name, last)
        assert str(code) in last, (name, last)
    environment = world.with_cann({"XGR_FAULT_aclmdlRICaptureEnd": "107041"})
    served(environment, "--config", "demo-ascend-910b", "--set", "graphs=false")


def an_op_that_does_not_exist(world: World) -> None:
    kind, text = explained(world, "torch.ops.npu.npu_no_such_op", {})
    assert kind == "OpUnavailable", (kind, text)
    assert "npu::npu_no_such_op" in text, text


CHECKS: tuple[Callable[[World], None], ...] = (
    torch_alone_fails_without_cann,
    no_cann,
    auto_moves_on_and_says_why,
    no_card,
    unknown_soc,
    driver_of_another_release,
    versions_that_do_not_belong_together,
    a_cann_without_settings,
    an_npu_is_opened,
    a_service_starts_on_an_npu,
    a_soc_that_no_provider_takes,
    memory_that_runs_out,
    a_core_that_faults,
    streams_that_run_out,
    an_op_that_refuses,
    an_op_that_does_not_exist,
    a_service_that_fails_at_its_start,
)


def link_package(folder: Path) -> Path:
    """The layout of the wheel (setup.py), made of links to the checkout."""
    package = folder / "xgr_runtime"
    package.mkdir(parents=True)
    for path in (ROOT / "xgr_runtime").iterdir():
        (package / path.name).symlink_to(path)
    for name in ("configs", "proto"):
        (package / name).symlink_to(ROOT / name)
    (folder / "xgr_ops").symlink_to(ROOT / "ops")
    return folder


def make_world(folder: Path) -> World:
    faults.build(folder / "cann", stubs.torch_npu_folder())
    mismatched = folder / "mismatched" / "torch_npu-0.9.0.dist-info"
    mismatched.mkdir(parents=True)
    metadata = importlib.metadata.distribution("torch-npu").read_text("METADATA") or ""
    lines = [
        "Version: 0.9.0" if line.startswith("Version: ") else line for line in metadata.split("\n")
    ]
    (mismatched / "METADATA").write_text("\n".join(lines), encoding="utf-8")
    return World(folder / "cann", mismatched.parent, link_package(folder / "package"))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--only", metavar="NAME", help="one check")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="xgr-errors-"))
    failures, num_passed = [], 0
    try:
        world = make_world(folder)
        for check in CHECKS:
            if options.only not in (None, check.__name__):
                continue
            try:
                check(world)
                num_passed += 1
                print(f"ok   {check.__name__}", flush=True)
            except (AssertionError, subprocess.TimeoutExpired, ValueError, LookupError) as error:
                traceback.print_exc()
                failures.append(f"{check.__name__}: {str(error)[:300]}")
                print(f"FAIL {check.__name__}", flush=True)
    finally:
        shutil.rmtree(folder)
    result = "failed" if failures or not num_passed else "passed"
    report = {"result": result, "counts": {"situations": num_passed}, "failures": failures}
    options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return int(result != "passed")


if __name__ == "__main__":
    sys.exit(main())
