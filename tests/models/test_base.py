"""Positions a model was made for."""

from pathlib import Path

import pytest
import torch

from tests.models.tiny import CPU, make_checkpoint
from xgr_runtime.errors import ConfigError
from xgr_runtime.models.base import check_positions
from xgr_runtime.models.registry import load_model


def test_the_longest_prompt_and_its_codes_must_fit(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    model = load_model(tmp_path, CPU, torch.float32)
    assert model.max_positions == 40960
    check_positions(model, 40960, 1)
    check_positions(model, 40958, 3)  # positions 40958 and 40959 take the codes of levels 0 and 1
    with pytest.raises(
        ConfigError,
        match=r"limits.max_prompt_tokens must be at most 40958, got 40959: the model has 40960 positions",
    ):
        check_positions(model, 40959, 3)
