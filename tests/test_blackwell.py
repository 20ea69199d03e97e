"""Products on Blackwell's tensor cores: what serves what, and kernels, executed on the CPU."""

import contextlib
import dataclasses
import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import mosaic
import numpy as np
import pytest
from exact import assert_equal, assert_equal_or_flushed, changed, integers, wanted
from exact import floats as random_floats
from helpers import assert_bits_equal, random_bits

import jax_mx
from jax_mx.formats import reads
from jax_mx.formats.formats import FORMATS, MXFP4_E2M1, MXFP8_E4M3, MXFP8_E5M2, Scaling
from jax_mx.formats.layouts import BLOCKED_128X4, ROW_MAJOR, ROW_MAJOR_VALUES
from jax_mx.formats.windows import SQUARE
from jax_mx.launch import partition, store, targets
from jax_mx.products import multiply, operand, splitting, tcgen05, tcgen05_kernel
from jax_mx.products.contraction import ROWS, SUMS, Contraction, Numbers, Served
from jax_mx.products.decide import decided
from jax_mx.products.implementations import IMPLEMENTATIONS
from jax_mx.products.splitting import as_traced
from jax_mx.quantizing import registry
from jax_mx.quantizing.facts.preprocessing import NO_PREPROCESSING, Preprocessing
from jax_mx.quantizing.plan import Plan
from jax_mx.quantizing.sources.gated_gradient import GradientSource

utils = pytest.importorskip("jax.experimental.mosaic.gpu.utils")
executed = pytest.mark.skipif(bool(mosaic.missing()), reason=mosaic.missing())
PAIRS = [(f, f) for f in (MXFP8_E4M3, MXFP8_E5M2, MXFP4_E2M1)] + [(MXFP8_E4M3, MXFP8_E5M2)]
SIZES = [
    [50] * 6,
    [0, 0, 300, 0, 0, 0],
    [1, 0, 127, 128, 1, 43],
    [0, 40, 0, 88, 0, 3],
    [0] * 6,
    [400, 9, 9, 9, 9, 9],
    [-3, 100, 28, 0, 129, 300],
]


# ---- operands and products ---
def rng(seed=5):
    return np.random.default_rng(seed)


def tiled(q):
    return q.with_scales_in(BLOCKED_128X4)


def numbers(dtype="float32", axes=(1, 1), batch=(), **options):
    left, right = (axis if isinstance(axis, tuple) else (axis,) for axis in axes)
    return Numbers((left, right), (batch, batch), np.dtype(dtype), **options)


OF_ROWS = numbers(axes=(1, 2), groups=ROWS)
OF_SUMS = numbers(groups=SUMS, align=128)


def product(numbers, name="tcgen05", reads_floats=False):
    """An implementation, as a function of operands and sizes."""

    def run(lhs, rhs, sizes):
        served = Served(name, reads_floats=reads_floats)
        return IMPLEMENTATIONS[name].compute(Contraction(numbers, lhs, rhs, sizes), served)

    return run


@functools.cache
def compiled(numbers, name, reads_floats, **params):
    return mosaic.executed(product(numbers, name, reads_floats), **params)


def multiplied(numbers, lhs, rhs, sizes=None, name="tcgen05", reads_floats=False, **params):
    """The result of a kernel."""
    sizes = None if sizes is None else jnp.asarray(sizes, jnp.int32)
    return compiled(numbers, name, reads_floats, **params)(lhs, rhs, sizes)


# ---- dense ---
@executed
@pytest.mark.sampled(8)
@pytest.mark.parametrize("shape", [(1, 8, 32), (128, 256, 128), (129, 259, 288), (300, 300, 544)])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(f.name for f in pair))
def test_dense_products_are_exact(pair, shape):
    m, n, k = shape
    x, w = (integers(rng(), (rows, k), format) for rows, format in zip((m, n), pair, strict=True))
    dtype = ("float32", "bfloat16", "float16")[m % 3]
    y = multiplied(numbers(dtype), tiled(x), tiled(w))
    assert_equal(y, wanted(x, w), f"{shape}")


@executed
@pytest.mark.thorough
@pytest.mark.parametrize("m", range(1, 301))
@pytest.mark.parametrize(("sizes", "k"), [(None, 160), ([128, 0, 256], 416)], ids=["dense", "sums"])
def test_every_number_of_rows_and_columns(sizes, k, m):
    """A product and a weight's gradient have any number; formats take turns."""
    pair, contraction = PAIRS[m % len(PAIRS)], OF_SUMS if sizes else numbers()
    x, w = integers(rng(), (m, k), pair[0]), integers(rng(1), (301 - m, k), pair[1])
    y = multiplied(contraction, tiled(x), tiled(w), sizes)
    assert_equal(y, wanted(x, w, sizes, sums=bool(sizes)), f"{m} rows")


