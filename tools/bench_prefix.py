"""What the prefix cache saves when users return: shares over random traffic, and the time of a hit against a miss.

A random 12-layer Qwen3 over a random catalogue of 20,000 items. Users come back several times, each time with one to
three items (3-9 tokens) more. Timing: one history of 1,000 tokens that was 3-9 tokens shorter at the visit before, with
the cache as that visit left it (hit) and emptied (miss), in turn. Before anything is timed, the lists of hit and miss
are compared: same items, scores within 1e-4; a list that differs ends the run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools._bench.command import MAX_COUNT, NO_LIMIT, exit_code_of, whole  # noqa: E402
from tools._bench.random_model import Qwen3Shape, write_random_model  # noqa: E402
from tools._bench.timing import (  # noqa: E402
    MIN_RUNS,
    Timing,
    add_output_arguments,
    environment,
    progress,
    write_report,
)
from xgr_runtime import Engine, RecRequest, RuntimeConfig, Search  # noqa: E402
from xgr_runtime.config import (  # noqa: E402
    CacheConfig,
    LimitsConfig,
    ModelConfig,
    SchedulerConfig,
    TemplateConfig,
)
from xgr_runtime.xbeam.catalog_build import build_catalog  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xgr_runtime.types import RecResult

NUM_LEVELS = 3
NUM_CODES = 256
FIRST_TOKEN = 8
NUM_ITEMS = 20_000
MAX_SCORE_ERROR = 1e-4


@dataclass(frozen=True)
class Sizes:
    """What is measured. tokens are of a prompt: the template's one and three an item."""

    num_layers: int = 12
    hidden_size: int = 512
    width: int = 32
    num_users: int = 12
    num_visits: int = 4
    least_tokens: int = 300
    most_tokens: int = 2000
    timed_tokens: int = 1000
    cache_bytes: int = 1 << 30
    runs: int = MIN_RUNS


def make_engine(folder: Path, sizes: Sizes, seed: int) -> Engine:
    """An engine over a new random model and catalogue in `folder`."""
    shape = Qwen3Shape(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        intermediate_size=3 * sizes.hidden_size,
        vocab_size=FIRST_TOKEN + NUM_LEVELS * NUM_CODES,
    )
    model = write_random_model(folder / "model", shape, seed)
    rng = np.random.default_rng(seed)
    build_catalog(
        folder / "items.xgr",
        sids=rng.integers(0, NUM_CODES, (NUM_ITEMS, NUM_LEVELS)),
        item_ids=np.arange(NUM_ITEMS),
        num_codes=[NUM_CODES] * NUM_LEVELS,
        token_offsets=[FIRST_TOKEN + NUM_CODES * level for level in range(NUM_LEVELS)],
    )
    most = max(sizes.most_tokens, sizes.timed_tokens) + 9 * sizes.num_visits
    config = RuntimeConfig(
        device="cpu",
        cpu_threads=1,
        model=ModelConfig(path=str(model)),
        template=TemplateConfig(prefix_token_ids=(1,)),
        catalogs={"items": str(folder / "items.xgr")},
        limits=LimitsConfig(max_prompt_tokens=most, max_history_items=most),
        scheduler=SchedulerConfig(max_wait_ms=0.0, max_batch_tokens=max(4096, most)),
        cache=CacheConfig(prefix_cache_bytes=sizes.cache_bytes),
    )
    return Engine.from_config(config)


def ask(engine: Engine, history: np.ndarray[Any, Any], width: int) -> RecResult:
    """One request by item ids."""
    search = Search(beam_width=width, num_results=width)
    return engine.recommend([RecRequest(history_item_ids=history, searches=(search,))])[0]


