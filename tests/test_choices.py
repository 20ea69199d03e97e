"""`autotune`, `explain`, `Choice`: what is measured, what wins, what is lowered, what is kept."""

import dataclasses
import json
import os
import re
import textwrap
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_bits_equal,
    assert_refused,
    free_port,
    in_processes,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_mx
from jax_mx import Choice, autotune, explain, matmul
from jax_mx.launch import store, targets
from jax_mx.launch.chips import ARCHS, chips_of
from jax_mx.products import choices, measuring, tuning
from jax_mx.products.choices import Key, Measured
from jax_mx.products.contraction import SUMS, Served, refused
from jax_mx.products.implementations import IMPLEMENTATIONS, ProductImplementation, named
from jax_mx.products.kernel_plans import ROWS
from jax_mx.quantizing.facts.product_kernels import FEWEST, PRODUCTS

DOCS = Path(__file__).resolve().parents[1] / "docs" / "choosing.md"
XLA = IMPLEMENTATIONS["xla"].run
quiet = partial(autotune, progress=False)


def ones(*shape):
    return jnp.ones(shape, jnp.bfloat16)


def add(monkeypatch, name, run):
    """A row of the table of implementations that serves every call."""
    row = ProductImplementation(name, "any", lambda *_: Served(name), run, lambda *_: False)
    monkeypatch.setitem(IMPLEMENTATIONS, name, row)


def costing(monkeypatch, costs, asked=None):
    """Makes candidates cost so many microseconds; one without a cost must never be timed."""

    def seconds(candidate, runs):
        if asked is not None:
            asked.append(candidate.name)
        return costs[candidate.name] * 1e-6 * len(candidate.sets) * runs

    monkeypatch.setattr(measuring, "seconds", seconds)


def deciding(name, f, *args, us=1.0, **options):
    """A choice of one implementation for all that f calls."""
    keys = [call.key for call in explain(f, *args, **options).calls]
    return Choice.of(Measured(key, name, ((name, us),)) for key in keys)


def lowered(f, *args):
    return jax.jit(f).lower(*args).as_text()


# ---- what wins ---
@pytest.mark.parametrize("order", [(1.03, 1.0, 1.5), (7.0, 2.0, 1.9), (1.0, 900.0, 1.04)])
def test_the_fastest_wins(monkeypatch, order):
    """Costs that are 3 % apart, with a noise of 1 % around them."""
    names = ("xla", "dequantize", "scaled_dot")
    rng = np.random.default_rng(0)
    costs = dict(zip(names, (100 * n for n in order), strict=True))

    def seconds(candidate, runs):
        noise = rng.uniform(0.99, 1.01)
        return costs[candidate.name] * 1e-6 * len(candidate.sets) * runs * noise

    monkeypatch.setattr(measuring, "seconds", seconds)
    choice = quiet(matmul, ones(8, 64), ones(64, 32))
    (entry,) = choice.entries
    assert entry.chosen == min(costs, key=costs.__getitem__)
    for name, us in entry.costs:
        if name in costs:
            assert us == pytest.approx(costs[name], rel=0.011)
        else:
            assert "wants one scale for each row" in us
    assert entry.on == f"{jax.devices('cpu')[0].device_kind}, jax {jax.__version__}"


def test_time_is_taken_of_what_runs(monkeypatch):
    """By the clock: one product against the same behind forty larger ones."""
    square = jnp.full((512, 512), 2.0**-9)

    def often(product, served):
        x = jax.lax.fori_loop(0, 40, lambda _, x: jnp.tanh(x @ square), square)
        return jnp.where(jnp.isfinite(x).all(), XLA(product, served), jnp.nan)

    add(monkeypatch, "often", often)
    (entry,) = quiet(matmul, ones(128, 512), ones(512, 256)).entries
    costs = dict(entry.costs)
    assert costs["often"] > 4 * costs["xla"] > 0
    assert entry.chosen != "often"


def test_no_product_of_a_program_is_merged_or_left_out(monkeypatch):
    """Two operands or one: each launch computes a product of its own."""
    programs = []

    def seconds(candidate, runs):
        programs.append((candidate.program.as_text(), len(candidate.sets)))
        assert len({leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(candidate.sets)}) == 8
        return float(runs)

    monkeypatch.setattr(measuring, "seconds", seconds)
    quiet(matmul, ones(256, 512), ones(512, 256), candidates=1)
    text, launches = programs[0]
    assert launches == 2
    assert len(re.findall(r" dot\(|custom-call.*dot|__onednn|matmul\(", text)) == launches, text


def _raises(*_):
    raise ValueError("no such instruction\nand more")


