"""Reshapes on any mesh: of an array, to a view (views.py), and back."""

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jax_mx.arrays.sharding import Spec, is_explicit
from jax_mx.arrays.units import Order

Shape = tuple[int, ...]


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
