"""What a message deserves, decided by the contract in plain Python: an oracle of the service's checks.

It shares no code with them, only the generated message classes: bytes that those refuse are malformed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError

from tests.helpers.oracle import Rules
from xgr_runtime.service._pb.xgr.v1 import recommend_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.helpers.oracle import Catalog, Item
    from xgr_runtime.config import LimitsConfig

INPUTS = ("history_item_ids", "history_keys", "history_sids", "prompt_token_ids")


@dataclass(frozen=True)
class Judge:
    """The catalogue, the limits and the sizes that decide."""

    catalog: Catalog
    limits: LimitsConfig
    catalog_name: str
    vocab_size: int
    num_template_tokens: int

    def verdict(self, data: bytes) -> str:
        """The name of the status that a message with these bytes must get."""
        if len(data) > self.limits.max_message_bytes:
            return "RESOURCE_EXHAUSTED"
        try:
            message = pb.RecommendRequest.FromString(data)
        except DecodeError:
            return "INVALID_ARGUMENT"
        if not (self._is_well_formed(message) and all(map(self._is_search, message.searches))):
            return "INVALID_ARGUMENT"
        search = message.searches[0]
        if search.catalog not in ("", self.catalog_name) or search.catalog_version:
            return "NOT_FOUND"
        return "OK" if self._fits_catalog(message, search) else "INVALID_ARGUMENT"

    def _is_well_formed(self, message: pb.RecommendRequest) -> bool:
        given = [name for name in INPUTS if message.HasField(name)]
        request_id = message.request_id
        if len(given) != 1 or len(message.searches) != 1:
            return False
        if len(request_id) > self.limits.max_request_id_length:
            return False
        if not all(33 <= ord(c) <= 126 for c in request_id):
            return False
        if message.on_overflow not in (0, 1, 2) or message.on_unknown not in (0, 1, 2):
            return False
        return self._is_input(given[0], getattr(message, given[0]))

    def _is_input(self, name: str, value: Any) -> bool:
        most = self.limits.max_input_items
        if name == "history_keys":
            return self._are_keys(value.values, most)
        if name == "prompt_token_ids":
            most = self.limits.max_prompt_tokens
        if name != "history_sids":
            values = int64s(value)
            return values is not None and len(values) <= most
        levels = value.num_levels
        if not 1 <= levels <= 8 or (value.values and value.values_le) or len(value.values_le) % 4:
            return False
        count = len(value.values) + len(value.values_le) // 4
        return bool(count % levels == 0 and count // levels <= most)

    def _are_keys(self, keys: Sequence[str], most: int) -> bool:
        return len(keys) <= most and all(len(k) <= self.limits.max_key_length for k in keys)

    def _is_search(self, search: pb.Search) -> bool:
        limits = self.limits
        widths = list(search.beam_widths)
        if search.HasField("beam_width"):
            widths.append(search.beam_width)
        return (
            not (search.HasField("beam_width") and search.beam_widths)
            and len(search.beam_widths) <= 8
            and all(1 <= width <= limits.max_beam_width for width in widths)
            and (
                not search.HasField("num_results")
                or 1 <= search.num_results <= limits.max_num_results
            )
            and not (search.HasField("max_items_per_sid") and search.max_items_per_sid < 1)
            and search.normalization in (0, 1, 2, 3)
            and len(search.catalog) <= limits.max_name_length
            and len(search.catalog_version) <= limits.max_name_length
            and self._are_rules(search.rules)
        )

    def _are_rules(self, rules: pb.Rules) -> bool:
        limits = self.limits
        groups = [list(group.any_of) for group in rules.require]
        tags = [tag for group in groups for tag in group] + list(rules.exclude_tags)
        ids = int64s(rules.exclude_item_ids)
        return (
            all(groups)
            and len(tags) <= limits.max_tags
            and all(1 <= len(tag) <= limits.max_tag_length for tag in tags)
            and ids is not None
            and len(ids) + len(rules.exclude_keys) <= limits.max_exclusions
            and self._are_keys(rules.exclude_keys, limits.max_exclusions)
        )

    def _fits_catalog(self, message: pb.RecommendRequest, search: pb.Search) -> bool:
        num_levels = self.catalog.num_levels
        if search.beam_widths and len(search.beam_widths) != num_levels:
            return False
        if message.HasField("prompt_token_ids"):
            tokens = int64s(message.prompt_token_ids)
            is_right = bool(tokens) and all(0 <= t < self.vocab_size for t in tokens or ())
            return is_right and not search.rules.exclude_history
        known = self._known(message)
        if known is None:
            return False
        if message.on_unknown == pb.ON_UNKNOWN_ERROR and not all(known):
            return False
        room = (self.limits.max_prompt_tokens - self.num_template_tokens) // num_levels
        is_long = sum(known) > min(self.limits.max_history_items, room)
        return not (is_long and message.on_overflow == pb.ON_OVERFLOW_ERROR)

    def _known(self, message: pb.RecommendRequest) -> list[bool] | None:
        """Whether each item of the history is known; None where the SIDs have another depth."""
        if message.HasField("history_keys"):
            keys = {item.key for item in self.catalog.items if item.key}
            return [key in keys for key in message.history_keys.values]
        if message.HasField("history_item_ids"):
            ids = {item.item_id for item in self.catalog.items}
            return [item_id in ids for item_id in int64s(message.history_item_ids) or ()]
        rows = sid_rows(message.history_sids)
        if rows and message.history_sids.num_levels != self.catalog.num_levels:
            return None
        tables = self.catalog.token_of
        return [
            all(
                code < len(table) and table[code] >= 0
                for code, table in zip(row, tables, strict=True)
            )
            for row in rows
        ]

    def allowed(self, message: pb.RecommendRequest) -> dict[int, Item]:
        """The items that an answer to a good message may hold, by id."""
        rules = message.searches[0].rules
        excluded = set(int64s(rules.exclude_item_ids) or ())
        if rules.exclude_history:
            excluded |= self._history(message)
        keep = Rules(
            [list(group.any_of) for group in rules.require],
            list(rules.exclude_tags),
            sorted(excluded),
            [key for key in rules.exclude_keys if key],
        )
        return {item.item_id: item for item in self.catalog.keep(keep).items if item.servable}

    def _history(self, message: pb.RecommendRequest) -> set[int]:
        items = self.catalog.items
        if message.HasField("history_keys"):
            keys = set(message.history_keys.values)
            return {item.item_id for item in items if item.key in keys}
        if message.HasField("history_sids"):
            sids = set(sid_rows(message.history_sids))
            return {item.item_id for item in items if item.sid in sids}
        return set(int64s(message.history_item_ids) or ())


def int64s(values: pb.Int64Values) -> list[int] | None:
    """The numbers of a list, None where its bytes are none or both forms are filled."""
    if len(values.values_le) % 8 or (values.values and values.values_le):
        return None
    return list(values.values) or [x for (x,) in struct.iter_unpack("<q", values.values_le)]


def sid_rows(sids: pb.SidValues) -> list[tuple[int, ...]]:
    """The rows of well-formed SIDs."""
    codes = list(sids.values) or [x for (x,) in struct.iter_unpack("<I", sids.values_le)]
    levels = sids.num_levels
    return [tuple(codes[i : i + levels]) for i in range(0, len(codes), levels)]
