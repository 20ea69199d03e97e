"""A kernel as `jax_mx.launch` sees it: the files behind its binary, and what compiles it.

The files are the kernels' for its DSL, every table without JAX, every source of floats and the
arch's table of tiles.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import ClassVar

from jax_mx.launch.binary import Files

PACKAGE = Path(__file__).resolve().parents[2]
# The modules that import no JAX: of all DSLs, and of one.
_TABLES = (
    *(f"formats/{name}.py" for name in ("__init__", "directions", "formats", "layouts", "windows")),
    "quantizing/facts/*.py",
    "quantizing/sources/*.py",
    "quantizing/kernels/*.py",
    "norms/source.py",
)
_KERNELS = ("quantizing/kernels/{}/*.py", "products/{}/*.py", "norms/{}.py")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A base of the classes whose instances say what is compiled.

    Attributes:
      op: the name of its computation.
      implementation: the DSL, "cutedsl" or "flydsl".
    """

    ROOM: ClassVar[str] = "quantizing.kernels"  # with a folder for each DSL
    op: str
    implementation: str

    @property
    def compiled_by(self) -> str:
        """See `launch.binary.Binary`."""
        return f"jax_mx.{self.ROOM}.{self.implementation}.compile:compile_variant"

    def files(self, arch: str) -> Files:
        """See `launch.binary.Binary`."""
        return files_of(self.implementation, arch)


@functools.cache
def files_of(dsl: str, arch: str, package: Path = PACKAGE) -> Files:
    """The files that a DSL's binaries for an arch follow from; `package` holds them."""
    patterns = (*_TABLES, *(pattern.format(dsl) for pattern in _KERNELS))
    paths = [path for pattern in patterns for path in package.glob(pattern)]
    paths += _tables(package / "quantizing/kernels" / dsl / "tuning", arch)
    return tuple((str(path.relative_to(package)), path) for path in sorted(paths))


def _tables(folder: Path, arch: str) -> list[Path]:
    """An arch's table of tiles, and the tables of other archs whose rows it takes."""
    names = ["__init__", arch]
    for name in names:  # which grows
        text = (folder / f"{name}.py").read_text("utf-8")
        names += [name for name in re.findall(r"\.tuning\.(\w+)", text) if name not in names]
    return [folder / f"{name}.py" for name in names]
