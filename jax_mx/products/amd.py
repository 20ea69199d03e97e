"""The implementation "flydsl": products of codes by the kernels of products/flydsl/products.py.

On gfx950 matrix cores take codes and scales as they lie; on gfx942 kernels make bfloat16 of them on
the way. A dense product is one group, or as many as the batch has entries. Groups begin anywhere.
Nobody executed these kernels on a chip: rules prefer them, as floats would be written and read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from jax_mx.formats.layouts import ROW_MAJOR, ROW_MAJOR_VALUES, Layout
from jax_mx.products import primitives as products
from jax_mx.products.contraction import (
    ROWS,
    SUMS,
    Contraction,
    Dims,
    Served,
    both_along,
    matrix,
    refused,
)
from jax_mx.quantizing import registry
from jax_mx.quantizing.facts.product_kernels import PRODUCTS, RESULTS
from jax_mx.quantizing.mxarray import MXArray
from jax_mx.quantizing.plan import ProductPlan

NAME = "flydsl"
_TILE = 128  # rows of x
_PAIRS = {product.formats for product in PRODUCTS if product.implementation == NAME}


def support(contraction: Contraction, chips: Sequence[str]) -> Served:
    """Whether kernels serve a contraction on chips."""
    if why := contraction.unsplit or _obstacle(contraction, chips):
        return refused(NAME, contraction, why)
    numbers = contraction.numbers
    op = "wgrad_fp8" if numbers.groups == SUMS else "matmul_fp8"
    formats = contraction.lhs.format, contraction.rhs.format
    plan = ProductPlan(op, formats, numbers.dtype, bool(numbers.groups), _TILE)
    answer = registry.IMPLEMENTATIONS[NAME].support(plan, chips)
    if answer.refusal:
        instead = "'dequantize' serves it"
        refusal = dataclasses.replace(answer.refusal, call=contraction.name, instead=instead)
        return Served(NAME, refusal=refusal)
    plan = dataclasses.replace(plan, implementation=NAME)  # which never falls back in silence
    return Served(NAME, answer.kernels, plan=plan)


def _obstacle(contraction: Contraction, chips: Sequence[str]) -> str:
    """Why no kernel serves a contraction; empty where one may."""
    x, w, numbers = contraction.lhs, contraction.rhs, contraction.numbers
    if not both_along(contraction):
        return "wants both operands in blocks along one contracted dimension"
    if (x.format, w.format) not in _PAIRS:
        names = ", ".join(sorted({format.name for pair in _PAIRS for format in pair}))
        return f"takes {names}, not {x.format.name} and {w.format.name}"
    if 0 in (*x.shape, *w.shape) or len(numbers.batch[0]) > 1:
        return "takes arrays with elements, and one batch dimension at most"
    if numbers.dtype.name not in RESULTS:
        return f"gives {', '.join(RESULTS)}, no {numbers.dtype.name}"
    if numbers.groups == SUMS and contraction.axes != (-1, -1):
        return "sums over groups along the last axis of both operands"
    if numbers.groups == ROWS and (contraction.axes[0] != -1 or w.axis != -1):
        return "wants groups' operands in blocks along the last axis"
    if numbers.exact and "gfx950" in chips:
        return (
            "multiplies scaled codes, whose sums AMD does not describe, and the call asks for more"
        )
    return ""


def run(contraction: Contraction, served: Served) -> jax.Array:
    """The product; operands are brought to (..., rows, bytes), as far as they do not lie so."""
    numbers, plan = contraction.numbers, served.plan
    assert plan is not None  # `support`
    batches = ((), (0,)) if numbers.groups == ROWS else numbers.batch
    pairs = zip((contraction.lhs, contraction.rhs), numbers.contracting, batches, strict=True)
    (x, *of_x), (w, *of_w) = (
        _side(mx, dims[0], batch, flat=i == 0) for i, (mx, dims, batch) in enumerate(pairs)
    )
    if numbers.groups != SUMS:  # W has matrices, one at least
        w = [a[None] if a.ndim == 2 else a for a in w]
    plan = dataclasses.replace(plan, tiled=(*of_x, *of_w))
    sizes = [contraction.sizes] if numbers.groups else []
    y = products.product([*x, *w, *sizes], plan)
    if numbers.groups:
        return y
    lengths = [contraction.lhs.shape[d] for d in (*numbers.batch[0], *contraction.free(0))]
    return y.reshape(*lengths, *(contraction.rhs.shape[d] for d in contraction.free(1)))


def _side(x: MXArray, contracted: int, batch: Dims, flat: bool) -> tuple:
    """An operand's codes and scales, and whether each of the two lies in tiles.

    `flat`: all rows form one matrix, so that its tiles are an operand's only if this is a matrix.
    """
    last = x.ndim - 1
    if len(x.block) == 2:  # its transposed array is the array transposed
        x, contracted = (x if contracted == last else x.mT).expand(-1), last
    is_whole = x.ndim - 2 == (0 if flat else len(batch))
    if is_whole and contracted == last and x.axis == -1:
        arrays = [_matrices(x.values, x.value_layout), _matrices(x.scales, x.scale_layout)]
        return arrays, x.value_layout.is_tiled, x.scale_layout.is_tiled
    in_rows = x.with_scales_in(ROW_MAJOR).with_values_in(ROW_MAJOR_VALUES)
    rows, _ = matrix(in_rows, contracted, batch)
    arrays = [rows.values, rows.scales]
    return [_merged(a) for a in arrays] if flat else arrays, False, False


def _matrices(a: jax.Array, layout: Layout) -> jax.Array:
    """Bytes that lie in tiles, with the shape of matrices of whole tiles."""
    if not layout.is_tiled:
        return a
    down, across = (n * tile for n, tile in zip(a.shape[-3:-1], layout.tile, strict=True))
    return a.reshape(*a.shape[:-3], down, across)


def _merged(a: jax.Array) -> jax.Array:
    """All rows in one matrix."""
    return a.reshape(-1, a.shape[-1])
