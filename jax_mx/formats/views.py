"""Views: how an op's arrays look on the way to a kernel.

A kernel, the partitioner and vmap all see an array as leading dimensions and a tail. The tail of
floats (M, K) counts blocks along an axis where some direction's blocks run, and elements along
another axis. It ends with a dimension of length 32 for each axis that blocks run along. In memory
the tail's dimensions have another order, as the array has it. So a view costs nothing: XLA turns
its reshape and its transpose into a bitcast, and the order becomes the layout of the custom call's
operand or result. Devices can split all dimensions of a view except dimensions of length 32.

Tiles must stay whole (units.py): the first two dimensions of the tail are then split into units,
and devices do not split the inside of a unit.

The words fit quantize, from an operand to results. dequantize takes a view backwards: it reads the
arrays of a result and writes the operand.

A worked example: floats (64, 96), blocks along the last axis, scales in blocked_128x4.

>>> from jax_mx.formats import directions, layouts
>>> view = view_of(directions.LAST)
>>> view.view((64, 96), (None, None), -1)[0]  # 64 rows, 3 blocks of 32
(64, 3, 32)

>>> view.operand  # in memory: rows, then blocks, then the elements of a block
(0, 1, 2)

>>> (result,) = view.results
>>> result.block, result.rows, result.cols  # a block spans the last dimension
((-1,), (0,), (1,))

The matrix of scales has dimension 0 as its rows and dimension 1 as its columns.

>>> tiled = view.laid_out(layouts.BLOCKED_128X4, (layouts.ROW_MAJOR_VALUES,), ((128, 128),))
>>> tiled.units  # 128 rows x 4 blocks are a tile
(128, 4)

>>> tiled.view((64, 96), (None, None), -1)[0]  # neither divides: one unit, all there is
(1, 1, 64, 3, 32)

>>> tiled.view((256, 384), (None, None), -1)[0]  # 2 x 3 units
(2, 3, 128, 4, 32)

>>> tiled.operand  # in memory: row units, rows, block units, blocks, elements
(0, 2, 1, 3, 4)

>>> (result,) = tiled.results
>>> result.scales_shape((2, 3, 128, 4, 32))  # a tile of 512 bytes for each unit
(2, 3, 1, 1, 512)

>>> result.order_in(layouts.BLOCKED_128X4)  # tiles follow each other as (row tiles, column tiles)
(0, 2, 1, 3, 4)

Another: blocks along the axis before the last, transposed: values (96, 64), scales (96, 2).

>>> view = view_of(directions.SECOND_TRANSPOSED)
>>> view.view((64, 96), (None, None), -2)[0]  # 2 blocks of rows, 96 columns, 32 rows of a block
(2, 96, 32)

>>> view.operand  # the floats in memory: blocks of rows, their 32 rows, then columns
(0, 2, 1)

>>> (result,) = view.results
>>> result.order  # the values: columns, then the blocks and elements of each
(1, 0, 2)

>>> tiled = view.laid_out(layouts.BLOCKED_128X4, (layouts.ROW_MAJOR_VALUES,), ((128, 128),))
>>> tiled.view((256, 384), (None, None), -2)[0]  # 2 x 3 units of 4 blocks and 128 columns each
(2, 3, 4, 128, 32)

>>> (result,) = tiled.results
>>> result.order, result.scales_shape((2, 3, 4, 128, 32))  # a tile in each unit: 128 x 4
((1, 3, 0, 2, 4), (2, 3, 1, 1, 512))
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_mx.formats.directions import Blocks, Direction, Form
from jax_mx.formats.formats import BLOCK, Format
from jax_mx.formats.layouts import ROW_MAJOR, ROW_MAJOR_VALUES, Layout, ScaleLayout, ValueLayout
from jax_mx.formats.sharding import Spec, gathered, is_explicit, spec_of
from jax_mx.formats.units import MERGED, SPLIT, Order, moved, split
from jax_mx.formats.windows import Window, lengths_of

Shape = tuple[int, ...]


# ---- reshapes on any mesh: of an array, to a view and back ---
def reshape(x: jax.Array, shape: Shape, spec: Spec) -> jax.Array:
    """x.reshape, to the partition spec `spec` on a mesh with explicit axes."""
    mesh = jax.typeof(x).sharding.mesh
    if not is_explicit(mesh):
        return jax.lax.reshape(x, shape)
    spec = (*spec, *[None] * (len(shape) - len(spec)))
    return jax.lax.reshape(x, shape, out_sharding=NamedSharding(mesh, PartitionSpec(*spec)))


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
    x = x.transpose(_places(x.ndim, order))
    return reshape(x, shape, spec)


def minor_to_major(ndim: int, order: Order) -> tuple[int, ...]:
    """The order as XLA's layouts have it, for a view of `ndim` dimensions."""
    return _places(ndim, order)[::-1]


