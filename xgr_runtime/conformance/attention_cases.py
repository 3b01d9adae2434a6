"""Cases of the attention ops, and the pages and rows that the cache ops share with them.

Kernels differ in what they take: fused ones often want pages of 128 tokens and head dims in multiples of 16. So there
are tiny, odd sizes for whoever takes everything, and the usual sizes of models for the others.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from xgr_runtime.conformance.op_case import Args, OpCase, int32, normal, starts_of


@dataclass(frozen=True)
class Histories:
    """Histories in pages. new: new tokens of each, the last of its `lengths`. rows: beam rows of each, one list a case."""

    new: list[int]
    lengths: list[int]
    heads: int
    kv_heads: int
    dim: int
    page_size: int
    rows: tuple[list[int], ...]

    @property
    def dims(self) -> dict[str, int]:
        """The sizes that do not depend on the case."""
        sizes = {"H": len(self.lengths), "Q": self.heads, "G": self.kv_heads, "D": self.dim}
        return {**sizes, "page_size": self.page_size}


HISTORIES: dict[str, Histories] = {
    "one": Histories([1], [1], 1, 1, 2, 1, ([1], [512])),
    "odd": Histories([3, 0, 5], [7, 0, 5], 6, 2, 6, 3, ([1, 1, 1], [512] * 3, [0, 9, 130])),
    "cached prefix": Histories([4, 1], [20, 33], 4, 4, 8, 16, ([1, 1], [512, 512], [0, 9])),
    "bucket edge": Histories([16, 16], [16, 32], 8, 2, 16, 16, ([1, 1], [512, 512], [0, 9])),
    "past a tile": Histories([129, 1], [130, 257], 4, 1, 8, 16, ([1, 1], [512, 512], [0, 9])),
    "pages of 128": Histories([5, 1], [130, 128], 4, 2, 16, 128, ([1, 1], [9, 1])),
    "pages of 128, an empty history": Histories(
        [2, 0, 1], [257, 0, 3], 4, 4, 64, 128, ([1, 1, 1], [7, 2, 0])
    ),
    "pages of 128, large heads": Histories([1, 3], [129, 3], 8, 2, 128, 128, ([3, 17],)),
}
# Enough for every core of a large GPU: kernels for full ones take nothing else. One case an op, as the reference takes a while, and
# of a prefill another one: with several items a core it is cut in another way.
MANY_HEADS = Histories([100, 9, 20], [330, 9, 148], 64, 32, 64, 128, ([100, 9, 20],))
MORE_TOKENS = Histories([200, 9, 90], [330, 9, 218], 64, 32, 64, 128, ())
# Few rows over many keys: kernels that split keys do so, and a part of an empty or short history has none.
FEW_ROWS = {
    "few rows over many keys": Histories([3], [2050], 4, 2, 128, 128, ([3],)),
    "few rows over many keys, two histories": Histories(
        [1, 1], [2177, 0], 4, 2, 128, 128, ([1, 1],)
    ),
}
# A few new tokens behind many cached ones, as a prefix hit leaves them.
HITS = {
    "a prefix hit": Histories([33], [2050], 4, 2, 128, 128, ()),
    "prefix hits": Histories([40, 1, 0, 5], [700, 1290, 64, 5], 4, 2, 64, 128, ()),
}
LARGE_PAGE = 128  # as fused kernels want them
# One query row per history, as the last layer of a prefill asks; padding histories have a row and no tokens.
LAST_ONLY = {
    "small pages": Histories([1] * 4, [7, 0, 1, 33], 4, 2, 8, 4, ()),
    "pages of 128": Histories([1] * 4, [130, 0, 257, 1], 4, 2, 16, 128, ()),
}


def pages_of(seed: int, histories: Histories, dtype: torch.dtype) -> Args:
    """Pages in random order; what no history owns, and the rest of each last page, is NaN."""
    size, shape = histories.page_size, (histories.kv_heads, histories.dim)
    counts = [-(-length // size) for length in histories.lengths]
    num_pages = sum(counts) + 2
    order = np.random.default_rng(seed).permutation(np.arange(1, num_pages))
    table = np.zeros((len(counts), max(1, *counts) if len(counts) > 1 else max(1, counts[0])))
    k = torch.full((num_pages, size, *shape), torch.nan)
    v = k.clone()
    for h, length in enumerate(histories.lengths):
        own = order[sum(counts[:h]) : sum(counts[: h + 1])]
        table[h, : len(own)] = own
        place = np.arange(length)
        at = torch.from_numpy(own[place // size]), torch.from_numpy(place % size)
        k[at] = normal(seed + 31 * h, length, *shape)
        v[at] = normal(seed + 31 * h + 7777, length, *shape)
    return {"k_pages": k.to(dtype), "v_pages": v.to(dtype), "page_table_HP": int32(table)}


def prefill_attention(dtype: torch.dtype) -> Iterator[OpCase]:
    for label, histories in HISTORIES.items():
        for padding in (0, 3):
            yield _prefill(f"{label}, padding {padding}", histories, dtype, padding)
    for label, histories in LAST_ONLY.items():
        yield _prefill(f"last rows, {label}", histories, dtype, 0)
    for label, histories in HITS.items():
        yield _prefill(label, histories, dtype, 2)
    yield _prefill("pages of 128, many heads", MANY_HEADS, dtype, 1)
    yield _prefill("pages of 128, many heads and more tokens", MORE_TOKENS, dtype, 1)


def _prefill(label: str, histories: Histories, dtype: torch.dtype, padding: int) -> OpCase:
    new, lengths, dim = histories.new, histories.lengths, histories.dim
    num_tokens = sum(new) + padding
    args = {
        "q_TQD": normal(5, num_tokens, histories.heads, dim, dtype=dtype),
        **pages_of(11, histories, dtype),
        "q_start_H1": int32(starts_of(new)),
        "kv_len_H": int32(lengths),
        "scale": dim**-0.5,
        "max_q": max(new) + padding,
        "max_kv": max(lengths) + padding,
        "q_starts": tuple(starts_of(new)),
        "kv_lens": tuple(lengths),
    }
    dims = {"T": num_tokens, **histories.dims, "max_q": args["max_q"], "max_kv": args["max_kv"]}
    return OpCase(label, args, dims)


def shared_attention(dtype: torch.dtype) -> Iterator[OpCase]:
    for label, histories in HISTORIES.items():
        for rows in histories.rows:
            for padding in (0, 2):
                if sum(rows) + padding:
                    yield _shared(f"{label}, rows {rows}", histories, rows, padding, dtype)


def _shared(
    label: str, histories: Histories, rows: list[int], padding: int, dtype: torch.dtype
) -> OpCase:
    num_rows, lengths, dim = sum(rows) + padding, histories.lengths, histories.dim
    args = {
        "q_NQD": normal(6, num_rows, histories.heads, dim, dtype=dtype),
        **pages_of(12, histories, dtype),
        "row_start_H1": int32(starts_of(rows)),
        "kv_len_H": int32(lengths),
        "scale": dim**-0.5,
        "max_rows": max(1, *rows),
        "max_kv": max(lengths) + padding,
        "kv_lens": tuple(lengths),
    }
    dims = {"N": num_rows, **histories.dims}
    dims |= {"max_rows": args["max_rows"], "max_kv": args["max_kv"]}
    return OpCase(f"{label}, padding {padding}", args, dims)


# rows, rounds - 1, query heads, KV heads, head dim
ROW_SHAPES = {
    "one": (1, 1, 1, 1, 2),
    "odd": (7, 2, 6, 2, 6),
    "bucket edge": (16, 3, 8, 8, 16),
    "wide": (512, 2, 4, 1, 8),
    "deep": (33, 7, 4, 2, 8),
    "head of 64": (9, 3, 4, 4, 64),
    "head of 128": (5, 2, 8, 2, 128),
}


def own_rows(seed: int, name: str, num_tokens: int, dtype: torch.dtype) -> Args:
    """The own tokens of the rows of ROW_SHAPES[name]."""
    num_rows, max_tokens, _, kv_heads, dim = ROW_SHAPES[name]
    return _own_rows(seed, (num_rows, max_tokens, kv_heads, dim), num_tokens, dtype)


def _own_rows(
    seed: int, size: tuple[int, int, int, int], num_tokens: int, dtype: torch.dtype
) -> Args:
    """Slots in random order; tokens that no row has yet, and unused slots, are NaN."""
    num_rows, max_tokens, kv_heads, dim = size
    slots = np.random.default_rng(seed).permutation(num_rows + 3)[:num_rows]
    k = torch.full((num_rows + 4, max_tokens, kv_heads, dim), torch.nan)
    v = k.clone()
    used = torch.from_numpy(slots)
    k[used, :num_tokens] = normal(seed, num_rows, num_tokens, kv_heads, dim)
    v[used, :num_tokens] = normal(seed + 1, num_rows, num_tokens, kv_heads, dim)
    return {"k_rows": k.to(dtype), "v_rows": v.to(dtype), "slot_N": int32(slots)}


def beam_attention(dtype: torch.dtype) -> Iterator[OpCase]:
    for label, histories in HISTORIES.items():
        for rows in histories.rows:
            for max_tokens, num_tokens, padding in ((1, 1, 0), (2, 1, 2), (2, 2, 0), (3, 3, 2)):
                case = _shared(f"{label}, rows {rows}", histories, rows, padding, dtype)
                yield _beams(case, max_tokens, num_tokens, sum(rows))
    for label, histories in {"pages of 128, many heads": MANY_HEADS, **FEW_ROWS}.items():
        (rows,) = histories.rows
        yield _beams(_shared(f"{label}, rows {rows}", histories, rows, 0, dtype), 2, 2, sum(rows))
    for label, histories in {**HISTORIES, **FEW_ROWS}.items():
        if histories.page_size == LARGE_PAGE:
            rows = histories.rows[-1]
            case = _shared(f"{label}, rows {rows}", histories, rows, 2, dtype)
            yield _with_a_dead_beam(_beams(case, 2, 2, sum(rows)))


def _with_a_dead_beam(case: OpCase) -> OpCase:
    """The second row's own tokens are NaN, and so is its result; those of rows beside it are as before."""
    args = dict(case.args)
    dead = int(args["slot_N"][1])
    for name in ("k_rows", "v_rows"):
        args[name] = args[name].clone()
        args[name][dead] = torch.nan
    return dataclasses.replace(case, label=f"{case.label}, a dead beam", args=args)


