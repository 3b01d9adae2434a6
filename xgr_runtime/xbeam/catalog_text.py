"""Strings in a catalogue file: one UTF-8 blob with offsets, and a hash index for look-ups by key.

Keys are found by a 64-bit hash in a sorted table and then compared byte by byte, so a look-up costs one binary search
whatever the number of items, needs no dictionary in memory, and equal hashes are only slower, never wrong.

The checks run beside traffic: what would keep the interpreter's lock for long is done in pieces.
"""

from __future__ import annotations

import codecs
import time
from array import array
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from xgr_runtime.errors import CatalogError
from xgr_runtime.xbeam.trie import index_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

_CHUNK_STRINGS = 1 << 14
_CHUNK_BYTES = 1 << 19


@dataclass(frozen=True)
class Strings:
    """Packed strings: `offsets` (int32 or int64 [n + 1]) into `blob` (uint8, UTF-8)."""

    offsets: NDArray[Any]
    blob: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def encoded(self, index: int) -> bytes:
        return self.blob[self.offsets[index] : self.offsets[index + 1]].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        """The encoded strings one after the other, without all of them in memory at once."""
        blob = self.blob.data
        for first in range(0, len(self), _CHUNK_STRINGS):
            ends = self.offsets[first : first + _CHUNK_STRINGS + 1].tolist()
            for start, end in pairwise(ends):
                yield bytes(blob[start:end])

    def take(self, indices: Sequence[int] | NDArray[Any]) -> list[str]:
        """The strings at `indices`."""
        return [self.encoded(int(index)).decode() for index in indices]

    def check(self, where: str) -> None:
        """Checks offsets and UTF-8, also at every border; raises CatalogError."""
        if (
            self.offsets[0] != 0
            or self.offsets[-1] != len(self.blob)
            or (np.diff(self.offsets) < 0).any()
        ):
            raise CatalogError(f"{where}: string offsets must rise from 0 to {len(self.blob)}")
        starts = self.offsets[:-1][self.offsets[:-1] < len(self.blob)]
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            for first in range(0, len(self.blob), _CHUNK_BYTES):
                decoder.decode(self.blob.data[first : first + _CHUNK_BYTES])
                time.sleep(
                    0
                )  # lets go of the interpreter's lock, which others otherwise get after 5 ms
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise CatalogError(f"{where}: the text is not UTF-8 ({error})") from error
        if ((self.blob[starts] & 0xC0) == 0x80).any():
            raise CatalogError(f"{where}: a string starts inside a character")


class StringBuilder:
    """Strings under construction: their bytes and lengths, nothing per string beside them."""

    def __init__(self) -> None:
        self.blob = bytearray()
        self.lengths = array("q")

    def append(self, encoded: bytes) -> None:
        self.blob += encoded
        self.lengths.append(len(encoded))

    def extend(self, encoded: Sequence[bytes]) -> None:
        self.blob += b"".join(encoded)
        self.lengths.extend(map(len, encoded))

    def strings(self) -> Strings:
        """What was appended so far. Nothing can be appended afterwards: the bytes are shared, not copied."""
        lengths = np.frombuffer(self.lengths, np.int64) if self.lengths else np.zeros(0, np.int64)
        blob = np.frombuffer(self.blob, np.uint8) if self.blob else np.zeros(0, np.uint8)
        return Strings(_offsets_of(lengths), blob)


def _offsets_of(lengths: NDArray[np.int64]) -> NDArray[Any]:
    """Where each string starts, and the end of the last one."""
    ends = np.cumsum(lengths)
    offsets = np.zeros(len(lengths) + 1, index_dtype(int(ends[-1]) if len(ends) else 0))
    offsets[1:] = ends
    return offsets


def pack_strings(encoded: Iterable[bytes]) -> Strings:
    """Packs encoded strings in the given order."""
    builder = StringBuilder()
    for text in encoded:
        builder.append(text)
    return builder.strings()


def gather_strings(strings: Strings, order: NDArray[np.int64]) -> Strings:
    """The strings at `order`, packed in that order; needs little memory beside the result."""
    starts = strings.offsets[:-1]
    offsets = _offsets_of(np.diff(strings.offsets)[order].astype(np.int64))
    total = int(offsets[-1])
    blob = np.empty(total, np.uint8)
    inner = np.searchsorted(offsets, np.arange(_CHUNK_BYTES, total, _CHUNK_BYTES))
    for first, end in pairwise(np.unique([0, *inner, len(order)]).tolist()):
        ends = offsets[first : end + 1].astype(np.int64)
        shift = np.repeat(starts[order[first:end]] - ends[:-1], np.diff(ends))
        blob[ends[0] : ends[-1]] = strings.blob[shift + np.arange(ends[0], ends[-1])]
    return Strings(offsets, blob)


