"""The runner of all measurements: python -m benchmarks [NAME] [options].

NAME is a file of this folder, by default `quantizers`; `--help` shows the options of all files and
of NAME. **A new measurement is one new file here and nothing else.** It has a docstring, and

    def cases(args) -> Iterator[Case]                # in the order of measuring.

and, if it wants, some of these:

    def options(add) -> None                         # `add` is the parser's add_argument.
    def about() -> dict | None                       # further facts of the run.
    def further(args, rows) -> Iterator[dict]        # rows made of measured ones.
    def checks(args, rows) -> Iterator[(bool, str)]  # a False ends it with 1.

`Timed` is the `measure` of most cases. A case that fails is a row with an "error", and others go
on. Keys that begin with "_" are printed and not written. Where `about` gives None, a file is a
list of rows that say by themselves where they were measured. A file that measures no rows has
`main(args)`; without `options` it reads the command line by itself.
"""

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress

from benchmarks import report, timing

Args = argparse.Namespace
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A row to be measured.

    Attributes:
      case: what is computed; cases of one name follow each other and are compared.
      way: one way to compute it.
      names: what the row says of both.
      measure: what it says of the measurement; "us" at least, or "ms".
      base: the way that "ratio" is to, in time; empty for rows without such a key.
      rounds: how often all ways are measured in turn; the best time of each counts.
    """

    case: str
    way: str
    names: Mapping[str, Any]
    measure: Callable[[Args], Mapping[str, Any]]
    base: str = ""
    rounds: int = 1


@dataclasses.dataclass(frozen=True)
class Timed:
    """A case's `measure`: the time of a jitted function.

    Attributes:
      fn: that function.
      make: gives the inputs that calls take in turn.
      calls: that a time is taken over, where `--repeats` does not say.
      flop: operations of a call, for the row's "tflops".
      more: what else the row says of a time.
      mesh: that calls move something over: their time is that of a loop in one program.
      rest: seconds before: a hot chip is slower.
      first: the row's key of the seconds that the first call traces and compiles, if any.
    """

    fn: Any
    make: Callable[[], timing.Inputs]
    calls: int
    flop: float = 0
    more: Callable[[timing.Timing], Mapping[str, Any]] = lambda _: {}
    mesh: Any = None
    rest: float = 0
    first: str = ""

    def __call__(self, args: Args) -> Row:
        """The row's numbers."""
        inputs, call = self.make(), self.fn
        row: Row = {}
        if self.first:
            start = time.perf_counter()
            call = call.lower(*inputs[0]).compile()
            row[self.first] = round(time.perf_counter() - start, 2)
        time.sleep(self.rest * (not args.smoke))
        clock = timing.loop if self.mesh else timing.measure
        with jax.set_mesh(self.mesh) if self.mesh else contextlib.nullcontext():
            took = clock(call, inputs, repeats(args, self.calls))
        row |= {"us": round(took.us, 1), "_clock": took.clock}
        speed = {"tflops": round(self.flop / took.us / 1e6, 1)} if self.flop else {}
        return row | speed | dict(self.more(took))


def repeats(args: Args, calls: int) -> int:
    """How many calls a time is taken over."""
    return args.repeats or (2 if args.smoke else calls)


def wanted(args: Args, case: str, way: str = "") -> bool:
    """Whether `--cases` and `--ways` leave it."""
    pairs = ((args.cases, case), (args.ways, way))
    return all(not ask or any(fnmatchcase(name, p) for p in ask) for ask, name in pairs)


