"""What stands in two places says the same in both. `python tests/test_habits.py` writes tables."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import jax
import pytest
from helpers import with_table

import jax_mx
from jax_mx.facts import toolchains, verified
from jax_mx.facts.chips import ARCHS
from jax_mx.facts.variants import VARIANTS, layouts_of

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAMES = {"cutedsl": "CuTeDSL", "flydsl": "FlyDSL"}
DSLS = [*NAMES]

in_checkout = pytest.mark.skipif(not README.exists(), reason="beside a wheel there is no README")


# ---- the README's tables of what has kernels -----------------------------------------------------
def chips_table() -> list[str]:
    """A row for each arch."""
    lines = ["| compiled for | runs on | from | its kernels were |", "|---|---|---|---|"]
    for dsl, archs in ARCHS.items():
        for arch, chips in archs.items():
            lines.append(f"| {arch} | {', '.join(chips.values())} | {NAMES[dsl]} | {state(arch)} |")
    return lines


def state(arch: str) -> str:
    """What verified/<arch>.json says of an arch's kernels."""
    runs = {run for entry in verified.read(arch).values() for run in entry["executed_on"]}
    devices = sorted({run.split(", ")[0] for run in runs} - {"emulated"})
    if devices:
        return f"compared bit for bit on {', '.join(devices)}"
    return "compared bit for bit in emulation" if runs else "compiled, not yet executed"


def kernels_table() -> list[str]:
    """A row for each op with the same forms and formats, and what is done before it rounds."""
    found: dict[tuple, dict[str, dict[str, None]]] = {}
    for v in VARIANTS:
        if v.implementation != "cutedsl":
            continue
        before = "".join(kind.suffix or "_rn" for kind in v.kinds)[1:].replace("_", " ")
        before = f"{before} rows".lstrip() if v.rows else before
        key = (v.op, "both" if v.form.is_both else "one", before, v.dtype)
        row = found.setdefault(key, {"forms": {}, "formats": {}})
        row["forms"][str(v.form)] = None
        row["formats"] |= {format.name: None for format in v.formats}
    merged: dict[tuple, list[str]] = {}
    for (op, _, before, dtype), row in found.items():
        merged.setdefault((op, before, *map(tuple, row.values())), []).append(dtype)
    grouped: dict[tuple, list[str]] = {}
    for (op, before, forms, formats), dtypes in merged.items():
        grouped.setdefault((op, forms, formats, tuple(dtypes)), []).append(before)
    lines = ["| op | forms | formats | floats | before |", "|---|---|---|---|---|"]
    for (op, forms, formats, dtypes), before in grouped.items():
        before = [each or "nothing" for each in before] if len(before) > 1 else before
        cells = (forms, formats, dtypes, before)
        lines.append(f"| {op} | {' | '.join(', '.join(cell) for cell in cells)} |")
    return lines


TABLES = {"chips": chips_table, "kernels": kernels_table}


def with_tables(text: str) -> str:
    """The README with its tables written anew."""
    for name, table in TABLES.items():
        text = with_table(text, name, table())
    return text


@in_checkout
def test_the_readme_says_what_has_kernels():
    text = README.read_text()
    assert text == with_tables(text), "run python tests/test_habits.py"


def test_both_dsls_have_the_same_kernels():
    """So the README's table of kernels names none of them; layouts differ as it says."""
    names = {dsl: {v.name for v in VARIANTS if v.implementation == dsl} for dsl in DSLS}
    both = {v.name for v in VARIANTS if v.window == 256 and v.form.is_both}  # beyond AMD's LDS
    assert names["cutedsl"] - both == names["flydsl"]
    for v in VARIANTS:
        more = v.implementation == "flydsl" or v.formats[0].name == "mxfp4_e2m1"
        tiled = ("blocked_128x4", "shuffled_32x8")[: 1 + more]
        assert layouts_of(v) == (("row_major",) if v.form.is_square else ("row_major", *tiled))


