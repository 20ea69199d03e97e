"""One table: what an op costs, against a copy of the same bytes and against XLA.

python -m benchmarks --form all --shapes required,8x4096x4096 --format mxfp8_e4m3 --csv out.csv
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import Progress

import jax_mx
from benchmarks import baselines, report, shapes, timing
from benchmarks.report import Measured, Row
from jax_mx.formats import FLOAT_DTYPES, FORMATS, SCALINGS
from jax_mx.layouts import SCALE_LAYOUTS
from jax_mx.plan import IMPLEMENTATIONS

OPS = tuple(dict.fromkeys(form.op for form in shapes.FORMS.values()))


@dataclasses.dataclass(frozen=True)
class Case:
    """What to measure: one call, by names."""

    form: str
    shape: tuple[int, ...]
    dtype: str
    format: str
    scaling: str
    scale_layout: str
    implementation: str | None

    @property
    def names(self) -> dict[str, str]:
        """As rows have them."""
        return {
            "op": shapes.FORMS[self.form].op,
            "form": self.form,
            "shape": shapes.spell(self.shape),
            "dtype": self.dtype,
            "format": self.format,
            "scaling": self.scaling,
            "scale_layout": self.scale_layout,
        }

    @property
    def options(self) -> dict[str, str]:
        """The keywords that the ops and their baselines have in common."""
        names = ("format", "scaling", "scale_layout")
        return {name: getattr(self, name) for name in names}

    def functions(self) -> tuple[Callable[..., Any], dict[str, Callable[..., Any]]]:
        """The op, jitted, and XLA's versions of it."""
        form = shapes.FORMS[self.form]
        options = {**form.options, **self.options, "implementation": self.implementation}
        op = jax.jit(functools.partial(getattr(jax_mx, form.op), **options))
        return op, baselines.quantize(form, **self.options)

    def implementation_taken(self) -> tuple[str, str]:
        """The kernel's name; or "xla", and why."""
        if self.implementation == "xla":
            return "xla", ""
        form = shapes.FORMS[self.form]
        supported, what = jax_mx.is_supported(
            form.op,
            jax.devices()[0],
            dtype=self.dtype,
            axis=form.axes[0],
            ndim=len(self.shape),
            transpose=form.transpose,
            implementation=self.implementation,
            **self.options,
        )
        return (what, "") if supported else ("xla", what)


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


# ---- command line -------------------------------------------------------------------------------
def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    title = "One table: what an op costs, against a copy of the same bytes and against XLA."
    parser = argparse.ArgumentParser("python -m benchmarks", description=title)
    add = parser.add_argument

    def several(flag: str, table: Iterable[str]) -> None:
        names = tuple(table)
        options = {"nargs": "+", "action": "extend", "metavar": "NAME", "choices": names}
        add(flag, help="|".join(names), **options)

    add("op", nargs="?", choices=OPS, help="measure this op's forms only")
    several("--form", (*shapes.FORMS, "all"))
    add("--shapes", default="required", help=f"{'|'.join(shapes.SHAPES)}|AxBxC,...")
    several("--dtype", FLOAT_DTYPES)
    several("--format", FORMATS)
    several("--scaling", SCALINGS)
    several("--scale-layout", SCALE_LAYOUTS)
    add("--implementation", choices=tuple(IMPLEMENTATIONS), help="default: the kernel, else xla")
    add("--csv", type=Path, metavar="FILE")
    add("--json", type=Path, metavar="FILE")
    about = "calls that a median is taken over"
    add("--repeats", type=positive, default=30, metavar="N", help=about)
    add("--require", action="store_true", help="exit with 1 if a requirement is not met")
    args = parser.parse_args(argv)
    try:
        complete(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return args


def positive(text: str) -> int:
    """A number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def complete(args: argparse.Namespace) -> None:
    """Fills in defaults and drops repetitions.

    Raises:
      ValueError: shapes or forms that cannot be measured.
      OSError: a file that cannot be written; found out now, not after minutes of measuring.
    """
    forms = [name for name, form in shapes.FORMS.items() if args.op in (None, form.op)]
    for name, default in {
        "form": forms[0],
        "dtype": "bfloat16",
        "format": "mxfp8_e4m3",
        "scaling": "rceil",
        "scale_layout": "row_major",
    }.items():
        setattr(args, name, list(dict.fromkeys(getattr(args, name) or [default])))
    if "all" in args.form:
        args.form = forms
    if strays := [form for form in args.form if form not in forms]:
        raise ValueError(f"form {strays[0]!r} is not one of {args.op}'s: {', '.join(forms)}")
    args.shapes = shapes.parse(args.shapes)
    for path in filter(None, (args.csv, args.json)):
        path.open("a").close()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    args = arguments(argv)
    # A log has no width of its own; rich would fold the table into 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 240, highlight=False)
    each = (args.form, args.shapes, args.dtype, args.format, args.scaling, args.scale_layout)
    cases = [Case(*c, args.implementation) for c in itertools.product(*each)]
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
            report.write([m.row for m in measured], args.csv, args.json)  # now: the next may crash
            progress.advance(task)
    console.print(report.table(measured))
    for note in dict.fromkeys(note for m in measured for note in m.notes):
        console.print(f"note: {note}", markup=False)
    for failure in failures:
        console.print(f"failed: {failure}", markup=False, style="red")
    checks = list(report.requirements([c.names for c in cases], [m.row for m in measured]))
    for _, line in checks:
        console.print(line, markup=False)
    met = bool(checks) and all(ok for ok, _ in checks)
    return 0 if measured and (met or not args.require) else 1


if __name__ == "__main__":
    sys.exit(main())
