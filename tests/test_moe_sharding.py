"""`moe` over meshes: the results of one device, what moves, under each kind of mesh."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits_equal, assert_refused
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mx
from jax_mx import MXFP8

pytestmark = pytest.mark.optimized

TOKENS, K, D, I, E = 64, 2, 64, 128, 8  # noqa: E741
ROWS = P(("data", "expert"))
MESHES = {
    "experts": ((2,), ("expert",), {"expert_axis": "expert"}),
    "data and experts": ((2, 4), ("data", "expert"), {"expert_axis": "expert"}),
    "floats": ((2, 4), ("data", "expert"), {"expert_axis": "expert", "wire": "floats"}),
    "tensor": (
        (2, 2, 2),
        ("data", "expert", "tensor"),
        {"expert_axis": "expert", "tensor_axis": "tensor"},
    ),
    "tokens": ((8,), ("data",), {"token_axes": "data"}),
    "one": ((1,), ("expert",), {"expert_axis": "expert"}),
}
# Where data is split, blocks along tokens are others, and sums have another order; the smallest
# elements of a block that was quantized along rows may be rounded once more along tokens.
BOUND = 1e-6


def operands(seed=0):
    """x, experts, weights, both matrices, both biases, the result's gradient."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    experts = jnp.asarray(rng.integers(-1, E + 1, (TOKENS, K)), jnp.int32)
    weights = jnp.asarray(rng.random((TOKENS, K)), jnp.float32)
    matrices = normal(E, D, 2 * I) / 8, normal(E, I, D) / 8
    return (
        normal(TOKENS, D),
        experts,
        weights,
        *matrices,
        normal(E, 2 * I),
        normal(E, D),
        normal(TOKENS, D),
    )


def with_gradients(**options):
    @jax.jit
    def both(x, experts, weights, w1, w2, b1, b2, dy):
        def f(x, weights, w1, w2, b1, b2):
            own = {"b_gate_up": b1, "b_down": b2, **options}
            return jax_mx.moe(x, experts, weights, w1, w2, **own)

        y, pull = jax.vjp(f, x, weights, w1, w2, b1, b2)
        return y, *pull(dy)

    return both


def placed(args, mesh, names):
    rows = P(tuple(name for name in ("data", "expert") if name in names))
    stacks = P("expert") if "expert" in names else P()
    specs = (rows, rows, rows, *[stacks] * 4, rows)
    return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)]


def collectives(compiled) -> set[str]:
    """Which there are, each with its type."""
    found = re.findall(
        r"= \(?(\w+)\[[^=]*? (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(",
        compiled.as_text(),
    )
    return {f"{op} {dtype}" for dtype, op in found}


DEFAULT = {("data and experts", AxisType.Auto), ("tensor", AxisType.Explicit)}
CASES = [
    pytest.param(name, kind, marks=() if (name, kind) in DEFAULT else pytest.mark.thorough)
    for name in MESHES
    for kind in (AxisType.Auto, AxisType.Explicit)
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_results_are_those_of_one_device(name, kind):
    shape, names, options = MESHES[name]
    args = operands()
    want = with_gradients()(*args)
    mesh = jax.make_mesh(
        shape, names, axis_types=(kind,) * len(shape), devices=jax.devices()[: np.prod(shape)]
    )
    with jax.set_mesh(mesh):
        got = with_gradients(**options)(*placed(args, mesh, names))
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        # Each expert's tokens are on one shard. The gradients of both matrices read tokens and
        # gradients that were quantized on the way.
        if "data" not in names and i not in (3, 4, 6):
            assert_bits_equal(a, b)
        else:
            far = np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b))
            assert far < BOUND, i


def test_what_moves():
    """Tokens and the result's gradient as bytes; what comes back, as floats."""
    shape, names, options = MESHES["data and experts"]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * 2)
    x, experts, weights, w1, w2, *_ = operands()
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, ROWS)
        stacks = NamedSharding(mesh, P("expert"))
        args = [jax.device_put(a, rows) for a in (x.astype(jnp.bfloat16), experts, weights)]
        args += [jax.device_put(w, stacks) for w in (w1, w2)]
        forward = jax.jit(lambda *a: jax_mx.moe(*a, **options)).lower(*args).compile()
    found = collectives(forward)
    assert {each for each in found if each.startswith("all-gather")} == {
        "all-gather u8",  # codes and scales
        "all-gather s32",  # experts
        "all-gather f32",  # the router's weights
    }
    text = forward.as_text()
    assert not re.search(rf"f32\[{TOKENS // 2},{D}\][^=]* all-gather", text)
    assert any(each.startswith("reduce-scatter") for each in found)


@pytest.mark.thorough
def test_weights_that_fsdp_splits():
    args = operands()
    want = with_gradients()(*args)
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)

    def f(x, experts, weights, w1, w2, b1, b2, dy):
        def layer(x, weights, w1, w2, b1, b2):
            ws = [
                jax_mx.gather_weight(w, P(None, "data"), MXFP8, contracting=1, batch=0)
                for w in (w1, w2)
            ]
            biases = {"b_gate_up": b1, "b_down": b2}
            return jax_mx.moe(x, experts, weights, *ws, expert_axis="expert", **biases)

        y, pull = jax.vjp(layer, x, weights, w1, w2, b1, b2)
        return y, *pull(dy)

    with jax.set_mesh(mesh):
        own = placed(args, mesh, ("data", "expert"))
        for i in (3, 4):
            own[i] = jax.device_put(own[i], NamedSharding(mesh, P("expert", "data")))
        got = jax.jit(f)(*own)
    for a, b in zip(got, want, strict=True):
        far = np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b))
        assert far < BOUND


def test_in_shard_map():
    x, experts, weights, w1, w2, *_ = operands()
    want = jax_mx.moe(x, experts, weights, w1, w2)
    mesh = jax.make_mesh((4,), ("expert",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    for check in (True, False):
        layer = jax.jit(
            jax.shard_map(
                lambda *args: jax_mx.moe(*args, expert_axis="expert"),
                mesh=mesh,
                in_specs=P("expert"),
                out_specs=P("expert"),
                check_vma=check,
            )
        )
        assert_bits_equal(layer(x, experts, weights, w1, w2), want)


def test_messages():
    x, experts, weights, w1, w2, *_ = operands()
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)

    def call(x=x, **options):
        n = x.shape[0]
        return lambda: jax_mx.moe(x, experts[:n], weights[:n], w1, w2, **options)

    with jax.set_mesh(mesh):
        own = {"expert_axis": "expert"}
        assert_refused(call(x[:7], **own), ValueError, "pad x with zero rows whose experts are -1")
        assert_refused(call(expert_axis="experts"), ValueError, "is no axis of a mesh here")
        assert_refused(call(expert_axis=3), TypeError, "must be the name of a mesh axis, got 3")
        assert_refused(call(tensor_axis="data"), ValueError, "tensor_axis without expert_axis")
        assert_refused(call(token_axes="rows", **own), ValueError, "['rows'] are not among")
    assert_refused(call(token_axes="data"), ValueError, "token_axes want a mesh")
    assert_refused(call(expert_axis="expert"), ValueError, "set one around the call")
