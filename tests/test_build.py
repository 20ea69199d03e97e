"""The kernels' build, in a checkout: no JAX, incremental by content, deterministic."""

import json
import re
from pathlib import Path

import pytest
from test_package import loaded_after

from jax_mx.facts.variants import ARCHS, VARIANTS
from jax_mx.kernels import build
from jax_mx.lowering import store as artifacts


def test_the_build_imports_no_jax():
    modules = loaded_after(
        "import runpy, sys\n"
        "sys.argv = ['build', '--arch', 'sm_90a']\n"
        f"try: runpy.run_path({build.__file__!r}, run_name='__main__')\n"
        "except SystemExit as e: assert not e.code"
    )
    assert "jax" not in modules and "jaxlib" not in modules


def test_kernels_import_no_jax():
    """As the wheel's build imports them: without the package's __init__, where JAX is missing."""
    package = Path(artifacts.__file__).parent
    modules = loaded_after(
        "import sys, types\n"
        "package = sys.modules['jax_mx'] = types.ModuleType('jax_mx')\n"
        f"package.__path__ = [{str(package)!r}]\n"
        "import jax_mx.kernels.cutedsl.compile, jax_mx.kernels.cutedsl.quantize"
    )
    assert "cutlass" in modules and "jax" not in modules


@pytest.mark.sampled(2)
@pytest.mark.parametrize("implementation", ARCHS)
def test_the_build_is_incremental_by_content(implementation, tmp_path, monkeypatch, capsys):
    variant = next(v for v in VARIANTS if v.implementation == implementation)
    arch = ARCHS[implementation][0]
    monkeypatch.setattr(build, "BINARIES", tmp_path)
    assert build.build([(variant, arch)]) == 0
    assert "0 of 1 binaries are up to date" in capsys.readouterr().out
    file = tmp_path / f"{variant.name}.{arch}.{build.SUFFIX[implementation]}"
    first = file.stat().st_mtime_ns, file.read_bytes()
    assert file.read_bytes() == (artifacts.BINARIES / file.name).read_bytes()  # deterministic
    build.build([(variant, arch)])
    assert "1 of 1 binaries are up to date" in capsys.readouterr().out
    assert first == (file.stat().st_mtime_ns, file.read_bytes())
    file.write_bytes(first[1][:-1])  # damaged
    (tmp_path / "left_over.cubin").write_bytes(b"")
    build.build([(variant, arch)])
    assert file.read_bytes() == first[1] and not (tmp_path / "left_over.cubin").exists()
    monkeypatch.setattr(build, "_key", lambda *_: "another source")
    build.build([(variant, arch)])
    assert "0 of 1 binaries are up to date" in capsys.readouterr().out


def test_the_manifest_says_what_binaries_take(capsys):
    manifest = json.loads((artifacts.BINARIES / "manifest.json").read_text())
    for name, facts in manifest.items():
        for usage in (entry["usage"] for entry in build.entries_of(facts)):
            assert usage["registers"] > 16 and usage["shared"] >= 0 and usage["stack"] == 0, name
            counts = usage["instructions"]
            assert 0 < counts["shortest"] <= counts["longest"] and not counts["loops"], name
            assert counts["shortest"] > usage["elements_per_thread"] > 0, name
    build.report([(v, arch) for v in VARIANTS for arch in (ARCHS[v.implementation][0], "sm_42")])
    out = capsys.readouterr().out
    held = [v for v in VARIANTS if artifacts.holds(v, ARCHS[v.implementation][0])]
    for implementation, archs in ARCHS.items():
        assert out.count(archs[0]) == sum(v.implementation == implementation for v in held)
    assert out.count(" row_major ") == len(held) > 0 and "sm_42" not in out


