"""Every limit of the configuration: a request at the limit passes, one above it is refused by the limit's name.

Over the wire and in process, where a request may never have met the wire's own checks.
"""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.service.hostile.test_connections import METHOD
from tests.service.servers import running
from tests.service.stand_in import StandInEngine
from tests.service.waiting import PATIENCE_S, until, wait_until_idle
from tests.service.world import World, make_world
from tests.xschedule.running import Gate
from xgr_runtime import Engine, RuntimeConfig
from xgr_runtime.config import LimitsConfig
from xgr_runtime.config_check import RANGES
from xgr_runtime.errors import InvalidRequest
from xgr_runtime.service._pb.xgr.v1 import recommend_pb2 as pb
from xgr_runtime.service.server import NAMED_EXCESS_BYTES
from xgr_runtime.service.translate import request_from_proto
from xgr_runtime.service.wire_arrays import Violations
from xgr_runtime.xschedule.request_check import check_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.e2e
LIMITS = {
    "max_beam_width": 32,
    "max_num_results": 40,
    "max_history_items": 8,
    "max_input_items": 30,
    "max_prompt_tokens": 48,
    "max_exclusions": 20,
    "max_key_length": 40,
    "max_tags": 6,
    "max_tag_length": 30,
    "max_searches": 1,
    "max_name_length": 50,
    "max_request_id_length": 40,
    "max_message_bytes": 4096,
    "max_waiting_bytes": 8192,
}
OTHERS = ("search.num_results=10", "search.beam_width=8", "scheduler.max_batch_histories=16")
# Kept by gRPC, which names nothing; their tests are among those of connections.
OF_GRPC = {"max_concurrent_streams", "max_connections", "max_metadata_bytes"}
# Of all requests together, with tests of their own below.
OF_ALL = {"max_waiting_bytes"}
LARGEST = LimitsConfig(
    **{name: int(RANGES[f"limits.{name}"][1]) for name in LIMITS if name != "max_waiting_bytes"}
)


def plain(**fields: Any) -> pb.RecommendRequest:
    """A good request of an empty history."""
    message = pb.RecommendRequest(searches=[pb.Search(**fields)])
    message.history_item_ids.SetInParent()
    return message


def with_rules(**fields: Any) -> pb.RecommendRequest:
    return plain(rules=pb.Rules(**fields))


def with_input(name: str, value: Any, **fields: Any) -> pb.RecommendRequest:
    return pb.RecommendRequest(searches=[pb.Search()], **{name: value}, **fields)


def of_searches(count: int) -> pb.RecommendRequest:
    message = pb.RecommendRequest(searches=[pb.Search()] * count)
    message.history_item_ids.SetInParent()
    return message


def of_bytes(message: pb.RecommendRequest, size: int) -> bytes:
    """The message, filled up to exactly that many bytes by a field that nobody knows."""
    data = message.SerializeToString()
    room = size - len(data) - 4
    assert 128 <= room < 2**14
    return data + b"\x82\x01" + bytes([room & 127 | 128, room >> 7]) + bytes(room)


@dataclass(frozen=True)
class Row:
    """make(n) asks for n of what the limit counts. code: of a request at the limit. on_wire_only: no engine sees it."""

    limit: str
    make: Callable[[int], pb.RecommendRequest]
    code: str = "OK"
    on_wire_only: bool = False


