"""Rows that are normed as they are quantized: `Rows` along them, `NormedTiled` for other forms.

The sum of a row's squares has the order that `jax_mx.rms_norm` says: 2048 sums side by side, then
by neighbours. A lane has 8 or 16 neighbouring sums. So the last steps are shuffles within a warp
and a few words of shared memory.
"""

import dataclasses

import cutlass
from cutlass import Float32, Float64, Int32, Int64, Uint8, Uint32, const_expr, cute, range_constexpr

from jax_mx.formats.formats import BLOCK
from jax_mx.quantizing.kernels import geometry
from jax_mx.quantizing.kernels.cutedsl import convert, preprocessed
from jax_mx.quantizing.kernels.cutedsl.flat import WholeBlocks
from jax_mx.quantizing.kernels.cutedsl.kernel import (
    bytes_of,
    load,
    offset_in_tiles,
    select,
    vector_at,
)
from jax_mx.quantizing.kernels.cutedsl.tiled import Tiled, Tiling
from jax_mx.quantizing.kernels.geometry import NOT_READY, SUMS, Extents, Place, Tile, tree

# ---- arithmetic: of words of two 16-bit floats, or of one float32 ---
_WIDEN = {
    "bfloat16": (
        ".reg .b32 w; .reg .f32 a, b; "
        "shl.b32 w, {$r0}, 16; mov.b32 a, w; and.b32 w, {$r0}, 0xFFFF0000; mov.b32 b, w; "
    ),
    "float16": (
        ".reg .b16 v, w; .reg .f32 a, b; "
        "mov.b32 {v, w}, {$r0}; cvt.f32.f16 a, v; cvt.f32.f16 b, w; "
    ),
}
SUM = {"bfloat16": Float32, "float16": Float32, "float32": Float64}  # what squares are added in


def plus_squares(word: Uint32, a: Float32, b: Float32, dtype: str) -> list:
    """Two sums and the squares of a word's elements; squares below 2^-126 are zeros."""
    code = (
        f"{{ {_WIDEN[dtype]}"
        "mul.rn.ftz.f32 a, a, a; mul.rn.ftz.f32 b, b, b; "
        "add.rn.ftz.f32 {$w0}, {$r1}, a; add.rn.ftz.f32 {$w1}, {$r2}, b; }"
    )
    return list(convert.ptx(code, [Float32] * 2, word, a, b))


def plus_square(word: Uint32, total: Float64) -> Float64:
    """A sum and the square of a float32, exact in float64; of a subnormal one of 0."""
    code = (
        "{ .reg .f32 a; .reg .f64 d; mov.b32 a, {$r0}; cvt.ftz.f64.f32 d, a; "
        "fma.rn.f64 {$w0}, d, d, {$r1}; }"
    )
    return convert.ptx(code, Float64, word, total)


def _sum_of_two(a: Uint32, b: Uint32) -> Uint32:
    """The sums of two words' bfloat16."""
    widen = "shl.b32 w, {$r%d}, 16; mov.b32 %s, w; and.b32 w, {$r%d}, 0xFFFF0000; mov.b32 %s, w; "
    code = (
        "{ .reg .b32 w; .reg .f32 a, b, c, d; "
        + widen % (0, "a", 0, "b")
        + widen % (1, "c", 1, "d")
        + "add.rn.ftz.f32 a, a, c; add.rn.ftz.f32 b, b, d; cvt.rn.bf16x2.f32 {$w0}, b, a; }"
    )
    return convert.ptx(code, Uint32, a, b)


@cute.jit
def add_to(target, rY):
    """Adds a fragment of bfloat16 to another one."""
    to, addend = cute.recast_tensor(target, Uint32), cute.recast_tensor(rY, Uint32)
    for w in range_constexpr(cute.size(addend)):
        to[w] = _sum_of_two(to[w], addend[w])


def normed(words: list, factor, weights, dtype: str) -> list:
    """Elements times their row's factor, times their columns' weights."""
    if dtype == "float32":
        return [_normed_one(word, factor, weights[i]) for i, word in enumerate(words)]
    return [
        _normed_two(word, factor, weights[2 * i], weights[2 * i + 1], dtype)
        for i, word in enumerate(words)
    ]


