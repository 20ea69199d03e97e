"""`ragged_dot`: jax.lax.ragged_dot with its operands in MX."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_mx.formats.groups import clamped
from jax_mx.launch import private
from jax_mx.products.arguments import (
    is_exact,
    unsplit,
    warn_of_fixed_keys,
)
from jax_mx.products.derivative import product
from jax_mx.products.fallback import Fallback, check_fallback, groups_by_jax, plain_operands
from jax_mx.products.planning import planned_groups
from jax_mx.products.recipes import AUTO, Recipe, is_floats
from jax_mx.products.sides import Static


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
      preferred_element_type: of the result, see `dot_general`.
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
    check_fallback(op, fallback)
    if is_floats(recipe):
        return groups_by_jax(lhs, rhs, group_sizes, precision, preferred_element_type)
    try:
        lhs, weight, sizes, recipe, dtype = planned_groups(
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
