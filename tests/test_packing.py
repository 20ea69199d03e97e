"""MXFP6, four codes in three bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import COLLECTIVE, assert_bits_equal, assert_refused, mesh_of, random_bits
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx

pytestmark = pytest.mark.optimized

P = PartitionSpec


@pytest.mark.parametrize("format", ["mxfp6_e2m3", "mxfp6_e3m2"])
@pytest.mark.parametrize("shape", [(32,), (3, 64), (2, 5, 96), (0, 32), (4, 0)])
def test_bits_lie_one_after_the_other(format, shape):
    values = jax_mx.quantize(jnp.asarray(random_bits(shape, "float32")), format).values
    packed = jax.jit(jax_mx.pack_mxfp6)(values)
    assert packed.shape == (*shape[:-1], shape[-1] * 3 // 4) and packed.dtype == jnp.uint8
    bits = np.unpackbits(np.asarray(values)[..., None], axis=-1, bitorder="little")[..., :6]
    want = np.packbits(bits.reshape(*shape[:-1], shape[-1] * 6), axis=-1, bitorder="little")
    assert_bits_equal(packed, want)
    assert_bits_equal(jax_mx.unpack_mxfp6(packed), values)
    assert_bits_equal(jax_mx.pack_mxfp6(np.asarray(values) | 0xC0), want)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_packed_codes_stay_sharded(axis_type):
    mesh = mesh_of(2, 4, axis_type=axis_type)
    values = np.random.default_rng(0).integers(0, 64, (4, 96), np.uint8)
    want = jax_mx.pack_mxfp6(values)
    placed = jax.device_put(values, NamedSharding(mesh, P("a", "b")))
    compiled = jax.jit(jax_mx.pack_mxfp6).lower(placed).compile()
    assert not COLLECTIVE.search(compiled.as_text())
    assert_bits_equal(compiled(placed), want)
    back = jax.jit(lambda v: jax_mx.unpack_mxfp6(jax_mx.pack_mxfp6(v)))
    split = jax.device_put(values[:, :72], NamedSharding(mesh, P(None, "b")))  # 18 codes a shard
    assert_bits_equal(back(split), values[:, :72])


def test_mxarrays_are_packed_by_their_format():
    x = jnp.asarray(random_bits((4, 64), np.float32))
    for format in ("mxfp6_e2m3", "mxfp6_e3m2"):
        q = jax_mx.quantize(x, format)
        assert_bits_equal(jax_mx.pack_mxfp6(q), jax_mx.pack_mxfp6(q.values))
    columns = jax_mx.quantize(x.T, "mxfp6_e2m3", axis=0)
    tiled = jax_mx.quantize(jnp.ones((16, 64)), "mxfp6_e2m3", value_layout="shuffled_16x16")
    for q, sentence in (
        (jax_mx.quantize(x, "mxfp4_e2m1"), "MXFP4_E2M1 with axis -1 and 'row_major'"),
        (jax_mx.quantize(x), "MXFP8_E4M3"),
        (columns, "MXFP6_E2M3 with axis -2"),
        (tiled, "and 'shuffled_16x16'"),
    ):
        assert_refused(lambda q=q: jax_mx.pack_mxfp6(q), ValueError, sentence)


@pytest.mark.parametrize("f,size", [(jax_mx.pack_mxfp6, 4), (jax_mx.unpack_mxfp6, 3)])
def test_refusals(f, size):
    name = f.__name__
    for bad in (jnp.zeros(32), np.zeros(32, np.int8), [0] * 12, None):
        assert_refused(lambda bad=bad: f(bad), TypeError, f"{name}: it takes bytes, uint8, got ")
    for shape in ((), (2, 31)):
        sentence = f"{name}: {size} must divide the last axis, the shape is {shape}"
        assert_refused(lambda shape=shape: f(jnp.zeros(shape, jnp.uint8)), ValueError, sentence)