def test_a_spill_fails_the_build(tmp_path, monkeypatch, capsys):
    variant, arch = VARIANTS[0], "sm_90a"
    entries = [{"symbol": f"a_{i}", "usage": {"stack": 8 * i}} for i in range(2)]
    facts = {"file": "a", "launches": {"row_major": {"entries": entries}}}
    monkeypatch.setattr(build, "BINARIES", tmp_path)
    monkeypatch.setattr(build, "compile_all", lambda jobs: [(job, b"", facts) for job in jobs])
    assert build.build([(variant, arch)]) == 1
    line = f"{variant.name}.{arch}: a_1 spills 8 bytes of registers"
    assert line in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["manifest.json"]  # nothing to launch


# ---- counting instructions ---
def paths(*lines, trips=0):
    """(shortest, longest, loops) of a program in nvdisasm's words, but that BRA names a line."""
    sass = pytest.importorskip("jax_mx.kernels.cutedsl.sass")
    base, program = 0x120, []
    for line in lines:
        predicate, opcode, operands = re.fullmatch(r"(@\S+ )?(\S+) ?(\S*)", line).groups()
        if opcode.startswith("BRA"):
            *conditions, target = operands.split(",")
            operands = ",".join([*conditions, hex(base + 16 * int(target))])
        program.append({"opcode": opcode, "operands": operands})
        program[-1] |= {"predicate": predicate} if predicate else {}
    found = sass._count(program, base, trips)
    return found and tuple(found[name] for name in ("shortest", "longest", "loops"))


def test_paths_through_a_kernel():
    assert paths("MOV", "STG.E", "EXIT", "BRA 3", "NOP") == (3, 3, 0)  # what is not reached
    # The least is not the early exit: its warps have nothing to store.
    assert paths("@P0 EXIT", "MOV", "@!P1 BRA 4", "MOV", "STG.E.128", "EXIT") == (5, 6, 0)
    # Nor the one that stores less: 2 bytes instead of 4 single ones. Nor one that loads nothing.
    bytewise = ["STG.E.U8"] * 4
    assert paths("@P0 BRA 6", *bytewise, "EXIT", "STG.E.U16", "EXIT") == (6, 6, 0)
    assert paths("@P0 BRA 6", *bytewise, "EXIT", "STG.E", "EXIT") == (3, 6, 0)
    assert paths("@P0 BRA 2", "LDG.E.64", "STG.E", "EXIT") == (4, 4, 0)
    # A branch on a uniform predicate is a branch; one for lanes that have diverged is none.
    assert paths("BRA.U UP0,2", "MOV", "EXIT") == (2, 3, 0)
    assert paths("BRA.DIV UR4,3", "MOV", "EXIT", "MOV", "MOV", "BRA 1") == (3, 3, 0)
    assert paths("MOV", "CALL.REL.NOINC 0x40", "EXIT") is None


def test_a_loops_body_counts_as_often_as_it_runs():
    assert paths("MOV", "MOV", "@P0 BRA 1", "EXIT", trips=3) == (8, 8, 0)
    # The longer way is the one around the loop; the least stores more, in one piece.
    program = "@P0 BRA 5", "MOV", "STG.E.U8", "@P1 BRA 1", "EXIT", "STG.E", "EXIT"
    assert paths(*program, trips=2) == (3, 8, 0)
    assert paths("MOV", "EXIT", trips=2) == (2, 2, 0)
    # A branch within: two ways around, each trip takes at most both.
    assert paths("MOV", "@P0 BRA 3", "MOV", "@P1 BRA 0", "EXIT", trips=3) == (13, 13, 0)


def test_a_loops_body_counts_once():
    assert paths("MOV", "MOV", "@P0 BRA 1", "EXIT") == (4, 4, 1)  # tested below
    assert paths("MOV", "@P0 BRA 5", "MOV", "MOV", "BRA 1", "EXIT") == (6, 6, 1)  # tested above
    assert paths("MOV", "MOV", "@P0 BRA 1", "@P1 BRA 0", "EXIT") == (5, 5, 1)  # nested
