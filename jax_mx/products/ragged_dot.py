"""`ragged_dot`: lax.ragged_dot with its operands in MX, and what an MoE layer shares with it."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.arrays.checks import array_of, float_dtype, held, implementation_of, padded
from jax_mx.arrays.sharding import is_explicit, spec_of
from jax_mx.facts.layouts import ROW_MAJOR, ROW_MAJOR_VALUES
from jax_mx.facts.windows import ROW
from jax_mx.lowering import primitive
from jax_mx.ops.groups import Groups
from jax_mx.ops.mxarray import MXArray, checked
from jax_mx.products.either import Names, by_names, either
from jax_mx.products.forms import (
    Form,
    QuantizedWeight,
    Use,
    forms_of,
    frozen_or,
    may_be_floats,
)
from jax_mx.products.operands import what_of
from jax_mx.products.ragged_implementations import IMPLEMENTATIONS
from jax_mx.products.ragged_product import grouped
from jax_mx.products.recipes import MXFP8, Recipe, check_frozen, recipe_beside, recipe_of
from jax_mx.products.steps import MARK, is_exact, once_derived
from jax_mx.reference.ragged import clamped


def ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: jax.Array,
    *,
    recipe: Recipe | str = MXFP8,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """jax.lax.ragged_dot with its operands in MX.

    The rows of lhs are sorted by group, and each group's rows meet a matrix of their own. Groups
    may begin anywhere and be empty; their sizes stay on the device. Differentiable in reverse mode;
    see `dot_general` for what is quantized, kept and multiplied. For the gradient of rhs, each
    group is padded with zero rows to a multiple of 32, or of the recipe's window.

    Args:
      lhs: floats (M, K): bfloat16, float16 or float32. 32 divides K.
      rhs: floats (G, K, N); or what `Recipe.quantize_weight(w, contracting=1, batch=0)` makes of
        them; or a frozen `MXArray` whose blocks run along the contracted axis, (G, K, N) or
        (G, N, K): its axis says which; in square blocks (G, K, N).
      group_sizes: int32 (G,), how many rows each group has. Rows behind the last group's give 0;
        of more rows than lhs has, those beyond do not count, and negative sizes are 0.
      recipe: how floats are quantized, see `dot_general`; window="row" is refused.
      precision: see `dot_general`.
      preferred_element_type: of the result: bfloat16, float16 or float32; that of lhs by default.
      implementation: "cutedsl" (our kernels on Hopper), "cutedsl_r8" and others (these with tiles
        of so many rows; not for gradients of rhs), "pallas" (JAX's Pallas kernels on Hopper, after
        dequantizing), "dequantize" (jax.lax.ragged_dot, likewise), "xla" (plain, runs everywhere);
        or None: what was measured to be the fastest, or is known to be.

    Returns:
      (M, N).

    Raises:
      TypeError: an operand or argument is of the wrong type.
      ValueError: shapes that do not fit, lengths that 32 does not divide, an unknown name.
      NotImplementedError: the named implementation does not serve the call.
    """
    op = "ragged_dot"
    recipe = grouped_recipe(op, recipe)
    rhs = array_or_quantized(op, "rhs", rhs)
    recipe = recipe_beside(op, "rhs", rhs, recipe)
    lhs = floats_of(op, "lhs", lhs, 2, recipe.units.forward)
    dtype = lhs.dtype
    weight = weight_of(op, "rhs", rhs, lhs.shape[1], recipe)
    sizes_fit(op, group_sizes, weight.groups)
    if preferred_element_type is not None:
        dtype = float_dtype(op, "preferred_element_type", preferred_element_type)
    implementation = implementation_of(op, IMPLEMENTATIONS, implementation)
    static = _Static(dtype, is_exact(op, precision), implementation)
    unsplit(op, lhs, rhs, group_sizes)
    columns = weight.columns
    group_sizes = clamped(group_sizes, lhs.shape[0])
    leaves, tree = jax.tree.flatten((lhs, weight.floats, weight.quantized, group_sizes, recipe))
    return _ragged(static, *tree.unflatten(primitive.vary_alike(*leaves)))[:, :columns]


# ---- what callers pass ---
class Weight(NamedTuple):
    """One matrix a group.

    Attributes:
      floats: (G, K, N), which gradients reach, with zero columns for blocks and transforms along N;
        or None.
      quantized: a frozen `MXArray`, (G, K, N) or (G, N, K); or both forms; or None.
      groups: G.
      columns: N.
    """

    floats: jax.Array | None
    quantized: Any
    groups: int
    columns: int


def grouped_recipe(op: str, recipe: Any) -> Recipe:
    """A recipe that grouped products may follow.

    Raises:
      TypeError, ValueError: it is none.
    """
    recipe = recipe_of(op, recipe)
    if recipe.window == ROW:
        raise ValueError(
            f"{op}: the recipe's window is {ROW!r}, which would span several groups' tokens; use "
            "window=128 or 256"
        )
    return recipe


def floats_of(op: str, name: str, x: Any, ndim: int, unit: int) -> jax.Array:
    """An operand that has to be floats, the unit dividing its last axis.

    Raises:
      TypeError, ValueError: it is not.
    """
    x = array_of(op, name, x)
    if x.ndim != ndim:
        raise ValueError(f"{op}: {name} has the shape {x.shape}, must have {ndim} dimensions")
    if x.shape[-1] % unit:
        raise ValueError(
            f"{op}: the last axis of {name} has {x.shape[-1]} elements, not a multiple of "
            f"{what_of(unit)}; {padded(x.shape[-1], unit)}"
        )
    return x


def array_or_quantized(op: str, name: str, w: Any) -> Any:
    """A weight as an array of JAX, if it is not quantized.

    Raises:
      TypeError: it is neither floats nor quantized.
    """
    w = held(w)
    return w if isinstance(w, MXArray | QuantizedWeight) else array_of(op, name, w)


def weight_of(op: str, name: str, w: Any, length: int, recipe: Recipe) -> Weight:
    """One matrix a group, of `length` contracted elements; of what `array_or_quantized` gives.

    Raises:
      TypeError, ValueError: it is none, or was quantized for another product.
    """
    shape = w.shape
    if len(shape) != 3:
        raise ValueError(
            f"{op}: {name} must have three dimensions, one matrix a group: (groups, contracted, "
            f"columns), got {shape}"
        )
    at = 1
    if not shape[0]:
        raise ValueError(f"{op}: {name} has the shape {tuple(shape)}, must have a matrix at least")
    if isinstance(w, MXArray):
        check_frozen(op, name, recipe)
        w = checked(op, name, w).with_values_in(ROW_MAJOR_VALUES).with_scales_in(ROW_MAJOR)
        at = w.axis % 3 if len(w.block) == 1 else 1
        if at == 0:
            raise ValueError(
                f"{op}: {name} has blocks along the axis of groups; quantize it along the "
                "contracted one"
            )
    elif isinstance(w, QuantizedWeight):
        _check_quantized(op, name, w)
    if shape[at] != length:
        raise ValueError(
            f"{op}: {name} has the shape {tuple(shape)}, whose contracted axis {at} should have "
            f"{length} elements"
        )
    columns = shape[3 - at]
    if isinstance(w, MXArray):
        return Weight(None, w, shape[0], columns)
    if isinstance(w, QuantizedWeight):
        fixed = _columns_padded(w.floats, recipe)
        return Weight(fixed, (w.contracted_form, w.free_form), shape[0], columns)
    return Weight(_columns_padded(w, recipe), None, shape[0], columns)


def _check_quantized(op: str, name: str, w: QuantizedWeight) -> None:
    own = w.arrangement
    if (own.contracted_dims, own.order[: own.batch]) != ((1,), (0,)):
        raise ValueError(
            f"{op}: {name} was quantized for another product; use "
            "recipe.quantize_weight(w, contracting=1, batch=0)"
        )


def _columns_padded(w: jax.Array, recipe: Recipe) -> jax.Array:
    extra = -w.shape[-1] % recipe.units.dgrad
    return jnp.pad(w, ((0, 0), (0, 0), (0, extra))) if extra else w


def sizes_fit(op: str, sizes: Any, groups: int) -> None:
    """Refuses what is not the sizes of so many groups.

    Raises:
      TypeError, ValueError: so it is.
    """
    found = getattr(sizes, "dtype", None)
    if found != jnp.int32:
        raise TypeError(f"{op}: group_sizes are {found or type(sizes).__name__}, must be int32")
    if sizes.shape != (groups,):
        raise ValueError(
            f"{op}: group_sizes have the shape {sizes.shape}, rhs has {groups} matrices; they "
            f"must be ({groups},)"
        )


def unsplit(op: str, *operands: Any) -> None:
    """Refuses operands that a mesh with explicit axes splits.

    Raises:
      ShardingTypeError: so it is.
    """
    for x in jax.tree.leaves(operands):
        aval: Any = jax.typeof(x)
        if is_explicit(aval.sharding.mesh) and any(spec_of(x)):
            raise primitive.ShardingTypeError(
                f"{op}: an operand is split as {aval.sharding.spec}; which rows a group has is "
                "known on the device alone, so that no rule splits this product: use "
                "jax.shard_map, or jax_mx.moe with token_axes or expert_axis"
            )


# ---- forms ---
def weight_forms(floats: Any, quantized: Any, recipe: Recipe, dgrad: bool) -> tuple[Form, Any]:
    """What the forward product and that for the gradient of the activations read of a weight.

    Args:
      floats: (G, K, N), or None.
      quantized: see `Weight`.
      recipe: of floats.
      dgrad: whether the second one is wanted.
    """
    if isinstance(quantized, MXArray):
        at = quantized.axis if len(quantized.block) == 1 else -2
        return Form(quantized, at), Form(quantized, -3 - at)
    if quantized is not None:
        return quantized
    uses = recipe.uses("rhs")
    made = forms_of(floats, -2, (uses[0], uses[1] if dgrad else None), recipe.blocks("rhs"))
    return cast(tuple[Form, Any], made)


def align_of(recipe: Recipe) -> int:
    """What sizes of groups are multiples of: blocks and transforms along rows stay whole."""
    return math.lcm(recipe.units.wgrad, cast(int, recipe.window))


# ---- the product and its derivative ---
class _Static(NamedTuple):
    dtype: np.dtype
    exact: bool
    implementation: str | None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Types:
    """What the backward pass has to know of operands: their types say it."""

    lhs: np.dtype
    rhs: np.dtype | None


@partial(jax.jit, static_argnums=0)
def _ragged(static: _Static, *args: Any) -> jax.Array:
    return _ragged_vjp(static, *args)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged_vjp(static: _Static, lhs, floats, quantized, sizes, recipe):
    w, _ = weight_forms(floats, quantized, recipe, dgrad=False)
    return _multiplied(static, "lhs", lhs, False, w, sizes, recipe, static.dtype)


def _multiplied(
    static: _Static, name: str, x: jax.Array, is_frozen: bool, w: Any, sizes: jax.Array,
    recipe: Recipe, dtype: Any,
) -> jax.Array:  # fmt: skip
    """The product of rows that are quantized along their elements and a weight's form."""

    def uses_of(recipe: Recipe) -> tuple[Use, None]:
        return frozen_or(recipe.uses(name)[0], is_frozen), None

    blocks = recipe.blocks(name)

    def step(names: Names | None, x: Any, w: Any, sizes: jax.Array, recipe: Recipe) -> jax.Array:
        by, floats = by_names(static, names)
        a, _ = forms_of(x, -1, uses_of(recipe), blocks, as_floats=(floats, False))
        return _product(next(by), a, w, sizes, dtype)

    return either(may_be_floats(x, uses_of(recipe), blocks), step, x, w, sizes, recipe)


