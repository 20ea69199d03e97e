"""Gated activations: the float that is quantized, its derivative, the kernels that compute it."""

import copy
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import arch_here
from helpers import (
    assert_bits_equal,
    assert_refused,
    assert_same_array,
    call,
    call_attributes_in,
    poison_memory,
    random_bits,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx
from jax_mx.facts.activations import ACTIVATIONS, CELL
from jax_mx.facts.chips import ARCHS
from jax_mx.facts.formats import Scaling
from jax_mx.facts.variants import VARIANTS, layouts_of
from jax_mx.lowering import store

P = PartitionSpec
NAMES = [*ACTIVATIONS]
ACTIVE = [v for v in VARIANTS if v.source in ACTIVATIONS]
EVERY = np.arange(1 << 16, dtype=np.uint16).view(jnp.bfloat16)  # every bfloat16


def doubles(x: np.ndarray) -> np.ndarray:
    """In float64; NumPy warns of NaNs."""
    with np.errstate(invalid="ignore"):
        return x.astype(np.float64)


def exact(gate: np.ndarray, name: str) -> np.ndarray:
    """The part of a gate, in more than float64 where the machine has it."""
    assert name == "swiglu"
    gate = gate.astype(np.longdouble)
    small = np.exp(-np.abs(gate))
    return gate * np.where(gate < 0, small, 1) / (1 + small)


@functools.cache
def parts(name: str) -> np.ndarray:
    """For every bfloat16 gate the part as it is defined: rounded, without subnormals."""
    gate = doubles(EVERY)
    with np.errstate(all="ignore"):
        found = np.where(np.isfinite(gate), exact(np.where(np.isfinite(gate), gate, 0), name), gate)
        found = np.where(gate == -np.inf, np.nan, found)
    size, finite = np.abs(found).astype(np.float64), np.isfinite(found)
    fraction, exponent = np.frexp(np.where(finite, size, 1))
    units = (2 * fraction - 1) * 2**23
    kept = np.floor((units + ACTIVATIONS[name].up) / CELL) * CELL
    rounded = np.ldexp(1 + kept / 2**23, exponent - 1)
    rounded = np.where(size < 2.0**-126, 0, rounded)
    signed = np.copysign(np.where(finite, rounded, size), doubles(EVERY))
    return np.where(np.isnan(found), np.nan, signed).astype(np.float32)


def wanted(gate_up, name="swiglu", weights=None) -> np.ndarray:
    """`gated` of bfloat16, by table and in float64, where products are exact or nearly."""
    gate, up = np.split(np.asarray(gate_up), 2, axis=-1)
    with np.errstate(all="ignore"):
        y = parts(name)[gate.view(np.uint16)] * settled(up.astype(np.float32))
        y = settled(y)
        if weights is not None:
            y = settled(y * settled(np.asarray(weights))[..., None])
        return y.astype(jnp.bfloat16)


def settled(x: np.ndarray) -> np.ndarray:
    """With zeros for subnormals."""
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x).astype(np.float32)


def same_floats(got, want, what="") -> None:
    """Bits, but for which NaN."""
    got, want = np.asarray(got), np.asarray(want)
    nan = np.isnan(want.astype(np.float32))
    assert (np.isnan(got.astype(np.float32)) == nan).all(), what
    assert_bits_equal(np.where(nan, 0, got).astype(got.dtype), np.where(nan, 0, want).astype(
        want.dtype), what)  # fmt: skip


def same(got, want, what="") -> None:
    got, want = ([*r] if isinstance(r, tuple | list) else [r] for r in (got, want))
    for g, w in zip(got, want, strict=True):
        assert_same_array(g, w, what)


def every_gate(length: int = 128) -> np.ndarray:
    """(512, 2 length): every bfloat16 as a gate, ups of any size, and 1 beside one in four."""
    gates = np.random.default_rng(1).permutation(EVERY)[: 512 * length]
    ups = random_bits((gates.size,), "bfloat16", seed=3)
    ups[::4] = 1
    return np.concatenate([g.reshape(512, length) for g in (gates, ups)], -1)


