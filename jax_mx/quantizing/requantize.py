"""`requantize`: rows of an MX array along their other axis, without its floats in between."""

import jax
import jax.numpy as jnp

from jax_mx.formats.formats import BLOCK, MXFP8_E4M3, RCEIL, Format, Scaling
from jax_mx.formats.layouts import ROW_MAJOR, ScaleLayout
from jax_mx.formats.sharding import is_explicit
from jax_mx.formats.windows import Window
from jax_mx.quantizing.calling import quantized
from jax_mx.quantizing.mxarray import MXArray, checked, dequantize
from jax_mx.quantizing.placing import require_kernel
from jax_mx.quantizing.planning import Options, planned
from jax_mx.quantizing.preprocessing import Hadamard, Stochastic, data_of, preprocessing_of
from jax_mx.quantizing.quantize import quantize
from jax_mx.quantizing.sources.codes import CodesSource
from jax_mx.quantizing.sources.rows import numbers_of


def requantize(
    q: MXArray,
    format: Format | str = MXFP8_E4M3,
    *,
    rows: jax.Array,
    axis: int = -1,
    transpose: bool = False,
    scaling: Scaling | str = RCEIL,
    scale_layout: ScaleLayout | str = ROW_MAJOR,
    window: Window = BLOCK,
    rounding: Stochastic | None = None,
    hadamard: Hadamard | None = None,
    implementation: str | None = None,
) -> MXArray:
    """The bytes of `quantize(q.dequantize(), rows=rows, ...)`, in bfloat16.

    Received tokens in MXFP8 have blocks along their rows: one kernel reads these codes and
    quantizes them to the same format along the other axis, transposed. Other arrays are dequantized
    first, as is every array with rounding or hadamard.

    Args:
      q: (T, K).
      format: see `quantize`, also for the other arguments.
      rows: int32 (R,).
      axis: the axis that blocks run along.
      transpose: whether this axis is last in the result.
      scaling: the rule from amaxes to scales.
      scale_layout: where scales lie.
      window: the elements that share an amax.
      rounding: a `Stochastic`, or None.
      hadamard: a `Hadamard`, or None.
      implementation: or None.

    Returns:
      An `MXArray` (R, K), transposed (K, R).

    Raises:
      TypeError, ValueError, NotImplementedError: see `quantize`.
    """
    op = "requantize"
    q = checked(op, "q", q)
    if rounding is not None or hadamard is not None or not _is_plain(q):
        return quantize(
            dequantize(q), format, rows=rows, axis=axis, transpose=transpose, scaling=scaling,
            scale_layout=scale_layout, window=window, rounding=rounding, hadamard=hadamard,
            implementation=implementation,
        )  # fmt: skip
    rows = numbers_of(op, q, rows)
    preprocessing = (preprocessing_of(op, None, None, window),)
    asked = Options(
        formats=(format,),
        axis=axis,
        scaling=scaling,
        scale_layout=scale_layout,
        implementation=implementation,
        transpose=transpose,
        preprocessing=preprocessing,
        source=CodesSource(q.format.name),
    )
    abstract = jax.ShapeDtypeStruct((rows.shape[0], q.shape[1]), jnp.bfloat16)
    plan = planned("quantize", abstract, asked)
    require_kernel(plan)
    (codes,) = quantized(q.values, (data_of(None, None),), (rows, q.scales), plan=plan)
    return codes


def _is_plain(q: MXArray) -> bool:
    """Whether a kernel may read rows of q: MXFP8, in rows, with blocks of 32 along them."""
    layouts = (q.value_layout, q.scale_layout)
    plain = q.ndim == 2 and q.axis == -1 and len(q.block) == 1 and q.format.bits == 8
    whole = not any(layout.is_tiled for layout in layouts) and 0 not in q.shape
    return plain and whole and not is_explicit(jax.typeof(q.values).sharding.mesh)
