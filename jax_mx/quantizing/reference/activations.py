"""Activations and their derivatives in jnp; see quantizing/facts/activations.py."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.formats.blocks import flushed, one_nan, product, widened
from jax_mx.formats.formats import BLOCK
from jax_mx.formats.sharding import spec_of
from jax_mx.formats.views import reshape
from jax_mx.quantizing.facts.activations import (
    ACTIVATIONS,
    CUBE,
    EXP,
    NEAR,
    SHARPNESS,
    TAIL,
    TANH,
    Activation,
    Rounding,
)

# Beyond, a slope is 0 or 1 in float32; and no product of such numbers overflows.
_FAR = 128.0


class Formula(NamedTuple):
    """A function of one number and its derivative.

    Their arithmetic has the argument's dtype, float32 or float64. A factor that would be subnormal
    is multiplied in two steps.
    """

    part: Callable[[jax.Array], jax.Array]
    slope: Callable[[jax.Array], jax.Array]


def _halves(z: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """sigmoid(z) = by * by / d, and exp(-|z|)."""
    half = jnp.exp(-jnp.abs(z) * 0.5)
    by = jnp.where(z < 0, half, jnp.ones_like(half))
    return by, half * half + 1.0, half * half


def _sigmoidal(
    z: Callable[[jax.Array], jax.Array], dz: Callable[[jax.Array], jax.Array]
) -> Formula:
    """x sigmoid(z(x)), for an odd z with the derivative dz."""

    def part(x):
        by, d, _ = _halves(z(x))
        return (x * by) * (by / d)

    def slope(x):
        near = jnp.clip(x, -_FAR, _FAR)
        by, d, small = _halves(z(near))
        rest = jnp.where(near < 0, jnp.ones_like(small), small) / d  # 1 - sigmoid
        return ((near * dz(near) * rest + 1.0) * by) * (by / d)

    return Formula(part, slope)


def _masked(x: jax.Array, mask: int) -> jax.Array:
    """Some bits of float64s."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint64) & np.uint64(mask)
    return jax.lax.bitcast_convert_type(bits, jnp.float64)


# |z| of x sigmoid(z), for float64; whoever adds to it adds to no product.
_SIZES: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": lambda x: x,
    "sharp_silu": lambda x: _masked(x * SHARPNESS, EXP.most),
    "gelu": lambda x: _masked((x * TANH) * (_masked((x * x) * CUBE, EXP.most) + 1.0), EXP.most),
}


def _times_sigmoid(x: jax.Array, unary: str) -> jax.Array:
    """x sigmoid(z) of float32, by the steps of `EXP`, in float64 but for its last rounding."""
    with jax.enable_x64(True):
        wide = x.astype(jnp.float64)
        size = _SIZES[unary](jnp.abs(wide))
        near = size <= EXP.far
        size = jnp.where(near, size, jnp.zeros_like(size))
        n = jnp.round(size * EXP.log2e)
        r = size - n * EXP.ln2
        few, total = _masked(r, EXP.few), jnp.full_like(r, np.float32(EXP.inner[0]))
        for coefficient in EXP.inner[1:]:
            total = _masked(total, EXP.few) * few + coefficient
        for coefficient in EXP.outer:
            total = _masked(total * r, EXP.most) + coefficient
        power = (np.int64(1023) - n.astype(jnp.int64)) << np.int64(52)
        small = total * jax.lax.bitcast_convert_type(power, jnp.float64)
        small = jnp.where(near, small, jnp.zeros_like(small))
        return (jnp.where(x < 0, wide * small, wide) / (small + 1.0)).astype(jnp.float32)


