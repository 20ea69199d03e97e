"""Kernels on demand: compiled once, kept by content, shared by processes, whole or not at all."""

import contextlib
import hashlib
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forks import Running
from helpers import assert_same_array, lowered_apart, random_bits

import jax_mx
from jax_mx.launch import calls, compiler, store, toolchains
from jax_mx.launch.content import key_of
from jax_mx.quantizing.calling import quantized
from jax_mx.shipping import verified
from jax_mx.shipping.shipped import SHIPPED
from jax_mx.testing import emulate

pytest.importorskip("flydsl")
FIRST = {dsl: next(v for v in SHIPPED if v.implementation == dsl) for dsl in ("flydsl", "cutedsl")}
AMD, ARCH = FIRST["flydsl"], "gfx950"
KERNELS = [  # one that each DSL compiles
    pytest.param(FIRST[dsl], arch, id=dsl)
    for dsl, arch in (("flydsl", ARCH), ("cutedsl", "sm_90a"))
]
each_dsl = pytest.mark.parametrize("kernel, arch", KERNELS)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and no binaries of the package."""
    monkeypatch.setenv("JAX_MX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "BINARIES", tmp_path / "none")
    monkeypatch.setattr(store, "manifest", dict)
    monkeypatch.setattr(store, "_own", [])
    return tmp_path / "cache"


def sha256_of_verified(kernel=AMD, arch: str = ARCH) -> str:
    return verified.read(arch)[kernel.name]["sha256"]


@each_dsl
def test_a_kernel_is_compiled_once_and_says_so(kernel, arch, cache, caplog):
    with caplog.at_level(logging.WARNING, logger="jax_mx"):
        first = store.get(kernel, arch)
    (line,) = caplog.messages
    assert line == f"jax_mx: compiling {kernel.name} for {arch} (kept in {cache})"
    want = sha256_of_verified(kernel, arch)
    assert first.sha256 == want == hashlib.sha256(first.image).hexdigest()
    caplog.clear()
    assert store.get(kernel, arch) == first and not caplog.messages
    store._read.clear()  # as another process finds it
    assert store.get(kernel, arch) == first and not caplog.messages
    names = {path.name for path in cache.iterdir()} - {"pycache"}
    assert names == {"kernels", f"{key_of(kernel, arch)}.json"}


@pytest.mark.parametrize(
    "damage", ["kernel cut off", "kernel changed", "facts cut off", "facts gone"]
)
def test_damage_is_noticed_and_mended(cache, damage):
    want = store.get(AMD, ARCH)
    image, facts = cache / "kernels" / want.sha256, cache / f"{key_of(AMD, ARCH)}.json"
    if damage == "kernel cut off":
        image.write_bytes(want.image[: len(want.image) // 2])
    elif damage == "kernel changed":
        image.write_bytes(want.image[:-9] + bytes([want.image[-9] ^ 1]) + want.image[-8:])
    elif damage == "facts cut off":
        facts.write_text(facts.read_text()[:-20])
    else:
        facts.unlink()
    store._read.clear()
    assert store.find(AMD, ARCH) is None
    again = store.get(AMD, ARCH)
    assert again == want and hashlib.sha256(again.image).hexdigest() == want.sha256


CODE = """
    import sys
    from jax_mx.shipping.shipped import SHIPPED
    from jax_mx.launch import store
    dsl, arch = sys.argv[1:]
    variant = next(v for v in SHIPPED if v.implementation == dsl)
    print("ready", flush=True)
    print(store.get(variant, arch).sha256, flush=True)
