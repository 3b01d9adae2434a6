"""What others offer for the same calls: torch's attention kernels, and FlashInfer's where it is installed.

Each peer gets the histories as it wants them, contiguous and in place before anything is timed; of pages, page tables and
packed rows it knows nothing unless its name says so. Its result is compared with the reference's like a provider's.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tools._bench.op_work import Peer

    Args = Mapping[str, Any]
    Call = Callable[[], Mapping[str, torch.Tensor]]

FLASHINFER_PAGE = 16
WORKSPACE_BYTES = 512 << 20


def contiguous(args: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [H, length, G, D] of histories of equal length, out of their pages."""
    length, table = args["kv_lens"][0], args["page_table_HP"].long()
    pages = args["k_pages"][table], args["v_pages"][table]
    k, v = (part.flatten(1, 2)[:, :length].contiguous() for part in pages)
    return k, v


def _folded(args: Args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [H, G, beams x group, D] and keys, values [H, G, length, D]: beams and the heads of a KV head as rows."""
    k, v = (part.transpose(1, 2).contiguous() for part in contiguous(args))
    q_NQD, (histories, kv_heads) = args["q_NQD"], k.shape[:2]
    q = q_NQD.view(histories, -1, kv_heads, q_NQD.shape[1] // kv_heads, q_NQD.shape[2])
    return q.permute(0, 2, 1, 3, 4).flatten(2, 3).contiguous(), k, v


def _unfold(out: torch.Tensor, args: Args) -> torch.Tensor:
    q_NQD = args["q_NQD"]
    group = q_NQD.shape[1] // out.shape[1]
    rows = out.view(*out.shape[:2], -1, group, out.shape[3]).permute(0, 2, 1, 3, 4)
    return rows.reshape(*q_NQD.shape)


def _shared_by(backend: SDPBackend) -> Peer:
    def prepare(args: Args) -> Call:
        q, k, v = _folded(args)

        def call() -> Mapping[str, torch.Tensor]:
            with sdpa_kernel(backend):
                out = functional.scaled_dot_product_attention(q, k, v, scale=args["scale"])
            return {"result[0]": _unfold(out, args)}

        return call

    return prepare


def _a_beam_at_a_time(args: Args) -> Call:
    """Every beam is a sequence of its own over the same memory: what decoding without a shared stage does."""
    k, v = (part.transpose(1, 2) for part in contiguous(args))
    q_NQD, histories = args["q_NQD"], k.shape[0]
    width, length = len(q_NQD) // histories, k.shape[2]
    shape = (histories, width, k.shape[1], length, k.shape[3])
    k, v = (part[:, None].expand(shape) for part in (k, v))

    def call() -> Mapping[str, torch.Tensor]:
        parts = []
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            for h in range(histories):
                q = q_NQD[h * width : (h + 1) * width, :, None]
                parts.append(
                    functional.scaled_dot_product_attention(
                        q, k[h], v[h], scale=args["scale"], enable_gqa=True
                    )
                )
        return {"result[0]": torch.cat(parts)[:, :, 0]}

    return call


def _prefill_by(backend: SDPBackend) -> Peer:
    def prepare(args: Args) -> Call:
        k, v = (part.transpose(1, 2).contiguous() for part in contiguous(args))
        q_TQD = args["q_TQD"]
        q = q_TQD.view(k.shape[0], -1, *q_TQD.shape[1:]).transpose(1, 2).contiguous()

        def call() -> Mapping[str, torch.Tensor]:
            with sdpa_kernel(backend):
                out = functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=args["scale"], enable_gqa=True
                )
            return {"result": out.transpose(1, 2).reshape(q_TQD.shape)}

        return call

    return prepare


def _cascade(args: Args) -> Call:
    """FlashInfer: the history as one level, each beam's own tokens as another. Pages of 16, one own page a beam."""
    flashinfer = import_module("flashinfer")
    kv, own_pages, q_NQD = _flashinfer_pages(args)
    width, place = args["max_rows"], q_NQD.device
    rows, heads, size = q_NQD.shape
    length = args["kv_lens"][0]
    pages = -(-length // FLASHINFER_PAGE)
    histories = len(args["kv_lens"])
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=place)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")

    def ints(*bounds: int) -> torch.Tensor:
        return torch.arange(*bounds, dtype=torch.int32, device=place)

    last = length - (pages - 1) * FLASHINFER_PAGE
    wrapper.plan(
        [ints(0, rows + 1, width), ints(0, rows + 1)],
        [ints(0, histories * pages + 1, pages), ints(0, rows + 1)],
        [ints(0, histories * pages), own_pages],
        [torch.full_like(ints(0, histories), last), torch.full_like(own_pages, args["num_tokens"])],
        heads,
        kv.shape[3],
        size,
        FLASHINFER_PAGE,
        causal=False,
        q_data_type=q_NQD.dtype,
        kv_data_type=kv.dtype,
    )
    return lambda: {"result": wrapper.run(q_NQD, kv)}


def _flashinfer_pages(args: Args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[pages, 2, page, G, D]: the histories' pages, then one page a beam with its own tokens; the numbers of the latter."""
    rows, tokens, slots = len(args["q_NQD"]), args["num_tokens"], args["slot_N"].long()
    parts = []
    for history, own in zip(contiguous(args), (args["k_rows"], args["v_rows"]), strict=True):
        missing = -history.shape[1] % FLASHINFER_PAGE
        padded = functional.pad(history, (0, 0, 0, 0, 0, missing))
        page_shape = (-1, FLASHINFER_PAGE, *history.shape[2:])
        mine = own.new_zeros(rows, FLASHINFER_PAGE, *own.shape[2:])
        mine[:, :tokens] = own[slots, :tokens]
        parts.append(torch.cat([padded.reshape(page_shape), mine]))
    kv = torch.stack(parts, dim=1).contiguous()
    own_pages = torch.arange(len(kv) - rows, len(kv), dtype=torch.int32, device=kv.device)
    return kv, own_pages, args["q_NQD"]


SHARED_PEERS: dict[str, Peer] = {
    "torch cuDNN, folded": _shared_by(SDPBackend.CUDNN_ATTENTION),
    "torch flash, folded": _shared_by(SDPBackend.FLASH_ATTENTION),
    "torch flash, a beam at a time": _a_beam_at_a_time,
}
PREFILL_PEERS: dict[str, Peer] = {
    "torch cuDNN, dense": _prefill_by(SDPBackend.CUDNN_ATTENTION),
    "torch flash, dense": _prefill_by(SDPBackend.FLASH_ATTENTION),
}
BEAM_PEERS: dict[str, Peer] = {"FlashInfer cascade": _cascade}
