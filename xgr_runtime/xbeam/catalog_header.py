"""What a catalogue's header says, checked value by value: a checksum finds damage, not a header that was written wrong.

Everything a header names is used as a size, an index or a name in replies and logs, so each value has a type and a range
here, and nothing behind this file meets another one. Names that this format does not know are ignored.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from xgr_runtime.errors import CatalogError, shown
from xgr_runtime.files import parse_json
from xgr_runtime.xbeam.catalog_source import MAX_ITEMS
from xgr_runtime.xbeam.token_map import MAX_CODES, MAX_LEVELS

if TYPE_CHECKING:
    from collections.abc import Sequence

SECTION_DTYPES = ("|u1", "<u2", "<u4", "<u8", "<i4", "<i8", "<f8")
MAX_VERSION_LENGTH = 128
_MAX_DIMENSIONS = 2
_MAX_LENGTH = 1 << 48
_DIGEST_LENGTH = 16


@dataclass(frozen=True)
class SectionEntry:
    """One line of the section table."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    crc32: int


@dataclass(frozen=True)
class CatalogMeta:
    """The numbers and names of a catalogue; see `Catalog` for what they mean."""

    version: str
    digest: str
    num_items: int
    num_servable: int
    num_codes: tuple[int, ...]
    max_fanout: tuple[int, ...]


def is_version(text: object) -> bool:
    """Whether this can name a version: 1 to 128 printable characters, not all blank."""
    return (
        isinstance(text, str)
        and 1 <= len(text) <= MAX_VERSION_LENGTH
        and text.isprintable()
        and not text.isspace()
    )


def content_digest(
    format_version: int,
    num_items: int,
    num_servable: int,
    num_codes: Sequence[int],
    max_fanout: Sequence[int],
    table: Sequence[SectionEntry],
) -> str:
    """16 hex digits over the sizes and the sections' checksums: equal content, equal digest."""
    meta = {
        "num_items": num_items,
        "num_servable": num_servable,
        "num_codes": list(num_codes),
        "max_fanout": list(max_fanout),
    }
    content = [format_version, meta, [asdict(entry) for entry in table]]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:_DIGEST_LENGTH]


def header_error(name: str, what: str) -> CatalogError:
    """The refusal of a header that is undamaged and wrong."""
    return CatalogError(f"{name}: the header is not that of a catalogue: {what}; build it again")


def parse_header(name: str, header: bytes) -> tuple[CatalogMeta, list[SectionEntry]]:
    """The meta values and the section table of a header's JSON; `name` is the file, for messages.

    Raises:
        CatalogError: a value is missing, of another type, or out of range.
    """
    try:
        content = parse_json(header)
    except ValueError as error:
        raise header_error(name, f"it {error}") from error
    meta, table = (_take(name, content, key) for key in ("meta", "sections"))
    if not isinstance(table, list):
        raise header_error(name, f"'sections' must be a list, got {shown(table)}")
    entries = [_entry(name, entry) for entry in table]
    if len({entry.name for entry in entries}) != len(entries):
        raise header_error(name, "a section is named twice")
    return _meta(name, meta), entries


def _take(name: str, values: object, key: str) -> Any:
    if not isinstance(values, dict):
        raise header_error(name, f"an object with {key!r} expected, got {shown(values)}")
    if key not in values:
        raise header_error(name, f"it lacks {key!r}")
    return values[key]


def _meta(name: str, meta: object) -> CatalogMeta:
    version, digest = _take(name, meta, "version"), _take(name, meta, "digest")
    if not is_version(version):
        raise header_error(
            name,
            f"'version' must be 1 to {MAX_VERSION_LENGTH} printable characters, got {shown(version)}",
        )
    is_digest = isinstance(digest, str) and len(digest) == _DIGEST_LENGTH
    if not (is_digest and set(digest) <= set("0123456789abcdef")):
        raise header_error(
            name, f"'digest' must be {_DIGEST_LENGTH} hex digits, got {shown(digest)}"
        )
    num_items = _whole(name, "num_items", _take(name, meta, "num_items"), 1, MAX_ITEMS)
    num_servable = _whole(name, "num_servable", _take(name, meta, "num_servable"), 1, num_items)
    num_codes = _wholes(name, "num_codes", _take(name, meta, "num_codes"), MAX_CODES)
    max_fanout = _wholes(name, "max_fanout", _take(name, meta, "max_fanout"), MAX_CODES)
    if not 1 <= len(num_codes) <= MAX_LEVELS or len(max_fanout) != len(num_codes):
        raise header_error(
            name,
            f"1 to {MAX_LEVELS} levels expected, each with its number of codes and its largest fan-out, "
            f"got {len(num_codes)} and {len(max_fanout)} numbers",
        )
    return CatalogMeta(version, digest, num_items, num_servable, num_codes, max_fanout)


def _entry(name: str, entry: object) -> SectionEntry:
    section, dtype, shape, crc32 = (
        _take(name, entry, key) for key in ("name", "dtype", "shape", "crc32")
    )
    if not isinstance(section, str) or not section:
        raise header_error(name, f"a section's name must be a string, got {shown(section)}")
    what = f"section {shown(section)}"
    if not isinstance(dtype, str) or dtype not in SECTION_DTYPES:
        raise header_error(
            name, f"{what}: dtype {shown(dtype)} is none of {', '.join(SECTION_DTYPES)}"
        )
    if not isinstance(shape, list) or not 1 <= len(shape) <= _MAX_DIMENSIONS:
        raise header_error(
            name, f"{what}: a shape of 1 or {_MAX_DIMENSIONS} numbers expected, got {shown(shape)}"
        )
    lengths = tuple(_whole(name, f"{what}: the shape", n, 0, _MAX_LENGTH) for n in shape)
    crc32 = _whole(name, f"{what}: crc32", crc32, 0, (1 << 32) - 1)
    return SectionEntry(section, dtype, lengths, crc32)


def _whole(name: str, what: str, value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise header_error(
            name, f"{what}: a whole number in [{low}, {high}] expected, got {shown(value)}"
        )
    return value


def _wholes(name: str, what: str, values: object, high: int) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise header_error(name, f"{what}: a list of whole numbers expected, got {shown(values)}")
    return tuple(_whole(name, what, value, 1, high) for value in values)
