"""Cases of the ops of one round of the search: selection, normalisers, failure flags."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from xgr_runtime.conformance.beam_cases import empty_rows, random_case
from xgr_runtime.conformance.op_case import Args, OpCase, int32, normal

BEAM_SHAPES: dict[str, dict[str, Any]] = {
    "one": {"widths": [1], "child_widths": [1], "num_codes": 1},
    "odd": {"widths": [3, 0, 5], "child_widths": [7, 2, 1], "num_codes": 13, "num_nodes": 9},
    "bucket edge": {"widths": [8, 8], "child_widths": [16, 16], "num_codes": 64, "padding": 0},
    "padded": {"widths": [7, 8], "child_widths": [15, 16], "padding": 1, "child_padding": 1},
    "wide": {"widths": [512, 1], "child_widths": [512, 512], "num_codes": 33, "num_nodes": 40},
    "many rows": {"widths": [700], "child_widths": [90], "num_codes": 13, "num_nodes": 40},
    "hub": {"widths": [64], "child_widths": [512], "num_codes": 300, "num_nodes": 2, "share": 1.0},
}
SPECIAL_VALUES = {0: "ties and -inf", 1: "extreme", 2: "NaN and +inf", 3: "normal"}


def _beam_cases() -> Iterator[tuple[str, Any, str, Any]]:
    for name, changes in BEAM_SHAPES.items():
        for values, what in SPECIAL_VALUES.items():
            case = random_case(values, **{**changes, "values": values})
            for layout, trie in case.tries().items():
                yield f"{name}, {what}, {layout}", case, layout, trie


def _beam_dims(case: Any) -> dict[str, int]:
    return {"N": len(case.logits)}


def select_beams(dtype: torch.dtype) -> Iterator[OpCase]:
    def view(args: Args, result: Any) -> dict[str, torch.Tensor]:
        rows = args["children"]
        # rows skipped by early termination differ by provider; live rows do not
        written = {name: getattr(rows, name) for name in ("scores_N", "nodes_N", "parents_N")}
        return {**written, "codes_N": rows.codes_N, "live rows": args["counters"][:1]}

    for label, case, _, trie in _beam_cases():
        args = {
            "logits_NC": torch.from_numpy(case.logits),
            "lse_N": torch.from_numpy(case.lse),
            "parents": case.parent_rows(),
            "rule_row_S": case.rules(),
            "trie": trie,
            "children": empty_rows(case.child_widths, case.child_padding),
            "counters": torch.tensor([5, 7]),
        }
        yield OpCase(
            label,
            args,
            _beam_dims(case),
            is_exact=True,
            mutates=("children", "counters"),
            view=view,
        )


def children_logsumexp(dtype: torch.dtype) -> Iterator[OpCase]:
    for label, case, _, trie in _beam_cases():
        args = {
            "logits_NC": torch.from_numpy(case.logits),
            "parents": case.parent_rows(),
            "rule_row_S": case.rules(),
            "trie": trie,
        }
        yield OpCase(label, args, _beam_dims(case))


def level_logsumexp(dtype: torch.dtype) -> Iterator[OpCase]:
    for label, case, layout, _ in _beam_cases():
        if layout == "csr":
            yield OpCase(label, {"logits_NC": torch.from_numpy(case.logits)})
    one_row = normal(1, 1, 257)
    yield OpCase("stride 0", {"logits_NC": one_row.expand(512, 257)})
    yield OpCase("one", {"logits_NC": one_row[:, :1]})


def _flags(args: Args, result: Any) -> dict[str, torch.Tensor]:
    rows = args["rows"]
    is_searched_N = rows.search_of_row_N < args["status_S1"].shape[0] - 1
    return {
        "scores of searches": torch.where(is_searched_N, rows.scores_N, 0.0),
        "status_S1": args["status_S1"],
    }


def _flags_and_result(args: Args, result: Any) -> dict[str, torch.Tensor]:
    return {**_flags(args, result), "result": result}


def flagged_level_logsumexp(dtype: torch.dtype) -> Iterator[OpCase]:
    for label, case, layout, _ in _beam_cases():
        if layout == "dense":
            continue
        status = np.zeros(len(case.widths) + 1)
        status[: len(case.widths) // 2] = 1
        args = {
            "logits_NC": torch.from_numpy(case.logits),
            "rows": case.parent_rows(),
            "status_S1": int32(status),
            "round": 2,
        }
        yield OpCase(label, args, mutates=("rows", "status_S1"), view=_flags_and_result)


def flag_failed_searches(dtype: torch.dtype) -> Iterator[OpCase]:
    for label, case, layout, _ in _beam_cases():
        if layout == "dense":
            continue
        status = np.zeros(len(case.widths) + 1)
        status[: len(case.widths) // 2] = 1
        args = {
            "lse_N": torch.from_numpy(case.lse),
            "rows": case.parent_rows(),
            "status_S1": int32(status),
            "round": 2,
        }
        yield OpCase(label, args, is_exact=True, mutates=("rows", "status_S1"), view=_flags)
