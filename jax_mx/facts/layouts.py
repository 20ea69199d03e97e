"""Where the bytes of scales and of values lie: layouts, and the way there and back in jnp.

A matrix that is quantized along its last axis has `rows` x `cols` scales, cols = K / 32. GEMMs want
them in tiles, and some want the values' bytes so too. A tiled layout is a permutation of the bits
of the row and column number inside a tile, after padding with zeros, so a layout is a row of the
tables below and no code. The kernels' build reads the tables too, and has no JAX: only the
functions that need JAX import it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the byte of (row, col) lies.

    Rows are padded to a multiple of `pad[0]` and columns to one of `pad[1]`, with bytes 0x00. A
    tile's row number is split into digits of the sizes `row_digits`, most significant first, its
    column number into `col_digits`; `order` lists these digits (rows' first, then columns') from
    the slowest to the fastest in memory. No digits: row-major, without tiles.
    """

    name: str
    pad: tuple[int, int] = (1, 1)
    row_digits: tuple[int, ...] = ()
    col_digits: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        return math.prod(self.row_digits), math.prod(self.col_digits)

    @property
    def column_stride(self) -> int:
        """How far apart two neighbouring columns lie in a tile, but for the edge of a digit."""
        sizes = (*self.row_digits, *self.col_digits)
        faster = self.order[self.order.index(len(sizes) - 1) + 1 :] if sizes else ()
        return math.prod(sizes[place] for place in faster)

    @property
    def is_tiled(self) -> bool:
        """Whether bytes lie in tiles, i.e. not as the matrix itself would."""
        return bool(self.order)

    def shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """Of a matrix of bytes: (rows, cols), or (row tiles, column tiles, bytes of a tile)."""
        if not self.is_tiled:
            return rows, cols
        padded = [-(-n // p) * p for n, p in zip((rows, cols), self.pad, strict=True)]
        tiles = [n // t for n, t in zip(padded, self.tile, strict=True)]
        return tiles[0], tiles[1], math.prod(self.tile)

    def pack(
        self,
        matrix: jax.Array,  # (..., rows, cols) of one byte each
    ) -> jax.Array:  # (..., *shape(rows, cols))
        """Row-major bytes into this layout; the padding is 0x00."""
        import jax
        import jax.numpy as jnp

        from jax_mx.arrays.sharding import gathered, reshape, spec_of

        if not self.is_tiled:
            return matrix
        matrix = gathered(matrix, matrix.shape, self.pad)
        *lead, rows, cols = matrix.shape
        tiles_r, tiles_c, size = self.shape(rows, cols)
        grow = (tiles_r * self.tile[0] - rows, tiles_c * self.tile[1] - cols)
        bits = jax.lax.bitcast_convert_type(matrix, jnp.uint8)
        bits = jnp.pad(bits, [(0, 0)] * len(lead) + [(0, g) for g in grow])
        split = (tiles_r, *self.row_digits, tiles_c, *self.col_digits)
        spec = spec_of(matrix)
        bits = reshape(bits, (*lead, *split), self._split(spec)).transpose(
            self._permutation(len(lead))
        )
        bits = reshape(bits, (*lead, tiles_r, tiles_c, size), spec)
        return jax.lax.bitcast_convert_type(bits, matrix.dtype)

    def unpack(
        self,
        packed: jax.Array,  # (..., *shape(rows, cols))
        rows: int,
        cols: int,
    ) -> jax.Array:  # (..., rows, cols)
        """The inverse of `pack`.

        Raises:
          ValueError: `packed` does not have the shape that `rows` x `cols` bytes take.
        """
        import jax
        import jax.numpy as jnp

        from jax_mx.arrays.sharding import gathered, reshape, spec_of

        shape = self.shape(rows, cols)
        lead = packed.shape[: max(packed.ndim - len(shape), 0)]
        if packed.shape != (*lead, *shape):
            raise ValueError(
                f"unpack: {rows} x {cols} bytes in {self.name} have the shape (..., "
                f"{', '.join(map(str, shape))}), got {packed.shape}"
            )
        if not self.is_tiled:
            return packed
        tiles_r, tiles_c, size = shape
        pads = [p // t for p, t in zip(self.pad, self.tile, strict=True)]
        packed = gathered(
            packed, (*lead, rows // self.tile[0], cols // self.tile[1], size), (*pads, size)
        )
        split = (tiles_r, *self.row_digits, tiles_c, *self.col_digits)
        permutation = self._permutation(len(lead))
        bits = jax.lax.bitcast_convert_type(packed, jnp.uint8)
        spec = spec_of(packed)[:-1]
        memory = ((*lead, *split)[p] for p in permutation[len(lead) :])
        bits = reshape(bits, (*lead, *memory), spec)
        inverse = sorted(range(len(permutation)), key=permutation.__getitem__)
        bits = bits.transpose(inverse)
        bits = reshape(bits, (*lead, tiles_r * self.tile[0], tiles_c * self.tile[1]), spec)
        bits = jax.lax.bitcast_convert_type(bits, packed.dtype)
        return bits[..., :rows, :cols]

    def _split(self, spec: tuple) -> tuple:
        """The matrix's partition spec with rows and columns split into tiles and digits."""
        *lead, rows, cols = spec
        return (*lead, rows, *(None for _ in self.row_digits), cols)

    def _permutation(self, lead: int) -> tuple[int, ...]:
        """From (lead, row tiles, row digits, column tiles, column digits) to memory order."""
        digits_r = len(self.row_digits)
        row_tiles, col_tiles = lead, lead + 1 + digits_r
        place = [row_tiles + 1 + i for i in range(digits_r)]
        place += [col_tiles + 1 + i for i in range(len(self.col_digits))]
        return (*range(lead), row_tiles, col_tiles, *(place[i] for i in self.order))

    def __repr__(self) -> str:
        return self.name.upper()


class ScaleLayout(Layout):
    """Where the scale of (row, col) lies, of a matrix that is quantized along its last axis."""


class ValueLayout(Layout):
    """Where byte col of a row of values lies; blocks run along the row. Nothing is padded."""

    def rows_cols(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The inverse of `shape`: of the matrix whose bytes have it, as their last dimensions."""
        if not self.is_tiled:
            return shape[-2], shape[-1]
        return shape[-3] * self.tile[0], shape[-2] * self.tile[1]


ROW_MAJOR = ScaleLayout("row_major")
# tcgen05 and cuBLAS (CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0): in a tile of 512 bytes
# (r, c) lies at (r % 32) * 16 + (r / 32) * 4 + c.
BLOCKED_128X4 = ScaleLayout("blocked_128x4", (128, 4), (4, 32), (4,), order=(1, 0, 2))
# aiter's e8m0_shuffle, hipBLASLt's BLK32_UE8M0_32_8_EXT: in a tile of 256 bytes
# (r, c) lies at (c % 4) * 64 + (r % 16) * 4 + (c / 4) * 2 + r / 16.
SHUFFLED_32X8 = ScaleLayout("shuffled_32x8", (256, 8), (2, 16), (2, 4), order=(3, 1, 2, 0))

SCALE_LAYOUTS: Mapping[str, ScaleLayout] = {
    layout.name: layout for layout in (ROW_MAJOR, BLOCKED_128X4, SHUFFLED_32X8)
}

ROW_MAJOR_VALUES = ValueLayout("row_major")
# aiter's shuffle_weight with layout (16, 16), for values of any width: in a tile of 16 rows and
# 32 bytes, (r, c) lies at (c / 16) * 256 + r * 16 + c % 16.
SHUFFLED_16X16 = ValueLayout("shuffled_16x16", (16, 32), (16,), (2, 16), order=(1, 0, 2))

VALUE_LAYOUTS: Mapping[str, ValueLayout] = {
    layout.name: layout for layout in (ROW_MAJOR_VALUES, SHUFFLED_16X16)
}