@executed
@pytest.mark.thorough
@pytest.mark.parametrize("lies", ["rows", "tiles", "across", "square"])
def test_batches_and_what_is_summed_beside(lies):
    """Batches, and products over (batch, rows) as a weight's gradient is; however operands lie."""
    floats = [
        jnp.asarray(rng(i).integers(-3, 4, (2, n, 160)), jnp.bfloat16)
        for i, n in ((0, 96), (1, 160))
    ]
    options = {"rows": {}, "tiles": {"scale_layout": BLOCKED_128X4}}.get(lies, {})
    if lies == "across":
        operands = [jax_mx.quantize(x.mT, axis=-2) for x in floats]
    else:
        options = {"block": (32, 32)} if lies == "square" else options
        operands = [jax_mx.quantize(x, **options) for x in floats]
    at = 1 if lies == "across" else 2
    x, w = (np.asarray(q.dequantize(jnp.float32)).astype(np.float64) for q in operands)
    x, w = (x.mT, w.mT) if lies == "across" else (x, w)
    y = multiplied(numbers(axes=(at, at), batch=(0,)), *operands)
    assert_equal(y, x @ w.mT, lies)
    y = multiplied(numbers(axes=((0, at), (0, at))), *operands)
    assert_equal(y, np.einsum("bmk,bnk->mn", x, w), lies)


# ---- over groups ---
@executed
@pytest.mark.thorough
@pytest.mark.parametrize("formats", [*PAIRS, "bfloat16", "float16"], ids=str)
def test_every_number_of_rows_of_groups(formats):
    """A group of each number of rows from 0 to 300, which begins anywhere."""
    sizes = rng().permutation(301)
    shapes = (sizes.sum() + 33, 160), (301, 40, 160)
    if reads_floats := isinstance(formats, str):
        x, w = (random_floats(rng(i), shape, formats) for i, shape in enumerate(shapes))
    else:
        x, w = (tiled(integers(rng(i), shapes[i], format)) for i, format in enumerate(formats))
    y = multiplied(OF_ROWS, x, w, sizes, reads_floats=reads_floats)
    assert_equal(y, wanted(x, w, sizes), f"{formats}")


