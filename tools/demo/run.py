"""The demo: serve the demo model on loopback, recommend for every MovieLens user, print metrics and latencies.

`make demo` and, wherever the package is installed, `xgr demo` run it. The service and the client are the installed commands, run
as a user would run them. Titles come from the wheel at run time; the catalogue holds ids and codes only. The figures also go to a
JSON report.
"""

from __future__ import annotations

import importlib.metadata
import json
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import xgr_runtime
from xgr_runtime.config import RuntimeConfig
from xgr_runtime.service.address import read_address
from xgr_runtime.shipped import config_file, folder

from .baselines import Markov1, popularity_ranking, popularity_recommend
from .errors import DemoError
from .metrics import ndcg_at_k, recall_at_k
from .movielens import load_sequences, load_titles, without_last

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

ITEMS = folder("configs") / "demo" / "items.jsonl"
XGR = (sys.executable, "-m", "xgr_runtime.cli")
CONCURRENCY = 4
START_LIMIT_S = 120.0
# A busy machine ends no demo: how long an answer took is a figure of its report.
ANSWER_LIMIT_S = 60.0
NUM_SHOWN_USERS = 3
TOP = 10
VISITS = (16, 18, 20)  # films at each visit of the returning user; the template's window holds 20
LEAK = 0.25  # a Recall@10 above it cannot come from this data without its test items


@dataclass(frozen=True)
class Places:
    """What the demo writes, and the configuration of its service.

    work: a folder for the catalogue, the requests and the log. report: the file with the figures. config: a file, or the name
    of one that comes with the package. overrides: of its options.
    """

    work: Path
    report: Path
    config: str = "demo"
    overrides: tuple[str, ...] = ()

    @property
    def catalog(self) -> Path:
        return self.work / "movielens.xgr"

    def settings(self) -> dict[str, Any]:
        """What was served, as the report says it: configuration and versions. Raises ConfigError.

        device: as configured. The service starts on no other; where "auto" decided, its log names the providers.
        has_prefix_cache: whether the service keeps histories for returning users.
        """
        config = RuntimeConfig.from_yaml(config_file(self.config), self.overrides)
        return {
            "config": self.config,
            "overrides": list(self.overrides),
            "device": config.device,
            "dtype": config.model.dtype,
            "has_prefix_cache": config.cache.prefix_cache,
            "versions": {
                "xgr": xgr_runtime.__version__,
                **{package: _version(package) for package in ("torch", "torch-npu")},
            },
        }


