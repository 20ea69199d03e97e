"""Blocks along the last axis in windows of whole rows: `WholeRows` reads a row once.

The warps of a thread block share out its rows: as many as hold a row in registers take one
together, at most all. They find the row's amax, then round the row to codes. A longer row's rest is
read again. Thread blocks, as many as run at a time, take rows by turns.
"""

import dataclasses

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr, cute, range_constexpr

from jax_mx.formats.formats import BLOCK
from jax_mx.quantizing.kernels import geometry
from jax_mx.quantizing.kernels.cutedsl import activations, convert
from jax_mx.quantizing.kernels.cutedsl.flat import WholeBlocks
from jax_mx.quantizing.kernels.cutedsl.kernel import bytes_of, largest, load, load_row, vector_at

WORDS = 4  # of the 16 bytes that a thread loads at once
TOGETHER = 4  # vectors of gates, and of ups, that a thread has under way


@dataclasses.dataclass(frozen=True)
class Share:
    """The shape of a thread block of `WholeRows`, and how many there are.

    Attributes:
      threads: of it.
      kept: how many vectors of a row a thread keeps.
      resident: how many thread blocks a multiprocessor has.
    """

    threads: int
    kept: int
    resident: int


class WholeRows(WholeBlocks):
    """x (..., rows, cols, 32) -> values like x, scales (..., rows, cols)."""

    def __init__(self, *entry, tile: Share | None = None):
        super().__init__(*entry)
        self.tile = tile or Share(**self.tuned("WholeRows"))
        self.threads = self.tile.threads
        self.elements = 16 // self.itemsize  # of a vector
        self.elements_per_thread = self.tile.kept * self.elements
        form, of = self.variant.form, self.of
        self.extents = geometry.extents_of(form, of) if of else geometry.extents_of_rows()
        self.grid = geometry.grid_of_chip(self.tile.resident)

    @cute.jit
    def __call__(self, pointers, scalars):
        # All thread blocks of the grid run at a time.
        self.kernel(pointers, scalars).launch(
            grid=[1, 1, 1],
            block=[self.threads, 1, 1],
            min_blocks_per_mp=self.tile.resident,
            preferred_smem_carveout=0,  # else the compiler asks a driver
        )

    @cute.kernel
    def kernel(self, pointers, scalars):
        arrays = self.named(pointers)
        rows, cols = scalars[:2]
        warps: cutlass.Constexpr = self.threads // 32
        vectors = cols * (BLOCK // self.elements)  # of a row
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        count, _, _ = cute.arch.grid_dim()
        sharing = Int32(1)  # warps that have a row together
        for i in range_constexpr(1, warps.bit_length()):
            if vectors > 32 * self.tile.kept * (1 << (i - 1)):
                sharing = Int32(1 << i)
        together = warps // sharing  # rows of the thread block
        steps = (rows + together - 1) // together
        maxima = cute.make_tensor(
            cute.arch.alloc_smem(Uint32, 2 * warps, alignment=16), cute.make_layout((warps, 2))
        )
        team: cutlass.Constexpr = (sharing, tid % (32 * sharing))
        turn = Int32(0)
        for step in cutlass.range(bid, steps, count, unroll=1):
            row = step * together + tid // (32 * sharing)
            # A row that is not there has no vectors.
            count_here = Int32(cutlass.select_(row < rows, vectors, 0))
            self.quantize_row(arrays, scalars, row, count_here, team, maxima[None, turn])
            turn = 1 - turn

    @cute.jit
    def quantize_row(
        self, arrays, scalars, row, vectors, team: cutlass.Constexpr, maxima
    ):  # fmt: skip
        """Quantizes a row of so many vectors.

        Args:
          arrays: the kernel's.
          scalars: the kernel's, too.
          row: its number.
          vectors: how many it has.
          team: how many warps have it, and which of their threads this one is.
          maxima: a word of shared memory for each warp, that no thread reads any more.
        """
        sharing, rank = team
        kept: cutlass.Constexpr = self.tile.kept
        apart = 32 * sharing
        length = scalars[1] * (BLOCK // self.elements)
        first = Int64(row) * length
        of_row: cutlass.Constexpr = (row, length, vectors)
        rX = self.vectors(arrays, of_row, rank, apart, kept)
        word = self.larger_of(cute.recast_tensor(rX, Uint32))
        for at in cutlass.range(rank + kept * apart, vectors, apart, unroll=1):
            rA = cute.recast_tensor(self.vectors(arrays, of_row, at, apart, 1), Uint32)
            word = convert.larger_magnitude(word, self.larger_of(rA), self.dtype, self.arch)
        amax = self.of_team(convert.largest_magnitude_bits(word, self.dtype), sharing, maxima)
        rule = self.rule(self.of_result(scalars, 0))
        scale, inverse = self.scale_of(amax, self.formats[0], rule)
        for i in range_constexpr(kept):
            if rank + i * apart < vectors:
                self.put(arrays, first + rank + i * apart, rX[None, i], inverse)
        for at in cutlass.range(rank + kept * apart, vectors, apart, unroll=1):
            rA = self.vectors(arrays, of_row, at, apart, 1)
            self.put(arrays, first + at, rA[None, 0], inverse)
        blocks = vectors // (BLOCK // self.elements)
        to = arrays["scales_0"] + Int64(row) * scalars[1]
        for block in cutlass.range(rank, blocks, apart, unroll=1):
            vector_at(to + block, Uint8, 1, 1)[0] = Uint8(scale)

    def larger_of(self, words):
        """The word of larger magnitudes of words of elements."""
        word = words[0]
        for w in range(1, cute.size(words)):
            word = convert.larger_magnitude(word, words[w], self.dtype, self.arch)
        return word

    @cute.jit
    def of_team(self, amax, sharing, maxima):
        """The largest of the maxima of all threads that have a row."""
        warps: cutlass.Constexpr = self.threads // 32
        tid, _, _ = cute.arch.thread_idx()
        amax = largest(amax)
        if tid % 32 == 0:
            maxima[tid // 32] = amax
        # One barrier a row: the next row has other words, the one behind it comes after the next
        # barrier.
        cute.arch.sync_threads()
        warp = tid // 32 // sharing * sharing
        for i in range_constexpr(warps):
            amax = cutlass.max(amax, maxima[warp + i % sharing])
        return amax

    @cute.jit
    def vectors(self, arrays, of_row: cutlass.Constexpr, at, apart, count: cutlass.Constexpr):
        """Vectors of a row of the floats, so far apart; zeros beyond the row.

        `of_row`: its number, the vectors of a row, and those that this one has.
        """
        row, length, vectors = of_row
        rX = cute.make_rmem_tensor((self.elements, count), convert.INPUT[self.dtype])
        if const_expr(self.of):
            LOADERS[self.source.loaders["cutedsl"]](self, arrays, of_row, at, apart, rX)
        else:
            for i in range_constexpr(count):
                number = Int64(row) * length + at + i * apart
                self.take(arrays["x"], number, at + i * apart, vectors, rX[None, i])
        return rX

    @cute.jit
    def take(self, x, number: Int64, at, vectors, target):
        """Loads a vector of x, if the row has an `at`-th one; else zeros."""
        n: cutlass.Constexpr = self.elements
        align: cutlass.Constexpr = 16 if self.aligned else self.itemsize
        source = vector_at(x + number * n, convert.INPUT[self.dtype], align, n)
        if const_expr(self.aligned):
            load_row(source, target, at, vectors, self.kept)
        else:
            target.fill(convert.INPUT[self.dtype](0))
            if at < vectors:
                load(source, target, self.kept)

    @cute.jit
    def gate(self, arrays, of_row: cutlass.Constexpr, at, apart, rX):
        """An activation's results, of gates and ups that lie in rows of x; some at a time.

        Beyond a row of finite numbers they are 0, as gate and up are.
        """
        row, length, vectors = of_row
        name: cutlass.Constexpr = self.source.facts["activation"]
        count: cutlass.Constexpr = rX.shape[1]
        together: cutlass.Constexpr = min(TOGETHER, count)
        rM = cute.make_rmem_tensor(1, Float32)
        rM[0] = Float32(0.0)
        if vectors > 0:
            rM[0] = vector_at(arrays["weights"] + row, Float32, 4, 1)[0]
        for begin in range_constexpr(0, count, together):
            both = [
                cute.make_rmem_tensor((self.elements, together), convert.INPUT[self.dtype])
                for _ in range(2)
            ]
            for i in range_constexpr(together):
                there = at + (begin + i) * apart
                for half in range_constexpr(2):
                    array, number = self.of_half(half, row, length, there)
                    self.take(arrays[array], number, there, vectors, both[half][None, i])
            for i in range_constexpr(together):
                gates, ups, results = (
                    cute.recast_tensor(r, Uint32)
                    for r in (both[0][None, i], both[1][None, i], rX[None, begin + i])
                )
                for w in range_constexpr(WORDS):
                    results[w] = activations.gated(name, gates[w], ups[w], rM[0], self.dtype)

    def of_half(self, half: int, row, length, at) -> tuple:
        """Where a row's vectors of gates, or of ups, are: the array, and the vector's number."""
        if "up" in [array.name for array in self.signature.operands]:
            return ("x", "up")[half], Int64(row) * length + at
        return "x", (2 * Int64(row) + half) * length + at

    @cute.jit
    def put(self, arrays, number: Int64, rX, inverse):
        """Stores the codes of a vector."""
        n: cutlass.Constexpr = self.elements
        registers = cute.recast_tensor(rX, Uint32)
        packed = self.codes([registers[w] for w in range(WORDS)], inverse, self.formats[0])
        to = vector_at(arrays["codes_0"] + number * n, Uint8, n if self.aligned else 1, n)
        cute.autovec_copy(bytes_of(packed, n), to)


# ---- what makes the floats: by the name that a source has for its loader ---
def _gated(entry: WholeRows, *where) -> None:
    entry.gate(*where)


LOADERS = {"gated": _gated, "gated_pair": _gated}
