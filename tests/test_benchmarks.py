"""The benchmarks' arithmetic, their baselines' bytes and the command line, at small sizes."""

import csv
import dataclasses
import datetime
import fnmatch
import functools
import itertools
import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits_equal, assert_same_array

import jax_mx
from benchmarks import __main__ as cli
from benchmarks import (
    baselines,
    guard,
    issue_model,
    moe,
    moe_sharded,
    moe_step,
    peers,
    plot,
    products,
    record,
    report,
    shapes,
    sweep,
    timing,
)
from benchmarks.report import Measured, Row
from docs import tables
from jax_mx.facts.chips import ARCHS
from jax_mx.facts.formats import BLOCK, FLOAT_DTYPES, FORMATS, SCALINGS
from jax_mx.facts.layouts import SCALE_LAYOUTS
from jax_mx.facts.variants import layouts_of
from jax_mx.kernels.shipped import SHIPPED
from jax_mx.ops.planning import Options, planned
from jax_mx.reference import rows_of

pytestmark = pytest.mark.any_device

KEYS = [
    *("op", "form", "shape", "dtype", "format", "scaling", "scale_layout"),
    *("us", "gbps", "copy_gbps", "fraction_of_copy", "speedup_over_xla", "commit"),
    *("implementation", "device"),
]
NUMBERS = KEYS[7:12]


# ---- shapes ---
def test_parse_takes_names_and_shapes_once_each():
    assert shapes.parse("required,2x64,65536x8192") == ((8, 7168, 7168), (65536, 8192), (2, 64))
    assert shapes.parse("small")[-1] == (1024, 7168)


@pytest.mark.parametrize("text", ["", "2x", "x2", "2 x 3", "tiny", "-1x32"])
def test_parse_names_what_it_does_not_know(text):
    with pytest.raises(ValueError, match="is neither AxBxC nor one of required, llm, small, odd"):
        shapes.parse(text)


@pytest.mark.parametrize("text", ["0x32", "32x0", "small,00"])
def test_parse_refuses_what_has_no_elements(text):
    with pytest.raises(ValueError, match="has no elements; there is nothing to measure"):
        shapes.parse(text)


def test_every_shape_has_blocks_of_some_form():
    for shape in itertools.chain.from_iterable(shapes.SHAPES.values()):
        assert any(form.fits(shape) for form in shapes.FORMS.values())
    fits = {name for name, form in shapes.FORMS.items() if form.fits((8, 4128, 2881))}
    assert fits == {"axis -2", "axis -2 transposed", "dequantize axis -2"}
    assert not shapes.FORMS["axis -2"].fits((64,))


def test_uneven_shapes_are_bound_by_memory():
    for shape in shapes.UNEVEN:
        assert math.prod(shape) * 2 > 3 * timing.L2_BYTES


# ---- forms ---
def test_forms_by_name():
    assert [*shapes.FORMS] == [
        *("axis -1", "axis -2", "axis -2 transposed", "square", "square transposed"),
        *("both", "both transposed"),
        *("dequantize", "dequantize axis -2", "dequantize transposed"),
    ]
    assert cli.OPS == ("quantize", "quantize_both", "dequantize")
    names = [shapes.form_of(f.op.removesuffix("_both"), f.kernel) for f in shapes.FORMS.values()]
    assert names == [*shapes.FORMS]
    assert shapes.form_of("dequantize", "both") is None


@pytest.mark.parametrize("name", shapes.FORMS)
def test_forms_are_those_of_kernels(name):
    form = shapes.FORMS[name]
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
    kernels = pytest.importorskip(f"jax_mx.kernels.cutedsl.{variant.op}")
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
    """What a profiler would have written of (name, start in us, duration in us)."""
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


def test_per_call_sums_a_calls_events_and_takes_the_median():
    calls = [[("reduce", 100 * i, 2), ("scale", 100 * i + 50, 3 + i)] for i in range(3)]
    shuffled = [*calls[2], *calls[0], *calls[1]]
    events = timing.events(profile(*shuffled))
    assert timing.per_call(events, 3) == timing.Timing(6.0, timing.DEVICE)


@pytest.mark.parametrize(
    "events",
    [
        [("a", 0, 2), ("a", 10, 2), ("b", 20, 2)],  # three events of two calls
        [("a", 0, 2), ("a", 10, 1), ("b", 20, 1), ("a", 30, 2)],  # not the same ones in each
    ],
)
def test_per_call_says_when_it_can_only_take_the_mean(events):
    assert timing.per_call(timing.events(profile(*events)), 2) == timing.Timing(3, "device mean")


