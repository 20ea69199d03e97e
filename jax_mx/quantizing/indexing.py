"""Parts and rearrangements of an MXArray; an error explains what values and scales cannot follow.

The array may have any layout. A cut through tiles takes scales out of their tiles, and puts them
into new ones.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.formats import views
from jax_mx.formats.checks import axis_of, blocks_fit, is_symbolic, shown, values_fit
from jax_mx.formats.formats import BLOCK
from jax_mx.formats.layouts import ROW_MAJOR, ROW_MAJOR_VALUES, ScaleLayout, ValueLayout
from jax_mx.formats.views import moved_last, stored_shape
from jax_mx.formats.windows import ROW, Window

if TYPE_CHECKING:
    from jax_mx.quantizing.mxarray import MXArray

FULL = slice(None)


# ---- layouts ---
def with_values(op: str, q: MXArray, layout: ValueLayout) -> MXArray:
    """The array with its values in this layout; see `MXArray.with_values_in`."""
    if layout == q.value_layout:
        return q
    values = q.values
    if q.value_layout.is_tiled:
        values = views.unpack(q.value_layout, values, *q.value_layout.rows_cols(values.shape))
    values_fit(op, layout, q.axis, q.shape, q.format)
    return dataclasses.replace(q, values=views.pack(layout, values), value_layout=layout)


def with_scales(op: str, q: MXArray, layout: ScaleLayout) -> MXArray:
    """The array with its scales in this layout; see `MXArray.with_scales_in`."""
    if layout == q.scale_layout:
        return q
    blocks_fit(op, q.block, q.axis, layout, q.ndim)
    scales = q.scales
    if q.scale_layout.is_tiled:
        *_, rows, length = moved_last(q.shape, q.axis)
        scales = views.unpack(q.scale_layout, scales, rows, length // BLOCK)
        scales = jnp.moveaxis(scales, -1, q.axis)
    if layout.is_tiled:
        scales = views.pack(layout, jnp.moveaxis(scales, q.axis, -1))
    return dataclasses.replace(q, scales=scales, scale_layout=layout)


def _in_rows(op: str, q: MXArray) -> MXArray:
    return with_scales(op, with_values(op, q, ROW_MAJOR_VALUES), ROW_MAJOR)


def _in_layouts_of(op: str, q: MXArray, like: MXArray) -> MXArray:
    return with_scales(op, with_values(op, q, like.value_layout), like.scale_layout)


def _is_tiled(q: MXArray) -> bool:
    return q.scale_layout.is_tiled or q.value_layout.is_tiled


def _block_axes(q: MXArray) -> tuple[int, ...]:
    return (-2, -1) if len(q.block) == 2 else (q.axis,)


# ---- q[...] ---
def indexed(op: str, q: MXArray, index: Any) -> MXArray:
    """`q[index]`; see `MXArray.__getitem__`."""
    entries, places = _entries(op, q, index)
    if _is_tiled(q) and q.axis >= -2:
        *lead, rows, cols = entries
        if places[-2] == len(lead) and _is_full(rows) and _is_full(cols):  # of whole matrices
            arrays = {name: getattr(q, name)[tuple(lead)] for name in ("values", "scales")}
            return dataclasses.replace(q, **arrays)
    whole = {axis: _whole_blocks(op, q, axis, entries[places[axis]]) for axis in _block_axes(q)}
    axes = _places_after(q.ndim, entries, [places[axis] for axis in whole])
    if len(axes) == 2 and axes != [-2, -1]:
        raise ValueError(f"{op}: square blocks span the last two axes, which must stay the last")
    rows = _in_rows(op, q)
    arrays = {}
    for name, by in (
        ("values", {q.axis: q.format.codes_per_byte}),
        ("scales", dict.fromkeys(whole, BLOCK)),
    ):
        part_index = list(entries)
        for axis, part in whole.items():
            per = by.get(axis, 1)
            part_index[places[axis]] = FULL if _is_full(part) else slice(part.start // per,
                                                                  part.stop // per)  # fmt: skip
        arrays[name] = getattr(rows, name)[tuple(part_index)]
    window = _window_of_part(q, entries, places)
    rows = dataclasses.replace(rows, axis=axes[-1], window=window, **arrays)
    return _in_layouts_of(op, rows, q)


def window_axes(q: MXArray) -> tuple[int, ...]:
    """The axes that a window of q spans; of tiles, also where each block runs along one of them."""
    return (-2, -1) if isinstance(q.window, tuple) else _block_axes(q)


def _window_from(q: MXArray, starts: Iterable[int]) -> Window:
    """The window of an array whose axes begin at these elements of q's; 32 where windows are cut.

    A part of a row has equal scales as the row has.
    """
    length = q.window[0] if isinstance(q.window, tuple) else q.window
    if isinstance(length, int) and any(start % length for start in starts):
        return BLOCK
    return q.window


def _window_of_part(q: MXArray, entries: list, places: Mapping[int, int]) -> Window:
    """The window of `q[index]`; 32 where it is no slice of whole windows."""
    starts = []
    axes = window_axes(q)
    for axis in axes:
        entry = entries[places[axis]]
        if _is_full(entry):
            continue
        taken = _taken(entry, q.shape[axis])
        if taken is None or taken.step != 1:
            return BLOCK
        starts.append(taken.start)
    if isinstance(q.window, tuple):
        if _places_after(q.ndim, entries, [places[axis] for axis in axes]) != [-2, -1]:
            return BLOCK
    return _window_from(q, starts)


def _is_full(entry: Any) -> bool:
    return isinstance(entry, slice) and entry == FULL


def _entries(op: str, q: MXArray, index: Any) -> tuple[list, dict[int, int]]:
    """The index with an entry for each axis, beside None's; and where that of each axis stands."""
    parts = [*index] if isinstance(index, tuple) else [index]
    taken = sum(_axes_of(op, entry) for entry in parts)
    dots = [i for i, entry in enumerate(parts) if entry is Ellipsis]
    if len(dots) > 1:
        raise IndexError(f"{op}: an index has one ... at most, got {shown(index)}")
    if taken > q.ndim:
        raise IndexError(f"{op}: {shown(index)} has too many indices for the shape {q.shape}")
    at = dots[0] if dots else len(parts)
    parts[at : at + 1] = [FULL] * (q.ndim - taken)
    entries: list[Any] = []
    axis = 0
    for entry in parts:
        if _is_mask(entry):
            if entry.shape != q.shape[axis : axis + entry.ndim]:
                raise IndexError(f"{op}: a mask {entry.shape} does not fit the shape {q.shape}")
            entries += jnp.nonzero(entry)
        else:
            entries.append(int(entry) if isinstance(entry, np.integer) else entry)
        axis += _axes_of(op, entry)
    places = [i for i, entry in enumerate(entries) if entry is not None]
    for axis, at_entry in enumerate(places):
        entry, length = entries[at_entry], q.shape[axis]
        if isinstance(entry, int) and isinstance(length, int) and not -length <= entry < length:
            raise IndexError(
                f"{op}: index {entry} is out of range for axis {axis} of length {length}"
            )
        _require_counted(entry, length)
    return entries, {axis - q.ndim: at_entry for axis, at_entry in enumerate(places)}


