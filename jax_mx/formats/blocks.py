"""The oracle: every op in integer arithmetic, in plain jnp. Kernels match it bit for bit.

Also the implementation ("xla") wherever there is no kernel. Integers throughout, because XLA's
float arithmetic is no oracle: on CPU it flushes float32 subnormals, loses NaNs in jnp.max and does
not saturate casts to float8; exp2 is inexact at most integers.

Blocks lie along the last dimension, which has length `BLOCK`; square ones along the last two.
"""

import functools
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.formats.formats import BLOCK, SCALE_DTYPE, SCALE_NAN, Format, Scaling
from jax_mx.formats.sharding import is_explicit, spec_of
from jax_mx.formats.views import reshape

_INF = 0x7F800000  # float32


# jnp's operators are jitted functions, each traced for every shape, called and lowered by itself:
# programs that quantize were lowered in 1.6 times the time.
inlined = jax.disable_jit()


@inlined
def quantize(
    x: jax.Array,  # (..., BLOCK) bf16, f16 or f32
    format: Format,
    scaling: Scaling,
    block: tuple[int, ...] = (-1,),
    zero_scale: int = 0,
    noise: jax.Array | None = None,  # (..., BLOCK)
    amax: jax.Array | None = None,  # (..., 1) uint32
) -> tuple[jax.Array, jax.Array]:  # (..., BLOCK / codes_per_byte) storage, (..., 1) e8m0
    """The codes and the scale of every block; `block` are the dimensions that one spans.

    Rounded to nearest even, or with `noise` (see there) at random. The scale follows from the
    block's largest magnitude, or from `amax`, its window's (see `over_windows`).
    """
    bits = float32_bits(x)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    if amax is None:
        # As integers NaN > Inf > every finite value, so one maximum finds amax and poison alike.
        amax = jnp.max(magnitude, axis=block, keepdims=True)

    add, exception = scaling.rounding(format)
    emax = np.uint32(format.emax)
    scale = jnp.maximum((amax + np.uint32(add)) >> np.uint32(23), emax) - emax
    scale = jnp.where(amax == np.uint32(exception & 0xFFFFFFFF), np.uint32(0), scale)
    scale = jnp.where(amax >= np.uint32(_INF), np.uint32(SCALE_NAN), scale)
    scale = jnp.where(amax == 0, np.uint32(zero_scale), scale)

    significand, exponent = _decode(magnitude, 8, 23)
    exponent = exponent + (127 - scale.astype(jnp.int32))
    encoding = (format.mantissa_bits, format.bias, format.max_code)
    codes = _encode(significand, exponent, *encoding, noise)
    sign = (bits >> np.uint32(31)) << np.uint32(format.bits - 1)
    codes = jnp.where(scale == np.uint32(SCALE_NAN), np.uint32(format.nan_code), codes | sign)
    return (
        jax.lax.bitcast_convert_type(pack(codes, format), format.storage),
        jax.lax.bitcast_convert_type(scale.astype(jnp.uint8), SCALE_DTYPE),
    )


