"""Servers for tests: in the test's own loop, or in a loop of their own thread for synchronous clients."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.service.waiting import PATIENCE_S
from xgr_runtime.config import RuntimeConfig
from xgr_runtime.errors import InvalidRequest
from xgr_runtime.service.server import RecommendServer
from xgr_runtime.types import RecRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from xgr_runtime.service.client import AsyncRecommendClient
    from xgr_runtime.service.served_engine import ServedEngine


# Longer than any test waits: one whose server uses it up fails.
DRAIN_S = 600.0


def with_free_port(config: RuntimeConfig | None = None, drain_s: float = DRAIN_S) -> RuntimeConfig:
    """The configuration, listening on a free port of the loopback address."""
    config = config or RuntimeConfig()
    service = dataclasses.replace(config.service, host="127.0.0.1", port=0, drain_s=drain_s)
    return dataclasses.replace(config, service=service)


@asynccontextmanager
async def running(
    engine: ServedEngine, config: RuntimeConfig | None = None, drain_s: float = DRAIN_S
) -> AsyncIterator[tuple[RecommendServer, str]]:
    """A server in this loop and its address; stopped at once at the end."""
    server = RecommendServer(engine, with_free_port(config, drain_s))
    target = f"127.0.0.1:{await server.start()}"
    stop_now = asyncio.Event()
    stop_now.set()
    try:
        yield server, target
    finally:
        await server.stop(stop_now)


@contextmanager
def running_in_thread(engine: ServedEngine, config: RuntimeConfig | None = None) -> Iterator[str]:
    """The address of a server in a thread of its own."""
    started, targets = threading.Event(), []
    stops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def main() -> None:
        async with running(engine, config) as (_, target):
            stop = asyncio.Event()
            stops.append((asyncio.get_running_loop(), stop))
            targets.append(target)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert started.wait(PATIENCE_S)
    try:
        yield targets[0]
    finally:
        loop, stop = stops[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join()


async def is_taken_in(client: AsyncRecommendClient) -> None:
    """Return when the server has taken in all calls sent before on this connection: it refuses the next in its turn."""
    with pytest.raises(InvalidRequest):
        await client.recommend(RecRequest(prompt_token_ids=np.array([-1])))
