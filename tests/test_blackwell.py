"""Products on Blackwell's tensor cores: what serves what, and the kernel, executed on the CPU."""

import functools

import jax
import jax.numpy as jnp
import mosaic
import numpy as np
import pytest
from exact import assert_equal, changed, integers, wanted

import jax_mx
from jax_mx.facts.formats import MXFP4_E2M1, MXFP8_E4M3, MXFP8_E5M2
from jax_mx.facts.layouts import BLOCKED_128X4
from jax_mx.products.contraction import ROWS, SUMS, Contraction, Numbers, Served
from jax_mx.products.implementations import IMPLEMENTATIONS

executed = pytest.mark.skipif(bool(mosaic.missing()), reason=mosaic.missing())
MX = [MXFP8_E4M3, MXFP8_E5M2, MXFP4_E2M1]
each_format = pytest.mark.parametrize("format", MX, ids=lambda f: f.name)


def rng():
    return np.random.default_rng(5)


def tiled(q):
    return q.with_scales_in(BLOCKED_128X4)


def numbers(dtype="float32", axes=(1, 1), batch=(), **how):
    left, right = axes
    return Numbers(((left,), (right,)), (batch, batch), np.dtype(dtype), **how)


@functools.cache
def compiled(own, reads_floats, **params):
    def product(lhs, rhs, sizes):
        served = Served("tcgen05", reads_floats=reads_floats)
        return IMPLEMENTATIONS["tcgen05"].compute(Contraction(own, lhs, rhs, sizes), served)

    return mosaic.executed(product, **params)


def multiplied(own, lhs, rhs, sizes=None, reads_floats=False, **params):
    """What the kernel gives."""
    sizes = None if sizes is None else jnp.asarray(sizes, jnp.int32)
    return compiled(own, reads_floats, **params)(lhs, rhs, sizes)


# ---- dense ---
@executed
@pytest.mark.parametrize("shape", [(1, 8, 32), (128, 256, 128), (129, 260, 288), (300, 300, 544)])
@each_format
def test_dense_products_are_exact(format, shape):
    m, n, k = shape
    x, w = (integers(rng(), (rows, k), format) for rows in (m, n))
    y = multiplied(numbers(), tiled(x), tiled(w))
    assert_equal(y, wanted(x, w), f"{format.name} {shape}")
