"""What one writes in JAX without kernels, plain float arithmetic: a speed to compare with.

It is right on ordinary data; NaNs, infinities and subnormals are the business of
`jax_mx.reference`. Scales are rounded up, as RCEIL does. The faster one of two versions counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.facts.formats import BLOCK, FORMATS, SCALE_DTYPE, Format
from jax_mx.ops.mxarray import MXArray


def versions(op: str, format: str, dtype: np.dtype) -> Mapping[str, Callable[[Any], Any]]:
    """The versions of an op by name; none of a format that needs more than a conversion."""
    found = FORMATS[format]
    if found.bits not in (4, 8):
        return {}
    if op == "dequantize":
        return {"by a product": functools.partial(_dequantize, dtype=dtype)}
    each = {"by exponents": _by_exponents, "by powers": _by_powers}
    both = op == "quantize_both"
    return {
        name: functools.partial(_quantize, format=found, scaled=scaled, both=both)
        for name, scaled in each.items()
    }


def _quantize(x: jax.Array, format: Format, scaled: Callable[..., Any], both: bool) -> Any:
    """Values and scales along the last axis; of both, also along the one before, transposed."""
    rows = _along_last(x, format, scaled)
    return (rows, _along_last(jnp.swapaxes(x, -1, -2), format, scaled)) if both else rows


def _along_last(x: jax.Array, format: Format, scaled: Callable[..., Any]) -> Any:
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    amax = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True).astype(jnp.float32)
    elements, scale = scaled(blocks, amax, format)
    values = _encode(jnp.clip(elements, -format.max, format.max), format)
    scales = jax.lax.bitcast_convert_type(scale.astype(jnp.uint8), SCALE_DTYPE)
    return values.reshape(*x.shape[:-1], -1), scales[..., 0]


def _by_powers(blocks: jax.Array, amax: jax.Array, format: Format) -> tuple[jax.Array, jax.Array]:
    """Floats all the way, with no bits in between that XLA might not fuse across."""
    # A hair less than 1 / max keeps an amax of exactly max * 2^k from rounding up. Rounding to no
    # mantissa makes 1 of (0.75, 1.5), so three quarters of (1, 2] give 1: half of the power above.
    ratio = amax * np.float32((1 - 2**-21) / format.max)
    scale = 2 * jax.lax.reduce_precision(ratio * np.float32(0.75 * (1 - 2**-21)), 8, 0)
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32) >> 23
    return blocks * (1 / scale).astype(blocks.dtype), bits


def _by_exponents(
    blocks: jax.Array, amax: jax.Array, format: Format
) -> tuple[jax.Array, jax.Array]:
    """The scale's exponent from the bits of amax by one addition; a reciprocal multiplies."""
    add, emax = np.uint32(0x7FFFFF - format.max_mantissa), np.uint32(format.emax)
    scale = (jax.lax.bitcast_convert_type(amax, jnp.uint32) + add) >> 23
    scale = jnp.maximum(scale, emax) - emax
    return blocks.astype(jnp.float32) * _power(254 - scale), scale


def _power(exponent: jax.Array) -> jax.Array:
    """The power of two that a biased exponent stands for."""
    return jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)


# Between e2m1's values 0, 0.5, 1, 1.5, 2, 3, 4, 6: a tie goes to the even code.
_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def _encode(y: jax.Array, format: Format) -> jax.Array:
    """Scaled elements as the format stores them."""
    if format.bits == 8:
        return y.astype(format.storage)
    code = jnp.signbit(y).astype(jnp.uint8) << 3
    magnitude = jnp.abs(y)
    for i, tie in enumerate(_TIES):
        passed = magnitude >= tie if i % 2 else magnitude > tie
        code += passed.astype(jnp.uint8)
    return code[..., ::2] | code[..., 1::2] << 4


def _dequantize(q: MXArray, dtype: np.dtype) -> jax.Array:
    """Elements times scales, in the type that is asked for."""
    if q.format.bits == 8:
        elements = q.values.astype(dtype)
    else:
        table = jnp.asarray(np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2, np.float32))
        table = jnp.where(jnp.arange(16) < 8, table, -table).astype(dtype)
        pairs = jnp.stack([q.values & np.uint8(15), q.values >> np.uint8(4)], axis=-1)
        elements = table[pairs.reshape(*q.values.shape[:-1], -1)]
    blocks = elements.reshape(*elements.shape[:-1], -1, BLOCK)
    return (blocks * q.scales.astype(dtype)[..., None]).reshape(elements.shape)
