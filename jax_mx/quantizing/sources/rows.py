"""Rows of a matrix: tokens that are routed to experts."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jax_mx.formats.directions import SECOND
from jax_mx.formats.formats import BLOCK
from jax_mx.formats.windows import ROW
from jax_mx.quantizing.facts.signatures import Array, Role
from jax_mx.quantizing.facts.sources import Shape, Source, Spans, blocks_of
from jax_mx.quantizing.facts.variants import Variant, differ_in_bits

NUMBERS = Array("rows", Role.REPLICATED, dtype="int32")


@dataclasses.dataclass(frozen=True, repr=False)
class RowsSource(Source):
    """The rows of x (T, K) that `rows` (R,) numbers; zeros for other numbers."""

    word = "rows"
    loaders: ClassVar[Mapping[str, str]] = {"cutedsl": "rows"}
    tuned_as = "rows"

    @property
    def operands(self) -> tuple[Array, ...]:
        """x, and the numbers of rows."""
        return Array("x", Role.SOURCE), NUMBERS

    def fused(self, variant: Variant) -> bool:
        """Tokens are bfloat16; amaxes of whole rows of x are no kernel's."""
        if variant.gives_floats:
            return variant.form != SECOND and variant.modes[0].dequantized
        plain = not variant.changes_elements and variant.window != ROW
        return variant.dtype == "bfloat16" and plain and not differ_in_bits(variant.formats)

    def columns(self, spans: Spans) -> int:
        """The dimension behind that of rows."""
        del spans
        return 1

    # ---- shapes ---
    def floats_type(self, x: Any, *other: Any) -> tuple[Shape, Any]:
        """As many rows as there are numbers."""
        return (other[0].shape[0], x.shape[1]), x.dtype

    def arranged(self, x: Any, other: Sequence[Any], spans: Spans) -> list[Any]:
        """x (T, K), and numbers as blocks have them."""
        (rows,), (down, across) = other, spans
        count = rows.shape[0]
        by_row = rows.reshape((count // BLOCK, BLOCK) if down else (count, 1))
        return [x.reshape(x.shape[0], *blocks_of(x.shape[1], across, BLOCK)), by_row]

    def whole(self, operands: Sequence[Any], spans: Spans) -> list[Any]:
        """The inverse of `arranged`."""
        x, rows = operands
        return [x.reshape(x.shape[0], -1), rows.reshape(-1)]

    def shape(self, operands: Sequence[Any], spans: Spans) -> Shape:
        """As many rows as there are numbers."""
        x, rows = operands[:2]
        return math.prod(rows.shape), math.prod(x.shape[1:])

    # ---- floats ---
    def compute(self, x: Any, *other: Any) -> list[Any]:
        """The rows; on a mesh with explicit axes, split as both operands are."""
        return [rows_of(x, other[0])]


def rows_of(x: Any, rows: Any) -> Any:
    """The rows (R, K) of x (T, K) with these numbers, zeros where x has no such row."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from jax_mx.formats.sharding import is_explicit, spec_of
    from jax_mx.quantizing import reference

    meshes = [m for m in (jax.typeof(a).sharding.mesh for a in (x, rows)) if is_explicit(m)]
    if not meshes:
        return reference.rows_of(x, rows)
    spec = PartitionSpec(spec_of(rows)[0], spec_of(x)[1])
    return reference.rows_of(x, rows, NamedSharding(meshes[0], spec))


def numbers_of(op: str, x: Any, rows: Any) -> Any:
    """The rows of a caller, see `quantize`.

    Raises:
      TypeError, ValueError: they are none, or x is no matrix.
    """
    from jax_mx.formats.checks import shown

    dtype, shape = getattr(rows, "dtype", None), getattr(rows, "shape", None)
    if dtype is None or shape is None or dtype != np.int32 or len(shape) != 1:
        got = shown(rows) if dtype is None else f"{dtype}{[*(shape or ())]}"
        error = ValueError if dtype == np.int32 else TypeError
        raise error(
            f"{op}: rows must be an int32 array of rank 1, the number of a row of x for each row "
            f"of the result, got {got}; jnp.asarray(rows, jnp.int32) makes one of integers"
        )
    if x.ndim != 2:
        raise ValueError(
            f"{op}: rows picks rows of a matrix, x has the shape {tuple(x.shape)}; reshape it to "
            "two dimensions"
        )
    return rows
