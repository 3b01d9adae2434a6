"""Hypothesis strategies for requests and results that the wire must carry unchanged, and their comparison."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from xgr_runtime.types import (
    NORMALIZATIONS,
    RecRequest,
    RecResult,
    Rules,
    Search,
    SearchResult,
    Timings,
)

TEXT = st.text(max_size=6)
TAG = st.text(min_size=1, max_size=6)
COUNT = st.integers(0, 2**32 - 1)
WIDTH = st.integers(1, 1024)
MS = st.floats(0, 1e6)


def int64_arrays(max_size: int = 6) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(np.int64, st.integers(0, max_size))


def strings(max_size: int = 4) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(TEXT, max_size=max_size).map(tuple)


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    exclusions = draw(int64_arrays())
    return Rules(
        require=tuple(
            map(tuple, draw(st.lists(st.lists(TAG, min_size=1, max_size=3), max_size=3)))
        ),
        exclude_tags=tuple(draw(st.lists(TAG, max_size=3))),
        exclude_item_ids=exclusions if len(exclusions) else (),
        exclude_keys=draw(strings()),
        exclude_history=draw(st.booleans()),
    )


@st.composite
def searches(draw: st.DrawFn) -> Search:
    widths = draw(st.none() | st.lists(WIDTH, min_size=1, max_size=8).map(tuple))
    return Search(
        catalog=draw(TEXT),
        catalog_version=draw(TEXT),
        beam_width=draw(st.none() | WIDTH) if widths is None else None,
        beam_widths=widths,
        num_results=draw(st.none() | st.integers(1, 2048)),
        normalization=draw(st.none() | st.sampled_from(NORMALIZATIONS)),
        rules=draw(rules()),
        max_items_per_sid=draw(st.none() | st.integers(1, 2**32 - 1)),
        return_level_scores=draw(st.booleans()),
    )


@st.composite
def requests(draw: st.DrawFn, max_searches: int = 1) -> RecRequest:
    inputs: dict[str, Any] = draw(
        st.one_of(
            st.fixed_dictionaries({"history_item_ids": int64_arrays()}),
            st.fixed_dictionaries({"history_keys": strings()}),
            st.fixed_dictionaries(
                {
                    "history_sids": hnp.arrays(
                        np.uint32, st.tuples(st.integers(0, 4), st.integers(1, 8))
                    )
                }
            ),
            st.fixed_dictionaries({"prompt_token_ids": int64_arrays()}),
        )
    )
    return RecRequest(
        request_id=draw(st.text("abc-123", max_size=8)),
        searches=tuple(draw(st.lists(searches(), min_size=1, max_size=max_searches))),
        on_overflow=draw(st.sampled_from([None, "truncate", "error"])),
        on_unknown=draw(st.sampled_from([None, "skip", "error"])),
        **inputs,
    )


@st.composite
def search_results(draw: st.DrawFn) -> SearchResult:
    n, levels = draw(st.integers(0, 5)), draw(st.integers(1, 8))
    floats = hnp.arrays(np.float32, (n, levels))
    return SearchResult(
        item_ids=draw(hnp.arrays(np.int64, n)),
        keys=draw(st.none() | st.lists(TEXT, min_size=n, max_size=n).map(tuple)),
        sids=draw(hnp.arrays(np.uint32, (n, levels))),
        scores=draw(hnp.arrays(np.float32, n)),
        level_scores=draw(st.none() | floats),
        num_valid=draw(COUNT),
        num_items=n,
        status=draw(st.sampled_from(["ok", "failed"])),
        reason=draw(TEXT),
        catalog=draw(TEXT),
        catalog_version=draw(TEXT),
        normalization=draw(st.sampled_from(NORMALIZATIONS)),
        temperature=draw(st.floats(0.01, 10)),
        beam_widths=tuple(draw(st.lists(COUNT, max_size=8))),
        num_unknown_exclusions=draw(COUNT),
    )


@st.composite
def results(draw: st.DrawFn) -> RecResult:
    return RecResult(
        request_id=draw(TEXT),
        results=tuple(draw(st.lists(search_results(), max_size=3))),
        num_history_used=draw(COUNT),
        num_history_unknown=draw(COUNT),
        num_prompt_tokens=draw(COUNT),
        num_cached_tokens=draw(COUNT),
        model_version=draw(TEXT),
        template_version=draw(TEXT),
        timings=Timings(draw(MS), draw(MS), draw(MS)),
    )


def plain(value: Any) -> Any:
    """A value as nested plain data in which arrays are (dtype, shape, bytes): equal means bit-equal."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return tuple(plain(element) for element in value)
    return value
