"""Stochastic rounding and Hadamard transforms: a caller's arguments, and their way to a plan."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.formats.checks import array_of, axis_of, has_elements, one_of, padded, shown, window_of
from jax_mx.formats.formats import BLOCK
from jax_mx.formats.sharding import iota, spec_of
from jax_mx.formats.views import divided, reshape
from jax_mx.formats.windows import Window
from jax_mx.quantizing import reference
from jax_mx.quantizing.derivatives import derived
from jax_mx.quantizing.facts.preprocessing import NO_PREPROCESSING, PRESCALES, SIZES, Preprocessing
from jax_mx.quantizing.metadata import register_for_export
from jax_mx.quantizing.placing import require_whole_groups
from jax_mx.quantizing.plan import Plan


class Value:
    """A pytree, equal to one with the same static fields, numbers of NumPy and very arrays of JAX.

    So one that is rebuilt, or a copy, is no new static argument of a jitted function.
    """

    def _parts(self) -> tuple[Any, ...]:
        leaves, structure = jax.tree.flatten(self)
        return structure, *map(_part, leaves)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Value):
            return NotImplemented
        return self is other or self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self._parts())


def _part(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return leaf.dtype, leaf.shape, leaf.tobytes()
    return id(leaf)


@partial(jax.tree_util.register_dataclass, data_fields=("key",), meta_fields=("prescale",))
@dataclasses.dataclass(frozen=True, eq=False)
class Stochastic(Value):
    """Rounding up or down at random, so that the mean of many is the element itself.

    An element is rounded up with a probability that is its distance from the code below, to 16
    bits. The key and an element's place in the array decide alone: sharding, layouts, transpose and
    the chip do not matter. A vmap over keys gives each entry its own bits. One key under a vmap
    over x alone gives every entry the same bits: split it. A pytree; the key is data.

    Attributes:
      key: of `jax.random`.
      prescale: 0.75, or None: a factor of the elements, in float32, before their block's scale is
        computed. The caller multiplies products by 4/3 for each such operand. The factor does not
        keep `floor` from clipping: that rule looks at the multiplied elements. `rceil` and `ceil`
        do not clip. A product below 2^-126 is zero.
    """

    key: jax.Array
    prescale: float | None = None

    def __post_init__(self):
        """Raises ValueError for another prescale."""
        matches = [p for p in PRESCALES if _is(self.prescale, p)]
        if not matches:
            raise ValueError(
                f"Stochastic: prescale must be None or 0.75, got {shown(self.prescale)}"
            )
        object.__setattr__(self, "prescale", matches[0])  # no NumPy scalar, as it is hashed


@partial(jax.tree_util.register_dataclass, data_fields=("signs",), meta_fields=("size",))
@dataclasses.dataclass(frozen=True, eq=False)
class Hadamard(Value):
    """A rotation of each `size` consecutive elements along the block axis, before they are scaled.

    See `jax_mx.hadamard`. Products do not change when both operands are rotated alike along the
    axis that is contracted. A pytree; the signs are data.

    Attributes:
      size: 16, 32 or 64, which divides the axis's length (on explicit meshes a shard's); 64
        spans two blocks.
      signs: of the elements, before they are rotated: an array or a list of `size` floats or signed
        integers, flipped where negative (-0 too), or bools, flipped where true. None flips none. A
        list or an array of NumPy is compiled in: this is faster, but other signs make another
        program. The arguments of a jitted function are arrays of JAX.
    """

    size: int = 16
    signs: jax.typing.ArrayLike | None = None

    def __post_init__(self):
        """Raises TypeError, ValueError for another size."""
        object.__setattr__(self, "size", _size("Hadamard", self.size))
        if isinstance(self.signs, list | tuple) and len(self.signs) == self.size:
            with contextlib.suppress(TypeError, ValueError):  # then calls say what is wrong
                object.__setattr__(self, "signs", np.asarray(self.signs))  # one leaf, not many

    @classmethod
    def random(cls, key: jax.Array, size: int = 16) -> Hadamard:
        """With signs from a key of `jax.random`: the same whatever jax_enable_x64 says.

        Args:
          key: a key, typed or of raw uint32s; one key gives one set of signs.
          size: how many elements are transformed together; see `Hadamard`.

        Returns:
          A `Hadamard` whose signs are an array: it may be made within jit.

        Raises:
          TypeError, ValueError: key is not a single key, or there is no transform of this size.
        """
        size = _size("Hadamard", size)
        _check_key("Hadamard.random", "key", key)
        return cls(size, jax.random.bits(key, (size,), jnp.uint32) < np.uint32(1 << 31))


# The data of a call's preprocessing: a key of `jax.random`, and signs that are a JAX array.
Data = tuple[jax.Array | None, jax.Array | None]


def data_of(rounding: Stochastic | None, hadamard: Hadamard | None) -> Data:
    """The arrays of both; signs that are NumPy's are no data but part of the plan."""
    signs = None if hadamard is None else hadamard.signs
    key = None if rounding is None else rounding.key
    return key, signs if isinstance(signs, jax.Array) else None


