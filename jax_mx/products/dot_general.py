"""`dot_general`, `matmul` and `einsum` with their operands in MX, floats at both ends."""

import dataclasses
import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_mx.formats.arrangements import placed
from jax_mx.formats.checks import shown
from jax_mx.launch import private
from jax_mx.products.arguments import (
    check_out_sharding,
    is_exact,
    operand_of,
    warn_of_fixed_keys,
)
from jax_mx.products.derivative import product
from jax_mx.products.fallback import Fallback, as_floats, by_jax, check_fallback, plain_operands
from jax_mx.products.operand import QuantizedWeight
from jax_mx.products.planning import (
    DimensionNumbers,
    is_left,
    numbers_of,
    planned,
    swapped_numbers,
    two,
)
from jax_mx.products.recipes import AUTO, Recipe, is_floats
from jax_mx.products.sides import Static, keeps_rows, parts_of
from jax_mx.quantizing.mxarray import MXArray


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
      recipe: a `Recipe`, or the name of one: "mxfp8", "mxfp8_rows", "mxfp8_rows_fast",
        "mxfp8_windows", "mxfp8_hybrid", "mxfp4" or "bf16"; or "auto", the fastest known recipe on
        the chips of the trace, see [training](training.md#the-default-recipe). "floats" switches MX
        off: jax.lax.dot_general multiplies floats, to which it dequantizes an `MXArray`.
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
    check_fallback(op, fallback)
    if is_floats(recipe):
        floats = as_floats(lhs, rhs)
        return by_jax(floats, dimension_numbers, precision, preferred_element_type, out_sharding)
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
        return by_jax(plain.operands, dimension_numbers, precision, wanted, out_sharding)
    lhs, rhs, recipe, layout = call.lhs, call.rhs, call.recipe, call.layout
    if vars(recipe)["dgrad"].rounding or vars(recipe)["wgrad"].rounding:
        warn_of_fixed_keys(op, recipe)
    shared = (is_exact(op, precision), implementation)
    options = (out_sharding, recipe.chosen, recipe.fast, keeps_rows(rhs, recipe))
    static = Static(op, layout, call.dtype, *shared, *options)
    if isinstance(lhs, MXArray) or isinstance(rhs, MXArray):  # nothing is quantized along rows
        static = static.unfollowed
    x = lhs.values if isinstance(lhs, MXArray) else lhs
    rhs = layout.gathered(x, rhs, recipe, out_sharding is not None)
    # In shard_map an operand, or a key, may vary over an axis that the others do not. Where all of
    # them vary, JAX sums the gradients of those others over it.
    leaves, tree = jax.tree.flatten((*parts_of(lhs), *parts_of(rhs), None, recipe))
    return product(static, *tree.unflatten(private.vary_alike(*leaves)))


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


# ---- matmul and einsum ---
def matmul(
    a: Any,
    b: Any,
    *,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    recipe: Recipe | str = AUTO,
    out_sharding: Any = None,
    implementation: str | None = None,
    fallback: Fallback = None,
) -> jax.Array:
    """jnp.matmul with its operands in MX; `dot_general` explains the rest.

    Args:
      a: (..., M, K), or (K,).
      b: (..., K, N), or (K,). Leading dimensions of floats are broadcast; an operand that is
        quantized already must have the same ones as the other.
      precision: see `dot_general`.
      preferred_element_type: see `dot_general`.
      recipe: see `dot_general`.
      out_sharding: see `dot_general`.
      implementation: see `dot_general`.
      fallback: see `dot_general`.

    Returns:
      (..., M, N), without M or N where an operand has one dimension.

    Raises:
      TypeError, ValueError, NotImplementedError: as `dot_general` does.
    """
    op = "matmul"
    a, b = operand_of(op, "a", a), operand_of(op, "b", b)
    if not a.ndim or not b.ndim:
        raise ValueError(f"{op}: a and b must have dimensions, got scalars; use a * b")
    letters = "".join(c for c in string.ascii_letters if c not in "MKN")
    lead = letters[: max(a.ndim - 2, b.ndim - 2, 0)]
    left = lead[len(lead) - max(a.ndim - 2, 0) :] + ("MK" if a.ndim > 1 else "K")
    right = lead[len(lead) - max(b.ndim - 2, 0) :] + ("KN" if b.ndim > 1 else "K")
    if a.ndim > 2 and b.ndim > 2:
        try:
            shape = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        except ValueError as error:
            raise ValueError(
                f"{op}: the leading dimensions {tuple(a.shape[:-2])} of a and "
                f"{tuple(b.shape[:-2])} of b cannot be broadcast"
            ) from error
        a, b = _broadcast(op, a, shape), _broadcast(op, b, shape)
        left, right = lead + "MK", lead + "KN"
    out = lead + "M" * (a.ndim > 1) + "N" * (b.ndim > 1)
    if is_floats(recipe):
        return jnp.einsum(
            f"{left},{right}->{out}",
            *as_floats(a, b),
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )
    return _by_letters(
        op,
        (a, b),
        (left, right, out),
        precision,
        preferred_element_type,
        out_sharding,
        recipe=recipe,
        implementation=implementation,
        fallback=fallback,
    )


def _broadcast(op: str, x: Any, lead: tuple[Any, ...]) -> Any:
    """x with the leading dimensions `lead`."""
    shape = (*lead, *x.shape[-2:])
    if tuple(x.shape) == shape:
        return x
    if isinstance(x, MXArray | QuantizedWeight):
        raise ValueError(
            f"{op}: an operand that is quantized has the leading dimensions {tuple(x.shape[:-2])}, "
            f"the product {lead}; quantize it with these, or use einsum"
        )
    return jnp.broadcast_to(x, shape)


def einsum(
    subscripts: str,
    *operands: Any,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    recipe: Recipe | str = AUTO,
    out_sharding: Any = None,
    implementation: str | None = None,
    fallback: Fallback = None,
) -> jax.Array:
    """jnp.einsum with its two operands in MX; see `dot_general`.

    Args:
      subscripts: "bsd,df->bsf". A letter occurs once in an operand. An ellipsis stands for leading
        dimensions of one operand, or of both with the same rank. Floats are first summed over a
        letter that neither the other operand nor the result has.
      operands: two arrays; one may be an `MXArray`, the second one a `QuantizedWeight`. With a
        fallback jnp.einsum takes any other number.
      precision: see `dot_general`.
      preferred_element_type: see `dot_general`.
      recipe: see `dot_general`.
      out_sharding: see `dot_general`.
      implementation: see `dot_general`.
      fallback: see `dot_general`.

    Returns:
      The array that the subscripts describe.

    Raises:
      TypeError, ValueError, NotImplementedError: as `dot_general` does; ValueError for subscripts
        that are something else than a product of two operands.
    """
    op = "einsum"
    if not isinstance(subscripts, str):
        raise TypeError(f"{op}: subscripts must be a string, got {shown(subscripts)}")
    check_fallback(op, fallback)
    options: Any = {"precision": precision, "out_sharding": out_sharding}
    if is_floats(recipe):
        options["preferred_element_type"] = preferred_element_type
        return jnp.einsum(subscripts, *as_floats(*operands), **options)
    try:
        pair, letters = two(op, subscripts, operands)
    except (TypeError, ValueError) as error:
        plain = plain_operands(op, fallback, operands, recipe, implementation, error)
        wanted = preferred_element_type or plain.dtype
        return jnp.einsum(subscripts, *plain.operands, preferred_element_type=wanted, **options)
    return _by_letters(
        op,
        pair,
        letters,
        precision,
        preferred_element_type,
        out_sharding,
        recipe=recipe,
        implementation=implementation,
        fallback=fallback,
    )


def _by_letters(
    op: str,
    operands: tuple[Any, Any],
    letters: tuple[str, str, str],
    precision: Any,
    preferred_element_type: Any,
    out_sharding: Any,
    **options: Any,
) -> jax.Array:
    """The product of two operands whose dimensions, and the result's, have these letters."""
    left, right, out = letters
    numbers = numbers_of(left, right, out)
    batch = [left[i] for i in numbers[1][0]]
    order_of_dot = [*batch, *(c for c in left + right if (c in left) != (c in right))]
    order = tuple(order_of_dot.index(c) for c in out)
    moved = order != tuple(range(len(order)))
    options["out_sharding"] = None if moved else out_sharding
    y = multiplied(op, *operands, numbers, precision, preferred_element_type, **options)
    return placed(y.transpose(order), out_sharding) if moved else y
