"""Calls that XLA splits by name: products and quantizers under jit on automatic and explicit axes.

`python tests/test_partition.py` writes the table of docs/sharding.md that tests hold each cell to.
"""

import functools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_bits_equal,
    assert_refused,
    collectives,
    lowered_apart,
    mesh_of,
    on_eight,
    on_two,
    with_table,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx
from benchmarks import llama, program
from jax_mx import MXFP4, MXFP8, Product, Recipe
from jax_mx.launch import partition, private, targets
from jax_mx.launch.partition import Rule, chosen
from jax_mx.products import multiply
from jax_mx.quantizing import plan

pytestmark = pytest.mark.optimized

P = PartitionSpec
DOCS = Path(__file__).parent.parent / "docs" / "sharding.md"
ROWS = Recipe(window="row")
HOPPER = Recipe(window="row", wgrad=Product(window="shard"))
SHAPES = (1024, 512), (512, 256), (1024, 256)  # x (T, K), w (K, N), y's gradient
FSDP = (P("a"), P("a"), P("a"))


def step(recipe, product=jax_mx.matmul, **options):
    """(x, w, dy) -> y and both gradients."""
    return helpers.step(functools.partial(product, recipe=recipe, **options))


@functools.cache
def floats(shapes=SHAPES):
    rng = np.random.default_rng(0)
    return [np.float32(rng.normal(size=shape)) for shape in shapes]


def split(call, mesh, specs, outs, arrays=None):
    """(the results of the program that XLA splits, its collectives)."""
    arrays = floats() if arrays is None else arrays
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    outs = None if outs is None else tuple(NamedSharding(mesh, spec) for spec in outs)
    put = [jax.device_put(a, where) for a, where in zip(arrays, shardings, strict=True)]
    with jax.set_mesh(mesh):
        compiled = jax.jit(call, out_shardings=outs).lower(*put).compile()
    text = compiled.as_text()
    assert reducers(text) <= {"add", "maximum"}  # GPUs know no others, nor what is around one
    return compiled(*put), collectives(text)


# ---- what an axis splits ---
PRODUCT = Rule((("m", "k"), ("n", "k")), (("m", "n"),), {"m": 64, "n": 32, "k": 8}, ("k",))
WGRAD = Rule((("m", "k"), ("n", "k")), (("m", "n"),), {"m": 64, "n": 32, "k": 4}, ("k",))
SIZES = {"p0": 2, "p1": 2}
P0, P1, BOTH = ("p0",), ("p1",), ("p0", "p1")


@pytest.mark.parametrize(
    ("rule", "x", "w", "y", "axes", "scattered"),
    [
        (PRODUCT, (P0, ()), ((), ()), (), {"m": P0}, {}),  # data
        (PRODUCT, (P0, ()), ((), P0), (P0, ()), {"m": P0}, {}),  # FSDP: w is gathered
        (PRODUCT, (P0, ()), (P0, ()), (P0, ()), {"m": P0}, {}),
        (PRODUCT, (P0, ()), (P0, ()), ((), P0), {"n": P0}, {}),  # x is gathered
        (PRODUCT, ((), P0), ((), P0), ((), ()), {"k": P0}, {}),  # sums of parts
        (PRODUCT, ((), P0), ((), P0), (P0, ()), {"k": P0}, {"m": P0}),  # scattered
        (PRODUCT, ((), P0), ((), ()), ((), ()), {"k": P0}, {}),  # w is sliced
        (PRODUCT, (P0, P1), ((), P1), (P0, ()), {"m": P0, "k": P1}, {}),
        (PRODUCT, ((), ()), ((), ()), ((), P0), {"n": P0}, {}),  # as the result is wanted
        (WGRAD, ((), BOTH), ((), BOTH), (BOTH, ()), {"k": BOTH}, {"m": BOTH}),
        (WGRAD, ((), BOTH), ((), BOTH), (P1, ()), {"k": BOTH}, {"m": P1}),
        (WGRAD._replace(parts={**WGRAD.parts, "k": 2}), ((), BOTH), ((), BOTH), (), {"k": P0}, {}),
        (WGRAD._replace(parts={**WGRAD.parts, "k": 1}), ((), BOTH), ((), BOTH), (), {}, {}),
    ],
)
def test_what_an_axis_splits(rule, x, w, y, axes, scattered):
    choice = chosen(rule, ((64, 256), (32, 256), (64, 32)), (x, w, y), SIZES)
    assert (choice.axes, choice.scattered) == (axes, scattered)


