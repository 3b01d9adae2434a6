"""The demo's data, semantic ids, training input, checkpoint and yardsticks.

The leak checks parse the raw file on their own; nothing of tools.demo.movielens is trusted there.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3ForCausalLM

from tools.demo import baselines, checkpoint, evaluate, metrics, movielens, semantic_ids, train
from tools.demo.checkpoint import ITEMS_PATH, MODEL_FOLDER, HyperParameters
from tools.demo.errors import DemoError
from tools.demo.network import Network
from tools.demo.template import Template

# fp32 sums in another order (another CPU or BLAS) move a loss by about 1e-6; twenty optimizer
# steps amplify that, and another input, seed or order of the rows moves it by more than 1e-2.
LOSS_TOLERANCE = 1e-3
Checkpoint = tuple[Network, HyperParameters, dict[str, str]]


def raw_sequences() -> dict[int, list[int]]:
    """Every user's items by (timestamp, item id) straight from the file in the wheel."""
    spec = importlib.util.find_spec("recbole")
    assert spec is not None, f"recbole is missing: {movielens.INSTALL_COMMAND}"
    assert spec.origin is not None
    path = Path(spec.origin).parent / "dataset_example" / "ml-100k" / "ml-100k.inter"
    lines = path.read_bytes().decode().splitlines()[1:]
    rows: dict[int, list[tuple[float, int]]] = {}
    for line in lines:
        user, item, _, timestamp = line.split("\t")
        rows.setdefault(int(user), []).append((float(timestamp), int(item)))
    return {user: [item for _, item in sorted(rows[user])] for user in rows}


@pytest.fixture(scope="module")
def raw() -> dict[int, list[int]]:
    return raw_sequences()


@pytest.fixture(scope="module")
def sids() -> dict[int, tuple[int, ...]]:
    """Recomputed from the wheel, from all but the last items."""
    seen = movielens.without_last(movielens.load_sequences(), 1)
    return semantic_ids.semantic_ids(seen, list(movielens.load_titles()))


@pytest.fixture(scope="module")
def data(sids: dict[int, tuple[int, ...]]) -> train.TrainingInput:
    """Rebuilt from the wheel."""
    return train.training_input(movielens.without_last(movielens.load_sequences(), 1), sids)


@pytest.fixture(scope="module")
def trained() -> Checkpoint:
    return checkpoint.read_checkpoint(MODEL_FOLDER)


# Data


def test_sequences_equal_the_raw_file(raw: dict[int, list[int]]) -> None:
    assert movielens.load_sequences() == raw
    assert len(raw) == 943
    assert sum(map(len, raw.values())) == 100_000


def test_titles() -> None:
    titles = movielens.load_titles()
    assert list(titles) == list(range(1, 1683))
    assert titles[1] == "Toy Story (1995)"
    assert titles[50] == "Star Wars (1977)"


def test_without_last() -> None:
    sequences = {7: [1, 2, 3, 4], 9: [5, 6, 7]}
    assert movielens.without_last(sequences, 1) == {7: [1, 2, 3], 9: [5, 6]}
    assert movielens.without_last(sequences, 2) == {7: [1, 2], 9: [5]}
    with pytest.raises(ValueError, match="num_held_out must be 1 or 2, got 0"):
        movielens.without_last(sequences, 0)


def test_missing_wheel_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(DemoError, match=r"pip install --no-deps recbole==1\.2\.1"):
        movielens.data_folder()