POISONS = {
    "scaled": (lambda *call: XLA(*call) * 1.02, "differs from 'xla' by"),
    "rolled": (lambda *call: jnp.roll(XLA(*call), 1, 0), "differs from 'xla' by"),
    "zero": (lambda *call: XLA(*call) * 0, "differs from 'xla' by"),
    "one wrong": (lambda *call: XLA(*call).at[3, 5].add(1), "differs from 'xla' by"),
    "nan": (lambda *call: XLA(*call).at[3, 5].set(jnp.nan), "differs from 'xla' by NaN"),
    "raises": (_raises, "left out: it failed: ValueError: no such instruction"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("poison", POISONS)
def test_a_poisoned_candidate_never_wins(monkeypatch, poison):
    run, reason = POISONS[poison]
    add(monkeypatch, poison, run)
    asked = []
    costing(monkeypatch, {"xla": 9.0, "dequantize": 8.0, "scaled_dot": 7.0, poison: 1.0}, asked)
    choice = quiet(matmul, ones(8, 64), ones(64, 32))
    (entry,) = choice.entries
    assert entry.chosen == "scaled_dot"
    assert poison not in asked
    why = str(dict(entry.costs)[poison])
    assert why.startswith("left out: it ")
    assert reason in why
    assert reason in str(choice)


def test_long_sums_hide_nothing(monkeypatch):
    """With 2^18 terms the bound lets even zero pass; with few, as sparse operands have, not."""
    add(monkeypatch, "zero", lambda *call: XLA(*call) * 0)
    costing(monkeypatch, {"xla": 9.0, "dequantize": 8.0, "scaled_dot": 7.0})
    (entry,) = quiet(matmul, ones(4, 2**18), ones(2**18, 4)).entries
    assert "differs from 'xla' by" in dict(entry.costs)["zero"]
    assert entry.chosen == "scaled_dot"


KINDS = {
    "mxfp4": jax_mx.MXFP4,
    "rows": jax_mx.Recipe(window="row"),
    "square, bf16": jax_mx.Recipe(block=(32, 32), wgrad="bf16"),
    "windows": jax_mx.Recipe(window=128, weight_window=(128, 128)),
}


@pytest.mark.parametrize("operand", KINDS)
@pytest.mark.sampled(4)
def test_every_kind_of_operand_is_made(monkeypatch, operand):
    """All that serve each of the three products agree on random operands of its kind."""
    costing(monkeypatch, dict.fromkeys(IMPLEMENTATIONS, 1.0))

    def loss(x, w):
        return matmul(x, w, recipe=KINDS[operand]).astype(jnp.float32).sum()

    choice = quiet(jax.grad(loss, (0, 1)), ones(2, 64, 64), ones(64, 160))
    assert len(choice.entries) == 3
    served = [name for entry in choice.entries for name, us in entry.costs if us == 1.0]
    assert not re.search("failed|differs", str(choice))
    assert served.count("dequantize") == served.count("xla") == 3
    assert served.count("fp8") == (3 if operand == "rows" else 0)


# ---- limits ---
def test_limits_of_candidates_and_seconds(monkeypatch):
    costing(monkeypatch, {"xla": 9.0, "dequantize": 8.0, "scaled_dot": 7.0})
    args = matmul, ones(8, 64), ones(64, 32)
    (entry,) = quiet(*args, candidates=2).entries
    costs = dict(entry.costs)
    assert (costs["xla"], costs["scaled_dot"]) == (9.0, 7.0)  # the one by rule comes first
    assert costs["dequantize"] == "not measured: 2 candidates were asked for"
    choice = quiet(*args, seconds=np.float32(1e-9))
    (entry,) = choice.entries
    assert entry.chosen is None
    assert dict(entry.costs)["xla"] == "not measured: the time was over"
    assert "by rule" in str(choice)
    with choice:
        assert explain(*args).calls[0].by == "rule"


def test_no_candidate_is_compiled_when_the_time_is_over(monkeypatch):
    """Nor when it was lowered in time and waits for a core."""
    costing(monkeypatch, {"xla": 9.0, "dequantize": 8.0})
    compiled, compile_one = [], measuring.Candidate.compile

    def compiling(candidate):
        compiled.append(candidate.name)
        compile_one(candidate)

    monkeypatch.setattr(measuring.Candidate, "compile", compiling)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    (decided,), _ = tuning.calls_in("autotune", matmul, (ones(8, 64), ones(64, 32)))
    call = decided.call.in_a_shard
    chosen, costs = measuring.measured(call, ["xla", "dequantize"], lambda: bool(compiled))
    assert compiled == ["xla"] and chosen == "xla"
    assert costs == {"xla": 9.0, "dequantize": measuring.OVER}


def test_nothing_is_chosen_before_the_rule_was_tried(monkeypatch):
    """Only what was measured beside what would be taken anyway is known to be faster."""
    costing(monkeypatch, {"xla": 9.0, "dequantize": 8.0})
    calls = []
    monkeypatch.setattr(measuring, "measured", lambda call, *_: (calls.append(call), (None, {}))[1])
    with pytest.raises(KeyError):
        quiet(matmul, ones(8, 64), ones(64, 32))
    monkeypatch.undo()
    costing(monkeypatch, {"xla": 9.0, "dequantize": 8.0})
    for over, chosen, tried in (
        ([False, False], "dequantize", 2),
        ([False, True], "xla", 1),
        ([True, False], None, 1),
    ):
        answers = iter(over)
        name, costs = measuring.measured(calls[0], ["xla", "dequantize"], lambda: next(answers))  # noqa: B023
        assert name == chosen
        assert sum(isinstance(us, float) for us in costs.values()) == tried


def test_progress_is_shown(monkeypatch, capsys):
    costing(monkeypatch, dict.fromkeys(IMPLEMENTATIONS, 1.0))
    autotune(matmul, ones(8, 64), ones(64, 32))
    assert "autotune 1/1: mxfp8_e4m3 8x64 along -1 . " in capsys.readouterr().err
    quiet(matmul, ones(8, 64), ones(64, 32))
    assert not capsys.readouterr().err


# ---- which calls there are ---
def found(f, *args):
    return {(*call.key.operands, call.key.how): call.count for call in explain(f, *args).calls}


def test_calls_within_everything():
    w, b = ones(64, 64), ones(64, 32)
    one = {
        ("mxfp8_e4m3 8x64 along -1", "mxfp8_e4m3 64x64 along -1", "contracts 1:1, to bfloat16"): 1
    }

    def f(x):
        return matmul(x, w)

    def scanned(x):
        return jax.lax.scan(lambda c, _: (f(c), None), x, length=3)[0]

    def switched(x):
        return jax.lax.cond(x.sum() > 0, f, lambda x: x, x)

    def looped(x):
        return jax.lax.while_loop(lambda x: x.sum() < 0, f, x)

    custom = jax.custom_vjp(f)
    custom.defvjp(lambda x: (f(x), None), lambda _, g: (g,))
    for wrapped in (f, jax.jit(f), scanned, switched, looped, custom, jax.checkpoint(f)):
        assert found(wrapped, ones(8, 64)) == one, wrapped
    assert found(lambda x: f(jax.jit(f)(f(x))), ones(8, 64)) == {key: 3 for key in one}
    abstract = jax.ShapeDtypeStruct((8, 64), jnp.bfloat16)
    assert found(f, abstract) == one
    assert explain(lambda x: x + 1, abstract).calls == ()
    assert [str(say(lambda x: x + 1, abstract)) for say in (explain, quiet)] == ["no calls"] * 2
    (call,) = explain(lambda x: matmul(x, w, precision="highest"), abstract).calls
    assert call.key.how == "contracts 1:1, to bfloat16, highest precision"
    assert len(found(jax.grad(lambda x, b: matmul(x, b).sum(), (0, 1)), abstract, b)) == 3
    (call,) = explain(jax.vmap(matmul), ones(5, 8, 64), ones(5, 64, 32)).calls
    assert call.key.how == "contracts 2:2, batch 0:0, to bfloat16"


def test_shapes_of_shards():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    x, w = ones(64, 256), ones(256, 96)

    def shapes(f, *args):
        (call,) = explain(f, *args).calls
        return [operand.split()[1] for operand in call.key.operands]

    manual = jax.shard_map(matmul, in_specs=(P(("a", "b")), P(None, None)), out_specs=P(("a", "b")))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, P("b", None)), jax.device_put(w, P(None, "a"))
        assert shapes(matmul, *sharded) == ["16x256", "48x256"]
        together = jax.shard_map(matmul, in_specs=(P("a"), P()), out_specs=P("a"), axis_names={"a"})
        rest = jax.device_put(x, P("a")), jax.device_put(w, P())
        assert shapes(together, *rest)[0] == "32x256"
        # Lowering and explain look up the same key.
        choice = deciding("dequantize", matmul, *sharded)
        before = lowered(matmul, *sharded)
        with choice:
            assert lowered(matmul, *sharded) != before
        assert shapes(manual, jax.device_put(x, P(("a", "b"))), rest[1])[0] == "8x256"
    auto = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    split = jax.device_put(x, NamedSharding(auto, P("a")))
    said = explain(matmul, split, w)
    assert said.calls[0].key.operands[0].split()[1] == "64x256"
    assert "a trace knows their global shapes alone" in str(said)
    assert "global shapes" not in str(explain(matmul, x, w))


def test_measuring_within_a_mesh(monkeypatch):
    costing(monkeypatch, dict.fromkeys(IMPLEMENTATIONS, 1.0))
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(ones(64, 64), P("a", None))
        choice = quiet(matmul, x, jax.device_put(ones(64, 32), P()))
        (entry,) = choice.entries
        assert entry.key.operands[0] == "mxfp8_e4m3 8x64 along -1"
        assert not re.search("failed|differs", str(choice))


# ---- tilings ---
TILES = jax_mx.Recipe(window=256, weight_window=(128, 128))
SIZES = jnp.array([200, 100], jnp.int32)
MANY = 16384


def like(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def in_recipe(recipe):
    return partial(matmul, recipe=recipe)


def grouped(x, w, recipe=jax_mx.MXFP8, **options):
    return jax_mx.ragged_dot(x, w, SIZES, recipe=recipe, **options)


def call_of(f, *args):
    """The one product of a function."""
    (decided,), _ = tuning.calls_in("test", f, args)
    return decided.call.in_a_shard


def test_a_toy_implementation(monkeypatch):
    """One row is all: it multiplies, dense and over groups, is explained, named, measured."""

    def support(product, chips):
        if product.numbers.exact:
            return refused("toy", product, "is not exact")
        return Served("toy", reads_floats=True)

    def run(product, served):
        assert served == Served("toy", reads_floats=True)
        return IMPLEMENTATIONS["dequantize"].run(product, served) + 1

    toy = ProductImplementation("toy", "any", support, run, lambda *_: False)
    monkeypatch.setitem(IMPLEMENTATIONS, "toy", toy)
    sizes = jnp.array([40, 24], jnp.int32)
    grouped = lambda x, w, **options: jax_mx.ragged_dot(x, w, sizes, **options)  # noqa: E731
    for f, shape in ((matmul, (96, 32)), (grouped, (2, 96, 32))):
        args = x, w = ones(64, 96), ones(*shape)
        with deciding("toy", f, *args):
            (call,) = explain(f, *args).calls
            assert (call.chosen, call.by) == ("toy", "context")
            assert_bits_equal(jax.jit(f)(*args), jnp.full((64, 32), 97, w.dtype))
        _, pull = jax.vjp(partial(f, implementation="toy"), *args)
        assert_bits_equal(pull(ones(64, 32))[0], jnp.full((64, 96), 33, x.dtype))
        assert "differs from 'xla'" in dict(quiet(f, *args).entries[0].costs)["toy"]
        named = partial(f, implementation="toy", precision="highest")
        assert_refused(partial(named, *args), NotImplementedError, "'toy' is not exact")


def test_each_tiling_is_a_row():
    """Made from the table of kernels, behind the row that picks one by itself."""
    names = [f"cutedsl_r{rows}" for rows in ROWS]
    assert {p.rows for p in PRODUCTS if p.op in ("matmul", "matmul_fp8")} == {*ROWS}
    for op in ("dot_general", "ragged_dot"):
        assert [*named(op)][: len(names) + 1] == ["cutedsl", *names]


# x (M, K) and w (K, N); the binary but for its rows, the rows that there are, and those with which
# another binary serves calls of few rows, that of floats times codes.
CALLS = {
    "mxfp8": (in_recipe(jax_mx.MXFP8), 64, 4352, "matmul_mxfp8_e4m3_r{}", ROWS, ()),
    "mxfp4": (in_recipe(jax_mx.MXFP4), 64, 4352, "matmul_mxfp4_e2m1_r{}", ROWS, ()),
    "windows": (in_recipe(jax_mx.Recipe(window=256)), 512, 96,
        "matmul_fp8_mxfp8_e4m3_mxfp8_e4m3_r{}_w256", (128, ), (4, 8, 16, 64)),
    "tiles": (in_recipe(TILES), 512, 128, "matmul_fp8_mxfp8_e4m3_mxfp8_e4m3_r{}_w128x128",
        (128, 256), ()),
    "rows": (in_recipe(jax_mx.Recipe(window="row")), 512, 96,
        "matmul_fp8_mxfp8_e4m3_mxfp8_e4m3_r{}_wrow", (128, 256), (4, 8, 16, 64)),
    "groups": (grouped, 64, 96, "matmul_mxfp8_e4m3_r{}", ROWS, ()),
    "groups, tiles": (partial(grouped, recipe=TILES), 512, 128,
        "matmul_fp8_mxfp8_e4m3_mxfp8_e4m3_r{}_w128x128", (128, 256), ()),
}  # fmt: skip


def of_kind(name, rows):
    """A function that has one product, and its arguments."""
    f, k, n, *_ = CALLS[name]
    return f, like(rows, k), like(2, k, n) if "groups" in name else like(k, n)


def binaries(f, *args):
    """The products' kernels in a program for Hopper."""
    text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return {*re.findall(r"(matmul_\w+)_0\b", text)}


@pytest.mark.parametrize("operands", CALLS)
@pytest.mark.usefixtures("without_code")
def test_the_table_of_kernels_says_which_tilings_serve_a_call(operands, monkeypatch):
    """Each is lowered to its binary, by an argument and by a choice; others say what there is."""
    *_, binary, tilings, few = CALLS[operands]
    f, *args = of_kind(operands, MANY)
    on_hopper = {"device": "sm_90"}
    monkeypatch.setenv("JAX_MX_ARCHS", "sm_90")
    for tile in ROWS:
        name = f"cutedsl_r{tile}"
        named = partial(f, implementation=name)
        if tile not in (*tilings, *few):
            have = ", ".join(map(str, tilings))
            sentence = f"in tiles of {tile} rows, only of {have}; 'dequantize' serves it"
            asked = partial(explain, named, *args, **on_hopper)
            assert_refused(asked, NotImplementedError, sentence)
            continue
        narrow = "_narrow" * (tile == FEWEST and operands != "groups")
        of_few = f"matmul_mxfp8_e4m3_r{tile}{narrow}"
        wanted = binary.format(tile) if tile in tilings else of_few
        support = IMPLEMENTATIONS[name].support(call_of(f, *args), ["sm_90"])
        assert str(support) == f"{name}: {wanted}"
        (call,) = explain(named, *args, **on_hopper).calls
        assert (call.chosen, call.by) == (name, "argument")
        assert binaries(named, *args) == {wanted}
        with deciding(name, f, *args, **on_hopper):
            (call,) = explain(f, *args, **on_hopper).calls
            assert (call.chosen, call.by, call.costs) == (name, "context", ((name, 1.0),))
            assert binaries(f, *args) == {wanted}


@pytest.mark.gpu
@pytest.mark.skipif(targets.chip_of(jax.devices()[0]) != "sm_90", reason="no kernels on this chip")
@pytest.mark.parametrize("name", CALLS)
def test_every_tiling_computes_the_product(name):
    """Operands are small integers, so that products and sums are exact."""
    f, x, w = of_kind(name, 300)
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.integers(-4, 5, a.shape), a.dtype) for a in (x, w)]
    f = partial(f, preferred_element_type=jnp.float32)
    want = f(*args, implementation="xla")
    for tile in (*CALLS[name][4], *CALLS[name][5]):
        assert_bits_equal(f(*args, implementation=f"cutedsl_r{tile}"), want)


