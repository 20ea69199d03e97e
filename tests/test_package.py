"""What is installed: light imports, the manifest, an incremental build."""

import hashlib
import subprocess
import sys
from importlib.metadata import requires

import jax_mx
from jax_mx import artifacts
from jax_mx.kernels import build
from jax_mx.variants import ARCHS, VARIANTS

HEAVY = ("cutlass", "flydsl", "torch", "rich", "sklearn", "safetensors", "triton", "elftools")


def loaded_after(code: str) -> set[str]:
    """The top-level modules of a new process that runs `code`."""
    code += "\nimport sys; print('\\n'.join({name.split('.')[0] for name in sys.modules}))"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(run.stdout.split())


def test_the_library_imports_no_kernel_dsl():
    modules = loaded_after(
        "import jax_mx, jax.numpy as jnp, sys\n"
        "jax_mx.quantize(jnp.ones(32)).dequantize()\n"
        "assert not any(m.startswith('jax_mx.kernels') for m in sys.modules)"
    )
    assert modules.isdisjoint(HEAVY), modules & set(HEAVY)
    assert "jax_mx" in modules


def test_the_check_above_can_fail():
    assert "rich" in loaded_after("import rich.table")


def test_the_library_needs_only_jax_and_numpy():
    needs = {r.split(">")[0] for r in requires("jax-mx") if "extra" not in r}
    assert needs == {"jax", "numpy"}


def test_the_build_imports_no_jax():
    modules = loaded_after(
        "import runpy, sys\n"
        "sys.argv = ['build', '--arch', 'sm_90a']\n"
        f"try: runpy.run_path({build.__file__!r}, run_name='__main__')\n"
        "except SystemExit as e: assert not e.code"
    )
    assert "jax" not in modules and "jaxlib" not in modules


def test_every_variant_ships_for_every_arch():
    manifest = artifacts.manifest()
    assert set(manifest) == {f"{v.name}.{a}" for v in VARIANTS for a in ARCHS[v.implementation]}
    for name, facts in manifest.items():
        image = (artifacts.BINARIES / facts["file"]).read_bytes()
        assert hashlib.sha256(image).hexdigest() == facts["sha256"], name
        assert all(usage["stack"] == 0 for usage in facts["usage"]), f"{name} spills"
        assert all(symbol.encode() in image for symbol in facts["symbols"])


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


def test_public_names():
    public = {name for name in vars(jax_mx) if not name.startswith("_")}
    assert {"quantize", "dequantize", "is_supported", "MXArray", "MXFP8_E4M3", "RCEIL"} <= public
