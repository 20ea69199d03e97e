"""Compiles every binary that ships, on a machine without a GPU.

    python -m jax_mx.kernels.build [--arch sm_90a] [--only last_bfloat16] [--check | --report]

Incremental by content: a binary is compiled again when its key changes, the hash of the compiler's
version, the sources that it comes from, the variant and the arch. Writes jax_mx/binaries, and a
table of what each binary takes. A binary that spills registers fails the build.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import platform
import sys
import types
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):
    # Run by CMake as a file: the package's __init__ would import JAX and the extension, which this
    # build is about to make.
    package = types.ModuleType("jax_mx")
    package.__path__ = [str(PACKAGE)]
    sys.modules["jax_mx"] = package
    sys.path[:] = [path for path in sys.path if path != str(PACKAGE / "kernels")]  # has a flydsl

from jax_mx import formats, layouts  # noqa: E402
from jax_mx.facts.variants import ARCHS, VARIANTS, Variant, layouts_of  # noqa: E402

BINARIES = PACKAGE / "binaries"
VERIFIED = PACKAGE / "verified.json"
SUFFIX = {"cutedsl": "cubin", "flydsl": "hsaco"}
EXECUTED = ("sm_90a", *ARCHS["flydsl"])  # whose binaries must have been, or emulated


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--arch",
        action="append",
        metavar="ARCH[:TEXT]",
        help="only this arch, of it only variants with TEXT in the name; may be repeated",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compile nothing; fail unless jax_mx/binaries is what the sources give, byte for byte "
        "what verified.json says was executed",
    )
    parser.add_argument(
        "--report", action="store_true", help="compile nothing; the table of what there is"
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="variants with this in the name")
    args = parser.parse_args()
    # What `pip install` and `uv run` build, where that is not to be all; to type takes precedence.
    args.arch = args.arch or os.environ.get("JAX_MX_ARCHS", "").replace(",", " ").split()
    known = sorted({arch for archs in ARCHS.values() for arch in archs})
    asked = [arch.partition(":")[::2] for arch in args.arch or known]
    if unknown := {arch for arch, _ in asked} - set(known):
        parser.error(f"unknown arch {', '.join(unknown)}; there are {', '.join(known)}")
    jobs = [
        (variant, arch)
        for variant in VARIANTS
        for arch in ARCHS[variant.implementation]
        if any(arch == one and text in variant.name for one, text in asked)
        if args.only in variant.name
    ]
    if platform.machine() != "x86_64":  # the only one that FlyDSL, like ROCm, is made for
        jobs = [(variant, arch) for variant, arch in jobs if variant.implementation != "flydsl"]
    if args.check:
        return check(jobs)
    failed = not args.report and build(jobs)
    report(jobs)
    return int(failed)


def build(jobs: list[tuple[Variant, str]]) -> int:
    """Brings jax_mx/binaries up to date for `jobs`; drops what is no variant's."""
    BINARIES.mkdir(exist_ok=True)
    path = BINARIES / "manifest.json"
    manifest = json.loads(path.read_text()) if path.exists() else {}
    stale = [job for job in jobs if not _is_current(manifest.get(_name(*job)), *job)]
    print(f"{len(jobs) - len(stale)} of {len(jobs)} binaries are up to date", flush=True)
    bad = []
    for (variant, arch), image, facts in compile_all(stale):
        if complaints := _spills(_name(variant, arch), facts):
            bad += complaints
            continue
        (BINARIES / facts["file"]).write_bytes(image)
        manifest[_name(variant, arch)] = facts
    every = {_name(v, arch) for v in VARIANTS for arch in ARCHS[v.implementation]}
    manifest = {name: facts for name, facts in sorted(manifest.items()) if name in every}
    path.write_text(json.dumps(manifest, indent=1) + "\n")
    keep = {facts["file"] for facts in manifest.values()} | {path.name}
    for file in BINARIES.iterdir():
        if file.name not in keep:
            file.unlink()
    print(*bad, sep="\n", end="\n" * bool(bad))
    return int(bool(bad))


def check(jobs: list[tuple[Variant, str]]) -> int:
    """Whether binaries are what verified.json says: built somewhere else, executed, compared."""
    path = BINARIES / "manifest.json"
    manifest = json.loads(path.read_text()) if path.exists() else {}
    verified = json.loads(VERIFIED.read_text()) if VERIFIED.exists() else {}
    bad = []
    for variant, arch in jobs:
        name = _name(variant, arch)
        facts, entry = manifest.get(name), verified.get(name, {})
        if facts is None or not _is_current(facts, variant, arch):
            bad.append(f"{name}: is not what its source gives; run python -m jax_mx.kernels.build")
            continue
        sha256 = facts["sha256"]
        if entry.get("sha256") != sha256:
            bad.append(
                f"{name}: {sha256} is not in verified.json; record the tests that execute it"
            )
        elif arch in EXECUTED and not entry["executed_on"]:
            bad.append(f"{name}: verified.json does not say that it was executed")
        bad += _spills(name, facts)
    print("\n".join(bad) or f"{len(jobs)} binaries are reproducible and verified")
    return bool(bad)


def _spills(name: str, facts: dict[str, Any]) -> list[str]:
    """A complaint for each entry that needs a stack."""
    return [
        f"{name}: {entry['symbol']} spills {entry['usage']['stack']} bytes of registers"
        for entry in entries_of(facts)
        if entry["usage"]["stack"]
    ]


