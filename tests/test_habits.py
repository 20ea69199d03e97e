"""What stands in two places says the same in both; `python tests/test_habits.py` writes README's."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import jax_mx
from jax_mx.facts import toolchains, verified
from jax_mx.facts.chips import ARCHS
from jax_mx.facts.variants import VARIANTS, layouts_of

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAMES = {"cutedsl": "CuTeDSL", "flydsl": "FlyDSL"}
DSLS = [*NAMES]

in_checkout = pytest.mark.skipif(not README.exists(), reason="beside a wheel there is no README")


# ---- the README's tables of what has kernels -----------------------------------------------------
def chips_table() -> list[str]:
    """A row for each arch."""
    lines = ["| compiled for | runs on | from | its kernels were |", "|---|---|---|---|"]
    for dsl, archs in ARCHS.items():
        for arch, chips in archs.items():
            lines.append(f"| {arch} | {', '.join(chips.values())} | {NAMES[dsl]} | {state(arch)} |")
    return lines


def state(arch: str) -> str:
    """What verified/<arch>.json says of an arch's kernels."""
    runs = {run for entry in verified.read(arch).values() for run in entry["executed_on"]}
    devices = sorted({run.split(", ")[0] for run in runs} - {"emulated"})
    if devices:
        return f"compared bit for bit on {', '.join(devices)}"
    return "compared bit for bit in emulation" if runs else "compiled, not yet executed"


def kernels_table() -> list[str]:
    """A row for each op with the same forms and formats, and what is done before it rounds."""
    found: dict[tuple, dict[str, dict[str, None]]] = {}
    for v in VARIANTS:
        if v.implementation != "cutedsl":
            continue
        before = "".join(kind.suffix or "_rn" for kind in v.kinds)[1:].replace("_", " ")
        key = (v.op, "both" if v.form.is_both else "one", before, v.dtype)
        row = found.setdefault(key, {"forms": {}, "formats": {}})
        row["forms"][str(v.form)] = None
        row["formats"] |= {format.name: None for format in v.formats}
    merged: dict[tuple, list[str]] = {}
    for (op, _, before, dtype), row in found.items():
        merged.setdefault((op, before, *map(tuple, row.values())), []).append(dtype)
    grouped: dict[tuple, list[str]] = {}
    for (op, before, forms, formats), dtypes in merged.items():
        grouped.setdefault((op, forms, formats, tuple(dtypes)), []).append(before)
    lines = ["| op | forms | formats | floats | before |", "|---|---|---|---|---|"]
    for (op, forms, formats, dtypes), before in grouped.items():
        cells = (forms, formats, dtypes, before)
        lines.append(f"| {op} | {' | '.join(', '.join(cell) for cell in cells)} |")
    return lines


if __name__ == "__main__":
    print(*chips_table(), "", *kernels_table(), sep="\n")
