"""Where the bytes of a kernel lie: the arithmetic that both DSLs share.

The functions use plain operators only. They take Python's integers (`tests/test_geometry.py`) and
the numbers of both DSLs alike. Where a DSL wants typed literals, or 64 bits for what may exceed 32,
the caller says so: `literal` makes a number of a constant, `wide` one of 64 bits.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax_mx.formats.directions import Blocks, Direction, Form
from jax_mx.formats.formats import BLOCK, Format
from jax_mx.formats.layouts import SHUFFLED_16X16, Layout
from jax_mx.quantizing.facts.modes import Mode
from jax_mx.quantizing.facts.signatures import Signature

ALL = (0, 99)  # from a buffer's first dimension to its last

Number = Any  # an int, or a number of a DSL


# ---- digits: places in a tile ---
def digits_of(number: Number, factors: Sequence[int], literal: Callable = int) -> list:
    """The digits of a number, the most significant first; `factors` are their sizes."""
    below, digits = 1, []
    for factor in reversed(factors):
        digits.insert(0, number // literal(below) % literal(factor))
        below *= factor
    return digits


def number_of(digits: Sequence, factors: Sequence[int], literal: Callable = int) -> Number:
    """The number that has these digits: the inverse of `digits_of`."""
    number = literal(0)
    for digit, factor in zip(digits, factors, strict=True):
        number = number * literal(factor) + digit
    return number


def offset_in_tile(layout: Layout, row: Number, col: Number, literal: Callable = int) -> Number:
    """Where (row, col) of a tile lies in it, from the layout's own description."""
    sizes = (*layout.row_digits, *layout.col_digits)
    digits = digits_of(row, layout.row_digits, literal)
    digits += digits_of(col, layout.col_digits, literal)
    offset, stride = literal(0), 1
    for digit in reversed(layout.order):
        offset = offset + digits[digit] * literal(stride)
        stride *= sizes[digit]
    return offset


def place_in_tile(layout: Layout, offset: Number) -> tuple[Number, Number]:
    """The (row, col) of a tile that lies at this offset: the inverse of `offset_in_tile`."""
    sizes = (*layout.row_digits, *layout.col_digits)
    in_order = digits_of(offset, [sizes[digit] for digit in layout.order])
    digits = [in_order[layout.order.index(digit)] for digit in range(len(sizes))]
    split = len(layout.row_digits)
    row = number_of(digits[:split], layout.row_digits)
    return row, number_of(digits[split:], layout.col_digits)


# ---- tiles of scales and of values ---
class Place(NamedTuple):
    """One element of a batch of matrices."""

    batch: Number
    row: Number
    col: Number


class Extents(NamedTuple):
    """The size of a matrix."""

    rows: Number
    cols: Number


class Tile(NamedTuple):
    """One tile of a batch of matrices: its place, counted in tiles, and the size of each matrix."""

    batch: Number
    row: Number
    col: Number
    rows: Number
    cols: Number


def tiles_of(layout: Layout, size: Extents) -> tuple[Number, Number]:
    """How many tiles a matrix has down and across, padding included."""
    down, across = (
        (n + pad - 1) // pad * (pad // tile)
        for n, pad, tile in zip(size, layout.pad, layout.tile, strict=True)
    )
    return down, across