def test_what_nobody_reads_decides_nothing():
    rule = Rule((("m", "k"), ("m", "n")), (("m", "n"),), {"m": 64, "n": 32, "k": 8}, ("k",), 1)
    choice = chosen(rule, ((64, 8), (64, 32), (64, 32)), (((), ()), (P0, ()), ((), ())), SIZES)
    assert choice.axes == {}


@pytest.mark.parametrize("recipe", [ROWS, MXFP8, MXFP4, Recipe(window=256)], ids=str)
def test_plans_are_text_and_back(recipe):
    """The plans of quantizers and of products, with their parts."""
    jaxpr = jax.make_jaxpr(step(recipe))(*floats()).jaxpr
    plans = [e.params["plan"] for e in multiply.equations(jaxpr) if "plan" in e.params]
    formats, window = (MXFP8.lhs,) * 2, "row"
    plans.append(plan.ProductPlan("matmul_fp8", formats, np.dtype("f4"), False, 256, window))
    assert len(plans) > 2
    for entry in plans:
        assert plan.plan_in(json.loads(json.dumps(plan.described(entry)))) == entry


# ---- what moves, and the values ---
# The specs of (x, w, y) and of the gradients, and a recipe; T, K, N = 1024, 512, 256.
COLUMNS = (P("a"), P(None, "a"), P("a"))
CELLS = {
    'rows, wgrad "shard"': (HOPPER, FSDP),
    'rows, wgrad "shard", w along columns': (HOPPER, COLUMNS),
    "rows": (ROWS, FSDP),
    "rows, wgrad 128": (Recipe(window="row", wgrad=Product(window=128)), FSDP),
    "MXFP8": (MXFP8, FSDP),
    "MXFP4": (MXFP4, FSDP),
}
# By recipe what moves on automatic axes; on explicit ones the same where products read codes.
# A device knows the scales of a row by its part of it.
WEIGHT, SUMS = "all-gather u8: 266,240", "reduce-scatter f32: 16,384"
MOVED = {
    'rows, wgrad "shard"': f"all-reduce u32: 256, {WEIGHT}, {SUMS}",
    'rows, wgrad "shard", w along columns': f"all-reduce u32: 512, {WEIGHT}, {SUMS}",
    "rows": f"all-reduce u32: 1,024, {WEIGHT}, {SUMS}",
    "rows, wgrad 128": f"all-reduce u32: 256, {WEIGHT}, {SUMS}",
    "MXFP8": f"all-gather u8: 270,336, {SUMS}",
    "MXFP4": f"all-gather u8: 139,264, {SUMS}",
}
ON_EXPLICIT = dict.fromkeys(("MXFP8", "MXFP4"), "all-reduce f32: 131,072, all-gather f32: 131,072")


def reducers(text: str) -> set[str]:
    """The operations that the collectives of a compiled program apply to two numbers."""
    bodies = dict(re.findall(r"^%([\w.-]+) \(.*?\{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE))
    names = re.findall(r"(?:all-reduce|reduce-scatter)(?:-start)?\(.*?to_apply=%([\w.-]+)", text)
    return {re.sub(r".*ROOT .*? = \S+ (\w+)\(.*", r"\1", bodies[n], flags=re.DOTALL) for n in names}


def moves(counts) -> str:
    """Collectives in words: of each kind and type how many elements arrive."""
    totals = {}
    for (op, dtype, n), count in counts.items():
        totals[op, dtype] = totals.get((op, dtype), 0) + n * count
    order = ("all-reduce", "all-gather", "reduce-scatter")
    moved = sorted(totals.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))
    return ", ".join(f"{op} {dtype}: {n:,}" for (op, dtype), n in moved)


@functools.cache
def alone(name: str):
    """The results on one device."""
    return [np.asarray(y) for y in jax.jit(step(CELLS[name][0]))(*map(jnp.asarray, floats()))]


@functools.cache
def in_shard_map(name: str):
    """The results of a shard_map whose caller gathers w, and scatters the sum of its gradient."""
    recipe = CELLS[name][0]

    def local(x, w, dy):
        w = jax.lax.all_gather(w, "a", tiled=True)
        y, dx, dw = step(recipe)(x, jax.lax.pcast(w, "a", to="varying"), dy)
        return y, dx, jax.lax.psum_scatter(dw, "a", tiled=True)

    mesh = mesh_of(8, names="a")
    call = jax.shard_map(local, mesh=mesh, in_specs=FSDP, out_specs=FSDP, check_vma=False)
    return [np.asarray(y) for y in jax.jit(call)(*floats())]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda a: a.name)