def test_what_has_no_tilings():
    """Sums over groups, and floats times floats."""

    def weights(w):
        return jax.vjp(partial(grouped, recipe=jax_mx.BF16), ones(300, 64), w)[1](ones(300, 96))

    calls, _ = tuning.calls_in("test", weights, [like(2, 64, 96)])
    (sums,) = [entry.call for entry in calls if entry.call.numbers.groups == SUMS]
    floats = call_of(in_recipe(jax_mx.BF16), like(8, 64), like(64, 96))
    for call, sentence in (
        (sums, "sums over no groups: kernels that do have one tiling"),
        (floats, "wants an MXArray on the right, in blocks along one dimension"),
    ):
        for name in (f"cutedsl_r{n}" for n in ROWS):
            row = IMPLEMENTATIONS[name]
            assert f"{name!r} {sentence}" in row.support(call, ["sm_90"]).reason
            assert not row.worth(call)


# The tilings that are measured beside the one that kernels take by themselves.
WORTH = {
    ("mxfp8", 1): [],  # that is of 4 rows
    ("mxfp8", 8): [4],
    ("mxfp8", 16): [8],
    ("mxfp8", 65): [64, 128],  # of a small w kernels make floats
    ("mxfp8", 500): [128, 256],
    ("mxfp8", MANY): [128, 256],
    ("windows", 16): [8, 16],
    ("windows", 128): [64],
    ("windows", MANY): [],
    ("tiles", 64): [],
    ("tiles", MANY): [128],
    ("rows", 1): [4],
    ("rows", MANY): [128],
    ("groups", 40): [16],  # 20 a group
    ("groups", MANY): [256],  # of which so small a product has too few
    ("groups, tiles", MANY): [256],
}


