"""y = dequantize(x) @ dequantize(W)^T on Hopper's FP8 tensor cores, for scales in windows.

`Windows`: a stage of shared memory has 128 codes of 128 rows of x and of 256 rows of W, and their
scales as floats. The codes are wgmma's operands as they lie. Two warpgroups have 128 of W's rows
each. For each 64 rows of x they add up a window's products in `part` on the tensor cores. Then they
add part * scale of x * scale of W to `total`. One warp of a third warpgroup asks for the copies,
the three others bring the scales, which they read from the MX layout: the first byte of a window.

The order of events, for a stage (barriers full and empty, a phase bit each): the copying warp and
the three that bring scales each wait for `empty` (at first it is free by the inverted phase); then
`full` completes by one arrival of each and the copies' bytes. Both consumers wait for `full`; each
of their warps arrives at `empty` when its products of the stage are done and its scales read. All
five roles walk the same tiles and stages, so each wait has its arrivals, and none waits for what it
gives itself. Two thread blocks of a cluster may have tiles below each other, and share the copies
of W. In matmul_many.py they share the copies of x.
"""

import dataclasses

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cutlass_dsl import dsl_user_op

from jax_mx.formats.formats import BLOCK, MXFP8_E4M3
from jax_mx.formats.windows import ROW
from jax_mx.launch.rule import Factor
from jax_mx.products.cutedsl.pipelines import Pipeline
from jax_mx.products.cutedsl.products import FLOAT32, HEAD, Plain, ProductEntry, store_if, vector
from jax_mx.quantizing.facts.product_kernels import RESULTS, ProductKernel
from jax_mx.quantizing.facts.signatures import EPILOGUE, Array
from jax_mx.quantizing.kernels.cutedsl import convert

LINE = 128  # codes of a row in a stage
PER_LINE = LINE // BLOCK  # bytes of scales of a row in a stage
PITCH = 36  # floats of a quarter of 128 columns' scales, off the other quarters' banks


