"""From a request to a request state: every limit checked, defaults filled in, history rendered, rules resolved.

All violations are collected before anything is refused, so that a caller mends them in one go.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from xgr_runtime.config import RuntimeConfig
from xgr_runtime.errors import InvalidRequest
from xgr_runtime.types import NORMALIZATIONS, Int64Array, RecRequest, Search
from xgr_runtime.xbeam.rules import Cleared, RuleCache, TagExpression, clear_exclusions
from xgr_runtime.xbeam.template import Template
from xgr_runtime.xschedule.history import RenderedHistory, render_history
from xgr_runtime.xschedule.request import RequestState, SearchState, as_int64

if TYPE_CHECKING:
    from xgr_runtime.xschedule.catalogs import CatalogStore, LoadedCatalog

Violations = list[tuple[str, str]]


@dataclass(frozen=True)
class Intake:
    """What preparing a request needs."""

    config: RuntimeConfig
    template: Template
    catalogs: "CatalogStore"
    rule_cache: RuleCache
    vocab_size: int

    def prepare(self, request: RecRequest, now: float) -> RequestState:
        """Check and resolve a request; pins the catalogue version of each search (released by the caller).

        Raises InvalidRequest with all violations, or NotFound.
        """
        violations = check_request(request, self.config)
        if violations:
            raise InvalidRequest(violations)
        search = request.searches[0]
        pinned = self.catalogs.pin(
            search.catalog or self._default_catalog(), search.catalog_version
        )
        try:
            history = render_history(
                request, self.config, self.template, pinned.catalog, self.vocab_size
            )
            state = self._resolve(search, pinned, history)
        except BaseException:
            self.catalogs.release(pinned)
            raise
        due_s = now + self.config.scheduler.patience_ms / 1e3
        return RequestState(
            request=request,
            prompt_token_ids=history.token_ids,
            searches=(state,),
            num_history_used=history.num_used,
            num_history_unknown=history.num_unknown,
            arrival_s=now,
            due_s=due_s if request.deadline_s is None else min(due_s, request.deadline_s),
        )

    def _default_catalog(self) -> str:
        config = self.config
        return config.default_catalog or next(iter(config.catalogs), "default")

    def _resolve(
        self, search: Search, pinned: "LoadedCatalog", history: RenderedHistory
    ) -> SearchState:
        config, catalog = self.config, pinned.catalog
        widths = (
            search.beam_widths
            or (search.beam_width or config.search.beam_width,) * catalog.num_levels
        )
        violations: Violations = []
        if len(widths) != catalog.num_levels:
            violations.append(
                (
                    "searches[0].beam_widths",
                    f"expected {catalog.num_levels} widths, one a level, got {len(widths)}",
                )
            )
        if search.rules.exclude_history and history.is_opaque:
            violations.append(
                (
                    "searches[0].rules.exclude_history",
                    "needs a history; prompt_token_ids names no items",
                )
            )
        if violations:
            raise InvalidRequest(violations)
        expression = TagExpression.canonical(search.rules.require, search.rules.exclude_tags)
        rule_set = self.rule_cache.get(catalog, expression)
        excluded, num_unknown = self._excluded(search, pinned, history)
        if len(excluded):
            cleared = clear_exclusions(catalog, rule_set, excluded)
        else:
            nothing = np.zeros(0, dtype=np.int32)
            cleared = Cleared((nothing,) * catalog.num_levels, np.zeros(0, dtype=np.int64))
        return SearchState(
            pinned=pinned,
            normalization=search.normalization or config.search.normalization,
            widths=widths,
            num_results=search.num_results or config.search.num_results,
            max_items_per_sid=search.max_items_per_sid,
            return_level_scores=search.return_level_scores,
            expression=expression,
            rule_set=rule_set,
            cleared=cleared,
            num_unknown_exclusions=num_unknown + rule_set.num_unknown_tags,
        )

    def _excluded(
        self, search: Search, pinned: "LoadedCatalog", history: RenderedHistory
    ) -> tuple[Int64Array, int]:
        """Positions of all excluded items, and how many excluded ids and keys are unknown."""
        rules, catalog = search.rules, pinned.catalog
        by_id = catalog.positions_of_ids(as_int64(rules.exclude_item_ids))
        by_key = catalog.positions_of_keys(list(rules.exclude_keys))
        named = np.concatenate([by_id, by_key])
        num_unknown = int((named < 0).sum())
        parts = [named[named >= 0]]
        if rules.exclude_history:
            parts.append(history.positions)
        return np.unique(np.concatenate(parts)), num_unknown


def check_request(request: RecRequest, config: RuntimeConfig) -> Violations:
    """Everything that can be refused without a catalogue."""
    limits = config.limits
    found: Violations = []
    if len(request.request_id) > limits.max_request_id_length:
        found.append(
            (
                "request_id",
                f"at most limits.max_request_id_length = {limits.max_request_id_length} characters",
            )
        )
    inputs = {
        "history_item_ids": request.history_item_ids,
        "history_keys": request.history_keys,
        "history_sids": request.history_sids,
        "prompt_token_ids": request.prompt_token_ids,
    }
    given = {name: value for name, value in inputs.items() if value is not None}
    if len(given) != 1:
        got = ", ".join(given) or "none"
        found.append(("history", f"exactly one of {', '.join(inputs)} must be given, got {got}"))
    bound = max(limits.max_input_items, limits.max_prompt_tokens)
    for name, value in given.items():
        if len(value) > bound:
            found.append(
                (name, f"at most {bound} entries (limits.max_input_items), got {len(value)}")
            )
    if not request.searches:
        found.append(("searches", "at least one search must be given"))
    if len(request.searches) > limits.max_searches:
        found.append(
            (
                "searches",
                f"at most {limits.max_searches} searches are supported, got {len(request.searches)}",
            )
        )
    for index, search in enumerate(request.searches[: limits.max_searches]):
        found += [
            (f"searches[{index}].{name}", text) for name, text in _check_search(search, config)
        ]
    return found


def _check_search(search: Search, config: RuntimeConfig) -> Violations:
    limits, found = config.limits, Violations()

    def check_range(name: str, value: int | None, upper: int, limit: str) -> None:
        if value is not None and not 1 <= value <= upper:
            found.append(
                (name, f"must be in [1, {upper}] for this config, got {value}; see {limit}")
            )

    check_range("beam_width", search.beam_width, limits.max_beam_width, "limits.max_beam_width")
    check_range("num_results", search.num_results, limits.max_num_results, "limits.max_num_results")
    if search.beam_width is not None and search.beam_widths is not None:
        found.append(("beam_widths", "beam_width and beam_widths exclude each other"))
    for i, width in enumerate(search.beam_widths or ()):
        check_range(f"beam_widths[{i}]", width, limits.max_beam_width, "limits.max_beam_width")
    if search.max_items_per_sid is not None and search.max_items_per_sid < 1:
        found.append(("max_items_per_sid", f"must be at least 1, got {search.max_items_per_sid}"))
    if search.normalization is not None and search.normalization not in NORMALIZATIONS:
        found.append(
            (
                "normalization",
                f"must be one of {', '.join(NORMALIZATIONS)}, got {search.normalization!r}",
            )
        )
    rules = search.rules
    num_exclusions = len(rules.exclude_item_ids) + len(rules.exclude_keys)
    if num_exclusions > limits.max_exclusions:
        found.append(
            (
                "rules.exclude_item_ids",
                f"at most limits.max_exclusions = {limits.max_exclusions} items, got {num_exclusions}",
            )
        )
    num_tags = sum(len(group) for group in rules.require) + len(rules.exclude_tags)
    if num_tags > limits.max_tags or len(rules.require) > limits.max_tags:
        found.append(
            ("rules.require", f"at most limits.max_tags = {limits.max_tags} tags, got {num_tags}")
        )
    return found