@pytest.mark.parametrize(("name", "rows"), WORTH)
def test_tilings_worth_their_time(name, rows):
    """The tiling that holds the rows, and the next smaller one."""
    call = call_of(*of_kind(name, rows))
    worth = [n for n in ROWS if IMPLEMENTATIONS[f"cutedsl_r{n}"].worth(call)]
    assert worth == WORTH[name, rows]


@pytest.fixture
def as_on_hopper(monkeypatch):
    """All that serves calls on Hopper does so here, computed by "xla"."""
    monkeypatch.setattr(store, "obstacle", lambda variant, arch: "")
    for name, row in IMPLEMENTATIONS.items():
        served = dataclasses.replace(
            row,
            platform="any",
            support=lambda call, _, row=row: row.support(call, ["sm_90"]),
            run=IMPLEMENTATIONS["xla"].run,
            preferred=lambda call, *_, row=row: row.preferred(call, "cuda", ["sm_90"]),
        )
        monkeypatch.setitem(IMPLEMENTATIONS, name, served)


@pytest.mark.parametrize(
    "name", [pytest.param("windows", marks=pytest.mark.thorough), "groups, tiles"]
)
@pytest.mark.usefixtures("as_on_hopper")
def test_tilings_are_candidates(name, monkeypatch, tmp_path):
    """The fastest wins and is saved; one that is not worth its time is neither timed nor listed."""
    f, *args = of_kind(name, 128 if name == "windows" else 512)
    call = call_of(f, *args)
    table, asked = named(call.op), []
    (other,) = [name for name, row in table.items() if "_r" in name and row.worth(call)]
    costing(monkeypatch, dict.fromkeys(table, 9.0) | {"cutedsl": 2.0, other: 1.5}, asked)
    choice = quiet(f, *args)
    choice.save(tmp_path / "a.json")
    for loaded in (choice, Choice.load(tmp_path / "a.json")):
        (entry,) = loaded.entries
        assert entry.chosen == other
        costs = dict(entry.costs)
        assert (costs["cutedsl"], costs[other]) == (2.0, 1.5)
        tilings = [name for name in costs if name.startswith("cutedsl")]
        assert tilings == ["cutedsl", other]
        assert f"{other}, us" in str(loaded)
    assert {name for name in asked if "_r" in name} == {other}
    # The default comes first, and a table's tiling comes, whether it is worth its time or not.
    tile = "cutedsl_r128" if other != "cutedsl_r128" else "cutedsl_r256"
    with deciding(tile, f, *args):
        (entry,) = quiet(f, *args, candidates=1).entries
    assert {name for name, us in entry.costs if us == 9.0} == {tile}


