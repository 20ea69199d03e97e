"""One product of arrays of which some are MX: what it is, without saying how it is computed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.facts.formats import BLOCK, SCALE_DTYPE
from jax_mx.lowering.registry import Refusal, Support
from jax_mx.ops.mxarray import MXArray
from jax_mx.products.choices import Key

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
      exact: whether the caller asks for a precision that no FP8 tensor core gives.
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
      partitioned: whether XLA splits the program among devices, outside of shard_map.
    """

    dot: Dot
    lhs: Any
    rhs: Any
    op: str = "dot_general"
    partitioned: bool = False

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.op

    @property
    def implementation(self) -> str | None:
        """The one that the caller insists on."""
        return self.dot.implementation

    @property
    def length(self) -> int:
        """How many products are summed."""
        return math.prod(self.lhs.shape[d] for d in self.dot.contracting[0])

    @property
    def work(self) -> int:
        """How many products there are."""
        batch = math.prod(self.lhs.shape[d] for d in self.dot.batch[0])
        sizes = [math.prod(side.shape) for side in (self.lhs, self.rhs)]
        return math.prod(sizes) // max(self.length * batch, 1)

    @property
    def how(self) -> str:
        """What its speed depends on besides its operands, in words."""
        dot = self.dot
        pairs = [
            " ".join(f"{i}:{j}" for i, j in zip(*dims, strict=True))
            for dims in (dot.contracting, dot.batch)
        ]
        how = [f"contracts {pairs[0]}", f"batch {pairs[1]}" if pairs[1] else ""]
        how += [f"to {dot.dtype.name}", "highest precision" if dot.exact else ""]
        return ", ".join(filter(None, how))

    @property
    def in_a_shard(self) -> Call:
        """The call as each device has it: of shapes that the axes of explicit meshes divide.

        Those of automatic meshes do not: a trace does not know what they will split.
        """
        dot = dataclasses.replace(self.dot, out_sharding=None)
        lhs, rhs = (jax.tree.map(shard_of, side) for side in (self.lhs, self.rhs))
        return Call(dot, lhs, rhs, self.op)


def shard_of(aval: Any) -> Any:
    """The abstract value of an array as each device has it."""
    if aval.sharding is None:  # a shard already
        return aval
    mesh, spec = aval.sharding.mesh, tuple(aval.sharding.spec)
    shape = []
    for n, axes in zip(aval.shape, (*spec, *[None] * (aval.ndim - len(spec))), strict=True):
        names = (axes,) if isinstance(axes, str) else tuple(axes or ())
        shape.append(n // math.prod(mesh.shape[name] for name in names))
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype)


def key_of(call: Any, chip: str) -> Key:
    """What the speed of a call on a chip depends on.

    Args:
      call: a `Call`, or another op's.
      chip: as its driver names it.
    """
    local = call.in_a_shard
    return Key(call.op, chip, tuple(map(_words, (local.lhs, local.rhs))), local.how)


def _words(x: Any) -> str:
    """All of an operand that its speed depends on."""
    shape = "x".join(map(str, x.shape))
    if not isinstance(x, MXArray):
        return f"{np.dtype(x.dtype).name} {shape}"
    block = f"in {x.block[0]}x{x.block[1]}" if len(x.block) == 2 else f"along {x.axis}"
    window = "x".join(map(str, x.window)) if isinstance(x.window, tuple) else str(x.window)
    found = [f"{x.format.name} {shape} {block}", f"window {window}" if x.window != BLOCK else ""]
    found += [each.name for each in (x.scale_layout, x.value_layout) if each.is_tiled]
    return " ".join(filter(None, found))


def call_of(dot: Dot, leaves: Any) -> Call:
    """The call of a product with these arrays, or abstract values."""
    return Call(dot, *dot.tree.unflatten(leaves))


def blocks_along(x: Any, dims: Sequence[int]) -> bool:
    """Whether an operand is MX with its blocks along the one contracted dimension."""
    if not isinstance(x, MXArray) or len(dims) != 1:
        return False
    axes = (-2, -1) if len(x.block) == 2 else (x.axis,)
    return dims[0] - x.ndim in axes


def both_along(call: Call) -> bool:
    """Whether both operands are."""
    sides = zip((call.lhs, call.rhs), call.dot.contracting, strict=True)
    return all(blocks_along(x, dims) for x, dims in sides)


def refused(name: str, call: Any, why: str) -> Support:
    """That an implementation does not serve a call, and what does."""
    instead = "use implementation=None or 'dequantize'"
    return Support(name, refusal=Refusal(call.op, f"{name!r} {why}", instead=instead))


def scale_floats(scales: jax.Array) -> jax.Array:
    """E8M0 scales as float32: 2^(S - 127) exactly, NaN for 255."""
    assert scales.dtype == SCALE_DTYPE
    byte = jax.lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.uint32)
    bits = jnp.where(byte == 0, np.uint32(1 << 22), byte << np.uint32(23))
    bits = jnp.where(byte == 255, np.uint32(0x7FC00000), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
