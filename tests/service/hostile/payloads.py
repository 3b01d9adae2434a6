"""Request payloads as a hostile or broken caller sends them: the same ones for the same seed.

Five kinds: structured requests whose values lie on, round and far beyond every limit; bytes of such requests that were flipped,
cut, doubled, spliced or overwritten; messages written field by field on the wire without regard to the schema; plain noise;
and messages round the largest size.
"""

from __future__ import annotations

import math
import random
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xgr_runtime.service._pb.xgr.v1 import recommend_pb2 as pb

if TYPE_CHECKING:
    from tests.helpers.oracle import Catalog
    from xgr_runtime.config import LimitsConfig

INT64 = (0, 1, -1, 63, 64, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**62, 2**63 - 1, -(2**63))
UINT32 = (0, 1, 2, 7, 8, 9, 2**16, 2**31, 2**32 - 1)
ODD_TEXTS = ("", " ", "\0", "\n", "\x1b[31m", "\u202e", "\ufeff", "ключ", "\U0010ffff", "a" * 300)
ODD_TAGS = ("category", ":", "category:", "no:such", "x\ny")
KINDS = ("structured", "mutated", "wire", "noise", "size")


@dataclass(frozen=True)
class Payload:
    """The bytes of a message and what they are called where a test fails."""

    number: int
    kind: str
    data: bytes


