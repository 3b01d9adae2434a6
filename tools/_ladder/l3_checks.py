"""The checks of rung L3 on what the passes recorded. Importing this module loads torch_npu: only over the stand-ins."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tools._ladder import l3_sources, l3_triton
from tools._ladder.l3_border import BorderCall, BorderLog, offences
from tools._ladder.l3_planted import PLANTED, PLANTED_PLANS, PLANTED_SETTING
from tools._ladder.l3_recorder import BorderRecorder, FakeRecorder, Recorded
from tools._ladder.l3_schemas import schema_failures, stand_in_schemas, vendor_schemas
from tools._ladder.l3_vendor import GraphsOfFakes, load_vendor
from tools._ladder.l3_world import LARGEST_PLAN, NUM_LEVELS, PLANS, Setting, write_world

load_vendor()
from tools._ladder.l3_passes import CAPTURED, EAGER, Pair, Providers, Run  # noqa: E402 - after torch_npu

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

# Half precision takes pages of 128 to 512 tokens; without graphs, rounds have other buckets.
SETTINGS = (
    (Setting("bfloat16", 128), PLANS),
    (Setting("float16", 256, "biased-128"), PLANS[:3]),
    (Setting("float32", 16), PLANS[1:]),
    (Setting("float32", 128, is_capturing=False), PLANS[:2]),
    (Setting("bfloat16", 128, is_capturing=False), PLANS[:2]),
    (Setting("bfloat16", 128, is_large=True), (LARGEST_PLAN,)),
)
WORKSPACE = (
    "npu::_npu_fused_infer_attention_score_get_max_workspace"  # its size is the kernel library's
)
_HAS_KERNEL = torch._C._dispatch_has_kernel_for_dispatch_key
_KERNEL_KEYS = (
    "PrivateUse1",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)


@dataclass
class Findings:
    """Everything that was recorded, over all settings."""

    failures: list[str] = field(default_factory=list)
    npu_calls: dict[str, int] = field(default_factory=dict)
    aten_ops: set[str] = field(default_factory=set)
    providers: set[Pair] = field(default_factory=set)
    segments: set[Pair] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)
    border: dict[str, set[BorderCall]] = field(default_factory=dict)

    def count(self, name: str, number: int) -> None:
        """Add to a count of the report."""
        self.counts[name] = self.counts.get(name, 0) + number

    def note(self, recorded: Recorded) -> None:
        """Take over one pass."""
        for name in recorded.names("npu"):
            packet = name.split(".")[0].removeprefix("npu::")
            known = self.npu_calls.get(packet, 0)
            self.npu_calls[packet] = known + len(recorded.results[name])
        self.aten_ops |= recorded.names("aten")


def run_checks(folder: Path, root: Path, *, allow_reference: bool) -> dict[str, Any]:
    """Both passes for every setting, then what follows from them."""
    write_world(folder)
    found, graphs, log = Findings(), GraphsOfFakes(), BorderLog()
    watched = l3_sources.Watched(torch.npu)  # type: ignore[attr-defined]
    for setting, plans in SETTINGS:
        run = Run(folder, setting, watched, plans, allow_reference=allow_reference)
        _one_setting(run, found, log)
    found.failures += dict.fromkeys(graphs.failures)
    found.failures += update_failures(graphs)
    found.count("attention calls captured in graphs", graphs.num_captured)
    found.count("attention calls told new lengths", sum(graphs.updates.values()))
    found.failures += kernel_failures(found.aten_ops) + offences(found.border)
    files = l3_sources.sources(root)
    found.failures += l3_sources.coverage_failures(l3_sources.npu_ops(files), found.npu_calls)
    api = l3_sources.api_calls(files)
    found.failures += l3_sources.api_failures(api, torch.npu)  # type: ignore[attr-defined]
    found.failures += l3_sources.unused_api(api, watched.names, "ascend.py")
    found.count("uses of torch.npu", len(api))
    found.failures += segment_failures(found.segments)
    _compare_schemas(found)
    _run_triton(folder, found, log)
    _find_planted(folder, found, graphs, log)
    found.count("npu ops", len(found.npu_calls))
    found.count("argument shapes of npu ops", sum(found.npu_calls.values()))
    found.count("aten ops", len(found.aten_ops))
    kernels = {call.name for calls in found.border.values() for call in calls if call.is_kernel}
    found.count("kernels asked for", len(kernels))
    return {
        "counts": found.counts,
        "result": "failed" if found.failures else "passed",
        "providers": [{"op": op, "provider": name} for op, name in sorted(found.providers)],
        "failures": found.failures,
        "npu_ops": dict(sorted(found.npu_calls.items())),
    }


def _one_setting(run: Run, found: Findings, log: BorderLog) -> None:
    name, fake, border = run.setting.name, FakeRecorder(), BorderRecorder(log)
    providers: list[Providers] = []
    try:
        providers.append(run.fake(fake))
        providers.append(run.border(border))
    except Exception as error:  # noqa: BLE001 - whatever stops an engine is a finding of this rung
        found.failures.append(f"{name}: {type(error).__name__}: {error}")
    failures = [*fake.failures, *shape_failures(fake.recorded, border.recorded)]
    found.failures += [f"{name}: {text}" for text in failures]
    found.note(fake.recorded)
    found.aten_ops |= border.recorded.names("aten")
    for op, calls in border.calls.items():
        found.border.setdefault(op, set()).update(calls)
    for one in providers:
        found.providers |= one.executed
        found.count("results compared with the reference's shapes", one.num_compared)
    found.segments |= run.segments
    found.count("batches", run.num_batches)
    found.count("graphs captured", fake.num_graphs + border.num_graphs)
    largest = "kernels in the largest graph"
    in_graphs = [found.counts.get(largest, 0), *border.kernels_of_graph.values()]
    found.counts[largest] = max(in_graphs)
    found.count("ops on fake tensors", fake.recorded.num_calls)
    found.count("ops down to the border", border.recorded.num_calls)
    found.count("copies between segments that the host waited for", border.num_waits)
    if border.num_waits:
        found.failures.append(
            f"{name}: the host waited {border.num_waits} times inside batches, for copies out of memory that is not pinned"
        )


def _run_triton(folder: Path, found: Findings, log: BorderLog) -> None:
    """What the Triton providers do beside their kernels. The stock ones are bound, so these take their places."""
    watched = l3_sources.Watched(torch.npu)  # type: ignore[attr-defined]
    functions, got = l3_triton.triton_functions(), Findings()
    run = Run(folder, PLANTED_SETTING, watched, PLANS[1:2], functions)
    with l3_triton.without_kernels() as launched:
        _one_setting(run, got, log)
    failures = [*got.failures, *kernel_failures(got.aten_ops), *offences(got.border)]
    failures += l3_triton.chip_failures()
    if set(launched) != l3_triton.KERNELS:
        failures.append(
            f"expected launches of {sorted(l3_triton.KERNELS)}, got {sorted(set(launched))}"
        )
    found.failures += [f"Triton providers: {text}" for text in failures]
    found.count("launches of Triton providers without the kernel", len(launched))


def _find_planted(folder: Path, found: Findings, graphs: GraphsOfFakes, log: BorderLog) -> None:
    """Defects planted into a provider must be found, or this rung proves nothing."""
    watched = l3_sources.Watched(torch.npu)  # type: ignore[attr-defined]
    for planted in PLANTED:
        run = Run(folder, PLANTED_SETTING, watched, PLANTED_PLANS, planted.functions)
        got = Findings()
        graphs.failures.clear()
        with planted.around(), _quiet():
            _one_setting(run, got, log)
        texts = [*got.failures, *graphs.failures, *kernel_failures(got.aten_ops)]
        texts += offences(got.border)
        is_found = any(planted.expected in text for text in texts)
        found.count("planted defects found", is_found)
        if not is_found:
            found.failures.append(
                f"planted and not found: {planted.name}; expected {planted.expected!r} in {texts}"
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """torch logs a shape rule that fails, with its traceback: not where it should."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def shape_failures(fake: Recorded, border: Recorded) -> list[str]:
    """Calls of vendor ops whose C++ returned something else than their shape rule says."""
    failures = []
    for name in sorted(fake.names("npu") & border.names("npu") - {WORKSPACE}):
        for asked, expected in fake.results[name].items():
            got = border.results[name].get(asked, expected)
            if got != expected:
                failures.append(f"{name}{asked}: the shape rule says {expected}, C++ made {got}")
    return failures


