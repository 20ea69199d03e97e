"""The common parts of kernels: entries, where scales lie, rows that lie anywhere."""

import dataclasses

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint32, const_expr, cute, range_constexpr

from jax_mx.formats.formats import BLOCK, FLOAT_DTYPES, Format
from jax_mx.formats.layouts import ScaleLayout
from jax_mx.launch import cutedsl as launched
from jax_mx.quantizing.facts.signatures import Array, Role
from jax_mx.quantizing.facts.variants import Variant
from jax_mx.quantizing.kernels import geometry, tuning
from jax_mx.quantizing.kernels.cutedsl import convert
from jax_mx.quantizing.kernels.entry import QuantizerEntry
from jax_mx.quantizing.kernels.geometry import Extents, Place

PAD = 8  # bytes between rows in shared memory: room for words that straddle, and other banks


class Kernel(QuantizerEntry, launched.Kernel):
    """An entry for an arch; subclasses have the `kernel`."""

    def __init__(self, variant: Variant, arch: str, layout: ScaleLayout, aligned: bool):
        super().__init__(variant, layout, aligned)
        self.arch = arch
        self.per_byte = variant.formats[0].codes_per_byte  # where formats differ, see `Output`
        self.kept = aligned and self.tuned("keep")  # what `load` and `store` call kept

    def tuned(self, kernel: str):
        """The value of this arch's table for the entry: a kernel's tile, or another decision."""
        variant = self.variant
        where = (self.arch, variant, self.layout, self.aligned)
        return tuning.choose(f"{variant.op}.{kernel}", *where)

    @property
    def types(self):
        """The types behind its pointers."""
        return [self.element_of(array) for array in self.signature.arrays]

    def element_of(self, array: Array):
        """The type that the kernel's pointer to an array has."""
        if array.dtype:
            types = {"int32": Int32, "uint32": Uint32, "float32": Float32, "uint8": Uint8}
            return types[array.dtype]
        floats = convert.INPUT[self.dtype]
        types = {Role.FLOATS: floats, Role.SOURCE: floats, Role.BLOCK_DATA: Uint32}
        return types.get(array.role, Uint8)

    def scale_of(self, amax, format: Format, rule, dtype: str = ""):
        """`convert.scale_of`, with the scale of zeros where the entry has it as a scalar."""
        add, exception, *zero = (Uint32(number) for number in rule)
        dtype = dtype or self.dtype
        scale, inverse = convert.scale_of(amax, format.emax, dtype, add, exception)
        if zero:
            scale = select(amax == Uint32(0), zero[0], scale)
        return scale, inverse

    def conversion(self, format: Format) -> convert.Conversion:
        """Between this entry's floats and codes of a format."""
        return convert.Conversion(self.dtype, format, self.arch)

    def scaled_pair(self, words: list, inverses: Uint32, format: Format):
        """`convert.scaled_pair`, for this entry's floats."""
        return convert.scaled_pair(words, inverses, self.conversion(format))


@cute.jit
def numbers_of(rows, first, inside, n: cutlass.Constexpr, align: cutlass.Constexpr):
    """The numbers of n rows, from the one numbered `first` on; -1 where they are not `inside`.

    Their address is a multiple of `align` bytes.
    """
    rI = cute.make_rmem_tensor(n, Int32)
    rI.fill(Int32(-1))
    if inside:
        cute.autovec_copy(vector_at(rows + first, Int32, align, n), rI)
    return rI


def select(condition, a, b):
    """a if the condition holds, else b."""
    return Uint32(cutlass.select_(condition, a, b))


