"""Which rows, KV head and keys a program of the attention by warpgroups works on: one item, or one after another of a list.

An item is query rows of one history and one KV head. A prefill's are 128 rows, and a program has many: their list goes from the
items with the most key tiles to those with the fewest, and is dealt to the programs forth and back: they end together, whatever
the lengths. Nothing is sorted: how many items have more than a number of key tiles follows from each history's length and rows, so
a program that knows the level of its last item finds the next one with a few sums over the histories.

Each loading warp walks the list by itself; the warpgroups that compute get the numbers of an item with its queries. A program of
beams has one item, and so has one of a prefill that is small enough: its number counts tiles of rows, packed over all histories.

Letters: S histories (padded), I numbers of an item, G KV heads, X query heads of a KV head.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILE_ROWS = gl.constexpr(128)  # query rows of an item of the list
NUMBERS = gl.constexpr(16)  # of an item as they lie in shared memory
LEAD = gl.constexpr(2)  # key tiles that take about as long as the own tokens


@gluon.jit
def add(a, b):
    """Of a scan."""
    return a + b


@gluon.jit
def segments(
    start_ptr, length_ptr, num_rows, num_histories,
    X: gl.constexpr, SEGMENTS: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """(index, first row, rows, length, tiles of rows) of each history; the rows behind the last are one more, without keys."""
    layout: gl.constexpr = gl.BlockedLayout([SEGMENTS // 32], [32], [NUM_WARPS], [0])
    h_S = gl.arange(0, SEGMENTS, layout=layout)
    first_S = gl.load(start_ptr + h_S, mask=h_S <= num_histories, other=0)
    end_S = gl.load(start_ptr + h_S + 1, mask=h_S < num_histories, other=0)
    length_S = gl.load(length_ptr + h_S, mask=h_S < num_histories, other=0)
    end_S = gl.where(h_S == num_histories, num_rows, end_S)
    rows_S = gl.where(h_S <= num_histories, end_S - first_S, 0)
    return h_S, first_S, rows_S, length_S, (rows_S * X + TILE_ROWS - 1) // TILE_ROWS


@gluon.jit
def _tiles_up_to(level, rows_S, length_S, tiles_S, X: gl.constexpr, KEYS: gl.constexpr):
    """How many of a history's tiles of rows, the first ones, see at most `level` tiles of keys."""
    keys = level * KEYS
    # tile t ends at token before + (t + 1) * (TILE_ROWS // X) of its history
    before_S = length_S - rows_S
    count_S = gl.minimum(gl.maximum(keys - before_S, 0) // (TILE_ROWS // X), tiles_S)
    count_S = gl.where(length_S <= keys, tiles_S, count_S)
    return gl.where(level < 0, 0, count_S)


@gluon.jit
def first_level(length_S, KEYS: gl.constexpr):
    """The level at which the list begins."""
    return (gl.max(length_S, 0) + KEYS - 1) // KEYS


@gluon.jit
def _row_tile(
    tile, start_ptr, length_ptr, num_histories,
    X: gl.constexpr, ITEM_ROWS: gl.constexpr, SEGMENTS: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """(history, its first packed row, its packed rows, 0 where there is no such tile, its length, the tile's first query row)."""
    layout: gl.constexpr = gl.BlockedLayout([SEGMENTS // 32], [32], [NUM_WARPS], [0])
    h_S = gl.arange(0, SEGMENTS, layout=layout)
    is_history_S = h_S < num_histories
    first_S = gl.load(start_ptr + h_S, mask=is_history_S, other=0)
    end_row_S = gl.load(start_ptr + h_S + 1, mask=is_history_S, other=0)
    length_S = gl.load(length_ptr + h_S, mask=is_history_S, other=0)
    rows_S = end_row_S - first_S
    tiles_S = (rows_S * X + ITEM_ROWS - 1) // ITEM_ROWS
    end_S = gl.associative_scan(tiles_S, 0, add)
    is_it_S = (end_S > tile) & (end_S - tiles_S <= tile)  # none behind the last tile
    history = gl.sum(gl.where(is_it_S, h_S, 0), 0)
    before = gl.sum(gl.where(is_it_S, end_S - tiles_S, 0), 0)
    first_row = gl.sum(gl.where(is_it_S, first_S, 0), 0)
    rows = gl.sum(gl.where(is_it_S, rows_S, 0), 0)
    length = gl.sum(gl.where(is_it_S, length_S, 0), 0)
    return history, first_row, rows, length, (tile - before) * ITEM_ROWS


@gluon.jit
def beam_item(
    start_ptr, length_ptr, num_histories, num_splits,
    X: gl.constexpr, G: gl.constexpr, KEYS: gl.constexpr, ITEM_ROWS: gl.constexpr, SEGMENTS: gl.constexpr,
    PART: gl.constexpr, KEY_GROUPS: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """The one item of a program of beams, by NUM_WARPS warps; programs are (tile of rows, split, KV head).

    Of its key tiles those of part PART: with two KEY_GROUPS the first one has fewer, as it has the own tokens too.

    Tiles of ITEM_ROWS query rows lie packed, those of a history behind those of the one before. There may be more programs than
    tiles, as the host does not know how rows are shared out: the last ones have no rows and no keys.

    Returns:
        (history, its first packed row, its packed rows, its length, the item's first query row, KV head, split, first key tile,
        first key tile with a mask, key tiles' end).
    """
    program = gl.program_id(0)
    g = program % G
    split = program // G % num_splits
    tile = program // (G * num_splits)
    if num_histories == 1:  # a lone request has no time for a search
        history = 0
        first_row = gl.load(start_ptr)
        rows = gl.load(start_ptr + 1) - first_row
        length = gl.load(length_ptr)
        first_r = tile * ITEM_ROWS
        rows = gl.where(first_r < rows * X, rows, 0)
    else:
        history, first_row, rows, length, first_r = _row_tile(
            tile, start_ptr, length_ptr, num_histories, X, ITEM_ROWS, SEGMENTS, NUM_WARPS
        )
    num_tiles = gl.where(rows > 0, (length + KEYS - 1) // KEYS, 0)
    part = (num_tiles + num_splits - 1) // num_splits
    begin_tile = gl.minimum(split * part, num_tiles)
    end_tile = gl.minimum(begin_tile + part, num_tiles)
    if KEY_GROUPS == 2:
        lead = gl.where(split == 0, LEAD, 0)
        middle = begin_tile + gl.maximum(end_tile - begin_tile - lead, 0) // 2
        begin_tile, end_tile = (begin_tile, middle) if PART == 0 else (middle, end_tile)
    masked_tile = gl.maximum(begin_tile, gl.minimum(end_tile, length // KEYS))
    return history, first_row, rows, length, first_r, g, split, begin_tile, masked_tile, end_tile


@gluon.jit
def divided_item(
    start_ptr, length_ptr, num_rows, num_histories,
    X: gl.constexpr, G: gl.constexpr, KEYS: gl.constexpr, ITEM_ROWS: gl.constexpr, SEGMENTS: gl.constexpr,
    PART: gl.constexpr, NUM_WARPS: gl.constexpr,
):  # fmt: skip
    """The one item of a program of a prefill, by NUM_WARPS warps: a tile of rows and a KV head, of its key tiles those of part PART.

    Tiles of ITEM_ROWS query rows lie packed, the rows of no history behind all others; programs take them from the last one on, as a
    history's last rows have most keys, and the first programs start first. There may be more programs than tiles. Part 0 has fewer
    key tiles, or as many.

    Returns:
        (history, its first packed row, its packed rows, 0 where there is no such tile, its length, the item's first query row,
        KV head, first key tile, first key tile with a mask, key tiles' end).
    """
    layout: gl.constexpr = gl.BlockedLayout([SEGMENTS // 32], [32], [NUM_WARPS], [0])
    g = gl.program_id(0) % G
    h_S = gl.arange(0, SEGMENTS, layout=layout)
    first_S = gl.load(start_ptr + h_S, mask=h_S <= num_histories, other=0)
    end_row_S = gl.load(start_ptr + h_S + 1, mask=h_S < num_histories, other=0)
    length_S = gl.load(length_ptr + h_S, mask=h_S < num_histories, other=0)
    end_row_S = gl.where(h_S == num_histories, num_rows, end_row_S)
    rows_S = gl.where(h_S <= num_histories, end_row_S - first_S, 0)
    tiles_S = (rows_S * X + ITEM_ROWS - 1) // ITEM_ROWS
    end_S = gl.associative_scan(tiles_S, 0, add)
    tile = gl.sum(tiles_S, 0) - 1 - gl.program_id(0) // G
    is_it_S = (end_S > tile) & (end_S - tiles_S <= tile)  # none before the first tile
    history = gl.sum(gl.where(is_it_S, h_S, 0), 0)
    first_row = gl.sum(gl.where(is_it_S, first_S, 0), 0)
    rows = gl.sum(gl.where(is_it_S, rows_S, 0), 0)
    length = gl.sum(gl.where(is_it_S, length_S, 0), 0)
    first_r = (tile - gl.sum(gl.where(is_it_S, end_S - tiles_S, 0), 0)) * ITEM_ROWS
    before = length - rows
    end_key = gl.maximum(gl.minimum(length, before + (first_r + ITEM_ROWS) // X), 0)
    end_key = gl.where(rows > 0, end_key, 0)
    least = gl.maximum(before + first_r // X + 1, 0)
    num_tiles = (end_key + KEYS - 1) // KEYS
    middle = num_tiles // 2
    begin_tile, end_tile = (0, middle) if PART == 0 else (middle, num_tiles)
    masked_tile = gl.minimum(end_tile, gl.minimum(end_key, least) // KEYS)
    masked_tile = gl.maximum(begin_tile, masked_tile)
    return history, first_row, rows, length, first_r, g, begin_tile, masked_tile, end_tile


@gluon.jit
def find_item(
    k, level, num_items, h_S, first_S, rows_S, length_S, tiles_S, X: gl.constexpr, G: gl.constexpr, KEYS: gl.constexpr
):  # fmt: skip
    """The k-th item of this program's list; `level` is that of the item before.

    Returns:
        (level, history, its first packed row, its packed rows, 0 where there is no item, its length, the item's first query row,
        KV head, first key tile with a mask, key tiles' end).
    """
    num_programs = gl.num_programs(0)
    c = gl.program_id(0)
    c = gl.where(k % 2 == 1, num_programs - 1 - c, c)
    item = k * num_programs + c
    upper_S = _tiles_up_to(level, rows_S, length_S, tiles_S, X, KEYS)
    lower_S = _tiles_up_to(level - 1, rows_S, length_S, tiles_S, X, KEYS)
    end = num_items - G * gl.sum(lower_S, 0)  # of the items of this level
    while (level > 0) & (item >= end):
        level -= 1
        upper_S = lower_S
        lower_S = _tiles_up_to(level - 1, rows_S, length_S, tiles_S, X, KEYS)
        end = num_items - G * gl.sum(lower_S, 0)
    tiles_here_S = upper_S - lower_S
    rest = item - num_items + G * gl.sum(upper_S, 0)
    end_S = gl.associative_scan(tiles_here_S, 0, add) * G
    history = gl.sum((end_S <= rest).to(gl.int32), 0)
    is_it_S = h_S == history
    rest -= gl.sum(gl.where(is_it_S, end_S - tiles_here_S * G, 0), 0)
    tiles_here = gl.maximum(gl.sum(gl.where(is_it_S, tiles_here_S, 0), 0), 1)
    tile = gl.sum(gl.where(is_it_S, lower_S, 0), 0) + rest % tiles_here
    first_row = gl.sum(gl.where(is_it_S, first_S, 0), 0)
    rows = gl.sum(gl.where(is_it_S, rows_S, 0), 0)
    length = gl.sum(gl.where(is_it_S, length_S, 0), 0)
    g = rest // tiles_here % G
    if item >= num_items:  # the last round need not be full: no rows, no keys
        tile = 0
        rows = 0
        length = 0
        g = 0
    first_r = tile * TILE_ROWS
    before = length - rows
    end_key = gl.maximum(gl.minimum(length, before + (first_r + TILE_ROWS) // X), 0)
    least = gl.maximum(before + first_r // X + 1, 0)
    end_tile = (end_key + KEYS - 1) // KEYS
    masked_tile = gl.minimum(end_tile, gl.minimum(end_key, least) // KEYS)
    return level, history, first_row, rows, length, first_r, g, masked_tile, end_tile


@gluon.jit
def write_item(place, first_row, rows, length, first_r, g, masked_tile, end_tile):
    """By one warp, into place [NUMBERS]."""
    i_I = gl.arange(0, NUMBERS, layout=gl.BlockedLayout([1], [32], [1], [0]))
    number_I = gl.where(i_I == 0, first_row, end_tile)
    number_I = gl.where(i_I == 1, rows, number_I)
    number_I = gl.where(i_I == 2, length, number_I)
    number_I = gl.where(i_I == 3, first_r, number_I)
    number_I = gl.where(i_I == 4, g, number_I)
    number_I = gl.where(i_I == 5, masked_tile, number_I)
    place.store(number_I)


@gluon.jit
def read_item(place):
    """What `write_item` wrote, by a warpgroup; every thread reads all of it."""
    layout: gl.constexpr = gl.BlockedLayout([NUMBERS], [32], [4], [0])
    i_I = gl.arange(0, NUMBERS, layout=layout)
    number_I = place.load(layout)
    return (
        gl.sum(gl.where(i_I == 0, number_I, 0), 0),
        gl.sum(gl.where(i_I == 1, number_I, 0), 0),
        gl.sum(gl.where(i_I == 2, number_I, 0), 0),
        gl.sum(gl.where(i_I == 3, number_I, 0), 0),
        gl.sum(gl.where(i_I == 4, number_I, 0), 0),
        gl.sum(gl.where(i_I == 5, number_I, 0), 0),
        gl.sum(gl.where(i_I == 6, number_I, 0), 0),
    )
