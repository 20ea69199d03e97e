"""Compiles kernels on demand, in processes of their own: a library never imports a kernel DSL.

There is one process per DSL, as two DSLs cannot share one. It starts at the first kernel and stays,
as importing a DSL takes longer than compiling with it. It reads requests from its standard input
and answers on a pipe, one line of JSON each; see launch/worker.py.
"""

import atexit
import base64
import contextlib
import json
import os
import pickle
import selectors
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from jax_mx.launch import files
from jax_mx.launch.binary import Binary
from jax_mx.launch.chips import ARCHS

WORKER = Path(__file__).with_name("worker.py")
TIMEOUT = 300  # seconds for one kernel, far more than any took on a busy machine


class CompileError(RuntimeError):
    """A kernel could not be compiled."""


class DiskError(CompileError):
    """A kernel could not be compiled for want of room for temporary files."""


class Worker:
    """One compiling process."""

    def __init__(self, dsl: str):
        self.dsl, self.lock = dsl, threading.Lock()
        self.process: subprocess.Popen | None = None
        self.answers: IO[bytes] | None = None
        self.errors: IO[bytes] | None = None
        self.scratch: Path | None = None

    def ask(
        self, request: dict[str, str], bytecode: Path, scratch: Path | None = None
    ) -> dict[str, Any]:
        """Its answer to a request.

        Args:
          request: the description of the binary.
          bytecode: the folder in which a process that is started keeps byte code.
          scratch: the folder of its temporary files; None: where Python puts them.

        Raises:
          CompileError: it gave none.
        """
        with self.lock:
            if scratch != self.scratch:
                self.stop()
                self.scratch = scratch
            if self.process is None or self.process.poll() is not None:
                try:
                    self._start(bytecode)
                except (OSError, TypeError) as error:  # no interpreter, no right to start one
                    self.stop()
                    raise CompileError(f"no process can be started: {error}") from error
            assert self.process is not None and self.process.stdin and self.answers and self.errors
            try:
                asked = json.dumps({**request, "path": _path()})
                self.process.stdin.write(asked.encode() + b"\n")
                self.process.stdin.flush()
                line = self.answers.readline() if _is_ready(self.answers) else b""
            except OSError:  # it has died
                line = b""
            if not line.endswith(b"\n"):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(1)  # so that its last words are there
                last_words = self._last_words()
                self.stop()
                raise CompileError(f"the compiler of {self.dsl} gave no answer{last_words}")
            return json.loads(line)

    def _start(self, bytecode: Path) -> None:
        self.stop()
        answers, give = os.pipe()
        self.errors = os.fdopen(os.memfd_create("jax_mx"), "w+b")  # no disk is full of it
        # These variables change the code, and content keys do not know them.
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("CUTE_DSL_", "FLYDSL_", "JAX_", "XLA_", "PYTHON"))
        }
        # Byte code of the DSL that nobody may have kept: without it a start takes 4 s, not 1.
        env |= {
            "PYTHONPATH": os.pathsep.join(_path()),
            "PYTHONPYCACHEPREFIX": str(bytecode),
        }
        if self.scratch is not None:
            env["TMPDIR"] = str(self.scratch)
            env.setdefault("HOME", str(self.scratch))  # compilers ask for one, and for a name
            env.setdefault("USER", "jax_mx")
        self.answers = os.fdopen(answers, "rb")
        try:
            self.process = subprocess.Popen(
                [sys.executable, str(WORKER), str(give)],
                stdin=subprocess.PIPE,
                stdout=self.errors,
                stderr=self.errors,
                pass_fds=[give],
                env=env,
            )
        finally:
            os.close(give)

    def _last_words(self) -> str:
        if self.errors is None:
            return ""
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    def stop(self) -> None:
        """Ends the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            if self.process.stdin:
                self.process.stdin.close()
            self.process = None
        for file in (self.answers, self.errors):
            if file is not None:
                file.close()
        self.answers = self.errors = None


def _path() -> list[str]:
    """The folders that this process imports from; in a notebook one is "", the working folder."""
    return [str(Path(path).absolute()) for path in sys.path]


def _is_ready(file: IO[bytes]) -> bool:
    """Whether there is something to read, within `TIMEOUT`; also where many files are open."""
    with selectors.DefaultSelector() as selector:
        selector.register(file, selectors.EVENT_READ)
        return bool(selector.select(TIMEOUT))


_workers = {dsl: Worker(dsl) for dsl in ARCHS}


@atexit.register
def _stop() -> None:
    for worker in _workers.values():
        worker.stop()


ROOM = 1 << 20  # bytes, more than the temporary files of one kernel take


def _with_room(folders: Sequence[Path]) -> Path | None:
    """The first of some folders that takes a compiler's temporary files."""
    return next((folder for folder in folders if files.has_room(folder, ROOM)), None)


def compile_kernel(
    binary: Binary, arch: str, folder: Path | None = None
) -> tuple[bytes, dict[str, Any]]:
    """The bytes of a binary for an arch, and its facts: name, abi, key, sha256, launches.

    Args:
      binary: the binary that is compiled.
      arch: for what.
      folder: of kernels, which also takes byte code of the DSL's Python sources and, where the
        folder of temporary files has no room, those; or None.

    Raises:
      DiskError: no folder has room for temporary files.
      CompileError: there is none; says why.
    """
    asked = base64.b64encode(pickle.dumps(binary)).decode()
    request, worker = {"binary": asked, "arch": arch}, _workers[binary.implementation]
    folders = [*_temporary(), *([] if folder is None else [folder]), Path("/dev/shm")]
    while scratch := _with_room(folders):
        why = ""
        try:
            answer = worker.ask(request, (folder or scratch) / "pycache", scratch)
        except CompileError as error:
            answer, why = {}, str(error)
        if "image" in answer:
            return base64.b64decode(answer["image"]), answer["facts"]
        if files.has_room(scratch, ROOM):  # the disk is not to blame
            raise CompileError(
                why or f"{binary.name} for {arch} does not compile: {answer['error']}"
            )
        folders.remove(scratch)
    raise DiskError(
        f"{binary.name} for {arch} is not compiled: no folder has room for temporary files "
        f"({', '.join(map(str, folders)) or 'none is left'}); make room, or set TMPDIR"
    )


def _temporary() -> list[Path]:
    """The folder of temporary files, if there is one."""
    try:
        return [Path(tempfile.gettempdir())]
    except OSError:
        return []
