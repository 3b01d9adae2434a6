"""What `xgr client` prints and the exit codes it gives.

Replies and messages hold text of others: keys of a catalogue, names, what a server says. No control character of it reaches a
terminal, where it could move the cursor or hide what was printed.
"""

import json
from collections.abc import Iterable
from typing import Any

import grpc

from xgr_runtime.errors import DeadlineExceeded, EngineClosed, XgrError, printable
from xgr_runtime.service.rpc_errors import CODES, ServiceError
from xgr_runtime.types import RecResult, SearchResult

EXIT_FAILED, EXIT_UNREACHABLE, EXIT_DEADLINE = 1, 3, 4


def exit_code(error: XgrError) -> int:
    """The exit code for a failed call."""
    if isinstance(error, DeadlineExceeded):
        return EXIT_DEADLINE
    is_unavailable = isinstance(error, ServiceError) and error.code is grpc.StatusCode.UNAVAILABLE
    return EXIT_UNREACHABLE if is_unavailable or isinstance(error, EngineClosed) else EXIT_FAILED


def error_text(error: XgrError) -> str:
    """The message without the status name, which is printed beside it."""
    text = str(error)
    return printable(text.partition(": ")[2] if isinstance(error, ServiceError) else text)


def status_name(error: XgrError) -> str:
    """The name of the gRPC status that stands for an error."""
    if isinstance(error, ServiceError):
        return str(error.code.name)
    return next((str(code.name) for kind, code in CODES if isinstance(error, kind)), "UNKNOWN")


def json_line(data: Any) -> str:
    """JSON in one line of printable ASCII."""
    return json.dumps(data).replace("\x7f", "\\u007f")


def table(result: RecResult, client_ms: float) -> list[str]:
    """A result as lines for people."""
    lines = [
        f"request {result.request_id}: {result.num_history_used} history items used, "
        f"{result.num_history_unknown} unknown, {result.num_prompt_tokens} prompt tokens, "
        f"{client_ms:.1f} ms (engine {result.timings.total_ms:.1f} ms)"
    ]
    for search in result.results:
        lines += [*_search_lines(search)]
    return [printable(line) for line in lines]


def _search_lines(search: SearchResult) -> Iterable[str]:
    widths = "-".join(map(str, search.beam_widths))
    yield (
        f"catalogue {search.catalog} {search.catalog_version}: {search.num_items} items of "
        f"{search.num_valid} live beams, widths {widths}, scores over {search.normalization}"
    )
    if search.reason:
        yield f"{search.status}: {search.reason}"
    if not search.num_items:
        return
    rows = [("rank", "item", "key", "sid", "score")]
    for i in range(search.num_items):
        key = printable(search.keys[i]) if search.keys is not None else ""
        sid = "-".join(map(str, search.sids[i].tolist()))
        score = f"{search.scores[i]:.4f}"
        rows.append((str(i + 1), str(search.item_ids[i]), key, sid, score))
    shown = [c for c in range(5) if c != 2 or search.keys is not None]
    sizes = [max(len(row[c]) for row in rows) for c in range(5)]
    for row in rows:
        yield "  ".join(row[c].rjust(sizes[c]) for c in shown)
