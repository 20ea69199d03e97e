"""The benchmarks' arithmetic, their baselines' bytes and the runner, at toy sizes."""

import functools
import itertools
import json
import math
import shlex
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits_equal, assert_same_array

import jax_mx
from benchmarks import (
    baselines,
    counters,
    peers,
    plot,
    product_model,
    products,
    quantizers,
    record,
    report,
    runner,
    shapes,
    sweep,
    timing,
)
from docs import tables
from jax_mx.formats.formats import BLOCK, FLOAT_DTYPES, FORMATS, SCALINGS
from jax_mx.formats.layouts import SCALE_LAYOUTS
from jax_mx.quantizing.facts.variants import layouts_of
from jax_mx.quantizing.planning import Options, planned
from jax_mx.quantizing.reference import rows_of
from jax_mx.shipping.shipped import SHIPPED

pytestmark = pytest.mark.any_device

RESULTS = record.RESULTS
KEYS = {
    *("op", "form", "shape", "dtype", "format", "scaling", "scale_layout"),
    *("us", "gbps", "copy_gbps", "fraction_of_copy", "speedup_over_xla", "commit"),
    *("implementation", "device"),
}


@pytest.fixture
def rows_by(tmp_path):
    """Runs a command line that must end well; its rows."""

    def run(*argv, status=0):
        file = tmp_path / "out.json"
        file.unlink(missing_ok=True)
        assert runner.run([*map(str, argv), "--json", str(file)]) == status
        return report.read(file)[1]

    return run


# ---- shapes and forms ---
def test_parse_takes_names_and_shapes_once_each():
    assert shapes.parse("required,2x64,65536x8192") == ((8, 7168, 7168), (65536, 8192), (2, 64))
    assert shapes.parse("small")[-1] == (1024, 7168)
    for text in ("", "2x", "x2", "2 x 3", "tiny", "-1x32"):
        with pytest.raises(ValueError, match="is neither AxBxC nor one of required, llm, small"):
            shapes.parse(text)
    for text in ("0x32", "32x0", "small,00"):
        with pytest.raises(ValueError, match="has no elements; there is nothing to measure"):
            shapes.parse(text)


def test_every_shape_has_blocks_of_some_form():
    for shape in itertools.chain.from_iterable(shapes.SHAPES.values()):
        assert any(form.fits(shape) for form in shapes.FORMS.values())
    fits = {name for name, form in shapes.FORMS.items() if form.fits((8, 4128, 2881))}
    assert fits == {"axis -2", "axis -2 transposed", "dequantize axis -2"}
    assert not shapes.FORMS["axis -2"].fits((64,))
    for shape in shapes.UNEVEN:  # bound by memory
        assert math.prod(shape) * 2 > 3 * timing.L2_BYTES


@pytest.mark.parametrize("name", shapes.FORMS)
def test_forms_are_those_of_kernels(name):
    form = shapes.FORMS[name]
    assert shapes.form_of(form.op.removesuffix("_both"), form.kernel) == name
    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    if form.op == "quantize_both":
        options = Options.both(("mxfp8_e4m3",) * 2, (False, form.transpose))
    else:
        options = Options(("mxfp8_e4m3",), transpose=form.transpose, **form.made_by)
    assert planned(form.op, x, options).form == form.kernel


@pytest.mark.parametrize(
    "variant",
    [variant for variant in SHIPPED if variant.implementation == "cutedsl"],
    ids=lambda variant: variant.name,
)
def test_kernels_take_the_candidates_of_a_sweep(variant):
    kernels = pytest.importorskip(f"jax_mx.quantizing.kernels.cutedsl.{variant.op}")
    tiles = list(sweep.candidates(variant))
    assert len(tiles) > 1
    for layout, tile in itertools.product(layouts_of(variant), tiles):
        kernel = kernels.kernel_of(variant, "sm_90a", SCALE_LAYOUTS[layout], True, tile=tile)
        assert kernel.tile is tile


# ---- timing ---
def test_nbytes_counts_input_values_and_scales():
    x = jax.ShapeDtypeStruct((8, 7168, 7168), jnp.bfloat16)
    elements = 8 * 7168 * 7168
    for format, per_element in (("mxfp8_e4m3", 1), ("mxfp4_e2m1", 0.5)):
        q = jax.eval_shape(functools.partial(jax_mx.quantize, format=format), x)
        assert timing.nbytes((x, q)) == elements * (2 + per_element + 1 / 32)
        both = jax.eval_shape(functools.partial(jax_mx.quantize_both, format=format), x)
        assert timing.nbytes((x, both)) == elements * (2 + 2 * (per_element + 1 / 32))


def test_rotation_overruns_l2():
    assert timing.rotation(0) == timing.rotation(64) == 32
    assert timing.rotation(2**30) == 3
    for size in (2**23, 2**24, 2**25, 2**26, 2**27):
        assert timing.rotation(size) * size >= 4 * timing.L2_BYTES


def profile(*events, line="Stream #13(Kernel,MemcpyD2D)", plane="/device:GPU:0"):
    """The text of a profile with these events: (name, start in us, duration in us)."""
    names = sorted({name for name, _, _ in events})
    text = " ".join(
        f"events {{ metadata_id: {names.index(name) + 1} offset_ps: {start * 10**6} "
        f"duration_ps: {duration * 10**6} }}"
        for name, start, duration in events
    )
    metadata = " ".join(
        f'event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}'
        for i, name in enumerate(names, 1)
    )
    text = f'planes {{ name: "{plane}" lines {{ name: "{line}" {text} }} {metadata} }}'
    data = jax.profiler.ProfileData
    return data.from_serialized_xspace(data.text_proto_to_serialized_xspace(text))


