"""Models of other libraries, as these ship them, in MX: they learn as in floats.

The group `dev` brings some; docs/internals.md has the commands for the others.
"""

import functools
import importlib
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import normal

import jax_mx

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("promoting"),
]
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 8, (4, 33)), jnp.int32)


def client(name):
    """A test of a library, marked so, and skipped where it is missing."""
    missing = find_spec(name) is None

    def mark(test):
        test = pytest.mark.skipif(missing, reason=f"{name} is not installed")(test)
        return pytest.mark.client(name)(test)

    return mark


def losses(loss, params, steps, rate=3e-3):
    optimizer = optax.adamw(rate)

    @jax.jit
    def step(params, state):
        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    state, values = optimizer.init(params), []
    for _ in range(steps):
        params, state, value = step(params, state)
        values.append(float(value))
    return values


def assert_alike(got, want):
    """Losses fall as in floats, and are others."""
    assert got != want
    assert want[-1] < 0.9 * want[0]
    for a, b in zip(got, want, strict=True):
        assert abs(a - b) < 0.03 * want[0], (got, want)


def of_tokens(logits, tokens=TOKENS):
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


# ---- any function: quantized ---
@client("equinox")
def test_equinox():
    eqx = importlib.import_module("equinox")

    class Net(eqx.Module):
        embedding: eqx.nn.Embedding
        attention: eqx.nn.MultiheadAttention
        mlp: eqx.nn.MLP
        head: eqx.nn.Linear

        def __call__(self, tokens):
            x = jax.vmap(self.embedding)(tokens)
            x = x + self.attention(x, x, x)
            return jax.vmap(self.head)(x + jax.vmap(self.mlp)(x))

    keys = jax.random.split(jax.random.key(1), 4)
    parts = (
        eqx.nn.Embedding(64, 64, key=keys[0]),
        eqx.nn.MultiheadAttention(4, 64, key=keys[1]),
        eqx.nn.MLP(64, 64, 128, 1, key=keys[2]),
        eqx.nn.Linear(64, 64, key=keys[3]),
    )

    def loss(model):
        return of_tokens(jax.vmap(model)(TOKENS[:, :-1]))

    def train(loss):
        model, optimizer, values = Net(*parts), optax.adamw(3e-3), []
        state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

        @eqx.filter_jit
        def step(model, state):
            value, gradients = eqx.filter_value_and_grad(loss)(model)
            params = eqx.filter(model, eqx.is_inexact_array)
            updates, state = optimizer.update(gradients, state, params)
            return eqx.apply_updates(model, updates), state, value

        for _ in range(6):
            model, state, value = step(model, state)
            values.append(float(value))
        return values

    assert_alike(train(jax_mx.quantized(loss, "mxfp8")), train(loss))


@client("haiku")
def test_haiku():
    hk = importlib.import_module("haiku")

    def model(tokens):
        x = hk.Embed(64, 64)(tokens)
        x = x + hk.MultiHeadAttention(4, 16, w_init=hk.initializers.VarianceScaling())(x, x, x)
        return hk.nets.MLP([128, 64])(x)

    model = hk.without_apply_rng(hk.transform(model))
    params = model.init(jax.random.key(1), TOKENS[:, :-1])

    def loss(params):
        return of_tokens(model.apply(params, TOKENS[:, :-1]))

    got = losses(jax_mx.quantized(loss, "mxfp8", where="linear|query|mlp"), params, 6)
    assert_alike(got, losses(loss, params, 6))


@client("penzai")
def test_penzai():
    pz = importlib.import_module("penzai.pz")
    simple_mlp = importlib.import_module("penzai.models.simple_mlp")
    x = normal((64, 64))
    y = jnp.sin(3 * x[:, :8])
    mlp = simple_mlp.MLP.from_config(
        name="mlp", init_base_rng=jax.random.key(1), feature_sizes=[64, 128, 8]
    )
    model, params = pz.unbind_params(mlp, freeze=True)

    def loss(params):
        got = pz.bind_variables(model, params)(pz.nx.wrap(x).tag("batch", "features"))
        return ((got.unwrap("batch", "features") - y) ** 2).mean()

    got = losses(jax_mx.quantized(loss, "mxfp8"), params, 12)
    assert_alike(got, losses(loss, params, 12))


