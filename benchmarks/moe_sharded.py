"""An MoE layer whose experts are split over all devices: tokens that move in MX, or as floats.

Each row is a number of tokens a device and one way: microseconds on the wall of a call, forward and
backward with all gradients, of calls that follow each other in a loop of one program, the best of
several runs. The two ways of a recipe differ in `wire` alone; "ratio" is to the way that moves
bfloat16, in the same run. "dispatch" is what brings all tokens to all devices, quantizing included,
by itself; its row "mx, all-to-all" sends each token only to the devices that have its experts, and
zeros in place of those that are not wanted, as lengths must be known.
`jax.lax.ragged_all_to_all`, which sends no zeros, took 27 to 59 times as long as "mx" (two H200s,
JAX 0.11.2, 2026-11-25).
With `--data N` there are N copies of the experts, each split over an N-th of the devices, among
which tokens move.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx
from benchmarks import moe
from benchmarks.runner import Args, Case, Timed
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


def layer(recipe: Recipe, wire: str) -> Any:
    """The layer with its gradients."""
    call = partial(jax_mx.moe, recipe=recipe, expert_axis="d", wire=wire)
    return jax.jit(moe.with_gradients(call))


@lru_cache(maxsize=1)  # all ways of a number of tokens have the same
def operands(case: moe.Layer, mesh: Any) -> tuple:
    """The operands of `moe.operands`, split: tokens and experts along their first axes."""
    tokens, experts = (NamedSharding(mesh, P(axes)) for axes in (("data", "d"), "d"))
    where = (tokens, tokens, tokens, experts, experts, tokens)
    return jax.jit(partial(moe.operands, case, None), out_shardings=where)(jax.random.key(0))


def options(add: Callable[..., Any]) -> None:
    """Sizes."""
    add("--tokens", type=int, nargs="+", default=TOKENS, help="of a device")
    add("--width", type=int, default=7168)
    add("--inner", type=int, default=2048)
    add("--data", type=int, default=1, metavar="N", help="copies of the experts")


def cases(args: Args) -> Iterator[Case]:
    """For each number of tokens the dispatch alone, then the layer; all ways in two rounds."""
    n = jax.device_count()
    if args.data < 1 or n % args.data:
        raise ValueError(f"--data must divide the number of devices, {n}, got {args.data}")
    kinds = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((args.data, n // args.data), ("data", "d"), axis_types=kinds)
    width, inner = (64, 64) if args.smoke else (args.width, args.inner)

    for tokens in (32,) if args.smoke else args.tokens:
        of = moe.Layer(n * tokens, 2, 8, width, inner, backward=True)
        calls: list[tuple[str, str, Any, int | None, int]] = [
            ("dispatch", wire, fn, 2, 40)
            for wire, fn in dispatches(mesh, of.experts // mesh.shape["d"]).items()
        ]
        calls += [
            (recipe, w, layer(r, w), None, 10) for recipe, r in RECIPES.items() for w in WIRES
        ]
        for name, wire, fn, count, often in calls:
            names = {"what": name, "tokens": tokens, "moves": wire, "devices": n, "data": args.data}
            make = partial(lambda of, count: [operands(of, mesh)[:count]], of, count)
            measure = Timed(fn, make, often, mesh=mesh)
            yield Case(f"{name}, {tokens}", wire, names, measure, "floats", rounds=2)
