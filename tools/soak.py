"""A long run of mixed traffic on a service in a process of its own: does its memory stay where it is?

    python tools/soak.py --minutes 20 --json

The demo model serves users who return with longer histories, with rules, with callers that give up and requests that break
the contract, while versions of the catalogue are swapped under it. The service's resident memory is read once a second;
after a warm-up of --warmup requests the least-squares slope over the rest of the run is given as a percentage of the mean:
by how much memory would have grown from the first to the last sample. At the end the service is stopped under load.
Exit code: 0, or 1 when the slope is above --limit-percent, a page or a version is held by nobody, an answer contradicts
what was sent, or the service did not drain.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools._bench.command import NO_LIMIT, exit_code_of, number, whole
from tools._bench.load import RETRY_S, Arrivals, Tally, run_closed, run_open
from tools._bench.soak_world import build_catalogs, service, traffic_options, write_config
from tools._bench.timing import add_output_arguments, environment, progress, write_report
from tools._bench.traffic import Traffic
from xgr_runtime.errors import XgrError
from xgr_runtime.service.client import AsyncRecommendClient

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MAX_MINUTES = 1e6
MAX_CALLERS = 2**16
MAX_RATE = 1e6
MAX_PERCENT = 1e6
SAMPLE_S = 1.0
STOP_LIMIT_S = 60.0


@dataclass
class Memory:
    """The service's resident memory over time: seconds, MiB, and requests done by then."""

    samples: list[tuple[float, float, int]] = field(default_factory=list)

    def add(self, pid: int, num_done: int) -> None:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        self.samples.append((time.monotonic(), pages * PAGE_BYTES / 2**20, num_done))

    def growth(self, warmup: int) -> dict[str, Any]:
        """Slope times length over mean, in percent, of the samples after the warm-up; None with fewer than three."""
        after = np.array([(s, mib) for s, mib, done in self.samples if done >= warmup])
        shown = self.samples[:: max(1, len(self.samples) // 40)]
        report: dict[str, Any] = {
            "rss_mib_peak": round(max(mib for _, mib, _ in self.samples), 1),
            "rss_samples": [
                {"s": round(s - self.samples[0][0], 1), "mib": round(mib, 1), "num_done": done}
                for s, mib, done in shown
            ],
            "num_samples_after_warmup": len(after),
            "growth_percent": None,
        }
        if len(after) >= 3:
            seconds = after[:, 0] - after[0, 0]
            slope = float(np.polyfit(seconds, after[:, 1], 1)[0])
            mean = float(after[:, 1].mean())
            report["rss_mib_mean"] = round(mean, 1)
            report["slope_mib_per_hour"] = round(3600 * slope, 2)
            report["growth_percent"] = round(100 * slope * float(seconds[-1]) / mean, 3)
        return report


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        try:
            report = asyncio.run(soak(args, Path(name)))
        except XgrError as error:
            parser.error(str(error))
    report["failures"] = failures_of(report, args.limit_percent)
    report["environment"] = environment()
    write_report(report, args)
    return 1 if report["failures"] else 0


def make_parser() -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=number(0, MAX_MINUTES, is_open=True), default=20.0)
    parser.add_argument(
        "--warmup", type=whole(0, NO_LIMIT), default=2000, metavar="N", help="requests"
    )
    parser.add_argument(
        "--concurrency", type=whole(1, MAX_CALLERS), default=16, help="callers of the closed loop"
    )
    parser.add_argument(
        "--rate",
        type=number(0, MAX_RATE, is_open=True),
        help="open loop instead: requests per second",
    )
    parser.add_argument(
        "--swap-every-s", type=number(0, 60 * MAX_MINUTES), default=15.0, help="0: no swaps"
    )
    parser.add_argument(
        "--limit-percent",
        type=number(-MAX_PERCENT, MAX_PERCENT),
        default=2.0,
        help="growth that is accepted",
    )
    parser.add_argument("--seed", type=whole(0, NO_LIMIT), default=0)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", dest="overrides",
                        help="an option of the service's configuration")  # fmt: skip
    add_output_arguments(parser)
    return parser


