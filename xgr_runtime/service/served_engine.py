"""The part of the Engine that the service uses, so that its own behaviour can be tested around another one."""

from typing import Any, Protocol

from xgr_runtime.types import RecRequest, RecResult
from xgr_runtime.xschedule.engine_stats import EngineStats


class ServedEngine(Protocol):
    """`submit` and `wait_stopped` run in the server's loop; the others may be called from any thread.

    Cancelling the task that awaits `submit` withdraws the request. `wait_stopped` returns when no request will be answered any more.
    """

    async def submit(self, request: RecRequest) -> RecResult: ...

    async def wait_stopped(self) -> None: ...

    def stats(self) -> EngineStats: ...

    def describe(self) -> dict[str, Any]: ...

    def load_catalog(self, name: str, path: str) -> str: ...

    def activate_catalog(self, name: str, version: str) -> str: ...

    def retire_catalog(self, name: str, version: str) -> None: ...
