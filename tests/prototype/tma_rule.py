"""The launch rule of tma_copy.py: x (..., rows, columns) bfloat16 -> y, counters int32[2].

y has two dimensions and may have more rows and columns than x, of which x's dimensions but the last
are the rows. Needs neither CuTeDSL nor JAX.
"""

import dataclasses

import numpy as np

from jax_mx.facts.launch import (
    Entry,
    Extent,
    Factor,
    GridTerm,
    Launch,
    Length,
    MapAt,
    Padding,
    Pointer,
    Scalar,
    ScalarAt,
    Scratch,
    TensorMap,
    constant,
    multiprocessors,
)

NAME = "jax_mx_prototype_tma_copy"
ROWS, COLUMNS, STAGES, THREADS = 128, 64, 4, 256  # of a tile; tiles and threads of a thread block
BLOCK_ROWS = ROWS * STAGES
SHARED = 1024 + STAGES * ROWS * COLUMNS * 2  # bytes: barriers, then tiles

_X_ROWS, _X_COLUMNS = Extent(0, 0, -1), Extent(0, -1)
_Y_ROWS, _Y_COLUMNS = Extent(1, 0, -1), Extent(1, -1)

LAUNCH = Launch(
    entries=(
        Entry(
            symbol=f"{NAME}_0",
            align=(16, 2, 4),
            threads=(THREADS, 1, 1),
            divide=(Factor(_X_COLUMNS, 8),),
            grid=(
                GridTerm(0, Factor(_Y_ROWS, 2 * BLOCK_ROWS)),
                GridTerm(0, Factor(constant(2))),
                GridTerm(1, Factor(_Y_COLUMNS, COLUMNS)),
            ),
            shared=SHARED,
            cluster=(2, 1, 1),
            parameters=(
                MapAt(0),
                Padding(8),
                Pointer(1),
                Pointer(2),
                ScalarAt(0),
                ScalarAt(1),
                ScalarAt(2),
            ),
        ),
    ),
    scalars=(Scalar(4, _Y_ROWS), Scalar(4, _Y_COLUMNS), Scalar(4, multiprocessors())),
    maps=(
        TensorMap(
            buffer=0,
            type="bfloat16",
            dims=(Length(_X_COLUMNS), Length(_X_ROWS)),
            strides=(Length(_X_COLUMNS, times=2),),
            box=(COLUMNS, ROWS),
            swizzle=128,
            promotion=256,
        ),
    ),
    scratch=(Scratch(2, (Factor(constant(8)),), clear=True),),
)


def starting_early() -> Launch:
    """The same by programmatic dependent launch."""
    entries = tuple(dataclasses.replace(entry, early_start=True) for entry in LAUNCH.entries)
    return dataclasses.replace(LAUNCH, entries=entries)


def expected(x: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Y, of this shape, in float32."""
    y = np.zeros(shape, np.float32)
    flat = x.reshape(-1, x.shape[-1]).astype(np.float32)
    y[: len(flat), : x.shape[-1]] = flat
    return y + 1 + (np.arange(shape[0]) // BLOCK_ROWS % 2)[:, None]


def blocks(shape: tuple[int, int]) -> int:
    """How many thread blocks run for a y of this shape."""
    return 2 * -(-shape[0] // (2 * BLOCK_ROWS)) * -(-shape[1] // COLUMNS)
