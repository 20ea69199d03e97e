"""The launcher by itself: it imports nothing of MX, and a reader's kernel becomes a function."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_mx import launch
from jax_mx.launch import Kernel, _ffi, calls, compiler, content, emulate, store
from jax_mx.launch.chips import DSLS

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES, FOLDER = ROOT / "examples", Path(launch.__file__).parent
reference = jax.jit(jax.nn.softmax)
X = jax.random.normal(jax.random.key(0), (8, 5, 70))
in_checkout = pytest.mark.skipif(not EXAMPLES.exists(), reason="beside a wheel are no examples")
pytestmark = in_checkout


@pytest.fixture
def softmax(monkeypatch) -> Kernel:
    """The example's function."""
    pytest.importorskip("flydsl")
    monkeypatch.syspath_prepend(EXAMPLES)
    modules = {dsl: f"softmax_kernels.{dsl}" for dsl in ("cutedsl", "flydsl")}
    return Kernel("row_softmax", modules, reference=jax.nn.softmax)


def launches(f, *args) -> tuple[jax.Array, int]:
    """A function's result, and the number of kernels that it launched."""
    before = _ffi.counters()["launches"]
    out = jax.block_until_ready(f(*args))
    return out, _ffi.counters()["launches"] - before


# ---- the boundary ---
def test_no_module_of_the_launcher_names_the_rest():
    """Neither in an import, nor in a function, nor in a text that is imported."""
    allowed = {"launch", "testing"}  # a name of `emulate` in messages
    for path in FOLDER.rglob("*.py"):
        text = path.read_text()
        named = {*re.findall(r"(?:jax_mx\.|from jax_mx import )(\w+)", text)}
        assert named <= allowed, path
        assert not re.search(r"^\s*from \.\.", text, re.MULTILINE), path


def test_it_runs_without_the_rest(tmp_path):
    """The example, with a jax_mx that has the launcher and the handler alone."""
    pytest.importorskip("flydsl")
    package = tmp_path / "jax_mx"
    shutil.copytree(FOLDER, package / "launch", ignore=shutil.ignore_patterns("__pycache__"))
    (package / "__init__.py").write_text("")
    shutil.copy(_ffi.__file__, package / "launch")
    code = """
        import sys
        sys.path[:0] = sys.argv[1:]
        sys.meta_path[:] = [f for f in sys.meta_path if "Redirecting" not in type(f).__name__]
        import jax, numpy, row_softmax
        with row_softmax.emulate("gfx942"):
            y = jax.jit(row_softmax.softmax)(numpy.float32([[0, 1], [2, 2]]))
        print(*y[1], sys.modules["jax_mx"].__file__)
        print(*{".".join(name.split(".")[:2]) for name in sys.modules if name[:7] == "jax_mx."})
    """
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path), str(EXAMPLES)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, modules = done.stdout.splitlines()
    assert first == f"0.5 0.5 {package / '__init__.py'}"
    assert modules == "jax_mx.launch"


def test_its_readme_has_the_kernel_that_is_there():
    readme = (FOLDER / "README.md").read_text()
    source = (EXAMPLES / "softmax_kernels" / "flydsl.py").read_text()
    assert source[source.index("import") :] in readme


# ---- a kernel of a reader's ---
@pytest.mark.parametrize(
    "shape,arch",
    [(s, "gfx942") for s in ((3, 63), (2, 2, 64), (130,), (0, 7))] + [((3, 130), "gfx950")],
)
def test_a_row_softmax_in_the_emulator(shape, arch, softmax):
    x = jax.random.normal(jax.random.key(1), shape) * 10
    with emulate(arch):
        y, count = launches(jax.jit(softmax), x)
    np.testing.assert_allclose(y, reference(x), rtol=1e-6, atol=1e-7)
    assert count == (x.size > 0)


def test_nan_and_infinity_stay_in_their_rows(softmax):
    x = X[0].at[1, 3].set(jnp.nan).at[2, 4].set(jnp.inf).at[3, 5].set(-jnp.inf)
    with emulate("gfx942"):
        y = jax.jit(softmax)(x)
    assert jnp.isnan(y).any(1).tolist() == [False, True, True, False, False]
    np.testing.assert_allclose(y, reference(x), rtol=1e-6, atol=1e-7)


