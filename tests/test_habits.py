"""Facts in two places agree; documents and examples do what they say."""

import ast
import contextlib
import dataclasses
import functools
import graphlib
import inspect
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from helpers import lowered_apart, on_eight
from jax.interpreters import mlir
from jaxlib.mlir import ir

import jax_mx
from jax_mx.formats.windows import ROW, SQUARE
from jax_mx.launch import toolchains
from jax_mx.launch.chips import ARCHS
from jax_mx.products import implementations, kernels
from jax_mx.products.kernel_plans import ROWS
from jax_mx.quantizing.facts import amd
from jax_mx.quantizing.facts.product_kernels import archs_of
from jax_mx.quantizing.facts.variants import layouts_of
from jax_mx.quantizing.sources.gated_gradient import GradientSource
from jax_mx.shipping.shipped import existing

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DSLS = ["cutedsl", "flydsl"]
EVERY = [*existing()]


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


def serves(out: str) -> None:
    """A quarter of bfloat16's bytes and the scales; near float64."""
    held, floats = (int(n.replace(",", "")) for n in re.findall(r"│ ([\d,]+) bytes", out))
    assert held / floats == 4.25 / 16
    assert float(re.findall(r"│ (\S+) of the largest", out)[0]) < 0.015


def gathers(out: str) -> None:
    """Codes where floats moved, to the same loss."""
    floats, codes = re.findall(r"(?:floats|codes) gathered +│ (\S+) +│", out)
    assert float(floats) == pytest.approx(float(codes), rel=1e-3)
    sizes = re.findall(r"all-gather (\w+): ([\d,]+)", out)
    assert [dtype for dtype, _ in sizes] == ["f32", "u8"]
    before, after = (int(size.replace(",", "")) for _, size in sizes)
    assert after == pytest.approx(before / 4, rel=0.01)


# By name: arguments that make it short, and what its output must show.
def trains_experts(out: str) -> None:
    first, last = re.findall(r"mxfp8: loss ([\d.]+), of the last 20 ([\d.]+)", out)[0]
    assert float(last) < float(first)


def adapts(out: str) -> None:
    """The adapters learn, over a base that stays what it is."""
    first, last = map(float, re.findall(r"new task: loss ([\d.]+) -> ([\d.]+)", out)[0])
    assert last < first / 2
    assert "codes and scales are the same bytes" in out


def agrees_with_xla(out: str) -> None:
    assert all(float(error) < 1e-6 for error in re.findall(r": (\S+) from XLA's", out))
    assert len(out.splitlines()) == 3


def writes_a_llama(out: str) -> None:
    assert re.search(r"3 files in llama, 0\.\d+ GB", out)


def generates(out: str) -> None:
    (text,) = re.findall(r"ms a token, prompt included; (\[.*\])", out)
    tokens = json.loads(text)
    assert len(tokens) == 16 and len({*tokens}) > 2 and all(0 <= t < 256 for t in tokens)


EXAMPLES: dict[str, tuple[list[str], Callable[[str], None]]] = {
    "export_and_run": ([], exports),
    "fsdp": (["--steps", "5"], gathers),
    "gpt_oss": ([], serves),
    "lora": (["--steps", "60"], adapts),
    "quantize_safetensors": ([], quantizes),
    "random_llama": (["llama"], writes_a_llama),
    "row_softmax": ([], agrees_with_xla),
    "serve": ([], generates),
    "train_mlp": (["--steps", "30"], trains),
    "train_moe": (["--steps", "4", "--recipes", "mxfp8"], trains_experts),
}

in_checkout = pytest.mark.skipif(not README.exists(), reason="beside a wheel there is no README")


# XLA compiles their programs quickly, as conftest.py says; of several devices it may not.
ON_ONE_DEVICE = (
    "export_and_run gpt_oss lora quantize_safetensors random_llama row_softmax serve".split()
)


# ---- the README ----------------------------------------------------------------------------------
@in_checkout
def test_the_readme_says_what_runs_where():
    from docs import tables

    for page in tables.PAGES:
        text = page.read_text()
        assert text == tables.written(text), f"{page.name}: run python -m docs.tables"
    text = README.read_text()
    assert all(f"| {arch} |" in text for archs in ARCHS.values() for arch in archs)


