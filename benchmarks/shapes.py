"""The catalogue: shapes and forms by name, and the requirements that some of them carry."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jax_mx.formats import directions
from jax_mx.formats.formats import BLOCK
from jax_mx.norms.source import NormSource
from jax_mx.quantizing.facts.modes import Mode
from jax_mx.quantizing.facts.sources import Source
from jax_mx.quantizing.sources.gated import ACTIVE, GatedSource
from jax_mx.quantizing.sources.gated_gradient import GradientSource
from jax_mx.quantizing.sources.rows import RowsSource

Shape = tuple[int, ...]

REQUIRED: tuple[Shape, ...] = ((8, 7168, 7168), (65536, 8192))
# Memory-bound, but no multiples of a tile; where 8 does not divide the last axis, rows are not
# aligned either.
UNEVEN: tuple[Shape, ...] = ((8, 4128, 2880), (8, 4128, 2881))

SHAPES: Mapping[str, tuple[Shape, ...]] = {
    "required": REQUIRED,
    # Experts' weights of current models, and the activations of a long batch.
    "llm": ((8, 5120, 5120), (8, 7168, 5120), (8, 7168, 7168), (8, 8192, 8192), (65536, 8192)),
    # Decoding: from one token on. Input and output stay in L2, so launching is what costs.
    "small": tuple((4**i, 7168) for i in range(6)),
    # No power of two, no multiple of a tile: prime rows, few long rows, few blocks in a row.
    "odd": (*UNEVEN, (4133, 2880), (33, 7168 * 32), (5, 1023, 4000), (262139, 96), (8191, 32)),
}


@dataclasses.dataclass(frozen=True)
class Form:
    """An op, which way its blocks run and how its arrays lie.

    Attributes:
      op: the function of jax_mx that computes it.
      kernel: the form of its kernels.
      axes: that blocks run along, one for each quantized array.
      transpose: of the op; of the last result, where there are two.
      square: whether blocks span both of the last two axes instead.
    """

    op: str
    kernel: directions.Form
    axes: tuple[int, ...] = (-1,)
    transpose: bool = False
    square: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The op's keywords."""
        if self.op == "quantize_both":
            return {"transpose": (False, self.transpose)}
        return {"transpose": self.transpose, **(self.made_by if self.op == "quantize" else {})}

    @property
    def made_by(self) -> dict[str, Any]:
        """The keywords of the `quantize` that makes the first quantized array."""
        return {"block": (BLOCK, BLOCK)} if self.square else {"axis": self.axes[0]}

    def fits(self, shape: Shape) -> bool:
        """Whether an array of this shape has whole blocks."""
        axes = (-2, -1) if self.square else self.axes
        return len(shape) >= -min(axes) and all(shape[axis] % BLOCK == 0 for axis in axes)


FORMS: Mapping[str, Form] = {
    "axis -1": Form("quantize", directions.LAST),
    "axis -2": Form("quantize", directions.SECOND, (-2,)),
    "axis -2 transposed": Form("quantize", directions.SECOND_TRANSPOSED, (-2,), transpose=True),
    "square": Form("quantize", directions.SQUARE, square=True),
    "square transposed": Form(
        "quantize", directions.SQUARE_TRANSPOSED, transpose=True, square=True
    ),
    "both": Form("quantize_both", directions.BOTH, (-1, -2)),
    "both transposed": Form("quantize_both", directions.BOTH_TRANSPOSED, (-1, -2), transpose=True),
    "dequantize": Form("dequantize", directions.LAST),
    "dequantize axis -2": Form("dequantize", directions.SECOND, (-2,)),
    "dequantize transposed": Form("dequantize", directions.SECOND_TRANSPOSED, transpose=True),
}


# Preprocessing by name: one entry for both directions, or one each for the last axis and the axis
# before. Transforms have signs, known when the program is traced. Random rounding takes a word per
# block, which counts as moved once; making the words takes a part of the time.
PREPROCESSING: Mapping[str, tuple[Mode, ...]] = {
    "none": (),
    "h16": (Mode(16),),
    "h32": (Mode(32),),
    "h64": (Mode(64),),
    "sr": (Mode(stochastic=True),),
    "h16_sr": (Mode(16, stochastic=True),),
    "rn_h16": (Mode(), Mode(16)),
    "sr_h16_sr": (Mode(stochastic=True), Mode(16, stochastic=True)),
}


# The sources of a call's floats, by name: rows, picked by numbers, an activation or a norm.
_WAYS = tuple(itertools.product(ACTIVE, (False, True)))
SOURCES: Mapping[str, Source] = {
    str(source): source
    for source in (
        RowsSource(),
        *(source(*way, more) for source in (GatedSource, GradientSource) for more in (False, True)
          for way in _WAYS),
        *(NormSource(floats=floats) for floats in (False, True)),
    )
}  # fmt: skip


def named(form: str, preprocessing: str, source: str = "") -> str:
    """A form's name in a row; of calls that make their floats another one."""
    return form + f", {preprocessing}" * (preprocessing != "none") + f", {source}" * (source != "")


def form_of(op: str, kernel: directions.Form) -> str | None:
    """The name of the form that a variant's op and form compute, if it has one here."""
    for name, form in FORMS.items():
        if (form.op.removesuffix("_both"), form.kernel) == (op, kernel):
            return name
    return None


