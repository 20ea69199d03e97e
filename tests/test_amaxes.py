"""The largest magnitudes of rows and of columns: one read of floats for windows that are rows."""

import contextlib
import functools
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exact import assert_equal, of, on_hopper
from helpers import MADE, amaxes, assert_bits_equal, call, lowered_apart, poison_memory, stand_in
from on_device import HERE

import jax_mx
from jax_mx.formats.directions import BOTH_TRANSPOSED, LAST, SECOND, Blocks
from jax_mx.formats.formats import BLOCK, MXFP8_E4M3, MXFP8_E5M2, Scaling
from jax_mx.formats.windows import ROW
from jax_mx.launch import store
from jax_mx.products.multiply import equations
from jax_mx.quantizing import quantizers
from jax_mx.quantizing.facts.modes import Mode
from jax_mx.quantizing.facts.variants import Variant


def check_amaxes(x, implementation="xla", whole=None):
    """For x (batch, rows, columns), or what is cut from an array that is passed instead."""
    poison_memory()
    cut = whole is not None
    f = functools.partial(amaxes, implementation=implementation)
    results = jax.jit((lambda a: f(a[1:].reshape(x.shape))) if cut else f)(whole if cut else x)
    if x.dtype == np.float32:
        bits = np.asarray(x).view(np.uint32) & np.uint32(0x7FFFFFFF)
    else:
        bits = np.asarray(x).view(np.uint16).astype(np.uint32) << 16 & 0x7FFFFFFF
    for got, axis in zip(results, (-1, -2), strict=True):
        assert_equal(got, bits.max(axis), (x.shape, axis))


def any_bits(rng, shape, dtype=jnp.bfloat16):
    """Floats of any bits: NaNs, infinities, zeros, subnormals."""
    bits = np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")
    x = rng.normal(size=shape).astype(dtype).view(bits)
    few = rng.random(shape) < 0.02 / np.sqrt(np.prod(shape) + 1)
    few |= rng.random(shape) < 0.2 / (shape[-1] + 1)
    x = np.where(few, rng.integers(0, np.iinfo(bits).max, shape, bits, endpoint=True), x)
    return x.astype(bits).view(dtype)


@contextlib.contextmanager
def amaxes_for_each_block():
    """Within it programs are lowered as those that XLA splits, by no rule, but not split."""
    target_of = quantizers.target_of

    def as_if_split(*args):
        return target_of(*args)._replace(partitioned=True, is_mixed=True)

    with lowered_apart(), mock.patch.object(quantizers, "target_of", as_if_split):
        yield


def test_amaxes_of_rows_and_columns():
    rng = np.random.default_rng(21)
    check_amaxes(any_bits(rng, (2, 64, 96)))
    x = any_bits(rng, (2, 3, 64, 96)).astype(np.float32)
    x = jnp.asarray(np.where(np.isnan(x), 1, x), jnp.bfloat16)
    both = functools.partial(jax_mx.quantize_both, window="row")
    jaxpr = jax.make_jaxpr(both)(x)
    assert str(jaxpr).count("mx_quantize_rows") == 1 and "reduce_max" not in str(jaxpr)
    for q, axis in zip(both(x), (-1, -2), strict=True):
        alone = jax_mx.quantize(x, axis=axis, transpose=axis == -2, window="row")
        for got, want in zip(jax.tree.leaves(q), jax.tree.leaves(alone), strict=True):
            assert_equal(got.view(jnp.uint8), np.asarray(want.view(jnp.uint8)))
    f = jax.vmap(jax.vmap(functools.partial(amaxes, implementation="xla")), 1)
    for got, axis in zip(f(x[:, :, None]), (-1, -2), strict=True):
        want = amaxes(x.reshape(-1, *x.shape[2:]), implementation="xla")[-1 - axis]
        want = np.swapaxes(np.asarray(want).reshape(2, 3, 1, -1), 0, 1)
        assert_equal(got, want)


