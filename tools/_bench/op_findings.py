"""What the rows of `bench_ops` say together: stages or fused, reorder or ancestors, bound by memory or by products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tools._bench.floor import SHAPES
from tools._bench.op_work import RIDGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    Row = dict[str, Any]

MODEL = SHAPES["qwen3-0.6B"]


def findings(rows: Sequence[Row]) -> dict[str, Any]:
    """Comparisons within one run; one whose rows are missing is left out."""
    return {
        "staged_or_fused": _staged_or_fused(rows),
        "reorder_or_ancestors": _reorder_or_ancestors(rows),
        "memory_or_products": _memory_or_products(rows),
    }


def _median(rows: Sequence[Row], op: str, label: str, provider: str | None = None) -> float | None:
    """Of that provider, or of the one that is bound."""
    for row in rows:
        is_wanted = row["is_bound"] if provider is None else row["provider"] == provider
        if (row["op"], row["label"]) == (op, label) and is_wanted:
            return float(row["median_ms"])
    return None


def _staged_or_fused(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Of each fused op that also ran by its parts: the time of both."""
    found = []
    for row in rows:
        if row["is_bound"] and row["provider"] != "parts":
            staged = _median(rows, row["op"], row["label"], "parts")
            if staged is not None:
                times = {"fused_ms": row["median_ms"], "parts_ms": staged}
                found.append({"op": row["op"], "label": row["label"], **times})
    return found


def _reorder_or_ancestors(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Before the last round: moving the keys and values of all layers once, or reading them where the parents left them.

    ancestors_ms: what all layers take longer when their beams read slots of random parents instead of their own. That
    slots may be shared is assumed; they would have to be kept for as long as a child reads them.
    """
    found = []
    for row in rows:
        if row["op"] != "reorder_unshared_kv" or not row["is_bound"]:
            continue
        label = row["label"].split(",")[0]
        own = _median(rows, "unshared_attention", f"{label}, 1 own")
        through = _median(rows, "unshared_attention", f"{label}, 1 own, slots of random parents")
        gather = _median(rows, row["op"], row["label"], "torch gather into a second buffer")
        entry = {"label": label, "reorder_ms": row["median_ms"], "gather_ms": gather}
        if own is not None and through is not None:
            entry["ancestors_ms"] = round(MODEL.num_layers * (through - own), 4)
        found.append(entry)
    return found


def _memory_or_products(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """FLOPs a byte of a history's stage, read once for all beams and once for each, beside those from which products bound it."""
    found = []
    for row in rows:
        if row["op"] != "shared_attention" or not row["is_bound"]:
            continue
        beams = _median(rows, row["op"], row["label"], "torch flash, a beam at a time")
        group = MODEL.num_heads / MODEL.num_kv_heads
        found.append(
            {
                "label": row["label"],
                "flops_per_byte": row["flops_per_byte"],
                "flops_per_byte_of_a_beam_alone": group,  # 4 Q D L FLOPs over 2 x 2 G D L bytes
                "flops_per_byte_of_the_device": round(RIDGE, 1),
                "bound_by": row["bound_by"],
                "median_ms": row["median_ms"],
                "a_beam_at_a_time_ms": beams,
            }
        )
    return found
