"""Catalogues are swapped while requests run: no answer mixes versions, no bad file changes anything."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.swaps import Clients, Operator, swap
from tests.helpers.versions import start_engine
from tests.service.servers import running_in_thread
from xgr_runtime.config import ServiceConfig
from xgr_runtime.service.catalog_admin_client import CatalogAdminClient
from xgr_runtime.service.client import RecommendClient

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.helpers.versions import Versions
    from xgr_runtime import Engine

pytestmark = pytest.mark.e2e
LONG = 100


@pytest.fixture
def engine(versions_model: Path, versions: Versions) -> Iterator[Engine]:
    with start_engine(versions_model, versions, num_slots=3) as engine:
        yield engine


def state_of(engine: Engine) -> Any:
    """Which versions are loaded and active, and in which slots; not how many requests use them just now."""
    catalogs = engine.describe()["catalogs"]
    named = {
        name: (catalog["active"], list(catalog["versions"])) for name, catalog in catalogs.items()
    }
    return named, set(engine.catalogs.by_slot)


def swap_in_process(engine: Engine, versions: Versions, folder: Path, num_swaps: int) -> Clients:
    operator = Operator(
        load=lambda path: engine.load_catalog("main", str(path)),
        activate=lambda version: engine.activate_catalog("main", version),
        retire=lambda version: engine.retire_catalog("main", version),
        state=lambda: state_of(engine),
    )
    with Clients(lambda request: engine.recommend([request])[0], versions) as clients:
        swap(operator, clients, folder, num_swaps)
    return clients


def swap_over_grpc(engine: Engine, versions: Versions, folder: Path, num_swaps: int) -> Clients:
    service = ServiceConfig(allow_catalog_admin=True, catalog_folder=str(folder))
    config = replace(engine.config, service=service)
    with (
        running_in_thread(engine, config) as target,
        CatalogAdminClient(target, timeout_s=60) as admin,
        RecommendClient(target, timeout_s=60) as client,
    ):

        def state() -> Any:
            return [
                (name, facts["active_version"], list(facts["versions"]))
                for name, facts in admin.catalogs().items()
            ]

        operator = Operator(
            load=lambda path: admin.load("main", path.name),
            activate=lambda version: admin.activate("main", version),
            retire=lambda version: admin.retire("main", version),
            state=state,
        )
        with Clients(client.recommend, versions) as clients:
            swap(operator, clients, folder, num_swaps)
    return clients


SWAPS = {"engine": swap_in_process, "gRPC": swap_over_grpc}


@pytest.mark.parametrize("where", SWAPS)
def test_swaps_under_load(engine: Engine, versions: Versions, tmp_path: Path, where: str) -> None:
    clients = SWAPS[where](engine, versions, tmp_path, 9)
    assert not clients.faults
    assert set(clients.answers) == set(range(1, 11))


@pytest.mark.slow
@pytest.mark.parametrize("where", SWAPS)
def test_a_hundred_swaps_under_load(
    engine: Engine, versions: Versions, tmp_path: Path, where: str
) -> None:
    clients = SWAPS[where](engine, versions, tmp_path, LONG)
    assert not clients.faults
    assert set(clients.answers) == set(range(1, LONG + 2))
    print(f"{sum(clients.answers.values())} answers, {LONG} swaps, {LONG} bad files")  # noqa: T201
