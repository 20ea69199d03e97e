"""`Contraction`: one product of arrays of which some are MX, without saying how it is computed.

A dense product has dimension numbers, as `jax.lax.dot_general`. A grouped one has rows sorted by
group, and their number in each group on the device: each group's rows meet a matrix of their own
(`jax.lax.ragged_dot`), or each group's rows are summed over (the gradient of the matrices).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jax_mx.formats.layouts import ROW_MAJOR, ROW_MAJOR_VALUES, Layout
from jax_mx.formats.windows import Window, in_blocks
from jax_mx.launch.targets import Target
from jax_mx.quantizing.mxarray import MXArray, floats_of
from jax_mx.quantizing.plan import ProductPlan
from jax_mx.quantizing.registry import Refusal, Support

Operand = MXArray | jax.Array
Dims = tuple[int, ...]
ROWS, SUMS = "rows", "sums"  # the two products over groups


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The part of a contraction that is no array: a parameter of its primitive.

    Attributes:
      contracting: the contracted dimensions of lhs, of rhs; a grouped product has one each.
      batch: the batch dimensions of lhs, of rhs; a grouped product has none.
      dtype: of the result.
      groups: "" for a dense product. `ROWS`: each group of rows of lhs has a matrix in rhs, so
        lhs (R, K) and rhs (G, K, N) give (R, N). `SUMS`: each group's rows are summed over, so
        lhs (R, M) and rhs (R, N) give (G, M, N). Operands may lie transposed.
      align: the divisor of every group's size.
      exact: whether the caller asks for a precision that no FP8 tensor core gives.
      out_sharding: of the result, on a mesh with explicit axes.
      implementation: the one that the caller insists on, or None.
      chosen: the name of the recipe that "auto" became; None where the caller passed another.
      over_rows: whether it sums over rows, as the gradient of a weight does.
      moved: the dtype in which sums of devices' parts move, where that is not the result's.
      caller: the public function that names the implementation, for its refusal; else "".
      fast: whether tensor cores may add up all of a sum, with fewer bits than float32 has.
    """

    contracting: tuple[Dims, Dims]
    batch: tuple[Dims, Dims]
    dtype: np.dtype
    groups: str = ""
    align: int = 1
    exact: bool = False
    out_sharding: Any = None
    implementation: str | None = None
    chosen: Any = None
    over_rows: bool = False
    moved: np.dtype | None = None
    caller: str = ""
    fast: bool = False

    @property
    def dimensions(self) -> tuple[tuple[Dims, Dims], tuple[Dims, Dims]]:
        """The dimension numbers, as `jax.lax.dot_general` has them."""
        return self.contracting, self.batch

    def axes(self, *ndim: int) -> tuple[int, int]:
        """The contracted axes of operands of so many dimensions; see `Contraction.axes`."""
        (left,), (right,) = self.contracting
        return left - ndim[0], right - ndim[1]

    def free(self, side: int, ndim: int) -> Dims:
        """The dimensions of an operand of this rank that the result keeps."""
        taken = (*self.contracting[side], *self.batch[side])
        taken = (*taken, 0) if self.groups == ROWS and side else taken
        return tuple(d for d in range(ndim) if d not in taken)


