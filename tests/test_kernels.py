"""Every variant that ships, on the GPU at hand: bit for bit the reference.

Parametrized over SHIPPED itself, so that none ships untested. Freed memory is poisoned before each
run, so that a byte that the kernel does not write shows.
"""

import dataclasses
import itertools
import os
import re
import subprocess
import sys
import textwrap
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    GOLDEN_SETS,
    TILES,
    assert_bits_equal,
    assert_same,
    assert_same_array,
    call,
    changed_kernels,
    every_bfloat16,
    fitting,
    golden_input,
    in_tiles,
    op_of,
    operand,
    plan_for,
    poison_memory,
    preprocessing,
    random_bits,
    zero_scales,
)
from on_device import HERE, check, kernel

import jax_mx
from jax_mx.formats.directions import LAST, SECOND, SECOND_TRANSPOSED
from jax_mx.formats.formats import BLOCK, FLOAT_DTYPES, Scaling
from jax_mx.formats.layouts import SCALE_LAYOUTS
from jax_mx.formats.windows import ROW
from jax_mx.launch import _ffi, store
from jax_mx.quantizing import quantizers
from jax_mx.quantizing.facts.variants import layouts_of
from jax_mx.quantizing.preprocessing import block_data_of, data_of, preprocessing_of

pytestmark = pytest.mark.gpu
AMD = "shuffled_32x8"
GET = store.get  # as it is where tests replace it
each_variant = pytest.mark.parametrize("variant", HERE, ids=lambda v: v.name)
each_layout = pytest.mark.parametrize("layout", SCALE_LAYOUTS)
each_scaling = pytest.mark.parametrize("scaling", Scaling, ids=str)


def patterns(dtype) -> np.ndarray:
    """Every pattern of a 16-bit type, a million random ones of float32."""
    if np.dtype(dtype).itemsize == 2:
        return every_bfloat16().view(dtype)
    return random_bits((1 << 10, 1 << 10), dtype)


def test_reference_is_the_same_on_cpu():
    """The reference on a GPU gives the bytes that CPU tests compare with golden ones."""
    for dtype in FLOAT_DTYPES.values():
        x = patterns(dtype)
        for scaling in Scaling:
            here = jax.jit(partial(jax_mx.quantize, scaling=scaling, implementation="xla"))(x)
            with jax.default_device(jax.devices("cpu")[0]):
                there = jax.jit(partial(jax_mx.quantize, scaling=scaling, implementation="xla"))(x)
            assert_same_array(here, there)
            assert_bits_equal(here.dequantize(jnp.float32), there.dequantize(jnp.float32))


@pytest.mark.sampled(128, 5)
@each_variant
@each_scaling
def test_every_pattern(variant, scaling):
    check(variant, jnp.asarray(patterns(variant.dtype)), scaling=scaling)


