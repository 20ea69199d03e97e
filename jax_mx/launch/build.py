"""Compiles many binaries ahead of time, on a machine without a GPU, into `jax_mx/binaries`.

Incremental by content: a binary is compiled again when its key changes (content.py). A binary that
spills registers fails the build. The list of binaries is the caller's.
"""

import hashlib
import json
import multiprocessing
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from jax_mx.launch.binary import Binary
from jax_mx.launch.chips import ARCHS, arch_of
from jax_mx.launch.content import key_of

BINARIES = Path(__file__).resolve().parents[1] / "binaries"
Job = tuple[Binary, str]  # a binary and an arch


def picked(jobs: Sequence[Job], asked: Iterable[str], only: str = "") -> list[Job]:
    """The jobs that this machine compiles, of those that somebody asks for.

    Args:
      jobs: all there are.
      asked: "all", "native", "sm_90a", "sm_90a:bfloat16".
      only: a text that binaries have in their names.

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
    wanted = [
        (binary, arch)
        for binary, arch in jobs
        if any(arch == one and text in binary.name for one, text in pairs) and only in binary.name
    ]
    if platform.machine() != "x86_64":  # the only one that FlyDSL, like ROCm, is made for
        wanted = [job for job in wanted if job[0].implementation != "flydsl"]
    return wanted


def native() -> list[str]:
    """The archs of this machine's GPUs."""
    chips = set()
    try:
        query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
        out = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        chips |= {f"sm_{capability.replace('.', '')}" for capability in out.split()}
    except (OSError, subprocess.CalledProcessError):
        pass  # no NVIDIA driver
    for node in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        for name, _, value in (line.partition(" ") for line in node.read_text().splitlines()):
            if name == "gfx_target_version" and int(value):  # 90402: gfx942
                major, minor, step = int(value) // 10000, int(value) // 100 % 100, int(value) % 100
                chips.add(f"gfx{major}{minor}{step:x}")
    return sorted({arch for chip in chips if (arch := arch_of(chip))})


def build(jobs: Sequence[Job], every: Sequence[Job]) -> int:
    """Brings the folder up to date for `jobs`, drops what is none of `every`; 1 if some spill."""
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
    names = {name_of(*job) for job in every}
    manifest = {name: facts for name, facts in sorted(manifest.items()) if name in names}
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


def is_current(facts: dict[str, Any] | None, binary: Binary, arch: str) -> bool:
    """Whether the binary of these facts is there, whole, and what the sources give."""
    if facts is None or facts["key"] != key_of(binary, arch):
        return False
    file = BINARIES / facts["sha256"]
    return file.exists() and hashlib.sha256(file.read_bytes()).hexdigest() == facts["sha256"]


def compile_all(jobs: Sequence[Job]) -> Iterator[tuple[bytes, dict[str, Any]]]:
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


def _compile(binary: Binary, arch: str) -> tuple[bytes, dict[str, Any]]:
    """In a process of a pool."""
    from jax_mx.launch.worker import compiled

    return compiled(binary, arch)


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


def report(jobs: Sequence[Job]) -> None:
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


def name_of(binary: Binary, arch: str) -> str:
    """As the manifest knows a binary."""
    return f"{binary.name}.{arch}"
