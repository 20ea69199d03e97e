"""From a variant to its binary and launch facts, through the manifest; the call target."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import jax

from jax_mx import _ffi
from jax_mx.facts.launch import Launch
from jax_mx.facts.variants import Variant

TARGET = "jax_mx_launch"
BINARIES = Path(__file__).parents[1] / "binaries"


@dataclasses.dataclass(frozen=True)
class Artifact:
    """A binary and the facts that launch it; the manifest's words, see facts/launch.py for them.

    Attributes:
      image: the binary.
      facts: sha256; launches: per scale layout the scalars and, one each for aligned operands and
        for any, the entries: symbol, align, divide, threads, grid, the compiler's usage report.
    """

    image: bytes
    facts: dict[str, Any]

    def attributes(self, scale_layout: str, params: dict[str, int]) -> dict[str, Any]:
        """As the call target takes them; `params` are the values of scalars that have a name."""
        launch = Launch.from_json(self.facts["launches"][scale_layout])
        return launch.attributes(self.facts["sha256"], params, self.image)


@functools.cache
def manifest() -> dict[str, dict[str, Any]]:
    """`{"<variant>.<arch>": facts}` of every binary that this installation holds."""
    path = BINARIES / "manifest.json"
    return json.loads(path.read_text()) if path.exists() else {}


def holds(variant: Variant, arch: str) -> bool:
    """Whether this installation has the binary."""
    return f"{variant.name}.{arch}" in manifest()


@functools.cache
def load(variant: Variant, arch: str) -> Artifact:
    """The artifact of `variant` for `arch`.

    Raises:
      NotImplementedError: this installation does not hold it.
    """
    facts = manifest().get(f"{variant.name}.{arch}")
    if facts is None:
        raise NotImplementedError(
            f"{variant.op}: this installation holds no binary {variant.name} for {arch}; build it "
            f"with python -m jax_mx.kernels.build --arch {arch}"
        )
    return Artifact((BINARIES / facts["file"]).read_bytes(), facts)


def register() -> None:
    """Registers the call target with JAX.

    Raises:
      ImportError: jaxlib's FFI is older than the one that the extension was compiled against; JAX
        would then refuse to start the whole platform.
    """
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    found = tuple(int(n) for n in re.findall(r"#define XLA_FFI_API_M(?:AJ|IN)OR (\d+)", header))
    if found < _ffi.API_VERSION:
        raise ImportError(
            f"jax_mx was compiled against version {_ffi.API_VERSION} of XLA's FFI, this jaxlib has "
            f"{found}; install a newer jaxlib or a jax_mx built for this one"
        )
    for platform, stages in _ffi.registrations().items():
        jax.ffi.register_ffi_target(TARGET, stages, platform=platform)
    jax.ffi.register_ffi_target_as_batch_partitionable(TARGET)
