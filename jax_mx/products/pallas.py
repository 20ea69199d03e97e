"""The implementations "pallas" and "blackwell": the kernels of floats that JAX ships.

Operands are made floats first. For Hopper there are products over groups. For Blackwell there are a
dense one, and one over groups. JAX's interpreter executes the dense one (tests/test_blackwell.py).
Nobody here executed the one over groups: it is of pairs of thread blocks, which the interpreter
lacks; of single blocks JAX does not trace it (0.12.0). Exports lack it, as it asks the device how
many cores it has. No kernel sums over groups, as gradients of weights do.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_mx.formats.checks import is_symbolic
from jax_mx.formats.reads import TCGEN05
from jax_mx.formats.views import padded
from jax_mx.products.contraction import SUMS, Contraction, Served, refused, swapped_floats
from jax_mx.quantizing.mxarray import MXArray

HOPPER, BLACKWELL = "pallas", "blackwell"
_PACKAGE = "jax.experimental.pallas.ops.gpu"
_DENSE, _GROUPED = "blackwell_matmul_mgpu", "blackwell_ragged_dot_mgpu"
_ROWS, _SUMS = "ragged_dot_mgpu", "transposed_ragged_dot_mgpu"
_TILE = 128  # rows and columns of a thread block; on Blackwell, over groups, two share a tile
_DEPTH = 64  # products that are summed at once
_MANY = 64  # groups, which the kernel's search for a tile's group is unrolled over


@functools.cache
def _module(name: str) -> Any:
    return importlib.import_module(f"{_PACKAGE}.{name}")


@functools.cache
def _missing(*names: str) -> str:
    """That this JAX lacks a module; empty where it has these."""
    for name in names:
        if importlib.util.find_spec(f"{_PACKAGE}.{name}") is None:
            return f"wants {_PACKAGE}.{name}, which this JAX lacks"
    return ""


def _takes_other_floats(contraction: Contraction) -> bool:
    """Whether an operand, or the result, is of floats beside bfloat16."""
    sides = (contraction.lhs, contraction.rhs)
    kinds = {contraction.numbers.dtype, *(x.dtype for x in sides if not isinstance(x, MXArray))}
    return kinds != {jnp.dtype(jnp.bfloat16)}


def _without_rest(y: jax.Array, sizes: jax.Array) -> jax.Array:
    """y with zeros in the rows behind groups, which kernels do not write."""
    row = jnp.arange(y.shape[0], dtype=jnp.int32)[:, None]
    return jnp.where(row < sizes.sum(), y, 0)


# ---- Hopper ---
def hopper_support(contraction: Contraction, chips: Sequence[str]) -> Served:
    """Whether JAX's kernels for Hopper serve a contraction on chips."""
    if why := _missing(_ROWS, _SUMS) or contraction.unsplit:
        return refused(HOPPER, contraction, why)
    for chip in chips:
        if chip != "sm_90":
            return refused(HOPPER, contraction, f"has kernels for sm_90, none for {chip}")
    if _takes_other_floats(contraction):
        return refused(HOPPER, contraction, "takes and gives bfloat16")
    if contraction.groups > _MANY or not contraction.work:
        why = f"takes arrays with elements, of {_MANY} groups at most"
        return refused(HOPPER, contraction, why)
    sums = contraction.numbers.groups == SUMS
    first = contraction.lhs.shape[contraction.free(0)[0]] if sums else contraction.length
    second, tiles = contraction.columns, (_TILE if sums else _DEPTH, _TILE)
    if first % tiles[0] or second % tiles[1]:
        why = f"wants lengths that {tiles[0]} and {tiles[1]} divide"
        return refused(HOPPER, contraction, why)
    return Served(HOPPER, reads_floats=True)


