"""Plan: one call, validated and canonical. A bad call raises here, with one sentence, or never."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jax_mx.facts import formats, layouts
from jax_mx.arrays.mxarray import MXArray, fits
from jax_mx.arrays.checks import (
    axis_of,
    block_of,
    blocks_fit,
    flag,
    float_dtype,
    shown,
    zero_scale_of,
)
from jax_mx.facts.formats import BLOCK, Format, Scaling
from jax_mx.arrays.views import FORMS, Form, covered, moved_last
from jax_mx.facts.layouts import ROW_MAJOR_VALUES, VALUE_LAYOUTS, ScaleLayout, ValueLayout
from jax_mx.ops.preprocessing import UNTREATED, Treatment

# The implementations that a caller can name, and the JAX platform that each runs on.
IMPLEMENTATIONS: Mapping[str, str] = {"cutedsl": "cuda", "flydsl": "rocm", "xla": "any"}


@dataclasses.dataclass(frozen=True)
class Plan:
    """One call, without its shapes: these are the buffers' own, and differ per shard and vmap.

    Attributes:
      op: "quantize", "quantize_both" or "dequantize".
      dtype: of the unquantized side.
      formats: of the quantized side; two for quantize_both.
      axis: the axis that blocks run along, negative; of quantize_both's first result.
      scale_layout: where scales lie.
      scaling: the scale's rule; None for dequantize.
      implementation: the one the caller insists on, or None.
      transpose: whether the form transposes: the (last) result of quantize has its block axis
        last, that of dequantize its last two axes swapped.
      block: of the quantized side: (32,), or (32, 32) on the last two axes, with axis -1.
      zero_scale: the scale's byte of an all-zero block; matters to quantize alone.
      value_layouts: where the values of quantize's results lie; dequantize reads row-major ones.
      treatments: of the elements of quantize's results, beside scaling.
    """

    op: str
    dtype: np.dtype
    formats: tuple[Format, ...]
    axis: int = -1
    scale_layout: ScaleLayout = layouts.ROW_MAJOR
    scaling: Scaling | None = None
    implementation: str | None = None
    transpose: bool = False
    block: tuple[int, ...] = (BLOCK,)
    zero_scale: int = 0
    value_layouts: tuple[ValueLayout, ...] = (ROW_MAJOR_VALUES,)
    treatments: tuple[Treatment, ...] = (UNTREATED,)

    @property
    def is_square(self) -> bool:
        """Whether a block spans two axes."""
        return len(self.block) == 2

    @property
    def format(self) -> Format:
        """Of the (first) quantized array."""
        return self.formats[0]

    @property
    def axes(self) -> tuple[int, ...]:
        """All that blocks run along, negative and ascending."""
        return (-2, -1) if self.op == "quantize_both" or self.is_square else (self.axis,)

    @property
    def first_axis(self) -> int:
        """The first of them, in the unquantized array."""
        swapped = self.op == "dequantize" and self.transpose  # -1 and -2 change places
        return min(-3 - axis if swapped else axis for axis in self.axes)

    @property
    def form(self) -> str:
        """Its name in `forms.FORMS`."""
        if self.op == "quantize_both":
            which = "both"
        elif self.is_square:
            which = "square"
        else:
            which = "last" if self.first_axis == -1 else "second"
        return f"{which}_transposed" if self.transpose else which

    @property
    def has_units(self) -> bool:
        """Whether more than a block of the last two axes is to stay whole: tiles, transforms."""
        return any(cover != (1, BLOCK) for cover in self.covers)

    @property
    def covers(self) -> list[tuple[int, int]]:
        """Of each result, how many rows and elements are whole tiles; see `forms.covered`."""
        each = zip(self.value_layouts, self.formats, self.treatments, strict=True)
        return [covered(self.scale_layout, v, f.codes_per_byte, t.group) for v, f, t in each]

    @property
    def views(self) -> Form:
        """How its arrays are viewed."""
        form = FORMS[self.form]
        if self.has_units:
            return form.laid_out(self.scale_layout, self.value_layouts, self.covers)
        return form.spread(self.first_axis)

    @property
    def params(self) -> dict[str, int]:
        """The scalars that a kernel may ask for by name."""
        params = {}
        if self.scaling is not None:
            for i, format in enumerate(self.formats):
                add, exception = self.scaling.rounding(format)
                params |= {f"round_add_{i}": add, f"round_exception_{i}": exception}
                params |= {f"zero_scale_{i}": self.zero_scale}
                prescale = np.float32(self.treatments[i].prescale or 0)
                params |= {f"prescale_{i}": int(prescale.view(np.uint32))}
                flips = np.array(self.treatments[i].flips or (0, 0), np.uint32).view(np.int32)
                params |= {f"flips_{i}": int(flips[0]), f"flips_odd_{i}": int(flips[1])}
                params |= {f"value_tiles_{i}": int(self.value_layouts[i].is_tiled)}
        return params


def plan_quantize(
    x: Any,
    format: Any,
    axis: Any,
    scaling: Any,
    scale_layout: Any,
    implementation: Any,
    transpose: Any = False,
    block: Any = BLOCK,
    op: str = "quantize",
    zero_scale: Any = 0,
    value_layout: Any = ROW_MAJOR_VALUES,
    treatment: Treatment = UNTREATED,
) -> Plan:
    """The plan of a call of `quantize` on an array like `x`.

    With another op, of the call of it that gives or takes an array like `x`.

    Raises:
      TypeError, ValueError: see `jax_mx.quantize`.
    """
    plan = _canonical(
        Plan(
            op,
            float_dtype(op, "x", x.dtype),
            (formats.named(f"{op}: format", formats.FORMATS, format),),
            axis_of(op, axis, x.ndim),
            formats.named(f"{op}: scale_layout", layouts.SCALE_LAYOUTS, scale_layout),
            formats.named(f"{op}: scaling", formats.SCALINGS, scaling),
            _implementation(op, implementation),
            flag(op, "transpose", transpose),
            block_of(op, block),
            zero_scale_of(op, zero_scale),
            (formats.named(f"{op}: value_layout", VALUE_LAYOUTS, value_layout),),
            (treatment,),
        ),
        x.ndim,
    )
    for along in plan.axes if plan.is_square else (axis,):  # as the caller counts it
        _whole_blocks(op, x.shape, along, treatment)
    _values_fit(plan, x.shape, (plan.axis,))
    return plan


def plan_both(
    x: Any,
    formats_: Any,
    scaling: Any,
    scale_layout: Any,
    implementation: Any,
    transpose: Any,
    zero_scale: Any = 0,
    value_layouts: Any = (ROW_MAJOR_VALUES,) * 2,
    treatments: tuple[Treatment, ...] = (UNTREATED,) * 2,
) -> Plan:
    """The plan of a call of `quantize_both` on an array like `x`.

    Raises:
      TypeError, ValueError: see `jax_mx.quantize_both`.
    """
    op = "quantize_both"
    dtype = float_dtype(op, "x", x.dtype)
    if x.ndim < 2:
        raise ValueError(f"{op}: x has rank {x.ndim}; two directions need a matrix")
    pairs = {"formats": formats_, "transpose": transpose, "value_layouts": value_layouts}
    for name, pair in pairs.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(
                f"{op}: {name} must be a pair, for the last axis and the one before, got "
                f"{shown(pair)}"
            )
    if flag(op, "transpose[0]", transpose[0]):
        raise ValueError(
            f"{op}: transpose[0] is the result along the last axis, whose blocks are contiguous as "
            "they are; use (False, True) or (False, False)"
        )
    for axis, treatment in zip((-1, -2), treatments, strict=True):
        _whole_blocks(op, x.shape, axis, treatment)
    first, second = (formats.named(f"{op}: format", formats.FORMATS, f) for f in formats_)
    plan = Plan(
        op,
        dtype,
        (first, second),
        -1,
        formats.named(f"{op}: scale_layout", layouts.SCALE_LAYOUTS, scale_layout),
        formats.named(f"{op}: scaling", formats.SCALINGS, scaling),
        _implementation(op, implementation),
        flag(op, "transpose[1]", transpose[1]),
        zero_scale=zero_scale_of(op, zero_scale),
        value_layouts=tuple(
            formats.named(f"{op}: value_layout", VALUE_LAYOUTS, v) for v in value_layouts
        ),
        treatments=treatments,
    )
    _values_fit(plan, x.shape, (-1, -2))
    return plan


def plan_dequantize(q: MXArray, dtype: Any, transpose: Any, implementation: Any) -> Plan:
    """The plan of a call of `dequantize` on what `array.checked` gives.

    Raises:
      TypeError, ValueError: see `jax_mx.dequantize`.
    """
    op = "dequantize"
    return _canonical(
        Plan(
            op,
            float_dtype(op, "dtype", dtype),
            (q.format,),
            q.axis,
            q.scale_layout,
            implementation=_implementation(op, implementation),
            transpose=flag(op, "transpose", transpose),
            block=q.block,
        ),
        q.ndim,
    )


def _whole_blocks(op: str, shape: tuple[int, ...], axis: int, treatment: Treatment) -> None:
    length = shape[axis]
    if length % BLOCK:
        raise ValueError(
            f"{op}: axis {axis} has length {length}, not a multiple of the block length {BLOCK}; "
            f"pad it to {-(-length // BLOCK) * BLOCK} or choose another axis of {tuple(shape)}"
        )
    if length % treatment.group:
        raise ValueError(
            f"{op}: axis {axis} has length {length}, not a multiple of {treatment.hadamard}, the "
            "size of its Hadamard transform; use a smaller one or pad it"
        )


def _values_fit(plan: Plan, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """Checks the layouts of the results' values, whose blocks run along these axes of x."""
    last = len(axes) - 1
    for i, (axis, layout) in enumerate(zip(axes, plan.value_layouts, strict=True)):
        result, along = shape, axis
        if plan.transpose and i == last and plan.op != "dequantize":
            result, along = moved_last(shape, -2 if plan.is_square else axis), -1
        fits(plan.op, layout, along, result, plan.formats[i])


def _canonical(plan: Plan, ndim: int) -> Plan:
    """The plan with `transpose` as forms have it; checks what its fields say together."""
    op = plan.op
    blocks_fit(op, plan.block, plan.axis, plan.scale_layout, ndim)
    if plan.is_square and any(treatment.hadamard for treatment in plan.treatments):
        raise ValueError(
            f"{op}: a Hadamard transform goes along one axis, square blocks span two; use block="
            f"{BLOCK}"
        )
    transpose = plan.transpose
    if op == "quantize":  # blocks along the last axis are last as they are
        transpose = transpose and (plan.is_square or plan.axis != -1)
    elif transpose and ndim < 2:
        raise ValueError(f"{op}: transpose swaps the last two axes, the array has rank {ndim}")
    else:  # others have no form: ops.dequantize swaps what comes out
        transpose = transpose and plan.axis >= -2
    return dataclasses.replace(plan, transpose=transpose)


def _implementation(op: str, implementation: Any) -> str | None:
    if implementation is None:
        return None
    table = {name: name for name in IMPLEMENTATIONS}
    return formats.named(f"{op}: implementation", table, implementation)
