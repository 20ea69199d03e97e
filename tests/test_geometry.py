"""Where kernels of either DSL say that bytes lie, in Python's integers; a GPU runs the whole."""

import doctest
import itertools
import math

import numpy as np
import pytest

from jax_mx.formats import directions, views
from jax_mx.formats.directions import FORMS
from jax_mx.formats.formats import BLOCK, MXFP4_E2M1, MXFP8_E4M3
from jax_mx.formats.layouts import ROW_MAJOR, SCALE_LAYOUTS, SHUFFLED_16X16
from jax_mx.quantizing.facts.variants import KERNELS
from jax_mx.quantizing.kernels import geometry
from jax_mx.quantizing.kernels.geometry import Extents, Place

TILED = [layout for layout in SCALE_LAYOUTS.values() if layout.is_tiled]
SIZES = [Extents(*size) for size in ((1, 1), (33, 5), (256, 8), (257, 9), (600, 17))]


def packed(layout, matrix):
    """The numbers of a matrix in the order of the layout's bytes; -1 where it pads."""
    size = Extents(*matrix.shape)
    down, across, _ = layout.shape(*size)
    (height, width), grow = layout.tile, (down * layout.tile[0], across * layout.tile[1])
    padded = np.full(grow, -1, np.int64)
    padded[: size.rows, : size.cols] = matrix
    split = padded.reshape(down, *layout.row_digits, across, *layout.col_digits)
    return split.transpose(views._of_memory(layout, 0)).reshape(down, across, height * width)


@pytest.mark.parametrize("layout", TILED, ids=repr)
def test_places_in_a_tile_and_back(layout):
    height, width = layout.tile
    tile = packed(layout, np.arange(height * width).reshape(layout.tile)).ravel()
    for row, col in np.ndindex(height, width):
        offset = geometry.offset_in_tile(layout, row, col)
        assert tile[offset] == row * width + col
        assert geometry.place_in_tile(layout, offset) == (row, col)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("layout", TILED, ids=repr)
def test_tiles_of_a_matrix(layout, size):
    """Their count, padding included, and for each element which one it is in."""
    tiles = geometry.tiles_of(layout, size)
    assert tiles == layout.shape(*size)[:2]
    memory = packed(layout, np.arange(math.prod(size)).reshape(size)).reshape(math.prod(tiles), -1)
    for row, col in np.ndindex(*size):
        tile = geometry.tile_of(layout, Place(0, row, col), tiles)
        assert row * size.cols + col in memory[tile]
        assert geometry.tile_of(layout, Place(3, row, col), tiles) == 3 * math.prod(tiles) + tile


def test_a_number_has_the_digits_it_is_made_of():
    for number in range(24):
        digits = geometry.digits_of(number, (2, 3, 4))
        assert digits == [*np.unravel_index(number, (2, 3, 4))]
        assert geometry.number_of(digits, (2, 3, 4)) == number


def test_places_of_values():
    """Pieces of 16 bytes of rows, in tiles of SHUFFLED_16X16."""
    rows, pieces = 48, 6
    numbers = np.repeat(np.arange(rows * pieces).reshape(rows, pieces), 16, axis=1)
    memory = packed(SHUFFLED_16X16, numbers).ravel()[::16]
    for row, piece in np.ndindex(rows, pieces):
        top, number = geometry.in_tiles_of_values(row, 16 * piece)
        assert memory[top * pieces + number] == row * pieces + piece


@pytest.mark.parametrize("form", FORMS.values(), ids=repr)
def test_scales_lie_as_the_form_says(form):
    """Beside floats of (64, 96): row-major as values lie, in tiles with the blocks as columns."""
    floats = Extents(64, 96)
    for direction in form.directions:
        rows, cols = (
            n // (BLOCK if s else 1) for n, s in zip(floats, direction.spans, strict=True)
        )
        for layout in SCALE_LAYOUTS.values():
            turned = geometry.is_turned(direction, layout)
            blocks_down = direction.blocks is directions.Blocks.SECOND
            assert turned == (blocks_down if layout.is_tiled else direction.transposed)
            shape = (cols, rows) if turned else (rows, cols)
            assert geometry.scales_shape(direction, floats, turned) == shape


