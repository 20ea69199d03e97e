"""Blocks along the last axis: `Flat`. Blocks are consecutive in memory, so floats are a vector."""

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr, cute, range_constexpr

from jax_mx.formats.formats import BLOCK, Format
from jax_mx.formats.windows import ROW, blocks_of
from jax_mx.quantizing.facts.modes import Mode
from jax_mx.quantizing.kernels import geometry
from jax_mx.quantizing.kernels.cutedsl import activations, convert, preprocessed
from jax_mx.quantizing.kernels.cutedsl.kernel import (
    Kernel,
    Strip,
    bytes_of,
    fragment,
    load,
    load_row,
    locate,
    numbers_of,
    offset_in_tiles,
    place_of,
    select,
    vector_at,
)
from jax_mx.quantizing.kernels.geometry import Extents


class WholeBlocks(Kernel):
    """The work of a thread that has a whole block, or shares a block with its neighbours."""

    @cute.jit
    def quantized(
        self, held, data, o: cutlass.Constexpr, rule, extra, share: cutlass.Constexpr
    ):  # fmt: skip
        """(words of codes, scale) of a block for the o-th result.

        Args:
          held: words of elements, as they are in memory.
          data: the result of `preprocessed.load`.
          o: number of the result.
          rule: see `QuantizerEntry.rule`.
          extra: see `extra`.
          share: the place of these elements in their block.
        """
        mode: cutlass.Constexpr = self.mode(o)
        # The dtype of the elements that are scaled.
        dtype: cutlass.Constexpr = "float32" if mode.hadamard else self.dtype
        (loaded, known), (prescale, *flips) = data, extra
        floats = []
        if const_expr(mode.changes_elements):
            if const_expr(mode.hadamard):
                held = preprocessed.flipped(held, loaded[-1], known, flips, share, mode.hadamard)
            floats = preprocessed.elements(mode, self.dtype, held, share, prescale)
            if const_expr(dtype == "float32"):
                held = [convert.float_to_bits(value) for value in floats]
        if const_expr(mode.window == ROW):
            amax = loaded[-1]
        else:
            word = held[0]
            for w in range_constexpr(1, len(held)):
                word = convert.larger_magnitude(word, held[w], dtype, self.arch)
            lanes: cutlass.Constexpr = share.sharers * blocks_of(mode.window)
            for k in range_constexpr(lanes.bit_length() - 1):
                other = cute.arch.shuffle_sync_bfly(word, offset=1 << k)
                word = convert.larger_magnitude(word, other, dtype, self.arch)
            amax = convert.largest_magnitude_bits(word, dtype)
        if const_expr(not mode.changes_elements):
            scale, inverse = self.scale_of(amax, self.formats[o], rule)
            by: cutlass.Constexpr = scale if mode.dequantized else None
            return self.codes(held, inverse, self.formats[o], by), scale
        element_type: cutlass.Constexpr = (mode, self.dtype)
        amax = convert.float_to_bits(
            preprocessed.finished(*element_type, convert.bits_to_float(amax), prescale)
        )
        scale, inverse = self.scale_of(amax, self.formats[o], rule, "float32")
        by = convert.bits_to_float(inverse) * preprocessed.factor(*element_type, prescale)
        rP = cute.make_rmem_tensor(share.elements // 8, Uint32)
        if const_expr(preprocessed.is_exact(*element_type)):
            if amax < Uint32(preprocessed.SMALL):
                settled = [preprocessed.settled(*element_type, value, prescale) for value in floats]
                self.preprocessed_codes(mode, settled, by, loaded, share, rP)
            else:
                self.preprocessed_codes(mode, floats, by, loaded, share, rP)
        else:
            self.preprocessed_codes(mode, floats, by, loaded, share, rP)
        return [rP[i] for i in range(share.elements // 8)], scale

    @staticmethod
    def extra(scalars: dict) -> list:
        """The scalars of preprocessing, as bits: the prescale, flips of even and of odd blocks.

        Scalars that the result does not have are 0.
        """
        return [scalars.get(name, Int32(0)) for name in ("prescale", "flips", "flips_odd")]

    def preprocessed_codes(self, mode: Mode, floats: list, by, loaded: list, share, into) -> None:
        """Puts words of the e2m1 codes of floats times a block's factor into a fragment."""
        if mode.stochastic:
            packed = preprocessed.random_codes(floats, by, loaded[0], share)
        else:
            packed = convert.pack_products(floats, by, self.arch)
        for i, word in enumerate(packed):
            into[i] = word

    def codes(self, held: list, inverse, format: Format, scale=None) -> list:
        """Words of the codes of words of elements, rounded to nearest.

        With the block's scale, words of what they stand for.
        """
        inverses = convert.pair(inverse, inverse)
        words_per_pair = self.itemsize // 2
        pairs = [
            self.scaled_pair(held[i : i + words_per_pair], inverses, format)
            for i in range(0, len(held), words_per_pair)
        ]
        to = self.conversion(format)
        if scale is None:
            return convert.pack_along(pairs, to)
        back = convert.float_to_bits(convert.factor_of(scale))
        return convert.through_codes(pairs, [convert.pair(back, back)] * len(pairs), to)

    @cute.jit
    def stored_as(self, block, cols, tiles):
        """The row-major number of the place of a block's values: its own, or the one by tiles."""
        number = block
        if tiles:
            # 32 bits: a GPU's memory does not hold the elements of more blocks.
            row = Uint32(block) // Uint32(cols)
            byte = (Uint32(block) - row * Uint32(cols)) * Uint32(16)  # of a row; a block has 16
            top, chunk = geometry.in_tiles_of_values(row, byte)
            number = Int64(top) * cols + Int64(chunk)
        return number


class Flat(WholeBlocks):
    """x (..., rows, cols, 32) -> values like x, scales (..., rows, cols) in the layout.

    Variants with preprocessing take block data (..., rows, cols) behind x, see preprocessed.py.

    The blocks of a thread block follow each other in memory, or as tiles of scales have them. Where
    that could cut windows, they are `PATCH`, whole windows of some rows; and so they are where rows
    are picked.
    """

    PATCH = 8  # blocks across; a tile's scales that a warp writes are side by side then
    LONG = 32  # of row-major scales beside rows that are picked: they are written 32 bytes a row

    def __init__(self, *entry, tile: Strip | None = None):
        super().__init__(*entry)
        name = "Flat, preprocessed" if self.variant.changes_elements else "Flat"
        self.tile = tile or Strip(**self.tuned(name))
        self.elements_per_thread = self.tile.elements * self.tile.unroll
        self.threads = self.tile.threads
        self.dequantized = self.mode(0).dequantized
        outs = "dequantized_0" if self.dequantized else "scales_0"
        x, out = map(self.signature.number, ("x", outs))
        lengths = geometry.length_of(x), geometry.length_of(out)
        self.extents = (*lengths, geometry.flat_rows(), geometry.flat_blocks())
        grid = geometry.flat_grid_of if self.dequantized else geometry.flat_grid
        self.grid = grid(out, self.tile.blocks)
        count = blocks_of(self.variant.window)
        of = self.of
        self.in_patches = of > 0 or (count > 1 and (self.layout.is_tiled or not self.aligned))
        if self.in_patches:
            across = self.PATCH if self.layout.is_tiled or not of else self.LONG
            self.patch = Extents(self.tile.blocks // across, across)
            tile = Extents(self.patch.rows, self.patch.cols * BLOCK)
            self.region = geometry.region_of(self.variant.form, self.layout, tile)
            self.grid = geometry.grid_of(self.variant.form, tile, self.region, of)
            if of:
                self.extents = (*lengths, *geometry.extents_of(self.variant.form, of))
        elif count > 1:
            self.divide = [[0, -2, -1, count]]  # whole windows, so that rows do not matter

    @cute.kernel
    def kernel(self, pointers, scalars):
        arrays = self.named(pointers)
        x = arrays["x"]
        data = self.block_data(arrays, 0)
        n, places, rows, cols, *_ = scalars
        if const_expr(self.dequantized):
            places = places // BLOCK  # blocks, whose scales nobody wants
        settings = self.of_result(scalars, 0)
        rule, extra = self.rule(settings), self.extra(settings)
        elements: cutlass.Constexpr = self.tile.elements
        unroll: cutlass.Constexpr = self.tile.unroll
        sharers: cutlass.Constexpr = BLOCK // elements  # threads that share a block
        words_per_step: cutlass.Constexpr = elements * self.itemsize // 4
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        by_step = cute.make_layout((n // elements, elements), stride=(elements, 1))
        mX = cute.make_tensor(x, by_step)
        stored: cutlass.Constexpr = elements // (1 if self.dequantized else self.per_byte)
        values = arrays["dequantized_0" if self.dequantized else "codes_0"]
        mV = cute.make_tensor(values, cute.make_layout((n // elements, stored), stride=(stored, 1)))
        per_step: cutlass.Constexpr = self.tile.threads // sharers

        rX = cute.make_rmem_tensor((elements, unroll), convert.INPUT[self.dtype])
        rX.fill(convert.INPUT[self.dtype](0))
        steps, stores, offsets, insides, data_of_steps = [], [], [], [], []
        first = Int64(bid) * self.tile.blocks
        for u in range_constexpr(unroll):
            mine = self.with_pairs(u * per_step + tid // sharers)
            if const_expr(self.in_patches):
                block, row, offset, inside = self.locate_in_patch(bid, mine, places, rows, cols)
            else:
                block, offset, inside = locate(self.layout, first, mine, places, rows, cols)
            steps.append(block * sharers + tid % sharers)
            if const_expr(self.tiles_values):
                tiles = settings["value_tiles"] != Int32(0)
                stores.append(self.stored_as(block, cols, tiles) * sharers + tid % sharers)
            else:
                stores.append(steps[u])
            offsets.append(offset)
            insides.append(inside)
            if const_expr(self.of):
                where: cutlass.Constexpr = (steps[u], row, inside)
                self.make(arrays, scalars, mX, rX[None, u], where)
            elif inside:
                load(mX[steps[u], None], rX[None, u], self.kept)
            data_of_steps.append(preprocessed.load(self.mode(0), data, block, inside))

        for u in range_constexpr(unroll):
            rW = cute.recast_tensor(rX[None, u], Uint32)
            held = [rW[w] for w in range(words_per_step)]
            odd = Int32(steps[u] // sharers % 2)
            share = preprocessed.Place(tid % sharers, sharers, elements, odd)
            packed, scale = self.quantized(held, data_of_steps[u], 0, rule, extra, share)
            there: cutlass.Constexpr = (stores[u], offsets[u], insides[u])
            self.store(packed, scale, arrays, mV, there, places, len(rule) > 2)

    @cute.jit
    def store(
        self, packed, scale, arrays, mV, there: cutlass.Constexpr, places,
        has_zeros: cutlass.Constexpr,
    ):  # fmt: skip
        """Stores a step's codes, and its block's scale; or its floats.

        Args:
          packed: words of either.
          scale: of the block.
          arrays: the kernel's.
          mV: values by step.
          there: which step; where the scale lies; whether the block exists.
          places: how many scales there are, with the padding of tiles.
          has_zeros: whether blocks of zeros have a scale of their own.
        """
        step, offset, inside = there
        if const_expr(self.dequantized):
            if inside:
                cute.autovec_copy(fragment(packed, self.dtype), mV[step, None])
        else:
            if inside:
                cute.autovec_copy(bytes_of(packed, mV.shape[1]), mV[step, None])
            tid, _, _ = cute.arch.thread_idx()
            if (offset < places) & (tid % (BLOCK // self.tile.elements) == 0):
                if const_expr(self.layout.is_tiled and (has_zeros or self.in_patches)):
                    scale = select(inside, scale, Uint32(0))
                mS = cute.make_tensor(arrays["scales_0"], cute.make_layout(places))
                mS[offset] = Uint8(scale)  # padding: of zeros, so 0

    def make(self, arrays, scalars, mX, target, where) -> None:
        """Makes the floats of a thread's step of x: its number, its row, whether it exists."""
        LOADERS[self.source.loaders["cutedsl"]](self, arrays, scalars, mX, target, where)
        if "floats" in arrays:
            step, _, inside = where
            self.store_floats(target, arrays["floats"], step, inside)

    @cute.jit
    def store_floats(self, step_floats, floats, step: Int64, inside):
        """Stores the floats of a step."""
        n: cutlass.Constexpr = self.tile.elements
        align: cutlass.Constexpr = 16 if self.aligned else self.itemsize
        if inside:
            to = vector_at(floats + step * n, convert.INPUT[self.dtype], align, n)
            cute.autovec_copy(step_floats, to)

    @cute.jit
    def pick(self, source, target, row: Int32, rows: Int32):
        """Loads elements of a row of x, which has so many `rows`; of another none."""
        if const_expr(self.aligned):
            load_row(source, target, row, rows, self.kept)
        elif Uint32(row) < Uint32(rows):
            load(source, target, self.kept)

    @cute.jit
    def gate(self, pair: cutlass.Constexpr, target, weight, inside):
        """An activation's results, of gates and ups and their row's weight; zeros outside."""
        both = [cute.make_rmem_tensor_like(target) for _ in range(2)]
        rM = cute.make_rmem_tensor(1, Float32)
        rM[0] = Float32(0.0)
        for half in both:
            half.fill(convert.INPUT[self.dtype](0))
        if inside:
            for source, half in zip(pair, both, strict=True):
                load(source, half, self.kept)
            rM[0] = cute.make_tensor(weight, cute.make_layout(1))[0]
        gates, ups, results = (cute.recast_tensor(t, Uint32) for t in (*both, target))
        if const_expr(self.source.interleaved):
            activations.part(gates, ups)
        for w in range_constexpr(cute.size(results)):
            results[w] = activations.gated(
                self.source.activation, gates[w], ups[w], rM[0], self.dtype
            )

    @cute.jit
    def locate_in_patch(self, bid, mine, places: Int64, rows: Int32, cols: Int32):
        """Gives what `locate` does, for a block of a patch of whole windows; its row, too."""
        down: cutlass.Constexpr = self.region.rows // self.patch.rows
        across: cutlass.Constexpr = self.region.cols // (self.patch.cols * BLOCK)
        in_region: cutlass.Constexpr = self.region.cols // BLOCK
        patches_r = (rows + self.region.rows - 1) // self.region.rows * down
        patches_c = (cols + in_region - 1) // in_region * across
        batch, patch_r, patch_c = place_of(bid, patches_r, patches_c, 1)
        row = patch_r * self.patch.rows + mine // self.patch.cols
        col = patch_c * self.patch.cols + mine % self.patch.cols
        inside = (row < rows) & (col < cols)
        block = (Int64(batch) * rows + row) * cols + col
        offset = block
        exists = inside
        if const_expr(self.layout.is_tiled):
            coordinates: cutlass.Constexpr = geometry.Place(batch, row, col)
            offset, exists = offset_in_tiles(self.layout, coordinates, Extents(rows, cols))
        return block, row, Int64(cutlass.select_(exists, offset, places)), inside

    def with_pairs(self, place):
        """A place of the thread block's, such that neighbours have a transform's two blocks."""
        stride = self.layout.column_stride
        if self.mode(0).blocks == 1 or stride == 1:
            return place
        return place // (2 * stride) * (2 * stride) + place % 2 * stride + place // 2 % stride


# ---- what makes the floats: by the name that a source has for its loader ---
def _rows(entry: Flat, arrays, scalars, mX, target, where) -> None:
    step, row, inside = where
    cols, steps_per_block = scalars[3], BLOCK // entry.tile.elements  # cols: blocks of a row
    number = numbers_of(arrays["rows"], row, inside, 1, 4)[0]
    step = step + (Int64(number) - row) * cols * steps_per_block
    entry.pick(mX[step, None], target, number, scalars[4])


def _gated(entry: Flat, arrays, scalars, mX, target, where) -> None:
    step, row, inside = where
    if entry.source.interleaved:
        pair = mX[step * 2, None], mX[step * 2 + 1, None]
    else:
        steps = scalars[3] * (BLOCK // entry.tile.elements)  # of half a row
        first = step + Int64(row) * steps
        pair = mX[first, None], mX[first + steps, None]
    entry.gate(pair, target, arrays["weights"] + row, inside)


LOADERS = {"rows": _rows, "gated": _gated}
