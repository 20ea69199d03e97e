"""Arithmetic on single elements and scales; the only file in which NVIDIA archs may differ.

Naming: `word` is a 32-bit register with two 16-bit elements or one float32, lower element first.

Other instructions replace missing ones of an arch, with the same bits:

    before sm_86    max.xorsign.abs: signs are cleared first
    before sm_89    conversions of 8 bits: `_pack_in_integers`, `_unpack_four_halves`
    before sm_90    mul.bf16x2: a fused multiply-add of -0; min.u16x2: integers
    before sm_100   conversions of 6 bits: by way of 8, see `pack_four`; e2m1: see `_has_words`
"""

import dataclasses
import struct
from typing import Any

import cutlass
from cutlass import Float32, Uint32, cute

from jax_mx.formats.formats import (
    MXFP4_E2M1,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    SCALE_NAN,
    WIDER,
    Format,
)

INPUT = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}
_SUFFIX = {"bfloat16": "bf16x2", "float16": "f16x2", "float32": "f32"}
_ELEMENT = {
    MXFP8_E4M3: "e4m3",
    MXFP8_E5M2: "e5m2",
    MXFP6_E2M3: "e2m3",
    MXFP6_E3M2: "e3m2",
}
_SIGNS_OF_6_BITS, _REST_OF_6_BITS = 0x20202020, 0x1F1F1F1F
_INF, _NAN = 0x7F800000, 0x7FC00000


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The facts that the code of a conversion depends on: floats, codes, arch.

    Attributes:
      dtype: the floats'.
      format: the codes'.
      arch: as the compiler calls it.
    """

    dtype: str
    format: Format
    arch: str

    @property
    def has_words(self) -> bool:
        """Whether pairs are words: before sm_100 there is no conversion to e2m1."""
        return self.format == MXFP4_E2M1 and not has(self.arch, 100)


def has(arch: str, capability: int) -> bool:
    """Whether an arch has what came with this compute capability, ten times."""
    return int(arch.removeprefix("sm_").rstrip("af")) >= capability


def ptx(code: str, result: Any, *read: Any) -> Any:
    """A value of this type that PTX writes to `{$w0}`, of those in `{$r0}`, `{$r1}` and so on.

    Several values, for a list of types; none, for None.
    """
    types = result if result is None or isinstance(result, list) else [result]
    return cute.arch.inline_ptx(code, write_only_types=types, read_only_args=[*read])


def bits_to_float(bits: Uint32) -> Float32:
    """The float32 of these bits."""
    return ptx("mov.b32 {$w0}, {$r0};", Float32, bits)


def larger_magnitude(a: Uint32, b: Uint32, dtype: str, arch: str) -> Uint32:
    """Per element max(|a|, |b|), NaN if either is; the sign is meaningless. One HMNMX2 or FMNMX."""
    ptx_type = "b32" if dtype != "float32" else "f32"
    registers = ".reg .f32 a, b, d; mov.b32 a, {$r0}; mov.b32 b, {$r1}; "
    code = f"max.NaN.xorsign.abs.{_SUFFIX[dtype]} "
    if not has(arch, 86):
        code, mask = f"max.NaN.{_SUFFIX[dtype]} ", 0x7FFFFFFF if ptx_type == "f32" else 0x7FFF7FFF
        a, b = a & Uint32(mask), b & Uint32(mask)
    code = (
        f"{code}{{$w0}}, {{$r0}}, {{$r1}};"
        if ptx_type == "b32"
        else f"{{ {registers}{code}d, a, b; mov.b32 {{$w0}}, d; }}"
    )
    return ptx(code, Uint32, a, b)


@cute.jit
def magnitude_bits(word: Uint32, element: cutlass.Constexpr, dtype: cutlass.Constexpr) -> Uint32:
    """The float32 bits of the magnitude of one element of the word."""
    if cutlass.const_expr(dtype == "float32"):
        return word & Uint32(0x7FFFFFFF)
    half = (word >> Uint32(16 * element)) & Uint32(0x7FFF)
    if cutlass.const_expr(dtype == "bfloat16"):
        return half << Uint32(16)
    return _half_to_float_bits(half)


@cute.jit
def largest_magnitude_bits(word: Uint32, dtype: cutlass.Constexpr) -> Uint32:
    """The float32 bits of the larger magnitude of the word's elements."""
    if cutlass.const_expr(dtype == "float32"):
        return magnitude_bits(word, 0, dtype)
    # As integers, magnitudes compare as their values do.
    low, high = word & Uint32(0x7FFF), (word >> Uint32(16)) & Uint32(0x7FFF)
    return magnitude_bits(cutlass.max(low, high), 0, dtype)


