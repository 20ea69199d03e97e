"""Gated activations: the float that is quantized, its derivative, the kernels that compute it."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import arch_here
from helpers import (
    assert_bits_equal,
    assert_refused,
    assert_same,
    assert_same_array,
    call,
    call_attributes_in,
    for_any_address,
    in_turn,
    mesh_of,
    poison_memory,
    product,
    random_bits,
    settled,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx
from jax_mx.formats.formats import Scaling
from jax_mx.formats.windows import lengths_of
from jax_mx.launch.chips import ARCHS
from jax_mx.quantizing import reference
from jax_mx.quantizing.calling import WithSums
from jax_mx.quantizing.facts.activations import ACTIVATIONS, GATED
from jax_mx.quantizing.facts.variants import layouts_of
from jax_mx.quantizing.sources.gated import GatedSource
from jax_mx.quantizing.sources.gated_gradient import GradientSource
from jax_mx.quantizing.sources.gated_pair import GatedPairSource
from jax_mx.shipping.shipped import SHIPPED

P = PartitionSpec
NAMES = [*ACTIVATIONS]
FIRST_NAMES = ("swiglu", "gpt_oss", "relu2")
each_name = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.thorough] * (name not in FIRST_NAMES))
        for name in NAMES
    ],
)
DTYPES = ["bfloat16", "float16", "float32"]
ACTIVE = [v for v in SHIPPED if isinstance(v.source, GatedSource | GradientSource)]
EVERY = np.arange(1 << 16, dtype=np.uint16).view(jnp.bfloat16)  # every bfloat16
LEAST = 2.0**-126  # the smallest normal number


def doubles(x: np.ndarray) -> np.ndarray:
    """In float64; NumPy warns of NaNs."""
    with np.errstate(invalid="ignore"):
        return np.asarray(x).astype(np.float64)


# ---- what activations are, in float64 ---
TANH = 2 * math.sqrt(2 / math.pi)
erfc = np.vectorize(math.erfc, otypes=[np.float64])
EXPONENTS = {  # x sigmoid(z): z and its derivative
    "silu": (lambda x: x, np.ones_like),
    "sharp_silu": (lambda x: 1.702 * x, lambda x: np.full_like(x, 1.702)),
    "gelu": (
        lambda x: TANH * x * (1 + 0.044715 * x * x),
        lambda x: TANH * (1 + 3 * 0.044715 * x * x),
    ),
}


def cut(gate, name):
    """Gates as they count."""
    return np.where(gate > 7, 7.0, gate) if name == "gpt_oss" else gate


def exact(gate, name):
    """The part of an activation that depends on finite gates."""
    x, unary = cut(doubles(gate), name), ACTIVATIONS[name].unary
    with np.errstate(all="ignore"):
        if unary in EXPONENTS:
            z = EXPONENTS[unary][0](x)
            small = np.exp(-np.abs(z))
            return x * np.where(z < 0, small, 1) / (1 + small)
        positive = np.where(x <= 0, 0.0, x)
        return {"gelu_erf": lambda: x * erfc(-x / math.sqrt(2)) / 2, "relu": lambda: positive,
                "relu2": lambda: positive**2, "identity": lambda: x}[unary]()  # fmt: skip


def exact_slope(gate, name):
    """Its derivative; and the size of the terms that it is the sum of."""
    gate, unary = doubles(gate), ACTIVATIONS[name].unary
    x = np.clip(cut(gate, name), -1e3, 1e3)
    with np.errstate(all="ignore"):
        if unary in EXPONENTS:
            z, dz = (f(x) for f in EXPONENTS[unary])
            small = np.exp(-np.abs(z))
            terms = np.where(z < 0, small, 1) / (1 + small), x * dz * small / (1 + small) ** 2
        elif unary == "gelu_erf":
            density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
            terms = erfc(-x / math.sqrt(2)) / 2, x * density
        else:
            twice = 2 * np.maximum(cut(gate, name), 0)
            one = {"relu": x > 0, "relu2": twice, "identity": np.ones_like(x)}
            terms = one[unary].astype(np.float64), np.zeros_like(x)
        slope, size = sum(terms), sum(map(np.abs, terms))
        return np.where((gate > 7) & (name == "gpt_oss"), 0, slope), size


def factor(up, name):
    """The factor of the part."""
    return np.clip(up, -7, 7) + 1 if name == "gpt_oss" else up


@functools.cache
def table(name: str, slope: bool = False) -> np.ndarray:
    """For every bfloat16 gate the part, or the slope, as defined: rounded, without subnormals."""
    gate, row = doubles(EVERY), ACTIVATIONS[name]
    rounding = row.rounding.slope if slope else row.rounding.part
    some = np.where(np.isfinite(gate), gate, 0)
    if slope:
        some = settled(np.where(np.isinf(gate), np.sign(gate) * 1e30, some))
    values = exact_slope(some, name)[0] if slope else exact(some, name)
    if rounding is not None:
        fraction, exponent = np.frexp(np.where(values == 0, 1, np.abs(values)))
        units = (2 * fraction - 1) * 2**23
        kept = np.floor((units + rounding.up) / rounding.cell) * rounding.cell
        rounded = np.copysign(np.ldexp(1 + kept / 2**23, exponent - 1), values)
        values = np.where(np.abs(values) < LEAST, values, rounded)
    with np.errstate(over="ignore"):
        values = settled(values)
    if slope:
        if row.unary not in ("relu", "relu2", "identity"):
            falls = (values == 0) & (gate < -2)
            values = np.where(falls, np.float32(-0.0), values)
        values = np.where((gate == np.inf) & (row.unary == "relu2"), np.inf, values)
        defined = ~np.isnan(gate) | (row.unary == "identity")
        return np.where(defined, values, np.nan).astype(np.float32)
    # Infinite gates have the formula's limits: inf * 0 is a NaN.
    high = np.float32(cut(np.inf, name)) if np.isfinite(cut(np.inf, name)) else np.float32(np.inf)
    if np.isfinite(high):
        high = values[np.flatnonzero(gate == high)[0]]
    low = np.float32({"relu": 0, "relu2": 0, "identity": -np.inf}.get(row.unary, np.nan))
    values = np.where(gate == np.inf, high, np.where(gate == -np.inf, low, values))
    return np.where(np.isnan(gate), np.nan, values).astype(np.float32)


def without(x: np.ndarray, bits: int) -> np.ndarray:
    """Float64s without so many of their last bits."""
    return (np.ascontiguousarray(x).view(np.uint64) >> bits << bits).view(np.float64)


def in_steps(gate, name):
    """The part, of float32 gates, as the steps of x sigmoid(z) have it, in NumPy's float64."""
    x, unary = cut(gate.astype(np.float64), name), ACTIVATIONS[name].unary
    if unary not in EXPONENTS:
        return exact(gate, name)
    a = np.abs(x)
    if unary == "sharp_silu":
        a = without(a * 1.702, 1)
    if unary == "gelu":
        a = without(a * TANH * (without(a * a * 0.044715, 1) + 1), 1)
    n = np.rint(np.where(a <= 200, a, 0) / math.log(2))
    r = np.where(a <= 200, a, 0) - n * 0.6931471805598903
    total = np.full_like(r, np.float32(-0.00019790346))
    for c in (0.001394466025774266, -0.008333497069589881, 0.04166629493687885,
              -0.1666666586893516):  # fmt: skip
        total = without(total, 27) * without(r, 27) + c
    for c in (0.5000000067685838, -1, 1):
        total = without(total * r, 1) + c
    small = np.where(a <= 200, np.ldexp(total, -n.astype(int)), 0)
    return np.where(x < 0, x * small, x) / (1 + small)


