"""Metrics as a scraper reads them, and an engine's state made by hand."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from tests.service.waiting import PATIENCE_S
from xgr_runtime.xschedule.engine_stats import CatalogStats, EngineStats
from xgr_runtime.xschedule.totals import Totals

if TYPE_CHECKING:
    from collections.abc import Mapping

# name and labels of a sample, as in the text -> value
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def make_stats(**changes: Any) -> EngineStats:
    """Every number another one."""
    values: dict[str, Any] = {
        "device_kind": "cpu",
        "device_name": "a processor",
        "model": "tiny",
        "model_version": "m1",
        "template_version": "t1",
        "totals": Totals(),
        "num_waiting": 3,
        "num_running": 2,
        "num_pages": 40,
        "num_pages_in_use": 11,
        "num_cached_pages": 17,
        "num_evicted_pages": 5,
        "num_rows": 256,
        "num_rows_in_use": 96,
        "catalogs": (CatalogStats("films", "v7", 12.5, 150, 2),),
        "providers": {"select_beams": ("numpy",), "rms_norm": ("cpu", "reference")},
        "num_reference_ops": 1,
        "num_graph_captures": 6,
        "num_graphs": 4,
        "num_eager_segments": 7,
        "graph_bytes": 3000,
        "memory_used_bytes": 1000,
        "memory_peak_bytes": 2000,
    }
    return EngineStats(**values | changes)


def parse(body: bytes) -> Samples:
    """Every sample of a text; raises where one comes twice."""
    samples: Samples = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples, key
            samples[key] = sample.value
    return samples


def value(samples: Samples, name: str, **labels: str) -> float:
    """The value of one sample; it must be there."""
    return samples[name, frozenset(labels.items())]


def by_label(samples: Samples, name: str, label: str) -> dict[str, float]:
    """The values of a metric with one label that are not 0."""
    found = {dict(labels)[label]: v for (n, labels), v in samples.items() if n == name}
    return {key: number for key, number in found.items() if number}


_holders: list[socket.socket] = []


def free_port() -> int:
    """One that nobody listens on, never the same twice: several servers may be about to start.

    A socket that does not listen stays bound to it to the end. The system then gives the port to nobody who takes any, while a
    server that names it may listen on it (both with SO_REUSEADDR); until one does, connections are refused.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _holders.append(holder)
    return int(holder.getsockname()[1])


async def get(
    port: int, target: str = "/metrics", headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Status, header fields by lower-case name, body."""
    lines = [
        f"GET {target} HTTP/1.1",
        "Host: x",
        *(f"{k}: {v}" for k, v in (headers or {}).items()),
    ]
    return split(await send(port, ("\r\n".join(lines) + "\r\n\r\n").encode()))


async def send(port: int, data: bytes) -> bytes:
    """Everything that comes back for the bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await writer.drain()
    answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()
    await writer.wait_closed()
    return answer


def split(answer: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *fields = head.decode().split("\r\n")
    protocol, code, _ = status.split(" ", 2)
    assert protocol == "HTTP/1.1"
    named = {k.lower(): v for k, v in (field.split(": ", 1) for field in fields)}
    assert int(named["content-length"]) == len(body) or not body
    return int(code), named, body