def entries_of(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a manifest's entry: the facts of every entry point, row-major scales and aligned first."""
    return [entry for launch in facts["launches"].values() for entry in launch["entries"]]


def report(jobs: list[tuple[Variant, str]]) -> None:
    """Prints what each binary's entries for aligned operands take, per scale layout."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    path = BINARIES / "manifest.json"
    manifest = json.loads(path.read_text()) if path.exists() else {}
    title = "The entries for aligned operands. Instructions: that a warp issues, at least - at most"
    table = Table(title=title, box=SIMPLE_HEAD)
    for column in ("variant", "arch", "scales"):
        table.add_column(column, no_wrap=True)
    for column in ("registers", "spilled", "shared", "instructions", "per element"):
        table.add_column(column, justify="right", no_wrap=True)
    last = None
    for variant, arch in jobs:
        names = (variant.name if variant != last else "", arch)
        for layout, launch in manifest.get(_name(variant, arch), {}).get("launches", {}).items():
            table.add_row(*names, layout, *_usage(launch["entries"][0]["usage"]))
            names, last = ("", ""), variant
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _usage(usage: dict[str, Any]) -> list[str]:
    """A row's numbers."""
    counts, each = "not known", ""
    if found := usage["instructions"]:
        ends = found["shortest"], found["longest"]
        counts = "{} - {}".format(*ends) + " a trip" * found["loops"]
        each = "{:.2f} - {:.2f}".format(*(n / usage["elements_per_thread"] for n in ends))
    return [*(str(usage[name]) for name in ("registers", "stack", "shared")), counts, each]


def compile_all(jobs: list[tuple[Variant, str]]):
    """Yields (job, image, facts), with progress on the terminal."""
    if not jobs:
        return
    for name in [name for name in os.environ if name.startswith(("CUTE_DSL_", "FLYDSL_"))]:
        del os.environ[name]  # they change the code, and keys do not know them
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    context = multiprocessing.get_context("spawn")
    with Progress(*columns, TextColumn("{task.fields[last]}"), console=console) as progress:
        task = progress.add_task("Compiling kernels", total=len(jobs), last="")
        # Processes, as no DSL is thread-safe; others for each, as both bring an MLIR of their own.
        for implementation in ARCHS:
            mine = [job for job in jobs if job[0].implementation == implementation]
            with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
                futures = {pool.submit(_compile, *job): job for job in mine}
                done = {}
                for future in as_completed(futures):
                    done[futures[future]] = future.result()
                    name = _name(*futures[future])
                    progress.update(task, advance=1, last=name)
                    if not console.is_terminal:
                        print(f"compiled {name}", flush=True)
                progress.update(task, last="counting instructions")
                _count_instructions(done, pool)
            for job, (image, facts) in done.items():
                yield job, image, facts


def _count_instructions(done: dict[tuple[Variant, str], tuple[bytes, dict]], pool) -> None:
    """Adds them to the facts; all binaries of an arch at once, which is what makes it cheap."""
    batches: dict[str, list[tuple[Variant, str]]] = {}
    for variant, arch in done:
        batches.setdefault(arch, []).append((variant, arch))
    futures = {}
    for arch, jobs in batches.items():
        trips = [{e["symbol"]: e["usage"]["trips"] for e in entries_of(done[j][1])} for j in jobs]
        what = _backend(jobs[0][0]).count_instructions, [done[j][0] for j in jobs], arch, trips
        futures[pool.submit(*what)] = jobs
    for future, jobs in futures.items():
        for job, counts in zip(jobs, future.result(), strict=True):
            facts = done[job][1]
            for entry in entries_of(facts):
                entry["usage"]["instructions"] = counts[entry["symbol"]]


def _compile(variant: Variant, arch: str) -> tuple[bytes, dict[str, Any]]:
    image, facts = _backend(variant).compile_variant(variant, arch)
    file = f"{_name(variant, arch)}.{SUFFIX[variant.implementation]}"
    names = {"key": _key(variant, arch), "file": file, "sha256": hashlib.sha256(image).hexdigest()}
    return image, {**names, **facts}


def _backend(variant: Variant):
    if variant.implementation == "cutedsl":
        from jax_mx.kernels.cutedsl import compile as backend
    else:
        from jax_mx.kernels.flydsl import compile as backend
    return backend


def _name(variant: Variant, arch: str) -> str:
    return f"{variant.name}.{arch}"


def _key(variant: Variant, arch: str) -> str:
    kernels = PACKAGE / "kernels"
    others = {"build", *(v.op for v in VARIANTS)} - {variant.op}  # each op has a file of its own
    files = (*kernels.glob("*.py"), *(kernels / variant.implementation).glob("*.py"))
    tables = [Path(module.__file__) for module in (formats, layouts)]
    sources = [*tables, *sorted(f for f in files if f.stem not in others)]
    what = (_backend(variant).COMPILER, variant, variant.name, layouts_of(variant), arch)
    digest = hashlib.sha256(" ".join(map(str, what)).encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _is_current(facts: dict[str, Any] | None, variant: Variant, arch: str) -> bool:
    if facts is None or facts["key"] != _key(variant, arch):
        return False
    file = BINARIES / facts["file"]
    return file.exists() and hashlib.sha256(file.read_bytes()).hexdigest() == facts["sha256"]


if __name__ == "__main__":
    sys.exit(main())
