"""Other libraries' arrays and keywords, weights on the left, keys of layers, all derivatives."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits_equal, assert_refused, mesh_of, normal

import jax_mx
from jax_mx import MXArray, Recipe
from jax_mx.adapters import tokamax

X, W = normal((40, 64)), normal((64, 96), 1)
PLAIN = (((1,), (0,)), ((), ()))
UNLIKE = Recipe("mxfp8_e4m3", "mxfp4_e2m1")  # a weight is told by its format


# ---- arrays of qwix ---
def qarray(values, scale, **fields):
    return types.SimpleNamespace(qvalue=values, scale=scale, **fields)


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("qtype", "format"), [("mxfp8", "mxfp8_e4m3"), ("mxfp4", "mxfp4_e2m1")])
def test_arrays_that_qwix_made(qtype, format, dtype):
    qwix = pytest.importorskip("qwix")
    for x, axis in ((X, 1), (W, 0), (jnp.stack([W, 2 * W]), 1)):
        x = x.astype(dtype)
        others = [i for i in range(x.ndim) if i != axis]
        theirs = qwix.quantize(x, qtype, channelwise_axes=others, tiled_axes={axis: 32})
        ours = MXArray.from_qarray(theirs)
        assert (ours.format.name, ours.axis) == (format, axis - x.ndim)
        assert_bits_equal(ours.dequantize(dtype), qwix.dequantize(theirs))
        back = ours.to_qarray(dtype)
        assert back.qtype == qtype
        assert_bits_equal(back.qvalue, theirs.qvalue)
        assert_bits_equal(back.scale, theirs.scale)


def test_tiles_and_scales_at_the_ends():
    codes = jax.lax.bitcast_convert_type(
        jnp.arange(64 * 64, dtype=jnp.uint32).astype(jnp.uint8).reshape(64, 64), jnp.float8_e4m3fn
    )
    ends = np.array([0x00400000, 0x00800000, 0x7F000000, 0x7FC00000], np.uint32).view(np.float32)
    scale = jnp.asarray(np.tile(ends, 32)[:, None])[:64]  # of 64 elements: two blocks have each
    ours = MXArray.from_qarray(qarray(codes, scale))
    want = np.tile(np.array([[0], [1], [254], [255]], np.uint8), (16, 2))
    assert_bits_equal(ours.scales.view(jnp.uint8), want)
    assert_bits_equal(
        ours.to_qarray("float32").scale[:, :1].view(jnp.uint32), scale.view(jnp.uint32)
    )
    square = MXArray.from_qarray(
        qarray(codes, jnp.asarray(np.asarray(scale[:2]).astype(jnp.bfloat16)))
    )
    assert square.block == (32, 32)
    assert_bits_equal(square.scales.view(jnp.uint8), np.array([[0, 0], [1, 1]], np.uint8))
    traced = jax.jit(lambda s: MXArray.from_qarray(qarray(codes, s)).scales)(scale * 1.5)
    assert (traced.view(jnp.uint8) == 255).all()


def test_arrays_that_are_none_of_mx():
    codes = jnp.zeros((4, 64), jnp.float8_e4m3fn)
    for q, error, sentence in (
        (X, TypeError, "q must be a QArray of qwix"),
        (qarray([[1.0]], [[1.0]]), TypeError, "with arrays qvalue and scale"),
        (qarray(codes, jnp.ones((4, 2)), zero_point=jnp.zeros((4, 2))), ValueError, "zero_point"),
        (qarray(jnp.zeros((4, 64), jnp.int8), jnp.ones((4, 2))), TypeError, "elements are int8"),
        (qarray(codes, jnp.ones((4, 4))), ValueError, "are no blocks of MX"),
        (qarray(codes, jnp.ones((1, 2))), ValueError, "are no blocks of MX"),
        (qarray(codes, jnp.full((4, 2), 3.0)), ValueError, "a scale is 3.0, MX has powers of two"),
        (qarray(codes, jnp.zeros((4, 2))), ValueError, "a scale is 0.0"),
    ):
        assert_refused(lambda q=q: MXArray.from_qarray(q), error, sentence)
    six = jax_mx.quantize(X, "mxfp6_e2m3")
    assert_refused(six.to_qarray, ValueError, "JAX has no dtype of mxfp6_e2m3")
    assert_refused(lambda: jax_mx.quantize(X).to_qarray("float16"), TypeError, "dtype is float16")


# ---- keywords of tokamax ---
def numbers_of(axis, **changed):
    fields = {"lhs_ragged_dimensions": [0], "rhs_group_dimensions": [0]} | changed
    dense = (([1], [axis]), ([], []))
    return jax.lax.RaggedDotDimensionNumbers(dot_dimension_numbers=dense, **fields)


def test_keywords_of_tokamax():
    w, sizes = jnp.stack([W, -W]), jnp.array([7, 30], jnp.uint32)
    call = functools.partial(tokamax.ragged_dot, recipe="mxfp8", precision=None)
    want = jax_mx.ragged_dot(X, w, sizes, recipe="mxfp8")
    held = types.SimpleNamespace(value=sizes)
    assert_bits_equal(call(X, w, group_sizes=held, activation=None, group_offset=None), want)
    turned = call(X, w.mT, group_sizes=sizes, ragged_dot_dimension_numbers=numbers_of(2))
    assert_bits_equal(turned, want)
    low = {"preferred_element_type": jnp.bfloat16}
    got = call(X, w, group_sizes=sizes, activation=jnp.tanh, **low)
    assert_bits_equal(got, jnp.tanh(want).astype(jnp.bfloat16))
    frozen = jax_mx.quantize(w, axis=1)
    want = jax_mx.ragged_dot(X, frozen, sizes, recipe="mxfp8")
    assert_bits_equal(call(X, frozen, group_sizes=sizes), want)
    theirs = qarray(
        frozen.values, jnp.exp2(frozen.scales.view(jnp.uint8).astype(jnp.float32) - 127)
    )
    assert_bits_equal(call(X, theirs, group_sizes=sizes), want)


def test_what_tokamax_tries_elsewhere():
    w, sizes = jnp.stack([W, -W]), jnp.array([7, 30])
    integers = qarray(w.astype(jnp.int8), jnp.ones((2, 1, 1)))
    for lhs, rhs, options, sentence in (
        (X[:, :60], w[:, :60], {}, "60 elements, not a multiple"),
        (X, w, {"zero_initialize": True}, "zero_initialize is not served"),
        (X, integers, {}, "rhs is no MX array"),
        (X, w, {"ragged_dot_dimension_numbers": numbers_of(1, rhs_group_dimensions=[])},
         "dimension numbers"),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=sentence):
            tokamax.ragged_dot(lhs, rhs, group_sizes=sizes, **options)


# ---- MX switched off ---
def test_floats_are_what_jax_multiplies():
    w, sizes = jnp.stack([W, -W]), jnp.array([7, 30])
    options = {"recipe": "floats"}
    assert_bits_equal(
        jax_mx.matmul(X, W, precision="highest", **options), jnp.matmul(X, W, precision="highest")
    )
    assert_bits_equal(jax_mx.dot_general(X[:, :3], W[:3], PLAIN, **options), X[:, :3] @ W[:3])
    three = ("ab,bc,cd->ad", X, W, W.T)
    assert_bits_equal(jax_mx.einsum(*three, **options), jnp.einsum(*three))
    assert_bits_equal(jax_mx.ragged_dot(X, w, sizes, **options), jax.lax.ragged_dot(X, w, sizes))
    frozen = jax_mx.quantize(W, axis=0)
    assert_bits_equal(jax_mx.matmul(X, frozen, **options), X @ frozen.dequantize(jnp.float32))
    experts = jax_mx.quantize(w.mT)  # (G, N, K)
    want = jax.lax.ragged_dot(X, experts.dequantize(jnp.float32).mT, sizes)
    assert_bits_equal(jax_mx.ragged_dot(X, experts, sizes, **options), want)
    weight = jax_mx.MXFP8.quantize_weight(W)
    assert_bits_equal(jax_mx.matmul(X, weight, **options), X @ W)
    assert jax_mx.can_multiply(X[:, :3], W[:3], PLAIN, recipe="floats") == (True, "")

    def curvature(matmul):
        slope = jax.grad(lambda w: (matmul(X, w) ** 2).sum())
        return jax.jvp(slope, (W,), (W,))[1]

    assert_bits_equal(curvature(functools.partial(jax_mx.matmul, **options)), curvature(jnp.matmul))


# ---- bfloat16: derivatives of any order ---
WAYS = {
    "jvp": lambda f, w, t: jax.jvp(f, (w,), (t,))[1],
    "linearize": lambda f, w, t: jax.linearize(f, w)[1](t),
    "grad": lambda f, w, t: jax.grad(f)(w),
    "jvp of grad": lambda f, w, t: jax.jvp(jax.grad(f), (w,), (t,))[1],
    "grad of grad": lambda f, w, t: jax.grad(lambda w: (jax.grad(f)(w) * t).sum())(w),
    "grad of jvp": lambda f, w, t: jax.grad(lambda w: jax.jvp(f, (w,), (t,))[1])(w),
    "third": lambda f, w, t: jax.grad(lambda w: (jax.jvp(jax.grad(f), (w,), (t,))[1]).sum())(w),
    "vmap": lambda f, w, t: jax.vmap(lambda t: jax.jvp(jax.grad(f), (w,), (t,))[1])(
        jnp.stack([t, 2 * t])
    ),
    "checkpoint": lambda f, w, t: jax.jvp(jax.grad(jax.checkpoint(f)), (w,), (t,))[1],
}


@pytest.mark.parametrize("way", WAYS)
def test_products_in_bfloat16_have_all_derivatives(way):
    """Small integers, which bfloat16 holds, give JAX's bits."""
    rng = np.random.default_rng(0)
    x, w, t = (jnp.asarray(rng.integers(-1, 2, s), jnp.float32) for s in ((3, 32), *[(32, 2)] * 2))

    def run(matmul):
        call = functools.partial(WAYS[way], lambda w: (matmul(x, w) * matmul(x, w * w)).sum())
        return jax.jit(call)(w, t)

    assert_bits_equal(run(functools.partial(jax_mx.matmul, recipe="bf16")), run(jnp.matmul))


