"""Rows that are normed as they are quantized: `Rows` along them, `NormedTiled` for other forms.

The sum of a row's squares has the order that `jax_mx.rms_norm` says: 2048 sums side by side, then
by neighbours. A lane has 4 or 8 neighbouring ones of these, so that the last steps are exchanges
within a wave and a few words of LDS.

For 16-bit x the mode of the wave makes zeros of subnormal float32 operands and keeps subnormal
results; a last product with 1 makes zeros of those. So a product that rounds to the least normal
number is that number, whether a chip tests before or after it rounds. float32 is computed in
float64, and `settled` looks at its bits.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl._mlir.dialects import llvm
from flydsl.expr import (
    Float32,
    Float64,
    Int32,
    Int64,
    Uint8,
    Uint16,
    Uint32,
    Uint64,
    const_expr,
    gpu,
    range_constexpr,
)

from jax_mx.facts.formats import BLOCK
from jax_mx.facts.layouts import ScaleLayout
from jax_mx.facts.variants import Variant
from jax_mx.kernels import geometry
from jax_mx.kernels.flydsl import convert
from jax_mx.kernels.flydsl.activations import fma64, quotient
from jax_mx.kernels.flydsl.flat import Flat
from jax_mx.kernels.flydsl.kernel import (
    WAVE,
    as_int64,
    composite,
    load_words,
    offset_in_tiles,
    pointer,
    round_up,
    shared_pointer,
    store_words,
)
from jax_mx.kernels.flydsl.tiled import TILE, Patch, Tiled
from jax_mx.kernels.geometry import NOT_READY, SUMS, Extents, Place, Tile, tree

_INF = 0x7FF0000000000000
_LEAST = 0x00800000  # the bits of the least normal float32
_RELAXED = fx.AtomicOrdering.Monotonic  # a factor says itself that it is there


# ---- arithmetic: of words of two 16-bit floats, or of one float32 ---
def settled(word: Uint32) -> Uint32:
    """The bits of a float32, of a subnormal one those of a zero of its sign; in any mode."""
    small = convert.magnitudes(word, "float32") < Uint32(_LEAST)
    return small.select(word & Uint32(0x80000000), word)


def one() -> Float32:
    """1.0, of which the compiler does not know: it would leave out products with it."""
    return Float32(llvm.inline_asm(Float32.ir_type, [], "v_mov_b32 $0, 1.0", "=v"))


def sums_with(sums: list, words: list[Uint32], dtype: str) -> list:
    """Sums and the squares of as many elements; none is fused, as those below 2^-126 are zeros."""
    if dtype == "float32":  # whose squares float64 holds
        wide = [settled(word).bitcast(Float32).to(Float64) for word in words]
        return [fma64(x, x, total) for x, total in zip(wide, sums, strict=True)]
    x = [element for word in words for element in convert.elements(word, dtype)]
    squares, found = convert.products(x, x), []
    for i in range(0, len(x), 2):
        a, b = (fx.Vector.from_elements(v[i : i + 2], Float32) for v in (sums, squares))
        total = a + b
        found += [total[0], total[1]]
    return found


def normed(words: list[Uint32], factor, weights: list[Float32], dtype: str, arch: str) -> list:
    """Elements times their row's factor, times their columns' weights."""
    if dtype == "float32":
        found = []
        for word, weight in zip(words, weights, strict=True):
            y = (settled(word).bitcast(Float32).to(Float64) * factor) * weight.to(Float64)
            found.append(settled(y.to(Float32).bitcast(Uint32)))
        return found
    x = [element for word in words for element in convert.elements(word, dtype)]
    for by in ([factor] * len(x), weights, [one()] * len(x)):  # the last one for what is subnormal
        x = convert.products(x, by)
    return [convert.round_two(*x[i : i + 2], arch, dtype) for i in range(0, len(x), 2)]


def added(words: list[Uint32], others: list[Uint32], arch: str) -> list[Uint32]:
    """The sums of words' bfloat16."""
    found = []
    for pair in zip(words, others, strict=True):
        a, b = (
            fx.Vector.from_elements(convert.elements(word, "bfloat16"), Float32) for word in pair
        )
        total = a + b
        both = convert.products([total[0], total[1]], [one()] * 2)
        found.append(convert.round_two(*both, arch))
    return found


