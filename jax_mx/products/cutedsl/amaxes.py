"""The largest magnitudes of a matrix's rows and of its columns, from one read of it.

Quantizing both ways in windows of whole rows wants them first. A thread block takes 128 rows and
512 columns, a warp 16 of these rows, a lane 16 bytes of a row at a time. Magnitudes are compared as
integers, of bfloat16 two in a word; thread blocks meet in results that begin as zeros, by atomics,
whose order does not matter to a maximum.

Thread blocks begin with the end of x, which the writer of x has just left in the L2 cache. They end
with its beginning, which the quantizer reads first.
"""

import cutlass
from cutlass import Float32, Int64, Uint16, Uint32, const_expr, cute, range_constexpr

from jax_mx.formats.formats import FLOAT_DTYPES
from jax_mx.launch.rule import Extent, Factor, GridTerm, Scratch, constant
from jax_mx.products.cutedsl.products import ProductEntry, vector
from jax_mx.quantizing.facts.product_kernels import ProductKernel
from jax_mx.quantizing.facts.signatures import Array, Role, signature_of
from jax_mx.quantizing.kernels.cutedsl import activations, convert
from jax_mx.quantizing.kernels.cutedsl.kernel import largest
from jax_mx.quantizing.sources.gated import GatedSource
from jax_mx.quantizing.sources.gated_gradient import GradientSource
from jax_mx.quantizing.sources.gated_pair import GatedPairSource
from jax_mx.quantizing.sources.pair_gradient import PairGradientSource

MAGNITUDES = {2: 0x7FFF7FFF, 4: 0x7FFFFFFF}  # by the bytes of an element


def larger(a: Uint32, b: Uint32) -> Uint32:
    """The larger halves of two words."""
    code = "{ .reg .b32 a, b; mov.b32 a, {$r0}; mov.b32 b, {$r1}; max.u16x2 {$w0}, a, b; }"
    return convert.ptx(code, Uint32, a, b)


def raise_to(address: Int64, value: Uint32) -> None:
    """Makes a word of global memory the larger of itself and a value."""
    convert.ptx("red.relaxed.gpu.global.max.u32 [{$r0}], {$r1};", None, address, value)


