"""MX quantize on NVIDIA, in CuTeDSL. Matches reference.quantize bit for bit.

Two ways to cut the work: `Flat` (flat.py) for blocks along the last axis, `Tiled` (tiled.py) for
every form that needs the second-to-last one; `PreprocessedTiled` (preprocessed_tiles.py) where such
elements are rotated or rounded at random first. Rows that are normed: `Rows` and `NormedTiled`
(norms.py).

Sizes are run-time scalars; so is, in the entries for AMD's scales, whether values go into tiles. A
binary holds two entries per scale layout: the first wants aligned operands, the second takes any.
"""

from jax_mx.facts.directions import LAST
from jax_mx.facts.layouts import ScaleLayout
from jax_mx.facts.variants import Variant
from jax_mx.kernels.cutedsl.flat import Flat
from jax_mx.kernels.cutedsl.norms import NormedTiled, Rows
from jax_mx.kernels.cutedsl.preprocessed_tiles import PreprocessedTiled
from jax_mx.kernels.cutedsl.tiled import Tiled


def kernel_of(variant: Variant, arch: str, layout: ScaleLayout, aligned: bool, **tuning):
    """The kernel of a variant's entry, for scales in this layout."""
    if variant.normed:
        return (Rows if variant.form == LAST else NormedTiled)(
            variant, arch, layout, aligned, **tuning
        )
    tiled = PreprocessedTiled if variant.changes_elements else Tiled
    return (Flat if variant.form == LAST else tiled)(variant, arch, layout, aligned, **tuning)
