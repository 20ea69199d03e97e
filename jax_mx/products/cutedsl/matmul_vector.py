"""y = x @ dequantize(W)^T for up to four rows of x: codes go from memory into registers.

`Direct` computes y^T = W x^T by mma.sync, 16 rows of W a thread block. The warps of a thread block
share K. A warp loads some blocks of each row, and when it has used these, its next ones, also of
the next tile: so it waits for others only where all sums meet in shared memory. Few registers leave
room for many thread blocks, which hide that waiting. Four rows of x take half of the columns that
mma.sync has:

* Codes of a byte: four lanes have 64 bytes of a row, two blocks. So x stands twice in the columns,
  once with zeros where the second block is, once where the first one is: each sum is of one block
  and meets its own scale. An infinite code times a zero would not be a number: E5M2 has `Few`.
* Codes of four bits: a lane has a block, whose elements it multiplies by the scale, as `Nibbles`
  does.

A launch may start before the one ahead of it in the same call has ended, which it waits for once it
has asked for its first codes: a call's launches write x, and no codes or scales.

Waiting: all threads of a thread block meet once a tile, and all have the same tiles. A thread block
waits for the launch ahead, whose thread blocks have all begun by then: each says so first.
"""

import dataclasses

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr

from jax_mx.formats.formats import BLOCK
from jax_mx.launch.rule import Extent, Factor
from jax_mx.products.cutedsl.matmul_few import (
    factors_of_e2m1,
    in_order_of_e2m1,
    product,
    scaled_e2m1,
)
from jax_mx.products.cutedsl.products import NO_ADDRESS, ProductEntry, vector
from jax_mx.quantizing.facts.product_kernels import ProductKernel
from jax_mx.quantizing.facts.signatures import EPILOGUE, Array
from jax_mx.quantizing.kernels.cutedsl import convert

LINE = 64  # bytes of a row of W that four lanes load at once
STEP = 4  # blocks of a row, whose scales are a word
PITCH = 17  # floats from a column's sums to the next one's, off its banks


def sixteen(address: Int64) -> list:
    """Four words of W, which are read once."""
    code = "ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    return list(convert.ptx(code, [Uint32] * 4, address))


@dataclasses.dataclass(frozen=True)
class Lines:
    """How a thread block goes about its rows of W.

    Attributes:
      warps: of a thread block.
      steps: that a warp has in registers, `STEP` blocks of each row.
      resident: thread blocks of a multiprocessor.
    """

    warps: int
    steps: int
    resident: int


