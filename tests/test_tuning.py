"""The tables of tiles per arch; that sweeps write what they hold."""

import dataclasses
import functools
import importlib
import itertools
from pathlib import Path

import jax
import pytest

import jax_mx
from benchmarks import sweep
from jax_mx.formats.layouts import SCALE_LAYOUTS
from jax_mx.launch.chips import ARCHS, SHARED
from jax_mx.quantizing.facts import binary
from jax_mx.quantizing.facts.product_kernels import PRODUCTS, archs_of
from jax_mx.quantizing.facts.variants import layouts_of
from jax_mx.quantizing.kernels import tuning
from jax_mx.quantizing.kernels.cutedsl.tuning import sm_90a as TABLE
from jax_mx.quantizing.kernels.cutedsl.tuning.spills import SPILLS
from jax_mx.shipping.shipped import existing

RECORD = {"kernel", "where", "case", "shape", "value", "us", "chip", "date"}  # and a note
EXISTING = [*existing()]
EVERY = [*EXISTING, *PRODUCTS]
EACH_ARCH = [(dsl, arch) for dsl, archs in ARCHS.items() for arch in archs]


@pytest.mark.parametrize("dsl,arch", EACH_ARCH)
def test_rows_have_all_fields_and_known_facts(dsl, arch):
    table = importlib.import_module(f"jax_mx.quantizing.kernels.{dsl}.tuning.{arch}")
    known = tuning.facts_of(EXISTING[0]) | tuning.facts_of(PRODUCTS[0])
    for row in table.ROWS:
        assert row.keys() == {"kernel", "where", "value", "why"}
        assert row["where"].keys() <= known.keys()
        assert row["why"].endswith(".") and len(row["why"].split()) <= 25


def test_figures_are_of_rows_and_lie_beside_their_table():
    """A row that goes takes its figures with it; no table depends on them."""
    files = [*Path(tuning.__file__).parent.glob("*/tuning/*.jsonl")]
    assert sweep.figures("sm_90a") in files
    for path in files:
        table = importlib.import_module(f"jax_mx.quantizing.kernels.cutedsl.tuning.{path.stem}")
        rows = {sweep.key(row) for row in table.ROWS}
        records = sweep.read(path)
        for record in records:
            assert record.keys() - {"note"} == RECORD
            assert sweep.key(record) in rows, record
            assert record["us"] > 0 and (record["value"] is not None or record["note"])
        for arch in ARCHS["cutedsl"]:
            assert path not in {file for _, file in binary.files_of("cutedsl", arch)}


def test_every_row_of_hopper_is_some_entrys():
    """None stands behind one that takes its entries."""
    from jax_mx.quantizing.kernels.cutedsl.tuning.sm_90a import ROWS

    used = []
    for variant in EXISTING:
        if variant.implementation == "cutedsl":
            for layout, aligned in itertools.product(layouts_of(variant), (True, False)):
                facts = tuning.facts_of(variant, SCALE_LAYOUTS[layout], aligned)
                for kernel in {row["kernel"] for row in ROWS}:
                    if kernel.startswith(variant.op):
                        fits = [r for r in ROWS if r["kernel"] == kernel]
                        used += [r for r in fits if tuning.has(r["where"], facts)][:1]
    for product in PRODUCTS:
        facts = tuning.facts_of(product)
        for kernel in {row["kernel"] for row in ROWS}:
            if kernel.partition(".")[0] == product.op:
                fits = [r for r in ROWS if r["kernel"] == kernel]
                used += [r for r in fits if tuning.has(r["where"], facts)][:1]
    assert [row for row in ROWS if row not in used] == []


def test_an_arch_without_a_fitting_row_says_so(monkeypatch):
    from jax_mx.quantizing.kernels.cutedsl.tuning import sm_90a

    monkeypatch.setattr(sm_90a, "ROWS", [])
    (variant, *_) = (v for v in EXISTING if v.implementation == "cutedsl")
    with pytest.raises(LookupError, match=r"no row of quantize\.Flat for .*last"):
        tuning.choose("quantize.Flat", "sm_90a", variant, SCALE_LAYOUTS["row_major"])


def named(name):
    return next(v for v in EVERY if (v.name, v.implementation) == (name, "cutedsl"))


