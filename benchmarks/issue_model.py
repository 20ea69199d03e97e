"""How fast chips that are not at hand could run the kernels, as far as issuing instructions goes.

    python -m benchmarks issue_model [--ways '*last_bfloat16*']

A kernel that is bound by memory needs its bytes moved at the memory's speed. In that time a chip
issues so many instructions; how many times what the kernel needs, is the ratio below: 1.3 leaves
room for what the model leaves out, latency and pipes that are narrower than the issue rate. The
instructions are those of the manifest (kernels/build.py) for aligned operands, the most that a warp
can issue, with row-major scales / with those in tiles where there are such. The worst one counts.

On NVIDIA's chips each of four schedulers issues an instruction of any kind for 32 threads a clock.
On CDNA each of four SIMDs of a compute unit is 16 lanes wide and takes four clocks for a wave's 64,
so a unit issues one vector instruction a clock; scalars, LDS and branches of other waves go beside
it. Counted are vector instructions, arithmetic and global memory, two float32 at once as one
(which is how the data sheets' vector TFLOP/s come about), 32-bit products and reciprocals as four.
Whether a conversion takes longer than other arithmetic, AMD does not say; here it does not.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, NamedTuple

from benchmarks import shapes
from benchmarks.record import RESULTS
from benchmarks.report import read
from benchmarks.runner import Args, Case, Row
from jax_mx.facts.chips import ARCHS
from jax_mx.facts.formats import BLOCK, FLOAT_DTYPES
from jax_mx.facts.variants import Variant
from jax_mx.kernels.shipped import SHIPPED
from jax_mx.lowering.store import manifest

NONE = "no reason given"
# Per implementation, by patterns of variants' names, the first that fits, why they may stay below
# what is wanted.
REASONS: Mapping[str, Mapping[str, str]] = {
    "cutedsl": {
        "*_sr": "16 random bits an element are integer products and shifts",
        "*_h[136]*": "float32 butterflies: 4 to 6 additions an element",
        "quantize_last_*": "tiles: a scale's place costs as its 16 elements do; row-major is met",
        "quantize_s*_float16_*": "float16 is multiplied in float32",
        "quantize_both*_float16_*": "float16 is multiplied in float32, in either direction",
        "quantize_both_bfloat16_mxfp4_*": "a lane's codes are 4 bytes: rows go by shared memory",
        "*_gradient": "an exponential, a reciprocal and two roundings for each gate",
        "*_*glu*": "an exponential, a reciprocal and a rounding for each gate",
        "quantize_both_transposed_*": "tiles: two words of scales a thread, each with a place",
        "quantize_*_mxfp4_e2m1": "shuffled tiles: scales byte by byte, each with a place",
        "dequantize_last_[bf]*": "tiles: a scale's place for every 8 elements; row-major is met",
        "dequantize_*": "float8 goes by float16 and float32; few elements share a tile's place",
    },
    "flydsl": {
        "*_rms_norm*": "squares and sums, two products, and a rounding to x's dtype",
        "*_sr": "16 random bits an element are integer products and shifts",
        "quantize_[bs]*_h[136]*": "float32 butterflies of what passes through LDS",
        "*_h[136]*": "float32 butterflies: 4 to 6 additions an element; in tiles, a block's place",
        "quantize_both_transposed_*_mxfp6_*": "a sign moves from a byte's bit 7 to 5, both ways",
        "quantize_last_*": "tiles: a scale's place; row-major is met",
    },
}


@dataclasses.dataclass(frozen=True)
class Chip:
    """What bounds a kernel on a chip.

    Attributes:
      arch: that binaries for it have in their names.
      cores: multiprocessors or compute units.
      ghz: the clock that it boosts to.
      tb_per_s: the data sheet's memory speed.
      issued: instructions that a core issues in a clock; where different kinds have issue slots
        of their own, of the kind that most are (on CDNA one of vectors).
      lanes: threads that one is for.
      wanted: the least ratio, where something is wanted.
    """

    arch: str
    cores: int
    ghz: float
    tb_per_s: float
    issued: float = 4  # one for each of four schedulers, on every NVIDIA chip here
    lanes: int = 32
    wanted: float = 0

    def ratio(self, bytes_per_element: float, instructions_per_element: float) -> float:
        """Elements that it can issue the instructions for, over elements that memory can bring."""
        issue = self.cores * self.ghz * 1e9 * self.issued * self.lanes / instructions_per_element
        return issue / (self.tb_per_s * 1e12 / bytes_per_element)


# Cores and clocks as the driver reports them, from XLA's xla/backends/gpu/target_config/specs; the
# B300 is given a B200's 148 cores (the table has 158; fewer is harder), the RTX 5090 and AMD's are
# by their data sheets. A B200's driver says 7.67 TB/s (pytorch/ao#4002); 8 is harder.
CHIPS: Mapping[str, Chip] = {
    "B200": Chip("sm_100f", 148, 1.965, 8.0, wanted=1.3),
    "B300": Chip("sm_100f", 148, 1.965, 8.0),
    "H200": Chip("sm_90a", 132, 1.98, 4.8),
    "RTX PRO 6000": Chip("sm_120f", 188, 2.6, 1.792),
    "RTX 5090": Chip("sm_120f", 170, 2.407, 1.792),
    "MI355X": Chip("gfx950", 256, 2.4, 8.0, issued=1, lanes=64, wanted=1.3),
    # Integers make the codes there, as its conversions give another format.
    "MI300X": Chip("gfx942", 304, 2.1, 5.3, issued=1, lanes=64, wanted=1.0),
}


class Bound(NamedTuple):
    """A variant on a chip as issuing bounds it, for each scale layout: aligned operands count.

    Attributes:
      variant: one that the chip runs.
      chip: its name.
      registers: that a thread takes.
      per_element: instructions; infinite where they are not known.
    """

    variant: Variant
    chip: str
    registers: tuple[int, ...]
    per_element: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """Elements that the chip can issue instructions for, over what memory can bring."""
        moved = bytes_per_element(self.variant)
        return tuple(CHIPS[self.chip].ratio(moved, n) for n in self.per_element)

    @property
    def is_below(self) -> bool:
        """Whether it is slower than wanted, where something is."""
        return min(self.ratios) < CHIPS[self.chip].wanted

    @property
    def reason(self) -> str | None:
        """Why it may be."""
        reasons = REASONS[self.variant.implementation].items()
        return next((why for p, why in reasons if fnmatch(self.variant.name, p)), None)


def bytes_per_element(variant: Variant) -> float:
    """Unquantized, words, values and scales: what a call moves at least, in either direction."""
    # One scale serves a square of 32 x 32, where it is not written 32 times.
    per_scale = BLOCK * BLOCK if variant.form.is_square else BLOCK
    quantized = sum(1 / format.codes_per_byte + 1 / per_scale for format in variant.formats)
    seeds = 4 * sum(kind.stochastic for kind in variant.kinds) / BLOCK  # flips may be known
    return FLOAT_DTYPES[variant.dtype].itemsize + seeds + quantized


def bounds(facts: Mapping[str, Mapping[str, Any]]) -> Iterator[Bound]:
    """A bound for every binary in a manifest, on every chip that runs it."""
    for (name, chip), variant in itertools.product(CHIPS.items(), SHIPPED):
        binary = facts.get(f"{variant.name}.{chip.arch}")
        if chip.arch not in ARCHS[variant.implementation] or binary is None:  # not built here
            continue
        usages = [launch["entries"][0]["usage"] for launch in binary["launches"].values()]
        per_element = tuple(
            u["instructions"]["longest"] / u["elements_per_thread"]
            if u["instructions"]
            else math.inf
            for u in usages
        )
        yield Bound(variant, name, tuple(u["registers"] for u in usages), per_element)


def measured(variant: Variant, rows: Sequence[Mapping[str, Any]], chip: str) -> float | None:
    """The fraction of the memory's speed that was reached at the first required shape."""
    preprocessing = {kinds: name for name, kinds in shapes.PREPROCESSING.items()}
    kinds = variant.kinds[:1] if len({*variant.kinds}) == 1 else variant.kinds
    preprocessing = preprocessing.get(kinds, "unknown")
    form = shapes.form_of(variant.op, variant.form) or ""
    where = {
        "form": shapes.named(form, preprocessing, str(variant.source)),
        "shape": shapes.spell(shapes.TOKENS if variant.source else shapes.REQUIRED[0]),
        "dtype": variant.dtype,
        "format": variant.formats[0].name,
        "scaling": "rceil",
        "scale_layout": "row_major",
    }
    same = len({*variant.formats}) == 1
    found = [row for row in rows if same and where.items() <= row.items()]
    return round(found[0]["gbps"] / CHIPS[chip].tb_per_s / 1e3, 2) if found else None


