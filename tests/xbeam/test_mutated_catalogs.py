"""Damaged and forged catalogue files: refused by name, or the same in every byte of content; never searched unverified.

Damage: flipped bits, lost and moved bytes, other files' bytes. Forgery: any change to the header, the section table or a section
with every checksum and digest recomputed, which only the structural check can find. A forged file may also be a good catalogue of
other content; then it must keep what a search relies on, which is checked by walking it in plain Python.
"""

from __future__ import annotations

import copy
import json
import random
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.helpers.trial import put_on_trial, show
from tests.xbeam.catalogs import build_full, leaves, raw_header, with_header
from xgr_runtime.errors import CatalogError
from xgr_runtime.xbeam.catalog import Catalog
from xgr_runtime.xbeam.catalog_header import SectionEntry, content_digest
from xgr_runtime.xbeam.rules import TagExpression, build_rule_set, clear_exclusions

if TYPE_CHECKING:
    import collections
    from collections.abc import Callable, Iterator
    from pathlib import Path

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**48, 2**63, 10**30, 1.5, 1e308, "", "x", "<i8", "|u1", "O", [], [0], [1, 1],
    [[1]], {}, {"a": 1}, "\x1b[31m", "v" * 200, "item_ids",
)  # fmt: skip


class Forger:
    """Draws one changed file after the other from a good one."""

    def __init__(self, content: bytes, seed: int) -> None:
        self.content = content
        self._random = random.Random(seed)
        self._header = raw_header(content)
        self.damages: tuple[Callable[[], bytes], ...] = (
            self._flip, self._flip, self._cut, self._grow, self._move, self._overwrite, self._zero,
        )  # fmt: skip
        self.forgeries: tuple[Callable[[], bytes], ...] = (
            self._odd_header, self._odd_header, self._dropped, self._other_section, self._other_section,
            self._other_section, self._other_section, self._text_header, self._prefix,
        )  # fmt: skip

    def draw(self, count: int) -> list[tuple[str, bytes]]:
        """(name, content) of `count` files, half of them with checksums that fit."""
        drawn = []
        for number in range(count):
            kind = self._random.choice(self.forgeries if number % 2 else self.damages)
            drawn.append((f"{number}: {kind.__name__}", kind()))
        return drawn

    def _flip(self) -> bytes:
        data = bytearray(self.content)
        for _ in range(self._random.choice((1, 1, 2, 9))):
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return bytes(data)

    def _cut(self) -> bytes:
        return self.content[: self._random.randrange(len(self.content))]

    def _grow(self) -> bytes:
        return self.content + self._random.choice((b"\0", b"\0" * 64, self.content))

    def _move(self) -> bytes:
        at, size = self._random.randrange(len(self.content)), self._random.choice((1, 8, 64))
        moved = self.content[at : at + size]
        to = self._random.randrange(len(self.content))
        rest = self.content[:at] + self.content[at + size :]
        return rest[:to] + moved + rest[to:]

    def _overwrite(self) -> bytes:
        data, at = bytearray(self.content), self._random.randrange(len(self.content))
        noise = self._random.randbytes(self._random.choice((1, 4, 100)))
        data[at : at + len(noise)] = noise
        return bytes(data)

    def _zero(self) -> bytes:
        return bytes(len(self.content))

    def _odd_header(self) -> bytes:
        """A value somewhere in the header replaced, the digest recomputed where that is possible."""
        header = copy.deepcopy(self._header)
        place: Any = header
        while True:
            key = self._random.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if isinstance(place[key], (dict, list)) and place[key] and self._random.random() < 0.9:
                place = place[key]
                continue
            place[key] = self._random.choice(ODD)
            break
        return self._sealed(header, self.content)

    def _dropped(self) -> bytes:
        """A section named otherwise, left out or named twice."""
        header = copy.deepcopy(self._header)
        sections = header["sections"]
        number = self._random.randrange(len(sections))
        choice = self._random.randrange(4)
        if choice == 0:
            sections[number]["name"] = self._random.choice(("x", "weights", "codes_2", "\0"))
        elif choice == 1:
            del sections[number]
        elif choice == 2:
            sections.insert(number, dict(sections[number]))
        else:
            sections[number], sections[0] = sections[0], sections[number]
        return self._sealed(header, self.content)

    def _other_section(self) -> bytes:
        """Numbers of one section replaced by others that are likely to be nearly right."""
        header, data = copy.deepcopy(self._header), bytearray(self.content)
        table = [entry for entry in header["sections"] if np.prod(entry["shape"])]
        entry = self._random.choice(table)
        start = section_starts(self.content)[entry["name"]]
        array = np.frombuffer(
            self.content, entry["dtype"], int(np.prod(entry["shape"])), start
        ).copy()
        for _ in range(self._random.choice((1, 1, 2))):
            at, other = self._random.randrange(array.size), self._random.randrange(array.size)
            choice = self._random.randrange(4)
            if choice == 0:
                array[[at, other]] = array[[other, at]]
            elif choice == 1:
                array[at] = array[other]
            elif choice == 2:
                array[at] = self._random.choice((0, 1, 2, 3, 127, 255)) % 251
            else:
                raw = bytearray(array.tobytes())
                raw[self._random.randrange(len(raw))] ^= 1 << self._random.randrange(8)
                array = np.frombuffer(bytes(raw), entry["dtype"]).copy()
        data[start : start + array.nbytes] = array.tobytes()
        entry["crc32"] = zlib.crc32(array.tobytes())
        return self._sealed(header, bytes(data))

    def _text_header(self) -> bytes:
        text = json.dumps(self._header)
        at = self._random.randrange(len(text))
        choices = (
            text[:at] + text[at + 1 :],
            text[:at] + '"' + text[at:],
            "[" * 3000,
            "",
            text * 2,
            "\ufeff" + text,
        )
        return with_header(self.content, self._random.choice(choices).encode())

    def _prefix(self) -> bytes:
        """The fixed prefix with one field changed and its checksum fitting."""
        fields = list(struct.unpack("<8sIIQ", self.content[:24]))
        number = self._random.randrange(1, 4)
        bits = 32 if number < 3 else 64
        fields[number] = self._random.choice(
            (0, 1, fields[number] + 1, fields[number] - 1, 2**bits - 1)
        )
        prefix = struct.pack("<8sIIQ", *fields)
        header = self.content[32 : 32 + min(fields[2], len(self.content))]
        crc = zlib.crc32(header, zlib.crc32(prefix + bytes(8)))
        return prefix + struct.pack("<II", crc, self._random.choice((0, 0, 1))) + self.content[32:]

    def _sealed(self, header: dict[str, Any], content: bytes) -> bytes:
        """The file with this header; its digest fits where the header has the shape of one."""
        try:
            entries = [
                SectionEntry(e["name"], e["dtype"], tuple(e["shape"]), e["crc32"])
                for e in header["sections"]
            ]
            meta = header["meta"]
            sizes = (meta["num_items"], meta["num_servable"], meta["num_codes"], meta["max_fanout"])
            meta["digest"] = content_digest(1, *sizes, entries)
        except (TypeError, KeyError, AttributeError):
            pass  # no header to have a digest
        return with_header(content, json.dumps(header).encode())


