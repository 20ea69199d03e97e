"""The implementation "flydsl": products of codes by the kernels of kernels/flydsl/products.py.

On gfx950 matrix cores take codes and scales as they lie; on gfx942 kernels make bfloat16 of them on
the way. A dense product is one group, or as many as the batch has entries. Groups begin anywhere.
Nobody executed these kernels on a chip: rules prefer them, as floats would be written and read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax_mx.facts import chips as chip_table
from jax_mx.facts.product_kernels import PRODUCTS, RESULTS
from jax_mx.lowering import registry
from jax_mx.lowering.plan import ProductPlan
from jax_mx.products.contraction import ROWS, SUMS, Contraction, Served, both_along, refused

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
    found = registry.IMPLEMENTATIONS[NAME].support(plan, chips)
    if found.refusal:
        instead = "'dequantize' serves it"
        refusal = dataclasses.replace(found.refusal, call=contraction.op, instead=instead)
        return Served(NAME, refusal=refusal)
    plan = dataclasses.replace(plan, implementation=NAME)  # which never falls back in silence
    return Served(NAME, found.kernels, plan=plan)


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
        return "multiplies scaled codes, whose sums AMD does not describe, and the call asks for more"
    return ""


def preferred(contraction: Contraction, platform: str, chips: Sequence[str]) -> bool:
    """Whether a rule prefers kernels: on all of AMD's chips."""
    del contraction, platform
    return bool(chips) and all(chip in chip_table.chips_of(NAME) for chip in chips)
