"""Kernels in CUDA C++ up to the driver: how they are cut, their text, what is kept on disk, what the driver is told.

The driver is one of the tests' own that reads its arguments as C would; what the kernels compute is in test_cuda_cluster.py.
"""

from __future__ import annotations

import ctypes
import re
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args

import pytest
import torch
from xgr_ops.cuda import driver
from xgr_ops.cuda.cluster_source import (
    NUM_RESIDENT,
    SHARED_BYTES,
    ClusterTiles,
    Kind,
    cluster_tiles,
    matrix_instruction,
    source,
)
from xgr_ops.cuda.cpp_kernel import CppKernel, kept

from xgr_runtime.errors import DeviceError
from xgr_runtime.hal.kernels import noting

if TYPE_CHECKING:
    from pathlib import Path

KINDS: tuple[Kind, ...] = get_args(Kind)
PROGRAMS: dict[Kind, tuple[int, ...]] = {"gated": (1, 2, 4), "add": (2, 4, 8)}


def every_tiles(*sizes: int) -> list[tuple[ClusterTiles, int]]:
    return [
        (cluster_tiles(kind, programs, size), size)
        for kind in KINDS
        for programs in PROGRAMS[kind]
        for size in sizes
    ]


def test_tiles_fit_the_chip_and_give_each_core_one_program() -> None:
    for tiles, size in every_tiles(8, 40, 1024, 2048, 3072, 6144):
        assert tiles.columns % 8 == 0
        assert tiles.stages >= 4
        assert tiles.shared_bytes <= SHARED_BYTES, tiles
        one_more = (128 + tiles.weight_rows) * 128 + 16
        assert tiles.stages == 12 or tiles.shared_bytes + one_more > SHARED_BYTES, tiles
        share = 1 if tiles.kind == "add" else tiles.programs
        clusters = -(-size // (tiles.columns * share))
        assert clusters * tiles.programs <= NUM_RESIDENT[tiles.programs] or tiles.columns >= 64


def test_wide_products_take_several_programs_of_a_core() -> None:
    assert cluster_tiles("gated", 2, 100_000).columns == 64
    assert cluster_tiles("add", 8, 100_000).columns == 144


@pytest.mark.parametrize("tiles", [tiles for tiles, _ in every_tiles(40, 2048)], ids=str)
def test_a_source_has_one_kernel_and_its_matrix_instruction(tiles: ClusterTiles) -> None:
    text = source(tiles)
    assert text.count("__global__") == 1
    assert "#include" not in text
    assert f"#define KERNEL {tiles.name}\n" in text
    assert f"template <> struct Mma<{tiles.weight_rows}>" in text
    assert text.count("{") == text.count("}")


def test_a_matrix_instruction_names_each_register_once() -> None:
    text = matrix_instruction(48)
    (registers,) = re.findall(r"bf16\.bf16 \{([^}]*)\}, %24, %25, p, 1, 1, 0, 0;", text)
    assert registers == ", ".join(f"%{i}" for i in range(24))
    assert re.findall(r'"\+f"\(d\[(\d+)\]\)', text) == [str(i) for i in range(24)]
    assert "m64n48k16" in text
    assert "setp.ne.b32 p, %26, 0;" in text


def test_what_is_on_disk_is_not_made_again(tmp_path: Path) -> None:
    file, made = tmp_path / "folder" / "a.cubin", list[int]()
    start = threading.Barrier(4)

    def make() -> bytes:
        made.append(1)
        return b"code"

    def look() -> None:
        start.wait(10)
        assert kept(file, make) == b"code"

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    num_made = len(made)
    assert 1 <= num_made <= 4
    assert kept(file, make) == b"code"
    assert len(made) == num_made
    assert [path.name for path in file.parent.iterdir()] == ["a.cubin"], "no part is left"


class Driver(SimpleNamespace):
    """Functions of a driver that note what they are told; `failing` answers 1."""

    def __init__(self, failing: str = "", context: int | None = 5) -> None:
        super().__init__(told=[], failing=failing, context=context)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *args: self.called(name, *args)

    def called(self, name: str, *args: Any) -> int:
        self.told.append((name, args))
        if name == self.failing:
            return 1
        if name == "cuGetErrorName":
            args[1]._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        elif name == "cuCtxGetCurrent":
            args[0]._obj.value = self.context
        elif name in ("cuModuleLoadData", "cuModuleGetFunction"):
            args[0]._obj.value = 77
        elif name == "cuLaunchKernelEx":
            config, _, addresses, _ = args
            self.config = config._obj
            self.args = [ctypes.c_int.from_address(address).value for address in addresses]
        return 0

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.told]


def use(monkeypatch: pytest.MonkeyPatch, fake: Driver) -> Driver:
    monkeypatch.setattr(driver, "_library", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    stream = SimpleNamespace(cuda_stream=0xABC)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: stream)
    return fake


def test_a_kernel_is_noted_then_made_ready_once_then_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake, compiled = use(monkeypatch, Driver()), list[str]()

    def compile_it() -> bytes:
        compiled.append("k")
        return b"code"

    kernel = CppKernel("k", compile_it, 288, 1000, 0)
    with noting() as found:
        kernel.start(6, ctypes.c_int(1))
        kernel.start(6, ctypes.c_int(1))
    assert list(found) == [kernel]
    assert (fake.told, compiled) == ([], []), "nothing is compiled or started"
    kernel.make_ready()
    kernel.make_ready()
    loaded = ["cuCtxGetCurrent", "cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"]
    assert fake.names == loaded
    with noting() as found:
        kernel.start(6, ctypes.c_int(-3), ctypes.c_int(4))
    assert not found, "it is ready"
    assert compiled == ["k"]
    config = fake.config
    assert [*config.grid, *config.block, config.shared_bytes] == [6, 1, 1, 288, 1, 1, 1000]
    assert (config.stream, config.num_attributes) == (0xABC, 1)
    assert (config.attributes[0].id, config.attributes[0].value) == (6, 1)
    assert fake.args == [-3, 4]


def test_a_thread_without_a_context_gets_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch, Driver(context=None))
    CppKernel("k", lambda: b"code", 288, 1000, 3).start(1)
    assert fake.names[:3] == ["cuCtxGetCurrent", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    assert fake.told[1][1][1].value == 3


def test_an_error_of_the_driver_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Driver(failing="cuModuleLoadData"))
    kernel = CppKernel("k", lambda: b"code", 288, 1000, 0)
    with pytest.raises(DeviceError, match=r"cuModuleLoadData of .* CUDA_ERROR_INVALID_VALUE"):
        kernel.start(1)


def test_the_structures_are_as_large_as_those_of_the_header() -> None:
    assert ctypes.sizeof(driver._Config) == 56
    assert ctypes.sizeof(driver._Attribute) == 72
    assert driver._Config.stream.offset == 32
    assert driver._Attribute.value.offset == 8


def test_a_tensor_map_is_aligned_and_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use(monkeypatch, Driver())
    driver.tensor_map.cache_clear()
    maps = [driver.tensor_map(4096 * i, 100, 2048, 64) for i in range(1, 9)]
    assert driver.tensor_map(4096, 100, 2048, 64) is maps[0]
    driver.tensor_map.cache_clear()
    assert len(fake.told) == 8
    assert all(ctypes.addressof(each) % 128 == 0 for each in maps)
    _, args = fake.told[0]
    assert args[3].value == 4096
    assert [list(each) for each in args[4:8]] == [[2048, 100], [4096], [64, 64], [1, 1]]
