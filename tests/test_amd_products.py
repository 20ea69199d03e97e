"""Products on AMD: the kernels' binaries in an emulator, and what callers get by them.

Small integers, of which sums are exact: results equal float64's. An access outside of an array
faults, results begin as poison, and addresses are aligned as an entry wants them and no more.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_equal, assert_equal_or_flushed, changed, floats, integers, wanted
from helpers import mesh_of

import jax_mx
from jax_mx.formats.formats import FLOAT_DTYPES, MXFP4_E2M1, MXFP8_E4M3, MXFP8_E5M2
from jax_mx.launch import store
from jax_mx.launch.chips import ARCHS
from jax_mx.products.decide import decided
from jax_mx.products.multiply import contractions_in
from jax_mx.quantizing.facts.product_kernels import PRODUCTS, RESULTS, ProductKernel

pytest.importorskip("tinygrad")

from emulation import Program, placed

from jax_mx.launch.code_object import CodeObject
from jax_mx.launch.emulation.emulator import ORDERS
from jax_mx.launch.emulation.memory import Global
from jax_mx.testing import emulate

KERNELS = [product for product in PRODUCTS if product.implementation == "flydsl"]
EVERY = [*itertools.product(KERNELS, ARCHS["flydsl"])]
# Tests share these, as to compile a kernel takes longer than to test it: every format and arch.
FEW = [
    (ProductKernel("matmul_fp8", "flydsl", (MXFP8_E4M3, MXFP8_E4M3), 128), "gfx950"),
    (ProductKernel("wgrad_fp8", "flydsl", (MXFP8_E4M3, MXFP8_E4M3), 128), "gfx950"),
    (ProductKernel("matmul_fp8", "flydsl", (MXFP4_E2M1, MXFP8_E5M2), 128), "gfx950"),
    (ProductKernel("wgrad_fp8", "flydsl", (MXFP8_E5M2, MXFP4_E2M1), 128), "gfx942"),
]
binaries = pytest.mark.parametrize(
    "variant,arch",
    [
        pytest.param(
            *one,
            id="-".join((one[0].name, one[1])),
            marks=[pytest.mark.thorough] * (one not in FEW),
        )
        for one in EVERY
    ],
)


class Product(Program):
    """A product's call, and the launch that its facts give: of operands, for a y of a dtype."""

    def __init__(self, product, arch, x, w, sizes=None, dtype="float32", tiles=()):
        sums = product.op == "wgrad_fp8"
        lead = [len(sizes)] if sums else []
        self.result = np.zeros((*lead, x.shape[0], w.shape[-2]), FLOAT_DTYPES[dtype])
        sides = (x, w if w.ndim == 3 or sums else jax.tree.map(lambda a: a[None], w))
        arrays = [a for i, q in enumerate(sides) for a in in_tiles(q, tiles[2 * i : 2 * i + 2])]
        arrays.append(None if sizes is None else np.asarray(sizes, np.int32))
        arrays += [None] * (1 if sums else 3)  # no call has these
        self.arrays, self.operands = arrays, len(arrays)
        self.absent = [i for i, a in enumerate(arrays) if a is None]
        self.dims = [() if a is None else a.shape for a in (*arrays, self.result)]
        self.shared: list = []
        artifact = store.get(product, arch)
        self.code = CodeObject(artifact.image)
        bits = sum(bool(tile) << i for i, tile in enumerate(tiles))
        self.rule = artifact.attributes(dtype, {"tiled": bits}, carry=False)

    def y(self, entry=0, order="lockstep", emulator=None) -> np.ndarray:
        """The result of an entry, for arrays with just the alignment that it needs."""
        memory, addresses, result = Global(), [], None
        for i, (array, align) in enumerate(
            zip([*self.arrays, self.result], self.align(entry), strict=True)
        ):
            if array is None:
                addresses.append(0)
                continue
            result = placed(array.reshape(-1).view(np.uint8), align, i < self.operands)
            addresses.append(memory.add(result, i == self.operands, f"buffer {i}"))
        self.launch(entry, memory, addresses, order, emulator=emulator)
        return np.ascontiguousarray(result).view(self.result.dtype).reshape(self.result.shape)


def in_tiles(q, tiles) -> list[np.ndarray]:
    """Codes and scales as their bytes lie, in AMD's tiles where these say so, as matrices."""
    codes_tiled, scales_tiled = tiles or (False, False)  # as `ProductPlan.tiled` has them
    q = q.with_values_in("shuffled_16x16") if codes_tiled else q
    q = q.with_scales_in("shuffled_32x8") if scales_tiled else q
    values, scales = (np.asarray(a).view(np.uint8) for a in (q.values, q.scales))
    lead = q.shape[:-2]
    width = q.shape[-1] // q.format.codes_per_byte
    return [values.reshape(*lead, -1, width), scales.reshape(*lead, len_of(scales, q), -1)]


def len_of(scales, q) -> int:
    """Rows of a matrix of scales: tiles are padded."""
    return scales.shape[len(q.shape) - 2] * (32 if q.scale_layout.is_tiled else 1)


