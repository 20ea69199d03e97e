"""`can_multiply`: whether MX takes a product, and why not."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_mx.products.fallback import as_floats, by_jax, groups_by_jax
from jax_mx.products.planning import numbers_of, planned, planned_groups, two
from jax_mx.products.recipes import AUTO, Recipe, is_floats


def can_multiply(
    lhs: Any,
    rhs: Any,
    how: Any,
    *,
    recipe: Recipe | str = AUTO,
) -> tuple[bool, str]:
    """Whether MX takes a product of these operands, without computing it.

        can, why_not = jax_mx.can_multiply(x, w, "bsd,df->bsf")

    `dot_general`, `einsum` and `ragged_dot` refuse the same operands, in these words; with
    `fallback="floats"` they multiply them as floats. A named implementation may take fewer. How
    operands lie on a mesh with explicit axes is not looked at: JAX may refuse it.

    Args:
      lhs: an array, an `MXArray`, or `jax.ShapeDtypeStruct`.
      rhs: the same, or a `QuantizedWeight`.
      how: dimension numbers of `dot_general`, subscripts of `einsum`, or the sizes of
        `ragged_dot`'s groups, an array or a `jax.ShapeDtypeStruct`.
      recipe: of the product. With "floats" JAX multiplies, and shapes must fit as it wants them. An
        unknown recipe is a reason, too.

    Returns:
      (True, "") or (False, the reason).
    """

    def of_groups(lhs: Any, rhs: Any, sizes: Any) -> None:
        planned_groups("ragged_dot", lhs, rhs, sizes, None, recipe, None)

    def dense(lhs: Any, rhs: Any) -> None:
        op, numbers = "dot_general", how
        if isinstance(how, str):
            op = "einsum"
            (lhs, rhs), letters = two(op, how, (lhs, rhs))
            numbers = numbers_of(*letters)
        planned(op, lhs, rhs, numbers, None, None, recipe, None)

    def of_floats(lhs: Any, rhs: Any, *sizes: Any) -> None:
        if sizes:
            groups_by_jax(lhs, rhs, *sizes)
        elif isinstance(how, str):
            jnp.einsum(how, *as_floats(lhs, rhs))
        else:
            by_jax(as_floats(lhs, rhs), how)

    sizes = (how,) if hasattr(how, "dtype") else ()
    product = of_floats if is_floats(recipe) else of_groups if sizes else dense
    try:
        jax.eval_shape(product, lhs, rhs, *sizes)
    except (TypeError, ValueError) as error:
        return False, str(error)
    return True, ""
