"""The public functions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jax_mx import primitive
from jax_mx.array import MXArray
from jax_mx.artifacts import TARGET
from jax_mx.formats import BLOCK, MXFP8_E4M3, RCEIL, Format, Scaling
from jax_mx.layouts import ROW_MAJOR, ScaleLayout
from jax_mx.plan import Plan, plan_dequantize, plan_quantize

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
      implementation: "cutedsl" (NVIDIA kernels), "xla" (plain XLA, runs everywhere), or None: the
        kernel where there is one, else "xla".

    Returns:
      An `MXArray` of x's shape.

    Raises:
      TypeError: x has another dtype, or an argument is of the wrong type.
      ValueError: axis out of range, a length that 32 does not divide, an unknown name.
      NotImplementedError: the named implementation cannot serve the call here; raised when the
        computation is lowered, because only then its platform is known. Also under
        differentiation.
    """
    x = x if hasattr(x, "dtype") else jnp.asarray(x)
    plan = plan_quantize(x, format, axis, scaling, scale_layout, implementation)
    x = jnp.asarray(x)
    if plan.implementation not in (None, "xla"):
        primitive.kernels_for(plan, primitive.IMPLEMENTATIONS[plan.implementation], ())
    values, scales = primitive.quantize_p.bind(_to_blocks(x, plan.axis), plan=plan)
    values, scales = _from_blocks(values, plan.axis), _scales_out(scales, plan)
    return MXArray(values, scales, plan.format, plan.axis, plan.scale_layout)


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
    if plan.implementation not in (None, "xla"):
        primitive.kernels_for(plan, primitive.IMPLEMENTATIONS[plan.implementation], ())
    scales = _scales_in(q.scales, q.shape, plan)
    values = _to_blocks(q.values, plan.axis, BLOCK // plan.format.codes_per_byte)
    (y,) = primitive.dequantize_p.bind(values, scales, plan=plan)
    return _from_blocks(y, plan.axis)


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
    implementation: str | None = None,
) -> tuple[bool, str]:
    """Whether a kernel serves the call on `device`; if not, `implementation=None` takes "xla".

    Args:
      op: "quantize" or "dequantize".
      device: a JAX device, or a chip's name as drivers have it ("sm_90", "gfx950"), or "cpu".
      dtype: of the unquantized side.
      format: see `quantize`; so are axis, scaling and scale_layout.
      axis: of an array of `ndim` dimensions.
      ndim: at least 1.
      scaling: ignored for dequantize.
      scale_layout: where scales lie.
      implementation: this one only; "xla" serves every call.

    Returns:
      (True, "<implementation>: <name of the kernel>") or (False, the reason).

    Raises:
      TypeError, ValueError: as for `quantize`; also for an unknown op or device.
    """
    if op not in ("quantize", "dequantize"):
        raise ValueError(f"is_supported: op {op!r} is unknown; use 'quantize' or 'dequantize'")
    like = jax.ShapeDtypeStruct((BLOCK,) * ndim, jnp.dtype(dtype))
    plan = plan_quantize(like, format, axis, scaling, scale_layout, implementation)
    if op == "dequantize":
        plan = dataclasses.replace(plan, op=op, scaling=None)
    chip = device if isinstance(device, str) else primitive.chip_of(device)
    platform = primitive.platform_of(chip)
    if plan.implementation == "xla":
        return True, "xla: runs everywhere"
    try:
        (kernel,) = primitive.kernels_for(plan, platform, [chip]).values()
    except NotImplementedError as error:
        return False, str(error)
    return True, f"{primitive.KERNELS[platform]}: {kernel['symbols'].split(',')[0]}"


# ---- views: blocks along the last dimension, and back --------------------------------------------
def _to_blocks(x: jax.Array, axis: int, length: int = BLOCK) -> jax.Array:
    """x with `axis` moved last and split: (..., blocks, length)."""
    x = jnp.moveaxis(x, axis, -1)
    return _reshape(x, (*x.shape[:-1], x.shape[-1] // length, length), lambda s: (*s, None))


def _from_blocks(x: jax.Array, axis: int) -> jax.Array:
    """The inverse of `_to_blocks`; the last dimension of x may have any length."""
    *lead, blocks, length = x.shape
    return jnp.moveaxis(_reshape(x, (*lead, blocks * length), lambda s: s[:-1]), -1, axis)


def _scales_out(scales: jax.Array, plan: Plan) -> jax.Array:
    """Scales (..., blocks, 1), blocks along the plan's axis, as the plan's layout has them."""
    if not plan.scale_layout.is_tiled:
        return _from_blocks(scales, plan.axis)
    return plan.scale_layout.pack(scales[..., 0])


def _scales_in(scales: jax.Array, shape: tuple[int, ...], plan: Plan) -> jax.Array:
    """The inverse of `_scales_out`, for an array of the logical `shape`."""
    if not plan.scale_layout.is_tiled:
        return _to_blocks(scales, plan.axis, length=1)
    rows = shape[-1] if plan.axis != -1 else shape[-2]
    return plan.scale_layout.unpack(scales, rows, shape[plan.axis] // BLOCK)[..., None]


def _reshape(x: jax.Array, shape: tuple[int, ...], spec: Any) -> jax.Array:
    """x.reshape; on a mesh with explicit axes `spec` maps x's partition spec to the result's."""
    sharding = jax.typeof(x).sharding
    if sharding.mesh.empty or not sharding.mesh._any_axis_explicit:
        return jax.lax.reshape(x, shape)
    out = NamedSharding(sharding.mesh, PartitionSpec(*spec(tuple(sharding.spec))))
    return jax.lax.reshape(x, shape, out_sharding=out)
