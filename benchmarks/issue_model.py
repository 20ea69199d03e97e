"""How fast chips that are not at hand could run the kernels, as far as issuing instructions goes.

    python -m benchmarks.issue_model [--only last_bfloat16]

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

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks import shapes
from jax_mx.facts.chips import ARCHS
from jax_mx.facts.formats import BLOCK, FLOAT_DTYPES
from jax_mx.facts.variants import Variant
from jax_mx.kernels.shipped import SHIPPED
from jax_mx.lowering.store import manifest

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
RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Bound:
    """What issuing allows a variant on a chip, per scale layout.

    Attributes:
      variant: of which the entries for aligned operands count.
      chip: its name.
      registers: that a thread takes.
      per_element: instructions; infinite where they are not known.
    """

    variant: Variant
    chip: str
    registers: tuple[int, ...]
    per_element: tuple[float, ...]

    @property
    def is_judged(self) -> bool:
        """Whether something is wanted of it."""
        return CHIPS[self.chip].wanted > 0

    @property
    def ratios(self) -> tuple[float, ...]:
        """Elements that the chip can issue instructions for, over what memory can bring."""
        moved = bytes_per_element(self.variant)
        return tuple(CHIPS[self.chip].ratio(moved, n) for n in self.per_element)

    @property
    def reason(self) -> str | None:
        """Why it may be below what is wanted."""
        reasons = REASONS[self.variant.implementation].items()
        return next((why for p, why in reasons if fnmatch(self.variant.name, p)), None)

    @property
    def is_below(self) -> bool:
        """Whether it is slower than wanted."""
        return min(self.ratios) < CHIPS[self.chip].wanted

    @property
    def is_met(self) -> bool:
        """Whether it is as fast as wanted, or has a reason not to be."""
        return not self.is_below or self.reason is not None


def bytes_per_element(variant: Variant) -> float:
    """Unquantized, words, values and scales: what a call moves at least, in either direction."""
    # One scale serves a square of 32 x 32, where it is not written 32 times.
    per_scale = BLOCK * BLOCK if variant.form.is_square else BLOCK
    quantized = sum(1 / format.codes_per_byte + 1 / per_scale for format in variant.formats)
    seeds = 4 * sum(kind.stochastic for kind in variant.kinds) / BLOCK  # flips may be known
    return FLOAT_DTYPES[variant.dtype].itemsize + seeds + quantized


def bounds(facts: Mapping[str, Mapping[str, Any]], only: str = "") -> Iterator[Bound]:
    """Rows of every binary in a manifest, on every chip that runs it."""
    for variant in SHIPPED:
        if only not in variant.name:
            continue
        for name, chip in CHIPS.items():
            if chip.arch not in ARCHS[variant.implementation]:
                continue
            found = facts.get(f"{variant.name}.{chip.arch}")
            if found is None:  # not built here
                continue
            usages = [launch["entries"][0]["usage"] for launch in found["launches"].values()]
            per_element = tuple(
                u["instructions"]["longest"] / u["elements_per_thread"]
                if u["instructions"]
                else math.inf
                for u in usages
            )
            yield Bound(variant, name, tuple(u["registers"] for u in usages), per_element)


def measured(variant: Variant, rows: Sequence[Mapping[str, Any]], chip: str) -> float:
    """The fraction of the memory's speed that was reached at the first required shape, or NaN."""
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
    return found[0]["gbps"] / CHIPS[chip].tb_per_s / 1e3 if found else math.nan


def table(
    found: Sequence[Bound], judge: str, rows: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Table:
    """A line for each variant: numbers per layout on the judging chip, on others the worst ratio.

    `judge` is that chip's name.
    """
    title = "Instructions an element, and how many times as many a chip issues at memory speed"
    result = Table(title=title, box=SIMPLE_HEAD)
    result.add_column("variant", no_wrap=True)
    chips = list(dict.fromkeys(bound.chip for bound in found))
    for header in ("bytes", "registers", "instructions"):
        result.add_column(header, justify="right")
    for chip in chips:
        result.add_column(chip, justify="right")
        if chip in rows:
            result.add_column("measured / peak", justify="right")
    result.add_column(f"why below {CHIPS[judge].wanted}", overflow="fold")
    for variant in dict.fromkeys(bound.variant for bound in found):
        of_chip = {bound.chip: bound for bound in found if bound.variant == variant}
        judged = of_chip.get(judge)
        cells, reason = [f"{bytes_per_element(variant):.2f}", "", ""], Text()
        if judged is not None:
            cells[1:] = _pair(judged.registers, "d"), _pair(judged.per_element, ".1f")
            if judged.is_below:
                reason = Text(judged.reason or "no reason given", "" if judged.reason else "red")
        for chip in chips:
            ratios = of_chip[chip].ratios if chip in of_chip else ()
            cells.append(_pair(ratios if chip == judge else sorted(ratios)[:1], ".2f"))
            if chip in rows:
                fraction = measured(variant, rows[chip], chip)
                cells.append("" if math.isnan(fraction) else f"{fraction:.2f}")
        result.add_row(variant.name, *cells, reason)
    return result


def _pair(numbers: Sequence[float], form: str) -> str:
    """Those of the scale layouts."""
    return " / ".join(format(n, form) for n in numbers)


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's docstring; 1 if a variant is below what is wanted and nobody says why."""
    parser = argparse.ArgumentParser("python -m benchmarks.issue_model")
    parser.add_argument("--only", metavar="TEXT", default="", help="variants with this in the name")
    args = parser.parse_args(argv)
    files = {chip: RESULTS / f"{chip.lower()}.json" for chip in CHIPS}
    rows = {chip: json.loads(f.read_text()) for chip, f in files.items() if f.exists()}
    console = Console(width=None if sys.stdout.isatty() else 190, highlight=False)
    every = list(bounds(manifest(), args.only))
    for name, chip in CHIPS.items():
        judged = [bound for bound in every if bound.chip == name]
        if chip.wanted and judged:
            variants = {bound.variant for bound in judged}
            beside = [b for b in every if b.variant in variants and not b.is_judged]
            console.print(table([*judged, *beside], name, rows))
            count = sum(not bound.is_met for bound in judged)
            where = f"below {chip.wanted} on a {name}"
            console.print(f"{count} of {len(judged)} {where} without a reason")
    judged = [bound for bound in every if bound.is_judged]
    return int(not judged or not all(bound.is_met for bound in judged))


if __name__ == "__main__":
    sys.exit(main())
