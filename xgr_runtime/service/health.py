"""grpc.health.v1 for the server as a whole ("") and for the service by name."""

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

NAMES = ("", "xgr.v1.RecommendService")
MAX_NAME_LENGTH = (
    256  # of a service that somebody asks for; a watch keeps the name as long as it is open
)


class _EndingHealthServicer(health.aio.HealthServicer):  # type: ignore[misc]
    """grpc's own servicer, whose watches can be ended from this side."""

    def __init__(self) -> None:
        super().__init__()
        self._watches: set[asyncio.Task[Any]] = set()
        self._is_ending = False

    def end_watches(self) -> None:
        self._is_ending = True
        for task in self._watches:
            task.cancel()

    async def Watch(  # noqa: N802 (gRPC's name)
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> None:
        if len(request.service) > MAX_NAME_LENGTH:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the name of a service has at most {MAX_NAME_LENGTH} characters",
            )
        task = asyncio.current_task()
        assert task is not None
        self._watches.add(task)
        try:
            await super().Watch(request, context)
        except asyncio.CancelledError:
            if not self._is_ending:
                raise
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
        finally:
            self._watches.discard(task)


class ServiceHealth:
    """The health that load balancers read: NOT_SERVING until the engine is warm and again from the first stop signal on."""

    def __init__(self) -> None:
        self._servicer = _EndingHealthServicer()

    async def add_to_server(self, server: Any) -> None:
        """Register the health service with a grpc.aio server, NOT_SERVING."""
        await self._set(health_pb2.HealthCheckResponse.NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_serving(self) -> None:
        """Requests are welcome."""
        await self._set(health_pb2.HealthCheckResponse.SERVING)

    async def set_stopping(self) -> None:
        """NOT_SERVING for good; watchers are told."""
        await self._servicer.enter_graceful_shutdown()

    def end_watches(self) -> None:
        """End the watching calls, which would otherwise last until gRPC cancels them with a traceback each."""
        self._servicer.end_watches()

    async def _set(self, status: int) -> None:
        for name in NAMES:
            await self._servicer.set(name, status)
