"""The Triton providers of the NPU, interpreted: parity on all op cases, tile borders, exact merges, the reorder, refusals."""

from __future__ import annotations

import itertools
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

import torch

from tools._ladder.l4_cuda import check_cuda
from tools._ladder.l4_reorder import check_any_order, check_reorder
from tools._ladder.l4_report import MODULE, PROVIDER, Report, provider_functions
from xgr_runtime.conformance.op_case import OpCase, int32, normal
from xgr_runtime.conformance.op_cases import GENERATORS
from xgr_runtime.conformance.parity import check_provider, refusal
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.hal.registry import OpSpec, all_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Functions = Mapping[str, Callable[..., Any]]

DTYPES = (torch.float32, torch.float16)
BITS = {torch.float32: torch.int32, torch.float16: torch.int16}
PACKAGES = ("triton", "triton-ascend", "numpy", "torch")
# query heads, KV heads, head dim: those of Qwen3 0.6B, of small heads, of more heads than a tile takes, of uneven ones
HEADS = ((16, 8, 128), (14, 2, 64), (40, 10, 128), (21, 7, 96))
# 512 rows of these take most of the time and, beside the same cases under small grids, no path of their own.
SLOW_OPS = ("unshared_attention", "merge_attention_states", "reorder_unshared_kv")
SLOW_CASES = "wide"


class InterpretedDevice(CpuDevice):
    """The CPU's memory under the kind that the providers are registered for; an interpreter stands for the chip."""

    kind = "npu"
    capability = "Ascend910B2"


def run_checks() -> Report:
    """Everything, in the environment this process was started in."""
    installed = {d.metadata["Name"] for d in metadata.distributions()}
    report = Report({name: metadata.version(name) for name in PACKAGES if name in installed})
    functions = provider_functions(report)
    providers: Any = import_module(MODULE)
    for dtype in DTYPES:
        check_parity(functions, dtype, "cases", report)
    check_model_shapes(functions, report)
    check_merge_bits(functions["merge_attention_states"], report)
    check_bf16_is_refused(functions, report)
    check_gaps_are_refused(functions, report)
    for dtype in DTYPES:
        check_reorder(functions["reorder_unshared_kv"], dtype, report)

        def move(*args: Any) -> None:
            providers.launch_move_slots(*args, providers.RULES)

        check_any_order(move, dtype, report)
    # Tiles and grids of a chip much smaller than any, so that small cases cross their borders.
    providers.RULES = providers.LaunchRules(num_programs=3, max_tile_elements=256)
    check_parity(functions, torch.float32, "cases with small tiles", report)
    check_cuda(report)
    return report


def check_parity(functions: Functions, dtype: torch.dtype, count: str, report: Report) -> None:
    """Every provider on the cases of its op, as on a device: values, dtypes, new memory, no stray writes."""
    for op_name, fn in functions.items():

        def cases(dtype: torch.dtype, op_name: str = op_name) -> Iterator[OpCase]:
            for case in GENERATORS[op_name](dtype):
                if op_name not in SLOW_OPS or not case.label.startswith(SLOW_CASES):
                    yield case

        _check(op_name, fn, dtype, cases, count, report)


def check_model_shapes(functions: Functions, report: Report) -> None:
    """The attention stages at heads of models, and keys and values that lie in memory differently."""
    for op_name, generator in (
        ("unshared_attention", _unshared_cases),
        ("merge_attention_states", _merge_cases),
        ("write_unshared_kv", _write_cases),
    ):
        for dtype in DTYPES:
            _check(op_name, functions[op_name], dtype, generator, "cases of model shape", report)


def _check(
    op_name: str,
    fn: Callable[..., Any],
    dtype: torch.dtype,
    generator: Callable[[torch.dtype], Iterator[OpCase]],
    count: str,
    report: Report,
) -> None:
    op = all_ops()[op_name]
    entry = check_provider(op, PROVIDER, fn, dtype, InterpretedDevice(), generator)
    report.counts[count] += entry.num_run
    report.require(entry.num_run > 0, f"{op_name}, {dtype}: all cases refused: {entry.refusals}")
    for label, message in entry.failures:
        report.require(False, f"{op_name}, {count}, {label}, {dtype}: {message}")
    report.note(op_name)


def _unshared_cases(dtype: torch.dtype) -> Iterator[OpCase]:
    for heads, kv_heads, dim in HEADS:
        for num_tokens in (1, 2):
            own = [torch.full((5, 2, kv_heads, dim), torch.nan) for _ in range(2)]
            for seed, rows in enumerate(own):
                rows[:3, :num_tokens] = normal(seed, 3, num_tokens, kv_heads, dim)
            args = {
                "q_NQD": normal(7, 3, heads, dim, dtype=dtype),
                "k_rows": own[0].to(dtype),
                "v_rows": own[1].to(dtype),
                "slot_N": int32([2, 0, 1]),
                "num_tokens": num_tokens,
                "scale": dim**-0.5,
            }
            dims = {"N": 3, "Q": heads, "G": kv_heads, "D": dim}
            yield OpCase(f"{heads}, {kv_heads}, {dim}, {num_tokens} tokens", args, dims)


