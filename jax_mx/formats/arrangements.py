"""How an operand of `dot_general` is brought to quantize, and its result back.

A product sees lhs as (B..., M..., K), rhs as (B..., N, K) and the gradient of the result as
(B..., M..., N). B are batch dimensions. K are all contracted ones as one; so are N, and M unless
blocks fit its last dimension as it is. An operand is not transposed for this where its contracted
dimensions come last, or right behind the batch dimensions: `quantize_both` reads either order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_mx.formats.checks import shown, whole
from jax_mx.formats.formats import BLOCK
from jax_mx.formats.sharding import (
    Spec,
    is_explicit,
    names_in,
    resharded,
    shards_of,
    spec_of,
    unsplit,
)
from jax_mx.formats.views import reshape

Dims = tuple[int, ...]


class Units(NamedTuple):
    """A divisor of the contracted length that each product needs.

    It is 32, or the size of the product's Hadamard transform where that is larger.
    """

    forward: int = BLOCK
    dgrad: int = BLOCK
    wgrad: int = BLOCK


class Arrangement(NamedTuple):
    """How an operand becomes (B..., F..., K), or (B..., K, F) where `swapped`.

    Attributes:
      order: the operand's dimensions in the order of the above.
      batch: how many of them are batch dimensions.
      free: their lengths, all that are neither.
      contracted: their lengths.
      swapped: whether the contracted ones come before the free ones.
      merged: whether the free ones become one.
      unit: the divisor of the last free dimension, which zero rows fill up; 1: there are none.
    """

    order: Dims
    batch: int
    free: Dims
    contracted: Dims
    swapped: bool
    merged: bool
    unit: int = BLOCK

    @property
    def axis(self) -> int:
        """The contracted axis of the arranged operand."""
        return -2 if self.swapped else -1

    @property
    def free_dims(self) -> Dims:
        """The operand's dimensions that are neither batch nor contracted."""
        return tuple(i for i in self.order[self.batch :] if i not in self.contracted_dims)

    @property
    def contracted_dims(self) -> Dims:
        """The operand's contracted dimensions, in the order in which they merge into one."""
        rest, k = self.order[self.batch :], len(self.contracted)
        return rest[:k] if self.swapped else rest[len(rest) - k :]

    @property
    def free_out(self) -> Dims:
        """The lengths of the free dimensions as the product has them, before padding."""
        return (math.prod(self.free),) if self.merged else self.free

    @property
    def rows(self) -> int:
        """How many zero rows it is padded with."""
        if self.unit == 1:
            return 0
        last = self.free_out[-1] if self.free_out else 1
        return -(-last // self.unit) * self.unit - last  # JAX sees that the unit divides the sum

    def arranged(self, x: jax.Array) -> jax.Array:
        """The operand, or the scales beside it, transposed and merged."""
        x = x if self.order == tuple(range(x.ndim)) else x.transpose(self.order)
        b, f, k = self.batch, len(self.free), len(self.contracted)
        runs = [f] if self.merged else [1] * f
        return _merged(x, [*[1] * b, *([k, *runs] if self.swapped else [*runs, k])])

    @property
    def is_moved(self) -> bool:
        """Whether the arranged operand is another array."""
        in_order = self.order == tuple(range(len(self.order)))
        return not in_order or len(self.contracted) != 1 or len(self.free) > 1

    @property
    def pads(self) -> tuple[int, int]:
        """How many zeros the last two axes of the arranged operand end with."""
        return (0, self.rows) if self.swapped else (self.rows, 0)

    def restored(self, x: jax.Array, spec: Spec, swaps: bool = False) -> jax.Array:
        """The inverse, for an array that is arranged.

        Args:
          x: the array.
          spec: the operand's partition spec, which the result gets too.
          swaps: whether x is (B..., F..., K) also where `swapped`.
        """
        x = jnp.swapaxes(x, -1, -2) if swaps and self.swapped else x
        x = _cut(x, -3 - self.axis, self.rows)
        free, contracted = (self.free, self.merged), (self.contracted, True)
        parts = (contracted, free) if self.swapped else (free, contracted)
        x = _unmerged(x, self.batch, parts)
        if self.order != tuple(range(x.ndim)):
            x = x.transpose(sorted(range(x.ndim), key=self.order.__getitem__))
        if is_explicit(jax.typeof(x).sharding.mesh) and spec_of(x) != spec:
            x = resharded(x, spec, jax.typeof(x).sharding.mesh)
        return x


def arrangement_of(
    shape: Dims, contracting: Dims, batch: Dims, unit: int, keep_rows: bool = False
) -> Arrangement:
    """The arrangement of an operand.

    Args:
      shape: of the operand.
      contracting: its contracted dimensions, in the order in which they become one.
      batch: its batch dimensions.
      unit: see `Arrangement`.
      keep_rows: whether free dimensions stay apart where the unit divides the last of them.
    """
    rest = tuple(i for i in range(len(shape)) if i not in batch)
    free = tuple(i for i in rest if i not in contracting)
    swapped = len(free) > 0 and rest == (*contracting, *free)
    lengths = tuple(shape[i] for i in free)
    apart = keep_rows and not swapped and len(free) > 1 and lengths[-1] % unit == 0
    middle = (*contracting, *free) if swapped else (*free, *contracting)
    return Arrangement(
        (*batch, *middle),
        len(batch),
        lengths,
        tuple(shape[i] for i in contracting),
        swapped,
        not apart,
        unit,
    )


def _merged(x: jax.Array, runs: list[int]) -> jax.Array:
    """x with each run of so many dimensions as one; of a run of none, a dimension of length 1."""
    if runs == [1] * x.ndim:
        return x
    shape, spec, at = [], [], 0
    entries = list(spec_of(x))
    for n in runs:
        shape.append(math.prod(x.shape[at : at + n]))
        spec.append(entries[at] if n else None)
        entries[at + 1 : at + n] = [None] * max(n - 1, 0)  # only the first may stay split
        at += n
    if is_explicit(jax.typeof(x).sharding.mesh) and tuple(entries) != spec_of(x):
        x = resharded(x, entries, jax.typeof(x).sharding.mesh)
    return reshape(x, tuple(shape), tuple(spec))


def _unmerged(x: jax.Array, at: int, parts: Sequence[tuple[Dims, bool]]) -> jax.Array:
    """The inverse of `_merged`: from dimension `at` on, x has the lengths of each part.

    A part says whether its lengths are one dimension of x so far, whose split its first one gets.
    """
    shape, spec = list(x.shape[:at]), list(spec_of(x)[:at])
    for lengths, is_one in parts:
        entries = spec_of(x)[at : at + (1 if is_one else len(lengths))]
        at += len(entries)
        shape += lengths
        spec += [*entries, *[None] * (len(lengths) - 1)][: len(lengths)] if is_one else entries
    return x if tuple(shape) == x.shape else reshape(x, tuple(shape), tuple(spec))


def _cut(x: jax.Array, axis: int, rows: int) -> jax.Array:
    """x without the last `rows` of an axis."""
    return jax.lax.slice_in_dim(x, 0, x.shape[axis] - rows, axis=axis % x.ndim) if rows else x


@dataclasses.dataclass(frozen=True)
class Arrangements:
    """How both operands and the result of one `dot_general` are arranged."""

    lhs: Arrangement
    rhs: Arrangement

    def unpadded(self, keep: bool) -> Arrangements:
        """The same without zero rows, for products that are not followed by gradients.

        Args:
          keep: whether rhs has them all the same: in square blocks, or as it was quantized before.
        """
        return Arrangements(
            self.lhs._replace(unit=1), self.rhs if keep else self.rhs._replace(unit=1)
        )

    def result(self, y: jax.Array, out_sharding: Any) -> jax.Array:
        """The result as lax.dot_general gives it, split so, from (B..., M..., N)."""
        y = _cut(_cut(y, -1, self.rhs.rows), -2, self.lhs.rows)
        lhs = self.lhs.free, self.lhs.merged
        y = _unmerged(y, self.lhs.batch, (lhs, (self.rhs.free, True)))
        return placed(y, out_sharding)

    def result_spec(self, spec: Spec) -> Spec:
        """The partition spec of (B..., M..., N) for one of what lax.dot_general gives."""
        b, m = self.lhs.batch, len(self.lhs.free)
        rows, columns = spec[b : b + m], spec[b + m :]
        rows = (rows[:1] or (None,)) if self.lhs.merged else rows
        return (*spec[:b], *rows, *(columns[:1] or (None,)))

    def gradient(self, dy: jax.Array) -> jax.Array:
        """The inverse, without zero rows: (B..., M..., N) for the gradient of a result."""
        b, m, n = self.lhs.batch, len(self.lhs.free), len(self.rhs.free)
        return _merged(dy, [*[1] * b, *([m] if self.lhs.merged else [1] * m), n])

    def gathered(self, lhs: Any, rhs: Any, recipe: Any, placed: bool) -> Any:
        """The weights, gathered over each mesh axis that also splits rows of lhs: FSDP.

        One gather of floats replaces a gather for each direction. Where products read codes of
        both, which devices share by a rule (splitting.py), codes move instead, a byte an element.

        Args:
          lhs: the activations, or the values of quantized ones.
          rhs: the weights; quantized ones stay where they are.
          recipe: of the weights; None: they are gathered as floats.
          placed: whether the caller says how the result is split. Otherwise `jax.lax.dot_general`
            refuses such splits of columns, and the product keeps them.
        """
        if not isinstance(rhs, jax.Array):
            return rhs
        mesh = jax.typeof(rhs).sharding.mesh
        if not is_explicit(mesh):
            return rhs
        uses = [] if recipe is None or mesh.manual_axes else recipe.uses("rhs")
        if uses and all(use.format is not None and use.window != BLOCK for use in uses):
            return rhs
        rows = {name for axis in self.lhs.free_dims for name in shards_of(lhs, axis)[0]}
        free = () if placed else self.rhs.free_dims
        return unsplit(rhs, rows, [axis for axis in range(rhs.ndim) if axis not in free])

    def gathered_gradient(self, dy: Any, lhs: Any, rhs: Any) -> jax.Array:
        """The result's gradient without splits over mesh axes that split what is contracted.

        Such a result was scattered. Here it is one gather of floats, else one for each direction.
        An axis that splits rows of lhs, too, is FSDP's: it scattered nothing.

        Args:
          dy: the gradient.
          lhs: the `Side` of lhs, or None.
          rhs: the `Side` of rhs, or None.
        """
        if not is_explicit(jax.typeof(dy).sharding.mesh):
            return dy
        names = {
            name
            for side, arrangement in ((lhs, self.lhs), (rhs, self.rhs))
            if side is not None
            for axis in arrangement.contracted_dims
            for name in names_in(side.spec[axis])
        }
        if lhs is not None:
            names -= {name for axis in self.lhs.free_dims for name in names_in(lhs.spec[axis])}
        return unsplit(dy, names, range(dy.ndim))

    @property
    def gradient_pads(self) -> tuple[int, int]:
        """As `Arrangement.pads`."""
        return self.lhs.rows, self.rhs.rows


def arrangements_of(
    op: str, lhs: Any, rhs: Any, dimension_numbers: Any, units: Units, keep_rows: bool = True
) -> Arrangements:
    """The arrangements of a product of arrays of these shapes.

    Args:
      op: for messages.
      lhs: an array, or an object with its shape.
      rhs: an array, or an object with its shape.
      dimension_numbers: as for jax.lax.dot_general.
      units: of the recipe.
      keep_rows: see `arrangement_of`, of lhs.

    Raises:
      TypeError, ValueError: the dimension numbers do not fit the shapes, or blocks or transforms
        the contracted length.
    """
    (lc, rc), (lb, rb) = dimensions_of(op, lhs.shape, rhs.shape, dimension_numbers)
    # Pairs in the order in which the weights have them, so that these are not transposed.
    pairs = sorted(zip(rc, lc, strict=True))
    rc, lc = tuple(r for r, _ in pairs), tuple(c for _, c in pairs)
    check_contracted(op, lhs.shape, lc, units.forward)
    left = arrangement_of(lhs.shape, lc, lb, units.wgrad, keep_rows)
    return Arrangements(left, arrangement_of(rhs.shape, rc, rb, units.dgrad))


def placed(y: jax.Array, out_sharding: Any) -> jax.Array:
    """y split as its caller wants it, if he says it; on explicit meshes and automatic ones."""
    if out_sharding is None:
        return y
    mesh: Any = jax.typeof(y).sharding.mesh
    if mesh.empty:  # operands that no mesh is known of
        mesh = getattr(out_sharding, "mesh", jax.sharding.get_abstract_mesh())
    if not is_explicit(mesh):
        return jax.lax.with_sharding_constraint(y, out_sharding)
    return resharded(y, spec_in(out_sharding, y.ndim), mesh)


def spec_in(out_sharding: Any, ndim: int) -> tuple:
    """The partition spec that a caller gives, by itself or with a mesh, an entry a dimension."""
    is_named = isinstance(out_sharding, jax.sharding.NamedSharding)
    spec = out_sharding.spec if is_named else out_sharding
    return (*spec, *[None] * (ndim - len(spec)))


def check_contracted(op: str, shape: Dims, contracting: Dims, unit: int) -> None:
    """Refuses contracted dimensions whose elements blocks or transforms do not divide.

    Raises:
      ValueError: so it is.
    """
    if not contracting:
        raise ValueError(
            f"{op}: no dimension is contracted, and blocks run along those; multiply the floats"
        )
    length = math.prod(shape[i] for i in contracting)
    if length % unit:
        raise ValueError(
            f"{op}: the contracted length is {length}, not a multiple of {what_of(unit)}; pad both "
            f"operands with zeros to {-(-length // unit) * unit}"
        )


def what_of(unit: int) -> str:
    """Words for the unit that must divide a length."""
    name = "the block length" if unit == BLOCK else "the size of the recipe's Hadamard transform,"
    return f"{name} {unit}"


def dimensions_of(op: str, lhs: Dims, rhs: Dims, numbers: Any) -> tuple[tuple[Dims, Dims], ...]:
    """lax.dot_general's dimension numbers, as tuples of dimensions that count from 0.

    Raises:
      TypeError, ValueError: they are none, or do not fit the shapes.
    """
    try:
        (lc, rc), (lb, rb) = as_tuples(numbers)
        sides = [[tuple(map(whole, dims)) for dims in pair] for pair in ((lc, lb), (rc, rb))]
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{op}: dimension_numbers must be ((lhs contracting, rhs contracting), (lhs batch, rhs "
            f"batch)), four sequences of ints, got {shown(numbers)}"
        ) from error
    for name, shape, dims in zip(("lhs", "rhs"), (lhs, rhs), sides, strict=True):
        flat = [*dims[0], *dims[1]]
        if any(not -len(shape) <= d < len(shape) for d in flat) or len(
            {d % len(shape) for d in flat}
        ) != len(flat):
            raise ValueError(
                f"{op}: dimension_numbers name the dimensions {flat} of {name}, which has the "
                f"shape {tuple(shape)}; each must be there, once"
            )
    counted = [
        [tuple(d % len(shape) for d in group) for group in dims]
        for shape, dims in zip((lhs, rhs), sides, strict=True)
    ]
    (lc, lb), (rc, rb) = counted
    for role, left, right in (("contracted", lc, rc), ("batch", lb, rb)):
        a, b = [lhs[d] for d in left], [rhs[d] for d in right]
        if a != b:
            raise ValueError(
                f"{op}: {role} dimensions are {a} of lhs and {b} of rhs; they must agree"
            )
    return (lc, rc), (lb, rb)


def as_tuples(numbers: Any) -> tuple[tuple[tuple, ...], ...]:
    """Dimension numbers as tuples; as lax, an int stands for a sequence of one."""
    (lc, rc), (lb, rb) = numbers
    return _sequences(lc, rc), _sequences(lb, rb)


def _sequences(*dims: Any) -> tuple[tuple, ...]:
    return tuple(tuple(d) if isinstance(d, Iterable) else (d,) for d in dims)
