"""A kernel for tests alone that uses what no shipped kernel uses yet of the launch rule (CuTeDSL).

It copies a matrix tile by tile by TMA and adds 1, in every second thread block of a cluster 2. In
counters it leaves how many thread blocks ran and how many multiprocessors it was told of.

`python tests/prototype/tma_copy.py FILE` writes the cubin, on a machine without a GPU.
"""

import sys
import tempfile
from pathlib import Path

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
import handler_alone  # noqa: F401  # isort: skip

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import dsl_user_op
from tma_rule import COLUMNS, NAME, ROWS, SHARED, STAGES, THREADS

TILE_BYTES = ROWS * COLUMNS * 2


@dsl_user_op
def add_one(pointer, *, loc=None, ip=None):
    """Adds 1 to the uint32 in global memory."""
    return cute.arch.inline_ptx(
        "red.global.add.u32 [{$r0}], 1;", read_only_args=[Int64(pointer)], loc=loc, ip=ip
    )


@cute.kernel
def tma_copy(
    atom: cute.CopyAtom,
    mX: cute.Tensor,
    y: cute.Pointer,
    counters: cute.Pointer,
    rows: Int32,
    columns: Int32,
    multiprocessors: Int32,
):
    """Y (rows, columns) = x + 1 + rank; x, whose map `atom` has, is zero beyond its end."""
    tid, _, _ = cute.arch.thread_idx()
    down, right, _ = cute.arch.block_idx()
    cute.arch.griddepcontrol_wait()
    base = cute.arch.get_dyn_smem(Uint8, alignment=1024)
    full = cute.recast_ptr(base, dtype=Int64)
    tiles = cute.make_ptr(
        BFloat16, (base + 1024).toint(), cute.AddressSpace.smem, assumed_align=1024
    )
    layout = cute.make_layout((ROWS, COLUMNS, STAGES), stride=(COLUMNS, 1, ROWS * COLUMNS))
    sX = cute.make_tensor(
        cute.recast_ptr(tiles, cute.make_swizzle(3, 4, 3), dtype=BFloat16), layout
    )
    if tid == 0:
        for i in range_constexpr(STAGES):
            cute.arch.mbarrier_init(full + i, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    first, left = down * (STAGES * ROWS), right * COLUMNS
    gX = cute.local_tile(cute.domain_offset((first, left), mX), (ROWS, COLUMNS), (None, 0))
    tS, tG = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
    )
    if tid < 32:
        for i in range_constexpr(STAGES):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + i, TILE_BYTES)
            cute.copy(atom, tG[None, i], tS[None, i], tma_bar_ptr=full + i)

    Y = cute.make_tensor(y, cute.make_layout((rows, columns), stride=(Int64(columns), 1)))
    more = Float32(cute.arch.block_idx_in_cluster() + 1)
    for i in range_constexpr(STAGES):
        cute.arch.mbarrier_wait(full + i, 0)
        for j in cutlass.range(ROWS * COLUMNS // THREADS, unroll=4):
            at = j * THREADS + tid
            row, column = at // COLUMNS, at % COLUMNS
            to = first + i * ROWS + row
            if (to < rows) & (left + column < columns):
                Y[to, left + column] = BFloat16(Float32(sX[row, column, i]) + more)
    if tid == 0:
        add_one(counters.toint())
        C = cute.make_tensor(counters, cute.make_layout(2))
        C[1] = multiprocessors
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()


@cute.jit
def launch(
    x: cute.Pointer,
    y: cute.Pointer,
    counters: cute.Pointer,
    m: Int32,
    n: Int32,
    rows: Int32,
    columns: Int32,
    multiprocessors: Int32,
):
    """What the compiler sees; the handler launches the kernel itself."""
    X = cute.make_tensor(x, cute.make_layout((m, n), stride=(cute.assume(Int64(n), 8), 1)))
    tile = cute.make_layout((ROWS, COLUMNS), stride=(COLUMNS, 1))
    tile = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, tile)
    op = cpasync.CopyBulkTensorTileG2SOp()
    atom, mX = cpasync.make_tiled_tma_atom(op, X, tile, (ROWS, COLUMNS))
    tma_copy(atom, mX, y, counters, rows, columns, multiprocessors).launch(
        grid=[2, 1, 1], block=[THREADS, 1, 1], cluster=[2, 1, 1], smem=SHARED, min_blocks_per_mp=1
    )


def image() -> bytes:
    """The cubin for sm_90a."""
    tma_copy.set_name_prefix(NAME, remove_cutlass_symbol=True, keep_mangled_name=False)

    def pointer(dtype, align):
        return cute.runtime.make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align)

    with tempfile.TemporaryDirectory() as folder:
        compiled = cute.compile(
            launch,
            pointer(BFloat16, 16),
            pointer(BFloat16, 2),
            pointer(Int32, 4),
            *[Int32(64)] * 5,
            options=f"--gpu-arch sm_90a --keep-cubin --dump-dir {folder}",
        )
    return compiled.__cubin__


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(image())