@in_checkout
def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 100


@in_checkout
def test_the_readmes_picture_draws_the_rows_that_are_here():
    from PIL import Image

    from benchmarks import plot

    with Image.open(plot.OVERVIEW) as picture:
        drawn = picture.info["Rows"]
    assert drawn == plot.digest(*plot.overview_bars()), "run python -m benchmarks plot"


def test_amd_lacks_what_is_stated():
    """The documents' table of kernels names no DSL; their sentence has the rows of `LACKS`."""
    names = {dsl: {v.name for v in EVERY if v.implementation == dsl} for dsl in DSLS}
    lacks = {v.name: amd.lacking(v) for v in EVERY if v.implementation == "cutedsl"}
    assert {name for name, why_not in lacks.items() if not why_not} == names["flydsl"]
    assert {why_not for why_not in lacks.values() if why_not} == {*amd.LACKS}
    plain = {v.name for v in EVERY if not v.source and v.window not in (256, ROW, SQUARE)}
    assert not [name for name, why_not in lacks.items() if why_not and name in plain]


def test_layouts_differ_as_documents_say():
    for v in EVERY:
        more = v.implementation == "flydsl" or {f.name for f in v.formats} == {"mxfp4_e2m1"}
        tiled = ("blocked_128x4", "shuffled_32x8")[: 1 + more]
        plain = v.form.is_square or v.gives_floats or v.finds_amaxes
        gradient = isinstance(v.source, GradientSource)
        for arch in archs_of(v):
            tiled_layouts = ("blocked_128x4",) * (arch == "sm_100f") if gradient else tiled
            assert layouts_of(v, arch) == ("row_major", *(() if plain else tiled_layouts))


# ---- the path of a tensor ---
MOST = 17  # stations; it had 38


def _has(value: Any, kinds: tuple[type, ...], depth: int = 4) -> bool:
    """Whether a value is of one of these types, or holds one that is."""
    if isinstance(value, kinds):
        return True
    if isinstance(value, mlir.LoweringRuleContext):  # of whose fields many are all programs'
        value = [value.avals_in, value.avals_out]
    elif isinstance(value, dict):
        value = [*value.values()]
    elif dataclasses.is_dataclass(value) and type(value).__module__.startswith("jax_mx."):
        value = [*vars(value).values()]
    if depth == 0 or not isinstance(value, list | tuple):
        return False
    return any(_has(item, kinds, depth - 1) for item in value)


@functools.cache
def _parameters(code: CodeType) -> tuple[str, tuple[str, ...]]:
    """The module of a function of jax_mx, and its parameters; none where it is another's."""
    package, path = Path(jax_mx.__file__).parent, Path(code.co_filename)
    if code.co_name.startswith("<") or package not in path.parents:
        return "", ()
    flags = (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS)
    count = code.co_argcount + code.co_kwonlyargcount + sum(bool(code.co_flags & f) for f in flags)
    return path.relative_to(package).with_suffix("").as_posix(), code.co_varnames[:count]


@contextlib.contextmanager
def followed(kinds: tuple[type, ...]) -> Iterator[list[str]]:
    """The modules of jax_mx whose functions are called with a value of these types, in order.

    Functions of a module that are called one after the other are one station.
    """
    modules: list[str] = []

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        module, names = _parameters(frame.f_code)
        if not names or modules[-1:] == [module]:
            return
        values = frame.f_locals
        if any(_has(values.get(name), kinds) for name in names):
            modules.append(module)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield modules
    finally:
        sys.setprofile(before)


