"""A batch is plain data, packed as a plain-Python reading says."""

from __future__ import annotations

import pickle
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.xschedule.states import Pinned, make_state
from xgr_runtime.config import SchedulerConfig
from xgr_runtime.kvcache.allocator import PageAllocator
from xgr_runtime.kvcache.prefix_cache import PrefixCache
from xgr_runtime.xschedule.batch import (
    Batch,
    BatchOutput,
    GroupOutput,
    RuleRow,
    SearchGroup,
    pack_histories,
)
from xgr_runtime.xschedule.scheduler import Scheduler

if TYPE_CHECKING:
    from typing import Any


def make_batch() -> Batch:
    scheduler = Scheduler(SchedulerConfig(), PrefixCache(PageAllocator(100)), 4)
    pinned = Pinned(3)
    scheduler.add(make_state("a", pinned, num_tokens=5, widths=(3, 1), expression_number=2))
    scheduler.add(make_state("b", pinned, num_tokens=1, widths=(2, 7), is_excluding=True))
    scheduled = scheduler.schedule(0.0, is_draining=True)
    assert scheduled is not None
    scheduler.complete(scheduled, None)
    return scheduled.batch


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    page_size=st.integers(1, 8),
    seed=st.integers(0, 1000),
    is_cached=st.booleans(),
)
def test_packing(lengths: list[int], page_size: int, seed: int, is_cached: bool) -> None:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 1000, n) for n in lengths]
    counts = [-(-n // page_size) for n in lengths]
    shuffled = (rng.permutation(sum(counts)) + 1).tolist()
    pages = [[shuffled.pop() for _ in range(count)] for count in counts]
    cached = [int(rng.integers(n)) if is_cached else 0 for n in lengths]
    has_source = [is_cached and n % page_size > 0 and bool(rng.integers(2)) for n in cached]
    sources = [100 + h if has else None for h, has in enumerate(has_source)]
    packed = pack_histories(
        prompts, pages, page_size, *((cached, sources) if is_cached else (None, None))
    )
    tokens, positions, slots, starts = [], [], [], [0]
    for prompt, owned, num_cached in zip(prompts, pages, cached, strict=True):
        for position, token in list(enumerate(prompt.tolist()))[num_cached:]:
            tokens.append(token)
            positions.append(position)
            slots.append(owned[position // page_size] * page_size + position % page_size)
        starts.append(len(tokens))
    assert packed.token_ids_T.tolist() == tokens
    assert packed.positions_T.tolist() == positions
    assert packed.kv_slots_T.tolist() == slots
    assert len(set(slots)) == len(slots)
    assert packed.q_start_H1.tolist() == starts
    assert packed.kv_lens_H.tolist() == lengths
    assert packed.num_prompt_tokens == sum(lengths)
    assert packed.num_scheduled_tokens == sum(lengths) - sum(cached)
    for row, owned in zip(packed.page_table_HP.tolist(), pages, strict=True):
        assert row == owned + [0] * (max(counts) - len(owned))
    copies = [
        (source, owned[n // page_size], n % page_size) if source is not None else (0, 0, 0)
        for source, owned, n in zip(sources, pages, cached, strict=True)
    ]
    assert list(map(tuple, packed.copies_3H.T.tolist())) == copies
    assert packed.has_copies == any(has_source)
    types = (packed.token_ids_T.dtype, packed.q_start_H1.dtype, packed.page_table_HP.dtype)
    assert [dtype.name for dtype in types] == ["int64", "int32", "int32"]


def test_rows_of_searches() -> None:
    batch = make_batch()
    (group,) = batch.groups
    assert (batch.num_histories, group.num_searches, group.num_levels) == (2, 2, 2)
    assert group.row_starts(-1).tolist() == [0, 1, 2]
    assert group.row_starts(0).tolist() == [0, 3, 5]
    assert group.row_starts(1).tolist() == [0, 1, 8]
    assert group.slot_starts().tolist() == [0, 3, 10]
    assert batch.kind == "full"
    assert group.slot_index == 3


@pytest.mark.parametrize(
    ("history_of", "is_right"),
    [([0, 1, 1], True), ([1, 1, 5], True), ([1, 0, 1], False), ([0, 2, 1], False)],
    ids=str,
)
def test_rows_of_one_history_lie_together(history_of: list[int], is_right: bool) -> None:
    rule = RuleRow(0, None, ())
    widths = np.ones((3, 2), dtype=np.int32)
    histories = np.asarray(history_of, dtype=np.int32)

    def make() -> SearchGroup:
        return SearchGroup(0, "v1", "vocab", histories, widths, (rule,) * 3, ())

    if is_right:
        assert make().num_searches == 3
    else:
        with pytest.raises(AssertionError, match=str(histories)[1:-1]):
            make()


def test_a_batch_crosses_a_process_border() -> None:
    batch = make_batch()
    second = replace(batch.groups[0], slot_index=4, normalization="level", rule_loads=())
    batch = replace(batch, groups=(*batch.groups, second))
    copy = pickle.loads(pickle.dumps(batch))
    assert_equal(batch, copy)
    assert_plain(batch, "batch")
    group = GroupOutput(
        np.zeros((2, 8), np.float32), np.zeros((2, 8), np.int32), np.zeros((2, 8), np.int32),
        np.zeros(2, np.int32), 3, 1,
    )  # fmt: skip
    output = BatchOutput((group, replace(group, num_live_rows=4)))
    assert_equal(output, pickle.loads(pickle.dumps(output)))
    assert_plain(output, "output")


def assert_equal(one: Any, two: Any) -> None:
    if isinstance(one, np.ndarray):
        assert one.dtype == two.dtype
        assert np.array_equal(one, two)
    elif isinstance(one, tuple):
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            assert_equal(a, b)
    elif is_dataclass(one):
        assert type(one) is type(two)
        for member in fields(one):
            assert_equal(getattr(one, member.name), getattr(two, member.name))
    else:
        assert one == two


def assert_plain(value: Any, name: str) -> None:
    """Arrays, numbers, names, and tuples and frozen dataclasses of them: nothing that belongs to one process."""
    if isinstance(value, tuple):
        for element in value:
            assert_plain(element, name)
    elif hasattr(value, "__dataclass_fields__"):
        for one in fields(value):
            assert_plain(getattr(value, one.name), f"{name}.{one.name}")
    else:
        assert isinstance(value, np.ndarray | int | float | str | None), (name, type(value))
