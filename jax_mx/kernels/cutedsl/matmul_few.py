"""y = x @ dequantize(W)^T for few rows of x: W is read at the speed of memory, by every warp alone.

`Few` computes y^T = W x^T by mma.sync, whose operands are registers: W its first, 64 rows of it a
thread block, x its second, 8 or 16 rows, which have K columns or twice as many (see matmul.py). The
warps of a thread block, and the thread blocks of a cluster, share K, and their sums meet in shared
memory. A warp has a ring of stages of its own, 64 bytes of each row, and asks for what it will want
by cp.async, across tiles too: so it waits for no other warp but where sums meet. The order of K
within a block of 32 is that in which a lane's codes are the product's operand; x is read in the
same order. Each block is added up by itself, from zero, and then added to the sums times its scale:
so W's elements need no multiplication by it.

Waiting: a warp waits for its own copies (they end), all warps of a thread block meet a few times a
tile (all take the same tiles), and all thread blocks of a cluster twice (they do, too).
"""

import dataclasses

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr, cute, range_constexpr
from cutlass.cutlass_dsl import dsl_user_op

from jax_mx.facts.formats import BLOCK
from jax_mx.facts.launch import Extent, Factor
from jax_mx.facts.products import Product
from jax_mx.facts.signatures import Array
from jax_mx.kernels.cutedsl import convert
from jax_mx.kernels.cutedsl.products import NO_ADDRESS, ProductEntry, of_block, vector

LINE = 64  # bytes of a row of W in a stage


