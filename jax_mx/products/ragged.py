"""One grouped product of arrays of which some are MX, without saying how it is computed.

A product over groups has rows sorted by group, and their number in each group on the device. Either
each group's rows meet a matrix of their own (lax.ragged_dot), or each group's rows are summed over
(lax.ragged_dot_general with a ragged contracting dimension: the gradient of the matrices).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from jax_mx.products.dot import shard_of


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
      exact: see `dot.Dot`.
      implementation: the one that the caller insists on, or None.
    """

    tree: Any
    sums: bool
    axes: tuple[int, int]
    dtype: np.dtype
    align: int = 1
    exact: bool = False
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
    def name(self) -> str:
        """What messages call it."""
        return self.op

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
            f"to {self.ragged.dtype.name}{', highest precision' * self.ragged.exact}"
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