def traffic(engine: Engine, sizes: Sizes, rng: np.random.Generator) -> dict[str, Any]:
    """Users in random order, each visit with a longer history."""
    lengths = rng.integers(sizes.least_tokens // 3, sizes.most_tokens // 3 + 1, sizes.num_users)
    streams = rng.integers(
        0, NUM_ITEMS, (sizes.num_users, int(lengths.max()) + 3 * sizes.num_visits)
    )
    visits = rng.permutation(np.repeat(np.arange(sizes.num_users), sizes.num_visits))
    has_visited = set[int]()
    num_returns = num_hits = num_tokens = num_cached = 0
    for number, user in enumerate(visits.tolist()):
        reply = ask(engine, streams[user, : lengths[user]], sizes.width)
        num_returns += user in has_visited
        num_hits += reply.num_cached_tokens > 0
        num_tokens += reply.num_prompt_tokens
        num_cached += reply.num_cached_tokens
        has_visited.add(user)
        lengths[user] += rng.integers(1, 4)
        if number % 12 == 11:
            progress(f"{number + 1} of {len(visits)} visits")
    return {
        "hit_ratio": round(num_hits / num_returns, 4),
        "saved_tokens_share": round(num_cached / num_tokens, 4),
        "num_requests": len(visits),
        "num_returning_requests": num_returns,
        "num_prompt_tokens": num_tokens,
        "num_cached_tokens": num_cached,
        "evicted_pages": engine.describe()["num_prefix_evicted_pages"],
    }


def hit_and_miss(engine: Engine, sizes: Sizes, rng: np.random.Generator) -> dict[str, Any]:
    """Milliseconds of a request that finds the visit before in the cache, and of one that finds nothing."""
    num_items = sizes.timed_tokens // 3
    times: dict[str, list[float]] = {"hit": [], "miss": []}
    cached, worst = [], 0.0
    for run in range(sizes.runs + 1):
        history = rng.integers(0, NUM_ITEMS, num_items)
        replies = {}
        for case in ("hit", "miss") if run % 2 else ("miss", "hit"):
            engine.reset_prefix_cache()
            if case == "hit":
                ask(engine, history[: -int(rng.integers(1, 4))], sizes.width)
            replies[case] = ask(engine, history, sizes.width)
        worst = max(worst, difference(replies["hit"], replies["miss"]))
        if not replies["hit"].num_cached_tokens or replies["miss"].num_cached_tokens:
            raise SystemExit("a hit found nothing, or a miss something")
        cached.append(replies["hit"].num_cached_tokens)
        if run:  # the first warms up
            for case, reply in replies.items():
                times[case].append(reply.timings.total_ms)
    timings = {case: Timing.of(each) for case, each in times.items()}
    return {
        "time_ratio_hit_to_miss": round(timings["hit"].median_ms / timings["miss"].median_ms, 4),
        "timed_prompt_tokens": 1 + 3 * num_items,
        "timed_cached_tokens": float(np.median(cached)),
        "largest_score_difference": worst,
        "timings_ms": {case: vars(timing) for case, timing in timings.items()},
    }


def difference(hit: RecResult, miss: RecResult) -> float:
    """The largest difference of scores; ends the run where the lists are not the same."""
    one, two = hit.results[0], miss.results[0]
    if not np.array_equal(one.item_ids, two.item_ids):
        raise SystemExit(f"hit and miss differ: {one.item_ids} and {two.item_ids}")
    error = float(np.abs(one.scores - two.scores).max())
    if error > MAX_SCORE_ERROR:
        raise SystemExit(f"scores of hit and miss differ by {error}")
    return error


def run(sizes: Sizes, seed: int) -> dict[str, Any]:
    """Everything, the figures with a required value first."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder, make_engine(Path(folder), sizes, seed) as engine:
        shares = traffic(engine, sizes, rng)
        timed = hit_and_miss(engine, sizes, rng)
    first = {name: shares.pop(name) for name in ("hit_ratio", "saved_tokens_share")}
    ratio = {"time_ratio_hit_to_miss": timed.pop("time_ratio_hit_to_miss")}
    return {
        **first,
        **ratio,
        **timed,
        **shares,
        "sizes": vars(sizes),
        "seed": seed,
        "environment": environment(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    default = Sizes()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--runs", type=whole(MIN_RUNS, MAX_COUNT), default=default.runs, help=f"at least {MIN_RUNS}"
    )
    parser.add_argument("--layers", type=whole(1, MAX_COUNT), default=default.num_layers)
    parser.add_argument("--hidden-size", type=whole(1, MAX_COUNT), default=default.hidden_size)
    parser.add_argument(
        "--width", type=whole(1, MAX_COUNT), default=default.width, help="beam width"
    )
    parser.add_argument("--users", type=whole(1, MAX_COUNT), default=default.num_users)
    parser.add_argument(
        "--visits", type=whole(1, MAX_COUNT), default=default.num_visits, help="of each user"
    )
    parser.add_argument(
        "--tokens",
        type=whole(1, MAX_COUNT),
        nargs=2,
        default=(default.least_tokens, default.most_tokens),
        metavar=("LEAST", "MOST"),
        help="of a user's history at the first visit",
    )
    parser.add_argument("--timed-tokens", type=whole(1, MAX_COUNT), default=default.timed_tokens)
    parser.add_argument("--cache-bytes", type=whole(0, NO_LIMIT), default=default.cache_bytes)
    parser.add_argument("--seed", type=whole(0, NO_LIMIT), default=0)
    add_output_arguments(parser)
    args = parser.parse_args(arguments)
    sizes = Sizes(
        num_layers=args.layers,
        hidden_size=args.hidden_size,
        width=args.width,
        num_users=args.users,
        num_visits=args.visits,
        least_tokens=args.tokens[0],
        most_tokens=args.tokens[1],
        timed_tokens=args.timed_tokens,
        cache_bytes=args.cache_bytes,
        runs=args.runs,
    )
    write_report(run(sizes, args.seed), args)
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code_of(main))