@dataclasses.dataclass(frozen=True)
class Contraction:
    """One product: its numbers and its operands, which are arrays or their abstract values.

    Attributes:
      numbers: the part that is no array.
      lhs: an `MXArray`, or floats.
      rhs: an `MXArray`, or floats.
      sizes: int32 (G,), how many rows each group has; None for a dense product.
      like: an array of the result's shape that XLA is to split it as, or None; see splitting.py.
      unsplit: why devices do not share it by our rule (splitting.py), in a program that XLA splits
        among them; empty where they do, and in other programs.
      carried: why Pallas does not lower it for chips that are not here, in a program that may leave
        this machine; empty in others.
    """

    numbers: Numbers
    lhs: Any
    rhs: Any
    sizes: Any = None
    like: Any = None
    unsplit: str = ""
    carried: str = ""

    @property
    def op(self) -> str:
        """The public function that messages and tables of choices name."""
        return "ragged_dot" if self.numbers.groups else "dot_general"

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.numbers.caller or self.op

    @property
    def implementation(self) -> str | None:
        """The one that the caller insists on."""
        return self.numbers.implementation

    @property
    def groups(self) -> int:
        """How many matrices there are: of groups, or of the batch."""
        if self.numbers.groups:
            return self.sizes.shape[0]
        return math.prod(self.rhs.shape[d] for d in self.numbers.batch[1])

    @property
    def axes(self) -> tuple[int, int]:
        """The contracted axis of either operand of a grouped product, -1 or -2."""
        return self.numbers.axes(self.lhs.ndim, self.rhs.ndim)

    @property
    def length(self) -> int:
        """How many products an element of the result sums; of groups at most."""
        return math.prod(self.lhs.shape[d] for d in self.numbers.contracting[0])

    @property
    def rows(self) -> int:
        """How many rows lhs has in each entry of the batch; of groups all of them together."""
        if self.numbers.groups == SUMS:
            return self.length
        return math.prod(self.lhs.shape[d] for d in self.free(0))

    @property
    def columns(self) -> int:
        """How many columns the result has."""
        return math.prod(self.rhs.shape[d] for d in self.free(1))

    @property
    def work(self) -> int:
        """How many products there are, if each row has a group."""
        if self.numbers.groups == SUMS:
            return self.length * self.columns * math.prod(self.lhs.shape[d] for d in self.free(0))
        entries = 1 if self.numbers.groups else self.groups
        return entries * self.rows * self.length * self.columns

    @property
    def how(self) -> str:
        """All that its speed depends on but operands, in words."""
        numbers = self.numbers
        if numbers.groups:
            (a, b), align = self.axes, numbers.align
            parts = ["sums over groups" if numbers.groups == SUMS else "a matrix a group"]
            parts += [f"{self.groups} groups", f"multiples of {align}", f"contracts {a}:{b}"]
        else:
            contracted, batch = (
                " ".join(f"{i}:{j}" for i, j in zip(*dims, strict=True))
                for dims in numbers.dimensions
            )
            parts = [f"contracts {contracted}", *([f"batch {batch}"] if batch else [])]
        sums = ["highest precision"] * numbers.exact + ["fast sums"] * numbers.fast
        return ", ".join([*parts, f"to {numbers.dtype.name}", *sums])

    @property
    def in_a_shard(self) -> Contraction:
        """The contraction as each device has it: of shapes that the axes of explicit meshes divide.

        Axes of automatic meshes do not divide them: a trace does not know what those will split.
        """
        numbers = dataclasses.replace(self.numbers, out_sharding=None)
        lhs, rhs, sizes = jax.tree.map(shard_of, (self.lhs, self.rhs, self.sizes))
        return Contraction(numbers, lhs, rhs, sizes)

    def lowered_for(self, target: Target) -> Contraction:
        """The contraction in a program for a target: where "auto" chose rows for others, of blocks.

        Quantizers give windows of 32 there, see `Plan.chosen`.
        """
        chosen = self.numbers.chosen
        if chosen is None or target.is_for(chosen[1]):
            return self
        return self.with_windows(in_blocks)

    def with_windows(self, change: Callable[[Window], Window]) -> Contraction:
        """The contraction whose `MXArray`s have other windows, which follow from their own."""
        lhs, rhs = (
            dataclasses.replace(x, window=change(x.window)) if isinstance(x, MXArray) else x
            for x in (self.lhs, self.rhs)
        )
        return dataclasses.replace(self, lhs=lhs, rhs=rhs)

    def in_layouts(self, layouts: Sequence[Layout]) -> Contraction:
        """The contraction with operands in these layouts; scales and values in others, in rows."""

        def in_them(x: Any) -> Any:
            if not isinstance(x, MXArray):
                return x
            x = x if x.scale_layout in layouts else x.with_scales_in(ROW_MAJOR)
            return x if x.value_layout in layouts else x.with_values_in(ROW_MAJOR_VALUES)

        return dataclasses.replace(self, lhs=in_them(self.lhs), rhs=in_them(self.rhs))

    def free(self, side: int) -> Dims:
        """The dimensions of lhs (0) or rhs (1) that the result keeps, but batch and groups."""
        return self.numbers.free(side, (self.lhs, self.rhs)[side].ndim)


