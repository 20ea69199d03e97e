"""The runner of all measurements: python -m benchmarks [NAME] [options].

NAME is a file of this folder, by default `quantizers`; `--help` shows the options of all files and
its own. **A new measurement is one new file here and nothing else.** It has a docstring, and

    def cases(args) -> Iterator[Case]                # what is measured, in order

and, where it wants, some of

    def options(add) -> None                         # its own: `add` is the parser's add_argument
    def about(args) -> dict | None                   # more that a file says of its run
    def further(args, rows) -> Iterator[dict]        # rows made of those that were measured
    def checks(args, rows) -> Iterator[(bool, str)]  # what rows must reach: they end with 1 if not

`timed` makes the `measure` of most cases. A case that fails is a row with an "error", and others go
on. Keys that begin with "_" are printed and not written. Where `about` gives None, a file is a
list of rows that say by themselves where they were measured. A file that measures no rows has
`main(args)`; without `options` it reads the command line by itself.
"""

from __future__ import annotations

import argparse
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

from rich.console import Console
from rich.progress import Progress

from benchmarks import report, timing

Args = argparse.Namespace
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """What becomes a row.

    Attributes:
      case: what is computed; cases of one name follow each other and are compared.
      way: one way to compute it.
      names: what the row says of both.
      measure: what it says of the measurement; "us" at least.
      base: the way that "ratio" is to, in time; empty for rows without such a key.
      rounds: how often all ways are measured in turn; the best time of each counts.
    """

    case: str
    way: str
    names: Mapping[str, Any]
    measure: Callable[[Args], Mapping[str, Any]]
    base: str = ""
    rounds: int = 1


def timed(
    fn: Any,
    make: Callable[[], timing.Inputs],
    numbers: Callable[[timing.Timing], Mapping[str, Any]],
    calls: int,
    *,
    clock: Callable[..., timing.Timing] = timing.measure,
    rest: float = 0,
    first: str = "",
) -> Callable[[Args], Row]:
    """A case's `measure`: the time of a jitted function.

    Args:
      fn: that function.
      make: gives the inputs that calls take in turn.
      numbers: what the row says of a time.
      calls: that a time is taken over, where `--repeats` does not say.
      clock: what times them.
      rest: seconds before: a hot chip is slower.
      first: the row's key of the seconds that the first call traces and compiles, if any.
    """

    def measure(args: Args) -> Row:
        inputs, call = make(), fn
        row: Row = {}
        if first:
            start = time.perf_counter()
            call = fn.lower(*inputs[0]).compile()
            row[first] = round(time.perf_counter() - start, 2)
        time.sleep(rest * (not args.smoke))
        return row | dict(numbers(clock(call, inputs, repeats(args, calls))))

    return measure


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
    return before if before and before["us"] < row["us"] else row


def _ratio(case: Case, row: Row, group: Sequence[Case], rows: Sequence[Row]) -> Row:
    """What a row says of its time over that of its base, where both have one."""
    pairs = zip(group, rows, strict=True)
    base = next((other for of, other in pairs if case.base and of.way == case.base), {})
    both = "us" in row and "us" in base
    return {"ratio": round(row["us"] / base["us"], 3)} if both else {}


# ---- the command line ----------------------------------------------------------------------------
def commands() -> list[str]:
    """The files here that measure or do something."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return [f.stem for f in files if re.search(r"^def (cases|main)\(", f.read_text(), re.M)]


def positive(text: str) -> int:
    """A number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def share(text: str) -> float:
    """A number from 0 to 1."""
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and less than 1, got {text}")
    return number


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
        args = parser.parse_args(rest)
    else:
        args = parser.parse_args(rest) if hasattr(module, "cases") else Args()
        args.rest = rest
    return module, parser, args


