"""The stand-ins of CANN's libraries, made for a library of our own that calls them as torch_npu does. Needs gcc and nm."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tools._ladder import stubs

if TYPE_CHECKING:
    from pathlib import Path

CALLER = """
#include <stdint.h>
int aclrtGetDeviceCount(uint32_t *count);
int aclrtSomethingNew(int a, int b);
int MsprofReportApi(void);
__attribute__((weak)) void not_of_the_vendor(void);
const char *kernel = "aclnnAdd", *sizes = "aclnnAddGetWorkspaceSize", *other = "aclnn";
uint32_t count(void) { uint32_t n = 77; aclrtGetDeviceCount(&n); return n + aclrtSomethingNew(1, 2) + MsprofReportApi(); }
void never(void) { not_of_the_vendor(); }
"""
# What a process that loads the stand-ins sees, as JSON.
LOOK = """
import ctypes, json
main, kernels = ctypes.CDLL("libascendcl.so"), ctypes.CDLL("libopapi.so")
main.aclrtGetSocName.restype = main.xgr_log_name.restype = main.xgr_log_type.restype = ctypes.c_char_p
count, at, stream, graph = (ctypes.c_void_p() for _ in range(4))
status = ctypes.c_int(-1)
main.aclrtGetDeviceCount(ctypes.byref(count))
main.aclrtMallocHost(ctypes.byref(at), ctypes.c_size_t(8))
main.aclrtCreateStream(ctypes.byref(stream))
main.aclmdlRICaptureBegin(stream, 0)
main.aclmdlRICaptureGetInfo(stream, ctypes.byref(status), ctypes.byref(graph))
kernels.aclnnAddGetWorkspaceSize(1, 2, 3)
kernels.aclnnAdd(1, 2, 3)
main.aclmdlRICaptureEnd(stream, ctypes.byref(graph))
main.aclrtMemcpy(at, ctypes.c_size_t(8), b"content!", ctypes.c_size_t(8), 1)
main.aclopCompileAndExecute(b"Sort")
log = [(main.xgr_log_name(i).decode(), main.xgr_log_type(i).decode(), main.xgr_log_kind(i), main.xgr_log_is_capturing(i))
       for i in range(main.xgr_log_size())]
print(json.dumps({
    "count": count.value or 0, "soc": main.aclrtGetSocName().decode(), "init": main.aclInit(None), "status": status.value,
    "copied": ctypes.string_at(at.value, 8).decode(), "log": log,
    "every library finds it": bool(ctypes.CDLL("libhccl.so").aclrtSomethingNew),
}))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder laid out like torch_npu, with one library that calls the vendor."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "lib").mkdir()
    source = folder / "caller.c"
    source.write_text(CALLER)
    library = folder / "lib" / "libtorch_npu.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return folder


@pytest.fixture(scope="module")
def folder(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("stubs")
    stubs.build(made, package)
    return made


def look(folder: Path, **options: str) -> dict[str, object]:
    environment = stubs.environment(folder, {"PATH": "/usr/bin:/bin"}) | options
    ran = subprocess.run(
        [sys.executable, "-c", LOOK], env=environment, capture_output=True, text=True, check=True
    )
    seen: dict[str, object] = json.loads(ran.stdout)
    return seen


def test_only_the_vendors_functions_are_defined(package: Path) -> None:
    assert stubs.undefined_functions(package) == [
        "MsprofReportApi",
        "aclrtGetDeviceCount",
        "aclrtSomethingNew",
    ]
    assert stubs.kernel_names(package) == ["aclnnAdd"]


def test_a_library_that_needs_them_loads_and_gets_sane_answers(package: Path, folder: Path) -> None:
    library = package / "lib" / "libtorch_npu.so"
    code = f"import ctypes; ctypes.CDLL('libascendcl.so', mode=ctypes.RTLD_GLOBAL); print(ctypes.CDLL({str(library)!r}).count())"
    for number in ("1", "0", "3"):
        environment = stubs.environment(folder, {}, num_devices=int(number))
        ran = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )  # fmt: skip
        assert ran.stdout.strip() == number


def test_what_is_asked_for_is_logged_in_order_and_with_the_capture(folder: Path) -> None:
    seen = look(folder)
    assert seen["log"] == [
        ["aclnnAdd", "", 0, 1],
        ["aclrtMemcpy", "", 1, 0],
        ["aclopCompileAndExecute", "Sort", 0, 0],
    ]
    assert (seen["status"], seen["copied"]) == (1, "content!")
    assert seen["every library finds it"]


def test_the_environment_says_what_the_device_looks_like(folder: Path) -> None:
    assert {name: look(folder)[name] for name in ("count", "soc", "init")} == {
        "count": 1,
        "soc": "Ascend910B2",
        "init": 0,
    }
    options = {"XGR_STUB_NPU_SOC": "Ascend310P3", "XGR_STUB_ACL_INIT": "507008"}
    seen = look(folder, XGR_STUB_NPU_COUNT="0", **options)
    assert (seen["count"], seen["soc"], seen["init"]) == (0, "Ascend310P3", 507008)


def test_where_torch_npu_is_not_installed_it_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"torch_npu is not installed for .*; install"):
        stubs.torch_npu_folder(sys.executable)
