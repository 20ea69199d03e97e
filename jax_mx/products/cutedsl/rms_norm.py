"""y = rms_norm(x + residual) * weights and the sum, a thread block a row: a step of a chain.

Sums of squares have the order that `jax_mx.rms_norm` says. The weights come before the launch ahead
has ended, which writes x and the residual.

Waiting: all threads of a thread block meet once; it waits for the launch ahead, whose thread blocks
have all begun by then.
"""

import cutlass
from cutlass import BFloat16, Float32, Int64, Uint32, const_expr, cute, range_constexpr

from jax_mx.launch.rule import Extent, Factor, GridTerm, Scalar, constant
from jax_mx.norms.cutedsl import add_to, add_vector, factor_of, normed, over_warp
from jax_mx.products.cutedsl.products import ProductEntry, vector
from jax_mx.quantizing.facts.product_kernels import ProductKernel
from jax_mx.quantizing.facts.signatures import Array
from jax_mx.quantizing.kernels.geometry import SUMS, tree

KEPT = 4  # times 2048 elements of a row, which stay in registers; more are read again


class Vectors:
    """A part of kernels whose threads have `each` neighbours of a row at a time."""

    each: int

    def fragment(self, *shape: int):
        """Registers for so many vectors of elements."""
        fragment = cute.make_rmem_tensor((self.each, *shape), BFloat16)
        fragment.fill(BFloat16(0))
        return fragment


class RmsNorm(Vectors, ProductEntry):
    """See above; of bfloat16."""

    dtypes = ("bfloat16",)
    threads = 256
    each = SUMS // threads  # neighbours that a thread has at a time
    elements_per_thread = each * KEPT
    early_start = True

    def __init__(self, product: ProductKernel, arch: str):
        super().__init__(product, arch)
        self.divide = (Factor(Extent(0, 1), self.each),)

    def align_of(self, array: Array, itemsize: int) -> int:
        """Vectors of a row."""
        del array, itemsize
        return 2 * self.each

    def element_of(self, array: Array):
        """All are bfloat16."""
        del array
        return BFloat16

    @property
    def scalars(self) -> list:
        """The length of rows, the bits of eps, y's dtype."""
        return [Scalar(4, Extent(0, 1)), Scalar(4, "eps"), Scalar(4, constant(0))]

    @property
    def grid(self) -> list:
        """A thread block a row."""
        return [GridTerm(0, Factor(Extent(0, 0, 1))).to_json()]

    @cute.jit
    def __call__(self, pointers, scalars):
        self.kernel(pointers, scalars).launch(grid=[1, 1, 1], block=[self.threads, 1, 1])

    @cute.kernel
    def kernel(self, pointers, scalars):
        arrays = self.signature.named(pointers)
        wide, eps, _ = scalars
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        warps: cutlass.Constexpr = self.threads // 32
        sums = cute.make_tensor(
            cute.arch.alloc_smem(Float32, warps, alignment=16), cute.make_layout(warps)
        )
        cute.arch.griddepcontrol_launch_dependents()
        where: cutlass.Constexpr = (arrays, row, wide, tid)
        weights, kept = self.fragment(KEPT), self.fragment(KEPT)
        for s in range_constexpr(KEPT):
            self.move(weights[None, s], "weights", s, where)
        cute.arch.griddepcontrol_wait()
        squares = cute.make_rmem_tensor(self.each, Float32)
        squares.fill(Float32(0.0))
        others = self.fragment(KEPT)
        for s in range_constexpr(KEPT):
            self.move(kept[None, s], "x", s, where)
            self.move(others[None, s], "residual", s, where)
        for s in range_constexpr(KEPT):
            self.add(kept[None, s], others[None, s], squares, s, where)
        sweeps = (wide + SUMS - 1) // SUMS
        for s in cutlass.range(KEPT, sweeps, 1, unroll=1):
            rX, rY = self.fragment(), self.fragment()
            self.move(rX, "x", s, where)
            self.move(rY, "residual", s, where)
            self.add(rX, rY, squares, s, where)
        total = over_warp(tree([squares[i] for i in range(self.each)]))
        if tid % 32 == 0:
            sums[tid // 32] = total
        cute.arch.sync_threads()
        factor = factor_of(tree([sums[w] for w in range(warps)]), wide, eps)
        for s in range_constexpr(KEPT):
            self.norm(kept[None, s], weights[None, s], factor, s, where)
        for s in cutlass.range(KEPT, sweeps, 1, unroll=1):
            rX, rW = self.fragment(), self.fragment()
            self.move(rX, "sum", s, where)  # this thread has stored it
            self.move(rW, "weights", s, where)
            self.norm(rX, rW, factor, s, where)

    @cute.jit
    def move(
        self, registers, name: cutlass.Constexpr, s, where: cutlass.Constexpr,
        stores: cutlass.Constexpr = False,
    ):  # fmt: skip
        """Loads a vector of this thread, or stores it; beyond the row none."""
        arrays, row, wide, tid = where
        column = s * SUMS + tid * self.each
        if column < wide:
            first = Int64(0) if name == "weights" else Int64(row) * wide
            there = vector(arrays[name].toint() + 2 * (first + column), Uint32, self.each // 2)
            pairs = cute.recast_tensor(registers, Uint32)
            if const_expr(stores):
                cute.autovec_copy(pairs, there)
            else:
                cute.autovec_copy(there, pairs)

    @cute.jit
    def add(self, rX, rY, squares, s, where: cutlass.Constexpr):
        """Adds the residual to a vector, stores the sum, and adds up the squares."""
        add_to(rX, rY)
        add_vector(squares, rX, "bfloat16")
        self.move(rX, "sum", s, where, True)

    @cute.jit
    def norm(self, rX, rW, factor, s, where: cutlass.Constexpr):
        """Norms a vector and stores it."""
        pairs = cute.recast_tensor(rX, Uint32)
        weights = [Float32(rW[i]) for i in range(self.each)]
        floats = [pairs[i] for i in range(self.each // 2)]
        for i, pair in enumerate(normed(floats, factor, weights, "bfloat16")):
            pairs[i] = pair
        self.move(rX, "y", s, where, True)


def entries(product: ProductKernel, arch: str) -> list[ProductEntry]:
    """The entry of the binary."""
    return [RmsNorm(product, arch)]
