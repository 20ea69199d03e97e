"""What can be compiled: `Variant`, and the table of all; lowering/registry.py chooses from it.

Only what changes the code of a kernel is a field; scaling mode and sizes are run-time scalars.
Imports nothing of JAX: the kernels' build reads this table too.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jax_mx.facts import directions
from jax_mx.facts.chips import ARCHS
from jax_mx.facts.directions import Form
from jax_mx.facts.formats import (
    BLOCK,
    FLOAT_DTYPES,
    MXFP4_E2M1,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    Format,
)
from jax_mx.facts.signatures import Role, signature_name, signature_of
from jax_mx.facts.sources import ADDED, RMS_NORM, ROWS, Source, X
from jax_mx.facts.windows import ROW, TILE, Window, suffix_of


class Kind(NamedTuple):
    """What of an array's preprocessing (facts/preprocessing.py) changes a kernel's code.

    Attributes:
      hadamard: the size of the transform that goes before, or 0.
      stochastic: whether codes are rounded at random.
      window: which elements share an amax, see facts/windows.py.
      dequantized: whether floats come out, in place of codes and scales.
    """

    hadamard: int = 0
    stochastic: bool = False
    window: Window = BLOCK
    dequantized: bool = False

    @property
    def changes_elements(self) -> bool:
        """Whether elements are transformed, or rounded at random."""
        return self.stochastic or self.hadamard > 0

    @property
    def blocks(self) -> int:
        """How many of them a transform makes one: 1, or 2."""
        return max(self.hadamard // BLOCK, 1)

    @property
    def suffix(self) -> str:
        """The end of a variant's name."""
        before = f"_h{self.hadamard}" * (self.hadamard > 0) + "_sr" * self.stochastic
        return before + suffix_of(self.window) + "_dq" * self.dequantized


@dataclasses.dataclass(frozen=True)
class Variant:
    """One kernel's source-level choices. Each is compiled once for every arch of its DSL.

    Attributes:
      op: "quantize" (one or both ways) or "dequantize".
      implementation: "cutedsl" or "flydsl".
      form: which axes blocks run along and which way arrays lie.
      dtype: of the unquantized side.
      formats: of the quantized arrays, one each.
      kinds: how the elements of each are preprocessed, their windows, and whether they come out
        dequantized; () where there is nothing of that.
      source: what makes the floats.
    """

    op: str
    implementation: str
    form: Form
    dtype: str
    formats: tuple[Format, ...]
    kinds: tuple[Kind, ...] = ()
    source: Source = X

    @property
    def rows(self) -> bool:
        """Whether it picks rows."""
        return self.source.rows

    @property
    def codes(self) -> str:
        """The format of the codes whose rows it picks; "": it reads floats."""
        return self.source.codes

    @property
    def normed(self) -> bool:
        """Whether it norms rows."""
        return self.source.norm

    @property
    def added(self) -> bool:
        """Whether what it norms is a sum."""
        return self.source.added

    @property
    def signature(self) -> str:
        """The name of its signature, see facts/signatures.py."""
        return signature_name(self.op, self.source)

    @property
    def block_data(self) -> int:
        """How many operands of a uint32 per block there are: seeds, flips of signs, amaxes."""
        operands = signature_of(self.signature, self.kinds).operands
        return sum(array.role is Role.BLOCK_DATA for array in operands)

    @property
    def changes_elements(self) -> bool:
        """Whether some of its arrays' elements are transformed, or rounded at random."""
        return any(kind.changes_elements for kind in self.kinds)

    @property
    def gives_floats(self) -> bool:
        """Whether floats come out of it, in place of the codes of some result."""
        return any(kind.dequantized for kind in self.kinds)

    @property
    def window(self) -> Window:
        """Which elements share an amax; the same for all of its arrays."""
        return self.kinds[0].window if self.kinds else BLOCK

    @property
    def name(self) -> str:
        """The name, which the binary's file and its entry points carry too."""
        formats = "_".join(format.name for format in self.formats)
        kinds = "".join(kind.suffix or "_rn" for kind in self.kinds)
        source = f"_{self.source}" * bool(self.source)
        return f"{self.op}_{self.form}_{self.dtype}_{formats}{kinds}{source}"


