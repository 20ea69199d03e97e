"""Attention with a KV cache: of a prompt by JAX, of a token by one kernel on NVIDIA."""

from functools import partial

import jax
import jax.numpy as jnp

from jax_mx.launch import Kernel

D, SHARED = 128, 4  # elements of a head; heads of queries for one of keys; as the kernel wants them


def turns_of(positions, theta, size):
    """Cosines, then sines, (S, 1, size), of positions (S,)."""
    rates = theta ** -jnp.linspace(0, 1, size // 2, False)
    angles = positions.astype(jnp.float32)[:, None, None] * rates
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)


def parts(qkv, turns, groups):
    """Queries, and keys before values, of qkv (B, S, heads, D); all but values are turned."""
    qk, v = jnp.split(qkv, [qkv.shape[2] - groups], 2)
    (a, b), (cos, sin) = jnp.split(qk.astype(jnp.float32), 2, -1), jnp.split(turns, 2, -1)
    qk = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(qkv.dtype)
    q, k = jnp.split(qk, [qk.shape[2] - groups], 2)
    return q, jnp.concatenate([k, v], 2)


def attended(qkv, cache, turns, length):
    """A token's attention to itself and to the first `length` of a cache, which it joins.

    qkv is (B, 1, heads, D), the cache (B, L, 2 groups, D): keys, then values. Each has `turns` (B,
    1, 1, D) and a length (B, 1, 1, 1), an int32.
    """
    length = length[:, 0, 0, 0]
    q, kv = parts(qkv, turns, cache.shape[2] // 2)
    put = jax.vmap(partial(jax.lax.dynamic_update_slice_in_dim, axis=0))
    cache = put(cache, kv, length)
    k, v = jnp.split(cache, 2, 2)
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=length + 1), cache


kernel = Kernel(
    "decode_attention",
    {"cutedsl": "attention_kernels.cutedsl"},
    reference=attended,
    whole=3,
    updates={1: 1},
)


def attend(qkv, cache, start, theta):
    """The attention of a prompt, which begins a cache, or of a token at position `start`.

    qkv is (B, S, heads, D); the cache see `attended`. Gives (B, S, heads of queries, D), the cache.
    """
    (b, s, heads, size), groups = qkv.shape, cache.shape[2] // 2
    turns = turns_of(start + jnp.arange(s), theta, size)
    if s == 1:
        takes = size == D and heads == (SHARED + 2) * groups
        turns = jnp.broadcast_to(turns[None], (b, 1, 1, size))
        return (kernel if takes else attended)(qkv, cache, turns, jnp.full((b, 1, 1, 1), start))
    q, kv = parts(qkv, turns, groups)
    library = "cudnn" if jax.default_backend() == "gpu" else "xla"
    y = jax.nn.dot_product_attention(
        q, *jnp.split(kv, 2, 2), is_causal=True, implementation=library
    )
    return y, jax.lax.dynamic_update_slice_in_dim(cache, kv, start, axis=1)
