"""The catalogue of shapes, by name, and the requirements that two of them carry."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

Shape = tuple[int, ...]

REQUIRED: tuple[Shape, ...] = ((8, 7168, 7168), (65536, 8192))

SHAPES: Mapping[str, tuple[Shape, ...]] = {
    "required": REQUIRED,
    # Experts' weights of current models, and the activations of a long batch.
    "llm": ((8, 5120, 5120), (8, 7168, 5120), (8, 7168, 7168), (8, 8192, 8192), (65536, 8192)),
    # Decoding: from one token on. Input and output stay in L2, so launching is what costs.
    "small": tuple((4**i, 7168) for i in range(6)),
    # No power of two, no multiple of a tile: prime rows, few long rows, few blocks in a row.
    "odd": ((4133, 2880), (33, 7168 * 32), (5, 1023, 4000), (262139, 96), (8191, 32)),
}


@dataclasses.dataclass(frozen=True)
class Requirement:
    """What a row that matches all of `where` must reach."""

    where: Mapping[str, str]
    fraction_of_copy: float
    speedup_over_xla: float


def spell(shape: Shape) -> str:
    """(8, 7168, 7168) as "8x7168x7168"."""
    return "x".join(map(str, shape))


REQUIREMENTS: tuple[Requirement, ...] = tuple(
    Requirement(
        {
            "op": "quantize",
            "form": "axis -1",
            "shape": spell(shape),
            "dtype": "bfloat16",
            "format": "mxfp8_e4m3",
            "scaling": "rceil",
            "scale_layout": "row_major",
        },
        fraction_of_copy=0.95,
        speedup_over_xla=2.3,
    )
    for shape in REQUIRED
)


def parse(text: str) -> tuple[Shape, ...]:
    """The shapes of a comma-separated list of names and AxBxC, in order, each once.

    Raises:
      ValueError: neither a name nor a shape.
    """
    found: list[Shape] = []
    for word in text.split(","):
        if word in SHAPES:
            found += SHAPES[word]
        elif re.fullmatch(r"\d+(x\d+)*", word):
            found.append(tuple(map(int, word.split("x"))))
        else:
            raise ValueError(f"shape {word!r} is neither AxBxC nor one of {', '.join(SHAPES)}")
    return tuple(dict.fromkeys(found))
