"""The kernels that only CUDA providers launch so far, interpreted: what is accepted by the same compilers means the same."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from xgr_runtime.conformance.beam_cases import empty_rows
from xgr_runtime.conformance.op_cases import GENERATORS
from xgr_runtime.conformance.parity import check_provider
from xgr_runtime.conformance.qkv_cases import to_pages, to_rows
from xgr_runtime.hal.cpu import CpuDevice
from xgr_runtime.hal.ops.beam import LevelTrie
from xgr_runtime.hal.registry import all_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tools._ladder.l4_report import Report
    from xgr_runtime.conformance.op_case import OpCase

PROVIDER, COUNT = "triton", "cases of CUDA providers"
ATTENTION = "xgr_ops.cuda.attention"
OTHERS = tuple(f"xgr_ops.cuda.{name}" for name in ("layers", "beam", "cache", "head"))
DTYPES = (torch.float32, torch.float16)
HISTORY_OPS = ("prefill_attention", "shared_attention")
LAYER_OPS = (
    "add_rms_norm",
    "copy_page_starts",
    "embedding_rms_norm_cos_sin",
    "rms_norm",
    "rope_write_shared_kv",
    "rope_write_unshared_kv",
    "rotary_embedding",
    "silu_mul",
)
# they know fp32 alone
BEAM_OPS = (
    "level_logsumexp",
    "children_logsumexp",
    "flag_failed_searches",
    "flagged_level_logsumexp",
    "reorder_unshared_kv",
)
# What a GPU's own Triton has and the oldest one here, Ascend's, does not: types of one bit in its interpreter, early starts,
# descriptors. Kernels for CUDA alone need no more than the former.
OLDEST_OF_GPUS = (3, 4)
NEWER_MODULE = "xgr_ops.cuda.embedding"
NEEDS_NEWER = (
    "embedding_rms_norm_cos_sin",
    "rope_write_shared_kv",
    "rope_write_unshared_kv",
)
NUM_PARTS = 3  # of the inner dim
NORM_ROWS = 4  # that a program normalises
# rows, inputs, query heads, KV heads, head dim: four heads a program, and one
HEAD_SHAPES = {"even": (9, 24, 8, 4, 16), "odd": (5, 64, 3, 1, 128)}
# by address and by descriptor; they know 16-bit numbers alone
PRODUCTS = (
    ("head_logsumexp", "triton"),
    ("head_logsumexp", "triton-tma"),
)
# many rows or a large vocabulary: most of the time, and no path of their own
SLOW_CASES = ("512", "130]", "wide", "hub", "many", "9000")
# rows, keys, programs that the device works on at once, least keys of a part: tiles that are not full, and keys in parts
SMALL_TILES = (16, 16, 100, 32)


class InterpretedGpu(CpuDevice):
    """The CPU's memory under the kind that the providers are registered for; an interpreter stands for the GPU."""

    kind = "cuda"
    capability = "sm_90"


def check_cuda(report: Report) -> None:
    """Parity of attention, layers, beams, the head and sums of parts, then attention with small tiles and split keys."""
    attention: Any = import_module(ATTENTION)
    version = import_module("triton").__version__
    is_new = tuple(map(int, version.split(".")[:2])) >= OLDEST_OF_GPUS
    for module in (*OTHERS, NEWER_MODULE) if is_new else OTHERS:
        import_module(module)
    left_out = () if is_new else NEEDS_NEWER
    for dtype in DTYPES:
        for op_name in (*HISTORY_OPS, *LAYER_OPS):
            if op_name not in left_out:
                _check(op_name, dtype, report)
    for op_name in BEAM_OPS:
        if op_name not in left_out:
            _check(op_name, torch.float32, report)
    if is_new:
        _check_too_many_places(report)
        _check_selection(report)
        _check_ties_end_early(report)
        for op_name, provider in PRODUCTS:
            _check(op_name, torch.float16, report, provider)
        _check_behind_products(report)
        _check_behind_heads(report)
    chosen = attention.tiles_for
    attention.tiles_for = lambda *_: attention.HistoryTiles(*SMALL_TILES)
    try:
        for op_name in HISTORY_OPS:
            _check(op_name, torch.float32, report)
    finally:
        attention.tiles_for = chosen


