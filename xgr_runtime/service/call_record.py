"""One call from its arrival to its end: counted in the totals, and told in one line of the log."""

import logging
import time

from xgr_runtime.service.call_totals import CallTotals
from xgr_runtime.service.rpc_errors import RpcFailure, internal_failure

# gRPC cancels a call at its deadline by a clock of its own.
CLOCK_TOLERANCE_S = 0.01
logger = logging.getLogger(__name__)


class CallRecord:
    """Exactly one `end_...` ends it; a call that is left without one has failed. request_id is "" until the message is read."""

    def __init__(self, totals: CallTotals, *, is_logged: bool) -> None:
        self.arrival_s = time.monotonic()
        self.request_id = ""
        self._totals, self._is_logged = totals, is_logged
        self._is_open = True
        totals.start()

    def __enter__(self) -> "CallRecord":
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_open:
            self.end_failed(internal_failure())

    def end_ok(self) -> None:
        """The call is answered."""
        seconds = time.monotonic() - self.arrival_s
        self._is_open = False
        self._totals.end_ok(seconds)
        self._log("OK", f"OK in {1e3 * seconds:.1f} ms", seconds)

    def end_failed(self, failure: RpcFailure) -> None:
        """The call is answered with another status."""
        seconds = time.monotonic() - self.arrival_s
        self._is_open = False
        self._totals.end_failed(failure)
        code = failure.code.name
        self._log(code, f"{code} in {1e3 * seconds:.1f} ms: {failure.message}", seconds)

    def end_cancelled(self, remaining_s: float | None) -> None:
        """Nobody waits for an answer. remaining_s: until the call's deadline, None without one."""
        seconds = time.monotonic() - self.arrival_s
        is_late = remaining_s is not None and remaining_s <= CLOCK_TOLERANCE_S
        self._is_open = False
        code = self._totals.end_cancelled(is_late=is_late)
        what = "cancelled by its deadline" if is_late else "cancelled"
        self._log(code, f"{what} after {1e3 * seconds:.1f} ms", seconds)

    def _log(self, status: str, text: str, seconds: float) -> None:
        if not self._is_logged:
            return
        fields = {"status": status, "duration_ms": 1e3 * seconds}
        if self.request_id:
            fields["request_id"] = self.request_id
        subject = f"request {self.request_id}" if self.request_id else "a call without a message"
        logger.info("%s %s", subject, text, extra=fields)
