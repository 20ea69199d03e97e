"""MXArray: a quantized array, and how it becomes floats again."""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_mx.formats import directions
from jax_mx.formats.checks import (
    axis_of,
    block_of,
    blocks_fit,
    blocks_in,
    has_elements,
    held,
    one_of,
    shown,
    values_fit,
)
from jax_mx.formats.formats import BLOCK, MXFP4_E2M1, SCALE_DTYPE, Format, named
from jax_mx.formats.layouts import (
    ROW_MAJOR,
    ROW_MAJOR_VALUES,
    SCALE_LAYOUTS,
    VALUE_LAYOUTS,
    ScaleLayout,
    ValueLayout,
)
from jax_mx.formats.sharding import gathered, is_explicit, resharded, spec_of
from jax_mx.formats.units import covered
from jax_mx.formats.views import (
    Viewed,
    divided,
    from_view,
    moved_last,
    reshape,
    stored_shape,
    stored_spec,
    view_of,
)
from jax_mx.formats.windows import ROW, TILE, Window, lengths_of, of_kernels
from jax_mx.launch import private
from jax_mx.launch.private import ShardingTypeError
from jax_mx.quantizing import indexing, metadata, qarrays, quantizers, reference
from jax_mx.quantizing.metadata import UNKNOWN, Known
from jax_mx.quantizing.placing import placed, require_kernel
from jax_mx.quantizing.plan import Plan
from jax_mx.quantizing.planning import plan_dequantize


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MXArray:
    """An array of small floats with a scale for each block; a pytree of values and scales.

    Indexing, reshaping and joining work as on an array of JAX, while blocks and tiles stay whole:
    `q[rows]`, `q.reshape`, `q.mT`, `jax_mx.swapaxes`, `jax_mx.concatenate`, `jax_mx.stack`.
    jax.numpy's functions refuse an MXArray. `zeros_like` and its kin take anything with a shape and
    a dtype, and give a bare array. `jax.tree.map(jnp.zeros_like, q)` gives an MXArray that
    dequantizes to NaN, as float8_e8m0fnu has no zero: a template, not an update to add.

    jax.tree.map treats values and scales alike. Use it only on leading axes, on whole rows of
    row-major scales, or on whole shards; else index q. After most other cuts the shapes of values
    and scales do not fit each other, or `padding` shows the cut, and the next function refuses the
    array. Shapes do not show a permutation (a reversal of rows of tiles). Nor do they show a cut
    with the shapes of a shard (every 32nd row of (1024, K) with blocks along rows).

    The constructor does not check leaves, as JAX puts any object there; `MXArray.from_parts` checks
    them. A format or a layout may be a name.

    Attributes:
      values: the elements' codes, of `format.storage`; the logical shape, but with the block axis
        divided by `format.codes_per_byte` (2 for MXFP4). In a tiled layout: (..., row tiles,
        column tiles, bytes of a tile), see `ValueLayout.shape`.
      scales: float8_e8m0fnu. Row-major: the logical shape with the block's axes divided by 32. In a
        tiled layout: (..., row tiles, column tiles, bytes of a tile), see `ScaleLayout.shape`.
      format: the meaning of the codes.
      axis: the axis that blocks run along, negative, so that it survives vmap; -1 if square.
      scale_layout: where the scale of a block lies.
      block: (32,), or (32, 32): square blocks of the last two axes.
      value_layout: where values lie; tiled ones have the block axis last.
      window: the elements that share one amax, and so have equal scales: 32, 128, 256 along the
        block axis, "row" or (128, 128), see `quantize`. Static; `dequantize` does not depend on it.
      padding: the numbers of rows and columns of padding in the last tiles of scales, by the
        original shape of the array. New leading dimensions, indices of these, shards and slices of
        whole tiles keep it. A cut inside a tile changes it, and so is noticed.
      spans: for each axis that windows run along, its length when the array was made; 0 where
        windows divide it. `jax.shard_map` may join parts to a longer array, which then has the
        window 32. Arrays with other spans are other types of pytrees. So a loop in shard_map that
        quantizes its carry along a split axis needs a window that shards hold whole, or 32.

    Raises:
      TypeError: a static field is of the wrong type.
      ValueError: an unknown name, another block, or an axis that the values do not have.
    """

    values: jax.Array
    scales: jax.Array
    format: Format
    axis: int
    scale_layout: ScaleLayout
    block: tuple[int, ...] = (BLOCK,)
    value_layout: ValueLayout = ROW_MAJOR_VALUES
    window: Window = BLOCK
    padding: Known = dataclasses.field(init=False, repr=False)
    spans: Known = dataclasses.field(init=False, repr=False)

    def __post_init__(self):
        """Brings names and axes to what `quantize` gives."""
        for name, field in metadata.FIELDS.items():
            object.__setattr__(self, name, field.read(f"MXArray: {name}", getattr(self, name)))
        if self.axis >= 0:
            ndim = getattr(self.values, "ndim", None)
            if ndim is None:
                raise ValueError(
                    f"MXArray: axis counts from the end, as values have no rank; got {self.axis}"
                )
            axis = axis_of("MXArray", self.axis, ndim - self.value_layout.is_tiled)
            object.__setattr__(self, "axis", axis)
        object.__setattr__(self, "padding", _padding_of(self))
        object.__setattr__(self, "spans", _spans_of(self))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that was quantized."""
        shape = list(self.values.shape)
        if self.value_layout.is_tiled:
            shape[-3:] = self.value_layout.rows_cols(self.values.shape)
        shape[self.axis] *= self.format.codes_per_byte
        return tuple(shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.values.ndim - self.value_layout.is_tiled

    @property
    def size(self) -> int:
        """Number of elements of the array that was quantized."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the values as they are stored: a float8 type, or uint8 below 8 bits."""
        return self.format.storage

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales together."""
        return self.values.size + self.scales.size

    @property
    def mT(self) -> MXArray:
        """The array with the last two axes swapped, as `jax_mx.swapaxes` does it."""
        return self.swapaxes(-1, -2)

    def __len__(self) -> int:
        """Length of the first axis."""
        return self.shape[0]

    def __iter__(self) -> Iterator[MXArray]:
        """The arrays along the first axis, which blocks must not run along."""
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> MXArray:
        """A part of the array, as indexing the original floats and quantizing again would give it.

        Args:
          index: ints, slices, arrays of ints, masks, None and ...; along axes that blocks run
            along, slices from and to multiples of 32 alone.

        Returns:
          The part, in the same layouts. An index of leading axes copies whole tiles. A cut through
          tiles takes scales (a 33rd of the bytes), and values in tiles, out of their tiles and puts
          them into new ones.

        Raises:
          TypeError: an index is of another kind.
          IndexError: it is out of range.
          ValueError: it cuts blocks, or the part cannot lie in such tiles, as it has rank 1.
        """
        op = "MXArray[...]"
        try:
            return indexing.indexed(op, checked(op, "the array", self), index)
        except OverflowError as error:
            raise IndexError(
                f"{op}: of the shape {self.shape} some indices are more than int32 counts; slice "
                "the array, or set jax_enable_x64"
            ) from error
        except ShardingTypeError as error:
            raise self._split(op, error) from error

    def reshape(self, *shape: Any) -> MXArray:
        """The same elements in another shape.

        Args:
          shape: ints, or one tuple of them; one may be -1. The axis that blocks run along, and the
            axes behind it, keep their lengths. In tiled layouts and with square blocks the last two
            axes keep theirs; rows of tiles may be split into whole tiles.

        Raises:
          TypeError: another number of elements, as in jnp.
          ValueError: it would cut blocks or tiles.
        """
        op = "MXArray.reshape"
        new: Any = shape[0] if len(shape) == 1 else shape
        if getattr(new, "ndim", 0) == 1 and jnp.issubdtype(new.dtype, jnp.integer):
            new = tuple(map(int, new))  # an array's numbers
        try:
            return indexing.reshaped(op, checked(op, "the array", self), new)
        except ShardingTypeError as error:
            raise self._split(op, error) from error

    def _split(self, op: str, error: ShardingTypeError) -> ShardingTypeError:
        """The refusal of what would move parts between the devices of an explicit mesh."""
        if str(error).startswith(op):
            return error
        spec = PartitionSpec(*spec_of(self.values))
        return ShardingTypeError(
            f"{op}: on a mesh with explicit axes the values {[*self.values.shape]} are split as "
            f"{spec}, and JAX does not say how the result would be; move the array before, "
            "jax_mx.reshard(q, jax.sharding.PartitionSpec()) say"
        )

    def swapaxes(self, axis1: int, axis2: int) -> MXArray:
        """`jax_mx.swapaxes` of this array: codes move, nothing is quantized again."""
        op = "swapaxes"
        return indexing.swapped(op, checked(op, "the array", self), axis1, axis2, _repacked)

    @classmethod
    def from_parts(
        cls,
        values: jax.typing.ArrayLike,
        scales: jax.typing.ArrayLike,
        format: Format | str,
        *,
        axis: int = -1,
        scale_layout: ScaleLayout | str = ROW_MAJOR,
        block: int | tuple[int, ...] = BLOCK,
        value_layout: ValueLayout | str = ROW_MAJOR_VALUES,
        window: Window = BLOCK,
    ) -> MXArray:
        """An array of codes and scales that others made.

        Args:
          values: of `format.storage`, or uint8 with the same bits; shaped as `MXArray.values`.
          scales: float8_e8m0fnu, or uint8 with the same bits; shaped as `MXArray.scales`. In a
            tiled layout the bytes of all tiles may also lie flat, in one dimension, as cuBLAS and
            torchao keep them.
          format: the meaning of the codes; see `MXArray` for all of these.
          axis: the axis that blocks run along.
          scale_layout: where scales lie.
          block: 32, or (32, 32) if square.
          value_layout: where values lie.
          window: the blocks that have equal scales; the function trusts the caller.

        Raises:
          TypeError: an array has another dtype, or an argument is of the wrong type.
          ValueError: the shapes of scales and values do not fit, or an argument has a value that
            `quantize` refuses.
        """
        op = "from_parts"
        arguments = (format, axis, scale_layout, block, value_layout, window)
        fields = metadata.read(op, dict(zip(metadata.FIELDS, arguments, strict=True)))
        storage = fields["format"].storage
        values = _of_bytes(op, "values", values, storage)
        q = cls(values, _of_bytes(op, "scales", scales, SCALE_DTYPE), **fields)
        axis_of(op, axis, q.ndim)
        layout = q.scale_layout
        if layout.is_tiled and q.ndim >= 2 and q.scales.ndim != q.ndim + 1:
            want = stored_shape(q.shape, (q.axis,), layout)
            if q.scales.shape != (math.prod(want),):
                raise ValueError(
                    f"{op}: scales in {layout.name!r} of an array {q.shape} with blocks along axis "
                    f"{q.axis} have the shape {want}, or lie flat in ({math.prod(want)},), got "
                    f"{q.scales.shape}; if their bytes are in this order already, pass "
                    "scales.reshape(-1), if they lie in rows, scale_layout='row_major' and then "
                    f".with_scales_in({layout.name!r})"
                )
            q = dataclasses.replace(q, scales=q.scales.reshape(want))
        return checked(op, "it", q)

    @classmethod
    def from_qarray(cls, q: Any) -> MXArray:
        """An array of qwix or tokamax, with the same codes: `qwix.quantize(x, "mxfp8", ...)`.

            q = qwix.quantize(w, "mxfp4", channelwise_axes=[1], tiled_axes={0: 32})
            w = jax_mx.MXArray.from_qarray(q)  # blocks run along axis 0

        Args:
          q: a `qwix.QArray` of float8_e4m3fn, float8_e5m2 or float4_e2m1fn, whose scales are powers
            of two, of any float type. A scale covers a multiple of 32 elements along one axis, or
            along each of the last two axes, which gives square blocks. In a traced function a scale
            that is not a power of two becomes NaN.

        Raises:
          TypeError: q is not such an array.
          ValueError: it has a zero point, other tiles, or a scale that is not a power of two.
        """
        return qarrays.from_qarray(cls, q)

    def to_qarray(self, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> Any:
        """The array as a `qwix.QArray` with the same codes, for qwix and tokamax.

        Args:
          dtype: of its scales, which is the type that it dequantizes to: bfloat16 or float32.

        Raises:
          TypeError: dtype is neither.
          ValueError: MXFP6, which JAX has no dtype for.
        """
        return qarrays.to_qarray(checked("to_qarray", "the array", self), dtype)

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
                got = getattr(array, "dtype", type(array).__name__)
                raise TypeError(f"{op}: {name} are {got}, must be {want}")
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
        """`jax_mx.dequantize` of this array: floats of its shape, or with the last axes swapped."""
        return dequantize(self, dtype, transpose=transpose, implementation=implementation)

    def with_values_in(self, value_layout: ValueLayout | str) -> MXArray:
        """The same array with its values in another layout.

        Args:
          value_layout: ROW_MAJOR_VALUES or SHUFFLED_16X16, or its name.

        Returns:
          An `MXArray` that dequantizes to the same floats; bytes are moved, none is changed.

        Raises:
          TypeError: value_layout or a field of the array is of the wrong type.
          ValueError: an unknown name, or a layout that does not fit the array; see `quantize`.
        """
        op = "with_values_in"
        layout = named(f"{op}: value_layout", VALUE_LAYOUTS, value_layout)
        return indexing.with_values(op, checked(op, "the array", self), layout)

    def with_scales_in(self, scale_layout: ScaleLayout | str) -> MXArray:
        """The same array with its scales in another layout; `expand` serves square blocks.

        Args:
          scale_layout: ROW_MAJOR, BLOCKED_128X4 or SHUFFLED_32X8, or its name.

        Returns:
          An `MXArray` that dequantizes to the same floats; zeros that pad tiles are added or
          removed.

        Raises:
          TypeError: scale_layout or a field of the array is of the wrong type.
          ValueError: an unknown name, or a layout that does not fit the array; see `quantize`.
        """
        op = "with_scales_in"
        layout = named(f"{op}: scale_layout", SCALE_LAYOUTS, scale_layout)
        return indexing.with_scales(op, checked(op, "the array", self), layout)

    def expand(self, axis: int = -1, scale_layout: ScaleLayout | str = ROW_MAJOR) -> MXArray:
        """The same array of square blocks as blocks along one axis, which GEMMs take.

        Args:
          axis: -1 or -2.
          scale_layout: of the result.

        Returns:
          An `MXArray` that dequantizes to the same floats. Its elements (..., M, K) are the same,
          and each scale occurs 32 times: (..., M, K / 32) or (..., M / 32, K) if row-major. MXFP4's
          codes are packed along `axis`, anew for -2. Values keep their layout for axis -1, and are
          row-major for -2.

        Raises:
          TypeError: axis or scale_layout is of the wrong type.
          ValueError: blocks are not square, another axis, an unknown layout.
        """
        layout = named("expand: scale_layout", SCALE_LAYOUTS, scale_layout)
        if self.block != (BLOCK, BLOCK):
            raise ValueError(
                f"expand: blocks run along axis {self.axis} as it is; only square ones, of "
                f"quantize(x, block=({BLOCK}, {BLOCK})), expand"
            )
        axis = one_of(f"expand: axis must be -1 or -2, got {shown(axis)}", axis, (-1, -2))
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
            viewed = Viewed.of(view, self.shape, spec, axis)
            scales = viewed.to(scales, divided(viewed.shape, (-1,), BLOCK), result.order)
            stored = stored_shape(self.shape, (axis,), layout), stored_spec(spec, (axis,), layout)
            scales = from_view(result.pack(scales, layout), *stored, result.order_in(layout))
        blocks = {"scale_layout": layout, "value_layout": values_in, "block": (BLOCK,)}
        return dataclasses.replace(self, values=values, scales=scales, axis=axis, **blocks)

    def __repr__(self) -> str:
        """Types and names as arguments take them, not the numbers."""
        leaves = (("values", self.values), ("scales", self.scales))
        texts = {name: _type_of(leaf) for name, leaf in leaves}
        metadata_texts = metadata.described(metadata.fields_of(self))
        for name, value in metadata_texts.items():
            texts[name] = repr(tuple(value) if isinstance(value, list) else value)
        return f"MXArray({', '.join(f'{name}={text}' for name, text in texts.items())})"

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise TypeError(_NO_ARRAY)

    def __array_function__(self, function: Any, types: Any, args: tuple, kwargs: dict) -> Any:
        """Functions of NumPy, of which np.array_equal would take any error for "no"."""
        if function in (np.shape, np.ndim, np.size):
            abstract = np.broadcast_to(np.zeros((), np.uint8), self.shape)
            return function(abstract, *args[1:], **{k: v for k, v in kwargs.items() if k != "a"})
        raise TypeError(f"np.{function.__name__}: {_NO_ARRAY}")

    # Python's own answer would look at the object, not at its numbers.
    def __contains__(self, item: object) -> bool:
        raise TypeError(f"in: {_NO_ARRAY}; ask what .dequantize() holds")

    def __bool__(self) -> bool:
        raise TypeError(f"bool: {_NO_ARRAY}; ask `is None`, or .size")

    def __eq__(self, other: object) -> bool:
        if self is other or not (isinstance(other, numbers.Number) or hasattr(other, "shape")):
            return NotImplemented
        raise TypeError(f"==: {_NO_ARRAY}; compare .values and .scales, or .dequantize() of both")

    __hash__ = object.__hash__  # of the object, as == of one with itself


_NO_ARRAY = "an MXArray is two arrays; take .values and .scales, or .dequantize()"


def _type_of(leaf: Any) -> str:
    """An array as its dtype and shape; JAX puts other things there, too."""
    dtype, shape = getattr(leaf, "dtype", None), getattr(leaf, "shape", None)
    return repr(leaf) if dtype is None or shape is None else f"{dtype}{[*shape]}"


def _of_bytes(op: str, name: str, array: Any, dtype: np.dtype) -> jax.Array:
    """An array of this dtype, of one that has it or the same bits as bytes."""
    got = getattr(array, "dtype", None)
    if got not in (dtype, np.uint8):
        got = type(array).__name__ if got is None else got
        hint = "; MXArray.from_float4 takes these" * (got == jnp.float4_e2m1fn)
        raise TypeError(f"{op}: {name} are {got}, must be {dtype} or its bits as uint8{hint}")
    return jax.lax.bitcast_convert_type(jnp.asarray(array), dtype)


def _repacked(values: jax.Array, format: Format) -> jax.Array:
    """Codes of square blocks, packed along the second-to-last axis instead of the last."""
    view = view_of(directions.SQUARE)
    (square,) = view.results
    shape = (*values.shape[:-1], values.shape[-1] * format.codes_per_byte)
    spec = spec_of(values)
    values = Viewed.of(view, shape, spec, -2).to_values(values, square, format)
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
      q: an `MXArray`.
      dtype: bfloat16, float16 or float32. Beyond its largest finite value the result is infinite.
      transpose: whether the result has the last two axes swapped: (..., K, M) for a q of the shape
        (..., M, K).
      implementation: as for `quantize`.

    Returns:
      An array of q's shape, or with the last two axes swapped. A scale of 255 gives NaN. Every NaN,
      also an element's own, has all bits set but the sign (0x7FFF, float32 0x7FFFFFFF), so that
      every implementation gives the same bytes.

    Raises:
      TypeError: q is not an `MXArray`, its arrays have other dtypes than its format, or dtype is
        not one of the three.
      ValueError: the scales' shape does not belong to the values' shape, or there are no two axes
        to swap.
      NotImplementedError: as for `quantize`.
      ShardingTypeError: as for `quantize`.
    """
    q = checked("dequantize", "q", q)
    plan = plan_dequantize(q, dtype, transpose, implementation)
    require_kernel(plan)
    if q.value_layout.is_tiled:
        q = q.with_values_in(ROW_MAJOR_VALUES)
    return dequantized(q, plan=plan, transpose=bool(transpose))


