"""The ways to compute grouped products: a table, as implementations.py has for dense ones."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.facts import chips as chip_table
from jax_mx.facts.formats import BLOCK
from jax_mx.lowering.plan import ProductPlan
from jax_mx.lowering.registry import Support
from jax_mx.ops import gemm
from jax_mx.ops.groups import Groups
from jax_mx.ops.mxarray import MXArray, dequantize
from jax_mx.products import kernels
from jax_mx.products.dot import Operand, refused
from jax_mx.products.implementations import (
    Implementation,
    always,
    any_call,
    exact_floats,
    on_gpus,
    with_tilings,
    yes,
)
from jax_mx.products.ragged import Ragged, RaggedCall
from jax_mx.reference import ragged as reference
from jax_mx.reference import rows_of


# ---- our kernels ---
def _along(x: Any, axis: int) -> bool:
    """Whether an operand is MX with its blocks along the contracted axis."""
    return isinstance(x, MXArray) and (len(x.block) == 2 or x.axis == axis)


def _cutedsl_support(call: RaggedCall, chips: Sequence[str], *, tile: int | None = None) -> Support:
    plan = _cutedsl_plan(call, tile)
    return plan if isinstance(plan, Support) else kernels.support_of(call.op, plan, chips, tile)


def _cutedsl_plan(call: RaggedCall, tile: int | None) -> ProductPlan | Support:
    """The plan of the kernel that serves a call; or why there is none."""
    name, ragged, w = kernels.name_of(tile), call.ragged, call.rhs
    if call.partitioned:
        return refused(name, call, "is not split among devices by XLA; use jax.shard_map")
    if 0 in (*call.lhs.shape, *w.shape):
        return refused(name, call, "takes arrays with elements")
    if ragged.sums:
        if tile is not None:
            return refused(name, call, "sums over no groups: kernels that do have one tiling")
        if _in_windows(call):
            return gemm.wgrad_plan_of((call.lhs.format, w.format), ragged.dtype, _window(call))
        if why := _no_floats(call):
            return refused(name, call, why)
        return gemm.floats_plan_of(_dtypes(call).pop(), ragged.dtype)
    if not _along(w, -1):
        return refused(name, call, "wants an MXArray on the right, in blocks along the last axis")
    if not isinstance(call.lhs, MXArray) and call.lhs.dtype not in gemm.FLOATS:
        return refused(name, call, f"takes bfloat16 and float16, no {call.lhs.dtype}")
    how: dict[str, Any] = {"rows": _rows(call), "grouped": True, "tile": tile}
    strips = gemm.strips_of(call.groups, w.shape[-3 - ragged.axes[1]])
    free = ragged.axes[1] == -2
    of_codes = gemm.plan_of((w.format,), ragged.dtype, **how, free=free, strips=strips)
    if not _on_fp8(call):
        return of_codes
    formats, windows = (call.lhs.format, w.format), kernels.windows_of(call.lhs, w)
    return kernels.one_of(gemm.plan_of(formats, ragged.dtype, **how, **windows), of_codes, tile)


def _rows(call: RaggedCall) -> float:
    """How many rows a group has, about."""
    return gemm.rows_of_each(call.rows, call.groups)


def _worth(call: RaggedCall, *, tile: int) -> bool:
    """See `kernels.is_worth_timing`."""
    return kernels.is_worth_timing(call, tile, _rows(call), _cutedsl_plan)


def _makes_floats(call: RaggedCall, *, tile: int | None = None) -> bool:
    """See `kernels.reads_floats`."""
    return kernels.reads_floats(_cutedsl_plan(call, tile))


def _in_windows(call: RaggedCall) -> bool:
    """Whether FP8 tensor cores may sum over groups: each begins at a multiple of the window."""
    if not _on_fp8(call) or len(call.rhs.block) == 2 or call.ragged.axes != (-1, -1):
        return False
    window = _window(call)
    return isinstance(window, int) and call.ragged.align % window == 0


def _window(call: RaggedCall) -> int | str:
    return kernels.windows_of(call.lhs, call.rhs)["window"]


def _dtypes(call: RaggedCall) -> set[np.dtype]:
    """The dtypes of both operands as floats: one of them, if kernels are to multiply them."""
    sides = call.lhs, call.rhs
    return {jnp.dtype(jnp.bfloat16) if isinstance(x, MXArray) else x.dtype for x in sides}


def _no_floats(call: RaggedCall) -> str:
    """Why no kernel sums floats over groups; empty where one does."""
    found = _dtypes(call)
    if len(found) > 1 or not found <= {*gemm.FLOATS}:
        names = " and ".join(sorted(dtype.name for dtype in found))
        return f"sums over groups of one dtype, bfloat16 (also for MX) or float16, not {names}"
    return ""


def _on_fp8(call: Any) -> bool:
    """Whether FP8 tensor cores may multiply the codes: both have windows of more than a block."""
    x, w = call.lhs, call.rhs
    along = all(_along(a, axis) for a, axis in zip((x, w), call.ragged.axes, strict=True))
    return along and not call.ragged.exact and kernels.have_windows(x, w)


def _cutedsl(
    lhs: Operand, rhs: Operand, sizes: jax.Array, ragged: Ragged, *, tile: int | None = None
) -> jax.Array:
    options: dict[str, Any] = {"preferred_element_type": ragged.dtype}
    options["implementation"] = kernels.NAME
    plan = _cutedsl_plan(RaggedCall(ragged, lhs, rhs, sizes.shape[0]), tile)
    assert isinstance(plan, ProductPlan)  # `_cutedsl_support`
    windows: dict[str, Any] = {"window": plan.window}
    if plan.op == "wgrad_fp8":
        return gemm.gemm_wgrad(lhs, rhs, sizes, **options, **windows)
    if plan.op == "wgrad":
        a, b = (_floats(x, d == -1) for x, d in zip((lhs, rhs), ragged.axes, strict=True))
        return gemm.gemm_wgrad(a, b, sizes, **options)
    assert isinstance(rhs, MXArray)
    if len(rhs.block) == 2:
        rhs = (rhs if plan.free or ragged.axes[1] == -1 else rhs.mT).expand(-1)
    if plan.op == "matmul_fp8":
        assert isinstance(lhs, MXArray)
        return gemm.gemm_fp8(lhs, rhs, sizes, **windows, tiles=plan.tiles, **options, tile=tile)
    x = _floats(lhs, ragged.axes[0] == -2)
    return gemm.gemm(x, rhs, sizes, contracting=-2 if plan.free else -1, **options, tile=tile)


# ---- JAX's own, of bfloat16 ---
def _floats(x: Operand, swapped: bool = False) -> jax.Array:
    """An operand in floats, with its last two axes swapped in the same pass."""
    if isinstance(x, MXArray):
        return dequantize(x, transpose=swapped)
    return x.mT if swapped else x


_PALLAS = "jax.experimental.pallas.ops.gpu"
_MODULES = ("ragged_dot_mgpu", "transposed_ragged_dot_mgpu")
_TILE = 128  # rows and columns
_DEPTH = 64  # products that are summed at once
_MANY = 64  # groups, which the kernel's search for a tile's group is unrolled over


@functools.cache
def _pallas_missing() -> str:
    """Which of the modules that Pallas' kernels are in this JAX lacks; empty where none."""
    for name in _MODULES:
        if importlib.util.find_spec(f"{_PALLAS}.{name}") is None:
            return name
    return ""


