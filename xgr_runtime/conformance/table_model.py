"""A model that is a table: it gives the logits of a search vector for its prompt and every own token sequence, exactly.

It keeps the token ids themselves as keys (values: their negatives) through the ops that keep keys and values, and finds
its logits by what it reads back, on the device: the prompt among the known ones, then own token by own token through a
table of transitions. So a wrong page, slot, reorder, position or row range leads to another state, and whatever no
vector knows to state 0, whose logits are NaN. A hidden state is the number of its state in two digits, which every
dtype holds exactly; the head looks the logits up in fp32. Nothing is read by the host.

H histories, N packed beam rows, T packed tokens, K tokens of a history, S states, V vocabulary, M hidden size.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from xgr_runtime.conformance.vectors import VectorSet
from xgr_runtime.kvcache.layout import KVGroup, KVSpec
from xgr_runtime.models.base import ContextInputs, KVCaches, StepInputs

_DIGIT = 128  # a half-precision number holds every integer up to 256
_DIM = 16  # of a head, and the hidden size: what kernels on matrix units take
_UNKNOWN = -1.0


class TableCatalogHead:
    """Satisfies the search's `LevelHead`."""

    levels: tuple[Any, ...] = ()

    def __init__(self, tables: "StateTables", token_of: Sequence[npt.NDArray[np.int32]]) -> None:
        place = tables.logits_SV.device
        self._tables = tables
        self._tokens = [torch.from_numpy(np.maximum(t, 0).astype(np.int64)) for t in token_of]
        self._tokens = [tokens.to(place) for tokens in self._tokens]
        self._is_absent = [torch.from_numpy(table < 0).to(place) for table in token_of]

    def level_logits(self, ops: Any, hidden_NM: torch.Tensor, level: int) -> torch.Tensor:
        """fp32 [N, C]."""
        logits_NV = self._tables.logits_SV.index_select(0, _state_of(hidden_NM))
        logits_NC = logits_NV.index_select(1, self._tokens[level])
        return logits_NC.masked_fill(self._is_absent[level], -torch.inf)

    def vocab_logsumexp(self, ops: Any, hidden_NM: torch.Tensor) -> torch.Tensor:
        """fp32 [N], computed on the host in float64 when the tables were made."""
        return self._tables.lse_S.index_select(0, _state_of(hidden_NM))


class StateTables:
    """Every state of a set of vectors as device arrays.

    logits_SV, lse_S fp32. next_S: int64 [S * (V + 1)], the state after each token, the last column for none.
    prompts_PK: fp32, -1 behind each prompt; prompt_len_P int32; state_of_prompt: int64 [P + 1], 0 for an unknown one.
    """

    def __init__(self, vectors: VectorSet, place: torch.device) -> None:
        number: dict[tuple[str, tuple[int, ...]], int] = {}
        rows = [np.full(vectors.vocab_size, np.nan, np.float32)]
        for vector in vectors.vectors:
            for own, row in vector.logits.items():
                number[vector.name, own] = len(rows)
                rows.append(row)
        following = np.zeros((len(rows), vectors.vocab_size + 1), np.int64)
        for (name, own), state in number.items():
            if own:
                following[number[name, own[:-1]], own[-1]] = state
        assert len(rows) < _DIGIT * _DIGIT, len(rows)
        prompts = [vector.prompt for vector in vectors.vectors]
        padded = np.full((len(prompts), max(map(len, prompts))), _UNKNOWN, np.float32)
        for line, prompt in zip(padded, prompts, strict=True):
            line[: len(prompt)] = prompt
        states = [0, *(number[vector.name, ()] for vector in vectors.vectors)]
        self.logits_SV = torch.from_numpy(np.stack(rows)).to(place)
        self.lse_S = exact_lse(self.logits_SV.cpu()).to(place)
        self.next_S = torch.from_numpy(following.reshape(-1)).to(place)
        self.prompts_PK = torch.from_numpy(padded).to(place)
        self.prompt_len_P = torch.tensor(list(map(len, prompts)), dtype=torch.int32, device=place)
        self.state_of_prompt = torch.tensor(states, device=place)


