"""Attention calls at the sizes of the measured models: 16 query heads, 8 KV heads of 128, pages in random order.

requests x beams x history: so many histories of equal length with so many beams each; two own tokens a beam unless said.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from tools._bench.op_peers import BEAM_PEERS, PREFILL_PEERS, SHARED_PEERS
from tools._bench.op_work import OpWork, Place
from xgr_runtime.conformance.op_case import OpCase

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = 128
Shape = tuple[int, int, int]
SHAPES: tuple[Shape, ...] = (
    (1, 128, 1024),
    (1, 512, 1024),
    (1, 256, 1000),
    (8, 128, 1024),
    (8, 256, 1024),
    (8, 512, 1024),
    (8, 1024, 1024),
    (8, 512, 3072),
    (8, 256, 5000),
)
ANCESTORS = (8, 512)  # whose beams read one own token, in slots of their own or of their parents
STAGE_SHAPES: tuple[Shape, ...] = ((1, 512, 1024), (8, 512, 1024), (8, 256, 5000))
PREFILLS: tuple[Shape, ...] = (
    (1, 1024, 0),
    (1, 5000, 0),
    (8, 1024, 0),
    (8, 5000, 0),
    (1, 1024, 896),
)
OWN_TOKENS = 2


@dataclass(frozen=True)
class Heads:
    """Of a layer: query heads, KV heads, their size, and tokens of a page."""

    queries: int = 16
    kv: int = 8
    size: int = 128
    page: int = PAGE

    @property
    def dims(self) -> dict[str, int]:
        return {"Q": self.queries, "G": self.kv, "D": self.size, "page_size": self.page}


def heads_of(place: Place) -> Heads:
    return Heads(4, 2, 16, 16) if place.is_tiny else Heads()


def pages_of(place: Place, seed: int, heads: Heads, histories: int, length: int) -> dict[str, Any]:
    """Keys and values in pages: NaN in the null page and behind each history's end."""
    per, size = -(-length // heads.page), heads.page
    shape = (histories * per + 1, size, heads.kv, heads.size)
    table = (1 + place.permutation(seed, histories * per)).int().view(histories, per)
    pages = {}
    for number, name in enumerate(("k_pages", "v_pages")):
        drawn = place.normal(seed + 1 + number, *shape)
        drawn[0] = torch.nan
        drawn[table[:, -1].long(), length - (per - 1) * size :] = torch.nan
        pages[name] = drawn
    lengths = {"kv_len_H": place.int32([length] * histories), "kv_lens": (length,) * histories}
    return {**pages, "page_table_HP": table, **lengths}


def own_of(place: Place, seed: int, heads: Heads, rows: int, tokens: int) -> dict[str, Any]:
    """Own tokens of the beams in slots of random order; what no beam has yet is NaN."""
    shape = (rows + 1, OWN_TOKENS, heads.kv, heads.size)
    own = {name: place.normal(seed + n, *shape) for n, name in enumerate(("k_rows", "v_rows"))}
    for drawn in own.values():
        drawn[:, tokens:] = torch.nan
        drawn[-1] = torch.nan
    return {**own, "slot_N": place.permutation(seed, rows).int(), "num_tokens": tokens}


def shared_args(place: Place, seed: int, heads: Heads, shape: Shape) -> dict[str, Any]:
    histories, width, length = shape
    rows = histories * width
    return {
        "q_NQD": place.normal(seed + 7, rows, heads.queries, heads.size),
        **pages_of(place, seed, heads, histories, length),
        "row_start_H1": place.int32(range(0, rows + 1, width)),
        "scale": heads.size**-0.5,
        "max_rows": width,
        "max_kv": length,
    }


def works(place: Place) -> Iterator[OpWork]:
    """The three stages of a round apart and fused, and prefill."""
    heads = heads_of(place)
    shapes, stage_shapes, prefills, ancestors = SHAPES, STAGE_SHAPES, PREFILLS, ANCESTORS
    if place.is_tiny:
        shapes = stage_shapes = ((2, 5, 40),)
        prefills, ancestors = ((2, 20, 0), (1, 40, 32)), (2, 5)
    for shape in shapes:
        yield _beam(place, heads, shape)
    for shape in stage_shapes:
        yield _shared(place, heads, shape)
        yield _unshared(place, heads, shape[:2], OWN_TOKENS)
        yield _merge(place, heads, shape[:2])
    for through in (False, True):
        yield _unshared(place, heads, ancestors, 1, is_through_ancestors=through)
    for prefill in prefills:
        yield _prefill(place, heads, prefill)


def _sizes(heads: Heads, shape: Shape) -> tuple[int, int, int, dict[str, int]]:
    histories, width, length = shape
    rows = histories * width
    dims = {"N": rows, "H": histories, "max_rows": width, "max_kv": length, **heads.dims}
    queries = rows * heads.queries * heads.size
    return rows, queries, 2 * histories * length * heads.kv * heads.size, dims


def _beam(place: Place, heads: Heads, shape: Shape) -> OpWork:
    rows, queries, shared, dims = _sizes(heads, shape)

    def draw(seed: int) -> OpCase:
        own = own_of(place, seed + 20, heads, rows, OWN_TOKENS)
        args = {**shared_args(place, seed, heads, shape), **own}
        return OpCase(_label(shape), args, dims)

    own = 2 * rows * OWN_TOKENS * heads.kv * heads.size
    return OpWork(
        "beam_attention",
        _label(shape),
        draw,
        flops=4.0 * queries * (shape[2] + OWN_TOKENS),
        num_bytes=place.dtype.itemsize * (2.0 * queries + shared + own),
        peers=BEAM_PEERS,
    )


def _shared(place: Place, heads: Heads, shape: Shape) -> OpWork:
    rows, queries, shared, dims = _sizes(heads, shape)

    def draw(seed: int) -> OpCase:
        return OpCase(_label(shape), shared_args(place, seed, heads, shape), dims)

    return OpWork(
        "shared_attention",
        _label(shape),
        draw,
        flops=4.0 * queries * shape[2],
        num_bytes=place.dtype.itemsize * (2.0 * queries + shared) + 4 * rows * heads.queries,
        peers=SHARED_PEERS,
    )


def _unshared(
    place: Place,
    heads: Heads,
    shape: tuple[int, ...],
    tokens: int,
    *,
    is_through_ancestors: bool = False,
) -> OpWork:
    histories, width = shape
    rows = histories * width
    how = ", slots of random parents" if is_through_ancestors else ""

    def draw(seed: int) -> OpCase:
        own = own_of(place, seed, heads, rows, tokens)
        if is_through_ancestors:
            own["slot_N"] = own["slot_N"][random_parents(place, seed, shape).long()]
        q = place.normal(seed + 7, rows, heads.queries, heads.size)
        args = {"q_NQD": q, **own, "scale": heads.size**-0.5}
        return OpCase("", args, {"N": rows, **heads.dims})

    queries, own_elements = rows * heads.queries * heads.size, 2 * rows * heads.kv * heads.size
    return OpWork(
        "unshared_attention",
        f"{histories} x {width}, {tokens} own{how}",
        draw,
        flops=4.0 * queries * tokens,
        num_bytes=place.dtype.itemsize * (2.0 * queries + own_elements * tokens)
        + 4 * rows * heads.queries,
    )


def random_parents(place: Place, seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    """int32 [rows]: a parent row of the same search for each child, about a third of which nobody takes."""
    searches, width = shape
    generator = torch.Generator(place.device).manual_seed(seed)
    ranks = torch.randint(width, (searches, width), generator=generator, device=place.device)
    first = torch.arange(searches, device=place.device)[:, None] * width
    return (ranks + first).flatten().int()


def _merge(place: Place, heads: Heads, shape: tuple[int, ...]) -> OpWork:
    rows = shape[0] * shape[1]

    def draw(seed: int) -> OpCase:
        size = (rows, heads.queries, heads.size)
        args: dict[str, Any] = {}
        for number, side in enumerate("ab"):
            args[f"out_{side}_NQD"] = place.normal(seed + number, *size)
            args[f"lse_{side}_NQ"] = place.normal(seed + 9 + number, *size[:2], dtype=torch.float32)
        return OpCase("", args, {"N": rows, **heads.dims})

    elements = rows * heads.queries * heads.size
    num_bytes = place.dtype.itemsize * 3.0 * elements + 12 * rows * heads.queries
    label = f"{shape[0]} x {shape[1]}"
    return OpWork("merge_attention_states", label, draw, flops=0.0, num_bytes=num_bytes)


def _prefill(place: Place, heads: Heads, shape: Shape) -> OpWork:
    histories, length, cached = shape
    new = length - cached
    tokens = histories * new

    def draw(seed: int) -> OpCase:
        starts = tuple(range(0, tokens + 1, new))
        args = {
            "q_TQD": place.normal(seed + 7, tokens, heads.queries, heads.size),
            **pages_of(place, seed, heads, histories, length),
            "q_start_H1": place.int32(starts),
            "q_starts": starts,
            "scale": heads.size**-0.5,
            "max_q": new,
            "max_kv": length,
        }
        dims = {"T": tokens, "H": histories, "max_q": new, "max_kv": length, **heads.dims}
        return OpCase("", args, dims)

    queries = tokens * heads.queries * heads.size
    pairs = histories * (length**2 - cached**2) / 2
    work = OpWork(
        "prefill_attention",
        f"{histories} x {length}" + (f", {cached} cached" if cached else ""),
        draw,
        flops=4.0 * heads.queries * heads.size * pairs,
        num_bytes=place.dtype.itemsize
        * (2.0 * queries + 2 * histories * length * heads.kv * heads.size),
    )
    return work if cached else replace(work, peers=PREFILL_PEERS)


def _label(shape: Shape) -> str:
    return " x ".join(map(str, shape))
