"""The engine of the tests of versions: v1 active and two slots in all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.helpers.versions import start_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.helpers.versions import Versions
    from xgr_runtime import Engine


@pytest.fixture
def engine(versions_model: Path, versions: Versions) -> Iterator[Engine]:
    with start_engine(versions_model, versions) as engine:
        yield engine
