"""`rms_norm`: bits against its definition in numpy, gradients in float64, quantized, sharded."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import arch_here
from helpers import (
    assert_bits_equal,
    assert_refused,
    assert_same_array,
    call_attributes_in,
    for_any_address,
    mesh_of,
    poison_memory,
    product,
    settled,
)
from jax.sharding import NamedSharding, PartitionSpec

import jax_mx
from jax_mx import rms_norm
from jax_mx.formats import directions
from jax_mx.formats.formats import Scaling
from jax_mx.launch.chips import ARCHS
from jax_mx.norms.source import NormSource
from jax_mx.quantizing.facts.variants import layouts_of
from jax_mx.quantizing.kernels import geometry
from jax_mx.quantizing.kernels.geometry import Extents
from jax_mx.shipping.shipped import SHIPPED

P = PartitionSpec
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
EPS = 1e-5
thorough = pytest.mark.thorough


def rows(shape, dtype, seed=0, spread=3):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-spread, spread + 1, shape)
    return x.astype(DTYPES[dtype])


# ---- the definition, in numpy, one row at a time ---


def factor_of(row):
    """(of the row, as float64)."""
    wide = np.float64 if row.dtype == np.float32 else np.float32
    rounded = settled(row.astype(np.float32)).astype(wide)
    if wide is np.float32:
        rounded = np.where(np.abs(rounded) < np.float32(2.0**-63), np.float32(0), rounded)
    sums = np.zeros(2048, wide)
    for start in range(0, len(row), 2048):
        part = rounded[start : start + 2048]
        sums[: len(part)] += part * part
    while len(sums) > 1:
        sums = sums[0::2] + sums[1::2]
    k = len(row)
    return np.sqrt(k / (np.float64(sums[0]) + k * np.float64(np.float32(EPS))))


def defined(x, weight):
    """(y, factors), for a matrix."""
    factors = np.array([factor_of(row) for row in x])[:, None]
    wide, by = (settled(a.astype(np.float32)) for a in (x, weight))
    if x.dtype == np.float32:
        y = settled((wide.astype(np.float64) * factors * by.astype(np.float64)).astype(np.float32))
    else:
        y = product(product(wide, factors.astype(np.float32)), by)
    return y.astype(x.dtype), settled(factors.astype(np.float32)[:, 0])


def units_off(got, x, weight):
    """How far from the exact number, in units in the last place of got's dtype."""
    wide = x.astype(np.float64)
    with np.errstate(all="ignore"):
        exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + np.float64(np.float32(EPS)))
        exact = exact * weight.astype(np.float64)
        info = ml_dtypes.finfo(got.dtype)
        exponent = np.maximum(np.floor(np.log2(np.abs(exact))), info.minexp)
        return np.abs(got.astype(np.float64) - exact) / 2.0 ** (exponent - info.nmant)


