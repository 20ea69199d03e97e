"""The public functions."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_mx.lowering import primitive
from jax_mx import reference
from jax_mx.arrays.mxarray import MXArray, checked
from jax_mx.lowering.store import TARGET
from jax_mx.arrays.checks import zero_scale_of
from jax_mx.facts.formats import BLOCK, MXFP8_E4M3, RCEIL, Format, Scaling
from jax_mx.arrays.views import (
    divided,
    from_view,
    moved_last,
    stored_shape,
    stored_spec,
    to_view,
)
from jax_mx.facts.layouts import ROW_MAJOR, ROW_MAJOR_VALUES, ScaleLayout, ValueLayout
from jax_mx.lowering.plan import Plan, plan_both, plan_dequantize, plan_quantize
from jax_mx.arrays.sharding import gathered, is_explicit, resharded, shards_of, spec_of
from jax_mx.ops.preprocessing import UNTREATED, Hadamard, Stochastic, pairs, treatment_of, words_of
from jax_mx.facts.variants import device_arch

# For jax.export.export(..., disabled_checks=DISABLE_EXPORT_CHECKS): an exported program carries
# its kernels; jax_mx must be imported where it runs.
DISABLE_EXPORT_CHECKS = [jax.export.DisabledSafetyCheck.custom_call(TARGET)]

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
    x = x if hasattr(x, "dtype") else jnp.asarray(x)
    call = (format, axis, scaling, scale_layout, implementation, transpose, block)
    treatment = treatment_of("quantize", rounding, hadamard)
    more = {"zero_scale": zero_scale, "value_layout": value_layout, "treatment": treatment}
    plan = plan_quantize(x, *call, **more)
    x = jnp.asarray(x, plan.dtype)
    _insist(plan)
    words = _words(x, plan, plan.axes, rounding, hadamard)
    if plan.axis < -2 and plan.has_units:  # units are of the last two axes
        x, *words = (jnp.moveaxis(a, plan.axis, -2) for a in (x, *words))
        (q,) = _quantize(x, dataclasses.replace(plan, axis=-2), words)
        if plan.transpose:
            return q
        back = {"values": jnp.moveaxis(q.values, -2, plan.axis), "axis": plan.axis}
        if not plan.scale_layout.is_tiled:
            back["scales"] = jnp.moveaxis(q.scales, -2, plan.axis)
        return dataclasses.replace(q, **back)
    (q,) = _quantize(x, plan, words)
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
      implementation: or None.

    Returns:
      `quantize(x, axis=-1)` and `quantize(x, axis=-2, transpose=transpose[1])`.

    Raises:
      TypeError, ValueError, NotImplementedError: as for `quantize`.
    """
    x = x if hasattr(x, "dtype") else jnp.asarray(x)
    pair = (format, format) if formats is None else formats
    each = pairs("quantize_both", rounding, hadamard)
    treatments = tuple(treatment_of("quantize_both", *two) for two in each)
    call = (scaling, scale_layout, implementation, transpose, zero_scale, value_layouts)
    plan = plan_both(x, pair, *call, treatments)
    _insist(plan)
    x = jnp.asarray(x, plan.dtype)
    words = [w for i, two in enumerate(each) for w in _words(x, plan, (-1 - i,), *two)]
    last, second = _quantize(x, plan, words)
    return last, second


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
    _insist(plan)
    if q.value_layout.is_tiled:
        q = q.with_values_in(ROW_MAJOR_VALUES)
    if plan.axis < -2 and plan.scale_layout.is_tiled:  # see quantize
        values = jnp.moveaxis(q.values, plan.axis, -2)
        q = dataclasses.replace(q, values=values, axis=-2)
        y = jnp.moveaxis(_dequantize(q, dataclasses.replace(plan, axis=-2)), -2, plan.axis)
    else:
        y = _dequantize(q, plan)
    return y if plan.transpose == transpose else jnp.swapaxes(y, -1, -2)


