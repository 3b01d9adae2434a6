"""What the committed figures of one H200 are to reach, and whether they do. Of times and shares: `level`, unless it says both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tools._bench.engine_rows import NORMALIZATIONS, ROWS, Row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tools._bench.results import Results

ATTENTION_MS = {"8 x 512 x 1024": 0.100, "8 x 256 x 5000": 0.165}  # histories x beams x tokens
VOCAB_OVER_FLOORS = 1.08
CONSTRAINED_OVER_FREE = 1.05
SHARES = {128: 0.58, 256: 0.62, 512: 0.62, 1024: 0.62}  # by width: 0.6B, 8 requests of 1,024
BEYOND_WEIGHTS_MIB, PEAK_GB = 2048, 10.6
MIB_PER_GB = 1e9 / 2**20
BUSY, START_S = 0.97, 90.0


@dataclass(frozen=True)
class Target:
    """limit: at least, or at most where is_most. figure: None where it is not measured. form: of both, as str.format takes it."""

    what: str
    limit: float
    figure: float | None
    form: str
    is_most: bool = True

    @property
    def is_met(self) -> bool | None:
        """None where nothing is measured."""
        if self.figure is None:
            return None
        return self.figure <= self.limit if self.is_most else self.figure >= self.limit

    @property
    def words(self) -> tuple[str, str, str]:
        """The limit, the figure, and what that means."""
        figure = "-" if self.figure is None else self.form.format(self.figure)
        verdict = {None: "not measured", True: "yes", False: "**no**"}[self.is_met]
        return f"{'<=' if self.is_most else '>='} {self.form.format(self.limit)}", figure, verdict


def targets(results: Results) -> list[Target]:
    """All of them, in the order of the table."""
    found = {(row["row"], row["normalization"]): row for row in results.engine["rows"]}
    return [
        *_attention(results.ops),
        *(_of_row(row, found) for row in ROWS if row.target_ms is not None),
        *_ratios(found),
        *_shares(found),
        *_engines(results.engine),
    ]


Found = dict[tuple[str, str], dict[str, Any]]


def _attention(ops: dict[str, Any]) -> Iterator[Target]:
    for label, limit in ATTENTION_MS.items():
        times = [
            row["median_ms"]
            for row in ops["rows"]
            if (row["op"], row["label"], row["is_bound"]) == ("beam_attention", label, True)
        ]
        what = f"attention of a layer, shared, own and merged, {label}"
        yield Target(what, limit, times[0] if times else None, "{:.3f} ms")


def _of_row(row: Row, found: Found) -> Target:
    assert row.target_ms is not None
    figures = found.get((row.name, "level"))
    return Target(row.name, row.target_ms, figures["median_ms"] if figures else None, "{:.2f} ms")


def _ratios(found: Found) -> Iterator[Target]:
    """Each the largest of all that there are."""
    over_floors = []
    for row in ROWS:
        level, vocab = (found.get((row.name, how)) for how in NORMALIZATIONS)
        if level and vocab:
            times, floors = (vocab[key] / level[key] for key in ("median_ms", "floor_ms"))
            over_floors.append(times / floors)
    what = "`vocab` over `level`, over the same of the floors, largest of all rows"
    yield Target(what, VOCAB_OVER_FLOORS, max(over_floors, default=None), "{:.3f}")
    (free,) = (row for row in ROWS if row.kind == "unconstrained")
    (bound,) = (row for row in ROWS if row.kind == "rules")
    ratios = [
        found[bound.name, how]["median_ms"] / found[free.name, how]["median_ms"]
        for how in NORMALIZATIONS
        if (bound.name, how) in found and (free.name, how) in found
    ]
    what = "constrained, rules on, over unconstrained, the larger of both normalisations"
    yield Target(what, CONSTRAINED_OVER_FREE, max(ratios, default=None), "{:.3f}")


def _shares(found: Found) -> Iterator[Target]:
    for width, limit in SHARES.items():
        row = Row("qwen3-0.6B", width, 1024, 8)
        figures = found.get((row.name, "level"))
        share = figures["floor_ms"] / figures["median_ms"] if figures else None
        yield Target(f"{row.name}: share of the floor", limit, share, "{:.1%}", is_most=False)


def _engines(engine: dict[str, Any]) -> Iterator[Target]:
    memory, load = engine.get("memory") or {}, engine.get("load") or {}
    what = "device memory beyond weights, 0.6B, 512 beams, one request of 3,000 tokens"
    yield Target(what, BEYOND_WEIGHTS_MIB, memory.get("beyond_weights_mib"), "{:,.0f} MiB")
    peak = load.get("peak_reserved_mib")
    what = "peak reserved under load, 0.6B, batches of 8, weights and items included"
    yield Target(what, PEAK_GB, None if peak is None else peak / MIB_PER_GB, "{:.1f} GB")
    busy = load.get("busy_share")
    yield Target("device busy under that load", BUSY, busy, "{:.1%}", is_most=False)
    for name, part in (("memory", memory), ("load", load)):
        start = part.get("start") or {}
        what = f"start of the {name} engine, all its graphs captured"
        yield Target(what, START_S, start.get("seconds"), "{:.0f} s")
