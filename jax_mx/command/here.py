"""For `python -m jax_mx`: devices, the implementations that serve them, and compiled kernels."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jax_mx.command.output import Table
from jax_mx.formats.formats import FLOAT_DTYPES
from jax_mx.launch import store, toolchains
from jax_mx.launch.chips import ARCHS, arch_of
from jax_mx.launch.targets import chip_of, chips_beside
from jax_mx.quantizing.facts.product_kernels import Binary
from jax_mx.quantizing.planning import Options, planned
from jax_mx.quantizing.registry import Support
from jax_mx.quantizing.support import support_of
from jax_mx.shipping import verified
from jax_mx.shipping.shipped import SHIPPED

OPS = ("quantize", "quantize_both", "dequantize")
# Files that drivers leave on a machine, and how JAX gets to see the GPU.
DRIVERS = {
    "/proc/driver/nvidia/version": "an NVIDIA GPU; install jax[cuda13] (in a checkout: uv run "
    "--extra cuda13)",
    "/dev/kfd": "an AMD GPU; install JAX's ROCm plugin",
}
# Where a kernel comes from, from the best place to the worst, and the table's words for it.
SOURCES = {
    "package": "kernels of the package",
    "cache": "kernels in the cache",
    "compiled on demand": "kernels, compiled at the first call",
}


def devices() -> dict[str, tuple[dict[str, Any], jax.Device]]:
    """The facts and one device of each kind, by a text such as "8 x NVIDIA H200 (sm_90)"."""
    alike: dict[tuple[str, str], list[jax.Device]] = {}
    for device in jax.devices():
        alike.setdefault((device.device_kind, chip_of(device)), []).append(device)
    return {
        f"{len(them)} x {name}" + f" ({chip})" * (chip != name): (
            {"kind": name, "chip": chip, "count": len(them)},
            them[0],
        )
        for (name, chip), them in alike.items()
    }


def hidden_gpu() -> str:
    """A sentence about a GPU that the machine has and JAX does not see, or nothing."""
    if jax.default_backend() != "cpu":
        return ""
    advice = next((advice for path, advice in DRIVERS.items() if Path(path).exists()), "")
    return f"This JAX sees no GPU, but the machine has {advice}." if advice else ""


def support(op: str, device: jax.Device, array: Any, format: str, axis: int = -1) -> Support:
    """The implementation that serves a call on arrays like `array`, all else by default."""
    return support_of(_planned(op, array, format, axis), device)


def _planned(op: str, array: Any, format: str, axis: int) -> Any:
    both = op == "quantize_both"
    return planned(op, array, Options.both((format,) * 2) if both else Options((format,), axis))


def servings(formats: Sequence[str], axis: int, dtype: str) -> list[dict[str, Any]]:
    """The implementation that serves each op and format, on each kind of device."""
    abstract = jax.ShapeDtypeStruct((64,) * max(2, axis + 1, -axis), FLOAT_DTYPES[dtype])
    return [
        {"device": name, "op": op, "format": format}
        | _serving(device, _planned(op, abstract, format, axis))
        for name, (_, device) in devices().items()
        for op in OPS
        for format in formats
    ]


def _serving(device: jax.Device, plan: Any) -> dict[str, Any]:
    taken = support_of(plan, device)
    archs = [arch for chip in chips_beside(device) if (arch := arch_of(chip)) is not None]
    sources = [_source(kernel, arch) for kernel in taken.kernels for arch in archs]
    return {
        "implementation": taken.implementation,
        "kernels": [kernel.name for kernel in taken.kernels],
        "via_transpose": taken.via_transpose,
        "source": max(sources, key=[*SOURCES].index, default=""),
        "reason": "" if taken.kernels else support_of(plan, device, kernels_only=True).reason,
    }


def _source(kernel: Binary, arch: str) -> str:
    artifact = store.find(kernel, arch)
    if artifact is None:
        return "compiled on demand"
    return "package" if artifact.folder == store.BINARIES else "cache"


def serving_table(servings: Sequence[dict[str, Any]]) -> Table:
    """A row for each answer; formats with the same answer share it."""
    answers: dict[tuple[str, ...], list[str]] = {}
    for serving in servings:
        text = serving["reason"] or SOURCES[serving["source"]]
        text += ", between transposes by XLA" * serving["via_transpose"]
        answer = serving["op"], serving["implementation"], text
        answers.setdefault(answer, []).append(serving["format"])
    rows = [[op, ", ".join(formats), name, text] for (op, name, text), formats in answers.items()]
    return ("op", "formats", "takes", "kernels, or why there are none"), rows


def held() -> list[dict[str, Any]]:
    """The compiled kernels of each arch."""
    return [
        {"arch": arch, "products": ", ".join(chips.values())} | _held(dsl, arch)
        for dsl, archs in ARCHS.items()
        for arch, chips in archs.items()
    ]


def _held(dsl: str, arch: str) -> dict[str, Any]:
    artifacts = {
        kernel.name: artifact
        for kernel in SHIPPED
        if kernel.implementation == dsl and (artifact := store.find(kernel, arch)) is not None
    }
    recorded = verified.read(arch)
    executed = [
        recorded[name]["executed_on"]
        for name, artifact in artifacts.items()
        if recorded.get(name, {}).get("sha256") == artifact.sha256
    ]
    package = sum(artifact.folder == store.BINARIES for artifact in artifacts.values())
    return {
        "package": package,
        "cache": len(artifacts) - package,
        "executed": sum(map(bool, executed)),
        # An entry names a device, or a device and the tool under which it ran.
        "executed_on": sorted({run.split(", ")[0] for runs in executed for run in runs}),
        "demand": toolchains.obstacle(dsl),
    }


def held_table(held: Sequence[dict[str, Any]]) -> Table:
    """A row for each arch."""
    rows = [
        [
            *(str(arch[key]) for key in ("arch", "products", "package", "cache")),
            ": ".join([str(arch["executed"]), ", ".join(arch["executed_on"])]).removesuffix(": "),
        ]
        for arch in held
    ]
    return ("arch", "GPUs", "in the package", "in the cache", "executed and compared"), rows


def demands() -> Iterator[str]:
    """A sentence for each DSL: whether kernels that are not there are compiled on demand."""
    for dsl, archs in ARCHS.items():
        obstacle = toolchains.obstacle(dsl)
        answer = "compiled at the first call that takes them"
        answer = f"not on this machine: {obstacle}" if obstacle else answer
        yield f"Kernels in neither, for {', '.join(archs)}: {answer}."
