"""/metrics of a real engine behind a real server, against the same traffic counted by its client."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest

from tests.service.scrape import by_label, free_port, get, parse, value
from tests.service.servers import running
from tests.service.waiting import PATIENCE_S, until, wait_until_idle
from tests.service.world import TOKENS, World, make_world
from tests.xschedule.running import Gate
from xgr_runtime import Engine, RuntimeConfig
from xgr_runtime.service import call_record
from xgr_runtime.service._pb.xgr.v1 import recommend_pb2_grpc
from xgr_runtime.service.metric_table import TABLE
from xgr_runtime.service.servicer import RecommendServicer
from xgr_runtime.service.translate import request_to_proto
from xgr_runtime.service.translate_result import result_from_proto
from xgr_runtime.types import RecRequest, RecResult, Rules, Search
from xgr_runtime.xbeam.catalog_build import build_catalog_from_jsonl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.service.scrape import Samples
    from xgr_runtime.service.server import RecommendServer

pytestmark = pytest.mark.e2e
QUEUE = 6


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def engine(world: World) -> Iterator[Engine]:
    config = RuntimeConfig.from_yaml(
        world.config, [f"scheduler.max_queue={QUEUE}", f"service.metrics_port={free_port()}"]
    )
    with Engine.from_config(config) as started:
        wait_until_idle(started)
        yield started


class Traffic:
    """Sends calls and keeps what the client saw of them: status names, and answers with what was asked."""

    def __init__(self, world: World, channel: Any) -> None:
        self._stub: Any = recommend_pb2_grpc.RecommendServiceStub(channel)  # type: ignore[no-untyped-call]
        self._world = world
        self.codes: Counter[str] = Counter()
        self.answers: list[tuple[Search, RecResult]] = []

    def request(self, number: int, search: Search) -> RecRequest:
        items = self._world.catalog.items
        ids = [items[(number * 7 + i) % len(items)].item_id for i in range(3 + number % 9)]
        return RecRequest(
            f"r{number}", history_item_ids=np.asarray(ids, np.int64), searches=(search,)
        )

    async def send(
        self,
        number: int,
        search: Search,
        timeout_s: float | None = 2 * PATIENCE_S,
        until_cancelled: asyncio.Event | None = None,
    ) -> str:
        call = self._stub.Recommend(
            request_to_proto(self.request(number, search)), timeout=timeout_s
        )
        if until_cancelled is not None:
            await until_cancelled.wait()
            call.cancel()
        code: str = (await call.code()).name
        self.codes[code] += 1
        if code == "OK":
            self.answers.append((search, result_from_proto(await call)))
        return code


async def scrape(engine: Engine) -> Samples:
    """Parsed, once every call that ended for its client has ended in the server."""
    port = engine.config.service.metrics_port
    end_s = time.monotonic() + PATIENCE_S
    while True:
        status, _, body = await get(port)
        assert status == 200
        samples = parse(body)
        if not value(samples, "xgr_in_flight_requests") or time.monotonic() > end_s:
            return samples
        await asyncio.sleep(0.01)


SEARCHES = [
    Search(beam_width=8, num_results=3),
    Search(beam_widths=(4, 20, 11), num_results=5, normalization="level"),
    Search(beam_width=5, num_results=900),
    Search(beam_width=6, num_results=4, rules=Rules(require=(("nobody has this",),))),
    Search(beam_width=64, num_results=2, normalization="valid", rules=Rules(exclude_history=True)),
]
PLAIN = SEARCHES[0]
BAD = dataclasses.replace(PLAIN, beam_width=None, beam_widths=(3, 3))


def check_answers(samples: Samples, answers: list[tuple[Search, RecResult]]) -> None:
    """Searches, items, beams, tokens and waits, summed up from the replies."""
    ends: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    for search, reply in answers:
        (found,) = reply.results
        asked = search.num_results or 0
        ends[
            "empty" if not found.num_items else "full" if found.num_items == asked else "short"
        ] += 1
        sums["xgr_asked_items_total"] += asked
        sums["xgr_returned_items_total"] += len(found.item_ids)
        sums["xgr_asked_beams_total"] += (search.beam_widths or (search.beam_width or 0,))[-1]
        sums["xgr_valid_beams_total"] += found.num_valid
        sums["xgr_batch_rows_sum"] += max(search.beam_widths or (search.beam_width or 0,))
        sums["xgr_batch_tokens_sum"] += reply.num_prompt_tokens - reply.num_cached_tokens
        sums["xgr_batch_histories_sum"] += 1
        sums["xgr_queue_wait_seconds_count"] += 1
        sums["xgr_prefix_lookup_tokens_total"] += reply.num_prompt_tokens
        sums["xgr_prefix_cached_tokens_total"] += reply.num_cached_tokens
        sums["xgr_prefix_hit_requests_total"] += reply.num_cached_tokens > 0
    assert {"full", "short", "empty"} == set(ends)
    assert sums["xgr_prefix_hit_requests_total"] > 0
    searches = {
        dict(labels)["result"]: count
        for (name, labels), count in samples.items()
        if name == "xgr_searches_total" and dict(labels)["catalog"] == "items" and count
    }
    assert searches == ends
    assert {name: value(samples, name) for name in sums} == sums
    ratio = sums["xgr_valid_beams_total"] / sums["xgr_asked_beams_total"]
    assert value(samples, "xgr_valid_beams_ratio") == pytest.approx(ratio)
    dead = sums["xgr_asked_beams_total"] - sums["xgr_valid_beams_total"]
    assert value(samples, "xgr_dead_beams_total") == dead
    queue_s = sum(reply.timings.queue_ms for _, reply in answers) / 1e3
    assert value(samples, "xgr_queue_wait_seconds_sum") == pytest.approx(queue_s, abs=1e-5)


def check_stages(samples: Samples) -> None:
    """Every batch has every stage once, and its stages fit into it."""
    num_batches = value(samples, "xgr_batches_total", outcome="ok")
    rounds = [str(level) for level in range(3)]
    stages = ["xgr_prefill_seconds"]
    for name in ("xgr_round_seconds", "xgr_select_seconds"):
        assert by_label(samples, f"{name}_count", "round") == dict.fromkeys(rounds, num_batches)
    for direction in ("to_device", "to_host"):
        count = value(samples, "xgr_copy_seconds_count", direction=direction)
        assert count == num_batches
    assert value(samples, f"{stages[0]}_count") == num_batches
    seconds = value(samples, "xgr_prefill_seconds_sum")
    seconds += sum(by_label(samples, "xgr_round_seconds_sum", "round").values())
    seconds += sum(by_label(samples, "xgr_copy_seconds_sum", "direction").values())
    assert 0 < seconds < value(samples, "xgr_batch_duration_seconds_sum")
    for level in rounds:
        part = value(samples, "xgr_select_seconds_sum", round=level)
        assert 0 < part < value(samples, "xgr_round_seconds_sum", round=level)


def test_answered_traffic(world: World, engine: Engine) -> None:
    async def main() -> None:
        config = engine.config
        async with (
            running(engine, config) as (_, target),
            grpc.aio.insecure_channel(target) as channel,
        ):
            fresh = await scrape(engine)
            assert by_label(fresh, "xgr_requests_total", "code") == {}
            assert value(fresh, "xgr_batches_total", outcome="ok") == 0
            traffic = Traffic(world, channel)
            for start in range(0, 40, QUEUE):
                numbers = range(start, min(40, start + QUEUE))
                await asyncio.gather(
                    *(traffic.send(i % 17, SEARCHES[i % len(SEARCHES)]) for i in numbers)
                )
            assert traffic.codes == {"OK": 40}
            samples = await scrape(engine)
            assert by_label(samples, "xgr_requests_total", "code") == {"OK": 40}
            assert by_label(samples, "xgr_failed_requests_total", "cause") == {}
            assert value(samples, "xgr_request_duration_seconds_count") == 40
            check_answers(samples, traffic.answers)
            check_stages(samples)
            version = traffic.answers[0][1].results[0].catalog_version
            assert value(samples, "xgr_catalog_info", catalog="items", version=version) == 1
            assert value(samples, "xgr_catalog_items", catalog="items") == 150
            assert value(samples, "xgr_kv_rows") == config.scheduler.max_batch_rows
            assert value(samples, "xgr_op_provider_info", op="select_beams", provider="numpy") == 1
            later = await scrape(engine)
            ages = [value(s, "xgr_catalog_age_seconds", catalog="items") for s in (samples, later)]
            assert 0 < ages[0] < ages[1]

    asyncio.run(main())


def count_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The number of calls that came to servers that start from now on."""
    recommend, numbers = RecommendServicer.recommend, list[int]()

    async def counted(self: RecommendServicer, messages: Any, context: Any) -> Any:
        numbers.append(len(numbers))
        return await recommend(self, messages, context)

    monkeypatch.setattr(RecommendServicer, "recommend", counted)
    return lambda: len(numbers)


