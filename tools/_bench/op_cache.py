"""Rotation, cache writes, copies of pages and the reorder of beams: eight histories of 1,024 tokens, one token of 8 x 512 beams."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from tools._bench.op_attention import Heads, heads_of, own_of, pages_of, random_parents
from tools._bench.op_work import OpWork, Place
from xgr_runtime.conformance.op_case import OpCase

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

EPS = 1e-6
HISTORIES, LENGTH, BEAMS = 8, 1024, 4096
INPUTS = (1024, 2048)  # of the product before, as the measured models have
# searches x beams whose own keys and values are reordered, of all layers
REORDERS = ((1, 512), (8, 512), (8, 1024))
# histories that copy the beginning of a page of all layers, and how many tokens: what 1,000 tokens leave behind 7 full pages
COPIES = ((1, 104), (8, 104))


def works(place: Place) -> Iterator[OpWork]:
    """Of one layer; copies of pages and the reorder of all layers."""
    heads = heads_of(place)
    paged = _paged(place, heads)
    rows = _Rows(place, heads, 5 if place.is_tiny else BEAMS)
    byte, angles = place.dtype.itemsize, 2 * 4 * heads.size
    turned = 2 * byte * (heads.queries + heads.kv) * heads.size + angles
    both = 2 * byte * (heads.queries + 2 * heads.kv) * heads.size + angles
    stored = 2 * byte * 2 * heads.kv * heads.size
    for store in (paged, rows):
        count = float(store.count)
        yield OpWork(
            f"rope_write_{store.kind}_kv", store.label, store.rope_write, 0.0, count * both
        )
        yield OpWork(f"write_{store.kind}_kv", store.label, store.write, 0.0, count * stored)
        for inputs in (32,) if place.is_tiny else INPUTS:
            yield _with_product(store, inputs)
    yield OpWork("rotary_embedding", paged.label, paged.rotate, 0.0, paged.count * float(turned))
    for histories, tokens in ((2, 5),) if place.is_tiny else COPIES:
        yield _copies(place, heads, histories, tokens)
    for searches, width in ((2, 5),) if place.is_tiny else REORDERS:
        yield _reorder(place, heads, searches, width)


def linear_rope_write_shared(place: Place, inputs: int) -> OpWork:
    """The product of so many inputs whose keys and values go to pages."""
    return _with_product(_paged(place, heads_of(place)), inputs)


def linear_rope_write_unshared(place: Place, inputs: int, beams: int) -> OpWork:
    """The product of so many inputs whose keys and values go to the rows of beams."""
    return _with_product(_Rows(place, heads_of(place), beams), inputs)


@dataclass(frozen=True)
class _Paged:
    """Tokens of histories, stored in pages."""

    place: Place
    heads: Heads
    histories: int
    length: int
    kind = "shared"
    letter = "T"
    written = ("k_pages", "v_pages")

    @property
    def count(self) -> int:
        return self.histories * self.length

    @property
    def label(self) -> str:
        return f"{self.count} tokens"

    def target(self, seed: int) -> dict[str, Any]:
        args = pages_of(self.place, seed, self.heads, self.histories, self.length)
        pages = {name: args[name] for name in self.written}
        num_slots = (len(pages["k_pages"]) - 1) * self.heads.page
        slots = self.heads.page + self.place.permutation(seed + 4, num_slots)
        return {**pages, "slot_T": slots[: self.count].contiguous()}

    def view(self, args: Mapping[str, Any], result: Any) -> dict[str, torch.Tensor]:
        stored = {name: args[name][1:] for name in self.written}
        return stored if result is None else {"result": result, **stored}

    def write(self, seed: int) -> OpCase:
        return _case(self, {**_parts(self, seed), **self.target(seed)}, is_exact=True)

    def rope_write(self, seed: int) -> OpCase:
        return _case(self, {**_projections(self, seed), **self.target(seed)})

    def rotate(self, seed: int) -> OpCase:
        heads, given = self.heads, _projections(self, seed)
        q, k = given["qkv_TXD"][:, : heads.queries + heads.kv].split([heads.queries, heads.kv], 1)
        args = {"q_TQD": q, "k_TGD": k, "cos_TD": given["cos_TD"], "sin_TD": given["sin_TD"]}
        return OpCase(self.label, args, {"T": self.count, **heads.dims})


@dataclass(frozen=True)
class _Rows:
    """One token of each beam, stored in the beam's slot behind the token that it has."""

    place: Place
    heads: Heads
    count: int
    kind = "unshared"
    letter = "N"
    written = ("k_rows", "v_rows")

    @property
    def label(self) -> str:
        return f"{self.count} beams"

    def target(self, seed: int) -> dict[str, Any]:
        own = own_of(self.place, seed, self.heads, self.count, 1)
        return {**{name: own[name] for name in (*self.written, "slot_N")}, "position": 1}

    def view(self, args: Mapping[str, Any], result: Any) -> dict[str, torch.Tensor]:
        stored = {name: args[name][:-1] for name in self.written}
        return stored if result is None else {"result": result, **stored}

    def write(self, seed: int) -> OpCase:
        return _case(self, {**_parts(self, seed), **self.target(seed)}, is_exact=True)

    def rope_write(self, seed: int) -> OpCase:
        return _case(self, {**_projections(self, seed), **self.target(seed)})


def _case(store: _Paged | _Rows, args: dict[str, Any], *, is_exact: bool = False) -> OpCase:
    dims = {store.letter: store.count, **store.heads.dims}
    return OpCase(store.label, args, dims, is_exact, store.written, store.view)


