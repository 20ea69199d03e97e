"""The kernels' build, in a checkout: no JAX, keys by content, incremental, deterministic."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest
from helpers import loaded_after

from jax_mx.launch import build, content, store
from jax_mx.launch.chips import ARCHS
from jax_mx.quantizing.facts import binary
from jax_mx.shipping import build as ours
from jax_mx.shipping import verified
from jax_mx.shipping.build import EVERY, EXECUTED
from jax_mx.shipping.shipped import BINARIES, SHIPPED, shipped_archs

COMPILED = shutil.ignore_patterns("__pycache__")  # what a cache holds is no source
FIRST = {dsl: next(v for v in SHIPPED if v.implementation == dsl) for dsl in ARCHS}


def test_the_build_imports_no_jax():
    """Not even rich, where it has nothing to compile: a source install has neither."""
    modules = loaded_after(
        "import os, runpy, sys\n"
        "os.environ.pop('JAX_MX_ARCHS', None)\n"
        "sys.argv = ['build']\n"
        f"try: runpy.run_path({ours.__file__!r}, run_name='__main__')\n"
        "except SystemExit as e: assert not e.code"
    )
    assert modules.isdisjoint({"jax", "jaxlib", "rich", "cutlass", "flydsl"})


def test_kernels_import_no_jax():
    """As a compiling process imports them: without the package's __init__, where JAX is missing."""
    worker = Path(content.__file__).with_name("worker.py")
    names = [f"quantizing.kernels.cutedsl.{name}" for name in ("compile", "quantize", "dequantize")]
    names += [f"products.cutedsl.{name}" for name in ("compile", "matmul", "amaxes", "wgrad")]
    modules = loaded_after(
        f"import importlib, runpy\nrunpy.run_path({str(worker)!r})['without_jax']()\n"
        f"for name in {[*names, 'norms.cutedsl']}: importlib.import_module(f'jax_mx.{{name}}')"
    )
    assert "cutlass" in modules and "jax" not in modules
    launch = {name.removeprefix("jax_mx.launch.") for name in modules if ".launch." in name}
    assert launch - {"binary"} == {*content._COMPILING["cutedsl"]}  # their change is another key
    # So is that of all others, but for the modules that only have a docstring.
    package = Path(build.__file__).parents[1]
    loaded = [name.split(".")[1:] for name in modules if name.startswith("jax_mx.")]
    paths = {Path(*name).with_suffix(".py") for name in loaded if name[0] != "launch"}
    known = {path.relative_to(package) for _, path in binary.files_of("cutedsl", "sm_90a")}
    assert {path for path in paths if (package / path).exists()} <= known


# Kernels of archs that none of them was executed on, here or on a GPU.
NEVER_RUN = [
    (variant, arch)
    for variant in BINARIES
    for arch in shipped_archs(variant)
    if arch not in EXECUTED
]


@pytest.mark.sampled(300)
@pytest.mark.parametrize(
    "variant, arch", [pytest.param(*case, id=build.name_of(*case)) for case in NEVER_RUN]
)
def test_no_kernel_spills_registers(variant, arch):
    """Or the build of a release would fail; with --thorough all compile, which takes an hour."""
    pytest.importorskip("cutlass")
    assert not build.spills(store.get(variant, arch).facts)


# ---- content keys ---
def _places(dsl: str) -> list[Path]:
    """The files whose change must change the key of a DSL's kernels."""
    package = Path(build.__file__).parents[1]
    folders = ("quantizing/facts", "quantizing/sources", f"quantizing/kernels/{dsl}")
    folders += (f"products/{dsl}",)
    paths = [path for folder in folders for path in (package / folder).glob("*.py")]
    shared = tuple(
        f"quantizing/kernels/{name}" for name in ("entry", "geometry", "noise", "tuning")
    )
    shared += tuple(f"formats/{name}" for name in ("directions", "formats", "layouts", "windows"))
    shared += (f"launch/{dsl}", "launch/chips", "launch/entry", "launch/rule")
    paths += [package / f"{name}.py" for name in shared]
    rooms = [package / "norms" / name for name in ("source.py", f"{dsl}.py")]
    paths += [path for path in rooms if path.exists()]
    return [path.relative_to(package) for path in paths]