def _half_to_float_bits(half: Uint32) -> Uint32:
    code = "{ .reg .b16 h; .reg .f32 f; cvt.u16.u32 h, {$r0}; cvt.f32.f16 f, h; mov.b32 {$w0}, f; }"
    return ptx(code, Uint32, half)


@cute.jit
def amaxes_of_two(
    a: Uint32, b: Uint32, dtype: cutlass.Constexpr, arch: cutlass.Constexpr
) -> Uint32:
    """A word with the larger magnitude of a's two 16-bit elements, and that of b's."""
    lows = (a & Uint32(0xFFFF)) | (b << Uint32(16))
    return larger_magnitude(lows, pair(a, b), dtype, arch)


@cute.jit
def scale_of(
    amax: Uint32,  # float32 bits
    emax: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    round_add: Uint32,
    round_exception: Uint32,
):
    """The E8M0 byte of a block and the bits of the float32 that its elements are multiplied by.

    The rule is `formats.Scaling.rounding`, whose two numbers come in as run-time scalars. The
    factor is a power of two or NaN, so its upper half is a bfloat16.
    """
    scale = cutlass.max((amax + round_add) >> Uint32(23), Uint32(emax)) - Uint32(emax)
    if cutlass.const_expr(dtype == "float32"):  # 16-bit inputs never reach that value
        if amax == round_exception:
            scale = Uint32(0)
    # 2^(127 - scale): scale is at most 253 here, so this is a normal number.
    inverse = (Uint32(254) - scale) << Uint32(23)
    if amax >= Uint32(_INF):
        scale = Uint32(SCALE_NAN)
        inverse = Uint32(_NAN)
    return scale, inverse


@cute.jit
def pair(low: Uint32, high: Uint32) -> Uint32:
    """The upper halves of two words in one."""
    return (low >> Uint32(16)) | (high & Uint32(0xFFFF0000))


@cute.jit
def twice(pair: Uint32, which: cutlass.Constexpr) -> Uint32:
    """A pair of which both are the given one of `pair`."""
    if cutlass.const_expr(which == 1):
        return (pair >> Uint32(16)) | (pair & Uint32(0xFFFF0000))
    return (pair & Uint32(0xFFFF)) | (pair << Uint32(16))


@cute.jit
def products(words: cutlass.Constexpr, inverses: Uint32, to: cutlass.Constexpr):
    """Two elements, of one word or (float32) of two, times a pair of inverses, in float32.

    Exact but for what is far below the smallest code. For bfloat16 the product is one bfloat16
    instruction for both: the factor is a power of two, so only a result below 2^-126 is rounded.
    """
    if cutlass.const_expr(to.dtype == "bfloat16"):
        word = _multiply_bf16x2(words[0], inverses, to.arch)
        return bits_to_float(word << Uint32(16)), bits_to_float(word & Uint32(0xFFFF0000))
    low = bits_to_float(inverses << Uint32(16))
    high = bits_to_float(inverses & Uint32(0xFFFF0000))
    if cutlass.const_expr(to.dtype == "float32"):
        return bits_to_float(words[0]) * low, bits_to_float(words[1]) * high
    a = bits_to_float(_half_to_float_bits(words[0] & Uint32(0xFFFF)))
    b = bits_to_float(_half_to_float_bits(words[0] >> Uint32(16)))
    return a * low, b * high


