"""Administration of catalogues over gRPC: what it may touch, what it answers, and the commands on top of it."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.service.running import running_in_thread
from tests.service.stand_in import StandInEngine
from xgr_runtime.cli import main
from xgr_runtime.config import RuntimeConfig, ServiceConfig, load_config
from xgr_runtime.errors import (
    CatalogError,
    CheckpointError,
    ConfigError,
    DeviceError,
    InvalidRequest,
    NotFound,
)
from xgr_runtime.service.catalog_admin_client import CatalogAdminClient
from xgr_runtime.service.rpc_errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        self.active = "v1"
        self.loaded_paths: list[str] = []
        self.may_load = threading.Event()
        self.may_load.set()

    def load_catalog(self, name: str, path: str) -> str:
        assert name == "items"
        self.loaded_paths.append(path)
        assert self.may_load.wait(30)
        version = Path(path).stem
        if version in ERRORS:
            raise ERRORS[version]
        self.versions.append(version)
        return version

    def activate_catalog(self, name: str, version: str) -> None:
        if name != "items" or version not in self.versions:
            raise NotFound(f"version {version!r} is not loaded")
        self.active = version

    def retire_catalog(self, name: str, version: str) -> None:
        if version == self.active:
            raise CatalogError(f"version {version!r} is active and cannot be retired")
        self.versions.remove(version)

    def describe(self) -> dict[str, Any]:
        facts = {"num_items": 7, "num_sids": 5, "num_pins": 1, "device_bytes": 3 << 20}
        versions = dict.fromkeys(self.versions, facts)
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
    with CatalogAdminClient(target, timeout_s=10) as client:
        yield client


def test_load_activate_roll_back_retire(
    client: CatalogAdminClient, engine: Catalogs, folder: Path
) -> None:
    assert client.load("items", "v2.xgrc") == "v2"
    assert engine.active == "v1"
    assert client.activate("items", "v2") == "v1"
    assert client.load("items", "old/v3.xgrc", activate=True) == "v3"
    assert engine.active == "v3"
    assert engine.loaded_paths == [str(folder / "v2.xgrc"), str(folder / "old" / "v3.xgrc")]
    assert client.activate("items", "v2") == "v3"
    client.retire("items", "v3")
    facts = {"num_items": 7, "num_sids": 5, "num_in_use": 1, "device_bytes": 3 << 20}
    assert client.catalogs() == {
        "items": {"active_version": "v2", "versions": {"v1": facts, "v2": facts}}
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
    assert client.load("items", "inner/v4.xgrc") == "v4"
    assert client.load("items", "./old/../v5.xgrc") == "v5"


def test_names_and_versions_are_checked(client: CatalogAdminClient, engine: Catalogs) -> None:
    with pytest.raises(NotFound, match="catalogue 'other' is not configured; configured: items"):
        client.load("other", "v2.xgrc")
    with pytest.raises(InvalidRequest) as caught:
        client.activate("", "v" * 300)
    assert [field for field, _ in caught.value.violations] == ["name", "version"]
    with pytest.raises(InvalidRequest, match="version: 1 to 256 characters expected, got 0"):
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
        ("defect", ServiceError, "INTERNAL: internal error; the server's log has it under"),
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
                call(b"\xff\xff\xff", timeout=10)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert f"is not an xgr.v1.{method}Request message" in caught.value.details()


def test_it_is_off_unless_the_configuration_allows_it(
    engine: Catalogs, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_in_thread(engine) as target, CatalogAdminClient(target, timeout_s=10) as client:
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


def test_requests_and_lists_do_not_wait_for_a_load(
    client: CatalogAdminClient, engine: Catalogs
) -> None:
    engine.may_load.clear()
    done: list[str] = []
    thread = threading.Thread(target=lambda: done.append(client.load("items", "v2.xgrc")))
    thread.start()
    try:
        while not engine.loaded_paths:
            time.sleep(0.001)
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
        with CatalogAdminClient(target, timeout_s=20) as client:
            try:
                client.load("items", "v2.xgrc")
            except Exception as error:  # noqa: BLE001 - looked at below
                faults.append(error)

    with running_in_thread(engine, config) as target:
        thread = threading.Thread(target=load, args=(target,))
        thread.start()
        while not engine.loaded_paths:
            time.sleep(0.001)
    thread.join()
    engine.may_load.set()
    assert len(faults) == 1
    assert "shutting down" in str(faults[0])


def test_the_commands(target: str, engine: Catalogs, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> tuple[int, str, str]:
        code = main(["catalog", *words, "--target", target])
        written = capsys.readouterr()
        return code, written.out, written.err

    assert run("load", "items", "v2.xgrc") == (0, "items: version v2 is loaded\n", "")
    assert run("load", "items", "v3.xgrc", "--activate")[1] == "items: version v3 is active\n"
    assert run("activate", "items", "v2")[1] == "items: version v2 is active; before: v3\n"
    assert run("retire", "items", "v3")[1] == "items: version v3 is retired\n"
    assert run("retire", "items", "v2") == (
        1,
        "",
        "xgr catalog: version 'v2' is active and cannot be retired\n",
    )
    assert run("list")[1] == (
        "items v1 loaded: 7 items, 5 SIDs, used by 1, 3.0 MiB on the device\n"
        "items v2 active: 7 items, 5 SIDs, used by 1, 3.0 MiB on the device\n"
    )
    assert json.loads(run("list", "--json")[1])["items"]["active_version"] == "v2"
    assert main(["catalog", "list", "--target", "127.0.0.1:9"]) == 3
    assert "cannot reach 127.0.0.1:9" in capsys.readouterr().err