@pytest.mark.parametrize(
    ("dtype", "length"),
    [
        *((dtype, 2080) for dtype in DTYPES),
        *(
            pytest.param(dtype, length, marks=thorough)
            for dtype in DTYPES
            for length in (1, 2, 7, 32, 1023, 2047, 2048, 2049, 4096, 7168, 16384)
        ),
    ],
)
def test_bits_of_the_definition(dtype, length):
    """And within 0.51 units in the last place of the exact number."""
    x, weight = rows((9, length), dtype), rows((length,), dtype, 1, spread=1)
    x[0], x[1] = 0, x[1] * x.dtype.type(2.0**-14)
    got = rms_norm(x, weight, eps=EPS, floats=True, factors=True)
    want, factors = defined(x, weight)
    assert_bits_equal(got.floats, want)
    assert_bits_equal(got.factors, factors)
    assert np.nanmax(units_off(want, x, weight)[1:]) < 0.51
    assert_bits_equal(rms_norm(x, eps=EPS).floats, defined(x, np.ones(length, x.dtype))[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_none_or_extreme(dtype):
    x = rows((8, 64), dtype)
    largest = ml_dtypes.finfo(x.dtype).max
    x[0, 3], x[1, 5], x[2, :] = np.nan, np.inf, largest
    x[3, :], x[4, :] = ml_dtypes.finfo(x.dtype).smallest_subnormal, -0.0
    x[5, ::2] = 2.0**-13
    ones = np.ones(64, x.dtype)
    got = np.asarray(rms_norm(x, ones, eps=EPS).floats)
    with np.errstate(all="ignore"):
        want, _ = defined(x, ones)
    flat = got.astype(np.float32)
    assert np.isnan(flat[0]).all()
    assert np.isnan(flat[1, 5]) and not flat[1, np.arange(64) != 5].any()
    assert_bits_equal(got[2:], want[2:])


def test_a_residual_is_added_first():
    """In float32, and what is normed is its sum after it was rounded."""
    x, residual = rows((5, 96), "bfloat16"), rows((5, 96), "bfloat16", 1)
    weight = rows((96,), "bfloat16", 2)
    total = (x.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype)
    got = jax.jit(functools.partial(rms_norm, eps=EPS))(x, weight, residual=residual)
    assert_bits_equal(got.sum, total)
    assert_bits_equal(got.floats, defined(total, weight)[0])
    assert got.quantized is got.factors is rms_norm(x).sum is None


def test_rows_are_those_of_the_result():
    """Padding is zeros, whatever factor and weight are; sum and factors have all rows."""
    x, weight = rows((32, 64), "bfloat16"), np.full(64, np.inf, np.float32)
    numbers = np.array([3, -1], np.int32)
    for floats in (False, True):
        got = rms_norm(
            x, weight, eps=0, format="mxfp8_e4m3", rows=numbers, floats=floats, factors=True
        )
        assert isinstance(got.quantized, jax_mx.MXArray)
        assert not np.asarray(got.quantized.dequantize()[1]).any()
        assert got.factors.shape == (32,) and (got.floats is None) != floats
    alone = rms_norm(x, floats=False, factors=True)
    assert alone.floats is None and alone.factors.shape == (32,)
    with pytest.raises(ValueError, match="rms_norm: floats=False leaves no result"):
        rms_norm(x, floats=False)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", [{}, {"window": 128}, {"both": True}, {"rows": True}], ids=str)
def test_quantized_after_a_residual_was_added(options):
    x, residual = rows((64, 96), "bfloat16"), rows((64, 96), "bfloat16", 1)
    weight, arguments = rows((96,), "bfloat16", 2), dict(options)
    if "rows" in options:
        arguments["rows"] = np.arange(32, dtype=np.int32)[::-1]
    run = lambda x, r: rms_norm(  # noqa: E731
        x, weight, eps=EPS, residual=r, format="mxfp8_e4m3", factors=True, **arguments
    )
    total = rms_norm(x, residual=residual).sum
    want = rms_norm(total, weight, eps=EPS, format="mxfp8_e4m3", factors=True, **arguments)
    for got in (run(x, residual), jax.jit(run)(x, residual)):
        assert_bits_equal(got.sum, total)
        assert_bits_equal(got.factors, want.factors)
        for a, b in zip(*map(jax.tree.leaves, (got.quantized, want.quantized)), strict=True):
            assert_bits_equal(np.asarray(a), np.asarray(b))


def test_quantized():
    x, weight = rows((2, 64, 96), "bfloat16"), rows((96,), "float32", 1)
    plain = rms_norm(x, weight).floats
    one = rms_norm(x, weight, format="mxfp4_e2m1", scaling="even")
    assert one.floats is None
    assert_same_array(one.quantized, jax_mx.quantize(plain, "mxfp4_e2m1", scaling="even"))
    two = rms_norm(x, weight, format="mxfp8_e5m2", both=True, floats=True, window=128)
    assert_bits_equal(two.floats, plain)
    want = jax_mx.quantize_both(plain, "mxfp8_e5m2", window=128)
    for got, expected in zip(two.quantized, want, strict=True):
        assert_same_array(got, expected)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=thorough)])
