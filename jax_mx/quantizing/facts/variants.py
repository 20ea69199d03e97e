"""Kernels that can be compiled: `Variant`, and `exists`, which says whether a kernel has one.

A fact is a field only if it changes the code of a kernel; scaling mode and sizes are run-time
scalars. The module imports nothing of JAX: the kernels' build reads it too. shipping/shipped.py
lists the variants that a wheel brings; others are compiled when a call wants them.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jax_mx.formats import directions
from jax_mx.formats.directions import Form
from jax_mx.formats.formats import (
    BLOCK,
    FLOAT_DTYPES,
    MXFP4_E2M1,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    Format,
)
from jax_mx.formats.windows import ROW, SQUARE, TILE, Window
from jax_mx.quantizing.facts.binary import Compiled
from jax_mx.quantizing.facts.modes import Mode
from jax_mx.quantizing.facts.signatures import Role, Signature, signature_of
from jax_mx.quantizing.facts.sources import Source, X


@dataclasses.dataclass(frozen=True)
class Variant(Compiled):
    """One kernel's source-level choices. Each is compiled once for every arch of its DSL.

    Attributes:
      op: "quantize" (one or both ways) or "dequantize".
      form: which axes blocks run along and which way arrays lie.
      dtype: of the unquantized side.
      formats: of the quantized arrays, one each.
      modes: how the elements of each are preprocessed, their windows, and whether they come out
        dequantized; () where there is nothing of that.
      source: of the floats.
    """

    form: Form
    dtype: str
    formats: tuple[Format, ...]
    modes: tuple[Mode, ...] = ()
    source: Source = X

    @property
    def signature(self) -> Signature:
        """The arrays of its call, see quantizing/facts/signatures.py."""
        modes = self.modes or (Mode(),) * len(self.formats)
        return signature_of(self.op, modes, self.source)

    @property
    def block_data(self) -> int:
        """How many operands of a uint32 per block there are: seeds, flips of signs, amaxes."""
        return sum(array.role is Role.BLOCK_DATA for array in self.signature.operands)

    @property
    def changes_elements(self) -> bool:
        """Whether some of its arrays' elements are transformed, or rounded at random."""
        return any(mode.changes_elements for mode in self.modes)

    @property
    def gives_floats(self) -> bool:
        """Whether floats come out of it, in place of the codes of some result."""
        return any(mode.dequantized for mode in self.modes)

    @property
    def finds_amaxes(self) -> bool:
        """Whether it finds the amaxes of windows that are rows itself."""
        return any(mode.finds for mode in self.modes)

    @property
    def window(self) -> Window:
        """The elements that share an amax; all arrays of a variant have the same."""
        return self.modes[0].window if self.modes else BLOCK

    @property
    def name(self) -> str:
        """The name, which the binary's file and its entry points carry too."""
        formats = "_".join(format.name for format in self.formats)
        modes = "".join(mode.suffix or "_rn" for mode in self.modes)
        source = f"_{self.source}" * bool(self.source)
        return f"{self.op}_{self.form}_{self.dtype}_{formats}{modes}{source}"


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
    "quantize": (directions.LAST, directions.SECOND, directions.SECOND_TRANSPOSED, directions.BOTH,
        directions.BOTH_TRANSPOSED, directions.SQUARE, directions.SQUARE_TRANSPOSED),
    "dequantize": (directions.LAST, directions.LAST_TRANSPOSED, directions.SECOND,
        directions.SECOND_TRANSPOSED, directions.SQUARE, directions.SQUARE_TRANSPOSED),
}  # fmt: skip
# The forms of a product's operand: blocks along its rows, down them, and both.
OPERANDS = (directions.LAST, directions.SECOND_TRANSPOSED, directions.BOTH_TRANSPOSED)
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
    """Whether the formats have codes of different sizes."""
    return len({format.bits for format in formats}) > 1


def _dtypes(formats: tuple[Format, ...]) -> Iterable[str]:
    """MXFP6 is for weights and activations of inference, which are bfloat16, as training has."""
    return ("bfloat16",) if formats[0].bits == 6 or differ_in_bits(formats) else FLOAT_DTYPES


# Recipes of training rotate and round in MXFP4; of both directions often one alone.
_H16, _SR, _H16_SR = Mode(16), Mode(stochastic=True), Mode(16, stochastic=True)
_MODES: Mapping[int, tuple[tuple[Mode, ...], ...]] = {
    1: ((_H16,), (Mode(32),), (Mode(64),), (_SR,), (_H16_SR,)),
    2: ((Mode(), _H16), (_SR, _H16_SR), *((mode,) * 2 for mode in (_H16, Mode(64), _SR, _H16_SR))),
}


def _windows(implementation: str, form: Form) -> tuple[Window, ...]:
    """All but rows that a form has kernels for. AMD's LDS holds no tiles of 256 both ways."""
    if form.is_square:
        return (TILE,)
    if implementation == "flydsl" and form.is_both:
        return (128,)
    return 128, 256


# `fake_quantize` and products of bfloat16 take floats in place of codes. The other result is, for
# activations and weights, the codes that wait for the backward pass, and for a gradient the floats
# of the other product.
_DEQUANTIZED = Mode(dequantized=True)
_FAKE: Mapping[Form, tuple[tuple[Mode, ...], ...]] = {
    directions.LAST: ((_DEQUANTIZED,),),
    directions.SECOND: ((_DEQUANTIZED,),),
    directions.BOTH: ((_DEQUANTIZED, _DEQUANTIZED), (Mode(), _DEQUANTIZED)),
    directions.BOTH_TRANSPOSED: ((_DEQUANTIZED, Mode()),),
}


