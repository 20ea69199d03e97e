"""Stochastic rounding and Hadamard transforms, against numpy, integers and exact rationals."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import arch_here
from helpers import (
    BY_ROWS,
    COLLECTIVE,
    FP4,
    H16,
    SIGNS,
    SR,
    assert_bits_equal,
    assert_refused,
    assert_same_array,
    bytes_of,
    call,
    every_bfloat16,
    fitting,
    lowered,
    lowered_apart,
    mesh_of,
    poison_memory,
    preprocessing,
    random_bits,
    zero_scales,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx
from jax_mx import Hadamard, Stochastic
from jax_mx.formats import blocks as reference
from jax_mx.formats.directions import LAST
from jax_mx.formats.formats import BLOCK
from jax_mx.launch import private, store, targets
from jax_mx.launch.chips import ARCHS, PLATFORMS
from jax_mx.quantizing import primitive
from jax_mx.quantizing.facts.variants import Mode
from jax_mx.quantizing.registry import Support
from jax_mx.shipping.shipped import SHIPPED

P = PartitionSpec
KEY = jax.random.key(7)


def jitted(x, **options):
    return jax.jit(partial(jax_mx.quantize, **options))(x)


# ---- stochastic rounding ---


@pytest.mark.optimized
def test_unbiased_in_every_interval():
    """10^8 draws: ups are binomial, by interval of codes, within 4 sigma."""
    table = oracle.FORMATS[FP4].table.tolist()
    parts = (1 / 2**16, 1234 / 2**16, 0.25, 0.5, 0.875)  # exact, so the chances are
    points = [(i, p) for i in range(7) for p in parts][1:]  # 34
    block = [table[i] + p * (table[i + 1] - table[i]) for i, p in points[:31]]
    block = np.float32([*block, 6.0]) * np.where(np.arange(BLOCK) % 3, 1, -1)
    block[1], points[1] = 5.75, (6, 0.875)
    n = 10**8 // BLOCK

    @jax.jit
    def ups(key):
        x = jnp.broadcast_to(jnp.float32(block), (n // 4, BLOCK))
        q = jax_mx.quantize(x, FP4, rounding=Stochastic(key))
        codes = reference.unpack(q.values.astype(jnp.uint32), jax_mx.MXFP4_E2M1) & 7
        below = np.uint32([i for i, _ in points[:31]] + [7])
        return jnp.sum(codes - below, axis=0, dtype=jnp.uint32), jnp.max(codes - below)

    total = np.zeros(BLOCK)
    for key in jax.random.split(KEY, 4):
        count, most = ups(key)
        assert most == 1  # up or down, and the largest stays
        total += np.asarray(count, np.float64)
    assert total[31] == 0
    for interval in range(7):
        mine = [j for j in range(31) if points[j][0] == interval]
        assert mine
        chance = np.array([points[j][1] for j in mine])
        sigma = np.sqrt(n * (chance * (1 - chance)).sum())
        assert abs(total[mine].sum() - n * chance.sum()) < 4 * sigma, interval
    chance = np.array([p for _, p in points[:31]])
    sigma = np.sqrt(n * chance * (1 - chance))
    assert (abs(total[:31] - n * chance) < 4.5 * sigma).all()


@pytest.mark.optimized
def test_bits_of_neighbours_and_of_other_keys_do_not_correlate():
    n = 1 << 17
    numbers = jnp.arange(n, dtype=jnp.uint32)[:, None]
    k = jax.random.bits(KEY, (2,), jnp.uint32)

    @jax.jit
    def noise(numbers, k):
        return reference.noise(reference.seeds(numbers, k), (-1,)).astype(jnp.float32)

    one = np.asarray(noise(numbers, k)) / 2**16 - 0.5
    assert abs(one.mean()) < 4 / np.sqrt(12 * one.size)
    assert abs((one**2).mean() * 12 - 1) < 5 / np.sqrt(one.size)
    others = {
        "the same word": one[:, 1:],
        "the next word": one[:, 2:],
        "the next block": one[1:],
        "a block far away": one[1024:],
        "first word of the key": np.asarray(noise(numbers, k ^ jnp.uint32([1, 0]))) / 2**16 - 0.5,
        "second word": np.asarray(noise(numbers, k ^ jnp.uint32([0, 1]))) / 2**16 - 0.5,
    }
    for name, other in others.items():
        a = one[: other.shape[0], : other.shape[1]]
        rho = 12 * (a * other).mean(axis=0)
        assert (abs(rho) < 5.5 / np.sqrt(len(a))).all(), (name, abs(rho).max())


def test_bits_depend_on_key_and_element_alone():
    x = jnp.asarray(random_bits((2, 128, 192), jnp.bfloat16))
    rounding = Stochastic(KEY)
    for axis, shift in ((-1, 0), (-2, 0), (0, 1)):
        y = jnp.moveaxis(x, -2, 0) if shift else x
        plain = jitted(y, format=FP4, axis=axis, rounding=rounding)
        tiled = {"format": FP4, "axis": axis, "rounding": rounding, "scale_layout": "shuffled_32x8"}
        assert_bits_equal(jitted(y, **tiled).values, plain.values)
        turned = jitted(y, **tiled, transpose=True)
        assert_bits_equal(turned.dequantize(), jnp.moveaxis(plain.dequantize(), axis, -1))
    square = {"format": "mxfp8_e4m3", "block": (32, 32), "rounding": rounding}
    turned = jitted(x, transpose=True, **square)
    assert_bits_equal(turned.values, jnp.swapaxes(jitted(x, **square).values, -1, -2))
    assert_same_array(
        jax_mx.quantize(x, FP4, rounding=rounding), jitted(x, format=FP4, rounding=rounding)
    )
    raw = jax.random.PRNGKey(7)
    assert_same_array(
        jitted(x, rounding=Stochastic(raw)), jitted(x, rounding=Stochastic(jax.random.key(7)))
    )
    other = jitted(x, rounding=Stochastic(jax.random.key(8)))
    changed = bytes_of(other.values) != bytes_of(jitted(x, rounding=rounding).values)
    assert 0.1 < changed.mean() < 0.6


@pytest.mark.optimized
def test_vmap_over_keys():
    """One array takes several keys; the dataclass is a pytree, too."""
    x, keys = jnp.asarray(random_bits((3, 64, 96), np.float32)), jax.random.split(KEY, 3)

    def one(x, key):
        return jax_mx.quantize(x, FP4, rounding=Stochastic(key, 0.75))

    alike = [one(x[0], key) for key in keys]
    got = jax.vmap(one, in_axes=(None, 0))(x[0], keys)
    assert_same_array(got, jax.tree.map(lambda *a: jnp.stack(a), *alike))
    assert_same_array(
        jax.vmap(lambda x, r: jax_mx.quantize(x, FP4, rounding=r))(x, jax.vmap(Stochastic)(keys)),
        jax.vmap(lambda x, k: jax_mx.quantize(x, FP4, rounding=Stochastic(k)))(x, keys),
    )


@pytest.mark.optimized
def test_prescale():
    """0.75 of what is not subnormal, before the scale; then floor clips nothing."""
    x = jnp.asarray(random_bits((64, 64), np.float32))
    least = reference._least(np.float32(0.75))
    edge = np.arange(least - 16, least + 16, dtype=np.uint32)
    np.testing.assert_array_equal(edge[15:17], [0x00AAAAAA, 0x00AAAAAB])
    x = x.at[0, :32].set(edge.view(np.float32)).at[0, 32:].set(-edge.view(np.float32))
    q = jitted(x, format="mxfp8_e4m3", scaling="floor", rounding=Stochastic(KEY, 0.75))
    with np.errstate(invalid="ignore"):
        exact = np.asarray(x, np.float64) * 0.75  # the product of 26 bits
        scaled = np.where(abs(exact) < 2.0**-126, np.copysign(0, exact), exact).astype(np.float32)
    want = jitted(scaled, format="mxfp8_e4m3", scaling="floor", rounding=Stochastic(KEY))
    assert_same_array(q, want)
    assert (np.asarray(q.values[0, :16], np.float32) == 0).all()
    assert not (np.asarray(q.values[0, 16:32], np.float32) == 0).any()
    top = jnp.full((10**5, 32), 7.9, jnp.float32)
    y = jitted(top, format=FP4, scaling="floor", rounding=Stochastic(KEY, 0.75)).dequantize(
        "float32"
    )
    assert abs(float(y.mean(dtype=jnp.float32)) - 0.75 * 7.9) < 4 * 1 / np.sqrt(top.size)
    clipped = jitted(top, format=FP4, scaling="floor", rounding=Stochastic(KEY)).dequantize()
    assert (clipped == 6).all()


# ---- Hadamard ---


def same_but_nans(got, want) -> None:
    """NaN's sign and payload are no one's."""
    assert_bits_equal(np.where(np.isnan(got), 0, got), np.where(np.isnan(want), 0, want))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))


@pytest.mark.optimized
@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", [16, 32, 64])
def test_hadamard_is_float32_operations(size):
    """Eager, jitted and numpy agree in every bit; half of the rows are about the least normal."""
    rng = np.random.default_rng(size)
    tiny = rng.integers(0, 1 << 25, (500, 128)).astype(np.uint32)
    tiny |= rng.integers(0, 2, tiny.shape).astype(np.uint32) << 31
    wide = rng.standard_normal((300, 128)) * 2.0 ** rng.integers(-30, 30, (300, 128))
    x = np.concatenate(
        [tiny.view(np.float32), random_bits((300, 128), np.float32), wide.astype(np.float32)]
    )
    # From this float on, the transform's last product reaches 2^-126.
    least = reference._least(np.float32(size**-0.5))
    x[0] = 0
    x[0, ::64] = (least - np.array([1, 0], np.uint32)).view(np.float32)
    for signs in (np.ones(size), SIGNS[:size]):
        want = oracle.hadamard(x, size, signs < 0)
        f = partial(jax_mx.hadamard, size=size)
        sign_argument = None if (signs > 0).all() else signs
        for got in (f(x, signs=sign_argument), jax.jit(f)(x, signs=sign_argument)):
            assert got.dtype == jnp.float32
            same_but_nans(np.asarray(got), want)
    assert np.count_nonzero(want[0]) == size and np.isnan(want).any()


@pytest.mark.optimized
@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", [16, 32, 64])
def test_hadamard_is_orthogonal_and_exact(size):
    rng = np.random.default_rng(size)
    i = np.arange(size)
    matrix = (-1.0) ** np.array([[bin(a & b).count("1") for b in i] for a in i])
    f = jax.jit(partial(jax_mx.hadamard, size=size, axis=-2))
    whole = rng.integers(-99, 100, (2, 2 * size, 3)).astype(np.float32)
    sums = np.einsum("ij,bgjk->bgik", matrix, whole.reshape(2, 2, size, 3).astype(np.float64))
    scale = np.float32(size**-0.5)
    assert_bits_equal(f(whole), (sums.astype(np.float32) * scale).reshape(whole.shape))
    x = rng.standard_normal((2, 2 * size, 3)).astype(np.float32)
    want = np.einsum("ij,bgjk->bgik", matrix, x.reshape(2, 2, size, 3).astype(np.float64))
    want = (want / np.sqrt(size)).reshape(x.shape)
    bound = 8 * 2.0**-24 * np.sqrt(size) * 4
    assert abs(np.asarray(f(x), np.float64) - want).max() < bound
    signs = SIGNS[:size] < 0
    there = f(x, signs=signs)
    back = f(there) * np.tile(SIGNS[:size], 2)[:, None].astype(np.float32)
    assert abs(np.asarray(back) - x).max() < bound
    norms = [np.linalg.norm(np.asarray(a, np.float64)) for a in (x, there)]
    assert abs(norms[0] / norms[1] - 1) < 1e-6
    # The derivative, both modes: the transform is linear.
    v = rng.standard_normal(x.shape).astype(np.float32)
    one = partial(jax_mx.hadamard, size=size, signs=signs, axis=1)
    out, tangent = jax.jit(lambda x, v: jax.jvp(one, (x,), (v,)))(x, v)
    assert_bits_equal(out, there)
    np.testing.assert_allclose(tangent, one(v), atol=1e-5)
    (pulled,) = jax.jit(lambda x, v: jax.vjp(one, x)[1](v))(x, v)
    np.testing.assert_allclose((pulled * x).sum(), (v * np.asarray(there)).sum(), rtol=1e-4)


def test_random_signs_and_pytrees():
    x = jax.random.normal(KEY, (3, 128), jnp.bfloat16)
    keys = jax.random.split(KEY, 3)
    hadamard = Hadamard.random(keys[0], 64)
    signs = np.asarray(hadamard.signs)
    assert signs.shape == (64,) and signs.dtype == np.bool_ and 16 < signs.sum() < 48
    as_numbers = Hadamard(64, jnp.where(hadamard.signs, -1, 1))
    assert_same_array(jitted(x, hadamard=hadamard), jitted(x, hadamard=as_numbers))
    mapped = jax.vmap(lambda x, key: jax_mx.quantize(x, hadamard=Hadamard.random(key, 64)))
    got = mapped(x, keys)
    for i in range(3):
        want = jitted(x[i], hadamard=Hadamard.random(keys[i], 64))
        assert_same_array(jax.tree.map(lambda a, i=i: a[i], got), want)
    passed = jax.jit(lambda x, hadamard: jax_mx.quantize(x, hadamard=hadamard))(x, hadamard)
    assert_same_array(passed, jitted(x, hadamard=hadamard))


# ---- both at once, both directions, everywhere ---
ALL = {"rounding": Stochastic(KEY, 0.75), "hadamard": Hadamard(64, SIGNS)}


def test_directions_that_differ_are_two_calls():
    x = jnp.asarray(random_bits((2, 128, 192), jnp.bfloat16))
    pair = {"rounding": (None, Stochastic(KEY)), "hadamard": (Hadamard(16, SIGNS[:16]), None)}
    got = jax.jit(partial(jax_mx.quantize_both, format=FP4, **pair))(x)
    assert_same_array(got[0], jitted(x, format=FP4, hadamard=pair["hadamard"][0]))
    want = jitted(x, format=FP4, axis=-2, transpose=True, rounding=pair["rounding"][1])
    assert_same_array(got[1], want)


@pytest.mark.optimized
@pytest.mark.parametrize(
    "axis_type,spec,layout",
    [
        (AxisType.Auto, P(None, "a", "b"), "row_major"),
        (AxisType.Explicit, P("a", None, "b"), "row_major"),
        (AxisType.Auto, P(None, ("a", "b")), "blocked_128x4"),
        (AxisType.Explicit, P(None, "a", "b"), "blocked_128x4"),
    ],
    ids=str,
)
@pytest.mark.thorough
def test_eight_devices_give_the_bytes_of_one(axis_type, spec, layout):
    mesh = mesh_of(2, 4, axis_type=axis_type)
    x = random_bits((2, 1024, 512), jnp.bfloat16)

    def call(x, key, signs):
        options = {"rounding": Stochastic(key), "hadamard": Hadamard(64, signs)}
        options |= {"format": FP4, "scale_layout": layout}
        return jax_mx.quantize(x, axis=-2, **options), *jax_mx.quantize_both(x, **options)

    args = (KEY, jnp.asarray(SIGNS))
    want = jax.jit(call)(x, *args)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        compiled = jax.jit(call).lower(placed, *args).compile()
        assert not COLLECTIVE.search(compiled.as_text())
        got = jax.jit(call)(placed, *args)
        for q in got[:2]:
            assert q.values.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
    for g, w in zip(got, want, strict=True):
        assert_same_array(g, w)


@pytest.mark.gpu
def test_the_gpu_gives_the_same_bytes():
    x = random_bits((256, 512), np.float32)
    x[:64] = (x[:64].view(np.uint32) & 0x80FFFFFF).view(np.float32)  # about the least normal
    call = jax.jit(partial(jax_mx.quantize_both, format=FP4, implementation="xla", **ALL))
    with jax.default_device(jax.devices("cpu")[0]):
        wants, turned = call(x), jax_mx.hadamard(x, 32)
    for got, want in zip(call(x), wants, strict=True):
        assert_same_array(got, want)
    same_but_nans(np.asarray(jax_mx.hadamard(x, 32)), np.asarray(turned))


# ---- kernels: test_kernels.py has them all, with signs and without prescale ---
PREPROCESSED = [v for v in SHIPPED if v.changes_elements]
HERE = [v for v in PREPROCESSED if arch_here() is None or arch_here() in ARCHS[v.implementation]]
each_preprocessed = pytest.mark.parametrize("variant", HERE, ids=lambda v: v.name)


def served_and_reference(variant, **options):
    """The variant's op through its kernel and through XLA, both jitted."""
    return [jax.jit(call(variant, name, **options)) for name in (variant.implementation, "xla")]


