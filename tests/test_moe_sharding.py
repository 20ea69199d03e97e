"""`moe` over meshes: the results of one device, what moves, under each kind of mesh."""

import functools
import math
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_bits_equal,
    assert_refused,
    on_two,
    only,
    step,
    with_table,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mx
from jax_mx import MXFP8
from jax_mx.experts import wires
from jax_mx.experts.costs import WAYS

DOCS = Path(__file__).parent.parent / "docs" / "sharding.md"
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
    "rounds": ((8,), ("expert",), {"expert_axis": "expert", "way": "rounds"}),
    "rounds, data": ((2, 4), ("data", "expert"), {"expert_axis": "expert", "way": "rounds"}),
    "rounds, tensor": (
        (2, 2, 2),
        ("data", "expert", "tensor"),
        {"expert_axis": "expert", "tensor_axis": "tensor", "way": "rounds"},
    ),
}
# Where data is split, blocks along tokens are others, and sums have another order; the smallest
# elements of a block that was quantized along rows may be rounded once more along tokens.
BOUND = 1e-6


def of_eight(shape=(8,), names=("expert",), axis_type=AxisType.Auto):
    return jax.make_mesh(
        shape, names, axis_types=(axis_type,) * len(shape), devices=jax.devices()[: np.prod(shape)]
    )


