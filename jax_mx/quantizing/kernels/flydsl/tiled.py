"""Forms with the second-to-last axis: `Tiled`."""

from collections.abc import Sequence
from typing import NamedTuple

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import (
    Int32,
    Int64,
    Uint8,
    Uint16,
    Uint32,
    const_expr,
    gpu,
    range_constexpr,
)

from jax_mx.formats.directions import Blocks
from jax_mx.formats.formats import BLOCK
from jax_mx.formats.layouts import ScaleLayout
from jax_mx.formats.windows import ROW, blocks_of
from jax_mx.quantizing.facts.signatures import Role
from jax_mx.quantizing.facts.variants import Variant
from jax_mx.quantizing.kernels import geometry
from jax_mx.quantizing.kernels.flydsl import convert
from jax_mx.quantizing.kernels.flydsl.kernel import (
    WAVE,
    Kernel,
    as_int64,
    composite,
    exchange,
    halved,
    halved_among,
    largest,
    load_words,
    offset_in_tiles,
    offset_of_values,
    pointer,
    round_up,
    shared_pointer,
    store_words,
)
from jax_mx.quantizing.kernels.geometry import Extents, Output, Place, Tile


class Patch(NamedTuple):
    """Where a lane's patch of x begins in the workgroup's tile, and its wave's number."""

    wave: Uint32
    top: Uint32
    left: Uint32


class Target(NamedTuple):
    """Where values go: the pointer, and whether they go into tiles."""

    values: fx.Pointer
    tiles: Uint32


TILE = 128  # elements across a workgroup of `Tiled`, and down most; a wave has 32 rows of it


