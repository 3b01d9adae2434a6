"""torch_npu's fused inference attention: its documented limits as refusals, and the two calls made of it.

Source of every limit: torch_npu 2.13 docs of npu_fused_infer_attention_score, for Atlas A2 (Ascend910B) and A3
(Ascend910_93). Layout BSND throughout; pages come as [pages, page size, KV heads * head dim], which for that layout is the
only form. Not run on hardware.

B batch entries, S query rows of one, K keys of one, Q query heads, G KV heads, D head dim.
"""

from collections.abc import Sequence

import torch

from xgr_runtime.errors import DeviceError
from xgr_runtime.hal.ascend import lengths_from_host
from xgr_runtime.hal.registry import OpSpec

DTYPES = (torch.float16, torch.bfloat16)
MASK_SIZE = 2048  # the op slides this one triangle over longer sequences
MAX_BATCH = 65536
_SOCS = ("Ascend910B", "Ascend910_93")
_MAX_PAGES_NUMEL = 2**31 - 1
_INSTEAD = "model.dtype: float32 is served without this limit, slower"


def soc_refusal(spec: OpSpec) -> str | None:
    """Whether the op is documented for this chip."""
    if not spec.capability or spec.capability.startswith(_SOCS):
        return None
    return f"is documented for {' and '.join(_SOCS)} chips, this one is {spec.capability}"


def fused_infer_refusal(spec: OpSpec, *, is_paged: bool) -> str | None:
    """The first documented limit that the sizes known so far break, and what to do about it."""
    if spec.dtype not in DTYPES:
        known = " and ".join(str(dtype) for dtype in DTYPES)
        return f"takes {known}, got {spec.dtype}; set model.dtype: bfloat16"
    return soc_refusal(spec) or _heads_refusal(spec) or (_pages_refusal(spec) if is_paged else None)


def _heads_refusal(spec: OpSpec) -> str | None:
    dim, heads, kv_heads = (spec.dims.get(name) for name in "DQG")
    if dim is not None and (dim % 16 or not 16 <= dim <= 512):
        return f"head dim {dim}: the fused op needs a multiple of 16 up to 512; {_INSTEAD}"
    if heads is not None and heads > 256:
        return f"{heads} query heads: the fused op takes up to 256; {_INSTEAD}"
    if heads is not None and kv_heads is not None and heads > 64 * kv_heads:
        return f"{heads} query heads on {kv_heads} KV heads: the fused op takes up to 64 on one; {_INSTEAD}"
    if dim is not None and heads is not None and dim * heads >= 65535:
        return f"{heads} query heads of {dim}: the fused op takes fewer than 65535 elements of a row; {_INSTEAD}"
    return None


def _pages_refusal(spec: OpSpec) -> str | None:
    page_size, dim, kv_heads = (spec.dims.get(name) for name in ("page_size", "D", "G"))
    if page_size is not None and (page_size % 128 or not 128 <= page_size <= 512):
        return (
            f"page_size {page_size}: the fused op needs a multiple of 128 up to 512; "
            "set cache.page_size_tokens: 128"
        )
    if dim is not None and kv_heads is not None and dim * kv_heads > 65535:
        return f"{kv_heads} KV heads of {dim}: the fused op takes up to 65535 elements of a token; {_INSTEAD}"
    num_pages = spec.dims.get("num_pages")
    if num_pages is None or page_size is None or dim is None or kv_heads is None:
        return None
    return _too_large(num_pages, page_size, page_size * dim * kv_heads)


def _too_large(num_pages: int, page_size: int, page_numel: int) -> str | None:
    """A limit of calls with one query row an entry, which any batch may need."""
    if num_pages * page_numel <= _MAX_PAGES_NUMEL:
        return None
    return (
        f"{num_pages} pages of {page_size} tokens are {num_pages * page_numel} elements a layer: the fused op takes up to "
        f"{_MAX_PAGES_NUMEL}; lower cache.num_pages or cache.prefix_cache_bytes to have {_MAX_PAGES_NUMEL // page_numel} pages"
    )


def num_pages_of(kv_lens: Sequence[int], page_size: int) -> list[int]:
    """Pages of each history that the op is asked for."""
    return [-(-length // page_size) for length in lengths_from_host(kv_lens)]


def attend_pages(
    q_BSQD: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table_BP: torch.Tensor,
    kv_lens: Sequence[int],
    scale: float,
    *,
    mask: torch.Tensor | None = None,
    has_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, S, Q, D], lse fp32 [B, Q, S, 1] with has_lse, else unspecified) over pages, one length an entry.

    mask: `causal_mask`: row i of S sees keys up to K - S + i. Where a kv_len is 0 the entry's result is unspecified.
    Raises DeviceError where the pages are too few or too large for the op.
    """
    num_pages, page_size, num_kv_heads, _ = k_pages.shape
    _check_pages(q_BSQD, k_pages, kv_lens)
    out, lse = torch.ops.npu.npu_fused_infer_attention_score(
        q_BSQD,
        k_pages.view(num_pages, page_size, -1),
        v_pages.view(num_pages, page_size, -1),
        atten_mask=mask,
        # by keyword: an update of a captured graph replaces what was passed under this name
        actual_seq_lengths_kv=lengths_from_host(kv_lens),
        block_table=page_table_BP.contiguous(),
        block_size=page_size,
        num_heads=q_BSQD.shape[2],
        num_key_value_heads=num_kv_heads,
        scale=scale,
        input_layout="BSND",
        sparse_mode=0 if mask is None else 3,
        softmax_lse_flag=has_lse,
    )
    return out, lse


def _check_pages(q_BSQD: torch.Tensor, k_pages: torch.Tensor, kv_lens: Sequence[int]) -> None:
    num_pages, page_size = k_pages.shape[:2]
    num_used = sum(num_pages_of(kv_lens, page_size))
    if num_used > num_pages:
        raise DeviceError(
            f"the histories of one batch have {num_used} pages, shared ones counted each time, and the fused op allows "
            f"no more than there are in all: {num_pages}; raise cache.num_pages to {num_used} or more"
        )
    reason = _too_large(num_pages, page_size, k_pages[0].numel())
    if q_BSQD.shape[1] == 1 and reason is not None:
        raise DeviceError(reason)


def attend_dense(
    q_BSQD: torch.Tensor, k_BKGD: torch.Tensor, v_BKGD: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [B, S, Q, D], lse fp32 [B, Q, S, 1]) over all K keys; no lengths, so an update of a graph leaves it alone."""
    out, lse = torch.ops.npu.npu_fused_infer_attention_score(
        q_BSQD,
        k_BKGD,
        v_BKGD,
        num_heads=q_BSQD.shape[2],
        num_key_value_heads=k_BKGD.shape[2],
        scale=scale,
        input_layout="BSND",
        softmax_lse_flag=True,
    )
    return out, lse
