"""Choices: the measured implementations of calls; files and tables of them.

A `Choice` maps keys to implementations. A key has all facts that the speed of a call depends on, in
words: so a person can read and edit a file of choices.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_mx.formats.checks import shown
from jax_mx.formats.formats import BLOCK
from jax_mx.launch import files
from jax_mx.products.contraction import Contraction
from jax_mx.quantizing.mxarray import MXArray
from jax_mx.version import __version__

logger = logging.getLogger("jax_mx")

VERSION = 1  # of files
ENVIRONMENT = "JAX_MX_TUNING"
TABLES = Path(__file__).with_name("tables")
Cost = float | str  # microseconds; or why a candidate was left out


@dataclasses.dataclass(frozen=True, order=True)
class Key:
    """The words for a call that was measured.

    Attributes:
      op: its name.
      chip: as its driver names it: "sm_90", "gfx950", "cpu".
      operands: for each the format or dtype, its shape in a shard, the blocks' axis, layouts and
        window.
      how: the dimension numbers and the result's dtype.
      version: of jax_mx.
    """

    op: str
    chip: str
    operands: tuple[str, ...]
    how: str
    version: str = __version__

    def __str__(self) -> str:
        return f"{' . '.join(self.operands)}; {self.how}"


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurements of one key.

    Attributes:
      key: of the call.
      chosen: the implementation; None where none was measured to be the fastest.
      costs: of each candidate by its name: microseconds a call, or why it was left out.
      on: where it was measured: the device and JAX's version.
    """

    key: Key
    chosen: str | None
    # Two choices that say the same are one to jit, whatever was measured.
    costs: tuple[tuple[str, Cost], ...] = dataclasses.field(default=(), compare=False)
    on: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True, repr=False)
class Choice:
    """The implementations that were measured to be the fastest; see `jax_mx.autotune`.

    A frozen value. `print(choice)` shows a table. As a context manager it decides which
    implementation serves the calls that it has entries for; the inner of nested choices comes
    first. A choice is part of the key of jit's cache: a function is traced and lowered again within
    another choice.

    Attributes:
      entries: one for each measured call, sorted. `key` has op, chip, operands, how and version,
        `chosen` the implementation, or None where the rule decides, and `on` the device. `costs`
        has the microseconds of each candidate, or why it was left out.
      notes: sentences about the measurement.
    """

    entries: tuple[Measured, ...] = ()
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @classmethod
    def of(cls, entries: Iterable[Measured], notes: Sequence[str] = ()) -> Choice:
        """A choice of these entries; if several have one key, the last one counts."""
        by_key = {entry.key: entry for entry in entries}
        return cls(tuple(by_key[key] for key in sorted(by_key)), tuple(dict.fromkeys(notes)))

    @functools.cached_property
    def by_key(self) -> Mapping[Key, Measured]:
        """The entries."""
        return {entry.key: entry for entry in self.entries}

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.entries)

    def __hash__(self) -> int:
        return self._hash  # computed once: jit hashes it at every call

    def __or__(self, other: Choice) -> Choice:
        """Both: of two entries of one key the other one's."""
        if not isinstance(other, Choice):
            return NotImplemented
        return Choice.of((*self.entries, *other.entries), (*self.notes, *other.notes))

    def __repr__(self) -> str:
        return f"Choice({len(self.entries)} calls)"

    def __str__(self) -> str:
        rows = [(entry.key, entry.chosen or "by rule", entry.costs) for entry in self.entries]
        return "\n".join([*table(("chosen",), rows), *self.notes])

    def __enter__(self) -> Choice:
        outer = context.value
        entered = context(self if outer is None else outer | self)
        entered.__enter__()
        _entered().append(entered)
        return self

    def __exit__(self, *error: Any) -> None:
        _entered().pop().__exit__(*error)

    def save(self, path: str | os.PathLike) -> None:
        """Writes a JSON file, which `load` and the environment's JAX_MX_TUNING take.

        Args:
          path: of the file; it is replaced, and nothing half written is ever read.

        Raises:
          OSError: it cannot be written; the old file is as it was.
        """
        try:
            files.replace(path, to_text(self).encode())
        except OSError as error:
            raise files.failure("Choice.save", path, error) from error

    @classmethod
    def load(cls, path: str | os.PathLike) -> Choice:
        """Reads what `save` wrote.

        Args:
          path: of the file.

        Raises:
          OSError: it cannot be read.
          ValueError: it is not such a file, or has another version.
        """
        return _parsed(f"Choice.load: {path}", Path(path).read_bytes())


context = jax.make_user_context(default_value=None)  # a `Choice`; part of jit's cache's key
_local = threading.local()


def _entered() -> list[Any]:
    """The contexts that this thread is in, the innermost last."""
    if not hasattr(_local, "entered"):
        _local.entered = []
    return _local.entered


# ---- files ---
def _to_json(entry: Measured) -> dict[str, Any]:
    key = dataclasses.asdict(entry.key)
    return {**key, "chosen": entry.chosen, "costs": dict(entry.costs), "on": entry.on}


