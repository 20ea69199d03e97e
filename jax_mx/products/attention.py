"""The attention of a token to a cache, in jnp: a step of a chain."""

import jax
import jax.numpy as jnp


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
    rows = x.reshape(batch, -1, depth)
    heads = rows.shape[1] - 2 * groups
    q, k, v = jnp.split(rows, [heads, heads + groups], 1)
    put = jax.vmap(jax.lax.dynamic_update_index_in_dim, (0, 0, 0, None))
    position = jnp.clip(position, 0, length - 1)
    keys = put(keys, _turned(k, cos, sin).astype(keys.dtype), position, 0)
    values = put(values, v.astype(values.dtype), position, 0)
    q = _turned(q, cos, sin).reshape(batch, groups, heads // groups, depth)
    there = (jnp.arange(length) <= position[:, None])[:, None, None]
    scores = _sums("bgrd,blgd->bgrl", q, keys.astype(q.dtype))
    weights = jax.nn.softmax(jnp.where(there, scores * scale, -jnp.inf), -1)
    # A cache may have NaN behind the token.
    kept = jnp.where(there.reshape(batch, length, 1, 1), values, 0)
    y = _sums("bgrl,blgd->bgrd", weights.astype(x.dtype), kept.astype(x.dtype))
    return [y.astype(x.dtype).reshape(batch, -1), keys, values]


def _turned(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """(B, heads, D) whose halves are turned by angles (B, D / 2)."""
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def _sums(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
