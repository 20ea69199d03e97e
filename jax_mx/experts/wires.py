"""How a layer lies on a mesh, and how tokens reach the shard that has their experts and come back.

`Gathered`: all shards gather all tokens, and each takes its own; a reduce-scatter adds up what they
give. `Round` (rounds.py): tokens travel to the shards that have their experts. `travel` takes the
cheaper one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_mx.collectives.barrier import noted
from jax_mx.collectives.moves import all_gather
from jax_mx.experts.costs import ROUNDS, Costs
from jax_mx.experts.rounds import Round
from jax_mx.formats.checks import is_symbolic, shown
from jax_mx.formats.sharding import is_explicit, resharded, shards_of
from jax_mx.launch import private
from jax_mx.products.operand import QuantizedWeight, Unquantized, moves_as_floats
from jax_mx.products.recipes import Recipe
from jax_mx.quantizing.mxarray import MXArray

KINDS = ("mx", "floats")


class Axes(NamedTuple):
    """The mesh axes of a layer; None: there is none.

    Attributes:
      experts: that tokens and experts are split over.
      tensor: that the inner length is split over.
      to_map: whether the layer is still to be mapped over them: they are no axes of a
        jax.shard_map around it.
    """

    experts: str | None
    tensor: str | None
    to_map: bool = False


def axes_of(op: str, experts: Any, tensor: Any) -> Axes:
    """The axes that a caller names.

    Raises:
      TypeError, ValueError: a name is none, or of no axis here.
    """
    names = {"expert_axis": experts, "tensor_axis": tensor}
    named = {name: axis for name, axis in names.items() if axis is not None}
    mesh = jax.sharding.get_abstract_mesh()
    is_manual = set()
    for name, axis in named.items():
        if not isinstance(axis, str):
            raise TypeError(f"{op}: {name} must be the name of a mesh axis, got {shown(axis)}")
        if axis not in mesh.axis_names:
            raise ValueError(
                f"{op}: {name} {axis!r} is no axis of a mesh here, whose axes are "
                f"{mesh.axis_names}; set one around the call, with jax.set_mesh or jax.shard_map"
            )
        is_manual.add(axis in mesh.manual_axes)
    if len(is_manual) > 1:
        raise ValueError(f"{op}: of {names} one is an axis of a jax.shard_map here; map over both")
    if tensor is not None and tensor == experts:
        raise ValueError(
            f"{op}: expert_axis and tensor_axis are both {tensor!r}; they split different "
            "dimensions, each over an axis of its own"
        )
    if tensor is not None and experts is None:
        raise ValueError(f"{op}: tensor_axis without expert_axis; name an axis of length 1 as that")
    if True in is_manual and tensor and not private.varies(jax.lax.axis_index(tensor)):
        raise ValueError(f"{op}: tensor_axis wants jax.shard_map(..., check_vma=True)")
    return Axes(experts, tensor, False in is_manual)


class Mapping(NamedTuple):
    """How whole arrays are split among the shards of a mesh.

    Attributes:
      axes: of the layer.
      tokens: the axes that tokens are split over.
      mesh: abstract.
    """

    axes: Axes
    tokens: tuple[str, ...]
    mesh: Any

    @classmethod
    def of(cls, op: str, x: Any, axes: Axes, tokens: Any, experts: int) -> Mapping:
        """The mapping of a layer of so many experts.

        Raises:
          ValueError: tokens cannot be split so, or name an axis that the mesh lacks.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ValueError(f"{op}: token_axes want a mesh; set one with jax.set_mesh")
        free = [name for name in mesh.axis_names if name not in (axes.tensor, *mesh.manual_axes)]
        if tokens is None:
            split_over = shards_of(x, 0)[0] if is_explicit(mesh) else free
        else:
            split_over = (tokens,) if isinstance(tokens, str) else tokens
        names = tuple(name for name in free if name in split_over or name == axes.experts)
        if unknown := set(split_over) - set(names):
            raise ValueError(f"{op}: token_axes {sorted(unknown)} are not among {free}")
        shards = math.prod(mesh.shape[name] for name in names)
        if x.shape[0] % shards:
            raise ValueError(
                f"{op}: {x.shape[0]} tokens are not a multiple of the {shards} shards of "
                f"{' x '.join(names)}; pad x with zero rows whose experts are -1"
            )
        if axes.experts and experts % mesh.shape[axes.experts]:
            raise ValueError(
                f"{op}: {experts} experts are not a multiple of the {mesh.shape[axes.experts]} "
                f"shards of {axes.experts}"
            )
        return cls(axes, names, mesh)

    def __call__(self, shard: Callable[..., jax.Array], operands: tuple) -> jax.Array:
        """The results of `shard` for all shards of these operands, see `moe`, as one array."""
        *_, w1, w2, b1, b2, recipe = operands
        rows, tensor = P(self.tokens), self.axes.tensor
        first = _specs(w1, P(self.axes.experts, *[None] * (w1.ndim - 2), tensor))
        second = _specs(w2, P(self.axes.experts, tensor, None))
        biases = [
            None if b is None else P(self.axes.experts, *([None] * (b.ndim - 2)), name)
            for b, name in ((b1, tensor), (b2, None))
        ]
        specs = (rows, rows, rows, first, second, *biases, jax.tree.map(lambda _: P(), recipe))
        if is_explicit(self.mesh):
            operands = jax.tree.map(lambda a, spec: resharded(a, spec, self.mesh), operands, specs)
        return jax.shard_map(shard, in_specs=specs, out_specs=rows)(*operands)