@pytest.mark.parametrize("where", [{"plane": "/host:CPU"}, {"line": "XLA Ops"}])
def test_only_a_gpus_streams_count(where):
    events = timing.events(profile(("a", 0, 1), **where))
    assert not events
    with pytest.raises(ValueError, match="no event of a device"):
        timing.per_call(events, 1)


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
    with pytest.raises(RuntimeError, match="no profile of a device"):
        timing.device_us(jnp.copy, [(x,)], 5)

    def broken(*_):
        raise RuntimeError("no CUPTI")

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(timing, "profile", broken)
    with pytest.warns(UserWarning, match="no CUPTI"):
        assert timing.measure(jnp.copy, [(x,)], 5).clock == timing.WALL
    monkeypatch.setattr(timing, "profile", lambda *_: [timing.Event(i, 2e3, "a") for i in range(5)])
    assert timing.device_us(jnp.copy, [(x,)], 5) == 2


@pytest.mark.gpu
def test_a_gpu_is_profiled():
    words = functools.partial(baselines.words, size=2**28)
    inputs = timing.rotate(words, 2**28)
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


# ---- command line ---
def test_one_table_two_files(tmp_path, capsys):
    files = [tmp_path / "out.csv", tmp_path / "out.json"]
    status = cli.main(
        [
            *("quantize", "--shapes", "4x640,2x40,2x3x320", "--format", "mxfp8_e4m3", "mxfp4_e2m1"),
            *("--csv", str(files[0]), "--json", str(files[1]), "--repeats", "5"),
        ]
    )
    assert status == 0
    rows = json.loads(files[1].read_text())
    assert [list(row) for row in rows] == [KEYS] * 4  # 2x40 has no blocks, and is not missed
    assert [row["shape"] for row in rows] == ["4x640", "4x640", "2x3x320", "2x3x320"]
    assert all(row[key] > 0 for row in rows for key in NUMBERS)
    with files[0].open(newline="") as file:
        records = list(csv.DictReader(file))
    assert records == [{key: str(value) for key, value in row.items()} for row in rows]
    out = capsys.readouterr().out
    assert out.count("failed: quantize axis -1 2x40") == 2
    assert "axis -1 has length 40" in out
    for word in (jax.devices()[0].device_kind, jax.__version__, "speedup over xla"):
        assert word in out


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ([], ["axis -1"]),
        (["quantize_both"], ["both"]),
        (["--form", "all"], [*shapes.FORMS]),
        (["quantize_both", "--form", "all"], ["both", "both transposed"]),
        (["--form", "axis -2", "both", "--form", "axis -2"], ["axis -2", "both"]),
    ],
)
def test_which_forms_are_measured(options, want):
    assert cli.arguments(options).form == want


@pytest.mark.thorough
def test_picked_rows_are_rows(tmp_path):
    """What moves is counted once: the rows of x that the numbers name, and what comes of all."""
    file = tmp_path / "out.json"
    options = [
        "--source",
        "rows",
        "--form",
        "axis -1",
        "both transposed",
        "dequantize",
        "--repeats",
        "1",
    ]
    assert cli.main([*options, "--shapes", "64x64,2x64x64", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())
    assert [r["form"] for r in rows] == ["axis -1, rows", "both transposed, rows"]
    assert all(r["speedup_over_xla"] for r in rows)
    case = cli.Case("axis -1", (64, 64), *("bfloat16", "mxfp8_e4m3", "rceil", "row_major", None),
                    source="rows")  # fmt: skip
    x, picked = case.make(jax.random.key(0))
    assert x.shape == (60, 64) and sorted(np.asarray(picked)) == [-1] * 4 + [*range(60)]
    op, versions = case.functions()
    want = op((x, picked))
    assert_same_array(jax_mx.quantize(rows_of(x, picked)), want)
    for version in versions.values():
        pairs = zip(
            jax.tree.leaves(jax.eval_shape(version, (x, picked))),
            jax.tree.leaves(want),
            strict=True,
        )
        assert all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)


