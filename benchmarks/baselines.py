"""The baselines of an op: a copy of as many bytes, and XLA at its best.

A user without kernels writes such code in JAX, in floats. It is right on ordinary data only: NaNs,
infinities and float32 subnormals are `jax_mx.quantizing.reference`'s business. For an honest
comparison there are several versions, and the fastest one counts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks.shapes import Form
from jax_mx.formats.formats import (
    BLOCK,
    FORMATS,
    MXFP8_E4M3,
    MXFP8_E5M2,
    SCALE_DTYPE,
    SCALINGS,
    Format,
    Scaling,
)
from jax_mx.formats.layouts import SCALE_LAYOUTS, ScaleLayout
from jax_mx.formats.views import pack, unpack
from jax_mx.quantizing.mxarray import MXArray

# From blocks and their amax (1 where the blocks have 32) to elements / scale and the scale's byte.
Variant = Callable[[jax.Array, jax.Array, Format, Scaling], tuple[jax.Array, jax.Array]]


# ---- data ----------------------------------------------------------------------------------------
@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def normal(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Normal values whose rows have scales from 2^-8 to 2^7."""
    of_values, of_scales = jax.random.split(key)
    values = jax.random.normal(of_values, shape, dtype)
    exponent = jax.random.randint(of_scales, (*shape[:-1], 1), -8, 8)
    return values * jnp.exp2(exponent.astype(jnp.float32)).astype(dtype)