TRANSFORMED = {
    "vmap": (lambda f: jax.vmap(f, in_axes=1, out_axes=1), 1),
    "gradient": (lambda f: jax.grad(lambda x: jnp.sum(f(x) ** 2)), 0),
    "second": (lambda f: jax.grad(lambda x: jax.grad(lambda x: jnp.sum(f(x) ** 2))(x)[0, 0, 0]), 0),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations(name, softmax):
    transform, least = TRANSFORMED[name]
    with emulate("gfx942"):
        y, count = launches(jax.jit(transform(softmax)), X)
    np.testing.assert_allclose(y, jax.jit(transform(jax.nn.softmax))(X), rtol=1e-5, atol=1e-6)
    assert count >= least


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_xla_splits_the_call(axis_type, softmax):
    """Each of eight devices launches for its rows; nothing moves."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(axis_type,))
    spec = PartitionSpec("d", None, None)
    with jax.set_mesh(mesh), emulate("gfx942"):
        x = jax.device_put(X, NamedSharding(mesh, spec))
        compiled = jax.jit(softmax).lower(x).compile()
        y, count = launches(compiled, x)
    assert count == 8 and y.sharding.spec[0] == "d"
    assert "f32[1,5,70]" in compiled.as_text() and "all-gather" not in compiled.as_text()
    np.testing.assert_allclose(y, reference(X), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("platform,arch", [("cuda", "sm_90a"), ("rocm", "gfx950")])
def test_an_export_carries_the_binary(platform, arch, softmax, monkeypatch):
    """Also of symbolic shapes; on another platform the program has the reference."""
    monkeypatch.setenv("JAX_MX_ARCHS", arch)
    shape = jax.export.symbolic_shape("rows, columns")
    exported = jax.export.export(
        jax.jit(softmax), platforms=["cpu", platform], disabled_checks=launch.DISABLE_EXPORT_CHECKS
    )(jax.ShapeDtypeStruct(shape, jnp.float32))
    artifact = store.get(softmax.binary(DSLS[platform], ["float32"]), arch)
    assert artifact.sha256 in exported.mlir_module() and "7FELF" in exported.mlir_module()
    np.testing.assert_array_equal(exported.call(X[0]), reference(X[0]))


def test_what_no_kernel_serves(softmax, caplog, monkeypatch, tmp_path):
    """The reference, with a line that says why; or, where a kernel is named, an error."""
    x = X[0].astype(jnp.bfloat16)
    calls.say_once.cache_clear()
    worker = compiler._workers["flydsl"]
    with monkeypatch.context() as patch:  # the process that compiles begins before the path grows
        patch.setattr(sys, "path", [path for path in sys.path if path != str(EXAMPLES)])
        worker.stop()
        worker.ask({"binary": "unknown", "arch": "gfx942"}, tmp_path)
    with emulate("gfx942"):
        assert jax.jit(softmax)(x).dtype == jnp.bfloat16
        assert "row_softmax takes XLA" in caplog.text and "softmax takes float32" in caplog.text
        with pytest.raises(NotImplementedError, match="softmax takes float32"):
            jax.jit(lambda x: softmax(x, implementation="flydsl"))(x)
        with pytest.raises(NotImplementedError, match="it has no kernel in cutedsl for rocm; impl"):
            jax.jit(lambda x: softmax(x, implementation="cutedsl"))(X)
        y, count = launches(jax.jit(lambda x: softmax(x, implementation="xla")), X)
    np.testing.assert_array_equal(y, reference(X))
    assert count == 0
    with pytest.raises(NotImplementedError, match="it has no kernel in flydsl for cpu; impl"):
        softmax(X, implementation="flydsl")
    store._failed.clear()


def test_bad_calls(softmax):
    with pytest.raises(ValueError, match=r"row_softmax: arrays have the shapes \(\); all dim"):
        softmax(jnp.float32(1))
    with pytest.raises(ValueError, match="implementation 'triton'; use one of xla, cutedsl"):
        softmax(X, implementation="triton")
    with pytest.raises(ValueError, match="f: DSL 'triton' is unknown; use cutedsl, flydsl"):
        Kernel("f", {"triton": "softmax_kernels.cutedsl"}, reference=jax.nn.softmax)
    with pytest.raises(ValueError, match=r"f: there is no module nowhere\.kernel; put its folder"):
        Kernel("f", {"flydsl": "nowhere.kernel"}, reference=jax.nn.softmax)


MISTAKES = {  # what a reader writes instead of a part of the example -> what the error says
    "name": ("fx.max(top", "fx.most(top", r"no attribute 'most' \(\w+/name_kernel.py:28\)$"),
    "entry": ("[Softmax()]", "Softmax()", "entry_kernel.entries returned no list; return a list"),
    "align": ("align = (4, 4)", "align = (4,)", "Softmax: align has 1, types has 2; both have one"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_a_kernel(name, tmp_path, monkeypatch):
    """In a module of the working folder, as a notebook imports it."""
    pytest.importorskip("flydsl")
    right, wrong, message = MISTAKES[name]
    source = (EXAMPLES / "softmax_kernels" / "flydsl.py").read_text()
    (tmp_path / f"{name}_kernel.py").write_text(source.replace(right, wrong, 1))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    kernel = Kernel("f", {"flydsl": f"{name}_kernel"}, reference=jax.nn.softmax)
    with pytest.raises(compiler.CompileError, match=message):
        compiler.compile_kernel(kernel.binary("flydsl", ["float32"]), "gfx942")


def test_a_module_that_changes_is_compiled_anew(tmp_path, monkeypatch):
    """Also one beside it, as it may import that."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_kernels").mkdir()
    for name in ("one", "two"):
        (tmp_path / "my_kernels" / f"{name}.py").write_text("")
    kernel = Kernel("f", {"flydsl": "my_kernels.one"}, reference=jax.nn.softmax)
    keys = set()
    for name in ("one", "two", "two"):
        content._digest.cache_clear()
        keys.add(content.key_of(kernel.binary("flydsl", ["float32"]), "gfx942"))
        (tmp_path / "my_kernels" / f"{name}.py").write_text("# changed")
    assert len(keys) == 3
