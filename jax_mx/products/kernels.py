"""The implementation "cutedsl": products that our kernels compute from operands as they lie.

Three kernels (ops/gemm.py): floats times an MX array, which spares few rows the floats of a weight,
whether its blocks run along the contracted axis or, in a backward pass, along the free one; few
rows in MX are made floats first. MX times MX on FP8 tensor cores, where blocks of 32 come in
windows of equal scales. And where they do not, and rows are many, the product of floats that are
made of both, summed over rows, as a weight's gradient is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_mx.arrays.checks import is_symbolic
from jax_mx.facts import chips as chip_table
from jax_mx.facts.products import PRODUCTS
from jax_mx.facts.windows import ROW, TILE
from jax_mx.lowering import registry
from jax_mx.lowering.plan import ProductPlan
from jax_mx.lowering.registry import Support
from jax_mx.ops import gemm
from jax_mx.ops.mxarray import MXArray, dequantize
from jax_mx.products.dot import Call, Dot, Operand, blocks_along, refused

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
# How many elements along K FP8 tensor cores add up before scales are applied, by the window.
_SUMS = {128: 128, TILE: 128, 256: 256, ROW: 256}


def name_of(tile: int | None) -> str:
    """The implementation that takes kernels whose tiles have so many rows of x.

    None: those that the shapes ask for. The binaries' names say it likewise.
    """
    return NAME if tile is None else f"{NAME}_r{tile}"


def support(call: Call, chips: Sequence[str], *, tile: int | None = None) -> Support:
    """Whether kernels serve a call on chips, those of any tiles or of one tiling."""
    plan = _plan(call, tile)
    return plan if isinstance(plan, Support) else support_of(call.op, plan, chips, tile)


def _plan(call: Call, tile: int | None) -> ProductPlan | Support:
    """The plan of the kernel that serves a call; or why there is none."""
    name, dot, x, w = name_of(tile), call.dot, call.lhs, call.rhs
    if call.partitioned:
        return refused(name, call, "is not split among devices by XLA; use jax.shard_map")
    free = _is_free(w, dot)
    if not (free and not isinstance(x, MXArray)) and not blocks_along(w, dot.contracting[1]):
        return refused(name, call, "wants an MXArray on the right, in blocks along one dimension")
    if len(dot.batch[0]) > 1 or 0 in (*x.shape, *w.shape):
        return refused(name, call, "takes one batch dimension at most, and arrays with elements")
    rows, _, columns, groups = _sizes(call)
    strips = gemm.strips_of(groups, columns)
    of_codes = gemm.plan_of((w.format,), dot.dtype, rows, free=free, strips=strips, tile=tile)
    if not isinstance(x, MXArray):
        if x.dtype not in gemm.FLOATS:
            return refused(name, call, f"takes bfloat16 and float16, no {x.dtype}")
        return of_codes
    if not blocks_along(x, dot.contracting[0]):
        return refused(name, call, "wants the left operand in blocks along one dimension")
    if _on_fp8(call):
        formats, windows = (x.format, w.format), windows_of(x, w)
        return one_of(gemm.plan_of(formats, dot.dtype, rows, **windows, tile=tile), of_codes, tile)
    if tile is not None or _has_few_rows(call):
        return of_codes
    return gemm.floats_plan_of(jnp.bfloat16, dot.dtype, grouped=False)


def one_of(plan: ProductPlan, of_codes: ProductPlan, tile: int | None) -> ProductPlan:
    """The plan of FP8 tensor cores; for tiles of fewer rows than these have, the other one."""
    return plan if tile is None or tile >= _FP8_ROWS else of_codes


def is_worth_timing(call: Any, tile: int, rows: float, plan_of: Callable[..., Any]) -> bool:
    """Whether a tiling may be the fastest, and is not what the kernels take anyway.

    Worth it are the smallest tile that holds all rows, and the next smaller one, of which there are
    more: multiprocessors share them better.

    Args:
      call: of one shard.
      tile: how many rows of x it has.
      rows: how many a group has, about.
      plan_of: gives the plan of the kernel that serves a call with a tiling, or by itself (None).
    """
    if is_symbolic(rows):
        return False
    fits = next((i for i, n in enumerate(gemm.ROWS) if rows <= n), len(gemm.ROWS) - 1)
    if tile not in gemm.ROWS[max(fits - 1, 0) : fits + 1]:
        return False
    plan = plan_of(call, tile)
    is_there = isinstance(plan, ProductPlan) and plan.product(NAME) in PRODUCTS
    return is_there and plan != plan_of(call, None)


def reads_floats(plan: Any) -> bool:
    """Whether the kernel of a plan reads x, or both operands, in floats."""
    return isinstance(plan, ProductPlan) and plan.op in ("matmul", "wgrad")


def makes_floats(call: Call, *, tile: int | None = None) -> bool:
    """Whether kernels read floats of a call's operands, or of lhs."""
    return reads_floats(_plan(call, tile))


def worth(call: Call, *, tile: int) -> bool:
    """See `is_worth_timing`."""
    return is_worth_timing(call, tile, _sizes(call)[0], _plan)


def _is_free(w: Any, dot: Dot) -> bool:
    """Whether w's blocks run along the last of its free dimensions.

    Times floats it is read as it lies then: where a gradient contracts what the product itself did
    not. Square blocks run along both.
    """
    if not isinstance(w, MXArray) or len(dot.contracting[1]) != 1:
        return False
    taken = (*dot.contracting[1], *dot.batch[1])
    free = [d for d in range(w.ndim) if d not in taken]
    return bool(free) and free[-1] == w.ndim + w.axis


