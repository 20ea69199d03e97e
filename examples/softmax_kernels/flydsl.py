"""The softmax of rows on AMD: a wave takes a row."""

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.expr import Float32, Int32, Int64

from jax_mx.launch.entry import Entry
from jax_mx.launch.rule import Extent, Factor, GridTerm, Scalar


class Softmax(Entry):
    """x (..., n) -> y (..., n), both float32."""

    types = (Float32, Float32)  # of x and y
    align = (4, 4)  # bytes
    threads = 64
    scalars = (Scalar(4, Extent(0, -1)),)  # n: the last dimension of x, buffer 0
    grid = (GridTerm(0, Factor(Extent(0, 0, -1))),)  # a workgroup for each row

    @flyc.kernel
    def kernel(self, pointers, scalars):
        """Three walks over the row: its largest element, the sum, the quotients."""
        (x, y), (n,) = pointers, scalars
        lane, row = Int32(fx.thread_idx.x), Int64(Int32(fx.block_idx.x))
        x, y = x + row * Int64(n), y + row * Int64(n)
        top, total = Float32(-float("inf")), Float32(0.0)
        for i in range(lane, n, 64):
            top = fx.max(top, fx.generic_load(x + Int32(i)))
        for step in fx.range_constexpr(6):
            top = fx.max(top, fx.shuffle_xor(top, 1 << step, 64))
        with fx.fastmath(("afn", "arcp")):  # as the chip has them
            for i in range(lane, n, 64):
                total = total + fx.exp(fx.generic_load(x + Int32(i)) - top)
            for step in fx.range_constexpr(6):
                total = total + fx.shuffle_xor(total, 1 << step, 64)
            for i in range(lane, n, 64):
                fx.generic_store(y + Int32(i), fx.exp(fx.generic_load(x + Int32(i)) - top) / total)


def entries(dtypes, arch):
    """The entries of the binary for operands of these dtypes, the fastest first."""
    if dtypes != ("float32",):
        raise NotImplementedError(f"softmax takes float32, got {dtypes}")
    return [Softmax()]
