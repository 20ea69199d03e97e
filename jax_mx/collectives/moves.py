"""Collectives of MXArrays: `all_gather`, `all_to_all`, `ppermute`, and `reshard`.

Codes and scales move as uint8. As the floats that they are, XLA may move them in wider types: a
CPU moves e4m3 as float16 and e8m0 as float32, where 2^-127 becomes NaN.

They are two arrays, and so two collectives. Three other ways were no faster on two H100s and two
H200s (November 2026): one buffer of both, chunks of rows that are quantized while others move, and
XLA's group of collectives (`_collectives_group`).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_mx.collectives.barrier import as_made
from jax_mx.formats.checks import axis_of, shown
from jax_mx.formats.formats import BLOCK
from jax_mx.formats.sharding import is_explicit, names_in
from jax_mx.formats.views import moved_last, stored_spec
from jax_mx.formats.windows import ROW, Window, lengths_of
from jax_mx.quantizing.indexing import window_axes
from jax_mx.quantizing.mxarray import MXArray, checked

AxisName = Any  # of a mesh, or a sequence of them; as jax.lax takes it
Groups = Sequence[Sequence[int]] | None


# ---- in shard_map ---
def all_gather(
    q: MXArray,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    axis: int = 0,
    tiled: bool = False,
) -> MXArray:
    """jax.lax.all_gather of an MXArray: every shard's array, on each of them.

    Args:
      q: a shard's array, in shard_map.
      axis_name: the mesh axis, or several.
      axis_index_groups: as for jax.lax.all_gather.
      axis: the new axis of the result; with `tiled`, the axis along which arrays are joined.
      tiled: whether arrays are joined along `axis`, instead of along a new axis.

    Returns:
      An `MXArray` in q's layouts. Quantizing the gathered floats gives the same bytes, if shards
      hold whole blocks and windows. Its window is q's where joined parts hold whole windows, else
      32. A window "row" becomes 32 where parts are joined along the axis of blocks.

    Raises:
      TypeError: q is not an `MXArray` (jax.lax.all_gather gathers others), or axis not an int.
      ValueError: axis is out of range; parts would be joined inside a tile; or, without `tiled`,
        the new axis would lie among the axes that tiles or square blocks span.
    """
    op = "all_gather"
    q = _own(op, q)
    if tiled:
        along = axis_of(op, axis, q.ndim)
        n = _size(axis_name, axis_index_groups)
        _require_whole(op, q, along, q.shape[along], n, "are joined")
        places = {name: {"axis": at} for name, at in _stored(q, along).items()}
        move = partial(gather, axis_name=axis_name, groups=axis_index_groups)
        return _moved(q, move, places, window=_window_joined(q, along, n))
    new = axis_of(op, axis, q.ndim + 1)
    places = {name: {"axis": at} for name, at in _inserted(op, q, new, q.ndim + 1).items()}
    move = partial(jax.lax.all_gather, axis_name=axis_name, axis_index_groups=axis_index_groups)
    return _moved(q, move, places, axis=_beside(q.axis, new))


def all_to_all(
    q: MXArray,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Groups = None,
    tiled: bool = False,
) -> MXArray:
    """jax.lax.all_to_all of an MXArray: part i of each shard's array goes to shard i.

    Args:
      q: a shard's array, in shard_map.
      axis_name: the mesh axis, or several.
      split_axis: the axis that is cut into a part for each shard. Without `tiled` its length is the
        number of shards, and the result does not have it.
      concat_axis: the axis that parts are joined along; without `tiled` the new one.
      axis_index_groups: as for jax.lax.all_to_all.
      tiled: whether parts are joined along an axis that exists.

    Returns:
      An `MXArray` in q's layouts; its window follows the rule of `all_gather`.

    Raises:
      TypeError: q is not an `MXArray` (jax.lax.all_to_all moves others), or an axis not an int.
      ValueError: an axis is out of range; its length does not fit the number of shards; blocks or
        tiles would be cut; or, without `tiled`, the new axis would lie among the axes that tiles or
        square blocks span.
    """
    op = "all_to_all"
    q = _own(op, q)
    cut, into = (axis_of(op, axis, q.ndim) for axis in (split_axis, concat_axis))
    n, length = _size(axis_name, axis_index_groups), q.shape[cut]
    if length % n or not (tiled or length == n):
        wants = "a multiple of it" if tiled else "just it, or pass tiled=True"
        raise ValueError(
            f"{op}: split_axis {split_axis} has the length {length}, which {n} shards want to be "
            f"{wants}"
        )
    _require_whole(op, q, cut, length // n, n, "are cut off")
    options = {"axis_index_groups": axis_index_groups, "tiled": tiled}
    exchange = partial(jax.lax.all_to_all, axis_name=axis_name, **options)
    splits = _stored(q, cut)
    if tiled:
        part = length // n if into == cut else q.shape[into]
        _require_whole(op, q, into, part, n, "are joined")
        concats = _stored(q, into)
        fields = {"window": _window_joined(_part(q, cut, length // n), into, n, part)}
    else:
        axis = q.axis + (cut > q.axis)  # of what is left without the axis that is cut
        concats = _inserted(op, q, into, q.ndim, axis)
        fields = {"axis": _beside(axis, into)}
    places = {n: {"split_axis": splits[n], "concat_axis": concats[n]} for n in splits}
    return _moved(q, exchange, places, **fields)


def ppermute(q: MXArray, axis_name: AxisName, perm: Sequence[tuple[int, int]]) -> MXArray:
    """jax.lax.ppermute of an MXArray: a shard's array goes to another one.

    Args:
      q: a shard's array, in shard_map.
      axis_name: the mesh axis, or several.
      perm: pairs (from, to), as for jax.lax.ppermute. A shard that is nobody's `to` gets zeros.

    Returns:
      An `MXArray` like q.

    Raises:
      TypeError: q is not an `MXArray`; jax.lax.ppermute moves others.
    """
    send = partial(jax.lax.ppermute, axis_name=axis_name, perm=perm)
    return _moved(_own("ppermute", q), send, {"values": {}, "scales": {}})


def _own(op: str, q: Any) -> MXArray:
    if not isinstance(q, MXArray):
        raise TypeError(
            f"{op}: q must be an MXArray, as quantize returns, got {type(q).__name__}; "
            f"jax.lax.{op} moves other arrays"
        )
    return checked(op, "q", q)


def _size(axis_name: AxisName, groups: Groups) -> int:
    return len(groups[0]) if groups else jax.lax.axis_size(axis_name)  # of [] JAX says the rest


def _moved(
    q: MXArray,
    move: Callable[..., jax.Array],
    places: Mapping[str, Mapping[str, int]],
    **fields: Any,
) -> MXArray:
    """q with values and scales moved as bytes.

    Args:
      q: the array.
      move: of bytes.
      places: further arguments of `move` for the array of each name.
      fields: static fields that differ in the result.
    """
    arrays: dict[str, Any] = {
        name: as_bits(getattr(q, name), partial(move, **at)) for name, at in places.items()
    }
    return dataclasses.replace(q, **arrays, **fields)


def as_bits(x: jax.Array, move: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Moves an array by `move` with its elements as unsigned integers, and gives its dtype back."""
    bits = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    moved = move(jax.lax.bitcast_convert_type(x, bits))
    return jax.lax.bitcast_convert_type(moved, x.dtype)


