"""Where NVIDIA's kernels say that scales and values lie; a GPU runs the whole."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_mx.facts.formats import MXFP4_E2M1
from jax_mx.facts.layouts import SCALE_LAYOUTS, SHUFFLED_16X16
from jax_mx.facts.variants import VARIANTS

kernel = pytest.importorskip("jax_mx.kernels.cutedsl.kernel")
quantize = pytest.importorskip("jax_mx.kernels.cutedsl.quantize")
TILED = [layout for layout in SCALE_LAYOUTS.values() if layout.is_tiled]


@pytest.mark.parametrize("layout", TILED, ids=repr)
def test_places_in_tiles(layout):
    """Of each scale of several tiles, and back; how many tiles there are, with the padding."""
    height, width = layout.tile
    matrix = np.arange(height * width, dtype=np.int64).reshape(layout.tile)
    for byte in (matrix % 256, matrix // 256):  # a place has more bits than a byte
        packed = np.asarray(layout.pack(jnp.asarray(byte, jnp.uint8)))[0, 0]
        for row, col in np.ndindex(height, width):
            offset = kernel.offset_in_tile(layout, row, col)
            assert packed[offset] == byte[row, col]
            assert kernel.place_in_tile(layout, offset) == (row, col)
    for rows, cols in ((1, 1), (33, 5), (256, 8), (257, 9), (600, 17)):
        assert kernel.tiles_of(layout, rows, cols) == layout.shape(rows, cols)[:2]


def test_places_of_values():
    """Chunks of 16 bytes of rows, in tiles of SHUFFLED_16X16."""
    chunks = np.arange(48 * 6, dtype=np.uint16).reshape(48, 6)
    rows = np.repeat(chunks, 16, axis=1)
    found = [np.asarray(SHUFFLED_16X16.pack(jnp.asarray(b, jnp.uint8))).ravel()[::16]
             for b in (rows % 256, rows // 256)]  # fmt: skip
    packed = found[0] + 256 * found[1].astype(np.uint16)
    for row, chunk in np.ndindex(chunks.shape):
        top, number = kernel.in_tiles_of_values(row, chunk)
        assert packed[top * 6 + number] == chunks[row, chunk]


@pytest.mark.parametrize("layout", SCALE_LAYOUTS.values(), ids=repr)
def test_neighbours_have_a_transforms_two_blocks(layout):
    """All places of a thread block, each once; of a pair the columns 2 c and 2 c + 1 of a row."""
    for variant in VARIANTS:
        pair = variant.kinds and variant.kinds[0].blocks > 1
        if variant.implementation != "cutedsl" or variant.form != "last" or not pair:
            continue
        assert variant.formats == (MXFP4_E2M1,)
        entry = quantize.Flat(variant, "sm_90a", layout, True)
        places = [entry.with_pairs(place) for place in range(entry.tile.blocks)]
        assert sorted(places) == [*range(entry.tile.blocks)]
        for even, odd in zip(places[::2], places[1::2], strict=True):
            if layout.is_tiled:
                (row, col), other = (kernel.place_in_tile(layout, p) for p in (even, odd))
                assert col % 2 == 0 and other == (row, col + 1)
            else:
                assert even % 2 == 0 and odd == even + 1
