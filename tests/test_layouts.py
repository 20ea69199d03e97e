"""Scale layouts against the offset formulas, golden bytes and their own inverse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import GOLDEN, assert_bits_equal

import jax_mx
from jax_mx.layouts import BLOCKED_128X4, SCALE_LAYOUTS, SHUFFLED_32X8

OFFSET = {
    "row_major": lambda r, c, rows, cols: r * cols + c,
    "blocked_128x4": lambda r, c, rows, cols: (
        (r // 128 * -(-cols // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    ),
    "shuffled_32x8": lambda r, c, rows, cols: (
        r // 32 * 32 * (-(-cols // 8) * 8)
        + c // 8 * 256
        + c % 4 * 64
        + r % 16 * 4
        + c % 8 // 4 * 2
        + r % 32 // 16
    ),
}
SHAPES = [(1, 1), (128, 4), (256, 8), (100, 3), (129, 5), (33, 90), (300, 17), (0, 4), (4, 0)]


@pytest.mark.parametrize("layout", SCALE_LAYOUTS.values(), ids=str)
@pytest.mark.parametrize("rows,cols", SHAPES)
def test_pack_puts_every_byte_at_its_offset(layout, rows, cols):
    rng = np.random.default_rng(0)
    scales = rng.integers(1, 256, (2, rows, cols)).astype(np.uint8)
    packed = layout.pack(jnp.asarray(scales))
    assert packed.shape == (2, *layout.shape(rows, cols))
    r, c = np.indices((rows, cols))
    want = np.zeros((2, packed[0].size), np.uint8)
    want[:, OFFSET[layout.name](r, c, rows, cols).ravel()] = scales.reshape(2, -1)
    np.testing.assert_array_equal(np.asarray(packed).reshape(2, -1), want)
    assert_bits_equal(layout.unpack(packed, rows, cols), jnp.asarray(scales))


@pytest.mark.parametrize(
    "layout,peer,shape",
    [
        (BLOCKED_128X4, "torchao_to_blocked", "256x8"),
        (BLOCKED_128X4, "torchao_to_blocked", "100x3"),
        (SHUFFLED_32X8, "aiter_shuffle_scale", "256x8"),
        (SHUFFLED_32X8, "aiter_shuffle_scale", "32x4"),
    ],
)
def test_golden(layout, peer, shape):
    with np.load(GOLDEN / "layouts.npz") as golden:
        before, after = golden[f"{peer}/{shape}/in"], golden[f"{peer}/{shape}/out"]
        name = f"{peer}/{shape}/defined"
        defined = golden[name] if name in golden.files else np.ones(after.shape, bool)
    got = np.asarray(layout.pack(jnp.asarray(before))).reshape(-1)
    np.testing.assert_array_equal(got[defined.reshape(-1)], after.reshape(-1)[defined.reshape(-1)])
    assert (got[~defined.reshape(-1)] == 0).all()


@pytest.mark.parametrize("layout", [BLOCKED_128X4, SHUFFLED_32X8], ids=str)
@pytest.mark.parametrize("axis", [-1, -2, 0])
def test_quantize_in_a_tiled_layout(layout, axis):
    """The rows of a layout are those of the matrix whose last axis is quantized."""
    x = jax.random.normal(jax.random.key(0), (64, 96, 160), jnp.float32)
    plain = jax_mx.quantize(x, axis=axis)
    tiled = jax.jit(lambda x: jax_mx.quantize(x, axis=axis, scale_layout=layout))(x)
    assert_bits_equal(tiled.values, plain.values)
    last = jnp.moveaxis(plain.scales, axis, -1)
    assert_bits_equal(tiled.scales, layout.pack(last))
    assert_bits_equal(tiled.dequantize(), plain.dequantize())


def test_unpack_refuses_another_shape():
    with pytest.raises(ValueError, match=r"unpack: 129 x 4 scales in blocked_128x4 have the shape"):
        BLOCKED_128X4.unpack(jnp.zeros((1, 1, 512), jnp.uint8), 129, 4)
