"""What is noted of executed providers, and what is not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests.helpers.ladder import FILE_VARIABLE, RUNG_VARIABLE, note_executed

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_providers_of_an_npu_are_noted_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "providers"
    monkeypatch.delenv(FILE_VARIABLE, raising=False)
    note_executed("npu", "rms_norm", "torch_npu", "float16")
    monkeypatch.setenv(FILE_VARIABLE, str(target))
    monkeypatch.setenv(RUNG_VARIABLE, "L2")
    note_executed("cpu", "rms_norm", "numpy", "float32")
    note_executed("npu", "rms_norm", "reference", "float32")
    note_executed("npu", "beam_attention", "parts", "float32")
    assert not target.exists()
    note_executed("npu", "rms_norm", "torch_npu", "float16")
    note_executed("npu", "silu_mul", "aten", "float32")
    lines = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert lines == [
        {"op": "rms_norm", "provider": "torch_npu", "dtype": "float16", "rung": "L2"},
        {"op": "silu_mul", "provider": "aten", "dtype": "float32", "rung": "L2"},
    ]