def shifted(registers: list, first) -> list:
    """The words that begin `first` bytes, modulo half of all, into an even number of them."""
    half = len(registers) // 2
    for step in [1 << i for i in reversed(range(half.bit_length() - 1))]:
        skip = (first & Uint32(4 * step)) != 0
        registers = [
            Uint32(cutlass.select_(skip, registers[i + step], registers[i]))
            for i in range(len(registers) - step)
        ]
    bits = (first & Uint32(3)) * 8
    return [funnel(registers[i], registers[i + 1], bits) for i in range(half)]


def funnel(low: Uint32, high: Uint32, bits: Uint32) -> Uint32:
    """The 32 bits that begin `bits` (0 to 31) into two words."""
    return ptx("shf.r.wrap.b32 {$w0}, {$r0}, {$r1}, {$r2};", Uint32, low, high, bits)


def bytes_of(low: Uint32, high: Uint32, select: int) -> Uint32:
    """A word of four bytes, by the digits of `select`, the lowest byte's last: 0 to 3 of `low`."""
    code = f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, 0x{select:04x};"
    return ptx(code, Uint32, low, high)


def turned_four(words: list) -> list:
    """Four words of four bytes, transposed."""
    a, b = bytes_of(words[0], words[1], 0x5140), bytes_of(words[0], words[1], 0x7362)
    c, d = bytes_of(words[2], words[3], 0x5140), bytes_of(words[2], words[3], 0x7362)
    halves = [(a, c, 0x5410), (a, c, 0x7632), (b, d, 0x5410), (b, d, 0x7632)]
    return [bytes_of(low, high, select) for low, high, select in halves]


def _multiply_bf16x2(a: Uint32, b: Uint32, arch: str) -> Uint32:
    code = "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};"
    if not has(arch, 90):  # plus -0, which changes no product
        code = "{ .reg .b32 c; mov.b32 c, 0x80008000; fma.rn.bf16x2 {$w0}, {$r0}, {$r1}, c; }"
    return ptx(code, Uint32, a, b)


def pack_four(floats: list, to: Conversion) -> Uint32:
    """Four codes, rounded to nearest even and saturated, the first in the lowest byte.

    NaN gives 0x7F, or the largest where the format has none. Ada and Hopper convert to 6 bits by
    way of 8: as a block's elements are below twice the largest number, only one code can be too
    large, 32.
    """
    format = to.format
    if not has(to.arch, 89):
        codes = [_pack_in_integers(value, format) for value in floats]
        low, high = (bytes_of(a, b, 0x0040) for a, b in (codes[:2], codes[2:]))
        return bytes_of(low, high, 0x5410)
    if format not in WIDER or has(to.arch, 100):
        return _pack_four(*floats, format)
    shift = Float32(2.0 ** (format.bias - WIDER[format].bias))
    word = _pack_four(*(value * shift for value in floats), WIDER[format])
    largest = ((word >> Uint32(5)) & Uint32(0x01010101)) * Uint32(format.max_code)
    signs = (word >> Uint32(2)) & Uint32(_SIGNS_OF_6_BITS)
    return word & Uint32(_REST_OF_6_BITS) | largest | signs


def _pack_in_integers(value: Float32, format: Format) -> Uint32:
    """A float's code of 6 or 8 bits, as `pack_four` has it, without a conversion.

    Let 2^e be the power of two below a number, or below the smallest normal one. The sum of the
    number and 2^(e + 23 - mantissa_bits) is rounded to a code's last place, and its bits behind the
    power count these places. Above the smallest exponent, codes of lower exponents precede them.
    """
    shift = 23 - format.mantissa_bits
    smallest = 128 - format.bias  # exponent of the smallest normal number, as float32 has it
    largest = struct.unpack("<I", struct.pack("<f", format.max))[0]
    sign_down = 32 - format.bits
    code = (
        "{ .reg .pred p; .reg .f32 a, m, t; .reg .b32 e, k, n, s; "
        f"abs.f32 a, {{$r0}}; min.f32 a, a, 0f{largest:08X}; mov.b32 n, a; "
        f"max.u32 e, n, 0x{smallest << 23:08x}; and.b32 e, e, 0x7f800000; "
        f"add.u32 k, e, 0x{shift << 23:08x}; mov.b32 m, k; add.rn.f32 t, a, m; mov.b32 n, t; "
        f"sub.u32 n, n, k; shr.u32 e, e, {shift}; add.u32 n, n, e; "
        f"sub.u32 n, n, 0x{smallest << format.mantissa_bits:08x}; "
        f"mov.b32 s, {{$r0}}; shr.u32 s, s, {sign_down}; "
        f"and.b32 s, s, 0x{1 << format.bits - 1:02x}; or.b32 n, n, s; "
        f"setp.nan.f32 p, {{$r0}}, {{$r0}}; selp.b32 {{$w0}}, 0x{format.nan_code:02x}, n, p; }}"
    )
    return ptx(code, Uint32, value)


