"""grpc.reflection.v1alpha: tools such as grpcurl learn the services and messages of a server from the server itself."""

from collections.abc import Sequence
from typing import Any

from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc


def add_reflection_to_server(service_names: Sequence[str], server: Any) -> None:
    """Register reflection with a grpc.aio server; it describes the named services, health and itself."""
    names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
    servicer = reflection.aio.ReflectionServicer(names)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
