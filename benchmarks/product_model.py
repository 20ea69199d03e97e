"""How fast products could be on chips that are not at hand: a bound from data sheets, no more.

    python -m benchmarks product_model [--cases 'grouped*']

A product is tiles, and a core computes one after the other. A tile takes at least the longest of

* what the matrix core takes for its multiplications, by the data sheet's dense operations;
* what shared memory takes to hand operands to it, 128 bytes a clock: rows and columns of a tile
  once each, on AMD twice. Copies into shared memory come on top and are left out.

The product takes at least as many of these as the busiest core has tiles. It also takes at least
the time in which memory moves operands, scales and result once. A pass before it, of operands that
are no whole `units`, and one behind it, of such a result, come on top: "padding". All that is left
out makes a real product slower: a tile's beginning and end, waiting, clocks below the highest,
skewed groups. "of" says which of the three bounds it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from benchmarks.products import PRODUCTS, Multiplied
from benchmarks.runner import Args, Case, Row
from jax_mx.formats.formats import BLOCK, MXFP4_E2M1, MXFP8_E4M3, Format

SHARED = 128  # bytes that shared memory, or LDS, gives in a clock


class Tile(NamedTuple):
    """A tile of the result: so many rows and columns."""

    rows: int
    columns: int


@dataclasses.dataclass(frozen=True)
class Cores:
    """The speed of a chip's matrix cores, and the tile of our kernel for it.

    Attributes:
      cores: multiprocessors or compute units.
      ghz: the clock that it boosts to.
      tb_per_s: the data sheet's memory speed.
      petaflops: of each format, dense, by the data sheet.
      tile: of the kernel.
      reads: how many times shared memory gives each row and column of a tile.
      units: rows of operands, columns of the result, and bytes along K, of which the kernel takes
        whole ones; a pass puts zeros behind others.
    """

    cores: int
    ghz: float
    tb_per_s: float
    petaflops: Mapping[Format, float]
    tile: Tile
    reads: int = 1
    units: tuple[int, int, int] = (8, 32, 128)  # see products/tcgen05_kernel.py


# Without sparsity. NVIDIA's HGX page has PFLOPS of eight GPUs: FP8 72 with sparsity, which is twice
# as many; FP4 144 with sparsity on B200, 108 without on B300. AMD's data sheet of MI355X: 5.03
# in MXFP8, 10.07 in MXFP4. Cores and clocks of B200 are those that its driver reports, by XLA's
# xla/backends/gpu/target_config/specs; B300 has the same here. AMD's are by its data sheet.
CORES: Mapping[str, Cores] = {
    "B200": Cores(148, 1.965, 8.0, {MXFP8_E4M3: 4.5, MXFP4_E2M1: 9.0}, Tile(128, 256)),
    "B300": Cores(148, 1.965, 8.0, {MXFP8_E4M3: 4.5, MXFP4_E2M1: 13.5}, Tile(128, 256)),
    # Two waves of four share rows, and two share columns.
    "MI355X": Cores(
        256,
        2.4,
        8.0,
        {MXFP8_E4M3: 5.03, MXFP4_E2M1: 10.07},
        Tile(128, 128),
        reads=2,
        units=(1, 1, 1),
    ),
}


def clocks(chip: str, format: Format, tile: Tile) -> tuple[float, float]:
    """How many a tile takes for each element of K: of the matrix core, of shared memory."""
    core = CORES[chip]
    flop = core.petaflops[format] * 1e15 / core.cores / (core.ghz * 1e9)  # a core's, a clock
    read = core.reads * (tile.rows + tile.columns) * format.bits / 8 / SHARED
    return 2 * tile.rows * tile.columns / flop, read


def padding(core: Cores, format: Format, rows: int, columns: Sequence[int], sums: int) -> float:
    """Bytes that passes before and behind a product read and write.

    Args:
      core: of the chip.
      format: of both operands.
      rows: of one operand.
      columns: rows of the other operand, matrix by matrix.
      sums: the length of a row.
    """
    unit, across, depth = core.units[0], core.units[1], core.units[2] * 8 // format.bits
    is_long = sums > depth and sums % depth > 0
    lengths = [n for n in (rows, *columns) if n % unit or is_long]
    result = 2 * rows * columns[0] if rows % unit or columns[0] % across else 0
    return 2 * (sum(lengths) * sums * format.bits / 8 + result)


def bound(chip: str, case: Multiplied, format: Format) -> Row:
    """The least time of a product, and what takes it."""
    core, tile = CORES[chip], CORES[chip].tile
    sums, groups = (case.rows, case.groups or 1) if case.wgrad else (case.k, 1)
    rows, columns = (case.k if case.wgrad else case.rows), case.n
    tiles = groups * -(-rows // tile.rows) * -(-columns // tile.columns)
    depth = sums / groups  # of equal groups
    matrix, shared = clocks(chip, format, tile)
    busy = -(-tiles // core.cores) * depth / (core.ghz * 1e3)  # us for each clock of an element
    matrices = 1 if case.wgrad else case.groups or 1
    elements = rows * sums + columns * sums * matrices
    moved = elements * (format.bits / 8 + 1 / BLOCK) + 2 * rows * columns * groups
    times = {
        "matrix cores": busy * matrix,
        "shared memory": busy * shared,
        "memory": moved / core.tb_per_s / 1e6,
    }
    of = max(times, key=times.__getitem__)
    passes = padding(core, format, rows, [columns] * matrices, sums) / core.tb_per_s / 1e6
    us, flop = times[of] + passes, 2.0 * case.rows * case.k * case.n
    row = {name: round(time, 2) for name, time in (times | {"padding": passes}).items()}
    return row | {"us at least": round(us, 2), "of": of, "tflops at most": round(flop / us / 1e6)}


def cases(_: Args) -> Iterator[Case]:
    """Every product on every chip, in both formats."""
    for case in PRODUCTS:
        for chip, cores in CORES.items():
            for format in cores.petaflops:
                names = {"case": case.name, "chip": chip, "format": format.name}
                row = bound(chip, case, format)
                yield Case(case.name, f"{chip} {format.name}", names, lambda _, row=row: row)


def checks(_: Args, rows: Sequence[Row]) -> Iterator[tuple[bool, str]]:
    """Whether no bound is above what the matrix cores can do."""
    for row in rows:
        most = CORES[row["chip"]].petaflops
        peak = next(p for format, p in most.items() if format.name == row["format"])
        if row["tflops at most"] > 1000 * peak:
            yield False, f"{row['case']}: {row['chip']} would exceed its data sheet"
