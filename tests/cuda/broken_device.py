"""A GPU that a test broke for its whole process, as by an access to memory that is nobody's, breaks no further test.

After such an error every later call of that process fails, whatever it is. So the process ends with the test: a worker of
pytest-xdist as one that crashed in that test, which is then reported once more, while a new worker takes the tests
that are left; a run in one process ends there, and says so.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from xgr_runtime.conformance.parity import why_unusable

if TYPE_CHECKING:
    from collections.abc import Generator

    from xgr_runtime.hal.device import Device


class EndWithBrokenDevice:
    """A plugin of pytest: asks the device after every failure, and ends the process where it does not answer."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._message = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """The failure's report says that the device is lost."""
        report = yield
        if report.failed and not self._message:
            why = why_unusable(self._device)
            if why:
                reason = why.splitlines()[0]
                self._message = f"{item.nodeid} broke {self._device.name}: {reason}"
                report.sections.append(("the device", f"{self._message}; this process ends"))
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """All reports have been sent; xdist has not heard yet that the test is over, so that the crash is its."""
        result = yield
        if self._message and hasattr(item.config, "workerinput"):
            sys.stderr.write(f"{self._message}\n")
            sys.stderr.flush()
            os._exit(1)
        if self._message:
            pytest.exit(self._message, returncode=1)
        return result
