"""Every file that is written survives a disk that is full, read-only, failing or gone.

`Faulty` stands for the `os` of `jax_mx.launch.files`, the one module that writes.
"""

import ast
import errno
import hashlib
import logging
import os
import resource
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from forks import Running

import jax_mx
from jax_mx.launch import compiler, files, store
from jax_mx.launch.content import key_of
from jax_mx.products.choices import Choice
from jax_mx.shipping.shipped import SHIPPED

OPERATIONS = ["open", "fdopen", "write", "close", "replace", "unlink", "makedirs"]
ERRORS = {
    "full": errno.ENOSPC,
    "read-only": errno.EROFS,
    "failing": errno.EIO,
    "gone": errno.ENOENT,
}
AMD, ARCH = next(v for v in SHIPPED if v.implementation == "flydsl"), "gfx950"
IMAGE = b"no kernel" * 100
FACTS = {"sha256": hashlib.sha256(IMAGE).hexdigest(), "launches": {}}


class Faulty:
    """`os`, one of whose functions fails from its n-th call on."""

    def __init__(self, operation, first, error):
        self.operation, self.left, self.error, self.failures = operation, first, error, 0

    def __getattr__(self, name):
        real = getattr(os, name)
        if name != self.operation:
            return real

        def call(*args, **options):
            self.left -= 1
            if self.left >= 0:
                return real(*args, **options)
            self.failures += 1
            if name in ("close", "fdopen"):  # a descriptor is gone, whatever close says
                os.close(args[0])
            raise OSError(self.error, os.strerror(self.error))

        return call


each_fault = pytest.mark.parametrize(
    ("operation", "first", "error"),
    [
        pytest.param(operation, first, ERRORS[error], id=f"{operation}-{first}-{error}")
        for operation in OPERATIONS
        for first in range(4)
        for error in ERRORS
    ],
)


def leftovers(folder):
    return [path for path in folder.rglob("*") if ".partial" in path.name]


def test_every_operation_is_made_to_fail():
    tree = ast.parse(Path(files.__file__).read_text())
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    used = {
        call.attr
        for call in calls
        if isinstance(call, ast.Attribute) and getattr(call.value, "id", "") == "os"
    }
    assert used - {"fspath"} == {*OPERATIONS}


def test_no_other_module_writes():
    """But those that run in builds, and the process that compiles."""
    writes = {"write_text", "write_bytes", "mkstemp", "NamedTemporaryFile", "TemporaryFile"}
    builds = ("verified.py", "flydsl.py", "build.py")
    for path in Path(jax_mx.__file__).parent.rglob("*.py"):
        if not any(part in builds for part in path.parts):
            tree = ast.walk(ast.parse(path.read_text()))
            assert not {n.attr for n in tree if isinstance(n, ast.Attribute)} & writes, path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, nothing read before, and a compiler that compiles at once."""
    monkeypatch.setenv("JAX_MX_CACHE", str(tmp_path / "cache"))
    for name, value in (("manifest", dict), ("_own", []), ("_read", {}), ("_brought", {})):
        monkeypatch.setattr(store, name, value)
    monkeypatch.setattr(store, "_interned", {FACTS["sha256"]})
    monkeypatch.setattr(store, "obstacle", lambda *_: "")
    monkeypatch.setattr(compiler, "compile_kernel", lambda *_: (IMAGE, FACTS))
    monkeypatch.setattr(store.tempfile, "tempdir", str(tmp_path))
    return tmp_path / "cache"


@each_fault
def test_a_kernel_is_had_and_nothing_half_done_stays(
    operation, first, error, cache, tmp_path, monkeypatch, caplog
):
    faulty = Faulty(operation, first, error)
    monkeypatch.setattr(files, "os", faulty)
    with caplog.at_level(logging.WARNING, logger="jax_mx"):
        for _ in range(2):
            assert store.get(AMD, ARCH).image == IMAGE
    said = [line for line in caplog.messages if "cannot write" in line]
    assert len(said) <= 1
    if said:
        assert f"cannot write {cache} ({os.strerror(error)})" in said[0]
        assert "Set JAX_MX_CACHE" in said[0]
    if operation != "unlink":
        assert not leftovers(tmp_path)
    monkeypatch.setattr(files, "os", os)
    binary = store.find(AMD, ARCH)
    assert binary is not None and binary.image == IMAGE
    if (cache / f"{key_of(AMD, ARCH)}.json").exists():  # what another process reads is whole
        store._read.clear()
        assert store.find(AMD, ARCH).image == IMAGE


def test_a_cache_on_a_full_disk_goes_to_another_folder(cache, monkeypatch):
    """By a limit of this process, no stand-in: no file may grow past it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        assert store.get(AMD, ARCH).image == IMAGE
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not leftovers(cache)


class Answers:
    """A compiler whose temporary files fill the first folder."""

    def __init__(self, full):
        self.full, self.asked = full, []

    def ask(self, request, bytecode, scratch):
        self.asked.append(scratch)
        if scratch == self.full:
            raise compiler.CompileError("the compiler of flydsl gave no answer")
        return {"image": "AAAA", "facts": {}}


def test_the_compiler_takes_a_folder_with_room(tmp_path, monkeypatch):
    worker, here, room = Answers(tmp_path / "tmp"), tmp_path / "tmp", files.has_room
    here.mkdir()
    monkeypatch.setitem(compiler._workers, "flydsl", worker)
    monkeypatch.setattr(compiler.tempfile, "tempdir", str(here))

    def has_room(folder, size):
        full_now = folder == here and here in worker.asked
        return not full_now and room(folder, size)

    monkeypatch.setattr(files, "has_room", has_room)
    assert compiler.compile_kernel(AMD, ARCH, tmp_path) == (b"\0\0\0", {})
    assert worker.asked == [here, tmp_path]


