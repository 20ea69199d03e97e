"""One table: what an op costs, against a copy of the same bytes and against XLA.

python -m benchmarks --form all --shapes required,8x4096x4096 --format mxfp8_e4m3 --csv out.csv
python -m benchmarks --form all --shapes llm --peers --json out.json   # torchao's, too
python -m benchmarks --form all --sharded --require                    # on all GPUs at once
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress

import jax_mx
from benchmarks import baselines, guard, peers, report, shapes, sharded, timing
from benchmarks.report import Measured, Row
from jax_mx.facts.chips import arch_of, dsl_of
from jax_mx.facts.formats import BLOCK, FLOAT_DTYPES, FORMATS, SCALINGS
from jax_mx.facts.layouts import SCALE_LAYOUTS
from jax_mx.facts.sources import Source, X
from jax_mx.facts.windows import Window
from jax_mx.lowering.registry import IMPLEMENTATIONS
from jax_mx.lowering.targets import chip_of
from jax_mx.ops.quantizing import WithSums
from jax_mx.reference import rows_of
from jax_mx.sources.gated import GatedSource
from jax_mx.sources.gated_gradient import GradientSource
from jax_mx.sources.rms_norm import NormSource
from jax_mx.sources.rows import RowsSource

_quantized = jax.jit(
    jax_mx.quantize, static_argnames=("format", "axis", "scaling", "scale_layout", "block")
)
OPS = tuple(dict.fromkeys(form.op for form in shapes.FORMS.values()))


def _made_of(source: Source) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """How XLA makes floats, and the keywords of the op that makes them itself, of its operands."""
    if isinstance(source, RowsSource):
        return lambda a: rows_of(*a), lambda a: {"rows": a[1]}
    if isinstance(source, NormSource):
        return lambda a: jax_mx.rms_norm(*a).floats, lambda a: {}
    assert isinstance(source, GatedSource | GradientSource)
    made = {"activation": source.activation, "interleaved": source.interleaved}
    gated = jax_mx.Gated(source.activation, interleaved=source.interleaved)
    if isinstance(source, GatedSource):
        return lambda a: jax_mx.gated(a[0], **made), lambda a: {"activation": gated}
    make = functools.partial(jax_mx.gated, **made)

    def own(dy: jax.Array) -> jax_mx.Gated | WithSums:
        asked = dataclasses.replace(gated, gradient=dy)
        return WithSums(asked) if source.sums else asked

    return lambda a: jax.vjp(make, a[0])[1](a[1])[0], lambda a: {"activation": own(a[1])}


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
    preprocessing: str = "none"  # in shapes.PREPROCESSING
    # In shapes.SOURCES, or none; the shape is that of what `rows` picks, or an activation gives.
    source: str = ""
    window: Window = BLOCK  # elements that share a scale, of what is quantized

    @property
    def made(self) -> Source:
        """What makes the floats."""
        return shapes.SOURCES.get(self.source, X)

    @property
    def names(self) -> dict[str, str]:
        """As rows have them."""
        return {
            "op": shapes.FORMS[self.form].op,
            "form": shapes.named(self.form, self.preprocessing, self.source),
            "shape": shapes.spell(self.shape),
            "dtype": self.dtype,
            "format": self.format,
            "scaling": self.scaling,
            "scale_layout": self.scale_layout,
        }

    @property
    def options(self) -> dict[str, Any]:
        """The keywords that the ops and their baselines have in common."""
        names = ("format", "scaling", "scale_layout")
        return {name: getattr(self, name) for name in names}

    @property
    def how(self) -> dict[str, Any]:
        """The keywords that quantizing ops have for the preprocessing."""
        kinds = shapes.PREPROCESSING[self.preprocessing]
        found: dict[str, Any] = {} if self.window == BLOCK else {"window": self.window}
        signs, key = np.arange(64) % 3 == 0, jax.random.key(0)
        hadamards = [jax_mx.Hadamard(h, signs[:h]) if h else None for h, *_ in kinds]
        roundings = [jax_mx.Stochastic(key) if sr else None for _, sr, *_ in kinds]
        for name, each in (("hadamard", hadamards), ("rounding", roundings)):
            if any(each):
                found[name] = each[0] if len(each) == 1 else tuple(each)
        return found

    @property
    def words(self) -> int:
        """Bytes of words that the preprocessing takes."""
        axes, kinds = shapes.FORMS[self.form].axes, shapes.PREPROCESSING[self.preprocessing]
        random = sum(kind.stochastic for kind in kinds) * len(axes) // max(len(kinds), 1)
        return 4 * math.prod(self.shape) // BLOCK * random

    def functions(self) -> tuple[Callable[..., Any], dict[str, Callable[..., Any]]]:
        """The op, jitted, and XLA's versions of it."""
        form = shapes.FORMS[self.form]
        options: dict[str, Any] = {**form.options, "implementation": self.implementation}
        versions: dict[str, Callable[..., Any]]
        if form.op == "dequantize":
            options["dtype"], versions = self.dtype, baselines.dequantize(form, self.dtype)
        else:
            options |= self.options | self.how
            versions = baselines.quantize(form, **self.options)
        op = functools.partial(getattr(jax_mx, form.op), **options)
        if self.preprocessing != "none":
            versions = {"reference": jax.jit(functools.partial(op, implementation="xla"))}
        if not self.source:
            return jax.jit(op), versions
        before, how = _made_of(self.made)
        versions |= {"our kernel": op}
        floats = getattr(self.made, "floats", False)

        def after(a: Any, f: Callable[..., Any]) -> Any:
            y = before(a)
            if getattr(self.made, "sums", False):
                return f(y), y.astype(jnp.float32).sum(0)
            return (y, f(y)) if floats else f(y)

        made: dict[str, Callable[..., Any]] = {
            f"{self.source}, then {name}": jax.jit(functools.partial(after, f=f))
            for name, f in versions.items()
        }
        options |= {"both": form.op == "quantize_both", "floats": floats}
        if isinstance(self.made, NormSource):
            norm = functools.partial(jax_mx.rms_norm, **options)
            return jax.jit(lambda a: norm(*a)[:2] if floats else norm(*a).quantized), made
        if floats:
            assert isinstance(self.made, GatedSource)
            options |= {"activation": self.made.activation, "interleaved": self.made.interleaved}
            return jax.jit(lambda a: jax_mx.gated(*a, **options)), made
        return jax.jit(lambda a: op(a[0], **how(a))), made

    def make(self, key: jax.Array) -> Any:
        """An argument of those."""
        form, dtype = shapes.FORMS[self.form], FLOAT_DTYPES[self.dtype]
        if isinstance(self.made, RowsSource):
            return self.tokens(key)
        if isinstance(self.made, NormSource):
            x = baselines.normal(key, shape=self.shape, dtype=dtype)
            return x, jax.numpy.ones(self.shape[-1:], dtype)
        if self.source:
            shape = (*self.shape[:-1], 2 * self.shape[-1])
            x = baselines.normal(key, shape=shape, dtype=dtype)
            dy = baselines.normal(key, shape=self.shape, dtype=dtype)
            return (x, dy) if isinstance(self.made, GradientSource) else (x,)
        x = baselines.normal(key, shape=self.shape, dtype=dtype)
        if form.op != "dequantize":
            return x
        return _quantized(x, **form.made_by, **self.options)

    def tokens(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x, and numbers of its rows: each one once, and one in 16 of none."""
        count, length = self.shape
        held = count - count // 16
        x = baselines.normal(key, shape=(held, length), dtype=FLOAT_DTYPES[self.dtype])
        rows = jax.random.permutation(key, np.arange(count, dtype=np.int32))
        return x, jnp.where(rows < held, rows, -1)

    def implementation_taken(self) -> tuple[str, str]:
        """What serves the op; if it is "xla", why."""
        if self.implementation == "xla":
            return "xla", ""
        form = shapes.FORMS[self.form]
        supported, what = jax_mx.is_supported(
            form.op,
            jax.devices()[0],
            dtype=self.dtype,
            ndim=len(self.shape),
            transpose=form.transpose,
            source=self.made,
            implementation=self.implementation,
            **form.made_by,
            **self.options,
            **self.how,
        )
        if not supported:
            return "xla", what
        arch = arch_of(chip_of(jax.devices()[0]))
        return self.implementation or dsl_of(str(arch)), ""


# ---- measuring ----------------------------------------------------------------------------------
def measure(case: Case, repeats: int, commit: str) -> Measured:
    """Times the op, XLA's versions of it and the copy, one after the other."""
    fn, versions = case.functions()
    like = jax.eval_shape(case.make, jax.random.key(0))
    size = timing.nbytes((like, jax.eval_shape(fn, like))) + case.words
    implementation, reason = case.implementation_taken()
    notes = [reason] if reason else []

    inputs = timing.rotate(case.make, timing.nbytes(like))
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
        speedup_over_xla=round(xla_time.us / own.us, 4) if xla_time else None,
        commit=commit,
        implementation=implementation,
        device=jax.devices()[0].device_kind,
    )
    clocks = dict.fromkeys(t.clock for t in (own, xla_time, copy_time) if t)
    return Measured(row, " / ".join(clocks), xla, copy, tuple(notes))