@functools.partial(jax.jit, static_argnames="size")
def words(key: jax.Array, size: int) -> jax.Array:
    """At least `size` random bytes, as uint32."""
    return jax.random.bits(key, (-(-size // 4),), jnp.uint32)


def copies() -> dict[str, Callable[[jax.Array], jax.Array]]:
    """The ways to copy an array on its device; XLA makes a memcpy of it."""
    return {"jit(jnp.copy)": jax.jit(jnp.copy), "x.copy()": lambda x: x.copy()}


# ---- quantize ------------------------------------------------------------------------------------
def quantize(
    form: Form, format: str, scaling: str, scale_layout: str
) -> dict[str, Callable[[jax.Array], Any]]:
    """XLA's quantizers, jitted, by name; they return what the form's op does.

    All results come from one program, so that XLA may read x once, and lie in memory as the op's
    do: a transposed one is written so, of quantized blocks or of x transposed first.
    """
    options: dict[str, Any] = {"form": form, "format": FORMATS[format]}
    options |= {"scaling": SCALINGS[scaling], "layout": SCALE_LAYOUTS[scale_layout]}
    return {
        name + suffix: jax.jit(
            functools.partial(_quantize, variant=variant, turn_first=first, **options)
        )
        for name, variant in VARIANTS.items()
        for suffix, first in _turns(form).items()
    }


def _turns(form: Form) -> dict[str, bool]:
    """Suffixes of versions, and whether they transpose first."""
    return {"": False, " of x.T": True} if form.transpose else {"": False}


def _quantize(x: jax.Array, *, form: Form, turn_first: bool, **options: Any) -> Any:
    options["square"] = form.square
    arrays = [_blocks(x, axis, **options) for axis in form.axes[:-1]]
    last = -2 if form.square and form.transpose else form.axes[-1]
    if turn_first:
        q = _blocks(jnp.moveaxis(x, last, -1), -1, **options)
    else:
        q = _blocks(x, last, **options)
    if form.transpose and not turn_first:
        tiled = q.scale_layout.is_tiled  # tiles are already those of the block axis as columns
        scales = q.scales if tiled else jnp.moveaxis(q.scales, last, -1)
        values = jnp.moveaxis(q.values, last, -1)
        q = dataclasses.replace(q, values=values, scales=scales, axis=-1)
    return (*arrays, q) if arrays else q


def _blocks(
    x: jax.Array,
    axis: int,
    *,
    square: bool,
    variant: Variant,
    format: Format,
    scaling: Scaling,
    layout: ScaleLayout,
) -> MXArray:
    """x quantized along one axis; in square blocks, which pack along it."""
    blocks, inner = _split(x, (-2, -1) if square else (axis,))
    amax = jnp.max(jnp.abs(blocks), axis=inner, keepdims=True)
    scaled, scale = variant(blocks, amax, format, scaling)
    shape = [*x.shape]
    shape[axis] //= format.codes_per_byte
    values = _encode(scaled, format, inner[axis if square else 0]).reshape(shape)
    scales = jax.lax.bitcast_convert_type(scale.astype(jnp.uint8), SCALE_DTYPE)
    scales = jnp.squeeze(scales, inner)
    if layout.is_tiled:
        scales = pack(layout, jnp.moveaxis(scales, axis, -1))
    return MXArray(values, scales, format, axis, layout, (BLOCK, BLOCK) if square else (BLOCK,))


def _split(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, tuple[int, ...]]:
    """x with each of the negative `axes` split into blocks and 32, and where these 32 are."""
    shape: list[int] = []
    inner = []
    for i, n in enumerate(x.shape):
        shape.append(n)
        if i - x.ndim in axes:
            inner.append(len(shape))
            shape[-1:] = [n // BLOCK, BLOCK]
    return x.reshape(shape), tuple(inner)


def _divide(
    blocks: jax.Array, amax: jax.Array, format: Format, scaling: Scaling
) -> tuple[jax.Array, jax.Array]:
    """As jax.nn does it: amax over max, rounded up to a power of two, and a division by that."""
    ratio, rounding = _ratio(amax, format, scaling)
    add, _ = rounding.rounding(format)
    scale = (_bits(ratio) + np.uint32(add)) >> 23
    blocks = _wide(blocks)
    return blocks / _float(scale << 23).astype(blocks.dtype), scale


def _multiply(
    blocks: jax.Array, amax: jax.Array, format: Format, scaling: Scaling
) -> tuple[jax.Array, jax.Array]:
    """The exponent from amax's bits by one addition, and a product with its reciprocal."""
    add, _ = scaling.rounding(format)
    emax = np.uint32(format.emax)
    scale = (_bits(amax.astype(jnp.float32)) + np.uint32(add)) >> 23
    scale = jnp.maximum(scale, emax) - emax
    return blocks.astype(jnp.float32) * _float((254 - scale) << 23), scale


def _powers(
    blocks: jax.Array, amax: jax.Array, format: Format, scaling: Scaling
) -> tuple[jax.Array, jax.Array]:
    """Floats all the way, with no bits in between that XLA might not fuse across."""
    ratio, rounding = _ratio(amax, format, scaling)
    if rounding is Scaling.EVEN:
        ratio = jax.lax.reduce_precision(ratio, 8, format.mantissa_bits)
    # Rounding to no mantissa at all makes 1 of (0.75, 1.5), hence of three quarters of (1, 2). That
    # is the power below, half of the power above; the nudge says to which side the ends belong.
    up = rounding is Scaling.CEIL
    power = jax.lax.reduce_precision(ratio * np.float32(0.75 * (1 - 2**-21 * (up or -1))), 8, 0)
    scale = power * np.float32(2 if up else 1)
    blocks = _wide(blocks)
    return blocks * (1 / scale).astype(blocks.dtype), _bits(scale) >> 23


VARIANTS: Mapping[str, Variant] = {"divide": _divide, "multiply": _multiply, "powers": _powers}


def _ratio(amax: jax.Array, format: Format, scaling: Scaling) -> tuple[jax.Array, Scaling]:
    """`(ratio, rounding)`: rounded so to a power of two, the float32 ratio is the scale."""
    factor, rounding = 2.0**-format.emax, scaling
    if scaling is Scaling.RCEIL:
        # 1 / max is inexact; a hair less keeps an amax of exactly max * 2^k from rounding up.
        factor, rounding = (1 - 2**-21) / format.max, Scaling.CEIL
    return amax.astype(jnp.float32) * np.float32(factor), rounding


def _encode(y: jax.Array, format: Format, axis: int) -> jax.Array:
    """Scaled elements as the format stores them; two of four bits are packed along `axis`."""
    y = jnp.clip(y, -format.max, format.max)
    if format.storage != np.uint8:
        return y.astype(format.storage)
    if format.codes_per_byte == 1:
        # The float8 of as many mantissa bits has the same codes, for values 2^difference smaller.
        wider = {2: MXFP8_E5M2, 3: MXFP8_E4M3}[format.mantissa_bits]
        y = (y * 2.0 ** (format.bias - wider.bias)).astype(wider.storage)
        code = jax.lax.bitcast_convert_type(y, jnp.uint8)
        return (code & np.uint8(31)) | (code >> 7) << 5
    # Few chips convert to float4; a code is the number of ties that the element has passed.
    magnitude = jnp.abs(y)
    code = sum(
        (above(magnitude, tie).astype(jnp.uint8) for above, tie in _E2M1_TIES),
        jnp.signbit(y).astype(jnp.uint8) << 3,
    )
    first, second = (jax.lax.slice_in_dim(code, i, None, 2, axis) for i in (0, 1))
    return first | second << 4


# Between e2m1's values 0, 0.5, 1, 1.5, 2, 3, 4, 6: a tie goes to the even code.
_E2M1_TIES = (
    (jnp.greater, 0.25),
    (jnp.greater_equal, 0.75),
    (jnp.greater, 1.25),
    (jnp.greater_equal, 1.75),
    (jnp.greater, 2.5),
    (jnp.greater_equal, 3.5),
    (jnp.greater, 5.0),
)


# ---- dequantize ----------------------------------------------------------------------------------
def dequantize(form: Form, dtype: str) -> dict[str, Callable[[MXArray], jax.Array]]:
    """XLA's dequantizers, jitted, by name."""
    return {
        name + suffix: jax.jit(
            functools.partial(_dequantize, scaled=scaled, form=form, turn_first=first, dtype=dtype)
        )
        for name, scaled in PRODUCTS.items()
        for suffix, first in _turns(form).items()
    }


def _dequantize(
    q: MXArray, *, scaled: Product, form: Form, turn_first: bool, dtype: str
) -> jax.Array:
    scales = q.scales
    if q.scale_layout.is_tiled:
        rows, cols = q.shape[-3 - q.axis], q.shape[q.axis] // BLOCK
        scales = jnp.moveaxis(unpack(q.scale_layout, scales, rows, cols), -1, q.axis)
    values, axis = q.values, q.axis
    if turn_first:
        values, scales, axis = values.swapaxes(-1, -2), scales.swapaxes(-1, -2), -3 - axis
    elements = _decode(values, q.format, axis)
    blocks, inner = _split(elements, (axis,))
    y = scaled(blocks, jnp.expand_dims(scales, inner), jnp.dtype(dtype)).reshape(elements.shape)
    return y.swapaxes(-1, -2) if form.transpose and not turn_first else y


# From blocks of elements and their scales to the products, in the type asked for.
Product = Callable[[jax.Array, jax.Array, np.dtype], jax.Array]


def _in_float32(blocks: jax.Array, scales: jax.Array, dtype: np.dtype) -> jax.Array:
    """As it is defined, by conversions alone."""
    return (blocks.astype(jnp.float32) * scales.astype(jnp.float32)).astype(dtype)


def _by_bits(blocks: jax.Array, scales: jax.Array, dtype: np.dtype) -> jax.Array:
    """The scale's byte as a float32's exponent."""
    bits = jax.lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.uint32) << 23
    return (blocks.astype(jnp.float32) * _float(bits)).astype(dtype)


def _narrow(blocks: jax.Array, scales: jax.Array, dtype: np.dtype) -> jax.Array:
    """In the result's type, which loses nothing where that has a scale's range."""
    wide = np.dtype(np.float32) if dtype == np.float16 else dtype
    return (blocks.astype(wide) * scales.astype(wide)).astype(dtype)


PRODUCTS: Mapping[str, Product] = {"float32": _in_float32, "by bits": _by_bits, "narrow": _narrow}


def _decode(values: jax.Array, format: Format, axis: int) -> jax.Array:
    """Elements as floats; a table has the elements of less than 8 bits."""
    if format.storage != np.uint8:
        return values
    codes = np.arange(2**format.bits, dtype=np.uint8)
    table = jnp.asarray(codes.view(_STORED_AS_BYTES[format.name]).astype(np.float32))
    if format.codes_per_byte == 2:
        axis += values.ndim
        pairs = jnp.stack([values & np.uint8(15), values >> np.uint8(4)], axis + 1)
        shape = (*values.shape[:axis], -1, *values.shape[axis + 1 :])
        values = pairs.reshape(shape)
    return table[values]


_STORED_AS_BYTES: Mapping[str, Any] = {
    "mxfp6_e3m2": ml_dtypes.float6_e3m2fn,
    "mxfp6_e2m3": ml_dtypes.float6_e2m3fn,
    "mxfp4_e2m1": ml_dtypes.float4_e2m1fn,
}


# ---- bits ----------------------------------------------------------------------------------------
def _wide(x: jax.Array) -> jax.Array:
    """x, in float32 if it is float16, which has too few exponents for a scale."""
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