def hash_keys(encoded: Iterable[bytes]) -> NDArray[np.uint64]:
    """A stable 64-bit hash of each string; part of the file format."""
    digests = bytearray()
    for key in encoded:
        digests += blake2b(key, digest_size=8).digest()
    return np.frombuffer(digests, "<u8").astype(np.uint64)


@dataclass(frozen=True)
class KeyIndex:
    """Keys by item position ("" = the item has none) with `hashes` (sorted) and the `order` (positions) they came from."""

    keys: Strings
    hashes: NDArray[np.uint64]
    order: NDArray[Any]

    def find(self, keys: Sequence[str]) -> NDArray[np.int64]:
        """The position of each key, -1 for unknown ones."""
        encoded = [key.encode("utf-8", "surrogatepass") for key in keys]
        wanted = hash_keys(encoded)
        first = np.searchsorted(self.hashes, wanted).tolist()
        result = np.full(len(keys), -1, np.int64)
        for row, (key, start) in enumerate(zip(encoded, first, strict=True)):
            candidate = start
            while candidate < len(self.hashes) and self.hashes[candidate] == wanted[row]:
                position = int(self.order[candidate])
                if self.keys.encoded(position) == key:
                    result[row] = position
                    break
                candidate += 1
        return result

    def check(self, num_items: int, where: str) -> None:
        """Checks the strings and the index over them; raises CatalogError."""
        self.keys.check(f"{where}: keys")
        has_key = np.diff(self.keys.offsets) > 0
        is_right = len(self.keys) == num_items and len(self.order) == len(self.hashes) == int(
            has_key.sum()
        )
        if is_right and len(self.order):
            is_right = int(self.order.min()) >= 0 and int(self.order.max()) < num_items
            is_right = is_right and self._names_each_once(has_key)
        if not is_right or (self.hashes[1:] < self.hashes[:-1]).any():
            raise CatalogError(f"{where}: the key index does not fit the keys")

    def _names_each_once(self, has_key: NDArray[np.bool_]) -> bool:
        """Whether `order` holds every position with a key once. By marks: `np.unique` takes a hundred times as long and
        keeps the interpreter's lock, so that a load would stall the requests beside it.
        """
        is_named = np.zeros(len(has_key), np.bool_)
        is_named[self.order] = True
        return bool((is_named == has_key).all()) and len(self.order) == int(is_named.sum())


@dataclass(frozen=True)
class TagIndex:
    """Tags (sorted names) and, tag after tag, the ascending `positions` of the items that have it."""

    names: Strings
    offsets: NDArray[np.int64]
    positions: NDArray[Any]

    def positions_of(self, tag: int) -> NDArray[Any]:
        return self.positions[self.offsets[tag] : self.offsets[tag + 1]]

    def check(self, num_items: int, where: str) -> None:
        """Checks names, offsets and positions; raises CatalogError."""
        self.names.check(f"{where}: tags")
        names = self.names.take(range(len(self.names)))
        if sorted(set(names)) != names or len(names) + 1 != len(self.offsets):
            raise CatalogError(f"{where}: the tag names must be sorted and have a range each")
        if not self._has_rising_positions(num_items):
            raise CatalogError(f"{where}: the positions of a tag must rise and be in range")

    def _has_rising_positions(self, num_items: int) -> bool:
        offsets, positions = self.offsets, self.positions
        if offsets[0] != 0 or offsets[-1] != len(positions) or (np.diff(offsets) < 0).any():
            return False
        if not len(positions):
            return True
        is_rising = positions[1:] > positions[:-1]
        borders = offsets[1:-1]
        is_rising[borders[(borders > 0) & (borders < len(positions))] - 1] = True
        return bool(is_rising.all() and positions.min() >= 0 and positions.max() < num_items)


def index_keys(keys: Strings) -> KeyIndex:
    """Builds the look-up over keys by item position; empty keys are left out."""
    present = np.flatnonzero(np.diff(keys.offsets))
    hashes = hash_keys(key for key in keys if key)
    order = np.argsort(hashes, kind="stable")
    positions = present[order].astype(index_dtype(len(keys)))
    return KeyIndex(keys, hashes[order], positions)


def equal_keys(index: KeyIndex) -> list[list[int]]:
    """The positions of every key that several items have, rising; usually there is none."""
    is_start = np.ones(len(index.hashes) + 1, np.bool_)
    is_start[1:-1] = index.hashes[1:] != index.hashes[:-1]
    starts = np.flatnonzero(is_start)
    groups = []
    for number in np.flatnonzero(np.diff(starts) > 1).tolist():
        by_key: dict[bytes, list[int]] = {}
        for position in np.sort(index.order[starts[number] : starts[number + 1]]).tolist():
            by_key.setdefault(index.keys.encoded(position), []).append(position)
        groups += [positions for positions in by_key.values() if len(positions) > 1]
    return groups
