"""Plan: one call, validated and canonical. A bad call raises here, with one sentence, or never."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_mx import formats, layouts
from jax_mx.array import MXArray, fits
from jax_mx.formats import BLOCK, FLOAT_DTYPES, SCALE_DTYPE, Format, Scaling
from jax_mx.forms import FORMS, Form, moved_last, scales_shape
from jax_mx.layouts import ROW_MAJOR_VALUES, VALUE_LAYOUTS, ScaleLayout, ValueLayout
from jax_mx.treatment import UNTREATED, Treatment

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
      value_layouts: where the values of quantize's results lie; what the primitive gives is
        row-major, and is put there afterwards.
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
    def views(self) -> Form:
        """How its arrays are viewed."""
        form = FORMS[self.form]
        tiled = self.scale_layout.is_tiled
        return form.laid_out(self.scale_layout) if tiled else form.spread(self.first_axis)

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
            _float_dtype(op, "x", x.dtype),
            (formats.named(f"{op}: format", formats.FORMATS, format),),
            _axis(op, axis, x.ndim),
            formats.named(f"{op}: scale_layout", layouts.SCALE_LAYOUTS, scale_layout),
            formats.named(f"{op}: scaling", formats.SCALINGS, scaling),
            _implementation(op, implementation),
            _flag(op, "transpose", transpose),
            _block(op, block),
            _zero_scale(op, zero_scale),
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
    dtype = _float_dtype(op, "x", x.dtype)
    if x.ndim < 2:
        raise ValueError(f"{op}: x has rank {x.ndim}; two directions need a matrix")
    pairs = {"formats": formats_, "transpose": transpose, "value_layouts": value_layouts}
    for name, pair in pairs.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(
                f"{op}: {name} must be a pair, for the last axis and the one before, got {pair!r}"
            )
    if _flag(op, "transpose[0]", transpose[0]):
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
        _flag(op, "transpose[1]", transpose[1]),
        zero_scale=_zero_scale(op, zero_scale),
        value_layouts=tuple(
            formats.named(f"{op}: value_layout", VALUE_LAYOUTS, v) for v in value_layouts
        ),
        treatments=treatments,
    )
    _values_fit(plan, x.shape, (-1, -2))
    return plan


def plan_dequantize(q: Any, dtype: Any, transpose: Any, implementation: Any) -> Plan:
    """The plan of a call of `dequantize` on an `MXArray`.

    Raises:
      TypeError, ValueError: see `jax_mx.dequantize`.
    """
    op = "dequantize"
    if not isinstance(q, MXArray):
        raise TypeError(f"{op}: q must be an MXArray, as quantize returns, got {type(q).__name__}")
    format = formats.named(f"{op}: q.format", formats.FORMATS, q.format)
    layout = formats.named(f"{op}: q.scale_layout", layouts.SCALE_LAYOUTS, q.scale_layout)
    values_in = formats.named(f"{op}: q.value_layout", VALUE_LAYOUTS, q.value_layout)
    q = dataclasses.replace(q, format=format, value_layout=values_in)
    for name, want in (("values", format.storage), ("scales", SCALE_DTYPE)):
        array = getattr(q, name)
        if not hasattr(array, "dtype") or array.dtype != want:
            found = getattr(array, "dtype", type(array).__name__)
            raise TypeError(f"{op}: q.{name} is {found}, {format!r} has {want}")
    tile = values_in.tile
    if values_in.is_tiled and (q.values.ndim < 3 or q.values.shape[-1] != tile[0] * tile[1]):
        raise ValueError(
            f"{op}: values in {values_in.name!r} have the shape (..., row tiles, column tiles, "
            f"{tile[0] * tile[1]}), got {q.values.shape}"
        )
    plan = _canonical(
        Plan(
            op,
            _float_dtype(op, "dtype", dtype),
            (format,),
            _axis(op, q.axis, q.ndim),
            layout,
            implementation=_implementation(op, implementation),
            transpose=_flag(op, "transpose", transpose),
            block=_block(op, q.block),
            value_layouts=(values_in,),
        ),
        q.ndim,
    )
    shape = q.shape
    if plan.axis != -1:
        fits(op, values_in, plan.axis, shape, format)  # it does not
    scales = scales_shape(shape, plan.axes, layout)
    if any(shape[axis] % BLOCK for axis in plan.axes) or q.scales.shape != scales:
        along = "in square blocks" if plan.is_square else f"along axis {plan.axis}"
        raise ValueError(
            f"{op}: values of the shape {q.values.shape} in {format!r} {along} have scales of the "
            f"shape {scales}, got {q.scales.shape}; if a vmap put its axis behind the block axis, "
            "use out_axes=0"
        )
    return plan


def _float_dtype(op: str, name: str, dtype: Any) -> np.dtype:
    allowed = ", ".join(FLOAT_DTYPES)
    try:
        found = jnp.dtype(dtype if dtype is not None else "nothing").newbyteorder("=")
    except TypeError as error:
        raise TypeError(f"{op}: {name} is {dtype!r}, must be one of {allowed}") from error
    if found not in FLOAT_DTYPES.values():
        raise TypeError(f"{op}: {name} is {found.name}, must be one of {allowed}")
    return found


def _axis(op: str, axis: Any, ndim: int) -> int:
    try:
        if isinstance(axis, bool):
            raise TypeError
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
        if plan.transpose and i == last:
            result, along = moved_last(shape, -2 if plan.is_square else axis), -1
        fits(plan.op, layout, along, result, plan.formats[i])


def _block(op: str, block: Any) -> tuple[int, ...]:
    sentence = f"{op}: block must be {BLOCK} or ({BLOCK}, {BLOCK}), got {block!r}"
    try:
        lengths = block if isinstance(block, tuple | list) else (block,)
        lengths = tuple(operator.index(n) for n in lengths)
    except TypeError as error:
        raise TypeError(sentence) from error
    if lengths not in ((BLOCK,), (BLOCK, BLOCK)):
        raise ValueError(sentence)
    return lengths


def _zero_scale(op: str, value: Any) -> int:
    if isinstance(value, bool) or value not in (0, 127):
        raise ValueError(
            f"{op}: zero_scale, the scale of all-zero blocks, must be 0 (2^-127) or 127 (1.0), got "
            f"{value!r}"
        )
    return int(value)


def _canonical(plan: Plan, ndim: int) -> Plan:
    """The plan with `transpose` as forms have it; checks what its fields say together."""
    op, layout = plan.op, plan.scale_layout
    if layout.is_tiled and ndim < 2:
        raise ValueError(
            f"{op}: scale_layout {layout.name!r} tiles a matrix's rows and columns, the array has "
            f"rank {ndim}; use 'row_major' or a matrix"
        )
    if plan.is_square and ndim < 2:
        raise ValueError(f"{op}: square blocks span two axes, the array has rank {ndim}")
    if plan.is_square and plan.axis != -1:
        raise ValueError(
            f"{op}: square blocks span the last two axes; leave axis at -1, got {plan.axis}"
        )
    if plan.is_square and any(treatment.hadamard for treatment in plan.treatments):
        raise ValueError(
            f"{op}: a Hadamard transform goes along one axis, square blocks span two; use block="
            f"{BLOCK}"
        )
    if plan.is_square and layout.is_tiled:
        raise ValueError(
            f"{op}: square blocks have row-major scales; for {layout.name!r} expand them: "
            f"quantize(x, block={plan.block}).expand(axis, {layout.name!r})"
        )
    transpose = plan.transpose
    if op == "quantize":  # blocks along the last axis are last as they are
        transpose = transpose and (plan.is_square or plan.axis != -1)
    elif transpose and ndim < 2:
        raise ValueError(f"{op}: transpose swaps the last two axes, the array has rank {ndim}")
    else:  # others have no form: ops.dequantize swaps what comes out
        transpose = transpose and plan.axis >= -2
    return dataclasses.replace(plan, transpose=transpose)


def _flag(op: str, name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{op}: {name} must be a bool, got {value!r}")
    return bool(value)


def _implementation(op: str, implementation: Any) -> str | None:
    if implementation is None:
        return None
    table = {name: name for name in IMPLEMENTATIONS}
    return formats.named(f"{op}: implementation", table, implementation)