def brief(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def measured(cases: Iterable[Case], args: Args, say: Callable[[str], None]) -> Iterator[Row]:
    """The row of each case, measured anew, as soon as it is known."""
    for _, ways in itertools.groupby(cases, lambda case: case.case):
        group = list(ways)
        best: list[Row] = [{} for _ in group]
        for left in reversed(range(group[0].rounds)):
            for i, case in enumerate(group):
                say(f"{case.case} {case.way}")
                best[i] = _better(best[i], case, args)
                if not left:
                    yield {**case.names, **best[i], **_ratio(case, best[i], group, best)}


def _better(before: Row, case: Case, args: Args) -> Row:
    """A case's row of this round or of those before; none is measured again that failed."""
    if "error" in before:
        return before
    try:
        row = dict(case.measure(args))
    except Exception as error:  # of this case; the others are worth having
        return {"error": brief(error)}
    return before if before and report.time_of(before) < report.time_of(row) else row


def _ratio(case: Case, row: Row, group: Sequence[Case], rows: Sequence[Row]) -> Row:
    """A row's time over its base's, where both have one."""
    pairs = zip(group, rows, strict=True)
    base = next((other for of, other in pairs if case.base and of.way == case.base), {})
    times = report.time_of(row), report.time_of(base)
    return {"ratio": round(times[0] / times[1], 3)} if all(times) else {}


# ---- the command line ----------------------------------------------------------------------------
def commands() -> list[str]:
    """The files here that measure or do something."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return [f.stem for f in files if re.search(r"^def (cases|main)\(", f.read_text(), re.M)]


def parsed(argv: Sequence[str]) -> tuple[ModuleType, argparse.ArgumentParser, Args]:
    """The file that a command line names, its parser, and what that makes of the rest."""
    name, rest = (argv[0], argv[1:]) if argv and argv[0][:1] != "-" else ("quantizers", argv)
    parser = argparse.ArgumentParser(f"python -m benchmarks {name}")
    if name not in commands():
        parser.error(f"there is no {name!r}, but {', '.join(commands())}")
    module = importlib.import_module(f"benchmarks.{name}")
    parser.description = (module.__doc__ or "").split("\n")[0]
    parser.epilog = f"Other names than {name}: {', '.join(commands())}."
    if hasattr(module, "cases"):
        _options(parser.add_argument)
    if hasattr(module, "options"):
        module.options(parser.add_argument)
    elif not hasattr(module, "cases"):
        return module, parser, Args(rest=rest)
    args = parser.parse_args(rest)
    if getattr(args, "repeats", None) is not None and args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    if not 0 <= getattr(args, "share", 0) < 1:
        parser.error(f"--share must be at least 0 and less than 1, got {args.share}")
    return module, parser, args


def _options(add: Callable[..., Any]) -> None:
    """Options of all files that have cases."""
    pattern = {"nargs": "+", "metavar": "PATTERN", "default": []}
    add("--cases", **pattern, help="only those with such a name, as a shell matches: 'dense*'")
    add("--ways", **pattern, help="only those, likewise")
    add("--json", type=Path, metavar="FILE", help="where rows are put after each of them")
    add("--join", action="store_true", help="FILE keeps its rows of what is not measured now")
    about = "exit with 1 if a row is slower than the one in this file, of the same chip"
    add("--against", type=Path, metavar="FILE", help=about)
    about = "the share by which a row may be slower; default: 0.01"
    add("--share", type=float, default=0.01, metavar="SHARE", help=about)
    add("--repeats", type=int, metavar="N", help="calls that a time is taken over")
    add("--smoke", action="store_true", help="toy sizes and few calls, to see that all runs")
    about = "that rows name; by default this checkout's"
    add("--commit", default=report.head(), metavar="HASH", help=about)


def listed(module: ModuleType, args: Args) -> list[Case]:
    """The cases that were asked for.

    Raises:
      ValueError: there are none, or none of some pattern.
    """
    every = list(module.cases(args))
    for asked, names in (
        (args.cases, {case.case: None for case in every}),
        (args.ways, {case.way: None for case in every}),
    ):
        for pattern in asked:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"nothing has the name {pattern!r}; there are {'; '.join(names)}")
    asked = [case for case in every if wanted(args, case.case, case.way)]
    if not asked:
        raise ValueError("nothing is left to measure")
    return asked


def run(argv: Sequence[str]) -> int:
    """Runs a command line; returns the exit status."""
    module, parser, args = parsed(argv)
    if not hasattr(module, "options") and not hasattr(module, "cases"):
        sys.argv = [parser.prog, *args.rest]
        return module.main() or 0
    if not hasattr(module, "cases"):
        return module.main(args) or 0
    try:
        cases = listed(module, args)
        earlier = report.read(args.against) if args.against else None
        kept = report.File(args, parser.prog, cases[0].names, getattr(module, "about", dict))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    # A log has no width of its own; rich would fold the table into 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 260, highlight=False)
    with Progress(console=console) as progress:
        task = progress.add_task("", total=sum(case.rounds for case in cases))

        def say(step: str) -> None:
            progress.update(task, description=step)
            progress.advance(task)

        for row in measured(cases, args, say):
            kept.add(row)
        for row in getattr(module, "further", lambda *_: ())(args, kept.rows):
            kept.add(row)
    good = [row for row in kept.rows if "error" not in row]
    console.print(report.table(good))
    checks = list(getattr(module, "checks", lambda *_: ())(args, kept.rows))
    if earlier is not None:
        ok, lines = report.verdict(good, earlier, kept.keys, args.share)
        checks += [(ok, line) for line in lines]
    for line in (*report.notes(kept.rows, kept.keys), *(line for _, line in checks)):
        console.print(line, markup=False)
    return int(not good or not all(ok for ok, _ in checks))
