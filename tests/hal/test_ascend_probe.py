"""Why there is no NPU: every reason is one line with its cure, whatever is installed, and asking never raises.

Each situation is made of files: a folder that comes first on the path, with a `torch_npu` that fails as the real one does (the
texts are those of torch-npu 2.13.0) and the metadata of its wheel. A process of its own looks at it, as imports leave traces: a
fork of one that has imported torch. `tools/_ladder/errors_run.py` does the same with the real torch_npu.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
RELEASE = torch.__version__.partition("+")[0]
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
# Reads a situation a line, answers it from a child of its own.
ASK = """
import contextlib, json, os, sys
from xgr_runtime.hal.ascend_probe import why_no_npu
for line in sys.stdin:
    situation = json.loads(line)
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    os.environ.update(situation["names"])
    sys.path[:0] = situation["path"]
    exec(situation["code"])
    answers = [why_no_npu(), why_no_npu()]
    print(json.dumps({"answers": answers, "is_imported": "torch_npu" in sys.modules}), flush=True)
    os._exit(0)
"""
# A torch.npu as torch_npu registers one: under its own name, by an import.
REGISTER = """
import sys, types
import torch
npu = types.ModuleType("torch_npu.npu")
npu.is_available = lambda: {num} > 0
npu.device_count = lambda: {num}
npu.get_device_name = lambda index: "Ascend910B2"
def current_device():
    {opening}
    return 0
npu.current_device = current_device
torch.npu = npu
"""


def install(folder: Path, code: str, version: str = RELEASE) -> Path:
    """A torch_npu of that version whose import runs `code`."""
    package, metadata = folder / "torch_npu", folder / f"torch_npu-{version}.dist-info"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(code)
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: torch_npu\nVersion: {version}\n"
        f"Requires-Dist: torch=={version}.*\n"
    )
    return folder


def environment(folder: Path | None, **names: str) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name != AUTOLOAD and not name.startswith("ASCEND_")
    }
    before = os.environ.get("PYTHONPATH", "")
    folders = [
        *([str(folder)] if folder is not None else []),
        str(ROOT),
        *([before] if before else []),
    ]
    path = os.pathsep.join(folders)
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **names}


def run(folder: Path, *command: str, **names: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env=environment(folder, **names),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


class Asker:
    """Looks at one situation after another."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def answer(self, folder: Path | None, code: str = "", **names: str) -> Any:
        """What `why_no_npu` says twice, after `code`, with `folder` first on the path, and whether torch_npu is imported."""
        path = [str(folder)] if folder is not None else []
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(
            json.dumps({"path": path, "code": code, "names": names}),
            file=self._process.stdin,
            flush=True,
        )
        return json.loads(self._process.stdout.readline())

    def reason(self, folder: Path | None, *, is_imported: bool = False, **names: str) -> str:
        """The reason, which is the same when asked again."""
        answer = self.answer(folder, **names)
        first, second = answer["answers"]
        assert first == second
        assert first is not None
        assert first.isprintable(), "one line"
        assert answer["is_imported"] == is_imported
        return str(first)


