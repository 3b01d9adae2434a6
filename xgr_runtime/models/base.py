"""What the runtime asks of a model, and the inputs of its two entry points.

A model turns tokens into final hidden states; it knows pages and beam rows, but no catalogue, no search and no
scheduler. Logits are the head's business. Tensors are on the model's device, packed, and of the bucket's fixed sizes.

H histories, N packed beam rows, T packed tokens, E embedded rows, M hidden size, P pages of a history.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from xgr_runtime.errors import ConfigError
from xgr_runtime.hal.bound import BoundOps
from xgr_runtime.kvcache.layout import KVSpec
from xgr_runtime.kvcache.shared import SharedKV
from xgr_runtime.kvcache.unshared import UnsharedKV
from xgr_runtime.models.head import Head


@dataclass(frozen=True)
class PackedInputs:
    """Token rows, and rows that enter in place of a token's embedding.

    token_ids_T: int64 [T]. embeds_EM: [E, M] in the model's dtype. embed_positions_E: int64 [E], rows of T, distinct.
    """

    token_ids_T: torch.Tensor
    embeds_EM: torch.Tensor | None = None
    embed_positions_E: torch.Tensor | None = None


@dataclass(frozen=True)
class ContextInputs:
    """One prefill of H histories.

    positions_T: int64 [T]. slot_T: int64 [T], page * page_size + offset, padding in page 0. q_start_H1: int32 [H + 1].
    kv_len_H: int32 [H], cached prefix and new tokens; 0 for a padding history. page_table_HP: int32 [H, P].
    last_row_H: int64 [H], row in T of each history's last token (any valid row for padding).
    last_start_H1: int32 [H + 1], 0 .. H, where each history starts once only the rows of last_row_H are left.
    max_q, max_kv: static upper bounds of new tokens and of kv_len per history. q_starts [H + 1], kv_lens [H]: q_start_H1 and
    kv_len_H as the host knows them, for kernels that take lengths from the host. out_HM: [H, M] in the model's dtype, where the
    model may write what it returns, or None.
    """

    packed: PackedInputs
    positions_T: torch.Tensor
    slot_T: torch.Tensor
    q_start_H1: torch.Tensor
    kv_len_H: torch.Tensor
    page_table_HP: torch.Tensor
    last_row_H: torch.Tensor
    last_start_H1: torch.Tensor
    max_q: int
    max_kv: int
    q_starts: tuple[int, ...]
    kv_lens: tuple[int, ...]
    out_HM: torch.Tensor | None = None


@dataclass(frozen=True)
class StepInputs:
    """One decode step of N beam rows.

    ids_N: [N], int64 tokens, or codes of any whole numbers where token_of_C is given: int64 [C], the token of each code.
    positions_N: int64 [N]. page_table_HP, kv_len_H, kv_lens: as in ContextInputs. row_start_H1: int32 [H + 1],
    beam rows of each history. slot_N: int32 [N], slot of each row in the unshared KV. max_rows, max_kv: static upper
    bounds of rows and kv_len per history. round: >= 1; the step writes unshared position round - 1 and attends to
    `round` own tokens.
    """

    ids_N: torch.Tensor
    positions_N: torch.Tensor
    page_table_HP: torch.Tensor
    kv_len_H: torch.Tensor
    row_start_H1: torch.Tensor
    slot_N: torch.Tensor
    max_rows: int
    max_kv: int
    kv_lens: tuple[int, ...]
    round: int
    token_of_C: torch.Tensor | None = None

    @property
    def token_ids(self) -> torch.Tensor:
        """int64 [N], for models that do not look tokens up and embed them in one."""
        if self.token_of_C is None:
            return self.ids_N
        return self.token_of_C.index_select(0, self.ids_N)


@dataclass(frozen=True)
class KVCaches:
    """The two caches a model reads and writes."""

    shared: SharedKV
    unshared: UnsharedKV


class RecModel(Protocol):
    """A model of one architecture, loaded on one device (one rank of it)."""

    @property
    def kv_spec(self) -> KVSpec: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def op_sizes(self) -> Mapping[str, int]:
        """What providers of ops may ask for: the sizes of `hal.registry.MODEL_SIZES` that this rank has, but those of pages."""
        ...

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_positions(self) -> int:
        """Positions 0 .. max_positions - 1 are those the model was made for; beyond them its answers mean nothing."""
        ...

    @property
    def first_scores_from(self) -> Literal["context", "step"]:
        """Whether round 0 scores the hidden states of `context`, or those of a first `step`."""
        ...

    @property
    def head(self) -> Head: ...

    def context(self, ops: BoundOps, inputs: ContextInputs, kv: KVCaches) -> torch.Tensor | None:
        """Write the histories' shared KV; hidden_HM after the final norm at last_row_H, or None if steps score."""
        ...

    def step(self, ops: BoundOps, inputs: StepInputs, kv: KVCaches) -> torch.Tensor:
        """Write one own token per row; hidden_NM after the final norm. Padding rows hold anything."""
        ...


def check_positions(model: RecModel, max_prompt_tokens: int, num_levels: int) -> None:
    """Raise ConfigError when the longest prompt and the codes fed back after it leave the model's positions.

    The last level's codes are never fed back, hence num_levels - 1 positions after the prompt.
    """
    num_positions = max_prompt_tokens + num_levels - 1
    if num_positions > model.max_positions:
        raise ConfigError(
            f"limits.max_prompt_tokens must be at most {model.max_positions - num_levels + 1}, got {max_prompt_tokens}: "
            f"the model has {model.max_positions} positions (max_position_embeddings in its config.json), and "
            f"{num_levels} levels take {num_levels - 1} after the prompt"
        )
