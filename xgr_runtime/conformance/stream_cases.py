"""Cases of the ops that make two products, one into the residual stream and one out of it.

Rows, inputs and features that fill tiles of a GPU and do not; as many rows as its providers ask for, and fewer. Those for few
rows divide the inputs among programs.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from xgr_runtime.conformance.op_case import Args, OpCase, normal
from xgr_runtime.conformance.qkv_cases import Shape, to_pages, to_rows

# rows, heads and their dim that are the inputs of the first product, hidden size, feed-forward size
GATED_SHAPES = {
    "one": (1, 1, 2, 2, 1),
    "odd": (17, 3, 8, 48, 40),
    "one row of divided inputs": (1, 4, 128, 256, 136),
    "divided inputs": (100, 8, 128, 192, 72),
    "in two tiles": (130, 9, 8, 128, 136),
    "in many tiles": (1030, 25, 8, 192, 136),
    "long": (1100, 129, 8, 64, 40),
}
# rows, hidden size, query heads, KV heads, head dim
HEAD_SHAPES: Mapping[str, Shape] = {
    "one": (1, 2, 1, 1, 2),
    "odd": (7, 24, 3, 1, 6),
    "few rows": (41, 128, 4, 2, 128),
    "odd heads of few rows": (120, 64, 3, 1, 64),
    "in three tiles": (300, 200, 4, 2, 128),
    "in many tiles": (1030, 192, 4, 2, 128),
    "odd heads in many tiles": (1100, 64, 3, 1, 64),
}
ROW_INPUTS = 512  # of few rows: what the most programs divide


def stream_linear_silu_mul(dtype: torch.dtype) -> Iterator[OpCase]:
    def view(args: Args, result: Any) -> dict[str, torch.Tensor]:
        return {"result": result, "residual_NM": args["residual_NM"]}

    for label, (rows, heads, dim, hidden, features) in GATED_SHAPES.items():
        for is_scaled in (False, True):
            args = {
                **_added("N", rows, heads * dim, hidden, dtype),
                "gate_up_2FM": (normal(54, 2 * features, hidden) * hidden**-0.5 / 2).to(dtype),
            }
            if is_scaled:  # the norm makes such rows alike, and leaves zeros
                for name in ("x_NK", "residual_NM"):
                    args[name][::3] /= 16
                    args[name][1::3] = 0
            dims = {"T": rows, "M": hidden, "F": features, "Q": heads, "D": dim}
            what = f"{label}, {'rows of other scales' if is_scaled else 'rows alike'}"
            yield OpCase(what, args, dims, mutates=("residual_NM",), view=view)


def stream_linear_rope_write_shared_kv(dtype: torch.dtype) -> Iterator[OpCase]:
    def view(args: Args, result: Any) -> dict[str, torch.Tensor]:
        k_pages, v_pages = args["k_pages"][1:], args["v_pages"][1:]  # page 0 takes padding
        pages = {"k_pages": k_pages, "v_pages": v_pages}
        return {"result": result, "residual_TM": args["residual_TM"], **pages}

    for case in to_pages(dtype, HEAD_SHAPES):
        yield OpCase(**_behind_added(case, "T", dtype), view=view)


def stream_linear_rope_write_unshared_kv(dtype: torch.dtype) -> Iterator[OpCase]:
    def view(args: Args, result: Any) -> dict[str, torch.Tensor]:
        k_rows, v_rows = args["k_rows"][:-1], args["v_rows"][:-1]  # the last takes padding
        rows = {"k_rows": k_rows, "v_rows": v_rows}
        return {"result": result, "residual_NM": args["residual_NM"], **rows}

    for case in to_rows(dtype, HEAD_SHAPES):
        yield OpCase(**_behind_added(case, "N", dtype), view=view)


def _behind_added(case: OpCase, rows_name: str, dtype: torch.dtype) -> dict[str, Any]:
    """A case of the second product as one of both, all but its view; `rows_name` is N or T."""
    args = dict(case.args)
    rows, hidden = args.pop(f"x_{rows_name}M").shape
    args["qkv_weight_OM"] = args.pop("weight_OM")
    inputs = ROW_INPUTS if "few rows" in case.label else 3 * hidden // 2
    return {
        "label": case.label,
        "args": {**args, **_added(rows_name, rows, inputs, hidden, dtype)},
        "dims": {**case.dims, "F": inputs},
        "mutates": (*case.mutates, f"residual_{rows_name}M"),
    }


def _added(rows_name: str, rows: int, inputs: int, hidden: int, dtype: torch.dtype) -> Args:
    """What these ops begin with; `rows_name` is N or T."""
    return {
        f"x_{rows_name}K": normal(50, rows, inputs, dtype=dtype),
        "weight_MK": (normal(51, hidden, inputs) * inputs**-0.5).to(dtype),
        f"residual_{rows_name}M": normal(52, rows, hidden, dtype=dtype),
        "norm_weight_M": (1 + normal(53, hidden) / 8).to(dtype),
        "eps": 1e-6,
    }
