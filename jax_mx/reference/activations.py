"""Gated activations; see facts/activations.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.facts.activations import ACTIVATIONS
from jax_mx.reference.blocks import flushed


def _silu(gate: jax.Array) -> jax.Array:
    half = jnp.exp(-jnp.abs(gate) * np.float32(0.5))  # its square in two steps, none subnormal
    by = jnp.where(gate < 0, half, np.float32(1))
    return (gate * by) * (by / (half * half + np.float32(1)))


# Of a float32 gate, what is multiplied by up.
PARTS: Mapping[str, Callable[[jax.Array], jax.Array]] = {"swiglu": _silu}


def gated(gate_up: jax.Array, weights: jax.Array | None = None, name: str = "swiglu") -> jax.Array:
    """act(gate) * up * weight, (..., K) in gate_up's dtype.

    Products are float32; of bfloat16 a zero of its sign stands for each subnormal operand or
    result, and the part of the gate is rounded. The result is rounded to the dtype at the end.

    Args:
      gate_up: floats (..., 2 K), all gates, then all ups.
      weights: float32 (...,), or None.
      name: of the activation.
    """
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    exact = gate_up.dtype == jnp.bfloat16
    settled = flushed if exact else lambda x: x
    gate, up = settled(gate), settled(up)
    part = PARTS[name](gate)
    y = settled((_rounded(settled(part), name) if exact else part) * up)
    if weights is not None:
        y = settled(y * settled(weights.astype(jnp.float32))[..., None])
    return y.astype(gate_up.dtype)


def _rounded(x: jax.Array, name: str) -> jax.Array:
    """x with few bits, as the activation's row says; what is not finite stays."""
    row, bits = ACTIVATIONS[name], jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = jnp.where(jnp.isfinite(x), (bits + np.uint32(row.up)) & np.uint32(row.mask), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