# ---- the float ---
@pytest.mark.optimized
@pytest.mark.parametrize("name", NAMES)
def test_no_gate_is_near_a_tie(name):
    """Of what is rounded: further than the error of a chip's exponential and of its reciprocal.

    That is 2^-20.5 of the number, and where exp(-|g|) counts, 2^-22.5 |g| more.
    """
    gate = doubles(EVERY)
    gate = gate[np.isfinite(gate)]
    part = np.abs(exact(gate, name))
    some = part >= 2.0**-126
    gate, part = gate[some], part[some].astype(np.float64)
    fraction, _ = np.frexp(part)
    units = (2 * fraction - 1) * 2**23
    away = np.abs((units + ACTIVATIONS[name].up) % CELL)
    away = np.minimum(away, CELL - away)  # in units of 2^-23 of the leading bit
    error = 2.0**-20.5 + 2.0**-22.5 * np.where(gate < 0, np.abs(gate), 0)
    assert (away > error * 2 * fraction * 2**23).all()
    assert abs(ACTIVATIONS[name].up / CELL - 0.5) < 0.02


@pytest.mark.optimized
@pytest.mark.parametrize("name", NAMES)
def test_the_float_is_defined(name):
    """For every gate, by XLA in both of its ways; and so is the product."""
    one = np.stack([EVERY, np.ones_like(EVERY)], -1)
    x, weights = every_gate(), np.random.default_rng(0).normal(size=512).astype(np.float32)
    for run in (jax_mx.gated, jax.jit(jax_mx.gated, static_argnums=1)):
        same_floats(run(one, name)[:, 0], wanted(one, name)[:, 0])
        same_floats(run(x, name), wanted(x, name))
        same_floats(run(x, name, weights=weights), wanted(x, name, weights), "weights")