def _places(ndim: int, order: Order) -> tuple[int, ...]:
    """All dimensions of a view in memory order."""
    lead = ndim - len(order)
    return (*range(lead), *(lead + i for i in order))


# ---- bytes into a tiled layout and back: what formats/layouts.py describes ---
def pack(
    layout: Layout,
    matrix: jax.Array,  # (..., rows, cols) of one byte each
) -> jax.Array:  # (..., *layout.shape(rows, cols))
    """Row-major bytes, brought into a layout; the padding is 0x00."""
    if not layout.is_tiled:
        return matrix
    matrix = gathered(matrix, matrix.shape, layout.pad)
    *lead, rows, cols = matrix.shape
    tiles_r, tiles_c, size = layout.shape(rows, cols)
    grow = (tiles_r * layout.tile[0] - rows, tiles_c * layout.tile[1] - cols)
    bits = jax.lax.bitcast_convert_type(matrix, jnp.uint8)
    bits = jnp.pad(bits, [(0, 0)] * len(lead) + [(0, g) for g in grow])
    split = (tiles_r, *layout.row_digits, tiles_c, *layout.col_digits)
    spec = spec_of(matrix)
    bits = reshape(bits, (*lead, *split), _in_digits(layout, spec)).transpose(
        _of_memory(layout, len(lead))
    )
    bits = reshape(bits, (*lead, tiles_r, tiles_c, size), spec)
    return jax.lax.bitcast_convert_type(bits, matrix.dtype)


