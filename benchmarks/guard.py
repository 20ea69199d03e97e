"""Compares rows of a run with earlier ones of the same chip: what has become slower.

    python -m benchmarks ... --against benchmarks/results/h200.json     # exits with 1 if any has
    python -m benchmarks.guard NEW.json benchmarks/results/h200.json [--share 0.01]

Rows are compared that measured the same on the same chip: all but their numbers, their commit and
the implementation agree.
What counts is the speed over that of the copy of the same run, so that another clock of the memory
is no change; times beside it are for reading.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SHARE = 0.01
WHAT = ("op", "form", "shape", "dtype", "format", "scaling", "scale_layout")  # was measured
CASE = (*WHAT, "device")  # rows of other chips measured something else
OURS = ("cutedsl", "flydsl", "xla")  # implementations; other rows are peers'

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Change:
    """What was measured twice.

    Attributes:
      what: the names of it.
      before: microseconds in the earlier run, and its speed over a copy's.
      now: both in this run.
    """

    what: str
    before: tuple[float, float]
    now: tuple[float, float]

    @property
    def slower(self) -> float:
        """The share by which the speed over a copy's has become less; negative: it is more."""
        return 1 - self.now[1] / self.before[1]

    def __str__(self) -> str:
        times = f"{self.before[0]:.1f} -> {self.now[0]:.1f} us"
        shares = f"{self.before[1]:.3f} -> {self.now[1]:.3f} of a copy"
        return f"{self.what}: {times}, {shares} ({-self.slower:+.1%})"


def changes(rows: Sequence[Row], earlier: Sequence[Row]) -> list[Change]:
    """Every row that measured what an earlier one did; the latest of the earlier ones counts."""
    known = {_case(row): row for row in earlier if row["implementation"] in OURS}
    return [
        Change(" ".join(row[name] for name in WHAT), _numbers(known[_case(row)]), _numbers(row))
        for row in rows
        if row["implementation"] in OURS and _case(row) in known
    ]


def _case(row: Row) -> tuple[str, ...]:
    return tuple(row.get(name, "") for name in CASE)  # once rows did not name their device


def _numbers(row: Row) -> tuple[float, float]:
    return row["us"], row["fraction_of_copy"]


def verdict(rows: Sequence[Row], earlier: Sequence[Row], share: float) -> tuple[bool, list[str]]:
    """Whether nothing is slower by more than `share`, and the lines that say so.

    Where no row measured what an earlier one did, nothing is guarded: that is no success.
    """
    found = changes(rows, earlier)
    slower = sorted((c for c in found if c.slower > share), key=lambda c: -c.slower)
    lines = [f"slower: {change}" for change in slower]
    lines.append(f"{len(slower)} of {len(found)} rows are slower by more than {share:.1%}")
    if rest := len(rows) - len(found):
        lines.append(f"{rest} rows have no earlier ones to compare with")
    return bool(found) and not slower, lines


def share(text: str) -> float:
    """A number from 0 to 1."""
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and less than 1, got {text}")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Compares two files."""
    title = "What has become slower; exits with 1 if anything has."
    parser = argparse.ArgumentParser("python -m benchmarks.guard", description=title)
    parser.add_argument("new", type=Path)
    parser.add_argument("earlier", type=Path)
    parser.add_argument("--share", type=share, default=SHARE, help="that is no change; 0.01")
    args = parser.parse_args(argv)
    new, earlier = (json.loads(path.read_text()) for path in (args.new, args.earlier))
    ok, lines = verdict(new, earlier, args.share)
    print(*lines, sep="\n")
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main())
