"""Layouts of scales and values against offset formulas, golden bytes and their own inverse."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    COLLECTIVE,
    GOLDEN,
    assert_bits_equal,
    assert_refused,
    assert_same_array,
    mesh_of,
    random_bits,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from oracle import tiled

import jax_mx
from jax_mx.formats.layouts import (
    BLOCKED_128X4,
    ROW_MAJOR_VALUES,
    SCALE_LAYOUTS,
    SHUFFLED_16X16,
    SHUFFLED_32X8,
)
from jax_mx.formats.views import pack, unpack

pytestmark = pytest.mark.optimized

P = PartitionSpec

SHAPES = [(1, 1), (128, 4), (256, 8), (100, 3), (129, 5), (33, 90), (300, 17), (0, 4), (4, 0)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "layout,rows,cols",
    [
        *((layout, *shape) for layout in SCALE_LAYOUTS.values() for shape in SHAPES),
        *((SHUFFLED_16X16, *shape) for shape in [(16, 32), (64, 96), (0, 32), (48, 0)]),
    ],
    ids=str,
)
def test_pack_puts_every_byte_at_its_offset(layout, rows, cols):
    rng = np.random.default_rng(0)
    scales = rng.integers(1, 256, (2, rows, cols)).astype(np.uint8)
    packed = pack(layout, jnp.asarray(scales))
    assert packed.shape == (2, *layout.shape(rows, cols))
    assert_bits_equal(packed, tiled(scales, layout.name))
    assert_bits_equal(unpack(layout, packed, rows, cols), jnp.asarray(scales))


@pytest.mark.parametrize(
    "layout,peer,shape",
    [
        (BLOCKED_128X4, "torchao_to_blocked", "256x8"),
        (BLOCKED_128X4, "torchao_to_blocked", "100x3"),
        (SHUFFLED_32X8, "aiter_shuffle_scale", "256x8"),
        (SHUFFLED_32X8, "aiter_shuffle_scale", "32x4"),
        (SHUFFLED_16X16, "aiter_shuffle_weight_16x16", "32x64"),
    ],
)
def test_golden(layout, peer, shape):
    with np.load(GOLDEN / "layouts.npz") as golden:
        before, after = golden[f"{peer}/{shape}/in"], golden[f"{peer}/{shape}/out"]
        name = f"{peer}/{shape}/defined"
        defined = golden[name] if name in golden.files else np.ones(after.shape, bool)
    got = np.asarray(pack(layout, jnp.asarray(before))).reshape(-1)
    np.testing.assert_array_equal(got[defined.reshape(-1)], after.reshape(-1)[defined.reshape(-1)])
    assert (got[~defined.reshape(-1)] == 0).all()


def test_unpack_refuses_another_shape():
    with pytest.raises(ValueError, match=r"unpack: 129 x 4 bytes in blocked_128x4 have the shape"):
        unpack(BLOCKED_128X4, jnp.zeros((1, 1, 512), jnp.uint8), 129, 4)


# ---- values ---
SHUFFLE = {"value_layout": "shuffled_16x16"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("spec", [P("a", "b"), P(None, ("a", "b")), P(("a", "b"))], ids=str)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_tiles_of_values_stay_sharded(axis_type, spec):
    mesh = mesh_of(2, 4, axis_type=axis_type)
    x = random_bits((128, 512), jnp.bfloat16)  # 16 rows and 32 bytes to each of eight
    quantize = jax.jit(partial(jax_mx.quantize, format="mxfp4_e2m1", **SHUFFLE))
    want = quantize(x)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        assert not COLLECTIVE.search(quantize.lower(placed).compile().as_text())
        q = quantize(placed)
        for out in (q.values, q.scales):
            assert out.sharding.is_equivalent_to(NamedSharding(mesh, spec), out.ndim)
        back = jax.jit(jax_mx.dequantize)
        assert not COLLECTIVE.search(back.lower(q).compile().as_text())
        y = back(q)
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
        # Shards of less than a tile are gathered.
        small = quantize(jax.device_put(x[:64], NamedSharding(mesh, spec)))
    assert_same_array(q, want)
    assert_bits_equal(y, want.dequantize())
    assert_same_array(small, quantize(x[:64]))


def test_values_that_no_tiles_fit():
    x = jnp.ones((40, 64))
    q = jax_mx.quantize(jnp.ones((32, 64)), "mxfp4_e2m1", **SHUFFLE)
    for call, error, sentence in (
        (lambda: jax_mx.quantize(x, **SHUFFLE), ValueError,
         "quantize: value_layout 'shuffled_16x16' has tiles of 16 rows and 32 bytes, which do not "
         "divide 40 rows of 64 bytes; use 'row_major' or pad the array"),
        (lambda: jax_mx.quantize(x[:32, :32], "mxfp4_e2m1", **SHUFFLE), ValueError,
         "which do not divide 32 rows of 16 bytes"),
        (lambda: jax_mx.quantize(x.T, axis=0, **SHUFFLE), ValueError,
         "value_layout 'shuffled_16x16' tiles a matrix whose rows end with the block axis, the "
         "array has the shape (64, 40) and axis -2; use transpose=True or 'row_major'"),
        (lambda: jax_mx.quantize(x[0], **SHUFFLE), ValueError, "has the shape (64,) and axis -1"),
        (lambda: jax_mx.quantize(x, value_layout="tiles"), ValueError,
         "quantize: value_layout 'tiles' is unknown; use one of 'row_major', 'shuffled_16x16'"),
        (lambda: jax_mx.quantize(x, value_layout=SHUFFLED_32X8), TypeError,
         "quantize: value_layout must be one of 'row_major', 'shuffled_16x16', got SHUFFLED_32X8"),
        (lambda: jax_mx.quantize_both(x[:32], value_layouts="row_major"), TypeError,
         "quantize_both: value_layouts must be a pair"),
        (lambda: jax_mx.quantize_both(
            x[:32], transpose=(False, False), value_layouts=(ROW_MAJOR_VALUES, SHUFFLED_16X16)
        ), ValueError, "the array has the shape (32, 64) and axis -2; use transpose=True"),
        (lambda: jax_mx.quantize(x).with_values_in("shuffled_16x16"), ValueError,
         "with_values_in: value_layout 'shuffled_16x16' has tiles of 16 rows"),
        (q.as_float4, ValueError, "as_float4: values lie in 'shuffled_16x16', float4 in rows; "
         "unpack them with MXArray.with_values_in('row_major')"),
        (lambda: jax_mx.MXArray(
            q.values[0], q.scales, q.format, -1, q.scale_layout, value_layout=SHUFFLED_16X16
        ).dequantize(), ValueError,
         "dequantize: values in 'shuffled_16x16' have the shape (..., row tiles, column tiles, "
         "512), got (1, 512)"),
        (lambda: jax_mx.MXArray(
            q.values, q.scales, q.format, -2, q.scale_layout, value_layout=SHUFFLED_16X16
        ).dequantize(), ValueError, "dequantize: value_layout 'shuffled_16x16' tiles a matrix"),
    ):  # fmt: skip
        assert_refused(call, error, sentence)
