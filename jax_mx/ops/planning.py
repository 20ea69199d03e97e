"""From a caller's arguments to a `Plan`: a bad call raises here, with one sentence, or never."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_mx.arrays.checks import (
    axis_of,
    block_of,
    blocks_fit,
    flag,
    float_dtype,
    padded,
    shown,
    values_fit,
    zero_scale_of,
)
from jax_mx.arrays.views import moved_last
from jax_mx.facts.formats import BLOCK, FORMATS, SCALINGS, named
from jax_mx.facts.layouts import ROW_MAJOR, ROW_MAJOR_VALUES, SCALE_LAYOUTS, VALUE_LAYOUTS
from jax_mx.facts.preprocessing import NO_PREPROCESSING, Preprocessing
from jax_mx.lowering.plan import Plan
from jax_mx.lowering.registry import IMPLEMENTATIONS


@dataclasses.dataclass(frozen=True)
class Options:
    """What a caller asks of one quantized array, as given; see `jax_mx.quantize`."""

    format: Any
    axis: Any = -1
    scaling: Any = "rceil"
    scale_layout: Any = ROW_MAJOR
    implementation: Any = None
    transpose: Any = False
    block: Any = BLOCK
    zero_scale: Any = 0
    value_layout: Any = ROW_MAJOR_VALUES
    preprocessing: Preprocessing = NO_PREPROCESSING


@dataclasses.dataclass(frozen=True)
class PairOptions:
    """What a caller asks of both directions, as given; see `jax_mx.quantize_both`."""

    formats: Any
    transpose: Any = (False, True)
    scaling: Any = "rceil"
    scale_layout: Any = ROW_MAJOR
    implementation: Any = None
    zero_scale: Any = 0
    value_layouts: Any = (ROW_MAJOR_VALUES,) * 2
    preprocessing: tuple[Preprocessing, ...] = (NO_PREPROCESSING,) * 2


# What the public functions made of their arguments before: eager calls come again and again.
_plans: dict[Any, Plan] = {}
_MOST = 4096


def planned(op: str, x: Any, options: Options | PairOptions) -> Plan:
    """The plan of a call of `op` on an array like `x`, which has a shape and a dtype.

    `op` is "quantize" or "quantize_both". `is_supported` also passes "dequantize", with an array
    like the floats that come out, and `fake_quantize` its own name, for messages.

    Raises:
      TypeError, ValueError: see `jax_mx.quantize`, `jax_mx.quantize_both`.
    """
    try:
        key = (op, x.shape, x.dtype, *map(_key, vars(options).values()))
        found = _plans.get(key) if all(type(n) is int for n in x.shape) else None
    except TypeError:  # some argument has no hash: it may be a list
        key = found = None
    if found is not None:
        return found
    if isinstance(options, PairOptions):
        plan = _plan_both(op, x, options)
    else:
        plan = _plan_one(op, x, options)
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


def _plan_one(op: str, x: Any, asked: Options) -> Plan:
    plan = _canonical(
        Plan(
            op,
            float_dtype(op, "x", x.dtype),
            (named(f"{op}: format", FORMATS, asked.format),),
            axis_of(op, asked.axis, x.ndim),
            named(f"{op}: scale_layout", SCALE_LAYOUTS, asked.scale_layout),
            named(f"{op}: scaling", SCALINGS, asked.scaling),
            implementation_of(op, asked.implementation),
            flag(op, "transpose", asked.transpose),
            block_of(op, asked.block),
            zero_scale_of(op, asked.zero_scale),
            (named(f"{op}: value_layout", VALUE_LAYOUTS, asked.value_layout),),
            (asked.preprocessing,),
        ),
        x.ndim,
    )
    for along in plan.axes if plan.is_square else (asked.axis,):  # as the caller counts it
        _whole_blocks(op, x.shape, along, asked.preprocessing)
    _values_fit(plan, x.shape, (plan.axis,))
    return plan


def _plan_both(op: str, x: Any, asked: PairOptions) -> Plan:
    dtype = float_dtype(op, "x", x.dtype)
    if x.ndim < 2:
        raise ValueError(f"{op}: x has rank {x.ndim}; two directions need a matrix")
    for name in ("formats", "transpose", "value_layouts"):
        pair = getattr(asked, name)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(
                f"{op}: {name} must be a pair, for the last axis and the one before, got "
                f"{shown(pair)}"
            )
    if flag(op, "transpose[0]", asked.transpose[0]):
        raise ValueError(
            f"{op}: transpose[0] is the result along the last axis, whose blocks are contiguous as "
            "they are; use (False, True) or (False, False)"
        )
    for axis, preprocessing in zip((-1, -2), asked.preprocessing, strict=True):
        _whole_blocks(op, x.shape, axis, preprocessing)
    first, second = (named(f"{op}: format", FORMATS, f) for f in asked.formats)
    plan = Plan(
        op,
        dtype,
        (first, second),
        -1,
        named(f"{op}: scale_layout", SCALE_LAYOUTS, asked.scale_layout),
        named(f"{op}: scaling", SCALINGS, asked.scaling),
        implementation_of(op, asked.implementation),
        flag(op, "transpose[1]", asked.transpose[1]),
        zero_scale=zero_scale_of(op, asked.zero_scale),
        value_layouts=tuple(
            named(f"{op}: value_layout", VALUE_LAYOUTS, v) for v in asked.value_layouts
        ),
        preprocessing=asked.preprocessing,
    )
    _values_fit(plan, x.shape, (-1, -2))
    return plan


def plan_dequantize(q: Any, dtype: Any, transpose: Any, implementation: Any) -> Plan:
    """The plan of a call of `dequantize` on a checked MXArray.

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
            implementation=implementation_of(op, implementation),
            transpose=flag(op, "transpose", transpose),
            block=q.block,
        ),
        q.ndim,
    )


