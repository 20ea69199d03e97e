"""y = x @ dequantize(W) on Hopper, for a W (G, K, N) whose blocks run along N: see `Free`."""

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

from jax_mx.formats.formats import BLOCK
from jax_mx.launch.rule import Extent, Factor
from jax_mx.products.cutedsl.matmul_few import factors_of, spread_e2m1, times, times_2_to_126
from jax_mx.products.cutedsl.matmul_many import Warps
from jax_mx.products.cutedsl.products import HEAD, Plain, element, load_columns, load_shared, vector
from jax_mx.quantizing.facts.product_kernels import UNIT, ProductKernel
from jax_mx.quantizing.facts.signatures import Array
from jax_mx.quantizing.kernels.cutedsl import convert


class Free(Warps):
    """For a W (G, K, N) whose blocks run along N: y = x @ dequantize(W).

    A row of W in a stage is 128 columns of one element of K. A lane's two rows of wgmma's first
    operand are neighbouring columns 2g and 2g + 1 of W. So it reads both at once for each element
    of K, and makes words from two elements. Factors lie along K, as a lane wants them. Three warps,
    which take turns, bring a stage's scales as bfloat16, pairs of K by pairs, and arrive at `full`
    once for each stage. They wait for `empty` alone, as the copies do. A warp sees one phase of
    `empty` in three, and could take the last but one for the last. This cannot happen. When it
    comes to stage i, it has waited for stage i - 3 - `stages` to be given back. So the data two
    stages before i, in the same place, are given back too: there are three stages at least.
    """

    unit = UNIT
    arrivals = 2  # the copies, and the scales
    batches = 8

    def __init__(self, product: ProductKernel, arch: str, case: str, tile=None):
        super().__init__(product, arch, case, tile)
        if self.resident * self.split > 1:
            raise ValueError(f"{product.name}: resident and split of its tile must be 1")
        if self.stages < 3:
            raise ValueError(f"{product.name}: {self.stages} stages, must be 3 at least")
        self.divide = (Factor(Extent(self.signature.number("x"), 1), UNIT),)
        if case == "shared":
            self.divide += (Factor(self.extents[-1], 256 // BLOCK),)
        self.pitch = 128 * self.per + 32  # bytes of a block's factors, off the other blocks' banks
        self.factors_at = self.shared
        self.factor_bytes = self.columns // BLOCK * self.pitch  # of a stage
        self.shared += self.stages * self.factor_bytes

    def box_of_w(self) -> tuple[int, int]:
        """See `Warps`."""
        return 64 * self.per, self.columns // self.per

    def align_of(self, array: Array, itemsize: int) -> int:
        """Scales are read byte by byte."""
        return 1 if array.name == "scales" else super().align_of(array, itemsize)

    def lengths(self, high: Int32, blocks: Int32):
        """See `Warps`."""
        return blocks * BLOCK, (high + UNIT - 1) // UNIT * UNIT

    def tiles_of_w(self, matrix, n0: Int32):
        """See `Warps`."""
        at = cute.domain_offset((0, n0 // self.per), matrix)
        return cute.local_tile(at, self.box, (None, 0))

    def lanes(self, base, warp: Int32, lane: Int32):
        """See `Warps`; where a lane begins to read codes, and factors."""
        g, q = lane // 4, lane % 4
        here = (base + HEAD).toint()
        if self.per == 1:  # a row of 16 bytes each lane, of 32 elements of K
            codes = here + lane * self.box[1] + ((warp ^ lane % 8) << 4)
        else:
            codes = here + 2 * q * self.box[1] + ((warp // 2 ^ q) << 4) + warp % 2 * 8 + g
        factors = base.toint() + self.factors_at + warp // 2 * self.pitch + q * 16
        return warp * 16 + 2 * g, Int32(1), Int32(0), [Uint32(codes), Uint32(factors)]

    def rows_of_scales(self, *_) -> list:
        """They are read from shared memory."""
        return []

    def scales(self, s, rows, column, blocks, out) -> None:
        """See `rows_of_scales`."""

    @cute.jit
    def bring(
        self, s, base, full, empty, slot: Int32, phase: Int32, turn: Int32, own_turn: Int32,
        lane: Int32, n0: Int32, e: Int32, high: Int32, blocks: Int32, steps: Int32, count: Int32,
    ):  # fmt: skip
        """A tile's scales, of every third stage: a lane has a column of blocks, pairs of K.

        Elements beyond K, whose codes are zeros, get any finite scale.
        """
        pairs: cutlass.Constexpr = 4 * self.per  # of K, of a lane in a stage
        first = 2 * (lane // 4)
        block = cutlass.min(n0 // BLOCK + lane % 4, blocks - 1)
        from_ = s.toint() + Int64(e) * high * blocks + block
        to = base.toint() + self.factors_at + lane % 4 * self.pitch
        to += lane // 4 % 4 * 16 + lane // 16 * 4
        column = Int32(0)
        for _ in cutlass.range(count, unroll=1):
            if turn == own_turn:
                held = cute.make_rmem_tensor((2, pairs), Uint32)
                for j in range_constexpr(pairs):
                    for i in range_constexpr(2):
                        k = column * self.codes + 16 * j + first + i
                        at = from_ + Int64(cutlass.min(k, high - 1)) * blocks
                        byte = Uint32(vector(at, Uint8)[0])
                        held[i, j] = Uint32(cutlass.select_(k < high, byte, Uint32(127)))
                cute.arch.mbarrier_wait(empty + slot, phase ^ 1)
                for j in range_constexpr(pairs):
                    pointer = cute.make_ptr(
                        Uint32, to + slot * self.factor_bytes + j // 2 * 64 + j % 2 * 8,
                        cute.AddressSpace.smem, assumed_align=4,
                    )  # fmt: skip
                    both = held[0, j] | (held[1, j] << Uint32(8))
                    cute.make_tensor(pointer, cute.make_layout(1))[0] = factors_of(both)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(full + slot)
            column += 1
            if column == steps:
                column = Int32(0)
            turn += 1
            if turn == 3:
                turn = Int32(0)
            slot, phase = self.next(slot, phase)
        return slot, phase, turn

    @cute.jit
    def fill(
        self, words, places, apart: Int32, scales, slot: Int32, box: cutlass.Constexpr,
        into: cutlass.Constexpr,
    ):  # fmt: skip
        """See `Warps`."""
        held = cute.make_rmem_tensor((2, 4), Uint32)
        factors = cute.make_rmem_tensor((4, 2), Uint32)
        for j in range_constexpr(2):
            first = places[0] + Uint32(slot * self.w_bytes + (64 * box + 32 * j) * self.box[1])
            four = self.four_pairs(first)
            for i in range_constexpr(4):
                held[i % 2, 2 * j + i // 2] = four[i]
            at = places[1] + Uint32(slot * self.factor_bytes + (2 * box + j) * 64)
            from_ = cute.make_ptr(Uint32, Int32(at), cute.AddressSpace.smem, assumed_align=16)
            cute.autovec_copy(cute.make_tensor(from_, cute.make_layout(4)), factors[None, j])
        for k in range_constexpr(4):
            for h in range_constexpr(2):
                both = self.of_pairs(held[h, k], factors[k % 2 * 2 + h, k // 2])
                for r in range_constexpr(2):
                    words[(0, r, h), 0, k, into] = both[r]

    def four_pairs(self, first: Uint32) -> list:
        """Codes of 32 elements of K: a lane's pairs 2q and 2q + 1 of each eight, a word each."""
        if self.per == 1:
            return load_columns(first)
        pairs = [
            [load_shared(first + Uint32((8 * i + r) * self.box[1]), 8) for r in range(2)]
            for i in range(4)
        ]
        return [low | (high << Uint32(16)) for low, high in pairs]

    def of_pairs(self, word: Uint32, factors: Uint32) -> list:
        """The codes of two columns, of two elements of K, as a word of bfloat16 each."""
        if self.per == 2:
            return [times(times_2_to_126(pair), factors) for pair in spread_e2m1(word)[:2]]
        to = convert.Conversion("bfloat16", self.format, self.arch)
        turned = convert.bytes_of(word, word, 0x3120)
        return convert.dequantized_pairs([turned], [factors] * 2, to)


class PlainFree(Plain):
    """See `Plain`."""

    def width_of(self, high: Int32, blocks: Int32):
        """See `Plain`."""
        del high
        return blocks * BLOCK

    @cute.jit
    def dot(
        self, arrays: cutlass.Constexpr, m: Int32, e: Int32, n: Int32, wide: Int32, high: Int32,
        blocks: Int32, parts: Int32,
    ):  # fmt: skip
        """The product of row m of x and column n of matrix e."""
        del parts
        format: cutlass.Constexpr = self.formats["w"]
        per: cutlass.Constexpr = format.codes_per_byte
        to: cutlass.Constexpr = convert.Conversion("float32", format, self.arch)
        deep = (high + UNIT - 1) // UNIT * UNIT
        total = Float32(0)
        for i in cutlass.range(wide // deep * high, unroll=1):
            k = i % high
            row = Int64(e) * high + k
            at = row * (blocks * (BLOCK // per)) + n // per
            code = Uint32(element(arrays["codes"], at, Uint8)) >> Uint32(8 // per * (n % per))
            if const_expr(per == 2):
                code = code & Uint32(15)
            w = convert.unpack_four(code, to)[0]
            w = w * self.factor(arrays["scales"], row * blocks + n // BLOCK)
            x = element(arrays["x"], Int64(m) * wide + i // high * deep + k, BFloat16)
            total += Float32(x) * w
        return total