@pytest.mark.parametrize(
    "name",
    [
        "quantize_last_bfloat16_mxfp8_e4m3",
        "quantize_both_transposed_bfloat16_mxfp8_e4m3_mxfp8_e4m3_w128_w128",
        "quantize_last_bfloat16_mxfp8_e4m3_rms_norm",
        "quantize_last_bfloat16_mxfp8_e4m3_rows",
        "dequantize_last_bfloat16_mxfp8_e4m3",
        "matmul_mxfp8_e4m3_r256",
        "matmul_mxfp4_e2m1_r8",
        "matmul_fp8_mxfp8_e4m3_mxfp8_e4m3_r256_w128x128",
        "wgrad_fp8_mxfp8_e4m3_mxfp8_e4m3_r128_w128",
        "wgrad_bfloat16_r64",
    ],
)
def test_a_sweep_writes_rows_that_a_table_holds(name, tmp_path):
    pytest.importorskip("cutlass")
    variant = named(name)
    tiles = [*sweep.candidates(variant)][:3]
    names, (best, _) = [sweep._name(tile) for tile in tiles], sweep.chosen(variant, "sm_90a")
    timings = [
        sweep.Timing(3.0 - i, names[i], 1e3, 32, i != 2, best, dataclasses.asdict(tile))
        for i, tile in enumerate(tiles)
    ]
    row = sweep.row_of(variant, "row_major", timings)
    namespace = {}
    exec(sweep.table("a chip", [row]), namespace)
    assert namespace["ROWS"] == [row]
    facts = tuning.facts_of(variant, SCALE_LAYOUTS["row_major"], True)
    assert tuning.has(row["where"], facts)
    assert "x".join(map(str, row["value"].values())) == names[1]  # names[2] was wrong
    assert row["kernel"] in {r["kernel"] for r in TABLE.ROWS}
    calls = list(sweep.calls(variant, (64, 256), "row_major"))
    assert calls and {call.name for call in calls} <= {"64x256", *sweep.CASES}
    for call in calls:
        jax.eval_shape(call.function(), *call.like())
    path = tmp_path / "a.jsonl"
    for shape in ("8x64x64", "64x64"):
        sweep.add(path, sweep.records_of(row, variant, shape, timings))
    records = sweep.read(path)
    assert {sweep.key(record) for record in records} == {sweep.key(row)}
    assert [record["us"] for record in records] == [2, 3] * 2 and records[0].keys() == RECORD
    assert [record["shape"] for record in records[1:3]] == ["8x64x64", "64x64"]


def test_a_sweep_shows_what_was_measured():
    pytest.importorskip("cutlass")
    first, *lines = sweep.show("sm_90a", [named("quantize_last_bfloat16_mxfp8_e4m3")], "row_major")
    assert "quantize.Flat {'threads': 512, 'elements': 16, 'unroll': 1}. Tiles that" in first
    assert any(
        "285.7 us  8x7168x7168, bfloat16 to MXFP8: {'threads': 512" in line for line in lines
    )


def tiles_of(variant, arch):
    """For each entry of a quantizer (the kernel's row, its tile, layout, aligned)."""
    for layout, aligned in itertools.product(layouts_of(variant, arch), (True, False)):
        kernel, tile = sweep.chosen(variant, arch, layout, aligned)
        yield kernel, tile, SCALE_LAYOUTS[layout], aligned


@pytest.mark.parametrize("arch", ARCHS["cutedsl"])
def test_registers_hold_every_tile_of_a_table(arch):
    pytest.importorskip("cutlass")
    for variant in EXISTING:
        if variant.implementation == "cutedsl" and arch in archs_of(variant):
            for kernel, tile, *entry in tiles_of(variant, arch):
                assert tuning.fits(kernel, tile, arch, variant, *entry), (variant.name, *entry)
    for product in PRODUCTS:
        if arch in archs_of(product) and product.op not in ("amaxes", "rms_norm", "attention"):
            assert tuning.fits(*sweep.chosen(product, arch), arch, product), product.name


def test_a_sweep_leaves_out_tiles_that_spill():
    """In one entry of a binary is enough."""
    pytest.importorskip("cutlass")
    for row in SPILLS:
        for arch in row["archs"]:
            (variant, *_) = (v for v in EVERY if spills_in(v, arch, row))
            spilt = [r["tile"] for r in SPILLS if spills_in(variant, arch, r)]
            every = [*map(dataclasses.asdict, sweep.candidates(variant))]
            fit = [tile for tile in every if not any(tuning.has(some, tile) for some in spilt)]
            assert [*map(dataclasses.asdict, sweep.fitting(variant, arch))] == fit
            assert len(fit) < len(every) or row["kernel"] == "matmul.Few", row


