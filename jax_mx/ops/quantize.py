"""`quantize` and `quantize_both`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from jax_mx import reference
from jax_mx.arrays.checks import shown
from jax_mx.arrays.sharding import gathered, is_explicit, spec_of
from jax_mx.arrays.views import (
    divided,
    from_view,
    moved_last,
    stored_shape,
    stored_spec,
    to_view,
)
from jax_mx.facts.formats import BLOCK, MXFP8_E4M3, RCEIL, Format, Scaling
from jax_mx.facts.layouts import ROW_MAJOR, ROW_MAJOR_VALUES, ScaleLayout, ValueLayout
from jax_mx.facts.windows import Window
from jax_mx.lowering import primitive, store
from jax_mx.lowering.plan import Plan
from jax_mx.ops.activations import Gated, made, weights_of
from jax_mx.ops.inputs import floats, rows_of
from jax_mx.ops.mxarray import MXArray
from jax_mx.ops.placing import require_kernel, require_whole_blocks
from jax_mx.ops.planning import Options, planned
from jax_mx.ops.preprocessing import (
    Data,
    Hadamard,
    Stochastic,
    block_data_of,
    data_of,
    pairs,
    preprocessing_of,
)

# For jax.export.export(..., disabled_checks=DISABLE_EXPORT_CHECKS): an exported program carries
# its kernels; jax_mx must be imported where it runs.
DISABLE_EXPORT_CHECKS = [jax.export.DisabledSafetyCheck.custom_call(store.TARGET)]

# Values and scales of all that is quantized go by this name in `jax.checkpoint`, so that a policy
# like jax.checkpoint_policies.save_only_these_names(CHECKPOINT_NAME) keeps them, and the backward
# pass quantizes nothing a second time.
CHECKPOINT_NAME = "jax_mx.quantized"


def quantize(
    x: jax.typing.ArrayLike,
    format: Format | str = MXFP8_E4M3,
    *,
    axis: int = -1,
    scaling: Scaling | str = RCEIL,
    scale_layout: ScaleLayout | str = ROW_MAJOR,
    transpose: bool = False,
    block: int | tuple[int, int] = BLOCK,
    zero_scale: int = 0,
    value_layout: ValueLayout | str = ROW_MAJOR_VALUES,
    rounding: Stochastic | None = None,
    hadamard: Hadamard | None = None,
    window: Window = BLOCK,
    rows: jax.typing.ArrayLike | None = None,
    activation: Gated | None = None,
    implementation: str | None = None,
) -> MXArray:
    """Quantizes blocks of 32 elements to a small float format with E8M0 scales.

    A block's scale is a power of two that follows from its largest magnitude by the rule
    `scaling`; elements are divided by it, rounded to nearest even and saturated (OCP MX v1.0). A
    block that holds a NaN or an infinity becomes NaN as a whole. No float32 subnormal is flushed.
    Every implementation gives the same bytes.

    Args:
      x: bfloat16, float16 or float32; any rank from 1 on, also of size 0.
      format: a `Format` or its name: mxfp8_e4m3, mxfp8_e5m2, mxfp6_e3m2, mxfp6_e2m3, mxfp4_e2m1.
      axis: the axis that blocks run along; 32 divides its length.
      scaling: a `Scaling` or its name: floor, ceil, even, rceil.
      scale_layout: a `ScaleLayout` or its name: row_major, blocked_128x4, shuffled_32x8. A tiled
        layout takes the last two axes as a matrix (`axis` and the last other one, if `axis` is not
        one of them); the leading ones number slabs. NVIDIA's kernels have shuffled_32x8 in MXFP4.
      transpose: whether the result has the block axis last, as the GEMM of the transposed operand
        wants it: values (..., K, M) and scales (..., K, M / 32) for an x (..., M, K), axis -2.
        Of square blocks, the last two axes are swapped: scales (..., K / 32, M / 32).
      block: 32, along `axis`; or (32, 32), square tiles of the last two axes of x (..., M, K), 32
        divides both. Square blocks share one scale each, (..., M / 32, K / 32), row-major, so that
        the transposed array is the array transposed: one result serves both directions of a weight.
        `MXArray.expand` makes either direction's ordinary blocks of it, for a GEMM.
      zero_scale: the scale's byte of a block of zeros: 0 (2^-127), or 127 (1.0) as in ROCm
        TransformerEngine. With 127, MXFP8 is served by "xla" alone.
      value_layout: a `ValueLayout` or its name: row_major, or shuffled_16x16 (aiter's GEMMs), which
        wants the block axis last in the result, and whole tiles of 16 rows and 32 bytes. AMD's
        kernels write it, and NVIDIA's in MXFP4 beside scales in shuffled_32x8; after others, and
        along rows, XLA moves the bytes. Like a tiled scale layout, it takes the last two axes as a
        matrix.
      rounding: None, to nearest even; or a `Stochastic`. Kernels have it in MXFP4, by itself or
        with a transform of 16, along the last axis, and from bfloat16 in every form but square
        blocks; else XLA transposes what they read, as `is_supported` says.
      hadamard: None, or a `Hadamard`: what is quantized is the transform along `axis`, whose length
        the size divides; not of square blocks. Kernels have all sizes in MXFP4, in the
        forms that they have rounding in; but XLA transposes nothing for 64, and moves an axis
        before the last two, as it does for tiles.
      window: how many consecutive elements along `axis` share one amax, and so have equal scales,
        one for each 32 of them as ever: 32; 128 or 256, of which the last of the axis may be
        shorter; or "row": all of the axis. Inside `shard_map`, of a shard's. A NaN or an infinity
        makes all of its window NaN. Or (128, 128), for weights: tiles of the last two axes share
        one, and blocks are square (see `block`), so that one result serves both directions. FP8
        tensor cores multiply the codes of a window before its scale is applied. Kernels have
        windows without rounding or hadamard.
      rows: (R,) int32, for an x (T, K): what is quantized is not x but the array (R, K) of its
        rows with these numbers, zeros for each number that is not one of 0 to T - 1, say -1. From
        bfloat16, kernels read those rows of x themselves, with windows too; else, beside an
        activation, and where XLA splits the program among devices outside of `shard_map`, XLA
        gathers them before.
      activation: a `Gated`, for an x (..., 2 K) of gates and ups: what is quantized is `gated` of
        it, (..., K); of its rows, and those of `up`, where there are `rows`. From bfloat16
        (T, 2 K), all gates, then all ups, kernels compute "swiglu" in MXFP8 and MXFP4,
        along the last axis, transposed along the one before, and both; else XLA computes it before.
      implementation: "cutedsl" (NVIDIA kernels), "flydsl" (AMD kernels), "xla" (plain XLA, runs
        everywhere), or None: the kernel where there is one, else "xla".

    Returns:
      An `MXArray` of x's shape; with transpose, of the shape with `axis` moved last.

    Raises:
      TypeError: x has another dtype, or an argument is of the wrong type.
      ValueError: axis out of range, a length that 32 does not divide, an unknown name.
      NotImplementedError: the named implementation has no kernel for the call; where it has one,
        but not for the platform or chip, this is raised when the computation is lowered, because
        only then these are known. Also under differentiation.
      ShardingTypeError: on a mesh with explicit axes, a shard would split a block.
    """
    x = floats("quantize", x)
    own = preprocessing_of("quantize", rounding, hadamard, window)
    x, like, source, other = made_of("quantize", x, rows, activation)
    asked = Options(
        (format,),
        axis,
        scaling,
        scale_layout,
        implementation,
        transpose,
        block,
        zero_scale,
        (value_layout,),
        (own,),
        source,
    )
    plan = planned("quantize", like, asked)
    require_kernel(plan)
    (q,) = quantized(as_planned(x, plan), (data_of(rounding, hadamard),), other, plan=plan)
    return q


def quantize_both(
    x: jax.typing.ArrayLike,
    format: Format | str = MXFP8_E4M3,
    *,
    formats: tuple[Format | str, Format | str] | None = None,
    scaling: Scaling | str = RCEIL,
    scale_layout: ScaleLayout | str = ROW_MAJOR,
    transpose: tuple[bool, bool] = (False, True),
    zero_scale: int = 0,
    value_layouts: tuple[ValueLayout | str, ValueLayout | str] = ("row_major", "row_major"),
    rounding: Stochastic | tuple[Stochastic | None, Stochastic | None] | None = None,
    hadamard: Hadamard | tuple[Hadamard | None, Hadamard | None] | None = None,
    window: Window = BLOCK,
    rows: jax.typing.ArrayLike | None = None,
    activation: Gated | None = None,
    implementation: str | None = None,
) -> tuple[MXArray, MXArray]:
    """Quantizes along the last axis and along the one before it, from one read of x.

    What training wants of each operand: one direction for the forward product, the other for the
    backward one. The results are those of two calls of `quantize`, byte for byte.

    Args:
      x: (..., M, K), 32 divides both; otherwise as for `quantize`.
      format: of both results.
      formats: of each, instead (say e4m3 forward, e5m2 backward).
      scaling: see `quantize`; so are scale_layout and implementation.
      scale_layout: of both.
      transpose: per result; (False, True) gives the second one as (..., K, M), see `quantize`.
      zero_scale: see `quantize`.
      value_layouts: of each, see `quantize`.
      rounding: see `quantize`; a pair, for each, or one for both, whose key is split in two:
        the results are those of `quantize` with the keys `jax.random.split(key)`.
      hadamard: see `quantize`; a pair, for each, or one for both, each along its own axis.
      window: of both, each along its own axis: 32, 128, 256 or "row", see `quantize`.
      rows: see `quantize`; 32 divides how many there are.
      activation: see `quantize`.
      implementation: or None.

    Returns:
      `quantize(x, axis=-1)` and `quantize(x, axis=-2, transpose=transpose[1])`.

    Raises:
      TypeError, ValueError, NotImplementedError: as for `quantize`.
    """
    x = floats("quantize_both", x)
    each = pairs("quantize_both", rounding, hadamard)
    x, like, source, other = made_of("quantize_both", x, rows, activation)
    asked = Options(
        formats=(format, format) if formats is None else formats,
        scaling=scaling,
        scale_layout=scale_layout,
        implementation=implementation,
        transpose=transpose,
        zero_scale=zero_scale,
        value_layouts=value_layouts,
        preprocessing=tuple(preprocessing_of("quantize_both", *two, window) for two in each),
        source=source,
    )
    plan = planned("quantize_both", like, asked)
    require_kernel(plan)
    data = tuple(data_of(*two) for two in each)
    last, second = quantized(as_planned(x, plan), data, other, plan=plan)
    return last, second


# ---- from arrays to views and back (arrays/views.py) ---
def as_planned(x: Any, plan: Plan) -> Any:
    """x in the plan's dtype, which differs in the order of its bytes alone."""
    return x if x.dtype == plan.dtype and hasattr(x, "aval") else jnp.asarray(x, plan.dtype)


def made_of(op: str, x: Any, rows: Any, activation: Any) -> tuple[Any, Any, str, Any]:
    """What a call reads: x, what has the shape and dtype of the floats, their source, an operand.

    x is what was given where a kernel may make the floats of it, else the floats.

    Raises:
      TypeError, ValueError: see `quantize`.
    """
    if activation is not None and not isinstance(activation, Gated):
        raise TypeError(f"{op}: activation must be None or a Gated, got {shown(activation)}")
    if activation is None:
        if rows is None:
            return x, x, "", None
        rows = rows_of(op, x, rows)
        return x, jax.ShapeDtypeStruct((rows.shape[0], x.shape[1]), x.dtype), "rows", rows
    if rows is not None:
        rows = rows_of(op, x, rows)
        x, up = (None if a is None else _gathered(jnp.asarray(a), rows) for a in (x, activation.up))
        activation = dataclasses.replace(activation, up=up)
    if rows is not None or not activation.is_split:
        x = made(op, x, activation)
        return x, x, "", None
    gates = jax.eval_shape(lambda x: activation.halves(op, x)[0], x)
    weights = weights_of(op, gates, activation.weights)
    return x, gates, activation.name, weights


@partial(jax.jit, static_argnames="plan")
def quantized(
    x: jax.Array, data: tuple[Data, ...], other: jax.Array | None = None, *, plan: Plan
) -> list[MXArray]:
    """One MXArray per result, for an x that the plan fits.

    Under jit, so that eager calls are quick, and calls with one plan share one function of the
    program that they are in, with all its attributes.
    """
    if other is not None:
        if _in_one_call(x, other, plan):
            return _bound_of(x, other, plan)
        make = _gathered if plan.source == "rows" else partial(_active, name=plan.source)
        x, plan = make(x, other), dataclasses.replace(plan, source="")
    moved = plan.axis < -2 and plan.has_units  # units are of the last two axes
    own = dataclasses.replace(plan, axis=-2) if moved else plan
    require_whole_blocks(x, x.shape, plan)
    x = jnp.moveaxis(x, plan.axis, -2) if moved else x
    x = gathered(x, x.shape, own.view.unit_lengths) if plan.has_units else x
    block_data = _block_data(jnp.moveaxis(x, -2, plan.axis) if moved else x, data, plan)
    if not moved:
        return _bound(x, plan, block_data)
    (q,) = _bound(x, own, [jnp.moveaxis(a, plan.axis, -2) for a in block_data])
    if plan.transpose:
        return [q]
    back = {"values": jnp.moveaxis(q.values, -2, plan.axis), "axis": plan.axis}
    if not plan.scale_layout.is_tiled:
        back["scales"] = jnp.moveaxis(q.scales, -2, plan.axis)
    return [dataclasses.replace(q, **back)]


def _in_one_call(x: jax.Array, other: jax.Array, plan: Plan) -> bool:
    """Whether a call can make the floats: of a matrix, without other data, and not split."""
    meshes = (jax.typeof(a).sharding.mesh for a in (x, other))
    known = x.ndim == 2 and not _is_zero(x.shape[0])
    return known and not plan.block_data and not any(map(is_explicit, meshes))


def _is_zero(length: Any) -> bool:
    return isinstance(length, int) and length == 0


def _gathered(x: jax.Array, rows: jax.Array) -> jax.Array:
    """The rows of x with these numbers; on a mesh with explicit axes, split as both are."""
    meshes = [m for m in (jax.typeof(a).sharding.mesh for a in (x, rows)) if is_explicit(m)]
    if not meshes:
        return reference.rows_of(x, rows)
    spec = PartitionSpec(spec_of(rows)[0], spec_of(x)[1])
    return reference.rows_of(x, rows, NamedSharding(meshes[0], spec))


def _active(x: jax.Array, weights: jax.Array, name: str) -> jax.Array:
    """An activation of gates and ups that are halves of rows."""
    return reference.gated(reference.halves(x, name), weights, name)


def _block_data(x: jax.Array, data: tuple[Data, ...], plan: Plan) -> list[jax.Array]:
    """All operands of a uint32 per block, as x's axes have blocks, direction by direction."""
    found: list[jax.Array] = []
    for i, (arrays, own) in enumerate(zip(data, plan.preprocessing, strict=True)):
        axes = (-1 - i,) if plan.op == "quantize_both" else plan.axes
        found += block_data_of(arrays, own, x, axes)
    return found


def _checkpointed(given: Sequence[jax.Array]) -> list[jax.Array]:
    """What the primitive gives, by the name `CHECKPOINT_NAME`.

    As bytes: jax.checkpoint puts all floats that it keeps through lax.reduce_precision, which takes
    each type for one with infinities, and so makes infinities of e4m3fn's codes from 256 on.
    """
    outs = []
    for out in given:
        bits = checkpoint_name(jax.lax.bitcast_convert_type(out, jnp.uint8), CHECKPOINT_NAME)
        outs.append(jax.lax.bitcast_convert_type(bits, out.dtype))
    return outs


def _bound(x: jax.Array, plan: Plan, block_data: Sequence[jax.Array]) -> list[MXArray]:
    """Binds the primitive on views; x, which is placed, and its block data as the plan has them."""
    view = plan.view
    viewed, view_spec = view.view(x.shape, spec_of(x), plan.first_axis)
    floats = to_view(x, viewed, view_spec, view.operand)
    given = [array for array in plan.block_data if not array.derived]
    operands = [
        to_view(a, divided(viewed, view.results[array.of].block, BLOCK), view_spec, view.operand)
        for array, a in zip(given, block_data, strict=True)
    ]
    outs = _checkpointed(primitive.quantize(floats, operands, plan))
    return _all_stored(outs, (x.shape, spec_of(x)), plan)


def _bound_of(x: jax.Array, other: jax.Array, plan: Plan) -> list[MXArray]:
    """Binds the primitive on what the floats are made of, as its kernels count both."""
    (count,), halves = other.shape, 1 if plan.source == "rows" else 2
    length = x.shape[1] // halves
    down, across = plan.form.spans
    other = other.reshape((count // BLOCK, BLOCK) if down else (count, 1))
    x = x.reshape(-1, *[2] * (halves - 1), *((length // BLOCK, BLOCK) if across else (length,)))
    outs = _checkpointed(primitive.quantize_of(x, other, plan))
    return _all_stored(outs, ((count, length), (None, None)), plan)


def _all_stored(outs: Sequence[jax.Array], of: tuple[tuple, tuple], plan: Plan) -> list[MXArray]:
    """The results, from views of them; `of`: the floats' shape and partition spec."""
    pairs_of_arrays = zip(outs[::2], outs[1::2], strict=True)
    return [_stored(i, *pair, *of, plan) for i, pair in enumerate(pairs_of_arrays)]


def _stored(
    i: int, values: jax.Array, scales: jax.Array, shape: tuple, spec: tuple, plan: Plan
) -> MXArray:
    """The i-th result, from views of its values and scales."""
    result, format, layout = plan.view.results[i], plan.formats[i], plan.scale_layout
    axes = plan.axes if plan.op == "quantize" else (plan.axes[-1 - i],)
    if plan.transpose and axes != (-1,):
        shape, spec = (moved_last(dims, axes[0]) for dims in (shape, spec))
        axes = result.last
    values_in, per_byte = plan.value_layouts[i], format.codes_per_byte
    to = stored_shape(shape, axes[-1:], values_in, per_byte), stored_spec(spec, axes, values_in)
    values = from_view(values, *to, result.order_in(values_in))
    to = stored_shape(shape, axes, layout), stored_spec(spec, axes, layout)
    scales = from_view(scales, *to, result.order_in(layout))
    window = plan.preprocessing[i].window
    return MXArray(values, scales, format, axes[-1], layout, plan.block, values_in, window)
