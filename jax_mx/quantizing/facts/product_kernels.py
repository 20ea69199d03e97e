"""Kernels of products that read MX operands: `ProductKernel`, and the table of all.

y (T, N) = x (T, K) @ W (G, N, K)^T: the rows of x belong to groups, one after the other, and each
group has its own matrix. Blocks run along K, scales are row-major. Sizes are run-time scalars.
Where W is "free", its blocks run along its free axis: y (T, N) = x (T, K) @ W (G, K, N). Groups of
"wgrad_fp8" have parts of K instead: y (G, T, N) is x (T, K) @ W (N, K)^T over each group's part of
K. "wgrad" is the same for floats x (T, K) and dy (T, N) that lie transposed, y (G, K, N) over each
group's rows. "normed" is "matmul" of one group, whose x is normed before. Three are none.
"rms_norm" is that norm alone. "attention" is what decoding has between two products. "amaxes" gives
the largest magnitudes of the rows and the columns of x (batch, T, K): a quantizer of both
directions needs these first where products take rows with one scale each.
"""

import dataclasses
import itertools
from typing import ClassVar

from jax_mx.formats.formats import (
    BLOCK,
    MXFP4_E2M1,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    Format,
)
from jax_mx.formats.windows import ROW, suffix_of
from jax_mx.launch.chips import ARCHS
from jax_mx.quantizing.facts.binary import Compiled
from jax_mx.quantizing.facts.variants import Variant, exists

RESULTS = ("bfloat16", "float16", "float32")  # the dtypes of y that each binary has entries for
TILE = 128  # rows and elements of W that share a scale where its windows are tiles
# Rows of x in the smallest tiles, where W goes from memory into registers. Groups, and what such
# kernels do not serve, take another entry of the second.
DIRECT, FEWEST = 4, 8
NORMED_UNIT, NORMED_ELEMENTS = 128, 16384  # "normed": of the length of rows; of all at most
# "attention": the columns of a head, how many heads share keys at most, and up to how many heads of
# keys, of all rows, the kernel for one row serves.
ATTENDED_DEPTHS, ATTENDED_HEADS, ATTENDED_BY_ONE = (128, 64), 8, 16
UNIT = 8  # of x's columns where W is free: zeros fill them up, so that copies can read rows


@dataclasses.dataclass(frozen=True)
class ProductKernel(Compiled):
    """One kernel's source-level choices.

    Attributes:
      op: "matmul" and "normed", of floats x and codes W; "matmul_fp8" and "wgrad_fp8", of codes and
        codes; "wgrad", of floats and floats; "rms_norm", "attention" and "amaxes", of floats.
      formats: of the quantized operands, x's before W's.
      rows: how many of x's a thread block, or a cluster of two, has at a time; of "attention": how
        many there are about.
      window: how many elements along K share a scale, of both operands, where both are codes;
        "row": all of them.
      tiles: whether `TILE` rows of W share their scales.
      free: whether blocks of W run along its free axis, which lies last, not the contracted one.
      floats: the dtype of its floats, where kernels take several; "" of "amaxes": bfloat16.
      source: the word of what makes the floats, of "amaxes": they come out, too; "": x.
      parted: whether codes of W lie in parts of the contracted axis, one behind the other: (parts,
        N, K / parts). Devices that had a part each gather them so; scales lie as ever.
      fast: whether the tensor cores add up all along K, with fewer bits than float32 has.
      narrow: whether it is for a y of few columns, whose tiles larger thread blocks take.
      activation: that of y's first half, as gates, and its second one; "": none.
    """

    ROOM: ClassVar[str] = "products"
    formats: tuple[Format, ...]
    rows: int
    window: int | str = BLOCK
    tiles: bool = False
    free: bool = False
    floats: str = ""
    source: str = ""
    parted: bool = False
    fast: bool = False
    narrow: bool = False
    activation: str = ""

    @property
    def name(self) -> str:
        """The name, which the binary's file and its entry points carry too."""
        window = suffix_of(self.window) + f"x{TILE}" * self.tiles
        names = [format.name for format in self.formats] + [self.floats] * (self.floats != "")
        names += [self.source] * (self.source != "")
        name = "_".join((self.op, *names, f"r{self.rows}{window}"))
        ending = "_parted" * self.parted + "_fast" * self.fast + "_narrow" * self.narrow
        ending += f"_{self.activation}" * (self.activation != "")
        return name + "_free" * self.free + ending