def _pack_four(a: Float32, b: Float32, c: Float32, d: Float32, format) -> Uint32:
    cvt = f"cvt.rn.satfinite.{_ELEMENT[format]}x2.f32"
    code = (
        f"{{ .reg .b16 low, high; {cvt} low, {{$r1}}, {{$r0}}; {cvt} high, {{$r3}}, {{$r2}}; "
        "mov.b32 {$w0}, {low, high}; }"
    )
    return ptx(code, Uint32, a, b, c, d)


# ---- codes of pairs ---
# A float becomes bytes by `scaled_pair`, then by one of the ways to pack. A pair is two floats; or,
# where e2m1 has no conversion, a word of two 16-bit floats of the type `_ptx_type`.


def _ptx_type(dtype: str) -> str:
    return _SUFFIX["bfloat16" if dtype == "bfloat16" else "float16"]


def scaled_pair(words: list, inverses: Uint32, to: Conversion):
    """Two elements, of one word or (float32) of two, times a pair of inverses."""
    if not to.has_words:
        return products(words, inverses, to)
    if to.dtype == "bfloat16":
        return _multiply_bf16x2(words[0], inverses, to.arch)
    low, high = products(words, inverses, to)
    if to.dtype == "float32":
        low, high = _to_odd(low), _to_odd(high)
    return _cut_two(low, high)


def pack_along(pairs: list, to: Conversion) -> list:
    """Words of the codes of pairs, in their order; the last one may be used in part."""
    if to.format.codes_per_byte == 1:
        fours = zip(pairs[::2], pairs[1::2], strict=True)
        return [pack_four([*low, *high], to) for low, high in fours]
    if not to.has_words:
        return _pack_e2m1([value for pair in pairs for value in pair])
    ptx_type, halves = _ptx_type(to.dtype), []
    for low, high in zip(pairs[::2], pairs[1::2], strict=True):
        # Codes 0, 2, 1, 3 in bytes, then in order.
        mixed = times_plus(_counted(high, ptx_type), 256, _counted(low, ptx_type))
        signs = (bytes_of(low, high, 0x7351) >> Uint32(4)) & Uint32(0x08080808)
        mixed = mixed + signs - Uint32(_COUNTS_FROM[ptx_type] * (1 + 256) & 0xFFFFFFFF)
        halves.append(mixed + (mixed >> Uint32(12)))
    if len(halves) == 1:
        return halves
    fours = zip(halves[::2], halves[1::2], strict=True)
    return [bytes_of(low, high, 0x5410) for low, high in fours]


def pack_down(upper: list, lower: list, to: Conversion) -> list:
    """Words of bytes that hold a code of each of two rows, the upper one's lowest."""
    if not to.has_words:
        pairs = [pair for two in zip(upper, lower, strict=True) for pair in zip(*two, strict=True)]
        return _pack_e2m1([value for pair in pairs for value in pair])
    ptx_type, packed = _ptx_type(to.dtype), []
    offset = _COUNTS_FROM[ptx_type] * (1 + 16) >> 16 & 0xFF  # in the third byte; the first has none
    for i in range(0, len(upper), 2):
        both = [
            times_plus(_counted(lower[j], ptx_type), 16, _counted(upper[j], ptx_type))
            for j in (i, i + 1)
        ]
        signs = _signs(*(bytes_of(*rows[i : i + 2], 0x7531) for rows in (upper, lower)))
        packed.append(bytes_of(*both, 0x6420) + signs - Uint32(offset * 0x01000100))
    return packed


