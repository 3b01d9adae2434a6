"""Types and shapes of a request, for callers that no type checker has seen: in process and before the wire.

Nothing is coerced: a fractional id, a flattened matrix, or one string where a tuple of strings is meant would be
answered as another question.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from xgr_runtime.errors import shown
from xgr_runtime.types import RecRequest, Rules, Search

Violations = list[tuple[str, str]]

_INT64 = np.iinfo(np.int64)


def _is_time(value: object) -> bool:
    """A whole number beyond every float is none."""
    if not isinstance(value, (int, float)):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:
        return False


def check_types(request: RecRequest) -> Violations:
    """Every field whose value is not of the type it is declared with, as (field, text)."""
    found: Violations = []
    request_id: object = request.request_id
    if not isinstance(request_id, str):
        found.append(("request_id", f"must be a string, got {type(request_id).__name__}"))
    deadline = request.deadline_s
    if deadline is not None and not _is_time(deadline):
        found.append(("deadline_s", f"must be seconds of time.monotonic(), got {shown(deadline)}"))
    checks: dict[str, Callable[[object], str | None]] = {
        "history_item_ids": _why_no_int64s,
        "history_keys": _why_no_strings,
        "history_sids": _why_no_sids,
        "prompt_token_ids": _why_no_int64s,
    }
    for name, check in checks.items():
        value = getattr(request, name)
        reason = None if value is None else check(value)
        if reason is not None:
            found.append((name, reason))
    searches: object = request.searches
    if not isinstance(searches, (tuple, list)):
        return [*found, ("searches", f"must be a tuple, got {type(searches).__name__}")]
    for index, search in enumerate(searches):
        found += [(f"searches[{index}]{name}", text) for name, text in _check_search(search)]
    return found


def _check_search(search: object) -> Violations:
    if not isinstance(search, Search):
        return [("", f"must be a Search, got {type(search).__name__}")]
    found: Violations = []
    for name in ("catalog", "catalog_version"):
        value: object = getattr(search, name)
        if not isinstance(value, str):
            found.append((f".{name}", f"must be a string, got {type(value).__name__}"))
    for name in ("beam_width", "num_results", "max_items_per_sid"):
        value = getattr(search, name)
        if value is not None and not _is_whole(value):
            found.append((f".{name}", f"must be a whole number, got {shown(value)}"))
    widths: object = () if search.beam_widths is None else search.beam_widths
    if not isinstance(widths, (tuple, list)):
        found.append((".beam_widths", f"must be a tuple of widths, got {type(widths).__name__}"))
        widths = ()
    for i, width in enumerate(widths):
        if not _is_whole(width):
            found.append((f".beam_widths[{i}]", f"must be a whole number, got {shown(width)}"))
    return found + [(f".rules{name}", text) for name, text in _check_rules(search.rules)]


def _check_rules(rules: object) -> Violations:
    if not isinstance(rules, Rules):
        return [("", f"must be Rules, got {type(rules).__name__}")]
    found: Violations = []
    flag: object = rules.exclude_history
    if not isinstance(flag, bool):
        found.append((".exclude_history", f"must be true or false, got {shown(flag)}"))
    reasons = {
        ".exclude_item_ids": _why_no_int64s(rules.exclude_item_ids),
        ".exclude_keys": _why_no_strings(rules.exclude_keys),
        ".exclude_tags": _why_no_strings(rules.exclude_tags),
    }
    require: object = rules.require
    if isinstance(require, (tuple, list)):
        reasons |= {f".require[{n}]": _why_no_strings(group) for n, group in enumerate(require)}
    else:
        reasons[".require"] = f"must be a tuple of tag groups, got {type(require).__name__}"
    return found + [(name, reason) for name, reason in reasons.items() if reason is not None]


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


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
    if set(map(type, values)) == {int} and _INT64.min <= min(values) <= max(values) <= _INT64.max:
        return None  # as nearly always, and told in a tenth of the time
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
