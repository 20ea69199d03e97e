"""MX dequantize on AMD, in FlyDSL. Matches reference.dequantize bit for bit.

The same two ways to cut the work as quantize.py: `Flat` for blocks along the last axis, `Tiled` for
all that knows rows. Codes are loaded 16 a lane and exchanged between lanes before they grow, so
that neighbours write side by side; transposed forms transpose codes, in LDS, and go on as others.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import Int32, Int64, Uint8, Uint16, Uint32, const_expr, gpu, range_constexpr

from jax_mx.formats import BLOCK
from jax_mx.kernels.entry import ALL
from jax_mx.kernels.flydsl import convert
from jax_mx.kernels.flydsl.kernel import (
    WAVE,
    Kernel,
    Strip,
    as_int64,
    column_stride,
    exchange,
    load_byte,
    load_bytes,
    load_words,
    offset_in_tile,
    pointer,
    shared_pointer,
    store_words,
    tiles_of,
)
from jax_mx.layouts import ScaleLayout
from jax_mx.variants import Variant

CODES = 16  # of a lane and load


class Dequantize(Kernel):
    """What both ways share. A lane writes `n` times 16 bytes, `each` codes.

    Four lanes exchange their codes, so that they write side by side.
    """

    float_first = False

    def __init__(self, variant: Variant, arch: str, layout: ScaleLayout, aligned: bool):
        super().__init__(variant, arch, layout, aligned)
        self.n = self.itemsize
        self.each = CODES // self.n

    def source(self, lane, s: int):
        """The lane whose codes this one writes the s-th time: the (lane % n)-th part of them."""
        first = lane // 4 * 4
        return first + s if self.n == 4 else first + lane % 4 // 2 + 2 * s

    def exchanged(self, words: list, lane) -> list[list]:
        """The words that a lane writes, each time, from what four lanes have."""
        if self.n == 4:
            return [[word] for word in exchange([[word] for word in words], lane)]
        odd, found = lane % 2 == Uint32(1), []
        for control in (0x50, 0xFA):  # the lanes (0, 0, 1, 1), and (2, 2, 3, 3)
            low, high = (
                [convert.from_lane(word, control) for word in half]
                for half in (words[:2], words[2:])
            )
            found.append([odd.select(b, a) for a, b in zip(low, high, strict=True)])
        return found

    def floats(self, codes: list, factors: list, poisons: list) -> list:
        """The words of codes, by four their factors and their poison."""
        return [
            word
            for code, four, poison in zip(codes, factors, poisons, strict=True)
            for word in convert.unpack_four(
                code, four, poison, self.formats[0], self.dtype, self.arch
            )
        ]

    def one_scale(self, byte) -> tuple[list, list]:
        """Factors and poisons of codes that share a scale."""
        words = self.each // 4
        return [[convert.factor_of(byte)] * 4] * words, [convert.poison_of(byte)] * words

    def store_floats(self, y, where, words: list) -> None:
        """16 bytes at an offset; in the pieces that the alignment allows."""
        if self.aligned:
            store_words(y, where, words, 16)
            return
        kind = Uint16 if self.itemsize == 2 else Uint32
        pieces = fx.Vector.from_elements(words, Uint32).bitcast(kind)
        to = pointer(y, where, kind, self.itemsize)
        for i in range(self.each):
            fx.generic_store(to + Int32(i), pieces[i])


class Flat(Dequantize):
    """values (..., rows, cols, 32) and scales (..., rows, cols) in the layout -> floats."""

    waves = 4
    chunks = 2
    per_chunk = WAVE * CODES // BLOCK  # blocks
    elements_per_thread = chunks * CODES
    threads = waves * WAVE
    blocks = waves * chunks * per_chunk

    def __init__(self, variant: Variant, arch: str, layout: ScaleLayout, aligned: bool):
        super().__init__(variant, arch, layout, aligned)
        self.grid = [[0, 1, *ALL, self.blocks]]
        self.extents = [[8, [1, *ALL]]]
        if layout.is_tiled:
            self.extents += [[4, [0, -3, -2]], [4, [0, -2, -1]]]

    @flyc.kernel
    def kernel(self, pointers, scalars):
        values, scales, y = pointers
        lane = convert.lane_id()
        strip = Strip(self.layout, self.blocks, scalars)
        first = convert.wave_id() * (self.chunks * self.per_chunk)
        n, each, size = self.n, self.each, self.itemsize
        # Four lanes have neighbours of one row, two of each round.
        row, col = strip.find(first + lane // 4 * (2 * self.chunks))
        words = []
        for c in range_constexpr(self.chunks):
            block, _, _ = strip.next_to(row, col, lane % 4 // 2 + 2 * c)
            where = block * BLOCK + as_int64(lane % 2 * CODES)
            words.append(load_words(values + strip.block * BLOCK, where, 4, self.align[0]))
        places = [strip.next_to(row, col, b) for b in range_constexpr(2 * self.chunks)]
        bytes_ = [load_byte(scales + (strip.offset + as_int64(place[1]))) for place in places]
        for c in range_constexpr(self.chunks):
            codes = self.exchanged(words[c], lane)
            for s in range_constexpr(n):
                number = 2 * c + 2 * s // n
                block, _, inside = places[number]
                floats = self.floats(codes[s], *self.one_scale(bytes_[number]))
                in_block = self.source(lane, s) % 2 * CODES + lane % n * each
                where = (block * BLOCK + as_int64(in_block)) * size
                if inside:
                    self.store_floats(y + strip.block * (BLOCK * size), where, floats)


TILE = 128  # codes a side, of a workgroup of `Tiled`; a wave has 32 rows of it


class Tiled(Dequantize):
    """Floats that lie as (batch, H, W), of codes that lie so, or as (batch, W, H).

    A lane has 16 codes of 4 rows. Scales go through LDS: as they are needed, [row][block] or, where
    blocks run down columns, [block][column].
    """

    depth = 4
    lanes = TILE // CODES  # across a wave
    elements_per_thread = depth * CODES
    threads = WAVE * TILE // BLOCK

    def __init__(self, variant: Variant, arch: str, layout: ScaleLayout, aligned: bool):
        super().__init__(variant, arch, layout, aligned)
        way, self.transpose = variant.form.split("_")[0], variant.form.endswith("transposed")
        self.blocks = {"second": "column", "last": "row", "square": "square"}[way]  # of floats
        square = self.blocks == "square"
        lead, *axes = ((0, -4), (-4, -3), (-3, -2)) if square else ((0, -3), (-3, -2), (-2, -1))
        self.extents = [[4, [0, *axis]] for axis in axes]
        # The view counts blocks where they run.
        self.units = [
            BLOCK if along in (self.blocks, "square") or square else 1
            for along in ("column", "row")
        ]
        self.grid = [
            *([0, 0, *axis, TILE // unit] for axis, unit in zip(axes, self.units, strict=True)),
            [0, 0, *lead, 1],
        ]
        # Rows of whole 16 codes; what counts blocks is whole.
        self.divide = [
            [0, *axis, CODES] for axis, unit in zip(axes, self.units, strict=True) if unit == 1
        ]

    @flyc.kernel
    def kernel(self, pointers, scalars):
        values, scales, y = pointers
        high, wide = (Uint32(n) * unit for n, unit in zip(scalars, self.units, strict=True))
        lane, wave = convert.lane_id(), convert.wave_id()
        at = self.place(high, wide)
        row = wave * BLOCK + lane // self.lanes * self.depth  # of this lane's codes in the tile
        col = lane % self.lanes * CODES
        shared = fx.SharedAllocator().allocate(self.shared()).peek()
        words = self.load(values, at, row, col, high, wide)
        self.load_scales(scales, shared.scales, at, high, wide)
        if const_expr(self.transpose):
            self.stage_transposed(words, shared.values, row, col)
        gpu.barrier()
        if const_expr(self.transpose):
            words = self.transposed(shared.values, row, col)
        self.store(y, words, shared.scales, at, wave, row, high, wide)

    def shared(self):
        """The LDS of a workgroup: scales, and values [column][row] with chunks."""
        count = TILE * TILE // BLOCK // (BLOCK if self.blocks == "square" else 1)
        arrays = {"scales": fx.Array[Uint8, count, 16]}
        if self.transpose:
            arrays["values"] = fx.Array[Uint8, TILE * TILE, 16]
        return fx.struct(type("Shared", (), {"__annotations__": arrays, "__module__": __name__}))

    def place(self, high, wide):
        """(batch, down, across) of a workgroup, in tiles; neighbours follow each other across."""
        bid = Uint32(Int32(fx.block_idx.x))
        down, across = ((n + (TILE - 1)) // TILE for n in (high, wide))
        batch, rest = bid // (down * across), bid % (down * across)
        return batch, rest // across, rest % across

    def as_codes(self, pair):
        """What is (of H, of W) as (of the codes' rows, of their columns)."""
        return pair[::-1] if self.transpose else pair

    # ---- what is read ---
    def load(self, values, at, row, col, high, wide):
        """Words [row][word] of this lane's codes; beyond the array, of what is there."""
        batch, *tile = at
        (rows, cols), (tile_r, tile_c) = self.as_codes((high, wide)), self.as_codes(tile)
        row, col = tile_r * TILE + row, tile_c * TILE + col
        origin = as_int64(batch) * as_int64(rows) * as_int64(cols)
        found = []
        for i in range(self.depth):
            if self.aligned:
                inside = (row + i < rows) & (col < cols)
                where = as_int64(row + i) * as_int64(cols) + as_int64(col)
                where = origin + inside.select(where, Int64(0))
                found.append(load_words(values, where, 4, 16))
            else:
                near = (row + i < rows).select(row + i, rows - 1)
                start = origin + as_int64(near) * as_int64(cols)
                codes = []
                for j in range(CODES):
                    near = (col + j < cols).select(col + j, cols - 1)
                    codes.append(start + as_int64(near))
                found.append(load_bytes(values, codes))
        return found

    @flyc.jit
    def load_scales(self, scales, staged, at, high, wide):
        """A tile's scales to LDS, four a thread as they lie."""
        batch, *tile = at
        tiled: fx.Constexpr = self.layout.is_tiled
        # Which of (H, W) the rows of the scales' matrix are, as it lies: tiles have blocks across.
        swap = self.transpose
        if const_expr(tiled):
            swap = self.blocks == "column"
        across = [self.blocks in ("column", "square"), self.blocks in ("row", "square")]
        extents = [n // BLOCK if b else n for n, b in zip((high, wide), across, strict=True)]
        counts = [TILE // BLOCK if b else TILE for b in across]
        if const_expr(swap):
            extents, tile, counts = extents[::-1], tile[::-1], counts[::-1]
        (rows, cols), (tile_r, tile_c), (in_row, in_col) = extents, tile, counts
        per_row: fx.Constexpr = in_col // 4
        thread = Uint32(Int32(fx.thread_idx.x))
        line, start = thread // per_row, thread % per_row * 4
        row, col = tile_r * in_row + line, tile_c * in_col + start
        if (thread < Uint32(in_row * per_row)) & (row < rows) & (col < cols):
            if const_expr(tiled):
                word = self.word_of_tiles(scales, batch, row, col, rows, cols)
            else:
                offset = (as_int64(batch) * as_int64(rows) + as_int64(row)) * as_int64(cols)
                offset = offset + as_int64(col)
                word = Uint32(0)
                whole = fx.Boolean(False)
                if const_expr(self.aligned):
                    whole = cols % 4 == Uint32(0)
                if whole:
                    word = load_words(scales, offset, 1, 4)[0]
                else:
                    last = cols - 1 - col  # how many more there are
                    near = [(last < Uint32(c)).select(last, Uint32(c)) for c in range_constexpr(4)]
                    word = load_bytes(scales, [offset + as_int64(c) for c in near])[0]
            if const_expr(swap):
                for c in range_constexpr(4):
                    to = shared_pointer(staged, Int32((start + c) * in_row + line))
                    fx.generic_store(to, Uint8(word >> 8 * c))
            else:
                to = shared_pointer(staged, Int32(line * in_col + start), Uint32, 4)
                fx.generic_store(to, word)

    def word_of_tiles(self, scales, batch, row, col, rows, cols):
        """Four neighbours of a row of the scales' matrix, in tiles."""
        layout = self.layout
        tiles_r, tiles_c = tiles_of(layout, rows, cols)
        height, width = layout.tile
        tile = as_int64(batch) * as_int64(tiles_r) + as_int64(row // height)
        tile = tile * as_int64(tiles_c) + as_int64(col // width)
        offset = tile * (height * width)
        offset = offset + as_int64(offset_in_tile(layout, row % height, col % width))
        stride = column_stride(layout)
        if stride == 1:
            return load_words(scales, offset, 1, self.align[1])[0]
        return load_bytes(scales, [offset + Int64(stride * c) for c in range(4)])[0]

    # ---- transposed ---
    def stage_transposed(self, words: list, shared, row, col) -> None:
        """The tile's codes in LDS, a column after the other, four rows a write."""
        start = self.staged(col, row // CODES) + row % CODES
        for w in range(4):
            a, b, c, d = (line[w] for line in words)
            low, high = (
                [convert.bytes_of(y, x, *s) for s in ((0, 4, 1, 5), (2, 6, 3, 7))]
                for x, y in ((a, b), (c, d))
            )
            for j in range(4):
                select = (0, 1, 4, 5) if j % 2 == 0 else (2, 3, 6, 7)
                column = convert.bytes_of(high[j // 2], low[j // 2], *select)
                to = shared_pointer(shared, Int32(start + (4 * w + j) * TILE), Uint32, 4)
                fx.generic_store(to, column)

    def staged(self, line, chunk):
        """Where a column's 16 rows lie in LDS.

        Chunks are permuted by the columns' lane, or all lanes across would write to the same banks.
        """
        return line * TILE + (chunk ^ (line // CODES % self.lanes)) * CODES

    def transposed(self, shared, row, col) -> list:
        """The same lane's codes of the transposed tile."""
        start, found = self.staged(row, col // CODES), []
        for i in range(self.depth):
            at = shared_pointer(shared, Int32(start + i * TILE), Uint32, 16)
            vector = fx.generic_load(at, dtype=Uint32, count=4)
            found.append([vector[w] for w in range(4)])
        return found

    # ---- what is written ---
    @flyc.jit
    def store(self, y, words, staged, at, wave, row, high, wide):
        """Floats in the order of the codes."""
        batch, tile_h, tile_w = at
        n: fx.Constexpr = self.n
        lane = convert.lane_id()
        lefts = [
            self.source(lane, s) % self.lanes * CODES + lane % n * self.each
            for s in range_constexpr(n)
        ]
        if const_expr(self.blocks == "column"):
            columns = [self.column_scales(staged, wave, left) for left in lefts]
        origin = (as_int64(batch) * as_int64(high) + as_int64(tile_h * TILE + row)) * as_int64(wide)
        for i in range_constexpr(self.depth):
            codes = self.exchanged(words[i], lane)
            for s in range_constexpr(n):
                if const_expr(self.blocks == "column"):
                    pair = columns[s]
                else:
                    pair = self.one_scale(self.scale_at(staged, row + i, lefts[s]))
                floats = self.floats(codes[s], *pair)
                left = tile_w * TILE + lefts[s]
                where = origin + as_int64(wide) * i + as_int64(left)
                if const_expr(self.aligned or self.units[1] > 1):
                    if (tile_h * TILE + row + i < high) & (left < wide):
                        self.store_floats(y, where * self.itemsize, floats)
                else:
                    kind = Uint16 if const_expr(self.itemsize == 2) else Uint32
                    pieces = fx.Vector.from_elements(floats, Uint32).bitcast(kind)
                    to = pointer(y, where * self.itemsize, kind, self.itemsize)
                    for e in range_constexpr(self.each):
                        if (tile_h * TILE + row + i < high) & (left + e < wide):
                            fx.generic_store(to + Int32(e), pieces[e])

    def scale_at(self, staged, row, col):
        """The byte of the block that this code of the tile is in."""
        line = row // BLOCK if self.blocks == "square" else row
        at = shared_pointer(staged, Int32(line * (TILE // BLOCK) + col // BLOCK))
        return load_byte(at)

    def column_scales(self, staged, wave, left) -> tuple[list, list]:
        """Factors and poisons of the columns of one write."""
        at = shared_pointer(staged, Int32(wave * TILE + left), Uint32, 4)
        words = [fx.generic_load(at + Int32(w)) for w in range(self.each // 4)]
        factors = [
            [convert.factor_of(word >> 8 * i & Uint32(0xFF)) for i in range(4)] for word in words
        ]
        return factors, [convert.poison_of_four(word) for word in words]


def kernel_of(variant: Variant, arch: str, layout: ScaleLayout, aligned: bool):
    """The kernel of a variant's entry, for scales in this layout."""
    return (Flat if variant.form == "last" else Tiled)(variant, arch, layout, aligned)
