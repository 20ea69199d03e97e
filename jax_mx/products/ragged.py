"""Grouped products of MX arrays as a JAX primitive, as product.py has dense ones.

A product over groups has rows sorted by group, and their number in each group on the device. Either
each group's rows meet a matrix of their own (lax.ragged_dot), or each group's rows are summed over
(lax.ragged_dot_general with a ragged contracting dimension: the gradient of the matrices).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from jax_mx.lowering import primitive
from jax_mx.products.dot import Operand, shard_of
from jax_mx.products.implementations import serving


@dataclasses.dataclass(frozen=True)
class Ragged:
    """One grouped product, without its arrays.

    Attributes:
      tree: the pytree of (lhs, rhs); each is an `MXArray` or floats.
      sums: whether groups are summed over: (G, M, N) of lhs (R, M) and rhs (R, N); else each group
        has its matrix: (R, N) of lhs (R, K) and rhs (G, K, N).
      axes: the contracted axis of lhs, of rhs, each -1 or -2: operands may lie transposed.
      dtype: of the result.
      align: what the size of every group is a multiple of.
      implementation: the one that the caller insists on, or None.
    """

    tree: Any
    sums: bool
    axes: tuple[int, int]
    dtype: np.dtype
    align: int = 1
    implementation: str | None = None


@dataclasses.dataclass(frozen=True)
class RaggedCall:
    """A grouped product with the shapes and types of its operands; compare `dot.Call`.

    Attributes:
      ragged: the product.
      lhs: an `MXArray` of abstract values, or one of floats.
      rhs: likewise.
      groups: how many there are.
      op: its name in messages.
      partitioned: whether XLA splits the program among devices, outside of shard_map.
    """

    ragged: Ragged
    lhs: Any
    rhs: Any
    groups: int
    op: str = "ragged_dot"
    partitioned: bool = False

    @property
    def implementation(self) -> str | None:
        """The one that the caller insists on."""
        return self.ragged.implementation

    @property
    def rows(self) -> int:
        """How many rows there are, of all groups and behind them."""
        return self.lhs.shape[self.ragged.axes[0] if self.ragged.sums else -2]

    @property
    def length(self) -> int:
        """How many products are summed at most."""
        return self.lhs.shape[self.ragged.axes[0]]

    @property
    def columns(self) -> tuple[int, ...]:
        """The lengths of what is not rows: (M, N), or (K, N)."""
        (a, b), sums = self.ragged.axes, self.ragged.sums
        return (self.lhs.shape[-3 - a if sums else a], self.rhs.shape[-3 - b])

    @property
    def work(self) -> int:
        """How many products there are, if each row has a group."""
        return self.rows * math.prod(self.columns)

    @property
    def how(self) -> str:
        """What its speed depends on besides its operands, in words."""
        what = "sums over groups" if self.ragged.sums else "a matrix a group"
        (a, b), align = self.ragged.axes, self.ragged.align
        return (
            f"{what}, {self.groups} groups, multiples of {align}, contracts {a}:{b}, "
            f"to {self.ragged.dtype.name}"
        )

    @property
    def in_a_shard(self) -> RaggedCall:
        """The call as each device has it; see `dot.Call.in_a_shard`."""
        lhs, rhs = (jax.tree.map(shard_of, side) for side in (self.lhs, self.rhs))
        return RaggedCall(self.ragged, lhs, rhs, self.groups)


def call_of(ragged: Ragged, leaves: Any) -> RaggedCall:
    """The call of a product with these arrays, or abstract values; the last one are the sizes."""
    *operands, sizes = leaves
    lhs, rhs = ragged.tree.unflatten(operands)
    return RaggedCall(ragged, lhs, rhs, sizes.shape[0])


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
    # Here, because implementations are made of calls.
    from jax_mx.products.ragged_implementations import IMPLEMENTATIONS

    platform = given or (ctx.platforms or ctx.module_context.platforms)[0]
    target = primitive.target_of(ctx, platform)
    call = dataclasses.replace(call_of(ragged, ctx.avals_in), partitioned=target.partitioned)
    served = serving(call, target, IMPLEMENTATIONS)

    def product(*leaves: Any) -> list[jax.Array]:
        *operands, sizes = leaves
        lhs, rhs = ragged.tree.unflatten(operands)
        with jax.named_scope(f"by_{served.name}"):
            return [served.run(lhs, rhs, sizes, ragged)]

    rule: Any = mlir.lower_fun(product, multiple_results=True)
    return rule(ctx, *leaves)


def _no_derivative(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "ragged_dot: derivatives of derivatives, and forward-mode ones, are not there; "
        "jax_mx.ragged_dot and jax_mx.moe have reverse-mode derivatives (jax.grad, jax.vjp)"
    )


ragged_p = primitive.define("mx_ragged_dot", _avals, _lower, _batch, _no_derivative)


def grouped(
    lhs: Operand,
    rhs: Operand,
    sizes: jax.Array,
    dtype: Any,
    *,
    axes: tuple[int, int] = (-1, -1),
    sums: bool = False,
    align: int = 1,
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
      implementation: or None.

    Returns:
      (R, N), 0 in rows without a group; with sums, (G, M, N).
    """
    leaves, tree = jax.tree.flatten((lhs, rhs))
    ragged = Ragged(tree, sums, axes, np.dtype(dtype), align, implementation)
    (out,) = ragged_p.bind(*primitive.vary_alike(*leaves, jnp.asarray(sizes)), ragged=ragged)
    return out
