"""Stages of shared memory, which Hopper's kernels of products fill by TMA and empty by wgmma.

A stage has two barriers. Its copies complete `full`. Each warp of the two consumer warpgroups
arrives at `empty` when it no longer needs the stage. A kernel's module says how its roles wait for
each other, and why each wait has its arrivals.

Thread blocks of a cluster may share copies: each asks for a part, for all. So `full` counts the
bytes of all their copies, and warps arrive at the `empty` of each.

The two warpgroups may ask for products in turns, by barriers 1 and 2: before each request one waits
for the other's last one. Both ask equally often, as they have the same stages of the same tiles;
the first one begins, by an arrival that `begin_turns` makes in the other's place, and the last
arrival is taken by `end_turns`. So each wait has its arrival; and who waits for a turn holds no
stage that the other one's products need, as stages are given back outside of turns.
"""

import cutlass
from cutlass import Int32, Int64, Uint8, const_expr, cute, range_constexpr
from cutlass.cute.nvgpu import cpasync

from jax_mx.products.cutedsl.products import ProductEntry


class Pipeline(ProductEntry):
    """An entry whose thread blocks have stages, a warpgroup that fills them and two that compute.

    Attributes:
      stages: of shared memory.
      arrivals: that fill a stage, the copies being one.
      turns: whether the two warpgroups ask for products in turns.
    """

    stages: int
    arrivals = 1
    turns = False

    # ---- the beginning ---
    def places(self) -> tuple:
        """(thread, thread block, thread blocks, warp, lane)."""
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        return tid, bid, grid, cute.arch.make_warp_uniform(tid // 32), tid % 32

    def barriers(self) -> tuple:
        """Shared memory, and the barriers `full` and `empty` of all stages, where it begins."""
        base = cute.arch.get_dyn_smem(Uint8, alignment=1024)
        full = cute.recast_ptr(base, dtype=Int64)
        return base, full, full + self.stages

    @cute.jit
    def begin(self, tid: Int32, base, full, empty):
        """Initializes the barriers of all thread blocks that share copies."""
        if tid == 0:
            for i in range_constexpr(self.stages):
                cute.arch.mbarrier_init(full + i, self.arrivals)
                cute.arch.mbarrier_init(empty + i, 8 * self.sharing)
            self.prepare(base, empty + self.stages)
        cute.arch.mbarrier_init_fence()
        self.meet_all()

    def prepare(self, base, barriers) -> None:
        """Initializes further shared memory: the barriers behind the stages' barriers."""

    @cute.jit
    def next(self, slot: Int32, phase: Int32):
        """The stage behind a stage."""
        slot += 1
        if slot == self.stages:
            slot = Int32(0)
            phase = phase ^ 1
        return slot, phase

    # ---- thread blocks that share copies ---
    @property
    def sharing(self) -> int:
        """Thread blocks that share copies, and so wait for each other before and after all."""
        return self.below * self.beside

    def place(self, index: Int32, at, across: Int32):
        """See `ProductEntry.place`; of a cluster's tile, this thread block's."""
        return self.in_cluster(*super().place(index, at, across))

    def in_cluster(self, row: Int32, end: Int32, column: Int32):
        """Where this thread block's tile is, of the two that its cluster takes together."""
        if self.sharing > 1:
            rank = cute.arch.block_idx_in_cluster()
            row += rank * (self.rows * (self.below - 1))
            column += rank * (self.columns * (self.beside - 1))
        return row, end, column

    def meet_all(self) -> None:
        """All threads of the thread blocks that share copies, be it one."""
        if self.sharing > 1:
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def leave(self) -> None:
        """None of them ends while another may still write into its shared memory."""
        if self.sharing > 1:
            self.meet_all()

    def copy_atom(self, array, rows: int, parts: int):
        """The atom that copies so many rows of 128 bytes into `parts` blocks, and what it reads."""
        width = 128 * 8 // array.element_type.width
        tile = cute.make_composed_layout(
            cute.make_swizzle(3, 4, 3), 0, cute.make_layout((rows, width), stride=(width, 1))
        )
        one, many = cpasync.CopyBulkTensorTileG2SOp, cpasync.CopyBulkTensorTileG2SMulticastOp
        return cpasync.make_tiled_tma_atom(
            many() if parts > 1 else one(), array, tile, (rows, width)
        )

    def copied(self, base, at: int, dtype, rows: int, parts: int, stages: int):
        """Shared memory as such copies write it: (row, element, part of the rows, stage)."""
        smem, width, box = cute.AddressSpace.smem, 128 * 8 // dtype.width, rows // parts
        pointer = cute.make_ptr(dtype, (base + at).toint(), smem, assumed_align=1024)
        pointer = cute.recast_ptr(pointer, cute.make_swizzle(3, 4, 3), dtype=dtype)
        stride = (width, 1, box * width, rows * width)
        return cute.make_tensor(
            pointer, cute.make_layout((box, width, parts, stages), stride=stride)
        )

    def partition(self, atom, array, shared, row: Int32, column: Int32 | int = 0):
        """Where the copies of a tile go, and whence they come: from a row and a column on."""
        box = (cute.size(shared, mode=[0]), cute.size(shared, mode=[1]))
        tile = cute.local_tile(cute.domain_offset((row, column), array), box, (None, None))
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2),
            cute.group_modes(tile, 0, 2),
        )  # fmt: skip

    def part(self, parts: int):
        """The part of an operand that this thread block copies, for all that share it."""
        return cute.arch.block_idx_in_cluster() if parts > 1 else 0

    def copy(self, atom, source, target, barrier, parts: int) -> None:
        """Asks for a copy, of an operand that thread blocks share into each of them."""
        to = {"mcast_mask": cutlass.Int16((1 << parts) - 1)} if parts > 1 else {}
        cute.copy(atom, source, target, tma_bar_ptr=barrier, **to)

    @cute.jit
    def give_back(self, barrier):
        """A warp's stage, to all thread blocks that copy into it."""
        with cute.arch.elect_one():
            for rank in range_constexpr(self.sharing):
                if const_expr(self.sharing > 1):
                    cute.arch.mbarrier_arrive(barrier, rank)
                else:
                    cute.arch.mbarrier_arrive(barrier)

    # ---- two warpgroups that take turns ---
    @cute.jit
    def begin_turns(self, mine: Int32):
        """The first of two warpgroups, `mine` 0, is the first to ask for products."""
        if const_expr(self.turns):
            if mine == 1:
                cute.arch.barrier_arrive(barrier_id=1, number_of_threads=256)

    @cute.jit
    def take_turn(self, mine: Int32):
        """Waits until the other warpgroup has asked for its products."""
        if const_expr(self.turns):
            cute.arch.barrier(barrier_id=1 + mine, number_of_threads=256)

    @cute.jit
    def pass_turn(self, mine: Int32):
        """Lets the other one ask."""
        if const_expr(self.turns):
            cute.arch.barrier_arrive(barrier_id=2 - mine, number_of_threads=256)

    @cute.jit
    def end_turns(self, mine: Int32):
        """Takes what `begin_turns` and all turns have left."""
        if const_expr(self.turns):
            if mine == 0:
                cute.arch.barrier(barrier_id=1, number_of_threads=256)