def load_weights(weights, where, count: int, aligned: bool) -> list[Float32]:
    """Columns' weights, from so many bytes on."""
    each = [load_words(weights, where + 4 * i, 4, 16 if aligned else 4) for i in range(0, count, 4)]
    return [word.bitcast(Float32) for four in each for word in four]


def factor_of(total, length: Uint32, eps: Uint32):
    """sqrt(length / (total + length * eps)) in float64; `eps` are the bits of a float32.

    Of a float32 it is rounded to one. How the approximations of a chip are off decides nothing: see
    cutedsl/norms.py for the steps, and why they give the nearest numbers.
    """
    exponent = eps >> 23
    top = (exponent == Uint32(0)).select(Uint32(0), Uint32(1 << 23))
    whole = Int32(eps & Uint32(0x7FFFFF) | top).to(Float64)
    exponent = (exponent == Uint32(0)).select(Uint32(1), exponent)
    exponent = Int32(exponent) - Int32(150)
    wide_eps = convert.intrinsic("llvm.ldexp.f64.i32", Float64, whole, exponent)
    count = Int32(length).to(Float64)
    below = total.to(Float64) + count * wide_eps
    mean = quotient(count, below)
    inverse = convert.intrinsic("llvm.amdgcn.rsq.f64", Float64, mean)
    half = Float64(0.5)
    root, slope = mean * inverse, inverse * half
    for _ in range(2):
        rest = fma64(Float64(0.0) - root, slope, half)
        root, slope = fma64(root, rest, root), fma64(slope, rest, slope)
    root = fma64(fma64(Float64(0.0) - root, root, mean), slope, root)
    bits = root.bitcast(Uint64)
    bits = (below == Float64(0.0)).select(Uint64(_INF), bits)
    bits = (below.bitcast(Uint64) == Uint64(_INF)).select(Uint64(0), bits)
    root = bits.bitcast(Float64)
    return root if isinstance(total, Float64) else root.to(Float32)


def words_of(value) -> list[Uint32]:
    """The words of a float32 or a float64, the lower one first."""
    if isinstance(value, Float32):
        return [value.bitcast(Uint32)]
    bits = value.bitcast(Uint64)
    return [Uint32(bits), Uint32(bits >> Uint64(32))]


def of_words(words: list[Uint32]):
    """The inverse of `words_of`."""
    if len(words) == 1:
        return words[0].bitcast(Float32)
    return (Uint64(words[0]) | Uint64(words[1]) << Uint64(32)).bitcast(Float64)


def over_lanes(value, group: int):
    """The sum of the values of each `group` of lanes: of neighbours, and so on."""
    for bit in range(group.bit_length() - 1):
        other = convert.from_neighbour if bit < 3 else convert.from_row
        value = value + of_words([other(word, 1 << bit) for word in words_of(value)])
    return value


# ---- along rows ---
class Row:
    """A row's blocks, with the places of its scales; those beyond it are padding.

    Attributes:
      block: the number of its first one in x; 0 of a row that x has not. The same for all lanes.
    """

    def __init__(self, layout: ScaleLayout, rows: Uint32, cols: Uint32):
        self.layout, self.row = layout, Uint32(Int32(fx.block_idx.x))
        self.rows, self.cols = rows, cols
        self.there = self.row < rows
        self.block = self.there.select(as_int64(self.row) * as_int64(cols), Int64(0))

    def at(self, place) -> tuple:
        """(block, offset of its scale, whether there is such a block) of a column of the row."""
        inside = self.there & (place < self.cols)
        block = as_int64(inside.select(place, Uint32(0)))
        offset = self.block + block
        if self.layout.is_tiled:
            size = Extents(self.rows, self.cols)
            offset = offset_in_tiles(self.layout, Place(Uint32(0), self.row, place), size)
        return block, offset, inside

    def exists(self, place):
        """Whether there is a scale, or padding, in memory for a column."""
        if not self.layout.is_tiled:
            return self.there & (place < self.cols)
        return place < round_up(self.cols, self.layout.pad[1])