def pack_below(rows: list, to: Conversion) -> list:
    """Pairs below each other as `pack_column` takes them: words of half of both columns."""
    if not to.has_words:
        return rows
    ptx_type, halves = _ptx_type(to.dtype), []
    for i in range(0, len(rows), 4):
        four = rows[i : i + 4]
        word = _counted(four[3], ptx_type)
        for pair in four[2::-1]:
            word = times_plus(word, 16, _counted(pair, ptx_type))
        signs = _signs(*(bytes_of(four[j], four[j + 2], 0x7351) for j in (0, 1)))
        offset = _COUNTS_FROM[ptx_type] * (1 + 16 + 256 + 4096) & 0xFFFFFFFF
        halves.append(word + signs - Uint32(offset))
    return halves


def pack_column(below: list, which: int, to: Conversion) -> list:
    """Words of the codes of one column of two."""
    if not to.has_words:
        floats = [pair[which] for pair in below]
        pairs = list(zip(floats[::2], floats[1::2], strict=True))
        if to.format.codes_per_byte == 1:
            return pack_along(pairs, to)
        return _pack_e2m1(floats)
    pairs = zip(below[::2], below[1::2], strict=True)
    return [bytes_of(low, high, (0x5410, 0x7632)[which]) for low, high in pairs]


def _signs(low: Uint32, high: Uint32) -> Uint32:
    """The top bits of `low`'s bytes at bits 3 of bytes, and of `high`'s at bits 7."""
    mask = 0x08080808
    mixed = (low >> Uint32(4)) & Uint32(mask) | high & Uint32(~mask & 0xFFFFFFFF)
    return mixed & Uint32(0x88888888)


# Where 16-bit floats count by ones, twice: 128 in bfloat16, 1024 in float16. Added to a number of
# a few units, this rounds it to an integer, and what is behind it is that integer.
_COUNTS_FROM = {"bf16x2": 0x43004300, "f16x2": 0x64006400}


def _counted(pair: Uint32, ptx_type: str) -> Uint32:
    """`_COUNTS_FROM` + the e2m1 codes of the magnitudes of two scaled floats; of NaN the largest.

    Codes count steps: two a unit up to 2, one up to 4, a half beyond. So a code is the least of
    2 x, x + 2, x / 2 + 4 and 7, rounded to the nearest integer, an even one from a tie.
    """
    two, one, half = {"bf16x2": (0x4000, 0x3F80, 0x3F00), "f16x2": (0x4000, 0x3C00, 0x3800)}[
        ptx_type
    ]
    code = "{ .reg .b32 a, t, u, v, c, d; and.b32 a, {$r0}, 0x7fff7fff; "
    for name, factor, added in (("t", two, 0), ("u", one, 2), ("v", half, 4)):
        code += (
            f"mov.b32 c, 0x{factor:04x}{factor:04x}; "
            f"mov.b32 d, 0x{_COUNTS_FROM[ptx_type] + added * 0x10001:08x}; "
            f"fma.rn.{ptx_type} {name}, a, c, d; "
        )
    code += (
        f"min.{ptx_type} t, t, u; min.{ptx_type} t, t, v; "
        f"mov.b32 d, 0x{_COUNTS_FROM[ptx_type] + 7 * 0x10001:08x}; min.{ptx_type} {{$w0}}, t, d; }}"
    )
    return ptx(code, Uint32, pair)


def times_plus(a: Uint32, factor: int, b: Uint32) -> Uint32:
    """a * factor + b, in the pipe that has room, not by a shift."""
    return ptx(f"mad.lo.u32 {{$w0}}, {{$r0}}, {factor}, {{$r1}};", Uint32, a, b)


def _to_odd(value: Float32) -> Float32:
    """Cut to float16's ten bits of mantissa, of which the last is 1 if anything is cut off."""
    bits = float_to_bits(value)
    return bits_to_float(bits | ((bits & Uint32(0x1FFF)) + Uint32(0x1FFF) & Uint32(0x2000)))


