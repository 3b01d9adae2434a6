"""Everything about a request that can be refused without a catalogue: limits, types, shapes, names.

Nothing is coerced: a fractional id, a flattened matrix or a misspelt option would be answered as another question.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from xgr_runtime.config import LimitsConfig, RuntimeConfig
from xgr_runtime.errors import shown
from xgr_runtime.types import (
    MAX_NAME_LENGTH,
    MAX_SEARCHES,
    NORMALIZATIONS,
    RecRequest,
    Rules,
    Search,
)

Violations = list[tuple[str, str]]

_INT64 = np.iinfo(np.int64)


def check_request(request: RecRequest, config: RuntimeConfig) -> Violations:
    """All violations as (field, text); empty when the request may be resolved."""
    limits = config.limits
    found: Violations = []
    longest_id = limits.max_request_id_length
    reason = _why_no_text(request.request_id, longest_id, "limits.max_request_id_length = ")
    if reason is not None:
        found.append(("request_id", reason))
    deadline = request.deadline_s
    if deadline is not None and (not isinstance(deadline, (int, float)) or math.isnan(deadline)):
        found.append(("deadline_s", f"must be seconds of time.monotonic(), got {shown(deadline)}"))
    found += _check_inputs(request, limits)
    for name, value, known in (
        ("on_overflow", request.on_overflow, ("truncate", "error")),
        ("on_unknown", request.on_unknown, ("skip", "error")),
    ):
        if value is not None and value not in known:
            found.append((name, f"must be one of {', '.join(known)}, got {shown(value)}"))
    if not request.searches:
        found.append(("searches", "at least one search must be given"))
    if len(request.searches) > MAX_SEARCHES:
        found.append(
            ("searches", f"at most {MAX_SEARCHES} is supported, got {len(request.searches)}")
        )
    for index, search in enumerate(request.searches[:MAX_SEARCHES]):
        found += [
            (f"searches[{index}].{name}", text) for name, text in _check_search(search, limits)
        ]
    return found


def _check_inputs(request: RecRequest, limits: LimitsConfig) -> Violations:
    items, tokens = (
        ("max_input_items", limits.max_input_items),
        (
            "max_prompt_tokens",
            limits.max_prompt_tokens,
        ),
    )
    checks: dict[str, tuple[Callable[[object], str | None], tuple[str, int]]] = {
        "history_item_ids": (_why_no_int64s, items),
        "history_keys": (_why_no_strings, items),
        "history_sids": (_why_no_sids, items),
        "prompt_token_ids": (_why_no_int64s, tokens),
    }
    given = {name: value for name in checks if (value := getattr(request, name)) is not None}
    found: Violations = []
    if len(given) != 1:
        got = ", ".join(given) or "none"
        found.append(("history", f"exactly one of {', '.join(checks)} must be given, got {got}"))
    for name, value in given.items():
        check, (limit, bound) = checks[name]
        reason = check(value)
        if reason is not None:
            found.append((name, reason))
        elif len(value) > bound:
            found.append((name, f"at most {bound} entries (limits.{limit}), got {len(value)}"))
    return found


def _check_search(search: Search, limits: LimitsConfig) -> Violations:
    found = _check_names(search)

    def check_range(name: str, value: object, upper: int, limit: str) -> None:
        if value is None:
            return
        if not _is_whole(value):
            found.append((name, f"must be a whole number, got {shown(value)}"))
        elif not 1 <= value <= upper:  # type: ignore[operator]
            found.append(
                (
                    name,
                    f"must be in [1, {upper}], got {shown(value)}; raise limits.{limit} to allow",
                )
            )

    check_range("beam_width", search.beam_width, limits.max_beam_width, "max_beam_width")
    check_range("num_results", search.num_results, limits.max_num_results, "max_num_results")
    if search.beam_width is not None and search.beam_widths is not None:
        found.append(("beam_widths", "beam_width and beam_widths exclude each other"))
    # What the types promise is checked here for callers that no type checker has seen: hence `object`.
    widths: object = () if search.beam_widths is None else search.beam_widths
    if not isinstance(widths, (tuple, list)):
        found.append(("beam_widths", f"must be a tuple of widths, got {type(widths).__name__}"))
        widths = ()
    for i, width in enumerate(widths):
        check_range(f"beam_widths[{i}]", width, limits.max_beam_width, "max_beam_width")
    most = search.max_items_per_sid
    if most is not None and (not _is_whole(most) or most < 1):
        found.append(
            ("max_items_per_sid", f"must be a whole number of at least 1, got {shown(most)}")
        )
    if search.normalization is not None and search.normalization not in NORMALIZATIONS:
        known = ", ".join(NORMALIZATIONS)
        found.append(
            ("normalization", f"must be one of {known}, got {shown(search.normalization)}")
        )
    rules = _check_rules(search.rules, limits)
    return found + [(f"rules.{name}".rstrip("."), text) for name, text in rules]


def _check_names(search: Search) -> Violations:
    names = {"catalog": search.catalog, "catalog_version": search.catalog_version}
    reasons = {name: _why_no_text(value, MAX_NAME_LENGTH) for name, value in names.items()}
    return [(name, reason) for name, reason in reasons.items() if reason is not None]


def _check_rules(rules: object, limits: LimitsConfig) -> Violations:
    if not isinstance(rules, Rules):
        return [("", f"must be Rules, got {type(rules).__name__}")]
    found: Violations = []
    flag: object = rules.exclude_history
    if not isinstance(flag, bool):
        found.append(("exclude_history", f"must be true or false, got {shown(flag)}"))
    require: object = rules.require
    if not isinstance(require, (tuple, list)):
        return [
            *found,
            ("require", f"must be a tuple of tag groups, got {type(require).__name__}"),
        ]
    reasons = {
        "exclude_item_ids": _why_no_int64s(rules.exclude_item_ids),
        "exclude_keys": _why_no_strings(rules.exclude_keys),
        "exclude_tags": _why_no_strings(rules.exclude_tags),
    }
    for number, group in enumerate(rules.require):
        reasons[f"require[{number}]"] = (
            _why_no_strings(group) if group else "must name at least one tag"
        )
    wrong = [(name, reason) for name, reason in reasons.items() if reason is not None]
    if wrong:
        return found + wrong
    num_exclusions = len(rules.exclude_item_ids) + len(rules.exclude_keys)
    if num_exclusions > limits.max_exclusions:
        found.append(
            (
                "exclude_item_ids",
                f"at most limits.max_exclusions = {limits.max_exclusions} items, got {num_exclusions}",
            )
        )
    num_tags = sum(len(group) for group in rules.require) + len(rules.exclude_tags)
    if max(num_tags, len(rules.require)) > limits.max_tags:
        found.append(
            ("require", f"at most limits.max_tags = {limits.max_tags} tags, got {num_tags}")
        )
    groups = {"exclude_tags": rules.exclude_tags}
    groups |= {f"require[{number}]": group for number, group in enumerate(rules.require)}
    for name, tags in groups.items():
        longest = max(map(len, tags), default=0)
        if longest > limits.max_tag_length:
            limit = f"limits.max_tag_length = {limits.max_tag_length}"
            found.append((name, f"a tag has at most {limit} characters, got {longest}"))
    return found


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _why_no_text(value: object, longest: int, limit: str = "") -> str | None:
    """Why `value` is no string of at most `longest` characters, None when it is."""
    if not isinstance(value, str):
        return f"must be a string, got {type(value).__name__}"
    return (
        f"at most {limit}{longest} characters, got {len(value)}" if len(value) > longest else None
    )


def _why_no_int64s(values: object) -> str | None:
    """Why `values` is no one-dimensional list of int64 numbers, None when it is."""
    if isinstance(values, np.ma.MaskedArray):
        return "must be a plain array, got a masked one"
    if isinstance(values, np.ndarray):
        if values.ndim != 1:
            return f"must have one dimension, got shape {list(values.shape)}"
        if not values.size or values.dtype.kind == "i":
            return None
        if values.dtype.kind == "u":
            return None if int(values.max()) <= _INT64.max else "must fit into 64 bits"
        return f"must be whole numbers, got {values.dtype}"
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        return f"must be an array or a sequence of whole numbers, got {type(values).__name__}"
    wrong = [v for v in values if not (_is_whole(v) and _INT64.min <= v <= _INT64.max)]
    return f"must be 64-bit whole numbers, got {shown(wrong[0])}" if wrong else None


def _why_no_strings(values: object) -> str | None:
    if not isinstance(values, (tuple, list)):
        return f"must be a tuple of strings, got {type(values).__name__}"
    wrong = [value for value in values if not isinstance(value, str)]
    return f"must be strings, got {shown(wrong[0])}" if wrong else None


def _why_no_sids(values: object) -> str | None:
    """An empty array of any shape is an empty history; else codes are whole numbers [n, levels]."""
    if not isinstance(values, np.ndarray):
        try:
            values = np.asarray(values)
        except ValueError:
            return "must be an array of codes [n, levels], got rows of several lengths"
    sids: npt.NDArray[np.generic] = values
    if not sids.size:
        return None
    if sids.ndim != 2:
        return f"must have shape [n, levels], got {list(sids.shape)}"
    return None if sids.dtype.kind in "iu" else f"must be whole numbers, got {sids.dtype}"
