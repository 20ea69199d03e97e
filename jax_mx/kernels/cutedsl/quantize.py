"""MX quantize on NVIDIA, in CuTeDSL. Matches reference.quantize bit for bit.

One class, two ways to cut the work, and helpers that both use:

* `Flat`, for blocks along the last axis. Blocks are consecutive in memory, so x is a flat vector
  and every shape is the same shape. A thread holds half a block.
* `Tiled`, for every form that needs the second-to-last axis. A thread block holds 128 x 128
  elements, a warp 32 x 64 of them, a lane a patch of both rows and columns, so that blocks along
  either axis are a few shuffles away. 128 x 128 is also 128 rows x 4 scales in either direction:
  one tile of BLOCKED_128X4, staged in shared memory and written whole, its padding included.

Sizes and the scale layout are run-time scalars. Entry 0 wants aligned operands, entry 1 takes any.
"""

import dataclasses

import cutlass
from cutlass import Int32, Int64, Uint8, Uint16, Uint32, const_expr, cute, range_constexpr

from jax_mx.formats import BLOCK, FLOAT_DTYPES, Format
from jax_mx.kernels.cutedsl import convert
from jax_mx.layouts import BLOCKED_128X4, SCALE_LAYOUTS
from jax_mx.variants import Variant

ROW_MAJOR_CODE, BLOCKED_CODE = (
    list(SCALE_LAYOUTS).index(n) for n in ("row_major", "blocked_128x4")
)
ALL = (0, 99)  # from the first dimension to the last