@dsl_user_op
def product_of_scales(a: Float32, b: Float32, *, loc=None, ip=None) -> Float32:
    """a * b, at most the largest finite float: so that a window of zeros is 0, not NaN."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 p, m; mul.rn.f32 p, {$r0}, {$r1}; mov.b32 m, 0x7f7fffff; "
        "min.NaN.f32 {$w0}, p, m; }",
        write_only_types=[Float32],
        read_only_args=[a, b],
        loc=loc,
        ip=ip,
    )


@dataclasses.dataclass(frozen=True)
class Fp8Stages:
    """How a thread block, or two, go about y.

    Attributes:
      stages: of shared memory.
      strip: how many tiles beside each other are taken before those below; 0: all.
      turns: whether the two warpgroups ask for products in turns: then one's are under way while
        the other promotes its own.
    """

    stages: int
    strip: int = 0
    turns: bool = False


class Windows(Pipeline):
    """See above; `vectors`: whether scales of four windows are read at once."""

    columns = 256
    rows = 128
    threads = 384
    elements_per_thread = 128
    rank = 3  # of W
    arrivals = 4  # that fill a stage: the copies, and three warps' scales
    by_row = False
    streams = False  # whether y leaves L2 to x and W

    def __init__(
        self, product: ProductKernel, arch: str, vectors: bool, tile: Fp8Stages | None = None
    ):
        super().__init__(product, arch)
        self.vectors, self.tiles = vectors, product.tiles
        tile = tile or Fp8Stages(**self.tuned("Windows"))
        self.stages, self.strip, self.turns = tile.stages, tile.strip, tile.turns
        self.below = product.rows // self.rows
        self.span = self.promoted // LINE  # stages of a window
        self.types = [
            cutlass.Float8E4M3FN if format == MXFP8_E4M3 else cutlass.Float8E5M2
            for format in product.formats
        ]
        self.halves = self.rows // 64
        self.x_bytes, self.w_bytes = self.rows * LINE, self.columns * LINE
        self.stage_bytes = self.x_bytes + self.w_bytes
        self.w_at = HEAD + self.stages * self.x_bytes
        self.scales_at = self.w_at + self.stages * self.w_bytes
        self.floats = self.rows + self.columns // 128 * 4 * PITCH  # of a stage's scales
        self.shared = self.scales_at + self.copies * self.floats * 4
        self.box = self.columns // self.below  # rows of W that a copy brings
        self.maps = (
            self.matrix_map("x_codes", "uint8", 1, (LINE, self.rows), 128),
            self.matrix_map("codes", "uint8", 1, (LINE, self.box, 1)[: self.rank], 128),
        )
        if vectors:
            self.divide = (Factor(self.extents[-1], 4 * PER_LINE),)

    @property
    def promoted(self) -> int:
        """How many elements along K are added up on the tensor cores."""
        return self.product.window

    @property
    def copies(self) -> int:
        """How often shared memory has room for scales."""
        return self.stages

    def align_of(self, array: Array, itemsize: int) -> int:
        """TMA wants 16 bytes; y is written in pieces of 16, or of 8 in float32."""
        wanted = {"x_codes": 16, "codes": 16, "y": min(16, 8 * itemsize)}
        if self.vectors:
            wanted |= {"x_scales": 16, "scales": 16}
        return wanted.get(array.name) or super().align_of(array, itemsize)

    def element_of(self, array: Array):
        """Codes are elements of a float8 type."""
        if array.name in ("x_codes", "codes"):
            return self.types[array.name == "codes"]
        return super().element_of(array)

    @cute.jit
    def __call__(self, pointers, scalars):
        arrays = self.signature.named(pointers)
        x, sx, w, sw = (arrays[name] for name in ("x_codes", "x_scales", "codes", "scales"))
        rest = tuple(arrays[name] for name in self.epilogue)
        t, wide, groups, width, blocks, result = scalars
        line = blocks * BLOCK
        stride = cute.assume(Int64(line), 32)
        mX = cute.make_tensor(x, cute.make_layout((t, wide), stride=(stride, 1)))
        matrices = groups if const_expr(self.rank == 3) else 1
        if const_expr(self.product.parted):
            line = line // matrices
            stride = cute.assume(Int64(line), 32)
        slab = cute.assume(Int64(line) * width, 32)
        mW = cute.make_tensor(
            w, cute.make_layout((width, line, matrices), stride=(stride, 1, slab))
        )
        ax, mX = self.copy_atom(mX, self.rows, 1)
        aw, mW = self.copy_atom(mW, self.box, self.below)
        others = (arrays["group_sizes"], rest, arrays["y"])
        self.kernel(ax, mX, aw, mW, sx, sw, *others, t, wide, groups, width, blocks, result).launch(
            grid=[1, 1, 1],
            block=[self.threads, 1, 1],
            smem=self.shared,
            min_blocks_per_mp=1,
            cluster=[self.cluster, 1, 1],
        )

    @cute.kernel
    def kernel(
        self, ax: cute.CopyAtom, mX: cute.Tensor, aw: cute.CopyAtom, mW: cute.Tensor,
        sx: cute.Pointer, sw: cute.Pointer, sizes: cute.Pointer, rest: tuple, y: cute.Pointer,
        t: Int32, wide: Int32, groups: Int32, width: Int32, blocks: Int32, result: Int32,
    ):  # fmt: skip
        stages: cutlass.Constexpr = self.stages
        tid, bid, grid, warp, lane = self.places()
        base, full, empty = self.barriers()
        sX = self.operand(base, HEAD, self.types[0], self.rows)
        sW = self.operand(base, self.w_at, self.types[1], self.columns)
        self.begin(tid, base, full, empty)

        parts = groups  # of K, that codes of W lie in
        if const_expr(self.product.parted):
            groups = Int32(1)
        across = (width + self.columns - 1) // self.columns
        windows = (blocks * BLOCK + LINE * self.span - 1) // (LINE * self.span)
        total = windows * self.span  # stages
        cluster = bid // self.sharing
        clusters = grid // self.sharing
        index = cluster
        across, length = self.walk(across, t, wide)
        at = self.start(sizes, length, groups)
        at = self.seek(index, at, sizes, length, groups, across)
        slot = Int32(0)
        phase = Int32(0)
        if warp >= 8:
            cute.arch.setmaxregister_decrease(40)
            if warp == 8:
                into_x = self.copied(base, HEAD, self.types[0], self.rows, 1, stages)
                into_w = self.copied(
                    base, self.w_at, self.types[1], self.columns, self.below, stages
                )
                while at[0] < groups:
                    row, _, n0 = self.place(index, at, across, t, width)
                    begin, count = self.stretch(at, total)
                    tsX, tgX = self.partition(ax, mX, into_x, row)
                    tsW, tgW = self.partition(aw, mW[None, None, self.matrix(at)], into_w, n0)
                    mine = self.part(self.below)
                    for step in cutlass.range(count, unroll=1):
                        i = begin + step
                        of_w = i
                        if const_expr(self.product.parted):
                            # `mW` does not know its sizes: see `ProductEntry.parameters`.
                            per_part = blocks * BLOCK // LINE // parts
                            part, of_w = i // per_part, i % per_part
                            tsW, tgW = self.partition(aw, mW[None, None, part], into_w, n0)
                        cute.arch.mbarrier_wait(empty + slot, phase ^ 1)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(full + slot, self.stage_bytes)
                        self.copy(ax, tgX[None, 0, i], tsX[None, 0, slot], full + slot, 1)
                        from_, to = tgW[None, mine, of_w], tsW[None, mine, slot]
                        self.copy(aw, from_, to, full + slot, self.below)
                        slot, phase = self.next(slot, phase)
                    index += clusters
                    at = self.seek(index, at, sizes, length, groups, across)
            else:
                while at[0] < groups:
                    row, _, n0 = self.place(index, at, across, t, width)
                    begin, count = self.stretch(at, total)
                    slot, phase = self.bring(
                        sx, sw, base, full, empty, slot, phase, warp - 9, lane, row, n0,
                        self.matrix(at), t, width, blocks, begin, count,
                    )  # fmt: skip
                    index += clusters
                    at = self.seek(index, at, sizes, length, groups, across)
        else:
            cute.arch.setmaxregister_increase(232)
            self.consume(
                sX, sW, base, full, empty, index, at, across, length, windows, cluster, clusters,
                tid, bid, grid, sizes, rest, y, t, groups, width, result,
            )  # fmt: skip
        self.leave()

    @cute.jit
    def consume(
        self, sX, sW, base, full, empty, index: Int32, at, across: Int32, length: Int32,
        windows: Int32, cluster: Int32, clusters: Int32, tid: Int32, bid: Int32, grid: Int32,
        sizes, rest, y, t: Int32, groups: Int32, width: Int32, result: Int32,
    ):  # fmt: skip
        """A consumer's part: the products of all tiles of its thread block, window by window."""
        stages: cutlass.Constexpr = self.stages
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        slot = Int32(0)
        phase = Int32(0)
        mine = warp // 4  # which 128 columns
        g, q = lane // 4, lane % 4
        op = warpgroup.MmaF8Op(
            *self.types, Float32, (64, 128, 32), warpgroup.OperandSource.SMEM,
            OperandMajorMode.K, OperandMajorMode.K,
        )  # fmt: skip
        first = cute.make_tiled_mma(cute.make_mma_atom(op))
        more = cute.make_tiled_mma(cute.make_mma_atom(op))
        first.set(warpgroup.Field.ACCUMULATE, False)
        more.set(warpgroup.Field.ACCUMULATE, True)
        thread = more.get_slice(tid % 128)
        tA = [
            more.make_fragment_A(
                thread.partition_A(cute.local_tile(sX, (64, LINE, stages), (h, 0, 0)))
            )
            for h in range(self.halves)
        ]
        tB = more.make_fragment_B(
            thread.partition_B(cute.local_tile(sW, (128, LINE, stages), (mine, 0, 0)))
        )
        part = cute.make_rmem_tensor(more.partition_shape_C((64, 128)), Float32)
        flat = cute.make_tensor(part.iterator, cute.make_layout(64))
        sums = cute.make_rmem_tensor((64, self.halves), Float32)
        left = cute.make_rmem_tensor(2, Float32)
        right = cute.make_rmem_tensor(4, Float32)
        scales = base.toint() + self.scales_at
        my_row = warp % 4 * 16 + g
        at_x = scales + my_row * 4
        at_w = scales + self.rows * 4 + (mine * 4 + q) * (PITCH * 4)
        # Where the walk is lies in shared memory meanwhile, a warp's own: registers are few.
        kept = base.toint() + HEAD // 2 + warp * 16
        self.keep(kept, at)
        exists = at[0] < groups
        self.begin_turns(mine)
        while exists:
            sums.fill(0.0)
            for _ in cutlass.range(self.windows_of(kept, windows), unroll=1):
                shift = slot * (self.floats * 4)
                slots = [slot + u for u in range(self.span)]  # span divides stages
                for h in range_constexpr(self.halves):
                    for u in range_constexpr(self.span):
                        if const_expr(h == 0):
                            cute.arch.mbarrier_wait(full + slots[u], phase)
                        if const_expr(u == 0):
                            self.take_turn(mine)
                            warpgroup.fence()
                        for k in range_constexpr(LINE // 32):
                            cute.gemm(
                                first if u == 0 and k == 0 else more,
                                part,
                                tA[h][None, None, k, slots[u]],
                                tB[None, None, k, slots[u]],
                                part,
                            )
                    warpgroup.commit_group()
                    self.pass_turn(mine)
                    if const_expr(self.by_row):
                        left[0] = self.shared_vector(base.toint() + self.one_at, 1)[0]
                    else:
                        self.load_rows(at_x + shift, left, h)
                        self.load_columns(at_w + shift, right, 0)
                    warpgroup.wait_group(0)
                    if const_expr(h == self.halves - 1 and self.early):
                        self.give_back_all(empty, slots)
                    for eighth in range_constexpr(8):
                        if const_expr(eighth > 0 and not self.by_row):
                            self.load_columns(at_w + shift, right, eighth)
                        self.promote(sums, flat, left, right, h, eighth)
                    if const_expr(h == self.halves - 1 and not self.early):
                        self.give_back_all(empty, slots)
                slot += self.span
                if slot == stages:
                    slot = Int32(0)
                    phase = phase ^ 1
            if const_expr(self.by_row):
                number = (index - cluster) // clusters
                self.scale(sums, left, right, at_x, at_w, empty + stages, number)
            here = self.recalled(kept)
            row, end, n0 = self.place(index, here, across, t, width)
            before = self.before(here, t, width)
            to = y.toint() + before * self.size_in_bytes(result)
            operands: cutlass.Constexpr = dict(zip(self.epilogue, rest, strict=True))
            lines: cutlass.Constexpr = [
                (row + my_row + 64 * h + 8 * r, 64 * h + 2 * r)
                for h in range(self.halves)
                for r in range(2)
            ]
            its: cutlass.Constexpr = [
                (n0 + mine * 128 + 8 * c + 2 * q + e, 4 * c + e)
                for c in range(16)
                for e in range(2)
            ]
            every = cute.make_tensor(sums.iterator, cute.make_layout(64 * self.halves))
            self.finish_all(operands, every, lines, its, here[0], end, width, before)
            self.results(to, sums, row + my_row, end, n0 + mine * 128, q, width, result)
            index += clusters
            here = self.seek(index, here, sizes, length, groups, across)
            self.keep(kept, here)
            exists = here[0] < groups
        self.end_turns(mine)
        self.finish(y, rest, kept, t, width, result, bid, grid, tid)

    @property
    def early(self) -> bool:
        """Whether a stage is given back before its products are promoted."""
        return self.tiles

    # ---- what there is to do; wgrad_fp8 has other answers ---
    def walk(self, across: Int32, t: Int32, wide: Int32):
        """How many tiles a piece of a group has, and the length that groups share out."""
        del wide
        return across, t

    def place(self, index: Int32, at, across: Int32, t: Int32, width: Int32):
        """See `Pipeline.place`."""
        del t, width
        return super().place(index, at, across)

    def stretch(self, at, total: Int32):
        """The first of a tile's stages along K, and how many it has: whole windows."""
        del at
        return 0, total

    def windows_of(self, kept: Int32, windows: Int32):
        """How many windows a tile has."""
        del kept
        return windows

    def within(self, stage: Int32, begin: Int32, end: Int32):
        """Whether a stage is one of a tile's; of those that are read with its first, too."""
        del begin
        return stage < end

    def first_byte(self, begin: Int32, blocks: Int32):
        """Where the first scale of a row that the tile takes is."""
        del begin, blocks
        return Int64(0)

    def matrix(self, at):
        """The matrix that W's rows belong to."""
        return at[0]

    def before(self, at, t: Int32, width: Int32):
        """How many elements y has before the matrix that a tile is of."""
        del at, t, width
        return Int64(0)

    @property
    def epilogue(self) -> list:
        """The names of those operands that `rest` has."""
        return [a.name for a in self.signature.operands if a.name in EPILOGUE]

    @cute.jit
    def finish(
        self, y, rest, kept: Int32, t: Int32, width: Int32, result: Int32, bid: Int32, grid: Int32,
        tid: Int32,
    ):  # fmt: skip
        """Clears the rows of y that no group has."""
        _, _, row, _ = self.recalled(kept)
        self.clear(y, rest[-1], row, t, width, result, bid, grid, tid, 256)

    def operand(self, base, at: int, dtype, rows: int):
        """The stages of an operand, swizzled as TMA writes and wgmma reads them."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
        layout = cute.tile_to_shape(atom, (rows, LINE, self.stages), order=(0, 1, 2))
        smem = cute.AddressSpace.smem
        pointer = cute.make_ptr(dtype, (base + at).toint(), smem, assumed_align=1024)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=dtype), layout.outer)

    def shared_vector(self, address, count: int):
        """Floats of shared memory at a multiple of their size."""
        smem = cute.AddressSpace.smem
        pointer = cute.make_ptr(Float32, address, smem, assumed_align=4 * count)
        return cute.make_tensor(pointer, cute.make_layout(count))

    @cute.jit
    def bring(
        self, sx, sw, base, full, empty, slot: Int32, phase: Int32, part: Int32, lane: Int32,
        row: Int32, n0: Int32, e: Int32, t: Int32, width: Int32, blocks: Int32, begin: Int32,
        count: Int32,
    ):  # fmt: skip
        """A tile's scales of 128 rows of x (part 0) or of W (1 and 2), four rows a lane."""
        from_, to = self.from_to(sx, sw, part, lane, row, n0, e, t, width, blocks)
        start = base.toint() + self.scales_at
        if const_expr(self.vectors):
            held = cute.make_rmem_tensor((4, 4), Uint32)
            end = begin + count
            for i in cutlass.range(begin // 4, (end + 3) // 4, unroll=1):
                for j in range_constexpr(4):
                    cute.autovec_copy(vector(from_[j] + Int64(i) * 16, Uint32, 4), held[None, j])
                for k in range_constexpr(4):
                    if self.within(4 * i + k, begin, end):
                        cute.arch.mbarrier_wait(empty + slot, phase ^ 1)
                        for j in range_constexpr(4):
                            self.put(start, slot, to[j], held[k, j] & Uint32(255))
                        self.arrive(full + slot)
                        slot, phase = self.next(slot, phase)
        else:
            ahead = cute.make_rmem_tensor(4, Uint32)
            for j in range_constexpr(4):
                ahead[j] = Uint32(vector(from_[j] + self.first_byte(begin, blocks), Uint8)[0])
            for step in cutlass.range(count, unroll=1):
                i = begin + step
                held = [ahead[j] for j in range(4)]
                for j in range_constexpr(4):
                    # Of a window beyond K, the last block's: its codes are zeros.
                    byte = cutlass.min((i + 1) * PER_LINE, blocks - 1)
                    ahead[j] = Uint32(vector(from_[j] + Int64(byte), Uint8)[0])
                cute.arch.mbarrier_wait(empty + slot, phase ^ 1)
                for j in range_constexpr(4):
                    self.put(start, slot, to[j], held[j])
                self.arrive(full + slot)
                slot, phase = self.next(slot, phase)
        return slot, phase

    @cute.jit
    def from_to(
        self, sx, sw, part: Int32, lane: Int32, row: Int32, n0: Int32, e: Int32, t: Int32,
        width: Int32, blocks: Int32,
    ):  # fmt: skip
        """Where the scales of a lane's four rows are, and which float of a stage each becomes."""
        from_ = cute.make_rmem_tensor(4, Int64)
        to = cute.make_rmem_tensor(4, Int32)
        for j in range_constexpr(4):
            r = lane + 32 * j
            if part == 0:
                from_[j] = sx.toint() + Int64(cutlass.min(row + r, t - 1)) * blocks
                to[j] = r
            else:
                n = cutlass.min(n0 + (part - 1) * 128 + r, width - 1)
                from_[j] = sw.toint() + (Int64(e) * width + n) * blocks
                # Column 8 c + 2 q + i of 128 goes to q * PITCH + 2 c + i.
                there = r // 2 % 4 * PITCH + r // 8 * 2 + r % 2
                to[j] = self.rows + (part - 1) * (4 * PITCH) + there
        return from_, to

    @cute.jit
    def put(self, start: Int32, slot: Int32, to: Int32, scale: Uint32):
        """A scale, as a float, into a stage."""
        address = start + slot * (self.floats * 4) + to * 4
        self.shared_vector(address, 1)[0] = convert.factor_of(scale)

    @cute.jit
    def arrive(self, barrier):
        """Once for the warp, when all its lanes have written."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def give_back_all(self, empty, slots: cutlass.Constexpr):
        """Stages whose products are done and whose scales all lanes have read."""
        cute.arch.sync_warp()
        for u in range_constexpr(len(slots)):
            self.give_back(empty + slots[u])

    @cute.jit
    def load_rows(self, at: Int32, left, h: cutlass.Constexpr):
        """A thread's scales of x, of 64 rows."""
        for r in range_constexpr(2):
            to = at + (64 * h + 8 * r) * 4
            left[r] = self.shared_vector(to, 1)[0]

    @cute.jit
    def load_columns(self, at: Int32, right, eighth: cutlass.Constexpr):
        """A thread's scales of W, of an eighth of its columns; of a tile the one that there is."""
        if const_expr(self.tiles):
            if const_expr(eighth == 0):
                right[0] = self.shared_vector(at, 1)[0]
        else:
            cute.autovec_copy(self.shared_vector(at + 16 * eighth, 4), right)

    @cute.jit
    def promote(
        self, sums, flat, left, right, h: cutlass.Constexpr, eighth: cutlass.Constexpr
    ):  # fmt: skip
        """Adds an eighth of a window's products, scaled, to the sums."""
        scales = [Float32(0), Float32(0)]
        if const_expr(self.tiles):
            scales = [product_of_scales(left[r], right[0]) for r in range(2)]
        for c in range_constexpr(2 * eighth, 2 * eighth + 2):
            for r in range_constexpr(2):
                for e in range_constexpr(2):
                    i: cutlass.Constexpr = 4 * c + 2 * r + e
                    if const_expr(self.by_row):
                        sums[i, h] = sums[i, h] + flat[i] * left[0]
                    elif const_expr(self.tiles):
                        sums[i, h] = sums[i, h] + flat[i] * scales[r]
                    else:
                        scaled = flat[i] * left[r]
                        sums[i, h] = sums[i, h] + scaled * right[c % 2 * 2 + e]

    @cute.jit
    def results(
        self, y: Int64, sums, row: Int32, end: Int32, column: Int32, q: Int32, width: Int32,
        result: Int32,
    ):  # fmt: skip
        """Writes a thread's part of y: rows `row`, + 8, + 64, ..., pairs of 128 columns."""
        size = self.size_in_bytes(result)
        line = Int64(width) * size
        start = y + Int64(row) * line + Int64(column) * size
        count = end - row
        whole = (width % 8 == 0) & (column + 128 <= width)
        for number in range_constexpr(len(RESULTS)):
            if (result == number) & whole:
                to = start + (8 * q if number == FLOAT32 else 16 * q)
                for h in range_constexpr(self.halves):
                    for r in range_constexpr(2):
                        packed = [
                            self.pair(sums[4 * c + 2 * r, h], sums[4 * c + 2 * r + 1, h], number)
                            for c in range(16)
                        ]
                        here = to + line * (64 * h + 8 * r)
                        if const_expr(number == FLOAT32):
                            for c in range_constexpr(16):
                                store_if(
                                    here + 32 * c, packed[c], 64 * h + 8 * r, count, self.streams
                                )
                        else:
                            # Four lanes turn four words of as many eights of columns: 16 bytes a
                            # lane.
                            for c in range_constexpr(4):
                                four = [word for (word,) in packed[4 * c : 4 * c + 4]]
                                four = self.turned(four, q)
                                store_if(here + 64 * c, four, 64 * h + 8 * r, count, self.streams)
        if not whole:
            for h in range_constexpr(self.halves):
                for r in range_constexpr(2):
                    to = start + line * (64 * h + 8 * r) + 2 * q * size
                    for c in range_constexpr(16):
                        for e in range_constexpr(2):
                            left = column + 8 * c + e + 2 * q < width
                            rows = cutlass.select_(left, count, Int32(0))
                            value = sums[4 * c + 2 * r + e, h]
                            at = to + (8 * c + e) * size
                            self.store(at, value, result, 64 * h + 8 * r, rows)

    @cute.jit
    def turned(self, words: cutlass.Constexpr, q: Int32):
        """Brings the q-th of each of four lanes' four words to lane q."""
        a, b, c, d = words
        a, b = self.swapped(a, b, q, 1)
        c, d = self.swapped(c, d, q, 1)
        a, c = self.swapped(a, c, q, 2)
        b, d = self.swapped(b, d, q, 2)
        return [a, b, c, d]

    @cute.jit
    def swapped(self, low, high, q: Int32, bit: cutlass.Constexpr):
        """Lanes with this bit give `low` for the `high` of their neighbours without it."""
        other = (q & bit) != 0
        give = cutlass.select_(other, low, high)
        got = cute.arch.shuffle_sync_bfly(give, offset=bit)
        return (
            Uint32(cutlass.select_(other, got, low)),
            Uint32(cutlass.select_(other, high, got)),
        )


class WholeRows(Windows):
    """Rows that have one scale: sums are promoted as they are, and scaled when all are there.

    Three warps bring a tile's scales, into one of two places in turn (two more barriers each, full
    and empty): they wait for `empty`, which both consumers' warps arrive at when they have read the
    place's scales, and at first is free; consumers wait for `full`, which each of the three arrives
    at. All take the same tiles, and these warps wait for no stage: each wait has its arrivals.
    """

    arrivals = 1
    by_row = True
    streams = True
    early = True
    promoted = 256
    copies = 2
    squares = ((0, 0), (1, 0))  # a warpgroup's: which 64 of the rows, which 128 of its columns
    # A 1 that the compiler does not know: it would add where the tensor cores still write.
    one_at = HEAD * 3 // 4

    def __init__(self, product: ProductKernel, arch: str, tile: Fp8Stages | None = None):
        super().__init__(product, arch, False, tile)

    def prepare(self, base, barriers) -> None:
        for i in range(self.copies):
            cute.arch.mbarrier_init(barriers + i, 3)
            cute.arch.mbarrier_init(barriers + self.copies + i, 8)
        self.shared_vector(base.toint() + self.one_at, 1)[0] = Float32(1)
        cute.arch.fence_acq_rel_cta()  # thread blocks that share copies meet without one

    @cute.jit
    def bring(
        self, sx, sw, base, full, empty, slot: Int32, phase: Int32, part: Int32, lane: Int32,
        row: Int32, n0: Int32, e: Int32, t: Int32, width: Int32, blocks: Int32, begin: Int32,
        count: Int32,
    ):  # fmt: skip
        """Into place `slot` of two."""
        first = empty + self.stages
        cute.arch.mbarrier_wait(first + self.copies + slot, phase ^ 1)
        start = base.toint() + self.scales_at
        from_, to = self.from_to(sx, sw, part, lane, row, n0, e, t, width, blocks)
        for j in range_constexpr(4):
            self.put(start, slot, to[j], Uint32(vector(from_[j], Uint8)[0]))
        self.arrive(first + slot)
        slot += 1
        if slot == self.copies:
            slot = Int32(0)
            phase = phase ^ 1
        return slot, phase

    @cute.jit
    def scale(self, sums, left, right, at_x: Int32, at_w: Int32, first, number: Int32):
        """The sums of tile `number` of this thread block, by its scales."""
        slot = number % self.copies
        shift = slot * (self.floats * 4)
        cute.arch.mbarrier_wait(first + slot, number // self.copies % 2)
        for s in range_constexpr(len(self.squares)):
            h, part = self.squares[s]
            if const_expr(s == 0 or h != self.squares[s - 1][0]):
                self.load_rows(at_x + shift, left, h)
            for eighth in range_constexpr(8):
                self.load_columns(at_w + part * (16 * PITCH) + shift, right, eighth)
                for c in range_constexpr(2 * eighth, 2 * eighth + 2):
                    for r in range_constexpr(2):
                        for e in range_constexpr(2):
                            i: cutlass.Constexpr = 4 * c + 2 * r + e
                            sums[i, s] = sums[i, s] * left[r] * right[c % 2 * 2 + e]
        self.arrive(first + self.copies + slot)


class FastRows(WholeRows):
    """Rows whose products the tensor cores add up all along K, with fewer bits than float32 has.

    A warpgroup has 64 of the tile's rows of x and all its rows of W. The products of two stages are
    under way at a time; when the older ones are done, the warps give their stage back. All roles
    walk the same tiles and stages, so each wait has its arrivals.
    """

    promoted = LINE
    squares = ((0, 0), (0, 1))

    def __init__(self, product: ProductKernel, arch: str, tile: Fp8Stages | None = None):
        super().__init__(product, arch, tile)
        self.halves = 1  # of what `results` writes at once

    @cute.jit
    def consume(
        self, sX, sW, base, full, empty, index: Int32, at, across: Int32, length: Int32,
        windows: Int32, cluster: Int32, clusters: Int32, tid: Int32, bid: Int32, grid: Int32,
        sizes, rest, y, t: Int32, groups: Int32, width: Int32, result: Int32,
    ):  # fmt: skip
        """See `Windows.consume`."""
        stages: cutlass.Constexpr = self.stages
        warp, lane = cute.arch.make_warp_uniform(tid // 32), tid % 32
        slot = Int32(0)
        phase = Int32(0)
        mine = warp // 4  # which 64 rows
        g, q = lane // 4, lane % 4
        op = warpgroup.MmaF8Op(
            *self.types, Float32, (64, self.columns, 32), warpgroup.OperandSource.SMEM,
            OperandMajorMode.K, OperandMajorMode.K,
        )  # fmt: skip
        mma = cute.make_tiled_mma(cute.make_mma_atom(op))
        mma.set(warpgroup.Field.ACCUMULATE, True)
        thread = mma.get_slice(tid % 128)
        tA = mma.make_fragment_A(
            thread.partition_A(cute.local_tile(sX, (64, LINE, stages), (mine, 0, 0)))
        )
        tB = mma.make_fragment_B(thread.partition_B(sW))
        sums = cute.make_rmem_tensor(mma.partition_shape_C((64, self.columns)), Float32)
        flat = cute.make_tensor(sums.iterator, cute.make_layout(self.columns // 2))
        squares = cute.make_tensor(sums.iterator, cute.make_layout((64, len(self.squares))))
        left = cute.make_rmem_tensor(2, Float32)
        right = cute.make_rmem_tensor(4, Float32)
        my_row = mine * 64 + warp % 4 * 16 + g
        at_x = base.toint() + self.scales_at + my_row * 4
        at_w = base.toint() + self.scales_at + self.rows * 4 + q * (PITCH * 4)
        while at[0] < groups:
            sums.fill(0.0)
            before = slot  # the stage whose products may be under way
            for i in cutlass.range(windows, unroll=1):
                cute.arch.mbarrier_wait(full + slot, phase)
                warpgroup.fence()
                for k in range_constexpr(LINE // 32):
                    a, b = tA[None, None, k, slot], tB[None, None, k, slot]
                    cute.gemm(mma, sums, a, b, sums)
                warpgroup.commit_group()
                warpgroup.wait_group(1)
                if i > 0:
                    self.give_back(empty + before)
                before = slot
                slot, phase = self.next(slot, phase)
            warpgroup.wait_group(0)
            self.give_back(empty + before)
            number = (index - cluster) // clusters
            self.scale(squares, left, right, at_x, at_w, empty + stages, number)
            row, end, n0 = self.place(index, at, across, t, width)
            first = self.before(at, t, width)
            operands: cutlass.Constexpr = dict(zip(self.epilogue, rest, strict=True))
            lines: cutlass.Constexpr = [(row + my_row + 8 * r, 2 * r) for r in range(2)]
            columns: cutlass.Constexpr = [
                (n0 + 8 * c + 2 * q + e, 4 * c + e)
                for c in range(self.columns // 8)
                for e in range(2)
            ]
            self.finish_all(operands, flat, lines, columns, at[0], end, width, first)
            for part in range_constexpr(self.columns // 128):
                column = n0 + 128 * part
                some = cute.make_tensor(flat.iterator + 64 * part, cute.make_layout((64, 1)))
                if column < width:
                    self.results(y.toint(), some, row + my_row, end, column, q, width, result)
            index += clusters
            at = self.seek(index, at, sizes, length, groups, across)
        self.clear(y, rest[-1], at[2], t, width, result, bid, grid, tid, 256)


def entries(product: ProductKernel, arch: str, tile: Fp8Stages | None = None) -> list[ProductEntry]:
    """The entries of a product's binary, the fastest first."""
    if product.window == ROW:
        rows = FastRows if product.fast else WholeRows
        return [rows(product, arch, tile), Plain(product, arch)]
    return [
        *(Windows(product, arch, vectors, tile) for vectors in (True, False)),
        Plain(product, arch),
    ]
