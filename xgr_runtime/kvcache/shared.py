"""History keys and values in pages: written once by the prefill, read by every beam of every search."""

import torch

from xgr_runtime.kvcache.layout import KVSpec, allocate_storage


class SharedKV:
    """The pages of all layers, page 0 (the null page, target of padding) included.

    all_pages: [2 * layers, num_pages, page_size, G, D]. Allocated once; addresses never change.
    """

    def __init__(self, spec: KVSpec, num_pages: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.all_pages = allocate_storage(spec.shared, num_pages, page_size, device)

    def k_pages(self, layer: int) -> torch.Tensor:
        """[num_pages, page_size, G, D], contiguous."""
        return self.all_pages[2 * layer]

    def v_pages(self, layer: int) -> torch.Tensor:
        """[num_pages, page_size, G, D], contiguous."""
        return self.all_pages[2 * layer + 1]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return self.all_pages.nbytes
