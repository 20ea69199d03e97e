"""The scales that NVIDIA's threads take; tests/test_geometry.py tests where they lie."""

import pytest

from jax_mx.formats.directions import LAST
from jax_mx.formats.formats import MXFP4_E2M1
from jax_mx.formats.layouts import SCALE_LAYOUTS
from jax_mx.quantizing.kernels import geometry
from jax_mx.shipping.shipped import SHIPPED

flat = pytest.importorskip("jax_mx.quantizing.kernels.cutedsl.flat")


@pytest.mark.parametrize("layout", SCALE_LAYOUTS.values(), ids=repr)
def test_neighbours_have_a_transforms_two_blocks(layout):
    """All places of a thread block, each once; of a pair the columns 2 c and 2 c + 1 of a row."""
    for variant in SHIPPED:
        pair = variant.modes and variant.modes[0].blocks > 1
        if variant.implementation != "cutedsl" or variant.form != LAST or not pair:
            continue
        assert variant.formats == (MXFP4_E2M1,)
        entry = flat.Flat(variant, "sm_90a", layout, True)
        places = [entry.with_pairs(pairs) for pairs in range(entry.tile.blocks)]
        assert sorted(places) == [*range(entry.tile.blocks)]
        for even, odd in zip(places[::2], places[1::2], strict=True):
            if layout.is_tiled:
                (row, col), other = (geometry.place_in_tile(layout, p) for p in (even, odd))
                assert col % 2 == 0 and other == (row, col + 1)
            else:
                assert even % 2 == 0 and odd == even + 1
