"""Forms with the second-to-last axis: `Tiled`.

A thread block is a few warps below and next to each other (`Tiling`). A warp holds 32 x 64 elements
of each part of a row. A lane holds a patch of both rows and columns, so that blocks along either
axis are a few shuffles away. Scales are staged in shared memory and written as they lie in memory,
with the padding of tiles.
"""

import dataclasses
from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr, cute, range_constexpr

from jax_mx.formats.directions import BOTH_TRANSPOSED, Blocks
from jax_mx.formats.formats import BLOCK
from jax_mx.formats.windows import ROW, SQUARE, blocks_of
from jax_mx.quantizing.facts.variants import takes_zero_scale
from jax_mx.quantizing.kernels import geometry
from jax_mx.quantizing.kernels.cutedsl import activations, convert
from jax_mx.quantizing.kernels.cutedsl.kernel import (
    PAD,
    Kernel,
    by_vector,
    bytes_of,
    fragment,
    load,
    load_anywhere,
    load_row,
    mapped,
    numbers_of,
    offset_in_tiles,
    place_of,
    select,
    store,
    store_rows,
    two_of_block,
    vector_at,
    words_of,
)
from jax_mx.quantizing.kernels.geometry import Extents, Output, Place, Tile

STATIC = 40 << 10  # bytes of values, beside which there is room for scales
CHUNKS = 8  # of 16 bytes, that a row of shared memory's banks holds


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The part of a thread block of `Tiled`, in warps of 32 x 64, and the order of thread blocks.

    Attributes:
      down: the number of its warps below each other.
      across: the number of its warps next to each other.
      band: the number of thread blocks, or clusters, that follow each other down before the next
        ones across.
      below: the number of thread blocks below each other in a cluster, which find amaxes of windows
        down columns together.
    """

    down: int = 4
    across: int = 2
    band: int = 1
    below: int = 1

    @property
    def rows(self) -> int:
        """How many rows of x it covers."""
        return BLOCK * self.down

    @property
    def cols(self) -> int:
        """How many columns of x it covers; of each part where a row has several."""
        return 2 * BLOCK * self.across

    @property
    def threads(self) -> int:
        """How many threads a thread block has."""
        return 32 * self.down * self.across


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
        """The number that permutes a line's chunk numbers, by an exclusive or."""
        return line // self.group * self.pieces % min(CHUNKS, self.size // 16)


class Lane(NamedTuple):
    """A lane's place in its warp, and where its patch begins in the thread block's tile."""

    across: Int32
    down: Int32
    row: Int32
    col: Int32


class Beyond(NamedTuple):
    """The data for a block's amax besides its elements, where the window is larger.

    Attributes:
      amaxes: the pointer to one amax for each block, or with "row" one for each row or column; or
        None.
      count: the number of amaxes that a row or column has.
      at: the thread block's tile.
      shared: words of shared memory for other windows, one for each block of the tile; or None.
    """

    amaxes: object
    count: object
    at: Tile
    shared: object


