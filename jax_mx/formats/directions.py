"""Directions and forms: along which axes an op's blocks run, and which way its arrays lie.

A direction is one quantized array beside the floats that it comes from or gives. A form is what one
call makes: the directions of its results (of dequantize, of its one operand). The names of forms
("second_transposed", "both") follow from their directions; binaries carry them.

One worked example, a float array (M, K) = (64, 96):

    | form              | directions                         | values           | scales        |
    | last              | Direction(LAST)                    | (64, 96)         | (64, 3)       |
    | second            | Direction(SECOND)                  | (64, 96)         | (2, 96)       |
    | second_transposed | Direction(SECOND, transposed=True) | (96, 64)         | (96, 2)       |
    | both              | Direction(LAST), Direction(SECOND) | two of the above | from one read |
    | square            | Direction(SQUARE)                  | (64, 96)         | (2, 3)        |
    | square_transposed | Direction(SQUARE, transposed=True) | (96, 64)         | (3, 2)        |
    | last_transposed   | Direction(LAST, transposed=True)   | (96, 64)         | (3, 64)       |

Only dequantize has last_transposed.
"""

import dataclasses
import enum


class Blocks(enum.Enum):
    """The axes that a block spans, among the last two axes of the floats."""

    LAST = "last"
    SECOND = "second"  # the one before the last
    SQUARE = "square"  # both: 32 x 32 elements

    @property
    def spans(self) -> tuple[bool, bool]:
        """Whether a block covers 32 rows, and whether it covers 32 columns."""
        return self.span_rows, self.span_columns

    @property
    def span_rows(self) -> bool:
        """Whether a block covers 32 rows: elements along the axis before the last."""
        return self is not Blocks.LAST

    @property
    def span_columns(self) -> bool:
        """Whether a block covers 32 columns: elements along the last axis."""
        return self is not Blocks.SECOND

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Direction:
    """The way in which the blocks of one quantized array run, and in which the array lies.

    Attributes:
      blocks: the axes of the floats that a block spans.
      transposed: whether values and scales lie with the last two axes of the floats swapped.
    """

    blocks: Blocks
    transposed: bool = False

    @property
    def ends_rows(self) -> bool:
        """Whether blocks run along the last axis of the quantized array, so codes pack along it."""
        return self.blocks is Blocks.SQUARE or (self.blocks is Blocks.LAST) != self.transposed

    @property
    def stored_blocks(self) -> Blocks:
        """The axes that a block spans, among the last two axes of the array as it lies."""
        if self.blocks is Blocks.SQUARE:
            return Blocks.SQUARE
        return Blocks.LAST if self.ends_rows else Blocks.SECOND

    @property
    def packs_down(self) -> bool:
        """Whether the codes of a byte belong to floats below each other, not beside each other."""
        if self.blocks is Blocks.SQUARE:
            return self.transposed
        return self.blocks is Blocks.SECOND

    @property
    def spans(self) -> tuple[bool, bool]:
        """Whether a block covers 32 rows of the floats, and whether it covers 32 columns."""
        return self.blocks.spans

    def __str__(self) -> str:
        return self.blocks.value + "_transposed" * self.transposed


@dataclasses.dataclass(frozen=True)
class Form:
    """The directions of a call's quantized arrays: one, or the last axis's and the second's.

    Attributes:
      directions: in the order of the results.
    """

    directions: tuple[Direction, ...]

    @property
    def is_both(self) -> bool:
        """Whether one read of the floats gives two directions."""
        return len(self.directions) == 2

    @property
    def transposed(self) -> bool:
        """Whether the (second) quantized array lies transposed."""
        return self.directions[-1].transposed

    @property
    def spans(self) -> tuple[bool, bool]:
        """Whether some direction's blocks cover 32 rows, and whether some cover 32 columns."""
        return (
            any(d.blocks.span_rows for d in self.directions),
            any(d.blocks.span_columns for d in self.directions),
        )

    @property
    def is_square(self) -> bool:
        """Whether blocks are square."""
        return self.directions[-1].blocks is Blocks.SQUARE

    def __str__(self) -> str:
        return ("both" if self.is_both else self.directions[0].blocks.value) + (
            "_transposed" * self.transposed
        )

    def __repr__(self) -> str:
        return str(self).upper()


def _form(*directions: tuple[Blocks, bool]) -> Form:
    return Form(tuple(Direction(*direction) for direction in directions))


LAST = _form((Blocks.LAST, False))
LAST_TRANSPOSED = _form((Blocks.LAST, True))  # dequantize alone
SECOND = _form((Blocks.SECOND, False))
SECOND_TRANSPOSED = _form((Blocks.SECOND, True))
BOTH = _form((Blocks.LAST, False), (Blocks.SECOND, False))
BOTH_TRANSPOSED = _form((Blocks.LAST, False), (Blocks.SECOND, True))
SQUARE = _form((Blocks.SQUARE, False))
SQUARE_TRANSPOSED = _form((Blocks.SQUARE, True))

FORMS = {
    str(form): form
    for form in (
        LAST,
        LAST_TRANSPOSED,
        SECOND,
        SECOND_TRANSPOSED,
        BOTH,
        BOTH_TRANSPOSED,
        SQUARE,
        SQUARE_TRANSPOSED,
    )
}