@pytest.fixture(scope="module")
def asker() -> Iterator[Asker]:
    with subprocess.Popen(
        [sys.executable, "-c", ASK],
        env=environment(None, **{AUTOLOAD: "0"}),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield Asker(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def test_without_torch_npu(asker: Asker) -> None:
    where_it_may_be = "import pathlib; sys.path[:] = [p for p in sys.path if not (pathlib.Path(p) / 'torch_npu').exists()]"
    expected = f"torch-npu is not installed: pip install 'torch-npu=={RELEASE}.*'"
    assert asker.answer(None, where_it_may_be)["answers"] == [expected] * 2


@pytest.mark.parametrize("library", ["libhccl.so", "libascendcl.so", "libge_runner.so.1"])
@pytest.mark.parametrize("kind", ["ImportError", "OSError"])
def test_without_cann(asker: Asker, tmp_path: Path, library: str, kind: str) -> None:
    text = f"{library}: cannot open shared object file: No such file or directory"
    reason = asker.reason(install(tmp_path, f"raise {kind}({text!r})"))
    assert reason.startswith(f"torch-npu {RELEASE} is installed, but CANN is not found ({library})")
    assert "source /usr/local/Ascend/ascend-toolkit/set_env.sh" in reason
    assert "LD_LIBRARY_PATH" in reason


def test_the_settings_of_a_cann_elsewhere_are_named(asker: Asker, tmp_path: Path) -> None:
    text = "libhccl.so: cannot open shared object file: No such file or directory"
    home = tmp_path / "cann" / "latest"
    home.mkdir(parents=True)
    (tmp_path / "cann" / "set_env.sh").touch()
    folder = install(tmp_path / "site", f"raise ImportError({text!r})")
    reason = asker.reason(folder, ASCEND_HOME_PATH=str(home))
    assert f"source {tmp_path}/cann/set_env.sh" in reason


def test_without_the_driver(asker: Asker, tmp_path: Path) -> None:
    text = "libascend_hal.so: cannot open shared object file: No such file or directory"
    reason = asker.reason(install(tmp_path, f"raise ImportError({text!r})"))
    assert "libascend_hal.so of the NPU driver is not found" in reason
    assert "/usr/local/Ascend/driver" in reason


@pytest.mark.parametrize("version", ["2.1.0", "2.1.0.post3", "2.1.0rc1"])
def test_versions_that_do_not_belong_together_are_not_even_tried(
    asker: Asker, tmp_path: Path, version: str
) -> None:
    reason = asker.reason(install(tmp_path, "raise SystemExit('imported')", version))
    assert reason == (
        f"torch-npu {version} belongs to torch 2.1.0 and torch is {torch.__version__}: "
        f"pip install 'torch-npu=={RELEASE}.*', or pip install torch==2.1.0"
    )


@pytest.mark.parametrize("version", [f"{RELEASE}.post2", f"{RELEASE}rc1"])
def test_a_later_build_for_the_same_torch_is_tried(
    asker: Asker, tmp_path: Path, version: str
) -> None:
    code = REGISTER.format(num=1, opening="pass")
    answer = asker.answer(install(tmp_path, code, version))
    assert answer == {"answers": [None, None], "is_imported": True}


@pytest.mark.parametrize(
    ("symbol", "words"),
    [
        ("_ZN3c1021AutogradMetaInterfaceD2Ev", f"pip install 'torch-npu=={RELEASE}.*'"),
        ("aclrtMemcpyBatchAsync", "CANN lacks aclrtMemcpyBatchAsync"),
        ("HcclCommResume", "CANN lacks HcclCommResume"),
    ],
)
def test_an_undefined_symbol_is_torchs_or_canns(
    asker: Asker, tmp_path: Path, symbol: str, words: str
) -> None:
    text = f"/site/torch_npu/lib/libtorch_npu.so: undefined symbol: {symbol}"
    reason = asker.reason(install(tmp_path, f"raise ImportError({text!r})"))
    assert words in reason
    assert symbol in reason


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "Two accelerators cannot be used at the same time in PyTorch: npu and cuda. You can ...",
            f"pip install torch=={RELEASE} --index-url https://download.pytorch.org/whl/cpu",
        ),
        ("No module named 'yaml'", "No module named 'yaml'"),
        ("first\n[ERROR] second", "RuntimeError: first; `python -c 'import torch, torch_npu'`"),
        ("\n", "RuntimeError: no message"),
    ],
)
def test_whatever_else_its_import_raises(
    asker: Asker, tmp_path: Path, text: str, words: str
) -> None:
    reason = asker.reason(install(tmp_path, f"raise RuntimeError({text!r})"))
    assert words in reason
    assert "second" not in reason


def test_an_import_that_fails_half_way_is_not_taken_for_whole(asker: Asker, tmp_path: Path) -> None:
    """torch_npu registers torch.npu first and looks for CANN's folder after that, with an exception of no class of its own."""
    code = REGISTER.format(num=1, opening="pass") + "raise Exception('ASCEND_HOME_PATH : x does')"
    assert "Exception: ASCEND_HOME_PATH : x does" in asker.reason(install(tmp_path, code))


def test_without_a_card(asker: Asker, tmp_path: Path) -> None:
    folder = install(tmp_path, REGISTER.format(num=0, opening="raise AssertionError"))
    reason = asker.reason(folder, is_imported=True)
    assert reason.startswith("torch.npu is there, but no NPU: /dev/davinci_manager")
    for words in ("`npu-smi info`", "driver and firmware", "--device /dev/davinci0"):
        assert words in reason
    hidden = asker.reason(folder, is_imported=True, ASCEND_RT_VISIBLE_DEVICES="")
    assert "ASCEND_RT_VISIBLE_DEVICES is ''" in hidden


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            "RuntimeError('Initialize:a.cpp:217 NPU function error: aclInit, error code is 507008\\n"
            "[ERROR] 2026-01-01-00:00:00 (PID:1, Device:0, RankID:-1) ERR00100 PTA call acl api failed\\n"
            "[Error]: Failed to obtain the SOC version. ')",
            "aclInit, error code 507008: Failed to obtain the SOC version; see `npu-smi info`",
        ),
        ("RuntimeError('Unsupported soc version: Ascend999')", "does not know this SoC"),
        ("RuntimeError('Failed to find function aclrtX')", "CANN lacks aclrtX"),
        ("AssertionError('Invalid device id')", "cannot be opened: Invalid device id"),
        ("OSError(5, 'bad')", "cannot be opened: [Errno 5] bad"),
        ("SystemExit(0)", "cannot be opened: 0"),
        ("SystemExit", "cannot be opened: SystemExit"),
    ],
)
def test_a_card_that_cannot_be_opened(asker: Asker, tmp_path: Path, error: str, words: str) -> None:
    folder = install(tmp_path, REGISTER.format(num=1, opening=f"raise {error}"))
    assert words in asker.reason(folder, is_imported=True)