def tile_of(layout: Layout, place: Place, tiles: tuple, wide: Callable = int) -> Number:
    """The number of the tile that holds a place; a matrix has so many `tiles` down and across."""
    height, width = layout.tile
    tile = wide(place.batch) * wide(tiles[0]) + wide(place.row // height)
    return tile * wide(tiles[1]) + wide(place.col // width)


def padding_of_parts(within: Number, part: Number, parts: int, length: Number, pad: int) -> Number:
    """Where a place `within` a part, beyond its length, writes the padding behind all parts.

    A part may end inside a tile, where the next one begins. So the places beyond each part, up to a
    multiple of `pad`, follow each other behind the last part.
    """
    return parts * length + within - length + part * ((pad - length % pad) % pad)


def in_tiles_of_values(row: Number, byte: Number, literal: Callable = int) -> tuple[Number, Number]:
    """Where 16 bytes of values lie in SHUFFLED_16X16, those from `byte` of a row on.

    A tile holds 16 bytes of each of its rows, one row after the other, and tiles follow each other
    as their rows do. So the 16 bytes are the n-th of those that follow the tile's first row.

    Returns:
      The tile's first row, and n.
    """
    height, _ = SHUFFLED_16X16.tile
    below = row % literal(height)
    return row - below, below + byte


# ---- quantized arrays beside their floats ---
@dataclasses.dataclass(frozen=True)
class Output:
    """One quantized array of a kernel whose floats lie as a matrix."""

    format: Format
    direction: Direction
    dequantized: bool = False  # floats, like those that are quantized

    @property
    def blocks(self) -> Blocks:
        """The axes of the floats that a block spans."""
        return self.direction.blocks

    @property
    def transposed(self) -> bool:
        """Whether values and scales lie transposed."""
        return self.direction.transposed

    @property
    def packed(self) -> tuple[int, int]:
        """How many codes of a byte lie below each other in the floats, and how many beside."""
        count = 1 if self.dequantized else self.format.codes_per_byte
        return (count, 1) if self.direction.packs_down else (1, count)


def outputs_of(form: Form, formats: Sequence[Format], modes: Sequence[Mode] = ()) -> list[Output]:
    """The quantized arrays of a form, in its order; `modes`: their preprocessing, or none."""
    dequantized = [mode.dequantized for mode in modes] or [False] * len(formats)
    results = zip(formats, form.directions, dequantized, strict=True)
    return [Output(*facts) for facts in results]


def is_turned(direction: Direction, layout: Layout) -> bool:
    """Whether the matrix of scales lies transposed beside the floats.

    In tiles, blocks are the matrix's columns, whichever way values lie.
    """
    return direction.blocks is Blocks.SECOND if layout.is_tiled else direction.transposed


def scales_shape(direction: Direction, size: Extents, turned: bool) -> Extents:
    """The size of the matrix of scales beside floats of this size, as it lies."""
    rows, cols = (n // BLOCK if s else n for n, s in zip(size, direction.spans, strict=True))
    return Extents(cols, rows) if turned else Extents(rows, cols)


def region_of(form: Form, layout: Layout, tile: Extents) -> Extents:
    """The floats, a whole number of tiles, that whole tiles of scales cover, padding included."""
    rows, cols = tile
    for direction in form.directions:
        covered = (layout.pad[0], layout.pad[1] * BLOCK)
        if is_turned(direction, layout):
            covered = covered[::-1]
        if layout.is_tiled:
            rows, cols = max(rows, covered[0]), max(cols, covered[1])
    return Extents(rows, cols)


# ---- the launch rule, in the words of ffi/launch.cc ---
class Axes(NamedTuple):
    """The dimensions of the floats' view that are leading ones, rows and columns: (from, to)."""

    lead: tuple[int, int]
    rows: tuple[int, int]
    cols: tuple[int, int]


def axes_of(form: Form) -> Axes:
    """The axes of the view (..., rows, columns, 32) or, with blocks both ways, (..., 32, 32)."""
    n = sum(form.spans)
    return Axes((0, -2 - n), (-2 - n, -1 - n), (-1 - n, -n))


def units_of(form: Form) -> Extents:
    """How many rows, and columns, the view counts as one: a block's where blocks run along them."""
    return Extents(*(BLOCK if along else 1 for along in form.spans))


# The buffers of a call whose floats are made of x: x (T, columns), (T, 2, columns) or, of gates and
# ups by turns, (T, columns, 2), and another, which has a number for each row of the floats: of rows
# theirs, of an activation weights. `of`: the dimension of x that is its columns, or 0.
SOURCE, BY_ROW = 0, 1


def extents_of(form: Form, of: int = 0) -> list:
    """Scalars of 4 bytes: how many rows, and columns, the view has.

    Where the floats are made of x, a third one: how many rows x has.
    """
    if of:
        return [[4, [BY_ROW, 0, 1]], [4, [SOURCE, of, of + 1]], [4, [SOURCE, 0, 1]]]
    _, rows, cols = axes_of(form)
    return [[4, [0, *rows]], [4, [0, *cols]]]


def grid_of(form: Form, tile: Extents, region: Extents | None = None, of: int = 0) -> list:
    """The terms of a grid with one thread block for each tile of each region."""
    (lead, *axes), region = axes_of(form), region or tile
    where = [[BY_ROW, 0, 1], [SOURCE, of, of + 1]] if of else [[0, *axis] for axis in axes]
    terms = [
        [0, *extent, n // unit]
        for extent, n, unit in zip(where, region, units_of(form), strict=True)
    ]
    terms += [] if of else [[0, 0, *lead, 1]]
    tiles = region.rows // tile.rows * (region.cols // tile.cols)
    return [*terms, [0, -1, tiles, 0, 1]] if tiles > 1 else terms


# The dimensions of an x (..., rows, blocks, 32) whose rows are normed: (from, to).
ROWS, COLUMNS = (0, -2), (-2, -1)
SUMS = 2048  # of a row's squares that are taken side by side, see `jax_mx.rms_norm`


def tree(sums: list):
    """The sum of neighbours, of neighbours of these, and so on."""
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def extents_of_rows() -> list:
    """Scalars of 4 bytes: how many rows such an x has, and how many blocks a row."""
    return [[4, [SOURCE, *axis]] for axis in (ROWS, COLUMNS)]


def extents_of_matrix(of: int) -> list:
    """The same of one (blocks of rows, 32, ...) whose dimension `of` is its columns, or blocks."""
    return [[4, [SOURCE, *axis]] for axis in ((0, 1), (of, of + 1))]


NOT_READY = 0  # a factor's bits before it is there; a factor of 0 has a sign until it is read


def cleared_factors(signature: Signature) -> list:
    """The factors of rows begin as zeros, so that one that is there says so itself."""
    number = signature.number("factors")
    return [{"buffer": number, "bytes": [[number, 0, 1, 1], [-1, 4, 0, 1]], "clear": True}]


def grid_of_rows(rows: int, whole: int) -> list:
    """One thread block for each `rows` rows of x, whose number is rounded up to `whole`."""
    return [[0, SOURCE, *ROWS, whole], [0, -1, whole // rows, 0, 1]]


def grid_of_chip(resident: int) -> list:
    """So many thread blocks for each of the device's multiprocessors."""
    return [[0, -2, 0, 0, 1], [0, -1, resident, 0, 1]]


def grid_in_bands(form: Form, tile: Extents, region: Extents, of: int, ahead: tuple) -> list:
    """A thread block for each tile, in bands of one tile down, and more between the bands.

    Args:
      form: see `grid_of`.
      tile: see `grid_of`.
      region: see `grid_of`.
      of: see `grid_of`.
      ahead: the number of further thread blocks in a band, and of bands that they are ahead.
    """
    more, lag = ahead
    units = units_of(form)
    down = [0, SOURCE, 0, 1, region.rows // units.rows]
    across = [0, SOURCE, of, of + 1, region.cols // units.cols]
    bands, tiles = region.rows // tile.rows, region.cols // tile.cols
    sums = [([down], bands * more), ([down, across], bands * tiles), ([], lag * more)]
    sums.append(([across], lag * tiles))
    return [[*term, i] for i, (terms, n) in enumerate(sums) for term in (*terms, [0, -1, n, 0, 1])]


def divide_of(form: Form, vector: int, of: int = 0) -> list:
    """The terms that make vectors divide lengths; a length that counts blocks needs none."""
    if of:
        return [] if form.spans[1] else [[SOURCE, of, of + 1, vector]]
    _, *axes = axes_of(form)
    return [[0, *axis, vector] for axis, n in zip(axes, units_of(form), strict=True) if n == 1]


def length_of(buffer: int) -> list:
    """A scalar of 8 bytes: how many elements a buffer has."""
    return [8, [buffer, *ALL]]


def flat_rows(size: int = 4) -> list:
    """A scalar of `size` bytes: how many rows floats (..., rows, blocks, 32) have."""
    return [size, [0, -3, -2]]


def flat_blocks(size: int = 4) -> list:
    """A scalar of `size` bytes: how many blocks a row of floats (..., rows, blocks, 32) has."""
    return [size, [0, -2, -1]]


def flat_grid(scales: int, blocks: int) -> list:
    """One thread block for each `blocks` scales of the buffer number `scales`, with the padding."""
    return [[0, scales, *ALL, blocks]]


def flat_grid_of(floats: int, blocks: int) -> list:
    """One thread block for each `blocks` blocks of floats (..., rows, blocks, 32)."""
    return [[0, floats, 0, -1, blocks]]
