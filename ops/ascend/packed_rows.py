"""Packed rows of several histories as a rectangle, and back, with indices computed on the device.

Shapes depend on the bucket's bounds alone and nothing is read by the host, so both run inside a captured graph.

H histories, N packed rows, R rows of the longest history, P = H * R places of the rectangle.
"""

import torch


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
