"""Stand-ins for the shared libraries that torch_npu is linked to, so that it can be imported where there is no CANN.

The list of functions is read off torch_npu's own binaries (what they leave undefined, and the kernels' names that they look up
in libopapi.so); nothing of CANN is needed or copied. Every function returns 0, "done", and does nothing, except those of which
torch_npu reads what they hand back: devices and their name, memory (the host's), handles of streams, events and graphs.

So everything of torch_npu works down to that border: registration, schemas, shape rules, allocation, capture, and each op's own
C++, which checks its arguments, allocates its results and asks for a kernel. No kernel computes anything: whoever needs
results must not use this. The calls that say what a device would have been asked for (kernels, copies, waits, operators of
the older, graph-less interface) are logged, with whether a capture was under way; `tools/_ladder/l3_border.py` reads them.

What the device looks like is read from the environment when the process asks: XGR_STUB_NPU_COUNT (default 1; 0 is a machine
with CANN and without a card), XGR_STUB_NPU_SOC (default Ascend910B2), XGR_STUB_ACL_INIT (what aclInit returns, default 0).

Runs under any Python: `python tools/_ladder/stubs.py --folder DIR [--python PYTHON]`, then LD_LIBRARY_PATH=DIR for the process
that imports torch_npu, with TORCH_DEVICE_BACKEND_AUTOLOAD=0.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

NEEDED_LIBRARIES = (
    "libascendcl.so",
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
)
KERNEL_LIBRARY = "libopapi.so"
# Looked up by name when an op needs it.
FURTHER_LIBRARY = "libnnopbase.so"
_BINARIES = ("lib/libtorch_npu.so", "lib/libtensorpipe.so", "lib/libnpu_profiler.so", "_C.*.so")
_FOREIGN = re.compile(r"^(acl[A-Za-z]|Msprof|rt[A-Z]|Hccl)\w*$")

# Functions of which torch_npu reads what they hand back, and those that it looks up by name; parameters as it passes them.
_WITH_RESULTS = """
int aclInit(const char *config) { return from_env("XGR_STUB_ACL_INIT", 0); }
int aclrtGetDeviceCount(uint32_t *n) { *n = from_env("XGR_STUB_NPU_COUNT", 1); return 0; }
const char *aclrtGetSocName(void) { const char *s = getenv("XGR_STUB_NPU_SOC"); return s ? s : "Ascend910B2"; }
int aclrtSetDevice(int32_t id) { current = id; return 0; }
int aclrtGetDevice(int32_t *id) { *id = current; return 0; }
int aclrtGetCurrentContext(void **context) { *context = &current; return 0; }
int aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total_bytes) {
  *free_bytes = (size_t)60 << 30;
  *total_bytes = (size_t)64 << 30;
  return 0;
}
int aclrtMalloc(void **at, size_t size, int policy) { return reserve(at, size); }
int aclrtMallocAlign32(void **at, size_t size, int policy) { return reserve(at, size); }
int aclrtMallocHost(void **at, size_t size) { return reserve(at, size); }
int aclrtReserveMemAddress(void **at, size_t size, size_t alignment, void *hint, uint64_t flags) { return reserve(at, size); }
int aclrtFree(void *at) { free(at); return 0; }
int aclrtFreeHost(void *at) { free(at); return 0; }
int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind) {
  xgr_note("aclrtMemcpy", "", kind);
  memmove(to, from, size);
  return 0;
}
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *stream) {
  xgr_note("aclrtMemcpyAsync", "", kind);
  memmove(to, from, size);
  return 0;
}
int aclrtSynchronizeStream(void *stream) { xgr_note("aclrtSynchronizeStream", "", 0); return 0; }
int aclrtSynchronizeStreamWithTimeout(void *stream, int32_t ms) { xgr_note("aclrtSynchronizeStream", "", 0); return 0; }
int aclrtSynchronizeDevice(void) { xgr_note("aclrtSynchronizeDevice", "", 0); return 0; }
int aclrtSynchronizeEvent(void *event) { xgr_note("aclrtSynchronizeEvent", "", 0); return 0; }
int aclopCompileAndExecute(const char *type) { xgr_note("aclopCompileAndExecute", type, 0); return 0; }
int aclopCompileAndExecuteV2(const char *type) { xgr_note("aclopCompileAndExecute", type, 0); return 0; }
int aclrtMemset(void *to, size_t room, int32_t value, size_t size) { memset(to, value, size); return 0; }
int aclrtCreateStream(void **stream) { return handle(stream); }
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) { return handle(stream); }
int aclrtStreamQuery(void *stream, int *status) { *status = 0; return 0; }
int aclrtCreateEventWithFlag(void **event, uint32_t flag) { return handle(event); }
int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { return handle(event); }
int aclrtQueryEventStatus(void *event, int *status) { *status = 1; return 0; }
int aclrtEventElapsedTime(float *ms, void *start, void *end) { *ms = 0; return 0; }
int aclrtDeviceCanAccessPeer(int32_t *can, int32_t a, int32_t b) { *can = 0; return 0; }
int aclrtGetSysParamOpt(int option, int64_t *value) { *value = 0; return 0; }
int aclGetDeviceCapability(uint32_t id, int kind, int64_t *value) { *value = 0; return 0; }
const char *aclGetRecentErrMsg(void) { return ""; }
void *aclCreateDataBuffer(void *at, size_t size) { return an_object(); }
void *aclCreateTensorDesc(void) { return an_object(); }
void *aclopCreateAttr(void) { return an_object(); }
int aclmdlRICaptureBegin(void *stream, int mode) { capturing = stream; return handle(&captured); }
int aclmdlRICaptureEnd(void *stream, void **graph) { *graph = captured; capturing = 0; return 0; }
int aclmdlRICaptureGetInfo(void *stream, int *status, void **graph) {
  *status = capturing && stream == capturing;
  *graph = *status ? captured : 0;
  return 0;
}
int aclmdlRICaptureTaskGrpEnd(void *stream, void **group) { return handle(group); }
"""
_BY_NAME = (
    *("aclSetCompileopt", "aclrtCtxSetSysParamOpt", "aclrtSetSysParamOpt", "aclrtSetDeviceSatMode"),
    *("aclrtSetOpExecuteTimeOut", "aclrtDestroyStreamForce"),
    *("aclmdlRICaptureThreadExchangeMode", "aclmdlRICaptureTaskGrpBegin", "aclmdlRIExecuteAsync"),
    *("aclmdlRICaptureTaskUpdateBegin", "aclmdlRICaptureTaskUpdateEnd", "aclmdlRIDestroy"),
)
_PREAMBLE = """#include <stdint.h>
#include <stdlib.h>
#include <string.h>
static __thread int32_t current = 0;
static void *capturing = 0, *captured = 0;
static int from_env(const char *name, int value) { const char *s = getenv(name); return s ? atoi(s) : value; }
static void *an_object(void) { return calloc(1, 64); }
static int handle(void **at) { return (*at = an_object()) ? 0 : 1; }
static int reserve(void **at, size_t size) {
  if (posix_memalign(at, 64, size ? size : 64)) return 1;
  memset(*at, 0, size);
  return 0;
}
/* The log: name, operator's type, kind of copy, whether a capture was under way. */
enum { ROOM = 1 << 20 };
static struct entry { const char *name; char type[48]; int kind, is_capturing; } entries[ROOM];
static int num_entries = 0;
void xgr_note(const char *name, const char *type, int kind) {
  int place = __sync_fetch_and_add(&num_entries, 1);
  if (place >= ROOM) abort();
  entries[place].name = name;
  strncpy(entries[place].type, type ? type : "", 47);
  entries[place].kind = kind;
  entries[place].is_capturing = capturing != 0;
}
int xgr_log_size(void) { return num_entries; }
void xgr_log_clear(void) { num_entries = 0; }
const char *xgr_log_name(int place) { return entries[place].name; }
const char *xgr_log_type(int place) { return entries[place].type; }
int xgr_log_kind(int place) { return entries[place].kind; }
int xgr_log_is_capturing(int place) { return entries[place].is_capturing; }
"""
_KERNELS_PREAMBLE = """#include <stdlib.h>
void xgr_note(const char *name, const char *type, int kind);
static void *an_object(void) { return calloc(1, 64); }
static int drop(void *object) { free(object); return 0; }
"""
_ARGUMENT_TYPES = (
    "Tensor",
    "TensorList",
    "Scalar",
    "ScalarList",
    "IntArray",
    "BoolArray",
    "FloatArray",
)


def torch_npu_folder(python: str | Path = sys.executable) -> Path:
    """Where torch_npu is installed for that interpreter; it is not imported. Raises RuntimeError where it is not."""
    code = "import importlib.util as u; s = u.find_spec('torch_npu'); print(s.submodule_search_locations[0] if s else '')"
    found = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    if not found.stdout.strip():
        raise RuntimeError(f"torch_npu is not installed for {python}; install torch-npu==2.13.0")
    return Path(found.stdout.strip())


def undefined_functions(torch_npu: Path) -> list[str]:
    """Names of the vendor runtime's functions that torch_npu's binaries call and do not define."""
    names: set[str] = set()
    for pattern in _BINARIES:
        for path in torch_npu.glob(pattern):
            listed = subprocess.run(
                ["nm", "-D", "--undefined-only", str(path)],
                capture_output=True,
                text=True,
                check=True,
            )
            symbols = (line.split()[-1].split("@")[0] for line in listed.stdout.splitlines())
            names.update(symbol for symbol in symbols if _FOREIGN.match(symbol))
    return sorted(names)


def source_of(names: list[str]) -> str:
    """C source that defines every name, and what is looked up by name."""
    written = set(re.findall(r"^\S.*?\b(\w+)\(", _WITH_RESULTS, re.MULTILINE))
    rest = sorted({*names, *_BY_NAME} - written)
    return _PREAMBLE + _WITH_RESULTS + "".join(f"int {name}() {{ return 0; }}\n" for name in rest)


def kernel_names(torch_npu: Path) -> list[str]:
    """Names of the kernels that torch_npu looks up, without those that size their workspace."""
    found: set[str] = set()
    for pattern in _BINARIES:
        for path in torch_npu.glob(pattern):
            found.update(re.findall(r"\0(aclnn[A-Z]\w*)\0", _text_of(path)))
    return sorted({name.removesuffix("GetWorkspaceSize") for name in found})


def _text_of(path: Path) -> str:
    """The bytes of a file as characters, with the zero between two strings doubled, so that each has its own."""
    return path.read_bytes().decode("latin-1").replace("\0", "\0\0")


def kernels_source_of(names: list[str]) -> str:
    """C source of libopapi.so: arguments are objects without content, a kernel is a line of the log."""
    lines = ["int aclDestroyAclOpExecutor() { return 0; }"]
    for kind in _ARGUMENT_TYPES:
        lines.append(f"void *aclCreate{kind}() {{ return an_object(); }}")
        lines.append(f"int aclDestroy{kind}(void *object) {{ return drop(object); }}")
    for name in names:
        lines.append(f"int {name}GetWorkspaceSize() {{ return 0; }}")
        lines.append(f'int {name}() {{ xgr_note("{name}", "", 0); return 0; }}')
    return _KERNELS_PREAMBLE + "\n".join(lines) + "\n"


def build(folder: Path, torch_npu: Path) -> list[str]:
    """Write the libraries into `folder`; returns the names they define. Raises CalledProcessError where gcc fails."""
    folder.mkdir(parents=True, exist_ok=True)
    names, kernels = undefined_functions(torch_npu), kernel_names(torch_npu)
    main, opapi = folder / "stubs.c", folder / "kernels.c"
    main.write_text(source_of(names))
    opapi.write_text(kernels_source_of(kernels))
    _compile(folder, NEEDED_LIBRARIES[0], [str(main)])
    # A function looked up in any of them is found: they depend on the one that defines all.
    on_first = [f"-L{folder}", "-Wl,--no-as-needed", "-lascendcl"]
    for library in NEEDED_LIBRARIES[1:]:
        _compile(folder, library, ["-x", "c", "/dev/null", *on_first])
    _compile(folder, KERNEL_LIBRARY, [str(opapi), *on_first])
    _compile(folder, FURTHER_LIBRARY, ["-x", "c", "/dev/null", *on_first, "-lopapi"])
    return [*names, *kernels]


def _compile(folder: Path, library: str, inputs: list[str]) -> None:
    command = ["gcc", "-shared", "-fPIC", "-w", "-O0", "-std=gnu11", f"-Wl,-soname,{library}"]
    subprocess.run([*command, "-o", str(folder / library), *inputs], check=True)


def environment(
    folder: Path, base: dict[str, str], *, num_devices: int = 1, soc: str = "Ascend910B2"
) -> dict[str, str]:
    """`base` with what a process needs to import torch_npu over the stubs."""
    path = ":".join(filter(None, [str(folder), base.get("LD_LIBRARY_PATH", "")]))
    return base | {
        "LD_LIBRARY_PATH": path,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        # Every op reaches the stubs before its call returns, so that the log is in order.
        "TASK_QUEUE_ENABLE": "0",
        "XGR_STUB_NPU_COUNT": str(num_devices),
        "XGR_STUB_NPU_SOC": soc,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True, help="where the libraries go")
    parser.add_argument("--python", default=sys.executable, help="interpreter with torch_npu")
    options = parser.parse_args()
    names = build(options.folder, torch_npu_folder(options.python))
    print(f"{len(names)} functions in {options.folder}")


if __name__ == "__main__":
    main()