def test_products_in_mx_have_those_of_what_they_stand_for():
    """By way of fake_quantize, as the documents say."""

    def both(w):
        x, w = jax_mx.fake_quantize(X), jax_mx.fake_quantize(w, axis=0)
        return jax_mx.matmul(x, w, recipe="floats")

    y, dy = jax.jvp(both, (W,), (W,))
    np.testing.assert_allclose(y, jax_mx.matmul(X, W, recipe="mxfp8"), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dy, jax_mx.fake_quantize(X) @ W, rtol=1e-4, atol=1e-4)
    hessian = jax.hessian(lambda w: (both(w) ** 2).sum())(W[:, :1])[:, 0, :, 0]
    q = np.asarray(jax_mx.fake_quantize(X), np.float64)
    np.testing.assert_allclose(hessian, 2 * q.T @ q, rtol=1e-3, atol=1e-3)


# ---- weights on the left ---
def test_the_weight_on_the_left():
    left = Recipe("mxfp8_e4m3", "mxfp4_e2m1", weight="lhs")

    def both(f):
        return jax.value_and_grad(lambda w: (f(w) ** 2).sum())(W)

    want, slope = both(lambda w: jax_mx.matmul(X, w, recipe=UNLIKE))
    calls = [
        lambda w: jax_mx.matmul(w.T, X.T, recipe=left),
        lambda w: jax_mx.einsum("kf,bk->bf", w, X, recipe=left),
        lambda w: jax_mx.dot_general(w, X, (((0,), (1,)), ((), ())), recipe=left),
        lambda w: jax_mx.einsum("kf,bk->fb", UNLIKE.quantize_weight(w), X, recipe=UNLIKE),
        lambda w: jax_mx.matmul(left.quantize_weight(w.T, -1), X.T, recipe=UNLIKE),
    ]
    for call in calls:
        got, ours = both(call)
        np.testing.assert_allclose(got, want, rtol=1e-6)  # the order of the loss' sum
        np.testing.assert_allclose(ours, slope, rtol=1e-5, atol=1e-4)
    assert_bits_equal(calls[0](W), jax_mx.matmul(X, W, recipe=UNLIKE).T)
    other = jax_mx.matmul(W.T, X.T, recipe=UNLIKE).T  # which takes X for the weight
    assert (np.asarray(other) != np.asarray(calls[0](W).T)).any()
    batch = jnp.stack([W, -W])
    got = jax_mx.einsum("gkf,gbk->gfb", batch, jnp.stack([X, X]), recipe=left)
    assert_bits_equal(got[1], 0 - got[0])  # a sum that is zero has no sign
    assert jax_mx.can_multiply(W, X, "kf,bk->fb", recipe=left)[0]
    assert_refused(lambda: Recipe(weight="left"), ValueError, "Recipe: weight 'left' is unknown")


