"""MX quantize on NVIDIA, in CuTeDSL. Matches reference.quantize bit for bit.

  x       (n,)       bf16, f16 or f32, n a multiple of 32: blocks lie one after the other
  values  (n,)       format.storage
  scales  (n / 32,)  e8m0

Rows do not exist here: blocks along the last axis of a row-major array are consecutive, so the
kernel sees a flat vector and every shape is the same shape. A thread holds `elements` consecutive
elements of one block and does so `unroll` times, all loads before the first use; threads that
share a block exchange their amax by shuffles.
"""

import dataclasses

import cutlass
from cutlass import Int32, Int64, Uint8, Uint32, const_expr, cute, range_constexpr

from jax_mx.formats import BLOCK, FLOAT_DTYPES
from jax_mx.kernels.cutedsl import convert
from jax_mx.variants import Variant


@dataclasses.dataclass(frozen=True)
class Tile:
    """What a thread block covers."""

    threads: int
    elements: int  # of one block, per thread and step
    unroll: int  # steps

    @property
    def size(self) -> int:
        """Elements per thread block."""
        return self.threads * self.elements * self.unroll


# H200, (8, 7168, 7168), 2026-11-20, benchmarks/sweep.py, 96 candidates: bf16 285.7 us (best 285.4),
# f16 285.7 (285.2), f32 467.9 (467.6). Nothing that keeps 32 to 256 bytes a thread in flight is
# further than 1 % behind; 32 elements a thread are: their 64-byte strides cost a fifth (340 us).
TILE = Tile(threads=512, elements=16, unroll=1)


class Quantize:
    """The kernel of one variant; only what is compiled in."""

    def __init__(self, variant: Variant, tile: Tile | None = None):
        self.dtype, self.format = variant.dtype, variant.format
        self.tile = tile or TILE
        self.itemsize = FLOAT_DTYPES[variant.dtype].itemsize

    # ---- what the build and the launch need to know ---
    @property
    def alignments(self) -> list[list[int]]:
        """Per entry the alignment of (x, values, scales); the entries differ in nothing else."""
        return [[16, 16, 1], [self.itemsize, 1, 1]]

    @property
    def launch(self) -> dict:
        """The launch rule, in the words of ffi/launch.cc; -1 counts dimensions from the end."""
        n = (0, 0, 99)  # the product of all dimensions of buffer 0
        one = (-1, 1, 0)
        return {
            "threads": [self.tile.threads, 1, 1],
            "grid": [[*n, self.tile.size], [*one, 1], [*one, 1]],
            "scalars": [[8, list(n)], [4, "round_add"], [4, "round_exception"]],
        }

    def arguments(self):
        """Stand-ins of the host function's arguments, to compile it."""
        pointers = [
            cute.runtime.make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align)
            for entry in self.alignments
            for dtype, align in zip((convert.INPUT[self.dtype], Uint8, Uint8), entry, strict=True)
        ]
        return (*pointers, Int64(BLOCK), Int32(0), Int32(0))

    # ---- host half: never run, it makes the compiler emit both entries ---
    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        values: cute.Pointer,
        scales: cute.Pointer,
        x_any: cute.Pointer,
        values_any: cute.Pointer,
        scales_any: cute.Pointer,
        n: Int64,
        round_add: Int32,
        round_exception: Int32,
    ):
        grid = [Int32(n // self.tile.size + 1), 1, 1]
        block = [self.tile.threads, 1, 1]
        scalars = (n, round_add, round_exception)
        self.kernel(x, values, scales, *scalars).launch(grid=grid, block=block)
        self.kernel(x_any, values_any, scales_any, *scalars).launch(grid=grid, block=block)

    # ---- device half ---
    @cute.kernel
    def kernel(
        self,
        x: cute.Pointer,
        values: cute.Pointer,
        scales: cute.Pointer,
        n: Int64,
        round_add: Int32,
        round_exception: Int32,
    ):
        elements: cutlass.Constexpr = self.tile.elements
        unroll: cutlass.Constexpr = self.tile.unroll
        words: cutlass.Constexpr = elements * self.itemsize // 4
        sharers: cutlass.Constexpr = BLOCK // elements  # threads that share a block
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        steps = n // elements
        by_step = cute.make_layout((steps, elements), stride=(elements, 1))
        mX = cute.make_tensor(x, by_step)
        mV = cute.make_tensor(values, by_step)
        mS = cute.make_tensor(scales, cute.make_layout(n // BLOCK))
        first = Int64(bid) * (self.tile.threads * unroll) + Int64(tid)

        rX = cute.make_rmem_tensor((elements, unroll), convert.INPUT[self.dtype])
        rX.fill(convert.INPUT[self.dtype](0))
        for u in range_constexpr(unroll):
            step = first + u * self.tile.threads
            if step < steps:
                cute.autovec_copy(mX[step, None], rX[None, u])

        for u in range_constexpr(unroll):
            step = first + u * self.tile.threads
            rW = cute.recast_tensor(rX[None, u], Uint32)
            word = rW[0]
            for w in range_constexpr(1, words):
                word = convert.larger_magnitude(word, rW[w], self.dtype)
            for k in range_constexpr(sharers.bit_length() - 1):
                other = cute.arch.shuffle_sync_bfly(word, offset=1 << k)
                word = convert.larger_magnitude(word, other, self.dtype)
            amax = convert.float32_bits_of_amax(word, self.dtype)
            scale, inverse = convert.scale_of(
                amax, self.format.emax, self.dtype, Uint32(round_add), Uint32(round_exception)
            )
            rV = cute.make_rmem_tensor(elements, Uint8)
            rV2 = cute.recast_tensor(rV, cutlass.Uint16)
            for i in range_constexpr(elements // 2):
                low = cutlass.Float32(rX[2 * i, u]) * inverse
                high = cutlass.Float32(rX[2 * i + 1, u]) * inverse
                rV2[i] = convert.pack_two(low, high, self.format)
            if step < steps:
                cute.autovec_copy(rV, mV[step, None])
                if const_expr(sharers == 1):
                    mS[step] = Uint8(scale)
                else:
                    if tid % sharers == 0:
                        mS[step // sharers] = Uint8(scale)
