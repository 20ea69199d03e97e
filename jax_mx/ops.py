"""The public functions."""

from __future__ import annotations

import dataclasses
import math
import operator

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_mx import primitive
from jax_mx.array import MXArray
from jax_mx.artifacts import TARGET
from jax_mx.formats import BLOCK, MXFP8_E4M3, RCEIL, Format, Scaling
from jax_mx.forms import FORMS, from_view, to_view
from jax_mx.layouts import ROW_MAJOR, ScaleLayout
from jax_mx.plan import Plan, plan_both, plan_dequantize, plan_quantize
from jax_mx.sharding import is_explicit, reshape, spec_of
from jax_mx.variants import device_arch

# For jax.export.export(..., disabled_checks=DISABLE_EXPORT_CHECKS): an exported program carries
# its kernels; jax_mx must be imported where it runs.
DISABLE_EXPORT_CHECKS = [jax.export.DisabledSafetyCheck.custom_call(TARGET)]


def quantize(
    x: jax.typing.ArrayLike,
    format: Format | str = MXFP8_E4M3,
    *,
    axis: int = -1,
    scaling: Scaling | str = RCEIL,
    scale_layout: ScaleLayout | str = ROW_MAJOR,
    transpose: bool = False,
    implementation: str | None = None,
) -> MXArray:
    """Quantizes blocks of 32 elements along `axis` to a small float format with E8M0 scales.

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
        one of them); the leading ones number slabs.
      transpose: whether the result has the block axis last, as the GEMM of the transposed operand
        wants it: values (..., K, M) and scales (..., K, M / 32) for an x (..., M, K), axis -2.
      implementation: "cutedsl" (NVIDIA kernels), "xla" (plain XLA, runs everywhere), or None: the
        kernel where there is one, else "xla".

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
    plan = plan_quantize(x, format, axis, scaling, scale_layout, implementation, transpose)
    x = jnp.asarray(x, plan.dtype)
    _insist(plan)
    if plan.axis < -2 and plan.scale_layout.is_tiled:  # a layout's rows are the last axis alone
        (q,) = _quantize(jnp.moveaxis(x, plan.axis, -2), dataclasses.replace(plan, axis=-2))
        if plan.transpose:
            return q
        return dataclasses.replace(q, values=jnp.moveaxis(q.values, -2, plan.axis), axis=plan.axis)
    (q,) = _quantize(x, plan)
    return q


def quantize_both(
    x: jax.typing.ArrayLike,
    format: Format | str = MXFP8_E4M3,
    *,
    formats: tuple[Format | str, Format | str] | None = None,
    scaling: Scaling | str = RCEIL,
    scale_layout: ScaleLayout | str = ROW_MAJOR,
    transpose: tuple[bool, bool] = (False, True),
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
      implementation: or None.

    Returns:
      `quantize(x, axis=-1)` and `quantize(x, axis=-2, transpose=transpose[1])`.

    Raises:
      TypeError, ValueError, NotImplementedError: as for `quantize`.
    """
    x = x if hasattr(x, "dtype") else jnp.asarray(x)
    pair = (format, format) if formats is None else formats
    plan = plan_both(x, pair, scaling, scale_layout, implementation, transpose)
    _insist(plan)
    last, second = _quantize(jnp.asarray(x, plan.dtype), plan)
    return last, second


