"""Load on a service, and what came of it.

Closed loop: N callers, each sends its next request when it has the answer; the rate is what the service gives. Open loop:
requests arrive by a Poisson process at a rate of their own, whatever the service does, and a latency counts from the
moment the request was due, so that a stall of the service is felt by every request that fell into it. A generator that
cannot keep up would measure itself: `lag_ms` says how late requests left.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from xgr_runtime.errors import XgrError
from xgr_runtime.service.client_output import status_name

if TYPE_CHECKING:
    from tools._bench.traffic import Planned, Traffic
    from xgr_runtime.service.client import AsyncRecommendClient

OK, CANCELLED, NOT_SENT = "OK", "CANCELLED", "NOT_SENT"
# A caller whose service is away tries again after this; without it a closed loop would spin.
RETRY_S = 0.1


@dataclass
class Tally:
    """Counts and times of a run from its making on; the first `skip` requests are only counted in num_done.

    latencies: milliseconds of the answered ones, in the order they ended. num_improper: answers that contradict what was
    planned (a bad request that was answered, a good one that was refused as invalid). failed searches are counted apart.
    num_history_used, num_history_unknown: items of the answered requests' histories, as the replies say.
    """

    skip: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    latencies: array[float] = field(default_factory=lambda: array("d"))
    lags: array[float] = field(default_factory=lambda: array("d"))
    num_done: int = 0
    num_improper: int = 0
    num_failed_searches: int = 0
    num_history_used: int = 0
    num_history_unknown: int = 0
    start_s: float = field(default_factory=time.monotonic)
    end_s: float = 0.0

    def add(self, status: str, latency_ms: float, lag_ms: float = 0.0) -> None:
        self.num_done += 1
        self.end_s = time.monotonic()
        if self.num_done <= self.skip:
            self.start_s = self.end_s
            return
        self.statuses[status] += 1
        if status != NOT_SENT:
            self.lags.append(lag_ms)
        if status == OK:
            self.latencies.append(latency_ms)

    def report(self, slo_ms: float) -> dict[str, Any]:
        """The figures as plain data. goodput: answers within `slo_ms`, per second."""
        seconds = max(self.end_s - self.start_s, 1e-9)
        in_time = sum(ms <= slo_ms for ms in self.latencies)
        return {
            "num_requests": sum(self.statuses.values()),
            "statuses": dict(sorted(self.statuses.items())),
            "num_improper": self.num_improper,
            "num_failed_searches": self.num_failed_searches,
            "num_history_used": self.num_history_used,
            "num_history_unknown": self.num_history_unknown,
            "seconds": round(seconds, 3),
            "answers_per_s": round(len(self.latencies) / seconds, 2),
            "slo_ms": slo_ms,
            "goodput_per_s": round(in_time / seconds, 2),
            "latency_ms": percentiles(self.latencies),
            "lag_ms": percentiles(self.lags),
        }


def percentiles(values: array[float]) -> dict[str, float] | None:
    """p50, p90, p99 and the largest; None of nothing."""
    if not values:
        return None
    p50, p90, p99, largest = np.percentile(values, [50, 90, 99, 100]).round(3).tolist()
    return {"p50": p50, "p90": p90, "p99": p99, "max": largest}


async def send(client: AsyncRecommendClient, planned: Planned, tally: Tally, due_s: float) -> str:
    """Send one request, give it up when planned, note what came of it; returns the status."""
    sent_s = time.monotonic()
    call = asyncio.ensure_future(client.recommend(planned.request))
    if planned.cancel_after_s is not None:
        call.get_loop().call_later(planned.cancel_after_s, call.cancel)
    try:
        result = await call
        status = OK
        tally.num_failed_searches += any(found.status != "ok" for found in result.results)
        tally.num_history_used += result.num_history_used
        tally.num_history_unknown += result.num_history_unknown
        tally.num_improper += planned.is_bad
    except asyncio.CancelledError:
        if planned.cancel_after_s is None:
            raise
        status = CANCELLED
    except XgrError as error:
        status = status_name(error)
        tally.num_improper += status == "INVALID_ARGUMENT" and not planned.is_bad
    end_s = time.monotonic()
    tally.add(status, 1e3 * (end_s - due_s), 1e3 * (sent_s - due_s))
    return status


async def run_closed(
    client: AsyncRecommendClient,
    traffic: Traffic,
    tally: Tally,
    concurrency: int,
    until_s: float,
    max_requests: int,
) -> None:
    """`concurrency` callers until `until_s` of time.monotonic() or `max_requests` are sent; ends with the last answer."""
    num_left = max_requests

    async def caller() -> None:
        nonlocal num_left
        while num_left > 0 and time.monotonic() < until_s:
            num_left -= 1
            if await send(client, traffic.next(), tally, time.monotonic()) == "UNAVAILABLE":
                await asyncio.sleep(RETRY_S)

    await asyncio.gather(*(caller() for _ in range(concurrency)))


async def run_open(
    client: AsyncRecommendClient,
    traffic: Traffic,
    tally: Tally,
    arrivals: Arrivals,
    until_s: float,
    max_requests: int,
) -> None:
    """Poisson arrivals until `until_s` or `max_requests`; then waits for the answers that are still due."""
    calls: set[asyncio.Task[str]] = set()
    due_s = time.monotonic()
    for _ in range(max_requests):
        due_s += arrivals.next_gap_s()
        if due_s >= until_s:
            break
        delay_s = due_s - time.monotonic()
        # Also when late: the answers have to be read between two requests.
        await asyncio.sleep(max(0.0, delay_s))
        if len(calls) >= arrivals.max_in_flight:
            tally.add(NOT_SENT, 0.0)
            continue
        call = asyncio.ensure_future(send(client, traffic.next(), tally, due_s))
        calls.add(call)
        call.add_done_callback(calls.discard)
    await asyncio.gather(*calls)


class Arrivals:
    """Exponential gaps of a mean rate. Beyond `max_in_flight` unanswered requests further ones are counted, not sent."""

    def __init__(self, rate_per_s: float, max_in_flight: int, seed: int) -> None:
        self.max_in_flight = max_in_flight
        self._mean_s = 1 / rate_per_s
        self._rng = np.random.default_rng([seed, 1])

    def next_gap_s(self) -> float:
        return float(self._rng.exponential(self._mean_s))
