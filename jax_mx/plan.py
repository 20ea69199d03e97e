"""Plan: one call, validated and canonical. A bad call raises here, with one sentence, or never."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_mx import formats, layouts
from jax_mx.formats import BLOCK, FLOAT_DTYPES, SCALE_DTYPE, Format, Scaling
from jax_mx.layouts import ScaleLayout

# The implementations that a caller can name, and the JAX platform that each runs on.
IMPLEMENTATIONS: Mapping[str, str] = {"cutedsl": "cuda", "flydsl": "rocm", "xla": "any"}


@dataclasses.dataclass(frozen=True)
class Plan:
    """One call, without its shapes: these are the buffers' own, and differ per shard and vmap.

    Attributes:
      op: "quantize" or "dequantize".
      dtype: of the unquantized side.
      format: of the quantized side.
      axis: the axis that blocks run along, negative.
      scale_layout: where scales lie.
      scaling: the scale's rule; None for dequantize.
      implementation: the one the caller insists on, or None.
    """

    op: str
    dtype: np.dtype
    format: Format
    axis: int = -1
    scale_layout: ScaleLayout = layouts.ROW_MAJOR
    scaling: Scaling | None = None
    implementation: str | None = None

    @property
    def params(self) -> dict[str, int]:
        """The scalars that a kernel may ask for by name."""
        if self.scaling is None:
            return {}
        add, exception = self.scaling.rounding(self.format)
        return {"round_add": add, "round_exception": exception}


def plan_quantize(
    x: Any,
    format: Any,
    axis: Any,
    scaling: Any,
    scale_layout: Any,
    implementation: Any,
) -> Plan:
    """The plan of a call of `quantize` on an array like `x`.

    Raises:
      TypeError, ValueError: see `jax_mx.quantize`.
    """
    op = "quantize"
    plan = Plan(
        op,
        _float_dtype(op, "x", x.dtype),
        formats.named(f"{op}: format", formats.FORMATS, format),
        _axis(op, axis, x.ndim),
        formats.named(f"{op}: scale_layout", layouts.SCALE_LAYOUTS, scale_layout),
        formats.named(f"{op}: scaling", formats.SCALINGS, scaling),
        _implementation(op, implementation),
    )
    length = x.shape[plan.axis]
    if length % BLOCK:
        raise ValueError(
            f"{op}: axis {axis} has length {length}, not a multiple of the block length {BLOCK}; "
            f"pad it to {-(-length // BLOCK) * BLOCK} or choose another axis of {tuple(x.shape)}"
        )
    if plan.scale_layout.is_tiled and x.ndim < 2:
        raise ValueError(
            f"{op}: scale_layout {plan.scale_layout.name!r} tiles a matrix's rows and columns, "
            f"x has rank {x.ndim}; use 'row_major' or reshape x to a matrix"
        )
    return plan


def plan_dequantize(q: Any, dtype: Any, implementation: Any) -> Plan:
    """The plan of a call of `dequantize` on an `MXArray`.

    Raises:
      TypeError, ValueError: see `jax_mx.dequantize`.
    """
    op = "dequantize"
    for name in ("values", "scales", "format", "axis", "scale_layout"):
        if not hasattr(q, name):
            raise TypeError(f"{op}: q must be an MXArray, as quantize returns, got {type(q)}")
    plan = Plan(
        op,
        _float_dtype(op, "dtype", dtype),
        q.format,
        _axis(op, q.axis, q.ndim),
        q.scale_layout,
        implementation=_implementation(op, implementation),
    )
    for name, want in (("values", q.format.storage), ("scales", SCALE_DTYPE)):
        if getattr(q, name).dtype != want:
            raise TypeError(f"{op}: q.{name} is {getattr(q, name).dtype}, {q.format!r} has {want}")
    scales = scales_shape(q.shape, plan)
    if q.shape[plan.axis] % BLOCK or q.scales.shape != scales:
        raise ValueError(
            f"{op}: values of the shape {q.values.shape} in {q.format!r} along axis {plan.axis} "
            f"have scales of the shape {scales}, got {q.scales.shape}"
        )
    return plan


def scales_shape(shape: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    """Of the scales of an array of the logical `shape`."""
    if not plan.scale_layout.is_tiled:
        axis = plan.axis + len(shape)
        return (*shape[:axis], shape[axis] // BLOCK, *shape[axis + 1 :])
    matrix = np.moveaxis(np.empty((*shape, 0)), plan.axis - 1, -2).shape[:-1]
    return (*matrix[:-2], *plan.scale_layout.shape(matrix[-2], matrix[-1] // BLOCK))


def _float_dtype(op: str, name: str, dtype: Any) -> np.dtype:
    try:
        dtype = jnp.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"{op}: {name} is no dtype: {dtype!r}") from error
    if dtype not in FLOAT_DTYPES.values():
        raise TypeError(
            f"{op}: {name} is {dtype.name}, must be {', '.join(FLOAT_DTYPES)}; convert it first"
        )
    return dtype


def _axis(op: str, axis: Any, ndim: int) -> int:
    try:
        axis = operator.index(axis)
    except TypeError as error:
        raise TypeError(f"{op}: axis must be an int, got {axis!r}") from error
    if ndim == 0:
        raise ValueError(f"{op}: x is a scalar; blocks need an axis of at least one dimension")
    if not -ndim <= axis < ndim:
        raise ValueError(
            f"{op}: axis {axis} is out of range for rank {ndim}; {-ndim} to {ndim - 1}"
        )
    return axis if axis < 0 else axis - ndim


def _implementation(op: str, implementation: Any) -> str | None:
    if implementation is None:
        return None
    table = {name: name for name in IMPLEMENTATIONS}
    return formats.named(f"{op}: implementation", table, implementation)
