"""The gradient of gates and ups, which both products of a backward pass take."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from jax_mx.formats.directions import BOTH, BOTH_TRANSPOSED
from jax_mx.formats.formats import BLOCK, MXFP8_E4M3, MXFP8_E5M2
from jax_mx.quantizing.facts.signatures import Array, Role
from jax_mx.quantizing.facts.sources import FLOAT32, Shape, Source, Spans, blocks_of
from jax_mx.quantizing.facts.variants import Variant, has_one_format, is_operand
from jax_mx.quantizing.sources.gated import ACTIVE, WEIGHTS, GatedSource, X


@dataclasses.dataclass(frozen=True, repr=False)
class GradientSource(Source):
    """The gradient of `GatedSource`'s x (T, 2 K), for that of its results, dy (T, K).

    Attributes:
      activation: see `GatedSource`; so is interleaved.
      interleaved: whether gates and ups take turns in x, and their gradients.
      sums: whether sums of the gradient's columns come out, of `BLOCK` rows each.
    """

    activation: str = ACTIVE[0]
    interleaved: bool = False
    sums: bool = False

    loaders: ClassVar[Mapping[str, str]] = {"cutedsl": "gradient"}
    tuned_as = "gradient"
    tiled_on = ("sm_100f",)  # whose products read tiles

    def __str__(self) -> str:
        turns = "_interleaved" * self.interleaved
        return f"{self.activation}{turns}_gradient" + "_sums" * self.sums

    @property
    def operands(self) -> tuple[Array, ...]:
        """x, the weights of rows, and dy."""
        return X, WEIGHTS, Array("dy", Role.SOURCE)

    @property
    def results(self) -> tuple[Array, ...]:
        """Sums, if they are wanted."""
        return (Array("sums", Role.REPLICATED, dtype="float32"),) * self.sums

    @property
    def parts(self) -> int:
        """Gradients of gates and of ups are two, unless they take turns."""
        return 1 if self.interleaved else 2

    def is_fused_by(self, dsl: str) -> bool:
        """Kernels have few activations."""
        return self.activation in ACTIVE and super().is_fused_by(dsl)

    def fused(self, variant: Variant) -> bool:
        """Both ways; sums in the formats that recipes give gradients."""
        if variant.gives_floats:
            both = all(mode.dequantized for mode in variant.modes)
            return self == GradientSource() and variant.form == BOTH and both
        if variant.form != BOTH_TRANSPOSED or variant.dtype != "bfloat16":
            return False
        if self.sums:
            return has_one_format(variant, MXFP8_E4M3, MXFP8_E5M2)
        plain = self.activation == ACTIVE[0] and not self.interleaved
        return is_operand(variant) and (plain or has_one_format(variant))

    def columns(self, spans: Spans) -> int:
        """By turns the dimension behind that of rows, else the one behind that of halves."""
        return GatedSource(interleaved=self.interleaved).columns(spans)

    @property
    def facts(self) -> dict[str, Any]:
        """The activation, too."""
        facts = {"activation": self.activation, "interleaved": self.interleaved}
        return {**super().facts, **facts}

    # ---- shapes ---
    def fits(self, x: Any, window: int) -> bool:
        """Each half has whole windows."""
        return self.interleaved or x.shape[1] % (2 * window) == 0

    def arranged(self, x: Any, other: Sequence[Any], spans: Spans) -> list[Any]:
        """x (T, 2, K) and dy (T, K); by turns x (T, 2 K), and half as much of dy beside a block."""
        (weights, dy), (count, length), (down, across) = other, x.shape, spans
        by_row = weights.reshape((count // BLOCK, BLOCK) if down else (count, 1))
        if self.interleaved:
            width = BLOCK // 2 if across else 1
            x, dy = (
                a.reshape(count, length // (2 * width), n) for a, n in ((x, 2 * width), (dy, width))
            )
            return [x, by_row, dy]
        tail = blocks_of(length // 2, across, BLOCK)
        return [x.reshape(count, 2, *tail), by_row, dy.reshape(count, *tail)]

    def whole(self, operands: Sequence[Any], spans: Spans) -> list[Any]:
        """The inverse of `arranged`."""
        return GatedSource().whole(operands, spans)

    def shape(self, operands: Sequence[Any], spans: Spans) -> Shape:
        """As many rows as weights, and x's columns."""
        x, weights = operands[:2]
        return math.prod(weights.shape), math.prod(x.shape[1:])

    def result_shapes(self, operands: Sequence[Any], spans: Spans) -> list[tuple[Shape, Any]]:
        """Sums of 32 rows each."""
        rows, columns = self.shape(operands, spans)
        return [((rows // BLOCK, columns), FLOAT32)] * self.sums

    # ---- floats ---
    def compute(self, x: Any, *other: Any) -> list[Any]:
        """The gradient, and sums if they are wanted."""
        from jax_mx.quantizing import reference

        weights, dy = other
        halves = reference.halves(x, self.activation, self.interleaved)
        gradients = reference.gated_gradient(halves, weights, dy, self.activation)
        gradient = reference.joined(gradients, self.interleaved)
        return [gradient, *([reference.sums_of(gradient)] if self.sums else [])]

    def in_steps(self, quantize: Callable[..., list], x: Any, *other: Any) -> list[Any]:
        """XLA sums, beside a kernel that makes the gradient, if there is one."""
        if not self.sums:
            return super().in_steps(quantize, x, *other)
        _, sums = self.compute(x, *other)
        return [*quantize(dataclasses.replace(self, sums=False), x, *other), sums]
