"""Products that XLA computes: of floats that kernels make, of codes, and the definition."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.formats import reads
from jax_mx.formats.checks import is_symbolic
from jax_mx.formats.formats import BLOCK, MXFP4_E2M1, MXFP8_E4M3, MXFP8_E5M2, SCALE_DTYPE
from jax_mx.formats.groups import owners
from jax_mx.formats.sharding import shards_of
from jax_mx.formats.windows import ROW
from jax_mx.products.contraction import (
    SUMS,
    Contraction,
    Numbers,
    Operand,
    Served,
    both_along,
    refused,
    swapped_floats,
)
from jax_mx.products.groups import Groups
from jax_mx.quantizing.mxarray import MXArray, dequantize
from jax_mx.quantizing.reference import rows_of

# sm_90's FP8 tensor cores cut products at 2^-13 of the largest of them. No sum of
# the normal numbers that `measuring` draws is off by over 4e-4 of sum |a||b| (tests/test_gemm.py).
FP8_ERROR = 2.0**-10


# ---- dequantize, then a product of floats ---
def serves_all(name: str, reads_floats: bool) -> Callable[[Contraction, Sequence[str]], Served]:
    """The `support` of an implementation that serves every contraction."""

    def support(contraction: Contraction, chips: Sequence[str]) -> Served:
        del contraction, chips
        return Served(name, reads_floats=reads_floats)

    return support


def dequantizing(contraction: Contraction, served: Served) -> jax.Array:
    """Kernels make bfloat16 of MX operands, cuBLAS or its like multiplies them.

    bfloat16 holds every element of every format exactly, but for those below 2^-133.
    """
    del served
    numbers = contraction.numbers
    a, b = map(swapped_floats, (contraction.lhs, contraction.rhs))
    if a.dtype != b.dtype:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    # From bfloat16, cuBLAS gives bfloat16 or float32 out of float32 sums.
    wide = jnp.float32 if numbers.dtype == jnp.float16 else numbers.dtype
    exact = jax.lax.Precision.HIGHEST if numbers.exact else None
    if numbers.groups:
        sums, dims = numbers.groups == SUMS, numbers.contracting
        ragged = jax.lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=(dims, ((), ())),
            lhs_ragged_dimensions=dims[0] if sums else contraction.free(0),
            rhs_group_dimensions=[] if sums else [0],
        )
        y = jax.lax.ragged_dot_general(a, b, contraction.sizes, ragged, exact, wide)
        return y.astype(numbers.dtype)
    y = jax.lax.dot_general(
        a,
        b,
        numbers.dimensions,
        precision=exact,
        preferred_element_type=wide,
        out_sharding=numbers.out_sharding,
    )
    return y.astype(numbers.dtype)


# ---- the definition ---
def exact_floats(x: Operand) -> jax.Array:
    """An operand in float32, by plain XLA."""
    if isinstance(x, MXArray):
        return dequantize(x, jnp.float32, implementation="xla")
    return x.astype(jnp.float32)


def plain(contraction: Contraction, served: Served) -> jax.Array:
    """The definition: float32 throughout, by plain XLA."""
    del served
    numbers = contraction.numbers
    a, b = exact_floats(contraction.lhs), exact_floats(contraction.rhs)
    if numbers.groups:
        return _plain_groups(contraction, a, b).astype(numbers.dtype)
    y = jax.lax.dot_general(
        a,
        b,
        numbers.dimensions,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
        out_sharding=numbers.out_sharding,
    )
    return y.astype(numbers.dtype)


def _plain_groups(contraction: Contraction, a: jax.Array, b: jax.Array) -> jax.Array:
    """In tiles of rows that each belong to one group."""
    (left, right), sums = contraction.axes, contraction.numbers.groups == SUMS
    sizes = contraction.sizes
    a = jnp.moveaxis(a, left if sums else -3 - left, 0)
    b = jnp.moveaxis(b, right, 0 if sums else 1)
    tile = math.gcd(contraction.numbers.align, 128)
    if tile < BLOCK:
        groups = Groups.from_sizes(sizes, a.shape[0])
        a = rows_of(a, groups.rows)
        if sums:
            return _sums(a, rows_of(b, groups.rows), groups.sizes, BLOCK)
        return groups.combined(_rows(a, b, groups.sizes, BLOCK))
    pad = -a.shape[0] % tile
    a = jnp.pad(a, ((0, pad), (0, 0)))
    if sums:
        return _sums(a, jnp.pad(b, ((0, pad), (0, 0))), sizes, tile)
    return _rows(a, b, sizes, tile)[: a.shape[0] - pad]


# ---- products over groups: a tile of rows after the other ---
def _rows(x: jax.Array, w: jax.Array, sizes: jax.Array, tile: int) -> jax.Array:
    """Float32 (R, N): the rows of each group, times its matrix; rows that no group has are 0.

    Args:
      x: (R, K); tile divides R.
      w: (G, K, N).
      sizes: int32 (G,), multiples of tile.
      tile: rows.
    """
    owner, is_some = _owners(sizes, x.shape[0] // tile, tile)

    def one(operands):
        tile_rows, group, some = operands
        return jnp.where(some, _dot("mk,kn->mn", tile_rows, w[group]), 0)

    y = jax.lax.map(one, (x.reshape(x.shape[0] // tile, tile, x.shape[1]), owner, is_some))
    return y.reshape(x.shape[0], w.shape[2])


def _sums(a: jax.Array, b: jax.Array, sizes: jax.Array, tile: int) -> jax.Array:
    """Float32 (G, M, N): over the rows of each group; of an empty one 0.

    Args:
      a: (R, M); tile divides R.
      b: (R, N).
      sizes: int32 (G,), multiples of tile.
      tile: rows.
    """
    owner, is_some = _owners(sizes, a.shape[0] // tile, tile)

    def add(total, operands):
        own_a, own_b, group, some = operands
        more = jnp.where(some, _dot("rm,rn->mn", own_a, own_b), 0)
        return total.at[group].add(more), None

    tiles = (x.reshape(x.shape[0] // tile, tile, x.shape[1]) for x in (a, b))
    start = jnp.zeros_like(a, shape=(sizes.shape[0], a.shape[1], b.shape[1]), dtype=jnp.float32)
    return jax.lax.scan(add, start, (*tiles, owner, is_some))[0]


def _owners(sizes: jax.Array, tiles: int, tile: int) -> tuple[jax.Array, jax.Array]:
    """The group of each tile, and whether it has one."""
    ends = jnp.cumsum(sizes)
    first = jnp.arange(tiles, dtype=jnp.int32) * tile
    owner = owners(ends, first)
    return jnp.minimum(owner, max(sizes.shape[0] - 1, 0)), owner < sizes.shape[0]


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(
        equation, a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


# ---- the chip's own scaled product ---
def scaled_dot_support(contraction: Contraction, chips: Sequence[str]) -> Served:
    """Whether it serves a contraction, on whatever chips."""
    name = "scaled_dot"
    if not both_along(contraction):
        return refused(
            name, contraction, "wants both operands in blocks along one contracted dimension"
        )
    for x in (contraction.lhs, contraction.rhs):
        if any(map(is_symbolic, x.shape)):
            return refused(
                name, contraction, "takes no symbolic lengths, which JAX cannot refine in it"
            )
        if x.format not in (MXFP8_E4M3, MXFP8_E5M2, MXFP4_E2M1):
            return refused(name, contraction, f"takes no {x.format.name}")
        if x.format == MXFP4_E2M1 and (x.axis != -1 or len(x.block) == 2):
            return refused(name, contraction, "takes mxfp4_e2m1 in blocks along the last axis")
    del chips
    return Served(name)


def scaled_dot(contraction: Contraction, served: Served) -> jax.Array:
    """jax.lax.scaled_dot: of sm_100 and later, and of gfx950, the tensor cores' own.

    It takes no out_sharding: on a mesh with explicit axes XLA splits it, as the product's type is.
    """
    del served
    numbers = contraction.numbers
    product: Any = functools.partial(_scaled, numbers=numbers)
    if numbers.out_sharding is not None:
        product = jax.sharding.auto_axes(product, out_sharding=numbers.out_sharding)
    return product(contraction.lhs, contraction.rhs)


def _scaled(lhs: Operand, rhs: Operand, *, numbers: Numbers) -> jax.Array:
    sides, rank = [], max(lhs.ndim, rhs.ndim)  # it wants both of one rank
    for x, dims in zip((lhs, rhs), numbers.contracting, strict=True):
        assert isinstance(x, MXArray)  # scaled_dot_support
        if len(x.block) == 2:
            x = x.expand(dims[0] - x.ndim)
        pair = (x.as_float4() if x.format == MXFP4_E2M1 else x.values, x.scales)
        sides.append([jnp.expand_dims(a, [*range(a.ndim, rank)]) for a in pair])
    (a, a_scale), (b, b_scale) = sides
    y = jax.lax.scaled_dot(
        a,
        b,
        lhs_scale=a_scale,
        rhs_scale=b_scale,
        dimension_numbers=numbers.dimensions,
        preferred_element_type=jnp.float32,
    )
    if lhs.ndim < rank:  # its dimensions of length 1 lie between the others
        end = y.ndim - (rhs.ndim - len(numbers.contracting[1]) - len(numbers.batch[1]))
        y = jnp.squeeze(y, [*range(end - (rank - lhs.ndim), end)])
    elif rhs.ndim < rank:
        y = jnp.squeeze(y, [*range(y.ndim - (rank - rhs.ndim), y.ndim)])
    return y.astype(numbers.dtype)


# ---- FP8 tensor cores on the codes ---
def fp8_support(contraction: Contraction, chips: Sequence[str]) -> Served:
    """Whether the chips' FP8 tensor cores multiply the codes of a contraction."""
    name = "fp8"
    if contraction.numbers.exact:
        why = "sums with reduced precision, and the call asks for a higher one"
        return refused(name, contraction, why)
    if not both_along(contraction):
        return refused(
            name, contraction, "wants both operands in blocks along one contracted dimension"
        )
    formats = {contraction.lhs.format, contraction.rhs.format}
    if not formats <= {MXFP8_E4M3, MXFP8_E5M2} or formats == {MXFP8_E5M2}:
        return refused(
            name, contraction, "takes mxfp8_e4m3, or one operand of it and one of mxfp8_e5m2"
        )
    for x, dims in zip(
        (contraction.lhs, contraction.rhs), contraction.numbers.contracting, strict=True
    ):
        length = x.shape[dims[0]]
        one = x.window == ROW or (not is_symbolic(length) and length <= BLOCK)
        if len(x.block) == 2 or not one:
            return refused(
                name, contraction, "wants one scale for each row: quantize(..., window='row')"
            )
    for chip in chips:
        if chip not in (*reads.FP8, "cpu"):
            return refused(name, contraction, f"wants FP8 tensor cores, {chip} has none")
    return Served(name)


