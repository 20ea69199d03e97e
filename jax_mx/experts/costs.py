"""The way by which tokens travel, by a cost that counts bytes and launches."""

from __future__ import annotations

from typing import NamedTuple

from jax_mx.experts.rounds import Limits

GATHER, ROUNDS = WAYS = ("gather", "rounds")
# Microseconds a megabyte, on four H100s with JAX 0.11.2, 2026-11-27: of what arrives, gathered and
# scattered, or exchanged; of what slots are written and read. The layer (D 7168, I 2048, 8 experts,
# forward and backward, "auto") then took, in microseconds:
#   T a device, k   gather   rounds        T a device, k   gather   rounds
#   16384, 2         23842    15792        16384, 1         15443     8698
#   4096, 2           6306     4576        4096, 1           4470     2669
GATHERED_MB, EXCHANGED_MB, MEMORY_MB = 3.9, 4.3, 0.4
SLOT_BYTES = 18  # an element of a slot, forward and backward
LAUNCHES = 100.0  # of rounds: eight more, and both passes wait for a number of rounds


class Cost(NamedTuple):
    """The cost of a way, forward and backward.

    Attributes:
      arrives: bytes that arrive on a device.
      slots: how many rows the shard's experts take at most.
      us: microseconds.
    """

    arrives: float
    slots: int
    us: float


class Costs(NamedTuple):
    """The costs of both ways."""

    gather: Cost
    rounds: Cost
    limits: Limits

    @classmethod
    def of(cls, tokens: int, k: int, experts: int, shards: int, width: int, wire: str) -> Costs:
        """The costs of `tokens` a shard, with k choices each of all experts, on so many shards."""
        limits = Limits.of(tokens, k, experts, shards)
        bytes_each = 2 * (width * (33 / 32 if wire == "mx" else 2) + 2 * width)

        def cost(rows: int, slots: int, per_mb: float, more: float = 0.0) -> Cost:
            arrives = (shards - 1) * rows * bytes_each
            memory = slots * width * SLOT_BYTES
            us = (arrives * per_mb + memory * MEMORY_MB) / 1e6 + more
            return Cost(arrives, slots, us)

        gather = cost(tokens, shards * tokens * k, GATHERED_MB)
        rounds = cost(limits.rows, shards * limits.choices, EXCHANGED_MB, LAUNCHES)
        return cls(gather, rounds, limits)

    @property
    def least(self) -> str:
        """The way that costs less."""
        return ROUNDS if self.rounds.us < self.gather.us else GATHER

    def sentence(self, way: str) -> str:
        """The sentence of `explain` about a way."""
        said = {
            GATHER: "all shards gather all tokens",
            ROUNDS: f"tokens travel to their experts, {self.limits.rows} rows a pair of shards",
        }
        estimates = " or ".join(
            f"{cost.us:,.0f} us by {name} ({cost.arrives / 1e6:,.0f} MB arrive, {cost.slots:,} "
            "slots)"
            for name, cost in zip(WAYS, (self.gather, self.rounds), strict=True)
        )
        return f"{said[way]}; both passes are estimated to take {estimates}."
