"""Measures candidate tiles; where the numbers beside the tables in jax_mx/kernels come from.

python -m benchmarks.sweep build FOLDER      # anywhere: compiles the candidates
python -m benchmarks.sweep run FOLDER        # on the GPU: times and compares each, best first
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import shapes
from jax_mx.formats import FLOAT_DTYPES, MXFP8_E4M3
from jax_mx.variants import VARIANTS, Variant

FORMS = {form.kernel: form for form in shapes.FORMS.values() if form.op != "dequantize"}
# No multiple of what a thread block covers, in any direction.
SMALL = (3, 160, 224)


def candidates(variant: Variant) -> Iterator[Any]:
    """What the variant's kernel class takes as `tile`: those worth a try."""
    from jax_mx.kernels.cutedsl import quantize

    if variant.form == "last":  # Flat: as many bytes in flight per thread as registers allow
        itemsize = FLOAT_DTYPES[variant.dtype].itemsize
        for threads, elements, unroll in itertools.product(
            (128, 256, 512), (4, 8, 16, 32), (1, 2, 4, 8)
        ):
            in_flight = elements * unroll * itemsize
            if 32 <= in_flight <= 256 and elements * itemsize >= 16:
                yield quantize.Strip(threads, elements, unroll)
    else:  # Tiled: how many tiles, and in which order
        for (down, across), band in itertools.product(((4, 2), (8, 2), (4, 4)), (1, 16)):
            yield quantize.Tiling(down, across, band)


def build(folder: Path, arch: str, variants: list[Variant]) -> None:
    """Compiles every candidate of every variant into `folder`; leaves out those that spill."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(variant, tile) for variant in variants for tile in candidates(variant)]
    manifest = {}
    # Processes: the DSL is not thread-safe.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        results = pool.map(functools.partial(_compile, arch), *zip(*jobs, strict=True))
        for (variant, tile), (image, facts) in zip(jobs, results, strict=True):
            is_strip = dataclasses.is_dataclass(tile)
            size = "x".join(map(str, dataclasses.astuple(tile) if is_strip else [tile]))
            spills = bool(facts["usage"][0]["stack"])
            print(f"{variant.name} {size}{': spills, left out' if spills else ''}", flush=True)
            if spills:
                continue
            name = f"{variant.name}.{arch}.{size}"
            (folder / name).write_bytes(image)
            sha256 = hashlib.sha256(image).hexdigest()
            manifest[name] = {"key": "", "file": name, "sha256": sha256, **facts}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    print(len(manifest), "candidates")


def _compile(arch: str, variant: Variant, tile: Any) -> tuple[bytes, dict[str, Any]]:
    from jax_mx.kernels.cutedsl.compile import compile_variant

    return compile_variant(variant, arch, tile=tile)


def run(folder: Path, shape: shapes.Shape, variants: list[Variant]) -> None:
    """Times every candidate on `shape`; compares it with the reference on a small input."""
    from benchmarks import baselines, timing

    manifest = json.loads((folder / "manifest.json").read_text())
    for variant in variants:
        dtype = FLOAT_DTYPES[variant.dtype]
        make = functools.partial(baselines.normal, shape=shape, dtype=dtype)
        inputs = timing.rotate(make, math.prod(shape) * dtype.itemsize)
        rows = []
        for name, facts in manifest.items():
            stem, arch, size = name.split(".")
            if stem != variant.name:
                continue
            call, same = install(folder, f"{stem}.{arch}", facts, variant)
            us = timing.measure(call, inputs).us
            gbps = timing.nbytes((inputs[0], call(*inputs[0]))) / us / 1e3
            rows.append((us, size, gbps, facts["usage"][0]["registers"], same))
        for us, size, gbps, registers, same in sorted(rows):
            print(
                f"{variant.form:17} {variant.dtype:8} {size:8} {us:8.1f} us {gbps:7.1f} GB/s "
                f"{registers:3} registers, equal: {same}",
                flush=True,
            )


def install(folder: Path, name: str, facts: dict[str, Any], variant: Variant) -> tuple[Any, bool]:
    """Makes a candidate the only binary of this process.

    Returns:
      The jitted op that it now serves, and whether that gives the reference's bytes.
    """
    import jax
    import numpy as np

    import jax_mx
    from benchmarks import baselines
    from jax_mx import artifacts

    artifacts.BINARIES = folder
    artifacts.manifest = lambda: {name: facts}
    artifacts.load.cache_clear()
    jax.clear_caches()
    form = FORMS[variant.form]
    op = functools.partial(getattr(jax_mx, form.op), format=variant.formats[0], **form.options)
    call = jax.jit(functools.partial(op, implementation="cutedsl"))
    x = baselines.normal(jax.random.key(1), SMALL, FLOAT_DTYPES[variant.dtype])
    pairs = zip(jax.tree.leaves(call(x)), jax.tree.leaves(op(x, implementation="xla")), strict=True)
    return call, all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("action", choices=("build", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--shape", default="8x7168x7168")
    parser.add_argument("--form", nargs="+", choices=FORMS, default=["last"])
    parser.add_argument("--dtype", nargs="+", choices=FLOAT_DTYPES, default=[*FLOAT_DTYPES])
    args = parser.parse_args()
    variants = [
        v
        for v in VARIANTS
        if v.form in args.form and v.dtype in args.dtype and set(v.formats) == {MXFP8_E4M3}
    ]
    if args.action == "build":
        build(args.folder, args.arch, variants)
    else:
        (shape,) = shapes.parse(args.shape)
        run(args.folder, shape, variants)


if __name__ == "__main__":
    main()