def test_amaxes_are_read_once(monkeypatch):
    """Where nothing is split among devices, of x as it lies; else by XLA."""
    monkeypatch.setattr(store, "obstacle", lambda *_: "")
    monkeypatch.setattr(store, "get", stand_in)
    f = functools.partial(jax_mx.quantize_both, window="row")
    x = jax.ShapeDtypeStruct((2, 3, 64, 96), jnp.bfloat16)
    text = jax.jit(f).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "(tensor<6x64x96xbf16>) -> (tensor<6x64xui32>, tensor<6x96xui32>)" in text
    assert "stablehlo.reduce" not in text
    text = jax.jit(functools.partial(f, implementation="xla")).trace(x).lower().as_text()
    assert "6x64x96" not in text


def check_made(word):
    """A source's floats and their amaxes, beside XLA's: tails, any address, any bits."""
    rng, source = np.random.default_rng(26), MADE[word]
    cases = [(32, 32, 0, 1), (160, 544, 0, 1), (4128, 96, 0, 1), (96, 1568, 1, 1)]
    for rows, columns, offset, parts in [*cases, (1536, 544, 0, 6), (1024, 96, 1, 8)]:
        gates = 1 + ("up" not in [array.name for array in source.operands])
        shape_by_name = {"x": (rows, gates * columns), "weights": (rows,)}
        shapes = [shape_by_name.get(array.name, (rows, columns)) for array in source.operands]
        whole = [
            any_bits(rng, (math.prod(shape) + offset,), array.dtype or jnp.bfloat16)
            for shape, array in zip(shapes, source.operands, strict=True)
        ]

        def f(*whole, implementation):
            arrays = [a[offset:].reshape(s) for a, s in zip(whole, shapes, strict=True)]  # noqa: B023
            return amaxes(*arrays, implementation=implementation, source=source, parts=parts)  # noqa: B023

        poison_memory()
        results = jax.jit(functools.partial(f, implementation="cutedsl"))(*whole)
        want = jax.jit(functools.partial(f, implementation="xla"))(*whole)
        for got, wanted in zip(results, want, strict=True):
            assert_bits_equal(got, wanted, f"{word} {rows} x {columns} in {parts}")


@pytest.mark.gpu
@on_hopper
def test_what_is_made_is_quantized_in_windows_of_rows():
    """By the plans of a layer: along rows, along columns, both ways; from gates and ups."""
    rng = np.random.default_rng(27)
    for rows, columns in [(96, 160), (64, 2080), (160, 14336)]:
        x, dy = any_bits(rng, (rows, 2 * columns)), any_bits(rng, (rows, columns))
        gated, back = jax_mx.Gated("swiglu"), jax_mx.Gated("swiglu", gradient=jnp.asarray(dy))
        both = functools.partial(jax_mx.quantize_both, transpose=(False, True))

        def of_pair(quantize, x, **options):
            gate, up = jnp.split(x, 2, -1)
            return quantize(gate, activation=jax_mx.Gated("swiglu", up=up), **options)

        for op in (
            functools.partial(jax_mx.quantize, activation=gated),
            functools.partial(jax_mx.quantize, activation=gated, axis=-2, transpose=True),
            functools.partial(both, activation=gated),
            functools.partial(both, activation=back),
            functools.partial(of_pair, jax_mx.quantize),
            functools.partial(of_pair, both),
        ):
            f = functools.partial(op, window="row")
            poison_memory()
            leaves = jax.tree.leaves(jax.jit(f)(x))
            want = jax.tree.leaves(jax.jit(functools.partial(f, implementation="xla"))(x))
            for got, wanted in zip(leaves, want, strict=True):
                assert_bits_equal(got, wanted, f"{rows} x {columns}")


