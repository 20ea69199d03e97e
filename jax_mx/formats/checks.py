"""Checks of single arguments; the sentence of each error says what is allowed."""

import itertools
import operator
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.formats.formats import BLOCK, FLOAT_DTYPES, Format, named
from jax_mx.formats.formats import shown as shown
from jax_mx.formats.layouts import ScaleLayout, ValueLayout
from jax_mx.formats.windows import ROW, TILE, WINDOWS, Window

PACKAGE = Path(__file__).resolve().parents[1]


def whole(value: Any) -> int:
    """The int that a static argument is: also NumPy's and an array's, but no bool or float.

    Raises:
      TypeError: it is none.
    """
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def is_symbolic(length: Any) -> bool:
    """Whether a length is a symbol of an exported program, which no number is compared with."""
    return jax.export.is_symbolic_dim(length)


def one_of(sentence: str, value: Any, allowed: Collection[int]) -> int:
    """The int that a static argument is, one of a few.

    Raises:
      TypeError, ValueError: it is none, with this sentence.
    """
    try:
        number = whole(value)
    except TypeError as error:
        raise TypeError(sentence) from error
    if number not in allowed:
        raise ValueError(sentence)
    return number


def name_among(label: str, names: Collection[str], value: Any) -> str:
    """One of these names.

    Raises:
      TypeError, ValueError: it is none, see `named`.
    """
    return named(label, {name: name for name in names}, value)


def implementation_of(op: str, names: Collection[str], value: Any) -> str | None:
    """The name of an implementation, or None for whichever is the fastest.

    Raises:
      TypeError, ValueError: it is neither.
    """
    return None if value is None else name_among(f"{op}: implementation", names, value)


def padded(length: Any, by: int) -> str:
    """The advice for a length that `by` does not divide."""
    if isinstance(length, int):
        return f"pad it to {-(-length // by) * by}"
    return f"write a symbolic one as a multiple, as in jax.export.symbolic_shape('{by}*n'),"


def held(x: Any) -> Any:
    """The array in a variable that JAX takes for an array, such as flax's nnx.Param; else x."""
    if isinstance(x, jax.Array) or not hasattr(x, "__jax_array__"):
        return x
    return x.__jax_array__()


def array_of(op: str, name: str, x: Any) -> jax.Array:
    """Floats as an array of JAX, whatever the order of their bytes.

    Raises:
      TypeError: they are none of `FLOAT_DTYPES`.
    """
    x = floats(op, x, name)
    dtype = float_dtype(op, name, x.dtype)
    has_elements(op, name, x)
    # A test takes a fifth of the time of asarray, which calls of tiny arrays would feel.
    if isinstance(x, jax.Array) and x.dtype == dtype:
        return x
    return jnp.asarray(x, dtype)


def has_elements(op: str, name: str, x: Any) -> None:
    """Refuses what describes an array, hides elements of one, or has lost them.

    Raises:
      TypeError: it describes one, or has a mask.
      RuntimeError: it was deleted or donated, as JAX says of it.
    """
    if isinstance(x, jax.Array):
        if not isinstance(x, jax.core.Tracer) and x.is_deleted():
            raise RuntimeError(
                f"{op}: {name} is {x.dtype}{[*x.shape]} that was deleted, or donated to another "
                "call; pass a copy there, or what that call returns here"
            )
    elif isinstance(x, jax.ShapeDtypeStruct):
        raise TypeError(f"{op}: {name} is {shown(x)}, without elements; use jax.eval_shape")
    elif isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{op}: {name} has a mask, which JAX lacks; pass its .filled(number)")


def floats(op: str, x: Any, name: str = "x") -> Any:
    """x, an array of JAX or NumPy, or what has a shape and a dtype of NumPy; lists become arrays.

    Raises:
      TypeError: it is none, and nothing that JAX takes for one.
    """
    x = held(x)
    if hasattr(x, "dequantize"):  # an MXArray
        raise TypeError(
            f"{op}: {name} is an MXArray in {x.format.name} already; give floats, as "
            f"{name}.dequantize() does"
        )
    dtype = getattr(x, "dtype", None)
    if isinstance(x, jax.Array):
        return x
    is_array = isinstance(dtype, np.dtype) and not isinstance(x, type)  # as jnp.float32 is
    if is_array and jax.tree_util.all_leaves([x]):  # no QuantizedWeight
        return x
    try:
        if dtype is None:
            return jnp.asarray(x)
    except (TypeError, ValueError):
        pass
    cls = type(x)
    value = shown(x) if cls.__module__ == "builtins" else f"a {cls.__module__}.{cls.__qualname__}"
    way = f"; jax.dlpack.from_dlpack({name}) makes one of it" if hasattr(x, "__dlpack__") else ""
    raise TypeError(f"{op}: {name} is {value}, must be an array of floats of JAX or NumPy{way}")


