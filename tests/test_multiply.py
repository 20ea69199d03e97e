"""Floats in place of codes: quantizers that give them, and steps of products that take them.

A CPU has no kernel that gives them and no product that asks for them. So the tests tell a step to
take floats; its products are "dequantize", as in the step of codes.
"""

import contextlib
import dataclasses
import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_bits_equal,
    assert_same,
    in_turn,
    lowered_apart,
    normal,
    op_of,
    quantizings,
    random_bits,
    through_codes,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx
from jax_mx import MXFP8, Recipe
from jax_mx.launch.targets import Target
from jax_mx.products import lowering, multiply
from jax_mx.products.operand import Moved
from jax_mx.quantizing import registry
from jax_mx.shipping.shipped import SHIPPED

FORMATS = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp4_e2m1")
numbers = functools.partial(normal, dtype="bfloat16")
P = PartitionSpec
BOTH = (True, True)


# ---- what quantizers give ---
def composed(x, formats, dequantized, axis=-1, **options):
    """`through_codes` by `quantize` and `dequantize`, a call each."""
    if len(formats) == 1:
        results, turns = [jax_mx.quantize(x, formats[0], axis=axis, **options)], (False,)
    else:
        turns = (False, not dequantized[1])
        results = jax_mx.quantize_both(x, formats=formats, transpose=turns, **options)
    pairs = zip(results, dequantized, strict=True)
    return [q.dequantize(jnp.bfloat16) if floats else q for q, floats in pairs]


WAYS = {
    "last": {"dequantized": (True,)},
    "second": {"dequantized": (True,), "axis": -2},
    "before both": {"dequantized": (True,), "axis": -3},
    "both": {"dequantized": (True, True)},
    "last, codes down": {"dequantized": (True, False)},
    "codes, second": {"dequantized": (False, True)},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way,format", in_turn(WAYS, FORMATS))
def test_floats_are_what_codes_stand_for(way, format):
    x = jnp.asarray(random_bits((32, 64, 96), "bfloat16", seed=3))
    options = WAYS[way] | {"formats": (format,) * len(WAYS[way]["dequantized"]), "scaling": "even"}
    want = composed(x, **options)
    f = functools.partial(through_codes, **options)
    assert_same(f(x), want)
    assert_same(jax.jit(f)(x), want)
    if way != "before both":
        pairs = zip(*map(f, x), strict=True)  # by NumPy: XLA's CPU gives NaNs bits of its own
        mapped = [jax.tree.map(lambda *a: np.stack([*map(np.asarray, a)]), *q) for q in pairs]
        for a, b in zip(*map(jax.tree.leaves, (jax.vmap(f)(x), mapped)), strict=True):
            assert_bits_equal(a, b)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dequantized", [(True,), (True, False), (True, True)])
@pytest.mark.parametrize("source", ["rows", "swiglu", "gradient"])
def test_of_what_is_made(source, dequantized):
    x = jnp.asarray(random_bits((64, 128), "bfloat16", seed=4))
    if source == "rows":
        options = {"rows": np.array([3, -1, 70, *range(61)], np.int32)}
    else:
        dy = (
            jnp.asarray(random_bits((64, 64), "bfloat16", seed=5)) if source == "gradient" else None
        )
        options = {"activation": jax_mx.Gated("swiglu", gradient=dy)}
    formats = FORMATS[:1] * len(dequantized)
    want = jax.jit(lambda: composed(x, formats, dequantized, **options))()
    assert_same(jax.jit(lambda: through_codes(x, formats, dequantized, **options))(), want)


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_floats_lie_as_x_does(axis_type):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(axis_type,) * 2)
    x = random_bits((128, 128), "bfloat16", seed=6)
    with jax.set_mesh(mesh):
        split = jax.device_put(x, NamedSharding(mesh, P("a", "b")))
        got = jax.jit(lambda x: through_codes(x, FORMATS[:1] * 2, (True, False)))(split)
    want = composed(jnp.asarray(x), FORMATS[:1] * 2, (True, False))
    assert_same(jax.tree.map(np.asarray, got), want)
    assert got[0].sharding.spec == P("a", "b")


