"""What small or short-lived callers cost the server: memory, time and lines of its log stay bounded by what they send."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.service.hostile.test_connections import METHOD, request, standing
from tests.service.process import serving
from tests.service.waiting import PATIENCE_S, until
from xgr_runtime.config import RuntimeConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1024 * 1024
# What a message may cost over a plain one of its size: up to 15 times as much was seen. Work that grows with the square of a
# message, of millions of parts, costs thousands of times as much.
MAX_COST = 100
OPTIONS = [("grpc.max_send_message_length", -1)]


def memory_mib(pid: int, name: str) -> int:
    """VmRSS (now) or VmHWM (most so far) of a process."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) // 1024


def cpu_s(pid: int) -> float:
    """Time that processors spent on a process: whatever else the machine does, it does not count."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def server() -> Iterator[tuple[int, str]]:
    """The process id and address of a server around the stand-in engine."""
    with serving(["-m", "tests.service.serve_stand_in", "1"]) as (process, target):
        yield process.pid, target


async def status(channel: Any, data: bytes, **options: Any) -> grpc.StatusCode:
    call = channel.unary_unary(METHOD)(data, timeout=5 * PATIENCE_S, **options)
    code: grpc.StatusCode = await call.code()
    return code


def nested(number: int, content: bytes) -> bytes:
    """A length-delimited field of 4 MiB or so."""
    size = len(content)
    length = bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14 & 127 | 128, size >> 21])
    return bytes([number << 3 | 2]) + length + content


# One field of one string, which is too long: nothing swells.
PLAIN = nested(6, nested(1, b"c" * (4 * MIB - 32)))
SWOLLEN = {
    "empty searches": b"\x32\x00" * (2 * MIB - 8),
    "empty tag groups": nested(6, nested(3, b"\x0a\x00" * (2 * MIB - 16))),
    "empty keys": nested(6, nested(3, b"\x22\x00" * (2 * MIB - 16))),
    "small numbers": nested(2, nested(1, b"\x01" * (4 * MIB - 16))),
    "small codes": nested(4, nested(2, b"\x01" * (4 * MIB - 16))),
}


def test_messages_that_swell_when_parsed(server: tuple[int, str]) -> None:
    """Each is 4 MiB of bytes and up to 200 MiB parsed; twelve at once must not take twelve times that, nor one for ever."""
    pid, target = server

    async def cost_s(channel: Any, data: bytes, count: int) -> float:
        """Of one of so many at once."""
        start_s = cpu_s(pid)
        codes = await asyncio.gather(*(status(channel, data) for _ in range(count)))
        assert set(codes) == {grpc.StatusCode.INVALID_ARGUMENT}
        return (cpu_s(pid) - start_s) / count

    async def main() -> None:
        async with grpc.aio.insecure_channel(target, options=OPTIONS) as channel:
            assert await status(channel, request()) is grpc.StatusCode.OK
            before = memory_mib(pid, "VmRSS")
            plain_s = await cost_s(channel, PLAIN, 12)
            for name, data in SWOLLEN.items():
                assert 4 * MIB - 64 < len(data) <= 4 * MIB, name
                seconds = await cost_s(channel, data, 4)
                assert seconds < MAX_COST * plain_s, (name, seconds, plain_s)
            await cost_s(channel, SWOLLEN["empty searches"], 12)
            assert memory_mib(pid, "VmHWM") - before < 450
            assert await status(channel, request()) is grpc.StatusCode.OK

    asyncio.run(main())


def test_compressed_messages_are_never_unpacked(server: tuple[int, str]) -> None:
    """128 MiB of zeros in 128 KiB."""
    pid, target = server

    async def main() -> None:
        async with grpc.aio.insecure_channel(target, options=OPTIONS) as channel:
            assert await status(channel, request()) is grpc.StatusCode.OK
            before = memory_mib(pid, "VmHWM")
            bomb = b"\x7a" + b"\x80\x80\x80\x40" + bytes(128 * MIB)
            for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
                code = await status(channel, bomb, compression=compression)
                assert code is grpc.StatusCode.UNIMPLEMENTED
            assert memory_mib(pid, "VmHWM") - before < 50
            assert await status(channel, request()) is grpc.StatusCode.OK

    asyncio.run(main())


def test_watches_of_made_up_services_leave_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with standing(RuntimeConfig()) as stand:
            servicer: Any = stand.server._health._servicer
            calls = stand.server._others._calls
            before = len(calls)
            async with grpc.aio.insecure_channel(stand.target) as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                watches = [
                    stub.Watch(health_pb2.HealthCheckRequest(service=f"made.up.{i}"))
                    for i in range(200)
                ]
                for watch in watches:
                    unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                    assert (await watch.read()).status == unknown
                assert len(calls) == before + 200
                endless = stub.Watch(health_pb2.HealthCheckRequest(service="x" * 257))
                assert await endless.code() is grpc.StatusCode.INVALID_ARGUMENT
                for watch in watches:
                    watch.cancel()
                await until(lambda: len(calls) == before)
            assert len(servicer._server_watchers) <= 1

    asyncio.run(main())
    assert not [record for record in caplog.records if record.exc_info]


def test_a_log_line_is_no_longer_than_it_must_be(caplog: pytest.LogCaptureFixture) -> None:
    """Calls whose text is long and full of line breaks, colours and directions: one printable line each."""
    caplog.set_level("INFO", "xgr_runtime")
    texts = ("\n2026-01-01 INFO forged: OK", "\x1b[2J", "\u202eKO", "\u2028", "x" * 250, "\x9b1m")

    async def main() -> None:
        async with (
            standing(RuntimeConfig()) as stand,
            grpc.aio.insecure_channel(stand.target) as channel,
        ):
            for text in texts:
                await status(channel, request(request_id=text))
                await status(channel, request(text[:250], request_id="r"))
                await status(channel, request("raise:NotFound", request_id="r"))

    asyncio.run(main())
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("xgr")]
    assert len(lines) >= 3 * len(texts)
    assert all(line.isprintable() and len(line) < 1500 for line in lines)
