"""The product of two quantized arrays, as its definition has it: the oracle for GEMMs."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.formats.formats import BLOCK, SCALE_DTYPE, SCALE_NAN
from jax_mx.formats.sharding import is_explicit, resharded, shards_of
from jax_mx.formats.views import unpack
from jax_mx.quantizing.mxarray import MXArray, checked

Blocks = tuple[jax.Array, jax.Array]  # (blocks, ..., rows, BLOCK) f32, (blocks, ..., rows) int32


def mx_matmul_reference(a: MXArray, b: MXArray) -> jax.Array:
    """The product of a and b over their block axes, in float32 (OCP MX v1.0, section 6.2).

    The product contracts each operand along the axis of its blocks, the last one or the one before
    it. An operand with square blocks is contracted along its last axis (or `expand` it). Formats
    and layouts may differ. The elements of two blocks are multiplied and added in float32, in an
    order that XLA chooses. Both scales multiply this sum at once. The sums of the blocks are added
    one after another in float32. So only the result of a block can overflow or underflow, and XLA
    may flush a subnormal one. A scale of 255 gives NaN. The function is for comparisons, not for
    speed.

    Args:
      a: (..., M, K) with axis -1, or (..., K, M) with axis -2.
      b: (..., N, K) with axis -1, or (..., K, N) with axis -2. Leading dimensions are broadcast as
        in `jnp.matmul`.

    Returns:
      float32 (..., M, N). On a mesh with explicit axes M and N are split as in a and b, or M alone
      where they share a mesh axis. Leading dimensions, K and split tiles are gathered before.

    Raises:
      TypeError: an operand is not an `MXArray`, or its arrays have other dtypes than its format.
      ValueError: an operand is not a matrix or a stack of matrices, or its blocks run along
        another axis. The shapes of scales and values do not fit each other. The two operands differ
        in K or cannot be broadcast.
    """
    op, sides = "mx_matmul_reference", []
    for name, q in (("a", a), ("b", b)):
        q = checked(op, name, q)
        if q.ndim < 2 or q.axis not in (-1, -2):
            raise ValueError(
                f"{op}: {name} has the shape {q.shape} and blocks along axis {q.axis}; it must be "
                "a matrix, or a stack of them, with blocks along axis -1 or -2"
            )
        sides.append(q)
    a, b = sides
    if a.shape[a.axis] != b.shape[b.axis]:
        raise ValueError(
            f"{op}: a has length {a.shape[a.axis]} along axis {a.axis} and b {b.shape[b.axis]} "
            f"along axis {b.axis}; the product is over both"
        )
    try:
        jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError as error:
        raise ValueError(
            f"{op}: the leading dimensions of a, {a.shape[:-2]}, and of b, {b.shape[:-2]}, cannot "
            "be broadcast"
        ) from error
    left, rows = _blocks(a, ())
    right, _ = _blocks(b, rows)
    elements = left[0], right[0]
    start = _products(*(e[:1].sum(0)[..., :0] for e in elements))  # zeros, sharded as they will be
    return jax.lax.scan(_add_block, start, (left, right))[0]


def _blocks(q: MXArray, taken: tuple[str, ...]) -> tuple[Blocks, tuple[str, ...]]:
    """Elements and scales' bytes, a block after another, and the mesh axes that rows lie over.

    On a mesh with explicit axes: of those that rows lie over, none is kept that is `taken`.
    """
    scales, along_last = q.scales, q.axis == -1
    ones = jax.lax.bitcast_convert_type(scales, jnp.uint8) | np.uint8(SCALE_NAN)
    ones = jax.lax.bitcast_convert_type(ones & np.uint8(127), SCALE_DTYPE)  # sharded as scales are
    q = MXArray(q.values, ones, q.format, q.axis, q.scale_layout, q.block, q.value_layout)
    elements = q.dequantize(jnp.float32, implementation="xla")
    elements = elements if along_last else jnp.swapaxes(elements, -1, -2)
    names, _ = shards_of(elements, -2)
    names = () if set(names) & set(taken) else names
    elements = _by_rows(elements, names)
    *lead, rows, length = elements.shape
    elements = elements.reshape(*lead, rows, length // BLOCK, BLOCK)

    if q.scale_layout.is_tiled:  # of rows whose blocks follow one another, along either axis
        scales = unpack(q.scale_layout, scales, rows, length // BLOCK)
    elif not along_last:
        scales = jnp.swapaxes(scales, -1, -2)
    if len(q.block) == 2:
        scales = jnp.repeat(_by_rows(scales, ()), BLOCK, axis=-2)
    scales = _by_rows(scales, names)
    scales = jax.lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.int32)
    return (jnp.moveaxis(elements, -2, 0), jnp.moveaxis(scales, -1, 0)), names


def _by_rows(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """x (..., rows, n); on an explicit mesh with its rows split over these axes, nothing else."""
    if not is_explicit(jax.typeof(x).sharding.mesh):
        return x
    spec = [*[None] * (x.ndim - 2), names or None, None]
    return resharded(x, spec, jax.typeof(x).sharding.mesh)


def _products(left: jax.Array, right: jax.Array) -> jax.Array:
    """(..., M, n) and (..., N, n) into (..., M, N)."""
    return jnp.matmul(left, jnp.swapaxes(right, -1, -2), precision=jax.lax.Precision.HIGHEST)


def _add_block(total: jax.Array, blocks: tuple[Blocks, Blocks]) -> tuple[jax.Array, None]:
    """total + the product of one block of each row of each side."""
    (left, a), (right, b) = blocks
    a, b = jnp.expand_dims(a, -1), jnp.expand_dims(b, -2)
    exponent = a + b - 254
    half = exponent >> 1  # two factors, each a normal number; both of one sign, or 0
    product = _products(left, right) * _power(half) * _power(exponent - half)
    poisoned = (a == SCALE_NAN) | (b == SCALE_NAN)
    return total + jnp.where(poisoned, jnp.nan, product), None


def _power(exponent: jax.Array) -> jax.Array:
    """2^exponent, at least the least normal number: less is 0 anyway, of products of elements."""
    field = (jnp.maximum(exponent, -126) + 127) << 23
    return jax.lax.bitcast_convert_type(field, jnp.float32)
