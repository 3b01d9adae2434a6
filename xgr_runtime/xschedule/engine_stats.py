"""What an engine is and holds at one moment, and what it did since its start: plain data for metrics."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xgr_runtime.xschedule.totals import Totals


@dataclass(frozen=True)
class CatalogStats:
    """The active version of a catalogue. age_s: seconds since it was activated. num_versions: loaded at once."""

    name: str
    version: str
    age_s: float
    num_items: int
    num_versions: int


@dataclass(frozen=True)
class EngineStats:
    """totals: since the engine was warm. num_waiting: accepted and in no batch yet; num_running: in batches in flight.

    Pages of history KV: num_pages without the null page; in use are those that running requests hold, cached those that
    the prefix cache can find again. Beam rows: num_rows of a full batch; in use are those of the batches in flight.
    providers: bound providers by op; reference_ops: ops that run on the torch reference. num_eager_segments: of batches, that ran
    op by op since no graph had been captured for them. graph_bytes: what the device had less after its graphs were captured.
    """

    device_kind: str
    device_name: str
    model: str
    model_version: str
    template_version: str
    totals: Totals
    num_waiting: int
    num_running: int
    num_pages: int
    num_pages_in_use: int
    num_cached_pages: int
    num_evicted_pages: int
    num_rows: int
    num_rows_in_use: int
    catalogs: tuple[CatalogStats, ...]
    providers: Mapping[str, tuple[str, ...]]
    num_reference_ops: int
    num_graph_captures: int
    num_graphs: int
    num_eager_segments: int
    graph_bytes: int
    memory_used_bytes: int
    memory_peak_bytes: int


def describe(
    stats: EngineStats, catalogs: Mapping[str, Any], buckets: Mapping[str, Any]
) -> dict[str, Any]:
    """The same for people and JSON; catalogs: what the store says of its versions; buckets: the sizes that graphs have."""
    return {
        "device": {"kind": stats.device_kind, "name": stats.device_name},
        "memory": {"used_bytes": stats.memory_used_bytes, "peak_bytes": stats.memory_peak_bytes},
        "model": {"name": stats.model, "version": stats.model_version},
        "template_version": stats.template_version,
        "catalogs": catalogs,
        "ops": {name: list(bound) for name, bound in stats.providers.items()},
        "num_reference_ops": stats.num_reference_ops,
        "graphs": {
            "num_graphs": stats.num_graphs,
            "num_captures": stats.num_graph_captures,
            "num_eager_segments": stats.num_eager_segments,
            "bytes": stats.graph_bytes,
            **buckets,
        },
        **stats.totals.describe(),
        "num_waiting": stats.num_waiting,
        "num_running": stats.num_running,
        "num_unanswered": stats.num_waiting + stats.num_running,
        "num_free_pages": stats.num_pages - stats.num_pages_in_use,
        "num_cached_pages": stats.num_cached_pages,
        "num_pages_in_use": stats.num_pages_in_use,
        "num_prefix_evicted_pages": stats.num_evicted_pages,
    }