def _require_counted(entry: Any, length: Any) -> None:
    """Raises OverflowError for an array of numbers of which JAX makes negative ones: past int32."""
    most, dtype = np.iinfo(np.int32).max, getattr(entry, "dtype", np.dtype(np.int32))
    is_short = (
        is_symbolic(length)
        or length - 1 <= most
        or jax.dtypes.canonicalize_dtype(np.int64).itemsize > 4
    )
    if not is_short and jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).max > most:
        raise OverflowError(f"{dtype} beyond int32")


def _is_mask(entry: Any) -> bool:
    return getattr(entry, "dtype", None) == np.bool_ and entry.ndim > 0


def _axes_of(op: str, entry: Any) -> int:
    """How many axes an entry of an index takes: a mask those that it has, None and ... none."""
    if entry is None or entry is Ellipsis:
        return 0
    if _is_mask(entry):
        return entry.ndim
    dtype = getattr(entry, "dtype", None)
    if isinstance(entry, slice) or (dtype is not None and jnp.issubdtype(dtype, jnp.integer)):
        return 1
    if isinstance(entry, int) and not isinstance(entry, bool):
        return 1
    raise TypeError(
        f"{op}: an index has ints, slices, None, ... and arrays of ints or bools, got "
        f"{shown(entry)}"
    )


