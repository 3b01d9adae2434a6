"""The output head: hidden states to logits of one level's codes, and to the whole vocabulary's normaliser.

A search only ever needs the logits of the tokens a catalogue maps at a level. Their rows of the head are gathered once
when a catalogue is loaded; catalogues with the same token table share them, and they go away with the last one.
Logits leave the head in fp32, accumulated in fp32.

N rows, V rows of the head, M hidden size, C codes of a level.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch

from xgr_runtime.errors import CheckpointError
from xgr_runtime.hal.bound import BoundOps
from xgr_runtime.hal.memory import room_for

ABSENT_CODE = -1


@dataclass(frozen=True, eq=False)
class LevelRows:
    """One level's rows of the head. weight_CM: [C, M]. token_C: int64 [C], 0 where absent. is_absent_C: bool [C]."""

    weight_CM: torch.Tensor
    token_C: torch.Tensor
    is_absent_C: torch.Tensor
    has_absent: bool


class CatalogHead:
    """The head as one catalogue sees it."""

    def __init__(self, head: "Head", levels: tuple[LevelRows, ...]) -> None:
        self._head = head
        self.levels = levels

    def level_logits(self, ops: BoundOps, hidden_NM: torch.Tensor, level: int) -> torch.Tensor:
        """fp32 [N, C] logits of the level's codes; -inf for a code without a token."""
        rows = self.levels[level]
        logits_NC: torch.Tensor = ops.head_logits(hidden_NM, rows.weight_CM, self._head.scale)
        return (
            logits_NC.masked_fill_(rows.is_absent_C, -torch.inf) if rows.has_absent else logits_NC
        )

    def level_tokens(self, level: int) -> torch.Tensor:
        """int64 [C] token of each code on the device; 0 for a code without a token."""
        return self.levels[level].token_C

    def vocab_logsumexp(self, ops: BoundOps, hidden_NM: torch.Tensor) -> torch.Tensor:
        """fp32 [N] log-sum-exp over every row of the head, padding rows of the vocabulary included."""
        lse_N: torch.Tensor = ops.head_logsumexp(hidden_NM, self._head.weight_VM, self._head.scale)
        return lse_N


class Head:
    """Rows of the output head. weight_VM: [V, M], the embedding itself when tied. scale: factor of the logits."""

    def __init__(self, weight_VM: torch.Tensor, scale: float = 1.0) -> None:
        self.weight_VM = weight_VM
        self.scale = scale
        self._shared_rows: WeakValueDictionary[bytes, LevelRows] = WeakValueDictionary()

    def for_catalog(self, token_of: Sequence[npt.NDArray[np.int32]]) -> CatalogHead:
        """Gather the head's rows of a catalogue.

        Args:
            token_of: per level int32 [C], the token of each code, -1 where a code has none.

        Raises CheckpointError when a token is outside the model's vocabulary, DeviceError when there is no room for the rows.
        """
        return CatalogHead(
            self, tuple(self._level_rows(tokens, level) for level, tokens in enumerate(token_of))
        )

    def _level_rows(self, tokens_C: npt.NDArray[np.int32], level: int) -> LevelRows:
        vocab_size = self.weight_VM.shape[0]
        is_bad_C = (tokens_C >= vocab_size) | (tokens_C < ABSENT_CODE)
        if is_bad_C.any():
            code = int(is_bad_C.argmax())
            raise CheckpointError(
                f"the catalogue needs token {tokens_C[code]} (level {level}, code {code}), but the model's vocabulary "
                f"has {vocab_size} tokens, 0 to {vocab_size - 1}; use the catalogue made for this checkpoint"
            )
        key = hashlib.sha256(np.ascontiguousarray(tokens_C, dtype=np.int32).tobytes()).digest()
        rows = self._shared_rows.get(key)
        if rows is None:
            rows = self._gather(tokens_C)
            self._shared_rows[key] = rows
        return rows

    def _gather(self, tokens_C: npt.NDArray[np.int32]) -> LevelRows:
        device = self.weight_VM.device
        is_absent_C = tokens_C == ABSENT_CODE
        num_bytes = len(tokens_C) * self.weight_VM.shape[1] * self.weight_VM.element_size()
        with room_for("a catalogue's rows of the head", "cache.catalog_slots", device, num_bytes):
            tokens = np.where(is_absent_C, 0, tokens_C).astype(np.int64)
            token_C = torch.from_numpy(tokens).to(device)
            return LevelRows(
                weight_CM=self.weight_VM.index_select(0, token_C),
                token_C=token_C,
                is_absent_C=torch.from_numpy(is_absent_C).to(device),
                has_absent=bool(is_absent_C.any()),
            )