@executed
@pytest.mark.sampled(301, 129)
@pytest.mark.parametrize("m", range(301))
def test_every_number_of_rows_that_have_a_group(m):
    """Rows behind the groups are zero, and no group writes another's."""
    x, w = integers(rng(), (300, 160), MXFP8_E4M3), integers(rng(1), (2, 136, 160), MXFP8_E4M3)
    sizes = [m // 3, m - m // 3]
    y = multiplied(OF_ROWS, tiled(x), tiled(w), sizes)
    assert_equal(y, wanted(x, w, sizes), f"{m} rows")


@executed
@pytest.mark.sampled(3, 2)
@pytest.mark.parametrize("pair", PAIRS[:3], ids=lambda pair: pair[0].name)
def test_groups_begin_anywhere(pair):
    x, w = integers(rng(), (300, 288), pair[0]), integers(rng(1), (6, 136, 288), pair[1])
    for sizes in SIZES:
        y = multiplied(OF_ROWS, tiled(x), tiled(w), sizes)
        assert_equal(y, wanted(x, w, sizes), f"{sizes}")


@executed
@pytest.mark.sampled(3)
@pytest.mark.parametrize("pair", PAIRS[:3], ids=lambda pair: pair[0].name)
def test_groups_that_are_contracted(pair):
    x, w = integers(rng(), (136, 608), pair[0]), integers(rng(1), (259, 608), pair[1])
    for sizes in ([128, 0, 384, 128], [0, 0, 640, 0], [256, 128, 0, 0], [0] * 4):
        y = multiplied(OF_SUMS, tiled(x), tiled(w), sizes)
        assert_equal(y, wanted(x, w, sizes, sums=True), f"{sizes}")


@executed
@pytest.mark.sampled(6, 5)
@pytest.mark.parametrize("align", [32, 128, 0, 1, 2, 5])
def test_floats_over_groups(align):
    """Groups of floats begin anywhere; those that are contracted are moved apart for it."""
    if align in (1, 2):  # odd lengths, too
        x, w = random_floats(rng(), (321, 133)), random_floats(rng(1), (321, 77))
        sizes = [3, 0, 192, 70] if align == 1 else [4, 0, 318, 12]
        contraction, options = numbers(axes=(0, 0), groups=SUMS, align=align), {"sums": True}
    elif align == 5:
        x, w = random_floats(rng(), (300, 13)), random_floats(rng(1), (6, 259, 13))
        contraction, sizes, options = OF_ROWS, SIZES[2], {}
    elif align:
        x, w = random_floats(rng(), (320, 136)), random_floats(rng(1), (320, 259))
        sizes = [128, 0, 192, 0] if align == 32 else [128, 0, 128, 0]
        contraction, options = numbers(axes=(0, 0), groups=SUMS, align=align), {"sums": True}
    else:
        x, w = random_floats(rng(), (300, 136)), random_floats(rng(1), (6, 259, 136))
        contraction, sizes, options = OF_ROWS, SIZES[2], {}
    y = multiplied(contraction, x, w, sizes, reads_floats=True)
    assert_equal(y, wanted(x, w, sizes, **options), f"{sizes}")


def covered(items, rows):
    """How often each row of each matrix of the result is computed."""
    parts = [np.broadcast_to(np.asarray(x), np.shape(items.tile)).reshape(-1) for x in items]
    count = np.zeros((int(parts[2].max()) + 1, rows + 300), int)
    for _, _, out, tile, start, stop, _, _ in zip(*parts, strict=True):
        count[out, 128 * tile + start : 128 * tile + stop] += 1
    return count[:, :rows]


@pytest.mark.parametrize("rows", [1, 128, 1000])
def test_items_compute_each_row_once(rows):
    some = rng().integers(0, 2 * rows // 6 + 1, (20, 6))
    items_of = jax.jit(lambda sizes: tcgen05._items_of_rows(sizes, rows, 3))
    for sizes in itertools.chain(SIZES, some):
        items = items_of(jnp.asarray(sizes, jnp.int32))
        assert (covered(items, rows) == 1).all(), sizes
        assert set(np.unique(items.steps)) <= {0, 3}


# ---- what is no number, and the ends of the range ---
@executed
@pytest.mark.sampled(3, 2)
@pytest.mark.parametrize("pair", PAIRS[:3], ids=lambda pair: pair[0].name)
def test_nan_stays_in_its_row_column_and_group(pair):
    """A scale that is NaN, in every format; a code that is, or infinite, where there are such."""
    x, w = integers(rng(), (300, 160), pair[0]), integers(rng(1), (2, 136, 160), pair[1])
    codes = [((7, 33), 0x7F)] * (pair[0] != MXFP4_E2M1)
    codes += [((200, 5), 0x7C)] * (pair[0] == MXFP8_E5M2)
    x = changed(x, codes=codes, scales=[((131, 4), 255)])
    w = changed(w, scales=[((1, 5, 0), 255)])
    sizes = [129, 150]
    y = multiplied(OF_ROWS, tiled(x), tiled(w), sizes)
    assert_equal(y, wanted(x, w, sizes))
    bad = np.isnan(np.asarray(y))
    assert bad[131].all() and bad[129:279, 5].all() and bad[7].all() == (pair[0] != MXFP4_E2M1)
    others = np.delete(np.delete(bad, [7, 131, 200], 0), 5, 1)
    assert not others.any() and not bad[:129, 5].sum() - bad[7, 5]


@executed
@pytest.mark.thorough
def test_nan_stays_in_the_group_that_is_contracted():
    x, w = integers(rng(), (136, 384), MXFP8_E4M3), integers(rng(1), (136, 384), MXFP8_E4M3)
    x = changed(x, codes=[((3, 0), 0x7F)], scales=[((9, 4), 255), ((2, 11), 255)])
    y = multiplied(OF_SUMS, tiled(x), tiled(w), [128, 128, 0, 128])
    assert [*map(tuple, np.unique(np.argwhere(np.isnan(y))[:, :2], axis=0))] == [
        (0, 3),
        (1, 9),
        (3, 2),
    ]
    assert_equal(y, wanted(x, w, [128, 128, 0, 128], sums=True))


@executed
@pytest.mark.thorough
@pytest.mark.parametrize("scales", [(0, 254), (0, 124), (254, 0), (127, 120)])
def test_the_smallest_and_largest_scales(scales):
    """Some sums of scales 0 and 124 are below 2^-126: the interpreter makes zeros of these."""
    x, w = integers(rng(), (129, 64), MXFP8_E4M3), integers(rng(1), (40, 64), MXFP8_E4M3)
    x, w = (
        dataclasses.replace(q, scales=jnp.full(q.scales.shape, s, jnp.uint8).view(q.scales.dtype))
        for q, s in zip((x, w), scales, strict=True)
    )
    factor = np.ldexp(1.0, sum(scales) - 254)
    codes = [np.asarray(q.values).astype(np.float64) for q in (x, w)]
    y = multiplied(numbers(), tiled(x), tiled(w))
    assert_equal_or_flushed(y, codes[0] @ codes[1].T * factor)


# ---- that these tests can fail ---
def with_one_buffer(monkeypatch):
    """Steps overwrite the scales of the step that is under way."""
    multiply = tcgen05_kernel._multiply

    def mistaken(steps, fetch, scratch):
        multiply(steps, fetch, scratch | {"factors": scratch["factors"][:1] * 2})

    monkeypatch.setattr(tcgen05_kernel, "_multiply", mistaken)


@executed
@pytest.mark.parametrize("change", [None, with_one_buffer])
def test_no_race(change, monkeypatch):
    """The interpreter looks for two accesses of which nothing says which comes first."""
    if change:
        change(monkeypatch)
    x, w = (integers(rng(i), (n, 1280), MXFP8_E4M3) for i, n in enumerate((128, 40)))
    has_race, y = mosaic.races(product(numbers()), tiled(x), tiled(w), None)
    assert has_race == bool(change)
    if not change:
        assert_equal(y, wanted(x, w))


MUTATIONS = {
    "stop": lambda items: items._replace(stop=items.stop + 1),
    "start": lambda items: items._replace(start=jnp.maximum(items.start - 1, 0)),
    "steps": lambda items: items._replace(steps=jnp.maximum(items.steps - 1, 0)),
    "rhs": lambda items: items._replace(rhs=jnp.zeros_like(items.rhs)),
    "tile": lambda items: items._replace(tile=jnp.maximum(items.tile - 1, 0)),
}


@executed
@pytest.mark.sampled(5)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mistakes_are_noticed(mutation, monkeypatch):
    items = tcgen05._items_of_rows
    monkeypatch.setattr(tcgen05, "_items_of_rows", lambda *args: MUTATIONS[mutation](items(*args)))
    x, w = integers(rng(), (300, 160), MXFP8_E4M3), integers(rng(1), (2, 136, 160), MXFP8_E4M3)
    program = mosaic.executed(product(OF_ROWS))
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match=r"differ|Out-of-bounds"):
        y = program(tiled(x), tiled(w), jnp.array([70, 150], jnp.int32))
        assert_equal(y, wanted(x, w, [70, 150]))


# ---- layers ---
@pytest.fixture
def on_blackwell(monkeypatch):
    """Traces are for a B200, whatever JAX is here."""
    monkeypatch.setattr(reads, "VERSION", (0, 0))
    with targets.traced_for(("sm_100",)):
        yield


def layer(x, w, sizes, recipe):
    if sizes is None:
        return jax_mx.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), recipe=recipe)
    return jax_mx.ragged_dot(x, w, sizes, recipe=recipe)


