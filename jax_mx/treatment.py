"""What is done to elements beside scaling: rounded at random, and rotated before."""

from __future__ import annotations

import dataclasses
import json
import operator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx import reference
from jax_mx.formats import BLOCK, FLOAT_DTYPES
from jax_mx.sharding import Spec, iota, reshape, spec_of

SIZES = (16, 32, 64)  # of Hadamard transforms
PRESCALES = (None, 0.75)


@partial(jax.tree_util.register_dataclass, data_fields=("key",), meta_fields=("prescale",))
@dataclasses.dataclass(frozen=True, eq=False)
class Stochastic:
    """Rounding up or down at random, so that the mean of many is the element itself.

    A code is rounded up with the probability of its distance from the code below, to 16 bits.
    Which elements are, follows from the key and their place in the array alone: sharding, layouts,
    transpose and the chip do not matter. A vmap over keys gives each entry its own.
    A pytree; the key is data.

    Attributes:
      key: of `jax.random`.
      prescale: 0.75, or None: what elements are multiplied by, in float32, before their block's
        scale is found. Then `floor` does not clip, where a bias would come from; who asks for it
        multiplies products by 4/3 per operand. A product below 2^-126 is zero.
    """

    key: jax.Array
    prescale: float | None = None


@partial(jax.tree_util.register_dataclass, data_fields=("signs",), meta_fields=("size",))
@dataclasses.dataclass(frozen=True, eq=False)
class Hadamard:
    """A rotation of each `size` consecutive elements along the block axis, before they are scaled.

    See `jax_mx.hadamard`. Products do not change when both operands are rotated alike along the
    axis that is contracted. A pytree; the signs are data.

    Attributes:
      size: 16, 32 or 64; 64 spans two blocks.
      signs: of the elements, before they are rotated: `size` numbers, flipped where negative, or
        bools, flipped where true. None flips none.
    """

    size: int = 16
    signs: jax.typing.ArrayLike | None = None

    @classmethod
    def random(cls, key: jax.Array, size: int = 16) -> Hadamard:
        """With signs from a key of `jax.random`."""
        return cls(size, jax.random.bernoulli(key, shape=(size,)))


@dataclasses.dataclass(frozen=True)
class Treatment:
    """The static side of both, for one quantized array; what is data goes in words, one per block.

    Attributes:
      stochastic: whether the primitive takes seeds, see `reference.noise`.
      prescale: what elements are multiplied by, or None.
      hadamard: the size of the transform, or 0. The primitive takes words whose bit i flips the
        sign of a block's element i.
    """

    stochastic: bool = False
    prescale: float | None = None
    hadamard: int = 0

    @property
    def group(self) -> int:
        """How many elements along the block axis depend on each other."""
        return max(self.hadamard, BLOCK)

    @property
    def words(self) -> int:
        """How many operands of words the primitive takes."""
        return self.stochastic + (self.hadamard > 0)

    def __str__(self) -> str:
        asked = ["rounding 'stochastic'"] if self.stochastic else []
        return " and ".join(asked + [f"hadamard {self.hadamard}"] * bool(self.hadamard))


UNTREATED = Treatment()


def treatment_of(op: str, rounding: Any, hadamard: Any) -> Treatment:
    """Checks both.

    Raises:
      TypeError, ValueError: see `jax_mx.quantize`.
    """
    if not isinstance(rounding, Stochastic | None):
        raise TypeError(f"{op}: rounding must be None or a Stochastic, got {_named(rounding)}")
    if not isinstance(hadamard, Hadamard | None):
        raise TypeError(f"{op}: hadamard must be None or a Hadamard, got {_named(hadamard)}")
    prescale = None
    if rounding is not None:
        key, prescale = rounding.key, rounding.prescale
        dtype, ndim = getattr(key, "dtype", np.dtype(object)), getattr(key, "ndim", None)
        typed = jnp.issubdtype(dtype, jax.dtypes.prng_key)
        if (not typed and dtype != np.uint32) or ndim != (0 if typed else 1):
            found = f"{dtype}{list(key.shape)}" if hasattr(key, "shape") else _named(key)
            raise TypeError(f"{op}: rounding.key must be one key of jax.random, got {found}")
        if prescale not in PRESCALES:
            raise ValueError(f"{op}: rounding.prescale must be None or 0.75, got {prescale!r}")
    if hadamard is None:
        return Treatment(rounding is not None, prescale)
    _checked(op, hadamard.size, hadamard.signs)
    return Treatment(rounding is not None, prescale, hadamard.size)


def pairs(op: str, rounding: Any, hadamard: Any) -> list[tuple[Any, Any]]:
    """(rounding, hadamard) of each direction of `quantize_both`, each given for both or as a pair.

    One `Stochastic` for both gives each direction its own of the two keys that its key splits into.
    """
    if isinstance(rounding, Stochastic):
        treatment_of(op, rounding, None)
        keys = jax.random.split(rounding.key)
        rounding = tuple(dataclasses.replace(rounding, key=key) for key in keys)
    both = []
    for name, value in (("rounding", rounding), ("hadamard", hadamard)):
        pair = value if isinstance(value, tuple | list) else (value, value)
        if len(pair) != 2:
            raise TypeError(f"{op}: {name} must be one for both directions or a pair")
        both.append(pair)
    return [*zip(*both, strict=True)]