def _cut_two(low: Float32, high: Float32) -> Uint32:
    """Two float16 in a word, rounded towards zero: exact, but far below the smallest code."""
    return ptx("cvt.rz.f16x2.f32 {$w0}, {$r1}, {$r0};", Uint32, low, high)


def pack_products(floats: list, factor: Float32, arch: str) -> list:
    """Words of the e2m1 codes of floats times a block's factor."""
    to = Conversion("bfloat16", MXFP4_E2M1, arch)
    if not to.has_words:
        return _pack_e2m1([value * factor for value in floats])
    pairs = [_two_to_odd(*two, arch) for two in zip(floats[::2], floats[1::2], strict=True)]
    inverses = pair(float_to_bits(factor), float_to_bits(factor))
    return pack_along([scaled_pair([word], inverses, to) for word in pairs], to)


def _two_to_odd(low: Float32, high: Float32, arch: str) -> Uint32:
    """Two floats cut to bfloat16, whose last bit is 1 if anything is cut off: as `_to_odd`."""
    odd = (
        "prmt.b32 c, a, b, 0x5410; prmt.b32 d, a, b, 0x7632; "
        "mov.b32 a, 0x00010001; min.u16x2 c, c, a; or.b32 {$w0}, c, d; }"
    )
    if not has(arch, 90):
        one = "and.b32 c, {0}, 0xffff; add.u32 c, c, 0xffff; and.b32 c, c, 0x10000; "
        one += "or.b32 {0}, {0}, c; "
        odd = one.format("a") + one.format("b") + "prmt.b32 {$w0}, a, b, 0x7632; }"
    code = "{ .reg .b32 a, b, c, d; mov.b32 a, {$r0}; mov.b32 b, {$r1}; " + odd
    return ptx(code, Uint32, low, high)


def _pack_e2m1(floats: list) -> list:
    """Words of eight codes, rounded to nearest even and saturated; NaN gives the largest."""
    floats = [*floats, *[Float32(0.0)] * (-len(floats) % 8)]
    return [_pack_eight_e2m1(floats[i : i + 8]) for i in range(0, len(floats), 8)]


def _pack_eight_e2m1(floats: list) -> Uint32:
    cvt = "cvt.rn.satfinite.e2m1x2.f32 b{0}, {{$r{2}}}, {{$r{1}}}; "
    code = "".join(cvt.format(i, 2 * i, 2 * i + 1) for i in range(4))
    text = f"{{ .reg .b8 b0, b1, b2, b3; {code}mov.b32 {{$w0}}, {{b0, b1, b2, b3}}; }}"
    return ptx(text, Uint32, *floats)


@cute.jit
def factor_of(scale: Uint32) -> Float32:
    """The float32 of a scale's byte: 2^(scale - 127), or NaN."""
    bits = scale << Uint32(23)
    if scale == Uint32(0):
        bits = Uint32(1 << 22)  # 2^-127 is subnormal
    if scale == Uint32(SCALE_NAN):
        bits = Uint32(_NAN)
    return bits_to_float(bits)


def unpack_four(word: Uint32, to: Conversion) -> list:
    """The float32 of four codes, one a byte, the lowest byte's first; exact."""
    format = to.format
    unpack = _unpack_four if has(to.arch, 89) else _unpack_four_halves
    if format == MXFP4_E2M1:
        return _unpack_four_e2m1(word)
    if format not in WIDER:
        return unpack(word, format)
    word = word & Uint32(_REST_OF_6_BITS) | (word & Uint32(_SIGNS_OF_6_BITS)) << Uint32(2)
    shift = Float32(2.0 ** (WIDER[format].bias - format.bias))
    return [value * shift for value in unpack(word, WIDER[format])]


def _unpack_four(word: Uint32, format) -> list:
    cvt = f"cvt.rn.f16x2.{_ELEMENT[format]}x2"
    code = (
        "{ .reg .b16 low, high, h0, h1, h2, h3; .reg .b32 a, b; mov.b32 {low, high}, {$r0}; "
        f"{cvt} a, low; {cvt} b, high; mov.b32 {{h0, h1}}, a; mov.b32 {{h2, h3}}, b; "
        "cvt.f32.f16 {$w0}, h0; cvt.f32.f16 {$w1}, h1; "
        "cvt.f32.f16 {$w2}, h2; cvt.f32.f16 {$w3}, h3; }"
    )
    return list(ptx(code, [Float32] * 4, word))


