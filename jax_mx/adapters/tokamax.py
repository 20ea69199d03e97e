"""`ragged_dot`: an implementation for tokamax, which need not be installed to import this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.products import ragged_dot as products
from jax_mx.products.can_multiply import can_multiply
from jax_mx.products.recipes import AUTO, Recipe
from jax_mx.quantizing.mxarray import MXArray

OP = "jax_mx.adapters.tokamax.ragged_dot"
_SUMMED = {1: False, 2: True}  # the axis of rhs that is contracted, and whether that is its last


def ragged_dot(
    lhs: jax.Array,
    rhs: Any,
    group_sizes: Any,
    ragged_dot_dimension_numbers: Any = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    *,
    recipe: Recipe | str = AUTO,
    **others: Any,
) -> jax.Array:
    """`jax_mx.ragged_dot` with tokamax' keywords.

        tokamax.ragged_dot(x, w, sizes, implementation=[jax_mx.adapters.tokamax.ragged_dot, "xla"])

    Args:
      lhs: floats (M, K).
      rhs: floats (G, K, N), or an array that is quantized already: an `MXArray`, or a QArray that
        `MXArray.from_qarray` takes.
      group_sizes: integers (G,), or tokamax' GroupSizes.
      ragged_dot_dimension_numbers: the contracted axis of rhs, 1 or 2; None: 1.
      precision: see `jax_mx.ragged_dot`.
      preferred_element_type: see `jax_mx.ragged_dot`.
      activation: a function of the result.
      recipe: see `jax_mx.ragged_dot`; functools.partial names one.
      **others: further keywords of tokamax; only None and False are served.

    Raises:
      NotImplementedError: MX does not take the product, so tokamax tries the next implementation.
    """
    asked = [name for name, value in others.items() if value is not None and value is not False]
    if asked:
        raise NotImplementedError(f"{OP}: {asked[0]} is not served; leave it out")
    rhs = _weight(rhs)
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        if not isinstance(x, jax.Array | np.ndarray | MXArray):
            raise NotImplementedError(f"{OP}: {name} is a {type(x).__name__}, must be an array")
    if _is_transposed(ragged_dot_dimension_numbers):
        rhs = rhs.swapaxes(1, 2)
    sizes = jnp.asarray(getattr(group_sizes, "value", group_sizes))
    can, why_not = can_multiply(lhs, rhs, sizes, recipe=recipe)
    if not can:
        raise NotImplementedError(why_not)
    dtype = lhs.dtype if preferred_element_type is None else preferred_element_type
    asks_float32 = activation is not None
    y = products.ragged_dot(
        lhs, rhs, sizes, precision, jnp.float32 if asks_float32 else dtype, recipe=recipe
    )
    return y if activation is None else activation(y).astype(dtype)


def _weight(rhs: Any) -> Any:
    """Rhs as products take it.

    Raises:
      NotImplementedError: its codes are none of MX.
    """
    if isinstance(rhs, MXArray) or not hasattr(rhs, "qvalue"):
        return rhs
    try:
        return MXArray.from_qarray(rhs)
    except (TypeError, ValueError) as error:
        raise NotImplementedError(f"{OP}: rhs is no MX array: {error}") from error


def _is_transposed(numbers: Any) -> bool:
    """Whether rhs is (G, N, K).

    Raises:
      NotImplementedError: the product is another one.
    """
    if numbers is None:
        return False
    (lc, rc), (lb, rb) = numbers.dot_dimension_numbers
    groups = [*numbers.lhs_ragged_dimensions], [*numbers.rhs_group_dimensions]
    if [*lc] != [1] or len(rc) != 1 or rc[0] not in _SUMMED or lb or rb or groups != ([0], [0]):
        raise NotImplementedError(f"{OP}: dimension numbers {numbers} are not served")
    return _SUMMED[rc[0]]
