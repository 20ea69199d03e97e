"""`recipe="auto"`: what it becomes on which chips, and that programs for others are MXFP8's."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits_equal, assert_refused, normal

import jax_mx
from jax_mx import MXFP4, MXFP8, MXFP8_ROWS, MXFP8_WINDOWS, Recipe
from jax_mx.launch import targets
from jax_mx.products import auto
from jax_mx.products.recipes import RECIPES

HOPPER = ("sm_90",)
LARGE = 2**20  # rows, enough for large weights
EXPERTS = jnp.asarray(np.arange(64) % 2, jnp.int32)[:, None]


floats = functools.partial(normal, dtype=jnp.bfloat16)


def like(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def mixture(x, w1, w2, **options):
    return jax_mx.moe(x, EXPERTS, jnp.ones((64, 1), jnp.float32), w1, w2, **options)


def groups(x, w, **options):
    return jax_mx.ragged_dot(x, w, jnp.asarray([40, 24], jnp.int32), **options)


NUMBERS = (((1,), (0,)), ((), ()))
CALLS = {
    "dot_general": (lambda x, w, **o: jax_mx.dot_general(x, w, NUMBERS, **o), (4096, 4096)),
    "matmul": (jax_mx.matmul, (4096, 4096)),
    "einsum": (functools.partial(jax_mx.einsum, "ab,bc->ac"), (4096, 4096)),
    "mlp": (jax_mx.mlp, (4096, 8192), (4096, 4096)),
    "ragged_dot": (groups, (2, 4096, 4096)),
    "moe": (mixture, (2, 4096, 8192), (2, 4096, 4096)),
}
OVER_GROUPS = ("ragged_dot", "moe")
each_call = pytest.mark.parametrize("name", CALLS)


def least_rows() -> int:
    """The fewest rows that 4096 x 4096 weights do not keep in bfloat16; mlp's first has more."""
    return math.ceil(1 / (1 / auto.LEAST - 2 / 4096))


def became(f, *args, device=None) -> set:
    """The recipes that "auto" becomes in a function."""
    return {call.recipe for call in jax_mx.explain(f, *args, device=device).calls}


# ---- what it becomes ---
@each_call
@pytest.mark.parametrize("chip", ["sm_80", "sm_90", "sm_100", "gfx950", "cpu", "tpu"])
def test_on_each_chip(name, chip):
    f, *shapes = CALLS[name]
    rows = 64 if name in OVER_GROUPS else LARGE
    windowed = "mxfp8_windows" if name in OVER_GROUPS else "mxfp8_rows"
    args = like(rows, 4096), *(like(*shape) for shape in shapes)
    want = windowed if chip == "sm_90" else "mxfp8"
    assert became(f, *args, device=chip) == {want}
    assert became(functools.partial(f, recipe="auto"), *args, device=chip) == {want}
    assert became(functools.partial(f, recipe="mxfp8"), *args, device=chip) == {""}


@pytest.mark.parametrize("name", [name for name in CALLS if name not in OVER_GROUPS])
def test_small_products_stay_in_bfloat16_on_hopper(name):
    """By the smallest product of a layer; on each device, as far as the mesh says it."""
    f, *shapes = CALLS[name]
    weights = [like(*shape) for shape in shapes]
    rows = least_rows()
    assert became(f, like(rows - 1, 4096), *weights, device="sm_90") == {"bf16"}
    assert became(f, like(rows, 4096), *weights, device="sm_90") == {"mxfp8_rows"}
    assert became(f, like(8, 4096), *weights, device="sm_100") == {"mxfp8"}
    with jax.set_mesh(jax.make_mesh((8,), ("data",), devices=jax.devices("cpu"))):
        assert became(f, like(8 * rows - 8, 4096), *weights, device="sm_90") == {"bf16"}
        assert became(f, like(8 * rows, 4096), *weights, device="sm_90") == {"mxfp8_rows"}


def test_a_call_that_asks_for_more_gets_no_windows():
    """A precision that FP8 tensor cores lack, or an implementation, which reads codes."""
    args = like(64, 4096), like(4096, 4096)
    for options in ({"precision": "highest"}, {"implementation": "dequantize"}):
        f = functools.partial(jax_mx.matmul, **options)
        assert became(f, *args, device="sm_90") == {"mxfp8"}


