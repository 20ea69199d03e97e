"""Root mean square norms, with the order of every sum; see `jax_mx.rms_norm`."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.formats.blocks import flushed, one_nan, product, widened

LANES = 2048  # sums that are taken side by side, and then by pairs
LEAST = 2.0**-63  # what is less counts as 0 in the sum: the squares of others are normal numbers


def settled(x: jax.Array) -> jax.Array:
    """x in float32, a zero of its sign for what is subnormal there."""
    return flushed(widened(x))


def sum_of_squares(x: jax.Array) -> jax.Array:
    """(..., 1): float32 of bfloat16 and float16, whose squares it holds exactly; else float64.

    sums[j] is the sum of the squares of elements j, j + LANES, j + 2 LANES ..., one after the
    other; then neighbours are added, 0 and 1, 2 and 3 ..., until one number is left. Zeros fill
    the last round. No square is rounded, so that it does not matter whether a product and a sum
    are one instruction.
    """
    wide = settled(x)
    if x.dtype == jnp.float32:
        wide = wide.astype(jnp.float64)
    else:
        wide = jnp.where(jnp.abs(wide) < np.float32(LEAST), np.float32(0), wide)
    lanes = min(LANES, 1 << (x.shape[-1] - 1).bit_length())
    wide = jnp.pad(wide, [*[(0, 0)] * (x.ndim - 1), (0, -x.shape[-1] % lanes)])
    squares = wide * wide
    sums = squares[..., :lanes]
    for start in range(lanes, wide.shape[-1], lanes):
        sums = sums + squares[..., start : start + lanes]
    while sums.shape[-1] > 1:
        sums = sums[..., ::2] + sums[..., 1::2]
    return sums


def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float) -> tuple[jax.Array, jax.Array]:
    """x / sqrt(mean(x^2) + eps) * weight, of x's dtype; and the factor of rows, float32 (..., 1).

    The factor is sqrt(K / (sum + K eps)), in float64 from the sum on, eps being a float32. For
    bfloat16 and float16 it is rounded to float32 and multiplies x, and then the weight does, in
    float32. A subnormal operand, and a product less than 2^-126, is a zero of its sign. For float32
    the arithmetic is float64. The result is rounded once more, to x's dtype.

    Args:
      x: floats (..., K).
      weight: floats (K,), or None.
      eps: of float32.
    """
    length, single = x.shape[-1], x.dtype == jnp.float32
    if weight is not None:
        weight = settled(weight).reshape(*[1] * (x.ndim - 1), length)
    with jax.enable_x64(True):
        total = sum_of_squares(x).astype(jnp.float64)
        # No compiler replaces these operations: nothing is divided by a constant or by a root, and
        # nothing is added to a product.
        factor = jnp.sqrt(np.float64(length) / (total + length * np.float64(np.float32(eps))))
        rounded = flushed(factor.astype(jnp.float32))
        if single:
            y = settled(x).astype(jnp.float64) * factor
            if weight is not None:
                y = y * weight.astype(jnp.float64)
            return one_nan(flushed(y.astype(jnp.float32))), rounded
    y = product(settled(x), rounded)
    if weight is not None:
        y = product(y, weight)
    return one_nan(y.astype(x.dtype)), rounded


def added(x: jax.Array, residual: jax.Array) -> jax.Array:
    """x + residual in float32, zeros of their sign for what is subnormal, rounded to x's dtype."""
    return one_nan(flushed(settled(x) + settled(residual)).astype(x.dtype))
