"""Products that read MX operands: the reference against float64, kernels against both."""

import contextlib
import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import (
    array_of,
    assert_equal,
    changed,
    check,
    compiled,
    float64,
    floats,
    integers,
    of,
    on_cuda,
    on_hopper,
    to_attend,
    wanted,
)
from helpers import (
    InHand,
    assert_bits_equal,
    by_kernel,
    call_attributes_in,
    poison_memory,
    stand_in,
    step_by_kernel,
)
from hypothesis import given
from hypothesis import strategies as st

import jax_mx
from jax_mx.formats.formats import BLOCK, FORMATS, MXFP4_E2M1, MXFP6_E3M2, MXFP8_E4M3, MXFP8_E5M2
from jax_mx.formats.windows import ROW
from jax_mx.launch import _ffi, store, targets
from jax_mx.launch.rule import Launch
from jax_mx.products import kernel_plans, kernels, primitives
from jax_mx.products.contraction import Contraction, Numbers
from jax_mx.quantizing import registry
from jax_mx.quantizing.facts.product_kernels import DIRECT, PRODUCTS
from jax_mx.quantizing.facts.signatures import signature_of

# --thorough runs all cases of a test, CI one of 2.
pytestmark = pytest.mark.sampled(4)

EPS = 2.0**-24  # of float32


# ---- operands ---
def at_random(rng, groups, total) -> np.ndarray:
    """Sizes of groups that add up to less than the total."""
    return np.diff(np.sort(rng.integers(0, total, groups)), prepend=0).astype(np.int32)


def parts(window, *multiples) -> list[int]:
    """Sizes of groups of wgrad: multiples of a window."""
    return [window * n for n in multiples]


GROUPS = [
    *([5, 0, 3], [0, 0, 0], [0, 11, 0], [4, 4, 4], [1, 1, 1], [100, 1, 1], [-3, 5, 2]),
]
MANY = [0, 300, 1, 0, 63, 700, 5]  # of 1100 rows


# ---- the reference, anywhere ---
@pytest.mark.parametrize("format", FORMATS.values(), ids=repr)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_reference_is_exact_where_sums_are(format, dtype):
    rng = np.random.default_rng(0)
    w = integers(rng, (7, 96), format)
    for shape in [(5, 96), (2, 3, 96)]:
        for result in ("float32", "bfloat16", "float16"):
            check(floats(rng, shape, dtype), w, dtype=result)
    check(floats(rng, (3, 5, 96), dtype), integers(rng, (3, 7, 96), format))


@pytest.mark.parametrize("format", FORMATS.values(), ids=repr)
def test_the_reference_of_blocks_along_the_free_axis(format):
    """Contracted lengths that no block divides, in one part and, of float16, in two."""
    rng = np.random.default_rng(23)
    w, x = integers(rng, (3, 13, 64), format), floats(rng, (11, 13))
    check(x, w, [5, 0, 3], free=True)
    check(floats(rng, (11, 13), jnp.float16, 1500), w, [4, 4, 4], free=True)
    check(floats(rng, (3, 5, 13)), w, free=True)


@pytest.mark.parametrize("sizes", GROUPS, ids=str)
def test_the_reference_of_groups(sizes):
    rng = np.random.default_rng(1)
    w = integers(rng, (3, 6, 64), MXFP8_E4M3)
    check(floats(rng, (11, 64)), w, sizes)
    check(integers(rng, (11, 64), MXFP8_E5M2), w, sizes, window=128)


