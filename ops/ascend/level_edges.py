"""The edges below the parent rows of a round, tile by tile, through gathers along one dim. Not run on hardware.

Indices are int32 where the level's bits fit, since int64 arithmetic is slow on an NPU's vector cores, and int64 beyond.
Selecting along one dim of flat memory, instead of indexing by two tensors, is one gather of the device.

S searches, N packed parent rows, C codes of the level, E edges of the level, T rows of a tile, F candidates of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from xgr_runtime.hal.ops.beam import BeamRows, LevelTrie

# Indices up to here are int32.
INT32_MAX = (1 << 31) - 1


class LevelEdges:
    """num_columns: F. index_dtype: of edges. The content of padding rows is not used as an index."""

    def __init__(self, parents: BeamRows, rule_row_S: Tensor, trie: LevelTrie) -> None:
        self.num_columns = trie.num_codes if trie.is_dense else trie.max_fanout
        largest = trie.alive_RE.numel() + self.num_columns  # a row's columns may go past its edges
        self.index_dtype = torch.int32 if largest <= INT32_MAX else torch.int64
        self._trie = trie
        self._alive = trie.alive_RE.view(-1)
        is_padding_N = parents.search_of_row_N >= rule_row_S.shape[0]
        search_N = parents.search_of_row_N.masked_fill(is_padding_N, 0)
        node_N = parents.nodes_N.masked_fill(is_padding_N, 0)
        rule_N = rule_row_S.index_select(0, search_N).to(self.index_dtype)
        self._rule_start_N1 = (rule_N * trie.alive_RE.shape[1]).unsqueeze(1)
        self._column_F = torch.arange(
            self.num_columns, dtype=self.index_dtype, device=node_N.device
        )
        if trie.offsets is None:
            self._first_N1 = (node_N.to(self.index_dtype) * trie.num_codes).unsqueeze(1)
            return
        first_N = trie.offsets.index_select(0, node_N)
        num_children_N = trie.offsets.index_select(0, node_N + 1) - first_N
        self._first_N1 = first_N.to(self.index_dtype).unsqueeze(1)
        self._num_children_N1 = num_children_N.to(self.index_dtype).unsqueeze(1)

    def expand(self, logits_NC: Tensor, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        """Edges (index_dtype), logits (fp32) and liveness (bool) of the candidates of rows [first, last), each [T, F].

        In the CSR layout a column past a node's children is not alive and names some edge of the level. Logits may be a
        view of the argument.
        """
        edges_TF = self._first_N1[first:last] + self._column_F
        if self._trie.codes is None:
            return edges_TF, logits_NC[first:last], self._is_alive(edges_TF, first, last)
        edges_TF.clamp_(max=min(self._trie.codes.shape[0], self._trie.alive_RE.shape[1]) - 1)
        codes_TF = self._trie.codes.index_select(0, edges_TF.view(-1)).view(edges_TF.shape)
        alive_TF = self._is_alive(edges_TF, first, last)
        alive_TF &= self._column_F < self._num_children_N1[first:last]
        return edges_TF, logits_NC[first:last].gather(1, codes_TF.long()), alive_TF

    def codes_of(self, edges: Tensor, rows: Tensor) -> Tensor:
        """The codes of edges below the given parent rows; where an edge is not below its row, any number."""
        if self._trie.codes is not None:
            return self._trie.codes.index_select(0, edges)
        if not self._first_N1.shape[0]:
            return torch.zeros_like(edges)
        return edges - self._first_N1.view(-1).index_select(0, rows)

    def _is_alive(self, edges_TF: Tensor, first: int, last: int) -> Tensor:
        bit_TF = edges_TF + self._rule_start_N1[first:last]
        return self._alive.index_select(0, bit_TF.view(-1)).view(edges_TF.shape)