def exact_product(product, arch, shape, sizes=None, *, edit=None, **options) -> tuple:
    """A call of random integers, and what it must give; `edit` makes other operands of them."""
    t, n, k = shape
    rng, sums = np.random.default_rng(t * n + k), product.op == "wgrad_fp8"
    groups = () if sums or sizes is None else (len(sizes),)
    x = integers(rng, (t, k), product.formats[0])
    w = integers(rng, (*groups, n, k), product.formats[1])
    x, w = edit(x, w) if edit else (x, w)
    want = wanted(x, w, None if sizes is None else np.asarray(sizes), sums=sums)
    return Product(product, arch, x, w, sizes, **options), want


def compare(product, arch, shape, sizes=None, *, entry=0, order="lockstep", **options):
    program, want = exact_product(product, arch, shape, sizes, **options)
    label = f"{product.name} {arch} {shape} {sizes} {entry} {order} {options}"
    assert_equal(program.y(entry, order), want, label)


SHAPES = [(5, 7, 96), (130, 132, 288), (257, 31, 544)]
SIZES = {
    "matmul_fp8": [[100, 0, 30], [0, 0, 1, 129], [65, 300, -4]],  # of 130 rows
    "wgrad_fp8": [[100, 0, 7, 300, 50], [0, 0, 33], [544], [31, 700, -4]],  # of 544 elements
}


@binaries
def test_shapes(variant, arch):
    """Off every tile; both entries, all results, all orders of waves."""
    turns = zip(SHAPES, itertools.cycle(RESULTS), (*ORDERS,), strict=False)
    for i, (shape, dtype, order) in enumerate(turns):
        sizes = [shape[2]] if variant.op == "wgrad_fp8" else None
        compare(variant, arch, shape, sizes, dtype=dtype, entry=i % 2, order=order)
        compare(variant, arch, shape, sizes, dtype=dtype, entry=1 - i % 2)


@pytest.mark.sampled(2, 1)
@binaries
def test_groups_begin_anywhere(variant, arch):
    shape = (20, 33, 544) if variant.op == "wgrad_fp8" else (130, 33, 160)
    many = [0] * 66  # more than a wave has lanes
    for i, sizes in enumerate([*SIZES[variant.op], [*many, *SIZES[variant.op][0]]]):
        compare(variant, arch, shape, sizes, entry=i % 2)


@binaries
def test_no_nan_leaves_its_group(variant, arch):
    """Scales of 255, of the last block, too, and codes that are NaN or infinite."""

    def edit(x, w):
        lead = (0,) * (w.ndim - 2)
        w = changed(w, scales=[((*lead, 3, 0), 255), ((*lead, 3, -1), 255)])
        codes = [((6, 40), 0x7F)] * (x.format != MXFP4_E2M1)
        codes += [((8, 40), 0x7C)] * (x.format == MXFP8_E5M2)
        return changed(x, codes=codes, scales=[((2, 0), 255), ((4, -1), 255)]), w

    sizes = [100, 0, 7, 300, 50] if variant.op == "wgrad_fp8" else [3, 0, 60, 50]
    shape = (20, 33, 544) if variant.op == "wgrad_fp8" else (130, 33, 160)
    compare(variant, arch, shape, sizes, edit=edit)


@binaries
def test_extreme_scales(variant, arch):
    """2^-127, which makes subnormal floats, times 2^126; times 2^-3 sums are subnormal."""
    sizes = [96] if variant.op == "wgrad_fp8" else None
    for scale in (253, 124):

        def edit(x, w, scale=scale):
            x = changed(x, scales=[((slice(None), slice(None)), 0)])
            return x, changed(w, scales=[((slice(None), slice(None)), scale)])

        program, want = exact_product(variant, arch, (20, 33, 96), sizes, edit=edit)
        assert_equal_or_flushed(program.y(), want, f"{scale}")


@pytest.mark.sampled(2)
@binaries
@pytest.mark.parametrize("tiles", [(1, 1, 1, 1), (1, 0, 0, 1), (0, 1, 1, 0)], ids=str)
def test_operands_in_tiles(variant, arch, tiles):
    sums = variant.op == "wgrad_fp8"
    for entry in range(2):
        sizes = [100, 7, 300] if sums else [33, 0, 100]
        compare(variant, arch, (144, 48, 576), sizes, entry=entry, tiles=tiles)


@binaries
@pytest.mark.thorough
def test_every_number_of_rows_of_groups(variant, arch):
    """A group of each number of rows, or of elements of K, from 0 to 300, which begins anywhere."""
    sizes, sums = np.random.default_rng(0).permutation(301), variant.op == "wgrad_fp8"
    shape = (20, 33, 45152) if sums else (45150 + 33, 33, 96)
    compare(variant, arch, shape, sizes.tolist())


