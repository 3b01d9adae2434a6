"""Packed rows of several histories as a rectangle, and back, with indices computed on the device.

Shapes depend on the bucket's bounds alone and nothing is read by the host, so both run inside a captured graph. The price:
every history is as high as the highest, and a single wide search beside narrow ones makes mostly padding. Entries of equal height
would need to be told to which history they belong, by the host, since it is the host that gives their lengths; an engine tells
the lengths of histories alone.

H histories, N packed rows, R rows of the longest history, P = H * R places of the rectangle.
"""

import torch

from xgr_runtime.hal.registry import OpSpec

# Elements of one rectangle of queries, 2 GiB in half precision; its results are as many. Not a vendor's limit.
MAX_NUMEL = 1 << 30


def padding_refusal(spec: OpSpec) -> str | None:
    """Whether the rectangle would be too large, and what to do about it. Sizes that are not known are accepted."""
    numel_of_place = 1
    for name in "HQD":
        numel_of_place *= spec.dims.get(name, 0)
    num_rows = spec.dims.get("max_rows", 0)
    if numel_of_place * num_rows <= MAX_NUMEL:
        return None
    return (
        f"{spec.dims['H']} histories, each padded to {num_rows} rows, are {numel_of_place * num_rows} elements of queries: takes "
        f"up to {MAX_NUMEL}; set scheduler.max_batch_rows to at most {MAX_NUMEL // numel_of_place}, or lower "
        "scheduler.max_batch_histories"
    )


def rows_of_places(row_start_H1: torch.Tensor, num_rows: int, max_rows: int) -> torch.Tensor:
    """int32 [H * max_rows]: the packed row at each place; places that no row has name some other row."""
    row_HR = row_start_H1[:-1].unsqueeze(1) + torch.arange(
        max_rows, dtype=torch.int32, device=row_start_H1.device
    )
    return row_HR.clamp(max=num_rows - 1).flatten()


def places_of_rows(
    row_start_H1: torch.Tensor, kv_len_H: torch.Tensor, num_rows: int, max_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(int32 [N], the place of each packed row; bool [N], whether it has one and its history has tokens)."""
    num_histories = kv_len_H.shape[0]
    row_N = torch.arange(num_rows, dtype=torch.int32, device=row_start_H1.device)
    num_ended_N = (row_N.unsqueeze(1) >= row_start_H1[1:]).sum(1, dtype=torch.int32)
    history_N = num_ended_N.clamp(max=num_histories - 1)
    place_N = history_N * max_rows + row_N - row_start_H1.index_select(0, history_N)
    is_live_N = (num_ended_N < num_histories) & (kv_len_H.index_select(0, history_N) > 0)
    return place_N.clamp(max=num_histories * max_rows - 1), is_live_N
