"""Hadamard transforms and stochastic rounding in registers, see `reference.hadamard` and `noise`.

Arithmetic is float32 throughout, and a thread holds `elements` consecutive elements of a block. A
neighbouring lane holds their partners in a butterfly that the thread lacks.
"""

import dataclasses

import cutlass
from cutlass import Float32, Int32, Uint32, const_expr, cute, range_constexpr

from jax_mx.formats.formats import BLOCK
from jax_mx.quantizing.facts.modes import Mode
from jax_mx.quantizing.kernels import noise
from jax_mx.quantizing.kernels.cutedsl import convert


@dataclasses.dataclass(frozen=True)
class Place:
    """The elements of a block that a thread holds: the `index`-th `elements` among `sharers`.

    `odd`: 1 in the second block of a transform that spans two, whose threads are neighbours too.
    """

    index: Int32
    sharers: int
    elements: int
    odd: Int32


@cute.jit
def load(mode: cutlass.Constexpr, pointers, block, inside):
    """A block's data, or zeros outside; and whether its flips of signs are known without them.

    They are known where the call has no operand of flips.
    """
    loaded, known = [], cutlass.Boolean(False)
    for i in range_constexpr(len(pointers)):
        rW = cute.make_rmem_tensor(1, Uint32)
        rW[0] = Uint32(0)
        if const_expr(mode.hadamard and i == len(pointers) - 1):
            known = pointers[i].toint() == 0
            inside = inside & (pointers[i].toint() != 0)
        if inside:
            rW[0] = cute.make_tensor(pointers[i] + block, cute.make_layout(1))[0]
        loaded.append(rW[0])
    return loaded, known


def elements(mode: Mode, dtype: str, words: list, place: Place, prescale: Int32) -> list:
    """Elements in float32 from words in memory, which are `flipped`, without the last `factor`.

    Small elements need more than this factor: see `settled`.
    """
    floats = widened(words, dtype)
    if mode.hadamard:
        floats = hadamard(floats, mode.hadamard, place)
        if not is_exact(mode, dtype):
            floats = [_ftz("mul", value, Float32(mode.hadamard**-0.5)) for value in floats]
    if mode.stochastic and not is_exact(mode, dtype):
        floats = [_times_if_any(value, prescale) for value in floats]
    elif mode.stochastic and mode.hadamard:  # rounded as the fourth part of it is
        floats = [value * _or_one(prescale) for value in floats]
    return floats


def is_exact(mode: Mode, dtype: str) -> bool:
    """Whether elements times `factor` are exact where they are normal numbers."""
    if mode.hadamard:
        return mode.hadamard in (16, 64)
    return dtype != "float32"


def factor(mode: Mode, dtype: str, prescale: Int32) -> Float32:
    """The remaining factor of elements, which is multiplied together with their block's."""
    if not is_exact(mode, dtype):
        return Float32(1.0)
    return Float32(mode.hadamard**-0.5) if mode.hadamard else _or_one(prescale)


def finished(mode: Mode, dtype: str, value: Float32, prescale: Int32) -> Float32:
    """An element after all multiplications, each of which turns subnormals into zeros."""
    if not is_exact(mode, dtype):
        return value
    if mode.hadamard:
        return _ftz("mul", value, factor(mode, dtype, prescale))
    return _times_if_any(value, prescale)


def settled(mode: Mode, dtype: str, value: Float32, prescale: Int32) -> Float32:
    """An element, or zero if it is one after all multiplications."""
    done = finished(mode, dtype, value, prescale)
    return Float32(cutlass.select_(done == Float32(0.0), done, value))


# An element 2^-40 times as large as its block's largest is zero in every code. So only in blocks
# without one as large as this, the bits of 2^-80, does it matter which elements are zero before.
SMALL = (127 - 80) << 23


def widened(words: list, dtype: str) -> list:
    """The elements of words in float32, exactly."""
    if dtype == "float32":
        return [convert.bits_to_float(word) for word in words]
    if dtype == "float16":
        return [value for word in words for value in _widened_halves(word)]
    bits = [two for word in words for two in (word << Uint32(16), word & Uint32(0xFFFF0000))]
    return [convert.bits_to_float(word) for word in bits]


def _widened_halves(word: Uint32) -> list:
    code = (
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
        "cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }"
    )
    return list(convert.ptx(code, [Float32] * 2, word))


# ---- the Hadamard transform ---
@cute.jit
def flipped(words, loaded, known, flips, place: cutlass.Constexpr, size: cutlass.Constexpr):
    """Words of elements with signs flipped, by words that all blocks share or one of this block.

    The scalar unit prepares words that all blocks share, for even and for odd blocks.
    """
    rW = cute.make_rmem_tensor(len(words), Uint32)
    if known:
        mine = flips[0]
        if const_expr(size > BLOCK):
            mine = Int32(cutlass.select_(place.odd != Int32(0), flips[1], flips[0]))
        for i, word in enumerate(flip(words, Uint32(mine), place)):
            rW[i] = word
    else:
        for i, word in enumerate(flip(words, loaded, place)):
            rW[i] = word
    return [rW[i] for i in range(len(words))]


def flip(words: list, flips: Uint32, place: Place) -> list:
    """Words of elements with the signs flipped that bits of the block's word say."""
    flips = flips >> Uint32(place.index * place.elements)
    if len(words) == place.elements:
        return [w ^ (flips << Uint32(31 - i)) & Uint32(1 << 31) for i, w in enumerate(words)]
    changed = []
    for first in range(0, len(words), 8):
        # Bits of odd elements, 15 places up: as far from those of even ones as their signs are.
        bits = flips >> Uint32(2 * first)
        bits = bits & Uint32(0x5555) | (bits & Uint32(0xAAAA)) << Uint32(15)
        for i, word in enumerate(words[first : first + 8]):
            changed.append(word ^ (bits << Uint32(15 - 2 * i)) & Uint32(0x80008000))
    return changed


