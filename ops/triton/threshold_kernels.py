"""A threshold of a search: a key that at least W of its candidates reach, so that nothing below it can be chosen.

The range of the keys is quartered at each step, until no more than an eighth of W too many reach its lower end: the threshold has
to be safe, not exact. The keys are those of all candidates, or of the best of each group of candidates. Where W groups' bests
reach a key, W candidates do, so that it is safe to count bests.
"""

import triton
import triton.language as tl

from .candidate_kernels import LARGEST, NOTHING


@triton.jit
def count_three(key_K, low, step):
    """How many keys reach low + step, + 2 step, + 3 step: three counts of 20 bits in one int64, so one reduction."""
    # no finite score has the key LARGEST, so a border beyond int32 is reached by none
    first = tl.minimum(low + step, LARGEST).to(tl.int32)
    second = tl.minimum(low + 2 * step, LARGEST).to(tl.int32)
    third = tl.minimum(low + 3 * step, LARGEST).to(tl.int32)
    count_K = (key_K >= first).to(tl.int64) + ((key_K >= second).to(tl.int64) << 20)
    return tl.sum(count_K + ((key_K >= third).to(tl.int64) << 40), axis=0)


@triton.jit
def keys_at(ptr, first, end, TILE: tl.constexpr):
    """TILE keys from `first` on, NOTHING from `end` on."""
    place_K = first + tl.arange(0, TILE)
    return tl.load(ptr + place_K, mask=place_K < end, other=NOTHING)


@triton.jit
def reached_by(first_K, key_ptr, begin, end, width, TILE: tl.constexpr, IS_ALL: tl.constexpr):
    """A key that at least `width` of a search's keys reach, or the least key; LARGEST where the width is 0.

    first_K: its first TILE keys, NOTHING where there is none. IS_ALL: there are no more, and key_ptr, begin and end are not
    looked at; else these are the first of key_ptr[begin : end], and the others are read again at each step.
    """
    most = tl.max(first_K, axis=0)
    least = tl.min(tl.where(first_K == NOTHING, LARGEST, first_K), axis=0)
    num_low = tl.sum((first_K > NOTHING).to(tl.int32), axis=0)
    if not IS_ALL:
        for at in range(begin + TILE, end, TILE):
            key_K = keys_at(key_ptr, at, end, TILE)
            most = tl.maximum(most, tl.max(key_K, axis=0))
            least = tl.minimum(least, tl.min(tl.where(key_K == NOTHING, LARGEST, key_K), axis=0))
            num_low += tl.sum((key_K > NOTHING).to(tl.int32), axis=0)
    # at least `width` keys reach low (unless all are fewer), fewer reach low + span
    low, span = least.to(tl.int64), most.to(tl.int64) + 1 - least
    is_short = num_low < width
    enough = width + width // 8
    while (span > 1) & (num_low > enough) & (width > 0) & (not is_short):
        step = (span + 3) // 4
        packed = count_three(first_K, low, step)
        num_1, num_2, num_3 = packed & 0xFFFFF, (packed >> 20) & 0xFFFFF, packed >> 40
        if not IS_ALL:
            for at in range(begin + TILE, end, TILE):
                packed = count_three(keys_at(key_ptr, at, end, TILE), low, step)
                num_1 += packed & 0xFFFFF
                num_2 += (packed >> 20) & 0xFFFFF
                num_3 += packed >> 40
        num_safe = (num_1 >= width).to(tl.int32)
        num_safe += (num_2 >= width).to(tl.int32) + (num_3 >= width).to(tl.int32)
        num_low = tl.where(num_safe == 1, num_1.to(tl.int32), num_low)
        num_low = tl.where(num_safe == 2, num_2.to(tl.int32), num_low)
        num_low = tl.where(num_safe == 3, num_3.to(tl.int32), num_low)
        low += num_safe * step
        span = tl.minimum(step, span - num_safe * step)
    threshold = tl.where(is_short, NOTHING + 1, low.to(tl.int32))
    return tl.where(width == 0, LARGEST, threshold)


@triton.jit
def threshold_of_search(
    search,
    best_ptr,
    parent_start_ptr,
    child_start_ptr,
    BESTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """A safe threshold from the bests of the groups of a search's rows."""
    begin = tl.load(parent_start_ptr + search).to(tl.int64) * BESTS
    end = tl.load(parent_start_ptr + search + 1).to(tl.int64) * BESTS
    width = tl.load(child_start_ptr + search + 1) - tl.load(child_start_ptr + search)
    first_K = keys_at(best_ptr, begin, end, TILE)
    return reached_by(first_K, best_ptr, begin, end, width, TILE, False)


@triton.jit
def threshold_kernel(
    best_ptr,
    parent_start_ptr,
    child_start_ptr,
    threshold_ptr,
    BESTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """threshold[s], for searches of so many groups that not every program that lists candidates should count them."""
    search = tl.program_id(0)
    threshold = threshold_of_search(
        search, best_ptr, parent_start_ptr, child_start_ptr, BESTS, TILE
    )
    tl.store(threshold_ptr + search, threshold)