@pytest.mark.parametrize("name", CELLS)
def test_fsdp(name, axis_type):
    """Codes of weights move, no floats; bits equal one device's, except for the order of sums."""
    recipe, specs = CELLS[name]
    out = {"out_sharding": specs[2]} if axis_type == AxisType.Explicit else {}
    mesh = mesh_of(8, axis_type=axis_type, names="a")
    got, moved = split(step(recipe, **out), mesh, specs, (specs[2], specs[0], specs[1]))
    wanted = MOVED[name] if axis_type == AxisType.Auto else ON_EXPLICIT.get(name, MOVED[name])
    assert moves(moved) == wanted
    y, dx, dw = alone(name)
    assert_bits_equal(got[0], y, "y")
    assert_bits_equal(got[1], dx, "gradient of x")
    np.testing.assert_allclose(got[2], dw, atol=2e-6 * np.abs(dw).max())
    assert [a.sharding.spec for a in got] == [specs[2], specs[0], specs[1]]


def test_a_window_shard_is_what_a_shard_map_has():
    """Every bit, of the same sum: each device's rows have scales of their own."""
    recipe, specs = CELLS['rows, wgrad "shard"']
    got, _ = split(step(recipe), mesh_of(8, names="a"), specs, (specs[2], *specs[:2]))
    want = in_shard_map('rows, wgrad "shard"')
    for a, b in zip(got, want, strict=True):
        assert_bits_equal(a, b)
    assert (want[2] != alone("rows")[2]).any()
    for a, b in zip(alone('rows, wgrad "shard"'), alone("rows"), strict=True):
        assert_bits_equal(a, b, "one device")


@pytest.mark.sampled(6, 3)
@pytest.mark.parametrize("specs", [(P("a"), P("a"), P("a")), (P(), P("b"), P()), (P(), P(), P())])
@pytest.mark.parametrize("implementation", ["xla", "fp8"])
def test_windows_that_devices_have_several_of(specs, implementation):
    """Each is a product by itself where one scale a row is wanted: the sum of eight in any case.

    Each eighth of the tokens is 8 times the one before: a scale of all rounds the first ones away.
    """
    call, mesh = step(HOPPER, implementation=implementation), mesh_of(2, 4)
    x, w, dy = floats()
    x = x * np.repeat(np.float32(8.0) ** np.arange(8), len(x) // 8)[:, None]
    got, _ = split(call, mesh, specs, None, (x, w, dy / x.max(1, keepdims=True)))
    parts = [jnp.split(jnp.asarray(a), 8) for a in (x, dy / x.max(1, keepdims=True))]
    by_rows = jax.jit(step(ROWS))
    gradients = [by_rows(x, jnp.asarray(w), dy)[2] for x, dy in zip(*parts, strict=True)]
    want = np.sum(np.stack(gradients), 0, dtype=np.float64)
    np.testing.assert_allclose(got[2], want, atol=1e-5 * np.abs(want).max())
    rows = by_rows(x, w, dy / x.max(1, keepdims=True))[2]
    assert np.abs(got[2] - rows).max() > 1e-3 * np.abs(want).max()


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("rows", [992, 1000])
def test_tokens_that_devices_cannot_share_in_whole_blocks(rows):
    """The window "shard" is a row then, as without devices."""
    arrays = [np.asarray(a)[:rows] if len(a) == 1024 else a for a in floats()]
    got, _ = split(step(HOPPER), mesh_of(8, names="a"), (P(), P(), P()), None, arrays)
    want = jax.jit(step(ROWS))(*map(jnp.asarray, arrays))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * np.abs(b).max())


MLP = (1024, 256), (256, 512), (256, 512), (512, 256), (1024, 256)  # x, gate, up, down, dy