@pytest.mark.sampled(48, 5)
@pytest.mark.gpu
@each_preprocessed
@pytest.mark.parametrize("layout", ["row_major", "blocked_128x4"])
@pytest.mark.parametrize("prescale,signs", [(0.75, True), (None, False), (0.75, False)])
def test_the_kernel_gives_the_bytes_of_the_reference(variant, layout, prescale, signs):
    """Whatever is no field of the variant; about the least normal number; rows, tails, padding.

    Signs are an operand here, where there are any; in test_kernels.py they are known.
    """
    options = preprocessing(variant, signs, prescale, jnp.asarray) | {"scale_layout": layout}
    with np.errstate(all="ignore"):
        floats = [every_bfloat16().astype(variant.dtype)]
    shapes = [(1, 32), (33, 96), (130, 160), (3, 129, 4128), (0, 64), (64, 0)]
    if variant.form != LAST:
        shapes = [(32, 32), (96, 160), (3, 160, 4128), (416, 64), (0, 64), (64, 0)]
    if str(variant.form).startswith("second"):
        shapes += [(32, 1), (64, 33), (2, 96, 72), (160, 257)]
    for shape in shapes:
        floats.append(random_bits(fitting(variant, shape), variant.dtype, seed=len(shape)))
    tiny = random_bits((256, 512), np.float32, seed=8)
    tiny = (tiny.view(np.uint32) & 0x80FFFFFF).view(np.float32)
    tiny[:, :32] = 0
    with np.errstate(all="ignore"):
        floats.append(tiny.astype(variant.dtype))
    for scaling, zero_scale in (("floor", zero_scales(variant)[-1]), ("rceil", 0)):
        run, ref = served_and_reference(variant, scaling=scaling, zero_scale=zero_scale, **options)
        for x in floats:
            want = jax.block_until_ready(ref(x))
            poison_memory()
            for g, w in zip(run(x), want, strict=True):
                assert_same_array(g, w, f"{x.shape} {scaling}")


