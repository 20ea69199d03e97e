"""jax.checkpoint keeps codes as they are, whatever its policy saves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits_equal

import jax_mx

RNG = np.random.default_rng(0)
# Codes of E4M3 from 256 on are what lax.reduce_precision takes for infinities.
LARGE = np.where(RNG.random((32, 64)) < 0.3, 448.0, 1.0) * np.sign(RNG.standard_normal((32, 64)))
X = jnp.asarray(LARGE, jnp.float32)
W = jnp.asarray(RNG.standard_normal((64, 64)), jnp.float32)
W8 = jnp.asarray(np.tile(LARGE, (2, 1)), jnp.float32)
SIZES = jnp.array([20, 12], jnp.int32)


def rms_norm(x, w):
    n = jax_mx.rms_norm(x, format="mxfp8_e4m3", floats=True)
    return jax_mx.matmul(n.quantized, w).sum() + n.floats.sum()


def gated(x, w):
    n = jax_mx.gated(x, format="mxfp8_e4m3", floats=True)
    return jax_mx.matmul(n.quantized, w[:32]).sum() + n.floats.sum()


def frozen(x, w):
    return jnp.sin(jax_mx.matmul(x, jax_mx.quantize(W8, axis=0))).sum() + w.sum()


def rows_of_codes(x, w):
    q = jax_mx.quantize(jax.lax.stop_gradient(x))
    return (
        jnp.sin(jax_mx.matmul(jax_mx.swapaxes(q[:16].reshape(2, 8, 64), 0, 1), w)).sum() + x.sum()
    )


def both_directions(x, w):
    q, t = jax_mx.quantize_both(jax.lax.stop_gradient(x))
    return (
        jnp.sin(jax_mx.matmul(q, w)).sum()
        * jnp.sin(x * t.dequantize(jnp.float32).reshape(x.shape)).sum()
    )


def quantized_weight(x, w):
    w = jax_mx.MXFP8.quantize_weight(w * 448)
    return jnp.sin(jax_mx.matmul(x, w)).sum() + jax_mx.mlp(x, w, w, activation="silu").sum()


def experts(x, w):
    pair = jnp.stack([w, -w])
    q = jax_mx.quantize(jnp.stack([W8, -W8]), axis=1)
    y = jax_mx.ragged_dot(jax_mx.fake_quantize(x), q, SIZES)
    return jnp.sin(y + jax_mx.ragged_dot(x, pair, SIZES)).sum()


@jax.custom_vjp
def of_a_user(x):
    return x.astype(jnp.float8_e4m3fn).astype(x.dtype)


def _fwd(x):
    q = x.astype(jnp.float8_e4m3fn)
    return q.astype(x.dtype), q


of_a_user.defvjp(_fwd, lambda q, dy: (dy * q.astype(dy.dtype),))


def own_custom_vjp(x, w):
    return jnp.sin(of_a_user(x) @ w).sum()


CALLS = [rms_norm, gated, frozen, rows_of_codes, both_directions, quantized_weight, experts]
CALLS += [own_custom_vjp]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("call", CALLS)
def test_everything_is_saved(call):
    """Within a scan, where JAX saves what each step gives, and jitted."""
    policy = jax.checkpoint_policies.everything_saveable

    def loss(f):
        def step(total, x):
            return total + f(x[0], x[1]), None

        return lambda x, w: jax.lax.scan(step, 0.0, (x[None], w[None]))[0]

    want = jax.jit(jax.grad(loss(call), (0, 1)))(X, W)
    got = jax.jit(jax.grad(loss(jax.checkpoint(call, policy=policy)), (0, 1)))(X, W)
    for one, other in zip(got, want, strict=True):
        assert bool(jnp.isfinite(other).all())
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn"]
)
def test_no_code_changes(dtype):
    float_type = jnp.dtype(dtype)
    bits = jnp.arange(256 if jnp.finfo(float_type).bits == 8 else 16, dtype=jnp.uint8)
    codes = np.asarray(bits).view(np.uint8)
    info = jnp.finfo(float_type)
    x = jnp.asarray(codes.view(float_type) if info.bits == 8 else codes.astype(float_type))
    same = jax.jit(lambda x: jax.lax.reduce_precision(x, info.nexp, info.nmant))(x)
    assert_bits_equal(np.asarray(same).view(np.uint8), np.asarray(x).view(np.uint8))


def test_others_are_reduced_as_before():
    reduce = jax.lax.reduce_precision
    assert float(reduce(jnp.float32(1.2345), 8, 7)) == 1.234375
    assert float(reduce(jnp.asarray(1.75, jnp.float8_e5m2), 5, 1)) == 2.0
