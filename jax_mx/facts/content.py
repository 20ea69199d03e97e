"""The content key of a kernel: a hash of all that its binary and its launch facts depend on.

That is the kernels' sources for its DSL, every table of `jax_mx.facts`, the compilers' versions,
the variant and the arch. Whole files are hashed, so that nothing can be forgotten; whoever edits a
comment compiles again.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from jax_mx.facts.products import Binary
from jax_mx.facts.toolchains import COMPILERS

PACKAGE = Path(__file__).resolve().parents[1]
# Modules of kernels/ that decide when and where kernels are compiled, not what they are.
_DRIVERS = ("build.py", "worker.py", "sass.py", "gcn.py", "paths.py")


def sources(dsl: str, package: Path = PACKAGE) -> list[Path]:
    """The files that a DSL's binaries depend on, in a fixed order."""
    folders = (package / "facts", package / "kernels")
    found = [*folders[0].glob("*.py"), *folders[1].glob("*.py")]
    found += (package / "kernels" / dsl).rglob("*.py")
    return sorted(path for path in found if path.name not in _DRIVERS)


@functools.cache
def _digest(dsl: str, package: Path) -> str:
    total = hashlib.sha256()
    for path in sources(dsl, package):
        data = path.read_bytes()
        total.update(f"{path.relative_to(package)} {len(data)} ".encode())
        total.update(data)
    return total.hexdigest()


def key_of(variant: Binary, arch: str, package: Path = PACKAGE) -> str:
    """The key of a variant's binary for an arch, hexadecimal; `package` holds the sources."""
    dsl = variant.implementation
    what = (_digest(dsl, package), *sorted(COMPILERS[dsl].items()), variant.name, arch)
    return hashlib.sha256(" ".join(map(str, what)).encode()).hexdigest()
