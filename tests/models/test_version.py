"""The digest of a checkpoint: over what is loaded, and nothing else."""

import hashlib
import json
from pathlib import Path

import pytest

from xgr_runtime.errors import CheckpointError
from xgr_runtime.models.version import checkpoint_digest


def write_sharded(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "a.safetensors").write_bytes(b"A")
    (folder / "b.safetensors").write_bytes(b"B")
    index = {"weight_map": {"y": "b.safetensors", "x": "a.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_names_and_contents_count(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    expected = hashlib.sha256(b"config.json{}a.safetensorsAb.safetensorsB").hexdigest()[:12]
    assert checkpoint_digest(tmp_path) == expected
    (tmp_path / "b.safetensors").write_bytes(b"C")
    assert checkpoint_digest(tmp_path) != expected


def test_files_that_are_not_loaded_do_not_count(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    expected = checkpoint_digest(tmp_path)
    (tmp_path / "other.safetensors").write_bytes(b"D")
    (tmp_path / "folder.safetensors").mkdir()
    assert checkpoint_digest(tmp_path) == expected


def test_a_shard_that_is_gone(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read .*a.safetensors: No such file"):
        checkpoint_digest(tmp_path)