@pytest.mark.thorough
def test_preprocessing_is_rows(tmp_path):
    file = tmp_path / "out.json"
    options = ["--form", "axis -1", "square", "dequantize", "--format", "mxfp4_e2m1"]
    options += ["--preprocessing", *shapes.PREPROCESSING]
    assert cli.main([*options, "--shapes", "32x64", "--repeats", "1", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())
    named = shapes.PREPROCESSING.values()
    names = [name for name, kinds in shapes.PREPROCESSING.items() if len(kinds) == 1]
    rotated = [f"axis -1, {name}" for name in names]
    assert [row["form"] for row in rows] == ["axis -1", "square", "dequantize", *rotated]
    names = ("bfloat16", "mxfp4_e2m1", "rceil", "row_major", None)
    words = {"sr": (1, 2), "h16_sr": (1, 2), "sr_h16_sr": (None, 2)}
    for preprocessing, kinds in shapes.PREPROCESSING.items():
        for i, form in enumerate(("axis -1", "both")):
            if len(kinds) <= i + 1:
                case = cli.Case(form, (32, 64), *names, preprocessing)
                assert case.words == words.get(preprocessing, (0, 0))[i] * 4 * 64
                assert (len(kinds) == 0) == (not case.how)
    compiled = [v.kinds for v in SHIPPED if all(kind.window == BLOCK for kind in v.kinds)]
    assert {*map(frozenset, compiled)} == {*map(frozenset, named)}  # benchmarks.sweep has windows


@pytest.mark.thorough
def test_every_form_is_a_row(tmp_path, capsys):
    file = tmp_path / "out.json"
    options = ["--form", "all", "--scale-layout", "blocked_128x4"]
    assert (
        cli.main([*options, "--shapes", "32x64,32x64", "--repeats", "1", "--json", str(file)]) == 0
    )
    rows = json.loads(file.read_text())
    assert [(row["op"], row["form"], row["scale_layout"]) for row in rows] == [
        (form.op, name, "blocked_128x4") for name, form in shapes.FORMS.items() if not form.square
    ]
    names = ["square", "square transposed"]
    options = ["--form", *names, "--shapes", "32x64", "--repeats", "1", "--json", str(file)]
    assert cli.main(options) == 0
    assert [row["form"] for row in json.loads(file.read_text())] == names


def test_names_count_once_however_they_are_given():
    layouts = ["row_major", "blocked_128x4", "row_major", "--scale-layout", "blocked_128x4"]
    args = cli.arguments(["--scale-layout", *layouts, "--format", "mxfp8_e4m3", "mxfp8_e4m3"])
    assert args.scale_layout == ["row_major", "blocked_128x4"]
    assert args.format == ["mxfp8_e4m3"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--repeats", "0"], "argument --repeats: must be at least 1, got 0"),
        (["--repeats", "-3"], "argument --repeats: must be at least 1, got -3"),
        (["--shapes", "0x32"], "shape '0x32' has no elements"),
        (["--csv", "/nonexistent/x.csv"], "No such file or directory: '/nonexistent/x.csv'"),
        (["--json", "/"], "Is a directory: '/'"),
        (["--form", "axis -3"], "invalid choice: 'axis -3'"),
        (["quantize", "--form", "both"], "form 'both' is not one of quantize's: axis -1, "),
    ],
)
def test_bad_options_are_refused_before_anything_is_measured(
    monkeypatch, capsys, options, sentence
):
    monkeypatch.setattr(cli, "measure", None)
    with pytest.raises(SystemExit) as stop:
        cli.main(options)
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_named_implementation_that_cannot_serve_fails_its_row_alone(capsys):
    if jax.default_backend() != "cpu":
        pytest.skip("it can")
    assert cli.main(["--shapes", "4x64", "--implementation", "cutedsl"]) == 1
    assert "failed: quantize axis -1 4x64" in capsys.readouterr().out


def test_a_failing_baseline_costs_the_speedup_alone(monkeypatch, tmp_path, capsys):
    def fail(x):
        raise ValueError("out of [memory]")

    monkeypatch.setattr(baselines, "quantize", lambda *_, **__: {"fail": fail})
    file = tmp_path / "out.json"
    assert cli.main(["--shapes", "4x64", "--repeats", "5", "--json", str(file)]) == 0
    assert json.loads(file.read_text())[0]["speedup_over_xla"] is None
    assert "XLA's versions fail: ValueError: out of [memory]" in capsys.readouterr().out


