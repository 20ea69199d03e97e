"""Code in processes of their own, which begin with JAX imported, and nothing else.

Importing JAX takes two seconds, and dozens of tests want a process. A fork has no backend, no
devices and nothing of jax_mx; what it is given in the environment counts as in a new process.
"""

import atexit
import functools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path

PRELOADED = ("jax", "jax.numpy", "jax.ffi", "jax.interpreters.mlir", "jax.extend.core")
_OWN = ("JAX_PLATFORMS",)  # what JAX reads when it is imported, and may be told afterwards


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    return context


def _child(code: str, args: tuple[str, ...], env: dict[str, str], out: str) -> None:
    import jax

    for stream, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{out}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, stream)
    names = [n for n in {*env, *os.environ} if n.startswith("JAX_") and n[4:7] != "MX_"]
    for name in names:
        if env.get(name) != os.environ.get(name):
            assert name in _OWN, f"{name} is read when JAX is imported, which it is already"
            jax.config.update(name.lower(), env.get(name))
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["-c", *args]
    try:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
    finally:
        # Before Python 3.13 no process of multiprocessing does this at its end, and a coordinator
        # of jax.distributed that does not wait for the others at its end ends them too.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()


class Running:
    """A process that runs code."""

    def __init__(self, code: str, *args: str, env: Mapping[str, str] | None = None):
        """Starts it; `env` is the whole environment, by default this one's."""
        self._folder = tempfile.TemporaryDirectory()
        child_args = (code, args, dict(os.environ if env is None else env), self._folder.name)
        self._process = _context().Process(target=_child, args=child_args, daemon=True)
        self._process.start()

    def wait(self, timeout: float) -> tuple[int | None, str, str]:
        """Its exit status, None if it had not ended; what it wrote to stdout and to stderr."""
        self._process.join(timeout)
        files = (Path(self._folder.name) / name for name in ("stdout", "stderr"))
        out, errors = (file.read_text() if file.exists() else "" for file in files)
        return self._process.exitcode, out, errors

    def kill(self) -> None:
        """Ends it, if it has not ended."""
        self._process.kill()
        self._process.join()
        self._folder.cleanup()
