"""Exports the metrics of the table: what calls and engine counted, read when somebody asks, in a registry of its own.

The hot paths count plain numbers (`CallTotals`, `Totals`); prometheus-client only sees them here, on the thread of the
scrape. A server has one registry; the process-wide one of prometheus-client is never touched.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import grpc
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from xgr_runtime import __version__
from xgr_runtime.errors import printable
from xgr_runtime.service.call_totals import CAUSES, CallTotals
from xgr_runtime.service.metric_table import TABLE, Metric
from xgr_runtime.xschedule.engine_stats import EngineStats
from xgr_runtime.xschedule.histogram import Histogram
from xgr_runtime.xschedule.totals import SEARCH_ENDS, Totals

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text"
OPENMETRICS_TYPE = f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
OTHER_CATALOG = "other"
MAX_LABEL = 80  # characters

# Samples of one metric: label values in the table's order, and the value. An info's value is 1.
Samples = Sequence[tuple[tuple[str, ...], float | Histogram]]


class ServiceMetrics:
    """Renders metrics. catalog_names: those of the configuration; searches of others count as "other".

    stats is called on the thread that renders, which may be any.
    """

    def __init__(
        self, calls: CallTotals, stats: Callable[[], EngineStats], catalog_names: Collection[str]
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_TableCollector(calls, stats, tuple(catalog_names)))

    def render(self, accept: str) -> tuple[str, bytes]:
        """Content type and text: OpenMetrics for a client that accepts it, else Prometheus's text format 0.0.4."""
        if OPENMETRICS in accept:
            return OPENMETRICS_TYPE, generate_openmetrics(self.registry)  # type: ignore[no-untyped-call]
        return TEXT_TYPE, generate_latest(self.registry)


class _TableCollector(Collector):
    def __init__(
        self, calls: CallTotals, stats: Callable[[], EngineStats], catalog_names: tuple[str, ...]
    ) -> None:
        self._calls, self._stats, self._catalog_names = calls, stats, catalog_names

    def describe(self) -> Iterator[Family]:
        """The families without samples: registering must not ask the engine."""
        return iter([_family(metric, ()) for metric in TABLE])

    def collect(self) -> Iterator[Family]:
        stats = self._stats()
        samples = {
            **_call_samples(self._calls.copy()),
            **_total_samples(stats.totals, self._catalog_names),
            **_batch_samples(stats.totals),
            **_state_samples(stats, self._catalog_names),
        }
        for metric in TABLE:
            yield _family(metric, samples[metric.name])


def _family(metric: Metric, samples: Samples) -> Family:
    if metric.kind == "info":
        info = InfoMetricFamily(metric.name.removesuffix("_info"), metric.meaning)
        for labels, _ in samples:
            info.add_metric([], dict(zip(metric.labels, labels, strict=True)))
        return info
    names = metric.labels
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(
            metric.name, metric.meaning, labels=names, unit=metric.unit
        )
        for labels, value in samples:
            assert isinstance(value, Histogram), metric.name
            histogram.add_metric(labels, _buckets(value), value.sum)
        return histogram
    of_kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = of_kind(metric.name, metric.meaning, labels=names, unit=metric.unit)
    for labels, value in samples:
        assert not isinstance(value, Histogram), metric.name
        family.add_metric(labels, value)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    buckets, num_values = [], 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        num_values += count
        buckets.append((floatToGoString(bound), float(num_values)))  # type: ignore[no-untyped-call]
    return buckets


def _one(value: float | Histogram) -> Samples:
    return [((), value)]


def _call_samples(calls: CallTotals) -> Mapping[str, Samples]:
    codes = [code.name for code in grpc.StatusCode]
    return {
        "xgr_requests_total": [((code,), calls.by_code[code]) for code in codes],
        "xgr_failed_requests_total": [((cause,), calls.by_cause[cause]) for cause in CAUSES],
        "xgr_in_flight_requests": _one(calls.num_in_flight),
        "xgr_request_duration_seconds": _one(calls.seconds),
    }


