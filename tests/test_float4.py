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