class Rows(Flat):
    """x (..., cols, 32) -> values like x, scales (..., cols) in the layout, factors (...).

    A workgroup has a row, and goes through it in turns of as many rounds as `Flat` quantizes at
    once. What it reads in the first turn stays in registers; the rest it reads twice. Workgroups
    beyond the last row write the padding of tiles of scales.
    """

    def __init__(self, variant: Variant, arch: str, layout: ScaleLayout, aligned: bool):
        super().__init__(variant, arch, layout, aligned)
        self.vector = 16 // self.itemsize
        self.waves = self.tuned("Rows")["waves"]
        self.threads = WAVE * self.waves
        self.rounds = SUMS // (self.threads * self.vector)  # rounds that have all sums
        self.apart = self.waves * self.per_chunk
        self.turn = self.chunks * self.apart  # blocks
        # As the report counts: it goes through a loop once, through `quantize` in two places.
        self.elements_per_thread = 2 * self.chunks * self.vector
        self.in_patches = True  # scales have places of their own
        self.extents = geometry.extents_of_rows()
        self.grid = geometry.grid_of_rows(1, layout.pad[0] if layout.is_tiled else 1)

    @flyc.kernel
    def kernel(self, pointers, scalars):
        arrays = self.named(pointers)
        rows, cols = (Uint32(n) for n in scalars[:2])
        if const_expr(self.itemsize == 2):
            convert.flush_subnormals(Uint32(2))
        lane = convert.lane_id()
        row = Row(self.layout, rows, cols)
        first = convert.wave_id() * Uint32(self.per_chunk) + lane // self.sharers
        turns = Int32((cols + Uint32(self.turn - 1)) // Uint32(self.turn))
        words = self.take(arrays, row, first, lane)
        zero = Float64(0.0) if const_expr(self.itemsize == 4) else Float32(0.0)
        sums = self.sums([zero] * (self.rounds * self.vector), words, row, first)
        for turn in range(Int32(1), turns):
            start = first + Uint32(turn) * Uint32(self.turn)
            more = self.take(arrays, row, start, lane)
            sums = self.sums(sums, more, row, start)
        factor = self.factor(sums, arrays["factors"], row, Uint32(scalars[len(scalars) - 1]))
        for turn in range(Int32(0), turns):
            start = first + Uint32(turn) * Uint32(self.turn)
            if turn > Int32(0):
                words = self.again(arrays, row, start, lane)
            made = self.norm(words, factor, arrays["weights"], row, start, lane)
            if const_expr(self.variant.source.floats):
                self.store_rounds(made, arrays["floats"], row, start, lane)
            self.quantize(made, arrays, scalars, row, start)

    def columns(self, sizes):
        """How many blocks a row has."""
        return sizes[1]

    def reaches(self, strip, first, c: int):
        """Whether the wave has blocks in a round: short rows have few."""
        return strip.there & (convert.first_lane(first) + Uint32(c * self.apart) < strip.cols)

    @flyc.jit
    def sums(self, sums, rounds, row, first):
        """A lane's sums, with the squares of its rounds."""
        for c in range_constexpr(self.chunks):
            at: fx.Constexpr = c % self.rounds * self.vector
            own = sums[at : at + self.vector]
            if self.reaches(row, first, c):
                own = sums_with(own, rounds[c], self.dtype)
            sums = [*sums[:at], *own, *sums[at + self.vector :]]
        return sums

    def again(self, arrays, row: Row, first, lane) -> list:
        """The words of a turn that were taken before: of a residual, what this lane has added."""
        return self.loaded(arrays["sum" if self.variant.added else "x"], row, first, lane)

    def place(self, row: Row, first, c: int, lane) -> tuple:
        """Where a lane's bytes of a round are in a row, and whether it has them."""
        block, _, there = row.at(first + Uint32(c * self.apart))
        return block * (BLOCK * self.itemsize) + as_int64(lane % self.sharers * 16), there

    @flyc.jit
    def loaded(self, x, row, first, lane):
        """The words of a turn's rounds, zeros beyond the row."""
        rounds, start = [], x + row.block * (BLOCK * self.itemsize)
        for c in range_constexpr(self.chunks):
            words = [Uint32(0)] * 4
            where, there = self.place(row, first, c, lane)
            if there:
                words = load_words(start, where, 4, self.align[0])
            rounds.append(words)
        return rounds

    @flyc.jit
    def take(self, arrays, row, first, lane):
        """The words of a turn; of a residual the sums, which it stores."""
        rounds = self.loaded(arrays["x"], row, first, lane)
        if const_expr(self.variant.added):
            others = self.loaded(arrays["residual"], row, first, lane)
            to = arrays["sum"] + row.block * (BLOCK * self.itemsize)
            for c in range_constexpr(self.chunks):
                rounds[c] = added(rounds[c], others[c], self.arch)
                where, there = self.place(row, first, c, lane)
                if there:
                    store_words(to, where, rounds[c], self.aligned_to("sum"))
        return rounds

    @flyc.jit
    def store_rounds(self, rounds, floats, row, first, lane):
        """Stores the words of a turn."""
        to = floats + row.block * (BLOCK * self.itemsize)
        for c in range_constexpr(self.chunks):
            where, there = self.place(row, first, c, lane)
            if there:
                store_words(to, where, rounds[c], self.aligned_to("floats"))

    @flyc.jit
    def factor(self, sums, to, row, eps):
        """The row's factor, for each lane's sums of squares; one wave finds and stores it."""
        count: fx.Constexpr = self.rounds * self.waves
        size: fx.Constexpr = 4 * (self.itemsize // 2)  # bytes of a sum
        array = fx.Array[Uint8, (count + 1) * size, 16]
        shared = fx.SharedAllocator().allocate(composite(fx.struct, {"sums": array})).peek().sums
        wave, lane = convert.wave_id(), convert.lane_id()
        for part in range_constexpr(self.rounds):
            total = over_lanes(tree(sums[part * self.vector : (part + 1) * self.vector]), WAVE)
            if lane == Uint32(0):
                place = (wave + Uint32(part * self.waves)) * Uint32(size)
                self.put(shared, place, words_of(total))
        gpu.barrier()
        if wave == Uint32(0):
            each = [of_words(self.got(shared, i * size)) for i in range(count)]
            found = factor_of(tree(each), row.cols * Uint32(BLOCK), eps)
            if lane == Uint32(0):
                self.put(shared, Uint32(count * size), words_of(found))
                if row.there:
                    single = found.to(Float32) if const_expr(self.itemsize == 4) else found
                    store_words(to, as_int64(row.row) * 4, words_of(single), 4)
        gpu.barrier()
        return of_words(self.got(shared, count * size))

    def put(self, shared, place, words: list) -> None:
        """Stores words in LDS."""
        at = shared_pointer(shared, Int32(place), Uint32, 4 * len(words))
        fx.generic_store(at, fx.Vector.from_elements(words, Uint32))

    def got(self, shared, place: int) -> list:
        """The words of a number in LDS."""
        n = self.itemsize // 2
        at = shared_pointer(shared, Int32(place), Uint32, 4 * n)
        if n == 1:
            return [fx.generic_load(at)]
        words = fx.generic_load(at, dtype=Uint32, count=n)
        return [words[i] for i in range(n)]

    @flyc.jit
    def norm(self, rounds, factor, weights, row, first, lane):
        """A turn's words, normed."""
        found, places = [], [self.place(row, first, c, lane) for c in range(self.chunks)]
        each = [
            load_weights(weights, where * (4 // self.itemsize), self.vector, self.aligned)
            for where, _ in places
        ]
        for c in range_constexpr(self.chunks):
            words = rounds[c]
            if self.reaches(row, first, c):
                words = normed(words, factor, each[c], self.dtype, self.arch)
            found.append(words)
        return found


# ---- other forms ---
class NormedTiled(Tiled):
    """`Tiled` of what is normed: x is read twice, the second time from a cache.

    Of each band of tiles, some workgroups find the rows' factors, each of their waves one. Those
    that quantize the band come a few bands later; their waves wait until the factors are there, and
    find them themselves where that takes long: the order in which workgroups run is not promised.
    Factors begin as zeros, and one that is there is none, so they say themselves that they are.
    """

    POLLS = 1 << 10  # about a millisecond

    def __init__(self, variant: Variant, arch: str, layout: ScaleLayout, aligned: bool):
        super().__init__(variant, arch, layout, aligned)
        self.waves, self.lag = self.threads // WAVE, self.tuned("NormedTiled")["lag"]
        self.finders = self.high // self.waves  # workgroups
        self.extents = geometry.extents_of_matrix(self.of)
        size, ahead = Extents(self.high, TILE), (self.finders, self.lag)
        self.grid = geometry.grid_in_bands(variant.form, size, self.region, self.of, ahead)
        self.scratch = geometry.cleared_factors(self.signature)

    @flyc.kernel
    def kernel(self, pointers, scalars):
        (m, k), arrays = self.lengths(scalars), self.named(pointers)
        convert.flush_subnormals(Uint32(2))
        lane, wave = convert.lane_id(), convert.wave_id()
        shared = self.allocated()
        each = round_up(k, self.region.cols) // TILE + Uint32(self.finders)
        bid = Uint32(Int32(fx.block_idx.x))
        step, number = bid // each, bid % each
        if number < Uint32(self.finders):
            row = step * self.high + number * self.waves + wave
            if row < m:
                bits = self.found(arrays, scalars, row, lane)
                if lane == Uint32(0):
                    to = pointer(arrays["factors"], as_int64(row) * 4, Uint32, 4)
                    fx.generic_store(to, bits, memory_order=_RELAXED, syncscope="agent")
        elif step >= Uint32(self.lag):
            at = Tile(Uint32(0), step - self.lag, number - self.finders, m, k)
            across, down = lane % self.lanes, lane // self.lanes
            patch = Patch(wave, wave * BLOCK + down * self.rows, across * self.vector)
            if const_expr(self.whole):
                words = self.loaded(arrays, at, patch)
                factors = self.awaited(arrays, scalars, at, patch, lane)
            else:  # there are no registers left for x while it waits
                factors = self.awaited(arrays, scalars, at, patch, lane)
                words = self.loaded(arrays, at, patch)
            words = self.norm(words, factors, arrays["weights"], at, patch)
            self.quantize(words, shared, arrays, scalars, at, patch)

    # ---- factors ---
    @flyc.jit
    def found(self, arrays, scalars, row, lane):
        """The bits of a row's factor, which one wave finds; never `NOT_READY`."""
        _, k = self.lengths(scalars)
        wide: fx.Constexpr = WAVE * self.vector
        parts: fx.Constexpr = SUMS // wide
        if const_expr(self.whole):
            starts = [Uint32(part * wide) for part in range(parts)]
            total = tree(self.parts_of_sum(arrays, row, starts, k, lane))
        else:  # one after the other, as many elements at once take many registers
            total = Float32(0.0)
            for part in range(Int32(0), Int32(parts)):
                (own,) = self.parts_of_sum(arrays, row, [Uint32(part) * Uint32(wide)], k, lane)
                mine = lane % Uint32(parts) == Uint32(part)
                total = mine.select(own.bitcast(Uint32), total.bitcast(Uint32)).bitcast(Float32)
            total = over_lanes(total, parts)
        factor = factor_of(total, k, Uint32(scalars[len(scalars) - 1]))
        bits = factor.bitcast(Uint32)
        return (bits == Uint32(NOT_READY)).select(Uint32(0x80000000), bits)

    @flyc.jit
    def parts_of_sum(self, arrays, row, starts, k, lane):
        """The sums of squares of parts of a wave's width, which begin at these columns."""
        n: fx.Constexpr = self.vector
        sums = [Float32(0.0)] * (n * len(starts))
        for turn in range(Int32(0), Int32((k + (SUMS - 1)) // SUMS)):
            col = Uint32(turn) * SUMS + lane * n
            words = [word for at in starts for word in self.piece(arrays, row, col + at, k)]
            sums = sums_with(sums, words, self.dtype)
        return [over_lanes(tree(sums[i : i + n]), WAVE) for i in range(0, len(sums), n)]

    @flyc.jit
    def piece(self, arrays, row, col, k):
        """A lane's words of a row, zeros beyond it; of a residual the sums, which it stores."""
        start = as_int64(row) * as_int64(k) * self.itemsize
        words = self.words_from(arrays["x"] + start, col, k)
        if const_expr(self.variant.added):
            other = self.words_from(arrays["residual"] + start, col, k)
            words = added(words, other, self.arch)
            to, where = arrays["sum"] + start, as_int64(col) * self.itemsize
            if const_expr(self.whole):
                if col < k:
                    store_words(to, where, words, self.aligned_to("sum"))
            else:
                each = fx.Vector.from_elements(words, Uint32).bitcast(Uint16)
                for j in range_constexpr(self.vector):
                    if col + j < k:
                        fx.generic_store(pointer(to, where + Int64(2 * j), Uint16, 2), each[j])
        return words

    @property
    def whole(self) -> bool:
        """Whether a lane's elements of a row are all there, or none."""
        return self.aligned or self.counts_blocks

    @flyc.jit
    def words_from(self, row, col, k):
        """Words of a row from a column on, zeros beyond it."""
        words = [Uint32(0)] * 4
        if const_expr(self.whole):
            if col < k:
                words = self.load_row(row, col, k)
            return words
        words = self.load_row(row, col, k)
        low = [(col + 2 * w < k).select(Uint32(0xFFFF), Uint32(0)) for w in range(4)]
        high = [(col + 2 * w + 1 < k).select(Uint32(0xFFFF0000), Uint32(0)) for w in range(4)]
        return [word & (a | b) for word, a, b in zip(words, low, high, strict=True)]

    @flyc.jit
    def awaited(self, arrays, scalars, at, patch, lane):
        """The factors of the rows of this lane's patch.

        The loop ends because it counts.
        """
        first = at.row * self.high + patch.wave * BLOCK
        there = (lane < Uint32(BLOCK)) & (first + lane < at.rows)
        place = as_int64(there.select(first + lane, Uint32(0))) * 4
        from_ = pointer(arrays["factors"], place, Uint32, 4)
        bits, polls = Uint32(1), Uint32(0)
        if there:
            bits = fx.generic_load(from_, memory_order=_RELAXED, syncscope="agent")
        while (bits == Uint32(NOT_READY)) & (polls < Uint32(self.POLLS)):
            llvm.inline_asm(None, [], "s_sleep 2", "", has_side_effects=True)
            bits = fx.generic_load(from_, memory_order=_RELAXED, syncscope="agent")
            polls = polls + Uint32(1)
        missing = convert.lanes_where(bits == Uint32(NOT_READY))
        if missing != Uint64(0):
            for r in range(Int32(0), Int32(BLOCK)):
                if (missing >> Uint64(Uint32(r))) & Uint64(1) != Uint64(0):
                    own = self.found(arrays, scalars, first + Uint32(r), lane)
                    bits = (lane == Uint32(r)).select(own, bits)
        bits, top = bits & Uint32(0x7FFFFFFF), patch.top % BLOCK
        return [convert.from_anywhere(bits, top + i).bitcast(Float32) for i in range(self.rows)]

    # ---- x ---
    def loaded(self, arrays, at: Tile, patch: Patch) -> list:
        """This lane's patch of x, or of the sum."""
        words = self.load(arrays["x"], at, patch)
        if not self.variant.added:
            return words
        others = self.load(arrays["residual"], at, patch)
        return [added(row, other, self.arch) for row, other in zip(words, others, strict=True)]

    def norm(self, words: list, factors: list, weights, at: Tile, patch: Patch) -> list:
        """A patch, normed."""
        col = at.col * TILE + patch.left
        if self.whole:
            col = as_int64((col < at.cols).select(col, Uint32(0)))
            by = load_weights(weights, col * 4, self.vector, self.aligned)
        else:
            near = [(col + j < at.cols).select(col + j, at.cols - 1) for j in range(self.vector)]
            each = [load_words(weights, as_int64(j) * 4, 1, 4)[0] for j in near]
            by = [word.bitcast(Float32) for word in each]
        return [
            normed(row, factor, by, self.dtype, self.arch)
            for row, factor in zip(words, factors, strict=True)
        ]
