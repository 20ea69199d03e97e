"""`CachedAttention`: a step of a chain that is the attention of a token to a cache."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.decoding.steps import State, is_plain
from jax_mx.formats.checks import array_of, float_dtype, is_symbolic, shown
from jax_mx.products.attention import attended
from jax_mx.quantizing.facts.product_kernels import (
    ATTENDED_BY_ONE,
    ATTENDED_DEPTHS,
    ATTENDED_HEADS,
    FEWEST,
)
from jax_mx.quantizing.plan import ProductPlan


@dataclasses.dataclass(frozen=True)
class CachedAttention:
    """A step of `matmul_chain`: the attention of one token to those before it and to itself.

        attend = jax_mx.CachedAttention(keys, values, position, jnp.cos(angles), jnp.sin(angles))
        steps = [(norm, qkv), attend, o, (next_norm, gate_up, "swiglu"), down]
        y, x, [(keys, values)] = jax_mx.matmul_chain(x, steps, residual=residual)

    It takes rows of queries, then a key and then a value for each of G heads, (H + 2 G) D columns.
    It turns queries and keys by the angles of their position: elements i and i + D / 2 of a head
    are a pair. It puts the token's key and value into the cache, and gives H D columns. Scores and
    sums have float32, the weights of values x's dtype.

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

    def with_floats(self, floats: Sequence[jax.Array]) -> "Attention":
        """The same of others."""
        keys, values, cos, sin = floats
        return self._replace(keys=keys, values=values, cos=cos, sin=sin)

    @property
    def operands(self) -> list[jax.Array]:
        """The arrays that its kernel takes besides x."""
        return [self.keys, self.values, self.position, self.cos, self.sin]

    def lines(self, state: State, eps: float) -> State:
        """The lines that it stands for."""
        del eps
        lead, length = state.x.shape[:-1], state.x.shape[-1]
        float_dtype(self.name, "x", state.x.dtype)
        self._heads(lead, length)
        rows = state.x.reshape(-1, length)
        y, *cache = attended(rows, *self.operands, scale=self.scale)
        return State(y.reshape(*lead, -1), state.residual, (*state.caches, (cache[0], cache[1])))

    def _heads(self, lead: tuple[int, ...], length: int) -> int:
        """The heads of queries that an x of so many columns has.

        Raises:
          ValueError: it does not fit the cache.
        """
        batch, _, groups, depth = self.keys.shape
        if math.prod(lead) != batch:
            raise ValueError(
                f"{self.name}: keys have {batch} rows, x {(*lead, length)} has {math.prod(lead)}; "
                "each row of x is a token, which has a row of the cache"
            )
        heads, rest = divmod(length - 2 * groups * depth, depth)
        if rest or heads < 1 or heads % groups:
            raise ValueError(
                f"{self.name}: x has {length} columns; of keys {self.keys.shape} it needs (H + "
                f"{2 * groups}) * {depth}, for H heads of queries, a multiple of {groups}"
            )
        return heads

    def length_behind(self, length: int) -> int:
        """The columns of its result, of an x that has so many."""
        return length - 2 * self.keys.shape[2] * self.keys.shape[3]

    def plans(self, state: State, length: int, eps: float) -> list[ProductPlan]:
        """The plan of its kernel, of an x of so many columns; none where there is none."""
        del eps
        heads = self._heads(state.x.shape[:-1], length)
        _, _, groups, depth = self.keys.shape
        fits = heads <= ATTENDED_HEADS * groups and depth in ATTENDED_DEPTHS
        if any(map(is_symbolic, self.keys.shape)) or not (fits and is_plain(*self.floats[:2])):
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
    keys, values = (_floats(name, word, getattr(step, word)) for word in ("keys", "values"))
    if keys.ndim != 4 or keys.shape[3] % 2 or 0 in keys.shape:
        raise ValueError(f"{name}: keys must be (B, L, G, D) with an even D, got {keys.shape}")
    if (values.shape, values.dtype) != (keys.shape, keys.dtype):
        raise ValueError(
            f"{name}: values must be {keys.dtype} {keys.shape} as keys are, got {values.dtype} "
            f"{values.shape}"
        )
    position = jnp.asarray(step.position)
    if not jnp.issubdtype(position.dtype, jnp.integer) or position.shape not in (
        (),
        keys.shape[:1],
    ):
        raise ValueError(
            f"{name}: position must be an integer or integers ({keys.shape[0]},), got "
            f"{position.dtype} {position.shape}"
        )
    half = keys.shape[3] // 2
    turn = []
    for word in ("cos", "sin"):
        angles = array_of(name, word, getattr(step, word)).astype(jnp.float32)
        if angles.shape not in ((half,), (1, half), (keys.shape[0], half)):
            raise ValueError(
                f"{name}: {word} must be ({half},) or ({keys.shape[0]}, {half}) for keys "
                f"{keys.shape}, got {angles.shape}"
            )
        turn.append(jnp.broadcast_to(angles, (keys.shape[0], half)))
    if position.dtype.itemsize > 4 or position.dtype == jnp.uint32:  # else int32 has them all
        position = jnp.clip(position, 0, keys.shape[1] - 1)
    position = position.astype(jnp.int32)
    try:
        scale = float(np.float32(keys.shape[3] ** -0.5 if step.scale is None else step.scale))
    except (TypeError, ValueError) as error:
        sentence = f"{name}: scale must be a number or None, got {shown(step.scale)}"
        raise TypeError(sentence) from error
    places = jnp.broadcast_to(position, keys.shape[:1])
    return Attention(name, keys, values, places, turn[0], turn[1], scale)


def _floats(name: str, word: str, x: Any) -> jax.Array:
    """An array of floats that a caller passes."""
    array = array_of(name, word, x)
    float_dtype(name, word, array.dtype)
    return array
