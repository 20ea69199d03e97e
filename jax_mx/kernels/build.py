"""Compiles kernels ahead of time, on a machine without a GPU, into jax_mx/binaries.

    python -m jax_mx.kernels.build --arch sm_90a --arch gfx950 [--only last_bfloat16]
    python -m jax_mx.kernels.build --check | --report

For wheels that bring their kernels; without them, kernels are compiled when they are first used.
Which archs: those of --arch, else of the environment's JAX_MX_ARCHS, "all", "native" (the GPUs of
this machine) or a list; by default none. Incremental by content: a binary is compiled again when
its key changes (launch/content.py). A binary that spills registers fails the build.
"""

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):  # run by CMake as a file, before the extension exists
    sys.path.insert(0, str(PACKAGE / "launch"))
    importlib.import_module("worker").without_jax()

from jax_mx.facts import verified  # noqa: E402
from jax_mx.facts.product_kernels import Binary  # noqa: E402
from jax_mx.kernels.shipped import BINARIES as EVERY  # noqa: E402
from jax_mx.kernels.shipped import shipped_archs  # noqa: E402
from jax_mx.launch.chips import ARCHS, arch_of  # noqa: E402
from jax_mx.launch.content import key_of  # noqa: E402

BINARIES = PACKAGE / "binaries"
EXECUTED = ("sm_90a", *ARCHS["flydsl"])  # the archs whose binaries must have run, or been emulated
Job = tuple[Binary, str]  # a variant and an arch


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
        jobs = jobs_of(asked, args.only)
    except ValueError as error:
        parser.error(str(error))
    if args.check:
        return check(jobs)
    failed = not args.report and build(jobs)
    if jobs:
        report(jobs)
    return int(failed)


def jobs_of(asked: Iterable[str], only: str = "") -> list[Job]:
    """What is to be compiled.

    Args:
      asked: "all", "native", "sm_90a", "sm_90a:bfloat16".
      only: a text that variants have in their names.

    Raises:
      ValueError: an unknown arch.
    """
    known = [arch for archs in ARCHS.values() for arch in archs]
    pairs: list[tuple[str, str]] = []
    for name, _, text in (arch.partition(":") for arch in asked):
        archs = {"all": known, "native": native(), "none": []}.get(name, [name])
        pairs += [(arch, text) for arch in archs]
    if unknown := {arch for arch, _ in pairs} - {*known}:
        raise ValueError(f"unknown arch {', '.join(unknown)}; there are {', '.join(known)}")
    jobs = [
        (variant, arch)
        for variant in EVERY
        for arch in shipped_archs(variant)
        if any(arch == one and text in variant.name for one, text in pairs)
        if only in variant.name
    ]
    if platform.machine() != "x86_64":  # the only one that FlyDSL, like ROCm, is made for
        jobs = [(variant, arch) for variant, arch in jobs if variant.implementation != "flydsl"]
    return jobs


def native() -> list[str]:
    """The archs of this machine's GPUs."""
    chips = set()
    try:
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
        chips |= {f"sm_{capability.replace('.', '')}" for capability in found}
    except (OSError, subprocess.CalledProcessError):
        pass  # no NVIDIA driver
    for node in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        for name, _, value in (line.partition(" ") for line in node.read_text().splitlines()):
            if name == "gfx_target_version" and int(value):  # 90402: gfx942
                major, minor, step = int(value) // 10000, int(value) // 100 % 100, int(value) % 100
                chips.add(f"gfx{major}{minor}{step:x}")
    return sorted({arch for chip in chips if (arch := arch_of(chip))})


# ---- building ---
def build(jobs: list[Job]) -> int:
    """Brings jax_mx/binaries up to date for `jobs`; drops what is no variant's. 1 if some spill."""
    BINARIES.mkdir(exist_ok=True)
    path = BINARIES / "manifest.json"
    manifest = read_manifest()
    stale = [job for job in jobs if not is_current(manifest.get(name_of(*job)), *job)]
    if jobs:
        print(f"{len(jobs) - len(stale)} of {len(jobs)} binaries are up to date", flush=True)
    bad = []
    for image, facts in compile_all(stale):
        if complaints := spills(facts):
            bad += complaints
            continue
        (BINARIES / facts["sha256"]).write_bytes(image)
        manifest[facts["name"]] = facts
    every = {name_of(v, arch) for v in EVERY for arch in shipped_archs(v)}
    manifest = {name: facts for name, facts in sorted(manifest.items()) if name in every}
    path.write_text(json.dumps(manifest, indent=1) + "\n")
    keep = {facts["sha256"] for facts in manifest.values()} | {path.name}
    for file in BINARIES.iterdir():
        if file.name not in keep:
            file.unlink()
    print(*bad, sep="\n", end="\n" * bool(bad))
    return int(bool(bad))