def fp8_rows(window: int | str, tiles: bool) -> tuple[int, ...]:
    """How many rows of x FP8 tensor cores' thread blocks have at a time: one 128, and two 256.

    Two read W once. Where each element of a sum has a scale of its own, that gained nothing.
    """
    return (256, 128) if tiles or window == ROW else (128,)


def normed_fits(rows: int, length: int) -> bool:
    """Whether the kernels of "normed" take an x of this shape."""
    few = 0 < rows <= DIRECT and rows * length <= NORMED_ELEMENTS
    return few and length % NORMED_UNIT == 0


# Sources of "amaxes": those of MLPs, of one array of gates and ups and of two, and their gradients.
ACTIVE_SOURCES = ("swiglu", "swiglu_pair", "swiglu_gradient", "swiglu_pair_gradient")
# The archs that have kernels of products, by DSL.
PRODUCT_ARCHS = {"cutedsl": ("sm_90a",), "flydsl": ("gfx942", "gfx950")}
_FORMATS = (MXFP8_E4M3, MXFP8_E5M2, MXFP6_E3M2, MXFP6_E2M3, MXFP4_E2M1)
_EIGHTS = tuple(itertools.product((MXFP8_E4M3, MXFP8_E5M2), repeat=2))
PRODUCTS: tuple[ProductKernel, ...] = (
    *(
        ProductKernel("matmul", "cutedsl", (format,), rows)
        for rows in (256, 128, 64, 16, 8)
        for format in _FORMATS
    ),
    # Zeros keep the blocks of these apart, and E5M2 has infinities.
    *(
        ProductKernel("matmul", "cutedsl", (format,), DIRECT)
        for format in _FORMATS
        if format != MXFP8_E5M2
    ),
    ProductKernel("matmul", "cutedsl", (MXFP4_E2M1,), DIRECT, narrow=True),
    *(
        ProductKernel(
            "matmul", "cutedsl", (format,), rows, narrow=not activation, activation=activation
        )
        for format in (MXFP8_E4M3, MXFP4_E2M1)
        for rows, activation in ((8, ""), (8, "swiglu"), (16, "swiglu"))
    ),
    *(
        ProductKernel("matmul_fp8", "cutedsl", formats, rows, window, tiles)
        for window in (128, 256, ROW)
        for tiles in ((False, True) if window != ROW else (False,))
        for rows in fp8_rows(window, tiles)
        for formats in _EIGHTS
    ),
    *(
        ProductKernel("matmul_fp8", "cutedsl", formats, rows, ROW, parted=True)
        for rows in fp8_rows(ROW, False)
        for formats in _EIGHTS
    ),
    *(
        ProductKernel(
            "matmul_fp8", "cutedsl", (MXFP8_E4M3,) * 2, rows, ROW, parted=parted, fast=True
        )
        for rows in fp8_rows(ROW, False)
        for parted in (False, True)
    ),
    *(
        ProductKernel("wgrad_fp8", "cutedsl", formats, 128, window)
        for window in (128, 256)
        for formats in _EIGHTS
    ),
    *(
        ProductKernel("wgrad", "cutedsl", (), 64, floats=floats)
        for floats in ("bfloat16", "float16")
    ),
    *(ProductKernel("amaxes", "cutedsl", (), 128, floats=floats) for floats in ("", "float32")),
    *(ProductKernel("amaxes", "cutedsl", (), 128, source=source) for source in ACTIVE_SOURCES),
    *(
        ProductKernel("matmul", "cutedsl", (format,), rows, free=True)
        for rows in (256, 128)
        for format in _FORMATS
    ),
    *(
        ProductKernel("normed", "cutedsl", (format,), DIRECT, activation=activation)
        for format in (MXFP8_E4M3, MXFP4_E2M1)
        for activation in ("", "swiglu")
    ),
    ProductKernel("rms_norm", "cutedsl", (), 1),
    *(ProductKernel("attention", "cutedsl", (), rows) for rows in (1, FEWEST)),
)

# On AMD every pair of formats that gfx950's matrix cores take.
PRODUCTS += tuple(
    ProductKernel(op, "flydsl", formats, 128)
    for op in ("matmul_fp8", "wgrad_fp8")
    for formats in itertools.product((MXFP8_E4M3, MXFP8_E5M2, MXFP4_E2M1), repeat=2)
)

Binary = Variant | ProductKernel


def archs_of(binary: Binary) -> tuple[str, ...]:
    """The archs that a variant or a product is compiled for."""
    if isinstance(binary, ProductKernel):
        return PRODUCT_ARCHS[binary.implementation]
    return tuple(arch for arch in ARCHS[binary.implementation] if exists(binary, arch))