@pytest.mark.parametrize(
    ("version", "message"), [("0.9", "expects recbole 1.2.1, got 0.9"), ("1.2.1", "ml-100k.inter")]
)
def test_other_wheels_are_refused(
    version: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / f"recbole-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: recbole\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(DemoError, match=message):
        movielens.data_folder()


# Semantic ids


def test_committed_ids_equal_the_recomputed_ones(sids: dict[int, tuple[int, ...]]) -> None:
    rows = [json.loads(line) for line in ITEMS_PATH.read_text().splitlines()]
    assert all(set(row) == {"item_id", "sid"} for row in rows)
    assert {row["item_id"]: tuple(row["sid"]) for row in rows} == sids
    assert semantic_ids.read_items(ITEMS_PATH) == sids


def test_every_item_has_its_own_id(sids: dict[int, tuple[int, ...]]) -> None:
    assert list(sids) == list(range(1, 1683))
    assert len(set(sids.values())) == 1682
    assert all(len(sid) == 3 and min(sid) >= 0 and max(sid) < 64 for sid in sids.values())


def test_cooccurrence_against_a_plain_loop() -> None:
    sequences = {1: [3, 1, 2, 3], 2: [2, 1] + [4] * 11 + [3]}
    expected = np.zeros((4, 4))
    for items in sequences.values():
        for left in range(len(items)):
            for right in range(left + 1, min(left + 10, len(items) - 1) + 1):
                weight = 1.0 / (right - left)
                expected[items[left] - 1, items[right] - 1] += weight
                expected[items[right] - 1, items[left] - 1] += weight
    got = semantic_ids.cooccurrence(sequences, [1, 2, 3, 4])
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_full_prefix_is_refused() -> None:
    prefixes = [np.zeros(65, dtype=np.int64), np.zeros(65, dtype=np.int64)]
    with pytest.raises(ValueError, match=r"\(0, 0\) holds more than 64 items"):
        semantic_ids.nearest_free_codes(prefixes, np.ones((65, 64), dtype=np.int64))


def test_nearest_free_codes() -> None:
    prefixes = [np.array([0, 0, 0, 5]), np.array([1, 1, 1, 1])]
    distances = np.full((4, 64), 9)
    distances[0, 3], distances[0, 8] = 2, 4
    distances[1, 3] = 1
    distances[2, 3], distances[2, 8] = 3, 5
    distances[3, 3] = 7
    got = semantic_ids.nearest_free_codes(prefixes, distances)
    assert got.tolist() == [8, 3, 0, 3]


# Training input: what the committed model has seen


def test_training_input_holds_no_last_item(
    data: train.TrainingInput, raw: dict[int, list[int]], sids: dict[int, tuple[int, ...]]
) -> None:
    item_of = {sid: item for item, sid in sids.items()}
    codes = data.tokens - np.array([8, 8 + 64, 8 + 128])
    items = [item_of[tuple(row)] for row in codes.tolist()]
    assert sorted(data.users.tolist()) == sorted(raw)
    start = 0
    for user, length in zip(data.users.tolist(), data.lengths.tolist(), strict=True):
        trained = items[start : start + length]
        assert trained == raw[user][:-1]
        assert raw[user][-1] not in trained
        start += length
    assert start == len(items) == 100_000 - 943


def test_checkpoint_was_trained_on_this_input(
    data: train.TrainingInput, trained: Checkpoint
) -> None:
    assert trained[2]["input_sha256"] == data.digest()


@pytest.mark.parametrize("num_steps", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_first_losses_are_reproduced(
    data: train.TrainingInput, trained: Checkpoint, num_steps: int
) -> None:
    _, hyper, metadata = trained
    recorded = json.loads(metadata["first_losses"])
    assert len(recorded) == 20
    assert metadata["seed"] == str(hyper.seed)
    found = train.first_losses(data, hyper, num_steps)
    assert found == pytest.approx(recorded[:num_steps], rel=LOSS_TOLERANCE)


def test_another_seed_gives_other_losses(data: train.TrainingInput, trained: Checkpoint) -> None:
    """The tolerance above is tight enough to tell runs apart."""
    _, hyper, metadata = trained
    recorded = json.loads(metadata["first_losses"])[:4]
    other = train.first_losses(data, replace(hyper, seed=hyper.seed + 1), 4)
    assert other != pytest.approx(recorded, rel=LOSS_TOLERANCE)


def test_an_epoch_holds_every_item_once_behind_start_tokens(data: train.TrainingInput) -> None:
    table = train.epoch_rows(data, 21, np.random.default_rng(5))
    assert table.shape[1] == 1 + 3 * 21
    assert (table[:, 0] == 1).all()
    body = table[:, 1:].reshape(-1, 3)
    body = body[body[:, 0] != 0]
    assert sorted(map(tuple, body.tolist())) == sorted(map(tuple, data.tokens.tolist()))


# The checkpoint


def test_artefacts_are_small() -> None:
    files = [ITEMS_PATH, *MODEL_FOLDER.iterdir()]
    assert {file.name for file in files} == {"items.jsonl", "config.json", "model.safetensors"}
    assert sum(file.stat().st_size for file in files) <= 3_000_000


@pytest.fixture(scope="module")
def reference() -> Qwen3ForCausalLM:
    model: Qwen3ForCausalLM = Qwen3ForCausalLM.from_pretrained(MODEL_FOLDER, dtype=torch.float32)
    return model


def test_logits_equal_transformers(trained: Checkpoint, reference: Qwen3ForCausalLM) -> None:
    network = trained[0]
    tokens = torch.from_numpy(np.random.default_rng(3).integers(0, 200, (4, 70)))
    with torch.no_grad():
        expected = reference(tokens).logits
        whole, _ = network(tokens)
        first, past = network(tokens[:, :68])
        second, past = network(tokens[:, 68:69], past)
        third, _ = network(tokens[:, 69:], past)
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    stepped = torch.cat([first, second, third], dim=1)
    torch.testing.assert_close(stepped, expected, atol=1e-4, rtol=1e-4)


def test_offline_search_equals_a_plain_beam_search(
    trained: Checkpoint,
    reference: Qwen3ForCausalLM,
    sids: dict[int, tuple[int, ...]],
    raw: dict[int, list[int]],
) -> None:
    network, hyper, _ = trained
    histories = {user: raw[user][:-1] for user in (1, 405, 700)}
    got = evaluate.recommend(network, hyper.template, sids, histories)
    for user, history in histories.items():
        prompt = hyper.template.tokens([sids[item] for item in history])
        allowed = {sid: item for item, sid in sids.items() if item not in set(history)}
        assert got[user] == plain_beam_search(reference, prompt, allowed)[:10]


def plain_beam_search(
    model: Qwen3ForCausalLM, prompt: list[int], allowed: dict[tuple[int, ...], int]
) -> list[int]:
    """Items of the 50 best beams; every round runs the whole model on every beam."""
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for level in range(3):
        rows = [
            prompt + [8 + 64 * place + code for place, code in enumerate(codes)]
            for codes, _ in beams
        ]
        with torch.no_grad():
            log_probs = model(torch.tensor(rows)).logits[:, -1].double().log_softmax(-1).tolist()
        prefixes = {sid[: level + 1] for sid in allowed}
        grown = [
            ((*codes, code), score + row[8 + 64 * level + code])
            for (codes, score), row in zip(beams, log_probs, strict=True)
            for code in range(64)
            if (*codes, code) in prefixes
        ]
        beams = sorted(grown, key=lambda beam: -beam[1])[:50]
    return [allowed[codes] for codes, _ in beams]


def test_template() -> None:
    template = Template(max_history_items=2)
    assert template.tokens([]) == [1]
    assert template.tokens([(0, 1, 2)]) == [1, 8, 73, 138]
    assert template.tokens([(9, 9, 9), (0, 1, 2), (63, 63, 63)]) == [1, 8, 73, 138, 71, 135, 199]


# Yardsticks


def test_baselines_by_hand() -> None:
    sequences = {1: [1, 2, 3, 4], 2: [2, 3, 5], 3: [2, 1, 5, 3]}
    ranking = baselines.popularity_ranking(sequences)
    assert ranking == [2, 3, 1, 5, 4]
    assert baselines.popularity_recommend(ranking, [3, 2], 2) == [1, 5]
    markov = baselines.Markov1(sequences)
    assert markov.recommend([2], 4) == [3, 1, 5, 4]
    assert markov.recommend([3], 2) == [5, 4]
    assert markov.recommend([4, 3], 3) == [5, 2, 1]
    assert markov.recommend([77], 2) == [2, 3]
    assert markov.recommend([], 1) == [2]


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.integers(1, 9), st.lists(st.integers(1, 7), min_size=1, max_size=9), min_size=1
    ),
    st.lists(st.integers(1, 8), max_size=4),
)
def test_baselines_against_brute_force(sequences: dict[int, list[int]], history: list[int]) -> None:
    watched = [item for items in sequences.values() for item in items]
    pairs: list[tuple[int | None, int]] = [
        (items[place], items[place + 1])
        for items in sequences.values()
        for place in range(len(items) - 1)
    ]
    fresh = [item for item in set(watched) if item not in history]
    by_popularity = sorted(fresh, key=lambda item: (-watched.count(item), item))
    last = history[-1] if history else None
    by_follower = sorted(by_popularity, key=lambda item: -pairs.count((last, item)))
    ranking = baselines.popularity_ranking(sequences)
    assert baselines.popularity_recommend(ranking, history) == by_popularity
    assert baselines.Markov1(sequences).recommend(history) == by_follower


def test_metrics_by_hand() -> None:
    ranked = [[5, 6, 7], [1, 2, 3], [4], list(range(20))]
    targets = [5, 3, 9, 10]
    assert metrics.recall_at_k(ranked, targets) == 2 / 4
    assert metrics.ndcg_at_k(ranked, targets) == pytest.approx((1.0 + 0.5) / 4)
    assert metrics.recall_at_k(ranked, targets, k=11) == 3 / 4
    assert metrics.ndcg_at_k(ranked, targets, k=11) == pytest.approx((1.5 + 1 / math.log2(12)) / 4)
    with pytest.raises(ValueError, match="got 0 lists and 0 targets"):
        metrics.recall_at_k([], [])
