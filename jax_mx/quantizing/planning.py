"""From a caller's arguments to a `Plan`: a bad call raises here, with one sentence, or never."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_mx.formats.checks import (
    axis_of,
    block_of,
    blocks_fit,
    blocks_in,
    flag,
    float_dtype,
    implementation_of,
    pairs_fit,
    swaps_fit,
    values_fit,
    whole_blocks,
    zero_scale_of,
)
from jax_mx.formats.formats import BLOCK, FORMATS, SCALINGS, named
from jax_mx.formats.layouts import ROW_MAJOR, ROW_MAJOR_VALUES, SCALE_LAYOUTS, VALUE_LAYOUTS
from jax_mx.quantizing.facts.preprocessing import NO_PREPROCESSING, Preprocessing
from jax_mx.quantizing.facts.sources import Source, X
from jax_mx.quantizing.plan import Plan
from jax_mx.quantizing.registry import IMPLEMENTATIONS


@dataclasses.dataclass(frozen=True)
class Options:
    """A caller's arguments, unchecked; see `jax_mx.quantize` and `jax_mx.quantize_both`.

    Attributes:
      formats: one for each result, as in value_layouts and preprocessing.
      transpose: a bool; for quantize_both a pair, for the last axis and the one before.
      source: see `jax_mx.quantizing.facts.sources`.
      chosen: see `Plan`, also for across.
    """

    formats: Any
    axis: Any = -1
    scaling: Any = "rceil"
    scale_layout: Any = ROW_MAJOR
    implementation: Any = None
    transpose: Any = False
    block: Any = BLOCK
    zero_scale: Any = 0
    value_layouts: Any = (ROW_MAJOR_VALUES,)
    preprocessing: tuple[Preprocessing, ...] = (NO_PREPROCESSING,)
    source: Source = X
    chosen: str = ""
    across: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def both(cls, formats: Any, transpose: Any = (False, True)) -> Options:
        """The arguments of a quantize_both with these formats and defaults for the rest."""
        pairs = (ROW_MAJOR_VALUES,) * 2, (NO_PREPROCESSING,) * 2
        return cls(formats, transpose=transpose, value_layouts=pairs[0], preprocessing=pairs[1])


# Plans of earlier calls: eager calls come again and again.
_plans: dict[Any, Plan] = {}
_MOST = 4096


def planned(op: str, x: Any, options: Options) -> Plan:
    """The plan of a call of `op` on an array like `x`, which has a shape and a dtype.

    `op` is "quantize" or "quantize_both". `is_supported` also passes "dequantize", with an array
    like the floats that come out, and `fake_quantize` its own name, for messages.

    Raises:
      TypeError, ValueError: see `jax_mx.quantize`, `jax_mx.quantize_both`.
    """
    try:
        key = (op, x.shape, x.dtype, *map(_key, vars(options).values()))
        known = _plans.get(key) if all(type(n) is int for n in x.shape) else None
    except TypeError:  # some argument has no hash: it may be a list
        key = known = None
    if known is not None:
        return known
    plan = _plan(op, x.dtype, x.shape, options)
    if key is not None and all(type(n) is int for n in x.shape):
        if len(_plans) >= _MOST:
            _plans.clear()
        _plans[key] = plan
    return plan


def _key(value: Any) -> Any:
    """A value with its type, as True equals 1 and 32.0 equals 32."""
    if isinstance(value, tuple):
        return type(value), tuple(map(_key, value))
    return type(value), value


def _plan(op: str, dtype: Any, shape: tuple[int, ...], asked: Options) -> Plan:
    """The plan of a call on floats of this dtype and shape."""
    dtype, transpose = float_dtype(op, "x", dtype), asked.transpose
    both = op == "quantize_both"
    if both:
        pairs = {n: getattr(asked, n) for n in ("formats", "transpose", "value_layouts")}
        pairs_fit(op, len(shape), **pairs)
        transpose = transpose[1]
    formats = tuple(named(f"{op}: format", FORMATS, format) for format in asked.formats)
    scale_layout = named(f"{op}: scale_layout", SCALE_LAYOUTS, asked.scale_layout)
    value_layouts = tuple(
        named(f"{op}: value_layout", VALUE_LAYOUTS, layout) for layout in asked.value_layouts
    )
    plan = Plan(
        op,
        dtype,
        formats,
        axis=axis_of(op, asked.axis, len(shape)),
        scale_layout=scale_layout,
        scaling=named(f"{op}: scaling", SCALINGS, asked.scaling),
        implementation=implementation_of(op, IMPLEMENTATIONS, asked.implementation),
        transpose=flag(op, "transpose", transpose),
        block=blocks_in(op, asked.preprocessing[0].window, block_of(op, asked.block)),
        zero_scale=zero_scale_of(op, asked.zero_scale),
        value_layouts=value_layouts,
        preprocessing=asked.preprocessing,
        source=asked.source,
        chosen=asked.chosen,
        across=asked.across,
    )
    blocks_fit(op, plan.block, plan.axis, scale_layout, len(shape))
    if transpose and op == "dequantize":
        swaps_fit(op, len(shape))
    plan = _canonical(plan)
    axes = (-1, -2) if both or plan.is_square else (asked.axis,)  # as the caller counts it
    whole_blocks(op, shape, axes, [preprocessing.hadamard for preprocessing in plan.preprocessing])
    axes = (-1, -2) if both else (plan.axis,)
    for axis, layout, format in zip(axes, value_layouts, formats, strict=True):
        moved = plan.transpose and axis == axes[-1] and op != "dequantize"
        values_fit(op, layout, -2 if moved and plan.is_square else axis, shape, format, moved)
    return plan


def plan_dequantize(q: Any, dtype: Any, transpose: Any, implementation: Any) -> Plan:
    """The plan of a call of `dequantize` on a checked MXArray.

    Raises:
      TypeError, ValueError: see `jax_mx.dequantize`.
    """
    op = "dequantize"
    plan = Plan(
        op,
        float_dtype(op, "dtype", dtype),
        (q.format,),
        q.axis,
        q.scale_layout,
        implementation=implementation_of(op, IMPLEMENTATIONS, implementation),
        transpose=flag(op, "transpose", transpose),
        block=q.block,
    )
    if plan.transpose:
        swaps_fit(op, q.ndim)
    return _canonical(plan)


def _canonical(plan: Plan) -> Plan:
    """The plan without a `transpose` that changes nothing; checks what fields say together."""
    if plan.is_square and any(preprocessing.hadamard for preprocessing in plan.preprocessing):
        raise ValueError(
            f"{plan.op}: a Hadamard transform goes along one axis, square blocks span two; use "
            f"block={BLOCK}"
        )
    transpose = plan.transpose
    if plan.op == "quantize":  # blocks along the last axis are last as they are
        transpose = transpose and (plan.is_square or plan.axis != -1)
    else:  # others have no form: dequantizing swaps what comes out
        transpose = transpose and plan.axis >= -2
    return dataclasses.replace(plan, transpose=transpose)
