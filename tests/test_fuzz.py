"""Random calls against an oracle that knows the definition of the bytes and not the library.

Short by default; `--thorough` draws many more cases, and cases of AMD's kernels in the emulator.
Each case names a seed, from which `oracle.hard_floats` makes its floats.
"""

import contextlib
import dataclasses
import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from fuzz_calls import FLOATS, SCALE_LAYOUTS, Case, bytes_in, forget_some
from helpers import GOLDEN, GOLDEN_SETS, assert_bits_equal
from hypothesis import event, example, given, note, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx
from jax_mx.formats import layouts
from jax_mx.formats.formats import FORMATS, SCALE_DTYPE
from jax_mx.launch import private
from jax_mx.quantizing.facts.activations import ACTIVATIONS
from jax_mx.testing import emulate

pytestmark = pytest.mark.optimized

THOROUGH = settings.default.max_examples > 100  # see conftest


def examples(share: float):
    """A share of the profile's number of cases."""
    return settings(max_examples=max(int(settings.default.max_examples * share), 1))


@pytest.fixture(autouse=True, scope="module")
def forget():
    """Removes the programs of random calls: each is compiled once and never called again."""
    for arch in EMULATED:  # tinygrad raises Python's limit of recursion when it is imported
        with emulate(arch):
            jax_mx.quantize(jnp.ones((32, 64)))
    yield
    jax.clear_caches()


def assert_is(q, want, label: str = "") -> None:
    """An MXArray has these bytes."""
    for name, got, expected in zip(("values", "scales"), bytes_in(q), want, strict=True):
        assert_bits_equal(got, expected, f"{label}{name}")


# ---- the oracle itself ---
@pytest.mark.parametrize("name", GOLDEN_SETS)
def test_the_oracle_gives_golden_bytes(name):
    """But where torchao makes a NaN of a finite block, and which NaN it takes."""
    with np.load(GOLDEN / "quantize.npz") as golden:
        x = golden[f"input/{name}"].view(np.float32)
        for format, scaling in itertools.product(oracle.FORMATS, oracle.SCALINGS):
            want = {k: golden[f"{format}/{scaling}/{name}/{k}"] for k in ("values", "scales")}
            values, scales = oracle.quantize(x, oracle.Call(format, scaling=scaling))
            differ = scales != want["scales"]
            assert scaling == "even" or not differ.any(), (format, scaling)
            assert (want["scales"][differ] == 255).all(), (format, scaling)
            per = values.shape[-1] // scales.shape[-1]
            same = np.repeat(want["scales"] != 255, per, -1)
            assert (values == want["values"])[same].all(), (format, scaling)