def mlp_step(x, gate, up, down, dy, joined=False):
    """The result of an MLP of two first weights, or of both as one, and all gradients."""

    def mlp(x, gate, up, down):
        first = jnp.concatenate([gate, up], 1) if joined else (gate, up)
        implementation = "fp8" if joined else None  # which reads one scale a row
        return jax_mx.mlp(x, first, down, recipe=HOPPER, implementation=implementation)

    y, pull = jax.vjp(mlp, x, gate, up, down)
    return y, *pull(dy)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("specs", "sums", "joined"),
    [
        ((P("a"),) * 5, 0, False),
        ((P("a"),) * 5, 0, True),
        ((P("b"), P(None, "a"), P(None, "a"), P("a"), P("b")), 4, False),
    ],
    ids=["fsdp", "fsdp, one weight", "tensor"],
)
def test_an_mlp(specs, sums, joined):
    """Activations and their gradients are made and quantized where their parts lie."""
    rng = np.random.default_rng(5)
    arrays = [rng.normal(size=s) / 8 for s in MLP]
    arrays[4] *= np.where(np.arange(1024) // 32 % 2, 1, 64)[:, None]  # blocks of rows differ
    arrays = [jnp.asarray(a, jnp.bfloat16) for a in arrays]
    mesh = mesh_of(8, names="a") if not sums else mesh_of(sums, 2)
    outs, step_of = (specs[4], *specs[:4]), functools.partial(mlp_step, joined=joined)
    got, moved = split(step_of, mesh, specs, outs, arrays)
    want = jax.jit(step_of)(*arrays)
    activations = {MLP[0][0] * n for n in (512,) + (256,) * (not joined)}  # a weight of both is 256
    assert not [
        key for key in moved if key[0] in ("all-gather", "all-to-all") and key[2] in activations
    ]
    exact = 0 if sums else 2  # with one device's sums
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if i < exact:
            assert_bits_equal(a, b, str(i))
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        assert np.linalg.norm(a - b) < 0.02 * np.linalg.norm(b), i


# ---- transformations ---
@pytest.mark.parametrize("mapped", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_vmap_scan_and_checkpoint(mapped):
    """The gradients of one device; in a loop codes are gathered again where it computes again."""
    x, w = floats(((8, 64, 256), (3, 256, 256)))

    def loss(x, ws, product):
        @jax.checkpoint
        def layer(x, w):
            return jnp.tanh(product(x, w / 16)), None

        return (jax.lax.scan(layer, x, ws)[0] ** 2).sum()

    product = functools.partial(jax_mx.matmul, recipe=HOPPER)
    product = jax.vmap(product, (0, None)) if mapped else product
    call = jax.grad(functools.partial(loss, product=product), (0, 1))
    specs = (P("a"), P(None, "a"))
    got, moved = split(call, mesh_of(8, names="a"), specs, specs, (x, w))
    for a, b in zip(got, jax.jit(call)(x, w), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())
    assert moved["all-gather", "u8", 256 * 256] == 3
    kinds = {(op, dtype) for op, dtype, _ in moved}
    sums = {("reduce-scatter", "f32"), ("all-reduce", "f32")}
    assert kinds <= {("all-gather", "u8"), ("all-reduce", "u32"), *sums}


def test_tensor_parallel_by_propagation():
    """Weights alone say how they are split: products end in the sums that dot_general has."""
    x, w1, w2 = floats(((256, 256), (256, 512), (512, 256)))

    def of(product):
        def loss(x, w1, w2):
            return (product(jnp.tanh(product(x, w1)), w2) ** 2).sum()

        return jax.grad(loss, (0, 1, 2))

    specs = (P("a"), P(None, "b"), P("b"))
    moved = [
        split(of(f), mesh_of(2, 4), specs, None, (x, w1, w2))[1]
        for f in (functools.partial(jax_mx.matmul, recipe=ROWS), jnp.matmul)
    ]
    ours, lax = ({key: n for key, n in counts.items() if key[1] == "f32"} for counts in moved)
    assert ours == lax and lax


def test_an_exported_program():
    recipe, specs = CELLS["rows"]
    mesh = mesh_of(8, names="a")
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    with jax.set_mesh(mesh):
        call = jax.jit(step(recipe), in_shardings=shardings)
        exported = jax.export.export(call, disabled_checks=jax_mx.DISABLE_EXPORT_CHECKS)(*floats())
    assert partition.TARGET in exported.mlir_module()
    again = jax.export.deserialize(exported.serialize())
    put = [jax.device_put(a, where) for a, where in zip(floats(), shardings, strict=True)]
    for a, b in zip(jax.jit(again.call)(*put), alone("rows"), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * np.abs(b).max())


def test_the_persistent_cache(tmp_path):
    """A second process gets the program, and XLA asks nobody how to split it."""
    code = """
        from helpers import cached_in
        events = cached_in(sys.argv[2])
        from test_partition import FSDP, ROWS, mesh_of, split, step
        from jax_mx.launch import partition

        asked = []
        for name, local in [*partition.SHARDS.items()]:
            def counted(*args, local=local):
                asked.append(name)
                return local(*args)
            partition.SHARDS[name] = counted
        split(step(ROWS), mesh_of(8, names="a"), FSDP, FSDP)
        print(len(asked), sum("cache_hits" in event for event in events) > 0)
    """
    first, second = (on_eight(code, str(tmp_path))[0].split()[-2:] for _ in range(2))
    assert int(first[0]) > 0 and second == ["0", "True"]


def test_two_processes():
    """jax.distributed, four CPU devices each: the results of one device."""
    code = """
        from test_partition import FSDP, HOPPER, floats, step
        mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
        with jax.default_device(jax.local_devices()[0]):
            want = [np.asarray(a) for a in jax.jit(step(HOPPER))(*map(jnp.asarray, floats()))]
        where = NamedSharding(mesh, P("a"))
        make = lambda a: jax.make_array_from_callback(a.shape, where, lambda at: a[at])
        put = [*map(make, floats())]
        got = jax.jit(step(HOPPER), out_shardings=where)(*put)
        for i, (g, w) in enumerate(zip(got, want)):
            for shard in g.addressable_shards:
                near = np.abs(shard.data - w[shard.index]).max()
                assert near <= (2e-6 * np.abs(w).max() if i == 2 else 0), (i, near)
    """
    on_two(code)


# ---- what falls back ---
def test_axes_that_a_shard_map_leaves_to_xla():
    mesh = mesh_of(2, 4)
    local = jax.shard_map(
        step(HOPPER),
        mesh=mesh,
        in_specs=(P("a"), P(), P("a")),
        out_specs=(P("a"), P("a"), P("a")),
        axis_names={"a"},
    )
    specs = (P("a"), P(None, "b"), P("a", "b"))
    with jax.set_mesh(mesh):
        put = [
            jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(floats(), specs, strict=True)
        ]
        lowered = jax.jit(local).lower(*put)
        assert partition.TARGET not in lowered.as_text()
        y, dx, _ = lowered.compile()(*put)
    for a, b in zip((y, dx), alone("rows")[:2], strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * np.abs(b).max())
    abstract = [jax.ShapeDtypeStruct(a.shape, jnp.bfloat16) for a in floats()]
    with jax.set_mesh(mesh):
        why = str(jax_mx.explain(local, *abstract, device="sm_90"))
    assert "is not split along axes that a jax.shard_map around it leaves to XLA" in why


def test_codes_are_multiplied_on_explicit_axes():
    """A row of scales that devices share has no first one to read."""
    mesh = mesh_of(2, 4, axis_type=AxisType.Explicit)
    specs = (P("a", "b"), P("b"), P("a"))
    call = step(ROWS, implementation="fp8", out_sharding=P("a"))
    got, _ = split(call, mesh, specs, None)
    for a, b in zip(got, alone("rows"), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * np.abs(b).max())


def test_the_window_is_of_weights_gradients():
    for bad in ({"forward": Product(window="shard")}, {"dgrad": Product(window="shard")}):
        assert_refused(lambda bad=bad: Recipe(**bad), ValueError, "is of what is summed over rows")
    assert_refused(lambda: Recipe(window="shard"), ValueError, "window must be 32, 128, 256")
    assert_refused(lambda: jax_mx.quantize(jnp.ones(64), window="shard"), ValueError, "must be 32")
    assert "shard" in repr(HOPPER)


# ---- a shard's program for GPUs ---
def config_of(text: str, name: str, n: int = 0) -> dict:
    """The parameters of the n-th call of a name in a lowered program."""
    texts_of_calls = re.findall(r'@jax_mx_split\(.*?backend_config = "(.*?)", ', text)
    texts = (re.sub(r"\\([0-9A-F]{2})", lambda m: chr(int(m[1], 16)), t) for t in texts_of_calls)
    configs = [config for config in map(json.loads, texts) if config["name"] == name]
    return configs[n]


@pytest.fixture(scope="module")
def on_hopper(request):
    """The lowered program of a step for Hopper, with kernels that are stand-ins."""
    from helpers import stand_in

    from jax_mx.launch import store

    with pytest.MonkeyPatch.context() as patch, lowered_apart("without code"):
        patch.setattr(store, "obstacle", lambda variant, arch: "")
        patch.setattr(store, "get", stand_in)
        mesh = mesh_of(8, names="a")
        abstract = [
            jax.ShapeDtypeStruct(a, jnp.bfloat16, sharding=NamedSharding(mesh, P("a")))
            for a in ((8192, 512), (512, 1024), (8192, 1024))
        ]
        call = jax.jit(step(HOPPER))
        yield call.trace(*abstract).lower(lowering_platforms=("cuda",)).as_text()


def shard_on_hopper(text: str, name: str, n: int, avals, result, splits) -> str:
    """The program that XLA gets for a shard."""
    config = config_of(text, name, n)
    options = {"p0": 2, "p1": 2, "p2": 2}, splits
    _, shard, operands, _ = partition.shard_of(config, avals, result, options)
    module = private.shard_module("shard", shard, operands, options[0], "cuda", is_here=False)
    return str(module)


ALL = ("p0", "p1", "p2")


def bytes_of(*shape):
    return jax.ShapeDtypeStruct(shape, np.uint8)


def test_a_products_shard_is_a_kernel(on_hopper):
    """Our kernel, of local shapes; then sums, scattered as the result is."""
    avals = bytes_of(512, 8192), bytes_of(512, 256), bytes_of(1024, 8192), bytes_of(1024, 256)
    abstract = bytes_of(512, 1024)
    splits = [[(), ALL]] * 4 + [[ALL, ()], [ALL, ()]]
    text = on_hopper
    for n in range(3):
        if len(config_of(text, "product", n)["rule"][0]) == 5:
            wants = config_of(text, "product", n)["parameters"]["windows"]
            if wants == 8:
                break
    result = [jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16)]
    config = config_of(text, "product", n)
    avals = (*avals[2:], *avals[:2]) if config["rule"][2]["m0"] == 1024 else avals
    if config["rule"][2]["m0"] == 1024:
        abstract, result = bytes_of(1024, 512), [jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16)]
        splits[4:] = [[(), ALL], [(), ALL]]
    text = shard_on_hopper(text, "product", n, (*avals, abstract), result, splits)
    assert text.count("@jax_mx_launch") == 1 and "x1024xf8E4M3FN" in text
    assert "reduce_scatter" in text and "all_reduce" not in text


