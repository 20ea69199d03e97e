"""y = x @ dequantize(W)^T on Hopper: W's codes become bfloat16 on the way to the tensor cores.

`Warps` computes y^T = W x^T: W is wgmma's first operand, from registers, and x its second, from
shared memory, where TMA puts both. Two warpgroups have 64 rows of W each; a warp of a third asks
for the copies. TMA writes zeros for places beyond an array, so any size of x, W and K will do.

x may have several times K columns: x = [a | b] gives (a + b) @ W^T, for an x of more bits than
bfloat16 has, cut into such parts.

The order of events, for a stage of shared memory (barriers full and empty, a phase bit each):
the producer waits for `empty` (consumers gave the stage back; at first it is free by the inverted
phase), arms `full` with the bytes of its copies, and asks for them. Both consumers wait for `full`,
which TMA completes. Each consumer warp arrives at `empty` when its products of that stage are done:
as soon as the next stage is converted, or after the last one. All three walk the same tiles and
stages, so each wait has its arrival: no role waits for what it gives itself, and the producer is
never further ahead than there are stages.

Two thread blocks of a cluster may have tiles beside each other ("shared"): each asks for half of
x's copies, which write into both. So `full` counts the bytes of both blocks' copies, and consumers
arrive at both blocks' `empty`. Both blocks take the same stages of the same tiles, and meet before
the first copy and before they end.
"""

import dataclasses

import cutlass
from cutlass import (
    BFloat16,
    Float32,
    Int32,
    Int64,
    Uint8,
    Uint32,
    const_expr,
    cute,
    range_constexpr,
)
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from jax_mx.formats.formats import BLOCK
from jax_mx.launch.rule import Factor
from jax_mx.products.cutedsl.pipelines import Pipeline
from jax_mx.products.cutedsl.products import HEAD, NO_ADDRESS, element, load_shared, store_if
from jax_mx.quantizing.facts.product_kernels import RESULTS, ProductKernel
from jax_mx.quantizing.facts.signatures import EPILOGUE, Array
from jax_mx.quantizing.kernels.cutedsl import convert
from jax_mx.quantizing.kernels.cutedsl.kernel import mapped, two_of_block

LINE = 64  # bytes of a row of W in a stage


@dataclasses.dataclass(frozen=True)
class CodeStages:
    """How a thread block, or several, go about a tile.

    Attributes:
      stages: of shared memory.
      resident: thread blocks of a multiprocessor.
      split: thread blocks that share K, where there are none and tiles do not suffice.
      again: whether a thread waits for a stage again when it converts the stage, which takes no
        time. The compiler moves nothing over that loop. Without it, it converts when the products
        of the stage before are done, not while they are under way.
      strip: how many tiles beside each other, or pairs of those that share copies, are taken before
        those below; 0: all.
      share: whether two thread blocks of a cluster, with tiles beside each other, share the copies
        of x: half as much of it is read from L2.
      turns: whether the two warpgroups ask for products in turns: while one's are under way, the
        other converts.
    """

    stages: int
    resident: int = 1
    split: int = 1
    again: bool = False
    strip: int = 0
    share: bool = False
    turns: bool = False


