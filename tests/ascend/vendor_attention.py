"""Two of torch_npu's ops as small CPU functions, for a backend without hardware: our reading of the documentation.

Schemas are those that torch_npu 2.13.0 registers; the meaning is that of its docs of npu_fused_infer_attention_score and
npu_attention_update (of the latter's head dim: CANN's description of AttentionUpdate). A documented constraint that a call
breaks raises VendorConstraint. What the docs leave open is NaN or +inf, so that a caller that relies on it fails. Arguments
that no provider here passes are refused. Precision is plain float32 and says nothing about the hardware's.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

FUSED_INFER = "npu_fused_infer_attention_score"
UPDATE = "npu_attention_update"

_OPTIONAL_TENSORS = (
    "dequant_scale1 quant_scale1 dequant_scale2 quant_scale2 quant_offset2 antiquant_scale antiquant_offset "
    "key_antiquant_scale key_antiquant_offset value_antiquant_scale value_antiquant_offset"
)
_INTS = "antiquant_mode key_antiquant_mode value_antiquant_mode"

SCHEMAS = {
    FUSED_INFER: (
        "(Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, Tensor? atten_mask=None, "
        "SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None, "
        + "".join(f"Tensor? {name}=None, " for name in _OPTIONAL_TENSORS.split())
        + "Tensor? block_table=None, Tensor? query_padding_size=None, Tensor? kv_padding_size=None, "
        "Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None, SymInt[]? actual_shared_prefix_len=None, "
        "Tensor? query_rope=None, Tensor? key_rope=None, Tensor? key_rope_antiquant_scale=None, int num_heads=1, "
        "float scale=1.0, int pre_tokens=2147483647, int next_tokens=2147483647, str input_layout='BSH', "
        "int num_key_value_heads=0, int sparse_mode=0, int inner_precise=0, int block_size=0, "
        + "".join(f"int {name}=0, " for name in _INTS.split())
        + "bool softmax_lse_flag=False) -> (Tensor, Tensor)"
    ),
    UPDATE: "(Tensor[] lse, Tensor[] local_out, int update_type) -> (Tensor, Tensor)",
}


class VendorConstraint(ValueError):
    """A documented constraint does not hold."""


def require(holds: bool, text: str) -> None:
    if not holds:
        raise VendorConstraint(text)


@cache
def define() -> torch.library.Library:
    """Register both ops for CPU tensors; a second call changes nothing. Not for a process that has torch_npu."""
    library = torch.library.Library("npu", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, fn in ((FUSED_INFER, fused_infer), (UPDATE, attention_update)):
        library.define(f"{name}{SCHEMAS[name]}")  # type: ignore[no-untyped-call]
        library.impl(name, fn, "CPU")  # type: ignore[no-untyped-call]
    return library


def fused_infer(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    atten_mask: torch.Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    block_table: torch.Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
    softmax_lse_flag: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out like query, lse fp32 [B, N, S, 1]). Rows without a key, and beyond a length of the query: NaN, lse +inf."""
    defaults = (None, 0, 2147483647)
    passed = [
        name for name, v in others.items() if isinstance(v, torch.Tensor) or v not in defaults
    ]
    require(not passed, f"not imitated: {passed}")
    num_kv_heads = num_key_value_heads or num_heads
    q_BSND = as_bsnd(query, input_layout, num_heads, "query")
    num_rows = q_BSND.shape[1]
    check_tensors(query, key, value)
    check_heads(q_BSND, num_kv_heads, input_layout)
    if block_table is None:
        k_BSND = as_bsnd(key, input_layout, num_kv_heads, "key")
        v_BSND = as_bsnd(value, input_layout, num_kv_heads, "value")
        require(k_BSND.shape[0] == q_BSND.shape[0], "key has the batch of query")
        num_keys = k_BSND.shape[1]
        kv_lens = lengths(actual_seq_lengths_kv, q_BSND.shape[0], num_keys, "kv") or [
            num_keys
        ] * len(q_BSND)
        keys = [(k_BSND[b, :n], v_BSND[b, :n]) for b, n in enumerate(kv_lens)]
    else:
        kv_lens = check_pages(
            q_BSND, key, actual_seq_lengths_kv, block_table, block_size, num_kv_heads
        )
        keys = [
            (pages_of(key, row, n, num_kv_heads), pages_of(value, row, n, num_kv_heads))
            for row, n in zip(block_table, kv_lens, strict=True)
        ]
    require(
        all(len(k) <= (262144 if num_rows == 1 else 20971520) for k, _ in keys), "too many keys"
    )
    q_lens = lengths(actual_seq_lengths, q_BSND.shape[0], num_rows, "query")
    if num_rows == 1 or q_lens is None:  # with one row the lengths of the query mean nothing
        q_lens = [num_rows] * q_BSND.shape[0]
    is_causal = check_mask(atten_mask, sparse_mode, num_rows)
    out_BSND = torch.full_like(q_BSND, torch.nan)
    lse_BNS1 = query.new_full(
        (*q_BSND.transpose(1, 2).shape[:3], 1), torch.inf, dtype=torch.float32
    )
    for b, (k, v) in enumerate(keys):
        attend(q_BSND[b, : q_lens[b]], k, v, scale, is_causal, out_BSND[b], lse_BNS1[b, :, :, 0])
    out = from_bsnd(out_BSND, input_layout).reshape(query.shape)
    return out, lse_BNS1 if softmax_lse_flag else query.new_zeros(1, dtype=torch.float32)