def measure_peers(measured: Sequence[Measured], repeats: int) -> tuple[list[Measured], list[str]]:
    """The peers' rows for what was measured, and why others are missing."""
    found, notes = [], []
    for name, peer in peers.PEERS.items():
        mine = [m for m in measured if peer.serves(_case(m.row))]
        for index, answer in peers.run(name, [_case(m.row) for m in mine], repeats):
            if index is None or "error" in answer:
                what = name if index is None else f"{name}, {mine[index].row.form}"
                notes.append(f"no row of {what}: {answer['error']}")
                continue
            ours, us = mine[index].row, answer["us"]
            gbps = answer["bytes"] / us / 1e3
            xla_us = ours.speedup_over_xla and ours.speedup_over_xla * ours.us
            row = dataclasses.replace(
                ours,
                scaling=answer["scaling"],
                us=round(us, 3),
                gbps=round(gbps, 2),
                fraction_of_copy=round(gbps / ours.copy_gbps, 4),
                speedup_over_xla=xla_us and round(xla_us / us, 4),
                implementation=f"{answer['library']} {name}",
            )
            found.append(dataclasses.replace(mine[index], row=row, clock=answer["clock"], notes=()))
    return found, notes


def _case(row: Row) -> peers.Case:
    """A row's names as peers take them."""
    return {**dataclasses.asdict(row), "shape": [int(n) for n in row.shape.split("x")]}


