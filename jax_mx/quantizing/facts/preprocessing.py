"""Steps on elements before they are scaled: a Hadamard transform, stochastic rounding.

The window, whose elements share an amax, belongs to it.

`Preprocessing` is the static part of a call's arguments for one quantized array. Their data (keys,
signs that are JAX arrays) reach the kernel as block data, one uint32 for each block.
"""

import dataclasses
import math

from jax_mx.formats.formats import BLOCK
from jax_mx.formats.windows import Window, lengths_of, of_kernels
from jax_mx.quantizing.facts.modes import Mode

SIZES = (16, 32, 64)  # of Hadamard transforms
PRESCALES = (None, 0.75)


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """The static side of one array's preprocessing.

    Attributes:
      stochastic: whether codes are rounded at random; the call then takes a seed per block.
      prescale: a factor of the elements, or None.
      hadamard: the size of the transform, or 0.
      flips: signs that are known when the call is traced: words whose bit i flips the sign of
        element i of even and of odd blocks. None: the call takes a word per block.
      window: the elements that share an amax, see formats/windows.py.
      dequantized: whether floats come out, in place of codes and scales.
      finds: whether one call finds the amaxes of windows that are rows, and quantizes.
    """

    stochastic: bool = False
    prescale: float | None = None
    hadamard: int = 0
    flips: tuple[int, int] | None = None
    window: Window = BLOCK
    dequantized: bool = False
    finds: bool = False

    @property
    def mode(self) -> Mode:
        """The part that changes a kernel's code."""
        return Mode(
            self.hadamard, self.stochastic, of_kernels(self.window), self.dequantized, self.finds
        )

    @property
    def group(self) -> int:
        """How many elements along the block axis depend on each other; of a row nothing is kept."""
        return math.lcm(max(self.hadamard, BLOCK), lengths_of(self.window)[1])

    @property
    def rows(self) -> int:
        """How many rows beside the block axis depend on each other, of a tile."""
        return lengths_of(self.window)[0]

    def __str__(self) -> str:
        asked = ["rounding 'stochastic'"] if self.stochastic else []
        asked += [f"hadamard {self.hadamard}"] * bool(self.hadamard)
        asked += [f"window {self.window}"] * (self.window != BLOCK)
        return " and ".join(asked + ["dequantizing at once"] * self.dequantized)


NO_PREPROCESSING = Preprocessing()