def test_the_command_line_names_unknown_shapes(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--shapes", "tiny"])
    assert "shape 'tiny' is neither AxBxC nor one of" in capsys.readouterr().err


def measured(case, us, fraction, speedup, gbps=1.0):
    numbers = (us, gbps, 1.0, fraction, speedup)
    row = Row(*case.names.values(), *numbers, commit="", implementation="cutedsl", device="H200")
    return Measured(row, "device", "multiply", "x.copy()")


@pytest.mark.parametrize(
    ("fraction", "speedup", "want"),
    [(0.98, 2.5, 0), (0.9499, 2.5, 1), (0.98, 2.2999, 1), (0.98, None, 1)],
)
def test_require_is_the_exit_status(monkeypatch, capsys, fraction, speedup, want):
    def measure(case, repeats, commit):
        return measured(case, 300.0, fraction, speedup)

    monkeypatch.setattr(cli, "measure", measure)
    assert cli.main(["--require"]) == want
    assert cli.main([]) == 0
    assert cli.main(["--require", "--shapes", "4x64"]) == 1  # nothing that could be met
    assert cli.main(["--require", "--scaling", "floor", "rceil"]) == want
    out = capsys.readouterr().out
    if want == 0:
        line = "ok  axis -1 (8,7168,7168) bfloat16 -> mxfp8_e4m3 rceil row_major: 0.980 of copy "
        for fraction, speedup in ((0.95, 2.3), (0.97, 2.5)):
            wanted = f"(>= {fraction} wanted), 2.50x XLA (>= {speedup} wanted)"
            assert line + wanted in out
        line = "ok  axis -1 (65536,8192) bfloat16 -> mxfp8_e4m3 rceil row_major: 0.980 of copy "
        assert line + "(>= 0.97 wanted)\n" in out  # the speedup is wanted of one shape alone
    else:
        assert "no  axis -1 (65536,8192)" in out


def test_every_form_has_requirements_on_every_llm_shape(monkeypatch, capsys):
    def measure(case, repeats, commit):
        return measured(case, 300.0, 0.96, 3.0)

    monkeypatch.setattr(cli, "measure", measure)
    assert cli.main(["--require", "--form", "all", "--shapes", "llm"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "wanted" in line]
    assert len(lines) == 2 + 5 * 8
    verdicts = {form: set() for form in shapes.FORMS}
    for line in lines[2:]:
        verdicts[line[4:].partition(" (")[0]].add((line[:2], "x XLA" in line))
    assert verdicts == {
        "axis -1": {("no", True), ("no", False)},
        "axis -2": {("no", True), ("no", False)},
        "axis -2 transposed": {("no", True), ("ok", False)},
        "square": set(),
        "square transposed": set(),
        "both": {("ok", True), ("ok", False)},
        "both transposed": {("ok", True), ("ok", False)},
        "dequantize": {("no", False)},
        "dequantize axis -2": {("no", False)},
        "dequantize transposed": {("no", False)},
    }


@pytest.mark.parametrize(("gbps", "want"), [(0.981, 0), (0.979, 1)])
def test_blocked_scales_are_compared_with_row_major_ones(monkeypatch, capsys, gbps, want):
    def measure(case, repeats, commit):
        blocked = case.scale_layout == "blocked_128x4"
        return measured(case, 300.0, 1.0, 9.0, gbps if blocked else 1.0)

    monkeypatch.setattr(cli, "measure", measure)
    options = ["--require", "--form", "both", "--shapes", "65536x8192", "--scale-layout"]
    assert cli.main([*options, "row_major", "blocked_128x4"]) == want
    line = f"both (65536,8192) bfloat16 -> mxfp8_e4m3 rceil blocked_128x4: {gbps} of row_major"
    assert line in capsys.readouterr().out
    assert cli.main([*options, "blocked_128x4"]) == 1  # there is nothing to compare with
    assert "of row_major" not in capsys.readouterr().out


def test_uneven_and_small_shapes_have_requirements_of_their_own(monkeypatch, capsys):
    def measure(case, repeats, commit):
        return measured(case, 300.0, 0.8, 1.0)

    monkeypatch.setattr(cli, "measure", measure)
    assert cli.main(["--require", "--form", "all", "--shapes", "small,odd"]) == 0
    out = capsys.readouterr().out
    assert "failed" not in out and "no  " not in out
    line = "ok  axis -2 ({}) bfloat16 -> mxfp8_e4m3 rceil row_major: {}"
    assert line.format("8,4128,2881", "0.800 of copy (>= 0.8 wanted)\n") in out
    assert line.format("64,7168", "1.00x XLA (>= 1.0 wanted)\n") in out
    assert "axis -2 (16,7168)" not in out and "axis -1 (8,4128,2881)" not in out


def test_a_required_row_that_fails_is_not_met(monkeypatch, capsys):
    def measure(case, repeats, commit):
        if case.shape == (65536, 8192):
            raise MemoryError
        return measured(case, 300.0, 1.0, 3.0)

    monkeypatch.setattr(cli, "measure", measure)
    assert cli.main(["--require"]) == 1
    line = "no  axis -1 (65536,8192) bfloat16 -> mxfp8_e4m3 rceil row_major: not measured\n"
    assert line in capsys.readouterr().out


def test_rows_have_the_keys_that_readers_expect():
    assert [field.name for field in dataclasses.fields(Row)] == KEYS
    names = set(itertools.chain.from_iterable(want.where for want in shapes.REQUIREMENTS))
    assert names < set(KEYS)


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
def test_peers_are_further_rows(tmp_path, monkeypatch, capsys):
    stand_in(tmp_path, monkeypatch, PEER)
    file = tmp_path / "out.json"
    options = ["--peers", "--shapes", "64x128", "--repeats", "1", "--json", str(file)]
    assert cli.main([*options, "--form", "axis -1", "axis -2", "dequantize"]) == 0
    rows = json.loads(file.read_text())
    ours, theirs = rows[:3], rows[3:]
    assert [row["implementation"] for row in theirs] == [f"x 1.0 {name}" for name in peers.PEERS]
    for row in theirs:
        assert list(row) == KEYS
        assert (row["form"], row["scaling"], row["us"], row["gbps"]) == ("axis -1", "floor", 2, 2)
        assert row["copy_gbps"] == ours[0]["copy_gbps"]
        xla_us = ours[0]["us"] * ours[0]["speedup_over_xla"]
        assert row["speedup_over_xla"] == pytest.approx(xla_us / 2, abs=1e-3)
    assert "note: no row of to_mx, torch.compile, dequantize: no sm_42" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("import no_torch_here", "ModuleNotFoundError: No module named 'no_torch_here'"),
        ("import os; os.kill(os.getpid(), 9)", "exit status -9"),
        ("import time; time.sleep(60)", "not done after 1 seconds"),
    ],
)
def test_a_peer_that_fails_is_a_note(tmp_path, monkeypatch, capsys, program, sentence):
    stand_in(tmp_path, monkeypatch, program)
    monkeypatch.setattr(peers, "TIMEOUT", 1)
    monkeypatch.setattr(peers, "PEERS", {"Triton": peers.PEERS["Triton"]})
    assert cli.main(["--peers", "--shapes", "64x128", "--repeats", "1"]) == 0
    out = capsys.readouterr().out
    assert f"note: no row of Triton: {sentence}" in out and out.count("no row of") == 1


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


