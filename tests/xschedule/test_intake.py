"""Every violation by its field's name, and what a good request becomes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.helpers.catalogs import random_catalog, scattered_tokens
from tests.helpers.engines import prompt_of, write_catalog
from xgr_runtime.config import (
    CacheConfig,
    LimitsConfig,
    RuntimeConfig,
    SchedulerConfig,
    SearchDefaults,
    TemplateConfig,
)
from xgr_runtime.errors import InvalidRequest, NotFound
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.models.head import Head
from xgr_runtime.types import RecRequest, Rules, Search
from xgr_runtime.xbeam.rules import RuleCache
from xgr_runtime.xbeam.template import Template
from xgr_runtime.xschedule.catalogs import CatalogStore
from xgr_runtime.xschedule.intake import Intake

if TYPE_CHECKING:
    from pathlib import Path

    from xgr_runtime.xschedule.request import RequestState

VOCAB = 40
TOKENS = scattered_tokens([5, 6, 7], VOCAB, seed=2, share_absent=0.2)
CATALOG = random_catalog(1, 60, TOKENS, share_hidden=0.2)
IDS = [item.item_id for item in CATALOG.items]
LIMITS = LimitsConfig(
    max_beam_width=64,
    max_num_results=30,
    max_history_items=6,
    max_input_items=50,
    max_prompt_tokens=2 + 5 * 3,  # five items beside the template's two tokens
    max_exclusions=8,
    max_tags=3,
    max_tag_length=20,
    max_request_id_length=10,
)


@pytest.fixture(scope="module")
def intake(tmp_path_factory: pytest.TempPathFactory) -> Intake:
    file = write_catalog(tmp_path_factory.mktemp("catalog") / "items.xgr", CATALOG)
    return make_intake(file, LIMITS)


def make_intake(file: Path, limits: LimitsConfig, template: TemplateConfig | None = None) -> Intake:
    config = RuntimeConfig(
        catalogs={"main": str(file)},
        limits=limits,
        search=SearchDefaults(beam_width=7, num_results=3, normalization="level"),
        scheduler=SchedulerConfig(patience_ms=500.0),
        template=template or TemplateConfig(prefix_token_ids=(1,), suffix_token_ids=(2,)),
    )
    cache = RuleCache(1 << 20)
    head = Head(torch.zeros(VOCAB, 4))
    store = CatalogStore(CacheConfig(), CpuDevice(), head, cache, 4, lambda _: None)
    store.activate("main", store.load("main", str(file), None))
    return Intake(config, Template.from_config(config.template), store, cache, VOCAB, None)


def prepare(intake: Intake, request: RecRequest, now: float = 0.0) -> RequestState:
    state = intake.prepare(request, now)
    for search in state.searches:
        intake.catalogs.release(search.pinned)  # type: ignore[arg-type]
    return state


def by_ids(
    history: list[int] | None = None, search: Search | None = None, **more: Any
) -> RecRequest:
    ids = np.asarray(IDS[:2] if history is None else history, dtype=np.int64)
    return RecRequest(history_item_ids=ids, searches=(search or Search(),), **more)


def num_pins(intake: Intake) -> int:
    described: Any = intake.catalogs.describe()
    return sum(v["num_pins"] for c in described.values() for v in c["versions"].values())


SEARCH_FAULTS: dict[str, tuple[Search, str, str]] = {
    "half a beam": (
        Search(beam_width=2.5),  # type: ignore[arg-type]
        "beam_width", "must be a whole number, got 2.5"),
    "yes as a width": (Search(beam_widths=(True, 1, 1)), "beam_widths[0]", "whole number"),
    "an id that is a word": (
        Search(rules=Rules(exclude_item_ids=("7",))),  # type: ignore[arg-type]
        "rules.exclude_item_ids", "must be 64-bit whole numbers, got '7'"),
    "widths as an array": (
        Search(beam_widths=np.ones(3, np.int64)),  # type: ignore[arg-type]
        "beam_widths", "must be a tuple of widths, got ndarray"),
    "no rules object": (
        Search(rules=None), "rules", "must be Rules, got NoneType"),  # type: ignore[arg-type]
    "exclusions left out": (
        Search(rules=Rules(exclude_item_ids=None)),  # type: ignore[arg-type]
        "rules.exclude_item_ids", "must be an array or a sequence of whole numbers, got NoneType"),
    "a word for a truth value": (
        Search(rules=Rules(exclude_history="no")),  # type: ignore[arg-type]
        "rules.exclude_history", "must be true or false, got 'no'"),
    "a tag that is a number": (
        Search(rules=Rules(exclude_tags=(7,))),  # type: ignore[arg-type]
        "rules.exclude_tags", "must be strings, got 7"),
    "one string for many": (
        Search(rules=Rules(exclude_keys="abc")),  # type: ignore[arg-type]
        "rules.exclude_keys", "must be a tuple of strings, got str"),
    "no width": (Search(beam_width=0), "beam_width", r"must be in \[1, 64\], got 0; raise limits.max_beam_width"),
    "too wide": (Search(beam_width=65), "beam_width", "raise limits.max_beam_width"),
    "a level too wide": (
        Search(beam_widths=(1, 65, 1)), "beam_widths[1]", r"must be in \[1, 64\], got 65"),
    "both widths": (
        Search(beam_width=3, beam_widths=(3, 3, 3)), "beam_widths", "exclude each other"),
    "widths of other levels": (
        Search(beam_widths=(3, 3)), "beam_widths", "expected 3 widths, one a level, got 2"),
    "no results": (Search(num_results=0), "num_results", r"must be in \[1, 30\]"),
    "too many results": (Search(num_results=31), "num_results", "raise limits.max_num_results"),
    "no items a SID": (Search(max_items_per_sid=0), "max_items_per_sid", "at least 1, got 0"),
    "unknown normaliser": (
        Search(normalization="softmax"),  # type: ignore[arg-type]
        "normalization", "must be one of vocab, level, valid, got 'softmax'"),
    "many exclusions": (
        Search(rules=Rules(exclude_item_ids=tuple(range(5)), exclude_keys=("a",) * 4)),
        "rules.exclude_item_ids", "at most limits.max_exclusions = 8 items, got 9"),
    "many tags": (
        Search(rules=Rules(require=(("a", "b"),), exclude_tags=("c", "d"))),
        "rules.require", "at most limits.max_tags = 3 tags, got 4"),
    "a long excluded tag": (
        Search(rules=Rules(exclude_tags=("c", "d" * 21))),
        "rules.exclude_tags", "a tag has at most limits.max_tag_length = 20 characters, got 21"),
    "a long required tag": (
        Search(rules=Rules(require=(("a",), ("d" * 21,)))),
        "rules.require[1]", "a tag has at most limits.max_tag_length = 20 characters, got 21"),
    "a long catalogue": (
        Search(catalog="c" * 257), "catalog", "limits.max_name_length = 256 characters, got 257"),
    "a long version": (
        Search(catalog_version="c" * 257), "catalog_version", "limits.max_name_length = 256 characters, got 257"),
    "a number as catalogue": (
        Search(catalog=3),  # type: ignore[arg-type]
        "catalog", "must be a string, got int"),
    "an empty group": (
        Search(rules=Rules(require=((),))), "rules.require[0]", "at least one tag"),
}  # fmt: skip

REQUEST_FAULTS: dict[str, tuple[RecRequest, str, str]] = {
    "fractional ids": (
        RecRequest(history_item_ids=np.asarray([1.5])),
        "history_item_ids", "must be whole numbers, got float64"),
    "truth values as ids": (
        RecRequest(history_item_ids=np.asarray([True])),
        "history_item_ids", "must be whole numbers, got bool"),
    "a matrix of ids": (
        RecRequest(history_item_ids=np.ones((2, 2), np.int64)),
        "history_item_ids", r"must have one dimension, got shape \[2, 2\]"),
    "a matrix of tokens": (
        RecRequest(prompt_token_ids=np.ones((2, 2), np.int64)),
        "prompt_token_ids", "must have one dimension"),
    "an id beyond 64 bits": (
        RecRequest(history_item_ids=[2**63]),  # type: ignore[arg-type]
        "history_item_ids", "must be 64-bit whole numbers, got 9223372036854775808"),
    "an unsigned id beyond 63 bits": (
        RecRequest(history_item_ids=np.asarray([2**63], np.uint64)),
        "history_item_ids", "must fit into 64 bits"),
    "a flat list of codes": (
        RecRequest(history_sids=np.ones(3, np.uint32)),
        "history_sids", r"must have shape \[n, levels\], got \[3\]"),
    "a masked array": (
        RecRequest(history_item_ids=np.ma.masked_array([1, 2], [True, False])),
        "history_item_ids", "must be a plain array"),
    "no key": (RecRequest(history_keys=(None,)), "history_keys", "must be strings, got None"),  # type: ignore[arg-type]
    "a deadline that is a word": (
        by_ids(deadline_s="x"), "deadline_s", "must be seconds of time.monotonic.., got 'x'"),
    "a deadline that is no number": (by_ids(deadline_s=float("nan")), "deadline_s", "got nan"),
    "a deadline beyond every clock": (
        by_ids(deadline_s=10**400), "deadline_s", "got an integer of 1329 bits"),
    "an unknown option": (
        by_ids(on_unknown="bogus"), "on_unknown", "must be one of skip, error, got 'bogus'"),
    "long request id": (by_ids(request_id="x" * 11), "request_id", "at most .* = 10 characters"),
    "no history": (RecRequest(), "history", "exactly one of .* must be given, got none"),
    "two histories": (
        by_ids(history_keys=("a",)), "history", "got history_item_ids, history_keys"),
    "no search": (RecRequest(history_keys=(), searches=()), "searches", "at least one"),
    "two searches": (
        RecRequest(history_keys=(), searches=(Search(), Search())),
        "searches", "limits.max_searches = 1, got 2"),
    "endless history": (
        by_ids([1] * 51), "history_item_ids", "limits.max_input_items = 50 entries, got 51"),
    "empty prompt": (
        RecRequest(prompt_token_ids=np.zeros(0, np.int64)),
        "prompt_token_ids", "1 to limits.max_prompt_tokens = 17 tokens, got 0"),
    "long prompt": (
        RecRequest(prompt_token_ids=np.zeros(18, np.int64)), "prompt_token_ids", "got 18"),
    "token beyond the vocabulary": (
        RecRequest(prompt_token_ids=np.asarray([3, 40])),
        "prompt_token_ids[1]", r"must be in \[0, 40\), got 40"),
    "negative token": (
        RecRequest(prompt_token_ids=np.asarray([-1])), "prompt_token_ids[0]", "got -1"),
    "history of an opaque prompt": (
        RecRequest(
            prompt_token_ids=np.asarray([3]), searches=(Search(rules=Rules(exclude_history=True)),)
        ),
        "searches[0].rules.exclude_history", "prompt_token_ids names no items"),
    "SIDs of two codes": (
        RecRequest(history_sids=np.zeros((4, 2), np.uint32)),
        "history_sids", r"must have shape \[n, 3\], got \[4, 2\]"),
    "SIDs in one row": (
        RecRequest(history_sids=np.zeros(3, np.uint32)), "history_sids", r"got \[3\]"),
    "fractions of codes": (
        RecRequest(history_sids=np.zeros((1, 3))),  # type: ignore[arg-type]
        "history_sids", "must be whole numbers, got float64"),
    "unknown id": (
        by_ids([IDS[0], -77, -78], on_unknown="error"),
        "history_item_ids[1]", "unknown item; 2 of 3 are unknown"),
    "unknown key": (
        RecRequest(history_keys=("nope",), on_unknown="error"), "history_keys[0]", "unknown item"),
    "unknown SID": (
        RecRequest(history_sids=np.asarray([[9, 9, 9]], np.uint32), on_unknown="error"),
        "history_sids[0]", "unknown item"),
    "too long, refused": (
        by_ids(IDS[:6], on_overflow="error"), "history_item_ids", "at most 5 items fit .* got 6"),
}  # fmt: skip


@pytest.mark.parametrize("name", SEARCH_FAULTS)
def test_a_search_is_refused_by_field(intake: Intake, name: str) -> None:
    search, field, text = SEARCH_FAULTS[name]
    with pytest.raises(InvalidRequest, match=text) as caught:
        intake.prepare(by_ids(search=search), 0.0)
    assert [f for f, _ in caught.value.violations] == [f"searches[0].{field}"]
    assert num_pins(intake) == 0


@pytest.mark.parametrize("name", REQUEST_FAULTS)
def test_a_request_is_refused_by_field(intake: Intake, name: str) -> None:
    request, field, text = REQUEST_FAULTS[name]
    with pytest.raises(InvalidRequest, match=text) as caught:
        intake.prepare(request, 0.0)
    assert [f for f, _ in caught.value.violations] == [field]
    assert num_pins(intake) == 0


def test_all_violations_come_at_once(intake: Intake) -> None:
    request = RecRequest(
        "x" * 20,
        searches=(Search(beam_width=0, num_results=99, max_items_per_sid=-1),),
    )
    with pytest.raises(InvalidRequest) as caught:
        intake.prepare(request, 0.0)
    assert [field for field, _ in caught.value.violations] == [
        "request_id",
        "history",
        "searches[0].beam_width",
        "searches[0].num_results",
        "searches[0].max_items_per_sid",
    ]


@pytest.mark.parametrize(
    ("search", "text"),
    [
        (Search(catalog="other"), "catalogue 'other' is not loaded; loaded: main"),
        (Search(catalog_version="v0"), "version 'v0' is not loaded; loaded: "),
    ],
)
def test_unknown_catalogues_list_the_known(intake: Intake, search: Search, text: str) -> None:
    with pytest.raises(NotFound, match=text):
        intake.prepare(by_ids(search=search), 0.0)
    assert num_pins(intake) == 0


def test_defaults_are_filled_in(intake: Intake) -> None:
    state = prepare(intake, by_ids(), now=3.0)
    (search,) = state.searches
    assert (search.widths, search.num_results, search.normalization) == ((7, 7, 7), 3, "level")
    assert (search.max_items_per_sid, search.return_level_scores) == (None, False)
    assert search.pinned.name == "main"
    assert (state.arrival_s, state.due_s) == (3.0, 3.5)
    assert (state.num_history_used, state.num_history_unknown) == (2, 0)
    assert state.num_rows == 7
    assert not search.is_excluding


@pytest.mark.parametrize(("deadline_s", "due_s"), [(3.2, 3.2), (9.0, 3.5), (1.0, 1.0)])
def test_a_deadline_can_only_hurry(intake: Intake, deadline_s: float, due_s: float) -> None:
    assert prepare(intake, by_ids(deadline_s=deadline_s), now=3.0).due_s == due_s


@pytest.mark.parametrize("num_items", [0, 1, 4, 5, 6, 20])
def test_the_oldest_whole_items_are_dropped(intake: Intake, num_items: int) -> None:
    """At the limit, over it, and the empty history, in all three forms."""
    items = [CATALOG.items[i] for i in range(num_items)]
    requests = [
        by_ids([item.item_id for item in items]),
        RecRequest(history_keys=tuple(item.key for item in items)),
        RecRequest(history_sids=np.asarray([item.sid for item in items], np.uint32).reshape(-1, 3)),
    ]
    kept = [item.item_id for item in items[-5:]]
    for request in requests:
        state = prepare(intake, request)
        assert state.prompt_token_ids.tolist() == [*prompt_of(CATALOG, kept), 2]
        assert state.num_history_used == min(num_items, 5)
        assert state.num_history_unknown == 0


def test_max_history_items_cuts_too(tmp_path: Path) -> None:
    file = write_catalog(tmp_path / "items.xgr", CATALOG)
    small = make_intake(file, replace(LIMITS, max_history_items=2, max_prompt_tokens=256))
    state = prepare(small, by_ids(IDS[:6]))
    assert state.prompt_token_ids.tolist() == [*prompt_of(CATALOG, IDS[4:6]), 2]


def test_unknown_items_are_skipped_and_counted(intake: Intake) -> None:
    state = prepare(intake, by_ids([-3, IDS[0], -4, IDS[1]]))
    assert state.prompt_token_ids.tolist() == [*prompt_of(CATALOG, IDS[:2]), 2]
    assert (state.num_history_used, state.num_history_unknown) == (2, 2)
    keys = (CATALOG.items[0].key, "nope", "")
    state = prepare(intake, RecRequest(history_keys=keys))
    assert (state.num_history_used, state.num_history_unknown) == (1, 2)


def test_a_sid_is_known_when_its_codes_have_tokens(intake: Intake) -> None:
    """An item that left the catalogue still encodes histories; a code without a token, or beyond, does not."""
    mapped = [[c for c, t in enumerate(table) if t >= 0] for table in TOKENS]
    absent = next(c for c, t in enumerate(TOKENS[1]) if t < 0)
    known = {item.sid for item in CATALOG.items}
    gone = next(
        (a, b, c) for a in mapped[0] for b in mapped[1] for c in mapped[2] if (a, b, c) not in known
    )
    rows = [gone, (mapped[0][0], absent, mapped[2][0]), (99, 0, 0), (-1, -1, -1)]
    for dtype in (np.int64, np.int32):
        request = RecRequest(history_sids=np.asarray(rows, dtype))
        state = prepare(intake, request)
        tokens = [TOKENS[level][code] for level, code in enumerate(gone)]
        assert state.prompt_token_ids.tolist() == [1, *tokens, 2]
        assert (state.num_history_used, state.num_history_unknown) == (1, 3)


def test_an_empty_history_needs_a_template(tmp_path: Path) -> None:
    file = write_catalog(tmp_path / "items.xgr", CATALOG)
    bare = make_intake(file, LIMITS, TemplateConfig())
    for request in (by_ids([]), by_ids([-5])):
        with pytest.raises(InvalidRequest, match="no known item is left and the template has no"):
            bare.prepare(request, 0.0)
    assert prepare(bare, by_ids(IDS[:1])).num_tokens == 3


def test_a_rendered_prompt_is_taken_as_it_is(intake: Intake) -> None:
    tokens = np.asarray([5, 0, 39, 5], dtype=np.int64)
    state = prepare(intake, RecRequest(prompt_token_ids=tokens))
    assert state.prompt_token_ids.tolist() == tokens.tolist()
    assert (state.num_history_used, state.num_history_unknown) == (0, 0)


@pytest.mark.parametrize("form", ["ids", "keys", "sids"])
def test_exclude_history_reaches_the_part_that_was_cut_off(intake: Intake, form: str) -> None:
    items = [item for item in CATALOG.items if item.servable][:9]
    search = Search(rules=Rules(exclude_history=True))
    inputs: dict[str, dict[str, Any]] = {
        "ids": {"history_item_ids": np.asarray([item.item_id for item in items])},
        "keys": {"history_keys": tuple(item.key for item in items)},
        "sids": {"history_sids": np.asarray([item.sid for item in items], np.uint32)},
    }
    state = prepare(intake, RecRequest(searches=(search,), **inputs[form]))
    (resolved,) = state.searches
    catalog = resolved.pinned.catalog
    expected = {item.item_id for item in items}
    if form == "sids":
        sids = {item.sid for item in items}
        expected = {item.item_id for item in CATALOG.items if item.servable and item.sid in sids}
    assert set(catalog.item_ids[resolved.cleared.item_positions].tolist()) == expected
    assert state.num_history_used == 5


def test_exclusions_are_resolved_and_counted(intake: Intake) -> None:
    items = [item for item in CATALOG.items if item.servable]
    rules = Rules(
        exclude_tags=("no:tag", "region:eu"),
        exclude_item_ids=(items[0].item_id, -9, items[0].item_id),
        exclude_keys=(items[1].key, "nope"),
    )
    (search,) = prepare(intake, by_ids(search=Search(rules=rules))).searches
    assert search.num_unknown_exclusions == 3
    catalog = search.pinned.catalog
    expected = {i.item_id for i in items[:2] if "region:eu" not in i.tags}
    assert set(catalog.item_ids[search.cleared.item_positions].tolist()) == expected
    assert search.expression.exclude == ("region:eu",)  # what is unknown changes nothing
