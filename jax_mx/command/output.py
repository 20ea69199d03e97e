"""For `python -m jax_mx`: tables, and lines about the work in progress."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

FIRST, NEXT = 1.5, 10.0  # seconds after which a step is named, and named again
Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # the columns' names, and the rows' cells


def lines_of(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as text for pipes and files, which have no width."""
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = [columns, ["-" * width for width in widths], *rows]
    texts = ("  ".join(map(str.ljust, line, widths)) for line in lines)
    return [f"  {text}".rstrip() for text in texts]


class Screen:
    """Shows lines and tables on a stream; rich draws them on a terminal.

    Attributes:
      stream: the stream.
      silent: whether only steps and the library's log are shown, as beside JSON.
    """

    def __init__(self, stream: TextIO, silent: bool = False):
        self.stream, self.silent = stream, silent
        self._console: Any = None
        if stream.isatty():
            from rich.console import Console

            self._console = Console(file=stream, markup=False, emoji=False, highlight=False)
            # The terminal breaks lines where it is narrower, and cuts nothing off.
            self._console.width = max(80, self._console.width)

    def say(self, *lines: str) -> None:
        """Prints lines."""
        if not self.silent:
            for line in lines:
                self.log(line)

    def show(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Prints a table."""
        if not rows:
            self.say(f"{title}: none", "")
        elif self._console is None:
            self.say(title, *lines_of(columns, rows), "")
        elif not self.silent:
            from rich import box
            from rich.table import Table

            style = {"box": box.SIMPLE_HEAD, "show_edge": False, "padding": 0}
            table = Table(title=title, title_justify="left", **style)
            for name, *cells in zip(columns, *rows, strict=True):
                # Words stay whole: a column of single words has the words of its name below
                # each other, and other columns wrap.
                single = not any(" " in cell for cell in cells)
                table.add_column(name.replace(" ", "\n") if single else name, no_wrap=single)
            for row in rows:
                table.add_row(*row)
            self._console.print(table)
            self.say("")

    def log(self, line: str) -> None:
        """Prints a line, also where the screen is silent."""
        if self._console is not None:
            self._console.print(line)
        else:
            print(line, file=self.stream, flush=True)

    @contextlib.contextmanager
    def step(self, step: str) -> Iterator[None]:
        """Names a step while it lasts: at once on a terminal, elsewhere in a line now and then."""
        if self._console is not None:
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            text = TextColumn("{task.description}", markup=False)
            columns = SpinnerColumn(), text, TimeElapsedColumn()
            with Progress(*columns, console=self._console, transient=True) as progress:
                progress.add_task(step, total=None)
                yield
            return
        done = threading.Event()
        thread = threading.Thread(target=self._repeat, args=(step, done), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _repeat(self, step: str, done: threading.Event) -> None:
        start, wait = time.monotonic(), FIRST
        with contextlib.suppress(OSError, ValueError):  # nobody reads the stream any more
            while not done.wait(wait):
                self.log(f"... {step}, {time.monotonic() - start:.0f} s")
                wait = NEXT

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        """Prints the library's log while this lasts."""
        handler, logger = logging.Handler(logging.INFO), logging.getLogger("jax_mx")
        handler.emit = lambda record: self.log(f"... {record.getMessage()}")
        before, logger.propagate = logger.propagate, False
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.propagate = before
