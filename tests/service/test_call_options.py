"""Targets and timeouts that gRPC would take for others."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest

from tests.service.servers import running_in_thread
from tests.service.stand_in import StandInEngine
from tests.service.waiting import PATIENCE_S
from xgr_runtime.errors import ConfigError, DeadlineExceeded, InvalidRequest
from xgr_runtime.service.call_options import check_target, check_timeout
from xgr_runtime.service.catalog_admin_client import CatalogAdminClient
from xgr_runtime.service.client import RecommendClient
from xgr_runtime.service.rpc_errors import ServiceError
from xgr_runtime.types import RecRequest

INFINITE = float("inf")
WAITS = (INFINITE, 9e9, 1e15, 1e300, 10**400, 1e9)


def request(deadline_s: float | None = None) -> RecRequest:
    return RecRequest("r", history_item_ids=np.array([3]), deadline_s=deadline_s)


@pytest.mark.parametrize(
    "target",
    [
        "127.0.0.1:0",
        "[::1]:65535",
        "host",
        "dns:///host:50051",
        "ipv4:127.0.0.1:1,127.0.0.1:2",
        "unix:/tmp/socket:99999",
        "vsock:2:99999",
    ],
)
def test_targets(target: str) -> None:
    assert check_target(target) == target


@pytest.mark.parametrize(
    "target",
    ["", "\n", "[::1]:65536", "[::1]:99999", "a:" + "9" * 5000, "ipv4:127.0.0.1:70000,127.0.0.1:2"],
)
def test_a_target_that_is_none_is_refused(target: str) -> None:
    for client in (RecommendClient, CatalogAdminClient):
        with pytest.raises(ConfigError, match="a target is") as caught:
            client(target)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 300


def test_a_long_wait_is_no_short_one() -> None:
    with running_in_thread(StandInEngine()) as target:
        for timeout_s in WAITS:
            with RecommendClient(target, timeout_s=timeout_s) as client:
                assert client.recommend(request()).results
                assert client.wait_until_serving(timeout_s)
            with (
                CatalogAdminClient(target, timeout_s=timeout_s) as admin,
                pytest.raises(ServiceError, match="no administration"),
            ):
                admin.catalogs()
        for own_s in (None, INFINITE, PATIENCE_S):
            for deadline_s in (INFINITE, 1e300, 9e9):
                with RecommendClient(target, timeout_s=own_s) as client:
                    assert client.recommend(request(deadline_s)).results


@pytest.mark.parametrize("deadline_s", [-1e300, -INFINITE, -1e15])
def test_a_deadline_long_past_is_told_in_few_words(deadline_s: float) -> None:
    with (
        RecommendClient("127.0.0.1:1") as client,
        pytest.raises(DeadlineExceeded, match="the deadline passed") as caught,
    ):
        client.recommend(request(deadline_s))
    assert len(str(caught.value)) < 80


def test_how_late_a_request_was() -> None:
    deadline_s = time.monotonic() - 2
    with (
        RecommendClient("127.0.0.1:1") as client,
        pytest.raises(DeadlineExceeded) as caught,
    ):
        client.recommend(request(deadline_s))
    told = re.search(r"passed (\d+(?:\.\d+)?) s before", str(caught.value))
    assert told is not None, caught.value
    assert 2 - 1e-4 < float(told[1]) < time.monotonic() - deadline_s + 1e-4


def test_a_deadline_that_is_no_number() -> None:
    with (
        RecommendClient("127.0.0.1:1") as client,
        pytest.raises(InvalidRequest, match="deadline_s"),
    ):
        client.recommend(request(float("nan")))


@pytest.mark.parametrize("timeout_s", [float("nan"), 0, -1, -INFINITE, "5", True])
def test_a_timeout_that_is_none_is_refused(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="timeout_s must be seconds above 0"):
        check_timeout(timeout_s)
    for client in (RecommendClient, CatalogAdminClient):
        with pytest.raises(ConfigError, match="timeout_s must be seconds above 0"):
            client("127.0.0.1:1", timeout_s=timeout_s)
