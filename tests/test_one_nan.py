"""Floats that norms and activations give: each NaN has the same bits, whoever computes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mx

FORMAT = "mxfp8_e4m3"
BITS = {"bfloat16": 0x7FFF, "float16": 0x7FFF, "float32": 0x7FFFFFFF}


def nasty(dtype):
    """Rows with NaNs of both signs and several bits, and with infinities of both signs."""
    x = np.random.default_rng(0).standard_normal((64, 256)).astype(jnp.dtype(dtype))
    bits = x.view(f"u{x.dtype.itemsize}")
    sign = 1 << 8 * x.dtype.itemsize - 1
    quiet = int(np.array(np.nan, x.dtype).view(bits.dtype))
    bits[0, 3], bits[1, 200], bits[2, 40] = quiet, quiet | sign, quiet | sign | 5
    x[3, 7], x[4, 130], x[5, 9], x[5, 10] = np.inf, -np.inf, np.inf, -np.inf
    x[40, ::2], x[41] = np.nan, -np.inf
    return jnp.asarray(x)


def floats_of(result):
    if isinstance(result, jax.Array):
        return [result]
    return [result.floats, getattr(result, "sum", None)]


def calls(codes):
    """Calls that give floats: alone, or beside codes, as kernels write both."""
    codes_too = {"format": FORMAT, "floats": True}
    for options in ({**codes_too}, {**codes_too, "both": True}) if codes else ({},):
        yield lambda x, options=options: jax_mx.rms_norm(
            x, jnp.ones(256), residual=x[::-1], **options
        )
        yield lambda x, options=options: jax_mx.rms_norm(x, **options)
        for name in ("swiglu", "gpt_oss", *["relu"] * (not codes)):
            yield lambda x, options=options, name=name: jax_mx.gated(x, name, **options)


def check(dtype, codes, ways=(jax.jit, lambda f: f)):
    x = nasty(dtype)
    bits = np.dtype(f"u{x.dtype.itemsize}")
    for number, call in enumerate(calls(codes)):
        for y in (y for way in ways for y in floats_of(way(call)(x)) if y is not None):
            nan = np.isnan(np.asarray(y, np.float32))
            seen = {*map(hex, np.asarray(y).view(bits)[nan].tolist())}
            assert nan.any() and seen == {hex(BITS[dtype])}, (number, seen)


@pytest.mark.parametrize("dtype", BITS)
def test_of_xla(dtype):
    check(dtype, False)


@pytest.mark.optimized
@pytest.mark.thorough
def test_beside_codes():
    """As users compile: XLA's code differs, and once gave one call two NaNs."""
    check("bfloat16", True, [jax.jit])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("codes", [False, True])
def test_of_kernels(dtype, codes):
    check(dtype, codes)


# ---- products ---
WAYS = {  # by implementation: a recipe for it, and what else it wants
    "xla": jax_mx.MXFP8,
    "dequantize": jax_mx.MXFP8,
    "fp8": jax_mx.MXFP8_ROWS,
    "cutedsl": jax_mx.MXFP8_WINDOWS,
}


def check_product(dtype, way, record=lambda *_: None):
    """NaN where an operand's row or column has one, and nowhere else; each quiet, of any bits."""
    x, w = np.ones((64, 256), np.float32), np.ones((256, 48), np.float32)
    x[3, 7], x[9, 100], w[200, 5] = np.nan, -np.nan, np.inf
    rows, columns = np.isin(np.arange(64), [3, 9]), np.arange(48) == 5
    x, w = jnp.asarray(x, dtype), jnp.asarray(w, dtype)
    options = {"recipe": WAYS[way], "implementation": way}
    sizes = jnp.array([40, 24], jnp.int32)
    products = {
        "matmul": lambda x, w: jax_mx.matmul(x, w, **options),
        "ragged_dot": lambda x, w: jax_mx.ragged_dot(x, jnp.stack([w, w]), sizes, **options),
    }
    for name in products if way != "fp8" else ("matmul",):
        y = np.asarray(jax.jit(products[name])(x, w))
        must = rows[:, None] | columns
        np.testing.assert_array_equal(np.isnan(y.astype(np.float32)), must, name)
        assert (y[~must] == 256).all()
        seen = y.view(f"u{y.dtype.itemsize}")[must]
        quiet = int(np.array(np.nan, y.dtype).view(seen.dtype))
        assert (seen & quiet == quiet).all(), name
        record(name, sorted({*map(hex, seen.tolist())}))


@pytest.mark.parametrize(("dtype", "way"), [("bfloat16", "dequantize"), ("float32", "xla")])
def test_of_products(dtype, way):
    check_product(dtype, way)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("way", WAYS)
def test_of_products_on_a_gpu(dtype, way, record_property):
    check_product(dtype, way, record_property)
