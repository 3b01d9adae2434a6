"""The beams' own keys and values: one slot per packed beam row, and one dummy slot that padding rows write to."""

import torch

from xgr_runtime.kvcache.layout import KVSpec, allocate_storage

# The scratch of a reorder: each tile of rows costs some launches (64 rows a tile were 128 tiles a round of 8,192 rows), so as
# many as these bytes hold, yet no second buffer: no more than a share of the slots, where that is not less than a few.
_TILE_BYTES = 1 << 26
_TILE_SHARE = 8
_LEAST_TILE_ROWS = 64


class UnsharedKV:
    """Slots of num_rounds - 1 tokens for all layers, and the scratch that a reorder copies through.

    all_rows: [2 * layers, num_slots + 1, num_rounds - 1, G, D]; the last slot is the dummy. tile: the same with
    tile_rows slots (None: as many as 64 MiB hold, at most an eighth of the slots or 64). Allocated once; addresses never change.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_slots: int,
        num_rounds: int,
        device: torch.device,
        tile_rows: int | None = None,
    ) -> None:
        self.num_slots = num_slots
        self.num_rounds = num_rounds
        self.dummy_slot = num_slots
        group, num_tokens = spec.unshared, num_rounds - 1
        self.all_rows = allocate_storage(group, num_slots + 1, num_tokens, device)
        if tile_rows is None:
            most = max(_LEAST_TILE_ROWS, num_slots // _TILE_SHARE)
            tile_rows = min(most, max(1, _TILE_BYTES // max(1, spec.slot_bytes(num_rounds))))
        self.tile = allocate_storage(group, min(tile_rows, num_slots + 1), num_tokens, device)

    def k_rows(self, layer: int) -> torch.Tensor:
        """[num_slots + 1, num_rounds - 1, G, D], contiguous."""
        return self.all_rows[2 * layer]

    def v_rows(self, layer: int) -> torch.Tensor:
        """[num_slots + 1, num_rounds - 1, G, D], contiguous."""
        return self.all_rows[2 * layer + 1]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated, scratch included."""
        return self.all_rows.nbytes + self.tile.nbytes