def test_the_weight_on_the_left_of_a_split_result():
    """The result lies as the caller says, also where the contracted axis is split."""
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=kinds, devices=jax.devices("cpu")[:8])
    w, x = np.ones((64, 256), np.float32), np.ones((256, 128), np.float32)
    product = functools.partial(
        jax_mx.matmul, recipe=Recipe(weight="lhs"), out_sharding=jax.P(None, "a")
    )
    with jax.set_mesh(mesh):
        y = jax.jit(product)(
            jax.device_put(w, jax.P(None, "b")), jax.device_put(x, jax.P("b", "a"))
        )
    assert jax.typeof(y).sharding.spec == jax.P(None, "a")
    assert (np.asarray(y) == 256).all()


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_derivatives_of_vmap_where_an_explicit_mesh_splits_the_mapped_axis(recipe):
    """They lie as the operands do, with the values of one device."""
    mesh = mesh_of(4, axis_type=jax.sharding.AxisType.Explicit)
    rng = np.random.default_rng(3)
    x, w = (rng.integers(-3, 4, s).astype(np.float32) for s in ((4, 32, 64), (64, 32)))

    def loss(x, w):
        return (jax.vmap(functools.partial(jax_mx.matmul, recipe=recipe), (0, None))(x, w)).sum()

    wanted = jax.grad(loss, (0, 1))(x, w)
    with jax.set_mesh(mesh):
        put = jax.device_put(x, jax.P("a")), jax.device_put(w, jax.P())
        got = jax.jit(jax.grad(loss, (0, 1)))(*put)
        if recipe == "bf16":
            _, change = jax.jvp(lambda x: loss(x, put[1]), (put[0],), (put[0],))
            np.testing.assert_allclose(change, loss(x, w), rtol=1e-5)
    assert jax.typeof(got[0]).sharding.spec[0] == "a"
    for ours, want in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(ours, want)


