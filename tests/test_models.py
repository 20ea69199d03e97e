"""flax models with `dot_general=jax_mx.dot_general` train through optax as they do in bfloat16."""

import functools

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from flax import linen, nnx
from helpers import assert_bits_equal, assert_same, mesh_of, normal, on_eight, quantizings
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx

P = PartitionSpec
MX = {"mxfp8": jax_mx.dot_general}
MX["mxfp4"] = functools.partial(jax_mx.dot_general, recipe=jax_mx.MXFP4)


pytestmark = pytest.mark.usefixtures("promoting")


def in_bf16(lhs, rhs, numbers, precision=None, preferred_element_type=None, **options):
    """The product in bfloat16 that MX products are compared with."""
    y = jax.lax.dot_general(
        *(a.astype(jnp.bfloat16) for a in (lhs, rhs)),
        numbers,
        precision,
        preferred_element_type=jnp.float32,
        **options,
    )
    return y.astype(preferred_element_type or lhs.dtype)


mesh_of_eight = functools.partial(mesh_of, 4, 2, names=("data", "tensor"))


def placed(mesh):
    """The spec of a parameter: columns of a matrix over tensor, and heads, on either side."""

    def put(a):
        spec = P(None, "tensor") if a.ndim == 2 and a.shape[1] % 64 == 0 else P()
        if a.ndim == 3:
            spec = P(*("tensor" if n == 4 else None for n in a.shape))
        return jax.device_put(a, NamedSharding(mesh, spec))

    return lambda tree: jax.tree.map(put, tree)


def trained(loss, params, data, steps, rate=3e-3, mesh=None):
    """Losses of `steps` steps of Adam: jitted, donated; on a mesh, sharded."""
    optimizer = optax.adam(rate)
    state = optimizer.init(params)
    if mesh is not None:
        params, state = placed(mesh)((params, state))
        data = jax.device_put(data, NamedSharding(mesh, P(None, "data")))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        value, gradient = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    params, state = jax.tree.map(jnp.copy, (params, state))
    losses = []
    for i in range(steps):
        params, state, value = step(params, state, data[i % len(data)])
        losses.append(value)
    return np.asarray(losses)


# ---- the next byte of a text, of every layer in either library ---
@functools.cache
def bytes_as_floats():
    """(256, 64): what stands for each byte."""
    return normal((256, 64))


def linen_model(dot_general):
    model = models.Linen(dot_general)
    return model.apply, model.init(jax.random.key(1), bytes_as_floats()[None])


def nnx_model(dot_general):
    einsum = jnp.einsum if dot_general is in_bf16 else jax_mx.einsum
    graph, params = nnx.split(models.Nnx(dot_general, einsum, nnx.Rngs(1)))
    return lambda params, x: nnx.merge(graph, params)(x), params


@pytest.mark.parametrize(
    ("library", "sharded"),
    [
        pytest.param(nnx_model, True, marks=pytest.mark.thorough),
        pytest.param(linen_model, False, marks=pytest.mark.thorough),
        pytest.param(nnx_model, False, marks=pytest.mark.thorough),
        pytest.param(linen_model, True, marks=pytest.mark.thorough),
    ],
)
def test_layers_train_as_in_bfloat16(library, sharded):
    """Within 1 % of the loss after 200 steps; on eight devices, split by data and by columns."""
    table = bytes_as_floats()

    def final(dot_general):
        apply, params = library(dot_general)

        def loss(params, pieces):
            logits = apply(params, table[pieces[:, :-1]]) @ table.T / 8
            return optax.softmax_cross_entropy_with_integer_labels(logits, pieces[:, 1:]).mean()

        mesh = mesh_of_eight() if sharded else None
        losses = trained(loss, params, models.batches(200), 200, mesh=mesh)
        assert losses[-20:].mean() < 0.75 * losses[0]
        return losses[-20:].mean()

    want, got = (final(f) for f in (in_bf16, jax_mx.dot_general))
    assert got == pytest.approx(want, rel=0.01)