def run_hopper(contraction: Contraction, served: Served) -> jax.Array:
    """The product, with the tiles that were the fastest of those tried."""
    del served
    lhs, rhs = contraction.lhs, contraction.rhs
    (left, right), sizes = contraction.axes, contraction.sizes
    tiles: dict[str, Any] = {"block_m": _TILE, "block_n": _TILE, "block_k": _DEPTH}
    tiles |= {"grid_block_n": 8, "max_concurrent_steps": 4, "group_sizes": sizes}
    if contraction.numbers.groups == SUMS:
        a, b = swapped_floats(lhs, left == -1), swapped_floats(rhs, right == -1)
        return _module(_SUMS).transposed_ragged_dot(a, b, **tiles)
    a, b = swapped_floats(lhs, left == -2), swapped_floats(rhs)
    y = _module(_ROWS).ragged_dot(a, b, transpose_rhs=right == -1, **tiles)
    return _without_rest(y, sizes)


# ---- Blackwell ---
def prefers_blackwell(contraction: Contraction, platform: str, chips: Sequence[str]) -> bool:
    """Over groups, where `jax.lax.ragged_dot` is slow; cuBLAS multiplies dense operands."""
    del platform
    is_known = bool(chips) and all(chip in TCGEN05 for chip in chips)
    return is_known and bool(contraction.numbers.groups)


def blackwell_support(contraction: Contraction, chips: Sequence[str]) -> Served:
    """Whether JAX's kernels for Blackwell serve a contraction on chips."""
    why = _lacking(contraction, chips) or contraction.unsplit or _obstacle(contraction)
    why = why or (contraction.carried if contraction.numbers.groups else "")
    return refused(BLACKWELL, contraction, why) if why else Served(BLACKWELL, reads_floats=True)


def _lacking(contraction: Contraction, chips: Sequence[str]) -> str:
    """A sentence on what chips or JAX lack; empty where they lack nothing."""
    for chip in chips:
        if chip not in TCGEN05:
            return f"has kernels for {' and '.join(TCGEN05)}, none for {chip}"
    return _missing(_GROUPED if contraction.numbers.groups else _DENSE)


def _obstacle(contraction: Contraction) -> str:
    """Why the kernels take no such arrays; empty where they do."""
    numbers, sides = contraction.numbers, (contraction.lhs, contraction.rhs)
    if _takes_other_floats(contraction):
        return "takes and gives bfloat16"
    if numbers.groups == SUMS:
        return "sums over no groups"
    if not numbers.groups and not (sides[0].ndim == sides[1].ndim == 2):
        return "takes dense operands of two dimensions"
    if len(numbers.contracting[0]) != 1 or numbers.batch[0]:
        return "contracts one dimension, and has no batch"
    if any(is_symbolic(n) for x in sides for n in x.shape) or not contraction.work:
        return "takes arrays with elements, whose lengths are known"
    if numbers.groups and contraction.groups > _MANY:
        return f"takes {_MANY} groups at most"
    return ""


def run_blackwell(contraction: Contraction, served: Served) -> jax.Array:
    """The product, of operands that end with zeros where they are no whole tiles."""
    del served
    (left, right), sizes = contraction.axes, contraction.sizes
    a = swapped_floats(contraction.lhs, left == -2)
    b = swapped_floats(contraction.rhs, right == -1)
    (rows, _), columns = a.shape, b.shape[-1]
    pair = 2 if contraction.numbers.groups else 1
    a, b = _whole(a, (pair * _TILE, _DEPTH)), _whole(b, (_DEPTH, pair * _TILE))
    tiles: dict[str, Any] = {"tile_m": _TILE, "tile_n": _TILE, "tile_k": _DEPTH}
    tiles |= {"max_concurrent_steps": 4, "grid_tile_width": 8, "collective": pair > 1}
    tiles |= {"grid_minor_dim": _module(_DENSE).MatmulDimension.N}
    if pair == 1:
        dense = _module(_DENSE)
        return dense.matmul_kernel(a, b, dense.TuningConfig(**tiles))[:rows, :columns]
    grouped = _module(_GROUPED)
    y = grouped.ragged_dot_kernel(a, b, sizes, grouped.TuningConfig(**tiles))
    return _without_rest(y[:rows, :columns], sizes)


def _whole(x: jax.Array, units: tuple[int, int]) -> jax.Array:
    """The last two axes with zeros up to multiples of these."""
    return padded(x, (-x.shape[-2] % units[0], -x.shape[-1] % units[1]))