@pytest.mark.sampled(12, 4)
@pytest.mark.gpu
@each_preprocessed
def test_the_kernel_under_a_vmap_over_keys_and_signs(variant):
    xs = jnp.asarray(random_bits((3, *fitting(variant, (32, 64))), variant.dtype))

    def one(x, key, implementation):
        options = preprocessing(variant)
        leaves, tree = jax.tree.flatten(options)  # keys and signs
        keys = jax.random.split(key, len(leaves))
        for i, (leaf, key) in enumerate(zip(leaves, keys, strict=True)):
            is_key = jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key)
            leaves[i] = key if is_key else jax.random.bernoulli(key, shape=leaf.shape)
        return call(variant, implementation, **jax.tree.unflatten(tree, leaves))(x)

    keys = jax.random.split(KEY, 3)
    run, ref = (
        jax.jit(jax.vmap(partial(one, implementation=name)))
        for name in (variant.implementation, "xla")
    )
    got = run(xs, keys)
    for g, w in zip(got, ref(xs, keys), strict=True):
        assert_same_array(g, w)
    for i in range(3):
        want = jax.jit(partial(one, implementation="xla"))(xs[i], keys[i])
        for g, w in zip(got, want, strict=True):
            assert_same_array(jax.tree.map(lambda a, i=i: a[i], g), w)