def test_of_weights_that_are_quantized():
    """The recipe of a weight quantized once; of a frozen one a recipe whose windows fit it."""
    x, w = like(LARGE, 2048), floats((2048, 2048))
    for recipe in (MXFP4, Recipe(window=128), MXFP8_ROWS):
        once = recipe.quantize_weight(w)
        assert became(lambda x, once=once: jax_mx.matmul(x, once), x, device="sm_90") == {""}
        y = jax_mx.matmul(floats((8, 2048)), once)
        assert_bits_equal(y, jax_mx.matmul(floats((8, 2048)), w, recipe=recipe))
    for window, name in ((32, "mxfp8"), ("row", "mxfp8_rows"), (256, "mxfp8_rows")):
        frozen = jax_mx.quantize(w, axis=0, window=window)
        f = functools.partial(lambda x, w: jax_mx.matmul(x, w), w=frozen)
        assert became(f, x, device="sm_90") == {name}
    stack = jax_mx.quantize(floats((2, 64, 64)), axis=1)
    assert became(lambda x: groups(x, stack), like(64, 64), device="sm_90") == {"mxfp8"}


def test_the_device_of_a_trace(monkeypatch):
    """The default device, a mesh's, a committed array's; without a GPU that of JAX_MX_ARCHS."""
    monkeypatch.delenv("JAX_MX_ARCHS", raising=False)
    assert targets.chips_of_trace(()) == ["cpu"]
    with jax.set_mesh(jax.make_mesh((8,), ("a",), devices=jax.devices("cpu"))):
        assert targets.chips_of_trace(()) == ["cpu"]
    assert targets.chips_of_trace([jax.device_put(np.ones(3), jax.devices()[-1])]) == ["cpu"]
    monkeypatch.setenv("JAX_MX_ARCHS", "sm_90a")
    assert targets.chips_of_trace(()) == ["sm_90"]
    monkeypatch.setenv("JAX_MX_ARCHS", "all")
    assert len(targets.chips_of_trace(())) > 2
    monkeypatch.setenv("JAX_MX_ARCHS", "none")
    assert targets.chips_of_trace(()) == ["cpu"]


def test_what_it_became_is_a_recipe():
    """Its repr says which one; a weight that it quantizes has the plain one, of either name."""
    with targets.traced_for(HOPPER):
        recipe = auto.resolved("op", "auto", (), lambda: [(8192,) * 3])
        weight = jax_mx.quantize_weights({"w": floats((64, 32))})["w"]
        experts = auto.resolved_for_groups("op", "auto", ())
    assert "chosen=Chosen(name='mxfp8_rows', chips='sm_90')" in repr(recipe)
    assert dataclasses.replace(recipe, chosen=None) == MXFP8_ROWS == RECIPES["mxfp8_rows"]
    assert dataclasses.replace(experts, chosen=None) == MXFP8_WINDOWS
    assert weight.recipe == MXFP8_ROWS
    x = floats((8, 64))
    assert_bits_equal(jax_mx.matmul(x, weight, recipe="mxfp8_rows"), jax_mx.matmul(x, weight))
    assert auto.resolved("op", MXFP8, (), None) is MXFP8


def test_explain_prints_it():
    text = str(jax_mx.explain(jax_mx.matmul, like(LARGE, 4096), like(4096, 4096), device="sm_90"))
    assert "auto is" in text and "mxfp8_rows" in text


# ---- programs ---
def with_gradients(f, *args):
    y, pull = jax.vjp(f, *args)
    return y, *pull(jnp.sin(y.astype(jnp.float32)).astype(y.dtype))


