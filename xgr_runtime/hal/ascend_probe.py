"""Why no Ascend NPU can be opened: one line that names what is missing and the cure.

An NPU needs four things of one generation: torch, torch_npu, CANN's libraries, and a driver with a card. Each can be absent or of
the wrong version, and torch_npu then fails with whatever its own start-up meets first: a shared library, an undefined symbol,
an exception without a class of its own. What is behind it is asked in the order in which it would be installed.

torch_npu is imported here and nowhere else, and only where `torch.npu` is absent: torch's autoload may have done it before.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

from xgr_runtime.hal.ascend_errors import explain_npu_error, first_line, what_failed

__all__ = ["ascend_versions", "explain_npu_error", "why_no_npu"]

ASCEND_FOLDER = Path("/usr/local/Ascend")
SET_ENV_FILES = ("cann/set_env.sh", "ascend-toolkit/set_env.sh", "ascend-toolkit/latest/set_env.sh")
DEVICE_MANAGER = Path("/dev/davinci_manager")
CONTAINER = (
    "a container needs --device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm "
    "--device /dev/hisi_hdc and the driver's folder mounted"
)
DRIVER_LIBRARIES = ("libascend_hal", "libdrvdsmi_host", "libdcmi")
_MISSING_LIBRARY = re.compile(r"(lib[\w.+-]+?\.so[\d.]*): cannot open shared object file")
_UNDEFINED_SYMBOL = re.compile(r"undefined symbol: (\w+)")
_CANN_SYMBOL = re.compile(r"acl[A-Za-z]|Hccl|hccl|rt[A-Z]|Msprof|ge[A-Z]|_ZNK?2ge")
_MISSING_FUNCTION = re.compile(r"Failed to find function\s+(\w+)")
# AclSetCompileopt, the first call that starts CANN's own Python code. Published for torch-npu; not run on hardware.
_COMPILER_CODE = re.compile(r"\berror code is:? ?500001\b")
_MISSING_MODULE = re.compile(r"No module named '?[\w.]+'?")
# What CANN's installation guides list (published, not tried), but for protobuf: they name 3.20.x and this runtime needs its own.
CANN_PACKAGES = (
    "attrs cython numpy decorator sympy cffi pyyaml pathlib2 psutil scipy requests absl-py"
)


def why_no_npu() -> str | None:
    """None when an NPU can be opened, which this tries; else the reason and the cure in one line. Never raises."""
    reason = None if _is_loaded() else _why_not_imported()
    if reason is not None:
        return reason
    try:
        return _why_not_opened(_npu())
    # What the vendor's start-up raises has no common class: Exception, AssertionError, RuntimeError, OSError were seen. And an
    # exit that it asks for is not ours: `xgr` would end with its code.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return _opening_failed(error)


def ascend_versions() -> dict[str, str]:
    """Versions of CANN and of the driver by what their files on this machine say; "" where there are none to read.

    Empty where neither is found nor torch-npu installed: whoever has no NPU misses none of them.
    """
    home = os.environ.get("ASCEND_HOME_PATH")
    homes = (
        [Path(home)] if home else [ASCEND_FOLDER / "cann", ASCEND_FOLDER / "ascend-toolkit/latest"]
    )
    files = (
        "ascend_*_install.info",
        "*/ascend_*_install.info",
        "runtime/version.info",
        "compiler/version.info",
    )
    found = (
        _version_in(path) for folder in homes for name in files for path in _matches(folder, name)
    )
    cann = next(filter(None, found), "")
    versions = {"CANN": cann, "Ascend driver": _version_in(ASCEND_FOLDER / "driver/version.info")}
    return versions if any(versions.values()) or _npu_version() else {}


def _npu() -> Any:
    return getattr(torch, "npu", None)


def _is_loaded() -> bool:
    """Whether `torch.npu` is there and whole. torch_npu registers it half-way through its import, and a failing import leaves it."""
    npu = _npu()
    is_theirs = getattr(npu, "__name__", "").startswith("torch_npu")
    return npu is not None and (not is_theirs or "torch_npu" in sys.modules)


@functools.cache
def _why_not_imported() -> str | None:
    """Import torch_npu, once: a second try meets the remains of the first and fails differently. Never raises."""
    try:
        is_there = importlib.util.find_spec("torch_npu") is not None
    except ValueError as error:  # what is left of an import that failed half-way
        return _importing_failed(error)
    if not is_there:
        return f"torch-npu is not installed: {_pip_line(_release(torch.__version__))}"
    reason = _why_not_together()
    if reason is not None:
        return reason
    try:
        # It prints warnings, and standard output belongs to whoever reads `xgr`.
        with contextlib.redirect_stdout(sys.stderr):
            importlib.import_module("torch_npu")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - as above: torch_npu raises plain Exception too
        return _importing_failed(error)
    return None if _npu() is not None else "torch-npu was imported and registered no torch.npu"


def _why_not_together() -> str | None:
    """torch-npu X.Y.Z requires torch X.Y.Z; with another one it crashes or reads wrong offsets, so it is not even tried."""
    npu_release, torch_release = _release(_npu_version()), _release(torch.__version__)
    if not npu_release or npu_release == torch_release:
        return None
    return (
        f"torch-npu {_npu_version()} belongs to torch {npu_release} and torch is {torch.__version__}: "
        f"{_pip_line(torch_release)}, or pip install torch=={npu_release}"
    )


def _importing_failed(error: BaseException) -> str:
    text, known = str(error), f"torch-npu {_npu_version()} is installed"
    library, symbol = _MISSING_LIBRARY.search(text), _UNDEFINED_SYMBOL.search(text)
    if library and library[1].startswith(DRIVER_LIBRARIES):
        return (
            f"{known}, but {library[1]} of the NPU driver is not found: install driver and firmware, or mount "
            f"{ASCEND_FOLDER}/driver into the container, and put its lib64 on LD_LIBRARY_PATH"
        )
    if library:
        return (
            f"{known}, but CANN is not found ({library[1]}): install CANN and run `source {_set_env()}` in this shell, "
            "which puts its libraries on LD_LIBRARY_PATH"
        )
    if symbol and _CANN_SYMBOL.match(symbol[1]):
        return f"{known}, but CANN lacks {symbol[1]}: install the CANN that this torch-npu was released with"
    if symbol:
        return (
            f"{known}, but does not fit torch {torch.__version__} (undefined symbol {symbol[1]}): "
            f"{_pip_line(_release(torch.__version__))}"
        )
    if "Two accelerators" in text:
        return (
            f"{known}, but this torch is built for another accelerator: pip install torch=={_release(torch.__version__)} "
            "--index-url https://download.pytorch.org/whl/cpu"
        )
    return (
        f"{known}, but cannot be imported: {type(error).__name__}: {first_line(text)}; "
        "`python -c 'import torch, torch_npu'` shows all of it"
    )


def _why_not_opened(npu: Any) -> str | None:
    if not npu.is_available() or npu.device_count() < 1:
        hidden = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
        note = "" if hidden is None else f" (ASCEND_RT_VISIBLE_DEVICES is {hidden!r})"
        return (
            f"torch.npu is there, but no NPU{note}: {_nodes()}; `npu-smi info` must list one, else install driver and "
            f"firmware; {CONTAINER}"
        )
    npu.current_device()  # what was counted is opened: a driver that does not fit shows here
    return None


def _opening_failed(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    missing = _MISSING_FUNCTION.search(text)
    if missing:
        return f"CANN lacks {missing[1]}: install the CANN that torch-npu {_npu_version()} was released with"
    if "nsupported soc version" in text:
        return f"{first_line(text)}: torch-npu {_npu_version()} does not know this SoC; install one that does"
    module = _MISSING_MODULE.search(text)
    if module or _COMPILER_CODE.search(text):
        return _canns_python_failed(text, module[0] if module else "")
    return (
        f"an NPU is there and cannot be opened: {what_failed(text)}; see `npu-smi info`, and whether driver, firmware and CANN "
        "are of one release"
    )


def _canns_python_failed(text: str, missing: str) -> str:
    """CANN compiles its ops with Python code of its own, in this environment, whose packages no wheel requires."""
    what = what_failed(text)
    found = f" ({missing})" if missing and missing not in what else ""
    return (
        f"an NPU is there and cannot be opened: {what}{found}; CANN's own Python code needs g++ and pip install {CANN_PACKAGES} "
        "in this environment ('numpy<2' where CANN's release notes ask for it), and the op library of CANN's version"
    )


def _nodes() -> str:
    if not DEVICE_MANAGER.exists():
        return f"{DEVICE_MANAGER} does not exist"
    if not os.access(DEVICE_MANAGER, os.R_OK | os.W_OK):
        return f"{DEVICE_MANAGER} is not accessible to this user (its group may be HwHiAiUser)"
    return f"{DEVICE_MANAGER} exists"


def _npu_version() -> str:
    """The installed version; "" where it is on the path without having been installed, or its metadata are damaged."""
    try:
        found: object = importlib.metadata.version("torch-npu")
    except (importlib.metadata.PackageNotFoundError, UnicodeDecodeError, OSError):
        return ""
    return found if isinstance(found, str) else ""  # None where an installation broke off


def _release(version: str) -> str:
    """X.Y.Z without build and post-release; "" where it does not begin so."""
    found = re.match(r"\d+\.\d+\.\d+", version)
    return found[0] if found else ""


def _pip_line(torch_release: str) -> str:
    return f"pip install 'torch-npu=={torch_release}.*'"


def _set_env() -> str:
    home = os.environ.get("ASCEND_HOME_PATH")
    folders = [Path(home), Path(home).parent] if home else []
    found = [folder / "set_env.sh" for folder in folders] + [
        ASCEND_FOLDER / name for name in SET_ENV_FILES
    ]
    return str(next((path for path in found if path.is_file()), ASCEND_FOLDER / SET_ENV_FILES[1]))


def _matches(folder: Path, pattern: str) -> list[Path]:
    """Files of a folder that a variable of the environment may name: none where no such folder can be."""
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []


def _version_in(path: Path) -> str:
    """The value of the first "version=" line (of any case); "" where the file or the line is missing."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"^\s*version\s*=\s*\[?([^\s\]]+)", text, re.MULTILINE | re.IGNORECASE)
    return found[1] if found else ""
