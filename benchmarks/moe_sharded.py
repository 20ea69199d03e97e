"""An MoE layer whose experts are split over all devices: how tokens move, and by which way.

Each row is a number of tokens a device and one way: microseconds on the wall of a call, forward and
backward with all gradients. Calls follow each other in a loop of one program; the best of several
runs counts. Tokens move in MX, or as floats, bfloat16; all shards *gather* all tokens, or tokens
travel in *rounds* to the shards that have their experts. "ratio" is to the floats that all gather,
in the same run. "dispatch" is what brings tokens to experts, quantizing and routing included.
`jax.lax.ragged_all_to_all` took 27 to 59 times as long as "mx, gather" (two H200s, JAX 0.11.2,
2026-11-25). With `--data N` there are N copies of the experts, each split over an N-th of the
devices, among which tokens move.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx
from benchmarks import moe
from benchmarks.runner import Args, Case, Timed
from jax_mx import MXFP8, Recipe
from jax_mx.experts import costs, wires
from jax_mx.products.operand import Unquantized

P = PartitionSpec
TOKENS = (2048, 4096, 8192, 16384)
RECIPES = {"mxfp8": MXFP8, "mxfp8, windows of 256": Recipe(window=256)}
WAYS = {f"{wire}, {way}": {"wire": wire, "way": way} for way in costs.WAYS for wire in wires.KINDS}
BASE = "floats, gather"


def dispatch(local: int, wire: str, way: str) -> Any:
    """A function that brings tokens (T, D) to shards of so many experts, which they choose."""

    def shard(x: jax.Array, experts: jax.Array, weights: jax.Array) -> Any:
        trip = wires.travel("d", wire, way, experts, local, x.shape[1])
        return trip.tokens(Unquantized(x, MXFP8, wanted=(True, False))), trip.choices(weights)

    rows = P(("data", "d"))
    return jax.jit(jax.shard_map(shard, in_specs=rows, out_specs=rows))


def layer(recipe: Recipe | str, wire: str, way: str) -> Any:
    """The layer with its gradients."""
    call = partial(jax_mx.moe, recipe=recipe, expert_axis="d", wire=wire, way=way)
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
    add("--k", type=int, nargs="+", default=[2], help="experts of a token")
    add("--experts", type=int, default=8)
    add("--data", type=int, default=1, metavar="N", help="copies of the experts")


def cases(args: Args) -> Iterator[Case]:
    """For each number of tokens the dispatch alone, then the layer; all ways in two rounds."""
    n = jax.device_count()
    if args.data < 1 or n % args.data:
        raise ValueError(f"--data must divide the number of devices, {n}, got {args.data}")
    kinds = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((args.data, n // args.data), ("data", "d"), axis_types=kinds)
    width, inner = (64, 64) if args.smoke else (args.width, args.inner)

    for k, tokens in itertools.product(args.k, (32,) if args.smoke else args.tokens):
        of = moe.Layer(n * tokens, k, args.experts, width, inner, backward=True)
        local = of.experts // mesh.shape["d"]
        calls: list[tuple[str, str, Any, int | None, int]] = [
            ("dispatch", name, dispatch(local, **way), 3, 40) for name, way in WAYS.items()
        ]
        calls += [
            (recipe, name, layer(r, **way), None, 10)
            for recipe, r in RECIPES.items()
            for name, way in WAYS.items()
        ]
        for name, way, fn, count, often in calls:
            names = {"what": name, "tokens": tokens, "k": k, "experts": args.experts}
            names |= {"moves": way, "devices": n, "data": args.data}
            make = partial(lambda of, count: [operands(of, mesh)[:count]], of, count)
            measure = Timed(fn, make, often, mesh=mesh)
            yield Case(f"{name}, {tokens}, {k}", way, names, measure, BASE, rounds=2)