@inlined
def dequantize(
    values: jax.Array,  # (..., BLOCK / codes_per_byte) storage
    scales: jax.Array,  # (..., 1) e8m0
    format: Format,
    dtype: np.dtype,
) -> jax.Array:  # (..., BLOCK) dtype
    """element * 2^(scale - 127), exact in float32, rounded to nearest even where `dtype` is less.

    A product beyond the largest finite value is an infinity; an element's own NaN or infinity
    stays; scale 255 gives NaN. Every NaN is the positive quiet one, with no payload.
    """
    # Where constants are quantized in a loop, XLA computes them when it compiles, and takes codes
    # that were transposed in another order than they lie (seen on the CPU, JAX 0.10.2).
    values, scales = jax.lax.optimization_barrier((values, scales))
    codes = unpack(jax.lax.bitcast_convert_type(values, jnp.uint8).astype(jnp.uint32), format)
    scale = jax.lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.int32)
    magnitude = codes & np.uint32(2 ** (format.bits - 1) - 1)
    sign = codes >> np.uint32(format.bits - 1)

    info = jnp.finfo(dtype)
    infinity = np.uint32((2**info.nexp - 1) << info.nmant)
    nan = np.uint32(2 ** (info.bits - 1) - 1)  # what NVIDIA's instructions give
    significand, exponent = _decode(magnitude, format.exponent_bits, format.mantissa_bits)
    exponent = exponent + (scale - 127)
    bits = _encode(significand, exponent, info.nmant, 2 ** (info.nexp - 1) - 1, int(infinity))
    if np.issubdtype(format.storage, np.integer):
        poisoned = scale == SCALE_NAN
    else:  # the codes beyond max_code: e5m2 has one infinity among them, e4m3 only NaN
        field = 2**format.exponent_bits - 1 << format.mantissa_bits
        has_infinity = format.max_code < field
        bits = jnp.where((magnitude == field) & has_infinity, infinity, bits)
        poisoned = (scale == SCALE_NAN) | (magnitude > (field if has_infinity else format.max_code))
    bits = jnp.where(poisoned, nan, bits | sign << np.uint32(info.bits - 1))
    bits = bits.astype({16: jnp.uint16, 32: jnp.uint32}[info.bits])
    return jax.lax.bitcast_convert_type(bits, dtype)


def one_nan(y: jax.Array) -> jax.Array:
    """y, each of whose NaNs has the bits that NVIDIA's instructions give, as in `dequantize`.

    As integers: XLA's CPU gives NaNs of bfloat16 its own bits wherever it chooses among floats.
    """
    bits = np.dtype(f"uint{8 * y.dtype.itemsize}")
    nan = np.array(np.iinfo(bits).max >> 1, bits)
    chosen = jnp.where(jnp.isnan(y), nan, jax.lax.bitcast_convert_type(y, bits))
    return jax.lax.bitcast_convert_type(chosen, y.dtype)


