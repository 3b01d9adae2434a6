"""The head and the ops of a round of the search, over a catalogue of random semantic ids.

Parents of a round are distinct prefixes of items drawn at random, so popular prefixes are among them; all rules are alive.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tools._bench.floor import NUM_CODES, SHAPES, TEXT_VOCABULARY
from tools._bench.op_work import OpWork, Place
from tools._bench.sid_catalog import NUM_LEVELS, Prefixes, SidItems, draw_items
from xgr_runtime.conformance.op_case import OpCase
from xgr_runtime.hal.ops.beam import DEAD, BeamRows, LevelTrie, level_logsumexp

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

CATALOG_SEED = 10
VOCABULARY = TEXT_VOCABULARY + NUM_LEVELS * NUM_CODES
SEARCHES = ((1, 512), (8, 512), (8, 1024))


@dataclass(frozen=True)
class Catalogue:
    """Its levels as the search ops want them: the first dense, the others CSR."""

    place: Place
    items: SidItems

    @cached_property
    def prefixes(self) -> Prefixes:
        return Prefixes(self.items.sids, self.items.num_codes)

    @cached_property
    def levels(self) -> list[LevelTrie]:
        return [self._level(number) for number in range(NUM_LEVELS)]

    def _level(self, number: int) -> LevelTrie:
        """The children of prefixes of so many codes."""
        codes, keys = self.items.num_codes, self.prefixes.keys[number]
        before = self.prefixes.keys[number - 1] if number else np.zeros(1, np.int64)
        counts, _ = self.prefixes.children(before, number)
        last = torch.from_numpy(keys % codes).to(self.place.device)
        most, place = int(counts.max()), self.place
        if number == 0:
            child = place.int32([-1] * codes)
            child[last] = torch.arange(len(keys), device=place.device, dtype=torch.int32)
            return LevelTrie(codes, most, True, None, None, child, (child >= 0)[None])
        offsets = place.int32(np.concatenate([[0], np.cumsum(counts)]))
        alive = torch.ones(1, len(keys), dtype=torch.bool, device=place.device)
        return LevelTrie(codes, most, False, offsets, last.int(), None, alive)

    def parents(self, number: int, width: int, seed: int) -> NDArray[np.int64]:
        """Nodes of so many codes: of random items, each once, as many as there are and at most `width`."""
        if number == 0:
            return np.zeros(1, np.int64)
        rng = np.random.default_rng(seed)
        sids = self.items.sids[rng.permutation(len(self.items.sids))[: 8 * width], :number]
        packed = np.zeros(len(sids), np.int64)
        for column in sids.T:
            packed = packed * self.items.num_codes + column
        _, first = np.unique(packed, return_index=True)
        chosen = packed[np.sort(first)[:width]]
        return np.searchsorted(self.prefixes.keys[number - 1], chosen)

    def num_children(self, number: int, nodes: NDArray[np.int64]) -> int:
        before = self.prefixes.keys[number - 1] if number else np.zeros(1, np.int64)
        counts, _ = self.prefixes.children(before[nodes], number)
        return int(counts.sum())


def works(place: Place, num_items: int) -> Iterator[OpWork]:
    """The head, then each round's normaliser and selection."""
    for model, hidden in _models(place).items():
        for rows in (5,) if place.is_tiny else (8, 512, 4096):
            codes, vocab = (24, 90) if place.is_tiny else (NUM_CODES, VOCABULARY)
            yield _head(place, "head_logits", model, (rows, hidden, codes))
            yield _head(place, "head_logsumexp", model, (rows, hidden, vocab))
    codes = 64 if place.is_tiny else NUM_CODES
    for rows in (5,) if place.is_tiny else (8, 512, 4096):
        yield _level(place, rows, codes)
        yield _flagged_level(place, rows, codes)
    catalogue = Catalogue(place, draw_items(num_items, codes, CATALOG_SEED))
    for searches, width in ((2, 5),) if place.is_tiny else SEARCHES:
        for number in range(NUM_LEVELS):
            yield from _round(catalogue, searches, width, number)
        yield _flags(place, searches, width)