# ---- what a choice does ---
def test_the_context_is_in_the_lowered_program_and_in_jits_key():
    x, w = ones(8, 64), ones(64, 32)
    traced = []

    @jax.jit
    def f(x, w):
        traced.append(1)
        return matmul(x, w)

    want = f(x, w)
    assert len(traced) == 1
    choice = deciding("dequantize", f, x, w)
    with choice:
        assert "by_dequantize" in f.lower(x, w).as_text(debug_info=True)
        assert_bits_equal(f(x, w), want)
        assert len(traced) == 2
    same = deciding("dequantize", f, x, w, us=5.0)  # of other times: the same to jit
    assert (same, hash(same)) == (choice, hash(choice))
    other = deciding("scaled_dot", f, x, w)
    assert other != choice
    for context, count in ((choice, 2), (same, 2), (other, 3), (choice, 3)):
        with context:
            f(x, w)
        f(x, w)
        assert len(traced) == count
    assert "by_xla" in f.lower(x, w).as_text(debug_info=True)


def test_contexts_nest():
    small, large = (ones(8, 64), ones(64, 32)), (ones(8, 96), ones(96, 32))
    a = deciding("dequantize", matmul, *small) | deciding("dequantize", matmul, *large)
    b = deciding("scaled_dot", matmul, *small)

    def names():
        return [explain(matmul, *args).calls[0].chosen for args in (small, large)]

    with a:
        with b:
            assert names() == ["scaled_dot", "dequantize"]
            with b, a:
                assert names() == ["dequantize", "dequantize"]
            assert names() == ["scaled_dot", "dequantize"]
        assert names() == ["dequantize", "dequantize"]
        with pytest.raises(RuntimeError), b:
            raise RuntimeError
        assert names() == ["dequantize", "dequantize"]
    assert names() == ["xla", "xla"]
    with pytest.raises(TypeError):
        print(a | {})