def unpack(
    layout: Layout,
    packed: jax.Array,  # (..., *layout.shape(rows, cols))
    rows: int,
    cols: int,
) -> jax.Array:  # (..., rows, cols)
    """The inverse of `pack`.

    Raises:
      ValueError: `packed` does not have the shape that `rows` x `cols` bytes take.
    """
    shape = layout.shape(rows, cols)
    lead = packed.shape[: max(packed.ndim - len(shape), 0)]
    if packed.shape != (*lead, *shape):
        raise ValueError(
            f"unpack: {rows} x {cols} bytes in {layout.name} have the shape (..., "
            f"{', '.join(map(str, shape))}), got {packed.shape}"
        )
    if not layout.is_tiled:
        return packed
    tiles_r, tiles_c, size = shape
    pads = [p // t for p, t in zip(layout.pad, layout.tile, strict=True)]
    whole = (*lead, rows // layout.tile[0], cols // layout.tile[1], size)
    packed = gathered(packed, whole, (*pads, size))
    split = (tiles_r, *layout.row_digits, tiles_c, *layout.col_digits)
    permutation = _of_memory(layout, len(lead))
    bits = jax.lax.bitcast_convert_type(packed, jnp.uint8)
    spec = spec_of(packed)[:-1]
    memory = ((*lead, *split)[p] for p in permutation[len(lead) :])
    bits = reshape(bits, (*lead, *memory), spec)
    inverse = sorted(range(len(permutation)), key=permutation.__getitem__)
    bits = bits.transpose(inverse)
    bits = reshape(bits, (*lead, tiles_r * layout.tile[0], tiles_c * layout.tile[1]), spec)
    bits = jax.lax.bitcast_convert_type(bits, packed.dtype)
    return bits[..., :rows, :cols]


def _in_digits(layout: Layout, spec: tuple) -> tuple:
    """The matrix's partition spec with rows and columns split into tiles and digits."""
    *lead, rows, cols = spec
    return (*lead, rows, *(None for _ in layout.row_digits), cols)


def _of_memory(layout: Layout, lead: int) -> tuple[int, ...]:
    """From (lead, row tiles, row digits, column tiles, column digits) to memory order."""
    digits_r = len(layout.row_digits)
    row_tiles, col_tiles = lead, lead + 1 + digits_r
    digits = [row_tiles + 1 + i for i in range(digits_r)]
    digits += [col_tiles + 1 + i for i in range(len(layout.col_digits))]
    return (*range(lead), row_tiles, col_tiles, *(digits[i] for i in layout.order))


# ---- shapes and partition specs of stored arrays ---
def divided(shape: Shape, axes: Collection[int], by: int) -> Shape:
    """The shape with the lengths of `axes`, which are negative, divided."""
    return tuple(n // by if i - len(shape) in axes else n for i, n in enumerate(shape))


def moved_last(dims: tuple, axis: int) -> tuple:
    """A shape or a partition spec with the entry of `axis`, which is negative, last."""
    axis += len(dims)
    return (*dims[:axis], *dims[axis + 1 :], dims[axis])


def _moved_to(dims: tuple, axis: int, to: int) -> tuple:
    """A shape or a partition spec with the entry of `axis` at `to`; both are negative."""
    rest = [*dims]
    rest.insert(len(dims) + to, rest.pop(axis))
    return tuple(rest)


def stored_shape(shape: Shape, axes: Sequence[int], layout: Layout, by: int = BLOCK) -> Shape:
    """The shape of the bytes that belong to an array of this logical shape.

    Args:
      shape: the logical shape.
      axes: the axes along which one byte stands for `by` elements.
      layout: where the bytes lie.
      by: 32 for scales, codes per byte for values.
    """
    if not layout.is_tiled:
        return divided(shape, axes, by)
    *lead, rows, cols = moved_last(shape, axes[-1])
    return (*lead, *layout.shape(rows, cols // by))


def stored_spec(spec: Spec, axes: Sequence[int], layout: Layout) -> Spec:
    """The partition spec of these bytes, for an array of the partition spec `spec`."""
    return (*moved_last(spec, axes[-1]), None) if layout.is_tiled else spec


# ---- views ---
@dataclasses.dataclass(frozen=True)
class Result:
    """How one quantized array lies: values like the operand's view, scales with 1 for a block's 32.

    Attributes:
      block: the dimensions of the tail that a block spans, negative; codes pack along the last.
      order: how values and scales lie in memory where they are row-major.
      rows: the dimensions of the tail that make up the rows of the scales' matrix.
      cols: the dimensions that make up its columns; the values' matrix has the rest of a block
        there, too.
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
        """The shape of values, for a view of this shape: see `_stored`."""
        return self._stored(divided(view, self.block[-1:], format.codes_per_byte), self.values_in)

    def scales_shape(self, view: Shape) -> Shape:
        """The shape of scales, for a view of this shape: see `_stored`."""
        return self._stored(divided(view, self.block, BLOCK), self.layout)

    def order_in(self, layout: Layout) -> Order:
        """How values or scales lie in memory if their layout is this one."""
        return moved(self._turned((0, 1, 2)), SPLIT) if layout.is_tiled else self.order

    def view_shape(self, values: Shape) -> Shape:
        """The inverse of `values_shape`, for row-major values."""
        return tuple(
            BLOCK if i - len(values) == self.block[-1] else n for i, n in enumerate(values)
        )

    @property
    def last(self) -> tuple[int, ...]:
        """The last dimensions, as many as a block spans."""
        return tuple(range(-len(self.block), 0))

    @property
    def number(self) -> int:
        """The dimension, negative, along which the next block of the same row or column lies."""
        return (self.cols[-1] if self.cols else 0) - len(self.order)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The dimensions, negative, that count blocks: one for each axis that a block spans."""
        down = (self.rows[0] - len(self.order),) if len(self.block) == 2 else ()
        return (*down, self.number)

    def blocks_in(self, window: Window) -> dict[int, int]:
        """How many blocks a window, but "row", spans along each of `numbers`."""
        counts = [length // BLOCK for length in lengths_of(window)][-len(self.block) :]
        return dict(zip(self.numbers, counts, strict=True))

    def by_parity(self, pair: tuple[int, int], view: Shape) -> jax.Array:
        """uint32, for a view of this shape: pair[0] for even blocks along an axis, pair[1] for odd.

        The result has the length of the view along the axis that counts blocks and 1 elsewhere.
        """
        n = view[self.number]
        odd = jnp.arange(n) % 2 == 1
        shape = [n if i == self.number + len(view) else 1 for i in range(len(view))]
        return jnp.where(odd, np.uint32(pair[1]), np.uint32(pair[0])).reshape(shape)

    def pack(self, bytes_: jax.Array, layout: Layout) -> jax.Array:
        """Values or scales of the view's rank, brought into this layout."""
        if not layout.is_tiled:
            return bytes_
        lead, spec = bytes_.ndim - len(self.order), spec_of(bytes_)
        shape = (*bytes_.shape[: lead + 2], *self._extents(bytes_.shape[lead:]))
        packed = pack(layout, from_view(bytes_, shape, spec[: lead + 2], self._matrix))
        return packed.transpose(self._turned((*range(lead + 2), lead + 2, lead + 3, lead + 4)))

    def unpack(self, scales: jax.Array, view: Shape) -> jax.Array:
        """The inverse of `pack`, for scales and a view of this shape."""
        if not self.layout.is_tiled:
            return scales
        lead, shape = len(view) - len(self.order), divided(view, self.block, BLOCK)
        packed = scales.transpose(self._turned((*range(lead + 2), lead + 2, lead + 3, lead + 4)))
        matrix = unpack(self.layout, packed, *self._extents(shape[lead:]))
        spec = (*spec_of(packed)[: lead + 2], *(None for _ in self.order))
        return to_view(matrix, shape, spec, self._matrix)

    def _stored(self, shape: Shape, layout: Layout) -> Shape:
        """The shape of bytes that would have `shape` if they were row-major.

        In tiles: (..., units along t0, along t1, tiles of a unit along u0, along u1, bytes of one).
        """
        if not layout.is_tiled:
            return shape
        lead = len(shape) - len(self.order)
        return (*shape[: lead + 2], *self._turned(layout.shape(*self._extents(shape[lead:]))))

    def _extents(self, tail: Shape) -> tuple[int, int]:
        """Rows and columns of one unit's matrix of bytes, for a tail of these lengths."""
        _, _, *cols = (i for i in self._matrix if i not in self.rows)
        return math.prod(tail[i] for i in self.rows), math.prod(tail[i] for i in cols)

    def _turned(self, tiles: tuple) -> tuple:
        """(..., of rows, of columns, bytes) as (..., of u0, of u1, bytes); its own inverse."""
        *lead, rows, cols, size = tiles
        return tiles if min(self.rows) < min(self.cols) else (*lead, cols, rows, size)

    @property
    def _matrix(self) -> Order:
        """The order of the tail that makes a matrix of each unit: rows, then columns."""
        named = (0, 1, *self.rows, *self.cols)
        return (*named, *(i for i in range(len(self.order)) if i not in named))


@dataclasses.dataclass(frozen=True)
class View:
    """How floats are viewed, and the quantized arrays beside them.

    Attributes:
      whole: how many of the view's last dimensions have the length 32.
      operand: how floats lie in memory.
      results: how each quantized array lies.
      units: the lengths that the tail's first two dimensions are split by, where something is to
        stay whole.
      merge: the number of each dimension of the tail for launch rules, which see dimensions with
        one number as one. Empty: they are as they are.
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
    ) -> View:
        """This view with units.

        Args:
          layout: where the scales of all results lie.
          values: where the values of each lie.
          covers: the result of `units.covered` for each: rows and elements that stay whole.
        """
        # The dimensions of the tail that count rows and blocks, and how many stay whole.
        sides = []
        for result, (rows, elements) in zip(self.results, covers, strict=True):
            sides += [(result.rows, rows), (result.cols, elements // BLOCK)]

        def unit(i: int) -> int:
            """The least length of dimension i; others of its side have the length 32."""
            counts = [-(-n // BLOCK ** (len(dims) - 1)) for dims, n in sides if i in dims]
            return math.lcm(*counts)

        results = tuple(
            Result(
                result.block,
                moved(result.order, SPLIT),
                tuple(SPLIT[i][-1] for i in result.rows),
                tuple(SPLIT[i][-1] for i in result.cols),
                layout,
                values_in,
            )
            for result, values_in in zip(self.results, values, strict=True)
        )
        merge = MERGED[: 4 + self.whole]
        return View(self.whole, moved(self.operand, SPLIT), results, (unit(0), unit(1)), merge)

    @property
    def unit_lengths(self) -> tuple[int, ...]:
        """The lengths of a unit along the last two axes of the floats, in elements."""
        blocks = {i - 2 for r in self.results for i in r.cols} if self.whole == 1 else {0, 1}
        return tuple(u * BLOCK if i in blocks else u for i, u in enumerate(self.units or (1, 1)))

    def with_row_major_values(self) -> View:
        """This view with row-major values, in the same units."""
        results = (dataclasses.replace(r, values_in=ROW_MAJOR_VALUES) for r in self.results)
        return dataclasses.replace(self, results=tuple(results))

    def spread(self, axis: int) -> View:
        """This view for blocks along `axis`, with a dimension for each axis behind it."""
        behind = -1 - axis
        if behind < 2:
            return self
        places = {0: (0,), 1: tuple(range(1, 1 + behind)), 2: (1 + behind,)}
        results = (Result(r.block, moved(r.order, places)) for r in self.results)
        merge = (0, *(1 for _ in range(behind)), 2)
        return View(self.whole, moved(self.operand, places), tuple(results), None, merge)

    @property
    def tail(self) -> int:
        """How many dimensions of the view are not leading ones."""
        return len(self.operand)

    def view(self, shape: Shape, spec: Spec, axis: int) -> tuple[Shape, Spec]:
        """The view's shape and partition spec, for floats of `shape` and `spec`.

        `axis`, negative, is the first axis that blocks run along.
        """
        at = len(shape) + axis
        lead, blocks, rest = shape[:at], shape[at] // BLOCK, shape[at + 1 :]
        if axis == -1:  # there is always a dimension of rows
            ones = (1,) * (1 - at)
            view, spec = (*ones, *lead, blocks, BLOCK), (*(None for _ in ones), *spec, None)
        elif self.whole == 2:
            view = (*lead, blocks, rest[0] // BLOCK, BLOCK, BLOCK)
            spec = (*spec, None, None)
        else:
            view, spec = (*lead, blocks, *rest, BLOCK), (*spec, None)
        if self.units is None:
            return view, spec
        at = len(view) - self.whole - 2
        (t0, u0), (t1, u1) = map(split, view[at : at + 2], self.units)
        view = (*view[:at], t0, t1, u0, u1, *view[at + 2 :])
        return view, (*spec[: at + 2], None, None, *spec[at + 2 :])

    def reordered(self, x: jax.Array, order: Order) -> jax.Array:
        """The view with its tail's dimensions in this order.

        The dimensions of one axis of the array are merged on the way, so that XLA transposes the
        array itself. XLA makes a worse program from the view: both_transposed with h16 at (8, 7168,
        7168) on an H200 took 4137 us instead of 1042.
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

    def along(self, result: Result) -> Shape:
        """The dimensions, negative, that make up the axis which a result's blocks run along."""
        units = () if self.units is None else (result.number - 2,)
        return (*units, result.number, *result.block)

    def batch(self, ndim: int) -> int:
        """How many dimensions of a view the partitioner may split: all but the 32s and units."""
        return ndim - self.whole - (2 if self.units else 0)


@functools.cache
def view_of(form: Form) -> View:
    """The view of a form, without units: it follows from which axes blocks run along."""
    rows_blocked, columns_blocked = form.spans
    # The tail: (rows or blocks of rows, columns or blocks of columns, 32 of rows, 32 of columns).
    m = (0, 2) if rows_blocked else (0,)
    k = (1, 2 + rows_blocked) if columns_blocked else (1,)
    whole = rows_blocked + columns_blocked
    results = tuple(_result(direction, m, k, 2 + whole) for direction in form.directions)
    return View(whole, (*m, *k), results)


def _result(direction: Direction, m: Order, k: Order, tail: int) -> Result:
    """How a direction's array lies; m and k are the tail's dimensions of either axis of floats."""
    first, second = (k, m) if direction.transposed else (m, k)
    if direction.blocks is Blocks.SQUARE:
        block, rows, cols = (first[-1], second[-1]), first, second[:1]
    elif direction.blocks is Blocks.LAST:
        block, rows, cols = (k[-1],), m, k[:1]
    else:
        block, rows, cols = (m[-1],), k, m[:1]
    return Result(tuple(i - tail for i in block), (*first, *second), rows, cols)


# ---- the way to a view and back ---
@dataclasses.dataclass(frozen=True)
class Viewed:
    """How the arrays of one call look in a view, and the way there and back.

    Tiles and windows are of the last two axes: with units, an axis before them that blocks run
    along is moved to the one before the last.

    Attributes:
      view: the view.
      axis: the first axis that blocks run along in the floats, negative.
      floats: shape and partition spec of the floats, with `axis` moved if it is.
      shape: of the view of the floats.
      spec: its partition spec; matters with explicit axes only.
    """

    view: View
    axis: int
    floats: tuple[Shape, Spec]
    shape: Shape
    spec: Spec

    @classmethod
    def of(cls, view: View, shape: Shape, spec: Spec, axis: int) -> Viewed:
        """The view of floats of this shape and partition spec."""
        if view.units is not None and axis < -2:
            shape, spec = (_moved_to(dims, axis, -2) for dims in (shape, spec))
            return cls(view, axis, (shape, spec), *view.view(shape, spec, -2))
        return cls(view, axis, (shape, spec), *view.view(shape, spec, axis))

    @property
    def is_moved(self) -> bool:
        """Whether `axis` is moved."""
        return self.view.units is not None and self.axis < -2

    def to_floats(self, x: jax.Array) -> jax.Array:
        """The view of the floats."""
        return self.to(x, self.shape, self.view.operand)

    def to_blocks(self, a: jax.Array, result: Result) -> jax.Array:
        """The view of what has one entry for each block of a result."""
        return self.to(a, divided(self.shape, result.block, BLOCK), self.view.operand)

    def to_values(self, values: jax.Array, result: Result, format: Format) -> jax.Array:
        """The view of a result's row-major values, whose axes are the floats'."""
        return self.to(values, result.values_shape(self.shape, format), result.order)

    def to_scales(self, scales: jax.Array, result: Result) -> jax.Array:
        """The view of a result's scales."""
        layout = result.layout
        return self.to(scales, result.scales_shape(self.shape), result.order_in(layout), layout)

    def to(self, a: jax.Array, shape: Shape, order: Order, layout: Layout = ROW_MAJOR) -> jax.Array:
        """The view of an array that has the axes of the floats.

        Args:
          a: the array.
          shape: of the view.
          order: of the tail's dimensions in memory.
          layout: where its bytes lie; tiles are moved already.
        """
        moves = self.is_moved and not layout.is_tiled
        return to_view(jnp.moveaxis(a, self.axis, -2) if moves else a, shape, self.spec, order)

    def from_floats(self, x: jax.Array) -> jax.Array:
        """The inverse of `to_floats`."""
        x = from_view(x, *self.floats, self.view.operand)
        return jnp.moveaxis(x, -2, self.axis) if self.is_moved else x

    def from_arrays(
        self,
        views: Sequence[jax.Array],
        result: Result,
        axes: Sequence[int],
        format: Format,
        transpose: bool,
    ) -> tuple[list[jax.Array], int]:
        """Values and scales from their views; and the last axis that their blocks run along.

        Args:
          views: of a result's values and scales.
          result: the description of this result.
          axes: the axes of the floats that its blocks run along.
          format: of the values.
          transpose: whether the result has the first of them last; it means nothing for (-1,).
        """
        (shape, spec), moves = self.floats, self.is_moved
        axes = (-2,) if moves else tuple(axes)
        if transpose and axes != (-1,):
            shape, spec = (moved_last(dims, axes[0]) for dims in (shape, spec))
            axes, moves = result.last, False
        arrays = []
        sides = (axes[-1:], format.codes_per_byte, result.values_in), (axes, BLOCK, result.layout)
        for array, (along, by, layout) in zip(views, sides, strict=True):
            stored = stored_shape(shape, along, layout, by), stored_spec(spec, axes, layout)
            array = from_view(array, *stored, result.order_in(layout))
            moved = moves and not layout.is_tiled
            arrays.append(jnp.moveaxis(array, -2, self.axis) if moved else array)
        return arrays, self.axis if moves else axes[-1]


def padded(x: jax.Array, pads: tuple[int, int]) -> jax.Array:
    """x with so many zeros behind each of its last two axes."""
    return jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), *((0, n) for n in pads)]) if any(pads) else x
