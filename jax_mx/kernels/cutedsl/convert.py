"""Arithmetic on single elements and scales; the only file in which NVIDIA archs may differ.

Naming: `word` is a 32-bit register with two 16-bit elements or one float32, lower element first.
"""

import cutlass
from cutlass import Float32, Uint32, cute
from cutlass.cutlass_dsl import dsl_user_op

from jax_mx.formats import MXFP8_E4M3, MXFP8_E5M2, SCALE_NAN

INPUT = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16, "float32": cutlass.Float32}
_SUFFIX = {"bfloat16": "bf16x2", "float16": "f16x2", "float32": "f32"}
_ELEMENT = {MXFP8_E4M3: "e4m3", MXFP8_E5M2: "e5m2"}
_INF, _NAN = 0x7F800000, 0x7FC00000


@dsl_user_op
def bits_to_float(bits: Uint32, *, loc=None, ip=None) -> Float32:
    """The float32 of these bits."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};",
        write_only_types=[Float32],
        read_only_args=[bits],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def larger_magnitude(a: Uint32, b: Uint32, dtype: str, *, loc=None, ip=None) -> Uint32:
    """Per element max(|a|, |b|), NaN if either is; the sign is meaningless. One HMNMX2 or FMNMX."""
    kind = "b32" if dtype != "float32" else "f32"
    registers = ".reg .f32 a, b, d; mov.b32 a, {$r0}; mov.b32 b, {$r1}; "
    code = f"max.NaN.xorsign.abs.{_SUFFIX[dtype]} "
    code = (
        f"{code}{{$w0}}, {{$r0}}, {{$r1}};"
        if kind == "b32"
        else f"{{ {registers}{code}d, a, b; mov.b32 {{$w0}}, d; }}"
    )
    return cute.arch.inline_ptx(
        code, write_only_types=[Uint32], read_only_args=[a, b], loc=loc, ip=ip
    )


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


@dsl_user_op
def _half_to_float_bits(half: Uint32, *, loc=None, ip=None) -> Uint32:
    return cute.arch.inline_ptx(
        "{ .reg .b16 h; .reg .f32 f; cvt.u16.u32 h, {$r0}; cvt.f32.f16 f, h; mov.b32 {$w0}, f; }",
        write_only_types=[Uint32],
        read_only_args=[half],
        loc=loc,
        ip=ip,
    )


@cute.jit
def amaxes_of_two(a: Uint32, b: Uint32, dtype: cutlass.Constexpr) -> Uint32:
    """A word with the larger magnitude of a's two 16-bit elements, and that of b's."""
    lows = (a & Uint32(0xFFFF)) | (b << Uint32(16))
    return larger_magnitude(lows, pair(a, b), dtype)


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
def products(words: cutlass.Constexpr, inverses: Uint32, dtype: cutlass.Constexpr):
    """Two elements, of one word or (float32) of two, times a pair of inverses, in float32.

    Exact but for what is far below the smallest code. For bfloat16 the product is one bfloat16
    instruction for both: the factor is a power of two, so only a result below 2^-126 is rounded.
    """
    if cutlass.const_expr(dtype == "bfloat16"):
        word = _multiply_bf16x2(words[0], inverses)
        return bits_to_float(word << Uint32(16)), bits_to_float(word & Uint32(0xFFFF0000))
    low = bits_to_float(inverses << Uint32(16))
    high = bits_to_float(inverses & Uint32(0xFFFF0000))
    if cutlass.const_expr(dtype == "float32"):
        return bits_to_float(words[0]) * low, bits_to_float(words[1]) * high
    a = bits_to_float(_half_to_float_bits(words[0] & Uint32(0xFFFF)))
    b = bits_to_float(_half_to_float_bits(words[0] >> Uint32(16)))
    return a * low, b * high


def shifted(words: list, first) -> list:
    """The words that begin `first` bytes, modulo half of all, into an even number of them."""
    half = len(words) // 2
    for step in [1 << i for i in reversed(range(half.bit_length() - 1))]:
        skip = (first & Uint32(4 * step)) != 0
        words = [
            Uint32(cutlass.select_(skip, words[i + step], words[i]))
            for i in range(len(words) - step)
        ]
    bits = (first & Uint32(3)) * 8
    return [funnel(words[i], words[i + 1], bits) for i in range(half)]


@dsl_user_op
def funnel(low: Uint32, high: Uint32, bits: Uint32, *, loc=None, ip=None) -> Uint32:
    """The 32 bits that begin `bits` (0 to 31) into two words."""
    return cute.arch.inline_ptx(
        "shf.r.wrap.b32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Uint32],
        read_only_args=[low, high, bits],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def bytes_of(low: Uint32, high: Uint32, select: int, *, loc=None, ip=None) -> Uint32:
    """A word of four bytes, by the digits of `select`, the lowest byte's last: 0 to 3 of `low`."""
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, 0x{select:04x};",
        write_only_types=[Uint32],
        read_only_args=[low, high],
        loc=loc,
        ip=ip,
    )


