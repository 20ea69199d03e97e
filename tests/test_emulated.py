"""Every AMD variant that ships, executed: the binary, in an emulator, through the same handler.

The bits equal the reference. conftest.py records the variants that run here as "emulated".
"""

import contextlib
import functools
import hashlib
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    BY_ROWS,
    GOLDEN_SETS,
    TILES,
    assert_same,
    assert_same_array,
    changed_kernels,
    every_bfloat16,
    fitting,
    golden_input,
    hard_blocks,
    in_tiles,
    lowered_apart,
    mesh_of,
    preprocessing,
    random_bits,
    zero_scales,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx
from jax_mx.formats.formats import BLOCK, FLOAT_DTYPES, Scaling
from jax_mx.launch import _ffi, store
from jax_mx.launch.chips import ARCHS
from jax_mx.quantizing import primitive
from jax_mx.quantizing.facts.variants import layouts_of

pytest.importorskip("tinygrad")

from emulation import (
    FLYDSL,
    Program,
    bytes_of,
    call,
    each_binary,
    example,
    example_of,
    operand,
    words_behind,
)

from jax_mx.launch.emulation.emulator import ORDERS
from jax_mx.quantizing.reference import noise as noise_of
from jax_mx.testing import emulate

each_arch = pytest.mark.parametrize("arch", ARCHS["flydsl"])
PREPROCESSED = [v for v in FLYDSL if v.changes_elements]
ONE = FLYDSL[0]
GET = store.get  # as it is where tests replace it


def some(variant, table, count: int = 1, turn: int = 0) -> list:
    """`count` of the table's entries, others for the next variant: together they cover it."""
    at = FLYDSL.index(variant) * count + turn
    return [table[(at + i) % len(table)] for i in range(count)]


every_binary, every_other = each_binary(FLYDSL, 0), each_binary(FLYDSL, 1)


