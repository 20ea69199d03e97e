"""MXFP4 as ROCm TransformerEngine tests its own: its shapes, its layouts, and where it differs.

Its cast-transpose takes (..., K) as a matrix of all rows. It gives codes along K, codes along the
rows of the transposed matrix, and the scales of both in tiles.
"""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from helpers import assert_bits_equal, bytes_of, golden_input, random_bits
from on_device import HERE, check
from oracle import tiled

import jax_mx
from jax_mx.formats.formats import BLOCK, FLOAT_DTYPES
from jax_mx.quantizing import reference

SHAPES = (
    (128, 128), (256, 256), (1024, 2048), (2048, 6144), (4096, 4096), (16384, 128), (32768, 160),
    (4096, 1632), (8, 32, 1024), (16, 8, 4, 512),
)  # fmt: skip
REFUSED = ((32, 3221), (2333, 32), (1481, 677), (31, 64), (64, 31))
CHEAP = [shape for shape in SHAPES if np.prod(shape) <= 1 << 18]
TABLE = oracle.FORMATS["mxfp4_e2m1"].table
MXFP4 = [v for v in HERE if v.op == "quantize" and {*v.formats} == {jax_mx.MXFP4_E2M1}]
DIRECTIONS = [
    v
    for v in MXFP4
    if not v.form.is_square and v.dtype != "float16"
    if all(mode.blocks == 1 for mode in v.modes)  # 64 does not divide these shapes
]


def matrix(shape, dtype) -> np.ndarray:
    """Numbers of many magnitudes, with blocks of zeros; finite."""
    rng = np.random.default_rng(len(shape))
    rows, cols = int(np.prod(shape[:-1])), shape[-1]
    power = rng.integers(-140, 120, (rows, cols // BLOCK)).repeat(BLOCK, 1)
    power[:, :BLOCK] = 0
    x = rng.standard_normal((rows, cols)) * 2.0**power
    x[::3, :BLOCK] = 0
    x[:BLOCK, -BLOCK:] = -0.0
    return x.astype(FLOAT_DTYPES[dtype])


def quantized(x: np.ndarray, ties_away: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scales) of the last axis, EVEN, the scale of zeros 127: in float64, by searching."""
    blocks = x.astype(np.float32).reshape(len(x), -1, BLOCK)
    amax = np.abs(blocks).max(-1)
    scales = np.maximum(((amax.view(np.uint32) + 0x200000) >> 23).astype(int) - 2, 0)
    scales = np.where(amax == 0, 127, scales)
    scaled = np.abs(blocks.astype(np.float64)) * 2.0 ** (127 - scales)[..., None]
    above = np.searchsorted(TABLE, scaled).clip(max=7)
    below = (above - 1).clip(min=0)
    to_above, to_below = TABLE[above] - scaled, scaled - TABLE[below]
    tie = above if ties_away else np.where(above % 2 == 0, above, below)
    codes = np.where(to_above == to_below, tie, np.where(to_above < to_below, above, below))
    return (codes | np.signbit(blocks) << 3).reshape(x.shape), scales


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", CHEAP, ids=str)
def test_rows_columns_and_both(shape, dtype):
    x = matrix(shape, dtype)
    layout = {"scale_layout": "shuffled_32x8", "zero_scale": 127}
    options = {"format": "mxfp4_e2m1", "scaling": "even", **layout}
    rows = jax.jit(partial(jax_mx.quantize, **options))(x)
    cols = jax.jit(partial(jax_mx.quantize, axis=0, transpose=True, **options))(x)
    both = jax.jit(partial(jax_mx.quantize_both, **options))(x)
    for one, of_both, side in ((rows, both[0], x), (cols, both[1], x.T)):
        codes, scales = quantized(side)
        assert (scales == 127).any() and np.unique(codes).size == 16
        packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
        tiles = tiled(scales, "shuffled_32x8")
        for q in (one, of_both):
            assert_bits_equal(np.asarray(q.values), packed)
            np.testing.assert_array_equal(bytes_of(q.scales)[..., 0], tiles)
    leading = jax.jit(partial(jax_mx.quantize, **options | {"scale_layout": "row_major"}))
    assert_bits_equal(  # its rows need no flattening
        leading(x.reshape(shape)).values.reshape(rows.values.shape), rows.values
    )


floats = functools.lru_cache(maxsize=2)(random_bits)  # variants turn faster than shapes


@pytest.mark.sampled(30, 7)
@pytest.mark.gpu
@pytest.mark.parametrize("variant", DIRECTIONS, ids=lambda v: v.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels(shape, variant):
    x = floats((int(np.prod(shape[:-1])), shape[-1]), variant.dtype)
    check(variant, x, scaling="even", zero_scale=127)


@pytest.mark.parametrize("shape", REFUSED, ids=str)
def test_refused_shapes(shape):
    x = jnp.ones(shape, jnp.bfloat16)
    bad = [i for i in (-1, -2) if shape[i] % 32]
    for call in (jax_mx.quantize_both, partial(jax_mx.quantize_both, format="mxfp4_e2m1")):
        with pytest.raises(ValueError) as caught:
            call(x)
        assert str(caught.value).startswith(
            f"quantize_both: axis {bad[0]} has length {shape[bad[0]]}, not a multiple of the block "
            f"length 32; pad it to {-(-shape[bad[0]] // 32) * 32}"
        )
    for axis in bad:
        with pytest.raises(ValueError, match=f"quantize: axis {axis} has length {shape[axis]}"):
            jax_mx.quantize(x, "mxfp4_e2m1", axis=axis)


def test_ties_that_peers_round_away():
    """ROCm TE's Triton kernel and CPU reference, and gpu-mode's #114: half a step goes up."""
    x = golden_input("ties_f32")
    q = jax_mx.quantize(x, "mxfp4_e2m1", scaling="even", zero_scale=127)
    ours = np.asarray(reference.unpack(jnp.asarray(q.values, jnp.uint32), q.format))
    codes, scales = quantized(x)
    np.testing.assert_array_equal(ours, codes)
    np.testing.assert_array_equal(bytes_of(q.scales)[..., 0], scales)
    away, _ = quantized(x, ties_away=True)
    scaled = np.abs(x.astype(np.float64)).reshape(*scales.shape, BLOCK)
    scaled = (scaled * 2.0 ** (127 - scales)[..., None]).reshape(x.shape)
    halves = (TABLE[1:] + TABLE[:-1]) / 2
    assert np.isin(scaled[away != ours], halves).all()
    assert np.count_nonzero(away != ours) == 126  # of 19,200 elements
