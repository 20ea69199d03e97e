"""y (G, M, N) = for each group x (M, K) @ W (N, K)^T over its part of K, on FP8 tensor cores.

A layer of experts takes this for its weights' gradient: K are the tokens, which belong to groups.
`Contracted` is the kernel of matmul_fp8 with another walk: every group has all tiles of its (M, N),
and a tile has the stages of its group, from none up. All roles find these from the same sizes, so
the order of events holds as it does there: none, and no role waits for the tile.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from jax_mx.formats.formats import BLOCK
from jax_mx.launch.rule import Extent
from jax_mx.products.cutedsl.matmul_fp8 import LINE, PER_LINE, Fp8Stages, Windows
from jax_mx.products.cutedsl.products import Plain, ProductEntry, element
from jax_mx.quantizing.facts.product_kernels import ProductKernel


def extents_of(entry: ProductEntry) -> list[Extent]:
    """See `ProductEntry.extents`; groups are those that have a size."""
    x, codes, scales, sizes = (
        entry.signature.number(name) for name in ("x_codes", "codes", "scales", "group_sizes")
    )
    return [Extent(x, 0, 1), Extent(x, 1), Extent(sizes, 0), Extent(codes, 0, 1), Extent(scales, 1)]


class Contracted(Windows):
    """See above. The walk's four numbers: group, its first tile, its first slot of K, its slots."""

    rank = 2

    @property
    def extents(self) -> list[Extent]:
        """See `extents_of`."""
        return extents_of(self)

    def walk(self, down: Int32, t: Int32, wide: Int32):
        """A group is one piece, which has all tiles; groups share out K."""
        rows = self.rows * self.below
        return (t + rows - 1) // rows * down, wide

    def pieces(self, size: Int32):
        """One, also of a group without slots: its results are zeros."""
        del size
        return 1

    def place(self, index: Int32, at, down: Int32, t: Int32, width: Int32):
        """Where a tile is: (first row of x, end, first column)."""
        across = (width + self.columns - 1) // self.columns
        line, column = self.in_strips(index - at[1], down // across, across)
        return self.in_cluster(line * self.rows * self.below, t, column * self.columns)

    def stretch(self, at, total: Int32):
        """Whole windows: a group that begins elsewhere has a neighbour's, but none beyond K."""
        del total
        window = LINE * self.span
        return at[2] // window * self.span, (at[3] + window - 1) // window * self.span

    def windows_of(self, kept: Int32, windows: Int32):
        """How many windows the group that the walk is at has."""
        del windows
        window = LINE * self.span
        return (self.recalled(kept)[3] + window - 1) // window

    def within(self, stage: Int32, begin: Int32, end: Int32):
        """Four stages are read together, of which a group may have the last ones."""
        return (stage >= begin) & (stage < end)

    def first_byte(self, begin: Int32, blocks: Int32):
        """A group that begins at K's end needs none, but one is read."""
        return Int64(cutlass.min(begin * PER_LINE, blocks - 1))

    def matrix(self, at):
        """W has one."""
        del at
        return 0

    def before(self, at, t: Int32, width: Int32):
        """The elements of the groups before."""
        return Int64(at[0]) * t * width

    def finish(self, *_):
        """Every element of y is a group's."""


class PlainContracted(Plain):
    """See `Plain`."""

    @property
    def extents(self) -> list[Extent]:
        """See `extents_of`."""
        return extents_of(self)

    @cute.kernel
    def kernel(self, pointers, scalars):
        arrays = self.signature.named(pointers)
        y, sizes, added = arrays["y"], arrays["group_sizes"], arrays["added"]
        t, wide, groups, width, blocks, result = scalars
        size = self.size_in_bytes(result)
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        slot = Int32(0)
        for e in cutlass.range(groups, unroll=1):
            count = self.size_of(sizes, e, slot, wide, groups)
            for m in cutlass.range(t, unroll=1):
                line = (Int64(e) * t + m) * width
                for n in cutlass.range(
                    bid * self.threads + tid, width, grid * self.threads, unroll=1
                ):
                    total = self.over(arrays, m, n, slot // BLOCK, count // BLOCK, blocks)
                    if added.toint() != Int64(0):
                        total = total + element(added, line + n, Float32)
                    self.store(y.toint() + (line + n) * size, total, result)
            slot += count

    @cute.jit
    def over(
        self, arrays: cutlass.Constexpr, m: Int32, n: Int32, begin: Int32, count: Int32,
        blocks: Int32,
    ):  # fmt: skip
        """The product of row m of x and row n of W over some blocks."""
        total = Float32(0)
        for b in cutlass.range(begin, begin + count, unroll=1):
            at = Int64(n) * blocks + b
            total += self.of_blocks(arrays, at, at, Int64(m) * blocks + b)
        return total


def entries(product: ProductKernel, arch: str, tile: Fp8Stages | None = None) -> list[ProductEntry]:
    """The entries of a product's binary, the fastest first."""
    return [
        *(Contracted(product, arch, vectors, tile) for vectors in (True, False)),
        PlainContracted(product, arch),
    ]