def preprocessing_of(
    op: str, rounding: Any, hadamard: Any, window: Any = BLOCK, *more: Window
) -> Preprocessing:
    """Checks the arguments and gives their static part; `more` allows further windows.

    Raises:
      TypeError, ValueError: see `jax_mx.quantize`.
    """
    window = window_of(op, window, *more)
    if rounding is None and hadamard is None:
        return NO_PREPROCESSING if window == BLOCK else Preprocessing(window=window)
    if not isinstance(rounding, Stochastic | None):
        raise TypeError(f"{op}: rounding must be None or a Stochastic, got {shown(rounding)}")
    if not isinstance(hadamard, Hadamard | None):
        raise TypeError(f"{op}: hadamard must be None or a Hadamard, got {shown(hadamard)}")
    if rounding is not None:
        _check_key(op, "rounding.key", rounding.key)
    flips = None
    if hadamard is not None:
        signs = _signs(op, hadamard.signs, hadamard.size)
        if isinstance(signs, np.ndarray):
            even, odd = _flips_of_blocks(signs)
            flips = int(even), int(odd)
    return Preprocessing(
        rounding is not None,
        None if rounding is None else rounding.prescale,
        0 if hadamard is None else hadamard.size,
        flips,
        window,
    )


def pairs(op: str, rounding: Any, hadamard: Any, split: bool = True) -> list[tuple[Any, Any]]:
    """(rounding, hadamard) of each direction of `quantize_both`, each given for both or as a pair.

    One `Stochastic` for both gives each direction its own of the two keys that its key splits into,
    or, without `split`, the same.
    """
    if split and isinstance(rounding, Stochastic):
        preprocessing_of(op, rounding, None)
        keys = jax.random.split(rounding.key)
        rounding = tuple(dataclasses.replace(rounding, key=key) for key in keys)
    both = []
    for name, value in (("rounding", rounding), ("hadamard", hadamard)):
        pair = value if isinstance(value, tuple | list) else (value, value)
        if len(pair) != 2:
            raise TypeError(f"{op}: {name} must be one for both directions or a pair")
        both.append(pair)
    return [*zip(*both, strict=True)]


def block_data_of(x: jax.Array, data: Sequence[Data], plan: Plan) -> list[jax.Array]:
    """The operands of a uint32 per block that the primitive takes, direction by direction.

    Args:
      x: the array that is quantized; the operands are sharded as it is.
      data: of each direction, see `data_of`.
      plan: the call.
    """
    arrays: list[jax.Array] = []
    for i, (block_data, static) in enumerate(zip(data, plan.preprocessing, strict=True)):
        axes = (-1 - i,) if plan.op == "quantize_both" else plan.axes
        arrays += _block_data(block_data, static, x, axes)
    return arrays