# ---- the plot ---
RESULTS = Path(issue_model.__file__).parent / "results" / "h200.json"


def test_the_plot_draws_what_was_committed(tmp_path):
    picture = tmp_path / "h200.png"
    plot.main([str(RESULTS), str(picture), "--date", "2026-11-20"])
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


def test_the_plot_shows_every_form_and_every_implementation():
    rows = [row for row in json.loads(RESULTS.read_text()) if row["implementation"] == "cutedsl"]
    row = next(row for row in rows if plot.WHERE.items() <= row.items())
    theirs = {**row, "implementation": "x 1.0 Triton", "scaling": "floor", "gbps": 3000.0}
    elsewhere = {**theirs, "implementation": "not here", "dtype": "float32"}
    found = plot.series([*rows, theirs, elsewhere])
    assert [*found] == ["jax_mx", "copy", "XLA", "x 1.0 Triton (floor)"]
    assert found["x 1.0 Triton (floor)"] == {row["form"]: 3.0}
    assert found["XLA"][row["form"]] == pytest.approx(row["gbps"] / row["speedup_over_xla"] / 1e3)
    figure = plot.draw([*rows, theirs], "H200", "a day")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [*found["jax_mx"]]
    assert "H200, a day" in axes.get_title("left")
    (legend,) = figure.legends
    texts = {text.get_text() for text in legend.get_texts()}
    assert texts == {"jax_mx", "copy, same bytes", "XLA", "x 1.0 Triton (floor)"}
    with pytest.raises(ValueError, match="no row has"):
        plot.draw([elsewhere], "H200", "a day")


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
    made = [{"case": case, "way": way, "tflops": n, "us": 1.0}
            for case in ("forward", "decode") for way, n in ways.items()]  # fmt: skip
    report.write_record(tmp_path / "h200_moe.json", "python -m benchmarks.moe", made)
    held = json.loads((tmp_path / "h200_moe.json").read_text())
    assert held["command"] == "python -m benchmarks.moe" and held["device"] and held["date"]
    _, layer = plot.overview_bars()
    assert layer == {
        "jax_mx.moe, mxfp8, tiles": {"forward": 900},
        "bf16 Pallas": {"forward": 600},
        "bf16 lax.ragged_dot": {"forward": 90},
    }
    titles = [axes.get_title("left").strip() for axes in plot.overview(left, layer).axes]
    assert titles[1] == "An MoE layer, TF/s"
    assert plot.digest(left, right) != plot.digest(left, layer)


def test_a_commit_has_a_date():
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", plot.date_of("HEAD"))
    assert plot.date_of("no such commit") == str(datetime.date.today())


# ---- products ---
def test_rows_of_products_say_where_and_when_and_stay_until_measured_again(tmp_path, monkeypatch):
    cases = [products.Case(name, 64, 64, 32) for name in ("first", "second")]
    monkeypatch.setattr(products, "CASES", cases)
    monkeypatch.setattr(products, "REST", 0)
    monkeypatch.setattr(timing, "measure", lambda *_: us)
    path, us = tmp_path / "out.json", timing.Timing(5.0, timing.WALL)
    products.main(["--only", "bf16", "--json", str(path), "--commit", "abc"])
    us = timing.Timing(4.0, timing.WALL)
    products.main(["--only", "bf16", "--case", "second", "--json", str(path), "--commit", "def"])
    held = json.loads(path.read_text())
    assert held["commit"] == "abc, def" and [row["case"] for row in held["rows"]] == [
        "first",
        "second",
    ]
    assert [(row["us"], row["commit"]) for row in held["rows"]] == [(5.0, "abc"), (4.0, "def")]
    assert all(row["device"] and row["date"] for row in held["rows"])
    failed = [{"case": "first", "implementation": "bf16 dot", "error": "no memory"}]
    assert products.merged(held["rows"], failed) == held["rows"]


PRODUCTS_PEER = """
(case,) = cases
dense = {"shape": [256, 128], "rows": 128, "k": 128, "dtype": "bfloat16"}
groups = {"shape": [2, 256, 128], "rows": 512, "k": 128, "dtype": "bfloat16", "sizes": [159, 353]}
wgrad = {"shape": [512, 256], "rows": 512, "k": 128, "dtype": "bfloat16", "sizes": [256, 256]}
assert case in ((groups, wgrad) if "grouped" in name else (dense,)), case
answer = {"us": 2.0, "clock": "device", "bytes": 4000, "scaling": "", "library": "torch 1.0"}
print(json.dumps([0, answer if name.endswith("128x128") else {"error": "no sm_42"}]))
"""


