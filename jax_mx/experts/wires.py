"""How tokens reach the shard that has their experts, and how what these give comes back.

All gather, then each shard takes its own: shapes do not depend on the routing, and a token that
several experts of a shard want moves once. The shards' results are added up by a reduce-scatter.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_mx.arrays.checks import shown
from jax_mx.ops.groups import take_rows
from jax_mx.ops.mxarray import MXArray
from jax_mx.products.forms import Blocks, Use, forms_of

KINDS = ("mx", "floats")


def axis_of(op: str, axis: Any) -> str | None:
    """The name of a mesh axis that stands around this, or None.

    Raises:
      TypeError, ValueError: it is neither.
    """
    if axis is None:
        return None
    if not isinstance(axis, str):
        raise TypeError(f"{op}: expert_axis must be the name of a mesh axis, got {shown(axis)}")
    try:
        jax.lax.axis_size(axis)
    except NameError as error:
        raise ValueError(
            f"{op}: expert_axis {axis!r} is no axis of a jax.shard_map around this call"
        ) from error
    return axis


def gathered(static: Any, x: jax.Array, use: Use, blocks: Blocks) -> Any:
    """The rows of all shards of the expert axis: floats, or MX along their elements.

    Args:
      static: has the axis and how its wires carry rows.
      x: floats (T, D) of this shard.
      use: how the next product takes them.
      blocks: which elements share scales.
    """
    if static.axis is None:
        return x
    if static.wire == "floats" or use.format is None or use.hadamard is not None:
        return jax.lax.all_gather(x, static.axis, tiled=True)
    form, _ = forms_of(x, -1, (use, None), blocks)
    assert form is not None
    q = form.array
    assert isinstance(q, MXArray)
    moved = {name: _moved(getattr(q, name), static.axis) for name in ("values", "scales")}
    return dataclasses.replace(q, **moved)


def _moved(a: jax.Array, axis: str) -> jax.Array:
    """All shards' rows, as bytes: on a CPU, collectives of float8 move wider floats."""
    bits = jax.lax.bitcast_convert_type(a, jnp.uint8)
    return jax.lax.bitcast_convert_type(jax.lax.all_gather(bits, axis, tiled=True), a.dtype)


def alike(axis: str | None, choices: jax.Array) -> jax.Array:
    """(T, k) of all shards."""
    return choices if axis is None else jax.lax.all_gather(choices, axis, tiled=True)


def own(axis: str | None, experts: jax.Array, number: int) -> jax.Array:
    """The experts of all shards' tokens as this shard counts its own; those of others are -1.

    Args:
      axis: the expert axis, or None.
      experts: (T, k) of this shard.
      number: how many experts a shard has.
    """
    if axis is None:
        return experts
    here = alike(axis, experts) - jax.lax.axis_index(axis) * number
    return jnp.where((here >= 0) & (here < number), here, -1)


def scattered(axis: str | None, rows: jax.Array) -> jax.Array:
    """The rows of this shard, added up over shards."""
    if axis is None:
        return rows
    return jax.lax.psum_scatter(rows, axis, scatter_dimension=0, tiled=True)


def taken(q: MXArray, rows: jax.Array) -> MXArray:
    """q[rows] of an array with blocks along the last axis, with zeros for rows that it lacks."""
    parts = {}
    for name in ("values", "scales"):
        a = getattr(q, name)
        bits = take_rows(jax.lax.bitcast_convert_type(a, jnp.uint8), rows)
        parts[name] = jax.lax.bitcast_convert_type(bits, a.dtype)
    return dataclasses.replace(q, **parts)