"""


def start(cache, kernel, arch: str) -> subprocess.Popen:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_MX_CACHE": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CODE), kernel.implementation, arch],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    "kernel, arch",
    [KERNELS[0], pytest.param(*KERNELS[1].values, id="cutedsl", marks=pytest.mark.thorough)],
)
def test_two_processes_want_one_kernel_and_one_is_killed(kernel, arch, tmp_path):
    """Both get the right bytes; after one is killed in the middle, the next gets them too."""
    cache, want = tmp_path / "cache", sha256_of_verified(kernel, arch)
    victim = start(cache, kernel, arch)
    assert victim.stdout.readline() == "ready\n"
    while not list(cache.glob(".*.lock")):  # it compiles
        time.sleep(0.01)
        assert victim.poll() is None
    os.killpg(victim.pid, signal.SIGKILL)
    victim.communicate()
    assert not list(cache.glob("*.json"))
    both = [start(cache, kernel, arch) for _ in range(2)]
    outs = [process.communicate(timeout=120) for process in both]
    assert [out.split() for out, _ in outs] == [["ready", want]] * 2, outs
    said = sum("compiling" in errors for _, errors in outs)
    assert said == 1  # the other one waited
    assert hashlib.sha256((cache / "kernels" / want).read_bytes()).hexdigest() == want


@each_dsl
def test_eight_threads_compile_one_kernel(kernel, arch, cache, caplog):
    with ThreadPoolExecutor(8) as pool:
        hashes = list(pool.map(lambda _: store.get(kernel, arch).sha256, range(8)))
    assert {*hashes} == {sha256_of_verified(kernel, arch)}
    assert sum("compiling" in line for line in caplog.messages) == 1


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAX_MX_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(store, "_own", [])
    monkeypatch.setattr(store, "manifest", dict)
    assert store.get(AMD, ARCH).sha256 == sha256_of_verified()
    assert any("cannot write" in line and "Set JAX_MX_CACHE" in line for line in caplog.messages)


def test_a_process_with_many_open_files_compiles(cache):
    """`select.select` takes no descriptor from 1024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip("this process may not open so many files")
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
        while stack.enter_context(Path(os.devnull).open("rb")).fileno() < 1024:
            pass
        worker = compiler.Worker("flydsl")
        stack.callback(worker.stop)
        answer = worker.ask({"binary": "unknown", "arch": ARCH}, cache / "pycache")
    assert "error" in answer


def test_a_compiler_that_dies_or_refuses(cache, tmp_path, monkeypatch):
    """An error with the reason, not a hang; and the next request is served."""
    (tmp_path / "worker.py").write_text("raise SystemExit('no memory')")
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "WORKER", tmp_path / "worker.py")
        with pytest.raises(compiler.CompileError, match="gave no answer: no memory"):
            compiler.Worker("flydsl").ask({"binary": AMD.name, "arch": ARCH}, tmp_path / "pycache")
    monkeypatch.setattr(
        compiler,
        "compile_kernel",
        lambda *_: (_ for _ in ()).throw(compiler.CompileError("it does not compile")),
    )
    x = jnp.ones((32, 64), jnp.float32)
    with emulate(ARCH), lowered_apart():
        got = jax.jit(lambda x: jax_mx.quantize(x, axis=-2))(x)  # "xla", and says so
        with pytest.raises(compiler.CompileError, match="it does not compile"):
            jax.jit(lambda x: jax_mx.quantize(x, axis=-2, implementation="flydsl"))(x)
    assert_same_array(got, jax_mx.quantize(x, axis=-2))
    store._failed.clear()


def test_without_a_dsl_there_is_a_reason(cache, monkeypatch, caplog):
    monkeypatch.setattr(toolchains, "_installed", lambda name: None)
    assert "; pip install flydsl==0.5.0 ziglang==0.17.1 pyelf" in store.obstacle(AMD, ARCH)
    with pytest.raises(
        compiler.CompileError, match=r"to compile it takes flydsl 0\.5\.0, it is not"
    ):
        store.get(AMD, ARCH)
    monkeypatch.setattr(toolchains, "_installed", lambda name: "0.1")
    assert "here is 0.1" in store.obstacle(AMD, ARCH)


def test_processes_of_one_program_must_agree(cache, monkeypatch):
    """Where the tables have a kernel and this process cannot get it, it stops."""
    monkeypatch.setattr(toolchains, "_installed", lambda name: None)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    x = jnp.ones((32, 64), jnp.bfloat16)
    with emulate(ARCH), lowered_apart():
        with pytest.raises(RuntimeError, match="all must take the same"):
            jax.jit(jax_mx.quantize)(x)
        jax.jit(lambda x: jax_mx.quantize(x, implementation="xla"))(x)