IDS = pb.Int64Values
ROWS = (
    Row("max_beam_width", lambda n: plain(beam_width=n)),
    Row("max_beam_width", lambda n: plain(beam_widths=[1, n, 1])),
    Row("max_num_results", lambda n: plain(num_results=n)),
    Row("max_input_items", lambda n: with_input("history_item_ids", IDS(values=[5] * n))),
    Row("max_input_items", lambda n: with_input("history_item_ids", IDS(values_le=bytes(8 * n)))),
    Row("max_input_items", lambda n: with_input("history_keys", pb.StringValues(values=["k"] * n))),
    Row(
        "max_input_items",
        lambda n: with_input("history_sids", pb.SidValues(num_levels=3, values=[0] * 3 * n)),
    ),
    Row(
        "max_input_items",
        lambda n: with_input("history_sids", pb.SidValues(num_levels=3, values_le=bytes(12 * n))),
    ),
    Row(
        "max_history_items",
        lambda n: with_input(
            "history_sids",
            pb.SidValues(num_levels=3, values=[0] * 3 * n),
            on_overflow=pb.ON_OVERFLOW_ERROR,
        ),
        on_wire_only=True,
    ),
    Row("max_prompt_tokens", lambda n: with_input("prompt_token_ids", IDS(values=[1] * n))),
    Row("max_prompt_tokens", lambda n: with_input("prompt_token_ids", IDS(values_le=bytes(8 * n)))),
    Row("max_exclusions", lambda n: with_rules(exclude_item_ids=IDS(values=range(n)))),
    Row("max_exclusions", lambda n: with_rules(exclude_keys=["k"] * n)),
    Row(
        "max_exclusions",
        lambda n: with_rules(exclude_keys=["k"] * 5, exclude_item_ids=IDS(values=range(n - 5))),
    ),
    Row("max_key_length", lambda n: with_rules(exclude_keys=["k", "k" * n])),
    Row("max_key_length", lambda n: with_input("history_keys", pb.StringValues(values=["ü" * n]))),
    Row("max_tags", lambda n: with_rules(exclude_tags=["t"] * n)),
    Row("max_tags", lambda n: with_rules(require=[pb.TagGroup(any_of=["t"] * n)])),
    Row("max_tags", lambda n: with_rules(require=[pb.TagGroup(any_of=["t"])] * n)),
    Row("max_tag_length", lambda n: with_rules(exclude_tags=["ü" * n])),
    Row("max_tag_length", lambda n: with_rules(require=[pb.TagGroup(any_of=["t", "t" * n])])),
    Row("max_searches", of_searches),
    Row("max_name_length", lambda n: plain(catalog="c" * n), code="NOT_FOUND"),
    Row("max_name_length", lambda n: plain(catalog_version="v" * n), code="NOT_FOUND"),
    Row(
        "max_request_id_length",
        lambda n: pb.RecommendRequest(
            request_id="r" * n, searches=[pb.Search()], history_item_ids=IDS()
        ),
    ),
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def engine(world: World) -> Iterator[Engine]:
    overrides = [*OTHERS, *(f"limits.{name}={value}" for name, value in LIMITS.items())]
    with Engine.from_config(RuntimeConfig.from_yaml(world.config, overrides)) as started:
        yield started


async def send(channel: Any, data: bytes) -> tuple[str, str, dict[str, Any]]:
    """(status, message, trailing metadata)."""
    call = channel.unary_unary(METHOD)(data, timeout=PATIENCE_S)
    code = (await call.code()).name
    return code, await call.details() or "", dict(tuple(await call.trailing_metadata() or ()))


def test_the_table_has_every_limit() -> None:
    known = {field.name for field in dataclasses.fields(LimitsConfig)}
    assert {row.limit for row in ROWS} | OF_GRPC | OF_ALL | {"max_message_bytes"} == known
    assert set(LIMITS) | OF_GRPC == known
    assert {f"limits.{name}" for name in known} <= set(RANGES)


def test_at_the_limit_and_one_above(engine: Engine) -> None:
    async def main() -> None:
        async with (
            running(engine, engine.config) as (_, target),
            grpc.aio.insecure_channel(target) as channel,
        ):
            for number, row in enumerate(ROWS):
                value = LIMITS[row.limit]
                code, text, _ = await send(channel, row.make(value).SerializeToString())
                assert code == row.code, (number, row, text)
                code, text, _ = await send(channel, row.make(value + 1).SerializeToString())
                assert code == "INVALID_ARGUMENT", (number, row, text)
                assert f"limits.{row.limit}" in text, (number, row, text)
                assert str(value) in text, (number, row, text)

    asyncio.run(main())


def test_in_process_too(engine: Engine) -> None:
    config = engine.config
    for number, row in enumerate(ROWS):
        if row.on_wire_only:
            continue
        for excess in (0, 1):
            message = row.make(LIMITS[row.limit] + excess)
            # max_searches has one possible value: the wire's check would not let two through.
            extra = message.searches[1:]
            del message.searches[1:]
            request = request_from_proto(message, LARGEST, message.request_id, None, Violations())
            request = dataclasses.replace(request, searches=request.searches * (1 + len(extra)))
            found = check_request(request, config)
            assert bool(found) == bool(excess), (number, row, found)
            assert not found or f"limits.{row.limit}" in found[0][1], (number, row, found)


def test_a_history_beyond_its_limit_in_process(engine: Engine) -> None:
    (row,) = (row for row in ROWS if row.limit == "max_history_items")
    most = LIMITS[row.limit]
    at, above = (
        request_from_proto(row.make(n), LARGEST, "r", None, Violations()) for n in (most, most + 1)
    )
    assert engine.recommend([at])[0].num_history_used == most
    with pytest.raises(InvalidRequest, match=r"limits\.max_history_items"):
        engine.recommend([above])


def test_bytes_of_a_message(engine: Engine) -> None:
    most = LIMITS["max_message_bytes"]

    async def main() -> None:
        stand_in = StandInEngine()
        async with (
            running(stand_in, engine.config) as (_, target),
            grpc.aio.insecure_channel(target) as channel,
        ):
            code, text, _ = await send(channel, of_bytes(plain(), most))
            assert code == "OK", text
            code, text, trailing = await send(channel, of_bytes(plain(), most + 1))
            assert code == "RESOURCE_EXHAUSTED"
            assert text == (
                f"the request has {most + 1} bytes, more than limits.max_message_bytes = {most}"
            )
            assert trailing["x-xgr-reason"] == "REQUEST_TOO_LARGE"
            for excess in (NAMED_EXCESS_BYTES, NAMED_EXCESS_BYTES + 1):
                code, text, _ = await send(channel, bytes(most + excess))
                assert code == "RESOURCE_EXHAUSTED"
                is_named = excess == NAMED_EXCESS_BYTES
                assert ("limits.max_message_bytes" in text) == is_named, text
            assert len(stand_in.requests) == 1

    asyncio.run(main())


def test_bytes_of_all_messages_that_wait(engine: Engine) -> None:
    half = LIMITS["max_waiting_bytes"] // 2

    async def main() -> None:
        stand_in = StandInEngine()
        async with (
            running(stand_in, engine.config) as (_, target),
            grpc.aio.insecure_channel(target) as channel,
        ):
            sent = of_bytes(plain(catalog="held"), half)
            calls = [asyncio.ensure_future(send(channel, sent)) for _ in range(2)]
            await until(lambda: len(stand_in.requests) == 2)
            small = plain().SerializeToString()
            code, text, _ = await send(channel, small)
            assert code == "RESOURCE_EXHAUSTED"
            assert f"limits.max_waiting_bytes = {2 * half}; send it again later" in text
            assert f"hold {2 * half} bytes" in text
            stand_in.let_go()
            assert [code for code, _, _ in await asyncio.gather(*calls)] == ["OK", "OK"]
            assert (await send(channel, small))[0] == "OK"

    asyncio.run(main())


def test_requests_in_the_queue(world: World) -> None:
    """No batch runs; three requests fill the queue, and the fourth is refused by name."""
    overrides = ["scheduler.max_queue=3", "search.beam_width=8"]
    config = RuntimeConfig.from_yaml(world.config, overrides)

    async def main(engine: Engine) -> None:
        gate = Gate(engine)
        async with (
            running(engine, config) as (_, target),
            grpc.aio.insecure_channel(target) as channel,
        ):
            data = plain().SerializeToString()
            calls = [asyncio.ensure_future(send(channel, data)) for _ in range(3)]
            await until(lambda: engine.describe()["num_unanswered"] == 3)
            code, text, _ = await send(channel, data)
            assert code == "RESOURCE_EXHAUSTED"
            assert "scheduler.max_queue" in text
            gate.open()
            assert [code for code, _, _ in await asyncio.gather(*calls)] == ["OK"] * 3
            assert (await send(channel, data))[0] == "OK"

    with Engine.from_config(config) as engine:
        wait_until_idle(engine)
        asyncio.run(main(engine))
