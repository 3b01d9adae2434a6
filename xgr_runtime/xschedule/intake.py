"""From a request to a request state: every limit checked, defaults filled in, history rendered, rules resolved.

All violations are collected before anything is refused, so that a caller mends them in one go.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from xgr_runtime.config import RuntimeConfig
from xgr_runtime.errors import InvalidRequest
from xgr_runtime.kvcache.prefix_keys import PrefixKeys, prefix_keys
from xgr_runtime.types import Int64Array, RecRequest, Search
from xgr_runtime.xbeam.rules import Cleared, RuleCache, TagExpression, clear_exclusions
from xgr_runtime.xbeam.template import Template
from xgr_runtime.xschedule.history import RenderedHistory, render_history
from xgr_runtime.xschedule.request import RequestState, SearchState, as_int64
from xgr_runtime.xschedule.request_check import check_request

if TYPE_CHECKING:
    from xgr_runtime.xschedule.catalogs import CatalogStore, LoadedCatalog
    from xgr_runtime.xschedule.request_types import Violations


_EVERYTHING = TagExpression()
_NO_ITEMS = np.zeros(0, dtype=np.int64)
_NO_EDGES = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class Intake:
    """What preparing a request needs. prefix_root: parent key of the first page of every history; None: no reuse."""

    config: RuntimeConfig
    template: Template
    catalogs: "CatalogStore"
    rule_cache: RuleCache
    vocab_size: int
    prefix_root: bytes | None

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
            prefix=self._prefix_keys(history.token_ids),
        )

    def _prefix_keys(self, token_ids: Int64Array) -> PrefixKeys | None:
        if self.prefix_root is None:
            return None
        return prefix_keys(self.prefix_root, token_ids, self.config.cache.page_size_tokens)

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
        rules = search.rules
        expression = _EVERYTHING
        if rules.require or rules.exclude_tags:
            expression = TagExpression.canonical(rules.require, rules.exclude_tags)
        rule_set = self.rule_cache.get(catalog, expression)
        excluded, num_unknown = _NO_ITEMS, 0
        if len(rules.exclude_item_ids) or rules.exclude_keys or rules.exclude_history:
            excluded, num_unknown = self._excluded(search, pinned, history)
        if len(excluded):
            cleared = clear_exclusions(catalog, rule_set, excluded)
        else:
            cleared = Cleared((_NO_EDGES,) * catalog.num_levels, _NO_ITEMS)
        return SearchState(
            pinned=pinned,
            normalization=search.normalization or config.search.normalization,
            widths=widths,
            num_results=search.num_results or config.search.num_results,
            max_items_per_sid=search.max_items_per_sid,
            return_level_scores=search.return_level_scores,
            expression=rule_set.expression,
            rule_set=rule_set,
            cleared=cleared,
            num_unknown_exclusions=num_unknown + rule_set.num_unknown_tags,
        )

    def _excluded(
        self, search: Search, pinned: "LoadedCatalog", history: RenderedHistory
    ) -> tuple[Int64Array, int]:
        """Positions of all excluded items, some of them twice, and how many excluded ids and keys are unknown."""
        rules, catalog = search.rules, pinned.catalog
        by_id = catalog.positions_of_ids(as_int64(rules.exclude_item_ids))
        by_key = catalog.positions_of_keys(list(rules.exclude_keys))
        named = np.concatenate([by_id, by_key])
        num_unknown = int((named < 0).sum())
        parts = [named[named >= 0]]
        if rules.exclude_history:
            parts.append(history.positions)
        return np.concatenate(parts), num_unknown
