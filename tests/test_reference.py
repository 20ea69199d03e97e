"""The reference against golden bytes, against exact rationals and against itself in other modes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import (
    GOLDEN,
    GOLDEN_SETS,
    assert_bits_equal,
    bytes_of,
    every_bfloat16,
    golden_input,
    random_bits,
)

import jax_mx
from jax_mx.formats.formats import BLOCK, FLOAT_DTYPES, FORMATS, SCALINGS, Scaling
from jax_mx.quantizing import reference

pytestmark = pytest.mark.optimized

each_format = pytest.mark.parametrize("format", FORMATS.values(), ids=str)
each_scaling = pytest.mark.parametrize("scaling", Scaling, ids=str)


@pytest.mark.sampled(2)
@each_format
@each_scaling
def test_golden(format, scaling):
    """The blocks of all sets, quantized as one array."""
    inputs = [golden_input(name).reshape(-1, BLOCK) for name in GOLDEN_SETS]
    q = jax_mx.quantize(np.concatenate(inputs), format, scaling=scaling)
    ends = np.cumsum([*map(len, inputs)])[:-1]
    parts = (np.split(bytes_of(a)[..., 0], ends) for a in (q.values, q.scales))
    for name, x, got, got_scales in zip(GOLDEN_SETS, inputs, *parts, strict=True):
        with np.load(GOLDEN / "quantize.npz") as golden:
            values = golden[f"{format.name}/{scaling.value}/{name}/values"].reshape(got.shape)
            scales = golden[f"{format.name}/{scaling.value}/{name}/scales"].reshape(-1, 1)
        amax = np.abs(x).max(1, initial=0, keepdims=True)
        with np.errstate(over="ignore"):
            bits = amax.view(np.uint32).astype(np.uint64) + (1 << (22 - format.mantissa_bits))
        # pytorch/ao poisons a finite block whose rounded amax reaches 2^128; we do not.
        keep = ~((scaling is Scaling.EVEN) & np.isfinite(amax) & (bits >= 0x7F800000))
        assert keep.mean() > 0.8
        np.testing.assert_array_equal(got_scales[keep], scales[keep], name)
        finite = keep & (scales != 255)
        assert_bits_equal(np.where(finite, got, 0), np.where(finite, values, 0), name)
        poisoned = (keep & (scales == 255))[:, 0]
        codes = format.nan_code * (0x11 if format.codes_per_byte == 2 else 1)
        assert (got[poisoned] == codes).all(), name


@each_format
@pytest.mark.parametrize("name", GOLDEN_SETS)
def test_square_blocks_of_one_row_are_golden(format, name):
    """A tile that holds a golden block and zeros has the block's golden bytes."""
    x = golden_input(name).reshape(-1, BLOCK)[:64]
    tiles = np.zeros((BLOCK, x.size), np.float32)
    tiles[13] = x.reshape(-1)
    q = jax_mx.quantize(tiles, format, block=(BLOCK, BLOCK))
    want = jax_mx.quantize(x.reshape(-1), format)  # test_golden
    assert_bits_equal(q.scales[0], want.scales)
    assert_bits_equal(q.values[13], want.values)


def test_scale_boundaries_of_rceil():
    """3.5 needs no larger scale than 448 * 2^-7 does; the next float32 does."""
    for bits, scale in ((0x40600000, 120), (0x40600001, 121), (0x43E00000, 127), (0x43FFFFFF, 128)):
        x = np.full(BLOCK, bits, np.uint32).view(np.float32)
        assert bytes_of(jax_mx.quantize(x).scales).item() == scale


@pytest.mark.parametrize("name", FLOAT_DTYPES)
def test_every_pattern_widens_exactly(name):
    dtype = FLOAT_DTYPES[name]
    if dtype.itemsize == 4:
        x = random_bits((1 << 14,), dtype)
    else:
        x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    got = np.asarray(reference.float32_bits(jnp.asarray(x)))
    with np.errstate(invalid="ignore"):
        want = x.astype(np.float32).view(np.uint32)
    nan = np.isnan(x.astype(np.float32))
    np.testing.assert_array_equal(got[~nan], want[~nan])
    assert ((got[nan] & 0x7FFFFFFF) > 0x7F800000).all()


