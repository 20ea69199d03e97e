"""One product of arrays of which some are MX: what it is, without saying how it is computed."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.facts.formats import SCALE_DTYPE
from jax_mx.ops.mxarray import MXArray

Operand = MXArray | jax.Array
Dims = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Dot:
    """One product, without its arrays.

    Attributes:
      tree: the pytree of (lhs, rhs); each is an `MXArray` or floats.
      contracting: the contracted dimensions of lhs, of rhs.
      batch: the batch dimensions of lhs, of rhs.
      dtype: of the result.
      exact: whether the caller asks for Precision.HIGHEST, which no FP8 tensor core gives.
      out_sharding: of the result, on a mesh with explicit axes.
      implementation: the one that the caller insists on, or None.
    """

    tree: Any
    contracting: tuple[Dims, Dims]
    batch: tuple[Dims, Dims]
    dtype: np.dtype
    exact: bool = False
    out_sharding: Any = None
    implementation: str | None = None

    @property
    def numbers(self) -> tuple[tuple[Dims, Dims], tuple[Dims, Dims]]:
        """The dimension numbers, as lax.dot_general has them."""
        return self.contracting, self.batch


@dataclasses.dataclass(frozen=True)
class Call:
    """A product with the shapes and types of its operands, as implementations look at it.

    Attributes:
      dot: the product.
      lhs: an `MXArray` of abstract values, or one of floats.
      rhs: likewise.
      op: its name in messages.
    """

    dot: Dot
    lhs: Any
    rhs: Any
    op: str = "dot_general"

    @property
    def implementation(self) -> str | None:
        """The one that the caller insists on."""
        return self.dot.implementation


def call_of(dot: Dot, leaves: Any) -> Call:
    """The call of a product with these arrays, or abstract values."""
    return Call(dot, *dot.tree.unflatten(leaves))


def scale_floats(scales: jax.Array) -> jax.Array:
    """E8M0 scales as float32: 2^(S - 127) exactly, NaN for 255."""
    assert scales.dtype == SCALE_DTYPE
    byte = jax.lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.uint32)
    bits = jnp.where(byte == 0, np.uint32(1 << 22), byte << np.uint32(23))
    bits = jnp.where(byte == 255, np.uint32(0x7FC00000), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