def test_the_order_of_who_decides(monkeypatch, tmp_path):
    """Argument, context, file, table, rule; each of them alone, and each before the next."""
    x, w = ones(8, 64), ones(64, 32)
    add(monkeypatch, "a", XLA)
    add(monkeypatch, "b", XLA)

    def told(f=matmul):
        (call,) = explain(f, x, w).calls
        lowers = jax.jit(lambda *args: f(*args)).lower(x, w).as_text(debug_info=True)
        assert f"by_{call.chosen}" in lowers
        return call.chosen, call.by

    assert told() == ("xla", "rule")
    # The package's own table counts for another version, too.
    (key,) = (call.key for call in explain(matmul, x, w).calls)
    old = Key(key.op, key.chip, key.operands, key.how, "0.0.1")
    monkeypatch.setattr(choices, "TABLES", tmp_path)
    Choice.of([Measured(old, "a", (("a", 2.0), ("xla", 9.0)))]).save(tmp_path / "cpu.json")
    choices.shipped.cache_clear()
    try:
        assert told() == ("a", "table for cpu")
        assert explain(matmul, x, w).calls[0].costs == (("a", 2.0), ("xla", 9.0))
        file = tmp_path / "mine.json"
        deciding("b", matmul, x, w, us=3.0).save(file)
        monkeypatch.setenv("JAX_MX_TUNING", str(file))
        assert told() == ("b", f"JAX_MX_TUNING ({file})")
        with deciding("scaled_dot", matmul, x, w):
            assert told() == ("scaled_dot", "context")
            named = partial(matmul, implementation="dequantize")
            assert told(named) == ("dequantize", "argument")
            with deciding("fp8", matmul, x, w):  # which does not serve it
                assert told() == ("b", f"JAX_MX_TUNING ({file})")
                (note,) = explain(matmul, x, w).notes
                assert note.startswith("context names 'fp8' for mxfp8_e4m3 8x64 along -1 . ")
                assert "'fp8' wants one scale for each row" in note
    finally:
        choices.shipped.cache_clear()


def test_what_names_its_implementation_is_not_measured():
    f = partial(matmul, implementation="dequantize")
    assert quiet(f, ones(8, 64), ones(64, 32)) == Choice()
    assert quiet(matmul, ones(0, 64), ones(64, 32)) == Choice()


def test_another_chip():
    in_blocks = partial(matmul, recipe="mxfp8")
    (call,) = explain(in_blocks, ones(8, 64), ones(64, 32), device="sm_90").calls
    assert (call.key.chip, call.chosen) == ("sm_90", "cutedsl")
    (call,) = explain(in_blocks, ones(17, 64), ones(64, 32), device="sm_90").calls
    assert call.chosen == "dequantize"
    (call,) = explain(matmul, ones(8, 64), ones(64, 32), device="sm_100").calls
    assert call.chosen == "scaled_dot"


# ---- files ---
def test_round_trip(tmp_path, monkeypatch):
    costing(monkeypatch, {"xla": 9.0, "dequantize": 8.25, "scaled_dot": 7.0})
    choice = quiet(matmul, ones(8, 64), ones(64, 32))
    choice.save(tmp_path / "a.json")
    again = Choice.load(tmp_path / "a.json")
    assert (again, again.entries[0].costs, again.notes) == (
        choice, choice.entries[0].costs, choice.notes
    )  # fmt: skip
    assert str(again) == str(choice)
    again.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "b.json"}
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["jax_mx_tuning"] == 1
    (entry,) = content["entries"]
    assert entry["operands"] == ["mxfp8_e4m3 8x64 along -1", "mxfp8_e4m3 32x64 along -1"]
    assert (entry["chosen"], entry["costs"]["dequantize"]) == ("scaled_dot", 8.25)
    # Later files win.
    assert (choice | deciding("xla", matmul, ones(8, 64), ones(64, 32))).entries[0].chosen == "xla"


DAMAGED = {
    "": "is damaged, or no file that Choice.save wrote",
    "{": "is damaged",
    "[]": "is damaged",
    "\x80": "is damaged",
    '{"entries": []}': "is damaged",
    '{"jax_mx_tuning": 2, "entries": []}': "has version 2, this jax_mx reads version 1",
    '{"jax_mx_tuning": 1, "notes": [], "entries": [{}]}': "is damaged",
    '{"jax_mx_tuning": 1, "notes": [], "entries": [{"op": 1, "chip": "", "operands": [], '
    '"how": "", "version": "", "on": "", "costs": {}, "chosen": null}]}': "is damaged",
    '{"jax_mx_tuning": 1, "notes": [], "entries": [{"op": "", "chip": "", "operands": [], '
    '"how": "", "version": "", "on": "", "costs": {}, "chosen": "fp8"}]}': "is damaged",
}


