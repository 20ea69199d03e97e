"""`quantize_weights`: once a step, from float32 masters; what moves where devices have parts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits_equal, assert_refused, collectives, mesh_of, normal, quantizings
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx
from jax_mx import MXFP4, MXFP8, MXFP8_ROWS, QuantizedWeight, Recipe, quantize_weights

P = PartitionSpec
LAYERS, WIDTH, INNER = 3, 256, 512
RECIPES = {
    "mxfp8": MXFP8,
    "rows": MXFP8_ROWS,
    "tiles": Recipe(window=128, weight_window=(128, 128)),
    "mxfp4": MXFP4,
}


def params():
    """A stack of layers: three matrices each, and a vector."""
    shapes = {"gate": (WIDTH, INNER), "up": (WIDTH, INNER), "down": (INNER, WIDTH)}
    weights = {
        name: normal((LAYERS, *shape), i) * shape[0] ** -0.5
        for i, (name, shape) in enumerate(shapes.items())
    }
    return weights | {"scale": 1 + normal((LAYERS, WIDTH), 7) / 8}


def layer(recipe, x, w):
    h = (x.astype(jnp.float32) * w["scale"]).astype(x.dtype)
    return x + jax_mx.mlp(h, (w["gate"], w["up"]), w["down"], recipe=recipe)


def loss(recipe, once, weights, x):
    """The mean square behind all layers, each computed again for its gradient."""
    if once:
        weights = quantize_weights(weights, recipe, stacked=1)
    f = jax.checkpoint(functools.partial(layer, recipe))
    x, _ = jax.lax.scan(lambda x, w: (f(x, w), None), x, weights)
    return (x.astype(jnp.float32) ** 2).mean()


# ---- which leaves ---
def test_matrices_are_quantized_and_others_stay():
    tree = {
        "matrix": normal((64, 40)),
        "odd": normal((40, 64)),
        "vector": normal((64,)),
        "experts": normal((2, 64, 64)),
        "frozen": jax_mx.quantize(normal((64, 32)), axis=0),
        "ids": jnp.arange(64).reshape(32, 2),
        "nothing": None,
    }
    got = quantize_weights(tree, MXFP8)
    assert {name for name, leaf in got.items() if isinstance(leaf, QuantizedWeight)} == {"matrix"}
    assert all(got[name] is tree[name] for name in tree if name != "matrix")
    stacked = quantize_weights(tree, MXFP8, stacked=1)
    assert isinstance(stacked["experts"], QuantizedWeight)
    assert stacked["matrix"] is tree["matrix"]
    named = quantize_weights([tree, tree], MXFP8, select=lambda path, _: path[0].idx == 1)
    assert named[0]["matrix"] is tree["matrix"]
    assert quantize_weights(named, MXFP8)[1]["matrix"] is named[1]["matrix"]
    assert quantize_weights({}, "auto") == {}


def test_bad_calls_get_one_sentence():
    turned = Recipe(forward=jax_mx.Product(hadamard=jax_mx.Hadamard(64)))
    for call, error, sentence in (
        (lambda: quantize_weights({}, "mxfp9"), ValueError, "recipe 'mxfp9' is unknown"),
        (lambda: quantize_weights({}, stacked=1.5), TypeError, "stacked must be an int, got 1.5"),
        (lambda: quantize_weights({}, stacked=-1), ValueError, "stacked must be 0 or more, got -1"),
        (
            lambda: quantize_weights({"a": [np.ones((32, 2))]}, MXFP8),
            TypeError,
            "quantize_weights: the leaf ['a'][0] is float64, must be one of",
        ),
        (
            lambda: quantize_weights([jnp.ones((2, 96, 8))], turned, stacked=1),
            ValueError,
            "quantize_weights: the leaf [0]: the contracted length is 96, not a multiple of",
        ),
    ):
        assert_refused(call, error, sentence)


@pytest.mark.sampled(2)
# ---- values ---
@pytest.mark.parametrize("name", RECIPES)
def test_of_one_dtype_it_is_what_products_quantize(name):
    """Bit for bit, gradients too."""
    recipe, x, w = RECIPES[name], normal((48, 64)), normal((64, 96), 1)

    def once(x, w):
        return jax_mx.matmul(x, quantize_weights(w, recipe), recipe=recipe)

    def plain(x, w):
        return jax_mx.matmul(x, w, recipe=recipe)

    for f, args in ((once, (x, w)), (lambda x, w: once(x, w), (x, w))):
        y, pull = jax.vjp(f, *args)
        want, pull_plain = jax.vjp(plain, *args)
        assert_bits_equal(y, want)
        for a, b in zip(pull(jnp.sin(y)), pull_plain(jnp.sin(y)), strict=True):
            assert_bits_equal(a, b)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_masters_are_float32_beside_other_activations(dtype):
    """Rounded once; the result has the activations' dtype, the gradient the masters'."""
    x, w, recipe = normal((48, 64), dtype=dtype), normal((64, 96), 1), MXFP8_ROWS
    weight = quantize_weights(w, recipe)
    q = jax_mx.quantize(w, axis=0, window="row", transpose=True)
    assert_bits_equal(weight.contracted_form.array.values, q.values)
    f = lambda x, w: jax_mx.matmul(x, quantize_weights(w, recipe))  # noqa: E731
    y, pull = jax.vjp(f, x, w)
    assert y.dtype == dtype
    wide = jax_mx.matmul(x.astype(jnp.float32), weight)
    np.testing.assert_allclose(np.float32(y), wide, rtol=2e-2, atol=2e-2)
    dx, dw = pull(jnp.ones_like(y))
    assert (dx.dtype, dw.dtype) == (dtype, jnp.float32)
    numbers = (((2,), (0,)), ((), ()))
    assert jax_mx.dot_general(x[None], weight, numbers).dtype == dtype
    with jax.numpy_dtype_promotion("standard"):
        assert jax_mx.matmul(x, w).dtype == jnp.float32  # as jnp promotes floats
    experts = MXFP8.quantize_weight(normal((2, 64, 32)), contracting=1, batch=0)
    assert jax_mx.ragged_dot(x, experts, jnp.asarray([20, 28], jnp.int32)).dtype == dtype


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["rows", "mxfp8"])
def test_layers_in_a_scan(name):
    """The scan slices what was quantized; nothing of a weight is quantized again."""
    recipe, weights, x = RECIPES[name], params(), normal((64, WIDTH), 9)
    gradient = jax.value_and_grad(functools.partial(loss, recipe, True))
    value, got = jax.jit(gradient)(weights, x)

    def unrolled(weights, x):
        for i in range(LAYERS):
            of_layer = jax.tree.map(lambda a, i=i: a[i], weights)
            x = layer(recipe, x, quantize_weights(of_layer, recipe))
        return (x.astype(jnp.float32) ** 2).mean()

    want_value, want = jax.jit(jax.value_and_grad(unrolled))(weights, x)
    np.testing.assert_allclose(value, want_value, rtol=1e-3)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert a.dtype == jnp.float32
        assert np.linalg.norm(a - b) <= 5e-2 * np.linalg.norm(b)
    stacked = quantize_weights(weights, recipe, stacked=1)
    alone = quantize_weights(jax.tree.map(lambda a: a[1], weights), recipe)
    for a, b in zip(*map(jax.tree.leaves, (stacked, alone)), strict=True):
        assert_bits_equal(a[1], b)
    loops = [quantizings(jax.grad(functools.partial(loss, recipe, once)),
                         weights, x, within="scan")
             for once in (True, False)]  # fmt: skip
    assert loops[0] < loops[1]


def test_microbatches_share_it():
    weights, x = params(), normal((4, 32, WIDTH), 9, jnp.bfloat16)

    def total(weights, x):
        layer_weights = quantize_weights(jax.tree.map(lambda a: a[0], weights), MXFP8_ROWS)
        return jax.lax.map(
            lambda x: (layer("auto", x, layer_weights).astype(jnp.float32) ** 2).sum(), x
        ).sum()

    f = jax.grad(total)
    got = jax.jit(f)(weights, x)
    want = [jax.jit(f)(weights, x[i : i + 1]) for i in range(4)]
    for a, *b in zip(*map(jax.tree.leaves, (got, *want)), strict=True):
        np.testing.assert_allclose(a, sum(b), rtol=1e-2, atol=1e-2)
    assert quantizings(lambda w: total(w, x), weights, within="scan") < quantizings(
        lambda w: total(w, x), weights
    )


# ---- devices ---
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["rows", "tiles"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_codes_move_where_devices_have_parts(name, axis_type):
    """FSDP: masters stay in parts, codes are gathered, one direction for each pass."""
    recipe, weights, x = RECIPES[name], params(), normal((256, WIDTH), 9, jnp.bfloat16)
    if axis_type == AxisType.Explicit and name == "tiles":
        pytest.skip("parts of 32 rows cut tiles, which explicit axes refuse")
    gradient = jax.value_and_grad(functools.partial(loss, recipe, True))
    want_value, want = jax.jit(gradient)(weights, x)
    mesh = mesh_of(8, names=("data",), axis_type=axis_type)
    parts = {name: NamedSharding(mesh, P(None, "data") if a.ndim == 3 else P())
             for name, a in weights.items()}  # fmt: skip
    rows = NamedSharding(mesh, P("data"))
    args = jax.device_put(weights, parts), jax.device_put(x, rows)
    with jax.set_mesh(mesh):
        program = jax.jit(gradient, out_shardings=(None, parts)).lower(*args).compile()
    value, got = program(*args)
    np.testing.assert_allclose(value, want_value, rtol=1e-4)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        # A bit of x's gradient in bfloat16 is another code of the layer before. Eight parts of a
        # sum, and the sum, are each rounded to bfloat16 by up to 2^-9.
        for i, bound in enumerate((5e-2, 5e-2, 2**-8)):
            assert np.linalg.norm(np.asarray(a[i]) - b[i]) <= bound * np.linalg.norm(b[i])
    moved = collectives(program.as_text())
    gathered = {key[1] for key in moved if "all-gather" in key[0] and key[2] >= WIDTH * INNER}
    assert gathered == {"u8"}, moved


@pytest.mark.parametrize("spec", [P("data"), P(None, "data")], ids=str)
def test_gathered_rows_are_those_of_the_whole_weight(spec):
    """In shard_map devices share the amaxes of rows that lie among them, and move codes."""
    kinds = {"axis_types": (AxisType.Auto,), "devices": jax.devices("cpu")}
    mesh = jax.make_mesh((8,), ("data",), **kinds)
    w = normal((WIDTH, INNER)) * jnp.exp2(jnp.arange(WIDTH) % 9)[:, None]
    want = jax.tree.leaves(MXFP8_ROWS.quantize_weight(w))[1:]  # behind the floats

    def local(w):
        weight = jax_mx.gather_weight(w, spec, MXFP8_ROWS)
        assert weight.contracted_form.array.window == "row"
        return [leaf[None] for leaf in jax.tree.leaves(weight)[1:]]

    f = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=P("data")))
    for every, whole in zip(f(w), want, strict=True):
        for gathered in every:
            assert_bits_equal(gathered, whole)
    text = f.lower(w).compile().as_text()
    assert {key[1] for key in collectives(text) if "all-gather" in key[0]} == {"u8"}
