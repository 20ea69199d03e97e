"""Measures candidate tiles; where the numbers beside the tables in jax_mx/kernels come from.

python -m benchmarks.sweep build FOLDER      # anywhere: compiles the candidates
python -m benchmarks.sweep run FOLDER        # on the GPU: times and compares each, best first
"""

import argparse
import hashlib
import itertools
import json
from pathlib import Path

from jax_mx.variants import VARIANTS, Variant

FORMATS = ("mxfp8_e4m3",)


def candidates(variant: Variant):
    """The tiles worth a try: as many bytes in flight per thread as registers allow."""
    from jax_mx.formats import FLOAT_DTYPES
    from jax_mx.kernels.cutedsl.quantize import Tile

    itemsize = FLOAT_DTYPES[variant.dtype].itemsize
    for threads, elements, unroll in itertools.product(
        (128, 256, 512), (4, 8, 16, 32), (1, 2, 4, 8)
    ):
        in_flight = elements * unroll * itemsize
        if 32 <= in_flight <= 256 and elements * itemsize >= 16:
            yield Tile(threads, elements, unroll)


def build(folder: Path, arch: str) -> None:
    """Compiles every candidate of every variant into `folder`."""
    from jax_mx.kernels.cutedsl.compile import compile_variant

    folder.mkdir(parents=True, exist_ok=True)
    manifest = {}
    for variant in VARIANTS:
        if variant.format.name not in FORMATS:
            continue
        for tile in candidates(variant):
            image, facts = compile_variant(variant, arch, tile=tile)
            if any(usage["stack"] for usage in facts["usage"][:1]):
                continue
            name = f"{variant.name}.{arch}.{tile.threads}x{tile.elements}x{tile.unroll}"
            (folder / name).write_bytes(image)
            sha256 = hashlib.sha256(image).hexdigest()
            manifest[name] = {"key": "", "file": name, "sha256": sha256, **facts}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    print(len(manifest), "candidates")


def run(folder: Path, shape: tuple[int, ...]) -> None:
    """Times every candidate on `shape`, bit for bit equal to the reference on a small input."""
    import jax
    import jax.numpy as jnp

    import jax_mx
    from benchmarks import timing
    from jax_mx import artifacts

    manifest = json.loads((folder / "manifest.json").read_text())
    artifacts.BINARIES = folder
    rows = []
    for variant in VARIANTS:
        mine = {n: f for n, f in manifest.items() if n.startswith(f"{variant.name}.")}
        keys = jax.random.split(jax.random.key(0), 3)
        if not mine:
            continue
        xs = [jax.random.normal(key, shape, jnp.dtype(variant.dtype)) for key in keys]
        for name, facts in mine.items():
            stem, arch, tile = name.split(".")
            artifacts.manifest = lambda n=f"{stem}.{arch}", f=facts: {n: f}
            artifacts.load.cache_clear()
            jax.clear_caches()

            def call(x, variant=variant):
                q = jax_mx.quantize(x, variant.format, implementation="cutedsl")
                return q.values, q.scales

            small = xs[0].reshape(-1)[: 32 * 1001]
            want = jax_mx.quantize(small, variant.format, implementation="xla")
            got = jax.jit(call)(small)
            same = all(
                bool(
                    (
                        jax.lax.bitcast_convert_type(a, jnp.uint8)
                        == jax.lax.bitcast_convert_type(b, jnp.uint8)
                    ).all()
                )
                for a, b in zip(got, (want.values, want.scales), strict=True)
            )
            us = timing.measure(jax.jit(call), [(x,) for x in xs]).us
            size = xs[0].size
            gbps = (xs[0].nbytes + size + size // 32) / us / 1e3
            rows.append((variant.dtype, tile, us, gbps, facts["usage"][0]["registers"], same))
    for row in sorted(rows, key=lambda r: (r[0], r[2])):
        print(
            "{:9} {:12} {:8.1f} us {:7.1f} GB/s {:3} registers, equal: {}".format(*row), flush=True
        )


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=("build", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--shape", default="8x7168x7168")
    args = parser.parse_args()
    if args.action == "build":
        build(args.folder, args.arch)
    else:
        run(args.folder, tuple(int(n) for n in args.shape.split("x")))


if __name__ == "__main__":
    main()
