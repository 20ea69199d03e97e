"""Forms: along which axes an op's blocks run, and how its arrays are viewed on the way to a kernel.

A kernel, the partitioner and vmap all see an array as leading dimensions and a tail: some block
numbers and one or two dimensions of length 32. In memory the tail's dimensions have another order,
that of the array itself, so the view costs nothing: it is a reshape and a transpose that XLA turns
into a bitcast, and the order becomes the layout of the custom call's operand or result.

Tiles want to stay whole, and so do two blocks that one transform spans. For them the tail's first
two dimensions, of lengths n0 and n1, are split into units, which are what tiles with their padding
and transforms cover (`covered`), as (t0, t1, u0, u1): t0 x t1 units of u0 by u1. So whole units are
dimensions like the leading ones, and who splits them splits floats, codes and tiles alike. A length
that is no multiple of its unit is one unit.

The words are quantize's, from an operand to results. dequantize takes a form backwards: it reads
what the form's result describes and writes what the operand's order describes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.facts.formats import BLOCK, Format
from jax_mx.facts.layouts import ROW_MAJOR, ROW_MAJOR_VALUES, Layout, ScaleLayout, ValueLayout
from jax_mx.arrays.sharding import Spec, reshape, spec_of

Shape = tuple[int, ...]
Order = tuple[int, ...]  # of the tail's dimensions in memory, slowest first

# Where the tail's dimensions are once the first two are split into units.
_SPLIT = {0: (0, 2), 1: (1, 3), 2: (4,), 3: (5,)}


def divided(shape: Shape, axes: Collection[int], by: int) -> Shape:
    """The shape with the lengths of `axes`, which are negative, divided."""
    return tuple(n // by if i - len(shape) in axes else n for i, n in enumerate(shape))


def moved_last(dims: tuple, axis: int) -> tuple:
    """A shape or a partition spec with the entry of `axis`, which is negative, last."""
    axis += len(dims)
    return (*dims[:axis], *dims[axis + 1 :], dims[axis])


def stored_shape(shape: Shape, axes: Sequence[int], layout: Layout, by: int = BLOCK) -> Shape:
    """Of the bytes, one for `by` elements along each of `axes`, of an array of this logical shape.

    Of scales, with blocks along `axes`; or of values, whose bytes hold `by` codes.
    """
    if not layout.is_tiled:
        return divided(shape, axes, by)
    *lead, rows, cols = moved_last(shape, axes[-1])
    return (*lead, *layout.shape(rows, cols // by))


def stored_spec(spec: Spec, axes: Sequence[int], layout: Layout) -> Spec:
    """Of these bytes, for an array of the partition spec `spec`."""
    return (*moved_last(spec, axes[-1]), None) if layout.is_tiled else spec


def covered(
    scales: ScaleLayout,
    values: ValueLayout = ROW_MAJOR_VALUES,
    codes_per_byte: int = 1,
    group: int = BLOCK,
) -> tuple[int, int]:
    """How many rows, and elements along the block axis, are whole tiles, and groups, of both."""
    rows = math.lcm(scales.pad[0], values.pad[0])
    return rows, math.lcm(scales.pad[1] * BLOCK, values.pad[1] * codes_per_byte, group)


@dataclasses.dataclass(frozen=True)
class Result:
    """One quantized array: values like the operand's view, scales with 1 for the block's 32.

    Attributes:
      block: the dimensions of the tail that a block spans, negative; codes pack along the last.
      order: how values and scales lie in memory where they are row-major.
      rows: the dimensions of the tail that make up the rows of the matrices in tiles.
      cols: those that make up the columns, with the rest of a block.
      layout: where scales lie.
      values_in: where values lie.
    """

    block: tuple[int, ...]
    order: Order
    rows: tuple[int, ...] = ()
    cols: tuple[int, ...] = ()
    layout: ScaleLayout = ROW_MAJOR
    values_in: ValueLayout = ROW_MAJOR_VALUES

    def values_shape(self, view: Shape, format: Format) -> Shape:
        """Of the values, for a view of this shape: like it, or (..., t0, t1, tiles of a unit)."""
        return self._stored(divided(view, self.block[-1:], format.codes_per_byte), self.values_in)

    def scales_shape(self, view: Shape) -> Shape:
        """Of the scales, for a view of this shape: like it, or (..., t0, t1, tiles of a unit)."""
        return self._stored(divided(view, self.block, BLOCK), self.layout)

    def order_in(self, layout: Layout) -> Order:
        """How values or scales lie in memory that lie so."""
        return _moved(self._turned((0, 1, 2)), _SPLIT) if layout.is_tiled else self.order

    def view_shape(self, values: Shape) -> Shape:
        """The inverse of `values_shape`."""
        return tuple(
            BLOCK if i - len(values) == self.block[-1] else n for i, n in enumerate(values)
        )

    @property
    def last(self) -> tuple[int, ...]:
        """The last dimensions, as many as `block` has."""
        return tuple(range(-len(self.block), 0))

    @property
    def number(self) -> int:
        """The dimension, negative, along which the next block of the same row or column lies."""
        return (self.cols[-1] if self.cols else 0) - len(self.order)

    def by_parity(self, words: tuple[int, int], view: Shape) -> jax.Array:
        """Words of even and odd blocks along an axis, for a view of this shape."""
        n = view[self.number]
        odd = jnp.arange(n) % 2 == 1
        shape = [n if i == self.number + len(view) else 1 for i in range(len(view))]
        return jnp.where(odd, np.uint32(words[1]), np.uint32(words[0])).reshape(shape)

    def pack(self, bytes_: jax.Array, layout: Layout) -> jax.Array:
        """Values or scales of the view's rank into this layout."""
        if not layout.is_tiled:
            return bytes_
        lead, spec = bytes_.ndim - len(self.order), spec_of(bytes_)
        shape = (*bytes_.shape[: lead + 2], *self._extents(bytes_.shape[lead:]))
        tiles = layout.pack(from_view(bytes_, shape, spec[: lead + 2], self._matrix))
        return tiles.transpose(self._turned((*range(lead + 2), lead + 2, lead + 3, lead + 4)))

    def unpack(self, scales: jax.Array, view: Shape) -> jax.Array:
        """The inverse of `pack`, of scales, for a view of this shape."""
        if not self.layout.is_tiled:
            return scales
        lead, shape = len(view) - len(self.order), divided(view, self.block, BLOCK)
        tiles = scales.transpose(self._turned((*range(lead + 2), lead + 2, lead + 3, lead + 4)))
        matrix = self.layout.unpack(tiles, *self._extents(shape[lead:]))
        spec = (*spec_of(tiles)[: lead + 2], *(None for _ in self.order))
        return to_view(matrix, shape, spec, self._matrix)

    def _stored(self, shape: Shape, layout: Layout) -> Shape:
        """Of bytes that are of this shape where they are row-major."""
        if not layout.is_tiled:
            return shape
        lead = len(shape) - len(self.order)
        return (*shape[: lead + 2], *self._turned(layout.shape(*self._extents(shape[lead:]))))

    def _extents(self, tail: Shape) -> tuple[int, int]:
        """Rows and columns of a unit's matrix of bytes, for a tail of these lengths."""
        _, _, *cols = (i for i in self._matrix if i not in self.rows)
        return math.prod(tail[i] for i in self.rows), math.prod(tail[i] for i in cols)

    def _turned(self, tiles: tuple) -> tuple:
        """(..., of rows, of columns, bytes) as (..., of u0, of u1, bytes), or the other way."""
        *lead, rows, cols, size = tiles
        return tiles if min(self.rows) < min(self.cols) else (*lead, cols, rows, size)

    @property
    def _matrix(self) -> Order:
        """The tail of row-major bytes as units of that matrix; a block's are a row's neighbours."""
        named = (0, 1, *self.rows, *self.cols)
        return (*named, *(i for i in range(len(self.order)) if i not in named))