def gradients(x, w, sizes, recipe):
    """The result, and gradients by what is 1 to 3 for each element."""

    def loss(x, w):
        y = layer(x, w, sizes, recipe)
        factor = (jnp.arange(y.size).reshape(y.shape) % 3 + 1).astype(y.dtype)
        return (y * factor).astype(jnp.float32).sum(), y

    (_, y), (dx, dw) = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, w)
    return y, dx, dw


OPERANDS = ("lhs", "rhs", "sizes")
LAYERS = {
    "dense": ((2, 96, 96), (96, 160), None),
    "groups": ((200, 96), (3, 96, 160), [70, 0, 100]),
}


@pytest.mark.sampled(4, 2)
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_tiles_are_those_of_rows(name, recipe, on_blackwell):
    """Scales in tiles, and groups at multiples of 128, change no result and no gradient."""
    shapes, sizes = LAYERS[name][:2], LAYERS[name][2]
    x, w = (jnp.asarray(rng(i).integers(-2, 3, s), jnp.float32) for i, s in enumerate(shapes))
    sizes = None if sizes is None else jnp.asarray(sizes, jnp.int32)
    jaxpr = jax.make_jaxpr(lambda x, w: gradients(x, w, sizes, recipe))(x, w).jaxpr
    for call in multiply.contractions_in(jaxpr):
        assert call.lhs.scale_layout == call.rhs.scale_layout == BLOCKED_128X4
        assert call.numbers.align == (128 if call.numbers.groups == SUMS else 1)
        assert decided(call, "cuda", ["sm_100"]).name == "tcgen05"
    gradients_of_rows = gradients(x, w, sizes, recipe)
    with targets.traced_for(("sm_90",)):
        other = gradients(x, w, sizes, recipe)
    for y, want in zip(gradients_of_rows, other, strict=True):
        assert_equal(y, np.asarray(want))


