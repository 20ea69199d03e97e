"""y = rms_norm(x + residual) @ dequantize(W)^T for up to four rows, perhaps with an activation.

A transformer's layer begins so, where one token is decoded. `Normed` is `Direct`, whose x lies in
shared memory: while the first codes of W come from memory, each thread block adds, norms and rounds
all rows. So no other kernel runs for it. Sums of squares have the order that `jax_mx.rms_norm`
says.

With an activation the first half of W's rows gives gates, the second one ups. A tile has eight rows
of each, so that a thread has the sums of both when they meet.

Waiting: all threads of a thread block meet three times before their first tile.
"""

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr

from jax_mx.launch.rule import Scalar
from jax_mx.norms.cutedsl import add_to, add_vector, factor_of, normed, over_warp
from jax_mx.products.cutedsl.matmul_vector import Direct, Lines
from jax_mx.products.cutedsl.products import ProductEntry, vector
from jax_mx.products.cutedsl.rms_norm import Vectors
from jax_mx.quantizing.facts.product_kernels import NORMED_ELEMENTS, ProductKernel
from jax_mx.quantizing.facts.signatures import Array
from jax_mx.quantizing.kernels.cutedsl import activations, convert
from jax_mx.quantizing.kernels.geometry import SUMS, tree

EARLY = 2  # times 2048 elements of the first row, which are asked for at once
PAD = 16  # bytes between rows in shared memory: off each other's banks


