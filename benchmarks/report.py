"""What a run says: rows in files, one table, and a line for each requirement."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.table import Table
from rich.text import Text

from benchmarks import shapes


@dataclasses.dataclass(frozen=True)
class Row:
    """What goes into files. Bytes are those of input, values and scales, once each."""

    op: str
    form: str
    shape: str
    dtype: str
    format: str
    scaling: str
    scale_layout: str
    us: float  # the median time of a call on the device
    gbps: float
    copy_gbps: float  # of a copy that reads half as many bytes and writes the other half
    fraction_of_copy: float
    speedup_over_xla: float | None  # over the fastest of XLA's versions; None: none of them ran
    commit: str


@dataclasses.dataclass(frozen=True)
class Measured:
    """A row, and what to know when reading it."""

    row: Row
    clock: str
    implementation: str
    xla: str  # the fastest of XLA's versions
    copy: str  # the faster copy
    notes: tuple[str, ...] = ()


def write(rows: Sequence[Row], csv_path: Path | None, json_path: Path | None) -> None:
    """All rows so far, to the files that are asked for."""
    records = [dataclasses.asdict(row) for row in rows]
    if json_path:
        json_path.write_text(json.dumps(records, indent=1) + "\n")
    if csv_path:
        with csv_path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)])
            writer.writeheader()
            writer.writerows(records)


def table(measured: Sequence[Measured]) -> Table:
    """The rows' fields, and beside them the clock and who ran."""
    result = Table(title=f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    numbers = {"us", "gbps", "copy_gbps", "fraction_of_copy", "speedup_over_xla"}
    extra = ("clock", "implementation", "xla", "copy")
    for name in (*(field.name for field in dataclasses.fields(Row)), *extra):
        header = name.replace("_", " ")
        result.add_column(header, justify="right" if name in numbers else "left", overflow="fold")
    for m in measured:
        cells = (*dataclasses.astuple(m.row), *(getattr(m, name) for name in extra))
        result.add_row(*(f"{c:.2f}" if isinstance(c, float) else Text(str(c)) for c in cells))
    return result


def requirements(
    names: Sequence[Mapping[str, str]], rows: Sequence[Row]
) -> Iterator[tuple[bool, str]]:
    """For each requirement on a case: whether it is met, and a line that says so.

    Args:
      names: of the cases that were asked for, as rows have them.
      rows: what was measured of them.
    """
    measured = [dataclasses.asdict(row) for row in rows]
    for want in shapes.REQUIREMENTS:
        if not any(want.where.items() <= case.items() for case in names):
            continue
        found = [r for r in measured if want.where.items() <= r.items()]
        for met, what in [_judge(want, r) for r in found] or [(False, "not measured")]:
            where = {**want.where, "shape": want.where["shape"].replace("x", ",")}
            line = "{form} ({shape}) {dtype} -> {format} {scaling}".format(**where)
            yield met, f"{'ok' if met else 'no'}  {line}: {what}"


def _judge(want: shapes.Requirement, row: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether a row meets a requirement, and its numbers beside what is wanted."""
    fraction, speedup = row["fraction_of_copy"], row["speedup_over_xla"] or 0.0
    met = fraction >= want.fraction_of_copy
    what = f"{fraction:.3f} of copy (>= {want.fraction_of_copy} wanted)"
    if want.speedup_over_xla is not None:
        met = met and speedup >= want.speedup_over_xla
        what += f", {speedup:.2f}x XLA (>= {want.speedup_over_xla} wanted)"
    return met, what
