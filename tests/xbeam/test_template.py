"""Rendering against a plain-Python reading of the template."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xgr_runtime.config import TemplateConfig
from xgr_runtime.xbeam.template import Template

ids = st.lists(st.integers(0, 99), max_size=3).map(tuple)
configs = st.builds(TemplateConfig, ids, ids, ids, ids, ids)


def plain(
    config: TemplateConfig, sids: list[tuple[int, ...]], token_of: list[list[int]]
) -> list[int]:
    items = [
        [
            *config.item_begin_token_ids,
            *(token_of[level][code] for level, code in enumerate(sid)),
            *config.item_end_token_ids,
        ]
        for sid in sids
    ]
    tokens = list(config.prefix_token_ids)
    for place, item in enumerate(items):
        tokens += config.separator_token_ids if place else ()
        tokens += item
    return [*tokens, *config.suffix_token_ids]


@given(
    config=configs,
    num_levels=st.integers(1, 4),
    num_items=st.integers(0, 6),
    seed=st.integers(0, 99),
)
def test_rendering(config: TemplateConfig, num_levels: int, num_items: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    token_of = [rng.permutation(500)[:7].tolist() for _ in range(num_levels)]
    sids = [tuple(rng.integers(0, 7, num_levels).tolist()) for _ in range(num_items)]
    template = Template.from_config(config)
    for dtype in (np.uint32, np.uint16, np.int64):
        got = template.render(
            np.asarray(sids, dtype).reshape(num_items, num_levels),
            [np.asarray(table, np.int32) for table in token_of],
        )
        assert got.dtype == np.int64
        assert got.tolist() == plain(config, sids, token_of)
    assert template.num_tokens(num_items, num_levels) == len(plain(config, sids, token_of))


@given(config=configs, num_levels=st.integers(1, 4), max_tokens=st.integers(0, 60))
def test_the_most_items_that_fit(config: TemplateConfig, num_levels: int, max_tokens: int) -> None:
    template = Template.from_config(config)
    most = template.max_items(max_tokens, num_levels)
    fitting = [n for n in range(80) if template.num_tokens(n, num_levels) <= max_tokens]
    assert most == max(fitting, default=-1)


def test_the_range_of_token_ids() -> None:
    template = Template.from_config(TemplateConfig((5,), (9,), (), (2, 40), (7,)))
    assert (template.min_token_id, template.max_token_id) == (2, 40)
    empty = Template.from_config(TemplateConfig())
    assert (empty.min_token_id, empty.max_token_id) == (0, -1)


def test_the_version_is_the_configured_one_or_a_digest_of_the_ids() -> None:
    one, same, other = (
        Template.from_config(TemplateConfig(prefix_token_ids=ids)).version
        for ids in ((1, 2), (1, 2), (1, 3))
    )
    assert one == same != other
    assert Template.from_config(TemplateConfig(version="mine")).version == "mine"
    moved = Template.from_config(TemplateConfig(suffix_token_ids=(1, 2))).version
    assert moved != one, "the same ids in another place are another template"


@pytest.mark.parametrize("num_items", [0, 1, 3])
def test_a_bare_template_is_the_tokens_alone(num_items: int) -> None:
    template = Template.from_config(TemplateConfig())
    sids = np.zeros((num_items, 2), np.uint32)
    got = template.render(sids, [np.asarray([4]), np.asarray([6])])
    assert got.tolist() == [4, 6] * num_items
