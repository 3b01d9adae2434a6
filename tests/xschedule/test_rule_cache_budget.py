"""The budget of the rule cache as requests meet it: none at all, and tags that clients make up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.helpers.engines import make_config, make_engine, request_of, same_bits, write_catalog
from xgr_runtime.config import CacheConfig, SchedulerConfig
from xgr_runtime.types import Rules, Search

if TYPE_CHECKING:
    from tests.helpers.engines import Oracle
    from xgr_runtime import Engine
    from xgr_runtime.types import RecResult


def engine_with(oracle: Oracle, file: str, rule_cache_bytes: int) -> Engine:
    return make_engine(
        make_config(
            oracle.folder,
            {"main": file},  # type: ignore[dict-item]
            scheduler=SchedulerConfig(max_wait_ms=0.0),
            cache=CacheConfig(rule_rows=2, rule_cache_bytes=rule_cache_bytes),
        )
    )


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, oracle: Oracle) -> str:
    return str(write_catalog(tmp_path_factory.mktemp("rules") / "items.xgr", oracle.catalog))


def ask(engine: Engine, oracle: Oracle, rules: Rules) -> RecResult:
    ids = [item.item_id for item in oracle.catalog.items]
    search = Search(beam_width=64, num_results=100, rules=rules)
    return engine.recommend([request_of("r", ids[:5], search)])[0]


def test_no_budget_changes_no_answer(oracle: Oracle, file: str) -> None:
    tags = sorted({tag for item in oracle.catalog.items for tag in item.tags})
    ids = [item.item_id for item in oracle.catalog.items]
    asked = [
        Rules(),
        Rules(require=((tags[0],),)),
        Rules(exclude_tags=(tags[0], "no:such")),
        Rules(require=((tags[0], "no:such"), (tags[1],)), exclude_item_ids=tuple(ids[:50])),
        Rules(require=(("no:such",),)),
        Rules(exclude_item_ids=tuple(ids)),
        Rules(require=((tags[0],),)),
    ]
    with engine_with(oracle, file, 0) as none, engine_with(oracle, file, 1 << 28) as plenty:
        for rules in asked:
            assert same_bits(ask(none, oracle, rules), ask(plenty, oracle, rules)), rules
        assert none._rule_cache.stats.num_rule_sets == 0
        assert plenty._rule_cache.stats.num_rule_sets > 3


def test_made_up_tags_fill_no_cache(oracle: Oracle, file: str) -> None:
    with engine_with(oracle, file, 1 << 28) as engine:
        plain = ask(engine, oracle, Rules())
        ask(engine, oracle, Rules(require=(("made:up",),)))
        before = engine._rule_cache.stats
        for number in range(40):
            reply = ask(engine, oracle, Rules(exclude_tags=(f"made:up{number}",)))
            assert reply.results[0].num_unknown_exclusions == 1
            assert reply.results[0].item_ids.tolist() == plain.results[0].item_ids.tolist()
            empty = ask(engine, oracle, Rules(require=((f"made:up{number}",),))).results[0]
            assert empty.item_ids.tolist() == []
            assert empty.reason.endswith(f"none of the required tags made:up{number}")
        after = engine._rule_cache.stats
    assert (after.num_rule_sets, after.num_bytes) == (before.num_rule_sets, before.num_bytes)