def small(name):
    f, *shapes = CALLS[name]
    cut = [tuple(n // 64 if n > 2 else n for n in shape) for shape in shapes]
    return f, [floats((64, 64)), *(floats(shape, i) / 8 for i, shape in enumerate(cut, 1))]


@pytest.mark.sampled(2)
@each_call
def test_the_default_is_mxfp8_here(name):
    f, args = small(name)
    for got, want in zip(
        with_gradients(f, *args),
        with_gradients(functools.partial(f, recipe=MXFP8), *args),
        strict=True,
    ):
        assert_bits_equal(got, want)


def rows_on_hopper(f, *args):
    """The same, where "auto" became rows, or windows, when it was traced."""
    with targets.traced_for(HOPPER):
        return jax.jit(functools.partial(with_gradients, f)).trace(*args)


@pytest.fixture
def never_small(monkeypatch):
    monkeypatch.setattr(auto, "LEAST", 0)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("never_small")
@pytest.mark.parametrize("name", ["dot_general", "mlp"])
def test_a_program_for_other_chips_has_mxfp8s_bits(name):
    """Traced for Hopper, and compiled for this CPU; also mapped and computed again."""
    f, args = small(name)
    want = with_gradients(functools.partial(f, recipe=MXFP8, **options(name)), *args)
    call = functools.partial(f, **options(name))
    for g in (call, jax.checkpoint(call)):
        traced = rows_on_hopper(g, *args)
        assert "window='row'" in str(traced.jaxpr)
        for a, b in zip(traced.lower().compile()(*args), want, strict=True):
            assert_bits_equal(a, b)
    with targets.traced_for(HOPPER):
        mapped = jax.jit(jax.vmap(call, (0, *[None] * (len(args) - 1)))).trace(
            args[0][None], *args[1:]
        )
    assert_bits_equal(mapped.lower().compile()(args[0][None], *args[1:])[0], want[0])


def options(name):
    return {"residuals": "floats"} if name == "mlp" else {}


@pytest.mark.usefixtures("never_small")
def test_an_export_for_several_platforms_takes_mxfp8():
    """One for Hopper alone keeps rows: its text has their amaxes."""
    f, args = small("matmul")
    want = with_gradients(functools.partial(f, recipe=MXFP8), *args)
    export = functools.partial(jax.export.export, disabled_checks=jax_mx.DISABLE_EXPORT_CHECKS)
    with targets.traced_for(HOPPER):
        g = jax.jit(functools.partial(with_gradients, f))
        several = export(g, platforms=["cpu", "tpu"])(*args)
    for a, b in zip(several.call(*args), want, strict=True):
        assert_bits_equal(a, b)


@pytest.mark.usefixtures("never_small", "without_code")
def test_a_program_for_hopper_keeps_rows():
    """By the calls that it is lowered to: amaxes are found, and codes multiplied."""
    f, args = small("matmul")
    texts = []
    for recipe in ("auto", "mxfp8_rows", "mxfp8"):
        with targets.traced_for(HOPPER):
            g = jax.jit(functools.partial(with_gradients, functools.partial(f, recipe=recipe)))
            texts.append(g.trace(*args).lower(lowering_platforms=("cuda",)).as_text())
    counts = [text.count("stablehlo.custom_call @jax_mx_launch") for text in texts]
    assert counts[0] == counts[1] != counts[2]


@pytest.mark.usefixtures("never_small")
def test_an_export_of_any_batch():
    (b,) = jax.export.symbolic_shape("b")
    x, w = jax.ShapeDtypeStruct((b, 64), jnp.bfloat16), floats((64, 32))
    with targets.traced_for(HOPPER):
        exported = jax.export.export(
            jax.jit(jax_mx.matmul), disabled_checks=jax_mx.DISABLE_EXPORT_CHECKS
        )(x, w)
    x = floats((8, 64))
    assert_bits_equal(exported.call(x, w), jax_mx.matmul(x, w, recipe=MXFP8))


def test_in_shard_map_work_is_a_devices():
    kinds = {"axis_types": (jax.sharding.AxisType.Auto,), "devices": jax.devices("cpu")}
    mesh = jax.make_mesh((8,), ("data",), **kinds)
    spec = jax.sharding.PartitionSpec
    f = jax.shard_map(
        jax_mx.matmul, mesh=mesh, in_specs=(spec("data"), spec()), out_specs=spec("data")
    )
    rows = least_rows()
    for local_rows, name in ((rows - 1, "bf16"), (rows, "mxfp8_rows")):
        assert became(f, like(8 * local_rows, 4096), like(4096, 4096), device="sm_90") == {name}


def test_auto_says_where_the_weight_stands():
    """As a recipe of chips does; the value resolves as the name does."""
    x, w, left = floats((2048, 64)), floats((96, 64), 1), Recipe.auto(weight="lhs")
    assert_bits_equal(jax_mx.matmul(x, w.T, recipe=Recipe.auto()), jax_mx.matmul(x, w.T))
    assert Recipe.auto() == Recipe.auto() != left
    assert_refused(lambda: left.quantize_weight(w.T), ValueError, "call jax_mx.quantize_weights")
    (y, pull), (want, plain) = (
        jax.vjp(f, w, x)
        for f in (
            lambda w, x: jax_mx.einsum("nk,mk->nm", w, x, recipe=left),
            lambda w, x: jax_mx.einsum("mk,nk->mn", x, w).T,
        )
    )
    assert_bits_equal(y, want)
    jax.tree.map(assert_bits_equal, pull(y), plain(y))
    wide = like(4096, 4096), like(4096, LARGE)
    for recipe in (left, Recipe.auto()):
        f = functools.partial(jax_mx.matmul, recipe=recipe)
        assert became(f, *wide, device=HOPPER[0]) == became(jax_mx.matmul, *wide, device=HOPPER[0])
