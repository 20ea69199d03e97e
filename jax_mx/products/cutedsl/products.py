"""The common parts of products' kernels: entries, the walk over groups, how y is stored.

y (T, N) = x (T, K) @ W (G, N, K)^T. Each group has rows of x, one after the other, and its own
matrix. A tile is `rows` rows of x of one group times `columns` rows of its matrix. The grid is as
large as the chip. Each thread block, or each cluster that shares copies, takes tiles at equal
distances. Tiles of one piece of x follow each other, so that x is read from L2. A wide y is walked
by strips, so that W is read from L2, too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, const_expr, cute, range_constexpr

from jax_mx.formats.formats import BLOCK, FLOAT_DTYPES
from jax_mx.launch.rule import (
    Extent,
    Factor,
    GridTerm,
    Length,
    MapAt,
    Padding,
    Pointer,
    Scalar,
    ScalarAt,
    TensorMap,
    constant,
    multiprocessors,
)
from jax_mx.quantizing.facts.product_kernels import RESULTS, ProductKernel
from jax_mx.quantizing.facts.signatures import EPILOGUE, Array, Role, signature_of
from jax_mx.quantizing.kernels import tuning
from jax_mx.quantizing.kernels.cutedsl import convert

HEAD = 1024  # bytes of shared memory before the tiles: barriers
NO_ADDRESS = 1 << 62  # a multiple of it is the pointer to an array that is not there, no other


def load_shared(address: Uint32, bits: int) -> Uint32:
    """A byte or two of shared memory, widened. Not volatile: barriers are what orders it."""
    code = f"{{ .reg .u16 t; ld.shared.u{bits} t, [{{$r0}}]; cvt.u32.u16 {{$w0}}, t; }}"
    return convert.ptx(code, Uint32, Uint32(address))


def load_columns(address: Uint32) -> list:
    """Four 8 x 8 matrices of 16 bits, transposed, as wgmma's first operand wants them.

    For g = lane / 4 and q = lane % 4, a lane's word of each has rows 2q and 2q + 1 of column g.
    `address` points to row `lane` of the 32, which has 16 bytes.
    """
    code = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    return list(convert.ptx(code, [Uint32] * 4, Uint32(address)))


def store_if(
    address: Int64, values: list, index: int, count: Int32, streams=False
) -> None:  # fmt: skip
    """Words, two or four, or a Uint16, to global memory if index < count: without a branch.

    With `streams` they leave L2 before all that is read again.
    """
    first = values[0]
    suffix = {Float32: "f32", Uint32: "b32", cutlass.Uint16: "b16"}[type(first)]
    vector = {1: "", 2: ".v2", 4: ".v4"}[len(values)]
    names = ", ".join(f"{{$r{i + 2}}}" for i in range(len(values)))
    names = "{" + names + "}" if vector else names
    suffix = f"{'.cs' * streams}{vector}.{suffix}"
    code = (
        f"{{ .reg .pred p; setp.lt.s32 p, {index}, {{$r1}}; "
        f"@p st.global{suffix} [{{$r0}}], {names}; }}"
    )
    convert.ptx(code, None, Int64(address), Int32(count), *values)


def four_kept(address: Uint32) -> list:
    """Four integers of shared memory, read where it says and not before."""
    code = "ld.volatile.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    return list(convert.ptx(code, [Int32] * 4, Uint32(address)))


BFLOAT16, FLOAT16, FLOAT32 = range(len(RESULTS))  # y's dtypes, as kernels know them


def vector(address: Int64, dtype, count: int = 1):
    """The `count` elements at an address of global memory, a multiple of their size."""
    align = dtype.width // 8 * count
    at = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(at, cute.make_layout(count))


def element(pointer, offset, dtype):
    """The element at an offset, in elements, from a pointer."""
    return vector(pointer.toint() + Int64(offset) * (dtype.width // 8), dtype)[0]


class ProductEntry:
    """An entry of a product's binary: its arrays, its launch rule, and the tiles that it takes.

    Attributes:
      signature: its arrays, in the order of its pointers.
      threads: of a thread block.
      grid: terms (axis, buffer, from, to, divisor).
      shared: bytes of dynamic shared memory.
      split: thread blocks of a cluster that may share a tile's K.
      resident: thread blocks of a multiprocessor.
      maps: its tensor maps.
      elements_per_thread: of y, for the build's report.
      rows: of x, in a tile.
      columns: of y, in a tile.
      below, beside: the numbers of tiles, below and next to each other, that the thread blocks of a
        cluster take together.
      strip: the number of tiles next to each other, `beside` at a time, that are taken before the
        tiles below; 0: all.
      dtypes: the dtypes of y that have entries.
      scratch: results that are cleared before.
      batches: in which the operands that are added to y are read, see `finish_all`.
      early_start: see `launch.rule.Entry`.
    """

    dtypes: tuple[str, ...] = RESULTS
    scratch = ()

    divide = ()
    early_start = False
    maps = ()
    shared = 0
    split = 1
    resident = 1
    batches = 4
    rows = 1
    columns = 1
    below = 1
    beside = 1
    strip = 0
    threads: int
    elements_per_thread: int

    def __init__(self, product: ProductKernel, arch: str):
        self.product, self.arch = product, arch
        self.signature = signature_of(product.op)

    def tuned(self, entry: str) -> dict:
        """The value of this arch's table for the entry."""
        return tuning.choose(f"{self.product.op}.{entry}", self.arch, self.product)

    @property
    def cluster(self) -> int:
        """Thread blocks of a cluster, along the first axis."""
        return self.split * self.below * self.beside

    # ---- the launch rule ---
    def align_of(self, array: Array, itemsize: int) -> int:
        """The number of bytes that divides an array's address; `itemsize` is y's."""
        if array.name == "y":
            return itemsize
        return {Role.FLOATS: 2, Role.REPLICATED: 4}.get(array.role, 1)

    @property
    def grid(self) -> list:
        """As many thread blocks as the chip has at a time, in whole clusters."""
        factors = [GridTerm(0, Factor(multiprocessors(), self.cluster))]
        if self.cluster * self.resident > 1:
            factors.append(GridTerm(0, Factor(constant(self.cluster * self.resident))))
        return [term.to_json() for term in factors]

    @property
    def extents(self) -> list[Extent]:
        """Rows and columns of x, matrices, their rows and their columns as stored."""
        x, codes = self.signature.operands[0].name, "codes"
        x, codes = self.signature.number(x), self.signature.number(codes)
        return [
            Extent(x, 0, 1),
            Extent(x, 1),
            Extent(codes, 0, 1),
            Extent(codes, 1, 2),
            Extent(self.signature.number("scales"), 2),
        ]

    @property
    def scalars(self) -> list:
        """The scalars of the launch rule: see `extents`; the number of y's dtype."""
        return [*(Scalar(4, extent) for extent in self.extents), Scalar(4, constant(0))]

    def matrix_map(self, name: str, dtype: str, itemsize: int, box: tuple, swizzle: int) -> dict:
        """The tensor map of a buffer (rows, columns) or (slabs, rows, columns)."""
        buffer, rank = self.signature.number(name), 2 if len(box) == 2 else 3
        dims = tuple(Length(Extent(buffer, -1 - i, -i or 99)) for i in range(rank))
        strides = tuple(Length(Extent(buffer, -1 - i), itemsize) for i in range(rank - 1))
        return TensorMap(buffer, dtype, dims, strides, box, swizzle, promotion=256).to_json()

    def launch(self, result: str) -> dict:
        """The entry's launch rule, for a y of this dtype."""
        itemsize = FLOAT_DTYPES[result].itemsize if result in FLOAT_DTYPES else 4
        rule = {
            "align": [self.align_of(array, itemsize) for array in self.signature.arrays],
            "divide": [factor.to_json() for factor in self.divide],
            "threads": [self.threads, 1, 1],
            "grid": self.grid,
        }
        if self.shared:
            rule["shared"] = self.shared
        if self.early_start:
            rule["early_start"] = True
        if self.cluster > 1:
            rule["cluster"] = [self.cluster, 1, 1]
        if parameters := self.parameters:
            kinds = {MapAt: "map", Padding: "zeros", Pointer: "pointer", ScalarAt: "scalar"}
            rule["parameters"] = [
                [kinds[type(p)], p.bytes if isinstance(p, Padding) else self._number(p)]
                for p in parameters
            ]
        return rule

    @staticmethod
    def _number(parameter) -> int:
        return parameter.buffer if isinstance(parameter, Pointer) else parameter.index

    @property
    def parameters(self) -> tuple:
        """The kernel's: the maps with the sizes that CuTeDSL puts behind each, pointers, scalars.

        A buffer that has a map has no pointer. No map at all: as the rule has it by default.
        """
        if not self.maps:
            return ()
        mapped = [item["buffer"] for item in self.maps]
        found = []
        for i, item in enumerate(self.maps):
            found += [MapAt(i), Padding(4 * len(item["dims"]))]
        found += [Pointer(i) for i in range(len(self.signature.arrays)) if i not in mapped]
        return (*found, *(ScalarAt(i) for i in range(len(self.scalars))))

    # ---- the compiler's side ---
    def arguments(self):
        """Stand-ins of the host function's arguments, to compile it."""
        pointers = tuple(
            cute.runtime.make_ptr(
                self.element_of(array),
                0,
                cute.AddressSpace.gmem,
                assumed_align=min(self.align_of(array, 2), 16),
            )
            for array in self.signature.arrays
        )
        return pointers, tuple(Int32(BLOCK) for _ in self.scalars)

    def element_of(self, array: Array):
        """The type that the kernel's pointer to an array has."""
        if array.role is Role.REPLICATED:
            return {"int32": Int32, "float32": Float32}[array.dtype]
        if array in self.signature.results:
            return cutlass.Uint16
        return cutlass.BFloat16 if array.role is Role.FLOATS else cutlass.Uint8

    def floats(self, address: Int32, count: int):
        """Floats of shared memory."""
        smem = cute.AddressSpace.smem
        there = cute.make_ptr(Float32, Int32(address), smem, assumed_align=4 * count)
        return cute.make_tensor(there, cute.make_layout(count))

    # ---- the walk over tiles ---
    @cute.jit
    def size_of(self, sizes, e: Int32, row: Int32, t: Int32, groups: Int32):
        """How many rows group e has, which begins at `row`; without sizes all have as many."""
        size = t // groups
        if sizes.toint() != Int64(0):
            size = element(sizes, cutlass.min(e, groups - 1), Int32)
        size = cutlass.max(cutlass.min(size, t - row), Int32(0))
        if e >= groups:
            size = Int32(0)
        return size

    @cute.jit
    def start(self, sizes, t: Int32, groups: Int32):
        """Where the walk begins: (group, its first tile, its first row, its rows)."""
        return Int32(0), Int32(0), Int32(0), self.size_of(sizes, Int32(0), Int32(0), t, groups)

    @cute.jit
    def seek(self, index: Int32, at, sizes, t: Int32, groups: Int32, across: Int32):
        """On to the group that has tile `index`; behind the last tile, e is `groups`.

        Each turn goes on by a group, of which there are `groups`: it ends.
        """
        e, tile, row, size = at
        tiles = self.pieces(size) * across
        while (e < groups) & (index >= tile + tiles):
            tile += tiles
            row += size
            e += 1
            size = self.size_of(sizes, e, row, t, groups)
            tiles = self.pieces(size) * across
        return e, tile, row, size

    @cute.jit
    def keep(self, address: Int32, at):
        """The walk's four numbers into a warp's own place; all lanes have the same."""
        cute.arch.sync_warp()
        smem = cute.AddressSpace.smem
        to = cute.make_tensor(
            cute.make_ptr(Int32, address, smem, assumed_align=16), cute.make_layout(4)
        )
        for i in range_constexpr(4):
            to[i] = at[i]
        cute.arch.sync_warp()

    def recalled(self, address: Int32) -> tuple:
        """The four words that were kept."""
        return tuple(four_kept(address))

    def pieces(self, size: Int32):
        """The pieces of a group's rows of x: a thread block, or a cluster, has one at a time."""
        rows = self.rows * self.below
        return (size + rows - 1) // rows

    @cute.jit
    def place(self, index: Int32, at, across: Int32):
        """Where tile `index` of the group that `seek` found is: (row of x, end, column)."""
        _, tile, row, size = at
        line, column = self.in_strips(index - tile, self.pieces(size), across)
        rows, columns = self.rows * self.below, self.columns * self.beside
        return row + line * rows, row + size, column * columns

    @cute.jit
    def in_strips(self, local: Int32, down: Int32, across: Int32):
        """The next tile, strip by strip, of `down` tiles below and `across` next to each other."""
        strip, wide = Int32(0), across
        if const_expr(self.strip > 0):
            strip = local // (down * self.strip)
            local -= strip * (down * self.strip)
            strip *= self.strip
            wide = cutlass.min(across - strip, Int32(self.strip))
        return local // wide, strip + local % wide

    @cute.jit
    def parts(self, tiles: Int32, grid: Int32):
        """How many thread blocks share each tile: one where that takes no longer."""
        sharing = Int32(1)
        if const_expr(self.split > 1):
            alone = (tiles + grid - 1) // grid * self.split
            if alone > (tiles * self.split + grid - 1) // grid:
                sharing = Int32(self.split)
        return sharing

    @cute.jit
    def rank(self, bid: Int32, parts: Int32):
        """The number of a thread block among the ones that share tiles."""
        number = Int32(0)
        if parts > 1:
            number = bid % self.split
        return number

    # ---- what is done to sums before they are rounded; null pointers stand for nothing ---
    def is_there(self, epilogue):
        """Whether there is anything to do."""
        bias, row_scale, added = (pointer.toint() for pointer in epilogue)
        return (bias | row_scale | added) != Int64(0)

    @cute.jit
    def finished(self, epilogue, total: Float32, e: Int32, m: Int32, n: Int32, width: Int32):
        """The sum of row m of x and column n of group e, as `reference.finished` has it."""
        bias, row_scale, added = epilogue
        if bias.toint() != Int64(0):
            total = total + element(bias, Int64(e) * width + n, Float32)
        if row_scale.toint() != Int64(0):
            total = total * element(row_scale, m, Float32)
        if added.toint() != Int64(0):
            total = total + element(added, Int64(m) * width + n, Float32)
        return total

    @cute.jit
    def finish_all(
        self, epilogue: cutlass.Constexpr, sums, rows: cutlass.Constexpr,
        columns: cutlass.Constexpr, e: Int32, end: Int32, width: Int32, first: Int64,
    ):  # fmt: skip
        """Finishes all sums of a thread in place.

        Args:
          epilogue: the pointers that the op has, by their names.
          sums: a tensor with a float for each pair of a row and a column.
          rows: pairs (row of y, its part of the sum's index); from `end` on none is read.
          columns: pairs (column of y, its part of the sum's index); the index is the sum of both
            parts.
          e: the group.
          end: of its rows.
          width: of y.
          first: number of the element of `added` that column 0 of row 0 has.
        """
        if const_expr("row_scale" in epilogue):
            self.bias_and_scale(epilogue, sums, rows, columns, e, end, width)
        # Along the longer list, in parts: there are too few registers for all loads at once, and
        # the compiler moves none out of a branch.
        by_row: cutlass.Constexpr = len(rows) > len(columns)
        outer: cutlass.Constexpr = rows if by_row else columns
        part: cutlass.Constexpr = (len(outer) + self.batches - 1) // self.batches
        for i in range_constexpr(0, len(outer), part):
            cute.arch.sync_warp()
            if epilogue["added"].toint() != Int64(0):
                some = outer[i : i + part]
                here = (some, columns) if by_row else (rows, some)
                self.add(epilogue["added"], sums, *here, end, width, first)

    def add(self, added, sums, rows: list, columns: list, end, width, first) -> None:
        """Adds what there was."""
        for m, of_m in rows:
            line = first + Int64(cutlass.min(m, end - 1)) * width
            for n, of_n in columns:
                its = element(added, line + cutlass.min(n, width - 1), Float32)
                sums[of_m + of_n] = sums[of_m + of_n] + its

    @cute.jit
    def bias_and_scale(
        self, epilogue: cutlass.Constexpr, sums, rows: cutlass.Constexpr,
        columns: cutlass.Constexpr, e: Int32, end: Int32, width: Int32,
    ):  # fmt: skip
        """The first two of these."""
        if const_expr("bias" in epilogue):
            if epilogue["bias"].toint() != Int64(0):
                for n, of_n in columns:
                    there = Int64(e) * width + cutlass.min(n, width - 1)
                    its = element(epilogue["bias"], there, Float32)
                    for _, of_m in rows:
                        sums[of_m + of_n] = sums[of_m + of_n] + its
        if epilogue["row_scale"].toint() != Int64(0):
            for m, of_m in rows:
                its = element(epilogue["row_scale"], cutlass.min(m, end - 1), Float32)
                for _, of_n in columns:
                    sums[of_m + of_n] = sums[of_m + of_n] * its

    # ---- y ---
    def pair(self, low: Float32, high: Float32, result: int) -> list:
        """Two neighbours as words of y's dtype."""
        if result == FLOAT32:
            return [low, high]
        return [convert.round_two(low, high, RESULTS[result])]

    def store(
        self, y: Int64, value: Float32, result: Int32, index: int = 0, count: Int32 | int = 1
    ) -> None:  # fmt: skip
        """One element of a dtype that is known at run time to an address, if index < count."""
        zero, wide = Int32(0), result == FLOAT32
        low = convert.round_two(value, value, "bfloat16")
        half = convert.round_two(value, value, "float16")
        low = Uint32(cutlass.select_(result == FLOAT16, half, low))
        narrow = cutlass.Uint16(low & Uint32(0xFFFF))
        count = Int32(count)
        store_if(y, [narrow], index, Int32(cutlass.select_(wide, zero, count)))
        store_if(y, [value], index, Int32(cutlass.select_(wide, count, zero)))

    @cute.jit
    def size_in_bytes(self, result: Int32):
        """The bytes of an element of y."""
        size = Int32(2)
        if result == FLOAT32:
            size = Int32(4)
        return size

    @cute.jit
    def clear(
        self, y, added, row: Int32, t: Int32, width: Int32, result: Int32, block: Int32,
        blocks: Int32, thread: Int32, threads: cutlass.Constexpr,
    ):  # fmt: skip
        """Zeros into the rows from `row` on, which no group has; or what was there."""
        size = self.size_in_bytes(result)
        for m in cutlass.range(row + block, t, blocks, unroll=1):
            for n in cutlass.range(thread, width, threads, unroll=1):
                total = Float32(0)
                if added.toint() != Int64(0):
                    total = element(added, Int64(m) * width + n, Float32)
                self.store(y.toint() + (Int64(m) * width + n) * size, total, result)