@pytest.mark.optimized
@pytest.mark.parametrize("name", NAMES)
def test_the_float_is_near_the_exact_number(name):
    """Within 1.02 units in the last place of bfloat16, where that is a normal number."""
    gate, up = doubles(EVERY), doubles(random_bits((1 << 16,), "bfloat16"))
    some = np.isfinite(gate) & np.isfinite(up)
    gate, up = gate[some], up[some]
    with np.errstate(all="ignore"):
        want = (exact(gate, name) * up).astype(np.float64)
    x = np.stack([gate, up], -1).astype(jnp.bfloat16)
    got = doubles(np.asarray(jax_mx.gated(x, name))[:, 0])
    some = (np.abs(want) >= 2.0**-125) & (np.abs(want) < 2.0**127) & (np.abs(exact(gate, name)) >= (
        2.0**-126)) & (np.abs(up) >= 2.0**-126)  # fmt: skip
    assert some.sum() > 20000
    _, exponent = np.frexp(want[some])
    error = np.abs(got - want)[some] / np.ldexp(1.0, exponent - 8)
    assert error.max() < 1.02


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_derivatives(name, dtype):
    """Of gates, ups and weights, against differences in float64."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 3, 64)).astype(dtype)
    w, dy = (rng.normal(size=shape).astype(np.float32) for shape in ((5, 3), (5, 3, 32)))

    def plain(x, w):
        gate, up = np.split(x, 2, -1)
        return (exact(gate, name) * up * w[..., None]).astype(np.float64)

    y, back = jax.vjp(lambda x, w: jax_mx.gated(x, name, weights=w), x, w)
    dx, dw = back(dy.astype(dtype))
    at, weights = x.astype(np.float64), w.astype(np.float64)
    tolerance = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    np.testing.assert_allclose(np.asarray(y).astype(np.float64), plain(at, weights),
                               rtol=tolerance, atol=tolerance)  # fmt: skip
    step, given = 1e-6, dy.astype(dtype).astype(np.float64)
    for place in itertools.product((0, 4), (1,), (0, 13, 31, 32, 45, 63)):
        up, down = at.copy(), at.copy()
        up[place] += step
        down[place] -= step
        want = ((plain(up, weights) - plain(down, weights)) / (2 * step) * given).sum()
        np.testing.assert_allclose(float(dx[place]), want, rtol=tolerance, atol=tolerance)
    want = (plain(at, np.ones_like(weights)) * given).sum(-1)
    np.testing.assert_allclose(np.asarray(dw), want, rtol=1e-2, atol=1e-2)


def test_what_is_refused():
    x = jnp.ones((8, 128), jnp.bfloat16)
    refused = functools.partial(assert_refused, error=ValueError)
    refused(lambda: jax_mx.gated(x, "relu"), sentence="activation must be 'swiglu', got 'relu'")
    refused(lambda: jax_mx.Gated("relu"), sentence="Gated: activation must be 'swiglu'")
    refused(lambda: jax_mx.gated(x[:, :65]), sentence="halves of the last axis, got the shape (8")
    weights = np.ones(7, np.float32)
    refused(
        lambda: jax_mx.quantize(x, activation=jax_mx.Gated(weights=weights)),
        sentence="quantize: weights must be float32[8], one for each row, got float32[7]",
    )
    rows = np.zeros(8, np.int32)
    refused(
        lambda: jax_mx.quantize(x, rows=rows, activation=jax_mx.Gated()),
        sentence="quantize: rows are picked before an activation, not with it",
    )
    refused(
        lambda: jax_mx.quantize(x[:, :96], activation=jax_mx.Gated()),
        sentence="axis -1 has length 48, not a multiple of the block length 32",
    )
    refused = functools.partial(assert_refused, error=TypeError)
    refused(
        lambda: jax_mx.quantize(x, activation="swiglu"), sentence="must be None or a Gated, got"
    )
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


@pytest.mark.optimized
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", CALLS)
def test_it_is_quantizing_what_gated_gives(name, dtype):
    op, how = CALLS[name]
    x = random_bits((96, 320), dtype)
    x = np.where(np.isfinite(x.astype(np.float32)), x, 1).astype(dtype)
    weights = np.random.default_rng(0).normal(size=96).astype(np.float32)
    for own in (jax_mx.Gated(), jax_mx.Gated("swiglu", weights)):
        want = op(jax.jit(jax_mx.gated)(x, weights=own.weights), **how)
        got = jax.jit(lambda x, own: op(x, activation=own, **how))(x, own)
        same(got, want, name)
    got = op(x.reshape(3, 32, 320), activation=jax_mx.Gated(), **how)
    if how.get("scale_layout") is None and "rounding" not in how:
        same(got, op(jax.jit(jax_mx.gated)(x.reshape(3, 32, 320)), **how), "three dimensions")


def test_what_serves_it():
    supported = functools.partial(jax_mx.is_supported, "quantize", activation="swiglu")
    name = "quantize_last_bfloat16_mxfp8_e4m3"
    assert supported("sm_90") == (True, f"cutedsl: {name}_swiglu")
    assert supported("gfx950") == (True, f"flydsl: {name} of floats that XLA makes")
    found, what = supported("sm_90", axis=-2)
    assert found and what.endswith(" of floats that XLA makes")


@pytest.mark.usefixtures("without_code")
def test_one_call():
    """On x as it lies; and in a program that XLA splits, a call of what XLA computes."""
    run = lambda x: jax_mx.quantize_both(x, activation=jax_mx.Gated())  # noqa: E731
    x = jnp.ones((64, 512), jnp.bfloat16)
    text = jax.jit(run).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    operands = "tensor<64x2x8x32xbf16>, tensor<2x32xf32>"
    assert f": ({operands}) -> " in call_attributes_in(text) and "exponential" not in text
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu"))
    like = jax.ShapeDtypeStruct((256, 512), x.dtype, sharding=NamedSharding(mesh, P("a")))
    text = jax.jit(run).trace(like).lower(lowering_platforms=("cuda",)).as_text()
    assert "exponential" in text and "num_batch_dims" in call_attributes_in(text)


@pytest.mark.parametrize("kind", AxisType, ids=str)
def test_shards(kind):
    manual = kind is AxisType.Manual
    kinds = (AxisType.Auto if manual else kind,)
    mesh = jax.make_mesh((4,), ("a",), axis_types=kinds, devices=jax.devices("cpu")[:4])
    x = random_bits((128, 128), "bfloat16")
    run = lambda x: jax_mx.quantize_both(x, activation=jax_mx.Gated())  # noqa: E731
    want = run(x)
    if manual:
        run = jax.shard_map(run, mesh=mesh, in_specs=P("a"), out_specs=(P("a"), P(None, "a")))
        same(jax.jit(run)(x), want)
        return
    with jax.set_mesh(mesh):
        same(jax.jit(run)(jax.device_put(x, NamedSharding(mesh, P("a")))), want)


# ---- kernels ---
HERE = [v for v in ACTIVE if arch_here() is None or arch_here() in ARCHS[v.implementation]]
SHAPES = {
    "last": [(7, 96), (513, 4128), (129, 160), (1, 32)],
    "second": [(32, 1), (160, 257), (96, 7), (544, 72), (64, 1145)],
    "both": [(32, 32), (96, 160), (288, 544), (544, 4128)],
}


def check(variant, x, **how):
    """The kernel quantizes the bits that XLA computes on this device and on the CPU."""
    op, plain = call(variant, variant.implementation, **how), call(variant, "xla", **how)
    weights = how.pop("weights", None)
    own = jax_mx.Gated(variant.source, weights)
    floats = wanted(x, variant.source, weights)
    want = jax.block_until_ready(jax.jit(plain)(floats))
    poison_memory()
    got = jax.jit(lambda x, own: op(x, activation=own))(x, own)
    same(got, want, f"{x.shape} {how}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_the_float_is_the_same_on_the_gpu(name):
    x = every_gate()
    same_floats(jax.jit(jax_mx.gated, static_argnums=1)(x, name), wanted(x, name))


@pytest.mark.gpu
@pytest.mark.sampled(10, 3)
@pytest.mark.parametrize("variant", HERE, ids=lambda v: v.name)
def test_every_kernel(variant, monkeypatch):
    """Every gate; each layout, scaling and entry; lengths off every tile."""
    scalings, layouts = [*Scaling], layouts_of(variant)
    form = str(variant.form).removesuffix("_transposed")
    for i, (rows, length) in enumerate(SHAPES[form]):
        x = random_bits((-(-rows * 2 * length // 32) * 32,), "bfloat16", seed=i)
        x = x[: rows * 2 * length].reshape(rows, 2 * length)
        how = {"scaling": scalings[i % len(scalings)], "scale_layout": layouts[i % len(layouts)]}
        check(variant, x, **how)
    x, get = every_gate(), store.get
    # As gates that no infinite one is beside, and no huge up: their own codes show.
    gates, ups = np.split(x, 2, -1)
    ups = np.where(np.isfinite(ups.astype(np.float32)) & (np.abs(ups) < 2), ups, 1).astype(x.dtype)
    gates = np.where(np.isfinite(gates.astype(np.float32)), gates, 1).astype(x.dtype)
    by_size = np.sort(gates.ravel().astype(np.float32)).astype(x.dtype).reshape(gates.shape)
    for floats in (x, np.concatenate([by_size, ups], -1), np.concatenate([by_size.T.reshape(
            gates.shape), ups], -1)):  # fmt: skip
        check(variant, floats)

    def for_any_address(variant, arch):
        artifact = get(variant, arch)
        facts = copy.deepcopy(artifact.facts)
        for launch in facts["launches"].values():
            del launch["entries"][0]
        return dataclasses.replace(artifact, facts=facts)

    monkeypatch.setattr(store, "get", for_any_address)
    jax.clear_caches()
    for layout in layouts:
        check(variant, x, scale_layout=layout)
    monkeypatch.undo()
    jax.clear_caches()


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