@in_checkout
def test_the_path_of_a_tensor(without_code):
    """Its stations, as CONTRIBUTING has them: x, its tracers, abstract values and MLIR's."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    text = text.partition("**The path of a tensor.**")[2].partition("When XLA instantiates")[0]
    said = re.findall(r"^\d+\. `(\S+)`: ", text, flags=re.M)
    x = jnp.ones((3, 160, 96), jnp.bfloat16)
    kinds = (jax.Array, type(jax.typeof(x)), ir.Value)
    with lowered_apart(), followed(kinds) as traced:
        call = jax.jit(jax_mx.quantize).trace(x)
    lowered = {}
    for platform in ("cpu", "cuda"):
        with lowered_apart(), followed(kinds) as lowered[platform]:
            call.lower(lowering_platforms=(platform,))
    assert traced + lowered["cpu"] == said
    assert traced + lowered["cuda"] == [*said[:14], "launch/calls"]
    assert len(said) <= MOST


def _loss(f: Callable[..., jax.Array], *args: jax.Array) -> Callable[..., Any]:
    """The gradients of a function's sum by all of these."""
    every = tuple(range(len(args)))
    return jax.grad(lambda *args: f(*args).astype(jnp.float32).sum(), every)


PATHED = (jax.Array, type(jax.typeof(jnp.ones(()))), ir.Value, jax_mx.MXArray)


@in_checkout
def test_the_path_of_a_product():
    """Its stations in `products/`, and what makes codes, as docs/contributors.md has them."""
    text = (ROOT / "docs" / "contributors.md").read_text().partition("## A product's path")[2]
    said = re.findall(r"^\d+\. `(\S+)`: ", text, flags=re.M)
    x, w = jnp.ones((3, 64, 96), jnp.bfloat16), jnp.ones((96, 64), jnp.bfloat16)
    with lowered_apart(), followed(PATHED) as modules:
        jax.jit(_loss(jax_mx.matmul, x, w)).trace(x, w).lower(lowering_platforms=("cpu",))
    ours = [m for m in modules if m.startswith("products/") or m == "quantizing/calling"]
    assert [*dict.fromkeys(ours)] == said