def read_manifest() -> dict[str, dict[str, Any]]:
    """`{"<variant>.<arch>": facts}` of jax_mx/binaries."""
    path = BINARIES / "manifest.json"
    return json.loads(path.read_text()) if path.exists() else {}


def is_current(facts: dict[str, Any] | None, variant: Binary, arch: str) -> bool:
    """Whether the binary of these facts is there, whole, and what the sources give."""
    if facts is None or facts["key"] != key_of(variant, arch):
        return False
    file = BINARIES / facts["sha256"]
    return file.exists() and hashlib.sha256(file.read_bytes()).hexdigest() == facts["sha256"]


def compile_all(jobs: list[Job]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields (image, facts), with progress on the terminal."""
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
        for dsl in ARCHS:
            mine = [job for job in jobs if job[0].implementation == dsl]
            with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
                futures = {pool.submit(_compile, *job): job for job in mine}
                done = {}
                for future in as_completed(futures):
                    done[futures[future]] = future.result()
                    name = name_of(*futures[future])
                    progress.update(task, advance=1, last=name)
                    if not console.is_terminal:
                        print(f"compiled {name}", flush=True)
            yield from done.values()


def _compile(variant: Binary, arch: str) -> tuple[bytes, dict[str, Any]]:
    """In a process of a pool."""
    from jax_mx.launch.worker import compiled

    return compiled(variant, arch)


# ---- checking and reporting ---
def check(jobs: list[Job]) -> int:
    """Whether each binary that is here is the one that was executed and compared elsewhere."""
    bad, seen, manifest = [], 0, read_manifest()
    for variant, arch in jobs:
        facts = manifest.get(name_of(variant, arch)) or _cached(variant, arch)
        if facts is None or facts["key"] != key_of(variant, arch):
            continue
        seen += 1
        name, sha256 = name_of(variant, arch), facts["sha256"]
        chips = verified.executed_on(arch, variant.name, sha256)
        if chips is None and arch in EXECUTED:
            bad.append(f"{name}: {sha256} is not in jax_mx/verified; record tests that execute it")
        elif arch in EXECUTED and not chips:
            bad.append(f"{name}: jax_mx/verified does not say that it was executed")
        bad += spills(facts)
    print("\n".join(bad) or f"{seen} binaries are what was verified")
    return int(bool(bad))


def _cached(variant: Binary, arch: str) -> dict[str, Any] | None:
    """What the user's cache says of a binary."""
    from jax_mx.launch import store

    artifact = store.find(variant, arch)
    return artifact.facts if artifact else None


def spills(facts: dict[str, Any]) -> list[str]:
    """A complaint for each entry that needs a stack."""
    return [
        f"{facts['name']}: {entry['symbol']} spills {entry['usage']['stack']} bytes of registers"
        for entry in entries_of(facts)
        if entry["usage"]["stack"]
    ]


def entries_of(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The facts of every entry point of a binary, row-major scales and aligned first."""
    return [entry for launch in facts["launches"].values() for entry in launch["entries"]]


def report(jobs: list[Job]) -> None:
    """Prints what each binary's entries for aligned operands take, per scale layout."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    manifest = read_manifest()
    table = Table(title="The entries for aligned operands", box=SIMPLE_HEAD)
    for column in ("variant", "arch", "scales"):
        table.add_column(column, no_wrap=True)
    for column in ("registers", "spilled", "shared"):
        table.add_column(column, justify="right", no_wrap=True)
    last = None
    for variant, arch in jobs:
        names = (variant.name if variant != last else "", arch)
        for layout, launch in manifest.get(name_of(variant, arch), {}).get("launches", {}).items():
            usage = launch["entries"][0]["usage"]
            numbers = (str(usage[name]) for name in ("registers", "stack", "shared"))
            table.add_row(*names, layout, *numbers)
            names, last = ("", ""), variant
    if table.rows:
        Console(width=None if sys.stdout.isatty() else 160).print(table)


def name_of(variant: Binary, arch: str) -> str:
    """As the manifest knows a binary."""
    return f"{variant.name}.{arch}"


if __name__ == "__main__":
    sys.exit(main())