class Warps(Pipeline):
    """See above.

    There are four cases. "one" is for products without groups, whose K several thread blocks may
    share. "shared" is for a W of whole pairs of tiles, where two thread blocks share the copies of
    x. "groups" is for all other products whose scales of a stage can be read as a word; "any" reads
    them byte by byte.
    """

    columns = 128
    unit = BLOCK  # that K is a multiple of

    def __init__(self, product: ProductKernel, arch: str, case: str, tile=None):
        super().__init__(product, arch)
        vectors = case != "any"
        (self.format,) = product.formats
        self.vectors = vectors
        self.rows = product.rows
        tile = tile or CodeStages(**self.tuned("Warps"))
        self.stages, self.again = tile.stages, tile.again
        self.resident = tile.resident if vectors else 1
        self.split = tile.split if case == "one" else 1
        self.beside = 2 if case == "shared" else 1
        # Copies of x in a stage, also of entries that share none: all entries have one tensor map.
        self.x_boxes = 2 if tile.share else 1
        self.strip, self.turns = tile.strip, tile.turns
        # Registers go from one warpgroup to others; of several blocks none has too many.
        self.threads = 384 if self.resident == 1 else 288
        self.per = self.format.codes_per_byte
        self.codes = LINE * self.per  # of a row of W in a stage
        self.blocks = self.codes // BLOCK
        self.box = self.box_of_w()
        self.w_bytes = LINE * 128
        self.x_bytes = self.rows * 128  # of a box of 64 columns
        self.stage_bytes = self.w_bytes + self.per * self.x_bytes
        self.x_at = HEAD + self.stages * self.w_bytes
        self.shared = self.x_at + self.stages * self.per * self.x_bytes
        self.sums_at, self.pitch = self.shared, self.columns + 4
        if self.split > 1:
            self.shared += self.rows * self.pitch * 4
        self.elements_per_thread = self.rows // 2
        self.words = 1 if vectors else self.blocks  # that a row's scales of a stage are read as
        self.bits = {64: 2, 128: 3}[self.box[1]]  # of TMA's swizzle
        self.maps = (
            self.matrix_map("codes", "uint8", 1, (*self.box[::-1], 1), self.box[1]),
            self.matrix_map("x", "bfloat16", 2, (64, self.rows // self.x_boxes), 128),
        )
        *_, high, blocks = self.extents
        if vectors:
            self.divide = (Factor(blocks, self.blocks),)
        if case == "shared":
            self.divide += (Factor(high, 256),)

    def align_of(self, array: Array, itemsize: int) -> int:
        """TMA wants 16 bytes; y is written in pairs."""
        wanted = {"x": 16, "codes": 16, "y": 2 * itemsize}
        if self.vectors:
            wanted["scales"] = self.blocks
        if self.split > 1:
            wanted["group_sizes"] = NO_ADDRESS
        return wanted.get(array.name) or super().align_of(array, itemsize)

    def box_of_w(self) -> tuple[int, int]:
        """Rows of W in a stage, and the bytes of each."""
        return self.columns, LINE

    @cute.jit
    def __call__(self, pointers, scalars):
        arrays = self.signature.named(pointers)
        x, w, s, y = (arrays[name] for name in ("x", "codes", "scales", "y"))
        t, wide, groups, width, blocks, result = scalars
        line = blocks * (BLOCK // self.per)
        stride = cute.assume(Int64(line), 16)
        slab = cute.assume(Int64(line) * width, 16)
        mW = cute.make_tensor(w, cute.make_layout((width, line, groups), stride=(stride, 1, slab)))
        mX = cute.make_tensor(
            x, cute.make_layout((t, wide), stride=(cute.assume(Int64(wide), self.unit), 1))
        )
        tile_w = cute.make_composed_layout(
            cute.make_swizzle(self.bits, 4, 3),
            0,
            cute.make_layout(self.box, stride=(self.box[1], 1)),
        )
        copy = cpasync.CopyBulkTensorTileG2SOp()
        aw, mW = cpasync.make_tiled_tma_atom(copy, mW, tile_w, self.box)
        ax, mX = self.copy_atom(mX, self.rows // self.x_boxes, self.beside)
        epilogue = tuple(arrays[name] for name in EPILOGUE)
        self.kernel(
            aw,
            mW,
            ax,
            mX,
            s,
            arrays["group_sizes"],
            epilogue,
            y,
            t,
            wide,
            groups,
            width,
            blocks,
            result,
        ).launch(
            grid=[1, 1, 1],
            block=[self.threads, 1, 1],
            smem=self.shared,
            min_blocks_per_mp=self.resident,
            preferred_smem_carveout=100,  # else the compiler asks a driver
            cluster=[self.cluster, 1, 1],
        )

    @cute.kernel
    def kernel(
        self, aw: cute.CopyAtom, mW: cute.Tensor, ax: cute.CopyAtom, mX: cute.Tensor,
        s: cute.Pointer, sizes: cute.Pointer, epilogue: tuple, y: cute.Pointer,
        t: Int32, wide: Int32, groups: Int32, width: Int32, blocks: Int32, result: Int32,
    ):  # fmt: skip
        n: cutlass.Constexpr = self.rows
        stages: cutlass.Constexpr = self.stages
        tid, bid, grid, warp, lane = self.places()
        base, full, empty = self.barriers()
        smem = cute.AddressSpace.smem
        pw = cute.make_ptr(Uint8, (base + HEAD).toint(), smem, assumed_align=1024)
        px = cute.make_ptr(BFloat16, (base + self.x_at).toint(), smem, assumed_align=1024)
        sW = cute.make_tensor(
            cute.recast_ptr(pw, cute.make_swizzle(self.bits, 4, 3), dtype=Uint8),
            cute.make_layout((*self.box, stages), stride=(self.box[1], 1, self.w_bytes)),
        )
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        layout = cute.tile_to_shape(atom, (n, 64, stages * self.per), order=(0, 1, 2))
        sX = cute.make_tensor(cute.recast_ptr(px, layout.inner, dtype=BFloat16), layout.outer)
        into = self.copied(base, self.x_at, BFloat16, n, self.x_boxes, stages * self.per)
        self.begin(tid, base, full, empty)

        high = width  # rows of W
        width, deep = self.lengths(high, blocks)
        both: cutlass.Constexpr = self.columns * self.beside
        across = (width + both - 1) // both
        steps = (deep + self.codes - 1) // self.codes  # stages along K
        total = wide // deep * steps
        parts = self.parts(groups * self.pieces(t // groups) * across, grid)  # that share a tile
        rank = self.rank(bid, parts)
        start = rank * total // parts
        count = (rank + 1) * total // parts - start
        index = bid // parts // self.sharing
        clusters = grid // parts // self.sharing
        at = self.start(sizes, t, groups)
        at = self.seek(index, at, sizes, t, groups, across)
        slot = Int32(0)
        phase = Int32(0)
        if warp >= 8:
            if const_expr(self.resident == 1):
                cute.arch.setmaxregister_decrease(40)
            if warp == 8:
                one = cute.make_layout(1)
                while at[0] < groups:
                    row, end, n0 = self.place(index, at, across)
                    gW = self.tiles_of_w(mW[None, None, at[0]], n0)
                    tsW, tgW = cpasync.tma_partition(
                        aw, 0, one, cute.group_modes(sW, 0, 2), cute.group_modes(gW, 0, 2)
                    )
                    column = start % steps  # stage along K
                    left = start // steps * deep  # first column of x of this pass
                    for _ in cutlass.range(count, unroll=1):
                        tsX, tgX = self.partition(ax, mX, into, row, left + column * self.codes)
                        cute.arch.mbarrier_wait(empty + slot, phase ^ 1)
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive_and_expect_tx(full + slot, self.stage_bytes)
                        self.copy(aw, tgW[None, column], tsW[None, slot], full + slot, 1)
                        for b in range_constexpr(self.per):
                            to = slot * self.per + b
                            for box in range_constexpr(self.x_boxes // self.beside):
                                its = box + self.part(self.beside)
                                self.copy(
                                    ax, tgX[None, its, b], tsX[None, its, to], full + slot,
                                    self.beside,
                                )  # fmt: skip
                        column += 1
                        if column == steps:
                            column = Int32(0)
                            left += deep
                        slot, phase = self.next(slot, phase)
                    index += clusters
                    at = self.seek(index, at, sizes, t, groups, across)
                    self.meet(parts)
                    self.meet(parts)
            elif const_expr(self.arrivals > 1):
                turn = Int32(0)
                while at[0] < groups:
                    _, _, n0 = self.place(index, at, across)
                    slot, phase, turn = self.bring(
                        s, base, full, empty, slot, phase, turn, warp - 9, lane, n0, at[0], high,
                        blocks, steps, count,
                    )  # fmt: skip
                    index += clusters
                    at = self.seek(index, at, sizes, t, groups, across)
        else:
            if const_expr(self.resident == 1):
                cute.arch.setmaxregister_increase(232)
            q = lane % 4
            first, apart, flip, places = self.lanes(base, warp, lane)
            mma = cute.make_tiled_mma(
                cute.make_mma_atom(
                    warpgroup.MmaF16BF16Op(
                        BFloat16,
                        Float32,
                        (64, n, 16),
                        warpgroup.OperandSource.RMEM,
                        OperandMajorMode.K,
                        OperandMajorMode.K,
                    )
                )
            )
            mma.set(warpgroup.Field.ACCUMULATE, True)
            tB = mma.make_fragment_B(mma.get_slice(tid % 128).partition_B(sX))
            # Two banks: one is written while the products of the other are under way. (Of codes of
            # four bits, boxes go 0, 1, 1, 0: the compiler has other registers for the third.)
            fragment = cute.make_rmem_tensor(cute.make_layout(((2, 2, 2), 1, 4, 2)), BFloat16)
            fragment_words = cute.recast_tensor(fragment, Uint32)
            acc = cute.make_rmem_tensor(mma.partition_shape_C((64, n)), Float32)
            flat = cute.make_tensor(acc.iterator, cute.make_layout(n // 2))
            self.begin_turns(warp // 4)
            scales = cute.make_rmem_tensor((self.words, 2), Uint32)
            ahead = cute.make_rmem_tensor((self.words, 2), Uint32)
            tile_arguments = (s, groups, across, first, apart, width, blocks, start % steps, ahead)
            row, end, n0, rows = self.begin_tile(index, at, *tile_arguments)
            while at[0] < groups:
                if const_expr(not self.vectors):
                    row, end, n0, rows = self.begin_tile(index, at, *tile_arguments)
                acc.fill(0.0)
                column = start % steps
                before = slot  # the stage whose products may be under way
                for i in cutlass.range(count // 2, unroll=1):
                    for bank in range_constexpr(2):
                        column += 1
                        if column == steps:
                            column = Int32(0)
                        cute.autovec_copy(ahead, scales)
                        self.scales(s, rows, column, blocks, ahead)
                        self.stage(
                            mma, acc, fragment, fragment_words, tB, places, apart, scales, full,
                            empty, slot, phase, before, bank, (i > 0) | (bank > 0), warp // 4,
                        )  # fmt: skip
                        before = slot
                        slot, phase = self.next(slot, phase)
                if count % 2 == 1:
                    self.stage(
                        mma, acc, fragment, fragment_words, tB, places, apart, ahead, full, empty,
                        slot, phase, before, 0, count > 1, warp // 4,
                    )  # fmt: skip
                    before = slot
                    slot, phase = self.next(slot, phase)
                warpgroup.wait_group(0)
                if count > 0:
                    self.give_back(empty + before)
                tile = (row, end, n0, at[0])
                lane_position = (q, first, apart, flip)
                index += clusters
                at = self.seek(index, at, sizes, t, groups, across)
                # The next tile's first scales are on their way while this one's sums are written;
                # where they come byte by byte, there are too few registers for that.
                if const_expr(self.vectors):
                    row, end, n0, rows = self.begin_tile(index, at, *tile_arguments)
                if const_expr(self.split > 1):
                    if parts > 1:
                        part = base.toint() + self.sums_at
                        self.lay_down(part, flat, 2 * q, first, apart)
                        self.meet(parts)
                        self.gather(part, epilogue, y, rank, tid, tile, width, result)
                        self.meet(parts)  # before the next tile's sums are written over these
                    else:
                        self.alone(epilogue, y, flat, tile, lane_position, width, result)
                else:
                    self.alone(epilogue, y, flat, tile, lane_position, width, result)
            self.end_turns(warp // 4)
            self.clear(y, epilogue[-1], at[2], t, width, result, bid, grid, tid, 256)
        self.leave()

    @cute.jit
    def begin_tile(
        self, index: Int32, at, s, groups: Int32, across: Int32, first: Int32, apart: Int32,
        width: Int32, blocks: Int32, column: Int32, ahead,
    ):  # fmt: skip
        """The place of a tile and of its rows' scales; asks for the scales of its stage `column`.

        Behind the last tile nothing is read, and no length that `place` divides by may be 0.
        """
        e, tile, row, size = at
        index = Int32(cutlass.select_(e < groups, index, tile))
        row, end, n0 = self.place(index, (e, tile, row, cutlass.max(size, Int32(1))), across)
        rows = self.rows_of_scales(e, n0, first, apart, width, blocks)
        if e < groups:
            self.scales(s, rows, column, blocks, ahead)
        return row, end, n0, rows

    # ---- how W lies; `Free` has other answers ---
    def lengths(self, high: Int32, blocks: Int32):
        """How many columns y has, and how many elements of x a product sums."""
        return high, blocks * BLOCK

    def tiles_of_w(self, matrix, n0: Int32):
        """The boxes of a tile of W, one after the other along K."""
        return cute.local_tile(cute.domain_offset((n0, 0), matrix), self.box, (0, None))

    def lanes(self, base, warp: Int32, lane: Int32):
        """The two rows of W's tile that a lane has, and the places of their codes.

        Rows g and g + 8 of a warp's product are rows 2g and 2g + 1 of W, swapped for g >= 4. So no
        two lanes read the same bank, and a lane has neighbours of y.
        """
        g, q = lane // 4, lane % 4
        flip = g // 4
        first = warp * 16 + 2 * g + flip
        apart = 1 - 2 * flip  # from the one row to the other
        swizzled = first // 2 % 4
        here = (base + HEAD).toint() + first * LINE + q * (2 // self.per)
        places = [Uint32(here + ((swizzled ^ c) << 4)) for c in range(4)]
        return first, apart, flip, places

    def rows_of_scales(self, e, n0, first, apart, width, blocks) -> list:
        """Where the scales of a lane's two rows begin."""
        mine = [cutlass.min(n0 + first + r * apart, width - 1) for r in range(2)]
        return [(Int64(e) * width + mine[r]) * blocks for r in range(2)]

    @cute.jit
    def scales(self, s, rows, column: Int32, blocks: Int32, out):
        """The scales of a stage's blocks, of both rows, as they come: their reader waits.

        Blocks beyond K have the scale of the last one.
        """
        for r in range_constexpr(2):
            if const_expr(self.vectors):
                word_type: cutlass.Constexpr = {2: cutlass.Uint16, 4: Uint32}[self.blocks]
                word = rows[r] // self.blocks + column
                out[0, r] = Uint32(element(s, word, word_type))
            else:
                for b in range_constexpr(self.blocks):
                    block = cutlass.min(column * self.blocks + b, blocks - 1)
                    out[b, r] = Uint32(element(s, rows[r] + block, Uint8))

    def scale(self, scales, block: int, row: int) -> Uint32:
        """One of them."""
        if self.vectors:
            return (scales[0, row] >> Uint32(8 * block)) & Uint32(255)
        return scales[block, row]

    @cute.jit
    def stage(
        self, mma, acc, fragment, words, tB, places, apart: Int32, scales, full, empty,
        slot: Int32, phase: Int32, before: Int32, bank: cutlass.Constexpr, behind, mine: Int32,
    ):  # fmt: skip
        """Converts a stage while the products of the one before are under way; asks for its own.

        It converts 64 columns at a time: there are too few registers for more.
        """
        cute.arch.mbarrier_wait(full + slot, phase)
        for box in range_constexpr(self.per):
            into: cutlass.Constexpr = (bank + box) % 2
            self.fill(words, places, apart, scales, slot, box, into)
            if const_expr(self.again):
                cute.arch.mbarrier_wait(full + slot, phase)
            warpgroup.wait_group(0)
            if const_expr(box == 0):
                if behind:
                    self.give_back(empty + before)
            self.take_turn(mine)
            warpgroup.fence()
            for k in range_constexpr(4):
                right = tB[None, None, k, slot * self.per + box]
                cute.gemm(mma, acc, fragment[None, None, k, into], right, acc)
            warpgroup.commit_group()
            self.pass_turn(mine)

    @cute.jit
    def fill(
        self, words, places, apart: Int32, scales, slot: Int32, box: cutlass.Constexpr,
        into: cutlass.Constexpr,
    ):  # fmt: skip
        """A lane's part of 64 columns of W into one of the banks."""
        bits: cutlass.Constexpr = 16 // self.per
        shift = Uint32(slot * self.w_bytes)
        held = cute.make_rmem_tensor((2, 2, 4), Uint32)
        for k in range_constexpr(4):
            for r in range_constexpr(2):
                for h in range_constexpr(2):
                    byte: cutlass.Constexpr = (64 * box + 16 * k + 8 * h) // self.per
                    at = places[byte // 16] + shift + Uint32(r * apart * LINE)
                    held[h, r, k] = load_shared(at + Uint32(byte % 16), bits)
        for k in range_constexpr(4):
            for r in range_constexpr(2):
                scale = self.scale(scales, (64 * box + 16 * k) // BLOCK, r)
                factor = convert.factor_of(scale)
                both = self.dequantized(held[0, r, k], held[1, r, k], factor)
                for h in range_constexpr(2):
                    words[(0, r, h), 0, k, into] = both[h]

    def dequantized(self, low: Uint32, high: Uint32, factor: Float32) -> list:
        """Two pairs of codes as two words of bfloat16."""
        bits = convert.float_to_bits(factor)
        factors = convert.pair(bits, bits)
        if self.per == 1:
            to = convert.Conversion("bfloat16", self.format, self.arch)
            return convert.dequantized_pairs([low | (high << Uint32(16))], [factors] * 2, to)
        return [convert.byte_of_e2m1(byte, factors, self.arch) for byte in (low, high)]

    @cute.jit
    def meet(self, parts: Int32):
        """All threads of a cluster that have not ended; each role comes here twice a tile.

        None waits for another on the way: the copies of a tile are asked for before, and its
        stages given back.
        """
        if parts > 1:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def lay_down(self, part: Int32, flat, row: Int32, column: Int32, apart: Int32):
        """A thread's sums of its share of K into shared memory, by rows of y."""
        smem = cute.AddressSpace.smem
        to = cute.make_tensor(
            cute.make_ptr(Float32, part, smem, assumed_align=16),
            cute.make_layout((self.rows, self.pitch), stride=(self.pitch, 1)),
        )
        for c in range_constexpr(self.rows // 8):
            for h in range_constexpr(2):
                to[row + 8 * c + h, column] = flat[4 * c + h]
                to[row + 8 * c + h, column + apart] = flat[4 * c + h + 2]

    @cute.jit
    def gather(
        self, part: Int32, epilogue, y, rank: Int32, tid: Int32, tile, width: Int32, result: Int32
    ):  # fmt: skip
        """Adds up all thread blocks' sums for this one's share of the rows; always in one order."""
        row, end, n0, e = tile
        size = self.size_in_bytes(result)
        share: cutlass.Constexpr = self.rows // self.split
        items: cutlass.Constexpr = share * self.columns // 2  # pairs
        for i in range_constexpr((items + 255) // 256):
            item = i * 256 + tid
            m = rank * share + item // (self.columns // 2)
            n = item % (self.columns // 2) * 2
            low, high = Float32(0), Float32(0)
            if item < items:
                for other in range_constexpr(self.split):
                    a, b = two_of_block(mapped(part + (m * self.pitch + n) * 4, other))
                    low += a
                    high += b
            to = y.toint() + (Int64(row + m) * width + n0 + n) * size
            rows = cutlass.select_((row + m < end) & (item < items), Int32(1), Int32(0))
            first = cutlass.select_(n0 + n < width, rows, Int32(0))
            second = cutlass.select_(n0 + n + 1 < width, rows, Int32(0))
            mine = cutlass.min(row + m, end - 1)
            for i, (sum_, left) in enumerate(((low, first), (high, second))):
                its = cutlass.min(n0 + n + i, width - 1)
                total = self.finished(epilogue, sum_, e, mine, its, width)
                self.store(to + i * size, total, result, 0, left)

    def alone(self, epilogue, y, flat, tile, lane_position, width: Int32, result: Int32):
        """Writes a thread's part of y, of a tile that no other thread block shares."""
        row, end, n0, e = tile
        q, first, apart, flip = lane_position
        column = n0 + first - flip
        rows = [(row + 2 * q + 8 * c + h, 4 * c + h) for c in range(self.rows // 8) for h in (0, 1)]
        columns = [(n0 + first, 0), (n0 + first + apart, 2)]
        operands = dict(zip(EPILOGUE, epilogue, strict=True))
        self.finish_all(operands, flat, rows, columns, e, end, width, Int64(0))
        self.results(y, flat, row + 2 * q, end, column, flip, width, result)

    @cute.jit
    def results(
        self, y, flat, row: Int32, end: Int32, column: Int32, flip: Int32, width: Int32,
        result: Int32,
    ):  # fmt: skip
        """Writes a thread's part of y: rows `row` + 8 c and `row` + 8 c + 1, two columns each."""
        size = self.size_in_bytes(result)
        line = Int64(width) * size
        start = y.toint() + Int64(row) * line + Int64(column) * size
        count = end - row  # of rows that are this group's
        for dtype_number in range_constexpr(len(RESULTS)):
            if (result == dtype_number) & (width % 2 == 0) & (column < width):
                to = start
                for c in range_constexpr(self.rows // 8):
                    for h in range_constexpr(2):
                        one, other = flat[4 * c + h], flat[4 * c + h + 2]
                        low = Float32(cutlass.select_(flip == 1, other, one))
                        high = Float32(cutlass.select_(flip == 1, one, other))
                        packed = self.pair(low, high, dtype_number)
                        store_if(to + line * h, packed, 8 * c + h, count)
                    to += 8 * line
        if width % 2 == 1:
            to = start
            first = cutlass.select_(column < width, count, Int32(0))
            second = cutlass.select_(column + 1 < width, count, Int32(0))
            for c in range_constexpr(self.rows // 8):
                for h in range_constexpr(2):
                    one, other = flat[4 * c + h], flat[4 * c + h + 2]
                    low = Float32(cutlass.select_(flip == 1, other, one))
                    high = Float32(cutlass.select_(flip == 1, one, other))
                    self.store(to + line * h, low, result, 8 * c + h, first)
                    self.store(to + line * h + size, high, result, 8 * c + h, second)
                to += 8 * line