@client("keras")
def test_keras(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    keras = importlib.import_module("keras")
    x = normal((256, 64))
    y = jnp.argmax(x[:, :8], -1)

    def fit(recipe):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(128, "relu"), keras.layers.Dense(8)]
        model = keras.Sequential([keras.Input((64,)), *layers])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        if recipe:
            plain = model.compute_loss_and_updates
            model.compute_loss_and_updates = jax_mx.quantized(plain, recipe)
        history = model.fit(x, y, batch_size=64, epochs=4, verbose=0, shuffle=False)
        return history.history["loss"]

    assert_alike(fit("mxfp8"), fit(None))


# ---- flax, by way of qwix ---
@client("gemma")
def test_gemma():
    qwix = importlib.import_module("qwix")
    from jax_mx.adapters.qwix import Provider

    gm = importlib.import_module("gemma.gm")
    config = importlib.import_module("gemma.gm.nn._config")
    modules = importlib.import_module("gemma.gm.nn._modules")
    sizes = config.TransformerConfig(
        num_embed=256,
        embed_dim=64,
        hidden_dim=128,
        num_heads=4,
        head_dim=32,
        num_kv_heads=2,
        final_logit_softcap=None,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=(modules.AttentionType.GLOBAL,) * 2,
    )
    model = gm.nn.Transformer(config=sizes, dtype=jnp.bfloat16)
    params = model.init(jax.random.key(1), TOKENS[:, :-1])

    def train(model):
        def loss(params):
            return of_tokens(model.apply(params, TOKENS[:, :-1]).logits)

        return losses(loss, params, 6)

    mx = qwix.quantize_model(model, Provider({r"layer_\d+/.*": "mxfp8"}))
    assert_alike(train(mx), train(model))


@client("tunix")
def test_tunix():
    qwix, nnx = map(importlib.import_module, ("qwix", "flax.nnx"))
    from jax_mx.adapters.qwix import Provider

    llama = importlib.import_module("tunix.models.llama3.model")
    sizes = llama.ModelConfig(
        num_layers=2,
        vocab_size=256,
        embed_dim=64,
        hidden_dim=128,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        rope_theta=10000,
        norm_eps=1e-5,
    )
    (Llama,) = (c for name, c in vars(llama).items() if re.fullmatch("Llama3?", name))
    inputs = TOKENS[:, :-1], jnp.tile(jnp.arange(32), (4, 1)), None
    inputs += (jnp.tril(jnp.ones((4, 32, 32), bool)),)

    def train(model):
        graph, params = nnx.split(model)

        def loss(params):
            logits, _ = nnx.merge(graph, params)(*inputs)
            return of_tokens(logits)

        return losses(loss, params, 6)

    mx = qwix.quantize_model(
        Llama(sizes, rngs=nnx.Rngs(0)), Provider({r"layers/.*": "mxfp8"}), *inputs
    )
    assert_alike(train(mx), train(Llama(sizes, rngs=nnx.Rngs(0))))


# ---- tokamax' own tests ---
def of_tokamax(recipe, leave):
    """The public tests of tokamax' ragged_dot, of ours with a recipe."""
    if find_spec("tokamax") is None:
        return object
    base = importlib.import_module("tokamax._src.ops.ragged_dot.test_base")
    tokamax = importlib.import_module("tokamax")
    bridge = importlib.import_module("jax_mx.adapters.tokamax")
    implementation = [functools.partial(bridge.ragged_dot, recipe=recipe), "xla"]
    dot = functools.partial(tokamax.ragged_dot, implementation=implementation)

    class Tests(base.RaggedDotTestBase):
        def __init__(self, *args):
            super().__init__(*args, dot_fn=dot)

    every = [name for name in dir(base.RaggedDotTestBase) if name.startswith("test_")]
    for i, name in enumerate(every):
        many = name.startswith("test_quantized") and i % 40
        if many or name.startswith(("test_bench", "test_invalid", *leave)):
            setattr(Tests, name, None)
    return Tests


