"""Small tiles and hand-made rounds for the tests of the Ascend beam providers."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xgr_ops.ascend.beam

from tests.ops.beam_cases import Case

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def tiles_of(candidates: int) -> Iterator[None]:
    """Small tiles, so that small cases cross their borders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xgr_ops.ascend.beam, "TILE_CANDIDATES", candidates)
        yield


def single(logits: list[list[float]], **changes: Any) -> Case:
    """One search whose rows stand on one hub (every code a child, everything alive), lse 0, parents 0."""
    rows, num_codes = len(logits), len(logits[0])
    case = Case(
        num_codes=num_codes,
        children=[list(range(num_codes))],
        alive=[[True] * num_codes],
        rule_row=[0],
        widths=[rows],
        child_widths=[4],
        parents=[0.0] * rows,
        nodes=[0] * rows,
        logits=np.array(logits, np.float32),
        lse=np.zeros(rows, np.float32),
    )
    return dataclasses.replace(case, **changes)
