"""qwix chooses modules of flax models by their paths, and their products become MX."""

import copy
import re
import textwrap
import typing
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal

import jax_mx

qwix = pytest.importorskip("qwix")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from flax import linen as nn
    from flax import nnx

    from jax_mx.adapters.qwix import Provider

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

X = normal((32, 64))


class Linen(nn.Module):
    """Weights on either side, a product without one, and a router."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(64, name="up")(x)
        w = self.param("left", nn.initializers.normal(), (96, 64))
        x = jnp.einsum("fk,bk->bf", w, x)  # the weight comes first
        x = x @ x.T @ x  # no weight at all
        return nn.Dense(8, name="router")(x)


class Nnx(nnx.Module):
    """Two layers that MX takes, one whose contracted length it does not."""

    def __init__(self, rngs):
        self.up = nnx.Linear(64, 128, rngs=rngs)
        self.out = nnx.Linear(128, 8, rngs=rngs)
        self.odd = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.odd(self.out(nnx.relu(self.up(x))))


def bits(x):
    return np.asarray(x).view(np.uint32)


def test_linen_by_path():
    recipe = jax_mx.Recipe("mxfp4_e2m1", "mxfp8_e4m3")  # which tells the weight from the other
    model = Linen()
    params = model.init(jax.random.key(1), X)
    provider = Provider({"router": None, ".*": recipe})
    got = qwix.quantize_model(model, provider).apply(params, X)
    p = params["params"]
    x = jax_mx.matmul(X, p["up"]["kernel"], recipe=recipe) + p["up"]["bias"]
    x = jax_mx.einsum("bk,fk->bf", x, p["left"], recipe=recipe)
    x = x @ x.T @ x
    want = x @ p["router"]["kernel"] + p["router"]["bias"]
    np.testing.assert_array_equal(bits(got), bits(want))
    assert not provider.get_unused_rules()


def test_nnx_trains_and_what_is_left_is_told_once():
    model = Nnx(nnx.Rngs(0))
    with pytest.warns(UserWarning, match=r"in 'odd' stays in floats: dot_general: the contracted"):
        quantized = qwix.quantize_model(model, Provider({".*": "mxfp8"}), X)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        y = quantized(X)

    def by_hand(model):
        h = X
        for layer in (model.up, model.out):
            h = jax_mx.matmul(h, layer.kernel[...], recipe="mxfp8") + layer.bias[...]
            h = nnx.relu(h) if layer is model.up else h
        return h @ model.odd.kernel[...] + model.odd.bias[...]

    np.testing.assert_array_equal(bits(y), bits(by_hand(model)))

    def gradient(f, model):
        return nnx.grad(lambda model: (f(model) ** 2).mean())(model)["up"]["kernel"][...]

    got, want = gradient(lambda model: model(X), quantized), gradient(by_hand, model)
    np.testing.assert_array_equal(bits(got), bits(want))


def test_dot_general_with_the_weight_first_and_ragged():
    class Left(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.normal(), (3, 64, 48))
            experts = self.param("experts", nn.initializers.normal(), (2, 48, 8))
            y = jax.lax.dot_general(w[0], x, (((0,), (1,)), ((), ())))  # cut: w no more
            z = jax.lax.dot_general(w, jnp.stack([x] * 3), (((1,), (2,)), ((0,), (0,))))
            return y, z, jax.lax.ragged_dot(x[:, :48], experts, jnp.array([20, 12]))

    recipe = jax_mx.Recipe("mxfp4_e2m1", "mxfp8_e4m3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # 48 is no multiple of 32
        model = qwix.quantize_model(Left(), Provider({".*": recipe}))
        params = model.init(jax.random.key(1), X)
        _, z, _ = model.apply(params, X)
    w = params["params"]["w"]
    want = jax_mx.einsum("gbk,gkf->gbf", jnp.stack([X] * 3), w, recipe=recipe).mT
    np.testing.assert_array_equal(bits(z), bits(want))


def test_the_documents_line():
    text = (Path(__file__).parents[1] / "docs" / "migrating.md").read_text()
    block = re.search(r"### qwix\n\n((?:    .*\n|\n)+)", text)
    names = {}
    exec(textwrap.dedent(block[1]), names)
    model = names["model"]
    params = model.init(jax.random.key(0), X)
    up, down = (params["params"][f"layers_{i}"]["kernel"] for i in (0, 2))
    want = nn.relu(jax_mx.matmul(X, up, recipe="mxfp8")) @ down
    np.testing.assert_array_equal(bits(model.apply(params, X)), bits(want))


def test_messages():
    with pytest.raises(ValueError, match="recipe 'fp8' is unknown"):
        Provider({".*": "fp8"})
    with pytest.raises(TypeError, match="rules must map patterns to recipes, got 'mxfp8'"):
        Provider("mxfp8")
    with pytest.raises(ValueError, match="is no regular expression"):
        Provider({"(": "mxfp8"})


PRODUCTS = {
    "at": lambda x, w: x @ w,
    "at, the weight first": lambda x, w: (w.T @ x.T).T,
    "a method": lambda x, w: x.dot(w),
    "matmul": lambda x, w: jnp.matmul(x, w),
    "dot": lambda x, w: jnp.dot(x, w),
    "matmul, the weight first": lambda x, w: jnp.matmul(w.T, x[None].mT)[0].T,
    "dot, three dimensions": lambda x, w: jnp.dot(x[None], w)[0],
    "a row": lambda x, w: jnp.stack([row @ w for row in x]),
    "lax.dot": lambda x, w: jax.lax.dot(x, w),
    "tensordot": lambda x, w: jnp.tensordot(x, w, 1),
    "jit": lambda x, w: jax.jit(lambda x: x @ w)(x),
    "checkpoint": lambda x, w: jax.checkpoint(jnp.matmul)(x, w),
    "map": lambda x, w: jax.lax.map(lambda rows: rows @ w, x.reshape(4, 8, 64)).reshape(32, 48),
}


@pytest.mark.parametrize("way", PRODUCTS)
def test_every_way_of_a_product_whoever_was_first(way):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return PRODUCTS[way](x, self.param("w", nn.initializers.normal(), (64, 48)))

    def computed(model):
        if "first" not in way:  # an array does not say whose transpose it is
            yield model.apply(params, X)
        yield jax.jit(model.apply)(params, X)

    model = Layer()
    recipe = jax_mx.Recipe("mxfp8_e4m3", "mxfp8_e4m3")
    params = {"params": {"w": normal((64, 48), seed=1)}}
    floats = X @ params["params"]["w"]
    want = jax_mx.matmul(X, params["params"]["w"], recipe=recipe)
    quantized = qwix.quantize_model(model, Provider({".*": recipe}))
    for _ in range(2):  # JAX keeps what it traced, for either
        for y in computed(quantized):
            np.testing.assert_allclose(y, want, atol=1e-6 * float(jnp.abs(want).max()))
        for y in (*computed(model), X @ params["params"]["w"]):
            np.testing.assert_allclose(y, floats, atol=1e-6 * float(jnp.abs(floats).max()))


def test_a_function_of_jnp_by_another_name_stays_in_floats():
    matmul, inner = jnp.matmul, jnp.inner

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.normal(), (64, 56))
            return matmul(x, w), inner(x, self.param("v", nn.initializers.normal(), (56, 64)))

    w = normal((64, 56), seed=1)  # no other test has traced these shapes
    params = {"params": {"w": w, "v": w.T}}
    with pytest.warns(UserWarning, match="matches no path"):
        got = qwix.quantize_model(Layer(), Provider({".*": "mxfp8"})).apply(params, X)
    want = jnp.einsum("bk,kn->bn", X, w)
    for y in (*got, X @ w, jnp.inner(X, w.T)):  # nobody else meets a trace in MX
        np.testing.assert_allclose(y, want, atol=1e-6 * float(jnp.abs(want).max()))


class Wrapped(nnx.Module):
    """A layer within another transformation."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x):
        return jax.nn.relu(self.linear(x))