class Direct(ProductEntry):
    """See above; of no groups, or of groups of as many rows each, four at a time."""

    rows = 4
    columns = 16  # rows of W
    elements_per_thread = 1
    early_start = True

    def __init__(self, product: ProductKernel, arch: str, tile: Lines | None = None):
        super().__init__(product, arch)
        (self.format,) = product.formats
        tile = tile or Lines(**self.tuned("Direct"))
        self.warps, self.steps, self.resident = tile.warps, tile.steps, tile.resident
        self.threads = 32 * self.warps
        self.per = self.format.codes_per_byte
        self.lines = STEP * BLOCK // (LINE * self.per)  # of a step
        self.sums = self.warps * 8 * PITCH  # floats of a tile
        self.shared = 2 * 4 * self.sums
        self.divide = (Factor(Extent(self.signature.number("scales"), 2), STEP),)

    def align_of(self, array: Array, itemsize: int) -> int:
        """Loads of 16 bytes, of scales of `STEP`."""
        wanted = {"x": 16, "codes": 16, "scales": STEP, "group_sizes": NO_ADDRESS}
        return wanted.get(array.name) or super().align_of(array, itemsize)

    @cute.jit
    def __call__(self, pointers, scalars):
        self.kernel(pointers, scalars).launch(
            grid=[1, 1, 1],
            block=[self.threads, 1, 1],
            smem=self.shared,
            min_blocks_per_mp=self.resident,
            preferred_smem_carveout=100,  # else the compiler asks a driver
        )

    @cute.kernel
    def kernel(self, pointers, scalars):
        arrays = self.signature.named(pointers)
        w, s, y = (arrays[name] for name in ("codes", "scales", "y"))
        epilogue: cutlass.Constexpr = [arrays[name] for name in EPILOGUE if name in arrays]
        t, wide, groups, width, blocks = (scalars[i] for i in range(5))
        result = scalars[len(scalars) - 1]
        tid, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp, lane = tid // 32, tid % 32
        across = (width + self.columns - 1) // self.columns
        pieces = self.pieces(t)
        if groups > 1:
            pieces = self.pieces(t // groups)
        deep = blocks // STEP  # steps along K
        steps = wide // (STEP * BLOCK)  # x may have twice as many columns
        first, apart = warp * self.steps, self.warps * self.steps
        codes = cute.make_rmem_tensor((4, 2, self.lines, self.steps), Uint32)
        scales = cute.make_rmem_tensor((2, self.steps), Uint32)
        acc = cute.make_rmem_tensor(4, Float32)
        size = t, groups, pieces, across
        tiles = across * pieces * groups
        turn = Int32(0)
        start = self.start_of(index, size, width, blocks, lane // 4)
        cute.arch.griddepcontrol_launch_dependents()
        if (index < tiles) & (first < steps):
            self.load(w, s, start, codes, scales, first, steps, deep, lane % 4)
        cute.arch.griddepcontrol_wait()  # for x
        x = self.x_of(arrays, scalars, tid)
        while index < tiles:
            acc.fill(0.0)
            row, stop, _, _ = self.place_of(index, size)
            for step in cutlass.range(first, steps, apart, unroll=1):
                self.multiply(acc, x, codes, scales, row, stop, step, wide, lane)
                if step + apart < steps:
                    self.load(w, s, start, codes, scales, step + apart, steps, deep, lane % 4)
            this = index
            index += grid
            # W of the next tile comes while sums meet.
            start = self.start_of(index, size, width, blocks, lane // 4)
            if (index < tiles) & (first < steps):
                self.load(w, s, start, codes, scales, first, steps, deep, lane % 4)
            self.gather(acc, turn, epilogue, y, this, size, width, result, tid)
            turn ^= 1

    # ---- what a kernel that makes x by itself does in its own way ---
    def x_of(self, arrays, scalars, tid: Int32):
        """The pointer to the rows that W meets."""
        del scalars, tid
        return arrays["x"]

    def pitch(self, wide: Int32):
        """The bytes from a row there to the next one."""
        return 2 * wide

    def row_of(self, n0: Int32, n: Int32, half: cutlass.Constexpr, width: Int32):
        """The row of W that is row n of a half of a tile, 0 to 7; beyond the last one the last."""
        return cutlass.min(n0 + n + 8 * half, width - 1)

    @cute.jit
    def write(
        self, sums, epilogue: cutlass.Constexpr, y, at: cutlass.Constexpr, m: Int32, n: Int32,
        width: Int32, result: Int32,
    ):  # fmt: skip
        """Writes the element of y that is (m, n) of a tile, of a row of group e."""
        row, n0, e = at
        row, column = row + m, n0 + n
        if column < width:
            total = self.total(sums, m, n)
            if self.is_there(epilogue):
                total = self.finished(epilogue, total, e, row, column, width)
            there = Int64(row) * width + column
            self.store(y.toint() + there * self.size_in_bytes(result), total, result)

    @cute.jit
    def total(self, sums, m: Int32, n: Int32):
        """The sum of all warps' sums for row m of x and row n of W, of a tile."""
        total = Float32(0)
        for warp in range_constexpr(self.warps):
            for half in range_constexpr(2 // self.per):
                total = total + sums[n, m + 4 * half, warp]
        return total

    # ---- tiles ---
    @cute.jit
    def place_of(self, index: Int32, size: cutlass.Constexpr):
        """Where a tile is: (row of x, end of its group, row of W, group)."""
        t, groups, pieces, across = size
        tile, row, rows, e = index, Int32(0), t, Int32(0)
        if pieces * groups > 1:  # divisions take longer than the first loads may wait
            rows, piece, tile = t // groups, index // across, index % across
            e = piece // pieces
            row = e * rows + piece % pieces * self.rows
        return row, (e + 1) * rows, tile * self.columns, e

    @cute.jit
    def start_of(
        self, index: Int32, size: cutlass.Constexpr, width: Int32, blocks: Int32, g: Int32
    ):
        """The numbers of the first blocks of a lane's two rows of a tile."""
        _, _, n0, e = self.place_of(index, size)
        rows = [self.row_of(n0, g, half, width) for half in range(2)]
        return tuple((Int64(e) * width + row) * blocks for row in rows)

    @cute.jit
    def load(
        self, w, s, start: cutlass.Constexpr, codes, scales, first: Int32, steps: Int32,
        deep: Int32, q: Int32,
    ):  # fmt: skip
        """Codes and scales of steps from `first` on; behind the last, which meet zeros, of it."""
        for i in range_constexpr(self.steps):
            step = first
            if const_expr(i > 0):
                step = cutlass.min(first + i, steps - 1)
            step = Int64(cutlass.select_(step < deep, step, step - deep))
            for r in range_constexpr(2):
                block = start[r] + step * STEP
                at = w.toint() + block * (BLOCK // self.per) + 16 * q
                for c in range_constexpr(self.lines):
                    four = sixteen(at + c * LINE)
                    for j in range_constexpr(4):
                        codes[j, r, c, i] = four[j]
                scales[r, i] = vector(s.toint() + block, Uint32)[0]

    @cute.jit
    def multiply(
        self, acc, x, codes, scales, row: Int32, stop: Int32, first: Int32, wide: Int32,
        lane: Int32,
    ):  # fmt: skip
        """Adds the products of these steps to the sums."""
        g, q = lane // 4, lane % 4
        mine = row + g % 4
        at = x.toint() + Int64(mine) * self.pitch(wide) + Int64(first) * (2 * BLOCK * STEP)
        is_there = mine < stop
        if const_expr(self.per == 1):
            is_there, at = is_there & (g // 4 == q // 2), at + 32 * q
        else:
            is_there, at = is_there & (g < 4), at + 64 * q
        for i in range_constexpr(self.steps):
            if const_expr(i > 0):
                is_there = is_there & ((first + i) * (STEP * BLOCK) < wide)
                at = at + 2 * BLOCK * STEP
            if const_expr(self.per == 1):
                self.of_bytes(acc, at, is_there, codes, scales, i, q)
            else:
                self.of_nibbles(acc, at, is_there, codes, scales, i, q)

    @cute.jit
    def load_x(self, at: Int64, is_there, to):
        """Vectors of four words, or zeros."""
        to.fill(0)
        if is_there:
            for j in range_constexpr(cute.size(to) // 4):
                cute.autovec_copy(vector(at + 16 * j, Uint32, 4), to[None, j])

    @cute.jit
    def of_bytes(self, acc, at: Int64, is_there, codes, scales, i: cutlass.Constexpr, q: Int32):
        """Products of a step: its lines have two blocks each, of which a sum is of one."""
        to: cutlass.Constexpr = convert.Conversion("bfloat16", self.format, self.arch)
        for c in range_constexpr(self.lines):
            right = cute.make_rmem_tensor((4, 2), Uint32)
            self.load_x(at + c * (2 * LINE), is_there, right)
            part = None
            for j in range_constexpr(4):
                left = [
                    convert.round_all(convert.unpack_four(codes[j, r, c, i], to), "bfloat16")
                    for r in range(2)
                ]
                a = [left[r][h] for h in range(2) for r in range(2)]
                b = [right[2 * (j % 2) + h, j // 2] for h in range(2)]
                part = product(a, b, part)
            for r in range_constexpr(2):
                byte = scales[r, i] >> Uint32(16 * c + 8 * (q // 2)) & Uint32(255)
                factor = convert.factor_of(byte)
                for v in range_constexpr(2):
                    acc[2 * r + v] = acc[2 * r + v] + part[2 * r + v] * factor

    @cute.jit
    def of_nibbles(self, acc, at: Int64, is_there, codes, scales, i: cutlass.Constexpr, q: Int32):
        """Products of a step, whose elements are multiplied by scales."""
        right = cute.make_rmem_tensor((4, 4), Uint32)
        self.load_x(at, is_there, right)
        bytes_ = [Int32(scales[r, i] >> Uint32(8 * q) & Uint32(255)) for r in range(2)]
        if cute.arch.vote_any_sync(cutlass.max(*bytes_) > 128):
            self.add_nibbles(acc, right, codes, bytes_, i, True)
        else:
            self.add_nibbles(acc, right, codes, bytes_, i, False)

    @cute.jit
    def add_nibbles(
        self, acc, right, codes, bytes_: cutlass.Constexpr, i: cutlass.Constexpr,
        twice: cutlass.Constexpr,
    ):  # fmt: skip
        """The same, of elements that are multiplied once or twice."""
        factors = [factors_of_e2m1(byte)[: 1 + twice] for byte in bytes_]
        sums = [acc[v] for v in range(4)]
        for j in range_constexpr(4):
            left = [scaled_e2m1(codes[j, r, 0, i], factors[r]) for r in range(2)]
            b = in_order_of_e2m1([right[h, j] for h in range(4)])
            for k in range_constexpr(2):
                a = [left[r][2 * k + h] for h in range(2) for r in range(2)]
                sums = product(a, b[2 * k : 2 * k + 2], sums)
        for v in range_constexpr(4):
            acc[v] = sums[v]

    @cute.jit
    def gather(
        self, acc, turn: Int32, epilogue, y, index: Int32, size: cutlass.Constexpr, width: Int32,
        result: Int32, tid: Int32,
    ):  # fmt: skip
        """Adds up all warps' sums, always in one order, and writes y.

        Every second tile has the same place: a thread that writes there has met all others since
        they read it.
        """
        row, stop, n0, e = self.place_of(index, size)
        base = cute.arch.get_dyn_smem(Float32, alignment=16)
        sums = cute.make_tensor(
            base + turn * self.sums,
            cute.make_layout((16, 8, self.warps), stride=(1, PITCH, 8 * PITCH)),
        )
        g, q = tid % 32 // 4, tid % 4
        for v in range_constexpr(4):
            sums[g + 8 * (v // 2), 2 * q + v % 2, tid // 32] = acc[v]
        cute.arch.sync_threads()
        m, n = tid // 16, tid % 16
        if (m < self.rows) & (row + m < stop):
            at: cutlass.Constexpr = (row, n0, e)
            self.write(sums, epilogue, y, at, m, n, width, result)
