"""One input generator per op. `test_parity.py` runs every implementation of every op on what these give.

A case holds the arguments on the CPU, in the dtype under test; what an op writes in place is filled with NaN or
garbage before, and everything the contract says is ignored (stale pages, padding rows) holds NaN too. `view` picks
what the contract specifies out of the arguments and the result.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tests.ops.beam_cases import empty_rows, random_case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Args = dict[str, Any]


def results_only(args: Args, result: Any) -> dict[str, torch.Tensor]:
    """All returned tensors."""
    if isinstance(result, torch.Tensor):
        return {"result": result}
    return {f"result[{place}]": tensor for place, tensor in enumerate(result or ())}


@dataclass(frozen=True)
class OpCase:
    """A call of an op.

    args: on the CPU, floating ones in the dtype under test where the op takes it. dims: of the sizes that a provider may ask
    for (`hal.registry`), those this call has. is_exact: every bit has to agree, else the tolerance of the dtype applies.
    mutates: the arguments that the contract lets the op write to. view: what the contract specifies, by default all results.
    """

    label: str
    args: Args
    dims: Mapping[str, int] = field(default_factory=dict)
    is_exact: bool = False
    mutates: tuple[str, ...] = ()
    view: Callable[[Args, Any], dict[str, torch.Tensor]] = results_only


def _normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def _int32(values: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, np.int32))


def _starts(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


# ---- selection

BEAM_SHAPES: dict[str, dict[str, Any]] = {
    "one": {"widths": [1], "child_widths": [1], "num_codes": 1},
    "odd": {"widths": [3, 0, 5], "child_widths": [7, 2, 1], "num_codes": 13, "num_nodes": 9},
    "bucket edge": {"widths": [8, 8], "child_widths": [16, 16], "num_codes": 64, "padding": 0},
    "padded": {"widths": [7, 8], "child_widths": [15, 16], "padding": 1, "child_padding": 1},
    "wide": {"widths": [512, 1], "child_widths": [512, 512], "num_codes": 33, "num_nodes": 40},
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
    one_row = _normal(1, 1, 257)
    yield OpCase("stride 0", {"logits_NC": one_row.expand(512, 257)})
    yield OpCase("one", {"logits_NC": one_row[:, :1]})


def flag_failed_searches(dtype: torch.dtype) -> Iterator[OpCase]:
    def view(args: Args, result: Any) -> dict[str, torch.Tensor]:
        rows, num_searches = args["rows"], args["status_S1"].shape[0] - 1
        return {
            "scores of searches": rows.scores_N[rows.search_of_row_N < num_searches],
            "status_S1": args["status_S1"],
        }

    for label, case, layout, _ in _beam_cases():
        if layout == "dense":
            continue
        status = np.zeros(len(case.widths) + 1)
        status[: len(case.widths) // 2] = 1
        args = {
            "lse_N": torch.from_numpy(case.lse),
            "rows": case.parent_rows(),
            "status_S1": _int32(status),
            "round": 2,
        }
        yield OpCase(label, args, is_exact=True, mutates=("rows", "status_S1"), view=view)


# ---- attention

# new tokens, tokens in the pages, query heads, KV heads, head dim, page size
HISTORIES: dict[str, tuple[list[int], list[int], int, int, int, int]] = {
    "one": ([1], [1], 1, 1, 2, 1),
    "odd": ([3, 0, 5], [7, 0, 5], 6, 2, 6, 3),
    "cached prefix": ([4, 1], [20, 33], 4, 4, 8, 16),
    "bucket edge": ([16, 16], [16, 32], 8, 2, 16, 16),
    "past a tile": ([129, 1], [130, 257], 4, 1, 8, 16),
}


def _pages(
    seed: int, lengths: list[int], heads: int, dim: int, size: int, dtype: torch.dtype
) -> Args:
    """Pages in random order; what no history owns, and the rest of each last page, is NaN."""
    counts = [-(-length // size) for length in lengths]
    num_pages = sum(counts) + 2
    order = np.random.default_rng(seed).permutation(np.arange(1, num_pages))
    table = np.zeros((len(lengths), max(1, *counts) if len(counts) > 1 else max(1, counts[0])))
    k = torch.full((num_pages, size, heads, dim), torch.nan)
    v = k.clone()
    for h, length in enumerate(lengths):
        own = order[sum(counts[:h]) : sum(counts[: h + 1])]
        table[h, : len(own)] = own
        for place in range(length):
            at = (own[place // size], place % size)
            k[at] = _normal(seed + 31 * h + place, heads, dim)
            v[at] = _normal(seed + 31 * h + place + 7777, heads, dim)
    return {"k_pages": k.to(dtype), "v_pages": v.to(dtype), "page_table_HP": _int32(table)}


def prefill_attention(dtype: torch.dtype) -> Iterator[OpCase]:
    for label, (new, lengths, heads, kv_heads, dim, size) in HISTORIES.items():
        for padding in (0, 3):
            num_tokens = sum(new) + padding
            args = {
                "q_TQD": _normal(5, num_tokens, heads, dim, dtype=dtype),
                **_pages(11, lengths, kv_heads, dim, size, dtype),
                "q_start_H1": _int32(_starts(new)),
                "kv_len_H": _int32(lengths),
                "scale": dim**-0.5,
                "max_q": max(new) + padding,
                "max_kv": max(lengths) + padding,
                "q_starts": tuple(_starts(new)),
                "kv_lens": tuple(lengths),
            }
            dims = {"T": num_tokens, "H": len(new), "Q": heads, "G": kv_heads, "D": dim}
            dims |= {"page_size": size, "max_q": args["max_q"], "max_kv": args["max_kv"]}
            yield OpCase(f"{label}, padding {padding}", args, dims)


def shared_attention(dtype: torch.dtype) -> Iterator[OpCase]:
    for label, (_, lengths, heads, kv_heads, dim, size) in HISTORIES.items():
        for rows in ([1] * len(lengths), [512] * len(lengths), [0, 9, 130][: len(lengths)]):
            for padding in (0, 2):
                num_rows = sum(rows) + padding
                if num_rows == 0:
                    continue
                args = {
                    "q_NQD": _normal(6, num_rows, heads, dim, dtype=dtype),
                    **_pages(12, lengths, kv_heads, dim, size, dtype),
                    "row_start_H1": _int32(_starts(rows)),
                    "kv_len_H": _int32(lengths),
                    "scale": dim**-0.5,
                    "max_rows": max(1, *rows),
                    "max_kv": max(lengths) + padding,
                    "kv_lens": tuple(lengths),
                }
                dims = {"N": num_rows, "H": len(rows), "Q": heads, "G": kv_heads, "D": dim}
                dims |= {"page_size": size, "max_rows": args["max_rows"], "max_kv": args["max_kv"]}
                yield OpCase(f"{label}, rows {rows}, padding {padding}", args, dims)


# rows, rounds - 1, query heads, KV heads, head dim
ROW_SHAPES = {
    "one": (1, 1, 1, 1, 2),
    "odd": (7, 2, 6, 2, 6),
    "bucket edge": (16, 3, 8, 8, 16),
    "wide": (512, 2, 4, 1, 8),
    "deep": (33, 7, 4, 2, 8),
}


def _own_rows(seed: int, name: str, num_tokens: int, dtype: torch.dtype) -> Args:
    """Slots in random order; tokens that no row has yet, and unused slots, are NaN."""
    num_rows, max_tokens, _, kv_heads, dim = ROW_SHAPES[name]
    slots = np.random.default_rng(seed).permutation(num_rows + 3)[:num_rows]
    k = torch.full((num_rows + 4, max_tokens, kv_heads, dim), torch.nan)
    v = k.clone()
    used = torch.from_numpy(slots)
    k[used, :num_tokens] = _normal(seed, num_rows, num_tokens, kv_heads, dim)
    v[used, :num_tokens] = _normal(seed + 1, num_rows, num_tokens, kv_heads, dim)
    return {"k_rows": k.to(dtype), "v_rows": v.to(dtype), "slot_N": _int32(slots)}


def unshared_attention(dtype: torch.dtype) -> Iterator[OpCase]:
    for label, (num_rows, max_tokens, heads, kv_heads, dim) in ROW_SHAPES.items():
        for num_tokens in sorted({1, max_tokens}):
            args = {
                "q_NQD": _normal(7, num_rows, heads, dim, dtype=dtype),
                **_own_rows(13, label, num_tokens, dtype),
                "num_tokens": num_tokens,
                "scale": dim**-0.5,
            }
            dims = {"N": num_rows, "Q": heads, "G": kv_heads, "D": dim}
            yield OpCase(f"{label}, {num_tokens} tokens", args, dims)


def merge_attention_states(dtype: torch.dtype) -> Iterator[OpCase]:
    for label, (num_rows, _, heads, _, dim) in ROW_SHAPES.items():
        for empty in ("none", "a", "b", "both"):
            args: Args = {}
            for seed, side in enumerate("ab"):
                out, lse = (
                    _normal(seed, num_rows, heads, dim),
                    _normal(seed + 9, num_rows, heads) * 9,
                )
                if empty in (side, "both"):
                    out[::2], lse[::2] = 0.0, -torch.inf
                args |= {f"out_{side}_NQD": out.to(dtype), f"lse_{side}_NQ": lse}
            yield OpCase(f"{label}, empty {empty}", args, {"N": num_rows, "Q": heads, "D": dim})


# ---- cache


def write_shared_kv(dtype: torch.dtype) -> Iterator[OpCase]:
    def view(args: Args, result: Any) -> dict[str, torch.Tensor]:
        return {"k_pages": args["k_pages"][1:], "v_pages": args["v_pages"][1:]}

    for label, (new, lengths, _, heads, dim, size) in HISTORIES.items():
        for padding in (0, 2):
            pages = _pages(14, lengths, heads, dim, size, dtype)
            num_slots = (pages["k_pages"].shape[0] - 1) * size
            slots = size + np.random.default_rng(2).permutation(num_slots)[: sum(new)]
            fused = _normal(15, len(slots) + padding, 3 * heads, dim, dtype=dtype)
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


def write_unshared_kv(dtype: torch.dtype) -> Iterator[OpCase]:
    def view(args: Args, result: Any) -> dict[str, torch.Tensor]:
        return {"k_rows": args["k_rows"][:-1], "v_rows": args["v_rows"][:-1]}

    for label, (num_rows, max_tokens, _, heads, dim) in ROW_SHAPES.items():
        for position in sorted({0, max_tokens - 1}):
            rows = _own_rows(16, label, position, dtype)
            dummy = rows["k_rows"].shape[0] - 1
            fused = _normal(17, num_rows + 2, 3 * heads, dim, dtype=dtype)
            args = {
                "k_NGD": fused[:, :heads],
                "v_NGD": fused[:, heads : 2 * heads],
                "k_rows": rows["k_rows"],
                "v_rows": rows["v_rows"],
                "slot_N": torch.cat((rows["slot_N"], _int32([dummy, dummy]))),
                "position": position,
            }
            dims = {"N": num_rows + 2, "G": heads, "D": dim}
            yield OpCase(f"{label}, at {position}", args, dims, True, ("k_rows", "v_rows"), view)


def reorder_unshared_kv(dtype: torch.dtype) -> Iterator[OpCase]:
    def view(args: Args, result: Any) -> dict[str, torch.Tensor]:
        # which slot a child gets is the provider's choice; what it holds is not
        is_child = args["search_of_row_N"] < args["slot_start_S1"].shape[0] - 1
        slots = args["slot_out_N"][is_child].long()
        assert slots.unique().numel() == slots.numel(), "two children share a slot"
        return {"kv": args["kv_rows"][:, slots, : args["num_tokens"]]}

    shapes = {
        "one": ([1], [1], 1),
        "odd": ([5, 1, 3], [7, 2, 3], 2),
        "shrinking": ([16, 9], [8, 1], 3),
        "growing": ([1, 4], [16, 16], 2),
        "wide": ([512, 1], [512, 512], 2),
    }
    for label, (num_parents, num_children, max_tokens) in shapes.items():
        for kind in ("random", "equal", "reversed"):
            rng = np.random.default_rng(3)
            widths = np.maximum(num_parents, num_children)
            starts, first = np.array(_starts(widths.tolist())), _starts(num_parents)
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
            shape = (4, dummy + 1, max_tokens, 2, 3)
            args = {
                "kv_rows": _normal(18, *shape, dtype=dtype),
                "parents_N": _int32(np.concatenate([*parents, np.full(padding, 99999)])),
                "slot_in_N": _int32(np.concatenate(slots)),
                "search_of_row_N": _int32(
                    np.concatenate([*search, np.full(padding, len(num_parents))])
                ),
                "slot_start_S1": _int32(starts),
                "num_tokens": max_tokens,
                "slot_out_N": _int32(np.full(sum(num_children) + padding, -7)),
                "tile": torch.full((4, 5, *shape[2:]), torch.nan, dtype=dtype),
            }
            dims = {"N": sum(num_children) + padding, "G": 2, "D": 3}
            written = ("kv_rows", "slot_out_N", "tile")
            yield OpCase(f"{label}, {kind}", args, dims, True, written, view)


# ---- the rest of a layer, and the head

MATRIX_SHAPES = {"one": (1, 2), "odd": (3, 6), "not a power of two": (17, 48), "wide": (512, 64)}


def rms_norm(dtype: torch.dtype) -> Iterator[OpCase]:
    for label, (rows, size) in MATRIX_SHAPES.items():
        weight = 1 + _normal(20, size, dtype=dtype)
        for what, shape in (("rows", (rows, size)), ("heads", (rows, 3, size))):
            args = {"x_NM": _normal(19, *shape, dtype=dtype), "weight_M": weight, "eps": 1e-6}
            yield OpCase(f"{label}, {what}", args, {"N": rows, "M": size})


def add_rms_norm(dtype: torch.dtype) -> Iterator[OpCase]:
    def view(args: Args, result: Any) -> dict[str, torch.Tensor]:
        return {"result": result, "residual_NM": args["residual_NM"]}

    for label, (rows, size) in MATRIX_SHAPES.items():
        args = {
            "x_NM": _normal(21, rows, size, dtype=dtype),
            "residual_NM": _normal(22, rows, size, dtype=dtype),
            "weight_M": 1 + _normal(20, size, dtype=dtype),
            "eps": 1e-5,
        }
        yield OpCase(label, args, {"N": rows, "M": size}, mutates=("residual_NM",), view=view)


def rotary_embedding(dtype: torch.dtype) -> Iterator[OpCase]:
    for label, (tokens, dim) in MATRIX_SHAPES.items():
        angles = _normal(23, tokens, dim // 2).repeat(1, 2) * 30
        fused = _normal(24, tokens, 6, dim, dtype=dtype)
        args = {
            "q_TQD": fused[:, :4],
            "k_TGD": fused[:, 4:],
            "cos_TD": angles.cos(),
            "sin_TD": angles.sin(),
        }
        yield OpCase(label, args, {"T": tokens, "Q": 4, "G": 2, "D": dim})


def silu_mul(dtype: torch.dtype) -> Iterator[OpCase]:
    for label, (rows, size) in MATRIX_SHAPES.items():
        args = {"gate_up_N2F": _normal(25, rows, 2 * size, dtype=dtype)}
        yield OpCase(label, args, {"N": rows, "F": size})


def head_logsumexp(dtype: torch.dtype) -> Iterator[OpCase]:
    for label, (rows, size) in MATRIX_SHAPES.items():
        for vocab in (1, 97, 9000):
            args = {
                "hidden_NM": _normal(26, rows, size, dtype=dtype),
                "weight_VM": _normal(27, vocab, size, dtype=dtype),
                "scale": 0.5,
            }
            yield OpCase(f"{label}, vocabulary {vocab}", args, {"N": rows, "V": vocab, "M": size})


GENERATORS: dict[str, Callable[[torch.dtype], Iterator[OpCase]]] = {
    generator.__name__: generator
    for generator in (
        select_beams,
        children_logsumexp,
        level_logsumexp,
        flag_failed_searches,
        prefill_attention,
        shared_attention,
        unshared_attention,
        merge_attention_states,
        write_shared_kv,
        write_unshared_kv,
        reorder_unshared_kv,
        rms_norm,
        add_rms_norm,
        rotary_embedding,
        silu_mul,
        head_logsumexp,
    )
}
