"""`gather_weight`: weights that are split among devices, quantized there and then gathered."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jax_mx.collectives.moves import (
    all_gather,
    as_bits,
    gather,
    is_manual,
    joined,
    moved_to,
    placement,
)
from jax_mx.formats.arrangements import (
    Arrangement,
    Units,
    arrangement_of,
    check_contracted,
)
from jax_mx.formats.checks import float_dtype
from jax_mx.formats.formats import BLOCK
from jax_mx.formats.sharding import is_explicit, names_in, resharded, spec_of, spread
from jax_mx.formats.views import reshape
from jax_mx.formats.windows import lengths_of
from jax_mx.launch import private
from jax_mx.products.auto import resolved_for_weights
from jax_mx.products.operand import HeldForm, QuantizedWeight, Unquantized, held_forms
from jax_mx.products.recipes import AUTO, Recipe, dimensions
from jax_mx.quantizing import derivatives
from jax_mx.quantizing.mxarray import MXArray

Names = tuple[str, ...]
OP = "gather_weight"


def gather_weight(
    w: jax.Array,
    spec: PartitionSpec | NamedSharding,
    recipe: Recipe | str = AUTO,
    *,
    contracting: int | Sequence[int] = -2,
    batch: int | Sequence[int] = (),
) -> QuantizedWeight:
    """Gathers a weight that devices hold in parts (FSDP), in MX, for products.

    Each device quantizes its part, and codes and scales move as uint8. For each direction
    that the program reads, MXFP8 moves 33/32 bytes an element, and MXFP4 17/32; bfloat16 moves 2.
    In square blocks (`Recipe.block`, or a `weight_window` of (128, 128)) both directions are one
    array.

    The gradient that reaches w is float, summed over the devices, and split as w is. In shard_map
    one reduce-scatter does this; elsewhere an all-reduce, which XLA turns into a reduce-scatter on
    GPUs.

    Args:
      w: the weight's floats, of any rank from 2 on; in shard_map the device's part.
      spec: a PartitionSpec of the mesh that jax.set_mesh has set, or a NamedSharding: the mesh axes
        that w is gathered from, one entry for each dimension. Other axes that split w (tensor
        parallelism) stay: w's type has them on explicit meshes, and XLA knows them on automatic
        ones.
      recipe: of the products that read it.
      contracting: the dimensions that products contract; see `Recipe.quantize_weight`.
      batch: its batch dimensions.

    Returns:
      A `QuantizedWeight` for the right-hand side of `dot_general`, `matmul` and `einsum` with this
      recipe. Its bytes are those that `Recipe.quantize_weight` makes from the gathered floats. Its
      `floats` are zeros, and only take the gradient.

    Raises:
      TypeError: w is not an array of floats, or an argument is of the wrong type.
      ValueError: there is no mesh, spec does not fit it or w, or parts are not equal or cut blocks,
        windows or transforms. It also says so where products see several dimensions as one, and
        spec splits another than the first of them.
    """
    grouped = not isinstance(batch, Sequence) or len(batch) > 0
    recipe = resolved_for_weights(OP, recipe, w, grouped)
    w = jnp.asarray(w, float_dtype(OP, "w", getattr(w, "dtype", None)))
    mesh, entries = placement(OP, spec, w.ndim)
    gathered = tuple(map(names_in, entries))
    every = tuple(itertools.chain(*gathered))
    inside = [name for name in every if is_manual(mesh, name)]
    if inside and len(inside) < len(every):
        raise ValueError(
            f"{OP}: shard_map has taken {', '.join(inside)} of {spec}; gather over these alone, or "
            "call it outside"
        )
    dims = dimensions(OP, w.ndim, contracting, batch)
    split = gathered
    if not inside and is_explicit(jax.typeof(w).sharding.mesh):
        split = tuple(map(names_in, spec_of(w)))
        for dim, (names, axes) in enumerate(zip(gathered, split, strict=True)):
            if axes[len(axes) - len(names) :] != names:
                raise ValueError(
                    f"{OP}: dimension {dim} of w is split over {axes or 'nothing'}, and cannot be "
                    f"gathered from {names}; spec names the last of the axes that split it"
                )
    static = _Gather(mesh, gathered, split, *dims, bool(inside), recipe.units)
    shape = tuple(
        n * math.prod(mesh.shape[name] for name in names) if inside else n
        for n, names in zip(w.shape, gathered, strict=True)
    )
    check_contracted(OP, shape, static.contracting, recipe.units.forward)
    _require_whole(static, _part(static, w.shape), recipe)
    floats, forms = _gathered(static, w, recipe)
    first, second = (dataclasses.replace(form, gathered=True) for form in forms)
    return QuantizedWeight(floats, first, second, recipe, static.arrangement(shape))


class _Gather(NamedTuple):
    """The static part of a gather.

    Attributes:
      mesh: of the axes.
      gathered: the mesh axes that each dimension of w is gathered from.
      split: all mesh axes that split each dimension, as far as types say so.
      contracting: the contracted dimensions.
      batch: the batch dimensions.
      inside: whether shard_map has taken the axes, and w is a part.
      units: of the recipe.
    """

    mesh: Any
    gathered: tuple[Names, ...]
    split: tuple[Names, ...]
    contracting: tuple[int, ...]
    batch: tuple[int, ...]
    inside: bool
    units: Units

    def arrangement(self, shape: tuple[int, ...]) -> Arrangement:
        """How a weight of this shape, or a part of it, is arranged."""
        return arrangement_of(shape, self.contracting, self.batch, self.units.dgrad)

    def placed(self, entries: tuple[Names, ...]) -> NamedSharding:
        """Dimensions split so; others as XLA has them."""
        free = PartitionSpec.UNCONSTRAINED
        return NamedSharding(self.mesh, PartitionSpec(*(names or free for names in entries)))

    @property
    def kept(self) -> tuple[Names, ...]:
        """The mesh axes that split each dimension of the gathered weight."""
        pairs = zip(self.split, self.gathered, strict=True)
        return tuple(tuple(n for n in names if n not in gone) for names, gone in pairs)


def _spec(entries: tuple[Names, ...]) -> tuple:
    return tuple(names or None for names in entries)


@partial(jax.jit, static_argnums=0)
def _gathered(static: _Gather, w: jax.Array, recipe: Recipe) -> Any:
    return _gathered_vjp(static, derivatives.reverse_only(OP, w), recipe)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered_vjp(static: _Gather, w: jax.Array, recipe: Recipe) -> Any:
    """Zeros of the gathered shape, which gradients reach, and both forms."""
    if static.inside:
        return _of_part(static, w, recipe)
    explicit = is_explicit(jax.typeof(w).sharding.mesh)
    if not explicit:
        w = jax.lax.with_sharding_constraint(w, static.placed(static.gathered))
    side = static.arrangement(w.shape)
    arranged = _arranged(static.kept, side)
    if not explicit:  # what else splits w, XLA knows
        free = PartitionSpec.UNCONSTRAINED
        arranged = tuple(None if names else free for names in _arranged(static.gathered, side))

    gone = _arranged(static.gathered, side)

    def gathered(array: Any, axes: tuple[int, ...]) -> Any:
        places = sorted(range(len(axes)), key=axes.__getitem__)
        spec = tuple(arranged[i] or None for i in places)
        move = partial(_whole, static.mesh, spec, tuple(gone[i] for i in places))
        if not isinstance(array, MXArray):
            return as_bits(array, move)
        arrays: dict[str, Any] = {
            name: as_bits(getattr(array, name), move) for name in ("values", "scales")
        }
        return dataclasses.replace(array, **arrays)

    floats = spread(jnp.zeros((1,) * w.ndim, w.dtype), w.shape, _spec(static.kept))
    return floats, _each(_forms(static, side, w, recipe), side, gathered)


def _whole(mesh: Any, spec: tuple, gone: tuple[Names, ...], bits: jax.Array) -> jax.Array:
    """An array gathered under jit.

    Args:
      mesh: of the axes.
      spec: the result's.
      gone: for each of its axes the mesh axes that it is gathered from.
      bits: the array.
    """
    spec += (None,) * (bits.ndim - len(spec))  # tiles of scales are whole
    axes = [axis for axis, names in enumerate(gone) if names]
    if len(axes) == 1 and spec[axes[0]] is None and math.prod(bits.shape[: axes[0]]) > 1:
        (axis,) = axes  # parts arrive behind each other, and are joined as we do it, not XLA
        n = math.prod(mesh.shape[name] for name in gone[axis])
        shape, split = list(bits.shape), [*spec]
        shape[axis : axis + 1] = n, shape[axis] // n
        split[axis : axis + 1] = gone[axis], None
        parts = jnp.moveaxis(reshape(bits, tuple(shape), tuple(split)), axis, 0)
        where = NamedSharding(mesh, PartitionSpec(None, *spec))
        return joined(moved_to(where, parts), axis)
    return moved_to(NamedSharding(mesh, PartitionSpec(*spec)), bits)


def _fwd(static: _Gather, w: jax.Array, recipe: Recipe) -> Any:
    return _gathered_vjp(static, w, recipe), None


def _bwd(static: _Gather, _: None, cotangent: Any) -> Any:
    """The gradient of the gathered weight, summed over devices, in w's parts."""
    dw, _ = cotangent
    if static.inside:
        for dim, names in enumerate(static.gathered):
            if names:
                dw = jax.lax.psum_scatter(dw, names, scatter_dimension=dim, tiled=True)
        return dw, None
    mesh = jax.typeof(dw).sharding.mesh
    if is_explicit(mesh):
        return resharded(dw, _spec(static.split), mesh), None
    return jax.lax.with_sharding_constraint(dw, static.placed(static.gathered)), None