@pytest.mark.gpu
@each_preprocessed
@pytest.mark.parametrize("layout", ["row_major", "blocked_128x4"])
def test_two_gpus_give_the_bytes_of_one(variant, layout):
    devices = jax.devices()[:2]
    if len(devices) < 2:
        pytest.skip("one GPU")
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,), devices=devices)
    x = jnp.asarray(random_bits((256, 512), variant.dtype))
    run, ref = served_and_reference(variant, scale_layout=layout)
    for spec in (P("a"), P(None, "a")):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        text = run.lower(placed).compile().as_text()
        assert store.TARGET in text and not COLLECTIVE.search(text)
        for g, w in zip(run(placed), ref(x), strict=True):
            assert_same_array(g, w)


KNOWN_HERE = ("cutedsl", "bfloat16", True)  # compiled; AMD's are in test_emulated.py


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "variant",
    [v for v in PREPROCESSED if v.form == LAST],
    ids=lambda v: f"{v.implementation}-{v.name}",
)
@pytest.mark.parametrize("known", [True, False], ids=["known", "operand"])
def test_the_call_takes_words_behind_x(variant, known, request):
    """As the kernel's launch rule counts buffers, of the view's shape with 1 for the block."""
    (mode,) = variant.modes
    compiled = mode == Mode(16, stochastic=True) or request.config.getoption("--thorough")
    if not compiled or (variant.implementation, variant.dtype, known) != KNOWN_HERE:
        request.getfixturevalue("without_code")
    count = mode.stochastic + (mode.hadamard > 0 and not known)
    views = {"row_major": "2x64x3", "blocked_128x4": "2x1x1x64x3"}
    if mode.blocks > 1:  # two blocks stay together
        views = {"row_major": "2x64x3x1x2", "blocked_128x4": "2x1x1x64x6"}
    for layout, view in views.items():
        x = jax.ShapeDtypeStruct(fitting(variant, (2, 64, 96)), variant.dtype)
        name = variant.implementation
        options = preprocessing(variant, of=np.asarray if known else jnp.asarray)
        run = call(variant, name, scale_layout=layout, **options)
        text = lowered(x, run, PLATFORMS[name])
        (line,) = [t for t in text.splitlines() if f"@{store.TARGET}(" in t]
        element = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[variant.dtype]
        block_operands = f", tensor<{view}x1xui32>" * count
        assert f": (tensor<{view}x32x{element}>{block_operands}) -> " in line
        rank = view.count("x") + 2
        order = "[5, 4, 2, 3, 1, 0]" if rank == 6 else "[3, 2, 1, 0]"
        dense = ", ".join([f"dense<{order}> : tensor<{rank}xindex>"] * (1 + count))
        assert f"operand_layouts = [{dense}]" in line
        absent = f"absent = dense<{1 + mode.stochastic}> : tensor<1xi64>"
        assert (absent in line) == (known and mode.hadamard > 0)