# ---- windows ---
def amax_of(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:  # uint32
    """The float32 bits of the largest magnitude over `axes`, which keep the length 1."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32 if x.dtype == jnp.float32 else jnp.uint16)
    magnitude = bits & bits.dtype.type(2 ** (8 * bits.dtype.itemsize - 1) - 1)
    largest = jnp.max(magnitude, axis=axes, keepdims=True, initial=0)
    return float32_bits(jax.lax.bitcast_convert_type(largest, x.dtype))


def over_windows(amax: jax.Array, counts: Mapping[int, int]) -> jax.Array:
    """For every block the largest value of its window's blocks; of amaxes, or of scales.

    Args:
      amax: unsigned, one for each block.
      counts: by dimension, negative, how many blocks a window spans; the last window along a
        dimension may be shorter. No such dimension is sharded.
    """
    for axis, count in counts.items():
        at, spec, length = axis % amax.ndim, spec_of(amax), amax.shape[axis]
        more = -length % count
        widths = [(0, more if d == at else 0, 0) for d in range(amax.ndim)]
        padded = jax.lax.pad(amax, amax.dtype.type(0), widths)
        split = (*amax.shape[:at], (length + more) // count, count, *amax.shape[at + 1 :])
        windows = reshape(padded, split, (*spec[: at + 1], None, *spec[at + 1 :]))
        largest = jnp.max(windows, axis=at + 1, keepdims=True, initial=0)
        same = reshape(jnp.broadcast_to(largest, split), padded.shape, spec)
        amax = jax.lax.slice_in_dim(same, 0, length, axis=at)
    return amax


def rescaled(
    codes: jax.Array,  # (...) uint32, with signs
    scale: jax.Array,  # (...) uint32
    to: jax.Array,  # (...) uint32, at least `scale`
    format: Format,
) -> jax.Array:  # (...) uint32
    """Codes of one scale as codes of a larger one, rounded to nearest even.

    A finite value changes only where it becomes subnormal. Infinities and NaNs of the format stay;
    where `to` is 255, all are the NaN that `quantize` gives.
    """
    magnitude = codes & np.uint32(2 ** (format.bits - 1) - 1)
    significand, exponent = _decode(magnitude, format.exponent_bits, format.mantissa_bits)
    exponent = exponent + scale.astype(jnp.int32) - to.astype(jnp.int32)
    shifted = _encode(significand, exponent, format.mantissa_bits, format.bias, format.max_code)
    shifted = jnp.where(magnitude > np.uint32(format.max_code), magnitude, shifted)
    shifted = shifted | (codes - magnitude)
    return jnp.where(to == np.uint32(SCALE_NAN), np.uint32(format.nan_code), shifted)


# ---- stochastic rounding ---
def seeds(number: jax.Array, key: jax.Array) -> jax.Array:
    """Seeds of blocks with these numbers (uint32), by the two words of a key; none twice."""
    return _mixed(number ^ key[0]) ^ key[1]


def noise(
    seeds: jax.Array,  # (...) uint32, of length 1 along `block`
    block: tuple[int, ...],
) -> jax.Array:  # (...) uint32 below 2^16, of length BLOCK along `block`
    """16 random bits for every element of a block; `block` are the dimensions that one spans.

    Elements 2 j and 2 j + 1, in the order of a row-major block, share the word mixed(mixed(seed) ^
    j * 0x9E3779B9). The first one takes its lower half.
    """
    element = np.arange(BLOCK ** len(block), dtype=np.uint64)
    element = element.reshape([BLOCK if d in block else 1 for d in range(-seeds.ndim, 0)])
    step = (element // 2 * 0x9E3779B9).astype(np.uint32)
    shift = (element % 2 * 16).astype(np.uint32)
    return _mixed(_mixed(seeds) ^ step) >> shift & np.uint32(0xFFFF)


def _mixed(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every bit depends on all: the finalizer of MurmurHash3."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ x >> np.uint32(shift)) * np.uint32(factor)
    return x ^ x >> np.uint32(16)


# ---- the Hadamard transform: float32 arithmetic, in which subnormals are zeros everywhere ---
def hadamard(
    x: jax.Array,  # f32
    size: int,
    along: int = -1,
    over: int = -2,
) -> jax.Array:  # f32
    """The transform of each `size` elements along a dimension; several neighbours may form a group.

    Where the dimension's length is less than `size`, neighbours along `over` continue each other:
    the elements at 2 j + 1 follow the last element at 2 j.
    """
    x, stride = flushed(x), 1
    while stride < size:
        if stride < x.shape[along]:
            x = _butterfly(x, along, stride)
        else:
            x = _butterfly(x, over, stride // x.shape[along])
        stride *= 2
    return times(x, size**-0.5)


def _butterfly(x: jax.Array, axis: int, stride: int) -> jax.Array:
    """(a + b, a - b) for all a and b that lie `stride` apart, by pairs, along an axis.

    Halves are taken as integers: where shards split pairs, XLA adds zeros to what each shard has,
    and -0 + 0 is 0.
    """
    axis, spec = axis % x.ndim, spec_of(x)
    split = (*x.shape[:axis], x.shape[axis] // (2 * stride), 2, stride, *x.shape[axis + 1 :])
    pairs = reshape(x, split, (*spec[: axis + 1], None, None, *spec[axis + 1 :]))
    bits = jax.lax.bitcast_convert_type(pairs, jnp.uint32)
    halves = (jax.lax.index_in_dim(bits, i, axis + 1, keepdims=False) for i in (0, 1))
    a, b = (jax.lax.bitcast_convert_type(half, jnp.float32) for half in halves)
    return reshape(jnp.stack([flushed(a + b), flushed(a - b)], axis + 1), x.shape, spec)


def flipped(
    x: jax.Array,
    masks: jax.Array,  # uint32, of length 1 along `along`
    along: int,
) -> jax.Array:
    """x with the signs of a block's elements i flipped where bit i of its word is set."""
    lead = [1] * (masks.ndim + along)
    bit = np.arange(BLOCK, dtype=np.uint32).reshape(*lead, BLOCK, *[1] * (-1 - along))
    sign = (masks >> bit & np.uint32(1)) << np.uint32(31)
    return jax.lax.bitcast_convert_type(float32_bits(x) ^ sign, jnp.float32)


def times(x: jax.Array, factor: float) -> jax.Array:
    """x * float32(factor), at most 1; a zero where the exact product is less than 2^-126."""
    by = np.float32(factor)
    product = jax.lax.bitcast_convert_type(x * by, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    zero = (bits & np.uint32(0x7FFFFFFF)) < _least(by)
    product = jnp.where(zero, bits & np.uint32(0x80000000), product)
    return jax.lax.bitcast_convert_type(product, jnp.float32)


@functools.cache
def _least(factor: np.float32) -> np.uint32:
    """The bits of the least float32 whose product with `factor` is a normal number."""
    want = Fraction(2) ** -126 / Fraction(float(factor))
    bits = np.float32(float(want)).view(np.uint32)
    while Fraction(float(bits.view(np.float32))) < want:
        bits += np.uint32(1)
    return bits


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """x * y of float32; a zero of its sign where 24 bits of the product are less than 2^-126.

    So NVIDIA's GPUs flush (all of 2^22 pairs near 2^-126 on an H200, 2026-11-25). A subnormal has
    fewer bits, so that what is less may be rounded to 2^-126; times 2^126 it has all of them.
    """
    rounded = flushed(x * y)
    wide = jnp.abs(x * np.float32(2.0**63)) * jnp.abs(y * np.float32(2.0**63))
    less = (jnp.abs(rounded) == np.finfo(np.float32).tiny) & (wide < 1)
    return jnp.where(less, jnp.copysign(jnp.zeros_like(rounded), rounded), rounded)


def flushed(x: jax.Array) -> jax.Array:
    """x with zeros of their sign for subnormals."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    subnormal = (bits & np.uint32(_INF)) == 0
    bits = jnp.where(subnormal, bits & np.uint32(0x80000000), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def saturates(
    x: jax.Array,  # (..., BLOCK)
    scales: jax.Array,  # (..., 1) e8m0
    format: Format,
) -> jax.Array:  # (..., BLOCK) bool
    """Where the magnitude of x exceeds format.max * scale; nowhere where the scale is NaN."""
    scale = jax.lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.uint32)
    # The float32 bits of that product; beyond all of x's where it overflows or is no number.
    limit = (scale + np.uint32(format.emax)) << np.uint32(23) | np.uint32(format.max_mantissa)
    return (float32_bits(x) & np.uint32(0x7FFFFFFF)) > limit


def float32_bits(x: jax.Array) -> jax.Array:
    """The bits of x in float32, exactly."""
    if x.dtype == jnp.float32:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    if x.dtype == jnp.bfloat16:
        return bits << np.uint32(16)
    magnitude = bits & np.uint32(0x7FFF)
    float32 = _encode(*_decode(magnitude, 5, 10), 23, 127, _INF)
    special = magnitude >= np.uint32(0x7C00)
    float32 = jnp.where(special, np.uint32(_INF) + ((magnitude - 0x7C00) << 13), float32)
    return float32 | (bits >> np.uint32(15)) << np.uint32(31)


def widened(x: jax.Array) -> jax.Array:
    """x in float32, exactly."""
    return jax.lax.bitcast_convert_type(float32_bits(x), jnp.float32)


def _decode(
    magnitude: jax.Array,  # uint32 codes without their sign
    exponent_bits: int,
    mantissa_bits: int,
) -> tuple[jax.Array, jax.Array]:  # uint32, int32
    """`(significand, exponent)` of finite floats: the value is significand * 2^exponent."""
    field = magnitude >> np.uint32(mantissa_bits)
    mantissa = magnitude & np.uint32(2**mantissa_bits - 1)
    significand = jnp.where(field > 0, mantissa | np.uint32(2**mantissa_bits), mantissa)
    bias = 2 ** (exponent_bits - 1) - 1
    return significand, jnp.maximum(field.astype(jnp.int32), 1) - (bias + mantissa_bits)


def _encode(
    significand: jax.Array,  # uint32, below 2^24
    exponent: jax.Array,  # int32
    mantissa_bits: int,
    bias: int,
    max_code: int,
    noise: jax.Array | None = None,
) -> jax.Array:  # uint32
    """The code of significand * 2^exponent, rounded to nearest even, at most `max_code`.

    With noise, 16 bits per element: rounded up where the discarded part, in 2^-16 of a step, and
    the noise carry.
    """
    shift = jax.lax.clz(significand).astype(jnp.int32) - 8
    significand = significand << shift.astype(jnp.uint32)  # bit 23 leads
    exponent = exponent - shift
    # The exponent of the result's leading digit; zero has none, and counts as a subnormal.
    lead = jnp.where(significand > 0, jnp.maximum(exponent + 23, 1 - bias), 1 - bias)
    width = jnp.maximum(lead - mantissa_bits - exponent, 0)
    drop = jnp.minimum(width, 30).astype(jnp.uint32)
    kept = significand >> drop
    rest = significand - (kept << drop)
    if noise is None:
        up = (2 * rest + (kept & 1)) > (np.uint32(1) << drop)  # a tie rounds up from an odd `kept`
    else:
        less, more = 16 - jnp.minimum(width, 16), jnp.clip(width - 16, 0, 31)
        part = rest << less.astype(jnp.uint32) >> more.astype(jnp.uint32)  # below 2^16
        up = part + noise >= np.uint32(1 << 16)
    field = jnp.minimum(lead - (1 - bias), 2 * bias + 2).astype(jnp.uint32)
    code = (field << np.uint32(mantissa_bits)) + kept + up.astype(jnp.uint32)
    return jnp.minimum(code, np.uint32(max_code))


def pack(codes: jax.Array, format: Format) -> jax.Array:
    """uint32 codes (..., n) into bytes (..., n / codes_per_byte), the first in the lowest bits."""
    per, width = format.codes_per_byte, 8 // format.codes_per_byte
    parts = [codes[..., i::per] << np.uint32(width * i) for i in range(per)]
    return sum(parts[1:], parts[0]).astype(jnp.uint8)


def unpack(packed: jax.Array, format: Format) -> jax.Array:
    """The inverse of `pack`, from uint32."""
    per, width = format.codes_per_byte, 8 // format.codes_per_byte
    parts = [packed >> np.uint32(width * i) & np.uint32(2**width - 1) for i in range(per)]
    if per == 1:
        return packed
    return jnp.stack(parts, axis=-1).reshape(*packed.shape[:-1], packed.shape[-1] * per)


# ---- rows by their numbers ---
def rows_of(x: jax.Array, rows: jax.Array, sharding: Any = None) -> jax.Array:
    """The rows (R, K) of x (T, K) with these numbers, zeros where x has no such row.

    Args:
      x: floats, or codes.
      rows: (R,) int32, or of any shape, which takes R's place.
      sharding: of the result, on a mesh with explicit axes.
    """
    options = {"mode": "fill", "fill_value": 0, "wrap_negative_indices": False}
    if isinstance(x.shape[0], int) and x.shape[0] == 0:  # JAX takes no row of nothing
        x = jnp.pad(x, ((0, 1), (0, 0)))
    # As bits: where x is split along its rows, XLA adds up what its parts have, and -0 + 0 is 0.
    # In words where rows have whole ones: XLA's gather of bytes takes longer.
    dtype, size = x.dtype, x.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * size}"))
    per_word = 4 // size  # elements of a word
    known = all(isinstance(n, int) for n in (*x.shape, *rows.shape))  # else XLA cannot cast them
    typed = sharding is not None or is_explicit(jax.typeof(x).sharding.mesh)  # a word may be split
    if per_word > 1 and known and not typed and x.shape[-1] % per_word == 0:
        uint32s = jax.lax.bitcast_convert_type(
            bits.reshape(x.shape[0], x.shape[-1] // per_word, per_word), jnp.uint32
        )
        gathered = jax.lax.bitcast_convert_type(uint32s.at[rows].get(**options), bits.dtype)
        gathered = gathered.reshape(*gathered.shape[:-2], x.shape[-1])
    else:
        gathered = bits.at[rows].get(**options, out_sharding=sharding)
    return jax.lax.bitcast_convert_type(gathered, dtype)
