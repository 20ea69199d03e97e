"""MX dequantize on NVIDIA, in CuTeDSL. Matches reference.dequantize bit for bit.

The same two ways to cut the work as quantize.py: `Flat` for blocks along the last axis, `Tiled` for
all that knows rows, also transposed. Scales are read where they lie, a byte for many elements.
"""

import dataclasses

import cutlass
from cutlass import Int64, Uint8, Uint32, const_expr, cute, range_constexpr

from jax_mx.formats import BLOCK
from jax_mx.kernels.cutedsl import convert
from jax_mx.kernels.cutedsl.kernel import (
    ALL,
    PAD,
    Kernel,
    Strip,
    by_vector,
    load_anywhere,
    locate,
    offset_in_tiles,
    place_of,
    store_rows,
)
from jax_mx.layouts import ScaleLayout
from jax_mx.variants import Variant

# By bytes of a float: 16 bytes a thread and store, more would leave gaps between those of a warp.
# H200, (8, 7168, 7168) and (65536, 8192), 2026-11-21: bf16 302 us, 395 us; twice the steps 308,
# 404; one step 315, 411; twice the elements 355, 464. f32 515 us; twice the steps 532.
STRIPS = {2: Strip(threads=256, elements=8, unroll=2), 4: Strip(threads=256, elements=4, unroll=4)}


