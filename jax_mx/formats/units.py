"""Units: the parts beyond a block that stay whole when devices split an array.

Tiles of scales, tiles of values, windows, and transforms that span two blocks all want more than
one block together. A unit is the least rectangle of the last two axes that holds whole ones of
each. A view (views.py) of an array with units has two dimensions that count units. These may be
split like any leading dimension; the dimensions inside a unit may not.
"""

import math
from collections.abc import Mapping

from jax_mx.formats.formats import BLOCK
from jax_mx.formats.layouts import ROW_MAJOR_VALUES, ScaleLayout, ValueLayout

Order = tuple[int, ...]  # of a tail's dimensions in memory, slowest first

# A tail (n0, n1, 32...) becomes (t0, t1, u0, u1, 32...): t0 x t1 units of u0 x u1. So what was
# dimension 0 is dimensions 0 and 2, and those of length 32 move two places back.
SPLIT: Mapping[int, tuple[int, ...]] = {0: (0, 2), 1: (1, 3), 2: (4,), 3: (5,)}
# The numbers by which launch rules, which know no units, see these dimensions merged again.
MERGED = (0, 1, 0, 1, 2, 3)


def covered(
    scales: ScaleLayout,
    values: ValueLayout = ROW_MAJOR_VALUES,
    codes_per_byte: int = 1,
    group: int = BLOCK,
    window_rows: int = 1,
) -> tuple[int, int]:
    """How many rows, and elements along the block axis, hold whole tiles and whole groups.

    Args:
      scales: where the scales of the quantized array lie.
      values: where its codes lie.
      codes_per_byte: of its format.
      group: how many elements along the block axis depend on each other: 32, or 64 where a
        transform spans two blocks, or a window's.
      window_rows: how many rows share a window.

    Example: scales in blocked_128x4 alone: 128 rows, and 4 blocks of 32 = 128 elements.
    """
    rows = math.lcm(scales.pad[0], values.pad[0], window_rows)
    return rows, math.lcm(scales.pad[1] * BLOCK, values.pad[1] * codes_per_byte, group)


def moved(order: Order, places: Mapping[int, tuple[int, ...]]) -> Order:
    """The same order for a tail whose dimension i became the dimensions places[i]."""
    return tuple(dimension for i in order for dimension in places[i])


def split(length: int, unit: int) -> tuple[int, int]:
    """(how many units, the length of one); a length that is no multiple is one unit."""
    return (length // unit, unit) if length % unit == 0 else (1, length)
