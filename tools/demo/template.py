"""The demo's vocabulary and how a history becomes tokens; the same in training and in serving.

  token 0          padding (training only)
  token 1          start: every prompt begins with it, at position 0
  tokens 2..7      unused
  tokens 8 + 64 l  the 64 codes of level l, l = 0, 1, 2

A history is the start token and the three code tokens of each of its latest items, oldest first;
nothing stands between the items and nothing behind them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .semantic_ids import NUM_CODES, NUM_LEVELS

if TYPE_CHECKING:
    from collections.abc import Sequence

PAD_TOKEN = 0
START_TOKEN = 1
FIRST_CODE_TOKEN = 8
VOCAB_SIZE = FIRST_CODE_TOKEN + NUM_LEVELS * NUM_CODES


@dataclass(frozen=True)
class Template:
    """Renders histories; at most `max_history_items` of the latest items are kept."""

    max_history_items: int

    @staticmethod
    def first_token(level: int) -> int:
        """Token of code 0 of the level."""
        return FIRST_CODE_TOKEN + level * NUM_CODES

    @staticmethod
    def item_tokens(sid: Sequence[int]) -> list[int]:
        """The three tokens of one item."""
        return [Template.first_token(level) + code for level, code in enumerate(sid)]

    def tokens(self, history: Sequence[Sequence[int]]) -> list[int]:
        """Start token and the latest items' tokens; `history` holds SIDs, oldest first."""
        latest = history[max(0, len(history) - self.max_history_items) :]
        return [START_TOKEN, *(token for sid in latest for token in self.item_tokens(sid))]
