"""`Binary`: the kernels that a DSL compiles into one file, of whatever library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

Files = Sequence[tuple[str, Path]]  # with the name by which a content key knows each


class Binary(Protocol):
    """One choice of a kernel's source: a DSL compiles it for an arch into one file.

    It is hashable, and pickled on its way to the process that compiles it.
    """

    @property
    def name(self) -> str:
        """The name, which no other binary has."""
        ...

    @property
    def implementation(self) -> str:
        """The DSL: "cutedsl" or "flydsl"."""
        ...

    @property
    def compiled_by(self) -> str:
        """The function that compiles it, as "module:name"; only a compiler's process imports it.

        It takes the binary and an arch. It returns the bytes and `{"launches": {name: a launch rule
        in JSON}}`.
        """
        ...

    def files(self, arch: str) -> Files:
        """All files behind its bytes, except the modules of `jax_mx.launch`."""
        ...