def test_products_of_peers_are_further_rows(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, PRODUCTS_PEER)
    cases = [products.Case("many", 128, 128, 256), products.Case("few", 64, 128, 256)]
    cases += [products.Case(n, 512, 128, 256, 2, wgrad=n == "wgrad") for n in ("groups", "wgrad")]
    monkeypatch.setattr(products, "CASES", cases)
    path = tmp_path / "out.json"
    for only in ("cuBLASLt", "torch._grouped_mm"):
        products.main(["--only", only, "--peers", "--json", str(path)])
    tiles, other, *groups = json.loads(path.read_text())["rows"]
    assert (tiles["us"], tiles["tflops"], tiles["library"]) == (2.0, 4.2, "torch 1.0")
    assert tiles["weights_tbs"] == round(256 * 128 / 2e6, 3)
    assert [row["implementation"] for row in (tiles, other, groups[0])] == [*peers.PRODUCTS]
    assert other["error"] == "no sm_42" and {row["case"] for row in (tiles, other)} == {"many"}
    assert [row["case"] for row in groups] == ["groups", "wgrad"]


# ---- on several devices ---
@pytest.mark.thorough
def test_a_training_step_on_several_devices(tmp_path):
    path = tmp_path / "steps.json"
    options = ["--small", "--steps", "2", "--ways", "mxfp8", "--devices", "1", "4"]
    with jax.numpy_dtype_promotion("standard"):  # which flax wants
        moe_step.main([*options, "--json", str(path)])
    one, four = json.loads(path.read_text())["rows"]
    assert (one["devices"], four["devices"]) == (1, 4)
    for row in (one, four):
        tokens = row["devices"] * row["rows"] * row["length"]
        assert row["tokens_s"] == pytest.approx(1e3 * tokens / row["ms"], rel=1e-3)
        assert row["losses"][1] < row["losses"][0] < 8


@pytest.mark.thorough
def test_a_layer_of_experts_on_several_devices(tmp_path, monkeypatch):
    path = tmp_path / "layers.json"
    sizes = ["--tokens", "32", "--width", "64", "--inner", "64", "--calls", "1", "--data", "2"]
    monkeypatch.setattr("sys.argv", ["moe_sharded", *sizes, "--json", str(path)])
    moe_sharded.main()
    rows = json.loads(path.read_text())["rows"]
    assert {row["what"] for row in rows} == {"dispatch", *moe_sharded.RECIPES}
    assert {(row["devices"], row["data"]) for row in rows} == {(8, 2)}
    ways = {row["moves"]: "us" in row for row in rows if row["what"] == "dispatch"}
    assert ways == {"floats": True, "mx": True, "mx, all-to-all": True}


def test_which_tokens_an_all_to_all_sends():
    """Each shard gets the codes of the tokens that want its experts, and zeros for others."""
    rng = np.random.default_rng(0)
    experts = rng.integers(-1, 8, (4 * 6, 2)).astype(np.int32)
    wants = np.array([[shard in each // 2 for each in experts] for shard in range(4)])
    assert np.array_equal(moe_sharded.wanted(jnp.asarray(experts), 4, 2), wants)
    x = jnp.asarray(rng.normal(size=(4 * 6, 64)), jnp.bfloat16)
    devices = jax.devices("cpu")[:4]
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 4), ("data", "d"), axis_types=kinds, devices=devices)
    with jax.set_mesh(mesh):
        got = moe_sharded.dispatches(mesh, 2)["mx, all-to-all"](x, jnp.asarray(experts))
    want = jnp.where(wants[:, :, None], x, 0).reshape(-1, 64)  # of each shard all tokens
    assert_same_array(got, jax.jit(jax_mx.quantize)(want))


def test_routing_is_rows():
    case = dataclasses.replace(moe.ROUTING, tokens=64)
    rows = [*moe.measure_routing(case=case)]
    assert [row["way"] for row in rows] == [*moe.SORTS]
    assert all(row["us"] > 0 and row["tokens"] == 64 for row in rows)
    drawn = tables._routing([*rows, {"case": "forward"}])
    assert len(drawn) == len(rows) + 3 and drawn[2].startswith("| 512, 8, 64 | jnp.argsort")
    assert not tables._routing([{"case": "forward"}])


# ---- all tables ---
WRITER = """
import json, pathlib, sys, time
if sys.argv[3] in ("none", "slow"):
    pathlib.Path(sys.argv[-1]).write_text("")  # as a command that has measured nothing yet
    time.sleep(60 * (sys.argv[3] == "slow"))
    sys.exit()
row = {"op": "quantize", "form": sys.argv[3], "shape": "64x128", "dtype": "bfloat16", "us": 1}
row |= {"format": "mxfp8_e4m3", "scaling": "rceil", "scale_layout": "row_major"}
pathlib.Path(sys.argv[-1]).write_text(json.dumps([row | {"implementation": "cutedsl"}]))
sys.exit(sys.argv[3] == "bad")
"""


def test_each_table_has_its_file(tmp_path, monkeypatch, capsys):
    script, python = tmp_path / "writer.py", tmp_path / "python"
    script.write_text(WRITER)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(record.sys, "executable", str(python))
    names = {"one": ("", "x one"), "two": ("", "x two"), "own": ("_own", "x bad")}
    names |= {"none": ("", "x none"), "slow": ("", "x slow")}
    monkeypatch.setattr(record, "COMMANDS", names)
    out = ["--chip", "h200", "--out", str(tmp_path)]
    (tmp_path / "h200.json").write_text('{"rows": []}')  # another table's, once
    assert record.main(["--only", "one", "two", *out]) == 0
    assert record.main(["--only", "two", "own", *out]) == 1
    held = json.loads((tmp_path / "h200.json").read_text())
    assert [row["form"] for row in held] == ["one", "two"]  # measured again, and not twice there
    assert [row["form"] for row in json.loads((tmp_path / "h200_own.json").read_text())] == ["bad"]
    said = capsys.readouterr().out
    assert "=== two: done" in said and "=== own: exit status 1" in said
    assert record.main(["--only", "none", "--seconds", "1e-9", *out]) == 1
    assert "none: not begun" in capsys.readouterr().out
    assert record.main(["--only", "none", *out]) == 1
    assert "none: done, nothing was written" in capsys.readouterr().out
    assert record.main(["--only", "slow", "none", "--seconds", "1.5", *out]) == 1
    assert "slow: cut off, nothing was written" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "h200.json").read_text())) == 2  # all is as it was