@pytest.mark.parametrize(
    ("held", "call"),
    [
        ("quantize_last_bfloat16_mxfp8_e4m3", jax_mx.fake_quantize),
        ("quantize_last_bfloat16_mxfp4_e2m1_sr",
            lambda x: jax_mx.quantize(x, "mxfp4_e2m1", axis=-2,
            rounding=jax_mx.Stochastic(jax.random.key(0)))),
    ],
)  # fmt: skip
def test_processes_agree_on_kernels_too(held, call, cache, monkeypatch, caplog):
    """A process that has the kernel of another way, but not the one that the tables promise."""
    variants = {v.name: v for v in SHIPPED if v.implementation == "flydsl"}
    store.get(variants[held], ARCH)
    monkeypatch.setattr(toolchains, "_installed", lambda name: None)
    x = jnp.ones((32, 64), jnp.bfloat16)
    with emulate(ARCH), lowered_apart():
        calls.say_once.cache_clear()
        with caplog.at_level(logging.WARNING, logger="jax_mx"):
            jax.jit(call)(x)
        line = caplog.messages[1]  # behind the one of the kernel that was compiled
        assert "this installation holds no binary quantize_" in line
        assert "pip install" in line and held in line
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        with pytest.raises(RuntimeError, match="all must take the same"):
            jax.jit(lambda x: call(x))(x)


def test_programs_name_kernels_and_exports_carry_each_once():
    """A jitted call holds no binary; an exported program one of each, whatever its call sites."""
    x = jnp.ones((64, 64), jnp.bfloat16)

    def many(x):
        return [jax_mx.quantize(x * (i + 1)).values for i in range(20)]

    with emulate(ARCH):
        text = jax.jit(many).lower(x).as_text()
    sha256 = sha256_of_verified()
    assert sha256 in text and "7FELF" not in text
    assert len(text) < 60_000
    exported = jax.export.export(
        jax.jit(many), platforms=["rocm"], disabled_checks=jax_mx.DISABLE_EXPORT_CHECKS
    )(x)
    blob = exported.serialize()
    for arch in ("gfx942", "gfx950"):
        assert blob.count(store.get(AMD, arch).image[:2000]) == 1


@pytest.mark.thorough
def test_many_calls_of_mxfp4s_gradients_are_a_small_program():
    """A gradient rotated and rounded both ways: with the kernel in each of 100 it was 141 MB."""
    key = jax.random.key(0)
    options = {"hadamard": jax_mx.Hadamard(), "rounding": jax_mx.Stochastic(key)}
    options["transpose"] = (False, True)

    def many(x):  # of a shape each: nothing is shared
        rows = [x[: 32 * (i + 1)] for i in range(30)]
        return [jax_mx.quantize_both(x, "mxfp4_e2m1", **options) for x in rows]

    with emulate(ARCH):
        lowered = jax.jit(many).lower(jnp.ones((960, 64), jnp.bfloat16))
        text = lowered.as_text()
    assert "jax_mx_launch" in text
    assert len(lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()) < 1.2e6


@pytest.mark.thorough
def test_a_program_whose_kernel_is_nowhere_says_what_to_do(tmp_path):
    """A serialized executable is loaded elsewhere; nothing is lowered there."""
    code = f"""
        import pickle, pathlib, sys
        import jax, jax.numpy as jnp, numpy as np
        import jax_mx
        from jax.experimental import serialize_executable
        from jax_mx.testing import emulate
        path = pathlib.Path({str(tmp_path / "program")!r})
        x = jnp.ones((64, 64), jnp.bfloat16)
        with emulate("gfx950"):
            if sys.argv[1] == "write":
                compiled = jax.jit(jax_mx.quantize).lower(x).compile()
                compiled(x)
                path.write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
            else:
                try:
                    parts = pickle.loads(path.read_bytes())
                    loaded = serialize_executable.deserialize_and_load(*parts)
                    q = loaded(x)
                    print((np.asarray(q.values) == np.asarray(jax_mx.quantize(x).values)).all())
                except Exception as error:
                    print(" ".join(str(error).split()))
    """

    def run(options: str, cache: Path) -> str:
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_MX_CACHE": str(cache), "XLA_FLAGS": ""}
        process = Running(textwrap.dedent(code), options, env=env)
        status, out, errors = process.wait(200)
        process.kill()
        assert status == 0, errors[-3000:]
        return out.strip()

    run("write", tmp_path / "cache")
    assert run("read", tmp_path / "cache") == "True"
    if any(facts["name"] == f"{AMD.name}.{ARCH}" for facts in store.manifest().values()):
        return  # the package has it
    said = run("read", tmp_path / "another")
    assert sha256_of_verified()[:12] in said and "JAX_MX_CACHE" in said, said