def test_a_program_for_devices_that_are_not_here_carries_its_kernels():
    """The backend of a topology that is compiled for has no local device."""
    backend = SimpleNamespace(platform="gpu", local_devices=list)
    parameters = SimpleNamespace(for_export=False)
    module = SimpleNamespace(platforms=["cuda"], backend=backend, lowering_parameters=parameters)
    module.axis_context = None
    context: Any = SimpleNamespace(module_context=module, platforms=["cuda"])
    target = targets.target_of(context, "cuda")
    assert target.chips is None and target.carries


def test_a_products_shard_reads_parts_as_they_arrive(on_hopper):
    """A weight is split along what is contracted. Parts below a copy are put in order."""
    configs = [config_of(on_hopper, "product", n)["parameters"]["parted"] for n in range(3)]
    n = configs.index(True)
    avals = bytes_of(8192, 512), bytes_of(8192, 16), bytes_of(1024, 512), bytes_of(1024, 16)
    result = [jax.ShapeDtypeStruct((8192, 1024), jnp.bfloat16)]
    for axes, is_apart in ((ALL[:2], True), (ALL, False)):
        lies = [[axes, ()]] * 2 + [[(), axes]] * 2 + [[axes, ()]]
        text = shard_on_hopper(on_hopper, "product", n, avals, result, lies)
        assert text.count("all_gather") >= 1 and ("stablehlo.transpose" in text) != is_apart
        assert ("tensor<4x1024x128xf8E4M3FN>" in text) == is_apart


