"""Blocks along the last axis: `Flat`, and `PreprocessedFlat` with more arithmetic."""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import Int32, Int64, Uint8, Uint32, const_expr, range_constexpr

from jax_mx.formats.formats import BLOCK
from jax_mx.formats.layouts import ScaleLayout
from jax_mx.formats.windows import ROW, blocks_of
from jax_mx.quantizing.facts.variants import Variant
from jax_mx.quantizing.kernels import geometry
from jax_mx.quantizing.kernels.flydsl import convert, preprocessed
from jax_mx.quantizing.kernels.flydsl.kernel import (
    WAVE,
    Kernel,
    Patches,
    Strip,
    as_int64,
    composite,
    exchange,
    halved,
    halved_among,
    largest,
    load_words,
    offset_of_values,
    share_in_wave,
    shared_by_four,
    shared_pointer,
    store_words,
)
from jax_mx.quantizing.kernels.geometry import Extents


class Flat(Kernel):
    """x (..., rows, cols, 32) -> values like x, scales (..., rows, cols) in the layout.

    A wave takes `chunks` rounds of x, one after the other, 16 bytes a lane. As many lanes share a
    block, so each of them gets one round's scale; and codes are exchanged between the lanes that
    16 of one block come from.
    """

    def __init__(self, variant: Variant, arch: str, layout: ScaleLayout, aligned: bool):
        super().__init__(variant, arch, layout, aligned)
        self.blocks = self.tuned("Flat")["waves"] * WAVE  # of a workgroup
        self.group = self.mode(0).blocks  # blocks that are a lane's, neighbours
        self.sharers = self.group * BLOCK * self.itemsize // 16  # lanes that share these
        self.chunks = self.sharers
        self.per_chunk = WAVE // self.sharers  # groups of a round
        self.apart = self.per_chunk  # from a lane's group to that of its next round
        self.threads = self.blocks // self.group
        self.elements_per_thread = self.group * BLOCK
        self.dequantized = self.mode(0).dequantized
        out = self.signature.number("dequantized_0" if self.dequantized else "scales_0")
        grid = geometry.flat_grid_of if self.dequantized else geometry.flat_grid
        self.grid = grid(out, self.blocks)
        count = blocks_of(variant.window)
        rows = [geometry.flat_rows()] if layout.is_tiled or count > 1 else []
        self.extents = [geometry.length_of(out), *rows, geometry.flat_blocks(8)]
        self.in_patches = count > 1 and (layout.is_tiled or not aligned)
        if self.in_patches:
            patch = Extents(self.blocks // Patches.COLS, Patches.COLS * BLOCK)
            self.region = geometry.region_of(variant.form, layout, patch)
            self.grid = geometry.grid_of(variant.form, patch, self.region)
        elif count > 1:
            self.divide = [[0, -2, -1, count]]  # whole windows, so that rows do not matter

    @flyc.kernel
    def kernel(self, pointers, scalars):
        arrays = self.named(pointers)
        x, sizes, size = arrays["x"], scalars[: len(self.extents)], self.itemsize
        lane = convert.lane_id()
        strip = self.strip(sizes)
        first = convert.wave_id() * Uint32(self.chunks * self.per_chunk) + lane // self.sharers
        chunks = []
        for c in range_constexpr(self.chunks):
            block, _, _ = strip.at(first + Uint32(c * self.apart))
            where = block * (BLOCK * size) + as_int64(lane % self.sharers * 16)
            chunks.append(load_words(x + strip.block * (BLOCK * size), where, 4, self.align[0]))
        self.quantize(chunks, arrays, scalars, strip, first)

    @flyc.jit
    def quantize(self, words, arrays, scalars, strip, first):
        """Stores the codes and the scales of a lane's rounds, the first of which is at `first`."""
        sizes, lane = scalars[: len(self.extents)], convert.lane_id()
        settings = {name: Uint32(n) for name, n in self.of_result(scalars, 0).items()}
        rounding, tiles = self.rule(settings), settings["value_tiles"]
        format = self.formats[0]
        amax = [
            largest([convert.magnitudes(w, self.dtype) for w in chunk], self.dtype)
            for chunk in words
        ]
        amax = self.amax_of_mine(amax, lane)
        if const_expr(self.variant.window != BLOCK):
            amax = self.windowed(amax, arrays, strip, first, lane)
        scale, inverse = convert.scale_of(amax, format, self.dtype, tuple(rounding))
        if const_expr(self.dequantized):
            for c in range_constexpr(self.chunks):
                floats = self.through_codes(words[c], scale, inverse, c)
                slot = first + Uint32(c * self.apart)
                self.store_floats(floats, arrays, "dequantized_0", strip, slot, lane)
        else:
            self.store(words, (scale, inverse), arrays, sizes, tiles, strip, first)

    @flyc.jit
    def store(self, words, scaling, arrays, sizes, tiles, strip, first):
        """Stores codes and scales of a lane's rounds; `scaling`: scale and inverse of one."""
        (scale, inverse), format, lane = scaling, self.formats[0], convert.lane_id()
        values, scales = arrays["codes_0"], arrays["scales_0"]
        mine = lane % self.sharers
        _, offset, inside = strip.at(first + mine * self.apart)
        if const_expr(self.in_patches):
            exists = strip.exists(first + mine * self.apart)
            byte = inside.select(scale, Uint32(0))  # padding
            if exists:
                fx.generic_store(scales + offset, Uint8(byte))
        elif const_expr(self.layout.is_tiled):
            byte = inside.select(scale, Uint32(0))  # padding
            fx.generic_store(scales + (strip.offset + as_int64(offset)), Uint8(byte))
        else:
            if inside:
                fx.generic_store(scales + (strip.offset + as_int64(offset)), Uint8(scale))

        packed: fx.Constexpr = format.codes_per_byte
        n: fx.Constexpr = self.itemsize * packed  # lanes that 16 bytes of a round come from
        of_block = lane // n % (self.sharers // n) * 16
        blocks = [
            strip.at(first + (lane % n + Uint32(g * n)) * self.apart)
            for g in range(self.chunks // n)
        ]
        start = strip.block * (BLOCK // packed)
        offsets = [block * (BLOCK // packed) + as_int64(of_block) for block, _, _ in blocks]
        if tiles != Uint32(0):
            start = Int64(0)
            cols = sizes[-1]
            offsets = self.in_tiles([strip.block + b for b, _, _ in blocks], of_block, cols)
        for g in range_constexpr(self.chunks // n):
            if self.reaches(strip, first, g * n):
                codes = self.codes_of(words, inverse, g * n, n, lane)
                if blocks[g][2]:
                    store_words(values + start, offsets[g], codes, self.aligned_to("codes_0"))

    def reaches(self, strip, first, c: int):
        """Whether the wave may have blocks in a round and later ones; the same for all lanes."""
        return True

    def codes_of(self, words: list, inverse, first: int, count: int, lane) -> list:
        """16 bytes of codes of some rounds, of which each of as many neighbours gets one's."""
        format, parts = self.formats[0], []
        packed = format.codes_per_byte
        together = max(count // 4, 1)  # rounds of which a lane has but a word of codes
        for c in range(first, first + count, together):
            bits = [convert.from_group(inverse, self.sharers, c + i) for i in range(together)]
            poison = convert.poison(bits, [1, 1, 2 * together - 1, 2 * together - 1])
            scaled = []
            for i in range(together):
                elements = [e for w in words[c + i] for e in convert.elements(w, self.dtype)]
                factor = bits[i].bitcast(fx.Float32)
                scaled += convert.products(elements, [factor] * len(elements))
            parts.append([
                convert.pack_word(scaled[i : i + 4 * packed], poison, format, self.arch)
                for i in range(0, len(scaled), 4 * packed)
            ])  # fmt: skip
        return exchange(parts, lane, together > 1)

    def through_codes(self, words: list, scale, inverse, c: int) -> list:
        """The floats that the codes of a lane's words of a round stand for."""
        scale, inverse = (convert.from_group(bits, self.sharers, c) for bits in (scale, inverse))
        elements = [e for word in words for e in convert.elements(word, self.dtype)]
        scaled = convert.products(elements, [inverse.bitcast(fx.Float32)] * len(elements))
        factors, poisons = [convert.factor_of(scale)] * len(elements), [convert.poison_of(scale)]
        by = poisons * (len(elements) // 4), self.formats[0], self.dtype, self.arch
        return convert.through_codes(scaled, factors, *by)

    @flyc.jit
    def store_floats(self, words, arrays, name: fx.Constexpr, strip, place, lane):
        """Stores a lane's words of a place in the array of this name."""
        block, _, there = strip.at(place)
        where = (strip.block + block) * (BLOCK * self.itemsize)
        where = where + as_int64(lane % self.sharers * 16)
        if there:
            store_words(arrays[name], where, words, self.aligned_to(name))

    def strip(self, sizes):
        """The workgroup's blocks."""
        if self.in_patches:
            return Patches(self.layout, self.blocks, sizes[1:3], self.region)
        if self.dequantized:  # whose elements are counted
            sizes = (sizes[0] // BLOCK, *sizes[1:])
        return Strip(self.layout, self.blocks, sizes)

    def windowed(self, amax, arrays, strip, first, lane):
        """The amax of the window of this lane's own block."""
        block, _, inside = strip.at(first + lane % self.sharers * self.apart)
        if self.variant.window == ROW:
            (amaxes,) = self.block_data(arrays, 0)
            return load_words(amaxes + strip.block * 4, block * 4, 1, 4)[0]
        amax, distance = inside.select(amax, Uint32(0)), self.sharers
        while distance < self.sharers * blocks_of(self.variant.window):
            amax = convert.larger(amax, convert.from_row(amax, distance), "float32")
            distance *= 2
        return amax

    def in_tiles(self, blocks: list, of_block, cols) -> list:
        """Where 16 bytes of the values of blocks lie in tiles; a row of x has `cols` blocks."""
        # 32 bits: a GPU's memory does not hold the elements of more blocks.
        cols, size = Uint32(cols), BLOCK // self.formats[0].codes_per_byte
        pairs = ((Uint32(block) // cols, Uint32(block) % cols) for block in blocks)
        return [offset_of_values(r, c * size + of_block, cols * size) for r, c in pairs]

    def amax_of_mine(self, amax: list, lane):
        """The float32 bits of the largest magnitude in the round that has this lane's number."""
        if self.itemsize == 4:
            return halved_among(amax, self.sharers, self.dtype)[0]
        pairs = [
            convert.amaxes_of_two(amax[c], amax[c + 1], self.dtype)
            for c in range(0, self.chunks, 2)
        ]
        upper = (lane & Uint32(2)) != Uint32(0)
        (word,) = halved(
            pairs, upper, lambda w: convert.from_lane(w, convert.EXCHANGE[2]), self.dtype
        )
        word = convert.larger(word, convert.from_lane(word, convert.EXCHANGE[1]), self.dtype)
        two = [e.bitcast(Uint32) for e in convert.elements(word, self.dtype)]
        return ((lane & Uint32(1)) != Uint32(0)).select(two[1], two[0])


class PreprocessedFlat(Flat):
    """`Flat` for elements that are preprocessed, see preprocessed.py.

    Block data (..., rows, cols) come behind x.

    The lanes of a wave exchange the elements that they read in LDS, so that each has whole blocks.
    """

    @flyc.kernel
    def kernel(self, pointers, scalars):
        arrays = self.named(pointers)
        x, values, scales = arrays["x"], arrays["codes_0"], arrays["scales_0"]
        data = self.block_data(arrays, 0)
        sizes = scalars[: len(self.extents)]
        settings = {name: Uint32(n) for name, n in self.of_result(scalars, 0).items()}
        rule, tiles, mode = self.rule(settings), settings["value_tiles"], self.mode(0)
        prescale = settings.get("prescale", Uint32(0))
        preprocessed.flush_subnormals(mode, prescale)
        format, lane, thread = self.formats[0], convert.lane_id(), Uint32(Int32(fx.thread_idx.x))
        strip = Strip(self.layout, self.blocks, sizes)
        position = strip.find(thread * self.group)
        mine = [strip.next_to(*position, i) for i in range_constexpr(self.group)]
        blocks, (_, _, inside) = [block for block, _, _ in mine], mine[0]  # which all are or none
        rounds = self.load(x + strip.block * (BLOCK * self.itemsize), blocks[0], lane)
        loaded = preprocessed.data_of_blocks(mode, data, settings, strip.block, blocks)

        loaded_words = self.exchange(rounds, thread)
        elements = preprocessed.elements(mode, self.dtype, loaded_words, loaded, prescale)
        scalings = [preprocessed.scale_of(pairs, format, rule, self.arch) for pairs in elements]
        if const_expr(self.layout.is_tiled):
            for (_, offset, _), (scale, _) in zip(mine, scalings, strict=True):
                byte = inside.select(scale, Uint32(0))  # padding
                fx.generic_store(scales + (strip.offset + as_int64(offset)), Uint8(byte))
        if inside:
            if const_expr(not self.layout.is_tiled):
                for (_, offset, _), (scale, _) in zip(mine, scalings, strict=True):
                    fx.generic_store(scales + (strip.offset + as_int64(offset)), Uint8(scale))
            if const_expr(self.group == 1):
                (codes,) = self.codes(elements, scalings, loaded)
                self.store_codes(values, codes, strip.block, blocks[0], tiles, sizes[-1])
        if const_expr(self.group > 1):  # so that neighbours write side by side
            parts = shared_by_four(self.codes(elements, scalings, loaded), lane)
            for i in range_constexpr(2):
                block, _, there = strip.at(thread // 4 * 8 + lane % 4 + 4 * i)
                if there:
                    self.store_codes(values, parts[i], strip.block, block, tiles, sizes[-1])

    def codes(self, elements: list, scalings: list, loaded: list) -> list:
        """The words of the codes of a lane's blocks."""
        return [
            preprocessed.codes(self.mode(0), pairs, inverse, block_data, self.formats[0], self.arch)
            for pairs, (_, inverse), block_data in zip(elements, scalings, loaded, strict=True)
        ]

    @flyc.jit
    def store_codes(self, values, codes, first, block, tiles, cols):
        """Stores the codes of the block with the number `first` + `block`."""
        start, where = first * 16, block * 16
        if tiles != Uint32(0):
            start = Int64(0)
            (where,) = self.in_tiles([first + block], Uint32(0), cols)
        store_words(values + start, where, codes, self.aligned_to("codes_0"))

    def load(self, x, block, lane) -> list:
        """The words that this lane reads in each round; `block` is the first that is the lane's."""
        rounds = []
        for c in range(self.chunks):
            owner = lane // self.sharers + Uint32(c * self.per_chunk)
            number = as_int64(convert.from_anywhere(Uint32(block), owner))
            if self.layout.is_tiled:  # of long rows more than 32 bits
                high = as_int64(convert.from_anywhere(Uint32(block >> Int64(32)), owner))
                number = number | high << Int64(32)
            where = number * (BLOCK * self.itemsize) + as_int64(lane % self.sharers * 16)
            rounds.append(load_words(x, where, 4, self.align[0]))
        return rounds

    def exchange(self, rounds: list, thread) -> list:
        """The words of each of a lane's blocks."""
        array = fx.Array[Uint8, self.blocks * BLOCK * self.itemsize, 16]
        shared = fx.SharedAllocator().allocate(composite(fx.struct, {"x": array})).peek().x
        lane, block_words = thread % Uint32(WAVE), []
        for c, piece in enumerate(rounds):
            owner = thread - lane + lane // self.sharers + Uint32(c * self.per_chunk)
            to = shared_pointer(shared, self.place(owner, lane % self.sharers), Uint32, 16)
            fx.generic_store(to, fx.Vector.from_elements(piece, Uint32))
        share_in_wave()
        for i in range(self.sharers):
            at = shared_pointer(shared, self.place(thread, Uint32(i)), Uint32, 16)
            piece = fx.generic_load(at, dtype=Uint32, count=4)
            block_words += [piece[w] for w in range(4)]
        size = len(block_words) // self.group
        return [block_words[i : i + size] for i in range(0, len(block_words), size)]

    def place(self, owner, piece) -> Int32:
        """Where 16 bytes of a lane lie: permuted, or all lanes would read from the same banks."""
        key = owner // Uint32(max(8 // self.sharers, 1)) % Uint32(self.sharers)
        return Int32((owner * Uint32(self.sharers) + (piece ^ key)) * Uint32(16))
