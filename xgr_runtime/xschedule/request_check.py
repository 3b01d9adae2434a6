"""Limits and names of a request: everything that can be refused without a catalogue once its types are right."""

from collections.abc import Sequence

from xgr_runtime.config import LimitsConfig, RuntimeConfig
from xgr_runtime.errors import shown
from xgr_runtime.types import NORMALIZATIONS, RecRequest, Rules, Search
from xgr_runtime.xschedule.request_types import Violations, check_types


def check_request(request: RecRequest, config: RuntimeConfig) -> Violations:
    """All violations as (field, text), those of types alone if there are any; empty when the request may be resolved."""
    found = check_types(request)
    if found:
        return found
    limits = config.limits
    longest_id = limits.max_request_id_length
    if len(request.request_id) > longest_id:
        text = f"at most limits.max_request_id_length = {longest_id} characters"
        found.append(("request_id", f"{text}, got {len(request.request_id)}"))
    found += _check_inputs(request, limits)
    for name, value, known in (
        ("on_overflow", request.on_overflow, ("truncate", "error")),
        ("on_unknown", request.on_unknown, ("skip", "error")),
    ):
        if value is not None and value not in known:
            found.append((name, f"must be one of {', '.join(known)}, got {shown(value)}"))
    if not request.searches:
        found.append(("searches", "at least one search must be given"))
    if len(request.searches) > limits.max_searches:
        text = f"at most limits.max_searches = {limits.max_searches}, got {len(request.searches)}"
        found.append(("searches", text))
    for index, search in enumerate(request.searches[: limits.max_searches]):
        found += [
            (f"searches[{index}].{name}", text) for name, text in _check_search(search, limits)
        ]
    return found


def _check_inputs(request: RecRequest, limits: LimitsConfig) -> Violations:
    items = ("max_input_items", limits.max_input_items)
    bounds = {
        "history_item_ids": items,
        "history_keys": items,
        "history_sids": items,
        "prompt_token_ids": ("max_prompt_tokens", limits.max_prompt_tokens),
    }
    given = {name: value for name in bounds if (value := getattr(request, name)) is not None}
    found: Violations = []
    if len(given) != 1:
        got = ", ".join(given) or "none"
        found.append(("history", f"exactly one of {', '.join(bounds)} must be given, got {got}"))
    for name, value in given.items():
        limit, bound = bounds[name]
        if len(value) > bound:
            found.append((name, f"at most limits.{limit} = {bound} entries, got {len(value)}"))
    return found + _check_keys("history_keys", request.history_keys or (), limits)


def _check_keys(name: str, keys: Sequence[str], limits: LimitsConfig) -> Violations:
    longest = max(map(len, keys), default=0)
    if longest <= limits.max_key_length:
        return []
    limit = f"limits.max_key_length = {limits.max_key_length}"
    return [(name, f"a key has at most {limit} characters, got {longest}")]


def _check_names(search: Search, limits: LimitsConfig) -> Violations:
    found: Violations = []
    limit = f"limits.max_name_length = {limits.max_name_length}"
    for name, text in (("catalog", search.catalog), ("catalog_version", search.catalog_version)):
        if len(text) > limits.max_name_length:
            found.append((name, f"at most {limit} characters, got {len(text)}"))
    return found


def _check_search(search: Search, limits: LimitsConfig) -> Violations:
    found = _check_names(search, limits)

    def check_range(name: str, value: int | None, upper: int, limit: str) -> None:
        if value is not None and not 1 <= value <= upper:
            text = f"must be in [1, {upper}], got {shown(value)}; raise limits.{limit} to allow"
            found.append((name, text))

    check_range("beam_width", search.beam_width, limits.max_beam_width, "max_beam_width")
    check_range("num_results", search.num_results, limits.max_num_results, "max_num_results")
    if search.beam_width is not None and search.beam_widths is not None:
        found.append(("beam_widths", "beam_width and beam_widths exclude each other"))
    for i, width in enumerate(search.beam_widths or ()):
        check_range(f"beam_widths[{i}]", width, limits.max_beam_width, "max_beam_width")
    most = search.max_items_per_sid
    if most is not None and most < 1:
        found.append(("max_items_per_sid", f"must be at least 1, got {shown(most)}"))
    if search.normalization is not None and search.normalization not in NORMALIZATIONS:
        known = ", ".join(NORMALIZATIONS)
        found.append(
            ("normalization", f"must be one of {known}, got {shown(search.normalization)}")
        )
    return found + [(f"rules.{name}", text) for name, text in _check_rules(search.rules, limits)]


def _check_rules(rules: Rules, limits: LimitsConfig) -> Violations:
    found: Violations = []
    for number, group in enumerate(rules.require):
        if not group:
            found.append((f"require[{number}]", "must name at least one tag"))
    num_exclusions = len(rules.exclude_item_ids) + len(rules.exclude_keys)
    if num_exclusions > limits.max_exclusions:
        text = (
            f"at most limits.max_exclusions = {limits.max_exclusions} items, got {num_exclusions}"
        )
        found.append(("exclude_item_ids", text))
    found += _check_keys("exclude_keys", rules.exclude_keys, limits)
    num_tags = sum(len(group) for group in rules.require) + len(rules.exclude_tags)
    if max(num_tags, len(rules.require)) > limits.max_tags:
        text = f"at most limits.max_tags = {limits.max_tags} tags, got {num_tags}"
        found.append(("require", text))
    groups = {"exclude_tags": rules.exclude_tags}
    groups |= {f"require[{number}]": group for number, group in enumerate(rules.require)}
    for name, tags in groups.items():
        longest = max(map(len, tags), default=0)
        if longest > limits.max_tag_length:
            limit = f"limits.max_tag_length = {limits.max_tag_length}"
            found.append((name, f"a tag has at most {limit} characters, got {longest}"))
    return found
