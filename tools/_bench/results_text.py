"""The committed results as text for the README."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from tools._bench.engine_rows import ROWS, Row
from tools._bench.results import ENGINE, OPS, Results, engine_row, without_figure
from tools._bench.results_targets import MIB_PER_GB, targets

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PLOT = "engine_h200.svg"
# Measured or published by others for the same model, width and number of requests; milliseconds.
OTHERS: dict[str, tuple[tuple[str, float], ...]] = {
    "0.6B-w512-h1024-b1": (("FlashRec", 60), ("Hugging Face", 3838)),
    "0.6B-w512-h1024-b8": (("FlashRec", 280),),
    "1.7B-w256-h1000-b1": (("FlashRec", 63), ("NVIDIA", 17.6)),
    "1.7B-w256-h1000-b8": (("FlashRec", 219), ("NVIDIA", 93.2)),
    "1.7B-w256-h5000-b1": (("FlashRec", 128), ("NVIDIA", 42.3)),
    "1.7B-w256-h5000-b8": (("FlashRec", 882), ("NVIDIA", 307.9)),
    "1.7B-w128-h1024-b1-miss": (("vLLM-GR", 55.9),),
    "1.7B-w128-h1024-b1-hit": (("vLLM-GR", 30.8),),
}
OTHERS_TEXT = (
    "FlashRec 0.1.2 (histories of 1,000 and 5,000 tokens; bf16) and Hugging Face `generate` 5.17 with a prefix function were "
    "measured on such a card on 2026-11-29. NVIDIA: its own table for SID-GR inference on an H100. vLLM-GR: its engineers' "
    "medians for OneRec-1.7B on an L20, a much smaller card."
)
KINDS = {
    "search": "",
    "miss": ", prefix cache on, nothing cached",
    "hit": ", first 1,000 tokens asked before",
    "rules": ", rules in every request",
    "unconstrained": ", no catalogue: exact top W of W x 8,192",
}
# (op, label, how it is called in the table)
SHOWN_OPS = (
    ("beam_attention", "*"),
    ("prefill_attention", "*"),
    ("head_logsumexp", "*4096 rows*"),
    ("select_beams", "8 x 512*"),
    ("linear_silu_mul", "*4096 rows"),
    ("reorder_unshared_kv", "8 x 512*"),
)
NOTHING = f"""\
No run is committed yet. On an H200, `python tools/bench_ops.py --out tools/results/{OPS}` and
`python tools/bench_engine.py --out tools/results/{ENGINE}` measure, and
`python tools/plot_results.py` writes this section."""


def section(results: Results | None) -> str:
    """What stands between the marks of the README."""
    if results is None:
        return NOTHING
    parts = (
        _introduction(results.engine),
        f"![milliseconds of a batch beside its counted floor](tools/results/{PLOT})",
        "\n".join(_engine_table(results)),
        f"At the caller: from the first request's submission to the last answer, one batch after the other. Others, in milliseconds: "
        f"{OTHERS_TEXT}",
        "\n".join(_target_table(results)),
        "\n".join(_lines(results)),
        "\n".join(_op_table(results.ops)),
        "\n".join(_nothing_of(results)),
    )
    return "\n\n".join(part for part in parts if part)


def _target_table(results: Results) -> Iterator[str]:
    yield "| what | target | figure | met |"
    yield "|---|---|---|---|"
    for target in targets(results):
        yield f"| {target.what} | {' | '.join(target.words)} |"


def _nothing_of(results: Results) -> Iterator[str]:
    """What has no figure, and the first line of why."""
    for what, report in (("engine", results.engine), ("ops", results.ops)):
        for name, reason in without_figure(report).items():
            first = (reason.strip("[]'\" ").splitlines() or [""])[0][:160].replace("|", "/")
            yield f"- no figure, {what}: {name}: {first}"


def _introduction(report: dict[str, Any]) -> str:
    e = report["environment"]
    return (
        f"{e['device']}, driver {e['driver']}, torch {e['torch']}, triton {e['triton']}, bf16, commit {report['commit']}, "
        f"{e['date']} UTC. On that day a product of 8192^3 ran at {e['bf16_product_tflops']} TFLOP/s and a copy within the "
        f"device at {e['copy_tb_per_s']} TB/s. Random weights of the named sizes, {report['catalog']['items']:,} random items "
        f"({report['catalog']['codes']} codes), three levels, histories that no run had seen before; milliseconds on the device from the first copy of a batch's inputs to "
        "the end of the copy of its outcome, medians (20th to 80th percentile) of "
        f"{' to '.join(map(str, _ends(row['runs'] for row in report['rows'])))} runs. Before anything is timed, answers to "
        f"{' or '.join(map(str, _ends(row['checked_requests'] for row in report['rows'])))} requests of every row's batch are "
        "compared with a plain torch decoder in float32, within the tolerances of `xgr_runtime/hal/tolerances.py`. `level` "
        "normalises a beam's scores over the codes of its level, `vocab` over the whole vocabulary. The floor is the batch's "
        f"counted floating-point operations at {report['floor_tflops']:g} TFLOP/s, the most that a product reached on such a card "
        "on 2026-11-29; the share is the floor over the time."
    )


def _ends(numbers: Iterable[int]) -> list[int]:
    found = sorted(set(numbers))
    return found if len(found) < 3 else [found[0], found[-1]]


def _engine_table(results: Results) -> Iterator[str]:
    yield "| model | beams | history x requests | `level` ms | of the floor | at the caller | `vocab` ms | of the floor | at the caller | others |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in ROWS:
        cells = []
        for normalization in ("level", "vocab"):
            found = engine_row(results, row, normalization)
            share = found and f"{found['floor_ms'] / found['median_ms']:.0%}"
            wall = found and f"{found['wall_median_ms']:.2f}"
            cells += [_spread(found) if found else "not measured", share or "", wall or ""]
        others = ", ".join(f"{who} {ms:,g}" for who, ms in OTHERS.get(row.name, ()))
        what = f"{row.history:,} x {row.requests}{KINDS[row.kind]}"
        yield f"| {row.model} | {row.width:,} | {what} | {' | '.join(cells)} | {others} |"


def _spread(row: dict[str, Any]) -> str:
    low, median, high = (f"{row[name]:.2f}" for name in ("p20_ms", "median_ms", "p80_ms"))
    return f"{median} ({low}-{high})"


def _lines(results: Results) -> Iterator[str]:
    """Ratios, memory and how busy the device is, as far as they are measured."""
    for name in ("0.6B-w512-h1024-b8", "1.7B-w256-h1000-b8"):
        row = _named(name)
        level, vocab = (engine_row(results, row, n) for n in ("level", "vocab"))
        if level and vocab:
            times, floors = (vocab[key] / level[key] for key in ("median_ms", "floor_ms"))
            yield f"- `vocab` over `level`, {_words(row)}: {times:.3f}; of the floors {floors:.3f}"
    free = engine_row(results, _named("0.6B-w512-h1024-b8-unconstrained"), "level")
    for name, what in (("", "no rules"), ("-rules", "rules in every request")):
        found = engine_row(results, _named("0.6B-w512-h1024-b8" + name), "level")
        if found and free:
            share, wall = (found[key] / free[key] for key in ("median_ms", "wall_median_ms"))
            yield (
                f"- the catalogue of {found['items']:,} items, {what}, over no catalogue: {share:.3f}; at the caller, where "
                f"requests are prepared before the batch and ranked behind it, {wall:.3f}"
            )
    memory, load = results.engine.get("memory"), results.engine.get("load")
    if memory:
        yield (
            f"- device memory beyond weights, {memory['model']}, {memory['width']} beams, one request of {memory['history']:,} "
            f"tokens: {memory['beyond_weights_mib']:,.0f} MiB reserved; {_start(memory)}"
        )
    if load:
        yield (
            f"- under load, {load['model']}, {load['width']} beams, {load['requests']} requests of {load['history']:,} tokens a batch, "
            f"{load['max_batches_in_flight']} batches in flight: {load['peak_reserved_mib'] / MIB_PER_GB:.1f} GB reserved at most, "
            f"weights and catalogue included; {load['requests_per_s']:,.0f} requests a second; the device works "
            f"{load['busy_share']:.1%} of {load['seconds']:.1f} s; {_start(load)}"
        )


def _start(part: dict[str, Any]) -> str:
    start = part["start"]
    compiled = start.get("kernels_compiled_before")
    count = f"{compiled:,} " if compiled else ""  # of all that this machine has compiled by then
    kernels = "kernels compiled then" if compiled == 0 else f"{count}kernels compiled before"
    return f"started in {start['seconds']:.0f} s with {start['graphs']} graphs captured, {kernels}"


def _named(name: str) -> Row:
    return next(row for row in ROWS if row.name == name)


def _words(row: Row) -> str:
    return f"{row.model}, {row.width} beams, {row.requests} x {row.history:,} tokens"


def _op_table(report: dict[str, Any]) -> Iterator[str]:
    yield (
        f"An op's floor is the larger of its counted operations at {report['floor']['tflops']:g} TFLOP/s and its counted bytes at "
        f"{report['floor']['tb_per_s']:g} TB/s."
    )
    yield ""
    yield "| op, one layer | call | provider | ms | rate | of its floor | beside it, ms |"
    yield "|---|---|---|---|---|---|---|"
    for op, pattern in SHOWN_OPS:
        for row in report["rows"]:
            if row["op"] == op and fnmatchcase(row["label"], pattern) and row["is_bound"]:
                yield _op_line(row, report["rows"])


def _op_line(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    is_products = row["bound_by"] == "compute"
    rate = f"{row['tflops']:,.0f} TFLOP/s" if is_products else f"{row['gb_per_s']:,.0f} GB/s"
    others = [
        f"{'by its parts' if other['provider'] == 'parts' else other['provider']} {_short_time(other['median_ms'])}"
        for other in rows
        if (other["op"], other["label"]) == (row["op"], row["label"]) and not other["is_bound"]
    ]
    low, median, high = (_short_time(row[name]) for name in ("p20_ms", "median_ms", "p80_ms"))
    return (
        f"| `{row['op']}` | {row['label']} | {row['provider']} | {median} ({low}-{high}) | {rate} | "
        f"{row['share_of_floor']:.0%} | {'; '.join(others)} |"
    )


def _short_time(ms: float) -> str:
    """Three digits or more of a kernel's time."""
    return f"{ms:.3f}" if ms >= 0.1 else f"{ms:.4f}"