def _whole_blocks(op: str, q: MXArray, axis: int, entry: Any) -> slice:
    """The entry of an axis that blocks run along."""
    if _is_full(entry):
        return entry
    length = q.shape[axis]
    taken = _taken(entry, length)
    if taken is None and isinstance(entry, slice) and is_symbolic(length):
        raise ValueError(
            f"{op}: what {shown(entry)} takes of axis {axis} depends on its length {length}; "
            f"take from a multiple of {BLOCK} to the end, or to one that is not beyond it, as "
            "constraints of jax.export.symbolic_shape can say"
        )
    if taken is not None and taken.step == 1 and taken.start % BLOCK == 0:
        if taken.stop is length or taken.stop % BLOCK == 0:
            return slice(taken.start, taken.stop)
    raise ValueError(
        f"{op}: blocks of {BLOCK} run along axis {axis} of length {length}, and stay whole: "
        f"index it with a slice from and to multiples of {BLOCK}, got {shown(entry)}"
    )


def _taken(entry: Any, length: Any) -> slice | None:
    """The part of an axis that an entry takes, as a slice: start, a stop not before it, step.

    A stop at the axis' end is `length` itself.

    Returns:
      None if the entry is no slice, has arrays in it, or depends on a symbolic length.
    """
    if not isinstance(entry, slice):
        return None
    try:
        if not is_symbolic(length):
            start, stop, step = entry.indices(length)
            return slice(start, max(start, stop), step)
        start, step = operator.index(entry.start or 0), operator.index(entry.step or 1)
        stop = length
        if entry.stop is not None and entry.stop != length:
            stop = max(start, operator.index(entry.stop))
        known = 0 <= start <= length and stop <= length and step > 0
        return slice(start, stop, step) if known else None
    except (TypeError, jax.errors.InconclusiveDimensionOperation):
        return None


def _places_after(ndim: int, entries: list, places: list[int]) -> list[int]:
    """Where axes lie in the indexed array, negative; `places` says where their entries stand."""
    axes = []
    index = tuple(FULL if i in places else entry for i, entry in enumerate(entries))
    for at_entry in places:
        shapes = []
        for length in (1, 2):  # the axis is where this makes a difference
            lengths = (
                length if i == at_entry else 2**20 for i, e in enumerate(index) if e is not None
            )
            abstract = jax.ShapeDtypeStruct((*lengths,), jnp.uint8)
            shapes.append(jax.eval_shape(lambda a: a[index], abstract).shape)
        pairs = list(zip(*shapes, strict=True))
        axes.append(next(i for i, (one, two) in enumerate(pairs) if one != two) - len(pairs))
    return axes


# ---- other rearrangements ---
def reshaped(op: str, q: MXArray, shape: Any) -> MXArray:
    """`q.reshape(shape)`; see `MXArray.reshape`."""
    old = q.shape
    abstract = jax.ShapeDtypeStruct(old, jnp.uint8)
    try:
        new = jax.eval_shape(lambda a: a.reshape(shape), abstract).shape
    except (TypeError, ValueError, AssertionError) as error:  # an assertion: of keys
        raise TypeError(
            f"{op}: {old} has no shape {shown(shape)}; give ints, or a tuple of them, for as many "
            "elements"
        ) from error
    kept = max(-q.axis, 2 if _is_tiled(q) or len(q.block) == 2 else 1)
    tiles_stay = q.axis == -1 and len(q.block) == 1 and len(new) >= 2 and new[-1] == old[-1]
    for layout in (q.scale_layout, q.value_layout):
        rows = (old[-2:][0], new[-2:][0])
        tiles_stay &= not layout.is_tiled or all(n % layout.pad[0] == 0 for n in rows)
    if new[-kept:] != old[-kept:] and not (_is_tiled(q) and tiles_stay):
        raise ValueError(
            f"{op}: {old} into {new} would cut blocks or tiles; lengths from axis {-kept} on must "
            f"stay {old[-kept:]}"
        )
    values = stored_shape(new, (q.axis,), q.value_layout, q.format.codes_per_byte)
    scales = stored_shape(new, _block_axes(q), q.scale_layout)
    window = q.window
    if isinstance(window, tuple) and new[-2:] != old[-2:]:  # rows are split or joined
        rows = (*old[-2:-1], *new[-2:-1])
        whole = len(rows) == 2 and not any(is_symbolic(n) or n % window[0] for n in rows)
        window = window if whole else BLOCK
    arrays = {"values": q.values.reshape(values), "scales": q.scales.reshape(scales)}
    return dataclasses.replace(q, **arrays, window=window)