def wanted(gate_up, name="swiglu", weights=None) -> np.ndarray:
    """`gated`: of bfloat16 by table and in float64, where products are exact or nearly."""
    gate, *up = np.split(np.asarray(gate_up), 2, -1) if name in GATED else [np.asarray(gate_up)]
    with np.errstate(all="ignore"):
        if gate.dtype == jnp.bfloat16:
            y = table(name)[gate.view(np.uint16)]
        else:
            y = settled(in_steps(settled(gate.astype(np.float32)), name).astype(np.float32))
        if up:
            y = product(y, settled(factor(settled(up[0].astype(np.float32)), name)))
        if weights is not None:
            y = product(y, settled(np.asarray(weights))[..., None])
        return y.astype(gate.dtype)


def wanted_gradient(gate_up, dy, name="swiglu", weights=None) -> np.ndarray:
    """The derivative of `gated` of bfloat16, by NumPy."""
    gate, *up = np.split(np.asarray(gate_up), 2, -1) if name in GATED else [np.asarray(gate_up)]
    dy, bits = settled(np.asarray(dy).astype(np.float32)), gate.view(np.uint16)
    with np.errstate(all="ignore"):
        if weights is not None:
            dy = product(dy, settled(np.asarray(weights))[..., None])
        by = [table(name, slope=True)[bits]]
        if up:
            up = settled(up[0].astype(np.float32))
            inside = np.where((np.abs(up) > 7) & (name == "gpt_oss"), 0, 1).astype(np.float32)
            by = [product(by[0], settled(factor(up, name))), settled(table(name)[bits] * inside)]
        return np.concatenate([product(dy, slope) for slope in by], -1).astype(jnp.bfloat16)


def sums_of(x) -> np.ndarray:
    """Float32 sums of each 32 rows of a matrix: of neighbours, then of neighbours of these."""
    sums = settled(np.asarray(x).astype(np.float32)).reshape(-1, 32, x.shape[-1])
    with np.errstate(all="ignore"):
        while sums.shape[1] > 1:
            sums = settled(sums[:, ::2] + sums[:, 1::2])
    return sums[:, 0]


def same_floats(got, want, label="") -> None:
    """Bits, but for which NaN."""
    got, want = np.asarray(got), np.asarray(want)
    nan = np.isnan(want.astype(np.float32))
    assert (np.isnan(got.astype(np.float32)) == nan).all(), label
    assert_bits_equal(np.where(nan, 0, got).astype(got.dtype), np.where(nan, 0, want).astype(
        want.dtype), label)  # fmt: skip


same = functools.partial(assert_same, floats=same_floats)


def every_gate(length: int = 128, dtype="bfloat16") -> np.ndarray:
    """(512, 2 length): every bfloat16 as a gate, ups of any size, and 1 beside one in four.

    Or every float16; of float32 numbers that begin as every bfloat16 does.
    """
    every = EVERY.view(dtype) if dtype == "float16" else EVERY.astype(dtype)
    gates = np.random.default_rng(1).permutation(every)[: 512 * length]
    if dtype == "float32":
        gates = (gates.view(np.uint32) | np.arange(gates.size, dtype=np.uint32)).view(dtype)
    ups = random_bits((gates.size,), dtype, seed=3)
    ups[::4] = 1
    return np.concatenate([g.reshape(512, length) for g in (gates, ups)], -1)


def one_up(gate, name):
    """Gates beside ups that multiply by 1; of an activation without a gate the gates alone."""
    gate = np.asarray(gate)
    up = np.full_like(gate, 0 if name == "gpt_oss" else 1)
    return np.stack([gate, up], -1) if name in GATED else gate[..., None]


# ---- the float ---
ROUNDED = [name for name in NAMES if ACTIVATIONS[name].rounding.part is not None]


def off(got, want, bits: int, least: float):
    """By how many units in the last place of so many bits, where these are normal numbers."""
    some = (np.abs(want) >= least) & (np.abs(want) < (2.0**15 if least > 1e-6 else 2.0**127))
    got, want = doubles(got)[some], want[some]
    _, exponent = np.frexp(want)
    return (np.abs(got - want) / np.ldexp(1.0, exponent - bits)).max()