@pytest.mark.parametrize("format", [None, "mxfp8_e4m3"])
def test_gradients(dtype, format):
    """Gradients of floats, sum and factors, by the formula in float64; codes have none."""
    x, residual = rows((2, 5, 96), dtype, spread=1), rows((2, 5, 96), dtype, 1, spread=1)
    weight = rows((96,), dtype, 2, spread=1)
    dy, dsum = rows(x.shape, dtype, 3), rows(x.shape, dtype, 4)
    dfactors = rows(x.shape[:-1], "float32", 5)

    def call(x, residual, weight):
        result = rms_norm(
            x, weight, eps=EPS, residual=residual, format=format, floats=True, factors=True
        )
        return result.floats, result.sum, result.factors

    _, pull = jax.vjp(call, x, residual, weight)
    got = pull((dy, dsum, dfactors))
    s, w, g, ds, df = (
        np.asarray(a, np.float64)
        for a in (call(x, residual, weight)[1], weight, dy, dsum, dfactors[..., None])
    )
    factor = 1 / np.sqrt((s**2).mean(-1, keepdims=True) + np.float64(np.float32(EPS)))
    dx = ds + factor * (g * w) - factor**3 * s * ((g * w * s).mean(-1, keepdims=True))
    dx = dx - df * factor**3 * s / 96
    dweight = (g * s * factor).sum((0, 1))
    near = 1e-5 if dtype == "float32" else 1e-2
    for a, b in zip(got, (dx, dx, dweight), strict=True):
        assert a.dtype == x.dtype
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=near, atol=near)
    with pytest.raises(NotImplementedError, match="rms_norm has a derivative where"):
        jax.vjp(lambda x: rms_norm(x, format="mxfp8_e4m3").quantized, x)


# ---- by kernels ---
NORMED = [v for v in SHIPPED if isinstance(v.source, NormSource)]
HERE = [v for v in NORMED if arch_here() is None or arch_here() in ARCHS[v.implementation]]
SHAPES = {
    "last": [(7, 96), (513, 4128), (129, 160), (40, 16416), (1, 32)],
    "second": [(32, 1), (160, 257), (96, 7), (544, 72), (64, 8200)],
    "both": [(32, 32), (96, 160), (288, 544), (544, 4128), (64, 16416)],
}


