"""`ragged_dot`: jax.lax.ragged_dot with its operands in MX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_mx.arrays.checks import float_dtype, implementation_of, is_symbolic
from jax_mx.lowering import primitive
from jax_mx.products.arguments import (
    array_or_quantized,
    floats_of,
    grouped_recipe,
    is_exact,
    sizes_fit,
    unsplit,
    weight_of,
)
from jax_mx.products.derivative import Static, product
from jax_mx.products.implementations import named
from jax_mx.products.recipes import AUTO, Recipe, recipe_beside
from jax_mx.reference.ragged import clamped


def ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: jax.Array,
    *,
    recipe: Recipe | str = AUTO,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """jax.lax.ragged_dot with its operands in MX.

    The rows of lhs are sorted by group, and each group's rows meet a matrix of their own. Groups
    may begin anywhere and be empty; their sizes stay on the device. Differentiable in reverse mode;
    see `dot_general` for what is quantized, kept and multiplied. For the gradient of rhs, each
    group is padded with zero rows to a multiple of 32, or of the recipe's window.

    Args:
      lhs: floats (M, K): bfloat16, float16 or float32. 32 divides K.
      rhs: floats (G, K, N); or what `Recipe.quantize_weight(w, contracting=1, batch=0)` makes of
        them; or a frozen `MXArray` whose blocks run along the contracted axis, (G, K, N) or
        (G, N, K): its axis says which; in square blocks (G, K, N).
      group_sizes: int32 (G,), how many rows each group has. Rows behind the last group's give 0;
        of more rows than lhs has, those beyond do not count, and negative sizes are 0.
      recipe: how floats are quantized, see `dot_general`; a window "row" of wgrad is refused.
      precision: see `dot_general`.
      preferred_element_type: of the result: bfloat16, float16 or float32; that of lhs by default.
      implementation: "cutedsl" (our kernels on Hopper), "cutedsl_r8" and others (these with tiles
        of so many rows; not for gradients of rhs), "pallas" (JAX's Pallas kernels on Hopper, after
        dequantizing), "dequantize" (jax.lax.ragged_dot, likewise), "xla" (plain, runs everywhere);
        or None: what was measured to be the fastest, or is known to be.

    Returns:
      (M, N).

    Raises:
      TypeError: an operand or argument is of the wrong type.
      ValueError: shapes that do not fit, lengths that 32 does not divide, an unknown name.
      NotImplementedError: the named implementation does not serve the call.
    """
    op = "ragged_dot"
    rhs = array_or_quantized(op, "rhs", rhs)
    recipe = grouped_recipe(op, recipe, lhs, rhs)
    recipe = recipe_beside(op, "rhs", rhs, recipe)
    lhs = floats_of(op, "lhs", lhs, 2, recipe.units.forward)
    dtype = lhs.dtype
    weight = weight_of(op, "rhs", rhs, lhs.shape[1], recipe)
    sizes_fit(op, group_sizes, weight.groups)
    if not is_symbolic(lhs.shape[0]) and lhs.shape[0] > jnp.iinfo(jnp.int32).max:
        raise ValueError(
            f"{op}: lhs has {lhs.shape[0]} rows, more than int32 counts, as group_sizes are; split "
            "the rows"
        )
    if preferred_element_type is not None:
        dtype = float_dtype(op, "preferred_element_type", preferred_element_type)
    implementation = implementation_of(op, named(op), implementation)
    shared = (is_exact(op, precision), implementation)
    static = Static(op, None, dtype, *shared, chosen=recipe.chosen)
    unsplit(op, lhs, rhs, group_sizes)
    operands = (lhs, None, weight.floats, weight.quantized, clamped(group_sizes, lhs.shape[0]))
    leaves, tree = jax.tree.flatten((*operands, recipe))
    return product(static, *tree.unflatten(primitive.vary_alike(*leaves)))[:, : weight.columns]