def _beams(shared: OpCase, max_tokens: int, num_tokens: int, num_used: int) -> OpCase:
    """The call with own tokens beside: of rows that no history owns the result is not looked at."""
    q_NQD, num_kv_heads = shared.args["q_NQD"], shared.args["k_pages"].shape[2]
    size = (num_used, max_tokens, num_kv_heads, q_NQD.shape[2])
    own = _own_rows(15, size, num_tokens, q_NQD.dtype)
    num_padding = len(q_NQD) - num_used
    # the dummy slot, whose content is nobody's
    own["slot_N"] = int32([*own["slot_N"].tolist(), *[len(own["k_rows"]) - 1] * num_padding])
    names = ("q_NQD", "k_pages", "v_pages", "page_table_HP", "row_start_H1", "kv_len_H")
    bounds = ("scale", "max_rows", "max_kv", "kv_lens")
    args = {
        **{name: shared.args[name] for name in names},
        **own,
        "num_tokens": num_tokens,
        **{name: shared.args[name] for name in bounds},
    }

    def view(args: Args, result: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"result": result[:num_used]}

    label = f"{shared.label}, {num_tokens} of {max_tokens} tokens"
    return OpCase(label, args, shared.dims, view=view)


def unshared_attention(dtype: torch.dtype) -> Iterator[OpCase]:
    for label, (num_rows, max_tokens, heads, kv_heads, dim) in ROW_SHAPES.items():
        for num_tokens in sorted({1, max_tokens}):
            args = {
                "q_NQD": normal(7, num_rows, heads, dim, dtype=dtype),
                **own_rows(13, label, num_tokens, dtype),
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
                out = normal(seed, num_rows, heads, dim)
                lse = normal(seed + 9, num_rows, heads) * 9
                if empty in (side, "both"):
                    out[::2], lse[::2] = 0.0, -torch.inf
                args |= {f"out_{side}_NQD": out.to(dtype), f"lse_{side}_NQ": lse}
            yield OpCase(f"{label}, empty {empty}", args, {"N": num_rows, "Q": heads, "D": dim})