def _normed_one(word: Uint32, factor: Float64, a: Float32) -> Uint32:
    code = (
        "{ .reg .f32 a; .reg .f64 x, y; mov.b32 a, {$r0}; cvt.ftz.f64.f32 x, a; "
        "cvt.f64.f32 y, {$r2}; mul.rn.f64 x, x, {$r1}; mul.rn.f64 x, x, y; cvt.rn.f32.f64 a, x; "
        "add.rn.ftz.f32 a, a, 0f80000000; mov.b32 {$w0}, a; }"
    )
    return convert.ptx(code, Uint32, word, factor, a)


def _normed_two(word: Uint32, factor: Float32, a: Float32, b: Float32, dtype: str) -> Uint32:
    ptx_type = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]
    code = (
        f"{{ {_WIDEN[dtype]}"
        "mul.rn.ftz.f32 a, a, {$r1}; mul.rn.ftz.f32 b, b, {$r1}; "
        "mul.rn.ftz.f32 a, a, {$r2}; mul.rn.ftz.f32 b, b, {$r3}; "
        f"cvt.rn.{ptx_type}.f32 {{$w0}}, b, a; }}"
    )
    return convert.ptx(code, Uint32, word, factor, a, b)


def factor_of(total, length: Int32, eps: Int32):
    """sqrt(length / (total + length * eps)) in float64; `eps` are the bits of a float32.

    If `total` is a float32, the factor is rounded to float32.

    Without branches and calls, as nothing is subnormal. The quotient is rounded as IEEE 754 says:
    its last step has the exact remainder (P. Markstein, IBM J. Res. Dev. 34, 1990). The root's last
    step is within 2^-80 of the exact one before it is rounded, which decides nothing: a float64
    next to a tie of two float32, which has 25 bits, is no closer to a root than 2^-76.
    """
    quotient = (
        "rcp.approx.ftz.f64 y, d; neg.f64 m, d; fma.rn.f64 r, m, y, 0d3FF0000000000000; "
        "fma.rn.f64 r, r, r, r; fma.rn.f64 y, y, r, y; fma.rn.f64 r, m, y, 0d3FF0000000000000; "
        "fma.rn.f64 y, y, r, y; mul.rn.f64 q, n, y; fma.rn.f64 r, m, q, n; fma.rn.f64 q, r, y, q; "
    )
    step = "neg.f64 m, g; fma.rn.f64 r, m, h, 0d3FE0000000000000; fma.rn.f64 g, g, r, g; "
    step += "fma.rn.f64 h, h, r, h; "
    root = (
        "rsqrt.approx.ftz.f64 y, q; mul.rn.f64 g, q, y; mul.rn.f64 h, y, 0d3FE0000000000000; "
        f"{step * 2}neg.f64 m, g; fma.rn.f64 r, m, g, q; fma.rn.f64 g, r, h, g; "
    )
    dtype = type(total)
    take = "cvt.f64.f32 d, {$r0}; "
    give = (
        "cvt.rn.f32.f64 f, g; setp.eq.f64 p, d, 0d0000000000000000; selp.f32 f, 0f7F800000, f, p; "
        "setp.eq.f64 p, d, 0d7FF0000000000000; selp.f32 {$w0}, 0f00000000, f, p; }"
    )
    if dtype is Float64:
        take = "mov.f64 d, {$r0}; "
        give = (
            "setp.eq.f64 p, d, 0d0000000000000000; selp.f64 g, 0d7FF0000000000000, g, p; "
            "setp.eq.f64 p, d, 0d7FF0000000000000; selp.f64 {$w0}, 0d0000000000000000, g, p; }"
        )
    code = (
        "{ .reg .f64 d, n, e, y, m, r, q, g, h; .reg .f32 f; .reg .pred p; mov.b32 f, {$r2}; "
        f"cvt.f64.f32 e, f; {take}cvt.rn.f64.s32 n, {{$r1}}; mul.rn.f64 e, n, e; "
        f"add.rn.f64 d, d, e; {quotient}{root}{give}"
    )
    return convert.ptx(code, dtype, total, Int32(length), Int32(eps))