def _unpack_four_halves(word: Uint32, format) -> list:
    """`_unpack_four` without a conversion: e5m2 is the upper byte of a float16.

    The bits of e4m3, one place down, are a float16 times 2^-8, except for NaN, which is all ones.
    """
    e4m3 = format == MXFP8_E4M3
    shift = (
        "and.b32 s, h, 0x80008000; shr.u32 h, h, 1; and.b32 h, h, 0x3f803f80; or.b32 h, h, s; "
        "mov.b32 s, 0x5c005c00; mul.rn.f16x2 h, h, s; "
    )
    one = "cvt.f32.f16 {{$w{0}}}, {1}; "
    if e4m3:
        one = (
            "cvt.f32.f16 f, {1}; abs.f32 a, f; setp.gt.f32 p, a, 0f43E00000; "
            "selp.f32 {{$w{0}}}, 0f7FFFFFFF, f, p; "
        )
    code = "".join(
        f"prmt.b32 h, {{$r0}}, 0, 0x{select}; {shift if e4m3 else ''}mov.b32 {{low, high}}, h; "
        + one.format(first, "low")
        + one.format(first + 1, "high")
        for first, select in ((0, 1404), (2, 3424))
    )
    text = "{ .reg .pred p; .reg .b16 low, high; .reg .b32 h, s; .reg .f32 a, f; " + code + "}"
    return list(ptx(text, [Float32] * 4, word))


def unpack_nibbles(word: Uint32) -> list:
    """A word's eight e2m1 codes, the even ones and the odd ones, one a byte."""
    return [word & Uint32(0x0F0F0F0F), (word >> Uint32(4)) & Uint32(0x0F0F0F0F)]


def expanded(words: list) -> list:
    """Words of one code a byte, from words of two."""
    spread = []
    for word in words:
        low, high = unpack_nibbles(word)
        spread += [bytes_of(low, high, select) for select in (0x5140, 0x7362)]
    return spread


def _unpack_four_e2m1(word: Uint32) -> list:
    """The float32 of four codes, one a byte: their bits are a float16's, times 2^14."""
    half = (
        "prmt.b32 p, {{$r0}}, 0, 0x{select}; shl.b32 s, p, 4; shl.b32 p, p, 1; "
        "and.b32 s, s, 0x80008000; and.b32 p, p, 0x0e000e00; or.b32 p, p, s; "
        "mul.rn.f16x2 p, p, t; mov.b32 {{low, high}}, p; "
        "cvt.f32.f16 {{$w{0}}}, low; cvt.f32.f16 {{$w{1}}}, high; "
    )
    code = (
        "{ .reg .b16 low, high; .reg .b32 p, s, t; mov.b32 t, 0x74007400; "
        + half.format(0, 1, select=1404)
        + half.format(2, 3, select=3424)
        + "}"
    )
    return list(ptx(code, [Float32] * 4, word))


def round_two(low: Float32, high: Float32, dtype: str) -> Uint32:
    """Two 16-bit floats in a word, rounded to nearest even; NaN gives 0x7FFF."""
    code = f"cvt.rn.{_SUFFIX[dtype]}.f32 {{$w0}}, {{$r1}}, {{$r0}};"
    return ptx(code, Uint32, low, high)


def float_to_bits(value: Float32) -> Uint32:
    """The bits of a float32."""
    return ptx("mov.b32 {$w0}, {$r0};", Uint32, value)


def round_all(floats: list, dtype: str) -> list:
    """The words of these floats as `dtype` has them."""
    if dtype == "float32":
        return [float_to_bits(value) for value in floats]
    pairs = zip(floats[::2], floats[1::2], strict=True)
    return [round_two(low, high, dtype) for low, high in pairs]


