"""`quantize` and `quantize_both`."""

from functools import partial
from typing import Any

import jax

from jax_mx.formats.checks import flag
from jax_mx.formats.formats import BLOCK, MXFP8_E4M3, RCEIL, Format, Scaling
from jax_mx.formats.layouts import ROW_MAJOR, ROW_MAJOR_VALUES, ScaleLayout, ValueLayout
from jax_mx.formats.windows import Window
from jax_mx.quantizing.activations import Gated
from jax_mx.quantizing.calling import called
from jax_mx.quantizing.mxarray import MXArray
from jax_mx.quantizing.planning import Options
from jax_mx.quantizing.preprocessing import Hadamard, Stochastic, data_of, pairs, preprocessing_of


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

    `quantize(x)` of a bfloat16 (8, 512) gives values (8, 512) in float8_e4m3fn and scales (8, 16).

    A block's scale is a power of two that follows from its largest magnitude by the rule
    `scaling`; elements are divided by it, rounded to nearest even and saturated (OCP MX v1.0). A
    block that holds a NaN or an infinity becomes NaN as a whole. No float32 subnormal is flushed.
    Every implementation gives the same bytes. docs/formats.md has each option's details.

    Args:
      x: bfloat16, float16 or float32; any rank from 1 on, also of size 0.
      format: a `Format` or its name: mxfp8_e4m3, mxfp8_e5m2, mxfp6_e3m2, mxfp6_e2m3, mxfp4_e2m1.
      axis: the axis that blocks run along; 32 divides its length.
      scaling: a `Scaling` or its name: floor, ceil, even, rceil.
      scale_layout: a `ScaleLayout` or its name: row_major, blocked_128x4, shuffled_32x8.
      transpose: whether the result has the block axis last; square blocks swap the last two axes.
      block: 32, along `axis`; or (32, 32), square tiles of the last two axes with one scale each.
      zero_scale: the scale's byte of a block of zeros: 0 (2^-127) or 127 (1.0).
      value_layout: a `ValueLayout` or its name: row_major, or shuffled_16x16.
      rounding: None, to nearest even; or a `Stochastic`.
      hadamard: None, or a `Hadamard` transform along `axis`; its size divides the length of `axis`.
      window: the elements along `axis` that share one amax: 32, 128, 256 or "row"; or tiles of
        (128, 128), with square blocks.
      rows: (R,) int32: rows of an x (T, K) are quantized, as (R, K). Numbers outside of 0 to
        T - 1 make zeros.
      activation: a `Gated` of an x (..., 2 K), or (..., K) where `Gated.up` has the ups or the
        activation has no gate. Its result (..., K) is quantized; with a gradient, the gradient, of
        x's shape.
      implementation: "cutedsl" (NVIDIA kernels), "flydsl" (AMD kernels), "xla" (plain XLA, runs
        everywhere), or None: the kernel where there is one, else "xla".

    Returns:
      An `MXArray` of x's shape, or of what `rows` or `activation` make of it; with transpose, of
      the shape with `axis` moved last.

    Raises:
      TypeError: x has another dtype, or an argument is of the wrong type.
      ValueError: axis out of range, a length that 32 does not divide, an unknown name.
      NotImplementedError: the named implementation has no kernel for the call, or the call is
        differentiated. A kernel that lacks only the platform or chip raises this when the
        computation is lowered, because only then these are known.
      ShardingTypeError: on a mesh with explicit axes, a shard would split a block.
    """
    preprocessing = preprocessing_of("quantize", rounding, hadamard, window)
    asked = Options(
        formats=(format,),
        axis=axis,
        scaling=scaling,
        scale_layout=scale_layout,
        implementation=implementation,
        transpose=transpose,
        block=block,
        zero_scale=zero_scale,
        value_layouts=(value_layout,),
        preprocessing=(preprocessing,),
    )
    data = (data_of(rounding, hadamard),)
    results: Any = called("quantize", asked, x, data, rows, activation)
    return results if len(results) > 1 else results[0]  # and the results of a source


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
    window: int | str = BLOCK,
    rows: jax.typing.ArrayLike | None = None,
    activation: Gated | None = None,
    implementation: str | None = None,
) -> tuple[MXArray, MXArray]:
    """Quantizes along the last axis and along the one before it.

    Training needs both of each operand: one direction for the forward product, the other for the
    backward one. Where one kernel makes both, x is read once. Two calls of `quantize` give the same
    bytes.

    Args:
      x: (..., M, K). 32 divides K, and M or, with `rows`, their number; otherwise as for
        `quantize`.
      format: of both results.
      formats: one for each result instead (say e4m3 forward, e5m2 backward). One kernel makes both
        if they are equal, or MXFP8's two. From bfloat16, in windows of 32, without `rows` or
        `activation`, one kernel also makes MXFP8 E4M3 and MXFP4 in either order; a Hadamard
        transform of 16 may precede MXFP4. Two kernels make other pairs, and each reads x.
      scaling: see `quantize`.
      scale_layout: of both, see `quantize`.
      transpose: (False, True) or (False, False): whether the second result is (..., K, M). The
        first is never transposed.
      zero_scale: see `quantize`.
      value_layouts: of each, see `quantize`.
      rounding: see `quantize`; a pair, or one for both. The key of one for both is split in
        two: `quantize` with the keys `jax.random.split(key)` gives the same results. The keys of a
        pair stay as they are.
      hadamard: see `quantize`; a pair, or one for both, along the axis of each result.
      window: of both, each along its own axis: 32, 128, 256 or "row", see `quantize`. For (128,
        128) use `quantize`.
      rows: see `quantize`; 32 divides their number.
      activation: see `quantize`.
      implementation: see `quantize`.

    Returns:
      Two `MXArray`s, as `quantize(x, axis=-1)` and `quantize(x, axis=-2, transpose=transpose[1])`
      return them. The first has the shape (..., M, K), the second (..., K, M), or (..., M, K)
      without transpose. `rows` and `activation` change M and K, as for `quantize`.

    Raises:
      TypeError, ValueError, NotImplementedError, ShardingTypeError: as for `quantize`.
    """
    options = pairs("quantize_both", rounding, hadamard)
    asked = Options(
        formats=(format, format) if formats is None else formats,
        scaling=scaling,
        scale_layout=scale_layout,
        implementation=implementation,
        transpose=transpose,
        zero_scale=zero_scale,
        value_layouts=value_layouts,
        preprocessing=tuple(preprocessing_of("quantize_both", *two, window) for two in options),
    )
    data = tuple(data_of(*two) for two in options)
    results: Any = called("quantize_both", asked, x, data, rows, activation)
    return results


def quantizer_of(op: str, format: Any, both: Any, options: dict[str, Any]) -> Any:
    """The quantizer of a function that has the keywords of `quantize`; None without a format.

    Args:
      op: the function, for messages.
      format: of the result; None: nothing is quantized.
      both: whether `quantize_both` quantizes.
      options: other keywords of the quantizer; `activation` is none of them.

    Raises:
      TypeError, ValueError: they do not go together.
    """
    both = flag(op, "both", both)
    if format is None:
        if both or options:
            raise ValueError(f"{op}: format says what is quantized to; give it, or drop the rest")
        return None
    if "activation" in options:
        raise TypeError(
            f"{op}: activation is no option here; quantize what it gives: "
            f"quantize({op}(x){'.floats' * (op == 'rms_norm')}, activation=...)"
        )
    return partial(quantize_both if both else quantize, format=format, **options)
