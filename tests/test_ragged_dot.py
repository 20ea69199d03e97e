"""Grouped products: `ragged_dot` and what serves it, against loops over groups."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits_equal, assert_refused, normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from moe_oracle import Products

import jax_mx
from jax_mx import BF16, MXFP4, MXFP8, Hadamard, Product, Recipe
from jax_mx.products import decide, kernels
from jax_mx.products.contraction import ROWS as BY_ROWS
from jax_mx.products.contraction import SUMS, Contraction, Numbers
from jax_mx.products.implementations import IMPLEMENTATIONS
from jax_mx.products.kernel_plans import ROWS
from jax_mx.products.multiply import multiplied

SIZES = {
    "anywhere": [5, 0, 33, 1, 20],
    "none": [0, 0, 0, 0, 0],
    "all in one": [0, 70, 0, 0, 0],
    "more than there are": [30, 30, 30, 5, 5],
    "less than none": [4, -3, 30, -1, 20],
}


def integers(shape, seed=0):
    """Small ones, whose products and sums are exact in every format."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def by_group(sizes, rows):
    """(group, its rows), as far as there are rows."""
    start = 0
    for group, size in enumerate(np.maximum(sizes, 0)):
        yield group, slice(start, min(start + size, rows))
        start = min(start + size, rows)


def over_groups(lhs, rhs, sizes, dtype, axes=(-1, -1), groups=BY_ROWS, align=1, by=None):
    """The contraction of two operands over groups."""
    left, right = axes
    dims = ((lhs.ndim + left,), (rhs.ndim + right,))
    numbers = Numbers(dims, ((), ()), jnp.dtype(dtype), groups, align, implementation=by)
    return Contraction(numbers, lhs, rhs, sizes)


# ---- the primitive, in every order of axes ---
@pytest.mark.parametrize("align", [1, 32, 128])
@pytest.mark.parametrize("implementation", ["xla", "dequantize"])
@pytest.mark.parametrize("axes", [(-1, -2), (-1, -1), (-2, -1)])
def test_grouped_products_are_exact(align, implementation, axes):
    sizes = np.array([3, 0, 2, 1, 0]) * align
    rows, k, n = int(sizes.sum()) + 2 * align, 32, 48
    x, w, z = integers((rows, k)), integers((5, k, n), 1), integers((rows, n), 2)
    y, sums = np.zeros((rows, n)), np.zeros((5, k, n))
    for group, part in by_group(sizes, rows):
        y[part] = x[part] @ w[group]
        sums[group] = x[part].T @ z[part]
    x[sizes.sum() :] = np.nan  # belong to no group
    typed = jnp.asarray(sizes, jnp.int32), jnp.float32
    options = {"axes": axes, "align": align, "by": implementation}
    a = x if axes[0] == -1 else x.T
    b = w if axes[1] == -2 else w.swapaxes(1, 2)
    if implementation == "xla":  # lax.ragged_dot multiplies NaNs with zeros
        assert_bits_equal(multiplied(over_groups(a, b, *typed, **options)), y.astype(np.float32))
    a = x if axes[0] == -2 else x.T
    b = z if axes[1] == -2 else z.T
    a = np.nan_to_num(a) if implementation == "dequantize" else a
    assert_bits_equal(
        multiplied(over_groups(a, b, *typed, groups=SUMS, **options)),
        sums.astype(np.float32),
    )


def test_a_group_keeps_its_nan():
    x, w = integers((64, 32)), integers((2, 32, 32), 1)
    w[1, 3, 5] = np.nan
    sizes = jnp.asarray([32, 32], jnp.int32)
    y = np.asarray(multiplied(over_groups(x, w, sizes, jnp.float32, axes=(-1, -2))))
    assert np.isnan(y[32:, 5]).all()
    assert np.isnan(y).sum() == 32


def test_nothing_is_contracted():
    y = jax_mx.ragged_dot(jnp.ones((5, 0)), jnp.ones((2, 0, 7)), jnp.array([2, 3], jnp.int32))
    np.testing.assert_array_equal(y, np.zeros((5, 7)))


