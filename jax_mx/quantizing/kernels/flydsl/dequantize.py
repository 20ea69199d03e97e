"""MX dequantize on AMD, in FlyDSL. Matches reference.dequantize bit for bit.

The same two ways to cut the work as quantize.py: `Flat` for blocks along the last axis, `Tiled` for
all that knows rows. Codes are loaded 16 bytes a lane and exchanged between lanes before they grow,
so that neighbours write side by side; transposed forms transpose bytes, in LDS, and go on as the
others do.
"""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import Int32, Int64, Uint8, Uint16, Uint32, const_expr, gpu, range_constexpr

from jax_mx.formats.directions import LAST, Blocks
from jax_mx.formats.formats import BLOCK
from jax_mx.formats.layouts import ScaleLayout
from jax_mx.quantizing.facts.variants import Variant
from jax_mx.quantizing.kernels import geometry
from jax_mx.quantizing.kernels.flydsl import convert
from jax_mx.quantizing.kernels.flydsl.kernel import (
    WAVE,
    Kernel,
    Strip,
    as_int64,
    composite,
    exchange,
    load_byte,
    load_bytes,
    load_words,
    offset_in_tiles,
    pointer,
    shared_by_four,
    shared_pointer,
    store_words,
)
from jax_mx.quantizing.kernels.geometry import Extents, Place, Tile

BYTES = 16  # of a lane and load


