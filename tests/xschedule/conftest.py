"""A tiny engine for the tests of this folder; tests of catalogue versions bring their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.helpers.catalogs import random_catalog, scattered_tokens
from tests.helpers.engines import (
    Oracle,
    make_config,
    make_engine,
    write_catalog,
)
from tests.helpers.tiny_models import TinyShape, write_tiny_model
from xgr_runtime.config import LimitsConfig, SchedulerConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xgr_runtime import Engine, RuntimeConfig

from tests.helpers.waiting import wait_until_idle
from tests.xschedule.running import QUEUE, VOCAB, Gate


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("model")
    catalog = random_catalog(4, 200, scattered_tokens([6, 7, 8], VOCAB, seed=1))
    return Oracle(write_tiny_model(folder, "qwen3", TinyShape(vocab_size=VOCAB)), catalog)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, oracle: Oracle) -> RuntimeConfig:
    file = write_catalog(tmp_path_factory.mktemp("catalog") / "items.xgr", oracle.catalog)
    return make_config(
        oracle.folder,
        {"main": file},
        limits=LimitsConfig(max_prompt_tokens=64, max_beam_width=64),
        scheduler=SchedulerConfig(
            max_queue=QUEUE,
            max_batch_histories=2,
            max_batch_tokens=128,
            max_batch_rows=128,
            max_wait_ms=0.0,
        ),
    )


@pytest.fixture
def engine(config: RuntimeConfig) -> Iterator[Engine]:
    with make_engine(config) as engine:
        wait_until_idle(engine)  # the start's own request is answered before it leaves
        yield engine


@pytest.fixture
def gate(engine: Engine) -> Iterator[Gate]:
    gate = Gate(engine)
    yield gate
    gate.open()
