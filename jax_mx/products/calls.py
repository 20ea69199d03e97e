"""The calls of products that a trace holds, and the tables of their implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import jaxprs_in_params

from jax_mx.products import implementations, ragged, ragged_implementations
from jax_mx.products.dot import call_of

# How the call of an equation follows from its parameters and abstract values, by the names of
# primitives. Quantizers are none: their kernel is faster than "xla" in every form
# (docs/performance.md), and its tiles are chosen where it is built (kernels/*/tuning).
_CALLS: Mapping[str, Callable[[Any, Sequence[Any]], Any]] = {
    "mx_dot_general": lambda params, avals: call_of(params["dot"], avals),
    "mx_ragged_dot": lambda params, avals: ragged.call_of(params["ragged"], avals),
}
TABLES: Mapping[str, implementations.Table] = {
    "dot_general": implementations.IMPLEMENTATIONS,
    "ragged_dot": ragged_implementations.IMPLEMENTATIONS,
}


def equations(jaxpr: Any) -> Iterator[Any]:
    """All of a jaxpr, those within loops, branches and calls too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def calls_in(jaxpr: Any) -> Iterator[tuple[Any, list[Any]]]:
    """The calls of a jaxpr, in its order, and the abstract values of their operands."""
    for eqn in equations(jaxpr):
        if call := _CALLS.get(eqn.primitive.name):
            avals = [v.aval for v in eqn.invars]
            yield call(eqn.params, avals), avals
