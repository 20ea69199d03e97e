"""Bytes into a tiled layout and back, in jnp: what facts/layouts.py describes."""

import jax
import jax.numpy as jnp

from jax_mx.arrays.reshaping import reshape
from jax_mx.arrays.sharding import gathered, spec_of
from jax_mx.facts.layouts import Layout


def pack(
    layout: Layout,
    matrix: jax.Array,  # (..., rows, cols) of one byte each
) -> jax.Array:  # (..., *layout.shape(rows, cols))
    """Row-major bytes, brought into a layout; the padding is 0x00."""
    if not layout.is_tiled:
        return matrix
    matrix = gathered(matrix, matrix.shape, layout.pad)
    *lead, rows, cols = matrix.shape
    tiles_r, tiles_c, size = layout.shape(rows, cols)
    grow = (tiles_r * layout.tile[0] - rows, tiles_c * layout.tile[1] - cols)
    bits = jax.lax.bitcast_convert_type(matrix, jnp.uint8)
    bits = jnp.pad(bits, [(0, 0)] * len(lead) + [(0, g) for g in grow])
    split = (tiles_r, *layout.row_digits, tiles_c, *layout.col_digits)
    spec = spec_of(matrix)
    bits = reshape(bits, (*lead, *split), _split(layout, spec)).transpose(
        _permutation(layout, len(lead))
    )
    bits = reshape(bits, (*lead, tiles_r, tiles_c, size), spec)
    return jax.lax.bitcast_convert_type(bits, matrix.dtype)


def unpack(
    layout: Layout,
    packed: jax.Array,  # (..., *layout.shape(rows, cols))
    rows: int,
    cols: int,
) -> jax.Array:  # (..., rows, cols)
    """The inverse of `pack`.

    Raises:
      ValueError: `packed` does not have the shape that `rows` x `cols` bytes take.
    """
    shape = layout.shape(rows, cols)
    lead = packed.shape[: max(packed.ndim - len(shape), 0)]
    if packed.shape != (*lead, *shape):
        raise ValueError(
            f"unpack: {rows} x {cols} bytes in {layout.name} have the shape (..., "
            f"{', '.join(map(str, shape))}), got {packed.shape}"
        )
    if not layout.is_tiled:
        return packed
    tiles_r, tiles_c, size = shape
    pads = [p // t for p, t in zip(layout.pad, layout.tile, strict=True)]
    whole = (*lead, rows // layout.tile[0], cols // layout.tile[1], size)
    packed = gathered(packed, whole, (*pads, size))
    split = (tiles_r, *layout.row_digits, tiles_c, *layout.col_digits)
    permutation = _permutation(layout, len(lead))
    bits = jax.lax.bitcast_convert_type(packed, jnp.uint8)
    spec = spec_of(packed)[:-1]
    memory = ((*lead, *split)[p] for p in permutation[len(lead) :])
    bits = reshape(bits, (*lead, *memory), spec)
    inverse = sorted(range(len(permutation)), key=permutation.__getitem__)
    bits = bits.transpose(inverse)
    bits = reshape(bits, (*lead, tiles_r * layout.tile[0], tiles_c * layout.tile[1]), spec)
    bits = jax.lax.bitcast_convert_type(bits, packed.dtype)
    return bits[..., :rows, :cols]


def _split(layout: Layout, spec: tuple) -> tuple:
    """The matrix's partition spec with rows and columns split into tiles and digits."""
    *lead, rows, cols = spec
    return (*lead, rows, *(None for _ in layout.row_digits), cols)


def _permutation(layout: Layout, lead: int) -> tuple[int, ...]:
    """From (lead, row tiles, row digits, column tiles, column digits) to memory order."""
    digits_r = len(layout.row_digits)
    row_tiles, col_tiles = lead, lead + 1 + digits_r
    place = [row_tiles + 1 + i for i in range(digits_r)]
    place += [col_tiles + 1 + i for i in range(len(layout.col_digits))]
    return (*range(lead), row_tiles, col_tiles, *(place[i] for i in layout.order))
