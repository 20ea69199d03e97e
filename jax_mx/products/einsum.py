"""`matmul` and `einsum`, by way of `dot_general`."""

import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_mx.formats.checks import array_of, shown
from jax_mx.products.arguments import operand_of
from jax_mx.products.derivative import placed
from jax_mx.products.dot_general import multiplied
from jax_mx.products.fallback import Fallback, as_floats, plain_operands
from jax_mx.products.operand import QuantizedWeight
from jax_mx.products.recipes import AUTO, Recipe, is_floats
from jax_mx.quantizing.mxarray import MXArray


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
    return _einsum(
        op,
        f"{left},{right}->{out}",
        (a, b),
        precision,
        preferred_element_type,
        recipe=recipe,
        out_sharding=out_sharding,
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
    return _einsum(
        op,
        subscripts,
        operands,
        precision,
        preferred_element_type,
        recipe=recipe,
        out_sharding=out_sharding,
        implementation=implementation,
        fallback=fallback,
    )


def _einsum(
    op: str,
    subscripts: str,
    operands: Sequence[Any],
    precision: Any,
    preferred_element_type: Any,
    *,
    recipe: Any,
    out_sharding: Any,
    implementation: Any,
    fallback: Any,
) -> jax.Array:
    """`einsum`, by the name of the function that a caller wrote."""
    options: Any = {"precision": precision, "out_sharding": out_sharding}
    if is_floats(recipe):
        options["preferred_element_type"] = preferred_element_type
        return jnp.einsum(subscripts, *as_floats(*operands), **options)
    try:
        (a, b), (left, right, out) = two(op, subscripts, operands)
    except (TypeError, ValueError) as error:
        plain = plain_operands(op, fallback, operands, recipe, implementation, error)
        wanted = preferred_element_type or plain.dtype
        return jnp.einsum(subscripts, *plain.operands, preferred_element_type=wanted, **options)
    numbers = numbers_of(left, right, out)
    batch = [left[i] for i in numbers[1][0]]
    letters_out = [*batch, *(c for c in left + right if (c in left) != (c in right))]
    order = tuple(letters_out.index(c) for c in out)
    moved = order != tuple(range(len(order)))
    y = multiplied(
        op,
        a,
        b,
        numbers,
        precision,
        preferred_element_type,
        recipe=recipe,
        out_sharding=None if moved else out_sharding,
        implementation=implementation,
        fallback=fallback,
    )
    if not moved:
        return y
    return placed(y.transpose(order), out_sharding)


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
