"""Addresses: refused by name, written, and read from what a service says first."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.service.waiting import PROCESS_S
from xgr_runtime.errors import ConfigError
from xgr_runtime.service.address import (
    DEFAULT_TARGET,
    check_address,
    format_address,
    read_address,
)


@pytest.mark.parametrize("host", ["a..b", "x" * 300, "no host", "\x1b[31m"])
def test_a_host_that_is_none_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on") as caught:
        check_address(host, 0)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_addresses() -> None:
    assert format_address("127.0.0.1", 5) == "127.0.0.1:5"
    assert format_address("::1", 5) == "[::1]:5"
    assert DEFAULT_TARGET == "127.0.0.1:50051"


@pytest.mark.parametrize(
    ("code", "address"),
    [
        ("from xgr_runtime.service.address import announce; announce('[::1]:5')", "[::1]:5"),
        ("print('something else: listening on 127.0.0.1:5', flush=True)", ""),
        ("", ""),
        ("import time; time.sleep(3600)", ""),
    ],
)
def test_the_address_of_a_service_that_was_started(code: str, address: str) -> None:
    start_s = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert read_address(process.stdout, 0.3 if "sleep" in code else PROCESS_S) == address
        finally:
            process.kill()
    assert time.monotonic() - start_s < PROCESS_S