def scaled(words: list, factors: list, to: Conversion) -> list:
    """The float32 of codes, one a byte, times as many factors."""
    floats = [value for word in words for value in unpack_four(word, to)]
    return [value * by for value, by in zip(floats, factors, strict=True)]


def dequantized(words: list, factors: list, to: Conversion) -> list:
    """Words of the floats of codes, one a byte, times as many factors, rounded once.

    Args:
      words: of codes.
      factors: floats of `factor_of`: powers of two, or NaN.
      to: the floats' type, and the codes'.
    """
    if (to.format, to.dtype) == (MXFP4_E2M1, "bfloat16"):
        # All products are exact, or overflow; those with NaN are 0x7FFF (seen on an H200).
        bits = [float_to_bits(factor) for factor in factors]
        pairs = [pair(low, high) for low, high in zip(bits[::2], bits[1::2], strict=True)]
        values = [two for word in words for two in _unpack_e2m1_to_bf16(word, to.arch)]
        return [_multiply_bf16x2(*both, to.arch) for both in zip(values, pairs, strict=True)]
    return round_all(scaled(words, factors, to), to.dtype)


def _unpack_e2m1_to_bf16(word: Uint32, arch: str) -> list:
    """Two words of the bfloat16 of four codes, one a byte.

    A code times 2^6 + 2^12 has its magnitude where a bfloat16 has its exponent's last bits and its
    mantissa's first, and its sign where that has its own: a float times 2^-126, which t takes back.
    """
    two = (
        "prmt.b32 p, {{$r0}}, 0, 0x{select}; mul.lo.u32 p, p, 0x1040; and.b32 p, p, 0x81c081c0; "
        "{product}; "
    )
    product, zero = "mul.rn.bf16x2 {{$w{0}}}, p, t", ""
    if not has(arch, 90):
        product, zero = "fma.rn.bf16x2 {{$w{0}}}, p, t, z", ".reg .b32 z; mov.b32 z, 0x80008000; "
    two = two.replace("{product}", product)
    code = (
        f"{{ .reg .b32 p, t; {zero}mov.b32 t, 0x7e807e80; "
        + two.format(0, select=4140)
        + two.format(1, select=4342)
        + "}"
    )
    return list(ptx(code, [Uint32] * 2, word))


def _byte_of_e2m1(byte: Uint32) -> Uint32:
    """The bfloat16 of a byte's two codes: bits go where one times 2^-126 has them."""
    code = (
        "{ .reg .b32 s, m, t; mul.lo.u32 s, {$r0}, 0x01001000; and.b32 s, s, 0x80008000; "
        "mul.lo.u32 m, {$r0}, 0x00040040; and.b32 m, m, 0x01c001c0; or.b32 m, m, s; "
        "mov.b32 t, 0x7e807e80; mul.rn.bf16x2 {$w0}, m, t; }"
    )
    return ptx(code, Uint32, byte)


def dequantized_pairs(words: list, factors: list, to: Conversion) -> list:
    """Words of two bfloat16 of codes, one a byte, times words of two bfloat16 factors.

    Args:
      words: of codes.
      factors: for each pair of codes, of powers of two, or NaN.
      to: bfloat16, and the codes' format.
    """
    if to.format == MXFP4_E2M1:
        values = [two for word in words for two in _unpack_e2m1_to_bf16(word, to.arch)]
    else:
        floats = [value for word in words for value in unpack_four(word, to)]
        values = round_all(floats, "bfloat16")
    return [_multiply_bf16x2(*operands, to.arch) for operands in zip(values, factors, strict=True)]


def through_codes(pairs: list, factors: list, to: Conversion) -> list:
    """Words of two bfloat16, the floats of the codes of pairs, see `dequantized_pairs`."""
    codes = pack_along(pairs, to)
    codes = codes if to.format.codes_per_byte == 1 else expanded(codes)
    return dequantized_pairs(codes, factors, to)


def byte_of_e2m1(byte: Uint32, factors: Uint32, arch: str) -> Uint32:
    """A byte's two codes as bfloat16, times a word of two bfloat16 factors; exact, or NaN."""
    return _multiply_bf16x2(_byte_of_e2m1(byte), factors, arch)
