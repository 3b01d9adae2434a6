"""A small decoder through the whole engine, every answer against float64 by the same-answer rule.

Histories from one token to several pages, in every way of `plans_of`. The tolerance is that of the dtype, in nats; the
weights are what the dtype holds, so it is only the device's arithmetic that is judged.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from xgr_runtime.conformance.decoder_reference import (
    Array,
    DecoderShape,
    PlainDecoder,
    random_weights,
    write_checkpoint,
)
from xgr_runtime.conformance.difference import Difference
from xgr_runtime.conformance.engines import (
    EngineEntry,
    EngineShape,
    Runs,
    ask,
    make_config,
    noting_failures,
    plans_of,
)
from xgr_runtime.conformance.same_answer import (
    Answer,
    BeamTrace,
    Reference,
    Sid,
    assert_same_answer,
)
from xgr_runtime.conformance.searches import write_catalogs
from xgr_runtime.conformance.vectors import VectorCatalog, VectorItem
from xgr_runtime.hal.device import Device
from xgr_runtime.hal.tolerances import TOLERANCES
from xgr_runtime.types import NORMALIZATIONS, Normalization, RecRequest, RecResult, Search
from xgr_runtime.xschedule.engine import Engine

# Those of a line share their widths and a captured graph: to that graph every length but its first is news.
PROMPT_LENGTHS = ((1, 5, 8), (17, 20), (127, 128), (250, 129), (300, 258))
_WIDTHS = ((6, 20, 12), (8, 40, 100), (3, 9, 30), (1, 1, 1), (8, 24, 12))
_NUM_CODES, _NUM_LEVELS, _NUM_ITEMS = 8, 3, 150
_POSSIBLE_LIMIT = 4  # where half precision leaves more rows possible than this many times w, it decides too little


@dataclass(frozen=True)
class _Case:
    name: str
    prompt: tuple[int, ...]
    widths: tuple[int, ...]
    normalization: Normalization

    def request(self) -> RecRequest:
        search = Search(
            beam_widths=self.widths, normalization=self.normalization, num_results=_NUM_ITEMS
        )
        return RecRequest(
            self.name, prompt_token_ids=np.array(self.prompt, np.int64), searches=(search,)
        )


def _cases(vocab_size: int) -> list[_Case]:
    rng = np.random.default_rng(7)
    return [
        _Case(
            f"{length} tokens",
            tuple(rng.integers(0, vocab_size, length).tolist()),
            widths,
            NORMALIZATIONS[number % len(NORMALIZATIONS)],
        )
        for number, (lengths, widths) in enumerate(zip(PROMPT_LENGTHS, _WIDTHS, strict=True))
        for length in lengths
    ]


def _catalog(vocab_size: int) -> VectorCatalog:
    rng = np.random.default_rng(8)
    tokens = rng.permutation(vocab_size)[: _NUM_LEVELS * _NUM_CODES].reshape(_NUM_LEVELS, -1)
    sids = rng.integers(0, _NUM_CODES, (_NUM_ITEMS, _NUM_LEVELS)).tolist()
    items = tuple(VectorItem(n, tuple(sid), 0.0, True, ()) for n, sid in enumerate(sids))
    return VectorCatalog("main", tuple(map(tuple, tokens.tolist())), items)


class _References:
    """Teacher-forced float64 scores, computed once for all ways in which a case is asked."""

    def __init__(self, decoder: PlainDecoder, catalog: VectorCatalog) -> None:
        self._decoder, self._catalog = decoder, catalog
        self._children: dict[Sid, list[int]] = {(): []}
        for level in catalog.prefixes:
            for prefix in level:
                self._children[prefix] = []
                self._children[prefix[:-1]].append(prefix[-1])
        self._found: dict[str, Reference] = {}

    def of(self, case: _Case) -> Reference:
        """The reference of a case."""
        if case.name not in self._found:
            self._found[case.name] = self._make(case)
        return self._found[case.name]

    def _make(self, case: _Case) -> Reference:
        logits, past = self._decoder.read(case.prompt)
        token_of = self._catalog.token_of

        def child_log_probs(prefixes: Sequence[Sid]) -> list[Array]:
            rows: dict[Sid, Array] = {(): logits}
            for length in {len(prefix) for prefix in prefixes} - {0}:
                group = [prefix for prefix in prefixes if len(prefix) == length]
                tokens = [[token_of[lv][code] for lv, code in enumerate(p)] for p in group]
                found = self._decoder.continue_from(past, tokens)
                rows |= dict(zip(group, found, strict=True))
            return [self._log_probs(prefix, rows[prefix], case) for prefix in prefixes]

        return Reference(len(token_of), lambda prefix: self._children[prefix], child_log_probs)

    def _log_probs(self, prefix: Sid, logits: Array, case: _Case) -> Array:
        tokens = self._catalog.token_of[len(prefix)]
        wanted = logits[[tokens[code] for code in self._children[prefix]]]
        read = {"vocab": logits, "level": logits[list(tokens)], "valid": wanted}[case.normalization]
        largest = read.max()
        return np.asarray(wanted - largest - np.log(np.exp(read - largest).sum()))


class DecoderCheck:
    """The decoder with weights of one dtype, as a checkpoint in an existing empty folder, and its float64 scores."""

    what = "decoder"

    def __init__(self, dtype: torch.dtype, folder: Path) -> None:
        sizes = DecoderShape()
        weights, self._catalog = random_weights(sizes, dtype), _catalog(sizes.vocab_size)
        self._cases = _cases(sizes.vocab_size)
        self._references = _References(PlainDecoder(sizes, weights), self._catalog)
        self._folder = folder
        write_checkpoint(folder, sizes, weights)
        self._paths = write_catalogs({"main": self._catalog}, folder)

    def run(self, device: Device, shape: EngineShape, *, allow_reference: bool) -> EngineEntry:
        """Every case in every way. shape: with the dtype of the weights."""
        entry = EngineEntry(self.what, shape)
        entry.tolerance = TOLERANCES[shape.dtype].same_answer
        with noting_failures(entry):
            for plan in plans_of(device):
                config = make_config(
                    device.kind, shape, self._paths, plan, allow_reference=allow_reference
                )
                model = dataclasses.replace(config.model, path=str(self._folder))
                config = dataclasses.replace(config, model=model)
                runs = Runs()
                with Engine.from_config(config, device, on_batch=runs.note) as engine:
                    for way in plan.ways:
                        self._check_way(engine, runs, way, entry)
                    entry.note_engine(engine.stats())
        return entry

    def _check_way(self, engine: Engine, runs: Runs, way: str, entry: EngineEntry) -> None:
        limit = None if entry.shape.dtype == torch.float32 else _POSSIBLE_LIMIT
        runs.clear()
        answers = ask(engine, [case.request() for case in self._cases], way)
        for case, result in zip(self._cases, answers, strict=True):
            entry.num_checked += 1
            try:
                if isinstance(result, Exception):
                    raise Difference(f"{type(result).__name__}: {result}")
                answer = _answer(case, result, self._catalog, runs)
                stats = assert_same_answer(
                    answer, self._references.of(case), entry.tolerance, case.widths, limit
                )
                entry.max_error = max(entry.max_error, stats.max_error)
            except Difference as difference:
                entry.note_failure(f"{case.name}, {way}", str(difference))


def _answer(case: _Case, result: RecResult, catalog: VectorCatalog, runs: Runs) -> Answer:
    levels, status = runs.levels(case.name)
    if status:
        raise Difference(f"the search failed in round {status - 1}: {result.results[0].reason}")
    trace = BeamTrace(
        [
            [
                (catalog.prefixes[level][node], float(score))
                for node, score in zip(nodes.tolist(), scores.tolist(), strict=True)
            ]
            for level, (nodes, scores) in enumerate(levels)
        ]
    )
    return Answer(trace.levels[-1], result.results[0].num_valid, trace)