@pytest.mark.optimized
@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("rounded", ["part", "slope"])
def test_no_gate_is_near_a_tie(rounded, name):
    """A number before rounding is further from a tie than a chip's exponential and reciprocal err.

    They err by 2^-20.5 of the number. Where exp(-z) counts, they err by 2^-22.5 z more, or by
    2^-21.5 z where z is a polynomial of the gate. If terms cancel each other, the errors are
    relative to the terms.
    """
    gate = doubles(EVERY)
    gate = gate[np.isfinite(gate)]
    value, size = (exact(gate, name),) * 2 if rounded == "part" else exact_slope(gate, name)
    value, size = np.abs(value), np.abs(size)
    unary, x = ACTIVATIONS[name].unary, np.minimum(cut(gate, name), 0)
    with np.errstate(over="ignore"):
        z = np.abs(x * x / 2 if unary == "gelu_erf" else EXPONENTS[unary][0](x))
    some = value >= LEAST
    value, size, z = value[some], size[some], z[some]
    rounding = getattr(ACTIVATIONS[name].rounding, rounded)
    fraction, _ = np.frexp(value)
    units = (2 * fraction - 1) * 2**23
    away = np.abs((units + rounding.up) % rounding.cell)
    away = np.minimum(away, rounding.cell - away)  # in units of 2^-23 of the leading bit
    error = 2.0**-20.5 + 2.0 ** (-21.5 if unary.startswith("gelu") else -22.5) * z
    assert (away > error * size / value * 2 * fraction * 2**23).all()
    assert abs(rounding.up / rounding.cell - 0.5) < 0.08


@pytest.mark.optimized
@each_name
def test_the_float_is_defined(name):
    """XLA gives the defined float and product for every gate, in both of its ways."""
    one = one_up(EVERY, name)
    x, weights = every_gate(), np.random.default_rng(0).normal(size=512).astype(np.float32)
    x = x if name in GATED else x[:, :128]
    for run in (jax_mx.gated, jax.jit(jax_mx.gated, static_argnums=1)):
        same_floats(run(one, name)[:, 0], wanted(one, name)[:, 0])
        same_floats(run(x, name), wanted(x, name))
        same_floats(run(x, name, weights=weights), wanted(x, name, weights), "weights")


@pytest.mark.optimized
@pytest.mark.parametrize(
    "name", ["swiglu", "geglu", *(pytest.param(n, marks=pytest.mark.thorough) for n in (
        "gpt_oss", "reglu2"))])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_float_of_other_floats_is_defined(dtype, name):
    """By XLA in both of its ways: joining products and sums changes no bit."""
    x, weights = every_gate(dtype=dtype), np.random.default_rng(0).normal(size=512)
    weights = weights.astype(np.float32)
    for run in (jax_mx.gated, jax.jit(jax_mx.gated, static_argnums=1)):
        same_floats(run(x, name), wanted(x, name))
        same_floats(run(x, name, weights=weights), wanted(x, name, weights), "weights")


@pytest.mark.sampled(2)
@pytest.mark.optimized
@each_name
def test_the_gradient_is_defined(name):
    """For every gate; that of `gated`'s derivative, and the one that is quantized."""
    x, weights = every_gate(), np.random.default_rng(0).normal(size=512).astype(np.float32)
    x = x if name in GATED else x[:, :128]
    dy = random_bits((512, 128), "bfloat16", seed=5)
    pull = lambda x, dy, w: jax.vjp(lambda x: jax_mx.gated(x, name, weights=w), x)[1](dy)[0]  # noqa: E731
    for w in (None, weights):
        want = wanted_gradient(x, dy, name, w)
        gated = jax_mx.Gated(name, w, gradient=dy)
        got = jax.jit(lambda x, gated: jax_mx.quantize_both(x, activation=gated))(x, gated)
        same(got, jax_mx.quantize_both(want))
        # XLA computes the derivative with subnormals, where a device has them.
        large = np.abs(want.astype(np.float32)) > LEAST
        same_floats(*(np.where(large, d, 0) for d in (jax.jit(pull)(x, dy, w), want)))


@pytest.mark.optimized
@each_name
def test_the_float_is_near_the_exact_number(name):
    """Every bfloat16 gate is within a unit in the last place of the dtype that has it."""
    gate = EVERY[np.isfinite(EVERY.astype(np.float32))].astype(np.float32)
    least_half = 2.0**-14
    for dtype, bits, least, bound in (
        ("bfloat16", 8, LEAST, 0.79),
        ("float16", 11, least_half, 0.501),
        ("float32", 24, LEAST, 0.51),
    ):
        with np.errstate(over="ignore"):
            gates = gate.astype(dtype)
        gates = gates[np.isfinite(gates.astype(np.float32))]
        got = np.asarray(jax_mx.gated(one_up(gates, name), name))[:, 0]
        assert off(got, exact(gates, name), bits, least) < bound, dtype


@each_name
def test_products_are_near_the_exact_number(name):
    """Within 1.07 units in the last place of bfloat16, where all of it is normal."""
    gate, up = doubles(EVERY), doubles(random_bits((1 << 16,), "bfloat16"))
    some = np.isfinite(gate) & np.isfinite(up) & (np.abs(up) >= LEAST)
    some[some] &= (size := np.abs(exact(gate[some], name))) >= LEAST
    some[some] &= size[size >= LEAST] < 2.0**127
    gate, up = gate[some], up[some]
    x = np.stack([gate, up], -1).astype(jnp.bfloat16)[:, : 1 + (name in GATED)]
    with np.errstate(all="ignore"):
        want = exact(gate, name) * (factor(up, name) if name in GATED else 1)
    assert off(jax_mx.gated(x, name)[:, 0], want, 8, 2 * LEAST) < 1.07


