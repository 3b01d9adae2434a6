"""A device or host without memory: the error says so wherever it strikes, and what was loaded goes on serving."""

from __future__ import annotations

import errno
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.helpers.catalogs import contiguous_tokens
from tests.helpers.engines import make_config, make_engine, write_catalog
from tests.helpers.oracle import Catalog
from tests.helpers.versions import VOCAB, ask, assert_is_version, state_of
from tests.service.servers import running_in_thread
from xgr_runtime.config import RuntimeConfig, ServiceConfig
from xgr_runtime.errors import DeviceError
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.service.catalog_admin_client import CatalogAdminClient

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.helpers.versions import Versions
    from xgr_runtime import Engine

ERRORS = (
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    MemoryError("none"),
)
PLACES: dict[str, tuple[object, str, str]] = {
    "slot": (torch, "zeros", "no room for .* of a slot of a catalogue; lower cache.catalog_slots"),
    "head": (torch.Tensor, "index_select", "no room for .* rows of the head; lower cache.catalog_"),
}


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


@pytest.fixture
def path(versions: Versions, tmp_path: Path) -> str:
    """Version 2 with tokens of its own, so that it needs rows of the head of its own."""
    versions.path(2)
    shifted = Catalog(versions.catalogs[2].items, contiguous_tokens([8, 8, 8], VOCAB - 24))
    versions.catalogs[2] = shifted
    return str(write_catalog(tmp_path / "shifted.xgr", shifted, "v2"))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("place", PLACES)
def test_a_load_without_room_changes_nothing(
    engine: Engine, versions: Versions, path: str, place: str, error: Exception
) -> None:
    owner, name, message = PLACES[place]
    before = state_of(engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, raising(error))
        with pytest.raises(DeviceError, match=message):
            engine.load_catalog("main", path)
    assert state_of(engine) == before
    assert_is_version(ask(engine), 1, versions)
    assert engine.load_catalog("main", path) == "v2"
    assert_is_version(ask(engine, "v2"), 2, versions)


def test_a_host_without_room_changes_nothing(
    engine: Engine, versions: Versions, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables that a slot is filled from, and the file's private copy."""
    before = state_of(engine)
    with monkeypatch.context() as patch:
        patch.setattr(np, "full", raising(MemoryError()))
        with pytest.raises(DeviceError, match=r"the host has no memory to load .* 'main'; lower"):
            engine.load_catalog("main", path)
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", raising(OSError(errno.ENOMEM, "Cannot allocate memory")))
        with pytest.raises(DeviceError, match=r"the host has no memory for the catalogue .*\.xgr"):
            engine.load_catalog("main", path)
    assert state_of(engine)[1:] == before[1:]
    assert_is_version(ask(engine), 1, versions)


def test_over_the_wire_it_is_a_lack_of_resources(
    engine: Engine, versions: Versions, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, name = path.rpartition("/")
    service = ServiceConfig(allow_catalog_admin=True, catalog_folder=folder)
    config = RuntimeConfig(catalogs={"main": versions.path(1)}, service=service)
    with (
        running_in_thread(engine, config) as target,
        CatalogAdminClient(target, timeout_s=60) as client,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "zeros", raising(ERRORS[0]))
            with pytest.raises(DeviceError, match=r"no room for .* of a slot of a catalogue"):
                client.load("main", name)
        assert_is_version(ask(engine), 1, versions)


class Counting(CpuDevice):
    """Counts allocations, and refuses one of them."""

    def __init__(self, refused: int | None) -> None:
        super().__init__()
        self.num_asked, self._refused = 0, refused

    def pinned_empty(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.ask()
        return super().pinned_empty(*args, **kwargs)

    def ask(self) -> None:
        self.num_asked += 1
        if self.num_asked - 1 == self._refused:
            raise ERRORS[self.num_asked % 3]


def test_every_buffer_of_an_engine_names_its_option(
    versions_model: Path, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(versions_model, {"main": versions.path(1)})  # type: ignore[dict-item]
    zeros = torch.zeros

    def build(device: Counting) -> None:
        def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
            device.ask()
            return zeros(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(torch, "zeros", counted)
            make_engine(config, device).close()

    whole = Counting(None)
    build(whole)
    assert whole.num_asked > 25
    for number in range(whole.num_asked):
        with pytest.raises(DeviceError, match=r"has no room for .*; lower (cache|scheduler)"):
            build(Counting(number))