class Normed(Vectors, Direct):
    """See above."""

    dtypes = ("bfloat16",)

    def __init__(self, product: ProductKernel, arch: str, tile: Lines | None = None):
        super().__init__(product, arch, tile)
        self.activation = product.activation
        self.at_once = 1 << max(4 - self.resident, 0)  # rows whose vectors registers have room for
        self.each = SUMS // self.threads  # neighbours of a row that a thread has at a time
        self.shared = 8 * self.sums + self.rows * PAD + 2 * NORMED_ELEMENTS

    def align_of(self, array: Array, itemsize: int) -> int:
        """Vectors of a row, too."""
        of_rows = {"residual": 16, "weights": 16, "sum": 16}
        return of_rows.get(array.name) or super().align_of(array, itemsize)

    def element_of(self, array: Array):
        """Weights are bfloat16."""
        return BFloat16 if array.name == "weights" else super().element_of(array)

    @property
    def scalars(self) -> list:
        """The bits of eps, before y's dtype."""
        *sizes, dtype = super().scalars
        return [*sizes, Scalar(4, "eps"), dtype]

    def pitch(self, wide: Int32):
        return 2 * wide + PAD

    def placed(self, address, count: int):
        """Words of shared memory."""
        there = cute.make_ptr(Uint32, address, cute.AddressSpace.smem, assumed_align=4 * count)
        return cute.make_tensor(there, cute.make_layout(count))

    @cute.jit
    def load_x(self, at: Int64, is_there, to):
        """The same from shared memory."""
        to.fill(0)
        if is_there:
            for j in range_constexpr(cute.size(to) // 4):
                cute.autovec_copy(self.placed(Int32(at) + 16 * j, 4), to[None, j])

    @cute.jit
    def take(self, to, array, first: Int64, column: Int32, wide: Int32):
        """A vector of a row that begins at element `first`; nothing beyond its end."""
        if column < wide:
            address = array.toint() + 2 * (first + column)
            cute.autovec_copy(vector(address, BFloat16, self.each), to)

    @cute.jit
    def ahead(self, arrays, scalars, tid: Int32):
        """The beginnings of the first row, of its residual and of the weights."""
        early = tuple(self.fragment(EARLY) for _ in range(3))
        for s in range_constexpr(EARLY):
            for part, name in zip(early, ("x", "residual", "weights"), strict=True):
                column = s * SUMS + tid * self.each
                self.take(part[None, s], arrays[name], Int64(0), column, scalars[1])
        return early

    @cute.jit
    def x_of(self, arrays, scalars, tid: Int32):
        """The normed rows, in shared memory."""
        early: cutlass.Constexpr = self.ahead(arrays, scalars, tid)
        t, wide = scalars[0], scalars[1]
        base = cute.arch.get_dyn_smem(Float32, alignment=16)
        warps: cutlass.Constexpr = self.threads // 32
        sums = cute.make_tensor(base, cute.make_layout((warps, self.rows)))
        factors = cute.make_tensor(base + warps * self.rows, cute.make_layout(self.rows))
        x, sweeps = base + 2 * self.sums, (wide + SUMS - 1) // SUMS
        staging: cutlass.Constexpr = (x.toint(), sums, t, wide, tid)
        self.add(arrays, 0, 1, early, staging)
        for first in range_constexpr(1, self.rows, self.at_once):
            if first < t:
                count: cutlass.Constexpr = min(self.at_once, self.rows - first)
                self.add(arrays, first, count, None, staging)
        cute.arch.sync_threads()
        if tid < self.rows:
            total = tree([sums[w, tid] for w in range(warps)])
            factors[tid] = factor_of(total, wide, scalars[len(scalars) - 2])
        cute.arch.sync_threads()
        for s in range_constexpr(EARLY):
            self.norm(early[2][None, s], factors, s, staging)
        for s in cutlass.range(EARLY, sweeps, 1, unroll=1):
            weights = self.fragment(1)
            self.take(
                weights[None, 0], arrays["weights"], Int64(0), s * SUMS + tid * self.each, wide
            )
            self.norm(weights[None, 0], factors, s, staging)
        cute.arch.sync_threads()
        return x

    @cute.jit
    def add(
        self, arrays, first: cutlass.Constexpr, count: cutlass.Constexpr, early: cutlass.Constexpr,
        staging: cutlass.Constexpr,
    ):  # fmt: skip
        """Adds the residual to some rows, keeps and stores the sums, and adds up their squares."""
        _, sums, t, wide, tid = staging
        squares = cute.make_rmem_tensor((self.each, count), Float32)
        squares.fill(Float32(0.0))
        begin: cutlass.Constexpr = 0 if early is None else EARLY
        sweeps = (wide + SUMS - 1) // SUMS
        for s in range_constexpr(begin):
            self.add_vectors(
                arrays, (first,), (early[0][None, s], early[1][None, s]), squares, s, staging
            )
        for s in cutlass.range(begin, sweeps, 1, unroll=1):
            rX, rY = self.fragment(count), self.fragment(count)
            for r in range_constexpr(count):
                row = Int64(cutlass.min(Int32(first + r), t - 1)) * wide
                column = s * SUMS + tid * self.each
                self.take(rX[None, r], arrays["x"], row, column, wide)
                self.take(rY[None, r], arrays["residual"], row, column, wide)
            for r in range_constexpr(count):
                vectors: cutlass.Constexpr = (rX[None, r], rY[None, r])
                self.add_vectors(arrays, (first + r,), vectors, squares[None, r], s, staging)
        for r in range_constexpr(count):
            total = over_warp(tree([squares[i, r] for i in range(self.each)]))
            if tid % 32 == 0:
                sums[tid // 32, first + r] = total

    @cute.jit
    def add_vectors(
        self, arrays, row: cutlass.Constexpr, vectors: cutlass.Constexpr, squares, s,
        staging: cutlass.Constexpr,
    ):  # fmt: skip
        """The same of a vector of one row."""
        to, _, t, wide, tid = staging
        (m,) = row
        rX, rY = vectors
        add_to(rX, rY)
        add_vector(squares, rX, "bfloat16")
        column = s * SUMS + tid * self.each
        if (column < wide) & (m < t):  # shared memory has room for no more rows
            pairs = cute.recast_tensor(rX, Uint32)
            cute.autovec_copy(
                pairs, self.placed(to + m * self.pitch(wide) + 2 * column, self.each // 2)
            )
            block, _, _ = cute.arch.block_idx()
            if block == 0:
                address = arrays["sum"].toint() + 2 * (Int64(m) * wide + column)
                cute.autovec_copy(pairs, vector(address, Uint32, self.each // 2))

    @cute.jit
    def norm(self, weights, factors, s, staging: cutlass.Constexpr):
        """Norms a vector of every row where it lies."""
        to, _, t, wide, tid = staging
        column = s * SUMS + tid * self.each
        if column < wide:
            of_columns = [Float32(weights[i]) for i in range(self.each)]
            for m in range_constexpr(self.rows):
                if m < t:
                    there = self.placed(to + m * self.pitch(wide) + 2 * column, self.each // 2)
                    rX = cute.make_rmem_tensor(self.each // 2, Uint32)
                    cute.autovec_copy(there, rX)
                    pairs = [rX[i] for i in range(self.each // 2)]
                    for i, word in enumerate(normed(pairs, factors[m], of_columns, "bfloat16")):
                        rX[i] = word
                    cute.autovec_copy(rX, there)

    def row_of(self, n0: Int32, n: Int32, half: cutlass.Constexpr, width: Int32):
        """The first half of a tile gives gates, the second one ups."""
        if not self.activation:
            return super().row_of(n0, n, half, width)
        return cutlass.min(n0 // 2 + n, width // 2 - 1) + half * (width // 2)

    @cute.jit
    def write(
        self, sums, epilogue: cutlass.Constexpr, y, at: cutlass.Constexpr, m: Int32, n: Int32,
        width: Int32, result: Int32,
    ):  # fmt: skip
        """In bfloat16."""
        row, n0, _ = at
        if const_expr(self.activation):
            n0, width = n0 // 2, width // 2
        if (n0 + n < width) & (n < self.columns // (2 if self.activation else 1)):
            total = self.total(sums, m, n)
            word = convert.round_two(total, total, "bfloat16")
            if const_expr(self.activation):
                up = self.total(sums, m, n + 8)
                ups = convert.round_two(up, up, "bfloat16")
                word = activations.gated(self.activation, word, ups, Float32(1.0), "bfloat16")
            there = y.toint() + 2 * (Int64(row + m) * width + n0 + n)
            vector(there, cutlass.Uint16)[0] = cutlass.Uint16(word & Uint32(0xFFFF))


def entries(product: ProductKernel, arch: str, tile: Lines | None = None) -> list[ProductEntry]:
    """The entry of a product's binary."""
    return [Normed(product, arch, tile)]