def test_what_nobody_reads_is_not_quantized():
    """Under jax.checkpoint forward passes read one of both directions, and some backward ones."""
    rng = np.random.default_rng(28)
    x, w, v = (
        jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in [(64, 96), (96, 64), (64, 32)]
    )
    matmul = functools.partial(jax_mx.matmul, recipe=jax_mx.Recipe(window="row"))

    def loss(x, w, v, checkpoint=lambda f: f):
        f = checkpoint(lambda x, w, v: matmul(jnp.tanh(matmul(x, w)), v))
        return (f(x, w, v).astype(jnp.float32) ** 2).sum()

    grad = jax.grad(functools.partial(loss, checkpoint=jax.checkpoint), (0, 1, 2))
    read = [eqn.params["read"] for eqn in rows_in(jax.make_jaxpr(grad)(x, w, v).jaxpr)]
    along, down, both = (True, True, False, False), (False, False, True, True), (True,) * 4
    # Forward x, w, the activation and v; then again x and w both ways, what is left of the
    # activation and of v, and both gradients.
    assert sorted(read) == sorted([along, down] * 2 + [both] * 4 + [down, along])
    want = jax.jit(jax.grad(loss, (0, 1, 2)))(x, w, v)
    for got, wanted in zip(jax.jit(grad)(x, w, v), want, strict=True):
        assert_bits_equal(got, wanted)


def rows_in(jaxpr):
    """The equations of a jaxpr that quantize rows."""
    return [eqn for eqn in equations(jaxpr) if eqn.primitive is quantizers.quantize_rows_p]


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("pair", [False, True])
def test_one_direction_has_the_bytes_of_both(pair):
    """Whatever makes the floats: gradients with jax.checkpoint are those without."""
    rng = np.random.default_rng(29)
    shapes = [(64, 96), (96, 64), (96, 64), (64, 32)]
    x, gate, up, down = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in shapes)

    def loss(x, gate, up, down, checkpoint=lambda f: f):
        def f(x, gate, up, down):
            first = (gate, up) if pair else jnp.concatenate([gate, up], -1)
            options = {"recipe": jax_mx.Recipe(window="row"), "residuals": "floats"}
            return jax_mx.mlp(x, first, down, **options)

        return (checkpoint(f)(x, gate, up, down).astype(jnp.float32) ** 2).sum()

    grad = jax.grad(functools.partial(loss, checkpoint=jax.checkpoint), range(4))
    read = {eqn.params["read"] for eqn in rows_in(jax.make_jaxpr(grad)(x, gate, up, down).jaxpr)}
    assert len(read) == 3
    want = jax.jit(jax.grad(loss, range(4)))(x, gate, up, down)
    for got, wanted in zip(jax.jit(grad)(x, gate, up, down), want, strict=True):
        assert_bits_equal(got, wanted)


@on_hopper
@of("amaxes")
def test_the_kernel_of_amaxes(variant):
    assert variant.rows == 128
    if variant.source:
        return check_made(variant.source)
    rng, dtype = np.random.default_rng(22), np.dtype(variant.floats or jnp.bfloat16)
    for shape in [(1, 32, 32), (3, 32, 64), (2, 160, 544), (1, 4096, 1024), (5, 96, 1568)]:
        check_amaxes(any_bits(rng, shape, dtype), "cutedsl")
    x = any_bits(rng, (1, 64, 544), dtype)
    whole = np.concatenate([x[0, 0, :1], x.ravel()])
    check_amaxes(x, "cutedsl", whole)


# ---- quantizers of windows that are rows ---
# The warps of WholeRows' thread blocks share out rows by their lengths: each number of warps,
# rows that registers hold just so and just not; and tails of all kinds.
SHAPES = {
    True: [
        (1, 32), (7, 96), (130, 2048), (33, 2080), (9, 4096), (6, 4128), (5, 8192), (3, 8224),
        (1061, 14336), (2, 16384), (3, 16416), (2, 70016), (0, 64), (3, 0), (2, 3, 160),
    ],
    False: [
        (32, 32), (32, 8), (96, 160), (64, 7), (256, 4096), (160, 1160), (2, 64, 544),
        (4128, 64), (1024, 2880), (0, 64), (64, 0), (3, 32, 264),
    ],
}  # fmt: skip
OF_ROWS = [v for v in HERE if v.window == ROW]


