"""Grouped products of floats, in plain jnp, added up in float32: a tile of rows after the other.

Groups begin at multiples of a tile here, so that each tile belongs to one. No sum meets another
group's NaN, and only what a group has is multiplied: lax.ragged_dot multiplies all rows with every
matrix where XLA has no kernel for it.
"""

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


def rows(x: jax.Array, w: jax.Array, sizes: jax.Array, tile: int) -> jax.Array:
    """Float32 (R, N): the rows of each group, times its matrix; rows that no group has are 0.

    Args:
      x: (R, K); tile divides R.
      w: (G, K, N).
      sizes: int32 (G,), multiples of tile.
      tile: rows.
    """
    owner, is_some = _owners(sizes, x.shape[0] // tile, tile)

    def one(operands):
        tile_rows, group, some = operands
        return jnp.where(some, _dot("mk,kn->mn", tile_rows, w[group]), 0)

    y = jax.lax.map(one, (x.reshape(x.shape[0] // tile, tile, x.shape[1]), owner, is_some))
    return y.reshape(x.shape[0], w.shape[2])


def sums(a: jax.Array, b: jax.Array, sizes: jax.Array, tile: int) -> jax.Array:
    """Float32 (G, M, N): over the rows of each group; of an empty one 0.

    Args:
      a: (R, M); tile divides R.
      b: (R, N).
      sizes: int32 (G,), multiples of tile.
      tile: rows.
    """
    owner, is_some = _owners(sizes, a.shape[0] // tile, tile)

    def add(total, operands):
        own_a, own_b, group, some = operands
        more = jnp.where(some, _dot("rm,rn->mn", own_a, own_b), 0)
        return total.at[group].add(more), None

    tiles = (x.reshape(x.shape[0] // tile, tile, x.shape[1]) for x in (a, b))
    start = jnp.zeros_like(a, shape=(sizes.shape[0], a.shape[1], b.shape[1]), dtype=jnp.float32)
    return jax.lax.scan(add, start, (*tiles, owner, is_some))[0]


def owners(ends: jax.Array, rows: jax.Array) -> jax.Array:
    """The group of each row, int32 (..., R), of ends (..., G); G behind the last group's.

    As jnp.searchsorted(ends, rows, side="right"), which JAX 0.10 cannot trace in a shard_map over
    some axes of a mesh whose others are automatic.
    """
    rows = rows.reshape(*[1] * (ends.ndim - 1), -1, 1)
    return (ends[..., None, :] <= rows).sum(-1, dtype=jnp.int32)


def _owners(sizes: jax.Array, tiles: int, tile: int) -> tuple[jax.Array, jax.Array]:
    """The group of each tile, and whether it has one."""
    ends = jnp.cumsum(sizes)
    first = jnp.arange(tiles, dtype=jnp.int32) * tile
    owner = owners(ends, first)
    return jnp.minimum(owner, max(sizes.shape[0] - 1, 0)), owner < sizes.shape[0]


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(
        equation, a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
