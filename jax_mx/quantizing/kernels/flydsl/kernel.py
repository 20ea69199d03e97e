"""The common parts of kernels: entries, places of scales, accesses of memory, exchanges."""

import math
from collections.abc import Sequence
from functools import partial

import flydsl.expr as fx
from flydsl.expr import Int32, Int64, Uint8, Uint16, Uint32

from jax_mx.formats.formats import BLOCK
from jax_mx.formats.layouts import ScaleLayout
from jax_mx.quantizing.facts.signatures import Role
from jax_mx.quantizing.facts.variants import Variant
from jax_mx.quantizing.kernels import geometry, tuning
from jax_mx.quantizing.kernels.entry import QuantizerEntry
from jax_mx.quantizing.kernels.flydsl import convert
from jax_mx.quantizing.kernels.geometry import Extents, Place

WAVE = 64  # lanes


def pointer(base, offset, dtype, align: int):
    """Into global memory, `offset` bytes from `base`."""
    pointer_type = fx.Pointer[dtype, fx.AddressSpace.Global, max(align, dtype.width // 8)]
    return fx.recast_iter(pointer_type.ir_type, base + offset)


def shared_pointer(array, offset, dtype=Uint8, align: int = 1):
    """Into a shared array of bytes."""
    pointer_type = fx.Pointer[dtype, fx.AddressSpace.Shared, align]
    return fx.recast_iter(pointer_type.ir_type, array.ptr + offset)


def composite(make, fields: dict):
    """An fx.struct or fx.union of these fields, for shared memory."""
    return make(type("Shared", (), {"__annotations__": fields, "__module__": __name__}))


def load_words(base, offset, count: int, align: int) -> list:
    """`count` words from `offset` bytes on: at once, or in the pieces that `align` bytes allow."""
    if align >= 4 * count:
        at = pointer(base, offset, Uint32, align)
        if count == 1:
            return [fx.generic_load(at)]
        vector = fx.generic_load(at, dtype=Uint32, count=count)
    else:
        piece = {1: Uint8, 2: Uint16}.get(align, Uint32)
        at, pieces = pointer(base, offset, piece, align), 4 * count // (piece.width // 8)
        vector = fx.Vector.from_elements(
            [fx.generic_load(at + Int32(i)) for i in range(pieces)], piece
        ).bitcast(Uint32)  # which never widens: FlyDSL extends the sign of unsigned loads
    return [vector[i] for i in range(count)]


def load_byte(at) -> Uint32:
    """The byte at a pointer."""  # FlyDSL extends the sign of unsigned loads
    zero = Uint8(0)
    bytes_ = fx.Vector.from_elements([fx.generic_load(at), zero, zero, zero], Uint8)
    return bytes_.bitcast(Uint32)[0]


def load_bytes(base, offsets: list) -> list:
    """Words of the bytes at these offsets, four each."""
    codes = [fx.generic_load(base + offset) for offset in offsets]
    vector = fx.Vector.from_elements(codes, Uint8).bitcast(Uint32)
    return [vector[i] for i in range(len(offsets) // 4)]


def store_words(base, offset, words: list, align: int) -> None:
    """The inverse of `load_words`; at once, or by bytes."""
    vector = fx.Vector.from_elements(words, Uint32)
    if align >= 4 * len(words):
        fx.generic_store(pointer(base, offset, Uint32, align), vector)
    else:
        at, codes = pointer(base, offset, Uint8, 1), vector.bitcast(Uint8)
        for i in range(4 * len(words)):
            fx.generic_store(at + Int32(i), codes[i])


def as_int64(number) -> Int64:
    """An unsigned 32-bit number in 64 bits."""
    return Int64(fx.Uint64(number))


def round_up(number, multiple: int) -> Uint32:
    """Rounds up to a multiple of a power of two."""
    return (Uint32(number) + Uint32(multiple - 1)) & Uint32(-multiple & 0xFFFFFFFF)


# ---- scales ---
def tiles_of(layout: ScaleLayout, size: Extents) -> tuple:
    """The numbers of `geometry.tiles_of`, rounded up by a mask: that is other code."""
    return tuple(
        round_up(n, pad) // Uint32(tile)
        for n, pad, tile in zip(size, layout.pad, layout.tile, strict=True)
    )


def offset_in_tiles(layout: ScaleLayout, place: Place, size: Extents) -> Int64:
    """Where the scale of a place in a batch of matrices lies."""
    height, width = layout.tile
    tile = geometry.tile_of(layout, place, tiles_of(layout, size), as_int64)
    offset = tile * (height * width)
    in_tile = geometry.offset_in_tile(layout, place.row % height, place.col % width, Uint32)
    return offset + as_int64(in_tile)


def offset_of_values(row, byte, width) -> Int64:
    """Where the 16 bytes from `byte` of a row on lie in SHUFFLED_16X16; a row has `width` bytes."""
    top, number = geometry.in_tiles_of_values(row, byte, Uint32)
    return as_int64(top) * as_int64(width) + as_int64(number) * 16


class Strip:
    """The blocks of a workgroup of `Flat`, consecutive scales with the padding; all of one tile.

    Attributes:
      block: from which on the workgroup's blocks are counted.
      offset: from which on its scales' bytes are; both the same for all lanes.
    """

    def __init__(self, layout: ScaleLayout, blocks: int, sizes: tuple):
        """`sizes`: how many scales there are and, of tiles, rows and cols of a slab's matrix."""
        self.layout, places = layout, sizes[0]
        first = Int64(Int32(fx.block_idx.x)) * blocks
        self.block, self.offset = first, first
        if not layout.is_tiled:
            left = places - first
            self.count = (left < Int64(blocks)).select(Int32(left), Int32(blocks))
            return
        self.rows, self.cols = (Uint32(n) for n in sizes[1:])
        (height, width), size = layout.tile, math.prod(layout.tile)
        tiles_r, tiles_c = tiles_of(layout, Extents(self.rows, self.cols))
        # 32 bits: a GPU's memory does not hold the elements of more tiles.
        tile = Uint32(first // size)
        self.start = Uint32(first % size)  # in the tile
        down, tile_c = tile // tiles_c, tile % tiles_c
        slab, tile_r = down // tiles_r, down % tiles_r
        self.top, self.left = tile_r * Uint32(height), tile_c * Uint32(width)
        block = as_int64(slab) * as_int64(self.rows) + as_int64(self.top)
        block = block * as_int64(self.cols) + as_int64(self.left)
        exists = (self.top < self.rows) & (self.left < self.cols)
        self.block = exists.select(block, Int64(0))
        self.offset = as_int64(tile) * size

    def at(self, place):
        """(block, offset, whether there is such a block) of a lane's place in the strip.

        Lanes go through a tile row by row, the rows as they follow in memory. A place without a
        block gives the block and the offset of block 0.
        """
        return self.next_to(*self.find(place), 0)

    def find(self, position) -> tuple:
        """The row and the column in its tile of a lane's place; without tiles, the column is it."""
        if not self.layout.is_tiled:
            return Uint32(0), position
        layout, width = self.layout, self.layout.tile[1]
        position = self.start + position
        col, rest = position % Uint32(width), position // Uint32(width)
        digits = range(len(layout.row_digits))
        in_order = [i for i in layout.order if i in digits]
        digits_in_order = geometry.digits_of(rest, [layout.row_digits[i] for i in in_order], Uint32)
        in_place = [digits_in_order[in_order.index(i)] for i in digits]
        return geometry.number_of(in_place, layout.row_digits, Uint32), col

    def next_to(self, row, col, number) -> tuple:
        """Gives what `at` gives, for the block `number` columns on in the same row."""
        if not self.layout.is_tiled:
            inside = col + number < Uint32(self.count)
            index = inside.select(col + number, Uint32(0))
            return as_int64(index), index, inside
        inside = (self.top + row < self.rows) & (self.left + col + number < self.cols)
        block = as_int64(row) * as_int64(self.cols) + as_int64(col) + as_int64(Uint32(number))
        offset = geometry.offset_in_tile(self.layout, row, col + number, Uint32)
        return inside.select(block, Int64(0)), offset, inside


class Patches:
    """The blocks of a workgroup of `Flat`: `COLS` of each of some rows, so that windows are whole.

    Attributes:
      block: from which on the workgroup's blocks are counted; the same for all lanes.
    """

    COLS = 8

    def __init__(self, layout: ScaleLayout, blocks: int, sizes: tuple, region: Extents):
        """`sizes`: how many rows there are, and blocks in each; `region`: see `region_of`."""
        self.layout, high = layout, blocks // self.COLS
        self.rows, self.cols = (Uint32(n) for n in sizes)
        bid, wide = Uint32(Int32(fx.block_idx.x)), region.cols // BLOCK
        down = round_up(self.rows, region.rows) // Uint32(high)
        across = round_up(self.cols, wide) // Uint32(self.COLS)
        per_slab = down * across
        self.batch, rest = bid // per_slab, bid % per_slab
        self.top, self.left = rest // across * Uint32(high), rest % across * Uint32(self.COLS)
        block = as_int64(self.batch) * as_int64(self.rows) + as_int64(self.top)
        block = block * as_int64(self.cols) + as_int64(self.left)
        self.block = ((self.top < self.rows) & (self.left < self.cols)).select(block, Int64(0))

    def at(self, place):
        """As `Strip.at`; but the offset is the scale's own."""
        row, col = place // Uint32(self.COLS), place % Uint32(self.COLS)
        here = self.top + row, self.left + col
        inside = (here[0] < self.rows) & (here[1] < self.cols)
        block = as_int64(row) * as_int64(self.cols) + as_int64(col)
        block = inside.select(block, Int64(0))
        offset = self.block + block
        if self.layout.is_tiled:
            size = Extents(self.rows, self.cols)
            offset = offset_in_tiles(self.layout, Place(self.batch, *here), size)
        return block, offset, inside

    def exists(self, place):
        """Whether there is a scale, or padding, in memory for a place."""
        row, col = place // Uint32(self.COLS), place % Uint32(self.COLS)
        rows, cols = (
            round_up(n, pad) for n, pad in zip((self.rows, self.cols), self.layout.pad, strict=True)
        )
        return (self.top + row < rows) & (self.left + col < cols)


# ---- lanes ---
def largest(words: list, dtype: str):
    """The larger magnitudes of words."""
    word = words[0]
    for other in words[1:]:
        word = convert.larger(word, other, dtype)
    return word


def exchange(parts: list[list], lane, halves: bool = False) -> list:
    """Gives lane i the i-th part of each of its neighbours, the first neighbour's first.

    There are as many neighbours as parts, or twice as many where the `halves` of words are parts.
    """
    distance = 1
    if halves:
        odd = lane % Uint32(2) == Uint32(1)
        # Bytes of (theirs, mine): the lower half of either, or the upper.
        select = odd.select(Uint32(0x03020706), Uint32(0x05040100))
        parts = [
            [convert.bytes_by(select, convert.from_lane(word, convert.EXCHANGE[1]), word)]
            for (word,) in parts
        ]
        distance = 2
    for bit in (1, 2)[: len(parts).bit_length() - 1]:
        upper = lane // Uint32(bit * distance) % Uint32(2) == Uint32(1)
        other = partial(convert.from_neighbour, distance=bit * distance)
        for low in (i for i in range(len(parts)) if not i & bit):
            pairs = [*zip(parts[low], parts[low | bit], strict=True)]
            parts[low] = [upper.select(other(b), a) for a, b in pairs]
            parts[low | bit] = [upper.select(b, other(a)) for a, b in pairs]
    return [word for part in parts for word in part]


def shared_by_four(parts: Sequence[list], lane) -> list[list]:
    """Gives each of four neighbours two of their parts: its number's, and the one 4 further on."""
    odd, parts_of_lane = lane % 2 == Uint32(1), []
    for control in (0x50, 0xFA):  # the lanes (0, 0, 1, 1), and (2, 2, 3, 3)
        low, high = ([convert.from_lane(word, control) for word in part] for part in parts)
        parts_of_lane.append([odd.select(b, a) for a, b in zip(low, high, strict=True)])
    return parts_of_lane


def share_in_wave() -> None:
    """Lets lanes read what other lanes of their wave wrote to LDS before.

    This tells the compiler alone: LDS serves a wave in order.
    """
    fx.memory_fence(syncscope="wavefront", ordering=fx.AtomicOrdering.AcqRel)


def halved(words: list, upper, other, dtype: str) -> list:
    """The larger magnitudes of this lane's half of `words`, and of its partner's of the same half.

    Args:
      words: of both halves.
      upper: whether this lane keeps the upper half; its partner keeps the other.
      other: gives the partner's word.
      dtype: of the magnitudes.
    """
    half = len(words) // 2
    kept = []
    for low, high in zip(words[:half], words[half:], strict=True):
        mine, theirs = upper.select(high, low), upper.select(low, high)
        kept.append(convert.larger(mine, other(theirs), dtype))
    return kept


def halved_among(magnitudes: list, group: int, dtype: str) -> list:
    """Words of magnitudes shared out among a group of neighbours: lane i gets the i-th part."""
    lane = convert.lane_id()
    for bit in (4, 2, 1)[-(group.bit_length() - 1) :]:
        upper = (lane & Uint32(bit)) != Uint32(0)
        control = convert.EXCHANGE[bit]
        magnitudes = halved(magnitudes, upper, lambda w, c=control: convert.from_lane(w, c), dtype)
    return magnitudes


class Kernel(QuantizerEntry):
    """An entry for an arch; subclasses have the `kernel`."""

    def __init__(self, variant: Variant, arch: str, layout: ScaleLayout, aligned: bool):
        super().__init__(variant, layout, aligned)
        self.arch = arch

    def aligned_to(self, name: str) -> int:
        """The number of bytes that divides the address of one of its arrays."""
        return self.align[self.signature.number(name)]

    def aligned_as(self, role: Role) -> int:
        """The same of all its arrays of a role."""
        return next(self.align_of(array) for array in self.signature.arrays if array.role is role)

    def tuned(self, kernel: str) -> dict:
        """The tile that this arch's table has for a kernel."""
        variant = self.variant
        where = (self.arch, variant, self.layout, self.aligned)
        return tuning.choose(f"{variant.op}.{kernel}", *where)
