"""The catalogue: shapes and forms by name, and the requirements that some of them carry."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

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
class Form:
    """Which way blocks run, and how the results lie.

    Attributes:
      kernel: its name in `jax_mx.forms.FORMS`.
      axes: that blocks run along, one for each result.
      transpose: whether the last result has its block axis last.
    """

    kernel: str
    axes: tuple[int, ...]
    transpose: bool = False

    @property
    def op(self) -> str:
        """The function of jax_mx that computes it."""
        return "quantize" if len(self.axes) == 1 else "quantize_both"

    @property
    def options(self) -> dict[str, Any]:
        """Its keywords."""
        if self.op == "quantize":
            return {"axis": self.axes[0], "transpose": self.transpose}
        return {"transpose": (False, self.transpose)}


FORMS: Mapping[str, Form] = {
    "axis -1": Form("last", (-1,)),
    "axis -2": Form("second", (-2,)),
    "axis -2 transposed": Form("second_transposed", (-2,), transpose=True),
    "both": Form("both", (-1, -2)),
    "both transposed": Form("both_transposed", (-1, -2), transpose=True),
}


@dataclasses.dataclass(frozen=True)
class Requirement:
    """What a row that matches all of `where` must reach."""

    where: Mapping[str, str]
    fraction_of_copy: float
    speedup_over_xla: float | None = None


def spell(shape: Shape) -> str:
    """(8, 7168, 7168) as "8x7168x7168"."""
    return "x".join(map(str, shape))


def _requirements() -> Iterator[Requirement]:
    kind = {"dtype": "bfloat16", "format": "mxfp8_e4m3", "scaling": "rceil"}
    kind["scale_layout"] = "row_major"

    def where(form: str, shape: Shape) -> dict[str, str]:
        return {"op": FORMS[form].op, "form": form, "shape": spell(shape), **kind}

    for shape in REQUIRED:
        yield Requirement(where("axis -1", shape), 0.95, 2.3)
    for form, (fraction, speedup) in {
        "axis -1": (0.97, 2.5),
        "axis -2": (0.97, 1.8),
        "axis -2 transposed": (0.95, 3.5),
        "both": (0.95, 2.9),
        "both transposed": (0.95, 2.9),
    }.items():
        for shape in SHAPES["llm"]:
            first = shape == REQUIRED[0]  # the one whose speedup is asked for
            yield Requirement(where(form, shape), fraction, speedup if first else None)


REQUIREMENTS: tuple[Requirement, ...] = tuple(_requirements())


def parse(text: str) -> tuple[Shape, ...]:
    """The shapes of a comma-separated list of names and AxBxC, in order, each once.

    Raises:
      ValueError: neither a name nor a shape, or a shape without elements.
    """
    found: list[Shape] = []
    for word in text.split(","):
        if word in SHAPES:
            found += SHAPES[word]
        elif re.fullmatch(r"\d+(x\d+)*", word):
            found.append(tuple(map(int, word.split("x"))))
            if 0 in found[-1]:
                raise ValueError(f"shape {word!r} has no elements; there is nothing to measure")
        else:
            raise ValueError(f"shape {word!r} is neither AxBxC nor one of {', '.join(SHAPES)}")
    return tuple(dict.fromkeys(found))