class Flat(Kernel):
    """values (..., rows, cols, 32) and scales (..., rows, cols) in the layout -> floats."""

    float_first = False
    extents = ([8, [0, *ALL]], [8, [1, *ALL]], [4, [0, -3, -2]], [4, [0, -2, -1]])

    def __init__(
        self, variant: Variant, layout: ScaleLayout, aligned: bool, tile: Strip | None = None
    ):
        super().__init__(variant, layout, aligned)
        self.tile = tile or STRIPS[self.itemsize]
        self.elements_per_thread = self.tile.elements * self.tile.unroll
        self.threads = self.tile.threads
        self.grid = [[1, *ALL, self.tile.blocks]]

    @cute.kernel
    def kernel(self, pointers, scalars):
        values, scales, y = pointers
        n, places, rows, cols = scalars
        elements: cutlass.Constexpr = self.tile.elements
        unroll: cutlass.Constexpr = self.tile.unroll
        sharers: cutlass.Constexpr = BLOCK // elements  # threads that share a block
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        by_step = cute.make_layout((n // elements, elements), stride=(elements, 1))
        mV, mY = cute.make_tensor(values, by_step), cute.make_tensor(y, by_step)
        mS = cute.make_tensor(scales, cute.make_layout(places))
        per_step: cutlass.Constexpr = self.tile.threads // sharers

        rV = cute.make_rmem_tensor((elements, unroll), Uint8)
        rS = cute.make_rmem_tensor(unroll, Uint8)
        steps, insides = [], []
        for u in range_constexpr(unroll):
            first = Int64(bid) * self.tile.blocks + u * per_step
            block, offset, inside = locate(self.layout, first, tid // sharers, places, rows, cols)
            steps.append(block * sharers + tid % sharers)
            insides.append(inside)
            if inside:
                cute.autovec_copy(mV[steps[u], None], rV[None, u])
                rS[u] = mS[offset]
        for u in range_constexpr(unroll):
            if insides[u]:
                factor = convert.factor_of(Uint32(rS[u]))
                rY = dequantized(rV[None, u], [factor] * elements, self.formats[0], self.dtype)
                cute.autovec_copy(rY, mY[steps[u], None])


def dequantized(rV, factors: list, format, dtype: str):
    """A fragment of floats: codes times factors, rounded once."""
    rW = cute.recast_tensor(rV, Uint32)
    floats = [value for i in range(cute.size(rW)) for value in convert.unpack_four(rW[i], format)]
    products = [value * factor for value, factor in zip(floats, factors, strict=True)]
    return fragment(convert.round_all(products, dtype), dtype)


def fragment(words: list, dtype: str):
    """Words as a fragment of their elements."""
    rW = cute.make_rmem_tensor(len(words), Uint32)
    for i, word in enumerate(words):
        rW[i] = word
    return cute.recast_tensor(rW, convert.INPUT[dtype])


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """How the quantized array of a form lies, as a matrix of R x C codes.

    Attributes:
      blocks: "row": along C; "column": along R; "square": both.
      swap: whether the view's first extent is that of columns.
      extents: whether each extent, (first, second), counts blocks.
      transpose: whether the floats lie as (C, R).
    """

    blocks: str
    swap: bool
    extents: tuple[bool, bool]
    transpose: bool


# By the views of forms.py, which are those of the floats.
ARRANGEMENTS = {
    "second": Arrangement("column", swap=False, extents=(True, False), transpose=False),
    "second_transposed": Arrangement("row", swap=True, extents=(True, False), transpose=True),
    "last_transposed": Arrangement("column", swap=True, extents=(False, True), transpose=True),
    "square": Arrangement("square", swap=False, extents=(True, True), transpose=False),
    "square_transposed": Arrangement("square", swap=True, extents=(True, True), transpose=True),
}


@dataclasses.dataclass(frozen=True)
class Tiling:
    """What a thread block of `Tiled` covers: `warps` below each other, each 128 codes wide."""

    warps: int
    depth: int  # rows of a lane
    band: int = 1  # how many thread blocks follow each other down before the next ones across


def tiling(how: Arrangement, itemsize: int) -> Tiling:
    """The tiling of an entry.

    H200, (8, 7168, 7168) and (65536, 8192), 2026-11-21, in us, (warps, depth):

    second             bf16 (4, 8) 308, 399; (8, 4) 334, 430; (8, 8) 332, 431. f32 (8, 4) 520
    last_transposed    bf16 (8, 8) 329, 436; (4, 8) 349, 480; (8, 4) 355, 486. f32 (8, 4) 614
    second_transposed  bf16 (4, 8) 350, 482; (8, 4) 352, 486; (8, 8) 394, 521. f32 (8, 4) 616
    """
    if itemsize == 4:
        return Tiling(8, 4)
    return Tiling(8 if how.transpose and how.blocks != "row" else 4, 8)


COLS = 128


class Tiled(Kernel):
    """Codes that lie as (batch, R, C) -> floats that lie so, or as (batch, C, R)."""

    float_first = False

    def __init__(
        self, variant: Variant, layout: ScaleLayout, aligned: bool, tile: Tiling | None = None
    ):
        super().__init__(variant, layout, aligned)
        self.how = ARRANGEMENTS[variant.form]
        self.tile = tile or tiling(self.how, self.itemsize)
        self.vector = 16 // self.itemsize  # codes of one load, floats of one store
        self.lanes = COLS // self.vector  # across a warp
        self.rows = self.tile.warps * self.tile.depth * 32 // self.lanes  # of a tile
        self.threads = 32 * self.tile.warps
        self.elements_per_thread = self.vector * self.tile.depth
        square = self.how.blocks == "square"
        lead, *extents = ((0, -4), (-4, -3), (-3, -2)) if square else ((0, -3), (-3, -2), (-2, -1))
        self.extents = [[4, [0, *axes]] for axes in extents]
        # The axes of R and of C, and by what they count: blocks or elements.
        (of_r, r_unit), (of_c, c_unit) = self.turned(
            (axes, BLOCK if blocks else 1)
            for axes, blocks in zip(extents, self.how.extents, strict=True)
        )
        self.grid = [
            [0, *of_r, self.rows // r_unit],
            [0, *of_c, COLS // c_unit],
            [0, *lead, 1],
        ]
        # Rows of whole vectors; those of transposed floats too. What counts blocks is whole.
        self.divide = [[0, *of_c, self.vector]] if c_unit == 1 else []
        if self.how.transpose and r_unit == 1:
            self.divide.append([0, *of_r, self.vector])

    def turned(self, pair):
        """A pair of the view's extents in the order (R, C)."""
        return [*pair][:: -1 if self.how.swap else 1]

    @cute.kernel
    def kernel(self, pointers, scalars):
        values, scales, y = pointers
        sizes = [
            size * (BLOCK if blocks else 1)
            for size, blocks in zip(scalars, self.how.extents, strict=True)
        ]
        rows, cols = self.turned(sizes)
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        tiles_r, tiles_c = (rows + self.rows - 1) // self.rows, (cols + COLS - 1) // COLS
        at = place_of(bid, tiles_r, tiles_c, self.tile.band)
        batch, tile_r, tile_c = at
        per_warp: cutlass.Constexpr = 32 // self.lanes  # patches below each other
        lane, warp = tid % 32, tid // 32
        # Lanes below each other are neighbours, so that shared memory's banks are all busy.
        patch_r, patch_c = warp * per_warp + lane % per_warp, lane // per_warp
        row, col = patch_r * self.tile.depth, patch_c * self.vector  # in the tile
        first, left = tile_r * self.rows + row, tile_c * COLS + col
        depth: cutlass.Constexpr = self.tile.depth
        n: cutlass.Constexpr = self.vector

        rV = cute.make_rmem_tensor((n, depth), Uint8)
        rV.fill(Uint8(0))
        inside = (first < rows) & (left < cols)
        if inside:
            self.load(values, rV, batch, first, left, rows, cols)
        rS = cute.make_rmem_tensor(n if self.how.blocks == "column" else depth, Uint8)
        rS.fill(Uint8(0))
        if inside:
            self.load_scales(scales, rS, batch, first, left, rows, cols)
        floats = []  # by row
        for i in range_constexpr(depth):
            if const_expr(self.how.blocks == "column"):
                if const_expr(i == 0):
                    factors = [convert.factor_of(Uint32(rS[j])) for j in range(n)]
            else:
                factors = [convert.factor_of(Uint32(rS[i]))] * n
            rW = cute.recast_tensor(rV[None, i], Uint32)
            codes = [v for w in range(n // 4) for v in convert.unpack_four(rW[w], self.formats[0])]
            floats.append([v * f for v, f in zip(codes, factors, strict=True)])
        if const_expr(self.how.transpose):
            self.store_transposed(y, floats, at, row, col, rows, cols)
        elif const_expr(self.aligned):
            mY = by_vector(y, Int64(batch + 1) * rows, cols, n)
            for i in range_constexpr(depth):
                if (first + i < rows) & (left < cols):
                    rY = fragment(convert.round_all(floats[i], self.dtype), self.dtype)
                    cute.autovec_copy(rY, mY[Int64(batch) * rows + first + i, left // n, None])
        else:
            self.store_lines(
                y, floats, row, col, batch, tile_r * self.rows, tile_c * COLS, rows, cols
            )

    # ---- what is read ---
    @cute.jit
    def load(self, values, rV, batch, first, left, rows, cols):
        """This lane's codes, (vector, depth); rows beyond the array keep what they have."""
        n: cutlass.Constexpr = self.vector
        depth: cutlass.Constexpr = self.tile.depth
        top = Int64(batch) * rows + first
        if const_expr(self.aligned):
            mV = by_vector(values, Int64(batch + 1) * rows, cols, n)
            for i in range_constexpr(depth):
                if first + i < rows:
                    cute.autovec_copy(mV[top + i, left // n, None], rV[None, i])
        else:
            # Two vectors around each row's, as long as all of them belong to the array.
            before, behind = (
                (top > 0) | (left >= n),
                (first + depth < rows) | (left + 2 * n <= cols),
            )
            if (first + depth <= rows) & (left + n <= cols) & (cols >= n) & before & behind:
                rW = cute.recast_tensor(rV, Uint32)
                for i in range_constexpr(depth):
                    words = load_anywhere(values.toint() + (top + i) * cols + left, n)
                    for w in range_constexpr(n // 4):
                        rW[w, i] = words[w]
            else:
                layout = cute.make_layout((Int64(batch + 1) * rows, cols), stride=(Int64(cols), 1))
                mV = cute.make_tensor(values, layout)
                for i in range_constexpr(depth):
                    for j in range_constexpr(n):
                        if (first + i < rows) & (left + j < cols):
                            rV[j, i] = mV[top + i, left + j]

    @cute.jit
    def load_scales(self, scales, rS, batch, first, left, rows, cols):
        """The bytes of this lane's columns (blocks down columns) or rows."""
        column: cutlass.Constexpr = self.how.blocks == "column"
        mS = cute.make_tensor(scales, cute.make_layout(1 << 62))
        if const_expr(self.layout.is_tiled):
            # The scales' matrix has the blocks as columns.
            for i in range_constexpr(cute.size(rS)):
                row, col, high, wide = first + i, left // BLOCK, rows, cols // BLOCK
                if const_expr(column):
                    row, col, high, wide = left + i, first // BLOCK, cols, rows // BLOCK
                offset, _ = offset_in_tiles(self.layout, batch, row, col, high, wide)
                if row < high:
                    rS[i] = mS[offset]
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
            per_row = rows // BLOCK if const_expr(self.how.blocks == "square") else rows
            for i in range_constexpr(self.tile.depth):
                row = (first + i) // BLOCK if const_expr(self.how.blocks == "square") else first + i
                if first + i < rows:
                    rS[i] = mS[(Int64(batch) * per_row + row) * wide + left // BLOCK]

    # ---- what is written ---
    @cute.jit
    def store_transposed(self, y, floats, at, row, col, rows, cols):
        """Through shared memory, a column of codes after the other.

        16-byte chunks of a column are permuted by the column's vector, or lanes across would all
        write to the same banks.
        """
        n: cutlass.Constexpr = self.vector
        depth: cutlass.Constexpr = self.tile.depth
        line: cutlass.Constexpr = self.rows * self.itemsize  # bytes of a column
        chunks: cutlass.Constexpr = line // 16
        size: cutlass.Constexpr = depth * self.itemsize  # bytes of a patch's column
        batch, tile_r, tile_c = at
        tid, _, _ = cute.arch.thread_idx()
        pitch: cutlass.Constexpr = line if self.aligned else line + PAD
        ahead: cutlass.Constexpr = 0 if self.aligned else PAD
        sY = cute.arch.alloc_smem(Uint8, COLS * pitch + ahead, alignment=128)
        for j in range_constexpr(n):
            words = convert.round_all([floats[i][j] for i in range(depth)], self.dtype)
            if const_expr(self.aligned):
                chunk = (row * self.itemsize // 16) ^ (col // n % 8 & (chunks - 1))
                put(sY, (col + j) * pitch + chunk * 16 + row * self.itemsize % 16, words, size)
            else:
                put(sY, (col + j) * pitch + row * self.itemsize + ahead, words, 8)
        cute.arch.sync_threads()
        if const_expr(self.aligned):
            mY = cute.make_tensor(
                cute.recast_ptr(y, dtype=Uint8),
                cute.make_layout(
                    (Int64(batch + 1) * cols, rows // n, 16),
                    stride=(Int64(rows // n) * 16, 16, 1),
                ),
            )
            for step in range_constexpr(COLS * chunks // self.threads):
                index = step * self.threads + tid
                chunk, column = index % chunks, index // chunks
                left, top = tile_c * COLS + column, tile_r * self.rows + chunk * n
                if (left < cols) & (top < rows):
                    where = chunk ^ (column // n % 8 & (chunks - 1))
                    r16 = cute.make_rmem_tensor(16, Uint8)
                    cute.autovec_copy(aligned_bytes(sY, column * pitch + where * 16, 16), r16)
                    cute.autovec_copy(r16, mY[Int64(batch) * cols + left, top // n, None])
        else:
            top, left = tile_r * self.rows, tile_c * COLS
            stride = Int64(rows) * self.itemsize
            start = y.toint() + (Int64(batch) * cols + left) * stride + top * self.itemsize
            count = cutlass.min(rows - top, self.rows) * self.itemsize
            store_rows(sY, start, stride, cols - left, count, COLS, line, self.threads // 32)

    @cute.jit
    def store_lines(self, y, floats, row, col, batch, top, left, rows, cols):
        """In the codes' order, to where it lies anywhere, or its rows do."""
        line: cutlass.Constexpr = COLS * self.itemsize
        pitch: cutlass.Constexpr = line + PAD
        sY = cute.arch.alloc_smem(Uint8, self.rows * pitch + PAD, alignment=128)
        for i in range_constexpr(self.tile.depth):
            words = convert.round_all(floats[i], self.dtype)
            put(sY, PAD + (row + i) * pitch + col * self.itemsize, words, 8)
        cute.arch.sync_threads()
        stride = Int64(cols) * self.itemsize
        start = y.toint() + (Int64(batch) * rows + top) * stride + left * self.itemsize
        count = cutlass.min(cols - left, COLS) * self.itemsize
        store_rows(sY, start, stride, rows - top, count, self.rows, line, self.threads // 32)


def put(pointer, offset, words: list, align: int) -> None:
    """Words to shared memory at an offset that `align` divides, as many bytes a store."""
    each = align // 4
    for i in range(0, len(words), each):
        rB = cute.recast_tensor(fragment(words[i : i + each], "float32"), Uint8)
        cute.autovec_copy(rB, aligned_bytes(pointer, offset + 4 * i, align))


def aligned_bytes(pointer, offset, count: int):
    """`count` bytes of shared memory at an offset that they divide."""
    layout = cute.make_layout((1 << 20, count), stride=(count, 1))
    return cute.make_tensor(pointer, layout)[offset // count, None]


def kernel_of(variant: Variant, layout: ScaleLayout, aligned: bool, **tuning):
    """The kernel of a variant's entry, for scales in this layout."""
    return (Flat if variant.form == "last" else Tiled)(variant, layout, aligned, **tuning)