@cute.jit
def quantize_values(rX: cute.Tensor, rV: cute.Tensor, inverses, format: cutlass.Constexpr):
    """Codes of a fragment: rV[i] = rX[i] * inverses[i], two at a time."""
    rV2 = cute.recast_tensor(rV, Uint16)
    for i in range_constexpr(cute.size(rV) // 2):
        low = cutlass.Float32(rX[2 * i]) * inverses[2 * i]
        high = cutlass.Float32(rX[2 * i + 1]) * inverses[2 * i + 1]
        rV2[i] = convert.pack_two(low, high, format)


@cute.jit
def offset_in_blocked_tile(row: Int32, col: Int32):
    """Where (row, col) of a tile lies in it, from the layout's own description."""
    layout: cutlass.Constexpr = BLOCKED_128X4
    sizes: cutlass.Constexpr = (*layout.row_digits, *layout.col_digits)
    digits = []
    for number, factors in ((row, layout.row_digits), (col, layout.col_digits)):
        below = 1
        found = []
        for factor in reversed(factors):
            found.insert(0, number // below % factor)
            below *= factor
        digits += found
    offset, stride = Int32(0), 1
    for place in reversed(layout.order):
        offset = offset + digits[place] * stride
        stride *= sizes[place]
    return offset


class Kernel:
    """What both ways share: the entries, and the host half that makes the compiler emit them."""

    outputs = 1

    def __init__(self, variant: Variant):
        self.dtype, self.formats = variant.dtype, variant.formats
        self.itemsize = FLOAT_DTYPES[variant.dtype].itemsize

    @property
    def alignments(self) -> list[list[int]]:
        """Per entry the alignment of (x, values, scales, ...)."""
        return [[16, *[16, 4] * self.outputs], [self.itemsize, *[1, 1] * self.outputs]]

    def scalars(self, extents: list) -> list:
        """Of the launch rule: the extents, then what a plan knows by name."""
        names = ["scale_layout"]
        for i in range(self.outputs):
            names += [f"round_add_{i}", f"round_exception_{i}"]
        return [*extents, *([4, name] for name in names)]

    def arguments(self):
        """Stand-ins of the host function's arguments, to compile it."""
        types = [convert.INPUT[self.dtype], *[Uint8] * 2 * self.outputs]
        pointers = tuple(
            tuple(
                cute.runtime.make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align)
                for dtype, align in zip(types, entry, strict=True)
            )
            for entry in self.alignments
        )
        scalars = tuple((Int64 if s[0] == 8 else Int32)(BLOCK) for s in self.launch["scalars"])
        return (*pointers, scalars)

    @cute.jit
    def __call__(self, aligned, unaligned, scalars):
        shape = {"grid": [1, 1, 1], "block": self.launch["threads"]}  # the real grid is the rule's
        self.kernel(aligned, scalars, True).launch(**shape)
        self.kernel(unaligned, scalars, False).launch(**shape)


@dataclasses.dataclass(frozen=True)
class Strip:
    """What a thread block of `Flat` covers: consecutive elements."""

    threads: int
    elements: int  # of one block, per thread and step
    unroll: int  # steps

    @property
    def blocks(self) -> int:
        """MX blocks per thread block."""
        return self.threads * self.elements * self.unroll // BLOCK


# H200, (8, 7168, 7168), 2026-11-20, benchmarks/sweep.py, 96 candidates: bf16 285.7 us (best 285.4),
# f16 285.7 (285.2), f32 467.9 (467.6). Nothing that keeps 32 to 256 bytes a thread in flight is
# further than 1 % behind; 32 elements a thread are: their 64-byte strides cost a fifth (340 us).
STRIP = Strip(threads=512, elements=16, unroll=1)


class Flat(Kernel):
    """x (..., rows, cols, 32) -> values like x, scales (..., rows, cols) in the layout."""

    def __init__(self, variant: Variant, tile: Strip | None = None):
        super().__init__(variant)
        self.tile = tile or STRIP

    divide = ()

    @property
    def launch(self) -> dict:
        """The launch rule, in the words of ffi/launch.cc; the grid follows the padded scales."""
        extents = [[8, [0, *ALL]], [8, [2, *ALL]], [4, [0, -3, -2]], [4, [0, -2, -1]]]
        return {
            "threads": [self.tile.threads, 1, 1],
            "grid": [[0, 2, *ALL, self.tile.blocks]],
            "scalars": self.scalars(extents),
        }

    @cute.kernel
    def kernel(self, pointers, scalars, aligned: cutlass.Constexpr):
        x, values, scales = pointers
        n, places, rows, cols, scale_layout, round_add, round_exception = scalars
        elements: cutlass.Constexpr = self.tile.elements
        unroll: cutlass.Constexpr = self.tile.unroll
        sharers: cutlass.Constexpr = BLOCK // elements  # threads that share a block
        words: cutlass.Constexpr = elements * self.itemsize // 4
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        by_step = cute.make_layout((n // elements, elements), stride=(elements, 1))
        mX, mV = cute.make_tensor(x, by_step), cute.make_tensor(values, by_step)
        mS = cute.make_tensor(scales, cute.make_layout(places))
        per_step: cutlass.Constexpr = self.tile.threads // sharers

        rX = cute.make_rmem_tensor((elements, unroll), convert.INPUT[self.dtype])
        rX.fill(convert.INPUT[self.dtype](0))
        steps, offsets, insides = [], [], []
        for u in range_constexpr(unroll):
            place = Int64(bid) * self.tile.blocks + u * per_step + Int64(tid // sharers)
            block, offset, inside = self.locate(place, places, rows, cols, scale_layout)
            steps.append(block * sharers + tid % sharers)
            offsets.append(offset)
            insides.append(inside)
            if inside:
                cute.autovec_copy(mX[steps[u], None], rX[None, u])

        for u in range_constexpr(unroll):
            rW = cute.recast_tensor(rX[None, u], Uint32)
            word = rW[0]
            for w in range_constexpr(1, words):
                word = convert.larger_magnitude(word, rW[w], self.dtype)
            for k in range_constexpr(sharers.bit_length() - 1):
                other = cute.arch.shuffle_sync_bfly(word, offset=1 << k)
                word = convert.larger_magnitude(word, other, self.dtype)
            scale, inverse = convert.scale_of(
                convert.largest_magnitude_bits(word, self.dtype),
                self.formats[0].emax,
                self.dtype,
                Uint32(round_add),
                Uint32(round_exception),
            )
            rV = cute.make_rmem_tensor(elements, Uint8)
            quantize_values(rX[None, u], rV, [inverse] * elements, self.formats[0])
            if insides[u]:
                cute.autovec_copy(rV, mV[steps[u], None])
            if (offsets[u] < places) & (tid % sharers == 0):
                mS[offsets[u]] = Uint8(scale)  # padding: of zeros, so 0

    @cute.jit
    def locate(self, place: Int64, places: Int64, rows: Int32, cols: Int32, scale_layout: Int32):
        """Of the scale at `place`, counted row by row with the padding: its block, its offset.

        Row-major scales have no padding, so the three are one number.
        """
        block, offset, inside = place, place, place < places
        if scale_layout != ROW_MAJOR_CODE:
            tile_rows: cutlass.Constexpr = BLOCKED_128X4.pad[0]
            tile_cols: cutlass.Constexpr = BLOCKED_128X4.pad[1]
            tiles_r = (rows + tile_rows - 1) // tile_rows
            tiles_c = (cols + tile_cols - 1) // tile_cols
            # 32 bits: places beyond would be blocks of more elements than a GPU's memory holds.
            index = Uint32(place)
            padded = Uint32(tiles_c * tile_cols)
            row, col = Int32(index // padded), Int32(index % padded)
            slab = Int32(Uint32(row) // Uint32(tiles_r * tile_rows))
            row = row - slab * (tiles_r * tile_rows)
            tile = (Int64(slab) * tiles_r + row // tile_rows) * tiles_c + col // tile_cols
            in_tile = offset_in_blocked_tile(row % tile_rows, col % tile_cols)
            offset = tile * (tile_rows * tile_cols) + in_tile
            if place >= places:
                offset = places
            inside = (place < places) & (row < rows) & (col < cols)
            block = (Int64(slab) * rows + row) * cols + col
        return block, offset, inside


TILE = 128  # elements a side, of a thread block of `Tiled`
WARPS = (4, 2)  # down, across: a warp holds 32 x 64


# How many tiles follow each other down before the next ones across. H200, bf16, (8, 7168, 7168) and
# (65536, 8192), 2026-11-20, of 1, 2, 4, 8, 16 and 64:
#   second             289 us, 376 us (8: 291, 379; 64: 305, 399)
#   second_transposed  304, 418 (1: 312, 422; 8: 311, 417)
#   both               455, 596 (8: 469, 618; 64: 495, 650)
#   both_transposed    483, 644 (8: 489, 645; 64: 495, 660)
# Registers for three thread blocks a multiprocessor would make `both` spill (631 us), and gain 1 %
# for `second` in bf16 alone.
DOWN = {"second": 1, "second_transposed": 64, "both": 1, "both_transposed": 1}


@dataclasses.dataclass(frozen=True)
class Output:
    """One of the results of `Tiled`: which way its blocks run in the tile, and how it lies."""

    format: Format
    down: bool  # blocks run down a column, i.e. along the second-to-last axis
    transpose: bool = False  # values (and scales) are written transposed; only with `down`


class Tiled(Kernel):
    """Forms with the second-to-last axis; x lies as (batch, M, K), M = 32 * `blocks_m`."""

    def __init__(self, variant: Variant, tile: int | None = None):
        super().__init__(variant)
        self.form = variant.form
        self.tile = tile or DOWN[self.form]
        transpose = self.form.endswith("transposed")
        self.results = [Output(variant.formats[-1], True, transpose)]
        if self.form.startswith("both"):
            self.results.insert(0, Output(variant.formats[0], False))
        self.outputs = len(self.results)
        self.vector = 16 // self.itemsize  # elements of one load
        self.lanes = 64 // self.vector  # across a warp
        self.rows = self.lanes  # of a lane: 32 / (32 / lanes)

    @property
    def launch(self) -> dict:
        """The launch rule, in the words of ffi/launch.cc."""
        if self.outputs == 2:  # (..., blocks_m, blocks_k, 32, 32)
            m, k, per_tile, lead = (-4, -3), (-3, -2), TILE // BLOCK, (0, -4)
        else:  # (..., blocks_m, K, 32)
            m, k, per_tile, lead = (-3, -2), (-2, -1), TILE, (0, -3)
        return {
            "threads": [32 * WARPS[0] * WARPS[1], 1, 1],
            "grid": [[0, 0, *k, per_tile], [0, 0, *m, TILE // BLOCK], [0, 0, *lead, 1]],
            "scalars": self.scalars([[4, [0, *m]], [4, [0, *k]]]),
        }

    @property
    def divide(self) -> list:
        """The aligned entry loads whole vectors, so they must not straddle rows."""
        return [] if self.outputs == 2 else [[0, 0, -2, -1, self.vector]]

    @cute.kernel
    def kernel(self, pointers, scalars, aligned: cutlass.Constexpr):
        blocks_m, k, scale_layout = scalars[:3]
        if const_expr(self.outputs == 2):
            k = k * BLOCK
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        tiles_k = (k + TILE - 1) // TILE
        tiles_m = (blocks_m * BLOCK + TILE - 1) // TILE
        at = self.place(bid, tiles_m, tiles_k)
        lane, warp = tid % 32, tid // 32
        across, down = lane % self.lanes, lane // self.lanes  # this lane's place in the warp
        warp_m, warp_k = warp % WARPS[0], warp // WARPS[0]
        row = warp_m * BLOCK + down * self.rows  # of this lane's patch in the tile
        col = warp_k * 64 + across * self.vector

        rX = self.load(pointers[0], at, row, col, blocks_m, k, aligned)
        staged = []
        for o in range_constexpr(self.outputs):
            result: cutlass.Constexpr = self.results[o]
            sS = cute.make_tensor(
                cute.arch.alloc_smem(Uint8, TILE * 4, alignment=16), cute.make_layout((4, TILE))
            )
            rounding = (Uint32(scalars[3 + 2 * o]), Uint32(scalars[4 + 2 * o]))
            if const_expr(result.down):
                inverses = self.scales_down(rX, sS, result.format, rounding, col, warp_m, down)
            else:
                inverses = self.scales_across(rX, sS, result.format, rounding, row, col, across)
            sV = None
            if const_expr(result.transpose):
                sV = self.stage_transposed(rX, inverses, result.format, row, col)
            else:
                mV = pointers[1 + 2 * o]
                self.store(rX, inverses, result, mV, at, row, col, blocks_m, k, aligned)
            staged.append((sS, sV))
        cute.arch.sync_threads()
        for o in range_constexpr(self.outputs):
            result: cutlass.Constexpr = self.results[o]
            sS, sV = staged[o]
            if const_expr(result.transpose):
                self.store_transposed(sV, pointers[1 + 2 * o], at, tid, blocks_m, k, aligned)
            # The two results' scales are written by different halves of the threads.
            thread = tid - o * TILE
            if (thread >= 0) & (thread < TILE):
                mS = pointers[2 + 2 * o]
                self.store_scales(sS, mS, result, at, thread, blocks_m, k, scale_layout, aligned)

    @cute.jit
    def place(self, bid: Int32, tiles_m: Int32, tiles_k: Int32):
        """(batch, m, k) of a thread block: bands of `down` tiles, each band column by column."""
        batch, rest = bid // (tiles_m * tiles_k), bid % (tiles_m * tiles_k)
        down: cutlass.Constexpr = self.tile
        band = rest // (down * tiles_k)
        height = cutlass.min(tiles_m - band * down, Int32(down))  # the last band may be lower
        rest = rest - band * (down * tiles_k)
        return batch, band * down + rest % height, rest // height

    @cute.jit
    def load(self, x, at, row, col, blocks_m, k, aligned: cutlass.Constexpr):
        """This lane's patch, (vector, rows); 0 beyond the array."""
        batch, tile_m, tile_k = at
        rX = cute.make_rmem_tensor((self.vector, self.rows), convert.INPUT[self.dtype])
        rX.fill(convert.INPUT[self.dtype](0))
        m = blocks_m * BLOCK
        first, left = tile_m * TILE + row, tile_k * TILE + col
        top = Int64(batch) * m + first
        if const_expr(aligned):
            vectors = k // self.vector
            layout = cute.make_layout(
                (Int64(batch + 1) * m, vectors, self.vector),
                stride=(Int64(vectors) * self.vector, self.vector, 1),
            )
            mX = cute.make_tensor(x, layout)
            if (first < m) & (left < k):
                for i in range_constexpr(self.rows):
                    cute.autovec_copy(mX[top + i, left // self.vector, None], rX[None, i])
        else:
            mX = cute.make_tensor(
                x, cute.make_layout((Int64(batch + 1) * m, k), stride=(Int64(k), 1))
            )
            if first < m:
                for j in range_constexpr(self.vector):
                    if left + j < k:
                        for i in range_constexpr(self.rows):
                            rX[j, i] = mX[top + i, left + j]
        return rX

    @cute.jit
    def scales_across(self, rX, sS, format: cutlass.Constexpr, rounding, row, col, across):
        """Blocks along rows: neighbours across share one. Inverses [i * vector + j]."""
        sharers: cutlass.Constexpr = BLOCK // self.vector
        words: cutlass.Constexpr = self.vector * self.itemsize // 4
        rW = cute.recast_tensor(rX, Uint32)
        inverses = []
        for i in range_constexpr(self.rows):
            word = rW[0, i]
            for w in range_constexpr(1, words):
                word = convert.larger_magnitude(word, rW[w, i], self.dtype)
            for s in range_constexpr(sharers.bit_length() - 1):
                other = cute.arch.shuffle_sync_bfly(word, offset=1 << s)
                word = convert.larger_magnitude(word, other, self.dtype)
            amax = convert.largest_magnitude_bits(word, self.dtype)
            scale, inverse = convert.scale_of(amax, format.emax, self.dtype, *rounding)
            inverses += [inverse] * self.vector
            if across % sharers == 0:
                sS[col // BLOCK, row + i] = Uint8(scale)
        return inverses

    @cute.jit
    def scales_down(self, rX, sS, format: cutlass.Constexpr, rounding, col, warp_m, down):
        """Blocks down columns: all lanes below each other share one. Inverses [i * vector + j]."""
        per_word: cutlass.Constexpr = 4 // self.itemsize
        rW = cute.recast_tensor(rX, Uint32)
        column = []
        for w in range_constexpr(self.vector // per_word):
            word = rW[w, 0]
            for i in range_constexpr(1, self.rows):
                word = convert.larger_magnitude(word, rW[w, i], self.dtype)
            for s in range_constexpr((32 // self.lanes).bit_length() - 1):
                other = cute.arch.shuffle_sync_bfly(word, offset=self.lanes << s)
                word = convert.larger_magnitude(word, other, self.dtype)
            for e in range_constexpr(per_word):
                amax = convert.magnitude_bits(word, e, self.dtype)
                scale, inverse = convert.scale_of(amax, format.emax, self.dtype, *rounding)
                column.append(inverse)
                if down == 0:
                    sS[warp_m, col + w * per_word + e] = Uint8(scale)
        return column * self.rows

    @cute.jit
    def store(
        self, rX, inverses, result: cutlass.Constexpr, values, at, row, col, blocks_m, k,
        aligned: cutlass.Constexpr,
    ):  # fmt: skip
        """Values in the order of x."""
        batch, tile_m, tile_k = at
        m = blocks_m * BLOCK
        first, left = tile_m * TILE + row, tile_k * TILE + col
        top = Int64(batch) * m + first
        n: cutlass.Constexpr = self.vector
        vectors = k // n
        stride = (Int64(vectors) * n, n, 1)
        by_vector = cute.make_layout((Int64(batch + 1) * m, vectors, n), stride=stride)
        by_byte = cute.make_layout((Int64(batch + 1) * m, k), stride=(Int64(k), 1))
        for i in range_constexpr(self.rows):
            rV = cute.make_rmem_tensor(n, Uint8)
            quantize_values(rX[None, i], rV, inverses[i * n : (i + 1) * n], result.format)
            if const_expr(aligned):
                if (first < m) & (left < k):
                    mV = cute.make_tensor(values, by_vector)
                    cute.autovec_copy(rV, mV[top + i, left // n, None])
            else:
                mV = cute.make_tensor(values, by_byte)
                for j in range_constexpr(n):
                    if (first < m) & (left + j < k):
                        mV[top + i, left + j] = rV[j]

    @cute.jit
    def stage_transposed(self, rX, inverses, format: cutlass.Constexpr, row, col):
        """The tile's values in shared memory, a column of x after the other.

        16-byte chunks of a column are permuted by the column's vector, or the lanes across, which
        are `vector` columns of 128 bytes apart, would all write to the same banks.
        """
        rows: cutlass.Constexpr = self.rows
        n: cutlass.Constexpr = self.vector
        sV = cute.arch.alloc_smem(Uint8, TILE * TILE, alignment=128)
        parts: cutlass.Constexpr = 16 // rows
        chunks = cute.make_tensor(
            sV, cute.make_layout((TILE, TILE // 16, parts, rows), stride=(TILE, 16, rows, 1))
        )
        for j in range_constexpr(n):
            rC = cute.make_rmem_tensor(rows, convert.INPUT[self.dtype])
            for i in range_constexpr(rows):
                rC[i] = rX[j, i]
            rV = cute.make_rmem_tensor(rows, Uint8)
            quantize_values(rC, rV, [inverses[j]] * rows, format)
            chunk = (row // 16) ^ (col // n % (TILE // 16))
            cute.autovec_copy(rV, chunks[col + j, chunk, row % 16 // rows, None])
        return sV

    @cute.jit
    def store_transposed(self, sV, values, at, tid, blocks_m, k, aligned: cutlass.Constexpr):
        """From shared memory to values (batch, K, M), 16 bytes a thread and step."""
        batch, tile_m, tile_k = at
        m = blocks_m * BLOCK
        per_column: cutlass.Constexpr = TILE // 16
        chunks = cute.make_tensor(
            sV, cute.make_layout((TILE, per_column, 16), stride=(TILE, 16, 1))
        )
        mV = cute.make_tensor(
            values,
            cute.make_layout(
                (Int64(batch + 1) * k, m // 16, 16), stride=(Int64(m // 16) * 16, 16, 1)
            ),
        )
        threads: cutlass.Constexpr = 32 * WARPS[0] * WARPS[1]
        for step in range_constexpr(TILE * per_column // threads):
            index = step * threads + tid
            chunk, col = index % per_column, index // per_column
            left, top = tile_k * TILE + col, tile_m * TILE + chunk * 16
            if (left < k) & (top < m):
                rV = cute.make_rmem_tensor(16, Uint8)
                where = chunk ^ (col // self.vector % per_column)
                cute.autovec_copy(chunks[col, where, None], rV)
                cute.autovec_copy(rV, mV[Int64(batch) * k + left, top // 16, None])

    @cute.jit
    def store_scales(
        self, sS, scales, result: cutlass.Constexpr, at, thread, blocks_m, k, scale_layout,
        aligned: cutlass.Constexpr,
    ):  # fmt: skip
        """A tile's scales, 128 rows x 4, rows being those of the matrix that is quantized."""
        batch, tile_m, tile_k = at
        if const_expr(result.down):
            rows, cols, tile_r, tile_c = k, blocks_m, tile_k, tile_m
        else:
            rows, cols, tile_r, tile_c = blocks_m * BLOCK, k // BLOCK, tile_m, tile_k
        row, col = tile_r * TILE + thread, tile_c * 4
        if scale_layout == BLOCKED_CODE:
            tiles_r, tiles_c = (rows + TILE - 1) // TILE, (cols + 3) // 4
            tile = (Int64(batch) * tiles_r + tile_r) * tiles_c + tile_c
            offset = tile * (4 * TILE) + offset_in_blocked_tile(thread, Int32(0))
            self.store_four(sS, thread, scales, offset, 1, 4, aligned)
        else:
            if row < rows:
                if const_expr(result.down and not result.transpose):  # (batch, cols, rows)
                    offset = (Int64(batch) * cols + col) * rows + row
                    self.store_four(sS, thread, scales, offset, rows, cols - col, False)
                else:
                    offset = (Int64(batch) * rows + row) * cols + col
                    if cols % 4 == 0:
                        self.store_four(sS, thread, scales, offset, 1, 4, aligned)
                    else:
                        self.store_four(sS, thread, scales, offset, 1, cols - col, False)

    @cute.jit
    def store_four(self, sS, row, scales, offset, stride, count, as_word: cutlass.Constexpr):
        """Up to four scales of a row, as one word or byte by byte."""
        if const_expr(as_word):
            mS = cute.make_tensor(cute.recast_ptr(scales, dtype=Uint32), cute.make_layout(1 << 62))
            mS[offset // 4] = cute.recast_tensor(sS[None, row], Uint32)[0]
        else:
            mS = cute.make_tensor(scales, cute.make_layout(1 << 62))
            for c in range_constexpr(4):
                if c < count:
                    mS[offset + Int64(c) * stride] = sS[c, row]


def kernel_of(variant: Variant, **tuning):
    """The kernel that serves a variant."""
    return (Flat if variant.form == "last" else Tiled)(variant, **tuning)