# ---- a transformer over the sources of argparse ---
@functools.cache
def transformer(name, steps):
    dot_general = MX.get(name, in_bf16)
    graph, params = nnx.split(models.Transformer(dot_general))
    return trained(
        lambda params, pieces: models.text_loss(nnx.merge(graph, params), pieces),
        params,
        models.batches(steps),
        steps,
    )


@pytest.mark.parametrize("steps", [40, pytest.param(200, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("name", "within"), [("mxfp4", 0.05), pytest.param("mxfp8", 0.01, marks=pytest.mark.thorough)]
)
def test_a_transformer_learns_text(name, within, steps):
    """Beside bfloat16: MXFP8, as the layers above do by default, and MXFP4, which has 4 bits."""
    want, got = (transformer(recipe, steps)[-10:].mean() for recipe in ("bf16", name))
    assert want < 3.2 < transformer("bf16", steps)[0]
    assert got == pytest.approx(want, rel=within)


# ---- how flax calls ---
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_layer_takes_it(name, dtype):
    """Keywords as each layer passes them; the types that it gives without MX."""
    rngs, options = nnx.Rngs(0), {"dtype": jnp.dtype(dtype), "precision": jax.lax.Precision.HIGH}
    x = jnp.ones((2, 3, 64))
    batched = {"batch_axis": {0: 2}}
    for arguments in ({}, {"preferred_element_type": jnp.float32}):

        def nnx_layers(dot_general, arguments=arguments):
            more = {"dot_general": dot_general, "rngs": rngs, **options, **arguments}
            yield nnx.Linear(64, 5, **more)
            yield nnx.LinearGeneral(64, (4, 5), **more)
            yield nnx.LinearGeneral(64, 5, **batched, **more)

        def linen_layers(dot_general):
            more = {"dot_general": dot_general, **options}
            yield linen.Dense(5, **more)
            yield linen.DenseGeneral((4, 5), **more)
            yield linen.DenseGeneral(5, batch_dims=0, axis=-1, **more)

        for got, want in zip(nnx_layers(MX[name]), nnx_layers(jax.lax.dot_general), strict=True):
            assert jax.typeof(got(x)) == jax.typeof(want(x))
        for got, want in zip(linen_layers(MX[name]), linen_layers(None), strict=True):
            params = want.init(jax.random.key(0), x)
            assert jax.typeof(got.apply(params, x)) == jax.typeof(want.apply(params, x))


def test_einsum_takes_it():
    """nnx.Einsum, with einsum_op=; its bias too."""
    x, numbers = np.random.default_rng(0).integers(-2, 3, (2, 3, 64)), "abc,cde->abde"
    x = jnp.asarray(x, jnp.float32)
    mx = functools.partial(jax_mx.einsum, recipe=jax_mx.MXFP4)
    options = {"precision": "highest", "preferred_element_type": jnp.float32, "rngs": nnx.Rngs(0)}
    layer = nnx.Einsum(numbers, (64, 4, 5), (4, 5), einsum_op=mx, **options)
    layer.kernel[...] = jnp.sign(layer.kernel[...])
    assert_bits_equal(layer(x), jnp.einsum(numbers, x, layer.kernel[...]))


def test_layers_on_explicit_meshes():
    """out_sharding goes through; the layer without MX has the same types."""
    with jax.set_mesh(mesh_of_eight(axis_type=AxisType.Explicit)):
        x = jax.device_put(np.ones((4, 32, 64), np.float32), P("data", None, "tensor"))
        spec = {"kernel_metadata": {"out_sharding": P("tensor", None)}, "use_bias": False}
        layers = [
            nnx.Linear(64, 64, dot_general=f, rngs=nnx.Rngs(0), **spec)
            for f in (MX["mxfp8"], jax.lax.dot_general)
        ]
        got, want = (
            nnx.grad(lambda m, x: m(x, out_sharding=P("data", None, None)).sum(), argnums=(0, 1))(
                layer, x
            )
            for layer in layers
        )
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert jax.typeof(a) == jax.typeof(b)
            np.testing.assert_allclose(a, b, rtol=0.1, atol=0.3)


# ---- what programs do with them ---
def test_checkpoints_of_flax_layers_keep_what_is_quantized():
    """By the policy that the README names: the same gradients, and nothing quantized again."""
    model = models.Nnx(MX["mxfp8"], jax_mx.einsum, nnx.Rngs(0))
    graph, params = nnx.split(model)
    x = bytes_as_floats()[None]

    def loss(params, x, **remat):
        f = lambda params, x: nnx.merge(graph, params)(x)  # noqa: E731
        f = jax.checkpoint(f, **remat) if remat else f
        return (f(params, x) ** 2).sum()

    def quantizers(**remat):
        return quantizings(jax.grad(functools.partial(loss, **remat)), params, x)

    kept = jax.checkpoint_policies.save_only_these_names(jax_mx.CHECKPOINT_NAME)
    plain, saved = quantizers(), quantizers(policy=kept)
    assert quantizers(policy=jax.checkpoint_policies.nothing_saveable) > saved == plain > 0
    for got, want in zip(
        *(
            jax.tree.leaves(jax.jit(jax.grad(functools.partial(loss, **remat)))(params, x))
            for remat in ({"policy": kept}, {})
        ),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_donation():
    """A donated weight's memory holds the new one."""
    w, x = jnp.ones((64, 64)), jnp.ones((32, 64))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jax_mx.matmul(x, w).sum())(w)

    compiled = step.lower(w, x).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == w.nbytes
    assert_bits_equal(step(w, x), np.full((64, 64), np.float32(1) - np.float32(0.1) * 32))
    assert w.is_deleted()


def test_a_second_process_compiles_nothing(tmp_path):
    """JAX's persistent cache has the step, with its gradients, on eight devices."""
    code = """
        from helpers import cached_in

        events = cached_in(sys.argv[2])
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        x = jax.device_put(np.ones((256, 64), np.float32), NamedSharding(mesh, P("data")))
        w = jax.device_put(np.ones((64, 32), np.float32), NamedSharding(mesh, P()))
        events.clear()
        step = jax.jit(jax.value_and_grad(lambda w, x: jax_mx.matmul(x, w).sum()))
        step(w, x)
        print(*(sum(what in event for event in events) for what in ("cache_hits", "cache_misses")))
    """
    counts = [on_eight(code, str(tmp_path))[0].split() for _ in range(2)]
    assert counts == [["0", "1"], ["1", "0"]]


# ---- variables ---
def test_variables_are_what_they_hold():
    """Floats and frozen weights, in every product; as jnp takes them."""
    x, w = normal((5, 64)), normal((64, 64), 1)
    stack, sizes = jnp.stack([w] * 2), jnp.array([2, 3], jnp.int32)
    choice, ones = jnp.zeros((5, 1), jnp.int32), jnp.ones((5, 1))
    frozen = jax_mx.quantize(w, axis=0)
    for call, array in (
        (lambda w: jax_mx.matmul(x, w), w),
        (lambda w: jax_mx.matmul(x, w), frozen),
        (lambda w: jax_mx.einsum("mk,kn->mn", x, w), w),
        (lambda w: jax_mx.mlp(x, w, jnp.ones((32, 64))), w),
        (lambda w: jax_mx.matmul(x, jax_mx.MXFP8.quantize_weight(w)), w),
        (lambda w: jax_mx.ragged_dot(x, w, sizes), stack),
        (lambda w: jax_mx.moe(x, choice, ones, w, stack[:, :32]), stack),
        (jax_mx.quantize, w),
        (jax_mx.dequantize, frozen),
    ):
        assert_same(call(nnx.Param(array)), call(array))
    layer = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    gradient = nnx.grad(lambda layer: jax_mx.matmul(x, layer.kernel).sum())(layer)["kernel"]
    assert_same(gradient[...], jax.grad(lambda w: jax_mx.matmul(x, w).sum())(layer.kernel[...]))
