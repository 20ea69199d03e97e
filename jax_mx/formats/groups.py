"""Sizes of groups of rows, and the group of each row."""

import jax
import jax.numpy as jnp


def clamped(sizes: jax.Array, rows: int) -> jax.Array:
    """Sizes of groups, int32 (G,), as far as there are rows; negative ones are 0."""
    counts = jnp.clip(sizes, 0, rows)
    known = isinstance(rows, int) and isinstance(sizes.shape[0], int)
    if known and rows * sizes.shape[0] < 1 << 31:
        ends = jnp.minimum(jnp.cumsum(counts), rows)
    else:  # the first end beyond the rows is no more than twice as many, later ones may wrap
        counts = counts.astype(jnp.uint32)
        ends = jnp.minimum(jnp.cumsum(counts, dtype=jnp.uint32), jnp.uint32(rows))
        ends = jax.lax.cummax(ends).astype(jnp.int32)
    return jnp.diff(ends, prepend=jnp.zeros(1, ends.dtype))


def owners(ends: jax.Array, rows: jax.Array) -> jax.Array:
    """The group of each row, int32 (..., R), of ends (..., G); G behind the last group's.

    As jnp.searchsorted(ends, rows, side="right"), which JAX 0.10 cannot trace in a shard_map over
    some axes of a mesh whose others are automatic.
    """
    rows = rows.reshape(*[1] * (ends.ndim - 1), -1, 1)
    return (ends[..., None, :] <= rows).sum(-1, dtype=jnp.int32)
