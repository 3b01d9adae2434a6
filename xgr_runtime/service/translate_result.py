"""Results between the engine and the wire: RecResult <-> RecommendResponse.

Struct of arrays: a reply of 512 items is five byte strings, not 512 messages. `tools/bench_wire.py` measures the difference.
"""

import numpy as np

from xgr_runtime.service._pb.xgr.v1 import recommend_pb2 as pb
from xgr_runtime.service.translate import NORMALIZATION
from xgr_runtime.service.wire_arrays import (
    decode_float32,
    decode_int64,
    decode_uint32,
    encode_float32,
    encode_int64,
    encode_uint32,
)
from xgr_runtime.types import Normalization, RecResult, SearchResult, SearchStatus, Timings

STATUS: "dict[pb.SearchStatus, SearchStatus]" = {
    pb.SEARCH_STATUS_OK: "ok",
    pb.SEARCH_STATUS_FAILED: "failed",
}
_STATUS_NUMBER = {name: number for number, name in STATUS.items()}
_NORMALIZATION_NUMBER = {name: number for number, name in NORMALIZATION.items() if name}


def result_to_proto(result: RecResult) -> pb.RecommendResponse:
    """The message for a RecResult."""
    return pb.RecommendResponse(
        request_id=result.request_id,
        results=[_search_result_to_proto(search) for search in result.results],
        num_history_used=result.num_history_used,
        num_history_unknown=result.num_history_unknown,
        num_prompt_tokens=result.num_prompt_tokens,
        num_cached_tokens=result.num_cached_tokens,
        model_version=result.model_version,
        template_version=result.template_version,
        timings=pb.Timings(
            queue_ms=result.timings.queue_ms,
            run_ms=result.timings.run_ms,
            total_ms=result.timings.total_ms,
        ),
    )


def result_from_proto(message: pb.RecommendResponse) -> RecResult:
    """The RecResult in a message. Raises ValueError when arrays do not have num_items rows or an enum is unknown."""
    return RecResult(
        request_id=message.request_id,
        results=tuple(
            _search_result_from_proto(search, f"results[{i}]")
            for i, search in enumerate(message.results)
        ),
        num_history_used=message.num_history_used,
        num_history_unknown=message.num_history_unknown,
        num_prompt_tokens=message.num_prompt_tokens,
        num_cached_tokens=message.num_cached_tokens,
        model_version=message.model_version,
        template_version=message.template_version,
        timings=Timings(
            queue_ms=message.timings.queue_ms,
            run_ms=message.timings.run_ms,
            total_ms=message.timings.total_ms,
        ),
    )


def _search_result_to_proto(result: SearchResult) -> pb.SearchResult:
    level_scores = result.level_scores
    return pb.SearchResult(
        status=_STATUS_NUMBER[result.status],
        reason=result.reason,
        num_items=result.num_items,
        num_levels=np.shape(result.sids)[1],
        item_ids=encode_int64(result.item_ids),
        sids=encode_uint32(result.sids),
        scores=encode_float32(result.scores),
        has_keys=result.keys is not None,
        keys=result.keys or (),
        level_scores=None if level_scores is None else encode_float32(level_scores),
        num_valid=result.num_valid,
        catalog=result.catalog,
        catalog_version=result.catalog_version,
        normalization=_NORMALIZATION_NUMBER[result.normalization],
        temperature=result.temperature,
        beam_widths=result.beam_widths,
        num_unknown_exclusions=result.num_unknown_exclusions,
    )


def _search_result_from_proto(message: pb.SearchResult, field: str) -> SearchResult:
    n, levels = message.num_items, message.num_levels
    sizes = {"item_ids": 8 * n, "sids": 4 * n * levels, "scores": 4 * n}
    if message.HasField("level_scores"):
        sizes["level_scores"] = 4 * n * levels
    for name, size in sizes.items():
        got = len(getattr(message, name))
        if got != size:
            raise ValueError(f"{field}.{name} must be {size} bytes for {n} items, got {got}")
    if message.has_keys and len(message.keys) != n:
        raise ValueError(f"{field}.keys must hold {n} keys, got {len(message.keys)}")
    level_scores = None
    if message.HasField("level_scores"):
        level_scores = decode_float32(message.level_scores).reshape(n, levels)
    return SearchResult(
        item_ids=decode_int64(message.item_ids),
        keys=tuple(message.keys) if message.has_keys else None,
        sids=decode_uint32(message.sids, levels),
        scores=decode_float32(message.scores),
        level_scores=level_scores,
        num_valid=message.num_valid,
        num_items=n,
        status=_status_of(message, field),
        reason=message.reason,
        catalog=message.catalog,
        catalog_version=message.catalog_version,
        normalization=_normalization_of(message, field),
        temperature=message.temperature,
        beam_widths=tuple(message.beam_widths),
        num_unknown_exclusions=message.num_unknown_exclusions,
    )


def _status_of(message: pb.SearchResult, field: str) -> SearchStatus:
    if message.status not in STATUS:
        raise ValueError(f"{field}.status {message.status} is not known to this client")
    return STATUS[message.status]


def _normalization_of(message: pb.SearchResult, field: str) -> Normalization:
    value = NORMALIZATION.get(message.normalization)
    if value is None:
        raise ValueError(
            f"{field}.normalization {message.normalization} is not known to this client"
        )
    return value