@pytest.mark.parametrize(
    ("events", "calls", "want"),
    [
        (  # in any order: each call's events are summed, and the median counts
            [("reduce", 100 * i, 2) for i in (2, 0, 1)]
            + [("scale", 100 * i + 50, 3 + i) for i in (2, 0, 1)],
            3,
            timing.Timing(6.0, timing.DEVICE),
        ),
        # three events of two calls; not the same ones in each
        ([("a", 0, 2), ("a", 10, 2), ("b", 20, 2)], 2, timing.Timing(3, "device mean")),
        (
            [("a", 0, 2), ("a", 10, 1), ("b", 20, 1), ("a", 30, 2)],
            2,
            timing.Timing(3, "device mean"),
        ),
    ],
)
def test_per_call_takes_the_median_where_calls_are_told_apart(events, calls, want):
    assert timing.per_call(timing.events(profile(*events)), calls) == want


def test_only_a_gpus_streams_count():
    for where in ({"plane": "/host:CPU"}, {"line": "XLA Ops"}):
        assert not timing.events(profile(("a", 0, 1), **where))
    with pytest.raises(ValueError, match="no event of a device"):
        timing.per_call([], 1)
    data = profile(("a", 0, 1), plane="/device:GPU:1")
    assert timing.events(data, "/device:GPU:1") == timing.events(data) != []
    assert timing.events(data, "/device:GPU:0") == []


def test_measure_keeps_few_outputs_alive_and_goes_through_the_inputs():
    alive, seen = set(), []

    class Output:
        def __init__(self):
            alive.add(id(self))
            assert len(alive) <= timing.WINDOW + 1

        def block_until_ready(self):
            alive.discard(id(self))

    def fn(x):
        seen.append(x)
        return Output()

    timing.run(fn, [(0,), (1,), (2,)], 7)
    assert seen == [0, 1, 2, 0, 1, 2, 0]
    assert not alive


def test_without_a_profile_the_wall_counts(monkeypatch):
    x = jnp.ones(8)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert timing.measure(jnp.copy, [(x,)], 5).clock == timing.WALL

    def broken(*_):
        raise RuntimeError("no CUPTI")

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing, "profile", broken)
    with pytest.warns(UserWarning, match="no CUPTI"):
        assert timing.measure(jnp.copy, [(x,)], 5).clock == timing.WALL
    monkeypatch.setattr(timing, "profile", lambda *_: [timing.Event(i, 2e3, "a") for i in range(5)])
    assert timing.measure(jnp.copy, [(x,)], 5) == timing.Timing(2, timing.DEVICE)


@pytest.mark.gpu
def test_a_gpu_is_profiled():
    copied = functools.partial(baselines.words, size=2**28)
    inputs = timing.rotate(copied, 2**28)
    for copy in baselines.copies().values():
        assert len(timing.profile(copy, inputs, 5)) == 5
        timed = timing.measure(copy, inputs, 20)
        assert timed.clock == timing.DEVICE
        assert timed.us > 2 * 2**28 / 20e12 * 1e6  # no memory does 20 TB/s


def test_fastest_passes_over_what_fails(monkeypatch):
    def fail(x):
        raise NotImplementedError(x)

    times = {jnp.negative: 2.0, jnp.copy: 1.0}

    def measure(fn, inputs, calls):
        return timing.Timing(times[fn], "wall") if fn in times else fn(*inputs[0])

    monkeypatch.setattr(timing, "measure", measure)
    candidates = {"fail": fail, "slow": jnp.negative, "fast": jnp.copy}
    assert timing.fastest(candidates, [(1,)]) == ("fast", timing.Timing(1.0, "wall"))
    with pytest.raises(NotImplementedError, match="1"):
        timing.fastest({"fail": fail}, [(1,)])


# ---- baselines ---
def assert_baselines_agree(x, form, **options):
    op = functools.partial(getattr(jax_mx, form.op), implementation="xla", **form.options)
    if form.op == "dequantize":
        x, dtype = jax_mx.quantize(x, implementation="xla", **form.made_by, **options), x.dtype.name
        want, versions = op(x, dtype), baselines.dequantize(form, dtype)
        count = len(baselines.PRODUCTS)
    else:
        want, versions = op(x, **options), baselines.quantize(form, **options)
        count = len(baselines.VARIANTS)
    assert len(versions) == count * (1 + form.transpose)
    for name, fn in versions.items():
        got = fn(x)
        if form.op == "dequantize":
            assert_bits_equal(got, want, name)
            continue
        assert isinstance(got, tuple) == isinstance(want, tuple) == (form.op == "quantize_both")
        pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
        for i, (a, b) in enumerate(pairs):
            assert_same_array(a, b, f"{name} {i}")


@pytest.mark.sampled(16)
@pytest.mark.parametrize(
    ("format", "scaling", "dtype"),
    [
        *itertools.product(FORMATS, SCALINGS, ["bfloat16"]),
        *itertools.product(["mxfp8_e4m3", "mxfp4_e2m1"], ["rceil"], ["float16", "float32"]),
    ],
)
def test_baselines_give_the_same_bytes(format, scaling, dtype):
    x = baselines.normal(jax.random.key(1), (32, 2048), FLOAT_DTYPES[dtype])
    options = {"scaling": scaling, "scale_layout": "row_major"}
    assert_baselines_agree(x, shapes.FORMS["axis -1"], format=format, **options)