def swapped(op: str, q: MXArray, axis1: Any, axis2: Any, repacked: Any) -> MXArray:
    """`q` with two axes swapped; see `jax_mx.swapaxes`.

    `repacked` gives codes of square blocks packed along the other axis.
    """
    one, two = (axis_of(op, axis, q.ndim) for axis in (axis1, axis2))
    if one == two:
        return q
    turn = {one: two, two: one}
    if len(q.block) == 2 and (one in (-2, -1)) != (two in (-2, -1)):
        raise ValueError(f"{op}: square blocks span the last two axes, which must stay the last")
    if len(q.block) == 2:
        packs = min(one, two) == -2 and q.format.codes_per_byte > 1
        values = repacked(q.values, q.format) if packs else q.values
        arrays = {"values": values.swapaxes(one, two), "scales": q.scales.swapaxes(one, two)}
        return dataclasses.replace(q, **arrays)
    axis = turn.get(q.axis, q.axis)
    if isinstance(q.window, tuple) and (one in (-2, -1)) != (two in (-2, -1)):
        q = dataclasses.replace(q, window=BLOCK)  # tiles are of the last two axes
    if q.scale_layout.is_tiled and not q.value_layout.is_tiled and {one, two} == {-1, -2, axis}:
        # Tiles are of the block axis and the other one, whichever comes first.
        return dataclasses.replace(q, values=q.values.swapaxes(one, two), axis=axis)
    if _is_tiled(q) and max(one, two) < -2 <= axis:  # whole matrices
        at = {"values": q.value_layout.is_tiled, "scales": q.scale_layout.is_tiled}
        arrays = {n: getattr(q, n).swapaxes(one - t, two - t) for n, t in at.items()}
        return dataclasses.replace(q, **arrays)
    rows = _in_rows(op, q)
    arrays = {name: getattr(rows, name).swapaxes(one, two) for name in ("values", "scales")}
    return _in_layouts_of(op, dataclasses.replace(rows, axis=axis, **arrays), q)


def joined(op: str, arrays: list[MXArray], axis: int) -> MXArray:
    """Arrays that differ in the length of `axis`, negative, alone; one behind the other."""
    first = arrays[0]
    order = moved_last(tuple(range(-first.ndim, 0)), first.axis)  # of axes in tiles of scales
    index = order.index(axis) - first.ndim
    *others, _ = arrays
    if first.scale_layout.is_tiled and index >= -2:
        pads = [q.padding.numbers for q in others]
        if any(pad is None or pad[index] for pad in pads):  # tiles would not follow one another
            rows = joined(op, [with_scales(op, q, ROW_MAJOR) for q in arrays], axis)
            return with_scales(op, rows, first.scale_layout)
    window = first.window
    if axis in window_axes(first) and len(arrays) > 1:
        ends = np.cumsum([q.shape[axis] for q in others])
        window = BLOCK if window == ROW else _window_from(first, ends.tolist())
    values = jnp.concatenate([q.values for q in arrays], axis - first.value_layout.is_tiled)
    at = index - 1 if first.scale_layout.is_tiled else axis
    scales = jnp.concatenate([q.scales for q in arrays], at)
    return dataclasses.replace(first, values=values, scales=scales, window=window)
