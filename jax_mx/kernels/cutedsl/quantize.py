"""MX quantize on NVIDIA, in CuTeDSL. Matches reference.quantize bit for bit.

Two ways to cut the work:

* `Flat`, for blocks along the last axis. Blocks are consecutive in memory, so x is a flat vector
  and every shape is the same shape. A thread holds half a block; treated, one or two.
* `Tiled`, for every form that needs the second-to-last axis. A thread block is a few warps below
  and beside each other (`tiling`), a warp holds 32 x 64 elements, a lane a patch of both rows and
  columns, so that blocks along either axis are a few shuffles away. Scales are staged in shared
  memory and written as they lie in memory, with the padding of tiles.

Sizes are run-time scalars; so is, in the entries for AMD's scales, whether values go into tiles. A
binary holds two entries per scale layout: the first wants aligned operands, the second takes any.
"""

import dataclasses
import math

import cutlass
from cutlass import Int32, Int64, Uint8, Uint32, const_expr, cute, range_constexpr

from jax_mx.facts.formats import BLOCK, FLOAT_DTYPES, Format
from jax_mx.kernels.cutedsl import convert, treated
from jax_mx.kernels.cutedsl.kernel import (
    PAD,
    Kernel,
    Strip,
    by_vector,
    in_tiles_of_values,
    load,
    load_anywhere,
    locate,
    offset_in_tiles,
    place_of,
    select,
    store,
    store_rows,
    vector_at,
)
from jax_mx.kernels.entry import ALL
from jax_mx.facts.layouts import ScaleLayout
from jax_mx.facts.variants import Kind, Variant, takes_zero_scale


def words_of(rX, pair: int, dtype: str) -> list:
    """Elements 2 * pair and 2 * pair + 1 of a fragment: a word of 16 bits each, or two words."""
    rW = cute.recast_tensor(rX, Uint32)
    each = FLOAT_DTYPES[dtype].itemsize // 2
    return [rW[each * pair + i] for i in range(each)]


def bytes_of(words: list, count: int):
    """A fragment of the first `count` bytes of these words."""
    rV = cute.make_rmem_tensor(4 * len(words), Uint8)
    rW = cute.recast_tensor(rV, Uint32)
    for i, word in enumerate(words):
        rW[i] = word
    return rV if count == 4 * len(words) else cute.make_tensor(rV.iterator, cute.make_layout(count))


def keeps(variant: Variant, layout: ScaleLayout) -> bool:
    """Whether x leaves the cache last, and so do scales of both transposed, see `kernel.load`.

    Scales of other forms make no difference. MXFP4 is 1 % slower so, but where scales are written
    in the smallest pieces: both transposed, H200, (8, 7168, 7168) and (65536, 8192), 333 -> 323 us,
    450 -> 434. Second transposed, float16 has no register left for it.
    """
    if variant.formats[0].codes_per_byte > 1:
        return variant.form == "both_transposed" and not layout.is_tiled
    return (variant.form, variant.dtype) != ("second_transposed", "float16")