def _from_json(entry: Mapping[str, Any]) -> Measured:
    costs = {str(name): cost for name, cost in entry["costs"].items()}
    texts = [entry[name] for name in ("op", "chip", "how", "version", "on")]
    if not all(isinstance(text, str) for text in (*texts, *entry["operands"])) or not all(
        isinstance(cost, str | int | float) for cost in costs.values()
    ):
        raise TypeError
    op, chip, options, version, on = texts
    chosen = entry["chosen"]
    if chosen is not None and not isinstance(costs.get(chosen), int | float):
        raise ValueError  # what is chosen was measured
    return Measured(
        Key(op, chip, tuple(entry["operands"]), options, version), chosen, (*costs.items(),), on
    )


def to_text(choice: Choice) -> str:
    """A choice as files have it."""
    entries = [_to_json(entry) for entry in choice.entries]
    content = {"jax_mx_tuning": VERSION, "notes": choice.notes, "entries": entries}
    return json.dumps(content, indent=1) + "\n"


def from_text(text: str) -> Choice:
    """The inverse of `to_text`."""
    return _parsed("autotune: what process 0 sent", text.encode())


def _parsed(name: str, text: bytes) -> Choice:
    damaged = f"{name} is damaged, or no file that Choice.save wrote; autotune and save again"
    try:
        content = json.loads(text)
        version = content["jax_mx_tuning"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(damaged) from error
    if version != VERSION:
        raise ValueError(
            f"{name} has version {shown(version)}, this jax_mx reads version {VERSION}; autotune "
            "and save again"
        )
    try:
        return Choice.of(map(_from_json, content["entries"]), [*map(str, content["notes"])])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(damaged) from error


@functools.cache
def of_environment(path: str) -> Choice:
    """The choice of the file that JAX_MX_TUNING names; read once a process.

    Measurements by another version of jax_mx do not count; a warning says so.

    Raises:
      ValueError: the file cannot be read.
    """
    name = f"{ENVIRONMENT}: {path}"
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(
            f"{name} cannot be read ({error.strerror}); unset it, or name a file of Choice.save"
        ) from error
    choice = _parsed(name, text)
    versions = {entry.key.version for entry in choice.entries} - {__version__}
    if versions:
        logger.warning(
            "jax_mx: %s has entries of version %s, this is %s; they do not count, autotune again",
            name,
            ", ".join(sorted(versions)),
            __version__,
        )
    return choice


@functools.cache
def shipped(chip: str) -> Choice:
    """The choice that the package has for a chip; an empty one where it has none.

    It is this version's, whichever one measured it.
    """
    path = TABLES / f"{chip}.json"
    if not path.exists():
        return Choice()
    return of_this_version(_parsed(f"jax_mx: {path}", path.read_bytes()))


def of_this_version(choice: Choice) -> Choice:
    """The choice, as if this version of jax_mx had measured it."""
    return Choice.of(
        (
            dataclasses.replace(entry, key=dataclasses.replace(entry.key, version=__version__))
            for entry in choice.entries
        ),
        choice.notes,
    )


def known(chip: str) -> list[tuple[str, Choice]]:
    """The choices that apply to a chip, and where each comes from; the first one counts most."""
    choices = []
    if context.value is not None:
        choices.append(("context", context.value))
    if path := os.environ.get(ENVIRONMENT):
        choices.append((f"{ENVIRONMENT} ({path})", of_environment(path)))
    choices.append((f"table for {chip}", shipped(chip)))
    return choices


# ---- tables ---
def table(heads: Sequence[str], rows: Sequence[tuple]) -> list[str]:
    """The lines of a table of calls and what each candidate costs.

    Args:
      heads: of the columns between the call and the costs.
      rows: key, a cell for each head, costs.
    """
    if not rows:
        return ["no calls"]
    names = dict.fromkeys(name for *_, costs in rows for name, _ in costs)
    reasons: dict[str, int] = {}
    lines = [("call", *heads, *(f"{name}, us" for name in names))]
    for key, *cells, costs in rows:
        cost_by_name = dict(costs)
        cells_of_costs = []
        for name in names:
            cost = cost_by_name.get(name, "")
            if isinstance(cost, str):
                cost = f"[{reasons.setdefault(cost, len(reasons) + 1)}]" if cost else ""
            else:
                cost = f"{cost:.1f}"
            cells_of_costs.append(cost)
        lines.append((str(key), *cells, *cells_of_costs))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(
            cell.ljust(width) if i <= len(heads) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    text.insert(1, "-" * max(map(len, text)))
    return [*text, *(f"[{number}] {reason}" for reason, number in reasons.items())]


# ---- keys ---
def key_of(contraction: Contraction, chip: str) -> Key:
    """The key of a contraction's speed on a chip, as its driver names it."""
    local = contraction.in_a_shard
    return Key(local.op, chip, (_words(local.lhs), _words(local.rhs)), local.how)


def _words(x: Any) -> str:
    """All of an operand that its speed depends on."""
    shape = "x".join(map(str, x.shape))
    if not isinstance(x, MXArray):
        return f"{np.dtype(x.dtype).name} {shape}"
    block = f"in {x.block[0]}x{x.block[1]}" if len(x.block) == 2 else f"along {x.axis}"
    window = "x".join(map(str, x.window)) if isinstance(x.window, tuple) else str(x.window)
    parts = [f"{x.format.name} {shape} {block}", f"window {window}" if x.window != BLOCK else ""]
    parts += [layout.name for layout in (x.scale_layout, x.value_layout) if layout.is_tiled]
    return " ".join(filter(None, parts))
