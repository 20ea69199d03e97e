"""MXFP4 as JAX's float4, and products of quantized operands: the bytes are those of MXArrays."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits_equal, assert_same_array, random_bits, value_table
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from test_primitive import COLLECTIVE

import jax_mx
from jax_mx import MXArray
from jax_mx.layouts import SCALE_LAYOUTS

P = PartitionSpec
FP4 = partial(jax_mx.quantize, format="mxfp4_e2m1")
# Of every byte, its two elements.
TABLE = np.array([float(v) for v in value_table(jax_mx.MXFP4_E2M1)], np.float32)
TABLE = np.concatenate([TABLE, -TABLE])
PAIRS = np.stack([TABLE[np.arange(256) & 15], TABLE[np.arange(256) >> 4]], -1)


def finite(shape, seed=0):
    x = random_bits(shape, jnp.bfloat16, seed)
    return jnp.asarray(np.where(np.isfinite(x.astype(np.float32)), x, x.dtype.type(1.5)))


@pytest.mark.parametrize("layout", SCALE_LAYOUTS)
@pytest.mark.parametrize("shape", [(32,), (3, 64), (2, 5, 96), (0, 32), (4, 0)])
def test_float4_there_and_back(shape, layout):
    if len(shape) < 2 and layout != "row_major":
        return
    q = FP4(finite(shape), scale_layout=layout)
    for view in (MXArray.as_float4, jax.jit(MXArray.as_float4)):
        f4 = view(q)
        assert (f4.shape, f4.dtype) == (shape, jnp.float4_e2m1fn)
        want = PAIRS[np.asarray(q.values)].reshape(shape)
        assert_bits_equal(np.asarray(f4.astype(jnp.float32)), want)  # -0 is -0
    back = partial(MXArray.from_float4, scale_layout=layout)
    for f in (back, jax.jit(back)):
        assert_same_array(f(f4, q.scales), q)
    if layout == "row_major":  # element times scale is what the reference says
        scales = jnp.repeat(q.scales.astype(jnp.float32), 32, axis=-1)
        np.testing.assert_array_equal(
            np.asarray(f4.astype(jnp.float32) * scales)[np.asarray(scales) > 1e-37],
            np.asarray(q.dequantize(jnp.float32))[np.asarray(scales) > 1e-37],
        )


def test_float4_of_transposed_square_and_mapped_arrays():
    x = finite((3, 64, 96))
    turned = FP4(x, axis=-2, transpose=True)
    assert turned.as_float4().shape == (3, 96, 64)
    square = FP4(x, block=(32, 32))
    same = MXArray.from_float4(square.as_float4(), square.scales, block=(32, 32))
    assert_same_array(same, square)
    q = FP4(x)
    mapped = jax.vmap(MXArray.as_float4)(q)
    assert_bits_equal(mapped.astype(jnp.float32), q.as_float4().astype(jnp.float32))
    assert_same_array(jax.vmap(MXArray.from_float4)(mapped, q.scales), q)


@pytest.mark.parametrize("spec", [P("a", "b"), P(None, ("a", "b"))], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_float4_stays_sharded(kind, spec):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind,) * 2, devices=jax.devices("cpu"))
    x = finite((64, 256))
    want = FP4(x)
    with jax.set_mesh(mesh):
        q = jax.jit(FP4)(jax.device_put(x, NamedSharding(mesh, spec)))
        view = jax.jit(MXArray.as_float4)
        f4 = view(q)
        back = jax.jit(MXArray.from_float4)
        texts = [view.lower(q).compile().as_text(), back.lower(f4, q.scales).compile().as_text()]
        for text in texts:
            assert not COLLECTIVE.search(text)
            assert not re.search(r"= \S+ (?:transpose|gather)\(", text), text
        assert f4.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        again = back(f4, q.scales)
        assert again.values.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        wide = jax.jit(lambda a: a.astype(jnp.float32))(f4)
    assert_bits_equal(wide, want.as_float4().astype(jnp.float32))
    assert_same_array(again, want)


def test_float4_refuses_in_one_sentence():
    x = jnp.ones((64, 64))
    f4, scales = FP4(x).as_float4(), FP4(x).scales
    make = MXArray.from_float4
    for call, error, sentence in (
        (lambda: jax_mx.quantize(x).as_float4(), ValueError,
         "as_float4: elements are MXFP8_E4M3, only MXFP4_E2M1 is float4"),
        (lambda: FP4(x, axis=0).as_float4(), ValueError,
         "as_float4: codes are packed along axis -2, float4 along the last; use quantize(x, "
         "axis=..., transpose=True)"),
        (lambda: make(x, scales), TypeError, "from_float4: values are float32, must be float4"),
        (lambda: make(f4, scales.view(jnp.uint8)), TypeError, "from_float4: scales are uint8,"),
        (lambda: make(f4[:, :40], scales), ValueError,
         "from_float4: values have the shape (64, 40), 32 must divide the last 1 of it"),
        (lambda: make(f4, scales[1:]), ValueError,
         "have scales of the shape (64, 2), got (63, 2)"),
        (lambda: make(f4, scales, scale_layout="tiles"), ValueError, "scale_layout 'tiles' is un"),
    ):  # fmt: skip
        with pytest.raises(error) as caught:
            call()
        assert sentence in str(caught.value) and "\n" not in str(caught.value)


# ---- mx_matmul_reference ---
@pytest.mark.parametrize(
    "m,n,k", [(8, 2112, 7168), (16, 3072, 1536), (64, 3072, 1536), (256, 2880, 512)]
)
def test_products_of_amd_mxfp4_mm(m, n, k):
    """gpu-mode's shapes and tolerance: a reads as float4 in JAX's own scaled product."""
    keys = jax.random.split(jax.random.key(m))
    a, b = (
        FP4(jax.random.normal(key, (rows, k), jnp.bfloat16), scaling="even")
        for key, rows in zip(keys, (m, n), strict=True)
    )
    got = jax_mx.mx_matmul_reference(a, b)
    assert (got.shape, got.dtype) == ((m, n), jnp.float32)
    left, right = (np.asarray(q.dequantize(jnp.float32), np.float64) for q in (a, b))
    bound = k * 2.0**-23 * (np.abs(left) @ np.abs(right).T)
    assert (np.abs(np.asarray(got, np.float64) - left @ right.T) <= bound).all()
    dot = jax.jit(
        lambda a, b: jax.lax.scaled_dot(
            a.as_float4(),
            b.as_float4(),
            lhs_scale=a.scales,
            rhs_scale=b.scales,
            dimension_numbers=(((1,), (1,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
    )
    np.testing.assert_allclose(dot(a, b), got, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "pair,layout",
    [
        (("mxfp4_e2m1", "mxfp8_e4m3"), "row_major"),
        (("mxfp6_e2m3", "mxfp8_e5m2"), "blocked_128x4"),
        (("mxfp4_e2m1", "mxfp6_e3m2"), "shuffled_32x8"),
    ],
)
def test_products_of_any_operands(pair, layout):
    """Small integers, so that every sum is exact in any order."""
    rng = np.random.default_rng(0)
    a, b = (
        jnp.asarray(rng.integers(-3, 4, shape), jnp.float32)
        for shape in ((2, 3, 40, 64), (3, 64, 24))
    )
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    one, two = (partial(jax_mx.quantize, format=f, scale_layout=layout) for f in pair)
    lefts = (one(a), one(jnp.swapaxes(a, -1, -2), axis=-2))
    rights = (two(b, axis=-2), two(b, axis=-2, transpose=True))
    for left, right in zip(lefts, rights, strict=True):
        got = jax.jit(jax_mx.mx_matmul_reference)(left, right)
        assert_bits_equal(got, want.astype(np.float32))


def test_products_poison_and_refuse():
    x = jnp.ones((32, 64)).at[3, 40].set(jnp.inf)
    a, b = FP4(x), FP4(jnp.ones((64, 64)))
    nan = np.isnan(np.asarray(jax_mx.mx_matmul_reference(a, b)))
    assert nan[3].all() and nan.sum() == 64
    for call, error, sentence in (
        (lambda: jax_mx.mx_matmul_reference(x, b), TypeError, "a must be an MXArray, got Arr"),
        (lambda: jax_mx.mx_matmul_reference(a, FP4(x[0])), ValueError,
         "b has the shape (64,) and blocks along axis -1; it must be a matrix, or a stack"),
        (lambda: jax_mx.mx_matmul_reference(a, FP4(x, axis=-2)), ValueError,
         "a has length 64 along axis -1 and b 32 along axis -2; the product is over both"),
    ):  # fmt: skip
        with pytest.raises(error) as caught:
            call()
        assert sentence in str(caught.value) and "\n" not in str(caught.value)