def implementation_of(op: str, implementation: Any) -> str | None:
    """The name of an implementation, or None.

    Raises:
      TypeError, ValueError: it is no implementation's name.
    """
    if implementation is None:
        return None
    table = {name: name for name in IMPLEMENTATIONS}
    return named(f"{op}: implementation", table, implementation)


def _whole_blocks(op: str, shape: tuple[int, ...], axis: int, own: Preprocessing) -> None:
    length = shape[axis]
    if length % BLOCK:
        raise ValueError(
            f"{op}: axis {axis} has length {length}, not a multiple of the block length {BLOCK}; "
            f"{padded(length, BLOCK)} or choose another axis of {tuple(shape)}"
        )
    if length % own.group:
        raise ValueError(
            f"{op}: axis {axis} has length {length}, not a multiple of {own.hadamard}, the "
            f"size of its Hadamard transform; {padded(length, own.group)} or use a smaller one"
        )


def _values_fit(plan: Plan, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """Checks the layouts of the results' values, whose blocks run along these axes of x."""
    last = len(axes) - 1
    for i, (axis, layout) in enumerate(zip(axes, plan.value_layouts, strict=True)):
        result, along = shape, axis
        if plan.transpose and i == last and plan.op != "dequantize":
            result, along = moved_last(shape, -2 if plan.is_square else axis), -1
        values_fit(plan.op, layout, along, result, plan.formats[i])


def _canonical(plan: Plan, ndim: int) -> Plan:
    """The plan without a `transpose` that changes nothing; checks what fields say together."""
    op = plan.op
    blocks_fit(op, plan.block, plan.axis, plan.scale_layout, ndim)
    if plan.is_square and any(own.hadamard for own in plan.preprocessing):
        raise ValueError(
            f"{op}: a Hadamard transform goes along one axis, square blocks span two; use block="
            f"{BLOCK}"
        )
    transpose = plan.transpose
    if op == "quantize":  # blocks along the last axis are last as they are
        transpose = transpose and (plan.is_square or plan.axis != -1)
    elif transpose and ndim < 2:
        raise ValueError(f"{op}: transpose swaps the last two axes, the array has rank {ndim}")
    else:  # others have no form: dequantizing swaps what comes out
        transpose = transpose and plan.axis >= -2
    return dataclasses.replace(plan, transpose=transpose)
