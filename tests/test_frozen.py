"""An `MXArray` among parameters stays what it is, or an error says what to do: never NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_refused, normal

import jax_mx

X, W = normal((32, 64)), normal((64, 96), 1) / 8
PARAMS = {"frozen": jax_mx.quantize(W, axis=0)}


def loss(params):
    y = jax_mx.matmul(X, params["frozen"], recipe="mxfp8")
    return ((y + params["bias"]) ** 2).mean()


def unread(params):
    """A loss that multiplies no frozen weight: JAX makes its zeros, which E8M0 lacks."""
    return (params["bias"] ** 2).mean()


def by_scales(q):
    """A gradient by the scales of an array that the constructor makes of them."""
    make = lambda s: jax_mx.MXArray(q.values, s, q.format, q.axis, q.scale_layout)  # noqa: E731
    of_scales = lambda s: loss({"frozen": make(s), "bias": 0.0})  # noqa: E731
    return jax.grad(of_scales)(q.scales)


@pytest.mark.parametrize("f", [loss, unread])
@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp4_e2m1"])
def test_no_gradient_by_a_frozen_weight(f, format):
    """Every way to ask is refused before the function runs, and debug_nans finds no zeros."""
    params = {"frozen": jax_mx.quantize(W, format, axis=0), "bias": jnp.zeros(96)}
    batch = params | {"bias": jnp.zeros((2, 96))}
    calls = (
        lambda: jax.grad(f, allow_int=True)(params),
        lambda: jax.jit(jax.grad(jax.checkpoint(jax.jit(f)), allow_int=True))(params),
        lambda: jax.vmap(jax.grad(f, allow_int=True), ({"frozen": None, "bias": 0},))(batch),
        lambda: jax.vjp(f, params),
        lambda: jax.linearize(f, params),
    )
    if format == "mxfp8_e4m3":
        calls += (lambda: by_scales(params["frozen"]),)
    with jax.debug_nans(True):
        for call in calls:
            assert_refused(call, TypeError, "an MXArray is among what is differentiated")


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp6_e2m3", "mxfp4_e2m1"])
@pytest.mark.parametrize("take", [jax.grad, jax.value_and_grad, jax.jacrev])
def test_every_plain_derivative_is_refused(format, take):
    """By JAX itself where codes are integers."""
    params = {"frozen": jax_mx.quantize(W, format, axis=0), "bias": jnp.zeros(96)}
    sentence = "inputs.* got uint8|(tangent|input) dtype"
    if format == "mxfp8_e4m3":
        sentence = "an MXArray is among what is differentiated"
    with pytest.raises(TypeError, match=sentence):
        take(loss)(params)


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


def test_parts_do_not_overlap():
    """No value is dropped in silence; a frozen weight beside floats is one, too."""
    assert jax_mx.combine({"a": None, "b": None}, {"a": 2.0, "b": None}) == {"a": 2.0, "b": None}
    for both in ({"a": 2.0}, {"a": {"b": 2.0}}, {"a": PARAMS["frozen"]}):
        sentence = "combine: both trees have a value at ['a']"
        assert_refused(lambda both=both: jax_mx.combine({"a": 1.0}, both), ValueError, sentence)
    assert_refused(lambda: jax_mx.combine(1.0, 2.0), ValueError, "at the root")


def test_no_moments_of_a_frozen_weight():
    """Zeros of scales would be NaN: optax may not make them, in a program or out of one."""
    params = {"frozen": PARAMS["frozen"], "bias": jnp.zeros(96)}
    several = optax.MultiSteps(optax.sgd(1e-2), 2).gradient_transformation()
    for optimizer in (optax.adamw(1e-2), optax.rmsprop(1e-2), optax.lbfgs(), several):
        for init in (optimizer.init, jax.jit(optimizer.init)):
            sentence = "optax goes over an MXArray, and codes and scales"
            assert_refused(lambda init=init: init(params), TypeError, sentence)


def test_optax_may_call_what_takes_a_frozen_weight():
    """A line search calls the loss; and a mask that names the weight keeps optax from it."""
    mask = {"frozen": False, "bias": True}
    params = {"frozen": PARAMS["frozen"], "bias": jnp.zeros(96)}
    optax.masked(optax.adam(1e-2), mask).init(params)
    of_bias = jax.jit(lambda bias, frozen: loss({"frozen": frozen, "bias": bias}))
    with jax.numpy_dtype_promotion("standard"):
        solver, bias, more = optax.lbfgs(), params["bias"], {"frozen": params["frozen"]}
        value, gradient = jax.value_and_grad(of_bias)(bias, **more)
        arguments = {"value": value, "grad": gradient, "value_fn": of_bias, **more}
        updates, _ = solver.update(gradient, solver.init(bias), bias, **arguments)
    assert of_bias(bias + updates, **more) < value


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
    assert jax.tree.structure(gradient) == jax.tree.structure(weight)


def test_equinox_frozen():
    """Its standard loop says what to do, and its own way to part a model trains."""
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        w: jax_mx.MXArray
        b: jax.Array

    model = Model(PARAMS["frozen"], jnp.zeros(96))
    of_model = lambda m: loss({"frozen": m.w, "bias": m.b})  # noqa: E731
    sentence = "an MXArray is among what is differentiated"
    assert_refused(lambda: eqx.filter_grad(of_model)(model), TypeError, sentence)
    is_frozen = lambda x: isinstance(x, jax_mx.MXArray)  # noqa: E731
    trained, frozen = eqx.partition(model, eqx.is_inexact_array, is_leaf=is_frozen)
    gradient = jax.grad(lambda t: of_model(eqx.combine(t, frozen, is_leaf=is_frozen)))(trained)
    assert gradient.w is None and jnp.isfinite(gradient.b).all()