_gathered_vjp.defvjp(_fwd, _bwd)


# ---- of a part ---
def _part(static: _Gather, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a device's part of w.

    Raises:
      ValueError: there are no equal parts.
    """
    if static.inside:
        return shape
    counts = [math.prod(static.mesh.shape[name] for name in names) for names in static.split]
    for dim, (n, count) in enumerate(zip(shape, counts, strict=True)):
        if n % count:
            raise ValueError(
                f"{OP}: {count} parts of dimension {dim}, of length {n}, are not equal"
            )
    return tuple(n // count for n, count in zip(shape, counts, strict=True))


def _of_part(static: _Gather, w: jax.Array, recipe: Recipe) -> Any:
    """Zeros of the gathered shape, and both forms, in shard_map."""
    side = static.arrangement(w.shape)
    arranged = _arranged(static.gathered, side)

    def gathered(array: Any, axes: tuple[int, ...]) -> Any:
        for names, at in zip(arranged, axes, strict=True):
            if names and isinstance(array, MXArray):
                whole = all_gather(array, names, axis=at, tiled=True)
                array = dataclasses.replace(whole, window=array.window)  # devices share amaxes
            elif names:
                array = as_bits(array, partial(gather, axis_name=names, axis=at))
        return array

    shape = tuple(
        n * (jax.lax.axis_size(names) if names else 1)
        for n, names in zip(w.shape, static.gathered, strict=True)
    )
    floats, _ = private.vary_alike(jnp.zeros(shape, w.dtype), w)
    across = arranged[side.axis], arranged[-3 - side.axis]
    return floats, _each(_forms(static, side, w, recipe, across), side, gathered)


def _forms(
    static: _Gather,
    side: Arrangement,
    w: jax.Array,
    recipe: Recipe,
    across: tuple[Names, Names] = ((), ()),
) -> tuple[HeldForm, HeldForm]:
    """Both forms; `across`: the axes of a shard_map that split either contracted axis."""
    options: dict[str, Any] = {"across": across, "joined": static.mesh}
    request = Unquantized.of(side, w, recipe)
    return held_forms(dataclasses.replace(request, **options))


def _each(
    forms: tuple[HeldForm, HeldForm],
    side: Arrangement,
    move: Callable[[Any, tuple[int, ...]], Any],
) -> tuple[HeldForm, HeldForm]:
    """Both forms with their arrays moved; once where one array is both, in square blocks.

    Args:
      forms: along the contracted and along the free axis.
      side: how they are arranged.
      move: of an array, and of which of its axes each axis of the arranged weight is.
    """
    done: dict[int, Any] = {}
    moved = []
    for form, along in zip(forms, (side.axis, -3 - side.axis), strict=True):
        n = form.array.ndim
        last = (n - 2, n - 1) if form.axis == along else (n - 1, n - 2)
        if id(form.array) not in done:
            done[id(form.array)] = move(form.array, (*range(n - 2), *last))
        moved.append(dataclasses.replace(form, array=done[id(form.array)]))
    first, second = moved
    return first, second


def _arranged(entries: tuple[Names, ...], side: Arrangement) -> tuple[Names, ...]:
    """Entries of dimensions as entries of the arranged weight's axes; of a run the first one."""
    b, k = side.batch, side.contracted_dims
    runs = [side.free_dims, k] if not side.swapped else [k, side.free_dims]
    firsts = [next((entries[d] for d in run if entries[d]), ()) for run in runs]
    return (*(entries[d] for d in side.order[:b]), *firsts)


def _require_whole(static: _Gather, shape: tuple[int, ...], recipe: Recipe) -> None:
    """Refuses a part that does not hold whole blocks and windows, or lies apart in the whole.

    Raises:
      ValueError: so it is.
    """
    side, uses = static.arrangement(shape), recipe.uses("rhs")
    for run, use in zip((side.contracted_dims, side.free_dims), uses, strict=True):
        split = [d for d in run if static.split[d] or static.gathered[d]]
        if not split:
            continue
        first = next((d for d in run if shape[d] > 1), run[0])
        if split != [first] and split != [run[0]]:
            raise ValueError(
                f"{OP}: dimension {split[-1]} is split, and products see it behind dimension "
                f"{first} as one; split dimension {first} instead"
            )
        window = use.window if use.format is not None else BLOCK
        length = math.prod(shape[d] for d in run)
        unit = math.lcm(*lengths_of(window), use.hadamard.size if use.hadamard else 1)
        if length % unit:
            raise ValueError(
                f"{OP}: a part has {length} elements along dimension {split[0]}, which {unit} does "
                "not divide, so that it would cut "
                + ("blocks" if unit == BLOCK else "windows or transforms")
                + "; split another dimension, or over fewer devices"
            )
