"""y = x @ dequantize(W)^T for few rows of x: W is read at the speed of memory, by every warp alone.

`Few` computes y^T = W x^T by mma.sync, whose operands are registers. The first is W, 64 rows of it
a thread block. The second is x, 8 or 16 rows, which have K columns or twice as many (see
matmul_many.py). The warps of a thread block share K. With too few tiles for all, the thread blocks
of a cluster share K too. A warp has a ring of stages of its own, 64 bytes of each row, and asks for
later data by cp.async, across tiles too. So it waits for other warps only where sums meet. These
meet in shared memory: a warp's sums lie in the stage that it has read last and not yet asked for
anew.

The order of K is that in which a lane's codes are the product's operand; x is read in the same
order. `Few` takes a block of 32 at a time, adds it up by itself, from zero, and then to the sums,
times its scale: so W's elements need no multiplication by it. `Nibbles` is for codes of four bits,
whose elements need a multiplication anyway. It multiplies by the scale, too, and so a lane may have
16 bytes, a block of its own.

A launch may start before the one ahead of it in the same call has ended, which writes x. It asks
for its first stages, then it waits for that. With an activation a tile has as many rows of gates as
of ups.

Waiting: a warp waits for its own copies (they end); all warps of a thread block meet twice a tile,
or once and then all of the cluster that shares it, and all of them take the same tiles.
"""

import dataclasses

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr, cute, range_constexpr

from jax_mx.formats.formats import BLOCK
from jax_mx.launch.rule import Extent, Factor
from jax_mx.products.cutedsl.products import NO_ADDRESS, ProductEntry, load_shared, vector
from jax_mx.quantizing.facts.product_kernels import RESULTS, ProductKernel
from jax_mx.quantizing.facts.signatures import EPILOGUE, Array
from jax_mx.quantizing.kernels.cutedsl import activations, convert
from jax_mx.quantizing.kernels.cutedsl.kernel import mapped, two_of_block

LINE = 64  # bytes of a row of W in a stage


def copy_16(to: Int32, at: Int64, size: Int32) -> None:
    """Asks for 16 bytes of global memory; where `size` is 0, for 16 zeros."""
    code = "cp.async.cg.shared.global.L2::256B [{$r0}], [{$r1}], 16, {$r2};"
    convert.ptx(code, None, Int32(to), Int64(at), Int32(size))


def product(a: list, b: list, sums: list | None = None) -> list:
    """A lane's part of a (16, 16) times b (16, 8), in bfloat16, plus sums or zeros."""
    begin = "{ .reg .f32 z; mov.f32 z, 0f00000000; "
    added = "z, z, z, z" if sums is None else "{$r6}, {$r7}, {$r8}, {$r9}"
    code = (
        begin + "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, "
        "{" + added + "}; }"
    )
    return list(convert.ptx(code, [Float32] * 4, *a, *b, *(sums or [])))


def times(word: Uint32, factor: Uint32) -> Uint32:
    """Two bfloat16 times two."""
    return convert.ptx("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", Uint32, word, factor)


def times_2_to_126(word: Uint32) -> Uint32:
    """Two bfloat16 times 2^126."""
    code = "{ .reg .b32 t; mov.b32 t, 0x7e807e80; mul.rn.bf16x2 {$w0}, {$r0}, t; }"
    return convert.ptx(code, Uint32, word)


def spread_e2m1(word: Uint32) -> list:
    """Eight codes as four words of bfloat16 times 2^-126: codes i and i + 4.

    A code times 2^6 + 2^12 has its bits where such a bfloat16 has them.
    """
    spread = []
    for half in (word, word >> Uint32(8)):
        for mask, by in ((0x000F000F, 0x1040), (0x00F000F0, 0x0104)):
            spread.append((half & Uint32(mask)) * Uint32(by) & Uint32(0x81C081C0))
    return spread


def factors_of_e2m1(scale: Int32) -> list:
    """Two factors of a scale's byte, each twice in a word: the second is 1 for most."""
    twice = Uint32(0x00800080)
    rest = Uint32(cutlass.max(scale, Int32(128)) - 1) * twice
    rest = Uint32(cutlass.select_(scale == 255, Uint32(0x7FC07FC0), rest))
    return [Uint32(cutlass.min(scale + 126, Int32(254))) * twice, rest]


