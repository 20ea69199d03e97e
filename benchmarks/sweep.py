"""Measures candidate tiles; the tables in jax_mx/kernels/*/tuning come from here.

python -m benchmarks.sweep build FOLDER      # anywhere: compiles the candidates
python -m benchmarks.sweep run FOLDER        # on the GPU: times and compares each, best first

`run` ends with the rows of the chip's table, see jax_mx/kernels/tuning.py: for each variant the
fastest candidate that gives the reference's bytes, with the figures of all. `--table FILE` writes
them as a module, for an arch that has no table of its own yet. Whether a row holds for more entries
than those it was measured on, a person decides, by its "where".
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import hashlib
import itertools
import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import shapes
from jax_mx.facts.directions import FORMS, LAST
from jax_mx.facts.formats import BLOCK, FLOAT_DTYPES, MXFP8_E4M3
from jax_mx.facts.layouts import SCALE_LAYOUTS
from jax_mx.facts.variants import VARIANTS, Variant
from jax_mx.kernels import tuning

if TYPE_CHECKING:
    from benchmarks.__main__ import Case

# What a sweep's row asks of an entry, see `tuning.facts_of`.
WHERE = ("form", "dtype", "codes_per_byte", "tiled_scales")
# No multiple of what a thread block covers, in any direction.
SMALL = (3, 160, 224)


def candidates(variant: Variant) -> Iterator[Any]:
    """What the variant's kernel class takes as `tile`: those worth a try."""
    from jax_mx.kernels.cutedsl import dequantize, kernel, tiled

    if variant.normed:
        yield from _of_norms(variant)
        return
    itemsize = FLOAT_DTYPES[variant.dtype].itemsize
    if variant.form == LAST:  # Flat: as many bytes in flight per thread as registers allow
        for threads, elements, unroll in itertools.product(
            (128, 256, 512), (4, 8, 16, 32), (1, 2, 4, 8)
        ):
            in_flight = elements * unroll * itemsize
            # Of dequantize, 16 bytes of floats a step: more would leave gaps between threads.
            fits = elements * itemsize in ((16,) if variant.op == "dequantize" else range(16, 129))
            if 32 <= in_flight <= 256 and fits:
                yield kernel.Strip(threads, elements, unroll)
    elif variant.op == "quantize":  # Tiled: how many tiles, and in which order
        for (down, across), band in itertools.product(((1, 8), (4, 2), (8, 2), (4, 4)), (1, 64)):
            yield tiled.Tiling(down, across, band)
    else:
        transposed = variant.form.transposed
        depth = 8 if itemsize == 2 or transposed else 4
        sizes = ((4, 1), (4, 2), (8, 1)) if transposed else ((2, 2), (4, 1), (8, 1), (2, 4))
        for (down, across), band in itertools.product(sizes, (1, 64)):
            if transposed or (down * depth * 4 // itemsize) % BLOCK == 0:  # whole blocks
                yield dequantize.Tiling(down, across, depth, band)


def _of_norms(variant: Variant) -> Iterator[Any]:
    from jax_mx.kernels.cutedsl import norms

    if variant.form == LAST:  # Rows: as many bytes in flight as registers allow
        for threads, rows in itertools.product((128, 256), (1, 2, 3, 4)):
            yield norms.Whole(threads, 4, rows)
        return
    sizes = ((4, 2, 2), (4, 4, 4), (8, 2, 4))
    for (down, across, each), lag in itertools.product(sizes, (2, 3, 4, 5, 6)):
        yield norms.Bands(down, across, 1, each, lag)


def build(folder: Path, arch: str, variants: list[Variant]) -> None:
    """Compiles every candidate of every variant into `folder`; leaves out those that spill."""
    (folder / "kernels").mkdir(parents=True, exist_ok=True)
    jobs = [(variant, tile) for variant in variants for tile in candidates(variant)]
    manifest = {}
    # Processes: the DSL is not thread-safe.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        results = pool.map(functools.partial(_compile, arch), *zip(*jobs, strict=True))
        for (variant, tile), (image, facts) in zip(jobs, results, strict=True):
            size = _name(tile)
            launches = facts["launches"].values()
            spills = any(e["usage"]["stack"] for launch in launches for e in launch["entries"])
            print(f"{variant.name} {size}{': spills, left out' if spills else ''}", flush=True)
            if spills:
                continue
            name = f"{variant.name}.{arch}.{size}"
            sha256 = hashlib.sha256(image).hexdigest()
            (folder / "kernels" / sha256).write_bytes(image)
            manifest[name] = {"sha256": sha256, **facts}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    print(len(manifest), "candidates")


def _compile(arch: str, variant: Variant, tile: Any) -> tuple[bytes, dict[str, Any]]:
    from jax_mx.kernels.cutedsl.compile import compile_variant

    return compile_variant(variant, arch, tile=tile)


@dataclasses.dataclass(frozen=True, order=True)
class Timing:
    """What was measured of a candidate."""

    us: float
    tile: str  # as in its file's name
    gbps: float
    registers: int
    same: bool  # whether it gave the reference's bytes


def run(
    folder: Path, shape: shapes.Shape, variants: list[Variant], layout: str
) -> list[dict[str, Any]]:
    """Times every candidate on `shape`; compares it with the reference on a small input.

    Returns:
      A row of the chip's table for each variant.
    """
    import jax

    from benchmarks import timing
    from benchmarks.__main__ import Case

    manifest = json.loads((folder / "manifest.json").read_text())
    rows = []
    for variant in variants:
        form = shapes.form_of(variant.op, variant.form)
        if form is None:
            continue
        format = variant.formats[0].name
        case = Case(form, shape, variant.dtype, format, "rceil", layout, variant.implementation)
        like = jax.eval_shape(case.make, jax.random.key(0))
        inputs = timing.rotate(case.make, timing.nbytes(like))
        timings = []
        for name, facts in manifest.items():
            stem, _, tile = name.split(".")
            if stem != variant.name:
                continue
            call, same = install(folder, facts, case)
            us = timing.measure(call, inputs).us
            gbps = timing.nbytes((inputs[0], call(*inputs[0]))) / us / 1e3
            usage = facts["launches"][layout]["entries"][0]["usage"]
            timings.append(Timing(us, tile, gbps, usage["registers"], same))
        for t in sorted(timings):
            print(
                f"{form:20} {variant.dtype:8} {t.tile:8} {t.us:8.1f} us {t.gbps:7.1f} GB/s "
                f"{t.registers:3} registers, equal: {t.same}",
                flush=True,
            )
        if any(t.same for t in timings):
            rows.append(row_of(variant, layout, shape, timings))
    return rows


def row_of(
    variant: Variant, layout: str, shape: shapes.Shape, timings: list[Timing]
) -> dict[str, Any]:
    """A row of a table of tuning: the fastest tile that is right, and the figures of all."""
    right = sorted(t for t in timings if t.same)
    tiles = {_name(tile): tile for tile in candidates(variant)}
    facts = tuning.facts_of(variant, SCALE_LAYOUTS[layout], True)
    kernel = "Flat" if variant.form == LAST else "Tiled"
    figures = "; ".join(f"({t.tile.replace('x', ', ')}) {t.us:.1f}" for t in right)
    return {
        "kernel": f"{variant.op}.{kernel}",
        "where": {
            name: facts[name] for name in ("form", "dtype", "codes_per_byte", "tiled_scales")
        },
        "value": dataclasses.asdict(tiles[right[0].tile]),
        "date": datetime.date.today().isoformat(),
        "measured": [f"{'x'.join(map(str, shape))}, aligned: {figures}"],
    }


def table(chip: str, rows: list[dict[str, Any]]) -> str:
    """The source of a table of tuning, but for its line breaks, which `ruff format` makes."""
    what = f"Measured on {chip} with benchmarks/sweep.py, in microseconds."
    lines = "".join(f"    {row!r},\n" for row in rows)
    return f'"""{what}"""\n\nCHIP = {chip!r}\n\nROWS = [\n{lines}]\n'


def _name(tile: Any) -> str:
    """A tile in the name of a candidate's file."""
    return "x".join(map(str, dataclasses.astuple(tile)))


def install(folder: Path, facts: dict[str, Any], case: Case) -> tuple[Any, bool]:
    """Makes a candidate the kernel of every call in this process.

    Returns:
      The jitted op that it now serves, and whether that gives the reference's bytes.
    """
    import jax
    import numpy as np

    from jax_mx import _ffi
    from jax_mx.lowering import store

    image = (folder / "kernels" / facts["sha256"]).read_bytes()
    _ffi.intern(facts["sha256"], image)
    artifact = store.Artifact(facts, folder / "kernels", image)
    store.find = store.get = lambda variant, arch: artifact
    jax.clear_caches()
    small = dataclasses.replace(case, shape=SMALL)
    x = small.make(jax.random.key(1))
    got, want = (
        jax.tree.leaves(dataclasses.replace(small, implementation=i).functions()[0](x))
        for i in (case.implementation, "xla")
    )
    same = all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(got, want, strict=True)
    )
    return case.functions()[0], same


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("action", choices=("build", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--shape", default="8x7168x7168")
    parser.add_argument("--op", choices=("quantize", "dequantize"), default="quantize")
    parser.add_argument("--form", nargs="+", choices=FORMS, default=["last"])
    parser.add_argument("--dtype", nargs="+", choices=FLOAT_DTYPES, default=[*FLOAT_DTYPES])
    parser.add_argument("--scale-layout", choices=SCALE_LAYOUTS, default="row_major")
    parser.add_argument("--table", type=Path, metavar="FILE", help="where to write the rows")
    args = parser.parse_args()
    variants = [
        v
        for v in VARIANTS
        if (v.implementation, v.op) == ("cutedsl", args.op)
        and str(v.form) in args.form
        and v.dtype in args.dtype
        and set(v.formats) == {MXFP8_E4M3}
        and not v.kinds
    ]
    if args.action == "build":
        build(args.folder, args.arch, variants)
    else:
        (shape,) = shapes.parse(args.shape)
        rows = run(args.folder, shape, variants, args.scale_layout)
        import jax

        source = table(jax.devices()[0].device_kind, rows)
        print(source)
        if args.table:
            args.table.write_text(source)


if __name__ == "__main__":
    main()
