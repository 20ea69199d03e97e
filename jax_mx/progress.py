"""How far something is that takes long."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(op: str, total: int, wanted: bool) -> Iterator[Callable[[int, str], None]]:
    """A bar on a terminal where rich is installed, else lines on stderr.

    Args:
      op: the operation, for messages.
      total: the number of its steps.
      wanted: whether to say anything.

    Yields:
      A function of how many steps are done and what the next one is.
    """
    if not wanted or not total:
        yield lambda i, text: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ModuleNotFoundError:
        Console = Progress = None
    if Progress is None or Console is None or not sys.stderr.isatty():
        yield lambda i, text: print(f"{op} {i + 1}/{total}: {text}", file=sys.stderr)
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda i, text: bar.update(task, completed=i, description=text)