class TableModel:
    """See the head of the file; satisfies `RecModel`."""

    first_scores_from: Literal["context", "step"] = "context"
    max_positions = 2**31
    hidden_size = _DIM

    def __init__(self, vectors: VectorSet, place: torch.device, dtype: torch.dtype) -> None:
        self._tables = StateTables(vectors, place)
        self._dtype = dtype
        self.vocab_size = vectors.vocab_size
        self.op_sizes = {"M": _DIM, "F": _DIM, "Q": 1, "G": 1, "D": _DIM, "V": self.vocab_size}
        shape = (1, 1, _DIM, dtype)
        self.kv_spec = KVSpec(KVGroup("history", "paged", *shape), KVGroup("beams", "rows", *shape))
        self.head: Any = self

    def for_catalog(self, token_of: Sequence[npt.NDArray[np.int32]]) -> TableCatalogHead:
        """A catalogue's head."""
        return TableCatalogHead(self._tables, token_of)

    def context(self, ops: Any, inputs: ContextInputs, kv: KVCaches) -> torch.Tensor:
        """Write the tokens to the pages; the state of each history's prompt."""
        k_pages, v_pages = kv.shared.k_pages(0), kv.shared.v_pages(0)
        k_TGD = self._keys(inputs.packed.token_ids_T)
        ops.write_shared_kv(k_TGD, -k_TGD, k_pages, v_pages, inputs.slot_T)
        return self._hidden(self._prompt_states(inputs, kv))

    def step(self, ops: Any, inputs: StepInputs, kv: KVCaches) -> torch.Tensor:
        """Write one own token per row; the state behind the history's prompt and the row's own tokens."""
        k_rows, v_rows = kv.unshared.k_rows(0), kv.unshared.v_rows(0)
        k_NGD = self._keys(inputs.token_ids)
        ops.write_unshared_kv(k_NGD, -k_NGD, k_rows, v_rows, inputs.slot_N, inputs.round - 1)
        row_N1 = torch.arange(inputs.slot_N.shape[0], device=inputs.slot_N.device).unsqueeze(1)
        history_N = (row_N1 >= inputs.row_start_H1[1:]).sum(1)
        is_row_N = history_N < inputs.kv_len_H.shape[0]
        history_N = history_N.masked_fill(~is_row_N, 0)
        place_N = inputs.kv_len_H.long().index_select(0, history_N) + (inputs.round - 1)
        is_known_N = is_row_N & (place_N == inputs.positions_N)
        state_N = self._prompt_states(inputs, kv).index_select(0, history_N)
        slot_N = inputs.slot_N.long()
        own_NR = _tokens_of(k_rows.index_select(0, slot_N), v_rows.index_select(0, slot_N))
        for position in range(inputs.round):
            token_N = own_NR[:, position]
            is_token_N = (token_N >= 0) & (token_N < self.vocab_size)
            column_N = token_N.masked_fill(~is_token_N, self.vocab_size).long()
            state_N = self._tables.next_S.index_select(
                0, state_N * (self.vocab_size + 1) + column_N
            )
        return self._hidden(state_N.masked_fill(~is_known_N, 0))

    def _keys(self, token_ids: torch.Tensor) -> torch.Tensor:
        return token_ids.to(self._dtype)[:, None, None].repeat(1, 1, _DIM)

    def _hidden(self, state: torch.Tensor) -> torch.Tensor:
        digits = torch.stack((state // _DIGIT, state % _DIGIT), dim=1).to(self._dtype)
        return torch.nn.functional.pad(digits, (0, _DIM - 2))

    def _prompt_states(self, inputs: ContextInputs | StepInputs, kv: KVCaches) -> torch.Tensor:
        """int64 [H]: the state of the prompt that the pages of each history hold."""
        tables, size = self._tables, kv.shared.page_size
        num_tokens = min(inputs.max_kv, tables.prompts_PK.shape[1])
        place_K = torch.arange(num_tokens, device=inputs.kv_len_H.device)
        page_K = (place_K // size).clamp(max=inputs.page_table_HP.shape[1] - 1)
        slot_HK = inputs.page_table_HP.long().index_select(1, page_K) * size + place_K % size
        k_HKD, v_HKD = (
            pages.flatten(0, 1).index_select(0, slot_HK.flatten()).view(*slot_HK.shape, 1, _DIM)
            for pages in (kv.shared.k_pages(0), kv.shared.v_pages(0))
        )
        is_used_HK = place_K < inputs.kv_len_H.unsqueeze(1)
        tokens_HK = _tokens_of(k_HKD, v_HKD, -2.0).masked_fill(~is_used_HK, _UNKNOWN)
        is_same_HPK = tokens_HK.unsqueeze(1) == tables.prompts_PK[:, :num_tokens]
        is_prompt_HP = is_same_HPK.all(2) & (inputs.kv_len_H.unsqueeze(1) == tables.prompt_len_P)
        number_P = torch.arange(1, tables.state_of_prompt.shape[0], device=place_K.device)
        return tables.state_of_prompt.index_select(0, (is_prompt_HP.long() * number_P).sum(1))


def exact_lse(logits_SV: torch.Tensor) -> torch.Tensor:
    """float32 of a float64 log-sum-exp, on the host."""
    return torch.logsumexp(logits_SV.double(), dim=1).float()


def _tokens_of(keys: torch.Tensor, values: torch.Tensor, wrong: float = _UNKNOWN) -> torch.Tensor:
    """fp32: the token that keys and values [.., 1, D] both hold in every element, `wrong` where they do not."""
    k, v = keys.squeeze(-2).float(), values.squeeze(-2).float()
    token = k[..., 0]
    is_whole = (k == token.unsqueeze(-1)).all(-1) & (v == -token.unsqueeze(-1)).all(-1)
    return token.masked_fill(~is_whole, wrong)


def _state_of(hidden_NM: torch.Tensor) -> torch.Tensor:
    digits_NM = hidden_NM.float()
    return (digits_NM[:, 0] * _DIGIT + digits_NM[:, 1]).long()
