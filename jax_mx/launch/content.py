"""The content key of a kernel: a hash of all that its binary and its launch facts depend on.

These are the files that the binary names, the modules of this package that compile it, the
compilers' versions, the binary's name and the arch. Whole files are hashed, so that nothing can be
forgotten; whoever edits a comment compiles again.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from jax_mx.launch.binary import Binary, Files
from jax_mx.launch.toolchains import COMPILERS

FOLDER = Path(__file__).resolve().parent
_COMPILING = {  # by DSL, the modules that say which bytes and which launch rules come out
    "cutedsl": ("chips", "cutedsl", "entry", "rule"),
    "flydsl": ("chips", "code_object", "entry", "flydsl", "flydsl_host", "rule"),
}


def files_of(dsl: str, folder: Path = FOLDER) -> Files:
    """The files of this package that a DSL's binaries depend on."""
    return tuple((f"launch/{name}.py", folder / f"{name}.py") for name in _COMPILING[dsl])


@functools.cache
def _digest(files: Files) -> str:
    total = hashlib.sha256()
    for name, path in sorted(files):
        data = path.read_bytes()
        total.update(f"{name} {len(data)} ".encode())
        total.update(data)
    return total.hexdigest()


def key_of(binary: Binary, arch: str, files: Files | None = None) -> str:
    """The key of a binary for an arch, hexadecimal.

    Args:
      binary: the binary that is compiled.
      arch: for what.
      files: the files that it depends on; None: the files that it names, and this package's.
    """
    dsl = binary.implementation
    files = (*binary.files(arch), *files_of(dsl)) if files is None else files
    parts = (_digest(files), *sorted(COMPILERS[dsl].items()), binary.name, arch)
    return hashlib.sha256(" ".join(map(str, parts)).encode()).hexdigest()
