"""The structural check of a catalogue: everything a search or a look-up takes for granted.

Checksums find damage; this finds files that were written wrong. Whole columns are compared, no row is walked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xgr_runtime.errors import CatalogError
from xgr_runtime.xbeam.trie import check_trie, max_fanout

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from xgr_runtime.xbeam.catalog import Catalog
    from xgr_runtime.xbeam.catalog_text import Strings


def check_catalog(catalog: Catalog) -> None:
    """Checks trie, token tables, items, look-ups and tags against each other.

    Raises:
        CatalogError: names the file and what is wrong.
    """
    _check_shapes(catalog)
    _check_text_shapes(catalog)
    check_trie(catalog.trie, catalog.num_codes, catalog.path)
    _expect(catalog, max_fanout(catalog.trie) == catalog.max_fanout, "max_fanout fits the trie")
    for level in range(catalog.num_levels):
        _check_tokens(catalog, level)
    _check_items(catalog)
    _check_text_and_tags(catalog)


def _expect(catalog: Catalog, is_right: bool, what: str) -> None:
    if not is_right:
        raise CatalogError(
            f"{catalog.path}: the catalogue contradicts itself: expected that {what}; build it again"
        )


def _check_shapes(catalog: Catalog) -> None:
    n, levels = catalog.num_items, catalog.num_levels
    _expect(catalog, 1 <= levels == len(catalog.max_fanout), "every level has its numbers")
    _expect(
        catalog,
        1 <= catalog.num_sids <= catalog.num_servable <= n,
        "1 <= SIDs <= servable items <= items",
    )
    one_per_item = [
        catalog.item_ids,
        catalog.id_order,
        *([] if catalog.weights is None else [catalog.weights]),
    ]
    _expect(
        catalog,
        all(array.shape == (n,) for array in one_per_item),
        "ids and weights exist once an item",
    )
    one_a_row = [*catalog.offsets, *catalog.codes, *catalog.token_of, catalog.sid_item_offsets]
    _expect(
        catalog,
        all(array.ndim == 1 for array in one_a_row),
        "trie and token arrays have one dimension",
    )
    signed = [*catalog.offsets, catalog.sid_item_offsets, catalog.id_order]
    is_right = all(array.dtype in (np.int32, np.int64) for array in signed)
    is_right &= all(codes.dtype in (np.uint16, np.uint32) for codes in catalog.codes)
    is_right &= all(tokens.dtype == np.int32 for tokens in catalog.token_of)
    is_right &= catalog.item_ids.dtype == np.int64
    is_right &= catalog.weights is None or catalog.weights.dtype == np.float64
    is_right &= catalog.other_sids is None or catalog.other_sids.dtype in (np.uint16, np.uint32)
    _expect(catalog, is_right, "every array has its type")
    sizes = tuple(len(tokens) for tokens in catalog.token_of)
    _expect(catalog, sizes == catalog.num_codes, "every code has an entry in its token table")
    others = (0, levels) if catalog.other_sids is None else catalog.other_sids.shape
    _expect(
        catalog,
        others == (n - catalog.num_servable, levels),
        "items that are not servable have a SID",
    )


def _check_text_shapes(catalog: Catalog) -> None:
    """Types and dimensions of everything about text, before its own checks take them for granted."""
    texts: list[Strings] = [] if catalog.titles is None else [catalog.titles]
    indices: list[NDArray[Any]] = []
    is_right = True
    if catalog.key_index is not None:
        texts.append(catalog.key_index.keys)
        indices.append(catalog.key_index.order)
        hashes = catalog.key_index.hashes
        is_right &= hashes.ndim == 1 and hashes.dtype == np.uint64
    if catalog.tag_index is not None:
        texts.append(catalog.tag_index.names)
        indices += [catalog.tag_index.offsets, catalog.tag_index.positions]
        is_right &= len(catalog.tag_index.offsets) > 0
    indices += [text.offsets for text in texts]
    is_right &= all(index.ndim == 1 and index.dtype in (np.int32, np.int64) for index in indices)
    is_right &= all(len(text.offsets) > 0 for text in texts)
    is_right &= all(text.blob.ndim == 1 and text.blob.dtype == np.uint8 for text in texts)
    _expect(
        catalog, bool(is_right), "the arrays of keys, titles and tags have their type and shape"
    )


def _check_tokens(catalog: Catalog, level: int) -> None:
    tokens = catalog.token_of[level]
    known = np.sort(tokens[tokens >= 0])
    is_right = bool((known[1:] != known[:-1]).all()) and int(tokens.min()) >= -1
    _expect(catalog, is_right, f"the tokens of level {level} are distinct")
    _expect(
        catalog,
        bool((tokens[catalog.codes[level]] >= 0).all()),
        f"the codes of level {level} have tokens",
    )
    if catalog.other_sids is not None:
        codes = catalog.other_sids[:, level]
        is_right = int(codes.max()) < len(tokens) and bool((tokens[codes] >= 0).all())
        _expect(
            catalog,
            is_right,
            f"the codes of items that are not servable have tokens in level {level}",
        )


def _check_items(catalog: Catalog) -> None:
    order, offsets = catalog.id_order, catalog.sid_item_offsets
    if catalog.weights is not None:
        _expect(catalog, bool(np.isfinite(catalog.weights).all()), "every weight is finite")
    in_range = int(order.min()) >= 0 and int(order.max()) < catalog.num_items
    _expect(catalog, in_range, "the id order holds positions")
    ids = catalog.sorted_ids
    _expect(
        catalog, bool((ids[1:] > ids[:-1]).all()), "item ids are distinct and their order is sorted"
    )
    ends = (
        len(offsets) == catalog.num_sids + 1
        and offsets[0] == 0
        and offsets[-1] == catalog.num_servable
    )
    _expect(catalog, bool(ends and (offsets[1:] > offsets[:-1]).all()), "every SID has an item")
    if catalog.num_sids == catalog.num_servable:
        return
    ids = catalog.item_ids[: catalog.num_servable]
    is_ordered = ids[1:] > ids[:-1]
    if catalog.weights is not None:
        weights = catalog.weights[: catalog.num_servable]
        is_ordered = (weights[1:] < weights[:-1]) | ((weights[1:] == weights[:-1]) & is_ordered)
    is_ordered[offsets[1:-1] - 1] = True
    _expect(catalog, bool(is_ordered.all()), "the items of a SID are sorted by weight and id")


def _check_text_and_tags(catalog: Catalog) -> None:
    n, where = catalog.num_items, catalog.path
    if catalog.titles is not None:
        catalog.titles.check(f"{where}: titles")
        _expect(catalog, len(catalog.titles) == n, "every item has an entry for its title")
    if catalog.key_index is not None:
        catalog.key_index.check(n, where)
    if catalog.tag_index is not None:
        catalog.tag_index.check(n, where)