async def check_gauges(engine: Engine) -> None:
    """While one call of PLAIN runs and five wait."""
    status, _, body = await get(engine.config.service.metrics_port)
    samples = parse(body)
    assert status == 200
    assert value(samples, "xgr_in_flight_requests") == 6
    assert value(samples, "xgr_running_requests") == 1
    assert value(samples, "xgr_waiting_requests") == 5
    assert value(samples, "xgr_kv_used_rows") == PLAIN.beam_width
    needed = -(-(3 + 3 * 3) // engine.config.cache.page_size_tokens)
    assert value(samples, "xgr_kv_used_pages") == needed


async def send_late(traffic: Traffic, num_come: Callable[[], int]) -> None:
    """Calls whose deadline passes while the server has them, two at least: a busy machine may take longer to bring one there."""
    timeout_s, wanted = 0.2, num_come() + 2
    while num_come() < wanted:
        assert timeout_s < PATIENCE_S, "no call came to the server"
        before = num_come()
        assert await traffic.send(3, PLAIN, timeout_s=timeout_s) == "DEADLINE_EXCEEDED"
        timeout_s *= 2 if num_come() == before else 1
    # Answered in its turn: those before it have come, or never will.
    assert await traffic.send(1, BAD) == "INVALID_ARGUMENT"


async def fill_the_queue(
    traffic: Traffic, engine: Engine, server: RecommendServer, num_come: Callable[[], int]
) -> None:
    """Three calls are answered at last; of the others some find no place, some go and some come too late."""
    gate = Gate(engine)
    held = asyncio.ensure_future(traffic.send(0, PLAIN))
    await asyncio.get_running_loop().run_in_executor(None, gate.wait_for_batch)
    waiting = [asyncio.ensure_future(traffic.send(i, PLAIN)) for i in (1, 2)]
    leave = asyncio.Event()
    gone = [
        asyncio.ensure_future(traffic.send(i, PLAIN, until_cancelled=leave, timeout_s=None))
        for i in (3, 4, 5)
    ]
    await until(lambda: engine.describe()["num_unanswered"] == QUEUE)
    await check_gauges(engine)
    for i in range(7):
        assert await traffic.send(i, PLAIN) == "RESOURCE_EXHAUSTED"
    leave.set()
    assert await asyncio.gather(*gone) == ["CANCELLED"] * 3
    await until(lambda: server.servicer.num_in_flight == 3)
    await until(lambda: engine.describe()["num_unanswered"] == 3)
    await send_late(traffic, num_come)
    await until(lambda: server.servicer.num_in_flight == 3)
    gate.open()
    assert await asyncio.gather(held, *waiting) == ["OK"] * 3


async def send_faulty(traffic: Traffic, engine: Engine) -> None:
    """Calls that break the contract, that ask for what is not there, and one that meets a defect; then a good one."""
    for _ in range(3):
        assert await traffic.send(1, BAD) == "INVALID_ARGUMENT"
    for i in range(2):
        unknown = dataclasses.replace(PLAIN, catalog=f"made up {i}")
        assert await traffic.send(1, unknown) == "NOT_FOUND"
    submit, engine.worker.submit = engine.worker.submit, fail  # type: ignore[method-assign]
    assert await traffic.send(1, PLAIN) == "INTERNAL"
    engine.worker.submit = submit  # type: ignore[method-assign]
    assert await traffic.send(1, PLAIN) == "OK"


def test_every_other_end_of_a_call(
    world: World, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused, expired, cancelled, overloaded, broken: by the statuses that the client got. Gauges while they wait."""
    # A busy machine may bring the client's end of a call to the server long before the server's own clock says so.
    monkeypatch.setattr(call_record, "CLOCK_TOLERANCE_S", PATIENCE_S)
    num_come = count_calls(monkeypatch)

    async def main() -> None:
        async with (
            running(engine, engine.config) as (server, target),
            grpc.aio.insecure_channel(target) as channel,
        ):
            traffic = Traffic(world, channel)
            await fill_the_queue(traffic, engine, server, num_come)
            await send_faulty(traffic, engine)
            samples = await scrape(engine)
            # Of the late ones those count that came, of which the client knows nothing.
            codes = dict(traffic.codes)
            most_late = codes.pop("DEADLINE_EXCEEDED")
            num_late = num_come() - sum(codes.values())
            assert 2 <= num_late <= most_late
            codes["DEADLINE_EXCEEDED"] = num_late
            assert by_label(samples, "xgr_requests_total", "code") == codes
            assert by_label(samples, "xgr_failed_requests_total", "cause") == {
                "overload": 7,
                "deadline": num_late,
                "cancelled": 3,
                "invalid": 4,
                "not_found": 2,
                "internal": 1,
            }
            assert value(samples, "xgr_request_duration_seconds_count") == 4
            assert by_label(samples, "xgr_batches_total", "outcome")["failed"] == 1
            assert value(samples, "xgr_waiting_requests") == 0
            assert value(samples, "xgr_kv_used_pages") == 0
            await asyncio.wait_for(no_used_rows(engine), PATIENCE_S)

    asyncio.run(main())


async def no_used_rows(engine: Engine) -> None:
    """A batch leaves the ones in flight just behind its last answer."""
    while value(await scrape(engine), "xgr_kv_used_rows"):
        await asyncio.sleep(0.01)


def fail(batch: object) -> Any:
    raise ZeroDivisionError("made by the test")


def test_series_do_not_grow_with_what_callers_choose(world: World, engine: Engine) -> None:
    async def main() -> None:
        async with (
            running(engine, engine.config) as (_, target),
            grpc.aio.insecure_channel(target) as channel,
        ):
            traffic = Traffic(world, channel)
            await traffic.send(0, SEARCHES[0])
            before = set(await scrape(engine))
            for i in range(30):
                search = Search(
                    catalog=f"catalogue {i}" if i % 3 == 0 else "",
                    catalog_version=f"version {i}" if i % 3 == 1 else "",
                    beam_width=1 + i,
                    num_results=1 + i,
                    rules=Rules(exclude_tags=(f"tag {i}",)),
                )
                await traffic.send(i, search)
            assert set(await scrape(engine)) == before

    asyncio.run(main())


def test_a_swap_changes_the_version_and_starts_its_age(
    world: World, engine: Engine, tmp_path: Path
) -> None:
    """One series a catalogue of the configuration; a catalogue loaded beside them is "other"."""
    items = world.config.parent / "items.jsonl"
    for version in ("second", "third"):
        build_catalog_from_jsonl(
            tmp_path / f"{version}.xgrc", items, token_of=TOKENS, version=version
        )

    def versions(samples: Samples) -> list[tuple[str, str]]:
        labels = [dict(labels) for name, labels in samples if name == "xgr_catalog_info"]
        return [(found["catalog"], found["version"]) for found in labels]

    async def main() -> None:
        async with (
            running(engine, engine.config) as (_, target),
            grpc.aio.insecure_channel(target) as channel,
        ):
            traffic = Traffic(world, channel)
            before = await scrape(engine)
            (first,) = engine.describe()["catalogs"]["items"]["versions"]
            assert versions(before) == [("items", first)]
            engine.load_catalog("items", str(tmp_path / "second.xgrc"))
            loaded = await scrape(engine)
            assert versions(loaded) == [("items", first)]
            assert value(loaded, "xgr_catalog_versions", catalog="items") == 2
            start_s = time.monotonic()
            engine.activate_catalog("items", "second")
            engine.load_catalog("beside", str(tmp_path / "third.xgrc"))
            engine.activate_catalog("beside", "third")
            after = await scrape(engine)
            assert versions(after) == [("items", "second")]
            most_s = time.monotonic() - start_s
            ages = [value(s, "xgr_catalog_age_seconds", catalog="items") for s in (loaded, after)]
            assert ages[0] > 0
            assert 0 < ages[1] <= most_s, "as old as its activation, not as the version before"
            assert set(before) - set(after) == {
                ("xgr_catalog_info", frozenset({("catalog", "items"), ("version", first)}))
            }
            assert await traffic.send(0, dataclasses.replace(SEARCHES[0], catalog="beside")) == "OK"
            samples = await scrape(engine)
            assert value(samples, "xgr_searches_total", catalog="other", result="full") == 1
            assert value(samples, "xgr_searches_total", catalog="items", result="full") == 0

    asyncio.run(main())


def test_draining_is_seen_and_the_endpoint_ends_last(world: World, engine: Engine) -> None:
    gate = Gate(engine)

    async def main() -> None:
        async with (
            running(engine, engine.config) as (server, target),
            grpc.aio.insecure_channel(target) as channel,
        ):
            traffic = Traffic(world, channel)
            held = asyncio.ensure_future(traffic.send(0, SEARCHES[0]))
            await asyncio.get_running_loop().run_in_executor(None, gate.wait_for_batch)
            stopping = asyncio.ensure_future(server.stop(asyncio.Event()))
            await until(lambda: server.servicer._is_draining)
            assert await traffic.send(1, SEARCHES[0]) == "UNAVAILABLE"
            port = engine.config.service.metrics_port
            samples = parse((await get(port))[2])
            assert value(samples, "xgr_failed_requests_total", cause="unavailable") == 1
            assert value(samples, "xgr_in_flight_requests") == 1
            gate.open()
            assert await held == "OK"
            assert await stopping == 0
            with pytest.raises(OSError, match="failed"):
                await get(port)

    asyncio.run(main())


def test_metrics_are_off_by_default(engine: Engine) -> None:
    service = dataclasses.replace(engine.config.service, metrics_port=0)
    config = dataclasses.replace(engine.config, service=service)

    async def main() -> None:
        async with running(engine, config):
            with pytest.raises(OSError, match="failed"):
                await get(engine.config.service.metrics_port)

    assert RuntimeConfig().service.metrics_port == 0
    asyncio.run(main())


def test_one_line_a_call_with_its_request_id(
    world: World, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    def send_all(config: RuntimeConfig) -> list[logging.LogRecord]:
        async def main() -> None:
            async with (
                running(engine, config) as (_, target),
                grpc.aio.insecure_channel(target) as channel,
            ):
                traffic = Traffic(world, channel)
                await traffic.send(1, SEARCHES[0])
                await traffic.send(2, Search(catalog="x\ny"))

        caplog.clear()
        with caplog.at_level(logging.INFO, "xgr_runtime.service"):
            asyncio.run(main())
        return [r for r in caplog.records if r.name.startswith("xgr_runtime.service.call")]

    records: list[Any] = list(send_all(engine.config))
    assert [(r.request_id, r.status) for r in records] == [("r1", "OK"), ("r2", "NOT_FOUND")]
    assert all(0 < r.duration_ms < 1e3 * PATIENCE_S for r in records)
    assert all(r.getMessage().isprintable() for r in records)
    service = dataclasses.replace(engine.config.service, log_requests=False)
    assert send_all(dataclasses.replace(engine.config, service=service)) == []


def test_the_table_is_what_a_real_server_exports(engine: Engine) -> None:
    async def main() -> bytes:
        async with running(engine, engine.config):
            return (await get(engine.config.service.metrics_port))[2]

    exported = re.findall(r"^# TYPE (\S+) ", asyncio.run(main()).decode(), re.MULTILINE)
    assert exported == [metric.name for metric in TABLE]
