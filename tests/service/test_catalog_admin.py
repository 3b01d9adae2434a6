"""Administration of catalogues over gRPC: what it may touch, what it answers, and the commands on top of it."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.service.scrape import free_port
from tests.service.servers import running_in_thread
from tests.service.stand_in import StandInEngine
from tests.service.waiting import PATIENCE_S, wait_until
from xgr_runtime.cli import main
from xgr_runtime.config import RuntimeConfig, ServiceConfig, load_config
from xgr_runtime.errors import (
    CatalogError,
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    DeviceError,
    InvalidRequest,
    NotFound,
)
from xgr_runtime.service import catalog_admin, catalog_admin_cli
from xgr_runtime.service._pb.xgr.v1 import catalog_pb2, catalog_pb2_grpc
from xgr_runtime.service.catalog_admin_client import CatalogAdminClient, LoadedVersion
from xgr_runtime.service.rpc_errors import ServiceError
from xgr_runtime.service.server import serve
from xgr_runtime.service.worker_thread import WorkerThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

ERRORS: dict[str, Exception] = {
    "bad": CatalogError("bad.xgrc is truncated"),
    "foreign model": CheckpointError("the catalogue needs token 64"),
    "full": DeviceError("out of memory"),
    "no host memory": MemoryError("none"),
    "defect": ZeroDivisionError("secret detail of the code"),
}


class Catalogs(StandInEngine):
    """An engine that keeps names: the version of a file is its name without the suffix."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: list[str] = ["v1"]
        self.retired_for = {"v1": ""}
        self.active = "v1"
        self.loaded_paths: list[str] = []
        self.may_load = threading.Event()
        self.may_load.set()

    def load_catalog(self, name: str, path: str) -> str:
        """Three versions at once: a fourth takes the place of the first that is not active."""
        assert name == "items"
        self.loaded_paths.append(path)
        assert self.may_load.wait(2 * PATIENCE_S)
        version = Path(path).stem
        if version in ERRORS:
            raise ERRORS[version]
        self.retired_for[version] = ""
        if len(self.versions) == 3:
            self.retired_for[version] = next(v for v in self.versions if v != self.active)
            self.versions.remove(self.retired_for[version])
        self.versions.append(version)
        return version

    def activate_catalog(self, name: str, version: str) -> str:
        if name != "items" or version not in self.versions:
            raise NotFound(f"version {version!r} is not loaded")
        before, self.active = self.active, version
        return before

    def retire_catalog(self, name: str, version: str) -> None:
        if version == self.active:
            raise CatalogError(f"version {version!r} is active and cannot be retired")
        self.versions.remove(version)

    def describe(self) -> dict[str, Any]:
        facts = {"num_items": 7, "num_sids": 5, "num_pins": 1, "device_bytes": 3 << 20}
        versions = {v: {**facts, "retired_version": self.retired_for[v]} for v in self.versions}
        return {"catalogs": {"items": {"active": self.active, "versions": versions}}}


@pytest.fixture
def engine() -> Catalogs:
    return Catalogs()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "catalogs" / "old").mkdir(parents=True)
    return tmp_path / "catalogs"


@pytest.fixture
def target(engine: Catalogs, folder: Path) -> Iterator[str]:
    service = ServiceConfig(allow_catalog_admin=True, catalog_folder=str(folder))
    config = RuntimeConfig(catalogs={"items": "items.xgrc"}, service=service)
    with running_in_thread(engine, config) as target:
        yield target


@pytest.fixture
def client(target: str) -> Iterator[CatalogAdminClient]:
    with CatalogAdminClient(target, timeout_s=PATIENCE_S) as client:
        yield client


def test_load_activate_roll_back_retire(
    client: CatalogAdminClient, engine: Catalogs, folder: Path
) -> None:
    assert client.load("items", "v2.xgrc") == LoadedVersion("v2", "")
    assert engine.active == "v1"
    assert client.activate("items", "v2") == "v1"
    assert client.load("items", "old/v3.xgrc", activate=True) == LoadedVersion("v3", "")
    assert engine.active == "v3"
    assert engine.loaded_paths == [str(folder / "v2.xgrc"), str(folder / "old" / "v3.xgrc")]
    assert client.activate("items", "v2") == "v3"
    assert client.load("items", "v4.xgrc") == LoadedVersion("v4", "v1")
    client.retire("items", "v3")
    facts = {"num_items": 7, "num_sids": 5, "num_in_use": 1, "device_bytes": 3 << 20}
    v2, v4 = ({**facts, "retired_version": version} for version in ("", "v1"))
    assert client.catalogs() == {
        "items": {"active_version": "v2", "versions": {"v2": v2, "v4": v4}}
    }