def scaled_e2m1(codes: Uint32, factors: list) -> list:
    """Eight codes as four words of bfloat16, times each factor."""
    pairs = spread_e2m1(codes)
    for factor in factors:
        pairs = [times(pair, factor) for pair in pairs]
    return pairs


def in_order_of_e2m1(pairs: list) -> list:
    """Eight elements of x, four words, in the order of `spread_e2m1`."""
    return [
        convert.bytes_of(pairs[i], pairs[i + 2], select)
        for i in range(2)
        for select in (0x5410, 0x7632)
    ]


def factors_of(pair: Uint32) -> Uint32:
    """Two scales' bytes as two bfloat16: powers of two, NaN of 255; 2^-127 is subnormal."""
    code = (
        "{ .reg .b32 h, v, n, m; prmt.b32 h, {$r0}, 0, 0x4140; shl.b32 v, h, 7; "
        "add.u32 n, h, 0x00010001; shr.u32 n, n, 2; and.b32 n, n, 0x00400040; or.b32 v, v, n; "
        "mov.b32 m, 0x00400040; max.u16x2 {$w0}, v, m; }"
    )
    return convert.ptx(code, Uint32, pair)


@dataclasses.dataclass(frozen=True)
class Rings:
    """How a thread block goes about a tile.

    Attributes:
      stages: of each warp, 2 at least.
      resident: thread blocks of a multiprocessor.
      split: thread blocks that share K, where there are no groups and tiles do not suffice.
      ahead: whether x is asked for a stage before, which takes registers.
      warps: of a thread block.
      grouped: resident and warps where there are groups, if they are others: tiles are many then,
        and the fewer warps share one, the fewer wait where sums meet.
    """

    stages: int
    resident: int = 2
    split: int = 1
    ahead: bool = True
    warps: int = 8
    grouped: tuple[int, int] | None = None


