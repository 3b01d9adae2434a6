"""When a run has passed: what must have run, what may be refused, which modules may be missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from xgr_runtime.conformance.engines import EngineEntry, EngineShape
from xgr_runtime.conformance.parity import DTYPES, ParityEntry
from xgr_runtime.conformance.report import Report
from xgr_runtime.conformance.run import new_report, parity_parts, run
from xgr_runtime.hal import registry
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.hal.providers import PROVIDER_MODULES, load_providers
from xgr_runtime.hal.registry import PARTS, REFERENCE

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = ("float32", "float16", "bfloat16")
NO_TRITON = "could not be imported: No module named 'triton'"


def report_of(
    *entries: ParityEntry | EngineEntry, kind: str = "npu", allow_reference: bool = False
) -> Report:
    return Report(
        xgr_version="0",
        started_utc="",
        environment={},
        device={"kind": kind},
        options={"allow_reference": allow_reference},
        parity=[entry for entry in entries if isinstance(entry, ParityEntry)],
        engines=[entry for entry in entries if isinstance(entry, EngineEntry)],
        is_complete=True,
    )


def op(provider: str, *, refused: tuple[str, ...] = ()) -> list[ParityEntry]:
    """One entry a dtype, of three cases each."""
    return [
        ParityEntry("attention", provider, name, 3, refusals={"takes no such": 3})
        if name in refused
        else ParityEntry("attention", provider, name, 3, 3)
        for name in NAMES
    ]


def engines(page_size: int, *, refused: tuple[str, ...] = ()) -> list[EngineEntry]:
    return [
        EngineEntry("searches", EngineShape(dtype, page_size), 0 if name in refused else 5)
        for dtype, name in zip(DTYPES, NAMES, strict=True)
    ]


def never(report: Report) -> list[str]:
    assert report.result == ("failed" if report.never_ran else "passed")
    assert [f"{part['what']} in {part['dtype']}" for part in report.to_dict()["never_ran"]] == [
        line.removeprefix("nothing of ").removesuffix(" could run")
        for line in report.summary()
        if line.startswith("nothing of ")
    ]
    return [str(part) for part in report.never_ran]


def test_a_dtype_that_no_provider_takes_fails_though_the_reference_ran() -> None:
    fused = op("fused", refused=("float32",))
    report = report_of(*op(REFERENCE), *fused)
    assert never(report) == ["attention in float32"]
    assert never(report_of(*op(REFERENCE), *fused, kind="cpu")) == ["attention in float32"]
    other = op("composed", refused=("float16", "bfloat16"))
    assert never(report_of(*op(REFERENCE), *fused, *other)) == []


def test_the_reference_counts_alone_and_where_engines_may_use_it() -> None:
    everything = [f"attention in {name}" for name in NAMES]
    assert never(report_of(*op(REFERENCE))) == everything
    assert never(report_of(*op(REFERENCE), allow_reference=True)) == []
    assert never(report_of(*op(REFERENCE), kind="cpu")) == []


def test_a_fused_op_ran_where_it_ran_by_its_parts() -> None:
    reference, parts = op(REFERENCE), op(PARTS, refused=("float16",))
    assert never(report_of(*reference, *parts)) == ["attention in float16"]
    assert never(report_of(*reference, *parts, *op("fused", refused=NAMES[:1]))) == []
    # where references are among the parts, a part that nobody provides is no refusal
    assert never(report_of(*reference, *parts, allow_reference=True)) == []


def test_engines_may_refuse_a_page_size_but_not_a_dtype() -> None:
    half = ("float16", "bfloat16")
    assert never(report_of(*engines(4, refused=half), *engines(128))) == []
    report = report_of(*engines(4, refused=half), *engines(128, refused=half))
    assert never(report) == ["searches in float16", "searches in bfloat16"]


def test_refusals_everywhere() -> None:
    report = report_of(*op("fused", refused=NAMES), *engines(4, refused=NAMES))
    assert never(report) == [f"{what} in {name}" for what in ("attention", "searches") for name in NAMES]  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "result"),
    [
        (NO_TRITON, "passed"),
        ("could not be imported: No module named 'triton.language.extra'", "failed"),
        ("could not be imported: cannot import name 'x' from 'xgr_ops.ascend.layout'", "failed"),
        ("could not be imported: libascend_hal.so: cannot open shared object file", "failed"),
    ],
)
def test_a_module_that_is_not_loaded_fails_the_run_unless_triton_is_absent(
    reason: str, result: str
) -> None:
    report = report_of(*op("fused"))
    report.load_failures = (("xgr_ops.ascend.attention", reason),)
    assert report.result == result
    (said,) = report.to_dict()["load_failures"]
    assert said["is_optional"] == (result == "passed")
    report.is_complete = False
    assert report.result == ("incomplete" if result == "passed" else "failed")


@pytest.fixture
def _unloadable_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention of the CPU as an installation lacks it: its module cannot be imported, nobody has registered."""
    modules = tuple(f"{m}_gone" if m.endswith("attention") else m for m in PROVIDER_MODULES["cpu"])
    monkeypatch.setitem(PROVIDER_MODULES, "cpu", modules)
    attention = registry.all_ops()["prefill_attention"]
    monkeypatch.setattr(attention, "impls", [])
    load_providers.cache_clear()
    yield
    load_providers.cache_clear()


@pytest.mark.usefixtures("_unloadable_attention")
def test_a_run_without_a_provider_module() -> None:
    device = CpuDevice()
    report = new_report(device, ["silu_mul"], {}, allow_reference=False)
    run(device, report, parity_parts(device, report))
    assert (report.is_complete, report.never_ran, report.result) == (True, [], "failed")
    assert any("xgr_ops.cpu.attention_gone was not loaded" in line for line in report.summary())


def test_a_run_of_an_op_that_all_providers_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_halves(spec: registry.OpSpec) -> str | None:
        return None if spec.dtype == torch.float32 else "takes float32 alone"

    silu_mul = registry.all_ops()["silu_mul"]
    picky = registry.Impl("picky", "cpu", silu_mul.reference, no_halves)
    monkeypatch.setattr(silu_mul, "impls", [picky])
    device = CpuDevice()
    report = new_report(device, ["silu_mul"], {}, allow_reference=False)
    run(device, report, parity_parts(device, report))
    assert never(report) == ["silu_mul in float16", "silu_mul in bfloat16"]
