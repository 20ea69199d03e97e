"""Forms with the second-to-last axis, with elements that are preprocessed: `PreprocessedTiled`.

A tile of x passes through shared memory. Threads take blocks of either direction from it and treat
them as `Flat` does: one thread's registers, or two threads', have the elements that a transform
combines.
"""

from collections.abc import Sequence
from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint8, Uint32, const_expr, cute, range_constexpr

from jax_mx.formats.directions import Blocks
from jax_mx.formats.formats import BLOCK
from jax_mx.quantizing.kernels import geometry
from jax_mx.quantizing.kernels.cutedsl import convert, preprocessed
from jax_mx.quantizing.kernels.cutedsl.flat import WholeBlocks
from jax_mx.quantizing.kernels.cutedsl.kernel import PAD, bytes_of
from jax_mx.quantizing.kernels.cutedsl.tiled import CHUNKS, Tiled, Tiling
from jax_mx.quantizing.kernels.geometry import Output

CODES = BLOCK // 2  # bytes of a block's codes


class ResultData(NamedTuple):
    """The data for the blocks of one result, besides their elements."""

    data: Sequence  # pointers to a uint32 for each block
    rule: list  # see `QuantizerEntry.rule`
    extra: list  # see `WholeBlocks.extra`


class PreprocessedTiled(WholeBlocks, Tiled):
    """`Tiled` for elements of two bytes, two codes a byte; each result's block data behind x.

    A thread loads 64 elements, and of each result quantizes two blocks: of two columns that are
    neighbours, or of two rows. A result with a code a byte is `Tiled`'s: of the elements as loaded.
    """

    def __init__(self, *entry, tile: Tiling | None = None):
        super().__init__(*entry, tile=tile)
        assert self.cluster == 1  # nothing here is found together
        self.pitch = 2 * self.tile.cols // 16  # chunks of x's rows in shared memory
        if not self.counts_blocks and not self.results[-1].transposed:
            self.divide = geometry.divide_of(self.variant.form, 16)  # it stores whole chunks

    @cute.kernel
    def kernel(self, pointers, scalars):
        blocks_m, k = self.lengths(scalars)
        tid, _, _ = cute.arch.thread_idx()
        at = self.place(blocks_m, k)
        lane = self.lane(tid)
        arrays = self.named(pointers)
        (rX,) = self.patches(arrays, scalars, at, lane)
        sX = cute.make_tensor(
            cute.arch.alloc_smem(Uint32, self.tile.rows * self.pitch * 4, alignment=128),
            cute.make_layout((4, self.pitch, self.tile.rows), stride=(1, 4, 4 * self.pitch)),
        )
        rW = cute.recast_tensor(rX, Uint32)
        for i in range_constexpr(self.rows):
            cute.autovec_copy(rW[None, i], sX[None, (lane.col // 8) ^ i, lane.row + i])
        staged = [self.shared_memory(result) for result in self.results]
        cute.arch.sync_threads()

        # The plain one first: no register holds the elements any longer then.
        order: cutlass.Constexpr = sorted(
            range(self.outputs), key=lambda o: not self.is_plain(self.results[o])
        )
        for i in range_constexpr(self.outputs):
            o: cutlass.Constexpr = order[i]
            result: cutlass.Constexpr = self.results[o]
            mine = self.block_data(arrays, o)
            named = self.of_result(scalars, o)
            result_data: cutlass.Constexpr = ResultData(mine, self.rule(named), self.extra(named))
            if const_expr(self.is_plain(result)):
                beyond: cutlass.Constexpr = self.beyond(arrays, scalars, o, at)
                self.quantize_patch(rX, staged[o], o, arrays, scalars, beyond, lane)
            elif const_expr(result.blocks is Blocks.LAST):
                self.quantize_rows(sX, staged[o], o, result_data, at, tid)
            else:
                self.quantize_columns(sX, staged[o], o, result_data, at, tid)
        cute.arch.sync_threads()
        busy = 0
        for o in range_constexpr(self.outputs):
            result: cutlass.Constexpr = self.results[o]
            values, scales = arrays[f"codes_{o}"], arrays[f"scales_{o}"]
            sS, sV = staged[o]
            if const_expr(self.is_padded(result)):
                self.store_unaligned(sV, values, result, at)
            elif const_expr(sV is not None):
                tiles = self.of_result(scalars, o).get("value_tiles")
                self.store_lines(sV, values, tiles, result, at, tid)
            thread = (tid + self.threads - busy) % self.threads
            self.store_scales(sS, scales, result, at, thread)
            busy += cute.size(sS) // 4

    def is_padded(self, result: Output) -> bool:
        """Whether values are staged as `store_unaligned` takes them."""
        return not (self.aligned or self.counts_blocks or result.transposed)

    def is_plain(self, result: Output) -> bool:
        """Whether a result is `Tiled`'s: it has a code a byte, of elements as they are loaded.

        Codes of four bits go the way of those that are preprocessed beside them.
        """
        return result.format.codes_per_byte == 1

    def is_staged(self, result: Output) -> bool:
        """Whether values pass through shared memory: all codes of four bits do."""
        if self.is_plain(result):
            return super().is_staged(result)
        return not self.is_padded(result)

    @cute.jit
    def quantize_rows(
        self, sX, staged, o: cutlass.Constexpr, result_data: cutlass.Constexpr,
        at: cutlass.Constexpr, tid,
    ):  # fmt: skip
        """Two blocks along rows, neighbours by neighbouring threads."""
        result: cutlass.Constexpr = self.results[o]
        lines: cutlass.Constexpr = self.lines(result)
        blocks_across: cutlass.Constexpr = self.tile.cols // BLOCK
        (sS, sV), (batch, tile_m, tile_k, blocks_m, k) = staged, at
        for step in range_constexpr(2):
            index = step * self.threads + tid
            row, block = index // blocks_across, index % blocks_across
            rW = cute.make_rmem_tensor((4, 4), Uint32)
            for c in range_constexpr(4):
                chunk = (4 * block + c) ^ (row % CHUNKS)
                cute.autovec_copy(sX[None, chunk, row], rW[None, c])
            m, number = tile_m * self.tile.rows + row, tile_k * blocks_across + block
            inside = (m < blocks_m * BLOCK) & (number < k // BLOCK)
            where = (Int64(batch) * (blocks_m * BLOCK) + m) * (k // BLOCK) + number
            block_data = preprocessed.load(self.mode(o), result_data.data, where, inside)
            held = [rW[i] for i in range(16)]
            share = preprocessed.Place(Int32(0), 1, BLOCK, block % 2)
            packed, scale = self.quantized(
                held, block_data, o, result_data.rule, result_data.extra, share
            )
            self.put(sS, result, row, block, scale)
            chunks = self.chunks(sV, lines)
            cute.autovec_copy(bytes_of(packed, CODES), chunks[None, block ^ lines.key(row), row])

    @cute.jit
    def quantize_columns(
        self, sX, staged, o: cutlass.Constexpr, result_data: cutlass.Constexpr,
        at: cutlass.Constexpr, tid,
    ):  # fmt: skip
        """The blocks of two neighbouring columns."""
        result: cutlass.Constexpr = self.results[o]
        pairs: cutlass.Constexpr = self.tile.cols // 2
        (sS, sV), (batch, tile_m, tile_k, blocks_m, k) = staged, at
        block, pair = tid // pairs, tid % pairs
        if const_expr(self.mode(o).blocks > 1):  # neighbours have a transform's two blocks
            block, pair = tid % self.tile.down, tid // self.tile.down
        column_pairs = [
            sX[pair % 4, (pair // 4) ^ (r % CHUNKS), block * BLOCK + r] for r in range(BLOCK)
        ]
        number, left = tile_m * self.tile.down + block, tile_k * self.tile.cols + 2 * pair
        where = (Int64(batch) * blocks_m + number) * k + left
        both = []
        for c in range_constexpr(2):
            inside = (number < blocks_m) & (left + c < k)
            block_data = preprocessed.load(self.mode(o), result_data.data, where + c, inside)
            half: cutlass.Constexpr = 0x7632 if c else 0x5410
            held = [convert.bytes_of(*column_pairs[r : r + 2], half) for r in range(0, BLOCK, 2)]
            share = preprocessed.Place(Int32(0), 1, BLOCK, block % 2)
            packed, scale = self.quantized(
                held, block_data, o, result_data.rule, result_data.extra, share
            )
            self.put(sS, result, block, 2 * pair + c, scale)
            both.append(packed)
            if const_expr(result.transposed):
                lines: cutlass.Constexpr = self.lines(result)
                chunks, line = self.chunks(sV, lines), 2 * pair + c
                to = chunks[None, block ^ lines.key(line), line]
                cute.autovec_copy(bytes_of(packed, CODES), to)
        if const_expr(not result.transposed):
            self.stage_pairs(sV, both, result, block, pair)

    @cute.jit
    def stage_pairs(self, sV, both, result: cutlass.Constexpr, block, pair):
        """The codes of two columns, beside each other in rows of bytes of two."""
        lines: cutlass.Constexpr = self.lines(result)
        for i in range_constexpr(CODES):
            row = block * CODES + i
            select: cutlass.Constexpr = (i % 4) | (4 + i % 4) << 4
            two = convert.bytes_of(both[0][i // 4], both[1][i // 4], select)
            if const_expr(self.is_padded(result)):
                where = PAD + row * (self.tile.cols + PAD) + 2 * pair
            else:
                chunk = (pair // 8) ^ lines.key(row)
                where = row * lines.size + chunk * 16 + pair % 8 * 2
            rV = bytes_of([two], 2)
            to = cute.make_ptr(Uint8, (sV + where).toint(), cute.AddressSpace.smem, assumed_align=2)
            cute.autovec_copy(rV, cute.make_tensor(to, cute.make_layout(2)))

    def chunks(self, sV, lines):
        """Lines in shared memory, by chunks."""
        return cute.make_tensor(
            sV, cute.make_layout((16, lines.size // 16, lines.count), stride=(1, 16, lines.size))
        )