def over_warp(value):
    """The sum of all lanes' values."""
    for i in range(5):
        value = value + cute.arch.shuffle_sync_bfly(value, offset=1 << i)
    return value


@cute.jit
def add_vector(sums, rX, dtype: cutlass.Constexpr):
    """Adds the squares of a lane's elements to its sums."""
    registers = cute.recast_tensor(rX, Uint32)
    for w in range_constexpr(cute.size(registers)):
        if const_expr(dtype == "float32"):
            sums[w] = plus_square(registers[w], sums[w])
        else:
            both = plus_squares(registers[w], sums[2 * w], sums[2 * w + 1], dtype)
            sums[2 * w], sums[2 * w + 1] = both[0], both[1]


# ---- along rows ---
@dataclasses.dataclass(frozen=True)
class Whole:
    """The whole rows that a thread block of `Rows` covers."""

    threads: int  # that have the 2048 sums
    kept: int  # times 2048 elements of a row that stay in registers; more are read again
    rows: int = 1


class Rows(WholeBlocks):
    """x (..., cols, 32) -> values like x, scales (..., cols) in the layout, factors (...).

    Thread blocks beyond the last row write the padding of tiles of scales.
    """

    def __init__(self, *entry, tile: Whole | None = None):
        super().__init__(*entry)
        self.tile = tile or Whole(**self.tuned("Rows"))
        self.threads = self.tile.threads
        self.elements = SUMS // self.threads  # side by side, of a thread
        self.elements_per_thread = self.elements * self.tile.kept * self.tile.rows
        self.extents = geometry.extents_of_rows()
        padded = self.layout.pad[0] if self.layout.is_tiled else 1
        self.grid = geometry.grid_of_rows(self.tile.rows, max(padded, self.tile.rows))

    @cute.kernel
    def kernel(self, pointers, scalars):
        arrays = self.named(pointers)
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        rows: cutlass.Constexpr = self.tile.rows
        first, vectors = bid * rows, scalars[1] * self.sharers
        # The first vector of each row that is this thread's, and how many a row has from there on.
        starts = tuple(Int64(first + r) * vectors + tid for r in range(rows))
        counts = tuple(
            cutlass.select_(first + r < scalars[0], vectors - tid, 0) for r in range(rows)
        )
        rX = cute.make_rmem_tensor((self.elements, self.tile.kept, rows), convert.INPUT[self.dtype])
        rX.fill(convert.INPUT[self.dtype](0))
        for r in range_constexpr(rows):
            for s in range_constexpr(self.tile.kept):
                self.take(rX[None, s, r], arrays, starts[r], counts[r], s)
        where: cutlass.Constexpr = (first, starts, counts)
        # Rows may be longer than what is kept: the rest is read twice.
        sweeps = (vectors + self.threads - 1) // self.threads
        sums = self.sums(rX, arrays, scalars, where, sweeps)
        factors = self.factors(sums, arrays["factors"], scalars, first)
        for s in range_constexpr(self.tile.kept):
            if self.is_busy(s, scalars):
                self.put(rX[None, s, None], factors, arrays, scalars, where, s)
        for s in cutlass.range(self.tile.kept, sweeps, unroll=1):
            # This thread reads the sums that it has stored.
            source: cutlass.Constexpr = {"x": arrays["sum" if self.source.added else "x"]}
            self.put(self.again(source, where, s), factors, arrays, scalars, where, s)

    @cute.jit
    def sums(self, rX, arrays, scalars, where: cutlass.Constexpr, sweeps):
        """A thread's sums of squares, of each row."""
        sums = cute.make_rmem_tensor((self.elements, self.tile.rows), SUM[self.dtype])
        sums.fill(SUM[self.dtype](0.0))
        for s in range_constexpr(self.tile.kept):
            if self.is_busy(s, scalars):
                for r in range_constexpr(self.tile.rows):
                    add_vector(sums[None, r], rX[None, s, r], self.dtype)
        for s in cutlass.range(self.tile.kept, sweeps, unroll=1):
            rY = self.again(arrays, where, s)
            for r in range_constexpr(self.tile.rows):
                add_vector(sums[None, r], rY[None, r], self.dtype)
        return sums

    @cute.jit
    def again(self, arrays, where: cutlass.Constexpr, s):
        """A vector of each row."""
        rX = cute.make_rmem_tensor((self.elements, self.tile.rows), convert.INPUT[self.dtype])
        rX.fill(convert.INPUT[self.dtype](0))
        _, starts, counts = where
        for r in range_constexpr(self.tile.rows):
            self.take(rX[None, r], arrays, starts[r], counts[r], s)
        return rX

    @cute.jit
    def __call__(self, pointers, scalars):
        # Where a compiler left to itself spills registers, to have more thread blocks.
        crowded = not self.aligned or self.arch == "sm_89"
        free: cutlass.Constexpr = {"min_blocks_per_mp": 1} if crowded else {}
        self.kernel(pointers, scalars).launch(grid=[1, 1, 1], block=[self.threads, 1, 1], **free)

    @property
    def sharers(self) -> int:
        """How many threads share a block."""
        return BLOCK // self.elements

    def is_busy(self, s, scalars):
        """Whether this warp has a vector of a sweep over rows, or of the padding of its scales."""
        tid, _, _ = cute.arch.thread_idx()
        blocks = scalars[1]
        if self.layout.is_tiled:
            across = self.layout.pad[1]
            blocks = (blocks + across - 1) // across * across
        return tid // 32 * 32 < blocks * self.sharers - s * self.threads

    @cute.jit
    def take(self, target, arrays, start, count, s):
        """Loads a vector of a row, if x has it; with a residual their sum, which it stores."""
        n: cutlass.Constexpr = self.elements
        dtype: cutlass.Constexpr = convert.INPUT[self.dtype]
        if s * self.threads < count:
            first, beyond = start * n, s * (self.threads * n)
            align: cutlass.Constexpr = 16 if self.aligned else self.itemsize
            load(vector_at(arrays["x"] + first + beyond, dtype, align, n), target, False)
            if const_expr("residual" in arrays):
                rY = cute.make_rmem_tensor(n, dtype)
                residual = arrays["residual"] + first + beyond
                load(vector_at(residual, dtype, align, n), rY, False)
                add_to(target, rY)
                to = vector_at(arrays["sum"] + first + beyond, dtype, align, n)
                cute.autovec_copy(target, to)

    @cute.jit
    def factors(self, partials, to, scalars, first):
        """The factors of the thread block's rows, for each thread's sums of squares."""
        warps: cutlass.Constexpr = self.threads // 32
        rows: cutlass.Constexpr = self.tile.rows
        tid, _, _ = cute.arch.thread_idx()
        sums = cute.make_tensor(
            cute.arch.alloc_smem(SUM[self.dtype], warps * rows, alignment=16),
            cute.make_layout((warps, rows)),
        )
        row_factors = cute.make_tensor(
            cute.arch.alloc_smem(SUM[self.dtype], rows, alignment=16), cute.make_layout(rows)
        )
        for r in range_constexpr(rows):
            total = over_warp(tree([partials[i, r] for i in range(self.elements)]))
            if tid % 32 == 0:
                sums[tid // 32, r] = total
        cute.arch.sync_threads()
        if tid < rows:
            total = tree([sums[w, tid] for w in range(warps)])
            factor = factor_of(total, scalars[1] * BLOCK, scalars[len(scalars) - 1])
            row_factors[tid] = factor
            if first + tid < scalars[0]:
                vector_at(to + first + tid, Float32, 4, 1)[0] = Float32(factor)
        cute.arch.sync_threads()
        return tuple(row_factors[r] for r in range(rows))

    @cute.jit
    def weights(self, weights, tid, vectors, s):
        """The weights of a vector's columns; zeros beyond the row."""
        n: cutlass.Constexpr = self.elements
        rM = cute.make_rmem_tensor(n, Float32)
        rM.fill(Float32(0.0))
        if s * self.threads < vectors - tid:
            at = weights + tid * n + s * (self.threads * n)
            align: cutlass.Constexpr = 16 if self.aligned else 4
            cute.autovec_copy(vector_at(at, Float32, align, n), rM)
        return rM

    @cute.jit
    def put(self, rX, factors, arrays, scalars, where: cutlass.Constexpr, s):
        """Norms a vector of each row, quantizes it and stores codes and scales.

        Places beyond a row of finite numbers stay 0, as their weights are.
        """
        first, starts, counts = where
        tid, _, _ = cute.arch.thread_idx()
        weights = self.weights(arrays["weights"], tid, scalars[1] * self.sharers, s)
        for r in range_constexpr(self.tile.rows):
            of_row: cutlass.Constexpr = (first + r, starts[r], counts[r], s)
            self.put_vector(rX[None, r], weights, factors[r], arrays, scalars, of_row)

    @cute.jit
    def put_vector(self, rX, weights, factor, arrays, scalars, where: cutlass.Constexpr):
        """Norms a vector of a row, quantizes it and stores codes and scale."""
        row, start, count, s = where
        rows, cols = scalars[:2]
        n: cutlass.Constexpr = self.elements
        sharers: cutlass.Constexpr = self.sharers
        settings = self.of_result(scalars, 0)
        rule, extra = self.rule(settings), self.extra(settings)
        tid, _, _ = cute.arch.thread_idx()
        part = tid % sharers
        registers = cute.recast_tensor(rX, Uint32)
        held = [registers[w] for w in range(cute.size(registers))]
        held = normed(held, factor, weights, self.dtype)
        of_block: cutlass.Constexpr = preprocessed.Place(part, sharers, n, Int32(0))
        data = ([], cutlass.Boolean(False))
        packed, scale = self.quantized(held, data, 0, rule, extra, of_block)
        inside = s * self.threads < count
        stored: cutlass.Constexpr = n // self.per_byte
        number = Int64(row) * cols + tid // sharers + s * (self.threads // sharers)  # of the block
        values_at = start * stored + s * (self.threads * stored)
        if const_expr(self.tiles_values):
            to = self.stored_as(number, cols, settings["value_tiles"] != Int32(0))
            values_at = (to * sharers + part) * stored
        align: cutlass.Constexpr = stored if self.aligned else 1
        if const_expr(self.source.floats):
            if inside:
                self.store_floats(held, arrays["floats"] + start * n + s * (self.threads * n))
        if inside:
            to_values = vector_at(arrays["codes_0"] + values_at, Uint8, align, stored)
            cute.autovec_copy(bytes_of(packed, stored), to_values)
        offset, exists = number, inside
        if const_expr(self.layout.is_tiled):
            block = tid // sharers + s * (self.threads // sharers)
            size: cutlass.Constexpr = Extents(rows, cols)
            offset, exists = offset_in_tiles(self.layout, Place(Int32(0), row, block), size)
            scale = select(inside, scale, Uint32(0))
        to_scale = vector_at(arrays["scales_0"] + offset, Uint8, 1, 1)
        byte = Uint8(scale)
        if exists & (part == 0):
            to_scale[0] = byte

    def store_floats(self, held: list, to) -> None:
        """Stores a vector of words that were normed."""
        dtype, n = convert.INPUT[self.dtype], self.elements
        rF = cute.make_rmem_tensor(n, dtype)
        registers = cute.recast_tensor(rF, Uint32)
        for w, word in enumerate(held):
            registers[w] = word
        cute.autovec_copy(rF, vector_at(to, dtype, 16 if self.aligned else self.itemsize, n))


# ---- other forms ---
@dataclasses.dataclass(frozen=True)
class Bands(Tiling):
    """The part that a thread block of `NormedTiled` covers, and the number that find factors."""

    share: int = 2  # whose factors a thread block finds
    lag: int = 4  # how many bands of tiles later these are quantized

    @property
    def finders(self) -> int:
        """How many thread blocks find a band's factors."""
        return self.rows // self.share


class NormedTiled(Tiled):
    """`Tiled` with a norm: x is read twice, the second time from the L2 cache.

    Some thread blocks compute the rows' factors for each band of tiles. The thread blocks that
    quantize the band come a few bands later and wait for the factors. If that takes long, they
    compute the factors themselves: CUDA does not promise an order of thread blocks. A factor of 0
    means "not computed yet"; no real factor is 0, so no flag is needed.
    """

    CHUNK = 256  # of the 2048 sums, a warp's
    POLLS = 1 << 12  # about a millisecond

    def __init__(self, *entry, tile: Bands | None = None):
        requested = tile
        super().__init__(*entry, tile=requested or Tiling())
        self.tile = requested or Bands(**self.tuned("NormedTiled"))
        super().__init__(*entry, tile=self.tile)
        assert self.cluster == 1  # its thread blocks are not launched so
        self.deep = 4 if self.aligned else 1  # loads of a row that a lane has under way
        form, size = self.variant.form, Extents(self.tile.rows, self.tile.cols)
        ahead = (self.tile.finders, self.tile.lag)
        self.extents = geometry.extents_of_matrix(self.of)
        self.grid = geometry.grid_in_bands(form, size, self.region, self.of, ahead)
        self.scratch = geometry.cleared_factors(self.signature)

    @cute.kernel
    def kernel(self, pointers, scalars):
        step, number = self.step(scalars)
        tiles_m, _ = self.tiles(scalars)
        if number < self.tile.finders:
            if step < tiles_m:
                self.find(pointers, scalars, step * self.tile.rows + number * self.tile.share)
        elif step >= self.tile.lag:
            self.quantize_tile(pointers, scalars)

    @property
    def is_crowded(self) -> bool:
        """Whether a compiler left to itself spills registers, to have more thread blocks."""
        packs = self.dtype == "float16" and self.per_byte == 2
        return not self.aligned or packs or (self.source.added and convert.has(self.arch, 100))

    @cute.jit
    def __call__(self, pointers, scalars):
        free: cutlass.Constexpr = {"min_blocks_per_mp": 1} if self.is_crowded else {}
        self.kernel(pointers, scalars).launch(grid=[1, 1, 1], block=[self.threads, 1, 1], **free)

    def tiles(self, scalars) -> tuple:
        """How many tiles there are down and across, padding included."""
        blocks_m, k = self.lengths(scalars)
        down, across = self.region.rows // BLOCK, self.region.cols
        tiles_m = (blocks_m + down - 1) // down * (down // self.tile.down)
        return tiles_m, (k + across - 1) // across * (across // self.tile.cols)

    def step(self, scalars) -> tuple:
        """The band whose turn it is, and the thread block's number within the turn."""
        bid, _, _ = cute.arch.block_idx()
        _, tiles_k = self.tiles(scalars)
        per_step = Uint32(tiles_k + self.tile.finders)
        step = Uint32(bid) // per_step
        return Int32(step), Int32(Uint32(bid) - step * per_step)

    def place(self, blocks_m, k, step=None) -> Tile:
        """This thread block's tile of x."""
        step, number = self.step((blocks_m, k // BLOCK if self.counts_blocks else k))
        return Tile(Int32(0), step - self.tile.lag, number - self.tile.finders, blocks_m, k)

    # ---- factors ---
    @cute.jit
    def sums(
        self, arrays, scalars, first, count: cutlass.Constexpr, chunk, deep: cutlass.Constexpr
    ):  # fmt: skip
        """A warp's sums of the squares of `count` rows, over the columns of a chunk of sums.

        `deep` vectors of each row are loaded at once. With a residual it stores the sums x +
        residual.
        """
        _, k = self.lengths(scalars)
        n: cutlass.Constexpr = self.vector
        left = chunk * self.CHUNK + cute.arch.lane_idx() * n
        partials = cute.make_rmem_tensor((n, count), Float32)
        partials.fill(Float32(0.0))
        turns = (k + deep * SUMS - 1) // (deep * SUMS)
        for turn in cutlass.range(turns, unroll=1):
            rX = cute.make_rmem_tensor((n, deep, count), convert.INPUT[self.dtype])
            rX.fill(convert.INPUT[self.dtype](0))
            for r in range_constexpr(count):
                for s in range_constexpr(deep):
                    col = (turn * deep + s) * SUMS + left
                    self.load_piece(rX[None, s, r], arrays["x"], first + r, col, k)
            if const_expr(self.source.added):
                for r in range_constexpr(count):
                    for s in range_constexpr(deep):
                        col = (turn * deep + s) * SUMS + left
                        self.add_piece(rX[None, s, r], arrays, first + r, col, k)
            for r in range_constexpr(count):
                for s in range_constexpr(deep):
                    add_vector(partials[None, r], rX[None, s, r], self.dtype)
        return [over_warp(tree([partials[i, r] for i in range(n)])) for r in range(count)]

    @cute.jit
    def load_piece(self, target, x, row, col, k):
        """Elements of a row from a column on; nothing where that is beyond it."""
        n: cutlass.Constexpr = self.vector
        start = Int64(row) * k + col
        if const_expr(self.aligned):
            if col < k:
                load(vector_at(x + start, convert.INPUT[self.dtype], 16, n), target, self.kept)
        else:
            mX = cute.make_tensor(x + start, cute.make_layout(n))
            for i in range_constexpr(n):
                if col + i < k:
                    target[i] = mX[i]

    @cute.jit
    def add_piece(self, target, arrays, row, col, k):
        """Adds the residual's elements, and stores the sum."""
        n: cutlass.Constexpr = self.vector
        dtype: cutlass.Constexpr = convert.INPUT[self.dtype]
        rY = cute.make_rmem_tensor(n, dtype)
        rY.fill(dtype(0))
        self.load_piece(rY, arrays["residual"], row, col, k)
        add_to(target, rY)
        to = arrays["sum"] + (Int64(row) * k + col)
        if const_expr(self.aligned):
            if col < k:
                cute.autovec_copy(target, vector_at(to, dtype, 16, n))
        else:
            mS = cute.make_tensor(to, cute.make_layout(n))
            for i in range_constexpr(n):
                if col + i < k:
                    mS[i] = target[i]

    def finished(self, total, scalars) -> Uint32:
        """The bits of a factor, for the sum of a row's squares; never `NOT_READY`."""
        _, k = self.lengths(scalars)
        bits = convert.float_to_bits(factor_of(total, k, scalars[len(scalars) - 1]))
        return select(bits == Uint32(NOT_READY), Uint32(0x80000000), bits)

    @cute.jit
    def find(self, pointers, scalars, first):
        """Finds the factors of some rows; all of them are there, or none is."""
        rows: cutlass.Constexpr = self.tile.share
        chunks: cutlass.Constexpr = SUMS // self.CHUNK
        groups: cutlass.Constexpr = self.threads // 32 // chunks  # of warps, each with own rows
        assert groups > 0 and rows % groups == 0 and BLOCK % rows == 0
        count: cutlass.Constexpr = rows // groups
        arrays = self.named(pointers)
        blocks_m, _ = self.lengths(scalars)
        tid, _, _ = cute.arch.thread_idx()
        warp = tid // 32
        shared = cute.make_tensor(
            cute.arch.alloc_smem(Float32, rows * chunks, alignment=16),
            cute.make_layout((chunks, rows)),
        )
        if first < blocks_m * BLOCK:
            row = warp // chunks * count
            row_sums = self.sums(arrays, scalars, first + row, count, warp % chunks, self.deep)
            for r in range_constexpr(count):
                if tid % 32 == 0:
                    shared[warp % chunks, row + r] = row_sums[r]
            cute.arch.sync_threads()
            if tid < rows:
                total = tree([shared[c, tid] for c in range(chunks)])
                address = arrays["factors"].toint() + Int64(first + tid) * 4
                publish(address, self.finished(total, scalars))

    @cute.jit
    def await_factors(self, arrays, scalars, at: cutlass.Constexpr):
        """The factors of the tile's rows, in shared memory."""
        warps: cutlass.Constexpr = self.threads // 32
        height: cutlass.Constexpr = self.tile.rows // warps  # rows of a warp
        assert height <= 32
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = tid % 32, tid // 32
        shared = cute.make_tensor(
            cute.arch.alloc_smem(Uint32, self.tile.rows, alignment=16),
            cute.make_layout(self.tile.rows),
        )
        first = at.row * self.tile.rows + warp * height
        there = (lane < height) & (first + lane < at.rows * BLOCK)
        bits = Uint32(1)
        if there:
            bits = awaited(arrays["factors"].toint() + Int64(first + lane) * 4, self.POLLS)
        missing = Uint32(cute.arch.vote_ballot_sync(bits == Uint32(NOT_READY)))
        if missing != Uint32(0):
            for r in cutlass.range(height, unroll=1):
                if (missing >> Uint32(r)) & Uint32(1) != Uint32(0):
                    factor = self.find_alone(arrays, scalars, first + r)
                    bits = select(lane == r, factor, bits)
        if lane < height:
            shared[warp * height + lane] = bits & Uint32(0x7FFFFFFF)
        cute.arch.sync_threads()
        return shared

    @cute.jit
    def find_alone(self, arrays, scalars, row):
        """A row's factor, by one warp."""
        chunks: cutlass.Constexpr = SUMS // self.CHUNK
        lane = cute.arch.lane_idx()
        chunk_sum = Float32(0.0)
        for chunk in cutlass.range(chunks, unroll=1):
            (total,) = self.sums(arrays, scalars, row, 1, chunk, 1)
            chunk_sum = Float32(cutlass.select_(lane % chunks == chunk, total, chunk_sum))
        for i in range_constexpr(chunks.bit_length() - 1):
            chunk_sum = chunk_sum + cute.arch.shuffle_sync_bfly(chunk_sum, offset=1 << i)
        return self.finished(chunk_sum, scalars)

    # ---- x ---
    def patches(self, arrays, scalars, at, lane) -> list:
        """This lane's patch of what is normed; 0 beyond the array."""
        crowded = (
            self.per_byte == 2 and self.variant.form.is_both and not convert.has(self.arch, 90)
        )
        if self.aligned or not crowded:
            rX = self.loaded(arrays, at, lane)
            factors = self.await_factors(arrays, scalars, at)
        else:  # there are no registers left for x while it waits
            factors = self.await_factors(arrays, scalars, at)
            rX = self.loaded(arrays, at, lane)
        self.norm(rX, factors, arrays["weights"], at, lane)
        return [rX]

    def loaded(self, arrays, *where):
        """This lane's patch of x, or of the sum."""
        load_patch = self.load if self.aligned else self.load_unaligned
        rX = load_patch(arrays["x"], *where)
        if self.source.added:
            add_to(rX, load_patch(arrays["residual"], *where))
        return rX

    @cute.jit
    def norm(self, rX, factors, weights, at: cutlass.Constexpr, lane: cutlass.Constexpr):
        """Norms a patch where it is."""
        _, tile_m, tile_k, blocks_m, k = at
        n: cutlass.Constexpr = self.vector
        first, left = tile_m * self.tile.rows + lane.row, tile_k * self.tile.cols + lane.col
        if (first < blocks_m * BLOCK) & (left < k):
            rM = cute.make_rmem_tensor(n, Float32)
            if const_expr(self.aligned):
                cute.autovec_copy(vector_at(weights + left, Float32, 16, n), rM)
            else:
                rM.fill(Float32(0.0))
                mW = cute.make_tensor(weights + left, cute.make_layout(n))
                for j in range_constexpr(n):
                    if left + j < k:
                        rM[j] = mW[j]
            registers = cute.recast_tensor(rX, Uint32)
            count: cutlass.Constexpr = n * self.itemsize // 4
            for i in range_constexpr(self.rows):
                factor = convert.bits_to_float(factors[lane.row + i])
                results = normed([registers[w, i] for w in range(count)], factor, rM, self.dtype)
                for w in range_constexpr(count):
                    registers[w, i] = results[w]


def publish(address: Int64, bits: Uint32) -> None:
    """Stores a word that other thread blocks wait for."""
    convert.ptx("st.relaxed.gpu.global.b32 [{$r0}], {$r1};", None, address, bits)


def awaited(address: Int64, polls: int) -> Uint32:
    """The word that another thread block stores, or `NOT_READY` after so many looks at it.

    The loop ends because it counts.
    """
    code = (
        "{ .reg .pred p; .reg .b32 n, v; mov.b32 n, 0; LOOK: "
        f"ld.relaxed.gpu.global.b32 v, [{{$r0}}]; setp.ne.b32 p, v, {NOT_READY}; @p bra SEEN; "
        f"nanosleep.u32 100; add.u32 n, n, 1; setp.lt.u32 p, n, {polls}; @p bra LOOK; SEEN: "
        "mov.b32 {$w0}, v; }"
    )
    return convert.ptx(code, Uint32, address)


KERNELS = (Rows, NormedTiled)  # along rows, and others
