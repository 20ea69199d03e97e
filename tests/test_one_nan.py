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
