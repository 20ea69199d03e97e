"""About how long a kernel takes, for XLA's scheduler, which hides collectives behind kernels."""

from collections.abc import Mapping
from typing import NamedTuple, cast

from jax_mx.launch.chips import arch_of


class Speeds(NamedTuple):
    """About what a large kernel reaches on a chip.

    Attributes:
      memory: bytes a second.
      bfloat16: operations a second of products in bfloat16.
      fp8: the same in FP8; where chips have none, that of bfloat16.
    """

    memory: float
    bfloat16: float
    fp8: float


# H100s and H200s were measured. The others have 70 % of their data sheets', a family its first
# chip's.
SPEEDS: Mapping[str, Speeds] = {
    "sm_80": Speeds(1.3e12, 0.22e15, 0.22e15),
    "sm_89": Speeds(0.7e12, 0.25e15, 0.5e15),
    "sm_90a": Speeds(2.8e12, 0.65e15, 1.35e15),
    "sm_100f": Speeds(6.4e12, 1.6e15, 3.2e15),
    "sm_120f": Speeds(1.4e12, 0.35e15, 0.7e15),
    "gfx942": Speeds(4.2e12, 0.9e15, 0.9e15),
    "gfx950": Speeds(6.4e12, 1.6e15, 3.2e15),
}


class Work(NamedTuple):
    """A kernel's work besides its moves: so many operations of products."""

    flop: float = 0
    in_fp8: bool = False


MOVES = Work()  # nothing beside them


def seconds(chip: str, moved: int, work: Work) -> float:
    """About how long a kernel takes: the longer of its moves, in bytes, and its work."""
    speeds = SPEEDS[cast(str, arch_of(chip))]
    return max(moved / speeds.memory, work.flop / (speeds.fp8 if work.in_fp8 else speeds.bfloat16))
