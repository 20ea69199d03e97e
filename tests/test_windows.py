"""Windows: blocks that share an amax. test_fuzz.py has the bytes that they are quantized to."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from helpers import (
    COLLECTIVE,
    assert_bits_equal,
    assert_refused,
    assert_same_array,
    bytes_of,
    random_bits,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx
from jax_mx.formats.formats import BLOCK, FLOAT_DTYPES, FORMATS
from jax_mx.formats.windows import ROW, TILE, WINDOWS
from jax_mx.launch import private
from jax_mx.quantizing import reference
from jax_mx.quantizing.mxarray import deserialized, serialized

# --thorough runs all cases of a test, CI one of 6.
pytestmark = pytest.mark.sampled(12)

P = PartitionSpec
ALONG = [w for w in WINDOWS if w != TILE]
each_format = pytest.mark.parametrize("format", FORMATS.values(), ids=str)
each_window = pytest.mark.parametrize("window", ALONG[1:], ids=str)


def unpacked(q) -> np.ndarray:
    """A code a byte, of an array whose codes are packed along the last axis."""
    return np.asarray(_unpacked(q.values, q.format)).astype(np.uint8)


@partial(jax.jit, static_argnums=1)
def _unpacked(values, format):
    bits = jax.lax.bitcast_convert_type(values, jnp.uint8).astype(jnp.uint32)
    return reference.unpack(bits, format)


def floats(shape, dtype="float32", seed=0) -> np.ndarray:
    """Blocks of random bits, most of them finite, and of other exponents than their neighbours'."""
    rng = np.random.default_rng(seed)
    x = random_bits(shape, FLOAT_DTYPES[dtype], seed)
    rare = rng.random(shape) < 0.002
    with np.errstate(invalid="ignore"):
        special = ~np.isfinite(x.astype(np.float32))
    tame = (rng.standard_normal(shape) * np.exp2(rng.integers(-9, 9, shape))).astype(x.dtype)
    x = np.where(special & ~rare, tame, x)
    x[..., :BLOCK] = np.where(rng.random((*shape[:-1], BLOCK)) < 0.5, 0.0, -0.0).astype(x.dtype)
    return x


