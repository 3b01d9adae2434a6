"""The only place where shapes, strides and bytes of keys and values are computed.

A model declares a `KVSpec`: one group of paged layers for histories (shared by all beams) and one group of row layers
for the beams' own tokens. A quantised cache, a tensor-parallel rank or another layer count for one of them changes the
spec, not the code around it. K and V of all layers of a group are one allocation, stacked as 2 * layer (K) and
2 * layer + 1 (V), so that a reorder moves all layers at once.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from xgr_runtime.hal.memory import allocate
from xgr_runtime.kvcache.allocator import num_pages_of

# placement: the options that its size follows
_OPTIONS = {
    "paged": "cache.num_pages, or where that is 0 cache.prefix_cache_bytes or scheduler.max_batch_tokens",
    "rows": "scheduler.max_batch_rows",
}


@dataclass(frozen=True)
class KVGroup:
    """Layers whose keys and values have one shape. num_kv_heads counts the heads held by this rank."""

    name: str
    placement: Literal["paged", "rows"]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def storage_shape(self, num_blocks: int, tokens_per_block: int) -> tuple[int, ...]:
        """[2 * layers, blocks, tokens, G, D]: a block is a page of a paged group, a slot of a row group."""
        return (
            2 * self.num_layers,
            num_blocks,
            tokens_per_block,
            self.num_kv_heads,
            self.head_dim,
        )


@dataclass(frozen=True)
class KVSpec:
    """What a model keeps per history token (`shared`, paged) and per beam token (`unshared`, rows)."""

    shared: KVGroup
    unshared: KVGroup

    def __post_init__(self) -> None:
        assert self.shared.placement == "paged"
        assert self.unshared.placement == "rows"

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page over all layers."""
        return self.shared.bytes_per_token * page_size

    def history_bytes(self, num_tokens: int, page_size: int) -> int:
        """Bytes of one history's pages; no beam width enters."""
        return num_pages_of(num_tokens, page_size) * self.page_bytes(page_size)

    def slot_bytes(self, num_rounds: int) -> int:
        """Bytes of one beam slot: the last round's tokens are never fed back, hence num_rounds - 1 tokens."""
        return self.unshared.bytes_per_token * (num_rounds - 1)


def allocate_storage(
    group: KVGroup, num_blocks: int, tokens_per_block: int, device: torch.device
) -> torch.Tensor:
    """Zeroed memory of a group on the device. Raises DeviceError when there is no room for it."""
    return allocate(
        group.storage_shape(num_blocks, tokens_per_block),
        group.dtype,
        device,
        what=f"keys and values ({group.name}: {num_blocks} blocks of {tokens_per_block} tokens)",
        lower=_OPTIONS[group.placement],
    )