def operands(seed=0, tokens=TOKENS, d=D, i=I):
    """x, experts, weights, both matrices, both biases, the result's gradient."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    experts = jnp.asarray(rng.integers(-1, E + 1, (tokens, K)), jnp.int32)
    weights = jnp.asarray(rng.random((tokens, K)), jnp.float32)
    matrices = normal(E, d, 2 * i) / 8, normal(E, i, d) / 8
    return (
        normal(tokens, d),
        experts,
        weights,
        *matrices,
        normal(E, 2 * i),
        normal(E, d),
        normal(tokens, d),
    )


def layer(x, experts, weights, w1, w2, b1, b2, **options):
    return jax_mx.moe(x, experts, weights, w1, w2, b_gate_up=b1, b_down=b2, **options)


def with_gradients(layer=layer, **options):
    return jax.jit(step(functools.partial(layer, **options), (0, 2, 3, 4, 5, 6)))


def placed(args, mesh, names):
    rows = P(tuple(name for name in ("data", "expert") if name in names))
    stacks = P("expert") if "expert" in names else P()
    specs = (rows, rows, rows, *[stacks] * 4, rows)
    return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)]


def collectives(compiled) -> set[str]:
    """The collectives of a compiled program, each with its type."""
    moves = re.findall(
        r"= \(?(\w+)\[[^=]*? (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(",
        compiled.as_text(),
    )
    return {f"{op} {dtype}" for dtype, op in moves}


DEFAULT = {("data and experts", AxisType.Auto), ("tensor", AxisType.Explicit)}
CASES = [
    pytest.param(
        name, axis_type, marks=() if (name, axis_type) in DEFAULT else pytest.mark.thorough
    )
    for name in MESHES
    for axis_type in (AxisType.Auto, AxisType.Explicit)
]


@functools.cache
def of_one_device():
    """The result and the gradients that each mesh must give."""
    return with_gradients()(*operands())


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "axis_type"), CASES)
def test_results_are_those_of_one_device(name, axis_type):
    shape, names, options = MESHES[name]
    args, want = operands(), of_one_device()
    mesh = jax.make_mesh(
        shape, names, axis_types=(axis_type,) * len(shape), devices=jax.devices()[: np.prod(shape)]
    )
    with jax.set_mesh(mesh):
        got = with_gradients(**options)(*placed(args, mesh, names))
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        # Each expert's tokens are on one shard. The gradients of both matrices read tokens and
        # gradients that were quantized on the way; XLA sums a weight's in another order.
        if "data" not in names and i not in (3, 4, 6, *[2] * ("rounds" in name)):
            assert_bits_equal(a, b)
        else:
            far = np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b))
            assert far < BOUND, i


# ---- on GPUs ---
@pytest.mark.gpu
@pytest.mark.skipif("len(jax.devices()) < 2", reason="wants two GPUs")
@pytest.mark.parametrize("wire", wires.KINDS)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit, AxisType.Manual], ids=str)
def test_results_on_two_gpus_are_those_of_one(axis_type, wire):
    """One program for three routings: graphs that it was captured in serve all of them."""
    options = {"expert_axis": "expert", "wire": wire}
    mesh_type = AxisType.Explicit if axis_type is AxisType.Explicit else AxisType.Auto
    mesh = of_eight((2,), axis_type=mesh_type)
    mapped = layer
    if axis_type is AxisType.Manual:
        specs = (P("expert"),) * 7
        take = functools.partial(layer, **options)
        mapped = jax.shard_map(take, mesh=mesh, in_specs=specs, out_specs=P("expert"))
        options = {}
    program, alone = with_gradients(mapped, **options), with_gradients()
    for seed in range(3):
        args = operands(seed, 1024, 256, 256)
        want = alone(*args)
        with jax.set_mesh(mesh):
            placed_args = placed([np.asarray(a) for a in args], mesh, ("expert",))
            got, again = program(*placed_args), program(*placed_args)
        for i, (a, b, c) in enumerate(zip(got, want, again, strict=True)):
            assert_bits_equal(a, c)
            far = np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b))
            assert far < BOUND, (seed, i)


# ---- what moves, of which type and size ---
SIZES = {"T": 1024, "k": 2, "D": 256, "I": 128, "E": 8}
_BEGINS = re.compile(r'"stablehlo\.(all_gather|all_reduce|reduce_scatter|all_to_all)"')
_ENDS = re.compile(r"-> tensor<([0-9x]*?)x?([a-z]+[0-9]+)>")


def moved(name: str) -> tuple[dict[str, int], dict[str, int]]:
    """The lowered layer's collectives, forward, then backward, and elements that arrive.

    Lowered, as XLA's CPU compiler moves bfloat16 as float32.
    """
    shape, names, options = MESHES[name]
    mesh = of_eight(shape, names)
    tokens, k, d, i, e = SIZES.values()
    rows, stacks = (NamedSharding(mesh, only(spec, names)) for spec in (ROWS, P("expert")))

    def aval(where, *shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    args = [aval(rows, tokens, d), aval(rows, tokens, k, dtype=jnp.int32)]
    args += [aval(rows, tokens, k, dtype=jnp.float32)]
    args += [aval(stacks, e, d, 2 * i), aval(stacks, e, i, d)]

    def forward(x, experts, weights, w1, w2):
        return jax_mx.moe(x, experts, weights, w1, w2, **options)

    both = step(forward, (0, 2, 3, 4))
    counts = []
    with jax.set_mesh(mesh):
        for f, arguments in ((forward, args), (both, [*args, args[0]])):
            moved, op = Counter(), ""
            for line in jax.jit(f).lower(*arguments).as_text().splitlines():
                if begins := _BEGINS.search(line):
                    op = begins[1].replace("_", "-")
                closes = line.strip().startswith("})") or "({" not in line  # behind a reducer
                if op and closes and (ends := _ENDS.search(line)):
                    dtype = ends[2].replace("ui", "u") if "u" in ends[2] else ends[2]
                    size = math.prod(int(n) for n in ends[1].split("x") if n)
                    moved[f"{op} {dtype.replace('i32', 's32')}"] += size
                    op = ""
            counts.append(moved)
    return dict(counts[0]), dict(counts[1] - counts[0])


CELLS = {  # by row of `MESHES`: forward, backward
    "experts": (
        {"all-gather u8": 270336, "all-gather f32": 2048, "all-gather s32": 2048,
         "reduce-scatter bf16": 131072},
        {"all-gather u8": 270336, "reduce-scatter bf16": 131072, "reduce-scatter f32": 1024},
    ),
    "data and experts": (
        {"all-gather u8": 135168, "all-gather f32": 1024, "all-gather s32": 1024,
         "reduce-scatter bf16": 32768},
        {"all-gather u8": 135168, "reduce-scatter bf16": 32768, "reduce-scatter f32": 256,
         "all-reduce bf16": 196608},
    ),
    "floats": (
        {"all-gather bf16": 131072, "all-gather f32": 1024, "all-gather s32": 1024,
         "reduce-scatter bf16": 32768},
        {"all-gather bf16": 131072, "reduce-scatter bf16": 32768, "reduce-scatter f32": 256,
         "all-reduce bf16": 196608},
    ),
    "tensor": (
        {"all-gather u8": 135168, "all-gather f32": 1024, "all-gather s32": 1024,
         "reduce-scatter bf16": 65536, "all-reduce bf16": 65536},
        {"all-gather u8": 135168, "reduce-scatter bf16": 65536, "reduce-scatter f32": 512,
         "all-reduce bf16": 262144, "all-reduce f32": 512},
    ),
    "tokens": ({}, {"all-reduce bf16": 786432}),
    "rounds, data": (  # of the first round, and of one further round, a loop's
        {"all-to-all u8": 126720, "all-to-all s32": 1920, "all-to-all bf16": 122880,
         "all-reduce s32": 2},
        {"all-to-all u8": 152064, "all-to-all s32": 384, "all-to-all bf16": 147456,
         "all-to-all f32": 960, "all-reduce s32": 2, "all-reduce bf16": 196608},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "floats" else pytest.mark.thorough) for n in CELLS]
)
def test_what_is_lowered_moves(name):
    assert moved(name) == CELLS[name]


def table() -> list[str]:
    """The part of docs/sharding.md on the layer."""
    lines = ["| mesh | arguments | forward | backward |", "|---|---|---|---|"]
    for name, cells_of_mesh in CELLS.items():
        shape, names, options = MESHES[name]
        mesh = " x ".join(f"{axis} {n}" for axis, n in zip(names, shape, strict=True))
        arguments = ", ".join(f'`{key}="{value}"`' for key, value in options.items())
        cells = [", ".join(f"{op}: {n:,}" for op, n in moved.items()) for moved in cells_of_mesh]
        lines.append(f"| {mesh} | {arguments} | {' | '.join(cells)} |")
    return lines


def test_the_table_is_current():
    text = DOCS.read_text()
    assert text == with_table(text, "moe", table()), "run python tests/test_moe_sharding.py"


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
    moves = collectives(forward)
    assert {move for move in moves if move.startswith("all-gather")} == {
        "all-gather u8",  # codes and scales
        "all-gather s32",  # experts
        "all-gather f32",  # the router's weights
    }
    text = forward.as_text()
    assert not re.search(rf"f32\[{TOKENS // 2},{D}\][^=]* all-gather", text)
    assert any(move.startswith("reduce-scatter") for move in moves)


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_weights_that_fsdp_splits(way):
    args = operands()
    want = with_gradients()(*args)
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)

    def f(x, experts, weights, w1, w2, b1, b2, dy):
        def layer(x, weights, w1, w2, b1, b2):
            ws = [
                jax_mx.gather_weight(w, P(None, "data"), MXFP8, contracting=1, batch=0)
                for w in (w1, w2)
            ]
            options = {"b_gate_up": b1, "b_down": b2, "way": way}
            return jax_mx.moe(x, experts, weights, *ws, expert_axis="expert", **options)

        y, pull = jax.vjp(layer, x, weights, w1, w2, b1, b2)
        return y, *pull(dy)

    with jax.set_mesh(mesh):
        placed_args = placed(args, mesh, ("data", "expert"))
        for i in (3, 4):
            sharding = NamedSharding(mesh, P("expert", "data"))
            placed_args[i] = jax.device_put(placed_args[i], sharding)
        got = jax.jit(f)(*placed_args)
    for a, b in zip(got, want, strict=True):
        far = np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b))
        assert far < BOUND


@pytest.mark.parametrize("way", [WAYS[0], pytest.param(WAYS[1], marks=pytest.mark.thorough)])
@pytest.mark.parametrize("check", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_in_shard_map(check, way):
    x, experts, weights, w1, w2, *_ = operands()
    want = jax_mx.moe(x, experts, weights, w1, w2)
    mesh = jax.make_mesh((4,), ("expert",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    layer = jax.jit(
        jax.shard_map(
            lambda *args: jax_mx.moe(*args, expert_axis="expert", way=way),
            mesh=mesh,
            in_specs=P("expert"),
            out_specs=P("expert"),
            check_vma=check,
        )
    )
    assert_bits_equal(layer(x, experts, weights, w1, w2), want)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "axis_type"), [("data and experts", AxisType.Auto), ("tensor", AxisType.Explicit)]
)
def test_no_tokens(name, axis_type):
    shape, names, options = MESHES[name]
    args = [a[:0] if i in (0, 1, 2, 7) else a for i, a in enumerate(operands())]
    mesh = of_eight(shape, names, axis_type)
    with jax.set_mesh(mesh):
        y, *gradients = with_gradients(**options)(*placed(args, mesh, names))
    assert y.shape == (0, D)
    for got, operand in zip(gradients, (args[0], *args[2:7]), strict=True):
        assert got.shape == operand.shape and not np.asarray(got).any()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("axis_type", "way"),
    [(AxisType.Auto, "gather"), (AxisType.Explicit, "gather"), (AxisType.Explicit, "rounds")],
)
def test_weights_that_are_codes(axis_type, way):
    """Frozen ones in each arrangement, and both forms, split by experts."""
    x, experts, weights, w1, w2, *_, dy = operands()
    mesh = of_eight((4, 2), ("expert", "data"), axis_type)
    makes = [functools.partial(MXFP8.quantize_weight, contracting=1, batch=0)]
    for options in ({"axis": 1}, {"axis": 1, "transpose": True}, {"block": (32, 32)}):
        makes.append(functools.partial(jax_mx.quantize, **options))

    def both(x, weights, ws, **options):
        f = lambda x, weights: jax_mx.moe(x, experts, weights, *ws, **options)  # noqa: E731
        y, pull = jax.vjp(f, x, weights)
        return y, *pull(dy)

    for make in makes:
        ws = [make(w) for w in (w1, w2)]
        want = jax.jit(both)(x, weights, ws)
        split = jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, P("expert"))), ws)
        with jax.set_mesh(mesh):
            call = functools.partial(both, expert_axis="expert", way=way)
            got = jax.jit(call)(x, weights, split)
        for a, b in zip(got, want, strict=True):
            assert np.linalg.norm(np.asarray(a) - np.asarray(b)) <= BOUND * np.linalg.norm(b)


# ---- routings, keys, ids ---
@pytest.mark.thorough
def test_no_routing_loses_a_token():
    """Not of those that send all tokens to one shard; the same bytes on 1, 2 and 8 devices.

    With wire="floats" each operand is quantized once, and of two choices a sum has one order.
    """
    args, options = operands(), {"wire": "floats", "expert_axis": "expert"}
    rng = np.random.default_rng(7)
    routings = {
        "to one expert": np.full((TOKENS, K), 3),
        "to one shard of eight": np.stack([np.full(TOKENS, 5), np.full(TOKENS, -1)], 1),
        "to one shard of two": rng.integers(4, 8, (TOKENS, K)),
        "to any": np.asarray(args[1]),
    }
    plain = with_gradients()
    for n in (2, 8):
        mesh = of_eight((n,))
        split = with_gradients(**options)
        for name, experts in routings.items():
            arguments = (args[0], jnp.asarray(experts, jnp.int32), *args[2:])
            want = plain(*arguments)
            with jax.set_mesh(mesh):
                got = split(*placed(arguments, mesh, ("expert",)))
            for i, (a, b) in enumerate(zip(got, want, strict=True)):
                if i in (2, 6):  # of weights: sums of rows; of b_down: of tokens, which are split
                    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
                else:
                    assert_bits_equal(a, b, f"{name}, {n} devices, result {i}")


def test_keys_are_each_shards_own():
    """Along axes of more than one shard."""
    mesh = of_eight((2, 1, 4), ("data", "one", "expert"))
    recipe = jax_mx.Recipe(wgrad=jax_mx.Product(rounding=jax_mx.Stochastic(jax.random.key(3))))

    def keys(*axes):
        def shard():
            (shard_recipe,) = jax.tree.leaves(wires.numbered(recipe, (*axes, None)))
            return jax.random.key_data(shard_recipe)[None, None]

        spec = P("data", "expert")
        call = jax.shard_map(shard, mesh=mesh, in_specs=(), out_specs=spec, check_vma=False)
        return np.asarray(jax.jit(call)()).reshape(8, 2)

    for axes, number in ((("data", "one", "expert"), 8), (("expert",), 4), (("one",), 1)):
        assert len({tuple(key) for key in keys(*axes)}) == number
    assert_bits_equal(keys("one")[0], np.asarray(jax.random.key_data(jax.random.key(3))))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*by a key that is a constant of the program")
def test_each_shard_rounds_by_numbers_of_its_own():
    """The same tokens and experts on all shards, and one key: no two round alike."""
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(np.tile(rng.normal(size=(8, D)), (8, 1)), jnp.float32) for _ in range(2))
    stacks = [
        jnp.asarray(np.tile(rng.normal(size=s) / 8, (E, 1, 1)), jnp.float32)
        for s in ((1, D, 2 * I), (1, I, D))
    ]
    shard = np.arange(64) // 8  # of eight tokens each; experts of its own, two of each four
    experts = jnp.asarray((shard % 4 * 2)[:, None] + np.array([0, 1]), jnp.int32)
    weights = jnp.ones((64, 2), jnp.float32)
    rounding = jax_mx.Product(rounding=jax_mx.Stochastic(jax.random.key(3)))
    recipe = jax_mx.Recipe(*["mxfp4_e2m1"] * 3, dgrad=rounding)

    def gradient(x, experts, weights, w1, w2, dy):
        f = lambda x: jax_mx.moe(  # noqa: E731
            x, experts, weights, w1, w2, recipe=recipe, expert_axis="expert"
        )
        return jax.vjp(f, x)[1](dy)[0]

    mesh = of_eight((2, 4), ("data", "expert"))
    with jax.set_mesh(mesh):
        call = jax.jit(gradient)
        placed_args = [jax.device_put(a, NamedSharding(mesh, ROWS)) for a in (x, experts, weights)]
        placed_args += [jax.device_put(w, NamedSharding(mesh, P("expert"))) for w in stacks]
        placed_args.append(jax.device_put(dy, NamedSharding(mesh, ROWS)))
        first, again = (np.asarray(call(*placed_args)) for _ in range(2))
    assert_bits_equal(first, again)
    shards = first.reshape(8, 8, D)
    assert len({shard.tobytes() for shard in shards}) == 8
    errors = (shards - shards.mean(0)).reshape(8, -1)
    assert (np.corrcoef(errors) - np.eye(8)).max() < 0.5


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [np.uint8, np.uint32])
def test_types_of_ids(dtype):
    """Without a derivative; 255 names no expert."""
    x, experts, weights, w1, w2, *_ = operands()
    ids = jnp.asarray(np.where(np.asarray(experts) < 0, 255, np.asarray(experts)).astype(dtype))
    want = jax_mx.moe(x, experts, weights, w1, w2)
    mesh = of_eight((2,))
    with jax.set_mesh(mesh):
        layer = jax.jit(lambda *args: jax_mx.moe(*args, expert_axis="expert"))
        assert_bits_equal(layer(x, ids, weights, w1, w2), want)


# ---- programs that leave ---
@pytest.mark.thorough
@pytest.mark.parametrize(("axis", "way"), [(None, None), *(("expert", way) for way in WAYS)])
def test_export_with_its_derivative(axis, way):
    args = operands()
    mesh = of_eight((2,))
    options = {"expert_axis": axis, "way": way}
    layer = with_gradients(**options)
    with jax.set_mesh(mesh):
        inputs = placed(args, mesh, ("expert",)) if axis else args
        call = jax.jit(lambda *args: layer(*args)[:4])  # y, and the gradients of x, weights, w1
        exported = jax.export.export(call, disabled_checks=jax_mx.DISABLE_EXPORT_CHECKS)(*inputs)
        loss = jax.jit(lambda x, *rest: (jax_mx.moe(x, *rest, **options) ** 2).sum())
        whole = jax.export.export(loss, disabled_checks=jax_mx.DISABLE_EXPORT_CHECKS)(*inputs[:5])
        again, pulled = (
            jax.export.deserialize(program.serialize(vjp_order=order))
            for program, order in ((exported, 0), (whole, 1))
        )
        for got, want in zip(again.call(*inputs), call(*inputs), strict=True):
            assert_bits_equal(got, want)
        gradients = [jax.jit(jax.grad(f, (0, 3)))(*inputs[:5]) for f in (pulled.call, loss)]
    for got, want in zip(*gradients, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_two_processes():
    """jax.distributed, experts split between them: results and gradients of one device."""
    code = """
        from helpers import assert_bits_equal
        from test_moe_sharding import operands, with_gradients
        args = operands()
        with jax.default_device(jax.local_devices()[0]):
            want = with_gradients()(*args)
        mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,))
        where = NamedSharding(mesh, P("expert"))
        args = [np.asarray(a) for a in args]
        own = [jax.make_array_from_callback(a.shape, where, lambda at: a[at]) for a in args]
        for way in ("gather", "rounds"):
            with jax.set_mesh(mesh):
                got = with_gradients(expert_axis="expert", wire="floats", way=way)(*own)
            for i, (g, w) in enumerate(zip(got, want, strict=True)):
                for shard in g.addressable_shards:
                    a, b = np.asarray(shard.data), np.asarray(w)[shard.index]
                    if i in (2, 6):
                        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
                    else:
                        assert_bits_equal(a, b, f"{way}, result {i}")
    """
    on_two(code, devices=1)


def test_messages():
    x, experts, weights, w1, w2, *_ = operands()
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)

    def call(x=x, **options):
        n = x.shape[0]
        return lambda: jax_mx.moe(x, experts[:n], weights[:n], w1, w2, **options)

    with jax.set_mesh(mesh):
        axes = {"expert_axis": "expert"}
        assert_refused(call(x[:7], **axes), ValueError, "pad x with zero rows whose experts are -1")
        assert_refused(call(expert_axis="experts"), ValueError, "is no axis of a mesh here")
        assert_refused(call(expert_axis=3), TypeError, "must be the name of a mesh axis, got 3")
        assert_refused(call(tensor_axis="data"), ValueError, "tensor_axis without expert_axis")
        assert_refused(call(tensor_axis="expert", **axes), ValueError, "are both 'expert'")
        assert_refused(call(token_axes="rows", **axes), ValueError, "['rows'] are not among")
        both = {"expert_axis": "expert", "tensor_axis": "data"}
        by_recipe = functools.partial(jax_mx.Recipe().quantize_weight, contracting=1, batch=0)
        for interleaved in (False, True):
            for held in (by_recipe, lambda w: jax_mx.quantize(w, axis=1)):
                assert_refused(
                    lambda held=held, interleaved=interleaved: jax_mx.moe(
                        x, experts, weights, held(w1), w2, interleaved=interleaved, **both
                    ),
                    ValueError,
                    "tensor_axis splits floats",
                )
    assert_refused(call(token_axes="data"), ValueError, "token_axes want a mesh")
    assert_refused(call(expert_axis="expert"), ValueError, "set one around the call")


def test_a_map_over_one_axis_of_an_automatic_mesh():
    """`ragged_dot` and `moe` inside of a shard_map whose mesh has other, automatic axes."""
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("d", "e"), axis_types=kinds, devices=jax.devices()[:4])
    x, w, sizes = jnp.ones((16, 64)), jnp.ones((1, 64, 32)), jnp.full(2, 8, jnp.int32)

    def mapped(f, *specs):
        return jax.jit(jax.shard_map(f, in_specs=specs, out_specs=P("e"), axis_names={"e"}))

    with jax.set_mesh(mesh):
        y = mapped(lambda x, n: jax_mx.ragged_dot(x, w, n), P("e"), P("e"))(x, sizes)
        np.testing.assert_array_equal(y, np.full((16, 32), 64))
        experts, weights = jnp.arange(16, dtype=jnp.int32)[:, None] % 2, jnp.ones((16, 1))
        w1, w2 = jnp.ones((2, 64, 64)) / 64, jnp.ones((2, 32, 64)) / 32

        def layer(x, experts, weights, w1, w2):
            return jax_mx.moe(x, experts, weights, w1, w2, activation="bilinear", expert_axis="e")

        y = mapped(layer, *[P("e")] * 5)(x, experts, weights, w1, w2)
        np.testing.assert_array_equal(y, np.ones((16, 64)))


if __name__ == "__main__":
    DOCS.write_text(with_table(DOCS.read_text(), "moe", table()))
