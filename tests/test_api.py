"""The public functions: shapes, strings, pytrees and every sentence that a bad call gets."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits_equal, assert_refused, assert_same_array, normal, random_bits

import jax_mx
from jax_mx.formats import formats, layouts
from jax_mx.launch.chips import chips_of


@pytest.mark.sampled(16)
@pytest.mark.parametrize("format", formats.FORMATS.values(), ids=str)
@pytest.mark.parametrize("shape", [(32,), (3, 64), (2, 3, 96), (0, 32), (5, 0), (1, 2, 3, 32)])
def test_shapes_and_dtypes(format, shape):
    q = jax_mx.quantize(jnp.ones(shape, jnp.float32), format)
    assert q.shape == shape and q.ndim == len(shape)
    assert q.dtype == q.values.dtype == format.storage
    assert q.values.shape == (*shape[:-1], shape[-1] // format.codes_per_byte)
    assert q.scales.dtype == jnp.float8_e8m0fnu
    assert q.scales.shape == (*shape[:-1], shape[-1] // 32)
    assert q.nbytes == q.values.size + q.scales.size
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        y = q.dequantize(dtype)
        assert (y.shape, y.dtype) == (shape, dtype)
        assert_bits_equal(y, jnp.ones(shape, dtype))


# ---- square blocks ---
SQUARE = {"block": (32, 32)}


@pytest.mark.optimized
def test_square_arrays_under_transformations():
    x = jnp.asarray(random_bits((3, 64, 2, 96), np.float32))
    want = jax_mx.quantize(jnp.moveaxis(x, 2, 1), **SQUARE)

    def each(x):
        return jax_mx.quantize(x, **SQUARE)

    for f in (jax.vmap(jax.vmap(each, in_axes=1)), jax.jit(jax.vmap(jax.vmap(each), in_axes=2))):
        got = f(x)
        if got.shape[0] == 2:
            got = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), got)
        assert_same_array(got, want)
    for turn in (False, True):
        back = jax.vmap(lambda q, turn=turn: q.dequantize(transpose=turn))(want)
        assert_bits_equal(back, want.dequantize(transpose=turn))
    assert_same_array(jax.vmap(lambda q: q.expand(-2))(want), want.expand(np.int64(-2)))
    # only one of two operands has the mapped dimension
    first = jax.tree.map(lambda a: a[0, 0], want)
    same = jax.vmap(
        lambda s: jax_mx.dequantize(dataclasses.replace(first, scales=s), transpose=True)
    )(jnp.stack([first.scales] * 2))
    assert_bits_equal(same[1], first.dequantize(transpose=True))
    assert jax.tree.structure(want) != jax.tree.structure(want.expand())


def test_names_are_accepted_wherever_objects_are():
    x = jnp.asarray(random_bits((64, 256), np.float32))
    by_name = jax_mx.quantize(x, "mxfp8_e5m2", scaling="even", scale_layout="blocked_128x4")
    by_object = jax_mx.quantize(
        x, jax_mx.MXFP8_E5M2, scaling=jax_mx.EVEN, scale_layout=jax_mx.BLOCKED_128X4
    )
    assert_same_array(by_name, by_object)
    assert_same_array(jax_mx.quantize(x, axis=1, **SQUARE), jax_mx.quantize(x, **SQUARE))
    assert_same_array(jax_mx.quantize(x, block=32), jax_mx.quantize(x))
    assert jax_mx.is_supported("quantize", "sm_90", format="mxfp8_e5m2", scaling="even")[0]


def test_mxarray_is_a_pytree_with_static_fields():
    q = jax_mx.quantize(jnp.ones((4, 64), jnp.bfloat16), axis=1)
    leaves, treedef = jax.tree.flatten(q)
    assert len(leaves) == 2 and hash(treedef) is not None
    assert (q.format, q.axis) == (jax_mx.MXFP8_E4M3, -1)
    assert_same_array(jax.jit(lambda q: q)(q), q)
    doubled = jax.tree.map(lambda a: jnp.concatenate([a, a]), q)
    assert doubled.shape == (8, 64)
    with pytest.raises(AttributeError):
        q.__setattr__("axis", 0)
    out = jax.eval_shape(jax_mx.quantize, jax.ShapeDtypeStruct((4, 64), jnp.float16))
    assert out.shape == (4, 64) and out.scales.shape == (4, 2)
    assert {q.format: 1, q.scale_layout: 2}


@pytest.mark.parametrize("in_axis", [0, 1, 2])
def test_vmap(in_axis):
    x = jnp.asarray(random_bits((32, 32, 32), np.float32))
    q = jax.vmap(jax_mx.quantize, in_axes=in_axis)(x)
    assert_same_array(q, jax_mx.quantize(jnp.moveaxis(x, in_axis, 0)))
    y = jax.vmap(jax_mx.dequantize)(q)
    assert_bits_equal(y, q.dequantize())
    columns = jax.vmap(lambda x: jax_mx.quantize(x, axis=0), in_axes=in_axis)(x)
    assert columns.axis == -2
    assert_same_array(columns, jax_mx.quantize(jnp.moveaxis(x, in_axis, 0), axis=1))
    both = jax.vmap(jax_mx.quantize_both, in_axes=in_axis)(x)
    for got, want in zip(both, jax_mx.quantize_both(jnp.moveaxis(x, in_axis, 0)), strict=True):
        assert_same_array(got, want)
    # only one of two operands has the mapped dimension
    same = jax.vmap(
        lambda v, s: jax_mx.dequantize(jax_mx.MXArray(v, s, q.format, -1, q.scale_layout)),
        in_axes=(0, None),
    )(q.values, q.scales[0])
    assert same.shape == (32, 32, 32)


def test_weak_types_numpy_and_lists():
    assert jax_mx.quantize([1.0] * 32).shape == (32,)
    assert jax_mx.quantize(np.ones(32, np.float16)).shape == (32,)
    assert jax_mx.quantize(jnp.full((32,), 1.0)).values.weak_type is False


X = jnp.ones((40, 64), jnp.bfloat16)
WIDE = X.astype(jnp.float32)


@pytest.mark.parametrize(
    "call,error,sentence",
    [
        (lambda: jax_mx.quantize(X, axis=0), ValueError,
         "quantize: axis 0 has length 40, not a multiple of the block length 32; pad it to 64 or "
         "choose another axis of (40, 64)"),
        (lambda: jax_mx.quantize(X, axis=2), ValueError,
         "quantize: axis 2 is out of range for rank 2; -2 to 1"),
        (lambda: jax_mx.quantize(X, axis=1.5), TypeError, "quantize: axis must be an int, got 1.5"),
        (lambda: jax_mx.quantize(X[0, 0]), ValueError,
         "quantize: x is a scalar, which has no axis; give it a dimension"),
        (lambda: jax_mx.quantize(X.astype(jnp.int32)), TypeError,
         "quantize: x is int32, must be one of bfloat16, float16, float32"),
        (lambda: jax_mx.quantize(X.astype(jnp.complex64)), TypeError, "quantize: x is complex64,"),
        (lambda: jax_mx.quantize(np.ones(32)), TypeError, "quantize: x is float64,"),
        (lambda: jax_mx.quantize(X.astype(jnp.float8_e5m2)), TypeError, "x is float8_e5m2,"),
        (lambda: jax_mx.quantize(X, "mxfp8"), ValueError,
         "quantize: format 'mxfp8' is unknown; use one of 'mxfp8_e4m3', 'mxfp8_e5m2'"),
        (lambda: jax_mx.quantize(X, jnp.float8_e4m3fn), TypeError,
         "quantize: format must be one of 'mxfp8_e4m3'"),
        (lambda: jax_mx.quantize(X, scaling="up"), ValueError,
         "quantize: scaling 'up' is unknown; use one of 'floor', 'ceil', 'even', 'rceil'"),
        (lambda: jax_mx.quantize(X, scaling=None), TypeError, "quantize: scaling must be one of"),
        (lambda: jax_mx.quantize(X, scale_layout="swizzled"), ValueError,
         "quantize: scale_layout 'swizzled' is unknown; use one of 'row_major', 'blocked_128x4'"),
        (lambda: jax_mx.quantize(X[0], scale_layout="blocked_128x4"), ValueError,
         "scale_layout 'blocked_128x4' tiles a matrix's rows and columns, the array has "
         "rank 1; use 'row_major' or a matrix"),
        (lambda: jax_mx.quantize(X, implementation="triton"), ValueError,
         "quantize: implementation 'triton' is unknown; use one of 'cutedsl', 'flydsl', 'xla'"),
        (lambda: jax_mx.quantize(X, implementation="cutedsl"), NotImplementedError,
         "quantize: implementation 'cutedsl' runs on cuda, not on cpu; use implementation=None or "
         "'xla'"),
        (lambda: jax_mx.quantize(X.T, axis=0, implementation="flydsl"), NotImplementedError,
         "quantize: implementation 'flydsl' runs on rocm, not on cpu; use implementation=None or "
         "'xla'"),
        (lambda: jax_mx.quantize(X, transpose=1), TypeError,
         "quantize: transpose must be a bool, got 1"),
        (lambda: jax_mx.quantize_both(X), ValueError,
         "quantize_both: axis -2 has length 40, not a multiple of the block length 32"),
        (lambda: jax_mx.quantize_both(X[0]), ValueError,
         "quantize_both: x has rank 1; two directions need a matrix"),
        (lambda: jax_mx.quantize_both(X, transpose=True), TypeError,
         "quantize_both: transpose must be a pair"),
        (lambda: jax_mx.quantize_both(X, transpose=(True, True)), ValueError,
         "quantize_both: transpose[0] is the result along the last axis"),
        (lambda: jax_mx.quantize_both(X, formats="mxfp8_e4m3"), TypeError,
         "quantize_both: formats must be a pair"),
        (lambda: jax_mx.quantize(WIDE, "mxfp6_e3m2", implementation="cutedsl"), NotImplementedError,
         "quantize: cutedsl has no kernel for mxfp6_e3m2 and dtype float32, only for bfloat16; "
         "'xla' serves it"),
        (lambda: jax_mx.quantize_both(X[:32], formats=("mxfp4_e2m1", "mxfp8_e5m2"),
                                      implementation="cutedsl"), NotImplementedError,
         "quantize_both: cutedsl has no kernel for mxfp4_e2m1 and mxfp8_e5m2 in one call; 'xla' "),
        (lambda: jax_mx.quantize_both(X[:32], formats=("mxfp4_e2m1", "mxfp8_e5m2"),
                                      scale_layout="shuffled_32x8", implementation="cutedsl"),
         NotImplementedError, "no kernel for mxfp4_e2m1 and mxfp8_e5m2 in one call; 'xla' "),
        (lambda: jax_mx.quantize_both(X[:32], formats=("mxfp4_e2m1", "mxfp8_e4m3"),
                                      scale_layout="shuffled_32x8", implementation="cutedsl"),
         NotImplementedError, "quantize_both: cutedsl has no kernel for mxfp4_e2m1 and mxfp8_e4m3 "
         "and scale_layout shuffled_32x8, only for blocked_128x4, row_major; 'xla' "),
        (lambda: jax_mx.quantize_both(WIDE[:32], formats=("mxfp4_e2m1", "mxfp8_e4m3"),
                                      implementation="cutedsl"), NotImplementedError,
         "quantize_both: cutedsl has no kernel for mxfp4_e2m1 and mxfp8_e4m3 and dtype float32, "
         "only for bfloat16; 'xla' "),
        (lambda: jax_mx.quantize(X, zero_scale=1), ValueError,
         "quantize: zero_scale, the scale of all-zero blocks, must be 0 (2^-127) or 127 (1.0), got "
         "1"),
        (lambda: jax_mx.quantize(X, zero_scale=np.array([0])), TypeError, "127 (1.0), got array("),
        (lambda: jax_mx.quantize(X, zero_scale=jnp.zeros(3)), TypeError, "127 (1.0), got Array("),
        (lambda: jax.jit(lambda z: jax_mx.quantize(X, zero_scale=z))(0), TypeError,
         "quantize: zero_scale, the scale of all-zero blocks, must be 0 (2^-127) or 127 (1.0)"),
        (lambda: jax_mx.quantize(X, axis=jnp.zeros((3, 3))), TypeError, "an int, got ArrayImpl"),
        (lambda: jax_mx.quantize(X, zero_scale=127, implementation="cutedsl"), NotImplementedError,
         "quantize: cutedsl has no kernel for zero_scale 127, only for 0; 'xla' serves it"),
        (lambda: jax_mx.quantize(X, scale_layout="shuffled_32x8", implementation="cutedsl"),
         NotImplementedError,
         "quantize: cutedsl has no kernel for mxfp8_e4m3 and scale_layout shuffled_32x8, only for "
         "blocked_128x4, row_major; 'xla' serves it"),
        (lambda: jax_mx.quantize(WIDE, "mxfp6_e3m2", implementation="flydsl"), NotImplementedError,
         "quantize: flydsl has no kernel for mxfp6_e3m2 and dtype float32, only for bfloat16"),
        (lambda: jax_mx.dequantize(X), TypeError, "dequantize: q must be an MXArray"),
        (lambda: jax_mx.quantize(X).dequantize(jnp.int8), TypeError, "dequantize: dtype is int8,"),
        (lambda: jax_mx.quantize(X).dequantize("fp32"), TypeError,
         "dequantize: dtype is 'fp32', must be one of"),
        (lambda: jax_mx.quantize(X, "mxfp6_e2m3").dequantize("float16", implementation="cutedsl"),
         NotImplementedError, "dequantize: cutedsl has no kernel for mxfp6_e2m3 and dtype float16"),
        (lambda: jax_mx.quantize(X[0]).dequantize(transpose=True), ValueError,
         "dequantize: transpose swaps the last two axes, the array has rank 1"),
        (lambda: jax_mx.quantize(X).dequantize(transpose="yes"), TypeError,
         "dequantize: transpose must be a bool, got 'yes'"),
        (lambda: jax_mx.quantize(X, block=16), ValueError,
         "quantize: block must be 32 or (32, 32), got 16"),
        (lambda: jax_mx.quantize(X, block=(32, 64)), ValueError,
         "quantize: block must be 32 or (32, 32), got (32, 64)"),
        (lambda: jax_mx.quantize(X, block="square"), TypeError,
         "quantize: block must be 32 or (32, 32), got 'square'"),
        (lambda: jax_mx.quantize(X, block=(32, 32)), ValueError,
         "quantize: axis -2 has length 40, not a multiple of the block length 32"),
        (lambda: jax_mx.quantize(X[0], block=(32, 32)), ValueError,
         "quantize: square blocks span two axes, the array has rank 1"),
        (lambda: jax_mx.quantize(X, axis=0, block=(32, 32)), ValueError,
         "quantize: square blocks span the last two axes; leave axis at -1, got -2"),
        (lambda: jax_mx.quantize(X, block=(32, 32), scale_layout="blocked_128x4"), ValueError,
         "quantize: square blocks have row-major scales; for 'blocked_128x4' expand them: "
         "quantize(x, block=(32, 32)).expand(axis, 'blocked_128x4')"),
        (lambda: jax_mx.quantize(WIDE[:32], "mxfp6_e2m3", block=(32, 32), implementation="cutedsl"),
         NotImplementedError, "quantize: cutedsl has no kernel for "),
        (lambda: jax_mx.quantize(X).expand(), ValueError,
         "expand: blocks run along axis -1 as it is; only square ones"),
        (lambda: jax_mx.quantize(X[:32], block=(32, 32)).expand(0), ValueError,
         "expand: axis must be -1 or -2, got 0"),
        (lambda: jax_mx.quantize(X[:32], block=(32, 32)).expand(-1, "tiled"), ValueError,
         "expand: scale_layout 'tiled' is unknown; use one of"),
        (lambda: jax_mx.is_supported("matmul", "sm_90"), ValueError, "op 'matmul' is unknown"),
    ],
)  # fmt: skip
def test_bad_calls_get_one_sentence(call, error, sentence):
    assert_refused(call, error, sentence)


def test_a_broken_mxarray_gets_one_sentence():
    q = jax_mx.quantize(X)
    make = jax_mx.MXArray
    with pytest.raises(ValueError, match=r"have scales of the shape \(40, 2\), got \(40, 1\)"):
        make(q.values, q.scales[:, :1], q.format, -1, q.scale_layout).dequantize()
    with pytest.raises(TypeError, match=r"q\.values is uint8, MXFP8_E4M3 has float8_e4m3fn"):
        make(q.values.view(jnp.uint8), q.scales, q.format, -1, q.scale_layout).dequantize()
    with pytest.raises(ValueError, match="scales of the shape"):
        make(q.values, q.scales, q.format, -1, layouts.BLOCKED_128X4).dequantize()
    with pytest.raises(ValueError, match=r"square blocks have scales of the shape \(1, 2\), got"):
        make(q.values, q.scales, q.format, -1, q.scale_layout, (32, 32)).dequantize()
    with pytest.raises(ValueError, match=r"MXArray: block must be 32 or \(32, 32\), got \(8,\)"):
        make(q.values, q.scales, q.format, -1, q.scale_layout, (8,)).dequantize()


def test_no_derivative_says_what_to_do():
    def loss(x):
        return jax_mx.quantize(x).dequantize(jnp.float32).sum()

    with pytest.raises(
        NotImplementedError, match=r"quantize: codes have no derivative.*jax_mx\.fake_quantize"
    ):
        jax.grad(loss)(jnp.ones(32))
    with pytest.raises(NotImplementedError, match="quantize: codes have no derivative"):
        jax.jvp(loss, (jnp.ones(32),), (jnp.ones(32),))
    stopped = jax.grad(lambda x: loss(jax.lax.stop_gradient(x)) + x.sum())(jnp.ones(32))
    assert_bits_equal(stopped, jnp.ones(32))


# ---- fake_quantize and jax.checkpoint ---


def test_fake_quantize_under_transformations():
    x = jnp.asarray(random_bits((3, 4, 64), np.float32))
    fake = jax_mx.fake_quantize
    want = fake(x)
    assert_bits_equal(jax.vmap(fake)(x), want)
    columns = jax.vmap(jax.vmap(partial(fake, axis=0)), in_axes=1, out_axes=1)(x.swapaxes(0, 1))
    assert_bits_equal(columns.swapaxes(0, 1), want)
    ones = jnp.ones((32,))
    for clip in (False, True):

        def loss(x, clip=clip):
            return (fake(x, clip=clip) ** 2).sum()

        assert_bits_equal(jax.grad(loss)(ones), 2 * ones)
        assert_bits_equal(jax.jit(jax.hessian(loss))(ones), 2 * jnp.eye(32))
        assert_bits_equal(jax.vmap(jax.grad(loss))(jnp.ones((2, 32))), jnp.full((2, 32), 2.0))
        assert_bits_equal(jax.lax.map(jax.grad(loss), jnp.ones((5, 32))), jnp.full((5, 32), 2.0))
    assert_bits_equal(jax.jit(fake)(x), want)
    assert_bits_equal(jax.jvp(fake, (x,), (x,))[1], x)
    assert fake([1.0] * 32).shape == (32,) and fake(np.ones(32, np.float16)).dtype == jnp.float16
    for call, error, sentence in (
        (lambda: fake(X, clip=1), TypeError, "fake_quantize: clip must be a bool, got 1"),
        (lambda: fake(X, axis=0), ValueError, "fake_quantize: axis 0 has length 40, not a"),
        (lambda: fake(X.astype(jnp.int8)), TypeError, "fake_quantize: x is int8, must be one of"),
        (lambda: fake(WIDE, "mxfp6_e3m2", implementation="cutedsl"), NotImplementedError,
         "fake_quantize: cutedsl has no kernel for mxfp6_e3m2 and dtype float32, only for "),
    ):  # fmt: skip
        assert_refused(call, error, sentence)


def count(jaxpr, name: str) -> int:
    """How often a primitive stands in a jaxpr and in all within it."""
    inner = [getattr(j, "jaxpr", j) for eqn in jaxpr.eqns for j in jax.tree.leaves(
        list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")
    ) if hasattr(getattr(j, "jaxpr", j), "eqns")]  # fmt: skip
    return sum(eqn.primitive.name == name for eqn in jaxpr.eqns) + sum(
        count(j, name) for j in inner
    )


@jax.custom_vjp
def product(x, w):
    return product_forward(x, w)[0]


def product_forward(x, w):
    """As a training step has it: each operand quantized once, for both passes."""
    xs, ws = (jax_mx.quantize_both(a, transpose=(False, False)) for a in (x, w))
    return xs[0].dequantize(x.dtype) @ ws[1].dequantize(w.dtype), (xs[1], ws[0])


def product_backward(kept, g):
    x, w = (q.dequantize(g.dtype) for q in kept)
    g = jax_mx.quantize(g).dequantize(g.dtype)
    return g @ w.T, x.T @ g


product.defvjp(product_forward, product_backward)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layer", [product, lambda x, w: jax_mx.fake_quantize(x) @ w])
def test_a_policy_keeps_what_is_quantized(layer):
    """Nothing is quantized twice under remat."""
    x, w = normal((64, 96), 0, "bfloat16"), normal((96, 32), 1, "bfloat16")
    assert (jnp.abs(jax_mx.quantize(x).values.astype(jnp.float32)) >= 256).any()
    keep = jax.checkpoint_policies.save_only_these_names(jax_mx.CHECKPOINT_NAME)

    def counted(policy):
        def loss(x, w):
            f = jax.checkpoint(lambda x, w: jnp.sin(layer(x, w)), policy=policy)
            return f(x, w).astype(jnp.float32).sum()

        step = jax.jit(jax.grad(loss, argnums=(0, 1)))
        return count(step.trace(x, w).jaxpr.jaxpr, "mx_quantize"), step(x, w)

    once = counted(jax.checkpoint_policies.everything_saveable)
    kept, again = counted(keep), counted(None)
    assert kept[0] == once[0] < again[0]
    for got, want in zip(kept[1], again[1], strict=True):
        assert_bits_equal(got, want)


def test_is_supported():
    supported = jax_mx.is_supported
    assert supported("quantize", "sm_90") == (True, "cutedsl: quantize_last_bfloat16_mxfp8_e4m3")
    ok, reason = supported("quantize", "sm_70", format="mxfp4_e2m1")
    assert not ok
    chips = ", ".join(chips_of("cutedsl"))
    assert reason == f"quantize: no cutedsl kernel for sm_70, only for {chips}; 'xla' serves it"
    ok, reason = supported("quantize", jax.devices("cpu")[0])
    assert not ok and reason == "quantize: no kernels for cpu; 'xla' serves it"
    assert supported("quantize", "sm_90", axis=0)[1].startswith("cutedsl: quantize_second_bf")
    assert "_both_transposed_" in supported("quantize_both", "sm_90", transpose=True)[1]
    assert not supported("quantize", "sm_90", scale_layout="shuffled_32x8")[0]
    assert supported("quantize", "sm_90", format="mxfp4_e2m1", scale_layout="shuffled_32x8")[0]
    assert supported("quantize", "sm_90", axis=0, ndim=1)[0]
    assert supported("quantize", "sm_90", axis=1)[0]
    with pytest.raises(ValueError, match="transpose swaps the last two axes, the array has rank 1"):
        supported("dequantize", "sm_90", ndim=1, transpose=True)
    with pytest.raises(ValueError, match="square blocks span the last two axes"):
        supported("quantize", "sm_90", axis=-2, block=(32, 32))
    assert supported("quantize", "gfx950", scale_layout="shuffled_32x8")[0]
    assert supported("quantize", "sm_90", format="mxfp4_e2m1", zero_scale=127)[0]
    ok, reason = supported("quantize_both", "sm_90", transpose=True, zero_scale=127)
    assert not ok and "no kernel for zero_scale 127, only for 0" in reason
    shuffled = {"format": "mxfp4_e2m1", "value_layout": "shuffled_16x16"}
    assert supported("quantize", "sm_90", **shuffled)[0]
    assert supported("quantize_both", "sm_90", transpose=True, **shuffled)[0]
    assert supported("dequantize", "sm_90", transpose=True, **shuffled)[0]
    for op, turn in (("quantize", False), ("dequantize", True)):
        with pytest.raises(ValueError, match="tiles a matrix whose rows end with the block axis"):
            supported(op, "sm_90", axis=0, transpose=turn, **shuffled)
    for options in (
        {"rounding": jax_mx.Stochastic(jax.random.key(0))},
        {"hadamard": jax_mx.Hadamard()},
        {"zero_scale": 127},
    ):
        with pytest.raises(ValueError, match="are quantize's, dequantize has none"):
            supported("dequantize", "sm_90", **options)
    assert supported("quantize", "sm_80", implementation="xla") == (True, "xla: runs everywhere")
    with pytest.raises(
        ValueError, match=r"'H200' is no chip's name; use a jax\.Device, or one like"
    ):
        supported("quantize", "H200")


def test_mxarrays_are_equal_to_themselves_and_no_numpy_arrays():
    q = jax_mx.quantize(X)
    other = jax_mx.quantize(X)
    assert q == q and len({q, other}) == 2
    with pytest.raises(TypeError, match=r"compare \.values and \.scales"):
        _ = q == other
    with pytest.raises(TypeError, match="an MXArray is two arrays"):
        np.asarray(q)


def test_names_and_broken_leaves_of_a_hand_made_mxarray():
    q = jax_mx.quantize(X)
    named = jax_mx.MXArray(q.values, q.scales, "mxfp8_e4m3", -1, "row_major")
    assert_bits_equal(jax_mx.dequantize(named), q.dequantize())
    with pytest.raises(TypeError, match=r"dequantize: q\.values is NoneType, MXFP8_E4M3 has"):
        jax_mx.dequantize(jax.tree.map(lambda a: None, q))
    with pytest.raises(ValueError, match="if a vmap put its axis behind the block axis"):
        jax.vmap(jax_mx.quantize, out_axes=-1)(jnp.ones((3, 64))).dequantize()
    tiled = jax_mx.quantize(jnp.ones((1, 64)), scale_layout="blocked_128x4")
    with pytest.raises(ValueError, match="tiles a matrix's rows and columns, the array has rank 1"):
        jax.vmap(jax_mx.dequantize)(tiled)


def test_odd_inputs():
    big = np.arange(64, dtype=">f4").reshape(2, 32)
    assert_same_array(jax_mx.quantize(big), jax_mx.quantize(big.astype(np.float32)))
    with pytest.raises(TypeError, match="axis must be an int, got True"):
        jax_mx.quantize(X, axis=True)
    with pytest.raises(TypeError, match="dtype is None, must be one of"):
        jax_mx.quantize(X).dequantize(None)
    with pytest.raises(TypeError, match="x is key<fry>"):
        jax_mx.quantize(jax.random.split(jax.random.key(0), 32))
    deep = jax_mx.quantize(jnp.ones((1,) * 70 + (2, 32)), scale_layout="blocked_128x4")
    assert deep.dequantize().ndim == 72
    huge = jax.ShapeDtypeStruct((2**40, 2**33), jnp.bfloat16)
    q = jax.eval_shape(lambda x: jax_mx.quantize(x, scale_layout="blocked_128x4"), huge)
    assert jax.eval_shape(jax_mx.dequantize, q).shape == huge.shape
    with pytest.raises(TypeError, match=r"device must be a jax\.Device or a chip"):
        jax_mx.is_supported("quantize", 5)
    assert jax_mx.is_supported("quantize", "sm_90a")[0]
    with pytest.raises(ValueError, match="ndim must be 1 to 64"):
        jax_mx.is_supported("quantize", "sm_90", ndim=10**8)


def test_what_an_array_prints():
    """Types, and the names that arguments take; not the numbers."""
    q = jax_mx.quantize(jnp.ones((64, 96)), "mxfp4_e2m1", scale_layout="blocked_128x4")
    want = (
        "MXArray(values=uint8[64, 48], scales=float8_e8m0fnu[1, 1, 512], format='mxfp4_e2m1', "
        "axis=-1, scale_layout='blocked_128x4', block=(32,), value_layout='row_major', window=32)"
    )
    assert repr(q) == want
    assert repr(jax.tree.map(lambda _: None, q)).startswith("MXArray(values=None, scales=None, ")
