"""grpc.reflection.v1alpha: tools such as grpcurl learn the services and messages of a server from the server itself."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc


class _EndingReflectionServicer(reflection.aio.ReflectionServicer):  # type: ignore[misc]
    """grpc's own servicer, whose streams can be ended from this side: a client may leave one open for ever."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._streams: set[asyncio.Task[Any]] = set()
        self._is_ending = False

    def end_streams(self) -> None:
        self._is_ending = True
        for task in self._streams:
            task.cancel()

    async def ServerReflectionInfo(  # noqa: N802 (gRPC's name)
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[Any]:
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            async for response in super().ServerReflectionInfo(request_iterator, context):
                yield response
        except asyncio.CancelledError:
            if not self._is_ending:
                raise
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
        finally:
            self._streams.discard(task)


class ServiceReflection:
    """Describes the named services, health and itself."""

    def __init__(self, service_names: Sequence[str]) -> None:
        self.names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        self._servicer = _EndingReflectionServicer(self.names)

    def add_to_server(self, server: Any) -> None:
        """Register the reflection service with a grpc.aio server."""
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(self._servicer, server)

    def end_streams(self) -> None:
        """End the open streams, which would otherwise last until gRPC cancels them with a traceback each."""
        self._servicer.end_streams()