@executed
@pytest.mark.sampled(4)
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_by_the_kernel(name, recipe, on_blackwell, monkeypatch):
    """From the floats of a caller to both gradients, all three products by the kernel."""
    shapes, sizes = LAYERS[name][:2], LAYERS[name][2]
    x, w = (jnp.asarray(rng(i).integers(-2, 3, s), jnp.float32) for i, s in enumerate(shapes))
    sizes = None if sizes is None else jnp.asarray(sizes, jnp.int32)
    want = gradients(x, w, sizes, recipe)
    names = []

    def multiplied(call):
        types = {name: jax.tree.map(jax.typeof, getattr(call, name)) for name in OPERANDS}
        served = decided(dataclasses.replace(call, **types), "cuda", ["sm_100"]).served
        names.append(served.implementation)
        row = IMPLEMENTATIONS[served.implementation]

        def run(lhs, rhs, sizes):
            local_call = dataclasses.replace(call, lhs=lhs, rhs=rhs, sizes=sizes)
            return row.compute(local_call, served)

        with jax.disable_jit(False):
            return mosaic.executed(run)(call.lhs, call.rhs, call.sizes)

    monkeypatch.setattr(multiply, "multiplied", multiplied)
    with jax.disable_jit():  # each product has arrays
        got = gradients(x, w, sizes, recipe)
    assert names == ["tcgen05"] * 3
    for y, wants in zip(got, want, strict=True):
        assert_equal(y, np.asarray(wants))


def perceptron(interleaved=False):
    """The gradients of a perceptron, and operands: gates end, and ups begin, inside a tile."""

    def loss(*args):
        y = jax_mx.mlp(*args, recipe="mxfp8", residuals="floats", interleaved=interleaved)
        return y.astype(jnp.float32).sum()

    operands = (rng(i).integers(-2, 3, s) for i, s in enumerate([(160, 64), (64, 192), (96, 64)]))
    return jax.grad(loss, (0, 1, 2)), [jnp.asarray(a, jnp.bfloat16) for a in operands]


def both_ways(formats, **options):
    """The answers of a B300 and an H100 to a quantizer of both directions, with tiles."""
    options = {"preprocessing": (NO_PREPROCESSING,) * 2, "transpose": True} | options
    options |= {"scaling": Scaling.RCEIL, "value_layouts": (ROW_MAJOR_VALUES,) * 2}
    plan = Plan(
        "quantize_both", np.dtype("bfloat16"), formats, scale_layout=BLOCKED_128X4, **options
    )
    with registry.by_tables():
        return [registry.chosen(plan, "cuda", [chip]) for chip in ("sm_103", "sm_90")]


def test_gradients_of_an_activation_lie_in_tiles(on_blackwell):
    """One kernel for sm_100f writes them."""
    step, operands = perceptron()
    calls = [*multiply.contractions_in(jax.make_jaxpr(step)(*operands).jaxpr)]
    assert len(calls) == 6
    assert {q.scale_layout for c in calls for q in (c.lhs, c.rhs)} == {BLOCKED_128X4}
    served = both_ways((MXFP8_E4M3,) * 2, source=GradientSource())
    assert [s.implementation for s in served] == ["cutedsl"] * 2
    assert [s.via_floats for s in served] == [False, True]


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp4_e2m1"])
def test_square_blocks_are_written_for_each_reader(format, on_blackwell):
    """As the one array expands along either axis; one kernel for sm_100f writes both."""
    recipe = jax_mx.Recipe(lhs=format, rhs=format, gradient=format, block=(32, 32))
    w = jnp.asarray(random_bits((96, 160), "bfloat16"))
    forms = recipe.quantize_weight(w)
    square = jax_mx.quantize(w, format, block=(32, 32))
    for form, q in ((forms.contracted_form, square.mT), (forms.free_form, square)):
        assert form.axis == -1
        want = tiled(q.expand(-1))
        assert (form.array.block, form.array.window) == (want.block, want.window)
        for mine, theirs in ((form.array.values, want.values), (form.array.scales, want.scales)):
            assert_bits_equal(mine, theirs)
    squares_of_both = (Preprocessing(window=SQUARE),) * 2
    served = both_ways((FORMATS[format],) * 2, preprocessing=squares_of_both)
    assert [s.implementation for s in served] == ["cutedsl", "xla"]


@pytest.mark.thorough
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_in_tiles_are_those_in_rows(interleaved, on_blackwell):
    step, operands = perceptron(interleaved)
    in_tiles = step(*operands)
    with targets.traced_for(("sm_90",)):
        in_rows = step(*operands)
    for mine, theirs in zip(in_tiles, in_rows, strict=True):
        assert_equal(mine, np.asarray(theirs, np.float32))


# ---- what serves what ---
def call(lhs, rhs, sums=False, align=128, axes=(1, 1), dtype="bfloat16", groups=4, **options):
    grouped = rhs.ndim == 3 or sums
    grouping = {"groups": SUMS if sums else ROWS, "align": align} if grouped else {}
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32) if grouped else None
    return Contraction(numbers(dtype, axes, **grouping, **options), lhs, rhs, sizes)