def test_kernels_give_floats_alone():
    """Each variant's plan has that kernel; without one, kernels of codes come before others'."""
    names = {v.name for v in SHIPPED if v.gives_floats}
    taken = set()
    for dtype, chip in (("bfloat16", "sm_90"), ("float32", "sm_90"), ("bfloat16", "gfx950")):
        for variant in SHIPPED:
            if variant.name in names and not variant.source:
                _, op = op_of(dataclasses.replace(variant, dtype=dtype))
                jaxpr = jax.make_jaxpr(lambda x, op=op: op(x))(jnp.zeros((64, 64), dtype))
                (plan,) = [
                    e.params["plan"]
                    for e in multiply.equations(jaxpr.jaxpr)
                    if e.primitive.name == "mx_quantize"
                ]
                dsl = {"sm_90": "cutedsl", "gfx950": "flydsl"}[chip]
                with registry.by_tables():
                    support = registry.IMPLEMENTATIONS[dsl].support(plan, [chip])
                assert support and support.via_codes == (dtype != "bfloat16")
                if support.is_direct:
                    taken.add(support.kernels[0].name)
    assert taken == {v.name for v in SHIPPED if v.name in names and not v.source}


# ---- which steps take them ---
@contextlib.contextmanager
def of_floats(monkeypatch):
    """Steps are of floats, whatever multiplies them; gives how many were."""
    count = []

    def names(codes, target):
        del target
        count.append(len([*multiply.contractions_in(codes.jaxpr)]))
        return ("dequantize",) * count[-1]

    with monkeypatch.context() as patch, lowered_apart():
        patch.setattr(lowering, "names_of_floats", names)
        patch.setattr(lowering, "gives_floats", lambda *_: True)
        yield count


def with_gradients(f, *args):
    """A function's result, and the gradients of half its square."""
    y, pull = jax.vjp(f, *args)
    return [y, *pull(y)]


EXPERTS = np.random.default_rng(0).integers(0, 5, (24, 2)).astype(np.int32)
SIZES = np.array([20, 0, 37, 7], np.int32)
STEPS = {
    "matmul": (2, lambda f: f(jax_mx.matmul), [(64, 96), (96, 40)]),
    "of 7 rows": (2, lambda f: f(jax_mx.matmul), [(7, 64), (64, 33)]),
    "of three dimensions": (2, lambda f: f(jax_mx.matmul), [(3, 32, 64), (64, 32)]),
    "of batches, transposed": (2, lambda f: lambda a, b: f(jax_mx.einsum)("bkm,bkn->bmn", a, b),
        [(2, 64, 32), (2, 64, 96)]),
    "of transposed weights": (2, lambda f: lambda a, b: f(jax_mx.einsum)("mk,nk->mn", a, b), [(40,
        64), (32, 64)]),
    "mlp": (4, lambda f: f(jax_mx.mlp), [(40, 64), (64, 192), (96, 72)]),
    "ragged_dot": (2, lambda f: lambda a, b: f(jax_mx.ragged_dot)(a, b, SIZES), [(80, 64), (4, 64,
        96)]),
    "moe": (4, lambda f: lambda x, w, a, b: f(jax_mx.moe)(x, EXPERTS, w, a, b), [(24, 64), (24, 2),
        (5, 64, 128), (5, 64, 64)]),
}  # fmt: skip
RECIPES = {"mxfp8": MXFP8, "hybrid": jax_mx.MXFP8_HYBRID, "dgrad in bf16": Recipe(dgrad="bf16")}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name,recipe", in_turn(STEPS, RECIPES))
def test_steps_of_floats_give_the_same_bits(name, recipe, monkeypatch):
    """Each product of the function and of its gradients, in one step of floats or another."""
    steps, make, shapes = STEPS[name]

    def given(op):
        return functools.partial(op, recipe=RECIPES[recipe], implementation="dequantize")

    f, args = make(given), [numbers(shape, i) for i, shape in enumerate(shapes)]
    want = jax.jit(functools.partial(with_gradients, f))(*args)
    with of_floats(monkeypatch) as count:
        got = jax.jit(functools.partial(with_gradients, f))(*args)
    for g, w in zip(got, want, strict=True):
        assert_bits_equal(g, w)
    # A gradient that one product takes as it is is quantized by itself.
    assert len(count) == steps // (1 + (recipe == "dgrad in bf16"))


