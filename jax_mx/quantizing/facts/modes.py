"""The part of an array's preprocessing that changes a kernel's code."""

from typing import NamedTuple

from jax_mx.formats.formats import BLOCK
from jax_mx.formats.windows import ROW, Window, suffix_of


class Mode(NamedTuple):
    """The part of an array's preprocessing (preprocessing.py) that changes a kernel's code.

    Attributes:
      hadamard: the size of the transform that goes before, or 0.
      stochastic: whether codes are rounded at random.
      window: the elements that share an amax, see formats/windows.py.
      dequantized: whether the result is floats, in place of codes and scales.
      finds: whether the kernel computes the amaxes of windows that are rows; else they are
        operands.
    """

    hadamard: int = 0
    stochastic: bool = False
    window: Window = BLOCK
    dequantized: bool = False
    finds: bool = False

    @property
    def changes_elements(self) -> bool:
        """Whether elements are transformed, or rounded at random."""
        return self.stochastic or self.hadamard > 0

    @property
    def takes_amaxes(self) -> bool:
        """Whether amaxes are an operand."""
        return self.window == ROW and not self.finds

    @property
    def blocks(self) -> int:
        """How many of them a transform makes one: 1, or 2."""
        return max(self.hadamard // BLOCK, 1)

    @property
    def suffix(self) -> str:
        """The end of a variant's name."""
        before = f"_h{self.hadamard}" * (self.hadamard > 0) + "_sr" * self.stochastic
        return before + suffix_of(self.window) + "_found" * self.finds + "_dq" * self.dequantized