def _paged(place: Place, heads: Heads) -> _Paged:
    sizes = (2, 5) if place.is_tiny else (HISTORIES, LENGTH)
    return _Paged(place, heads, *sizes)


def _with_product(store: _Paged | _Rows, inputs: int) -> OpWork:
    """The rotated and stored product of a layer's input."""
    place, heads, letter = store.place, store.heads, store.letter
    outputs, item = (heads.queries + 2 * heads.kv) * heads.size, store.place.dtype.itemsize
    label = f"{store.label}, {inputs} inputs"

    def draw(seed: int) -> OpCase:
        args = {**_projections(store, seed), **store.target(seed)}
        del args[f"qkv_{letter}XD"]
        args[f"x_{letter}M"] = place.normal(seed + 5, store.count, inputs)
        args["weight_OM"] = place.normal(seed + 6, outputs, inputs, scale=inputs**-0.5)
        return replace(_case(store, args), dims={**_case(store, args).dims, "M": inputs})

    made = (heads.queries + 2 * heads.kv) * heads.size
    row = item * (inputs + made) + 2 * 4 * heads.size
    flops = 2.0 * store.count * inputs * outputs
    num_bytes = store.count * row + item * inputs * outputs
    return OpWork(f"linear_rope_write_{store.kind}_kv", label, draw, flops, num_bytes)


def _parts(store: _Paged | _Rows, seed: int) -> dict[str, Any]:
    """Keys and values, as views of one product."""
    kv_heads, letter = store.heads.kv, store.letter
    kv = store.place.normal(seed, store.count, 2 * kv_heads, store.heads.size)
    return {f"k_{letter}GD": kv[:, :kv_heads], f"v_{letter}GD": kv[:, kv_heads:]}


def _projections(store: _Paged | _Rows, seed: int) -> dict[str, Any]:
    """What the fused ops begin with: the product, the weights of the heads' norms, the angles."""
    place, heads, letter = store.place, store.heads, store.letter
    half = place.normal(seed, store.count, heads.size // 2, dtype=torch.float32)
    angles = half.repeat(1, 2) * 30
    shape = (store.count, heads.queries + 2 * heads.kv, heads.size)
    return {
        f"qkv_{letter}XD": place.normal(seed + 3, *shape),
        "q_norm_D": 1 + place.normal(seed + 1, heads.size, scale=0.1),
        "k_norm_D": 1 + place.normal(seed + 2, heads.size, scale=0.1),
        "eps": EPS,
        f"cos_{letter}D": angles.cos(),
        f"sin_{letter}D": angles.sin(),
    }


def _copies(place: Place, heads: Heads, histories: int, tokens: int) -> OpWork:
    planes = 4 if place.is_tiny else 2 * 28
    label = f"{histories} x {tokens} tokens, {planes} planes"

    def draw(seed: int) -> OpCase:
        pages = 1 + place.permutation(seed, 2 * histories).int()
        args = {
            "kv_pages": place.normal(
                seed, planes, 1 + 2 * histories, heads.page, heads.kv, heads.size
            ),
            "source_H": pages[:histories].contiguous(),
            "target_H": pages[histories:].contiguous(),
            "num_tokens_H": place.int32([tokens] * histories),
        }
        return OpCase(label, args, {"H": histories, **heads.dims}, True, ("kv_pages",), _copied)

    token = planes * heads.kv * heads.size * place.dtype.itemsize
    return OpWork("copy_page_starts", label, draw, 0.0, 2.0 * histories * tokens * token)


def _copied(args: Mapping[str, Any], result: Any) -> dict[str, torch.Tensor]:
    return {"kv": args["kv_pages"]}


def _reorder(place: Place, heads: Heads, searches: int, width: int) -> OpWork:
    """Before the last round: one own token of every layer's keys and values; parents drawn at random."""
    rows, planes = searches * width, 4 if place.is_tiny else 2 * 28
    label = f"{searches} x {width}, {planes} planes"

    def draw(seed: int) -> OpCase:
        search = torch.arange(rows, device=place.device) // width
        slots = torch.cat([place.permutation(seed + n, width) + n * width for n in range(searches)])
        args = {
            "kv_rows": place.normal(seed, planes, rows + 1, 2, heads.kv, heads.size),
            "parents_N": random_parents(place, seed, (searches, width)),
            "slot_in_N": slots.int(),
            "search_of_row_N": search.int(),
            "slot_start_S1": place.int32(range(0, rows + 1, width)),
            "num_tokens": 1,
            "slot_out_N": place.int32([-7] * rows),
            "tile": place.normal(seed, planes, min(rows, 128), 2, heads.kv, heads.size).fill_(
                torch.nan
            ),
        }
        written = ("kv_rows", "slot_out_N", "tile")
        return OpCase(label, args, {"N": rows, **heads.dims}, True, written, _moved)

    parents = random_parents(place, 0, (searches, width))
    moved = rows - len(torch.unique(parents))
    token = planes * heads.kv * heads.size * place.dtype.itemsize
    return OpWork(
        "reorder_unshared_kv",
        label,
        draw,
        0.0,
        2.0 * moved * token,
        {"torch gather into a second buffer": _gather},
        note=f"{moved} of {rows} rows move",
    )


def _moved(args: Mapping[str, Any], result: Any) -> dict[str, torch.Tensor]:
    return {"kv": args["kv_rows"][:, args["slot_out_N"].long(), : args["num_tokens"]]}


def _gather(args: Mapping[str, Any]) -> Any:
    def call() -> Mapping[str, torch.Tensor]:
        sources = args["slot_in_N"][args["parents_N"].long()].long()
        return {"kv": args["kv_rows"][:, sources, : args["num_tokens"]]}

    return call
