"""The engine's search equals constrained `generate` of transformers on the same trained checkpoint, in fp32.

Two checkpoints: the committed demo model on real MovieLens users, and a small Qwen3 trained here on amazon-office. For
each width and user three answers meet: the engine's, generate's, and the teacher-forced reference that judges both.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.helpers.catalogs import contiguous_tokens
from tests.helpers.engines import (
    loaded_catalog,
    make_config,
    make_engine,
    prompt_of,
    record_batches,
    request_of,
    write_catalog,
)
from tests.helpers.oracle import Catalog, Item
from tests.helpers.packed_reference import tree_logits, tree_reference
from tests.helpers.tiny_models import hf_constrained_generate, hf_logits, load_hf
from tools.demo.checkpoint import ITEMS_PATH, MODEL_FOLDER, HyperParameters
from tools.demo.movielens import load_sequences
from tools.demo.semantic_ids import NUM_CODES, NUM_LEVELS, read_items
from tools.demo.template import FIRST_CODE_TOKEN, START_TOKEN
from xgr_runtime.config import LimitsConfig, SchedulerConfig
from xgr_runtime.conformance.same_answer import Answer, SameAnswerTotals, assert_same_answer
from xgr_runtime.hal.tolerances import TOLERANCES
from xgr_runtime.types import Search

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

T = TOLERANCES[torch.float32].same_answer
WIDTHS = (20, 50)
USERS_PER_GENERATE = 25
OFFICE_ITEMS = 10  # histories of the data set hold at most ten items


@dataclass(frozen=True)
class Size:
    """How many users are asked about, and how long a model is trained for them."""

    num_users: int
    epochs: int


both_sizes = pytest.mark.parametrize(
    "size",
    [
        pytest.param(Size(50, 1), id="50 users"),
        pytest.param(Size(200, 5), id="200 users", marks=pytest.mark.slow),
    ],
)


@dataclass(frozen=True)
class Trained:
    """A trained checkpoint, its catalogue, and histories of real users as item ids."""

    folder: Path
    catalog: Catalog
    histories: Sequence[Sequence[int]]
    max_history_items: int


def demo(num_users: int) -> Trained:
    """The demo's committed checkpoint; MovieLens users from all over the list without the last item."""
    sids = read_items(ITEMS_PATH)
    tokens = contiguous_tokens([NUM_CODES] * NUM_LEVELS, FIRST_CODE_TOKEN)
    catalog = Catalog(tuple(Item(item, sid) for item, sid in sids.items()), tokens)
    sequences = list(load_sequences().values())
    users = sequences[:: len(sequences) // num_users][:num_users]
    chunk = HyperParameters().template.max_history_items
    return Trained(MODEL_FOLDER, catalog, [user[:-1] for user in users], chunk)


def office(data: Path, folder: Path, size: Size) -> Trained:
    """A small Qwen3 trained on the training and validation rows; histories of the test rows."""
    folder_in = data / "amazon-office"
    items = read_lines(folder_in / "items.jsonl")
    catalog = Catalog(
        tuple(Item(item["id"], tuple(item["sid"])) for item in items),
        contiguous_tokens([256] * 3, 8),
    )
    sequences = [row["items"] for row in read_lines(folder_in / "train.jsonl")]
    sequences += [[*row["history"], row["target"]] for row in read_lines(folder_in / "valid.jsonl")]
    prompts = [prompt_of(catalog, sequence[-OFFICE_ITEMS - 1 :]) for sequence in sequences]
    train_qwen3(prompts, 8 + 3 * 256, size.epochs).save_pretrained(folder)
    test = [row["history"] for row in read_lines(folder_in / "test.jsonl")]
    histories = test[:: len(test) // size.num_users][: size.num_users]
    return Trained(folder, catalog, histories, OFFICE_ITEMS)


def read_lines(path: Path) -> list[Any]:
    """One JSON value a line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def train_qwen3(prompts: Sequence[Sequence[int]], vocab_size: int, num_epochs: int) -> Any:
    """Next-token training with fixed seeds on rows of similar length, padded on the right with token 0."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    make: Any = Qwen3ForCausalLM
    model = make(
        Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    by_length = sorted(prompts, key=len)
    batches = [by_length[first : first + 128] for first in range(0, len(by_length), 128)]
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=4e-3, total_steps=num_epochs * len(batches)
    )
    for _ in range(num_epochs):
        for index in rng.permutation(len(batches)):
            batch = batches[index]
            table = torch.zeros(len(batch), max(map(len, batch)), dtype=torch.int64)
            for row, prompt in enumerate(batch):
                table[row, : len(prompt)] = torch.tensor(list(prompt))
            logits = model(input_ids=table[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), table[:, 1:].flatten(), ignore_index=0
            )
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
    return model.eval()


def check_against_generate(
    trained: Trained, num_users: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The three answers for every user and width; shares asserted, totals printed."""
    catalog, children = trained.catalog, trained.catalog.children
    prompts = [
        prompt_of(catalog, history[-trained.max_history_items :], (START_TOKEN,))
        for history in trained.histories
    ]
    assert len(prompts) == num_users
    model = load_hf(trained.folder)
    refs = [
        tree_reference(model, prompt, lambda p: children.get(p, ()), catalog.token_of)
        for prompt in prompts
    ]
    config = make_config(
        trained.folder,
        {"main": write_catalog(tmp_path / "items.xgr", catalog)},
        limits=LimitsConfig(
            max_history_items=trained.max_history_items,
            max_prompt_tokens=126,
            max_num_results=200,
        ),
        scheduler=SchedulerConfig(max_batch_histories=8, max_batch_rows=1024, max_wait_ms=5.0),
    )
    with make_engine(config) as engine:
        recording = record_batches(engine)
        product = loaded_catalog(engine)
        for width in WIDTHS:
            search = Search(beam_width=width, num_results=2 * width, normalization="vocab")
            replies = engine.recommend(
                [request_of(f"{width}/{i}", h, search) for i, h in enumerate(trained.histories)]
            )
            generated = generate(model, prompts, catalog, width)
            totals, judged = SameAnswerTotals(), SameAnswerTotals()
            identical = 0
            for i, (reply, rows, ref) in enumerate(zip(replies, generated, refs, strict=True)):
                (result,) = reply.results
                assert reply.num_prompt_tokens == len(prompts[i])
                trace = recording.trace(f"{width}/{i}", product)
                answer = Answer.from_trace(trace)
                totals.add(assert_same_answer(answer, ref, T, [width] * catalog.num_levels))
                judged.add(
                    assert_same_answer(Answer(rows, width), ref, T, [width] * catalog.num_levels)
                )
                own = [sid for sid, _ in answer.rows]
                identical += own == [sid for sid, _ in rows]
                assert list(dict.fromkeys(map(tuple, result.sids.tolist()))) == own
                assert result.num_valid == width
            share = identical / len(prompts)
            with capsys.disabled():
                sys.stdout.write(
                    f"\nW={width}, engine: {totals}\nW={width}, generate: {judged}; "
                    f"{share:.1%} of its lists are the engine's\n"
                )
            assert totals.share_safe_rows >= 0.95
            assert totals.share_identical >= 0.95
            assert share >= 0.95


def generate(
    model: Any, prompts: Sequence[Sequence[int]], catalog: Catalog, width: int
) -> list[list[tuple[tuple[int, ...], float]]]:
    """generate's rows per prompt, prompts of similar length together."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    rows: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    for first in range(0, len(order), USERS_PER_GENERATE):
        chunk = order[first : first + USERS_PER_GENERATE]
        found = hf_constrained_generate(
            model,
            [prompts[i] for i in chunk],
            lambda prefix: catalog.children.get(prefix, ()),
            catalog.token_of,
            width,
        )
        rows.update(zip(chunk, found, strict=True))
    return [rows[i] for i in range(len(prompts))]


def check_tree_scores(trained: Trained) -> None:
    """The packed reference against one forward a prefix."""
    model, catalog = load_hf(trained.folder), trained.catalog
    prompt = prompt_of(catalog, trained.histories[0][-5:])
    sids = [item.sid for item in catalog.items[:40:8]]
    prefixes = list(dict.fromkeys(sid[:length] for sid in sids for length in range(len(sid))))
    packed = tree_logits(model, prompt, prefixes, catalog.token_of)
    for prefix, logits in zip(prefixes, packed, strict=True):
        tokens = [catalog.token_of[level][code] for level, code in enumerate(prefix)]
        alone = hf_logits(model, [*prompt, *tokens])[-1].double().numpy()
        np.testing.assert_allclose(logits, alone, atol=3e-5)


@pytest.mark.e2e
@both_sizes
def test_the_demo_model(size: Size, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = demo(size.num_users)
    check_tree_scores(trained)
    check_against_generate(trained, size.num_users, tmp_path, capsys)


@pytest.mark.e2e
@pytest.mark.shared_data
@both_sizes
def test_a_model_trained_on_amazon_office(
    size: Size, tmp_path: Path, shared_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = office(shared_data, tmp_path / "model", size)
    check_tree_scores(trained)
    check_against_generate(trained, size.num_users, tmp_path, capsys)
