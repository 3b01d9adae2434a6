"""A tiny model, catalogue versions to load into its engine, and that engine with v1 active and two slots in all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.helpers.tiny_models import TinyShape, write_tiny_model
from tests.xschedule.catalogs.versions import VOCAB, Versions, start_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from xgr_runtime import Engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", TinyShape(vocab_size=VOCAB))


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    return Versions(tmp_path)


@pytest.fixture
def engine(folder: Path, versions: Versions) -> Iterator[Engine]:
    with start_engine(folder, versions) as engine:
        yield engine
