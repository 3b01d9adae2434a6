"""The table against what is exported, both ways, and every number against the counts it was made from."""

from __future__ import annotations

from collections import Counter

import grpc
import prometheus_client
import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tests.service.scrape import by_label, make_stats, parse, value
from xgr_runtime.cli import main
from xgr_runtime.service.call_totals import CAUSES, CallTotals
from xgr_runtime.service.metric_table import TABLE, markdown_rows
from xgr_runtime.service.metrics import OPENMETRICS_TYPE, TEXT_TYPE, ServiceMetrics
from xgr_runtime.service.rpc_errors import REPLY_TOO_LARGE, REQUEST_TOO_LARGE, RpcFailure
from xgr_runtime.xschedule.engine_stats import CatalogStats, EngineStats
from xgr_runtime.xschedule.histogram import Histogram
from xgr_runtime.xschedule.stage_times import StageTimes
from xgr_runtime.xschedule.totals import SEARCH_ENDS, Totals

BY_NAME = {metric.name: metric for metric in TABLE}
TEXT, OPENMETRICS = "text/plain", "application/openmetrics-text; version=1.0.0"


def metrics_of(
    stats: EngineStats | None = None,
    calls: CallTotals | None = None,
    catalogs: tuple[str, ...] = ("films",),
) -> ServiceMetrics:
    found = stats or make_stats()
    return ServiceMetrics(calls or CallTotals(), lambda: found, catalogs)


def used_totals() -> Totals:
    """Each count another number."""
    totals = Totals(
        num_batches=7,
        num_failed_batches=2,
        num_live_rows=1001,
        num_rows_skipped=102,
        num_dead_beams=13,
        num_prefix_lookup_tokens=900,
        num_prefix_cached_tokens=300,
        num_prefix_hits=4,
        num_beams_asked=80,
        num_beams_valid=60,
        num_items_asked=50,
        num_items_returned=45,
    )
    totals.searches.update({("films", "full"): 3, ("films", "empty"): 1, ("books", "short"): 2})
    totals.histograms.queue_s.add(0.0021)
    totals.histograms.add_times(StageTimes(0.001, 0.2, ((0.1, 0.4),), ((0.05, 0.3),), 0.002))
    return totals


def test_what_is_exported_is_the_table() -> None:
    """Names, types, units and help, in the table's order; nothing beside them."""
    _, body = metrics_of(make_stats(totals=used_totals())).render(OPENMETRICS)
    families = list(parse_openmetrics(body.decode()))  # type: ignore[no-untyped-call]
    exported = [
        (
            family.name + {"counter": "_total", "info": "_info"}.get(family.type, ""),
            family.type,
            family.unit,
            family.documentation,
        )
        for family in families
    ]
    assert exported == [(m.name, m.kind, m.unit, m.meaning) for m in TABLE]
    assert len(BY_NAME) == len(TABLE)


@pytest.mark.parametrize("totals", [Totals(), used_totals()], ids=["fresh", "used"])
def test_every_sample_has_the_labels_of_the_table(totals: Totals) -> None:
    _, body = metrics_of(make_stats(totals=totals)).render(TEXT)
    families = {family.name: family for family in parse_text(body.decode())}
    seen = set()
    for metric in TABLE:
        family = families[metric.name.removesuffix("_total")]
        seen.add(family.name)
        assert family.type == ("gauge" if metric.kind == "info" else metric.kind)
        for sample in family.samples:
            labels = tuple(name for name in sample.labels if name != "le")
            assert sorted(labels) == sorted(metric.labels), sample
        has_none_yet = metric.labels == ("round",) or metric.name == "xgr_valid_beams_ratio"
        assert family.samples or (has_none_yet and not totals.num_batches)
    assert seen == set(families)


def test_names_end_in_their_unit() -> None:
    for metric in TABLE:
        if metric.kind == "info":
            assert metric.name.endswith("_info")
            assert metric.unit == ""
        else:
            assert metric.name.removesuffix("_total").endswith(f"_{metric.unit}")
            assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert metric.meaning.endswith(".")


def test_the_printed_table_has_a_row_each() -> None:
    rows = list(markdown_rows())
    assert len(rows) == len(TABLE) + 2
    assert {row.count("|") for row in rows} == {6}
    for row, metric in zip(rows[2:], TABLE, strict=True):
        assert row.startswith(f"| `{metric.name}` | {metric.kind} | {metric.unit} | ")


