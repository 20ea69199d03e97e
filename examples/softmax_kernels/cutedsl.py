"""The softmax of rows on NVIDIA: a warp takes a row."""

from cutlass import Float32, Int64, cute

from jax_mx.launch.cutedsl import Kernel
from jax_mx.launch.rule import Extent, Factor, GridTerm, Scalar


class Softmax(Kernel):
    """x (..., n) -> y (..., n), both float32."""

    types = (Float32, Float32)  # of x and y
    align = (4, 4)  # bytes
    threads = 32
    scalars = (Scalar(4, Extent(0, -1)),)  # n: the last dimension of x, buffer 0
    grid = (GridTerm(0, Factor(Extent(0, 0, -1))),)  # a thread block for each row

    @cute.kernel
    def kernel(self, pointers, scalars):
        """Three walks over the row: its largest element, the sum, the quotients."""
        (x, y), (n,) = pointers, scalars
        lane, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        mX = cute.make_tensor(x + Int64(row) * n, cute.make_layout(n))
        mY = cute.make_tensor(y + Int64(row) * n, cute.make_layout(n))
        top, total = Float32(-float("inf")), Float32(0)
        for i in range(lane, n, 32):
            top = cute.arch.fmax(top, mX[i])
        top = cute.arch.warp_reduction_max(top)
        for i in range(lane, n, 32):
            total += cute.math.exp(mX[i] - top)
        total = cute.arch.warp_reduction_sum(total)
        for i in range(lane, n, 32):
            mY[i] = cute.math.exp(mX[i] - top) / total


def entries(dtypes, arch):
    """The entries of the binary for operands of these dtypes, the fastest first."""
    if dtypes != ("float32",):
        raise NotImplementedError(f"softmax takes float32, got {dtypes}")
    return [Softmax()]