@pytest.mark.sampled(14)
@pytest.mark.parametrize("scale_layout", ["row_major", "blocked_128x4"])
@pytest.mark.parametrize("form", shapes.FORMS)
@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp4_e2m1"])
def test_baselines_follow_form_and_layout(format, form, scale_layout):
    x = baselines.normal(jax.random.key(2), (2, 96, 160), FLOAT_DTYPES["bfloat16"])
    options = {"scaling": "rceil", "scale_layout": scale_layout}
    if shapes.FORMS[form].square and scale_layout != "row_major":
        pytest.skip("scales of squares are row-major")
    assert_baselines_agree(x, shapes.FORMS[form], format=format, **options)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_baselines_dequantize_all_formats(format, dtype):
    x = baselines.normal(jax.random.key(3), (32, 256), FLOAT_DTYPES[dtype])
    options = {"scaling": "rceil", "scale_layout": "row_major", "format": format}
    assert_baselines_agree(x, shapes.FORMS["dequantize"], **options)


def test_copies_are_copies():
    x = baselines.words(jax.random.key(0), 4093)
    assert x.nbytes == 4096
    for copy in baselines.copies().values():
        y = copy(x)
        assert (y == x).all()
        assert y.unsafe_buffer_pointer() != x.unsafe_buffer_pointer()


# ---- the runner ---
STORED = {  # a file of benchmarks/results, and options of the command line that wrote it
    "h200": ("quantizers", "--form", "axis -1"),
    "h200_layers": ("layers", "--cases", "7168x4096", "--ways", "bf16", "mxfp8"),
    "h200_moe": ("moe", "--cases", "routing", "forward", "--ways", "mxfp8", "*rg*", "*Gr*"),
    "h200_products_dense": ("products", "--cases", "dense", "--ways", "mxfp8_e4m3", "bf16 dot"),
    "h200_products_wgrad": ("products", "--cases", "wgrad up", "--ways", "bf16 dot*"),
    "h200x2_collectives": ("collectives", "--cases", "all-to-all"),
    "h100_step": ("step", "--ways", "bf16"),
}
TRAINED = {  # which takes longer
    "h100_decode_step": ("decode", "--batches", "1", "--ways", "bf16*", "mxfp8"),
    "h200x2_moe": ("moe_sharded", "--data", "2"),
    "h200_moe_step": ("moe_step", "--ways", "bf16"),
}


@pytest.mark.parametrize(
    "file", [*STORED, *(pytest.param(name, marks=pytest.mark.thorough) for name in TRAINED)]
)
def test_rows_have_the_keys_of_the_stored_ones(file, rows_by):
    name, *options = (STORED | TRAINED)[file]
    kinds = [{tuple(sorted(row)) for row in rows if "error" not in row} for rows in (
        rows_by(name, "--smoke", *options), report.read(RESULTS / f"{file}.json")[1])]  # fmt: skip
    assert kinds[0] and kinds[0] <= kinds[1]


@pytest.mark.thorough
@pytest.mark.parametrize("name", [n for n in runner.commands() if n in {w.split()[0] for _, w in
                                  record.COMMANDS.values()}])  # fmt: skip
def test_everything_that_is_measured_runs(name, rows_by):
    """A case that does not run is for GPUs alone, and says so."""
    for row in rows_by(name, "--smoke"):
        assert row.get("us", row.get("ms", 0)) > 0 or "CPU" in row["error"] or "wgrad" in (
            row.get("case", "")) or "not on cpu" in row["error"]  # fmt: skip


def case(name, way, *times, **more):
    """A case that takes these times in turn; an exception is raised."""
    left = iter(times)

    def measure(_):
        us = next(left)
        if isinstance(us, Exception):
            raise us
        return {"us": us}

    return runner.Case(name, way, {"case": name, "way": way}, measure, **more)


def test_ways_are_compared_and_the_best_round_counts():
    rounds = {"base": "floats", "rounds": 2}
    cases = [
        case("a", "floats", 10.0, 8.0, **rounds),
        case("a", "mx", 6.0, 7.0, **rounds),
        case("a", "broken", ValueError("no [memory]\n  left"), **rounds),
        case("b", "mx", 5.0, base="floats"),
        case("b", "mx", 9.0, base="floats"),  # another one of that name
    ]
    said = []
    rows = list(runner.measured(cases, None, said.append))
    assert said == [*["a floats", "a mx", "a broken"] * 2, "b mx", "b mx"]
    assert [row.get("us") for row in rows] == [8.0, 6.0, None, 5.0, 9.0]
    assert [row.get("ratio") for row in rows] == [1.0, 0.75, None, None, None]
    assert rows[2]["error"] == "ValueError: no [memory] left"


