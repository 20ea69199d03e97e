"""`quantize(x, rows=...)`: the bytes of quantizing x[rows], zeros for numbers that x has not.

The tests compare it with NumPy's gather and the same call without rows. Kernels with rows are
separate variants: the GPU at hand and the emulator execute them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import arch_here
from helpers import (
    assert_bits_equal,
    assert_refused,
    assert_same,
    call,
    call_attributes_in,
    for_any_address,
    in_turn,
    mesh_of,
    poison_memory,
    random_bits,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx
from jax_mx.formats.formats import FORMATS, SCALE_DTYPE, Scaling
from jax_mx.formats.layouts import ROW_MAJOR
from jax_mx.launch import _ffi
from jax_mx.launch.chips import ARCHS
from jax_mx.quantizing import reference
from jax_mx.quantizing.facts.variants import layouts_of
from jax_mx.quantizing.requantize import requantize
from jax_mx.quantizing.sources.codes import CodesSource
from jax_mx.quantizing.sources.rows import RowsSource
from jax_mx.shipping.shipped import SHIPPED

P = PartitionSpec
PICKING = [v for v in SHIPPED if v.source == RowsSource()]
FP4 = "mxfp4_e2m1"


def numbers(count: int, of: int, seed: int = 0) -> np.ndarray:
    """Numbers of rows: some twice, some never, some of no row; the ends of int32 among them."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(-of // 8 - 2, of + of // 8 + 2, count).astype(np.int32)
    rows[: min(count, 4)] = [-1, of, np.iinfo(np.int32).min, np.iinfo(np.int32).max][:count]
    rows[4:6] = [0, of - 1][: max(count - 4, 0)]
    return rows


