"""Arithmetic on single elements and scales; the only file in which AMD archs may differ.

Naming: `word` is a 32-bit register with two 16-bit elements or one float32, lower element first.
"""

from collections.abc import Sequence
from functools import reduce

import flydsl.expr as fx
from flydsl._mlir.dialects import llvm, rocdl
from flydsl.expr import Float32, Uint32

from jax_mx.formats.formats import SCALE_NAN, WIDER, Format

_INF = 0x7F800000
_ONES, _SIGNS = 0x01010101, 0x80808080
_POISON = 0xFFC00000  # a NaN with a sign
_WHOLE, _WHOLE_BITS = 2.0**23, 0x4B000000  # from here on float32 are whole numbers


def intrinsic(name: str, result, *operands):
    """The result, of DSL type `result`, of an LLVM intrinsic."""
    values = [operand.ir_value() for operand in operands]
    return result(llvm.call_intrinsic(result.ir_type, name, values, [], []))


def bytes_of(high: Uint32, low: Uint32, *select: int) -> Uint32:
    """A word of four bytes, the first lowest: 0 to 3 are bytes of `low`, 4 to 7 of `high`."""
    return bytes_by(Uint32(sum(byte << 8 * i for i, byte in enumerate(select))), high, low)


def bytes_by(select: Uint32, high: Uint32, low: Uint32) -> Uint32:
    """Does what `bytes_of` does, with the choice in the bytes of a word."""
    return intrinsic("llvm.amdgcn.perm", Uint32, high, low, select)


def from_lane(word: Uint32, control: int) -> Uint32:
    """The word of another lane of this row of 16, which must be active (DPP)."""
    flags = [fx.Int32(control), fx.Int32(15), fx.Int32(15), fx.Boolean(True)]
    return intrinsic("llvm.amdgcn.update.dpp.i32", Uint32, word, word, *flags)


# DPP controls: exchanges with lane ^ 1, lane ^ 2 and, in the mirror image of 8, lane ^ 7.
EXCHANGE = {1: 0xB1, 2: 0x4E, 4: 0x141}


def from_neighbour(word: Uint32, distance: int) -> Uint32:
    """The word of the lane that is 1, 2 or 4 away, by exclusive or."""
    if distance == 4:  # for which DPP has no control
        return from_row(word, distance)
    return from_lane(word, EXCHANGE[distance])


def from_group(word: Uint32, group: int, index: int) -> Uint32:
    """The word of lane `index` of this lane's aligned group, of up to 32 (LDS hardware, no LDS)."""
    pattern = index << 5 | (31 & -group)
    return intrinsic("llvm.amdgcn.ds.swizzle", Uint32, word, fx.Int32(pattern))


def from_row(word: Uint32, distance: int) -> Uint32:
    """The word of the lane that is this power of two away, by exclusive or."""
    if distance < 32:
        return intrinsic("llvm.amdgcn.ds.swizzle", Uint32, word, fx.Int32(distance << 10 | 31))
    return from_anywhere(word, lane_id() ^ Uint32(distance))


def from_anywhere(word: Uint32, lane: Uint32) -> Uint32:
    """The word of any lane (LDS hardware, no LDS)."""
    return intrinsic("llvm.amdgcn.ds.bpermute", Uint32, lane << 2, word)


def lane_id() -> Uint32:
    """This lane's number in its wave."""
    return Uint32(fx.Int32(fx.thread_idx.x)) % Uint32(64)