def test_a_new_file_is_all_that_a_new_measurement_takes(monkeypatch, tmp_path, capsys):
    """`--cases` and `--ways` choose of it, --join keeps the rest of a file, --against compares."""
    (tmp_path / "toy.py").write_text("def cases(args):\n    yield from CASES\n")
    monkeypatch.setattr(runner, "__file__", str(tmp_path / "runner.py"))
    toy = type(sys)("benchmarks.toy", "Toys.")
    monkeypatch.setitem(sys.modules, "benchmarks.toy", toy)
    file, earlier = tmp_path / "rows.json", tmp_path / "earlier.json"

    def run(*times, options=()):
        names = ("up", "down")
        cases = [case(*fields) for fields in zip(names, names, times, strict=True)]
        toy.cases = lambda args: cases
        return runner.run(["toy", "--commit", "abc", "--json", str(file), *options])

    assert run(100.0, 50.0) == 0
    held = json.loads(file.read_text())
    assert (held["command"], held["commit"]) == ("python -m benchmarks toy", "abc")
    assert held["device"] and held["date"] and [row["us"] for row in held["rows"]] == [100.0, 50.0]
    earlier.write_text(file.read_text())
    assert run(102.0, 50.0, options=["--against", str(earlier)]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "up up" in out and "100.0 -> 102.0 us (-2.0%)" in out
    assert run(102.0, 50.0, options=["--against", str(earlier), "--share", "0.03"]) == 0
    assert run(1.0, 2.0, options=["--cases", "d*", "--ways", "[a-e]*", "--join"]) == 0
    assert [row["us"] for row in report.read(file)[1]] == [102.0, 2.0]
    assert run(RuntimeError(), 3.0, options=["--join"]) == 0  # the time of before stays
    assert [row["us"] for row in report.read(file)[1]] == [102.0, 3.0]
    assert run(RuntimeError(), RuntimeError()) == 1
    for options, sentence in (
        (["--cases", "left"], "nothing has the name 'left'; there are up; down"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--share", "2"], "--share must be at least 0 and less than 1, got 2.0"),
        (["--json", "/"], "Is a directory: '/'"),
        (["--json", "/nonexistent/x"], "No such file or directory: '/nonexistent/x'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            run(1.0, 1.0, options=options)
        assert sentence in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        runner.run(["other"])
    assert "there is no 'other', but toy" in capsys.readouterr().err


def earlier_row(**changes):
    names = ("quantize", "axis -1", "64x128", "bfloat16", "mxfp8_e4m3", "rceil", "row_major")
    row = dict(zip(("op", "form", "shape", "dtype", "format", "scaling", "scale_layout"), names,
                   strict=True))  # fmt: skip
    row |= {"us": 100.0, "fraction_of_copy": 1.0, "implementation": "cutedsl"}
    return row | {"device": "NVIDIA H200", "commit": "abc"} | changes


def test_the_guard_names_what_is_slower():
    keys = [*earlier_row()][:7]
    earlier = [earlier_row(), earlier_row(form="both"), earlier_row(implementation="torchao x")]

    def verdict(share, *rows):
        return report.verdict(rows, ({}, earlier), keys, share)

    ok, lines = verdict(0.01, earlier_row(us=99, commit="def"))
    assert ok and lines == ["0 of 1 rows are slower by more than 1.0%"]
    slow = earlier_row(form="both", us=103.0, fraction_of_copy=0.97)
    new = earlier_row(form="square")
    ok, lines = verdict(0.01, earlier_row(), slow, new)
    assert not ok
    assert lines == [
        "slower: quantize both 64x128 bfloat16 mxfp8_e4m3 rceil row_major NVIDIA H200: "
        "100.0 -> 103.0 us, 1.000 -> 0.970 of a copy (-3.0%)",
        "1 of 2 rows are slower by more than 1.0%",
        "1 rows have no earlier ones to compare with",
    ]
    assert verdict(0.05, slow)[0]
    assert not verdict(0.01, new)[0]  # nothing was guarded
    assert not verdict(0.01, earlier_row(device="NVIDIA H100"))[0]


# ---- quantizers ---
def test_a_row_says_what_a_call_costs(rows_by, capsys):
    options = ("--shapes", "4x640,2x40,2x3x320", "--format", "mxfp8_e4m3", "mxfp4_e2m1")
    rows = rows_by(*options, "--repeats", "5")
    good = [row for row in rows if "error" not in row]
    assert [row["shape"] for row in good] == ["4x640", "4x640", "2x3x320", "2x3x320"]
    assert all({*row} == KEYS for row in good)
    numbers = KEYS - {"commit"} - {key for key in KEYS if isinstance(good[0][key], str)}
    assert len(numbers) == 5 and all(row[key] > 0 for row in good for key in numbers)
    assert len(rows) == 6 and sum("axis -1 has length 40" in row["error"] for row in rows
                                  if row not in good) == 2  # fmt: skip
    out = capsys.readouterr().out
    for word in (jax.devices()[0].device_kind, jax.__version__, "speedup"):
        assert word in out


def asked(*argv):
    """The quantizers that a command line measures."""
    return list(quantizers.quantizers(runner.parsed(argv)[2]))


def test_what_is_measured(capsys):
    layouts = ("row_major", "blocked_128x4", "row_major")
    twice = asked("--scale-layout", *layouts, "--format", "mxfp8_e4m3", "mxfp8_e4m3", "--shapes",
                  "4x64,4x64")  # fmt: skip
    assert [quantizer.scale_layout for quantizer in twice] == ["row_major", "blocked_128x4"]
    every = asked("--form", "all", "--shapes", "32x64")
    assert [quantizer.form for quantizer in every] == [*shapes.FORMS]
    tiled = asked("--form", "all", "--shapes", "32x64", "--scale-layout", "blocked_128x4")
    assert [case.form for case in tiled] == [n for n, f in shapes.FORMS.items() if not f.square]
    for options in (["--form", "axis -3"], ["--form", "quantize"]):
        with pytest.raises(SystemExit, match="2"):
            asked(*options)
    with pytest.raises(SystemExit, match="2"):
        runner.run(["--shapes", "tiny"])
    assert "shape 'tiny' is neither AxBxC nor one of" in capsys.readouterr().err


@pytest.mark.thorough
def test_every_form_is_a_row(rows_by):
    rows = rows_by("--form", "all", "--shapes", "32x64", "--repeats", "1")
    names = [(form.op, name) for name, form in shapes.FORMS.items()]
    assert [(row["op"], row["form"]) for row in rows] == names
    assert all(row["speedup_over_xla"] for row in rows)


@pytest.mark.thorough
def test_picked_rows_are_rows(rows_by):
    """Bytes count once: the rows of x that the numbers name, and the results of all."""
    forms = ("axis -1", "both transposed", "dequantize")
    options = ("--source", "rows", "--form", *forms, "--repeats", 1, "--shapes", "64x64,2x64x64")
    rows = rows_by(*options)
    assert [r["form"] for r in rows] == ["axis -1, rows", "both transposed, rows"]
    assert all(r["speedup_over_xla"] for r in rows)
    names = ("bfloat16", "mxfp8_e4m3", "rceil", "row_major", None)
    quantizer = quantizers.Quantizer("axis -1", (64, 64), *names, source="rows")
    x, picked = quantizer.make(jax.random.key(0))
    assert x.shape == (60, 64) and sorted(np.asarray(picked)) == [-1] * 4 + [*range(60)]
    op, versions = quantizer.functions()
    want = op((x, picked))
    assert_same_array(jax_mx.quantize(rows_of(x, picked)), want)
    for version in versions.values():
        got = jax.tree.leaves(jax.eval_shape(version, (x, picked)))
        pairs = zip(got, jax.tree.leaves(want), strict=True)
        assert all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)


@pytest.mark.thorough
def test_preprocessing_is_rows(rows_by):
    options = ("--form", "axis -1", "square", "dequantize", "--format", "mxfp4_e2m1")
    named = shapes.PREPROCESSING
    rows = rows_by(*options, "--preprocessing", *named, "--shapes", "32x64", "--repeats", 1)
    rotated = [f"axis -1, {name}" for name, modes in named.items() if len(modes) == 1]
    assert [row["form"] for row in rows] == ["axis -1", "square", "dequantize", *rotated]
    names = ("bfloat16", "mxfp4_e2m1", "rceil", "row_major", None)
    counts = {"sr": (1, 2), "h16_sr": (1, 2), "sr_h16_sr": (None, 2)}
    for preprocessing, modes in named.items():
        for i, form in enumerate(("axis -1", "both")):
            if len(modes) <= i + 1:
                quantizer = quantizers.Quantizer(form, (32, 64), *names, preprocessing)
                assert quantizer.words == counts.get(preprocessing, (0, 0))[i] * 4 * 64
                assert (len(modes) == 0) == (not quantizer.how)
    compiled = [
        variant.modes
        for variant in SHIPPED  # a sweep has windows; a product wants what is dequantized at once
        if all(mode.window == BLOCK and not mode.dequantized for mode in variant.modes)
    ]
    assert {*map(frozenset, compiled)} == {*map(frozenset, named.values())}


def test_a_named_implementation_that_cannot_serve_fails_its_row_alone(rows_by):
    if jax.default_backend() != "cpu":
        pytest.skip("it can")
    (row,) = rows_by("--shapes", "4x64", "--implementation", "cutedsl", status=1)
    assert row["shape"] == "4x64" and "not on cpu" in row["error"]


def test_a_failing_baseline_costs_the_speedup_alone(monkeypatch, rows_by, capsys):
    def fail(x):
        raise ValueError("out of [memory]")

    monkeypatch.setattr(baselines, "quantize", lambda *_, **__: {"fail": fail})
    (row,) = rows_by("--shapes", "4x64", "--repeats", "5")
    assert row["speedup_over_xla"] is None and {*row} == KEYS
    assert "XLA's versions fail: ValueError: out of [memory]" in capsys.readouterr().out


def test_a_run_is_guarded(tmp_path, capsys):
    path = tmp_path / "earlier.json"
    for fraction, status in ((1e-6, 0), (1e6, 1)):
        here = {"implementation": "xla", "device": jax.devices()[0].device_kind}
        path.write_text(json.dumps([earlier_row(fraction_of_copy=fraction, **here)]))
        options = ["--shapes", "64x128", "--repeats", "2", "--against", str(path)]
        assert runner.run(options) == status
        assert "of 1 rows are slower" in capsys.readouterr().out


@pytest.fixture
def required(monkeypatch, capsys):
    """Runs with --require, and what it prints, where `numbers` says what a quantizer's row has."""

    def run(numbers, *options, require=True):
        def measure(case, args):
            us, fraction, speedup, *gbps = numbers(case)
            row = {"us": us, "fraction_of_copy": fraction, "speedup_over_xla": speedup}
            return row | {"gbps": (gbps or [1.0])[0], "implementation": "cutedsl"}

        monkeypatch.setattr(quantizers, "measure", measure)
        status = runner.run([*(["--require"] * require), *options])
        return status, capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("fraction", "speedup", "want"),
    [(0.98, 2.5, 0), (0.9499, 2.5, 1), (0.98, 2.2999, 1), (0.98, None, 1)],
)
def test_require_is_the_exit_status(required, fraction, speedup, want):
    def numbers(_):
        return 300.0, fraction, speedup

    status, out = required(numbers)
    assert status == want and required(numbers, require=False)[0] == 0
    assert required(numbers, "--shapes", "4x64")[0] == 1  # nothing that could be met
    assert required(numbers, "--scaling", "floor", "rceil")[0] == want
    line = "  axis -1 ({}) bfloat16 -> mxfp8_e4m3 rceil row_major: 0.980 of copy (>= {} wanted){}\n"
    if want:
        assert "no  axis -1 (65536,8192)" in out
        return
    for least, faster in ((0.95, 2.3), (0.97, 2.5)):
        assert line.format("8,7168,7168", least, f", 2.50x XLA (>= {faster} wanted)") in out
    assert line.format("65536,8192", 0.97, "") in out  # the speedup is wanted of one shape alone


def test_every_form_has_requirements_on_every_llm_shape(required):
    status, out = required(lambda _: (300.0, 0.96, 3.0), "--form", "all", "--shapes", "llm")
    lines = [line for line in out.splitlines() if "wanted" in line]
    assert status == 1 and len(lines) == 2 + 5 * 8
    verdicts = {form: set() for form in shapes.FORMS}
    for line in lines[2:]:
        verdicts[line[4:].partition(" (")[0]].add((line[:2], "x XLA" in line))
    met, missed = {("ok", True), ("ok", False)}, {("no", True), ("no", False)}
    assert verdicts == {name: {("no", False)} for name in shapes.FORMS} | {
        "axis -1": missed,
        "axis -2": missed,
        "axis -2 transposed": {("no", True), ("ok", False)},
        "square": set(),
        "square transposed": set(),
        "both": met,
        "both transposed": met,
    }


@pytest.mark.parametrize(("gbps", "want"), [(0.981, 0), (0.979, 1)])
def test_blocked_scales_are_compared_with_row_major_ones(required, gbps, want):
    def numbers(case):
        return 300.0, 1.0, 9.0, gbps if case.scale_layout == "blocked_128x4" else 1.0

    options = ["--form", "both", "--shapes", "65536x8192", "--scale-layout"]
    status, out = required(numbers, *options, "row_major", "blocked_128x4")
    assert status == want
    line = f"both (65536,8192) bfloat16 -> mxfp8_e4m3 rceil blocked_128x4: {gbps} of row_major"
    assert line in out
    status, out = required(numbers, *options, "blocked_128x4")
    assert status == 1 and "of row_major" not in out  # there is nothing to compare with


def test_uneven_and_small_shapes_have_requirements_of_their_own(required):
    status, out = required(lambda _: (300.0, 0.8, 1.0), "--form", "all", "--shapes", "small,odd")
    assert status == 0 and "error" not in out and "no  " not in out
    line = "ok  axis -2 ({}) bfloat16 -> mxfp8_e4m3 rceil row_major: {}"
    assert line.format("8,4128,2881", "0.800 of copy (>= 0.8 wanted)\n") in out
    assert line.format("64,7168", "1.00x XLA (>= 1.0 wanted)\n") in out
    assert "axis -2 (16,7168)" not in out and "axis -1 (8,4128,2881)" not in out


def test_a_required_row_that_fails_is_not_met(required):
    def numbers(case):
        if case.shape == (65536, 8192):
            raise MemoryError
        return 300.0, 1.0, 3.0

    status, out = required(numbers)
    line = "no  axis -1 (65536,8192) bfloat16 -> mxfp8_e4m3 rceil row_major: not measured\n"
    assert status == 1 and line in out


@pytest.mark.skipif(len(jax.devices()) != 8, reason="simulated devices, of a machine without GPUs")
def test_sharded_says_what_the_slowest_device_takes(capsys, monkeypatch, rows_by):
    (row,) = rows_by("sharded", "--shapes", "64x128", "--repeats", 2)
    assert row["devices"] == 8 and row["to_alone"] == pytest.approx(
        row["us"] / row["alone_us"], rel=1e-2
    )
    met = row["to_alone"] <= 1.05
    assert f"{'ok' if met else 'MISSED'}: axis -1 64x128: " in capsys.readouterr().out
    monkeypatch.setattr(jax, "devices", lambda *_: ["the only one"])
    with pytest.raises(SystemExit, match="2"):
        runner.run(["sharded"])
    assert "sharded: there is one device, the only one" in capsys.readouterr().err


# ---- peers ---
def stand_in(tmp_path, monkeypatch, program):
    """Makes the peers' processes run a program of the test, which finds its cases in `cases`."""
    script = tmp_path / "peer.py"
    script.write_text(
        f"import json, sys\nname = sys.argv[3]\ncases = json.load(sys.stdin)\n{program}"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(peers.sys, "executable", str(python))


PEER = """
for i, case in enumerate(cases):
    assert case["shape"] == [64, 128] and case["dtype"] == "bfloat16"
    print("compiling ...")
    answer = {"us": 2.0, "clock": "device", "bytes": 4000, "scaling": "floor", "library": "x 1.0"}
    print(json.dumps([i, {"error": "no sm_42"} if case["form"] == "dequantize" else answer]))
"""


@pytest.mark.thorough
def test_peers_are_further_rows(tmp_path, monkeypatch, capsys, rows_by):
    stand_in(tmp_path, monkeypatch, PEER)
    options = ("--peers", "--shapes", "64x128", "--repeats", "1")
    rows = rows_by(*options, "--form", "axis -1", "axis -2", "dequantize")
    ours, theirs = rows[:3], [row for row in rows[3:] if "us" in row]
    assert [row["implementation"] for row in theirs] == [f"x 1.0 {name}" for name in peers.PEERS]
    for row in theirs:
        assert {*row} == KEYS
        assert (row["form"], row["scaling"], row["us"], row["gbps"]) == ("axis -1", "floor", 2, 2)
        assert row["copy_gbps"] == ours[0]["copy_gbps"]
        xla_us = ours[0]["us"] * ours[0]["speedup_over_xla"]
        assert row["speedup_over_xla"] == pytest.approx(xla_us / 2, abs=1e-3)
    assert "error: dequantize: no sm_42" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("import no_torch_here", "ModuleNotFoundError: No module named 'no_torch_here'"),
        ("import os; os.kill(os.getpid(), 9)", "exit status -9"),
        ("import time; time.sleep(60)", "not done after 1 seconds"),
    ],
)
def test_a_peer_that_fails_costs_its_row(tmp_path, monkeypatch, rows_by, program, sentence):
    stand_in(tmp_path, monkeypatch, program)
    monkeypatch.setattr(peers, "TIMEOUT", 1)
    monkeypatch.setattr(peers, "PEERS", {"Triton": peers.PEERS["Triton"]})
    row, failed = rows_by("--peers", "--shapes", "64x128", "--repeats", "1")
    assert row["us"] and failed["implementation"] == "Triton" and sentence in failed["error"]


def test_peers_serve_what_they_have():
    case = {"form": "axis -1", "shape": [64, 128], "dtype": "bfloat16", "format": "mxfp8_e4m3"}
    case |= {"scaling": "rceil", "scale_layout": "row_major"}
    assert all(peer.serves(case) for peer in peers.PEERS.values())
    for name, other in {
        "form": "both",
        "shape": [128],
        "dtype": "float16",
        "format": "mxfp4_e2m1",
        "scaling": "even",
        "scale_layout": "blocked_128x4",
    }.items():
        assert not any(peer.serves({**case, name: other}) for peer in peers.PEERS.values()), name
    forms = {form for peer in peers.PEERS.values() for form in peer.forms}
    assert forms < set(shapes.FORMS)


# ---- products ---
PRODUCTS_PEER = """
(case,) = cases
dense = {"shape": [256, 128], "rows": 128, "k": 128, "dtype": "bfloat16"}
groups = {"shape": [2, 256, 128], "rows": 512, "k": 128, "dtype": "bfloat16", "sizes": [159, 353]}
wgrad = {"shape": [512, 256], "rows": 512, "k": 128, "dtype": "bfloat16", "sizes": [256, 256]}
assert case in ((groups, wgrad) if "grouped" in name else (dense,)), case
answer = {"us": 2.0, "clock": "device", "bytes": 4000, "scaling": "", "library": "torch 1.0"}
print(json.dumps([0, answer if name.endswith("128x128") else {"error": "no sm_42"}]))
"""


def test_products_of_peers_are_further_rows(tmp_path, monkeypatch, rows_by):
    stand_in(tmp_path, monkeypatch, PRODUCTS_PEER)
    cases = [products.Multiplied("many", 128, 128, 256), products.Multiplied("few", 64, 128, 256)]
    cases += [products.Multiplied(n, 512, 128, 256, 2, wgrad=n == "wgrad")
             for n in ("groups", "wgrad")]  # fmt: skip
    monkeypatch.setattr(products, "PRODUCTS", cases)
    tiles, other = rows_by("products", "--ways", "cuBLASLt*", "--peers")
    assert (tiles["us"], tiles["tflops"], tiles["library"]) == (2.0, 4.2, "torch 1.0")
    assert tiles["weights_tbs"] == round(256 * 128 / 2e6, 3)
    assert other["error"] == "no sm_42" and {row["case"] for row in (tiles, other)} == {"many"}
    groups = rows_by("products", "--ways", "*_grouped_mm", "--peers", status=1)
    names = [row["implementation"] for row in (tiles, other, groups[0])]
    assert names == [*peers.PRODUCTS] and [row["case"] for row in groups] == ["groups", "wgrad"]


# ---- on several devices ---
@pytest.mark.thorough
def test_a_training_step_on_several_devices(rows_by):
    one, four = rows_by("moe_step", "--smoke", "--ways", "mxfp8", "--devices", 1, 4)
    assert (one["devices"], four["devices"]) == (1, 4)
    for row in (one, four):
        tokens = row["devices"] * row["rows"] * row["length"]
        assert row["tokens_s"] == pytest.approx(1e3 * tokens / row["ms"], rel=1e-3)
        assert row["losses"][1] < row["losses"][0] < 8


def test_routing_is_a_table(rows_by):
    rows = rows_by("moe", "--smoke", "--cases", "routing")
    drawn = tables._routing([*rows, {"case": "forward"}])
    assert len(drawn) == len(rows) + 3 and drawn[2].startswith("| 1,024, 8, 8 | jnp.argsort")
    assert not tables._routing([{"case": "forward"}])


# ---- what was measured ---
def test_the_plot_shows_every_form_and_every_implementation():
    rows = report.read(RESULTS / "h200.json")[1]
    rows = [row for row in rows if row["implementation"] == "cutedsl"]
    row = next(row for row in rows if plot.WHERE.items() <= row.items())
    theirs = {**row, "implementation": "x 1.0 Triton", "scaling": "floor", "gbps": 3000.0}
    elsewhere = {**theirs, "implementation": "not here", "dtype": "float32"}
    series = plot.series([*rows, theirs, elsewhere])
    assert [*series] == ["jax_mx", "copy", "XLA", "x 1.0 Triton (floor)"]
    assert series["x 1.0 Triton (floor)"] == {row["form"]: 3.0}
    assert series["XLA"][row["form"]] == pytest.approx(row["gbps"] / row["speedup_over_xla"] / 1e3)
    figure = plot.draw([*rows, theirs], "H200, a day")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [*series["jax_mx"]]
    assert "H200, a day" in axes.get_title("left")
    (legend,) = figure.legends
    texts = {text.get_text() for text in legend.get_texts()}
    assert texts == {"jax_mx", "copy, same bytes", "XLA", "x 1.0 Triton (floor)"}
    with pytest.raises(ValueError, match="no row has"):
        plot.draw([elsewhere], "H200, a day")


def test_the_readmes_picture(tmp_path, monkeypatch):
    """Quantizers, and an MoE layer by its fastest recipe."""
    for path in plot.RESULTS.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(plot, "RESULTS", tmp_path)
    left, right = plot.overview_bars()
    assert {*left} == {"jax_mx", "plain JAX, by XLA", "torchao, its fastest"}
    assert len(right) == 3 and {*plot.LAYERS_IN_FLOATS} < {*right}
    peer = left["torchao, its fastest"]
    two = 1 / peer["along rows"] + 1 / peer["along columns,\ntransposed"]  # two reads, two writes
    assert peer["both"] == pytest.approx(1 / two * 2 * 4 / (2 * 3), rel=0.02)  # of one read's bytes
    ways = {"bf16 lax.ragged_dot": 90, "bf16 Pallas": 600, "mxfp8": 550, "mxfp8, tiles": 900}
    rows = [{"case": case, "way": way, "tflops": n, "us": 1.0}
            for case in ("forward", "decode") for way, n in ways.items()]  # fmt: skip
    (tmp_path / "h200_moe.json").write_text(json.dumps({"rows": rows}))
    _, layer = plot.overview_bars()
    assert layer == {
        "jax_mx.moe, mxfp8, tiles": {"forward": 900},
        "bf16 Pallas": {"forward": 600},
        "bf16 lax.ragged_dot": {"forward": 90},
    }
    titles = [axes.get_title("left").strip() for axes in plot.overview(left, layer).axes]
    assert titles[1] == "An MoE layer, TF/s"
    assert plot.digest(left, right) != plot.digest(left, layer)


WRITER = """
import json, pathlib, sys, time
assert sys.argv[1:3] == ["-m", "benchmarks"] and ("--join" in sys.argv) == (sys.argv[4] != "own")
if sys.argv[4] in ("none", "slow"):
    time.sleep(60 * (sys.argv[4] == "slow"))
    sys.exit()
file = pathlib.Path(sys.argv[sys.argv.index("--json") + 1])
assert (sys.argv[-2:] == ["--commit", "abc"]) == (file.name == "of.json")
file.write_text(json.dumps({"rows": [sys.argv[4]]}))
sys.exit(sys.argv[4] == "own")
"""


def test_each_table_has_its_file(tmp_path, monkeypatch, capsys):
    script, python = tmp_path / "writer.py", tmp_path / "python"
    script.write_text(WRITER)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(record.sys, "executable", str(python))
    names = {name: ("", f"x {name}") for name in ("one", "none", "slow")}
    monkeypatch.setattr(record, "COMMANDS", names | {"own": ("_own", "x own")})

    def run(*names, seconds=60):
        options = ["--chip", "h200", "--out", str(tmp_path), "--seconds", str(seconds)]
        return runner.run(["record", "--only", *names, *options]), capsys.readouterr().out

    assert run("one")[0] == 0
    assert json.loads((tmp_path / "h200.json").read_text()) == {"rows": ["one"]}
    assert record.record("one", tmp_path / "of.json", 60, "abc") == "done"
    status, said = run("one", "own")
    assert status == 1 and "=== one: done" in said and "=== own: exit status 1" in said
    assert json.loads((tmp_path / "h200_own.json").read_text()) == {"rows": ["own"]}
    for name, seconds, said in (
        ("none", 1e-9, "none: not begun"),
        ("none", 60, "none: done, nothing was written"),
        ("slow", 1.5, "slow: cut off, nothing was written"),
    ):
        status, out = run(name, seconds=seconds)
        assert status == 1 and said in out
    assert json.loads((tmp_path / "h200.json").read_text()) == {"rows": ["one"]}  # as it was


@pytest.mark.parametrize("name", record.COMMANDS)
def test_what_a_table_measures_is_a_command(name):
    assert record.command(name) == f"python -m benchmarks {record.COMMANDS[name][1]}"
    module, _, args = runner.parsed(shlex.split(record.COMMANDS[name][1]))
    asked = runner.listed(module, args)
    assert all(runner.wanted(args, case.case, case.way) for case in asked)


# ---- the model of products, and counters ---
def test_the_bound_of_products():
    """One by hand, and none above what a chip's matrix cores can do."""
    fp8 = FORMATS["mxfp8_e4m3"]
    matrix, shared = product_model.clocks("B200", fp8, product_model.Tile(128, 256))
    # 15,474 operations a clock and core; 384 bytes for an element of K, 128 a clock.
    assert (round(matrix, 3), shared) == (4.235, 3.0)
    dense = product_model.bound("B200", products.PRODUCTS[0], fp8)
    # 2048 tiles on 148 cores: 14 after each other, of 7168 elements.
    assert dense["us at least"] == pytest.approx(14 * 7168 * 4.2352 / 1965, abs=0.02)
    assert (dense["of"], dense["padding"]) == ("matrix cores", 0)
    # Both operands, 1001 x 250 and 16 x 250, and the result are copied.
    passes = product_model.padding(product_model.CORES["B200"], fp8, 1001, [16], 250)
    assert passes == 2 * (1001 * 250 + 16 * 250 + 2 * 1001 * 16)
    assert runner.run(["product_model"]) == 0


def test_counters_become_rows(monkeypatch):
    """The header has the units; a counter that a chip lacks stays empty."""
    names = ["gpu__time_duration.sum", "dram__throughput.avg.pct_of_peak_sustained_elapsed"]
    waits = [counters.STALL.format(stall) for stall in ("wait", "barrier", "sleeping")]
    told = [
        "==PROF== Connected",
        ",".join(f'"{name}"' for name in ("ID", "Kernel Name", *names, *waits)),
        '"","","ns","%","inst","inst","inst"',
        '"0","quantize_last","1,234,000","61.26","1.5","2.25","0"',
    ]
    done = subprocess.CompletedProcess([], 0, "\n".join(told), "")
    monkeypatch.setattr(counters.subprocess, "run", lambda *_, **__: done)
    names_of_cases = ["dense, fp8 1x256", "both"]
    with pytest.raises(RuntimeError, match="1 launches of 2 cases, should be one each"):
        counters.launched(names_of_cases)
    done.stderr = f"{counters.FAILED}{names_of_cases[0]}: no kernel"  # the other one is the launch
    units, launches = counters.launched(names_of_cases)
    (row,) = [counters.row_of(name, units, values) for name, values in launches.items()]
    assert row["case"] == "both"
    assert (row["us"], row["memory"], row["ALU"]) == (1234.0, 61.3, None)
    assert row["waits"] == {"barrier": 2.25, "wait": 1.5}
    assert counters.known("dram__throughput   Counter  %\n\n") == names[1:]
    done.returncode = 1
    with pytest.raises(RuntimeError, match="Connected"):
        counters.launched(names_of_cases)
