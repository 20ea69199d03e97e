"""Gated activations that kernels compute on the way to codes: act(gate) * up * weight.

What is quantized is a bfloat16, so all implementations have to agree on it, whatever exponential
function a chip has. So the part that depends on the gate alone is rounded to `KEPT` bits behind the
leading one, where no bfloat16 gate has a value so close to a tie that an error of a few float32
units in the last place decides: the place of the ties was searched for, and
tests/test_activations.py measures the distance. The part has 9 bits then, up has 8, and their
product is exact in float32; it is at most 1.02 units in the last place of bfloat16 from
the exact number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

KEPT = 8  # bits
CELL = 1 << (23 - KEPT)  # of a float32's mantissa


@dataclasses.dataclass(frozen=True)
class Activation:
    """One row.

    Attributes:
      up: what is added to a number's bits before those beyond `KEPT` are cut off; CELL // 2 would
        round to nearest.
    """

    up: int

    @property
    def mask(self) -> int:
        """The bits that stay."""
        return 0xFFFFFFFF & -CELL


# silu(gate) up; arXiv 2002.05202
ACTIVATIONS: Mapping[str, Activation] = {"swiglu": Activation(16913)}
