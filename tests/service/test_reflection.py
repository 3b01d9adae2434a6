"""Reflection as grpcurl uses it: services by name, files by symbol, on streams that a stop ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from tests.service.servers import running, running_in_thread
from tests.service.stand_in import StandInEngine
from tests.service.waiting import PATIENCE_S
from xgr_runtime.config import RuntimeConfig, ServiceConfig
from xgr_runtime.service._pb.xgr.v1 import recommend_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVICES = {
    "xgr.v1.RecommendService",
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
}


@pytest.fixture(scope="module")
def pool() -> Iterator[tuple[ProtoReflectionDescriptorDatabase, DescriptorPool]]:
    """What a client that knows no proto learns from the server."""
    with running_in_thread(StandInEngine()) as target, grpc.insecure_channel(target) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        yield database, DescriptorPool(database)


def test_every_service_is_listed(pool: Any) -> None:
    database, _ = pool
    assert set(database.get_services()) == SERVICES


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_service_is_described(pool: Any, name: str) -> None:
    _, descriptors = pool
    service = descriptors.FindServiceByName(name)
    assert {method.name for method in service.methods} >= {
        "xgr.v1.RecommendService": {"Recommend"},
        "grpc.health.v1.Health": {"Check", "Watch"},
        "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo"},
    }[name]


def test_messages_are_those_of_the_proto(pool: Any) -> None:
    """Descriptors from the wire equal the generated ones, so a message made from them is understood."""
    _, descriptors = pool
    service = descriptors.FindServiceByName("xgr.v1.RecommendService")
    for got, known in (
        (service.methods_by_name["Recommend"].input_type, recommend_pb2.RecommendRequest),
        (service.methods_by_name["Recommend"].output_type, recommend_pb2.RecommendResponse),
    ):
        expected, found = descriptor_pb2.DescriptorProto(), descriptor_pb2.DescriptorProto()
        known.DESCRIPTOR.CopyToProto(expected)
        got.CopyToProto(found)
        assert found == expected


def test_what_is_unknown_is_not_found(pool: Any) -> None:
    _, descriptors = pool
    with pytest.raises(KeyError):
        descriptors.FindServiceByName("xgr.v1.NoSuchService")
    with pytest.raises(KeyError):
        descriptors.FindMessageTypeByName("x" * 5000)


def test_hostile_questions_get_answers(pool: Any) -> None:
    database, _ = pool
    questions = [
        reflection_pb2.ServerReflectionRequest(),
        reflection_pb2.ServerReflectionRequest(host="h" * 10_000, list_services="x" * 10_000),
        reflection_pb2.ServerReflectionRequest(file_by_filename="../../etc/passwd"),
        reflection_pb2.ServerReflectionRequest(all_extension_numbers_of_type="\x00"),
    ]
    for question in questions:
        (answer,) = database._stub.ServerReflectionInfo(iter([question]))
        is_list = bool(question.list_services)
        assert answer.WhichOneof("message_response") == (
            "list_services_response" if is_list else "error_response"
        )


def test_an_open_stream_does_not_hold_a_stop(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with (
            running(StandInEngine()) as (server, target),
            grpc.aio.insecure_channel(target) as channel,
        ):
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            stream = stub.ServerReflectionInfo()
            question = reflection_pb2.ServerReflectionRequest(list_services="")
            await stream.write(question)
            assert (await stream.read()).list_services_response.service
            # Far shorter than drain_s, and than what gRPC would give the stream.
            assert await asyncio.wait_for(server.stop(asyncio.Event()), PATIENCE_S / 2) == 0
            assert await stream.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(main())
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_it_can_be_turned_off() -> None:
    config = RuntimeConfig(service=ServiceConfig(port=0, reflection=False))

    async def main() -> None:
        async with (
            running(StandInEngine(), config) as (_, target),
            grpc.aio.insecure_channel(target) as channel,
        ):
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            stream = stub.ServerReflectionInfo()
            await stream.done_writing()
            assert await stream.code() is grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(main())
