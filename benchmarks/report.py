"""Rows of a run: in files, as a table, and next to an earlier run's."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.table import Table
from rich.text import Text

from jax_mx.quantizing.registry import IMPLEMENTATIONS

Row = Mapping[str, Any]


# ---- files ---
def head() -> str:
    """The checkout's commit, or nothing where there is none."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    where = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return ""
    return done.stdout.strip()


def about(command: str, commit: str) -> dict[str, str]:
    """Where, when and how rows were measured; documents show it under them."""
    devices = jax.devices()
    count = f"{len(devices)} x " * (len(devices) > 1)
    where = {"device": count + devices[0].device_kind, "date": time.strftime("%Y-%m-%d")}
    return where | {"jax": jax.__version__, "commit": commit, "command": command}


class File:
    """A run's rows, and the file that holds them after each one, where there is one.

    Attributes:
      rows: so far.
      keys: of what was measured; rows of the same keys measured the same.
    """

    def __init__(
        self, args: Any, command: str, names: Row, more: Callable[[], dict[str, Any] | None]
    ):
        self.rows: list[dict[str, Any]] = []
        self.keys = [key for key in names if key not in ("commit", "date")]
        self._path, self._command, self._commit = args.json, command, args.commit
        self._more = more()
        self._old: Any = ({}, [])
        if self._path and args.join and self._path.exists():
            self._old = read(self._path)
        if self._path:
            self._path.open("a").close()  # found out now, not after minutes of measuring

    def add(self, row: Row) -> None:
        """Writes all rows; a file is replaced as a whole, so that no stop leaves a part of one."""
        self.rows.append(dict(row))
        if not self._path:
            return
        rows: Any = joined(self._old, self.rows, self.keys)
        rows = [{key: value for key, value in row.items() if key[0] != "_"} for row in rows]
        if self._more is not None:
            commits = dict.fromkeys(row["commit"] for row in rows if row.get("commit"))
            run = about(self._command, ", ".join(commits) or self._commit)
            rows = run | self._more | {"rows": rows}
        new = self._path.with_name(f"{self._path.name}.new")
        new.write_text(json.dumps(rows, indent=1) + "\n")
        new.replace(self._path)


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A file's facts of its run, and its rows; a file that is a list has rows alone."""
    held = json.loads(path.read_text() or "[]")
    if isinstance(held, list):
        return {}, held
    return {key: value for key, value in held.items() if key != "rows"}, held["rows"]


def joined(
    old: tuple[Row, Sequence[Row]], new: Sequence[Row], keys: Sequence[str]
) -> list[dict[str, Any]]:
    """Old rows, and new ones in place of old ones with the same keys.

    A new row that failed replaces none that has a time.
    """
    commit = {"commit": old[0]["commit"]} if "commit" in old[0] else {}
    rows = {_key(row, keys): {**commit, **row} for row in old[1]}
    for row in new:
        key = _key(row, keys)
        if "error" not in row or "error" in rows.get(key, {"error": ""}):
            rows[key] = dict(row)
    return [*rows.values()]


def _key(row: Row, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(row.get(key, "")) for key in (*keys, "implementation", "device"))


def one_run(rows: Sequence[Row]) -> list[Row]:
    """The rows of the largest of several runs; of equally large ones, of the last."""
    runs: dict[str, list[Row]] = {}
    for row in rows:
        runs.setdefault(row["commit"], []).append(row)
    return max(reversed(runs.values()), key=len, default=[])


# ---- what is printed ---
def table(rows: Sequence[Row]) -> Table:
    """The rows' fields, but for long lists; words that all rows have in common are the title."""
    hidden = {"_note", *(name for row in rows for name, value in row.items() if _is_long(value))}
    names = [n for n in dict.fromkeys(n for row in rows for n in row) if n not in hidden]
    texts = {name: {str(row.get(name)) for row in rows} for name in names}
    constant = {n for n in names if isinstance(rows[0].get(n), str) and len(texts[n]) == 1}
    common = [rows[0][n] for n in names if n in constant and len(rows) > 1]
    title = [jax.devices()[0].device_kind, f"jax {jax.__version__}", *common]
    result = Table(title=", ".join(dict.fromkeys(title)))
    shown = [n for n in names if len(rows) == 1 or n not in constant]
    for name in shown:
        number = any(isinstance(row.get(name), float) for row in rows)
        header = name.strip("_").replace("_", " ")
        result.add_column(header, justify="right" if number else "left", overflow="fold")
    for row in rows:
        cells = (row.get(name, "") for name in shown)
        result.add_row(*(f"{c:.2f}" if isinstance(c, float) else Text(str(c)) for c in cells))
    return result


def _is_long(value: Any) -> bool:
    return isinstance(value, list | dict) and len(value) > 4


def notes(rows: Sequence[Row], keys: Sequence[str]) -> Iterator[str]:
    """A line for each row that failed, and for each that has something to know."""
    for row in rows:
        name = " ".join(row[key] for key in keys if isinstance(row.get(key), str))
        yield from (f"{k.strip('_')}: {name}: {row[k]}" for k in ("error", "_note") if k in row)


# ---- what has become slower ---
def verdict(
    rows: Sequence[Row], earlier: tuple[Row, Sequence[Row]], keys: Sequence[str], share: float
) -> tuple[bool, list[str]]:
    """Whether nothing is slower by more than `share`, and the lines that say so.

    Where rows say their share of a copy's speed, that counts, so that another clock of the memory
    is no change; else the time does. Where no row measured what an earlier one did, nothing is
    guarded: that is no success.

    Args:
      rows: of this run.
      earlier: what a file says of its run, and its rows; the latest counts.
      keys: that rows have in common which measured the same, and the device.
      share: from 0 to 1.
    """

    def of(row: Row, device: str) -> tuple[str, ...]:
        where = {"device": device} | dict(row)
        return tuple(str(where.get(key, "")) for key in dict.fromkeys((*keys, "device")))

    def counts(row: Row) -> bool:
        """Whether it has a time and is no peer's."""
        ours = "implementation" in keys or row.get("implementation", "xla") in IMPLEMENTATIONS
        return ours and time_of(row) > 0

    known = {of(row, earlier[0].get("device", "")): row for row in earlier[1] if counts(row)}
    here = about("", "")["device"]
    pairs = [(of(row, here), row) for row in rows if counts(row)]
    changes = [_change(key, known[key], row) for key, row in pairs if key in known]
    slower = sorted((change for change in changes if change[0] > share), reverse=True)
    lines = [f"slower: {line} ({-more:+.1%})" for more, line in slower]
    lines.append(f"{len(slower)} of {len(changes)} rows are slower by more than {share:.1%}")
    if rest := len(rows) - len(changes):
        lines.append(f"{rest} rows have no earlier ones to compare with")
    return bool(changes) and not slower, lines


def time_of(row: Row) -> float:
    """The time of a row, in its own unit; 0 where it has none."""
    return row.get("us", row.get("ms", 0))


def _change(key: tuple[str, ...], before: Row, now: Row) -> tuple[float, str]:
    """By what share of its speed a row is slower, and both times and speeds."""
    unit = "us" if "us" in now else "ms"
    line = f"{' '.join(filter(None, key))}: {time_of(before):.1f} -> {time_of(now):.1f} {unit}"
    if "fraction_of_copy" not in now:
        return 1 - time_of(before) / time_of(now), line
    was, share = before["fraction_of_copy"], now["fraction_of_copy"]
    return 1 - share / was, f"{line}, {was:.3f} -> {share:.3f} of a copy"
