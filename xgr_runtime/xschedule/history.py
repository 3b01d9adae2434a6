"""The history half of a request: known items, rendered tokens, and the positions that `exclude_history` means."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xgr_runtime.config import RuntimeConfig
from xgr_runtime.errors import InvalidRequest
from xgr_runtime.types import Int64Array, RecRequest
from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xbeam.template import Template
from xgr_runtime.xschedule.request import as_int64


@dataclass(frozen=True)
class RenderedHistory:
    """token_ids: the prompt. positions: items of the whole given history, also of the part that was too long.

    is_opaque: the prompt came as tokens, so its items are not known.
    """

    token_ids: Int64Array
    positions: Int64Array
    num_used: int
    num_unknown: int
    is_opaque: bool


def render_history(
    request: RecRequest,
    config: RuntimeConfig,
    template: Template,
    catalog: Catalog,
    vocab_size: int,
) -> RenderedHistory:
    """Resolve, cut and render a request's history. Raises InvalidRequest."""
    nothing = np.zeros(0, dtype=np.int64)
    if request.prompt_token_ids is not None:
        tokens = as_int64(request.prompt_token_ids)
        _check_prompt(tokens, config.limits.max_prompt_tokens, vocab_size)
        return RenderedHistory(tokens, nothing, 0, 0, True)
    field, sids, positions, is_known = _resolve(request, catalog)
    num_unknown = int((~is_known).sum())
    if num_unknown and (request.on_unknown or config.search.on_unknown) == "error":
        first = int(np.flatnonzero(~is_known)[0])
        raise InvalidRequest(
            [(f"{field}[{first}]", f"unknown item; {num_unknown} of {len(is_known)} are unknown")]
        )
    if num_unknown:
        sids = sids[is_known]
    limit = min(
        config.limits.max_history_items,
        template.max_items(config.limits.max_prompt_tokens, catalog.num_levels),
    )
    if len(sids) > limit:
        if (request.on_overflow or config.search.on_overflow) == "error":
            raise InvalidRequest(
                [
                    (
                        field,
                        f"at most {limit} items fit (limits.max_history_items, limits.max_prompt_tokens), got {len(sids)}",
                    )
                ]
            )
        sids = sids[len(sids) - limit :]
    tokens = template.render(sids, catalog.token_of)
    if not len(tokens):
        raise InvalidRequest(
            [(field, "no known item is left and the template has no token of its own")]
        )
    return RenderedHistory(tokens, positions, len(sids), num_unknown, False)


def _check_prompt(tokens: Int64Array, max_tokens: int, vocab_size: int) -> None:
    if not 1 <= len(tokens) <= max_tokens:
        raise InvalidRequest(
            [
                (
                    "prompt_token_ids",
                    f"must hold 1 to limits.max_prompt_tokens = {max_tokens} tokens, got {len(tokens)}",
                )
            ]
        )
    if tokens.view(np.uint64).max() >= vocab_size:  # negative numbers are the largest ones
        first = int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
        raise InvalidRequest(
            [
                (
                    f"prompt_token_ids[{first}]",
                    f"must be in [0, {vocab_size}), got {int(tokens[first])}",
                )
            ]
        )


def _resolve(
    request: RecRequest, catalog: Catalog
) -> tuple[str, npt.NDArray[np.uint32], Int64Array, npt.NDArray[np.bool_]]:
    """Field name, SID of each given item, positions for exclusion, and which of the given items are known."""
    if request.history_sids is not None:
        return _resolve_sids(np.asarray(request.history_sids), catalog)
    if request.history_keys is not None:
        field, positions = "history_keys", catalog.positions_of_keys(list(request.history_keys))
    else:
        assert request.history_item_ids is not None
        field, positions = (
            "history_item_ids",
            catalog.positions_of_ids(as_int64(request.history_item_ids)),
        )
    is_known = positions >= 0
    if is_known.all():
        return field, catalog.sids_of_positions(positions), positions, is_known
    sids = np.zeros((len(positions), catalog.num_levels), dtype=np.uint32)
    sids[is_known] = catalog.sids_of_positions(positions[is_known])
    return field, sids, positions[is_known], is_known


def _resolve_sids(
    sids: npt.NDArray[np.uint32], catalog: Catalog
) -> tuple[str, npt.NDArray[np.uint32], Int64Array, npt.NDArray[np.bool_]]:
    """A SID is known when each code has a token: an item that left the catalogue still encodes a history."""
    if not sids.size:
        sids = sids.reshape(0, catalog.num_levels).astype(np.uint32)
    if sids.shape[1] != catalog.num_levels:
        raise InvalidRequest(
            [("history_sids", f"must have shape [n, {catalog.num_levels}], got {list(sids.shape)}")]
        )
    is_known = np.ones(len(sids), dtype=bool)
    for level, tokens in enumerate(catalog.token_of):
        codes = sids[:, level]
        inside = (codes >= 0) & (codes < len(tokens))
        is_known &= inside & (tokens[np.where(inside, codes, 0)] >= 0)
    leaves = catalog.positions_of_sids(sids[is_known])
    leaves = np.unique(leaves[leaves >= 0])
    begin = catalog.sid_item_offsets[leaves].astype(np.int64)
    counts = catalog.sid_item_offsets[leaves + 1].astype(np.int64) - begin
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return "history_sids", sids, np.repeat(begin, counts) + within, is_known
