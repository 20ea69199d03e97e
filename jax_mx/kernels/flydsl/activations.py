"""Gated activations in registers, a word at a time; see facts/activations.py.

The wave's mode has to make zeros of subnormals, see `convert.flush_subnormals`.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
from flydsl.expr import Float32, Float64, Int32, Uint32, Uint64

from jax_mx.facts.activations import (
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
from jax_mx.kernels.flydsl import convert

_LOG2E = math.log2(math.e)


def parted(both: list[list[Uint32]]) -> list[list[Uint32]]:
    """Words of gates, and of ups, of words of both by turns."""
    words = [word for part in both for word in part]
    pairs = [*zip(words[::2], words[1::2], strict=True)]
    return [[_halves(*pair, upper) for pair in pairs] for upper in (0, 1)]


def turned(low: Uint32, high: Uint32) -> list[Uint32]:
    """The lower halves of two words, and their upper halves; its own inverse.

    Of a gate and an up each, words of two gates and of two ups.
    """
    return [_halves(low, high, upper) for upper in (0, 1)]


def _halves(low: Uint32, high: Uint32, upper: int) -> Uint32:
    at = 2 * upper
    return convert.bytes_of(high, low, at, at + 1, at + 4, at + 5)


def gated(name: str, gates: Uint32, ups: Uint32, weight: Float32, dtype: str, arch: str) -> Uint32:
    """A word of act(gate) * up * weight, of words of gates and of ups, all of this dtype."""
    both = zip(*(convert.elements(word, dtype) for word in (gates, ups)), strict=True)
    found = [_gated(name, *pair, dtype) * weight for pair in both]
    if dtype == "float32":
        return found[0].bitcast(Uint32)
    return convert.round_two(*found, arch, dtype)


def gradients(
    name: str, gates: Uint32, ups: Uint32, weight: Float32, dy: Uint32, arch: str
) -> list[Uint32]:
    """Words of the gradients of gates and of ups, of words of these and of the result's."""
    row = ACTIVATIONS[name]
    each = zip(*(convert.elements(word, "bfloat16") for word in (gates, ups, dy)), strict=True)
    pairs = []
    for gate, up, own in each:
        near, factor = _factors(row, gate, up)
        slope = _rounded(_SLOPES[row.unary](near), row.rounding.slope)
        part = _rounded(_PARTS[row.unary](near), row.rounding.part)
        if row.limit is not None:
            limit, zero = Float32(row.limit), Float32(0.0)
            slope = _where(gate > limit, zero, slope)
            part = part * _where(_size(up) > limit, zero, Float32(1.0))
        own = own * weight
        pairs.append((own * (slope * factor), own * part))
    return [convert.round_two(*two, arch) for two in zip(*pairs, strict=True)]


def _gated(name: str, gate: Float32, up: Float32, dtype: str) -> Float32:
    """act(gate) * up; from bfloat16 float32 has it exactly where there is no shift."""
    row = ACTIVATIONS[name]
    gate, up = _factors(row, gate, up)
    if dtype != "bfloat16":
        part = _in_float64 if row.unary in _SIZES else lambda x, unary: _PARTS[unary](x)
        return part(gate, row.unary) * up
    return _rounded(_PARTS[row.unary](gate), row.rounding.part) * up


def _factors(row: Activation, gate: Float32, up: Float32) -> tuple[Float32, Float32]:
    """Gate and up within the limit, and up shifted."""
    if row.limit is not None:
        limit = Float32(row.limit)
        gate, up = (_where(x > limit, limit, x) for x in (gate, up))  # a NaN stays
        up = _where(up < Float32(-row.limit), Float32(-row.limit), up)
    if row.shift:
        up = up + Float32(row.shift)
    return gate, up


def _where(condition, a: Float32, b: Float32) -> Float32:
    return condition.select(a.bitcast(Uint32), b.bitcast(Uint32)).bitcast(Float32)


