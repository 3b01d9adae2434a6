"""What is not the service's in the logs that its tests look at, and the time that its server gives to callers who are told its end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from tests.service.waiting import PATIENCE_S
from xgr_runtime.service import server

if TYPE_CHECKING:
    from collections.abc import Iterator


def is_of_a_loop_that_has_ended(record: logging.LogRecord) -> bool:
    """gRPC has one poller for all event loops of a process; on a busy machine it wakes that of a test which is over."""
    error = record.exc_info[1] if record.exc_info else None
    is_poller = "PollerCompletionQueue._handle_events" in record.getMessage()
    return is_poller and isinstance(error, RuntimeError) and str(error) == "Event loop is closed"


@pytest.fixture(autouse=True)
def loops_that_have_ended_are_silent() -> Iterator[None]:
    """A process of the service has one event loop, so that none of its users sees this."""

    def is_told(record: logging.LogRecord) -> bool:
        return not is_of_a_loop_that_has_ended(record)

    logger = logging.getLogger("asyncio")
    logger.addFilter(is_told)
    yield
    logger.removeFilter(is_told)


@pytest.fixture(autouse=True)
def answers_leave_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a busy machine takes for the answers of calls that are cut off; gRPC stops as soon as they have left."""
    monkeypatch.setattr(server, "FLUSH_S", PATIENCE_S)
