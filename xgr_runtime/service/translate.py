"""Requests between the wire and the engine: RecommendRequest <-> RecRequest.

The wire's field names are those of the frozen types, so a violation found here and one found by the engine name the same path.
This layer checks what can be known without a catalogue: presence, lengths, enum numbers and the configured limits; the engine
checks the rest (levels, token ids, names of catalogues).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from xgr_runtime.config import LimitsConfig
from xgr_runtime.errors import shown
from xgr_runtime.service._pb.xgr.v1 import recommend_pb2 as pb
from xgr_runtime.service.wire_arrays import (
    MAX_LEVELS,
    Violations,
    check_count,
    encode_int64,
    encode_uint32,
    is_unicode,
    read_int64,
    read_sids,
)
from xgr_runtime.types import (
    Normalization,
    OnOverflow,
    OnUnknown,
    RecRequest,
    Rules,
    Search,
)
from xgr_runtime.xschedule.request_types import check_types

INPUTS = ("history_item_ids", "history_keys", "history_sids", "prompt_token_ids")
ON_OVERFLOW: "dict[pb.OnOverflow, OnOverflow | None]" = {
    pb.ON_OVERFLOW_UNSPECIFIED: None,
    pb.ON_OVERFLOW_TRUNCATE: "truncate",
    pb.ON_OVERFLOW_ERROR: "error",
}
ON_UNKNOWN: "dict[pb.OnUnknown, OnUnknown | None]" = {
    pb.ON_UNKNOWN_UNSPECIFIED: None,
    pb.ON_UNKNOWN_SKIP: "skip",
    pb.ON_UNKNOWN_ERROR: "error",
}
NORMALIZATION: "dict[pb.Normalization, Normalization | None]" = {
    pb.NORMALIZATION_UNSPECIFIED: None,
    pb.NORMALIZATION_VOCAB: "vocab",
    pb.NORMALIZATION_LEVEL: "level",
    pb.NORMALIZATION_VALID: "valid",
}
_UINT32_END = 2**32
_Number = TypeVar("_Number", bound=int)
_Name = TypeVar("_Name")


def request_from_proto(
    message: pb.RecommendRequest,
    limits: LimitsConfig,
    request_id: str,
    deadline_s: float | None,
    found: Violations,
) -> RecRequest:
    """Check a message and turn it into a RecRequest.

    request_id and deadline_s (seconds of `time.monotonic()`) come from the call. `found` may hold faults already (of the
    request id). Raises InvalidRequest with all violations.
    """
    request = RecRequest(
        request_id=request_id,
        **_read_inputs(message, limits, found),
        searches=_read_searches(message, limits, found),
        on_overflow=_read_enum(message.on_overflow, ON_OVERFLOW, "on_overflow", found),
        on_unknown=_read_enum(message.on_unknown, ON_UNKNOWN, "on_unknown", found),
        deadline_s=deadline_s,
    )
    found.raise_if_any()
    return request


def request_to_proto(request: RecRequest) -> pb.RecommendRequest:
    """The message for a RecRequest; arrays travel as bytes. The deadline travels with the call, not in the message.

    Raises InvalidRequest for values of a wrong type and for numbers and text that the wire cannot carry.
    """
    found = Violations()
    for field, text in check_types(request):
        found.add(field, text)
    found.raise_if_any()
    _check_text(request, found)
    found.raise_if_any()
    message = pb.RecommendRequest(
        request_id=request.request_id,
        on_overflow=_enum_number(request.on_overflow, ON_OVERFLOW, "on_overflow", found),
        on_unknown=_enum_number(request.on_unknown, ON_UNKNOWN, "on_unknown", found),
        searches=[
            _search_to_proto(search, f"searches[{i}]", found)
            for i, search in enumerate(request.searches)
        ],
    )
    if request.history_item_ids is not None:
        message.history_item_ids.values_le = encode_int64(request.history_item_ids)
        message.history_item_ids.SetInParent()
    if request.history_keys is not None:
        message.history_keys.values.extend(request.history_keys)
        message.history_keys.SetInParent()
    if request.history_sids is not None:
        message.history_sids.num_levels = np.shape(request.history_sids)[-1]
        message.history_sids.values_le = encode_uint32(request.history_sids)
        message.history_sids.SetInParent()
    if request.prompt_token_ids is not None:
        message.prompt_token_ids.values_le = encode_int64(request.prompt_token_ids)
        message.prompt_token_ids.SetInParent()
    found.raise_if_any()
    return message


def _check_text(request: RecRequest, found: Violations) -> None:
    """Protobuf carries UTF-8 alone, which has no halves of surrogate pairs."""
    texts: dict[str, Iterable[str]] = {
        "request_id": (request.request_id,),
        "history_keys": request.history_keys or (),
    }
    for i, search in enumerate(request.searches):
        rules, field = search.rules, f"searches[{i}]"
        texts[f"{field}.catalog"] = (search.catalog,)
        texts[f"{field}.catalog_version"] = (search.catalog_version,)
        texts[f"{field}.rules.exclude_tags"] = rules.exclude_tags
        texts[f"{field}.rules.exclude_keys"] = rules.exclude_keys
        texts |= {f"{field}.rules.require[{g}]": group for g, group in enumerate(rules.require)}
    for field, values in texts.items():
        wrong = [text for text in values if not is_unicode(text)]
        if wrong:
            found.add(field, f"must be Unicode characters, got {shown(wrong[0])}")


def _read_inputs(
    message: pb.RecommendRequest, limits: LimitsConfig, found: Violations
) -> dict[str, Any]:
    """The inputs that are present, by field name; one is right."""
    items = ("max_input_items", limits.max_input_items)
    tokens = ("max_prompt_tokens", limits.max_prompt_tokens)
    given: dict[str, Any] = {}
    if message.HasField("history_item_ids"):
        name = "history_item_ids"
        given[name] = read_int64(message.history_item_ids, name, *items, found)
    if message.HasField("history_keys"):
        name, keys = "history_keys", message.history_keys.values
        given[name] = _read_keys(keys, name, *items, limits.max_key_length, found)
    if message.HasField("history_sids"):
        name = "history_sids"
        given[name] = read_sids(message.history_sids, name, *items, found)
    if message.HasField("prompt_token_ids"):
        name = "prompt_token_ids"
        given[name] = read_int64(message.prompt_token_ids, name, *tokens, found)
    if len(given) != 1:
        found.add(
            "history", f"exactly one of {', '.join(INPUTS)} must be given, got {_names(given)}"
        )
    return given


def _read_searches(
    message: pb.RecommendRequest, limits: LimitsConfig, found: Violations
) -> tuple[Search, ...]:
    count, most = len(message.searches), limits.max_searches
    if not count:
        found.add("searches", "at least one search must be given, got none")
    if count > most:
        found.add("searches", f"at most limits.max_searches = {most} can be given, got {count}")
        return ()
    return tuple(
        _read_search(search, f"searches[{i}]", limits, found)
        for i, search in enumerate(message.searches)
    )


def _read_search(message: pb.Search, field: str, limits: LimitsConfig, found: Violations) -> Search:
    if message.HasField("beam_width") and message.beam_widths:
        found.add(field, "beam_width or beam_widths must be given, got both")
    width_limit = ("max_beam_width", limits.max_beam_width)
    if len(message.beam_widths) > MAX_LEVELS:
        found.add(
            f"{field}.beam_widths",
            f"must hold one width per level, at most {MAX_LEVELS}, got {len(message.beam_widths)}",
        )
    else:
        for i, width in enumerate(message.beam_widths):
            _check_number(width, f"{field}.beam_widths[{i}]", *width_limit, found)
    beam_width = message.beam_width if message.HasField("beam_width") else None
    num_results = message.num_results if message.HasField("num_results") else None
    per_sid = message.max_items_per_sid if message.HasField("max_items_per_sid") else None
    _check_number(beam_width, f"{field}.beam_width", *width_limit, found)
    _check_number(
        num_results, f"{field}.num_results", "max_num_results", limits.max_num_results, found
    )
    if per_sid == 0:
        found.add(f"{field}.max_items_per_sid", "must be at least 1, got 0")
    return Search(
        catalog=_read_name(message.catalog, f"{field}.catalog", limits, found),
        catalog_version=_read_name(
            message.catalog_version, f"{field}.catalog_version", limits, found
        ),
        beam_width=beam_width,
        beam_widths=tuple(message.beam_widths[:MAX_LEVELS]) or None,
        num_results=num_results,
        normalization=_read_enum(
            message.normalization, NORMALIZATION, f"{field}.normalization", found
        ),
        rules=_read_rules(message.rules, f"{field}.rules", limits, found),
        max_items_per_sid=per_sid,
        return_level_scores=message.return_level_scores,
    )


def _read_rules(message: pb.Rules, field: str, limits: LimitsConfig, found: Violations) -> Rules:
    num_tags = len(message.exclude_tags) + len(message.require)
    if num_tags <= limits.max_tags:  # counting the tags of a million groups takes half a second
        num_tags = len(message.exclude_tags) + sum(
            max(1, len(group.any_of)) for group in message.require
        )
    require: tuple[tuple[str, ...], ...] = ()
    exclude_tags: tuple[str, ...] = ()
    if check_count(
        num_tags, f"{field}.require and exclude_tags", "max_tags", limits.max_tags, found
    ):
        require = tuple(tuple(group.any_of) for group in message.require)
        exclude_tags = tuple(message.exclude_tags)
    for i, group in enumerate(require):
        if not group:
            found.add(f"{field}.require[{i}].any_of", "must name at least one tag, got none")
        _check_tags(group, f"{field}.require[{i}].any_of", limits, found)
    _check_tags(exclude_tags, f"{field}.exclude_tags", limits, found)
    exclusions = ("max_exclusions", limits.max_exclusions)
    item_ids = read_int64(message.exclude_item_ids, f"{field}.exclude_item_ids", *exclusions, found)
    longest = limits.max_key_length
    keys = _read_keys(message.exclude_keys, f"{field}.exclude_keys", *exclusions, longest, found)
    if len(item_ids) and keys:
        names = f"{field}.exclude_item_ids and exclude_keys"
        check_count(len(item_ids) + len(keys), names, *exclusions, found)
    return Rules(
        require=require,
        exclude_tags=exclude_tags,
        exclude_item_ids=item_ids if len(item_ids) else (),
        exclude_keys=keys,
        exclude_history=message.exclude_history,
    )


def _search_to_proto(search: Search, field: str, found: Violations) -> pb.Search:
    rules = search.rules
    message = pb.Search(
        catalog=search.catalog,
        catalog_version=search.catalog_version,
        beam_width=_uint32(search.beam_width, f"{field}.beam_width", found),
        beam_widths=[
            _uint32(width, f"{field}.beam_widths[{i}]", found) or 0
            for i, width in enumerate(search.beam_widths or ())
        ],
        num_results=_uint32(search.num_results, f"{field}.num_results", found),
        normalization=_enum_number(
            search.normalization, NORMALIZATION, f"{field}.normalization", found
        ),
        max_items_per_sid=_uint32(search.max_items_per_sid, f"{field}.max_items_per_sid", found),
        return_level_scores=search.return_level_scores,
    )
    message.rules.require.extend(pb.TagGroup(any_of=group) for group in rules.require)
    message.rules.exclude_tags.extend(rules.exclude_tags)
    message.rules.exclude_keys.extend(rules.exclude_keys)
    message.rules.exclude_history = rules.exclude_history
    if len(rules.exclude_item_ids):
        message.rules.exclude_item_ids.values_le = encode_int64(rules.exclude_item_ids)
    return message


def _read_keys(
    values: Sequence[str],
    field: str,
    limit_name: str,
    limit: int,
    max_length: int,
    found: Violations,
) -> tuple[str, ...]:
    if not check_count(len(values), field, limit_name, limit, found):
        return ()
    keys = tuple(values)
    longest = max(map(len, keys), default=0)
    if longest > max_length:
        first = next(i for i, key in enumerate(keys) if len(key) > max_length)
        text = f"must have at most {max_length} characters, got {len(keys[first])}; raise limits.max_key_length to allow"
        found.add(f"{field}[{first}]", text)
    return keys


def _check_tags(tags: Iterable[str], field: str, limits: LimitsConfig, found: Violations) -> None:
    limit = limits.max_tag_length
    for i, tag in enumerate(tags):
        if not tag:
            found.add(f"{field}[{i}]", "a tag must not be empty")
        if len(tag) > limit:
            text = f"must have at most {limit} characters, got {len(tag)}; raise limits.max_tag_length to allow"
            found.add(f"{field}[{i}]", text)


def _read_name(name: str, field: str, limits: LimitsConfig, found: Violations) -> str:
    limit = limits.max_name_length
    if len(name) <= limit:
        return name
    text = f"must have at most {limit} characters, got {len(name)}; raise limits.max_name_length to allow"
    found.add(field, text)
    return ""


def _check_number(
    value: int | None, field: str, limit_name: str, limit: int, found: Violations
) -> None:
    if value is not None and not 1 <= value <= limit:
        hint = f"; raise limits.{limit_name} to allow" if value > limit else ""
        found.add(field, f"must be in [1, {limit}], got {value}{hint}")


def _read_enum(
    number: _Number, table: Mapping[_Number, _Name | None], field: str, found: Violations
) -> _Name | None:
    if number not in table:
        found.add(field, f"must be one of the numbers {_names(map(str, table))}, got {number}")
        return None
    return table[number]


def _enum_number(
    value: str | None, table: Mapping[_Number, str | None], field: str, found: Violations
) -> _Number:
    unspecified, *_ = table
    for number, name in table.items():
        if name == value:
            return number
    names = _names(name for name in table.values() if name is not None)
    found.add(field, f"must be one of {names}, got {shown(value)}")
    return unspecified


def _uint32(value: int | None, field: str, found: Violations) -> int | None:
    if value is None or 0 <= value < _UINT32_END:
        return value
    found.add(field, f"must be in [0, 2^32), got {shown(value)}")
    return None


def _names(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
