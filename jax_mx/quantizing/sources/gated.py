"""An activation's results, of gates and ups, between the two products of an MLP."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jax_mx.formats.formats import BLOCK, MXFP4_E2M1, MXFP8_E4M3
from jax_mx.quantizing.facts.signatures import Array, Role
from jax_mx.quantizing.facts.sources import ROWS, Shape, Source, Spans, blocks_of
from jax_mx.quantizing.facts.variants import Variant, has_one_format, is_operand

X, WEIGHTS = Array("x", Role.SOURCE), Array("weights", Role.REPLICATED, dtype="float32")
FLOATS = Array("floats", Role.SOURCE)
# The activations that kernels have, and their gradients; XLA computes others, and a kernel
# quantizes these. The first one is the one that most models have.
ACTIVE = ("swiglu", "gpt_oss")


@dataclasses.dataclass(frozen=True, repr=False)
class GatedSource(Source):
    """act(gate) * up * weight, see `jax_mx.gated`, of x (T, 2 K) and weights (T,).

    Attributes:
      activation: its name, see quantizing/facts/activations.py.
      interleaved: whether gates and ups take turns in x; else all gates come first.
      floats: whether the floats come out, beside codes.
    """

    activation: str = ACTIVE[0]
    interleaved: bool = False
    floats: bool = False

    loaders: ClassVar[Mapping[str, str]] = {"cutedsl": "gated"}
    tuned_as = "gated"
    split = (ROWS,), (ROWS,)

    def __str__(self) -> str:
        return self.activation + "_interleaved" * self.interleaved + "_floats" * self.floats

    @property
    def operands(self) -> tuple[Array, ...]:
        """x and the weights of rows."""
        return X, WEIGHTS

    @property
    def results(self) -> tuple[Array, ...]:
        """The floats, if they are wanted."""
        return (FLOATS,) * self.floats

    def is_fused_by(self, dsl: str) -> bool:
        """Kernels have few activations."""
        return self.activation in ACTIVE and super().is_fused_by(dsl)

    def fused(self, variant: Variant) -> bool:
        """Kernels give what products take; of other floats than bfloat16 in two formats."""
        plain = self.activation == ACTIVE[0] and not self.interleaved
        if variant.finds_amaxes:
            return variant.dtype == "bfloat16" and not self.floats and plain
        if not is_operand(variant):
            return False
        if variant.gives_floats:
            return self == GatedSource()
        if self.floats or variant.dtype != "bfloat16":
            alone = variant.dtype == "bfloat16" or not (self.floats or self.interleaved)
            return alone and has_one_format(variant, MXFP8_E4M3, MXFP4_E2M1)
        return plain or has_one_format(variant)

    def columns(self, spans: Spans) -> int:
        """By turns the dimension behind that of rows, else the one behind that of halves."""
        del spans
        return 1 if self.interleaved else 2

    @property
    def facts(self) -> dict[str, Any]:
        """The activation, too."""
        facts = {"activation": self.activation, "interleaved": self.interleaved}
        return {**super().facts, **facts}

    # ---- shapes ---
    def floats_type(self, x: Any, *other: Any) -> tuple[Shape, Any]:
        """Half as many columns."""
        del other
        return (*x.shape[:-1], x.shape[-1] // 2), x.dtype

    def arranged(self, x: Any, other: Sequence[Any], spans: Spans) -> list[Any]:
        """x (T, 2, K), or by turns (T, K, 2) in as many blocks as the floats have."""
        weights, *_ = other
        (count, length), (down, across) = x.shape, spans
        by_row = weights.reshape((count // BLOCK, BLOCK) if down else (count, 1))
        if self.interleaved:
            width = BLOCK if across else 1
            return [x.reshape(count, length // (2 * width), 2 * width), by_row]
        return [x.reshape(count, 2, *blocks_of(length // 2, across, BLOCK)), by_row]

    def whole(self, operands: Sequence[Any], spans: Spans) -> list[Any]:
        """The inverse of `arranged`."""
        x, weights, *dy = operands
        return [x.reshape(x.shape[0], -1), weights.reshape(-1), *(_matrix(a) for a in dy)]

    def shape(self, operands: Sequence[Any], spans: Spans) -> Shape:
        """As many rows as weights, and half of x's columns."""
        x, weights = operands[:2]
        return math.prod(weights.shape), math.prod(x.shape[1:]) // 2

    def result_shapes(self, operands: Sequence[Any], spans: Spans) -> list[tuple[Shape, Any]]:
        """The floats."""
        return [(self.shape(operands, spans), None)] * self.floats

    # ---- floats ---
    def compute(self, x: Any, *other: Any) -> list[Any]:
        """The floats, twice if they are wanted."""
        from jax_mx.quantizing import reference

        (weights,) = other
        halves = reference.halves(x, self.activation, self.interleaved)
        return [reference.gated(halves, weights, self.activation)] * (1 + self.floats)


def _matrix(x: Any) -> Any:
    return x.reshape(x.shape[0], -1)
