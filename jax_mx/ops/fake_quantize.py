"""`fake_quantize`: quantize and dequantize at once, with a derivative."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from jax_mx import reference
from jax_mx.arrays.checks import flag
from jax_mx.arrays.sharding import spec_of
from jax_mx.arrays.views import from_view, to_view
from jax_mx.facts.formats import BLOCK, MXFP8_E4M3, RCEIL, Format, Scaling
from jax_mx.facts.windows import Window
from jax_mx.lowering import primitive
from jax_mx.lowering.plan import Plan
from jax_mx.ops.placing import placed, require_kernel
from jax_mx.ops.planning import Options, planned
from jax_mx.ops.preprocessing import preprocessing_of
from jax_mx.ops.quantize import as_planned, checkpointed


def fake_quantize(
    x: jax.typing.ArrayLike,
    format: Format | str = MXFP8_E4M3,
    *,
    axis: int = -1,
    scaling: Scaling | str = RCEIL,
    block: int | tuple[int, int] = BLOCK,
    clip: bool = False,
    window: Window = BLOCK,
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
      window: see `quantize`.
      implementation: see `quantize`.

    Returns:
      `quantize(x, ...).dequantize(x.dtype)`: of x's shape, dtype and sharding.

    Raises:
      TypeError, ValueError, NotImplementedError, ShardingTypeError: as for `quantize`.
    """
    op = "fake_quantize"
    x = x if hasattr(x, "dtype") else jnp.asarray(x)
    own = preprocessing_of(op, None, None, window)
    asked = Options(
        (format,), axis, scaling, implementation=implementation, block=block, preprocessing=(own,)
    )
    plan = planned(op, x, asked)
    clip = flag(op, "clip", clip)
    plan = dataclasses.replace(plan, op="quantize")
    require_kernel(plan)
    require_kernel(_inverse(plan))
    return _fake_quantize(as_planned(x, plan), plan=plan, clip=clip)


@partial(jax.jit, static_argnames=("plan", "clip"))
def _fake_quantize(x: jax.Array, *, plan: Plan, clip: bool) -> jax.Array:
    """`fake_quantize` of an x that the plan fits."""
    if plan.axis < -2 and plan.has_units:  # units are of the last two axes
        y = _fake_quantize(
            jnp.moveaxis(x, plan.axis, -2), plan=dataclasses.replace(plan, axis=-2), clip=clip
        )
        return jnp.moveaxis(y, -2, plan.axis)
    x, view = placed(x, x.shape, dataclasses.replace(plan, op="fake_quantize")), plan.view
    shape, spec = x.shape, spec_of(x)
    viewed = to_view(x, *view.view(shape, spec, plan.first_axis), view.operand)
    fixed = jax.lax.stop_gradient(viewed)
    values, scales = checkpointed(
        fixed, plan
    )  # not within the custom_jvp: policies do not look there
    y = primitive.dequantize(values, scales, _inverse(plan))
    saturated = reference.saturates(fixed, scales, plan.format) if clip else None
    return from_view(_straight_through(viewed, y, saturated), shape, spec, view.operand)


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
    """The plan that dequantizes what this one quantizes, into the dtype that it comes from."""
    return dataclasses.replace(plan, op="dequantize", scaling=None)
