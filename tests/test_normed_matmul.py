"""`normed_matmul` is the lines that it stands for: values, derivatives, vmap and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits_equal

import jax_mx

SHAPES = [  # x, N, whether kernels may serve it
    ((1, 256), 96, True),
    ((2, 2, 128), 64, True),
    ((384,), 10, True),
    ((9, 256), 32, False),
    ((2, 96), 32, False),
]


def lines(x, residual, weight, w):
    floats, _, total, _ = jax_mx.rms_norm(x, weight, eps=1e-5, residual=residual)
    return jax_mx.einsum("...k,nk->...n", floats, w, recipe="bf16"), total


def function(w):
    return lambda *args: jax_mx.normed_matmul(*args, w, eps=1e-5)


def operands(shape, n, format="mxfp8_e4m3"):
    rng = np.random.default_rng(0)
    x, residual = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for _ in "ab")
    weight = jnp.asarray(rng.normal(size=shape[-1:]), jnp.bfloat16)
    w = jnp.asarray(rng.normal(size=(n, shape[-1])), jnp.bfloat16)
    return (x, residual, weight), jax_mx.quantize(w, format)


@pytest.mark.parametrize(("shape", "n", "served"), SHAPES)
def test_it_is_the_lines_that_it_stands_for(shape, n, served):
    args, w = operands(shape, n, "mxfp4_e2m1" if n == 64 else "mxfp8_e4m3")
    f = function(w)
    assert ("mx_normed" in str(jax.make_jaxpr(f)(*args))) == served
    want = lines(*args, w)
    for got, its in zip(jax.jit(f)(*args), want, strict=True):
        assert_bits_equal(got, its)

    def loss(f):
        return jax.grad(lambda *args: sum(y.astype(jnp.float32).sum() for y in f(*args)), (0, 1, 2))

    grads = loss(f)(*args), loss(lambda *args: lines(*args, w))(*args)
    for got, its in zip(*grads, strict=True):
        assert_bits_equal(got, its)


@pytest.mark.parametrize("batch", [2, 3])  # whose rows together have a kernel, and have none
def test_a_batch_is_more_rows(batch):
    args, w = operands((batch, 2, 128), 64)
    f = function(w)
    for got, its in zip(jax.vmap(f, (0, 0, None))(*args), f(*args), strict=True):
        assert_bits_equal(got, its)
    leaves = [jnp.stack([w.values] * batch), jnp.stack([w.scales] * batch)]
    many = jax.tree.unflatten(jax.tree.structure(w), leaves)
    got = jax.vmap(lambda x, r, w: function(w)(x, r, args[2]))(*args[:2], many)
    assert_bits_equal(got[0], function(w)(*args)[0])


def test_what_it_refuses():
    (x, residual, weight), w = operands((2, 128), 64)
    with pytest.raises(ValueError, match="residual has the shape"):
        function(w)(x, residual[:1], weight)
    with pytest.raises(ValueError, match="eps must be"):
        jax_mx.normed_matmul(x, residual, weight, w, eps=-1.0)