@each_format
@pytest.mark.parametrize("name", FLOAT_DTYPES)
def test_dequantize_every_code_and_scale(format, name):
    """All codes times all 256 scales, against float64 rounded once."""
    dtype = FLOAT_DTYPES[name]
    codes = np.arange(1 << format.bits)
    pairs = np.stack(np.broadcast_arrays(codes[None], np.arange(256)[:, None]))  # (2, 256, codes)
    blocks = pairs.reshape(2, 256, -1, min(BLOCK, len(codes)))
    blocks = np.broadcast_to(blocks[..., None], (*blocks.shape, BLOCK // blocks.shape[-1]))
    code, scale = blocks.reshape(2, -1, BLOCK)
    scale = scale[:, :1]
    packed = reference.pack(jnp.asarray(code, jnp.uint32), format)
    values = jax.lax.bitcast_convert_type(packed, format.storage)
    scales = jax.lax.bitcast_convert_type(jnp.asarray(scale, jnp.uint8), jnp.float8_e8m0fnu)
    got = np.asarray(
        jax.jit(reference.dequantize, static_argnums=(2, 3))(values, scales, format, dtype)
    )

    magnitude = code & (2 ** (format.bits - 1) - 1)
    field, mantissa = np.divmod(magnitude, 2**format.mantissa_bits)
    element = (mantissa * 2.0**-format.mantissa_bits + (field > 0)) * 2.0 ** (
        np.maximum(field, 1) - format.bias
    )
    if format.storage != np.uint8:
        element = np.abs(code.astype(np.uint8).view(format.storage).astype(np.float64))
    want = np.where(code >> (format.bits - 1), -element, element) * 2.0 ** (scale - 127.0)
    want = np.where(scale == 255, np.nan, want)
    with np.errstate(over="ignore", invalid="ignore"):
        want = want.astype(np.float32).astype(dtype)  # exact in float32, so rounded once
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    quiet = {"bfloat16": 0x7FFF, "float16": 0x7FFF, "float32": 0x7FFFFFFF}[name]
    assert (got.view(f"uint{8 * dtype.itemsize}")[nan] == quiet).all()
    assert_bits_equal(np.where(nan, dtype.type(0), got), np.where(nan, dtype.type(0), want))


@each_format
def test_codes_survive_a_round_trip(format):
    """Dequantized values lie on the grid, so quantizing them again changes nothing."""
    x = random_bits((64, 8 * BLOCK), np.float32, seed=3)
    x = np.where(np.isfinite(x), np.clip(x, -1e30, 1e30), 0).astype(np.float32)
    once = jax_mx.quantize(x, format, scaling="floor").dequantize(jnp.float32)
    twice = jax_mx.quantize(once, format, scaling="floor").dequantize(jnp.float32)
    assert_bits_equal(twice, once)


@pytest.mark.parametrize("x64", [False, True])
def test_x64_and_jit_change_nothing(x64):
    x = every_bfloat16()
    want = jax_mx.quantize(x)
    with jax.enable_x64(x64):
        for f in (jax_mx.quantize, jax.jit(jax_mx.quantize)):
            q = f(jnp.asarray(x))
            assert_bits_equal(q.values, want.values)
            assert_bits_equal(q.scales, want.scales)
            assert_bits_equal(q.dequantize(), want.dequantize())


def test_rules_agree_with_their_table():
    """The additions of Scaling.rounding, spelled out as the definition has them."""
    for format in FORMATS.values():
        for name, scaling in SCALINGS.items():
            add, exception = scaling.rounding(format)
            thr = format.max_mantissa
            up = {
                "floor": lambda m: 0,
                "ceil": lambda m: m > 0,
                "even": lambda m, f=format: m >= 0x800000 - (1 << (22 - f.mantissa_bits)),
                "rceil": lambda m, t=thr: m > t,
            }[name]
            for m in (
                0,
                1,
                thr - 1,
                thr,
                thr + 1,
                0x7FFFFF,
                0x780000,
                0x77FFFF,
                0x700000,
                0x6FFFFF,
            ):
                assert (m + add) >> 23 == up(m), (format, name, hex(m))
            assert (exception == -1) == (name != "rceil")


def test_formats_have_the_values_of_their_types():
    for format in FORMATS.values():
        if format.storage != np.uint8:
            info = ml_dtypes.finfo(format.storage)
            assert (format.max, format.bits) == (float(info.max), info.bits)
    assert [f.max for f in FORMATS.values()] == [448, 57344, 28, 7.5, 6]
    assert [f.emax for f in FORMATS.values()] == [8, 15, 4, 2, 2]