def each_in_turn():
    """Each number of rows with a kernel and an arch; by default one number for each of `FEW`."""
    default = set()
    for rows, op, arch in itertools.product(
        range(1, 301), ("matmul_fp8", "wgrad_fp8"), ARCHS["flydsl"]
    ):
        some = [kernel for kernel in KERNELS if kernel.op == op]
        one = some[rows % len(some)], arch
        left_out = one not in FEW or one in default or rows < 40 * len(default)
        default |= set() if left_out else {one}
        yield pytest.param(
            *one, rows, id=f"{arch}-{op}-{rows}", marks=[pytest.mark.thorough] * left_out
        )


@pytest.mark.parametrize("variant,arch,rows", [*each_in_turn()])
def test_every_number_of_rows(variant, arch, rows):
    """Each operand has so many in turn; formats, results and entries take turns, too."""
    sizes = [50, 0, 46] if variant.op == "wgrad_fp8" else None
    options = {"dtype": RESULTS[rows % 3], "entry": rows % 2}
    compare(variant, arch, (rows, 33, 96), sizes, **options)
    compare(variant, arch, (33, rows, 96), sizes, **options)


# ---- by callers ---
def loss(f, x, w):
    y = f(x, w).astype(jnp.float32)
    return jnp.sum(y * jnp.asarray(np.resize(np.arange(-2, 3), y.shape), jnp.float32))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4"])
def test_derivatives(arch, recipe, grouped):
    """By rule kernels multiply codes, forward and backward; integers are exact."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-3, 4, (70, 96)), jnp.bfloat16)
    w = jnp.asarray(rng.integers(-3, 4, (4, 96, 64) if grouped else (96, 64)), jnp.bfloat16)
    sizes = jnp.asarray([20, 0, 33, 10], jnp.int32)

    def product(x, w, implementation):
        options = {"recipe": recipe, "implementation": implementation}
        if grouped:
            return jax_mx.ragged_dot(x, w, sizes, **options)
        return jax_mx.matmul(x, w, **options)

    def gradients(implementation):
        f = functools.partial(product, implementation=implementation)
        return jax.jit(jax.value_and_grad(functools.partial(loss, f), (0, 1)))

    with emulate(arch):
        lowered = gradients(None).lower(x, w)
        got = gradients(None)(x, w)
    text = lowered.as_text(debug_info=True)
    assert "by_flydsl" in text and "by_dequantize" not in text and "scaled_dot" not in text
    for mine, theirs in zip(*map(jax.tree.leaves, (got, gradients("xla")(x, w))), strict=True):
        assert_equal(mine, np.asarray(theirs, np.float64))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("arch", ARCHS["flydsl"])
@pytest.mark.parametrize("scale_layout", ["row_major", "shuffled_32x8"])
@pytest.mark.parametrize("value_layout", ["row_major", "shuffled_16x16"])
def test_codes_and_scales_of_callers_are_read_as_they_lie(
    value_layout, scale_layout, arch, grouped
):
    rng, sizes = np.random.default_rng(0), jnp.array([20, 0, 33], jnp.int32) if grouped else None
    x = floats(rng, (64, 96)) if grouped else integers(rng, (64, 96), MXFP8_E4M3)
    w = integers(rng, (3, 48, 96) if grouped else (48, 96), MXFP8_E4M3)

    def product(*sides):
        x, w = (
            q.with_values_in(value_layout).with_scales_in(scale_layout)
            if isinstance(q, jax_mx.MXArray)
            else q
            for q in sides
        )
        if grouped:
            return jax_mx.ragged_dot(x, w, sizes)
        return jax_mx.dot_general(x, w, (((1,), (1,)), ((), ())))

    with emulate(arch):
        jaxpr = jax.make_jaxpr(product)(x, w).jaxpr
        got = jax.jit(product)(x, w)
    (call,) = contractions_in(jaxpr)
    for q in (call.lhs, call.rhs)[grouped:]:
        assert (q.value_layout.name, q.scale_layout.name) == (value_layout, scale_layout)
    assert decided(call, "rocm", [arch]).name == "flydsl"
    assert_equal(got, np.asarray(product(x, w), np.float64))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("arch", ARCHS["flydsl"])
@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_devices_of_a_shard_map_multiply_their_rows(axis_type, arch):
    """Each of four emulated devices runs the kernel on a part of its own."""
    mesh = mesh_of(4, axis_type=axis_type)
    rows, whole = jax.sharding.PartitionSpec("a"), jax.sharding.PartitionSpec()
    product = jax.shard_map(
        jax_mx.ragged_dot, mesh=mesh, in_specs=(rows, whole, whole), out_specs=rows
    )
    rng = np.random.default_rng(0)
    args = floats(rng, (128, 96)), floats(rng, (4, 96, 64)), jnp.array([10, 0, 12, 5], jnp.int32)
    places = (jax.sharding.NamedSharding(mesh, spec) for spec in (rows, whole, whole))
    args = [jax.device_put(a, sharding) for a, sharding in zip(args, places, strict=True)]
    with emulate(arch), jax.set_mesh(mesh):
        assert "by_flydsl" in jax.jit(product).lower(*args).as_text(debug_info=True)
        got = jax.jit(product)(*args)
    assert_equal(got, np.asarray(jax.jit(product)(*args), np.float64))
