"""Where each binary was executed and compared bit for bit: `jax_mx/verified/<arch>.json`.

A file has the sha256 of each variant's binary and the devices that executed it: JAX's name of their
kind, or "emulated".
"""

import json
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "verified"


def read(arch: str, folder: Path = FOLDER) -> dict[str, dict]:
    """`{variant's name: {"sha256": ..., "executed_on": [...]}}` for an arch."""
    path = folder / f"{arch}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def write(arch: str, entries: Mapping[str, Mapping], folder: Path = FOLDER) -> None:
    """Writes an arch's file, a line for each variant, in the order of their names."""
    lines = [f"  {json.dumps(name)}: {json.dumps(entries[name])}" for name in sorted(entries)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{arch}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def executed_on(arch: str, variant: str, sha256: str) -> list[str] | None:
    """The devices that executed this very binary; None where it is not recorded at all."""
    entry = read(arch).get(variant)
    return None if entry is None or entry["sha256"] != sha256 else entry["executed_on"]