# ---- every variant ---
@functools.lru_cache(maxsize=8)
def patterns(dtype) -> np.ndarray:
    """Every pattern of 16 bits (of float32, those that begin with them) and the golden sets."""
    every = every_bfloat16()[:1024]  # in order
    every = every.astype(np.float32) if dtype == "float32" else every.view(dtype)
    golden = np.concatenate([golden_input(name).ravel() for name in GOLDEN_SETS])
    with np.errstate(over="ignore", invalid="ignore"):
        golden = golden.astype(FLOAT_DTYPES[dtype])
    x = np.concatenate([every.ravel(), golden, golden])
    return x[: len(x) // 8192 * 8192].reshape(-1, 256)


@functools.lru_cache(maxsize=64)
def reference(variant, key, **options):
    """An operand and the reference's results, for both archs; `key`: a shape, or the patterns."""
    every = key == "patterns"
    floats = patterns(variant.dtype) if every else random_bits(key, variant.dtype, seed=len(key))
    x = operand(variant, floats, **options)
    return x, jax.jit(call(variant, "xla", **options))(x)


def check(arch, variant, key, layout="row_major", scaling="rceil", order="lockstep"):
    options = {"scale_layout": layout, "scaling": scaling}
    x, want = reference(variant, key, **options)
    before = _ffi.counters()["launches"]
    with emulate(arch, order=order):
        got = jax.block_until_ready(jax.jit(call(variant, "flydsl", **options))(x))
    assert _ffi.counters()["launches"] - before == (0 not in getattr(x, "shape", key))
    for i, (g, w) in enumerate(zip(bytes_of(got), bytes_of(want), strict=True)):
        bad = np.flatnonzero(g != w)
        label = f"{key} {layout} {scaling} {order}: result {i}"
        assert not len(bad), f"{label}: {len(bad)} of {len(g)} bytes differ, first at {bad[:5]}"


@pytest.mark.every_binary
@every_other
def test_every_pattern(variant, arch):
    (layout,), (scaling,) = some(variant, layouts_of(variant)), some(variant, [*Scaling])
    check(arch, variant, "patterns", layout, scaling)


EDGES = {  # tails, odd lengths, slabs, one block
    "last": [(33, 96), (3, 129, 32), (1, 32), (257, 160)],
    "second": [(32, 1), (2, 96, 33), (160, 144), (3, 32, 272)],
    "both": [(96, 160), (2, 32, 288), (32, 32)],
}
EMPTY = {"last": (2, 0, 64), "second": (64, 0), "both": (0, 64)}


def shapes_of(variant, table):
    """The table's entry for the variant's form."""
    form = str(variant.form).removesuffix("_transposed")
    entry = table["both" if form == "square" else form]
    return jax.tree.map(
        functools.partial(fitting, variant), entry, is_leaf=lambda e: isinstance(e, tuple)
    )


@pytest.mark.every_binary
@every_binary
def test_shapes(variant, arch):
    """With layouts' padding, and orders of the waves, in turn."""
    shapes = [*some(variant, shapes_of(variant, EDGES), 2), shapes_of(variant, EMPTY)]
    layouts = some(variant, layouts_of(variant), 3)
    for shape, layout, order in zip(shapes, layouts, some(variant, ORDERS, 3), strict=True):
        check(arch, variant, shape, layout, "even", order)


@pytest.mark.every_binary
@every_other
def test_every_entry(variant, arch):
    """At addresses that are aligned to no more than the entry wants; fit for others or not.

    Blocks of zeros have a scale of their own, which padding has not.
    """
    for entry, layout in itertools.product(range(2), layouts_of(variant)):
        options = {"scale_layout": layout}
        if variant.op == "quantize":
            options["zero_scale"] = zero_scales(variant)[-1]
        (shape,) = some(variant, [s for s in shapes_of(variant, EDGES) if math.prod(s) > BLOCK**2])
        program = Program(variant, arch, shape, **options)
        if not program.takes(entry):
            shape = (64, 256)  # whole windows
            program = Program(variant, arch, shape, **options)
        assert program.takes(entry)
        assert program.run(entry, *example(variant, shape, **options)), (entry, layout)


@pytest.mark.every_binary
@each_binary([v for v in FLYDSL if in_tiles(v)], 0)
def test_values_in_tiles(variant, arch):
    """Each way to ask, with each layout of scales, by the entries in turn."""
    cases = [(tiles, layout) for tiles in in_tiles(variant) for layout in layouts_of(variant)]
    for i, (tiles, layout) in enumerate(cases):
        options = {**tiles, "scale_layout": layout}
        (shape,) = some(variant, TILES, turn=i)
        for entry in range(2) if len(cases) == 1 else ((FLYDSL.index(variant) + i) % 2,):
            program = Program(variant, arch, shape, **options)
            if not program.takes(entry):
                shape = (64, 256)  # whole windows
                program = Program(variant, arch, shape, **options)
            assert program.takes(entry)
            assert program.run(entry, *example(variant, shape, **options)), (shape, options, entry)


@pytest.mark.every_binary
@pytest.mark.filterwarnings("ignore:invalid value")
@each_binary(PREPROCESSED)
def test_preprocessing(variant, arch):
    """Signs as words and compiled in, keys, and the factor: each of them flushes subnormals."""
    rows = hard_blocks(variant.dtype)[:2304].reshape(384, 192)  # of two blocks both ways
    layouts, scalings = layouts_of(variant), [*Scaling]
    for turn, of in enumerate((jnp.asarray, np.asarray)):
        options = {"zero_scale": zero_scales(variant)[-1]}
        options["scaling"] = some(variant, scalings, turn=turn)[0]
        options |= preprocessing(variant, of=of)
        if "rounding" in options:  # both directions' modes, one factor, in turn
            pair = options["rounding"] if len(variant.modes) == 2 else (options["rounding"],)
            pair = [
                r and replace(r, prescale=0.75 * (i != turn) or None) for i, r in enumerate(pair)
            ]
            options["rounding"] = tuple(pair) if len(pair) == 2 else pair[0]
        options["scale_layout"] = some(variant, layouts, turn=turn)[0]
        down = str(variant.form).startswith("second") or (turn and variant.form.is_both)
        floats = rows.T if down else rows
        program = Program(variant, arch, floats.shape, **options)
        assert program.run(turn, *example_of(variant, floats, **options)), options


RANDOM = next(v for v in PREPROCESSED if (v.dtype, v.modes[0].hadamard) == ("float32", 0))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("arch", ARCHS["flydsl"])
def test_random_codes_carry_where_the_noise_says(arch):
    """Elements that the noise just takes to the next code, and those a unit below."""
    shape, rng = (256, 4 * BLOCK), np.random.default_rng(0)
    options = {"rounding": jax_mx.Stochastic(jax.random.key(3)), "scaling": "floor"}
    (seeds,) = words_behind(RANDOM, np.zeros(shape, np.float32), **options)
    noise = np.asarray(noise_of(seeds[..., None], (-1,))).reshape(shape)
    code = rng.integers(1, 8, shape) - noise / 2**16
    x = np.interp(code, np.arange(8), [0, 0.5, 1, 1.5, 2, 3, 4, 6]).astype(np.float32)
    x = np.where(rng.random(shape) < 0.5, x, np.nextafter(x, np.float32(0)))
    x[:, ::BLOCK] = 4  # every scale is 1
    x = np.copysign(x, rng.random(shape).astype(np.float32) - np.float32(0.5))
    operands, results = example_of(RANDOM, x, **options)
    assert (results[1] == 127).all()
    assert Program(RANDOM, arch, shape, **options).run(0, operands, results)


@pytest.mark.sampled(2)
@pytest.mark.every_binary
@every_binary
def test_addresses_past_4_gib(variant, arch):
    """The last slab of a tensor of 2^33 elements, of which nothing else exists."""
    slabs, layouts = (1 << 33) // (256 * 256), layouts_of(variant)  # which pad nothing here
    *_, tiles = {}, *in_tiles(variant)
    for entry, layout in enumerate(some(variant, layouts, 2)):
        options = {"scale_layout": layout} | (tiles if entry else {})
        options |= preprocessing(variant, of=jnp.asarray)
        program = Program(variant, arch, (slabs, 256, 256), **options)
        floats = random_bits((1, 256, 256), variant.dtype, seed=3)
        buffers = example_of(variant, floats, **options)
        assert program.run(entry, *buffers, slabs=slabs), (entry, options)


# ---- the context ---
@each_arch
def test_one_dimension(arch):
    x = jnp.asarray(random_bits((96,), "bfloat16"))
    want = jax_mx.quantize(x)
    with emulate(arch):
        assert_same_array(jax.jit(jax_mx.quantize)(x), want)


@pytest.mark.thorough
@pytest.mark.parametrize("arch", ARCHS["flydsl"])
@pytest.mark.parametrize("form", ["second_transposed, tiles", "both_transposed"])
def test_forms_without_a_kernel_go_along_rows(arch, form):
    """Other dtypes than bfloat16, and other pairs than there are kernels for."""
    op, options, shape, results = BY_ROWS[form]
    run = functools.partial(getattr(jax_mx, op), format="mxfp4_e2m1", **options)
    x = jnp.asarray(random_bits(shape, "bfloat16" if results == 2 else "float32"))
    want = jax.jit(functools.partial(run, implementation="xla"))(x)
    before = _ffi.counters()["launches"]
    with emulate(arch):
        got = jax.block_until_ready(jax.jit(functools.partial(run, implementation="flydsl"))(x))
    assert _ffi.counters()["launches"] - before == results
    for g, w in zip(bytes_of(got), bytes_of(want), strict=True):
        assert (g == w).all()


@pytest.mark.sampled(8, 3)
@pytest.mark.parametrize("of", [np.asarray, jnp.asarray])
@each_arch
def test_both_directions_take_one_kernel(arch, of):
    """With signs that a call is compiled for, and with others."""
    x = jnp.asarray(random_bits((3, 64, 96), "bfloat16"))
    signs = of(np.where(np.random.default_rng(5).random(16) < 0.5, -1, 1))

    def run(x, implementation):
        hadamard = (None, jax_mx.Hadamard(16, signs))
        return jax_mx.quantize_both(
            x, "mxfp4_e2m1", hadamard=hadamard, implementation=implementation
        )

    want = jax.jit(functools.partial(run, implementation="xla"))(x)
    kernel = functools.partial(run, implementation="flydsl")
    for f in (kernel, jax.vmap(kernel)):
        before = _ffi.counters()["launches"]
        with emulate(arch):
            got = jax.block_until_ready(jax.jit(f)(x))
        assert _ffi.counters()["launches"] - before == 1
        for g, w in zip(got, want, strict=True):
            assert_same_array(g, w)


def test_programs_of_two_contexts_do_not_mix():
    x = jnp.asarray(random_bits((33, 96), "bfloat16"))
    run = jax.jit(jax_mx.quantize)
    want = run(x)
    counts = []
    for context in (None, "gfx950", None, "gfx942", "gfx950", None):
        before = _ffi.counters()["launches"]
        if context is None:
            got = run(x)
        else:
            with emulate(context):
                got = run(x)
                assert jax_mx.is_supported("quantize", jax.devices()[0])[0]
        assert_same_array(got, want, str(context))
        jax.block_until_ready(got)
        counts.append(_ffi.counters()["launches"] - before)
    assert counts == [0, 1, 0, 1, 1, 0]
    with pytest.raises(NotImplementedError, match="'flydsl' runs on rocm, not on cpu"):
        jax.jit(lambda x: jax_mx.quantize(x, implementation="flydsl"))(x)


def test_bad_arguments():
    with pytest.raises(ValueError, match="arch 'gfx90a' is unknown; use one of gfx942, gfx950"):
        emulate("gfx90a")
    with pytest.raises(ValueError, match="order 'random' is unknown"):
        emulate("gfx950", order="random")


@pytest.mark.sampled(4)
@each_arch
@pytest.mark.thorough
def test_transforms_and_eight_devices(arch):
    """vmap, a loop, shards: the same bytes."""
    x = jnp.asarray(random_bits((8, 64, 96), "bfloat16"))
    with emulate(arch):
        want = jax_mx.quantize(x, axis=-2, implementation="xla")
        run = functools.partial(jax_mx.quantize, axis=-2, implementation="flydsl")
        assert_same_array(jax.jit(jax.vmap(run))(x), want)
        assert_same_array(jax.jit(lambda x: jax.lax.map(run, x))(x), want)
        assert_same_array(run(x), want, "eager")
        assert len(jax.devices("cpu")) == 8
        mesh = jax.make_mesh((8,), ("a",), devices=jax.devices("cpu"))
        shards = jax.device_put(x, NamedSharding(mesh, PartitionSpec("a")))
        before = _ffi.counters()["launches"]
        compiled = jax.jit(run).lower(shards).compile()
        assert not any(word in compiled.as_text() for word in ("all-gather", "all-to-all"))
        assert_same_array(jax.block_until_ready(compiled(shards)), want, "sharded")
        assert _ffi.counters()["launches"] == before + 8


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "shape,axis,gathers",
    [((8, 256), -1, False), ((8, 192), -1, True), ((4, 192, 5), 1, True)],
)
def test_shards_of_transforms_of_two_blocks(shape, axis, gathers):
    """Two blocks: XLA gathers them for the call; it does not where shards have both."""
    mesh = mesh_of(2)
    x = jnp.asarray(random_bits(shape, "bfloat16"))
    signs = jnp.arange(64) % 3 == 0
    f = functools.partial(
        jax_mx.quantize, format="mxfp4_e2m1", axis=axis, hadamard=jax_mx.Hadamard(64, signs)
    )
    want = jax.jit(functools.partial(f, implementation="xla"))(x)
    spec = PartitionSpec(*("a" if i == axis % len(shape) else None for i in range(len(shape))))
    with emulate("gfx950"):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        compiled = jax.jit(f).lower(placed).compile()
        text = compiled.as_text()
        assert store.TARGET in text and ("all-gather" in text) == gathers
        assert_same_array(compiled(placed), want)