def _key(variant, arch: str, package: Path) -> str:
    """The key of sources that lie in a copy of the package."""
    content._digest.cache_clear()
    binary.files_of.cache_clear()
    dsl = variant.implementation
    files = binary.files_of(dsl, arch, package), content.files_of(dsl, package / "launch")
    return content.key_of(variant, arch, (*files[0], *files[1]))


def _tables(dsl: str, arch: str, monkeypatch) -> list[Path]:
    """The files that Python loads for an arch's table of tiles."""
    name, package = f"jax_mx.quantizing.kernels.{dsl}.tuning", Path(build.__file__).parents[1]
    for known in [module for module in sys.modules if module.startswith(name)]:
        monkeypatch.delitem(sys.modules, known)
    importlib.import_module(f"{name}.{arch}")
    loaded = [module for loaded_name, module in sys.modules.items() if loaded_name.startswith(name)]
    return [Path(module.__file__).relative_to(package) for module in loaded]


@pytest.mark.parametrize(
    "dsl, arch", [(dsl, arch) for dsl, archs in ARCHS.items() for arch in archs]
)
def test_a_key_changes_with_each_table_and_source(dsl, arch, tmp_path, monkeypatch):
    """A stale binary cannot pass: what an entry is made of is in files that the key hashes."""
    package = Path(build.__file__).parents[1]
    for folder in ("formats", "launch", "norms", "products", "quantizing"):
        shutil.copytree(package / folder, tmp_path / folder, ignore=COMPILED)
    variant, places = FIRST[dsl], [*_places(dsl), *_tables(dsl, arch, monkeypatch)]

    def key() -> str:
        return _key(variant, arch, tmp_path)

    first, seen = key(), set()
    assert first == content.key_of(variant, arch)  # where a package lies does not matter
    for path in places:
        text = (tmp_path / path).read_text()
        (tmp_path / path).write_text(text + "\n# changed\n")
        seen.add(key())
        (tmp_path / path).write_text(text)
        assert key() == first, path
    assert first not in seen and len(seen) == len(places) > 10
    other = {"cutedsl": "flydsl", "flydsl": "cutedsl"}[dsl]
    kernels = tmp_path / "quantizing" / "kernels"
    (kernels / other / "quantize.py").write_text("")
    for table in (kernels / dsl / "tuning").iterdir():  # of the other archs
        if table.relative_to(tmp_path) not in places:
            table.write_text("")
    assert key() == first


def test_a_key_changes_with_what_a_table_says(tmp_path):
    """With `value_layouts_of` changed, a kernel's scalars are others; its key once stayed."""
    package = Path(build.__file__).parents[1]
    for folder in ("formats", "launch", "norms", "products", "quantizing"):
        shutil.copytree(package / folder, tmp_path / folder, ignore=COMPILED)
    table = tmp_path / "quantizing" / "facts" / "variants.py"
    before = _key(FIRST["cutedsl"], "sm_90a", tmp_path)
    text = table.read_text()
    assert 'return ("row_major",)' in text
    table.write_text(
        text.replace('return ("row_major",)', 'return ("row_major", "shuffled_16x16")')
    )
    assert _key(FIRST["cutedsl"], "sm_90a", tmp_path) != before


def test_a_key_changes_with_compilers_variant_and_arch(monkeypatch):
    keys = {content.key_of(v, arch) for v in SHIPPED[:3] for arch in ("sm_90a", "sm_89")}
    assert len(keys) == 6
    monkeypatch.setitem(content.COMPILERS, "cutedsl", {"nvidia-cutlass-dsl": "0"})
    assert content.key_of(SHIPPED[0], "sm_90a") not in keys