def test_sums_of_a_weights_gradient_move_in_the_dtype_of_activations():
    """Float32 masters of a weight that is quantized once: half the bytes."""
    mesh = mesh_of(8, names="a")
    x, w = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("a")))
        for shape, dtype in (((2048, 256), jnp.bfloat16), ((256, 512), jnp.float32))
    )

    def loss(w, x):
        return jax_mx.matmul(x, HOPPER.quantize_weight(w)).astype(jnp.float32).sum()

    with jax.set_mesh(mesh):
        text = jax.jit(jax.value_and_grad(loss)).trace(w, x).lower().as_text()
    moved = [config_of(text, "product", n)["parameters"]["numbers"][-1] for n in range(2)]
    assert sorted(moved, key=str) == [None, "bfloat16"]


def test_a_quantizers_shard_is_kernels(on_hopper):
    """Amaxes and codes of a device's rows, both ways; only the codes of w cross devices."""
    for n in (0, 1):
        config = config_of(on_hopper, "quantize_rows", n)
        counts, shape = config["parameters"]["rows"], config["rule"][2]
        m, k = (512, 1024) if counts == [1, 1] else (8192, 512)
        view = jax.ShapeDtypeStruct((m // 32, k // 32, 32, 32), jnp.bfloat16)
        results = [bytes_of(m // 32, k // 32, 32, 32)] * 2 + [bytes_of(m // 32, k // 32, 1, 32)] * 2
        lies = [[ALL, (), (), ()]] * 5
        text = shard_on_hopper(on_hopper, "quantize_rows", n, [view], results, lies)
        assert text.count("@jax_mx_launch") == 2, text
        assert ("all_reduce" in text) == (counts == [1, 1]), (counts, shape)


# ---- a whole step ---
MODEL = llama.Sizes(2, 256, 512, heads=4, kv_heads=2, head=64, vocabulary=256)


@pytest.mark.parametrize("axis_type", ["jit", pytest.param("explicit", marks=pytest.mark.thorough)])
def test_what_a_llama_step_moves(axis_type):
    """By products: codes and scales, amaxes of weights, and sums of their gradients, scattered.

    In float32 the embedding and the output matrix, which are no products of ours, and norms.
    """
    from conftest import QUICK  # which processes of other tests here must not have

    model = llama.Model(MODEL, llama.Ours(HOPPER), llama.split_of(axis_type, 8))
    where, of_text = model.shardings()
    tokens = jax.ShapeDtypeStruct((8, 65), jnp.int32)
    struct = lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)  # noqa: E731
    with model.setting():
        state = jax.eval_shape(model.begin, jax.random.key(0))
        placed = jax.tree.map(struct, state, where), struct(tokens, of_text)
        lowered = model.jitted(model.step).lower(*placed)
        moved = program.collectives(lowered.compile(dict(QUICK)).as_text())  # nothing runs
    weights = sum(k * n for k, n in MODEL.products.values())  # of a layer
    # Forward, again in the backward pass, where nobody reads the result of the last one, and dgrad,
    # of which scales move, too: they are of rows that nobody has a part of.
    bytes_moved = 2 * weights - math.prod(MODEL.products["down"]) + weights * 33 / 32
    others = MODEL.vocabulary * MODEL.width * 2
    assert moved.pop(("all-gather", "u8")) == MODEL.layers * bytes_moved
    assert moved.pop(("reduce-scatter", "f32")) == MODEL.layers * weights * 4 // 8
    assert moved.pop(("all-gather", "f32")) == others * 4
    assert moved.pop(("all-reduce", "f32")) < others * 4 * 1.02
    assert moved.pop(("all-reduce", "u32")) < weights / 16
    assert not moved


# ---- the table ---
def table() -> list[str]:
    """The part of docs/sharding.md on FSDP."""
    lines = ["| recipe | automatic axes | explicit axes |", "|---|---|---|"]
    return [
        *lines,
        *(
            f"| {name} | {moved} | {ON_EXPLICIT.get(name, moved)} |"
            for name, moved in MOVED.items()
        ),
    ]


def test_the_table_is_current():
    text = DOCS.read_text()
    assert text == with_table(text, "fsdp", table()), "run python tests/test_partition.py"


if __name__ == "__main__":
    DOCS.write_text(with_table(DOCS.read_text(), "fsdp", table()))