@dataclasses.dataclass(frozen=True)
class Served(Support):
    """An implementation's answer to a contraction: whether it serves, and how.

    Attributes:
      plan: the kernel's, so that nothing is planned twice; None without a kernel of ours.
      reads_floats: whether it multiplies floats that it makes of lhs, or of both operands.
    """

    plan: ProductPlan | None = None
    reads_floats: bool = False


def refused(name: str, contraction: Contraction, why: str, advice: str = "") -> Served:
    """The answer of an implementation that does not serve, and what does."""
    instead = "use implementation=None or 'dequantize'"
    return Served(name, refusal=Refusal(contraction.name, f"{name!r} {why}", advice, instead))


def shard_of(aval: Any) -> Any:
    """The abstract value of an array as each device has it."""
    if aval.sharding is None:  # a shard already
        return aval
    mesh, spec = aval.sharding.mesh, tuple(aval.sharding.spec)
    shape = []
    for n, axes in zip(aval.shape, (*spec, *[None] * (aval.ndim - len(spec))), strict=True):
        names = (axes,) if isinstance(axes, str) else tuple(axes or ())
        shape.append(n // math.prod(mesh.shape[name] for name in names))
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype)


def is_along(x: MXArray, dim: int) -> bool:
    """Whether blocks run along a dimension."""
    return dim - x.ndim in ((-2, -1) if len(x.block) == 2 else (x.axis,))


def blocks_along(x: Any, dims: Sequence[int]) -> bool:
    """Whether an operand is MX with its blocks along the one contracted dimension."""
    return isinstance(x, MXArray) and len(dims) == 1 and is_along(x, dims[0])


def both_along(contraction: Contraction) -> bool:
    """Whether both operands are."""
    sides = zip((contraction.lhs, contraction.rhs), contraction.numbers.contracting, strict=True)
    return all(blocks_along(x, dims) for x, dims in sides)


# ---- operands as kernels take them ---
def swapped_floats(x: Any, swapped: bool = False) -> jax.Array:
    """An operand in floats, with its last two axes swapped in the same pass."""
    if isinstance(x, MXArray):
        return floats_of(x, transpose=swapped)
    return x.mT if swapped else x


def matrix(
    x: Any, contracted: int, batch: Sequence[int], is_free: bool = False
) -> tuple[Any, list[int]]:
    """An operand as (batch, rows, K) or (rows, K), and the lengths that make up its rows.

    One that `_is_free` as (batch, K, rows) or (K, rows).
    """
    if isinstance(x, MXArray) and len(x.block) == 2:
        turned = contracted != x.ndim - 1 and not is_free
        x = (x.mT if turned else x).expand(-1)
        contracted = contracted if is_free else x.ndim - 1
    free = [d for d in range(x.ndim) if d != contracted and d not in batch]
    lengths = [x.shape[d] for d in free]
    first, last = ([contracted], free) if is_free else (free, [contracted])
    order = (*batch, *first, *last)
    shape = (*(x.shape[d] for d in batch), math.prod(x.shape[d] for d in first), -1)

    def arranged(a: jax.Array) -> jax.Array:
        return a.transpose(order).reshape(shape)

    if not isinstance(x, MXArray):
        return arranged(x), lengths
    arrays = arranged(x.values), arranged(x.scales)
    return MXArray(*arrays, x.format, -1, x.scale_layout, window=x.window), lengths
