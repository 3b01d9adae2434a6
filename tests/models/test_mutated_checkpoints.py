"""Damaged and forged checkpoints: refused by name, or they load and whatever they answer is valid items.

Weights have no checksum, so a flipped bit in one is another model. Everything round them has to fit: headers, index, config.json.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.helpers.catalogs import contiguous_tokens, random_catalog
from tests.helpers.engines import make_config, write_catalog
from tests.helpers.tiny_models import TinyShape, write_tiny_model
from tests.helpers.trial import put_on_trial, show
from xgr_runtime.errors import CheckpointError, ConfigError, DeviceError
from xgr_runtime.models.version import checkpoint_digest
from xgr_runtime.types import RecRequest, Search
from xgr_runtime.xschedule.engine import Engine

if TYPE_CHECKING:
    import collections
    from collections.abc import Callable
    from pathlib import Path

    from tests.helpers.oracle import Catalog

TOKENS = contiguous_tokens((8, 8), first=4)
SHAPE = TinyShape(vocab_size=32, hidden_size=16, intermediate_size=24, num_heads=2, num_kv_heads=1)
SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 17, 2**31, 2**63, 10**30, 0.5, -1.5, 1e308, 1e-300, "", "x", "full_attention",
    [], [1], ["x"], {}, {"a": 1}, {"rope_type": "yarn"}, {"rope_theta": 0}, "\x1b[31m", "y" * 3000, ["\x1b[2J" * 99] * 9,
)  # fmt: skip
ODD_HEADERS: tuple[Any, ...] = (
    "F64", "F8_E4M3", "I64", "BOOL", "x", [], [1], [16, 16], [2**62, 4], [-1], [0], [0, 0], [1, 2**40], [10, 0], None, {}, 7, [1.5, 2],
    [2**64, 2**65],
)  # fmt: skip


class Forger:
    """Draws changed copies of two good folders, one with a single file of weights and one with two and an index."""

    def __init__(self, folders: tuple[Path, Path], seed: int) -> None:
        self._folders = folders
        self._random = random.Random(seed)
        self.kinds: tuple[Callable[[Path], None], ...] = (
            self._flip_data, self._flip_data, self._flip_header, self._cut, self._grow, self._noise, self._odd_header,
            self._odd_header, self._renamed, self._header_size, self._odd_config, self._odd_config, self._odd_config,
            self._text, self._odd_index, self._special, self._swapped,
        )  # fmt: skip

    def draw(self, target: Path) -> str:
        """Make the next folder; returns what was done to it."""
        if target.exists():
            shutil.rmtree(target)
        kind = self._random.choice(self.kinds)
        sharded = kind == self._odd_index or self._random.random() < 0.3
        shutil.copytree(self._folders[sharded], target)
        kind(target)
        return kind.__name__

    def _weights(self, folder: Path) -> Path:
        return self._random.choice(sorted(folder.glob("*.safetensors")))

    def _flip_data(self, folder: Path) -> None:
        path = self._weights(folder)
        data = bytearray(path.read_bytes())
        end = 8 + struct.unpack("<Q", data[:8])[0]
        for _ in range(self._random.choice((1, 1, 3, 20))):
            data[self._random.randrange(end, len(data))] ^= 1 << self._random.randrange(8)
        path.write_bytes(data)

    def _flip_header(self, folder: Path) -> None:
        path = self._weights(folder)
        data = bytearray(path.read_bytes())
        end = 8 + struct.unpack("<Q", data[:8])[0]
        for _ in range(self._random.choice((1, 1, 3))):
            data[self._random.randrange(end)] ^= 1 << self._random.randrange(8)
        path.write_bytes(data)

    def _cut(self, folder: Path) -> None:
        path = self._random.choice((self._weights(folder), folder / CONFIG))
        os.truncate(path, self._random.randrange(path.stat().st_size))

    def _grow(self, folder: Path) -> None:
        path = self._random.choice((self._weights(folder), folder / CONFIG))
        path.write_bytes(path.read_bytes() + self._random.choice((b"\0", b"}", path.read_bytes())))

    def _noise(self, folder: Path) -> None:
        path = self._random.choice((self._weights(folder), folder / CONFIG))
        path.write_bytes(self._random.randbytes(self._random.choice((0, 1, 8, 9, 500))))

    def _swapped(self, folder: Path) -> None:
        """Two tensors of one file exchange their places in the header."""

        def change(header: dict[str, Any]) -> None:
            names = sorted(name for name in header if name != "__metadata__")
            one, other = self._random.choice(names), self._random.choice(names)
            header[one], header[other] = header[other], header[one]

        self._change_header(folder, change)

    def _odd_header(self, folder: Path) -> None:
        def change(header: dict[str, Any]) -> None:
            entry = header[self._random.choice(sorted(header))]
            entry[self._random.choice(sorted(entry))] = self._random.choice(ODD_HEADERS)

        self._change_header(folder, change)

    def _renamed(self, folder: Path) -> None:
        def change(header: dict[str, Any]) -> None:
            names = sorted(name for name in header if name != "__metadata__")
            name = self._random.choice(names)
            entry = header.pop(name)
            other = self._random.choice(
                ("x", "\x1b[31m" * 500, names[0], "model.layers.9.x", "", f"{name}_bias")
            )
            header[other] = entry

        self._change_header(folder, change)

    def _change_header(self, folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
        path = self._weights(folder)
        data = path.read_bytes()
        end = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:end])
        change(header)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[end:])

    def _header_size(self, folder: Path) -> None:
        path = self._weights(folder)
        data = path.read_bytes()
        size = self._random.choice((0, 1, 2, len(data), len(data) - 8, 2**32, 2**62, 2**64 - 1))
        path.write_bytes(struct.pack("<Q", size) + data[8:])

    def _odd_config(self, folder: Path) -> None:
        path = folder / CONFIG
        config = json.loads(path.read_text())
        keys = (
            *sorted(config),
            "rope_theta",
            "rope_scaling",
            "quantization_config",
            "attention_bias",
            "mlp_bias",
            "layer_types",
        )
        for _ in range(self._random.choice((1, 1, 2))):
            key = self._random.choice(keys)
            if self._random.random() < 0.2:
                config.pop(key, None)
            else:
                config[key] = self._random.choice(ODD)
        path.write_text(json.dumps(config))

    def _text(self, folder: Path) -> None:
        path = folder / self._random.choice((CONFIG, INDEX))
        text = path.read_text() if path.exists() else "{}"
        at = self._random.randrange(len(text))
        choices = (
            text[:at] + text[at + 1 :], text[:at] + '"' + text[at:], "[" * 5000, "", "null", "\ufeff" + text, text.replace("1", "1" * 5000),
            text.replace("{", '{"a": NaN, ', 1), text[:at] + "\0" + text[at:],
        )  # fmt: skip
        path.write_text(self._random.choice(choices))

    def _odd_index(self, folder: Path) -> None:
        path = folder / INDEX
        index = json.loads(path.read_text())
        names = sorted(index["weight_map"])
        choice = self._random.randrange(4)
        if choice == 0:
            del index["weight_map"][self._random.choice(names)]
        elif choice == 1:
            odd = ("x.safetensors", "../x.safetensors", "", "/etc/passwd", "\0.safetensors", SINGLE)
            index["weight_map"][self._random.choice(names)] = self._random.choice((*odd, *ODD))
        elif choice == 2:
            index["weight_map"] = self._random.choice(ODD)
        else:
            files = sorted(set(index["weight_map"].values()))
            index["weight_map"][self._random.choice(names)] = self._random.choice(files)
        path.write_text(json.dumps(index))

    def _special(self, folder: Path) -> None:
        """Something else in the place of a file: a folder, a pipe nobody writes to, a device without an end, nothing."""
        path = self._random.choice((self._weights(folder), folder / CONFIG, folder / INDEX))
        path.unlink(missing_ok=True)
        choice = self._random.randrange(4)
        if choice == 0:
            path.mkdir()
        elif choice == 1:
            os.mkfifo(path)
        elif choice == 2:
            path.symlink_to("/dev/zero")


def answer_of(folder: Path, catalog_path: Path, catalog: Catalog) -> str:
    """What a loaded checkpoint answers: items of the catalogue, finite scores in order, or a failed search."""
    config = make_config(folder, {"items": catalog_path})
    with Engine.from_config(config) as engine:
        requests = [
            RecRequest(
                f"r{i}",
                prompt_token_ids=np.array([1, 2 + i, 5]),
                searches=(Search(beam_width=8, num_results=30),),
            )
            for i in range(2)
        ]
        results = [result.results[0] for result in engine.recommend(requests)]
    items = {item.item_id: item.sid for item in catalog.items if item.servable}
    for result in results:
        assert result.status in ("ok", "failed")
        assert result.num_items == 0 or result.status == "ok"
        assert np.isfinite(result.scores).all()
        assert (np.diff(result.scores) <= 0).all()
        assert len(set(result.item_ids.tolist())) == result.num_items
        for item_id, sid in zip(result.item_ids.tolist(), result.sids.tolist(), strict=True):
            assert items[item_id] == tuple(sid)
    return "failed" if any(result.status == "failed" for result in results) else "answered"


def check_refusal(error: Exception, folder: Path) -> None:
    message = str(error)
    assert message.isprintable(), message
    assert len(message) < 1500, message
    if isinstance(error, CheckpointError):
        assert str(folder) in message
    if isinstance(error, ConfigError):
        assert "max_position_embeddings" in message or "vocabulary" in message, message


def outcome(folder: Path, catalog_path: Path, catalog: Catalog) -> str:
    """What became of a folder; raises for anything but a named refusal or valid items."""
    try:
        found = answer_of(folder, catalog_path, catalog)
    except (CheckpointError, DeviceError, ConfigError) as error:
        check_refusal(error, folder)
        return f"refused: {type(error).__name__}"
    checkpoint_digest(folder)
    return found


def verdicts(tmp_path: Path, count: int, seed: int) -> collections.Counter[str]:
    catalog = random_catalog(3, 40, TOKENS, skew=0.5)
    path = write_catalog(tmp_path / "items", catalog)
    single = write_tiny_model(tmp_path / "single", "qwen3", SHAPE, seed=1)
    sharded = write_tiny_model(tmp_path / "sharded", "qwen3", SHAPE, seed=1, max_shard_size="8KB")
    assert (sharded / INDEX).exists()
    assert answer_of(single, path, catalog) == answer_of(sharded, path, catalog) == "answered"
    forger, changed = Forger((single, sharded), seed), tmp_path / "changed"
    drawn = ((forger.draw(changed), changed) for _ in range(count))
    return put_on_trial(drawn, lambda folder: outcome(folder, path, catalog))


def test_changed_checkpoints_are_refused_or_answer_with_valid_items(tmp_path: Path) -> None:
    counts = verdicts(tmp_path, 100, 1)
    assert counts["refused: CheckpointError"] >= 50
    assert counts["answered"] >= 5


@pytest.mark.slow
def test_thousands_of_changed_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = verdicts(tmp_path, 2000, 2)
    show(capsys, "2000 changed checkpoints", counts)
    assert counts["refused: CheckpointError"] >= 1000