def words_of(
    rounding: Stochastic | None,
    hadamard: Hadamard | None,
    shape: tuple[int, ...],
    spec: Spec,
    axis: int,
    mesh,
) -> list[jax.Array]:
    """The words that the primitive takes, of the shape and partition spec of the blocks."""
    words = []
    if rounding is not None:
        number = iota(shape, 0, spec, mesh)
        for d in range(1, len(shape)):
            number = number * _length(shape[d]) + iota(shape, d, spec, mesh)
        key = jax.random.bits(rounding.key, (2,), jnp.uint32)
        words.append(reference.seeds(number, key))
    if hadamard is not None:
        signs = np.zeros(hadamard.size, bool) if hadamard.signs is None else hadamard.signs
        flips = _flips(signs).astype(jnp.uint32)
        flips = jnp.tile(flips, 2 * BLOCK // hadamard.size).reshape(2, BLOCK)
        even, odd = (flips << np.arange(BLOCK, dtype=np.uint32)).sum(-1, dtype=jnp.uint32)
        which = iota(shape, axis, spec, mesh) & np.uint32(1)
        words.append(jnp.where(which == 0, even, odd))
    return words


def hadamard(
    x: jax.typing.ArrayLike,
    size: int = 16,
    signs: jax.typing.ArrayLike | None = None,
    axis: int = -1,
) -> jax.Array:
    """The Walsh-Hadamard transform of each `size` consecutive elements, in natural order.

    y_i = sum over j of (-1)^popcount(i & j) s_j x_j / sqrt(size), as `quantize(x,
    hadamard=Hadamard(size, signs))` has it: signs first, then butterflies (a + b, a - b) over
    strides 1, 2, 4, ..., then one multiplication by float32(1 / sqrt(size)), each operation in
    float32, rounded to nearest even. Where an operand or a result is subnormal, it is zero. The
    same bits everywhere. Its own inverse, but for the signs: x is hadamard(y, size) * signs.

    Args:
      x: bfloat16, float16 or float32.
      size: 16, 32 or 64.
      signs: see `Hadamard`.
      axis: `size` divides its length.

    Returns:
      float32, of x's shape.

    Raises:
      TypeError, ValueError: as `quantize` does.
    """
    op = "hadamard"
    x = jnp.asarray(x)
    _checked(op, size, signs)
    if x.dtype not in FLOAT_DTYPES.values():
        raise TypeError(f"{op}: x is {x.dtype}, must be one of {', '.join(FLOAT_DTYPES)}")
    axis = operator.index(axis)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"{op}: axis {axis} is out of range for rank {x.ndim}")
    if x.shape[axis] % size:
        raise ValueError(
            f"{op}: axis {axis} has length {x.shape[axis]}, not a multiple of the size {size}"
        )
    x = jnp.moveaxis(x.astype(jnp.float32), axis, -1)
    shape, spec = x.shape, spec_of(x)
    groups = reshape(x, (*shape[:-1], shape[-1] // size, size), spec)
    if signs is not None:
        groups = jnp.where(_flips(signs), -groups, groups)
    return jnp.moveaxis(reshape(_transform(groups, size), shape, spec), -1, axis)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _transform(x: jax.Array, size: int) -> jax.Array:  # (..., size)
    return reference.hadamard(x, size)


@_transform.defjvp
def _transform_jvp(size: int, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix *= np.float32(size**-0.5)
    tangent = jnp.matmul(tangents[0], matrix, precision=jax.lax.Precision.HIGHEST)
    return _transform(*primals, size), tangent


def _flips(signs: Any) -> jax.Array:
    """Whether each sign is negative."""
    signs = jnp.asarray(signs)
    return signs if signs.dtype == jnp.bool_ else signs < 0


def _length(n: Any) -> Any:
    """A length, which is symbolic in some exported programs, modulo 2^32."""
    return np.uint32(n % 2**32) if isinstance(n, int) else jnp.asarray(n).astype(jnp.uint32)


def _named(value: Any) -> str:
    """For a message of one line."""
    return repr(value) if isinstance(value, str | int | float) else type(value).__name__


def _checked(op: str, size: Any, signs: Any) -> None:
    if size not in SIZES:
        raise ValueError(
            f"{op}: the size of a Hadamard transform must be 16, 32 or 64, got {size!r}"
        )
    if signs is None:
        return
    signs = jnp.asarray(signs)
    if signs.shape != (size,) or jnp.issubdtype(signs.dtype, jnp.unsignedinteger):
        raise ValueError(
            f"{op}: signs must be {size} bools or numbers of either sign, got "
            f"{signs.dtype}{list(signs.shape)}"
        )


for _type in (Stochastic, Hadamard):
    jax.export.register_pytree_node_serialization(
        _type,
        serialized_name=f"jax_mx.{_type.__name__}",
        serialize_auxdata=lambda aux: json.dumps(aux).encode(),
        deserialize_auxdata=lambda text: tuple(json.loads(text)),
    )