def vector_at(pointer, dtype, align: int, n: int):
    """The n elements at a pointer to global memory, as what that is known to be."""
    known = cute.make_ptr(dtype, pointer.toint(), cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(known, cute.make_layout(n))


def words_of(rX, pair: int, dtype: str) -> list:
    """Elements 2 * pair and 2 * pair + 1 of a fragment: a word of 16 bits each, or two words."""
    rW = cute.recast_tensor(rX, Uint32)
    words_per_pair = FLOAT_DTYPES[dtype].itemsize // 2
    return [rW[words_per_pair * pair + i] for i in range(words_per_pair)]


def fragment(words: list, dtype: str):
    """Words as a fragment of their elements, floats or "bytes"."""
    rW = cute.make_rmem_tensor(len(words), Uint32)
    for i, word in enumerate(words):
        rW[i] = word
    return cute.recast_tensor(rW, Uint8 if dtype == "bytes" else convert.INPUT[dtype])


def bytes_of(words: list, count: int):
    """A fragment of the first `count` bytes of these words."""
    rV = cute.make_rmem_tensor(4 * len(words), Uint8)
    rW = cute.recast_tensor(rV, Uint32)
    for i, word in enumerate(words):
        rW[i] = word
    return rV if count == 4 * len(words) else cute.make_tensor(rV.iterator, cute.make_layout(count))


def by_vector(pointer, rows, cols, n: int):
    """An array (rows, cols) as (rows, cols // n, n); the stride shows that n divides it."""
    vectors = cols // n
    return cute.make_tensor(
        pointer, cute.make_layout((rows, vectors, n), stride=(Int64(vectors) * n, n, 1))
    )


# ---- memory ---
_KEPT = "{ .reg .b64 kept; createpolicy.fractional.L2::evict_last.b64 kept, 1.0; "


def load(source, target, kept: bool, ahead: bool = False) -> None:
    """From global memory to registers, by vectors.

    Data that are `kept` leave the L2 cache last. Other data that are `ahead` bring the 256 bytes
    around them there, which other threads will want. Both are whole words, aligned as their vectors
    are; the rest is aligned as a fragment's elements are.
    """
    if not (kept or ahead):
        cute.autovec_copy(source, target)
        return
    registers, address = cute.recast_tensor(target, Uint32), source.iterator.toint()
    for first, count in _vectors(cute.size(registers)):
        for i, word in enumerate(_load_words(address + 4 * first, count, kept)):
            registers[first + i] = word


def load_row(source, target, row, rows, kept: bool) -> None:
    """As `load`, where x has this row of its `rows`, else zeros; without a branch.

    H200, (16384, 7168), 2026-11-23: both_transposed of rows takes 8 branches a thread otherwise.
    """
    registers, address = cute.recast_tensor(target, Uint32), source.iterator.toint()
    for first, count in _vectors(cute.size(registers)):
        loaded = _load_words_of_row(address + 4 * first, row, rows, count, kept)
        for i, word in enumerate(loaded):
            registers[first + i] = word


def store(source, target, kept: bool) -> None:
    """From registers to global memory, as `load`; also one byte, or two."""
    if not kept:
        cute.autovec_copy(source, target)
        return
    address = target.iterator.toint()
    if source.element_type is Uint8 and cute.size(source) < 4:
        word = Uint32(source[0])
        if cute.size(source) == 2:
            word = word | Uint32(source[1]) << Uint32(8)
        _store_kept(address, [word], 8 * cute.size(source))
        return
    registers = cute.recast_tensor(source, Uint32)
    for first, count in _vectors(cute.size(registers)):
        _store_kept(address + 4 * first, [registers[first + i] for i in range(count)])


def _vectors(words: int) -> list[tuple[int, int]]:
    """(first, count) of words that an instruction takes: 1, 2 or 4."""
    assert words in (1, 2) or words % 4 == 0
    return [(first, min(4, words)) for first in range(0, words, 4)]


def _list(names: list[str]) -> tuple[str, str]:
    """PTX's suffix and operand of a vector of registers."""
    return (f".v{len(names)}", f"{{{', '.join(names)}}}") if len(names) > 1 else ("", names[0])


def _load_words(address: Int64, count: int, kept: bool) -> list:
    """Either kept or ahead."""
    vector, names = _list([f"{{$w{i}}}" for i in range(count)])
    begin, modifier, end = (_KEPT, "cache_hint", ", kept") if kept else ("{", "256B", "")
    code = f"{begin} ld.global.L2::{modifier}{vector}.b32 {names}, [{{$r0}}]{end}; }}"
    loaded = convert.ptx(code, [Uint32] * count, address)
    return [*loaded] if count > 1 else [loaded]


def _load_words_of_row(address: Int64, row: Int32, rows: Int32, count: int, kept: bool) -> list:
    registers = [f"{{$w{i}}}" for i in range(count)]
    vector, names = _list(registers)
    begin, modifier, end = (_KEPT, ".L2::cache_hint", ", kept") if kept else ("{ ", "", "")
    zeros = " ".join(f"mov.b32 {name}, 0;" for name in registers)
    code = (
        f"{begin} .reg .pred there; setp.lt.u32 there, {{$r1}}, {{$r2}}; {zeros} "
        f"@there ld.global{modifier}{vector}.b32 {names}, [{{$r0}}]{end}; }}"
    )
    loaded = convert.ptx(code, [Uint32] * count, address, row, rows)
    return [*loaded] if count > 1 else [loaded]


def _store_kept(address: Int64, words: list, bits: int = 32) -> None:
    vector, names = _list([f"{{$r{1 + i}}}" for i in range(len(words))])
    code = f"{_KEPT} st.global.L2::cache_hint{vector}.b{bits} [{{$r0}}], {names}, kept; }}"
    convert.ptx(code, None, address, *words)


def mapped(address: Int32, rank: Int32) -> Int32:
    """Where an address of shared memory is in the cluster's thread block of this rank."""
    code = "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};"
    return convert.ptx(code, Int32, Int32(address), Int32(rank))


def two_of_block(address: Int32, dtype=Float32) -> list:
    """Two floats, or words, at an address that `mapped` gives."""
    ptx_type = "f32" if dtype is Float32 else "b32"
    code = f"ld.shared::cluster.v2.{ptx_type} {{{{$w0}}, {{$w1}}}}, [{{$r0}}];"
    return list(convert.ptx(code, [dtype] * 2, Int32(address)))


def largest(a: Uint32) -> Uint32:
    """The largest of all lanes' words."""
    return convert.ptx("redux.sync.max.u32 {$w0}, {$r0}, 0xffffffff;", Uint32, a)


# ---- scales ---
@dataclasses.dataclass(frozen=True)
class Strip:
    """The consecutive elements that a thread block of `Flat` covers."""

    threads: int
    elements: int  # of one block, per thread and step
    unroll: int  # steps

    @property
    def blocks(self) -> int:
        """MX blocks per thread block."""
        return self.threads * self.elements * self.unroll // BLOCK


@cute.jit
def locate(
    layout: cutlass.Constexpr, first: Int64, place: Int32, places: Int64, rows: Int32, cols: Int32
):
    """The scale's byte first + place: the block it is of, its offset, whether there is one.

    A thread block's scales lie in one tile, so that what divides is the same for all of it.
    """
    offset = first + place
    block, inside = offset, offset < places
    if const_expr(layout.is_tiled):
        tile_rows: cutlass.Constexpr = layout.tile[0]
        tile_cols: cutlass.Constexpr = layout.tile[1]
        tiles = geometry.tiles_of(layout, geometry.Extents(rows, cols))
        tiles_r, tiles_c = (Uint32(n) for n in tiles)
        # 32 bits: a GPU's memory does not hold the elements of more tiles.
        tile = Uint32(first // (tile_rows * tile_cols))
        in_tile = Int32(first % (tile_rows * tile_cols)) + place
        down, tile_c = tile // tiles_c, tile % tiles_c
        slab, tile_r = down // tiles_r, down % tiles_r
        row, col = geometry.place_in_tile(layout, in_tile)
        row = row + Int32(tile_r) * tile_rows
        col = col + Int32(tile_c) * tile_cols
        inside = inside & (row < rows) & (col < cols)
        block = (Int64(slab) * rows + row) * cols + col
    return block, offset, inside


def offset_in_tiles(layout: ScaleLayout, place: Place, size: Extents):
    """Where the scale of a place in a batch of matrices lies, and whether it lies in a tile."""
    height, width = layout.tile
    down, across = tiles = geometry.tiles_of(layout, size)
    row, col = place.row, place.col
    tile = geometry.tile_of(layout, place, tiles, Int64)
    offset = tile * (width * height)
    offset = offset + geometry.offset_in_tile(layout, row % height, col % width)
    return offset, (row < down * height) & (col < across * width)


# ---- tiles ---
@cute.jit
def load_anywhere(address: Int64, size: cutlass.Constexpr):
    """The words of `size` bytes at any address, from the two aligned vectors around them."""
    words_per_vector: cutlass.Constexpr = size // 4
    base = cute.make_ptr(Uint32, address & ~(size - 1), cute.AddressSpace.gmem, assumed_align=size)
    mW = cute.make_tensor(base, cute.make_layout((words_per_vector, 2)))
    around = cute.make_rmem_tensor((words_per_vector, 2), Uint32)
    for v in range_constexpr(2):
        cute.autovec_copy(mW[None, v], around[None, v])
    return convert.shifted([around[w] for w in range(2 * words_per_vector)], Uint32(address))


@cute.jit
def place_of(bid: Int32, tiles_r: Int32, tiles_c: Int32, band: cutlass.Constexpr):
    """(batch, row, column) of a thread block's tile: bands of `band` rows, column by column."""
    tiles_r, tiles_c = Uint32(tiles_r), Uint32(tiles_c)
    batch = Uint32(bid) // (tiles_r * tiles_c)
    rest = Uint32(bid) - batch * (tiles_r * tiles_c)
    number = rest // (band * tiles_c)
    height = Uint32(1)
    if const_expr(band > 1):  # the last band may be lower
        height = Uint32(cutlass.min(Int32(tiles_r - number * band), Int32(band)))
    rest = rest - number * (band * tiles_c)
    tile_c = rest // height
    return Int32(batch), Int32(number * band + rest - tile_c * height), Int32(tile_c)


@cute.jit
def store_rows(
    sV, start: Int64, stride: Int64, rows: Int32, count: Int32, shape: cutlass.Constexpr,
    warps: cutlass.Constexpr,
):  # fmt: skip
    """Rows of bytes from shared memory to anywhere: a warp a row, in whole words of memory.

    The bytes of a row that share a word with another thread block's are written one by one.

    Args:
      sV: the tile's rows, with `PAD` bytes before each and behind the last.
      start: address of the first row.
      stride: bytes from row to row.
      rows: how many there are.
      count: how many of a row's bytes there are.
      shape: how many rows the tile has, which `warps` divides, and bytes a row, which 128 divides.
      warps: how many the thread block has.
    """
    height: cutlass.Constexpr = shape[0]
    width: cutlass.Constexpr = shape[1]
    tid, _, _ = cute.arch.thread_idx()
    lane, warp = tid % 32, tid // 32
    pitch: cutlass.Constexpr = width + PAD
    bytes_ = cute.make_tensor(sV, cute.make_layout(height * pitch + PAD))
    staged = cute.recast_tensor(bytes_, Uint32)
    for step in range_constexpr(height // warps):
        row = step * warps + warp
        if row < rows:
            address = start + Int64(row) * stride
            ahead = Int32(Uint32(address) & 3)  # bytes of the word that the row begins in
            head = -ahead & 3
            to_words = cute.make_ptr(
                Uint32, address - ahead, cute.AddressSpace.gmem, assumed_align=4
            )
            mW = cute.make_tensor(to_words, cute.make_layout(width // 4))
            for part in range_constexpr(width // 128):
                word = 32 * part + lane
                first = 4 * word - ahead
                if (first >= 0) & (first + 4 <= count):
                    index = (PAD + row * pitch + first) >> 2
                    both = staged[index], staged[index + 1]
                    mW[word] = convert.funnel(*both, Uint32(head * 8))
            # The bytes before the first whole word, and behind the last, at once.
            edge = lane
            if lane >= 4:
                edge = cutlass.max((count + ahead & ~3) - ahead, head) + lane - 4
            if ((lane < head) | ((lane >= 4) & (lane < 8))) & (edge < count):
                to_bytes = cute.make_ptr(Uint8, address, cute.AddressSpace.gmem)
                mV = cute.make_tensor(to_bytes, cute.make_layout(width))
                mV[edge] = bytes_[PAD + row * pitch + edge]
