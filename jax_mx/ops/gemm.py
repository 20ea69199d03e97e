"""Products that read MX operands as they lie, with kernels on Hopper.

`gemm` takes an MX array and floats, `gemm_fp8` two MX arrays; `gemm_wgrad` is the gradient of the
weights of groups.

They have no derivative; what has one is made of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.arrays.checks import flag, float_dtype, implementation_of, is_symbolic, shown
from jax_mx.facts.formats import BLOCK, Format
from jax_mx.facts.layouts import ROW_MAJOR, ROW_MAJOR_VALUES
from jax_mx.facts.products import PRODUCTS, TILE, UNIT, fp8_rows
from jax_mx.facts.windows import ROW
from jax_mx.lowering import products, registry
from jax_mx.lowering.plan import ProductPlan
from jax_mx.ops.mxarray import MXArray, checked, dequantize

WINDOWS = (128, 256, ROW)  # of the FP8 product
# How many rows of x tiles may have, in ascending order: each tiling is a kernel.
ROWS = tuple(sorted({p.rows for p in PRODUCTS if p.op in ("matmul", "matmul_fp8")}))
# Tiles of 256 rows, so many, take half of a Hopper's multiprocessors: twice as many of 128 rows are
# faster. On an H200, K 7168, N 4096, 2026-11-24: 256 rows 71 us and 33, 512 rows 73 and 53; 1024
# rows, which are 128 tiles, 79 and 105.
_FEW_TILES = 66
_DEPTH = 64  # rows that wgrad contracts at a time
FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))  # of x


def gemm(
    x: jax.Array,
    w: MXArray,
    group_sizes: jax.Array | None = None,
    *,
    contracting: int = -1,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
    tile: int | None = None,
) -> jax.Array:
    """x @ dequantize(w)^T, or without ^T (`contracting`), added up in float32, w read as it lies.

    Args:
      x: bfloat16 or float16 (..., M, K); with group_sizes (T, K), rows sorted by group.
      w: blocks along the last axis, row-major scales, any format: (N, K) for all of x, or (G, N, K)
        where x is (G, M, K) or has group_sizes.
      group_sizes: int32 (G,), how many rows each group has. Rows behind the last group's give 0; of
        more rows than x has, those that are beyond do not count, and negative sizes are 0.
      contracting: the axis of w that is summed over; -2: w is (K, N) or (G, K, N), blocks still
        along the last axis. So the gradient of x reads the codes that the product itself reads.
      preferred_element_type: of the result, x's dtype by default: bfloat16, float16 or float32.
      implementation: None: the kernel where there is one, else "xla"; a named one that cannot serve
        raises and says why.
      tile: how many rows of x the kernel's tiles have, one of `ROWS`; None: as many as the
        shapes ask for.

    Returns:
      (..., M, N). A NaN of w makes its column NaN for all rows of x, and a scale of 255 those of
      its block.

    Raises:
      TypeError: an operand or dtype is none of these.
      ValueError: shapes that do not fit each other, blocks along another axis, other layouts.
      NotImplementedError: the named implementation does not serve the call.
    """
    op = "gemm"
    if isinstance(x, MXArray) or not hasattr(x, "dtype") or jnp.dtype(x.dtype) not in FLOATS:
        found = type(x).__name__
        found = found if isinstance(x, MXArray) else getattr(x, "dtype", found)
        raise TypeError(f"{op}: x is {found}, must be bfloat16 or float16")
    w = _matrices(op, "w", w)
    x = jnp.asarray(x)
    if type(contracting) is not int or contracting not in (-1, -2):
        raise ValueError(f"{op}: contracting must be -1 or -2, an axis of w, got {contracting!r}")
    _fits(op, x.shape, w, group_sizes, contracting)
    columns = w.shape[-2 if contracting == -1 else -1]
    result = float_dtype(op, "preferred_element_type", preferred_element_type or x.dtype)
    plan = plan_of(
        (w.format,),
        result,
        _rows(x.shape, w),
        grouped=group_sizes is not None,
        implementation=implementation_of(op, registry.IMPLEMENTATIONS, implementation),
        free=contracting == -2,
        strips=strips_of(w.shape[0] if w.ndim == 3 else 1, columns),
        tile=tile,
    )
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y = _gemm(flat, w, _sizes(group_sizes), plan)
    return y.reshape(*x.shape[:-1], columns)


@functools.partial(jax.jit, static_argnames="plan")
def _gemm(x: jax.Array, w: MXArray, sizes: list, plan: ProductPlan) -> jax.Array:
    if 0 in x.shape or 0 in w.shape:
        return jnp.zeros((x.shape[0], w.shape[-1 if plan.free else -2]), plan.dtype)
    if plan.free and x.shape[1] % UNIT:
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % UNIT)))
    return products.product([_in_parts(x), *_arrays(w), *sizes], plan)


def gemm_fp8(
    x: MXArray,
    w: MXArray,
    group_sizes: jax.Array | None = None,
    *,
    window: int | str = 128,
    tiles: bool = False,
    preferred_element_type: jax.typing.DTypeLike = jnp.bfloat16,
    implementation: str | None = None,
    tile: int | None = None,
) -> jax.Array:
    """dequantize(x) @ dequantize(w)^T on FP8 tensor cores, for arrays whose scales come in windows.

    The caller vouches for the windows: where scales differ within one, the result is another
    product's. FP8 tensor cores cut each product at 2^-13 of the largest one and of the window's sum
    so far. So an element is off by at most window * 2^-13 * sum |x||w|. Measured on an H200 for K
    from 128 to 65,536: by at most 4e-4 * sum |x||w| where numbers are normal (of y's norm 1.3e-4
    for windows of 128, 2.1e-4 for 256), 4e-3 * sum |x||w| where all have one sign, and
    2.1e-2 * sum |x||w| where one product in each window is 2^13 times the others.

    Args:
      x: MXFP8 (..., M, K), blocks along the last axis, row-major scales; as `gemm` has it.
      w: MXFP8 (N, K) or (G, N, K), likewise.
      group_sizes: see `gemm`.
      window: 128 or 256 consecutive elements along K have one scale, in both operands; "row": all
        have, and sums are as exact as those of windows of 256.
      tiles: whether 128 rows of w share them, too, row 0 being the first of a tile; not of "row".
      preferred_element_type: of the result: bfloat16, float16 or float32.
      implementation: see `gemm`; "xla" multiplies in float32.
      tile: see `gemm`.

    Returns:
      (..., M, N); see `gemm`.

    Raises:
      TypeError, ValueError, NotImplementedError: see `gemm`.
    """
    op = "gemm_fp8"
    x, w = _eights(op, window, WINDOWS, x=x, w=w)
    tiles = flag(op, "tiles", tiles)
    if window == ROW and tiles:
        raise ValueError(f"{op}: a window that is a row has no tiles; use window=128 or 256")
    _fits(op, x.shape, w, group_sizes)
    result = float_dtype(op, "preferred_element_type", preferred_element_type)
    plan = plan_of(
        (x.format, w.format),
        result,
        _rows(x.shape, w),
        window,
        tiles,
        group_sizes is not None,
        implementation_of(op, registry.IMPLEMENTATIONS, implementation),
        tile=tile,
    )
    y = _gemm_fp8(x, w, _sizes(group_sizes), plan)
    return y.reshape(*x.shape[:-1], w.shape[-2])


@functools.partial(jax.jit, static_argnames="plan")
def _gemm_fp8(x: MXArray, w: MXArray, sizes: list, plan: ProductPlan) -> jax.Array:
    if 0 in x.shape or 0 in w.shape:
        return jnp.zeros((math.prod(x.shape[:-1]), w.shape[-2]), plan.dtype)
    flat = [a.reshape(-1, a.shape[-1]) for a in (x.values, x.scales)]
    return products.product([*flat, *_arrays(w), *sizes], plan)


def gemm_wgrad(
    a: MXArray | jax.Array,
    b: MXArray | jax.Array,
    group_sizes: jax.Array | None = None,
    *,
    window: int = 128,
    preferred_element_type: jax.typing.DTypeLike = jnp.bfloat16,
    implementation: str | None = None,
) -> jax.Array:
    """The gradient of weights: the sum over rows of x and of y's gradient, for each group.

    It is what jax.lax.ragged_dot_general computes where its ragged dimension is contracted: of a
    layer of experts the weights' gradient, R being the tokens. Floats lie as a layer has them,
    tokens first; MX arrays have tokens last, as blocks run along them (`quantize_both`'s second
    result, transposed).

    Two MXFP8 arrays in windows of 128 or 256 are multiplied on FP8 tensor cores, added up as
    `gemm_fp8` does. Each group begins at a multiple of the window and has a multiple of it: rows of
    zeros fill it up. The caller vouches for that, as for the windows; sizes that are no multiples
    give other sums. Floats, and with window=32 any MX arrays, are multiplied as bfloat16 or float16
    and added up in float32, groups beginning anywhere: a kernel makes bfloat16 of MX arrays first.

    Args:
      a: bfloat16 or float16 (..., R, M), or any MX array (..., M, R).
      b: of the same dtype (..., R, N), or any MX array (..., N, R). Beside an MX array floats are
        bfloat16. In windows both are MXFP8 (M, R) and (N, R), in blocks along the last axis, with
        row-major scales.
      group_sizes: int32 (G,), how many elements of R each group has; without, all are one group's,
        which windows do not have. With sizes there are no leading dimensions. What is behind the
        last group's is not read; of more than R has, those that are beyond do not count, and
        negative sizes are 0.
      window: of two MX arrays; 128 or 256 consecutive elements along R have one scale, in both
        operands, or 32: blocks of their own.
      preferred_element_type: see `gemm_fp8`.
      implementation: see `gemm_fp8`.

    Returns:
      (G, M, N), or without sizes (..., M, N). An empty group's are zeros; a NaN of a group is in
      its own results alone.

    Raises:
      TypeError, ValueError, NotImplementedError: see `gemm`.
    """
    op = "gemm_wgrad"
    implementation = implementation_of(op, registry.IMPLEMENTATIONS, implementation)
    result = float_dtype(op, "preferred_element_type", preferred_element_type)
    if window not in (allowed := (BLOCK, *WINDOWS[:2])):
        raise ValueError(f"{op}: window must be one of {allowed}, got {window!r}")
    call: Callable[..., jax.Array]
    if isinstance(a, MXArray) and isinstance(b, MXArray) and window != BLOCK:
        a, b = _eights(op, window, WINDOWS[:2], a=a, b=b)
        shape, terms, call = _of_windows(op, a, b, group_sizes), a.shape[1], _gemm_wgrad
        plan = wgrad_plan_of((a.format, b.format), result, window, implementation)
    else:
        a, b = (_rows_of(op, name, x, implementation) for name, x in (("a", a), ("b", b)))
        shape, terms, call = _of_floats(op, a, b, group_sizes), a.shape[-2], _floats_wgrad
        plan = floats_plan_of(a.dtype, result, group_sizes is not None, implementation)
    if 0 in (*shape, terms):
        return jnp.zeros(shape, result)
    return call(a, b, _sizes(group_sizes), plan)


@functools.partial(jax.jit, static_argnames="plan")
def _gemm_wgrad(a: MXArray, b: MXArray, sizes: list, plan: ProductPlan) -> jax.Array:
    return products.product([a.values, a.scales, b.values, b.scales, *sizes], plan)


def _of_windows(op: str, a: MXArray, b: MXArray, sizes: jax.Array | None) -> tuple[int, ...]:
    """The shape of `gemm_wgrad`'s result, of two arrays in windows."""
    groups, dtype = getattr(sizes, "shape", None), getattr(sizes, "dtype", None)
    fits = a.ndim == b.ndim == 2 and a.shape[1] == b.shape[1]
    if not fits or groups is None or len(groups) != 1 or dtype != jnp.int32:
        found = shown(sizes) if dtype is None else f"{dtype} {groups}"
        raise ValueError(
            f"{op}: a is (M, R), b (N, R) and the sizes int32 (G,); got {a.shape}, {b.shape} and "
            f"{found}"
        )
    return *groups, a.shape[0], b.shape[0]