class Few(ProductEntry):
    """See above; of the cases "one", "groups" and "any" of `matmul_many.Warps`."""

    columns = 64  # rows of W
    early_start = True
    of_scales = 4  # bytes that two blocks' scales take in shared memory

    def __init__(self, product: ProductKernel, arch: str, case: str, tile: Rings | None = None):
        super().__init__(product, arch)
        (self.format,) = product.formats
        self.rows, self.activation = product.rows, product.activation
        self.dtypes = RESULTS[:1] if self.activation else RESULTS
        self.halves_of_w = 2 if self.activation else 1  # of gates and of ups
        tile = tile or Rings(**self.tuned("Few"))
        self.stages, self.ahead = tile.stages, tile.ahead
        self.resident, self.warps = tile.resident, tile.warps
        if case != "one" and tile.grouped:
            self.resident, self.warps = tile.grouped
        if case == "any":
            self.resident = 1  # it needs more registers
        self.threads = 32 * self.warps
        self.split = tile.split if case == "one" else 1
        self.pairs = case != "any"  # whether two blocks' scales are read at once
        self.per = self.format.codes_per_byte
        self.codes = LINE * self.per  # of a row in a stage
        self.blocks = self.codes // BLOCK
        self.wide = self.rows // 8  # products beside each other
        self.ring = LINE * self.columns  # bytes of a stage
        self.halves = self.blocks // 2  # words of a row's scales of a stage
        self.scales_at = self.warps * self.stages * self.ring
        self.scales_bytes = self.columns * self.halves * self.of_scales  # of a stage
        self.kept_at = self.scales_at + self.warps * self.stages * self.scales_bytes
        self.met_at = self.kept_at + self.warps * 48
        self.shared = self.met_at + 8 * self.rows * self.columns * (self.split > 1)
        self.elements_per_thread = self.rows * self.columns // self.threads
        if self.pairs:
            self.divide = (Factor(Extent(self.signature.number("scales"), 2), 2),)

    def align_of(self, array: Array, itemsize: int) -> int:
        """Copies and loads of 16 bytes."""
        wanted = {"x": 16, "codes": 16}
        if self.pairs:
            wanted["scales"] = 2
        if self.split > 1:
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
            cluster=[self.split, 1, 1],
        )

    @cute.kernel
    def kernel(self, pointers, scalars):
        arrays = self.signature.named(pointers)
        x, w, s, sizes, y = (arrays[n] for n in ("x", "codes", "scales", "group_sizes", "y"))
        epilogue: cutlass.Constexpr = [arrays[name] for name in EPILOGUE]
        t, wide, groups, width, blocks, result = scalars
        if const_expr(self.split > 1):  # there are none: `align_of`
            sizes = cute.make_ptr(Int32, Int64(0), cute.AddressSpace.gmem, assumed_align=4)
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(tid // 32)
        lane = tid % 32
        base = cute.arch.get_dyn_smem(Uint8, alignment=128).toint()
        across = (width + self.columns - 1) // self.columns
        steps = (blocks * BLOCK + self.codes - 1) // self.codes  # stages along K
        total = wide // (blocks * BLOCK) * steps
        parts = self.parts(groups * self.pieces(t // groups) * across, grid)  # that share a tile
        rank = self.rank(bid, parts)
        start = rank * total // parts
        end = (rank + 1) * total // parts
        first = start + warp  # of this warp, which takes as many further on the next
        turns = (end - start + self.warps - 1) // self.warps  # of each warp; the last may be empty
        index = bid // parts
        apart = grid // parts  # of a thread block's tiles
        ring = base + warp * (self.stages * self.ring)
        scales = base + self.scales_at + warp * (self.stages * self.scales_bytes)

        # The positions of a warp's walks lie in shared memory: registers are few. Copies run ahead
        # of products by all stages but one.
        at = self.start(sizes, t, groups)
        at = self.seek(index, at, sizes, t, groups, across)
        kept = base + self.kept_at + warp * 48
        self.keep(kept, at)
        self.keep(kept + 16, at)
        self.keep(kept + 32, (index, index, parts, apart))
        ahead = at[0]
        ahead_stage = first
        _, _, ahead_n0 = self.place(index, at, across)
        exists = at[0] < groups
        held = cute.make_rmem_tensor((self.halves, 2), Uint32)  # scales on their way
        held.fill(0)
        slot = Int32(0)  # that is filled next
        cute.arch.griddepcontrol_launch_dependents()
        for _ in range_constexpr(self.stages - 1):
            ahead, ahead_stage, ahead_n0, slot = self.fetch(
                w, s, sizes, ring, scales, held, kept, ahead, ahead_stage, ahead_n0, slot, first,
                end, turns, steps, t, groups, width, blocks, across, lane,
            )  # fmt: skip
        cute.arch.griddepcontrol_wait()  # for x
        right = cute.make_rmem_tensor((4, self.blocks, self.wide), Uint32)
        following = cute.make_rmem_tensor((4, self.blocks, self.wide), Uint32)
        acc = cute.make_rmem_tensor((4, self.wide, 4), Float32)
        begin = cutlass.min(first, total - 1)  # a warp without a stage may read another's
        row, stop, turn = Int32(0), Int32(0), Int32(0)
        if exists:
            row, stop, _ = self.place(index, at, across)
            if const_expr(self.ahead):
                self.load_x(x, following, row, stop, begin, steps, wide, blocks, lane)
        while exists:
            acc.fill(0.0)
            for i in cutlass.range(turns, unroll=1):
                stage = first + i * self.warps
                if const_expr(self.ahead):
                    cute.autovec_copy(following, right)
                    other = stage + self.warps
                    if other < end:
                        self.load_x(x, following, row, stop, other, steps, wide, blocks, lane)
                elif stage < end:
                    self.load_x(x, right, row, stop, stage, steps, wide, blocks, lane)
                cute.arch.cp_async_wait_group(self.stages - 2)
                cute.arch.sync_warp()
                ahead, ahead_stage, ahead_n0, slot = self.fetch(
                    w, s, sizes, ring, scales, held, kept, ahead, ahead_stage, ahead_n0, slot,
                    first, end, turns, steps, t, groups, width, blocks, across, lane,
                )  # fmt: skip
                if const_expr(self.stages == 2):  # its scales came there just now
                    cute.arch.sync_warp()
                # The stage that is asked for next time is read now.
                if stage < end:
                    self.multiply(
                        acc, right, ring + slot * self.ring, scales + slot * self.scales_bytes, lane
                    )
            index, other, parts, apart = self.recalled(kept + 32)
            if const_expr(self.split == 1):
                parts = Int32(1)
            # A 0 that the compiler does not know: else addresses are computed before the loop, for
            # which 16 rows leave no registers.
            zero = apart >> 31 if const_expr(self.wide > 1) else Int32(0)
            self.lay_down(acc, ring + slot * self.ring, tid + zero)
            cute.arch.sync_threads()
            here = self.recalled(kept)
            _, _, n0 = self.place(index, here, across)
            tile = (row, stop, n0, here[0])
            index += apart
            here = self.seek(index, here, sizes, t, groups, across)
            self.keep(kept, here)
            self.keep(kept + 32, (index, other, parts, apart))
            exists = here[0] < groups
            if exists:
                row, stop, _ = self.place(index, here, across)
                if const_expr(self.ahead):
                    self.load_x(x, following, row, stop, begin, steps, wide, blocks, lane)
            rank = self.rank(bid, parts)
            to: cutlass.Constexpr = (y, epilogue, width, result)
            self.gather(base, slot, turn, to, tile, parts, rank, tid + zero)
            turn ^= 1
        if const_expr(self.split > 1):
            if parts > 1:  # no thread block ends while another one reads its sums
                cute.arch.cluster_arrive_relaxed()
                cute.arch.cluster_wait()
        # Rows that no group has are there only where every thread block has tiles of its own.
        index, _, _, apart = self.recalled(kept + 32)
        row = self.recalled(kept)[2]
        self.clear(y, epilogue[-1], row, t, width, result, index % apart, apart, tid, self.threads)

    @cute.jit
    def next(self, slot: Int32):
        """The stage behind a stage."""
        slot += 1
        if slot == self.stages:
            slot = Int32(0)
        return slot

    @cute.jit
    def fetch(
        self, w, s, sizes, ring: Int32, scales: Int32, held, kept: Int32, e: Int32, stage: Int32,
        n0: Int32, slot: Int32, first: Int32, end: Int32, turns: Int32, steps: Int32, t: Int32,
        groups: Int32, width: Int32, blocks: Int32, across: Int32, lane: Int32,
    ):  # fmt: skip
        """Asks for a stage of W and its scales; the scales of the stage before go to shared memory.

        A lane has the scales of rows `lane` and `lane` + 32, two in a word.
        """
        before = slot - 1
        if slot == 0:
            before = Int32(self.stages - 1)
        self.put_scales(held, scales + before * self.scales_bytes, lane)
        if (e < groups) & (stage < end):
            column, _ = self.column_of(stage, steps)
            line = blocks * (BLOCK // self.per)
            g, q = lane // 4, lane % 4
            byte = column * LINE + q * 16
            size = Int32(16)
            if byte >= line:
                size = Int32(0)
                byte = Int32(0)
            to = ring + slot * self.ring + g * LINE + (q ^ self.key(g)) * 16
            matrix = Int64(e) * width
            start = w.toint() + matrix * line + byte
            for c in range_constexpr(8):
                row = self.row_of(n0, 8 * (c % 4) + g, c // 4, width)
                copy_16(to + c * (8 * LINE), start + Int64(row) * Int64(line), size)
            start = s.toint() + matrix * blocks
            for r in range_constexpr(2):
                row = self.row_of(n0, lane, r, width)
                of_row = start + Int64(row) * Int64(blocks)
                self.scales_of(of_row, column * self.blocks, blocks, held[None, r])
        if e < groups:
            stage += self.warps
            if stage >= first + turns * self.warps:
                stage = first
                index_of_sums, index, parts, apart = self.recalled(kept + 32)
                index += apart
                self.keep(kept + 32, (index_of_sums, index, parts, apart))
                at = self.seek(index, self.recalled(kept + 16), sizes, t, groups, across)
                self.keep(kept + 16, at)
                e = at[0]
                _, _, n0 = self.place(index, at, across)
        cute.arch.cp_async_commit_group()
        return e, stage, n0, self.next(slot)

    def row_of(self, n0: Int32, n: Int32, half: int, width: Int32):
        """The row of W that is row n of a half of a tile; beyond the last one the last.

        With an activation the first half has gates, the second one their ups.
        """
        apart: cutlass.Constexpr = self.columns // 2
        if not self.activation:
            return cutlass.min(n0 + n + half * apart, width - 1)
        return cutlass.min(n0 // 2 + n, width // 2 - 1) + half * (width // 2)

    @cute.jit
    def put_scales(self, held, to: Int32, lane: Int32):
        """Writes a lane's scales of a stage into shared memory, as two bfloat16 a word."""
        for r in range_constexpr(2):
            address = to + (lane + 32 * r) * (4 * self.halves)
            pointer = cute.make_ptr(
                Uint32, address, cute.AddressSpace.smem, assumed_align=4 * self.halves
            )
            factors = cute.make_rmem_tensor(self.halves, Uint32)
            for i in range_constexpr(self.halves):
                factors[i] = factors_of(held[i, r])
            cute.autovec_copy(factors, cute.make_tensor(pointer, cute.make_layout(self.halves)))

    @cute.jit
    def column_of(self, stage: Int32, steps: Int32):
        """The stage of K that a stage is, and whether it belongs to x's second part."""
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
        """The permutation of the 16-byte pieces of row g, so that lanes read other banks."""
        return g // 2 % 2 * 2

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
        count: cutlass.Constexpr = 2  # words of a lane's codes of a block
        factors = cute.make_rmem_tensor((2, 4), Uint32)
        for b in range_constexpr(self.blocks):
            if const_expr(b % 2 == 0):  # those of two blocks
                for m in range_constexpr(4):
                    for r in range_constexpr(2):
                        address = scales + ((16 * m + 8 * r + g) * self.halves + b // 2) * 4
                        from_ = cute.make_ptr(Uint32, address, smem, assumed_align=4)
                        factors[r, m] = cute.make_tensor(from_, cute.make_layout(1))[0]
            operands = [[right[i, b, c] for i in range(4)] for c in range(self.wide)]
            chunk = 32 * b + 8 * q  # byte of the row
            for m in range_constexpr(4):
                codes = cute.make_rmem_tensor((count, 2), Uint32)
                for r in range_constexpr(2):
                    address = ring + (16 * m + 8 * r + g) * LINE
                    address += (chunk // 16 ^ self.key(g)) * 16 + chunk % 16
                    from_ = cute.make_ptr(Uint32, address, smem, assumed_align=4 * count)
                    cute.autovec_copy(
                        cute.make_tensor(from_, cute.make_layout(count)), codes[None, r]
                    )
                # Each row has four words: the operands of two products.
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

    def left_of(self, codes, r: int) -> list:
        """A lane's eight codes of a row as four words of bfloat16."""
        to = convert.Conversion("bfloat16", self.format, self.arch)
        floats = [value for i in range(2) for value in convert.unpack_four(codes[i, r], to)]
        return convert.round_all(floats, "bfloat16")

    # ---- where sums meet ---
    def swizzled(self, m: Int32, n: Int32):
        """Where a sum lies among a warp's, in bytes: lanes write and read other banks."""
        return (m * self.columns + (n ^ (m // 2 % 4 * 8))) * 4

    @cute.jit
    def lay_down(self, acc, to: Int32, tid: Int32):
        """A warp's sums into the stage that it has read last."""
        g, q = tid % 32 // 4, tid % 4
        cute.arch.sync_warp()  # all lanes have read the stage
        for m in range_constexpr(4):
            for c in range_constexpr(self.wide):
                for v in range_constexpr(4):
                    there = self.swizzled(8 * c + 2 * q + v % 2, 16 * m + 8 * (v // 2) + g)
                    self.floats(to + there, 1)[0] = acc[v, c, m]

    @cute.jit
    def gather(
        self, base: Int32, slot: Int32, turn: Int32, y: cutlass.Constexpr, tile, parts: Int32,
        rank: Int32, tid: Int32,
    ):  # fmt: skip
        """Adds up sums, always in one order, and writes y.

        First those of a thread block's warps. Thread blocks that share a tile meet then, and each
        writes its share of the rows. It reads the others' sums of this turn until it meets them in
        the next one, whose sums lie elsewhere.
        """
        size: cutlass.Constexpr = self.rows * self.columns
        pairs: cutlass.Constexpr = size // (2 * self.halves_of_w)
        met = base + self.met_at + turn * (4 * size)
        for i in range_constexpr((pairs + self.threads - 1) // self.threads):
            m, n = self.pair_of(i * self.threads + tid)
            if m < self.rows:
                sums = []
                for there in self.places(m, n):
                    warps = [base + (w * self.stages + slot) * self.ring for w in range(self.warps)]
                    two = self.added([self.floats(at + there, 2) for at in warps])
                    sums.append(two)
                    if parts > 1:
                        cute.autovec_copy(two, self.floats(met + there, 2))
                if parts == 1:
                    self.write(sums, y, tile, m, n)
        if parts > 1:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            share: cutlass.Constexpr = self.rows // self.split
            for i in range_constexpr((pairs // self.split + self.threads - 1) // self.threads):
                m, n = self.pair_of(i * self.threads + tid)
                if m < share:
                    m = rank * share + m
                    sums = []
                    for there in self.places(m, n):
                        two = cute.make_rmem_tensor(2, Float32)
                        two.fill(0.0)
                        for other in range_constexpr(self.split):
                            low, high = two_of_block(mapped(met + there, other))
                            two[0], two[1] = two[0] + low, two[1] + high
                        sums.append(two)
                    self.write(sums, y, tile, m, n)
        else:
            cute.arch.sync_threads()  # before these stages are asked for

    def pair_of(self, item: Int32):
        """The row and the first column of a pair of a tile."""
        across: cutlass.Constexpr = self.columns // (2 * self.halves_of_w)
        return item // across, item % across * 2

    def places(self, m: Int32, n: Int32) -> list:
        """Where a pair's sums lie, or a pair of gates and its ups."""
        apart = self.columns // self.halves_of_w
        return [self.swizzled(m, n + half * apart) for half in range(self.halves_of_w)]

    @cute.jit
    def added(self, pairs: cutlass.Constexpr):
        """The sums of pairs."""
        two, one = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        two.fill(0.0)
        for pair in pairs:
            cute.autovec_copy(pair, one)
            two[0], two[1] = two[0] + one[0], two[1] + one[1]
        return two

    @cute.jit
    def write(self, sums: cutlass.Constexpr, y: cutlass.Constexpr, tile, m: Int32, n: Int32):
        """Writes a pair of a tile's elements; with an activation, of gates and ups, in bfloat16."""
        pointer, epilogue, width, result = y
        row, stop, n0, e = tile
        two = sums[0]
        if const_expr(self.activation):
            n0, width = n0 // 2, width // 2
            words = [convert.round_two(s[0], s[1], "bfloat16") for s in sums]
            word = activations.gated(self.activation, *words, Float32(1.0), "bfloat16")
            two[0] = convert.bits_to_float(word << Uint32(16))
            two[1] = convert.bits_to_float(word & Uint32(0xFFFF0000))
        bytes_ = self.size_in_bytes(result)
        to = pointer.toint() + (Int64(row + m) * width + n0 + n) * bytes_
        rows = cutlass.select_(row + m < stop, Int32(1), Int32(0))
        first = cutlass.select_(n0 + n < width, rows, Int32(0))
        second = cutlass.select_(n0 + n + 1 < width, rows, Int32(0))
        if self.is_there(epilogue):
            mine = cutlass.min(row + m, stop - 1)
            for i in range_constexpr(2):
                its = cutlass.min(n0 + n + i, width - 1)
                two[i] = self.finished(epilogue, two[i], e, mine, its, width)
        self.store(to, two[0], result, 0, first)
        self.store(to + bytes_, two[1], result, 0, second)


class Nibbles(Few):
    """See above. A stage has four blocks of each row, of which each of four lanes has one.

    A code with its bits in place is a bfloat16 times 2^-126, so its factor is 2^(scale - 1), for
    the scale's byte. If this is too large for a bfloat16, as for scales beyond 128, the elements
    are multiplied once more. A scale of 255 multiplies by NaN.
    """

    of_scales = 2

    def __init__(self, product: ProductKernel, arch: str, case: str, tile: Rings | None = None):
        super().__init__(product, arch, case, tile)
        if self.per != 2:
            raise ValueError(f"{product.name}: Nibbles takes codes of four bits")

    @cute.jit
    def put_scales(self, held, to: Int32, lane: Int32):
        """As they come, four bytes a row."""
        for r in range_constexpr(2):
            pointer = cute.make_ptr(
                Uint32, to + (lane + 32 * r) * 4, cute.AddressSpace.smem, assumed_align=4
            )
            word = convert.bytes_of(held[0, r], held[1, r], 0x5410)
            cute.make_tensor(pointer, cute.make_layout(1))[0] = word

    def key(self, g: Int32):
        """A lane reads what it has asked for, 16 bytes at once: no two the same bank."""
        del g
        return 0

    @cute.jit
    def load_x(
        self, x, to, row: Int32, stop: Int32, stage: Int32, steps: Int32, wide: Int32,
        blocks: Int32, lane: Int32,
    ):  # fmt: skip
        """A lane's part of its block of a stage, of one row in eight; zeros beyond K."""
        g, q = lane // 4, lane % 4
        column, second = self.column_of(stage, steps)
        block = column * self.blocks + q
        start = x.toint() + Int64(second * blocks + block) * (2 * BLOCK)
        for c in range_constexpr(self.wide):
            line = start + Int64(cutlass.min(row + 8 * c + g, stop - 1)) * Int64(2 * wide)
            for j in range_constexpr(4):
                for i in range_constexpr(4):
                    to[i, j, c] = Uint32(0)
            if block < blocks:
                for j in range_constexpr(4):
                    cute.autovec_copy(vector(line + 16 * j, Uint32, 4), to[None, j, c])

    @cute.jit
    def multiply(self, acc, right, ring: Int32, scales: Int32, lane: Int32):
        """Adds the products of a stage to the sums."""
        g, q = lane // 4, lane % 4
        bytes_ = cute.make_rmem_tensor(8, Int32)
        most = Int32(0)
        for i in range_constexpr(8):
            bytes_[i] = Int32(load_shared(scales + (8 * i + g) * 4 + q, 8))
            most = cutlass.max(most, bytes_[i])
        operands = [
            [in_order_of_e2m1([right[i, j, c] for i in range(4)]) for c in range(self.wide)]
            for j in range(4)
        ]
        codes_at = ring + g * LINE + q * 16
        if cute.arch.vote_any_sync(most > 128):
            self.add_products(acc, operands, codes_at, bytes_, True)
        else:
            self.add_products(acc, operands, codes_at, bytes_, False)

    @cute.jit
    def add_products(
        self, acc, operands: cutlass.Constexpr, first: Int32, bytes_, twice: cutlass.Constexpr
    ):
        """Adds products of codes from `first` on, whose elements are multiplied once or twice."""
        for m in range_constexpr(4):
            codes = cute.make_rmem_tensor((4, 2), Uint32)
            factors = []
            for r in range_constexpr(2):
                address = first + (16 * m + 8 * r) * LINE
                smem = cute.AddressSpace.smem
                from_ = cute.make_ptr(Uint32, address, smem, assumed_align=16)
                cute.autovec_copy(cute.make_tensor(from_, cute.make_layout(4)), codes[None, r])
                factors.append(factors_of_e2m1(bytes_[2 * m + r])[: 1 + twice])
            for j in range_constexpr(4):
                left = [scaled_e2m1(codes[j, r], factors[r]) for r in range(2)]
                for c in range_constexpr(self.wide):
                    sums = [acc[v, c, m] for v in range(4)]
                    for k in range_constexpr(2):
                        a = [left[r][2 * k + h] for h in range(2) for r in range(2)]
                        sums = product(a, operands[j][c][2 * k : 2 * k + 2], sums)
                    for v in range_constexpr(4):
                        acc[v, c, m] = sums[v]
