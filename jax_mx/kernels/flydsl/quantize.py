"""MX quantize on AMD, in FlyDSL. Matches reference.quantize bit for bit.

One class, two ways to cut the work, and helpers that both use, as in kernels/cutedsl/quantize.py.

Sizes and the scale layout are run-time scalars. Entry 0 wants aligned operands, entry 1 takes any.
A launch rule has the words of ffi/launch.cc, but one grid for all entries, and it may name as a
scalar what a plan knows: "scale_layout", "round_add_0".
"""

import dataclasses
import math

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import Int32, Int64, Uint8, Uint16, Uint32, const_expr, gpu, range_constexpr

from jax_mx.formats import BLOCK, FLOAT_DTYPES, Format
from jax_mx.kernels.flydsl import convert
from jax_mx.layouts import SCALE_LAYOUTS, ScaleLayout
from jax_mx.variants import Variant

FORMS = ("last", "second", "second_transposed", "both", "both_transposed")
ALL = (0, 99)  # from the first dimension to the last
WAVE = 64  # lanes
ROW_MAJOR_CODE = list(SCALE_LAYOUTS).index("row_major")
TILED_LAYOUTS = [(i, layout) for i, layout in enumerate(SCALE_LAYOUTS.values()) if layout.is_tiled]


def pointer(base, offset, dtype, align: int):
    """Into global memory, `offset` bytes from `base`."""
    kind = fx.Pointer[dtype, fx.AddressSpace.Global, max(align, dtype.width // 8)]
    return fx.recast_iter(kind.ir_type, base + offset)


def shared_pointer(array, offset, dtype=Uint8, align: int = 1):
    """Into a shared array of bytes."""
    kind = fx.Pointer[dtype, fx.AddressSpace.Shared, align]
    return fx.recast_iter(kind.ir_type, array.ptr + offset)


def load_words(base, offset, count: int, align: int) -> list:
    """`count` words from `offset` bytes on: at once, or in the pieces that `align` bytes allow."""
    if align >= 4 * count:
        words = fx.generic_load(pointer(base, offset, Uint32, align), dtype=Uint32, count=count)
    else:
        piece = Uint32 if align >= 4 else Uint16
        at, pieces = pointer(base, offset, piece, align), 4 * count // (piece.width // 8)
        words = fx.Vector.from_elements(
            [fx.generic_load(at + Int32(i)) for i in range(pieces)], piece
        ).bitcast(Uint32)  # which never widens: FlyDSL extends the sign of unsigned loads
    return [words[i] for i in range(count)]


def store_words(base, offset, words: list, align: int) -> None:
    """The inverse of `load_words`; at once, or by bytes."""
    vector = fx.Vector.from_elements(words, Uint32)
    if align >= 4 * len(words):
        fx.generic_store(pointer(base, offset, Uint32, align), vector)
    else:
        at, codes = pointer(base, offset, Uint8, 1), vector.bitcast(Uint8)
        for i in range(4 * len(words)):
            fx.generic_store(at + Int32(i), codes[i])


def choose(index, values: list):
    """values[index], for an index that only a lane knows."""
    chosen = values[0]
    for i in range(1, len(values)):
        chosen = (index == Int32(i)).select(values[i], chosen)
    return chosen


def as_int64(number) -> Int64:
    """An unsigned 32-bit number in 64 bits."""
    return Int64(fx.Uint64(number))


def round_up(number, multiple: int) -> Uint32:
    """To a multiple of a power of two."""
    return (Uint32(number) + Uint32(multiple - 1)) & Uint32(-multiple & 0xFFFFFFFF)


def offset_in_tile(layout: ScaleLayout, row, col):
    """Where (row, col) of a tile lies in it, from the layout's own description."""
    digits = []
    for number, sizes in ((row, layout.row_digits), (col, layout.col_digits)):
        below, found = 1, []
        for size in reversed(sizes):
            found.insert(0, number // Uint32(below) % Uint32(size))
            below *= size
        digits += found
    sizes = (*layout.row_digits, *layout.col_digits)
    offset, stride = Uint32(0), 1
    for place in reversed(layout.order):
        offset = offset + digits[place] * Uint32(stride)
        stride *= sizes[place]
    return offset


def largest(words: list, dtype: str):
    """The larger magnitudes of words."""
    word = words[0]
    for other in words[1:]:
        word = convert.larger(word, other, dtype)
    return word


def across_lanes(word, lanes: int, dtype: str):
    """The larger magnitudes of `lanes` neighbours, 2 to 16."""
    for control in convert.REDUCE[: lanes.bit_length() - 1]:
        word = convert.larger(word, convert.from_lane(word, control), dtype)
    return word


def exchange(parts: list[list], lane) -> list:
    """Of lane i the i-th part of each of its len(parts) neighbours, first neighbour first."""
    for bit in (1, 2)[: len(parts).bit_length() - 1]:
        upper = lane // bit % 2 == 1
        for low in (i for i in range(len(parts)) if not i & bit):
            pairs = zip(parts[low], parts[low | bit], strict=True)
            swapped = []
            for a, b in pairs:
                other = convert.from_lane(upper.select(a, b), convert.EXCHANGE[bit])
                swapped.append((upper.select(other, a), upper.select(b, other)))
            parts[low], parts[low | bit] = ([p[i] for p in swapped] for i in range(2))
    return [word for part in parts for word in part]


def column_stride(layout: ScaleLayout) -> int:
    """How far apart two neighbouring columns lie in a tile, but for the edge of a digit."""
    sizes = (*layout.row_digits, *layout.col_digits)
    faster = layout.order[layout.order.index(len(sizes) - 1) + 1 :]
    return math.prod(sizes[place] for place in faster)


class Kernel:
    """What both ways share: the entries, and the host half that makes the compiler emit them."""

    outputs = 1

    def __init__(self, variant: Variant, arch: str):
        self.variant, self.arch = variant, arch
        self.dtype, self.formats = variant.dtype, variant.formats
        self.itemsize = FLOAT_DTYPES[variant.dtype].itemsize

    @property
    def alignments(self) -> list[list[int]]:
        """Per entry the alignment of (x, values, scales, ...)."""
        return [[16, *[16, 4] * self.outputs], [self.itemsize, *[1, 1] * self.outputs]]

    @property
    def symbols(self) -> list[str]:
        """Of the entries."""
        return [f"{self.variant.name}_{i}" for i in range(len(self.alignments))]

    def scalars(self, extents: list) -> list:
        """Of the launch rule: the extents, then what a plan knows by name."""
        names = ["scale_layout"]
        for i in range(self.outputs):
            names += [f"round_add_{i}", f"round_exception_{i}"]
        return [*extents, *([4, name] for name in names)]

    def codes(self, x: list, blocks: list, format: Format) -> list:
        """Of consecutive elements, in words; `blocks`: of each, what `convert.scale_of` gave."""
        words = []
        for i in range(0, len(x), 4):
            _, inverse, poisoned = zip(*blocks[i : i + 4], strict=True)
            poison = convert.poison_mask(poisoned)
            words.append(convert.pack_four(x[i : i + 4], inverse, poison, format, self.arch))
        return words

    def compile(self):
        """All entries, compiled; each is a kernel of its own."""
        address = flyc.from_c_void_p(Uint8, None, assumed_align=1)
        name = f"{self.variant.name}.{self.arch}"
        return flyc.compile(self.host, name, *[address] * 5, Int32(0), Int64(0))

    @flyc.jit
    def host(
        self, name: fx.Constexpr, p0: fx.Pointer, p1: fx.Pointer, p2: fx.Pointer, p3: fx.Pointer,
        p4: fx.Pointer, int32: Int32, int64: Int64,
    ):  # fmt: skip
        """Makes the compiler emit the entries; nothing calls it.

        `name` tells FlyDSL's cache that another variant is another function.
        """
        pointers = (p0, p1, p2, p3, p4)[: 1 + 2 * self.outputs]
        scalars = tuple(int64 if s[0] == 8 else int32 for s in self.launch["scalars"])
        for symbol, align in zip(self.symbols, self.alignments, strict=True):
            entry = type(self).__dict__["kernel"]
            entry._name = symbol
            grid, block = (1, 1, 1), tuple(self.launch["threads"])  # the real grid is the rule's
            self.kernel(pointers, scalars, align).launch(grid=grid, block=block)


class Flat(Kernel):
    """x (..., rows, cols, 32) -> values like x, scales (..., rows, cols) in the layout.

    A wave takes `chunks` strips of x, one after the other, 16 bytes a lane. So a lane has 16 codes,
    some of each strip; it gives them away for the 16 of one strip that it stores at once.
    """

    divide = ()
    waves = 4

    def __init__(self, variant: Variant, arch: str):
        super().__init__(variant, arch)
        self.chunks = self.itemsize  # 16 bytes of x become 16 / itemsize codes
        self.sharers = BLOCK * self.itemsize // 16  # lanes that share a block
        self.per_chunk = WAVE // self.sharers  # blocks of a strip
        self.blocks = self.waves * self.chunks * self.per_chunk  # of a workgroup

    @property
    def launch(self) -> dict:
        """The launch rule, of every entry; the grid follows the padded scales."""
        extents = [[8, [0, *ALL]], [8, [2, *ALL]], [4, [0, -3, -2]], [4, [0, -2, -1]]]
        return {
            "threads": [WAVE * self.waves, 1, 1],
            "grid": [[0, 2, *ALL, self.blocks]],
            "scalars": self.scalars(extents),
        }

    @flyc.kernel
    def kernel(self, pointers, scalars, align: fx.Constexpr):
        x, values, scales = pointers
        _, places, rows, cols, scale_layout, round_add, round_exception = scalars
        format, size = self.formats[0], self.itemsize
        tid = Int32(fx.thread_idx.x)
        lane = tid % WAVE
        first = Int64(Int32(fx.block_idx.x)) * self.blocks
        first = first + Int64(tid // WAVE * (self.chunks * self.per_chunk) + lane // self.sharers)
        at = [first + c * self.per_chunk for c in range_constexpr(self.chunks)]
        at = [self.locate(place, places, rows, cols, scale_layout) for place in at]

        words, codes, bytes_ = [], [], []
        for block, _, inside in at:
            # A lane without a block loads another's.
            where = inside.select(block, Int64(0)) * (BLOCK * size) + Int64(
                lane % self.sharers * 16
            )
            words.append(load_words(x, where, 4, align[0]))
        rounding = (Uint32(round_add), Uint32(round_exception))
        for c in range_constexpr(self.chunks):
            amax = largest([convert.magnitudes(w, self.dtype) for w in words[c]], self.dtype)
            amax = convert.largest_bits(across_lanes(amax, self.sharers, self.dtype), self.dtype)
            of_block = convert.scale_of(amax, format, self.dtype, rounding)
            elements = [e for word in words[c] for e in convert.elements(word, self.dtype)]
            codes.append(self.codes(elements, [of_block] * len(elements), format))
            bytes_.append(at[c][2].select(of_block[0], Uint32(0)))  # padding is 0

        mine = lane % self.chunks  # the strip that this lane stores
        block, offset, inside = (choose(mine, [a[i] for a in at]) for i in range(3))
        word = exchange(codes, lane)
        if inside:
            half = lane // self.chunks % 2
            store_words(values, block * BLOCK + Int64(half * 16), word, align[1])
        if (offset < places) & (lane % self.sharers < self.chunks):
            fx.generic_store(scales + offset, Uint8(choose(mine, bytes_)))

    @flyc.jit
    def locate(self, place, places, rows, cols, scale_layout):
        """Of the scale at `place`, counted row by row with the padding: its block, its offset.

        Row-major scales have no padding, so the three are one number.
        """
        block, offset, inside = place, place, place < places
        if scale_layout != Int32(ROW_MAJOR_CODE):
            padded_rows, padded_cols = Uint32(0), Uint32(0)
            for code, layout in TILED_LAYOUTS:
                here = scale_layout == Int32(code)
                padded_rows = here.select(round_up(rows, layout.pad[0]), padded_rows)
                padded_cols = here.select(round_up(cols, layout.pad[1]), padded_cols)
            # 32 bits: places beyond would be of more elements than a GPU's memory holds.
            row, col = Uint32(place) // padded_cols, Uint32(place) % padded_cols
            slab, row = row // padded_rows, row % padded_rows
            for code, layout in TILED_LAYOUTS:
                height, width = layout.tile
                tile = slab * (padded_rows // Uint32(height)) + row // Uint32(height)
                tile = as_int64(tile) * as_int64(padded_cols // Uint32(width))
                tile = tile + as_int64(col // Uint32(width))
                in_tile = offset_in_tile(layout, row % Uint32(height), col % Uint32(width))
                at = tile * (height * width) + as_int64(in_tile)
                offset = (scale_layout == Int32(code)).select(at, offset)
            offset = inside.select(offset, places)
            block = as_int64(slab) * Int64(rows) + as_int64(row)
            block = block * Int64(cols) + as_int64(col)
            inside = inside & (row < Uint32(rows)) & (col < Uint32(cols))
        return block, offset, inside


TILE = 128  # elements a side, of a workgroup of `Tiled`; a wave has 32 rows of it


@dataclasses.dataclass(frozen=True)
class Output:
    """One of the results of `Tiled`: which way its blocks run in the tile, and how it lies."""

    format: Format
    down: bool  # blocks run down a column, i.e. along the second-to-last axis
    transpose: bool = False  # values (and scales) are written transposed; only with `down`


class Tiled(Kernel):
    """Forms with the second-to-last axis; x lies as (batch, M, K), M = 32 * `blocks_m`.

    A lane holds a patch of `rows` x `vector` elements, 16 bytes a row. A wave's lanes lie `lanes`
    across and 64 / `lanes` down.
    """

    def __init__(self, variant: Variant, arch: str):
        super().__init__(variant, arch)
        self.results = [Output(variant.formats[-1], True, variant.form.endswith("transposed"))]
        if variant.form.startswith("both"):
            self.results.insert(0, Output(variant.formats[0], False))
        self.outputs = len(self.results)
        self.vector = 16 // self.itemsize
        self.lanes = TILE // self.vector
        self.rows = BLOCK * self.lanes // WAVE

    @property
    def launch(self) -> dict:
        """The launch rule, of every entry.

        Two tiles at a time in either direction, so that every layout's padding is covered.
        """
        if self.outputs == 2:  # (..., blocks_m, blocks_k, 32, 32)
            m, k, per_tile, lead = (-4, -3), (-3, -2), TILE // BLOCK, (0, -4)
        else:  # (..., blocks_m, K, 32)
            m, k, per_tile, lead = (-3, -2), (-2, -1), TILE, (0, -3)
        return {
            "threads": [WAVE * TILE // BLOCK, 1, 1],
            "grid": [
                [0, 0, *k, 2 * per_tile],
                [0, 0, *m, 2 * TILE // BLOCK],
                [0, 0, *lead, 1],
                [0, -1, 4, 0, 1],
            ],
            "scalars": self.scalars([[4, [0, *m]], [4, [0, *k]]]),
        }

    @property
    def divide(self) -> list:
        """The aligned entry has 16 elements of a row at once; they must not straddle rows."""
        return [] if self.outputs == 2 else [[0, 0, -2, -1, 16]]

    @flyc.kernel
    def kernel(self, pointers, scalars, align: fx.Constexpr):
        blocks_m, k, scale_layout = scalars[:3]
        if const_expr(self.outputs == 2):
            k = k * BLOCK
        m = blocks_m * BLOCK
        tid = Int32(fx.thread_idx.x)
        lane, wave = tid % WAVE, tid // WAVE
        across, down = lane % self.lanes, lane // self.lanes  # this lane's place in the wave
        at = self.place(m, k)
        top = wave * BLOCK + down * self.rows  # of this lane's patch in the tile
        left = across * self.vector
        shared = fx.SharedAllocator().allocate(self.shared()).peek()

        words = self.load(pointers[0], at, top, left, m, k, align[0])
        x = [[e for word in row for e in convert.elements(word, self.dtype)] for row in words]
        amax = [[convert.magnitudes(word, self.dtype) for word in row] for row in words]
        for o, result in enumerate(self.results):
            values, scales = pointers[1 + 2 * o], getattr(shared, f"scales_{o}")
            rounding = (Uint32(scalars[3 + 2 * o]), Uint32(scalars[4 + 2 * o]))
            if const_expr(result.down):
                blocks = self.blocks_down(amax, result.format, rounding)
                if down == 0:
                    for j in range_constexpr(self.vector):
                        there = (at[1] * TILE + top < m) & (at[2] * TILE + left + j < k)
                        byte = there.select(blocks[j][0], Uint32(0))
                        fx.generic_store(shared_pointer(scales, (left + j) * 4 + wave), Uint8(byte))
                factors = [blocks] * self.rows
            else:
                rows = self.blocks_across(amax, result.format, rounding)
                if left % BLOCK == 0:
                    for i in range_constexpr(self.rows):
                        there = (at[1] * TILE + top + i < m) & (at[2] * TILE + left < k)
                        byte = there.select(rows[i][0], Uint32(0))
                        to = shared_pointer(scales, (top + i) * 4 + left // BLOCK)
                        fx.generic_store(to, Uint8(byte))
                factors = [[row] * self.vector for row in rows]
            if const_expr(result.transpose):
                self.stage_transposed(x, factors, result.format, shared.values, top, left)
            else:
                self.store(x, factors, result.format, values, at, top, left, m, k, align[1])
        gpu.barrier()
        for o, result in enumerate(self.results):
            if const_expr(result.transpose):
                self.store_transposed(shared.values, pointers[1 + 2 * o], at, tid, m, k, align[1])
            # The two results' scales are written by different halves of the threads.
            thread = tid - o * TILE
            if (thread >= 0) & (thread < TILE):
                staged = getattr(shared, f"scales_{o}")
                self.store_scales(
                    staged, pointers[2 + 2 * o], result, at, thread, m, k, scale_layout
                )

    def shared(self):
        """The LDS of a workgroup: scales [row][4], values [column][row] with chunks permuted."""
        arrays = {f"scales_{o}": fx.Array[Uint8, 4 * TILE, 16] for o in range(self.outputs)}
        if self.results[-1].transpose:
            arrays["values"] = fx.Array[Uint8, TILE * TILE, 16]
        return fx.struct(type("Shared", (), {"__annotations__": arrays, "__module__": __name__}))

    def place(self, m, k):
        """(batch, m, k) of a workgroup, in tiles; neighbours follow each other across."""
        bid = Uint32(Int32(fx.block_idx.x))
        tiles_m, tiles_k = (round_up(n, 2 * TILE) // Uint32(TILE) for n in (m, k))
        rest = bid % (tiles_m * tiles_k)
        return bid // (tiles_m * tiles_k), Int32(rest // tiles_k), Int32(rest % tiles_k)

    def load(self, x, at, top, left, m, k, align: int):
        """Words [row][word] of this lane's patch; beyond the array, of what is there."""
        batch, tile_m, tile_k = at
        first, col = tile_m * TILE + top, tile_k * TILE + left
        inside = (first < m) & (col < k)
        row = inside.select(as_int64(batch) * Int64(m) + Int64(first), Int64(0))
        col = inside.select(col, Int32(0))
        words = []
        for i in range(self.rows):
            start = (row + i) * Int64(k)
            if align >= 16:
                words.append(load_words(x, (start + Int64(col)) * self.itemsize, 4, align))
            else:
                kind, pieces = (Uint16 if self.itemsize == 2 else Uint32), []
                for j in range(self.vector):
                    near = (col + j < k).select(col + j, k - 1)
                    where = (start + Int64(near)) * self.itemsize
                    pieces.append(fx.generic_load(pointer(x, where, kind, self.itemsize)))
                vector = fx.Vector.from_elements(pieces, kind).bitcast(Uint32)
                words.append([vector[w] for w in range(4)])
        return words

    def blocks_across(self, amax, format: Format, rounding):
        """Blocks along rows: neighbours across share one. Per row what `convert.scale_of` gives."""
        rows = []
        for words in amax:
            word = largest(words, self.dtype)
            word = across_lanes(word, BLOCK // self.vector, self.dtype)
            bits = convert.largest_bits(word, self.dtype)
            rows.append(convert.scale_of(bits, format, self.dtype, rounding))
        return rows

    def blocks_down(self, amax, format: Format, rounding):
        """Blocks down columns: all lanes below each other share one. Per column."""
        columns = []
        for w in range(4):
            word = largest([row[w] for row in amax], self.dtype)
            for distance in (16, 32):
                if distance >= self.lanes:
                    word = convert.larger(word, convert.from_row(word, distance), self.dtype)
            for element in convert.elements(word, self.dtype):
                bits = element.bitcast(Uint32)
                columns.append(convert.scale_of(bits, format, self.dtype, rounding))
        return columns

    @flyc.jit
    def store(self, x, factors, format: fx.Constexpr, values, at, top, left, m, k,
              align: fx.Constexpr):  # fmt: skip
        """Values in the order of x, after an exchange 16 of one row to a lane."""
        batch, tile_m, tile_k = at
        n: fx.Constexpr = self.itemsize
        lane = Int32(fx.thread_idx.x) % WAVE
        col = tile_k * TILE + left // (n * self.vector) * (n * self.vector)
        for g in range_constexpr(self.rows // n):
            parts = [self.codes(x[i], factors[i], format) for i in range(g * n, g * n + n)]
            words = exchange(parts, lane)
            row = tile_m * TILE + top + g * n + lane % n
            where = (as_int64(batch) * Int64(m) + Int64(row)) * Int64(k) + Int64(col)
            if const_expr(align >= 16 or self.outputs == 2):  # 32 divides k: all 16 or none
                if (row < m) & (col < k):
                    store_words(values, where, words, align)
            else:
                codes = fx.Vector.from_elements(words, Uint32).bitcast(Uint8)
                for j in range_constexpr(16):
                    if (row < m) & (col + j < k):
                        fx.generic_store(values + (where + j), codes[j])

    def stage_transposed(self, x, factors, format: Format, shared, top, left):
        """The tile's values in LDS, a column of x after the other."""
        for j in range(self.vector):
            column = [row[j] for row in x]
            words = self.codes(column, [row[j] for row in factors], format)
            to = self.staged(left + j, top // 16) + top % 16
            vector = fx.Vector.from_elements(words, Uint32)
            fx.generic_store(shared_pointer(shared, to, Uint32, self.rows), vector)

    def staged(self, col, chunk):
        """Where 16 rows of a column lie in LDS.

        Chunks are permuted by the column's vector, or the lanes across, which are `vector` columns
        of 128 bytes apart, would all write to the same banks.
        """
        return col * TILE + (chunk ^ (col // self.vector % (TILE // 16))) * 16

    @flyc.jit
    def store_transposed(self, shared, values, at, tid, m, k, align: fx.Constexpr):
        """From LDS to values (batch, K, M), 16 bytes a thread and step."""
        batch, tile_m, tile_k = at
        chunks = TILE // 16
        threads = self.launch["threads"][0]
        for step in range_constexpr(TILE * chunks // threads):
            index = step * threads + tid
            chunk, col = index % chunks, index // chunks
            row, column = tile_m * TILE + chunk * 16, tile_k * TILE + col
            if (row < m) & (column < k):
                start = shared_pointer(shared, self.staged(col, chunk), Uint32, 16)
                vector = fx.generic_load(start, dtype=Uint32, count=4)
                where = (as_int64(batch) * Int64(k) + Int64(column)) * Int64(m) + Int64(row)
                store_words(values, where, [vector[i] for i in range(4)], align)

    @flyc.jit
    def store_scales(self, shared, scales, result: fx.Constexpr, at, thread, m, k, scale_layout):
        """A tile's scales, 128 rows x 4, rows being those of the matrix that is quantized."""
        batch, tile_m, tile_k = at
        if const_expr(result.down):
            rows, cols, tile_r, tile_c = k, m // BLOCK, tile_k, tile_m
        else:
            rows, cols, tile_r, tile_c = m, k // BLOCK, tile_m, tile_k
        row, col, slab = tile_r * TILE + thread, tile_c * 4, as_int64(batch)
        limits, stride = (rows, cols), Int32(1)
        if const_expr(result.down and not result.transpose):  # (batch, cols, rows)
            offset = (slab * Int64(cols) + Int64(col)) * Int64(rows) + Int64(row)
            stride = rows
        else:
            offset = (slab * Int64(rows) + Int64(row)) * Int64(cols) + Int64(col)
        for code, layout in TILED_LAYOUTS:
            here = scale_layout == Int32(code)
            padded = [round_up(n, pad) for n, pad in zip((rows, cols), layout.pad, strict=True)]
            height, width = (Uint32(n) for n in layout.tile)
            tile = slab * as_int64(padded[0] // height) + as_int64(Uint32(row) // height)
            tile = tile * as_int64(padded[1] // width) + as_int64(Uint32(col) // width)
            in_tile = offset_in_tile(layout, Uint32(row) % height, Uint32(col) % width)
            there = tile * math.prod(layout.tile) + as_int64(in_tile)
            offset = here.select(there, offset)
            stride = here.select(Int32(column_stride(layout)), stride)
            limits = tuple(here.select(Int32(p), n) for p, n in zip(padded, limits, strict=True))
        word = fx.generic_load(shared_pointer(shared, thread * 4, Uint32, 4))
        for c in range_constexpr(4):
            if (row < limits[0]) & (col + c < limits[1]):
                fx.generic_store(scales + (offset + Int64(stride) * c), Uint8(word >> 8 * c))


def kernel_of(variant: Variant, arch: str):
    """The kernel that serves a variant.

    Raises:
      NotImplementedError: there is none.
    """
    if variant.op != "quantize" or variant.form not in FORMS:
        raise NotImplementedError(f"{variant.name}: there are kernels of quantize for {FORMS}")
    return (Flat if variant.form == "last" else Tiled)(variant, arch)
