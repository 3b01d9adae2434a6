"""The bytes that the spec states are the bytes that are allocated."""

import pytest
import torch

from xgr_runtime.errors import DeviceError
from xgr_runtime.kvcache.allocator import num_pages_of
from xgr_runtime.kvcache.layout import KVGroup, KVSpec
from xgr_runtime.kvcache.shared import SharedKV
from xgr_runtime.kvcache.unshared import UnsharedKV

CPU = torch.device("cpu")


def spec_of(dtype: torch.dtype = torch.bfloat16) -> KVSpec:
    return KVSpec(
        KVGroup("history", "paged", 3, 2, 8, dtype), KVGroup("beams", "rows", 3, 2, 8, dtype)
    )


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_bytes(dtype: torch.dtype, size: int) -> None:
    spec = spec_of(dtype)
    token_bytes = 2 * 3 * 2 * 8 * size
    assert spec.shared.bytes_per_token == token_bytes
    assert spec.page_bytes(16) == 16 * token_bytes
    assert spec.history_bytes(33, 16) == 48 * token_bytes
    assert spec.slot_bytes(num_rounds=4) == 3 * token_bytes
    shared, unshared = SharedKV(spec, 10, 16, CPU), UnsharedKV(spec, 20, 4, CPU, tile_rows=5)
    assert shared.num_bytes == 10 * spec.page_bytes(16)
    assert unshared.num_bytes == (20 + 1 + 5) * spec.slot_bytes(4)


def test_history_bytes_do_not_depend_on_the_beam_width() -> None:
    """Measured on the storages: a wider search only adds slots of its own few tokens."""
    spec, num_tokens, page_size, num_rounds = spec_of(), 3000, 16, 3
    num_pages = num_pages_of(num_tokens, page_size)
    history, own = {}, {}
    for width in (1, 512):
        shared = SharedKV(spec, num_pages, page_size, CPU)
        unshared = UnsharedKV(spec, width, num_rounds, CPU)
        history[width] = shared.all_pages.untyped_storage().nbytes()
        own[width] = unshared.all_rows.untyped_storage().nbytes()
    assert history[1] == history[512] == spec.history_bytes(num_tokens, page_size)
    assert own[512] - own[1] == 511 * spec.slot_bytes(num_rounds)
    assert own[512] < history[512]


def test_layers_are_views_of_one_allocation() -> None:
    spec = spec_of()
    shared, unshared = SharedKV(spec, 4, 16, CPU), UnsharedKV(spec, 6, 3, CPU)
    assert shared.k_pages(2).shape == shared.v_pages(2).shape == (4, 16, 2, 8)
    assert unshared.k_rows(2).shape == unshared.v_rows(2).shape == (7, 2, 2, 8)
    for layer in range(3):
        shared.k_pages(layer).fill_(2 * layer)
        shared.v_pages(layer).fill_(2 * layer + 1)
        unshared.k_rows(layer).fill_(2 * layer)
        unshared.v_rows(layer).fill_(2 * layer + 1)
        assert shared.k_pages(layer).is_contiguous()
        assert unshared.k_rows(layer).is_contiguous()
    assert shared.all_pages[:, 0, 0, 0, 0].tolist() == list(range(6))
    assert unshared.all_rows[:, 6, 1, 1, 7].tolist() == list(range(6))
    assert unshared.dummy_slot == 6


def test_one_level_needs_no_beam_tokens() -> None:
    unshared = UnsharedKV(spec_of(), 8, 1, CPU)
    assert unshared.num_bytes == 0


def test_no_room_names_the_bytes_and_the_options() -> None:
    spec, num_pages = spec_of(torch.float32), 1 << 42
    num_bytes = num_pages * 16 * (2 * 3 * 2 * 8 * 4)
    with pytest.raises(
        DeviceError, match=rf"cpu has no room for {num_bytes} bytes .*; lower cache.num_pages"
    ):
        SharedKV(spec, num_pages, 16, CPU)
    with pytest.raises(DeviceError, match=r"has no room .*; lower scheduler.max_batch_rows"):
        UnsharedKV(spec, num_pages, 3, CPU)
    with pytest.raises(DeviceError, match="has no room"):  # more bytes than 63 bits count
        SharedKV(spec, 1 << 60, 16, CPU)