def fp8(contraction: Contraction, served: Served) -> jax.Array:
    """The product of the codes, times a row and a column of scales, in float32.

    Precision.HIGHEST makes XLA promote partial sums to float32 instead of leaving them to the
    tensor cores. XLA does not fuse the scales into it: they take 100 to 174 us of a product's 800
    (an H200, 16384 x 7168 x 4096, 2026-11-22). As they are powers of two, a product in bfloat16
    would do and halve that; but XLA then took more than 30 s to compile three of them, not 12.
    """
    del served
    lhs, rhs, numbers = contraction.lhs, contraction.rhs, contraction.numbers
    y = jax.lax.dot_general(
        lhs.values,
        rhs.values,
        numbers.dimensions,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
        out_sharding=numbers.out_sharding,
    )
    for x, (c,), batch in zip((lhs, rhs), numbers.contracting, numbers.batch, strict=True):
        row = _first(x.scales, c)
        free = [d for d in range(x.ndim) if d != c and d not in batch]
        row = _scale_floats(row.transpose([d - (d > c) for d in (*batch, *free)]))
        others = y.ndim - row.ndim  # the other operand's dimensions: behind lhs', before rhs'
        first = row.ndim if x is lhs else len(batch)
        y = y * jnp.expand_dims(row, [*range(first, first + others)])
    return y.astype(numbers.dtype)


def _first(scales: jax.Array, axis: int) -> jax.Array:
    """The first of equal scales along an axis; one that an explicit mesh splits has no first."""
    if not shards_of(scales, axis)[0]:
        return jax.lax.index_in_dim(scales, 0, axis, keepdims=False)
    largest = jnp.max(jax.lax.bitcast_convert_type(scales, jnp.uint8), axis)
    return jax.lax.bitcast_convert_type(largest, scales.dtype)


def _scale_floats(scales: jax.Array) -> jax.Array:
    """E8M0 scales as float32: 2^(S - 127) exactly, NaN for 255."""
    assert scales.dtype == SCALE_DTYPE
    byte = jax.lax.bitcast_convert_type(scales, jnp.uint8).astype(jnp.uint32)
    bits = jnp.where(byte == 0, np.uint32(1 << 22), byte << np.uint32(23))
    bits = jnp.where(byte == 255, np.uint32(0x7FC00000), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