def wanted(x, variant):
    """Codes and scales of each direction, as bytes, in NumPy; both transposed where they are."""
    arrays = []
    for format, direction in zip(variant.formats, variant.form.directions, strict=True):
        rows = np.ascontiguousarray(
            x if direction.blocks is Blocks.LAST else np.swapaxes(x, -1, -2)
        )
        bits = rows.view(np.uint32) if x.dtype == np.float32 else rows.view(np.uint16)
        bits = bits.astype(np.uint32) << (0 if x.dtype == np.float32 else 16)
        amax = (bits & 0x7FFFFFFF).max(-1, keepdims=True, initial=0)
        add, exception = Scaling.RCEIL.rounding(format)
        scale = np.maximum(amax + np.uint32(add) >> 23, format.emax) - format.emax
        scale[amax == np.uint32(exception & 0xFFFFFFFF)] = 0
        scale[amax >= 0x7F800000] = 255
        with np.errstate(invalid="ignore", over="ignore"):
            scaled = rows.astype(np.float64) * 2.0 ** (127 - scale.astype(np.float64))
            codes = scaled.astype(format.storage).view(np.uint8)
        codes = np.where(scale == 255, np.uint8(format.nan_code), codes)
        scales = np.broadcast_to(scale.astype(np.uint8), codes.shape)[..., ::BLOCK]
        if direction.blocks is Blocks.SECOND and not direction.transposed:
            codes, scales = (np.swapaxes(a, -1, -2) for a in (codes, scales))
        arrays += [codes, scales]
    return arrays


def check_rows(variant, x, implementation=None, whole=None):
    """Bits of a variant's call, for x, or for what is cut from an array that is passed instead."""
    f = call(variant, implementation or variant.implementation)
    cut = (lambda a: f(a[whole.size - x.size :].reshape(x.shape))) if whole is not None else f
    poison_memory()
    results = jax.tree.leaves(jax.jit(cut)(x if whole is None else whole))
    for got, want in zip(results, wanted(np.asarray(x), variant), strict=True):
        assert_equal(got.view(jnp.uint8), want, (variant.name, x.shape))


def test_the_oracle_of_rows():
    rng = np.random.default_rng(25)
    for form in (LAST, SECOND, BOTH_TRANSPOSED):
        formats = (MXFP8_E4M3, MXFP8_E5M2)[: len(form.directions)]
        for dtype in (jnp.bfloat16, np.float32):
            modes = (Mode(window=ROW),) * len(formats)
            variant = Variant("quantize", "xla", form, np.dtype(dtype).name, formats, modes)
            x = any_bits(rng, (64, 96), dtype)
            check_rows(variant, x, "xla")


@pytest.mark.gpu
@pytest.mark.parametrize("variant", OF_ROWS, ids=lambda v: v.name)
def test_windows_that_are_rows(variant):
    """Also of what is cut from an array, so that it lies at any address."""
    rng = np.random.default_rng(23)
    for shape in SHAPES[variant.form == LAST]:
        if not variant.form.is_both or shape[-1] % BLOCK == 0:
            check_rows(variant, any_bits(rng, shape, variant.dtype))
    for shape in [(32, 32), (64, 4128)]:
        whole = any_bits(rng, (math.prod(shape) + 3,), variant.dtype)
        check_rows(variant, whole[3:].reshape(shape), whole=whole)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", OF_ROWS, ids=lambda v: v.name)
def test_amaxes_of_each_block(variant):
    """As XLA gives them where it splits a program: for each block, not once a row."""
    if variant.finds_amaxes:
        pytest.skip("it takes none")
    for shape in [(96, 160), (2, 64, 2080)]:
        x = any_bits(np.random.default_rng(24), shape, variant.dtype)
        with amaxes_for_each_block():
            text = jax.jit(call(variant, variant.implementation)).lower(x).as_text()
            assert text.count(f"@{store.TARGET}(") == 1 + variant.form.is_both
            check_rows(variant, x)