def scale_layouts_of(implementation: str, formats: Sequence[Format]) -> tuple[str, ...]:
    """The layouts of scales that kernels of these formats write and read.

    AMD's would make NVIDIA's binaries half as large again, so there they serve MXFP4 alone: for
    weights that are quantized ahead, on whatever is at hand.
    """
    everywhere = ("row_major", "blocked_128x4")
    if implementation == "flydsl" or {*formats} == {MXFP4_E2M1}:
        return (*everywhere, "shuffled_32x8")
    return everywhere


def value_layouts_of(implementation: str, scale_layout: str) -> tuple[str, ...]:
    """The layouts of values that quantize's kernels write beside these scales; XLA moves others.

    NVIDIA's choose at run time only in the entries for AMD's scales: that choice made others slower
    (H200, (8, 7168, 7168), 2026-11-22, MXFP4: last, in tiles 257 -> 269 us, both 298 -> 304,
    second_transposed with h16 365 -> 387).
    """
    if implementation == "flydsl" or (implementation, scale_layout) == ("cutedsl", "shuffled_32x8"):
        return ("row_major", "shuffled_16x16")
    return ("row_major",)


# The forms of each op that has kernels.
KERNELS: Mapping[str, tuple[Form, ...]] = {
    "quantize": (
        directions.LAST,
        directions.SECOND,
        directions.SECOND_TRANSPOSED,
        directions.BOTH,
        directions.BOTH_TRANSPOSED,
        directions.SQUARE,
        directions.SQUARE_TRANSPOSED,
    ),
    "dequantize": (
        directions.LAST,
        directions.LAST_TRANSPOSED,
        directions.SECOND,
        directions.SECOND_TRANSPOSED,
        directions.SQUARE,
        directions.SQUARE_TRANSPOSED,
    ),
}
# By how many arrays: the formats of each. Training mixes MXFP8's two, and MXFP8 with MXFP4: some
# recipes have one for the forward product and another for gradients.
_MIXED = (MXFP8_E4M3, MXFP4_E2M1)
_FORMATS: Mapping[int, tuple[tuple[Format, ...], ...]] = {
    n: (
        *itertools.product((MXFP8_E4M3, MXFP8_E5M2), repeat=n),
        *((format,) * n for format in (MXFP6_E3M2, MXFP6_E2M3, MXFP4_E2M1)),
        *((_MIXED, _MIXED[::-1]) if n == 2 else ()),
    )
    for n in (1, 2)
}


def differ_in_bits(formats: tuple[Format, ...]) -> bool:
    """Whether codes of some have more bits than those of others."""
    return len({format.bits for format in formats}) > 1


def _dtypes(formats: tuple[Format, ...]) -> Iterable[str]:
    """MXFP6 is for weights and activations of inference, which are bfloat16, as training has."""
    return ("bfloat16",) if formats[0].bits == 6 or differ_in_bits(formats) else FLOAT_DTYPES


# Recipes of training rotate and round in MXFP4; of both directions often one alone.
_H16, _SR, _H16_SR = Kind(16), Kind(stochastic=True), Kind(16, stochastic=True)
_KINDS: Mapping[int, tuple[tuple[Kind, ...], ...]] = {
    1: ((_H16,), (Kind(32),), (Kind(64),), (_SR,), (_H16_SR,)),
    2: ((Kind(), _H16), (_SR, _H16_SR), *((kind,) * 2 for kind in (_H16, Kind(64), _SR, _H16_SR))),
}
# Products by FP8 tensor cores want windows, of what training has in MXFP8.
_WINDOWED_DTYPES = ("bfloat16",)


def _windows(implementation: str, form: Form) -> tuple[Window, ...]:
    """Those that a form has kernels for. AMD's LDS does not hold tiles of 256 both ways."""
    if form.is_square:
        return (TILE,)
    if implementation == "flydsl" and form.is_both:
        return 128, ROW
    return 128, 256, ROW