@pytest.mark.parametrize("text", DAMAGED)
def test_damaged_files(tmp_path, monkeypatch, text):
    path = tmp_path / "a.json"
    path.write_bytes(text.encode("latin1"))
    assert_refused(lambda: Choice.load(path), ValueError, f"Choice.load: {path} {DAMAGED[text]}")
    monkeypatch.setenv("JAX_MX_TUNING", str(path))
    sentence = f"JAX_MX_TUNING: {path} {DAMAGED[text]}"
    f = jax.jit(lambda x, w: matmul(x, w))
    assert_refused(lambda: f(ones(8, 64), ones(64, 32)), ValueError, sentence)


def test_files_of_another_version_and_missing_ones(tmp_path, monkeypatch, caplog):
    x, w = ones(8, 64), ones(64, 32)
    (key,) = (call.key for call in explain(matmul, x, w).calls)
    path = tmp_path / "old.json"
    old = Key(key.op, key.chip, key.operands, key.how, "0.0.1")
    Choice.of([Measured(old, "dequantize", (("dequantize", 1.0),))]).save(path)
    monkeypatch.setenv("JAX_MX_TUNING", str(path))
    assert explain(matmul, x, w).calls[0].by == "rule"
    assert "entries of version 0.0.1" in caplog.text
    monkeypatch.setenv("JAX_MX_TUNING", str(tmp_path / "none.json"))
    assert_refused(
        lambda: explain(matmul, x, w),
        ValueError,
        f"JAX_MX_TUNING: {tmp_path / 'none.json'} cannot be read (No such file or directory)",
    )


def test_shipped_tables():
    """Each table belongs to a chip, and names implementations that exist."""
    paths = sorted(choices.TABLES.glob("*.json"))
    assert choices.TABLES / "sm_90.json" in paths
    chips = {chip for dsl in ARCHS for chip in chips_of(dsl)}
    for path in paths:
        table = choices.shipped(path.stem)
        assert path.stem in chips
        assert {entry.key.chip for entry in table.entries} <= {path.stem}
        assert all(entry.chosen in (*named(entry.key.op), None) for entry in table.entries)
        assert {entry.key.version for entry in table.entries} <= {jax_mx.__version__}


# ---- several processes ---
PROGRAM = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
who = int(sys.argv[1])
jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, who)
import jax.numpy as jnp
import jax_mx
from jax_mx.products import measuring, tuning

costs = [{"xla": 3, "dequantize": 1, "scaled_dot": 2}, {"xla": 1, "dequantize": 2, "scaled_dot": 3}]
asked = []
def seconds(candidate, runs):
    asked.append(candidate.name)
    return costs[who][candidate.name] * 1e-6
measuring.seconds = seconds
x, w = jnp.ones((8, 64), jnp.bfloat16), jnp.ones((64, 32), jnp.bfloat16)
choice = jax_mx.autotune(jax_mx.matmul, x, w, progress=False)
with choice:
    text = jax.jit(jax_mx.matmul).lower(x, w).as_text()
    (call,) = jax_mx.explain(jax_mx.matmul, x, w).calls
import hashlib
print("RESULT", call.chosen, call.by, bool(asked), hashlib.sha256(text.encode()).hexdigest())

def broken(*_):
    raise ValueError("out of order")
tuning.choices.to_text = broken
try:
    jax_mx.autotune(jax_mx.matmul, x, w, progress=False)
except Exception as error:
    print("ERROR", type(error).__name__, error)