def _rounded(x: Float32, rounding: Rounding | None) -> Float32:
    """x with few bits; what is not finite stays."""
    if rounding is None:
        return x
    bits = x.bitcast(Uint32)
    cut = (bits + Uint32(rounding.up)) & Uint32(rounding.mask)
    finite = convert.magnitudes(bits, "float32") < Uint32(0x7F800000)
    return finite.select(cut, bits).bitcast(Float32)


# ---- the part of the gate ---
def _exp2(x: Float32) -> Float32:
    return convert.intrinsic("llvm.amdgcn.exp2.f32", Float32, x)


def _reciprocal(x: Float32) -> Float32:
    return convert.intrinsic("llvm.amdgcn.rcp.f32", Float32, x)


def _size(x: Float32) -> Float32:
    return convert.intrinsic("llvm.fabs.f32", Float32, x)


def _fma(x: Float32, y: Float32, z: Float32) -> Float32:
    return convert.intrinsic("llvm.fma.f32", Float32, x, y, z)


def _times_sigmoid(x: Float32, half: Float32) -> Float32:
    """x sigmoid(z), with half = exp(-|z| / 2) and a z of x's sign.

    The square of that is multiplied in two steps, so that no factor is subnormal.
    """
    one = Float32(1.0)
    by = _where(x < Float32(0.0), half, one)
    return (x * by) * (by * _reciprocal(_fma(half, half, one)))


def _silu(sharpness: float) -> Callable[[Float32], Float32]:
    scale = -sharpness * _LOG2E / 2
    return lambda x: _times_sigmoid(x, _exp2(_size(x) * Float32(scale)))


def _gelu(x: Float32) -> Float32:
    scale = -TANH * _LOG2E / 2
    slope = _fma(x * x, Float32(scale * CUBE), Float32(scale))
    return _times_sigmoid(x, _exp2(_size(x) * slope))


def _tail(x: Float32) -> tuple[Float32, Float32]:
    """Phi(-|x|) = by * by * rest: by and rest."""
    by = _exp2((x * x) * Float32(-_LOG2E / 4))
    t = _reciprocal(_fma(_size(x), Float32(NEAR), Float32(1.0)))
    rest = Float32(TAIL[0])
    for coefficient in TAIL[1:]:
        rest = _fma(rest, t, Float32(coefficient))
    return by, rest * t


def _gelu_erf(x: Float32) -> Float32:
    by, rest = _tail(x)
    rest = rest * by
    above = x * _fma(Float32(0.0) - rest, by, Float32(1.0))
    return _where(x < Float32(0.0), (x * by) * rest, above)


def _relu(x: Float32) -> Float32:
    return _where(x <= Float32(0.0), Float32(0.0), x)


def _relu2(x: Float32) -> Float32:
    return _relu(x) * _relu(x)


_PARTS: Mapping[str, Callable[[Float32], Float32]] = {
    "silu": _silu(1.0),
    "sharp_silu": _silu(SHARPNESS),
    "gelu": _gelu,
    "gelu_erf": _gelu_erf,
    "relu": _relu,
    "relu2": _relu2,
    "identity": lambda x: x,
}


# ---- in float64, by the steps of `EXP` ---
def _masked(x: Float64, mask: int) -> Float64:
    return (x.bitcast(Uint64) & Uint64(mask)).bitcast(Float64)


def fma64(x: Float64, y: Float64, z: Float64) -> Float64:
    """x * y + z, rounded once."""
    return convert.intrinsic("llvm.fma.f64", Float64, x, y, z)


_SIZES: Mapping[str, Callable[[Float64], Float64]] = {
    "silu": lambda x: x,
    "sharp_silu": lambda x: _masked(x * Float64(SHARPNESS), EXP.most),
    "gelu": lambda x: _masked(
        (x * Float64(TANH)) * (_masked((x * x) * Float64(CUBE), EXP.most) + Float64(1.0)),
        EXP.most,
    ),
}