class Dequantize(Kernel):
    """The base of both ways. A lane writes `n` times 16 bytes, `per_write` codes.

    Four lanes exchange their codes, so that they write side by side. A byte has codes of `down`
    floats below each other, or of `across` floats next to each other.
    """

    def __init__(self, variant: Variant, arch: str, layout: ScaleLayout, aligned: bool):
        super().__init__(variant, arch, layout, aligned)
        (self.operand,) = geometry.outputs_of(variant.form, self.formats)
        self.down, self.across = self.operand.packed
        self.codes = BYTES * self.across  # of a lane and load, in a row
        self.n = self.itemsize * self.across
        self.per_write = self.codes // self.n

    def lender(self, lane, s: int):
        """The lane of whose codes this one writes a part the s-th time."""
        first = lane // 4 * 4
        if self.n == 2:
            return first + lane % 4 // 2 + 2 * s
        return first + s * 4 // self.n

    def start(self, lane, s: int):
        """The first of that lane's codes in the part."""
        part = lane % min(self.n, 4)
        if self.n == 8:
            part = part + s % 2 * 4
        return part * self.per_write

    def exchanged(self, codes: list, lane) -> list[list]:
        """The words of codes that a lane writes each time, from four lanes: `down` rows' words."""
        if self.n == 8:  # of half a word each: those that are written together, in one
            codes = [
                convert.bytes_of(codes[2 + i // 2], codes[i // 2], *half)
                for i, half in enumerate(((0, 1, 4, 5), (2, 3, 6, 7)) * 2)
            ]
        if self.n > 2:
            parts = [[word] for word in exchange([[word] for word in codes], lane)]
        else:
            parts = shared_by_four((codes[:2], codes[2:]), lane)
        if self.down > 1:
            return [[*zip(*map(convert.separated, row), strict=True)] for row in parts]
        if self.across > 1:
            parts = [convert.in_order(word) for (word,) in parts]
        if self.n == 8:
            parts = [[word] for row in parts for word in row]
        return [[row] for row in parts]

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
        count = self.per_write // 4
        return [[convert.factor_of(byte)] * 4] * count, [convert.poison_of(byte)] * count

    def store_floats(self, y, where, words: list) -> None:
        """Stores 16 bytes at an offset, in the pieces that the alignment allows."""
        if self.aligned:
            store_words(y, where, words, 16)
            return
        dtype = Uint16 if self.itemsize == 2 else Uint32
        pieces = fx.Vector.from_elements(words, Uint32).bitcast(dtype)
        to = pointer(y, where, dtype, self.itemsize)
        for i in range(self.per_write):
            fx.generic_store(to + Int32(i), pieces[i])


class Flat(Dequantize):
    """values (..., rows, cols, 32) and scales (..., rows, cols) in the layout -> floats."""

    elements_per_thread = BLOCK

    def __init__(self, variant: Variant, arch: str, layout: ScaleLayout, aligned: bool):
        super().__init__(variant, arch, layout, aligned)
        self.threads = self.blocks = self.tuned("Flat")["waves"] * WAVE
        self.sharers = BLOCK // self.codes  # lanes that share a block
        self.chunks = self.sharers  # loads of a lane, so that it has a block's worth
        self.grid = geometry.flat_grid(1, self.blocks)
        self.extents = [geometry.length_of(1)]
        if layout.is_tiled:
            self.extents += [geometry.flat_rows(), geometry.flat_blocks()]

    @flyc.kernel
    def kernel(self, pointers, scalars):
        arrays = self.named(pointers)
        values, scales, y = arrays["codes_0"], arrays["scales_0"], arrays["y"]
        lane = convert.lane_id()
        strip = Strip(self.layout, self.blocks, scalars)
        first = convert.wave_id() * WAVE
        n, size, sharers = self.n, self.itemsize, self.sharers
        four: fx.Constexpr = 4 // sharers  # blocks of four lanes and a chunk
        bytes_: fx.Constexpr = BLOCK // self.across  # of a block
        # Four lanes have neighbours of one row.
        row, col = strip.find(first + lane // 4 * 4)
        loaded = []
        for c in range_constexpr(self.chunks):
            block, _, _ = strip.next_to(row, col, lane % 4 // sharers + four * c)
            where = block * bytes_ + as_int64(lane % sharers * BYTES)
            loaded.append(load_words(values + strip.block * bytes_, where, 4, self.align[0]))
        places = [strip.next_to(row, col, b) for b in range_constexpr(4)]
        scale_bytes = [load_byte(scales + (strip.offset + as_int64(block[1]))) for block in places]
        for c in range_constexpr(self.chunks):
            codes = self.exchanged(loaded[c], lane)
            for s in range_constexpr(n):
                number = four * c + four * s // n
                block, _, inside = places[number]
                floats = self.floats(codes[s][0], *self.one_scale(scale_bytes[number]))
                in_block = self.lender(lane, s) % sharers * self.codes + self.start(lane, s)
                where = (block * BLOCK + as_int64(in_block)) * size
                if inside:
                    self.store_floats(y + strip.block * (BLOCK * size), where, floats)


TILE = 128  # codes a side, of a workgroup of `Tiled`; a wave has 32 rows of it


class Tiled(Dequantize):
    """Floats that lie as (batch, H, W), of codes that lie so, or as (batch, W, H).

    A lane has 16 bytes of `depth` rows. Scales go through LDS: as they are needed, [row][block] or,
    where blocks run down columns, [block][column].
    """

    threads = WAVE * TILE // BLOCK

    def __init__(self, variant: Variant, arch: str, layout: ScaleLayout, aligned: bool):
        super().__init__(variant, arch, layout, aligned)
        form, direction = variant.form, self.operand.direction
        self.blocks, self.is_transposed = direction.blocks, direction.transposed  # of floats
        packed = self.down, self.across
        # How many rows and columns of codes, as they lie, a byte holds.
        self.packed = packed[::-1] if self.is_transposed else packed
        self.depth = 4 // (self.down * self.across)
        self.elements_per_thread = self.depth * BYTES * self.down * self.across
        self.extents = geometry.extents_of(form)
        self.units = geometry.units_of(form)
        self.grid = geometry.grid_of(form, Extents(TILE, TILE))
        self.divide = geometry.divide_of(form, 16)  # rows of whole 16 codes

    @flyc.kernel
    def kernel(self, pointers, scalars):
        arrays = self.named(pointers)
        values, scales, y = arrays["codes_0"], arrays["scales_0"], arrays["y"]
        high, wide = (Uint32(n) * unit for n, unit in zip(scalars, self.units, strict=True))
        lane, wave = convert.lane_id(), convert.wave_id()
        at = self.place(high, wide)
        row, col = self.patch(lane, wave, *self.packed)
        line, byte = self.patch(lane, wave, self.down, self.across)  # as floats lie
        shared = fx.SharedAllocator().allocate(self.shared()).peek()
        loaded = self.load(values, at, row, col)
        self.load_scales(scales, shared.scales, at)
        if const_expr(self.is_transposed):
            self.stage_transposed(loaded, shared.values, row, col)
        gpu.barrier()
        if const_expr(self.is_transposed):
            loaded = self.transposed(shared.values, line, byte)
        self.store(y, loaded, shared.scales, at, wave, line * self.down)

    def patch(self, lane, wave, down: int, across: int) -> tuple:
        """The first row and column of this lane's bytes in the tile."""
        lanes = TILE // across // BYTES  # across a wave
        return wave * (BLOCK // down) + lane // lanes * self.depth, lane % lanes * BYTES

    def shared(self):
        """The LDS of a workgroup: scales, and values [column][row] with chunks."""
        count = TILE * TILE // BLOCK // (BLOCK if self.blocks is Blocks.SQUARE else 1)
        arrays = {"scales": fx.Array[Uint8, count, 16]}
        if self.is_transposed:
            arrays["values"] = fx.Array[Uint8, TILE * TILE // (self.down * self.across), 16]
        return composite(fx.struct, arrays)

    def place(self, high, wide) -> Tile:
        """A workgroup's tile of floats; neighbours follow each other across."""
        bid = Uint32(Int32(fx.block_idx.x))
        down, across = ((n + (TILE - 1)) // TILE for n in (high, wide))
        batch, rest = bid // (down * across), bid % (down * across)
        return Tile(batch, rest // across, rest % across, high, wide)

    def as_codes(self, pair):
        """Turns a pair for (H, W) into one for the codes' (rows, columns)."""
        return pair[::-1] if self.is_transposed else pair

    # ---- what is read ---
    def load(self, values, at: Tile, row, col):
        """Words [row][word] of this lane's bytes; beyond the array, of what is there."""
        batch, *tile = at
        (tile_r, tile_c), (rows, cols) = self.as_codes(tile[:2]), self.as_codes(tile[2:])
        down, across = self.packed
        rows, cols = rows // down, cols // across
        row, col = tile_r * (TILE // down) + row, tile_c * (TILE // across) + col
        origin = as_int64(batch) * as_int64(rows) * as_int64(cols)
        rows_of_words = []
        for i in range(self.depth):
            if self.aligned:
                inside = (row + i < rows) & (col < cols)
                where = as_int64(row + i) * as_int64(cols) + as_int64(col)
                where = origin + inside.select(where, Int64(0))
                rows_of_words.append(load_words(values, where, 4, 16))
            else:
                near = (row + i < rows).select(row + i, rows - 1)
                start = origin + as_int64(near) * as_int64(cols)
                codes = []
                for j in range(BYTES):
                    near = (col + j < cols).select(col + j, cols - 1)
                    codes.append(start + as_int64(near))
                rows_of_words.append(load_bytes(values, codes))
        return rows_of_words

    @flyc.jit
    def load_scales(self, scales, staged, at: Tile):
        """Brings a tile's scales to LDS, four a thread as they lie."""
        batch, *tile, high, wide = at
        tiled: fx.Constexpr = self.layout.is_tiled
        direction: fx.Constexpr = self.operand.direction
        turned: fx.Constexpr = geometry.is_turned(direction, self.layout)
        if const_expr(turned):
            tile = tile[::-1]
        rows, cols = geometry.scales_shape(direction, Extents(high, wide), turned)
        in_row, in_col = geometry.scales_shape(direction, Extents(TILE, TILE), turned)
        tile_r, tile_c = tile
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
            if const_expr(turned):
                for c in range_constexpr(4):
                    to = shared_pointer(staged, Int32((start + c) * in_row + line))
                    fx.generic_store(to, Uint8(word >> 8 * c))
            else:
                to = shared_pointer(staged, Int32(line * in_col + start), Uint32, 4)
                fx.generic_store(to, word)

    def word_of_tiles(self, scales, batch, row, col, rows, cols):
        """Four neighbours of a row of the scales' matrix, in tiles."""
        offset = offset_in_tiles(self.layout, Place(batch, row, col), Extents(rows, cols))
        stride = self.layout.column_stride
        if stride == 1:
            return load_words(scales, offset, 1, self.align[1])[0]
        return load_bytes(scales, [offset + Int64(stride * c) for c in range(4)])[0]

    # ---- transposed ---
    def stage_transposed(self, words: list, shared, row, col) -> None:
        """Puts the tile's bytes into LDS, one column after the other, `depth` rows a write."""
        starts = self.line_starts(col, row)
        for w in range(4):
            pairs = [
                [convert.bytes_of(y[w], x[w], *s) for s in ((0, 4, 1, 5), (2, 6, 3, 7))]
                for x, y in zip(words[::2], words[1::2], strict=True)
            ]
            for j in range(4):
                line = 4 * w + j
                start = Int32(starts[line % self.across] + line // self.across * TILE)
                if self.depth == 2:
                    column = Uint16(pairs[0][j // 2] >> j % 2 * 16)
                    fx.generic_store(shared_pointer(shared, start, Uint16, 2), column)
                else:
                    select = (0, 1, 4, 5) if j % 2 == 0 else (2, 3, 6, 7)
                    column = convert.bytes_of(pairs[1][j // 2], pairs[0][j // 2], *select)
                    fx.generic_store(shared_pointer(shared, start, Uint32, 4), column)

    def line_starts(self, line, byte) -> list:
        """Where this byte of a column lies in LDS, and of its next ones: `across` share 128 bytes.

        Chunks are permuted by the columns' lane, or all lanes across would write to the same banks.
        """
        chunks = TILE // BYTES
        lanes = chunks // self.packed[1]  # across
        starts = []
        for i in range(self.across):
            chunk, start = byte // BYTES, line // self.across * TILE
            if i:
                chunk = chunk + i * (chunks // self.across)
            chunk = chunk ^ (line // BYTES * (chunks // lanes) % chunks)
            starts.append(start + chunk * BYTES + byte % BYTES)
        return starts

    def transposed(self, shared, row, col) -> list:
        """The bytes of this lane in the transposed tile."""
        starts, lines = self.line_starts(row, col), []
        for i in range(self.depth):
            start = Int32(starts[i % self.across] + i // self.across * TILE)
            at = shared_pointer(shared, start, Uint32, 16)
            vector = fx.generic_load(at, dtype=Uint32, count=4)
            lines.append([vector[w] for w in range(4)])
        return lines

    # ---- what is written ---
    @flyc.jit
    def store(self, y, words, staged, at: Tile, wave, row):
        """Stores floats in the order of the codes."""
        batch, tile_h, tile_w, high, wide = at
        n: fx.Constexpr = self.n
        lane = convert.lane_id()
        lanes: fx.Constexpr = TILE // self.codes  # across a wave
        lefts = [
            self.lender(lane, s) % lanes * self.codes + self.start(lane, s)
            for s in range_constexpr(n)
        ]
        if const_expr(self.blocks is Blocks.SECOND):
            columns = [self.column_scales(staged, wave, left) for left in lefts]
        origin = (as_int64(batch) * as_int64(high) + as_int64(tile_h * TILE + row)) * as_int64(wide)
        for i in range_constexpr(self.depth):
            codes = self.exchanged(words[i], lane)
            for s in range_constexpr(n):
                for j in range_constexpr(i * self.down, (i + 1) * self.down):
                    if const_expr(self.blocks is Blocks.SECOND):
                        pair = columns[s]
                    else:
                        pair = self.one_scale(self.scale_at(staged, row + j, lefts[s]))
                    floats = self.floats(codes[s][j % self.down], *pair)
                    left = tile_w * TILE + lefts[s]
                    where = origin + as_int64(wide) * j + as_int64(left)
                    if const_expr(self.aligned or self.units[1] > 1):
                        if (tile_h * TILE + row + j < high) & (left < wide):
                            self.store_floats(y, where * self.itemsize, floats)
                    else:
                        dtype = Uint16 if const_expr(self.itemsize == 2) else Uint32
                        pieces = fx.Vector.from_elements(floats, Uint32).bitcast(dtype)
                        to = pointer(y, where * self.itemsize, dtype, self.itemsize)
                        for e in range_constexpr(self.per_write):
                            if (tile_h * TILE + row + j < high) & (left + e < wide):
                                fx.generic_store(to + Int32(e), pieces[e])

    def scale_at(self, staged, row, col):
        """The byte of the block that this code of the tile is in."""
        line = row // BLOCK if self.blocks is Blocks.SQUARE else row
        at = shared_pointer(staged, Int32(line * (TILE // BLOCK) + col // BLOCK))
        return load_byte(at)

    def column_scales(self, staged, wave, left) -> tuple[list, list]:
        """Factors and poisons of the columns of one write."""
        at = shared_pointer(staged, Int32(wave * TILE + left), Uint32, 4)
        scales = [fx.generic_load(at + Int32(w)) for w in range(self.per_write // 4)]
        factors = [
            [convert.factor_of(word >> 8 * i & Uint32(0xFF)) for i in range(4)] for word in scales
        ]
        return factors, [convert.poison_of_four(word) for word in scales]


def kernel_of(variant: Variant, arch: str, layout: ScaleLayout, aligned: bool):
    """The kernel of a variant's entry, for scales in this layout."""
    return (Flat if variant.form == LAST else Tiled)(variant, arch, layout, aligned)
