"""The kernel of the implementation "tcgen05": products on Blackwell's tensor cores, in Pallas.

One thread block computes a tile of the result, 128 rows by 128 or 256 columns. TMA brings operands
into shared memory as they lie, codes and scales in `blocked_128x4`, or floats. Scales go on to
tensor memory as they are, and the tensor core multiplies sums of 32 products by them. It sums in
float32, in tensor memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_mx.formats.views import padded

ROWS = 128  # of a tile, also of a tile of scales
_DEPTH = 128  # bytes of a row that one step reads
_TOGETHER = 8  # rows that lie together in shared memory
_COLUMNS = 32  # of the result that go through shared memory at once
_SHARED = 227 << 10  # bytes that a thread block may have, see launch/chips.py
_RESERVED = 2 << 10  # of them, for barriers and Pallas


class Side(NamedTuple):
    """An operand.

    Attributes:
      array: (matrices, rows, contracted): float8, float4, or bfloat16 and float16 without scales.
      scales: (matrices, row tiles, column tiles, 512) in `blocked_128x4`, or None.
    """

    array: jax.Array
    scales: jax.Array | None = None


class Items(NamedTuple):
    """The work of each row of thread blocks: int32 arrays of one length.

    Attributes:
      lhs: the index of the matrix of lhs.
      rhs: the index of the matrix of rhs.
      out: the index of the matrix of the result.
      tile: the tile of 128 rows, of lhs and of the result.
      start: the first row of the tile that belongs to the item.
      stop: the row behind the last one; the tile may end behind the array.
      first: the first step along the contracted axis.
      steps: how many steps there are; with none the result is zero.
    """

    lhs: Any
    rhs: Any
    out: Any
    tile: Any
    start: Any
    stop: Any
    first: Any
    steps: Any

    @property
    def table(self) -> jax.Array:
        """One int32 array, item by item."""
        columns = jnp.broadcast_arrays(*(jnp.asarray(column, jnp.int32) for column in self))
        return jnp.stack([column.reshape(-1) for column in columns], 1).reshape(-1)


def depth_of(dtype: Any, align: int = 0) -> int:
    """How many elements one step contracts.

    Args:
      dtype: of the operands.
      align: groups of the contracted axis begin at its multiples; 0: there are none.
    """
    return math.gcd(_DEPTH * 8 // jnp.finfo(dtype).bits, align)


def product(
    lhs: Side, rhs: Side, items: Items, matrices: int, dtype: Any, depth: int, turn: int = 0
) -> jax.Array:
    """The matrices of the result, (matrices, rows of lhs, rows of rhs).

    Args:
      lhs: an operand.
      rhs: the other one, whose rows are the columns of the result.
      items: they cover each row of the result once.
      matrices: of the result.
      dtype: of the result.
      depth: how many elements one step contracts, see `depth_of`.
      turn: after how many steps an item goes on with the next matrix of both; 0: it does not.
    """
    import jax.experimental.pallas.mosaic_gpu as plgpu

    dtype, rows, columns = np.dtype(dtype), lhs.array.shape[1], rhs.array.shape[1]
    width = 2 * ROWS if columns > ROWS else ROWS
    across, table = -(-columns // width), items.table
    count = table.size // len(items._fields)
    operands = {"a": _in_units(lhs.array, depth), "b": _in_units(rhs.array, depth)}
    for name, side in (("a_scales", lhs), ("b_scales", rhs)):
        if side.scales is not None:
            operands[name] = side.scales.reshape(*side.scales.shape[:-1], 32, 16)
    kernel = plgpu.kernel(
        _body([*operands], (across, width, depth, turn)),
        out_type=jax.ShapeDtypeStruct((matrices, *_units((rows, columns), _COLUMNS)), dtype),
        grid=(across * count,),
        grid_names=("tile",),
        scratch_types=_scratch(operands, dtype, width, depth),
    )
    return kernel(table, *operands.values())[:, :rows, :columns]


def _units(shape: Sequence[int], columns: int) -> list[int]:
    """Rows and columns up to multiples of what lies together in shared memory, as Pallas wants."""
    return [-(-n // unit) * unit for n, unit in zip(shape, (_TOGETHER, columns), strict=True)]


def _in_units(x: jax.Array, depth: int) -> jax.Array:
    """An operand with zeros behind, where its matrices are no whole `_units`.

    TMA wants rows of 16 bytes; one that is shorter than a step has no more.
    """
    width = depth if x.shape[2] > depth else 128 // jnp.finfo(x.dtype).bits
    rows, columns = _units(x.shape[1:], width)
    return padded(x, (rows - x.shape[1], columns - x.shape[2]))


def _scratch(
    operands: Mapping[str, jax.Array], out: np.dtype, width: int, depth: int
) -> dict[str, Any]:
    """A thread block's shared memory and tensor memory."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    codes = operands["a"].dtype
    bits = jnp.finfo(codes).bits
    tiles = {"a_scales": 1, "b_scales": width // ROWS} if "a_scales" in operands else {}
    stage = (ROWS + width) * depth * bits // 8 + sum(tiles.values()) * 4 * depth
    bounce = ROWS * _COLUMNS * out.itemsize
    stages = (_SHARED - _RESERVED - 3 * bounce) // stage

    def tiled(shape: tuple[int, ...], dtype: Any, bits: int) -> Any:
        swizzle = plgpu.find_swizzle(shape[-1] * bits)
        tiling = plgpu.TilingTransform((8, 8 * swizzle // bits))
        return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))

    scratch = {
        "a": tiled((stages, ROWS, depth), codes, bits),
        "b": tiled((stages, width, depth), operands["b"].dtype, bits),
        "sums": plgpu.TMEM((ROWS, width), jnp.float32),
        "whole": tiled((2, ROWS, _COLUMNS), out, 8 * out.itemsize),
        "parts": plgpu.SMEM((ROWS, _COLUMNS), out),
        "filled": plgpu.Barrier(num_arrivals=len(operands), num_barriers=stages),
        "consumed": plgpu.Barrier(num_barriers=stages, orders_tensor_core=True),
        "factors": [],
    }
    e8m0, layout = jnp.float8_e8m0fnu, plgpu.TMEMLayout.SCALES_LAYOUT
    for name, many in tiles.items():
        scratch[name] = plgpu.SMEM((stages, many, depth // ROWS, 32, 16), e8m0)
    for _ in range(2 if tiles else 0):  # of two steps, one after the other
        shapes = [(many * ROWS, depth // 32) for many in tiles.values()]
        scratch["factors"].append([plgpu.TMEM(shape, e8m0, layout=layout) for shape in shapes])
    return scratch


def _body(names: list[str], lengths: tuple[int, int, int, int]) -> Callable[..., None]:
    """The kernel, of operands of these names."""
    across, width, depth, turn = lengths
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu

    def body(table: Any, *refs: Any, **scratch: Any) -> None:
        *operands, out = refs
        at, fields = lax.axis_index("tile"), len(Items._fields)
        index, column = at // across, at % across
        item = Items(*(table[index * fields + i] for i in range(fields)))

        def fetch(step: Any, slot: Any) -> None:
            matrix = step // turn if turn else 0
            k, tiles = item.first + step - matrix * turn, width // ROWS
            elements, blocks = pl.ds(k * depth, depth), pl.ds(k * (depth // ROWS), depth // ROWS)
            parts = {
                "a": (item.lhs + matrix, pl.ds(item.tile * ROWS, ROWS), elements),
                "b": (item.rhs + matrix, pl.ds(column * width, width), elements),
                "a_scales": (item.lhs + matrix, pl.ds(item.tile, 1), blocks),
                "b_scales": (item.rhs + matrix, pl.ds(column * tiles, tiles), blocks),
            }
            for name, operand in zip(names, operands, strict=True):
                target, barrier = scratch[name].at[slot], scratch["filled"].at[slot]
                plgpu.copy_gmem_to_smem(operand.at[parts[name]], target, barrier)

        _multiply(item.steps, fetch, scratch)
        result = out.at[item.out, pl.ds(item.tile * ROWS, ROWS), pl.ds(column * width, width)]
        _store(item, result, scratch)

    return body


def _multiply(steps: Any, fetch: Callable[[Any, Any], None], scratch: dict[str, Any]) -> None:
    """All steps of a tile. When it returns, their sums are in tensor memory.

    While one step is under way the one before it has ended: its stage is filled anew, and the step
    behind overwrites its scales in tensor memory. Every wait ends: of `filled`, as each stage that
    is waited for was fetched before; of `consumed`, as the product that arrives at it was issued.
    """
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu

    filled, consumed = scratch["filled"], scratch["consumed"]
    stages = scratch["a"].shape[0]

    def begin(slot: Any, _: Any) -> None:
        fetch(slot, slot)

    def multiply(step: Any, slot: Any, factors: list[Any]) -> None:
        for name, target in zip(("a_scales", "b_scales"), factors, strict=False):
            plgpu.async_copy_scales_to_tmem(scratch[name].at[slot], target)
        a, b = scratch["a"].at[slot], scratch["b"].at[slot].transpose((1, 0))
        scales = dict(zip(("a_scale", "b_scale"), factors, strict=False))
        sums, accumulate = scratch["sums"], step > 0
        plgpu.tcgen05_mma(sums, a, b, consumed.at[slot], accumulate=accumulate, **scales)

    def one(step: Any, _: Any) -> None:
        slot, factors = lax.rem(step, stages), scratch["factors"]
        plgpu.barrier_wait(filled.at[slot])
        if not factors:
            multiply(step, slot, [])
        for parity, pair in enumerate(factors):
            pl.when(lax.rem(step, 2) == parity)(lambda pair=pair: multiply(step, slot, pair))

        @pl.when(step > 0)
        def _() -> None:
            before, ahead = lax.rem(step - 1, stages), step - 1 + stages
            plgpu.barrier_wait(consumed.at[before])
            pl.when(ahead < steps)(lambda: fetch(ahead, before))

    lax.fori_loop(0, jnp.minimum(steps, stages), begin, None)
    lax.fori_loop(0, steps, one, None)

    @pl.when(steps > 0)
    def _() -> None:
        plgpu.barrier_wait(consumed.at[lax.rem(steps - 1, stages)])

    @pl.when(steps == 0)
    def _() -> None:
        sums = scratch["sums"]
        plgpu.async_store_tmem(sums, jnp.zeros(sums.shape, sums.dtype))
        plgpu.commit_tmem()


def _store(item: Items, result: Any, scratch: dict[str, Any]) -> None:
    """Writes the rows of a tile that belong to the item, by TMA, which skips what is no element.

    Copies of a part of a tile have known lengths, powers of two, and shared memory as they lie.
    """
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.mosaic_gpu as plgpu

    whole, parts, sums = scratch["whole"], scratch["parts"], scratch["sums"]
    is_whole, many = (item.start == 0) & (item.stop == ROWS), item.stop - item.start

    def all_rows(y: jax.Array, columns: Any, slot: Any) -> None:
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        whole[slot] = y
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(whole.at[slot], result.at[:, columns])

    def some_rows(y: jax.Array, columns: Any) -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        parts[...] = y
        plgpu.commit_smem()
        row = item.start
        for length in (64, 32, 16, 8, 4, 2, 1):
            here = pl.ds(row, length)

            @pl.when(many & length != 0)
            def _(here=here) -> None:
                plgpu.copy_smem_to_gmem(parts.at[here], result.at[here, columns])

            row += many & length

    def one(i: Any, _: Any) -> None:
        columns = pl.ds(i * _COLUMNS, _COLUMNS)
        y = plgpu.async_load_tmem(sums.at[:, columns]).astype(whole.dtype)
        pl.when(is_whole)(lambda: all_rows(y, columns, lax.rem(i, 2)))
        pl.when(jnp.logical_not(is_whole))(lambda: some_rows(y, columns))

    lax.fori_loop(0, sums.shape[1] // _COLUMNS, one, None)
    plgpu.wait_load_tmem()
    plgpu.wait_smem_to_gmem(0)
