"""An entry of a binary, in whichever DSL, and its launch rule; see ffi/launch.cc."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from jax_mx.launch.rule import JSON

ONLY = "all"  # the launch of a binary that has one


class Entry:
    """An entry of a binary: its launch rule. A subclass has the `kernel`, in the words of a DSL.

    Each attribute but `threads` and `cluster` is in the words of rule.py, or in their JSON.

    Attributes:
      types: the types that the kernel's pointers point to, in the DSL's words; () of FlyDSL: to
        bytes.
      align: the number of bytes that divides the address of each buffer; operands before results.
      scalars: the integers that the kernel takes behind the buffers' pointers.
      divide: factors: the entry takes only extents that the divisor divides.
      threads: of a workgroup.
      grid: the terms of the grid's axes.
      dynamic_shared: bytes of shared memory that a launch gives beside the kernel's own.
      cluster: how many thread blocks a cluster has.
      scratch: results that are workspace.
      reported: further facts of the entry in the manifest, besides the compiler's.
    """

    types: Sequence = ()
    align: Sequence[int]
    scalars: Sequence = ()
    divide: Sequence = ()
    threads: int
    grid: Sequence
    dynamic_shared = 0
    cluster = 1
    scratch: Sequence = ()
    reported: Mapping[str, Any] = {}

    @property
    def launch(self) -> dict[str, Any]:
        """The entry's launch rule, in JSON."""
        return {
            "align": [*self.align],
            "divide": json_of(self.divide),
            "threads": [self.threads, 1, 1],
            "grid": json_of(self.grid),
            **({"shared": self.dynamic_shared} if self.dynamic_shared else {}),
            **({"cluster": [self.cluster, 1, 1]} if self.cluster > 1 else {}),
        }


def json_of(words: Sequence) -> list[JSON]:
    """Words of rule.py as JSON; those that are JSON already stay."""
    return [word.to_json() if hasattr(word, "to_json") else word for word in words]


def entries_of(binary: Any, arch: str) -> Sequence[Entry]:
    """The entries that the module of a `ModuleBinary` lists for an arch.

    Raises:
      ValueError: a mistake in them, for which compilers have no words.
    """
    entries = importlib.import_module(binary.module).entries(binary.dtypes, arch)
    if not isinstance(entries, (list, tuple)):
        raise ValueError(f"{binary.module}.entries returned no list; return a list of entries")
    for entry in entries:
        align, types = len(entry.align), len(entry.types)
        if types and align != types:
            name = type(entry).__name__
            raise ValueError(
                f"{name}: align has {align}, types has {types}; both have one for each buffer"
            )
    return entries


def launches(
    kernels: Mapping[str, Sequence[Entry]], usage: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """A binary's launches in the manifest's words.

    Args:
      kernels: by the name of a launch, its entries.
      usage: the compiler's figures for each symbol, `threads` included; symbols are in the order of
        all entries, NAME_0, NAME_1 and so on, ten at most.

    Raises:
      RuntimeError: an entry was compiled for other threads.
    """
    rules, symbols = {}, iter(sorted(usage))
    for name, entries in kernels.items():
        rules[name] = {"scalars": json_of(entries[0].scalars), "entries": []}
        if entries[0].scratch:
            rules[name]["scratch"] = json_of(entries[0].scratch)
        for entry in entries:
            symbol = next(symbols)
            facts = {**usage[symbol], **entry.reported}
            if tuple(threads := facts.pop("threads")) != (entry.threads, 1, 1):
                raise RuntimeError(f"{symbol}: compiled for {threads} threads")
            rules[name]["entries"].append({"symbol": symbol, **entry.launch, "usage": facts})
    return rules
