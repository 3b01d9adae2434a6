"""What is not the service's in the logs that its tests look at."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

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