@pytest.mark.parametrize("dtype", DTYPES)
@each_name
def test_derivatives(name, dtype):
    """Gates, ups and weights, against float64."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(5, 3, 64)) * 4).astype(dtype)
    w, dy = (rng.normal(size=shape).astype(np.float32) for shape in ((5, 3), (5, 3, 32)))
    x = x if name in GATED else x[..., :32]
    y, back = jax.vjp(lambda x, w: jax_mx.gated(x, name, weights=w), x, w)
    dx, dw = back(dy.astype(dtype))
    at, weights, dy = doubles(x), doubles(w)[..., None], doubles(dy.astype(dtype))
    gate, up = np.split(at, 2, -1) if name in GATED else (at, np.ones_like(at))
    part, (slope, _) = exact(gate, name), exact_slope(gate, name)
    by = factor(up, name) if name in GATED else up
    inside = (np.abs(up) <= 7) | (name != "gpt_oss")
    want = [slope * by * weights * dy, part * inside * weights * dy][: 1 + (name in GATED)]
    bound = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.2e-2}[dtype]
    tolerance = {"rtol": bound, "atol": bound}
    np.testing.assert_allclose(doubles(y), part * by * weights, **tolerance)
    np.testing.assert_allclose(doubles(dx), np.concatenate(want, -1), **tolerance)
    np.testing.assert_allclose(dw, (part * by * dy).sum(-1), rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["gpt_oss", pytest.param("swiglu", marks=pytest.mark.thorough)])
def test_layouts_of_gate_and_up(name):
    """By halves, by turns, and as two arrays: the same floats, codes and derivatives."""
    gate, up = (random_bits((64, 96), "bfloat16", seed=i) for i in (1, 2))
    gate, up = (
        np.where(np.isfinite(a.astype(np.float32)), a, 1).astype(a.dtype) for a in (gate, up)
    )
    weights = np.random.default_rng(0).normal(size=64).astype(np.float32)
    split, turns = np.concatenate([gate, up], -1), np.stack([gate, up], -1).reshape(64, 192)
    cases = [(split, {}), (turns, {"interleaved": True}), (gate, {"up": up})]
    want = wanted(split, name, weights)
    for x, options in cases:
        same_floats(jax_mx.gated(x, name, weights=weights, **options), want)
        gated = jax_mx.Gated(name, weights, **options)
        got = jax.jit(lambda x, gated: jax_mx.quantize_both(x, activation=gated))(x, gated)
        same(got, jax_mx.quantize_both(want), str(options))
        picked = np.array([3, -1, 63, *range(29)], np.int32)
        rows = jax_mx.Gated(name, weights[:32], **options)
        there = np.where((picked >= 0)[:, None], split[picked], np.zeros_like(split[0]))
        same(
            jax_mx.quantize(x, activation=rows, rows=picked),
            jax_mx.quantize(wanted(there, name, weights[:32])),
            "rows",
        )
    pull = lambda x, **options: jax.vjp(lambda x: jax_mx.gated(x, name, **options), x)[1](want)[0]  # noqa: E731
    d = np.asarray(pull(split))
    by_turns = np.stack(np.split(d, 2, -1), -1).reshape(64, 192)
    gated = jax_mx.Gated(name, interleaved=True, gradient=want)
    by = wanted_gradient(split, want, name)
    by = np.stack(np.split(by, 2, -1), -1).reshape(64, 192)
    got = jax_mx.quantize_both(turns, activation=gated)
    same(got, jax_mx.quantize_both(by), "gradient by turns")
    same_floats(pull(turns, interleaved=True), by_turns)
    d_up = jax.vjp(lambda up: jax_mx.gated(gate, name, up=up), up)[1](want)[0]
    np.testing.assert_array_equal(d_up, d[:, 96:])


def test_second_derivatives_are_refused():
    f = lambda x: jax_mx.gated(x).sum()  # noqa: E731
    for second in (jax.hessian(f), lambda x: jax.jvp(jax.grad(f), (x,), (x,))):
        with pytest.raises(NotImplementedError, match="swiglu has first derivatives, no second"):
            second(jnp.ones(4))
    by_weights = jax.grad(lambda x, w: jax_mx.gated(x, weights=w).sum(), 1)
    mixed = jax.jacfwd(by_weights)(jnp.ones((1, 4)), jnp.ones(1))
    np.testing.assert_array_equal(mixed.ravel(), jax.grad(f)(jnp.ones(4)))  # as of weight 1


def test_no_rows_of_gates_and_ups_by_turns():
    x, w = jnp.zeros((0, 64)), jnp.zeros((3, 64, 64))
    assert jax_mx.gated(x, interleaved=True).shape == (0, 32)
    assert jax_mx.quantize(x, activation=jax_mx.Gated(interleaved=True)).shape == (0, 32)
    none = jnp.zeros((0, 2))
    y = jax_mx.moe(x, none.astype(jnp.int32), none, w, w[:, :32], interleaved=True)
    assert y.shape == (0, 64)


def test_what_is_refused():
    x = jnp.ones((8, 128), jnp.bfloat16)
    refused = functools.partial(assert_refused, error=ValueError)
    refused(lambda: jax_mx.gated(x, "tanh"), sentence="activation must be 'swiglu', 'geglu'")
    refused(lambda: jax_mx.Gated("tanh"), sentence="'identity', got 'tanh'")
    refused(lambda: jax_mx.Gated("relu", up=x), sentence="'relu' has no gate, so there is no up")
    refused(lambda: jax_mx.Gated(up=x, interleaved=True), sentence="order of one array; drop it")
    refused(lambda: jax_mx.gated(x, up=x[:4]), sentence="gates are bfloat16[8, 128] and ups bfloat")
    refused(lambda: jax_mx.gated(x[:, :65]), sentence="halves of the last axis, got the shape (8")
    weights = np.ones(7, np.float32)
    refused(
        lambda: jax_mx.quantize(x, activation=jax_mx.Gated(weights=weights)),
        sentence="quantize: weights must be float32[8], one for each row, got float32[7]",
    )
    refused(
        lambda: jax_mx.quantize(x[:, :96], activation=jax_mx.Gated()),
        sentence="axis -1 has length 48, not a multiple of the block length 32",
    )
    dy = jnp.ones((8, 64), x.dtype)
    refused(lambda: jax_mx.Gated(up=x, gradient=dy), sentence="own there are two gradients; give")
    refused(
        lambda: jax_mx.quantize(x, activation=jax_mx.Gated(gradient=x)),
        sentence="quantize: the gradient must be bfloat16[8, 64], as what `gated` gives, got bfloa",
    )
    gated, rows = jax_mx.Gated(gradient=dy), jnp.arange(8, dtype=jnp.int32)
    refused(
        lambda: jax_mx.quantize(x, activation=gated, rows=rows),
        sentence="rows of x have no gradient alone; drop rows, or the gradient",
    )
    refused(lambda: jax_mx.gated(x, floats=True), sentence="floats come beside a format; drop")
    refused(lambda: jax_mx.gated(x, both=True), sentence="gated: format says what is quantized to")
    refused(
        lambda: jax_mx.is_supported("quantize", "sm_90", floats=True),
        sentence="floats are those of an activation, or of a norm, alone; give one",
    )
    for options in ({}, {"activation": "relu"}, {"activation": "swiglu", "interleaved": True}):
        refused(
            lambda: jax_mx.is_supported("quantize", "sm_90", up=True, **options),  # noqa: B023
            sentence="up is that of an activation alone, without a gradient; give one",
        )
    refused(
        lambda: jax_mx.is_supported("quantize", "sm_90", gradient=True),
        sentence="gradient is that of an activation without rows; give one",
    )
    refused = functools.partial(assert_refused, error=TypeError)
    refused(
        lambda: jax_mx.quantize(x, activation=jax_mx.Gated(gradient=dy.astype(jnp.float32))),
        sentence="the gradient must be bfloat16[8, 64], as what `gated` gives, got float32",
    )
    refused(
        lambda: jax_mx.quantize(x, activation="swiglu"), sentence="must be None or a Gated, got"
    )
    refused(lambda: jax_mx.gated(x, up=x.astype(np.float32)), sentence="must have one dtype and")
    refused(lambda: jax_mx.gated(x.astype(jnp.int32)), sentence="gated: gate_up is int32")
    weights = np.ones(8, np.int32)
    refused(lambda: jax_mx.gated(x, weights=weights), sentence="must be float32[8], one for each")


# ---- quantizing it ---
CALLS = {
    "last": (jax_mx.quantize, {}),
    "second": (jax_mx.quantize, {"axis": -2, "format": "mxfp6_e2m3"}),
    "second transposed": (jax_mx.quantize, {"axis": -2, "transpose": True, "window": 128}),
    "square": (jax_mx.quantize, {"block": (32, 32)}),
    "random": (
        jax_mx.quantize,
        {"format": "mxfp4_e2m1", "rounding": jax_mx.Stochastic(np.array([0, 7], np.uint32))},
    ),
    "both": (jax_mx.quantize_both, {"window": "row"}),
    "both, tiles": (jax_mx.quantize_both, {"scale_layout": "blocked_128x4"}),
}


@pytest.mark.sampled(4)
@pytest.mark.optimized
@pytest.mark.parametrize("name,dtype", in_turn(CALLS, DTYPES))
def test_it_is_quantizing_what_gated_gives(name, dtype):
    op, options = CALLS[name]
    x = random_bits((96, 320), dtype)
    x = np.where(np.isfinite(x.astype(np.float32)), x, 1).astype(dtype)
    weights = np.random.default_rng(0).normal(size=96).astype(np.float32)
    for gated in (jax_mx.Gated(), jax_mx.Gated("swiglu", weights)):
        want = op(jax.jit(jax_mx.gated)(x, weights=gated.weights), **options)
        got = jax.jit(lambda x, gated: op(x, activation=gated, **options))(x, gated)
        same(got, want, name)
    got = op(x.reshape(3, 32, 320), activation=jax_mx.Gated(), **options)
    if options.get("scale_layout") is None and "rounding" not in options:
        same(got, op(jax.jit(jax_mx.gated)(x.reshape(3, 32, 320)), **options), "three dimensions")


def bits_of(tree):
    """The bytes of all arrays of a tree."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("swiglu", {}),
        ("gpt_oss", {"interleaved": True, "both": True}),
        ("geglu", {"both": True, "scale_layout": "blocked_128x4"}),
        ("swiglu", {"up": True, "axis": -2, "transpose": True}),
        ("relu2", {"both": True}),
        ("swiglu", {"rows": np.array([3, -1, *range(30)], np.int32)}),
        ("swiglu", {"rounding": jax_mx.Stochastic(np.array([0, 7], np.uint32))}),
    ],
)
def test_quantized_with_and_without_floats(name, case):
    """By `gated` itself: its floats, with their derivative, and what `quantize` makes of them."""
    x, arguments = random_bits((64, 192), "bfloat16"), dict(case)
    x = np.where(np.isfinite(doubles(x)), x, 1).astype(x.dtype)
    weights = np.random.default_rng(0).normal(size=64).astype(np.float32)
    operands = {"weights": weights, "interleaved": arguments.pop("interleaved", False)}
    if arguments.pop("up", False):
        x, operands["up"] = x[:, :96].copy(), x[:, 96:].copy()
    format = "mxfp4_e2m1" if "rounding" in case else "mxfp8_e4m3"
    make: Any = functools.partial(jax_mx.gated, activation=name, **operands)
    both, options = arguments.pop("both", False), arguments
    y = jax.jit(make)(x)
    want = (jax_mx.quantize_both if both else jax_mx.quantize)(y, format, **options)
    for floats in (None, False, True):
        run = functools.partial(make, format=format, both=both, floats=floats, **options)
        for result in (run(x), jax.jit(run)(x)):
            assert isinstance(result, jax_mx.Activated)
            assert bits_of(result.quantized) == bits_of(want)
            assert (result.floats is None) == (not floats)
            assert not floats or bits_of(result.floats) == bits_of(y)
    dy = np.ones(y.shape, y.dtype)
    (alone,) = jax.vjp(make, x)[1](dy)
    (with_codes,) = jax.vjp(lambda x: run(x).floats, x)[1](dy)
    assert bits_of(alone) == bits_of(with_codes)
    with pytest.raises(NotImplementedError, match=r"quantize(_both)?: codes have no derivative"):
        jax.vjp(lambda x: make(x, format=format, both=both, **options).quantized, x)


