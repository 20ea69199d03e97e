"""y (G, K, N) = for each group of rows x (T, K)^T @ dy (T, N), of 16-bit floats, on Hopper.

The gradient of a layer's weights: rows are tokens, which belong to groups. Both operands lie with
their rows, which are contracted, apart: wgmma reads them transposed from shared memory, where TMA
puts boxes of 64 x 64. Two warpgroups have half of a tile's columns of x each, and all of dy's; a
warp of a third asks for the copies. TMA writes zeros for places beyond an array.

A group begins at any row, and a stage is 64 rows. So a group's last stage may have rows of its
neighbour, whose NaN no sum may meet. The kernel then multiplies only as many times 16 rows of the
stage as the group needs. Among the last 16 rows, the neighbour's become zeros in shared memory.

Two thread blocks of a cluster have tiles below each other, and the same columns of dy: each asks
for half of them, for both.

The order of events, for a stage (barriers full and empty, a phase bit each): the producer waits for
`empty`, which at first is free by the inverted phase. It arms `full` with the bytes of its copies,
and asks for them. Both consumers wait for `full`, which TMA completes; each of their warps arrives
at `empty` when its products of the stage are done: as soon as the next stage's are under way, or
behind the last one. In a cluster they arrive at both blocks' `empty`, as either block's producer
writes into both. Both blocks meet before the first copy and before they end. All roles, of both
blocks, walk the same tiles and stages, so each wait has its arrivals, and none waits for what it
gives itself. A consumer's warps meet where rows become zeros: once a tile, or not at all, by the
group's size, which all know.
"""

import dataclasses

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from jax_mx.launch.rule import Extent, Factor, Length, TensorMap
from jax_mx.products.cutedsl.products import HEAD, ProductEntry, element
from jax_mx.products.cutedsl.wgrad_fp8 import Contracted
from jax_mx.quantizing.facts.product_kernels import ProductKernel
from jax_mx.quantizing.facts.signatures import Array

