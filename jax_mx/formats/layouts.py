"""The places of the bytes of scales and values; jax_mx/formats/views.py moves them in jnp.

A matrix that is quantized along its last axis has `rows` x `cols` scales, cols = K / 32. GEMMs want
them in tiles, and some want the values' bytes so too. A tiled layout permutes the bits of the row
and column number inside a tile, after padding with zeros. So a layout is a row of the tables below
and no code. The kernels' build reads the tables too.
"""

import dataclasses
import math
from collections.abc import Mapping


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
        return math.prod(sizes[digit] for digit in faster)

    @property
    def is_tiled(self) -> bool:
        """Whether bytes lie in tiles, i.e. not as the matrix itself would."""
        return bool(self.order)

    def shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """A matrix' shape in bytes: (rows, cols), or (row tiles, column tiles, bytes of a tile)."""
        if not self.is_tiled:
            return rows, cols
        padded = [-(-n // p) * p for n, p in zip((rows, cols), self.pad, strict=True)]
        tiles = [n // t for n, t in zip(padded, self.tile, strict=True)]
        return tiles[0], tiles[1], math.prod(self.tile)

    def __repr__(self) -> str:
        return self.name.upper()


class ScaleLayout(Layout):
    """The place of the scale of (row, col), for a matrix that is quantized along its last axis.

    Use the three constants; other layouts are refused.

    - `ROW_MAJOR`: as the matrix lies, without tiles.
    - `BLOCKED_128X4`: for tcgen05 and cuBLAS (CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0). In a tile
      of 512 bytes (r, c) lies at `(r % 32) * 16 + (r / 32) * 4 + c`.
    - `SHUFFLED_32X8`: aiter's e8m0_shuffle, hipBLASLt's BLK32_UE8M0_32_8_EXT. In a tile of 256
      bytes (r, c) lies at `(c % 4) * 64 + (r % 16) * 4 + (c / 4) * 2 + r / 16`.

    Attributes:
      name: in lower case, as arguments take it.
      pad: padding with zeros fills rows and columns up to multiples of these.
      row_digits: the sizes of the digits of a tile's row number, most significant first.
      col_digits: the same of its column number.
      order: these digits, rows' first, from the slowest to the fastest in memory.
    """


class ValueLayout(Layout):
    """The place of byte col of a row of values; blocks run along the row.

    Lengths must be multiples of a tile. Use the two constants; other layouts are refused.

    - `ROW_MAJOR_VALUES`: as the matrix lies, without tiles.
    - `SHUFFLED_16X16`: aiter's shuffle_weight with layout (16, 16), for values of any width. In a
      tile of 16 rows and 32 bytes (r, c) lies at `(c / 16) * 256 + r * 16 + c % 16`.

    Attributes:
      name: in lower case, as arguments take it.
      pad: a tile's rows and bytes, which divide lengths.
      row_digits: see `ScaleLayout`.
      col_digits: see `ScaleLayout`.
      order: see `ScaleLayout`.
    """

    def __repr__(self) -> str:
        return super().__repr__() + "_VALUES" * (not self.is_tiled)

    def rows_cols(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The inverse of `shape`: rows and columns of the matrix whose bytes have this shape."""
        if not self.is_tiled:
            return shape[-2], shape[-1]
        return shape[-3] * self.tile[0], shape[-2] * self.tile[1]


ROW_MAJOR = ScaleLayout("row_major")
BLOCKED_128X4 = ScaleLayout("blocked_128x4", (128, 4), (4, 32), (4,), order=(1, 0, 2))
SHUFFLED_32X8 = ScaleLayout("shuffled_32x8", (256, 8), (2, 16), (2, 4), order=(3, 1, 2, 0))

SCALE_LAYOUTS: Mapping[str, ScaleLayout] = {
    layout.name: layout for layout in (ROW_MAJOR, BLOCKED_128X4, SHUFFLED_32X8)
}

ROW_MAJOR_VALUES = ValueLayout("row_major")
SHUFFLED_16X16 = ValueLayout("shuffled_16x16", (16, 32), (16,), (2, 16), order=(1, 0, 2))

VALUE_LAYOUTS: Mapping[str, ValueLayout] = {
    layout.name: layout for layout in (ROW_MAJOR_VALUES, SHUFFLED_16X16)
}