def test_what_serves_it():
    supported = functools.partial(jax_mx.is_supported, "quantize", activation="swiglu")
    name = "quantize_last_bfloat16_mxfp8_e4m3"
    assert supported("sm_90") == (True, f"cutedsl: {name}_swiglu")
    assert supported("gfx950") == (True, f"flydsl: {name} of floats that XLA makes")
    answer = jax_mx.is_supported("quantize_both", "sm_90", transpose=True, activation="swiglu",
                                gradient=True)  # fmt: skip
    name_of_both = "quantize_both_transposed_bfloat16_mxfp8_e4m3_mxfp8_e4m3"
    assert answer == (True, f"cutedsl: {name_of_both}_swiglu_gradient")
    answer = jax_mx.is_supported("quantize_both", "gfx950", transpose=True, activation="gpt_oss",
                                interleaved=True, gradient=True)  # fmt: skip
    assert answer == (True, f"flydsl: {name_of_both} of floats that XLA makes")
    answer = jax_mx.is_supported("quantize_both", "sm_90", transpose=True, activation="gpt_oss",
                                interleaved=True, gradient=True)  # fmt: skip
    assert answer == (True, f"cutedsl: {name_of_both}_gpt_oss_interleaved_gradient")
    assert supported("sm_100", up=True) == (True, f"cutedsl: {name} of floats that XLA makes")
    answer, why = supported("sm_90", up=True, activation="gpt_oss")
    assert answer and why.endswith(" of floats that XLA makes")
    answer = jax_mx.is_supported("quantize", "sm_80", activation="gpt_oss", interleaved=True)
    assert answer == (True, f"cutedsl: {name}_gpt_oss_interleaved")
    assert supported("sm_90", floats=True) == (True, f"cutedsl: {name}_swiglu_floats")
    answer, why = supported("sm_90", floats=True, dtype="float32")
    assert answer and why.endswith(" of floats that XLA makes")
    for dtype in ("float16", "float32"):
        answer = supported("sm_100", dtype=dtype)
        assert answer == (True, f"cutedsl: quantize_last_{dtype}_mxfp8_e4m3_swiglu")
    for options in ({"activation": "bilinear"}, {"rows": True}, {"gradient": True}):
        options = {"activation": "swiglu"} | options
        answer, why = jax_mx.is_supported("quantize", "sm_90", **options)
        assert answer and why == f"cutedsl: {name} of floats that XLA makes"
    answer, why = supported("sm_90", axis=-2)
    assert answer and why.endswith(" of floats that XLA makes")


