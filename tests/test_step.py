"""A whole training step, benchmarks/step.py: values on one device and on eight, and rows."""

import asyncio
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from jax.sharding import PartitionSpec as P

from benchmarks import learning, llama, program, report, runner, step, timing
from jax_mx import Recipe

pytestmark = pytest.mark.any_device
SIZES = llama.Sizes(1, 256, 256, heads=4, kv_heads=2, head=64, vocabulary=256)
RECIPES = {"rows": Recipe(window="row"), "mxfp8": "mxfp8"}


def gradients(way, split, devices):
    """The loss and the gradients of weights at the first step."""
    model = llama.Model(SIZES, way, llama.split_of(split, devices))
    tokens = np.random.default_rng(0).integers(0, SIZES.vocabulary, (8, 65), np.int32)
    with model.setting():
        state, text = model.placed(jax.random.key(0), tokens)
        loss, (weights, _) = model.jitted(model.gradients, donate=False)(state, text)
        return jax.device_get((loss, weights))


@functools.cache
def reference(recipe):
    """By the implementation "xla" on one device; without a recipe in bfloat16."""
    way = llama.Way() if recipe is None else llama.Ours(RECIPES[recipe], implementation="xla")
    return gradients(way, "jit", 1)


def distances(got, want):
    """By weight the norm of what differs, over the norm of what was wanted."""
    norms = jax.tree.map(lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b), got[1], want[1])
    leaves = jax.tree_util.tree_leaves_with_path(norms)
    return {jax.tree_util.keystr(path): float(norm) for path, norm in leaves}


@pytest.mark.thorough  # by default test_partition.py counts what the step of one way moves
@pytest.mark.parametrize("name", ["bf16", "rows", "tensorwise", "flax"])
def test_activations_do_not_move(name):
    """On automatic axes weights are gathered, gradients and amaxes are reduced; no more."""
    way, split = step.ways(8)[name]
    model = llama.Model(SIZES, way, llama.split_of(split, 8))
    where, of_text = model.shardings()
    state = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
        jax.eval_shape(model.begin, jax.random.key(0)),
        where,
    )
    text = jax.ShapeDtypeStruct((8, 513), jnp.int32, sharding=of_text)
    with model.setting():
        compiled = model.jitted(model.step).lower(state, text).compile().as_text()
    moved = program.collectives(compiled)
    assert {move for move, _ in moved} <= {"all-gather", "all-reduce", "reduce-scatter"}, moved
    assert "all-gather" in {move for move, _ in moved}
    weights = sum(leaf.size for leaf in jax.tree.leaves(state.weights))
    assert sum(moved.values()) < 4 * 4 * weights  # both passes and gradients, in float32 on CPUs


CASES = [("jit", 1), ("jit", 8), ("explicit", 8), ("shard_map", 8)]
QUICK = [("rows", "jit", 8)]  # others take a quarter of a minute each


@pytest.mark.parametrize(
    ("recipe", "split", "devices"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.thorough)
        for case in ((recipe, *where) for recipe in RECIPES for where in CASES)
    ],
)
def test_a_step_has_the_values_of_the_reference(recipe, split, devices):
    """Sums in another order move codes by a step here and there; bfloat16 is further away."""
    want, floats = reference(recipe), reference(None)
    got = gradients(llama.Ours(RECIPES[recipe]), split, devices)
    np.testing.assert_allclose(got[0], want[0], rtol=2e-5)
    assert abs(floats[0] - want[0]) > 1e-4 * want[0]
    assert max(distances(got, want).values()) < (0.05 if devices > 1 else 1e-6)
    assert min(distances(floats, want).values()) > 0.05


def test_peers_multiply():
    """Both per-tensor ways give the products of floats, and their gradients, within FP8's steps."""
    x, w = normal((2, 32, 64), 0, jnp.bfloat16), normal((64, 48), 1, jnp.bfloat16)

    def run(way, kept):
        def loss(x, w, kept):
            y = way.product(llama.Split(), x, w, kept).astype(jnp.float32)
            return (y**2).mean(), y

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, w, kept)

    with jax.numpy_dtype_promotion("standard"):
        (_, y), (dx, dw, _) = run(llama.Way(), {})
        kept = jax.tree.map(lambda a: a[0], llama.Delayed().scales(1)["q"])
        for _ in range(2):  # the first step has no amaxes of earlier ones
            (_, delayed), (*of_delayed, kept) = run(llama.Delayed(), kept)
        (_, current), (*of_current, _) = run(llama.Current(), {})
    for got in ((delayed, *of_delayed), (current, *of_current)):
        for a, b in zip(got, (y, dx, dw), strict=True):
            a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
            assert 0.005 < np.linalg.norm(a - b) / np.linalg.norm(b) < 0.08
    assert kept["kernel_amax_history"][0] == np.abs(np.asarray(w, np.float32)).max()


@pytest.fixture
def few_files(monkeypatch):
    """Text of one package: all that Python brings takes seconds to read."""
    learning.text.cache_clear()
    monkeypatch.setattr(learning, "folders", lambda: [Path(asyncio.__file__).parent])
    yield
    learning.text.cache_clear()


# ---- rows ---
def rows_of(file, *argv):
    assert runner.run([*map(str, argv), "--smoke", "--json", str(file)]) == 0
    return report.read(file)[1]


