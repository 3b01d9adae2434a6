"""A compiled catalogue: a file, mapped or copied, with its trie, token tables and look-ups.

`open` reads the header and nothing else, so tools can list versions for the price of a system call. `verify` reads
everything once; searches run on verified catalogues only. A verified mapping still follows the file: written into, it
changes; shortened, it kills the process. What serves requests is opened with `is_private`: one copy in memory that
`verify` checks and nobody else can reach. Arrays are read-only views into the mapping or the copy: they stay valid after
`close` for whoever still holds them, and the memory goes with the last of them.

Items are numbered by *position*: [0, num_servable) in (SID, weight descending, item id ascending) order, the items
that are not servable behind them. SIDs are numbered by their rank, which is also their leaf in the trie.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from xgr_runtime.errors import CatalogError
from xgr_runtime.xbeam.catalog_check import check_catalog
from xgr_runtime.xbeam.catalog_file import CatalogFile, map_file, read_file
from xgr_runtime.xbeam.catalog_text import KeyIndex, Strings, TagIndex
from xgr_runtime.xbeam.trie import (
    Trie,
    find_leaves,
    index_dtype,
    leaf_sids,
    range_numbers,
    sum_leaves,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import ArrayLike, NDArray

    from xgr_runtime.xbeam.catalog_header import CatalogMeta


class Catalog:
    """One version of a catalogue. Make it with `Catalog.open`; it may be used from several threads.

    Attributes:
        path: the file.
        version: name given by the builder, by default the digest.
        digest: 16 hex digits over the content's checksums; equal content has an equal digest.
        is_verified: whether `verify` has passed.
        num_levels: number of codes of every SID.
        num_codes: codes per level: the columns of the level's logits.
        num_items: all items.
        num_servable: items that can be recommended.
        num_sids: distinct SIDs of servable items: the leaves.
        token_of: per level int32 [num_codes], -1 = the code has no token.
        trie: the prefix tree; `offsets` and `codes` are its arrays.
        offsets: per level [nodes + 1], int32 or int64.
        codes: per level [edges], uint16 or uint32.
        max_fanout: the largest number of children of one node, per level.
        item_ids: int64 [num_items] by position.
        id_order: positions in the order of their item ids.
        weights: float64 [num_items] by position, None when all are 0.
        other_sids: codes of the items that are not servable, None when there are none.
        titles: packed titles by position, or None.
        key_index: keys by position with their look-up, or None.
        tag_index: tags with their items, or None.
    """

    def __init__(self, file: CatalogFile) -> None:
        """Takes over a file; raises CatalogError where its header does not describe a catalogue."""
        self._file: CatalogFile | None = file
        self.path = file.path
        self.is_verified = False
        try:
            self._take(file.meta, {name: section.array for name, section in file.sections.items()})
        except KeyError as error:
            raise CatalogError(
                f"{file.path}: the header lacks {error}; build the catalogue again"
            ) from error

    def _take(self, meta: CatalogMeta, arrays: dict[str, NDArray[Any]]) -> None:
        self.version, self.digest = meta.version, meta.digest
        self.num_items, self.num_servable = meta.num_items, meta.num_servable
        self.num_codes, self.max_fanout = meta.num_codes, meta.max_fanout
        self.num_levels = len(self.num_codes)
        levels = range(self.num_levels)
        self.token_of: tuple[NDArray[np.int32], ...] = tuple(
            arrays[f"token_of_{level}"] for level in levels
        )
        self.offsets: tuple[NDArray[Any], ...] = tuple(
            arrays[f"offsets_{level}"] for level in levels
        )
        self.codes: tuple[NDArray[Any], ...] = tuple(arrays[f"codes_{level}"] for level in levels)
        self.trie = Trie(self.offsets, self.codes)
        self.num_sids = len(self.codes[-1])
        self.item_ids: NDArray[np.int64] = arrays["item_ids"]
        self.id_order: NDArray[Any] = arrays["id_order"]
        self._stored_item_offsets: NDArray[Any] | None = arrays.get("sid_item_offsets")
        self.weights: NDArray[np.float64] | None = arrays.get("weights")
        self.other_sids: NDArray[Any] | None = arrays.get("other_sids")
        self.titles = self.key_index = self.tag_index = None
        if "title_offsets" in arrays:
            self.titles = Strings(arrays["title_offsets"], arrays["title_bytes"])
        if "key_offsets" in arrays:
            keys = Strings(arrays["key_offsets"], arrays["key_bytes"])
            self.key_index = KeyIndex(keys, arrays["key_hashes"], arrays["key_order"])
        if "tag_name_offsets" in arrays:
            names = Strings(arrays["tag_name_offsets"], arrays["tag_name_bytes"])
            self.tag_index = TagIndex(names, arrays["tag_offsets"], arrays["tag_positions"])

    @classmethod
    def open(cls, path: str | Path, *, is_private: bool = False) -> Catalog:
        """Opens a catalogue; checks header, format version, section table and exact length.

        Args:
            path: the file.
            is_private: read the whole file into memory of this process, so that it may be overwritten, shortened or
                removed afterwards; costs the file's size in memory. False maps it and reads no content.

        Raises:
            CatalogError: the file is missing, foreign, newer, truncated, too long, no regular file, or its header is
                damaged or names impossible values.
        """
        return cls(read_file(path) if is_private else map_file(path))

    def __enter__(self) -> Catalog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    if not TYPE_CHECKING:  # a type checker should still report attributes that do not exist

        def __getattr__(self, name: str) -> Any:
            if self.__dict__.get("_file", "") is None:
                raise CatalogError(f"the catalogue {self.__dict__['path']} is closed")
            raise AttributeError(f"'Catalog' object has no attribute {name!r}")

    def close(self) -> None:
        """Lets go of the mapping or copy. Only `path`, `version` and `digest` can be used afterwards; may be called twice."""
        kept = {name: self.__dict__[name] for name in ("path", "version", "digest")}
        self.__dict__.clear()
        self.__dict__.update(kept, _file=None, is_verified=False)

    def verify(self) -> None:
        """Checks every byte against its checksum and everything a search relies on; then `is_verified` is true.

        Raises:
            CatalogError: the content is damaged or contradicts itself; names the section or level.
        """
        file = self._file
        if file is None:
            raise CatalogError(f"the catalogue {self.path} is closed")
        file.check_contents()
        check_catalog(self)
        file.check_digest()
        self.is_verified = True

    def prepare(self) -> None:
        """Computes now what look-ups and rules would compute on first use; for a server, before traffic."""
        _ = (
            self.sorted_ids,
            self.sid_item_offsets,
            self.leaf_counts,
            self.parents,
            self._tag_numbers,
        )
        if not self.has_unique_sids:
            _ = self._leaf_of_position

    @cached_property
    def sid_item_offsets(self) -> NDArray[Any]:
        """[num_sids + 1]: the item positions of SID i are [offsets[i], offsets[i + 1])."""
        if self._stored_item_offsets is not None:
            return self._stored_item_offsets
        return np.arange(self.num_sids + 1, dtype=index_dtype(self.num_sids))

    @property
    def has_unique_sids(self) -> bool:
        """Whether every servable item has a SID of its own; then a position is a SID index."""
        return self._stored_item_offsets is None

    @cached_property
    def sorted_ids(self) -> NDArray[np.int64]:
        """All item ids, ascending: int64 [num_items]. Gathered on first use (`verify` is one)."""
        ids: NDArray[np.int64] = self.item_ids[self.id_order]
        return ids

    @cached_property
    def leaf_counts(self) -> tuple[NDArray[np.int32], ...]:
        """Per level the number of SIDs below each edge: int32 [edges]. Computed on first use."""
        return sum_leaves(self.trie, np.ones(self.num_sids, np.int32))

    @cached_property
    def parents(self) -> tuple[NDArray[Any], ...]:
        """Per level the node that each edge starts at: [edges]. Computed on first use; costs the bytes of the edges.

        A look-up here touches one place of memory where a search in `offsets` touches ten, all of them cold when rules
        were just evaluated.
        """
        return tuple(range_numbers(level) for level in self.offsets)

    @property
    def _known_parents(self) -> tuple[NDArray[Any], ...] | None:
        """`parents` once they are computed: a tool that looks up a few SIDs does without."""
        return self.__dict__.get("parents")

    @cached_property
    def _leaf_of_position(self) -> NDArray[Any]:
        return range_numbers(self.sid_item_offsets)

    @cached_property
    def tags(self) -> list[str]:
        """The names of all tags, sorted."""
        return (
            []
            if self.tag_index is None
            else self.tag_index.names.take(range(len(self.tag_index.names)))
        )

    @cached_property
    def _tag_numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.tags)}

    def tag_positions(self, tag: str) -> NDArray[Any] | None:
        """The positions of the items with a tag, ascending; None when the catalogue does not know the tag."""
        number = self._tag_numbers.get(tag)
        return (
            None
            if number is None or self.tag_index is None
            else self.tag_index.positions_of(number)
        )

    def positions_of_ids(self, ids: ArrayLike) -> NDArray[np.int64]:
        """The position of each item id (int64 [n]), -1 for unknown ones."""
        wanted = np.asarray(ids, np.int64)
        first, last = int(self.sorted_ids[0]), int(self.sorted_ids[-1])
        if last - first == self.num_items - 1:  # consecutive, as row numbers are: nothing to search
            is_known = (wanted >= first) & (wanted <= last)
            place = np.where(is_known, wanted, first) - first
            return np.where(is_known, self.id_order.take(place), -1).astype(np.int64, copy=False)
        order = np.argsort(wanted)  # neighbours in the search then share cache lines
        in_order = wanted[order]
        at = np.minimum(np.searchsorted(self.sorted_ids, in_order), self.num_items - 1)
        is_known = self.sorted_ids[at] == in_order
        result = np.empty(len(wanted), np.int64)
        result[order] = np.where(is_known, self.id_order[at], -1)
        return result

    def positions_of_keys(self, keys: Sequence[str]) -> NDArray[np.int64]:
        """The position of the item with each key, -1 for unknown ones."""
        if self.key_index is None:
            return np.full(len(keys), -1, np.int64)
        return self.key_index.find(keys)

    def positions_of_sids(self, sids: ArrayLike) -> NDArray[np.int64]:
        """The SID index of each row of codes (whole numbers [n, num_levels]), -1 where no servable item has it.

        Raises:
            CatalogError: `sids` has another shape or type.
        """
        codes = np.asarray(sids)
        if codes.ndim != 2 or codes.shape[1] != self.num_levels or codes.dtype.kind not in "iu":
            raise CatalogError(
                f"SIDs must be whole numbers [n, {self.num_levels}], got shape {codes.shape} of {codes.dtype}"
            )
        return find_leaves(self.trie, codes)

    def sids_of_leaves(self, sid_index: ArrayLike) -> NDArray[np.uint32]:
        """The codes of each SID index: uint32 [n, num_levels]."""
        at = _checked(sid_index, self.num_sids, "SID index")
        return leaf_sids(self.trie, at, self._known_parents)

    def sids_of_positions(self, positions: ArrayLike) -> NDArray[np.uint32]:
        """The codes of each item, servable or not: uint32 [n, num_levels]."""
        at = _checked(positions, self.num_items, "position")
        leaves = self.sid_of_positions(at)
        if self.other_sids is None:
            return leaf_sids(self.trie, leaves, self._known_parents)
        result = np.empty((len(at), self.num_levels), np.uint32)
        is_leaf = leaves >= 0
        result[is_leaf] = leaf_sids(self.trie, leaves[is_leaf], self._known_parents)
        result[~is_leaf] = self.other_sids[at[~is_leaf] - self.num_servable]
        return result

    def sid_of_positions(self, positions: ArrayLike) -> NDArray[np.int64]:
        """The SID index of each item, -1 for items that are not servable."""
        at = _checked(positions, self.num_items, "position")
        leaves = at
        if not self.has_unique_sids:
            leaves = self._leaf_of_position[np.minimum(at, self.num_servable - 1)].astype(np.int64)
        return np.where(at < self.num_servable, leaves, -1)

    def weights_of(self, positions: ArrayLike) -> NDArray[np.float64]:
        """The weight of each item."""
        at = _checked(positions, self.num_items, "position")
        return np.zeros(len(at)) if self.weights is None else self.weights[at]

    def keys_of(self, positions: ArrayLike) -> list[str] | None:
        """The key of each item ("" where it has none); None when the catalogue has no keys."""
        at = _checked(positions, self.num_items, "position")
        return None if self.key_index is None else self.key_index.keys.take(at.tolist())

    def titles_of(self, positions: ArrayLike) -> list[str] | None:
        """The title of each item ("" where it has none); None when the catalogue has no titles."""
        at = _checked(positions, self.num_items, "position")
        return None if self.titles is None else self.titles.take(at.tolist())


def _checked(indices: ArrayLike, size: int, name: str) -> NDArray[np.int64]:
    at = np.asarray(indices, np.int64)
    if len(at) and not (int(at.min()) >= 0 and int(at.max()) < size):
        raise IndexError(f"every {name} must be in [0, {size}), got {at.min()} to {at.max()}")
    return at