class Blocks(Kernel):
    """What a thread does that has a whole block, or part of one whose rest its neighbours have."""

    @cute.jit
    def quantized(
        self, held, words, o: cutlass.Constexpr, rule, extra, place: cutlass.Constexpr
    ):  # fmt: skip
        """(words of codes, scale) of a block for the o-th result.

        Args:
          held: words of elements, as they are in memory.
          words: what `treated.load` gives.
          o: number of the result.
          rule: see `Entry.rule`.
          extra: see `extra`.
          place: which of its block's elements these are.
        """
        kind: cutlass.Constexpr = self.kind(o)
        dtype: cutlass.Constexpr = "float32" if kind.hadamard else self.dtype  # of what is scaled
        (loaded, known), (prescale, *flips) = words, extra
        floats = []
        if const_expr(kind.words):
            if const_expr(kind.hadamard):
                held = treated.flipped(held, loaded[-1], known, flips, place, kind.hadamard)
            floats = treated.elements(kind, self.dtype, held, place, prescale)
            if const_expr(dtype == "float32"):
                held = [convert.float_to_bits(value) for value in floats]
        word = held[0]
        for w in range_constexpr(1, len(held)):
            word = convert.larger_magnitude(word, held[w], dtype)
        for k in range_constexpr(place.sharers.bit_length() - 1):
            other = cute.arch.shuffle_sync_bfly(word, offset=1 << k)
            word = convert.larger_magnitude(word, other, dtype)
        amax = convert.largest_magnitude_bits(word, dtype)
        if const_expr(not kind.words):
            scale, inverse = self.scale_of(amax, self.formats[o], rule)
            return self.codes(held, inverse, self.formats[o]), scale
        how: cutlass.Constexpr = (kind, self.dtype)
        amax = convert.float_to_bits(treated.finished(*how, convert.bits_to_float(amax), prescale))
        scale, inverse = self.scale_of(amax, self.formats[o], rule, "float32")
        by = convert.bits_to_float(inverse) * treated.factor(*how, prescale)
        rP = cute.make_rmem_tensor(place.elements // 8, Uint32)
        if const_expr(treated.is_exact(*how)):
            if amax < Uint32(treated.SMALL):
                settled = [treated.settled(*how, value, prescale) for value in floats]
                self.treated_codes(kind, settled, by, loaded, place, rP)
            else:
                self.treated_codes(kind, floats, by, loaded, place, rP)
        else:
            self.treated_codes(kind, floats, by, loaded, place, rP)
        return [rP[i] for i in range(place.elements // 8)], scale

    @staticmethod
    def extra(given: dict) -> list:
        """Of a result's scalars the prescale's bits, or 0, and flips, of even and of odd blocks."""
        return [given.get(name, Int32(0)) for name in ("prescale", "flips", "flips_odd")]

    def treated_codes(self, kind: Kind, floats: list, by, loaded: list, place, into) -> None:
        """Puts words of the e2m1 codes of floats times a block's factor into a fragment."""
        if kind.stochastic:
            words = treated.random_codes(floats, by, loaded[0], place)
        else:
            words = convert.pack_products(floats, by, self.arch)
        for i, word in enumerate(words):
            into[i] = word

    def codes(self, held: list, inverse, format: Format) -> list:
        """Words of the codes of words of elements, rounded to nearest."""
        inverses = convert.pair(inverse, inverse)
        each = self.itemsize // 2  # words of a pair
        pairs = [
            self.scaled_pair(held[i : i + each], inverses, format)
            for i in range(0, len(held), each)
        ]
        return convert.pack_along(pairs, self.dtype, format, self.arch)


# H200, (8, 7168, 7168), 2026-11-20, benchmarks/sweep.py, 96 candidates: bf16 285.7 us (best 285.4),
# f16 285.7 (285.2), f32 467.9 (467.6). Nothing that keeps 32 to 256 bytes a thread in flight is
# further than 1 % behind; 32 elements a thread are: their 64-byte strides cost a fifth (340 us).
STRIP = Strip(threads=512, elements=16, unroll=1)
# Treated, arithmetic takes longer than memory; a thread that has a whole block spends less on where
# things lie, and one that has two waits less. 2026-11-22, bf16, by 1, 2, 3 and 4 blocks: h16 295,
# 264, 256 us, h32 318, 294, 291, sr 305, 279, 274, h16_sr 381, 357, 351; 4 is slower than 3. Scales
# in tiles, by 2 and 3: h16 288, 296, sr 298, 295, h16_sr 373, 404. 32 and 128 threads are the same.
# From coalesced loads, by way of shared memory, 313. With floats that are cut to bf16 before their
# largest is found: h16 253, but sr 287 and second_transposed h16 381 (365 as it is). f32 would wait
# for strides of 128 bytes, 502 us; (512, 16, 1) h16 419, h32 427, h64 458, sr 454, h16_sr 511,
# (128, 16, 2) 419, 420, 443, 454, 455.
TREATED_STRIPS = {
    2: Strip(threads=64, elements=32, unroll=2),
    4: Strip(threads=128, elements=16, unroll=2),
}


class Flat(Blocks):
    """x (..., rows, cols, 32) -> values like x, scales (..., rows, cols) in the layout.

    Treated variants take words (..., rows, cols) behind x, see treated.py.
    """

    def __init__(self, *entry, tile: Strip | None = None):
        super().__init__(*entry)
        self.tile = tile or (TREATED_STRIPS[self.itemsize] if self.variant.words else STRIP)
        self.elements_per_thread = self.tile.elements * self.tile.unroll
        self.threads = self.tile.threads
        scales = 2 + self.variant.words  # the buffer
        self.extents = ([8, [0, *ALL]], [8, [scales, *ALL]], [4, [0, -3, -2]], [4, [0, -2, -1]])
        # It follows the scales, with their padding.
        self.grid = [[0, scales, *ALL, self.tile.blocks]]

    @cute.kernel
    def kernel(self, pointers, scalars):
        x, *words_in, values, scales = pointers
        n, places, rows, cols, *_ = scalars
        given = self.of_result(scalars, 0)
        rule, extra = self.rule(given), self.extra(given)
        elements: cutlass.Constexpr = self.tile.elements
        unroll: cutlass.Constexpr = self.tile.unroll
        sharers: cutlass.Constexpr = BLOCK // elements  # threads that share a block
        words: cutlass.Constexpr = elements * self.itemsize // 4
        kept: cutlass.Constexpr = self.aligned and keeps(self.variant, self.layout)
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        by_step = cute.make_layout((n // elements, elements), stride=(elements, 1))
        mX = cute.make_tensor(x, by_step)
        stored: cutlass.Constexpr = elements // self.per_byte
        mV = cute.make_tensor(values, cute.make_layout((n // elements, stored), stride=(stored, 1)))
        mS = cute.make_tensor(scales, cute.make_layout(places))
        per_step: cutlass.Constexpr = self.tile.threads // sharers

        rX = cute.make_rmem_tensor((elements, unroll), convert.INPUT[self.dtype])
        rX.fill(convert.INPUT[self.dtype](0))
        steps, stores, offsets, insides, words_of_steps = [], [], [], [], []
        first = Int64(bid) * self.tile.blocks
        for u in range_constexpr(unroll):
            mine = self.with_pairs(u * per_step + tid // sharers)
            block, offset, inside = locate(self.layout, first, mine, places, rows, cols)
            steps.append(block * sharers + tid % sharers)
            if const_expr(self.tiles_values):
                tiles = given["value_tiles"] != Int32(0)
                stores.append(self.stored_as(block, cols, tiles) * sharers + tid % sharers)
            else:
                stores.append(steps[u])
            offsets.append(offset)
            insides.append(inside)
            if inside:
                load(mX[steps[u], None], rX[None, u], kept)
            words_of_steps.append(treated.load(self.kind(0), words_in, block, inside))

        for u in range_constexpr(unroll):
            rW = cute.recast_tensor(rX[None, u], Uint32)
            held = [rW[w] for w in range(words)]
            odd = Int32(steps[u] // sharers % 2)
            place = treated.Place(tid % sharers, sharers, elements, odd)
            packed, scale = self.quantized(held, words_of_steps[u], 0, rule, extra, place)
            if insides[u]:
                cute.autovec_copy(bytes_of(packed, stored), mV[stores[u], None])
            if (offsets[u] < places) & (tid % sharers == 0):
                if const_expr(self.layout.is_tiled and len(rule) > 2):
                    scale = select(insides[u], scale, Uint32(0))
                mS[offsets[u]] = Uint8(scale)  # padding: of zeros, so 0

    def with_pairs(self, place):
        """A place of the thread block's, such that neighbours have a transform's two blocks."""
        stride = self.layout.column_stride
        if self.kind(0).blocks == 1 or stride == 1:
            return place
        return place // (2 * stride) * (2 * stride) + place % 2 * stride + place // 2 % stride

    @cute.jit
    def stored_as(self, block, cols, tiles):
        """Which block of row-major values lies where this one's do: itself, or that in tiles."""
        number = block
        if tiles:
            # 32 bits: a GPU's memory does not hold the elements of more blocks.
            row = Uint32(block) // Uint32(cols)
            top, chunk = in_tiles_of_values(row, Uint32(block) - row * Uint32(cols))
            number = Int64(top) * cols + Int64(chunk)
        return number


CHUNKS = 8  # of 16 bytes, that a row of shared memory's banks holds


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What a thread block of `Tiled` covers, in warps of 32 x 64, and how thread blocks follow."""

    down: int = 4
    across: int = 2
    band: int = 1  # how many thread blocks follow each other down before the next ones across

    @property
    def rows(self) -> int:
        """Of x."""
        return BLOCK * self.down

    @property
    def cols(self) -> int:
        """Of x."""
        return 2 * BLOCK * self.across

    @property
    def threads(self) -> int:
        """Of a thread block."""
        return 32 * self.down * self.across


def tiling(
    form: str, itemsize: int, layout: ScaleLayout, aligned: bool, per_byte: int = 1
) -> Tiling:
    """The tiling of an entry. What decides is which bytes a thread block writes side by side.

    Bytes reach memory in pieces of 32 and lines of 128; a piece of a few bytes costs as much as a
    whole one. So transposed values want tall tiles, scales along rows want wide ones, and row-major
    scales of both directions cannot have both. H200, (8, 7168, 7168) and (65536, 8192), 2026-11-21,
    benchmarks/sweep.py, in us; (down, across):
      second             bf16 (4, 4) 287, 374; (4, 2) 288, 376; (2, 8) 287, 373. f32 467; (4, 2) 469
      second_transposed  bf16 (8, 2, band 64) 298, 401; band 4 300, 400; band 1 301, 402;
                         (4, 2) 312, 423; (8, 1) 302, 404.
                         f32 (4, 2, band 64) 472; (8, 2) 479, with band 64 471
      both, row-major    bf16 (1, 16) 407, 529; (1, 8) 415, 539; (2, 8) 416, 541; (4, 4) 424, 553;
                         (4, 2) 432, 562. f32 (1, 8) 574; (2, 4) 578; (4, 2) 585.
                         Kept (1, 8) 398, 519; (1, 16) 398, 519; (2, 8) 399, 521; (4, 4) 415
      both, tiles        bf16 (4, 4) 406, 528; (4, 2) 406, 529; (8, 2) 409, 532. f32 (4, 2) 574
      both_transposed    bf16 (8, 2) 470, 622, tiles 420, 557; (4, 2) 481, 637, tiles 424, 565;
                         (4, 4) 471, 624; bands of 2 and 4 are the same, of 16 and 64 slower.
                         Kept (8, 2) 428, 572, tiles 410, 543; band 4 429, 571; band 8 433, 577;
                         (4, 4) 428, 573; (4, 2) 433. What is left is the number of requests: a
                         row's and a column's scales are one each, 384 beside 512 of values
      unaligned rows     (8, 7168, 7165): second (1, 8) 325, tiles 404; (2, 4) 346, tiles 408;
                         (4, 2) 387, tiles 420; f32 (1, 8) 622, tiles 684; (2, 4) 625, tiles 671;
                         (4, 2) 677, tiles 691. transposed (8, 1) 324; (8, 2) 402;
                         f32 (4, 2, band 64) 578
    Two tiles one after the other per thread block are slower in all forms (both: 451 and more).
      MXFP4: second      bf16 (4, 4) 236, 308; (4, 2) and (2, 4) the same
      second_transposed  bf16 (8, 2, band 64) 240, 323; (8, 1, 64) 240, 330; (4, 2, 64) 247, 329
      square             bf16 (4, 2) 233, 304; (1, 4), (2, 2) and (1, 8) the same
      both, row-major    bf16 (1, 4) 299, 389; (2, 4) 313, 407; (1, 8) 314, 409; (1, 16) 432, 561.
                         f32 (1, 4) 479; (2, 4) 503; (1, 8) 507
      both, tiles        bf16 (4, 2) 323, 421; (2, 4) 329, 428; (4, 4) spills
      both_transposed    bf16 (4, 2, band 4) 334, 447; band 1 338, 456; band 64 337, 455;
                         (8, 2) 367, 486; (2, 4) 412, 542; (2, 2) 431, 565.
                         Kept (4, 2, band 8) 321, 421; band 4 323, 434; band 1 327, 442.
                         tiles (2, 2) 321, 421; (4, 2) 337, 438
    """
    short, transposed = itemsize == 2, form.endswith("_transposed")
    if per_byte > 1 and form == "both" and not layout.is_tiled:
        return Tiling(1, 4)
    if per_byte > 1 and form in ("both", "square"):
        return Tiling(4, 2)
    if per_byte > 1 and form == "both_transposed":
        return Tiling(2, 2) if layout.is_tiled and short else Tiling(4, 2, band=8)
    if transposed:
        if short and not aligned and form == "second_transposed":
            return Tiling(8, 1) if not layout.is_tiled else Tiling(4, 2)
        band = 64 if form != "both_transposed" else 1
        return Tiling(8, 2, band) if short else Tiling(4, 2, band)
    if form == "both" and not layout.is_tiled:
        return Tiling(1, 8)
    spills = per_byte > 1 and layout.is_tiled  # with (1, 8) 8 bytes, to fit in 48 registers
    if form == "second" and not aligned and not spills:
        return Tiling(1, 8)
    return Tiling(4, 2) if form == "both" or not aligned else Tiling(4, 4)


@dataclasses.dataclass(frozen=True)
class Output:
    """One of the results of `Tiled`: which way its blocks run in the tile, and how it lies."""

    format: Format
    blocks: str  # "row": along the last axis; "column": the one before; "square": both
    transpose: bool = False  # values and scales are written transposed; not with "row"

    @property
    def ends_rows(self) -> bool:
        """Whether blocks lie along rows of the result."""
        return self.blocks != "column" or self.transpose

    @property
    def per_column(self) -> int:
        """How many codes of a column a byte holds."""
        return self.format.codes_per_byte if self.blocks == "column" or self.transpose else 1

    @property
    def per_row(self) -> int:
        """How many codes of a row a byte holds."""
        return self.format.codes_per_byte // self.per_column


@dataclasses.dataclass(frozen=True)
class Lines:
    """Values in shared memory: `count` lines of `size` bytes, in permuted chunks of 16.

    Lanes write to lines that are `group` apart, `pieces` chunks each; without the permutation, all
    to the same banks.
    """

    count: int
    size: int
    group: int
    pieces: int

    def key(self, line):
        """What a line's chunk numbers are permuted by, with an exclusive or."""
        return line // self.group * self.pieces % min(CHUNKS, self.size // 16)


class Tiled(Kernel):
    """Forms with the second-to-last axis; x lies as (batch, M, K), M = 32 * `blocks_m`.

    The arithmetic that decides: a lane holds the largest magnitudes of its patch per row and per
    column, `exchange` leaves each lane with two whole blocks' of either kind, so that a scale is
    computed once, and `gather` brings the lanes of a block its factor.
    """

    elements_per_thread = 2 * BLOCK

    def __init__(self, *entry, tile: Tiling | None = None):
        super().__init__(*entry)
        self.form = self.variant.form
        self.tile = tile or tiling(
            self.form, self.itemsize, self.layout, self.aligned, self.per_byte
        )
        transpose = self.form.endswith("_transposed")
        self.square = self.form.startswith("square")
        self.kept = self.aligned and keeps(self.variant, self.layout)
        blocks = "square" if self.square else "column"
        self.results = [Output(self.formats[-1], blocks, transpose)]
        if self.form.startswith("both"):
            self.results.insert(0, Output(self.formats[0], "row"))
        self.outputs = len(self.results)
        self.vector = 16 // self.itemsize  # elements of one load
        self.lanes = 64 // self.vector  # across a warp
        self.rows = self.lanes  # of a lane: 32 / (32 / lanes)
        self.row_sharers, self.column_sharers = BLOCK // self.vector, BLOCK // self.rows

        self.threads = self.tile.threads
        # Of the operand's view: (..., blocks_m, blocks_k, 32, 32) or (..., blocks_m, K, 32).
        self.is_both = self.outputs == 2 or self.square
        lead, m, k = (
            ((0, -4), (-4, -3), (-3, -2)) if self.is_both else ((0, -3), (-3, -2), (-2, -1))
        )
        self.extents = [[4, [0, *m]], [4, [0, *k]]]
        # Tiles of scales are padded below and beside x, and who is there writes the padding.
        down, across = self.padding()
        self.pad = max(self.tile.down, down), max(self.tile.cols, across)
        cols = self.pad[1] // (BLOCK if self.is_both else 1)
        self.grid = [[0, 0, *k, cols], [0, 0, *m, self.pad[0]], [0, 0, *lead, 1]]
        beyond = self.pad[0] // self.tile.down * (self.pad[1] // self.tile.cols)
        if beyond > 1:
            self.grid.append([0, -1, beyond, 0, 1])
        # The aligned entry loads whole vectors, which must not straddle rows.
        self.divide = [] if self.is_both else [[0, -2, -1, self.vector]]

    @cute.kernel
    def kernel(self, pointers, scalars):
        blocks_m, k = self.lengths(scalars)
        tid, _, _ = cute.arch.thread_idx()
        at = self.place(blocks_m, k)
        across, down, row, col = self.lane(tid)
        rX = self.patch(pointers[0], at, row, col, blocks_m, k)
        staged = [self.shared_memory(result) for result in self.results]
        for o in range_constexpr(self.outputs):
            result: cutlass.Constexpr = self.results[o]
            values, (sS, sV) = pointers[1 + 2 * o], staged[o]
            rounding = self.rule(self.of_result(scalars, o))
            if const_expr(result.blocks == "row"):
                inverses = self.scale_rows(rX, sS, result, rounding, row, col, across)
            elif const_expr(result.blocks == "column"):
                inverses = self.scale_columns(rX, sS, result, rounding, row, col, down)
            else:
                inverses = self.scale_square(rX, sS, result, rounding, row, col)
            if const_expr(result.transpose):
                self.stage_transposed(sV, rX, inverses, result, row, col)
            elif const_expr(self.is_staged(result)):
                self.stage_rows(sV, rX, inverses, result, row, col)
            elif const_expr(sV is None):
                self.store(rX, inverses, result, values, at, row, col, blocks_m, k)
            else:
                self.stage(sV, rX, inverses, result, row, col)
        cute.arch.sync_threads()
        first = 0
        for o in range_constexpr(self.outputs):
            result: cutlass.Constexpr = self.results[o]
            values, scales, (sS, sV) = pointers[1 + 2 * o], pointers[2 + 2 * o], staged[o]
            if const_expr(self.is_staged(result)):
                tiles = self.of_result(scalars, o).get("value_tiles")
                self.store_lines(sV, values, tiles, result, at, tid, blocks_m, k)
            elif const_expr(sV is not None):
                self.store_unaligned(sV, values, at, blocks_m, k)
            # The two results' scales are written by other threads, as far as they go.
            thread = (tid + self.tile.threads - first) % self.tile.threads
            self.store_scales(sS, scales, result, at, thread, blocks_m, k)
            first += cute.size(sS) // 4

    def padding(self) -> tuple[int, int]:
        """What x's blocks of rows, and its columns, are padded to for tiles of scales."""
        rows, cols = self.layout.pad
        each = [
            (rows // BLOCK, cols * BLOCK) if result.blocks == "row" else (cols, rows)
            for result in self.results
            if self.layout.is_tiled
        ]
        return max((down for down, _ in each), default=1), max((k for _, k in each), default=1)

    @property
    def trips(self) -> int:
        """Of the loop in `store_pieces`, where a thread stores bytes."""
        return max(-(-math.prod(self.staged_shape(r)) // self.threads) for r in self.results)

    def staged_shape(self, result: Output) -> tuple[int, int]:
        """Of a tile's scales, as they will lie."""
        rows = self.tile.rows // (1 if result.blocks == "row" else BLOCK)
        cols = self.tile.cols // (1 if result.blocks == "column" else BLOCK)
        return (cols, rows) if self.is_turned(result) else (rows, cols)

    def shared_memory(self, result: Output):
        """For scales, as they will lie (column first), and for values, or None."""
        rows, cols = self.staged_shape(result)
        sS = cute.make_tensor(
            cute.arch.alloc_smem(Uint8, rows * cols, alignment=16), cute.make_layout((cols, rows))
        )
        if self.is_staged(result):
            size = self.tile.rows * self.tile.cols // self.per_byte
            return sS, cute.arch.alloc_smem(Uint8, size, alignment=128)
        if self.aligned or self.is_both:  # rows are as aligned as the array is
            return sS, None
        size = self.tile.rows // self.per_byte * (self.tile.cols + PAD) + PAD
        return sS, cute.arch.alloc_smem(Uint8, size, alignment=16)

    def is_staged(self, result: Output) -> bool:
        """Whether values pass through shared memory, to be written by lines."""
        return result.transpose or result.per_row > 1

    def is_turned(self, result: Output) -> bool:
        """Whether a result's scales lie the other way round than x: tiles always do for columns."""
        return result.transpose or (result.blocks == "column" and self.layout.is_tiled)

    def lengths(self, scalars) -> tuple:
        """How many blocks of rows x has, and how many columns."""
        blocks_m, k = scalars[:2]
        return blocks_m, k * BLOCK if self.is_both else k

    def place(self, blocks_m, k):
        """(batch, row, column) of this thread block's tile."""
        bid, _, _ = cute.arch.block_idx()
        down, across = self.pad
        tiles_m = (blocks_m + down - 1) // down * (down // self.tile.down)
        tiles_k = (k + across - 1) // across * (across // self.tile.cols)
        return place_of(bid, tiles_m, tiles_k, self.tile.band)

    def lane(self, tid) -> tuple:
        """A lane's place in its warp, across and down; its patch's row and column in the tile."""
        lane, warp = tid % 32, tid // 32
        across, down = lane % self.lanes, lane // self.lanes
        row = warp % self.tile.down * BLOCK + down * self.rows
        col = warp // self.tile.down * (2 * BLOCK) + across * self.vector
        return across, down, row, col

    # ---- x ---
    def patch(self, *where):
        """This lane's patch, (vector, rows); 0 beyond the array."""
        return self.load(*where) if self.aligned else self.load_unaligned(*where)

    @cute.jit
    def load(self, x, at, row, col, blocks_m, k):
        """This lane's patch, (vector, rows); 0 beyond the array."""
        batch, tile_m, tile_k = at
        rX = cute.make_rmem_tensor((self.vector, self.rows), convert.INPUT[self.dtype])
        m = blocks_m * BLOCK
        first, left = tile_m * self.tile.rows + row, tile_k * self.tile.cols + col
        mX = by_vector(x, Int64(batch + 1) * m, k, self.vector)
        top = Int64(batch) * m + first
        if (first < m) & (left < k):
            for i in range_constexpr(self.rows):
                load(mX[top + i, left // self.vector, None], rX[None, i], self.kept)
        else:
            rX.fill(convert.INPUT[self.dtype](0))
        return rX

    @cute.jit
    def load_unaligned(self, x, at, row, col, blocks_m, k):
        """The same of an x that lies anywhere, or whose rows do."""
        batch, tile_m, tile_k = at
        rX = cute.make_rmem_tensor((self.vector, self.rows), convert.INPUT[self.dtype])
        rX.fill(convert.INPUT[self.dtype](0))
        m = blocks_m * BLOCK
        first, left = tile_m * self.tile.rows + row, tile_k * self.tile.cols + col
        top = Int64(batch) * m + first
        # Two vectors around each row's, as long as all of them belong to x.
        n: cutlass.Constexpr = self.vector
        before, behind = (top > 0) | (left >= n), (first + self.rows < m) | (left + 2 * n <= k)
        if (first < m) & (left + n <= k) & (k >= n) & before & behind:
            rW = cute.recast_tensor(rX, Uint32)
            for i in range_constexpr(self.rows):
                address = x.toint() + ((top + i) * k + left) * self.itemsize
                words = load_anywhere(address, 16)
                for w in range_constexpr(4):
                    rW[w, i] = words[w]
        elif first < m:
            mX = cute.make_tensor(
                x, cute.make_layout((Int64(batch + 1) * m, k), stride=(Int64(k), 1))
            )
            for j in range_constexpr(self.vector):
                if left + j < k:
                    for i in range_constexpr(self.rows):
                        rX[j, i] = mX[top + i, left + j]
        return rX

    def pair(self, rX, w: int, i: int) -> list:
        """The words of columns 2 * w and 2 * w + 1 in row i of a patch."""
        return words_of(rX[None, i], w, self.dtype)

    # ---- scales ---
    def exchange(self, words: list, sharers: int, stride: int, index):
        """The largest magnitudes of two blocks, of this lane's share, as float32 bits.

        Args:
          words: this lane's own magnitudes, two blocks a word (float32: one).
          sharers: how many lanes hold parts of these blocks.
          stride: how many lanes apart they are.
          index: which of them this one is; it gets blocks 2 * index and 2 * index + 1.
        """
        while sharers > 1:
            sharers //= 2
            half = len(words) // 2
            upper = (index & sharers) != 0
            kept = []
            for low, high in zip(words[:half], words[half:], strict=True):
                mine, theirs = select(upper, high, low), select(upper, low, high)
                other = cute.arch.shuffle_sync_bfly(theirs, offset=sharers * stride)
                kept.append(convert.larger_magnitude(mine, other, self.dtype))
            words = kept
        if self.itemsize == 4:
            return [convert.magnitude_bits(word, 0, self.dtype) for word in words]
        return [convert.magnitude_bits(words[0], e, self.dtype) for e in range(2)]

    def gather(self, inverses: list, sharers: int, stride: int, index) -> list:
        """The sharers' pairs of factors, the pair of blocks 2 * i and 2 * i + 1 as the i-th."""
        pair = convert.pair(*inverses)
        lane = cute.arch.lane_idx() - index * stride
        return [cute.arch.shuffle_sync(pair, offset=lane + i * stride) for i in range(sharers)]

    def largest(self, words: list):
        """The word of larger magnitudes, element by element."""
        word = words[0]
        for other in words[1:]:
            word = convert.larger_magnitude(word, other, self.dtype)
        return word

    def put(self, sS, result: Output, row, col, scale) -> None:
        """Stages a scale of x's rows and columns, or blocks of them."""
        sS[(row, col) if self.is_turned(result) else (col, row)] = Uint8(scale)

    @cute.jit
    def scale_rows(self, rX, sS, result: cutlass.Constexpr, rounding, row, col, across):
        """Blocks along rows: neighbours across share one. Pairs of factors of rows."""
        words = [
            self.largest([w for j in range(self.vector // 2) for w in self.pair(rX, j, i)])
            for i in range(self.rows)
        ]
        if const_expr(self.itemsize == 2):
            words = [
                convert.amaxes_of_two(words[i], words[i + 1], self.dtype)
                for i in range(0, self.rows, 2)
            ]
        index = across % self.row_sharers
        amaxes = self.exchange(words, self.row_sharers, 1, index)
        inverses = []
        for e in range_constexpr(2):
            scale, inverse = self.scale_of(amaxes[e], result.format, rounding)
            self.put(sS, result, row + 2 * index + e, col // BLOCK, scale)
            inverses.append(inverse)
        return self.gather(inverses, self.row_sharers, 1, index)

    @cute.jit
    def scale_columns(self, rX, sS, result: cutlass.Constexpr, rounding, row, col, down):
        """Blocks down columns: lanes below each other share one. Pairs of factors of columns."""
        by_row = [
            [w for j in range(self.vector // 2) for w in self.pair(rX, j, i)]
            for i in range(self.rows)
        ]
        words = [self.largest(list(column)) for column in zip(*by_row, strict=True)]
        amaxes = self.exchange(words, self.column_sharers, self.lanes, down)
        inverses = []
        for e in range_constexpr(2):
            scale, inverse = self.scale_of(amaxes[e], result.format, rounding)
            self.put(sS, result, row // BLOCK, col + 2 * down + e, scale)
            inverses.append(inverse)
        return self.gather(inverses, self.column_sharers, self.lanes, down)

    @cute.jit
    def scale_square(self, rX, sS, result: cutlass.Constexpr, rounding, row, col):
        """Square blocks: two a warp. One pair for all."""
        rW = cute.recast_tensor(rX, Uint32)
        word = self.largest([rW[i] for i in range(cute.size(rW))])
        offsets: cutlass.Constexpr = [1 << i for i in range(self.row_sharers.bit_length() - 1)] + [
            self.lanes << i for i in range(self.column_sharers.bit_length() - 1)
        ]
        for offset in offsets:
            other = cute.arch.shuffle_sync_bfly(word, offset=offset)
            word = convert.larger_magnitude(word, other, self.dtype)
        amax = convert.largest_magnitude_bits(word, self.dtype)
        scale, inverse = self.scale_of(amax, result.format, rounding)
        if (row % BLOCK == 0) & (col % BLOCK == 0):
            self.put(sS, result, row // BLOCK, col // BLOCK, scale)
        return [convert.pair(inverse, inverse)]

    def factors(self, inverses: list, result: Output, w: int, i: int):
        """The pair of factors of columns 2 * w and 2 * w + 1 in row i."""
        if result.blocks == "row":
            return convert.twice(inverses[i // 2], i % 2)
        return inverses[w if result.blocks == "column" else 0]

    # ---- values ---
    def scaled_row(self, rX, inverses: list, result: Output, i: int) -> list:
        """Row i's pairs, see convert.py."""
        pairs = []
        for w in range(self.vector // 2):
            factors = self.factors(inverses, result, w, i)
            pairs.append(self.scaled_pair(self.pair(rX, w, i), factors, result.format))
        return pairs

    def quantized_row(self, rX, inverses: list, result: Output, i: int):
        """Row i of the bytes."""
        per = result.per_column
        rows = [self.scaled_row(rX, inverses, result, per * i + r) for r in range(per)]
        if per == 1:
            words = convert.pack_along(rows[0], self.dtype, result.format, self.arch)
        else:
            words = convert.pack_down(*rows, self.dtype, result.format, self.arch)
        return bytes_of(words, self.vector // result.per_row)

    @cute.jit
    def store(
        self, rX, inverses, result: cutlass.Constexpr, values, at, row, col, blocks_m, k
    ):  # fmt: skip
        """Values in the order of x."""
        batch, tile_m, tile_k = at
        m = blocks_m * BLOCK
        first, left = tile_m * self.tile.rows + row, tile_k * self.tile.cols + col
        top = Int64(batch) * m + first
        n: cutlass.Constexpr = self.vector
        down: cutlass.Constexpr = result.per_column
        mV = by_vector(values, Int64(batch + 1) * (m // down), k, n)
        if (first < m) & (left < k):
            for i in range_constexpr(self.rows // down):
                rV = self.quantized_row(rX, inverses, result, i)
                cute.autovec_copy(rV, mV[top // down + i, left // n, None])

    @cute.jit
    def stage(self, sV, rX, inverses, result: cutlass.Constexpr, row, col):
        """The tile's values in shared memory, row by row with `PAD` bytes before each."""
        n: cutlass.Constexpr = self.vector
        rows = cute.make_tensor(
            sV + PAD,
            cute.make_layout(
                (self.tile.rows // self.per_byte, self.tile.cols // n, n),
                stride=(self.tile.cols + PAD, n, 1),
            ),
        )
        for i in range_constexpr(self.rows // self.per_byte):
            rV = self.quantized_row(rX, inverses, result, i)
            cute.autovec_copy(rV, rows[row // self.per_byte + i, col // n, None])

    @cute.jit
    def store_unaligned(self, sV, values, at, blocks_m, k):
        """From shared memory to values that lie anywhere, or whose rows do."""
        batch, tile_m, tile_k = at
        height: cutlass.Constexpr = self.tile.rows // self.per_byte
        m, top, left = blocks_m * (BLOCK // self.per_byte), tile_m * height, tile_k * self.tile.cols
        start = values.toint() + (Int64(batch) * m + top) * k + left
        store_rows(
            sV, start, Int64(k), m - top, cutlass.min(k - left, self.tile.cols), height,
            self.tile.cols, self.threads // 32,
        )  # fmt: skip

    @cute.jit
    def stage_transposed(self, sV, rX, inverses, result: cutlass.Constexpr, row, col):
        """The tile's values in shared memory, a column of x after the other."""
        rows: cutlass.Constexpr = self.rows // self.per_byte  # of bytes
        n: cutlass.Constexpr = self.vector
        parts: cutlass.Constexpr = 16 // rows
        lines: cutlass.Constexpr = self.lines(result)
        chunks = cute.make_tensor(
            sV,
            cute.make_layout(
                (lines.count, lines.size // 16, parts, rows), stride=(lines.size, 16, rows, 1)
            ),
        )
        byte = row // self.per_byte
        chunk = (byte // 16) ^ lines.key(col)
        for w in range_constexpr(n // 2):
            pairs = []
            for i in range_constexpr(self.rows):
                factors = self.factors(inverses, result, w, i)
                pairs.append(self.scaled_pair(self.pair(rX, w, i), factors, result.format))
            below = convert.pack_below(pairs, self.dtype, result.format, self.arch)
            for c in range_constexpr(2):
                words = convert.pack_column(below, c, result.format, self.arch)
                rV = bytes_of(words, rows)
                cute.autovec_copy(rV, chunks[col + 2 * w + c, chunk, byte % 16 // rows, None])

    @cute.jit
    def stage_rows(self, sV, rX, inverses, result: cutlass.Constexpr, row, col):
        """The tile's values in shared memory row by row: bytes of two codes make short runs.

        H200, (8, 7168, 7168), 2026-11-21: square blocks in MXFP4 365 us if lanes write their 4
        bytes a row to memory, 245 us so.
        """
        beside: cutlass.Constexpr = result.per_row
        lines: cutlass.Constexpr = self.lines(result)
        n: cutlass.Constexpr = self.vector // beside
        rows = cute.make_tensor(
            sV,
            cute.make_layout(
                (lines.count, lines.size // 16, 16 // n, n), stride=(lines.size, 16, n, 1)
            ),
        )
        byte = col // beside
        for i in range_constexpr(self.rows):
            rV = self.quantized_row(rX, inverses, result, i)
            chunk = (byte // 16) ^ lines.key(row + i)
            cute.autovec_copy(rV, rows[row + i, chunk, byte % 16 // n, None])

    def lines(self, result: Output):
        """How a result's values lie in shared memory."""
        sides = self.tile.cols, self.tile.rows // result.per_column
        if not result.transpose:
            sides = self.tile.rows // result.per_column, self.tile.cols // result.per_row
        return Lines(*sides, *((self.vector, 1) if result.transpose else (self.rows, 2)))

    @cute.jit
    def store_lines(self, sV, values, tiles, result: cutlass.Constexpr, at, tid, blocks_m, k):
        """From shared memory to where each line is a row, 16 bytes a thread and step."""
        if const_expr(self.aligned):
            self.copy_lines(sV, values, 16, tiles, result, at, tid, blocks_m, k)
        elif values.toint() % 16 == 0:
            self.copy_lines(sV, values, 16, tiles, result, at, tid, blocks_m, k)
        else:
            self.copy_lines(sV, values, 1, tiles, result, at, tid, blocks_m, k)

    @cute.jit
    def copy_lines(
        self, sV, values, align: cutlass.Constexpr, tiles, result: cutlass.Constexpr, at, tid,
        blocks_m, k,
    ):  # fmt: skip
        """`align` is that of `values`, 16 or 1; every offset is a multiple of 16."""
        batch, tile_r, tile_c = at
        rows, cols = blocks_m * (BLOCK // result.per_column), k // result.per_row
        if const_expr(result.transpose):
            tile_r, tile_c, rows, cols = tile_c, tile_r, k, blocks_m * (BLOCK // self.per_byte)
        lines: cutlass.Constexpr = self.lines(result)
        each: cutlass.Constexpr = lines.size // 16  # chunks
        chunks = cute.make_tensor(
            sV, cute.make_layout((lines.count, each, 16), stride=(lines.size, 16, 1))
        )
        apart: cutlass.Constexpr = self.tile.threads // each  # lines of a step
        steps: cutlass.Constexpr = lines.count // apart
        chunk, line = tid % each, tid // each
        rV = cute.make_rmem_tensor((16, steps), Uint8)
        for step in range_constexpr(steps):  # all before the first store, or each would wait
            at_step = line + step * apart
            cute.autovec_copy(chunks[at_step, chunk ^ lines.key(at_step), None], rV[None, step])
        row, col = tile_r * lines.count + line, tile_c * lines.size + chunk * 16
        start = (Int64(batch) * rows + row) * cols + col
        for step in range_constexpr(steps):
            offset = start + Int64(cols) * (step * apart)
            if const_expr(self.tiles_values and result.ends_rows):
                if tiles != Int32(0):
                    top, number = in_tiles_of_values(row + step * apart, Int64(col // 16))
                    offset = (Int64(batch) * rows + top) * cols + number * 16
            if (row + step * apart < rows) & (col < cols):
                cute.autovec_copy(rV[None, step], vector_at(values + offset, Uint8, align, 16))

    @cute.jit
    def store_scales(self, sS, scales, result: cutlass.Constexpr, at, thread, blocks_m, k):
        """A tile's scales, by words where those lie side by side and aligned, else by bytes.

        H200, (8, 4128, 2880), 2026-11-22, whose rows of 90 and 129 scales 4 does not divide: both
        transposed 99 us, MXFP4 87; 129 and 131 where a thread writes its word's bytes one by one.
        """
        rows = blocks_m * (BLOCK if result.blocks == "row" else 1)
        cols = k if const_expr(result.blocks == "column") else k // BLOCK
        if const_expr(self.is_turned(result)):
            rows, cols = cols, rows
        unit: cutlass.Constexpr = min(4, sS.shape[0]) if self.layout.column_stride == 1 else 1
        whole = cutlass.Boolean(True)
        if const_expr(not self.aligned):
            whole = whole & (scales.toint() % unit == 0)
        if const_expr(self.layout.is_tiled):
            self.store_pieces(sS, scales, result, at, thread, rows, cols, unit, whole)
        elif whole & (cols % unit == 0):
            self.store_pieces(sS, scales, result, at, thread, rows, cols, unit, True)
        else:
            self.store_pieces(sS, scales, result, at, thread, rows, cols, 1, True)

    @cute.jit
    def store_pieces(
        self, sS, scales, result: cutlass.Constexpr, at, thread, rows, cols,
        unit: cutlass.Constexpr, whole,
    ):  # fmt: skip
        """Scales of a matrix of rows x cols, `unit` bytes a thread, neighbours by neighbours.

        Bytes reach memory in pieces of 32; whoever writes less of one pays for all of it. If not
        `whole`, a thread's are written one by one.
        """
        batch, tile_r, tile_c = at
        if const_expr(self.is_turned(result)):
            tile_r, tile_c = tile_c, tile_r
        in_col, in_row = sS.shape
        each: cutlass.Constexpr = in_col // unit  # of a row
        total: cutlass.Constexpr = in_row * each
        steps: cutlass.Constexpr = (total + self.tile.threads - 1) // self.tile.threads
        # A loop, as unrolled it takes both_transposed in MXFP4 from 64 registers to 72 (318 us to
        # 346, H200, (8, 7168, 7168)).
        for step in cutlass.range(steps, unroll=1):
            index = step * self.tile.threads + thread
            row, col = tile_r * in_row + index // each, tile_c * in_col + index % each * unit
            if const_expr(self.layout.is_tiled):
                offset, inside = offset_in_tiles(self.layout, batch, row, col, rows, cols)
            else:
                offset = (Int64(batch) * rows + row) * cols + col
                inside = (row < rows) & (col < cols)
            if (index < total) & inside:
                piece = cute.make_tensor(sS.iterator + index * unit, cute.make_layout(unit))
                if const_expr(self.layout.is_tiled and takes_zero_scale(result.format)):
                    self.clear_padding(piece, row, col, rows, cols)
                if whole:
                    rS = cute.make_rmem_tensor(unit, Uint8)
                    cute.autovec_copy(piece, rS)
                    kept: cutlass.Constexpr = self.kept and self.form == "both_transposed"
                    store(rS, vector_at(scales + offset, Uint8, unit, unit), kept)
                else:
                    mS = cute.make_tensor(scales + offset, cute.make_layout(unit))
                    for c in range_constexpr(unit):
                        mS[c] = piece[c]

    @cute.jit
    def clear_padding(self, piece, row, col, rows, cols):
        """Zeros for staged scales that are beyond the matrix; where blocks of zeros have others."""
        if (row >= rows) | (col + cute.size(piece) > cols):
            for c in range_constexpr(cute.size(piece)):
                if (row >= rows) | (col + c >= cols):
                    piece[c] = Uint8(0)


def kernel_of(variant: Variant, arch: str, layout: ScaleLayout, aligned: bool, **tuning):
    """The kernel of a variant's entry, for scales in this layout."""
    from jax_mx.kernels.cutedsl.treated_tiles import TreatedTiled  # which is made of this module's

    tiled = TreatedTiled if variant.words else Tiled
    return (Flat if variant.form == "last" else tiled)(variant, arch, layout, aligned, **tuning)
