"""The one table of metrics: names, kinds, units, labels and what they mean. What the service exports is made from it.

Names end in their unit. Label values come from short fixed lists, from the configuration, or from what the operator loaded;
nothing that a caller chooses becomes a label, so the number of series does not grow with traffic.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram", "info"]


@dataclass(frozen=True)
class Metric:
    """name: as it is exported, without the suffixes of a histogram's samples. unit: "" for an info."""

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    meaning: str


TABLE: tuple[Metric, ...] = (
    # Calls
    Metric("xgr_requests_total", "counter", "requests", ("code",),
           "Recommend calls that ended, by gRPC status. Calls that gRPC itself refused are not seen here."),
    Metric("xgr_failed_requests_total", "counter", "requests", ("cause",),
           "Calls that ended with another status than OK, by cause: overload (queue or waiting bytes), deadline, cancelled, invalid, "
           "not_found, request_too_large, reply_too_large, unavailable (shutting down or the engine stopped), internal."),
    Metric("xgr_in_flight_requests", "gauge", "requests", (), "Calls that have arrived and not ended."),
    Metric("xgr_request_duration_seconds", "histogram", "seconds", (),
           "From a call's arrival to its answer; only calls answered OK. Dense round 0.2 s."),
    # Queue and batches
    Metric("xgr_waiting_requests", "gauge", "requests", (), "Queue depth: accepted by the engine and in no batch yet."),
    Metric("xgr_running_requests", "gauge", "requests", (), "Requests of the batches in flight that have no answer yet."),
    Metric("xgr_queue_wait_seconds", "histogram", "seconds", (),
           "From acceptance to the start of the batch, of each request that reached one."),
    Metric("xgr_batches_total", "counter", "batches", ("outcome",), "Batches that ended: ok, or failed with an error of the runtime."),
    Metric("xgr_batch_duration_seconds", "histogram", "seconds", (),
           "From the issue of a batch to its answers: its wait behind the batch before, the device's work, the copy back, ranking."),
    Metric("xgr_batch_histories", "histogram", "histories", (), "Histories of a batch."),
    Metric("xgr_batch_tokens", "histogram", "tokens", (), "New tokens of a batch, which its prefill runs over; cached ones are not in it."),
    Metric("xgr_batch_rows", "histogram", "rows", (), "Beam rows that a batch holds: of each search its largest width."),
    # Stages, measured on the device
    Metric("xgr_prefill_seconds", "histogram", "seconds", (), "A batch's prefill on the device."),
    Metric("xgr_round_seconds", "histogram", "seconds", ("round",),
           "One round on the device, of each group of a batch: the model's step (none in round 0), head, selection, reorder. Timed by "
           "events inside the graph where all rounds are one graph; then it is left out where the next batch in flight began that graph "
           "before the times were read, as most do under load."),
    Metric("xgr_rounds_seconds", "histogram", "seconds", (), "All rounds of each group of a batch on the device; never left out."),
    Metric("xgr_select_seconds", "histogram", "seconds", ("round",), "The selection alone; it is part of xgr_round_seconds."),
    Metric("xgr_copy_seconds", "histogram", "seconds", ("direction",),
           "A batch's copies: to_device (inputs, rule rows, exclusions; the host prepares them meanwhile), to_host (the outcome)."),
    # Searches
    Metric("xgr_searches_total", "counter", "searches", ("catalog", "result"),
           "Searches that ran: full (num_results items), short (fewer), empty (none), failed (NaN or +inf among the logits)."),
    Metric("xgr_asked_items_total", "counter", "items", (), "Items asked for (num_results) by the searches that ran."),
    Metric("xgr_returned_items_total", "counter", "items", (), "Items returned. Each is a valid item of the catalogue by construction."),
    Metric("xgr_asked_beams_total", "counter", "beams", (), "Widths of the last rounds of the searches that ran."),
    Metric("xgr_valid_beams_total", "counter", "beams", (), "Live beams (num_valid) after those rounds."),
    Metric("xgr_valid_beams_ratio", "gauge", "ratio", (),
           "Valid over asked beams since the start; no sample before the first search. Below 1 where a catalogue or a rule set has "
           "fewer SIDs than the width. It says nothing about returned items, which are always valid."),
    Metric("xgr_dead_beams_total", "counter", "beams", (), "Rows of last rounds that no valid child filled."),
    Metric("xgr_expanded_rows_total", "counter", "rows", (), "Live parent rows that selections expanded."),
    Metric("xgr_skipped_rows_total", "counter", "rows", (), "Of these, rows that early termination passed over."),
    # Catalogues
    Metric("xgr_catalog_info", "info", "", ("catalog", "version"), "The active version of each catalogue of the configuration."),
    Metric("xgr_catalog_age_seconds", "gauge", "seconds", ("catalog",), "Since the active version was activated here."),
    Metric("xgr_catalog_items", "gauge", "items", ("catalog",), "Items of the active version."),
    Metric("xgr_catalog_versions", "gauge", "versions", ("catalog",), "Versions loaded at once."),
    # Prefix cache
    Metric("xgr_prefix_hit_requests_total", "counter", "requests", (), "Requests that found cached tokens."),
    Metric("xgr_prefix_lookup_tokens_total", "counter", "tokens", (), "Tokens of all prompts that ran."),
    Metric("xgr_prefix_cached_tokens_total", "counter", "tokens", (), "Of these, tokens that the prefix cache held."),
    Metric("xgr_prefix_evicted_pages_total", "counter", "pages", (), "Cached pages that were evicted."),
    Metric("xgr_prefix_cached_pages", "gauge", "pages", (), "Pages that can be found again, in use or not."),
    # Memory
    Metric("xgr_kv_pages", "gauge", "pages", (), "Pages of history KV, without the null page."),
    Metric("xgr_kv_used_pages", "gauge", "pages", (), "Pages that running requests hold."),
    Metric("xgr_kv_rows", "gauge", "rows", (), "Rows of beam KV: the largest batch."),
    Metric("xgr_kv_used_rows", "gauge", "rows", (), "Rows of the largest batch in flight; batches have the rows one after the other."),
    Metric("xgr_device_memory_bytes", "gauge", "bytes", ("kind",),
           "Of this process on its device: used now, and the peak. On a CPU the resident memory."),
    # What runs
    Metric("xgr_op_provider_info", "info", "", ("op", "provider"), "The providers bound for each op; several where buckets differ."),
    Metric("xgr_reference_ops", "gauge", "ops", (), "Ops that run on the torch reference somewhere."),
    Metric("xgr_captured_graphs_total", "counter", "graphs", (), "Graphs captured since the start, those of the warm-up included."),
    Metric("xgr_graphs", "gauge", "graphs", (), "Graphs that there are."),
    Metric("xgr_graph_memory_bytes", "gauge", "bytes", (), "What the device had less after graphs were captured; 0 on a CPU."),
    Metric("xgr_eager_segments_total", "counter", "segments", (),
           "Prefills and rounds that ran op by op, slower, since no graph was captured for their normalisation or catalogue."),
    Metric("xgr_runtime_info", "info", "", ("version", "device", "model", "model_version", "template_version"), "What serves."),
)  # fmt: skip


def markdown_rows() -> Iterator[str]:
    """The table as lines of Markdown."""
    yield "| name | kind | unit | labels | meaning |"
    yield "| --- | --- | --- | --- | --- |"
    for metric in TABLE:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        yield f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {metric.meaning} |"