def test_only_files_of_the_folder_can_be_named(
    client: CatalogAdminClient, engine: Catalogs, folder: Path
) -> None:
    os.symlink("/etc", folder / "link")
    os.symlink(folder / "old", folder / "inner")
    (folder.parent / "catalogs-not").mkdir()
    for path in (
        "../x.xgrc",
        "old/../../x.xgrc",
        "/etc/passwd",
        str(folder / "v2.xgrc"),
        "link/passwd",
        "../catalogs-not/x",
    ):
        with pytest.raises(InvalidRequest, match=r"path: must lie in .*service\.catalog_folder"):
            client.load("items", path)
    for path in ("", "a\0b", "a\nb", "x" * 5000):
        with pytest.raises(InvalidRequest, match="path: 1 to 4096 printable characters expected"):
            client.load("items", path)
    assert engine.loaded_paths == []
    assert client.load("items", "inner/v4.xgrc").version == "v4"
    assert client.load("items", "./old/../v5.xgrc").version == "v5"


def test_names_and_versions_are_checked(client: CatalogAdminClient, engine: Catalogs) -> None:
    with pytest.raises(NotFound, match="catalogue 'other' is not configured; configured: items"):
        client.load("other", "v2.xgrc")
    with pytest.raises(InvalidRequest) as caught:
        client.activate("", "v" * 300)
    assert [field for field, _ in caught.value.violations] == ["name", "version"]
    with pytest.raises(
        InvalidRequest, match=r"version: 1 to limits\.max_name_length = 256 .* got 0"
    ):
        client.retire("items", "")
    with pytest.raises(NotFound, match="version 'v9' is not loaded"):
        client.activate("items", "v9")
    assert engine.active == "v1"


@pytest.mark.parametrize(
    ("version", "kind", "message"),
    [
        ("bad", CatalogError, "bad.xgrc is truncated"),
        ("foreign model", CatalogError, "the catalogue needs token 64"),
        ("full", DeviceError, "out of memory"),
        ("no host memory", DeviceError, "the host has no memory for it"),
        (
            "defect",
            ServiceError,
            "INTERNAL: internal error; the server's log has the details under",
        ),
    ],
)
def test_loads_that_fail(
    client: CatalogAdminClient, version: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        client.load("items", f"{version}.xgrc", activate=True)
    assert "secret" not in str(caught.value)
    assert client.catalogs()["items"]["active_version"] == "v1"
    with pytest.raises(CatalogError, match="'v1' is active and cannot be retired"):
        client.retire("items", "v1")


def test_bytes_that_are_no_message(target: str) -> None:
    with grpc.insecure_channel(target) as channel:
        for method in ("LoadCatalog", "ActivateCatalog", "RetireCatalog", "ListCatalogs"):
            call = channel.unary_unary(f"/xgr.v1.CatalogService/{method}")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"\xff\xff\xff", timeout=PATIENCE_S)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert f"is not an xgr.v1.{method}Request message" in caught.value.details()


def test_it_is_off_unless_the_configuration_allows_it(
    engine: Catalogs, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        running_in_thread(engine) as target,
        CatalogAdminClient(target, timeout_s=PATIENCE_S) as client,
    ):
        with pytest.raises(ServiceError, match=r"UNIMPLEMENTED: .*service\.allow_catalog_admin"):
            client.catalogs()
        assert main(["catalog", "list", "--target", target]) == 1
    assert "offers no administration of catalogues" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"allow_catalog_admin needs service\.catalog_folder"):
        load_config(None, ["service.allow_catalog_admin=true"])


def test_the_folder_is_relative_to_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("service: {allow_catalog_admin: true, catalog_folder: versions}\n")
    assert load_config(path).config.service.catalog_folder == str(tmp_path / "versions")