def wave_id() -> Uint32:
    """This wave's number in its workgroup; in a scalar register."""
    return first_lane(Uint32(fx.Int32(fx.thread_idx.x)) // Uint32(64))


def first_lane(word: Uint32) -> Uint32:
    """The word of the wave's first lane; in a scalar register."""
    return intrinsic("llvm.amdgcn.readfirstlane.i32", Uint32, word)


def where(mask: Uint32, a: Uint32, b: Uint32) -> Uint32:
    """The bits of the constant `a` where the mask has ones, else the bits of `b`."""
    # Written out, LLVM finds two instructions on gfx950.
    values = [x.ir_value() for x in (mask, a, b)]
    return Uint32(llvm.inline_asm(Uint32.ir_type, values, "v_bfi_b32 $0, $1, $2, $3", "=v,v,s,v"))


def magnitudes(word: Uint32, dtype: str) -> Uint32:
    """The word without its elements' signs. As integers, magnitudes compare as values do."""
    return word & Uint32(0x7FFFFFFF if dtype == "float32" else 0x7FFF7FFF)


def flush_subnormals(mode: Uint32) -> None:
    """Makes subnormal float32 operands and results zeros of their sign, from here on, of mode 0.

    That is in the mode of the wave; 2 makes zeros of operands alone, 3 leaves them.
    """
    mode = intrinsic("llvm.amdgcn.readfirstlane.i32", Uint32, mode)
    llvm.inline_asm(
        None,
        [mode.ir_value()],
        "s_setreg_b32 hwreg(HW_REG_MODE, 4, 2), $0",
        "s,~{memory}",
        has_side_effects=True,
    )


def larger(a: Uint32, b: Uint32, dtype: str) -> Uint32:
    """Per element the larger of two words of magnitudes: NaN > Inf > finite."""
    if dtype == "float32":
        return intrinsic("llvm.umax.i32", Uint32, a, b)
    pair = fx.Vector.make_type(2, fx.Uint16)
    halves = [llvm.bitcast(pair, word.ir_value()) for word in (a, b)]
    return Uint32(llvm.bitcast(Uint32.ir_type, llvm.call_intrinsic(
        pair, "llvm.umax.v2i16", halves, [], [])))  # fmt: skip


def elements(word: Uint32, dtype: str) -> list[Float32]:
    """The word's elements in float32, exactly."""
    if dtype == "float32":
        return [word.bitcast(Float32)]
    if dtype == "bfloat16":
        return [(word << 16).bitcast(Float32), (word & Uint32(0xFFFF0000)).bitcast(Float32)]
    halves = [fx.Uint16(word), fx.Uint16(word >> 16)]
    return [half.bitcast(fx.Float16).to(Float32) for half in halves]


def largest_magnitude(x: Sequence[Float32], arch: str) -> Uint32:
    """The float32 bits of the largest magnitude: NaN > Inf > finite."""
    if arch == "gfx950":  # which has three at once, of their magnitudes
        largest = intrinsic("llvm.fabs.f32", Float32, x[0])
        for value in x[1:]:
            value = intrinsic("llvm.fabs.f32", Float32, value)
            largest = intrinsic("llvm.maximum.f32", Float32, largest, value)
        return magnitudes(largest.bitcast(Uint32), "float32")
    bits = [magnitudes(value.bitcast(Uint32), "float32") for value in x]
    return reduce(lambda a, b: larger(a, b, "float32"), bits)


def largest_bits(word: Uint32, dtype: str) -> Uint32:
    """The float32 bits of the largest element of a word of magnitudes."""
    if dtype == "float32":
        return word
    half = intrinsic("llvm.umax.i32", Uint32, word & Uint32(0xFFFF), word >> 16)
    return elements(half, dtype)[0].bitcast(Uint32)


def amaxes_of_two(a: Uint32, b: Uint32, dtype: str) -> Uint32:
    """A word with the larger of a's two 16-bit magnitudes, and that of b's."""
    return larger(bytes_of(b, a, 0, 1, 4, 5), bytes_of(b, a, 2, 3, 6, 7), dtype)


def scale_of(amax: Uint32, format: Format, dtype: str, rounding: tuple[Uint32, ...]):
    """The E8M0 byte of a block, and the float32 bits of what its elements are multiplied by.

    `amax` is in float32 bits. The rule is `formats.Scaling.rounding`, whose two numbers are
    run-time scalars. The scale of an all-zero block is another one where the format has a choice.
    The factor is a power of two, so its upper half is a bfloat16; a poisoned block has a negative
    factor, see `poison`.
    """
    round_add, round_exception, *zero_scale = rounding
    emax = Uint32(format.emax)
    scale = intrinsic("llvm.usub.sat.i32", Uint32, (amax + round_add) >> 23, emax)
    if dtype == "float32":  # 16-bit inputs never reach that value
        scale = (amax == round_exception).select(Uint32(0), scale)
    # 2^(127 - scale): of a finite block the scale is at most 253, so this is a normal number.
    inverse = (Uint32(254) - scale) << 23
    poisoned = amax >= Uint32(_INF)
    if zero_scale:
        scale = (amax == Uint32(0)).select(*zero_scale, scale)
    return (
        poisoned.select(Uint32(SCALE_NAN), scale),
        poisoned.select(Uint32(_POISON), inverse),
    )


def pair(low: Uint32, high: Uint32) -> Uint32:
    """The upper halves of two words in one."""
    return bytes_of(high, low, 2, 3, 6, 7)


def half(pair: Uint32, which: int) -> Float32:
    """The float32 of one of them."""
    return (pair & Uint32(0xFFFF0000) if which else pair << 16).bitcast(Float32)


def poison(pairs: list[Uint32], which: list[int]) -> Uint32:
    """For `pack_word`: 0xFF for each of four bytes whose factor is poisoned.

    `which` numbers the factors in `pairs`, of which there are at most two.
    """
    # Selectors 8 to 11 are copies of the signs of the four halves.
    return bytes_of(pairs[-1], pairs[0], *(8 + i for i in which))


def products(x: list[Float32], factors: list[Float32]) -> list[Float32]:
    """Pairs of elements, neighbours in registers, times their factors: an instruction each."""
    scaled = []
    for i in range(0, len(x), 2):
        two, by = (fx.Vector.from_elements(v[i : i + 2], Float32) for v in (x, factors))
        product = two * by
        scaled += [product[0], product[1]]
    return scaled


def pack_word(scaled: Sequence[Float32], poison: Uint32, format: Format, arch: str) -> Uint32:
    """A word of codes, rounded to nearest even and saturated; NaN where `poison` has a byte."""
    pack = {
        ("gfx942", 1): _pack_as_integers,
        ("gfx950", 1): _pack_in_hardware,
        ("gfx942", 2): _pack_nibbles_as_integers,
        ("gfx950", 2): _pack_nibbles_in_hardware,
    }[arch, format.codes_per_byte]
    nan = sum(format.nan_code << 32 // len(scaled) * i for i in range(len(scaled)))
    return where(poison, Uint32(nan), pack(scaled, format))


def _pack_in_hardware(x: Sequence[Float32], format: Format) -> Uint32:
    """The conversion itself gives NaN or infinity beyond the largest value: clamp first.

    It converts to 8 bits; `formats.WIDER` explains formats of 6 bits.
    """
    limits = Float32(-format.max), Float32(format.max)
    x = [intrinsic("llvm.amdgcn.fmed3.f32", Float32, value, *limits) for value in x]
    if format in WIDER:
        x = products(x, [Float32(2.0 ** (format.bias - WIDER[format].bias))] * 4)
    x = [value.ir_value() for value in x]
    convert = rocdl.cvt_pk_fp8_f32 if format.mantissa_bits == 3 else rocdl.cvt_pk_bf8_f32
    nothing = llvm.mlir_undef(Uint32.ir_type)  # both halves are written
    low = convert(Uint32.ir_type, x[0], x[1], nothing, False)
    word = Uint32(convert(Uint32.ir_type, x[2], x[3], low, True))
    return word if format.bits == 8 else _with_signs(word, word >> 2, format)


def _with_signs(codes: Uint32, signs: Uint32, format: Format) -> Uint32:
    """Bytes of codes with their signs, where the format has it, from another word."""
    at = 1 << (format.bits - 1)
    return (codes & Uint32((at - 1) * _ONES)) | (signs & Uint32(at * _ONES))


def _pack_as_integers(x: Sequence[Float32], format: Format) -> Uint32:
    """gfx942 converts to FNUZ, other numbers than OCP's, so this rounds by a float32 addition.

    Adding 2^(23 - mantissa_bits) times the element's power of two, at least that of the smallest
    normal number, rounds to the format's step. The sum's mantissa then counts steps from that power
    of two, which is the code once the exponent is brought in: 2^mantissa_bits steps a binade.
    """
    shift = 23 - format.mantissa_bits
    least = 127 + 1 - format.bias
    codes = []
    for value in x:
        magnitude = intrinsic(
            "llvm.minnum.f32", Float32, intrinsic("llvm.fabs.f32", Float32, value),
            Float32(format.max),
        )  # fmt: skip
        binade = magnitude.bitcast(Uint32) & Uint32(_INF)
        binade = intrinsic("llvm.umax.i32", Uint32, binade, Uint32(least << 23))
        total = intrinsic(
            "llvm.fma.f32", Float32, binade.bitcast(Float32), Float32(2.0**shift), magnitude
        ).bitcast(Uint32)
        # The exponent field, shifted down to the mantissa's top, is 2^mantissa_bits times itself.
        bias = (least + shift) << format.mantissa_bits
        codes.append(total + (total >> shift) - Uint32(bias))
    low, high = bytes_of(codes[1], codes[0], 0, 4, 0, 4), bytes_of(codes[3], codes[2], 0, 4, 0, 4)
    bits = [value.bitcast(Uint32) for value in x]
    sign = bytes_of(
        bytes_of(bits[3], bits[2], 3, 7, 3, 7), bytes_of(bits[1], bits[0], 3, 7, 3, 7), 0, 1, 4, 5
    )
    return _with_signs(bytes_of(high, low, 0, 1, 4, 5), sign >> (8 - format.bits), format)


def _pack_nibbles_in_hardware(x: Sequence[Float32], format: Format) -> Uint32:
    """The conversion saturates and keeps signs; its own scale stays 1.

    AMD's manual does not say how it rounds. To nearest even, also below the smallest subnormal, was
    measured on an MI355X: ROCm/aiter#974.
    """
    one, word = Float32(1.0).ir_value(), llvm.mlir_undef(Uint32.ir_type)
    for i in range(4):
        pair = [value.ir_value() for value in x[2 * i : 2 * i + 2]]
        word = rocdl.cvt_scalef32_pk_fp4_f32(Uint32.ir_type, word, *pair, one, i)
    return Uint32(word)


def _pack_nibbles_as_integers(x: Sequence[Float32], format: Format) -> Uint32:
    """By float32 additions: the code of a magnitude a is min(2a, a + 2, a / 2 + 4), rounded.

    Each binade of e2m1 is one of these lines, on which codes are whole numbers; rounding does not
    change which one is the least. Adding 2^23 rounds to whole numbers, the low bits of the sum.
    """
    word = signs = Uint32(0)
    for i in range(6, -1, -2):  # from the last on, which will be highest
        two = x[i : i + 2]
        magnitudes = [intrinsic("llvm.fabs.f32", Float32, value) for value in two]
        a = fx.Vector.from_elements([
            intrinsic("llvm.minnum.f32", Float32, value, Float32(format.max))
            for value in magnitudes
        ], Float32)  # fmt: skip
        lines = [line(a, slope, _WHOLE + at) for slope, at in ((2.0, 0), (1.0, 2), (0.5, 4))]
        for j in (1, 0):
            code, *others = (line[j].bitcast(Uint32) for line in lines)
            for other in others:
                code = intrinsic("llvm.umin.i32", Uint32, code, other)
            word = (word << 4) + code
            signs = intrinsic("llvm.fshl.i32", Uint32, signs, two[j].bitcast(Uint32), Uint32(4))
    exponents = sum(_WHOLE_BITS << 4 * i for i in range(8)) & 0xFFFFFFFF
    return (signs & Uint32(0x88888888)) | (word - Uint32(exponents))


def line(a, slope: float, offset: float):
    """slope * a + offset, of two float32 at once."""
    vector_type = fx.Vector.make_type(2, Float32)
    constants = [fx.Vector.from_elements([Float32(c)] * 2, Float32) for c in (slope, offset)]
    values = [vector.ir_value() for vector in (a, *constants)]
    sums = llvm.call_intrinsic(vector_type, "llvm.fma.v2f32", values, [], [])
    return fx.Vector(sums, dtype=Float32)


# ---- dequantize ---
def factor_of(scale: Uint32) -> Float32:
    """The float32 of a scale's byte: 2^(scale - 127), of which that of 0 is subnormal."""
    bits = intrinsic("llvm.umax.i32", Uint32, scale << 23, Uint32(1 << 22))
    return bits.bitcast(Float32)


def poison_of(scale: Uint32) -> Uint32:
    """For `unpack_four`: of a scale's byte, for all four codes."""
    return (scale == Uint32(SCALE_NAN)).select(Uint32(0x7F * _ONES), Uint32(0))


def poison_of_four(scales: Uint32) -> Uint32:
    """For `unpack_four`: of the scales of four codes."""
    # Adding 1 carries into the top bit of the bytes that end in seven ones.
    nans = ((scales & Uint32(~_SIGNS & 0xFFFFFFFF)) + Uint32(_ONES)) & scales & Uint32(_SIGNS)
    return nans - (nans >> 7)


def separated(word: Uint32) -> tuple[Uint32, Uint32]:
    """Four bytes of two codes of 4 bits as four bytes of the first codes, and of the second.

    In each byte the code's bits are where a float16 has them in its upper half.
    """
    signs, rest = Uint32(_SIGNS), Uint32(0x0E * _ONES)
    return (word << 4 & signs) | (word << 1 & rest), (word & signs) | (word >> 3 & rest)


def in_order(word: Uint32) -> list[Uint32]:
    """Eight codes of 4 bits as two words, each byte as `separated` has it."""
    first, second = separated(word)
    return [bytes_of(second, first, i, 4 + i, i + 1, 5 + i) for i in (0, 2)]


def unpack_four(
    word: Uint32, factors: list[Float32], poison: Uint32, format: Format, dtype: str, arch: str
) -> list[Uint32]:
    """The words of four codes times their factors, rounded to `dtype`; NaN for each poisoned code.

    The function uses no chip's conversions from 8 bits: a code has the bits of a float16, times 2^8
    for e4m3 and 2^14 for e2m1, which comes as `separated` has it. Codes of 6 bits are e4m3's or
    e5m2's, except for the bias, once their signs are in place.
    """
    if format.bits == 6:
        word = (word << 2 & Uint32(_SIGNS)) | (word & Uint32(0x1F * _ONES))
    if format.mantissa_bits != 3:
        low, high = Uint32(0), word
    else:  # one bit more of exponent
        low = word << 7 & Uint32(_SIGNS)
        high = word & Uint32(_SIGNS) | word >> 1 & Uint32(0x3F * _ONES)
    halves = [bytes_of(high, low, i, 4 + i, i + 1, 5 + i) for i in (0, 2)]
    floats = [value for pair in halves for value in elements(pair, "float16")]
    if format.bias != 15:
        floats = products(floats, [Float32(2.0 ** (15 - format.bias))] * 4)
    floats = products(floats, factors)
    # The top bit of each byte: whether its code, with that of a poisoned one all ones, is a NaN.
    if format.bits < 8:  # which have none of their own
        nans = poison + Uint32(_ONES)
    else:
        first_nan = format.nan_code if format.exponent_bits == 4 else 0x7D
        nans = (word & Uint32(~_SIGNS & 0xFFFFFFFF)) | poison
        nans = nans + Uint32((0x80 - first_nan) * _ONES)
    signs = [(8, 10), (9, 11)]  # for `bytes_of`: of these bytes in pairs, in (nans, nans << 8)
    floats_of_codes = []
    for two, (low, high) in zip((floats[:2], floats[2:]), signs, strict=True):
        if dtype == "float32":
            packed = [value.bitcast(Uint32) for value in two]
            masks = [bytes_of(nans, nans << 8, *[sign] * 4) for sign in (low, high)]
            quiet = Uint32(0x7FFFFFFF)
        else:
            packed = [_round_two(*two, dtype, arch)]
            masks = [bytes_of(nans, nans << 8, low, low, high, high)]
            quiet = Uint32(0x7FFF7FFF)
        floats_of_codes += [where(m, quiet, w) for w, m in zip(packed, masks, strict=True)]
    return floats_of_codes


def factor_back(inverse: Float32) -> Float32:
    """`factor_of` the scale whose inverse, see `scale_of`, this is; of a poisoned one anything."""
    bits = Uint32(254 << 23) - inverse.bitcast(Uint32)
    return intrinsic("llvm.umax.i32", Uint32, bits, Uint32(1 << 22)).bitcast(Float32)


def through_codes(
    scaled: list[Float32], factors: list[Float32], poisons: list[Uint32], format: Format,
    dtype: str, arch: str,
) -> list[Uint32]:  # fmt: skip
    """Words of dequantized codes.

    Args:
      scaled: elements times the inverses of their scales, which become codes.
      factors: the scale of each.
      poisons: for `unpack_four`, of each four.
      format: of the codes.
      dtype: of the words.
      arch: the kernel's.
    """
    size, none = 4 * format.codes_per_byte, Uint32(0)
    codes = [
        pack_word(scaled[i : i + size], none, format, arch) for i in range(0, len(scaled), size)
    ]
    if format.bits == 4:
        codes = [four for word in codes for four in in_order(word)]
    floats = []
    for i, (word, poison) in enumerate(zip(codes, poisons, strict=True)):
        floats += unpack_four(word, factors[4 * i : 4 * i + 4], poison, format, dtype, arch)
    return floats


def round_two(low: Float32, high: Float32, arch: str, dtype: str = "bfloat16") -> Uint32:
    """Two 16-bit floats in a word, rounded to nearest even; of a NaN one."""
    if dtype == "bfloat16" and arch != "gfx950":
        quiet = Uint32(0x7FC00000)
        low, high = (
            (x == x).select(x.bitcast(Uint32), quiet).bitcast(Float32) for x in (low, high)
        )
    return _round_two(low, high, dtype, arch)


def _round_two(low: Float32, high: Float32, dtype: str, arch: str) -> Uint32:
    """Two 16-bit floats in a word, rounded to nearest even; of a NaN anything."""
    if dtype == "float16" or arch == "gfx950":
        half = fx.Float16 if dtype == "float16" else fx.BFloat16
        return fx.Vector.from_elements([low.to(half), high.to(half)], half).bitcast(Uint32)[0]
    bits = [value.bitcast(Uint32) for value in (low, high)]
    rounded = [b + Uint32(0x7FFF) + (b >> 16 & Uint32(1)) for b in bits]
    return pair(*rounded)