def _block_data(
    data: Data, preprocessing: Preprocessing, x: jax.Array, axes: Sequence[int]
) -> list[jax.Array]:
    """Seeds, then words of signs, which go along the last of the axes that blocks run along."""
    shape, spec, mesh = divided(x.shape, axes, BLOCK), spec_of(x), jax.typeof(x).sharding.mesh
    arrays, (key, signs) = [], data
    if key is not None:
        number = iota(shape, 0, spec, mesh)
        for d in range(1, len(shape)):
            number = number * _length(shape[d]) + iota(shape, d, spec, mesh)
        bits = jax.random.bits(key, (2,), jnp.uint32)
        arrays.append(reference.seeds(number, bits))
    if signs is not None:
        even, odd = _flips_of_blocks(_signs("quantize", signs, preprocessing.hadamard))
        which = iota(shape, axes[-1], spec, mesh) & np.uint32(1)
        arrays.append(jnp.where(which == 0, even, odd))
    return arrays


def hadamard(
    x: jax.typing.ArrayLike,
    size: int = 16,
    signs: jax.typing.ArrayLike | None = None,
    axis: int = -1,
) -> jax.Array:
    """The Walsh-Hadamard transform of each `size` consecutive elements, in natural order.

    y_i = sum over j of (-1)^popcount(i & j) s_j x_j / sqrt(size), as `quantize(x,
    hadamard=Hadamard(size, signs))` has it. Signs come first, then butterflies (a + b, a - b) over
    strides 1, 2, 4, ..., then one multiplication by float32(1 / sqrt(size)). Each operation is in
    float32, rounded to nearest even; a subnormal operand or result is zero. All chips give the same
    bits. Without signs the transform is its own inverse, except for rounding. With signs, as +-1, x
    is hadamard(y, size) * signs.

    Args:
      x: bfloat16, float16 or float32.
      size: 16, 32 or 64.
      signs: see `Hadamard`.
      axis: `size` divides its length.

    Returns:
      float32, of x's shape.

    Raises:
      TypeError, ValueError: as `quantize` does.
      ShardingTypeError: on a mesh with explicit axes, a shard would split a group.
    """
    op = "hadamard"
    x = array_of(op, "x", x)
    size, axis = _size(op, size), axis_of(op, axis, x.ndim)
    flips = None if signs is None else _flips(_signs(op, signs, size))
    if x.shape[axis] % size:
        raise ValueError(
            f"{op}: axis {axis} has length {x.shape[axis]}, not a multiple of the size {size}; "
            f"{padded(x.shape[axis], size)} or use a smaller one"
        )
    require_whole_groups(op, x, x.shape, axis, size)
    return rotated(x.astype(jnp.float32), size, flips, axis)