SIZES, ONE = np.array([40, 24], np.int32), np.zeros((64, 1), np.int32)
# A function, its arguments' shapes, and how often at most the trace of its gradient, forward and
# backward through the custom_vjp, enters a module; and one of `products/` or `experts/`.
PATHS: dict[str, tuple[Callable[..., jax.Array], list[tuple[int, ...]], int, int]] = {
    "matmul": (jax_mx.matmul, [(64, 96), (96, 64)], 143, 22),
    "ragged_dot": (
        lambda x, w: jax_mx.ragged_dot(x, w, SIZES), [(64, 96), (2, 96, 64)], 164, 26
    ),
    "mlp": (jax_mx.mlp, [(64, 96), (96, 128), (64, 96)], 214, 30),
    "moe": (
        lambda x, a, b: jax_mx.moe(x, ONE, np.ones((64, 1), np.float32), a, b),
        [(64, 96), (2, 96, 128), (2, 64, 96)], 251, 36,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PATHS)
def test_the_paths_of_gradients_stay_short(name):
    """A station counts each time: a value that wanders through modules has no value."""
    f, shapes, most, most_of_ours = PATHS[name]
    args = [jnp.ones(shape, jnp.bfloat16) for shape in shapes]
    with lowered_apart(), followed(PATHED) as modules:
        jax.jit(_loss(f, *args)).trace(*args)
    ours = [room for room in modules if room.startswith(("products/", "experts/"))]
    entered = [room for i, room in enumerate(ours) if ours[i - 1 : i] != [room]]
    assert len(modules) <= most
    assert len(entered) <= most_of_ours


# ---- the rooms ---
def _imported(path: Path) -> set[str]:
    """The modules that a module imports, or names in them; in functions and for types too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


@in_checkout
def test_a_room_imports_only_rooms_below_it():
    """The picture of CONTRIBUTING has every room, and each stands above all that it imports."""
    package = Path(jax_mx.__file__).parent
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Rooms")[2].partition("## ")[0]
    rooms = re.findall(r"^(\w+)/ ", text, flags=re.M)
    assert {*rooms} == {path.parent.name for path in package.glob("*/__init__.py")}
    for i, room in enumerate(rooms):
        for path in (package / room).rglob("*.py"):
            names = [name.split(".") for name in _imported(path) if name.startswith("jax_mx.")]
            assert not {name[1] for name in names} & {*rooms[:i]}, path


@in_checkout
def test_products_have_five_levels_of_imports():
    """The longest chain of imports in `products/`, which has no circle: graphlib refuses one."""
    package = Path(jax_mx.__file__).parent
    paths = [*(package / "products").rglob("*.py")]
    modules = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts): path for path in paths
    }
    below = {name: _imported(path) & {*modules} for name, path in modules.items()}
    levels: dict[str, int] = {}
    for name in graphlib.TopologicalSorter(below).static_order():
        levels[name] = 1 + max((levels[other] for other in below[name]), default=0)
    assert len(levels) > 30
    assert max(levels.values()) <= 5, levels


# ---- what documents run --------------------------------------------------------------------------
PAGES = sorted(path for path in ROOT.glob("docs/*.md"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *PAGES, ROOT / "jax_mx/launch/README.md"]
# Blocks that are not Python: commands, and what they print.
FENCES = {"python", "", "sh", "{include}", "{image}", "{figure}", "{toctree}", "{glossary}"}


@in_checkout
@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[pytest.mark.thorough] * (p.name != "README.md")) for p in DOCUMENTS],
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_python_in_documents_runs(path, tmp_path, monkeypatch):
    """Every block, in order, with the names of those before it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    text, names = path.read_text(), {}
    opened = re.findall(r"^ *(?:```|:::)([^\s`]*).*$", text, re.MULTILINE)[::2]
    assert {*opened} <= FENCES | {"{eval-rst}"}, "Python stands in blocks called python"
    for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        with jax.numpy_dtype_promotion("standard"):  # as users have it
            exec(compile(block, path.name, "exec"), names)


@in_checkout
def test_links_of_documents_lead_somewhere():
    """The links that the site's build does not follow: from the files outside of docs."""
    for path in ROOT.glob("*.md"):
        for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
            name, _, anchor = link.partition("#")
            if "://" in link or not name:
                continue
            assert (ROOT / name).exists(), f"{path.name}: {link}"
            heads = re.findall(r"^#+ (.*)$", (ROOT / name).read_text(), re.M) if anchor else []
            assert not anchor or anchor in {h.lower().replace(" ", "-") for h in heads}, link


@in_checkout
def test_pages_that_show_calls_have_python():
    """A page without a block is not run; these have some."""
    calls = "tutorial quickstart training serving sharding formats choosing migrating amd".split()
    assert all("```python" in (ROOT / f"docs/{name}.md").read_text() for name in calls)


@in_checkout
def test_choosing_explains_every_implementation_of_products():
    text = (ROOT / "docs/choosing.md").read_text()
    cells = " ".join(re.findall(r'^\| (`"\w+"`(?:, `"\w+"`)*) \|', text, re.MULTILINE))
    assert re.findall(r'`"(\w+)"`', cells) == [*implementations.named("dot_general")]
    grouped = text.partition("Grouped products")[2].partition("\n\n")[0]
    tilings = {*map(kernels.name_of, ROWS)}  # the same
    named = [name for name in implementations.named("ragged_dot") if name not in tilings]
    assert re.findall(r'`"(\w+)"`', grouped) == named


@in_checkout
def test_the_reference_has_every_public_name():
    text = (ROOT / "docs/api.md").read_text()
    known = {*re.findall(r"auto(?:function|class):: (\w+)", text), *re.findall(r"`(\w+)`", text)}
    known |= {*re.findall(r"`jax_mx\.(\w+)`", text)}
    public = {name for name, value in vars(jax_mx).items() if not inspect.ismodule(value)}
    assert {name for name in public if name[0] != "_"} - known == set()


@in_checkout
def test_a_table_is_of_one_run():
    """The caption of a table of figures names one commit, which all its rows have."""
    from benchmarks.report import read
    from docs import tables

    for name, make in tables.TABLES.items():
        for caption in (line for line in make() if ", commit " in line):
            said = caption.split("; `")[0].removeprefix("commit ").replace(", commit ", ", ")
            commits = [part for part in said.split(", ") if re.fullmatch("[0-9a-f]{7,40}", part)]
            assert len(commits) == 1, (name, caption)
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        about, rows = read(path)
        row_commits = {row["commit"] for row in rows if "commit" in row}
        assert not about or row_commits <= {about["commit"]}, path.name


# ---- examples ---
@in_checkout
@pytest.mark.thorough
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "mxfp4_backward"])
def test_training_resumes_bit_for_bit(recipe, tmp_path):
    """On three devices, whose number divides neither the rows nor the experts."""
    code = """
        import os, runpy
        from rich.progress import Progress
        example, recipe, folder = sys.argv[2:]
        train = runpy.run_path(example)["train"]

        def losses(name, *parts):
            os.makedirs(f"{folder}/{name}")
            os.chdir(f"{folder}/{name}")
            with Progress(disable=True) as bars:
                return [train(recipe, n, i > 0, bars) for i, n in enumerate(parts)][-1]

        whole, resumed = losses("whole", 3), losses("resumed", 2, 3)
        assert len(whole) == 3 and len({*whole}) == 3, whole
        assert whole == resumed, (whole, resumed)
        print("same")
    """
    (out,) = on_eight(code, str(ROOT / "examples/train_moe.py"), recipe, str(tmp_path), devices=3)
    assert out.splitlines()[-1] == "same"


