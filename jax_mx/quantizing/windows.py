"""`align`: gives a quantized array the scales of a window."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.formats.checks import blocks_fit, blocks_in, window_of
from jax_mx.formats.formats import BLOCK, SCALE_DTYPE
from jax_mx.formats.layouts import ROW_MAJOR_VALUES
from jax_mx.formats.sharding import is_explicit, resharded, spec_of, spread
from jax_mx.formats.views import Viewed, divided, stored_spec
from jax_mx.formats.windows import ROW, TILE, Window
from jax_mx.quantizing import reference
from jax_mx.quantizing.facts.preprocessing import Preprocessing
from jax_mx.quantizing.mxarray import MXArray, checked
from jax_mx.quantizing.placing import placed
from jax_mx.quantizing.plan import Plan


def align(q: MXArray, window: Window) -> MXArray:
    """A quantized array with equal scales in each window, for products that want these.

    Each window takes the largest scale of its blocks, and codes are rounded to nearest even under
    it. An element of MXFP8 E4M3 changes only where it becomes subnormal, by at most 2^-10 of the
    window's scale. A block that is NaN makes its window NaN. Where the floats still exist,
    `quantize(x, window=window)` rounds once and is better.

    Args:
      q: an MXArray.
      window: 128, 256 or "row" along the axis of the blocks; 32, or the window that q has, gives q
        itself. (128, 128) gives square blocks, row-major, of an array whose blocks are square or
        run along one of the last two axes; 32 divides both.

    Returns:
      An `MXArray` of q's shape, format and layouts.

    Raises:
      TypeError, ValueError: q is not an `MXArray`, the window is unknown, or it does not fit q's
        blocks.
      ShardingTypeError: on a mesh with explicit axes, a shard would split a window.
    """
    op = "align"
    q, window = checked(op, "q", q), window_of(op, window)
    if window in (BLOCK, q.window):
        return q
    block = blocks_in(op, window, q.block)
    if window == TILE:
        blocks_fit(op, block, max(q.axis, -1) if q.axis == -2 else q.axis, q.scale_layout, q.ndim)
        if any(length % BLOCK for length in q.shape[-2:]):
            raise ValueError(
                f"{op}: square blocks of {BLOCK} do not divide the last two axes of {q.shape}"
            )
    return _align(q, window=window, block=block)


@partial(jax.jit, static_argnames=("window", "block"))
def _align(q: MXArray, *, window: Window, block: tuple[int, ...]) -> MXArray:
    """`align` of an array whose blocks become these."""
    if q.value_layout.is_tiled:
        rows = _align(q.with_values_in(ROW_MAJOR_VALUES), window=window, block=block)
        return rows.with_values_in(q.value_layout)
    axis = -1 if len(block) == 2 else q.axis
    preprocessing = (Preprocessing(window=window),)
    plan = Plan(
        "align", np.dtype(np.float32), (q.format,), axis, q.scale_layout, block=block,
        preprocessing=preprocessing,
    )  # fmt: skip
    layout, format = q.scale_layout, q.format
    (result,) = plan.view.results
    values, scales = placed(q.values, q.shape, plan), q.scales
    spec = spec_of(values)
    of_q = (q.axis,) if len(q.block) == 1 else (-2, -1)
    if is_explicit(jax.typeof(values).sharding.mesh):
        scale_spec = stored_spec(spec, of_q, layout)
        scales = resharded(scales, scale_spec, jax.typeof(values).sharding.mesh)
    viewed = Viewed.of(plan.view, q.shape, spec, plan.first_axis)
    # The dimensions that a block of q spans: the result's, or the one of them that q's run along.
    spans = result.block if len(block) == len(q.block) else (result.block[q.axis],)
    scales_in = divided(viewed.shape, spans, BLOCK)
    if layout.is_tiled:
        scales_in = result.scales_shape(viewed.shape)
    scales = viewed.to(scales, scales_in, result.order_in(layout), layout)
    scales = _bits(result.unpack(scales, viewed.shape)).astype(jnp.uint32)
    values_in = divided(viewed.shape, spans[-1:], format.codes_per_byte)
    values = viewed.to(values, values_in, result.order)
    codes = jnp.moveaxis(_bits(values).astype(jnp.uint32), spans[-1], -1)
    codes = jnp.moveaxis(reference.unpack(codes, format), -1, spans[-1])

    over = plan.view.along(result) if window == ROW else result.block
    to = jnp.max(scales, axis=over, keepdims=True, initial=0)
    if window == ROW:
        to = spread(to, divided(viewed.shape, result.block, BLOCK), spec_of(scales))
    else:
        to = reference.over_windows(to, result.blocks_in(window))
    codes = jnp.moveaxis(reference.rescaled(codes, scales, to, format), result.block[-1], -1)
    values = jnp.moveaxis(reference.pack(codes, format), -1, result.block[-1])
    values = jax.lax.bitcast_convert_type(values, format.storage)
    scales = jax.lax.bitcast_convert_type(to.astype(jnp.uint8), SCALE_DTYPE)

    views = values, result.pack(scales, layout)
    (values, scales), axis = viewed.from_arrays(views, result, plan.axes, format, transpose=False)
    return MXArray(values, scales, format, axis, layout, block, window=window)


def _bits(array: jax.Array) -> Any:
    return jax.lax.bitcast_convert_type(array, jnp.uint8)
