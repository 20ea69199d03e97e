"""The store of kernels: binaries by their content, compiled on demand.

A program names a kernel by its sha256. The handler reads its bytes when the call is instantiated
(ffi/launch.cc), from the folders that this module registers: `jax_mx/binaries`, which a wheel may
bring, and a user's cache. The package's manifest has the sha256 and the launch rules of each
binary; the cache has them under the kernel's content key (launch/content.py).

Where neither holds a binary, a process of its own compiles it, if its DSL is here (compiler.py).
"""

import atexit
import base64
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jax_mx.launch import compiler, files, toolchains
from jax_mx.launch.binary import Binary
from jax_mx.launch.chips import ARCHS, arch_of
from jax_mx.launch.content import key_of
from jax_mx.launch.rule import Launch

try:
    from jax_mx.launch import _ffi
except ImportError as error:
    raise ImportError(
        "jax_mx has no compiled part here (jax_mx/launch/_ffi). In the source's folder Python "
        "finds the source before what is installed: run it elsewhere, or pip install -e ."
    ) from error

TARGET = "jax_mx_launch"
BINARIES = Path(__file__).parents[1] / "binaries"
logger = logging.getLogger("jax_mx")


@dataclasses.dataclass(frozen=True)
class Artifact:
    """A compiled kernel.

    Attributes:
      facts: sha256; launches: by name, the launch rule, in the words of launch/rule.py.
      folder: where its binary lies, in a file called by its sha256.
      image: the binary.
    """

    facts: dict[str, Any]
    folder: Path
    image: bytes = dataclasses.field(repr=False)

    @property
    def sha256(self) -> str:
        """The binary's hash, hexadecimal."""
        return self.facts["sha256"]

    def attributes(self, launch: str, scalars: Mapping[str, int], carry: bool) -> dict[str, Any]:
        """One kernel's attributes of the custom call.

        Args:
          launch: the name of the launch whose entries the call takes.
          scalars: the values of scalars that have a name.
          carry: whether the call carries the binary, for a program that leaves this machine.
        """
        rule = Launch.from_json(self.facts["launches"][launch])
        return rule.attributes(self.sha256, scalars, self.image if carry else None)


