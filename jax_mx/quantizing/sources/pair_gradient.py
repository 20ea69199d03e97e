"""The gradients of gates and of ups that are two arrays, the results of two products."""

import dataclasses
from typing import Any

from jax_mx.quantizing.facts.signatures import Array, Role
from jax_mx.quantizing.facts.sources import COLUMNS, ROWS, Source
from jax_mx.quantizing.sources.gated import ACTIVE, WEIGHTS, X


@dataclasses.dataclass(frozen=True, repr=False)
class PairGradientSource(Source):
    """The gradients of `GatedPairSource`'s gates and ups (T, K), for that of its results, dy.

    No quantizer has it, as it makes two arrays. "amaxes" has: the amaxes and the floats of gates'
    gradients, then of ups'.

    Attributes:
      activation: see `GatedSource`.
    """

    activation: str = ACTIVE[0]
    split = (ROWS, COLUMNS), (ROWS, COLUMNS), (ROWS,), (ROWS, COLUMNS)

    def __str__(self) -> str:
        return f"{self.activation}_pair_gradient"

    @property
    def operands(self) -> tuple[Array, ...]:
        """Gates, ups, the weights of rows, and dy."""
        return X, Array("up", Role.SOURCE), WEIGHTS, Array("dy", Role.SOURCE)

    @property
    def results(self) -> tuple[Array, ...]:
        """The results of ups, which follow the results of gates."""
        names = ("of_up_rows", Role.BLOCK_DATA), ("of_up_columns", Role.BLOCK_DATA)
        return *(Array(*named) for named in names), Array("up_floats", Role.SOURCE)

    @property
    def parts(self) -> int:
        """Gradients of gates and of ups."""
        return 2

    def compute(self, x: Any, *other: Any) -> list[Any]:
        """Both gradients."""
        from jax_mx.quantizing import reference

        up, weights, dy = other
        return reference.gated_gradient([x, up], weights, dy, self.activation)


@dataclasses.dataclass(frozen=True, repr=False)
class KnownSource(Source):
    """Floats x (T, K) that are there, and the amaxes of rows (1, T) and of columns (parts, K).

    Columns have an amax in each of equal parts of the rows.
    """

    of_rows_alone = True
    has_amaxes = True
    split = (ROWS, COLUMNS), ("", ROWS), (ROWS, COLUMNS)

    def __str__(self) -> str:
        return "known"

    @property
    def operands(self) -> tuple[Array, ...]:
        """The floats, and their amaxes."""
        names = ("of_rows", "of_columns")
        return X, *(Array(name, Role.REPLICATED, dtype="uint32") for name in names)

    def compute(self, x: Any, *other: Any) -> list[Any]:
        """The floats."""
        del other
        return [x]
