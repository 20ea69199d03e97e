"""`dot_general`: jax.lax.dot_general with its operands in MX, floats at both ends."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_mx.formats.checks import float_dtype, implementation_of
from jax_mx.launch import private
from jax_mx.products.arguments import (
    check_out_sharding,
    check_quantized,
    is_exact,
    operand_of,
    warn_of_fixed_keys,
)
from jax_mx.products.arrangements import (
    Arrangements,
    arrangements_of,
    as_tuples,
    dimensions_of,
)
from jax_mx.products.auto import Sizes, resolved
from jax_mx.products.derivative import Static, gathered_for, is_square, parts_of, placed, product
from jax_mx.products.fallback import Fallback, as_floats, plain_operands
from jax_mx.products.implementations import named
from jax_mx.products.operand import QuantizedWeight
from jax_mx.products.reads import layout_for_trace
from jax_mx.products.recipes import AUTO, Recipe, check_frozen, is_floats, recipe_beside
from jax_mx.quantizing.mxarray import MXArray

DimensionNumbers = Any  # as jax.lax.dot_general takes them


def dot_general(
    lhs: jax.typing.ArrayLike | MXArray,
    rhs: jax.typing.ArrayLike | MXArray | QuantizedWeight,
    dimension_numbers: DimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    *,
    recipe: Recipe | str = AUTO,
    out_sharding: Any = None,
    implementation: str | None = None,
    fallback: Fallback = None,
) -> jax.Array:
    """jax.lax.dot_general with its operands in MX, differentiable in reverse mode (bf16: in all).

    The recipe says how floats are quantized: in blocks along the contracted elements, in this
    product and in the products of both gradients. The backward pass keeps MX too, by the name
    CHECKPOINT_NAME: lhs along its rows, rhs along its columns. Accumulation is in float32. flax
    takes the function as `dot_general=`, with functools.partial for a recipe.

    Args:
      lhs: the activations: bfloat16, float16 or float32 of any rank; or an `MXArray` whose blocks
        run along its last contracted dimension.
      rhs: the weights: the same types; or a result of `Recipe.quantize_weight`, of any float type,
        which its gradient has too. An operand that is an `MXArray` gets no gradient. The gradient
        of the other operand is a product in bfloat16 with the dequantized `MXArray`.
      dimension_numbers: as for jax.lax.dot_general. 32 divides the product of the contracted
        lengths; there is no rule for other lengths.
      precision: a precision above JAX's default (HIGH, HIGHEST, "F32_F32_F32" ...) excludes FP8
        tensor cores, which sum with reduced precision. None is `jax.default_matmul_precision`.
      preferred_element_type: of the result: bfloat16, float16 or float32. None takes the type of
        the floats, promoted as jnp does where they differ; bfloat16 where both are MX; and the type
        of lhs with a `QuantizedWeight`.
      recipe: a `Recipe`, or the name of one: "mxfp8", "mxfp8_rows", "mxfp8_windows",
        "mxfp8_hybrid", "mxfp4" or "bf16"; or "auto", the fastest known recipe on the chips of the
        trace, see [training](training.md#the-default-recipe). "floats" switches MX off:
        jax.lax.dot_general multiplies floats, to which it dequantizes an `MXArray`.
      out_sharding: of the result, see jax.lax.dot_general.
      implementation: of all three products; None takes the fastest one that is measured or known.
        "xla" is plain and runs everywhere. "dequantize" uses our kernels, then jax.lax.dot_general;
        "scaled_dot" is jax.lax.scaled_dot. "fp8" is the chip's FP8 product of the codes, for arrays
        with one scale for each row. "cutedsl" has our kernels on Hopper: windows of 128 and more on
        FP8 tensor cores, others as bfloat16, few rows with the codes of rhs as they lie. It does
        not serve a program that XLA splits among devices. "cutedsl_r8" and its kin fix the rows of
        lhs in a tile. "flydsl" has our kernels on AMD's chips, for operands in MX, "tcgen05" our
        kernel on Blackwell. "blackwell" has JAX's kernels there, after dequantizing.
      fallback: for switches of whole models. "floats": jax.lax.dot_general multiplies floats that
        MX cannot take, as `can_multiply` says. "bf16" rounds these to bfloat16 first. None: the
        product is refused.

    Returns:
      (batch..., free of lhs..., free of rhs...), as jax.lax.dot_general. The bits equal the product
      of the dequantized operands if products and sums are exact in float32, and no element stands
      for less than 2^-126. Otherwise s, the sum over k of `|a||b|`, bounds the difference: before
      rounding to the result's type it is at most eps32 * k * s. Where FP8 tensor cores sum ("fp8",
      and "cutedsl" with windows) it is at most window * 2^-13 * s; "row" counts as 256. Normal
      numbers stay within 4e-4 * s, see "Numbers" in docs/training.md.

    Raises:
      TypeError: an operand or argument is of the wrong type.
      ValueError: dimension numbers that do not fit, a contracted length that 32 does not divide, an
        unknown name. An `MXArray` has blocks along another dimension. One operand is an `MXArray`,
        and the recipe's forward has a Hadamard transform.
      NotImplementedError: the named implementation does not serve the call.
    """
    return multiplied(
        "dot_general",
        lhs,
        rhs,
        dimension_numbers,
        precision,
        preferred_element_type,
        recipe=recipe,
        out_sharding=out_sharding,
        implementation=implementation,
        fallback=fallback,
    )


def multiplied(
    op: str,
    lhs: Any,
    rhs: Any,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    recipe: Any = AUTO,
    out_sharding: Any = None,
    implementation: str | None = None,
    fallback: Fallback = None,
) -> jax.Array:
    """`dot_general`, by the name of the function that a caller wrote."""
    check_out_sharding(op, out_sharding)
    if is_floats(recipe):
        floats = as_floats(lhs, rhs)
        return _by_jax(floats, dimension_numbers, precision, preferred_element_type, out_sharding)
    if is_left(lhs, rhs, recipe):
        return with_weight_first(
            op,
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            recipe=recipe if isinstance(recipe, str) else dataclasses.replace(recipe, weight="rhs"),
            out_sharding=out_sharding,
            implementation=implementation,
            fallback=fallback,
        )
    try:
        call = planned(
            op,
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            recipe,
            implementation,
        )
    except (TypeError, ValueError) as error:
        plain = plain_operands(op, fallback, (lhs, rhs), recipe, implementation, error)
        wanted = preferred_element_type or plain.dtype
        return _by_jax(plain.operands, dimension_numbers, precision, wanted, out_sharding)
    lhs, rhs, recipe, layout = call.lhs, call.rhs, call.recipe, call.layout
    if vars(recipe)["dgrad"].rounding or vars(recipe)["wgrad"].rounding:
        warn_of_fixed_keys(op, recipe)
    shared = (is_exact(op, precision), implementation)
    static = Static(op, layout, call.dtype, *shared, out_sharding, recipe.chosen, recipe.fast)
    if isinstance(lhs, MXArray) or isinstance(rhs, MXArray):  # nothing is quantized along rows
        keep = isinstance(rhs, QuantizedWeight) or is_square(rhs, recipe)
        static = static._replace(layout=layout.unpadded(keep))
    if isinstance(rhs, jax.Array):
        rhs = gathered_for(lhs, rhs, layout, recipe, out_sharding is not None)
    # In shard_map an operand, or a key, may vary over an axis that the others do not. Where all of
    # them vary, JAX sums the gradients of those others over it.
    leaves, tree = jax.tree.flatten((*parts_of(lhs), *parts_of(rhs), None, recipe))
    return product(static, *tree.unflatten(private.vary_alike(*leaves)))


def _by_jax(
    operands: list[jax.Array], numbers: Any, precision: Any, dtype: Any, out_sharding: Any
) -> jax.Array:
    """The product of floats as they are."""
    lhs, rhs = operands
    tuples: Any = as_tuples(numbers)
    return jax.lax.dot_general(lhs, rhs, tuples, precision, dtype, out_sharding=out_sharding)


def is_left(lhs: Any, rhs: Any, recipe: Any) -> bool:
    """Whether the weight is lhs: as the recipe says, or as lhs alone is a `QuantizedWeight`."""
    if isinstance(recipe, Recipe) and recipe.weight == "lhs":
        return True
    return isinstance(lhs, QuantizedWeight) and not isinstance(rhs, QuantizedWeight)


def with_weight_first(
    op: str,
    w: Any,
    x: Any,
    numbers: DimensionNumbers,
    *args: Any,
    out_sharding: Any = None,
    **kwargs: Any,
) -> jax.Array:
    """`dot_general` of a weight and of activations: the recipe's rhs and lhs."""
    swapped = swapped_numbers(numbers)
    (summed, _), (lead, _) = swapped
    batch, split = len(lead), np.ndim(x) - len(summed)
    order = (*range(batch), *range(split, split + len(w.shape) - len(summed) - batch))
    order = (*order, *range(batch, split))
    if out_sharding is not None:
        kwargs["out_sharding"] = _reordered(out_sharding, order)
    y = multiplied(op, x, w, swapped, *args, **kwargs)
    return placed(y.transpose(order), out_sharding)


def _reordered(sharding: Any, order: Sequence[int]) -> Any:
    """How an array lies whose dimensions, transposed to an order, lie so."""
    spec = getattr(sharding, "spec", sharding)
    names = (*spec, *[None] * (len(order) - len(spec)))
    spec = PartitionSpec(*(names[order.index(i)] for i in range(len(order))))
    return NamedSharding(sharding.mesh, spec) if isinstance(sharding, NamedSharding) else spec


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