def _in_float64(x: Float32, unary: str) -> Float32:
    """x sigmoid(z)."""
    wide, zero, one = x.to(Float64), Float64(0.0), Float64(1.0)
    size = _SIZES[unary](convert.intrinsic("llvm.fabs.f64", Float64, wide))
    near = size <= Float64(EXP.far)
    size = near.select(size, zero)
    n = convert.intrinsic("llvm.rint.f64", Float64, size * Float64(EXP.log2e))
    r = fma64(n, Float64(-EXP.ln2), size)
    few, total = _masked(r, EXP.few), Float64(float(np.float32(EXP.inner[0])))
    for coefficient in EXP.inner[1:]:
        total = fma64(_masked(total, EXP.few), few, Float64(coefficient))
    for coefficient in EXP.outer:
        total = _masked(total * r, EXP.most) + Float64(coefficient)
    exponent = (zero - n).to(Int32)
    small = convert.intrinsic("llvm.ldexp.f64.i32", Float64, total, exponent)
    small = near.select(small, zero)
    below = small + one
    bits, infinite = x.bitcast(Uint32), Uint32(0x7F800000)
    sign = bits & Uint32(0x80000000)
    part = (sign != Uint32(0)).select(wide * small, wide)
    found = quotient(part, below).to(Float32)
    # A quotient of zeros has lost its sign, that of an infinite gate is none.
    found = found.bitcast(Uint32) & Uint32(0x7FFFFFFF) | sign
    return (bits == infinite).select(infinite, found).bitcast(Float32)


def quotient(x: Float64, y: Float64) -> Float64:
    """x / y, rounded to nearest: the last step has the exact remainder (see cutedsl/norms.py)."""
    inverse = convert.intrinsic("llvm.amdgcn.rcp.f64", Float64, y)
    minus, one = Float64(0.0) - y, Float64(1.0)
    for _ in range(2):
        rest = fma64(minus, inverse, one)
        inverse = fma64(inverse, fma64(rest, rest, rest), inverse)
    found = x * inverse
    return fma64(fma64(minus, found, x), inverse, found)


# ---- its derivative ---
def _near(x: Float32) -> Float32:
    """x, but for what is so large that no slope depends on it."""
    far = Float32(128.0)
    x = _where(x > far, far, x)  # a NaN stays
    return _where(x < Float32(-128.0), Float32(-128.0), x)


def _sigmoid_slope(x: Float32, half: Float32, dz: Float32) -> Float32:
    """The derivative of `_times_sigmoid`, where z has the derivative dz."""
    one = Float32(1.0)
    is_below = x < Float32(0.0)
    by, small = _where(is_below, half, one), _where(is_below, one, half * half)
    inverse = _reciprocal(_fma(half, half, one))
    return (_fma(_near(x) * dz, small * inverse, one) * by) * (by * inverse)


def _silu_slope(sharpness: float) -> Callable[[Float32], Float32]:
    scale = -sharpness * _LOG2E / 2
    return lambda x: _sigmoid_slope(x, _exp2(_size(x) * Float32(scale)), Float32(sharpness))


def _gelu_slope(x: Float32) -> Float32:
    scale, near = -TANH * _LOG2E / 2, _near(x)
    by = _fma(x * x, Float32(scale * CUBE), Float32(scale))
    dz = _fma(near * near, Float32(3 * CUBE), Float32(1.0)) * Float32(TANH)
    return _sigmoid_slope(x, _exp2(_size(x) * by), dz)


def _gelu_erf_slope(x: Float32) -> Float32:
    by, rest = _tail(x)
    density = _near(x) * Float32(math.sqrt(0.5 / math.pi))
    below, above = ((by * near) * by for near in (rest + density, rest - density))
    return _where(x < Float32(0.0), below, Float32(1.0) - above)


def _relu_slope(x: Float32) -> Float32:
    zero, one = Float32(0.0), Float32(1.0)
    return _where(x <= zero, zero, _where(x > zero, one, x))  # a NaN stays


_SLOPES: Mapping[str, Callable[[Float32], Float32]] = {
    "silu": _silu_slope(1.0),
    "sharp_silu": _silu_slope(SHARPNESS),
    "gelu": _gelu_slope,
    "gelu_erf": _gelu_erf_slope,
    "relu": _relu_slope,
    "relu2": lambda x: _relu(x) * Float32(2.0),
    "identity": lambda x: Float32(1.0),
}
