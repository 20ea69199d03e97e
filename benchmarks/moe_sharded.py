"""An MoE layer whose experts are split over all devices: tokens that move in MX, or as floats.

    python -m benchmarks.moe_sharded [--tokens 2048 16384] [--data 2] [--json out.json]

Each row is a number of tokens a device and one way: microseconds on the wall of a call, forward and
backward with all gradients, of calls that follow each other in a loop of one program, the best of
several runs. The two ways of a recipe differ in `wire` alone; "us/floats" is the ratio to the way
that moves bfloat16, in the same run. "dispatch" is what brings all tokens to all devices,
quantizing included, by itself; its row "mx, all-to-all" sends each token only to the devices that
have its experts, and zeros in place of those that are not wanted, as lengths must be known.
`jax.lax.ragged_all_to_all`, which sends no zeros, took 27 to 59 times as long as "mx" (two H200s,
JAX 0.11.2, 2026-11-25).
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
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx
from benchmarks import moe, report
from benchmarks.collectives import microseconds
from jax_mx import MXFP8, MXArray, Recipe

P = PartitionSpec
TOKENS = (2048, 4096, 8192, 16384)
RECIPES = {"mxfp8": MXFP8, "mxfp8, windows of 256": Recipe(window=256)}
WIRES = ("floats", "mx")


def wanted(experts: jax.Array, shards: int, number: int) -> jax.Array:
    """bool (shards, T): which of T tokens want which shard, of so many experts each."""
    shard = jnp.arange(shards, dtype=experts.dtype)[:, None, None]
    return (experts // number == shard).any(-1)


def exchanged(x: jax.Array, experts: jax.Array, number: int) -> MXArray:
    """The tokens that this shard's experts want, in MX: T slots for those of each other shard."""
    tokens = jnp.arange(x.shape[0], dtype=jnp.int32)
    rows = jnp.where(wanted(experts, jax.lax.axis_size("d"), number), tokens, -1)
    return jax_mx.all_to_all(jax_mx.quantize(x, rows=rows.reshape(-1)), "d", 0, 0, tiled=True)


def dispatches(mesh: Any, number: int) -> dict[str, Callable[..., Any]]:
    """Ways to bring tokens (T, D) to those that have their experts, (T, k); bfloat16 first.

    Args:
      mesh: tokens and experts are split over.
      number: of experts of a shard.
    """
    rows = P(("data", "d"))
    split = partial(jax.shard_map, mesh=mesh, check_vma=False, in_specs=rows)
    ways = {
        "floats": split(lambda x, _: jax.lax.all_gather(x, "d", tiled=True), out_specs=P("data")),
        "mx": split(
            lambda x, _: jax_mx.all_gather(jax_mx.quantize(x), "d", tiled=True),
            out_specs=P("data"),
        ),
        "mx, all-to-all": split(partial(exchanged, number=number), out_specs=rows),
    }
    return {name: jax.jit(call) for name, call in ways.items()}


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
    failed: dict[str, str] = {}
    for _ in range(2):
        for wire, f in ways.items():
            if wire in failed:
                continue
            try:
                us = microseconds(f, *args, calls=calls)
            except Exception as error:  # one way that fails leaves the others
                failed[wire] = " ".join(str(error).split())[:300]
                continue
            best[wire] = min(us, best.get(wire, us))
    for wire in ways:
        row = {"what": name, "tokens": tokens, "moves": wire}
        if wire in failed:
            yield {**row, "error": failed[wire]}
            continue
        us = best[wire]
        yield {**row, "us": round(us, 1), "ratio": round(us / best["floats"], 3)}


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

    def tell(row: dict) -> None:
        rows.append({**row, "devices": n, "data": args.data})
        told = row.get("error") or "{us:9.1f} us {ratio:6.3f}".format(**row)
        print("{what:24} {tokens:6} {moves:22} ".format(**row) + told, flush=True)
        if args.json:
            report.write_record(args.json, "python -m benchmarks.moe_sharded", rows)

    print(f"{'what':24} {'tokens':>6} {'moves':22} {'us':>9}    us/floats")
    with jax.set_mesh(mesh):
        for tokens in args.tokens:
            case = moe.Case("", n * tokens, 2, 8, args.width, args.inner, backward=True)
            given = operands(case, mesh)
            moves = dispatches(mesh, case.experts // mesh.shape["d"])
            for row in measured("dispatch", tokens, moves, given[:2], 4 * args.calls):
                tell(row)
            for name, recipe in RECIPES.items():
                for row in measured(name, tokens, layers(recipe), given, args.calls):
                    tell(row)


if __name__ == "__main__":
    main()
