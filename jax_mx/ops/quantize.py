"""`quantize` and `quantize_both`."""

from functools import partial
from typing import Any

import jax

from jax_mx.arrays.checks import flag
from jax_mx.facts.formats import BLOCK, MXFP8_E4M3, RCEIL, Format, Scaling
from jax_mx.facts.layouts import ROW_MAJOR, ROW_MAJOR_VALUES, ScaleLayout, ValueLayout
from jax_mx.facts.windows import Window
from jax_mx.lowering import partition, store
from jax_mx.ops.activations import Gated
from jax_mx.ops.mxarray import MXArray
from jax_mx.ops.planning import Options
from jax_mx.ops.preprocessing import (
    Hadamard,
    Stochastic,
    data_of,
    pairs,
    preprocessing_of,
)
from jax_mx.ops.quantizing import called

# For jax.export.export(..., disabled_checks=DISABLE_EXPORT_CHECKS): an exported program carries
# its kernels; jax_mx must be imported where it runs.
DISABLE_EXPORT_CHECKS = [
    jax.export.DisabledSafetyCheck.custom_call(target)
    for target in (store.TARGET, partition.TARGET)
]


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
        wants it: values (..., K, M) for an x (..., M, K), axis -2, and row-major scales (..., K,
        M / 32); of a tiled layout their shape is `ScaleLayout.shape(K, M / 32)`.
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
        bfloat16, NVIDIA's kernels read those rows of x themselves, with windows too; else, beside
        an activation, and where XLA splits the program among devices outside of `shard_map`, XLA
        gathers them before.
      activation: a `Gated`, for an x (..., 2 K) of gates and ups: what is quantized is `gated` of
        it, (..., K); of its rows, and those of `up`, where there are `rows`. With a
        gradient, what is quantized is x's, (..., 2 K). Of matrices one kernel computes and
        quantizes, in the cases of a table under "Activations" in docs/formats.md; else XLA
        computes the floats before.
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
    own = preprocessing_of("quantize", rounding, hadamard, window)
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
        preprocessing=(own,),
    )
    data = (data_of(rounding, hadamard),)
    found: Any = called("quantize", asked, x, data, rows, activation)
    return found if len(found) > 1 else found[0]  # and the results of a source


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
      formats: of each, instead (say e4m3 forward, e5m2 backward). One kernel makes both where they
        are the same, or MXFP8's two; and from bfloat16, in windows of 32, without `rows` or
        `activation`, MXFP8 E4M3 and MXFP4 in either order, the latter also behind a Hadamard
        transform of 16. Of other pairs a kernel makes each, from a read of its own.
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
    each = pairs("quantize_both", rounding, hadamard)
    asked = Options(
        formats=(format, format) if formats is None else formats,
        scaling=scaling,
        scale_layout=scale_layout,
        implementation=implementation,
        transpose=transpose,
        zero_scale=zero_scale,
        value_layouts=value_layouts,
        preprocessing=tuple(preprocessing_of("quantize_both", *two, window) for two in each),
    )
    data = tuple(data_of(*two) for two in each)
    found: Any = called("quantize_both", asked, x, data, rows, activation)
    return found


def quantizer_of(op: str, format: Any, both: Any, options: dict[str, Any]) -> Any:
    """What quantizes the floats of a function that has the keywords of `quantize`, or None.

    Args:
      op: the function, for messages.
      format: of the result; None: nothing is quantized.
      both: whether it is by `quantize_both`.
      options: other keywords of that, or of `quantize`, but for an activation.

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
