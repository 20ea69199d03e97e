"""`recipe="auto"`: the recipe that is known to be the fastest on the chips that a trace is for.

A call resolves it when it is traced. Then it is an ordinary recipe, which remembers what it became.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from jax_mx.formats.checks import is_symbolic
from jax_mx.formats.formats import BLOCK
from jax_mx.formats.windows import ROW, of_kernels
from jax_mx.launch import targets
from jax_mx.launch.chips import arch_of
from jax_mx.products.operand import QuantizedWeight
from jax_mx.products.recipes import (
    BF16,
    MXFP8,
    MXFP8_ROWS,
    MXFP8_WINDOWS,
    PRODUCTS,
    USES,
    Chosen,
    Recipe,
    is_auto,
    name_of,
    recipe_of,
)
from jax_mx.quantizing.mxarray import MXArray

Sizes = tuple[Any, Any, Any]  # rows of lhs, columns of rhs, how many elements are contracted

# To quantize the operands of a product takes time with their elements, and FP8 tensor cores save
# time with multiplications. So 1 / (1 / rows + 1 / columns + 1 / contracted length) decides: below
# this a product on Hopper stays in bfloat16. An H100, 2026-11-27, all three products of a layer in
# rows to those in bfloat16, of x (rows, contracted) and w (contracted, columns):
#   4096 x 1024 x 1024   455   1.84     1024 x 4096 x 4096   683   1.17
#   16384 x 1024 x 1024  496   1.57     4096 x 2048 x 2048   819   1.02
#   1024 x 2048 x 2048   512   1.78     2048 x 4096 x 4096  1024   0.90
# Where products share an operand, as those of attention do, less is enough: 16384 x 4096 x 1024
# has 780.
LEAST = 770


def resolved(
    op: str,
    recipe: Any,
    operands: Sequence[Any],
    sizes: Callable[[], Sequence[Sizes]],
    is_free: bool = True,
) -> Recipe:
    """The recipe of a dense product, for one that a caller passed.

    Args:
      op: for messages.
      recipe: a `Recipe`, a name of one, or "auto".
      operands: of the product: arrays, an `MXArray`, a `QuantizedWeight`.
      sizes: gives rows, columns and contracted length of the product, or of each of several.
      is_free: whether the caller names neither an implementation nor a precision.

    Raises:
      TypeError, ValueError: it is no recipe.
    """

    def on_hopper(in_blocks: bool) -> Recipe:
        if is_free and any(map(_is_small, sizes())):
            return BF16
        return MXFP8 if in_blocks or not is_free else MXFP8_ROWS

    return _resolved(op, recipe, operands, on_hopper)


def resolved_for_groups(op: str, recipe: Any, operands: Sequence[Any]) -> Recipe:
    """The recipe of products over groups; see `resolved`."""
    return _resolved(op, recipe, operands, lambda blocks: MXFP8 if blocks else MXFP8_WINDOWS)


def resolved_for_weights(op: str, recipe: Any, w: Any, grouped: bool = False) -> Recipe:
    """The recipe that quantizes weights once for many products; it does not say who chose it."""
    if grouped:
        concrete = resolved_for_groups(op, recipe, [w])
    else:
        concrete = resolved(op, recipe, [w], lambda: ())
    return dataclasses.replace(concrete, chosen=None)


def _resolved(
    op: str, recipe: Any, operands: Sequence[Any], on_hopper: Callable[[bool], Recipe]
) -> Recipe:
    """The recipe that a caller passed, that a weight was quantized by, or that chips want.

    `on_hopper` gives that of Hopper: from whether a frozen operand has blocks that FP8 tensor cores
    do not multiply.
    """
    if not is_auto(recipe):
        return recipe_of(op, recipe)
    for x in operands:
        if isinstance(x, QuantizedWeight):
            return x.recipe
    chips, became = targets.chips_of_trace(operands), MXFP8
    if chips and all(arch_of(chip) == "sm_90a" for chip in chips):
        frozen = [x for x in operands if isinstance(x, MXArray)]
        became = on_hopper(any(x.window == BLOCK or x.format.bits != 8 for x in frozen))
    return dataclasses.replace(became, chosen=Chosen(name_of(became), " ".join(chips)))


def recipe_beside(op: str, name: str, w: Any, recipe: Recipe) -> Recipe:
    """The recipe of a product with this weight.

    Whatever is multiplied with a `QuantizedWeight` is rotated as that was: the signs are its own.

    Raises:
      ValueError: the weight was quantized by a recipe of another format, rule or transform.
    """
    if not isinstance(w, QuantizedWeight):
        return recipe
    if jax.tree.structure(_of_codes(w.recipe)) != jax.tree.structure(_of_codes(recipe)):
        raise ValueError(f"{op}: {name} was quantized by another recipe than this product's")
    turned = {
        product: dataclasses.replace(
            getattr(recipe, product), hadamard=getattr(w.recipe, product).hadamard
        )
        for product in USES["rhs"]
    }
    return dataclasses.replace(recipe, **turned)


def _of_codes(recipe: Recipe) -> Recipe:
    """The part of a recipe that codes follow from: not how tensor cores add up."""
    products = {
        name: dataclasses.replace(getattr(recipe, name), fast_accumulation=False)
        for name in PRODUCTS
    }
    return dataclasses.replace(recipe, **products)


def _is_small(sizes: Sizes) -> bool:
    """Whether a product gains nothing, see `LEAST`.

    A trace does not know how XLA will split it: by its rows, among all devices of the mesh.
    """
    if any(map(is_symbolic, sizes)):
        return False
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    split = [name for name, axis_type in kinds if axis_type != AxisType.Manual]
    shards = math.prod(mesh.shape[name] for name in split)
    rows, *others = sizes
    return 0 in sizes or LEAST * (shards / rows + sum(1 / n for n in others)) > 1


def grouped_recipe(op: str, recipe: Any, *operands: Any) -> Recipe:
    """A recipe that grouped products may follow.

    Raises:
      TypeError, ValueError: it is none.
    """
    recipe = resolved_for_groups(op, recipe, operands)
    if of_kernels(window := recipe.window_in("wgrad")) == ROW:
        raise ValueError(
            f"{op}: the recipe's window in wgrad is {window!r}, which would span several groups' "
            "tokens; use window=128 or 256, or wgrad=jax_mx.Product(window=256)"
        )
    return recipe
