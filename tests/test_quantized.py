"""`quantized`: products of any function of JAX become MX, wherever they stand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_refused, assert_same, normal
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_mx

X, W = normal((32, 64)), normal((64, 64), 1) / 8
MESH = jax.sharding.Mesh(jax.devices()[:1], ("d",), axis_types=(AxisType.Auto,))
SCALE = 1.5


own_vjp = jax.custom_vjp(lambda dot, x, w, n: dot(x, w), nondiff_argnums=(0,))
own_vjp.defvjp(
    lambda dot, x, w, n: (dot(x, w), (x, w)),
    lambda dot, kept, dy: (SCALE * dot(dy, kept[1].T), dot(kept[0].T, dy), None),
)
own_jvp = jax.custom_jvp(lambda dot, x, w: dot(x, w), nondiff_argnums=(0,))


@own_jvp.defjvp
def _own_jvp(dot, primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return dot(x, w), SCALE * jnp.dot(dx, w) + jnp.dot(x, dw)


# A model of one place where a product may stand: of what multiplies, x and w.
PLACES = {
    "plain": lambda dot, x, w: dot(x, w),
    "jit": lambda dot, x, w: jax.jit(dot)(x, w),
    "checkpoint": lambda dot, x, w: jax.checkpoint(dot)(x, w),
    "policy": lambda dot, x, w: jax.checkpoint(
        dot, policy=jax.checkpoint_policies.nothing_saveable
    )(x, w),
    "scan": lambda dot, x, w: jax.lax.scan(
        lambda c, w: (jnp.tanh(dot(c, w)), c.sum()), x, jnp.stack([w, w.T])
    ),
    "scan of checkpoint": lambda dot, x, w: jax.lax.scan(
        jax.checkpoint(lambda c, w: (dot(c, w), None)), x, w[None], reverse=True
    )[0],
    "fori": lambda dot, x, w: jax.lax.fori_loop(0, 2, lambda _, c: jnp.tanh(dot(c, w)), x),
    "cond": lambda dot, x, w: jax.lax.cond(x[0, 0] > 0, dot, lambda x, w: dot(w[:32], w), x, w),
    "switch": lambda dot, x, w: jax.lax.switch(
        2, [lambda x: x, lambda x: x, lambda x: dot(x, w)], x
    ),
    "custom_vjp": lambda dot, x, w: own_vjp(dot, x, w, jnp.arange(3)),
    "shard_map": lambda dot, x, w: jax.shard_map(
        dot, mesh=MESH, in_specs=(P("d"), P()), out_specs=P("d")
    )(x, w),
}


@pytest.mark.parametrize("where", PLACES)
def test_it_enters(where):
    """Values and both gradients equal those that a model written with `jax_mx.matmul` gives."""
    mx = functools.partial(jax_mx.matmul, recipe="mxfp8")

    def loss(model, x, w):
        y = model(x, w)
        return sum((leaf**2).sum() for leaf in jax.tree.leaves(y)), y

    def run(model):
        return jax.jit(jax.value_and_grad(functools.partial(loss, model), (0, 1), has_aux=True))(
            X, W
        )

    want = run(functools.partial(PLACES[where], mx))
    got = run(jax_mx.quantized(functools.partial(PLACES[where], jnp.matmul), "mxfp8"))
    assert_same(got, want)
    if where == "plain":
        assert float(got[0][0]) != float(run(jnp.matmul)[0][0])


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("where", ["jit", "scan of checkpoint"])
def test_explicit_axes(where):
    """Where types say how arrays are split: by rows, and by columns of weights."""
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()).reshape(4, 2), ("d", "m"), axis_types=(AxisType.Explicit,) * 2
    )

    tall = jnp.concatenate([X, -X, 2 * X, X])  # whose shards hold whole blocks

    def run(transform, rows=("d",)):
        model = transform(functools.partial(PLACES[where], jnp.matmul))

        def loss(x, w):
            return sum((y**2).sum() for y in jax.tree.leaves(model(x, w)))

        x, w = (jax.device_put(a, s) for a, s in ((tall, P(*rows)), (W, P())))
        return jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w)

    with jax.set_mesh(mesh):
        got, plain = run(lambda f: jax_mx.quantized(f, "mxfp8")), run(lambda f: f)
        alone = run(lambda f: jax_mx.quantized(f, "mxfp8"), ())
    for a, b, c in zip(*map(jax.tree.leaves, (got, plain, alone)), strict=True):
        assert jax.typeof(a).sharding == jax.typeof(b).sharding
        assert (np.asarray(a) != np.asarray(b)).any()
        np.testing.assert_allclose(a, c, rtol=1e-4, atol=1e-4)  # sums in another order


def test_explicit_axes_that_split_blocks():
    """Eight rows a shard: the gradient of weights would sum over parts of blocks."""
    axes = (AxisType.Explicit,)
    with jax.set_mesh(jax.make_mesh((4,), ("d",), axis_types=axes)):
        x, w = jax.device_put(X, P("d")), jax.device_put(W, P())
        f = jax.jit(jax.grad(lambda w: (jax_mx.quantized(jnp.matmul, "mxfp8")(x, w) ** 2).sum()))
        with pytest.warns(UserWarning, match="stays in floats: .* blocks would not stay whole"):
            got = f(w)
        assert_same(got, jax.jit(jax.grad(lambda w: (jnp.matmul(x, w) ** 2).sum()))(w))


def test_while():
    def model(dot, x):
        return jax.lax.while_loop(lambda c: (c[0] < 2) & (dot(c[1], W).sum() < 1e9),
                                  lambda c: (c[0] + 1, dot(c[1], W)), (0, x))[1]  # fmt: skip

    mx = functools.partial(jax_mx.matmul, recipe="mxfp8")
    got = jax_mx.quantized(functools.partial(model, jnp.matmul), "mxfp8")(X)
    assert_same(got, model(mx, X))


def test_custom_jvp_keeps_its_derivative():
    got = jax_mx.quantized(functools.partial(own_jvp, jnp.matmul), "mxfp8")
    y, pull = jax.vjp(got, X, W)
    mx = functools.partial(jax_mx.matmul, recipe="mxfp8")
    assert_same(y, mx(X, W))
    dx, dw = pull(y)
    np.testing.assert_allclose(dx, mx(SCALE * y, W.T), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw, mx(X.T, y), rtol=1e-5, atol=1e-5)


def test_ragged():
    w, sizes = jnp.stack([W, W.T]), jnp.array([20, 12])
    got = jax_mx.quantized(lambda x, w: jax.lax.ragged_dot(x, w, sizes), "mxfp8")
    assert_same(got(X, w), jax_mx.ragged_dot(X, w, sizes, recipe="mxfp8"))


def test_where():
    def model(x, w):
        with jax.named_scope("attention"):
            x = x @ w
            x = jnp.einsum("hqk,hkd->hqd", x.reshape(1, 32, 64), w[None])[0]
        with jax.named_scope("mlp"):
            return jax.jit(lambda x: x @ w)(x)

    def by_hand(first, second, third, x=X, w=W):
        matmul = [jnp.matmul if r is None else functools.partial(jax_mx.matmul, recipe=r)
                  for r in (first, second, third)]  # fmt: skip
        return matmul[2](matmul[1](matmul[0](x, w)[None], w[None])[0], w)

    seen = []

    def batched(product):
        seen.append(product)
        return "mxfp4" if product.dimension_numbers[1][0] else product.scope == "mlp"

    for where, recipes in (
        (None, ("mxfp8", None, "mxfp8")),
        ("mlp", (None, None, "mxfp8")),
        ({"att": None, "": "mxfp4"}, (None, None, "mxfp4")),
        (batched, (None, "mxfp4", "mxfp8")),
    ):
        assert_same(jax_mx.quantized(model, "mxfp8", where=where)(X, W), by_hand(*recipes))
    scopes = {"attention", "attention/hqk,hkd->hqd", "mlp"}  # jnp.einsum names its own
    assert {product.scope for product in seen} == scopes
    assert (seen[0].op, seen[0].rhs.shape) == ("dot_general", (64, 64))


def test_what_stays():
    """Other arguments are constants; what MX cannot take is told once; our products stay."""

    def model(x, n, name, *, frozen):
        assert (n, name) == (40, "x")
        y = jax_mx.matmul(x, frozen) + (x[:, :n] @ W[:n]).astype(x.dtype)
        return {"y": y, "ints": x.astype(int) @ W.astype(int), "none": None}

    frozen = jax_mx.quantize(W, axis=0)
    got = jax_mx.quantized(model, "mxfp8")
    with pytest.warns(UserWarning, match="40 is|length is 40, not a multiple") as caught:
        for _ in range(2):
            assert_same(got(X, 40, "x", frozen=frozen), model(X, 40, "x", frozen=frozen))
    assert len(caught) == 1


def test_keys_of_a_recipe_may_be_traced():
    @jax.jit
    def gradient(key, w):
        recipe = jax_mx.mxfp4_backward(key)
        model = jax_mx.quantized(lambda w: (jax.jit(jnp.matmul)(X, w) ** 2).sum(), recipe)
        return jax.grad(model)(w)

    a, b = (gradient(jax.random.key(i), W) for i in range(2))
    assert not np.array_equal(a, b)


def test_each_product_rounds_by_a_key_of_its_own():
    recipe = jax_mx.mxfp4_backward(jax.random.key(0))
    dy = normal((32, 64), 3)

    def loss(multiply, w, v):
        return (jax.jit(multiply)(X, w) * dy).sum() + (jax.jit(multiply)(X, v) * dy).sum()

    got = jax.grad(jax_mx.quantized(functools.partial(loss, jnp.matmul), recipe), (0, 1))(W, W)
    for i in range(2):
        matmul = functools.partial(jax_mx.matmul, recipe=recipe.fold_in(i))
        want = jax.grad(lambda w, multiply=matmul: (multiply(X, w) * dy).sum())(W)
        np.testing.assert_array_equal(got[i], want)
    assert not np.array_equal(*got)


def test_vmap_and_a_whole_step():
    got = jax_mx.quantized(jnp.matmul, "mxfp8")
    xs = jnp.stack([X, 2 * X])
    assert_same(jax.vmap(got, (0, None))(xs, W), jnp.stack([got(x, W) for x in xs]))

    def step(w):
        return w - jax.grad(lambda w: (jax.checkpoint(jnp.matmul)(X, w) ** 2).sum())(w)

    mx = functools.partial(jax_mx.matmul, recipe="mxfp8")
    y = mx(X, W)
    np.testing.assert_allclose(jax_mx.quantized(step, "mxfp8")(W), W - mx(X.T, 2 * y), rtol=1e-5)


def test_messages():
    for call, error, sentence in (
        (lambda: jax_mx.quantized(jnp.matmul, "fp8"), ValueError, "quantized: recipe 'fp8' is"),
        (lambda: jax_mx.quantized(jnp.matmul, where=3), TypeError, "quantized: where must be None"),
        (lambda: jax_mx.quantized(jnp.matmul, where="("), ValueError, "no regular expression"),
        (lambda: jax_mx.quantized(jnp.matmul, where=lambda _: "fp8")(X, W), ValueError,
         "quantized: recipe 'fp8' is unknown"),
    ):  # fmt: skip
        assert_refused(call, error, sentence)


def test_a_derivative_that_closes_over_arrays():
    """As JAX has it: by arguments, and refused by what is closed over."""
    x, w = normal((64, 64)), normal((64, 64), 1)

    def own(w):
        function = jax.custom_vjp(lambda x, n: (x @ w, n))
        function.defvjp(lambda x, n: (function(x, n), None), lambda _, dy: (dy[0] @ w.T, None))
        return jax_mx.quantized(function, "mxfp8")

    got = jax.grad(lambda x: own(w)(x, 3)[0].sum())(x)
    want = jax.grad(lambda x: jax_mx.matmul(x, w, recipe="mxfp8").sum())(x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    with pytest.raises(Exception, match="closed-over value"):
        jax.grad(lambda w: own(w)(x, 3)[0].sum())(w)


def test_a_rule_that_closes_over_arrays_of_its_caller_gets_one_sentence():
    def loss(x, w, mask):
        masked = jax.custom_vjp(lambda x: jnp.where(mask, x @ w, 0))
        masked.defvjp(lambda x: (masked(x), None), lambda _, dy: (jnp.where(mask, dy, 0) @ w.T,))
        return masked(x).sum()

    args = normal((32, 64)), normal((64, 64), 1), jnp.arange(64) % 2 == 0
    for transform in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        with pytest.raises(NotImplementedError, match=r"closes over arrays .* as arguments"):
            transform(jax_mx.quantized(loss, "mxfp8"))(*args)


def test_expressions_without_a_scope_are_told_once():
    def model(x, w):
        with jax.named_scope("mlp"):
            x = x @ w
        with jax.named_scope("head"):
            return x @ w

    got = jax_mx.quantized(model, where={"mlpp": "mxfp8", "head": "mxfp8", "other": None})
    with pytest.warns(UserWarning) as told:
        got(X, W)
        got(X, W)
    (sentence,) = (str(w.message) for w in told)
    assert sentence == "quantized: 'mlpp' matches no scope of a product; there is 'head', 'mlp'"
    with pytest.warns(UserWarning, match="'mlp' matches no scope of a product; there is ''$"):
        jax_mx.quantized(jnp.matmul, "mxfp8", where="mlp")(X, W)


@pytest.mark.parametrize("answer", [np.bool_(True), np.bool_(False)])
def test_an_answer_may_be_numpys(answer):
    recipe = "mxfp8" if answer else "floats"
    y = jax_mx.quantized(jnp.matmul, "mxfp8", where=lambda _: answer)(X, W)
    np.testing.assert_allclose(y, jax_mx.matmul(X, W, recipe=recipe), rtol=1e-5, atol=1e-5)


@jax.custom_vjp
def layer(w, x):
    return x @ w


layer.defvjp(lambda w, x: (x @ w, (w, x)), lambda r, dy: (r[1].T @ dy, dy @ r[0].T))
AROUND = {
    "nothing": layer,
    "jit": jax.jit(layer),
    "checkpoint": jax.checkpoint(layer),
    "scan": lambda w, x: jax.lax.scan(lambda c, _: (layer(w, c), None), x, None, 2)[0],
}


@pytest.mark.parametrize("way", AROUND)
def test_traced_keys_reach_a_derivative_of_its_own(way):
    def loss(w):
        return (AROUND[way](w, X) ** 2).mean()

    @jax.jit
    def gradient(key, w):
        return jax.grad(jax_mx.quantized(loss, jax_mx.mxfp4_backward(key)))(w)

    got, floats = gradient(jax.random.key(0), W), jax.grad(loss)(W)
    assert 0.01 < jnp.linalg.norm(got - floats) / jnp.linalg.norm(floats) < 0.4


def test_rules_that_ask_what_moves():
    equinox = pytest.importorskip("equinox")

    @equinox.filter_custom_vjp
    def f(w, x):
        return x @ w

    f.def_fwd(lambda perturbed, w, x: (x @ w, None))
    f.def_bwd(lambda residuals, dy, perturbed, w, x: x.T @ dy)

    def loss(w):
        return (f(w, X) ** 2).mean()

    got, floats = jax.grad(jax_mx.quantized(loss, "mxfp8"))(W), jax.grad(loss)(W)
    assert 0.01 < jnp.linalg.norm(got - floats) / jnp.linalg.norm(floats) < 0.1
