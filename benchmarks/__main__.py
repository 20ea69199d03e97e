"""One table: what an op costs, against a copy of the same bytes and against XLA.

python -m benchmarks quantize --shapes required,8x4096x4096 --format mxfp8_e4m3 --csv out.csv
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

import jax_mx
from benchmarks import baselines, shapes, timing
from jax_mx.formats import FLOAT_DTYPES, FORMATS, SCALINGS
from jax_mx.layouts import SCALE_LAYOUTS
from jax_mx.plan import IMPLEMENTATIONS

OPS = ("quantize",)


@dataclasses.dataclass(frozen=True)
class Case:
    """What to measure: one call, by names."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    format: str
    scaling: str
    scale_layout: str
    axis: int
    implementation: str | None

    @property
    def names(self) -> dict[str, str]:
        """As rows have them."""
        return {
            "op": self.op,
            "form": f"axis {self.axis}",
            "shape": shapes.spell(self.shape),
            "dtype": self.dtype,
            "format": self.format,
            "scaling": self.scaling,
            "scale_layout": self.scale_layout,
        }

    @property
    def options(self) -> dict[str, Any]:
        """The keywords that the op and its baselines have in common."""
        names = ("format", "scaling", "scale_layout", "axis")
        return {name: getattr(self, name) for name in names}

    def functions(self) -> tuple[Callable[..., Any], dict[str, Callable[..., Any]]]:
        """The op, jitted, and XLA's versions of it."""
        op = functools.partial(getattr(jax_mx, self.op), implementation=self.implementation)
        return (
            jax.jit(functools.partial(op, **self.options)),
            getattr(baselines, self.op)(**self.options),
        )

    def implementation_taken(self) -> tuple[str, str]:
        """The kernel's name; or "xla", and why."""
        if self.implementation == "xla":
            return "xla", ""
        supported, what = jax_mx.is_supported(
            self.op,
            jax.devices()[0],
            dtype=self.dtype,
            implementation=self.implementation,
            **self.options,
        )
        return (what, "") if supported else ("xla", what)


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