@in_checkout
@pytest.mark.thorough
def test_training_on_more_devices_is_that_on_one(tmp_path):
    """The same rows on 1, 2 and 4 devices: the same losses, but for the order of sums."""
    code = """
        import json, os, runpy
        from rich.progress import Progress
        os.chdir(sys.argv[3])
        train = runpy.run_path(sys.argv[2])["train"]
        with Progress(disable=True) as bars:
            print(json.dumps(train("mxfp8", 3, False, bars)))
    """
    losses, example = [], str(ROOT / "examples/train_moe.py")
    for n in (1, 2, 4):
        folder = tmp_path / str(n)
        folder.mkdir()
        (out,) = on_eight(code, example, str(folder), devices=n)
        losses.append(json.loads(out.splitlines()[-1]))
    assert losses[0][2] < losses[0][1] < losses[0][0]
    np.testing.assert_allclose(losses[1:], losses[:1] * 2, rtol=2e-3)


@in_checkout
@pytest.mark.thorough
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name, tmp_path):
    """The examples run as their first lines say, but shorter; with several devices on eight."""
    example = ROOT / "examples" / f"{name}.py"
    assert len(example.read_text().splitlines()) < 120
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    if name in ON_ONE_DEVICE:
        from conftest import QUICK

        env["XLA_FLAGS"] = " ".join(f"--{option}={value}" for option, value in QUICK)
    command = [sys.executable, str(example), *EXAMPLES[name][0]]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 60  # of one core, whoever else runs
    EXAMPLES[name][1](done.stdout)


@in_checkout
def test_every_example_is_run():
    """Notebooks when the site is built."""
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*EXAMPLES}


# ---- words ---
@in_checkout
def test_docstrings_say_what_something_is():
    """None begins with "Of", which leaves the reader to guess of what."""
    folders = ("jax_mx", "tests", "benchmarks", "docs", "examples")
    docstrings = [
        f"{path}:{number}"
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.match(r'\s*"""Of ', line)
    ]
    assert not docstrings


# ---- versions ------------------------------------------------------------------------------------
EXTRAS = {"cutedsl": "cuda-kernels", "flydsl": "rocm-kernels"}  # that bring a DSL


@pytest.mark.parametrize("dsl", DSLS)
def test_extras_bring_the_compilers_that_the_library_wants(dsl):
    extra = PROJECT["project"]["optional-dependencies"][EXTRAS[dsl]]
    names = [re.split("[=>;]", requirement)[0].strip() for requirement in extra]
    assert {*names} == {*toolchains.COMPILERS[dsl], *toolchains.READERS[dsl]}
    dev = PROJECT["dependency-groups"]["dev"]
    for distribution, version in toolchains.COMPILERS[dsl].items():
        pinned = f"{distribution}=={version}"
        for group in (extra, dev):
            assert pinned in {requirement.partition(";")[0].strip() for requirement in group}


