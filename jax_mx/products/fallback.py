"""A product that MX cannot take is refused, or JAX multiplies the floats."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jax_mx.formats.arrangements import as_tuples
from jax_mx.formats.checks import held, implementation_of, name_among
from jax_mx.products.implementations import named
from jax_mx.products.operand import QuantizedWeight
from jax_mx.products.recipes import check_recipe, is_floats
from jax_mx.quantizing.mxarray import MXArray, dequantize

Fallback = Literal["floats", "bf16"] | None
FALLBACKS = ("floats", "bf16")


class Plain(NamedTuple):
    """The operands that JAX multiplies.

    Attributes:
      operands: arrays of JAX.
      dtype: of the result, for operands that were rounded; else None, and JAX decides.
    """

    operands: list[jax.Array]
    dtype: Any


def check_fallback(op: str, fallback: Any) -> None:
    """Refuses what names no fallback, whether or not a product needs one.

    Raises:
      TypeError, ValueError: it names none.
    """
    if fallback is not None:
        name_among(f"{op}: fallback", FALLBACKS, fallback)


def plain_operands(
    op: str,
    fallback: Any,
    operands: Sequence[Any],
    recipe: Any,
    implementation: Any,
    error: Exception,
) -> Plain:
    """Operands for JAX's own product.

    Args:
      op: for messages.
      fallback: the caller's argument, which `check_fallback` has seen.
      operands: refused by MX.
      recipe: the caller's argument.
      implementation: the caller's argument.
      error: the refusal.

    Raises:
      TypeError, ValueError: the refusal, without a fallback or if an operand is quantized; or
        recipe or implementation are invalid.
    """
    if fallback is None:
        raise error
    check_recipe(op, recipe)
    implementation_of(op, named(op), implementation)
    operands = [held(x) for x in operands]
    if any(isinstance(x, MXArray | QuantizedWeight) for x in operands):
        raise error
    try:
        arrays = [jnp.asarray(x) for x in operands]
        with jax.numpy_dtype_promotion("standard"):  # JAX says what it refuses
            dtype = jnp.result_type(*arrays)
    except (TypeError, ValueError, AssertionError):  # keys, and what JAX has no dtype for
        raise error from None
    if fallback == "floats" or not all(jnp.issubdtype(x.dtype, jnp.floating) for x in arrays):
        return Plain(arrays, None)
    return Plain([x.astype(jnp.bfloat16) for x in arrays], dtype)


def as_floats(*operands: Any) -> list[jax.Array]:
    """The arrays that "floats" multiplies: floats as they are, others as the floats they stand for.

    An `MXArray` becomes floats of the others' type; of bfloat16 where there is none.
    """
    plain = [x.floats if isinstance(x, QuantizedWeight) else x for x in map(held, operands)]
    if not any(isinstance(x, MXArray) for x in plain):
        return [*map(jnp.asarray, plain)]
    types = [jnp.asarray(x).dtype for x in plain if not isinstance(x, MXArray)]
    dtype = jnp.result_type(*types) if types else jnp.bfloat16
    return [dequantize(x, dtype) if isinstance(x, MXArray) else jnp.asarray(x) for x in plain]


def unquantized(recipe: Any, *weights: Any) -> list[Any]:
    """Weights as a layer takes them: of "floats" not the forms that another recipe made."""
    if not is_floats(recipe):
        return [*weights]
    return [w.floats if isinstance(w, QuantizedWeight) else w for w in map(held, weights)]


def by_jax(
    operands: list[jax.Array],
    numbers: Any,
    precision: Any = None,
    dtype: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """The product of floats as they are."""
    lhs, rhs = operands
    tuples: Any = as_tuples(numbers)
    return jax.lax.dot_general(lhs, rhs, tuples, precision, dtype, out_sharding=out_sharding)


def groups_by_jax(
    lhs: Any, rhs: Any, sizes: Any, precision: Any = None, dtype: Any = None
) -> jax.Array:
    """The product over groups of floats as they are."""
    a, b = as_floats(lhs, rhs)
    if isinstance(rhs, MXArray) and len(rhs.block) == 1 and rhs.axis % 3 == 2:
        b = jnp.swapaxes(b, 1, 2)
    return jax.lax.ragged_dot(a, b, jnp.asarray(sizes), precision, dtype)