# ---- measuring ----------------------------------------------------------------------------------
def measure(case: Case, repeats: int, commit: str) -> Measured:
    """Times the op, XLA's versions of it and the copy, one after the other."""
    fn, versions = case.functions()
    like = jax.ShapeDtypeStruct(case.shape, jnp.dtype(case.dtype))
    size = timing.nbytes((like, jax.eval_shape(fn, like)))
    implementation, reason = case.implementation_taken()
    notes = [reason] if reason else []

    make = functools.partial(baselines.normal, shape=like.shape, dtype=like.dtype)
    inputs = timing.rotate(make, timing.nbytes(like))
    own = timing.measure(fn, inputs, repeats)
    xla, xla_time = "none", None
    try:
        xla, xla_time = timing.fastest(versions, inputs, repeats)
    except Exception as error:
        notes.append(f"{shapes.spell(case.shape)}: no speedup, XLA's versions fail: {brief(error)}")
    del inputs  # room for the copy's

    sources = timing.rotate(functools.partial(baselines.words, size=size // 2), size // 2)
    copy, copy_time = timing.fastest(baselines.copies(), sources, repeats)
    gbps = size / own.us / 1e3
    copy_gbps = 2 * timing.nbytes(sources[0]) / copy_time.us / 1e3
    row = Row(
        **case.names,
        us=round(own.us, 3),
        gbps=round(gbps, 2),
        copy_gbps=round(copy_gbps, 2),
        fraction_of_copy=round(gbps / copy_gbps, 4),
        speedup_over_xla=xla_time and round(xla_time.us / own.us, 4),
        commit=commit,
    )
    clocks = dict.fromkeys(t.clock for t in (own, xla_time, copy_time) if t)
    return Measured(row, " / ".join(clocks), implementation, xla, copy, tuple(notes))


def brief(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def head() -> str:
    """The checkout's commit, or nothing where there is none."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    where = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return ""
    return done.stdout.strip()


# ---- reporting ----------------------------------------------------------------------------------
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


def requirements(cases: Sequence[Case], rows: Sequence[Row]) -> Iterator[tuple[bool, str]]:
    """For each requirement that is among the cases: whether it is met, and a line that says so."""
    for want in shapes.REQUIREMENTS:
        if not any(want.where.items() <= case.names.items() for case in cases):
            continue
        shape = want.where["shape"].replace("x", ",")
        dtype, format, scaling = (want.where[k] for k in ("dtype", "format", "scaling"))
        line = f"({shape}) {dtype} -> {format} {scaling}"
        found = [r for r in rows if want.where.items() <= dataclasses.asdict(r).items()]
        if not found:
            yield False, f"FAIL {line}: not measured"
        for row in found:
            speedup = row.speedup_over_xla or 0.0
            met = row.fraction_of_copy >= want.fraction_of_copy and speedup >= want.speedup_over_xla
            yield (
                met,
                f"{'ok  ' if met else 'FAIL'} {line}: {row.fraction_of_copy:.2f} of copy "
                f"(>= {want.fraction_of_copy} wanted), {speedup:.1f}x XLA "
                f"(>= {want.speedup_over_xla} wanted)",
            )


# ---- command line -------------------------------------------------------------------------------
def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    title = "One table: what an op costs, against a copy of the same bytes and against XLA."
    parser = argparse.ArgumentParser("python -m benchmarks", description=title)
    add = parser.add_argument

    def several(flag: str, table: Iterable[str], default: str) -> None:
        names = tuple(table)
        options = {"nargs": "+", "metavar": "NAME", "choices": names, "default": [default]}
        add(flag, help="|".join(names), **options)

    add("op", nargs="?", default=OPS[0], choices=OPS)
    add("--shapes", default="required", help=f"{'|'.join(shapes.SHAPES)}|AxBxC,...")
    several("--dtype", FLOAT_DTYPES, "bfloat16")
    several("--format", FORMATS, "mxfp8_e4m3")
    several("--scaling", SCALINGS, "rceil")
    several("--scale-layout", SCALE_LAYOUTS, "row_major")
    add("--axis", nargs="+", type=int, default=[-1], metavar="N")
    add("--implementation", choices=tuple(IMPLEMENTATIONS), help="default: the kernel, else xla")
    add("--csv", type=Path, metavar="FILE")
    add("--json", type=Path, metavar="FILE")
    add("--repeats", type=int, default=30, metavar="N", help="calls that a median is taken over")
    add("--require", action="store_true", help="exit with 1 if a requirement is not met")
    args = parser.parse_args(argv)
    try:
        args.shapes = shapes.parse(args.shapes)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    args = arguments(argv)
    # A log has no width of its own; rich would fold the table into 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 240, highlight=False)
    each = (args.shapes, args.dtype, args.format, args.scaling, args.scale_layout, args.axis)
    cases = [Case(args.op, *c, args.implementation) for c in itertools.product(*each)]
    measured: list[Measured] = []
    failures: list[str] = []
    commit = head()
    with Progress(console=console) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=" ".join(case.names.values()))
            try:
                measured.append(measure(case, args.repeats, commit))
            except Exception as error:  # of this row; the others are worth having
                failures.append(f"{' '.join(case.names.values())}: {brief(error)}")
            write([m.row for m in measured], args.csv, args.json)  # now: the next may crash
            progress.advance(task)
    console.print(table(measured))
    for note in dict.fromkeys(note for m in measured for note in m.notes):
        console.print(f"note: {note}", markup=False)
    for failure in failures:
        console.print(f"failed: {failure}", markup=False, style="red")
    checks = list(requirements(cases, [m.row for m in measured]))
    for _, line in checks:
        console.print(line, markup=False)
    met = bool(checks) and all(ok for ok, _ in checks)
    return 0 if measured and (met or not args.require) else 1


if __name__ == "__main__":
    sys.exit(main())
