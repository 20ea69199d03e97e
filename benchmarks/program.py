"""A compiled program: its kernels and their times, its collectives and their bytes."""

import bisect
import collections
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from rich.table import Table

from benchmarks import timing


# ---- kernels ---
class Spent(NamedTuple):
    """The launches of one name in a step, and their time."""

    ms: float
    launches: float


def kernels(events: Iterable[timing.Event], steps: int) -> dict[str, Spent]:
    """By name of a kernel what it took in each of so many steps, the longest first."""
    spent: dict[str, list[float]] = collections.defaultdict(list)
    for event in events:
        spent[kernel_name(event.name)].append(event.duration_ns / 1e6)
    every = {name: Spent(sum(ms) / steps, len(ms) / steps) for name, ms in spent.items()}
    return dict(sorted(every.items(), key=lambda item: -item[1].ms))


def kernel_name(name: str) -> str:
    """A launch's name without template arguments and the numbers that XLA appends."""
    return re.sub(r"([._]\d+)+$", "", re.split("[<(]", name.removeprefix("void "))[0])


def kernel_table(title: str, every: Mapping[str, Spent], shown: int = 30) -> Table:
    """The longest ones, and the sum of all."""
    table = Table("kernel", title=title)
    for head in ("ms", "launches"):
        table.add_column(head, justify="right")
    rest = [*every.values()][shown:]
    lines = [*list(every.items())[:shown], (f"{len(rest)} others", _together(rest))]
    for name, spent in [*lines, ("all", _together(every.values()))]:
        table.add_row(name[:90], f"{spent.ms:.2f}", f"{spent.launches:.0f}")
    return table


def _together(every: Iterable[Spent]) -> Spent:
    """The sum of all."""
    every = list(every)
    return Spent(sum(s.ms for s in every), sum(s.launches for s in every))


def overlap(events: Iterable[timing.Event]) -> tuple[float, float]:
    """Milliseconds of collectives, and the part of them while other kernels run."""
    moves: list[tuple[float, float]] = []
    others: list[tuple[float, float]] = []
    for event in sorted(events):
        spans = moves if "nccl" in event.name.lower() else others
        begin, end = event.start_ns, event.start_ns + event.duration_ns
        if spans and begin <= spans[-1][1]:  # spans are apart, in order
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((begin, end))
    starts = [begin for begin, _ in others]
    together = 0.0
    for begin, end in moves:
        first = max(bisect.bisect_right(starts, begin) - 1, 0)
        for other in itertools.takewhile(lambda span, end=end: span[0] < end, others[first:]):
            together += max(min(end, other[1]) - max(begin, other[0]), 0.0)
    return sum(end - begin for begin, end in moves) / 1e6, together / 1e6


# ---- collectives ---
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_MOVE = re.compile(rf"= (.*?) ({'|'.join(COLLECTIVES)})(-start)?\(")
_ARRAY = re.compile(r"\b(pred|bf16|[suf]\d+[a-z0-9]*)\[([\d,]*)\]")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_CALL = re.compile(r"(body|calls|to_apply)=%?([\w.-]+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


def collectives(text: str) -> dict[tuple[str, str], int]:
    """By collective and type how many bytes arrive on a device when a program runs once.

    A collective of a loop counts as often as the loop runs, where XLA knows that.

    Args:
      text: of a compiled program, see `jax.stages.Compiled.as_text`.
    """
    lines: dict[str, list[str]] = {}
    entry = current = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = head[2]
            entry = current if head[1] else entry
        lines.setdefault(current, []).append(line)
    moved: collections.Counter[tuple[str, str]] = collections.Counter()

    def visit(name: str, times: int) -> None:
        for line in lines.get(name, ()):
            for move, size in _moves(line):
                moved[move] += times * size
            trips = _TRIPS.search(line)
            for _, callee in _CALL.findall(line):
                visit(callee, times * (int(trips[1]) if trips else 1))

    visit(entry, 1)
    return dict(moved)


def _moves(line: str) -> Iterator[tuple[tuple[str, str], int]]:
    """The collective of an instruction, for each of its results, and the result's bytes."""
    if not (move := _MOVE.search(line)):
        return
    arrays = _ARRAY.findall(move[1])
    if move[3] and move[2] != "all-reduce":  # operands, then results, then what it waits for
        arrays = [array for array in arrays if array != ("u32", "")]
        arrays = arrays[len(arrays) // 2 :]
    for dtype, shape in arrays:
        yield (move[2], dtype), math.prod(map(int, filter(None, shape.split(",")))) * _bytes(dtype)


def _bytes(dtype: str) -> int:
    """The bytes of an element; XLA's name of a type says its bits first."""
    return 1 if dtype == "pred" else max(int(re.sub(r"\D*(\d+).*", r"\1", dtype)) // 8, 1)


def move_table(title: str, moved: Mapping[tuple[str, str], int]) -> Table:
    """The bytes that arrive on a device in a step."""
    table = Table("collective", "type", title=title)
    table.add_column("MB", justify="right")
    for (name, dtype), size in sorted(moved.items(), key=lambda item: -item[1]):
        table.add_row(name, dtype, f"{size / 1e6:,.1f}")
    return table