IN_FLOATS: Any = of_tokamax("floats", ())
IN_MX: Any = of_tokamax("mxfp8", ("test_vjp", "test_simple1"))


class TestTokamaxInFloats(IN_FLOATS):
    """Keywords, sizes and QArrays alone."""


class TestTokamaxInMX(IN_MX):
    """Against their reference of operands that are quantized alike.

    It has no gradients in MX, and of float32 (simple1) it sums in another order, to the last bit.
    """

    @pytest.fixture(autouse=True)
    def quantizing(self, monkeypatch):
        base = importlib.import_module("tokamax._src.ops.ragged_dot.test_base")
        plain = base.ref

        def ref(lhs, rhs, *args, **kwargs):
            if isinstance(lhs, jax.Array) and isinstance(rhs, jax.Array):
                lhs, rhs = jax_mx.fake_quantize(lhs), jax_mx.fake_quantize(rhs, axis=1)
            return plain(lhs, rhs, *args, **kwargs)

        monkeypatch.setattr(base, "ref", ref)


del IN_FLOATS, IN_MX  # pytest collects classes of unittest by whatever name


# ---- MaxText ---
SIZES = (
    "run_name=t dataset_type=synthetic hardware=cpu steps=5 base_emb_dim=128 base_mlp_dim=256 "
    "base_num_query_heads=4 base_num_kv_heads=4 base_num_decoder_layers=2 head_dim=32 "
    "vocab_size=512 max_target_length=64 per_device_batch_size=1 enable_checkpointing=False "
    "log_config=False attention=dot_product tokenizer_type=tiktoken learning_rate=3e-3 "
    "skip_jax_distributed_system=True"
)
EXPERTS = "decoder_block=mixtral num_experts=4 num_experts_per_tok=2 base_moe_mlp_dim=256"
MODELS = {
    "dense": "",
    "ragged": f"{EXPERTS} megablox=False sparse_matmul=True",
    "einsum": f"{EXPERTS} megablox=False sparse_matmul=False",
}
WAYS = {"class": "", "qwix": "quantization=fp8_full use_qwix_quantization=True"}
# The shapes of weights, as they reach our products.
WATCHED = """
import runpy
from jax_mx.products import dot_general, ragged_dot

def watched(plain):
    def planned(op, lhs, rhs, *args):
        print("in MX:", *rhs.shape)
        return plain(op, lhs, rhs, *args)
    return planned

dot_general.planned = watched(dot_general.planned)
ragged_dot.planned_groups = watched(ragged_dot.planned_groups)
runpy.run_module("jax_mx.adapters.maxtext", run_name="__main__", alter_sys=True)
"""


@functools.cache
def maxtext(command, options, folder):
    """The losses of MaxText's trainer, on eight devices; and what was in MX."""
    spec: Any = find_spec("maxtext")
    config = Path(spec.submodule_search_locations[0]) / "configs" / "base.yml"
    arguments = [*command, config, *SIZES.split(), *options.split()]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    arguments.append(f"base_output_directory={folder}")
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert not done.returncode, done.stderr[-3000:]
    shapes = re.findall(r"in MX: ([\d ]+)", done.stdout)
    losses = re.findall(r"step: \d+.*?, loss: ([\d.]+)", done.stderr)
    return [*map(float, losses)], {tuple(map(int, shape.split())) for shape in shapes}


@client("maxtext")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_maxtext(model, way, tmp_path_factory):
    folder = str(tmp_path_factory.getbasetemp() / "maxtext")
    options = f"{MODELS[model]} {WAYS[way]}"
    got, in_mx = maxtext(("-c", WATCHED, "mxfp8"), options, folder)
    want, _ = maxtext(("-m", "maxtext.trainers.pre_train.train"), MODELS[model], folder)
    assert len(got) == 5
    assert_alike(got, want)
    router, logits, queries, up = (128, 4), (128, 512), (128, 4, 32), (128, 256)
    assert queries in in_mx and not {router, logits, logits[::-1]} & in_mx
    assert (up if model == "dense" else (4, *up)) in in_mx
