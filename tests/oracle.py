"""The oracle in NumPy: written from the definition of the bytes, not from the library.

Nothing here imports jax_mx or JAX. Elements are float64, in which a float32 times a power of two is
exact. They are rounded by a look-up among the values of all codes; only the rules of scales are
integers, since integers define them. Codes and scales are uint8 arrays.
"""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np

BLOCK = 32
# NaNs and infinities are as good as other numbers here.
anything = np.errstate(all="ignore")


# ---- formats and floats: the values of codes ---
@dataclasses.dataclass(frozen=True)
class Format:
    """A row of the definition's table."""

    width: int  # bits, with the sign
    emax: int
    mantissa_bits: int
    bias: int
    max_code: int
    threshold: int  # of RCEIL
    nan: int  # what elements of a NaN block are
    per_byte: int = 1

    @property
    def table(self) -> np.ndarray:
        """The value of each code from 0 to the largest finite one."""
        return values_of(np.arange(self.max_code + 1), self.mantissa_bits, self.bias)


def values_of(codes: np.ndarray, mantissa_bits: int, bias: int) -> np.ndarray:
    """float64, of codes without a sign, all of which are taken for finite."""
    field, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    significand = mantissa + np.where(field > 0, 1 << mantissa_bits, 0)
    return np.ldexp(significand.astype(np.float64), np.maximum(field, 1) - bias - mantissa_bits)


FORMATS = {
    "mxfp8_e4m3": Format(8, 8, 3, 7, 0x7E, 0x600000, 0x7F),
    "mxfp8_e5m2": Format(8, 15, 2, 15, 0x7B, 0x600000, 0x7F),
    "mxfp6_e3m2": Format(6, 4, 2, 3, 31, 0x600000, 31),
    "mxfp6_e2m3": Format(6, 2, 3, 1, 31, 0x700000, 31),
    "mxfp4_e2m1": Format(4, 2, 1, 1, 7, 0x400000, 7, per_byte=2),
}
SCALINGS = ("floor", "ceil", "even", "rceil")
# Codes up to that of infinity, which stands for the number that would follow the largest finite.
_FLOATS = {
    "bfloat16": values_of(np.arange(0x7F80 + 1), 7, 127),
    "float16": values_of(np.arange(0x7C00 + 1), 10, 15),
}


