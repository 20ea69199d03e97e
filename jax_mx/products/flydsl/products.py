"""Products of codes on AMD, in FlyDSL: y = x @ W^T, for each group of x's rows, or over parts of K.

A workgroup has a tile of y and goes along K in steps. Codes and scales come as they lie, in rows or
in AMD's tiles: codes through registers, which hold the next step's, to LDS. `Scaled`, of gfx950,
leaves scales to the matrix cores; `Floats`, of gfx942, makes bfloat16 of codes on the way to LDS.
Tiles lie at multiples of their sides, whichever groups their rows belong to: so the tiles that
scales and codes may lie in are whole, and a tile of several groups is computed for each of them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl._mlir.dialects import llvm
from flydsl.expr import (
    Float32,
    Int32,
    Int64,
    Uint8,
    Uint16,
    Uint32,
    const_expr,
    gpu,
    range_constexpr,
)

from jax_mx.formats.formats import BLOCK, FLOAT_DTYPES, MXFP4_E2M1, MXFP8_E4M3, MXFP8_E5M2, Format
from jax_mx.formats.layouts import SHUFFLED_32X8
from jax_mx.launch.entry import Entry
from jax_mx.launch.rule import Extent, Factor, GridTerm, Scalar, constant
from jax_mx.quantizing.facts.product_kernels import RESULTS, ProductKernel
from jax_mx.quantizing.facts.signatures import Array, Role, signature_of
from jax_mx.quantizing.kernels.flydsl import convert
from jax_mx.quantizing.kernels.flydsl.kernel import (
    WAVE,
    as_int64,
    composite,
    load_byte,
    load_words,
    offset_in_tiles,
    offset_of_values,
    pointer,
    shared_pointer,
    store_words,
    tiles_of,
)
from jax_mx.quantizing.kernels.geometry import Extents, Place

SIDE = 16  # rows of x, and of W, that a matrix instruction multiplies
WAVES = 2  # below each other in a tile, and beside each other
SCALE_TILE = SHUFFLED_32X8.tile  # rows and blocks


class Operand:
    """An operand's part of a workgroup's tile: from where it lies to LDS and to registers.

    Attributes:
      format: of its codes.
      rows: of its matrix.
      first: the tile's first row.
      count: how many units a thread loads, of a step.
    """

    def __init__(self, kernel, format: Format, arrays: tuple, place: tuple, tiled: tuple):
        """`arrays`: codes, scales, LDS; `place`: slab, rows, first row, blocks; `tiled`: both."""
        self.kernel, self.format, self.bits = kernel, format, 8 // format.codes_per_byte
        self.codes, self.scales, self.shared = arrays
        self.slab, self.rows, self.first, self.blocks = place
        self.codes_tiled, self.scales_tiled = tiled
        self.width = self.blocks * Uint32(BLOCK * self.bits // 8)  # bytes of a row
        self.unit = kernel.cores.unit(format)  # codes that a thread loads at a time
        self.size = self.unit * self.bits // 8  # their bytes
        self.across = kernel.depth // self.unit
        self.in_row = kernel.cores.in_row(format)
        self.count = kernel.rows * self.across // kernel.threads

    def near(self, row):
        """A row of the tile in the matrix, which has one at least."""
        return smaller(self.first + row, self.rows - Uint32(1))

    def place(self, i: int, thread) -> tuple:
        """(row, unit) of a thread's i-th load in the tile: along rows, or down tiles of 16."""
        across = Uint32(self.across)
        down = thread % Uint32(16) + thread // Uint32(16 * self.across) * Uint32(16)
        row = self.codes_tiled.select(down, thread // across)
        unit = self.codes_tiled.select(thread // Uint32(16) % across, thread % across)
        return row + Uint32(self.kernel.threads // self.across * i), unit

    def load(self, step, thread) -> list[list]:
        """The words of a thread's codes of a step; beyond K of what is there."""
        out, slab = [], self.slab * as_int64(self.rows) * as_int64(self.width)
        for i in range(self.count):
            row, unit = self.place(i, thread)
            row = self.near(row)
            byte = (step * Uint32(self.across) + unit) * Uint32(self.size)
            byte = smaller(byte, self.width - Uint32(self.size))
            rest = byte % Uint32(16)
            tiled = offset_of_values(row, byte - rest, self.width) + as_int64(rest)
            plain = as_int64(row) * as_int64(self.width) + as_int64(byte)
            where = slab + self.codes_tiled.select(tiled, plain)
            align = self.size if self.kernel.aligned else 1
            out.append(load_words(self.codes, where, self.size // 4, align))
        return out

    def line_of_scales(self, row) -> Int64:
        """Where the scales of a row of the tile begin, if they lie in rows."""
        row = self.slab * as_int64(self.rows) + as_int64(self.near(row))
        return row * as_int64(self.blocks)

    def load_scale(self, row, block):
        """The scale of a row of the tile and a block; beyond K the last one."""
        block = smaller(block, self.blocks - Uint32(1))
        position = Place(self.slab, self.near(row), block)
        tiled = offset_in_tiles(SHUFFLED_32X8, position, Extents(self.rows, self.blocks))
        plain = self.line_of_scales(row) + as_int64(block)
        return load_byte(self.scales + self.scales_tiled.select(tiled, plain))

    def kept(self, words: list[list], step, thread, span: tuple) -> list[list]:
        """Codes of a step with zeros in place of those outside of a part of K."""
        per, kept = 32 // self.bits, []
        for i, few in enumerate(words):
            _, unit = self.place(i, thread)
            first = Int32(step * Uint32(self.kernel.depth) + unit * Uint32(self.unit))
            masked = []
            for w, word in enumerate(few):
                before, until = (self.ones(edge - (first + w * per)) for edge in span)
                masked.append(word & until & (before ^ Uint32(0xFFFFFFFF)))
            kept.append(masked)
        return kept

    def ones(self, count):
        """A word with ones in the first so many codes, none or all of them where it is beyond."""
        count = (count < 0).select(Int32(0), count)
        few = (Uint32(1) << (Uint32(count) * Uint32(self.bits))) - Uint32(1)
        return (count < 32 // self.bits).select(few, Uint32(0xFFFFFFFF))

    def at(self, row, unit):
        """16 bytes of a row in LDS, permuted by rows, or lanes would read from the same banks."""
        where = row * Uint32(self.in_row) + (unit ^ row % Uint32(self.in_row))
        return shared_pointer(self.shared, Int32(where * Uint32(16)), Uint32, 16)

    def put(self, row, unit, words: list) -> None:
        """Four words into a row of LDS."""
        fx.generic_store(self.at(row, unit), fx.Vector.from_elements(words, Uint32))

    def read(self, row, unit) -> list:
        """Four words from there."""
        out = fx.generic_load(self.at(row, unit), dtype=Uint32, count=4)
        return [out[i] for i in range(4)]


class Scaled:
    """How gfx950 multiplies: 16 x 16 x 128 codes at once, with a scale for each 32 of them.

    AMD's manual leaves out the lanes of codes; AMD measured them in its composable kernels
    (test/mx_mfma_op/scale_mapping_16x16x128.txt). With codes of 8 bits, a lane of the g-th sixteen
    has 16 codes from 16 g on, and 16 from 64 + 16 g. With codes of 4 bits it has 32 from 32 g on.
    It has block g's scale.
    """

    depth = SCALE_TILE[1] * BLOCK

    def __init__(self, kernel):
        self.kernel = kernel

    def unit(self, format: Format) -> int:
        """How many codes a thread loads at a time: 16 bytes."""
        return 16 * format.codes_per_byte

    def in_row(self, format: Format) -> int:
        """How many times 16 bytes a row has in LDS."""
        return self.depth // self.unit(format)

    @flyc.jit
    def factors(self, operand, step, base):
        """Words of scales: of rows r and r + 16 below `base` in turns, of block g, then of g + 4.

        That is what a lane (r, g) has in a word of AMD's tiles.
        """
        out = [Uint32(0) for _ in range_constexpr(self.kernel.times // 2)]
        in_words = operand.blocks % Uint32(4) == Uint32(0)
        if operand.scales_tiled:
            out = self.of_tiles(operand, step, base)
        else:
            if in_words & fx.Boolean(self.kernel.aligned):
                out = self.of_words(operand, step, base)
            else:
                out = self.of_bytes(operand, step, base)
        return out

    def tops(self, base) -> list:
        """The first row of each two times sixteen below `base`."""
        return [base + Uint32(SIDE * i) for i in range(0, self.kernel.times, 2)]

    def of_tiles(self, operand: Operand, step, base) -> list:
        """See `factors`: of scales in tiles, which have whole ones."""
        down, across = tiles_of(SHUFFLED_32X8, Extents(operand.rows, operand.blocks))
        step, out = smaller(step, across - Uint32(1)), []
        for top in self.tops(base):
            tile = operand.slab * as_int64(down)
            tile = tile + as_int64((operand.first + top) // Uint32(SCALE_TILE[0]))
            tile = tile * as_int64(across) + as_int64(step)
            where = tile * math.prod(SCALE_TILE) + as_int64(convert.lane_id() * Uint32(4))
            align = operand.kernel.aligned_to(Role.SCALES)
            out += load_words(operand.scales, where, 1, align)
        return out

    def of_words(self, operand: Operand, step, base) -> list:
        """See `factors`: of scales in rows of whole words."""
        (row, g), out, last = lane_of_tile(), [], operand.blocks - Uint32(4)
        one = g | (g + Uint32(4)) << 8  # of the bytes of two words, 12 is none
        for top in self.tops(base):
            lines = [operand.line_of_scales(top + row + Uint32(r)) for r in (0, SIDE)]
            halves = []
            for block in (0, 4):
                at = smaller(step * Uint32(SCALE_TILE[1]) + Uint32(block), last)
                two = [load_words(operand.scales, line + as_int64(at), 1, 4)[0] for line in lines]
                select = one << 16 | Uint32(0x0C0C) if block else one | Uint32(0x0C0C0000)
                halves.append(convert.bytes_by(select, two[1], two[0]))
            out.append(halves[0] | halves[1])
        return out

    def of_bytes(self, operand: Operand, step, base) -> list:
        """See `factors`: of scales in any rows."""
        (row, g), out = lane_of_tile(), []
        for top in self.tops(base):
            block = step * Uint32(SCALE_TILE[1]) + g
            four = [(top + row + Uint32(r), block + Uint32(c)) for c in (0, 4) for r in (0, SIDE)]
            a, b, c, d = (operand.load_scale(*position) for position in four)
            out.append(a | b << 8 | c << 16 | d << 24)
        return out

    def factors_kept(self, operand: Operand, words: list, step, span: tuple) -> list:
        """Scales, with 2^-127 for blocks outside, whose scales may be NaN."""
        del operand
        (begin, end), mask, (_, g) = span, Uint32(0), lane_of_tile()
        for half in range(2):
            first = Int32(step * Uint32(self.depth) + (g + Uint32(4 * half)) * Uint32(BLOCK))
            inside = (first < end) & (first + BLOCK > begin)
            mask = mask | inside.select(Uint32(0xFFFF << 16 * half), Uint32(0))
        return [word & mask for word in words]

    def stage(self, operand: Operand, words: list[list], factors: list, thread) -> None:
        """Codes into LDS, a row after the other."""
        del factors
        for i, few in enumerate(words):
            operand.put(*operand.place(i, thread), few)

    def multiplied(self, sums: list, operands: tuple, factors: list, bases: list) -> list:
        """Sums [rows of W][rows of x], sixteen each, with a step's products."""
        times, (w, x) = self.kernel.times, operands
        for part in range(2):
            left, right = (
                [self.lane_codes(o, base, i, part) for i in range(times)]
                for o, base in zip(operands, bases, strict=True)
            )
            scale = lambda few, i, part=part: (2 * part + i % 2, few[i // 2])  # noqa: E731
            sums = [
                [
                    self.product(
                        (left[i], right[j]), sums[i][j], (w.format, x.format),
                        (*scale(factors[0], i), *scale(factors[1], j)),
                    )
                    for j in range(times)
                ]
                for i in range(times)
            ]  # fmt: skip
        return sums

    def lane_codes(self, operand: Operand, base, i: int, part: int):
        """A lane's words of the i-th sixteen rows below `base`, from a part's 128 codes."""
        row, g = lane_of_tile()
        half, codes = operand.in_row // 2, []
        for more in range(0, half, 4):
            unit = g + Uint32(part * half + more)
            codes += operand.read(base + Uint32(SIDE * i) + row, unit)
        return fx.Vector.from_elements(codes, Uint32)

    def product(self, codes: tuple, total, formats: tuple, scales: tuple):
        """A matrix instruction; of either operand `scales` have the byte's number and the word."""
        kinds = [Int32({MXFP8_E4M3: 0, MXFP8_E5M2: 1, MXFP4_E2M1: 4}[f]) for f in formats]
        a, a_word, b, b_word = scales
        shapes = ".".join(f"v{v.shape[0]}i32" for v in codes)
        name = f"llvm.amdgcn.mfma.scale.f32.16x16x128.f8f6f4.{shapes}"
        return matrix(name, *codes, total, *kinds, Int32(a), a_word, Int32(b), b_word)


class Floats:
    """How gfx942 multiplies: bfloat16, which codes times their scales become on the way to LDS.

    A lane has 4 of the 16 floats of a row that an instruction takes. Any 4 will do if both operands
    have the same ones, so a lane takes 8 neighbours for two instructions.
    """

    depth = 64

    def __init__(self, kernel):
        self.kernel = kernel

    def unit(self, format: Format) -> int:
        """How many codes a thread loads at a time: half a block."""
        del format
        return BLOCK // 2

    def in_row(self, format: Format) -> int:
        """How many times 16 bytes a row has in LDS."""
        del format
        return self.depth // 8

    def factors(self, operand: Operand, step, base) -> list:
        """The scale of each unit that a thread loads."""
        del base
        thread, out = Uint32(Int32(fx.thread_idx.x)), []
        for i in range(operand.count):
            row, unit = operand.place(i, thread)
            block = step * Uint32(self.depth // BLOCK) + unit // Uint32(2)
            out.append(operand.load_scale(row, block))
        return out

    def factors_kept(self, operand: Operand, words: list, step, span: tuple) -> list:
        """Scales, with 2^-127 for units outside, whose scales may be NaN."""
        thread, (begin, end), kept = Uint32(Int32(fx.thread_idx.x)), span, []
        for i, word in enumerate(words):
            _, unit = operand.place(i, thread)
            first = Int32(step * Uint32(self.depth) + unit * Uint32(operand.unit))
            inside = (first < end) & (first + operand.unit > begin)
            kept.append(inside.select(word, Uint32(0)))
        return kept

    def stage(self, operand: Operand, words: list[list], factors: list, thread) -> None:
        """Codes into LDS as floats, a row after the other."""
        for i, (few, scale) in enumerate(zip(words, factors, strict=True)):
            row, unit = operand.place(i, thread)
            fours = (
                few if operand.bits == 8 else [f for word in few for f in convert.in_order(word)]
            )
            factor, poison = [convert.factor_of(scale)] * 4, convert.poison_of(scale)
            options = (operand.format, "bfloat16", self.kernel.arch)
            floats = [
                f for four in fours for f in convert.unpack_four(four, factor, poison, *options)
            ]
            for half in range(2):
                operand.put(row, unit * Uint32(2) + Uint32(half), floats[4 * half : 4 * half + 4])

    def multiplied(self, sums: list, operands: tuple, factors: list, bases: list) -> list:
        """See `Scaled.multiplied`."""
        del factors
        times, (row, g) = range(self.kernel.times), lane_of_tile()
        none = [Int32(0)] * 3
        for part in range(2):
            left, right = (
                [o.read(base + Uint32(SIDE * i) + row, g + Uint32(4 * part)) for i in times]
                for o, base in zip(operands, bases, strict=True)
            )
            for k in (0, 2):
                halves = [
                    [
                        fx.Vector.from_elements(four[k : k + 2], Uint32).bitcast(Uint16)
                        for four in side
                    ]
                    for side in (left, right)
                ]
                name = "llvm.amdgcn.mfma.f32.16x16x16bf16.1k"
                a, b = halves
                sums = [[matrix(name, a[i], b[j], sums[i][j], *none) for j in times] for i in times]
        return sums


def matrix(name: str, *operands):
    """A matrix instruction: of each lane four sums."""
    values = [operand.ir_value() for operand in operands]
    element = fx.Vector.make_type(4, Float32)
    return fx.Vector(llvm.call_intrinsic(element, name, values, [], []), dtype=Float32)


def lane_of_tile() -> tuple:
    """A lane's row of sixteen, and which of the four sixteens it is in."""
    lane = convert.lane_id()
    return lane % Uint32(SIDE), lane // Uint32(SIDE)


def smaller(a, b):
    """The smaller one of two unsigned numbers."""
    return (a < b).select(a, b)


def summed_up(word, lane):
    """The sum of the words of this lane and of all lanes before it, or 2^32 - 1."""
    for distance in (1, 2, 4, 8, 16, 32):
        before = convert.from_anywhere(word, lane - Uint32(distance))
        before = (lane < Uint32(distance)).select(Uint32(0), before)
        word = added(word, before)
    return word


def added(a, b):
    """a + b, or 2^32 - 1."""
    return convert.intrinsic("llvm.uadd.sat.i32", Uint32, a, b)


class Product(Entry):
    """An entry: its arrays, its launch rule and its kernel.

    Attributes:
      sums: whether groups share out K, instead of x's rows.
      times: how many times `SIDE` rows of either operand a wave has.
      rows: of either operand, in a tile.
      depth: of a step along K.
    """

    threads = WAVES * WAVES * WAVE

    def __init__(self, product: ProductKernel, arch: str, aligned: bool):
        self.product, self.arch, self.aligned = product, arch, aligned
        self.signature, self.sums = signature_of(product.op), product.op == "wgrad_fp8"
        self.times = 4 if aligned else 2
        self.rows = WAVES * SIDE * self.times
        self.elements_per_thread = self.rows * self.rows // self.threads
        self.cores = (Scaled if arch == "gfx950" else Floats)(self)
        self.depth = self.cores.depth

    # ---- the launch rule ---
    @property
    def align(self) -> list[int]:
        """The number of bytes that divides each buffer's address, for a y of 16 bits."""
        return [self.align_of(array, 2) for array in self.signature.arrays]

    def align_of(self, array: Array, itemsize: int) -> int:
        """The same of one of its arrays; `itemsize` is y's."""
        return itemsize if array.name == "y" and not self.aligned else self.aligned_to(array.role)

    def aligned_to(self, role: Role) -> int:
        """The same of arrays but y."""
        if role is Role.REPLICATED:
            return 4
        return (4 if role is Role.SCALES else 16) if self.aligned else 1

    @property
    def extents(self) -> list[Extent]:
        """Rows of x and of a W, bytes of x's rows, and how many groups or matrices there are."""
        number = self.signature.number
        groups = number("group_sizes" if self.sums else "codes")
        x, y = number("x_codes"), number("y")
        return [Extent(x, 0, 1), Extent(y, -1), Extent(x, 1), Extent(groups, 0, 1)]

    @property
    def scalars(self) -> list:
        """The extents, the number of y's dtype, and which operands lie in tiles."""
        scalars = [*self.extents, constant(0), "tiled"]
        return [Scalar(4, scalar).to_json() for scalar in scalars]

    @property
    def grid(self) -> list:
        """Tiles beside each other, those below, and groups: of x's rows one tile more for each."""
        t, n, _, groups = self.extents
        last = GridTerm(2, Factor(groups)) if self.sums else GridTerm(1, Factor(groups, 1, 1))
        columns, below = GridTerm(0, Factor(n, self.rows)), GridTerm(1, Factor(t, self.rows))
        return [term.to_json() for term in (columns, below, last)]

    def launch(self, result: str) -> dict[str, Any]:
        """The entry's launch rule, for a y of this dtype."""
        itemsize = FLOAT_DTYPES[result].itemsize if result in FLOAT_DTYPES else 4
        return {
            "align": [self.align_of(array, itemsize) for array in self.signature.arrays],
            "divide": [],
            "threads": [self.threads, 1, 1],
            "grid": self.grid,
        }

    # ---- the kernel ---
    @flyc.kernel
    def kernel(self, pointers, scalars):
        arrays = self.signature.named(pointers)
        t, n, wide, groups, result, tiled = (Uint32(s) for s in scalars)
        x_format, w_format = self.product.formats
        blocks = wide * Uint32(x_format.codes_per_byte) // Uint32(BLOCK)
        total = blocks * Uint32(BLOCK) if const_expr(self.sums) else t
        number = Uint32(Int32(fx.block_idx.z if self.sums else fx.block_idx.y))
        e, low, high, tile = self.group(arrays["group_sizes"], number, total, groups)
        slabs = [Int64(0), as_int64(smaller(e, groups - Uint32(1)))]  # of x and dW, or y and W
        slabs = slabs if const_expr(self.sums) else slabs[::-1]
        first = Uint32(Int32(fx.block_idx.x)) * Uint32(self.rows)
        span, lines = (Int32(low), Int32(high)), (Uint32(0), t)
        top = Uint32(Int32(fx.block_idx.y)) * Uint32(self.rows)
        if const_expr(not self.sums):
            top = (low // Uint32(self.rows) + number - tile) * Uint32(self.rows)
            span = Int32(0), (e < groups).select(Int32(blocks * Uint32(BLOCK)), Int32(0))
            lines = low, high
        shared = fx.SharedAllocator().allocate(self.shared()).peek()
        bit = [(tiled >> i & Uint32(1)) == Uint32(1) for i in range_constexpr(4)]
        x = Operand(self, x_format, (arrays["x_codes"], arrays["x_scales"], shared.x),
                    (Int64(0), t, top, blocks), (bit[0], bit[1]))  # fmt: skip
        w = Operand(self, w_format, (arrays["codes"], arrays["scales"], shared.w),
                    (slabs[0], n, first, blocks), (bit[2], bit[3]))  # fmt: skip
        wave = convert.wave_id()
        bases = [
            i * Uint32(SIDE * self.times) for i in (wave // Uint32(WAVES), wave % Uint32(WAVES))
        ]
        if top < lines[1]:
            sums = self.summed((w, x), bases, span)
            self.store(arrays["y"], sums, (w, x), bases, (slabs[1], lines), result)

    def shared(self):
        """The LDS of a workgroup."""
        size = [self.rows * self.cores.in_row(f) * 16 for f in self.product.formats]
        fields = dict(zip(("x", "w"), size, strict=True))
        return composite(fx.struct, {name: fx.Array[Uint8, n, 16] for name, n in fields.items()})

    @flyc.jit
    def group(self, sizes, number, total, groups):
        """The group that has a tile, or is the `number`-th: itself, its span, its first tile.

        Rows that no group has are the last one's. Each lane has one of 64 groups at a time.
        """
        lane = convert.lane_id()
        rows, tiles = Uint32(0), Uint32(0)  # of groups before
        e, low, high, tile = groups, Uint32(0), Uint32(0), Uint32(0)
        last = Int32((groups + Uint32(WAVE - 1)) // Uint32(WAVE))
        for part in range(Int32(0), last, Int32(1)):
            g = Uint32(part) * Uint32(WAVE) + lane
            size = total // groups
            if fx.ptrtoint(sizes) != fx.Uint64(0):
                where = as_int64(smaller(g, groups - Uint32(1))) * 4
                size = load_words(sizes, where, 1, 4)[0]
            size = ((g < groups) & (Int32(size) > 0)).select(smaller(size, total), Uint32(0))
            ends = smaller(added(summed_up(size, lane), rows), total)
            begins = convert.from_anywhere(ends, lane - Uint32(1))
            begins = (lane == Uint32(0)).select(rows, begins)
            pieces = (g < groups).select(Uint32(1), Uint32(0))
            if const_expr(not self.sums):
                side = Uint32(self.rows)
                pieces = (ends + (side - Uint32(1))) // side - begins // side
                pieces = (begins < ends).select(pieces, Uint32(0))
            until = summed_up(pieces, lane) + tiles
            before = convert.intrinsic("llvm.amdgcn.ballot.i64", fx.Uint64, until <= number)
            at = Uint32(convert.intrinsic("llvm.ctpop.i64", fx.Uint64, before))
            if (e == groups) & (at < Uint32(WAVE)):
                e = Uint32(part) * Uint32(WAVE) + at
                low, high, tile = (
                    convert.first_lane(convert.from_anywhere(word, at))
                    for word in (begins, ends, until - pieces)
                )
            rows, tiles = (
                convert.first_lane(convert.from_anywhere(word, Uint32(WAVE - 1)))
                for word in (ends, until)
            )
        if e == groups:
            low, high, tile = rows, total, tiles
        return e, low, high, tile

    @flyc.jit
    def summed(self, operands, bases, span):
        """The sums of a wave, over a part of K."""
        thread = Uint32(Int32(fx.thread_idx.x))
        begin, end = span
        depth: fx.Constexpr = self.depth
        first, last = begin // depth, (end + (depth - 1)) // depth
        zeros = fx.Vector.filled(4, 0.0, Float32)
        sums = [[zeros for _ in range(self.times)] for _ in range(self.times)]
        codes, factors = self.loaded(operands, bases, Uint32(first), thread)
        for step in range(first, last, Int32(1)):
            if (step * depth < begin) | (step * depth + depth > end):
                codes, factors = self.kept(operands, codes, factors, Uint32(step), span)
            gpu.barrier()
            for i in range_constexpr(2):
                self.cores.stage(operands[i], codes[i], factors[i], thread)
            gpu.barrier()
            now = factors
            codes, factors = self.loaded(operands, bases, Uint32(step) + Uint32(1), thread)
            sums = self.cores.multiplied(sums, operands, now, bases)
        return sums

    def loaded(self, operands, bases, step, thread) -> tuple:
        """A step's codes and scales, of W and of x."""
        codes = [operand.load(step, thread) for operand in operands]
        pairs = zip(operands, bases, strict=True)
        return codes, [self.cores.factors(operand, step, base) for operand, base in pairs]

    def kept(self, operands, codes: list, factors: list, step, span) -> tuple:
        """These, without what is outside of a part of K."""
        thread = Uint32(Int32(fx.thread_idx.x))
        pairs = zip(operands, codes, strict=True)
        codes = [operand.kept(part, step, thread, span) for operand, part in pairs]
        pairs = zip(operands, factors, strict=True)
        return codes, [self.cores.factors_kept(o, part, step, span) for o, part in pairs]

    @flyc.jit
    def store(self, y, sums, operands, bases, where, result):
        """Rounds the sums and stores the rows that the group has."""
        (w, x), (slab, (low, high)) = operands, where
        row, g = lane_of_tile()
        wide = result == Uint32(RESULTS.index("float32"))
        whole = (w.rows % Uint32(4) == Uint32(0)) if const_expr(self.aligned) else fx.Boolean(False)
        for j in range_constexpr(self.times):
            line = x.first + bases[1] + Uint32(SIDE * j) + row
            start = (slab * as_int64(x.rows) + as_int64(line)) * as_int64(w.rows)
            inside = (low <= line) & (line < high)
            for i in range_constexpr(self.times):
                col = w.first + bases[0] + Uint32(SIDE * i) + g * Uint32(4)
                four = [sums[i][j][k] for k in range_constexpr(4)]
                at = start + as_int64(col)
                last = inside.select(w.rows, Uint32(0))
                if wide:
                    bits = [value.bitcast(Uint32) for value in four]
                    self.store_four(y, at * 4, bits, Uint32, (col, last, whole))
                else:
                    self.store_four(
                        y, at * 2, self.rounded(four, result), Uint16, (col, last, whole)
                    )

    def rounded(self, four: list, result) -> list:
        """Two words of four sums in 16 bits."""
        half, rounded = result == Uint32(RESULTS.index("float16")), []
        for pair in (four[:2], four[2:]):
            both = (convert.round_two(*pair, self.arch, dtype) for dtype in ("float16", "bfloat16"))
            rounded.append(half.select(*both))
        return rounded

    @flyc.jit
    def store_four(self, y, offset, words, element, columns):
        """Four neighbours of a row of y, at once if rows have whole fours of them."""
        col, last, whole = columns
        if whole:
            if col < last:
                store_words(y, offset, words, 4 * len(words))
        else:
            size: fx.Constexpr = element.width // 8
            pieces = fx.Vector.from_elements(words, Uint32).bitcast(element)
            for k in range_constexpr(4):
                if col + Uint32(k) < last:
                    to = pointer(y, offset + Int64(size * k), element, size)
                    fx.generic_store(to, pieces[k])


def entries(product: ProductKernel, arch: str) -> list[Product]:
    """The entries of a product's binary, the fastest first."""
    return [Product(product, arch, aligned) for aligned in (True, False)]


def launches(kernels: Sequence[Product], usage: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A binary's launches for the manifest: each dtype of y has the same entries."""
    out = {}
    for number, result in enumerate(RESULTS):
        scalars = [*kernels[0].scalars]
        scalars[-2] = Scalar(4, constant(number)).to_json()
        entries = [
            {
                "symbol": symbol,
                **kernel.launch(result),
                "usage": {
                    **{name: n for name, n in usage[symbol].items() if name != "threads"},
                    "elements_per_thread": kernel.elements_per_thread,
                },
            }
            for kernel, symbol in zip(kernels, sorted(usage), strict=True)
        ]
        out[result] = {"scalars": scalars, "entries": entries}
    return out