def test_the_oracle_agrees_with_arithmetic():
    """Scales from logarithms of exact numbers; a value that rounds to itself."""
    rng = np.random.default_rng(0)
    amax = np.ldexp(rng.uniform(1, 2, 4000), rng.integers(-100, 120, 4000)).astype(np.float32)
    amax[:300] = np.ldexp(1.0, np.arange(-150, 150) // 2).astype(np.float32)
    b = amax.view(np.uint32).astype(np.int64)
    for name, format in oracle.FORMATS.items():
        largest = format.table[-1]
        fits = np.ceil(np.log2(amax.astype(np.float64) / largest))  # the least that saturates none
        fits += np.ldexp(largest, fits.astype(int)) < amax
        fits -= np.ldexp(largest, fits.astype(int) - 1) >= amax
        got = oracle.scale_of(b, format, "rceil")
        assert (got == np.clip(fits + 127, 0, 254)).all(), name
        floor = np.floor(np.log2(amax.astype(np.float64))) - format.emax
        assert (oracle.scale_of(b, format, "floor") == np.clip(floor + 127, 0, 254)).all(), name
        table = format.table
        assert (oracle.nearest(table, table) == np.arange(len(table))).all()
        assert (oracle.nearest(table + 1e-9, table) == np.arange(len(table))).all()


# ---- what is called ---
WAYS = ("eager", "jit", "vmap", "vmap keys", "auto", "explicit", "shard_map")
EMULATED = ("gfx942", "gfx950") if THOROUGH else ()
LENGTHS = st.sampled_from((32, 64, 64, 96, 128, 160, 288))
OTHERS = st.sampled_from((1, 1, 2, 3, 5, 8, 16, 17, 32, 33, 130))


@st.composite
def shapes(draw, along: tuple[int, ...], most: int = 20_000) -> tuple[int, ...]:
    """Shapes of rank 1 to 6, of whole blocks along these axes; one in twenty not, one empty."""
    rank = draw(st.integers(max(-min(along), 1), 6))
    shape, left = [0] * rank, most
    for d in sorted(range(-rank, 0), key=lambda d: d not in along):
        n = draw(LENGTHS if d in along else OTHERS)
        shape[d] = n if n <= left else 1 if d not in along else 32
        left //= max(shape[d], 1)
    change = draw(st.integers(0, 19))
    if change == 1:
        shape[draw(st.sampled_from(along))] += draw(st.integers(1, 31))
    elif change == 2:
        shape[draw(st.integers(0, rank - 1))] = 0
    return tuple(shape)


@st.composite
def calls(draw) -> oracle.Call:
    """Mostly calls that are served: options that exclude each other come rarely together."""
    square = draw(st.integers(0, 5)) == 5
    plain = square and draw(st.integers(0, 9)) > 0
    axis = -1 if plain else draw(st.sampled_from((-1, -1, -2, -2, -3, -4)))
    transpose = draw(st.booleans())
    last = square or transpose or axis == -1
    size = 0 if plain else draw(st.sampled_from((0, 0, 0, 16, 32, 64)))
    signs = size and draw(st.booleans())
    negative = draw(st.integers(0, 2**size - 1)) if signs else None
    windows = (32, (128, 128)) if square else (32, 32, 128, 256, "row")
    return oracle.Call(
        format=draw(st.sampled_from([*oracle.FORMATS])),
        axis=axis,
        scaling=draw(st.sampled_from(oracle.SCALINGS)),
        scale_layout="row_major" if plain else draw(st.sampled_from(SCALE_LAYOUTS)),
        transpose=transpose,
        square=square,
        zero_scale=draw(st.sampled_from((0, 0, 127))),
        value_layout="shuffled_16x16" if last and draw(st.integers(0, 4)) == 4 else "row_major",
        hadamard=size,
        negative=None if negative is None else np.array([negative >> i & 1 for i in range(size)]),
        prescale=draw(st.sampled_from((None, 0.75))),
        window=draw(st.sampled_from(windows)),
    )


@st.composite
def cases(draw) -> Case:
    """Any call, in any way, of an array that it takes or hardly takes."""
    call = draw(calls())
    way = draw(st.sampled_from(WAYS + EMULATED))
    stochastic = way == "vmap keys" or draw(st.integers(0, 2)) == 2
    call = call if stochastic else dataclasses.replace(call, prescale=None)
    along = (-2, -1) if call.square else (call.axis,)
    shape = draw(shapes(along, 4096 if way in EMULATED else 20_000))
    if call.value_layout != "row_major" and len(shape) > 1 and draw(st.integers(0, 9)) > 0:
        rows = -2 if call.axis == -1 else -1  # beside the blocks
        shape = tuple(
            max(n // 32 * 32, 32) if d == rows else max(n // 64 * 64, 64) if d in along else n
            for d, n in zip(range(-len(shape), 0), shape, strict=True)
        )
    spec = ()
    if way in ("auto", "explicit", "shard_map"):
        spec = draw(specs(shape))
    return Case(
        call,
        shape,
        draw(st.sampled_from(FLOATS)),
        draw(st.integers(0, 2**32 - 1)),
        draw(st.integers(0, 2**31 - 1)) if stochastic else None,
        way,
        spec,
        len(shape) == 2 and draw(st.booleans()),
    )


MESH = {"a": 2, "b": 4}


@st.composite
def specs(draw, shape) -> tuple[str | None, ...]:
    """By which mesh axes dimensions are split that these divide; sharded more often than not."""
    names, spec = draw(st.permutations([*MESH])), []
    for n in shape:
        takes = names and n and n % MESH[names[-1]] == 0 and draw(st.integers(0, 3)) > 0
        spec.append(names.pop() if takes else None)
    return tuple(spec)


def shard(case: Case) -> tuple[int, ...]:
    """Its shape."""
    return tuple(n // MESH.get(name, 1) for n, name in zip(case.shape, case.spec, strict=True))


def splits_blocks(case: Case) -> bool:
    """Whether a shard's length along the blocks is not whole, in blocks, transforms or windows."""
    along = (-2, -1) if case.call.square else (case.call.axis,)
    unit = max(32, case.call.hadamard)
    window = {"row": 32, (128, 128): 128}.get(case.call.window, case.call.window)
    return any(
        shard(case)[d] % (unit if shard(case)[d] == case.shape[d] else math.lcm(unit, window))
        for d in along
    )


def mesh(axis_type: AxisType):
    return jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=(axis_type,) * len(MESH))


def key_of(case: Case):
    return None if case.key is None else jax.random.key(case.key)


# ---- the ways ---
def called(case: Case, x):
    """The result, and what the oracle has to give for it."""
    return {
        "vmap": mapped,
        "vmap keys": mapped_with_keys,
        "shard_map": in_shards,
    }.get(case.way, at_once)(case, x)


def at_once(case: Case, x):
    """The whole array at once, wherever it lies."""
    key, more = key_of(case), {}
    if case.picks:
        x, source, more["rows"] = picked(case, x)
    want = case.wanted(x, key)
    run = case.run if case.way == "eager" else jax.jit(case.run)
    x = source if case.picks else x
    if case.way in ("auto", "explicit"):
        axis_type = AxisType.Auto if case.way == "auto" else AxisType.Explicit
        x = jax.device_put(x, NamedSharding(mesh(axis_type), PartitionSpec(*case.spec)))
        return run(x, key, **more), want
    if case.way in EMULATED:
        with emulate(case.way):
            return run(jnp.asarray(x), key, **more), want
    return run(jnp.asarray(x), key, **more), want


def picked(case: Case, x):
    """x with some rows of zeros; a matrix with its rows in another order; and their numbers."""
    rng, count = np.random.default_rng(case.seed), len(x)
    none, order = rng.random(count) < 0.1, rng.permutation(count)
    source, rows = x[order], np.argsort(order).astype(np.int32)
    rows[none] = rng.choice([-1, count, -count - 1, 2**31 - 1], none.sum())
    return np.where(none[:, None], x.dtype.type(0), x), source, rows


def mapped(case: Case, x):
    """Several arrays, one key: the same bits for each."""
    xs = np.stack([x, *(case_of.floats() for case_of in siblings(case))])
    key = key_of(case)
    want = [case.wanted(x, key) for x in xs]
    return jax.vmap(lambda x: case.run(x, key))(jnp.asarray(xs)), stacked(want)


def mapped_with_keys(case: Case, x):
    """Several arrays, a key for each; mapped along the last axis for odd seeds."""
    xs = np.stack([x, *(case_of.floats() for case_of in siblings(case))])
    keys = jax.random.split(key_of(case), len(xs))
    want = [case.wanted(x, key) for x, key in zip(xs, keys, strict=True)]
    at = -1 if case.seed % 2 else 0
    run = jax.jit(jax.vmap(case.run, in_axes=(at, 0)))
    return run(jnp.asarray(np.moveaxis(xs, 0, at)), keys), stacked(want)


def siblings(case: Case):
    return [dataclasses.replace(case, seed=case.seed ^ 1 + i) for i in range(2)]


def stacked(results):
    return tuple(np.stack(parts) for parts in zip(*results, strict=True))


def in_shards(case: Case, x):
    """An op sees a shard and nothing else: each shard by itself gives the same bytes."""
    local = dataclasses.replace(case, shape=shard(case))
    spec, key = PartitionSpec(*case.spec), key_of(case)
    devices = mesh(AxisType.Auto)

    def run(x):
        q = case.run(x, key)
        return tuple(leaf[None, None] for leaf in (q.values, q.scales))

    gathered = PartitionSpec(*MESH)
    got = jax.jit(jax.shard_map(run, mesh=devices, in_specs=spec, out_specs=(gathered, gathered)))(
        jnp.asarray(x)
    )
    got = tuple(np.asarray(leaf).view(np.uint8) for leaf in got)
    want = []
    for position in itertools.product(*map(range, MESH.values())):
        at = dict(zip(MESH, position, strict=True))
        here = tuple(
            slice(at[name] * n, (at[name] + 1) * n) if name else slice(None)
            for name, n in zip(case.spec, local.shape, strict=True)
        )
        want.append(case.wanted(x[here], key))
    want = tuple(a.reshape(*MESH.values(), *a.shape[1:]) for a in stacked(want))
    return got, want


# ---- quantize ---
@examples(1.25)
@given(cases())
@example(  # XLA brings halves of a split transform together by a sum: -0 became 0
    Case(
        oracle.Call(scaling="floor", hadamard=16),
        (17, 32),
        "bfloat16",
        0,
        None,
        "auto",
        (None, "b"),
    )
)
def test_quantize(case):
    """Any call gives the oracle's bytes, or is refused by one sentence if it has to be."""
    forget_some()
    event(case.way)
    error = case.refusal()
    if error is None and case.way == "explicit" and splits_blocks(case):
        error = private.ShardingTypeError
    if error is None and case.way == "shard_map":
        error = dataclasses.replace(case, shape=shard(case)).refusal()
    x = case.floats() if error is None else np.zeros(case.shape, np.float32)
    if error is not None:
        event("refused")
        way = case.way if case.way in ("explicit", "shard_map") else "eager"
        other_way = dataclasses.replace(case, way=way)
        with pytest.raises(error) as caught:
            refused(other_way, x)
        assert "\n" not in str(caught.value) and len(str(caught.value)) > 20
        return
    got, want = called(case, x)
    note(f"{case}")
    if isinstance(got, tuple):
        for name, a, b in zip(("values", "scales"), got, want, strict=True):
            assert_bits_equal(a, b, f"{case} {name}")
    else:
        assert_is(got, want, f"{case} ")


def refused(case: Case, x):
    """The call, whose result nobody has."""
    if case.way == "shard_map":
        spec = PartitionSpec(*case.spec)
        jax.shard_map(
            lambda x: case.run(x, key_of(case)).scales[None],
            mesh=mesh(AxisType.Auto),
            in_specs=spec,
            out_specs=PartitionSpec(tuple(MESH)),
        )(jnp.asarray(x))
    elif case.way == "explicit":
        sharding = NamedSharding(mesh(AxisType.Explicit), PartitionSpec(*case.spec))
        case.run(jax.device_put(x, sharding), key_of(case))
    else:
        case.run(jnp.asarray(x), key_of(case))


@pytest.mark.parametrize("scaling", oracle.SCALINGS)
@pytest.mark.parametrize("format", oracle.FORMATS)
@examples(0.03)
@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(FLOATS))
def test_many_blocks(format, scaling, seed, dtype):
    """Few programs, 16,384 blocks each time."""
    x = oracle.hard_floats(seed, (512, 1024), -1, dtype)
    want = oracle.quantize(x, oracle.Call(format, scaling=scaling))
    assert_is(jax_mx.quantize(jnp.asarray(x), format, scaling=scaling), want)


# ---- other ops on floats ---
@examples(0.45)
@given(st.data())
def test_quantize_both(data):
    """Two calls of quantize in one; a key for both is split."""
    forget_some()
    first = dataclasses.replace(data.draw(calls()), axis=-1, transpose=False, square=False)
    if first.window == (128, 128):
        first = dataclasses.replace(first, window=256)
    turn = data.draw(st.booleans())
    second = dataclasses.replace(
        first, axis=-2, transpose=turn, format=data.draw(st.sampled_from([*oracle.FORMATS]))
    )
    if not turn:
        second = dataclasses.replace(second, value_layout="row_major")
    shape = data.draw(shapes((-2, -1)))
    seed, dtype = data.draw(st.integers(0, 2**32 - 1)), data.draw(st.sampled_from(FLOATS))
    key = data.draw(st.one_of(st.none(), st.integers(0, 2**31 - 1)))
    if key is None:
        first, second = (dataclasses.replace(call, prescale=None) for call in (first, second))
    pair = [Case(call, shape, dtype, seed, key) for call in (first, second)]
    x = oracle.hard_floats(seed, shape, -1, dtype)
    options = {}
    if first.hadamard:
        signs = None if first.negative is None else np.where(first.negative, -1, 1)
        options["hadamard"] = jax_mx.Hadamard(first.hadamard, signs)
    if key is not None:
        options["rounding"] = jax_mx.Stochastic(jax.random.key(key), first.prescale)

    def run(x):
        return jax_mx.quantize_both(
            x,
            formats=(first.format, second.format),
            scaling=first.scaling,
            scale_layout=first.scale_layout,
            transpose=(False, turn),
            zero_scale=first.zero_scale,
            window=first.window,
            value_layouts=(first.value_layout, second.value_layout),
            **options,
        )

    if any(case.refusal() for case in pair):
        with pytest.raises(ValueError):
            run(jnp.asarray(x))
        return
    keys = (None, None) if key is None else jax.random.split(jax.random.key(key))
    for q, case, case_key in zip(run(jnp.asarray(x)), pair, keys, strict=True):
        assert_is(q, case.wanted(x, case_key), f"axis {case.call.axis} ")


@examples(0.2)
@given(st.data())
def test_what_is_made_and_its_codes(data):
    """The floats of an activation or a norm, given or not, and the oracle's bytes of them."""
    forget_some()
    call = data.draw(calls())
    key = data.draw(st.one_of(st.none(), st.integers(0, 2**31 - 1)))
    call = call if key is not None else dataclasses.replace(call, prescale=None)
    shape = data.draw(shapes((-2, -1) if call.square else (call.axis,), 4096))
    seed, dtype = data.draw(st.integers(0, 2**32 - 1)), data.draw(st.sampled_from(FLOATS))
    case = Case(call, shape, dtype, seed, key)
    if case.refusal() or 0 in shape:
        return
    wide = oracle.hard_floats(seed, (*shape[:-1], 2 * shape[-1]), -1, dtype)
    x, other = wide[..., : shape[-1]], wide[..., shape[-1] :]
    rng, some = np.random.default_rng(seed), data.draw(st.booleans())
    if data.draw(st.booleans()):
        weights = rng.normal(size=shape[-1:]).astype(dtype) if some else None
        residual = other if data.draw(st.booleans()) else None
        operands = {"x": x, "weight": weights, "residual": residual}
        plain = partial(jax_mx.rms_norm, eps=data.draw(st.sampled_from((0.0, 1e-5))))
        floats_of = lambda activated: activated.floats  # noqa: E731
    else:
        operands = {"gate_up": wide, "weights": None, "up": None}
        operands["weights"] = rng.normal(size=shape[:-1]).astype(np.float32) if some else None
        name, turns = data.draw(st.sampled_from((*ACTIVATIONS,))), False
        if data.draw(st.booleans()) or not ACTIVATIONS[name].has_gate:
            operands["gate_up"] = x
            operands["up"] = other if ACTIVATIONS[name].has_gate else None
        else:
            turns = data.draw(st.booleans())
        plain = partial(jax_mx.gated, activation=name, interleaved=turns)
        floats_of = lambda activated: activated  # noqa: E731
    y = np.asarray(floats_of(jax.jit(lambda arguments: plain(**arguments))(operands)))
    floats = data.draw(st.sampled_from((None, False, True)))
    way = data.draw(st.sampled_from(("eager", "jit", *EMULATED)))
    run = lambda operands: plain(**operands, **case.keywords(key_of(case)), floats=floats)  # noqa: E731
    with emulate(way) if way in EMULATED else contextlib.nullcontext():
        activated = jax.block_until_ready((run if way == "eager" else jax.jit(run))(operands))
    assert (activated.floats is None) == (not floats)
    if floats:
        one_nan = [np.where(np.isnan(a), np.nan, a) for a in (np.asarray(activated.floats), y)]
        assert_bits_equal(*one_nan)
    assert_is(activated.quantized, case.wanted(y, key_of(case)))


@examples(0.5)
@given(st.data())
def test_fake_quantize(data):
    """The floats of quantize and dequantize; a derivative of 1, or of 0 where x saturates."""
    forget_some()
    call = data.draw(calls())
    call = dataclasses.replace(
        call, scale_layout="row_major", value_layout="row_major", transpose=False, hadamard=0
    )
    call = dataclasses.replace(call, zero_scale=0, prescale=None)
    shape = data.draw(shapes((-2, -1) if call.square else (call.axis,)))
    case = Case(call, shape, data.draw(st.sampled_from(FLOATS)), data.draw(st.integers(0, 2**32)))
    if case.refusal():
        return
    x, clip = case.floats(), data.draw(st.booleans())
    block = (32, 32) if call.square else 32
    y, back = jax.vjp(
        lambda x: jax_mx.fake_quantize(
            x,
            call.format,
            axis=call.axis,
            scaling=call.scaling,
            block=block,
            clip=clip,
            window=call.window,
        ),
        jnp.asarray(x),
    )
    values, scales = oracle.quantize(x, call)
    want = oracle.dequantize(values, scales, shape, call, case.dtype)
    assert_bits_equal(np.asarray(y).view(want.dtype), want)

    (got,) = back(jnp.ones_like(y))
    format = oracle.FORMATS[call.format]
    scale = np.repeat(scales, 32, -1 if call.square else call.axis).astype(np.int64)
    scale = np.repeat(scale, 32, -2) if call.square else scale
    with np.errstate(all="ignore"):
        over = np.abs(x.astype(np.float64)) > np.ldexp(format.table[-1], scale - 127)
    over = over & (scale != 255) & clip
    assert (np.asarray(got).astype(np.float64) == np.where(over, 0, 1)).all()


@examples(0.2)
@given(st.data())
def test_hadamard(data):
    """The transform by itself: all bits of numbers."""
    forget_some()
    size, axis = data.draw(st.sampled_from((16, 32, 64))), data.draw(st.sampled_from((-1, -2, -3)))
    dtype, seed = data.draw(st.sampled_from(FLOATS)), data.draw(st.integers(0, 2**32))
    shape = list(data.draw(shapes((axis,))))
    shape[axis] = shape[axis] // 32 * 2 * size
    negative = data.draw(st.one_of(st.none(), st.integers(0, 2**size - 1)))
    if negative is not None:
        negative = np.array([negative >> i & 1 for i in range(size)])
    signs = None if negative is None else np.where(negative, -1, 1)
    x = oracle.hard_floats(seed, tuple(shape), axis, dtype)
    run = jax.jit(partial(jax_mx.hadamard, size=size, axis=axis))
    got = np.asarray(run(jnp.asarray(x), signs=signs))
    want = np.moveaxis(oracle.hadamard(np.moveaxis(x, axis, -1), size, negative), -1, axis)
    assert (np.isnan(got) == np.isnan(want)).all()
    assert_bits_equal(np.where(np.isnan(want), 0, got), np.where(np.isnan(want), 0, want))


# ---- dequantize ---
@dataclasses.dataclass(frozen=True)
class Quantized:
    """An array of any codes and scales, and how it becomes floats."""

    call: oracle.Call  # of quantize, whose result it could be; never transposed
    shape: tuple[int, ...]
    seed: int
    dtype: str
    transpose: bool
    way: str

    def bytes(self) -> tuple[np.ndarray, np.ndarray]:
        """(values, scales): any, also where a tile is padded."""
        rng, format = np.random.default_rng(self.seed), oracle.FORMATS[self.call.format]
        axis = -1 if self.call.square else self.call.axis
        order = np.moveaxis(np.empty(self.shape, np.bool_), axis, -1).shape
        grid = [*order[:-1], order[-1] // 32]
        if self.call.square:
            grid[-2] //= 32
        codes = np.zeros(order, np.uint8)
        values, scales = oracle.placed(codes, np.zeros(grid, np.uint8), self.call)
        most = 1 << (6 if format.width == 6 else 8)
        values = rng.integers(0, most, values.shape, np.uint8)
        usual = rng.integers(100, 150, scales.shape, np.uint8)
        any_byte = rng.choice(np.r_[0:8, 8:255:9, 246:256].astype(np.uint8), scales.shape)
        return values, np.where(rng.random(scales.shape) < 0.5, usual, any_byte)


@st.composite
def quantized(draw) -> Quantized:
    """Draws calls that quantize takes."""
    call = dataclasses.replace(
        draw(calls()), transpose=False, zero_scale=0, hadamard=0, prescale=None, scaling="floor"
    )
    along = (-2, -1) if call.square else (call.axis,)
    shape = draw(shapes(along))
    if call.value_layout != "row_major":
        shape = (*shape[:-2], 48, 128) if not call.square else (*shape[:-2], 64, 128)
    way = draw(st.sampled_from(("eager", "jit", "vmap", *EMULATED)))
    transpose = len(shape) > 1 and draw(st.booleans())
    dtype, seed = draw(st.sampled_from(FLOATS)), draw(st.integers(0, 2**32 - 1))
    return Quantized(call, shape, seed, dtype, transpose, way)


def as_array(call: oracle.Call, values: np.ndarray, scales: np.ndarray) -> jax_mx.MXArray:
    """An MXArray of these bytes, as a library that reads checkpoints would make it."""
    format = FORMATS[call.format]
    return jax_mx.MXArray(
        jnp.asarray(values.view(format.storage)),
        jnp.asarray(scales.view(SCALE_DTYPE)),
        format,
        -1 if call.square else call.axis,
        layouts.SCALE_LAYOUTS[call.scale_layout],
        (32, 32) if call.square else (32,),
        layouts.VALUE_LAYOUTS[call.value_layout],
    )


@examples(0.6)
@given(quantized())
def test_dequantize(case):
    """Any bytes become the oracle's floats."""
    forget_some()
    if Case(case.call, case.shape, "float32", 0).refusal():
        return
    values, scales = case.bytes()
    want = oracle.dequantize(values, scales, case.shape, case.call, case.dtype)
    if case.way == "vmap":
        values, scales, want = (np.stack([a, a[::-1]]) for a in (values, scales, want))
        other = dataclasses.replace(case, seed=case.seed ^ 1).bytes()
        values[1], scales[1] = other
        want[1] = oracle.dequantize(*other, case.shape, case.call, case.dtype)
    if case.transpose:
        want = np.swapaxes(want, -1, -2)

    def run(q):
        return q.dequantize(case.dtype, transpose=case.transpose)

    run = {"jit": jax.jit(run), "vmap": jax.vmap(run)}.get(case.way, run)
    with emulate(case.way) if case.way in EMULATED else contextlib.nullcontext():
        got = np.asarray(run(as_array(case.call, values, scales)))
    assert got.dtype == case.dtype
    assert_bits_equal(got.view(want.dtype), want, f"{case}")


@examples(0.1)
@given(st.integers(0, 2**32), st.lists(st.integers(0, 9), max_size=3), st.integers(0, 40))
def test_packed_mxfp6(seed, leading, quarter):
    """Four codes in three bytes, first bits first."""
    codes = np.random.default_rng(seed).integers(0, 64, (*leading, 4 * quarter), np.uint8)
    bits = np.unpackbits(codes[..., None], axis=-1, count=6, bitorder="little")
    want = np.packbits(bits.reshape(*leading, 24 * quarter), axis=-1, bitorder="little")
    packed = jax.jit(jax_mx.pack_mxfp6)(jnp.asarray(codes))
    assert_bits_equal(np.asarray(packed), want)
    assert_bits_equal(np.asarray(jax.jit(jax_mx.unpack_mxfp6)(packed)), codes)