# ---- the package and the cache ---
def cache() -> Path | None:
    """The folder of kernels that were compiled on demand; JAX_MX_CACHE names another.

    None where none can be named: without a home, or by a name that is no text.
    """
    if named := os.environ.get("JAX_MX_CACHE"):
        return _absolute(named)
    folder = _absolute(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return folder and folder / "jax_mx"


@functools.cache
def _absolute(path: str) -> Path | None:
    """A path as it is meant when it is first asked for, wherever the process goes later."""
    try:
        path.encode()
        return Path(path).expanduser().absolute()
    except (RuntimeError, OSError, ValueError):  # no home, no working folder, no text
        return None


@functools.cache
def manifest() -> dict[str, dict[str, Any]]:
    """`{"<binary>.<arch>": facts}` for every binary that the package holds."""
    path = BINARIES / "manifest.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def find(binary: Binary, arch: str) -> Artifact | None:
    """The kernel, if the package or the cache holds it whole; it is not compiled."""
    key = key_of(binary, arch)
    facts = manifest().get(f"{binary.name}.{arch}")
    if facts is not None and facts["key"] == key:
        artifact = _whole(key, facts, BINARIES)
        if artifact is not None:
            return artifact
    folders = (cache(), *_own)
    kept = (_cached(key, folder) for folder in folders if folder is not None)
    return next(filter(None, kept), None) or _brought.get(key)


# ---- kernels that a program carries to where shards are compiled ---
_brought: dict[str, Artifact] = {}  # by content key; also those that no disk took


def packed(binary: Binary, arch: str, artifact: Artifact) -> dict[str, Any]:
    """A kernel as JSON has it."""
    image = base64.b64encode(artifact.image).decode()
    return {"key": key_of(binary, arch), "facts": artifact.facts, "image": image}


def unpack(kernel: Mapping[str, Any]) -> None:
    """Takes a kernel that `packed` gave: this process has it from now on."""
    image = base64.b64decode(kernel["image"])
    if hashlib.sha256(image).hexdigest() == kernel["facts"]["sha256"]:
        _brought[kernel["key"]] = Artifact(kernel["facts"], Path(), image)


# By folder and key: what this process has read and found whole. The bytes stay: files may go.
_read: dict[tuple[Path, str], Artifact] = {}


def _whole(key: str, facts: dict[str, Any], folder: Path) -> Artifact | None:
    """The kernel of these facts, unless its file is missing or damaged."""
    if (folder, key) not in _read:
        try:
            image = (folder / facts["sha256"]).read_bytes()
        except OSError:
            return None
        if hashlib.sha256(image).hexdigest() != facts["sha256"]:
            return None
        _read[folder, key] = Artifact(facts, folder, image)
    return _read[folder, key]


def _cached(key: str, folder: Path) -> Artifact | None:
    """The kernel that a cache has under this key, unless it is missing or damaged."""
    if (folder / "kernels", key) in _read:
        return _read[folder / "kernels", key]
    try:
        digest, _, text = (folder / f"{key}.json").read_text("utf-8").partition("\n")
        if hashlib.sha256(text.encode()).hexdigest() != digest:
            return None  # damaged: it is compiled again
        return _whole(key, json.loads(text), folder / "kernels")
    except (OSError, ValueError):
        return None


def _keep(key: str, image: bytes, facts: dict[str, Any], folder: Path | None) -> Artifact:
    """Writes a kernel into a folder; whoever reads meanwhile finds all of it or nothing.

    Where the folder does not take it, this process's own does, or this process's memory.
    """
    text = json.dumps(facts)
    digest = hashlib.sha256(text.encode()).hexdigest()
    while folder is not None:
        try:
            files.replace(folder / "kernels" / facts["sha256"], image)
            files.replace(folder / f"{key}.json", f"{digest}\n{text}".encode())
        except OSError as error:
            folder = _instead_of(folder, error)
        else:
            artifact = Artifact(facts, folder / "kernels", image)
            return _read.setdefault((folder / "kernels", key), artifact)
    return _brought.setdefault(key, Artifact(facts, Path(), image))


@contextlib.contextmanager
def _alone(key: str, folder: Path | None) -> Iterator[None]:
    """While one process compiles a kernel, others that want the same one wait for it.

    A process that is killed gives its lock back. Where a file system has no locks, or takes no file
    now, each compiles.
    """
    if folder is None:
        yield
        return
    path = folder / f".{key}.lock"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(files.locked(path))
            stack.callback(files.remove, path)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---- what lowering asks ---
def obstacle(binary: Binary, arch: str) -> str:
    """Why a binary that is not here cannot be made, and what to do; empty where one can be had."""
    return "" if find(binary, arch) else toolchains.obstacle(binary.implementation)


def lacking(binary: Binary, arch: str) -> str:
    """That a binary is not here."""
    return f"this installation holds no binary {binary.name} for {arch}"


def get(binary: Binary, arch: str) -> Artifact:
    """The kernel, compiled if need be.

    Raises:
      compiler.CompileError: no binary is there and none can be made; says why.
    """
    artifact = find(binary, arch) or _compiled(binary, arch)
    if artifact.sha256 not in _interned:  # the handler keeps it, whatever becomes of files
        _ffi.intern(artifact.sha256, artifact.image)
        _interned.add(artifact.sha256)
    return artifact


_interned: set[str] = set()


def _compiled(binary: Binary, arch: str) -> Artifact:
    """The kernel, compiled now; or by another process while this one waited."""
    if why := obstacle(binary, arch):
        raise compiler.CompileError(f"{lacking(binary, arch)}; {why}")
    key, folder = key_of(binary, arch), writable_cache()
    with _alone(key, folder):
        # Whoever had the lock before may have compiled it.
        artifact = None if folder is None else _cached(key, folder)
        if artifact is not None:
            return artifact
        if key in _failed:
            raise _failed[key]
        location = folder or "the memory of this process"
        logger.warning("jax_mx: compiling %s for %s (kept in %s)", binary.name, arch, location)
        try:
            image, facts = compiler.compile_kernel(binary, arch, folder)
        except compiler.DiskError:
            raise  # the next time there may be room
        except compiler.CompileError as error:
            _failed[key] = error
            raise
        return _keep(key, image, facts, folder)


# By key: what did not compile in this process; it would not the next time.
_failed: dict[str, compiler.CompileError] = {}


def exported(chips: Sequence[str]) -> list[str]:
    """The chips that exported programs carry kernels for: as JAX_MX_ARCHS says, or all.

    "none" stands for none. "native" stands for all here: it means the machine that builds.

    Raises:
      ValueError: JAX_MX_ARCHS has a name that is neither an arch's nor a chip's.
    """
    asked = os.environ.get("JAX_MX_ARCHS", "").replace(",", " ").split()
    names = {name.partition(":")[0] for name in asked}
    known = {arch for archs in ARCHS.values() for arch in archs}
    known |= {chip for archs in ARCHS.values() for chips in archs.values() for chip in chips}
    if unknown := names - known - {"all", "native", "none"}:
        allowed = ", ".join(sorted(known))
        raise ValueError(f"JAX_MX_ARCHS names {', '.join(sorted(unknown))}; it may name {allowed}")
    if not names or names & {"all", "native"}:
        return [*chips]
    return [chip for chip in chips if names & {chip, arch_of(chip)}]


def names_chips() -> bool:
    """Whether the user said for which chips programs are exported."""
    return bool(os.environ.get("JAX_MX_ARCHS", "").strip())


def writable_cache() -> Path | None:
    """`cache()`, or a folder of this process where that cannot be written, or None."""
    folder = cache()
    if folder is None:
        named = os.environ.get("JAX_MX_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return _instead_of(ascii(named)[1:-1], "it names no folder here")
    while folder is not None:
        try:
            files.make_folder(folder / "kernels")
            files.require_writable(folder)
        except OSError as error:
            folder = _instead_of(folder, error)
        else:
            break
    return folder


def _instead_of(folder: Path | str, error: OSError | str) -> Path | None:
    """This process's folder, where another one cannot be written; None where that cannot either.

    The first time a line says why.
    """
    if folder in _own:
        return None
    if not _own:
        try:
            _own.append(Path(tempfile.mkdtemp(prefix="jax_mx-")))
            files.make_folder(_own[0] / "kernels")
            atexit.register(shutil.rmtree, _own[0], ignore_errors=True)
        except OSError:  # no folder for temporary files, or a full one
            _own[:] = [_NOWHERE]
        logger.warning(
            "jax_mx: cannot write %s (%s); kernels of this process go to %s. Set JAX_MX_CACHE "
            "to a folder that can be written to keep them",
            folder,
            error if isinstance(error, str) else error.strerror or error,
            "its memory" if _own[0] == _NOWHERE else _own[0],
        )
    return None if _own[0] == _NOWHERE else _own[0]


_own: list[Path] = []  # this process's folder, once it needs one
_NOWHERE = Path(os.devnull)


# ---- registration ---
def _register_folders() -> None:
    """Tells the handler where kernels lie that a call names and this process did not lower."""
    advice = (
        "call the function once under jax.jit on this machine, which compiles or finds them, or "
        "set JAX_MX_CACHE to the folder in which the machine that compiled the program keeps them"
    )
    folder = cache()
    folders = [BINARIES] if folder is None else [BINARIES, folder / "kernels"]
    _ffi.use_store([str(folder) for folder in folders], advice)


def register() -> None:
    """Registers the call target with JAX, and the store with the handler.

    Raises:
      ImportError: jaxlib's FFI is older than the one that the extension was compiled against; JAX
        would then refuse to start the whole platform.
    """
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text("utf-8")
    api = tuple(int(n) for n in re.findall(r"#define XLA_FFI_API_M(?:AJ|IN)OR (\d+)", header))
    if api < _ffi.API_VERSION:
        raise ImportError(
            f"jax_mx was compiled against version {_ffi.API_VERSION} of XLA's FFI, this jaxlib has "
            f"{api}; install a newer jaxlib or a jax_mx built for this one"
        )
    _register_folders()
    for platform, stages in _ffi.registrations().items():
        jax.ffi.register_ffi_target(TARGET, stages, platform=platform)
    jax.ffi.register_ffi_target_as_batch_partitionable(TARGET)
