"""What a run says: rows in files, one table, and a line for each requirement."""

from __future__ import annotations

import csv
import dataclasses
import json
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.table import Table
from rich.text import Text

from benchmarks import shapes


@dataclasses.dataclass(frozen=True)
class Row:
    """What goes into files. Bytes are those of input, words, values and scales, once each."""

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
    implementation: str  # "cutedsl", "xla", ...; or a peer's name
    device: str  # as its driver names it


@dataclasses.dataclass(frozen=True)
class Measured:
    """A row, and what to know when reading it."""

    row: Row
    clock: str
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


def head() -> str:
    """The checkout's commit, or nothing where there is none."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    where = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return ""
    return done.stdout.strip()


def write_record(path: Path, command: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Rows of one run, and where, when and how they were measured; documents show it beside them.

    Args:
      path: of the file; what it holds is replaced.
      command: that writes such rows.
      rows: as each script has them.
      **more: what else there is to say of the run.
    """
    devices = jax.devices()
    count = f"{len(devices)} x " * (len(devices) > 1)
    about = {"device": count + devices[0].device_kind, "date": time.strftime("%Y-%m-%d")}
    about |= {"jax": jax.__version__, "commit": head(), "command": command, **more}
    path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a file says of its run, and its rows; a list of rows alone says nothing beside them."""
    held = json.loads(path.read_text())
    if isinstance(held, list):
        return {}, held
    return {key: value for key, value in held.items() if key != "rows"}, held["rows"]


def one_run(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of the largest of several runs; of equally large ones, of the last."""
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        runs.setdefault(row["commit"], []).append(row)
    return max(reversed(runs.values()), key=len, default=[])


def table(measured: Sequence[Measured]) -> Table:
    """The rows' fields, and beside them the clock and who ran."""
    result = Table(title=f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    numbers = {"us", "gbps", "copy_gbps", "fraction_of_copy", "speedup_over_xla"}
    extra = ("clock", "xla", "copy")
    for name in (*(field.name for field in dataclasses.fields(Row)), *extra):
        header = name.replace("_", " ")
        result.add_column(header, justify="right" if name in numbers else "left", overflow="fold")
    for m in measured:
        cells = (*dataclasses.astuple(m.row), *(getattr(m, name) for name in extra))
        result.add_row(*(f"{c:.2f}" if isinstance(c, float) else Text(str(c)) for c in cells))
    return result


def requirements(
    cases: Sequence[Mapping[str, str]], rows: Sequence[Row]
) -> Iterator[tuple[bool, str]]:
    """For each requirement on a case: whether it is met, and a line that says so.

    Args:
      cases: what was asked for, by the names that rows have.
      rows: what was measured of them.
    """
    measured = [dataclasses.asdict(row) for row in rows]
    for want in shapes.REQUIREMENTS:
        asked = [want.where]
        if want.fraction_of_row_major is not None:
            asked.append({**want.where, "scale_layout": "row_major"})
        if not all(any(names.items() <= case.items() for case in cases) for names in asked):
            continue
        found, *row_major = (
            [row for row in measured if names.items() <= row.items()] for names in asked
        )
        plain = row_major[0][0] if row_major and row_major[0] else None
        for met, what in [_judge(want, r, plain) for r in found] or [(False, "not measured")]:
            where = {**want.where, "shape": want.where["shape"].replace("x", ",")}
            line = "{form} ({shape}) {dtype} -> {format} {scaling} {scale_layout}".format(**where)
            yield met, f"{'ok' if met else 'no'}  {line}: {what}"


def _judge(
    want: shapes.Requirement, row: Mapping[str, Any], row_major: Mapping[str, Any] | None
) -> tuple[bool, str]:
    """Whether a row meets a requirement, and its numbers beside what is wanted."""
    numbers = (
        (want.fraction_of_copy, row["fraction_of_copy"], "{:.3f} of copy"),
        (want.speedup_over_xla, row["speedup_over_xla"] or 0.0, "{:.2f}x XLA"),
        (
            want.fraction_of_row_major,
            row["gbps"] / row_major["gbps"] if row_major else 0.0,
            "{:.3f} of row_major",
        ),
    )
    asked = [(least, got, text) for least, got, text in numbers if least is not None]
    what = ", ".join(f"{text.format(got)} (>= {least} wanted)" for least, got, text in asked)
    return all(got >= least for least, got, _ in asked), what