def plain_and_shuffled(**options):
    """A call, and the one that asks for values in tiles; lists of MXArrays."""
    options = {"format": "mxfp4_e2m1", **options}
    if options.pop("both", False):
        calls = jax_mx.quantize_both, {"value_layouts": ("shuffled_16x16",) * 2}
    else:
        calls = jax_mx.quantize, {"value_layout": "shuffled_16x16"}
    f = functools.partial(calls[0], **options)
    g = functools.partial(f, implementation="flydsl", **calls[1])
    return [lambda x, f=f: q if isinstance(q := f(x), tuple) else (q,) for f in (f, g)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("writes", [True, False], ids=["kernel writes tiles", "XLA moves rows"])
@pytest.mark.parametrize(
    "options",
    [
        {"both": True, "scale_layout": "shuffled_32x8"},  # as AITER's GEMMs read them
        *(pytest.param(options, marks=pytest.mark.thorough) for options in ({"both": True},
            {"axis": -2, "transpose": True, "scale_layout": "blocked_128x4"},
            {"axis": 0, "transpose": True}, {"block": (32, 32), "format": "mxfp8_e4m3"})),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.thorough
def test_values_in_tiles_are_those_moved(options, writes, monkeypatch):
    """Jitted, mapped, sharded; also where the kernel writes rows, as most of NVIDIA's do."""
    apart = contextlib.nullcontext()
    if not writes:
        monkeypatch.setattr(primitive, "value_layouts_of", lambda *_: ("row_major",))
        apart = lowered_apart("XLA moves rows")
    plain, shuffled = plain_and_shuffled(**options)
    x = jnp.asarray(
        random_bits((64, 4, 64) if options.get("axis") == 0 else (2, 64, 256), "bfloat16")
    )
    want = [q.with_values_in("shuffled_16x16") for q in jax.jit(plain)(x)]

    with emulate("gfx950"), apart:
        assert_same(jax.jit(shuffled)(x), want, "jit")
        if options.get("axis") != 0:
            assert_same(jax.jit(jax.vmap(shuffled))(x), want, "vmap")
        for axis_type, spec in ((AxisType.Auto, ("a", "b")), (AxisType.Explicit, (None, "a", "b"))):
            mesh = mesh_of(2, 4, axis_type=axis_type)
            with jax.set_mesh(mesh):
                shards = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
                assert_same(jax.jit(shuffled)(shards), want, str(spec))


@pytest.mark.sampled(4)
@each_arch
def test_eight_threads(arch):
    def work(i):
        x = jnp.asarray(random_bits((33 + i, 96), "bfloat16"))
        with emulate(arch):
            for scaling in ("rceil", "floor"):
                run = jax.jit(lambda x: jax_mx.quantize(x * 2, scaling=scaling))  # noqa: B023
                got = jax.block_until_ready(run(x))
                want = jax_mx.quantize(x * 2, scaling=scaling, implementation="xla")
                assert_same_array(got, want)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


@pytest.mark.parametrize("context", [None, "gfx950"])
def test_export_carries_both_archs(context):
    """From a machine without a GPU; the arch is chosen where the program is loaded."""
    run = jax.jit(lambda x: jax_mx.quantize(x, implementation="flydsl").values)
    abstract = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    export = functools.partial(
        jax.export.export(run, platforms=["rocm"], disabled_checks=jax_mx.DISABLE_EXPORT_CHECKS),
        abstract,
    )
    if context:
        with emulate(context):
            text = export().mlir_module()
    else:
        text = export().mlir_module()
    assert text.count("@jax_mx_launch") == 1 and "gfx942 = {" in text and "gfx950 = {" in text


# ---- what a chip would not survive ---
def _more_than_there_is(facts, image):
    launch = facts["launches"]["row_major"]
    launch["scalars"] = [
        [size, [-1, 1 << 20, 0]] if size == 8 else [size, lengths]
        for size, lengths in launch["scalars"]
    ]
    for entry in launch["entries"]:
        entry["grid"] = [[0, -1, 64, 0, 1]]


def _other_arch(facts, image):
    other = GET(ONE, "gfx942")
    facts["sha256"] = other.sha256
    return other.image


def _another_symbol(facts, image):
    for entry in facts["launches"]["row_major"]["entries"]:
        entry["symbol"] = "nope"


def _other_threads(facts, image):
    for entry in facts["launches"]["row_major"]["entries"]:
        entry["threads"] = [128, 1, 1]


def _missing_scalar(facts, image):
    facts["launches"]["row_major"]["scalars"].pop()


def _wide_scalar(facts, image):
    facts["launches"]["row_major"]["scalars"][-1][0] = 8


def _parameter_of_no_size(facts, image):
    image = image.replace(b"\xa5.size\x04", b"\xa5.size\x00")  # in the metadata, msgpack
    facts["sha256"] = hashlib.sha256(image).hexdigest()
    return image


def _too_many_threads(facts, image):
    for entry in facts["launches"]["row_major"]["entries"]:
        entry["grid"] = [[0, -1, 1 << 24, 0, 1]]


@pytest.mark.parametrize(
    "change,message",
    [
        (_more_than_there_is, r"hipErrorLaunchFailure \(read of 16 bytes out of bounds"),
        (_other_arch, r"hipErrorNoBinaryForGpu \(the code is for gfx942, the device is gfx950"),
        (_another_symbol, "the code object's metadata names no such kernel"),
        (_other_threads, r"compiled for workgroups of \(256, 1, 1\), not \(128, 1, 1\)"),
        (_missing_scalar, "parameter . of .* takes 4 bytes, the call passes 0"),
        (_wide_scalar, "parameter . of .* takes 4 bytes, the call passes 8"),
        (_parameter_of_no_size, r"a parameter of the kind by_value at \d+, which no launch passes"),
        (_too_many_threads, r"would need 4294967296 threads, HIP launches fewer than 2\^32"),
    ],
)
def test_faults_are_errors(change, message):
    with (
        emulate("gfx950"),
        changed_kernels(change),
        pytest.raises(jax.errors.JaxRuntimeError, match=message),
    ):
        jax.block_until_ready(jax.jit(call(ONE, "flydsl"))(jnp.ones((64, 96), ONE.dtype)))
    check("gfx950", ONE, (33, 96))  # nothing is left broken