def hadamard(floats: list, size: int, place: Place) -> list:
    """The transform of each `size` elements, times its root; a block's threads are neighbours."""
    n, index = place.elements, place.index
    if size > BLOCK:
        index = index + place.odd * Int32(place.sharers)
    for stride in [1 << k for k in range(size.bit_length() - 1)]:
        if stride < n:
            floats = [
                _ftz("sub", floats[i ^ stride], mine)
                if i & stride
                else _ftz("add", mine, floats[i ^ stride])
                for i, mine in enumerate(floats)
            ]
        else:  # what the other lane holds, plus this one's, or minus it if that comes behind
            lanes = stride // n
            behind = (index & Int32(lanes)) != Int32(0)
            sign = Float32(cutlass.select_(behind, Float32(-1.0), Float32(1.0)))
            floats = [_exchanged(value, sign, lanes) for value in floats]
    return floats


def _exchanged(value: Float32, sign: Float32, lanes: int) -> Float32:
    other = cute.arch.shuffle_sync_bfly(convert.float_to_bits(value), offset=lanes)
    return _times_plus_ftz(value, sign, convert.bits_to_float(other))


def _ftz(op: str, a: Float32, b: Float32) -> Float32:
    """The operation, in which subnormal operands and results are zeros of their sign."""
    return convert.ptx(f"{op}.rn.ftz.f32 {{$w0}}, {{$r0}}, {{$r1}};", Float32, a, b)


def _times_plus_ftz(a: Float32, b: Float32, c: Float32) -> Float32:
    return convert.ptx("fma.rn.ftz.f32 {$w0}, {$r0}, {$r1}, {$r2};", Float32, a, b, c)


# ---- stochastic rounding ---
def _or_one(prescale: Int32) -> Float32:
    """The prescale, given by its bits, or 1 where there is none."""
    bits = cutlass.select_(prescale == Int32(0), Int32(0x3F800000), prescale)
    return convert.bits_to_float(Uint32(bits))


def _times_if_any(value: Float32, prescale: Int32) -> Float32:
    """value * prescale, given by its bits; where there is none, value with all its bits."""
    code = (
        "{ .reg .pred p; .reg .f32 f; setp.ne.s32 p, {$r1}, 0; mov.b32 f, {$r1}; "
        "mov.f32 {$w0}, {$r0}; @p mul.rn.ftz.f32 {$w0}, {$r0}, f; }"
    )
    return convert.ptx(code, Float32, value, prescale)


def random_codes(floats: list, by: Float32, seed: Uint32, place: Place) -> list:
    """Words of the e2m1 codes of floats times a block's factor, rounded at random."""
    at_random = []
    # All but the last of `_mixed`'s steps, which the first one of the next time takes back.
    seed = _half_mixed(seed ^ (seed >> Uint32(16)))
    for j in range(place.elements // 2):
        at_random += _noise(seed ^ _step(j, place))
    codes = [_code(value * by, bits) for value, bits in zip(floats, at_random, strict=True)]
    packed = []
    for i in range(0, len(codes), 8):
        word = Uint32(0)
        for code in reversed(codes[i : i + 8]):
            word = convert.funnel(code, word, Uint32(28))
        packed.append(word)
    return packed


def _half_mixed(x: Uint32) -> Uint32:
    """`reference._mixed` without x ^ x >> 16, which is the first step and the last."""
    x = x * Uint32(noise.FACTORS[0])
    return (x ^ (x >> Uint32(13))) * Uint32(noise.FACTORS[1])


def _step(j: int, place: Place) -> Uint32:
    """The word that is combined with a seed for the j-th word of a thread's noise."""
    selected = None
    for index in reversed(range(place.sharers)):
        step = Uint32(noise.step(index * place.elements // 2 + j))
        mine = place.index == Int32(index)
        selected = step if selected is None else Uint32(cutlass.select_(mine, step, selected))
    return selected


def _noise(word: Uint32) -> list:
    """The 16 bits of two elements, each in bits 12 to 27, from the word that is mixed by a step."""
    word, mask = _half_mixed(word), Uint32(0xFFFF << 12)
    upper = word >> Uint32(4)  # the last step would leave the word's upper half as it is
    return [((word << Uint32(12)) ^ upper) & mask, upper & mask]


def _code(value: Float32, noise: Uint32) -> Uint32:
    """The e2m1 code in the upper four bits, rounded by noise in bits 12 to 27; of NaN the largest.

    Above 1 the bits of a float32 count codes, by 2^22 each; below 1 the bits of 2 x + 2 do. The
    larger of both, 64 times, plus the noise, has the code above bit 28.
    """
    code = (
        "{ .reg .f32 a, s; .reg .b32 g, h, v; abs.f32 a, {$r0}; min.f32 a, a, 0f40C00000; "
        "fma.rz.f32 s, a, 0f40000000, 0f40000000; mov.b32 g, a; mov.b32 h, s; "
        "add.u32 g, g, 0x01000000; max.u32 g, g, h; mad.lo.u32 g, g, 64, {$r1}; "
        "mov.b32 v, {$r0}; and.b32 v, v, 0x80000000; or.b32 {$w0}, g, v; }"
    )
    return convert.ptx(code, Uint32, value, noise)