def fake_quantize(
    x: jax.typing.ArrayLike,
    format: Format | str = MXFP8_E4M3,
    *,
    axis: int = -1,
    scaling: Scaling | str = RCEIL,
    block: int | tuple[int, int] = BLOCK,
    clip: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """What x is after quantizing, with a derivative: for quantization-aware training.

    The derivative is straight-through: tangents and cotangents pass as if this were the identity.

    Args:
      x: see `quantize`; so are format, axis, scaling, block and implementation.
      format: see `quantize`.
      axis: see `quantize`.
      scaling: see `quantize`.
      block: see `quantize`.
      clip: whether the derivative is 0 where x saturates: where its magnitude exceeds `format.max`
        times its block's scale. `floor` saturates the tops of blocks, `even` some of them, `ceil`
        and `rceil` nothing (but for one subnormal amax). A block that holds a NaN or an infinity is
        NaN as a whole and saturates nowhere, so that its gradient shows it.
      implementation: see `quantize`.

    Returns:
      `quantize(x, ...).dequantize(x.dtype)`: of x's shape, dtype and sharding.

    Raises:
      TypeError, ValueError, NotImplementedError, ShardingTypeError: as for `quantize`.
    """
    op = "fake_quantize"
    x = x if hasattr(x, "dtype") else jnp.asarray(x)
    plan = plan_quantize(x, format, axis, scaling, ROW_MAJOR, implementation, False, block, op)
    if not isinstance(clip, bool):
        raise TypeError(f"{op}: clip must be a bool, got {clip!r}")
    x, form = jnp.asarray(x, plan.dtype), plan.views
    x = _placed(x, x.shape, plan)
    shape, spec = x.shape, spec_of(x)
    view = to_view(x, *form.view(shape, spec, plan.first_axis), form.operand)
    plan = dataclasses.replace(plan, op="quantize")
    _insist(plan)
    _insist(_inverse(plan))
    fixed = jax.lax.stop_gradient(view)
    values, scales = _named(fixed, plan)  # not within the custom_jvp: policies do not look there
    y = primitive.dequantize(values, scales, _inverse(plan))
    saturated = reference.saturates(fixed, scales, plan.format) if clip else None
    return from_view(_straight_through(view, y, saturated), shape, spec, form.operand)


@jax.custom_jvp
def _straight_through(x: jax.Array, y: jax.Array, saturated: jax.Array | None) -> jax.Array:
    """y, with the derivative of x; with none where it saturates."""
    return y


@_straight_through.defjvp
def _straight_through_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    (_, _, saturated), (tangent, *_) = primals, tangents
    if saturated is not None:
        tangent = jnp.where(saturated, jnp.zeros_like(tangent), tangent)
    return _straight_through(*primals), tangent


def _inverse(plan: Plan) -> Plan:
    """Of quantize, into the dtype that it comes from."""
    return dataclasses.replace(plan, op="dequantize", scaling=None)


def is_supported(
    op: str,
    device: jax.Device | str,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    format: Format | str = MXFP8_E4M3,
    axis: int = -1,
    ndim: int = 2,
    scaling: Scaling | str = RCEIL,
    scale_layout: ScaleLayout | str = ROW_MAJOR,
    transpose: bool = False,
    block: int | tuple[int, int] = BLOCK,
    zero_scale: int = 0,
    value_layout: ValueLayout | str = ROW_MAJOR_VALUES,
    rounding: Stochastic | tuple[Stochastic | None, Stochastic | None] | None = None,
    hadamard: Hadamard | tuple[Hadamard | None, Hadamard | None] | None = None,
    implementation: str | None = None,
) -> tuple[bool, str]:
    """Whether a kernel serves the call on `device`; if not, `implementation=None` takes "xla".

    Args:
      op: "quantize", "quantize_both" or "dequantize".
      device: a JAX device (JAX lowers for all of its kind in a process at once, so all of them
        count), or a chip's name ("sm_90", "gfx950"), or "cpu".
      dtype: of the unquantized side.
      format: see `quantize`; so are axis, scaling and scale_layout.
      axis: of an array of `ndim` dimensions.
      ndim: 1 to 64.
      scaling: no kernel depends on it.
      scale_layout: where scales lie.
      transpose: of quantize, of dequantize, or of quantize_both's second result.
      block: of quantize and dequantize, see `quantize`.
      zero_scale: of quantize and quantize_both.
      value_layout: of all results, or of dequantize's operand. No answer depends on it: what a
        kernel does not write or read in tiles, XLA moves.
      rounding: of quantize; of quantize_both for both directions or a pair; so is hadamard.
      hadamard: see `quantize`.
      implementation: this one only; "xla" serves every call.

    Returns:
      (True, "<implementation>: <name of the kernel>") or (False, the reason). The name of one per
      result, "along rows", where XLA transposes what they read, or puts into tiles what they give.

    Raises:
      TypeError, ValueError: as for `quantize`; also for an unknown op or device.
    """
    if not 1 <= operator.index(ndim) <= 64:
        raise ValueError(f"is_supported: ndim must be 1 to 64, got {ndim}")
    both = [(rounding, hadamard)]
    if op == "quantize_both":
        both = pairs("is_supported", rounding, hadamard, split=False)
    treatments = tuple(treatment_of("is_supported", *two) for two in both)
    zero_scale = zero_scale_of("is_supported", zero_scale)
    if op == "dequantize" and (treatments != (UNTREATED,) or zero_scale):
        raise ValueError(
            "is_supported: rounding, hadamard and zero_scale are quantize's, dequantize has none"
        )
    # A length of whole blocks, transforms and tiles of values, whatever is asked for.
    like = jax.ShapeDtypeStruct((2 * BLOCK,) * ndim, jnp.dtype(dtype))
    if op == "quantize_both":
        call = (scaling, scale_layout, implementation, (False, transpose), zero_scale)
        plan = plan_both(like, (format, format), *call, (value_layout,) * 2, treatments)
    elif op in ("quantize", "dequantize"):
        call = (format, axis, scaling, scale_layout, implementation, transpose, block, op)
        plan = plan_quantize(like, *call, zero_scale, value_layout, *treatments)
    else:
        allowed = "'quantize', 'quantize_both' or 'dequantize'"
        raise ValueError(f"is_supported: op {op!r} is unknown; use {allowed}")
    if isinstance(device, str):
        chips = [device_arch(device)]
    elif isinstance(device, jax.Device):
        chips = primitive.chips_beside(device)
    else:
        raise TypeError(f"is_supported: device must be a jax.Device or a chip, got {device!r}")
    platform = primitive.platform_of(chips[0])
    if plan.implementation == "xla":
        return True, "xla: runs everywhere"
    try:
        by_rows, calls = primitive.calls_for(plan, platform, chips)
    except NotImplementedError as error:
        return False, str(error)
    names = [next(iter(kernels.values()))["symbols"].split(",")[0] for kernels in calls]
    how = " along rows" if by_rows else ""
    return True, f"{primitive.KERNELS[platform]}: {', '.join(names)}{how}"


def _insist(plan: Plan) -> None:
    """Raises at once where a named implementation has no kernel for the plan on any chip."""
    if plan.implementation not in (None, "xla"):
        primitive.calls_for(plan, primitive.IMPLEMENTATIONS[plan.implementation], ())


# ---- from arrays to views and back (forms.py) ---
def _named(view: jax.Array, plan: Plan, words: Sequence[jax.Array] = ()) -> list[jax.Array]:
    """Binds the primitive; what it gives goes by `CHECKPOINT_NAME`.

    As bytes: jax.checkpoint puts all floats that it keeps through lax.reduce_precision, which takes
    each type for one with infinities, and so makes infinities of e4m3fn's codes from 256 on.
    """
    outs = []
    for out in primitive.quantize(view, words, plan):
        bits = checkpoint_name(jax.lax.bitcast_convert_type(out, jnp.uint8), CHECKPOINT_NAME)
        outs.append(jax.lax.bitcast_convert_type(bits, out.dtype))
    return outs


def _words(
    x: jax.Array,
    plan: Plan,
    axes: tuple[int, ...],
    rounding: Stochastic | None,
    hadamard: Hadamard | None,
) -> list[jax.Array]:
    """A word per block along `axes` of x, for each of what its treatment asks for."""
    _insist_on_whole_blocks(x, x.shape, plan)
    shape, mesh = divided(x.shape, axes, BLOCK), jax.typeof(x).sharding.mesh
    return words_of(rounding, hadamard, shape, spec_of(x), axes[-1], mesh)


def _quantize(x: jax.Array, plan: Plan, words: Sequence[jax.Array]) -> list[MXArray]:
    """Binds the primitive; x as the plan has it. One MXArray per result."""
    form = plan.views
    x = _placed(x, x.shape, plan)
    shape, spec = form.view(x.shape, spec_of(x), plan.first_axis)
    if is_explicit(jax.typeof(x).sharding.mesh):  # where x is gathered, so are words
        words = [resharded(w, spec_of(x), jax.typeof(x).sharding.mesh) for w in words]
    takes = [r for r, t in zip(form.results, plan.treatments, strict=True) for _ in range(t.words)]
    words = [
        to_view(w, divided(shape, result.block, BLOCK), spec, form.operand)
        for w, result in zip(words, takes, strict=True)
    ]
    outs = _named(to_view(x, shape, spec, form.operand), plan, words)

    arrays, layout = [], plan.scale_layout
    for i, (result, format) in enumerate(zip(form.results, plan.formats, strict=True)):
        values, scales = outs[2 * i : 2 * i + 2]
        shape, spec = x.shape, spec_of(x)
        axes = plan.axes if plan.op == "quantize" else (plan.axes[-1 - i],)
        if plan.transpose and axes != (-1,):
            shape, spec = (moved_last(dims, axes[0]) for dims in (shape, spec))
            axes = result.last
        values_in, per_byte = plan.value_layouts[i], format.codes_per_byte
        to = stored_shape(shape, axes[-1:], values_in, per_byte), stored_spec(spec, axes, values_in)
        values = from_view(values, *to, result.order_in(values_in))
        to = stored_shape(shape, axes, layout), stored_spec(spec, axes, layout)
        scales = from_view(scales, *to, result.order_in(layout))
        arrays.append(MXArray(values, scales, format, axes[-1], layout, plan.block, values_in))
    return arrays


def _dequantize(q: MXArray, plan: Plan) -> jax.Array:
    """Binds the primitive; q as the plan has it."""
    form, layout = plan.views, plan.scale_layout
    (result,) = form.results
    values, scales = _placed(q.values, q.shape, plan), q.scales
    shape, spec = q.shape, spec_of(values)
    if is_explicit(jax.typeof(values).sharding.mesh):
        beside = stored_spec(spec, plan.axes, layout)
        scales = resharded(scales, beside, jax.typeof(values).sharding.mesh)
    if plan.transpose:
        shape, spec = (moved_last(dims, -2) for dims in (shape, spec))
    view, view_spec = form.view(shape, spec, plan.first_axis)
    stored = result.values_shape(view, plan.format)
    values = to_view(values, stored, view_spec, result.order)
    scales = to_view(scales, result.scales_shape(view), view_spec, result.order_in(layout))
    return from_view(primitive.dequantize(values, scales, plan), shape, spec, form.operand)


def _placed(x: jax.Array, shape: tuple[int, ...], plan: Plan) -> jax.Array:
    """x of the logical `shape`, in shards that the primitive takes.

    Raises:
      ShardingTypeError: on a mesh with explicit axes, a shard splits a block.
    """
    _insist_on_whole_blocks(x, shape, plan)
    if not plan.has_units:
        return x
    swapped = plan.op == "dequantize" and plan.transpose
    return gathered(x, shape, plan.views.unit_lengths[:: -1 if swapped else 1])


def _insist_on_whole_blocks(x: jax.Array, shape: tuple[int, ...], plan: Plan) -> None:
    """Raises ShardingTypeError where, on a mesh with explicit axes, a shard of x splits a block."""
    if not is_explicit(jax.typeof(x).sharding.mesh):
        return
    for axis in plan.axes:
        group = plan.treatments[-1 - axis if plan.op == "quantize_both" else 0].group
        (names, shards), length = shards_of(x, axis), shape[axis]
        if length % (shards * group):
            raise primitive.ShardingTypeError(
                f"{plan.op}: axis {axis} of length {length} is split over {' x '.join(names)} in "
                f"{shards} shards of {length / shards:g}, which does not keep its blocks of "
                f"{group} whole; reshard it with jax.sharding.reshard"
            )