BOX = 64  # rows and columns of what TMA copies at once: 128 bytes a row
STEP = 16  # rows that wgmma contracts
DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a thread block goes about y.

    Attributes:
      rows: of y in a tile: 128 or 256.
      columns: of y in a tile; both together 384 at most.
      stages: of shared memory.
      strip: the number of tiles next to each other that are taken before the tiles below; 0: all.
      cluster: thread blocks that share dy's copies: 1 or 2.
    """

    rows: int
    columns: int
    stages: int
    strip: int = 0
    cluster: int = 1


class Floats(ProductEntry):
    """The base of both entries: y has the groups; without sizes all have equally many rows."""

    def __init__(self, product: ProductKernel, arch: str):
        ProductEntry.__init__(self, product, arch)
        self.dtype = DTYPES[product.floats]

    @property
    def extents(self) -> list[Extent]:
        """Rows, columns of x, groups, columns of dy."""
        x, dy, y = (self.signature.number(name) for name in ("x", "dy", "y"))
        return [Extent(x, 0, -1), Extent(x, -1), Extent(y, 0, -2), Extent(dy, -1)]

    def element_of(self, array: Array):
        """The dtype of both operands."""
        return self.dtype if array.name in ("x", "dy") else super().element_of(array)


class Transposed(Floats, Contracted):
    """See above. The walk's four numbers: group, its first tile, its first row, its rows."""

    arrivals = 1
    halves = 1  # of what `results` writes at once
    elements_per_thread = 128

    def __init__(self, product: ProductKernel, arch: str, tile: Tile | None = None):
        Floats.__init__(self, product, arch)
        self.tile = tile or Tile(**self.tuned("Transposed"))
        self.rows, self.columns, self.stages = self.tile.rows, self.tile.columns, self.tile.stages
        self.strip, self.below = self.tile.strip, self.tile.cluster
        self.high = self.rows // 128  # products of 64 rows of y that a warpgroup makes
        self.x_bytes, self.dy_bytes = self.rows * BOX * 2, self.columns * BOX * 2
        self.stage_bytes = self.x_bytes + self.dy_bytes
        self.dy_at = HEAD + self.stages * self.x_bytes
        self.shared = self.dy_at + self.stages * self.dy_bytes
        self.maps = tuple(self.rows_map(name) for name in ("x", "dy"))
        self.divide = tuple(Factor(Extent(item["buffer"], -1), 8) for item in self.maps)

    def rows_map(self, name: str) -> dict:
        """The tensor map of all rows of a buffer (..., rows, columns)."""
        buffer = self.signature.number(name)
        columns, rows = Length(Extent(buffer, -1)), Length(Extent(buffer, 0, -1))
        pitch, box = Length(Extent(buffer, -1), 2), (BOX, BOX)
        dtype = self.product.floats
        return TensorMap(buffer, dtype, (columns, rows), (pitch,), box, 128, 256).to_json()

    def align_of(self, array: Array, itemsize: int) -> int:
        """TMA wants 16 bytes, and y is written in pieces of 16."""
        wanted = {"x": 16, "dy": 16, "y": 16}
        return wanted.get(array.name) or Floats.align_of(self, array, itemsize)

    # ---- the walk ---
    def across(self, width: Int32):
        """Tiles beside each other."""
        return (width + self.columns - 1) // self.columns

    def place(self, index: Int32, at, down: Int32, height: Int32, width: Int32):
        """Where a tile is: (first row of y, first column). A strip is taken before the next one."""
        line, column = self.in_strips(index - at[1], down, self.across(width))
        row = line * self.rows * self.below
        row, _, column = self.in_cluster(row, Int32(0), column * self.columns)
        return row, column

    # ---- the kernel ---
    @cute.jit
    def __call__(self, pointers, scalars):
        arrays = self.signature.named(pointers)
        x, dy, sizes, added, y = (arrays[name] for name in ("x", "dy", "group_sizes", "added", "y"))
        t, height, groups, width, result = scalars
        (ax, mX), (ay, mY) = (
            self.copy_atom(
                cute.make_tensor(a, cute.make_layout((t, n), stride=(cute.assume(Int64(n), 8), 1))),
                BOX,
                parts,
            )
            for a, n, parts in ((x, height, 1), (dy, width, self.below))
        )
        self.kernel(ax, mX, ay, mY, sizes, added, y, t, height, groups, width, result).launch(
            grid=[1, 1, 1],
            block=[self.threads, 1, 1],
            smem=self.shared,
            min_blocks_per_mp=1,
            cluster=[self.cluster, 1, 1],
        )

    @cute.kernel
    def kernel(
        self, ax: cute.CopyAtom, mX: cute.Tensor, ay: cute.CopyAtom, mY: cute.Tensor,
        sizes: cute.Pointer, added: cute.Pointer, y: cute.Pointer,
        t: Int32, height: Int32, groups: Int32, width: Int32, result: Int32,
    ):  # fmt: skip
        stages: cutlass.Constexpr = self.stages
        tid, bid, grid, warp, lane = self.places()
        base, full, empty = self.barriers()
        self.begin(tid, base, full, empty)

        both: cutlass.Constexpr = self.rows * self.sharing
        down = (height + both - 1) // both
        tiles = down * self.across(width)
        index = bid // self.sharing
        grid = grid // self.sharing
        at = self.start(sizes, t, groups)
        at = self.seek(index, at, sizes, t, groups, tiles)
        slot = Int32(0)
        phase = Int32(0)
        if warp >= 8:
            cute.arch.setmaxregister_decrease(40)
            if warp == 8:
                sX, sY = (
                    self.copied(base, at, self.dtype, columns, columns // BOX, self.stages)
                    for at, columns in ((HEAD, self.rows), (self.dy_at, self.columns))
                )
                while at[0] < groups:
                    m0, n0 = self.place(index, at, down, height, width)
                    tsX, tgX = self.partition(ax, mX, sX, at[2], m0)
                    tsY, tgY = self.partition(ay, mY, sY, at[2], n0)
                    for i in cutlass.range((at[3] + BOX - 1) // BOX, unroll=1):
                        cute.arch.mbarrier_wait(empty + slot, phase ^ 1)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(full + slot, self.stage_bytes)
                        for b in range_constexpr(self.rows // BOX):
                            to = tsX[None, b, slot]
                            self.copy(ax, tgX[None, i, b], to, full + slot, 1)
                        boxes: cutlass.Constexpr = self.columns // BOX // self.below
                        for box in range_constexpr(boxes):
                            b = self.part(self.below) * boxes + box
                            self.copy(
                                ay, tgY[None, i, b], tsY[None, b, slot], full + slot, self.below
                            )
                        slot, phase = self.next(slot, phase)
                    index += grid
                    at = self.seek(index, at, sizes, t, groups, tiles)
        else:
            cute.arch.setmaxregister_increase(232)
            mine = warp // 4  # which half of a tile's rows
            g, q = lane // 4, lane % 4
            op = warpgroup.MmaF16BF16Op(
                self.dtype, Float32, (64, self.columns, STEP), warpgroup.OperandSource.SMEM,
                OperandMajorMode.MN, OperandMajorMode.MN,
            )  # fmt: skip
            mma = cute.make_tiled_mma(cute.make_mma_atom(op))
            mma.set(warpgroup.Field.ACCUMULATE, True)
            thread = mma.get_slice(tid % 128)
            sX = self.transposed(base, HEAD, self.rows)
            sY = self.transposed(base, self.dy_at, self.columns)
            tA = [
                mma.make_fragment_A(
                    thread.partition_A(
                        cute.local_tile(sX, (64, BOX, stages), (mine * self.high + h, 0, 0))
                    )
                )
                for h in range(self.high)
            ]
            tB = mma.make_fragment_B(thread.partition_B(sY))
            sums = [
                cute.make_rmem_tensor(mma.partition_shape_C((64, self.columns)), Float32)
                for _ in range(self.high)
            ]
            my_row = (mine * self.high) * 64 + warp % 4 * 16 + g
            while at[0] < groups:
                for h in range_constexpr(self.high):
                    sums[h].fill(0.0)
                count = at[3] // BOX
                left = at[3] % BOX
                before = slot  # the stage whose products may be under way
                for i in cutlass.range(count, unroll=1):
                    cute.arch.mbarrier_wait(full + slot, phase)
                    warpgroup.fence()
                    for k in range_constexpr(BOX // STEP):
                        self.step(mma, sums, tA, tB, k, slot)
                    warpgroup.commit_group()
                    warpgroup.wait_group(1)
                    if i > 0:
                        self.give_back(empty + before)
                    before = slot
                    slot, phase = self.next(slot, phase)
                last = slot
                if left > 0:
                    cute.arch.mbarrier_wait(full + slot, phase)
                    self.clear_rows(base, slot, left, mine, tid % 128)
                    warpgroup.fence()
                    for k in cutlass.range((left + STEP - 1) // STEP, unroll=1):
                        self.step(mma, sums, tA, tB, k, slot)
                    warpgroup.commit_group()
                    slot, phase = self.next(slot, phase)
                warpgroup.wait_group(0)
                if count > 0:
                    self.give_back(empty + before)
                if left > 0:
                    self.give_back(empty + last)
                m0, n0 = self.place(index, at, down, height, width)
                first = self.before(at, height, width)
                self.give(y, added, sums, m0 + my_row, n0, q, first, height, width, result)
                index += grid
                at = self.seek(index, at, sizes, t, groups, tiles)

        self.leave()

    def step(self, mma, sums, tA, tB, k, slot) -> None:
        """Asks for the products of 16 rows."""
        for h in range(self.high):
            left = tA[h][None, None, k, slot]
            cute.gemm(mma, sums[h], left, tB[None, None, k, slot], sums[h])

    def transposed(self, base, at: int, columns: int):
        """The same as wgmma reads them: (column, row, stage)."""
        smem = cute.AddressSpace.smem
        swizzle = warpgroup.SmemLayoutAtomKind.MN_SW128
        atom = warpgroup.make_smem_layout_atom(swizzle, self.dtype)
        layout = cute.tile_to_shape(atom, (columns, BOX, self.stages), order=(1, 0, 2))
        pointer = cute.make_ptr(self.dtype, (base + at).toint(), smem, assumed_align=1024)
        return cute.make_tensor(
            cute.recast_ptr(pointer, layout.inner, dtype=self.dtype), layout.outer
        )

    @cute.jit
    def clear_rows(self, base, slot: Int32, left: Int32, mine: Int32, thread: Int32):
        """Zeros in place of the rows from `left` on, as far as products of 16 rows read them.

        A warpgroup writes its own columns of x, and all of dy: the other one writes the same zeros.
        """
        if left % STEP != 0:
            zeros = cute.make_rmem_tensor(4, Uint32)
            zeros.fill(0)
            row = left // STEP * STEP + thread // 8
            if row >= left:
                to = base.toint() + row * 128 + thread % 8 * 16
                smem = cute.AddressSpace.smem
                x = to + HEAD + slot * self.x_bytes + mine * (self.high * BOX * 128)
                dy = to + self.dy_at + slot * self.dy_bytes
                for start, boxes in ((x, self.high), (dy, self.columns // BOX)):
                    for b in range_constexpr(boxes):
                        pointer = cute.make_ptr(
                            Uint32, start + b * (BOX * 128), smem, assumed_align=16
                        )
                        cute.autovec_copy(zeros, cute.make_tensor(pointer, cute.make_layout(4)))
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=1 + mine, number_of_threads=128)

    @cute.jit
    def give(
        self, y, added, sums: cutlass.Constexpr, row: Int32, n0: Int32, q: Int32, first: Int64,
        height: Int32, width: Int32, result: Int32,
    ):  # fmt: skip
        """Writes a thread's part of a tile; `first`: of the group's elements of y."""
        to = y.toint() + first * self.size_in_bytes(result)
        for h in range_constexpr(self.high):
            flat = cute.make_tensor(sums[h].iterator, cute.make_layout(self.columns // 2))
            lines: cutlass.Constexpr = [(row + 64 * h + 8 * r, 2 * r) for r in range(2)]
            its: cutlass.Constexpr = [
                (n0 + 8 * c + 2 * q + e, 4 * c + e)
                for c in range(self.columns // 8)
                for e in (0, 1)
            ]
            self.finish_all({"added": added}, flat, lines, its, 0, height, width, first)
            for part in range_constexpr(self.columns // 128):
                column = n0 + 128 * part
                some = cute.make_tensor(flat.iterator + 64 * part, cute.make_layout((64, 1)))
                if column < width:
                    self.results(to, some, row + 64 * h, height, column, q, width, result)


class PlainFloats(Floats):
    """Any addresses and sizes: a thread an element of y, one after the other. Slow."""

    threads = 256
    elements_per_thread = 1

    @cute.jit
    def __call__(self, pointers, scalars):
        self.kernel(pointers, scalars).launch(grid=[1, 1, 1], block=[self.threads, 1, 1])

    @cute.kernel
    def kernel(self, pointers, scalars):
        arrays = self.signature.named(pointers)
        x, dy, sizes, added, y = (arrays[name] for name in ("x", "dy", "group_sizes", "added", "y"))
        t, height, groups, width, result = scalars
        size = self.size_in_bytes(result)
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        row = Int32(0)
        for e in cutlass.range(groups, unroll=1):
            count = self.size_of(sizes, e, row, t, groups)
            for m in cutlass.range(height, unroll=1):
                line = (Int64(e) * height + m) * width
                for n in cutlass.range(
                    bid * self.threads + tid, width, grid * self.threads, unroll=1
                ):
                    total = Float32(0)
                    for i in cutlass.range(row, row + count, unroll=1):
                        left = element(x, Int64(i) * height + m, self.dtype)
                        right = element(dy, Int64(i) * width + n, self.dtype)
                        total += Float32(left) * Float32(right)
                    if added.toint() != Int64(0):
                        total = total + element(added, line + n, Float32)
                    self.store(y.toint() + (line + n) * size, total, result)
            row += count


def entries(product: ProductKernel, arch: str, tile: Tile | None = None) -> list[ProductEntry]:
    """The entries of a product's binary, the fastest first."""
    return [Transposed(product, arch, tile), PlainFloats(product, arch)]