def test_the_emulator_is_told_to_be_installed_as_its_extra_says():
    extra = PROJECT["project"]["optional-dependencies"]["emulator"]
    assert {re.sub(">=.*", "", requirement) for requirement in extra} == {*toolchains.EMULATOR}


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
    """The headings follow Keep a Changelog; releases have their day, and no later version."""
    text = (ROOT / "CHANGELOG.md").read_text()
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert heads[0] == "[Unreleased]"
    dated = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d", head) for head in heads[1:]]
    assert all(dated)
    versions = [match[1] for match in dated if match] + [PROJECT["project"]["version"]]
    assert max(versions, key=lambda v: [*map(int, v.split("."))]) == versions[-1]
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert {*re.findall(r"^### (.*)$", text, re.MULTILINE)} <= kinds


@in_checkout
@pytest.mark.parametrize("section,tag", [("dated", ""), ("dated", "0"), ("unreleased", "")])
def test_a_tag_is_released_with_its_section(section, tag, tmp_path):
    """The workflow's own commands, where docs/versions.md was followed, and where it was not."""
    version = PROJECT["project"]["version"]
    head = re.compile(rf"^## \[{re.escape(version)}\] - .*\n", re.MULTILINE)
    text = head.sub("", (ROOT / "CHANGELOG.md").read_text())
    notes = text.partition("## [Unreleased]\n")[2].partition("\n## [")[0]
    if section == "dated":
        text = text.replace("[Unreleased]\n", f"[Unreleased]\n\n## [{version}] - 2027-01-31\n", 1)
    (tmp_path / "CHANGELOG.md").write_text(text)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/a.whl").write_bytes(b"a wheel")
    (tmp_path / "gh").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > called')
    (tmp_path / "gh").chmod(0o755)
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    commands = {step["name"]: step["run"] for job in jobs.values() for step in job["steps"]
                if "run" in step}  # fmt: skip
    env = {"GITHUB_REF_NAME": f"v{version}{tag}", "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def run(name: str) -> bool:
        bash = ["bash", "-eo", "pipefail", "-c", commands[name]]
        return subprocess.run(bash, cwd=tmp_path, env=env, capture_output=True).returncode == 0

    agreed = run("The tag, the version and the changelog agree")
    assert agreed == (section == "dated" and not tag)
    if agreed:
        assert run("Checksums, notes, draft")
        assert notes.strip() in (tmp_path / "notes.md").read_text()
        called = (tmp_path / "called").read_text().splitlines()
        assert called[:4] == ["release", "create", f"v{version}", "--draft"]
        assert called[-2:] == ["dist/SHA256SUMS", "dist/a.whl"]


@in_checkout
def test_workflows_take_actions_by_their_hash():
    """A tag can be moved."""
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        used = re.findall(r"uses: (\S+)", path.read_text())
        assert used and all(re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", name) for name in used)


@in_checkout
@pytest.mark.parametrize("chip,known", [("NVIDIA H100 80GB HBM3", True), ("NVIDIA X9", False)])
def test_a_gpu_runner_tests_and_compares(chip, known, tmp_path):
    """The workflow's own commands, on a chip with earlier results and on one without."""
    steps = yaml.safe_load((ROOT / ".github/workflows/gpu.yml").read_text())["jobs"]["nvidia"]
    commands = {step["name"]: step["run"] for step in steps["steps"] if "run" in step}
    name = chip.split()[1].lower()
    programs = {
        "nvidia-smi": f'echo "{chip}, 580"',
        "uv": f'[ "$3" = python ] && [ "$4" = -c ] && echo {name}\nprintf "%s\\n" "$@" >> called',
    }
    for program, body in programs.items():
        (tmp_path / program).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / program).chmod(0o755)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    env = {"OUT": "build/gpu", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for name_of_step in ("Tests", "A short benchmark, beside the last of this chip"):
        bash = ["bash", "-eo", "pipefail", "-c", commands[name_of_step]]
        subprocess.run(bash, cwd=tmp_path, env=env, check=True)
    called = (tmp_path / "called").read_text().splitlines()
    assert "--record-verified=build/gpu/verified" in called
    assert (f"benchmarks/results/{name}_step.json" in called) == known
    assert chip in (tmp_path / "build/gpu/gpu.csv").read_text()
    assert steps["steps"][-1]["with"]["path"] == "build/gpu"


@in_checkout
def test_the_license_is_there():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["project"]["license"] == "Apache-2.0"
