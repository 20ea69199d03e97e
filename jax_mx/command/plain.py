"""MX in JAX without kernels, in plain float arithmetic: a speed to compare with.

The results are right on ordinary data; `jax_mx.quantizing.reference` also serves NaNs, infinities
and subnormals. Scales are rounded up, as RCEIL does. The faster one of two versions counts.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.formats.formats import BLOCK, FORMATS, SCALE_DTYPE, Format
from jax_mx.quantizing.mxarray import MXArray

# Between e2m1's values 0, 0.5, 1, 1.5, 2, 3, 4, 6: a tie goes to the even code.
_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_bits = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint32)


def versions(op: str, format: str, dtype: np.dtype) -> Mapping[str, Callable[[Any], Any]]:
    """The versions of an op by name; none of a format that needs more than a conversion."""
    if FORMATS[format].bits not in (4, 8):
        return {}
    if op == "dequantize":
        return {"by a product": functools.partial(_dequantize, dtype=dtype)}
    versions = {"by exponents": _by_exponents, "by powers": _by_powers}
    call = _quantize_both if op == "quantize_both" else _quantize
    return {
        name: functools.partial(call, format=FORMATS[format], scaled=scaled)
        for name, scaled in versions.items()
    }


def _quantize_both(x: jax.Array, **options: Any) -> Any:
    return _quantize(x, **options), _quantize(jnp.swapaxes(x, -1, -2), **options)


def _quantize(x: jax.Array, format: Format, scaled: Callable[..., Any]) -> Any:
    """Values and scales along the last axis."""
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    amax = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True).astype(jnp.float32)
    y, scale = scaled(blocks, amax, format)
    y = jnp.clip(y, -format.max, format.max)
    scales = jax.lax.bitcast_convert_type(scale.astype(jnp.uint8), SCALE_DTYPE)[..., 0]
    if format.bits == 8:
        return y.astype(format.storage).reshape(x.shape), scales
    passed = [abs(y) >= tie if i % 2 else abs(y) > tie for i, tie in enumerate(_TIES)]
    code = sum((p.astype(jnp.uint8) for p in passed), jnp.signbit(y).astype(jnp.uint8) << 3)
    return (code[..., ::2] | code[..., 1::2] << 4).reshape(*x.shape[:-1], -1), scales


def _by_powers(blocks: jax.Array, amax: jax.Array, format: Format) -> tuple[jax.Array, jax.Array]:
    """Floats all the way, with no bits in between that XLA might not fuse across."""
    # A hair less than 1 / max keeps an amax of exactly max * 2^k from rounding up. Rounding to no
    # mantissa makes 1 of (0.75, 1.5), so three quarters of (1, 2] give 1: half of the power above.
    ratio = amax * np.float32((1 - 2**-21) / format.max)
    scale = 2 * jax.lax.reduce_precision(ratio * np.float32(0.75 * (1 - 2**-21)), 8, 0)
    return blocks * (1 / scale).astype(blocks.dtype), _bits(scale) >> 23


def _by_exponents(
    blocks: jax.Array, amax: jax.Array, format: Format
) -> tuple[jax.Array, jax.Array]:
    """The scale's exponent from the bits of amax by one addition; a reciprocal multiplies."""
    add, emax = np.uint32(0x7FFFFF - format.max_mantissa), np.uint32(format.emax)
    scale = jnp.maximum((_bits(amax) + add) >> 23, emax) - emax
    reciprocal = jax.lax.bitcast_convert_type((254 - scale) << 23, jnp.float32)
    return blocks.astype(jnp.float32) * reciprocal, scale


def _dequantize(q: MXArray, dtype: np.dtype) -> jax.Array:
    """Elements times scales, in the type that is asked for."""
    elements = q.values.astype(dtype)
    if q.format.bits == 4:
        magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
        table = jnp.asarray(np.concatenate([magnitudes, -magnitudes])).astype(dtype)
        pairs = jnp.stack([q.values & np.uint8(15), q.values >> np.uint8(4)], axis=-1)
        elements = table[pairs.reshape(*q.values.shape[:-1], -1)]
    blocks = elements.reshape(*elements.shape[:-1], -1, BLOCK)
    return (blocks * q.scales.astype(dtype)[..., None]).reshape(elements.shape)
