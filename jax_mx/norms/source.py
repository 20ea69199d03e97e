"""Rows that are normed, as a transformer's block begins."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jax_mx.formats.directions import LAST
from jax_mx.formats.formats import BLOCK, MXFP4_E2M1, MXFP8_E4M3
from jax_mx.quantizing.facts.signatures import Array, Role
from jax_mx.quantizing.facts.sources import FLOAT32, Shape, Source, Spans, blocks_of
from jax_mx.quantizing.facts.variants import Variant, has_one_format, is_operand
from jax_mx.quantizing.sources.gated import FLOATS, WEIGHTS, X


@dataclasses.dataclass(frozen=True, repr=False)
class NormSource(Source):
    """The results of `jax_mx.rms_norm` for x (..., K) and float32 weights (K,).

    The factors of rows are a further result.

    Attributes:
      eps: a float32, which is a scalar of kernels.
      added: whether a residual like x is added to x before; the sum is a further result.
      floats: whether the floats are a result, next to codes.
    """

    eps: float = 0.0
    added: bool = False
    floats: bool = False

    word: ClassVar[str] = "rms_norm"
    loaders: ClassVar[Mapping[str, str]] = {"cutedsl": "rms_norm"}
    modules: ClassVar[Mapping[str, str]] = {"cutedsl": "jax_mx.norms.cutedsl"}
    tuned_as = "gated"
    has_slabs = True
    derivative = (
        "rms_norm has a derivative where it gives floats: pass floats=True beside the format, "
        "or jax.lax.stop_gradient(x)"
    )

    def __str__(self) -> str:
        return self.word + "_added" * self.added + "_floats" * self.floats

    @property
    def operands(self) -> tuple[Array, ...]:
        """x, the residual if there is one, and the weights of columns."""
        return X, *(Array("residual", Role.SOURCE),) * self.added, WEIGHTS

    @property
    def results(self) -> tuple[Array, ...]:
        """The factors of rows, the sum, and the floats."""
        factors = Array("factors", Role.REPLICATED, dtype="float32")
        more = (Array("sum", Role.SOURCE),) * self.added + (FLOATS,) * self.floats
        return factors, *more

    @property
    def scalars(self) -> Mapping[str, int]:
        """The bits of eps."""
        return {"eps": int(np.float32(self.eps).view(np.int32))}

    @property
    def kernel(self) -> NormSource:
        """The source of every eps."""
        return dataclasses.replace(self, eps=0.0)

    def fused(self, variant: Variant) -> bool:
        """Kernels give the operands of products; sums and floats from bfloat16, in two formats.

        Factors that wait in memory for their tiles are float32, but float32 rows need float64 ones.
        """
        if variant.gives_floats or not is_operand(variant):
            return False
        more = self.added or self.floats
        if variant.dtype == "bfloat16" and not more:
            return True
        if variant.dtype == "float32" and variant.form != LAST:
            return False
        if variant.dtype != "bfloat16" and more:
            return False
        return has_one_format(variant, MXFP8_E4M3, MXFP4_E2M1)

    def columns(self, spans: Spans) -> int:
        """The dimension behind the dimensions of rows."""
        return 1 + spans[0]

    # ---- shapes ---
    def arranged(self, x: Any, other: Sequence[Any], spans: Spans) -> list[Any]:
        """x and the residual (..., T, K), each axis that blocks run along in two."""
        *residual, weight = other
        tail = [
            n
            for along, length in zip(spans, x.shape[-2:], strict=True)
            for n in blocks_of(length, along, BLOCK)
        ]
        return [*(a.reshape(*a.shape[:-2], *tail) for a in (x, *residual)), weight]

    def whole(self, operands: Sequence[Any], spans: Spans) -> list[Any]:
        """The inverse of `arranged`, which joins all rows where blocks run down them."""
        *arrays, weight = operands
        shape = self.shape(operands, spans)
        return [*(a.reshape(shape) for a in arrays), weight.reshape(-1)]

    def shape(self, operands: Sequence[Any], spans: Spans) -> Shape:
        """The shape of x, from its operand's, which has blocks."""
        (down, across), shape = spans, operands[0].shape
        at = len(shape) - 1 - across
        rows = (math.prod(shape[:at]),) if down else tuple(shape[:at])
        return *rows, math.prod(shape[at:])

    def result_shapes(self, operands: Sequence[Any], spans: Spans) -> list[tuple[Shape, Any]]:
        """A factor for each row; the sum lies as the operand x does."""
        shape = self.shape(operands, spans)
        sums = [(tuple(operands[0].shape), None)] * self.added
        return [(shape[:-1], FLOAT32), *sums, *[(shape, None)] * self.floats]

    # ---- floats ---
    def compute(self, x: Any, *other: Any) -> list[Any]:
        """The floats, the factors of rows, the sum, and the floats again."""
        from jax_mx.norms import reference

        *residual, weight = other
        x = reference.added(x, *residual) if residual else x
        floats, factors = reference.rms_norm(x, weight, self.eps)
        return [floats, factors[..., 0], *[x] * self.added, *[floats] * self.floats]

    def in_steps(self, quantize: Callable[..., list], x: Any, *other: Any) -> list[Any]:
        """XLA adds, before a kernel that norms the sum, if there is one."""
        from jax_mx.norms import reference

        if not self.added:
            return super().in_steps(quantize, x, *other)
        residual, weight = other
        total = reference.added(x, residual)
        outs = quantize(dataclasses.replace(self, added=False), total, weight)
        at = len(outs) - self.floats
        return [*outs[:at], total, *outs[at:]]