def test_export_of_any_number_of_rows():
    """A layer that serves batches of any size, its weights inside."""
    rng, (rows,) = np.random.default_rng(0), jax.export.symbolic_shape("b")
    w1, w2 = (jnp.asarray(rng.normal(size=(3, 64, n)), jnp.bfloat16) for n in (128, 64))

    def f(x, experts, weights):
        y = jax_mx.moe(x, experts, weights, w1, w2)
        return y, jax_mx.ragged_dot(x, w1, jnp.array([2, 0, 9], jnp.int32))

    exported = jax.export.export(jax.jit(f), disabled_checks=jax_mx.DISABLE_EXPORT_CHECKS)(
        jax.ShapeDtypeStruct((rows, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((rows, 2), jnp.int32),
        jax.ShapeDtypeStruct((rows, 2), jnp.float32),
    )
    x = jnp.asarray(rng.normal(size=(7, 64)), jnp.bfloat16)
    experts = np.arange(14, dtype=np.int32).reshape(7, 2) % 3
    operands = x, experts, np.ones((7, 2), np.float32)
    for got, want in zip(exported.call(*operands), jax.jit(f)(*operands), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.usefixtures("without_code")
def test_any_number_of_rows_by_kernels():
    rows = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b"), 64), jnp.bfloat16)
    w, sizes = jnp.ones((3, 64, 32), jnp.bfloat16), jnp.array([2, 0, 9], jnp.int32)
    f = jax.jit(lambda x: jax_mx.ragged_dot(x, w, sizes))
    options = {"platforms": ["cuda"], "disabled_checks": jax_mx.DISABLE_EXPORT_CHECKS}
    assert "quantize_last_bfloat16" in jax.export.export(f, **options)(rows).mlir_module()


def test_without_rows():
    x, w, sizes = np.zeros((0, 32), np.float32), integers((2, 32, 8)), jnp.zeros(2, jnp.int32)
    y = multiplied(over_groups(x, w, sizes, jnp.float32, axes=(-1, -2)))
    assert y.shape == (0, 8)


# ---- what serves a call on which chip ---
def served(lhs, rhs, chip, sums=False, align=128, axes=(-1, -1), dtype=jnp.bfloat16):
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    product = over_groups(lhs, rhs, sizes, dtype, axes, SUMS if sums else BY_ROWS, align)
    platform = "cuda" if chip.startswith("sm") else "rocm"
    return decide.decided(product, platform, [chip]).name


def test_what_serves_what():
    floats = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    stack = jax.ShapeDtypeStruct((4, 128, 256), jnp.bfloat16)

    def mx(x, **options):
        return jax.eval_shape(lambda x: jax_mx.quantize(x, **options), x)

    wide = mx(floats, window=128)
    assert served(floats, stack, "sm_90") == "pallas"
    assert served(floats, mx(stack), "sm_90") == "cutedsl"
    assert served(wide, mx(stack, window=(128, 128)), "sm_90") == "cutedsl"
    # The gradient of frozen weights: contracted along the axis that blocks do not run along.
    thin = jax.ShapeDtypeStruct((512, 128), jnp.bfloat16)
    for frozen in (mx(stack), mx(stack, block=(32, 32))):
        assert served(thin, frozen, "sm_90", axes=(-1, -2)) == "cutedsl"
    assert served(thin, mx(stack, axis=-2), "sm_90", axes=(-1, -2)) == "pallas"
    across = (
        jax.ShapeDtypeStruct((256, 512), jnp.bfloat16),
        jax.ShapeDtypeStruct((128, 512), jnp.bfloat16),
    )
    assert served(*across, "sm_90", sums=True) == "cutedsl"
    assert served(*(mx(x) for x in across), "sm_90", sums=True) == "cutedsl"
    assert served(*(mx(x, window=128) for x in across), "sm_90", sums=True) == "cutedsl"
    # Groups that begin inside of a window; float32, which Pallas' kernels do not take.
    assert served(*(mx(x, window=256) for x in across), "sm_90", sums=True) == "cutedsl"
    floats = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in across]
    assert served(*floats, "sm_90", sums=True) == "dequantize"
    assert served(wide, mx(stack, window=128), "gfx950") == "flydsl"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("lhs", "rhs", "axes"),
    [
        (None, {}, (-1, -1)),
        (None, {"block": (32, 32)}, (-1, -2)),
        ({}, {}, (-1, -1)),
        ({}, {"block": (32, 32)}, (-1, -2)),
        ({"window": 256}, {"window": 256}, (-1, -1)),
        ({"window": 128}, {"window": (128, 128)}, (-1, -2)),
    ],
)
def test_kernels_of_any_tiling_take_any_arrangement(lhs, rhs, axes, monkeypatch):
    """The steps before and after the kernel, with the reference in its place."""
    x, w = (
        jnp.asarray(integers(s, i), jnp.bfloat16) for i, s in enumerate([(96, 256), (4, 256, 256)])
    )
    pair = x if lhs is None else jax_mx.quantize(x, **lhs), jax_mx.quantize(w, **rhs)
    sizes = np.array([3, 0, 60, 20], np.int32)
    product = over_groups(*pair, jnp.asarray(sizes), np.float32, axes)
    rows = {name: IMPLEMENTATIONS[name] for name in ["cutedsl", *map(kernels.name_of, ROWS)]}
    served = [name for name, row in rows.items() if row.support(product, ["sm_90"])]
    want = by("xla", product)
    monkeypatch.setattr(kernels, "NAME", "xla")
    for name in served:
        assert_bits_equal(by(name, product), want)
    assert served[-1] == "cutedsl_r256" or lhs == {"window": 256}


def by(name, product):
    """The product by an implementation."""
    row = IMPLEMENTATIONS[name]
    return row.run(product, row.support(product, ["sm_90"]))


@pytest.mark.parametrize("axes", [(-2, -2), (-1, -2), (-1, -1)])
def test_kernels_sum_floats_of_any_arrangement(axes, monkeypatch):
    """The steps before the kernel, with the reference in its place."""
    sizes = np.array([3, 0, 60, 1], np.int32)
    floats = [integers((96, n), n) for n in (24, 16)]
    sides = [x if axis == -2 else x.T for x, axis in zip(floats, axes, strict=True)]
    windows = [jax_mx.quantize(x, axis=d, window=128) for x, d in zip(sides, axes, strict=True)]
    lhs, rhs = (jnp.asarray(x, jnp.bfloat16) for x in sides)
    wanted = [floats[0][part].T @ floats[1][part] for _, part in by_group(sizes, 96)]
    for pair in ([lhs, rhs], windows, [lhs, windows[1]]):  # groups that begin anywhere
        product = over_groups(*pair, jnp.asarray(sizes), np.float32, axes, SUMS)
        choice = decide.candidates(product, "cuda", ["sm_90"])[0]
        assert choice and str(choice) == "cutedsl: wgrad_bfloat16_r64"
        with monkeypatch.context() as patched:
            patched.setattr(kernels, "NAME", "xla")
            y = by("cutedsl", product)
        assert_bits_equal(y, np.stack(wanted).astype(np.float32))
    for pair, why in (
        ((lhs.astype(jnp.float32), rhs), "not bfloat16 and float32"),
        ((windows[0], rhs.astype(jnp.float16)), "not bfloat16 and float16"),
    ):
        product = over_groups(*pair, jnp.asarray(sizes), np.float32, axes, SUMS)
        assert why in decide.candidates(product, "cuda", ["sm_90"])[0].reason


def test_explain_and_autotune_know_them():
    x, w = integers((64, 64)), integers((2, 64, 32), 1)
    sizes = jnp.asarray([40, 24], jnp.int32)
    f = lambda x, w: jax_mx.ragged_dot(x, w, sizes, recipe=MXFP8)  # noqa: E731
    text = str(jax_mx.explain(f, x, w, device="sm_90"))
    assert "a matrix a group, 2 groups" in text
    assert "cutedsl" in text
    choice = jax_mx.autotune(f, x, w, progress=False)
    assert {name for entry in choice.entries for name, _ in entry.costs} >= {"dequantize", "xla"}
    with choice:
        assert "context" in str(jax_mx.explain(f, x, w))


# ---- values and gradients ---
@pytest.mark.sampled(4)
@pytest.mark.parametrize("sizes", [*SIZES])
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(MXFP8, id="mxfp8"),
        pytest.param(MXFP4, id="mxfp4", marks=pytest.mark.thorough),
        pytest.param(Recipe(window=128, weight_window=(128, 128)), id="windows"),
        pytest.param(Recipe(window="row", wgrad=Product(window=128)), id="two windows"),
        pytest.param(BF16, id="bf16", marks=pytest.mark.thorough),
        pytest.param(
            Recipe(dgrad=Product(hadamard=Hadamard(64)), wgrad=Product(hadamard=Hadamard(64))),
            id="turned",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_values_and_gradients(recipe, sizes):
    rng = np.random.default_rng(1)
    x, w, dy = (rng.normal(size=s).astype(np.float32) for s in ((70, 64), (5, 64, 40), (70, 40)))
    group_sizes = jnp.asarray(SIZES[sizes], jnp.int32)

    @jax.jit
    def both(x, w):
        y, pull = jax.vjp(lambda x, w: jax_mx.ragged_dot(x, w, group_sizes, recipe=recipe), x, w)
        return y, *pull(dy)

    products = Products(recipe, jnp.float32)
    y, dx, dw = np.zeros((70, 40)), np.zeros((70, 64)), np.zeros((5, 64, 40))
    for group, part in by_group(SIZES[sizes], 70):
        if part.start < part.stop:
            y[part] = products.forward(x[part], w[group])
            wide = np.pad(dy[part], [(0, 0), (0, 24)]), np.pad(w[group], [(0, 0), (0, 24)])
            dx[part] = products.dgrad(*wide)
            dw[group] = products.wgrad(x[part], dy[part])
    for got, want in zip(both(x, w), (y, dx, dw), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5 * max(np.abs(want).max(), 1e-30), rtol=0)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"group_sizes": jnp.zeros(4, jnp.int32)}, ValueError, "they must be (5,)"),
        ({"group_sizes": np.zeros(5)}, TypeError, "must be an array of integers"),
        ({"rhs": np.zeros((5, 32, 8), np.float32)}, ValueError, "should have 64 elements"),
        ({"lhs": np.zeros((70, 65), np.float32)}, ValueError, "not a multiple of the block length"),
        ({"lhs": np.zeros(64, np.float32)}, ValueError, "must have 2 dimensions"),
        ({"implementation": "fp8"}, ValueError, "unknown"),
        ({"recipe": Recipe(window="row")}, ValueError, "would span several groups"),
        ({"rhs": np.zeros((0, 64, 8), np.float32)}, ValueError, "must have a matrix at least"),
        ({"rhs": jax_mx.quantize(np.zeros((5, 64, 8), np.float32), axis=1),
            "recipe": Recipe(forward=Product(hadamard=Hadamard(16)))}, ValueError,
            "take a recipe whose forward has no hadamard"),
    ],
)  # fmt: skip
def test_messages(change, error, sentence):
    args = {"lhs": integers((70, 64)), "rhs": integers((5, 64, 40))}
    args |= {"group_sizes": jnp.zeros(5, jnp.int32)} | change
    assert_refused(lambda: jax_mx.ragged_dot(**args), error, sentence)


