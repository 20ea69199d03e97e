"""The product of two quantized arrays, as its definition has it: the oracle for GEMMs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_mx.array import MXArray


def mx_matmul_reference(a: MXArray, b: MXArray) -> jax.Array:
    """The product of a and b over their block axes, from dequantized floats, in float32.

    Each operand is contracted along the axis that its blocks run along, the last or the one before
    it, so `axis` says which way it lies; one of square blocks along the last (or `expand` it).
    Formats and layouts may differ. Elements times scales are exact in float32, then multiplied and
    added in float32; in which order, is XLA's choice. Made to compare with, not to be fast.

    Args:
      a: of the shape (..., M, K) and axis -1, or (..., K, M) and axis -2.
      b: of the shape (..., N, K) and axis -1, or (..., K, N) and axis -2. Leading dimensions are
        broadcast as in `jnp.matmul`.

    Returns:
      float32 (..., M, N).

    Raises:
      TypeError: an operand is no `MXArray`.
      ValueError: an operand is no matrix or stack of them, its blocks run along another axis, or
        the two differ in K.
    """
    op, sides = "mx_matmul_reference", []
    for name, q in (("a", a), ("b", b)):
        if not isinstance(q, MXArray):
            raise TypeError(f"{op}: {name} must be an MXArray, got {type(q).__name__}")
        if q.ndim < 2 or q.axis not in (-1, -2):
            raise ValueError(
                f"{op}: {name} has the shape {q.shape} and blocks along axis {q.axis}; it must be "
                "a matrix, or a stack of them, with blocks along axis -1 or -2"
            )
        side = q.dequantize(jnp.float32, implementation="xla")
        sides.append(side if q.axis == -1 else jnp.swapaxes(side, -1, -2))
    left, right = sides
    if left.shape[-1] != right.shape[-1]:
        raise ValueError(
            f"{op}: a has length {left.shape[-1]} along axis {a.axis} and b {right.shape[-1]} "
            f"along axis {b.axis}; the product is over both"
        )
    return jnp.matmul(left, jnp.swapaxes(right, -1, -2), precision=jax.lax.Precision.HIGHEST)