def _tail(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Phi(-|x|) = by * by * rest: by and rest."""
    size = jnp.minimum(jnp.abs(x), _FAR)
    by = jnp.exp(size * size * -0.25)
    t = 1.0 / (size * NEAR + 1.0)
    rest = jnp.full_like(t, TAIL[0])
    for coefficient in TAIL[1:]:
        rest = rest * t + coefficient
    return by, rest * t


def _gelu_erf(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.float64:
        return x * (jax.lax.erfc(x * -math.sqrt(0.5)) * 0.5)
    by, rest = _tail(x)
    return jnp.where(x < 0, (x * by) * (rest * by), x * (1.0 - (by * rest) * by))


def _gelu_erf_slope(x: jax.Array) -> jax.Array:
    near = jnp.clip(x, -_FAR, _FAR)
    by, rest = _tail(near)
    density = near * math.sqrt(0.5 / math.pi)  # times by * by: x Phi'(x)
    below = (by * (rest + density)) * by
    return jnp.where(near < 0, below, 1.0 - (by * (rest - density)) * by)


def _relu(x: jax.Array) -> jax.Array:
    return jnp.where(x <= 0, jnp.zeros_like(x), x)  # a NaN stays one


FORMULAS: Mapping[str, Formula] = {
    "silu": _sigmoidal(lambda x: x, jnp.ones_like),
    "sharp_silu": _sigmoidal(
        lambda x: x * SHARPNESS, lambda x: jnp.full_like(x, SHARPNESS)
    ),
    "gelu": _sigmoidal(
        lambda x: x * TANH * (x * x * CUBE + 1.0),
        lambda x: (x * x * (3 * CUBE) + 1.0) * TANH,
    ),
    "gelu_erf": Formula(_gelu_erf, _gelu_erf_slope),
    "relu": Formula(_relu, lambda x: jnp.where(x <= 0, jnp.zeros_like(x), jnp.where(
        x > 0, jnp.ones_like(x), x))),
    "relu2": Formula(lambda x: _relu(x) * _relu(x), lambda x: _relu(x) * 2.0),
    "identity": Formula(lambda x: x, jnp.ones_like),
}  # fmt: skip


def part(x: jax.Array, name: str) -> jax.Array:
    """The activation of gates, without ups, in their dtype, float32 or float64."""
    return FORMULAS[ACTIVATIONS[name].unary].part(_cut(x, ACTIVATIONS[name]))


def slope(x: jax.Array, name: str) -> jax.Array:
    """The derivative of `part`; at the limit itself the one from below."""
    row = ACTIVATIONS[name]
    result = FORMULAS[row.unary].slope(_cut(x, row))
    return result if row.limit is None else jnp.where(x > row.limit, jnp.zeros_like(x), result)


def other(up: jax.Array, name: str) -> jax.Array:
    """The factor of act(gate): up, within the limit and shifted."""
    row = ACTIVATIONS[name]
    if row.limit is not None:
        up = _cut(up, row)
        up = jnp.where(up < -row.limit, jnp.full_like(up, -row.limit), up)
    return up + row.shift if row.shift else up


def other_slope(up: jax.Array, name: str) -> jax.Array:
    """Its derivative."""
    limit = ACTIVATIONS[name].limit
    one = jnp.ones_like(up)
    return one if limit is None else jnp.where(jnp.abs(up) > limit, jnp.zeros_like(up), one)


def _cut(x: jax.Array, row: Activation) -> jax.Array:
    return x if row.limit is None else jnp.where(x > row.limit, jnp.full_like(x, row.limit), x)


def halves(x: jax.Array, name: str, interleaved: bool = False) -> list[jax.Array]:
    """Gate and up, (..., K) each; or x alone, where the activation has no gate.

    Args:
      x: (..., 2 K): all gates, then all ups; or one of each by turns.
      name: of the activation.
      interleaved: whether by turns, as gpt-oss has it.
    """
    if not ACTIVATIONS[name].has_gate:
        return [x]
    if interleaved:
        # By a split, whose transpose joins: that of an index adds to zeros, and -0 + 0 is 0.
        pairs = jnp.split(x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2), 2, axis=-1)
        return [half.squeeze(-1) for half in pairs]
    return jnp.split(x, 2, axis=-1)


def joined(parts: Sequence[jax.Array], interleaved: bool = False) -> jax.Array:
    """The inverse of `halves`."""
    if len(parts) == 1:
        return parts[0]
    if interleaved:
        return jnp.stack(parts, axis=-1).reshape(*parts[0].shape[:-1], 2 * parts[0].shape[-1])
    return jnp.concatenate(parts, axis=-1)


def gated(
    parts: Sequence[jax.Array], weights: jax.Array | None = None, name: str = "swiglu"
) -> jax.Array:
    """act(gate) * up * weight, (..., K) in the gates' dtype.

    Products are float32, from left to right, and the result is rounded to the dtype at the end. A
    zero of its sign stands for each subnormal of float32, and each product less than 2^-126.
    act(gate) is float32's nearest number or the one beside it; from bfloat16 it is rounded to few
    bits.

    Args:
      parts: floats (..., K): gates and ups, or gates alone; see `halves`.
      weights: float32 (...,), or None.
      name: of the activation.
    """
    dtype = parts[0].dtype
    gate, *up = (flushed(x.astype(jnp.float32)) for x in parts)
    y = _parts(gate, name, dtype)
    if up:
        y = product(y, flushed(other(up[0], name)))
    if weights is not None:
        y = product(y, flushed(weights.astype(jnp.float32))[..., None])
    return one_nan(y.astype(dtype))


def derivative(parts: Sequence[jax.Array], name: str) -> list[jax.Array]:
    """The derivative of `gated` without weights, float32: by gates, and by ups if there are any.

    From bfloat16 a slope has 8 bits; a zero of its sign stands for each subnormal.

    Args:
      parts: see `gated`.
      name: of the activation.
    """
    dtype = parts[0].dtype
    gate, *up = (flushed(x.astype(jnp.float32)) for x in parts)
    slopes = slope(gate, name)
    if dtype == jnp.bfloat16:
        slopes = _rounded(flushed(slopes), ACTIVATIONS[name].rounding.slope)
    if not up:
        return [slopes]
    activated = _parts(gate, name, dtype) if dtype == jnp.bfloat16 else part(gate, name)
    by_gate = product(slopes, flushed(other(up[0], name)))
    return [by_gate, flushed(activated * other_slope(up[0], name))]


def gated_gradient(
    parts: Sequence[jax.Array], weights: jax.Array | None, dy: jax.Array, name: str
) -> list[jax.Array]:
    """The gradients of gates and of ups, or of gates alone, in their dtype.

    Products are float32: dy and weights, then both with `derivative`.

    Args:
      parts: see `gated`.
      weights: see `gated`.
      dy: the gradient of the result of `gated`, of its dtype.
      name: of the activation.
    """
    dy = flushed(dy.astype(jnp.float32))
    if weights is not None:
        dy = product(dy, flushed(weights.astype(jnp.float32))[..., None])
    by = derivative(parts, name)
    return [product(dy, d).astype(x.dtype) for x, d in zip(parts, by, strict=True)]


def sums_of(x: jax.Array) -> jax.Array:
    """Float32 (..., T / 32, K): the sums of each 32 rows of x (..., T, K), column by column.

    Neighbours are added, 0 and 1, 2 and 3 ..., then neighbours of these, and so on, until one
    number is left. A zero of its sign stands for each subnormal.
    """
    *lead, rows, columns = x.shape
    *split, last = spec_of(x)
    blocks = reshape(x, (*lead, rows // BLOCK, BLOCK, columns), (*split, None, last))
    sums = flushed(widened(blocks))
    while sums.shape[-2] > 1:
        sums = flushed(sums[..., ::2, :] + sums[..., 1::2, :])
    return sums[..., 0, :]


def gated_exactly(parts: Sequence[jax.Array], name: str) -> jax.Array:
    """The same in float32, without rounding to few bits, and without weights."""
    gate, *up = (x.astype(jnp.float32) for x in parts)
    y = part(gate, name)
    for x in up:
        y = y * other(x, name)
    return y


def _parts(gate: jax.Array, name: str, dtype: np.dtype) -> jax.Array:
    """The first factor in `gated`: float32, of float32 gates that came from this dtype."""
    if dtype == jnp.bfloat16:
        return _rounded(flushed(part(gate, name)), ACTIVATIONS[name].rounding.part)
    unary = ACTIVATIONS[name].unary

    def in_float64(gate):
        with jax.enable_x64(True):
            return part(gate.astype(jnp.float64), name).astype(jnp.float32)

    if unary not in _SIZES:
        return flushed(in_float64(gate))
    gate = _cut(gate, ACTIVATIONS[name])
    defined = partial(_times_sigmoid, unary=unary)
    # XLA for TPUs has no bits of a float64.
    return flushed(jax.lax.platform_dependent(gate, tpu=in_float64, default=defined))


def _rounded(x: jax.Array, rounding: Rounding | None) -> jax.Array:
    """x with few bits; infinities and NaNs stay."""
    if rounding is None:
        return x
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    cut = (bits + np.uint32(rounding.up)) & np.uint32(rounding.mask)
    return jax.lax.bitcast_convert_type(jnp.where(jnp.isfinite(x), cut, bits), jnp.float32)
