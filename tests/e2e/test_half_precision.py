"""16-bit engines against the fp32 scores of the same checkpoint, by the rule that holds for every dtype.

Reference: the checkpoint's own weights in transformers, in fp32; the demo's are stored in fp32, so that rounding them
counts as an error too. The sets of possible and certain rows are checked where they stay small; the share is printed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch

from tests.helpers.catalogs import contiguous_tokens, random_catalog, scattered_tokens
from tests.helpers.engines import (
    assert_expanded,
    loaded_catalog,
    make_config,
    make_engine,
    prompt_of,
    record_batches,
    request_of,
    write_catalog,
)
from tests.helpers.oracle import Catalog, Item
from tests.helpers.packed_reference import tree_reference
from tests.helpers.tiny_models import (
    Family,
    TinyShape,
    hf_reference,
    load_hf,
    write_tiny_model,
)
from tools.demo.checkpoint import ITEMS_PATH, MODEL_FOLDER, HyperParameters
from tools.demo.movielens import load_sequences
from tools.demo.semantic_ids import NUM_CODES, NUM_LEVELS, read_items
from tools.demo.template import FIRST_CODE_TOKEN, START_TOKEN
from xgr_runtime.config import LimitsConfig, SchedulerConfig, TemplateConfig
from xgr_runtime.conformance.same_answer import Answer, SameAnswerTotals, assert_same_answer
from xgr_runtime.hal.tolerances import TOLERANCES
from xgr_runtime.types import NORMALIZATIONS, Search

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from xgr_runtime import RuntimeConfig
    from xgr_runtime.conformance.same_answer import Reference

HALVES = (torch.bfloat16, torch.float16)
POSSIBLE_LIMIT = 4
NUM_USERS = 20
WIDTHS = (10, 50)
MIN_OVERLAP = 0.95
# Random weights amplify rounding far more than trained ones: at the usual spread of 4, transformers' own bf16 scores are
# up to 2 nats from its fp32 ones. The error is proportional to the spread.
LOGIT_SPREAD = 0.5


@dataclass(frozen=True)
class Demo:
    """The committed trained checkpoint, its items, real users' histories, and the fp32 scores behind each of them."""

    catalog: Catalog
    histories: Sequence[Sequence[int]]
    references: Sequence[Reference]
    config: RuntimeConfig


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    tokens = contiguous_tokens([NUM_CODES] * NUM_LEVELS, FIRST_CODE_TOKEN)
    items = read_items(ITEMS_PATH).items()
    catalog = Catalog(tuple(Item(item, sid) for item, sid in items), tokens)
    users = list(load_sequences().values())
    histories = [user[:-1] for user in users[:: len(users) // NUM_USERS][:NUM_USERS]]
    longest = HyperParameters().template.max_history_items
    model, children = load_hf(MODEL_FOLDER), catalog.children
    references = [
        tree_reference(
            model,
            prompt_of(catalog, history[-longest:], (START_TOKEN,)),
            lambda prefix: children.get(prefix, ()),
            tokens,
        )
        for history in histories
    ]
    file = write_catalog(tmp_path_factory.mktemp("demo") / "items.xgr", catalog)
    config = make_config(
        MODEL_FOLDER,
        {"main": file},
        template=TemplateConfig(prefix_token_ids=(START_TOKEN,)),
        limits=LimitsConfig(max_history_items=longest, max_prompt_tokens=126, max_num_results=200),
        scheduler=SchedulerConfig(max_batch_histories=8, max_batch_rows=1024, max_wait_ms=5.0),
    )
    return Demo(catalog, histories, references, config)


def in_dtype(config: RuntimeConfig, dtype: torch.dtype) -> RuntimeConfig:
    name = str(dtype).removeprefix("torch.")
    return replace(config, model=replace(config.model, dtype=name))  # type: ignore[arg-type]


@pytest.mark.e2e
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_trained_model_on_real_users(
    demo: Demo, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    with make_engine(in_dtype(demo.config, dtype)) as engine:
        assert engine.runner.kv.shared.k_pages(0).dtype == dtype
        recording, product = record_batches(engine), loaded_catalog(engine)
        for width in WIDTHS:
            search = Search(beam_width=width, num_results=width, normalization="vocab")
            requests = [
                request_of(f"{width}/{i}", history, search)
                for i, history in enumerate(demo.histories)
            ]
            totals = SameAnswerTotals()
            replies = engine.recommend(requests)
            for request, reply, ref in zip(requests, replies, demo.references, strict=True):
                answer = Answer.from_trace(recording.trace(request.request_id, product))
                totals.add(
                    assert_same_answer(
                        answer,
                        ref,
                        TOLERANCES[dtype].same_answer,
                        [width] * NUM_LEVELS,
                        POSSIBLE_LIMIT,
                    )
                )
                assert reply.results[0].num_valid == width
            with capsys.disabled():
                sys.stdout.write(f"\n{dtype}, W={width}: {totals}\n")
            assert totals.mean_overlap >= MIN_OVERLAP


@pytest.mark.e2e
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_random_models_under_every_normalisation(
    tmp_path: Path, dtype: torch.dtype, family: Family, capsys: pytest.CaptureFixture[str]
) -> None:
    """16-bit checkpoints; mixed widths and lengths in shared batches, scattered tokens, absent codes, shared SIDs."""
    catalog = random_catalog(5, 300, scattered_tokens([9, 10, 11], 48, seed=4, share_absent=0.1))
    # a head dim of 16: the least that an NPU's fused attention takes
    shape = TinyShape(vocab_size=48, hidden_size=64, is_tied=family == "llama")
    folder = write_tiny_model(
        tmp_path / "model", family, shape, dtype=dtype, logit_spread=LOGIT_SPREAD
    )
    file = write_catalog(tmp_path / "items.xgr", catalog)
    model, totals = load_hf(folder), SameAnswerTotals()
    with make_engine(in_dtype(make_config(folder, {"main": file}), dtype)) as engine:
        recording, product = record_batches(engine), loaded_catalog(engine)
        requests, histories = [], []
        for i in range(18):
            histories.append([item.item_id for item in catalog.items[7 * i : 8 * i]])
            widths = [(1, 1, 1), (50, 50, 50), (4, 20, 50)][i % 3]
            search = Search(
                beam_widths=widths, num_results=500, normalization=NORMALIZATIONS[i // 3 % 3]
            )
            requests.append(request_of(str(i), histories[-1], search))
        for i, reply in enumerate(engine.recommend(requests)):
            (result,) = reply.results
            ref = hf_reference(
                model,
                prompt_of(catalog, histories[i]),
                lambda prefix: catalog.children.get(prefix, ()),
                catalog.token_of,
                result.normalization,
            )
            answer = Answer.from_trace(recording.trace(str(i), product))
            t = TOLERANCES[dtype].same_answer
            totals.add(assert_same_answer(answer, ref, t, result.beam_widths, POSSIBLE_LIMIT))
            assert_expanded(result, answer.rows, catalog, 500)
    with capsys.disabled():
        sys.stdout.write(f"\n{dtype}, random {family}: {totals}\n")
    assert totals.share_possible_checked > 0