class Plain(ProductEntry):
    """Any addresses and sizes: a thread an element of y, one after the other. Slow.

    For arrays that begin where the copy engine cannot read: slices of larger ones.
    """

    threads = 256
    elements_per_thread = 1

    def __init__(self, product: ProductKernel, arch: str):
        super().__init__(product, arch)
        self.formats = dict(zip(("x", "w")[-len(product.formats) :], product.formats, strict=True))

    @cute.jit
    def __call__(self, pointers, scalars):
        self.kernel(pointers, scalars).launch(grid=[1, 1, 1], block=[self.threads, 1, 1])

    @cute.kernel
    def kernel(self, pointers, scalars):
        arrays = self.signature.named(pointers)
        y, sizes = arrays["y"], arrays["group_sizes"]
        epilogue: cutlass.Constexpr = [arrays[name] for name in EPILOGUE]
        added = arrays["added"]
        t, wide, groups, width, blocks, result = scalars
        size = self.size_in_bytes(result)
        tid, _, _ = cute.arch.thread_idx()
        bid, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        high, width = width, self.width_of(width, blocks)
        parts = Int32(1)
        if const_expr(self.product.parted):
            parts, groups = groups, parts
        at = self.start(sizes, t, groups)
        for m in cutlass.range(t, unroll=1):
            at = self.seek(m, at, sizes, t, groups, Int32(1))
            e = at[0]
            for n in cutlass.range(bid * self.threads + tid, width, grid * self.threads, unroll=1):
                total = Float32(0)
                if e < groups:
                    total = self.dot(arrays, m, e, n, wide, high, blocks, parts)
                    total = self.finished(epilogue, total, e, m, n, width)
                elif added.toint() != Int64(0):
                    total = element(added, Int64(m) * width + n, Float32)
                self.store(y.toint() + (Int64(m) * width + n) * size, total, result)

    def width_of(self, high: Int32, blocks: Int32):
        """How many columns y has, of a matrix of so many rows, each of so many blocks."""
        del blocks
        return high

    @cute.jit
    def dot(
        self, arrays: cutlass.Constexpr, m: Int32, e: Int32, n: Int32, wide: Int32, high: Int32,
        blocks: Int32, parts: Int32,
    ):  # fmt: skip
        """The product of row m of x and row n of matrix e, whose codes lie in parts."""
        w = Int64(e) * high + n
        total = Float32(0)
        passes = Int32(1)
        if const_expr("x" in arrays):
            passes = wide // (blocks * BLOCK)
        for b in cutlass.range(blocks * passes, unroll=1):
            c = b % blocks
            if const_expr("x" in arrays):
                right = self.block(arrays["codes"], w * blocks + c, self.formats["w"])
                factor = self.factor(arrays["scales"], w * blocks + c)
                for i in range_constexpr(BLOCK):
                    left = element(arrays["x"], (Int64(m) * passes * blocks + b) * BLOCK + i,
                                   cutlass.BFloat16)  # fmt: skip
                    total += Float32(left) * (right[i] * factor)
            else:
                at, codes = w * blocks + c, w * blocks + c
                if const_expr(self.product.parted):
                    per_part = blocks // parts
                    codes = (Int64(c // per_part) * high + n) * per_part + c % per_part
                total += self.of_blocks(arrays, at, codes, Int64(m) * blocks + b)
        return total

    @cute.jit
    def of_blocks(self, arrays: cutlass.Constexpr, at: Int64, codes: Int64, of_x: Int64):
        """The product of a block of W, with its scale and its codes there, and a block of x."""
        part = Float32(0)
        right = self.block(arrays["codes"], codes, self.formats["w"])
        factor = self.factor(arrays["scales"], at)
        left = self.block(arrays["x_codes"], of_x, self.formats["x"])
        for i in range_constexpr(BLOCK):
            part += left[i] * right[i]
        return part * self.factor(arrays["x_scales"], of_x) * factor

    @cute.jit
    def factor(self, scales, at: Int64):
        """The scale of a block, as a float."""
        return convert.factor_of(Uint32(element(scales, at, cutlass.Uint8)))

    @cute.jit
    def block(self, codes, at: Int64, format: cutlass.Constexpr):
        """The 32 elements of a block, without their scale."""
        per: cutlass.Constexpr = format.codes_per_byte
        out = cute.make_rmem_tensor(BLOCK, Float32)
        to = convert.Conversion("float32", format, self.arch)
        for i in range_constexpr(BLOCK // 4):
            word = Uint32(0)
            for j in range_constexpr(4 // per):
                byte = element(codes, at * (BLOCK // per) + (4 // per) * i + j, cutlass.Uint8)
                word = word | (Uint32(byte) << Uint32(8 * j))
            if const_expr(per == 2):  # a nibble a byte
                word = (word | (word << Uint32(8))) & Uint32(0x00FF00FF)
                word = (word | (word << Uint32(4))) & Uint32(0x0F0F0F0F)
            for j, value in enumerate(convert.unpack_four(word, to)):
                out[4 * i + j] = value
        return out


def launches(
    entries: Sequence[ProductEntry], usage: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """A binary's launches for the manifest: each dtype of y has the same entries.

    Args:
      entries: the fastest first.
      usage: the compiler's figures for each symbol, see `launch.entry.launches`.

    Raises:
      RuntimeError: an entry was compiled for other threads, or has other maps than the first.
    """
    rules = {}
    for number, result in enumerate(entries[0].dtypes):
        scalars = [scalar.to_json() for scalar in entries[0].scalars]
        scalars[-1][1] = constant(number).to_json()
        rules[result] = {"scalars": scalars, "maps": [*entries[0].maps], "entries": []}
        if entries[0].scratch:
            rules[result]["scratch"] = entries[0].scratch
        for entry, symbol in zip(entries, sorted(usage), strict=True):
            if entry.maps and entry.maps != entries[0].maps:  # it would wait for other bytes
                raise RuntimeError(f"{symbol}: its tensor maps are not those of the first entry")
            more = {"elements_per_thread": entry.elements_per_thread}
            facts = {**usage[symbol], **more}
            if tuple(threads := facts.pop("threads")) != (entry.threads, 1, 1):
                raise RuntimeError(f"{symbol}: compiled for {threads} threads")
            rule = {"symbol": symbol, **entry.launch(result), "usage": facts}
            rules[result]["entries"].append(rule)
    return rules