"""


def test_processes_with_different_timings_lower_the_same():
    both = in_processes(2, PROGRAM, free_port(), env={**os.environ, "XLA_FLAGS": ""})
    outs = [out for _, out, _ in both]
    told = ("RESULT", "ERROR ")
    lines = [[line.split() for line in out.splitlines() if line[:6] in told] for out in outs]
    assert all(len(line) == 2 for line in lines), outs
    (first, failed), (second, told) = lines
    assert first[1:4] == ["dequantize", "context", "True"]
    assert second == ["RESULT", "dequantize", "context", "False", first[-1]]
    assert " ".join(failed) == "ERROR ValueError out of order"
    assert (
        " ".join(told) == "ERROR RuntimeError autotune: process 0 could not measure: out of order"
    )


# ---- a chip's table ---
@pytest.fixture
def small_models(monkeypatch):
    """benchmarks/tune.py, of small layers."""
    from benchmarks import tune

    models = {"a": {"up": (64, 96), "same": (64, 96)}, "b": {"experts": tune.Experts(2, 1, 64, 96)}}
    monkeypatch.setattr(tune, "MODELS", models)
    return tune


@pytest.mark.thorough
def test_the_script_that_fills_a_table(small_models, monkeypatch, tmp_path, capsys):
    tune, asked = small_models, []
    costs = dict.fromkeys(IMPLEMENTATIONS, 2.0) | {"dequantize": 1.5}
    costing(monkeypatch, costs, asked)
    file = tmp_path / "cpu.json"
    cases = tune.layers(["a", "b"], [128], ["mxfp8"]) + tune.layers(["a"], [1], ["rows"])
    known = tune.tuned(Choice(), cases, 600, 8, file)
    assert {*asked} == {"fp8", "scaled_dot", "dequantize", "xla"}  # the last one is the rule here
    dense, grouped = (
        [entry for entry in known.entries if entry.key.op == op]
        for op in ("dot_general", "ragged_dot")
    )
    assert len(dense) == 3 + 1 and len(grouped) == 6
    assert {entry.chosen for entry in known.entries} == {"dequantize"}
    assert Choice.load(file) == known
    lines = file.with_suffix(".md").read_text().splitlines()
    assert lines[0] == f"Microseconds, cpu, jax {jax.__version__}."
    assert len(lines) == 4 + len(known.entries)
    out = capsys.readouterr().out
    assert "1/5 a up, 128 rows, mxfp8: 600 s left" in out
    assert "3/5 b experts, 128 rows, mxfp8" in out
    monkeypatch.setattr(measuring, "measured", None)  # what is known is not measured again
    assert tune.tuned(known, cases, 600, 8, file) == known


def test_what_the_script_measured_is_kept_when_it_is_cut_off(small_models, monkeypatch, tmp_path):
    """After each product, not only after a case."""
    measure, done = measuring.measured, []

    def cut_off(*args):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(args)
        return measure(*args)

    costing(monkeypatch, dict.fromkeys(IMPLEMENTATIONS, 2.0))
    monkeypatch.setattr(measuring, "measured", cut_off)
    cases, file = small_models.layers(["a"], [128], ["mxfp8"]), tmp_path / "cpu.json"
    with pytest.raises(KeyboardInterrupt):
        small_models.tuned(Choice(), cases, 600, 8, file)
    assert len(Choice.load(file).entries) == 2
    monkeypatch.setattr(measuring, "measured", measure)
    known = small_models.tuned(Choice(), cases, 1e-9, 8, file)  # no time, nothing known
    assert known == Choice() and len(Choice.load(file).entries) == 2


def test_a_table_says_what_the_rule_does_unless_another_one_is_clearly_faster():
    from benchmarks.tune import settled

    key = Key("dot_general", "cpu", ("a", "b"), "how")
    costs = (("a", "left out: no kernel"), ("b", 98.5), ("c", 100.0), ("d", "left out: it failed"))
    for rule, chosen in (("c", "c"), ("b", "b"), ("d", "b"), ("e", "b")):
        assert settled(Measured(key, "b", costs), rule).chosen == chosen
    slower = settled(Measured(key, "b", (("b", 97.0), ("c", 100.0))), "c")
    assert slower.chosen == "b"
    assert dict(settled(Measured(key, "b", costs), "c").costs) == dict(costs[1:])


def test_the_script_has_what_matters_most_first():
    from benchmarks import tune

    cases = tune.layers([*tune.MODELS], tune.ROWS, [*tune.RECIPES])
    assert len({*cases}) == len(cases)
    ranks = [
        [*tune.MODELS].index(c.model) + tune.ROWS.index(c.rows) + [*tune.RECIPES].index(c.recipe)
        for c in cases
    ]
    assert ranks == sorted(ranks)
    layers = {(model, layer) for model, layers in tune.MODELS.items() for layer in layers}
    assert {(c.model, c.layer) for c in cases} == layers
    assert {c.rows for c in cases} == {*tune.ROWS} and {c.recipe for c in cases} == {*tune.RECIPES}


# ---- messages ---
def test_bad_calls_get_one_sentence():
    x, w = ones(8, 64), ones(64, 32)
    within = "autotune: this is a trace, in which nothing can be measured; call it outside of jit"

    def tuned(x, w):
        quiet(matmul, x, w)
        return matmul(x, w)

    for call, error, sentence in (
        (lambda: jax.jit(tuned)(x, w), RuntimeError, within),
        (lambda: jax.vmap(tuned, (0, None))(x[None], w), RuntimeError, within),
        (lambda: jax.grad(lambda x: tuned(x, w).sum())(x), RuntimeError, within),
        (lambda: autotune(3), TypeError, "autotune: f must be a function, got 3"),
        (lambda: explain(x), TypeError, "explain: f must be a function, got"),
        (lambda: autotune(matmul, x, w, seconds=0), ValueError, "seconds must be a number above 0"),
        (lambda: autotune(matmul, x, w, seconds="1"), ValueError, "seconds must be a number above"),
        (lambda: autotune(matmul, x, w, seconds=True), ValueError, "seconds must be a number"),
        (lambda: autotune(matmul, x, w, candidates=0), ValueError, "candidates must be 1 or more"),
        (lambda: autotune(matmul, x, w, candidates=1.5), TypeError, "candidates must be an int"),
        (lambda: explain(matmul, x, w, device="h200"), ValueError, "'h200' is no chip's name"),
        (lambda: explain(matmul, x, w, device=3), TypeError, "explain: device must be a jax.Dev"),
        (lambda: explain(partial(matmul, implementation="fp8"), x, w), NotImplementedError,
         "matmul: 'fp8' wants one scale for each row"),
    ):  # fmt: skip
        assert_refused(call, error, sentence)


# ---- the documentation ---
@pytest.mark.skipif(not DOCS.exists(), reason="beside a wheel there is no documentation")
def test_the_examples_of_the_documentation(tmp_path, monkeypatch, capsys):
    """In one go, each block after the others; what a comment says a line prints, it prints."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", DOCS.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) > 2
    names = {}
    for block in blocks:
        exec(compile(textwrap.dedent(block), DOCS.name, "exec"), names)
    assert "chosen" in capsys.readouterr().out