def floats_of(
    q: MXArray, dtype: jax.typing.DTypeLike = jnp.bfloat16, *, transpose: bool = False
) -> jax.Array:
    """`dequantize` of an array that was checked, with values in rows."""
    plan = plan_dequantize(q, dtype, transpose, None)
    return dequantized(q, plan=plan, transpose=transpose)


@partial(jax.jit, static_argnames=("plan", "transpose"))
def dequantized(q: MXArray, *, plan: Plan, transpose: bool) -> jax.Array:
    """`dequantize` of an array that the plan fits, with values in rows."""
    values, scales = placed(q.values, q.shape, plan), q.scales
    shape, spec = q.shape, spec_of(values)
    if is_explicit(jax.typeof(values).sharding.mesh):
        scale_spec = stored_spec(spec, plan.axes, plan.scale_layout)
        scales = resharded(scales, scale_spec, jax.typeof(values).sharding.mesh)
    if plan.transpose:
        shape, spec = (moved_last(dims, -2) for dims in (shape, spec))
    viewed = Viewed.of(plan.view, shape, spec, plan.first_axis)
    (result,) = plan.view.results
    views = viewed.to_values(values, result, plan.format), viewed.to_scales(scales, result)
    y = viewed.from_floats(quantizers.dequantize(*views, plan.of_view))
    return y if plan.transpose == transpose else y.mT