@pytest.mark.thorough
@pytest.mark.parametrize("row", SPILLS, ids=lambda row: f"{row['kernel']} {row['archs'][0]}")
def test_what_is_said_to_spill_does(row):
    pytest.importorskip("cutlass")
    fields = {k: v[0] if isinstance(v, tuple) else v for k, v in row["tile"].items()}

    def spills(variant, arch) -> bool:
        first = type(next(sweep.candidates(variant)))
        tile = first(**{**sweep.chosen(variant, arch)[1], **fields})
        compiling = importlib.import_module(f"jax_mx.{variant.ROOM}.cutedsl.compile")
        _, facts = compiling.compile_variant(variant, arch, tile=tile)
        launches = facts["launches"].values()
        return any(entry["usage"]["stack"] for launch in launches for entry in launch["entries"])

    for arch in row["archs"]:
        assert any(spills(v, arch) for v in EVERY if spills_in(v, arch, row)), arch


def spills_in(variant, arch, row) -> bool:
    """Whether a row of `SPILLS` is of some entry of a binary."""
    its_op = variant.op == row["kernel"].partition(".")[0]
    if not its_op or arch not in row["archs"] or arch not in archs_of(variant):
        return False
    if sweep.chosen(variant, arch)[0] != row["kernel"]:
        return False
    layouts = layouts_of(variant, arch) if variant in EXISTING else ("row_major",)
    return any(
        tuning.has(row["where"], tuning.facts_of(variant, SCALE_LAYOUTS[layout], aligned))
        for layout, aligned in itertools.product(layouts, (True, False))
    )


def test_thread_blocks_fit_on_every_chip_of_an_arch():
    """Too large tiles are known; facts of the compiler alone are checked after it ran."""
    name = "quantize_both_transposed_bfloat16_mxfp8_e4m3_mxfp8_e4m3"
    by_name = {v.name: v for v in EXISTING if v.implementation == "cutedsl"}
    assert archs_of(by_name[f"{name}_w128_w128_swiglu_gradient"]) == (*ARCHS["cutedsl"],)
    assert "sm_80" not in archs_of(by_name[f"{name}_w256_w256"])
    assert archs_of(by_name[f"{name}_swiglu_gradient"]) == (*ARCHS["cutedsl"],)
    compiling = pytest.importorskip("jax_mx.launch.cutedsl")
    rule = {"symbol": "quantize_0", "usage": {"shared": 1024}, "shared": SHARED["sm_120f"]}
    compiling.check_shared(rule, "sm_120f")
    rule["usage"] = {"shared": 1025}
    compiling.check_shared(rule, "sm_90a")
    with pytest.raises(RuntimeError, match="wants 101377 bytes of shared memory, some chips"):
        compiling.check_shared(rule, "sm_120f")


def test_clusters_are_where_chips_have_them():
    """A launch of a cluster fails on others; rows of one arch's table serve other archs, too."""
    pytest.importorskip("cutlass")
    clustered = {
        (arch, v.window)
        for v in EXISTING
        if v.implementation == "cutedsl" and v.op == "quantize"
        for arch in archs_of(v)
        if sweep.chosen(v, arch)[1].get("below", 1) > 1
    }
    assert clustered == {(arch, 256) for arch in ("sm_90a", "sm_100f", "sm_120f")}


def test_what_has_no_tile_says_so():
    pytest.importorskip("cutlass")
    with pytest.raises(ValueError, match="amaxes_r128 has no tile to choose"):
        sweep.chosen(named("amaxes_r128"), "sm_90a")


def test_what_does_not_fit_says_so():
    supported = functools.partial(jax_mx.is_supported, "quantize_both", transpose=True)
    gradient = {"activation": "swiglu", "gradient": True}
    assert "floats that XLA makes" not in supported("sm_89", window=128, **gradient)[1]
    assert "floats that XLA makes" in supported("sm_89", window=256, **gradient)[1]
    assert supported("sm_86", window=128)[0]
    serves, why = supported("sm_86", window=256)
    assert not serves
    assert "w256_w256 for sm_86: its registers do not hold a tile; 'xla' serves it" in why
