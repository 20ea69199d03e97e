"""`fake_quantize`: quantize and dequantize at once, with a derivative."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.formats.checks import array_of, flag
from jax_mx.formats.formats import BLOCK, MXFP8_E4M3, RCEIL, Format, Scaling
from jax_mx.formats.sharding import spec_of
from jax_mx.formats.views import Viewed
from jax_mx.formats.windows import Window
from jax_mx.quantizing import reference
from jax_mx.quantizing.calling import quantized
from jax_mx.quantizing.derivatives import derived
from jax_mx.quantizing.facts.preprocessing import NO_PREPROCESSING
from jax_mx.quantizing.mxarray import dequantized
from jax_mx.quantizing.placing import require_kernel
from jax_mx.quantizing.plan import Plan
from jax_mx.quantizing.planning import Options, planned
from jax_mx.quantizing.preprocessing import (
    Data,
    Hadamard,
    Stochastic,
    data_of,
    flips_of,
    preprocessing_of,
    rotated,
)


def fake_quantize(
    x: jax.typing.ArrayLike,
    format: Format | str = MXFP8_E4M3,
    *,
    axis: int = -1,
    scaling: Scaling | str = RCEIL,
    block: int | tuple[int, int] = BLOCK,
    zero_scale: int = 0,
    rounding: Stochastic | None = None,
    hadamard: Hadamard | None = None,
    clip: bool = False,
    window: Window = BLOCK,
    implementation: str | None = None,
) -> jax.Array:
    """Quantizes x and dequantizes the codes, with a derivative: for quantization-aware training.

    The derivative is straight-through: tangents and cotangents pass as if this were the identity.

    Args:
      x: see `quantize`.
      format: see `quantize`.
      axis: see `quantize`.
      scaling: see `quantize`.
      block: see `quantize`.
      zero_scale: see `quantize`; nothing of the result depends on it.
      rounding: see `quantize`. A prescale is divided out of the result.
      hadamard: see `quantize`. The result is rotated back.
      clip: whether the derivative is 0 where x saturates: where its magnitude exceeds `format.max`
        times its block's scale. `floor` saturates the tops of blocks, `even` some of them, `ceil`
        and `rceil` nothing (but for one subnormal amax). A block that holds a NaN or an infinity is
        NaN as a whole and saturates nowhere, so that its gradient shows it. With a transform, a
        rotated element saturates: a tangent is rotated, made 0 there, and rotated back.
      window: see `quantize`.
      implementation: see `quantize`.

    Returns:
      `quantize(x, ...).dequantize(x.dtype)`, with x's shape, dtype and sharding. Preprocessing is
      undone in float32: y = q.dequantize(jnp.float32), divided by the prescale, then
      `jax_mx.hadamard(y, size)` times the signs, as +-1. The result is rounded to x's dtype at the
      end. A NaN has all bits set but the sign.

    Raises:
      TypeError, ValueError, NotImplementedError, ShardingTypeError: as for `quantize`.
    """
    op = "fake_quantize"
    x = array_of(op, "x", x)
    preprocessing = preprocessing_of(op, rounding, hadamard, window)
    asked = Options(
        formats=(format,),
        axis=axis,
        scaling=scaling,
        implementation=implementation,
        block=block,
        zero_scale=zero_scale,
        preprocessing=(preprocessing,),
    )
    plan = planned(op, x, asked)
    clip = flag(op, "clip", clip)
    plan = dataclasses.replace(plan, op="quantize", caller=op)
    require_kernel(plan)
    require_kernel(_inverse(plan))
    data = data_of(rounding, hadamard)
    return _fake_quantize(x, data, plan=plan, clip=clip)


@partial(jax.jit, static_argnames=("plan", "clip"))
def _fake_quantize(x: jax.Array, data: Data, *, plan: Plan, clip: bool) -> jax.Array:
    """`fake_quantize` of an x that the plan fits; in one kernel where there is one."""
    preprocessing, fixed = plan.preprocessing[0], jax.lax.stop_gradient(x)
    # Not within the custom_jvp: policies of jax.checkpoint do not look there.
    if preprocessing == NO_PREPROCESSING and not clip:
        floats = dataclasses.replace(preprocessing, dequantized=True)
        (y,) = quantized(fixed, (data,), plan=dataclasses.replace(plan, preprocessing=(floats,)))
        return _straight_through(x, y, None)
    (q,) = quantized(fixed, (data,), plan=plan)
    y = dequantized(q, plan=_inverse(plan), transpose=False)
    if dataclasses.replace(preprocessing, window=BLOCK) == NO_PREPROCESSING:
        return _straight_through(x, y, _saturated(fixed, q.scales, plan) if clip else None)
    if preprocessing.prescale is not None:
        y = y / np.float32(preprocessing.prescale)
    turns = preprocessing.hadamard > 0
    where = (preprocessing.hadamard, flips_of(preprocessing, data[1]) if turns else None, plan.axis)
    turned = rotated(x.astype(jnp.float32), *where) if turns and clip else x

    def back(y: jax.Array) -> jax.Array:
        return _nans_alike(rotated(y, *where, inverse=True) if turns else y, x.dtype)

    if not clip:
        return _straight_through(x, back(y), None)
    elements = jax.lax.stop_gradient(turned)
    if preprocessing.prescale is not None:
        elements = reference.times(elements.astype(jnp.float32), preprocessing.prescale)
    saturated = _saturated(elements, q.scales, plan)
    return back(_straight_through(turned.astype(jnp.float32), y, saturated))


def _nans_alike(y: jax.Array, dtype: np.dtype) -> jax.Array:
    """y in a dtype, each NaN with the bits that `dequantize` gives it."""
    value = reference.one_nan(jax.lax.stop_gradient(y).astype(dtype))
    return derived([value], [y], lambda _, __, tangents: [tangents[0].astype(dtype)])[0]


def _saturated(x: jax.Array, scales: jax.Array, plan: Plan) -> jax.Array:
    """Where elements saturate, by the row-major scales of their blocks."""
    view = dataclasses.replace(plan, preprocessing=(NO_PREPROCESSING,)).view
    (result,) = view.results
    viewed = Viewed.of(view, x.shape, spec_of(x), plan.first_axis)
    of_blocks = viewed.to_scales(scales, result)
    return viewed.from_floats(reference.saturates(viewed.to_floats(x), of_blocks, plan.format))


def _straight_through(x: jax.Array, y: jax.Array, saturated: jax.Array | None) -> jax.Array:
    """y, with the derivative of x; with none where it saturates."""

    def rule(_: Any, args: list, tangents: list) -> list[jax.Array]:
        (_, *saturated), (tangent, *_) = args, tangents
        return [jnp.where(at, jnp.zeros_like(tangent), tangent) for at in saturated] or [tangent]

    return derived([y], [x] if saturated is None else [x, saturated], rule)[0]


def _inverse(plan: Plan) -> Plan:
    """The plan that dequantizes the codes: to float32 where preprocessing must be undone."""
    (preprocessing,) = plan.preprocessing
    plain = dataclasses.replace(preprocessing, window=BLOCK) == NO_PREPROCESSING
    dtype = plan.dtype if plain else np.dtype(np.float32)
    return dataclasses.replace(plan.inverse, dtype=dtype)