def checked(op: str, name: str, q: Any) -> MXArray:
    """Checks a caller's array and returns it with canonical fields: no names, a negative axis.

    Raises:
      TypeError, ValueError: it is no MXArray, or its fields do not fit; the message says why.
    """
    q = held(q)
    if not isinstance(q, MXArray):
        got = type(q).__name__
        raise TypeError(f"{op}: {name} must be an MXArray, as quantize returns, got {got}")
    format, layout, values_in, block = q.format, q.scale_layout, q.value_layout, q.block
    for field, want in (("values", format.storage), ("scales", SCALE_DTYPE)):
        array = getattr(q, field)
        has_elements(op, f"{name}.{field}", array)
        if not hasattr(array, "dtype") or array.dtype != want:
            got = getattr(array, "dtype", type(array).__name__)
            raise TypeError(f"{op}: {name}.{field} is {got}, {format!r} has {want}")
    tile = values_in.tile
    if values_in.is_tiled and (q.values.ndim < 3 or q.values.shape[-1] != tile[0] * tile[1]):
        raise ValueError(
            f"{op}: values in {values_in.name!r} have the shape (..., row tiles, column tiles, "
            f"{tile[0] * tile[1]}), got {q.values.shape}"
        )
    axis = axis_of(op, q.axis, q.ndim)
    blocks_fit(op, block, axis, layout, q.ndim)
    if q.window != TILE:  # which expanded arrays have, too
        blocks_in(op, q.window, block)
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
    now = _padding_of(q)
    if now != q.padding:
        raise ValueError(
            f"{op}: {name} has been cut inside of a tile: of its last tiles of scales in "
            f"{layout.name!r} {q.padding.numbers} rows and columns were padding when it was made, "
            f"now {now.numbers}; index the MXArray, not its leaves, or cut at whole tiles"
        )
    return q


