"""The grouped product as a JAX primitive, as product.py has the dense one. It has no derivative."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.lowering import primitive
from jax_mx.products.dot import Operand
from jax_mx.products.implementations import Implementation, lowered
from jax_mx.products.ragged import Ragged, call_of
from jax_mx.products.ragged_implementations import IMPLEMENTATIONS


def _avals(*leaves: Any, ragged: Ragged) -> list:
    call = call_of(ragged, leaves)
    n, (a, b) = call.columns[1], ragged.axes
    first = call.lhs.shape[-3 - a]
    if not ragged.sums and call.lhs.shape[a] != call.rhs.shape[b]:
        raise ValueError(
            f"ragged_dot: lhs of {call.lhs.shape} does not fit rhs of {call.rhs.shape}"
        )
    shape = (call.groups, first, n) if ragged.sums else (first, n)
    return [primitive.unsplit("mx_ragged_dot", leaves, shape, ragged.dtype)]


def _batch(args: Any, dims: Any, *, ragged: Ragged) -> tuple[list, list]:
    """A product for each entry of the batch, one after the other."""
    bind: Any = functools.partial(ragged_p.bind, ragged=ragged)
    return primitive.one_by_one(bind, args, dims)


def _lower(given: str | None, ctx: Any, *leaves: Any, ragged: Ragged) -> Any:
    def run(served: Implementation, *leaves: Any) -> jax.Array:
        *operands, sizes = leaves
        return served.run(*ragged.tree.unflatten(operands), sizes, ragged)

    return lowered(given, ctx, leaves, call_of(ragged, ctx.avals_in), run, IMPLEMENTATIONS)


_no_second = functools.partial(primitive.no_second, "ragged_dot")
ragged_p = primitive.define("mx_ragged_dot", _avals, _lower, _batch, _no_second)


def grouped(
    lhs: Operand,
    rhs: Operand,
    sizes: jax.Array,
    dtype: Any,
    *,
    axes: tuple[int, int] = (-1, -1),
    sums: bool = False,
    align: int = 1,
    exact: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """The product over groups of two operands.

    Args:
      lhs: (R, K) by `axes`, an `MXArray` or floats; rows sorted by group.
      rhs: (G, K, N) by `axes`; with sums, (R, N).
      sizes: int32 (G,), how many rows each group has; what lies behind them belongs to none.
      dtype: of the result.
      axes: see `Ragged`; so is `align`.
      sums: whether to sum over each group's rows.
      align: of the sizes.
      exact: see `Ragged`.
      implementation: or None.

    Returns:
      (R, N), 0 in rows without a group; with sums, (G, M, N).
    """
    leaves, tree = jax.tree.flatten((lhs, rhs))
    ragged = Ragged(tree, sums, axes, np.dtype(dtype), align, exact, implementation)
    (out,) = ragged_p.bind(*primitive.vary_alike(*leaves, jnp.asarray(sizes)), ragged=ragged)
    return out