def _models(place: Place) -> dict[str, int]:
    return {"tiny": 32} if place.is_tiny else {n: s.hidden_size for n, s in SHAPES.items()}


def _head(place: Place, op: str, model: str, sizes: tuple[int, int, int]) -> OpWork:
    rows, hidden, out = sizes
    letter = "C" if op == "head_logits" else "V"

    def draw(seed: int) -> OpCase:
        weight = place.normal(seed + 1, out, hidden, scale=hidden**-0.5)
        args = {"hidden_NM": place.normal(seed, rows, hidden), f"weight_{letter}M": weight}
        dims = {"N": rows, "M": hidden, **({"V": out} if letter == "V" else {})}
        return OpCase("", {**args, "scale": 1.0}, dims)

    def logits_stored(args: Mapping[str, Any]) -> Any:
        def call() -> Mapping[str, torch.Tensor]:
            logits = torch.nn.functional.linear(args["hidden_NM"], args["weight_VM"])
            return {"result": logits.float().logsumexp(-1)}

        return call

    return OpWork(
        op,
        f"{model}, {rows} rows, {out} of the head",
        draw,
        flops=2.0 * rows * hidden * out,
        num_bytes=float(
            place.dtype.itemsize * (rows + out) * hidden + 4 * rows * (out if letter == "C" else 1)
        ),
        peers={} if letter == "C" else {"torch, logits stored": logits_stored},
    )


def _level(place: Place, rows: int, codes: int) -> OpWork:
    def draw(seed: int) -> OpCase:
        return OpCase("", {"logits_NC": place.normal(seed, rows, codes, dtype=torch.float32)})

    def by_torch(args: Mapping[str, Any]) -> Any:
        return lambda: {"result": args["logits_NC"].logsumexp(-1)}

    num_bytes = 4.0 * rows * (codes + 1)
    label = f"{rows} rows, {codes} codes"
    return OpWork("level_logsumexp", label, draw, 0.0, num_bytes, {"torch": by_torch})


def _flagged_level(place: Place, rows: int, codes: int) -> OpWork:
    label = f"{rows} rows, {codes} codes"

    def draw(seed: int) -> OpCase:
        scores = place.normal(seed + 1, rows, dtype=torch.float32)
        args = {
            "logits_NC": place.normal(seed, rows, codes, dtype=torch.float32),
            "rows": _rows_of(place, [rows], {"scores_N": scores}),
            "status_S1": place.int32([0, 0]),
            "round": 1,
        }
        return OpCase(label, args, {}, False, ("rows", "status_S1"), _view_flagged)

    return OpWork("flagged_level_logsumexp", label, draw, 0.0, 4.0 * rows * (codes + 4))


def _view_flagged(args: Mapping[str, Any], result: Any) -> dict[str, torch.Tensor]:
    return {**_view_flags(args, result), "result": result}


def _rows_of(place: Place, counts: list[int], values: Mapping[str, torch.Tensor]) -> BeamRows:
    search = np.repeat(np.arange(len(counts)), counts)
    total = len(search)
    garbage = {name: place.int32([-7] * total) for name in ("nodes_N", "parents_N", "codes_N")}
    garbage["scores_N"] = torch.full((total,), torch.nan, device=place.device)
    start = place.int32(np.concatenate([[0], np.cumsum(counts)]))
    return BeamRows(**{**garbage, **values}, start_S1=start, search_of_row_N=place.int32(search))


