"""Static sizes of a batch. A captured graph exists per bucket; a device that captures nothing pads only a little."""

from dataclasses import dataclass

from xgr_runtime.xschedule.batch import Batch
from xgr_runtime.xschedule.capacities import Capacities


@dataclass(frozen=True)
class Bucket:
    """Padded sizes of one batch; rows has one entry per round, max_rows the most rows of one history in it."""

    num_tokens: int
    num_histories: int
    num_searches: int
    rows: tuple[int, ...]
    max_rows: tuple[int, ...]
    max_q: int
    max_kv: int
    num_pages: int


def round_up(size: int, capacity: int, *, is_coarse: bool) -> int:
    """The bucket of `size`: the next of four steps an octave (coarse), or the next multiple of 8, at most `capacity`."""
    step = 8
    if is_coarse and size > 32:
        step = 1 << max(3, (size - 1).bit_length() - 3)
    return min(capacity, -(-size // step) * step)


def bucket_of(batch: Batch, capacities: Capacities, *, is_coarse: bool) -> Bucket:
    """The bucket that holds `batch`."""

    def up(size: int, capacity: int) -> int:
        return round_up(max(size, 1), capacity, is_coarse=is_coarse)

    c = capacities
    rows_of_history = []
    for level in range(batch.num_levels):
        rows = [0] * batch.num_histories
        for history, width in zip(batch.history_of_S, batch.widths_SL[:, level], strict=True):
            rows[history] += int(width)
        rows_of_history.append(max(rows))
    longest = int(batch.kv_lens_H.max())
    return Bucket(
        num_tokens=up(len(batch.token_ids_T), c.num_tokens),
        num_histories=_power_of_two(batch.num_histories, c.num_histories),
        num_searches=_power_of_two(batch.num_searches, c.num_searches),
        rows=tuple(up(int(w.sum()), c.num_rows) for w in batch.widths_SL.T),
        max_rows=tuple(up(n, c.num_rows) for n in rows_of_history),
        max_q=up(longest, c.max_history_tokens),
        max_kv=up(longest, c.max_history_tokens),
        num_pages=_power_of_two(batch.page_table_HP.shape[1], c.num_pages_per_history),
    )


def _power_of_two(size: int, capacity: int) -> int:
    return min(capacity, 1 << (size - 1).bit_length())