def kernel_failures(ops: Iterable[str]) -> list[str]:
    """Ops of torch that torch_npu has no kernel for, so that they run on the CPU and break a capture."""
    return [
        f"{op}: torch_npu has no kernel for it, it runs on the CPU"
        for op in sorted(ops)
        if not any(_HAS_KERNEL(op, key) for key in _KERNEL_KEYS)
    ]


def update_failures(graphs: GraphsOfFakes) -> list[str]:
    """Batches of which no graph was told the lengths of its histories. float32 has no fused attention."""
    wanted = {
        plan.lengths: plan.name
        for setting, plans in SETTINGS
        if setting.is_capturing and setting.dtype != "float32"
        for plan in plans
        if plan.has_step
    }
    return [
        f"no graph was told the lengths {lengths} of {name!r} before a replay; told: {sorted(graphs.updates)}"
        for lengths, name in wanted.items()
        if not any(_is_padded(told, lengths) for told in graphs.updates)
    ]


def _is_padded(told: tuple[int, ...], lengths: tuple[int, ...]) -> bool:
    """Whether those are the lengths, with a token for each history that pads the bucket."""
    return told[: len(lengths)] == lengths and set(told[len(lengths) :]) <= {1}


def segment_failures(segments: set[Pair]) -> list[str]:
    """Kinds of segments that did not run as they should: copies and the prefill eagerly, each round both ways."""
    rounds = [f"rounds[{level}:{level + 1}]" for level in range(NUM_LEVELS)]
    wanted = {(name, how) for name in rounds for how in (CAPTURED, EAGER)}
    wanted |= {("inputs", EAGER), ("copies", EAGER), ("prefill", EAGER)}
    return [f"segment {name} never ran {how}" for name, how in sorted(wanted - segments)]


def _compare_schemas(found: Findings) -> None:
    vendors = vendor_schemas()
    found.count("npu schemas registered", len(vendors))
    for module, ours in stand_in_schemas().items():
        found.failures += schema_failures(ours, vendors, module)
        found.count("schemas of stand-ins compared", len(ours))