def dequantize(
    q: MXArray,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """element * scale, in float32, rounded once to `dtype`.

    Args:
      q: what `quantize` returned.
      dtype: bfloat16, float16 or float32. Beyond its largest finite value the result is infinite.
      implementation: "xla", or None: the kernel where there is one, else "xla".

    Returns:
      An array of q's shape. A scale of 255 gives NaN.

    Raises:
      TypeError: q is no `MXArray`, its arrays have other dtypes than its format, or dtype is none
        of the three.
      ValueError: the scales' shape does not belong to the values' shape.
      NotImplementedError: as for `quantize`.
    """
    plan = plan_dequantize(q, dtype, implementation)
    _insist(plan)
    q = dataclasses.replace(q, format=plan.format, scale_layout=plan.scale_layout)  # not names
    scales = _scales_in(q.scales, q.shape, plan)
    values = _to_blocks(q.values, plan.axis, length=BLOCK // plan.format.codes_per_byte)
    y = primitive.dequantize(values, scales, plan)
    y = reshape(y, (*y.shape[:-2], y.shape[-2] * BLOCK), spec_of(y)[:-1])
    return jnp.moveaxis(y, -1, plan.axis)


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
      transpose: of quantize, or of quantize_both's second result.
      implementation: this one only; "xla" serves every call.

    Returns:
      (True, "<implementation>: <name of the kernel>") or (False, the reason).

    Raises:
      TypeError, ValueError: as for `quantize`; also for an unknown op or device.
    """
    if not 1 <= operator.index(ndim) <= 64:
        raise ValueError(f"is_supported: ndim must be 1 to 64, got {ndim}")
    like = jax.ShapeDtypeStruct((BLOCK,) * ndim, jnp.dtype(dtype))
    if op == "quantize_both":
        pair = (False, transpose)
        plan = plan_both(like, (format, format), scaling, scale_layout, implementation, pair)
    elif op in ("quantize", "dequantize"):
        call = (format, axis, scaling, scale_layout, implementation, transpose, op)
        plan = plan_quantize(like, *call)
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
        kernels = primitive.kernels_for(plan, platform, chips)
    except NotImplementedError as error:
        return False, str(error)
    symbols = next(iter(kernels.values()))["symbols"]
    return True, f"{primitive.KERNELS[platform]}: {symbols.split(',')[0]}"


def _insist(plan: Plan) -> None:
    """Raises at once where a named implementation has no kernel for the plan on any chip."""
    if plan.implementation not in (None, "xla"):
        primitive.kernels_for(plan, primitive.IMPLEMENTATIONS[plan.implementation], ())


# ---- from arrays to views and back (forms.py) ---
def _quantize(x: jax.Array, plan: Plan) -> list[MXArray]:
    """Binds the primitive; x as the plan has it. One MXArray per result."""
    form = FORMS[plan.form]
    axis = -2 if plan.op == "quantize_both" else plan.axis
    split = x.ndim + axis
    spec = spec_of(x)
    for along in (-2, -1) if plan.op == "quantize_both" else (axis,):
        _whole_shards(plan.op, x, along)
    if plan.scale_layout.is_tiled and is_explicit(jax.typeof(x).sharding.mesh):
        # Tiles mix rows and columns, so these two are gathered; leading dimensions stay sharded.
        spec = (*spec[: -2 if axis >= -2 else axis], *[None] * min(2, x.ndim))
        x = jax.sharding.reshard(x, PartitionSpec(*spec))
    # An array (*lead, M, *rest): blocks along M, or along the last axis of it, or both.
    lead, m, rest = x.shape[:split], x.shape[split], x.shape[split + 1 :]
    lead_spec, m_spec, rest_spec = spec[:split], spec[split], spec[split + 1 :]
    blocks, k, k_spec = m // BLOCK, math.prod(rest), (rest_spec or (None,))[0]
    if plan.form == "last":
        ones = (1,) * (1 - len(lead))  # there is always a dimension of rows
        memory, memory_spec = (*ones, *lead, blocks, BLOCK), (*[None for _ in ones], *spec, None)
    elif plan.op == "quantize":
        memory, memory_spec = (*lead, blocks, BLOCK, k), (*lead_spec, m_spec, None, k_spec)
    else:
        memory = (*lead, blocks, BLOCK, k // BLOCK, BLOCK)
        memory_spec = (*lead_spec, m_spec, None, k_spec, None)
    view = to_view(x, memory, form.operand, memory_spec)
    outs = primitive.quantize_p.bind(view, plan=plan)

    arrays = []
    for i, (result, format) in enumerate(zip(form.results, plan.formats, strict=True)):
        values, scales = outs[2 * i : 2 * i + 2]
        along = plan.axis if plan.op == "quantize" else -1 - i
        turned = plan.transpose and along != -1
        shape, out_spec = [*x.shape], [*spec]
        if turned:
            shape, out_spec = [*lead, *rest, m], [*lead_spec, *rest_spec, m_spec]
            along = -1
        per_block = [*shape]
        per_block[along] //= BLOCK
        shape[along] //= format.codes_per_byte
        values = from_view(values, tuple(shape), result.values, tuple(out_spec))
        if not plan.scale_layout.is_tiled:
            scales = from_view(scales, tuple(per_block), result.scales, tuple(out_spec))
        arrays.append(MXArray(values, scales, format, along, plan.scale_layout))
    return arrays


def _whole_shards(op: str, x: jax.Array, axis: int) -> None:
    """Raises on a mesh with explicit axes where a shard along `axis` splits a block."""
    mesh = jax.typeof(x).sharding.mesh
    if not is_explicit(mesh):
        return
    names = spec_of(x)[axis]
    names = (names,) if isinstance(names, str) else tuple(names or ())
    shards, length = math.prod(mesh.shape[name] for name in names), x.shape[axis]
    if length % (shards * BLOCK):
        raise primitive.ShardingTypeError(
            f"{op}: axis {axis} of length {length} is split over {' x '.join(names)} in {shards} "
            f"shards of {length / shards:g}, which does not keep its blocks of {BLOCK} whole; "
            "reshard it with jax.sharding.reshard"
        )


def _to_blocks(x: jax.Array, axis: int, length: int) -> jax.Array:
    """x with `axis` moved last and split: (..., blocks, length)."""
    x = jnp.moveaxis(x, axis, -1)
    spec = (*spec_of(x), None)
    return reshape(x, (*x.shape[:-1], x.shape[-1] // length, length), spec)


def _scales_in(scales: jax.Array, shape: tuple[int, ...], plan: Plan) -> jax.Array:
    """Row-major scales (..., blocks, 1), blocks along the plan's axis, of an array of `shape`."""
    if not plan.scale_layout.is_tiled:
        return _to_blocks(scales, plan.axis, length=1)
    rows = shape[-1] if plan.axis != -1 else shape[-2]
    return plan.scale_layout.unpack(scales, rows, shape[plan.axis] // BLOCK)[..., None]
