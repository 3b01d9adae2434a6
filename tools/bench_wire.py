"""What the shape of the reply costs: building and serialising one reply as struct of arrays and as repeated messages.

The repeated form is the obvious one (a message per item with id, codes, score); it exists only here, made at run time. Both
replies hold the same rows, which is asserted first. Each side starts from the engine's arrays and ends with bytes.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools._bench.command import MAX_COUNT, exit_code_of, whole
from tools._bench.timing import MIN_RUNS, Timing, environment, ratio, time_interleaved
from xgr_runtime.service._pb.xgr.v1 import recommend_pb2 as pb
from xgr_runtime.service.translate_result import result_from_proto, result_to_proto
from xgr_runtime.types import RecResult, SearchResult, Timings

REPEATS = 20  # replies per timed run: one struct of arrays is too short for the clock alone


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--items", type=whole(1, MAX_COUNT), default=512)
    parser.add_argument("--levels", type=whole(1, MAX_COUNT), default=3)
    parser.add_argument(
        "--runs", type=whole(MIN_RUNS, MAX_COUNT), default=31, help=f"at least {MIN_RUNS}"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    report = measure(args.items, args.levels, max(args.runs, MIN_RUNS))
    if args.json:
        print(json.dumps({**report, "environment": environment()}))
        return 0
    for name, value in report.items():
        print(f"{name}: {value}")
    return 0


def measure(num_items: int, num_levels: int, runs: int) -> dict[str, Any]:
    """Times both forms; ratios are repeated over struct of arrays (above 1 = arrays are cheaper)."""
    result = random_result(num_items, num_levels)
    fill = repeated_form()
    assert_same_rows(result, fill)
    cases: dict[str, Callable[[], object]] = {
        "arrays": lambda: [result_to_proto(result).SerializeToString() for _ in range(REPEATS)],
        "repeated": lambda: [fill(result).SerializeToString() for _ in range(REPEATS)],
    }
    timings = time_interleaved(cases, runs)
    return {
        "num_items": num_items,
        "num_levels": num_levels,
        "arrays_us": _per_reply(timings["arrays"]),
        "repeated_us": _per_reply(timings["repeated"]),
        "repeated_ratio_to_arrays": ratio(timings, "repeated", "arrays"),
        "arrays_bytes": len(result_to_proto(result).SerializeToString()),
        "repeated_bytes": len(fill(result).SerializeToString()),
        "runs": timings["arrays"].runs,
    }


def random_result(num_items: int, num_levels: int) -> RecResult:
    """A reply of one search without keys."""
    rng = np.random.default_rng(0)
    found = SearchResult(
        item_ids=rng.integers(0, 2**40, num_items),
        keys=None,
        sids=rng.integers(0, 8192, (num_items, num_levels)).astype(np.uint32),
        scores=np.sort(-rng.random(num_items).astype(np.float32) * 20)[::-1],
        level_scores=None,
        num_valid=num_items,
        num_items=num_items,
        status="ok",
        reason="",
        catalog="bench",
        catalog_version="1",
        normalization="vocab",
        temperature=1.0,
        beam_widths=(num_items,) * num_levels,
        num_unknown_exclusions=0,
    )
    return RecResult("bench", (found,), 50, 0, 150, 0, "m", "t", Timings(1.0, 2.0, 3.0))


def repeated_form() -> Callable[[RecResult], Any]:
    """Builds the throw-away message; returns the function that fills one from a result."""
    file = descriptor_pb2.FileDescriptorProto(
        name="bench_wire.proto", package="bench", syntax="proto3"
    )
    kinds = descriptor_pb2.FieldDescriptorProto
    item = file.message_type.add(name="Item")
    item.field.add(name="item_id", number=1, type=kinds.TYPE_INT64, label=kinds.LABEL_OPTIONAL)
    item.field.add(name="sid", number=2, type=kinds.TYPE_UINT32, label=kinds.LABEL_REPEATED)
    item.field.add(name="score", number=3, type=kinds.TYPE_FLOAT, label=kinds.LABEL_OPTIONAL)
    reply = file.message_type.add(name="Reply")
    items = reply.field.add(name="items", number=1, label=kinds.LABEL_REPEATED)
    items.type, items.type_name = kinds.TYPE_MESSAGE, ".bench.Item"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    reply_type: Any = message_factory.GetMessageClass(pool.FindMessageTypeByName("bench.Reply"))

    def fill(result: RecResult) -> Any:
        (found,) = result.results
        message = reply_type()
        rows = zip(found.item_ids.tolist(), found.sids.tolist(), found.scores.tolist(), strict=True)
        for item_id, sid, score in rows:
            message.items.add(item_id=item_id, sid=sid, score=score)
        return message

    return fill


def assert_same_rows(result: RecResult, fill: Callable[[RecResult], Any]) -> None:
    """Both forms, read back from their bytes, hold the rows of the result."""
    (expected,) = result.results
    data = result_to_proto(result).SerializeToString()
    (got,) = result_from_proto(pb.RecommendResponse.FromString(data)).results
    message = fill(result)
    items = type(message).FromString(message.SerializeToString()).items
    assert got.item_ids.tolist() == [i.item_id for i in items] == expected.item_ids.tolist()
    assert got.sids.tolist() == [list(i.sid) for i in items] == expected.sids.tolist()
    assert got.scores.tolist() == [i.score for i in items] == expected.scores.tolist()


def _per_reply(timing: Timing) -> dict[str, float]:
    """Microseconds per reply: median and the 20th and 80th percentile."""
    scale = 1e3 / REPEATS
    return {
        "median": round(timing.median_ms * scale, 2),
        "p20": round(timing.p20_ms * scale, 2),
        "p80": round(timing.p80_ms * scale, 2),
    }


if __name__ == "__main__":
    raise SystemExit(exit_code_of(main))
