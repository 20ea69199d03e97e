"""The implementations of products by arch, and their executions, for `python -m jax_mx`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jax_mx
from jax_mx.command.output import Table
from jax_mx.formats.windows import ROW
from jax_mx.launch.chips import ARCHS
from jax_mx.products.implementations import IMPLEMENTATIONS
from jax_mx.shipping import verified

# How names of binaries of products begin.
_BINARIES = ("matmul", "wgrad")


def multiplying() -> list[dict[str, Any]]:
    """For each arch, what serves products in MXFP8, how it was executed, what would bring more."""
    rows: list[dict[str, Any]] = []
    for archs in ARCHS.values():
        for arch, chips in archs.items():
            chip = next(iter(chips))
            answers = {"dense": dense_on(chip), "grouped": grouped_on(chip)}
            served = {shape: names for shape, (names, _) in answers.items()}
            lacks = dict.fromkeys(note for _, notes in answers.values() for note in notes)
            names = dict.fromkeys(name for names in served.values() for name in names)
            places = {name: where for name in names if (where := executed(name, arch))}
            facts: dict[str, Any] = {"arch": arch, "products": ", ".join(chips.values())}
            rows.append(facts | served | {"executed": places, "lacks": [*lacks]})
    return rows


def lacking(facts: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each arch on which a newer JAX, or a package, would bring kernels."""
    return [f"{row['arch']}: {note}" for row in facts for note in row["lacks"]]


def multiplying_table(facts: Sequence[dict[str, Any]]) -> Table:
    """A row for each arch."""
    head = ("arch", "GPUs", "products by", "over groups by", "executed and compared")
    rows = [
        [
            *(row["arch"], row["products"], ", ".join(row["dense"]), ", ".join(row["grouped"])),
            "; ".join(f"{name}: {where}" for name, where in row["executed"].items()),
        ]
        for row in facts
    ]
    return head, rows


Serving = tuple[list[str], list[str]]  # implementations, and what is passed over and why


def dense_on(chip: str) -> Serving:
    """The names that serve a dense MXFP8 product on a chip: windows of 32, of 256 and of rows."""
    w, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((512, 512), (1024, 512)))
    recipes = [jax_mx.Recipe(), jax_mx.Recipe(window=256), jax_mx.Recipe(window=ROW)]
    product: Any = jax_mx.matmul
    return _served([functools.partial(product, recipe=recipe) for recipe in recipes], chip, x, w)


def grouped_on(chip: str) -> Serving:
    """The names that serve the three products of a layer of experts, by the recipe "auto"."""
    shapes = ((1024, 512), jnp.bfloat16), ((4, 512, 512), jnp.bfloat16), ((4,), jnp.int32)
    x, w, sizes = (jax.ShapeDtypeStruct(*shape) for shape in shapes)

    def loss(x: Any, w: Any, sizes: Any) -> Any:
        return jax_mx.ragged_dot(x, w, sizes).astype(jnp.float32).sum()

    return _served([jax.grad(loss, (0, 1))], chip, x, w, sizes)


def _served(functions: Sequence[Any], chip: str, *args: Any) -> Serving:
    explained = [jax_mx.explain(f, *args, device=chip) for f in functions]
    names = dict.fromkeys(call.chosen for one in explained for call in one.calls)
    notes = dict.fromkeys(note.partition(": ")[2] for one in explained for note in one.notes)
    return [*names], [*notes]


def executed(name: str, arch: str) -> str:
    """Where kernels of an implementation were executed for an arch; empty: XLA has its kernels."""
    if where := IMPLEMENTATIONS[name].executed:
        return where
    if not any(name in dsl for dsl in ARCHS):
        return ""
    entries = verified.read(arch).items()
    runs = [entry["executed_on"] for binary, entry in entries if binary.startswith(_BINARIES)]
    devices = sorted({run.split(", ")[0] for names in runs for run in names})
    if not devices or not all(runs):
        return "compiled"
    return " and ".join(device.replace("emulated", "AMD's emulator") for device in devices)