def test_a_folder_that_is_none_is_refused_at_the_start(engine: Catalogs, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("nowhere", "file"):
        service = ServiceConfig(allow_catalog_admin=True, catalog_folder=str(tmp_path / name))
        with pytest.raises(ConfigError, match=rf"service\.catalog_folder must be .*/{name}$"):
            asyncio.run(serve(engine, RuntimeConfig(service=service), print))


def test_requests_and_lists_do_not_wait_for_a_load(
    client: CatalogAdminClient, engine: Catalogs
) -> None:
    engine.may_load.clear()
    done: list[str] = []
    thread = threading.Thread(target=lambda: done.append(client.load("items", "v2.xgrc").version))
    thread.start()
    try:
        wait_until(lambda: engine.loaded_paths)
        assert client.catalogs()["items"]["active_version"] == "v1"
        assert not done
    finally:
        engine.may_load.set()
        thread.join()
    assert done == ["v2"]


def test_a_stop_answers_the_loads_that_run(engine: Catalogs, folder: Path) -> None:
    engine.may_load.clear()
    service = ServiceConfig(allow_catalog_admin=True, catalog_folder=str(folder))
    config = RuntimeConfig(catalogs={"items": "items.xgrc"}, service=service)
    faults: list[Exception] = []

    def load(target: str) -> None:
        with CatalogAdminClient(target, timeout_s=PATIENCE_S) as client:
            try:
                client.load("items", "v2.xgrc")
            except Exception as error:  # noqa: BLE001 - looked at below
                faults.append(error)

    with running_in_thread(engine, config) as target:
        thread = threading.Thread(target=load, args=(target,))
        thread.start()
        wait_until(lambda: engine.loaded_paths)
    thread.join()
    engine.may_load.set()
    assert len(faults) == 1
    assert "shutting down" in str(faults[0])


def test_a_caller_that_is_out_of_patience(target: str, engine: Catalogs) -> None:
    engine.may_load.clear()
    try:
        with (
            CatalogAdminClient(target, timeout_s=0.2) as impatient,
            pytest.raises(DeadlineExceeded),
        ):
            impatient.load("items", "v2.xgrc", activate=True)
    finally:
        engine.may_load.set()


@pytest.fixture(autouse=True)
def the_command_is_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no option for that, and gives up after ten seconds."""
    patient = partial(CatalogAdminClient, timeout_s=PATIENCE_S)
    monkeypatch.setattr(catalog_admin_cli, "CatalogAdminClient", patient)


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by one when the server has taken in a load, which may wait behind others."""
    taken: list[Any] = []

    class Noting(WorkerThread):
        def submit(self, function: Callable[[], Any]) -> Future[Any]:
            future = super().submit(function)
            taken.append(function)
            return future

    monkeypatch.setattr(catalog_admin, "WorkerThread", Noting)
    return taken


def give_up(target: str, path: str, is_there: Callable[[], object]) -> None:
    """Ask for a load and leave when it is there."""
    with grpc.insecure_channel(target) as channel:
        stub: Any = catalog_pb2_grpc.CatalogServiceStub(channel)  # type: ignore[no-untyped-call]
        request = catalog_pb2.LoadCatalogRequest(name="items", path=path, activate=True)
        call = stub.LoadCatalog.future(request, timeout=2 * PATIENCE_S)
        wait_until(is_there)
        assert call.cancel()


def test_a_load_goes_on_without_its_caller_once_it_has_begun(
    queued: list[Any], target: str, engine: Catalogs, caplog: pytest.LogCaptureFixture
) -> None:
    """The first is under way when its caller gives up; the second waits for it and is dropped, which the log says."""
    caplog.set_level("INFO", "xgr_runtime.service")
    engine.may_load.clear()
    give_up(target, "v2.xgrc", lambda: engine.loaded_paths)
    wait_for(caplog, "the load of v2.xgrc into items was given up after it began: it goes on")
    give_up(target, "v3.xgrc", lambda: len(queued) == 2)
    wait_for(caplog, "the load of v3.xgrc into items was given up before it began: dropped")
    engine.may_load.set()
    wait_for(caplog, "the load of v2.xgrc into items ended: version v2")
    with CatalogAdminClient(target, timeout_s=PATIENCE_S) as client:
        assert client.load("items", "v4.xgrc").version == "v4"
        assert list(client.catalogs()["items"]["versions"]) == ["v1", "v2", "v4"]
        assert client.catalogs()["items"]["active_version"] == "v2"
    assert [Path(path).stem for path in engine.loaded_paths] == ["v2", "v4"]


def test_a_load_that_fails_without_its_caller_is_in_the_log(
    target: str, engine: Catalogs, caplog: pytest.LogCaptureFixture
) -> None:
    for version, text in (("bad", "failed: bad.xgrc is truncated"), ("defect", "failed")):
        engine.may_load.clear()
        engine.loaded_paths.clear()
        give_up(target, f"{version}.xgrc", lambda: engine.loaded_paths)
        wait_for(caplog, f"the load of {version}.xgrc into items was given up after it began")
        engine.may_load.set()
        wait_for(caplog, f"the load of {version}.xgrc into items {text}")


def wait_for(caplog: pytest.LogCaptureFixture, text: str) -> None:
    def is_there() -> bool:
        return any(record.getMessage().startswith(text) for record in list(caplog.records))

    wait_until(is_there, lambda: caplog.text)


def test_the_commands(target: str, engine: Catalogs, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> tuple[int, str, str]:
        code = main(["catalog", *words, "--target", target])
        written = capsys.readouterr()
        return code, written.out, written.err

    assert run("load", "items", "v2.xgrc") == (0, "items: version v2 is loaded\n", "")
    assert run("load", "items", "v3.xgrc", "--activate")[1] == "items: version v3 is active\n"
    assert run("activate", "items", "v2")[1] == "items: version v2 is active; before: v3\n"
    assert run("load", "items", "v4.xgrc")[1] == (
        "items: version v4 is loaded\n"
        "items: version v1 was retired to make room; load its file again to go back to it\n"
    )
    assert run("retire", "items", "v3")[1] == "items: version v3 is retired\n"
    assert run("retire", "items", "v2") == (
        1,
        "",
        "xgr catalog: version 'v2' is active and cannot be retired\n",
    )
    assert run("list")[1] == (
        "items v2 active: 7 items, 5 SIDs, used by 1, 3.0 MiB on the device\n"
        "items v4 loaded: 7 items, 5 SIDs, used by 1, 3.0 MiB on the device\n"
    )
    assert json.loads(run("list", "--json")[1])["items"]["active_version"] == "v2"
    nobody = f"127.0.0.1:{free_port()}"
    assert main(["catalog", "list", "--target", nobody]) == 3
    assert f"cannot reach {nobody}" in capsys.readouterr().err