def float_dtype(op: str, name: str, dtype: Any) -> np.dtype:
    """One of `FLOAT_DTYPES`, in the machine's byte order."""
    allowed = ", ".join(FLOAT_DTYPES)
    try:
        named = jnp.dtype(dtype if dtype is not None else "nothing").newbyteorder("=")
    except (TypeError, ValueError) as error:
        raise TypeError(f"{op}: {name} is {shown(dtype)}, must be one of {allowed}") from error
    if named not in FLOAT_DTYPES.values():
        raise TypeError(f"{op}: {name} is {named.name}, must be one of {allowed}; convert it first")
    return named


def axis_of(op: str, axis: Any, ndim: int) -> int:
    """An axis of `ndim`, negative."""
    try:
        axis = whole(axis)
    except TypeError as error:
        raise TypeError(f"{op}: axis must be an int, got {shown(axis)}") from error
    if ndim == 0:
        raise ValueError(f"{op}: x is a scalar, which has no axis; give it a dimension")
    if not -ndim <= axis < ndim:
        raise ValueError(
            f"{op}: axis {axis} is out of range for rank {ndim}; {-ndim} to {ndim - 1}"
        )
    return axis if axis < 0 else axis - ndim


def block_of(op: str, block: Any) -> tuple[int, ...]:
    """(32,) or (32, 32)."""
    sentence = f"{op}: block must be {BLOCK} or ({BLOCK}, {BLOCK}), got {shown(block)}"
    try:
        lengths = tuple(map(whole, block if isinstance(block, tuple | list) else (block,)))
    except TypeError as error:
        raise TypeError(sentence) from error
    if lengths not in ((BLOCK,), (BLOCK, BLOCK)):
        raise ValueError(sentence)
    return lengths


def window_of(op: str, window: Any, *more: Window) -> Window:
    """One of `WINDOWS`, or of more that an op takes."""
    allowed = ", ".join(repr(choice) for choice in (*WINDOWS[:-1], *more))
    sentence = f"{op}: window must be {allowed} or {WINDOWS[-1]}, got {shown(window)}"
    try:
        if isinstance(window, tuple | list):
            window = tuple(map(whole, window))
        elif not isinstance(window, str):
            window = whole(window)
    except TypeError as error:
        raise TypeError(sentence) from error
    if window not in (*WINDOWS, *more):
        raise ValueError(sentence)
    return cast(Window, window)


def blocks_in(op: str, window: Window, block: tuple[int, ...]) -> tuple[int, ...]:
    """The blocks of an array with this window, for those that were asked for.

    Raises:
      ValueError: they do not go together.
    """
    if window == TILE:
        if op == "quantize_both":
            raise ValueError(
                f"{op}: in windows of {TILE} one array serves both directions; use quantize(x, "
                f"window={TILE})"
            )
        return BLOCK, BLOCK
    if len(block) == 2 and window != BLOCK:
        raise ValueError(
            f"{op}: square blocks have a window of {BLOCK}, each its own, or {TILE}, got "
            f"{window!r}; windows of 128, 256 and {ROW!r} run along one axis, use block={BLOCK}"
        )
    return block


def zero_scale_of(op: str, value: Any) -> int:
    """0 or 127."""
    sentence = (
        f"{op}: zero_scale, the scale of all-zero blocks, must be 0 (2^-127) or 127 (1.0), got "
        f"{shown(value)}"
    )
    return one_of(sentence, value, (0, 127))


