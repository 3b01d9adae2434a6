"""Cases of the cache ops: writing keys and values, copying beginnings of pages, and moving beams' own ones."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from xgr_runtime.conformance.attention_cases import HISTORIES, ROW_SHAPES, own_rows, pages_of
from xgr_runtime.conformance.difference import require
from xgr_runtime.conformance.op_case import Args, OpCase, int32, normal, starts_of


def write_shared_kv(dtype: torch.dtype) -> Iterator[OpCase]:
    def view(args: Args, result: Any) -> dict[str, torch.Tensor]:
        return {"k_pages": args["k_pages"][1:], "v_pages": args["v_pages"][1:]}

    for label, histories in HISTORIES.items():
        heads, dim, size = histories.kv_heads, histories.dim, histories.page_size
        for padding in (0, 2):
            pages = pages_of(14, histories, dtype)
            num_slots = (pages["k_pages"].shape[0] - 1) * size
            slots = size + np.random.default_rng(2).permutation(num_slots)[: sum(histories.new)]
            fused = normal(15, len(slots) + padding, 3 * heads, dim, dtype=dtype)
            args = {
                "k_TGD": fused[:, :heads],
                "v_TGD": fused[:, 2 * heads :],
                "k_pages": pages["k_pages"],
                "v_pages": pages["v_pages"],
                "slot_T": torch.from_numpy(np.concatenate((slots, np.zeros(padding, np.int64)))),
            }
            dims = {"T": len(slots) + padding, "G": heads, "D": dim, "page_size": size}
            written = ("k_pages", "v_pages")
            yield OpCase(f"{label}, padding {padding}", args, dims, True, written, view)


def copy_page_starts(dtype: torch.dtype) -> Iterator[OpCase]:
    shapes = {
        "one token": (1, 2, 3, [1]),
        "none": (2, 4, 3, [0, 0]),
        "odd": (3, 5, 6, [3, 0, 5, 2]),
        "pages of 16": (2, 16, 64, [15, 16, 1]),
        "pages of 128": (2, 128, 128, [104, 0, 127]),
        "many": (1, 16, 16, [index % 17 for index in range(33)]),
    }
    for label, (heads, size, dim, num_tokens) in shapes.items():
        number = len(num_tokens)
        pages = 1 + np.random.default_rng(4).permutation(2 * number)
        source, target = pages[:number], pages[number:]
        source[1:] = np.where(np.arange(1, number) % 3 == 1, source[0], source[1:])  # is shared
        is_copied = np.asarray(num_tokens) > 0
        args = {
            "kv_pages": normal(19, 6, 1 + 2 * number, size, heads, dim, dtype=dtype),
            "source_H": int32(source * is_copied),
            "target_H": int32(target * is_copied),
            "num_tokens_H": int32(num_tokens),
        }
        dims = {"H": number, "G": heads, "D": dim, "page_size": size}
        yield OpCase(
            label, args, dims, True, ("kv_pages",), lambda args, _: {"kv": args["kv_pages"]}
        )


def write_unshared_kv(dtype: torch.dtype) -> Iterator[OpCase]:
    def view(args: Args, result: Any) -> dict[str, torch.Tensor]:
        return {"k_rows": args["k_rows"][:-1], "v_rows": args["v_rows"][:-1]}

    for label, (num_rows, max_tokens, _, heads, dim) in ROW_SHAPES.items():
        for position in sorted({0, max_tokens - 1}):
            rows = own_rows(16, label, position, dtype)
            dummy = rows["k_rows"].shape[0] - 1
            fused = normal(17, num_rows + 2, 3 * heads, dim, dtype=dtype)
            args = {
                "k_NGD": fused[:, :heads],
                "v_NGD": fused[:, heads : 2 * heads],
                "k_rows": rows["k_rows"],
                "v_rows": rows["v_rows"],
                "slot_N": torch.cat((rows["slot_N"], int32([dummy, dummy]))),
                "position": position,
            }
            dims = {"N": num_rows + 2, "G": heads, "D": dim}
            yield OpCase(f"{label}, at {position}", args, dims, True, ("k_rows", "v_rows"), view)


def reorder_unshared_kv(dtype: torch.dtype) -> Iterator[OpCase]:
    def view(args: Args, result: Any) -> dict[str, torch.Tensor]:
        # which slot a child gets is the provider's choice; what it holds is not
        is_child = args["search_of_row_N"] < args["slot_start_S1"].shape[0] - 1
        slots = args["slot_out_N"][is_child].long()
        is_distinct = slots.cpu().unique().numel() == slots.numel()
        require(is_distinct, "two children share a slot")
        return {"kv": args["kv_rows"][:, slots, : args["num_tokens"]]}

    shapes = {
        "one": ([1], [1], 1),
        "odd": ([5, 1, 3], [7, 2, 3], 2),
        "shrinking": ([16, 9], [8, 1], 3),
        "growing": ([1, 4], [16, 16], 2),
        "wide": ([512, 1], [512, 512], 2),
        "head of 16": ([4, 9], [12, 5], 3),
    }
    for label, (num_parents, num_children, max_tokens) in shapes.items():
        dim = 16 if label == "head of 16" else 3
        for kind in ("random", "equal", "reversed"):
            rng = np.random.default_rng(3)
            widths = np.maximum(num_parents, num_children)
            starts, first = np.array(starts_of(widths.tolist())), starts_of(num_parents)
            dummy = int(starts[-1])
            parents, search, slots = [], [], []
            for s, (before, after) in enumerate(zip(num_parents, num_children, strict=True)):
                ranks = {
                    "random": rng.integers(0, before, after),
                    "equal": np.full(after, before - 1),
                    "reversed": np.arange(after)[::-1] % before,
                }[kind]
                parents.append(first[s] + ranks)
                search.append(np.full(after, s))
                slots.append(starts[s] + rng.permutation(widths[s])[:before])
            padding = 2
            shape = (4, dummy + 1, max_tokens, 2, dim)
            args = {
                "kv_rows": normal(18, *shape, dtype=dtype),
                "parents_N": int32(np.concatenate([*parents, np.full(padding, 99999)])),
                "slot_in_N": int32(np.concatenate(slots)),
                "search_of_row_N": int32(
                    np.concatenate([*search, np.full(padding, len(num_parents))])
                ),
                "slot_start_S1": int32(starts),
                "num_tokens": max_tokens,
                "slot_out_N": int32(np.full(sum(num_children) + padding, -7)),
                "tile": torch.full((4, 5, *shape[2:]), torch.nan, dtype=dtype),
            }
            dims = {"N": sum(num_children) + padding, "G": 2, "D": dim}
            written = ("kv_rows", "slot_out_N", "tile")
            yield OpCase(f"{label}, {kind}", args, dims, True, written, view)
