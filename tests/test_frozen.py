"""An `MXArray` among parameters stays what it is, or an error says what to do: never NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_mx
from tests.helpers import assert_refused

X = jax.random.normal(jax.random.key(0), (32, 64))
W = jax.random.normal(jax.random.key(1), (64, 96)) / 8
PARAMS = {"frozen": jax_mx.quantize(W, axis=0)}


def loss(params):
    y = jax_mx.matmul(X, params["frozen"], recipe="mxfp8")
    return ((y + params["bias"]) ** 2).mean()


def test_no_gradient_by_a_frozen_weight():
    params = {"frozen": PARAMS["frozen"], "bias": jnp.zeros(96)}
    square = jax_mx.quantize(jnp.ones((64, 64)), axis=0)
    grouped = jax_mx.quantize(W[None], axis=1)
    calls = (
        ("dot_general", lambda: jax.grad(loss)(params)),
        ("dot_general", lambda: jax.jit(jax.grad(jax.checkpoint(loss)))(params)),
        ("dot_general", lambda: jax.vmap(jax.grad(loss), ({"frozen": None, "bias": 0},))(
            params | {"bias": jnp.zeros((2, 96))})),
        ("dot_general", lambda: jax.grad(lambda q: jax_mx.matmul(q, W).sum())(jax_mx.quantize(X))),
        ("ragged_dot", lambda: jax.grad(
            lambda q: jax_mx.ragged_dot(X, q, jnp.array([32])).sum())(grouped)),
        ("mlp", lambda: jax.grad(
            lambda q: jax_mx.mlp(X, q, jnp.ones((32, 64))).sum())(square)),
        ("mlp", lambda: jax.grad(
            lambda q: jax_mx.mlp(X, jnp.ones((64, 128)), q).sum())(square)),
    )  # fmt: skip
    for op, call in calls:
        assert_refused(call, TypeError, f"{op}: an MXArray is among what is differentiated")


@pytest.mark.parametrize("optimizer", [
    optax.sgd(1e-2), optax.adamw(1e-2), optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)),
    optax.multi_transform({"t": optax.sgd(1e-2), "f": optax.set_to_zero()}, lambda p: {
        name: "t" if name == "bias" else "f" for name in p}),
])  # fmt: skip
def test_parts_go_through_optax(optimizer):
    params = {"frozen": PARAMS["frozen"], "bias": jnp.zeros(96), "none": None}
    trained, frozen = jax_mx.partition(params)
    assert len(jax.tree.leaves(trained)) == 1 and len(jax.tree.leaves(frozen)) == 2
    with jax.debug_nans(True), jax.numpy_dtype_promotion("standard"):  # as optax wants it
        of_trained = lambda trained: loss(jax_mx.combine(trained, frozen))  # noqa: E731
        before, gradient = jax.jit(jax.value_and_grad(of_trained))(trained)
        updates, _ = optimizer.update(gradient, optimizer.init(trained), trained)
        trained = optax.apply_updates(trained, updates)
    params = jax_mx.combine(trained, frozen)
    assert params["none"] is None
    assert float(loss(params)) < float(before)
    for leaf, was in zip(*map(jax.tree.leaves, (params["frozen"], PARAMS["frozen"])), strict=True):
        np.testing.assert_array_equal(leaf.view(jnp.uint8), was.view(jnp.uint8))


def test_other_derivatives_stay():
    """Beside a frozen weight x has its gradient, in every loop; weights that have floats, too."""
    stacked = jax_mx.stack([jax_mx.quantize(W[:, :64], axis=0)] * 2, 0)

    def scanned(x, stacked):
        body = jax.checkpoint(lambda c, q: (jax_mx.matmul(c, q, recipe="mxfp8"), None))
        return jax.lax.scan(body, x, stacked)[0].sum()

    assert jnp.isfinite(jax.jit(jax.grad(scanned))(X, stacked)).all()
    weight = jax_mx.MXFP8.quantize_weight(W)
    gradient = jax.grad(lambda w: jax_mx.matmul(X, w, recipe="mxfp8").sum())(weight)
    assert jnp.isfinite(gradient.floats).all()
