"""Products of small integers: exact in float32, so kernels give what float64 gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import by_kernel, poison_memory

import jax_mx
from jax_mx.formats.formats import BLOCK, SCALE_DTYPE
from jax_mx.formats.layouts import ROW_MAJOR
from jax_mx.formats.windows import ROW
from jax_mx.launch import targets
from jax_mx.quantizing.facts.product_kernels import PRODUCTS


# ---- operands ---
def integers(rng, shape, format, most=2, window=BLOCK, tile=1, exponents=2) -> jax_mx.MXArray:
    """Small integers times 2^-exponents to 2^exponents, a power for each window of a row or tile.

    A window may be "row".

    Sums of their products with other small integers are exact in float32.
    """
    *lead, n, k = shape
    window = -(-k // BLOCK) * BLOCK if window == ROW else window
    values = rng.integers(-most, most + 1, shape).astype(np.float32)
    if format.bits == 8:
        stored = values.astype(format.storage)
    else:  # codes of 1 and 2
        one = format.bias << format.mantissa_bits
        codes = np.array([0, one, one + (1 << format.mantissa_bits)])[np.abs(values).astype(int)]
        stored = (codes + np.where(values < 0, 1 << (format.bits - 1), 0)).astype(np.uint8)
        if format.codes_per_byte == 2:
            stored = stored[..., ::2] | stored[..., 1::2] << 4
    windows = -(-n // tile), -(-k // window)
    scales = rng.integers(127 - exponents, 128 + exponents, (*lead, *windows)).astype(np.uint8)
    scales = np.repeat(scales, tile, -2)[..., :n, :]
    scales = np.repeat(scales, window // BLOCK, -1)[..., : k // BLOCK]
    return array_of(stored, scales, format)


def array_of(values, scales, format) -> jax_mx.MXArray:
    """Codes and the bytes of their scales, in blocks along the last axis."""
    scales = jnp.asarray(scales).view(SCALE_DTYPE)
    return jax_mx.MXArray(jnp.asarray(values), scales, format, -1, ROW_MAJOR)


def changed(q: jax_mx.MXArray, codes=(), scales=()) -> jax_mx.MXArray:
    """The array with some bytes of codes and of scales replaced: (index, byte) pairs."""
    values, bytes_ = np.array(q.values.view(jnp.uint8)), np.array(q.scales.view(jnp.uint8))
    for index, byte in codes:
        values[index] = byte
    for index, byte in scales:
        bytes_[index] = byte
    return array_of(jnp.asarray(values).view(q.values.dtype), bytes_, q.format)


def float64(q) -> np.ndarray:
    if isinstance(q, jax_mx.MXArray):
        with jax.default_device(jax.devices("cpu")[0]):
            moved = jax.device_put(q, jax.devices("cpu")[0])
            q = jax_mx.dequantize(moved, jnp.float32, implementation="xla")
    return np.asarray(q).astype(np.float64)


def wanted(x, w, sizes=None, *, sums=False, free=False, **_) -> np.ndarray:
    """The product in float64; keywords as `by_kernel` has them."""
    if sums:  # rows come last, as in MX arrays
        x, w = (float64(q if isinstance(q, jax_mx.MXArray) else q.mT) for q in (x, w))
    else:
        x, w = float64(x), float64(w)
        w = w.mT if free else w
    with np.errstate(invalid="ignore"):
        if sizes is None:
            return x @ w.mT
        ends = np.minimum(np.cumsum(np.maximum(sizes, 0)), x.shape[1 if sums else 0])
        spans = [*zip([0, *ends[:-1]], ends, strict=True)]
        if sums:
            return np.stack([x[:, i:j] @ w[:, i:j].T for i, j in spans])
        y = np.zeros((x.shape[0], w.shape[1]))
        for matrix, (i, j) in zip(w, spans, strict=True):
            y[i:j] = x[i:j] @ matrix.T
        return y


def assert_equal(got, want, label=""):
    """Equal in got's dtype, NaN where NaN is wanted; names the first bad element."""
    want = want.astype(got.dtype)
    got = np.asarray(got)
    bad = np.argwhere(~((got == want) | (np.isnan(got) & np.isnan(want))))
    assert got.shape == want.shape, (got.shape, want.shape, label)
    assert not len(bad), (
        f"{label}: {len(bad)} of {got.size} differ, first {bad[0]}, last {bad[-1]}: "
        f"{got[tuple(bad[0])]} for {want[tuple(bad[0])]}"
    )


