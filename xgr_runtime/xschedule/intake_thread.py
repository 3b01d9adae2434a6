"""Where requests are prepared: on a thread of their own, in the order in which they came, so that whatever a tag expression or
a long list of exclusions takes holds up neither the caller nor the device.

A pool of one thread would do, but makes a future, a lock and a work item of its own for every request; here callers wait for
that.

A request that takes a millisecond at most, most often some tens of microseconds (`is_quick`), is better off on the engine's loop while that has nothing to do: it is handed
from thread to thread once less, which takes longer than to prepare it.
"""

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from xgr_runtime.types import RecRequest, RecResult, Rules, Search
from xgr_runtime.xschedule.request import settle

if TYPE_CHECKING:
    from concurrent.futures import Future

logger = logging.getLogger(__name__)

QUICK_ENTRIES = 8192  # of a history: of ids that have to be searched for, about a millisecond in a catalogue of a million items
QUICK_WIDTHS = 16
Asked: TypeAlias = list[RecRequest]
# The request, unless it was cancelled; its future; when it came, of time.monotonic().
Given: TypeAlias = "tuple[Asked, Future[RecResult], float]"
Prepare: TypeAlias = Callable[[Asked, "Future[RecResult]", float], None]


def is_quick(request: object) -> bool:
    """Whether preparing a request, checked or not, takes so little: a history as an array and nothing beside it, no rules of its own."""
    if not isinstance(request, RecRequest):
        return False
    ways = (request.history_item_ids, request.prompt_token_ids, request.history_keys)
    given = [history for history in (*ways, request.history_sids) if history is not None]
    if len(given) != 1 or given[0] is request.history_keys or given[0] is request.history_sids:
        return False
    if not isinstance(given[0], np.ndarray) or given[0].size > QUICK_ENTRIES:
        return False
    searches: object = request.searches
    if not isinstance(searches, tuple) or len(searches) != 1:
        return False
    return isinstance(searches[0], Search) and _is_plain(searches[0])


def _is_plain(search: Search) -> bool:
    widths: object = search.beam_widths
    if widths is not None and not (isinstance(widths, tuple) and len(widths) <= QUICK_WIDTHS):
        return False
    return _is_nothing(search.rules)


def _is_nothing(rules: object) -> bool:
    """Whether these are rules that let everything pass."""
    if not isinstance(rules, Rules) or rules.exclude_history is not False:
        return False
    named = (rules.require, rules.exclude_tags, rules.exclude_item_ids, rules.exclude_keys)
    return all(isinstance(names, tuple) and not names for names in named)


def prepare_one(prepare: Prepare, given: Given) -> None:
    """Whatever it raises, requests behind it are not to wait for ever, nor is whoever asked."""
    _, future, _ = given
    try:
        prepare(*given)
    except BaseException as error:  # of a caller's own objects: these threads get no signals
        logger.exception("a request could not be prepared")
        if not future.done():
            settle(future, error)


class IntakeThread:
    """Calls `prepare` with what it is given; its thread starts with the first. `put` and `close` are called under one lock."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self._given: SimpleQueue[Given | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="xgr-intake", daemon=True)

    def put(self, given: Given) -> None:
        """Prepare a request after all that were given before."""
        if self._thread.ident is None:
            self._thread.start()
        self._given.put(given)

    def close(self) -> None:
        """Nothing is given any more; may be called twice."""
        self._given.put(None)

    def join(self) -> None:
        """Wait until everything that was given is prepared and the thread has ended. After `close`, without the lock."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            prepare_one(self._prepare, given)
            del given  # not kept until the next one comes