@dataclasses.dataclass(frozen=True)
class Form:
    """A view of the operand, and the results that come of it.

    Attributes:
      whole: how many of the view's last dimensions have the length 32.
      operand: how the operand lies in memory.
      results: what is made of it.
      units: of the tail's first two dimensions, where something is to stay whole.
      merge: the dimensions of the tail as launch rules number them, which know `FORMS` alone: those
        with one number are one. Empty: as they are.
    """

    whole: int
    operand: Order
    results: tuple[Result, ...]
    units: tuple[int, int] | None = None
    merge: Shape = ()

    def laid_out(
        self,
        layout: ScaleLayout,
        values: Sequence[ValueLayout],
        covers: Sequence[tuple[int, int]],
    ) -> Form:
        """This form with scales and values that lie so; `covers` of each result what `covered`."""
        sides = []
        for r, (rows, elements) in zip(self.results, covers, strict=True):
            sides += [(r.rows, rows), (r.cols, elements // BLOCK)]

        def unit(i: int) -> int:  # of the tail's dimension i; a side's others have the length 32
            return math.lcm(*(-(-n // BLOCK ** (len(dims) - 1)) for dims, n in sides if i in dims))

        results = []
        for r, values_in in zip(self.results, values, strict=True):
            rows, cols = (tuple(_SPLIT[i][-1] for i in dims) for dims in (r.rows, r.cols))
            order = _moved(r.order, _SPLIT)
            results.append(Result(r.block, order, rows, cols, layout, values_in))
        merge = (0, 1, 0, 1, *range(2, 2 + self.whole))
        operand = _moved(self.operand, _SPLIT)
        return Form(self.whole, operand, tuple(results), (unit(0), unit(1)), merge)

    @property
    def unit_lengths(self) -> tuple[int, ...]:
        """Of a unit, of the last two axes of the unquantized array."""
        blocks = {i - 2 for r in self.results for i in r.cols} if self.whole == 1 else {0, 1}
        return tuple(u * BLOCK if i in blocks else u for i, u in enumerate(self.units or (1, 1)))

    def in_rows(self) -> Form:
        """This form with row-major values, in the same units."""
        results = (dataclasses.replace(r, values_in=ROW_MAJOR_VALUES) for r in self.results)
        return dataclasses.replace(self, results=tuple(results))

    def spread(self, axis: int) -> Form:
        """This form for blocks along `axis`, with a dimension for each axis behind it."""
        behind = -1 - axis
        if behind < 2:
            return self
        places = {0: (0,), 1: tuple(range(1, 1 + behind)), 2: (1 + behind,)}
        results = (Result(r.block, _moved(r.order, places)) for r in self.results)
        merge = (0, *(1 for _ in range(behind)), 2)
        return Form(self.whole, _moved(self.operand, places), tuple(results), None, merge)

    @property
    def tail(self) -> int:
        """How many dimensions of the view are not leading ones."""
        return len(self.operand)

    def view(self, shape: Shape, spec: Spec, axis: int) -> tuple[Shape, Spec]:
        """The view's shape and partition spec, of an unquantized array of `shape` and `spec`.

        `axis`, negative, is the first axis that blocks run along.
        """
        split = len(shape) + axis
        lead, blocks, rest = shape[:split], shape[split] // BLOCK, shape[split + 1 :]
        if axis == -1:  # there is always a dimension of rows
            ones = (1,) * (1 - split)
            view, spec = (*ones, *lead, blocks, BLOCK), (*(None for _ in ones), *spec, None)
        elif self.whole == 2:
            view = (*lead, blocks, rest[0] // BLOCK, BLOCK, BLOCK)
            spec = (*spec, None, None)
        else:
            view, spec = (*lead, blocks, *rest, BLOCK), (*spec, None)
        if self.units is None:
            return view, spec
        at = len(view) - self.whole - 2
        pairs = zip(view[at:], self.units, strict=False)
        (t0, u0), (t1, u1) = ((n // u, u) if n % u == 0 else (1, n) for n, u in pairs)
        view = (*view[:at], t0, t1, u0, u1, *view[at + 2 :])
        return view, (*spec[: at + 2], None, None, *spec[at + 2 :])

    def reordered(self, x: jax.Array, order: Order) -> jax.Array:
        """A view, its tail's dimensions in this order instead.

        Those that make up an axis of the array are one on the way, so that XLA transposes the array
        itself. Of the view it makes a worse program: both_transposed with h16 at (8, 7168, 7168) on
        an H200 took 4137 us instead of 1042.
        """
        lead, batch, shape, spec = x.ndim - self.tail, self.batch(x.ndim), x.shape, spec_of(x)
        before = [*range(lead), *(lead + i for i in self.operand)]
        runs: list[list[int]] = []  # of dimensions that stay neighbours, all but the first whole
        for i in (*range(lead), *(lead + i for i in order)):
            if runs and i >= batch and before.index(i) == before.index(runs[-1][-1]) + 1:
                runs[-1].append(i)
            else:
                runs.append([i])
        there = sorted(range(len(runs)), key=lambda r: before.index(runs[r][0]))
        x = x.transpose(before)
        merged = [runs[r] for r in there]
        x = reshape(
            x,
            tuple(math.prod(shape[i] for i in run) for run in merged),
            tuple(spec[run[0]] for run in merged),
        )
        x = x.transpose(sorted(range(len(runs)), key=there.__getitem__))
        every = [i for run in runs for i in run]
        return reshape(x, tuple(shape[i] for i in every), tuple(spec[i] for i in every))

    def batch(self, ndim: int) -> int:
        """How many dimensions of a view the partitioner may split: all but the 32s and units."""
        return ndim - self.whole - (2 if self.units else 0)


def _moved(order: Order, places: Mapping[int, Shape]) -> Order:
    """The same order, of a tail whose dimensions are at other places, or several for one."""
    return tuple(place for i in order for place in places[i])


FORMS: Mapping[str, Form] = {
    # The view (rows, cols, 32) of an array (rows, K).
    "last": Form(1, (0, 1, 2), (Result((-1,), (0, 1, 2), rows=(0,), cols=(1,)),)),
    # (blocks_m, k, 32) of an array (M, K); of (M, K, L) it is (blocks_m, k, l, 32).
    "second": Form(1, (0, 2, 1), (Result((-1,), (0, 2, 1), rows=(1,), cols=(0,)),)),
    "second_transposed": Form(1, (0, 2, 1), (Result((-1,), (1, 0, 2), rows=(1,), cols=(0,)),)),
    # (blocks_m, blocks_k, 32 of M, 32 of K) of an array (M, K): along both, from one read.
    **{
        name: Form(
            2,
            (0, 2, 1, 3),
            (
                Result((-1,), (0, 2, 1, 3), rows=(0, 2), cols=(1,)),
                Result((-2,), order, rows=(1, 3), cols=(0,)),
            ),
        )
        for name, order in (("both", (0, 2, 1, 3)), ("both_transposed", (1, 3, 0, 2)))
    },
    # The same view: blocks of 32 x 32.
    "square": Form(2, (0, 2, 1, 3), (Result((-2, -1), (0, 2, 1, 3), rows=(0, 2), cols=(1,)),)),
    "square_transposed": Form(
        2, (0, 2, 1, 3), (Result((-1, -2), (1, 3, 0, 2), rows=(1, 3), cols=(0,)),)
    ),
    # The view of "last", but the quantized array lies as (K, rows): dequantize alone.
    "last_transposed": Form(1, (0, 1, 2), (Result((-1,), (1, 2, 0), rows=(0,), cols=(1,)),)),
}


def to_view(x: jax.Array, shape: Shape, spec: Spec, order: Order) -> jax.Array:
    """x as leading dimensions and a tail.

    Args:
      x: any array.
      shape: of the view.
      spec: its partition spec; matters with explicit axes only.
      order: of the tail's dimensions in memory.
    """
    places = _places(len(shape), order)
    x = reshape(x, tuple(shape[i] for i in places), tuple(spec[i] for i in places))
    return x.transpose(sorted(range(len(places)), key=places.__getitem__))


def from_view(x: jax.Array, shape: Shape, spec: Spec, order: Order) -> jax.Array:
    """The inverse of `to_view`: the array of `shape` and `spec` whose view x is."""
    return reshape(x.transpose(_places(x.ndim, order)), shape, spec)


def minor_to_major(ndim: int, order: Order) -> tuple[int, ...]:
    """The order as XLA's layouts have it, for a view of `ndim` dimensions."""
    return _places(ndim, order)[::-1]


def _places(ndim: int, order: Order) -> tuple[int, ...]:
    """All dimensions of a view in memory order."""
    lead = ndim - len(order)
    return (*range(lead), *(lead + i for i in order))
