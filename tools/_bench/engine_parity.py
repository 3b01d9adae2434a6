"""Questions for `answer_check` out of a batch that an engine ran: its beams as codes, and what the reference knows of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tools._bench.answer_check import Question, Verdict
from tools._bench.answer_scores import LevelScorer, foresee
from tools._bench.sid_catalog import Prefixes
from xgr_runtime.conformance.same_answer import SameAnswerStats
from xgr_runtime.xschedule.results import beam_levels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tools._bench.plain_decoder import PlainDecoder
    from tools._bench.sid_catalog import SidItems
    from xgr_runtime.types import RecRequest, RecResult
    from xgr_runtime.xschedule.batch import Batch, BatchOutput

POSSIBLE_LIMIT = 4  # half precision: where more rows are possible than this many times w, possible sets decide too little


class Oracle:
    """The catalogue and the reference decoder of a model. t: of the dtype that the engines run in."""

    def __init__(
        self,
        items: SidItems,
        decoder: PlainDecoder,
        first_code_token: int,
        t: float,
        *,
        is_half: bool,
    ) -> None:
        self._items, self._decoder, self._first = items, decoder, first_code_token
        self._t, self._limit = t, POSSIBLE_LIMIT if is_half else None
        self.prefixes = Prefixes(items.sids, items.num_codes)

    def question(
        self,
        request: RecRequest,
        result: RecResult,
        batch: Batch,
        output: BatchOutput,
    ) -> Question:
        """What has to be checked of one request's answer."""
        name, (search,), (found,) = request.request_id, request.searches, result.results
        codes, scores = self._beams(batch, output, name)
        if found.status != "ok":
            raise SystemExit(f"{name} failed: {found.reason}")
        sids = found.sids.astype(np.int64)
        if not {tuple(sid) for sid in sids.tolist()} <= {tuple(c) for c in codes[-1].tolist()}:
            raise SystemExit(f"{name} returned items that are not among its last beams")
        scorer = self._scorer(request)
        widths = (search.beam_width or 0,) * len(codes)
        kept = [_packed(level, self.prefixes.num_codes) for level in codes]
        foreseen = foresee(scorer, len(codes), widths, self._t, kept)
        return Question(
            name, codes, scores, found.num_valid, widths, self._t, self._limit, foreseen
        )

    def check_unconstrained(
        self, request: RecRequest, batch: Batch, output: BatchOutput
    ) -> Verdict:
        """A run whose selection knows no catalogue, level by level.

        Every kept beam's score against the reference's, and the i-th best kept one against the i-th best of all
        continuations of what was kept before: had one been missed, all behind it would be too low.
        """
        scorer, name = self._scorer(request), request.request_id
        width, before, largest, common = request.searches[0].beam_width or 0, None, 0.0, 0
        for level, (codes, scores) in enumerate(
            _unconstrained_beams(batch, output, request.request_id)
        ):
            own = -np.sort(-scores)
            kept = np.zeros((1, 0), np.int64) if before is None else before
            best, wanted = scorer.best_of_all(kept, width)
            if len({tuple(row) for row in codes.tolist()}) != len(best):
                return Verdict(name, f"level {level}: {len(codes)} rows, {len(best)} others exist")
            off = np.abs(scores - scorer.scores_of(codes)).max(), np.abs(own - wanted).max()
            if not max(off) <= self._t:
                return Verdict(
                    name, f"level {level}: a score is off by {off[0]}, a rank's by {off[1]}"
                )
            largest, before = max(largest, *map(float, off)), codes
            common = len(set(map(tuple, codes.tolist())) & set(map(tuple, best.tolist())))
        stats = SameAnswerStats(
            num_rows=width,
            num_safe=0,
            num_possible=0,
            num_common=common,
            num_reference=width,
            is_identical=common == width,
            possible_checked=False,
            max_error=largest,
        )
        return Verdict(name, "", stats)

    def _scorer(self, request: RecRequest) -> LevelScorer:
        prompt, (search,) = request.prompt_token_ids, request.searches
        assert prompt is not None
        rules = search.rules
        prefixes = self.prefixes
        ids = np.asarray(rules.exclude_item_ids, np.int64)
        if rules.require or rules.exclude_tags or len(ids):
            keep = self._items.passing(rules.require, rules.exclude_tags, ids)
            prefixes = Prefixes(self._items.sids[keep], self._items.num_codes)
        read = self._decoder.read(prompt.tolist())
        is_vocab = search.normalization == "vocab"
        return LevelScorer(self._decoder, read, prefixes, self._first, is_vocab=is_vocab)

    def _beams(
        self, batch: Batch, output: BatchOutput, name: str
    ) -> tuple[list[NDArray[np.int64]], list[NDArray[np.float32]]]:
        """Per level the codes and scores of the live rows. A node's number is its place among all prefixes of the level."""
        history = batch.request_ids.index(name)
        codes, scores = [], []
        for group, out in zip(batch.groups, output.groups, strict=True):
            for index in np.flatnonzero(group.history_of_S == history).tolist():
                for level, (nodes, own) in enumerate(beam_levels(group, out, index)):
                    codes.append(
                        self.prefixes.codes_of(self.prefixes.keys[level][nodes], level + 1)
                    )
                    scores.append(own)
        return codes, scores


def _unconstrained_beams(
    batch: Batch, output: BatchOutput, name: str
) -> list[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Per level the codes and scores of a search's rows, whose nodes are codes."""
    (group,), (out,) = batch.groups, output.groups
    index = int(np.flatnonzero(group.history_of_S == batch.request_ids.index(name))[0])
    found, codes = [], np.zeros((0, 0), np.int64)
    for level in range(group.num_levels):
        starts = group.row_starts(level)
        rows = slice(starts[index], starts[index + 1])
        last = out.nodes_LN[level][rows].astype(np.int64)[:, None]
        if level:
            parents = out.parents_LN[level][rows] - group.row_starts(level - 1)[index]
            last = np.concatenate([codes[parents], last], axis=1)
        codes = last
        found.append((codes, out.scores_LN[level][rows]))
    return found


def _packed(codes: NDArray[np.int64], num_codes: int) -> NDArray[np.int64]:
    packed = np.zeros(len(codes), np.int64)
    for column in codes.T:
        packed = packed * num_codes + column
    return packed


def largest_difference(
    one: PlainDecoder, two: PlainDecoder, prompt: Sequence[int], tokens: NDArray[np.int64]
) -> float:
    """Between two decoders, of any logit behind a prompt and behind prefixes of tokens [B, n] that follow it."""
    largest = 0.0
    found = []
    for decoder in (one, two):
        read = decoder.read(list(prompt))
        place = decoder.head_VM.device
        hidden = [read.hidden_M[None]]
        hidden += [
            decoder.continue_from(read, torch.from_numpy(tokens[:, : n + 1].copy()).to(place))
            for n in range(tokens.shape[1])
        ]
        found.append([(part @ decoder.head_VM.T).cpu().double() for part in hidden])
    for left, right in zip(*found, strict=True):
        largest = max(largest, float((left - right).abs().max()))
    return largest