class Tiled(Kernel):
    """Forms with the second-to-last axis; x lies as (batch, M, K), M = 32 * `blocks_m`.

    A lane has a patch of each part of a row; the parts of a tile lie beside each other.

    A lane holds the largest magnitudes of its patch per row and per column. `exchange` leaves each
    lane with the amaxes of two whole blocks of either direction, so that a scale is computed once.
    `gather` brings the lanes of a block its factor.
    """

    def __init__(self, *entry, tile: Tiling | None = None):
        super().__init__(*entry)
        self.tile = tile or Tiling(**self.tuned(type(self).__name__))
        form = self.variant.form
        self.results = geometry.outputs_of(form, self.formats, self.variant.modes)
        self.outputs = len(self.results)
        self.vector = 16 // self.itemsize  # elements of one load
        self.lanes = 64 // self.vector  # across a warp
        self.rows = self.lanes  # of a lane: 32 / (32 / lanes)
        self.row_sharers, self.column_sharers = BLOCK // self.vector, BLOCK // self.rows

        self.threads = self.tile.threads
        self.width = self.tile.cols * self.parts  # of a tile, all parts
        self.elements_per_thread = 2 * BLOCK * self.parts
        self.counts_blocks = all(form.spans)  # blocks, not columns, are what x's view counts
        self.extents = [*geometry.extents_of(form, self.of), *self.extents_of_amaxes()]
        # A kernel declares at most 48 KiB of shared memory; the launch gives it more.
        staged = sum(self.bytes_of(result) for result in self.results if self.is_staged(result))
        self.dynamic_shared = staged if staged > STATIC else 0
        # Tiles of scales are padded below x and next to it; thread blocks there write the padding.
        tile = Extents(self.tile.rows, self.tile.cols)
        self.cluster = self.tile.below
        assert self.cluster == 1 or self.parts == 1  # see `show_to_cluster`
        whole = Extents(tile.rows * self.cluster, tile.cols)
        self.region = geometry.region_of(form, self.layout, whole)
        self.grid = geometry.grid_of(form, tile, self.region, self.of)
        # The aligned entry loads whole vectors, which must not straddle rows.
        self.divide = geometry.divide_of(form, self.vector, self.of)

    def extents_of_amaxes(self) -> list:
        """A scalar for each result of "row": how many amaxes a row, or column, has."""
        axes = geometry.axes_of(self.variant.form)
        pairs = ((array, self.results[array.of]) for array in self.signature.operands)
        return [
            [4, [self.signature.number(a.name), *(axes[2 if r.blocks is Blocks.LAST else 1])]]
            for a, r in pairs
            if a.derived
        ]

    @cute.kernel
    def kernel(self, pointers, scalars):
        self.quantize_tile(pointers, scalars)

    @cute.jit
    def quantize_tile(self, pointers, scalars):
        """The work of a thread block."""
        blocks_m, k = self.lengths(scalars)
        tid, _, _ = cute.arch.thread_idx()
        at = self.place(blocks_m, k)
        lane = self.lane(tid)
        arrays = self.named(pointers)
        patches = self.made(arrays, scalars, at, lane)
        staged = [self.shared_memory(result) for result in self.results]
        beyond = [self.beyond(arrays, scalars, o, at) for o in range(self.outputs)]
        if const_expr(self.cluster > 1):
            self.show_to_cluster(patches[0], beyond[-1], lane)
        for o in range_constexpr(self.outputs):
            for part in range_constexpr(self.parts):
                lane_of_part: cutlass.Constexpr = self.in_part(lane, part)
                self.quantize_patch(
                    patches[part], staged[o], o, arrays, scalars, beyond[o], lane_of_part
                )
        if const_expr(self.cluster > 1):
            cute.arch.cluster_arrive()
        cute.arch.sync_threads()
        first = 0
        for o in range_constexpr(self.outputs):
            result: cutlass.Constexpr = self.results[o]
            if const_expr(not result.dequantized):
                values, scales, (sS, sV) = arrays[f"codes_{o}"], arrays[f"scales_{o}"], staged[o]
                if const_expr(self.is_staged(result)):
                    tiles = self.of_result(scalars, o).get("value_tiles")
                    self.store_lines(sV, values, tiles, result, at, tid)
                elif const_expr(sV is not None):
                    self.store_unaligned(sV, values, result, at)
                # The two results' scales are written by other threads, as far as they go.
                thread = (tid + self.tile.threads - first) % self.tile.threads
                self.store_scales(sS, scales, result, at, thread)
                first += cute.size(sS) // 4
        if const_expr(self.cluster > 1):
            cute.arch.cluster_wait()  # others may have been reading this one's amaxes

    def quantize_patch(self, rX, staged, o: int, arrays, scalars, beyond, lane) -> None:
        """Stages a patch's scales and values, or stores the latter, of the o-th result."""
        result, (sS, sV) = self.results[o], staged
        scale = {
            Blocks.LAST: self.scale_rows,
            Blocks.SECOND: self.scale_columns,
            Blocks.SQUARE: self.scale_square,
        }[result.blocks]
        rounding = self.rule(self.of_result(scalars, o))
        inverses = scale(rX, sS, result, rounding, lane, beyond)
        if result.dequantized:
            self.store_dequantized(
                rX, inverses, result, arrays[f"dequantized_{o}"], beyond.at, lane
            )
        elif result.transposed:
            self.stage_transposed(sV, rX, inverses, result, lane)
        elif self.is_staged(result):
            self.stage_rows(sV, rX, inverses, result, lane)
        elif sV is None:
            self.store(rX, inverses, result, arrays[f"codes_{o}"], beyond.at, lane)
        else:
            self.stage(sV, rX, inverses, result, lane)

    def staged_shape(self, result: Output) -> Extents:
        """The size of the matrix of a tile's scales, as it will lie."""
        tile = Extents(self.tile.rows, self.width)
        return geometry.scales_shape(result.direction, tile, self.is_turned(result))

    def shared_memory(self, result: Output):
        """For scales, as they will lie (column first), and for values, or None."""
        if result.dequantized:
            return None, None
        rows, cols = self.staged_shape(result)
        sS = cute.make_tensor(
            cute.arch.alloc_smem(Uint8, rows * cols, alignment=16), cute.make_layout((cols, rows))
        )
        if self.is_staged(result):
            if self.dynamic_shared:
                return sS, cute.arch.get_dyn_smem(Uint8, alignment=128) + self.before(result)
            return sS, cute.arch.alloc_smem(Uint8, self.bytes_of(result), alignment=128)
        if self.aligned or self.counts_blocks:  # rows are as aligned as the array is
            return sS, None
        size = self.tile.rows // result.packed[0] * (self.tile.cols + PAD) + PAD
        return sS, cute.arch.alloc_smem(Uint8, size, alignment=16)

    def before(self, result: Output) -> int:
        """How many bytes of dynamic shared memory the values of earlier results take."""
        earlier = self.results[: self.results.index(result)]
        return sum(self.bytes_of(other) for other in earlier if self.is_staged(other))

    def bytes_of(self, result: Output) -> int:
        """How many bytes a tile's values have."""
        return self.tile.rows * self.width // result.format.codes_per_byte

    def is_staged(self, result: Output) -> bool:
        """Whether values pass through shared memory, to be written by lines."""
        return result.transposed or result.packed[1] > 1

    def lengths(self, scalars) -> tuple:
        """How many blocks of rows x has, and how many columns."""
        blocks_m, k = scalars[:2]
        return blocks_m, k * BLOCK if self.counts_blocks else k

    def place(self, blocks_m, k) -> Tile:
        """This thread block's tile of x, whose rows count blocks."""
        bid, _, _ = cute.arch.block_idx()
        down, across = self.region.rows // BLOCK, self.region.cols
        tiles_m = (blocks_m + down - 1) // down * (down // self.tile.down)
        tiles_k = (k + across - 1) // across * (across // self.tile.cols)
        below: cutlass.Constexpr = self.cluster
        batch, row, col = place_of(bid // below, tiles_m // below, tiles_k, self.tile.band)
        return Tile(batch, row * below + bid % below, col, blocks_m, k)

    def lane(self, tid) -> Lane:
        """The lane that a thread is."""
        lane, warp = tid % 32, tid // 32
        across, down = lane % self.lanes, lane // self.lanes
        row = warp % self.tile.down * BLOCK + down * self.rows
        col = warp // self.tile.down * (2 * BLOCK) + across * self.vector
        return Lane(across, down, row, col)

    def in_part(self, lane: Lane, part: int) -> Lane:
        """The same lane, with its patch of another part than the first."""
        return lane._replace(col=lane.col + part * self.tile.cols) if part else lane

    def among(self, tile, place, size: int, length) -> tuple:
        """Where a column of the thread block's tile lies: in its part of a row, and in the row.

        Args:
          tile: the number of the tile.
          place: of the column in the tile.
          size: how many columns the tile has; or blocks of columns, or bytes.
          length: how many of them a part has.
        """
        if self.parts == 1:
            return tile * size + place, tile * size + place
        of_part = size // self.parts
        within = tile * of_part + place % of_part
        return within, place // of_part * length + within

    def corner(self, at: Tile, lane: Lane) -> tuple:
        """Where a lane's patch begins: its row; its column in its part, and in the row."""
        first = at.row * self.tile.rows + lane.row
        return first, *self.among(at.col, lane.col, self.width, at.cols)

    # ---- x ---
    def made(self, arrays, scalars, at, lane):
        """This lane's patches; stored, too, where floats are given, added up where sums are."""
        patches = self.patches(arrays, scalars, at, lane)
        if "floats" in arrays:
            self.store_floats(patches[0], arrays["floats"], at, lane)
        if "sums" in arrays:
            for part, rX in enumerate(patches):
                self.store_sums(rX, arrays["sums"], at, self.in_part(lane, part))
        return patches

    def patches(self, arrays, scalars, *where) -> list:
        """This lane's patch of each part of a row, (vector, rows); 0 beyond the array."""
        loader = self.source.loaders.get("cutedsl")
        if loader is not None:
            return LOADERS[loader](self, arrays, scalars, *where)
        return [(self.load if self.aligned else self.load_unaligned)(arrays["x"], *where)]

    @cute.jit
    def load(self, x, at: cutlass.Constexpr, lane: cutlass.Constexpr):
        """This lane's patch, (vector, rows); 0 beyond the array."""
        batch, tile_m, tile_k, blocks_m, k = at
        rX = cute.make_rmem_tensor((self.vector, self.rows), convert.INPUT[self.dtype])
        m = blocks_m * BLOCK
        first, left = tile_m * self.tile.rows + lane.row, tile_k * self.tile.cols + lane.col
        mX = by_vector(x, Int64(batch + 1) * m, k, self.vector)
        top = Int64(batch) * m + first
        if (first < m) & (left < k):
            for i in range_constexpr(self.rows):
                load(mX[top + i, left // self.vector, None], rX[None, i], self.kept)
        else:
            rX.fill(convert.INPUT[self.dtype](0))
        return rX

    @cute.jit
    def store_floats(self, rX, floats, at: cutlass.Constexpr, lane: cutlass.Constexpr):
        """Stores a patch of what was made, as far as it exists."""
        _, tile_m, tile_k, blocks_m, k = at
        first, left = tile_m * self.tile.rows + lane.row, tile_k * self.tile.cols + lane.col
        if (first < blocks_m * BLOCK) & (left < k):
            for i in range_constexpr(self.rows):
                self.store_row(rX[None, i], floats + (Int64(first + i) * k + left), left, k)

    @cute.jit
    def store_row(self, row, to, left, k):
        """Stores a row of a patch from column `left` on, as far as it exists."""
        n: cutlass.Constexpr = self.vector
        if const_expr(self.aligned):
            cute.autovec_copy(row, vector_at(to, convert.INPUT[self.dtype], 16, n))
        else:
            mF = cute.make_tensor(to, cute.make_layout(n))
            for j in range_constexpr(n):
                if left + j < k:
                    mF[j] = row[j]

    @cute.jit
    def store_sums(self, rX, sums, at: cutlass.Constexpr, lane: cutlass.Constexpr):
        """Stores the sums of 32 rows, column by column; a vector's columns all exist, or none."""
        _, tile_m, tile_k, blocks_m, k = at
        column_sums, first = self.sums_of_columns(rX, lane)
        n: cutlass.Constexpr = len(column_sums)
        rS = cute.make_rmem_tensor(n, Uint32)
        for i in range_constexpr(n):
            rS[i] = column_sums[i]
        block = tile_m * self.tile.down + lane.row // BLOCK
        left, col = self.among(tile_k, lane.col + first, self.width, k)
        if (block < blocks_m) & (left < k):
            to = sums + (Int64(block) * (k * self.parts) + col)
            align: cutlass.Constexpr = 4 * n if self.aligned else 4
            cute.autovec_copy(rS, vector_at(to, Uint32, align, n))

    def sums_of_columns(self, rX, lane: Lane) -> tuple:
        """The bits of the sums of 32 rows of some columns of this lane's, and which is the first.

        As `reference.sums_of` has them: a lane adds up its own rows, then lanes below each other
        share out the columns, neighbours first.
        """
        rW, column_sums, first = cute.recast_tensor(rX, Uint32), [], 0
        for w in range(self.vector // 2):
            column_sums += activations.sums([rW[w, i] for i in range(self.rows)])
        for bit in range(self.column_sharers.bit_length() - 1):
            half, upper = len(column_sums) // 2, lane.down >> bit & 1
            kept = []
            for low, high in zip(column_sums[:half], column_sums[half:], strict=True):
                mine, theirs = select(upper != 0, high, low), select(upper != 0, low, high)
                other = cute.arch.shuffle_sync_bfly(theirs, offset=self.lanes << bit)
                kept.append(activations.plus(mine, other))
            column_sums, first = kept, first + upper * half
        return column_sums, first

    @cute.jit
    def load_unaligned(self, x, at: cutlass.Constexpr, lane: cutlass.Constexpr):
        """Loads what `load` does, from an x that lies anywhere, or whose rows do."""
        batch, tile_m, tile_k, blocks_m, k = at
        rX = cute.make_rmem_tensor((self.vector, self.rows), convert.INPUT[self.dtype])
        rX.fill(convert.INPUT[self.dtype](0))
        m = blocks_m * BLOCK
        first, left = tile_m * self.tile.rows + lane.row, tile_k * self.tile.cols + lane.col
        top = Int64(batch) * m + first
        # Two vectors around each row's, as long as all of them belong to x.
        n: cutlass.Constexpr = self.vector
        before, behind = (top > 0) | (left >= n), (first + self.rows < m) | (left + 2 * n <= k)
        if (first < m) & (left + n <= k) & (k >= n) & before & behind:
            rW = cute.recast_tensor(rX, Uint32)
            for i in range_constexpr(self.rows):
                address = x.toint() + ((top + i) * k + left) * self.itemsize
                vector = load_anywhere(address, 16)
                for w in range_constexpr(4):
                    rW[w, i] = vector[w]
        elif first < m:
            mX = cute.make_tensor(
                x, cute.make_layout((Int64(batch + 1) * m, k), stride=(Int64(k), 1))
            )
            for j in range_constexpr(self.vector):
                if left + j < k:
                    for i in range_constexpr(self.rows):
                        rX[j, i] = mX[top + i, left + j]
        return rX

    @cute.jit
    def picked(self, x, rows, count, at: cutlass.Constexpr, lane: cutlass.Constexpr):
        """Loads what `load` does of the rows of x, of `count`, that `rows` numbers."""
        _, tile_m, tile_k, blocks_m, k = at
        rX = cute.make_rmem_tensor((self.vector, self.rows), convert.INPUT[self.dtype])
        first, left = tile_m * self.tile.rows + lane.row, tile_k * self.tile.cols + lane.col
        inside = (first < blocks_m * BLOCK) & (left < k)
        if const_expr(self.aligned):
            numbers = numbers_of(rows, first, inside, self.rows, 16)
            mX = by_vector(x, Int64(count), k, self.vector)
            for i in range_constexpr(self.rows):
                source = mX[numbers[i], left // self.vector, None]
                load_row(source, rX[None, i], numbers[i], count, self.kept)
        else:
            rX.fill(convert.INPUT[self.dtype](0))
            self.pick_unaligned(rX, x, rows + first, inside, Extents(count, k), left)
        return rX

    @cute.jit
    def picked_codes(self, arrays, count, at: cutlass.Constexpr, lane: cutlass.Constexpr):
        """The codes that `picked` loads, times their scales: the floats that `dequantize` gives.

        A row has whole blocks, so a lane's codes have one scale, and none is beyond the row.
        """
        _, tile_m, tile_k, blocks_m, k = at
        n: cutlass.Constexpr = self.vector
        rX = cute.make_rmem_tensor((n, self.rows), convert.INPUT[self.dtype])
        rC = cute.make_rmem_tensor((n, self.rows), Uint8)
        rS = cute.make_rmem_tensor(self.rows, Uint8)
        rC.fill(Uint8(0))
        rS.fill(Uint8(0))
        first, left = tile_m * self.tile.rows + lane.row, tile_k * self.tile.cols + lane.col
        inside = (first < blocks_m * BLOCK) & (left < k)
        align: cutlass.Constexpr = (16, n) if self.aligned else (4, 1)
        numbers = numbers_of(arrays["rows"], first, inside, self.rows, align[0])
        for i in range_constexpr(self.rows):
            if Uint32(numbers[i]) < Uint32(count):
                start = Int64(numbers[i]) * k + left
                cute.autovec_copy(vector_at(arrays["x"] + start, Uint8, align[1], n), rC[None, i])
                rS[i] = vector_at(arrays["scales"] + start // BLOCK, Uint8, 1, 1)[0]
        codes, floats = cute.recast_tensor(rC, Uint32), cute.recast_tensor(rX, Uint32)
        to = convert.Conversion(self.dtype, self.formats[0], self.arch)
        for i in range_constexpr(self.rows):
            factor = convert.factor_of(Uint32(rS[i]))
            converted = convert.dequantized([codes[w, i] for w in range(n // 4)], [factor] * n, to)
            for w in range_constexpr(n // 2):
                floats[w, i] = converted[w]
        return rX

    @cute.jit
    def gated(self, arrays, at: cutlass.Constexpr, lane: cutlass.Constexpr):
        """An activation's results, of gates and ups that lie in rows of x.

        Some rows at a time: with all of them in registers, half as many threads would run.
        """
        _, tile_m, tile_k, blocks_m, k = at
        together: cutlass.Constexpr = self.rows // 2
        rX = cute.make_rmem_tensor((self.vector, self.rows), convert.INPUT[self.dtype])
        rX.fill(convert.INPUT[self.dtype](0))
        first = tile_m * self.tile.rows + lane.row
        left = tile_k * self.tile.cols + lane.col
        if (first < blocks_m * BLOCK) & (left < k):
            for top in range_constexpr(0, self.rows, together):
                both = [
                    cute.make_rmem_tensor((self.vector, together), convert.INPUT[self.dtype])
                    for _ in range(2)
                ]
                corner: cutlass.Constexpr = Place(0, first + top, left)
                size: cutlass.Constexpr = Extents(blocks_m * BLOCK, k)
                for half in range_constexpr(2):
                    if const_expr(self.source.interleaved):
                        self.load_turns(both[half], arrays["x"], half, size, corner)
                    else:
                        self.load_part(both[half], arrays["x"], half, 2, size, corner)
                rM = self.weights_of(arrays["weights"], first + top, together)
                gates, ups, results = (cute.recast_tensor(r, Uint32) for r in (*both, rX))
                for i in range_constexpr(together):
                    if const_expr(self.source.interleaved):
                        activations.part(gates[None, i], ups[None, i])
                    for w in range_constexpr(self.vector * self.itemsize // 4):
                        results[w, top + i] = activations.gated(
                            self.source.activation, gates[w, i], ups[w, i], rM[i], self.dtype
                        )
        return rX

    @cute.jit
    def gradients(self, x, weights, dy, at: cutlass.Constexpr, lane: cutlass.Constexpr):
        """A patch of the gradients of gates, and a patch of the gradients of their ups."""
        _, tile_m, tile_k, blocks_m, k = at
        dtype: cutlass.Constexpr = convert.INPUT[self.dtype]
        patches = [cute.make_rmem_tensor((self.vector, self.rows), dtype) for _ in range(2)]
        for part in range_constexpr(2):
            patches[part].fill(dtype(0))
        first = tile_m * self.tile.rows + lane.row
        left = tile_k * self.tile.cols + lane.col
        if (first < blocks_m * BLOCK) & (left < k):
            size: cutlass.Constexpr = Extents(blocks_m * BLOCK, k)
            corner: cutlass.Constexpr = Place(0, first, left)
            inputs = [cute.make_rmem_tensor((self.vector, self.rows), dtype) for _ in range(3)]
            for which in range_constexpr(2):
                self.load_part(inputs[which], x, which, 2, size, corner)
            self.load_part(inputs[2], dy, 0, 1, size, corner)
            rM = self.weights_of(weights, first, self.rows)
            gates, ups, dys, made_gates, made_ups = (
                cute.recast_tensor(r, Uint32) for r in (*inputs, *patches)
            )
            for i in range_constexpr(self.rows):
                for w in range_constexpr(self.vector // 2):
                    made_gates[w, i], made_ups[w, i] = activations.gradients(
                        self.source.activation, gates[w, i], ups[w, i], rM[i], dys[w, i]
                    )
        return patches

    @cute.jit
    def gradients_by_turns(self, x, weights, dy, at: cutlass.Constexpr, lane: cutlass.Constexpr):
        """The gradients of gates and ups where these are: a vector has pairs of both.

        Some rows at a time, as of `gated`.
        """
        _, tile_m, tile_k, blocks_m, k = at
        together: cutlass.Constexpr = self.rows // 2
        dtype: cutlass.Constexpr = convert.INPUT[self.dtype]
        rX = cute.make_rmem_tensor((self.vector, self.rows), dtype)
        rX.fill(dtype(0))
        first = tile_m * self.tile.rows + lane.row
        left = tile_k * self.tile.cols + lane.col
        if (first < blocks_m * BLOCK) & (left < k):
            for top in range_constexpr(0, self.rows, together):
                both = cute.make_rmem_tensor((self.vector, together), dtype)
                rDY = cute.make_rmem_tensor((self.vector // 2, together), dtype)
                rows = blocks_m * BLOCK
                size: cutlass.Constexpr = Extents(rows, k)
                half: cutlass.Constexpr = Extents(rows, k // 2)
                self.load_part(both, x, 0, 1, size, Place(0, first + top, left))
                self.load_part(rDY, dy, 0, 1, half, Place(0, first + top, left // 2))
                rM = self.weights_of(weights, first + top, together)
                turns, dys, results = (cute.recast_tensor(r, Uint32) for r in (both, rDY, rX))
                for i in range_constexpr(together):
                    for w in range_constexpr(self.vector // 4):
                        pair = activations.turned(turns[2 * w, i], turns[2 * w + 1, i])
                        gradients = activations.gradients(
                            self.source.activation, *pair, rM[i], dys[w, i]
                        )
                        pair = activations.turned(*gradients)
                        results[2 * w, top + i], results[2 * w + 1, top + i] = pair
        return rX

    @cute.jit
    def load_part(
        self, target, x, part: cutlass.Constexpr, parts: cutlass.Constexpr,
        size: cutlass.Constexpr, place: cutlass.Constexpr,
    ):  # fmt: skip
        """Loads some rows of one of the parts that lie side by side; zeros beyond their columns."""
        n, count = target.shape
        left, (rows, k) = part * size.cols + place.col, size
        if const_expr(self.aligned):
            mX = by_vector(x, Int64(rows), parts * k, n)
            for i in range_constexpr(count):
                load(mX[place.row + i, left // n, None], target[None, i], self.kept)
        else:
            target.fill(convert.INPUT[self.dtype](0))
            layout = cute.make_layout((rows, parts * k), stride=(Int64(parts * k), 1))
            mX = cute.make_tensor(x, layout)
            for i in range_constexpr(count):
                for j in range_constexpr(n):
                    if place.col + j < k:
                        target[j, i] = mX[place.row + i, left + j]

    def load_turns(
        self, target, x, part: int, size: cutlass.Constexpr, place: cutlass.Constexpr
    ) -> None:
        """Loads a half of what gates and ups take turns in, of some columns of some rows."""
        n, _ = target.shape
        wide: cutlass.Constexpr = Extents(size.rows, 2 * size.cols)
        at: cutlass.Constexpr = Place(0, place.row, 2 * place.col + part * n)
        self.load_part(target, x, 0, 1, wide, at)

    def weights_of(self, weights, first, count: int):
        """The weights of some rows."""
        rM = cute.make_rmem_tensor(count, Float32)
        align = min(16, 4 * count) if self.aligned else 4
        cute.autovec_copy(vector_at(weights + first, Float32, align, count), rM)
        return rM

    @cute.jit
    def pick_unaligned(self, rX, x, rows, inside, size: cutlass.Constexpr, left):
        """Loads a patch from the rows that `rows` begins with of an x that lies anywhere."""
        n: cutlass.Constexpr = self.vector
        if (left >= n) & (left + 2 * n <= size.cols):  # two vectors around a row's belong to it
            rW = cute.recast_tensor(rX, Uint32)
            for i in range_constexpr(self.rows):
                number = numbers_of(rows, i, inside, 1, 4)[0]
                if Uint32(number) < Uint32(size.rows):
                    start = (Int64(number) * size.cols + left) * self.itemsize
                    vector = load_anywhere(x.toint() + start, 16)
                    for w in range_constexpr(4):
                        rW[w, i] = vector[w]
        else:
            mX = cute.make_tensor(x, cute.make_layout(tuple(size), stride=(Int64(size.cols), 1)))
            for i in range_constexpr(self.rows):
                number = numbers_of(rows, i, inside, 1, 4)[0]
                if Uint32(number) < Uint32(size.rows):
                    for j in range_constexpr(n):
                        if left + j < size.cols:
                            rX[j, i] = mX[number, left + j]

    def pair(self, rX, w: int, i: int) -> list:
        """The words of columns 2 * w and 2 * w + 1 in row i of a patch."""
        return words_of(rX[None, i], w, self.dtype)

    # ---- scales ---
    def exchange(self, magnitudes: list, sharers: int, stride: int, index):
        """The largest magnitudes of two blocks, of this lane's share, as float32 bits.

        Args:
          magnitudes: this lane's own, two blocks a word (float32: one).
          sharers: how many lanes hold parts of these blocks.
          stride: how many lanes apart they are.
          index: the number of this lane among them; it gets blocks 2 * index and 2 * index + 1.
        """
        while sharers > 1:
            sharers //= 2
            half = len(magnitudes) // 2
            upper = (index & sharers) != 0
            kept = []
            for low, high in zip(magnitudes[:half], magnitudes[half:], strict=True):
                mine, theirs = select(upper, high, low), select(upper, low, high)
                other = cute.arch.shuffle_sync_bfly(theirs, offset=sharers * stride)
                kept.append(convert.larger_magnitude(mine, other, self.dtype, self.arch))
            magnitudes = kept
        if self.itemsize == 4:
            return [convert.magnitude_bits(word, 0, self.dtype) for word in magnitudes]
        return [convert.magnitude_bits(magnitudes[0], e, self.dtype) for e in range(2)]

    def gather(self, inverses: list, sharers: int, stride: int, index) -> list:
        """The sharers' pairs of factors, the pair of blocks 2 * i and 2 * i + 1 as the i-th."""
        pair = convert.pair(*inverses)
        lane = cute.arch.lane_idx() - index * stride
        return [cute.arch.shuffle_sync(pair, offset=lane + i * stride) for i in range(sharers)]

    def shared(self, both: list, result: Output, sharers: int, stride: int, index) -> list:
        """The results of `gather` for two blocks' pairs of a scale and an inverse.

        They are the factors of elements; if the kernel gives floats, the factors of codes follow.
        """
        factors = self.gather([inverse for _, inverse in both], sharers, stride, index)
        if not result.dequantized:
            return factors
        back = [convert.float_to_bits(convert.factor_of(scale)) for scale, _ in both]
        return factors + self.gather(back, sharers, stride, index)

    def largest(self, words: list):
        """The word of larger magnitudes, element by element."""
        word = words[0]
        for other in words[1:]:
            word = convert.larger_magnitude(word, other, self.dtype, self.arch)
        return word

    # ---- windows ---
    def beyond(self, arrays, scalars, o: int, at: Tile) -> Beyond:
        """The data for the amaxes of the o-th result besides its blocks."""
        result, amaxes, count, shared = self.results[o], None, None, None
        if self.variant.window == ROW:
            (amaxes,) = self.block_data(arrays, o)
            count = scalars[2 + o]  # behind rows and columns
        elif blocks_of(self.variant.window) > 1:
            rows, cols = self.tile.rows, self.width
            if result.blocks is not Blocks.SECOND:
                cols //= BLOCK
            if result.blocks is not Blocks.LAST:
                rows //= BLOCK
            shared = cute.arch.alloc_smem(Uint32, rows * cols, alignment=16)
        return Beyond(amaxes, count, at, shared)

    def amaxes_of(self, beyond: Beyond, result: Output):
        """A tensor of the tile's amaxes, by the line in a pair, the pair, the block in a line.

        Lines are rows of x, or columns. A part of the tile has whole windows of a line, or the
        tiles of a cluster have one together.
        """
        line, side, whole = self.width, self.tile.rows, self.tile.rows
        if result.blocks is Blocks.LAST:
            line, side, whole = self.tile.rows, self.width, self.tile.cols
        assert whole % (self.blocks_here(result) * BLOCK) == 0
        assert not self.is_found_together(result) or side == self.blocks_here(result) * BLOCK
        layout = cute.make_layout((2, line // 2, side // BLOCK), stride=(1, 2, line))
        return cute.make_tensor(beyond.shared, layout)

    def is_found_together(self, result: Output) -> bool:
        """Whether the thread blocks of a cluster find a result's amaxes together."""
        return self.cluster > 1 and result.blocks is Blocks.SECOND

    def blocks_here(self, result: Output) -> int:
        """How many blocks of a window a tile has."""
        sharers = self.cluster if self.is_found_together(result) else 1
        return blocks_of(self.variant.window) // sharers

    @cute.jit
    def show(
        self, amaxes, number, line, beyond: cutlass.Constexpr, result: cutlass.Constexpr
    ):  # fmt: skip
        """Puts the amaxes of two blocks into shared memory.

        Args:
          amaxes: of the blocks, which lie side by side: in two rows, or in two columns.
          number: the numbers of the blocks in their lines, in the tile.
          line: the first one's row, or column, in the tile.
          beyond: the data for amaxes.
          result: of which they are.
        """
        rA = cute.make_rmem_tensor(2, Uint32)
        for e in range_constexpr(2):
            rA[e] = amaxes[e]
        cute.autovec_copy(rA, self.amaxes_of(beyond, result)[None, line // 2, number])

    @cute.jit
    def windowed(self, number, line, beyond: cutlass.Constexpr, result: cutlass.Constexpr):
        """The amaxes of two blocks' windows, of those that all have put there; see `show`."""
        count: cutlass.Constexpr = self.blocks_here(result)
        sA = self.amaxes_of(beyond, result)
        rA = cute.make_rmem_tensor((2, count), Uint32)
        first = number // count * count
        for i in range_constexpr(count):
            cute.autovec_copy(sA[None, line // 2, first + i], rA[None, i])
        largest = [rA[0, 0], rA[1, 0]]
        for i in range_constexpr(1, count):
            for e in range_constexpr(2):
                largest[e] = cutlass.max(largest[e], rA[e, i])
        if const_expr(self.is_found_together(result)):
            rank = cute.arch.block_idx_in_cluster()
            for other in range_constexpr(1, self.cluster):
                for i in range_constexpr(count):
                    address = sA[None, line // 2, i].iterator.toint()
                    theirs = two_of_block(mapped(address, (rank + other) % self.cluster), Uint32)
                    for e in range_constexpr(2):
                        largest[e] = cutlass.max(largest[e], theirs[e])
        return largest

    @cute.jit
    def show_to_cluster(self, rX, beyond: cutlass.Constexpr, lane: cutlass.Constexpr):
        """Puts the amaxes of columns where all of the cluster find them, and arrives.

        `scale_columns` waits for the others, which by then have long arrived; so nothing else may
        arrive in between.
        """
        amaxes = self.amaxes_of_columns(rX, lane)
        line = lane.col + 2 * lane.down
        self.show(amaxes, lane.row // BLOCK, line, beyond, self.results[-1])
        cute.arch.cluster_arrive()

    @cute.jit
    def windowed_square(self, amax, row, col, beyond: cutlass.Constexpr):
        """The amax of a square block's tile of blocks, by way of shared memory.

        `row` and `col` are a lane's of the thread block's tile; all lanes of a block have its amax.
        """
        count: cutlass.Constexpr = blocks_of(self.variant.window)
        length: cutlass.Constexpr = count * BLOCK
        assert self.tile.rows % length == self.tile.cols % length == 0
        across: cutlass.Constexpr = self.tile.cols // length
        windows: cutlass.Constexpr = self.tile.rows // length * across
        sA = cute.make_tensor(
            beyond.shared, cute.make_layout((count * count, windows), stride=(1, count * count))
        )
        window = row // length * across + col // length
        if (row % BLOCK == 0) & (col % BLOCK == 0):
            sA[row % length // BLOCK * count + col % length // BLOCK, window] = amax
        cute.arch.sync_threads()
        rA = cute.make_rmem_tensor(count * count, Uint32)
        cute.autovec_copy(sA[None, window], rA)
        largest = rA[0]
        for i in range_constexpr(1, count * count):
            largest = cutlass.max(largest, rA[i])
        return largest

    @cute.jit
    def window_amaxes(
        self, row, col, apart: cutlass.Constexpr, beyond: cutlass.Constexpr, size: cutlass.Constexpr
    ):
        """The amaxes that two blocks' rows or columns have in memory; 0 beyond them.

        Args:
          row: of the first block in the array's blocks, counted in rows or blocks of rows.
          col: of the first block, counted in columns or blocks of columns.
          apart: the distance of the second block: (rows, columns).
          beyond: the data for amaxes.
          size: the numbers of rows and columns of amaxes in a slab.
        """
        amaxes = []
        for e in range_constexpr(2):
            r, c = row + e * apart[0], col + e * apart[1]
            rA = cute.make_rmem_tensor(1, Uint32)
            rA[0] = Uint32(0)
            if (r < size.rows) & (c < size.cols):
                if const_expr(apart[0] == 1):  # rows, or columns, that have an amax for each block
                    where = (Int64(beyond.at.batch) * size.rows + r) * beyond.count
                    where = where + cutlass.min(c, beyond.count - 1)
                else:
                    where = Int64(beyond.at.batch) * beyond.count + cutlass.min(r, beyond.count - 1)
                    where = where * size.cols + c
                rA[0] = cute.make_tensor(beyond.amaxes + where, cute.make_layout(1))[0]
            amaxes.append(rA[0])
        return amaxes

    def put(self, sS, result: Output, row, col, scale) -> None:
        """Stages a scale of x's rows and columns, or blocks of them."""
        if sS is None:  # floats come out
            return
        sS[(row, col) if self.is_turned(result) else (col, row)] = Uint8(scale)

    @cute.jit
    def scale_rows(
        self, rX, sS, result: cutlass.Constexpr, rounding, lane: cutlass.Constexpr,
        beyond: cutlass.Constexpr,
    ):  # fmt: skip
        """Blocks along rows: neighbours across share one. Pairs of factors of rows."""
        if const_expr(self.variant.window == ROW):
            index = lane.across % self.row_sharers
            at: cutlass.Constexpr = beyond.at
            row = at.row * self.tile.rows + lane.row + 2 * index
            col = (at.col * self.tile.cols + lane.col) // BLOCK
            size: cutlass.Constexpr = Extents(at.rows * BLOCK, at.cols // BLOCK)
            amaxes = self.window_amaxes(row, col, (1, 0), beyond, size)
        elif const_expr(self.variant.window == SQUARE):
            index = lane.across % self.row_sharers
            amaxes = [self.amax_of_square(rX)] * 2
        else:
            magnitudes = [
                self.largest([w for j in range(self.vector // 2) for w in self.pair(rX, j, i)])
                for i in range(self.rows)
            ]
            if const_expr(self.itemsize == 2):
                magnitudes = [
                    convert.amaxes_of_two(magnitudes[i], magnitudes[i + 1], self.dtype, self.arch)
                    for i in range(0, len(magnitudes), 2)
                ]
            index = lane.across % self.row_sharers
            amaxes = self.exchange(magnitudes, self.row_sharers, 1, index)
        if const_expr(beyond.shared is not None):
            line: cutlass.Constexpr = lane.row + 2 * index
            self.show(amaxes, lane.col // BLOCK, line, beyond, result)
            cute.arch.sync_threads()
            amaxes = self.windowed(lane.col // BLOCK, line, beyond, result)
        both = []
        for e in range_constexpr(2):
            scale, inverse = self.scale_of(amaxes[e], result.format, rounding)
            self.put(sS, result, lane.row + 2 * index + e, lane.col // BLOCK, scale)
            both.append((scale, inverse))
        return self.shared(both, result, self.row_sharers, 1, index)

    @cute.jit
    def scale_columns(
        self, rX, sS, result: cutlass.Constexpr, rounding, lane: cutlass.Constexpr,
        beyond: cutlass.Constexpr,
    ):  # fmt: skip
        """Blocks down columns: lanes below each other share one. Pairs of factors of columns."""
        if const_expr(self.variant.window == ROW):
            at: cutlass.Constexpr = beyond.at
            row = at.row * self.tile.down + lane.row // BLOCK
            col = at.col * self.tile.cols + lane.col + 2 * lane.down
            amaxes = self.window_amaxes(row, col, (0, 1), beyond, Extents(at.rows, at.cols))
        elif const_expr(self.variant.window == SQUARE):
            amaxes = [self.amax_of_square(rX)] * 2
        elif const_expr(not self.is_found_together(result)):
            amaxes = self.amaxes_of_columns(rX, lane)
        if const_expr(beyond.shared is not None):
            line: cutlass.Constexpr = lane.col + 2 * lane.down
            if const_expr(self.is_found_together(result)):
                cute.arch.cluster_wait()
            else:
                self.show(amaxes, lane.row // BLOCK, line, beyond, result)
                cute.arch.sync_threads()
            amaxes = self.windowed(lane.row // BLOCK, line, beyond, result)
        both = []
        for e in range_constexpr(2):
            scale, inverse = self.scale_of(amaxes[e], result.format, rounding)
            self.put(sS, result, lane.row // BLOCK, lane.col + 2 * lane.down + e, scale)
            both.append((scale, inverse))
        return self.shared(both, result, self.column_sharers, self.lanes, lane.down)

    def amaxes_of_columns(self, rX, lane: Lane) -> list:
        """The amaxes of the blocks of two columns."""
        by_row = [
            [w for j in range(self.vector // 2) for w in self.pair(rX, j, i)]
            for i in range(self.rows)
        ]
        magnitudes = [self.largest(list(column)) for column in zip(*by_row, strict=True)]
        return self.exchange(magnitudes, self.column_sharers, self.lanes, lane.down)

    @cute.jit
    def scale_square(
        self, rX, sS, result: cutlass.Constexpr, rounding, lane: cutlass.Constexpr,
        beyond: cutlass.Constexpr,
    ):  # fmt: skip
        """Square blocks: two a warp. One pair for all."""
        amax = self.amax_of_square(rX)
        if const_expr(beyond.shared is not None):
            amax = self.windowed_square(amax, lane.row, lane.col, beyond)
        scale, inverse = self.scale_of(amax, result.format, rounding)
        row, col = lane.row, lane.col
        if (row % BLOCK == 0) & (col % BLOCK == 0):
            self.put(sS, result, row // BLOCK, col // BLOCK, scale)
        return [convert.pair(inverse, inverse)]

    def amax_of_square(self, rX):
        """The amax of a lane's square block, which all lanes of it have."""
        rW = cute.recast_tensor(rX, Uint32)
        word = self.largest([rW[i] for i in range(cute.size(rW))])
        offsets = [1 << i for i in range(self.row_sharers.bit_length() - 1)] + [
            self.lanes << i for i in range(self.column_sharers.bit_length() - 1)
        ]
        for offset in offsets:
            other = cute.arch.shuffle_sync_bfly(word, offset=offset)
            word = convert.larger_magnitude(word, other, self.dtype, self.arch)
        return convert.largest_magnitude_bits(word, self.dtype)

    def factors(self, inverses: list, result: Output, w: int, i: int):
        """The pair of factors of columns 2 * w and 2 * w + 1 in row i."""
        if result.blocks is Blocks.LAST:
            return convert.twice(inverses[i // 2], i % 2)
        return inverses[w if result.blocks is Blocks.SECOND else 0]

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
        per = result.packed[0]
        rows = [self.scaled_row(rX, inverses, result, per * i + r) for r in range(per)]
        if per == 1:
            packed = convert.pack_along(rows[0], self.conversion(result.format))
        else:
            packed = convert.pack_down(*rows, self.conversion(result.format))
        return bytes_of(packed, self.vector // result.packed[1])

    @cute.jit
    def store(
        self, rX, inverses, result: cutlass.Constexpr, values, at: cutlass.Constexpr,
        lane: cutlass.Constexpr,
    ):  # fmt: skip
        """Stores values in the order of x."""
        batch, _, _, blocks_m, k = at
        m = blocks_m * BLOCK
        first, left, begin = self.corner(at, lane)
        top = Int64(batch) * m + first
        n: cutlass.Constexpr = self.vector
        down: cutlass.Constexpr = result.packed[0]
        mV = by_vector(values, Int64(batch + 1) * (m // down), k * self.parts, n)
        if (first < m) & (left < k):
            for i in range_constexpr(self.rows // down):
                rV = self.quantized_row(rX, inverses, result, i)
                cute.autovec_copy(rV, mV[top // down + i, begin // n, None])

    @cute.jit
    def store_dequantized(
        self, rX, factors, result: cutlass.Constexpr, floats, at: cutlass.Constexpr,
        lane: cutlass.Constexpr,
    ):  # fmt: skip
        """Stores dequantized codes in the order of x; `factors` is a result of `shared`."""
        batch, _, _, blocks_m, k = at
        m = blocks_m * BLOCK
        first, left, begin = self.corner(at, lane)
        half: cutlass.Constexpr = len(factors) // 2
        to: cutlass.Constexpr = self.conversion(result.format)
        if (first < m) & (left < k):
            for i in range_constexpr(self.rows):
                pairs = self.scaled_row(rX, factors[:half], result, i)
                back = [self.factors(factors[half:], result, w, i) for w in range(self.vector // 2)]
                row = fragment(convert.through_codes(pairs, back, to), self.dtype)
                offset = (Int64(batch) * m + first + i) * (k * self.parts) + begin
                self.store_row(row, floats + offset, left, k)

    @cute.jit
    def stage(self, sV, rX, inverses, result: cutlass.Constexpr, lane: cutlass.Constexpr):
        """Puts the tile's values into shared memory row by row, `PAD` bytes before each."""
        n: cutlass.Constexpr = self.vector
        down: cutlass.Constexpr = result.packed[0]
        rows = cute.make_tensor(
            sV + PAD,
            cute.make_layout(
                (self.tile.rows // down, self.tile.cols // n, n),
                stride=(self.tile.cols + PAD, n, 1),
            ),
        )
        for i in range_constexpr(self.rows // down):
            rV = self.quantized_row(rX, inverses, result, i)
            cute.autovec_copy(rV, rows[lane.row // down + i, lane.col // n, None])

    @cute.jit
    def store_unaligned(
        self, sV, values, result: cutlass.Constexpr, at: cutlass.Constexpr
    ):  # fmt: skip
        """Copies values out of shared memory, to where they, or their rows, lie anywhere."""
        batch, tile_m, tile_k, blocks_m, k = at
        down: cutlass.Constexpr = result.packed[0]
        height: cutlass.Constexpr = self.tile.rows // down
        m, top, left = blocks_m * (BLOCK // down), tile_m * height, tile_k * self.tile.cols
        start = values.toint() + (Int64(batch) * m + top) * k + left
        store_rows(
            sV, start, Int64(k), m - top, cutlass.min(k - left, self.tile.cols),
            (height, self.tile.cols), self.threads // 32,
        )  # fmt: skip

    @cute.jit
    def stage_transposed(
        self, sV, rX, inverses, result: cutlass.Constexpr, lane: cutlass.Constexpr
    ):
        """Puts the tile's values into shared memory, one column of x after the other."""
        packed: cutlass.Constexpr = result.format.codes_per_byte
        rows: cutlass.Constexpr = self.rows // packed  # of bytes
        n: cutlass.Constexpr = self.vector
        parts: cutlass.Constexpr = 16 // rows
        lines: cutlass.Constexpr = self.lines(result)
        chunks = cute.make_tensor(
            sV,
            cute.make_layout(
                (lines.count, lines.size // 16, parts, rows), stride=(lines.size, 16, rows, 1)
            ),
        )
        byte = lane.row // packed
        for w in range_constexpr(n // 2):
            col = lane.col + 2 * w
            chunk = (byte // 16) ^ lines.key(col)
            pairs = []
            for i in range_constexpr(self.rows):
                factors = self.factors(inverses, result, w, i)
                pairs.append(self.scaled_pair(self.pair(rX, w, i), factors, result.format))
            below = convert.pack_below(pairs, self.conversion(result.format))
            for c in range_constexpr(2):
                codes = convert.pack_column(below, c, self.conversion(result.format))
                rV = bytes_of(codes, rows)
                cute.autovec_copy(rV, chunks[col + c, chunk, byte % 16 // rows, None])

    @cute.jit
    def stage_rows(self, sV, rX, inverses, result: cutlass.Constexpr, lane: cutlass.Constexpr):
        """Puts the tile's values into shared memory row by row: bytes of two codes make short runs.

        H200, (8, 7168, 7168), 2026-11-21: square blocks in MXFP4 365 us if lanes write their 4
        bytes a row to memory, 245 us so.
        """
        across: cutlass.Constexpr = result.packed[1]
        lines: cutlass.Constexpr = self.lines(result)
        n: cutlass.Constexpr = self.vector // across
        rows = cute.make_tensor(
            sV,
            cute.make_layout(
                (lines.count, lines.size // 16, 16 // n, n), stride=(lines.size, 16, n, 1)
            ),
        )
        for i in range_constexpr(self.rows):
            row = lane.row + i
            rV = self.quantized_row(rX, inverses, result, i)
            byte = lane.col // across
            chunk = (byte // 16) ^ lines.key(row)
            cute.autovec_copy(rV, rows[row, chunk, byte % 16 // n, None])

    def lines(self, result: Output):
        """How a result's values lie in shared memory."""
        sides = self.width, self.tile.rows // result.packed[0]
        if not result.transposed:
            sides = self.tile.rows // result.packed[0], self.width // result.packed[1]
        return Lines(*sides, *((self.vector, 1) if result.transposed else (self.rows, 2)))

    @cute.jit
    def store_lines(
        self, sV, values, tiles, result: cutlass.Constexpr, at: cutlass.Constexpr, tid
    ):  # fmt: skip
        """Copies lines of shared memory to rows of values, 16 bytes a thread and step."""
        if const_expr(self.aligned):
            self.copy_lines(sV, values, tiles, 16, result, at, tid)
        elif values.toint() % 16 == 0:
            self.copy_lines(sV, values, tiles, 16, result, at, tid)
        else:
            self.copy_lines(sV, values, tiles, 1, result, at, tid)

    @cute.jit
    def copy_lines(
        self, sV, values, tiles, align: cutlass.Constexpr, result: cutlass.Constexpr,
        at: cutlass.Constexpr, tid,
    ):  # fmt: skip
        """`align` is that of `values`, 16 or 1; every offset is a multiple of 16."""
        batch, tile_r, tile_c, blocks_m, k = at
        rows, cols = blocks_m * (BLOCK // result.packed[0]), k // result.packed[1]
        if const_expr(result.transposed):
            tile_r, tile_c, rows = tile_c, tile_r, k
            cols = blocks_m * (BLOCK // result.format.codes_per_byte)
        lines: cutlass.Constexpr = self.lines(result)
        chunks_per_line: cutlass.Constexpr = lines.size // 16
        chunks = cute.make_tensor(
            sV, cute.make_layout((lines.count, chunks_per_line, 16), stride=(lines.size, 16, 1))
        )
        apart: cutlass.Constexpr = self.tile.threads // chunks_per_line  # lines of a step
        steps: cutlass.Constexpr = lines.count // apart
        chunk, line = tid % chunks_per_line, tid // chunks_per_line
        rV = cute.make_rmem_tensor((16, steps), Uint8)
        for step in range_constexpr(steps):  # all before the first store, or each would wait
            at_step = line + step * apart
            cute.autovec_copy(chunks[at_step, chunk ^ lines.key(at_step), None], rV[None, step])
        row, col = tile_r * lines.count + line, tile_c * lines.size + chunk * 16
        start = (Int64(batch) * rows + row) * cols + col
        for step in range_constexpr(steps):
            offset = start + Int64(cols) * (step * apart)
            if const_expr(self.tiles_values and result.direction.ends_rows):
                if tiles != Int32(0):
                    byte = Int64(col // 16) * 16
                    top, number = geometry.in_tiles_of_values(row + step * apart, byte)
                    offset = (Int64(batch) * rows + top) * cols + number * 16
            at_row, at_col = row + step * apart, col  # in its part
            if const_expr(self.parts > 1 and result.transposed):
                at_row, begin = self.among(tile_r, line + step * apart, lines.count, rows)
                offset = Int64(begin) * cols + col
            elif const_expr(self.parts > 1):
                at_col, begin = self.among(tile_c, chunk * 16, lines.size, cols)
                offset = Int64(at_row) * (cols * self.parts) + begin
            if (at_row < rows) & (at_col < cols):
                cute.autovec_copy(rV[None, step], vector_at(values + offset, Uint8, align, 16))

    @cute.jit
    def store_scales(
        self, sS, scales, result: cutlass.Constexpr, at: cutlass.Constexpr, thread
    ):  # fmt: skip
        """Stores a tile's scales, by words where those lie side by side and aligned, else by bytes.

        H200, (8, 4128, 2880), 2026-11-22, whose rows of 90 and 129 scales 4 does not divide: both
        transposed 99 us, MXFP4 87; 129 and 131 where a thread writes its word's bytes one by one.
        """
        batch, tile_r, tile_c, blocks_m, k = at
        rows = blocks_m * (1 if result.blocks.span_rows else BLOCK)
        cols = k // BLOCK if const_expr(result.blocks.span_columns) else k
        to: cutlass.Constexpr = Tile(batch, tile_r, tile_c, rows, cols)
        if const_expr(self.is_turned(result)):
            to: cutlass.Constexpr = Tile(batch, tile_c, tile_r, cols, rows)
        width: cutlass.Constexpr = sS.shape[0]
        if const_expr(not self.is_turned(result)):
            width: cutlass.Constexpr = width // self.parts
        unit: cutlass.Constexpr = min(4, width) if self.layout.column_stride == 1 else 1
        whole = cutlass.Boolean(True)
        if const_expr(not self.aligned):
            whole = whole & (scales.toint() % unit == 0)
        if const_expr(self.layout.is_tiled and (self.parts == 1 or self.is_turned(result))):
            self.store_pieces(sS, scales, result, to, thread, unit, whole)
        elif whole & (to.cols % unit == 0):
            self.store_pieces(sS, scales, result, to, thread, unit, True)
        else:
            self.store_pieces(sS, scales, result, to, thread, 1, True)

    @cute.jit
    def store_pieces(
        self, sS, scales, result: cutlass.Constexpr, to: cutlass.Constexpr, thread,
        unit: cutlass.Constexpr, whole,
    ):  # fmt: skip
        """Stores the scales of a tile of their matrix, `unit` bytes a thread, side by side.

        Bytes reach memory in pieces of 32; whoever writes less of one pays for all of it. If not
        `whole`, a thread's are written one by one.
        """
        batch, tile_r, tile_c, rows, cols = to
        in_col, in_row = sS.shape
        per_row: cutlass.Constexpr = in_col // unit
        total: cutlass.Constexpr = in_row * per_row
        steps: cutlass.Constexpr = (total + self.tile.threads - 1) // self.tile.threads
        # A loop, as unrolled it takes both_transposed in MXFP4 from 64 registers to 72 (318 us to
        # 346, H200, (8, 7168, 7168)).
        for step in cutlass.range(steps, unroll=1):
            index = step * self.tile.threads + thread
            row = tile_r * in_row + index // per_row
            col = tile_c * in_col + index % per_row * unit
            if const_expr(self.layout.is_tiled):
                at = Place(batch, row, col)
                at, size = self.in_tiles(result, to, sS, at, (index, per_row, unit))
                offset, inside = offset_in_tiles(self.layout, at, size)
            else:
                offset = (Int64(batch) * rows + row) * cols + col
                inside = (row < rows) & (col < cols)
                if const_expr(self.parts > 1 and self.is_turned(result)):
                    within, at_row = self.among(tile_r, index // per_row, in_row, rows)
                    offset = Int64(at_row) * cols + col
                    inside = (within < rows) & (col < cols)
                elif const_expr(self.parts > 1):
                    tile_col = index % per_row * unit
                    within, at_col = self.among(tile_c, tile_col, in_col, cols)
                    offset = Int64(row) * (cols * self.parts) + at_col
                    inside = (row < rows) & (within < cols)
            if (index < total) & inside:
                piece = cute.make_tensor(sS.iterator + index * unit, cute.make_layout(unit))
                if const_expr(self.layout.is_tiled and self.pads_with_scales(result)):
                    self.clear_padding(piece, at.row, at.col, *size)
                if whole:
                    rS = cute.make_rmem_tensor(unit, Uint8)
                    cute.autovec_copy(piece, rS)
                    kept: cutlass.Constexpr = self.kept and self.variant.form == BOTH_TRANSPOSED
                    store(rS, vector_at(scales + offset, Uint8, unit, unit), kept)
                else:
                    mS = cute.make_tensor(scales + offset, cute.make_layout(unit))
                    for c in range_constexpr(unit):
                        mS[c] = piece[c]

    def in_tiles(
        self, result: Output, to: Tile, sS, at: Place, piece: tuple
    ) -> tuple[Place, Extents]:
        """Where a piece of a tile of scales lies in the matrix of all parts, and its size.

        Args:
          result: whose scales they are.
          to: the tile.
          sS: its scales.
          at: where the piece lies in the matrix of one part.
          piece: its number in the tile, how many pieces a row has, how many scales a piece.
        """
        size, parts, pads = Extents(to.rows, to.cols), self.parts, self.layout.pad
        if parts == 1:
            return at, size
        (in_col, in_row), (index, per_row, unit) = sS.shape, piece
        if self.is_turned(result):
            row = self.among_parts(to.row, index // per_row, in_row, to.rows, pads[0])
            return at._replace(row=row), size._replace(rows=to.rows * parts)
        col = self.among_parts(to.col, index % per_row * unit, in_col, to.cols, pads[1])
        return at._replace(col=col), size._replace(cols=to.cols * parts)

    def among_parts(self, tile, place, size: int, length, pad: int):
        """Where a row, or column, lies among all parts; one beyond its own part is padding."""
        within, at = self.among(tile, place, size, length)
        part = place // (size // self.parts)
        padding = geometry.padding_of_parts(within, part, self.parts, length, pad)
        return Int32(select(within < length, at, padding))

    def pads_with_scales(self, result: Output) -> bool:
        """Whether blocks beyond the array have scales, for zeros or for a window's rest.

        This is also true where a vector that ends beyond it is multiplied by weights that may be
        NaN.
        """
        partial = not self.aligned and not self.counts_blocks
        multiplied = any(array.name == "weights" for array in self.signature.operands)
        several = blocks_of(self.variant.window) > 1
        return takes_zero_scale(result.format) or several or (partial and multiplied)

    @cute.jit
    def clear_padding(self, piece, row, col, rows, cols):
        """Clears staged scales beyond the matrix, see `pads_with_scales`."""
        if (row >= rows) | (col + cute.size(piece) > cols):
            for c in range_constexpr(cute.size(piece)):
                if (row >= rows) | (col + c >= cols):
                    piece[c] = Uint8(0)


# ---- what makes the floats: by the name that a source has for its loader ---
def _rows(entry: Tiled, arrays, scalars, *where) -> list:
    return [entry.picked(arrays["x"], arrays["rows"], scalars[2], *where)]


def _codes(entry: Tiled, arrays, scalars, *where) -> list:
    return [entry.picked_codes(arrays, scalars[2], *where)]


def _gated(entry: Tiled, arrays, scalars, *where) -> list:
    return [entry.gated(arrays, *where)]


def _gradient(entry: Tiled, arrays, scalars, *where) -> list:
    operands = arrays["x"], arrays["weights"], arrays["dy"]
    if entry.parts > 1:
        return entry.gradients(*operands, *where)
    return [entry.gradients_by_turns(*operands, *where)]


LOADERS = {"rows": _rows, "codes": _codes, "gated": _gated, "gradient": _gradient}
