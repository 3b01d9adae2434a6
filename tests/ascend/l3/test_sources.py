"""What rung L3 reads off the sources, and how it is compared with what ran."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tools._ladder import l3_sources

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = """
import torch


def npu():
    return torch.npu


def provider(x, w):
    y = torch.ops.npu.npu_rms_norm(x, w)[0]
    return torch.ops.npu.npu_swiglu(y, dim=-1)


def device():
    stream = npu().Stream()
    torch.npu.graph(None, pool=None, stream=stream)
    return npu().utils.version, npu().Event(timing=True).record(stream)
"""


class Event:
    """Takes `timing`, in the way of a class that is made in C."""

    def __new__(cls, timing: bool = False) -> Any:
        return super().__new__(cls)


class Graph:
    """Takes a graph and a pool."""

    def __init__(self, graph: object, pool: object = None) -> None:
        self.made_of = graph, pool


def vendor(**members: Any) -> Any:
    everything = {"Stream": object, "Event": Event, "graph": Graph}
    return SimpleNamespace(utils=SimpleNamespace(version="1"), **(everything | members))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "ascend.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def test_vendor_ops_are_read_off_the_syntax_tree(source: Path) -> None:
    assert l3_sources.npu_ops([source]) == {
        "npu_rms_norm": "ascend.py:10",
        "npu_swiglu": "ascend.py:11",
    }


def test_uses_of_the_python_api_are_read_with_their_arguments(source: Path) -> None:
    calls = {call.name: call for call in l3_sources.api_calls([source])}
    assert set(calls) == {"Stream", "graph", "utils", "utils.version", "Event"}
    assert (calls["graph"].num_args, calls["graph"].keywords) == (1, ("pool", "stream"))
    assert calls["utils.version"].num_args is None
    assert calls["Event"].keywords == ("timing",)


def test_an_argument_that_the_vendor_does_not_take_is_reported(source: Path) -> None:
    failures = l3_sources.api_failures(l3_sources.api_calls([source]), vendor())
    assert len(failures) == 1
    assert "ascend.py:16: torch.npu.graph" in failures[0]
    assert "'stream'" in failures[0]


def test_the_signature_of_new_counts_where_there_is_no_init(source: Path) -> None:
    class Bare:
        def __new__(cls) -> Any:
            return super().__new__(cls)

    calls = [call for call in l3_sources.api_calls([source]) if call.name == "Event"]
    assert l3_sources.api_failures(calls, vendor()) == []
    assert "'timing'" in l3_sources.api_failures(calls, vendor(Event=Bare))[0]


def test_a_name_that_does_not_exist_is_reported(source: Path) -> None:
    offered = vendor()
    del offered.Stream, offered.utils
    failures = l3_sources.api_failures(l3_sources.api_calls([source]), offered)
    missing = [text for text in failures if text.endswith("does not exist")]
    assert {text.split(": ")[1] for text in missing} == {
        "torch.npu.Stream does not exist",
        "torch.npu.utils does not exist",
        "torch.npu.utils.version does not exist",
    }


def test_the_api_that_no_run_reached_is_reported(source: Path) -> None:
    watched = l3_sources.Watched(vendor())
    assert watched.Stream is object
    assert watched.utils.version == "1"
    calls = l3_sources.api_calls([source])
    unused = l3_sources.unused_api(calls, watched.names, "ascend.py")
    assert {text.split()[1] for text in unused} == {"torch.npu.graph", "torch.npu.Event"}
    assert l3_sources.unused_api(calls, watched.names, "another.py") == []


def test_an_op_is_reported_that_no_batch_reached_or_no_source_names(source: Path) -> None:
    in_sources = l3_sources.npu_ops([source])
    assert l3_sources.coverage_failures(in_sources, ["npu_swiglu", "npu_rms_norm", "_helper"]) == []
    failures = l3_sources.coverage_failures(in_sources, ["npu_swiglu", "npu_other"])
    assert failures == [
        "ascend.py:10: npu::npu_rms_norm is in the sources, and no batch reached it",
        "npu::npu_other was called and is not in the sources",
    ]
