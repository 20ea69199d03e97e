"""MXArray: a quantized array, and how it becomes floats again."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx import reference
from jax_mx.arrays import tiles
from jax_mx.arrays.checks import (
    axis_of,
    block_of,
    blocks_fit,
    blocks_in,
    values_fit,
    window_of,
)
from jax_mx.arrays.sharding import gathered, is_explicit, reshape, resharded, spec_of
from jax_mx.arrays.units import covered
from jax_mx.arrays.views import (
    divided,
    from_view,
    moved_last,
    stored_shape,
    stored_spec,
    to_view,
    view_of,
)
from jax_mx.facts import directions
from jax_mx.facts.formats import BLOCK, FORMATS, MXFP4_E2M1, SCALE_DTYPE, Format, named
from jax_mx.facts.layouts import (
    ROW_MAJOR,
    ROW_MAJOR_VALUES,
    SCALE_LAYOUTS,
    VALUE_LAYOUTS,
    ScaleLayout,
    ValueLayout,
)
from jax_mx.facts.windows import TILE, Window
from jax_mx.lowering import primitive
from jax_mx.lowering.plan import Plan
from jax_mx.ops.placing import placed, require_kernel
from jax_mx.ops.planning import plan_dequantize


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scales"),
    meta_fields=("format", "axis", "scale_layout", "block", "value_layout", "window"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class MXArray:
    """Blocks of small floats that share a scale each. A pytree with the leaves values and scales.

    Attributes:
      values: the elements' codes, of `format.storage`; the logical shape, but with the block axis
        divided by `format.codes_per_byte` (2 for MXFP4). In a tiled layout: (..., row tiles,
        column tiles, bytes of a tile), see `ValueLayout.shape`.
      scales: float8_e8m0fnu. Row-major: the logical shape with the block's axes divided by 32. In a
        tiled layout: (..., row tiles, column tiles, bytes of a tile), see `ScaleLayout.shape`.
      format: what the codes mean.
      axis: the axis that blocks run along, negative, so that it survives vmap; -1 if square.
      scale_layout: where the scale of a block lies.
      block: (32,), or (32, 32): square blocks of the last two axes.
      value_layout: where values lie; tiled ones have the block axis last.
      window: which elements share one amax, and so have equal scales: 32, 128, 256 along the block
        axis, "row" or (128, 128), see `quantize`. Static; `dequantize` does not depend on it.
    """

    values: jax.Array
    scales: jax.Array
    format: Format
    axis: int
    scale_layout: ScaleLayout
    block: tuple[int, ...] = (BLOCK,)
    value_layout: ValueLayout = ROW_MAJOR_VALUES
    window: Window = BLOCK

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array that was quantized."""
        shape = list(self.values.shape)
        if self.value_layout.is_tiled:
            shape[-3:] = self.value_layout.rows_cols(self.values.shape)
        shape[self.axis] *= self.format.codes_per_byte
        return tuple(shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """Of the values as they are stored: a float8 type, or uint8 for formats below 8 bits."""
        return self.format.storage

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales together."""
        return self.values.size + self.scales.size

    def as_float4(self) -> jax.Array:
        """Values of MXFP4 as elements, for `jax.lax.scaled_dot`: a bitcast of the same bytes.

        Neither this nor `from_float4` exports with symbolic shapes: JAX's bitcast does not.

        Returns:
          float4_e2m1fn of the array's shape.

        Raises:
          ValueError: another format, or codes that are not packed along the last axis.
        """
        if self.format != MXFP4_E2M1:
            raise ValueError(f"as_float4: elements are {self.format!r}, only MXFP4_E2M1 is float4")
        if self.axis != -1:
            raise ValueError(
                f"as_float4: codes are packed along axis {self.axis}, float4 along the last; "
                "use quantize(x, axis=..., transpose=True)"
            )
        if self.value_layout.is_tiled:
            raise ValueError(
                f"as_float4: values lie in {self.value_layout.name!r}, float4 in rows; unpack them "
                "with MXArray.with_values_in('row_major')"
            )
        pairs = jax.lax.bitcast_convert_type(self.values, jnp.float4_e2m1fn)  # (..., K / 2, 2)
        return reshape(pairs, self.shape, spec_of(self.values))

    @classmethod
    def from_float4(
        cls,
        values: jax.Array,
        scales: jax.Array,
        *,
        scale_layout: ScaleLayout | str = ROW_MAJOR,
        block: int | tuple[int, ...] = BLOCK,
    ) -> MXArray:
        """The inverse of `as_float4`, a bitcast too.

        Args:
          values: float4_e2m1fn (..., K); blocks run along the last axis.
          scales: float8_e8m0fnu, as `MXArray.scales` are.
          scale_layout: where they lie.
          block: 32, or (32, 32) if square.

        Raises:
          TypeError: another dtype, or an argument is of the wrong type.
          ValueError: a last axis that 32 does not divide, scales of another shape, or blocks whose
            scales cannot lie so; see `quantize`.
        """
        op = "from_float4"
        layout = named(f"{op}: scale_layout", SCALE_LAYOUTS, scale_layout)
        for name, array, want in (
            ("values", values, np.dtype(jnp.float4_e2m1fn)),
            ("scales", scales, SCALE_DTYPE),
        ):
            if not hasattr(array, "dtype") or array.dtype != want:
                found = getattr(array, "dtype", type(array).__name__)
                raise TypeError(f"{op}: {name} are {found}, must be {want}")
        values, scales, spans = jnp.asarray(values), jnp.asarray(scales), block_of(op, block)
        lengths = values.shape[-len(spans) :]
        if len(lengths) < len(spans) or any(length % BLOCK for length in lengths):
            raise ValueError(
                f"{op}: values have the shape {values.shape}, {BLOCK} must divide the last "
                f"{len(spans)} of it"
            )
        pairs = (*divided(values.shape, (-1,), 2), 2)
        codes = jax.lax.bitcast_convert_type(reshape(values, pairs, spec_of(values)), jnp.uint8)
        return checked(op, "it", cls(codes, scales, MXFP4_E2M1, -1, layout, spans))

    def dequantize(
        self,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        *,
        transpose: bool = False,
        implementation: str | None = None,
    ) -> jax.Array:
        """See `jax_mx.dequantize`."""
        return dequantize(self, dtype, transpose=transpose, implementation=implementation)

    def with_values_in(self, value_layout: ValueLayout | str) -> MXArray:
        """The same array with its values in another layout.

        Raises:
          TypeError: value_layout or a field of the array is of the wrong type.
          ValueError: an unknown name, or a layout that does not fit the array; see `quantize`.
        """
        op = "with_values_in"
        layout = named(f"{op}: value_layout", VALUE_LAYOUTS, value_layout)
        q = checked(op, "the array", self)
        if layout == q.value_layout:
            return q
        values = q.values
        if q.value_layout.is_tiled:
            values = tiles.unpack(q.value_layout, values, *q.value_layout.rows_cols(values.shape))
        values_fit(op, layout, q.axis, q.shape, q.format)
        return dataclasses.replace(q, values=tiles.pack(layout, values), value_layout=layout)

    def expand(self, axis: int = -1, scale_layout: ScaleLayout | str = ROW_MAJOR) -> MXArray:
        """Of square blocks: the same array in blocks along one axis, as GEMMs take it.

        Args:
          axis: -1 or -2.
          scale_layout: of the result.

        Returns:
          An `MXArray` that dequantizes to the same floats: of values (..., M, K) the same values,
          and each scale 32 times, row-major (..., M, K / 32) or (..., M / 32, K). Codes of MXFP4
          are packed along `axis`. Values stay in their layout along -1, and are row-major along -2.

        Raises:
          TypeError: scale_layout is of the wrong type.
          ValueError: blocks are not square, another axis, an unknown layout.
        """
        layout = named("expand: scale_layout", SCALE_LAYOUTS, scale_layout)
        if self.block != (BLOCK, BLOCK):
            raise ValueError(
                f"expand: blocks run along axis {self.axis} as it is; only square ones, of "
                f"quantize(x, block=({BLOCK}, {BLOCK})), expand"
            )
        if not isinstance(axis, int) or axis not in (-1, -2):
            raise ValueError(f"expand: axis must be -1 or -2, got {axis!r}")
        values_in = self.value_layout if axis == -1 else ROW_MAJOR_VALUES
        values, scales = self.with_values_in(values_in).values, self.scales
        if axis == -2 and self.format.codes_per_byte > 1:
            values = _repacked(values, self.format)
        view = view_of(directions.LAST if axis == -1 else directions.SECOND)
        view = view.laid_out(layout, (ROW_MAJOR_VALUES,), (covered(layout),))
        if layout.is_tiled:
            scales = gathered(scales, self.shape, view.unit_lengths)
        other = scales.ndim - 3 - axis  # the axis along which a scale stands for 32 blocks
        shape, spec = [*scales.shape], spec_of(scales)
        scales = jnp.expand_dims(scales, other + 1)
        scales = jnp.broadcast_to(scales, (*shape[: other + 1], BLOCK, *shape[other + 1 :]))
        shape[other] *= BLOCK
        scales = reshape(scales, tuple(shape), spec)
        if layout.is_tiled:
            (result,) = view.results
            viewed, view_spec = view.view(self.shape, spec, axis)
            scales = to_view(scales, divided(viewed, (-1,), BLOCK), view_spec, result.order)
            stored = stored_shape(self.shape, (axis,), layout), stored_spec(spec, (axis,), layout)
            scales = from_view(result.pack(scales, layout), *stored, result.order_in(layout))
        blocks = {"scale_layout": layout, "value_layout": values_in, "block": (BLOCK,)}
        return dataclasses.replace(self, values=values, scales=scales, axis=axis, **blocks)

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise TypeError("an MXArray is two arrays; take .values and .scales, or .dequantize()")


def _repacked(values: jax.Array, format: Format) -> jax.Array:
    """Codes of square blocks, packed along the second-to-last axis instead of the last."""
    view = view_of(directions.SQUARE)
    (square,) = view.results
    shape = (*values.shape[:-1], values.shape[-1] * format.codes_per_byte)
    spec = spec_of(values)
    viewed, view_spec = view.view(shape, spec, -2)
    values = to_view(values, square.values_shape(viewed, format), view_spec, square.order)
    codes = reference.unpack(values.astype(jnp.uint32), format)  # (..., 32 of M, 32 of K)
    values = reference.pack(jnp.swapaxes(codes, -1, -2), format)
    return from_view(values, divided(shape, (-2,), format.codes_per_byte), spec, (0, 3, 1, 2))


def dequantize(
    q: MXArray,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    *,
    transpose: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """element * scale, in float32, rounded once to `dtype`.

    Args:
      q: what `quantize` returned.
      dtype: bfloat16, float16 or float32. Beyond its largest finite value the result is infinite.
      transpose: whether the result has the last two axes swapped: (..., K, M) for a q of the shape
        (..., M, K).
      implementation: as for `quantize`.

    Returns:
      An array of q's shape, or with the last two axes swapped. A scale of 255 gives NaN. Every NaN,
      also an element's own, has all bits set but the sign (0x7FFF, float32 0x7FFFFFFF), so that
      every implementation gives the same bytes.

    Raises:
      TypeError: q is no `MXArray`, its arrays have other dtypes than its format, or dtype is none
        of the three.
      ValueError: the scales' shape does not belong to the values' shape, or there are no two axes
        to swap.
      NotImplementedError: as for `quantize`.
      ShardingTypeError: as for `quantize`.
    """
    q = checked("dequantize", "q", q)
    plan = plan_dequantize(q, dtype, transpose, implementation)
    require_kernel(plan)
    return _dequantize(q, plan=plan, transpose=bool(transpose))


@partial(jax.jit, static_argnames=("plan", "transpose"))
def _dequantize(q: MXArray, *, plan: Plan, transpose: bool) -> jax.Array:
    """`dequantize` of an array that the plan fits."""
    if q.value_layout.is_tiled:
        q = q.with_values_in(ROW_MAJOR_VALUES)
    if plan.axis < -2 and plan.scale_layout.is_tiled:  # units are of the last two axes
        values = jnp.moveaxis(q.values, plan.axis, -2)
        q = dataclasses.replace(q, values=values, axis=-2)
        y = _bound(q, dataclasses.replace(plan, axis=-2))
        y = jnp.moveaxis(y, -2, plan.axis)
    else:
        y = _bound(q, plan)
    return y if plan.transpose == transpose else jnp.swapaxes(y, -1, -2)


def _bound(q: MXArray, plan: Plan) -> jax.Array:
    """Binds the primitive; q as the plan has it."""
    view, layout = plan.view, plan.scale_layout
    (result,) = view.results
    values, scales = placed(q.values, q.shape, plan), q.scales
    shape, spec = q.shape, spec_of(values)
    if is_explicit(jax.typeof(values).sharding.mesh):
        beside = stored_spec(spec, plan.axes, layout)
        scales = resharded(scales, beside, jax.typeof(values).sharding.mesh)
    if plan.transpose:
        shape, spec = (moved_last(dims, -2) for dims in (shape, spec))
    viewed, view_spec = view.view(shape, spec, plan.first_axis)
    stored = result.values_shape(viewed, plan.format)
    values = to_view(values, stored, view_spec, result.order)
    scales = to_view(scales, result.scales_shape(viewed), view_spec, result.order_in(layout))
    return from_view(primitive.dequantize(values, scales, plan), shape, spec, view.operand)


def checked(op: str, name: str, q: Any) -> MXArray:
    """What a caller calls an array, with fields as `quantize` has them: no names, axis negative.

    Raises:
      TypeError, ValueError: it is none; says why.
    """
    if not isinstance(q, MXArray):
        found = type(q).__name__
        raise TypeError(f"{op}: {name} must be an MXArray, as quantize returns, got {found}")
    format = named(f"{op}: {name}.format", FORMATS, q.format)
    layout = named(f"{op}: {name}.scale_layout", SCALE_LAYOUTS, q.scale_layout)
    values_in = named(f"{op}: {name}.value_layout", VALUE_LAYOUTS, q.value_layout)
    for field, want in (("values", format.storage), ("scales", SCALE_DTYPE)):
        array = getattr(q, field)
        if not hasattr(array, "dtype") or array.dtype != want:
            found = getattr(array, "dtype", type(array).__name__)
            raise TypeError(f"{op}: {name}.{field} is {found}, {format!r} has {want}")
    tile = values_in.tile
    if values_in.is_tiled and (q.values.ndim < 3 or q.values.shape[-1] != tile[0] * tile[1]):
        raise ValueError(
            f"{op}: values in {values_in.name!r} have the shape (..., row tiles, column tiles, "
            f"{tile[0] * tile[1]}), got {q.values.shape}"
        )
    ndim = q.values.ndim - values_in.is_tiled
    axis, block = axis_of(op, q.axis, ndim), block_of(op, q.block)
    blocks_fit(op, block, axis, layout, ndim)
    window = window_of(op, q.window)
    if window != TILE:  # which expanded arrays have, too
        blocks_in(op, window, block)
    q = MXArray(q.values, q.scales, format, axis, layout, block, values_in, window)
    shape = q.shape
    if axis != -1:
        values_fit(op, values_in, axis, shape, format)  # it does not
    axes = (-2, -1) if len(block) == 2 else (axis,)
    scales = stored_shape(shape, axes, layout)
    if any(shape[axis] % BLOCK for axis in axes) or q.scales.shape != scales:
        along = "in square blocks" if len(block) == 2 else f"along axis {axis}"
        raise ValueError(
            f"{op}: values of the shape {q.values.shape} in {format!r} {along} have scales of the "
            f"shape {scales}, got {q.scales.shape}; if a vmap put its axis behind the block axis, "
            "use out_axes=0"
        )
    return q


# So that exported programs may take and return MXArrays. Formats and layouts go by name.
Aux = tuple[Format, int, ScaleLayout, tuple[int, ...], ValueLayout, Window]


def _serialize(aux: Aux) -> bytes:
    format, axis, layout, block, values, window = aux
    fields = [format.name, axis, layout.name, values.name, *block]
    return json.dumps(fields if window == BLOCK else [*fields, {"window": window}]).encode()


def _deserialize(text: bytes) -> Aux:
    format, axis, layout, *rest = json.loads(text)
    # The first programs had no block, the next no layout of values, then no window.
    window = rest.pop()["window"] if rest and isinstance(rest[-1], dict) else BLOCK
    values = rest.pop(0) if rest and isinstance(rest[0], str) else "row_major"
    block = tuple(rest) or (BLOCK,)
    window = tuple(window) if isinstance(window, list) else window
    return FORMATS[format], axis, SCALE_LAYOUTS[layout], block, VALUE_LAYOUTS[values], window


jax.export.register_pytree_node_serialization(
    MXArray,
    serialized_name="jax_mx.MXArray",
    serialize_auxdata=_serialize,
    deserialize_auxdata=_deserialize,
)