def attend(
    q_SND: torch.Tensor,
    k_KGD: torch.Tensor,
    v_KGD: torch.Tensor,
    scale: float,
    is_causal: bool,
    out_SND: torch.Tensor,
    lse_NS: torch.Tensor,
) -> None:
    """One batch entry, into its results; rows that see no key stay as they are."""
    num_rows, num_heads, _ = q_SND.shape
    num_keys, num_kv_heads, _ = k_KGD.shape
    k_NKD = k_KGD.float().transpose(0, 1).repeat_interleave(num_heads // num_kv_heads, 0)
    v_NKD = v_KGD.float().transpose(0, 1).repeat_interleave(num_heads // num_kv_heads, 0)
    scores_NSK = q_SND.float().transpose(0, 1) @ k_NKD.transpose(1, 2) * scale
    if is_causal:  # aligned at the lower right corner
        hidden = torch.ones(num_rows, num_keys, dtype=torch.bool).triu(num_keys - num_rows + 1)
        scores_NSK = scores_NSK.masked_fill(hidden, -torch.inf)
    first = max(0, num_rows - num_keys) if is_causal else 0
    if num_keys == 0 or first == num_rows:
        return
    rows = slice(first, num_rows)
    lse_NS[:, rows] = scores_NSK[:, rows].logsumexp(-1)
    out_SND[rows] = (scores_NSK[:, rows].softmax(-1) @ v_NKD).transpose(0, 1).to(out_SND.dtype)


def as_bsnd(tensor: torch.Tensor, layout: str, num_heads: int, name: str) -> torch.Tensor:
    require(layout in ("BSH", "BSND", "BNSD"), f"layout {layout} is not imitated")
    require(tensor.dim() == len(layout), f"{name} has {tensor.dim()} dims, layout {layout}")
    require(tensor.is_contiguous(), f"{name} is not contiguous")
    if layout == "BSH":
        require(tensor.shape[2] % num_heads == 0, f"{name}: heads do not divide {tensor.shape[2]}")
        return tensor.view(*tensor.shape[:2], num_heads, -1)
    require(tensor.shape[layout.index("N")] == num_heads, f"{name} does not have {num_heads} heads")
    return tensor.transpose(1, 2) if layout == "BNSD" else tensor


def from_bsnd(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous() if layout == "BNSD" else tensor.contiguous()


def check_tensors(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    require(query.dtype in (torch.float16, torch.bfloat16), f"query is {query.dtype}")
    require(key.dtype == value.dtype == query.dtype, "key and value have the dtype of query")
    require(key.shape == value.shape, "key and value have one shape")
    require(key.is_contiguous() and value.is_contiguous(), "key or value is not contiguous")


def check_heads(q_BSND: torch.Tensor, num_kv_heads: int, layout: str) -> None:
    batch, num_rows, num_heads, dim = q_BSND.shape
    require(batch <= 65536, f"batch {batch}")
    require(num_heads <= 256, f"{num_heads} heads")
    require(num_heads % num_kv_heads == 0, "KV heads do not divide the query's")
    require(num_heads <= 64 * num_kv_heads, f"{num_heads} heads on {num_kv_heads}")
    require(dim <= 512 and dim % 16 == 0, f"head dim {dim}")
    if num_rows > 1 and layout in ("BSH", "BSND"):
        require(num_heads * dim < 65535, f"{num_heads} heads of {dim}")


def lengths(given: list[int] | None, batch: int, at_most: int, name: str) -> list[int] | None:
    """One length an entry, or None; a single one holds for every entry, and what is beyond the batch is not looked at."""
    if given is None:
        return None
    require(
        len(given) == 1 or len(given) >= batch,
        f"{len(given)} lengths of {name} for a batch of {batch}",
    )
    used = (list(given) * batch)[:batch] if len(given) == 1 else list(given)[:batch]
    require(all(0 <= n <= at_most for n in used), f"lengths of {name}: {used}, at most {at_most}")
    return used


def check_pages(
    q_BSND: torch.Tensor,
    key: torch.Tensor,
    given: list[int] | None,
    block_table: torch.Tensor,
    block_size: int,
    num_kv_heads: int,
) -> list[int]:
    """The length of each entry."""
    batch, num_rows, _, dim = q_BSND.shape
    require(block_table.dtype == torch.int32, f"block_table is {block_table.dtype}")
    require(
        block_table.dim() == 2 and block_table.shape[0] == batch, f"block_table {block_table.shape}"
    )
    require(block_table.is_contiguous(), "block_table is not contiguous")
    step = 16 if num_rows == 1 else 128
    require(step <= block_size <= 512 and block_size % step == 0, f"block_size {block_size}")
    require(num_kv_heads * dim <= 65535, f"{num_kv_heads} KV heads of {dim}")
    expected = (key.shape[0], block_size, num_kv_heads * dim)
    require(key.shape == expected, f"pages {tuple(key.shape)}, expected {expected}")
    require(num_rows > 1 or key.numel() <= 2**31 - 1, f"{key.numel()} elements of pages")
    used = lengths(given, batch, block_table.shape[1] * block_size, "kv")
    require(used is not None, "pages without actual_seq_lengths_kv")
    assert used is not None
    num_blocks = sum(-(-n // block_size) for n in used)
    require(key.shape[0] >= num_blocks, f"{num_blocks} blocks in use, {key.shape[0]} there")
    return used


def pages_of(
    pages: torch.Tensor, block_row: torch.Tensor, num_tokens: int, heads: int
) -> torch.Tensor:
    """[K, G, D]; only entries that hold tokens are looked at. Ids out of range are the caller's fault: IndexError."""
    ids = block_row[: -(-num_tokens // pages.shape[1])]
    return (
        pages.index_select(0, ids)
        .flatten(0, 1)[:num_tokens]
        .view(num_tokens, heads, pages.shape[2] // heads)
    )


def check_mask(mask: torch.Tensor | None, sparse_mode: int, num_rows: int) -> bool:
    """Whether rows are causal. With one row sparse_mode means nothing, and a mask would be another one than this."""
    if num_rows == 1:
        require(mask is None, "a mask with one query row is not imitated")
        return False
    require(sparse_mode in (0, 3), f"sparse_mode {sparse_mode} is not imitated")
    if sparse_mode == 0:
        require(mask is None, "a mask with sparse_mode 0 is not imitated")
        return False
    require(mask is not None, "sparse_mode 3 without atten_mask")
    assert mask is not None
    require(mask.dtype in (torch.bool, torch.int8, torch.uint8), f"atten_mask is {mask.dtype}")
    require(mask.shape[-2:] == (2048, 2048) and mask.numel() == 2048**2, f"atten_mask {mask.shape}")
    require(mask.is_contiguous(), "atten_mask is not contiguous")
    require(
        torch.equal(mask.view(2048, 2048).bool(), _triangle()), "atten_mask is not the triangle"
    )
    return True


@cache
def _triangle() -> torch.Tensor:
    return torch.arange(2048) > torch.arange(2048)[:, None]


def attention_update(
    lse: list[torch.Tensor], local_out: list[torch.Tensor], update_type: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [rows, D], lse fp32 [rows], given with update_type 1). Infinite lse are not documented: NaN."""
    require(1 <= len(lse) == len(local_out) <= 16, f"{len(lse)} lse, {len(local_out)} local_out")
    require(update_type in (0, 1), f"update_type {update_type}")
    shape, dtype = local_out[0].shape, local_out[0].dtype
    require(len(shape) == 2 and shape[1] % 8 == 0 and 8 <= shape[1] <= 512, f"local_out {shape}")
    require(dtype in (torch.float32, torch.float16, torch.bfloat16), f"local_out is {dtype}")
    for part_lse, part_out in zip(lse, local_out, strict=True):
        require(part_lse.dtype == torch.float32, f"lse is {part_lse.dtype}")
        require(part_lse.shape == shape[:1], f"lse {part_lse.shape} for local_out {shape}")
        require(part_out.shape == shape and part_out.dtype == dtype, "local_out differ")
        require(part_lse.is_contiguous() and part_out.is_contiguous(), "not contiguous")
    all_lse, outs = torch.stack(lse), torch.stack(local_out).float()
    merged = all_lse.logsumexp(0).masked_fill(all_lse.isinf().any(0), torch.nan)
    out = ((all_lse - merged).exp().unsqueeze(-1) * outs).sum(0).to(dtype)
    return out, merged if update_type == 1 else torch.full_like(merged, torch.nan)