@in_checkout
def test_the_readme_has_the_speeds_that_were_measured():
    rows = json.loads((ROOT / "benchmarks/results/h200.json").read_text())
    where = {"shape": "8x7168x7168", "dtype": "bfloat16", "format": "mxfp8_e4m3"}
    where |= {"scaling": "rceil", "scale_layout": "row_major", "implementation": "cutedsl"}
    rows = {row["form"]: row for row in rows if where.items() <= row.items()}
    section = README.read_text().partition("## How fast")[2]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:2] == "| "]
    assert len(lines) > 5
    for form, us, tbs, fraction, speedup in lines[1:]:
        row = rows[form]
        assert (us, tbs) == (f"{row['us']:.0f}", f"{row['gbps'] / 1e3:.2f}"), form
        assert fraction == f"{row['fraction_of_copy']:.2f}", form
        assert speedup == f"{row['speedup_over_xla']:.2f}x", form


# ---- what documents run --------------------------------------------------------------------------
SMALL = {"7168, 7168": "256, 256"}  # of the README's arrays


@in_checkout
@pytest.mark.parametrize(
    "path", [README, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name
)
def test_python_in_documents_runs(path, tmp_path, monkeypatch):
    """Every block, in order, with the names of those before it."""
    monkeypatch.chdir(tmp_path)
    text, names = path.read_text(), {}
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks or path.name not in ("README.md", "products.md")
    for block in blocks:
        for large, small in SMALL.items():
            block = block.replace(large, small)
        with jax.numpy_dtype_promotion("standard"):  # as users have it
            exec(compile(block, path.name, "exec"), names)


@in_checkout
def test_the_example_trains():
    """As its first lines say, on eight devices; shorter."""
    example = ROOT / "examples" / "train_mlp.py"
    assert len(example.read_text().splitlines()) < 120
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(example), "--steps", "30"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    first, last, against = re.findall(r"mxfp8 +│ (\S+) +│ (\S+) +│ (\S+)%", done.stdout)[0]
    assert float(last) < float(first)
    assert abs(float(against)) < 1


# ---- versions ------------------------------------------------------------------------------------
@pytest.mark.parametrize("dsl", DSLS)
def test_extras_bring_the_compilers_that_the_library_wants(dsl):
    extra = PROJECT["project"]["optional-dependencies"][toolchains.EXTRAS[dsl]]
    names = [re.split("[=>;]", requirement)[0].strip() for requirement in extra]
    assert {*names} == {*toolchains.COMPILERS[dsl], *toolchains.READERS[dsl]}
    dev = PROJECT["dependency-groups"]["dev"]
    for distribution, version in toolchains.COMPILERS[dsl].items():
        pinned = f"{distribution}=={version}"
        for group in (extra, dev):
            assert pinned in {requirement.partition(";")[0].strip() for requirement in group}


def test_dev_brings_what_every_extra_brings():
    dev = {re.split("[=>;]", r)[0].strip() for r in PROJECT["dependency-groups"]["dev"]}
    for name, extra in PROJECT["project"]["optional-dependencies"].items():
        if name != "cuda13":
            assert {re.split("[=>;]", r)[0].strip() for r in extra} <= dev, name


def test_the_version_stands_in_one_place():
    try:
        assert jax_mx.__version__ == metadata.version("jax-mx") == PROJECT["project"]["version"]
    except metadata.PackageNotFoundError:
        assert jax_mx.__version__ == "0+unknown"


def test_types_are_shipped():
    assert Path(jax_mx.__file__).with_name("py.typed").exists()


# ---- files beside the package --------------------------------------------------------------------
@in_checkout
def test_the_lock_file_names_the_public_index_alone():
    urls = re.findall(r'(?:url|registry) = "([^"]*)"', (ROOT / "uv.lock").read_text())
    assert urls
    hosts = {url.split("/")[2] for url in urls}
    assert hosts == {"pypi.org", "files.pythonhosted.org"}


@in_checkout
def test_the_readme_begins_with_the_first_command_and_the_tests():
    """.ci/run takes them by their place."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert blocks[0].endswith("uv run --extra cli python -m jax_mx\n")
    assert blocks[1].endswith("uv run pytest -q\n")


@in_checkout
def test_the_license_is_there():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["project"]["license"] == "Apache-2.0"


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text()))
