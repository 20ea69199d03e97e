"""The ways to compute a product that reads MX operands: a table, as quantizing/registry.py has one.

Every implementation gives NaN where a block is NaN, and accumulates in float32, FP8 tensor cores
with fewer bits (`error`). A row says whether it serves a contraction on chips, dense or over
groups, and computes it; decide.py picks one.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.formats.checks import is_symbolic
from jax_mx.formats.formats import BLOCK, MXFP4_E2M1, MXFP8_E4M3, MXFP8_E5M2, SCALE_DTYPE
from jax_mx.formats.layouts import BLOCKED_128X4, ROW_MAJOR, SHUFFLED_16X16, SHUFFLED_32X8, Layout
from jax_mx.formats.sharding import shards_of
from jax_mx.formats.windows import ROW
from jax_mx.launch import chips as chip_table
from jax_mx.products import amd, kernel_plans, kernels, pallas, tcgen05, tensor_cores
from jax_mx.products import ragged as reference
from jax_mx.products.contraction import (
    SUMS,
    Contraction,
    Numbers,
    Operand,
    Served,
    both_along,
    refused,
)
from jax_mx.products.groups import Groups
from jax_mx.quantizing import registry
from jax_mx.quantizing.mxarray import MXArray, dequantize
from jax_mx.quantizing.reference import rows_of

# sm_90's FP8 tensor cores cut products at 2^-13 of the largest of them. No sum of
# the normal numbers that `measuring` draws is off by over 4e-4 of sum |a||b| (tests/test_gemm.py).
FP8_ERROR = 2.0**-10
DENSE, GROUPED = "dot_general", "ragged_dot"


@dataclasses.dataclass(frozen=True)
class ProductImplementation(registry.Implementation):
    """One way to compute products; see `registry.Implementation`.

    Attributes:
      run: computes a contraction of arrays, as `support` said.
      preferred: whether it is the choice on a platform and chips where nothing was measured.
      error: the largest difference of its results over sum |a||b|, where that is more than eps32 *
        k.
      worth: whether `autotune` measures it for a contraction that it serves.
      ops: the public functions whose products it computes: dense ones, or products over groups.
      splits_itself: whether XLA knows how to split it among devices, and no rule of ours does.
      is_pallas: whether its kernels are Pallas', which XLA cannot split.
      layouts: of scales and values, that it reads as they lie; others are brought to rows for it.
      executed: where tests ran its kernels, if jax_mx/verified does not say it; empty: XLA has
        them.
    """

    support: Callable[[Contraction, Sequence[str]], Served]
    run: Callable[[Contraction, Served], jax.Array]
    preferred: Callable[[Contraction, str, Sequence[str]], bool]
    error: float = 0.0
    worth: Callable[[Contraction], bool] = lambda _: True
    ops: tuple[str, ...] = (DENSE, GROUPED)
    splits_itself: bool = False
    is_pallas: bool = False
    layouts: tuple[Layout, ...] = (ROW_MAJOR,)
    executed: str = ""

    def compute(self, contraction: Contraction, served: Served) -> jax.Array:
        """The product of arrays in any layout."""
        return self.run(contraction.in_layouts(self.layouts), served)


# ---- preferences ---
def _always(contraction: Contraction, platform: str, chips: Sequence[str]) -> bool:
    del contraction, platform, chips
    return True


def _never(contraction: Contraction, platform: str, chips: Sequence[str]) -> bool:
    del contraction, platform, chips
    return False


def _on_gpus(contraction: Contraction, platform: str, chips: Sequence[str]) -> bool:
    del contraction, chips
    return platform in chip_table.DSLS


def _on(known: Callable[[str], bool]) -> Callable[[Contraction, str, Sequence[str]], bool]:
    """Preferred on chips that are all known to be good at it."""

    def preferred(contraction: Contraction, platform: str, chips: Sequence[str]) -> bool:
        del contraction, platform
        return bool(chips) and all(map(known, chips))

    return preferred


# ---- dequantize, then a product of floats ---
def _any(name: str, reads_floats: bool) -> Callable[[Contraction, Sequence[str]], Served]:
    """The `support` of an implementation that serves every contraction."""

    def support(contraction: Contraction, chips: Sequence[str]) -> Served:
        del contraction, chips
        return Served(name, reads_floats=reads_floats)

    return support


def _dequantize(contraction: Contraction, served: Served) -> jax.Array:
    """Kernels make bfloat16 of MX operands, cuBLAS or its like multiplies them.

    bfloat16 holds every element of every format exactly, but for those below 2^-133.
    """
    del served
    numbers = contraction.numbers
    a, b = map(kernels.swapped_floats, (contraction.lhs, contraction.rhs))
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


def exact_floats(x: Operand) -> jax.Array:
    """An operand in float32, by plain XLA."""
    if isinstance(x, MXArray):
        return dequantize(x, jnp.float32, implementation="xla")
    return x.astype(jnp.float32)


def _plain(contraction: Contraction, served: Served) -> jax.Array:
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
            return reference.sums(a, rows_of(b, groups.rows), groups.sizes, BLOCK)
        return groups.combined(reference.rows(a, b, groups.sizes, BLOCK))
    pad = -a.shape[0] % tile
    a = jnp.pad(a, ((0, pad), (0, 0)))
    if sums:
        return reference.sums(a, jnp.pad(b, ((0, pad), (0, 0))), sizes, tile)
    return reference.rows(a, b, sizes, tile)[: a.shape[0] - pad]


# ---- the chip's own scaled product ---
def _scaled_dot_support(contraction: Contraction, chips: Sequence[str]) -> Served:
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


def _scaled_dot(contraction: Contraction, served: Served) -> jax.Array:
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
        assert isinstance(x, MXArray)  # _scaled_dot_support
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
def _fp8_support(contraction: Contraction, chips: Sequence[str]) -> Served:
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
        if chip not in (*tensor_cores.FP8, "cpu"):
            return refused(name, contraction, f"wants FP8 tensor cores, {chip} has none")
    return Served(name)


def _fp8(contraction: Contraction, served: Served) -> jax.Array:
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


# ---- the table ---
def _tiling(tile: int) -> ProductImplementation:
    """Our kernels with one tiling, which `autotune` measures."""
    return ProductImplementation(
        kernels.name_of(tile),
        "cuda",
        functools.partial(kernels.support, tile=tile),
        kernels.run,
        _never,
        FP8_ERROR,
        functools.partial(kernels.worth, tile=tile),
    )


# In order of preference.
IMPLEMENTATIONS: Mapping[str, ProductImplementation] = {
    row.name: row
    for row in (
        ProductImplementation(
            kernels.NAME, "cuda", kernels.support, kernels.run, kernels.preferred, FP8_ERROR
        ),
        *map(_tiling, kernel_plans.ROWS),
        ProductImplementation(
            amd.NAME, "rocm", amd.support, amd.run, _on(chip_table.chips_of("flydsl").__contains__),
            layouts=(SHUFFLED_32X8, SHUFFLED_16X16, ROW_MAJOR),
        ),
        ProductImplementation(
            tcgen05.NAME, "cuda", tcgen05.support, tcgen05.run,
            _on(tensor_cores.TCGEN05.__contains__), FP8_ERROR, layouts=(BLOCKED_128X4, ROW_MAJOR),
            executed="JAX's interpreter", is_pallas=True,
        ),
        ProductImplementation(
            "fp8", "any", _fp8_support, _fp8, _on(tensor_cores.FP8.__contains__), FP8_ERROR,
            ops=(DENSE,),
        ),
        ProductImplementation(
            "scaled_dot", "any", _scaled_dot_support, _scaled_dot,
            _on(tensor_cores.SCALED_DOT.__contains__), ops=(DENSE,), splits_itself=True,
        ),
        ProductImplementation(
            pallas.HOPPER, "cuda", pallas.hopper_support, pallas.run_hopper,
            _on(lambda chip: chip_table.arch_of(chip) == "sm_90a"), ops=(GROUPED,), is_pallas=True,
        ),
        ProductImplementation(
            pallas.BLACKWELL, "cuda", pallas.blackwell_support, pallas.run_blackwell,
            pallas.prefers_blackwell, executed="dense ones in JAX's interpreter, others nowhere",
            is_pallas=True,
        ),
        ProductImplementation("dequantize", "any", _any("dequantize", True), _dequantize, _on_gpus),
        ProductImplementation("xla", "any", _any("xla", False), _plain, _always),
    )
}  # fmt: skip


def named(op: str) -> Mapping[str, ProductImplementation]:
    """The implementations that callers of `op` may name."""
    op = "dot_general" if op in ("matmul", "einsum") else op
    return {name: row for name, row in IMPLEMENTATIONS.items() if op in row.ops}
