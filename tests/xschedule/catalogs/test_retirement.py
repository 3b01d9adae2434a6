"""What a load may take away: versions that had their time, oldest first, and nothing else, whatever goes wrong."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.versions import (
    Versions,
    ask,
    assert_is_version,
    device_bytes,
    start_engine,
    state_of,
)
from tests.service.servers import running_in_thread
from xgr_runtime.config import RuntimeConfig, ServiceConfig
from xgr_runtime.errors import CatalogError, DeviceError, NotFound
from xgr_runtime.service.catalog_admin_client import CatalogAdminClient, LoadedVersion
from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xbeam.slot import CatalogSlot

if TYPE_CHECKING:
    from xgr_runtime import Engine

LARGE = 600


def swap(engine: Engine, path: str) -> None:
    engine.activate_catalog("main", engine.load_catalog("main", path))


def loaded(engine: Engine) -> set[str]:
    return set(engine.describe()["catalogs"]["main"]["versions"])


def fail_in(patch: pytest.MonkeyPatch, method: str, error: BaseException) -> None:
    """From now on a slot's method raises after it did its work."""
    original = getattr(CatalogSlot, method)

    def failing(slot: CatalogSlot, *args: Any) -> None:
        original(slot, *args)
        raise error

    patch.setattr(CatalogSlot, method, failing)


def test_a_staged_version_is_never_retired_by_a_load(engine: Engine, versions: Versions) -> None:
    engine.load_catalog("main", versions.path(2))
    before = state_of(engine)
    with pytest.raises(
        CatalogError, match=r"version 'v2' was loaded but .*retire_catalog\('main', 'v2'\)"
    ):
        engine.load_catalog("main", versions.path(3))
    assert state_of(engine) == before
    engine.activate_catalog("main", "v2")
    assert_is_version(ask(engine), 2, versions)
    engine.load_catalog("main", versions.path(3))
    assert loaded(engine) == {"v2", "v3"}
    engine.retire_catalog("main", "v3")
    assert engine.load_catalog("main", versions.path(4)) == "v4"
    assert_is_version(ask(engine, "v4"), 4, versions)


def test_a_staged_version_in_use_is_named_as_in_use(engine: Engine, versions: Versions) -> None:
    engine.load_catalog("main", versions.path(2))
    pinned = engine.catalogs.pin("main", "v2")
    with pytest.raises(CatalogError, match="v1, v2 are active or in use"):
        engine.load_catalog("main", versions.path(3))
    engine.catalogs.release(pinned)


def test_the_version_that_was_active_longest_ago_goes_first(
    versions_model: Path, versions: Versions, caplog: pytest.LogCaptureFixture
) -> None:
    with start_engine(versions_model, versions, num_slots=3) as engine:
        swap(engine, versions.path(2))
        swap(engine, versions.path(3))
        engine.activate_catalog("main", "v1")
        engine.activate_catalog("main", "v3")
        # v2 is not the one loaded first, but v1 is the one to roll back to.
        with caplog.at_level(logging.INFO):
            engine.load_catalog("main", versions.path(4))
        assert "version v2 is retired to make room for version v4" in caplog.text
        assert loaded(engine) == {"v1", "v3", "v4"}
        engine.load_catalog("main", versions.path(5))
        assert loaded(engine) == {"v3", "v4", "v5"}
        with pytest.raises(CatalogError, match="'v4' was loaded but never activated"):
            engine.load_catalog("main", versions.path(6))
        for number in (3, 4, 5):
            assert_is_version(ask(engine, f"v{number}"), number, versions)


def retired_for(engine: Engine, version: str) -> str:
    """Which version a load took away, as the engine and the service tell it."""
    found: str = engine.describe()["catalogs"]["main"]["versions"][version]["retired_version"]
    return found


def test_a_load_says_what_it_retired(versions_model: Path, versions: Versions) -> None:
    """With two slots no way back to v1 is left once v3 is loaded; with three there is."""
    for num_slots, expected in ((2, "v1"), (3, "")):
        with start_engine(versions_model, versions, num_slots) as engine:
            swap(engine, versions.path(2))
            engine.load_catalog("main", versions.path(3))
            assert [retired_for(engine, v) for v in ("v2", "v3")] == ["", expected]
            assert ("v1" in loaded(engine)) == (not expected)


def test_over_the_wire_a_load_says_what_it_retired(
    engine: Engine, versions: Versions, tmp_path: Path
) -> None:
    service = ServiceConfig(allow_catalog_admin=True, catalog_folder=str(tmp_path))
    config = RuntimeConfig(catalogs={"main": versions.path(1)}, service=service)
    names = [Path(versions.path(number)).name for number in (2, 3)]
    with (
        running_in_thread(engine, config) as target,
        CatalogAdminClient(target, timeout_s=60) as client,
    ):
        assert client.load("main", names[0], activate=True) == LoadedVersion("v2", "")
        assert client.load("main", names[1]) == LoadedVersion("v3", "v1")
        shown = client.catalogs()["main"]["versions"]
        assert {v: facts["retired_version"] for v, facts in shown.items()} == {"v2": "", "v3": "v1"}


