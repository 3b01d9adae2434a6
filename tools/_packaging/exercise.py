"""A client of a demo service, run with `python -W error` in the environment under trial: every library of the wire once.

arguments: host:port, the URL of the metrics. Prints the versions and what was seen. Talks to the service through the runtime's
own client, and through grpcio-health-checking, grpcio-status, grpcio-reflection and a scraper's parser as others would.
"""

import importlib.metadata
import sys
import urllib.request
from typing import Any

import grpc
import numpy as np
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from google.rpc.error_details_pb2 import BadRequest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from grpc_status import rpc_status
from prometheus_client.parser import text_string_to_metric_families

from xgr_runtime import RecRequest, Rules, Search
from xgr_runtime.service.client import RecommendClient

LIBRARIES = (
    *("protobuf", "grpcio", "grpcio-health-checking", "grpcio-reflection", "grpcio-status"),
    *("googleapis-common-protos", "prometheus-client", "pyyaml", "safetensors", "numpy", "torch"),
)
SERVICE = "xgr.v1.RecommendService"
HISTORY = [50, 172, 181]


def main(target: str, metrics: str) -> None:
    print(f"python {sys.version.split()[0]}")
    for name in LIBRARIES:
        print(f"  {name:<24} {importlib.metadata.version(name)}")
    ids = ask(target)
    with grpc.insecure_channel(target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        reply = health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=60)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        check_reflection(channel, ids)
    assert num_requests(metrics) == {"OK": 2, "INVALID_ARGUMENT": 1}
    print(f"answered, healthy, reflected, refused with details, counted; items {ids}")


def ask(target: str) -> list[int]:
    """The items of one request through the runtime's client."""
    search = Search(num_results=3, rules=Rules(exclude_history=True))
    request = RecRequest(history_item_ids=np.array(HISTORY), searches=(search,))
    with RecommendClient(target, timeout_s=60) as client:
        (result,) = client.recommend(request).results
    assert result.num_items == 3
    assert not set(HISTORY) & set(result.item_ids.tolist())
    return [int(item) for item in result.item_ids]


def check_reflection(channel: grpc.Channel, ids: list[int]) -> None:
    """Build the messages from what the server says about itself, no stubs; one call that is answered, one refused."""
    database = ProtoReflectionDescriptorDatabase(channel)
    services = set(database.get_services())
    assert {SERVICE, "grpc.health.v1.Health"} <= services, services
    method = DescriptorPool(database).FindServiceByName(SERVICE).methods_by_name["Recommend"]
    request_class, reply_class = map(GetMessageClass, (method.input_type, method.output_type))
    call = channel.unary_unary(
        f"/{SERVICE}/Recommend", request_class.SerializeToString, reply_class.FromString
    )
    request: Any = request_class(history_item_ids={"values": HISTORY})
    request.searches.add(num_results=3, rules={"exclude_history": True})
    (result,) = call(request, timeout=60).results
    assert np.frombuffer(result.item_ids, "<i8").tolist() == ids
    request.searches[0].num_results = 0
    refused = call.future(request, timeout=60)
    bad = BadRequest()
    assert refused.exception(timeout=60) is not None
    assert rpc_status.from_call(refused).details[0].Unpack(bad)
    assert [v.field for v in bad.field_violations] == ["searches[0].num_results"]


def num_requests(metrics: str) -> dict[str, float]:
    """Calls by status that are not 0, as a scraper reads them."""
    with urllib.request.urlopen(metrics, timeout=60) as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    named = [sample for sample in samples if sample.name == "xgr_requests_total"]
    return {sample.labels["code"]: sample.value for sample in named if sample.value}


if __name__ == "__main__":
    main(*sys.argv[1:])
