"""The arguments of dense products, of products over groups and of subscripts, checked."""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.formats.arrangements import Arrangements, arrangements_of, as_tuples, dimensions_of
from jax_mx.formats.checks import array_of, float_dtype, implementation_of, is_symbolic
from jax_mx.formats.reads import layout_for_trace
from jax_mx.products.arguments import (
    Weight,
    array_or_quantized,
    check_quantized,
    floats_of,
    is_exact,
    operand_of,
    sizes_of,
    weight_of,
)
from jax_mx.products.auto import Sizes, grouped_recipe, recipe_beside, resolved
from jax_mx.products.implementations import named
from jax_mx.products.operand import QuantizedWeight
from jax_mx.products.recipes import Recipe, check_frozen
from jax_mx.quantizing.mxarray import MXArray

# ---- dense products ---
DimensionNumbers = Any  # as jax.lax.dot_general takes them


def is_left(lhs: Any, rhs: Any, recipe: Any) -> bool:
    """Whether the weight is lhs: as the recipe says, or as lhs alone is a `QuantizedWeight`."""
    if isinstance(recipe, Recipe) and recipe.weight == "lhs":
        return True
    return isinstance(lhs, QuantizedWeight) and not isinstance(rhs, QuantizedWeight)


def swapped_numbers(numbers: DimensionNumbers) -> tuple[tuple[tuple, tuple], ...]:
    """Dimension numbers of the product with its operands swapped."""
    (lc, rc), (lb, rb) = as_tuples(numbers)
    return (rc, lc), (rb, lb)


class Call(NamedTuple):
    """A product that MX takes.

    Attributes:
      lhs: an array of floats, or an `MXArray` in rows.
      rhs: the same, or a `QuantizedWeight`.
      layout: the arrangements of both.
      recipe: resolved.
      dtype: of the result.
    """

    lhs: Any
    rhs: Any
    layout: Arrangements
    recipe: Recipe
    dtype: np.dtype


def planned(
    op: str,
    lhs: Any,
    rhs: Any,
    dimension_numbers: DimensionNumbers,
    precision: Any,
    preferred: Any,
    recipe: Any,
    implementation: Any,
) -> Call:
    """The arguments of `dot_general`, checked.

    Raises:
      TypeError, ValueError: as it does.
    """
    if is_left(lhs, rhs, recipe):
        lhs, rhs, dimension_numbers = rhs, lhs, swapped_numbers(dimension_numbers)
    lhs, rhs = operand_of(op, "lhs", lhs), operand_of(op, "rhs", rhs)
    is_free = implementation is None and not is_exact(op, precision)
    sizes = functools.partial(_sizes, op, lhs, rhs, dimension_numbers)
    recipe = resolved(op, recipe, (lhs, rhs), sizes, is_free)
    recipe = recipe_beside(op, "rhs", rhs, recipe)
    # Tiles of scales are of 128 rows: rows that are one are fewer tiles.
    keep_rows = not recipe.has_windows and not layout_for_trace().is_tiled
    layout = arrangements_of(op, lhs, rhs, dimension_numbers, recipe.units, keep_rows)
    sides: Any = (("lhs", lhs, layout.lhs), ("rhs", rhs, layout.rhs))
    floats = [x for _, x, _ in sides if not isinstance(x, MXArray)]
    types = [float_dtype(op, name, x.dtype) for name, x, _ in sides if not isinstance(x, MXArray)]
    if preferred is not None:
        dtype = float_dtype(op, "preferred_element_type", preferred)
    elif len({*types}) > 1 and not isinstance(rhs, QuantizedWeight):
        dtype = np.dtype(jnp.result_type(*floats))
    else:
        dtype = (*types, np.dtype(jnp.bfloat16))[0]
    implementation_of(op, named(op), implementation)
    for name, x, side in sides:
        if isinstance(x, MXArray | QuantizedWeight):
            check_quantized(op, name, x, side)
    frozen = [name for name, x, _ in sides if isinstance(x, MXArray)]
    if len(frozen) == 1:
        check_frozen(op, frozen[0], recipe)
    return Call(lhs, rhs, layout, recipe, dtype)


def _sizes(op: str, lhs: Any, rhs: Any, dimension_numbers: DimensionNumbers) -> list[Sizes]:
    """Rows, columns and contracted length of a product, of an entry of its batch.

    Raises:
      TypeError, ValueError: as `dot_general` does.
    """
    contracting, batch = dimensions_of(op, lhs.shape, rhs.shape, dimension_numbers)
    rows, columns = (
        math.prod(n for i, n in enumerate(x.shape) if i not in (*summed, *lead))
        for x, summed, lead in zip((lhs, rhs), contracting, batch, strict=True)
    )
    return [(rows, columns, math.prod(lhs.shape[i] for i in contracting[0]))]