def test_what_serves_what(on_blackwell):
    def floats(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    def mx(*shape, **options):
        return jax.eval_shape(lambda x: jax_mx.quantize(x, **options), floats(*shape))

    def name(*args, chip="sm_100", **options):
        return decided(call(*args, **options), "cuda", [chip]).name

    x, w, stack = mx(512, 256), mx(384, 256), mx(4, 384, 256)
    for chip in ("sm_100", "sm_103"):
        assert name(x, w, chip=chip) == name(x, stack, axes=(1, 2), chip=chip) == "tcgen05"
    assert "tcgen05" not in {
        name(mx(0, 256), w),
        name(x, mx(0, 256)),
    }  # there is nothing to compute
    assert name(x, w, chip="sm_120") == "scaled_dot"
    assert name(x, stack, axes=(1, 2), chip="sm_120") == "dequantize"
    assert name(x, w, exact=True) == "scaled_dot"
    assert name(floats(512, 256), w) == "dequantize"  # cuBLAS
    mixed = mx(512, 256), mx(4, 384, 256, format="mxfp4_e2m1")
    assert name(*mixed, axes=(1, 2)) == name(floats(512, 256), stack, axes=(1, 2)) == "tcgen05"
    assert name(x, w, sums=True) == name(x, w, sums=True, align=32) == "tcgen05"
    assert name(x, w, sums=True, align=1) == "tcgen05"
    wide = floats(512, 256, dtype=jnp.float32), floats(4, 384, 256, dtype=jnp.float32)
    assert name(*wide, axes=(1, 2)) == "dequantize"
    assert name(floats(512, 252), floats(4, 384, 252), axes=(1, 2)) == "tcgen05"
    reason = IMPLEMENTATIONS["tcgen05"].support(call(*wide, axes=(1, 2)), ["sm_100"]).reason
    assert "wants both operands in blocks along the contracted dimension" in reason


def test_an_older_jax_takes_its_own_kernels(on_blackwell, monkeypatch):
    monkeypatch.setattr(reads, "VERSION", (99,))
    x, stack = (
        jax.ShapeDtypeStruct((512, 256), jnp.bfloat16),
        jax.ShapeDtypeStruct((4, 384, 256), jnp.bfloat16),
    )
    chosen = decided(call(x, stack, axes=(1, 2)), "cuda", ["sm_100"])
    assert chosen.name == "blackwell"
    (note,) = chosen.passed_over
    assert note.startswith("ragged_dot: 'tcgen05' wants JAX 99") and "install" in note
    assert reads.layout_for_trace().name == "row_major"
    assert reads.align_for_trace() == 1


def test_explain_needs_no_chip(on_blackwell):
    x, w = (
        jax.ShapeDtypeStruct((512, 256), jnp.bfloat16),
        jax.ShapeDtypeStruct((256, 384), jnp.bfloat16),
    )

    def loss(x, w):
        return jax_mx.matmul(x, w).astype(jnp.float32).sum()

    told = jax_mx.explain(jax.grad(loss, (0, 1)), x, w, device="sm_100")
    assert [c.chosen for c in told.calls] == ["tcgen05"] * 3


# ---- programs of several devices, and programs that leave the machine ---
LOWERED = LAYERS | {
    "few": ((3, 32), (32, 5), None),
    "odd": ((301, 544), (544, 77), None),
    "whole tiles": ((512, 256), (256, 512), None),
    "odd groups": ((301, 544), (3, 544, 77), [70, 0, 100]),
}
RECIPES = {
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4",
    "floats": jax_mx.Recipe(lhs="mxfp8_e4m3", rhs="mxfp4_e2m1"),
}


@executed
@pytest.mark.sampled(12)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("where", ["alone", "shard_map", "auto", "explicit"])
@pytest.mark.parametrize("name", LOWERED)
def test_exports_carry_the_kernel(name, where, recipe, without_code, monkeypatch):
    """All three products, from a machine without the chip; XLA splits calls by their rule."""
    *shapes, sizes = LOWERED[name]
    if recipe == "floats" and sizes is None:
        pytest.skip("cuBLAS multiplies those")
    chip = "sm_103" if recipe == "mxfp4" else "sm_100"
    monkeypatch.setenv("JAX_MX_ARCHS", "sm_100f")
    monkeypatch.setattr(store, "exported", lambda chips: [chip])
    archs, infer = set(), utils._infer_arch
    monkeypatch.setattr(utils, "_infer_arch", lambda: archs.add(infer()) or infer())
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    args += [jnp.array(sizes)] if sizes else []

    def call(x, w, *sizes):
        return gradients(x, w, *sizes or [None], RECIPES[recipe])

    axis_type = getattr(jax.sharding.AxisType, "Explicit" if where == "explicit" else "Auto")
    mesh = jax.make_mesh((2,), ("a",), axis_types=(axis_type,)) if where != "alone" else None
    if where == "shard_map":
        whole = jax.sharding.PartitionSpec()
        call = jax.shard_map(call, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    options = {"platforms": ("cuda",), "disabled_checks": jax_mx.DISABLE_EXPORT_CHECKS}
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        text = jax.export.export(jax.jit(call), **options)(*args).mlir_module()
    target = "@jax_mx_split" if where in ("auto", "explicit") else "@mosaic_gpu_v2"
    assert text.count(target) == 3
    assert archs == {(10, int(chip[-1]))}


def experts():
    """Gradients of a layer of experts, and the operands."""
    shapes = ((300, 64), (4, 64, 192), (4, 96, 64))
    choices = jnp.zeros((300, 2), jnp.int32), jnp.ones((300, 2), jnp.float32)

    def loss(*args):
        return jax_mx.moe(args[0], *choices, *args[1:], recipe="mxfp8").astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1, 2)), [jnp.ones(shape, jnp.bfloat16) for shape in shapes]