def section_starts(content: bytes) -> dict[str, int]:
    """The first byte of each section of a good file."""
    header = raw_header(content)
    (header_bytes,) = struct.unpack("<I", content[12:16])
    starts, end = {}, 32 + header_bytes
    for entry in header["sections"]:
        start = end + -end % 64
        starts[entry["name"]] = start
        end = start + int(np.prod(entry["shape"])) * np.dtype(entry["dtype"]).itemsize
    return starts


def content_of(catalog: Catalog) -> dict[str, bytes]:
    assert catalog._file is not None
    return {name: section.array.tobytes() for name, section in catalog._file.sections.items()}


def walk(catalog: Catalog) -> None:
    """Everything a search and its look-ups touch, one element at a time or by name."""
    sids = leaves(catalog)
    assert len(sids) == len(set(sids)) == catalog.num_sids
    assert sids == sorted(sids)
    for sid in sids:
        assert all(catalog.token_of[level][code] >= 0 for level, code in enumerate(sid))
    positions = np.arange(catalog.num_items)
    rows = [tuple(row) for row in catalog.sids_of_positions(positions).tolist()]
    assert rows[: catalog.num_servable] == sorted(rows[: catalog.num_servable])
    assert set(rows[: catalog.num_servable]) == set(sids)
    assert catalog.positions_of_ids(catalog.item_ids).tolist() == positions.tolist()
    for texts in (catalog.keys_of(positions), catalog.titles_of(positions)):
        assert texts is None or len(texts) == catalog.num_items
    found = catalog.positions_of_keys(["k7", "ключ", "", "none"])
    assert all(-1 <= position < catalog.num_items for position in found.tolist())
    for tag in (*catalog.tags, "none"):
        rule_set = build_rule_set(catalog, TagExpression(((tag,),)))
        cleared = clear_exclusions(catalog, rule_set, positions)
        assert len(cleared.item_positions) == int(rule_set.item_alive.sum())


def outcome(path: Path, good: dict[str, bytes]) -> str:
    """What became of a file; raises for anything but a named refusal or a sound catalogue."""
    messages = []
    for is_private in (False, True):
        try:
            catalog = Catalog.open(path, is_private=is_private)
        except CatalogError as error:
            messages.append(str(error))
            continue
        assert not catalog.is_verified
        try:
            catalog.verify()
        except CatalogError as error:
            assert not catalog.is_verified
            messages.append(str(error))
            continue
        catalog.prepare()
        walk(catalog)
        messages.append("the same" if content_of(catalog) == good else "another")
    assert messages[0] == messages[1]
    message = messages[0]
    if message in ("the same", "another"):
        return message
    assert str(path) in message
    assert message.isprintable(), message
    assert len(message) < 1000
    return "refused"


def verdicts(tmp_path: Path, count: int, seed: int) -> collections.Counter[str]:
    build_full(tmp_path / "good")
    content = (tmp_path / "good").read_bytes()
    with Catalog.open(tmp_path / "good") as catalog:
        catalog.verify()
        walk(catalog)
        good = content_of(catalog)
    path = tmp_path / "changed"

    def drawn() -> Iterator[tuple[str, tuple[bool, bytes]]]:
        for name, changed in Forger(content, seed).draw(count):
            number, _, kind = name.partition(": ")
            yield kind, (bool(int(number) % 2), changed)

    def judge(case: tuple[bool, bytes]) -> str:
        is_forged, changed = case
        path.write_bytes(changed)
        found = outcome(path, good)
        assert found != "another" or is_forged
        return found

    return put_on_trial(drawn(), judge)


def test_changed_files_are_refused_or_sound(tmp_path: Path) -> None:
    counts = verdicts(tmp_path, 120, 1)
    assert counts["refused"] >= 80
    assert counts["another"] >= 1


@pytest.mark.slow
def test_thousands_of_changed_files_are_refused_or_sound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = verdicts(tmp_path, 4000, 2)
    show(capsys, "4000 changed catalogue files", counts)
    assert counts["refused"] >= 2500