def test_what_a_table_measures_is_a_command():
    for name, (_, words) in record.COMMANDS.items():
        module = shlex.split(words)[0]
        assert (record.RESULTS.parent / f"{module.partition('.')[2] or '__main__'}.py").exists()
        assert record.command(name) == f"python -m {words}"


# ---- the issue model ---
def test_the_ratio_is_issued_over_needed():
    chip = issue_model.Chip("sm_100f", cores=100, ghz=2.0, tb_per_s=8.0)
    # 25.6e12 lanes' instructions a second; 2e12 elements of 4 bytes; 12.8 instructions each.
    assert chip.ratio(4.0, 12.8) == pytest.approx(1.0)
    assert chip.ratio(4.0, 6.4) == pytest.approx(2.0)
    assert chip.ratio(8.0, 12.8) == pytest.approx(2.0)


def test_bytes_are_those_that_timing_counts():
    for variant in SHIPPED:
        form = shapes.FORMS.get(shapes.form_of(variant.op, variant.form) or "")
        if form is None:
            continue
        x = jax.ShapeDtypeStruct((128, 256), FLOAT_DTYPES[variant.dtype])
        options = {**form.options, "format": variant.formats[0]}
        if form.op == "quantize_both":
            options = {**form.options, "formats": variant.formats}
        elif form.op == "dequantize":  # moves what quantizing moves
            options = {**form.made_by, "format": variant.formats[0]}
        op = jax_mx.quantize_both if form.op == "quantize_both" else jax_mx.quantize
        size = timing.nbytes((x, jax.eval_shape(functools.partial(op, **options), x)))
        size += sum(kind.stochastic for kind in variant.kinds) * 4 * x.size // BLOCK
        assert issue_model.bytes_per_element(variant) == size / x.size


def test_every_binary_is_bounded_on_every_chip_that_runs_it():
    manifest = issue_model.manifest()
    if not manifest:
        pytest.skip("this installation brings no binaries (JAX_MX_ARCHS)")
    found = list(issue_model.bounds(manifest))
    assert [(bound.variant, bound.chip) for bound in found] == [
        (variant, name)
        for variant in SHIPPED
        for name, chip in issue_model.CHIPS.items()
        if chip.arch in ARCHS[variant.implementation] and f"{variant.name}.{chip.arch}" in manifest
    ]
    assert found
    for bound in found:
        assert len(bound.ratios) == len(bound.registers) == len(layouts_of(bound.variant))
        assert all(0 < ratio < math.inf for ratio in bound.ratios)


@pytest.mark.parametrize(
    ("counts", "reasons", "want"),
    [
        ({"shortest": 16, "longest": 32, "loops": False}, {}, 0),
        ({"shortest": 16, "longest": 3200, "loops": False}, {}, 1),
        ({"shortest": 16, "longest": 3200, "loops": False}, {"*_last_*": "for [no] reason"}, 0),
        (None, {}, 1),
    ],
)
def test_a_slow_variant_wants_a_reason(monkeypatch, capsys, counts, reasons, want):
    variant = SHIPPED[0]
    fast = {"shortest": 16, "longest": 16, "loops": False}
    usages = (
        {"instructions": c, "registers": 9, "elements_per_thread": 16} for c in (fast, counts)
    )
    launches = {str(i): {"entries": [{"usage": usage}]} for i, usage in enumerate(usages)}
    facts = {"launches": launches}
    binaries = {f"{variant.name}.{arch}": facts for arch in ("sm_90a", "sm_100f")}
    monkeypatch.setattr(issue_model, "manifest", lambda: binaries)
    monkeypatch.setattr(issue_model, "REASONS", {variant.implementation: reasons})
    assert issue_model.main(["--only", variant.name]) == want
    out = capsys.readouterr().out
    assert f"{want} of 1 below 1.3 on a B200 without a reason" in out
    assert ("for [no] reason" in " ".join(out.split())) == bool(reasons)
    assert issue_model.main(["--only", "nothing has this name"]) == 1


