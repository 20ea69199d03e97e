"""The implementation "tcgen05": products by Blackwell's tensor cores, of operands as they lie.

Codes and scales of two MX arrays, dense or over groups; and over groups floats, which kernels make
of MX arrays where the tensor core takes no pair of them. tcgen05_kernel.py has the kernel.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_mx.formats import reads, views
from jax_mx.formats.checks import is_symbolic
from jax_mx.formats.formats import BLOCK, MXFP4_E2M1, MXFP8_E4M3, MXFP8_E5M2
from jax_mx.formats.groups import clamped
from jax_mx.formats.layouts import BLOCKED_128X4, ROW_MAJOR
from jax_mx.formats.reads import ALIGN, TCGEN05
from jax_mx.products.contraction import ROWS, SUMS, Contraction, Dims, Served, is_along, refused
from jax_mx.products.groups import Groups
from jax_mx.products.tcgen05_kernel import ROWS as TILE
from jax_mx.products.tcgen05_kernel import Items, Side, depth_of, product
from jax_mx.quantizing.mxarray import MXArray, floats_of
from jax_mx.quantizing.reference import rows_of

NAME = "tcgen05"
_EIGHTS, _FOURS = {MXFP8_E4M3, MXFP8_E5M2}, {MXFP4_E2M1}
_FLOATS = (jnp.bfloat16, jnp.float16)


# ---- what it serves ---
def support(contraction: Contraction, chips: Sequence[str]) -> Served:
    """Whether the kernel serves a contraction on chips."""
    why, advice = _other_chip(chips), ""
    if not why and jax.__version_info__ < reads.VERSION:
        wanted = ".".join(map(str, reads.VERSION))
        why, advice = f"wants JAX {wanted}, this is {jax.__version__}", "install it or a newer one"
    why = why or contraction.unsplit or _shapes(contraction)
    if not why and not _codes(contraction):
        return Served(NAME)
    if not why and contraction.numbers.groups and not _floats(contraction):
        return Served(NAME, reads_floats=True)
    return refused(NAME, contraction, why or _codes(contraction), advice)


def _other_chip(chips: Sequence[str]) -> str:
    """A sentence on chips that the kernel is not for; empty where it is."""
    for chip in chips:
        if chip not in TCGEN05:
            return f"has a kernel for {' and '.join(TCGEN05)}, none for {chip}"
    return ""


def _shapes(contraction: Contraction) -> str:
    """Why the kernel takes no arrays of these shapes; empty where it does."""
    sides = (contraction.lhs, contraction.rhs)
    if any(is_symbolic(n) for x in sides for n in x.shape):
        return "takes no symbolic lengths"
    return "" if contraction.work else "takes arrays with elements"


def _codes(contraction: Contraction) -> str:
    """Why the tensor core does not read codes; empty where it does."""
    numbers, sides = contraction.numbers, (contraction.lhs, contraction.rhs)
    if numbers.exact:
        return "sums in the tensor core, and the call asks for a higher precision"
    for x, dims in zip(sides, numbers.contracting, strict=True):
        if not isinstance(x, MXArray) or not is_along(x, dims[-1]):
            return "wants both operands in blocks along the contracted dimension"
        if x.format == MXFP4_E2M1 and (x.axis != -1 or len(x.block) == 2):
            return "takes mxfp4_e2m1 in blocks along the last axis"
    formats = {contraction.lhs.format, contraction.rhs.format}
    if not (formats <= _EIGHTS or formats <= _FOURS):
        return "takes two operands of MXFP8, or two of mxfp4_e2m1"
    if numbers.groups == SUMS and numbers.align % ALIGN:
        return f"wants groups that begin at multiples of {ALIGN}"
    return ""


def _floats(contraction: Contraction) -> str:
    """Why it does not multiply floats, over groups; empty where it does."""
    sides = (contraction.lhs, contraction.rhs)
    dtypes = {jnp.dtype(jnp.bfloat16) if isinstance(x, MXArray) else x.dtype for x in sides}
    if len(dtypes) > 1 or not dtypes <= {*map(jnp.dtype, _FLOATS)}:
        return "takes floats of one dtype, bfloat16 or float16"
    return ""


# ---- what it computes ---
def run(contraction: Contraction, served: Served) -> jax.Array:
    """The product."""
    del served
    numbers, groups = contraction.numbers, contraction.numbers.groups
    if groups == SUMS and numbers.align % BLOCK:  # floats, see `support`
        return run(_apart(contraction), Served(NAME, reads_floats=True))
    reads = _float_side if _codes(contraction) else _code_side
    batches = ((), (0,)) if groups == ROWS else numbers.batch
    lhs, rhs = (
        reads(x, dims, batch)
        for x, dims, batch in zip(
            (contraction.lhs, contraction.rhs), numbers.contracting, batches, strict=True
        )
    )
    rows, align = lhs.array.shape[1], numbers.align if groups == SUMS else 0
    depth = depth_of(lhs.array.dtype, align)
    steps = -(-lhs.array.shape[2] // depth)
    if groups == ROWS:
        items, matrices = _items_of_rows(contraction.sizes, rows, steps), 1
    elif groups == SUMS:
        items = _items_of_sums(contraction.sizes, rows, contraction.length, depth)
        matrices = contraction.groups
    else:
        matrices = math.prod(contraction.lhs.shape[d] for d in numbers.batch[0])
        items = _items(matrices, lhs.array.shape[0] // matrices, rows, steps)
    y = product(lhs, rhs, items, matrices, numbers.dtype, depth, 0 if groups else steps)
    lead = [contraction.groups] if groups == SUMS else []
    lead += [contraction.lhs.shape[d] for d in numbers.batch[0]]
    free = (x.shape[d] for i, x in enumerate((contraction.lhs, contraction.rhs))
            for d in contraction.free(i))  # fmt: skip
    return y.reshape(*lead, *free)


def _apart(contraction: Contraction) -> Contraction:
    """Sums over groups of floats that begin anywhere, as over groups at multiples of 32.

    Zeros follow each group.
    """
    groups = Groups.from_sizes(contraction.sizes, contraction.length)
    sides = []
    for x, axis in zip((contraction.lhs, contraction.rhs), contraction.axes, strict=True):
        floats = floats_of(x) if isinstance(x, MXArray) else x
        sides.append(rows_of(floats if axis == -2 else floats.mT, groups.rows))
    numbers = dataclasses.replace(contraction.numbers, contracting=((0,), (0,)), align=BLOCK)
    lhs, rhs = sides
    return Contraction(numbers, lhs, rhs, groups.sizes)


def _order(x: Any, contracting: Dims, batch: Dims) -> list[int]:
    """Dimensions as the kernel has them: batch, what is summed beside, rows, contracted ones."""
    first, last = (*batch, *contracting[:-1]), contracting[-1]
    return [*first, *(d for d in range(x.ndim) if d not in (*first, last)), last]


def _arranged(a: jax.Array, order: Sequence[int], lead: int) -> jax.Array:
    """(matrices, rows, contracted)."""
    a = a.transpose(order)
    return a.reshape(math.prod(a.shape[:lead]), -1, a.shape[-1])


def _float_side(x: Any, contracting: Dims, batch: Dims) -> Side:
    last = x.ndim - 1
    if isinstance(x, MXArray):  # in the same pass with the last two axes swapped, if it has to be
        swapped = contracting[-1] != last
        x = floats_of(x, transpose=swapped)
        contracting = (*contracting[:-1], last)
    order = _order(x, contracting, batch)
    return Side(_arranged(x, order, len(batch) + len(contracting) - 1))


def _code_side(x: MXArray, contracting: Dims, batch: Dims) -> Side:
    last, lead = contracting[-1], len(batch) + len(contracting) - 1
    if len(x.block) == 2:  # its transposed array is the array transposed
        x = (x if last == x.ndim - 1 else x.mT).expand(-1)
        contracting = (*contracting[:-1], x.ndim - 1)
    order = _order(x, contracting, batch)
    codes = x.as_float4() if x.format == MXFP4_E2M1 else x.values
    array = _arranged(codes, order, lead)
    if x.scale_layout == BLOCKED_128X4 and _lies(x, order, lead):
        scales = x.scales
    else:
        rows = _arranged(x.with_scales_in(ROW_MAJOR).scales, order, lead)
        scales = views.pack(BLOCKED_128X4, rows)
    return Side(array, scales.reshape(array.shape[0], -1, *scales.shape[-2:]))


def _lies(x: MXArray, order: Sequence[int], lead: int) -> bool:
    """Whether the kernel's matrices have the same tiles of scales as the array.

    An array with blocks along -2 has the tiles of its transposed matrix.
    """
    same = [*order[:-2]] == [*range(x.ndim - 2)]
    return same and (lead == x.ndim - 2 or x.shape[order[-2]] % TILE == 0)


# ---- what thread blocks compute ---
def _items(matrices: int, summed: int, rows: int, steps: int) -> Items:
    """Each tile of each matrix, over so many matrices of both operands."""
    matrix, tile = jnp.indices((matrices, -(-rows // TILE)), jnp.int32)
    return Items(matrix * summed, matrix * summed, matrix, tile, 0, TILE, 0, summed * steps)


def _items_of_rows(sizes: jax.Array, rows: int, steps: int) -> Items:
    """The tiles that each group has rows of; rows behind the groups are a group without steps.

    The last tile ends behind the array: nothing is written there. Items that are not needed have no
    rows.
    """
    count, groups = -(-rows // TILE), sizes.shape[0]
    lengths = clamped(sizes, rows)
    ends = jnp.cumsum(lengths, dtype=jnp.int32)
    ends = jnp.append(ends, rows)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    ends, empty = jnp.where(ends == rows, count * TILE, ends), ends == starts
    tiles = jnp.where(empty, 0, -(-ends // TILE) - starts // TILE)
    before = jnp.cumsum(tiles, dtype=jnp.int32)
    item = jnp.arange(count + groups, dtype=jnp.int32)
    owner = jnp.searchsorted(before, item, side="right", method="compare_all")
    is_one = owner <= groups
    owner = jnp.minimum(owner, groups).astype(jnp.int32)
    tile = starts[owner] // TILE + item - (before - tiles)[owner]
    tile = jnp.where(is_one, tile, 0)
    start = jnp.where(is_one, jnp.maximum(starts[owner] - tile * TILE, 0), 0)
    stop = jnp.where(is_one, jnp.minimum(ends[owner] - tile * TILE, TILE), 0)
    many = jnp.where(is_one & (owner < groups), steps, 0)
    return Items(0, jnp.minimum(owner, groups - 1), 0, tile, start, stop, 0, many)


def _items_of_sums(sizes: jax.Array, rows: int, length: int, depth: int) -> Items:
    """Each tile of each group's matrix."""
    lengths = clamped(sizes, length)
    starts = jnp.cumsum(lengths, dtype=jnp.int32) - lengths
    group, tile = jnp.indices((sizes.shape[0], -(-rows // TILE)), jnp.int32)
    first, steps = starts // depth, -(-lengths // depth)
    return Items(0, 0, group, tile, 0, TILE, first[group], steps[group])