class Amaxes(ProductEntry):
    """See above; `vectors`: whether x can be read by 16 bytes."""

    dtypes = ("uint32",)
    columns = 512
    threads = 256
    elements_per_thread = 256

    def __init__(self, product: ProductKernel, arch: str, vectors: bool):
        super().__init__(product, arch)
        self.vectors, self.rows = vectors, product.rows
        self.itemsize = FLOAT_DTYPES[product.floats or "bfloat16"].itemsize
        self.steps = self.itemsize  # of 16 bytes, that a lane has of a row
        self.deep = 16 // self.steps  # rows that a lane has under way

    @property
    def extents(self) -> list[Extent]:
        """Matrices, rows, columns."""
        return [Extent(0, i, i + 1) for i in range(3)]

    @property
    def grid(self) -> list:
        """A thread block for each tile of each matrix."""
        sizes = zip(self.extents, (1, self.rows, self.columns), strict=True)
        return [GridTerm(0, Factor(extent, size)).to_json() for extent, size in sizes]

    @property
    def scratch(self) -> list:
        """Results begin as zeros."""
        matrices, *lengths = self.extents
        four = Factor(constant(4))
        return [
            Scratch(1 + i, (Factor(matrices), Factor(length), four), clear=True).to_json()
            for i, length in enumerate(lengths)
        ]

    def align_of(self, array: Array, itemsize: int) -> int:
        """16 bytes, or an element, for x."""
        return (16 if self.vectors else self.itemsize) if array.name == "x" else itemsize

    def element_of(self, array: Array):
        floats = cutlass.BFloat16 if self.itemsize == 2 else cutlass.Float32
        return floats if array.name == "x" else Uint32

    @cute.jit
    def __call__(self, pointers, scalars):
        self.kernel(pointers, scalars).launch(grid=[1, 1, 1], block=[self.threads, 1, 1])

    @cute.kernel
    def kernel(self, pointers, scalars):
        x, rows, columns = self.signature.named(pointers).values()
        _, r, c, _ = scalars
        warps: cutlass.Constexpr = self.threads // 32
        height: cutlass.Constexpr = self.rows // warps  # rows of a warp
        deep: cutlass.Constexpr = self.deep
        steps: cutlass.Constexpr = self.steps
        lane_columns: cutlass.Constexpr = 16 // self.itemsize  # in a step
        mask: cutlass.Constexpr = MAGNITUDES[self.itemsize]
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        count, _, _ = cute.arch.grid_dim()
        bid = count - 1 - bid
        warp, lane = tid // 32, tid % 32
        down, across = (r + self.rows - 1) // self.rows, (c + self.columns - 1) // self.columns
        matrix = bid // across // down
        row = bid // across % down * self.rows + warp * height
        column = bid % across * self.columns
        # 32 divides rows and 8 columns: a warp's rows are there, or none is; so are a lane's bytes.
        first = column + lane_columns * lane
        start = x.toint() + ((Int64(matrix) * r + row) * c + first) * self.itemsize
        line = Int64(c) * self.itemsize
        below = cute.make_rmem_tensor((4, steps), Uint32)
        below.fill(0)
        largest_of_row = Uint32(0)
        for part in range_constexpr(height // deep):
            held = cute.make_rmem_tensor((4, steps, deep), Uint32)
            held.fill(0)
            for j in range_constexpr(steps):
                if (row < r) & (first + 32 * lane_columns * j < c):
                    for i in range_constexpr(deep):
                        self.load(start + line * (part * deep + i) + 512 * j, held[None, j, i])
            for i in range_constexpr(deep):
                widest = Uint32(0)
                for j in range_constexpr(steps):
                    for w in range_constexpr(4):
                        word = held[w, j, i] & Uint32(mask)
                        below[w, j] = self.larger(below[w, j], word)
                        widest = self.larger(widest, word)
                widest = largest(self.float_bits(widest))
                largest_of_row = Uint32(
                    cutlass.select_(lane == part * deep + i, widest, largest_of_row)
                )
        if (lane < height) & (row < r):
            raise_to(rows.toint() + (Int64(matrix) * r + row + lane) * 4, largest_of_row)
        self.raise_columns(columns.toint() + (Int64(matrix) * c + column) * 4, below, c - column)

    def larger(self, a, b):
        """The word of larger magnitudes."""
        return larger(a, b) if self.itemsize == 2 else cutlass.max(a, b)

    def float_bits(self, word):
        """The float32 bits of the larger magnitude of a word."""
        if self.itemsize == 4:
            return word
        return cutlass.max(word << Uint32(16), word & Uint32(0xFFFF0000))

    @cute.jit
    def load(self, address: Int64, to):
        """Sixteen bytes."""
        if const_expr(self.vectors):
            cute.autovec_copy(vector(address, Uint32, 4), to)
        elif const_expr(self.itemsize == 4):
            for w in range_constexpr(4):
                to[w] = vector(address + 4 * w, Uint32)[0]
        else:
            for w in range_constexpr(4):
                low, high = (vector(address + 4 * w + 2 * h, Uint16)[0] for h in range(2))
                to[w] = Uint32(low) | (Uint32(high) << Uint32(16))

    @cute.jit
    def raise_columns(self, to: Int64, below, count):
        """Raises the columns' amaxes at `to` to the largest of all warps; `count` columns exist."""
        warps: cutlass.Constexpr = self.threads // 32
        words_per_pair: cutlass.Constexpr = self.itemsize // 2  # a thread takes a pair of columns
        takers: cutlass.Constexpr = self.columns // 2
        tid, _, _ = cute.arch.thread_idx()
        shared = cute.make_tensor(
            cute.arch.alloc_smem(Uint32, warps * takers * words_per_pair, alignment=16),
            cute.make_layout((4, 32, self.steps, warps)),
        )
        for j in range_constexpr(self.steps):
            cute.autovec_copy(below[None, j], shared[None, tid % 32, j, tid // 32])
        cute.arch.sync_threads()
        pairs = cute.make_tensor(shared.iterator, cute.make_layout((words_per_pair, takers, warps)))
        taker = tid % takers
        most = [pairs[i, taker, 0] for i in range(words_per_pair)]
        for w in range_constexpr(1, warps):
            most = [self.larger(most[i], pairs[i, taker, w]) for i in range(words_per_pair)]
        if const_expr(words_per_pair == 1):
            most = [most[0] << Uint32(16), most[0] & Uint32(0xFFFF0000)]
        if (2 * tid < count) & (tid < takers):
            raise_to(to + Int64(8 * tid), most[0])
            raise_to(to + Int64(8 * tid + 4), most[1])


class AmaxesOfMade(Amaxes):
    """Amaxes of floats that a source makes of gates, ups and weights; it also stores the floats.

    A thread block takes 128 rows and 512 gates, or 256 where it makes gradients. Columns have an
    amax in each of as many parts of the rows as their array says, of whole tiles each.
    """

    def __init__(self, product: ProductKernel, arch: str, vectors: bool):
        super().__init__(product, arch, vectors)
        self.source = SOURCES[product.source]
        self.signature = signature_of(product.op, source=self.source)
        names = [array.name for array in self.signature.operands]
        self.inputs = 2 + ("dy" in names)
        self.halves = 1 if "up" in names else 2  # of a row of x
        # Results of each array that is made: maxima of rows, of columns, the floats.
        names = [array.name for array in self.signature.results]
        self.groups = [names[i : i + 3] for i in range(0, len(names), 3)]
        self.side_by_side = self.source.parts // len(self.groups)  # parts of an array's rows
        self.deep = 4
        if self.inputs > 2:  # with more in registers too few warps would run
            self.columns, self.steps, self.deep = 256, 1, 2

    @property
    def extents(self) -> list[Extent]:
        """Rows; columns of x; parts of the rows."""
        parts = Extent(self.signature.number(self.groups[0][1]), 0, 1)
        return [*(Extent(0, i, i + 1) for i in range(2)), parts]

    @property
    def grid(self) -> list:
        """A thread block for each tile."""
        sizes = zip(self.extents, (self.rows, self.halves * self.columns), strict=False)
        return [GridTerm(0, Factor(extent, size)).to_json() for extent, size in sizes]

    @property
    def scratch(self) -> list:
        """Results begin as zeros."""
        names = (name for group in self.groups for name in group[:2])
        numbers = map(self.signature.number, names)
        return [
            Scratch(n, (Factor(Extent(n)), Factor(constant(4))), clear=True).to_json()
            for n in numbers
        ]

    def align_of(self, array: Array, itemsize: int) -> int:
        """16 bytes, or an element, for floats."""
        return (16 if self.vectors else self.itemsize) if array.role is Role.SOURCE else 4

    def element_of(self, array: Array):
        if array.name == "weights":
            return cutlass.Float32
        return cutlass.BFloat16 if array.role is Role.SOURCE else Uint32

    @cute.kernel
    def kernel(self, pointers, scalars):
        arrays = self.signature.named(pointers)
        r, wide, count_of_parts, _ = scalars
        c = wide // self.halves
        warps: cutlass.Constexpr = self.threads // 32
        height: cutlass.Constexpr = self.rows // warps  # rows of a warp
        deep: cutlass.Constexpr = self.deep
        steps: cutlass.Constexpr = self.steps
        parts: cutlass.Constexpr = self.source.parts
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        count, _, _ = cute.arch.grid_dim()
        bid = count - 1 - bid
        warp, lane = tid // 32, tid % 32
        across = (c + self.columns - 1) // self.columns
        row = bid // across * self.rows
        number = row // (r // count_of_parts)  # of the part
        row = row + warp * height
        column = bid % across * self.columns
        below = cute.make_rmem_tensor((4, steps, parts), Uint32)
        below.fill(0)
        rows_of_lane = cute.make_rmem_tensor(len(self.groups), Uint32)
        rows_of_lane.fill(0)
        for part in range_constexpr(height // deep):
            first = row + part * deep
            held = cute.make_rmem_tensor((4, steps, deep, self.inputs), Uint32)
            weights = cute.make_rmem_tensor(deep, Float32)
            self.take(arrays, held, weights, (first, r), (column + 8 * lane, c))
            for i in range_constexpr(deep):
                position: cutlass.Constexpr = (first + i, r, column + 8 * lane, c)
                widest = self.make(arrays, held[None, None, i, None], weights[i], position, below)
                for a in range_constexpr(len(self.groups)):
                    most = largest(self.float_bits(widest[a]))
                    mine = lane == part * deep + i
                    rows_of_lane[a] = Uint32(cutlass.select_(mine, most, rows_of_lane[a]))
        for a in range_constexpr(len(self.groups)):
            if (lane < height) & (row < r):
                to = arrays[self.groups[a][0]].toint()
                raise_to(to + Int64(row + lane) * 4, rows_of_lane[a])
        for p in range_constexpr(parts):
            to = arrays[self.groups[p // self.side_by_side][1]].toint()
            to = to + ((Int64(number) * self.side_by_side + p % self.side_by_side) * c + column) * 4
            self.raise_columns(to, below[None, None, p], c - column)

    @cute.jit
    def take(self, arrays, held, weights, rows: cutlass.Constexpr, columns: cutlass.Constexpr):
        """Gates, ups, what else there is, and weights, of some rows; zeros where there are none."""
        (first, r), (column, c) = rows, columns
        held.fill(0)
        weights.fill(0.0)
        if first < r:
            for i in range_constexpr(self.deep):
                weights[i] = vector(arrays["weights"].toint() + Int64(first + i) * 4, Float32)[0]
        for j in range_constexpr(self.steps):
            at = column + 256 * j
            if (first < r) & (at < c):
                for i in range_constexpr(self.deep):
                    for k in range_constexpr(2):
                        array, start = "x", (Int64(first + i) * 2 + k) * c + at
                        if const_expr(self.halves == 1):
                            array, start = ("x", "up")[k], Int64(first + i) * c + at
                        self.load(arrays[array].toint() + start * 2, held[None, j, i, k])
                    if const_expr(self.inputs > 2):
                        start = Int64(first + i) * c + at
                        self.load(arrays["dy"].toint() + start * 2, held[None, j, i, 2])

    @cute.jit
    def make(self, arrays, words_in, weight, position: cutlass.Constexpr, below):
        """Makes and stores what a lane has of a row; returns words of the largest, of each array.

        Args:
          arrays: the kernel's.
          words_in: words of gates, ups and what else there is.
          weight: of the row.
          position: the row, how many there are, the lane's first column, how many there are.
          below: words of the largest of each column, which may become larger.
        """
        row, rows, first, columns = position
        parts: cutlass.Constexpr = self.source.parts
        widest = cute.make_rmem_tensor(len(self.groups), Uint32)
        widest.fill(0)
        for j in range_constexpr(self.steps):
            results = cute.make_rmem_tensor((4, parts), Uint32)
            for w in range_constexpr(4):
                results_of_parts = self.made_of(
                    [words_in[w, j, k] for k in range(self.inputs)], weight
                )
                for p in range_constexpr(parts):
                    array: cutlass.Constexpr = p // self.side_by_side
                    results[w, p] = results_of_parts[p]
                    word = results_of_parts[p] & Uint32(MAGNITUDES[2])
                    below[w, j, p] = larger(below[w, j, p], word)
                    widest[array] = larger(widest[array], word)
            at = first + 256 * j
            if (row < rows) & (at < columns):
                for p in range_constexpr(parts):
                    floats = arrays[self.groups[p // self.side_by_side][2]]
                    start = (Int64(row) * self.side_by_side + p % self.side_by_side) * columns + at
                    self.store(floats.toint() + start * 2, results[None, p])
        return widest

    def made_of(self, words: list, weight) -> list:
        """The words of each part that are made of words of what is words_in."""
        gate, up, *dy = words
        if dy:
            return activations.gradients(self.source.activation, gate, up, weight, *dy)
        return [activations.gated(self.source.activation, gate, up, weight, "bfloat16")]

    @cute.jit
    def store(self, address: Int64, words):
        """Sixteen bytes."""
        if const_expr(self.vectors):
            cute.autovec_copy(words, vector(address, Uint32, 4))
        else:
            for w in range_constexpr(4):
                vector(address + 4 * w, Uint16)[0] = Uint16(words[w] & Uint32(0xFFFF))
                vector(address + 4 * w + 2, Uint16)[0] = Uint16(words[w] >> Uint32(16))


_MADE = (GatedSource(), GatedPairSource(), GradientSource(), PairGradientSource())
SOURCES = {str(source): source for source in _MADE}


def entries(product: ProductKernel, arch: str) -> list[ProductEntry]:
    """The entries of the binary, the fastest first."""
    rows_of_lane = AmaxesOfMade if product.source else Amaxes
    return [rows_of_lane(product, arch, vectors) for vectors in (True, False)]