def test_reasons_are_for_variants_that_want_one():
    if len(issue_model.manifest()) < sum(len(ARCHS[v.implementation]) for v in SHIPPED):
        pytest.skip("this installation holds not all binaries (JAX_MX_ARCHS)")
    found = [b for b in issue_model.bounds(issue_model.manifest()) if b.is_judged and b.is_below]
    for implementation, patterns in issue_model.REASONS.items():
        below = {b.variant.name for b in found if b.variant.implementation == implementation}
        for pattern in patterns:
            assert fnmatch.filter(below, pattern), pattern


# ---- the guard of speed ---
def earlier_row(**changes):
    names = ("quantize", "axis -1", "64x128", "bfloat16", "mxfp8_e4m3", "rceil", "row_major")
    numbers = {"us": 100.0, "gbps": 4000.0, "copy_gbps": 4000.0, "fraction_of_copy": 1.0}
    rest = {"speedup_over_xla": 2.0, "commit": "abc", "implementation": "cutedsl"}
    rest["device"] = "NVIDIA H200"
    return {**dict(zip(KEYS, names, strict=False)), **numbers, **rest, **changes}


def test_the_guard_names_what_is_slower():
    earlier = [earlier_row(), earlier_row(form="both"), earlier_row(implementation="torchao x")]
    ok, lines = guard.verdict([earlier_row(us=99, commit="def")], earlier, 0.01)
    assert ok and lines == ["0 of 1 rows are slower by more than 1.0%"]
    slow = earlier_row(form="both", us=103.0, fraction_of_copy=0.97)
    new = earlier_row(form="square")
    ok, lines = guard.verdict([earlier_row(), slow, new], earlier, 0.01)
    assert not ok
    assert lines == [
        "slower: quantize both 64x128 bfloat16 mxfp8_e4m3 rceil row_major: 100.0 -> 103.0 us, "
        "1.000 -> 0.970 of a copy (-3.0%)",
        "1 of 2 rows are slower by more than 1.0%",
        "1 rows have no earlier ones to compare with",
    ]
    assert guard.verdict([slow], earlier, 0.05)[0]
    assert not guard.verdict([new], earlier, 0.01)[0]  # nothing was guarded
    assert not guard.verdict([earlier_row(device="NVIDIA H100")], earlier, 0.01)[0]


def test_the_guard_compares_files(tmp_path, capsys):
    new, old = tmp_path / "new.json", Path(guard.__file__).parent / "results" / "h200.json"
    new.write_text(old.read_text())
    assert guard.main([str(new), str(old)]) == 0
    rows = json.loads(old.read_text())
    ours = [row for row in rows if row["implementation"] == "cutedsl"]
    ours[0]["fraction_of_copy"] *= 0.98
    new.write_text(json.dumps(ours))
    assert guard.main([str(new), str(old)]) == 1
    assert "1 of " in capsys.readouterr().out
    assert guard.main([str(new), str(old), "--share", "0.03"]) == 0
    with pytest.raises(SystemExit):
        guard.main([str(new), str(old), "--share", "2"])


def test_a_run_is_guarded(tmp_path, capsys):
    command = ["--form", "axis -1", "--shapes", "64x128", "--repeats", "2"]
    path = tmp_path / "earlier.json"
    for fraction, status in ((1e-6, 0), (1e6, 1)):
        here = {"implementation": "xla", "device": jax.devices()[0].device_kind}
        row = earlier_row(fraction_of_copy=fraction, **here)
        path.write_text(json.dumps([row]))
        assert cli.main([*command, "--against", str(path)]) == status
        assert "of 1 rows are slower" in capsys.readouterr().out


# ---- over several devices ---
@pytest.mark.skipif(len(jax.devices()) != 8, reason="simulated devices, of a machine without GPUs")
def test_sharded_says_what_the_slowest_device_takes(capsys, monkeypatch):
    command = ["--form", "axis -1", "--shapes", "64x128", "--sharded", "--repeats", "2"]
    assert cli.main(command) == 0
    assert "us on the slowest of 8 devices, " in capsys.readouterr().out
    monkeypatch.setattr(jax, "devices", lambda *_: ["the only one"])
    assert cli.main([*command, "--require"]) == 1
    assert "--sharded: there is one device, the only one" in capsys.readouterr().out


def test_events_of_one_device():
    data = profile(("a", 0, 1), plane="/device:GPU:1")
    assert timing.events(data, "/device:GPU:1") == timing.events(data) != []
    assert timing.events(data, "/device:GPU:0") == []


def test_counters_become_rows(monkeypatch):
    """Units are those of the header; what a chip does not count stays empty."""
    from benchmarks import counters

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
