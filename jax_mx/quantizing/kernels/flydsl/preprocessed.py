"""Hadamard transforms and stochastic rounding in registers, see `reference.hadamard` and `noise`.

A lane holds whole blocks, as 16 pairs of elements i and i + 16, which instructions take at once;
both blocks that a transform of 64 spans.
"""

from collections.abc import Iterable, Mapping, Sequence

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl._mlir.dialects import llvm
from flydsl.expr import Float32, Uint32, Uint64

from jax_mx.formats.formats import BLOCK, MXFP4_E2M1, Format
from jax_mx.quantizing.facts.modes import Mode
from jax_mx.quantizing.kernels import noise
from jax_mx.quantizing.kernels.flydsl import convert
from jax_mx.quantizing.kernels.flydsl.kernel import load_words


def flush_subnormals(mode: Mode, prescale: Uint32) -> None:
    """Makes subnormal float32 operands and results zeros of their sign, from here on.

    A kernel calls this before it computes with x. Elements that are neither rotated nor multiplied
    keep their bits. After either step no element is subnormal, and a subnormal product with a
    block's factor has the code of zero.
    """
    bits = Uint32(0)
    if not mode.hadamard:
        bits = (prescale == Uint32(0)).select(Uint32(3), Uint32(0))
    convert.flush_subnormals(bits)


def data_of_blocks(
    mode: Mode, words: list, settings: Mapping[str, Uint32], start, blocks: Iterable
) -> list[list[Uint32]]:
    """The seed and the flips, as far as the kind has them, of each of a lane's blocks.

    The blocks' numbers are `start`, which all lanes share, plus the numbers in `blocks`. `settings`
    has the flips of a call without an operand of flips: with two blocks in a group, flips of even
    blocks and flips of odd ones.
    """
    if not mode.hadamard:
        return [[_word(w, start, block) for w in words] for block in blocks]
    *seeds, flip_words = words
    even = settings["flips"]
    flips = (even, settings.get("flips_odd", even))
    return [
        [*(_word(w, start, block) for w in seeds), _flips(flip_words, flips[i], start, block)]
        for i, block in enumerate(blocks)
    ]


@flyc.jit
def _flips(words, flips, start, block):
    """Where the call has no such operand, its pointer is null."""
    if fx.ptrtoint(words) != Uint64(0):
        flips = _word(words, start, block)
    return flips


def _word(words, start, block) -> Uint32:
    # FlyDSL takes what it loads for signed.
    return Uint32(load_words(words + start * 4, block * 4, 1, 4)[0])


def elements(mode: Mode, dtype: str, blocks: list, loaded: list, prescale: Uint32) -> list:
    """The pairs of blocks as they are scaled, from their words in memory; of whole groups."""
    pairs = []
    for group, data in zip(_groups(mode, blocks), _groups(mode, loaded), strict=True):
        if mode.hadamard:
            group = [_flipped(row, some[-1]) for row, some in zip(group, data, strict=True)]
        floats = [[e for word in row for e in convert.elements(word, dtype)] for row in group]
        pairs += _preprocessed(mode, floats, prescale)
    return pairs


def elements_of_two(mode: Mode, dtype: str, columns: list, loaded: list, prescale: Uint32) -> list:
    """`elements` of two blocks of 16 bits, in words that have one of each."""
    if mode.hadamard:
        columns = _flipped_beside(columns, *(block_data[-1] for block_data in loaded))
    both = [*zip(*(convert.elements(word, dtype) for word in columns), strict=True)]
    return [
        pairs for group in _groups(mode, both) for pairs in _preprocessed(mode, group, prescale)
    ]


def _groups(mode: Mode, blocks: Sequence) -> list:
    n = mode.blocks
    return [blocks[i : i + n] for i in range(0, len(blocks), n)]