def rotated(x: jax.Array, size: int, flips: Any, axis: int, inverse: bool = False) -> jax.Array:
    """The transform of float32 values that fit it, or its inverse.

    Args:
      x: float32.
      size: of the transform.
      flips: whether each of `size` elements is negated, before, or of the inverse after; or None.
      axis: negative.
      inverse: whether it is.
    """
    x = jnp.moveaxis(x, axis, -1)
    shape, spec = x.shape, spec_of(x)
    groups = reshape(x, (*shape[:-1], shape[-1] // size, size), spec)

    def signed(groups: jax.Array) -> jax.Array:
        if flips is None:
            return groups
        return jnp.where(flips.reshape(*[1] * (groups.ndim - 1), size), -groups, groups)

    groups = signed(_transform(groups, size)) if inverse else _transform(signed(groups), size)
    return jnp.moveaxis(reshape(groups, shape, spec), -1, axis)


def flips_of(preprocessing: Preprocessing, signs: jax.Array | None) -> Any:
    """The elements that a transform negates, as `rotated` takes them.

    Args:
      preprocessing: the static part, with a transform.
      signs: an array of JAX, or None where they are static; see `data_of`.
    """
    if signs is not None:
        return _flips(_signs("hadamard", signs, preprocessing.hadamard))
    even, odd = preprocessing.flips or (0, 0)
    return np.array([(even | odd << BLOCK) >> i & 1 == 1 for i in range(preprocessing.hadamard)])


def _transform(x: jax.Array, size: int) -> jax.Array:  # (..., size)
    def rule(_: Any, __: Any, tangents: list) -> list[jax.Array]:
        matrix = np.ones((1, 1), np.float32)
        while len(matrix) < size:
            matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        matrix *= np.float32(size**-0.5)
        return [jnp.matmul(tangents[0], matrix, precision=jax.lax.Precision.HIGHEST)]

    return derived([_transform_at_once(jax.lax.stop_gradient(x), size)], [x], rule)[0]


# One program where a call is eager, not one for each operation: 7 seconds the first time.
_transform_at_once = jax.jit(reference.hadamard, static_argnums=1)


def _flips(signs: Any) -> Any:
    """Whether each sign is negative, -0 included, for NumPy's as for JAX's.

    By the bit: XLA's CPU takes subnormals for zeros.
    """
    if signs.dtype == np.bool_:
        return signs
    if jnp.issubdtype(signs.dtype, jnp.integer):
        return signs < 0
    if isinstance(signs, np.ndarray):
        return np.signbit(signs)
    return jnp.signbit(signs.astype(jnp.float32))


def _flips_of_blocks(signs: Any) -> Any:
    """`Preprocessing.flips`, of NumPy's signs or of JAX's."""
    xp = np if isinstance(signs, np.ndarray) else jnp
    flips = xp.tile(_flips(signs).astype(np.uint32), 2 * BLOCK // len(signs)).reshape(2, BLOCK)
    return (flips << np.arange(BLOCK, dtype=np.uint32)[None]).sum(-1, dtype=np.uint32)


def _length(n: Any) -> Any:
    """A length, which is symbolic in some exported programs, modulo 2^32."""
    return np.uint32(n % 2**32) if isinstance(n, int) else jnp.asarray(n).astype(jnp.uint32)


def _is(value: Any, want: float | None) -> bool:
    """Whether a static argument is this number, of Python, NumPy or an array; or None."""
    if value is None or want is None:
        return value is want
    try:
        return not isinstance(value, str | bytes) and float(value) == want
    except (TypeError, ValueError):  # of a tracer, too
        return False


def _size(op: str, size: Any) -> int:
    return one_of(f"{op}: size must be 16, 32 or 64, got {shown(size)}", size, SIZES)


def _check_key(op: str, name: str, key: Any) -> None:
    has_elements(op, name, key)
    dtype, shape = getattr(key, "dtype", np.dtype(object)), getattr(key, "shape", None)
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raw, want = "", ()
    else:
        raw = jax.eval_shape(jax.random.PRNGKey, 0).shape
        raw, want = f", or a raw uint32{[*raw]}", raw
    if shape != want or (raw and dtype != np.uint32):
        got = shown(key) if shape is None else f"{dtype}{[*shape]}"
        raise TypeError(f"{op}: {name} must be one key of jax.random{raw}, got {got}")


def _signs(op: str, signs: Any, size: int) -> jax.Array | np.ndarray:
    """The signs as an array, of NumPy unless they are one of JAX."""
    if signs is None:
        return np.zeros(size, bool)
    has_elements(op, "signs", signs)
    try:
        array = signs if isinstance(signs, jax.Array) else np.asarray(signs)
    except (TypeError, ValueError):
        array, got = None, type(signs).__name__
    else:
        got = f"{array.dtype}{[*array.shape]}"
        kinds = (np.bool_, jnp.signedinteger, jnp.floating)
        if array.shape != (size,) or not any(jnp.issubdtype(array.dtype, k) for k in kinds):
            array = None
        elif isinstance(array, np.ndarray) and (array != array).any():
            array, got = None, "a NaN among them"
    if array is None:
        raise ValueError(f"{op}: signs must be {size} bools or numbers of either sign, got {got}")
    return array


for _type in (Stochastic, Hadamard):
    register_for_export(_type)