@pytest.mark.sampled(384, 40)
@each_variant
@each_scaling
@pytest.mark.parametrize("name", GOLDEN_SETS)
def test_golden(variant, scaling, name):
    x = golden_input(name)
    with np.errstate(over="ignore", invalid="ignore"):
        rows, cols = fitting(variant, (32, 32))  # whole blocks, down the columns too
        x = np.resize(
            x.astype(FLOAT_DTYPES[variant.dtype]), (-(-x.size // cols // rows) * rows, cols)
        )
    check(variant, jnp.asarray(x), scaling=scaling)


SHAPES = {
    "last": [(32, ), (96, ), (1, 32), (3, 64), (7, 5, 96), (33, 4128), (257, 32), (1, 2, 3, 4128),
        (1023, 7168), (0, 64), (64, 0), (2, 0, 64), (4, 1 << 14), (1, (1 << 14) - 32),
        (1, (1 << 14) + 32), (130, 160), (3, 129, 96)],
    "second": [(32, 1), (32, 8), (64, 33), (96, 7), (32, 4096), (4128, 40), (2, 3, 32, 96),
        (160, 257), (3, 128, 128), (5, 64, 129), (1024, 2880), (0, 32, 64), (64, 0), (2, 0, 8),
        (256, 136), (2, 64, 769), (64, 1145)],
    "last_transposed": [(1, 32), (3, 64), (7, 5, 96), (33, 4128), (257, 32), (1023, 7168), (0, 64),
        (64, 0), (130, 160), (3, 129, 96), (8, 4096), (136, 256), (2, 64, 1 << 14)],
    "both": [(32, 32), (96, 160), (3, 128, 4128), (2, 2, 32, 128), (160, 96), (4128, 64),
        (0, 32, 32), (0, 64), (64, 0), (1024, 2880)],
}  # fmt: skip


@pytest.mark.sampled(64, 7)
@each_variant
@each_layout
def test_shapes(variant, layout):
    if layout not in layouts_of(variant):
        return
    form = str(variant.form)
    form = form if form in SHAPES else form.removesuffix("_transposed")
    shapes = SHAPES["both" if form == "square" else form]
    if layout == AMD:  # fewer, as XLA takes long to compile the reference
        # Then more than one unit of its padding each way, and no whole ones, in unaligned rows too.
        shapes = [*shapes[::4], (2, 544, 800), (288, 521 if form == "second" else 544)]
    for shape in shapes:
        if layout != "row_major" and len(shape) < 2:
            continue
        x = random_bits(fitting(variant, shape), variant.dtype, seed=len(shape))
        check(variant, x, scaling="even", scale_layout=layout)


@pytest.mark.sampled(96, 30)
@each_variant
@each_layout
def test_zero_blocks(variant, layout):
    """The scale of zeros is a scalar; the padding of tiles has bytes 0 all the same."""
    if layout not in layouts_of(variant) or variant.op != "quantize":
        return
    for shape in ((32, 32), (96, 160), (2, 160, 416)):
        x = random_bits(fitting(variant, shape), variant.dtype)
        x[..., :64, :] = np.array([0.0, -0.0] * (x.shape[-1] // 2), variant.dtype)
        for zero_scale in zero_scales(variant):
            check(variant, jnp.asarray(x), scale_layout=layout, zero_scale=zero_scale)


@pytest.mark.sampled(12, 3)
@pytest.mark.parametrize(
    "variant",
    [v for v in HERE if in_tiles(v) and AMD in layouts_of(v)],
    ids=lambda v: v.name,
)
def test_values_in_tiles(variant):
    """Beside AMD's scales the kernel writes them, in either entry; beside others XLA does."""
    for i, tiles_options in enumerate(in_tiles(variant)):
        x = random_bits(TILES[i % len(TILES)], variant.dtype, seed=i)
        check(variant, x, **tiles_options)
        for shape in (TILES[0], (2, 320, 576)):
            x = random_bits(shape, variant.dtype, seed=i)
            options = {**tiles_options, "scale_layout": AMD}
            check(variant, x, **options)
        before = _ffi.counters()["fallback_entries"]
        got = misaligned(call(variant, variant.implementation, **options), x)
        assert_same(got, jax.jit(call(variant, "xla", **options))(x), f"{options}")
        assert _ffi.counters()["fallback_entries"] == before + 1


def misaligned(op, x):
    """The op's results, jitted, of arrays that lie at the second element of flat ones."""
    leaves, tree = jax.tree.flatten(x)
    flat = [np.asarray(a).ravel() for a in leaves]
    flat = [a.view(np.uint8) if a.itemsize == 1 else a for a in flat]
    flat = [jnp.asarray(np.concatenate([a[:1], a])) for a in flat]

    def run(flat):
        parts = [f[1:].reshape(a.shape) for f, a in zip(flat, leaves, strict=True)]
        parts = [
            p if p.dtype == a.dtype else jax.lax.bitcast_convert_type(p, a.dtype)
            for p, a in zip(parts, leaves, strict=True)
        ]
        return op(jax.tree.unflatten(tree, parts))

    return jax.jit(run)(flat)


@pytest.mark.sampled(24, 1)
@each_variant
def test_any_axis(variant):
    """An axis before the last two is the second one of a flattened array."""
    if variant.op == "quantize" and variant.form in (SECOND, SECOND_TRANSPOSED):
        x = jnp.asarray(random_bits((2, 64, 3, 40), variant.dtype, seed=5))
        for axis, layout in itertools.product((-3, -4), layouts_of(variant)):
            y = jnp.moveaxis(x, -3, axis)
            options = {"axis": axis, "transpose": variant.form != SECOND, "scale_layout": layout}
            got, want = (
                jax.jit(
                    partial(jax_mx.quantize, format=variant.formats[0], implementation=i, **options)
                )(y)
                for i in (variant.implementation, "xla")
            )
            assert_same_array(got, want, f"axis {axis} {layout}")


def any_bytes(abstract):
    """A large array of bytes, made on the device."""
    n = [jax.lax.broadcasted_iota(jnp.uint32, abstract.shape, i) for i in range(2)]
    bits = (n[0] * np.uint32(2654435761)) ^ (n[1] * np.uint32(2246822519))
    bits = (bits ^ bits >> 15) * np.uint32(3266489917)
    return jax.lax.bitcast_convert_type((bits >> 13).astype(jnp.uint8), abstract.dtype)


def differences_of_dequantize(variant, rows, cols):
    """Compared in slices of blocks' rows; the reference of all at once would take 36 GB."""
    make, _ = op_of(variant)
    abstract = jax.eval_shape(make, jax.ShapeDtypeStruct((rows, cols), variant.dtype))
    q = jax.jit(lambda: jax.tree.map(any_bytes, abstract))()
    poison_memory()
    (y,) = kernel(variant)(q)
    axis = int(abstract.shape != (rows, cols))  # of y's rows in the quantized array
    step = 8192

    @jax.jit
    def differences(q, y, start):
        take = jax.lax.dynamic_slice_in_dim
        leaves = []
        for leaf in (q.values, q.scales):
            unit = rows // leaf.shape[axis]
            leaves.append(take(leaf, start // unit, step // unit, axis))
        part = dataclasses.replace(q, values=leaves[0], scales=leaves[1])
        (want,) = call(variant, "xla")(part)
        bits = partial(
            jax.lax.bitcast_convert_type,
            new_dtype={2: jnp.uint16, 4: jnp.uint32}[y.dtype.itemsize],
        )
        return jnp.sum(bits(take(y, start, step)) != bits(want), dtype=jnp.int32)

    starts = [*range(0, rows - step, step), rows - step]
    bad = {s: int(differences(q, y, s)) for s in starts}
    assert not any(bad.values()), {start: count for start, count in bad.items() if count}


def is_random(variant):
    """Whether an element's code depends on its place."""
    return any(mode.stochastic for mode in variant.modes)


def some_rows_of_reference(variant, x, start, step):
    """The reference's results for rows of x, with the random bits of their place in x."""
    part = jax.lax.dynamic_slice_in_dim(x, start, step)
    if not is_random(variant):
        return call(variant, "xla")(part)
    rounding, hadamard = map(preprocessing(variant).get, ("rounding", "hadamard"))
    static = (preprocessing_of("quantize", rounding, hadamard),)
    options = {"format": variant.formats[0], "implementation": "xla", "preprocessing": static}
    plan = plan_for(part, **options)
    block_words = block_data_of(x, [data_of(rounding, hadamard)], plan)
    block_words = [jax.lax.dynamic_slice_in_dim(w, start, step)[..., None] for w in block_words]
    views = [part.reshape(step, -1, BLOCK), *block_words]
    values, scales = quantizers.quantize(views, plan.of_view)
    return [SimpleNamespace(values=values.reshape(step, -1), scales=scales[..., 0])]


@pytest.mark.sampled(64, 9)
@each_variant
def test_two_to_the_31(variant):
    """More elements than an int32 counts; quantized ones are compared in slices of rows."""
    rows, cols, step = (1 << 31) // 8192 + 192, 8192, 8192
    if variant.op == "dequantize":
        differences_of_dequantize(variant, rows, cols)
        return
    if variant.form != LAST and (is_random(variant) or variant.window == ROW):
        return  # the reference has no part of them; those that rotate alone have the same addresses
    rate = jnp.dtype(variant.dtype).itemsize

    @jax.jit
    def make():
        row = jax.lax.broadcasted_iota(jnp.uint32, (rows, cols), 0)
        col = jax.lax.broadcasted_iota(jnp.uint32, (rows, cols), 1)
        bits = (row * np.uint32(2654435761)) ^ (col * np.uint32(2246822519))
        bits = (bits ^ bits >> 15) * np.uint32(3266489917)
        bits = bits ^ bits >> 13
        return jax.lax.bitcast_convert_type(
            bits if rate == 4 else bits.astype(jnp.uint16), FLOAT_DTYPES[variant.dtype]
        )

    x = make()
    poison_memory()
    arrays = kernel(variant)(x)

    @partial(jax.jit, static_argnames="step")
    def differences(x, arrays, start, step):
        take = jax.lax.dynamic_slice_in_dim
        wants = some_rows_of_reference(variant, x, start, step)
        count = jnp.int32(0)
        for got, want in zip(arrays, wants, strict=True):
            axis = 1 if got.shape != x.shape else 0  # of x's rows in the result
            parts = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
            for part, w in parts:
                unit = rows // part.shape[axis]
                g = take(part, start // unit, step // unit, axis)
                byte = partial(jax.lax.bitcast_convert_type, new_dtype=jnp.uint8)
                count += jnp.sum(byte(g) != byte(w), dtype=jnp.int32)
        return count

    # No slice begins inside of a window of rows; the last one is longer.
    starts = range(0, rows - 2 * step + 1, step)
    bad = {s: int(differences(x, arrays, s, rows - s if s == starts[-1] else step)) for s in starts}
    assert not any(bad.values()), {start: count for start, count in bad.items() if count}


def slice_of(variant, flat, start):
    """A 64 x 64 operand that lies at `start` elements of a flat vector: bytes for dequantize."""
    abstract = operand(variant, np.zeros((64, 64), variant.dtype))

    def take(part, start):
        part = jax.ShapeDtypeStruct(part.shape, part.dtype)
        bits = flat[start : start + part.size].reshape(part.shape)
        return bits if bits.dtype == part.dtype else jax.lax.bitcast_convert_type(bits, part.dtype)

    if variant.op == "quantize":
        return take(abstract, start)
    assert isinstance(abstract, jax_mx.MXArray)
    scales = take(abstract.scales, start + 4096)
    return dataclasses.replace(abstract, values=take(abstract.values, start), scales=scales)


def flat_of(variant, seed=0):
    """The array that `slice_of` takes slices of."""
    dtype = variant.dtype if variant.op == "quantize" else np.uint8
    if variant.op == "dequantize":
        return jnp.asarray(np.random.default_rng(seed).integers(0, 256, 16384, dtype))
    return jnp.asarray(random_bits((16384,), dtype, seed=seed))


@pytest.mark.sampled(32, 11)
@each_variant
def test_misaligned_tiles(variant):
    """Scales in tiles, of what lies at any address, in rows that 16 bytes do not divide."""
    shape = (2, 64, 99) if str(variant.form).startswith("second") else (2, 64, 288)
    floats = random_bits(fitting(variant, shape), variant.dtype, seed=2)
    for layout in layouts_of(variant)[1:]:
        x = operand(variant, floats, scale_layout=layout)
        want = jax.jit(call(variant, "xla", scale_layout=layout))(x)
        op = call(variant, variant.implementation, scale_layout=layout)
        assert_same(misaligned(op, x), want, layout)


@pytest.mark.sampled(256, 77)
@each_variant
@pytest.mark.parametrize("offset", [1, 2, 3, 4, 5, 8, 16, 1000])
def test_misaligned_operands(variant, offset):
    """XLA hands over slices of a flat vector where they lie, at any element."""
    flat = flat_of(variant, offset)

    def slices(v, implementation):
        parts = [slice_of(variant, v, offset + i * 4096) for i in range(2)]
        return [q for part in parts for q in call(variant, implementation)(part)]

    want = jax.jit(partial(slices, implementation="xla"))(flat)
    poison_memory()
    got = jax.jit(partial(slices, implementation=variant.implementation))(flat)
    assert_same(got, want, f"offset {offset}")
    check(variant, random_bits((64, 64), variant.dtype))  # nothing is left broken


def launches(variant):
    """Where columns, too, have windows of rows, a kernel before finds the amaxes."""
    finds = variant.window == ROW and variant.form != LAST
    return 1 + (finds and variant.implementation == "cutedsl")


@pytest.mark.sampled(32, 13)
@each_variant
def test_misaligned_operands_take_the_other_entry(variant):
    """The case above is real: without the second entry this launch would fault."""
    flat = flat_of(variant)
    op = call(variant, variant.implementation)
    before = _ffi.counters()
    jax.block_until_ready(jax.jit(lambda v: op(slice_of(variant, v, 1)))(flat))
    after = _ffi.counters()
    assert after["fallback_entries"] == before["fallback_entries"] + launches(variant)
    x = operand(variant, np.zeros((64, 256), variant.dtype))  # whole windows
    jax.block_until_ready(kernel(variant)(x))
    assert _ffi.counters()["fallback_entries"] == after["fallback_entries"]


@pytest.mark.sampled(24, 2)
@each_variant
def test_no_copy_and_no_transpose(variant):
    """The views are bitcasts, alone and behind a producer, or before a consumer."""
    x = operand(variant, random_bits((2, 256, 512), variant.dtype))

    def fused(x):
        if variant.op == "quantize":
            return call(variant)(jnp.tanh(x) * x)
        return [jnp.tanh(y) * y for y in call(variant)(x)]

    for f in (kernel(variant), jax.jit(fused)):
        text = f.lower(x).compile().as_text()
        assert text.count('custom_call_target="jax_mx_launch"') == launches(variant)
        # A key's words may be copied, and nothing else.
        assert not re.findall(r"= (?!u32\[[12]?\])\S+ (?:copy|transpose)\(", text), text


@pytest.mark.sampled(48, 17)
@each_variant
def test_misaligned_results(variant):
    """Results that XLA places inside a larger buffer."""
    floats = random_bits((64, 64), variant.dtype, seed=9)

    def place(x, offset, implementation, layout):
        leaves = jax.tree.leaves(call(variant, implementation, scale_layout=layout)(x))
        out = [jax.lax.bitcast_convert_type(a, jnp.uint8).ravel() for a in leaves]
        return [
            jax.lax.dynamic_update_slice(jnp.zeros(8 * 4096, jnp.uint8), a, (offset,)) for a in out
        ]

    cases = [(offset, "row_major") for offset in (0, 1, 2, 8, 16)]
    for offset, layout in (*cases, *((1, layout) for layout in layouts_of(variant)[1:])):
        x = operand(variant, floats, scale_layout=layout)
        run = partial(place, offset=offset, layout=layout)
        want = jax.jit(partial(run, implementation="xla"))(x)
        got = jax.jit(partial(run, implementation=variant.implementation))(x)
        for g, w in zip(got, want, strict=True):
            assert_bits_equal(g, w, f"offset {offset}, {layout}")


@pytest.mark.sampled(48, 23)
@each_variant
def test_transforms(variant):
    """vmap over any axis, scan, cond, donation, eager: one kernel, the same bytes."""
    x = operand(variant, random_bits((6, 5, *fitting(variant, (32, 96))), variant.dtype, seed=4))
    run, ref = call(variant, variant.implementation), call(variant, "xla")
    # The random bits of an element are those of its place in what one call sees.
    mapped = jax.vmap if is_random(variant) else lambda f: f
    for dim in range(2):
        assert_same(jax.jit(jax.vmap(run, in_axes=dim))(x), jax.vmap(ref, in_axes=dim)(x))
    assert_same(jax.vmap(jax.vmap(run))(x), mapped(mapped(ref))(x), "vmap of vmap")
    if variant.op == "quantize":
        rows, cols = fitting(variant, (64, 96))
        y = jnp.asarray(random_bits((rows, 4, cols), variant.dtype, seed=6))
        assert_same(jax.jit(jax.vmap(run, in_axes=1))(y), jax.vmap(ref, in_axes=1)(y), "inner dim")
    assert_same(run(x), ref(x), "eager")
    assert_same(jax.jit(lambda x: jax.lax.map(run, x))(x), mapped(ref)(x), "lax.map")
    either = jax.jit(lambda p, x: jax.lax.cond(p, run, ref, x))
    assert_same(either(True, x), ref(x), "cond")
    if variant.op == "quantize":
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # not usable: smaller
            donated = jax.jit(run, donate_argnums=0)(jnp.copy(x))
        assert_same(donated, ref(x), "donated")


@pytest.mark.sampled(64, 31)
@each_variant
def test_eight_threads(variant):
    """Cold and warm, different shapes and one shared executable."""
    shared = kernel(variant)

    def work(i):
        for n in range(3):
            shape = fitting(variant, (32 * (i + 1), 32 * (n + 1)))
            x = operand(variant, random_bits(shape, variant.dtype, seed=i))
            want = call(variant, "xla")(x)
            assert_same(shared(x), want)
            assert_same(kernel(variant, scaling="rceil")(x), want)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_each_library_is_loaded_once():
    """Whatever the number of programs."""
    variant = HERE[0]
    kernel(variant)(jnp.ones((1, 32), variant.dtype))
    before = _ffi.counters()["libraries"]
    for rows in range(2, 40):
        jax.block_until_ready(kernel(variant)(jnp.ones((rows, 32), variant.dtype)))
    assert _ffi.counters()["libraries"] == before <= len(HERE)


# ---- what must not work, and must not break anything ---
def tampered(x, variant, change):
    """The result of a variant's kernel with changed attributes."""
    with changed_kernels(change):
        return jax.block_until_ready(kernel(variant)(x))


def _sha(image):
    import hashlib

    return hashlib.sha256(image).hexdigest()


def _truncated(facts, image):
    facts["sha256"] = _sha(image[: len(image) // 2])
    return image[: len(image) // 2]


def _corrupted(facts, image):
    return image[:-9] + bytes([image[-9] ^ 1]) + image[-8:]


def _other_arch(facts, image):
    if reason := store.obstacle(HERE[0], "sm_100f"):
        pytest.skip(reason)
    other = GET(HERE[0], "sm_100f")
    facts["sha256"] = other.sha256
    return other.image


def _other_symbol(facts, image):
    for i, entry in enumerate(facts["launches"]["row_major"]["entries"]):
        entry["symbol"] = f"nope_{i}"


def _missing_scalar(facts, image):
    facts["launches"]["row_major"]["scalars"].pop()


def _huge_block(facts, image):
    facts["launches"]["row_major"]["entries"][0]["threads"] = [1024, 1, 1]


@pytest.mark.parametrize(
    "change,message",
    [
        (_truncated, "not a whole 64-bit ELF"),
        (_corrupted, "does not have the sha256"),
        (_other_arch, "CUDA_ERROR_NO_BINARY_FOR_GPU"),
        (_other_symbol, "CUDA_ERROR_NOT_FOUND"),
        (_missing_scalar, "takes 4 bytes, the call passes 0"),
        (_huge_block, "CUDA_ERROR_INVALID_VALUE"),
    ],
)
def test_bad_images_are_errors(change, message):
    variant = HERE[0]
    x = jnp.ones((64, 64), variant.dtype)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        tampered(x, variant, change)
    check(variant, x)  # the process goes on


def test_poison_shows_what_is_not_written():
    """The tests above can fail: a grid of half the size is noticed."""

    def half(facts, image):
        facts["launches"]["row_major"]["entries"][0]["grid"][0][-1] *= 2

    variant = HERE[0]
    x = jnp.asarray(random_bits((256, 4096), variant.dtype))
    want = call(variant, "xla")(x)
    poison_memory()
    with pytest.raises(AssertionError, match="differ"):
        assert_same(tampered(x, variant, half), want)


# ---- other processes ---
def python(code: str, **env: str) -> str:
    """Output of a new Python process that runs `code`."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--xla_gpu_graph_min_graph_size=1",
        "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer="
        "FUSION,CUBLAS,CUSTOM_CALL,CONDITIONAL,WHILE,DYNAMIC_SLICE_FUSION",
        "--xla_gpu_enable_command_buffer=",
    ],
)
def test_command_buffers(flags):
    """Captured into CUDA graphs, replayed, with new and with reused buffers: the same bytes."""
    out = python(
        """
        import jax, jax.numpy as jnp, numpy as np
        import jax_mx
        from jax_mx.launch import _ffi

        def step(x, implementation):
            out = []
            for i in range(4):
                x = x * jnp.bfloat16(2)
                q = jax_mx.quantize(x, implementation=implementation)
                out += [q.values, q.scales]
                q = jax_mx.quantize(x, "mxfp8_e5m2", scaling="floor", implementation=implementation)
                out += [q.values, q.scales]
            return out

        run, ref = (jax.jit(lambda x, i=i: step(x, i)) for i in (None, "xla"))
        def same(a, b):
            pairs = [[np.asarray(v).view(np.uint8) for v in pair] for pair in zip(a, b)]
            return all((u == v).all() for u, v in pairs)
        xs = [jax.random.normal(jax.random.key(i), (256, 1024), jnp.bfloat16) for i in range(3)]
        wants = [ref(x) for x in xs]
        kept = []
        for n in range(12):
            got = run(xs[n % 3])
            assert same(got, wants[n % 3]), n
            kept += [got] if n < 6 else []  # new outputs at first, then freed ones again
        looped = jax.jit(lambda x: jax.lax.map(lambda x: jax_mx.quantize(x), x))(jnp.stack(xs))
        assert same([looped.values[1]], [jax_mx.quantize(xs[1], implementation="xla").values])
        print(_ffi.counters())
        """,
        XLA_FLAGS=flags,
    )
    counters = eval(out.strip().splitlines()[-1])
    if flags.endswith("command_buffer="):
        assert counters["captured"] == 0 < counters["launches"]
    else:
        assert counters["captured"] > 0, counters


def test_export_runs_in_a_new_process(tmp_path):
    variant = HERE[0]
    x = jnp.asarray(random_bits((96, 96), variant.dtype))
    call = jax.jit(lambda x: jax_mx.quantize(x, *variant.formats).dequantize(jnp.float32))
    checks = jax_mx.DISABLE_EXPORT_CHECKS
    rows = jax.export.symbolic_shape("n, 96")
    shapes = {"static": x, "rows": jax.ShapeDtypeStruct(rows, x.dtype)}
    for name, shape in shapes.items():
        blob = jax.export.export(call, disabled_checks=checks)(shape).serialize()
        (tmp_path / name).write_bytes(blob)
    np.save(tmp_path / "x.npy", np.asarray(x).view(np.uint16))
    np.save(tmp_path / "want.npy", np.asarray(call(x)).view(np.uint32))
    out = python(
        f"""
        import pathlib, jax, jax.numpy as jnp, numpy as np
        import jax_mx
        folder = pathlib.Path({str(tmp_path)!r})
        x = jnp.asarray(np.load(folder / "x.npy").view(jnp.bfloat16))
        want = np.load(folder / "want.npy")
        for name in ("static", "rows"):
            f = jax.export.deserialize((folder / name).read_bytes())
            got = np.asarray(f.call(x)).view(np.uint32)
            nan = np.isnan(want.view(np.float32))
            assert (np.isnan(got.view(np.float32)) == nan).all() and (got == want)[~nan].all(), name
        print(jax_mx.launch._ffi.counters()["launches"])
        """
    )
    assert int(out) == 4  # two programs of a quantize and a dequantize each
