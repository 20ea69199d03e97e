"""For `python -m jax_mx`: tables that fit the screen, and lines that say what goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

FIRST, NEXT = 1.5, 10.0  # seconds after which a step is named, and named again
_GAP = 2  # blanks between columns


# ---- tables --------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
      name: its heading.
      number: whether its cells are aligned to the right.
      wraps: whether a cell may take several lines; it is split between words.
      optional: columns with the highest number are left out first where a table is too wide;
        0: never left out.
    """

    name: str
    number: bool = False
    wraps: bool = False
    optional: int = 0


def table(
    title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int
) -> list[str]:
    """The lines of a table that is at most `width` wide, if that is possible at all.

    Rows with the same first cell stand together; there is a gap between such groups if the first
    column has more than one row in some of them.
    """
    if not rows:
        return [f"{title}: none", ""]
    kept = list(range(len(columns)))
    while (widths := _widths(columns, rows, kept, width)) is None:
        kept.remove(max(kept, key=lambda i: (columns[i].optional, i)))
    lines = [title, _line([columns[i].name for i in kept], columns, kept, widths)]
    lines.append("  " + "-" * (sum(widths) + _GAP * (len(widths) - 1)))
    groups = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row[0])]
    for number, group in enumerate(groups):
        if number and max(map(len, groups)) > 1:
            lines.append("")
        for row in group:
            lines += _row(row, columns, kept, widths)
    if missing := [column.name for i, column in enumerate(columns) if i not in kept]:
        note = f"Left out on a narrow screen: {', '.join(missing)}; --json has them."
        lines += ["", *(f"  {line}" for line in wrapped(note, width - 2))]
    return [*lines, ""]


def wrapped(text: str, width: int) -> list[str]:
    """The lines of a text, split between words alone."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _widths(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], kept: Sequence[int], width: int
) -> list[int] | None:
    """The widths of the columns kept; None where one should be left out."""
    cells = [[columns[i].name, *(row[i] for row in rows)] for i in kept]
    widths = [max(map(len, column)) for column in cells]
    excess = 2 + sum(widths) + _GAP * (len(widths) - 1) - width
    for at, i in enumerate(kept):
        if excess > 0 and columns[i].wraps:
            longest_word = max(len(word) for cell in cells[at] for word in cell.split() or [""])
            taken = min(excess, widths[at] - longest_word)
            widths[at] -= taken
            excess -= taken
    return None if excess > 0 and any(columns[i].optional for i in kept) else widths


def _row(
    row: Sequence[str], columns: Sequence[Column], kept: Sequence[int], widths: Sequence[int]
) -> Iterator[str]:
    """The lines of a row."""
    split = [
        wrapped(row[i], width) if columns[i].wraps else [row[i]]
        for i, width in zip(kept, widths, strict=True)
    ]
    for line in itertools.zip_longest(*split, fillvalue=""):
        yield _line(line, columns, kept, widths)


def _line(
    cells: Sequence[str], columns: Sequence[Column], kept: Sequence[int], widths: Sequence[int]
) -> str:
    each = zip(cells, kept, widths, strict=True)
    texts = [cell.rjust(n) if columns[i].number else cell.ljust(n) for cell, i, n in each]
    return ("  " + (" " * _GAP).join(texts)).rstrip()


def jsonable(value: Any) -> Any:
    """A value as JSON has it: dataclasses are objects, what is no number is null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: jsonable(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- steps ---------------------------------------------------------------------------------------
class Steps:
    """Says which step of the program takes time, so that it is never silent for long.

    On a terminal the step and its time stand in the last line while it lasts. Elsewhere a step that
    lasts longer than `FIRST` seconds gets a line, and a further one each `NEXT` seconds.
    """

    def __init__(self, stream: TextIO):
        self.stream = stream
        self._console: Any = None
        if stream.isatty():
            from rich.console import Console

            self._console = Console(file=stream, markup=False, emoji=False, highlight=False)

    def say(self, line: str) -> None:
        """Prints a line."""
        if self._console is not None:
            self._console.print(line, soft_wrap=True)
        else:
            print(line, file=self.stream, flush=True)

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """While this lasts, the program does `what`."""
        waiting = self._live(what) if self._console is not None else self._plain(what)
        with waiting:
            yield

    @contextlib.contextmanager
    def _live(self, what: str) -> Iterator[None]:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        text = TextColumn("{task.description}", markup=False)
        columns = (SpinnerColumn(), text, TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            progress.add_task(what, total=None)
            yield

    @contextlib.contextmanager
    def _plain(self, what: str) -> Iterator[None]:
        start, done = time.monotonic(), threading.Event()

        def speak() -> None:
            wait = FIRST
            with contextlib.suppress(OSError, ValueError):  # nobody listens any more
                while not done.wait(wait):
                    self.say(f"... {what}, {time.monotonic() - start:.0f} s")
                    wait = NEXT

        thread = threading.Thread(target=speak, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        """While this lasts, what the library logs is said as other lines are."""
        handler, logger = _Handler(self), logging.getLogger("jax_mx")
        before = logger.propagate
        logger.addHandler(handler)
        logger.propagate = False
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.propagate = before


class _Handler(logging.Handler):
    def __init__(self, steps: Steps):
        super().__init__(logging.INFO)
        self.steps = steps

    def emit(self, record: logging.LogRecord) -> None:
        self.steps.say(f"... {record.getMessage()}")
