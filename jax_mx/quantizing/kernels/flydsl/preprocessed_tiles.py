"""Forms with the second-to-last axis, with elements that are preprocessed: `PreprocessedTiled`."""

from types import SimpleNamespace

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import Int32, Int64, Uint8, Uint16, Uint32, const_expr, gpu

from jax_mx.formats.directions import Blocks
from jax_mx.formats.formats import BLOCK
from jax_mx.quantizing.kernels.flydsl import convert, preprocessed
from jax_mx.quantizing.kernels.flydsl.kernel import (
    WAVE,
    as_int64,
    composite,
    offset_of_values,
    share_in_wave,
    shared_by_four,
    shared_pointer,
)
from jax_mx.quantizing.kernels.flydsl.tiled import TILE, Patch, Target, Tiled
from jax_mx.quantizing.kernels.geometry import Extents, Output, Tile

STACKED = 16  # how far apart a lane's two blocks of rows are


class PreprocessedTiled(Tiled):
    """`Tiled` for elements of 16 bits that are preprocessed; block data come behind x.

    x goes to LDS, where each wave has 32 rows. A lane takes two whole blocks of each result: blocks
    along rows come from two rows, blocks along columns from two neighbours, whose elements it reads
    a word at a time. Where transforms span two blocks it takes these: neighbours of a row, or of a
    column whose rows two waves have. Results of blocks along columns wait in registers until the
    tile's LDS is free for them. One result may have a code a byte: it is made as in `Tiled`, before
    anything else, with LDS of its own.
    """

    @flyc.kernel
    def kernel(self, pointers, scalars):
        lengths, arrays = self.lengths(scalars), self.named(pointers)
        tid, lane, wave = Uint32(Int32(fx.thread_idx.x)), convert.lane_id(), convert.wave_id()
        across, at = lane % self.lanes, self.place(*lengths)
        top = wave * BLOCK + lane // self.lanes * self.rows
        allocator = fx.SharedAllocator()
        shared = allocator.allocate(self.shared())
        x, staged = shared.x.peek(), shared.staged.peek()

        patch = Patch(wave, top, across * self.vector)
        rows = self.load(arrays["x"], at, patch)
        places = [
            [] if self.is_plain(o) else self.places(o, wave, lane) for o in range(len(self.results))
        ]
        settings = [
            {name: Uint32(n) for name, n in self.of_result(scalars, o).items()}
            for o in range(len(self.results))
        ]
        lds = self.quantize_plain(rows, allocator, staged, arrays, scalars, (at, patch))
        data = self.data(arrays, places, settings, at)
        for i, row in enumerate(rows):
            to = shared_pointer(x, self.place_of_x(top + i, across), Uint32, 16)
            fx.generic_store(to, fx.Vector.from_elements(row, Uint32))
        if const_expr(self.mode(-1).blocks > 1):
            gpu.barrier()
        else:
            share_in_wave()
        outputs = []
        for o, result in enumerate(self.results):
            if const_expr(self.is_plain(o)):
                outputs.append([])
                continue
            preprocessed.flush_subnormals(self.mode(o), settings[o].get("prescale", Uint32(0)))
            outputs.append(self.quantized(o, x, places[o], settings[o], data[o]))
            if const_expr(result.blocks is Blocks.LAST):
                # No store passes a change of the mode, so neither does what it depends on.
                to = Target(arrays[f"codes_{o}"], settings[o]["value_tiles"])
                self.store_rows(o, outputs[o], places[o], to, at, (wave, lane))
        gpu.barrier()
        for o, result in enumerate(self.results):
            for i, ((row, col), (scale, _)) in enumerate(zip(places[o], outputs[o], strict=True)):
                which = (row, col // BLOCK)
                if const_expr(result.blocks is not Blocks.LAST):
                    which = (self.down(o, wave, i), col)
                self.put(getattr(lds, f"scales_{o}"), result, at, which, scale, (row, col))
        if const_expr(not self.is_plain(-1)):
            columns = [codes for _, codes in outputs[-1]]
            lines = [self.down(-1, wave, i) for i in range(2)]
            self.stage(lds.values, columns, lines, [col for _, col in places[-1]])
        gpu.barrier()
        self.store_staged(lds, arrays, scalars, at, tid)

    def is_plain(self, o: int) -> bool:
        """Whether the o-th result has a code a byte: it is of the elements as loaded, `Tiled`'s."""
        return self.results[o].format.codes_per_byte == 1

    def quantize_plain(self, rows, allocator, staged, arrays, scalars, where: tuple):
        """Quantizes what is plain; where in LDS which result has its scales, and values lie.

        A plain result has LDS of its own, as that of the others is x's at first.
        """
        names = [*(f"scales_{o}" for o in range(len(self.results))), "values"]
        lds = {name: getattr(staged, name) for name in names}
        for o, result in enumerate(self.results):
            if self.is_plain(o):
                fields = {f"scales_{o}": fx.Array[Uint8, TILE * TILE // BLOCK, 16]}
                if result.transposed:
                    fields["values"] = fx.Array[Uint8, TILE * TILE, 16]
                plain_staged = allocator.allocate(composite(fx.struct, fields)).peek()
                lds |= {name: getattr(plain_staged, name) for name in fields}
                self.quantize_patch(self.elements_of(rows), plain_staged, o, arrays, scalars, where)
        return SimpleNamespace(**lds)

    def shared(self):
        """The LDS of a workgroup: x; then what `Tiled` has there, and rows of bytes of values."""
        staged = {f"scales_{o}": fx.Array[Uint8, TILE * TILE // BLOCK, 16] for o in range(2)}
        staged["values"] = fx.Array[Uint8, TILE * TILE // 2, 16]
        x = fx.Array[Uint8, TILE * TILE * self.itemsize, 16]
        return composite(fx.union, {"x": x, "staged": composite(fx.struct, staged)})

    def place_of_x(self, row, chunk) -> Int32:
        """Where 16 bytes of a row lie, permuted, or lanes would read rows from the same banks.

        Eight lanes read at once, four or two of them in one row.
        """
        chunk = chunk ^ chunk // Uint32(8) ^ row % Uint32(2 * self.mode(0).blocks) * Uint32(2)
        return Int32(row * (TILE * self.itemsize) + chunk * 16)

    def places(self, o: int, wave, lane) -> list:
        """(row, column) in the tile where a lane's two blocks begin, for the o-th result."""
        top, grouped = wave * BLOCK, self.mode(o).blocks > 1
        if self.results[o].blocks is Blocks.LAST:
            if grouped:
                return [(top + lane // 2, (lane % 2 * 2 + i) * BLOCK) for i in range(2)]
            return [(top + lane // 4 + i * STACKED, lane % 4 * BLOCK) for i in range(2)]
        if grouped:
            col = wave % 2 * WAVE + lane
            return [(self.down(o, wave, i) * BLOCK, col) for i in range(2)]
        return [(top, lane * 2 + i) for i in range(2)]

    def down(self, o: int, wave, i: int):
        """The number of a lane's i-th block among the tile's blocks down a column."""
        return wave // 2 * 2 + i if self.mode(o).blocks > 1 else wave

    def data(self, arrays, places: list, settings: list, at: Tile) -> list:
        """Per result, what `data_of_blocks` gives for a lane's two blocks."""
        loaded = []
        for o, result in enumerate(self.results):
            mode, mine = self.mode(o), self.block_data(arrays, o)
            blocks = (self.number(result, begin, at) for begin in places[o])
            loaded.append(preprocessed.data_of_blocks(mode, mine, settings[o], Int64(0), blocks))
        return loaded

    def number(self, result: Output, place, at: Tile) -> Int64:
        """The number of the block that begins at a place, for its data; beyond the array, 0."""
        batch, tile_m, tile_k, m, k = at
        row, col = tile_m * TILE + place[0], tile_k * TILE + place[1]
        inside = (row < m) & (col < k)
        if result.blocks is Blocks.LAST:
            block = (as_int64(batch) * as_int64(m) + as_int64(row)) * as_int64(k // BLOCK)
            block = block + as_int64(col // BLOCK)
        else:
            block = as_int64(batch) * as_int64(m // BLOCK) + as_int64(row // BLOCK)
            block = block * as_int64(k) + as_int64(col)
        return inside.select(block, Int64(0))

    def quantized(self, o: int, x, places: list, settings, data: list) -> list:
        """(scale, words of codes) of a lane's two blocks, for the o-th result."""
        mode, result, rule = self.mode(o), self.results[o], self.rule(settings)
        prescale, outputs = settings.get("prescale", Uint32(0)), []
        if result.blocks is Blocks.LAST:
            rows = [self.row_of(x, *begin) for begin in places]
            blocks = preprocessed.elements(mode, self.dtype, rows, data, prescale)
        else:
            columns = self.columns_of(x, places)
            blocks = preprocessed.elements_of_two(mode, self.dtype, columns, data, prescale)
        for pairs, block_data in zip(blocks, data, strict=True):
            scale, inverse = preprocessed.scale_of(pairs, result.format, rule, self.arch)
            codes = preprocessed.codes(mode, pairs, inverse, block_data, result.format, self.arch)
            outputs.append((scale, codes))
        return outputs

    def row_of(self, x, row, col) -> list:
        """The words of 32 elements of a row."""
        row_words = []
        for i in range(BLOCK // self.vector):
            at = shared_pointer(x, self.place_of_x(row, col // self.vector + i), Uint32, 16)
            piece = fx.generic_load(at, dtype=Uint32, count=4)
            row_words += [piece[w] for w in range(4)]
        return row_words

    def columns_of(self, x, places: list) -> list:
        """Words of an element of either block, 32 of them."""
        column_words, dtype = [], Uint16
        if self.mode(-1).blocks == 1:  # neighbours, the first in an even column
            places, dtype = places[:1], Uint32
        for i in range(BLOCK):
            pieces = []
            for row, col in places:
                chunk, rest = col // self.vector, col % self.vector
                start = self.place_of_x(row + i, chunk) + Int32(rest * self.itemsize)
                pieces.append(fx.generic_load(shared_pointer(x, start, dtype, dtype.width // 8)))
            column_words.append(Uint32(fx.Vector.from_elements(pieces, dtype).bitcast(Uint32)[0]))
        return column_words

    # ---- values ---
    def stage(self, values, columns: list, lines: list, cols: list) -> None:
        """Puts the codes of two columns into LDS, for these blocks down the tile."""
        if self.results[-1].transposed:
            for codes, line, col in zip(columns, lines, cols, strict=True):
                to = shared_pointer(values, Int32(self.staged(col, line, 2)), Uint32, 16)
                fx.generic_store(to, fx.Vector.from_elements(codes, Uint32))
            return
        if self.mode(-1).blocks > 1:
            for codes, line, col in zip(columns, lines, cols, strict=True):
                bytes_ = fx.Vector.from_elements(codes, Uint32).bitcast(Uint8)
                for i in range(16):
                    to = shared_pointer(values, Int32((line * 16 + i) * TILE + col))
                    fx.generic_store(to, bytes_[i])
            return
        for w, (left, right) in enumerate(zip(*columns, strict=True)):
            for half in range(2):
                word = convert.bytes_of(right, left, *(2 * half + i for i in (0, 4, 1, 5)))
                for e in range(2):
                    row = lines[0] * 16 + (4 * w + 2 * half + e)
                    to = shared_pointer(values, Int32(row * TILE + cols[0]), Uint16, 2)
                    fx.generic_store(to, Uint16(word >> (16 * e)))

    def staged(self, col, chunk, packed: int):
        """Where 16 bytes of a column lie in LDS, even columns before odd ones.

        Permuted, or lanes would read chunks of a column, and neighbours, from the same banks.
        """
        if packed == 1:  # a plain result's
            return super().staged(col, chunk, packed)
        odd = col % Uint32(2)
        position = chunk * TILE + odd * (TILE // 2) + (col // Uint32(2) ^ chunk ^ odd * 4)
        return position * 16

    def store_staged(self, shared, arrays, scalars, at: Tile, tid) -> None:
        """Stores what is in LDS, rows of bytes of values included."""
        super().store_staged(shared, arrays, scalars, at, tid)
        result = self.results[-1]
        if result.transposed or self.is_plain(-1):
            return
        for step in range(TILE // 2 * TILE // 16 // self.threads):
            index = tid + step * self.threads
            vector = shared_pointer(shared.values, Int32(index * 16), Uint32, 16)
            vector = fx.generic_load(vector, dtype=Uint32, count=4)
            line, four = (index // 8, index % 8 * 16), [vector[i] for i in range(4)]
            self.store_bytes(
                Target(arrays[f"codes_{len(self.results) - 1}"], Uint32(0)), result, at, line, four
            )

    def store_rows(self, o: int, outputs: list, places: list, to: Target, at: Tile, who) -> None:
        """Stores the codes of a lane's two blocks along rows; `who`: its wave and its number."""
        wave, lane = who
        codes = [block_codes for _, block_codes in outputs]
        lines = [(row, col // 2) for row, col in places]
        if self.mode(o).blocks > 1:  # so that neighbours write side by side
            codes = shared_by_four(codes, lane)
            row = wave * BLOCK + lane // 4 * 2
            lines = [(row + i, lane % 4 * 16) for i in range(2)]
        for line, block_codes in zip(lines, codes, strict=True):
            self.store_bytes(to, self.results[o], at, line, block_codes)

    @flyc.jit
    def store_bytes(self, to: Target, result: fx.Constexpr, at: Tile, line, words):
        """Stores 16 bytes of values in the order of x, from (row, byte) of the tile on."""
        batch, tile_m, tile_k, m, k = at
        values, tiles = to
        packed: fx.Constexpr = result.packed
        down, across = packed
        high, wide = m // down, k // across
        row, byte = tile_m * (TILE // down) + line[0], tile_k * (TILE // across) + line[1]
        where = as_int64(batch) * as_int64(high) + as_int64(row)
        where = where * as_int64(wide) + as_int64(byte)
        if const_expr(result.blocks is Blocks.LAST):
            if tiles != Uint32(0):
                where = offset_of_values(batch * high + row, byte, wide)
        self.store_line(values, where, words, (row, byte), Extents(high, wide))