# ---- building ahead ---
@pytest.mark.parametrize(
    "implementation", ["flydsl", pytest.param("cutedsl", marks=[pytest.mark.thorough])]
)
def test_the_build_is_incremental_by_content(implementation, tmp_path, monkeypatch, capsys):
    variant = FIRST[implementation]
    arch = {"cutedsl": "sm_90a", "flydsl": "gfx950"}[implementation]
    monkeypatch.setattr(build, "BINARIES", tmp_path)
    assert build.build([(variant, arch)], EVERY) == 0
    assert "0 of 1 binaries are up to date" in capsys.readouterr().out
    facts = build.read_manifest()[f"{variant.name}.{arch}"]
    file = tmp_path / facts["sha256"]
    first = file.stat().st_mtime_ns, file.read_bytes()
    assert first[1] == store.get(variant, arch).image  # deterministic; on demand as ahead
    usage = [entry["usage"] for entry in build.entries_of(facts)]
    for kernel in usage:
        assert kernel["registers"] > 16 and kernel["shared"] >= 0 and kernel["stack"] == 0
    build.build([(variant, arch)], EVERY)
    assert "1 of 1 binaries are up to date" in capsys.readouterr().out
    assert first == (file.stat().st_mtime_ns, file.read_bytes())
    build.report([(variant, arch), (variant, "sm_42")])
    out = capsys.readouterr().out
    assert out.count(arch) == out.count(" row_major ") == 1 and "sm_42" not in out
    file.write_bytes(first[1][:-1])  # damaged
    (tmp_path / "left_over").write_bytes(b"")
    build.build([(variant, arch)], EVERY)
    assert file.read_bytes() == first[1] and not (tmp_path / "left_over").exists()
    monkeypatch.setattr(build, "key_of", lambda *_: "another source")
    assert not build.is_current(facts, variant, arch)


def test_a_spill_fails_the_build(tmp_path, monkeypatch, capsys):
    entries = [{"symbol": f"a_{i}", "usage": {"stack": 8 * i}} for i in range(2)]
    facts = {"name": "a.sm_90a", "sha256": "0", "launches": {"row_major": {"entries": entries}}}
    monkeypatch.setattr(build, "BINARIES", tmp_path)
    monkeypatch.setattr(build, "compile_all", lambda jobs: [(b"", facts) for _ in jobs])
    assert build.build([(SHIPPED[0], "sm_90a")], EVERY) == 1
    assert "a.sm_90a: a_1 spills 8 bytes of registers" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["manifest.json"]  # nothing to launch


def test_which_archs_a_build_is_for(monkeypatch):
    assert build.picked(EVERY, []) == []
    monkeypatch.setattr(build, "native", lambda: ["sm_90a"])
    one = build.picked(EVERY, ["native"], "quantize_last_float16_mxfp8_e4m3")
    assert [arch for _, arch in one if _.op == "quantize"] == ["sm_90a"]
    archs = {arch for _, arch in build.picked(EVERY, ["all"])}
    assert archs == {arch for dsl in ARCHS.values() for arch in dsl}
    assert {v.op for v, _ in build.picked(EVERY, ["gfx950:dequantize"])} == {"dequantize"}
    with pytest.raises(ValueError, match="unknown arch sm_91; there are sm_80, "):
        build.picked(EVERY, ["sm_91"])


def test_what_is_here_is_what_was_verified(monkeypatch, tmp_path, capsys):
    variant = FIRST["flydsl"]
    store.get(variant, "gfx950")
    assert ours.check([(variant, "gfx950")]) == 0
    assert "1 binaries are what was verified" in capsys.readouterr().out
    monkeypatch.setattr(verified, "FOLDER", tmp_path)
    monkeypatch.setattr(verified, "read", lambda arch: {})
    assert ours.check([(variant, "gfx950")]) == 1
    assert "is not in jax_mx/verified" in capsys.readouterr().out