# ---- keys of layers ---
def test_a_fixed_key_is_told():
    dot = functools.partial(jax_mx.matmul, recipe=jax_mx.mxfp4_backward(jax.random.key(7)))
    with pytest.warns(UserWarning, match="by a key that is a constant of the program"):
        jax.jit(lambda w: dot(X, w))(W)
    jax.grad(lambda w: dot(X, w).sum())(W)  # whose next step may have another key
    step = jax.jit(lambda w, key: jax_mx.matmul(X, w, recipe=jax_mx.mxfp4_backward(key)))
    step(W, jax.random.key(7))


def test_layers_of_flax_draw_keys():
    from flax import linen, nnx

    from jax_mx.adapters.flax import LinenProduct, NnxProduct

    products = []

    def op(*args, recipe, **kwargs):
        products.append(recipe)
        return jax_mx.dot_general(*args, recipe=recipe, **kwargs)

    shared = NnxProduct(op, jax_mx.mxfp4_backward, nnx.Rngs(0))
    layers = [nnx.Linear(64, 64, dot_general=shared, rngs=nnx.Rngs(0)) for _ in range(2)]
    model = nnx.Sequential(*layers)

    @nnx.jit
    def step(model):
        gradients = nnx.grad(lambda model: (model(X) ** 2).sum())(model)
        return gradients["layers"][0]["kernel"][...]

    once, again = step(model), step(model)
    assert (once != again).any()
    np.testing.assert_allclose(once, again, rtol=1, atol=0.3 * float(jnp.abs(once).max()))
    assert len(products) == 2  # each layer draws one of its own, when the step is traced

    dot = functools.partial(LinenProduct, jax_mx.dot_general, jax_mx.mxfp4_backward)
    layer = linen.Dense(96, dot_general_cls=dot)
    params = layer.init(jax.random.key(0), X)

    @jax.jit
    def linear(params, key):
        def loss(params):
            return (layer.apply(params, X, rngs={"rounding": key}) ** 2).sum()

        return jax.grad(loss)(params)["params"]["kernel"]

    one, two = (linear(params, jax.random.key(seed)) for seed in (1, 2))
    assert_bits_equal(one, linear(params, jax.random.key(1)))
    assert (one != two).any()
