"""Calls that round several arrays at random by one key: each array has bits of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mx

# 2 I = D: both gradients have one width.
T, D, I, FP4 = 32, 64, 32, "mxfp4_e2m1"  # noqa: E741
HALF = jnp.concatenate([jnp.eye(I), jnp.zeros((I, I))])  # (D, I): gates are x's first half
W1 = jnp.concatenate([HALF, jnp.zeros((D, I))], 1)
B1 = jnp.concatenate([jnp.zeros(I), jnp.ones(I)])  # ups are 1
W2 = 1.5 * HALF.T
IDS, ONES = jnp.zeros((T, 1), jnp.int32), jnp.ones((T, 1))
SIZES = jnp.array([T], jnp.int32)


def mlp(x, recipe):
    return jax_mx.mlp(x, W1, W2, b_gate_up=B1, activation="bilinear", recipe=recipe)


def mlp_of_a_pair(x, recipe):
    pair, biases = tuple(jnp.split(W1, 2, 1)), tuple(jnp.split(B1, 2))
    return jax_mx.mlp(x, pair, W2, b_gate_up=biases, activation="bilinear", recipe=recipe)


def moe(x, recipe):
    options = {"b_gate_up": B1[None], "activation": "bilinear", "recipe": recipe}
    return jax_mx.moe(x, IDS, ONES, W1[None], W2[None], **options)


def ragged_dot(x, recipe):
    return jax_mx.ragged_dot(x, W1[None], SIZES, recipe=recipe)


def matmul(x, recipe):
    return jax_mx.matmul(x, W1, recipe=recipe)


@pytest.mark.parametrize("layer", [mlp, mlp_of_a_pair, moe])
def test_the_mean_of_a_gradient_is_right_where_two_arrays_have_one_width(layer):
    """5 lies in the middle between 4 and 6: with the same bits twice the mean is 8, not 7.5."""
    x, dy = jnp.ones((T, D)), jnp.full((T, D), 5.0)

    def dx(key):
        rounded = jax_mx.Product(rounding=jax_mx.Stochastic(key))
        recipe = jax_mx.Recipe(FP4, FP4, FP4, dgrad=rounded)
        return jax.vjp(lambda x: layer(x, recipe), x)[1](dy)[0][:, :I]

    keys = jax.random.split(jax.random.key(0), 60)
    drawn = np.asarray(jax.jit(lambda keys: jax.lax.map(dx, keys))(keys), np.float64)
    error = drawn.mean((1, 2)).std() / len(keys) ** 0.5
    assert abs(drawn.mean() - 7.5) < 6 * error < 0.1


@pytest.mark.parametrize("call", [matmul, ragged_dot, mlp, mlp_of_a_pair, moe])
def test_no_key_is_used_twice(call):
    """JAX's checker of keys agrees."""
    both = jax.grad(lambda x, recipe: call(x, recipe).sum())
    with jax.debug_key_reuse(True):
        jax.jit(both)(jnp.ones((T, D)), jax_mx.mxfp4_backward(jax.random.key(0)))


def test_two_directions_of_one_array_have_bits_of_their_own():
    """dgrad and wgrad of one product read other bits, with one `Stochastic` for both."""
    rounding = jax_mx.Product(FP4, rounding=jax_mx.Stochastic(jax.random.key(1)))
    recipe = jax_mx.Recipe(dgrad=rounding, wgrad=rounding)
    square = jnp.full((32, 32), 5.0)

    def gradients(x, w):
        return jax.vjp(lambda x, w: jax_mx.matmul(x, w, recipe=recipe), x, w)[1](square)

    dx, dw = gradients(jnp.eye(32), jnp.eye(32))  # dy, rounded in each direction
    assert {*np.unique(dx)} == {*np.unique(dw)} == {4, 6}
    assert 0.3 < np.mean(np.asarray(dx) == np.asarray(dw).T) < 0.7
