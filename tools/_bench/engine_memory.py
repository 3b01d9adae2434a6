"""What takes the device memory of an engine: its large buffers from the configuration alone, and beside them what is left.

The buffers are asked of the runtime's own classes on torch's meta device, which allocates nothing. What is left of the memory that
torch has reserved are activations: those of captured graphs, which share one pool, and those that kernels had when they ran once
before their capture. Graphs themselves, loaded kernels and the driver's context are outside of what torch reserves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from xgr_runtime.kvcache.layout import KVGroup, KVSpec
from xgr_runtime.kvcache.shared import SharedKV
from xgr_runtime.kvcache.unshared import UnsharedKV
from xgr_runtime.xschedule.capacities import capacities_of, default_num_pages

if TYPE_CHECKING:
    from tools._bench.floor import ModelShape
    from xgr_runtime import Engine
    from xgr_runtime.config import RuntimeConfig

MIB = 2**20


def weight_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    """Bytes of all weights on the device: layers with their norms, the embedding and the last norm."""
    norms = shape.num_layers * (2 * shape.hidden_size + 2 * shape.head_dim) + shape.hidden_size
    return dtype.itemsize * (shape.layer_parameters + norms + shape.vocab_size * shape.hidden_size)


def planned_bytes(shape: ModelShape, config: RuntimeConfig, dtype: torch.dtype) -> dict[str, int]:
    """Weights, pages of histories, the beams' own tokens with the scratch of their reorder, a catalogue's rows of the head."""
    sizes = (shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype)
    spec = KVSpec(KVGroup("history", "paged", *sizes), KVGroup("beams", "rows", *sizes))
    page_size, nowhere = config.cache.page_size_tokens, torch.device("meta")
    pages = config.cache.num_pages or default_num_pages(config, spec.page_bytes(page_size))
    capacities = capacities_of(config)
    rows, rounds = capacities.num_rows, capacities.num_levels
    return {
        "weights": weight_bytes(shape, dtype),
        "pages": SharedKV(spec, pages, page_size, nowhere).num_bytes,
        "beams": UnsharedKV(spec, rows, rounds, nowhere).num_bytes,
        "head_rows": rounds * shape.num_codes * shape.hidden_size * dtype.itemsize,
    }


def takes_mib(
    shape: ModelShape, engine: Engine, dtype: torch.dtype, reserved_mib: float
) -> dict[str, float]:
    """The same with the catalogue's slots and the rest of `reserved_mib`, in MiB. graphs_mib is not part of that."""
    planned = planned_bytes(shape, engine.config, dtype)
    slots = sum(loaded.slot.nbytes for loaded in engine.catalogs.by_slot.values())
    found = {name: num_bytes / MIB for name, num_bytes in (*planned.items(), ("catalogue", slots))}
    found["activations_and_the_rest"] = reserved_mib - sum(found.values())
    return {name: round(mib, 1) for name, mib in found.items()}
