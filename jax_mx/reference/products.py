"""Products that read MX operands, in plain jnp: dequantized in float32, added up in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_mx.facts.formats import BLOCK
from jax_mx.reference.blocks import amax_of, dequantize


def matmul(x: jax.Array, codes: jax.Array, scales: jax.Array, *sizes, plan: Any) -> list:
    """y (T, N) = x (T, passes * K) @ W (G, N, K)^T; an x of several passes is their sum."""
    w = _floats(codes, scales, plan.formats[-1])
    parts = x.astype(jnp.float32).reshape(x.shape[0], -1, w.shape[-1])
    return [_product(parts.sum(1), w, *sizes).astype(plan.dtype)]


def matmul_fp8(x_codes, x_scales, codes, scales, *sizes, plan: Any) -> list:
    """The same for an x (T, K) in MX."""
    x = _floats(x_codes, x_scales, plan.formats[0])
    return [_product(x, _floats(codes, scales, plan.formats[-1]), *sizes).astype(plan.dtype)]


def wgrad_fp8(x_codes, x_scales, codes, scales, sizes, *, plan: Any) -> list:
    """y (G, M, N): for each group x (M, K) @ W (N, K)^T over its part of K."""
    x = _floats(x_codes, x_scales, plan.formats[0])
    w = _floats(codes, scales, plan.formats[-1])
    counts = jnp.maximum(sizes, 0)
    slot = jnp.arange(x.shape[1])

    def one(group):
        # Zeros in place of other groups' elements: no sum may meet their NaN.
        end, count = group
        own = (slot < end) & (slot >= end - count)
        return _dot("mk,nk->mn", jnp.where(own, x, 0), jnp.where(own, w, 0))

    return [jax.lax.map(one, (jnp.cumsum(counts), counts)).astype(plan.dtype)]


def amaxes(x: jax.Array, *, plan: Any) -> list:
    """For x (batch, T, K): (batch, T) and (batch, K), float32 bits of the largest magnitudes."""
    del plan
    return [amax_of(x, (axis,)).squeeze(axis) for axis in (-1, -2)]


def _floats(codes: jax.Array, scales: jax.Array, format) -> jax.Array:
    """What row-major codes and scales stand for, float32."""
    blocks = codes.reshape(*scales.shape, BLOCK // format.codes_per_byte)
    floats = dequantize(blocks, scales[..., None], format, jnp.dtype(jnp.float32))
    return floats.reshape(*scales.shape[:-1], -1)


def _product(x: jax.Array, w: jax.Array, *sizes: jax.Array) -> jax.Array:
    """Float32 (T, N); rows that no group has are 0."""
    if not sizes:
        groups, n, k = w.shape
        y = _dot("gmk,gnk->gmn", x.reshape(groups, -1, k), w)
        return y.reshape(-1, n)
    (counts,) = sizes
    ends = jnp.cumsum(jnp.maximum(counts, 0))
    row = jnp.arange(x.shape[0])[:, None]

    def add(y, group):
        # A group after the other: no sum may meet another group's NaN.
        matrix, end, count = group
        own = (row < end) & (row >= end - count)
        return jnp.where(own, _dot("mk,nk->mn", x, matrix), y), None

    start = jnp.zeros_like(x, shape=(x.shape[0], w.shape[1]))
    return jax.lax.scan(add, start, (w, ends, jnp.maximum(counts, 0)))[0]


def _dot(what: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(
        what, a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
