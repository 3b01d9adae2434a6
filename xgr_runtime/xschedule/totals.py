"""What the batches of an engine added up to since its start."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from xgr_runtime.xschedule.batch import Batch, BatchOutput


@dataclass
class Totals:
    """num_live_rows: parent rows expanded. num_rows_skipped: rows that early termination skipped. num_dead_beams: rows
    of the last rounds that no valid child filled. num_prefix_lookup_tokens, num_prefix_cached_tokens: tokens of all
    prompts, and how many of them the prefix cache held.
    """

    num_batches: int = 0
    num_live_rows: int = 0
    num_rows_skipped: int = 0
    num_dead_beams: int = 0
    num_prefix_lookup_tokens: int = 0
    num_prefix_cached_tokens: int = 0

    def add(self, batch: Batch, output: BatchOutput) -> None:
        """Count one batch."""
        self.num_batches += 1
        histories = batch.histories
        num_tokens = histories.num_prompt_tokens
        self.num_prefix_lookup_tokens += num_tokens
        self.num_prefix_cached_tokens += num_tokens - histories.num_scheduled_tokens
        for group, found in zip(batch.groups, output.groups, strict=True):
            self.num_live_rows += found.num_live_rows
            self.num_rows_skipped += found.num_rows_skipped
            num_rows = int(group.row_starts(group.num_levels - 1)[-1])
            self.num_dead_beams += int((found.scores_LN[-1][:num_rows] == -np.inf).sum())

    def describe(self) -> dict[str, int]:
        """The counters by name."""
        return dataclasses.asdict(self)