def test_forward_mode_is_refused():
    f = lambda x: jax_mx.ragged_dot(  # noqa: E731
        x, integers((2, 32, 8)), jnp.zeros(2, jnp.int32)
    )
    x = integers((4, 32))
    with pytest.raises(NotImplementedError, match=r"^ragged_dot: derivatives in forward mode"):
        jax.jvp(f, (x,), (x,))


# ---- on automatic axes ---
@pytest.mark.parametrize(
    ("x_spec", "w_spec"),
    [
        (P(), P(None, None, "a")),  # columns
        pytest.param(P(None, "a"), P(None, "a"), marks=pytest.mark.thorough),
        pytest.param(P("a"), P("a"), marks=pytest.mark.thorough),  # rows and groups are gathered
    ],
)
def test_devices_share_it_under_jit(x_spec, w_spec):
    """The results of one device, and exact; columns stay where they are."""
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    sizes = np.array([40, 0, 70, 10])
    x, w = integers((128, 256)), integers((4, 256, 512), 1)
    want = np.zeros((128, 512))
    for group, part in by_group(sizes, 128):
        want[part] = x[part] @ w[group]
    with jax.set_mesh(mesh):
        part = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((x, x_spec), (w, w_spec))]
        y = jax.jit(jax_mx.ragged_dot)(*part, jnp.asarray(sizes, jnp.int32))
        notes = jax_mx.explain(jax_mx.ragged_dot, *part, jnp.asarray(sizes, jnp.int32)).notes
    np.testing.assert_array_equal(y, want)
    assert any("jax_mx.moe" in note for note in notes)
    if x_spec == P():
        assert y.sharding.spec == P(None, "a")


