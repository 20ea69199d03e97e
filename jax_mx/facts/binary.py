"""A kernel as `jax_mx.launch` sees it: the files behind its binary, and what compiles it.

The files are the kernels' for its DSL, every table of `jax_mx.facts`, every source of floats and
the arch's table of tiles.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

from jax_mx.launch.binary import Files

PACKAGE = Path(__file__).resolve().parents[1]
# Modules of kernels/ that decide when and where kernels are compiled, not what they are.
_DRIVERS = ("build.py", "shipped.py")
_ROOMS = ("norms",)  # by subject: a source of floats in each, and kernels in a file for a DSL


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A base of the classes whose instances say what is compiled.

    Attributes:
      op: the name of its computation.
      implementation: the DSL, "cutedsl" or "flydsl".
    """

    op: str
    implementation: str

    @property
    def compiled_by(self) -> str:
        """See `launch.binary.Binary`."""
        return f"jax_mx.kernels.{self.implementation}.compile:compile_variant"

    def files(self, arch: str) -> Files:
        """See `launch.binary.Binary`."""
        return files_of(self.implementation, arch)


@functools.cache
def files_of(dsl: str, arch: str, package: Path = PACKAGE) -> Files:
    """The files that a DSL's binaries for an arch follow from; `package` holds them."""
    folders = [package / name for name in ("facts", "sources", "kernels", f"kernels/{dsl}")]
    paths = [path for folder in folders for path in folder.glob("*.py")]
    paths += _tables(folders[-1] / "tuning", arch)
    rooms = [package / room / name for room in _ROOMS for name in ("source.py", f"{dsl}.py")]
    paths += [path for path in rooms if path.exists()]
    kept = sorted(path for path in paths if path.name not in _DRIVERS)
    return tuple((str(path.relative_to(package)), path) for path in kept)


def _tables(folder: Path, arch: str) -> list[Path]:
    """An arch's table of tiles, and the tables of other archs whose rows it takes."""
    names = ["__init__", arch]
    for name in names:  # which grows
        text = (folder / f"{name}.py").read_text("utf-8")
        names += [name for name in re.findall(r"\.tuning\.(\w+)", text) if name not in names]
    return [folder / f"{name}.py" for name in names]