def test_the_manifest_of_a_wheel_comes_before_the_cache(cache, tmp_path, monkeypatch):
    binary = store.get(AMD, ARCH)
    folder = tmp_path / "binaries"
    folder.mkdir()
    (folder / binary.sha256).write_bytes(binary.image)
    (folder / "manifest.json").write_text(json.dumps({f"{AMD.name}.{ARCH}": binary.facts}))
    monkeypatch.setattr(store, "BINARIES", folder)
    monkeypatch.setattr(
        store, "manifest", lambda: json.loads((folder / "manifest.json").read_text())
    )
    assert store.find(AMD, ARCH).folder == folder
    stale = {**binary.facts, "key": "of another source"}
    (folder / "manifest.json").write_text(json.dumps({f"{AMD.name}.{ARCH}": stale}))
    assert store.find(AMD, ARCH).folder == cache / "kernels"


def test_a_damaged_binary_of_the_package_counts_as_missing(cache, tmp_path, monkeypatch):
    binary = store.get(AMD, ARCH)
    folder = tmp_path / "binaries"
    folder.mkdir()
    (folder / binary.sha256).write_bytes(binary.image[:7])
    monkeypatch.setattr(store, "BINARIES", folder)
    monkeypatch.setattr(store, "manifest", lambda: {f"{AMD.name}.{ARCH}": binary.facts})
    assert store.find(AMD, ARCH).folder == cache / "kernels"


@pytest.fixture
def fresh():
    """Programs are lowered anew, and not found afterwards."""
    with lowered_apart():
        yield


@pytest.mark.usefixtures("fresh")
def test_files_may_go_and_folders_change(cache, tmp_path, monkeypatch):
    """A process keeps a kernel that it lowered once: to run, to lower again, to export."""
    x = jnp.ones((64, 96), AMD.dtype)
    want = jax_mx.quantize(x, AMD.formats[0])
    with emulate(ARCH):
        assert jax_mx.is_supported("quantize", ARCH, dtype=AMD.dtype)[0]
        store.get(AMD, ARCH)
        shutil.rmtree(cache)
        assert_same_array(jax_mx.quantize(x, AMD.formats[0]), want)
        monkeypatch.setenv("JAX_MX_ARCHS", ARCH)
        exported = jax.export.export(
            jax.jit(lambda x: jax_mx.quantize(x, AMD.formats[0]).values),
            platforms=["rocm"],
            disabled_checks=jax_mx.DISABLE_EXPORT_CHECKS,
        )(x)
        assert sha256_of_verified() in exported.mlir_module()
        monkeypatch.setenv("JAX_MX_CACHE", str(tmp_path / "another"))
        assert_same_array(
            jax_mx.quantize(x[:32], AMD.formats[0]), jax.tree.map(lambda a: a[:32], want)
        )


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("archs", ["sm_90a", "none", "nonsense"])
def test_exports_for_a_platform_that_jax_mx_archs_leaves_out(archs, monkeypatch, caplog):
    monkeypatch.setenv("JAX_MX_ARCHS", archs)

    def export(implementation):
        run = jax.jit(lambda x: jax_mx.quantize(x, implementation=implementation).values)
        checks = jax_mx.DISABLE_EXPORT_CHECKS
        x = jnp.ones((32, 64), jnp.bfloat16)
        return jax.export.export(run, platforms=["rocm"], disabled_checks=checks)(x)

    if archs == "nonsense":
        with pytest.raises(ValueError, match="JAX_MX_ARCHS names nonsense; it may name gfx942"):
            export(None)
        return
    calls.say_once.cache_clear()
    assert store.TARGET not in export(None).mlir_module()
    assert any("JAX_MX_ARCHS names no chip of rocm" in line for line in caplog.messages)
    with pytest.raises(NotImplementedError, match="JAX_MX_ARCHS names no chip of rocm"):
        export("flydsl")


def test_no_process_can_be_started(cache, tmp_path, monkeypatch):
    for executable in ("/nonexistent/python", None):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(compiler.CompileError, match="no process can be started"):
            compiler.Worker("flydsl").ask({}, tmp_path)


def test_eager_calls_are_quick():
    """No program is traced for a call that came before."""
    x = jnp.asarray(random_bits((8, 64), "bfloat16"))
    jax.block_until_ready(jax_mx.quantize(x))
    jitted: Any = quantized
    traced = jitted._cache_size()
    count = 200
    start_of = time.perf_counter()
    for _ in range(count):
        q = jax_mx.quantize(x)
    jax.block_until_ready(q)
    seconds = (time.perf_counter() - start_of) / count
    assert seconds < 1e-3  # 60 us on an idle machine; it was 400 and more
    assert np.asarray(q.values).size and jitted._cache_size() == traced
