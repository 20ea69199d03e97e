"""Collectives in MX beside the same ones in bfloat16, over all devices that there are.

    python -m benchmarks.collectives --json collectives.json

Each row is one way to bring bfloat16 floats to where they are needed, quantizing included:
microseconds on the wall a call, of calls that follow each other in a loop of one program, the best
of several runs. "us/bf16" is the ratio to bfloat16's time for that case in the same run.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import jax_mx
from benchmarks import report
from jax_mx import MXFP8, Recipe

P = PartitionSpec
Call = Callable[[jax.Array], Any]
SQUARE = Recipe(block=(32, 32))


class Case(NamedTuple):
    """An array, of all devices together, and what is done with it.

    Attributes:
      shape: of the bfloat16 array.
      spec: how it is split.
      ways: by name the calls, in shard_map, or under jit where the name says so.
      out: how the results of those in shard_map are split.
    """

    shape: tuple[int, ...]
    spec: PartitionSpec
    ways: dict[str, Call]
    out: PartitionSpec = P()  # immutable


def gathers(axis: int) -> dict[str, Call]:
    """Ways to gather a weight (experts, in, out) that is split along an axis."""
    spec = P(*[None] * axis, "d")

    def weight(recipe: Recipe, forms: int = 2) -> Call:
        def call(w: jax.Array) -> Any:
            whole = jax_mx.gather_weight(w, spec, recipe, batch=0)
            return (whole.contracted_form, whole.free_form)[:forms]

        return call

    return {
        "bf16": lambda w: jax.lax.all_gather(w, "d", axis=axis, tiled=True),
        "quantize, all_gather": lambda w: jax_mx.all_gather(
            jax_mx.quantize(w), "d", axis=axis, tiled=True
        ),
        "to MXFP4": lambda w: jax_mx.all_gather(
            jax_mx.quantize(w, "mxfp4_e2m1"), "d", axis=axis, tiled=True
        ),
        "gather_weight, forward": weight(MXFP8, 1),
        "gather_weight, both directions": weight(MXFP8),
        "gather_weight, square blocks": weight(SQUARE),
        "jit: bf16": lambda w: jax.lax.with_sharding_constraint(w, P()),
        "jit: gather_weight, forward": weight(MXFP8, 1),
        "jit: gather_weight, square blocks": weight(SQUARE),
    }


EXCHANGES: dict[str, Call] = {
    "bf16": lambda x: jax.lax.all_to_all(x, "d", 0, 0, tiled=True),
    "quantize, all_to_all": lambda x: jax_mx.all_to_all(jax_mx.quantize(x), "d", 0, 0, tiled=True),
    "to MXFP4": lambda x: jax_mx.all_to_all(
        jax_mx.quantize(x, "mxfp4_e2m1"), "d", 0, 0, tiled=True
    ),
}
CASES = {
    "gather, split along in": Case((8, 7168, 4096), P(None, "d"), gathers(1)),
    "gather, split along experts": Case((8, 7168, 4096), P("d"), gathers(0)),
    "all-to-all": Case((32768, 7168), P("d"), EXCHANGES, P("d")),
    "all-to-all, few tokens": Case((1024, 7168), P("d"), EXCHANGES, P("d")),
}


def program(case: Case, way: str, mesh: Any) -> Any:
    """The jitted call."""
    call = case.ways[way]
    if way.startswith("jit: "):
        return jax.jit(call)
    local = jax.shard_map(call, mesh=mesh, in_specs=case.spec, out_specs=case.out, check_vma=False)
    return jax.jit(local)


def in_a_loop(f: Call, calls: int) -> Any:
    """A program that calls f so many times, each time when the call before is done.

    As in a program that has other work beside: a small move alone is over before the host has
    launched the next one.
    """

    def run(*args: jax.Array) -> Any:
        like = jax.eval_shape(f, *args)
        nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)

        def again(_: jax.Array, held: Any) -> Any:
            args, _ = held
            return jax.lax.optimization_barrier((args, f(*args)))

        return jax.lax.fori_loop(0, calls, again, (args, nothing))[1]

    return jax.jit(run)


def microseconds(f: Callable[..., Any], *args: Any, calls: int, batches: int = 3) -> float:
    """What a call takes in the best batch."""
    program, best = in_a_loop(f, calls), math.inf
    jax.block_until_ready(program(*args))
    for _ in range(batches):
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


def measured(name: str, mesh: Any, calls: int, scale: int, report: Callable[[Any], None]) -> None:
    """The rows of a case."""
    case = CASES[name]
    shape = tuple(max(n // scale, 64 * mesh.size) if n > 8 else n for n in case.shape)
    where = NamedSharding(mesh, case.spec)
    make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16), out_shardings=where)
    x = make(jax.random.key(0))
    base = {}
    for way in case.ways:
        try:
            us = microseconds(program(case, way, mesh), x, calls=calls)
        except Exception as error:  # one way that fails leaves the others
            report({"case": name, "way": way, "error": str(error)[:300]})
            continue
        kind = "jit: bf16" if way.startswith("jit: ") else "bf16"
        base.setdefault(way, us)
        row = {"case": name, "way": way, "shape": list(shape), "us": round(us, 1)}
        report({**row, "ratio": round(us / base[kind], 3)})


def main() -> None:
    """Runs what the arguments name, prints a table, keeps records."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collectives", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="1/64 of each length, to try it out")
    parser.add_argument("--json", type=Path, help="where records go; what it holds is replaced")
    options = parser.parse_args()
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))
    console, rows = Console(), []
    table = Table("case", "way", "us", "us/bf16")
    with jax.set_mesh(mesh), console.status("") as status:
        for name in options.cases:
            status.update(name)
            measured(name, mesh, options.calls, 64 if options.tiny else 1, rows.append)
    for row in rows:
        table.add_row(*(str(row.get(k, "")) for k in ("case", "way", "us", "ratio")))
    console.print(table)
    for row in rows:
        if "error" in row:
            console.print(f"{row['case']}: {row['way']} failed: {row['error']}")
    if options.json:
        report.write_record(options.json, "python -m benchmarks.collectives", rows)


if __name__ == "__main__":
    main()
