"""MX quantize on AMD, in FlyDSL. Matches reference.quantize bit for bit.

Two ways to cut the work, as in cutedsl/quantize.py: `Flat` (flat.py) for blocks along the
last axis, `Tiled` (tiled.py) for every form that needs the second-to-last one. Lanes that share
blocks share them out, so that a scale is computed once. In `PreprocessedFlat` and
`PreprocessedTiled` (preprocessed_tiles.py), the same with more arithmetic, a lane has whole ones.

Sizes are run-time scalars. So is, for a result whose blocks end its rows, whether values go into
the tiles of SHUFFLED_16X16: these move no less than 16 bytes, which is what a lane stores at once.
A binary holds two entries per scale layout: the first wants aligned operands, the second takes any.
"""

from jax_mx.formats.directions import LAST
from jax_mx.formats.layouts import ScaleLayout
from jax_mx.quantizing.facts.variants import Variant
from jax_mx.quantizing.kernels.flydsl.flat import Flat, PreprocessedFlat
from jax_mx.quantizing.kernels.flydsl.preprocessed_tiles import PreprocessedTiled
from jax_mx.quantizing.kernels.flydsl.tiled import Tiled


def kernel_of(variant: Variant, arch: str, layout: ScaleLayout, aligned: bool):
    """The kernel of a variant's entry, for scales in this layout."""
    flat, tiled = Flat, Tiled
    if variant.changes_elements:
        flat, tiled = PreprocessedFlat, PreprocessedTiled
    return (flat if variant.form == LAST else tiled)(variant, arch, layout, aligned)
