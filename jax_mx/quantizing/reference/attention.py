"""The attention of a token to a cache, in jnp: a step of a chain."""

import jax
import jax.numpy as jnp

from jax_mx.formats.sharding import is_explicit


def attended(
    x: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    position: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    scale: float,
) -> list[jax.Array]:
    """A token's attention to those before it and to itself, with scores and sums in float32.

    Args:
      x: floats (B, (H + 2 G) D): queries, then a key and then a value for each of G heads.
      keys: (B, L, G, D); H / G heads of queries share one.
      values: (B, L, G, D).
      position: int32 (B,), of the token; one below 0 is 0, one beyond the cache its last.
      cos: float32 (B, D / 2), of the angles that turn elements i and i + D / 2 of queries and keys.
      sin: (B, D / 2).
      scale: of scores.

    Returns:
      y (B, H D), and keys and values with the token's own.
    """
    batch, length, groups, depth = keys.shape
    heads = x.shape[1] // depth - 2 * groups
    rows = x.reshape(batch, heads + 2 * groups, depth)
    q, k, v = jnp.split(rows, [heads, heads + groups], 1)
    position = jnp.clip(position, 0, length - 1)
    keys = _put(keys, _turned(k, cos, sin).astype(keys.dtype), position)
    values = _put(values, v.astype(values.dtype), position)
    q = _turned(q, cos, sin).reshape(batch, groups, heads // groups, depth)
    there = jnp.arange(length, dtype=jnp.int32)[None] <= position[:, None]
    # A cache may have NaN behind the token, which no sum and no derivative meets.
    until = [jnp.where(there[..., None, None], a, 0).astype(x.dtype) for a in (keys, values)]
    scores = _sums("bgrd,blgd->bgrl", q, until[0]) * scale
    weights = jax.nn.softmax(jnp.where(there[:, None, None], scores, -jnp.inf), -1)
    y = _sums("bgrl,blgd->bgrd", weights.astype(x.dtype), until[1])
    return [y.astype(x.dtype).reshape(batch, heads * depth), keys, values]


def _put(cache: jax.Array, rows: jax.Array, position: jax.Array) -> jax.Array:
    """A cache (B, L, G, D) with (B, G, D) at a position for each row."""
    meshes = jax.typeof(rows).sharding.mesh, jax.sharding.get_abstract_mesh()
    if any(map(is_explicit, meshes)):  # where a slice must be split as the whole is
        places = jnp.arange(cache.shape[1], dtype=jnp.int32)[None]
        return jnp.where((places == position[:, None])[..., None, None], rows[:, None], cache)
    put = jax.vmap(jax.lax.dynamic_update_index_in_dim, (0, 0, 0, None))
    return put(cache, rows, position, 0)


def _turned(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """(B, heads, D) whose halves are turned by angles (B, D / 2)."""
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def _sums(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