def _check_selection(report: Report) -> None:
    """Small cases at once, by few programs; then as large ones: lists of any length; thresholds of their own and full lists."""
    select: Any = import_module("xgr_ops.triton.select")
    by_four = {"LEAST_FEW_PROGRAMS": 4, "FEW_PROGRAMS": 4}
    by_lists = {"FEW_CANDIDATES": 0, "FEW_OF_ONE_ROW": 0}
    own_thresholds_full_lists = {**by_lists, "OWN_THRESHOLD_TILE": 0, "LARGEST_ROOM": -1}
    for values in (by_four, by_lists, own_thresholds_full_lists):
        before = {name: getattr(select, name) for name in values}
        try:
            for name, value in values.items():
                setattr(select, name, value)
            _check("select_beams", torch.float32, report)
        finally:
            for name, value in before.items():
                setattr(select, name, value)


def _check_ties_end_early(report: Report) -> None:
    """Of equal candidates, all of which reach the threshold, a program ranks no more than one that is no child."""
    select: Any = import_module("xgr_ops.triton.select")
    builder: Any = import_module("triton.runtime.interpreter").InterpreterBuilder
    num_codes, width = 256, 4
    codes, zero = torch.arange(num_codes, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    alive = torch.ones(1, num_codes, dtype=torch.bool)
    trie = LevelTrie(num_codes, num_codes, True, None, None, codes, alive)
    parents, children = empty_rows([1]), empty_rows([width])
    parents.scores_N.zero_()
    parents.nodes_N.zero_()
    programs = select.few_tiles(1, 1, num_codes)["PROGRAMS"]
    store, stored = builder.create_masked_store, list[None]()

    def note(self: Any, *given: Any) -> Any:
        stored.append(None)
        return store(self, *given)

    builder.create_masked_store = note
    try:
        counters = torch.zeros(2, dtype=torch.int64)
        arrays = (torch.zeros(1, num_codes), torch.zeros(1), parents, zero, trie, children)
        _provided("select_beams", PROVIDER)(*arrays, counters)
    finally:
        builder.create_masked_store = store
    # scores, nodes, parents and codes of each that is ranked
    most = 4 * (width + programs)
    report.count(COUNT)
    report.require(children.codes_N.tolist() == [0, 1, 2, 3], f"ties: {children.codes_N.tolist()}")
    report.require(
        0 < len(stored) <= most, f"ties: {len(stored)} stores, at most {most} are needed"
    )


def _check_behind_products(report: Report) -> None:
    """What follows a product; that is torch's, since warps that work apart cannot be interpreted."""
    kernels: Any = import_module("xgr_ops.cuda.linear_kernels")
    next_power_of_two = import_module("xgr_ops.triton.launch").next_power_of_two

    def norm_of_parts(
        x_NK: torch.Tensor,
        weight_MK: torch.Tensor,
        residual_NM: torch.Tensor,
        norm_weight_M: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        parts_SNM = _product_in_parts(x_NK, weight_MK)
        out_NM = torch.empty_like(residual_NM)
        num_rows, size = residual_NM.shape
        sizes = {"S": NUM_PARTS, "M": size, "M_PAD": next_power_of_two(size)}
        arrays = (parts_SNM, residual_NM, norm_weight_M, out_NM)
        kernel = kernels.add_parts_rms_norm_kernel
        kernel[(num_rows,)](*arrays, num_rows, eps, **sizes, IS_DEPENDENT=False)
        return out_NM

    def norm_of_stream(
        x_NK: torch.Tensor,
        weight_MK: torch.Tensor,
        residual_NM: torch.Tensor,
        norm_weight_M: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        residual_NM.addmm_(x_NK, weight_MK.T)
        out_NM = torch.empty_like(residual_NM)
        num_rows, size = residual_NM.shape
        sizes = {"M": size, "M_PAD": next_power_of_two(size), "TILE_ROWS": NORM_ROWS}
        programs, arrays = -(-num_rows // NORM_ROWS), (residual_NM, norm_weight_M, out_NM)
        kernel = kernels.stream_norm_kernel
        kernel[(programs,)](*arrays, num_rows, eps, **sizes, IS_DEPENDENT=False)
        return out_NM

    for dtype in DTYPES:
        for what, function in {"sum of parts": norm_of_parts, "stream": norm_of_stream}.items():
            _check_function("linear_add_rms_norm", what, function, dtype, report)


def _product_in_parts(x_NK: torch.Tensor, weight_OK: torch.Tensor) -> torch.Tensor:
    slices = [matrix.float().tensor_split(NUM_PARTS, 1) for matrix in (x_NK, weight_OK)]
    return torch.stack([x @ weight.T for x, weight in zip(*slices, strict=True)])


def _check_behind_heads(report: Report) -> None:
    """Likewise of queries, keys and values."""
    launch: Any = import_module("xgr_ops.cuda.qkv_parts").launch_parts_rope_write

    def to_slots(k: str, v: str, args: dict[str, Any]) -> torch.Tensor:
        """args: the op's, in order; those named k and v become slots."""
        position = args.pop("position", None)
        slots = (
            args[name].flatten(0, 1) if position is None else args[name][:, position]
            for name in (k, v)
        )
        x, weight, *norms_and_angles, _, _, slot = args.values()
        parts = _product_in_parts(x, weight)
        q_TQD: torch.Tensor = launch(
            parts, *norms_and_angles, *slots, slot, {"IS_DEPENDENT": False}
        )
        return q_TQD

    def pages_of_parts(**args: Any) -> torch.Tensor:
        return to_slots("k_pages", "v_pages", args)

    def rows_of_parts(**args: Any) -> torch.Tensor:
        return to_slots("k_rows", "v_rows", args)

    for dtype in DTYPES:
        for op_name, function, cases in (
            ("linear_rope_write_shared_kv", pages_of_parts, to_pages),
            ("linear_rope_write_unshared_kv", rows_of_parts, to_rows),
        ):
            shaped = partial(cases, shapes=HEAD_SHAPES)
            _check_function(op_name, "sum of parts", function, dtype, report, shaped)


def _check_too_many_places(report: Report) -> None:
    """Rows x codes that an entry of the selection cannot tell apart are refused; the rows are one row's memory."""
    args = next(GENERATORS["select_beams"](torch.float32)).args
    num_codes = args["trie"].num_codes
    args["logits_NC"] = torch.zeros(1, num_codes).expand(2**32 // num_codes + 1, num_codes)
    try:
        _provided("select_beams", PROVIDER)(**args)
    except ValueError as error:
        report.require("rows x codes" in str(error), f"select_beams: another refusal: {error}")
    else:
        report.require(False, "select_beams: more than 2^32 rows x codes not refused")


def _provided(op_name: str, provider: str) -> Callable[..., Any]:
    impls = all_ops()[op_name].impls
    return next(i.fn for i in impls if (i.provider, i.device_kind) == (provider, "cuda"))


def _check(op_name: str, dtype: torch.dtype, report: Report, provider: str = PROVIDER) -> None:
    _check_function(op_name, provider, _provided(op_name, provider), dtype, report)


def _check_function(
    op_name: str,
    provider: str,
    fn: Callable[..., Any],
    dtype: torch.dtype,
    report: Report,
    generator: Callable[[torch.dtype], Iterator[OpCase]] | None = None,
) -> None:
    """generator: None takes the op's own cases."""

    def cases(dtype: torch.dtype) -> Iterator[OpCase]:
        for case in (generator or GENERATORS[op_name])(dtype):
            if not any(part in case.label for part in SLOW_CASES):
                yield case

    entry = check_provider(all_ops()[op_name], provider, fn, dtype, InterpretedGpu(), cases)
    report.counts[COUNT] += entry.num_run
    report.require(entry.num_run > 0, f"{op_name}, {dtype}: all cases refused: {entry.refusals}")
    for label, message in entry.failures:
        report.require(False, f"{op_name} for CUDA, {label}, {dtype}: {message}")
