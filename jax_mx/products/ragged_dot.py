"""`ragged_dot`: jax.lax.ragged_dot with its operands in MX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.formats.checks import float_dtype, implementation_of, is_symbolic
from jax_mx.launch import private
from jax_mx.products.arguments import (
    Weight,
    array_or_quantized,
    floats_of,
    grouped_recipe,
    is_exact,
    sizes_of,
    unsplit,
    warn_of_fixed_keys,
    weight_of,
)
from jax_mx.products.derivative import Static, product
from jax_mx.products.fallback import Fallback, as_floats, plain_operands
from jax_mx.products.implementations import named
from jax_mx.products.ragged import clamped
from jax_mx.products.recipes import AUTO, Recipe, is_floats, recipe_beside
from jax_mx.quantizing.mxarray import MXArray


def ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: jax.typing.ArrayLike,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    group_offset: None = None,
    *,
    recipe: Recipe | str = AUTO,
    implementation: str | None = None,
    fallback: Fallback = None,
) -> jax.Array:
    """jax.lax.ragged_dot with its operands in MX.

    The rows of lhs are sorted by group, and each group's rows meet a matrix of their own. Groups
    may begin anywhere and be empty; their sizes stay on the device. The function is differentiable
    in reverse mode; `dot_general` explains the quantized operands, the residuals and the products.
    For the gradient of rhs, each group is padded with zero rows to a multiple of 32, or of the
    recipe's window.

    Args:
      lhs: floats (M, K): bfloat16, float16 or float32. 32 divides K.
      rhs: floats (G, K, N), or a result of `Recipe.quantize_weight(w, contracting=1, batch=0)`. It
        may be a frozen `MXArray` whose blocks run along the contracted axis: (G, K, N), or (G, N,
        K) with axis -1; in square blocks (G, K, N).
      group_sizes: integers (G,), the number of rows of each group. Rows behind the last group give
        0. Sizes beyond the rows of lhs do not count, and negative sizes are 0.
      precision: see `dot_general`.
      preferred_element_type: of the result: bfloat16, float16 or float32; the type of lhs by
        default.
      group_offset: None; the argument exists for JAX's signature.
      recipe: the rule for floats, see `dot_general`. The windows "row" and "shard" of wgrad are
        refused, so `MXFP8_ROWS` is; take `MXFP8_WINDOWS`.
      implementation: None takes the fastest one that is measured or known. "xla" is plain and runs
        everywhere. "cutedsl" has our kernels on Hopper; "cutedsl_r8" and its kin fix the rows in a
        tile, and do not serve gradients of rhs. "flydsl" has our kernels on AMD's chips, "tcgen05"
        our kernel on Blackwell. After dequantizing, "blackwell" and "pallas" take JAX's Pallas
        kernels on Blackwell and Hopper, and "dequantize" takes jax.lax.ragged_dot.
      fallback: see `dot_general`.

    Returns:
      (M, N).

    Raises:
      TypeError: an operand or argument is of the wrong type.
      ValueError: shapes that do not fit, lengths that 32 does not divide, an unknown name.
      NotImplementedError: the named implementation does not serve the call; or a group_offset.
    """
    op = "ragged_dot"
    if group_offset is not None:
        raise NotImplementedError(f"{op}: group_offset must be None; slice rhs and group_sizes")
    if is_floats(recipe):
        a, b = as_floats(lhs, rhs)
        if isinstance(rhs, MXArray) and len(rhs.block) == 1 and rhs.axis % 3 == 2:
            b = jnp.swapaxes(b, 1, 2)
        sizes = jnp.asarray(group_sizes)
        return jax.lax.ragged_dot(a, b, sizes, precision, preferred_element_type)
    try:
        lhs, weight, sizes, recipe, dtype = planned(
            op, lhs, rhs, group_sizes, preferred_element_type, recipe, implementation
        )
    except (TypeError, ValueError) as error:
        plain = plain_operands(op, fallback, (lhs, rhs), recipe, implementation, error)
        wanted = preferred_element_type or plain.dtype
        a, b = plain.operands
        return jax.lax.ragged_dot(a, b, jnp.asarray(group_sizes), precision, wanted)
    if vars(recipe)["dgrad"].rounding or vars(recipe)["wgrad"].rounding:
        warn_of_fixed_keys(op, recipe)
    static = Static(op, None, dtype, is_exact(op, precision), implementation, chosen=recipe.chosen)
    unsplit(op, lhs, weight.floats, weight.quantized, sizes)
    operands = (lhs, None, weight.floats, weight.quantized, clamped(sizes, lhs.shape[0]))
    leaves, tree = jax.tree.flatten((*operands, recipe))
    return product(static, *tree.unflatten(private.vary_alike(*leaves)))[:, : weight.columns]


def planned(
    op: str,
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    preferred: Any,
    recipe: Any,
    implementation: Any,
) -> tuple[jax.Array, Weight, jax.Array, Recipe, np.dtype]:
    """Rows, a matrix a group, sizes, the recipe and the result's type, checked.

    Raises:
      TypeError, ValueError: as `ragged_dot` does.
    """
    rhs = array_or_quantized(op, "rhs", rhs)
    recipe = grouped_recipe(op, recipe, lhs, rhs)
    recipe = recipe_beside(op, "rhs", rhs, recipe)
    lhs = floats_of(op, "lhs", lhs, 2, recipe.units.forward)
    weight = weight_of(op, "rhs", rhs, lhs.shape[1], recipe)
    sizes = sizes_of(op, group_sizes, weight.groups)
    if not is_symbolic(lhs.shape[0]) and lhs.shape[0] > jnp.iinfo(jnp.int32).max:
        raise ValueError(
            f"{op}: lhs has {lhs.shape[0]} rows, more than int32 counts, as group_sizes are; split "
            "the rows"
        )
    dtype = lhs.dtype
    if preferred is not None:
        dtype = float_dtype(op, "preferred_element_type", preferred)
    implementation_of(op, named(op), implementation)
    return lhs, weight, sizes, recipe, dtype
