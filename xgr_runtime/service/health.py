"""grpc.health.v1 for the server as a whole ("") and for its services by name."""

from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from xgr_runtime.service.rpc_errors import ServicerContext


class _HealthServicer(health.aio.HealthServicer):  # type: ignore[misc]
    """grpc's own servicer, which keeps a name that is watched for as long as the watch is open: not one of any length."""

    def __init__(self, max_name_length: int) -> None:
        super().__init__()
        self._max_name_length = max_name_length

    async def Watch(  # noqa: N802 (gRPC's name)
        self, request: health_pb2.HealthCheckRequest, context: ServicerContext
    ) -> None:
        if len(request.service) > self._max_name_length:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"the name of a service has at most limits.max_name_length = {self._max_name_length} characters",
            )
        await super().Watch(request, context)


class ServiceHealth:
    """The health that load balancers read: NOT_SERVING until the engine is warm and again from the first stop signal on."""

    def __init__(self, service_names: Sequence[str], max_name_length: int) -> None:
        self._names = ("", *service_names)
        self._servicer = _HealthServicer(max_name_length)

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

    async def _set(self, status: int) -> None:
        for name in self._names:
            await self._servicer.set(name, status)
