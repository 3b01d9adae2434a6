"""The .proto is documentation: its example calls work as they stand, its limits are those of the configuration.

The client is `buf curl`, which is not built on Python's gRPC or protobuf and sends what grpcurl sends. It reads the .proto or asks
the server's reflection.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.service.servers import running_in_thread
from tests.service.stand_in import StandInEngine
from xgr_runtime.config import LimitsConfig, SearchDefaults
from xgr_runtime.shipped import folder

if TYPE_CHECKING:
    from collections.abc import Iterator

PROTO = folder("proto") / "xgr" / "v1" / "recommend.proto"
COMMENT = re.compile(r"^ *// ?", re.MULTILINE)
EXAMPLE = re.compile(
    r"grpcurl -plaintext .*?-d '(.*?)'\s+\\\s+(\S+) xgr.v1.RecommendService/Recommend", re.DOTALL
)
METHOD = "xgr.v1.RecommendService/Recommend"


def comments() -> str:
    """The comments of the .proto without their marks."""
    lines = PROTO.read_text(encoding="utf-8").splitlines()
    return "\n".join(COMMENT.sub("", line) for line in lines if COMMENT.match(line))


def examples() -> list[str]:
    return [data for data, _ in EXAMPLE.findall(comments())]


@pytest.fixture(scope="module")
def world() -> Iterator[tuple[str, StandInEngine]]:
    engine = StandInEngine()
    with running_in_thread(engine) as address:
        yield address, engine


def curl(address: str, data: str, *options: str) -> Any:
    buf = str(Path(sys.executable).with_name("buf"))
    command = [buf, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "-d", data, *options]
    done = subprocess.run(
        [*command, f"http://{address}/{METHOD}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("options", [("--schema", str(folder("proto"))), ("--reflect",)])
def test_the_example_calls_are_answered(
    world: tuple[str, StandInEngine], options: tuple[str, ...]
) -> None:
    address, engine = world
    first, second = examples()
    (result,) = curl(address, first, *options)["results"]
    assert (result["status"], result["numItems"]) == ("SEARCH_STATUS_OK", 3)
    ids = engine.requests[-1].history_item_ids
    assert ids is not None
    assert list(ids) == [50, 172, 181]
    (result,) = curl(address, second, *options, "-H", "x-request-id: example-1")["results"]
    request = engine.requests[-1]
    assert (request.request_id, request.history_keys) == ("example-1", ("B001", "B003"))
    (search,) = request.searches
    assert (search.beam_width, result["numItems"]) == (128, 10)
    assert search.rules.require == (("category:shoes", "category:boots"),)
    assert search.rules.exclude_history


def test_the_limits_in_the_comments_are_the_configurations() -> None:
    defaults = {f"limits.{name}": value for name, value in asdict(LimitsConfig()).items()}
    defaults |= {f"search.{name}": value for name, value in asdict(SearchDefaults()).items()}
    text = " ".join(comments().split())
    named = re.findall(r"((?:limits|search)\.\w+) \(\"?(\w+)\"?\)", text)
    assert len(named) > 15
    for name, value in named:
        assert str(defaults[name]) == value, name