def nasty(shape, seed=0, dtype="bfloat16"):
    """Rows of any size, some of them with what is no number, zeros and subnormals."""
    x, length = rows(shape, dtype, seed), shape[-1]
    if len(x) > 12:
        x[0], x[1], x[6] = 0, -0.0, ml_dtypes.finfo(x.dtype).smallest_subnormal
        x[2, 0], x[3, length - 1], x[4, length // 2] = np.nan, np.inf, -np.inf
        x[5], x[7, ::2], x[8] = ml_dtypes.finfo(x.dtype).max, 2.0**-63, 1e-38  # of float16 0
        x[9] = (x[9].astype(np.float32) * np.float32(2.0**-70)).astype(x.dtype)
    return x


def quantized(variant, implementation, **options):
    """A variant's results for x and weights, the factors; for a sum of x and x upside down, it."""
    formats = {"formats": tuple(f.name for f in variant.formats)} if variant.form.is_both else {}
    if not variant.form.is_both and variant.form.transposed:
        options |= {"axis": -2, "transpose": True}
    options |= formats | {"both": variant.form.is_both, "window": variant.window}
    name = variant.formats[0].name

    def run(x, weight):
        residual = x[::-1] if variant.source.added else None
        result = rms_norm(
            x, weight, eps=EPS, format=name, factors=True, implementation=implementation,
            residual=residual, floats=variant.source.floats, **options
        )  # fmt: skip
        return result.quantized, result.factors, result.sum, result.floats

    return jax.jit(run)


def check(variant, x, weight, **options):
    """The kernel quantizes the bits that XLA computes on the CPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        want = quantized(variant, "xla", **options)(x, weight)
    poison_memory()
    got = quantized(variant, variant.implementation, **options)(x, weight)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert_bits_equal(np.asarray(a), np.asarray(b))


def test_what_serves_it():
    supported = functools.partial(jax_mx.is_supported, norm=True)
    name = "bfloat16_mxfp8_e4m3"
    assert supported("quantize", "sm_90") == (True, f"cutedsl: quantize_last_{name}_rms_norm")
    assert supported("quantize", "gfx942") == (
        True,
        f"flydsl: quantize_last_{name} of floats that XLA makes",
    )
    answer = supported("quantize_both", "sm_100", transpose=True)
    assert answer == (True, f"cutedsl: quantize_both_transposed_{name}_mxfp8_e4m3_rms_norm")
    answer = supported("quantize", "gfx950", floats=True)
    assert answer == (True, f"flydsl: quantize_last_{name} of floats that XLA makes")
    answer = supported("quantize", "sm_90", dtype="float32")
    assert answer == (True, "cutedsl: quantize_last_float32_mxfp8_e4m3_rms_norm")
    turned = {"axis": -2, "transpose": True}
    answer = supported("quantize", "sm_80", dtype="float16", **turned)
    assert answer == (True, "cutedsl: quantize_second_transposed_float16_mxfp8_e4m3_rms_norm")
    for options in ({"dtype": "float32", **turned}, {"axis": -2}, {"rows": True},
                {"activation": "swiglu"}, {"floats": True, "dtype": "float16"}):  # fmt: skip
        served, why = supported("quantize", "sm_90", **options)
        assert served and why.endswith(" of floats that XLA makes")
    refused = functools.partial(assert_refused, error=ValueError)
    refused(lambda: supported("quantize", "sm_90", ndim=3), sentence="those of a matrix")


@pytest.mark.usefixtures("without_code")
def test_one_call():
    """On x as it lies, of any rank along rows; and where XLA splits, of what XLA computes."""
    weight = jnp.ones(256, jnp.bfloat16)

    def text_of(x, **options):
        run = lambda x: rms_norm(x, weight, format="mxfp8_e4m3", factors=True, **options)[1:]  # noqa: E731
        return jax.jit(run).trace(x).lower(lowering_platforms=("cuda",)).as_text()

    x = jnp.ones((64, 256), jnp.bfloat16)
    for operand, call in (
        ("64x8x32xbf16", text_of(x)),
        ("4x16x8x32xbf16", text_of(x.reshape(4, 16, 256))),
        ("2x32x8x32xbf16", text_of(x, both=True)),
        ("2x32x256xbf16", text_of(x, axis=-2, transpose=True)),
    ):
        operands = f"tensor<{operand}>, tensor<256xf32>"
        assert f": ({operands}) -> " in call_attributes_in(call) and "sqrt" not in call
    added = lambda x: rms_norm(x, weight, format="mxfp8_e4m3", residual=x)[1:]  # noqa: E731
    call = jax.jit(added).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    operand = "tensor<64x8x32xbf16>"
    assert f": ({operand}, {operand}, tensor<256xf32>) -> " in call_attributes_in(call)
    assert "sqrt" not in call and "stablehlo.add" not in call
    with_codes = lambda x: rms_norm(x, weight, format="mxfp8_e4m3", residual=x, floats=True)  # noqa: E731
    for f in (with_codes, jax.grad(lambda x: with_codes(x).floats.astype(jnp.float32).sum())):
        text = jax.jit(f).trace(x).lower(lowering_platforms=("cuda",)).as_text()
        results = "tensor<64xf32>, tensor<64x8x32xbf16>, tensor<64x256xbf16>)"
        assert results in call_attributes_in(text) and "sqrt" not in text
    mesh = mesh_of(8)
    sharded = jax.ShapeDtypeStruct((256, 256), x.dtype, sharding=NamedSharding(mesh, P("a")))
    text = text_of(sharded, both=True)
    assert "sqrt" in text and "num_batch_dims" in call_attributes_in(text)


@pytest.mark.parametrize(
    "form", [directions.SECOND_TRANSPOSED, directions.BOTH_TRANSPOSED], ids=str
)
def test_grid_in_bands(form):
    """Thread blocks for tiles and for what is ahead of them, in every band and after the last."""
    tile, region, (more, lag) = Extents(128, 128), Extents(256, 128), (64, 4)
    for rows_, cols in ((32, 32), (256, 128), (544, 4128)):
        units = geometry.units_of(form)
        dims = (rows_ // units.rows, 32, cols // units.cols, 32)
        sizes = {}
        for _, buffer, *where in geometry.grid_in_bands(form, tile, region, 2, (more, lag)):
            start, stop, divisor, summand = where
            extent = start if buffer < 0 else math.prod(dims[start:stop])
            sizes[summand] = sizes.get(summand, 1) * -(-extent // divisor)
        bands, tiles = 2 * -(-rows_ // 256), -(-cols // 128)
        assert sum(sizes.values()) == (bands + lag) * (more + tiles)


@pytest.mark.gpu
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_factors_of_many_sums(eps):
    """Kernels divide and take roots by steps of their own; the definition does by NumPy's."""
    rng = np.random.default_rng(5)
    x = np.ldexp(rng.normal(size=(1 << 17, 32)), rng.integers(-60, 60, (1 << 17, 1)))
    x = x.astype(ml_dtypes.bfloat16)
    got = rms_norm(x, eps=eps, format="mxfp8_e4m3", factors=True).factors
    sums = x.astype(np.float32)
    sums = np.where(np.abs(sums) < np.float32(2.0**-63), np.float32(0), sums) ** 2
    while sums.shape[1] > 1:
        sums = sums[:, ::2] + sums[:, 1::2]
    with np.errstate(all="ignore"):
        mean = sums[:, 0].astype(np.float64) + 32 * np.float64(np.float32(eps))
        assert_bits_equal(np.asarray(got), np.sqrt(32 / mean).astype(np.float32))


@pytest.mark.gpu
@pytest.mark.sampled(10, 3)
@pytest.mark.parametrize("variant", HERE, ids=lambda v: v.name)
def test_every_kernel(variant):
    """Each layout, scaling and entry; lengths off every tile, and longer than what is kept."""
    scalings, layouts = [*Scaling], layouts_of(variant)
    shapes = SHAPES[str(variant.form).removesuffix("_transposed")]
    for i, shape in enumerate(shapes):
        weight = rows((shape[1],), ("float32", "bfloat16")[i % 2], i)
        case = {"scaling": scalings[i % len(scalings)], "scale_layout": layouts[i % len(layouts)]}
        check(variant, nasty(shape, i, variant.dtype), weight, **case)

    with for_any_address():
        for layout in layouts:
            x, weight = nasty(shapes[3], 0, variant.dtype), rows((shapes[3][1],), "bfloat16")
            check(variant, x, weight, scale_layout=layout)


@pytest.mark.gpu
@pytest.mark.parametrize("both", [False, True])
def test_past_two_to_the_31(both):
    """x has more elements than an int32 counts; the last rows are compared."""
    count, length = (1 << 31) // 8192 + 192, 8192

    @jax.jit
    def make():
        row, col = (jax.lax.broadcasted_iota(jnp.uint32, (count, length), i) for i in (0, 1))
        return ((row * 7 + col * 13) % 256).astype(jnp.bfloat16) / 32 - 4

    x = make()
    call = lambda x, **options: rms_norm(x, format="mxfp8_e4m3", both=both, factors=True, **options)  # noqa: E731
    got: Any = jax.jit(call)(x)
    want: Any = call(np.asarray(x[-4096:]), implementation="xla")
    first = [q[0] if both else q for q in (got.quantized, want.quantized)]
    assert_bits_equal(first[0].values[-4096:], first[1].values)
    assert_bits_equal(got.factors[-4096:], want.factors)
    if both:
        assert_bits_equal(got.quantized[1].values[:, -4096:], want.quantized[1].values)
