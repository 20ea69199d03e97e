"""A quantizer and the products behind it, of codes or of what these stand for.

Where products multiply floats, one kernel quantizes an operand and gives the floats that its codes
stand for, beside codes that wait for the backward pass; codes to begin with would be written, read
and written again as floats: 7 bytes an element, not 5, of a gradient 10, not 6 (an H100,
2026-11-27, (16384, 7168) in MXFP8: 291 us and 209; 411 and 245).

What products multiply is known when they are lowered. So such a step is a primitive that holds
itself of codes, and can be traced of floats. Transformations see the former; jax.checkpoint looks
into it, so that its policies find the names of codes there.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import mlir

from jax_mx.lowering import primitive, registry, targets
from jax_mx.lowering.plan import Plan
from jax_mx.products import calls
from jax_mx.products.implementations import Table, chips_of, serving

Names = tuple[str, ...]
Flat = Callable[..., list[jax.Array]]  # of leaves
Floats = Callable[[Names], Flat]  # the step of floats, by names of implementations


def either(worth: bool, step: Callable[..., Any], *args: Any) -> Any:
    """A step of codes, or of floats where all of its products multiply floats.

    Args:
      worth: whether there may be kernels for the latter.
      step: takes None or names, then `args`. Of None its quantizers give codes. Else they give
        floats, where products read these, and its products take the implementations of these
        names, in their order. All arrays that it reads are among `args`.
      args: pytrees.

    Returns:
      What `step(None, *args)` does.
    """
    config: Any = jax.config
    if not worth or config.jax_disable_jit:  # which would compile each call anew, and keep it
        return step(None, *args)
    leaves, tree = jax.tree.flatten(args)
    traced: list[Any] = []  # of codes: which argument each result is, or None; and their tree

    def own(names: Names | None, *leaves: jax.Array) -> list[jax.Array]:
        results, like = jax.tree.flatten(step(names, *tree.unflatten(leaves)))
        if not traced:
            places = {id(leaf): i for i, leaf in enumerate(leaves)}
            traced.extend(([places.get(id(each)) for each in results], like))
        return [each for each, place in zip(results, traced[0], strict=True) if place is None]

    codes = jax.make_jaxpr(functools.partial(own, None))(*leaves)
    made = iter(either_p.bind(*leaves, codes=codes, floats=lambda n: functools.partial(own, n)))
    # What a step hands through stays the caller's array: of a scan, a residual that is one of its
    # constants is not kept once for each iteration.
    places, like = traced
    return like.unflatten([next(made) if place is None else leaves[place] for place in places])


def by_names(static: Any, names: Names | None) -> tuple[Iterator[Any], bool]:
    """What a step of these names has: `static` for each of its products, and whether floats.

    Args:
      static: what of a product is no array; with names, its `implementation` is that of its name.
      names: see `either`.
    """
    if names is None:
        return itertools.repeat(static), False
    return (static._replace(implementation=name) for name in names), True


def _avals(*leaves: Any, codes: Any, floats: Floats) -> list:
    del leaves, floats
    return [*codes.out_avals]


def _batch(args: Any, dims: Any, *, codes: Any, floats: Floats) -> tuple[list, list]:
    mapped = functools.partial(jax.vmap, in_axes=tuple(dims))
    own = jax.make_jaxpr(mapped(jaxpr_as_fun(codes)))(*args)
    outs = either_p.bind(*args, codes=own, floats=lambda names: mapped(floats(names)))
    return outs, [0] * len(outs)


def _lower(given: str | None, ctx: Any, *leaves: Any, codes: Any, floats: Floats) -> Any:
    target, run = targets.target_of(ctx, given), codes
    if names := _names(codes.jaxpr, target):
        of_floats = jax.make_jaxpr(floats(names))(*ctx.avals_in)
        if _is_served(of_floats.jaxpr, target):
            run = of_floats
    rule: Any = mlir.lower_fun(jaxpr_as_fun(run), multiple_results=True)
    return rule(ctx, *leaves)


def _calls(jaxpr: Any, target: targets.Target) -> Iterator[tuple[Any, Table]]:
    """The calls of a step on a target, and the table of each."""
    for call, _ in calls.calls_in(jaxpr):
        own = dataclasses.replace(call, partitioned=target.partitioned)
        yield own, calls.TABLES[call.op]


def _names(jaxpr: Any, target: targets.Target) -> Names | None:
    """What serves the products of a step, if all of it multiplies floats."""
    found = []
    for call, table in _calls(jaxpr, target):
        try:
            served = serving(call, target, table)
        except NotImplementedError:  # which lowering the product says, too
            return None
        if not served.floats(call):
            return None
        found.append(served.name)
    return tuple(found)


def _is_served(jaxpr: Any, target: targets.Target) -> bool:
    """Whether a step of floats has kernels that give them, and products that take them.

    By the tables alone, which are the same in all processes of a program.
    """
    chips = chips_of(target)
    plans = [eqn.params.get("plan") for eqn in calls.equations(jaxpr)]
    asked = [plan for plan in plans if isinstance(plan, Plan) and plan.gives_floats]
    with registry.by_tables():
        return (
            bool(asked)
            and all(
                registry.chosen(plan, target.platform, chips).quantizes_at_once for plan in asked
            )
            and all(
                table[call.implementation].support(call, chips)
                for call, table in _calls(jaxpr, target)
            )
        )


_no_second = functools.partial(primitive.no_second, "dot_general")
either_p = primitive.define("mx_either", _avals, _lower, _batch, _no_second)
primitive.looked_into(either_p, "codes")