def turned_four(words: list) -> list:
    """Four words of four bytes, transposed."""
    a, b = bytes_of(words[0], words[1], 0x5140), bytes_of(words[0], words[1], 0x7362)
    c, d = bytes_of(words[2], words[3], 0x5140), bytes_of(words[2], words[3], 0x7362)
    halves = [(a, c, 0x5410), (a, c, 0x7632), (b, d, 0x5410), (b, d, 0x7632)]
    return [bytes_of(low, high, select) for low, high, select in halves]


@dsl_user_op
def _multiply_bf16x2(a: Uint32, b: Uint32, *, loc=None, ip=None) -> Uint32:
    return cute.arch.inline_ptx(
        "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[a, b],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def pack_four(
    a: Float32, b: Float32, c: Float32, d: Float32, format, *, loc=None, ip=None
) -> Uint32:
    """Four codes, rounded to nearest even and saturated, a's in the lowest byte; NaN gives 0x7F."""
    cvt = f"cvt.rn.satfinite.{_ELEMENT[format]}x2.f32"
    return cute.arch.inline_ptx(
        f"{{ .reg .b16 low, high; {cvt} low, {{$r1}}, {{$r0}}; {cvt} high, {{$r3}}, {{$r2}}; "
        "mov.b32 {$w0}, {low, high}; }",
        write_only_types=[Uint32],
        read_only_args=[a, b, c, d],
        loc=loc,
        ip=ip,
    )


@cute.jit
def factor_of(scale: Uint32) -> Float32:
    """The float32 of a scale's byte: 2^(scale - 127), or NaN."""
    bits = scale << Uint32(23)
    if scale == Uint32(0):
        bits = Uint32(1 << 22)  # 2^-127 is subnormal
    if scale == Uint32(SCALE_NAN):
        bits = Uint32(_NAN)
    return bits_to_float(bits)


@dsl_user_op
def unpack_four(word: Uint32, format, *, loc=None, ip=None) -> list:
    """The float32 of four codes, the lowest byte's first; exact."""
    cvt = f"cvt.rn.f16x2.{_ELEMENT[format]}x2"
    return list(
        cute.arch.inline_ptx(
            "{ .reg .b16 low, high, h0, h1, h2, h3; .reg .b32 a, b; mov.b32 {low, high}, {$r0}; "
            f"{cvt} a, low; {cvt} b, high; mov.b32 {{h0, h1}}, a; mov.b32 {{h2, h3}}, b; "
            "cvt.f32.f16 {$w0}, h0; cvt.f32.f16 {$w1}, h1; "
            "cvt.f32.f16 {$w2}, h2; cvt.f32.f16 {$w3}, h3; }",
            write_only_types=[Float32] * 4,
            read_only_args=[word],
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def round_two(low: Float32, high: Float32, dtype: str, *, loc=None, ip=None) -> Uint32:
    """Two 16-bit floats in a word, rounded to nearest even; NaN gives 0x7FFF."""
    return cute.arch.inline_ptx(
        f"cvt.rn.{_SUFFIX[dtype]}.f32 {{$w0}}, {{$r1}}, {{$r0}};",
        write_only_types=[Uint32],
        read_only_args=[low, high],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def float_to_bits(value: Float32, *, loc=None, ip=None) -> Uint32:
    """The bits of a float32."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};",
        write_only_types=[Uint32],
        read_only_args=[value],
        loc=loc,
        ip=ip,
    )


def round_all(floats: list, dtype: str) -> list:
    """The words of these floats as `dtype` has them."""
    if dtype == "float32":
        return [float_to_bits(value) for value in floats]
    pairs = zip(floats[::2], floats[1::2], strict=True)
    return [round_two(low, high, dtype) for low, high in pairs]
