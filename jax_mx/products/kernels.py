"""The implementation "cutedsl": products that our kernels compute from operands as they lie.

There are three kernels (kernel_plans.py). The first multiplies floats by an MX array, so that few
rows need no floats of a weight. The blocks of the weight run along the contracted axis or, in a
backward pass, along the free one. Few rows in MX become floats first. The second multiplies MX by
MX on FP8 tensor cores, where blocks of 32 come in windows of equal scales. It also sums over groups
that begin at multiples of the window. Where groups begin elsewhere and rows are many, the third
dequantizes both and sums over rows, as a weight's gradient does. A dense product is one group to a
kernel; a batch has one group for each entry.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.formats.checks import is_symbolic
from jax_mx.formats.windows import ROW, TILE
from jax_mx.launch import chips as chip_table
from jax_mx.products import kernel_plans, primitives
from jax_mx.products.contraction import (
    ROWS,
    SUMS,
    Contraction,
    Served,
    blocks_along,
    both_along,
    matrix,
    refused,
    swapped_floats,
)
from jax_mx.quantizing import registry
from jax_mx.quantizing.facts.product_kernels import PRODUCTS
from jax_mx.quantizing.mxarray import MXArray, floats_of
from jax_mx.quantizing.plan import ProductPlan

NAME = "cutedsl"
# Reading a weight's codes beats making floats of them for cuBLAS up to `FEW_ROWS`, if it has
# `LARGE` elements; of a smaller one up to `FEWEST_ROWS`. On an H200, MXFP8, 2026-11-24, x in codes,
# us, by kernels and by dequantizing, one weight again and again: of up to 50 MB it lies in L2.
#   rows              1       16      128     256     512     1024      2048
#   K 7168, N 4096   12 41   14 42   34 47   36 52   57 62    82 99   158 173
#   K 2048, N 7168    9 24   11 21   17 24   20 25   26 34    49 53    96 86
#   K 2880, N 2880    7 10    9 15   19 16   20 22   26 20    36 33    68 57
#   K 8192, N 8192   24 91   28 92   41 95   65 99   92 134  179 217  357 377
# MXFP4 is alike. With blocks along the free axis, K 4096, N 7168, x in floats: 31 44 at 128 rows,
# 89 102 at 1024, 178 171 at 2048.
FEW_ROWS, FEWEST_ROWS, LARGE = 1024, 16, 10_000_000
# In a gradient of weights K is a number of tokens, and tiles are few and long: there cuBLAS, which
# has K shared by more thread blocks, takes floats. So many times N is K of a layer at most.
LONG = 4
# The fewest rows of x that tiles have where FP8 tensor cores multiply.
_FP8_ROWS = min(product.rows for product in PRODUCTS if product.op == "matmul_fp8")
# A W in parts has multiples of so many rows, so that rows of y begin at 16 bytes, and parts of
# multiples of so many elements, so that no copy has some of two.
ALIGNED, PART = 8, 128
# How many elements along K FP8 tensor cores add up before scales are applied, by the window.
_SUMS = {128: 128, TILE: 128, 256: 256, ROW: 256}


def name_of(tile: int | None) -> str:
    """The name of the implementation whose kernels have tiles of `tile` rows of x.

    None: the shapes decide. The names of binaries end in the same way.
    """
    return NAME if tile is None else f"{NAME}_r{tile}"


def support(contraction: Contraction, chips: Sequence[str], *, tile: int | None = None) -> Served:
    """Whether kernels, of any tiles or of one tiling, serve a contraction on chips."""
    plan = plan_of(contraction, tile)
    if isinstance(plan, Served):
        return plan
    served, name = registry.IMPLEMENTATIONS[NAME].support(plan, chips), name_of(tile)
    if served.refusal:
        instead = "'dequantize' serves it"
        refusal = dataclasses.replace(served.refusal, call=contraction.name, instead=instead)
        return Served(name, refusal=refusal)
    plan = dataclasses.replace(plan, implementation=NAME)  # which never falls back in silence
    return Served(name, served.kernels, plan=plan, reads_floats=plan.op in ("matmul", "wgrad"))


def plan_of(contraction: Contraction, tile: int | None) -> ProductPlan | Served:
    """The plan of the kernel that serves a contraction; or why there is none."""
    name, groups = name_of(tile), contraction.numbers.groups
    if contraction.unsplit:
        return refused(name, contraction, contraction.unsplit)
    if why := _obstacle(contraction):
        return refused(name, contraction, why)
    if groups == SUMS:
        return _sums_plan(name, contraction, tile)
    x, w, dtype = contraction.lhs, contraction.rhs, contraction.numbers.dtype
    if not isinstance(x, MXArray) and x.dtype not in kernel_plans.FLOATS:
        return refused(name, contraction, f"takes bfloat16 and float16, no {x.dtype}")
    rows = rows_of(contraction)
    shared: dict[str, Any] = {"grouped": groups == ROWS, "tile": tile}
    strips = kernel_plans.strips_of(contraction.groups, contraction.columns)
    free = _is_free(contraction)
    of_codes = kernel_plans.plan_of((w.format,), dtype, rows, free=free, strips=strips, **shared)
    if not isinstance(x, MXArray):
        return of_codes
    if _on_fp8(contraction):
        formats, windows = (x.format, w.format), windows_of(x, w)
        windows["fast"] = contraction.numbers.fast
        on_fp8 = kernel_plans.plan_of(formats, dtype, rows, **windows, **shared)
        # There are none of so few rows.
        return on_fp8 if tile is None or tile >= _FP8_ROWS else of_codes
    if groups or tile is not None or _has_few_rows(contraction):
        return of_codes
    return kernel_plans.floats_plan_of(jnp.bfloat16, dtype, grouped=False)


def _obstacle(contraction: Contraction) -> str:
    """Why no kernel serves a contraction of these blocks and shapes; empty where one may."""
    x, w, numbers = contraction.lhs, contraction.rhs, contraction.numbers
    is_empty = 0 in (*x.shape, *w.shape)
    if numbers.groups:
        if is_empty:
            return "takes arrays with elements"
        last = isinstance(w, MXArray) and (len(w.block) == 2 or w.axis == -1)
        if numbers.groups == ROWS and not last:
            return "wants an MXArray on the right, in blocks along the last axis"
        return ""
    reads_free = _is_free(contraction) and not isinstance(x, MXArray)
    if not reads_free and not blocks_along(w, numbers.contracting[1]):
        return "wants an MXArray on the right, in blocks along one dimension"
    if len(numbers.batch[0]) > 1 or is_empty:
        return "takes one batch dimension at most, and arrays with elements"
    if isinstance(x, MXArray) and not blocks_along(x, numbers.contracting[0]):
        return "wants the left operand in blocks along one dimension"
    return ""


def _sums_plan(name: str, contraction: Contraction, tile: int | None) -> ProductPlan | Served:
    """The plan of the kernel that sums over groups; or why there is none."""
    x, w, dtype = contraction.lhs, contraction.rhs, contraction.numbers.dtype
    if tile is not None:
        why = "sums over no groups: kernels that do have one tiling"
        return refused(name, contraction, why)
    # Each group begins at a multiple of the window.
    if _on_fp8(contraction) and len(w.block) == 1 and contraction.axes == (-1, -1):
        window = windows_of(x, w)["window"]
        if isinstance(window, int) and contraction.numbers.align % window == 0:
            return kernel_plans.wgrad_plan_of((x.format, w.format), dtype, window)
    dtypes = {np.dtype(jnp.bfloat16) if isinstance(a, MXArray) else a.dtype for a in (x, w)}
    if len(dtypes) > 1 or not dtypes <= {*kernel_plans.FLOATS}:
        names = " and ".join(sorted(dtype.name for dtype in dtypes))
        why = f"sums over groups of one dtype, bfloat16 (also for MX) or float16, not {names}"
        return refused(name, contraction, why)
    return kernel_plans.floats_plan_of(dtypes.pop(), dtype)


def rows_of(contraction: Contraction) -> float:
    """How many rows of lhs meet a matrix of rhs, of groups about."""
    if contraction.numbers.groups:
        return kernel_plans.rows_of_each(contraction.rows, contraction.groups)
    return contraction.rows


def worth(contraction: Contraction, *, tile: int) -> bool:
    """Whether a tiling may be the fastest, and is not what the kernels take anyway.

    The smallest tile that holds all rows may be, and the next smaller one, of which there are more:
    multiprocessors share them better.

    Args:
      contraction: of one shard.
      tile: how many rows of x it has.
    """
    rows = rows_of(contraction)
    if is_symbolic(rows):
        return False
    tilings = kernel_plans.ROWS
    fits = next((i for i, n in enumerate(tilings) if rows <= n), len(tilings) - 1)
    if tile not in tilings[max(fits - 1, 0) : fits + 1]:
        return False
    plan = plan_of(contraction, tile)
    is_there = isinstance(plan, ProductPlan) and plan.product(NAME) in PRODUCTS
    return is_there and plan != plan_of(contraction, None)


def _is_free(contraction: Contraction) -> bool:
    """Whether blocks of rhs run along the last of its free dimensions.

    Times floats it is read as it lies then: where a gradient contracts what the product itself did
    not. Square blocks run along both.
    """
    w = contraction.rhs
    if not isinstance(w, MXArray) or len(contraction.numbers.contracting[1]) != 1:
        return False
    if contraction.numbers.groups:
        return contraction.axes[1] == -2
    free = contraction.free(1)
    return bool(free) and free[-1] == w.ndim + w.axis


def _on_fp8(contraction: Contraction) -> bool:
    """Whether FP8 tensor cores may multiply the codes: they sum with less bits."""
    x, w = contraction.lhs, contraction.rhs
    if contraction.numbers.groups and not both_along(contraction):
        return False
    return not contraction.numbers.exact and have_windows(x, w)


def preferred(contraction: Contraction, platform: str, chips: Sequence[str]) -> bool:
    """Whether kernels are known to be the fastest: of groups and windows always, of few rows."""
    del platform
    if not chips or any(chip_table.arch_of(chip) != "sm_90a" for chip in chips):
        return False
    dense = not contraction.numbers.groups
    return not dense or _has_few_rows(contraction) or _on_fp8(contraction)


def run(contraction: Contraction, served: Served) -> jax.Array:
    """The product; both operands are brought to (batch, rows, K), or floats to (batch, K, rows)."""
    plan, numbers = served.plan, contraction.numbers
    assert plan is not None  # `support`
    x, w = contraction.lhs, contraction.rhs
    if numbers.groups:
        return _run_groups(contraction, plan)
    batch = [x.shape[d] for d in numbers.batch[0]]
    if plan.op == "wgrad":
        sides = zip((x, w), numbers.contracting, numbers.batch, strict=True)
        (a, free), (b, columns) = (_floats(side, c, taken) for side, (c,), taken in sides)
        return primitives.by_plan(plan, a, b).reshape(*batch, *free, *columns)
    if plan.op == "matmul" and isinstance(x, MXArray):
        x = floats_of(x)
    a, free = matrix(x, numbers.contracting[0][0], numbers.batch[0])
    b, columns = matrix(w, numbers.contracting[1][0], numbers.batch[1], plan.free)
    return primitives.by_plan(plan, a, b).reshape(*batch, *free, *columns)


def reads_parts(contraction: Contraction, served: Served, chips: Sequence[str]) -> bool:
    """Whether a dense product has a kernel for codes of rhs in parts of the contracted axis.

    FSDP splits weights along it, and devices gather such parts. To put them in order takes a pass
    over all codes.
    """
    plan, numbers, x = served.plan, contraction.numbers, contraction.lhs
    if plan is None or plan.op != "matmul_fp8" or plan.window != ROW or numbers.groups:
        return False
    is_last = numbers.contracting == ((x.ndim - 1,), (1,)) and not numbers.batch[0]
    parted = dataclasses.replace(plan, parts=2)
    return is_last and not registry.IMPLEMENTATIONS[NAME].support(parted, chips).refusal


def may_be_parts(parts: Sequence[int]) -> bool:
    """Whether that kernel reads codes of this shape, (parts, N, K / parts): whole copies."""
    return parts[1] % ALIGNED == 0 and parts[2] % PART == 0


def _run_groups(contraction: Contraction, plan: ProductPlan) -> jax.Array:
    x, w, sizes, (left, right) = (
        contraction.lhs,
        contraction.rhs,
        contraction.sizes,
        contraction.axes,
    )
    if plan.op == "wgrad":
        x, w = swapped_floats(x, left == -1), swapped_floats(w, right == -1)
    elif plan.op != "wgrad_fp8":
        if len(w.block) == 2:
            w = (w if plan.free or right == -1 else w.mT).expand(-1)
        x = swapped_floats(x, left == -2) if plan.op == "matmul" else x
    return primitives.by_plan(plan, x, w, sizes)


def _floats(x: MXArray, contracted: int, batch: Sequence[int]) -> tuple[jax.Array, list[int]]:
    """An operand in floats (batch, K, rows) or (K, rows), and the lengths that make up its rows."""
    last = x.ndim > 1 and contracted == x.ndim - 1
    floats = floats_of(x, transpose=last)  # in the same pass
    order = [*range(x.ndim)]
    if last:
        order[-2:] = order[:-3:-1]
    free = [d for d in range(x.ndim) if d != contracted and d not in batch]
    floats = floats.transpose([order.index(d) for d in (*batch, contracted, *free)])
    lengths = [x.shape[d] for d in free]
    lead = [x.shape[d] for d in (*batch, contracted)]
    return floats.reshape(*lead, math.prod(lengths)), lengths


def have_windows(x: Any, w: Any) -> bool:
    """Whether FP8 tensor cores may add up products of codes before scales are applied."""
    if not (isinstance(x, MXArray) and isinstance(w, MXArray)):
        return False
    eights = x.format.bits == w.format.bits == 8 and len(x.block) == 1
    return eights and x.window in _SUMS and w.window in _SUMS and x.window != TILE


def windows_of(x: Any, w: Any) -> dict[str, Any]:
    """The windows of a plan "matmul_fp8" of two operands that `have_windows`."""
    if x.window == w.window == ROW:
        return {"window": ROW}
    return {"window": min(_SUMS[x.window], _SUMS[w.window]), "tiles": w.window == TILE}


def _has_few_rows(contraction: Contraction) -> bool:
    """Whether reading the codes of rhs beats making floats of them, see `FEW_ROWS`."""
    rows, k, columns = contraction.rows, contraction.length, contraction.columns
    if is_symbolic(rows) or rows > FEW_ROWS:
        return False
    if rows <= FEWEST_ROWS:
        return True
    if is_symbolic(k) or is_symbolic(columns):
        return False
    return k * columns >= LARGE and k <= LONG * columns