async def soak(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The whole run."""
    files, num_items = build_catalogs(folder)
    config = write_config(folder, files[0], args.overrides)
    traffic = Traffic(traffic_options(num_items), args.seed)
    tally, memory = Tally(skip=args.warmup), Memory()
    report_path = folder / "service.json"
    with service(config, report_path, args.swap_every_s, files) as (process, target):
        progress(f"soak: service {process.pid} on {target}, {args.minutes:g} min")
        until_s = time.monotonic() + 60 * args.minutes
        sampler = asyncio.ensure_future(sample(process.pid, memory, tally))
        async with AsyncRecommendClient(target, timeout_s=30) as client:
            if args.rate:
                arrivals = Arrivals(args.rate, 4096, args.seed)
                await run_open(client, traffic, tally, arrivals, until_s, NO_LIMIT)
            else:
                await run_closed(client, traffic, tally, args.concurrency, until_s, NO_LIMIT)
            sampler.cancel()
            during_stop = await stop_under_load(client, traffic, process)
        code = process.wait(STOP_LIMIT_S)
    return {
        "minutes": args.minutes,
        "loop": {"rate_per_s": args.rate} if args.rate else {"concurrency": args.concurrency},
        "warmup_requests": args.warmup,
        "num_requests_with_warmup": tally.num_done,
        **tally.report(slo_ms=200.0),
        **memory.growth(args.warmup),
        "during_stop": during_stop,
        "exit_code": code,
        "service": json.loads(report_path.read_text()) if report_path.exists() else None,
    }


async def sample(pid: int, memory: Memory, tally: Tally) -> None:
    """Read the service's memory until cancelled."""
    while True:
        memory.add(pid, tally.num_done)
        if len(memory.samples) % 60 == 0:
            progress(f"soak: {tally.num_done} requests, {memory.samples[-1][1]:.1f} MiB")
        await asyncio.sleep(SAMPLE_S)


async def stop_under_load(
    client: AsyncRecommendClient, traffic: Traffic, process: subprocess.Popen[str]
) -> dict[str, int]:
    """SIGTERM with requests in flight; the statuses of those sent around it, until one is refused."""
    tally = Tally()
    load = asyncio.ensure_future(
        run_closed(client, traffic, tally, 16, time.monotonic() + 1.2, NO_LIMIT)
    )
    await asyncio.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    await load
    end_s = time.monotonic() + STOP_LIMIT_S
    while not tally.statuses["UNAVAILABLE"] and time.monotonic() < end_s:
        await run_closed(client, traffic, tally, 16, time.monotonic() + RETRY_S, NO_LIMIT)
    return dict(sorted(tally.statuses.items()))


def failures_of(report: dict[str, Any], limit_percent: float) -> list[str]:
    """What is not as it should be."""
    growth, service_report = report["growth_percent"], report["service"]
    found = []
    if growth is None:
        found.append("too few samples after the warm-up to tell a slope")
    elif growth > limit_percent:
        found.append(f"memory grew by {growth} %, more than {limit_percent} %")
    if report["num_improper"]:
        found.append(f"{report['num_improper']} answers contradict what was sent")
    if set(report["during_stop"]) - {
        "OK",
        "UNAVAILABLE",
        "CANCELLED",
        "INVALID_ARGUMENT",
        "NOT_FOUND",
    }:
        found.append(f"statuses at the stop: {report['during_stop']}")
    if report["exit_code"] != 0 or service_report is None:
        return [*found, f"the service ended with exit code {report['exit_code']}"]
    if not service_report["is_at_rest"]:
        found.append("the engine did not come to rest")
    pins = [
        version["num_pins"]
        for catalog in service_report["engine"]["catalogs"].values()
        for version in catalog["versions"].values()
    ]
    if service_report["num_pages_in_use"]:
        found.append(f"{service_report['num_pages_in_use']} pages are held by no request")
    if any(pins):
        found.append(f"pins of catalogue versions left: {pins}")
    return found


if __name__ == "__main__":
    raise SystemExit(exit_code_of(main))