VARIANTS: tuple[Variant, ...] = (
    *(
        Variant(op, implementation, form, dtype, formats)
        for implementation in ARCHS
        for op, forms in KERNELS.items()
        for form in forms
        for formats in _FORMATS[len(form.directions)]
        for dtype in _dtypes(formats)
    ),
    *(
        Variant(
            "quantize", implementation, form, dtype, (MXFP4_E2M1,) * len(form.directions), kinds
        )
        for implementation in ARCHS
        for form in KERNELS["quantize"]
        if not form.is_square
        for dtype in (FLOAT_DTYPES if form == directions.LAST else ("bfloat16",))
        for kinds in _KINDS[len(form.directions)]
    ),
    *(  # `mxfp4_backward` of activations, and of weights, whose rows are contracted first
        Variant("quantize", implementation, form, "bfloat16", formats, kinds)
        for implementation in ARCHS
        for form in (directions.BOTH, directions.BOTH_TRANSPOSED)
        for formats, kinds in ((_MIXED, (Kind(), _H16)), (_MIXED[::-1], (_H16, Kind())))
    ),
    *(
        Variant("quantize", implementation, form, dtype, formats, (Kind(window=window),) * n)
        for implementation in ARCHS
        for form in KERNELS["quantize"]
        for n in (len(form.directions),)
        for window in _windows(implementation, form)
        for formats in _FORMATS[n]
        if {format.bits for format in formats} == {8}
        for dtype in _WINDOWED_DTYPES
    ),
)
# Tokens that are routed to experts are bfloat16. Amaxes of whole rows of x are no kernel's.
VARIANTS += tuple(
    dataclasses.replace(variant, source=ROWS)
    for variant in VARIANTS
    if variant.op == "quantize" and variant.dtype == "bfloat16"
    if not variant.changes_elements and variant.window != ROW
    if not differ_in_bits(variant.formats)
)
# The activations that each DSL's kernels have; all but the first without windows, in one format.
_ACTIVE = ("swiglu", "geglu", "geglu_erf", "reglu2", "gpt_oss")
ACTIVE: Mapping[str, tuple[str, ...]] = dict.fromkeys(ARCHS, _ACTIVE)
# What a product's operand wants: along its rows, down them, and both; not MXFP6.
VARIANTS += tuple(
    dataclasses.replace(variant, source=Source(activation=activation))
    for variant in VARIANTS
    if variant.rows and variant.formats[0].bits != 6
    for activation in ACTIVE[variant.implementation]
    if activation == _ACTIVE[0] or (variant.window == BLOCK and len({*variant.formats}) == 1)
    if variant.form in (directions.LAST, directions.SECOND_TRANSPOSED, directions.BOTH_TRANSPOSED)
    if variant.window != 256 or not variant.form.is_both  # registers do not hold its tiles
)
# The gradient that both products of a backward pass take.
VARIANTS += tuple(
    dataclasses.replace(variant, source=dataclasses.replace(variant.source, gradient=True))
    for variant in VARIANTS
    if variant.form == directions.BOTH_TRANSPOSED and variant.source.activation
)
# Gates and ups by turns, as gpt-oss' checkpoints have them; their gradients likewise.
_INTERLEAVED = ("swiglu", "gpt_oss")
VARIANTS += tuple(
    dataclasses.replace(variant, source=dataclasses.replace(variant.source, interleaved=True))
    for variant in VARIANTS
    if variant.source.activation in _INTERLEAVED
    if variant.window == BLOCK and len({*variant.formats}) == 1
)
# From other floats likewise, and not to the format of gradients.
_BY_SIGMOID = ("swiglu", "geglu", "gpt_oss")
VARIANTS += tuple(
    dataclasses.replace(variant, dtype=dtype)
    for variant in VARIANTS
    for dtype in ("float16", "float32")
    if variant.source.activation in _BY_SIGMOID and variant.source.makes_one_of_two
    if not variant.source.interleaved and variant.window == BLOCK
    if {*variant.formats} in ({MXFP8_E4M3}, {MXFP4_E2M1})
)
# The forms of what kernels norm.
NORMED = (directions.LAST, directions.SECOND_TRANSPOSED, directions.BOTH_TRANSPOSED)
VARIANTS += tuple(
    dataclasses.replace(variant, source=RMS_NORM)
    for variant in VARIANTS
    if variant.rows and variant.formats[0].bits != 6
    if variant.form in NORMED
    if variant.window != 256 or not variant.form.is_both  # as of activations
)
# From other floats likewise. Factors that wait in memory for their tiles are float32, those
# of float32 rows are not.
VARIANTS += tuple(
    dataclasses.replace(variant, dtype=dtype)
    for variant in VARIANTS
    if variant.normed and variant.window == BLOCK
    if {*variant.formats} in ({MXFP8_E4M3}, {MXFP4_E2M1})
    for dtype in ("float16", "float32")
    if dtype == "float16" or variant.form == directions.LAST
)
# Sums with what a transformer's block begins with.
VARIANTS += tuple(
    dataclasses.replace(variant, source=ADDED)
    for variant in VARIANTS
    if variant.normed and variant.dtype == "bfloat16" and variant.window == BLOCK
    if {*variant.formats} in ({MXFP8_E4M3}, {MXFP4_E2M1})
)
# And what was made, where it is read again as floats: the same of activations that models have.
VARIANTS += tuple(
    dataclasses.replace(variant, source=dataclasses.replace(variant.source, floats=True))
    for variant in VARIANTS
    if variant.normed or variant.source.activation in _INTERLEAVED
    if not variant.source.gradient and variant.dtype == "bfloat16" and variant.window == BLOCK
    if {*variant.formats} in ({MXFP8_E4M3}, {MXFP4_E2M1})
)
# Gates and ups of two products, an array each.
_APART = ("swiglu", "geglu")
VARIANTS += tuple(
    dataclasses.replace(variant, source=dataclasses.replace(variant.source, apart=True))
    for variant in VARIANTS
    if variant.source in [Source(activation=activation) for activation in _APART]
    if variant.dtype == "bfloat16" and variant.window == BLOCK
    if {*variant.formats} in ({MXFP8_E4M3}, {MXFP4_E2M1})
)
# With sums of columns, the gradient of a bias, in the formats that recipes give gradients.
VARIANTS += tuple(
    dataclasses.replace(variant, source=dataclasses.replace(variant.source, sums=True))
    for variant in VARIANTS
    if variant.source.gradient and variant.source.activation in _INTERLEAVED
    if variant.window == BLOCK and {*variant.formats} in ({MXFP8_E4M3}, {MXFP8_E5M2})
)
# Tokens that moved as codes along their elements, along the tokens of each expert.
VARIANTS += tuple(
    dataclasses.replace(variant, source=Source(rows=True, codes=variant.formats[0].name))
    for variant in VARIANTS
    if variant.source == ROWS
    if variant.form == directions.SECOND_TRANSPOSED and variant.formats[0].bits == 8
)
# What `fake_quantize` gives, and products of bfloat16: floats in place of codes; beside them, of
# activations and of weights, the codes that wait for the backward pass, of a gradient the floats
# for the other product.
_DEQUANTIZED = Kind(dequantized=True)
_FAKE: Mapping[Form, tuple[tuple[Kind, ...], ...]] = {
    directions.LAST: ((_DEQUANTIZED,),),
    directions.SECOND: ((_DEQUANTIZED,),),
    directions.BOTH: ((_DEQUANTIZED, _DEQUANTIZED), (Kind(), _DEQUANTIZED)),
    directions.BOTH_TRANSPOSED: ((_DEQUANTIZED, Kind()),),
}
VARIANTS += tuple(
    dataclasses.replace(variant, kinds=kinds)
    for variant in VARIANTS
    if variant.op == "quantize" and variant.dtype == "bfloat16" and not variant.kinds
    if variant.formats[0].bits != 6
    if len({*variant.formats}) == 1
    if variant.source in (X, ROWS) or variant.source == Source(activation="swiglu")
    for kinds in _FAKE.get(variant.form, ())
    if variant.source == X or (variant.form != directions.SECOND and kinds[0].dequantized)
)
VARIANTS += tuple(
    dataclasses.replace(variant, form=directions.BOTH, kinds=(_DEQUANTIZED, _DEQUANTIZED))
    for variant in VARIANTS
    if variant.dtype == "bfloat16" and not variant.kinds
    if variant.source == Source(activation="swiglu", gradient=True)
    if len({*variant.formats}) == 1
)


def layouts_of(variant: Variant) -> tuple[str, ...]:
    """The scale layouts that a variant's binary has entries for."""
    if variant.form.is_square or variant.source.gradient or variant.gives_floats:
        return ("row_major",)
    return scale_layouts_of(variant.implementation, variant.formats)


def takes_zero_scale(format: Format) -> bool:
    """Whether kernels have the scale of all-zero blocks as a scalar; it is 0 where they do not."""
    return format == MXFP4_E2M1


def holds(arch: str, variant: Variant) -> bool:
    """Whether an arch has a tile for a variant; others spill.

    Of windows of 256 both ways sm_80 has none, of MXFP4's floats both ways sm_120f.
    """
    both = variant.implementation == "cutedsl" and variant.form.is_both
    floats = variant.kinds == (_DEQUANTIZED,) * 2 and variant.source == X
    if arch == "sm_120f" and floats and variant.formats[0] == MXFP4_E2M1:
        return False
    return not (both and variant.window == 256 and arch == "sm_80")
