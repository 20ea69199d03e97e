"""Forms: along which axes an op's blocks run, and how its arrays are viewed on the way to a kernel.

A kernel, the partitioner and vmap all see an array as leading dimensions and a tail: some block
numbers and one or two dimensions of length 32. In memory the tail's dimensions have another order,
that of the array itself, so the view costs nothing: it is a reshape and a transpose that XLA turns
into a bitcast, and the order becomes the layout of the custom call's operand or result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax

from jax_mx.formats import BLOCK, Format
from jax_mx.layouts import ScaleLayout
from jax_mx.sharding import Spec, reshape, spec_of

Order = tuple[int, ...]  # of the tail's dimensions in memory, slowest first


@dataclasses.dataclass(frozen=True)
class Result:
    """One quantized array: values like the operand's view, scales with 1 for the block's 32.

    Attributes:
      block: the dimension of the tail that its blocks run along, negative.
      values: how values lie in memory.
      scales: how row-major scales lie in memory.
      rows: the dimensions of the tail that make up the rows of the scales' matrix.
      cols: those that make up its columns.
    """

    block: int
    values: Order
    scales: Order
    rows: tuple[int, ...]
    cols: tuple[int, ...]

    def values_shape(self, view: tuple[int, ...], format: Format) -> tuple[int, ...]:
        """Of the values, for a view of this shape."""
        axis = self.block + len(view)
        return (*view[:axis], BLOCK // format.codes_per_byte, *view[axis + 1 :])

    def scales_shape(
        self, view: tuple[int, ...], tail: int, layout: ScaleLayout
    ) -> tuple[int, ...]:
        """Of the scales, for a view of this shape: of the view's rank, or tiles."""
        if not layout.is_tiled:
            axis = self.block + len(view)
            return (*view[:axis], 1, *view[axis + 1 :])
        return (*view[:-tail], *layout.shape(*self._extents(view[-tail:])))

    def _extents(self, dims: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns of the scales' matrix, for a tail of these dimensions."""
        return math.prod(dims[i] for i in self.rows), math.prod(dims[i] for i in self.cols)

    def matrix(self, scales: jax.Array, tail: int) -> jax.Array:
        """Scales of the view's rank as the matrices (..., rows, cols) that layouts take."""
        lead = scales.ndim - tail
        order = (*range(lead), *(lead + i for i in (*self.rows, *self.cols)))
        rest = [i for i in range(scales.ndim) if i not in order]  # the 1s
        shape = (*scales.shape[:lead], *self._extents(scales.shape[lead:]))
        return reshape(scales.transpose(*order, *rest), shape, spec_of(scales)[:lead])


@dataclasses.dataclass(frozen=True)
class Form:
    """A view of the operand, and the results that come of it.

    Attributes:
      tail: how many dimensions are not leading ones.
      whole: how many of the tail's last dimensions have the length 32.
      operand: how the operand lies in memory.
      results: what is made of it.
    """

    tail: int
    whole: int
    operand: Order
    results: tuple[Result, ...]

    def batch(self, ndim: int, layout: ScaleLayout) -> int:
        """How many dimensions of a view the partitioner may split.

        All but the 32s; with tiles, which mix rows and columns, only the leading ones.
        """
        return ndim - (self.tail if layout.is_tiled else self.whole)


# (rows, cols, 32): along the last axis.
_LAST = Form(3, 1, (0, 1, 2), (Result(-1, (0, 1, 2), (0, 1, 2), rows=(0,), cols=(1,)),))
# (blocks_m, k, 32) of an array (M, K): along the second-to-last axis.
_SECOND, _SECOND_T = (
    Form(3, 1, (0, 2, 1), (Result(-1, values, scales, rows=(1,), cols=(0,)),))
    for values, scales in (((0, 2, 1), (0, 2, 1)), ((1, 0, 2), (1, 0, 2)))
)
# (blocks_m, blocks_k, 32 of M, 32 of K) of an array (M, K): along both, from one read.
_BOTH, _BOTH_T = (
    Form(
        4,
        2,
        (0, 2, 1, 3),
        (
            Result(-1, (0, 2, 1, 3), (0, 2, 1, 3), rows=(0, 2), cols=(1,)),
            Result(-2, values, scales, rows=(1, 3), cols=(0,)),
        ),
    )
    for values, scales in (((0, 2, 1, 3), (0, 2, 1, 3)), ((1, 3, 0, 2), (1, 3, 0, 2)))
)

FORMS: Mapping[str, Form] = {
    "last": _LAST,
    "second": _SECOND,
    "second_transposed": _SECOND_T,
    "both": _BOTH,
    "both_transposed": _BOTH_T,
}


def to_view(x: jax.Array, shape: tuple[int, ...], order: Order, spec: Spec) -> jax.Array:
    """x as leading dimensions and a tail.

    Args:
      x: any array.
      shape: x's elements in memory order, leading dimensions and the tail's in `order`.
      order: of the tail's dimensions in memory.
      spec: the partition spec that goes with `shape`; matters with explicit axes only.
    """
    x = reshape(x, shape, spec)
    lead = x.ndim - len(order)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return x.transpose(*range(lead), *(lead + i for i in inverse))


def from_view(x: jax.Array, shape: tuple[int, ...], order: Order, spec: Spec) -> jax.Array:
    """The inverse of `to_view`: the array of `shape` whose view x is."""
    lead = x.ndim - len(order)
    return reshape(x.transpose(*range(lead), *(lead + i for i in order)), shape, spec)


def minor_to_major(ndim: int, order: Order) -> tuple[int, ...]:
    """The order as XLA's layouts have it, for a view of `ndim` dimensions."""
    lead = ndim - len(order)
    return tuple(reversed([*range(lead), *(lead + i for i in order)]))