def test_a_catalogue_is_closed_without_the_lock(
    engine: Engine, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Giving back a large one takes a while; `stats` and every request's pin wait for that lock."""
    is_locked: list[bool] = []
    close = Catalog.close

    def watched(catalog: Catalog) -> None:
        is_locked.append(engine.catalogs._lock.locked())
        close(catalog)

    monkeypatch.setattr(Catalog, "close", watched)
    swap(engine, versions.path(2))
    engine.retire_catalog("main", "v1")
    swap(engine, versions.path(3))
    swap(engine, versions.path(4))  # takes the slot of v2
    assert is_locked == [False, False]


def test_a_pinned_version_outlives_a_load(versions_model: Path, versions: Versions) -> None:
    with start_engine(versions_model, versions, num_slots=3) as engine:
        pinned = engine.catalogs.pin("main")
        swap(engine, versions.path(2))
        swap(engine, versions.path(3))
        engine.load_catalog("main", versions.path(4))
        assert loaded(engine) == {"v1", "v3", "v4"}
        engine.catalogs.release(pinned)
        assert_is_version(ask(engine, "v1"), 1, versions)


@pytest.mark.parametrize("method", ["__init__", "load"])
@pytest.mark.parametrize("kind", [MemoryError, DeviceError])
def test_a_failing_load_into_a_new_slot_changes_nothing(
    engine: Engine,
    versions: Versions,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    kind: type[Exception],
) -> None:
    before, size = state_of(engine), device_bytes(engine)
    with monkeypatch.context() as patch:
        # not a parameter: its traceback would hold the engine until the last test
        fail_in(patch, method, kind("device lost"))
        with pytest.raises(DeviceError):
            engine.load_catalog("main", versions.path(2))
        with pytest.raises(DeviceError):
            engine.load_catalog("ads", versions.path(2))
    assert state_of(engine) == before
    assert device_bytes(engine) == size, "no slot is kept for a load that failed"
    swap(engine, versions.path(2))
    assert_is_version(ask(engine), 2, versions)
    assert_is_version(ask(engine, "v1"), 1, versions)


@pytest.mark.parametrize("num_items", [150, LARGE])
def test_a_failing_load_in_place_of_a_free_slot_keeps_all_versions(
    versions_model: Path, versions: Versions, monkeypatch: pytest.MonkeyPatch, num_items: int
) -> None:
    with start_engine(versions_model, versions, num_slots=3) as engine:
        swap(engine, versions.path(2))
        engine.load_catalog("main", versions.path(3))
        engine.retire_catalog("main", "v3")
        before = state_of(engine)
        with monkeypatch.context() as patch:
            fail_in(patch, "load", MemoryError("no memory"))
            with pytest.raises(DeviceError):
                engine.load_catalog("main", versions.path(4, num_items))
        assert state_of(engine) == before
        engine.activate_catalog("main", "v1")
        assert_is_version(ask(engine), 1, versions)
        engine.load_catalog("main", versions.path(4))
        assert loaded(engine) == {"v1", "v2", "v4"}


@pytest.mark.parametrize(
    ("num_items", "method"), [(150, "load"), (LARGE, "load"), (LARGE, "__init__")]
)
def test_a_failing_load_loses_at_most_the_version_retired_for_it(
    versions_model: Path,
    versions: Versions,
    monkeypatch: pytest.MonkeyPatch,
    num_items: int,
    method: str,
) -> None:
    with start_engine(versions_model, versions, num_slots=3) as engine:
        swap(engine, versions.path(2))
        swap(engine, versions.path(3))
        with monkeypatch.context() as patch:
            fail_in(patch, method, DeviceError("out of memory"))
            # A second try finds the freed slot: it must not retire v2, the version to roll back to, as well.
            for says in ("out of memory; version 'v1', retired to make room", "out of memory$"):
                with pytest.raises(DeviceError, match=says):
                    engine.load_catalog("main", versions.path(4, num_items))
        assert loaded(engine) == {"v2", "v3"}
        with pytest.raises(NotFound, match="'v1' is not loaded"):
            engine.activate_catalog("main", "v1")
        engine.activate_catalog("main", "v2")
        assert_is_version(ask(engine), 2, versions)
        assert_is_version(ask(engine, "v3"), 3, versions)
        engine.load_catalog("main", versions.path(4, num_items))
        assert_is_version(ask(engine, "v4"), 4, versions)


def test_a_refused_load_forgets_a_name_it_never_loaded(
    engine: Engine, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_in(patch, "load", MemoryError("no memory"))
        with pytest.raises(DeviceError):
            engine.load_catalog("ads", versions.path(2))
    assert set(engine.describe()["catalogs"]) == {"main"}


def test_the_memory_of_a_slot_too_small_goes_before_the_new_one_is_allocated(
    engine: Engine, versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while somebody still holds the retired version, as a future that was not dropped does."""
    slots: weakref.WeakSet[CatalogSlot] = weakref.WeakSet()
    held = [engine.catalogs.by_slot[0]]
    slots.add(held[0].slot)
    bytes_before: list[int] = []
    make = CatalogSlot.__init__

    def init(slot: CatalogSlot, *args: Any) -> None:
        bytes_before.append(sum(other.nbytes for other in slots))
        make(slot, *args)
        slots.add(slot)

    monkeypatch.setattr(CatalogSlot, "__init__", init)
    for number, num_items in ((2, 150), (3, LARGE), (4, LARGE), (5, 4 * LARGE)):
        swap(engine, versions.path(number, num_items))
        held.extend(engine.catalogs.by_slot.values())
    by_version = {v.version: v.slot.nbytes for v in held}
    assert {name for name, size in by_version.items() if size} == {"v4", "v5"}
    assert len(bytes_before) == 4, "each of the four got a new slot"
    assert bytes_before[-1] == by_version["v4"], "beside the active version no other was in memory"
    assert set(engine.catalogs._rows_of_slot) == set(engine.catalogs.by_slot)