@pytest.mark.parametrize("form", FORMS.values(), ids=repr)
def test_regions_cover_whole_tiles_of_scales(form):
    tile = Extents(64, 128)
    assert geometry.region_of(form, ROW_MAJOR, tile) == tile
    for layout in TILED:
        region = geometry.region_of(form, layout, tile)
        assert region.rows % tile.rows == region.cols % tile.cols == 0
        for direction in form.directions:
            shape = geometry.scales_shape(direction, region, geometry.is_turned(direction, layout))
            if direction.blocks is not directions.Blocks.SQUARE:  # which no tiles have
                assert all(n % pad == 0 for n, pad in zip(shape, layout.pad, strict=True))


@pytest.mark.parametrize("layout", TILED, ids=repr)
def test_parts_and_the_places_beyond_them_fill_tiles(layout):
    """Scales of parts lie side by side; what is beyond a part meets no scale."""
    for (pad, parts), count in itertools.product(
        itertools.product(layout.pad, (1, 2, 3)), (1, 2, 3, 4, 5, 90, 127, 128, 129)
    ):
        beyond = [
            geometry.padding_of_parts(within, part, parts, count, pad)
            for part in range(parts)
            for within in range(count, -(-count // pad) * pad)
        ]
        first, end = parts * count, -(-parts * count // pad) * pad
        assert len({*beyond}) == len(beyond) and {*range(first, end)} <= {*beyond}
        assert not beyond or min(beyond) >= first


@pytest.mark.parametrize("form", FORMS.values(), ids=repr)
def test_codes_of_a_byte_lie_along_blocks(form):
    """Square blocks, along the last axis of the array as it lies."""
    for output in geometry.outputs_of(form, (MXFP4_E2M1,) * len(form.directions)):
        along = output.blocks
        if along is directions.Blocks.SQUARE:
            along = directions.Blocks.SECOND if output.transposed else directions.Blocks.LAST
        assert output.packed == ((2, 1) if along is directions.Blocks.SECOND else (1, 2))
        assert geometry.Output(MXFP8_E4M3, output.direction).packed == (1, 1)


def launched(grid, view):
    """How many thread blocks the terms of a grid give for a buffer of this view."""
    count = 1
    for _, buffer, first, last, divisor in grid:
        n = first if buffer == -1 else math.prod(view[slice(*geometry_slice(first, last, view))])
        count *= -(-n // divisor)
    return count


def geometry_slice(first, last, view):
    """A range of dimensions, of which negative ones count from behind."""
    return first, len(view) + last if last < 0 else min(last, len(view))


@pytest.mark.parametrize("op", KERNELS)
def test_grids_have_a_thread_block_for_each_tile(op):
    """For floats (3, 160, 224), as lowering views them; tiles do not divide them."""
    rows, cols, tile = 160, 224, Extents(64, 128)
    for form in KERNELS[op]:
        if form == directions.LAST:
            continue
        down, across = form.spans
        view = (3, rows // (BLOCK if down else 1), cols // (BLOCK if across else 1))
        view += (BLOCK,) * (down + across)
        units = geometry.units_of(form)
        assert (view[1] * units.rows, view[2] * units.cols) == (rows, cols)
        for (size, (buffer, *axis)), n in zip(geometry.extents_of(form), view[1:], strict=False):
            assert (size, buffer) == (4, 0)
            assert view[slice(*geometry_slice(*axis, view))] == (n,)
        assert launched(geometry.grid_of(form, tile), view) == 3 * 3 * 2
        twice = Extents(2 * tile.rows, 2 * tile.cols)
        assert launched(geometry.grid_of(form, tile, twice), view) == 3 * 2 * 1 * 4
        divided = geometry.divide_of(form, 8)
        assert len(divided) == (down, across).count(False)
        for _, *axis, vector in divided:
            assert vector == 8
            assert view[slice(*geometry_slice(*axis, view))] in ((rows,), (cols,))


def test_the_worked_examples_of_views():
    results = doctest.testmod(views)
    assert results.attempted > 15 and not results.failed