def _round(catalogue: Catalogue, searches: int, width: int, number: int) -> Iterator[OpWork]:
    place, codes = catalogue.place, catalogue.items.num_codes
    trie, label = catalogue.levels[number], f"{searches} x {width}, round {number}"
    nodes = [catalogue.parents(number, width, 100 * number + s) for s in range(searches)]
    counts = [len(found) for found in nodes]
    num_children = [catalogue.num_children(number, found) for found in nodes]
    widths = [min(width, found) for found in num_children]
    rows = sum(counts)

    def parents(seed: int) -> dict[str, Any]:
        scores = -place.normal(seed, rows, dtype=torch.float32).abs()
        order = torch.cat(
            [part.sort(descending=True).values for part in torch.split(scores, counts)]
        )
        beams = {"scores_N": order, "nodes_N": place.int32(np.concatenate(nodes))}
        return {
            "logits_NC": place.normal(seed + 1, rows, codes, dtype=torch.float32),
            "parents": _rows_of(place, counts, beams),
            "rule_row_S": place.int32([0] * searches),
            "trie": trie,
        }

    def draw_select(seed: int) -> OpCase:
        args = parents(seed)
        args["lse_N"] = level_logsumexp.reference(args["logits_NC"])
        args["children"] = _rows_of(place, widths, {})
        args["counters"] = torch.zeros(2, dtype=torch.int64, device=place.device)
        written = ("children", "counters")
        return OpCase(label, args, {"N": rows}, True, written, _view_children)

    candidates = float(sum(num_children))
    # a candidate: its logit, its code and whether it is alive; a row: score, node, search, normaliser
    num_bytes = candidates * 9 + rows * 16
    note = f"{rows} parents, {int(candidates)} candidates"
    yield OpWork(
        "select_beams",
        label,
        draw_select,
        0.0,
        num_bytes + 16 * sum(widths),
        {"torch, dense mask and topk": _dense_topk} if len(set(counts + widths)) <= 2 else {},
        note,
    )
    children = OpWork(
        "children_logsumexp",
        label,
        lambda seed: OpCase(label, parents(seed), {"N": rows}),
        0.0,
        num_bytes + 4 * rows,
        note=note,
    )
    yield children


def _view_children(args: Mapping[str, Any], result: Any) -> dict[str, torch.Tensor]:
    rows = args["children"]
    names = ("scores_N", "nodes_N", "parents_N", "codes_N")
    return {**{name: getattr(rows, name) for name in names}, "live rows": args["counters"][:1]}


def _dense_topk(args: Mapping[str, Any]) -> Any:
    """The mask of every row is there already: what remains is a sum, a mask and the library's top-k."""
    logits_NC, trie, parents = args["logits_NC"], args["trie"], args["parents"]
    searches = len(args["rule_row_S"])
    width = len(args["children"].scores_N) // searches
    mask_NC = torch.zeros_like(logits_NC, dtype=torch.bool)
    if trie.is_dense:
        mask_NC |= trie.alive_RE[0]
    else:
        nodes = parents.nodes_N.long()
        counts = (trie.offsets[nodes + 1] - trie.offsets[nodes]).long()
        row = torch.arange(len(nodes), device=nodes.device).repeat_interleave(counts)
        before = (counts.cumsum(0) - counts).repeat_interleave(counts)
        edge = trie.offsets[nodes].long().repeat_interleave(counts) - before
        edge += torch.arange(len(row), device=nodes.device)
        mask_NC[row, trie.codes[edge].long()] = True

    def call() -> Mapping[str, torch.Tensor]:
        scores = parents.scores_N[:, None] + (logits_NC - args["lse_N"][:, None])
        scores = scores.masked_fill(~mask_NC, DEAD).view(searches, -1)
        return {"scores_N": scores.topk(width).values.flatten()}

    return call


def _flags(place: Place, searches: int, width: int) -> OpWork:
    rows, label = searches * width, f"{searches} x {width}"

    def draw(seed: int) -> OpCase:
        scores = place.normal(seed, rows, dtype=torch.float32)
        args = {
            "lse_N": place.normal(seed + 1, rows, dtype=torch.float32),
            "rows": _rows_of(place, [width] * searches, {"scores_N": scores}),
            "status_S1": place.int32([0] * (searches + 1)),
            "round": 1,
        }
        return OpCase(label, args, {}, True, ("rows", "status_S1"), _view_flags)

    return OpWork("flag_failed_searches", label, draw, 0.0, 12.0 * rows)


def _view_flags(args: Mapping[str, Any], result: Any) -> dict[str, torch.Tensor]:
    return {"scores": args["rows"].scores_N, "status_S1": args["status_S1"]}
