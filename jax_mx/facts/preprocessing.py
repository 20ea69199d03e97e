"""What is done to elements before they are scaled: a Hadamard transform, stochastic rounding.

`Preprocessing` is what a call says of it, for one quantized array: what is static there. What is
data (keys, signs that are JAX arrays) reaches the kernel as block data, one uint32 for each block.
"""

from __future__ import annotations

import dataclasses

from jax_mx.facts.formats import BLOCK
from jax_mx.facts.variants import Kind

SIZES = (16, 32, 64)  # of Hadamard transforms
PRESCALES = (None, 0.75)


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """The static side of one array's preprocessing.

    Attributes:
      stochastic: whether codes are rounded at random; the call then takes a seed per block.
      prescale: what elements are multiplied by, or None.
      hadamard: the size of the transform, or 0.
      flips: signs that are known when the call is traced: words whose bit i flips the sign of
        element i of even and of odd blocks. None: the call takes a word per block.
    """

    stochastic: bool = False
    prescale: float | None = None
    hadamard: int = 0
    flips: tuple[int, int] | None = None

    @property
    def kind(self) -> Kind:
        """What of it changes a kernel's code."""
        return Kind(self.hadamard, self.stochastic)

    @property
    def group(self) -> int:
        """How many elements along the block axis depend on each other."""
        return max(self.hadamard, BLOCK)

    def __str__(self) -> str:
        asked = ["rounding 'stochastic'"] if self.stochastic else []
        return " and ".join(asked + [f"hadamard {self.hadamard}"] * bool(self.hadamard))


NO_PREPROCESSING = Preprocessing()
