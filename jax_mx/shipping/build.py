"""Compiles kernels ahead of time, on a machine without a GPU, into jax_mx/binaries.

    python -m jax_mx.shipping.build --arch sm_90a --arch gfx950 [--only last_bfloat16]
    python -m jax_mx.shipping.build --check | --report

This is for wheels that bring their kernels; without them, kernels are compiled when they are first
used. --arch, or else JAX_MX_ARCHS, names the archs: "all", "native" (the GPUs of this machine) or a
list; the default is none. See launch/build.py.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run by CMake as a file, before the extension exists
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launch"))
    importlib.import_module("worker").without_jax()

from jax_mx.launch import build
from jax_mx.launch.chips import ARCHS
from jax_mx.launch.content import key_of
from jax_mx.quantizing.facts.product_kernels import Binary
from jax_mx.shipping import verified
from jax_mx.shipping.shipped import BINARIES, shipped_archs

EVERY: list[tuple[Binary, str]] = [(b, arch) for b in BINARIES for arch in shipped_archs(b)]
EXECUTED = ("sm_90a", *ARCHS["flydsl"])  # the archs whose binaries must have run, or been emulated


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--arch",
        action="append",
        metavar="ARCH[:TEXT]",
        help="all, native, or an arch, of it only variants with TEXT in the name; may be repeated",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compile nothing; fail unless each binary that is here, in the package or in the "
        "cache, is what jax_mx/verified says was executed",
    )
    parser.add_argument(
        "--report", action="store_true", help="compile nothing; the table of what there is"
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="variants with this in the name")
    args = parser.parse_args()
    asked = args.arch or os.environ.get("JAX_MX_ARCHS", "").replace(",", " ").split()
    if (args.check or args.report) and not args.arch:
        asked = ["all"]
    try:
        jobs = build.picked(EVERY, asked, args.only)
    except ValueError as error:
        parser.error(str(error))
    if args.check:
        return check(jobs)
    failed = not args.report and build.build(jobs, EVERY)
    if jobs:
        build.report(jobs)
    return int(failed)


def check(jobs: Sequence[build.Job]) -> int:
    """Whether each binary that is here is the one that was executed and compared elsewhere."""
    bad, seen, manifest = [], 0, build.read_manifest()
    for variant, arch in jobs:
        facts = manifest.get(build.name_of(variant, arch)) or _cached(variant, arch)
        if facts is None or facts["key"] != key_of(variant, arch):
            continue
        seen += 1
        name, sha256 = build.name_of(variant, arch), facts["sha256"]
        chips = verified.executed_on(arch, variant.name, sha256)
        if chips is None and arch in EXECUTED:
            bad.append(f"{name}: {sha256} is not in jax_mx/verified; record tests that execute it")
        elif arch in EXECUTED and not chips:
            bad.append(f"{name}: jax_mx/verified does not say that it was executed")
        bad += build.spills(facts)
    print("\n".join(bad) or f"{seen} binaries are what was verified")
    return int(bool(bad))


def _cached(variant: Any, arch: str) -> dict[str, Any] | None:
    """The facts of a binary in the user's cache."""
    from jax_mx.launch import store

    artifact = store.find(variant, arch)
    return artifact.facts if artifact else None


if __name__ == "__main__":
    sys.exit(main())
