"""What tests of the service wait with; it stands in tests/helpers/waiting.py."""

from tests.helpers.waiting import NEVER, PATIENCE_S, PROCESS_S, until, wait_until, wait_until_idle

__all__ = ["NEVER", "PATIENCE_S", "PROCESS_S", "until", "wait_until", "wait_until_idle"]