def _preprocessed(mode: Mode, group: list, prescale: Uint32) -> list:
    halves = [(floats[: BLOCK // 2], floats[BLOCK // 2 :]) for floats in group]
    group = [[_pair(*two) for two in zip(*both, strict=True)] for both in halves]
    if mode.hadamard:
        group = _transformed(group, mode.hadamard)
    if mode.stochastic:
        # Without, times 1, which changes none but NaN.
        factor = (prescale == Uint32(0)).select(Uint32(0x3F800000), prescale).bitcast(Float32)
        group = [_times(pairs, factor) for pairs in group]
    return group


def scale_of(pairs: list, format: Format, rule: list, arch: str) -> tuple[Uint32, Uint32]:
    """The scale of a block's elements, and the bits of their factor, see `convert.scale_of`."""
    amax = convert.largest_magnitude([two[i] for two in pairs for i in (0, 1)], arch)
    return convert.scale_of(amax, format, "float32", tuple(rule))


def codes(
    mode: Mode, pairs: list, inverse: Uint32, loaded: list, format: Format, arch: str
) -> list[Uint32]:
    """The words of a block's codes."""
    values, poison = scaled(pairs, inverse), convert.poison([inverse], [1, 1, 1, 1])
    if mode.stochastic:
        return random_words(values, loaded[0], poison)
    return [convert.pack_word(values[i : i + 8], poison, format, arch) for i in range(0, BLOCK, 8)]


def scaled(pairs: list, inverse: Uint32) -> list[Float32]:
    """The elements in order, times their factor."""
    products = _times(pairs, inverse.bitcast(Float32))
    return [two[i] for i in (0, 1) for two in products]


def _times(pairs: list, factor: Float32) -> list:
    return [two * _pair(factor, factor) for two in pairs]


def _pair(low: Float32, high: Float32):
    return fx.Vector.from_elements([low, high], Float32)


# ---- the Hadamard transform ---
def _flipped(words: list, flips: Uint32) -> list:
    """Words of elements, with the signs flipped that the bits of the block's flips say."""
    if len(words) == BLOCK:
        return [w ^ (flips << (31 - i) & Uint32(1 << 31)) for i, w in enumerate(words)]
    changed = []
    for first in range(0, len(words), 8):
        # Bits of odd elements, 15 places up: as far from those of even ones as their signs are.
        bits = flips >> (2 * first)
        bits = bits & Uint32(0x5555) | (bits & Uint32(0xAAAA)) << 15
        for i, word in enumerate(words[first : first + 8]):
            changed.append(word ^ (bits << (15 - 2 * i) & Uint32(0x80008000)))
    return changed


def _flipped_beside(words: list, left: Uint32, right: Uint32) -> list:
    """Words that hold an element of each of two blocks, with the signs flipped as bits say."""
    changed = []
    for first, half in ((0, (0, 1, 4, 5)), (16, (2, 3, 6, 7))):
        bits = convert.bytes_of(right, left, *half)
        for i, word in enumerate(words[first : first + 16]):
            changed.append(word ^ (bits << (15 - i) & Uint32(0x80008000)))
    return changed


def _transformed(group: list, size: int) -> list:
    """The transform of each `size` elements of blocks, which may span two of them."""
    group = [_within_block(pairs, size) for pairs in group]
    if size > BLOCK:
        both = [*zip(*group, strict=True)]
        group = [[a + b for a, b in both], [a - b for a, b in both]]
    return [_times(pairs, Float32(size**-0.5)) for pairs in group]


def _within_block(pairs: list, size: int) -> list:
    """The transform's steps in a block; the last one of 32 is within pairs."""
    for stride in (1, 2, 4, 8):
        pairs = [
            pairs[i ^ stride] - mine if i & stride else mine + pairs[i ^ stride]
            for i, mine in enumerate(pairs)
        ]
    return [_sum_and_difference(two) for two in pairs] if size >= BLOCK else pairs


def _sum_and_difference(two):
    """The sum and the difference of a pair; LLVM does not find this instruction."""
    asm = "v_pk_add_f32 $0, $1, $1 op_sel:[0,1] op_sel_hi:[0,1] neg_hi:[0,1]"
    value = two.ir_value()
    return fx.Vector(llvm.inline_asm(value.type, [value], asm, "=v,v"), dtype=Float32)


# ---- stochastic rounding ---
def random_words(values: list[Float32], seed: Uint32, poison: Uint32) -> list[Uint32]:
    """Words of the e2m1 codes of a block's scaled elements, rounded at random; NaN by `poison`.

    From 1 on the bits of a float32 count codes, by 2^22 each. Below 1 the bits of x / 2 + 1 / 2 do,
    after half a unit in the last place is subtracted. So rounding keeps whole multiples of 2^-16 of
    a code, and keeps other numbers below the next multiple. The larger of both, plus the noise, has
    the code with its top bit inverted.
    """
    seed = _half_mixed(seed ^ seed >> 16)
    limit, codes = Float32(MXFP4_E2M1.max), []
    for j in range(BLOCK // 2):
        two = [
            convert.intrinsic("llvm.minnum.f32", Float32, value, limit)
            for value in (
                convert.intrinsic("llvm.fabs.f32", Float32, x) for x in values[2 * j : 2 * j + 2]
            )
        ]
        sums = convert.line(_pair(*two), 0.5, 0.5 - 2.0**-25)
        at_random = _noise(seed ^ Uint32(noise.step(j)))
        for i in (0, 1):
            bits = sums[i].bitcast(Uint32)
            for other in (two[i].bitcast(Uint32), Float32(0.5).bitcast(Uint32)):
                bits = convert.intrinsic("llvm.umax.i32", Uint32, bits, other)
            codes.append((bits << 2) + at_random[i])
    signs = [value.bitcast(Uint32) for value in values]
    packed = [_nibbles(codes[i : i + 8], signs[i : i + 8]) for i in range(0, BLOCK, 8)]
    nan = Uint32(MXFP4_E2M1.nan_code * 0x11111111)
    return [convert.where(poison, nan, word) for word in packed]


def _half_mixed(x: Uint32) -> Uint32:
    """`reference._mixed` without x ^ x >> 16, which is the first step and the last."""
    x = x * Uint32(noise.FACTORS[0])
    return (x ^ x >> 13) * Uint32(noise.FACTORS[1])


def _noise(word: Uint32) -> list[Uint32]:
    """The 16 bits of two elements, each in bits 8 to 23, from a word that is mixed by a step."""
    word = _half_mixed(word)
    zero = 0x0C
    # The last step would leave the upper half as it is.
    return [
        convert.bytes_of(half, half, zero, at, at + 1, zero)
        for half, at in ((word ^ word >> 16, 0), (word, 2))
    ]


def _nibbles(codes: list[Uint32], signs: list[Uint32]) -> Uint32:
    """A word of 8 codes, each in bits 24 to 26, with the top bits of the others."""
    even, odd = (_top_bytes(codes[i::2]) for i in (0, 1))
    codes_ = _where(Uint32(0x0F0F0F0F), even, odd << 4) ^ Uint32(0x44444444)
    even, odd = (_top_bytes(signs[i::2]) for i in (0, 1))
    signs_ = _where(Uint32(0x0F0F0F0F), even >> 4, odd)
    return _where(Uint32(0x88888888), signs_, codes_)


def _top_bytes(words: list[Uint32]) -> Uint32:
    """A word of the top bytes of four words."""
    low, high = (convert.bytes_of(b, a, 3, 7, 3, 7) for a, b in (words[:2], words[2:]))
    return convert.bytes_of(high, low, 0, 1, 4, 5)


def _where(mask: Uint32, a: Uint32, b: Uint32) -> Uint32:
    """Does what `convert.where` does, with a mask that is a constant."""
    values = [x.ir_value() for x in (mask, a, b)]
    return Uint32(llvm.inline_asm(Uint32.ir_type, values, "v_bfi_b32 $0, $1, $2, $3", "=v,s,v,v"))