def _total_samples(totals: Totals, catalog_names: tuple[str, ...]) -> Mapping[str, Samples]:
    searches = {(name, end): 0 for name in (*catalog_names, OTHER_CATALOG) for end in SEARCH_ENDS}
    for (name, end), count in totals.searches.items():
        searches[name if name in catalog_names else OTHER_CATALOG, end] += count
    asked, valid = totals.num_beams_asked, totals.num_beams_valid
    return {
        "xgr_batches_total": [
            (("ok",), totals.num_batches),
            (("failed",), totals.num_failed_batches),
        ],
        "xgr_searches_total": [((name, end), count) for (name, end), count in searches.items()],
        "xgr_asked_items_total": _one(totals.num_items_asked),
        "xgr_returned_items_total": _one(totals.num_items_returned),
        "xgr_asked_beams_total": _one(asked),
        "xgr_valid_beams_total": _one(valid),
        "xgr_valid_beams_ratio": _one(valid / asked) if asked else (),
        "xgr_dead_beams_total": _one(totals.num_dead_beams),
        "xgr_expanded_rows_total": _one(totals.num_live_rows),
        "xgr_skipped_rows_total": _one(totals.num_rows_skipped),
        "xgr_prefix_hit_requests_total": _one(totals.num_prefix_hits),
        "xgr_prefix_lookup_tokens_total": _one(totals.num_prefix_lookup_tokens),
        "xgr_prefix_cached_tokens_total": _one(totals.num_prefix_cached_tokens),
    }


def _batch_samples(totals: Totals) -> Mapping[str, Samples]:
    found = totals.histograms
    return {
        "xgr_queue_wait_seconds": _one(found.queue_s),
        "xgr_batch_duration_seconds": _one(found.batch_s),
        "xgr_batch_histories": _one(found.num_histories),
        "xgr_batch_tokens": _one(found.num_tokens),
        "xgr_batch_rows": _one(found.num_rows),
        "xgr_prefill_seconds": _one(found.prefill_s),
        "xgr_round_seconds": [((str(level),), h) for level, h in sorted(found.round_s.items())],
        "xgr_rounds_seconds": _one(found.all_rounds_s),
        "xgr_select_seconds": [((str(level),), h) for level, h in sorted(found.select_s.items())],
        "xgr_copy_seconds": [
            (("to_device",), found.to_device_s),
            (("to_host",), found.to_host_s),
        ],
    }


def _state_samples(stats: EngineStats, catalog_names: tuple[str, ...]) -> Mapping[str, Samples]:
    catalogs = [catalog for catalog in stats.catalogs if catalog.name in catalog_names]
    runtime = (
        __version__,
        stats.device_kind,
        stats.model,
        stats.model_version,
        stats.template_version,
    )
    return {
        "xgr_waiting_requests": _one(stats.num_waiting),
        "xgr_running_requests": _one(stats.num_running),
        "xgr_catalog_info": [((c.name, _cut(c.version)), 1) for c in catalogs],
        "xgr_catalog_age_seconds": [((c.name,), c.age_s) for c in catalogs],
        "xgr_catalog_items": [((c.name,), c.num_items) for c in catalogs],
        "xgr_catalog_versions": [((c.name,), c.num_versions) for c in catalogs],
        "xgr_prefix_evicted_pages_total": _one(stats.num_evicted_pages),
        "xgr_prefix_cached_pages": _one(stats.num_cached_pages),
        "xgr_kv_pages": _one(stats.num_pages),
        "xgr_kv_used_pages": _one(stats.num_pages_in_use),
        "xgr_kv_rows": _one(stats.num_rows),
        "xgr_kv_used_rows": _one(stats.num_rows_in_use),
        "xgr_device_memory_bytes": [
            (("used",), stats.memory_used_bytes),
            (("peak",), stats.memory_peak_bytes),
        ],
        "xgr_op_provider_info": [
            ((op, provider), 1) for op, bound in stats.providers.items() for provider in bound
        ],
        "xgr_reference_ops": _one(stats.num_reference_ops),
        "xgr_captured_graphs_total": _one(stats.num_graph_captures),
        "xgr_graphs": _one(stats.num_graphs),
        "xgr_graph_memory_bytes": _one(stats.graph_bytes),
        "xgr_eager_segments_total": _one(stats.num_eager_segments),
        "xgr_runtime_info": [(tuple(map(_cut, runtime)), 1)],
    }


def _cut(text: str) -> str:
    """A version or name that stands in one series only, so that cutting it cannot make two series of one name."""
    return printable(text, MAX_LABEL)