def _merge_cases(dtype: torch.dtype) -> Iterator[OpCase]:
    for heads, _, dim in HEADS:
        args = {
            "out_a_NQD": normal(1, 3, heads, dim, dtype=dtype),
            "lse_a_NQ": normal(2, 3, heads) * 9,
            "out_b_NQD": normal(3, 3, heads, dim, dtype=dtype),
            "lse_b_NQ": normal(4, 3, heads) * 9,
        }
        yield OpCase(f"{heads}, {dim}", args, {"N": 3, "Q": heads, "D": dim})


def _write_cases(dtype: torch.dtype) -> Iterator[OpCase]:
    def view(args: dict[str, Any], result: Any) -> dict[str, torch.Tensor]:
        return {name: args[name] for name in ("k_rows", "v_rows")}

    for heads, kv_heads, dim in HEADS:
        fused = normal(1, 3, heads + 2 * kv_heads, dim, dtype=dtype)
        args = {
            "k_NGD": fused[:, heads : heads + kv_heads],
            "v_NGD": fused[:, heads + kv_heads :].contiguous(),
            "k_rows": normal(2, 5, 2, kv_heads, dim, dtype=dtype),
            "v_rows": normal(3, 5, 3, kv_heads, dim, dtype=dtype)[:, 1:],
            "slot_N": int32([3, 0, 1]),
            "position": 1,
        }
        dims = {"N": 3, "G": kv_heads, "D": dim}
        yield OpCase(f"{kv_heads}, {dim}", args, dims, True, ("k_rows", "v_rows"), view)


def check_merge_bits(merge: Callable[..., Any], report: Report) -> None:
    """Where one side is empty the other passes bit for bit, zeros of either sign and the largest numbers too."""
    for dtype, (is_a_empty, is_b_empty) in itertools.product(
        DTYPES, ((False, True), (True, False), (True, True))
    ):
        edges = torch.tensor([0.0, -0.0, 65504.0, -65504.0, 6e-8, -6e-8, 1.0, -1.0])
        full = torch.cat((edges.repeat(2), normal(5, 16))).view(2, 2, 8).to(dtype)
        full_lse = torch.tensor([[700.0, -700.0], [0.0, -0.0]])
        empty, empty_lse = torch.zeros_like(full), torch.full((2, 2), -torch.inf)
        a = (empty, empty_lse) if is_a_empty else (full, full_lse)
        b = (empty, empty_lse) if is_b_empty else (full, full_lse)
        out, lse = merge(*a, *b)
        expected = (empty, empty_lse) if is_a_empty and is_b_empty else (full, full_lse)
        is_same = torch.equal(out.view(BITS[dtype]), expected[0].view(BITS[dtype]))
        is_same &= torch.equal(lse.view(torch.int32), expected[1].view(torch.int32))
        where = f"merge_attention_states, {dtype}, a empty {is_a_empty}, b empty {is_b_empty}"
        report.count("exact merges")
        report.require(is_same, f"{where}: other bits: {out}, {lse}")


def check_bf16_is_refused(functions: Functions, report: Report) -> None:
    """Interpreters compute bfloat16 wrongly without an error: neither binding nor a direct call may get there."""
    for op_name, fn in functions.items():
        spec = OpSpec("npu", torch.bfloat16, "Ascend910B2")
        reason = refusal(all_ops()[op_name], PROVIDER, spec)
        is_refused = reason is not None and "interpreted Triton" in reason
        report.require(is_refused, f"{op_name}: bfloat16 accepted by the registry: {reason}")
        case = next(GENERATORS[op_name](torch.bfloat16))
        _require_refusal(fn, case.args, "interpreted Triton", f"{op_name}, bfloat16", report)
        report.count("bf16 refusals")


def check_gaps_are_refused(functions: Functions, report: Report) -> None:
    """Rows that are not contiguous inside would be read wrongly."""
    for op_name, name in (
        ("unshared_attention", "q_NQD"),
        ("merge_attention_states", "out_a_NQD"),
        ("write_shared_kv", "k_TGD"),
        ("write_unshared_kv", "k_rows"),
        ("reorder_unshared_kv", "kv_rows"),
    ):
        args = next(case.args for case in GENERATORS[op_name](torch.float32) if "odd" in case.label)
        args[name] = args[name].transpose(-1, -2).contiguous().transpose(-1, -2)
        _require_refusal(functions[op_name], args, "contiguous", f"{op_name}, {name}", report)
        report.count("refused strides")


def _require_refusal(
    fn: Callable[..., Any], args: Mapping[str, Any], text: str, where: str, report: Report
) -> None:
    try:
        fn(**args)
    except ValueError as error:
        report.require(text in str(error), f"{where}: refused for another reason: {error}")
    else:
        report.require(False, f"{where}: not refused")
