"""Meshes with explicit axes, where a sharding is part of an array's type."""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Spec = tuple  # of a PartitionSpec


def is_explicit(mesh) -> bool:
    """Whether shardings on this mesh are part of types."""
    return not mesh.empty and AxisType.Explicit in mesh.axis_types


def spec_of(x: jax.Array) -> Spec:
    """The partition spec in x's type, one entry per dimension."""
    spec = jax.typeof(x).sharding.spec
    return tuple(spec[i] if i < len(spec) else None for i in range(x.ndim))


def names_in(entry: Any) -> tuple[str, ...]:
    """The mesh axes in an entry of a partition spec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def shards_of(x: jax.Array, axis: int) -> tuple[tuple[str, ...], int]:
    """The mesh axes that an axis of x is split over, by its type, and in how many shards."""
    mesh, names = jax.typeof(x).sharding.mesh, names_in(spec_of(x)[axis])
    return names, math.prod(mesh.shape[name] for name in names)


def gathered(x: jax.Array, shape: tuple[int, ...], units: tuple[int, ...]) -> jax.Array:
    """x after it gathers each of its last axes whose shards do not hold whole units.

    This concerns meshes with explicit axes; on others XLA gathers.

    Args:
      x: any array.
      shape: the logical shape, which differs from x's where codes share bytes.
      units: their lengths along the last axes.
    """
    if not is_explicit(jax.typeof(x).sharding.mesh):
        return x
    spec = [*spec_of(x)]
    for axis, unit in enumerate(units, -len(units)):
        _, shards = shards_of(x, axis)
        if shape[axis] % (shards * unit):
            spec[axis] = None
    return resharded(x, spec, jax.typeof(x).sharding.mesh)


def unsplit(x: jax.Array, names: Collection[str], axes: Iterable[int]) -> jax.Array:
    """x, some of whose axes some mesh axes no longer split, on a mesh with explicit axes."""
    spec = [*spec_of(x)]
    for axis in axes:
        axis_names, _ = shards_of(x, axis)
        if kept := [name for name in axis_names if name not in names]:
            spec[axis] = spec[axis] if len(kept) == len(axis_names) else tuple(kept)
        else:
            spec[axis] = None
    return x if tuple(spec) == spec_of(x) else resharded(x, spec, jax.typeof(x).sharding.mesh)


def resharded(x: jax.Array, spec: Sequence, mesh) -> jax.Array:
    """x in the partition spec `spec` on a mesh with explicit axes, whether it is set or not."""
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))


def spread(x: jax.Array, shape: tuple[int, ...], spec: Spec) -> jax.Array:
    """x repeated along its dimensions of length 1, of the partition spec `spec`."""
    mesh = jax.typeof(x).sharding.mesh
    x = jnp.broadcast_to(x, shape)
    return resharded(x, spec, mesh) if is_explicit(mesh) else x


def iota(shape: tuple[int, ...], axis: int, spec: Spec, mesh) -> jax.Array:
    """The index along `axis`, uint32, of the partition spec `spec` if `mesh` has explicit axes."""
    where = NamedSharding(mesh, PartitionSpec(*spec)) if is_explicit(mesh) else None
    return jax.lax.broadcasted_iota(jnp.uint32, shape, axis % len(shape), out_sharding=where)