def _rows_of(op: str, name: str, x: MXArray | jax.Array, implementation: str | None) -> jax.Array:
    """An operand of `gemm_wgrad` in floats, its rows before its columns."""
    if isinstance(x, MXArray):
        if x.ndim < 2:
            raise ValueError(f"{op}: {name} has the shape {x.shape}, must have two axes at least")
        plain = "xla" if implementation == "xla" else None
        return dequantize(checked(op, name, x), transpose=True, implementation=plain)
    if not hasattr(x, "dtype") or jnp.dtype(x.dtype) not in FLOATS:
        found = getattr(x, "dtype", type(x).__name__)
        raise TypeError(f"{op}: {name} is {found}, must be an MXArray, bfloat16 or float16")
    return jnp.asarray(x)


def _of_floats(op: str, a: jax.Array, b: jax.Array, sizes: jax.Array | None) -> tuple[int, ...]:
    """The shape of `gemm_wgrad`'s result, of floats."""
    if a.dtype != b.dtype:
        raise TypeError(
            f"{op}: a is {a.dtype} and b is {b.dtype}; both must be of one dtype, beside an "
            "MXArray of bfloat16"
        )
    lead, fits = a.shape[:-2], a.ndim > 1 and a.shape[:-1] == b.shape[:-1]
    found = ""
    if sizes is not None:
        lead, dtype = getattr(sizes, "shape", ()), getattr(sizes, "dtype", None)
        fits = fits and a.ndim == 2 and len(lead) == 1 and dtype == jnp.int32
        found = f" and {dtype} {lead}"
    if not fits:
        raise ValueError(
            f"{op}: floats are (..., R, M) and (..., R, N), MX arrays (..., M, R) and (..., N, R), "
            f"with sizes, int32 (G,), of two dimensions; got {a.shape}, {b.shape}{found}, axes in "
            "the order of floats"
        )
    return *lead, a.shape[-1], b.shape[-1]