def test_mapped_and_kept(monkeypatch):
    """Under vmap, in a scan, and by jax.checkpoint, which takes the step of codes."""
    x, w = numbers((3, 32, 64), 1), numbers((64, 64), 2)
    f = functools.partial(jax_mx.matmul, implementation="dequantize")
    keep = jax.checkpoint_policies.save_only_these_names(jax_mx.CHECKPOINT_NAME)
    ways = {
        "vmap": lambda x, w: jax.vmap(f, (0, None))(x, w),
        "vmap inside": lambda x, w: jax.vmap(f, (1, None), 1)(x, w),
        "scan": lambda x, w: jax.lax.scan(lambda c, x: (c, f(x, c)), w, x)[1],
        "checkpoint": jax.checkpoint(f, policy=keep),
    }
    for way, product in ways.items():
        want = jax.jit(functools.partial(with_gradients, product))(x, w)
        with of_floats(monkeypatch) as count:
            got = jax.jit(functools.partial(with_gradients, product))(x, w)
        assert count, way
        for g, expected in zip(got, want, strict=True):
            assert_bits_equal(g, expected, way)


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_steps_of_sharded_floats(axis_type, monkeypatch):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(axis_type,) * 2)
    x, w = numbers((128, 64), 1), numbers((64, 64), 2)
    f = functools.partial(jax_mx.matmul, implementation="dequantize")
    with jax.set_mesh(mesh):
        split = [
            jax.device_put(a, NamedSharding(mesh, spec))
            for a, spec in ((x, P("a", None)), (w, P(None, "b")))
        ]
        with of_floats(monkeypatch):
            got = jax.jit(functools.partial(with_gradients, f))(*split)
    want = jax.jit(functools.partial(with_gradients, f))(x, w)
    for g, expected in zip(got[:2], want[:2], strict=True):
        g, expected = (np.asarray(a, np.float32) for a in (g, expected))
        np.testing.assert_allclose(g, expected, rtol=2**-6, atol=0.02 * np.abs(expected).max())
    assert_bits_equal(np.asarray(got[0]), want[0])


