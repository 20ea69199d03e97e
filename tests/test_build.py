"""The kernels' build, in a checkout: no JAX, incremental by content, deterministic."""

from pathlib import Path

from test_package import loaded_after

from jax_mx import artifacts
from jax_mx.kernels import build
from jax_mx.variants import VARIANTS


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


def test_the_build_is_incremental_by_content(tmp_path, monkeypatch, capsys):
    variant, arch = VARIANTS[0], "sm_90a"
    monkeypatch.setattr(build, "BINARIES", tmp_path)
    assert build.build([(variant, arch)]) == 0
    assert "0 of 1 binaries are up to date" in capsys.readouterr().out
    file = tmp_path / f"{variant.name}.{arch}.cubin"
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
