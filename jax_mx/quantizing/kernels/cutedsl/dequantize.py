"""MX dequantize on NVIDIA, in CuTeDSL. Matches reference.dequantize bit for bit.

The same two ways to cut the work as quantize.py: `Flat` for blocks along the last axis, `Tiled` for
all that knows rows; `Turned` for what is transposed, and `Shifted` for rows that lie anywhere.
Scales are read where they lie, a byte for many elements.
"""

import dataclasses

import cutlass
from cutlass import Int32, Int64, Uint8, Uint32, const_expr, cute, range_constexpr

from jax_mx.formats.directions import LAST, SECOND, Blocks
from jax_mx.formats.formats import BLOCK
from jax_mx.formats.layouts import ScaleLayout
from jax_mx.quantizing.facts.variants import Variant
from jax_mx.quantizing.kernels import geometry
from jax_mx.quantizing.kernels.cutedsl import convert
from jax_mx.quantizing.kernels.cutedsl.kernel import (
    PAD,
    Kernel,
    Strip,
    by_vector,
    fragment,
    load,
    load_anywhere,
    locate,
    offset_in_tiles,
    place_of,
    select,
    store_rows,
    vector_at,
)
from jax_mx.quantizing.kernels.geometry import Extents, Place


class Flat(Kernel):
    """values (..., rows, cols, 32) and scales (..., rows, cols) in the layout -> floats."""

    extents = (
        *map(geometry.length_of, (0, 1)),
        geometry.flat_rows(),
        geometry.flat_blocks(),
    )

    def __init__(self, *entry, tile: Strip | None = None):
        super().__init__(*entry)
        self.tile = tile or Strip(**self.tuned("Flat"))
        self.elements_per_thread = self.tile.elements * self.tile.unroll
        self.threads = self.tile.threads
        self.grid = geometry.flat_grid(1, self.tile.blocks)

    @cute.kernel
    def kernel(self, pointers, scalars):
        arrays = self.named(pointers)
        values, scales, y = arrays["codes_0"], arrays["scales_0"], arrays["y"]
        n, places, rows, cols = scalars
        elements: cutlass.Constexpr = self.tile.elements
        unroll: cutlass.Constexpr = self.tile.unroll
        sharers: cutlass.Constexpr = BLOCK // elements  # threads that share a block
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        by_step = cute.make_layout((n // elements, elements), stride=(elements, 1))
        stored: cutlass.Constexpr = elements // self.per_byte
        mV = cute.make_tensor(values, cute.make_layout((n // elements, stored), stride=(stored, 1)))
        mY = cute.make_tensor(y, by_step)
        mS = cute.make_tensor(scales, cute.make_layout(places))
        per_step: cutlass.Constexpr = self.tile.threads // sharers

        rV = cute.make_rmem_tensor((stored, unroll), Uint8)
        rS = cute.make_rmem_tensor(unroll, Uint8)
        steps, insides = [], []
        for u in range_constexpr(unroll):
            first = Int64(bid) * self.tile.blocks + u * per_step
            block, offset, inside = locate(self.layout, first, tid // sharers, places, rows, cols)
            steps.append(block * sharers + tid % sharers)
            insides.append(inside)
            if inside:
                load(mV[steps[u], None], rV[None, u], self.kept)
                rS[u] = mS[offset]
        for u in range_constexpr(unroll):
            if insides[u]:
                factor = convert.factor_of(Uint32(rS[u]))
                rC = rV[None, u]
                if const_expr(self.per_byte > 1):
                    rC = fragment(convert.expanded(words_of(rC)), "bytes")
                rY = dequantized(rC, [factor] * elements, self.conversion(self.formats[0]))
                cute.autovec_copy(rY, mY[steps[u], None])


def words_of(rP) -> list:
    """A fragment of bytes as words; the last one may be used in part."""
    if cute.size(rP) % 4 == 0:
        rW = cute.recast_tensor(rP, Uint32)
        return [rW[i] for i in range(cute.size(rW))]
    word = Uint32(0)
    for i in range(cute.size(rP)):
        word = word | Uint32(rP[i]) << Uint32(8 * i)
    return [word]


def dequantized(rV, factors: list, to: convert.Conversion):
    """A fragment of floats: codes, one a byte, times as many factors, rounded once."""
    rW = cute.recast_tensor(rV, Uint32)
    codes = [rW[w] for w in range(len(factors) // 4)]
    return fragment(convert.dequantized(codes, factors, to), to.dtype)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The part that a thread block covers, in warps; a warp of `Tiled` is 128 codes wide."""

    down: int
    across: int = 1
    depth: int = 8  # rows of a lane
    band: int = 1  # how many thread blocks follow each other down before the next ones across


class Matrix(Kernel):
    """Codes that lie as (batch, R, C): the base of kernels for such arrays.

    Subclasses give the tile, `rows` x `cols` codes, and `vector`, which must divide rows of codes.
    """

    def __init__(self, *entry, tile: Tiling | None = None):
        super().__init__(*entry)
        form = self.variant.form
        (self.direction,) = form.directions
        self.transposed = self.direction.transposed
        self.blocks = self.direction.stored_blocks  # LAST: along C; SECOND: along R
        self.tile = tile or Tiling(**self.tuned("Tiled"))
        self.threads = 32 * self.tile.down * self.tile.across
        self.cut()
        self.extents = geometry.extents_of(form)
        self.grid = geometry.grid_of(form, Extents(*self.turned((self.rows, self.cols))))
        # Rows of whole vectors; of transposed codes and floats, both have such rows.
        along_cols = self.blocks is Blocks.SECOND
        vector = self.vector if along_cols else 16 // self.itemsize
        self.divide = geometry.divide_of(form, vector)

    def cut(self) -> None:
        """Sets `rows`, `cols`, `vector` and `elements_per_thread`."""
        raise NotImplementedError

    @cute.jit
    def load_vectors(self, values, rV, batch, first, left, rows, cols):
        """Codes (vector, depth) of this lane, one a byte, by whole vectors, from `first`, `left`.

        Rows beyond the array keep what they have.
        """
        n: cutlass.Constexpr = self.vector
        depth: cutlass.Constexpr = cute.size(rV) // self.vector
        if const_expr(self.per_byte == 1):
            top = Int64(batch) * rows + first
            mV = by_vector(values, Int64(batch + 1) * rows, cols, n)
            for i in range_constexpr(depth):
                if first + i < rows:
                    load(mV[top + i, left // n, None], rV[None, i], self.kept)
        elif const_expr(
            self.blocks is Blocks.SECOND
        ):  # a byte holds two rows, which both are there
            top = Int64(batch) * (rows // 2) + first // 2
            mV = by_vector(values, Int64(batch + 1) * (rows // 2), cols, n)
            for i in range_constexpr(depth // 2):
                if first + 2 * i < rows:
                    rP = cute.make_rmem_tensor(n, Uint8)
                    load(mV[top + i, left // n, None], rP, self.kept)
                    self.put_two_rows(rV, i, rP)
        else:
            top = Int64(batch) * rows + first
            mV = by_vector(values, Int64(batch + 1) * rows, cols // 2, n // 2)
            for i in range_constexpr(depth):
                if first + i < rows:
                    rP = cute.make_rmem_tensor(n // 2, Uint8)
                    load(mV[top + i, left // n, None], rP, self.kept, ahead=self.transposed)
                    self.put_row(rV, i, rP)

    def put_two_rows(self, rV, i: int, rP) -> None:
        """Rows 2 * i and 2 * i + 1 of codes, one a byte, from bytes of both."""
        rW = cute.recast_tensor(rV, Uint32)
        for w, word in enumerate(words_of(rP)):
            rW[w, 2 * i], rW[w, 2 * i + 1] = convert.unpack_nibbles(word)

    def put_row(self, rV, i: int, rP) -> None:
        """Row i of codes, one a byte, from bytes of two."""
        rW = cute.recast_tensor(rV, Uint32)
        for w, word in zip(range(self.vector // 4), convert.expanded(words_of(rP)), strict=False):
            rW[w, i] = word

    def turned(self, pair) -> tuple:
        """A pair, of floats' rows and columns, in the order (R, C); and back."""
        first, second = pair
        return (second, first) if self.transposed else (first, second)

    def sizes(self, scalars):
        """R and C."""
        units = geometry.units_of(self.variant.form)
        return self.turned(n * unit for n, unit in zip(scalars, units, strict=True))

    def place(self, rows, cols):
        """(batch, row, column) of this thread block's tile."""
        bid, _, _ = cute.arch.block_idx()
        tiles_r, tiles_c = (rows + self.rows - 1) // self.rows, (cols + self.cols - 1) // self.cols
        return place_of(bid, tiles_r, tiles_c, self.tile.band)


class Turned(Matrix):
    """Aligned codes that lie as (batch, R, C) -> floats that lie as (batch, C, R).

    Codes are turned in shared memory, a byte each, and become floats on their way out.
    """

    vector = 16

    def cut(self) -> None:
        """A warp has 32 x 128 codes, a lane 8 rows of a vector."""
        self.rows, self.cols = BLOCK * self.tile.down, 128 * self.tile.across
        self.elements_per_thread = 8 * self.vector

    @cute.kernel
    def kernel(self, pointers, scalars):
        arrays = self.named(pointers)
        values, scales, y = arrays["codes_0"], arrays["scales_0"], arrays["y"]
        rows, cols = self.sizes(scalars)
        tid, _, _ = cute.arch.thread_idx()
        at = self.place(rows, cols)
        batch, tile_r, tile_c = at
        lane, warp = tid % 32, tid // 32
        row = warp % self.tile.down * BLOCK + lane // 8 * 8
        col = warp // self.tile.down * 128 + lane % 8 * self.vector
        first, left = tile_r * self.rows + row, tile_c * self.cols + col
        n: cutlass.Constexpr = self.vector

        rV = cute.make_rmem_tensor((n, 8), Uint8)
        rV.fill(Uint8(0))
        if left < cols:
            self.load_vectors(values, rV, batch, first, left, rows, cols)
        sV = cute.arch.alloc_smem(Uint8, self.rows * self.cols, alignment=128)
        blocks: cutlass.Constexpr = (
            self.cols if self.blocks is Blocks.LAST else self.rows
        ) // BLOCK
        others: cutlass.Constexpr = {
            Blocks.LAST: self.rows, Blocks.SECOND: self.cols, Blocks.SQUARE: self.cols // BLOCK
        }[self.blocks]  # fmt: skip

        sF = cute.make_tensor(
            cute.arch.alloc_smem(cutlass.Float32, blocks * others, alignment=16),
            cute.make_layout((others, blocks)),
        )
        self.stage_factors(sF, scales, at, tid, rows, cols)
        # A column's chunks of 16 bytes are permuted by its vector: else lanes across would all
        # write to the same banks.
        height: cutlass.Constexpr = self.rows
        columns = cute.make_tensor(
            sV, cute.make_layout((self.cols, height // 16, 2, 8), stride=(height, 16, 8, 1))
        )
        rW = cute.recast_tensor(rV, Uint32)
        chunk = (row // 16) ^ (col // n % min(8, height // 16))
        for w in range_constexpr(n // 4):
            upper = convert.turned_four([rW[w, i] for i in range(4)])
            lower = convert.turned_four([rW[w, i] for i in range(4, 8)])
            for c in range_constexpr(4):
                r8 = cute.make_rmem_tensor(2, Uint32)
                r8[0], r8[1] = upper[c], lower[c]
                cute.autovec_copy(
                    cute.recast_tensor(r8, Uint8),
                    columns[col + 4 * w + c, chunk, row % 16 // 8, None],
                )
        cute.arch.sync_threads()
        self.write(sV, sF, y, at, tid, rows, cols)

    @cute.jit
    def stage_factors(self, sF, scales, at, tid, rows, cols):
        """Puts the tile's scales into shared memory as factors, (along the other axis, block)."""
        batch, tile_r, tile_c = at
        mS = cute.make_tensor(scales, cute.make_layout(1 << 62))
        others: cutlass.Constexpr = sF.shape[0]
        blocks: cutlass.Constexpr = sF.shape[1]
        row_blocks: cutlass.Constexpr = self.blocks is Blocks.LAST
        # The scales' matrix: of tiles it has the blocks as columns, like that of blocks along rows.
        by_block: cutlass.Constexpr = row_blocks or self.layout.is_tiled
        first, first_block, high, wide = tile_c * others, tile_r * blocks, cols, rows // BLOCK
        if const_expr(row_blocks):
            first, first_block, high, wide = tile_r * others, tile_c * blocks, rows, cols // BLOCK
        elif const_expr(self.blocks is Blocks.SQUARE):
            high = cols // BLOCK
        steps: cutlass.Constexpr = (others * blocks + self.threads - 1) // self.threads
        rS = cute.make_rmem_tensor(steps, Uint8)
        rS.fill(Uint8(0))
        places = []
        for step in range_constexpr(steps):  # all loads before the first use
            index = step * self.threads + tid
            # Neighbours in memory by neighbouring threads.
            if const_expr(by_block):
                other, block = index // blocks, index % blocks
            else:
                other, block = index % others, index // others
            places.append((index, other, block))
            r, c = first + other, first_block + block
            if (index < others * blocks) & (r < high) & (c < wide):
                if const_expr(self.layout.is_tiled):
                    offset, _ = offset_in_tiles(
                        self.layout, Place(batch, r, c), Extents(high, wide)
                    )
                elif const_expr(by_block):
                    offset = (Int64(batch) * high + r) * wide + c
                else:
                    offset = (Int64(batch) * wide + c) * high + r
                rS[step] = mS[offset]
        for step in range_constexpr(steps):
            index, other, block = places[step]
            if index < others * blocks:
                sF[other, block] = convert.factor_of(Uint32(rS[step]))

    @cute.jit
    def write(self, sV, sF, y, at, tid, rows, cols):
        """Stores floats of what is in shared memory, 16 bytes a thread and step."""
        batch, tile_r, tile_c = at
        n: cutlass.Constexpr = 16 // self.itemsize
        pieces: cutlass.Constexpr = self.rows // n
        height: cutlass.Constexpr = self.rows
        codes = cute.make_tensor(
            sV, cute.make_layout((self.cols, height // 16, 16 // n, n), stride=(height, 16, n, 1))
        )
        apart: cutlass.Constexpr = self.threads // pieces  # columns of a step
        row, line = tid % pieces * n, tid // pieces
        left, top = tile_c * self.cols + line, tile_r * self.rows + row
        start = (Int64(batch) * cols + left) * rows + top
        for step in range_constexpr(self.cols // apart):
            column = line + step * apart
            # Also beyond the array: with only the store in a branch, steps overlap.
            chunk = (row // 16) ^ (column // self.vector % min(8, height // 16))
            rV = cute.make_rmem_tensor(n, Uint8)
            cute.autovec_copy(codes[column, chunk, row % 16 // n, None], rV)
            if const_expr(self.blocks is Blocks.LAST):
                rF = cute.make_rmem_tensor(n, cutlass.Float32)
                vectors = cute.make_tensor(
                    sF.iterator,
                    cute.make_layout(
                        (self.rows // 4, 4, self.cols // BLOCK), stride=(4, 1, self.rows)
                    ),
                )
                for v in range_constexpr(n // 4):
                    part = cute.make_rmem_tensor(4, cutlass.Float32)
                    cute.autovec_copy(vectors[row // 4 + v, None, column // BLOCK], part)
                    for e in range_constexpr(4):
                        rF[4 * v + e] = part[e]
                factors = [rF[i] for i in range(n)]
            elif const_expr(self.blocks is Blocks.SECOND):
                factors = [sF[column, row // BLOCK]] * n
            else:
                factors = [sF[column // BLOCK, row // BLOCK]] * n
            rY = dequantized(rV, factors, self.conversion(self.formats[0]))
            if (left + step * apart < cols) & (top < rows):
                offset = start + Int64(rows) * (step * apart)
                cute.autovec_copy(rY, vector_at(y + offset, convert.INPUT[self.dtype], 16, n))


class Shifted(Matrix):
    """Codes that lie anywhere as (batch, R, C), blocks along R -> floats that lie so, by vectors.

    Rows that are a vector's length apart have vectors of floats that begin at the same columns. A
    warp has such rows of a block, a lane the same vector of each row, whose codes begin anywhere.
    """

    def cut(self) -> None:
        """A block's rows; a warp has every `vector`-th of them."""
        self.vector = 16 // self.itemsize
        self.rows, self.wide = BLOCK, 32 * self.vector * self.tile.across
        # Tiles are `wide` apart. As a row begins within a vector, it may have one more of them, and
        # this is what the launch rule divides its length by.
        self.cols = self.wide - self.vector
        self.threads = self.wide
        self.elements_per_thread = BLOCK

    @cute.kernel
    def kernel(self, pointers, scalars):
        arrays = self.named(pointers)
        values, scales, y = arrays["codes_0"], arrays["scales_0"], arrays["y"]
        rows, cols = self.sizes(scalars)
        tid, _, _ = cute.arch.thread_idx()
        batch, block, tile_c = self.place(rows, cols)
        n: cutlass.Constexpr = self.vector
        lane, warp = tid % 32, tid // 32
        top = Int64(batch) * rows + block * BLOCK + warp % n
        # Where the row begins in its vector: of these numbers the last bits.
        ahead = Int32((Uint32(y.toint() // self.itemsize) + Uint32(top) * Uint32(cols)) % Uint32(n))
        left = tile_c * self.wide + (warp // n * 32 + lane) * n - ahead
        # A read may reach rows before and behind, as long as all of it belongs to the array.
        some = (left > -n) & (left < cols) & (cols >= 2 * n)
        before = (Int64(batch) + block > 0) | (left >= n)
        behind = ((block + 1) * BLOCK < rows) | (left + 2 * n <= cols)
        near = some & before & behind

        first, step = top // self.per_byte * cols + left, n // self.per_byte
        codes = [values.toint() + (first + Int64(cols) * (step * i)) for i in range(BLOCK // n)]
        if const_expr(self.layout.is_tiled):
            gathered = self.gather_scales(scales, batch, block, tile_c, tid, rows // BLOCK, cols)
            codes_and_scales = self.load(codes, left, near, cols)
            scale_words = self.shared_scales(gathered, tid, left - tile_c * self.wide + n)
        else:
            where = (Int64(batch) * (rows // BLOCK) + block) * cols + left
            codes_and_scales = self.load([*codes, scales.toint() + where], left, near, cols)
            scale_words = [codes_and_scales[w, BLOCK // n] for w in range(n // 4)]
        scale = [scale_words[j // 4] >> Uint32(j % 4 * 8) for j in range(n)]
        factors = [convert.factor_of(scale[j] & Uint32(255)) for j in range(n)]
        floats = []
        for i in range_constexpr(BLOCK // n):
            row = [codes_and_scales[w, i] for w in range(n // 4)]
            if const_expr(self.per_byte > 1):  # a byte holds two rows, of which one is this lane's
                both = [convert.unpack_nibbles(word) for word in row]
                row = [select(warp % 2 != 0, upper, lower) for lower, upper in both]
            codes_of_row = fragment(row, "bytes")
            floats.append(dequantized(codes_of_row, factors, self.conversion(self.formats[0])))
        rows_of_y = [y + (top * cols + left + Int64(cols) * (n * i)) for i in range(BLOCK // n)]
        if (left >= 0) & (left + n <= cols):
            for i in range_constexpr(BLOCK // n):
                to = vector_at(rows_of_y[i], convert.INPUT[self.dtype], 16, n)
                cute.autovec_copy(floats[i], to)
        else:
            for i in range_constexpr(BLOCK // n):
                mY = cute.make_tensor(rows_of_y[i], cute.make_layout(n))
                for j in range_constexpr(n):
                    if (left + j >= 0) & (left + j < cols):
                        mY[j] = floats[i][j]

    @cute.jit
    def load(self, addresses, left, near, cols):
        """(words, addresses): the bytes there, which are columns from `left` on, as they exist.

        If `near`, by the vectors around them; all in one branch, as loads in several would wait for
        each other.
        """
        n: cutlass.Constexpr = self.vector
        loaded = cute.make_rmem_tensor((n // 4, len(addresses)), Uint32)
        loaded.fill(Uint32(0))
        if near:
            for i in range_constexpr(len(addresses)):
                vector = load_anywhere(addresses[i], n)
                for w in range_constexpr(n // 4):
                    loaded[w, i] = vector[w]
        else:
            for i in range_constexpr(len(addresses)):
                address = cute.make_ptr(Uint8, addresses[i], cute.AddressSpace.gmem)
                row = cute.make_tensor(address, cute.make_layout(n))
                for j in range_constexpr(n):
                    if (left + j >= 0) & (left + j < cols):
                        byte = Uint32(row[j]) << Uint32(j % 4 * 8)
                        loaded[j // 4, i] = loaded[j // 4, i] | byte
        return loaded

    @cute.jit
    def gather_scales(self, scales, batch, block, tile_c, tid, blocks, cols):
        """A thread's share of a block's scales in tiles, from a vector before the tile on."""
        steps: cutlass.Constexpr = -(-(self.wide + self.vector) // self.threads)
        gathered = cute.make_rmem_tensor(steps, Uint32)
        gathered.fill(Uint32(0))
        mS = cute.make_tensor(scales, cute.make_layout(1 << 62))
        for step in range_constexpr(steps):
            index = step * self.threads + tid
            col = tile_c * self.wide - self.vector + index
            if (index < self.wide + self.vector) & (col >= 0) & (col < cols):
                offset, _ = offset_in_tiles(
                    self.layout, Place(batch, col, block), Extents(cols, blocks)
                )
                gathered[step] = Uint32(mS[offset])
        return gathered

    @cute.jit
    def shared_scales(self, gathered, tid, start):
        """The words of a vector of all threads' shares, from number `start` on."""
        n: cutlass.Constexpr = self.vector
        sS = cute.arch.alloc_smem(Uint8, self.wide + 2 * n, alignment=16)
        staged = cute.make_tensor(sS, cute.make_layout(self.wide + n))
        for step in range_constexpr(cute.size(gathered)):
            index = step * self.threads + tid
            if index < self.wide + n:
                staged[index] = Uint8(gathered[step])
        cute.arch.sync_threads()
        around = cute.make_rmem_tensor((n, 2), Uint8)
        for v in range_constexpr(2):
            cute.autovec_copy(aligned_bytes(sS, start // n * n + v * n, n), around[None, v])
        return convert.shifted(words_of(around), Uint32(start))


class Tiled(Matrix):
    """Codes that lie as (batch, R, C) -> floats that lie so.

    Unaligned entries have square blocks, or give floats that lie as (batch, C, R). Rows of square
    blocks are aligned where the array is, so these entries are rare, and not tuned.
    """

    def cut(self) -> None:
        """A lane has `depth` rows of a vector, a warp is 128 codes wide."""
        self.vector = 16 // self.itemsize  # codes of one load, floats of one store
        self.lanes = 128 // self.vector  # across a warp
        self.rows = self.tile.down * self.tile.depth * 32 // self.lanes  # of a tile
        self.cols = 128 * self.tile.across
        self.elements_per_thread = self.vector * self.tile.depth

    @cute.kernel
    def kernel(self, pointers, scalars):
        arrays = self.named(pointers)
        values, scales, y = arrays["codes_0"], arrays["scales_0"], arrays["y"]
        rows, cols = self.sizes(scalars)
        tid, _, _ = cute.arch.thread_idx()
        at = self.place(rows, cols)
        batch, tile_r, tile_c = at
        per_warp: cutlass.Constexpr = 32 // self.lanes  # patches below each other
        lane, warp = tid % 32, tid // 32
        # Lanes below each other are neighbours, so that shared memory's banks are all busy.
        patch_r = warp % self.tile.down * per_warp + lane % per_warp
        row = patch_r * self.tile.depth  # in the tile
        col = warp // self.tile.down * 128 + lane // per_warp * self.vector
        first, left = tile_r * self.rows + row, tile_c * self.cols + col
        depth: cutlass.Constexpr = self.tile.depth
        n: cutlass.Constexpr = self.vector

        rV = cute.make_rmem_tensor((n, depth), Uint8)
        rV.fill(Uint8(0))
        inside = (first < rows) & (left < cols)
        if inside:
            self.load(values, rV, batch, first, left, rows, cols)
        rS = cute.make_rmem_tensor(n if self.blocks is Blocks.SECOND else depth, Uint8)
        rS.fill(Uint8(0))
        if inside:
            self.load_scales(scales, rS, batch, first, left, rows, cols)
        mY = by_vector(y, Int64(batch + 1) * rows, cols, n)
        floats = []  # by row
        for i in range_constexpr(depth):
            if const_expr(self.blocks is Blocks.SECOND):
                if const_expr(i == 0):
                    factors = [convert.factor_of(Uint32(rS[j])) for j in range(n)]
            else:
                factors = [convert.factor_of(Uint32(rS[i]))] * n
            if const_expr(self.transposed):
                floats.append(
                    convert.scaled(words_of(rV[None, i]), factors, self.conversion(self.formats[0]))
                )
            else:
                rY = dequantized(rV[None, i], factors, self.conversion(self.formats[0]))
                if (first + i < rows) & (left < cols):
                    cute.autovec_copy(rY, mY[Int64(batch) * rows + first + i, left // n, None])
        if const_expr(self.transposed):
            self.store_transposed(y, floats, at, row, col, rows, cols)

    # ---- what is read ---
    @cute.jit
    def load(self, values, rV, batch, first, left, rows, cols):
        """This lane's codes, (vector, depth); rows beyond the array keep what they have."""
        n: cutlass.Constexpr = self.vector
        depth: cutlass.Constexpr = self.tile.depth
        column: cutlass.Constexpr = self.blocks is Blocks.SECOND
        top = Int64(batch) * rows + first
        if const_expr(self.aligned):
            self.load_vectors(values, rV, batch, first, left, rows, cols)
        elif const_expr(self.per_byte > 1 and not column):
            # Rows of whole blocks, so it is the array that lies anywhere, which is rare.
            mV = cute.make_tensor(values, cute.make_layout(1 << 62))
            for i in range_constexpr(depth):
                if first + i < rows:
                    rP = cute.make_rmem_tensor(n // 2, Uint8)
                    for j in range_constexpr(n // 2):
                        rP[j] = mV[(top + i) * (cols // 2) + left // 2 + j]
                    self.put_row(rV, i, rP)
        else:
            self.load_lines(values, rV, batch, first, left, rows, cols)

    @cute.jit
    def load_lines(self, values, rV, batch, first, left, rows, cols):
        """Loads what `load` does, from rows of bytes that lie anywhere."""
        n: cutlass.Constexpr = self.vector
        depth: cutlass.Constexpr = self.tile.depth // self.per_byte
        rP = rV
        if const_expr(self.per_byte > 1):  # rows of bytes, which hold two of codes
            rP = cute.make_rmem_tensor((n, depth), Uint8)
            rP.fill(Uint8(0))
            rows, first = rows // 2, first // 2
        top = Int64(batch) * rows + first
        # Two vectors around each row's, as long as all of them belong to the array.
        before, behind = (
            (top > 0) | (left >= n),
            (first + depth < rows) | (left + 2 * n <= cols),
        )
        if (first + depth <= rows) & (left + n <= cols) & (cols >= n) & before & behind:
            rW = cute.recast_tensor(rP, Uint32)
            for i in range_constexpr(depth):
                vector = load_anywhere(values.toint() + (top + i) * cols + left, n)
                for w in range_constexpr(n // 4):
                    rW[w, i] = vector[w]
        else:
            layout = cute.make_layout((Int64(batch + 1) * rows, cols), stride=(Int64(cols), 1))
            mV = cute.make_tensor(values, layout)
            for i in range_constexpr(depth):
                for j in range_constexpr(n):
                    if (first + i < rows) & (left + j < cols):
                        rP[j, i] = mV[top + i, left + j]
        if const_expr(self.per_byte > 1):
            for i in range_constexpr(depth):
                self.put_two_rows(rV, i, rP[None, i])

    @cute.jit
    def load_scales(self, scales, rS, batch, first, left, rows, cols):
        """Loads the bytes of this lane's columns, where blocks run down columns, or of its rows."""
        column: cutlass.Constexpr = self.blocks is Blocks.SECOND
        mS = cute.make_tensor(scales, cute.make_layout(1 << 62))
        if const_expr(self.layout.is_tiled):
            self.load_tiled_scales(mS, rS, batch, first, left, (rows, cols))
        elif const_expr(column):
            offset = (Int64(batch) * (rows // BLOCK) + first // BLOCK) * cols + left
            if const_expr(self.aligned):
                n: cutlass.Constexpr = self.vector
                vectors = Int64(batch + 1) * (rows // BLOCK) * (cols // n)
                mVectors = cute.make_tensor(scales, cute.make_layout((vectors, n), stride=(n, 1)))
                cute.autovec_copy(mVectors[offset // n, None], rS)
            else:
                for j in range_constexpr(self.vector):
                    if left + j < cols:
                        rS[j] = mS[offset + j]
        else:
            wide = cols // BLOCK
            square: cutlass.Constexpr = self.blocks is Blocks.SQUARE
            per_row = rows // BLOCK if const_expr(square) else rows
            for i in range_constexpr(self.tile.depth):
                row = (first + i) // BLOCK if const_expr(square) else first + i
                if first + i < rows:
                    rS[i] = mS[(Int64(batch) * per_row + row) * wide + left // BLOCK]

    @cute.jit
    def load_tiled_scales(self, mS, rS, batch, first, left, size):
        """Loads what `load_scales` does, from tiles: blocks are the columns of their matrix."""
        column: cutlass.Constexpr = self.blocks is Blocks.SECOND
        rows, cols = size
        for i in range_constexpr(cute.size(rS)):
            row, col, high, wide = first + i, left // BLOCK, rows, cols // BLOCK
            if const_expr(column):
                row, col, high, wide = left + i, first // BLOCK, cols, rows // BLOCK
            coordinates, extents = Place(batch, row, col), Extents(high, wide)
            offset, _ = offset_in_tiles(self.layout, coordinates, extents)
            if row < high:
                rS[i] = mS[offset]

    # ---- what is written ---
    @cute.jit
    def store_transposed(self, y, floats, at, row, col, rows, cols):
        """Stores floats by way of shared memory, one column of codes after the other."""
        line: cutlass.Constexpr = self.rows * self.itemsize  # bytes of a column
        batch, tile_r, tile_c = at
        sY = cute.arch.alloc_smem(Uint8, self.cols * (line + PAD) + PAD, alignment=128)
        for j in range_constexpr(self.vector):
            column = [floats[i][j] for i in range(self.tile.depth)]
            offset = PAD + (col + j) * (line + PAD) + row * self.itemsize
            put(sY, offset, convert.round_all(column, self.dtype), 8)
        cute.arch.sync_threads()
        top, left = tile_r * self.rows, tile_c * self.cols
        stride = Int64(rows) * self.itemsize
        start = y.toint() + (Int64(batch) * cols + left) * stride + top * self.itemsize
        count = cutlass.min(rows - top, self.rows) * self.itemsize
        shape: cutlass.Constexpr = (self.cols, line)
        store_rows(sY, start, stride, cols - left, count, shape, self.threads // 32)


def put(pointer, offset, words: list, align: int) -> None:
    """Stores words in shared memory at an offset that `align` divides, as many bytes a store."""
    words_per_store = align // 4
    for i in range(0, len(words), words_per_store):
        rB = cute.recast_tensor(fragment(words[i : i + words_per_store], "float32"), Uint8)
        cute.autovec_copy(rB, aligned_bytes(pointer, offset + 4 * i, align))


def aligned_bytes(pointer, offset, count: int):
    """`count` bytes of shared memory at an offset that they divide."""
    layout = cute.make_layout((1 << 20, count), stride=(count, 1))
    return cute.make_tensor(pointer, layout)[offset // count, None]


def kernel_of(variant: Variant, arch: str, layout: ScaleLayout, aligned: bool, **tuning):
    """The kernel of a variant's entry, for scales in this layout."""
    if variant.form == LAST:
        kernel = Flat
    elif aligned:
        kernel = Turned if variant.form.transposed else Tiled
    else:
        kernel = Shifted if variant.form == SECOND else Tiled
    return kernel(variant, arch, layout, aligned, **tuning)
