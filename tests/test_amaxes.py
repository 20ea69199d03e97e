"""The largest magnitudes of rows and of columns: one read of floats for windows that are rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from exact import assert_equal, of, on_hopper
from helpers import amaxes, poison_memory, stand_in

import jax_mx
from jax_mx.lowering import store


def check_amaxes(x, implementation="xla", whole=None):
    """For x (batch, rows, columns), or what is cut from an array that is passed instead."""
    poison_memory()
    cut = whole is not None
    f = functools.partial(amaxes, implementation=implementation)
    made = jax.jit((lambda a: f(a[1:].reshape(x.shape))) if cut else f)(whole if cut else x)
    bits = np.asarray(x).view(np.uint16).astype(np.uint32) << 16 & 0x7FFFFFFF
    for got, axis in zip(made, (-1, -2), strict=True):
        assert_equal(got, bits.max(axis), (x.shape, axis))


def any_bits(rng, shape):
    """bfloat16 of any bits: NaNs, infinities, zeros, subnormals."""
    x = rng.normal(size=shape).astype(jnp.bfloat16).view(np.uint16)
    few = rng.random(shape) < 0.02 / np.sqrt(np.prod(shape))
    few |= rng.random(shape) < 0.2 / shape[-1]
    x = np.where(few, rng.integers(0, 2**16, shape), x).astype(np.uint16)
    return x.view(jnp.bfloat16)


def test_amaxes_of_rows_and_columns():
    rng = np.random.default_rng(21)
    check_amaxes(any_bits(rng, (2, 64, 96)))
    x = any_bits(rng, (2, 3, 64, 96)).astype(np.float32)
    x = jnp.asarray(np.where(np.isnan(x), 1, x), jnp.bfloat16)
    both = functools.partial(jax_mx.quantize_both, window="row")
    made = jax.make_jaxpr(both)(x)
    assert str(made).count("mx_amaxes_of_both") == 1 and "reduce_max" not in str(made)
    for q, axis in zip(both(x), (-1, -2), strict=True):
        alone = jax_mx.quantize(x, axis=axis, transpose=axis == -2, window="row")
        for got, want in zip(jax.tree.leaves(q), jax.tree.leaves(alone), strict=True):
            assert_equal(got.view(jnp.uint8), np.asarray(want.view(jnp.uint8)))
    f = jax.vmap(jax.vmap(functools.partial(amaxes, implementation="xla")), 1)
    for got, axis in zip(f(x[:, :, None]), (-1, -2), strict=True):
        want = amaxes(x.reshape(-1, *x.shape[2:]), "xla")[-1 - axis]
        want = np.swapaxes(np.asarray(want).reshape(2, 3, 1, -1), 0, 1)
        assert_equal(got, want)


def test_amaxes_are_read_once(monkeypatch):
    """Where nothing is split among devices, of x as it lies; else by XLA."""
    monkeypatch.setattr(store, "obstacle", lambda *_: "")
    monkeypatch.setattr(store, "get", stand_in)
    f = functools.partial(jax_mx.quantize_both, window="row")
    x = jax.ShapeDtypeStruct((2, 3, 64, 96), jnp.bfloat16)
    text = jax.jit(f).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "(tensor<6x64x96xbf16>) -> (tensor<6x64xui32>, tensor<6x96xui32>)" in text
    assert "stablehlo.reduce" not in text
    text = jax.jit(functools.partial(f, implementation="xla")).trace(x).lower().as_text()
    assert "6x64x96" not in text


@on_hopper
@of("amaxes")
def test_the_kernel_of_amaxes(variant):
    assert variant.rows == 128
    rng = np.random.default_rng(22)
    for shape in [(1, 32, 32), (3, 32, 64), (2, 160, 544), (1, 4096, 1024), (5, 96, 1568)]:
        check_amaxes(any_bits(rng, shape), "cutedsl")
    x = any_bits(rng, (1, 64, 544))
    whole = np.concatenate([x[0, 0, :1], x.ravel()])
    check_amaxes(x, "cutedsl", whole)