@dsl_user_op
def copy_16(to: Int32, at: Int64, size: Int32, *, loc=None, ip=None) -> None:
    """Asks for 16 bytes of global memory; where `size` is 0, for 16 zeros."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global.L2::256B [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[Int32(to), Int64(at), Int32(size)],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def product(a: list, b: list, sums: list | None = None, *, loc=None, ip=None) -> list:
    """A lane's part of a (16, 16) times b (16, 8), in bfloat16, plus sums or zeros."""
    begin = "{ .reg .f32 z; mov.f32 z, 0f00000000; "
    added = "z, z, z, z" if sums is None else "{$r6}, {$r7}, {$r8}, {$r9}"
    return list(
        cute.arch.inline_ptx(
            begin + "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, "
            "{" + added + "}; }",
            write_only_types=[Float32] * 4,
            read_only_args=[*a, *b, *(sums or [])],
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def times_2_to_126(word: Uint32, *, loc=None, ip=None) -> Uint32:
    """Two bfloat16, exactly."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 t; mov.b32 t, 0x7e807e80; mul.rn.bf16x2 {$w0}, {$r0}, t; }",
        write_only_types=[Uint32],
        read_only_args=[word],
        loc=loc,
        ip=ip,
    )


def eights_of_e2m1(word: Uint32) -> list:
    """Eight codes as four words of bfloat16: codes i and i + 4.

    A code times 2^6 + 2^12 has its bits where a bfloat16 times 2^-126 has them.
    """
    found = []
    for half in (word, word >> Uint32(8)):
        for mask, by in ((0x000F000F, 0x1040), (0x00F000F0, 0x0104)):
            spread = (half & Uint32(mask)) * Uint32(by)
            found.append(times_2_to_126(spread & Uint32(0x81C081C0)))
    return found


@dsl_user_op
def factors_of(pair: Uint32, *, loc=None, ip=None) -> Uint32:
    """Two scales' bytes as two bfloat16: powers of two, NaN of 255; 2^-127 is subnormal."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 h, v, n, m; prmt.b32 h, {$r0}, 0, 0x4140; shl.b32 v, h, 7; "
        "add.u32 n, h, 0x00010001; shr.u32 n, n, 2; and.b32 n, n, 0x00400040; or.b32 v, v, n; "
        "mov.b32 m, 0x00400040; max.u16x2 {$w0}, v, m; }",
        write_only_types=[Uint32],
        read_only_args=[pair],
        loc=loc,
        ip=ip,
    )


@dataclasses.dataclass(frozen=True)
class Rings:
    """How a thread block goes about a tile.

    Attributes:
      stages: of each warp, 3 at least.
      resident: thread blocks of a multiprocessor.
      split: thread blocks that share K, where there are no groups.
    """

    stages: int
    resident: int = 2
    split: int = 1


class Few(ProductEntry):
    """See above; of the same kinds as `matmul.Warps`, "any" reads scales byte by byte."""

    columns = 64  # rows of W
    warps = 8
    threads = 256

    def __init__(self, product: Product, arch: str, kind: str, tile: Rings | None = None):
        super().__init__(product, arch)
        (self.format,) = product.formats
        self.rows = product.rows
        tile = tile or Rings(**self.tuned("Few"))
        self.stages, self.resident = tile.stages, tile.resident
        self.cluster = tile.split if kind == "one" else 1
        self.pairs = kind != "any"  # whether two blocks' scales are read at once
        self.per = self.format.codes_per_byte
        self.codes = LINE * self.per  # of a row in a stage
        self.blocks = self.codes // BLOCK
        self.wide = self.rows // 8  # products beside each other
        self.ring = LINE * self.columns  # bytes of a stage
        self.halves = self.blocks // 2  # words of a row's scales of a stage
        self.scales_at = self.warps * self.stages * self.ring
        self.scales_bytes = self.columns * self.halves * 4  # of a stage
        self.sums_at = self.scales_at + self.warps * self.stages * self.scales_bytes
        self.pitch = self.columns + 4
        self.summed = 4 // self.halves  # warps whose sums have a place in shared memory
        self.shared = self.sums_at + self.summed * self.rows * self.pitch * 4
        self.elements_per_thread = self.rows * self.columns // self.threads
        if self.pairs:
            self.divide = (Factor(Extent(self.signature.number("scales"), 2), 2),)

    def align_of(self, array: Array, itemsize: int) -> int:
        """Copies and loads of 16 bytes."""
        wanted = {"x": 16, "codes": 16}
        if self.pairs:
            wanted["scales"] = 2
        if self.cluster > 1:
            wanted["group_sizes"] = NO_ADDRESS
        return wanted.get(array.name) or super().align_of(array, itemsize)

    @cute.jit
    def __call__(self, pointers, scalars):
        self.kernel(pointers, scalars).launch(
            grid=[1, 1, 1],
            block=[self.threads, 1, 1],
            smem=self.shared,
            min_blocks_per_mp=self.resident,
            preferred_smem_carveout=100,  # else the compiler asks a driver
            cluster=[self.cluster, 1, 1],
        )

    @cute.kernel
    def kernel(self, pointers, scalars):
        x, w, s, sizes, y = pointers
        t, wide, groups, width, blocks, result = scalars
        if const_expr(self.cluster > 1):  # there are none: `align_of`
            sizes = cute.make_ptr(Int32, Int64(0), cute.AddressSpace.gmem, assumed_align=4)
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tid // 32)
        lane = tid % 32
        base = cute.arch.get_dyn_smem(Uint8, alignment=128).toint()
        rank = bid % self.cluster
        down = (width + self.columns - 1) // self.columns
        steps = (blocks * BLOCK + self.codes - 1) // self.codes  # stages along K
        total = wide // (blocks * BLOCK) * steps
        first = rank * total // self.cluster + warp  # of this warp, which takes every eighth
        end = (rank + 1) * total // self.cluster
        index = bid // self.cluster
        grid = grid // self.cluster
        ring = base + warp * (self.stages * self.ring)
        scales = base + self.scales_at + warp * (self.stages * self.scales_bytes)
        sums = base + self.sums_at

        at = self.start(sizes, t, groups)
        at = self.seek(index, at, sizes, t, groups, down)
        # What is asked for runs ahead of what is computed, by all stages but one.
        ahead = at
        ahead_index = index
        ahead_stage = first
        _, _, ahead_n0 = self.place(index, at, down)
        if first >= end:  # nothing for this warp
            ahead = (groups, ahead[1], ahead[2], ahead[3])
        held = cute.make_rmem_tensor(
            (self.halves, 2), Uint32
        )  # scales that are on their way to shared memory
        held.fill(0)
        slot = Int32(0)  # that is filled next
        for _ in range_constexpr(self.stages - 1):
            ahead, ahead_index, ahead_stage, ahead_n0, slot = self.fetch(
                w, s, sizes, ring, scales, held, ahead, ahead_index, ahead_stage, ahead_n0, slot,
                first, end, steps, grid, t, groups, width, blocks, down, lane,
            )  # fmt: skip
        right = cute.make_rmem_tensor((4, self.blocks, self.wide), Uint32)
        following = cute.make_rmem_tensor((4, self.blocks, self.wide), Uint32)
        acc = cute.make_rmem_tensor((4, self.wide, 4), Float32)
        begin = cutlass.min(first, total - 1)  # a warp without a stage may read another's
        row, stop = Int32(0), Int32(0)
        if at[0] < groups:
            row, stop, _ = self.place(index, at, down)
            self.load_x(x, following, row, stop, begin, steps, wide, blocks, lane)
        while at[0] < groups:
            acc.fill(0.0)
            for i in cutlass.range((end - first + self.warps - 1) // self.warps, unroll=1):
                stage = first + i * self.warps
                cute.autovec_copy(following, right)
                if stage + self.warps < end:
                    self.load_x(
                        x, following, row, stop, stage + self.warps, steps, wide, blocks, lane
                    )
                cute.arch.cp_async_wait_group(self.stages - 2)
                cute.arch.sync_warp()
                ahead, ahead_index, ahead_stage, ahead_n0, slot = self.fetch(
                    w, s, sizes, ring, scales, held, ahead, ahead_index, ahead_stage, ahead_n0,
                    slot, first, end, steps, grid, t, groups, width, blocks, down, lane,
                )  # fmt: skip
                # The stage that is asked for next time is read now.
                self.multiply(
                    acc, right, ring + slot * self.ring, scales + slot * self.scales_bytes, lane
                )
            self.lay_down(acc, sums)
            _, _, n0 = self.place(index, at, down)
            here = (row, stop, n0)
            index += grid
            at = self.seek(index, at, sizes, t, groups, down)
            if at[0] < groups:
                row, stop, _ = self.place(index, at, down)
                self.load_x(x, following, row, stop, begin, steps, wide, blocks, lane)
            self.gather(sums, y, here, width, result)
        self.clear(y, at[2], t, width, result, bid, grid, tid, self.threads)

    @cute.jit
    def next(self, slot: Int32):
        """The stage behind a stage."""
        slot += 1
        if slot == self.stages:
            slot = Int32(0)
        return slot

    @cute.jit
    def fetch(
        self, w, s, sizes, ring: Int32, scales: Int32, held, at, index: Int32, stage: Int32,
        n0: Int32, slot: Int32, first: Int32, end: Int32, steps: Int32, grid: Int32, t: Int32,
        groups: Int32, width: Int32, blocks: Int32, down: Int32, lane: Int32,
    ):  # fmt: skip
        """Asks for a stage of W and its scales; those of the one before go to shared memory.

        A lane has the scales of rows `lane` and `lane` + 32, two in a word.
        """
        before = slot - 1
        if slot == 0:
            before = Int32(self.stages - 1)
        smem = cute.AddressSpace.smem
        for r in range_constexpr(2):
            place = scales + before * self.scales_bytes + (lane + 32 * r) * (4 * self.halves)
            words = cute.make_ptr(Uint32, place, smem, assumed_align=4 * self.halves)
            factors = cute.make_rmem_tensor(self.halves, Uint32)
            for i in range_constexpr(self.halves):
                factors[i] = factors_of(held[i, r])
            cute.autovec_copy(factors, cute.make_tensor(words, cute.make_layout(self.halves)))
        if at[0] < groups:
            column, _ = self.column_of(stage, steps)
            line = blocks * (BLOCK // self.per)
            g, q = lane // 4, lane % 4
            byte = column * LINE + q * 16
            size = Int32(16)
            if byte >= line:
                size = Int32(0)
                byte = Int32(0)
            to = ring + slot * self.ring + g * LINE + (q ^ self.key(g)) * 16
            matrix = Int64(at[0]) * width
            start = w.toint() + matrix * line + byte
            for c in range_constexpr(8):
                row = cutlass.min(n0 + 8 * c + g, width - 1)
                copy_16(to + c * (8 * LINE), start + Int64(row) * Int64(line), size)
            start = s.toint() + matrix * blocks
            for r in range_constexpr(2):
                row = cutlass.min(n0 + lane + 32 * r, width - 1)
                of_row = start + Int64(row) * Int64(blocks)
                self.scales_of(of_row, column * self.blocks, blocks, held[None, r])
            stage += self.warps
            if stage >= end:
                stage = first
                index += grid
                at = self.seek(index, at, sizes, t, groups, down)
                _, _, n0 = self.place(index, at, down)
        cute.arch.cp_async_commit_group()
        return at, index, stage, n0, self.next(slot)

    @cute.jit
    def column_of(self, stage: Int32, steps: Int32):
        """Which stage of K one is, and whether of x's second part."""
        second = Int32(0)
        if stage >= steps:
            second = Int32(1)
        return stage - second * steps, second

    @cute.jit
    def scales_of(self, row: Int64, block: Int32, blocks: Int32, to):
        """Bytes of a stage's blocks, by twos; beyond K, where codes are zeros, of others."""
        for i in range_constexpr(self.halves):
            if const_expr(self.pairs):
                at = row + cutlass.min(block + 2 * i, blocks - 2)
                to[i] = Uint32(vector(at, cutlass.Uint16)[0])
            else:
                low, high = (
                    vector(row + cutlass.min(block + 2 * i + j, blocks - 1), Uint8)[0]
                    for j in range(2)
                )
                to[i] = Uint32(low) | (Uint32(high) << Uint32(8))

    def key(self, g: Int32):
        """What the 16-byte pieces of row g are permuted by, so that lanes read other banks."""
        return g // 2 % 2 * 2 if self.per == 1 else g // 2 % 4

    @cute.jit
    def load_x(
        self, x, to, row: Int32, stop: Int32, stage: Int32, steps: Int32, wide: Int32,
        blocks: Int32, lane: Int32,
    ):  # fmt: skip
        """A lane's eight elements of each block of a stage, of one row in eight; zeros beyond K."""
        g, q = lane // 4, lane % 4
        column, second = self.column_of(stage, steps)
        column = column * self.blocks
        start = x.toint() + Int64((second * blocks + column) * BLOCK + 8 * q) * 2
        for c in range_constexpr(self.wide):
            line = start + Int64(cutlass.min(row + 8 * c + g, stop - 1)) * Int64(2 * wide)
            for b in range_constexpr(self.blocks):
                at = line + 2 * BLOCK * b
                for i in range_constexpr(4):
                    to[i, b, c] = Uint32(0)
                if column + b < blocks:
                    cute.autovec_copy(vector(at, Uint32, 4), to[None, b, c])

    @cute.jit
    def multiply(self, acc, right, ring: Int32, scales: Int32, lane: Int32):
        """Adds the products of a stage to the sums, a block after the other."""
        g, q = lane // 4, lane % 4
        smem = cute.AddressSpace.smem
        count: cutlass.Constexpr = 2 // self.per  # words of a lane's codes of a block
        factors = cute.make_rmem_tensor((2, 4), Uint32)
        for b in range_constexpr(self.blocks):
            if const_expr(b % 2 == 0):  # those of two blocks
                for m in range_constexpr(4):
                    for r in range_constexpr(2):
                        place = scales + ((16 * m + 8 * r + g) * self.halves + b // 2) * 4
                        from_ = cute.make_ptr(Uint32, place, smem, assumed_align=4)
                        factors[r, m] = cute.make_tensor(from_, cute.make_layout(1))[0]
            operands = [self.right_of(right, b, c) for c in range(self.wide)]
            chunk = 32 // self.per * b + 8 // self.per * q  # byte of the row
            for m in range_constexpr(4):
                codes = cute.make_rmem_tensor((count, 2), Uint32)
                for r in range_constexpr(2):
                    place = ring + (16 * m + 8 * r + g) * LINE
                    place += (chunk // 16 ^ self.key(g)) * 16 + chunk % 16
                    from_ = cute.make_ptr(Uint32, place, smem, assumed_align=4 * count)
                    cute.autovec_copy(
                        cute.make_tensor(from_, cute.make_layout(count)), codes[None, r]
                    )
                # Of each row four words: the operands of two products.
                left = [self.left_of(codes, r) for r in range(2)]
                scale = [self.factor_of(factors[r, m], b % 2) for r in range(2)]
                for c in range_constexpr(self.wide):
                    part = None
                    for k in range_constexpr(2):
                        a = [left[r][2 * k + h] for h in range(2) for r in range(2)]
                        part = product(a, operands[c][2 * k : 2 * k + 2], part)
                    for v in range_constexpr(4):
                        acc[v, c, m] = acc[v, c, m] + part[v] * scale[v // 2]

    @staticmethod
    def factor_of(pair: Uint32, which: int) -> Float32:
        """One of two factors, as a float."""
        bits = pair & Uint32(0xFFFF0000) if which else pair << Uint32(16)
        return convert.bits_to_float(bits)

    def right_of(self, right, b: int, c: int) -> list:
        """A lane's eight elements of x in the order of its codes."""
        words = [right[i, b, c] for i in range(4)]
        if self.per == 1:
            return words
        return [
            convert.bytes_of(words[i], words[i + 2], select)
            for i in range(2)
            for select in (0x5410, 0x7632)
        ]

    def left_of(self, codes, r: int) -> list:
        """A lane's eight codes of a row as four words of bfloat16."""
        if self.per == 2:
            return eights_of_e2m1(codes[0, r])
        to = convert.Conversion("bfloat16", self.format, self.arch)
        floats = [value for i in range(2) for value in convert.unpack_four(codes[i, r], to)]
        return convert.round_all(floats, "bfloat16")

    @cute.jit
    def meet(self):
        """All threads that share a tile."""
        if const_expr(self.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def lay_down(self, acc, sums: Int32):
        """Adds up warps' sums in the places that there are, always in one order."""
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(tid // 32)
        g, q = tid % 32 // 4, tid % 4
        start = sums + warp % self.summed * (self.rows * self.pitch * 4)
        place = cute.make_ptr(Float32, start, cute.AddressSpace.smem, assumed_align=16)
        mine = cute.make_tensor(
            place, cute.make_layout((self.rows, self.columns), stride=(self.pitch, 1))
        )
        rounds: cutlass.Constexpr = self.warps // self.summed
        for i in range_constexpr(rounds):
            if warp // self.summed == i:
                for m in range_constexpr(4):
                    for c in range_constexpr(self.wide):
                        for v in range_constexpr(4):
                            at = (8 * c + 2 * q + v % 2, 16 * m + 8 * (v // 2) + g)
                            before = mine[at] if i else Float32(0)
                            mine[at] = before + acc[v, c, m]
            if const_expr(i < rounds - 1):
                cute.arch.sync_threads()
        self.meet()

    @cute.jit
    def gather(self, sums: Int32, y, here, width: Int32, result: Int32):
        """Adds up what lies in all places, always in one order, and writes y."""
        row, stop, n0 = here
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        rank = bid % self.cluster
        size = self.rows * self.pitch
        bytes_ = self.size_in_bytes(result)
        share: cutlass.Constexpr = self.rows // self.cluster
        items: cutlass.Constexpr = share * self.columns // 2  # pairs
        for i in range_constexpr((items + self.threads - 1) // self.threads):
            item = i * self.threads + tid
            m = rank * share + item // (self.columns // 2)
            n = item % (self.columns // 2) * 2
            low, high = Float32(0), Float32(0)
            if item < items:
                for other in range_constexpr(self.cluster):
                    for part in range_constexpr(self.summed):
                        one, two = self.pair_of(
                            sums + (part * size + m * self.pitch + n) * 4, other
                        )
                        low += one
                        high += two
            to = y.toint() + (Int64(row + m) * width + n0 + n) * bytes_
            rows = cutlass.select_((row + m < stop) & (item < items), Int32(1), Int32(0))
            first = cutlass.select_(n0 + n < width, rows, Int32(0))
            second = cutlass.select_(n0 + n + 1 < width, rows, Int32(0))
            self.store(to, low, result, 0, first)
            self.store(to + bytes_, high, result, 0, second)
        self.meet()  # before the next tile's sums are written over these

    def pair_of(self, place: Int32, other: int):
        """Two floats of a thread block's shared memory."""
        if self.cluster > 1:
            return of_block(place, other)
        from_ = cute.make_ptr(Float32, place, cute.AddressSpace.smem, assumed_align=8)
        two = cute.make_rmem_tensor(2, Float32)
        cute.autovec_copy(cute.make_tensor(from_, cute.make_layout(2)), two)
        return two[0], two[1]