def _pallas_support(call: RaggedCall, chips: Sequence[str]) -> Support:
    name, ragged = "pallas", call.ragged
    if missing := _pallas_missing():
        return refused(name, call, f"wants {_PALLAS}.{missing}, which this JAX lacks")
    if call.partitioned:
        return refused(name, call, "is not split among devices by XLA; use jax.shard_map")
    for chip in chips:
        if chip != "sm_90":
            return refused(name, call, f"has kernels for sm_90, none for {chip}")
    kinds = {x.dtype for x in (call.lhs, call.rhs) if not isinstance(x, MXArray)}
    if ragged.dtype != jnp.bfloat16 or kinds - {jnp.dtype(jnp.bfloat16)}:
        return refused(name, call, "takes and gives bfloat16")
    if call.groups > _MANY or not call.work:
        return refused(name, call, f"takes arrays with elements, of {_MANY} groups at most")
    first, second = call.columns
    tiles = (_TILE, _TILE) if ragged.sums else (_DEPTH, _TILE)
    if first % tiles[0] or second % tiles[1]:
        return refused(name, call, f"wants lengths that {tiles[0]} and {tiles[1]} divide")
    return Support(name)


def _pallas(lhs: Operand, rhs: Operand, sizes: jax.Array, ragged: Ragged) -> jax.Array:
    """Pallas' kernels for Hopper, with the tiles that were the fastest of those tried."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

    left, right = ragged.axes
    tiles: dict[str, Any] = {"block_m": _TILE, "block_n": _TILE, "block_k": _DEPTH}
    tiles |= {"grid_block_n": 8, "max_concurrent_steps": 4, "group_sizes": sizes}
    if ragged.sums:
        a, b = _floats(lhs, left == -1), _floats(rhs, right == -1)
        return transposed_ragged_dot_mgpu.transposed_ragged_dot(a, b, **tiles)
    a, b = _floats(lhs, left == -2), _floats(rhs)
    y = ragged_dot_mgpu.ragged_dot(a, b, transpose_rhs=right == -1, **tiles)
    row = jnp.arange(y.shape[0], dtype=jnp.int32)[:, None]
    return jnp.where(row < sizes.sum(), y, 0)  # the kernel does not write the rows behind groups


def _on_hopper(call: RaggedCall, platform: str, chips: Sequence[str]) -> bool:
    del call, platform
    return bool(chips) and all(chip_table.arch_of(chip) == "sm_90a" for chip in chips)


def _dequantize(lhs: Operand, rhs: Operand, sizes: jax.Array, ragged: Ragged) -> jax.Array:
    """Kernels make bfloat16 of MX operands, lax.ragged_dot multiplies them."""
    a, b = _floats(lhs), _floats(rhs)
    if a.dtype != b.dtype:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    (left, right), sums = ragged.axes, ragged.sums
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((left % 2,), (right % 2 if sums else right % 3,)), ((), ())),
        lhs_ragged_dimensions=[left % 2 if sums else (-3 - left) % 2],
        rhs_group_dimensions=[] if sums else [0],
    )
    given = jnp.float32 if ragged.dtype == jnp.float16 else ragged.dtype
    exact = jax.lax.Precision.HIGHEST if ragged.exact else None
    y = jax.lax.ragged_dot_general(a, b, sizes, numbers, exact, given)
    return y.astype(ragged.dtype)


# ---- plain ---
def _plain(lhs: Operand, rhs: Operand, sizes: jax.Array, ragged: Ragged) -> jax.Array:
    """The definition: float32 throughout, by plain XLA."""
    a, b = exact_floats(lhs), exact_floats(rhs)
    left, right = ragged.axes
    rows_at = left if ragged.sums else -3 - left
    a = jnp.moveaxis(a, rows_at, 0)
    b = jnp.moveaxis(b, right, 0 if ragged.sums else 1)
    tile = math.gcd(ragged.align, 128)
    if tile < BLOCK:
        groups = Groups.from_sizes(sizes, a.shape[0])
        a = rows_of(a, groups.rows)
        if ragged.sums:
            y = reference.sums(a, rows_of(b, groups.rows), groups.sizes, BLOCK)
        else:
            y = groups.combined(reference.rows(a, b, groups.sizes, BLOCK))
        return y.astype(ragged.dtype)
    pad = -a.shape[0] % tile
    a = jnp.pad(a, ((0, pad), (0, 0)))
    if ragged.sums:
        b = jnp.pad(b, ((0, pad), (0, 0)))
        return reference.sums(a, b, sizes, tile).astype(ragged.dtype)
    return reference.rows(a, b, sizes, tile)[: a.shape[0] - pad].astype(ragged.dtype)


IMPLEMENTATIONS: Mapping[str, Implementation] = {
    row.name: row
    for row in (
        *with_tilings(_cutedsl_support, _cutedsl, _on_hopper, _worth, _makes_floats),
        Implementation("pallas", "cuda", _pallas_support, _pallas, _on_hopper, floats=yes),
        Implementation(
            "dequantize", "any", any_call("dequantize"), _dequantize, on_gpus, floats=yes
        ),
        Implementation("xla", "any", any_call("xla"), _plain, always),
    )
}