def test_no_folder_has_room_now_and_one_has_later(cache, monkeypatch):
    """XLA is not taken for good, and the sentence names the disk, not the compiler."""
    monkeypatch.undo()
    monkeypatch.setitem(compiler._workers, "flydsl", Answers(None))
    monkeypatch.setattr(files, "has_room", lambda *_: False)
    for name in ("find", "_cached"):
        monkeypatch.setattr(store, name, lambda *_: None)
    monkeypatch.setattr(store, "obstacle", lambda *_: "")
    for _ in range(2):
        with pytest.raises(compiler.DiskError, match="no folder has room for temporary files"):
            store.get(AMD, ARCH)
    assert key_of(AMD, ARCH) not in store._failed


@each_fault
@pytest.mark.parametrize("call", ["Choice.save", "save_safetensors"])
def test_what_a_caller_saves(call, operation, first, error, tmp_path, monkeypatch):
    """It is saved, or one sentence names the call and the disk; the old file stays whole."""
    path = tmp_path / "file.html"
    save = {
        "Choice.save": lambda notes: Choice((), notes).save(path),
        "save_safetensors": lambda notes: jax_mx.save_safetensors({notes[0]: jnp.ones(3)}, path),
    }[call]
    if call == "save_safetensors":
        pytest.importorskip("safetensors")
    save(("old",))
    old = path.read_bytes()
    faulty = Faulty(operation, first, error)
    monkeypatch.setattr(files, "os", faulty)
    try:
        save(("new",))
    except OSError as refusal:
        assert str(refusal).startswith(f"{call}: cannot write {path} ({os.strerror(error)}); ")
        assert "disk" in str(refusal) or error == errno.ENOENT
        assert path.read_bytes() == old and faulty.failures
    else:
        assert b"new" in path.read_bytes()
    if operation != "unlink":
        assert [p.name for p in tmp_path.iterdir()] == ["file.html"]


@pytest.mark.parametrize("call", ["Choice.save", "save_safetensors"])
def test_a_file_that_grows_past_what_the_disk_takes(call, tmp_path):
    """The library of safetensors writes by itself; a limit of this process makes it fail."""
    path = tmp_path / "file"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    big = {"w": np.ones(10_000, np.float32)}
    if call == "save_safetensors":
        pytest.importorskip("safetensors")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match=rf"^{call}: cannot write .*File too large"):
            if call == "Choice.save":
                Choice((), ("x" * 2000,)).save(path)
            else:
                jax_mx.save_safetensors(big, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [*tmp_path.iterdir()]


def test_a_choice_cannot_replace_a_folder(tmp_path):
    (tmp_path / "tuning").mkdir()
    with pytest.raises(OSError, match=r"^Choice\.save: cannot write .*tuning \(Is a directory\)"):
        Choice(()).save(tmp_path / "tuning")
    assert [path.name for path in tmp_path.iterdir()] == ["tuning"]


# ---- the environment at import ---
IMPORT = """
import os, pwd, sys
def nobody(uid): raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = nobody  # as the C library says of a number for a user
if sys.argv[1] == "gone":
    os.mkdir(sys.argv[2]); os.chdir(sys.argv[2]); os.rmdir(sys.argv[2])
import jax_mx
from jax_mx.launch import store
folders = {store.writable_cache() for _ in range(2)}
print(len(folders), *folders)
"""
ENVIRONMENTS = {
    "no home": {},
    "another's home": {"JAX_MX_CACHE": "~nosuchuser/x"},
    "another's cache": {"XDG_CACHE_HOME": "~nosuchuser/x", "JAX_MX_ARCHS": "nonsense"},
    "no text": {"JAX_MX_CACHE": "/tmp/\udcff\udcfe", "LC_ALL": "POSIX", "PYTHONUTF8": "0"},
    "gone": {"JAX_MX_CACHE": "relative", "JAX_MX_TUNING": "/nonexistent"},
}


def test_nothing_in_the_environment_stops_an_import(tmp_path):
    """A cache that cannot be had is said once, when it is first used."""
    names = ("HOME", "XDG_CACHE_HOME", "JAX_MX_CACHE", "JAX_MX_ARCHS", "JAX_MX_TUNING")
    plain = {name: value for name, value in os.environ.items() if name not in names}
    plain |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(jax_mx.__file__).parents[1])}
    args = {name: (name, str(tmp_path / "gone")) for name in ENVIRONMENTS}
    new = "no text"  # Python reads its variables when it starts
    command = [sys.executable, "-c", IMPORT, *args[new]]
    done = subprocess.run(command, env=plain | ENVIRONMENTS[new], capture_output=True, text=True)
    forks = {
        name: Running(IMPORT, *args[name], env=plain | env)
        for name, env in ENVIRONMENTS.items()
        if name != new
    }
    ended = {name: fork.wait(120) for name, fork in forks.items()}
    for fork in forks.values():
        fork.kill()
    ended[new] = done.returncode, done.stdout, done.stderr
    for name, (status, out, errors) in ended.items():
        assert status == 0, (name, errors)
        assert out.startswith("1 ") and "jax_mx-" in out, (name, out)
        assert errors.count("it names no folder here") == 1, (name, errors)
