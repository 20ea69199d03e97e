"""For `python -m jax_mx`: what this installation runs on this machine."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jax_mx.command.output import Column
from jax_mx.facts import toolchains, verified
from jax_mx.facts.chips import ARCHS, arch_of
from jax_mx.facts.formats import FLOAT_DTYPES
from jax_mx.facts.products import Binary
from jax_mx.kernels.shipped import SHIPPED
from jax_mx.lowering import store
from jax_mx.lowering.registry import Support
from jax_mx.lowering.targets import chip_of, chips_beside
from jax_mx.ops.planning import Options, planned
from jax_mx.ops.support import support_of

OPS = ("quantize", "quantize_both", "dequantize")
# What a driver leaves on a machine, and how JAX gets to see its GPUs.
DRIVERS = {
    "/proc/driver/nvidia/version": "an NVIDIA GPU; install jax[cuda13] (in a checkout: uv run "
    "--extra cuda13)",
    "/dev/kfd": "an AMD GPU; install JAX's ROCm plugin",
}


@dataclasses.dataclass(frozen=True)
class Device:
    """The devices of one kind.

    Attributes:
      kind: JAX's name of it.
      chip: as its driver names it.
      count: how many there are.
    """

    kind: str
    chip: str
    count: int

    def __str__(self) -> str:
        return f"{self.count} x {self.kind}" + f" ({self.chip})" * (self.chip != self.kind)


@dataclasses.dataclass(frozen=True)
class Serving:
    """What `implementation=None` takes for one op and format on one kind of device.

    Attributes:
      device: the kind.
      op: the op.
      format: the format's name.
      implementation: the one that is taken.
      kernels: names of its kernels.
      via_transpose: whether XLA transposes around them.
      source: where the kernels come from: "package", "cache", "compiled on demand"; "" for "xla".
      reason: why no kernel serves the call; empty where one does.
    """

    device: str
    op: str
    format: str
    implementation: str
    kernels: tuple[str, ...]
    via_transpose: bool
    source: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Held:
    """The kernels of one arch.

    Attributes:
      arch: what they are compiled for.
      products: the names under which chips are sold that run them.
      package: how many the package holds.
      cache: how many the user's cache holds.
      executed: how many of both are recorded as executed and compared bit for bit.
      executed_on: on which devices.
      demand: why others cannot be compiled on demand; empty where they can.
    """

    arch: str
    products: str
    package: int
    cache: int
    executed: int
    executed_on: tuple[str, ...]
    demand: str


SERVING = (
    Column("op"),
    Column("formats", wraps=True),
    Column("takes"),
    Column("kernels, or why there are none", wraps=True),
)
HELD = (
    Column("arch"),
    Column("GPUs", wraps=True),
    Column("in the package", number=True),
    Column("in the cache", number=True),
    Column("executed and compared", wraps=True, optional=1),
)


def devices() -> dict[Device, jax.Device]:
    """One device of each kind that JAX sees."""
    count = Counter((device.device_kind, chip_of(device)) for device in jax.devices())
    one = {(d.device_kind, chip_of(d)): d for d in reversed(jax.devices())}
    return {Device(kind, chip, n): one[kind, chip] for (kind, chip), n in count.items()}


def hidden_gpu() -> str:
    """A sentence about a GPU that the machine has and JAX does not see, or nothing."""
    if jax.default_backend() != "cpu":
        return ""
    found = [what for path, what in DRIVERS.items() if Path(path).exists()]
    return f"This JAX sees no GPU, but the machine has {found[0]}." if found else ""


def support(op: str, device: jax.Device, like: Any, format: str, axis: int = -1) -> Support:
    """What serves a call on arrays like `like`; other options are the defaults."""
    return support_of(_planned(op, like, format, axis), device)


def _planned(op: str, like: Any, format: str, axis: int) -> Any:
    both = op == "quantize_both"
    return planned(op, like, Options.both((format,) * 2) if both else Options((format,), axis))


def servings(formats: Sequence[str], axis: int, dtype: str) -> list[Serving]:
    """What serves each op, on each kind of device."""
    like = jax.ShapeDtypeStruct((64,) * max(2, axis + 1, -axis), FLOAT_DTYPES[dtype])
    return [
        _serving(str(kind), device, op, _planned(op, like, format, axis), format)
        for kind, device in devices().items()
        for op in OPS
        for format in formats
    ]


def _serving(kind: str, device: jax.Device, op: str, plan: Any, format: str) -> Serving:
    taken, source, reason = support_of(plan, device), "", ""
    if taken.kernels:
        archs = [arch for chip in chips_beside(device) if (arch := arch_of(chip)) is not None]
        sources = [source_of(kernel, arch) for kernel in taken.kernels for arch in archs]
        source = max(sources, key=("package", "cache", "compiled on demand").index)
    else:
        reason = support_of(plan, device, kernels_only=True).reason
    names = tuple(kernel.name for kernel in taken.kernels)
    return Serving(
        kind, op, format, taken.implementation, names, taken.via_transpose, source, reason
    )


def source_of(kernel: Binary, arch: str) -> str:
    """Where a kernel comes from."""
    found = store.find(kernel, arch)
    if found is None:
        return "compiled on demand"
    return "package" if found.folder == store.BINARIES else "cache"


def serving_rows(found: Sequence[Serving]) -> Iterator[list[str]]:
    """Rows of SERVING; formats with the same answer share one."""
    texts = {
        "package": "kernels of the package",
        "cache": "kernels in the cache",
        "compiled on demand": "kernels, compiled at the first call",
        "": "",
    }
    answers: dict[tuple[str, ...], list[str]] = {}
    for each in found:
        text = texts[each.source] + ", between transposes by XLA" * each.via_transpose
        answer = (each.op, each.implementation, each.reason or text)
        answers.setdefault(answer, []).append(each.format)
    for (op, implementation, text), formats in answers.items():
        yield [op, ", ".join(formats), implementation, text]


def held() -> list[Held]:
    """What the package and the cache hold for each arch."""
    return [
        _held(dsl, arch, ", ".join(chips.values()))
        for dsl, archs in ARCHS.items()
        for arch, chips in archs.items()
    ]


def _held(dsl: str, arch: str, products: str) -> Held:
    kernels = [variant for variant in SHIPPED if variant.implementation == dsl]
    found = {kernel.name: store.find(kernel, arch) for kernel in kernels}
    there = {name: artifact for name, artifact in found.items() if artifact is not None}
    recorded = verified.read(arch)
    executed = [
        recorded[name]["executed_on"]
        for name, artifact in there.items()
        if recorded.get(name, {}).get("sha256") == artifact.sha256
    ]
    package = sum(artifact.folder == store.BINARIES for artifact in there.values())
    return Held(
        arch=arch,
        products=products,
        package=package,
        cache=len(there) - package,
        executed=sum(map(bool, executed)),
        # An entry is a device, or a device and the tool under which it ran.
        executed_on=tuple(sorted({run.split(", ")[0] for each in executed for run in each})),
        demand=toolchains.obstacle(dsl),
    )


def held_rows(found: Sequence[Held]) -> Iterator[list[str]]:
    """Rows of HELD."""
    for each in found:
        executed = f"{each.executed}: {', '.join(each.executed_on)}" if each.executed else "0"
        yield [each.arch, each.products, str(each.package), str(each.cache), executed]


def demands() -> Iterator[str]:
    """A sentence for each DSL: whether the kernels that are not there are compiled on demand."""
    for dsl, archs in ARCHS.items():
        names = f"Kernels in neither, for {', '.join(archs)}"
        if obstacle := toolchains.obstacle(dsl):
            yield f"{names}: not on this machine: {obstacle}."
        else:
            yield f"{names}: compiled at the first call that takes them."