# ---- other forms, by kernels along rows ---
by_rows = pytest.mark.parametrize("op,options,shape,results", BY_ROWS.values(), ids=BY_ROWS)
by_some_rows = pytest.mark.parametrize(
    "op,options,shape,results",
    [
        pytest.param(*BY_ROWS[i], id=i, marks=[pytest.mark.thorough] * (", tiles" not in i))
        for i in BY_ROWS
    ],
)


@pytest.mark.sampled(4)
@by_some_rows
def test_other_forms_are_quantized_by_rows(op, options, shape, results, monkeypatch):
    """With the reference along rows: words follow their blocks, results lie where they should."""
    f = partial(getattr(jax_mx, op), format=FP4, **options)
    last = P(*[None] * (len(shape) - 1), "a")
    for axis_type, spec in ((None, None), (AxisType.Auto, P("a", "b")), (AxisType.Explicit, last)):
        x = jnp.asarray(random_bits(shape, "bfloat16"))
        if axis_type is not None:
            devices = jax.devices("cpu")[:4]
            mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(axis_type,) * 2, devices=devices)
            x = jax.device_put(x, NamedSharding(mesh, spec))
        want = jax.jit(partial(f, implementation="xla"))(x)
        with monkeypatch.context() as patch:
            seen, really = [], primitive._support

            def support(plan, target, seen=seen, really=really):
                seen.append(plan.form)
                if plan.form == LAST:
                    return really(plan, target)
                return Support("cutedsl", (SHIPPED[0],), via_transpose=True), []

            patch.setattr(primitive, "_support", support)
            with lowered_apart():
                got = jax.jit(f)(x)
        assert seen[0] != LAST and seen.count(LAST) == results
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert_bits_equal(g, w)