def squares(rows=300):
    """Gradients of a product with a weight in square blocks, and the operands."""
    step = functools.partial(gradients, sizes=None, recipe=jax_mx.Recipe(block=(32, 32)))
    return step, [jnp.ones(shape, jnp.bfloat16) for shape in ((rows, 96), (96, 160))]


@executed
@pytest.mark.sampled(4)
@pytest.mark.parametrize("layer", [perceptron, experts, squares, "rows"])
def test_xla_brings_no_scales_into_tiles(layer, without_code, monkeypatch):
    """In programs of one device; were scales in rows, it would."""
    monkeypatch.setenv("JAX_MX_ARCHS", "sm_100f")
    monkeypatch.setattr(store, "exported", lambda chips: ["sm_100"])
    if layer == "rows":
        monkeypatch.setattr(operand, "layout_for_trace", lambda *_: ROW_MAJOR)
    step, operands = squares(172) if layer == "rows" else layer()  # JAX keeps what it traced
    options = {"platforms": ("cuda",), "disabled_checks": jax_mx.DISABLE_EXPORT_CHECKS}
    program = jax.export.export(jax.jit(lambda *args: step(*args)), **options)
    text = program(*operands).mlir_module()
    assert "@mosaic_gpu_v2" in text
    swizzled = re.findall(r"stablehlo.transpose .*x4x32x\d+x4xui8>", text)
    assert bool(swizzled) == (layer == "rows")


@executed
def test_exports_carry_the_dense_kernel_of_jax(without_code, monkeypatch):
    monkeypatch.setenv("JAX_MX_ARCHS", "sm_100f")
    monkeypatch.setattr(store, "exported", lambda chips: ["sm_100"])
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((512, 256), (256, 384)))
    product = jax.jit(lambda x, w: jax_mx.matmul(x, w, implementation="blackwell"))
    options = {"platforms": ("cuda",), "disabled_checks": jax_mx.DISABLE_EXPORT_CHECKS}
    assert "@mosaic_gpu_v2" in jax.export.export(product, **options)(x, w).mlir_module()


@executed
@pytest.mark.sampled(3, 2)
@pytest.mark.parametrize("lies", ["rows", "floats", "tiles"])
def test_a_device_computes_its_columns(lies):
    """A product over groups that XLA splits along columns."""
    sizes, half = jnp.array([50, 0, 70], jnp.int32), 128 if lies == "tiles" else 40
    shapes = (150, 96), (3, 2 * half, 96)
    if lies == "floats":
        x, w = (random_floats(rng(i), shape) for i, shape in enumerate(shapes))
    else:
        x, w = (integers(rng(i), shape, MXFP8_E4M3) for i, shape in enumerate(shapes))
        x, w = (tiled(x), tiled(w)) if lies == "tiles" else (x, w)
    abstract = jax.tree.map(jax.typeof, (x, w, sizes))
    target = targets.Target("cuda", ["sm_100"], partitioned=True, devices=2)
    shared = splitting.splitting_of(Contraction(OF_ROWS, *abstract), target)
    served = decided(shared.contraction, "cuda", ["sm_100"]).served
    assert served.implementation == "tcgen05" and shared.is_shared_by(served)
    parameters = json.loads(json.dumps(splitting.parameters_of(shared, served, target)))
    local = partition.SHARDS[splitting.NAME](
        parameters, partition.Split({"a": 2}, {"n0": ("a",)}, {})
    )
    halves = [jax.tree.map(lambda a, i=i: jnp.split(a, 2, 1)[i], w) for i in range(2)]
    run = mosaic.executed(local)
    y = [run(*jax.tree.leaves((x, half, sizes)))[0] for half in halves]
    assert_equal(jnp.concatenate(y, 1), wanted(x, w, [50, 0, 70]))


