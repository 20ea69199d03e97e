"""What makes the floats that are quantized, where they are not x itself."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, repr=False)
class Source:
    """How the floats are made of x; false where they are x.

    Attributes:
      rows: whether they are the rows of x that an operand numbers.
      codes: the name of x's format; "": x are floats.
      norm: whether they are x's rows, normed.
      added: whether another array is added to x before.
      activation: the name of the one that makes them of gates and ups, see facts/activations.py.
      interleaved: whether gates and ups take turns in x, and their gradients; else they are halves.
      apart: whether x are the gates alone, and ups an array like it.
      gradient: whether they are the gradient of gates and ups, by that of the activation's results.
      sums: whether sums of the gradient's columns are given, of `BLOCK` rows each, beside codes.
      floats: whether they are given, too, beside codes.
    """

    rows: bool = False
    codes: str = ""
    norm: bool = False
    added: bool = False
    activation: str = ""
    interleaved: bool = False
    apart: bool = False
    gradient: bool = False
    sums: bool = False
    floats: bool = False

    def __bool__(self) -> bool:
        return self != X

    def __str__(self) -> str:
        """As the names of kernels end with it."""
        words = (
            self.codes,
            "rows" * self.rows,
            "rms_norm" * self.norm,
            "added" * self.added,
            self.activation,
            "interleaved" * self.interleaved,
            "apart" * self.apart,
            "gradient" * self.gradient,
            "sums" * self.sums,
            "floats" * self.floats,
        )
        return "_".join(filter(None, words))

    def __repr__(self) -> str:
        return f"Source({self})"

    @property
    def activates(self) -> bool:
        """Whether they are an activation's results."""
        return self.activation != "" and not self.gradient

    @property
    def halves(self) -> int:
        """How many halves x has: gates and ups, also by turns, or 1."""
        return 1 + (self.activation != "" and not self.apart)

    @property
    def makes_one_of_two(self) -> bool:
        """Whether they have half as many columns as x, whose halves or pairs they are made of."""
        return self.activates and self.halves > 1


X = Source()
ROWS = Source(rows=True)
RMS_NORM = Source(norm=True)
ADDED = Source(norm=True, added=True)