@by_rows
@pytest.mark.usefixtures("without_code")
def test_other_forms_call_the_kernel_along_rows(op, options, shape, results):
    f = partial(getattr(jax_mx, op), format=FP4, **options)
    # Most forms of bfloat16 have kernels.
    abstract = jax.ShapeDtypeStruct(shape, jnp.float16)
    for implementation in (None, "cutedsl"):
        text = lowered(abstract, partial(f, implementation=implementation))
        assert text.count(f"@{store.TARGET}(") == results


def test_is_supported_says_that_kernels_go_along_rows():
    options = {"format": FP4, "transpose": True} | H16
    name, one, pair = (
        f"quantize_{form}_{formats}_h16{more}"
        for form, formats, more in (
            ("last_float16", "mxfp4_e2m1", ""),
            ("second_transposed_bfloat16", "mxfp4_e2m1", ""),
            ("both_transposed_bfloat16", "mxfp4_e2m1_mxfp4_e2m1", "_h16"),
        )
    )
    for dtype, op, axis, names in (
        ("float16", "quantize", -1, name),
        ("float16", "quantize", -2, f"{name} along rows"),
        ("float16", "quantize_both", -1, f"{name}, {name} along rows"),
        ("bfloat16", "quantize", -2, one),
        ("bfloat16", "quantize_both", -1, pair),
    ):
        answer = jax_mx.is_supported(op, "sm_90", dtype=dtype, axis=axis, **options)
        assert answer == (True, f"cutedsl: {names}")
    options["hadamard"] = (None, options["hadamard"])
    name = pair.replace("h16_h16", "rn_h16")
    assert jax_mx.is_supported("quantize_both", "sm_90", **options) == (True, f"cutedsl: {name}")


@pytest.mark.gpu
@by_rows
def test_kernels_along_rows_give_other_forms(op, options, shape, results):
    f = partial(getattr(jax_mx, op), format=FP4, **options)
    for dtype in ("bfloat16", "float32"):
        x = jnp.asarray(random_bits(shape, dtype))
        compiled = jax.jit(f).lower(x).compile()
        calls = compiled.as_text().count(f'custom_call_target="{store.TARGET}"')
        assert calls in ((1, results) if dtype == "bfloat16" else (results,))
        want = jax.jit(partial(f, implementation="xla"))(x)
        for g, w in zip(jax.tree.leaves(compiled(x)), jax.tree.leaves(want), strict=True):
            assert_bits_equal(g, w)


@pytest.mark.thorough
def test_shards_that_split_a_transform():
    explicit = mesh_of(4, names="b", axis_type=AxisType.Explicit)
    auto = mesh_of(4, names="b")
    x = random_bits((32, 128), np.float32)
    call = jax.jit(partial(jax_mx.quantize, **ALL))
    want = call(x)
    got = call(jax.device_put(x, NamedSharding(auto, P(None, "b"))))
    assert_same_array(got, want)
    with jax.set_mesh(explicit), pytest.raises(private.ShardingTypeError) as caught:
        call(jax.device_put(x, NamedSharding(explicit, P(None, "b"))))
    assert "in 4 shards of 32, which does not keep its blocks of 64 whole" in str(caught.value)
    pair = jax.jit(partial(jax_mx.quantize_both, hadamard=(None, Hadamard(64))))
    wants = pair(np.tile(x, (2, 1)))
    with jax.set_mesh(explicit):  # the other axis may be split between blocks
        gots = pair(jax.device_put(np.tile(x, (2, 1)), NamedSharding(explicit, P(None, "b"))))
    for got, want in zip(gots, wants, strict=True):
        assert_same_array(got, want)


def test_shard_map_counts_blocks_of_its_shard():
    mesh = mesh_of(8)
    x = jnp.tile(jnp.asarray(random_bits((1, 64), np.float32)), (8, 1))

    def call(x, key, folded):
        if folded:
            key = jax.random.fold_in(key, jax.lax.axis_index("a"))
        return jax_mx.quantize(x, FP4, rounding=Stochastic(key), hadamard=Hadamard(32, SIGNS[:32]))

    for folded in (False, True):
        f = jax.shard_map(
            partial(call, folded=folded), mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a")
        )
        values = np.asarray(jax.jit(f)(x, KEY).values)
        assert (values == values[:1]).all() != folded