@dataclasses.dataclass(frozen=True)
class Requirement:
    """The speed that a row must reach if it matches all of `where`.

    Attributes:
      where: of a row's names.
      fraction_of_copy: at least; of a copy of as many bytes.
      speedup_over_xla: at least.
      fraction_of_row_major: at least; of the speed with row-major scales.
    """

    where: Mapping[str, str]
    fraction_of_copy: float | None = None
    speedup_over_xla: float | None = None
    fraction_of_row_major: float | None = None


def spell(shape: Shape) -> str:
    """(8, 7168, 7168) as "8x7168x7168"."""
    return "x".join(map(str, shape))


# The wanted share of a copy's speed at each shape of "llm", and the factor over XLA at the first.
_WANTED = {
    "axis -1": (0.97, 2.5),
    "axis -2": (0.97, 1.8),
    "axis -2 transposed": (0.95, 3.5),
    "both": (0.95, 2.9),
    "both transposed": (0.95, 2.9),
    "dequantize": (0.97, None),
    "dequantize axis -2": (0.97, None),
    "dequantize transposed": (0.97, None),
}


# Tokens on the way to experts, and arrays between an MLP's products: the wanted share of a copy's
# speed, and the factor over XLA's floats and our kernel, by form.
TOKENS = (16384, 7168)
_WANTED_OF_SOURCES = {
    ("axis -1", "rows", TOKENS): (0.9, 1.5),
    ("both transposed", "rows", TOKENS): (0.9, 1.5),
    ("axis -1", "swiglu", (16384, 4096)): (0.93, 1.7),
    ("both transposed", "swiglu", (16384, 4096)): (0.88, 1.7),
    ("axis -1", "swiglu", (16384, 14336)): (0.93, 1.7),
    ("both transposed", "swiglu", (16384, 14336)): (0.88, 1.7),
    ("axis -1", "rms_norm", TOKENS): (0.9, 1.7),
    ("both transposed", "rms_norm", TOKENS): (0.8, 1.7),
    ("axis -1", "rms_norm", (65536, 7168)): (0.9, 1.7),
    ("both transposed", "rms_norm", (65536, 7168)): (0.8, 1.7),
    ("both transposed", "swiglu_gradient", (16384, 4096)): (0.85, 1.7),
    ("both transposed", "swiglu_gradient", (16384, 14336)): (0.85, 1.7),
}

# The wanted share of a copy's speed, by form and preprocessing.
_WANTED_OF_MXFP4 = {
    ("axis -1", "none"): 0.95,
    ("both", "none"): 0.92,
    ("both transposed", "none"): 0.92,
    ("axis -1", "h16"): 0.85,
    ("axis -1", "sr"): 0.8,
}


def _requirements() -> Iterator[Requirement]:
    def where(
        name: str,
        shape: Shape,
        layout: str = "row_major",
        format: str = "mxfp8_e4m3",
        preprocessing: str = "none",
        source: str = "",
    ) -> dict[str, str]:
        row = {"dtype": "bfloat16", "format": format, "scaling": "rceil", "scale_layout": layout}
        form = named(name, preprocessing, source)
        return {"op": FORMS[name].op, "form": form, "shape": spell(shape), **row}

    for shape in REQUIRED:
        yield Requirement(where("axis -1", shape), 0.95, 2.3)
    for name, (fraction, speedup) in _WANTED.items():
        for shape in SHAPES["llm"]:
            first = shape == REQUIRED[0]
            yield Requirement(where(name, shape), fraction, speedup if first else None)
            blocked = where(name, shape, "blocked_128x4")
            yield Requirement(blocked, fraction_of_row_major=0.98)
    for name, form in FORMS.items():
        for shape in filter(form.fits, UNEVEN):
            yield Requirement(where(name, shape), 0.8)
        for shape in filter(form.fits, SHAPES["small"]):
            yield Requirement(where(name, shape), speedup_over_xla=1.0)
    yield from (
        Requirement(where(name, shape, source=source), *least)
        for (name, source, shape), least in _WANTED_OF_SOURCES.items()
    )
    for (name, preprocessing), fraction in _WANTED_OF_MXFP4.items():
        for layout in ("row_major", "blocked_128x4"):
            case = where(name, REQUIRED[0], layout, "mxfp4_e2m1", preprocessing)
            yield Requirement(case, fraction)


REQUIREMENTS: tuple[Requirement, ...] = tuple(_requirements())


def parse(text: str) -> tuple[Shape, ...]:
    """The shapes of a comma-separated list of names and AxBxC, in order, each once.

    Raises:
      ValueError: neither a name nor a shape, or a shape without elements.
    """
    shapes_named: list[Shape] = []
    for word in text.split(","):
        if word in SHAPES:
            shapes_named += SHAPES[word]
        elif re.fullmatch(r"\d+(x\d+)*", word):
            shapes_named.append(tuple(map(int, word.split("x"))))
            if 0 in shapes_named[-1]:
                raise ValueError(f"shape {word!r} has no elements; there is nothing to measure")
        else:
            raise ValueError(f"shape {word!r} is neither AxBxC nor one of {', '.join(SHAPES)}")
    return tuple(dict.fromkeys(shapes_named))
