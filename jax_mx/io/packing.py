"""Codes of 6 bits as matrix units read them: four in three bytes."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_mx.formats.sharding import gathered, spec_of
from jax_mx.formats.views import reshape
from jax_mx.quantizing.mxarray import MXArray, checked


def pack_mxfp6(values: MXArray | jax.typing.ArrayLike) -> jax.Array:
    """Packs codes of MXFP6, which `MXArray.values` has one in each byte: four codes in three bytes.

    Packing runs along the last axis, and blocks must run along it too. The first code is in the
    lowest bits, as in CDNA's operands and in CUTLASS's arrays of such elements. The upper two bits
    of an input byte do not count.

    Args:
      values: an MXArray in MXFP6 (..., K) with blocks along the last axis; or its values, uint8
        (..., K). Bare bytes cannot be checked to be MXFP6's.

    Returns:
      uint8 (..., 3 K / 4).

    Raises:
      TypeError: another dtype.
      ValueError: 4 does not divide the last axis; or an MXArray is in another format, its blocks
        run along another axis, or its values lie in tiles.
    """
    if isinstance(values, MXArray):
        q = checked("pack_mxfp6", "values", values)
        if q.format.bits != 6 or q.axis != -1 or q.value_layout.is_tiled:
            raise ValueError(
                "pack_mxfp6: it packs MXFP6 with blocks along the last axis and values in "
                f"'row_major', got {q.format!r} with axis {q.axis} and {q.value_layout.name!r}"
            )
        values = q.values
    return _regrouped("pack_mxfp6", values, 4, 6, 3, 8)


def unpack_mxfp6(packed: jax.typing.ArrayLike) -> jax.Array:
    """The inverse of `pack_mxfp6`.

    Args:
      packed: uint8 (..., 3 K / 4).

    Returns:
      uint8 (..., K).

    Raises:
      TypeError: another dtype.
      ValueError: 3 does not divide the last axis.
    """
    return _regrouped("unpack_mxfp6", packed, 3, 8, 4, 6)


def _regrouped(op: str, array: Any, n: int, width: int, into: int, to: int) -> jax.Array:
    """Each `n` numbers of `width` bits as `into` numbers of `to` bits, the lowest first."""
    if getattr(array, "dtype", None) != jnp.uint8:
        got = getattr(array, "dtype", type(array).__name__)
        raise TypeError(f"{op}: it takes bytes, uint8, got {got}")
    x = jnp.asarray(array)
    if x.ndim < 1 or x.shape[-1] % n:
        raise ValueError(f"{op}: {n} must divide the last axis, the shape is {x.shape}")
    x = gathered(x, x.shape, (n,))
    *lead, length = x.shape
    spec = spec_of(x)
    groups = reshape(x, (*lead, length // n, n), spec).astype(jnp.uint32)
    word = sum((groups[..., i] & 2**width - 1) << width * i for i in range(n))
    parts = jnp.stack([word >> to * i & 2**to - 1 for i in range(into)], axis=-1)
    return reshape(parts.astype(jnp.uint8), (*lead, length // n * into), spec)
