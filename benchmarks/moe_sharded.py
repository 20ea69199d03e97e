"""An MoE layer whose experts are split over all devices: tokens that move in MX, or as floats.

    python -m benchmarks.moe_sharded [--tokens 2048 16384] [--data 2] [--json out.json]

Each row is a number of tokens a device and one way: microseconds on the wall of a call, forward and
backward with all gradients, the best of several batches of calls that follow each other. The two
ways of a recipe differ in `wire` alone; "us/floats" is the ratio to the way that moves bfloat16, in
the same run. "dispatch" is what brings all tokens to all devices, quantizing included, by itself.
With `--data N` there are N copies of the experts, each split over an N-th of the devices, among
which tokens move.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx
from benchmarks import moe, report
from benchmarks.collectives import microseconds
from jax_mx import MXFP8, Recipe

P = PartitionSpec
TOKENS = (2048, 4096, 8192, 16384)
RECIPES = {"mxfp8": MXFP8, "mxfp8, windows of 256": Recipe(window=256)}
WIRES = ("floats", "mx")


def dispatches(mesh: Any) -> dict[str, Callable[..., Any]]:
    """Ways to bring tokens (T, D), split along T, to all that share experts; bfloat16 first."""
    specs = {"in_specs": P(("data", "d")), "out_specs": P("data")}
    split = partial(jax.shard_map, mesh=mesh, check_vma=False, **specs)
    return {
        "floats": jax.jit(split(lambda x: jax.lax.all_gather(x, "d", tiled=True))),
        "mx": jax.jit(split(lambda x: jax_mx.all_gather(jax_mx.quantize(x), "d", tiled=True))),
    }


def layers(recipe: Recipe) -> dict[str, Callable[..., Any]]:
    """The layer with its gradients, by how tokens move."""

    def layer(wire: str) -> Callable[..., Any]:
        return jax.jit(
            moe.with_gradients(partial(jax_mx.moe, recipe=recipe, expert_axis="d", wire=wire))
        )

    return {wire: layer(wire) for wire in WIRES}


def operands(case: moe.Case, mesh: Any) -> tuple:
    """The operands of `moe.operands`, split: tokens and experts along their first axes."""
    tokens, experts = (NamedSharding(mesh, P(axes)) for axes in (("data", "d"), "d"))
    where = (tokens, tokens, tokens, experts, experts, tokens)
    return jax.jit(partial(moe.operands, case), out_shardings=where)(jax.random.key(0))


def measured(
    name: str, tokens: int, ways: dict[str, Callable[..., Any]], args: tuple, calls: int
) -> Iterator[dict]:
    """The rows of one number of tokens a device, in two rounds: the better time of each counts."""
    best: dict[str, float] = {}
    for _ in range(2):
        for wire, f in ways.items():
            us = microseconds(f, *args, calls=calls)
            best[wire] = min(us, best.get(wire, us))
    for wire, us in best.items():
        row = {"what": name, "tokens": tokens, "moves": wire, "us": round(us, 1)}
        yield {**row, "ratio": round(us / best["floats"], 3)}


def main() -> None:
    """Runs what the arguments name, prints rows, keeps records."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of a device")
    parser.add_argument("--width", type=int, default=7168)
    parser.add_argument("--inner", type=int, default=2048)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--data", type=int, default=1, metavar="N", help="copies of the experts")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    n, rows = jax.device_count(), []
    if args.data < 1 or n % args.data:
        parser.error(f"--data must divide the number of devices, {n}, got {args.data}")
    kinds = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((args.data, n // args.data), ("data", "d"), axis_types=kinds)

    def told(row: dict) -> None:
        rows.append({**row, "devices": n, "data": args.data})
        print("{what:24} {tokens:6} {moves:7} {us:9.1f} us {ratio:6.3f}".format(**row), flush=True)
        if args.json:
            report.write_record(args.json, "python -m benchmarks.moe_sharded", rows)

    print(f"{'what':24} {'tokens':>6} {'moves':7} {'us':>9}    us/floats")
    with jax.set_mesh(mesh):
        for tokens in args.tokens:
            case = moe.Case("", n * tokens, 2, 8, args.width, args.inner, backward=True)
            given = operands(case, mesh)
            for row in measured("dispatch", tokens, dispatches(mesh), given[:1], 4 * args.calls):
                told(row)
            for name, recipe in RECIPES.items():
                for row in measured(name, tokens, layers(recipe), given, args.calls):
                    told(row)


if __name__ == "__main__":
    main()
