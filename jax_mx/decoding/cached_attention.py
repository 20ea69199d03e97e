"""`CachedAttention`: a step of a chain that is the attention of a token to a cache."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.decoding.steps import State, is_plain
from jax_mx.formats.checks import array_of, float_dtype, is_symbolic, shown
from jax_mx.quantizing.facts.product_kernels import (
    ATTENDED_BY_ONE,
    ATTENDED_DEPTHS,
    ATTENDED_HEADS,
    FEWEST,
)
from jax_mx.quantizing.plan import ProductPlan
from jax_mx.quantizing.reference.attention import attended


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["keys", "values", "position", "cos", "sin"],
    meta_fields=["scale"],
)
@dataclasses.dataclass(frozen=True)
class CachedAttention:
    """A step of `matmul_chain`: the attention of one token to those before it and to itself.

        attend = jax_mx.CachedAttention(keys, values, position, jnp.cos(angles), jnp.sin(angles))
        steps = [(norm, qkv), attend, o, (next_norm, gate_up, "swiglu"), down]
        y, x, [(keys, values)] = jax_mx.matmul_chain(x, steps, residual=residual)

    It takes rows of queries, then a key and then a value for each of G heads, (H + 2 G) D columns.
    It turns queries and keys by the angles of their position: elements i and i + D / 2 of a head
    are a pair. It puts the token's key and value into the cache, and gives H D columns. Scores and
    sums have float32, and the weights of values are rounded to x's dtype. It is a pytree.

    On Hopper it joins a call of `matmul_chain` for caches in bfloat16 whose D is 64 or 128, where
    up to 8 heads of queries share keys. The call writes the caches where they lie if the program
    donates them or carries them through a loop. Else XLA copies them first.

    Attributes:
      keys: floats (B, L, G, D), of up to L tokens for each of x's rows.
      values: of the same shape and dtype.
      position: integers (B,) or one for all: how many tokens are there. The token's own place is
        there, one below 0 at 0, and one beyond the cache at its end.
      cos: floats (B, D / 2) or (D / 2,), of the angles.
      sin: floats (B, D / 2) or (D / 2,).
      scale: of scores; None: 1 / sqrt(D).
    """

    keys: jax.typing.ArrayLike
    values: jax.typing.ArrayLike
    position: jax.typing.ArrayLike
    cos: jax.typing.ArrayLike
    sin: jax.typing.ArrayLike
    scale: float | None = None


class Attention(NamedTuple):
    """A `CachedAttention` whose arrays are checked; one position and one row of angles for each."""

    name: str
    keys: jax.Array
    values: jax.Array
    position: jax.Array
    cos: jax.Array
    sin: jax.Array
    scale: float

    @property
    def floats(self) -> list[jax.Array]:
        """Its arrays that have derivatives."""
        return [self.keys, self.values, self.cos, self.sin]

    @property
    def constants(self) -> list[jax.Array]:
        """Its other arrays."""
        return [self.position]

    def of(self, floats: Sequence[jax.Array], constants: Sequence[jax.Array]) -> "Attention":
        """The same of other arrays."""
        keys, values, cos, sin = floats
        return Attention(self.name, keys, values, constants[0], cos, sin, self.scale)

    @property
    def operands(self) -> list[jax.Array]:
        """The arrays that its kernel takes besides x."""
        return [self.keys, self.values, self.position, self.cos, self.sin]

    def lines(self, state: State, eps: float) -> State:
        """The lines that it stands for."""
        del eps
        float_dtype(self.name, "x", state.x.dtype)
        if error := self._unfit(state.x.shape):
            raise ValueError(error)
        lead, length = state.x.shape[:-1], state.x.shape[-1]
        rows = state.x.reshape(-1, length)
        y, *cache = attended(rows, *self.operands, scale=self.scale)
        return State(y.reshape(*lead, -1), state.residual, (*state.caches, (cache[0], cache[1])))

    def _unfit(self, shape: tuple[int, ...]) -> str:
        """Why an x of a shape does not fit the cache; empty where it does."""
        batch, _, groups, depth = self.keys.shape
        if not shape or math.prod(shape[:-1]) != batch:
            return (
                f"{self.name}: keys have {batch} rows, x {shape} has {math.prod(shape[:-1])}; "
                "each row of x is a token, which has a row of the cache"
            )
        heads, rest = divmod(shape[-1] - 2 * groups * depth, depth)
        if rest or heads < 1 or heads % groups:
            return (
                f"{self.name}: x has {shape[-1]} columns; of keys {self.keys.shape} it needs (H + "
                f"{2 * groups}) * {depth}, for H heads of queries, a multiple of {groups}"
            )
        return ""

    def length_behind(self, length: int) -> int:
        """The columns of its result, of an x that has so many."""
        return length - 2 * self.keys.shape[2] * self.keys.shape[3]

    def plans(self, state: State, length: int, eps: float) -> list[ProductPlan]:
        """The plan of its kernel, of an x of so many columns; none where there is none."""
        del eps
        if any(map(is_symbolic, self.keys.shape)) or not is_plain(*self.floats[:2]):
            return []
        _, _, groups, depth = self.keys.shape
        most = (ATTENDED_HEADS + 2) * groups * depth
        if (
            length > most
            or depth not in ATTENDED_DEPTHS
            or self._unfit((*state.x.shape[:-1], length))
        ):
            return []
        rows = 1 if self.keys.shape[0] * groups <= ATTENDED_BY_ONE else FEWEST
        return [ProductPlan("attention", (), state.x.dtype, False, rows, scale=self.scale)]


def attention_of(name: str, step: CachedAttention) -> Attention:
    """A step whose arrays fit each other.

    Args:
      name: of the step, in messages.
      step: a caller's.

    Raises:
      TypeError, ValueError: it is none, or its arrays do not.
    """
    keys, values = (array_of(name, word, getattr(step, word)) for word in ("keys", "values"))
    if keys.ndim != 4 or keys.shape[3] % 2 or 0 in keys.shape[1:]:
        raise ValueError(
            f"{name}: keys must be (B, L, G, D) with an even D and no zeros, got {keys.shape}"
        )
    if (values.shape, values.dtype) != (keys.shape, keys.dtype):
        raise ValueError(
            f"{name}: values must be {keys.dtype} {keys.shape} as keys are, got {values.dtype} "
            f"{values.shape}"
        )
    position = _position_of(name, step.position, keys)
    half = keys.shape[3] // 2
    turn = []
    for word in ("cos", "sin"):
        angles = getattr(step, word)
        if getattr(angles, "dtype", None) == np.float64:
            angles = angles.astype(np.float32)
        angles = array_of(name, word, angles).astype(jnp.float32)
        if angles.shape not in ((half,), (1, half), (keys.shape[0], half)):
            raise ValueError(
                f"{name}: {word} must be ({half},) or ({keys.shape[0]}, {half}) for keys "
                f"{keys.shape}, got {angles.shape}"
            )
        turn.append(jnp.broadcast_to(angles, (keys.shape[0], half)))
    return Attention(name, keys, values, position, turn[0], turn[1], _scale_of(name, step, keys))


def _position_of(name: str, position: Any, keys: jax.Array) -> jax.Array:
    """The int32 (B,) that a position is, within the cache or at least within int32.

    Raises:
      TypeError, ValueError: it is none.
    """
    batch, length = keys.shape[:2]
    if isinstance(position, int | np.integer | np.ndarray) and not is_symbolic(length):
        host = np.asarray(position)
        if host.dtype.kind in "iu":  # before JAX cuts 64 bits
            wide = host if host.dtype == np.uint64 else host.astype(np.int64)
            position = np.clip(wide, 0, length - 1)
    try:
        places = jnp.asarray(position)
    except (TypeError, ValueError, OverflowError):
        places = None
    integers = places is not None and jnp.issubdtype(places.dtype, jnp.integer)
    if places is None or not integers or places.shape not in ((), (batch,)):
        value = shown(position) if places is None else f"{places.dtype} {places.shape}"
        sentence = f"{name}: position must be an integer or integers ({batch},), got {value}"
        raise TypeError(sentence) if not integers else ValueError(sentence)
    if places.dtype.itemsize > 4 or places.dtype == jnp.uint32:  # else int32 has them all
        places = jnp.clip(places, 0, length - 1)
    return jnp.broadcast_to(places.astype(jnp.int32), (batch,))


def _scale_of(name: str, step: CachedAttention, keys: jax.Array) -> float:
    """The scale of scores, as float32 has it.

    Raises:
      TypeError, ValueError: it is no number, or not finite.
    """
    sentence = f"{name}: scale must be a finite number or None, got {shown(step.scale)}"
    if step.scale is None:
        return float(np.float32(keys.shape[3] ** -0.5))
    if isinstance(step.scale, str | bool):
        raise TypeError(sentence)
    try:
        scale = float(step.scale)
    except (TypeError, ValueError) as error:
        raise TypeError(sentence) from error
    if not abs(scale) <= float(np.finfo(np.float32).max):
        raise ValueError(sentence)
    return float(np.float32(scale))