def support_of(
    op: str, plan: ProductPlan, chips: Sequence[str], tile: int | None = None
) -> Support:
    """Whether there is a kernel for a plan, in the words of an op that has other ways."""
    found, name = registry.IMPLEMENTATIONS[NAME].support(plan, chips), name_of(tile)
    if found.refusal:
        refusal = dataclasses.replace(found.refusal, call=op, instead="'dequantize' serves it")
        return Support(name, refusal=refusal)
    return Support(name, found.kernels)


def _on_fp8(call: Call) -> bool:
    """Whether FP8 tensor cores may multiply the codes of two MX arrays: they sum with less bits."""
    return not call.dot.exact and have_windows(call.lhs, call.rhs)


def preferred(call: Call, platform: str, chips: Sequence[str]) -> bool:
    """Whether kernels are known to be the fastest: of windows always, of others with few rows."""
    del platform
    if not chips or any(chip_table.arch_of(chip) != "sm_90a" for chip in chips):
        return False
    return _has_few_rows(call) or _on_fp8(call)


def run(lhs: Operand, rhs: Operand, dot: Dot, *, tile: int | None = None) -> jax.Array:
    """The product; both operands are brought to (batch, rows, K), or floats to (batch, K, rows)."""
    assert isinstance(rhs, MXArray)
    options: dict[str, Any] = {"preferred_element_type": dot.dtype, "implementation": NAME}
    batch = [lhs.shape[d] for d in dot.batch[0]]
    plan = _plan(Call(dot, lhs, rhs), tile)
    assert isinstance(plan, ProductPlan)  # `support`
    if plan.op == "wgrad":
        assert isinstance(lhs, MXArray)
        sides = zip((lhs, rhs), dot.contracting, dot.batch, strict=True)
        (a, free), (b, columns) = (_floats(x, c, taken) for x, (c,), taken in sides)
        return gemm.gemm_wgrad(a, b, **options).reshape(*batch, *free, *columns)
    if plan.op == "matmul" and isinstance(lhs, MXArray):
        lhs = dequantize(lhs)
    x, free = _matrix(lhs, dot.contracting[0][0], dot.batch[0])
    w, columns = _matrix(rhs, dot.contracting[1][0], dot.batch[1], plan.free)
    assert isinstance(w, MXArray)
    if isinstance(x, MXArray):
        y = gemm.gemm_fp8(x, w, **windows_of(lhs, rhs), **options, tile=tile)
    else:
        y = gemm.gemm(x, w, contracting=-2 if plan.free else -1, **options, tile=tile)
    return y.reshape(*batch, *free, *columns)


def _matrix(
    x: Any, contracted: int, batch: Sequence[int], is_free: bool = False
) -> tuple[Any, list[int]]:
    """An operand as (batch, rows, K) or (rows, K), and the lengths that make up its rows.

    One that `_is_free` as (batch, K, rows) or (K, rows).
    """
    if isinstance(x, MXArray) and len(x.block) == 2:
        turned = contracted != x.ndim - 1 and not is_free
        x = (x.mT if turned else x).expand(-1)
        contracted = contracted if is_free else x.ndim - 1
    free = [d for d in range(x.ndim) if d != contracted and d not in batch]
    lengths = [x.shape[d] for d in free]
    first, last = ([contracted], free) if is_free else (free, [contracted])
    order = (*batch, *first, *last)
    shape = (*(x.shape[d] for d in batch), math.prod(x.shape[d] for d in first), -1)

    def arranged(a: jax.Array) -> jax.Array:
        return a.transpose(order).reshape(shape)

    if not isinstance(x, MXArray):
        return arranged(x), lengths
    made = MXArray(
        arranged(x.values), arranged(x.scales), x.format, -1, x.scale_layout, window=x.window
    )
    return made, lengths


def _floats(x: MXArray, contracted: int, batch: Sequence[int]) -> tuple[jax.Array, list[int]]:
    """An operand in floats (batch, K, rows) or (K, rows), and the lengths that make up its rows."""
    last = x.ndim > 1 and contracted == x.ndim - 1
    floats = dequantize(x, transpose=last)  # in the same pass
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
    """What `gemm_fp8` has to know of two operands that `have_windows`."""
    if x.window == w.window == ROW:
        return {"window": ROW}
    return {"window": min(_SUMS[x.window], _SUMS[w.window]), "tiles": w.window == TILE}


def _has_few_rows(call: Call) -> bool:
    """Whether reading the codes of rhs beats making floats of them, see `FEW_ROWS`."""
    rows, k, columns, _ = _sizes(call)
    if is_symbolic(rows) or rows > FEW_ROWS:
        return False
    if rows <= FEWEST_ROWS:
        return True
    if is_symbolic(k) or is_symbolic(columns):
        return False
    return k * columns >= LARGE and k <= LONG * columns


def _sizes(call: Call) -> tuple[int, int, int, int]:
    """Rows of lhs, contracted length and columns of rhs in each entry of the batch; the entries."""
    dot = call.dot
    free = [
        math.prod(n for d, n in enumerate(x.shape) if d not in (*contracting, *batch))
        for x, contracting, batch in zip(
            (call.lhs, call.rhs), dot.contracting, dot.batch, strict=True
        )
    ]
    k, groups = (
        math.prod(call.rhs.shape[d] for d in its[1]) for its in (dot.contracting, dot.batch)
    )
    return free[0], k, free[1], groups