def test_every_number_of_the_totals() -> None:
    samples = parse(metrics_of(make_stats(totals=used_totals())).render(TEXT)[1])
    expected = {
        "xgr_expanded_rows_total": 1001,
        "xgr_skipped_rows_total": 102,
        "xgr_dead_beams_total": 13,
        "xgr_prefix_lookup_tokens_total": 900,
        "xgr_prefix_cached_tokens_total": 300,
        "xgr_prefix_hit_requests_total": 4,
        "xgr_asked_beams_total": 80,
        "xgr_valid_beams_total": 60,
        "xgr_valid_beams_ratio": 0.75,
        "xgr_asked_items_total": 50,
        "xgr_returned_items_total": 45,
        "xgr_queue_wait_seconds_count": 1,
        "xgr_queue_wait_seconds_sum": 0.0021,
        "xgr_prefill_seconds_sum": 0.2,
    }
    assert {name: value(samples, name) for name in expected} == expected
    assert by_label(samples, "xgr_batches_total", "outcome") == {"ok": 7, "failed": 2}
    assert by_label(samples, "xgr_round_seconds_sum", "round") == {"0": 0.1, "1": 0.4}
    assert by_label(samples, "xgr_select_seconds_sum", "round") == {"0": 0.05, "1": 0.3}
    copies = by_label(samples, "xgr_copy_seconds_sum", "direction")
    assert copies == {"to_device": 0.001, "to_host": 0.002}


def test_every_number_of_the_state() -> None:
    samples = parse(metrics_of().render(TEXT)[1])
    expected = {
        "xgr_waiting_requests": 3,
        "xgr_running_requests": 2,
        "xgr_kv_pages": 40,
        "xgr_kv_used_pages": 11,
        "xgr_prefix_cached_pages": 17,
        "xgr_prefix_evicted_pages_total": 5,
        "xgr_kv_rows": 256,
        "xgr_kv_used_rows": 96,
        "xgr_reference_ops": 1,
        "xgr_captured_graphs_total": 6,
        "xgr_graphs": 4,
        "xgr_eager_segments_total": 7,
        "xgr_graph_memory_bytes": 3000,
    }
    assert {name: value(samples, name) for name in expected} == expected
    films = {"catalog": "films"}
    assert value(samples, "xgr_catalog_info", version="v7", **films) == 1
    assert value(samples, "xgr_catalog_age_seconds", **films) == 12.5
    assert value(samples, "xgr_catalog_items", **films) == 150
    assert value(samples, "xgr_catalog_versions", **films) == 2
    memory = by_label(samples, "xgr_device_memory_bytes", "kind")
    assert memory == {"used": 1000, "peak": 2000}
    providers = {
        (dict(labels)["op"], dict(labels)["provider"])
        for name, labels in samples
        if name == "xgr_op_provider_info"
    }
    assert providers == {("select_beams", "numpy"), ("rms_norm", "cpu"), ("rms_norm", "reference")}
    (runtime,) = [dict(labels) for name, labels in samples if name == "xgr_runtime_info"]
    assert (runtime["device"], runtime["model"], runtime["model_version"]) == ("cpu", "tiny", "m1")


def test_a_histogram_is_cumulative() -> None:
    totals = Totals()
    waits = [0.0005, 0.001, 0.15, 0.199, 0.2, 0.2000001, 3.0, 99.0]
    for wait in waits:
        totals.histograms.queue_s.add(wait)
    samples = parse(metrics_of(make_stats(totals=totals)).render(TEXT)[1])
    name = "xgr_queue_wait_seconds"
    for bound in (*Histogram(totals.histograms.queue_s.bounds).bounds, float("inf")):
        le = prometheus_client.utils.floatToGoString(bound)  # type: ignore[no-untyped-call]
        expected = sum(wait <= bound for wait in waits)
        assert value(samples, f"{name}_bucket", le=le) == expected
    assert value(samples, f"{name}_count") == len(waits)
    assert value(samples, f"{name}_sum") == pytest.approx(sum(waits))