def _padding_of(q: MXArray, known: Known = UNKNOWN) -> Known:
    """The padding that belongs to the shape of an array's values.

    Args:
      q: the array; its leaves may be other objects than arrays, as JAX makes them.
      known: the padding of such an array.
    """
    layout, shape = q.scale_layout, getattr(q.values, "shape", None)
    if not layout.is_tiled:
        return UNKNOWN
    if not isinstance(shape, tuple) or len(shape) - q.value_layout.is_tiled < max(2, -q.axis):
        return known
    if not all(isinstance(n, int) for n in shape):
        return UNKNOWN
    *_, rows, length = moved_last(q.shape, q.axis)
    return Known((-rows % layout.pad[0], -(length // BLOCK) % layout.pad[1]), "padding")


def _spanned(q: MXArray) -> tuple[int, ...] | None:
    """The lengths of the axes that windows span; None: leaves do not say, or windows are 32."""
    shape = getattr(q.values, "shape", None)
    if q.window == BLOCK or not isinstance(shape, tuple):
        return None
    axes = indexing.window_axes(q)
    if len(shape) - q.value_layout.is_tiled < -min(axes):
        return None
    lengths = tuple(q.shape[axis] for axis in axes)
    return lengths if all(isinstance(n, int) for n in lengths) else None


def _whole(q: MXArray) -> int:
    """How many elements a whole window spans along each of its axes; 0 of "row"."""
    return 0 if of_kernels(q.window) == ROW else lengths_of(q.window)[1]


def _spans_of(q: MXArray) -> Known:
    """See `MXArray.spans`."""
    if (lengths := _spanned(q)) is None:
        return UNKNOWN
    length = _whole(q)
    return Known(tuple(0 if length and n % length == 0 else n for n in lengths), "spans")


def _window_here(q: MXArray) -> Window:
    """The window of an array whose leaves may be parts of those it was made with, or joined.

    A part keeps the equal scales of a row, and of windows that its edges do not cut. A longer array
    keeps them where whole windows follow one another.
    """
    lengths, whole_span = _spanned(q), _whole(q)
    if lengths is None or q.spans.numbers is None:
        return q.window
    for here, before in zip(lengths, q.spans.numbers, strict=True):
        whole = not whole_span or here % whole_span == 0 or whole_span % here == 0
        if here != before and not (whole and (before == 0 or here < before)):
            return BLOCK
    return q.window


# ---- as a pytree ---
FROZEN = (
    "an MXArray is among what is differentiated, and codes have no derivative; differentiate by "
    "the other leaves: trained, frozen = jax_mx.partition(params), and jax_mx.combine(trained, "
    "frozen) in the loss"
)
OPTIMIZED = (
    "optax goes over an MXArray, and codes and scales are nothing that an optimizer may change; "
    "hand it the others: trained, frozen = jax_mx.partition(params), and optimizer.init(trained)"
)
Aux = tuple  # the static fields in the order of metadata.FIELDS, then what is known of the shape
STATIC = (*metadata.FIELDS, "padding", "spans")


def _flatten(q: MXArray) -> tuple[tuple[Any, Any], Aux]:
    return (q.values, q.scales), tuple(map(vars(q).__getitem__, STATIC))


def _flatten_with_keys(q: MXArray) -> tuple[Any, Aux]:
    children, aux = _flatten(q)
    fields = aux[: len(metadata.FIELDS)]
    keys = map(jax.tree_util.GetAttrKey, ("values", metadata.scales_name(tuple(fields))))
    return tuple(zip(keys, children, strict=True)), aux


def _unflatten(aux: Aux, children: Any) -> MXArray:
    """Makes the array of any children but those that a derivative is taken by, or that optax makes.

    JAX would give such a one zeros where nothing reads it, and E8M0's zero is NaN: an optimizer
    would make NaN of scales. So the error comes here, before any function of the array runs. Optax
    makes zeros of all leaves alike, for its moments.
    """
    if any(isinstance(child, private.DIFFERENTIATED) for child in children):
        raise TypeError(FROZEN)
    if _caller_of_map().startswith("optax."):
        raise TypeError(OPTIMIZED)
    return unflattened(aux, children)


def _caller_of_map() -> str:
    """The module that maps over a tree, while JAX makes the tree's nodes anew."""
    frame, name = sys._getframe(2), "jax._src.tree"
    while frame is not None and name.startswith("jax._src.tree"):
        name, frame = frame.f_globals.get("__name__", ""), frame.f_back
    return name


def unflattened(aux: Aux, children: Any) -> MXArray:
    """The array of any children: JAX puts tracers, specs and mere objects there."""
    q = object.__new__(MXArray)
    values, scales = children
    vars(q).update(zip(STATIC, aux, strict=True), values=values, scales=scales)
    if q.scale_layout.is_tiled:
        here = _padding_of(q, q.padding)
        if q.padding.numbers is None or here.numbers is None:
            vars(q)["padding"] = here
    if q.window != BLOCK:
        vars(q)["window"] = _window_here(q)
        if q.spans.numbers is None or q.window == BLOCK:
            vars(q)["spans"] = _spans_of(q)
    return q


jax.tree_util.register_pytree_with_keys(MXArray, _flatten_with_keys, _unflatten, _flatten)


# So that exported programs may take and return MXArrays. Formats and layouts go by name.
def serialized(aux: Aux) -> bytes:
    """The static part as text."""
    *fields, padding, spans = aux
    known = {"padding": padding.numbers, "spans": spans.numbers}
    return json.dumps(metadata.described(tuple(fields)) | known).encode()


def deserialized(text: bytes) -> Aux:
    """The inverse of `serialized`."""
    header = json.loads(text)
    known = {name: header.pop(name, None) for name in ("padding", "spans")}
    fields = metadata.read("jax.export.deserialize", header)
    return *fields.values(), *(Known(n and tuple(n), name) for name, n in known.items())


jax.export.register_pytree_node_serialization(
    MXArray,
    serialized_name="jax_mx.MXArray",
    serialize_auxdata=serialized,
    deserialize_auxdata=deserialized,
)
