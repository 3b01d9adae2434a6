"""grpc.health.v1 for the server as a whole ("") and for the service by name."""

from typing import Any

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

NAMES = ("", "xgr.v1.RecommendService")


class ServiceHealth:
    """The health that load balancers read: NOT_SERVING until the engine is warm and again from the first stop signal on."""

    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()

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
        for name in NAMES:
            await self._servicer.set(name, status)
