"""Rendering a history of semantic ids as prompt token ids. Plain numpy: the server needs no tokenizer.

A template is fixed token ids: prefix, then per item begin + SID tokens + end with a separator between items, then a
suffix. Too long a history loses its oldest whole items, never part of one.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xgr_runtime.config import TemplateConfig
from xgr_runtime.types import Int64Array


@dataclass(frozen=True)
class Template:
    """A compiled template. version identifies its ids in replies."""

    prefix: Int64Array
    item_begin: Int64Array
    item_end: Int64Array
    separator: Int64Array
    suffix: Int64Array
    version: str

    @classmethod
    def from_config(cls, config: TemplateConfig) -> "Template":
        """Build from the configured token ids; without a configured version it is a digest of them."""
        parts = (
            config.prefix_token_ids,
            config.item_begin_token_ids,
            config.item_end_token_ids,
            config.separator_token_ids,
            config.suffix_token_ids,
        )
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
        prefix, begin, end, separator, suffix = (np.asarray(part, dtype=np.int64) for part in parts)
        return cls(prefix, begin, end, separator, suffix, config.version or digest)

    @property
    def max_token_id(self) -> int:
        """The largest token id used, -1 when there is none."""
        ids = np.concatenate(
            [self.prefix, self.item_begin, self.item_end, self.separator, self.suffix]
        )
        return int(ids.max()) if ids.size else -1

    @property
    def min_token_id(self) -> int:
        """The smallest token id used, 0 when there is none."""
        ids = np.concatenate(
            [self.prefix, self.item_begin, self.item_end, self.separator, self.suffix]
        )
        return int(ids.min()) if ids.size else 0

    def num_tokens(self, num_items: int, num_levels: int) -> int:
        """Tokens of a prompt with `num_items` items."""
        per_item = self.item_begin.size + num_levels + self.item_end.size
        separators = self.separator.size * max(num_items - 1, 0)
        return int(self.prefix.size + self.suffix.size + per_item * num_items + separators)

    def max_items(self, max_tokens: int, num_levels: int) -> int:
        """The most items whose prompt fits into `max_tokens`; negative when not even the empty prompt does."""
        room = max_tokens - self.prefix.size - self.suffix.size
        if room < 0:
            return -1
        per_item = self.item_begin.size + num_levels + self.item_end.size
        return int((room + self.separator.size) // (per_item + self.separator.size))

    def render(
        self, sids: npt.NDArray[np.integer], token_of: Sequence[npt.NDArray[np.integer]]
    ) -> Int64Array:
        """Token ids int64 [num_tokens(n, L)] of the history `sids` [n, L], oldest first; every code has a token."""
        num_items, num_levels = sids.shape
        columns = [np.broadcast_to(self.item_begin, (num_items, self.item_begin.size))]
        columns += [
            token_of[level][sids[:, level]][:, None].astype(np.int64) for level in range(num_levels)
        ]
        columns += [np.broadcast_to(self.item_end, (num_items, self.item_end.size))]
        columns += [np.broadcast_to(self.separator, (num_items, self.separator.size))]
        body = np.concatenate(columns, axis=1).reshape(-1)
        if num_items:
            body = body[: body.size - self.separator.size]
        return np.concatenate([self.prefix, body, self.suffix])
