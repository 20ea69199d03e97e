"""Rows of an MX array: tokens that moved as codes along their elements."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jax_mx.formats.directions import SECOND_TRANSPOSED
from jax_mx.formats.formats import BLOCK, FLOAT_DTYPES, FORMATS
from jax_mx.quantizing.facts.signatures import Array, Role
from jax_mx.quantizing.facts.sources import Shape, Spans
from jax_mx.quantizing.facts.variants import Variant
from jax_mx.quantizing.sources.rows import NUMBERS, RowsSource, rows_of


@dataclasses.dataclass(frozen=True, repr=False)
class CodesSource(RowsSource):
    """Rows of what codes x (T, K) and scales (T, K / 32) stand for, in bfloat16.

    Attributes:
      format: the name of the codes' format.
    """

    format: str = ""

    loaders: ClassVar[Mapping[str, str]] = {"cutedsl": "codes"}

    def __str__(self) -> str:
        return f"{self.format}_rows"

    @property
    def operands(self) -> tuple[Array, ...]:
        """x are bytes."""
        x = Array("x", Role.SOURCE, dtype="uint8")
        return x, NUMBERS, Array("scales", Role.REPLICATED, dtype="uint8")

    def fused(self, variant: Variant) -> bool:
        """Along the tokens of each expert, to the format that the tokens have."""
        along = variant.form == SECOND_TRANSPOSED and variant.formats[0].name == self.format
        plain = variant.formats[0].bits == 8 and not variant.gives_floats
        return along and plain and super().fused(variant)

    # ---- shapes ---
    def floats_type(self, x: Any, *other: Any) -> tuple[Shape, Any]:
        """bfloat16, as many rows as there are numbers."""
        return super().floats_type(x, *other)[0], FLOAT_DTYPES["bfloat16"]

    def arranged(self, x: Any, other: Sequence[Any], spans: Spans) -> list[Any]:
        """Scales lie as they are."""
        rows, scales = other
        return [*super().arranged(x, (rows,), spans), scales]

    def whole(self, operands: Sequence[Any], spans: Spans) -> list[Any]:
        """The inverse of `arranged`."""
        *others, scales = operands
        return [*super().whole(others, spans), scales]

    # ---- floats ---
    def compute(self, x: Any, *other: Any) -> list[Any]:
        """The rows of codes and of scales, dequantized."""
        from jax_mx.quantizing import reference

        rows, scales = other
        count, length = rows.shape[0], x.shape[1]
        codes = rows_of(x, rows).reshape(count, length // BLOCK, BLOCK)
        scales = rows_of(scales.reshape(x.shape[0], -1), rows).reshape(count, length // BLOCK, 1)
        dtype = np.dtype(FLOAT_DTYPES["bfloat16"])
        y = reference.dequantize(codes, scales, FORMATS[self.format], dtype)
        return [y.reshape(count, length)]
