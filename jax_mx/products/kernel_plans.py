"""Plans of products: the kernels that multiply operands as they lie. primitives.py calls them.

Four ops. "matmul" has floats and an MX array, "matmul_fp8" two MX arrays on FP8 tensor cores.
"wgrad" (floats) and "wgrad_fp8" (MX arrays) contract rows, for a weight's gradient. Codes and
scales are row-major, in blocks along the last axis; sums are float32.

Groups. Rows behind the last group's give 0, and no sum meets them. Sizes beyond the number of rows
count as far as there are rows; negative sizes are 0. An empty group's gradient is zeros.

Not a number. A NaN of w makes its column NaN for all rows of its group. A scale of 255 makes its
block NaN. No NaN leaves its group.

FP8 tensor cores. Kernels take all scales within a window as equal; callers vouch for that. In
"wgrad_fp8" each group begins at a multiple of the window and has a multiple of it; other sizes give
other sums. The cores cut each product at 2^-13 of the largest one and of the window's sum so far.
So an element is off by at most window * 2^-13 * sum `|x||w|`, where a window "row" counts as 256.
An H200 was measured for K from 128 to 65,536, relative to sum `|x||w|`. Normal numbers are off by
at most 4e-4 (of y's norm 1.3e-4 for windows of 128, 2.1e-4 for 256). Numbers of one sign are off by
at most 4e-3. Where one product in each window is 2^13 times the others, it is 2.1e-2. With fast
accumulation K is the window: numbers of one sign are off by 7 % for K 4096.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.formats.checks import is_symbolic
from jax_mx.formats.formats import BLOCK, MXFP8_E4M3, Format
from jax_mx.formats.windows import ROW
from jax_mx.quantizing.facts.product_kernels import (
    FEWEST,
    PRODUCTS,
    TILE,
    ProductKernel,
    fp8_rows,
)
from jax_mx.quantizing.plan import ProductPlan

# So many tiles of 128 columns are narrow: each multiprocessor of a Hopper has two tiles of 16, or
# half of one of 64.
_NARROW = 33
# How many rows of x tiles may have, in ascending order: each tiling is a kernel.
ROWS = tuple(sorted({p.rows for p in PRODUCTS if p.op in ("matmul", "matmul_fp8")}))
# The same of floats times codes, by W's format and whether W is free.
_TILES = {
    key: [n for n in ROWS if ProductKernel("matmul", "cutedsl", key[0], n, free=key[1]) in PRODUCTS]
    for key in {(p.formats, p.free) for p in PRODUCTS if p.op == "matmul"}
}
# Tiles of 256 rows, so many, take half of a Hopper's multiprocessors: twice as many of 128 rows are
# faster. On an H200, K 7168, N 4096, 2026-11-24: 256 rows 71 us and 33, 512 rows 73 and 53; 1024
# rows, which are 128 tiles, 79 and 105.
_FEW_TILES = 66
_DEPTH = 64  # rows that "wgrad" contracts at a time
FLOATS = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))  # of x


# ---- plans ---
def plan_of(
    formats: tuple[Format, ...],
    dtype: np.dtype,
    rows: float,
    window: int | str = BLOCK,
    tiles: bool = False,
    grouped: bool = False,
    implementation: str | None = None,
    free: bool = False,
    strips: float = math.inf,
    tile: int | None = None,
    fast: bool = False,
    narrow: bool | None = None,
) -> ProductPlan:
    """The plan of "matmul", of one format, or "matmul_fp8", of two.

    `rows`: how many rows of x a group has, about. `strips`: how many tiles lie beside each other,
    of all groups. `tile`: how many rows tiles have, one of `ROWS`, whatever the shapes ask for.
    `fast`: whether sums may be, where a kernel's are, see `ProductKernel`.
    `narrow`: whether y has few columns; None: its shape says, where there are no groups.
    """
    op = "matmul" if len(formats) == 1 else "matmul_fp8"
    if tile is None:
        if op == "matmul":
            allowed = [n for n in _TILES[formats, free] if n >= FEWEST or not grouped]
            tile = _tile_for(rows, strips, allowed)
        else:
            tile = _fp8_tile_for(rows, window, tiles, grouped)
    fast = fast and window == ROW and set(formats) == {MXFP8_E4M3}
    options = window, tiles, implementation, free
    plan = ProductPlan(op, formats, dtype, grouped, tile, *options, fast=fast)
    slim = dataclasses.replace(plan, narrow=True)
    if narrow is None:
        narrow = strips <= _NARROW and not grouped and slim.product("cutedsl") in PRODUCTS
    return slim if narrow else plan


def wgrad_plan_of(
    formats: tuple[Format, ...],
    dtype: np.dtype,
    window: int | str,
    implementation: str | None = None,
) -> ProductPlan:
    """The plan of "wgrad_fp8"."""
    return ProductPlan("wgrad_fp8", formats, dtype, True, TILE, window, False, implementation)


def floats_plan_of(
    floats: jax.typing.DTypeLike,
    dtype: np.dtype,
    grouped: bool = True,
    implementation: str | None = None,
) -> ProductPlan:
    """The plan of "wgrad"."""
    name = jnp.dtype(floats).name
    return ProductPlan(
        "wgrad", (), dtype, grouped, _DEPTH, implementation=implementation, floats=name
    )


def rows_of_each(total: int, groups: int) -> float:
    """How many of so many rows a group has, about; of a symbolic number all."""
    return total if is_symbolic(total) else total / max(groups, 1)


def strips_of(groups: int, columns: int) -> float:
    """How many tiles of "matmul" lie beside each other."""
    if is_symbolic(groups) or is_symbolic(columns):
        return math.inf
    return groups * math.ceil(columns / TILE)


def _tile_for(rows: float, strips: float, allowed: Sequence[int]) -> int:
    """How many rows a tile should have, of these numbers, where groups have so many."""
    most = allowed[-1]
    if is_symbolic(rows):
        return most
    if math.ceil(rows / most) * strips <= _FEW_TILES:
        allowed = allowed[:-1]
    return next((n for n in allowed if rows <= n), allowed[-1])


def _fp8_tile_for(rows: float, window: int | str, tiles: bool, grouped: bool) -> int:
    """The same of two MX operands: the most that leave few thread blocks without rows."""
    *more, least = fp8_rows(window, tiles)
    if grouped or is_symbolic(rows):
        return least
    return next((n for n in more if -rows % n < max(least, rows / 16)), least)
