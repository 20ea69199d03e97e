"""`dot_general`: jax.lax.dot_general with its operands in MX, floats at both ends."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.arrays.checks import float_dtype, implementation_of
from jax_mx.lowering import primitive
from jax_mx.ops.mxarray import MXArray
from jax_mx.products.arguments import check_quantized, is_exact, operand_of
from jax_mx.products.arrangements import arrangements_of, dimensions_of
from jax_mx.products.auto import Sizes, resolved
from jax_mx.products.derivative import Static, gathered_for, is_square, parts_of, product
from jax_mx.products.implementations import named
from jax_mx.products.operand import QuantizedWeight
from jax_mx.products.recipes import AUTO, Recipe, check_frozen, recipe_beside

DimensionNumbers = Any  # as jax.lax.dot_general takes them


def dot_general(
    lhs: jax.typing.ArrayLike | MXArray,
    rhs: jax.typing.ArrayLike | MXArray | QuantizedWeight,
    dimension_numbers: DimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    *,
    recipe: Recipe | str = AUTO,
    out_sharding: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """jax.lax.dot_general with its operands in MX, differentiable in reverse mode.

    Operands that are floats are quantized as the recipe says, in blocks along the contracted
    elements, and so are those of both gradients' products. What is kept for the backward pass is
    MX too, by the name CHECKPOINT_NAME: lhs along its rows, rhs along its columns. Accumulation is
    in float32. flax takes it as `dot_general=`, with functools.partial for a recipe.

    Args:
      lhs: the activations: bfloat16, float16 or float32 of any rank; or an `MXArray` whose blocks
        run along its last contracted dimension.
      rhs: the weights: likewise; or what `Recipe.quantize_weight` returns, of any float type, which
        its gradient has too. An operand that is an `MXArray` gets no gradient. For the other one's
        gradient it counts as the floats that it stands for, in a product in bfloat16.
      dimension_numbers: as for jax.lax.dot_general. 32 divides the product of the contracted
        lengths; other lengths may be any.
      precision: one above JAX's default (HIGH, HIGHEST, "F32_F32_F32" ...) keeps FP8 tensor cores
        out, which sum with reduced precision. None is `jax.default_matmul_precision`.
      preferred_element_type: of the result: bfloat16, float16 or float32; None for that of the
        floats, bfloat16 where both are MX.
      recipe: a `Recipe`, or the name of one: "mxfp8", "mxfp8_rows", "mxfp8_windows",
        "mxfp8_hybrid", "mxfp4" or "bf16"; or "auto", the fastest that is known on the chips that
        the trace is for, see [training](training.md#the-default-recipe).
      out_sharding: of the result, see jax.lax.dot_general.
      implementation: "fp8" (the chip's FP8 product of the codes, for arrays of one scale a row),
        "cutedsl" (our kernels on Hopper: windows of 128 and more on FP8 tensor cores, others as
        bfloat16; of few rows they read the codes of rhs as they lie; not where XLA splits the
        program among devices), "cutedsl_r8" and others (these with tiles of so many rows of lhs),
        "scaled_dot" (jax.lax.scaled_dot), "dequantize" (our kernels, then jax.lax.dot_general),
        "xla" (plain, runs everywhere); or None: what was measured to be the fastest, or is known
        to be. It is taken for all three products.

    Returns:
      (batch..., free of lhs..., free of rhs...), as jax.lax.dot_general. It equals the product of
      the dequantized operands bit for bit where all products and sums are exact in float32, and no
      element stands for less than 2^-126 (see "Numbers" in docs/training.md); else
      within eps32 * k * sum |a||b| of it, before it is rounded to its type; where FP8 tensor cores
      sum ("fp8", and "cutedsl" of windows), within window * 2^-13 * sum |a||b|, where "row" counts
      as 256 (4e-4 * sum |a||b| for normal numbers, see "Numbers" in docs/training.md).

    Raises:
      TypeError: an operand or argument is of the wrong type.
      ValueError: dimension numbers that do not fit, a contracted length that 32 does not divide, an
        unknown name, an `MXArray` whose blocks run along another dimension, or one `MXArray` and a
        recipe whose forward has a Hadamard transform.
      NotImplementedError: the named implementation does not serve the call.
    """
    op = "dot_general"
    lhs, rhs = operand_of(op, "lhs", lhs), operand_of(op, "rhs", rhs)
    exact = is_exact(op, precision)
    sizes = functools.partial(_sizes, op, lhs, rhs, dimension_numbers)
    recipe = resolved(op, recipe, (lhs, rhs), sizes, implementation is None and not exact)
    recipe = recipe_beside(op, "rhs", rhs, recipe)
    keep_rows = not recipe.has_windows
    layout = arrangements_of(op, lhs, rhs, dimension_numbers, recipe.units, keep_rows)
    sides: Any = (("lhs", lhs, layout.lhs), ("rhs", rhs, layout.rhs))
    floats = [float_dtype(op, name, x.dtype) for name, x, _ in sides if not isinstance(x, MXArray)]
    if len({*floats}) > 1 and not isinstance(rhs, QuantizedWeight):
        raise TypeError(
            f"{op}: lhs is {floats[0]}, rhs is {floats[1]}; convert one to the other's type"
        )
    dtype = (*floats, np.dtype(jnp.bfloat16))[0]
    if preferred_element_type is not None:
        dtype = float_dtype(op, "preferred_element_type", preferred_element_type)
    implementation = implementation_of(op, named(op), implementation)
    for name, x, side in sides:
        check_quantized(op, name, x, side)
    frozen = [name for name, x, _ in sides if isinstance(x, MXArray)]
    if len(frozen) == 1:
        check_frozen(op, frozen[0], recipe)
    static = Static(op, layout, dtype, exact, implementation, out_sharding, recipe.chosen)
    if isinstance(lhs, MXArray) or isinstance(rhs, MXArray):  # nothing is quantized along rows
        keep = isinstance(rhs, QuantizedWeight) or is_square(rhs, recipe)
        static = static._replace(layout=layout.unpadded(keep))
    if isinstance(rhs, jax.Array):
        rhs = gathered_for(lhs, rhs, layout, recipe, out_sharding is not None)
    # In shard_map an operand, or a key, may vary over an axis that the others do not. Where all of
    # them vary, JAX sums the gradients of those others over it.
    leaves, tree = jax.tree.flatten((*parts_of(lhs), *parts_of(rhs), None, recipe))
    return product(static, *tree.unflatten(primitive.vary_alike(*leaves)))


def _sizes(op: str, lhs: Any, rhs: Any, dimension_numbers: DimensionNumbers) -> list[Sizes]:
    """Rows, columns and contracted length of a product, of an entry of its batch.

    Raises:
      TypeError, ValueError: as `dot_general` does.
    """
    contracting, batch = dimensions_of(op, lhs.shape, rhs.shape, dimension_numbers)
    rows, columns = (
        math.prod(n for i, n in enumerate(x.shape) if i not in (*summed, *lead))
        for x, summed, lead in zip((lhs, rhs), contracting, batch, strict=True)
    )
    return [(rows, columns, math.prod(lhs.shape[i] for i in contracting[0]))]