class PayloadSource:
    """Draws payloads about one catalogue and one set of limits."""

    def __init__(self, seed: int, catalog: Catalog, limits: LimitsConfig, vocab_size: int) -> None:
        self._random = random.Random(seed)
        self._items = catalog.items
        self._tags = sorted({tag for item in catalog.items for tag in item.tags})
        self._limits = limits
        self._vocab_size = vocab_size

    def draw(self, count: int) -> list[Payload]:
        """`count` payloads of all kinds."""
        weights = (45, 30, 17, 5, 3)
        kinds = self._random.choices(KINDS, weights, k=count)
        return [
            Payload(number, kind, getattr(self, f"_{kind}")()) for number, kind in enumerate(kinds)
        ]

    def _structured(self) -> bytes:
        return self._request(0.12).SerializeToString()

    def _mutated(self) -> bytes:
        data = bytearray(self._request(0.02).SerializeToString())
        for _ in range(self._random.choice((1, 1, 1, 2, 3, 8))):
            self._mutate(data)
        return bytes(data)

    def _noise(self) -> bytes:
        return self._random.randbytes(self._random.choice((0, 1, 2, 5, 17, 64, 300, 5000)))

    def _size(self) -> bytes:
        """A good request, filled up by an unknown field to a size round the limit."""
        data = self._request(0.0).SerializeToString()
        most = self._limits.max_message_bytes
        size = most + self._random.choice((-1, 0, 1, 2, 1000, most))
        return data + _field(1000, b"x" * (size - len(data) - 2 - len(_varint(size))))

    # One request through the schema. odd: how likely each part is to be a hostile one.

    def _request(self, odd: float) -> pb.RecommendRequest:
        message = pb.RecommendRequest()
        for _ in range(self._pick(odd, (1,), (0, 2, 4))):
            getattr(self, self._random.choice(("_ids", "_keys", "_sids", "_prompt")))(message, odd)
        for _ in range(self._pick(odd / 2, (1,), (0, 2, 5))):
            self._search(message.searches.add(), odd / 3)
        message.request_id = self._pick(odd / 3, ("", "r-1", "r" * 128), ("r" * 129, *ODD_TEXTS))
        message.on_overflow = self._pick(odd / 3, (0, 1), (2, 3, -1, 2**31 - 1))
        message.on_unknown = self._pick(odd / 3, (0, 1), (2, 3, -1))
        return message

    def _pick(self, odd: float, good: tuple[Any, ...], bad: tuple[Any, ...]) -> Any:
        return self._random.choice(bad if self._random.random() < odd else good)

    def _count(self, odd: float, limit: int) -> int:
        """How long a list is: short, or round its limit."""
        short = self._random.randrange(min(30, limit))
        return int(self._pick(odd, (short,), (limit, limit + 1, 3 * limit, 0)))

    def _int64s(self, target: pb.Int64Values, values: list[int], odd: float) -> None:
        target.SetInParent()
        form = self._pick(odd, ("list", "bytes"), ("both", "cut"))
        if form in ("list", "both"):
            target.values.extend(values)
        if form != "list":
            target.values_le = struct.pack(f"<{len(values)}q", *values)
        if form == "cut":
            target.values_le = target.values_le + self._random.randbytes(self._random.randrange(8))

    def _item_ids(self, count: int, odd: float) -> list[int]:
        return [
            int(self._pick(odd, (self._random.choice(self._items).item_id,), INT64))
            for _ in range(count)
        ]

    def _ids(self, message: pb.RecommendRequest, odd: float) -> None:
        count = self._count(odd, self._limits.max_input_items)
        self._int64s(message.history_item_ids, self._item_ids(count, odd / 4), odd)

    def _prompt(self, message: pb.RecommendRequest, odd: float) -> None:
        count = self._count(odd, self._limits.max_prompt_tokens)
        tokens = [
            int(self._pick(odd / 40, (self._random.randrange(self._vocab_size),), INT64))
            for _ in range(count)
        ]
        self._int64s(message.prompt_token_ids, tokens, odd)

    def _key_list(self, count: int, odd: float) -> list[str]:
        return [
            str(self._pick(odd, (self._random.choice(self._items).key,), ODD_TEXTS))
            for _ in range(count)
        ]

    def _keys(self, message: pb.RecommendRequest, odd: float) -> None:
        count = self._count(odd, self._limits.max_input_items)
        message.history_keys.values.extend(self._key_list(count, odd / 20))
        message.history_keys.SetInParent()

    def _sids(self, message: pb.RecommendRequest, odd: float) -> None:
        sids, levels = message.history_sids, self._pick(odd, (3,), (0, 1, 2, 4, 8, 9, 2**32 - 1))
        sids.num_levels = levels
        rows = self._count(odd, self._limits.max_input_items)
        codes = [
            int(self._pick(odd / 20, (code,), UINT32))
            for _ in range(rows)
            for code in (self._random.choice(self._items).sid * 3)[: min(levels, 9)]
        ]
        form = self._pick(odd, ("list", "bytes"), ("both", "cut"))
        if form in ("list", "both"):
            sids.values.extend(codes)
        if form != "list":
            sids.values_le = struct.pack(f"<{len(codes)}I", *codes)
        if form == "cut":
            sids.values_le = sids.values_le + self._random.randbytes(self._random.randrange(13))

    def _search(self, search: pb.Search, odd: float) -> None:
        chance, limits = self._random.random, self._limits
        widths = (1, 2, limits.max_beam_width, self._random.randint(1, limits.max_beam_width))
        wrong = (0, limits.max_beam_width + 1, *UINT32)
        search.catalog = self._pick(odd, ("", "items"), (*ODD_TEXTS, "films"))
        search.catalog_version = self._pick(odd / 2, ("",), (*ODD_TEXTS, "v0"))
        if chance() < 0.4:
            search.beam_width = self._pick(odd, widths, wrong)
        if chance() < (0.4 if not search.HasField("beam_width") else odd):
            for _ in range(self._pick(odd, (3,), (1, 2, 4, 8, 9, 500))):
                search.beam_widths.append(self._pick(odd / 3, widths, wrong))
        if chance() < 0.5:
            bad = (0, limits.max_num_results + 1, 2**32 - 1)
            search.num_results = self._pick(odd, (1, 7, limits.max_num_results), bad)
        if chance() < 0.3:
            search.max_items_per_sid = self._pick(odd, (1, 3, 2**32 - 1), (0,))
        search.normalization = self._pick(odd, (0, 1, 2, 3), (4, -1, 2**31 - 1))
        search.return_level_scores = chance() < 0.3
        if chance() < 0.5:
            self._rules(search.rules, odd)

    def _rules(self, rules: pb.Rules, odd: float) -> None:
        limits, tags = self._limits, tuple(self._tags)
        for _ in range(self._pick(odd, (0, 0, 1, 2), (limits.max_tags, limits.max_tags + 1))):
            group = rules.require.add()
            for _ in range(self._pick(odd, (1, 2), (0, 3, limits.max_tags + 1))):
                group.any_of.append(self._pick(odd, tags, (*ODD_TAGS, *ODD_TEXTS)))
        for _ in range(self._pick(odd, (0, 0, 1), (2, limits.max_tags, limits.max_tags + 1))):
            rules.exclude_tags.append(self._pick(odd, tags, (*ODD_TAGS, *ODD_TEXTS)))
        if self._random.random() < 0.4:
            count = self._count(odd, limits.max_exclusions)
            self._int64s(rules.exclude_item_ids, self._item_ids(count, odd), odd)
        if self._random.random() < 0.3:
            rules.exclude_keys.extend(
                self._key_list(self._count(odd, limits.max_exclusions), odd / 5)
            )
        rules.exclude_history = self._random.random() < 0.2

    # Bytes.

    def _mutate(self, data: bytearray) -> None:
        choice, at = self._random.randrange(9), self._random.randrange(len(data) + 1)
        end = min(len(data), at + self._random.choice((1, 2, 4, 8, 40)))
        if choice <= 2 and data:
            data[at % len(data)] ^= 1 << self._random.randrange(8)
        elif choice == 3:
            data[at:at] = self._random.randbytes(self._random.choice((1, 2, 8, 100)))
        elif choice == 4:
            del data[at:end]
        elif choice == 5:
            del data[at:]
        elif choice == 6:
            data[at:at] = data[at:end] * self._random.choice((1, 2, 50))
        elif choice == 7:
            data[at:end] = b"\xff" * (end - at)
        else:
            data += self._request(0.05).SerializeToString()[at:]

    def _wire(self) -> bytes:
        return self._fields(3)

    def _fields(self, depth: int) -> bytes:
        return b"".join(self._any_field(depth) for _ in range(self._random.choice((1, 2, 3, 8))))

    def _any_field(self, depth: int) -> bytes:
        pick = self._random.choice
        number = pick((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0, 15, 16, 2**20, 2**29 - 1))
        kind = pick(
            ("varint", "varint", "text", "nested", "nested", "many", "fixed", "deep", "bad")
        )
        if kind == "varint":
            value = pick((*INT64, *UINT32, 2**64 - 1)) % 2**64
            return _varint(number << 3) + _varint(value)
        if kind == "text":
            texts = (b"\xff\xfe", b"\xed\xa0\x80", b"\xc0\x80", b"ok", b"", b"\0" * 9, b"a:b")
            return _field(number, pick(texts))
        if kind == "nested":
            return _field(number, self._fields(depth - 1) if depth else b"")
        if kind == "many":
            return _field(number, pick((b"", b"\x08\x01"))) * pick((2, 100, 5000))
        if kind == "fixed":
            wide = struct.pack("<d", pick((math.nan, math.inf, -0.0, 1e308)))
            return (
                _varint(number << 3 | 1) + wide
                if pick((0, 1))
                else _varint(number << 3 | 5) + wide[:4]
            )
        if kind == "deep":
            return pick((_varint(number << 3 | 3), _varint(6 << 3 | 3))) * pick((1, 99, 3000))
        return pick(
            (b"\x80" * 11, _varint(number << 3 | 2) + b"\xff\xff\xff\xff\x0f", b"\x07", b"\x0e")
        )


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content