@pytest.mark.sampled(4, 1)
@pytest.mark.parametrize("where", ["no mesh", "auto", "explicit", "shard_map"])
def test_tiles_are_split_as_rows_are(where, on_blackwell):
    """Where shards have whole tiles, scales stay in these, and as many arrays move."""
    types = jax.sharding.AxisType.Explicit if where == "explicit" else jax.sharding.AxisType.Auto
    mesh, whole = jax.make_mesh((2,), ("a",), axis_types=(types,)), jax.sharding.PartitionSpec()
    rows, use = jax.sharding.PartitionSpec("a"), where != "no mesh"
    x, w = (jnp.asarray(rng(i).integers(-2, 3, (256, 256)), jnp.bfloat16) for i in range(2))
    places = (jax.sharding.NamedSharding(mesh, spec) for spec in (rows, whole))
    args = [jax.device_put(a, sharding) for a, sharding in zip((x, w), places, strict=True)]
    call = functools.partial(gradients, sizes=None, recipe="mxfp8")
    if where == "shard_map":
        call = jax.shard_map(call, mesh=mesh, in_specs=(rows, whole), out_specs=rows)

    def run(chip):
        context = jax.set_mesh(mesh) if use else contextlib.nullcontext()
        program = jax.jit(lambda x, w: call(x, w))
        with targets.traced_for((chip,)), context:
            calls = [*multiply.contractions_in(jax.make_jaxpr(program)(*args).jaxpr)]
            compiled = program.lower(*args).compile()
            names = {decided(as_traced(c), "cuda", [chip]).name for c in calls}
        layouts = {q.scale_layout.name for c in calls for q in (c.lhs, c.rhs)}
        return layouts, names, compiled(*args), compiled.as_text()

    layouts, names, y, text = run("sm_100")
    others, _, want, text_of_rows = run("sm_90")
    assert (layouts, others, names) == ({"blocked_128x4"}, {"row_major"}, {"tcgen05"})
    for op in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert text.count(f" {op}(") == text_of_rows.count(f" {op}("), op
    for mine, theirs in zip(y, want, strict=True):
        assert_equal(mine, np.asarray(theirs))


@pytest.mark.sampled(3, 1)
@pytest.mark.parametrize("where", ["shard_map", "auto", "explicit"])
def test_gathered_weights_keep_their_tiles(where, on_blackwell):
    """Where parts have whole tiles, what products read is what one device quantizes."""
    axis_type = getattr(jax.sharding.AxisType, "Explicit" if where == "explicit" else "Auto")
    mesh = jax.make_mesh((2,), ("a",), axis_types=(axis_type,))
    spec = jax.sharding.PartitionSpec("a")

    def forms(weight):
        return [weight.contracted_form, weight.free_form]

    for rows, layout in ((512, BLOCKED_128X4), (448, ROW_MAJOR)):
        w = jnp.asarray(rng().integers(-2, 3, (rows, 256)), jnp.float32)

        def gathered(w, layout=layout):
            every = forms(jax_mx.gather_weight(w, spec, "mxfp8"))
            assert {form.array.scale_layout for form in every} == {layout}
            return jax.tree.leaves(every)

        whole = jax.tree.leaves(forms(jax_mx.MXFP8.quantize_weight(w)))
        if where == "shard_map":
            specs = {"in_specs": spec, "out_specs": jax.sharding.PartitionSpec()}
            gathered = jax.shard_map(gathered, mesh=mesh, check_vma=False, **specs)
        with jax.set_mesh(mesh):
            w = jax.device_put(w, jax.sharding.NamedSharding(mesh, spec))
            if layout == ROW_MAJOR:
                jax.eval_shape(gathered, w)
                continue
            for mine, theirs in zip(jax.jit(gathered)(w), whole, strict=True):
                assert_bits_equal(mine, theirs)


@executed
def test_dense_kernel_of_jax():
    """JAX's own, of bfloat16, which does not wait for all that arrives at its barriers."""
    x, w = random_floats(rng(), (200, 136)), random_floats(rng(1), (136, 130))
    options = {"name": "blackwell", "lenient": True, "inline_mgpu": "ignore"}
    assert_equal(multiplied(numbers("bfloat16", (1, 0)), x, w, **options), wanted(x, w.T))