def assert_equal_or_flushed(got, want, label=""):
    """Equal, but numbers below 2^-126 may be zeros: no manual says that sums keep them."""
    got = np.asarray(got)
    assert_equal(np.where((got == 0) & (np.abs(want) < 2.0**-126), want, got), want, label)


def floats(rng, shape, dtype=jnp.bfloat16, most=3):
    return jnp.asarray(rng.integers(-most, most + 1, shape), dtype)


@functools.cache
def compiled(**options):
    return jax.jit(functools.partial(by_kernel, **options))


def check(x, w, sizes=None, implementation="xla", dtype="float32", **options):
    """The product is exact; keywords as `by_kernel` has them."""
    poison_memory()
    args = () if sizes is None else (jnp.asarray(sizes, jnp.int32),)
    y = compiled(implementation=implementation, dtype=dtype, **options)(x, w, *args)
    label = f"{x.shape} {w.shape} {sizes} {dtype} {options}"
    assert_equal(y, wanted(x, w, sizes, **options), label)


def on_cuda(function=check, **options):
    """A check, or a product, of the kernel."""
    return functools.partial(function, implementation="cutedsl", **options)


def to_attend(rng, heads, cache, positions, exact):
    """Operands of an attention of so many heads: quarter turns, each head sees one position.

    The cache is NaN behind the token. Not exact: random ones, and every angle.
    """
    batch, length, groups, depth = cache
    half = (batch, depth // 2)
    quarters = rng.integers(0, 4, half) if exact else rng.uniform(0, 4, half)
    cos, sin = np.cos(quarters * np.pi / 2), np.sin(quarters * np.pi / 2)
    if exact:
        cos, sin = cos.round(), sin.round()
    keys = np.where(rng.random(cache) < 0.5, -1.0, 1.0) if exact else rng.normal(size=cache)
    values = rng.integers(-99, 99, cache) * 1.0 if exact else rng.normal(size=cache)
    last = np.clip(positions, 0, length - 1)
    rows = np.arange(batch)
    seen = rng.integers(0, last[:, None] + 1, (batch, heads))
    seen[:, ::3] = last[:, None]  # the token itself
    of_group = np.arange(heads) // (heads // groups)
    q = 8 * keys[rows[:, None], seen, of_group] if exact else rng.normal(size=(batch, heads, depth))
    heads_of_x = np.concatenate([q, keys[rows, last]], 1)
    a, b = np.split(heads_of_x, 2, -1)
    c, s = cos[:, None], sin[:, None]
    turned_back = np.concatenate([a * c + b * s, b * c - a * s], -1)
    x = np.concatenate([turned_back, values[rows, last]], 1).reshape(batch, -1)
    for row, end in enumerate(last):
        keys[row, end:] = values[row, end:] = np.nan
    bf16 = [jnp.asarray(a, jnp.bfloat16) for a in (x, keys, values)]
    return [*bf16, jnp.asarray(positions, jnp.int32), jnp.float32(cos), jnp.float32(sin)]


# ---- on a GPU with kernels ---
def here() -> bool:
    return targets.chip_of(jax.devices()[0]) == "sm_90"


def on_hopper(test):
    return pytest.mark.gpu(pytest.mark.skipif(not here(), reason="no kernels for this chip")(test))


def of(op):
    """Parametrizes by the products of an op."""
    mine = [p for p in PRODUCTS if (p.op, p.implementation) == (op, "cutedsl")]
    return pytest.mark.parametrize("variant", mine, ids=lambda p: p.name)
