"""Self-attention of a decoder: causal over pages in `context`; history and own tokens merged in `step`.

H histories, N packed beam rows, T packed tokens, M hidden size, Q query heads, G KV heads, D head dim.
"""

from dataclasses import dataclass

import torch

from xgr_runtime.hal.bound import BoundOps
from xgr_runtime.models.base import ContextInputs, KVCaches, StepInputs
from xgr_runtime.models.layers.linear import Linear, StreamLinear, StreamRows

CosSin = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class SelfAttention:
    """One layer's attention. num_heads and num_kv_heads count this rank's heads; norms are None without qk-norm."""

    qkv: Linear
    out: StreamLinear
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    layer: int

    def context(
        self,
        ops: BoundOps,
        rows: StreamRows,
        cos_sin: CosSin,
        inputs: ContextInputs,
        kv: KVCaches,
        last_only: bool,
    ) -> torch.Tensor:
        """Write every token's keys and values and attend from every token, or with last_only from each history's last.

        Returns the heads side by side for `out`, [T, Q * D], or [H, Q * D] with last_only.
        """
        k_pages, v_pages = kv.shared.k_pages(self.layer), kv.shared.v_pages(self.layer)
        q_TQD = self._write_shared(ops, rows, (*cos_sin, k_pages, v_pages, inputs.slot_T))
        q_start_H1, max_q, q_starts = inputs.q_start_H1, inputs.max_q, inputs.q_starts
        if last_only:
            q_TQD, max_q = q_TQD.index_select(0, inputs.last_row_H), 1
            q_starts = tuple(range(q_TQD.shape[0] + 1))
            q_start_H1 = inputs.last_start_H1
        out_TQD: torch.Tensor = ops.prefill_attention(
            q_TQD,
            k_pages,
            v_pages,
            inputs.page_table_HP,
            q_start_H1,
            inputs.kv_len_H,
            self._scale,
            max_q,
            inputs.max_kv,
            q_starts,
            inputs.kv_lens,
        )
        return out_TQD.flatten(1)

    def step(
        self, ops: BoundOps, rows: StreamRows, cos_sin: CosSin, inputs: StepInputs, kv: KVCaches
    ) -> torch.Tensor:
        """Attend from one new token per beam row to its history and its own tokens; [N, Q * D] for `out`."""
        k_rows, v_rows = kv.unshared.k_rows(self.layer), kv.unshared.v_rows(self.layer)
        to = (k_rows, v_rows, inputs.slot_N, inputs.round - 1)
        q_NQD = self._write_unshared(ops, rows, (*cos_sin, *to))
        out_NQD: torch.Tensor = ops.beam_attention(
            q_NQD,
            kv.shared.k_pages(self.layer),
            kv.shared.v_pages(self.layer),
            inputs.page_table_HP,
            inputs.row_start_H1,
            inputs.kv_len_H,
            k_rows,
            v_rows,
            inputs.slot_N,
            inputs.round,
            self._scale,
            inputs.max_rows,
            inputs.max_kv,
            inputs.kv_lens,
        )
        return out_NQD.flatten(1)

    @property
    def _scale(self) -> float:
        return float(self.head_dim**-0.5)

    def _write_shared(
        self, ops: BoundOps, rows: StreamRows, to: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """Store every token's keys and values; its queries, [T, Q, D]. to: cosines, sines, pages of both, slots."""
        norms = (self.q_norm_D, self.k_norm_D)
        if self.qkv.bias_O is not None:
            qkv_TXD = self._project_in(ops, rows.normed(ops))
            q_TQD: torch.Tensor = ops.rope_write_shared_kv(qkv_TXD, *norms, self.eps, *to)
        elif rows.product is not None:
            product, weight_OM = rows.product, self.qkv.weight_OI
            q_TQD = ops.stream_linear_rope_write_shared_kv(*product, weight_OM, *norms, *to)
        else:
            x_TM, weight_OM = rows.normed(ops), self.qkv.weight_OI
            q_TQD = ops.linear_rope_write_shared_kv(x_TM, weight_OM, *norms, self.eps, *to)
        return q_TQD

    def _write_unshared(
        self, ops: BoundOps, rows: StreamRows, to: tuple[torch.Tensor | int, ...]
    ) -> torch.Tensor:
        """Likewise of beam rows, [N, Q, D]. to: cosines, sines, rows of both, slots, position."""
        norms = (self.q_norm_D, self.k_norm_D)
        if self.qkv.bias_O is not None:
            qkv_NXD = self._project_in(ops, rows.normed(ops))
            q_NQD: torch.Tensor = ops.rope_write_unshared_kv(qkv_NXD, *norms, self.eps, *to)
        elif rows.product is not None:
            product, weight_OM = rows.product, self.qkv.weight_OI
            q_NQD = ops.stream_linear_rope_write_unshared_kv(*product, weight_OM, *norms, *to)
        else:
            x_NM, weight_OM = rows.normed(ops), self.qkv.weight_OI
            q_NQD = ops.linear_rope_write_unshared_kv(x_NM, weight_OM, *norms, self.eps, *to)
        return q_NQD

    def _project_in(self, ops: BoundOps, x_TM: torch.Tensor) -> torch.Tensor:
        num_heads = self.num_heads + 2 * self.num_kv_heads
        return self.qkv(ops, x_TM).view(-1, num_heads, self.head_dim)
