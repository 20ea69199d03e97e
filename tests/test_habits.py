"""What stands in two places says the same in both; documents and examples do what they say."""

import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import jax
import pytest

import jax_mx
from jax_mx.facts import toolchains
from jax_mx.facts.chips import ARCHS
from jax_mx.facts.variants import VARIANTS, layouts_of

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DSLS = ["cutedsl", "flydsl"]


# ---- what examples print ---
def trains(out: str) -> None:
    """MXFP8 learns, and ends where bfloat16 does."""
    first, last, against = re.findall(r"mxfp8 +│ (\S+) +│ (\S+) +│ (\S+)%", out)[0]
    assert float(last) < float(first)
    assert abs(float(against)) < 1


def quantizes(out: str) -> None:
    """Each tensor has a row; MXFP8 takes half the bytes, and what is kept is kept."""
    assert re.search(r"1\.mlp\.down +│ 512 x 2048 +│ 2,097,152 +│ 1,081,344 +│ 3\d\.\d", out)
    assert re.search(r"0\.norm .* kept by name", out)
    assert "holds 8 MXArrays" in out


def exports(out: str) -> None:
    """With kernels inside, and to the same bytes."""
    size = int(re.findall(r"exported for cpu, cuda: ([\d,]+) bytes", out)[0].replace(",", ""))
    assert size > 30_000
    assert "quantized to the same bytes" in out


# By name: arguments that make it short, and what its output must show.
EXAMPLES: dict[str, tuple[list[str], Callable[[str], None]]] = {
    "export_and_run": ([], exports),
    "quantize_safetensors": ([], quantizes),
    "train_mlp": (["--steps", "30"], trains),
}

in_checkout = pytest.mark.skipif(not README.exists(), reason="beside a wheel there is no README")


# ---- the README ----------------------------------------------------------------------------------
@in_checkout
def test_the_readme_says_what_runs_where():
    from docs import tables

    text = README.read_text()
    assert text == tables.written(text), "run python -m docs.tables"
    assert all(f"| {arch} |" in text for archs in ARCHS.values() for arch in archs)


@in_checkout
def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 120


@in_checkout
def test_the_readmes_picture_draws_the_rows_that_are_here():
    from PIL import Image

    from benchmarks import plot

    with Image.open(plot.OVERVIEW) as picture:
        drawn = picture.info["Rows"]
    assert drawn == plot.digest(*plot.overview_bars()), "run python -m benchmarks.plot"


def test_both_dsls_have_the_same_kernels():
    """So the documents' table of kernels names none of them; layouts differ as they say."""
    names = {dsl: {v.name for v in VARIANTS if v.implementation == dsl} for dsl in DSLS}
    both = {v.name for v in VARIANTS if v.window == 256 and v.form.is_both}  # beyond AMD's LDS
    assert names["cutedsl"] - both == names["flydsl"]
    for v in VARIANTS:
        more = v.implementation == "flydsl" or v.formats[0].name == "mxfp4_e2m1"
        tiled = ("blocked_128x4", "shuffled_32x8")[: 1 + more]
        assert layouts_of(v) == (("row_major",) if v.form.is_square else ("row_major", *tiled))


# ---- what documents run --------------------------------------------------------------------------
PAGES = sorted(path for path in ROOT.glob("docs/*.md"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *PAGES]
SMALL = {"7168, 7168": "256, 256", "7168, 4096": "256, 128"}  # of the README's arrays
# Blocks that are not Python: commands, and what they print.
FENCES = {"python", "", "sh", "{include}", "{image}", "{figure}", "{toctree}", "{glossary}"}


@in_checkout
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_python_in_documents_runs(path, tmp_path, monkeypatch):
    """Every block, in order, with the names of those before it."""
    monkeypatch.chdir(tmp_path)
    text, names = path.read_text(), {}
    opened = re.findall(r"^ *(?:```|:::)([^\s`]*).*$", text, re.MULTILINE)[::2]
    assert {*opened} <= FENCES | {"{eval-rst}"}, "Python stands in blocks called python"
    for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for large, small in SMALL.items():
            block = block.replace(large, small)
        with jax.numpy_dtype_promotion("standard"):  # as users have it
            exec(compile(block, path.name, "exec"), names)


@in_checkout
def test_pages_that_show_calls_have_python():
    """A page without a block is not run; these have some."""
    calls = {"quickstart", "training", "serving", "sharding", "formats", "choosing", "migrating"}
    assert all("```python" in (ROOT / f"docs/{name}.md").read_text() for name in calls | {"amd"})


@in_checkout
def test_the_reference_has_every_public_name():
    text = (ROOT / "docs/api.md").read_text()
    known = {*re.findall(r"auto(?:function|class):: (\w+)", text), *re.findall(r"`(\w+)`", text)}
    known |= {*re.findall(r"`jax_mx\.(\w+)`", text)}
    public = {name for name, value in vars(jax_mx).items() if not inspect.ismodule(value)}
    assert {name for name in public if name[0] != "_"} - known == set()


# ---- examples ---
@in_checkout
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name, tmp_path):
    """As their first lines say, on eight devices; shorter."""
    example = ROOT / "examples" / f"{name}.py"
    assert len(example.read_text().splitlines()) < 120
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(example), *EXAMPLES[name][0]]
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
    EXAMPLES[name][1](done.stdout)


@in_checkout
def test_every_example_is_run():
    """Notebooks when the site is built."""
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*EXAMPLES}


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
def test_the_changelog_is_kept():
    """Its headings are those of Keep a Changelog; releases have their day, none after pyproject's version."""
    text = (ROOT / "CHANGELOG.md").read_text()
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert heads[0] == "[Unreleased]"
    dated = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d", head) for head in heads[1:]]
    assert all(dated)
    versions = [found[1] for found in dated if found] + [PROJECT["project"]["version"]]
    assert max(versions, key=lambda v: [*map(int, v.split("."))]) == versions[-1]
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert {*re.findall(r"^### (.*)$", text, re.MULTILINE)} <= kinds


@in_checkout
def test_workflows_take_actions_by_their_hash():
    """A tag can be moved; and every build comes from what the kernels' job compiled."""
    text = (ROOT / ".github/workflows/release.yml").read_text()
    used = re.findall(r"uses: (\S+)", text)
    assert used and all(re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", name) for name in used)


@in_checkout
def test_the_license_is_there():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["project"]["license"] == "Apache-2.0"