SHAPES = (64, 96), (3, 96, 32)


@pytest.mark.parametrize("types", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_types_promote_as_in_jax(types):
    x, w = (normal(s, i).astype(t) for i, (s, t) in enumerate(zip(SHAPES, types, strict=True)))
    sizes = jnp.array([40, 0, 24])

    def value_and_gradients(x, w, **preferred):
        f = functools.partial(jax_mx.ragged_dot, recipe="mxfp8", **preferred)
        return jax.vjp(lambda x, w: f(x, w, sizes), x, w)

    for recipe in ("mxfp8", "floats"):  # also where promotion is strict, as here
        for fallback in (None, "floats"):
            y = jax_mx.ragged_dot(x, w, sizes, recipe=recipe, fallback=fallback)
            assert y.dtype == jnp.float32
    assert jax_mx.ragged_dot(x[:, :40], w[:, :40], sizes, fallback="floats").dtype == jnp.float32
    with jax.numpy_dtype_promotion("standard"):
        y, pull = value_and_gradients(x, w)
        assert y.dtype == jax.lax.ragged_dot(x, w, sizes).dtype == jnp.float32
        want, pull_want = value_and_gradients(x, w, preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(y, want)
    for got, want, operand in zip(pull(y), pull_want(y), (x, w), strict=True):
        assert got.dtype == operand.dtype
        np.testing.assert_array_equal(got, want)