class Tiled(Kernel):
    """Forms with the second-to-last axis; x lies as (batch, M, K), M = 32 * `blocks_m`.

    A lane holds a patch of `rows` x `vector` elements, 16 bytes a row. A wave's lanes lie `lanes`
    across and 64 / `lanes` down. Each lane gets two whole blocks' largest magnitudes, in either
    direction. The lanes of a block get its factor from the lane that has it.
    """

    def __init__(self, variant: Variant, arch: str, layout: ScaleLayout, aligned: bool):
        super().__init__(variant, arch, layout, aligned)
        form = variant.form
        self.in_window = blocks_of(variant.window)  # blocks, along each of its axes
        self.high = max(TILE, BLOCK * self.in_window)  # rows of a workgroup
        self.threads = WAVE * self.high // BLOCK
        self.results = geometry.outputs_of(form, variant.formats, variant.modes)
        self.vector = 16 // self.itemsize
        self.lanes = TILE // self.vector
        self.rows = BLOCK * self.lanes // WAVE
        self.row_sharers = BLOCK // self.vector
        self.elements_per_thread = self.rows * self.vector
        self.counts_blocks = all(form.spans)  # blocks, not columns, are what x's view counts
        self.extents = geometry.extents_of(form)
        tile = Extents(self.high, TILE)
        self.region = geometry.region_of(form, layout, tile)
        self.grid = geometry.grid_of(form, tile, self.region)
        # The aligned entry has 16 elements of a row at once; they must not straddle rows.
        self.divide = geometry.divide_of(form, 16)

    @flyc.kernel
    def kernel(self, pointers, scalars):
        lengths, arrays = self.lengths(scalars), self.named(pointers)
        lane, wave = convert.lane_id(), convert.wave_id()
        across, down = lane % self.lanes, lane // self.lanes  # this lane's place in the wave
        at = self.place(*lengths)
        patch = Patch(wave, wave * BLOCK + down * self.rows, across * self.vector)
        shared = self.allocated()
        self.quantize(self.load(arrays["x"], at, patch), shared, arrays, scalars, at, patch)

    def quantize(self, words, shared, arrays, scalars, at: Tile, patch: Patch) -> None:
        """Quantizes a patch."""
        tid = Uint32(Int32(fx.thread_idx.x))
        held = self.elements_of(words)
        for o in range(len(self.results)):
            self.quantize_patch(held, shared, o, arrays, scalars, (at, patch))
        gpu.barrier()
        self.store_staged(shared, arrays, scalars, at, tid)

    def elements_of(self, words: list) -> tuple:
        """The elements of a patch, and its magnitudes."""
        x = [[e for word in row for e in convert.elements(word, self.dtype)] for row in words]
        return x, [[convert.magnitudes(word, self.dtype) for word in row] for row in words]

    def quantize_patch(self, held: tuple, shared, o: int, arrays, scalars, where: tuple) -> None:
        """Stages the scales of a patch and its values, or stores these, of the o-th result.

        Args:
          held: see `elements_of`.
          shared: LDS, with `scales_<o>`, and `values` where those are staged.
          o: the number of the result.
          arrays: the kernel's pointers by name.
          scalars: the kernel's.
          where: the tile, and the patch.
        """
        (x, amax), result, (at, patch) = held, self.results[o], where
        staged = None if result.dequantized else getattr(shared, f"scales_{o}")
        settings = {name: Uint32(n) for name, n in self.of_result(scalars, o).items()}
        rounding, tiles = self.rule(settings), settings["value_tiles"]
        find = {Blocks.LAST: self.scale_rows, Blocks.SECOND: self.scale_columns,
                Blocks.SQUARE: self.scale_square}[result.blocks]  # fmt: skip
        beyond = self.beyond(shared, arrays, o)
        pairs = find(amax, staged, result, tuple(rounding), at, patch, beyond)
        if result.dequantized:
            self.store_dequantized(x, pairs, o, arrays, at, patch)
        elif result.transposed:
            self.stage_transposed(x, pairs, result, shared.values, patch)
        else:
            self.store(x, pairs, result, Target(arrays[f"codes_{o}"], tiles), at, patch)

    def lengths(self, scalars) -> tuple:
        """M and K."""
        blocks_m, k = (Uint32(n) for n in scalars[:2])
        return blocks_m * BLOCK, k * BLOCK if self.counts_blocks else k

    def staged_shape(self, result: Output) -> Extents:
        """The size of the matrix of a tile's scales, as it will lie."""
        turned = self.is_turned(result)
        return geometry.scales_shape(result.direction, Extents(self.high, TILE), turned)

    def shared(self):
        """The LDS of a workgroup: scales as they will lie, values [column][row] with chunks."""
        arrays = {}
        for o, result in enumerate(self.results):
            if result.dequantized:
                continue
            rows, cols = self.staged_shape(result)
            arrays[f"scales_{o}"] = fx.Array[Uint8, rows * cols, 16]
        if self.results[-1].transposed:
            size = self.high * TILE // self.results[-1].format.codes_per_byte
            arrays["values"] = fx.Array[Uint8, size, 16]
        if self.in_window > 1 and self.results[-1].blocks is not Blocks.LAST:
            arrays["amaxes"] = fx.Array[Uint8, 4 * TILE * self.high // BLOCK, 16]
        return composite(fx.struct, arrays) if arrays else None

    def allocated(self):
        """The LDS of the workgroup; None where nothing waits in it."""
        shared_type = self.shared()
        return None if shared_type is None else fx.SharedAllocator().allocate(shared_type).peek()

    def place(self, m, k) -> Tile:
        """A workgroup's tile; neighbours follow each other across."""
        bid = Uint32(Int32(fx.block_idx.x))
        if self.high == TILE:
            tiles_m, tiles_k = (round_up(n, self.region.rows) // TILE for n in (m, k))
        else:
            tiles_m = round_up(m, self.region.rows) // self.high
            tiles_k = round_up(k, self.region.cols) // TILE
        per_slab = tiles_m * tiles_k
        batch, rest = bid // per_slab, bid % per_slab
        return Tile(batch, rest // tiles_k, rest % tiles_k, m, k)

    # ---- x ---
    def start(self, at: Tile, patch: Patch) -> tuple:
        """The row and column where this lane's patch begins; 0 and 0 where no array is."""
        row, col = at.row * self.high + patch.top, at.col * TILE + patch.left
        inside = (row < at.rows) & (col < at.cols)
        return tuple(inside.select(n, Uint32(0)) for n in (row, col))

    def load(self, x, at: Tile, patch: Patch):
        """Words [row][word] of this lane's patch; beyond the array, of what is there."""
        batch, tile_m, tile_k, m, k = at
        row, col = tile_m * self.high + patch.top, tile_k * TILE + patch.left
        stride = as_int64(k) * self.itemsize
        origin = (as_int64(batch) * as_int64(m)) * stride
        inside = (row < m) & (col < k)
        row = inside.select(row, Uint32(0))
        if self.aligned or self.counts_blocks:
            col = inside.select(col, Uint32(0))
            where = origin + as_int64(row) * stride + as_int64(col) * self.itemsize
            return [load_words(x, where + stride * i, 4, self.align[0]) for i in range(self.rows)]
        dtype = Uint16 if self.itemsize == 2 else Uint32
        pieces_of_rows = [[] for _ in range(self.rows)]
        start = origin + as_int64(row) * stride
        for j in range(self.vector):
            near = (col + j < k).select(col + j, k - 1)
            for i in range(self.rows):
                where = start + stride * i + as_int64(near) * self.itemsize
                pieces_of_rows[i].append(fx.generic_load(pointer(x, where, dtype, self.itemsize)))
        vectors = [
            fx.Vector.from_elements(pieces, dtype).bitcast(Uint32) for pieces in pieces_of_rows
        ]
        return [[vector[w] for w in range(4)] for vector in vectors]

    @flyc.jit
    def store_floats(
        self, words, arrays, name: fx.Constexpr, first: fx.Constexpr, at: Tile, patch: Patch
    ):
        """Stores a patch of floats, as far as it exists.

        Args:
          words: the patch, [row][word].
          arrays: the kernel's pointers by name.
          name: of the array that they go to.
          first: its element that is the matrix' first.
          at: the tile.
          patch: where the patch is in it.
        """
        _, tile_m, tile_k, m, k = at
        floats = arrays[name]
        row, col = tile_m * self.high + patch.top, tile_k * TILE + patch.left
        stride = as_int64(k) * self.itemsize
        start = as_int64(row) * stride + as_int64(col) * self.itemsize
        start = start + first * self.itemsize
        if const_expr(self.aligned or self.counts_blocks):
            if (row < m) & (col < k):
                for i in range_constexpr(self.rows):
                    store_words(floats, start + stride * i, words[i], self.aligned_to(name))
        else:
            for i in range_constexpr(self.rows):
                pieces = fx.Vector.from_elements(words[i], Uint32).bitcast(Uint16)
                for j in range_constexpr(self.vector):
                    to = pointer(floats, start + stride * i + Int64(2 * j), Uint16, 2)
                    if (row < m) & (col + j < k):
                        fx.generic_store(to, pieces[j])

    # ---- scales ---
    def two_scales(self, magnitudes: list, result: Output, rounding):
        """The scales of two blocks, and the pair of their factors."""
        if len(magnitudes) == 1:
            magnitudes = [e.bitcast(Uint32) for e in convert.elements(magnitudes[0], self.dtype)]
        scalings = [convert.scale_of(w, result.format, self.dtype, rounding) for w in magnitudes]
        pair = convert.pair(*(inverse for _, inverse in scalings))
        return [scale for scale, _ in scalings], pair

    def scale_rows(self, amax, staged, result: Output, rounding, at: Tile, patch: Patch, beyond):
        """Blocks along rows: neighbours across share one. Pairs of factors of rows."""
        amaxes = [largest(row, self.dtype) for row in amax]
        if self.itemsize == 2:
            amaxes = [
                convert.amaxes_of_two(amaxes[i], amaxes[i + 1], self.dtype)
                for i in range(0, self.rows, 2)
            ]
        amaxes = halved_among(amaxes, self.row_sharers, self.dtype)
        index = convert.lane_id() % self.row_sharers
        if self.variant.window == ROW:
            first = (at.row * self.high + patch.top + index * 2, at.col * TILE // BLOCK)
            where = [(first[0] + e, first[1] + patch.left // BLOCK) for e in range(2)]
            amaxes = self.window_amaxes(beyond, at, where, Extents(at.rows, at.cols // BLOCK))
        if self.in_window > 1:
            amaxes = self.of_existing(amaxes, at, patch)
            for distance in (self.row_sharers, 2 * self.row_sharers):
                amaxes = [
                    convert.larger(w, convert.from_row(w, distance), self.dtype) for w in amaxes
                ]
        scales, pair = self.two_scales(amaxes, result, rounding)
        for e, scale in enumerate(scales):
            row = patch.top + index * 2 + e
            where = (row, patch.left // BLOCK)
            self.put(staged, result, at, where, scale, (row, patch.left))
        return [convert.from_group(pair, self.row_sharers, i) for i in range(self.row_sharers)]

    def scale_columns(
        self, amax, staged, result: Output, rounding, at: Tile, patch: Patch, beyond
    ):  # fmt: skip
        """Blocks down columns: lanes below each other share one. Pairs of factors of columns."""
        lane = convert.lane_id()
        amaxes = [largest([row[w] for row in amax], self.dtype) for w in range(4)]
        for distance in (32, 16):
            if distance >= self.lanes:
                upper = (lane & Uint32(distance)) != Uint32(0)
                amaxes = halved(
                    amaxes, upper, lambda w, d=distance: convert.from_row(w, d), self.dtype
                )
        if self.variant.window == ROW:
            first = at.col * TILE + patch.left + lane // self.lanes * 2
            where = [(at.row * (self.high // BLOCK) + patch.wave, first + e) for e in range(2)]
            amaxes = self.window_amaxes(beyond, at, where, Extents(at.rows // BLOCK, at.cols))
        if self.in_window > 1:
            amaxes = self.of_existing(amaxes, at, patch)
            amaxes = self.among_waves(amaxes, beyond, lane, patch)
        scales, pair = self.two_scales(amaxes, result, rounding)
        across, down = lane % self.lanes, lane // self.lanes
        for e, scale in enumerate(scales):
            col = patch.left + down * 2 + e
            self.put(staged, result, at, (patch.wave, col), scale, (patch.top, col))
        return [
            convert.from_anywhere(pair, across + i * self.lanes) for i in range(WAVE // self.lanes)
        ]

    def scale_square(self, amax, staged, result: Output, rounding, at: Tile, patch: Patch, beyond):
        """Square blocks: four a wave. One pair, of the block's factor twice."""
        word = largest([w for row in amax for w in row], self.dtype)
        for bit in (1, 2, 4)[: self.row_sharers.bit_length() - 1]:
            other = convert.from_lane(word, convert.EXCHANGE[bit])
            word = convert.larger(word, other, self.dtype)
        for distance in (16, 32):
            if distance >= self.lanes:
                word = convert.larger(word, convert.from_row(word, distance), self.dtype)
        if self.in_window > 1:
            (word,) = self.of_existing([word], at, patch)
            for distance in (self.row_sharers, 2 * self.row_sharers):
                word = convert.larger(word, convert.from_row(word, distance), self.dtype)
            (word,) = self.among_waves([word], beyond, convert.lane_id(), patch)
        bits = convert.largest_bits(word, self.dtype)
        scale, inverse = convert.scale_of(bits, result.format, self.dtype, rounding)
        # All lanes of a block have the same.
        where = (patch.wave, patch.left // BLOCK)
        self.put(staged, result, at, where, scale, (patch.top, patch.left))
        return [convert.pair(inverse, inverse)]

    # ---- windows ---
    def beyond(self, shared, arrays, o: int):
        """The place of amaxes of windows: LDS, or the pointer to the amaxes of rows; or None."""
        if self.variant.window == ROW:
            (amaxes,) = self.block_data(arrays, o)
            return amaxes
        staged = self.in_window > 1 and self.results[o].blocks is not Blocks.LAST
        return shared.amaxes if staged else None

    def of_existing(self, words: list, at: Tile, patch: Patch) -> list:
        """Words of magnitudes, zeros beyond the array, where `load` found others."""
        row, col = at.row * self.high + patch.top, at.col * TILE + patch.left
        there = (row < at.rows) & (col < at.cols)
        return [there.select(word, Uint32(0)) for word in words]

    def among_waves(self, magnitudes: list, shared, lane, patch: Patch) -> list:
        """The larger magnitudes of words, of the waves below each other that share a window."""
        size = 4 * len(magnitudes)
        line = WAVE * size  # bytes of a wave
        to = shared_pointer(shared, Int32(patch.wave * line + lane * size), Uint32, size)
        fx.generic_store(to, fx.Vector.from_elements(magnitudes, Uint32))
        gpu.barrier()
        first = patch.wave // self.in_window * self.in_window
        parts = []
        for i in range(self.in_window):
            start = Int32((first + i) * line + lane * size)
            parts.append([
                fx.generic_load(shared_pointer(shared, start + Int32(4 * w), Uint32, 4))
                for w in range(len(magnitudes))
            ])  # fmt: skip
        return [largest(list(column), self.dtype) for column in zip(*parts, strict=True)]

    def window_amaxes(self, amaxes, at: Tile, where: list, size: Extents) -> list:
        """The amaxes in memory of two blocks, at these (row, column) of so many; beyond, any."""
        block_amaxes = []
        for row, col in where:
            there = (row < size.rows) & (col < size.cols)
            index = as_int64(at.batch) * as_int64(size.rows) + as_int64(row)
            index = there.select(index * as_int64(size.cols) + as_int64(col), Int64(0))
            block_amaxes += load_words(amaxes, index * 4, 1, 4)
        return block_amaxes

    def put(self, staged, result: Output, at: Tile, where: tuple, scale, x: tuple) -> None:
        """Stages the scale at this (row, column) of the tile's, whose block x has at (row, col)."""
        if staged is None:
            return
        _, tile_m, tile_k, m, k = at
        row, col = where
        _, cols = self.staged_shape(result)
        index = col * cols + row if self.is_turned(result) else row * cols + col
        if self.layout.is_tiled:  # padding is 0
            there = (tile_m * self.high + x[0] < m) & (tile_k * TILE + x[1] < k)
            scale = there.select(scale, Uint32(0))
        fx.generic_store(shared_pointer(staged, Int32(index)), Uint8(scale))

    def numbers(self, result: Output, places: list) -> list[int]:
        """The numbers of the factors that elements at these (row, column) of a patch have."""
        return [
            {Blocks.LAST: i, Blocks.SECOND: j, Blocks.SQUARE: 0}[result.blocks] for i, j in places
        ]

    def scaled(self, x, pairs: list, result: Output, i: int, w: int) -> list:
        """Elements 2 * w and 2 * w + 1 of row i times their factors."""
        numbers = self.numbers(result, [(i, 2 * w), (i, 2 * w + 1)])
        factors = [convert.half(pairs[n // 2], n % 2) for n in numbers]
        return convert.products(x[i][2 * w : 2 * w + 2], factors)

    def word(self, scaled: Sequence, pairs: list, result: Output, places: list) -> Uint32:
        """The codes of a word's elements, at these (row, column) of a lane's patch."""
        # The codes of a byte have one factor.
        numbers = self.numbers(result, places[:: result.format.codes_per_byte])
        return convert.pack_word(scaled, self.poison(pairs, numbers), result.format, self.arch)

    @staticmethod
    def poison(pairs: list, numbers: list[int]) -> Uint32:
        """See `convert.poison`; of the factors with these numbers."""
        used = sorted({n // 2 for n in numbers})
        which = [2 * used.index(n // 2) + n % 2 for n in numbers]
        return convert.poison([pairs[n] for n in used], which)

    # ---- values ---
    def store_dequantized(self, x, pairs, o: int, arrays, at: Tile, patch: Patch) -> None:
        """Stores what the codes of a patch stand for, in the order of x."""
        result, rows_of_words = self.results[o], []
        for i in range(self.rows):
            numbers = self.numbers(result, [(i, j) for j in range(self.vector)])
            scaled = [
                e for w in range(self.vector // 2) for e in self.scaled(x, pairs, result, i, w)
            ]
            factors = [convert.factor_back(convert.half(pairs[n // 2], n % 2)) for n in numbers]
            fours = [numbers[j : j + 4] for j in range(0, self.vector, 4)]
            poisons = [self.poison(pairs, four) & Uint32(0x7F7F7F7F) for four in fours]
            types = result.format, self.dtype, self.arch
            rows_of_words.append(convert.through_codes(scaled, factors, poisons, *types))
        first = as_int64(at.batch) * as_int64(at.rows) * as_int64(at.cols)
        self.store_floats(rows_of_words, arrays, f"dequantized_{o}", first, at, patch)

    def lines(self, x, pairs, result: Output, first: int, count: int) -> list:
        """The words of rows of bytes of this lane's patch; the rows are all in each word."""
        down, _ = result.packed
        rows = range(first * down, (first + count) * down)
        floats = {
            (i, 2 * w + e): element
            for i in rows
            for w in range(self.vector // 2)
            for e, element in enumerate(self.scaled(x, pairs, result, i, w))
        }
        columns, size = range(self.vector), 4 * result.format.codes_per_byte
        places = [(i, j) for i in rows for j in columns]
        if down > 1:
            places = [(i, j) for j in columns for i in rows]
        word_places = [places[at : at + size] for at in range(0, len(places), size)]
        return [self.word([floats[at] for at in word], pairs, result, word) for word in word_places]

    @flyc.jit
    def store(self, x, pairs, result: fx.Constexpr, to: Target, at: Tile, patch: Patch):
        """Stores values in the order of x: after an exchange a lane has 16 bytes of one row."""
        batch, tile_m, tile_k, m, k = at
        (values, tiles), (_, top, left) = to, patch
        packed: fx.Constexpr = result.packed
        down, across = packed
        n: fx.Constexpr = self.itemsize * across
        together: fx.Constexpr = max(n // 4, 1)  # rows of which a lane has but a word of codes
        lane = convert.lane_id()
        col = tile_k * TILE + left // (n * self.vector) * (n * self.vector)
        first = (tile_m * self.high + top) // down + lane % n
        high, wide = m // down, k // across  # of the bytes
        start = as_int64(batch) * as_int64(high) + as_int64(first)
        start = start * as_int64(wide) + as_int64(col // across)
        stride = as_int64(wide)
        if const_expr(result.blocks is not Blocks.SECOND):
            if tiles != Uint32(0):  # a lane's rows are of one
                start = offset_of_values(batch * high + first, col // across, wide)
                stride = Int64(16)
        for g in range_constexpr(self.rows // down // n):
            parts = [
                self.lines(x, pairs, result, i, together) for i in range(g * n, g * n + n, together)
            ]
            row_words = exchange(parts, lane, together > 1)
            where = start + stride * (g * n)
            self.store_line(values, where, row_words, (first, col), Extents(high, k))

    @flyc.jit
    def store_line(self, values, where, words, place: tuple, size: Extents):
        """Stores 16 bytes of a row, for the columns from a place on, as far as they exist."""
        (row, col), (rows, k) = place, size
        if const_expr(self.aligned or self.counts_blocks):  # 32 divides k: all 16 or none
            if (row < rows) & (col < k):  # 32 rows are all there or none
                store_words(values, where, words, self.aligned_as(Role.CODES))
        else:
            codes = fx.Vector.from_elements(words, Uint32).bitcast(Uint8)
            for j in range_constexpr(16):
                if (row < rows) & (col + j < k):
                    fx.generic_store(values + (where + Int64(j)), codes[j])

    def stage_transposed(self, x, pairs, result: Output, shared, patch: Patch):
        """Puts the tile's values into LDS, one column of x after the other."""
        packed = result.format.codes_per_byte
        _, top, left = patch
        line, size = top // packed, 4 * packed
        starts = [self.staged(left + i, line // 16, packed) + line % 16 for i in range(packed)]
        for w in range(self.vector // 2):
            both = [self.scaled(x, pairs, result, i, w) for i in range(self.rows)]
            for j, column in enumerate(zip(*both, strict=True), 2 * w):
                places = [(i, j) for i in range(self.rows)]
                column_words = [
                    self.word(column[i : i + size], pairs, result, places[i : i + size])
                    for i in range(0, self.rows, size)
                ]
                vector = fx.Vector.from_elements(column_words, Uint32)
                start = Int32(starts[j % packed] + j // packed * self.high)
                to = shared_pointer(shared, start, Uint32, self.rows // packed)
                fx.generic_store(to, vector)

    def staged(self, col, chunk, packed: int):
        """Where 16 bytes of a column lie in LDS; `packed` columns share a line.

        Chunks are permuted by the column's vector, or the lanes across, which are `vector` columns
        apart, would all write to the same banks.
        """
        chunks = self.high // 16
        chunk = col % packed * (chunks // packed) + chunk
        return col // packed * self.high + (chunk ^ (col // self.vector % chunks)) * 16

    def store_staged(self, shared, arrays, scalars, at: Tile, tid) -> None:
        """Stores what is in LDS: scales, and values that lie transposed."""
        for o, result in enumerate(self.results):
            if result.dequantized:
                continue
            values, scales = arrays[f"codes_{o}"], arrays[f"scales_{o}"]
            if result.transposed:
                tiles = Uint32(self.of_result(scalars, o)["value_tiles"])
                self.store_transposed(shared.values, result, Target(values, tiles), at, tid)
            # The two results' scales are written by different halves of the threads.
            staged = getattr(shared, f"scales_{o}")
            self.store_scales(staged, scales, result, at, tid - o * (self.threads // 2))

    @flyc.jit
    def store_transposed(self, shared, result: fx.Constexpr, to: Target, at: Tile, tid):
        """Copies values (batch, K, M) out of LDS, 16 bytes a thread and step."""
        batch, tile_m, tile_k, m, k = at
        values, tiles = to
        packed: fx.Constexpr = result.format.codes_per_byte
        chunks = self.high // 16 // packed
        for step in range_constexpr(TILE * chunks // self.threads):
            index = tid + step * self.threads
            chunk, col = index % chunks, index // chunks
            row, column = tile_m * self.high + chunk * (16 * packed), tile_k * TILE + col
            if (row < m) & (column < k):
                start = self.staged(col, chunk, packed)
                vector = fx.generic_load(
                    shared_pointer(shared, Int32(start), Uint32, 16), dtype=Uint32, count=4
                )
                where = as_int64(batch) * as_int64(k) + as_int64(column)
                where = where * as_int64(m // packed) + as_int64(row // packed)
                if tiles != Uint32(0):
                    where = offset_of_values(batch * k + column, row // packed, m // packed)
                store_words(
                    values, where, [vector[i] for i in range(4)], self.aligned_as(Role.CODES)
                )

    @flyc.jit
    def store_scales(  # noqa: C901
        self, staged, scales, result: fx.Constexpr, at: Tile, thread
    ):
        """A tile's scales, four a thread, where neighbours lie together."""
        # In one piece, as FlyDSL wants dynamic branches where their values are.
        batch, tile_r, tile_c, m, k = at
        turned: fx.Constexpr = self.is_turned(result)
        rows, cols = geometry.scales_shape(result.direction, Extents(m, k), turned)
        if const_expr(turned):
            tile_r, tile_c = tile_c, tile_r
        in_row, in_col = self.staged_shape(result)
        per_row: fx.Constexpr = in_col // 4  # of a row
        row, col = tile_r * in_row + thread // per_row, tile_c * in_col + thread % per_row * 4
        mine = thread < Uint32(in_row * per_row)
        if const_expr(self.layout.is_tiled and self.high > TILE):  # may go beyond the padding
            high, wide = (
                round_up(n, pad) for n, pad in zip((rows, cols), self.layout.pad, strict=True)
            )
            mine = mine & (row < high) & (col < wide)
        if mine:
            word = fx.generic_load(shared_pointer(staged, Int32(thread * 4), Uint32, 4))
            if const_expr(self.layout.is_tiled):  # the grid is that of the padding
                layout: fx.Constexpr = self.layout
                offset = offset_in_tiles(layout, Place(batch, row, col), Extents(rows, cols))
                stride: fx.Constexpr = layout.column_stride
                if const_expr(stride == 1):
                    store_words(scales, offset, [word], self.aligned_as(Role.SCALES))
                else:  # the bytes between belong to other tiles
                    for c in range_constexpr(4):
                        fx.generic_store(
                            scales + (offset + Int64(stride * c)), Uint8(word >> 8 * c)
                        )
            else:
                offset = (as_int64(batch) * as_int64(rows) + as_int64(row)) * as_int64(cols)
                offset = offset + as_int64(col)
                if row < rows:
                    if const_expr(self.aligned):
                        if (cols % 4 == Uint32(0)) & (col < cols):
                            store_words(scales, offset, [word], 4)
                    if const_expr(not self.aligned) | (cols % 4 != Uint32(0)):
                        for c in range_constexpr(4):
                            if col + c < cols:
                                fx.generic_store(scales + (offset + Int64(c)), Uint8(word >> 8 * c))