def floats(variant, count: int, length: int, seed: int = 0) -> np.ndarray:
    """Any bits, as `random_bits` has them."""
    size = -(-count * length // 32) * 32
    bits = random_bits((size,), variant.dtype, seed=seed)
    return bits[: count * length].reshape(count, length)


def gathered(x, rows) -> np.ndarray:
    """The rows that are quantized, by NumPy."""
    x = np.asarray(x)
    there = (rows >= 0) & (rows < len(x))
    result = np.zeros((len(rows), x.shape[1]), x.dtype)
    result[there] = x[rows[there]]
    return result


# ---- what it gives ---
KEY = jax_mx.Stochastic(np.array([0, 7], np.uint32), 0.75)
SIGNS = np.arange(64) % 3 == 0
CALLS = {
    "last": (jax_mx.quantize, {}),
    "last, tiles": (jax_mx.quantize, {"scale_layout": "blocked_128x4"}),
    "second": (jax_mx.quantize, {"axis": -2, "format": "mxfp8_e5m2"}),
    "second transposed": (jax_mx.quantize, {"axis": 0, "transpose": True, "scaling": "even"}),
    "square": (jax_mx.quantize, {"block": (32, 32), "format": "mxfp6_e2m3"}),
    "windows": (jax_mx.quantize, {"window": 128}),
    "windows of rows": (jax_mx.quantize, {"window": "row", "axis": -2}),
    "tiles of windows": (jax_mx.quantize, {"window": (128, 128)}),
    "values in tiles": (jax_mx.quantize, {"value_layout": "shuffled_16x16"}),
    "random": (jax_mx.quantize, {"format": FP4, "rounding": KEY}),
    "rotated": (jax_mx.quantize, {"format": FP4, "hadamard": jax_mx.Hadamard(64, SIGNS)}),
    "rotated by data": (
        jax_mx.quantize,
        {"format": FP4, "axis": -2, "hadamard": jax_mx.Hadamard(32, jnp.asarray(SIGNS[:32]))},
    ),
    "both": (jax_mx.quantize_both, {"transpose": (False, False), "format": FP4, "zero_scale": 127}),
    "both transposed": (jax_mx.quantize_both, {"formats": ("mxfp8_e4m3", "mxfp8_e5m2")}),
    "both, windows": (jax_mx.quantize_both, {"window": 256, "scale_layout": "blocked_128x4"}),
    "both, rounded": (jax_mx.quantize_both, {"format": FP4, "rounding": KEY}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name,dtype", in_turn(CALLS, ["bfloat16", "float32"]))
def test_it_is_quantizing_what_numpy_gathers(name, dtype):
    op, options = CALLS[name]
    x, rows = random_bits((45, 320), dtype), numbers(192, 45)
    assert_same(op(x, rows=rows, **options), op(gathered(x, rows), **options), name)


def test_nothing_of_a_row_reaches_others():
    """A NaN stays in the rows that have its number, wherever these are."""
    x = np.ones((8, 64), np.float32)
    x[3, 5] = np.nan
    rows = np.array([3, 0, 3, -1, 7, 1], np.int32)
    y = np.asarray(jax_mx.quantize(x, rows=rows).dequantize())
    assert np.isnan(y[[0, 2], :32]).all() and np.isfinite(y[1:, 32:]).all()
    assert (y[3] == 0).all() and (y[[1, 4, 5]] == 1).all()


@pytest.mark.parametrize("op", [jax_mx.quantize, jax_mx.quantize_both])
def test_no_rows(op):
    """An x without rows gives zeros; no numbers give nothing."""
    x, rows = random_bits((9, 64), "bfloat16"), numbers(64, 9)
    assert_same(op(x[:0], rows=rows), op(np.zeros((64, 64), x.dtype)))
    assert_same(op(x, rows=rows[:0]), op(x[:0]))


def test_what_is_refused():
    x, rows = jnp.ones((8, 64)), np.arange(32, dtype=np.int32)
    refused = functools.partial(assert_refused, error=TypeError)
    for bad, shown in ((rows.astype(np.int64), "int64[32]"), ([1, 2], "[1, 2]"), (3, "3")):
        sentence = "quantize: rows must be an int32 array of rank 1, the number of a row of x for"
        refused(lambda r=bad: jax_mx.quantize(x, rows=r), sentence=sentence)
        refused(lambda r=bad: jax_mx.quantize_both(x, rows=r), sentence=f"got {shown}; jnp.asarray")
    refused = functools.partial(assert_refused, error=ValueError)
    refused(lambda: jax_mx.quantize(x, rows=rows[None]), sentence="got int32[1, 32]")
    refused(
        lambda: jax_mx.quantize(x[None], rows=rows),
        sentence="rows picks rows of a matrix, x has the shape (1, 8, 64); reshape it to two",
    )
    refused(
        lambda: jax_mx.quantize_both(x, rows=rows[:31]),
        sentence="axis -2 has length 31, not a multiple of the block length 32; pad it to 32",
    )
    refused(
        lambda: jax_mx.is_supported("quantize", "sm_90", rows=True, ndim=3),
        sentence="is_supported: rows, activations and norms are those of a matrix",
    )


# ---- which kernel, and where it runs ---
def test_what_serves_it():
    """A kernel of its own, or one behind XLA's gather; never XLA where quantizing has a kernel."""
    supported = functools.partial(jax_mx.is_supported, "quantize", rows=True)
    name = "quantize_last_bfloat16_mxfp8_e4m3"
    for chip, dsl in (("sm_90", "cutedsl"), ("gfx950", "flydsl")):
        alone = {"cutedsl": "_rows", "flydsl": " of floats that XLA makes"}[dsl]
        assert supported(chip) == (True, f"{dsl}: {name}{alone}")
        assert supported(chip, window="row") == (
            True,
            f"{dsl}: {name}_wrow of floats that XLA makes",
        )
        assert supported(chip, dtype="float32") == (
            True,
            f"{dsl}: quantize_last_float32_mxfp8_e4m3 of floats that XLA makes",
        )
        served, why = supported(chip, format=FP4, axis=-2, dtype="float32", rounding=KEY)
        assert served and why.endswith(" along rows of floats that XLA makes")
        assert not supported(chip, zero_scale=127)[0]


def program(f, *args, platform="cuda") -> str:
    return jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.usefixtures("without_code")
def test_one_call_and_no_gather():
    """One call takes x and the numbers as they lie; its results equal the same floats'."""
    x, rows = jnp.ones((50, 256), jnp.bfloat16), np.zeros(384, np.int32)
    for op, options, operands in (
        (jax_mx.quantize, {}, "tensor<50x8x32xbf16>, tensor<384x1xi32>"),
        (jax_mx.quantize, {"axis": 0}, "tensor<50x256xbf16>, tensor<12x32xi32>"),
        (jax_mx.quantize_both, {}, "tensor<50x8x32xbf16>, tensor<12x32xi32>"),
        (
            jax_mx.quantize_both,
            {"window": 256, "scale_layout": "blocked_128x4"},
            "tensor<50x8x32xbf16>, tensor<12x32xi32>",
        ),
    ):
        text = program(lambda x, r, op=op, options=options: op(x, rows=r, **options), x, rows)
        line = call_attributes_in(text)
        assert f": ({operands}) -> " in line
        results = program(functools.partial(op, **options), jnp.ones((384, 256), x.dtype))
        assert line.rpartition("->")[2] == call_attributes_in(results).rpartition("->")[2]
        assert "gather" not in text and "num_batch_dims" not in line


@pytest.mark.usefixtures("without_code")
def test_where_there_is_no_kernel_xla_gathers_and_a_kernel_quantizes():
    x, rows = jnp.ones((64, 256), jnp.bfloat16), np.zeros(384, np.int32)
    wide = x.astype(jnp.float32)
    for a, options in ((x, {"window": "row"}), (x, {"format": FP4, "rounding": KEY}), (wide, {})):
        options = {"window": 32} | options
        text = program(lambda a, r: jax_mx.quantize(a, rows=r, **options), a, rows)  # noqa: B023
        assert "stablehlo.gather" in text and "_rows" not in text
        assert call_attributes_in(text)
    # vmap over numbers: one call after the other.
    text = program(jax.vmap(lambda r: jax_mx.quantize(x, rows=r)), rows.reshape(2, 192))
    assert "stablehlo.while" in text and "gather" not in text.replace("dynamic_gather", "")


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_shards(axis_type):
    """Right on every mesh, the results split as numbers and columns are."""
    mesh = mesh_of(4, 2, axis_type=axis_type)
    x, rows = random_bits((64, 128), "bfloat16"), numbers(512, 64)
    want = jax_mx.quantize_both(gathered(x, rows))
    for spec, of_rows in ((P("a", None), P()), (P(), P("a")), (P(None, "b"), P("a"))):
        with jax.set_mesh(mesh):
            args = (
                jax.device_put(x, NamedSharding(mesh, spec)),
                jax.device_put(rows, NamedSharding(mesh, of_rows)),
            )
            got = jax.jit(lambda x, r: jax_mx.quantize_both(x, rows=r))(*args)
        assert_same(got, want, f"{spec} {of_rows}")
        if axis_type is AxisType.Explicit:
            split = (*of_rows, None)[0], (*spec, None, None)[1]
            assert jax.typeof(got[0].values).sharding.spec == P(*split)


@pytest.mark.usefixtures("without_code")
def test_a_program_that_xla_splits_splits_the_quantizing_too():
    """So a call of rows is none there; under shard_map it is, and nothing moves."""
    mesh = mesh_of(8)
    where = NamedSharding(mesh, P("a"))
    args = [
        jax.ShapeDtypeStruct((64, 128), jnp.bfloat16, sharding=where),
        jax.ShapeDtypeStruct((512,), jnp.int32, sharding=where),
    ]

    def run(x, rows):
        return jax_mx.quantize(x, rows=rows)

    text = program(run, *args)
    assert "stablehlo.gather" in text and "num_batch_dims" in call_attributes_in(text)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(P("a"), P("a")), out_specs=P("a"))
    text = program(mapped, *args)
    assert "gather" not in text
    assert ": (tensor<8x4x32xbf16>, tensor<64x1xi32>) -> " in call_attributes_in(text)


def test_rows_keep_their_type_on_explicit_meshes():
    """Words of several elements would be split where elements are."""
    mesh = mesh_of(8, axis_type=AxisType.Explicit)
    rows = jnp.asarray([3, -1, 19])
    with jax.set_mesh(mesh):
        where = NamedSharding(mesh, P(None, "a"))
        for dtype, length in (("bfloat16", 24), ("uint8", 32), ("uint8", 8)):
            x = jnp.asarray(np.random.default_rng(0).integers(0, 99, (20, length)), dtype)
            picked = reference.rows_of(jax.device_put(x, where), rows)
            assert jax.typeof(picked).sharding.spec == P(None, "a")
            assert_bits_equal(np.asarray(picked), gathered(x, np.asarray(rows)))


def test_under_transformations():
    x, rows = random_bits((40, 96), "bfloat16"), numbers(128, 40).reshape(2, 64)
    want = jax_mx.quantize(gathered(x, rows.ravel()).reshape(2, 64, 96))
    run = lambda x, r: jax_mx.quantize(x, rows=r)  # noqa: E731
    assert_same(jax.vmap(run, (None, 0))(x, rows), want)
    assert_same(jax.vmap(run, (0, 0))(jnp.stack([x, x]), rows), want)
    assert_same(jax.jit(lambda x, r: jax.lax.map(lambda r: run(x, r), r))(x, rows), want)
    with pytest.raises(NotImplementedError, match="quantize: codes have no derivative"):
        jax.jvp(lambda x: run(x, rows[0]).scales, (jnp.asarray(x),), (jnp.asarray(x),))


# ---- kernels ---
def check(variant, x, rows, **options):
    """The variant's kernel gives the reference's bytes."""
    op, reference = (call(variant, by, **options) for by in (variant.implementation, "xla"))
    want = jax.block_until_ready(jax.jit(reference)(gathered(x, rows)))
    poison_memory()
    got = jax.jit(lambda x, r: op(x, rows=r))(x, rows)
    assert_same(got, want, f"{x.shape} {rows.shape} {options}")


SHAPES = {  # T, R, K: of either axis's blocks whole ones
    "last": [(40, 7, 96), (1, 1, 32), (300, 513, 4128), (65, 129, 160), (33, 100, 2880)],
    "second": [(40, 32, 1), (33, 160, 257), (100, 96, 7), (9, 544, 72), (128, 64, 1145)],
    "both": [(40, 32, 32), (33, 96, 160), (100, 288, 544), (300, 544, 4128), (1, 64, 2880)],
}


def shapes_of(variant) -> list:
    form = str(variant.form).removesuffix("_transposed")
    return SHAPES["both" if form == "square" else form]


HERE = [v for v in PICKING if arch_here() is None or arch_here() in ARCHS[v.implementation]]
each_here = pytest.mark.parametrize("variant", HERE, ids=lambda v: v.name)


@pytest.mark.gpu
@pytest.mark.sampled(24, 3)
@each_here
def test_every_kernel(variant):
    """Each layout, scaling and entry; R off every tile."""
    scalings, layouts = [*Scaling], layouts_of(variant)
    for i, (count, picked, length) in enumerate(shapes_of(variant)):
        x = floats(variant, count, length, i)
        case = {"scaling": scalings[i % len(scalings)], "scale_layout": layouts[i % len(layouts)]}
        check(variant, x, numbers(picked, count, i), **case)
    x = random_bits((512, 512), variant.dtype)
    for layout in layouts:  # aligned, whole tiles
        check(variant, x, numbers(512, 512), scale_layout=layout)
    with for_any_address():
        for layout in layouts:
            check(variant, x[:99], numbers(288, 99), scale_layout=layout)


@pytest.mark.gpu
@pytest.mark.parametrize("op", [jax_mx.quantize, jax_mx.quantize_both])
def test_what_lies_at_any_element(op):
    """XLA hands over a slice of a flat vector where it lies, and the other entry takes it."""
    flat = jnp.asarray(random_bits((16384,), "bfloat16"))
    rows = numbers(96, 64)
    want = op(gathered(flat[1:4097].reshape(64, 64), rows))
    before = _ffi.counters()["fallback_entries"]
    assert_same(jax.jit(lambda v: op(v[1:4097].reshape(64, 64), rows=rows))(flat), want)
    assert _ffi.counters()["fallback_entries"] == before + 1


@pytest.mark.gpu
@pytest.mark.sampled(32, 5)
@each_here
def test_past_two_to_the_31(variant):
    """x and what is quantized have more elements than an int32 counts; in slices of rows."""
    rows, cols, step = (1 << 31) // 8192 + 256, 8192, 8192  # slices begin where windows do
    turn = 40503  # odd, so that rows are a permutation of 2^18, and some

    @jax.jit
    def make():
        row = jax.lax.broadcasted_iota(jnp.uint32, (rows, cols), 0)
        col = jax.lax.broadcasted_iota(jnp.uint32, (rows, cols), 1)
        bits = (row * np.uint32(2654435761)) ^ (col * np.uint32(2246822519))
        bits = (bits ^ bits >> 15) * np.uint32(3266489917)
        return jax.lax.bitcast_convert_type((bits >> 13).astype(jnp.uint16), jnp.bfloat16)

    picked = ((np.arange(rows, dtype=np.int64) * turn) % (rows + 64)).astype(np.int32)
    x = make()
    poison_memory()
    arrays = jax.jit(lambda x, r: call(variant, variant.implementation)(x, rows=r))(x, picked)

    @jax.jit
    def differences(x, picked, arrays, start):
        take = jax.lax.dynamic_slice_in_dim
        part = jnp.take(x, take(picked, start, step), axis=0, mode="fill", fill_value=0)
        count = jnp.int32(0)
        for got, want in zip(arrays, call(variant, "xla")(part), strict=True):
            axis = 1 if got.shape != x.shape else 0
            for part, w in ((got.values, want.values), (got.scales, want.scales)):
                unit = rows // part.shape[axis]
                g = take(part, start // unit, step // unit, axis)
                byte = functools.partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint8)
                count += jnp.sum(byte(g) != byte(w), dtype=jnp.int32)
        return count

    starts = [*range(0, rows - step, step), rows - step]
    bad = {s: int(differences(x, picked, arrays, s)) for s in starts}
    assert not any(bad.values()), {start: count for start, count in bad.items() if count}


# ---- of codes ---
OF_CODES = [v for v in SHIPPED if isinstance(v.source, CodesSource)]


def codes(count: int, length: int, name: str, seed: int = 0):
    """An array of any values and scales, NaN and subnormal ones too."""
    values, scales = (random_bits((count * n,), "bfloat16", seed=seed) for n in (length, length))
    values = values.view(np.uint8)[: count * length].reshape(count, length)
    scales = scales.view(np.uint8)[: count * length // 32].reshape(count, length // 32)
    format = FORMATS[name]
    return jax_mx.MXArray(
        values.view(format.storage), scales.view(SCALE_DTYPE), format, -1, ROW_MAJOR
    )


def of_floats(variant):
    """The variant that picks rows of floats, for one that picks them out of codes."""
    return dataclasses.replace(variant, source=RowsSource())


ALONE = [name for name, (op, options) in CALLS.items() if op is jax_mx.quantize and not (
    {"block", "value_layout"} & {*options} or options.get("window") == (128, 128))]  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_rows_of_codes(name):
    """Rows of codes are quantized like the floats that they stand for."""
    _, options = CALLS[name]
    rows, q = numbers(192, 45), codes(45, 320, "mxfp8_e4m3")
    want = jax_mx.quantize(gathered(q.dequantize(), rows), **options)
    assert_same(requantize(q, rows=rows, **options), want, name)


@pytest.mark.parametrize("name", ["second transposed", "last, tiles"])
def test_rows_of_codes_that_no_kernel_reads(name):
    """Others are dequantized before; also arrays without rows, and no numbers."""
    (op, options), rows = CALLS[name], numbers(192, 45)
    x = random_bits((64, 320), "bfloat16")
    for q in (
        jax_mx.quantize(x, FP4),
        jax_mx.quantize(x, axis=-2),
        jax_mx.quantize(x, scale_layout="blocked_128x4"),
        jax_mx.quantize(x, block=(32, 32)),
        codes(0, 320, "mxfp8_e5m2"),
    ):
        none = requantize(q, rows=rows[:0], **options)
        assert_same(none, op(gathered(q.dequantize(), rows[:0]), **options), name)
        want = gathered(q.dequantize(), rows)
        got = jax.jit(lambda q: requantize(q, rows=rows, **options))(q)
        assert_same(got, op(want, **options), name)


@pytest.mark.usefixtures("without_code")
def test_rows_of_codes_are_one_call():
    rows = jnp.asarray(numbers(64, 45))
    q = codes(45, 320, "mxfp8_e4m3")

    def text_of(*args, **options):
        run = lambda q, rows: requantize(q, rows=rows, axis=-2, **options)  # noqa: E731
        return jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()

    text = text_of(q, rows, transpose=True)
    operands = "tensor<45x320xf8E4M3FN>, tensor<2x32xi32>, tensor<45x10xf8E8M0FNU>"
    assert f": ({operands}) -> " in call_attributes_in(text)
    for options in ({}, {"transpose": True, "format": "mxfp8_e5m2"}):  # of floats that XLA picks
        assert "stablehlo.gather" in text_of(q, rows, **options)
    both = jnp.stack([rows, rows[::-1]])
    run = lambda q, rows: requantize(q, rows=rows, axis=-2, transpose=True)  # noqa: E731
    got = jax.vmap(run, (None, 0))(q, both)
    assert_same(got[1], run(q, rows[::-1]))
    with pytest.raises(TypeError, match="rows must be an int32 array"):
        requantize(q, rows=[1, 2])
    with pytest.raises(TypeError, match="x is an MXArray in mxfp8_e4m3 already"):
        jax_mx.quantize(q, rows=rows)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", OF_CODES, ids=lambda v: v.name)
def test_every_kernel_of_codes(variant):
    """Each layout, scaling and entry; tails of tiles and windows; past 2^31 bytes of codes."""
    scalings, layouts = [*Scaling], layouts_of(variant)
    plain, op = call(of_floats(variant), "xla"), call(variant, "cutedsl")

    def check(count, picked, length, i, **options):
        q, rows = codes(count, length, variant.source.format, i), numbers(picked, count, i)
        want = jax.jit(functools.partial(plain, **options))(gathered(q.dequantize(), rows))
        poison_memory()
        got = jax.jit(lambda q, r: op(q, rows=r, **options))(q, rows)
        assert_same(got, want, f"{count} {length} {options}")

    shapes = [(40, 32, 32), (33, 160, 288), (100, 96, 64), (9, 544, 4128), (512, 512, 512)]
    for i, shape in enumerate(shapes):
        case = {"scaling": scalings[i % len(scalings)], "scale_layout": layouts[i % len(layouts)]}
        check(*shape, i, **case)
    with for_any_address():
        for layout in layouts:
            check(99, 288, 480, 7, scale_layout=layout)
    count, length = (1 << 31) // 8192 + 64, 8192
    total = count * length
    make = lambda: jax.lax.iota(jnp.uint32, total) * np.uint32(2654435761) >> 24  # noqa: E731
    values = jax.jit(lambda: make().astype(jnp.uint8).reshape(count, length))()
    scales = jnp.full((count, length // 32), 127, jnp.uint8)
    values, scales = (
        jax.lax.bitcast_convert_type(a, t)
        for a, t in ((values, FORMATS[variant.source.format].storage), (scales, SCALE_DTYPE))
    )
    rows = jnp.arange(count - 64, count, dtype=jnp.int32)
    q = jax_mx.MXArray(values, scales, FORMATS[variant.source.format], -1, ROW_MAJOR)
    assert_same(jax.jit(lambda q, r: op(q, rows=r))(q, rows), plain(q[-64:].dequantize()))