def test_rows_of_a_step(tmp_path):
    ways = ("bf16", "rows, mlp, once")
    rows = rows_of(tmp_path / "rows.json", "step", "--ways", *ways, "--repeats", 1)
    assert tuple(row["way"] for row in rows) == ways
    for row in rows:
        keys = ("ms", "tokens_s", "compile_s", "ratio")
        assert {*keys, "temp_gb", "device", "commit", "devices", "layers"} <= row.keys(), row
        assert all(row[key] > 0 for key in keys)
        assert row["loss"][1] < row["loss"][0]  # the same text at every step
    assert rows[0]["ratio"] == 1
    assert rows[1]["ratio"] == round(rows[1]["ms"] / rows[0]["ms"], 3)


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("devices", [1, 8])
def test_a_step_is_lowered_for_gpus_without_one(devices, tmp_path, without_code):
    ways = ("auto", "mxfp8", "flax")
    options = ("--lower", "--devices", devices, "--ways", *ways)
    rows = rows_of(tmp_path / "rows.json", "step", *options)
    assert tuple(row["way"] for row in rows) == ways
    assert all(row["lower_s"] > 0 for row in rows), rows
    assert rows[1]["calls"] > 10


def test_every_way_is_offered_where_it_can_run():
    one, four = step.ways(1), step.ways(4)
    assert {*step.USUAL} <= one.keys() < four.keys()
    assert {split for _, split in one.values()} == {"jit"}
    assert {"rows, explicit", "mxfp8, shard_map"} <= four.keys()


def test_matrices_are_split_and_vectors_are_not():
    split = llama.split_of("jit", 8)
    specs = [split.spec(shape) for shape in ((2, 256, 64), (512, 64), (2, 1, 64), (64,), ())]
    assert specs == [P(None, "fsdp", None), P("fsdp", None), P(), P(), P()]
    assert llama.Split().spec((512, 64)) == P()


# ---- programs ---
def test_kernels_are_told_by_their_names():
    names = ("loop_fusion_3", "loop_fusion_12", "void cute<a, b>(int)", "amaxes_r128")
    events = [timing.Event(0, 1e6 * i, name) for i, name in enumerate(names, 1)]
    assert program.kernels(events, 2) == {
        "amaxes_r128": program.Spent(2, 0.5),
        "loop_fusion": program.Spent(1.5, 1),
        "cute": program.Spent(1.5, 0.5),
    }


def test_overlap_is_time_in_which_both_run():
    """Kernels overlap each other, too; some collectives have nothing beside them."""
    spans = [("a", 0, 4), ("nccl", 2, 10), ("b", 3, 5), ("c", 8, 20), ("ncclX", 9, 12)]
    spans += [("nccl", 30, 33), ("d", 33, 40)]
    events = [timing.Event(1e6 * begin, 1e6 * (end - begin), name) for name, begin, end in spans]
    assert program.overlap(events) == (13, 7)
    assert program.overlap([]) == (0, 0)


def test_collectives_of_loops_count_as_often_as_they_run():
    mesh = llama.split_of("jit", 8).mesh
    split, whole = (jax.NamedSharding(mesh, spec) for spec in (P("fsdp"), P()))

    def layer(x, w):
        return x + jax.lax.with_sharding_constraint(w * x, whole), None

    f = jax.jit(lambda x, ws: jax.lax.scan(layer, x, ws)[0], out_shardings=whole)
    ws = jax.ShapeDtypeStruct(
        (3, 64), jnp.float32, sharding=jax.NamedSharding(mesh, P(None, "fsdp"))
    )
    x = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=split)
    moved = program.collectives(f.lower(x, ws).compile().as_text())
    assert moved["all-gather", "f32"] in {4 * 64 * 3, 4 * 64 * 4}, moved


def test_results_of_collectives_are_what_arrives():
    text = """
    ENTRY %main (p: f32[8]) -> f32[8] {
      %a = (bf16[4,2], bf16[16,2]) all-gather-start(%p), dimensions={0}
      %b = (f32[8], u8[16]) all-reduce-start(%q, %r), to_apply=%add
      %c = f32[2] reduce-scatter(%s), dimensions={0}
    }
    """
    text = "\n".join(line[4:] for line in text.splitlines())
    assert program.collectives(text) == {
        ("all-gather", "bf16"): 64,
        ("all-reduce", "f32"): 32,
        ("all-reduce", "u8"): 16,
        ("reduce-scatter", "f32"): 8,
    }


# ---- learning ---
def test_text_is_the_same_in_every_run(few_files):
    first = learning.text(2**16)
    learning.text.cache_clear()
    again = learning.text(2**16)
    assert first.files == again.files
    assert (first.train == again.train).all() and (first.held_out == again.held_out).all()
    assert len(first.train) > 2**15 and len(first.held_out) > 0
    assert bytes(first.held_out) not in bytes(first.train)
    assert (
        learning.pieces(first.train, (0, 1), 2, 8) == learning.pieces(first.train, (0, 1), 2, 8)
    ).all()


def test_rows_of_learning(few_files, tmp_path):
    options = ("learning", "--ways", "bf16", "tensorwise", "--join", "--resume")
    first = rows_of(tmp_path / "rows.json", *options[:3])
    row, other = rows_of(tmp_path / "rows.json", *options)  # goes on with the second
    assert [row] == first and other["way"] == "tensorwise"
    assert row["steps"] == row["every"] * len(row["train"]) == row["every"] * len(row["held_out"])
    assert row["train"][-1] < row["train"][0]
    assert row["loss"] > 0 and row["parameters"] == learning.parameters(learning.TINY)


def test_text_is_of_all_packages():
    stdlib, *packages = learning.folders()
    assert (stdlib / "asyncio").is_dir() and any((path / "numpy").is_dir() for path in packages)


def test_the_model_that_learns_is_large():
    assert learning.parameters(learning.SIZES) >= 150e6
