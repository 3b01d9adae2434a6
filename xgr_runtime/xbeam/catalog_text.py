"""Strings in a catalogue file: one UTF-8 blob with offsets, and a hash index for look-ups by key.

Keys are found by a 64-bit hash in a sorted table and then compared byte by byte, so a look-up costs one binary search
whatever the number of items, needs no dictionary in memory, and equal hashes are only slower, never wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from xgr_runtime.errors import CatalogError
from xgr_runtime.xbeam.trie import index_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True)
class Strings:
    """Packed strings: `offsets` (int32 or int64 [n + 1]) into `blob` (uint8, UTF-8)."""

    offsets: NDArray[Any]
    blob: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def encoded(self, index: int) -> bytes:
        return self.blob[self.offsets[index] : self.offsets[index + 1]].tobytes()

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
        try:
            self.blob.tobytes().decode()
        except UnicodeDecodeError as error:
            raise CatalogError(f"{where}: the text is not UTF-8 ({error})") from error
        if ((self.blob[starts] & 0xC0) == 0x80).any():
            raise CatalogError(f"{where}: a string starts inside a character")


def pack_strings(encoded: Sequence[bytes]) -> Strings:
    """Packs encoded strings in the given order."""
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    ends = np.cumsum(lengths)
    offsets = np.zeros(len(encoded) + 1, index_dtype(int(ends[-1]) if len(ends) else 0))
    offsets[1:] = ends
    return Strings(offsets, np.frombuffer(b"".join(encoded), np.uint8))


def hash_keys(encoded: Sequence[bytes]) -> NDArray[np.uint64]:
    """A stable 64-bit hash of each string; part of the file format."""
    digests = b"".join(blake2b(key, digest_size=8).digest() for key in encoded)
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
            in_range = int(self.order.min()) >= 0 and int(self.order.max()) < num_items
            is_right = in_range and bool(has_key[self.order].all())
            is_right = is_right and len(np.unique(self.order)) == len(self.order)
        if not is_right or (self.hashes[1:] < self.hashes[:-1]).any():
            raise CatalogError(f"{where}: the key index does not fit the keys")


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


def index_keys(encoded: Sequence[bytes]) -> KeyIndex:
    """Builds the look-up over keys by item position; empty keys are left out."""
    present = np.flatnonzero(np.fromiter(map(len, encoded), np.int64, len(encoded)))
    hashes = hash_keys([encoded[position] for position in present.tolist()])
    order = np.argsort(hashes, kind="stable")
    positions = present[order].astype(index_dtype(len(encoded)))
    return KeyIndex(pack_strings(encoded), hashes[order], positions)