def _product(static: _Static, a: Any, w: Any, sizes: jax.Array, dtype: Any) -> jax.Array:
    how: dict[str, Any] = {"exact": static.exact, "implementation": static.implementation}
    return grouped(a.array, w.array, sizes, dtype, axes=(a.axis, w.axis), **how)


def _ragged_fwd(static: _Static, lhs, floats, quantized, sizes, recipe):
    lhs, floats, mark = once_derived("ragged_dot", lhs, floats, MARK)
    wgrad, blocks = recipe.uses("lhs")[1], recipe.blocks("lhs")
    w, w_free = weight_forms(floats, quantized, recipe, dgrad=True)
    y = _multiplied(static, "lhs", lhs, False, w, sizes, recipe, static.dtype)
    groups = a_rows = None
    if floats is not None:
        groups = Groups.from_sizes(sizes, lhs.shape[0], align=align_of(recipe))
        _, a_rows = forms_of(lhs, -1, (None, wgrad), blocks, groups.rows)
    types = _Types(lhs.dtype, None if floats is None else floats.dtype)
    return y, (a_rows, w_free, sizes, groups, recipe, types, mark)


def _ragged_bwd(static: _Static, residual: tuple, dy: jax.Array):
    a_rows, w_free, sizes, groups, recipe, types, mark = residual
    dy, _ = once_derived("ragged_dot", dy, mark)
    wgrad, blocks = recipe.uses("gradient")[1], recipe.blocks("gradient")
    is_frozen = types.rhs is None
    dlhs = _multiplied(static, "gradient", dy, is_frozen, w_free, sizes, recipe, types.lhs)
    drhs = None
    if types.rhs is not None:
        made: Any = forms_of(dy, -1, (None, wgrad), blocks, groups.rows)
        along_m = made[1]
        drhs = grouped(
            a_rows.array,
            along_m.array,
            groups.sizes,
            types.rhs,
            axes=(a_rows.axis, along_m.axis),
            sums=True,
            align=groups.align,
            exact=static.exact,
            implementation=static.implementation,
        )
    return dlhs, drhs, None, None, None


_ragged_vjp.defvjp(_ragged_fwd, _ragged_bwd)