@functools.partial(jax.jit, static_argnames="plan")
def _floats_wgrad(a: jax.Array, b: jax.Array, sizes: list, plan: ProductPlan) -> jax.Array:
    m, n = a.shape[-1], b.shape[-1]
    # The copy engine wants rows of whole 16 bytes.
    a, b = _padded(a, -m % 8), _padded(b, -n % 8)
    return products.product([a, b, *sizes], plan)[..., :m, :n]


def _padded(x: jax.Array, columns: int) -> jax.Array:
    """The array with so many more columns, of zeros."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, columns)]) if columns else x


def plan_of(
    formats: tuple[Format, ...],
    dtype: np.dtype,
    rows: float,
    window: int | str = BLOCK,
    tiles: bool = False,
    grouped: bool = False,
    implementation: str | None = None,
    free: bool = False,
    strips: float = math.inf,
    tile: int | None = None,
) -> ProductPlan:
    """The plan of `gemm`, of one format, or `gemm_fp8`, of two.

    `strips`: how many tiles lie beside each other, of all groups. `tile`: how many rows tiles have,
    whatever the shapes ask for.
    """
    op = "matmul" if len(formats) == 1 else "matmul_fp8"
    if tile is None:
        few = op == "matmul"
        tile = _tile_for(rows, strips) if few else _fp8_tile_for(rows, window, tiles, grouped)
        tile = max(tile, TILE) if free else tile  # there are none of fewer rows
    return ProductPlan(op, formats, dtype, grouped, tile, window, tiles, implementation, free)


def wgrad_plan_of(
    formats: tuple[Format, ...],
    dtype: np.dtype,
    window: int | str,
    implementation: str | None = None,
) -> ProductPlan:
    """The plan of `gemm_wgrad`."""
    plan = plan_of(formats, dtype, TILE, window, grouped=True, implementation=implementation)
    return dataclasses.replace(plan, op="wgrad_fp8")


def floats_plan_of(
    floats: jax.typing.DTypeLike,
    dtype: np.dtype,
    grouped: bool = True,
    implementation: str | None = None,
) -> ProductPlan:
    """The plan of `gemm_wgrad` of floats."""
    name = jnp.dtype(floats).name
    return ProductPlan(
        "wgrad", (), dtype, grouped, _DEPTH, implementation=implementation, floats=name
    )


# ---- operands ---
def _matrices(op: str, name: str, q: MXArray) -> MXArray:
    """An operand whose rows kernels read: blocks along the last axis, nothing in tiles."""
    q = checked(op, name, q)
    if q.axis != -1 or q.block != (BLOCK,):
        raise ValueError(
            f"{op}: {name} has blocks of {q.block} along axis {q.axis}; the product is over blocks "
            f"of {BLOCK} along the last axis: quantize along the axis that is to be last with "
            "transpose=True, or expand square blocks"
        )
    if q.scale_layout != ROW_MAJOR or q.value_layout != ROW_MAJOR_VALUES:
        raise ValueError(
            f"{op}: {name} has scales in {q.scale_layout.name!r} and values in "
            f"{q.value_layout.name!r}; the product reads both in 'row_major'"
        )
    return q


def _eights(
    op: str, window: int | str, windows: tuple[int | str, ...], **operands: MXArray
) -> list[MXArray]:
    """Two operands, by their names, that FP8 tensor cores take in one of the windows."""
    found = [_matrices(op, name, q) for name, q in operands.items()]
    for name, q in zip(operands, found, strict=True):
        if q.format.bits != 8:
            raise TypeError(
                f"{op}: {name} is {q.format!r}; FP8 tensor cores take MXFP8"
                + "; window=32 multiplies others as bfloat16" * (op == "gemm_wgrad")
            )
    if window not in windows:
        raise ValueError(f"{op}: window must be one of {windows}, got {window!r}")
    return found


def _fits(op: str, shape: tuple[int, ...], w: MXArray, group_sizes, contracting: int = -1) -> None:
    """Refuses shapes that do not fit each other."""
    matrix = "N, K" if contracting == -1 else "K, N"
    if len(shape) < 2 or w.ndim not in (2, 3) or shape[-1] != w.shape[contracting]:
        raise ValueError(
            f"{op}: x of the shape {shape} and w of the shape {w.shape}; they must be (..., M, K) "
            f"and ({matrix}) or (G, {matrix})"
        )
    if group_sizes is None:
        if w.ndim == 3 and (len(shape) != 3 or shape[0] != w.shape[0]):
            raise ValueError(
                f"{op}: x of the shape {shape} has not a matrix for each of the {w.shape[0]} of w, "
                f"{w.shape}; pass group_sizes, or an x of the shape ({w.shape[0]}, M, K)"
            )
        return
    found = getattr(group_sizes, "shape", None), getattr(group_sizes, "dtype", None)
    sizes = shown(group_sizes) if found[1] is None else f"{found[1]} {found[0]}"
    if w.ndim != 3 or len(shape) != 2 or found != ((w.shape[0],), jnp.int32):
        raise ValueError(
            f"{op}: with group_sizes x is (T, K), w (G, {matrix}) and the sizes int32 (G,); got "
            f"{shape}, {w.shape} and {sizes}"
        )


def _tile_for(rows: float, strips: float) -> int:
    """How many rows a tile should have where groups have so many."""
    most = ROWS[-1]
    if is_symbolic(rows):
        return most
    few = math.ceil(rows / most) * strips <= _FEW_TILES
    allowed = ROWS[:-1] if few else ROWS
    return next((n for n in allowed if rows <= n), allowed[-1])


def strips_of(groups: int, columns: int) -> float:
    """How many tiles of `gemm` lie beside each other."""
    if is_symbolic(groups) or is_symbolic(columns):
        return math.inf
    return groups * math.ceil(columns / TILE)


def _fp8_tile_for(rows: float, window: int | str, tiles: bool, grouped: bool) -> int:
    """The same of two MX operands: the most that leave few thread blocks without rows."""
    *more, least = fp8_rows(window, tiles)
    if grouped or is_symbolic(rows):
        return least
    return next((n for n in more if -rows % n < max(least, rows / 16)), least)


def _rows(shape: tuple[int, ...], w: MXArray) -> float:
    """How many rows of x a group has, about."""
    return rows_of_each(math.prod(shape[:-1]), w.shape[0] if w.ndim == 3 else 1)


def rows_of_each(total: int, groups: int) -> float:
    """How many of so many rows a group has, about; of a symbolic number all."""
    return total if is_symbolic(total) else total / max(groups, 1)


def _in_parts(x: jax.Array) -> jax.Array:
    """x in bfloat16: of float16 (T, 2 K), two parts beside each other whose sum is x."""
    if x.dtype == jnp.bfloat16:
        return x
    # Not by a cast and back, which XLA may leave out.
    high = jax.lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
    low = jnp.where(jnp.isfinite(high), x.astype(jnp.float32) - high, 0)
    return jnp.concatenate([high, low], axis=-1).astype(jnp.bfloat16)


def _arrays(w: MXArray) -> list[jax.Array]:
    """Its codes and scales, (G, N, ...)."""
    return [a[None] if w.ndim == 2 else a for a in (w.values, w.scales)]


def _sizes(sizes: jax.Array | None) -> list[jax.Array]:
    return [] if sizes is None else [sizes]