@pytest.mark.parametrize(
    "op,options,name,missing",
    [
        ("quantize", ALL | {"format": FP4}, "cutedsl", "rounding 'stochastic' and hadamard 64"),
        ("quantize", {"hadamard": Hadamard(64)}, "cutedsl",
         "format mxfp8_e4m3 with hadamard 64, only for mxfp4_e2m1"),
        ("quantize_both", {"hadamard": (None, Hadamard(64)), "format": FP4}, "flydsl",
         "the pair (none, hadamard 64)"),
        ("quantize", SR | {"format": FP4, "block": (32, 32), "transpose": True}, "flydsl",
         "form square_transposed with rounding 'stochastic', only for last, second, "
         "second_transposed"),
        ("quantize", H16, "cutedsl",
         "format mxfp8_e4m3 with hadamard 16, only for mxfp4_e2m1"),
        ("quantize", SR | {"format": FP4, "block": (32, 32)}, "cutedsl",
         "form square with rounding 'stochastic', only for last, second, second_transposed"),
        ("quantize_both", SR | H16, "cutedsl",
         "format mxfp8_e4m3 with rounding 'stochastic' and hadamard 16, only for mxfp4_e2m1"),
    ],
)  # fmt: skip
def test_there_is_no_kernel(op, options, name, missing):
    x, f = jnp.ones((64, 64), jnp.bfloat16), getattr(jax_mx, op)
    if op == "quantize_both":
        f = partial(f, transpose=(False, False))
    chip = {"cutedsl": "sm_90", "flydsl": "gfx942"}[name]
    platform = targets.platform_of(chip)
    assert store.TARGET not in lowered(x, f, platform, **options)
    reason = f"{op}: {name} has no kernel for {missing}; 'xla' serves it"
    with pytest.raises(NotImplementedError) as caught:
        f(x, implementation=name, **options)
    assert str(caught.value) == reason
    assert jax_mx.is_supported(op, chip, **options) == (False, reason)


@pytest.mark.usefixtures("without_code")
def test_directions_that_differ_say_which_has_no_kernel():
    """Each goes along rows: in MXFP4 both have a kernel, in MXFP8 the rotated one has none."""
    x = jnp.ones((64, 64), jnp.bfloat16)
    call = partial(jax_mx.quantize_both, hadamard=(Hadamard(), None), implementation="cutedsl")
    assert lowered(x, partial(call, format=FP4)).count(f"@{store.TARGET}(") == 2
    with pytest.raises(NotImplementedError, match="for format mxfp8_e4m3 with hadamard 16, only"):
        call(x)


def test_derivatives_are_refused_as_before():
    with pytest.raises(NotImplementedError, match="quantize: codes have no derivative"):
        jax.grad(lambda x: jax_mx.quantize(x, **ALL).dequantize("float32").sum())(jnp.ones(64))


X = jnp.ones((64, 96))


@pytest.mark.parametrize(
    "call,error,sentence",
    [
        (lambda: jax_mx.quantize(X, rounding="stochastic"), TypeError,
         "quantize: rounding must be None or a Stochastic, got 'stochastic'"),
        (lambda: jax_mx.quantize(X, rounding=Stochastic(3)), TypeError,
         "quantize: rounding.key must be one key of jax.random, or a raw uint32[2], got 3"),
        (lambda: jax_mx.quantize(X, rounding=Stochastic(jax.random.split(KEY))), TypeError,
         "quantize: rounding.key must be one key of jax.random, got key<fry>[2]"),
        (lambda: jax_mx.quantize(X, rounding=Stochastic(jnp.zeros(3, jnp.uint32))), TypeError,
         "quantize: rounding.key must be one key of jax.random, or a raw uint32[2], got uint32[3]"),
        (lambda: jax_mx.quantize_both(X[:, :64], rounding=Stochastic(np.zeros(4, np.uint32))),
         TypeError, "quantize_both: rounding.key must be one key of jax.random, or a raw uint32["),
        (lambda: Stochastic(KEY, 0.5), ValueError,
         "Stochastic: prescale must be None or 0.75, got 0.5"),
        (lambda: Stochastic(KEY, jnp.ones(3)), ValueError, "prescale must be None or 0.75, got Ar"),
        (lambda: jax.jit(lambda p: Stochastic(KEY, p))(0.75), ValueError, "must be None or 0.75"),
        (lambda: jax_mx.quantize(X, hadamard=16), TypeError,
         "quantize: hadamard must be None or a Hadamard, got 16"),
        (lambda: Hadamard(8), ValueError, "Hadamard: size must be 16, 32 or 64, got 8"),
        (lambda: Hadamard(16.0, SIGNS[:16]), TypeError,
         "Hadamard: size must be 16, 32 or 64, got 16.0"),
        (lambda: Hadamard(np.array([16])), TypeError, "Hadamard: size must be 16, 32 or 64, got"),
        (lambda: Hadamard.random(KEY, None), TypeError, "size must be 16, 32 or 64, got None"),
        (lambda: jax_mx.hadamard(X, 16.0), TypeError, "hadamard: size must be 16, 32 or 64, got 1"),
        (lambda: jax_mx.quantize(X, hadamard=Hadamard(16, "+" * 16)), ValueError,
         "quantize: signs must be 16 bools or numbers of either sign, got <U16[]"),
        (lambda: jax_mx.quantize(X, hadamard=Hadamard(16, [None] * 16)), ValueError,
         "quantize: signs must be 16 bools or numbers of either sign, got object[16]"),
        (lambda: jax_mx.hadamard(X, 16, np.ones(16, complex)), ValueError,
         "hadamard: signs must be 16 bools or numbers of either sign, got complex128[16]"),
        (lambda: jax_mx.hadamard(X, 16, [1.0] * 15 + [np.nan]), ValueError,
         "hadamard: signs must be 16 bools or numbers of either sign, got a NaN among them"),
        (lambda: jax_mx.hadamard(X, 16, [[1], [2, 3]]), ValueError, "either sign, got list"),
        (lambda: jax_mx.quantize(X, hadamard=Hadamard(16, np.ones(32))), ValueError,
         "quantize: signs must be 16 bools or numbers of either sign, got float"),
        (lambda: jax_mx.quantize(X, hadamard=Hadamard(16, np.ones(16, np.uint8))), ValueError,
         "quantize: signs must be 16 bools or numbers of either sign, got uint8[16]"),
        (lambda: jax_mx.quantize(X, hadamard=Hadamard(64)), ValueError,
         "quantize: axis -1 has length 96, not a multiple of 64, the size of its Hadamard"),
        (lambda: jax_mx.quantize(X, block=(32, 32), hadamard=Hadamard()), ValueError,
         "quantize: a Hadamard transform goes along one axis, square blocks span two; use "
         "block=32"),
        (lambda: jax_mx.quantize_both(X, hadamard=(None, Hadamard(), None)), TypeError,
         "quantize_both: hadamard must be one for both directions or a pair"),
        (lambda: jax_mx.quantize_both(X, rounding=(KEY, None)), TypeError,
         "quantize_both: rounding must be None or a Stochastic, got PRNGKeyArray"),
        (lambda: jax_mx.quantize_both(X.T, hadamard=Hadamard(64)), ValueError,
         "quantize_both: axis -2 has length 96, not a multiple of 64"),
        (lambda: jax_mx.hadamard(X, 64), ValueError,
         "hadamard: axis -1 has length 96, not a multiple of the size 64"),
        (lambda: jax_mx.hadamard(X.astype(jnp.int32)), TypeError,
         "hadamard: x is int32, must be one of bfloat16, float16, float32"),
        (lambda: jax_mx.hadamard(X, axis=2), ValueError, "hadamard: axis 2 is out of range for"),
        (lambda: jax_mx.hadamard(X, axis=1.0), TypeError, "hadamard: axis must be an int, got 1.0"),
        (lambda: jax_mx.hadamard(X, axis=True), TypeError, "hadamard: axis must be an int, got Tr"),
        (lambda: jax_mx.hadamard(X, axis=None), TypeError, "hadamard: axis must be an int, got No"),
        (lambda: jax_mx.hadamard(np.ones(16)), TypeError, "hadamard: x is float64, must be one of"),
    ],
)  # fmt: skip
def test_bad_calls_get_one_sentence(call, error, sentence):
    assert_refused(call, error, sentence)