def brief(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


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
    several("--preprocessing", shapes.PREPROCESSING)
    several("--source", shapes.SOURCES)
    add("--implementation", choices=tuple(IMPLEMENTATIONS), help="default: the kernel, else xla")
    add("--csv", type=Path, metavar="FILE")
    add("--json", type=Path, metavar="FILE")
    add("--peers", action="store_true", help="torchao's quantizers too; needs torch and torchao")
    about = "exit with 1 if a row is slower than the one in this file, of the same chip"
    add("--against", type=Path, metavar="JSON", help=about)
    about = "the share by which a row may be slower; default: 0.01"
    add("--share", type=guard.share, default=guard.SHARE, metavar="SHARE", help=about)
    about = "instead: the same shard on each of all devices, against one device alone"
    add("--sharded", action="store_true", help=about)
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
        "preprocessing": "none",
        "source": "",
    }.items():
        setattr(args, name, list(dict.fromkeys(getattr(args, name) or [default])))
    if "all" in args.form:
        args.form = forms
    if strays := [form for form in args.form if form not in forms]:
        raise ValueError(f"form {strays[0]!r} is not one of {args.op}'s: {', '.join(forms)}")
    args.shapes = shapes.parse(args.shapes)
    if args.against:
        args.against = json.loads(args.against.read_text())
    for path in filter(None, (args.csv, args.json)):
        path.open("a").close()


def all_cases(args: argparse.Namespace) -> Iterator[Case]:
    """All that was asked for, but for what a form does not have."""
    each = (args.form, args.shapes, args.dtype, args.format, args.scaling, args.scale_layout)
    befores = itertools.product(args.preprocessing, args.source)
    catalogue = set(itertools.chain.from_iterable(shapes.SHAPES.values()))
    for before, names in itertools.product(befores, itertools.product(*each)):
        preprocessing, source = before
        form, shape, dtype, format, scaling, layout = names
        how = (args.implementation, preprocessing, source)
        case = Case(form, shape, dtype, format, scaling, layout, *how)
        form = shapes.FORMS[case.form]
        if source and (form.op == "dequantize" or len(shape) != 2):
            continue  # they are those of a matrix to quantize
        if preprocessing != "none" and (form.op == "dequantize" or form.square):
            continue  # codes are preprocessed no more; a transform has one axis
        if len(shapes.PREPROCESSING[preprocessing]) > len(form.axes):
            continue
        if form.square and SCALE_LAYOUTS[case.scale_layout].is_tiled:
            continue  # scales of squares are row-major
        if form.fits(case.shape) or case.shape not in catalogue:  # a shape typed in may fail
            yield case


def over_devices(cases: Sequence[Case], repeats: int, console: Console) -> list[bool]:
    """Prints what sharding costs each case; whether it is little."""
    met = []
    for case in cases:
        name = " ".join(case.names.values())
        try:
            ok, line = sharded.measure(name, case.functions()[0], case.make, repeats)
        except Exception as error:  # of this case; the others are worth having
            ok, line = False, f"failed: {name}: {brief(error)}"
        met.append(ok)
        console.print(line, markup=False)
    return met


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    args = arguments(argv)
    # A log has no width of its own; rich would fold the table into 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 260, highlight=False)
    cases = list(all_cases(args))
    if args.sharded:
        met = over_devices(cases, args.repeats, console)
        return 1 if args.require and not all(met) else 0
    measured: list[Measured] = []
    failures: list[str] = []
    commit = report.head()
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
    ours, notes = [m.row for m in measured], [note for m in measured for note in m.notes]
    if args.peers:
        console.print("Measuring peers")
        rows, missing = measure_peers(measured, args.repeats)
        measured, notes = measured + rows, notes + missing
        report.write([m.row for m in measured], args.csv, args.json)
    console.print(report.table(measured))
    for note in dict.fromkeys(notes):
        console.print(f"note: {note}", markup=False)
    for failure in failures:
        console.print(f"failed: {failure}", markup=False, style="red")
    checks = list(report.requirements([c.names for c in cases], ours))
    for _, line in checks:
        console.print(line, markup=False)
    met = bool(checks) and all(ok for ok, _ in checks)
    good = bool(measured) and (met or not args.require)
    if args.against is not None:
        kept, lines = guard.verdict([dataclasses.asdict(r) for r in ours], args.against, args.share)
        console.print(*lines, sep="\n", markup=False)
        good = good and kept
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
