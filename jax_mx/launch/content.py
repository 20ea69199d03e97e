"""The content key of a kernel: a hash of all that its binary and its launch facts depend on.

That is the kernels' files for its DSL, every table of `jax_mx.facts`, every source of floats, the
arch's table of tiles, the compilers' versions, the variant and the arch. Whole files are hashed, so
that nothing can be forgotten; whoever edits a comment compiles again.
"""

import functools
import hashlib
import re
from pathlib import Path

from jax_mx.facts.product_kernels import Binary
from jax_mx.launch.toolchains import COMPILERS

PACKAGE = Path(__file__).resolve().parents[1]
# Modules of kernels/ that decide when and where kernels are compiled, not what they are.
_DRIVERS = ("build.py", "shipped.py")
# Modules of launch/ that binaries or their launch facts depend on.
_LAUNCH = ("chips", "code_object", "rule")


def sources(dsl: str, arch: str, package: Path = PACKAGE) -> list[Path]:
    """The files that a DSL's binaries for an arch depend on, in a fixed order."""
    folders = [package / name for name in ("facts", "sources", "kernels", f"kernels/{dsl}")]
    found = [path for folder in folders for path in folder.glob("*.py")]
    found += _tables(folders[-1] / "tuning", arch)
    found += [package / "launch" / f"{name}.py" for name in _LAUNCH]
    return sorted(path for path in found if path.name not in _DRIVERS)


def _tables(folder: Path, arch: str) -> list[Path]:
    """An arch's table of tiles, and those of other archs that it takes rows of."""
    names = ["__init__", arch]
    for name in names:  # which grows
        text = (folder / f"{name}.py").read_text("utf-8")
        names += [each for each in re.findall(r"\.tuning\.(\w+)", text) if each not in names]
    return [folder / f"{name}.py" for name in names]


@functools.cache
def _digest(dsl: str, arch: str, package: Path) -> str:
    total = hashlib.sha256()
    for path in sources(dsl, arch, package):
        data = path.read_bytes()
        total.update(f"{path.relative_to(package)} {len(data)} ".encode())
        total.update(data)
    return total.hexdigest()


def key_of(variant: Binary, arch: str, package: Path = PACKAGE) -> str:
    """The key of a variant's binary for an arch, hexadecimal; `package` holds the sources."""
    dsl = variant.implementation
    what = (_digest(dsl, arch, package), *sorted(COMPILERS[dsl].items()), variant.name, arch)
    return hashlib.sha256(" ".join(map(str, what)).encode()).hexdigest()