def test_in_shard_map(monkeypatch):
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
    x, w = numbers((128, 64), 1), numbers((64, 64), 2)
    f = functools.partial(jax_mx.matmul, implementation="dequantize")
    mapped = jax.shard_map(f, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"))
    want = jax.jit(functools.partial(with_gradients, mapped))(x, w)
    with of_floats(monkeypatch) as count:
        got = jax.jit(functools.partial(with_gradients, mapped))(x, w)
    assert len(count) >= 2
    for g, expected in zip(got, want, strict=True):
        assert_bits_equal(g, expected)


@pytest.mark.parametrize("recipe", [jax_mx.MXFP8_HYBRID, MXFP8, Recipe(scaling="floor")])
def test_tokens_that_moved_as_codes(recipe):
    """Dequantized and quantized again along their elements they are the same floats."""
    x = numbers((32, 64), 0).at[3, 5].set(jnp.nan).at[4, :32].multiply(2.0**-120)
    q = jax_mx.quantize(x, recipe.lhs, scaling=recipe.scaling)
    moved = Moved(q, recipe, np.array([3, -1, 40, *range(29)], np.int32))
    floats, codes = (jax.jit(lambda as_=as_: moved.forms(as_))() for as_ in (BOTH, (False,) * 2))
    for got, want in zip(floats, codes, strict=True):
        turned = got.array if got.axis == want.axis else got.array.mT
        assert_bits_equal(turned, want.array.dequantize(jnp.bfloat16))


def test_steps_of_tokens_that_moved(monkeypatch):
    """All of a layer that is split by experts are of floats."""
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
    args = [numbers(shape, i) for i, shape in enumerate([(32, 64), (32, 2), (8, 64, 128), (8, 64,
        64)])]  # fmt: skip
    experts = np.random.default_rng(0).integers(0, 8, (32, 2)).astype(np.int32)

    def f(x, weights, w1, w2):
        options = {"implementation": "dequantize", "expert_axis": "a"}
        return jax_mx.moe(x, experts, weights, w1, w2, **options)

    with jax.set_mesh(mesh), of_floats(monkeypatch) as count:
        jax.jit(functools.partial(with_gradients, f)).lower(*args)
    assert len(count) == 4


def steps_in(f, *args):
    """The equations of all steps."""
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    return [eqn for eqn in multiply.equations(jaxpr) if eqn.primitive is multiply.step_p]


def gives_floats(eqn, names, target):
    """Whether a target has kernels for a step of floats, by these implementations."""
    avals = [v.aval for v in eqn.invars]
    params = {name: eqn.params[name] for name in ("step", "tree", "passed", "mapped")}
    return lowering.gives_floats(lowering.traced_of_floats(avals, names=names, **params), target)


def test_it_is_known_when_they_are_lowered():
    """By the chip's products, and by its kernels; a step that no chip has floats for is none."""
    x, w = numbers((4096, 512), 1), numbers((512, 256), 2)
    f = jax.grad(lambda x, w: jax_mx.matmul(x, w).astype(jnp.float32).sum(), (0, 1))
    forward, backward = steps_in(f, x, w)
    chips = {"sm_90": "cuda", "sm_89": "cuda", "sm_100": "cuda", "gfx942": "rocm"}
    chips |= {"gfx950": "rocm", "cpu": "cpu"}
    for chip, platform in chips.items():
        target = Target(platform, [chip])
        for count, eqn in ((1, forward), (2, backward)):
            names = lowering.names_of_floats(eqn.params["codes"], target)
            # These multiply codes, or float32.
            if chip in ("sm_100", "gfx942", "gfx950", "cpu"):
                assert names == (), chip
                continue
            assert names == ("dequantize",) * count, chip
            assert gives_floats(eqn, names, target), chip
    for recipe, dtype in (
        (Recipe(window=128), "bfloat16"),
        (MXFP8, "float32"),
        ("bf16", "bfloat16"),
    ):
        product = functools.partial(jax_mx.matmul, recipe=recipe)
        assert not steps_in(product, x.astype(dtype), w.astype(dtype)), recipe
    assert not steps_in(
        lambda q, w: jax_mx.matmul(q, w), jax_mx.quantize(x), jax_mx.quantize(w, axis=0)
    )


def test_products_that_do_not_take_floats_leave_the_step_in_codes():
    """Kernels that read the codes of weights: few rows, by name."""
    x, w = numbers((16, 512), 1), numbers((512, 256), 2)
    f = functools.partial(jax_mx.matmul, implementation="cutedsl")
    (eqn,) = steps_in(f, x, w)
    target = Target("cuda", ["sm_90"])
    with registry.by_tables():
        names = lowering.names_of_floats(eqn.params["codes"], target)
    assert names == ("cutedsl",)
    assert not gives_floats(eqn, names, target)


@pytest.mark.parametrize("dequantized", [False, True])
def test_a_scan_does_not_keep_a_weight_for_each_microbatch(dequantized):
    """A step hands the caller's arrays through, which are constants of the backward scan."""
    xs, w = jnp.zeros((4, 256, 64), jnp.bfloat16), numbers((64, 96), 2)

    def f(w, xs):
        weight = MXFP8.quantize_weight(w, dequantized=dequantized)
        return jax.lax.map(lambda x: jax_mx.matmul(x, weight), xs).astype(jnp.float32).sum()

    jaxpr = jax.make_jaxpr(jax.grad(f, (0, 1)))(w, xs).jaxpr
    forward, backward = [e for e in multiply.equations(jaxpr) if e.primitive.name == "scan"]
    kept = [v.aval.shape[1:] for v in forward.outvars]
    assert (256, 96) in kept and (64, 256) in kept  # y, x along its rows
    assert not {(64, 96), (96, 64), (64, 3), (2, 96)} & {*kept}
    assert (64, 96) in [v.aval.shape for v in backward.invars]


def test_explain_and_counts_see_a_step_once():
    x, w = numbers((64, 64), 1), numbers((64, 64), 2)
    f = jax.grad(lambda x, w: jax_mx.matmul(x, w).astype(jnp.float32).sum(), (0, 1))
    assert sum(entry.count for entry in jax_mx.explain(f, x, w).calls) == 3
    assert quantizings(f, x, w) == 6


@pytest.mark.sampled(2, 1)
@pytest.mark.usefixtures("others_frozen")
@pytest.mark.parametrize("name", STEPS)
def test_steps_hold_no_arrays(name):
    """No tracer leaks by way of what a step is traced from; without jit nothing is kept at all."""
    _, make, shapes = STEPS[name]
    f, args = make(lambda op: op), [numbers(shape, i) for i, shape in enumerate(shapes)]
    with lowered_apart(), jax.checking_leaks():
        jax.make_jaxpr(functools.partial(with_gradients, f))(*args)


def test_a_checkpoint_keeps_steps_whole_and_its_first_pass_keeps_no_form():
    """So products get floats from one kernel; a policy that keeps codes looks into the step."""
    x, w = numbers((64, 128), 1), numbers((2, 128, 128), 2)

    def loop(layer):
        step = lambda c, w: (layer(c, w), None)  # noqa: E731
        return lambda x, w: jax.lax.scan(step, x, w)[0]

    product = lambda x, w: jax_mx.matmul(x, jnp.sin(w), recipe="mxfp8")  # noqa: E731
    want = jax.jit(functools.partial(with_gradients, loop(product)))(x, w)
    policies = jax.checkpoint_policies
    for policy, kept in (
        (policies.nothing_saveable, [(), ((0, 1), (1, 1))]),
        (policies.everything_saveable, []),
        (policies.save_only_these_names(jax_mx.CHECKPOINT_NAME), []),
    ):
        f = functools.partial(with_gradients, loop(jax.checkpoint(product, policy=policy)))
        for g, expected in zip(jax.jit(f)(x, w), want, strict=True):
            assert_bits_equal(g, expected)
        steps = [eqn.params["step"] for eqn in steps_in(f, x, w)]
        assert [s.kept for s in steps if len(s.multiplications) == 1] == kept
        if kept:
            first = steps_in(f, x, w)[0]
            operands, _ = first.params["tree"].unflatten(first.invars)
            assert [operand.wanted for operand in operands] == [(True, False)] * 2


@pytest.mark.usefixtures("others_frozen")
def test_without_jit_nothing_is_compiled_or_kept():
    x, w = numbers((64, 64), 1), numbers((64, 64), 2)
    f = functools.partial(with_gradients, jax_mx.matmul)
    want = jax.jit(f)(x, w)
    with jax.disable_jit():
        f(x, w)
        gc.collect()
        before = len(jax.live_arrays())
        got = f(x, w)
        assert all(eqn.primitive is not multiply.step_p for eqn in jax.make_jaxpr(f)(x, w).eqns)
        count = len(got)
        for g, expected in zip(got, want, strict=True):
            assert_bits_equal(g, expected)
        del got, g
        gc.collect()
        assert len(jax.live_arrays()) <= before + count


def test_a_scan_does_not_keep_an_operand_that_a_product_reads_as_it_is():
    """A bfloat16 weight whose dgrad is not quantized is a constant of the scan, kept once."""
    x, w = jnp.ones((4, 64, 128), jnp.bfloat16), jnp.ones((128, 256), jnp.bfloat16)
    recipe = Recipe(dgrad="bf16")

    def loop(x, w):
        step = lambda c, x: (c, jax_mx.matmul(x, w, recipe=recipe))  # noqa: E731
        return jax.lax.scan(step, 0, x)[1]

    kept = jax.eval_shape(lambda *args: jax.vjp(loop, *args)[1], x, w)
    assert (4, 128, 256) not in {leaf.shape for leaf in jax.tree.leaves(kept)}
