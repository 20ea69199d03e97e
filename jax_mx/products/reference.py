"""Products that read MX operands, in plain jnp: dequantized in float32, added up in float32."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_mx.formats.blocks import dequantize
from jax_mx.formats.formats import BLOCK
from jax_mx.products.ragged import clamped
from jax_mx.quantizing.facts.product_kernels import UNIT


def matmul(x: jax.Array, codes: jax.Array, scales: jax.Array, *sizes, plan: Any) -> list:
    """y (T, N) = x (T, passes * K) @ W (G, N, K)^T; several passes of x are added.

    A free W is (G, K, N), and y = x @ W; each pass then has zeros up to a multiple of `UNIT`
    columns.
    """
    w = _floats(codes, scales, plan.formats[-1])
    if plan.free:
        w = w.mT
    length = w.shape[-1]
    parts = x.astype(jnp.float32).reshape(x.shape[0], -1, length + plan.free * (-length % UNIT))
    return [_product(parts.sum(1)[:, :length], w, *sizes).astype(plan.dtype)]


def matmul_fp8(x_codes, x_scales, codes, scales, *sizes, plan: Any) -> list:
    """The same for an x (T, K) in MX; codes may lie in parts of K, (parts, N, K / parts)."""
    if plan.parts > 1:
        codes = codes.swapaxes(0, 1).reshape(1, codes.shape[1], -1)
    x = _floats(x_codes, x_scales, plan.formats[0])
    w = _floats(codes, scales, plan.formats[-1])
    return [_product(x, w, *sizes).astype(plan.dtype)]


def wgrad_fp8(x_codes, x_scales, codes, scales, sizes, *, plan: Any) -> list:
    """y (G, M, N): for each group x (M, K) @ W (N, K)^T over its part of K."""
    x = _floats(x_codes, x_scales, plan.formats[0])
    w = _floats(codes, scales, plan.formats[-1])
    return [_contracted(x.T, w.T, sizes).astype(plan.dtype)]


def wgrad(x, dy, *sizes, plan: Any) -> list:
    """y (G, K, N): for each group x (T, K)^T @ dy (T, N) over its rows, or (..., K, N) of all."""
    x, dy = x.astype(jnp.float32), dy.astype(jnp.float32)
    y = _contracted(x, dy, *sizes) if sizes else _dot("...tk,...tn->...kn", x, dy)
    return [y.astype(plan.dtype)]


def _contracted(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """For each group the product of its rows of x (T, M) and of w (T, N), (G, M, N)."""
    counts = clamped(sizes, x.shape[0])
    row = jnp.arange(x.shape[0])[:, None]

    def one(group):
        # Zeros in place of other groups' elements: no sum may meet their NaN.
        end, count = group
        in_group = (row < end) & (row >= end - count)
        return _dot("km,kn->mn", jnp.where(in_group, x, 0), jnp.where(in_group, w, 0))

    return jax.lax.map(one, (jnp.cumsum(counts), counts))


def _floats(codes: jax.Array, scales: jax.Array, format) -> jax.Array:
    """The dequantized floats of row-major codes and scales, float32."""
    blocks = codes.reshape(*scales.shape, BLOCK // format.codes_per_byte)
    floats = dequantize(blocks, scales[..., None], format, jnp.dtype(jnp.float32))
    return floats.reshape(*scales.shape[:-1], -1)


def _product(x: jax.Array, w: jax.Array, *sizes: jax.Array) -> jax.Array:
    """Float32 (T, N); rows that no group has are 0."""
    if not sizes:
        groups, n, k = w.shape
        y = _dot("gmk,gnk->gmn", x.reshape(groups, -1, k), w)
        return y.reshape(-1, n)
    counts = clamped(sizes[0], x.shape[0])
    ends = jnp.cumsum(counts)
    row = jnp.arange(x.shape[0])[:, None]

    def add(y, group):
        # A group after the other: no sum may meet another group's NaN.
        matrix, end, count = group
        in_group = (row < end) & (row >= end - count)
        return jnp.where(in_group, _dot("mk,nk->mn", x, matrix), y), None

    start = jnp.zeros_like(x, shape=(x.shape[0], w.shape[1]))
    return jax.lax.scan(add, start, (w, ends, counts))[0]


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(
        equation, a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