class Lora(nnx.Module):
    """Two parameters of a low rank beside a layer's own."""

    def __init__(self, rngs):
        self.linear = nnx.LoRALinear(64, 64, lora_rank=32, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


class Transformed(nnx.Module):
    """One transformation of nnx around a layer."""

    def __init__(self, transform, rngs):
        self.layer, self.transform = Wrapped(rngs), transform

    def __call__(self, x):
        return self.transform(lambda layer, x: layer(x))(self.layer, x)


@pytest.mark.parametrize("way", ["lora", "remat", "jit", "scan"])
def test_a_model_that_runs_eagerly_transforms_inside(way):
    def scanned(f):
        def once(layer, x):
            y, _ = nnx.scan(
                lambda carry, _: (f(layer, carry), None), in_axes=(nnx.Carry, 0), length=1
            )(x, jnp.zeros(1))
            return y

        return once

    transforms = {"remat": nnx.remat, "jit": nnx.jit, "scan": scanned}
    model = Lora(nnx.Rngs(0)) if way == "lora" else Transformed(transforms[way], nnx.Rngs(0))
    quantized = qwix.quantize_model(model, Provider({".*": "mxfp8"}), X)
    y, floats = quantized(X), model(X)
    off = jnp.linalg.norm(y - floats) / jnp.linalg.norm(floats)
    assert 0 < off < 0.1
    np.testing.assert_array_equal(bits(nnx.jit(lambda m, x: m(x))(quantized, X)), bits(y))


def test_a_pattern_without_a_module_is_told_once():
    model = Linen()
    params = model.init(jax.random.key(1), X)
    rules = {"layer_0": "mxfp8", "other": None, "up": "mxfp8"}
    quantized = qwix.quantize_model(model, Provider(rules))
    told = r"'layer_0' matches no path of a module .*; there is '', 'router', 'up'"
    with pytest.warns(UserWarning, match=told) as warned:
        quantized.apply(params, X)
        quantized.apply(params, X)
    assert len([w for w in warned if "matches no path" in str(w.message)]) == 1


def test_a_norms_scale_is_no_product_of_a_matrix():
    class Norm(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.einsum("...k,k->...k", x, self.param("scale", nn.initializers.ones, (64,)))

    model = qwix.quantize_model(Norm(), Provider({"no": None, ".*": "mxfp8"}))
    params = {"params": {"scale": normal((64,))}}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        np.testing.assert_array_equal(model.apply(params, X), X * params["params"]["scale"])


@jax.checkpoint
def by_checkpoint(x, w):
    return jnp.tanh(x @ w)


@jax.jit
def by_jit(x, w):
    return jnp.tanh(x @ w)


def by_scan(x, w):
    return jax.lax.scan(scanned, w, x[None])[1][0]


def scanned(w, x):
    return w, jnp.tanh(x @ w)


class Helped(nn.Module):
    """A layer whose product stands in a function that JAX traces once."""

    f: typing.Any

    @nn.compact
    def __call__(self, x):
        return self.f(x, self.param("w", nn.initializers.lecun_normal(), (64, 64)))


class Routed(nn.Module):
    """Two layers, one of which a rule leaves alone."""

    f: typing.Any

    @nn.compact
    def __call__(self, x):
        return Helped(self.f, name="router")(Helped(self.f, name="mlp")(x))


@pytest.mark.parametrize("f", [by_checkpoint, by_jit, by_scan])
def test_a_trace_is_of_one_rule_and_one_provider(f):
    model = Routed(f)
    params = model.init(jax.random.key(0), X)
    up, router = (params["params"][name]["w"] for name in ("mlp", "router"))
    models: dict[str | None, nn.Module] = {None: model}
    for recipe in ("mxfp8", "mxfp4"):
        models[recipe] = qwix.quantize_model(model, Provider({"router": None, ".*": recipe}))
    for recipe in (None, "mxfp8", "mxfp4", None, "mxfp8"):
        y = X @ up if recipe is None else jax_mx.matmul(X, up, recipe=recipe)
        want = jnp.tanh(jnp.tanh(y) @ router)
        for apply in (models[recipe].apply, jax.jit(models[recipe].apply)):
            np.testing.assert_allclose(apply(params, X), want, rtol=1e-4, atol=1e-5)


def test_two_copies_of_a_model_of_nnx():
    class Remat(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(64, 64, rngs=nnx.Rngs(0))

        @nnx.remat
        def __call__(self, x):
            return self.linear(x)

    model = Transformed(lambda f: f, nnx.Rngs(0))
    model.layer = Remat()
    kernel = model.layer.linear.kernel[...]
    copies = {r: qwix.quantize_model(model, Provider({".*": r}), X) for r in ("mxfp8", "mxfp4")}
    for recipe, quantized in copies.items():
        want = jax_mx.matmul(X, kernel, recipe=recipe)
        np.testing.assert_allclose(quantized(X), want, rtol=1e-5, atol=1e-5)


FORMS = {
    "transposed": lambda x, w, v: x @ w.T.astype(x.dtype),
    "cast": lambda x, w, v: x.astype("bfloat16") @ w.astype("bfloat16").T,
    "another shape": lambda x, w, v: x @ w.reshape(64, 64),
    "two of a shape": lambda x, w, v: (x @ w.astype("bfloat16")) * (x @ v.astype("bfloat16")),
}


@pytest.mark.parametrize("way", FORMS)
def test_forms_of_a_parameter_are_the_weight_however_jax_transforms(way):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            w, v, u = (self.param(name, nn.initializers.normal(), (64, 64)) for name in "wvu")
            return FORMS[way](x.astype("bfloat16"), w, v).astype(jnp.float32) + 0 * u[0]

    params = {"params": {name: normal((64, 64), i) / 8 for i, name in enumerate("wvu")}}
    model = qwix.quantize_model(Layer(), Provider({".*": "mxfp8"}))

    def of(model):
        loss = lambda p: (model.apply(p, X) ** 2).mean()  # noqa: E731
        with jax.numpy_dtype_promotion("standard"):
            takes = jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))
            gradients = [take(params) for take in takes]
            return [g["params"]["w"] for g in gradients], model.apply(params, X)

    (first, *others), y = of(model)
    (floats, *_), want = of(Layer())
    for got, exact in ((first, floats), (y, want)):
        assert 0.01 < jnp.linalg.norm(got - exact) / jnp.linalg.norm(exact) < 0.12
    for gradient in others:
        np.testing.assert_allclose(gradient, first, rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_an_activation_with_a_parameters_shape_is_none(transform):
    class Scores(nn.Module):
        @nn.compact
        def __call__(self, x):
            q = x @ self.param("q", nn.initializers.normal(), (64, 64))
            return q @ q.T

    class Left(nn.Module):
        @nn.compact
        def __call__(self, x):
            return self.param("w", nn.initializers.normal(), (64, 64)) @ x

    recipe = jax_mx.Recipe("mxfp8_e4m3", "mxfp4_e2m1")
    x, w = normal((64, 64)), normal((64, 64), 1)
    for layer, name in ((Scores, "q"), (Left, "w")):
        model = qwix.quantize_model(layer(), Provider({".*": recipe}))
        got = transform(model.apply)({"params": {name: w}}, x)
        y = jax_mx.matmul(x, w, recipe=recipe)
        want = y @ y.T if layer is Scores else jax_mx.matmul(x.T, w.T, recipe=recipe).T
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


def test_a_model_in_a_model_keeps_its_own_provider():
    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            return nn.Dense(64, name="head")(self.inner(x))

    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(64, name="d")(x)

    inner = qwix.quantize_model(Inner(), Provider({".*": "mxfp8"}))
    params = Outer(Inner()).init(jax.random.key(0), X)
    model = qwix.quantize_model(Outer(inner), Provider({"head": "mxfp4"}))
    kernels = params["params"]["inner"]["d"]["kernel"], params["params"]["head"]["kernel"]
    h = jax_mx.matmul(X, kernels[0], recipe="mxfp8")
    want = jax_mx.matmul(h, kernels[1], recipe="mxfp4")
    np.testing.assert_array_equal(model.apply(params, X), want)


def test_numpys_float64():
    model = qwix.quantize_model(nn.Dense(64), Provider({".*": "mxfp8"}))
    x, w = np.asarray(X, np.float64), normal((64, 64), 1)
    params = {"params": {"kernel": w, "bias": jnp.zeros(64)}}
    want = jax_mx.matmul(X, w, recipe="mxfp8")
    for apply in (model.apply, jax.jit(model.apply)):
        np.testing.assert_array_equal(apply(params, x), want)


def test_an_error_in_a_model_leaves_nothing_behind():
    class Bad(nn.Module):
        @nn.compact
        def __call__(self, x):
            by_jit(x, self.param("w", nn.initializers.normal(), (64, 40)))
            raise RuntimeError("no")

    params = {"params": {"w": normal((64, 40), 1)}}
    with pytest.raises(RuntimeError, match="no"):
        qwix.quantize_model(Bad(), Provider({".*": "mxfp8"})).apply(params, X)
    w = params["params"]["w"]
    np.testing.assert_allclose(by_jit(X, w), jnp.tanh(jnp.einsum("bk,kn", X, w)), atol=1e-5)


def test_parameters_in_lists_and_copies_of_providers():
    class Lists(nnx.Module):
        def __init__(self):
            self.layers = nnx.List([nnx.Param(normal((64, 64), i) / 8) for i in range(2)])
            self.out = nnx.Dict(w=nnx.Param(normal((64, 48), 3) / 8))

        def __call__(self, x):
            for w in self.layers:
                x = jnp.tanh(by_jit(x, w[...]))
            return x @ self.out["w"]

    model = Lists()
    provider = Provider({".*": "mxfp8"})
    want = X
    for w in model.layers:
        want = jnp.tanh(jnp.tanh(jax_mx.matmul(want, w[...], recipe="mxfp8")))
    want = jax_mx.matmul(want, model.out["w"][...], recipe="mxfp8")
    for one in (provider, copy.deepcopy(provider)):
        y = qwix.quantize_model(model, one, X)(X)
        np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
    floats = jnp.tanh(jnp.einsum("bk,kn", X, model.layers[0][...]))
    np.testing.assert_allclose(by_jit(X, model.layers[0][...]), floats, atol=1e-5)


def test_parameters_of_numpy_in_lists_and_on_explicit_meshes():
    class Lists(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("w", lambda _, shape: [normal(shape, 1)], (64, 64))[0]

    want = jax_mx.matmul(X, normal((64, 64), 1), recipe="mxfp8")
    for model, params in (
        (Lists(), {"w": [normal((64, 64), 1)]}),
        (nn.Dense(64, use_bias=False), {"kernel": np.asarray(normal((64, 64), 1))}),
    ):
        quantized = qwix.quantize_model(model, Provider({".*": "mxfp8"}))
        for apply in (quantized.apply, jax.jit(quantized.apply)):
            np.testing.assert_allclose(apply({"params": params}, X), want, rtol=1e-5, atol=1e-5)
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=explicit, devices=jax.devices("cpu")[:8])
    spec = jax.sharding.PartitionSpec
    dense = nn.Dense(256, use_bias=False)
    model = qwix.quantize_model(dense, Provider({".*": "mxfp8"}))
    with jax.set_mesh(mesh):
        w = jax.device_put(normal((256, 256), 1), jax.NamedSharding(mesh, spec(None, "m")))
        x = jax.device_put(normal((256, 256)), jax.NamedSharding(mesh, spec("d", None)))
        y = model.apply({"params": {"kernel": w}}, x)
    want = jax_mx.matmul(normal((256, 256)), normal((256, 256), 1), recipe="mxfp8")
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-3)


def test_a_batch_that_is_closed_over_is_no_parameter():
    class Scores(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = x @ self.param("w", nn.initializers.normal(), (64, 64))
            return y @ y.T

    params = {"params": {"w": normal((64, 64), 1)}}
    model = qwix.quantize_model(Scores(), Provider({".*": "mxfp8"}))
    got = jax.jit(lambda params: model.apply(params, X))(params)
    np.testing.assert_allclose(got, jax.jit(model.apply)(params, X), rtol=1e-5, atol=1e-4)
