"""An activation's results, of gates and ups that are two arrays, the results of two products."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jax_mx.formats.formats import BLOCK
from jax_mx.quantizing.facts.signatures import Array, Role
from jax_mx.quantizing.facts.sources import COLUMNS, ROWS, Shape, Source, Spans, blocks_of
from jax_mx.quantizing.facts.variants import Variant
from jax_mx.quantizing.sources.gated import ACTIVE, WEIGHTS, X


@dataclasses.dataclass(frozen=True, repr=False)
class GatedPairSource(Source):
    """act(gate) * up * weight, as `GatedSource`, of gates x (T, K), ups (T, K) and weights (T,).

    Kernels have it in windows of rows; where blocks are their own windows, XLA makes the floats.

    Attributes:
      activation: its name, see quantizing/facts/activations.py.
    """

    activation: str = ACTIVE[0]

    loaders: ClassVar[Mapping[str, str]] = {"cutedsl": "gated_pair"}
    tuned_as = "gated"
    of_rows_alone = True
    split = (ROWS, COLUMNS), (ROWS, COLUMNS), (ROWS,)

    def __str__(self) -> str:
        return f"{self.activation}_pair"

    @property
    def operands(self) -> tuple[Array, ...]:
        """Gates, ups and the weights of rows."""
        return X, Array("up", Role.SOURCE), WEIGHTS

    def is_fused_by(self, dsl: str) -> bool:
        """Kernels have one activation."""
        return self.activation == ACTIVE[0] and super().is_fused_by(dsl)

    def fused(self, variant: Variant) -> bool:
        """Along rows in windows of them."""
        return variant.finds_amaxes and variant.dtype == "bfloat16"

    def columns(self, spans: Spans) -> int:
        """The dimension behind the dimensions of rows."""
        del spans
        return 1

    @property
    def facts(self) -> dict[str, Any]:
        """The activation, too."""
        return {**super().facts, "activation": self.activation}

    # ---- shapes ---
    def arranged(self, x: Any, other: Sequence[Any], spans: Spans) -> list[Any]:
        """Gates and ups (T, K), an axis along blocks in two."""
        (up, weights), (count, length), (down, across) = other, x.shape, spans
        tail = blocks_of(length, across, BLOCK)
        by_row = weights.reshape((count // BLOCK, BLOCK) if down else (count, 1))
        return [*(a.reshape(count, *tail) for a in (x, up)), by_row]

    def whole(self, operands: Sequence[Any], spans: Spans) -> list[Any]:
        """The inverse of `arranged`."""
        del spans
        *both, weights = operands
        return [*(a.reshape(a.shape[0], -1) for a in both), weights.reshape(-1)]

    def shape(self, operands: Sequence[Any], spans: Spans) -> Shape:
        """As many rows as weights, and the gates' columns."""
        x, _, weights = operands
        return math.prod(weights.shape), math.prod(x.shape[1:])

    # ---- floats ---
    def compute(self, x: Any, *other: Any) -> list[Any]:
        """The floats."""
        from jax_mx.quantizing import reference

        up, weights = other
        return [reference.gated([x, up], weights, self.activation)]