def test_a_torch_npu_that_wants_to_exit_is_no_reason_to_exit(asker: Asker, tmp_path: Path) -> None:
    """`xgr` would end with its code, 0 for all is well."""
    reason = asker.reason(install(tmp_path, "raise SystemExit(0)"))
    assert "cannot be imported: SystemExit: 0" in reason


@pytest.mark.parametrize("content", [None, b"Name: torch-npu\n", b"Version: 2.\xff\n"])
def test_damaged_metadata_say_nothing_of_the_card(
    asker: Asker, tmp_path: Path, content: bytes | None
) -> None:
    """What an interrupted pip leaves; the module itself works up to the point where there is no card."""
    folder = install(tmp_path, REGISTER.format(num=0, opening="pass"))
    (metadata,) = folder.glob("*.dist-info/METADATA")
    metadata.unlink()
    if content is not None:
        metadata.write_bytes(content)
    assert "torch.npu is there, but no NPU" in asker.reason(folder, is_imported=True)


SET_OPTION = (
    "SetPrecisionMode:a.cpp:156 NPU function error: at_npu::native::AclSetCompileopt(a), error code is 500001\\n"
    "[ERROR] 2026-01-01-00:00:00 (PID:1, Device:0, RankID:-1) ERR00100 PTA call acl api failed\\n"
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SET_OPTION, ["error code 500001"]),
        (
            SET_OPTION + "Traceback\\nModuleNotFoundError: No module named \\'decorator\\'",
            ["error code 500001", "(No module named 'decorator')"],
        ),
        ("No module named \\'attr\\'", ["cannot be opened: No module named 'attr';"]),
    ],
)
def test_a_card_that_lacks_canns_own_python_packages(
    asker: Asker, tmp_path: Path, text: str, words: list[str]
) -> None:
    opening = f"raise RuntimeError('{text}')"
    reason = asker.reason(
        install(tmp_path, REGISTER.format(num=1, opening=opening)), is_imported=True
    )
    for word in (*words, "pip install attrs", "scipy", "'numpy<2'", "g++"):
        assert word in reason
    assert reason.count("No module named") == ("No module" in text)
    assert "npu-smi" not in reason


def test_another_code_that_holds_its_digits_is_another(asker: Asker, tmp_path: Path) -> None:
    text = SET_OPTION.replace("500001", "5000012")
    opening = f"raise RuntimeError('{text}')"
    folder = install(tmp_path, REGISTER.format(num=1, opening=opening))
    assert "pip install" not in asker.reason(folder, is_imported=True)


def test_a_torch_npu_that_is_there_already_is_used(asker: Asker, tmp_path: Path) -> None:
    """Another backend registered under this name: torch_npu is not imported beside it."""
    folder = install(tmp_path, "raise SystemExit('imported')")
    code = REGISTER.format(num=1, opening="pass").replace("torch_npu.npu", "a_backend")
    assert asker.answer(folder, code) == {"answers": [None, None], "is_imported": False}


def test_what_the_import_prints_stays_off_standard_output(tmp_path: Path) -> None:
    code = "print('Warning: ASCEND_HOME_PATH')\n" + REGISTER.format(num=0, opening="pass")
    done = run(install(tmp_path, code), "-m", "xgr_runtime.cli", "doctor", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["packages"]["torch-npu"] == RELEASE
    assert "Warning: ASCEND_HOME_PATH" in done.stderr


def broken_backend(folder: Path) -> Path:
    """What torch finds beside a torch_npu without CANN: an entry that it loads on `import torch`."""
    text = "libhccl.so: cannot open shared object file: No such file or directory"
    install(folder, f"raise ImportError({text!r})")
    points = folder / f"torch_npu-{RELEASE}.dist-info" / "entry_points.txt"
    points.write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return folder


def test_the_command_survives_a_backend_that_breaks_torch(tmp_path: Path) -> None:
    folder = broken_backend(tmp_path)
    xgr = ("-m", "xgr_runtime.cli")
    commands = (
        ("-c", "import torch"),
        (*xgr, "doctor"),
        (*xgr, "serve", "--config", "demo", "--port", "0", "--device", "npu"),
    )
    with ThreadPoolExecutor(2) as pool:
        alone, table, done = pool.map(lambda command: run(folder, *command), commands)
    assert alone.returncode == 1, "the situation"
    assert "Failed to load the backend extension: torch_npu" in alone.stderr
    assert (table.returncode, table.stderr) == (0, "")
    assert "CANN is not found (libhccl.so)" in table.stdout
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("xgr: DeviceError: device 'npu'")
    assert "CANN is not found (libhccl.so)" in line


def test_whoever_wants_the_autoload_gets_it_and_its_error(tmp_path: Path) -> None:
    done = run(broken_backend(tmp_path), "-m", "xgr_runtime.cli", "doctor", **{AUTOLOAD: "1"})
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("xgr: DeviceError: Failed to load the backend extension: torch_npu")