def check_weights(axes: Axes, *weights: Any) -> None:
    """Refuses MX weights whose blocks an axis would split.

    Raises:
      ValueError: there is a tensor axis, and a weight is not floats.
    """
    if axes.tensor is not None and any(isinstance(w, MXArray | QuantizedWeight) for w in weights):
        raise ValueError("moe: tensor_axis splits floats; map over shards of MX weights yourself")


def _specs(w: Any, spec: P) -> Any:
    """The specs of a weight's arrays."""
    if not isinstance(w, MXArray | QuantizedWeight):
        return spec
    specs = jax.tree.map(lambda _: P(spec[0]), w)
    if isinstance(w, QuantizedWeight):
        specs = dataclasses.replace(specs, recipe=jax.tree.map(lambda _: P(), w.recipe))
    return specs


def halved(w: jax.Array) -> jax.Array:
    """(..., 2, I) of (..., 2 I)."""
    return w.reshape(*w.shape[:-1], 2, -1)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("experts",),
    meta_fields=("axis", "wire", "local"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class Gathered:
    """All tokens move to all shards; see `Round` for methods and attributes of these names.

    Attributes:
      experts: int32 (T, k) of this shard's tokens.
      axis: the expert axis, or None: nothing moves.
      wire: how rows move.
      local: how many experts a shard has.
    """

    experts: jax.Array
    axis: str | None
    wire: str
    local: int
    most: ClassVar[int | None] = None

    def tokens(self, tokens: Unquantized) -> Any:
        """The rows of all shards: floats, or MX along their elements."""
        if self.axis is None:
            return tokens.x
        if self.wire == "floats" or moves_as_floats(tokens):
            return jax.lax.all_gather(tokens.x, self.axis, tiled=True)
        return all_gather(tokens.forms()[0].array, self.axis, tiled=True)

    def choices(self, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The experts of all rows, as this shard counts its own, and their weights."""
        weights = weights.astype(jnp.float32)
        if self.axis is None:
            return self.experts, weights
        ids = gathered(self.axis, self.experts) - jax.lax.axis_index(self.axis) * self.local
        here = jnp.where((ids >= 0) & (ids < self.local), ids, -1)
        return here, gathered(self.axis, weights)

    def back(self, rows: jax.Array) -> jax.Array:
        """(T, D): the results of this shard's rows, added up over shards."""
        return sum_and_scatter(self.axis, rows)

    def back_choices(self, values: jax.Array) -> jax.Array:
        """(T, k): the values of all rows' choices."""
        return sum_and_scatter(self.axis, values)


Trip = Gathered | Round


def travel(
    axis: str, wire: str, way: str | None, experts: jax.Array, local: int, width: int
) -> Trip:
    """How tokens of these experts (T, k) travel to the shards, each of which has `local` experts.

    Args:
      axis: the expert axis.
      wire: how rows move, one of `KINDS`.
      way: one of `WAYS`; None: the one that costs less.
      experts: as all shards count them.
      local: how many a shard has.
      width: elements of a token.

    Raises:
      ValueError: rounds are named, and the number of tokens is a symbol.
    """
    shards, (tokens, k) = jax.lax.axis_size(axis), experts.shape
    if is_symbolic(tokens):
        if way == ROUNDS:
            raise ValueError(
                f"moe: way {ROUNDS!r} wants a known number of tokens; {tokens} is a symbol; pass "
                "way='gather'"
            )
        return Gathered(experts, axis, wire, local)
    costs = Costs.of(tokens, k, local * shards, shards, width, wire)
    way = way or costs.least
    experts = noted(experts, f"moe over {axis!r}: {costs.sentence(way)}")
    if way == ROUNDS:
        return Round.first(axis, wire, experts, local)
    return Gathered(experts, axis, wire, local)


def gathered(axis: str | None, rows: jax.Array) -> jax.Array:
    """(T, ...) of all shards."""
    return rows if axis is None else jax.lax.all_gather(rows, axis, tiled=True)


def sum_and_scatter(axis: str | None, rows: jax.Array) -> jax.Array:
    """The rows of this shard, added up over shards."""
    if axis is None:
        return rows
    return jax.lax.psum_scatter(rows, axis, scatter_dimension=0, tiled=True)


def summed_shards(axis: str | None, rows: jax.Array) -> jax.Array:
    """Added up over the shards of the inner length."""
    return rows if axis is None else jax.lax.psum(rows, axis)


def on_first_shard(axis: str | None, rows: jax.Array) -> jax.Array:
    """Rows on the first shard, zeros on the others: a sum over the axis counts them once."""
    return rows if axis is None else jnp.where(jax.lax.axis_index(axis) == 0, rows, 0)


def numbered(recipe: Recipe, axes: Iterable[str | None]) -> Recipe:
    """The recipe with this shard's place on each mesh axis folded into its keys.

    An axis of one shard leaves them as they are.
    """
    for axis in axes:
        if axis is not None and jax.lax.axis_size(axis) > 1:
            recipe = recipe.fold_in(jax.lax.axis_index(axis))
    return recipe