def test_labels_are_bounded_whatever_runs() -> None:
    """Catalogues that the configuration does not name share one value; versions are cut, escaped, and one at a time."""
    totals = Totals()
    totals.searches.update({(f"made up {i}", "full"): 1 for i in range(500)})
    totals.searches["films", "short"] = 4
    strange = 'v"\n\\' + "x" * 1000
    catalogs = (
        CatalogStats("films", strange, 1.0, 5, 1),
        CatalogStats("loaded by hand", "v", 1.0, 5, 1),
    )
    samples = parse(metrics_of(make_stats(totals=totals, catalogs=catalogs)).render(TEXT)[1])
    searches = {
        (dict(labels)["catalog"], dict(labels)["result"]): count
        for (name, labels), count in samples.items()
        if name == "xgr_searches_total"
    }
    assert set(searches) == {(name, end) for name in ("films", "other") for end in SEARCH_ENDS}
    assert {key: count for key, count in searches.items() if count} == {
        ("films", "short"): 4,
        ("other", "full"): 500,
    }
    infos = [dict(labels) for name, labels in samples if name == "xgr_catalog_info"]
    assert [info["catalog"] for info in infos] == ["films"]
    assert len(infos[0]["version"]) <= 100
    assert infos[0]["version"].startswith('v"\\n\\')
    assert [v for n, v in samples.items() if n[0] == "xgr_catalog_items"] == [5]


def test_calls_by_status_and_cause() -> None:
    code = grpc.StatusCode
    ends = {
        RpcFailure(code.INVALID_ARGUMENT, "x"): "invalid",
        RpcFailure(code.NOT_FOUND, "x"): "not_found",
        RpcFailure(code.RESOURCE_EXHAUSTED, "x"): "overload",
        RpcFailure(code.RESOURCE_EXHAUSTED, "x", reason=REPLY_TOO_LARGE): "reply_too_large",
        RpcFailure(code.RESOURCE_EXHAUSTED, "x", reason=REQUEST_TOO_LARGE): "request_too_large",
        RpcFailure(code.DEADLINE_EXCEEDED, "x"): "deadline",
        RpcFailure(code.UNAVAILABLE, "x"): "unavailable",
        RpcFailure(code.INTERNAL, "x"): "internal",
    }
    calls = CallTotals()
    codes: Counter[str] = Counter()
    causes: Counter[str] = Counter()
    for count, (failure, cause) in enumerate(ends.items(), start=1):
        for _ in range(count):
            calls.start()
            calls.end_failed(failure)
        codes[failure.code.name] += count
        causes[cause] += count
    for is_late in (True, True, False):
        calls.start()
        calls.end_cancelled(is_late=is_late)
    codes.update(DEADLINE_EXCEEDED=2, CANCELLED=1)
    causes.update(deadline=2, cancelled=1)
    for seconds in (0.1, 0.3):
        calls.start()
        calls.end_ok(seconds)
    codes["OK"] = 2
    calls.start()
    samples = parse(metrics_of(calls=calls).render(TEXT)[1])
    assert by_label(samples, "xgr_requests_total", "code") == codes
    assert by_label(samples, "xgr_failed_requests_total", "cause") == causes
    assert set(causes) == set(CAUSES)
    told = BY_NAME["xgr_failed_requests_total"].meaning
    assert [cause for cause in CAUSES if cause not in told] == []
    assert value(samples, "xgr_in_flight_requests") == 1
    assert value(samples, "xgr_request_duration_seconds_count") == 2
    assert value(samples, "xgr_request_duration_seconds_sum") == pytest.approx(0.4)
    assert value(samples, "xgr_request_duration_seconds_bucket", le="0.2") == 1


def test_the_process_wide_registry_is_not_touched() -> None:
    before = set(prometheus_client.REGISTRY._names_to_collectors)
    one, two = metrics_of(make_stats(num_waiting=1)), metrics_of(make_stats(num_waiting=2))
    for metrics, expected in ((one, 1), (two, 2)):
        samples = parse(metrics.render(TEXT)[1])
        assert value(samples, "xgr_waiting_requests") == expected
        assert not any(name.startswith(("python_", "process_")) for name, _ in samples)
    assert set(prometheus_client.REGISTRY._names_to_collectors) == before


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", TEXT_TYPE),
        ("*/*", TEXT_TYPE),
        ("text/plain;version=99999.x;escaping=\x00", TEXT_TYPE),
        (OPENMETRICS, OPENMETRICS_TYPE),
        ("application/openmetrics-text; version=zzz; escaping=no, */*;q=0.1", OPENMETRICS_TYPE),
    ],
)
def test_the_format_a_client_accepts(accept: str, expected: str) -> None:
    content_type, body = metrics_of().render(accept)
    assert content_type == expected
    assert body.endswith(b"# EOF\n") == (expected == OPENMETRICS_TYPE)
    assert b"xgr_waiting_requests 3.0\n" in body


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics"]) == 0
    assert capsys.readouterr().out.splitlines() == list(markdown_rows())
