"""Rounds: each token's row travels once to each shard that has one of its experts.

A shard sorts its rows by where they go. In a round it sends every shard the next few of its rows,
by an all-to-all whose shape is fixed; the results of these rows come back before the next round. A
round is also bounded by choices, so that slots suffice for what arrives, whatever the routing. The
first round holds what an even routing needs, and an eighth more; further rounds are a loop of a
quarter's rows. All shards of the axis walk as many rounds as the one that needs most.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_mx.collectives.moves import all_to_all
from jax_mx.launch.private import vary_alike
from jax_mx.products.groups import Groups
from jax_mx.products.operand import Unquantized, moves_as_floats
from jax_mx.quantizing import reference


class Limits(NamedTuple):
    """The room of a round for each pair of shards: numbers of rows, and of their choices."""

    rows: int
    choices: int

    @classmethod
    def of(cls, tokens: int, k: int, experts: int, shards: int) -> Limits:
        """The room that a first round needs if tokens choose all experts equally often, k each."""
        local = experts // shards
        misses = math.prod(
            max(experts - local - i, 0) / (experts - i) for i in range(min(k, experts))
        )
        rows = min(_enough(tokens * (1 - misses)), tokens)
        return cls(rows, max(min(_enough(tokens * k / shards), rows * k), k))

    def of_rest(self, k: int) -> Limits:
        """The room of each further round."""
        return Limits(-(-self.rows // 4), max(-(-self.choices // 4), k))


def _enough(mean: float) -> int:
    """An eighth more than the mean, or four deviations of a random routing if those are more."""
    return -(-math.ceil(mean + max(mean / 8, 4 * math.sqrt(mean))) // 8) * 8


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("experts", "groups", "before", "begin", "number"),
    meta_fields=("axis", "wire", "local", "limits"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class Round:
    """The rows of a shard that travel at once.

    Attributes:
      experts: int32 (T, k) of this shard's tokens, as all shards count them.
      groups: this shard's rows by the shard that they go to; of choices that go there together the
        first has the slot.
      before: int32 (T k + 1,), how many choices the rows before each of `groups.rows` have.
      begin: int32 (shards,), where in `groups.rows` each shard's rows of this round begin.
      number: int32 (), of the round.
      axis: the expert axis.
      wire: how rows move, see `wires.KINDS`.
      local: how many experts a shard has.
      limits: of this round.
    """

    experts: jax.Array
    groups: Groups
    before: jax.Array
    begin: jax.Array
    number: jax.Array
    axis: str
    wire: str
    local: int
    limits: Limits

    @classmethod
    def first(cls, axis: str, wire: str, experts: jax.Array, local: int) -> Round:
        """The first round of tokens with these experts (T, k), of which a shard has so many."""
        shards, (tokens, k) = jax.lax.axis_size(axis), experts.shape
        goes = _shard_of(experts, local, shards)
        together = _together(goes)
        earlier = jnp.tril(jnp.ones((k, k), bool), -1)
        is_first = (goes >= 0) & ~(together & earlier).any(-1)
        groups = Groups.from_experts(jnp.where(is_first, goes, -1), shards, align=1)
        counts = groups.of_slots(together.sum(-1, dtype=jnp.int32))
        before = jnp.pad(jnp.cumsum(counts, dtype=jnp.int32), (1, 0))
        limits = Limits.of(tokens, k, local * shards, shards)
        none = jnp.zeros((), jnp.int32)
        return cls(experts, groups, before, groups.starts, none, axis, wire, local, limits)

    @property
    def most(self) -> int:
        """How many choices arrive at a shard at most."""
        return self.limits.choices * self.begin.shape[0]

    @property
    def end(self) -> jax.Array:
        """int32 (shards,), where in `groups.rows` each shard's rows of this round end."""
        most = self.before[self.begin] + self.limits.choices
        fit = (self.before[None, 1:] <= most[:, None]).sum(1, dtype=jnp.int32)
        stop = self.groups.starts + self.groups.counts
        return jnp.minimum(jnp.minimum(self.begin + self.limits.rows, stop), fit)

    @property
    def rows(self) -> jax.Array:
        """int32 (shards * rows,), the tokens to each shard; -1: none."""
        at = self.begin[:, None] + jnp.arange(self.limits.rows, dtype=jnp.int32)
        tokens = self.groups.rows.at[at].get(mode="fill", fill_value=-1)
        return jnp.where(at < self.end[:, None], tokens, -1).reshape(-1)

    def places(self) -> tuple[jax.Array, jax.Array]:
        """int32 (T, k), of each choice its row among `rows`, and where it has that first; -1: none.

        The second is for sums over rows, in which a row counts once.
        """
        goes = _shard_of(self.experts, self.local, self.begin.shape[0])
        slots = self.groups.slots
        first_slots = jnp.where(_together(goes), slots[:, None, :], -1).max(-1)
        begin, end = self.begin[goes], self.end[goes]
        row = goes * self.limits.rows + first_slots - begin
        row = jnp.where((goes >= 0) & (first_slots >= begin) & (first_slots < end), row, -1)
        return row, jnp.where(slots >= 0, row, -1)

    # ---- what moves ---
    def tokens(self, tokens: Unquantized) -> Any:
        """The rows that arrive: floats, or MX along their elements."""
        if self.wire == "floats" or moves_as_floats(tokens):
            return self._exchanged(reference.rows_of(tokens.x, self.rows))
        arrivals = dataclasses.replace(tokens, rows=self.rows)
        return all_to_all(arrivals.forms()[0].array, self.axis, 0, 0, tiled=True)

    def choices(self, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The experts of the rows that arrive, as this shard counts its own, and their weights."""
        bits = jax.lax.bitcast_convert_type(weights.astype(jnp.float32), jnp.int32)
        both = jnp.concatenate([self.experts, bits], 1)
        rows = self.rows[:, None]
        both = self._exchanged(jnp.where(rows < 0, -1, both[jnp.maximum(self.rows, 0)]))
        ids, bits = jnp.split(both, 2, 1)
        ids = ids - jax.lax.axis_index(self.axis) * self.local
        ids = jnp.where((ids >= 0) & (ids < self.local), ids, -1)
        return ids, jax.lax.bitcast_convert_type(bits, jnp.float32)

    def back(self, rows: jax.Array) -> jax.Array:
        """(T, D): the results of the rows that arrived, summed for each token in float32."""
        _, first = self.places()
        rows_of_choices = _taken(self._exchanged(rows), first)
        return rows_of_choices.astype(jnp.float32).sum(1).astype(rows.dtype)

    def back_choices(self, values: jax.Array) -> jax.Array:
        """(T, k): the values (rows, k) of the choices of rows that arrived."""
        row, _ = self.places()
        k = values.shape[1]
        at = jnp.where(row < 0, -1, row * k + jnp.arange(k, dtype=jnp.int32))
        return _taken(self._exchanged(values).reshape(-1), at)

    def _exchanged(self, rows: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(rows, self.axis, 0, 0, tiled=True)

    # ---- further rounds ---
    def rest(self, run: Callable[[Round, Any], Any], sums: Any, operands: Any) -> Any:
        """The sums of the results of `run` over all rounds; `sums` has this round's."""
        limits = self.limits.of_rest(self.experts.shape[1])
        stop = self.groups.starts + self.groups.counts

        def left(begin: jax.Array) -> jax.Array:
            return jax.lax.pmax((stop - begin).max(), self.axis)

        def body(state: Any) -> Any:
            begin, number, _, sums = state
            # Bound to the round, nothing that a round computes of operands alone leaves the loop.
            begin, ordered = jax.lax.optimization_barrier((begin, operands))
            one = dataclasses.replace(self, begin=begin, number=number, limits=limits)
            sums = jax.tree.map(_plus, sums, run(one, ordered))
            return *alike(one.end, number + 1, left(one.end)), sums

        first = *alike(self.end, self.number + 1, left(self.end)), sums
        return jax.lax.while_loop(lambda state: state[2] > 0, body, first)[3]


def alike(*state: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays that vary over the same axes, as what a loop counts by must; sums keep their own."""
    return tuple(vary_alike(*state))


def _plus(a: jax.Array, b: jax.Array) -> jax.Array:
    return (a.astype(jnp.float32) + b.astype(jnp.float32)).astype(a.dtype)


def _shard_of(experts: jax.Array, local: int, shards: int) -> jax.Array:
    """The shard of each choice; -1: none."""
    return jnp.where((experts >= 0) & (experts < local * shards), experts // local, -1)


def _together(goes: jax.Array) -> jax.Array:
    """bool (T, k, k): whether two choices of a token go to one shard."""
    return (goes[:, :, None] == goes[:, None, :]) & (goes >= 0)[:, None, :]


def _taken(rows: jax.Array, at: jax.Array) -> jax.Array:
    return rows.at[at].get(mode="fill", fill_value=0, wrap_negative_indices=False)
