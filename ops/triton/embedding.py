"""Launcher of the kernel that begins a pass of a decoder. T tokens or rows, V vocabulary, C codes, M hidden size, D head dim."""

from typing import Any

import torch

from .embedding_kernels import embedding_rms_norm_cos_sin_kernel
from .launch import LaunchRules, check_dtype, check_rows_dense, next_power_of_two, row_elements

ELEMENTS_OF_AN_ANGLE = 4  # what one counts for in `max_tile_elements`


def launch_embedding_rms_norm_cos_sin(
    embedding_VM: torch.Tensor,
    id_T: torch.Tensor,
    token_of_C: torch.Tensor | None,
    norm_weight_M: torch.Tensor,
    eps: float,
    position_T: torch.Tensor,
    frequency_D: torch.Tensor,
    rules: LaunchRules,
    kernel: Any = embedding_rms_norm_cos_sin_kernel,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `xgr_runtime.hal.ops.embedding.embedding_rms_norm_cos_sin`; raises ValueError for a dtype or strides it cannot take.

    kernel: one of the same arguments and work.
    """
    check_dtype(kernel, embedding_VM.dtype)
    arrays = [("embedding_VM", embedding_VM, 2), ("id_T", id_T, 1), ("position_T", position_T, 1)]
    arrays += [("norm_weight_M", norm_weight_M, 1), ("frequency_D", frequency_D, 1)]
    if token_of_C is not None:
        arrays.append(("token_of_C", token_of_C, 1))
    for name, array, num_dims in arrays:
        check_rows_dense(name, array, num_dims)
    num_rows, size, head_dim = id_T.shape[0], embedding_VM.shape[1], frequency_D.shape[0]
    place, dtype = embedding_VM.device, embedding_VM.dtype
    residual_TM, out_TM = (torch.empty((num_rows, size), dtype=dtype, device=place) for _ in "ro")
    cos_TD, sin_TD = (
        torch.empty((num_rows, head_dim), dtype=torch.float32, device=place) for _ in "cs"
    )
    of_row = max(row_elements(size), ELEMENTS_OF_AN_ANGLE * next_power_of_two(head_dim))
    tile_rows = max(1, rules.max_tile_elements // of_row)
    num_items = -(-num_rows // tile_rows)
    kernel[rules.grid(num_items)](
        embedding_VM,
        id_T,
        id_T if token_of_C is None else token_of_C,
        norm_weight_M,
        position_T,
        frequency_D,
        residual_TM,
        out_TM,
        cos_TD,
        sin_TD,
        num_rows,
        num_items,
        eps,
        HAS_TABLE=token_of_C is not None,
        M=size,
        M_PAD=next_power_of_two(size),
        D=head_dim,
        D_PAD=next_power_of_two(head_dim),
        TILE_ROWS=tile_rows,
        **rules.options,
    )
    return residual_TM, out_TM, cos_TD, sin_TD