def gather(bits: jax.Array, axis_name: AxisName, groups: Groups = None, *, axis: int) -> jax.Array:
    """All shards' arrays, joined along an axis."""
    options = {"axis_name": axis_name, "axis_index_groups": groups}
    if math.prod(bits.shape[:axis]) == 1 or is_explicit(jax.typeof(bits).sharding.mesh):
        return jax.lax.all_gather(bits, axis=axis, tiled=True, **options)
    return joined(jax.lax.all_gather(bits, axis=0, **options), axis)


def joined(parts: jax.Array, axis: int) -> jax.Array:
    """Arrays that lie behind each other, (n, ...), joined along an axis of theirs.

    In words: on an H200 XLA copies (2, 8, 3584, 4096) bytes in 110 us as uint32, in 278 as uint8.
    """
    n, *shape = parts.shape
    shape[axis] *= n
    if math.prod(parts.shape[1 : 1 + axis]) == 1:  # they lie as they shall
        return parts.reshape(shape)
    word = next(size for size in (4, 2, 1) if parts.shape[-1] % size == 0)
    if parts.dtype.itemsize > 1 or word == 1:
        return jnp.moveaxis(parts, 0, axis).reshape(shape)
    integers = parts.reshape(*parts.shape[:-1], parts.shape[-1] // word, word)
    integers = jax.lax.bitcast_convert_type(integers, jnp.dtype(f"uint{8 * word}"))
    integers = jnp.moveaxis(integers, 0, axis).reshape(*shape[:-1], shape[-1] // word)
    return jax.lax.bitcast_convert_type(integers, parts.dtype).reshape(shape)


# ---- where an axis lies in values and scales ---
def _order(q: MXArray) -> tuple[int, ...]:
    """The axes in the order in which tiles have them: a matrix' rows and columns come last."""
    return moved_last(tuple(range(-q.ndim, 0)), q.axis)


def _stored(q: MXArray, axis: int) -> dict[str, int]:
    """The dimensions of values and of scales that belong to an axis, which is negative."""
    at = {}
    for name, layout in (("values", q.value_layout), ("scales", q.scale_layout)):
        index = _order(q).index(axis) - q.ndim - 1 if layout.is_tiled else axis
        at[name] = index + getattr(q, name).ndim
    return at


def _inserted(op: str, q: MXArray, new: int, ndim: int, axis: int | None = None) -> dict[str, int]:
    """The dimensions of values and scales at which a new axis is inserted.

    Args:
      op: for messages.
      q: the array.
      new: the axis, negative, in the result.
      ndim: of the result.
      axis: the block axis of the result; None: q's.

    Raises:
      ValueError: it would lie among those that tiles or square blocks span.
    """
    layouts = {"values": q.value_layout, "scales": q.scale_layout}
    tiled = any(layout.is_tiled for layout in layouts.values())
    kept = max(2, -(q.axis if axis is None else axis)) if tiled or len(q.block) == 2 else 0
    if new >= -kept:
        group = "tiles" if tiled else "square blocks"
        raise ValueError(
            f"{op}: the new axis would lie at {new + ndim} of {ndim} dimensions, among the last "
            f"{kept}, which {group} span; put it in front of them"
        )
    return {name: new + ndim for name in layouts}


def _beside(axis: int, new: int) -> int:
    """Where an axis lies, both negative, once a new one lies at `new`."""
    return axis - (new >= axis)


def _unit(q: MXArray, axis: int) -> tuple[int, str]:
    """How many elements along an axis, negative, stay together, and as what."""
    unit = BLOCK if axis in ((-2, -1) if len(q.block) == 2 else (q.axis,)) else 1
    index, term = _order(q).index(axis) - q.ndim, "a block"
    for layout, per in ((q.scale_layout, BLOCK), (q.value_layout, q.format.codes_per_byte)):
        if layout.is_tiled and index >= -2:
            tile = layout.pad[0] if index == -2 else layout.pad[1] * per
            if tile > unit:
                term = f"a tile of {layout.name!r}"
            unit = math.lcm(unit, tile)
    return unit, term


def _require_whole(op: str, q: MXArray, axis: int, length: int, n: int, why: str) -> None:
    """Refuses parts that are no whole blocks and tiles.

    Raises:
      ValueError: they are none.
    """
    unit, term = _unit(q, axis)
    if n > 1 and length % unit:
        raise ValueError(
            f"{op}: along axis {axis} parts of {length} elements {why}, inside of {term}, which "
            f"holds {unit}; choose another axis" + " or another layout" * ("tile" in term)
        )


# ---- windows ---
def _window(q: MXArray, axis: int, length: int) -> Window:
    """The window that parts of so many elements along an axis have; a row is each part's own."""
    length_of_window, axes = lengths_of(q.window)[1], window_axes(q)
    return BLOCK if axis in axes and q.window != ROW and length % length_of_window else q.window


def _part(q: MXArray, axis: int, length: int) -> MXArray:
    """q, with the window that such parts have."""
    return dataclasses.replace(q, window=_window(q, axis, length))


def _window_joined(q: MXArray, axis: int, n: int, length: int | None = None) -> Window:
    """The window of n parts like q, or of this length, joined along an axis."""
    if n == 1:
        return q.window
    window = _window(q, axis, q.shape[axis] if length is None else length)
    return BLOCK if window == ROW and axis == q.axis else window


# ---- under jit ---
def reshard(q: MXArray, spec: PartitionSpec | NamedSharding) -> MXArray:
    """An MXArray, split among devices in another way, under a mesh of auto or explicit axes.

    Args:
      q: any.
      spec: the mesh axes that split each of q's axes: a PartitionSpec of the mesh that jax.set_mesh
        has set, or a NamedSharding. Values and scales follow.

    Returns:
      The same `MXArray`. XLA moves codes and scales, as uint8, to shards that lie elsewhere than
      q's.

    Raises:
      TypeError: q is not an `MXArray`, or spec of another type.
      ValueError: there is no mesh, spec has more entries than q axes, or it names an axis that
        shard_map has taken. Shards would cut blocks or tiles.
    """
    op = "reshard"
    q = checked(op, "q", q)
    mesh, entries = placement(op, spec, q.ndim)
    taken = [name for entry in entries for name in names_in(entry) if is_manual(mesh, name)]
    if taken:
        raise ValueError(
            f"{op}: inside of shard_map over {', '.join(taken)} arrays are shards already; move "
            "them with all_gather, all_to_all or ppermute"
        )
    for axis, entry in enumerate(entries, -q.ndim):
        n = math.prod(mesh.shape[name] for name in names_in(entry))
        unit, term = _unit(q, axis)
        if n > 1 and q.shape[axis] % (n * unit):
            why = f", inside of {term}, which holds {unit}" if unit > 1 else ", which are not equal"
            raise ValueError(
                f"{op}: axis {axis} of length {q.shape[axis]} would be split over "
                f"{' x '.join(names_in(entry))} in {n} shards{why}"
            )
    axes = (-2, -1) if len(q.block) == 2 else (q.axis,)
    values = stored_spec(entries, (q.axis,), q.value_layout)
    scales = stored_spec(entries, axes, q.scale_layout)
    shardings = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (values, scales))
    return placed(q, *shardings)


def placed(q: MXArray, values: NamedSharding, scales: NamedSharding) -> MXArray:
    """q with values and scales in these shardings; XLA moves them as uint8."""
    arrays: dict[str, Any] = {
        name: as_bits(getattr(q, name), partial(moved_to, where))
        for name, where in (("values", values), ("scales", scales))
    }
    return dataclasses.replace(q, **arrays)


@partial(jax.jit, static_argnums=0)
def moved_to(where: NamedSharding, x: jax.Array) -> jax.Array:
    """x in this sharding, whatever it is made of."""
    x = as_made(x)
    if is_explicit(jax.typeof(x).sharding.mesh):
        return jax.sharding.reshard(x, where)
    return jax.lax.with_sharding_constraint(x, where)


def placement(op: str, spec: Any, ndim: int) -> tuple[Any, tuple]:
    """The mesh, and a partition spec with an entry for each of so many axes.

    Raises:
      TypeError, ValueError: spec is none, is too long, or there is no mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if isinstance(spec, NamedSharding):
        if mesh.empty and is_explicit(spec.mesh):
            raise ValueError(
                f"{op}: {spec.spec} is of a mesh with explicit axes, which is not set; set it with "
                "jax.set_mesh around the program"
            )
        mesh, spec = spec.mesh if mesh.empty else mesh, spec.spec
    if not isinstance(spec, PartitionSpec):
        raise TypeError(f"{op}: spec must be a PartitionSpec or a NamedSharding, got {shown(spec)}")
    if spec.unreduced or spec.reduced:
        raise ValueError(f"{op}: {spec} asks for sums; name only axes that split the array")
    if mesh.empty:
        raise ValueError(
            f"{op}: {spec} names axes of a mesh, and there is none; set one with jax.set_mesh, or "
            "pass a NamedSharding"
        )
    if len(spec) > ndim:
        raise ValueError(f"{op}: {spec} has {len(spec)} entries, the array {ndim} axes")
    names = [name for entry in spec for name in names_in(entry)]
    if unknown := [name for name in names if name not in mesh.shape]:
        raise ValueError(
            f"{op}: {spec} names {', '.join(unknown)}; the mesh has {', '.join(mesh.shape)}"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"{op}: {spec} names an axis of the mesh twice; it splits one axis alone")
    return mesh, (*spec, *[None] * (ndim - len(spec)))


def is_manual(mesh: Any, name: str) -> bool:
    """Whether shard_map has taken an axis of the mesh."""
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[name] == AxisType.Manual