def in_parts(x, w, count, **options):
    """The product of codes of w that lie in parts of K, one behind the other."""
    plan = kernel_plans.plan_of((x.format, w.format), window=ROW, **options)
    n, k = w.shape
    codes = w.values.reshape(n, count, k // count).swapaxes(0, 1)
    return primitives.by_parts(plan, x.values, x.scales, codes, w.scales)


def test_the_reference_of_parts_of_the_contracted_axis():
    rng = np.random.default_rng(3)
    x, w = (integers(rng, (n, 768), MXFP8_E4M3, window=ROW) for n in (11, 8))
    for count in (2, 3, 6):
        y = in_parts(x, w, count, dtype=jnp.dtype("bfloat16"), rows=11, tile=128)
        assert_equal(y, wanted(x, w), count)


PARTS = [(2, 0, 1), (0, 0, 0), (0, 4, 0), (1, 1, 1), (-1, 2, 1), (1, 9, 1), (0, 0, 3)]


@pytest.mark.parametrize("multiples", PARTS, ids=str)
def test_the_reference_of_groups_that_are_contracted(multiples):
    rng = np.random.default_rng(16)
    a, b = integers(rng, (5, 512), MXFP8_E4M3), integers(rng, (6, 512), MXFP8_E5M2)
    for dtype in ("float32", "bfloat16"):
        check(a, b, parts(128, *multiples), dtype=dtype, sums=True, window=128)


def poisoned_slots(rng, window, rows=5):
    """Two operands (rows, 4 windows), the second window of a and what no group has not numbers."""
    a, b = (integers(rng, (rows, 4 * window), MXFP8_E4M3, window=window) for _ in range(2))
    every = slice(None)
    bad = [((every, slice(3 * window, None)), 0x7F)]
    return changed(a, [((1, window), 0x7F), *bad]), changed(b, bad)


def test_nan_stays_in_the_group_that_is_contracted():
    a, b = poisoned_slots(np.random.default_rng(17), 128)
    want = wanted(a, b, parts(128, 1, 1, 1), sums=True)
    assert np.isnan(want).sum() == 5 and np.isnan(want[1, 1]).all()
    check(a, b, parts(128, 1, 1, 1), sums=True, window=128)


def test_batches_of_groups_that_are_contracted():
    rng = np.random.default_rng(18)
    a, b = integers(rng, (2, 5, 256), MXFP8_E4M3), integers(rng, (6, 256), MXFP8_E4M3)
    sizes = jnp.asarray([[128, 128], [0, 256]], jnp.int32)
    f = functools.partial(by_kernel, sums=True, window=128)
    got = jax.vmap(f, (0, None, 0))(a, b, sizes)
    want = [wanted(w_of(a, i), b, np.asarray(sizes[i]), sums=True) for i in range(2)]
    assert_equal(got, np.stack(want))
    assert f(w_of(a, 0), b, sizes[0, :0], implementation="xla").shape == (0, 5, 6)
    assert_equal(on_a_mesh(f)(w_of(a, 0), b, sizes[0]), want[0])


def on_a_mesh(f):
    """The function under shard_map."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())


def rows_of_groups(rng, sizes, m, n, rows, dtype=jnp.bfloat16, most=3):
    """Two operands of floats (rows, m) and (rows, n): not numbers in rows that no group has."""
    total = max(min(sum(max(size, 0) for size in sizes), rows), 0)
    pair = [floats(rng, (rows, columns), dtype, most) for columns in (m, n)]
    return [x.at[total:].set(jnp.nan) for x in pair]


@pytest.mark.thorough
def test_the_reference_of_floats_that_are_contracted():
    """Groups that begin anywhere, of either dtype; of MX arrays, blocks with their own scales."""
    rng = np.random.default_rng(23)
    for sizes, dtype in zip(GROUPS, ("bfloat16", "float16") * 4, strict=False):
        a, b = rows_of_groups(rng, sizes, 5, 8, 11, dtype)
        check(a, b, sizes, sums=True)
    check(*rows_of_groups(rng, [2, 9], 5, 8, 11, "float16"), [2, 9], dtype="float16", sums=True)
    a, b = floats(rng, (2, 3, 7, 16)), floats(rng, (2, 3, 7, 5))
    check(a, b, sums=True)
    check(a[0, 0], b[0, 0], sums=True)
    of_codes = [integers(rng, (5, 96), MXFP4_E2M1), integers(rng, (6, 96), MXFP8_E5M2)]
    check(*of_codes, [32, 0, 64], sums=True)
    check(integers(rng, (5, 96), MXFP6_E3M2), floats(rng, (96, 3)), [1, 93], sums=True)
    sums = functools.partial(by_kernel, sums=True)
    partial_sums = [sums(x, y) for x, y in zip(a[0], b[0], strict=True)]
    assert_equal(jax.vmap(sums)(a[0], b[0]), np.stack(partial_sums))
    assert_equal(jax.vmap(sums, (1, None))(a[0].swapaxes(0, 1), b[0, 0])[1], sums(a[0, 1], b[0, 0]))
    assert "while" not in str(jax.make_jaxpr(jax.vmap(sums))(a[0], b[0]))
    sizes = jnp.asarray([[1, 6], [4, 2]], jnp.int32)
    got = jax.vmap(sums, (0, 0, 0))(a[0, :2], b[0, :2], sizes)
    assert_equal(got[1], sums(a[0, 1], b[0, 1], sizes[1]))
    assert_equal(on_a_mesh(sums)(a[0, 1], b[0, 1], sizes[1]), got[1])


def test_nan_of_a_row_stays_in_its_group():
    a, b = rows_of_groups(np.random.default_rng(24), [3, 5], 4, 6, 11)
    a = a.at[3, 2].set(jnp.nan)
    check(a, b, [3, 5], sums=True)
    assert np.isnan(by_kernel(a, b, jnp.asarray([3, 5], jnp.int32), sums=True)).sum() == 6


def test_float16_is_not_cut_to_bfloat16():
    """All 11 bits of x count, also where XLA may leave out a cast and its way back."""
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.integers(-2000, 2000, (4, 64)), jnp.float16)
    check(x, integers(rng, (5, 64), MXFP4_E2M1))
    parts = jax.jit(primitives._in_parts)(x)
    assert parts.shape == (4, 128) and parts.dtype == jnp.bfloat16
    both = np.asarray(parts, np.float64)
    assert_equal(x, both[:, :64] + both[:, 64:])
    assert np.any(both[:, 64:])
    infinite = primitives._in_parts(jnp.full((1, 32), jnp.inf, jnp.float16))
    assert np.isinf(infinite[0, :32]).all() and not infinite[0, 32:].any()


EXTREMES = (0, 2.0**100), (254, 2.0**-100)  # scales, and factors that keep products normal
NAN_CODES = [(MXFP8_E4M3, 0x7F), (MXFP8_E4M3, 0xFF), (MXFP8_E5M2, 0x7D), (MXFP8_E5M2, 0x7C)]


def poisoned(rng, format, code):
    """An array of two matrices: a code of one row, and the scale of a block of another."""
    w = integers(rng, (2, 9, 96), format)
    return changed(w, [((0, 4, 33), code)], [((1, 7, 2), 255)])


@pytest.mark.parametrize("format,code", NAN_CODES)
def test_nan_stays_in_its_column_and_group(format, code):
    rng = np.random.default_rng(3)
    w = poisoned(rng, format, code)
    x = jnp.abs(floats(rng, (10, 96))) + 1
    want = wanted(x, w, [4, 5])
    special = ~np.isfinite(want)
    assert special.sum() == 4 + 5 and special[:4, 4].all() and special[4:9, 7].all()
    check(x, w, [4, 5])


def test_batches():
    rng = np.random.default_rng(4)
    w = integers(rng, (3, 5, 64), MXFP8_E4M3)
    x = floats(rng, (3, 4, 64))
    one, pair = w_of(w, 1), jnp.stack([x, 2 * x])
    assert_equal(jax.vmap(by_kernel)(x, w), wanted(x, w))
    assert_equal(jax.vmap(by_kernel, (0, None))(x, one), wanted(x, one))
    assert_equal(jax.vmap(by_kernel, (None, 0))(x[0], w), wanted(x[:1], w))
    assert_equal(jax.vmap(by_kernel, (1, None), 1)(x, one), wanted(x, one))
    assert_equal(jax.vmap(by_kernel, (0, None))(pair, w), wanted(pair, w))
    sizes = jnp.asarray([[2, 1, 4], [0, 3, 1]], jnp.int32)
    flat = floats(rng, (8, 64))
    got = jax.vmap(by_kernel, (None, None, 0))(flat, w, sizes)
    assert_equal(got, np.stack([wanted(flat, w, s) for s in np.asarray(sizes)]))
    both = integers(rng, (2, 8, 64), MXFP8_E4M3)
    fp8 = functools.partial(by_kernel, window=128)
    assert_equal(jax.vmap(fp8, (0, None))(both, one), wanted(both, one))
    jaxpr = jax.make_jaxpr(jax.vmap(by_kernel, (0, None)))(x, one)
    assert "12,64" in str(jaxpr) and "while" not in str(jaxpr)  # more rows, one call


def w_of(w, i):
    return jax.tree.map(lambda a: a[i], w)


def test_what_is_refused():
    """A derivative, everywhere; and the kernel where none runs."""
    rng = np.random.default_rng(6)
    x, w = floats(rng, (3, 64)), integers(rng, (4, 64), MXFP8_E4M3)
    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.grad(lambda x: by_kernel(x, w).sum())(x)
    if jax.devices()[0].platform == "cpu":
        with pytest.raises(NotImplementedError, match="runs on cuda"):
            on_cuda(by_kernel)(x, w)
        with pytest.raises(NotImplementedError, match="runs on cuda"):
            on_cuda(by_kernel)(w, w, jnp.zeros(2, jnp.int32), sums=True, window=128)


def test_where_there_are_kernels():
    def reason(chip, formats, rows=256, window=BLOCK, **options):
        plan = kernel_plans.plan_of(formats, jnp.dtype(jnp.bfloat16), rows, window, **options)
        return reason_of(chip, plan)

    def reason_of(chip, plan):
        return registry.candidates(plan, targets.platform_of(chip), [chip])[0].reason

    assert reason("sm_90", (MXFP8_E4M3,)) == ""
    assert reason("sm_90", (MXFP6_E3M2,), rows=3, free=True) == ""
    assert reason("sm_90", (MXFP8_E4M3, MXFP8_E5M2), window=256, tiles=True) == ""
    assert reason("sm_90", (MXFP8_E4M3, MXFP8_E5M2), window=ROW) == ""
    assert "no cutedsl kernel for sm_80, only for sm_90" in reason("sm_80", (MXFP4_E2M1,))
    assert "flydsl has no kernel" in reason("gfx950", (MXFP4_E2M1,))
    assert "windows of 64" in reason("sm_90", (MXFP8_E4M3,) * 2, window=64)
    eights = kernel_plans.wgrad_plan_of((MXFP8_E5M2, MXFP8_E4M3), jnp.dtype(jnp.bfloat16), 256)
    assert reason_of("sm_90", eights) == ""
    assert "wgrad_fp8: no cutedsl kernel" in reason_of("sm_100", eights)
    sixteen = kernel_plans.floats_plan_of(jnp.bfloat16, jnp.dtype(jnp.bfloat16))
    assert reason_of("sm_90", sixteen) == ""
    assert "wgrad: no cutedsl kernel for sm_100" in reason_of("sm_100", sixteen)
    assert len({product.name for product in PRODUCTS}) == len(PRODUCTS)


def test_the_call_of_a_kernel(monkeypatch):
    """The operands that are passed or absent, and the launch that a result's dtype takes."""
    dtypes = []

    def attributes(self, launch, scalars, carry):
        dtypes.append(launch)
        return store.Artifact.attributes(self, launch, scalars, carry)

    monkeypatch.setattr(store, "obstacle", lambda *_: "")
    monkeypatch.setattr(store, "get", stand_in)
    monkeypatch.setattr(InHand, "attributes", attributes)
    rng = np.random.default_rng(15)
    w, x = integers(rng, (2, 7, 64), MXFP4_E2M1), floats(rng, (9, 64))
    sizes = jnp.asarray([4, 5], jnp.int32)

    def line(*args, **options):
        traced = jax.jit(functools.partial(by_kernel, **options)).trace(*args)
        return call_attributes_in(traced.lower(lowering_platforms=("cuda",)).as_text())

    text = line(x, w, sizes)
    assert "(tensor<9x64xbf16>, tensor<2x7x32xui8>, tensor<2x7x2xf8E8M0FNU>, tensor<2xi32>)" in text
    assert "-> tensor<9x7xf32>" in text and "absent = dense<[4, 5, 6]>" in text
    assert {*dtypes} == {"float32"}
    text = line(x.astype(jnp.float16), w_of(w, 0), dtype="float16")
    assert "(tensor<9x128xbf16>, tensor<1x7x32xui8>" in text
    assert "absent = dense<[3, 4, 5, 6]>" in text
    assert dtypes[-1] == "float16" and "sharding_rule" not in text
    q = integers(rng, (9, 64), MXFP8_E5M2)
    sixteen = {"dtype": "bfloat16"}
    text = line(q, integers(rng, (7, 64), MXFP8_E4M3), window=128, **sixteen)
    assert "absent = dense<[4, 5, 6, 7]>" in text and dtypes[-1] == "bfloat16"
    sixteen["sums"] = True
    text = line(q, integers(rng, (7, 64), MXFP8_E4M3), sizes, window=128, **sixteen)
    assert "-> tensor<2x9x7xbf16>" in text and "absent = dense<5>" in text
    text = line(x, floats(rng, (9, 12)), sizes, **sixteen)
    assert "(tensor<9x64xbf16>, tensor<9x16xbf16>, tensor<2xi32>) -> tensor<2x64x16xbf16>" in text
    text = line(x, floats(rng, (9, 16)), **sixteen)
    assert "-> tensor<64x16xbf16>" in text and "absent = dense<[2, 3]>" in text


def test_every_product_has_its_launch_rule():
    """For each dtype of y entries as the handler takes them, one for any addresses at the end."""
    pytest.importorskip("cutlass")
    from jax_mx.products.cutedsl import matmul, matmul_fp8, products, wgrad, wgrad_fp8

    modules = {"matmul": matmul, "matmul_fp8": matmul_fp8, "wgrad_fp8": wgrad_fp8, "wgrad": wgrad}
    ours = [p for p in PRODUCTS if p.implementation == "cutedsl" and p.op in modules]
    for product in [p for p in ours if not p.activation]:  # only chains call these
        entries = modules[product.op].entries(product, "sm_90a")
        usage = {
            f"{product.name}_{i}": {"threads": (e.threads, 1, 1)} for i, e in enumerate(entries)
        }
        for result, json in products.launches(entries, usage).items():
            rule = Launch.from_json(json)
            attributes = rule.attributes("0" * 64, {})
            assert len(attributes["threads"]) == 3 * len(entries)
            count = len(signature_of(product.op).arrays)
            last = rule.entries[-1]
            size = jnp.dtype(result).itemsize
            assert len(last.align) == count and max(last.align) <= 4 and last.align[-1] == size
            assert not last.divide and not last.parameters and not last.shared
            for entry in rule.entries[:-1]:
                assert 1024 < entry.shared <= 227 * 1024, (product.name, entry.shared)
                names = [type(p).__name__ for p in entry.parameters]
                if not rule.maps:
                    assert not names
                    continue
                assert names.count("MapAt") == names.count("Padding") == 2
                assert names.count("Pointer") == count - 2
                assert names[-len(rule.scalars) :] == ["ScalarAt"] * len(rule.scalars)


def test_tiles_leave_few_thread_blocks_without_rows():
    """Two thread blocks share W where both have rows, or all but the last have."""
    both = (MXFP8_E4M3, MXFP8_E4M3)

    def rows_of(rows, window=128, tiles=True, grouped=False):
        return kernel_plans.plan_of(both, jnp.dtype(jnp.float32), rows, window, tiles, grouped).rows

    tile_rows = [rows_of(n) for n in (1, 128, 129, 256, 257, 300, 385, 2049, 16384, 16385, 16513)]
    assert tile_rows == [128, 128, 256, 256, 128, 128, 256, 128, 256, 256, 256]
    assert rows_of(2000 / 3) == 256 and rows_of(4096, ROW, False) == 256
    assert rows_of(4096, 256, False) == rows_of(4096, grouped=True) == 128
    (size,) = jax.export.symbolic_shape("n")
    assert rows_of(size) == 128


@pytest.mark.parametrize(
    ("x", "w", "free", "rows"),
    [
        *(((m, 96), (4096, 96), False, 128) for m in (256, 512)),
        *(((m, 96), (4096, 96), False, 256) for m in (513, 1024)),
        ((200, 96), (66 * 128, 96), False, 128),
        ((200, 96), (67 * 128, 96), False, 256),
        ((64, 96), (96, 96), False, 64),
        ((4, 256, 96), (4, 16 * 128, 96), False, 128),
        ((4, 256, 96), (4, 17 * 128, 96), False, 256),
        ((512, 96), (96, 32 * 128), True, 128),
        ((512, 96), (96, 64 * 128), True, 256),
    ],
)
def test_tiles_of_fewer_rows_take_all_multiprocessors(x, w, free, rows):
    """Where tiles of 256 rows would leave half of them idle."""
    batch = (0,) * (len(x) - 2)
    dims = (len(x) - 1,), (len(w) - 2 if free else len(w) - 1,)
    w = jax.eval_shape(jax_mx.quantize, jax.ShapeDtypeStruct(w, jnp.bfloat16))
    numbers = Numbers(dims, (batch, batch), jnp.dtype(jnp.bfloat16))
    plan = kernels.plan_of(Contraction(numbers, jax.ShapeDtypeStruct(x, jnp.bfloat16), w), None)
    assert (plan.op, plan.free, plan.rows) == ("matmul", free, rows)


# ---- on a GPU with kernels ---
@contextlib.contextmanager
def the_first_entry():
    """Fails where a kernel's slower entries serve calls."""
    before = _ffi.counters()["fallback_entries"]
    yield
    assert _ffi.counters()["fallback_entries"] == before


SHAPES = [  # M, N, K
    *((1, 1, 32), (3, 7, 96), (17, 130, 160), (64, 128, 2880), (129, 129, 64), (300, 264, 288)),
    *((257, 1000, 512), (1000, 384, 1056)),
    # Pairs of tiles, of thread blocks that share copies, and more stages than lie in shared memory.
    (700, 512, 1152),
    (1500, 4864, 128),  # several tiles for each thread block, more than a strip beside each other
    (1100, 1300, 64),  # of 128 rows 99 tiles, whose K thread blocks do not share: one has each
]


@on_hopper
@of("matmul")
def test_kernels_are_exact(variant):
    rng = np.random.default_rng(7)
    (format,) = variant.formats
    if variant.free:
        free_kernels_are_exact(rng, format, variant.rows)
        return
    if variant.activation:
        active_kernels_are_exact(rng, variant)
        return
    exact = on_cuda(tile=variant.rows, narrow=variant.narrow)
    for m, n, k in SHAPES:
        exact(floats(rng, (m, k)), integers(rng, (n, k), format))
    x, w = floats(rng, (65, 96), jnp.float16, 1500), integers(rng, (70, 96), format)
    for result in ("float32", "float16", "bfloat16"):
        exact(x / 64, w, dtype=result)
    for sizes in GROUPS:
        exact(floats(rng, (11, 128)), integers(rng, (3, 132, 128), format), sizes)
    w = integers(rng, (7, 200, 320), format)
    exact(floats(rng, (1100, 320)), w, MANY)
    exact(floats(rng, (7, 33, 320)), w)
    with the_first_entry() if variant.rows == 256 else contextlib.nullcontext():
        exact(floats(rng, (1100, 640)), integers(rng, (7, 768, 640), format), MANY)
        wide = integers(rng, (3, 4864, 128), format)
        exact(floats(rng, (700, 128)), wide, [300, 0, 399])
    with the_first_entry():  # pairs of tiles, or thread blocks that share K: of no groups
        for m, n, k in ((130, 512, 1152), (64, 768, 2944)):
            exact(floats(rng, (m, k)), integers(rng, (n, k), format))
    exact(floats(rng, (39, 320)), w_of(w, 0)[:131])
    if variant.rows == DIRECT:
        few_rows_are_exact(rng, format, variant.narrow)


def few_rows_are_exact(rng, format, narrow):
    """Where W goes from memory into registers: by that entry, whatever is in W and x."""
    exact = on_cuda(tile=DIRECT, narrow=narrow)
    with the_first_entry():
        for m, n, k in ((1, 1, 128), (2, 9001, 384), (3, 99, 14336), (4, 2200, 4096), (9, 33, 640)):
            exact(floats(rng, (m, k)), integers(rng, (n, k), format, exponents=1))
        w = integers(rng, (7, 200, 640), format)
        exact(floats(rng, (7, 3, 640)), w)
        exact(floats(rng, (3, 640), jnp.float16, 1500) / 64, w_of(w, 0), dtype="float16")
        x = np.array(floats(rng, (4, 640)).astype(jnp.float32))
        x[1, 77], x[3, [5, 600]] = np.nan, np.inf
        bad = changed(w_of(w, 1), [((5, 7), 0x7F)] * (format.bits == 8), [((199, 19), 255)])
        exact(jnp.asarray(x, jnp.bfloat16), bad)
        ones = integers(rng, (20, 128), format, most=1)
        for byte, power in EXTREMES:
            extreme = changed(ones, scales=[((slice(None), slice(None)), byte)])
            exact((floats(rng, (3, 128)).astype(jnp.float32) * power).astype(jnp.bfloat16), extreme)


@on_hopper
@of("normed")
def test_normed_kernels_are_exact(variant):
    """Rows of one magnitude have factors that are powers of two, so that products are exact."""
    rng, (format,), rows = np.random.default_rng(5), variant.formats, variant.rows
    step = functools.partial(step_by_kernel, product=variant)
    shapes = [(1, 6144, 4096), (3, 2200, 128), (rows, 2202, 4096), (1, 4098, 4096 * rows)]
    # Rows of some fill shared memory, which has room for no others.
    full = [(2, 40, 8192), (3, 34, 5376), (1, 2, 16384)]
    for m, n, k in [*shapes, *full, (1, 40, 6016), (rows, 34, 640), (2, 2, 256)]:
        x, signs = floats(rng, (m, k)), rng.integers(0, 2, (m, k)) * 8 - 4
        w = integers(rng, (n, k), format, exponents=1)
        weight = floats(rng, k)
        poison_memory()
        ways = [
            step(x, jnp.asarray(signs, x.dtype) - x, weight, w, implementation=implementation)
            for implementation in ("cutedsl", "xla")
        ]
        for got, want in zip(*ways, strict=True):
            assert_bits_equal(got, want, f"{m} x {n} x {k}")
    x = jnp.asarray(rng.normal(size=(2, rows, 640)), jnp.bfloat16)
    x = x.at[0, 1, 5].set(jnp.nan).at[1, 2, 7].set(jnp.inf).at[0, 3].set(1e-40)
    w = changed(integers(rng, (96, 640), format), scales=[((5, 3), 255)])
    weight = floats(rng, 640)
    ways = [step(*x, weight, w, implementation=way, eps=1e-5) for way in ("cutedsl", "xla")]
    (y, total), (want, sums) = ways
    assert_bits_equal(total, sums)
    y, want = (np.asarray(a.astype(jnp.float32)) for a in (y, want))
    np.testing.assert_allclose(y, want, rtol=0.02, atol=0.01 * np.nanstd(want))


@on_hopper
@of("rms_norm")
def test_norms_of_sums_have_their_bits(variant):
    """Rows that fill registers, fewer and more; numbers that are none, infinite and subnormal."""
    rng, step = np.random.default_rng(6), functools.partial(step_by_kernel, product=variant)
    for m, k in ((1, 8), (3, 264), (8, 4096), (16, 8192), (5, 8200), (2, 20008), (300, 640)):
        x, residual = (rng.normal(size=(m, k)).astype(np.float32) for _ in range(2))
        x[0, k // 2], x[-1, 3] = 1e-40, np.inf if m > 1 else 2.0**-70
        residual[m // 2, 1] = np.nan if m > 2 else -3.0
        weight = jnp.asarray(rng.normal(size=k), jnp.bfloat16)
        args = jnp.asarray(x, jnp.bfloat16), jnp.asarray(residual, jnp.bfloat16), weight
        poison_memory()
        ways = [step(*args, implementation=way, eps=1e-5) for way in ("cutedsl", "xla")]
        for got, want in zip(*ways, strict=True):
            assert_bits_equal(got, want, f"{m} x {k}")


@on_hopper
@of("attention")
def test_attention_sees_what_it_says(variant):
    """One position a head, in bits; all of them, within what bfloat16's weights allow."""
    rng, step = np.random.default_rng(7), functools.partial(step_by_kernel, product=variant)
    for heads, cache, positions in (
        (32, (1, 512, 8, 128), [163]),
        (32, (8, 512, 8, 128), [0, 15, 16, 127, 128, 300, 510, 511]),
        (6, (3, 70, 6, 64), [69, 70, -4]),
        (16, (2, 2100, 2, 128), [2099, 1024]),
        (8, (2, 1300, 1, 64), [1299, 3]),
        (21, (16, 40, 3, 64), range(16)),
        (3, (1, 5, 1, 128), [4]),
        (8, (70, 33, 4, 128), [*range(33), *range(33), 0, 7, 31, 32]),
    ):
        for exact in (True, False):
            args = to_attend(rng, heads, cache, np.array([*positions]), exact)
            poison_memory()
            scale = 0.5 if exact else cache[-1] ** -0.5
            ways = [step(*args, implementation=way, scale=scale) for way in ("cutedsl", "xla")]
            (y, keys, values), (want, its_keys, its_values) = ways
            assert_bits_equal(values, its_values, f"values of {cache}")
            if exact:
                assert_bits_equal(keys, its_keys, f"keys of {cache}")
                assert_bits_equal(y, want, f"{heads} heads of {cache}")
                continue
            for got, expected, atol in ((y, want, 0.02), (keys, its_keys, 0.0)):
                got, expected = (np.asarray(a.astype(jnp.float32)) for a in (got, expected))
                np.testing.assert_allclose(got, expected, rtol=2.0**-7, atol=atol)
    args = to_attend(rng, 8, (2, 100, 2, 64), np.array([60, 99]), False)
    args[1] = args[1].at[0, 17, 1, 5].set(jnp.nan)
    args[2] = args[2].at[1, 98, 0, 3].set(jnp.inf)
    (y, *_), (want, *_) = (step(*args, implementation=w, scale=0.1) for w in ("cutedsl", "xla"))
    assert np.isnan(np.asarray(want, np.float32)[0].reshape(8, 64)[4:]).all()
    np.testing.assert_array_equal(*(np.isfinite(np.asarray(a, np.float32)) for a in (y, want)))


def active_kernels_are_exact(rng, variant):
    """Where a product's halves are gates and ups."""
    (format,), rows = variant.formats, variant.rows
    step = functools.partial(step_by_kernel, product=variant)
    wide = (rows, 28672, 4096), (rows, 19200, 640)  # tiles that thread blocks do not share, and do
    for m, n, k in (*wide, (1, 2, 64), (rows - 3, 198, 640), (rows + 2, 66, 14336)):
        x, w = floats(rng, (m, k)), integers(rng, (n, k), format)
        poison_memory()
        ways = [step(x, w, implementation=way) for way in ("cutedsl", "xla")]
        assert_bits_equal(ways[0][0], ways[1][0], f"{m} x {n} x {k}")


def free_kernels_are_exact(rng, format, tile):
    """Where y's columns are blocks, and K is any number."""
    exact = on_cuda(free=True, tile=tile)
    more = [(130, 2880, 2880), (5, 1, 32), (256, 63, 4096), (300, 200, 288), (1500, 96, 4864)]
    for m, k, n in [*SHAPES, *more]:
        exact(floats(rng, (m, k)), integers(rng, (k, -n // 32 * -32), format, exponents=1))
    x, w = floats(rng, (65, 90), jnp.float16, 1500), integers(rng, (90, 96), format)
    for result in ("float32", "float16", "bfloat16"):
        exact(x / 64, w, dtype=result)
    for sizes in GROUPS:
        exact(floats(rng, (11, 132)), integers(rng, (3, 132, 160), format), sizes)
    w = integers(rng, (7, 200, 320), format)
    exact(floats(rng, (7, 33, 200)), w)
    x = floats(rng, (1100, 200))
    exact(x, w, MANY)
    with the_first_entry():
        exact(x, integers(rng, (7, 200, 768), format, exponents=1), MANY)
    x = jnp.abs(floats(rng, (300, 200))) + 1
    bad = changed(w, [((1, 7, 5), 0x7F)] * (format.bits == 8), [((3, 199, 2), 255)])
    exact(x, bad, [0, 100, 0, 190, 1, 0, 0])
    ones = integers(rng, (200, 320), format, most=1)
    for byte, power in EXTREMES:
        extreme = changed(ones, scales=[((slice(None), slice(None)), byte)])
        exact((x.astype(jnp.float32) * power).astype(jnp.bfloat16), extreme)


@on_hopper
@of("matmul_fp8")
def test_kernels_of_windows_are_exact(variant):
    rng = np.random.default_rng(8)
    if variant.parted:
        kernels_of_parts_are_exact(rng, variant)
        return
    windows = {"window": variant.window, "tiles": variant.tiles, "fast": variant.fast}
    exact = on_cuda(tile=variant.rows, **windows)

    def operands(*shapes):
        both = zip(shapes, variant.formats, (1, 128 if variant.tiles else 1), strict=True)
        return [integers(rng, s, f, window=variant.window, tile=t) for s, f, t in both]

    for m, n, k in SHAPES:
        exact(*operands((m, k), (n, k)))
    for result in ("float16", "bfloat16"):
        exact(*operands((65, 96), (256, 96)), dtype=result)
    for sizes in GROUPS:
        exact(*operands((11, 512), (3, 132, 512)), sizes)
    exact(*operands((1100, 320), (7, 200, 320)), MANY)
    exact(*operands((3, 600, 320), (3, 1000, 320)))  # tiles enough for many turns
    exact(*operands((4000, 256), (3000, 256)), dtype="bfloat16")
    exact(*operands((700, 128), (3, 4864, 128)), [300, 0, 399])  # more than a strip
    exact(*operands((1100, 320), (7, 201, 320)), MANY)


def kernels_of_parts_are_exact(rng, variant):
    """Parts of an odd number of copies, rows and columns off tiles, thread blocks that share."""
    for m, n, part, count, result in (
        (1, 8, 128, 2, "float32"),
        (130, 520, 384, 4, "float32"),
        (1500, 4864, 128, 3, "float16"),
        (257, 1000, 896, 8, "bfloat16"),
        (4000, 3000, 128, 2, "bfloat16"),
    ):
        x, w = (
            integers(rng, (rows, part * count), format, window=ROW)
            for rows, format in zip((m, n), variant.formats, strict=True)
        )
        plan = {"dtype": jnp.dtype(result), "rows": m}
        plan |= {"tile": variant.rows, "fast": variant.fast}
        product = functools.partial(in_parts, count=count, implementation="cutedsl", **plan)
        assert_equal(jax.jit(product)(x, w), wanted(x, w).astype(result), f"{m} {n} {part} {count}")


@on_hopper
@of("wgrad_fp8")
def test_kernels_of_groups_that_are_contracted_are_exact(variant):
    rng = np.random.default_rng(19)
    window = variant.window
    exact = on_cuda(sums=True, window=window)

    def operands(m, n, r):
        pair = zip((m, n), variant.formats, strict=True)
        return [integers(rng, (rows, r), f, window=window) for rows, f in pair]

    for multiples in PARTS:
        exact(*operands(11, 132, 4 * window), parts(window, *multiples))
    sizes = parts(window, 0, 3, 1, 0, 0, 4, 5, 1)
    # R that 512 divides and not, rows and columns off every tile and on them.
    for m, n, r in [(1, 1, 2), (129, 256, 15), (256, 264, 16), (300, 520, 9), (64, 1000, 24)]:
        for dtype in ("float32", "bfloat16", "float16"):
            exact(*operands(m, n, r * window), sizes, dtype=dtype)
    exact(*operands(130, 257, 96), [96])
    exact(*operands(300, 520, 16 * window), sizes)
    exact(*operands(130, 257, 2 * window + 32), parts(window, 1, 2, 1))
    exact(*operands(140, 300, 40 * window), parts(window, *at_random(rng, 70, 40)))
    exact(*poisoned_slots(rng, window, 300), parts(window, 1, 1, 1))


@on_hopper
@of("wgrad")
def test_kernels_of_floats_that_are_contracted_are_exact(variant):
    rng = np.random.default_rng(25)
    exact, dtype = on_cuda(sums=True), variant.floats
    for sizes in GROUPS:
        exact(*rows_of_groups(rng, sizes, 136, 264, 11, dtype), sizes)
    # Columns off every tile and on them, groups that begin and end anywhere, many of them empty.
    for m, n, rows in [(1, 1, 2), (129, 256, 700), (256, 264, 64), (304, 520, 999), (64, 1000, 40)]:
        for result in ("float32", "bfloat16", "float16"):
            sizes = [0, rows // 3, 1, 0, 0, rows // 4, 63, rows // 2, 5]
            exact(*rows_of_groups(rng, sizes, m, n, rows, dtype), sizes, dtype=result)
    sizes = at_random(rng, 70, 2000)
    exact(*rows_of_groups(rng, sizes, 144, 304, 2016, dtype), sizes)
    exact(floats(rng, (700, 2880), dtype), floats(rng, (700, 1024), dtype))
    exact(floats(rng, (3, 129, 136), dtype), floats(rng, (3, 129, 72), dtype))
    nan = floats(rng, (300, 136), dtype).at[100, 7].set(jnp.nan)
    exact(nan, floats(rng, (300, 264), dtype), [100, 1, 199])
    whole = floats(rng, (1 + 40 * 64,), dtype)  # begins where the copy engine cannot read
    exact(whole[1:].reshape(40, 64), floats(rng, (40, 72), dtype), [3, 30])


@on_hopper
def test_kernels_of_codes_that_are_contracted_are_exact():
    rng = np.random.default_rng(26)
    for formats in [(MXFP8_E4M3, MXFP8_E5M2), (MXFP4_E2M1,) * 2, (MXFP6_E3M2, MXFP4_E2M1)]:
        a, b = (integers(rng, (n, 512), f) for n, f in zip((136, 296), formats, strict=True))
        check(a, b, [96, 0, 32, 320], "cutedsl", sums=True)
        check(a, b, None, "cutedsl", "bfloat16", sums=True)


@on_hopper
def test_sizes_of_contracted_groups_that_no_window_divides_do_no_harm():
    """They give other sums; every element is written, and nothing else."""
    rng = np.random.default_rng(20)
    a, b = (integers(rng, (140, 1024 + 96), MXFP8_E4M3, window=256) for _ in range(2))
    for window in (128, 256):
        for r in (1024, 1024 + 96):
            f = on_cuda(compiled, sums=True, window=window, dtype="bfloat16")()
            for sizes in ([1, 700, 0, 2000], [100, 100, 100, 724], [2**31 - 1, 5, -7, 2**31 - 1]):
                poison_memory()
                y = f(a[:, :r], b[:, :r], jnp.asarray(sizes, jnp.int32))
                assert np.isfinite(np.asarray(y, np.float32)).all(), (window, r, sizes)


@on_hopper
@pytest.mark.parametrize("format,code", NAN_CODES)
def test_kernels_keep_nan_in_its_column(format, code):
    rng = np.random.default_rng(9)
    x = jnp.abs(floats(rng, (10, 96))) + 1
    w = poisoned(rng, format, code)
    check(x, w, [4, 5], "cutedsl")
    q = integers(rng, (10, 96), MXFP8_E4M3, window=128)
    q = changed(q, codes=[((slice(None), 33), 0x38)])  # 1: an infinity times 0 is NaN
    bad = (np.asarray(w.scales.view(jnp.uint8)) == 255).any(-1, keepdims=True)  # a whole row's
    w = changed(w, scales=[(..., np.where(bad, 255, 127))])
    check(q, w, [4, 5], "cutedsl", window=128)


@on_hopper
def test_the_smallest_and_largest_scales():
    """Scales 2^-127 and 2^127, codes that are subnormal: exact."""
    rng = np.random.default_rng(10)
    for format in FORMATS.values():
        w = integers(rng, (140, 64), format, most=1)
        for byte, power in EXTREMES:
            extreme = changed(w, scales=[((slice(None), slice(None)), byte)])
            for rows in (7, 20):
                x = floats(rng, (rows, 64)).astype(jnp.float32) * power
                check(x.astype(jnp.bfloat16), extreme, implementation="cutedsl")
    w = changed(integers(rng, (8, 32), MXFP8_E4M3), [((slice(None), slice(None)), 1)])
    check(floats(rng, (3, 32)), w, implementation="cutedsl")  # 2^-9


@on_hopper
def test_not_a_number_in_x_stays_in_its_row():
    rng = np.random.default_rng(11)
    w = integers(rng, (3, 132, 128), MXFP8_E4M3)
    x = np.array(floats(rng, (300, 128)).astype(jnp.float32))
    x[[7, 120], [3, 127]] = np.nan, np.inf
    x[299] = np.nan  # of no group
    x = jnp.asarray(x, jnp.bfloat16)
    check(x, w, [100, 0, 190], "cutedsl")
    check(x[1:10], w, [6, 0, 2], implementation="cutedsl")
    check(x[1:10, :96], w_of(w, 1)[:, :96], implementation="cutedsl")


@on_hopper
def test_operands_that_begin_anywhere():
    """A slice of a larger array may lie where the copy engine cannot read; another entry does."""
    rng = np.random.default_rng(12)
    w = integers(rng, (40, 64), MXFP8_E4M3)
    flat = floats(rng, (1 + 20 * 64,))

    def cut(flat, w):
        return by_kernel(flat[1:].reshape(20, 64), w)

    before = _ffi.counters()["fallback_entries"]
    assert_equal(jax.jit(cut)(flat, w), wanted(flat[1:].reshape(20, 64), w))
    print("fallback entries", _ffi.counters()["fallback_entries"] - before)


@on_hopper
def test_graphs_are_replayed_with_other_sizes():
    """One program, many group sizes in the same buffer; each product is that of its sizes."""
    rng = np.random.default_rng(13)
    w = integers(rng, (5, 136, 160), MXFP4_E2M1)
    x = floats(rng, (600, 160))

    # Graphs of one call, too.
    @functools.partial(jax.jit, compiler_options={"xla_gpu_graph_min_graph_size": 1})
    def twice(x, w, sizes):
        y = by_kernel(x, w, sizes, implementation="cutedsl")
        return y, by_kernel(x + 1, w, sizes[::-1])

    before = _ffi.counters()
    for _ in range(40):
        sizes = at_random(rng, 5, 650)
        y, more = twice(x, w, jnp.asarray(sizes))
        assert_equal(y, wanted(x, w, sizes), sizes)
        assert_equal(more, wanted(x + 1, w, sizes[::-1]), sizes)
    counts = {name: count - before[name] for name, count in _ffi.counters().items()}
    assert counts["captured"] > 0, counts
    assert counts["launches"] < 40, counts  # a graph that is replayed launches no kernel by us


KINDS = {  # of kernels: the weights' format, and how they are multiplied
    "mxfp8_e4m3": (MXFP8_E4M3, {}),
    "mxfp4_e2m1": (MXFP4_E2M1, {}),
    "free": (MXFP8_E4M3, {"free": True}),
    "fp8 128 128": (MXFP8_E4M3, {"window": 128, "tiles": True}),
    "fp8 128 1": (MXFP8_E4M3, {"window": 128}),
    "fp8 256 1": (MXFP8_E4M3, {"window": 256}),
    "fp8 row 1": (MXFP8_E4M3, {"window": ROW}),
}
each_kind = pytest.mark.parametrize("name", KINDS)


def of_kind(name, n, k, groups=None, seed=31):
    """Weights, what multiplies rows by them, and what makes rows."""
    rng = np.random.default_rng(seed)
    format, format_options = KINDS[name]
    lead, tile = () if groups is None else (groups,), 128 if "tiles" in format_options else 1
    w = integers(rng, (*lead, n, k), format, window=format_options.get("window", BLOCK), tile=tile)

    def rows_of(rows):
        if "window" in format_options:
            return integers(rng, (rows, k), MXFP8_E4M3, window=format_options["window"])
        return floats(rng, (rows, n if name == "free" else k))

    return w, on_cuda(by_kernel, **format_options), rows_of


def want_of(name, x, w, sizes=None):
    return wanted(x, w, sizes, free=name == "free")


@on_hopper
@each_kind
def test_every_number_of_rows(name):
    """From 0 to 300, n and k off every tile; no row of another product is written."""
    w, product, rows_of = of_kind(name, n=160, k=352)
    x = rows_of(300)
    want = want_of(name, x, w)
    for first in range(0, 301, 43):
        some = range(first, first + 43)
        several = jax.jit(lambda x, w, some=some: [product(x[:m], w) for m in some])
        poison_memory()
        for m, y in zip(some, several(x, w), strict=True):
            assert_equal(y, want[:m], f"{name}: {m} rows")


@on_hopper
@each_kind
def test_any_sizes_of_groups(name):
    """Empty groups, groups of one row, all rows in one group, sums below and above the rows."""
    w, product, rows_of = of_kind(name, n=160, k=352, groups=6)
    xs, product = {rows: rows_of(rows) for rows in (20, 200)}, jax.jit(product)  # two kernels
    few = st.sampled_from([0, 0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200])
    sizes = st.lists(st.one_of(few, st.integers(0, 260)), min_size=6, max_size=6)

    @given(sizes=sizes, rows=st.sampled_from([*xs]))
    def run(sizes, rows):
        y = product(xs[rows], w, jnp.asarray(sizes, jnp.int32))
        assert_equal(y, want_of(name, xs[rows], w, sizes), f"{name}: {sizes}, {rows} rows")

    run()


@on_hopper
@each_kind
@pytest.mark.parametrize("rows", [20, 1500])
def test_512_groups(name, rows):
    w, product, rows_of = of_kind(name, n=96, k=160 if "fp8" not in name else 256, groups=512)
    x = rows_of(rows)
    rng = np.random.default_rng(33)
    for total in (rows, rows // 2, 0):
        sizes = at_random(rng, 511, total + 1)
        sizes = np.append(sizes, total - sizes.sum()).astype(np.int32)
        poison_memory()
        y = jax.jit(product)(x, w, jnp.asarray(sizes))
        assert_equal(y, want_of(name, x, w, sizes), f"{name}: {total} of {rows} rows")


@on_hopper
def test_eight_threads():
    """Each has products and group sizes of its own; all threads share kernels and streams."""

    def one(number):
        name = [*KINDS][number % len(KINDS)]
        rows = 40 + 37 * number
        w, product, rows_of = of_kind(name, 96 + 32 * number, 256, groups=5, seed=number)
        x, product = rows_of(rows), jax.jit(product)
        rng = np.random.default_rng(number)
        for _ in range(25):
            sizes = at_random(rng, 5, rows + 1)
            got = product(x, w, jnp.asarray(sizes))
            assert_equal(got, want_of(name, x, w, sizes), f"thread {number}, {name}: {sizes}")
        return number

    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(one, range(8))] == [*range(8)]


@on_hopper
@pytest.mark.parametrize("format", [MXFP8_E4M3, MXFP4_E2M1, MXFP6_E3M2], ids=repr)
def test_random_floats_are_within_the_bound(format):
    """The bound from float64: rounding y, and eps32 * k * sum |a||b|."""
    rng = np.random.default_rng(14)
    m, n, k = 500, 300, 4096
    every = jnp.asarray(rng.normal(size=(m, k)), jnp.bfloat16)
    w = jax_mx.quantize(jnp.asarray(rng.normal(size=(n, k)), jnp.float32), format)
    for x in (every, every[:8]):
        within_the_bound(x, w)


@on_hopper
def test_random_floats_that_are_contracted_are_within_the_bound():
    rng = np.random.default_rng(27)
    a, b = (jnp.asarray(rng.normal(size=(4096, n)), jnp.bfloat16) for n in (264, 520))
    within_the_bound(a, b, sums=True)


def within_the_bound(x, w, **options):
    y = by_kernel(x, w, implementation="cutedsl", **options)
    a, b = (float64(q.mT if options else q) for q in (x, w))
    bound = EPS * a.shape[-1] * (np.abs(a) @ np.abs(b).T)
    assert (np.abs(np.asarray(y, np.float64) - a @ b.T) <= bound).all()


def ones_scaled(values) -> jax_mx.MXArray:
    """These numbers as e4m3 codes, all scales 1."""
    scales = np.full((*values.shape[:-1], values.shape[-1] // BLOCK), 127, np.uint8)
    return array_of(jnp.asarray(values, MXFP8_E4M3.storage), scales, MXFP8_E4M3)


def pairs_for(rng, k):
    """(What they are, two matrices): their sums need few bits, many, and as many as can be lost."""
    normal = [np.clip(100 * rng.normal(size=(128, k)), -448, 448) for _ in range(2)]
    yield "normal", *normal
    yield "one sign", *map(np.abs, normal)
    for period, bits in ((32, 13), (128, 14), (256, 14), (256, 13)):
        small = (1.875 if bits == 13 else 1) * 2.0 ** -np.array([bits // 2, bits - bits // 2])
        first = np.where(np.arange(k) % period == 0, 1, small[:, None])
        yield f"one of {period} large", *np.broadcast_to(first[:, None], (2, 128, k))


def fp8_errors(product, k):
    """The largest errors of products' elements, relative to sum |a||b|."""
    errors = {}
    for name, a, b in pairs_for(np.random.default_rng(34), k):
        a, b = map(ones_scaled, (a, b))
        y = np.asarray(product(a, b), np.float64)
        a, b = float64(a), float64(b)
        off = np.abs(y - a @ b.T) / (np.abs(a) @ np.abs(b).T)
        errors[name] = max(errors.get(name, 0), off.max())
    return errors


@on_hopper
@pytest.mark.parametrize("k", [128, 256, 1024, 8192, 65536])
@pytest.mark.parametrize("window", [128, 256, ROW])
def test_the_error_of_fp8_tensor_cores(window, k):
    """The bounds in `kernel_plans` hold for each kernel that sums on them."""
    ways = [on_cuda(by_kernel, window=window)]
    if window != ROW:
        ways.append(on_cuda(by_kernel, window=window, tiles=True))
        sums, whole = on_cuda(by_kernel, window=window, sums=True), jnp.asarray([k], jnp.int32)
        ways.append(lambda a, b: sums(a, b, whole)[0])
    summed = 256 if window == ROW else window
    for way in ways:
        if k % summed:
            continue
        errors = fp8_errors(jax.jit(way), k)
        print(window, k, {name: f"{error:.1e}" for name, error in errors.items()})
        assert errors["normal"] <= 4e-4, errors
        assert errors["one sign"] <= 1.5e-5 * summed, errors
        assert max(errors.values()) <= summed * 2.0**-13, errors
        assert max(errors.values()) > 2.0**-12, "what is said of the worst case is too much"


# ---- many launches, large arrays ---
def constant(shape, format=MXFP8_E4M3) -> jax_mx.MXArray:
    """Ones, all scales 1; made on the device."""
    byte = {MXFP8_E4M3: 0x38, MXFP4_E2M1: 0x22}[format]
    stored = jnp.full((*shape[:-1], shape[-1] // format.codes_per_byte), byte, jnp.uint8)
    scales = jnp.full((*shape[:-1], shape[-1] // BLOCK), 127, jnp.uint8)
    return array_of(stored.view(format.storage), scales, format)


def power(exponents) -> jax.Array:
    """2^exponents, exactly."""
    return jax.lax.bitcast_convert_type((127 + exponents.astype(jnp.int32)) << 23, jnp.float32)


def scaled(q: jax_mx.MXArray, exponents) -> jax_mx.MXArray:
    """An array of constants, times 2^exponents of each block."""
    scales = jnp.broadcast_to(127 + jnp.asarray(exponents), q.scales.shape).astype(jnp.uint8)
    return array_of(q.values, scales, q.format)


def random_sizes(key, groups, total, step=1):
    """Sizes of groups that add up to about `total`, less or more; many are empty."""
    cuts, empty = jax.random.split(key)
    ends = jnp.sort(jax.random.randint(cuts, (groups,), 0, total // step * 9 // 8))
    ends = jnp.where(jax.random.bernoulli(empty, 0.3, (groups,)), 0, ends)
    ends = jax.lax.cummax(ends) * step
    return jnp.diff(ends, prepend=0).astype(jnp.int32)


def of_rows(product, rows, made_of, shape=(136, 256), format=MXFP8_E4M3):
    """A product of ones and matrices of 2^group, and the expected result for sizes of groups."""
    groups = 9
    w = scaled(constant((groups, *shape), format=format), jnp.arange(groups)[:, None, None])

    def both(sizes):
        ends = jnp.cumsum(sizes)
        group = jnp.searchsorted(ends, jnp.arange(rows), side="right")
        want = jnp.where(group < groups, made_of(power(group)), jnp.float32(0))
        y = product(w, sizes)
        return y, jnp.broadcast_to(want[:, None], y.shape)

    return both, functools.partial(random_sizes, groups=groups, total=rows)


def of_sums(window):
    """A wgrad of ones and 2^(number of the window, modulo 5), and what it is.

    Windows of 1 are rows of floats, which have many tiles for a thread block.
    """
    groups, m, n, r = (150, 264, 520, 4000) if window == 1 else (11, 140, 264, 20 * window)
    exponents = jnp.arange(r) // window % 5
    powers = power(exponents)
    if window == 1:
        a = jnp.ones((r, m), jnp.bfloat16)
        b = jnp.broadcast_to(powers[:, None], (r, n)).astype(jnp.bfloat16)
    else:
        a, b = constant((m, r)), scaled(constant((n, r)), exponents[::BLOCK])
    f = on_cuda(by_kernel, sums=True, window=BLOCK if window == 1 else window)

    def both(sizes):
        before = jnp.concatenate([jnp.zeros(1), jnp.cumsum(powers)])
        ends = jnp.minimum(jnp.cumsum(sizes), r)
        want = before[ends] - before[jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])]
        y = f(a, b, sizes)
        return y, jnp.broadcast_to(want[:, None, None], y.shape)

    return both, functools.partial(random_sizes, groups=groups, total=r, step=window)


def launches(name):
    if name.startswith("wgrad"):
        return of_sums(1 if "floats" in name else 128)
    rows = 40 if name == "few rows" else 700
    # Kernels that share copies have more stages than fit at once, and more tiles than clusters.
    shape = n, k = (2048, 1024) if "shared" in name else (136, 256)
    options = {"tile": 256} if "shared" in name else {}
    if name.startswith("fp8"):
        options |= {"window": ROW if "rows" in name else 256, "tiles": "tiles" in name}
        product = on_cuda(functools.partial(by_kernel, constant((rows, k))), **options)
        return of_rows(product, rows, lambda p: k * p, shape)
    deep, options["free"] = (n, True) if name == "free" else (k, False)
    ones = jnp.ones((rows, deep), jnp.bfloat16)
    format = MXFP4_E2M1 if "fp4" in name else MXFP8_E4M3
    product = on_cuda(functools.partial(by_kernel, ones), **options)
    return of_rows(product, rows, lambda p: deep * p, shape, format)


@on_hopper
@pytest.mark.parametrize(
    "name",
    [
        *("few rows", "rows", "shared", "fp4 shared", "free"),
        *("fp8", "fp8 rows", "fp8 rows shared", "fp8 tiles shared", "wgrad", "wgrad of floats"),
    ],
)
def test_many_launches_of_random_sizes(name, request):
    """20,000 of them, or 200: none hangs, every element of every result is right."""
    both, sizes_of = launches(name)
    count = 20_000 if request.config.getoption("--thorough") else 200

    def once(i, bad):
        got, want = both(sizes_of(jax.random.fold_in(jax.random.key(len(name)), i)))
        return bad + jnp.any(got != want).astype(jnp.int32)

    run = jax.jit(lambda: jax.lax.fori_loop(0, count, once, jnp.int32(0)))
    assert run() == 0


@on_hopper
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["y", "x", "w", "gradient"])
def test_two_to_the_31(name):
    """Arrays of more than 2^31 elements: their last ones are where they belong."""
    wide = on_cuda(compiled)()  # results in float32
    fp8 = on_cuda(compiled, window=128)()
    if name == "gradient":
        groups, m, n = 40, 8192, 8192
        a, b = constant((m, groups * 128)), constant((n, groups * 128))
        b = scaled(b, jnp.arange(groups).repeat(4))
        sizes = jnp.full((groups,), 128, jnp.int32)
        y = on_cuda(compiled, sums=True, window=128, dtype="bfloat16")()(a, b, sizes)
        assert y.size > 2**31
        assert (y.astype(jnp.float32) == 128 * power(jnp.arange(groups))[:, None, None]).all()
        return
    shapes = {"y": (70_000, 32_768, 128), "x": (550_000, 64, 4096), "w": (600, 2048, 4096)}
    rows, n, k = shapes[name]
    if name == "w":
        groups = 300
        w = scaled(constant((groups, n, k)), (jnp.arange(groups) % 100)[:, None, None])
        sizes = jnp.zeros(groups, jnp.int32).at[jnp.array([0, 250, 299])].set(200)
        want = k * power(jnp.repeat(jnp.array([0, 50, 99]), 200))[:, None]
        assert (fp8(constant((rows, k)), w, sizes) == want).all()
        assert (wide(jnp.ones((rows, k), jnp.bfloat16), w, sizes) == want).all()
        return
    w = scaled(constant((n, k)), (jnp.arange(n) % 3)[:, None])
    exponents = jnp.arange(rows) % 7
    want = k * power(exponents[:, None] + jnp.arange(n) % 3)
    powers = power(exponents)[:, None]
    for x, options in (
        (scaled(constant((rows, k)), exponents[:, None]), {"window": 128}),
        (jnp.broadcast_to(powers, (rows, k)).astype(jnp.bfloat16), {}),
    ):
        y = on_cuda(compiled, dtype="bfloat16", **options)()(x, w)
        assert max(y.size, rows * k) > 2**31
        assert (y.astype(jnp.float32) == want).all()