def cases(_: Args) -> Iterator[Case]:
    """Every variant on every chip."""
    files = {chip: RESULTS / f"{chip.lower()}.json" for chip in CHIPS}
    rows = {chip: read(file)[1] for chip, file in files.items() if file.exists()}
    for bound in bounds(manifest()):
        names = {"chip": bound.chip, "variant": bound.variant.name}
        row = {
            "bytes": round(bytes_per_element(bound.variant), 2),
            "registers": list(bound.registers),
            "instructions": [round(n, 1) for n in bound.per_element],
            "ratio": [round(n, 2) for n in bound.ratios],
            "measured / peak": measured(bound.variant, rows.get(bound.chip, ()), bound.chip),
            "why": (bound.reason or NONE) if bound.is_below else "",
        }
        yield Case(bound.chip, bound.variant.name, names, lambda _, row=row: row)


def checks(_: Args, rows: Sequence[Row]) -> Iterator[tuple[bool, str]]:
    """Whether nothing is below what is wanted of a chip without a reason."""
    for chip in dict.fromkeys(row["chip"] for row in rows if CHIPS[row["chip"]].wanted):
        its = [row for row in rows if row["chip"] == chip]
        count = sum(row["why"] == NONE for row in its)
        below = f"below {CHIPS[chip].wanted} on a {chip} without a reason"
        yield not count, f"{count} of {len(its)} {below}"
