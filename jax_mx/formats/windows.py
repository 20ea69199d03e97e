"""Windows: the elements that share one amax when scales are computed.

A window is a number of consecutive elements along the axis that blocks run along, counted from its
start: 32, a block by itself, or 128 or 256, of which the last of an axis may be shorter; or "row",
the whole axis; or (128, 128), a tile of the last two axes, whose blocks are square. Each block has
a byte of a scale of its own; the blocks of a window have equal ones.

A recipe's product may also have "shard", the part of a row that a device holds. In a program that
XLA splits among devices each of so many equal parts of the axis has its amax, so that none crosses
devices; elsewhere, and where a part would not hold whole blocks, it is a row. It is no window of
`quantize`: the parts depend on the program. Nor is (32, 32): a kernel writes square blocks
along both axes at once, with codes and scales as readers along either axis have them.
"""

from collections.abc import Sequence

from jax_mx.formats.formats import BLOCK

Window = int | str | tuple[int, int]

ROW = "row"
SHARD = "shard"
TILE = (128, 128)
SQUARE = (BLOCK, BLOCK)
WINDOWS: tuple[Window, ...] = (BLOCK, 128, 256, ROW, TILE)


def lengths_of(window: Window) -> tuple[int, int]:
    """The part of a window that shards keep whole: rows, and elements along the block axis.

    Shards may split "row", whose amax crosses shards, and "shard", whose amax does not.
    """
    if isinstance(window, tuple):
        return window
    return 1, window if isinstance(window, int) else BLOCK


def blocks_of(window: Window) -> int:
    """How many blocks a window spans along each of its axes; 1 of "row", whose amax is data."""
    return lengths_of(window)[1] // BLOCK


def share_a_read(windows: Sequence[Window]) -> bool:
    """Whether one read of the floats quantizes both ways with these windows.

    Kernels have one window for both directions; two windows are two reads.
    """
    return len({*map(of_kernels, windows)}) <= 1


def of_kernels(window: Window) -> Window:
    """A window as kernels know it: of a row, or a shard's part of it, amaxes are data."""
    return ROW if window == SHARD else window


def in_blocks(window: Window) -> Window:
    """The window 32 in place of a row or of a shard's part of one; others stay."""
    return BLOCK if of_kernels(window) == ROW else window


def arrays_window(window: Window) -> Window:
    """The window that an array says; of square blocks that are written both ways 32."""
    return BLOCK if window == SQUARE else window


def suffix_of(window: Window) -> str:
    """The end of a variant's name."""
    if window == BLOCK:
        return ""
    lengths = window if isinstance(window, tuple) else (window,)
    return "_w" + "x".join(map(str, lengths))
