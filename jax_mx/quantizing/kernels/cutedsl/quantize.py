"""MX quantize on NVIDIA, in CuTeDSL. Matches reference.quantize bit for bit.

Two ways to cut the work: `Flat` (flat.py) for blocks along the last axis, `Tiled` (tiled.py) for
every form that needs the second-to-last one; `PreprocessedTiled` (preprocessed_tiles.py) where such
elements are rotated or rounded at random first. A source may have kernels of its own, in its
`modules`. Along the last axis in windows of whole rows: `WholeRows` (whole_rows.py).

Sizes are run-time scalars; so is, in the entries for AMD's scales, whether values go into tiles. A
binary holds two entries per scale layout: the first wants aligned operands, the second takes any.
"""

import importlib

from jax_mx.formats.directions import LAST
from jax_mx.formats.layouts import ScaleLayout
from jax_mx.quantizing.facts.variants import Variant
from jax_mx.quantizing.kernels.cutedsl.flat import Flat
from jax_mx.quantizing.kernels.cutedsl.preprocessed_tiles import PreprocessedTiled
from jax_mx.quantizing.kernels.cutedsl.tiled import Tiled
from jax_mx.quantizing.kernels.cutedsl.whole_rows import WholeRows


def kernel_of(variant: Variant, arch: str, layout: ScaleLayout, aligned: bool, **tuning):
    """The kernel of a variant's entry, for scales in this layout."""
    flat, tiled = Flat, PreprocessedTiled if variant.changes_elements else Tiled
    if module := variant.source.modules.get("cutedsl"):
        flat, tiled = importlib.import_module(module).KERNELS
    flat = WholeRows if variant.finds_amaxes else flat
    return (flat if variant.form == LAST else tiled)(variant, arch, layout, aligned, **tuning)