# ---- quantize ---
@pytest.mark.optimized
@each_format
@pytest.mark.parametrize("shape", [(256, 384), (160, 96), (32, 288), (128, 32)], ids=str)
def test_a_tile_transposes_to_itself(format, shape):
    x = floats(shape, "bfloat16", 5)
    q = jax_mx.quantize(x, format, window=TILE)
    assert q.window == TILE and q.block == (BLOCK, BLOCK)
    assert q.scales.shape == (shape[0] // BLOCK, shape[1] // BLOCK)
    assert_same_array(q, jax_mx.quantize(x, format, window=TILE, block=(BLOCK, BLOCK)))
    turned = jax_mx.quantize(x.T, format, window=TILE)
    assert_same_array(turned, jax_mx.quantize(x, format, window=TILE, transpose=True))
    assert_bits_equal(unpacked(turned), unpacked(q).T)
    assert_bits_equal(turned.scales, q.scales.T)
    # Expanded, it is an ordinary array of the same numbers, which still tells of its window.
    for axis in (-1, -2):
        one = q.expand(axis)
        assert (one.window, one.block) == (TILE, (BLOCK,))
        assert_bits_equal(one.dequantize(), q.dequantize())


def test_the_default_is_a_block():
    x = floats((64, 128), "bfloat16")
    assert_same_array(jax_mx.quantize(x, window=32), jax_mx.quantize(x))
    assert jax_mx.quantize(x).window == BLOCK
    for got, want in zip(jax_mx.quantize_both(x, window=32), jax_mx.quantize_both(x), strict=True):
        assert_same_array(got, want)


@each_window
def test_maps_and_compiles(window):
    for shape in [(0, 128), (4, 0), (0, 0), (2, 0, 256)]:
        assert jax_mx.align(jax_mx.quantize(np.zeros(shape, np.float32)), window).shape == shape
    x = floats((3, 64, 320), "bfloat16", 4)
    q = jax_mx.quantize(x, axis=-2, window=window)
    assert_same_array(jax.jit(lambda x: jax_mx.quantize(x, axis=-2, window=window))(x), q)
    assert_same_array(jax.vmap(lambda x: jax_mx.quantize(x, axis=-2, window=window))(x), q)
    mapped = jax.vmap(lambda x: jax_mx.quantize(x, window=window), in_axes=1, out_axes=0)(x)
    assert_same_array(mapped, jax_mx.quantize(jnp.swapaxes(x, 0, 1), window=window))
    aligned = jax.vmap(lambda q: jax_mx.align(q, window))(jax_mx.quantize(x, axis=-2))
    assert_same_array(aligned, jax_mx.align(jax_mx.quantize(x, axis=-2), window))


# ---- fake_quantize ---
@pytest.mark.optimized
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_fake_quantize(window):
    x = np.random.default_rng(0).standard_normal((2, 160, 288)).astype(np.float32)
    x *= np.exp2(np.random.default_rng(1).integers(-3, 3, x.shape))
    for axis in (-1,) if window == TILE else (-1, -2, 0):
        y = np.moveaxis(x, 1, 0) if axis == 0 else x
        options = {"window": window, "axis": axis, "scaling": "floor"}
        q = jax_mx.quantize(y, **options)
        assert_bits_equal(jax_mx.fake_quantize(y, **options), q.dequantize(jnp.float32))
        narrow = y.astype(jnp.bfloat16)  # the result is, too
        want = jax_mx.quantize(narrow, **options).dequantize()
        assert_bits_equal(jax_mx.fake_quantize(narrow, **options), want)
        back = jax.grad(lambda y, o=options: jax_mx.fake_quantize(y, clip=True, **o).sum())(y)
        one = dataclasses.replace(q, values=jnp.full_like(q.values, 448)).dequantize(jnp.float32)
        assert_bits_equal(back, (np.abs(y) <= np.asarray(one)).astype(np.float32))
        assert 0 < (np.asarray(back) == 0).mean() < 0.2


# ---- align ---
def aligned(codes, scales, format, window) -> tuple[np.ndarray, np.ndarray]:
    """The definition, for codes a byte each, and scales of blocks along rows."""
    table = oracle.FORMATS[format.name].table
    if window == TILE:
        tiles = scales.reshape(-1, BLOCK, scales.shape[1]).max(1)
        most = oracle.over_windows(tiles, window, (0, 1)).repeat(BLOCK, 0)
    else:
        most = oracle.over_windows(scales, window, (1,))
    old, to = (exponents.repeat(BLOCK, 1).astype(int) for exponents in (scales, most))
    sign = 1 << (format.bits - 1)
    magnitude = codes & (sign - 1)
    value = table[np.minimum(magnitude, format.max_code)] * np.exp2(np.maximum(old - to, -99.0))
    rounded = oracle.nearest(value, table) | codes & sign
    moved = np.where(magnitude > format.max_code, codes, rounded)
    return np.where(to == 255, format.nan_code, moved).astype(np.uint8), most


def any_array(shape, format, seed=0):
    """An MXArray of any codes, and scales that are near each other or anything."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**format.bits, shape).astype(np.uint32)
    near = rng.integers(100, 112, (shape[0], shape[1] // BLOCK))
    scales = np.where(rng.random(near.shape) < 0.02, rng.integers(0, 256, near.shape), near)
    packed = jax.lax.bitcast_convert_type(
        reference.pack(jnp.asarray(codes), format), format.storage
    )
    e8m0 = jnp.asarray(scales.astype(np.uint8)).view(jnp.float8_e8m0fnu)
    quantized = jax_mx.quantize(np.zeros(shape, np.float32), format)
    return dataclasses.replace(quantized, values=packed, scales=e8m0)


@pytest.mark.optimized
@each_format
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_align_is_its_definition(format, window):
    q = any_array((160, 352), format)
    codes, scales = unpacked(q), bytes_of(q.scales)[..., 0]
    got, (codes, scales) = jax_mx.align(q, window), aligned(codes, scales, format, window)
    assert got.window == window
    if window == TILE:
        assert got.block == (BLOCK, BLOCK)
        scales = scales[::BLOCK]
    assert_bits_equal(bytes_of(got.scales)[..., 0], scales)
    assert_bits_equal(unpacked(got), codes)
    assert_same_array(jax_mx.align(got, window), got)
    # Blocks along the other axis give the same for the transposed array.
    turned = dataclasses.replace(
        q,
        values=jax_mx.quantize(np.zeros((352, 160), np.float32), format, axis=-2).values * 0,
        scales=q.scales.T,
        axis=-2,
    )
    bits = jax.lax.bitcast_convert_type(
        jnp.swapaxes(reference.pack(jnp.asarray(unpacked(q)).astype(jnp.uint32), format), 0, 1),
        format.storage,
    )
    second = jax_mx.align(dataclasses.replace(turned, values=bits), window)
    if window == TILE:
        assert_bits_equal(unpacked(second), codes.T)
        assert_bits_equal(second.scales, got.scales.T)
    else:
        assert_bits_equal(second.values, got.values.T)
        assert_bits_equal(second.scales, got.scales.T)


def test_align_moves_little():
    """An element of E4M3 changes only to a subnormal, by at most 2^-10 of the new scale."""
    x = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    x *= np.exp2(np.random.default_rng(1).integers(-12, 12, (64, 16))).repeat(BLOCK, 1)
    q = jax_mx.quantize(x)
    for window in (128, 256, ROW):
        y = jax_mx.align(q, window)
        scale = np.exp2(bytes_of(y.scales)[..., 0].astype(float) - 127).repeat(BLOCK, 1)
        a, b = (np.asarray(z.dequantize(jnp.float32)).astype(float) for z in (q, y))
        assert (np.abs(a - b) <= 2.0**-10 * scale).all() and (a != b).any()
        assert (np.abs(b)[a != b] < (2.0**-6 * scale)[a != b] * (1 + 2.0**-4)).all()


@pytest.mark.parametrize("layout", ["blocked_128x4", "shuffled_32x8"])
@pytest.mark.parametrize("axis", [-1, -2, -3])
def test_align_in_tiles(layout, axis):
    x = floats((96, 160, 192), "bfloat16", 9)
    q = jax_mx.quantize(x, "mxfp4_e2m1", axis=axis, scale_layout=layout)
    rows = jax_mx.quantize(x, "mxfp4_e2m1", axis=axis)
    for window in (128, ROW):
        got, want = jax_mx.align(q, window), jax_mx.align(rows, window)
        assert got.scale_layout.name == layout
        assert_bits_equal(got.values, want.values)
        assert_bits_equal(got.dequantize(), want.dequantize())
    if axis == -1:
        tiled = jax_mx.align(q.with_values_in("shuffled_16x16"), 128)
        assert_same_array(tiled.with_values_in("row_major"), jax_mx.align(q, 128))


# ---- bad calls ---
def test_messages():
    x = np.zeros((64, 128), np.float32)
    for window in (64, 0, "rows", (128,), (128, 64), (32, 32)):
        assert_refused(
            lambda w=window: jax_mx.quantize(x, window=w),
            ValueError,
            "quantize: window must be 32, 128, 256, 'row' or (128, 128), got ",
        )
    for window in (None, 128.0, True, (128, 128.0)):
        assert_refused(lambda w=window: jax_mx.quantize(x, window=w), TypeError, "window must be")
    for f in (jax_mx.quantize, jax_mx.fake_quantize):
        assert_refused(
            lambda f=f: f(x, block=(32, 32), window=128), ValueError, "square blocks have a window"
        )
    assert_refused(
        lambda: jax_mx.quantize_both(x, window=TILE),
        ValueError,
        "one array serves both directions; use quantize(x, window=(128, 128))",
    )
    assert_refused(
        lambda: jax_mx.quantize(x, window=TILE, scale_layout="blocked_128x4"),
        ValueError,
        "square blocks have row-major scales",
    )
    assert_refused(lambda: jax_mx.quantize(x, axis=0, window=TILE), ValueError, "leave axis at -1")
    assert_refused(
        lambda: jax_mx.quantize(np.zeros((48, 64), np.float32), window=TILE),
        ValueError,
        "axis -2 has length 48",
    )
    q = jax_mx.quantize(x)
    assert_refused(lambda: jax_mx.align(x, 128), TypeError, "align: q must be an MXArray")
    assert_refused(lambda: jax_mx.align(q, 64), ValueError, "align: window must be")
    assert_refused(
        lambda: jax_mx.align(jax_mx.quantize(x, block=(32, 32)), 128),
        ValueError,
        "square blocks have a window",
    )
    assert_refused(
        lambda: jax_mx.align(jax_mx.quantize(x[:40]), TILE), ValueError, "square blocks of 32"
    )
    assert_refused(
        lambda: jax_mx.align(jax_mx.quantize(x, scale_layout="blocked_128x4"), TILE),
        ValueError,
        "square blocks have row-major scales",
    )
    assert_refused(lambda: dataclasses.replace(q, window=7), ValueError, "window must be")
    assert_refused(
        lambda: jax_mx.is_supported("quantize", "cpu", window=5), ValueError, "window must be"
    )


# ---- static metadata ---
def test_window_is_static():
    x = floats((64, 256), "bfloat16")
    for window in WINDOWS:
        q = jax_mx.quantize(x, window=window)
        leaves, tree = jax.tree.flatten(q)
        assert len(leaves) == 2 and jax.tree.unflatten(tree, leaves).window == window
        assert repr(window) in repr(q)
        other = 256 if window == 128 else 128
        if window != TILE:
            assert tree != jax.tree.structure(dataclasses.replace(q, window=other))
        aux = tree.node_data()[1]
        assert deserialized(serialized(aux)) == aux


def test_programs_of_other_windows_differ():
    x = np.zeros((64, 256), np.float32)
    programs = [
        jax.jit(lambda x, w=window: jax_mx.quantize(x, window=w)).lower(x).as_text()
        for window in WINDOWS
    ]
    assert len({*programs}) == len(WINDOWS)


# ---- parts ---
def holds(q) -> bool:
    """Whether the blocks of each of an array's windows have equal scales."""
    scales = np.asarray(bytes_of(q.scales)[..., 0])
    if q.window == TILE:
        down = 4 if len(q.block) == 2 or q.axis == -2 else 128
        steps = {-2: down, -1: 128 if q.axis == -2 else 4}
    else:
        steps = {q.axis: max(scales.shape[q.axis], 1) if q.window == ROW else q.window // BLOCK}
    for axis, step in steps.items():
        at = np.arange(scales.shape[axis]) // step * step
        if (scales != scales.take(at, axis)).any():
            return False
    return True


PARTS = {
    "a tile": (lambda q: q[..., 128:256, :], True),
    "less of it": (lambda q: q[..., 128:160, :], True),
    "half tiles": (lambda q: q[..., 64:192, :], False),
    "half windows": (lambda q: q[..., 64:192], False),
    "whole windows": (lambda q: q[..., 256:], True),
    "every second row": (lambda q: q[..., ::2, :], False),
    "backwards": (lambda q: q[..., ::-1, :], False),
    "some rows": (lambda q: q[..., np.array([0, 200]), :], False),
    "a row": (lambda q: q[..., 5, :], False),
    "a new axis": (lambda q: q[..., None, :], False),
    "leading": (lambda q: q[1:, None], True),
    "swapped": (lambda q: q.mT, True),
    "swapped leading": (lambda q: q.swapaxes(0, 1), False),
    "rows joined": (lambda q: q.reshape(-1, q.shape[-1]), True),
    "rows split": (lambda q: q.reshape(2, -1, 128, q.shape[-1]), True),
    "rows split within": (lambda q: q.reshape(2, -1, 192, q.shape[-1]), False),
    "odd rows joined": (lambda q: q[:, :192].reshape(-1, q.shape[-1]), False),
}


@pytest.mark.parametrize("window", WINDOWS[1:], ids=str)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_has_the_window_that_its_scales_have(part, window):
    x = floats((2, 384, 512), "bfloat16", 9)
    q = jax_mx.quantize(x, window=window)
    q = q.expand() if window == TILE else q
    f, of_tiles = PARTS[part]
    after = f(q)
    assert holds(q) and holds(after)
    kept = of_tiles if window == TILE else part != "half windows" or window == ROW
    assert after.window == (window if kept else BLOCK)


@pytest.mark.parametrize(("window", "kept"), [(ROW, False), (128, True), (256, False)], ids=str)
def test_windows_of_shards_that_are_joined(window, kept):
    """A shard's own row is no row of the whole; what came in whole goes out whole."""
    mesh, x = jax.make_mesh((4,), ("k",), axis_types=(AxisType.Auto,)), floats((8, 512))
    split = partial(jax.shard_map, mesh=mesh, in_specs=P(None, "k"), out_specs=P(None, "k"))
    joined = jax.jit(split(lambda x: jax_mx.quantize(x, window=window)))(x)
    assert joined.window == (window if kept else BLOCK) and holds(joined)
    assert holds(jax_mx.align(joined, window)) and jax_mx.align(joined, window).window == window
    q = jax_mx.quantize(x, window=window)
    there = split(lambda q: q)(q)
    assert_same_array(there, q)
    cut = jax.make_mesh((8,), ("k",), axis_types=(AxisType.Auto,))
    x = floats((8, 768))  # of which a shard has 96
    parts = []
    jax.shard_map(lambda q: parts.append(q), mesh=cut, in_specs=P(None, "k"), out_specs=None)(
        jax_mx.quantize(x, window=window)
    )
    assert parts[0].window == (ROW if window == ROW else BLOCK)


# ---- sharded: cells of docs/sharding.md hold the rest ---
def test_a_row_crosses_shards_by_its_amax_alone():
    mesh = jax.make_mesh((8,), ("k",), axis_types=(AxisType.Auto,))
    x = jax.device_put(floats((64, 1024), "bfloat16", 6), NamedSharding(mesh, P(None, "k")))
    f = jax.jit(lambda x: jax_mx.quantize(x, window=ROW))
    text = f.lower(x).compile().as_text()
    reduces = [line for line in text.splitlines() if " all-reduce(" in line]
    assert len(reduces) == 1 and "[64" in reduces[0] and "all-gather" not in text
    assert_same_array(f(x), jax_mx.quantize(np.asarray(x), window=ROW))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_whole_windows_stay_where_they_are(axis_type):
    """No collective where shards hold whole windows; the right bytes where they do not."""
    mesh = jax.make_mesh((2, 4), ("m", "k"), axis_types=(axis_type,) * 2)
    x = floats((256, 512), "bfloat16", 8)
    calls = {
        "last": lambda x: jax_mx.quantize(x, window=128),
        "both": lambda x: jax_mx.quantize_both(x, window=128),
        "tile": lambda x: jax_mx.quantize(x, window=TILE),
        "align": lambda x: jax_mx.align(jax_mx.quantize(x), 128),
        "fake": lambda x: jax_mx.fake_quantize(x, window=128),
    }
    for name, f in calls.items():
        with jax.set_mesh(mesh):
            y = jax.device_put(x, NamedSharding(mesh, P("m", "k")))
            compiled = jax.jit(f).lower(y).compile()
            assert not COLLECTIVE.search(compiled.as_text()), name
            got = compiled(y)
        for g, want in zip(jax.tree.leaves(got), jax.tree.leaves(f(x)), strict=True):
            assert_bits_equal(g, want, name)
    if axis_type is AxisType.Auto:
        y = jax.device_put(x[:, :192], NamedSharding(mesh, P()))
        for f in calls.values():
            split = jax.jit(lambda x, f=f: f(jax.lax.with_sharding_constraint(
                x, NamedSharding(mesh, P(None, "m")))))  # fmt: skip
            for g, want in zip(
                jax.tree.leaves(split(y)), jax.tree.leaves(f(x[:, :192])), strict=True
            ):
                assert_bits_equal(g, want)


def test_explicit_meshes_keep_windows():
    mesh = jax.make_mesh((8,), ("k",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = floats((64, 512), "bfloat16", 6)
        y = jax.device_put(x, NamedSharding(mesh, P(None, "k")))
        for call in (
            lambda: jax_mx.quantize(y, window=128),
            lambda: jax_mx.fake_quantize(y, window=128),
            lambda: jax_mx.align(jax_mx.quantize(y), 128),
        ):
            assert_refused(
                call,
                private.ShardingTypeError,
                "keep its windows of 128 whole",
            )
        for q in (jax_mx.quantize(y, window=ROW), jax_mx.align(jax_mx.quantize(y), ROW)):
            assert jax.typeof(q.values).sharding.spec == P(None, "k")
            assert jax.typeof(q.scales).sharding.spec == P(None, "k")
        assert_same_array(jax_mx.quantize(y, window=ROW), jax_mx.quantize(x, window=ROW))