def flag(op: str, name: str, value: Any) -> bool:
    """A bool."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{op}: {name} must be a bool, got {shown(value)}")
    return bool(value)


def blocks_fit(op: str, block: tuple[int, ...], axis: int, layout: ScaleLayout, ndim: int) -> None:
    """Checks that an array of rank `ndim` can have such blocks, and their scales lie so."""
    if layout.is_tiled and ndim < 2:
        raise ValueError(
            f"{op}: scale_layout {layout.name!r} tiles a matrix's rows and columns, the array has "
            f"rank {ndim}; use 'row_major' or a matrix"
        )
    if len(block) == 1:
        return
    if ndim < 2:
        raise ValueError(f"{op}: square blocks span two axes, the array has rank {ndim}")
    if axis != -1:
        raise ValueError(
            f"{op}: square blocks span the last two axes; leave axis at -1, got {axis}"
        )
    if layout.is_tiled:
        raise ValueError(
            f"{op}: square blocks have row-major scales; for {layout.name!r} expand them: "
            f"quantize(x, block={block}).expand(axis, {layout.name!r})"
        )


def swaps_fit(op: str, ndim: int) -> None:
    """Checks that an array of rank `ndim` has two axes to swap."""
    if ndim < 2:
        raise ValueError(f"{op}: transpose swaps the last two axes, the array has rank {ndim}")


def pairs_fit(op: str, ndim: int, **pairs: Any) -> None:
    """Checks what a caller asks for each of two directions, by the arguments' names.

    Raises:
      TypeError, ValueError: see `jax_mx.quantize_both`.
    """
    if ndim < 2:
        raise ValueError(f"{op}: x has rank {ndim}; two directions need a matrix")
    for name, pair in pairs.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(
                f"{op}: {name} must be a pair, for the last axis and the one before, got "
                f"{shown(pair)}"
            )
    if flag(op, "transpose[0]", pairs["transpose"][0]):
        raise ValueError(
            f"{op}: transpose[0] is the result along the last axis, whose blocks are contiguous as "
            "they are; use (False, True) or (False, False)"
        )


def whole_blocks(
    op: str, shape: tuple[int, ...], axes: Sequence[int], transforms: Sequence[int]
) -> None:
    """Checks that blocks, and transforms of these sizes (0: none), divide the axes they run along.

    Raises:
      ValueError: they do not; says what to do.
    """
    for axis, size in itertools.zip_longest(axes, transforms, fillvalue=0):
        length = shape[axis]
        if length % BLOCK:
            raise ValueError(
                f"{op}: axis {axis} has length {length}, not a multiple of the block length "
                f"{BLOCK}; {padded(length, BLOCK)} or choose another axis of {tuple(shape)}"
            )
        if size and length % size:
            raise ValueError(
                f"{op}: axis {axis} has length {length}, not a multiple of {size}, the size of its "
                f"Hadamard transform; {padded(length, size)} or use a smaller one"
            )


def values_fit(
    op: str,
    layout: ValueLayout,
    axis: int,
    shape: tuple[int, ...],
    format: Format,
    moved: bool = False,
) -> None:
    """Checks that values with blocks along `axis` of an array of `shape` can lie so.

    Args:
      op: for the message.
      layout: of the values.
      axis: that blocks run along.
      shape: of the array.
      format: of the values.
      moved: whether the values lie with this axis last.

    Raises:
      ValueError: they cannot; says why.
    """
    if not layout.is_tiled:
        return
    if moved:
        rest = [*shape]
        length = rest.pop(axis)
        shape, axis = (*rest, length), -1
    if axis != -1 or len(shape) < 2:
        raise ValueError(
            f"{op}: value_layout {layout.name!r} tiles a matrix whose rows end with the block "
            f"axis, the array has the shape {tuple(shape)} and axis {axis}; use transpose=True or "
            "'row_major'"
        )
    rows, size = shape[-2], shape[-1] // format.codes_per_byte
    if rows % layout.tile[0] or size % layout.tile[1]:
        raise ValueError(
            f"{op}: value_layout {layout.name!r} has tiles of {layout.tile[0]} rows and "
            f"{layout.tile[1]} bytes, which do not divide {rows} rows of {size} bytes; use "
            "'row_major' or pad the array (write symbolic lengths as multiples)"
        )


def depth() -> int:
    """The stack level of `warnings.warn` that shows the user's line, in no library's frame."""
    libraries = tuple(f"{folder}{os.sep}" for folder in (PACKAGE, Path(jax.__file__).parent))
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(libraries):
        level, frame = level + 1, frame.f_back
    return level