def nearest(magnitudes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The index of the nearest value of an ascending table; of two, the even index."""
    middles = (table[:-1] + table[1:]) / 2
    below = np.searchsorted(middles, magnitudes, "left")
    return np.where(below % 2 == 0, below, np.searchsorted(middles, magnitudes, "right"))


def at_random(magnitudes: np.ndarray, table: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """The index of the value below or above: above, where the distance and the noise carry."""
    low = np.minimum(np.searchsorted(table, magnitudes, "right") - 1, len(table) - 2)
    share = (magnitudes - table[low]) / (table[low + 1] - table[low])
    return low + (np.floor(np.minimum(share, 1) * 65536) + noise >= 65536)


@anything
def float32_of(x: np.ndarray) -> np.ndarray:
    """Exactly; x is bfloat16, float16 or float32."""
    return np.asarray(x).astype(np.float32)


# ---- what is done to elements before they are scaled ---
@anything
def flushed(x: np.ndarray) -> np.ndarray:
    """float32, with zeros of their sign for subnormals."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


@anything
def times(x: np.ndarray, factor: float) -> np.ndarray:
    """x * factor in float32; zero where the exact product is less than 2^-126."""
    exact = np.float64(np.float32(factor)) * x.astype(np.float64)
    rounded = exact.astype(np.float32)
    return np.where(np.abs(exact) < 2.0**-126, np.copysign(np.float32(0), rounded), rounded)


@anything
def hadamard(x: np.ndarray, size: int, negative: np.ndarray | None = None) -> np.ndarray:
    """The transform of each `size` elements along the last axis; `negative`: signs to flip."""
    x = float32_of(x).reshape(*x.shape[:-1], x.shape[-1] // size, size)
    if negative is not None:
        bits = x.view(np.uint32) ^ (np.asarray(negative, np.uint32) << np.uint32(31))
        x = bits.view(np.float32)
    x, shape = flushed(x), x.shape
    for stride in (1 << k for k in range(size.bit_length() - 1)):
        pairs = x.reshape(*shape[:-1], size // (2 * stride), 2, stride)
        a, b = pairs[..., :1, :], pairs[..., 1:, :]
        x = flushed(np.concatenate([a + b, a - b], -2)).reshape(shape)
    x = times(x, 1 / math.sqrt(size))
    return x.reshape(*shape[:-2], shape[-2] * size)


# ---- blocks ---
def scale_of(b: np.ndarray, format: Format, scaling: str, zero_scale: int = 0) -> np.ndarray:
    """The scale's byte, of the float32 bits of the amax (int64, no sign)."""
    e, m = b >> 23, b & 0x7FFFFF
    if scaling == "floor":
        exponent = e
    elif scaling == "ceil":
        exponent = e + (m > 0)
    elif scaling == "even":
        exponent = (b + (1 << (22 - format.mantissa_bits))) >> 23
    else:
        over = np.where(e == format.emax, format.threshold + 1, format.threshold)
        exponent = e + (m > over)
    scale = np.clip(exponent - format.emax, 0, 254)
    scale = np.where(b == 0, zero_scale, scale)
    return np.where(b >= 0x7F800000, 255, scale)


def over_windows(amax: np.ndarray, window, axes) -> np.ndarray:
    """The amaxes of blocks along these axes, each replaced by the largest of its window."""
    for axis in axes if window != BLOCK else ():
        length = amax.shape[axis]
        step = length if window == "row" else (window if isinstance(window, int) else 128) // BLOCK
        if length:
            largest = np.maximum.reduceat(amax, np.arange(0, length, step), axis)
            amax = largest.take(np.arange(length) // step, axis)
    return amax


@anything
def quantize_blocks(x, call: Call, noise=None, over=(-1,)):
    """`(codes, scales)` of float32 blocks, which lie along the dimensions `over`."""
    format = FORMATS[call.format]
    bits = x.view(np.uint32).astype(np.int64)
    amax = (bits & 0x7FFFFFFF).max(over, keepdims=True)
    amax = over_windows(amax, call.window, [axis - 1 for axis in over])
    scale = scale_of(amax, format, call.scaling, call.zero_scale)
    scaled = np.ldexp(np.abs(x.astype(np.float64)), 127 - scale)
    scaled = np.where(scale == 255, 0, scaled)
    table = format.table
    if noise is None:
        codes = nearest(scaled, table)
    else:
        codes = at_random(scaled, table, noise)
    codes = codes | (bits >> 31) << (format.width - 1)
    codes = np.where(scale == 255, format.nan, codes)
    return codes.astype(np.uint8), scale.squeeze(over).astype(np.uint8)


# ---- noise: a function of a key and of the place of a block in the array ---
def mixed(x: np.ndarray) -> np.ndarray:
    """The finalizer of MurmurHash3, of uint32."""
    x = (x ^ x >> 16) * np.uint32(0x85EBCA6B)
    x = (x ^ x >> 13) * np.uint32(0xC2B2AE35)
    return x ^ x >> 16


def noise_of(seeds: np.ndarray, elements: int) -> np.ndarray:
    """16 bits for each element of a block, from its uint32 seed: (..., elements)."""
    j = np.arange(elements // 2, dtype=np.uint32) * np.uint32(0x9E3779B9)
    bits = mixed(mixed(seeds)[..., None] ^ j)
    return np.stack([bits & 0xFFFF, bits >> 16], -1).reshape(*seeds.shape, elements)


def seeds_of(shape: tuple[int, ...], axis: int, square: bool, key: np.ndarray) -> np.ndarray:
    """The seed of each block of an array, with the block axis last; `key` are two uint32 words.

    A block's number counts blocks in the array's own order, whatever becomes of the result.
    """
    over = (-2, -1) if square else (axis,)
    grid = [*shape]
    for d in over:
        grid[d] //= BLOCK
    number = np.arange(math.prod(grid), dtype=np.uint32).reshape(grid)
    return np.moveaxis(mixed(number ^ key[0]) ^ key[1], -1 if square else axis, -1)


# ---- bytes and where they lie ---
def pack(codes: np.ndarray, per_byte: int) -> np.ndarray:
    """Two codes of 4 bits a byte, along the last axis, the first in the low bits."""
    if per_byte == 1:
        return codes
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(values: np.ndarray, per_byte: int) -> np.ndarray:
    """The inverse of `pack`."""
    if per_byte == 1:
        return values
    return np.stack([values & 15, values >> 4], -1).reshape(
        *values.shape[:-1], 2 * values.shape[-1]
    )


def _ceil(n: int, by: int) -> int:
    return -(-n // by)


def _blocked_128x4(r, c, cols):
    tile = (r // 128) * _ceil(cols, 4) + c // 4
    return tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4


def _shuffled_32x8(r, c, cols):
    padded = _ceil(cols, 8) * 8
    inner = (c // 8) * 256 + (c % 4) * 64 + (r % 16) * 4 + (c % 8) // 4 * 2 + (r % 32) // 16
    return (r // 32) * 32 * padded + inner


def _shuffled_16x16(r, c, cols):
    return (r // 16) * 16 * cols + (c // 32) * 512 + (c % 32) // 16 * 256 + (r % 16) * 16 + c % 16


TILES = {  # the offset of (r, c), the shape that (rows, cols) are kept in
    "blocked_128x4": (_blocked_128x4, lambda r, c: (_ceil(r, 128), _ceil(c, 4), 512)),
    "shuffled_32x8": (_shuffled_32x8, lambda r, c: (_ceil(r, 256) * 8, _ceil(c, 8), 256)),
    "shuffled_16x16": (_shuffled_16x16, lambda r, c: (r // 16, c // 32, 512)),
}


def tiled(matrix: np.ndarray, layout: str) -> np.ndarray:
    """(..., rows, cols) bytes in a layout: (..., row tiles, column tiles, bytes of a tile)."""
    if layout == "row_major":
        return matrix
    *leading, rows, cols = matrix.shape
    offset, shape = TILES[layout]
    shape = shape(rows, cols)
    flat = np.zeros((*leading, math.prod(shape)), np.uint8)
    flat[..., offset(*np.ogrid[:rows, :cols], cols)] = matrix
    return flat.reshape(*leading, *shape)


def untiled(tiles: np.ndarray, rows: int, cols: int, layout: str) -> np.ndarray:
    """The inverse of `tiled`."""
    if layout == "row_major":
        return tiles
    flat = tiles.reshape(*tiles.shape[:-3], math.prod(tiles.shape[-3:]))
    return flat[..., TILES[layout][0](*np.ogrid[:rows, :cols], cols)]


# ---- the ops ---
@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of a call of quantize, as `jax_mx.quantize` names them.

    `axis` is negative; `negative` says which signs a transform of `hadamard` elements flips first.
    """

    format: str = "mxfp8_e4m3"
    axis: int = -1
    scaling: str = "rceil"
    scale_layout: str = "row_major"
    transpose: bool = False
    square: bool = False
    zero_scale: int = 0
    value_layout: str = "row_major"
    hadamard: int = 0
    negative: np.ndarray | None = None
    prescale: float | None = None
    window: int | str | tuple[int, int] = BLOCK


def quantize(x, call: Call, seeds=None) -> tuple[np.ndarray, np.ndarray]:
    """`(values, scales)` as an MXArray has them, in bytes; `seeds`: of `seeds_of`."""
    return placed(*quantized(x, call, seeds), call)


def quantized(x, call: Call, seeds=None) -> tuple[np.ndarray, np.ndarray]:
    """`(codes, scales)`, a code a byte, with the block axis last."""
    x = np.moveaxis(float32_of(x), call.axis, -1)
    if call.hadamard:
        x = hadamard(x, call.hadamard, call.negative)
    if call.prescale is not None:
        x = times(x, call.prescale)
    lanes = (*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    if call.square:
        lanes = (*x.shape[:-2], x.shape[-2] // BLOCK, BLOCK, x.shape[-1] // BLOCK, BLOCK)
    over = (-3, -1) if call.square else (-1,)
    noise = None
    if seeds is not None:
        noise = noise_of(seeds, BLOCK ** len(over))
        if call.square:
            noise = np.swapaxes(noise.reshape(*seeds.shape, BLOCK, BLOCK), -3, -2)
    codes, scales = quantize_blocks(x.reshape(lanes), call, noise, over)
    return codes.reshape(x.shape), scales


def placed(codes: np.ndarray, scales: np.ndarray, call: Call) -> tuple[np.ndarray, np.ndarray]:
    """`(values, scales)` as an MXArray has them, of those with the block axis last."""
    format = FORMATS[call.format]
    if call.square:
        if call.transpose:
            codes, scales = np.swapaxes(codes, -1, -2), np.swapaxes(scales, -1, -2)
        return tiled(pack(codes, format.per_byte), call.value_layout), scales
    values, back = pack(codes, format.per_byte), -1 if call.transpose else call.axis
    if call.value_layout != "row_major":
        values = tiled(values, call.value_layout)
    else:
        values = np.moveaxis(values, -1, back)
    if call.scale_layout == "row_major":
        return values, np.moveaxis(scales, -1, back)
    return values, tiled(scales.reshape((1, -1)) if scales.ndim == 1 else scales, call.scale_layout)


def dequantize(values, scales, shape, call: Call, dtype: str = "float32") -> np.ndarray:
    """Bits (uint32 or uint16) of the floats of an array of this shape, laid out as `call` says.

    `shape`, `call.axis` and `call.square` are of the quantized array, so `call.transpose` does not
    count.
    """
    format = FORMATS[call.format]
    axis = -1 if call.square else call.axis
    order = np.moveaxis(np.empty(shape, np.bool_), axis, -1).shape
    rows, length = (1, *order)[-2], order[-1]
    if call.value_layout != "row_major":
        values = untiled(values, rows, length // format.per_byte, call.value_layout)
    else:
        values = np.moveaxis(values, axis, -1)
    codes = unpack(values, format.per_byte).astype(np.int64)
    if call.square:
        scales = np.repeat(scales, BLOCK, -2)
    elif call.scale_layout != "row_major":
        scales = untiled(scales, rows, length // BLOCK, call.scale_layout)
        scales = scales.reshape(*order[:-1], length // BLOCK)
    else:
        scales = np.moveaxis(scales, axis, -1)
    scales = np.repeat(scales, BLOCK, -1).astype(np.int64)
    sign = codes >> (format.width - 1) & 1
    magnitude = codes & ((1 << (format.width - 1)) - 1)
    nan, infinite = scales == 255, np.zeros(codes.shape, bool)
    if format.width == 8:
        nan = nan | (magnitude > (0x7C if format.mantissa_bits == 2 else 0x7E))
        infinite = (magnitude == 0x7C) & (format.mantissa_bits == 2)
    table = values_of(np.arange(1 << (format.width - 1)), format.mantissa_bits, format.bias)
    floats = np.ldexp(table[magnitude], scales - 127)
    rounded = bits_of(np.where(infinite, np.inf, floats), sign, nan, dtype)
    return np.moveaxis(rounded, -1, axis)


@anything
def bits_of(magnitudes, sign, nan, dtype: str) -> np.ndarray:
    """The bits of floats that are rounded to nearest even; every NaN is all ones but the sign."""
    width = 32 if dtype == "float32" else 16
    if dtype == "float32":
        bits = magnitudes.astype(np.float32).view(np.uint32).astype(np.int64)
    else:
        bits = nearest(magnitudes, _FLOATS[dtype])
    bits = np.where(nan, (1 << (width - 1)) - 1, bits | sign << (width - 1))
    return bits.astype(f"uint{width}")


def floats(bits: np.ndarray, dtype: str) -> np.ndarray:
    """The floats that have these bits."""
    return bits.view(np.dtype(dtype) if dtype != "bfloat16" else ml_dtypes.bfloat16)


# ---- floats that break quantizers ---
def hard_floats(seed: int, shape: tuple[int, ...], axis: int, dtype: str) -> np.ndarray:
    """Floats of every kind of block along `axis`, mixed: see `_hard_blocks`."""
    order = np.moveaxis(np.empty(shape, np.bool_), axis, -1).shape
    size = math.prod(shape)
    rng = np.random.default_rng(seed)
    bits = _hard_blocks(rng, -(-size // BLOCK), dtype).reshape(-1)[:size].reshape(order)
    return np.ascontiguousarray(np.moveaxis(floats(bits, dtype), -1, axis))


def _hard_blocks(rng: np.random.Generator, count: int, dtype: str) -> np.ndarray:
    """(count, 32) bits. Each block is of one kind, drawn at random."""
    width = 32 if dtype == "float32" else 16
    mantissa = {"float32": 23, "bfloat16": 7, "float16": 10}[dtype]
    fields = 1 << (width - 1 - mantissa)  # of exponents; the last one is NaN's
    shape, one = (count, BLOCK), np.int64(1)
    choice = rng.integers(0, 10, (count, 1))
    top = rng.integers(0, fields - 1, (count, 1))  # the exponent field of the amax
    fraction = rng.integers(0, one << mantissa, shape)
    # 0: any bits. 1: one exponent and few below it.
    bits = rng.integers(0, one << (width - 1), shape)
    near = np.maximum(top - rng.integers(0, 6, shape), 0) << mantissa | fraction
    bits = np.where(choice == 1, near, bits)
    # 2, 3: ties of formats with 1, 2 or 3 bits, some of them off by one; far below the amax too.
    kept = np.int64(mantissa) - rng.integers(2, 6, shape)
    tie = fraction >> kept << kept
    tie = (np.maximum(top - rng.integers(0, 20, shape), 0) << mantissa | tie) + np.where(
        rng.random(shape) < 0.3, rng.integers(-1, 2, shape), 0
    )
    bits = np.where((choice == 2) | (choice == 3), np.maximum(tie, 0), bits)
    # 4, 5: the amax at an edge of a rule of scales, the rest below it.
    edges = np.array([0, 0x400000, 0x600000, 0x680000, 0x700000, 0x780000, 0x7FFFFF])
    edge = (rng.choice(edges, (count, 1)) >> (23 - mantissa)) + rng.integers(-2, 4, (count, 1))
    amax = np.clip((top << mantissa) + edge, 0, (fields - 1) * (one << mantissa) - 1)
    below = np.where(rng.random(shape) < 0.3, amax, rng.integers(0, amax + 1, shape))
    below[np.arange(count), rng.integers(0, BLOCK, count)] = amax[:, 0]
    bits = np.where((choice == 4) | (choice == 5), below, bits)
    # 6: subnormals and the least normal ones. 7: zeros. 8: about the largest finite number.
    bits = np.where(choice == 6, rng.integers(0, one << (mantissa + 2), shape), bits)
    bits = np.where((choice == 7) | (rng.random(shape) < 0.02), 0, bits)
    end = (fields - 1) << mantissa
    bits = np.where(choice == 8, end - 1 - rng.integers(0, one << (mantissa - 2), shape), bits)
    # 9: a NaN or an infinity among numbers.
    special = end + np.where(rng.random(shape) < 0.5, 0, fraction)
    bits = np.where((choice == 9) & (rng.random(shape) < 0.1), special, np.minimum(bits, end + 1))
    bits = np.where((choice == 9) & (bits > end), special, bits)
    bits = bits | rng.integers(0, 2, shape) << (width - 1)
    return bits.astype(f"uint{width}")
