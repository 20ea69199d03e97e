"""Arithmetic on single elements and scales; the only file in which NVIDIA archs may differ.

Naming: `word` is a 32-bit register with two 16-bit elements or one float32, lower element first.
"""

import cutlass
from cutlass import Float32, Uint16, Uint32, cute
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
def scale_of(
    amax: Uint32,  # float32 bits
    emax: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    round_add: Uint32,
    round_exception: Uint32,
):
    """The E8M0 byte of a block and the float32 that its elements are multiplied by.

    The rule is `formats.Scaling.rounding`, whose two numbers come in as run-time scalars.
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
    return scale, bits_to_float(inverse)


@dsl_user_op
def pack_two(low: Float32, high: Float32, format, *, loc=None, ip=None) -> Uint16:
    """Two codes, rounded to nearest even and saturated; NaN gives 0x7F."""
    return cute.arch.inline_ptx(
        f"cvt.rn.satfinite.{_ELEMENT[format]}x2.f32 {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Uint16],
        read_only_args=[high, low],
        loc=loc,
        ip=ip,
    )
