"""Arrays of qwix and tokamax, and ours: the same codes; their scales are floats, ours bytes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.formats.checks import float_dtype, shown
from jax_mx.formats.formats import BLOCK, MXFP4_E2M1, MXFP8_E4M3, MXFP8_E5M2, SCALE_DTYPE
from jax_mx.formats.layouts import ROW_MAJOR, ROW_MAJOR_VALUES

_FLOAT4 = np.dtype(jnp.float4_e2m1fn)
_LEAST = 0x00400000  # the bits of 2^-127, a subnormal
_NAN = 255  # the scale that stands for NaN


def from_qarray(cls: Any, q: Any) -> Any:
    """See `MXArray.from_qarray`."""
    op = "from_qarray"
    values: Any = getattr(q, "qvalue", None)
    scale: Any = getattr(q, "scale", None)
    if not all(hasattr(part, "dtype") and hasattr(part, "ndim") for part in (values, scale)):
        raise TypeError(
            f"{op}: q must be a QArray of qwix, with arrays qvalue and scale, got {shown(q)}"
        )
    if getattr(q, "zero_point", None) is not None:
        raise ValueError(f"{op}: q has a zero_point, MX has none; quantize floats symmetrically")
    formats = {f.storage: f for f in (MXFP8_E4M3, MXFP8_E5M2)} | {_FLOAT4: MXFP4_E2M1}
    if values.dtype not in formats:
        allowed = ", ".join(map(str, formats))
        raise TypeError(f"{op}: elements are {values.dtype}, MX has {allowed}; dequantize them")
    # As bytes, which nothing computes with: JAX 0.12's repeat loses subnormals on CPUs.
    axes, scales = _blocks(op, values.shape, _bytes(op, scale))
    block = BLOCK if len(axes) == 1 else (BLOCK, BLOCK)
    if values.dtype != _FLOAT4:
        return cls.from_parts(values, scales, formats[values.dtype], axis=axes[-1], block=block)
    last = values.ndim - 1
    pairs = jnp.swapaxes(values, axes[-1], last), jnp.swapaxes(scales, axes[-1], last)
    array = cls.from_float4(
        pairs[0], jax.lax.bitcast_convert_type(pairs[1], SCALE_DTYPE), block=block
    )
    return array if axes[-1] == last else array.swapaxes(axes[-1], last)


def _blocks(op: str, shape: tuple[int, ...], scale: jax.Array) -> tuple[list[int], jax.Array]:
    """The axes that blocks run along, and a scale for each block.

    Raises:
      ValueError: the elements that share a scale are no blocks.
    """
    pairs = [*zip(shape, scale.shape, strict=True)] if scale.ndim == len(shape) else []
    fits = all(s and not n % s for n, s in pairs)
    tiles = [n // s for n, s in pairs] if fits else []
    axes = [i for i, tile in enumerate(tiles) if tile > 1]
    square = axes == [len(shape) - 2, len(shape) - 1]
    if not axes or (len(axes) > 1 and not square) or any(tiles[i] % BLOCK for i in axes):
        raise ValueError(
            f"{op}: elements {tuple(shape)} with scales {tuple(scale.shape)} are no blocks of MX; "
            f"share scales along one axis, or along the last two, by multiples of {BLOCK} elements"
        )
    for i in axes:
        scale = jnp.repeat(scale, tiles[i] // BLOCK, i)
    return axes, scale


def _bits(scale: jax.Array) -> jax.Array:
    """The bits of scales as float32, without arithmetic, which would lose subnormals."""
    if scale.dtype == jnp.bfloat16:
        return jax.lax.bitcast_convert_type(scale, jnp.uint16).astype(jnp.uint32) << 16
    return jax.lax.bitcast_convert_type(scale.astype(jnp.float32), jnp.uint32)


def _bytes(op: str, scale: jax.Array) -> jax.Array:
    """Scales as bytes; a traced scale that is no power of two becomes NaN.

    Raises:
      TypeError, ValueError: they are no floats, or concrete ones are no powers of two.
    """
    if scale.dtype in (SCALE_DTYPE, np.uint8):
        return jax.lax.bitcast_convert_type(scale, jnp.uint8)
    float_dtype(op, "scale", scale.dtype)
    bits = _bits(scale)
    powers = (bits & 0x7FFFFF == 0) & (bits >= 1 << 23) & (bits < 255 << 23)
    powers, is_nan = powers | (bits == _LEAST), jnp.isnan(scale)
    if not isinstance(bits, jax.core.Tracer) and not (powers | is_nan).all():
        first = scale[~(powers | is_nan)][0]
        raise ValueError(
            f"{op}: a scale is {first}, MX has powers of two from 2^-127 to 2^127; quantize with "
            'the qtype "mxfp8" or "mxfp4"'
        )
    return jnp.where(powers, bits >> 23, _NAN).astype(jnp.uint8)


def to_qarray(q: Any, dtype: Any) -> Any:
    """See `MXArray.to_qarray`."""
    from qwix import QArray

    op = "to_qarray"
    dtype = float_dtype(op, "dtype", dtype)
    if dtype == np.float16:
        raise TypeError(f"{op}: dtype is float16, which lacks most scales; use bfloat16 or float32")
    q = q.with_values_in(ROW_MAJOR_VALUES).with_scales_in(ROW_MAJOR)
    values, qtype = q.values, None
    if q.format == MXFP4_E2M1:
        values, qtype = q.swapaxes(q.axis, -1).as_float4().swapaxes(q.axis, -1), "mxfp4"
    elif q.format == MXFP8_E4M3:
        qtype = "mxfp8"
    elif q.format != MXFP8_E5M2:
        raise ValueError(f"{op}: JAX has no dtype of {q.format.name}; pass .dequantize()")
    exponents = jax.lax.bitcast_convert_type(q.scales, jnp.uint8).astype(jnp.uint32)
    bits = jnp.where(exponents == 0, _LEAST, exponents << 23)
    bits = jnp.where(exponents == _NAN, 0x7FC00000, bits)
    if dtype == jnp.bfloat16:
        scale = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    else:
        scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return QArray(values, scale, qtype=qtype or values.dtype)
