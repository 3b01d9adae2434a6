"""copy_page_starts against numpy's own copies, with sources that several share and histories that copy nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from xgr_runtime.hal.ops.cache import copy_page_starts
from xgr_runtime.hal.providers import load_providers

if TYPE_CHECKING:
    from collections.abc import Callable

load_providers("cpu")
FUNCTIONS = {"reference": copy_page_starts.reference} | {
    found.provider: found.fn for found in copy_page_starts.impls if found.device_kind == "cpu"
}


@pytest.mark.parametrize("fn", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("page_size", [1, 2, 7, 16])
def test_only_the_first_tokens_of_the_targets_change(
    fn: Callable[..., None], page_size: int
) -> None:
    assert len(FUNCTIONS) == 2
    for seed in range(30):
        rng = np.random.default_rng([seed, page_size])
        number = int(rng.integers(1, 6))
        pages = rng.permutation(2 * number) + 1
        counts = rng.integers(0, page_size + 1, number)
        source = np.where(counts > 0, rng.choice(pages[:number], number), 0)
        target = np.where(counts > 0, pages[number:], 0)
        kv = rng.standard_normal((4, 2 * number + 1, page_size, 2, 3)).astype(np.float32)
        kv[rng.random(kv.shape) < 0.1] = np.nan  # memory that nobody wrote
        expected = kv.copy()
        for h in range(number):
            expected[:, target[h], : counts[h]] = kv[:, source[h], : counts[h]]
        got = torch.from_numpy(kv)
        fn(got, *(torch.from_numpy(a.astype(np.int32)) for a in (source, target, counts)))
        np.testing.assert_array_equal(got.numpy(), expected)
