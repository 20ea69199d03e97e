"""Meshes with explicit axes, where a sharding is part of an array's type."""

from __future__ import annotations

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Spec = tuple  # of a PartitionSpec


def is_explicit(mesh) -> bool:
    """Whether shardings on this mesh are part of types."""
    return not mesh.empty and AxisType.Explicit in mesh.axis_types


def spec_of(x: jax.Array) -> Spec:
    """The partition spec in x's type, one entry per dimension."""
    spec = jax.typeof(x).sharding.spec
    return tuple(spec[i] if i < len(spec) else None for i in range(x.ndim))


def gathered(x: jax.Array) -> jax.Array:
    """x with its last two axes gathered, on a mesh with explicit axes: tiles mix them."""
    if not is_explicit(jax.typeof(x).sharding.mesh):
        return x
    return jax.sharding.reshard(x, PartitionSpec(*spec_of(x)[:-2], None, None))


def reshape(x: jax.Array, shape: tuple[int, ...], spec: Spec) -> jax.Array:
    """x.reshape, to the partition spec `spec` on a mesh with explicit axes."""
    mesh = jax.typeof(x).sharding.mesh
    if not is_explicit(mesh):
        return jax.lax.reshape(x, shape)
    spec = (*spec, *[None] * (len(shape) - len(spec)))
    return jax.lax.reshape(x, shape, out_sharding=NamedSharding(mesh, PartitionSpec(*spec)))