# ---- subscripts ---
def two(
    op: str, subscripts: str, operands: Sequence[Any]
) -> tuple[tuple[Any, Any], tuple[str, str, str]]:
    """Both operands and their letters, without what only one of them has and the result lacks."""
    if len(operands) != 2:
        raise ValueError(f"{op}: got {len(operands)} operands, this takes two")
    a, b = (operand_of(op, name, x) for name, x in zip("ab", operands, strict=True))
    left, right, out = _letters(op, subscripts, a.ndim, b.ndim)
    a, left = _summed(op, "a", a, left, {*right, *out})
    b, right = _summed(op, "b", b, right, {*left, *out})
    return (a, b), (left, right, out)


def numbers_of(left: str, right: str, out: str) -> Any:
    """Dimension numbers of a product, by the letters of its operands and of its result."""
    batch = [c for c in left if c in right and c in out]
    contracted = [c for c in left if c in right and c not in out]
    return tuple(
        tuple(tuple(side.index(c) for c in group) for side in (left, right))
        for group in (contracted, batch)
    )


def _letters(op: str, subscripts: str, *ndims: int) -> tuple[str, str, str]:
    """The dimensions of both operands and of the result, a letter each, without ellipses."""
    text = subscripts.replace(" ", "")
    sides, arrow, out = text.partition("->")
    operands = sides.split(",")
    if len(operands) != 2:
        raise ValueError(
            f"{op}: subscripts {subscripts!r} name {len(operands)} operands, this takes two"
        )
    spare = [c for c in map(chr, range(ord("A"), ord("z") + 1)) if c.isalpha() and c not in text]
    for i, (letters, ndim) in enumerate(zip(operands, ndims, strict=True)):
        named = letters.replace("...", "", 1)
        hidden = ndim - len(named)
        if hidden < 0 or (hidden and "..." not in letters) or not (named + "a").isalpha():
            raise ValueError(
                f"{op}: the subscripts {letters!r} do not fit an operand of {ndim} dimensions"
            )
        operands[i] = letters.replace("...", "".join(spare[-hidden:]) if hidden else "")
        if repeated := [c for c, n in Counter(operands[i]).items() if n > 1]:
            raise ValueError(
                f"{op}: {repeated[0]!r} stands twice in {letters!r}; take the diagonal before"
            )
    every = Counter("".join(operands))
    hidden_out = "".join(c for c in spare if c in every)
    if not arrow:  # as jnp.einsum: what stands once, in alphabetical order
        out = hidden_out + "".join(sorted(c for c, n in every.items() if n == 1 and c in text))
    out = out.replace("...", hidden_out)
    if not {*out} <= {*every} or len({*out}) != len(out):
        raise ValueError(
            f"{op}: the result {out!r} of {subscripts!r} must name operands' letters once"
        )
    return operands[0], operands[1], out


def _summed(op: str, name: str, x: Any, letters: str, kept: set[str]) -> tuple[Any, str]:
    """x without the dimensions that neither the other operand nor the result has."""
    gone = [i for i, c in enumerate(letters) if c not in kept]
    if not gone:
        return x, letters
    if isinstance(x, MXArray | QuantizedWeight):
        raise ValueError(
            f"{op}: {letters[gone[0]]!r} of {name} is to be summed over, which a quantized array "
            "cannot be; sum the product instead"
        )
    return array_of(op, name, x).sum(gone), "".join(c for c in letters if c in kept)


# ---- products over groups ---
def planned_groups(
    op: str,
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    preferred: Any,
    recipe: Any,
    implementation: Any,
) -> tuple[jax.Array, Weight, jax.Array, Recipe, np.dtype]:
    """Rows, a matrix a group, sizes, the recipe and the result's type, checked.

    Raises:
      TypeError, ValueError: as `ragged_dot` does.
    """
    rhs = array_or_quantized(op, "rhs", rhs)
    recipe = grouped_recipe(op, recipe, lhs, rhs)
    recipe = recipe_beside(op, "rhs", rhs, recipe)
    lhs = floats_of(op, "lhs", lhs, 2, recipe.units.forward)
    weight = weight_of(op, "rhs", rhs, lhs.shape[1], recipe)
    sizes = sizes_of(op, group_sizes, weight.groups)
    if not is_symbolic(lhs.shape[0]) and lhs.shape[0] > jnp.iinfo(jnp.int32).max:
        raise ValueError(
            f"{op}: lhs has {lhs.shape[0]} rows, more than int32 counts, as group_sizes are; split "
            "the rows"
        )
    dtype = lhs.dtype
    if preferred is not None:
        dtype = float_dtype(op, "preferred_element_type", preferred)
    elif not isinstance(rhs, MXArray | QuantizedWeight) and rhs.dtype != dtype:
        with jax.numpy_dtype_promotion("standard"):  # as in jax.lax.ragged_dot
            dtype = np.dtype(jnp.result_type(lhs, rhs))
    implementation_of(op, named(op), implementation)
    return lhs, weight, sizes, recipe, dtype
