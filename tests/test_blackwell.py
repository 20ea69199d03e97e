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


@executed
def test_every_number_of_rows():
    """From 0 to 300: rows behind the groups are zero, and no other group's row is written."""
    x, w = integers(rng(), (300, 160), MXFP8_E4M3), integers(rng(), (2, 136, 160), MXFP8_E4M3)
    own = numbers(axes=(1, 2), groups=ROWS)
    for m in range(0, 301, 7):
        sizes = [m // 3, m - m // 3]
        assert_equal(multiplied(own, tiled(x), tiled(w), sizes), wanted(x, w, sizes), f"{m} rows")


@executed
@each_format
def test_groups(format):
    x, w = integers(rng(), (300, 288), format), integers(rng(), (6, 136, 288), format)
    own = numbers(axes=(1, 2), groups=ROWS)
    for sizes in (
        [50] * 6,
        [0, 0, 300, 0, 0, 0],
        [1, 0, 127, 128, 1, 43],
        [0, 40, 0, 88, 0, 3],
        [0] * 6,
        [400, 9, 9, 9, 9, 9],
    ):
        assert_equal(multiplied(own, tiled(x), tiled(w), sizes), wanted(x, w, sizes), f"{sizes}")


@executed
@each_format
def test_sums(format):
    x, w = integers(rng(), (136, 640), format), integers(rng(), (260, 640), format)
    own = numbers(axes=(1, 1), groups=SUMS, align=128)
    for sizes in ([128, 0, 384, 128], [0, 0, 640, 0], [256, 128, 0, 0], [0] * 4):
        y = multiplied(own, tiled(x), tiled(w), sizes)
        assert_equal(y, wanted(x, w, sizes, sums=True), f"{sizes}")


@executed
@pytest.mark.parametrize("align", [32, 128])
def test_floats(align):
    x, w = (jnp.asarray(rng().integers(-3, 4, (rows, 320)), jnp.bfloat16) for rows in (136, 260))
    own = numbers(axes=(1, 1), groups=SUMS, align=align)
    sizes = [128, 0, 192, 0] if align == 32 else [128, 0, 128, 0]
    y = multiplied(own, x, w, sizes, reads_floats=True)
    assert_equal(y, wanted(x.mT, w.mT, sizes, sums=True), f"{sizes}")
