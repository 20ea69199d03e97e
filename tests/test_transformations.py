"""JAX's transformations of products and layers, in which vmap is a loop and a scan its steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mx

SIZES, EXPERTS = np.array([20, 44], np.int32), np.arange(64, dtype=np.int32)[:, None] % 2
# Functions of x (64, 64), and their weights' shapes.
CALLS = {
    "matmul": (jax_mx.matmul, [(64, 64)]),
    "ragged_dot": (lambda x, w: jax_mx.ragged_dot(x, w, SIZES), [(2, 64, 64)]),
    "mlp": (jax_mx.mlp, [(64, 128), (64, 64)]),
    "mlp, a pair": (
        lambda x, a, b, c: jax_mx.mlp(x, (a, b), c, recipe="mxfp8_rows"), [(64, 64)] * 3
    ),
    "moe": (
        lambda x, a, b: jax_mx.moe(x, EXPERTS, np.ones((64, 1), np.float32), a, b),
        [(2, 64, 128), (2, 64, 64)],
    ),
}  # fmt: skip
some = pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.thorough] * (n in ("ragged_dot", "mlp", "moe")))
        for n in CALLS
    ],
)


def made(name, *lead):
    """The function, x and weights."""
    f, shapes = CALLS[name]
    rng = np.random.default_rng(0)
    x, *ws = (jnp.asarray(rng.normal(size=s), jnp.float32) / 8 for s in ((*lead, 64, 64), *shapes))
    return f, x, ws


def gradients(f, count):
    return jax.jit(jax.value_and_grad(lambda *args: jnp.tanh(f(*args)).sum(), range(count)))


def near(got, want):
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@some
def test_vmap_is_a_loop(name):
    """Each of x, weights and both is mapped."""
    f, xs, ws = made(name, 2)
    n, both = len(ws), [jnp.stack([w, -2 * w], 1) for w in ws]
    g = gradients(f, 1 + n)
    for axes, args in (
        ((0, *[None] * n), (xs, *ws)),
        ((None, *[1] * n), (xs[0], *both)),
        ((0, *[1] * n), (xs, *both)),
    ):
        got = jax.vmap(g, axes)(*args)
        for i in range(2):
            one = [a if d is None else a.take(i, d) for a, d in zip(args, axes, strict=True)]
            near(jax.tree.map(lambda a: a[i], got), g(*one))  # noqa: B023


@some
def test_a_scan_is_its_steps(name):
    """With what jax.checkpoint computes again."""
    f, x, ws = made(name)
    layers = [jnp.stack([w, -w]) for w in ws]

    def step(x, ws):
        return jnp.tanh(f(x, *ws))

    def scanned(x, *layers):
        return jax.lax.scan(lambda x, ws: (jax.checkpoint(step)(x, ws), None), x, layers)[0]

    def unrolled(x, *layers):
        return step(step(x, [w[0] for w in layers]), [w[1] for w in layers])

    near(*(gradients(g, 1 + len(ws))(x, *layers) for g in (scanned, unrolled)))


@some
def test_an_export_has_its_derivative(name):
    f, x, ws = made(name)
    loss = jax.jit(lambda *args: jnp.tanh(f(*args)).sum())
    exported = jax.export.export(loss, disabled_checks=jax_mx.DISABLE_EXPORT_CHECKS)(x, *ws)
    again = jax.export.deserialize(exported.serialize(vjp_order=1))
    every = range(1 + len(ws))
    near(*(jax.value_and_grad(g, every)(x, *ws) for g in (again.call, loss)))
