"""qwix chooses modules of flax models by their paths, and their products become MX."""

import re
import textwrap
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