def _options(add: Callable[..., Any]) -> None:
    """Those of all files that have cases."""
    pattern = {"nargs": "+", "metavar": "PATTERN", "default": []}
    add("--cases", **pattern, help="only those with such a name, as a shell matches: 'dense*'")
    add("--ways", **pattern, help="only those, likewise")
    add("--json", type=Path, metavar="FILE", help="where rows are put after each of them")
    add("--join", action="store_true", help="FILE keeps its rows of what is not measured now")
    about = "exit with 1 if a row is slower than the one in this file, of the same chip"
    add("--against", type=Path, metavar="FILE", help=about)
    about = "the share by which a row may be slower; default: 0.01"
    add("--share", type=share, default=0.01, metavar="SHARE", help=about)
    add("--repeats", type=positive, metavar="N", help="calls that a time is taken over")
    add("--smoke", action="store_true", help="toy sizes and few calls, to see that all runs")
    about = "that rows name; by default this checkout's"
    add("--commit", default=report.head(), metavar="HASH", help=about)


def listed(module: ModuleType, args: Args) -> list[Case]:
    """The cases that were asked for.

    Raises:
      ValueError: there are none, or none of some pattern.
    """
    every = list(module.cases(args))
    for patterns, names in (
        (args.cases, [case.case for case in every]),
        (args.ways, [case.way for case in every]),
    ):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                there = "; ".join(dict.fromkeys(names))
                raise ValueError(f"nothing has the name {pattern!r}; there are {there}")
    asked = [case for case in every if wanted(args, case.case, case.way)]
    if not asked:
        raise ValueError("nothing is left to measure")
    return asked


def run(argv: Sequence[str]) -> int:
    """Runs a command line; returns the exit status."""
    module, parser, args = parsed(argv)
    if not hasattr(module, "cases"):
        if hasattr(module, "options"):
            return module.main(args) or 0
        sys.argv = [parser.prog, *args.rest]
        return module.main() or 0
    try:
        cases = listed(module, args)
        old = report.read(args.json) if args.json and args.join and args.json.exists() else ({}, [])
        earlier = report.read(args.against) if args.against else None
        if args.json:
            args.json.open("a").close()  # found out now, not after minutes of measuring
    except (ValueError, OSError) as error:
        parser.error(str(error))
    # A log has no width of its own; rich would fold the table into 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 260, highlight=False)
    keys = [key for key in cases[0].names if key not in ("commit", "date")]
    rows: list[Row] = []

    def keep(row: Row) -> None:
        rows.append(row)
        if args.json:
            report.write(
                args.json, _held(module, args, parser.prog, report.joined(old, rows, keys))
            )

    with Progress(console=console) as progress:
        task = progress.add_task("", total=sum(case.rounds for case in cases))

        def say(what: str) -> None:
            progress.update(task, description=what)
            progress.advance(task)

        for row in measured(cases, args, say):
            keep(row)
        for row in getattr(module, "further", lambda *_: ())(args, rows):
            keep(row)
    return _told(module, args, console, rows, keys, earlier)


def _held(module: ModuleType, args: Args, command: str, rows: Sequence[Row]) -> Any:
    """What a file holds: rows, and where, when and how they were measured."""
    rows = [{k: v for k, v in row.items() if k[0] != "_"} for row in rows]
    more = getattr(module, "about", lambda _: {})(args)
    commits = dict.fromkeys(row["commit"] for row in rows if row.get("commit")) or [args.commit]
    return (
        rows if more is None else report.about(command, ", ".join(commits)) | more | {"rows": rows}
    )


def _told(
    module: ModuleType,
    args: Args,
    console: Console,
    rows: Sequence[Row],
    keys: Sequence[str],
    earlier: tuple[Row, list[Row]] | None,
) -> int:
    """Prints what came out; returns the exit status."""
    good = [row for row in rows if "error" not in row]
    console.print(report.table(good))
    for row in rows:
        what = " ".join(str(row[key]) for key in keys if isinstance(row.get(key), str))
        for kind in {"error", "_note"} & row.keys():
            console.print(f"{kind.strip('_')}: {what}: {row[kind]}", markup=False)
    checks = list(getattr(module, "checks", lambda *_: ())(args, rows))
    if earlier is not None:
        kept, lines = report.verdict(good, earlier, keys, args.share)
        checks += [(kept, line) for line in lines]
    for _, line in checks:
        console.print(line, markup=False)
    return int(not good or not all(ok for ok, _ in checks))