def modes_of(variant: Variant) -> Iterator[tuple[Mode, ...]]:
    """All `modes` that kernels of x itself have beside the other fields of a variant."""
    yield ()
    if variant.op != "quantize":
        return
    form, formats, bfloat16 = variant.form, variant.formats, variant.dtype == "bfloat16"
    if {*formats} == {MXFP4_E2M1} and not form.is_square and (bfloat16 or form == directions.LAST):
        yield from _MODES[len(formats)]
    eights = {format.bits for format in formats} == {8}
    if variant.dtype == "float32" and eights:  # weights' masters
        yield from _modes_of_rows(variant)
    yield from _modes_of_squares(variant)
    if not bfloat16:
        return
    if formats == _MIXED:  # `mxfp4_backward` of activations
        yield Mode(), _H16
    if formats == _MIXED[::-1]:  # and of weights, whose rows are contracted first
        yield _H16, Mode()
    if eights:  # products by FP8 tensor cores want windows
        for window in _windows(variant.implementation, form):
            yield (Mode(window=window),) * len(formats)
        yield from _modes_of_rows(variant)
    if len({*formats}) == 1 and formats[0].bits != 6:
        yield from _FAKE.get(form, ())


def _modes_of_squares(variant: Variant) -> Iterator[tuple[Mode, ...]]:
    """Square blocks for each reader of a weight, in one format that products take."""
    one = len({*variant.formats}) == 1 and variant.formats[0].bits != 6
    if one and variant.implementation == "cutedsl" and variant.form == directions.BOTH_TRANSPOSED:
        yield (Mode(window=SQUARE),) * 2


def _modes_of_rows(variant: Variant) -> Iterator[tuple[Mode, ...]]:
    """Kinds of windows that are rows: with amaxes, and on NVIDIA without them along the last axis.

    AMD has none of float32.
    """
    form, is_cutedsl = variant.form, variant.implementation == "cutedsl"
    if form.is_square or not (is_cutedsl or variant.dtype == "bfloat16"):
        return
    if variant.dtype == "bfloat16" or form in OPERANDS:
        yield (Mode(window=ROW),) * len(variant.formats)
    if is_cutedsl and form == directions.LAST:
        yield (Mode(window=ROW, finds=True),)


def exists(variant: Variant, arch: str = "") -> bool:
    """Whether a kernel has a variant; with an arch, also whether the arch has a tile for it."""
    formats = _FORMATS[len(variant.form.directions)]
    plain = variant.form in KERNELS.get(variant.op, ()) and variant.formats in formats
    plain = plain and variant.dtype in _dtypes(variant.formats)
    if not (plain and variant.modes in modes_of(variant)):
        return False
    if variant.source:
        is_fused = variant.op == "quantize" and variant.source.has_kernel(variant)
        if not is_fused or variant.window == SQUARE:
            return False
    return not arch or _holds(arch, variant)


def variants(
    implementation: str,
    op: str,
    source: Source = X,
    modes: tuple[Mode, ...] | None = None,
) -> Iterator[Variant]:
    """All variants that exist with these fields; with `modes` those alone.

    Args:
      implementation: see `Variant`.
      op: "quantize" or "dequantize".
      source: of the floats.
      modes: of all arrays; None: any.
    """
    for form in KERNELS.get(op, ()):
        for formats in _FORMATS[len(form.directions)]:
            for dtype in FLOAT_DTYPES:
                plain = Variant(op, implementation, form, dtype, formats)
                for its_modes in modes_of(plain) if modes is None else (modes,):
                    variant = dataclasses.replace(plain, modes=its_modes, source=source)
                    if exists(variant):
                        yield variant


def is_operand(variant: Variant) -> bool:
    """Whether products take what a variant gives as an operand: codes of a form, not MXFP6.

    Registers do not hold tiles of windows of 256 both ways, of floats that a kernel makes.
    """
    fits = variant.window != 256 or not variant.form.is_both
    plain = not variant.changes_elements and variant.window not in (ROW, SQUARE)
    whole = variant.formats[0].bits != 6 and not differ_in_bits(variant.formats)
    return variant.form in OPERANDS and fits and plain and whole


def has_one_format(variant: Variant, *formats: Format) -> bool:
    """Whether blocks are windows of their own, and all arrays have one format, of `formats`."""
    alike = variant.window == BLOCK and len({*variant.formats}) == 1
    return alike and (not formats or variant.formats[0] in formats)


def layouts_of(variant: Variant, arch: str = "") -> tuple[str, ...]:
    """The scale layouts that a variant's binary has entries for, of an arch; "": of some arch."""
    alone = variant.form.is_square or variant.gives_floats or variant.finds_amaxes
    if alone:
        return ("row_major",)
    if archs := variant.source.tiled_on:
        return ("row_major", "blocked_128x4")[: 1 + (not arch or arch in archs)]
    return scale_layouts_of(variant.implementation, variant.formats)


def takes_zero_scale(format: Format) -> bool:
    """Whether kernels have the scale of all-zero blocks as a scalar; it is 0 where they do not."""
    return format == MXFP4_E2M1


def _holds(arch: str, variant: Variant) -> bool:
    """Whether an arch has a tile for a variant, which others spill; and products that read it.

    sm_80 has none of windows of 256 both ways, sm_120f none of MXFP4's floats both ways. Products
    of sm_100f alone read square blocks that are written both ways.
    """
    if variant.window == SQUARE:
        return arch == "sm_100f"
    both = variant.implementation == "cutedsl" and variant.form.is_both
    floats = variant.modes == (_DEQUANTIZED,) * 2 and variant.source == X
    if arch == "sm_120f" and floats and variant.formats[0] == MXFP4_E2M1:
        return False
    return not (both and variant.window == 256 and arch == "sm_80")