def main(places: Places) -> int:
    """Run the demo; returns 1 when a promise of it was not kept. Raises DemoError when it cannot run."""
    start_s = time.monotonic()
    settings = places.settings()
    sequences, titles = load_sequences(), load_titles()
    histories = without_last(sequences, 1)
    targets = [items[-1] for items in sequences.values()]
    places.work.mkdir(parents=True, exist_ok=True)
    build_catalog(places)
    with service(places) as target:
        print(f"\nservice: xgr serve --config {places.config}, on {target}")
        shown = list(histories)[:: max(1, len(histories) // NUM_SHOWN_USERS)][:NUM_SHOWN_USERS]
        ask(places, target, {user: histories[user] for user in shown}, "warm-up")
        visits = visit_again(places, target, sequences)
        replies = ask(places, target, histories, "users")
    for user in shown:
        show(user, histories[user], replies[user], titles)
    print_visits(visits)
    report = settings | measure(histories, targets, replies) | {"returning_user": visits}
    places.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print_report(report)
    print(f"figures: {places.report}")
    failures = shortfalls(report)
    for failure in failures:
        print(f"NOT AS IT SHOULD BE: {failure}")
    print(f"finished in {time.monotonic() - start_s:.1f} s")
    return 1 if failures else 0


def _version(package: str) -> str:
    """Of an installed package, without importing it: the service does, in a process of its own. "" where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def build_catalog(places: Places) -> None:
    """Compile the demo's items anew with the command a user would type."""
    command = [*XGR, "catalog", "build", str(ITEMS), str(places.catalog)]
    command += ["--token-offsets", "8,72,136", "--codes", "64,64,64"]
    if subprocess.run(command, check=False).returncode:
        raise DemoError(f"xgr catalog build could not compile {ITEMS}; its reason is above")


@contextmanager
def service(places: Places) -> Iterator[str]:
    """`xgr serve` on a free port of the loopback address; stopped with SIGTERM, which drains it."""
    log_path = places.work / "serve.log"
    command = [*XGR, "serve", "--config", places.config, "--host", "127.0.0.1", "--port", "0"]
    catalog = f"catalogs.movielens={json.dumps(str(places.catalog.resolve()))}"
    for override in (*places.overrides, catalog):
        command += ["--set", override]
    with log_path.open("w", encoding="utf-8") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            yield wait_for_address(server, log_path)
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(timeout=60)
            if server.stdout is not None:
                server.stdout.close()
    if code != 0:
        raise DemoError(f"xgr serve ended with exit code {code}; see {log_path}")


def wait_for_address(server: subprocess.Popen[str], log_path: Path) -> str:
    """The address in the one line that the service prints when it listens."""
    address = read_address(server.stdout, START_LIMIT_S)
    if not address:
        log = log_path.read_text(encoding="utf-8").splitlines()
        raise DemoError(f"xgr serve did not start, see {log_path}: {log[-1] if log else 'empty'}")
    return address


def ask(
    places: Places, target: str, histories: dict[int, list[int]], what: str
) -> dict[int, dict[str, Any]]:
    """One reply per user through `xgr client`, the user's own history excluded; progress is shown on a terminal."""
    requests = places.work / "requests.jsonl"
    with requests.open("w", encoding="utf-8") as lines:
        for user, items in histories.items():
            lines.write(
                json.dumps({"request_id": f"user-{user}", "history_item_ids": items}) + "\n"
            )
    command = [*XGR, "client", "--target", target, "--input", str(requests), "--json"]
    command += ["--exclude-history", "--concurrency", str(CONCURRENCY)]
    command += ["--timeout-s", str(ANSWER_LIMIT_S)]
    replies: dict[int, dict[str, Any]] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        for line in client.stdout:
            reply = json.loads(line)
            if "error" in reply:
                raise DemoError(f"the service refused a request: {reply}")
            replies[int(reply["request_id"].removeprefix("user-"))] = reply
            show_progress(what, len(replies), len(histories))
    if client.returncode != 0 or len(replies) != len(histories):
        raise DemoError(
            f"xgr client answered {len(replies)} of {len(histories)}, exit code {client.returncode}"
        )
    return replies


def visit_again(
    places: Places, target: str, sequences: dict[int, list[int]]
) -> list[dict[str, int]]:
    """A user whose films all fit the window comes back twice with two more; what each visit found in the prefix cache."""
    user = next(user for user, items in sequences.items() if len(items) == VISITS[-1])
    visits = []
    for num_films in VISITS:
        reply = ask(places, target, {user: sequences[user][:num_films]}, "returning user")[user]
        counts = {name: reply[name] for name in ("num_prompt_tokens", "num_cached_tokens")}
        visits.append({"user": user, "num_films": num_films, **counts})
    return visits


def print_visits(visits: list[dict[str, int]]) -> None:
    print(f"\nuser {visits[0]['user']} returns with a longer history:")
    for number, visit in enumerate(visits, start=1):
        print(
            f"  visit {number}: {visit['num_films']} films, {visit['num_prompt_tokens']} tokens, "
            f"{visit['num_cached_tokens']} of them cached"
        )


def show_progress(what: str, count: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if count == total else ""
        print(f"\r{what}: {count} of {total}", end=end, file=sys.stderr, flush=True)


def item_ids(reply: dict[str, Any]) -> list[int]:
    return [item["item_id"] for item in reply["results"][0]["items"]]


def show(user: int, history: Sequence[int], reply: dict[str, Any], titles: dict[int, str]) -> None:
    """The latest films of a user and what the service recommends, with scores."""
    print(
        f"\nuser {user}: {len(history)} films seen; the latest: "
        + ", ".join(titles[i] for i in history[-4:])
    )
    for rank, item in enumerate(reply["results"][0]["items"][:5], start=1):
        print(f"  {rank}. {titles[item['item_id']]}  (score {item['score']:.3f})")


def count_invalid(histories: dict[int, list[int]], replies: dict[int, dict[str, Any]]) -> int:
    """Returned rows that break the contract: not in the catalogue, another SID, in the history, repeated, not finite."""
    known = {}
    for line in ITEMS.read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        known[item["item_id"]] = item["sid"]
    num_invalid = 0
    for user, reply in replies.items():
        seen = set(histories[user])
        for item in reply["results"][0]["items"]:
            is_valid = known.get(item["item_id"]) == item["sid"] and np.isfinite(item["score"])
            num_invalid += not is_valid or item["item_id"] in seen
            seen.add(item["item_id"])
    return num_invalid


def measure(
    histories: dict[int, list[int]], targets: list[int], replies: dict[int, dict[str, Any]]
) -> dict[str, Any]:
    """Recall@10 and NDCG@10 of the service, popularity and Markov-1 over all users, and client latencies."""
    ranking, markov = popularity_ranking(histories), Markov1(histories)
    lists = {
        "xgr": [item_ids(replies[user]) for user in histories],
        "popularity": [popularity_recommend(ranking, items, TOP) for items in histories.values()],
        "markov1": [markov.recommend(items, TOP) for items in histories.values()],
    }
    rows = {
        name: {
            "recall_at_10": round(recall_at_k(ranked, targets, TOP), 4),
            "ndcg_at_10": round(ndcg_at_k(ranked, targets, TOP), 4),
        }
        for name, ranked in lists.items()
    }
    client_ms = np.array([reply["client_ms"] for reply in replies.values()])
    percentiles = {f"p{q}": round(float(np.percentile(client_ms, q)), 2) for q in (50, 90, 99)}
    return {
        **rows["xgr"],
        "popularity": rows["popularity"],
        "markov1": rows["markov1"],
        "latency_ms": {**percentiles, "max": round(float(client_ms.max()), 2)},
        "concurrency": CONCURRENCY,
        "num_users": len(histories),
        "num_invalid_items": count_invalid(histories, replies),
    }


def shortfalls(report: dict[str, Any]) -> list[str]:
    """What the demo promises and this run did not keep."""
    recall, popularity = report["recall_at_10"], report["popularity"]["recall_at_10"]
    markov = report["markov1"]["recall_at_10"]
    missed = [visit for visit in report["returning_user"][1:] if not visit["num_cached_tokens"]]
    checks = {
        "a returning user's history was not cached": not missed or not report["has_prefix_cache"],
        f"{report['num_invalid_items']} invalid items": report["num_invalid_items"] == 0,
        f"Recall@10 {recall} is below 3 x popularity {popularity}": recall >= 3 * popularity,
        f"Recall@10 {recall} is below Markov-1 {markov}": recall >= markov,
        f"Recall@10 {recall} is above {LEAK}: a leak": recall <= LEAK,
    }
    return [text for text, is_kept in checks.items() if not is_kept]


def print_report(report: dict[str, Any]) -> None:
    print(f"\n{report['num_users']} users, last item held out, own history excluded")
    print(f"{'':<22}Recall@10  NDCG@10")
    for name, row in (
        ("xgr-runtime", report),
        ("Markov-1", report["markov1"]),
        ("popularity", report["popularity"]),
    ):
        print(f"  {name:<20}{row['recall_at_10']:>9.4f}{row['ndcg_at_10']:>9.4f}")
    latency = ", ".join(f"{name} {value} ms" for name, value in report["latency_ms"].items())
    print(f"latency at the client, {report['concurrency']} requests at a time: {latency}")
    print(f"invalid items returned: {report['num_invalid_items']}")
