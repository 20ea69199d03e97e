"""Collectives in MX beside the same ones in bfloat16, over all devices.

    python -m benchmarks collectives --mib 64 256 1024  # arrays of these sizes

Each row is one way to bring bfloat16 floats to where they are needed, quantizing included:
microseconds on the wall a call, of calls that follow each other in a loop of one program, the best
of several runs. "ratio" is to bfloat16's time for that case in the same run.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx
from benchmarks import timing
from benchmarks.runner import Args, Case, Timed
from jax_mx import MXFP8, Recipe

P = PartitionSpec
Call = Callable[[jax.Array], Any]


class Move(NamedTuple):
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
        "gather_weight, square blocks": weight(Recipe(block=(32, 32))),
        "jit: bf16": lambda w: jax.lax.with_sharding_constraint(w, P()),
        "jit: gather_weight, forward": weight(MXFP8, 1),
        "jit: gather_weight, square blocks": weight(Recipe(block=(32, 32))),
    }


EXCHANGES: dict[str, Call] = {
    "bf16": lambda x: jax.lax.all_to_all(x, "d", 0, 0, tiled=True),
    "quantize, all_to_all": lambda x: jax_mx.all_to_all(jax_mx.quantize(x), "d", 0, 0, tiled=True),
    "to MXFP4": lambda x: jax_mx.all_to_all(
        jax_mx.quantize(x, "mxfp4_e2m1"), "d", 0, 0, tiled=True
    ),
}
MOVES = {
    "gather, split along in": Move((8, 7168, 4096), P(None, "d"), gathers(1)),
    "gather, split along experts": Move((8, 7168, 4096), P("d"), gathers(0)),
    "all-to-all": Move((32768, 7168), P("d"), EXCHANGES, P("d")),
    "all-to-all, few tokens": Move((1024, 7168), P("d"), EXCHANGES, P("d")),
}


def sized(mib: int) -> dict[str, Move]:
    """An array of so many MiB that moves in each of three ways."""
    weight, rows = (8, 4096, 16 * mib), (64 * mib, 8192)
    return {
        "gather, split along in": Move(weight, P(None, "d"), gathers(1)),
        "gather, split along experts": Move(weight, P("d"), gathers(0)),
        "all-to-all": Move(rows, P("d"), EXCHANGES, P("d")),
    }


def options(add: Callable[..., Any]) -> None:
    """Sizes."""
    add("--mib", type=int, nargs="+", metavar="N", help="of bfloat16, instead of the usual arrays")


def program(move: Move, way: str, mesh: Any) -> Any:
    """The jitted call."""
    call = move.ways[way]
    if way.startswith("jit: "):
        return jax.jit(call)
    local = jax.shard_map(call, mesh=mesh, in_specs=move.spec, out_specs=move.out, check_vma=False)
    return jax.jit(local)


@lru_cache(maxsize=1)  # all ways of a case have the same
def operand(shape: tuple[int, ...], where: NamedSharding) -> timing.Inputs:
    """An array, split."""
    make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16), out_shardings=where)
    return [(make(jax.random.key(0)),)]


def cases(args: Args) -> Iterator[Case]:
    """Every way of every move."""
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))
    moves = {name: (name, move) for name, move in MOVES.items()}
    if args.mib:
        moves = {
            f"{name}, {mib} MiB": (name, move)
            for mib in args.mib
            for name, move in sized(mib).items()
        }

    for case, (name, move) in moves.items():
        shape = tuple(64 * mesh.size if args.smoke and n > 8 else n for n in move.shape)
        make = partial(operand, shape, NamedSharding(mesh, move.spec))
        for way in move.ways:
            names = {"case": name, "way": way, "shape": list(shape)}
            measure = Timed(program(move, way, mesh), make, 20, mesh=mesh)
            yield Case(case, way, names, measure, "jit: bf16" if way[:5] == "jit: " else "bf16")
