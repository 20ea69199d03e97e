"""MXFP4 as JAX's float4, and products of quantized operands: they give the bytes of MXArrays."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from helpers import (
    COLLECTIVE,
    assert_bits_equal,
    assert_refused,
    assert_same_array,
    mesh_of,
    normal,
    random_bits,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx
from jax_mx import MXArray
from jax_mx.formats.layouts import SCALE_LAYOUTS

P = PartitionSpec
FP4 = partial(jax_mx.quantize, format="mxfp4_e2m1")
# The two elements of every byte.
TABLE = oracle.FORMATS["mxfp4_e2m1"].table.astype(np.float32)
TABLE = np.concatenate([TABLE, -TABLE])
PAIRS = np.stack([TABLE[np.arange(256) & 15], TABLE[np.arange(256) >> 4]], -1)


def finite(shape, seed=0):
    x = random_bits(shape, jnp.bfloat16, seed)
    return jnp.asarray(np.where(np.isfinite(x.astype(np.float32)), x, x.dtype.type(1.5)))


@pytest.mark.sampled(8)
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
    assert same.block == MXArray.from_float4(same.as_float4(), same.scales, block=[32, 32]).block
    assert MXArray.from_float4(FP4(x).as_float4(), FP4(x).scales, block=32).block == (32,)
    q = FP4(x)
    mapped = jax.vmap(MXArray.as_float4)(q)
    assert_bits_equal(mapped.astype(jnp.float32), q.as_float4().astype(jnp.float32))
    assert_same_array(jax.vmap(MXArray.from_float4)(mapped, q.scales), q)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("spec", [P("a", "b"), P(None, ("a", "b"))], ids=str)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_float4_stays_sharded(axis_type, spec):
    mesh = mesh_of(2, 4, axis_type=axis_type)
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
        (lambda: make(f4, scales, block=None), TypeError,
         "from_float4: block must be 32 or (32, 32), got None"),
        (lambda: make(f4, scales, block=(16,)), ValueError,
         "from_float4: block must be 32 or (32, 32), got (16,)"),
        (lambda: make(f4, scales, block=(32, 32), scale_layout="blocked_128x4"), ValueError,
         "from_float4: square blocks have row-major scales; for 'blocked_128x4' expand them"),
        (lambda: make(f4[0], scales[0], scale_layout="blocked_128x4"), ValueError,
         "from_float4: scale_layout 'blocked_128x4' tiles a matrix's rows and columns, the array"),
        (lambda: make([1.0] * 32, scales), TypeError, "from_float4: values are list, must be"),
        (lambda: make(f4, None), TypeError, "from_float4: scales are NoneType, must be"),
    ):  # fmt: skip
        assert_refused(call, error, sentence)


# ---- mx_matmul_reference ---
@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "m,n,k", [(8, 2112, 7168), (16, 3072, 1536), (64, 3072, 1536), (256, 2880, 512)]
)
def test_products_of_amd_mxfp4_mm(m, n, k):
    """gpu-mode's shapes and tolerance: a reads as float4 in JAX's own scaled product."""
    a, b = (FP4(normal((rows, k), rows, jnp.bfloat16), scaling="even") for rows in (m, n))
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


@pytest.mark.sampled(2)
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


@pytest.mark.parametrize(
    "one,other",
    [(1e-40, 1e30), (1e30, 1e-40), (3e38, 1e-38), (2.0**-127, 2.0**127), (-1e-30, 1e-7)],
)
@pytest.mark.parametrize("format", ["mxfp8_e5m2", "mxfp4_e2m1"])
def test_products_of_the_smallest_and_the_largest(format, one, other):
    """Scales are multiplied with each other: operands that are subnormal floats are none here."""
    a, b = (
        jax_mx.quantize(np.full((32, 64), x, np.float32), format, scaling="floor")
        for x in (one, other)
    )
    left, right = (
        np.asarray(q.dequantize(jnp.float32)).view(np.uint32).view(np.float32).astype(np.float64)
        for q in (a, b)
    )
    assert_bits_equal(jax_mx.mx_matmul_reference(a, b), (left @ right.T).astype(np.float32))


def test_products_overflow_only_as_a_whole():
    huge, tiny = (jax_mx.quantize(np.full((32, 32), x, np.float32)) for x in (3e38, 1e-40))
    assert (np.asarray(jax_mx.mx_matmul_reference(huge, huge)) == np.inf).all()
    assert (np.asarray(jax_mx.mx_matmul_reference(tiny, tiny)) == 0).all()
    for m, k in ((0, 64), (5, 0)):
        a, b = jax_mx.quantize(jnp.ones((m, k))), jax_mx.quantize(jnp.ones((7, k)))
        assert_bits_equal(jax_mx.mx_matmul_reference(a, b), jnp.zeros((m, 7)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "axis_type,specs,options",
    [
        pytest.param(AxisType.Auto, (P("a", "b"), P("b", "a")), {}, marks=pytest.mark.thorough),
        (AxisType.Explicit, (P("a", "b"), P("b", "a")), {"scale_layout": "blocked_128x4"}),
        pytest.param(AxisType.Explicit, (P("a"), P("a")), {}, marks=pytest.mark.thorough),
        pytest.param(
            *(AxisType.Auto, (P(), P("b")), {"scale_layout": "blocked_128x4"}),
            marks=pytest.mark.thorough,
        ),
        (AxisType.Explicit, (P(), P("b")), {"block": (32, 32)}),
    ],
    ids=str,
)
@pytest.mark.thorough
def test_products_of_sharded_operands(axis_type, specs, options):
    mesh = mesh_of(2, 4, axis_type=axis_type)
    rng = np.random.default_rng(1)
    x, w = (jnp.asarray(rng.integers(-3, 4, (rows, 128)), jnp.float32) for rows in (64, 128))
    x, w = (jax.jit(partial(jax_mx.quantize, **options))(a) for a in (x, w))
    want = jax_mx.mx_matmul_reference(x, w)
    with jax.set_mesh(mesh):
        placed = []
        for q, spec in zip((x, w), specs, strict=True):
            tiled = q.scale_layout.is_tiled or len(q.block) == 2
            scales = jax.device_put(q.scales, NamedSharding(mesh, P() if tiled else P(*spec[:1])))
            values = jax.device_put(q.values, NamedSharding(mesh, spec))
            placed.append(dataclasses.replace(q, values=values, scales=scales))
        for f in (jax_mx.mx_matmul_reference, jax.jit(jax_mx.mx_matmul_reference)):
            got = f(*placed)
            assert_bits_equal(got, want)
            if axis_type == AxisType.Explicit and not x.scale_layout.is_tiled:  # no whole tiles
                (m, *_), (n, *_) = ((*spec, None) for spec in specs)
                assert jax.typeof(got).sharding.spec == P(m, n if n != m else None)


def test_products_of_names_of_hand_made_arrays():
    q = jax_mx.quantize(jnp.ones((32, 64)), "mxfp4_e2m1")
    named = MXArray(q.values, q.scales, "mxfp4_e2m1", 1, "row_major", 32, "row_major")
    assert_bits_equal(jax_mx.mx_matmul_reference(named, q), jnp.full((32, 32), 64.0))
    moved = named.with_values_in("shuffled_16x16")
    assert_same_array(moved, q.with_values_in("shuffled_16x16"))
    for fields, error, sentence in (
        ({"format": "mxfp8_e4m3"}, TypeError, "values is uint8, MXFP8_E4M3 has float8_e4m3fn"),
        ({"axis": -5}, ValueError, "axis -5 is out of range for rank 2; -2 to 1"),
        ({"scales": q.scales[:3]}, ValueError, "have scales of the shape (32, 2), got (3, 2)"),
        ({"values": None}, TypeError, "values is NoneType, MXFP4_E2M1 has uint8"),
    ):
        broken = dataclasses.replace(q, **fields)
        for call, op in (
            (lambda b=broken: jax_mx.mx_matmul_reference(q, b), "mx_matmul_reference: "),
            (lambda b=broken: b.with_values_in("shuffled_16x16"), "with_values_in: "),
        ):
            with pytest.raises(error) as caught:
                call()
            text = str(caught.value)
            assert text.startswith(op) and sentence in text and "\n" not in text


def test_products_poison_and_refuse():
    x = jnp.ones((32, 64)).at[3, 40].set(jnp.inf)
    a, b = FP4(x), FP4(jnp.ones((64, 64)))
    nan = np.isnan(np.asarray(jax_mx.mx_matmul_reference(a, b)))
    assert nan[3].all() and nan.sum() == 64
    for call, error, sentence in (
        (lambda: jax_mx.mx_matmul_reference(x, b), TypeError, "a must be an MXArray, as quantize"),
        (lambda: jax_mx.mx_matmul_reference(a, FP4(x[0])), ValueError,
         "b has the shape (64,) and blocks along axis -1; it must be a matrix, or a stack"),
        (lambda: jax_mx.mx_matmul_reference(a, FP4(x, axis=-2)), ValueError,
         "a has length 64 along axis -1 and b 32 along axis -2; the product is over both"),
        (lambda: jax_mx.mx_matmul_reference(*(FP4(jnp.ones((n, 32, 32))) for n in (2, 3))),
         ValueError, "the leading dimensions of a, (2,), and of b, (3,), cannot be broadcast"),
    ):  # fmt: skip
        assert_refused(call, error, sentence)