def test_static_arguments_are_pythons_numbers():
    """As they are hashed, compared and written into exported programs."""
    hadamards = [Hadamard(np.array(32), SIGNS[:32]), Hadamard(np.int64(32), SIGNS[:32])]
    assert [(h.size, type(h.size)) for h in hadamards] == [(32, int)] * 2
    for prescale in (np.float32(0.75), jnp.float32(0.75), 0.75):
        rounding = Stochastic(KEY, prescale)
        assert type(rounding.prescale) is float
        assert jax.jit(lambda r: r)(rounding).prescale == 0.75
    shape = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    call = jax.jit(lambda x, r: jax_mx.quantize(x, rounding=r))
    abstract = jax.eval_shape(lambda: Stochastic(KEY, np.float32(0.75)))
    assert jax.export.export(call)(shape, abstract).serialize()


def test_rank_promotion_may_be_forbidden():
    """While programs are traced, which is where ranks are seen; none is compiled."""

    def call(x):
        got = [*jax_mx.quantize_both(x, **ALL), jax_mx.hadamard(x, 64, SIGNS)]
        square = jax_mx.quantize(x, block=(32, 32), rounding=ALL["rounding"])
        tiled = jax_mx.quantize(x, scale_layout="blocked_128x4", axis=-2, **ALL)
        for q in (square, square.expand(-2), tiled, got[0]):
            assert q.dequantize(jnp.float32).shape == x.shape
        assert jax_mx.fake_quantize(x, clip=True).shape == x.shape
        return jax_mx.mx_matmul_reference(got[0], got[0])

    x = jax.ShapeDtypeStruct((2, 64, 128), np.float32)
    with jax.numpy_rank_promotion("raise"):
        lowered = jax.jit(call).trace(x).lower()  # the references too
    assert lowered.out_info.shape == (2, 64, 64)


def test_hadamard_of_other_bytes_and_signs():
    x = random_bits((4, 32), np.float32, seed=3)
    want = np.asarray(jax_mx.hadamard(x, 32, SIGNS[:32]))
    same_but_nans(np.asarray(jax_mx.hadamard(x.astype(">f4"), 32, SIGNS[:32])), want)
    for signs in (SIGNS[:32] * 1e-300, SIGNS[:32] < 0, SIGNS[:32].astype(np.int8)):
        same_but_nans(np.asarray(jax_mx.hadamard(x, np.int8(32), signs)), want)


def test_the_dataclasses_are_static_but_for_data():
    assert jax.tree.leaves(ALL["rounding"]) == [KEY]
    assert jax.tree.leaves(Hadamard(32)) == []
    assert dataclasses.replace(ALL["rounding"], key=1).prescale == 0.75