@pytest.mark.usefixtures("without_code")
def test_one_call():
    """On x as it lies; and in a program that XLA splits, a call of what XLA computes."""
    run = lambda x: jax_mx.quantize_both(x, activation=jax_mx.Gated())  # noqa: E731
    x = jnp.ones((64, 512), jnp.bfloat16)
    text = jax.jit(run).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    operands = "tensor<64x2x8x32xbf16>, tensor<2x32xf32>"
    assert f": ({operands}) -> " in call_attributes_in(text) and "exponential" not in text
    back = lambda x, dy: jax_mx.quantize_both(x, activation=jax_mx.Gated(gradient=dy))  # noqa: E731
    text = jax.jit(back).trace(x, x[:, 256:]).lower(lowering_platforms=("cuda",)).as_text()
    operands += ", tensor<64x8x32xbf16>"
    assert f": ({operands}) -> " in call_attributes_in(text) and "exponential" not in text
    turns = lambda x, dy: jax_mx.quantize_both(  # noqa: E731
        x, activation=jax_mx.Gated(interleaved=True, gradient=dy)
    )
    text = jax.jit(turns).trace(x, x[:, 256:]).lower(lowering_platforms=("cuda",)).as_text()
    operands = "tensor<64x16x32xbf16>, tensor<2x32xf32>, tensor<64x16x16xbf16>"
    assert f": ({operands}) -> " in call_attributes_in(text) and "exponential" not in text
    apart = lambda x, up: jax_mx.gated(x, up=up, format="mxfp8_e4m3", both=True)  # noqa: E731
    text = jax.jit(apart).trace(x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert ": (tensor<2x16x32x32xbf16>) -> " in call_attributes_in(text)  # of floats by XLA
    with_floats = lambda x: jax_mx.gated(x, format="mxfp8_e4m3", both=True, floats=True)  # noqa: E731
    loss = lambda x: with_floats(x).floats.astype(jnp.float32).sum()  # noqa: E731
    for f in (with_floats, jax.value_and_grad(loss)):
        text = jax.jit(f).trace(x).lower(lowering_platforms=("cuda",)).as_text()
        call = call_attributes_in(text)
        assert ": (tensor<64x2x8x32xbf16>, tensor<2x32xf32>) -> " in call
        assert "tensor<64x256xbf16>)" in call and ("exponential" in text) == (f is not with_floats)
    mesh = mesh_of(8)
    sharded = jax.ShapeDtypeStruct((256, 512), x.dtype, sharding=NamedSharding(mesh, P("a")))
    text = jax.jit(run).trace(sharded).lower(lowering_platforms=("cuda",)).as_text()
    assert "exponential" in text and "num_batch_dims" in call_attributes_in(text)


def exact_gradient(rows: int = 96, length: int = 64):
    """x and dy of reglu whose gradients, and all sums of them, are whole numbers."""
    rng = np.random.default_rng(2)
    x = rng.integers(-4, 5, (rows, 2 * length)).astype(jnp.bfloat16)
    return x, rng.integers(-4, 5, (rows, length)).astype(jnp.bfloat16)


@pytest.mark.optimized
@pytest.mark.parametrize("name", ["reglu", "swiglu", "gpt_oss"])
def test_sums_of_columns_are_defined(name):
    """Whole numbers exactly; others in the order that is said, without subnormals."""
    x, dy = exact_gradient()
    if name != "reglu":
        x, dy = (random_bits(a.shape, "bfloat16", seed=i) for i, a in enumerate((x, dy)))
        x, dy = (np.where(np.isfinite(doubles(a)), a, 1).astype(a.dtype) for a in (x, dy))
    want = wanted_gradient(x, dy, name)
    gated = WithSums(jax_mx.Gated(name, gradient=dy))
    *codes, sums = jax.jit(lambda x, gated: jax_mx.quantize_both(x, activation=gated))(x, gated)
    same(codes, jax_mx.quantize_both(want))
    same_floats(sums, sums_of(want))
    if name == "reglu":
        assert (sums == doubles(want).reshape(3, 32, -1).sum(1)).all()


def test_sums_that_are_subnormal_are_zeros():
    least = np.float32(2.0**-126)
    x = np.zeros((32, 64), np.float32)
    x[:2] = [[1.5 * least] * 64, [-least] * 64]  # 2^-127
    x[2:4, 32:] = least
    sums = np.asarray(reference.sums_of(jnp.asarray(x.astype(jnp.bfloat16))))
    assert (sums[0, :32] == 0).all() and (sums[0, 32:] == 2 * least).all()


@pytest.mark.parametrize("operand", ["up", "sums"])
def test_one_call_of_each_of_a_batch(operand):
    x, dy = exact_gradient()
    both = np.stack([x, x[::-1]]), np.stack([dy, dy[::-1]])

    def run(x, dy):
        gated = jax_mx.Gated(up=dy) if operand == "up" else WithSums(jax_mx.Gated(gradient=dy))
        return jax_mx.quantize_both(x[:, :64] if operand == "up" else x, activation=gated)

    mapped = jax.jit(jax.vmap(run))(*both)
    for i in range(2):
        same(jax.tree.map(lambda a: a[i], mapped), run(both[0][i], both[1][i]))  # noqa: B023


@pytest.mark.sampled(2)
@pytest.mark.parametrize("axis_type", AxisType, ids=str)
@pytest.mark.parametrize("operand", ["gates", "up", "sums"])
def test_shards(axis_type, operand):
    """Ups apart, and sums, whose rows are split like the gradient's."""
    x, dy = exact_gradient(128)

    def run(x, dy):
        gated = jax_mx.Gated(up=dy if operand == "up" else None)
        gated = WithSums(jax_mx.Gated(gradient=dy)) if operand == "sums" else gated
        return jax_mx.quantize_both(x[:, :64] if operand == "up" else x, activation=gated)

    want = run(x, dy)
    kinds = (AxisType.Auto if axis_type is AxisType.Manual else axis_type,)
    mesh = jax.make_mesh((4,), ("a",), axis_types=kinds, devices=jax.devices("cpu")[:4])
    if axis_type is AxisType.Manual:
        specs = (P("a"), P(None, "a"), *[P("a")] * (operand == "sums"))
        run = jax.shard_map(run, mesh=mesh, in_specs=(P("a"), P("a")), out_specs=specs)
        same(jax.jit(run)(x, dy), want)
        return
    with jax.set_mesh(mesh):
        split = [jax.device_put(a, NamedSharding(mesh, P("a"))) for a in (x, dy)]
        same(jax.jit(run)(*split), want)


# ---- kernels ---
HERE = [
    v
    for v in SHIPPED
    if isinstance(v.source, GatedSource | GradientSource | GatedPairSource)
    and (arch_here() is None or arch_here() in ARCHS[v.implementation])
]
SHAPES = {
    "last": [(7, 96), (513, 4128), (129, 160), (1, 32)],
    "second": [(32, 1), (160, 257), (96, 7), (544, 72), (64, 1145)],
    "both": [(32, 32), (96, 160), (160, 224), (64, 320), (288, 544), (544, 4128)],
}


def fitting(variant, length: int) -> int:
    """A length of gates that is whole windows, where the variant's kernel wants these.

    By turns, gates and ups together are whole blocks.
    """
    gradient = isinstance(variant.source, GradientSource)
    if gradient and variant.source.interleaved:
        return length // 2
    unit = max(lengths_of(variant.window)) if gradient else 1
    return -(-length // unit) * unit


def made_by(variant, x, weights=None):
    """The activation that asks for a variant, and the floats that it quantizes."""
    if isinstance(variant.source, GatedPairSource):
        name = variant.source.activation
        return jax_mx.Gated(name, weights, np.split(x, 2, -1)[1]), wanted(x, name, weights)
    name, turns = variant.source.activation, variant.source.interleaved
    if isinstance(variant.source, GatedSource):
        gated = jax_mx.Gated(name, weights, interleaved=turns)
        asked = gated.of("quantize", x, floats=True) if variant.source.floats else gated
        return asked, wanted(x, name, weights)
    dy = random_bits((x.shape[0] * x.shape[1] // 2,), variant.dtype, seed=9)
    dy = np.where(np.abs(doubles(dy)) < most(variant), dy, 1).astype(x.dtype).reshape(len(x), -1)
    gated = jax_mx.Gated(name, weights, interleaved=turns, gradient=dy)
    wrapped = WithSums(gated) if variant.source.sums else gated
    return wrapped, laid(variant, wanted_gradient(x, dy, name, weights))


def most(variant) -> float:
    """The bound of ups and gradients: no sum may be a NaN, whose bits depend on the device."""
    return 2.0**60 if "sums" in [array.name for array in variant.source.results] else np.inf


def reference_of(variant, floats, **options):
    """XLA's codes and scales of these floats; and the floats, where the variant gives them.

    Their sums, by NumPy, follow.
    """
    results = jax.jit(call(variant, "xla", **options))(floats)
    further = {"sums": sums_of, "floats": lambda x: x}
    return [*results, *(further[array.name](floats) for array in variant.source.results)]


def laid(variant, x):
    """All gates, then all ups, as a variant has them."""
    if not variant.source.interleaved:
        return x
    return np.stack(np.split(x, 2, -1), -1).reshape(x.shape)


def near_the_least() -> tuple[np.ndarray, np.ndarray]:
    """x and weights of swiglu whose products are within a few units of 2^-126."""
    rng = np.random.default_rng(11)
    gates, ups = np.full((4096, 32), 32), np.ldexp(rng.uniform(1, 2, (4096, 1)), -60)
    x = np.concatenate([gates, np.broadcast_to(ups, gates.shape)], -1).astype(jnp.bfloat16)
    weights = (2.0**-126 / (32 * x[:, 32].astype(np.float64))).astype(np.float32)
    return x, (weights.view(np.int32) + rng.integers(-2, 3, 4096).astype(np.int32)).view(np.float32)


def test_products_near_the_least_normal_number():
    """A product of 24 bits below it is 0, also where float32, with fewer bits, would round up."""
    x, weights = near_the_least()
    want = wanted(x, "swiglu", weights)
    exact = 32 * x[:, 32].astype(np.float64) * weights
    raised = exact.astype(np.float32) == 2.0**-126
    for below, least in ((exact < (1 - 2.0**-25) * 2.0**-126, 0), (exact < 2.0**-126, 2.0**-126)):
        rows, raised = raised & below, raised & ~below
        assert 100 < np.sum(rows) < 4000
        assert (want[rows].astype(np.float32) == least).all()
    same(jax.jit(jax_mx.gated)(x, weights=weights), want)


@pytest.mark.gpu
@pytest.mark.parametrize("both", [False, True])
def test_kernels_near_the_least_normal_number(both):
    x, weights = near_the_least()
    make: Any = functools.partial(jax_mx.gated, format="mxfp8_e4m3", both=both, floats=True)
    result = jax.jit(lambda x, w: make(x, weights=w))(x, weights)
    want = wanted(x, "swiglu", weights)
    same(result.floats, want)
    same(result.quantized, (jax_mx.quantize_both if both else jax_mx.quantize)(want))


def check(variant, x, **options):
    """The kernel quantizes the bits that XLA computes on this device and on the CPU."""
    op = call(variant, variant.implementation, **options)
    gated, floats = made_by(variant, x)
    want = jax.block_until_ready(reference_of(variant, floats, **options))
    is_pair = isinstance(variant.source, GatedPairSource)
    x = np.split(x, 2, -1)[0] if is_pair else laid(variant, x)
    poison_memory()
    got = jax.jit(lambda x, gated: op(x, activation=gated))(x, gated)
    same(got, want, f"{x.shape} {options}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_the_float_is_the_same_on_the_gpu(name):
    x = every_gate()
    same_floats(jax.jit(jax_mx.gated, static_argnums=1)(x, name), wanted(x, name))


@pytest.mark.gpu
@pytest.mark.sampled(10, 3)
@pytest.mark.parametrize("variant", HERE, ids=lambda v: v.name)
def test_every_kernel(variant):
    """Every gate; each layout, scaling and entry; lengths off every tile."""
    scalings, layouts = [*Scaling], layouts_of(variant, arch_here() or "")
    form = str(variant.form).removesuffix("_transposed")
    for i, (rows, length) in enumerate(SHAPES[form]):
        length = fitting(variant, length)
        x = random_bits((-(-rows * 2 * length // 32) * 32,), variant.dtype, seed=i)
        x = x[: rows * 2 * length].reshape(rows, 2 * length)
        case = {"scaling": scalings[i % len(scalings)], "scale_layout": layouts[i % len(layouts)]}
        check(variant, x, **case)
    x = every_gate(dtype=variant.dtype)
    # As gates that no infinite one is beside, and no huge up: their own codes show.
    gates, ups = np.split(x, 2, -1)
    ups = np.where(np.isfinite(ups.astype(np.float32)) & (np.abs(ups) < 2), ups, 1).astype(x.dtype)
    gates = np.where(np.isfinite(gates.astype(np.float32)), gates, 1).astype(x.dtype)
    by_size = np.sort(gates.ravel().astype(np.float32)).astype(x.dtype).reshape(gates.shape)
    for floats in (x, np.concatenate([by_size, ups], -1), np.concatenate([by_size.T.reshape(
            gates.shape), ups], -1)):  # fmt: skip
        check(variant, floats)

    with for_any_address():
        for layout in layouts:
            check(variant, x, scale_layout=layout)


@pytest.mark.gpu
def test_weights_on_the_gpu():
    x, rng = every_gate(), np.random.default_rng(0)
    x = np.where(np.isfinite(x.astype(np.float32)), x, 1).astype(x.dtype)
    weights = rng.normal(size=len(x)).astype(np.float32)
    for op in (jax_mx.quantize, jax_mx.quantize_both):
        want = op(wanted(x, "swiglu", weights))
        same(
            jax.jit(lambda x, w, op=op: op(x, activation=jax_mx.Gated(weights=w)))(x, weights), want
        )
    # A weight that is NaN makes none of what is beside x: lengths off every vector.
    x, weights = np.concatenate([x[:160, :77], x[:160, 128:205]], -1), weights[:160]
    weights[3] = np.nan
    options = {"axis": -2, "transpose": True, "scale_layout": "blocked_128x4"}
    want = jax_mx.quantize(wanted(x, "swiglu", weights), implementation="xla", **options)
    run = jax.jit(lambda x, w: jax_mx.quantize(x, activation=jax_mx.Gated(weights=w), **options))
    same(run(x, weights), want)


@pytest.mark.gpu
def test_gradients_by_weights_on_the_gpu():
    x, rng = every_gate(), np.random.default_rng(0)
    x = np.where(np.isfinite(x.astype(np.float32)), x, 1).astype(x.dtype)
    dy, weights = (rng.normal(size=s).astype(t) for s, t in (((512, 128), x.dtype), (512, "f4")))
    want = jax_mx.quantize_both(wanted_gradient(x, dy, "swiglu", weights))
    gated = jax_mx.Gated(weights=weights, gradient=dy)
    same(jax.jit(lambda x, gated: jax_mx.quantize_both(x, activation=gated))(x, gated), want)


@pytest.mark.gpu
def test_past_two_to_the_31():
    """Gates and ups have more elements than an int32 counts; the last rows are compared."""
    rows, cols = (1 << 31) // 8192 + 192, 8192

    @jax.jit
    def make():
        row = jax.lax.broadcasted_iota(jnp.uint32, (rows, 2 * cols), 0)
        col = jax.lax.broadcasted_iota(jnp.uint32, (rows, 2 * cols), 1)
        return ((row * 7 + col * 13) % 256).astype(jnp.bfloat16) / 32 - 4

    x = make()
    last, second = jax.jit(lambda x: jax_mx.quantize_both(x, activation=jax_mx.Gated()))(x)
    part = x[-4096:]
    want = jax_mx.quantize_both(wanted(np.asarray(part)), implementation="xla")
    assert_bits_equal(last.values[-4096:], want[0].values)
    assert_bits_equal(last.scales[-4096:], want[0].scales)
    assert_bits_equal(second.values[:, -4096:], want[1].values)
    assert_bits_equal(second.scales[:, -128:], want[1].scales)


def test_inputs_of_other_kinds():
    """Ups of other rows, dtypes and byte orders, and nothing at all, beside an activation."""
    x, up = np.ones((96, 64), np.float32), np.ones((40, 64), np.float32)
    rows = jnp.arange(32, dtype=jnp.int32)
    call = functools.partial(jax_mx.quantize, rows=rows)
    assert_refused(
        lambda: call(x, activation=jax_mx.Gated(up=up)),
        ValueError,
        "must have one dtype and one shape",
    )
    assert_refused(lambda: call(x, activation=jax_mx.Gated(up="up")), TypeError, "must be an array")
    for options in ({}, {"rows": rows}):
        wide = x.astype(np.float64)
        quantize = functools.partial(jax_mx.quantize, activation=jax_mx.Gated(), **options)
        assert_refused(lambda: quantize(wide), TypeError, "x is float64")  # noqa: B023
        assert_same_array(quantize(x.astype(">f4")), quantize(x))
    assert jax_mx.quantize(jnp.ones((64, 0)), activation=jax_mx.Gated()).shape == (64, 0)
    for axis in (-1, -2):
        assert jax_mx.quantize(jnp.ones((64, 0)), rows=rows, axis=axis).shape == (32, 0)
