"""Cases of the ops that make two products, one into the residual stream and one out of it.

Rows, inputs and features that fill tiles of a GPU and do not; as many rows as its providers ask for, by hidden size, and
fewer.
"""

from collections.abc import Iterator
from typing import Any

import torch

from xgr_runtime.conformance.op_case import Args, OpCase, normal
from xgr_runtime.conformance.qkv_cases import to_pages, to_rows

# rows, inputs of the first product, hidden size, feed-forward size
GATED_SHAPES = {
    "one": (1, 2, 2, 1),
    "odd": (17, 24, 48, 40),
    "in two tiles": (130, 72, 128, 136),
    "in many tiles": (1030, 200, 192, 136),
    "long": (1100, 1032, 64, 40),
    "of a round": (260, 264, 192, 136),
    "of a round and a large hidden size": (130, 136, 1088, 104),
}
# rows, hidden size, query heads, KV heads, head dim
HEAD_SHAPES = {
    "one": (1, 2, 1, 1, 2),
    "odd": (7, 24, 3, 1, 6),
    "in three tiles": (300, 200, 4, 2, 128),
    "in many tiles": (1030, 192, 4, 2, 128),
    "odd heads in many tiles": (1100, 64, 3, 1, 64),
    "of a round": (258, 192, 4, 2, 128),
    "of a round and a large hidden size": (140, 1088, 3, 1, 64),
}


def stream_linear_silu_mul(dtype: torch.dtype) -> Iterator[OpCase]:
    def view(args: Args, result: Any) -> dict[str, torch.Tensor]:
        return {"result": result, "residual_NM": args["residual_NM"]}

    for label, (rows, inputs, hidden, features) in GATED_SHAPES.items():
        for is_scaled in (False, True):
            args = {
                **_added("N", rows, inputs, hidden, dtype),
                "gate_up_2FM": (normal(54, 2 * features, hidden) * hidden**-0.5 / 2).to(dtype),
            }
            if is_scaled:  # the norm makes such rows alike, and leaves zeros
                for name in ("x_NK", "residual_NM"):
                    args[name][::3] /= 16
                    args[name][1::3] = 0
            dims = {"T": rows, "M": hidden, "F": features}
            if "of a round" in label:
                dims |= {"N": rows, "max_rows": rows}
            what = f"{label}, {'rows of other scales' if is_scaled else 'rows alike'}"
            yield OpCase(what, args, dims, mutates=("residual_NM",), view=view)


def stream_linear_rope_write_shared_kv(dtype: torch.dtype) -> Iterator[OpCase]:
    def view(args: Args, result: Any) -> dict[str, torch.Tensor]:
        k_pages, v_pages = args["k_pages"][1:], args["v_pages"][1:]  # page 0 takes padding
        pages = {"k_pages": k_pages, "v_pages": v_pages}
        return {"result": result, "residual_TM": args["residual_TM"], **pages}

    for case in to_pages(dtype, HEAD_SHAPES):
        args = dict(case.args)
        rows, hidden = args.pop("x_TM").shape
        args["qkv_weight_OM"] = args.pop("weight_OM")
        added = _added("T", rows, 3 * hidden // 2, hidden, dtype)
        written = (*case.mutates, "residual_TM")
        yield OpCase(case.label, {**args, **added}, case.dims, mutates=written, view=view)


def stream_linear_rope_write_unshared_kv(dtype: torch.dtype) -> Iterator[OpCase]:
    def view(args: Args, result: Any) -> dict[str, torch.Tensor]:
        k_rows, v_rows = args["k_rows"][:-1], args["v_rows"][:-1]  # the last one takes padding
        stored = {"k_rows": k_rows, "v_rows": v_rows}
        return {"result": result, "residual_NM": args["residual_NM"], **stored}

    for case in to_rows(dtype, HEAD_SHAPES):
        args = dict(case.args)
        rows, hidden = args.pop("x_NM").shape
        args["qkv_weight_OM"] = args.pop("weight_OM")
        added = _added("N", rows, 3 * hidden // 2, hidden, dtype)
        written = (*case.mutates, "residual_NM")
        dims = {**case.dims, "max_rows": rows}
        yield OpCase(case.label, {**args, **added}, dims, mutates=written, view=view)


def _added(rows_name: str, rows: int, inputs: int, hidden: int, dtype: torch.dtype) -> Args:
    """What both ops begin with; `rows_name` is N or T."""
    return {
        f"x_{rows_name}K": normal(50, rows, inputs, dtype=dtype),
        "weight_MK": (normal(51, hidden, inputs) * inputs**-0.5).to(dtype),
        f"residual_{rows_name}M": normal(52, rows, hidden, dtype=dtype),
        "norm_weight_M": (1 + normal(53, hidden) / 8).to(dtype),
        "eps": 1e-6,
    }
