"""The target of a lowering: a platform and its chips, or a chip that a CPU stands in for."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.interpreters import mlir

from jax_mx.launch import chips as chip_table
from jax_mx.launch import store


class Emulated(NamedTuple):
    """The chip that the CPU stands in for (jax_mx.testing.emulate)."""

    chip: str
    device: int  # of the stand-in driver


emulation = jax.make_user_context(default_value=None)  # an `Emulated`; part of JAX's caches' keys
traced_for = jax.make_user_context(default_value=None)  # the chips, where a caller names them


def chip_of(device: jax.Device) -> str:
    """The device's chip as its driver names it: "sm_90", "gfx950"; else its platform."""
    if device.platform == "cpu" and emulation.value is not None:
        return emulation.value.chip
    capability = getattr(device, "compute_capability", None)
    if capability is None:
        return device.platform
    return f"sm_{capability.replace('.', '')}" if "gfx" not in capability else capability


def default_device() -> jax.Device:
    """The device that programs run on where their arguments name none."""
    default: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(default, str):
        return jax.local_devices(backend=default)[0]
    return default or jax.local_devices()[0]


def chips_of_trace(arrays: Sequence[Any]) -> list[str]:
    """The chips of the function that is being traced, as far as a trace knows.

    The mesh that is set has the chips, else committed arrays have them, else the default device's
    machine. On a machine without a GPU they are the chips that JAX_MX_ARCHS names, for which
    programs are compiled there.
    """
    if traced_for.value is not None:
        return list(traced_for.value)
    device = _of_mesh() or _of_arrays(arrays) or default_device()
    chips = chips_beside(device)
    if device.platform == "cpu" and emulation.value is None and store.names_chips():
        every = [chip for dsl in chip_table.ARCHS for chip in chip_table.chips_of(dsl)]
        return store.exported(every) or chips
    return chips


def _of_mesh() -> jax.Device | None:
    """A device of the platform that the mesh which is set lies on; None where none is."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    try:
        return None if device is None else jax.local_devices(backend=device.platform)[0]
    except RuntimeError:  # a mesh of devices that are not here
        return None


def _of_arrays(arrays: Sequence[Any]) -> jax.Device | None:
    """A device of arrays that are committed to one; None of tracers, which do not say it."""
    for x in jax.tree.leaves(arrays):
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed:
            return min(x.devices(), key=lambda device: device.id)
    return None


def chips_beside(device: jax.Device) -> list[str]:
    """The chips that a program for this device is lowered for: all of its kind in this process.

    JAX lowers once for all of them.
    """
    return sorted({chip_of(other) for other in device.client.local_devices()})


@dataclasses.dataclass(frozen=True)
class _Gpu(jax.sharding.AbstractDevice):
    """A GPU that need not be here, as far as Pallas asks for it."""

    compute_capability: str


@contextlib.contextmanager
def pallas_lowers_for(chips: Sequence[str], ctx: Any) -> Iterator[Any]:
    """Gives a context in which Pallas lowers for the first of these chips, not for those here.

    The chip that runs such a program compiles it.
    """
    if not chips or not chips[0].startswith("sm_"):
        yield ctx
        return
    capability = chips[0].removeprefix("sm_")
    device = _Gpu(chips[0], None, "cuda", f"{capability[:-1]}.{capability[-1]}")

    def there(aval: Any) -> Any:
        mesh = aval.sharding.mesh.update(abstract_device=device)
        return aval.update(sharding=aval.sharding.update(mesh=mesh))

    mesh = jax.sharding.get_abstract_mesh().update(abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield ctx.replace(avals_in=[*map(there, ctx.avals_in)])


def platform_of(chip: str) -> str:
    """JAX's platform that a chip (or a device without kernels, by its platform) belongs to.

    Raises:
      ValueError: no chip is called that.
    """
    for pattern, platform in ((r"sm_\d{2,3}", "cuda"), (r"gfx[0-9a-f]{3,4}", "rocm")):
        if re.fullmatch(pattern, chip):
            return platform
    if chip not in ("cpu", "tpu"):
        known = ", ".join(c for dsl in chip_table.ARCHS for c in chip_table.chips_of(dsl))
        raise ValueError(f"{chip!r} is no chip's name; use a jax.Device, or one like {known}, cpu")
    return chip


def _chips(ctx: mlir.LoweringRuleContext, platform: str) -> list[str] | None:
    """The chips that a program is lowered for; None where no device is here (export, topology)."""
    module = ctx.module_context
    if module.lowering_parameters.for_export or tuple(module.platforms) != (platform,):
        return None
    if module.backend is None or module.backend.platform not in (platform, "gpu"):
        return None
    if not (devices := module.backend.local_devices()):
        return None  # of a topology that is compiled for and not here, as an export is
    return chips_beside(devices[0])


class Target(NamedTuple):
    """A platform and its chips, for which a call is lowered.

    Attributes:
      platform: JAX's name of it.
      chips: as drivers name them; None for an export, which whoever lowers finds chips for.
      device: of the stand-in driver, in emulation.
      partitioned: whether XLA splits the program among several devices, at least along some axes.
      devices: the number of these devices.
      is_mixed: whether a shard_map around it splits it along other axes.
      several: whether the program is lowered for other platforms, too.
    """

    platform: str
    chips: list[str] | None
    device: int | None = None
    partitioned: bool = False
    devices: int = 1
    is_mixed: bool = False
    several: bool = False

    def is_for(self, chips: str) -> bool:
        """Whether the program is for these chips alone, as far as it is known."""
        if self.chips is not None:
            return self.chips == chips.split()
        platforms = {platform_of(chip) for chip in chips.split()}
        return not self.several and platforms == {self.platform}

    @property
    def carries(self) -> bool:
        """Whether the program carries its kernels, as it may leave this machine."""
        return self.chips is None

    def shards_of(self, length: Any, unit: int) -> int:
        """In how many equal parts devices may have an axis: one for each device, or one.

        One where a part for each device would not hold whole units.
        """
        if jax.export.is_symbolic_dim(length) or length % (self.devices * unit):
            return 1
        return self.devices


def target_of(ctx: mlir.LoweringRuleContext, platform: str | None) -> Target:
    """The target of a rule of this platform; None: a rule of all platforms without their own."""
    platform = platform or (ctx.platforms or ctx.module_context.platforms)[0]
    chips, emulated = _chips(ctx, platform), emulation.value
    exports = ctx.module_context.lowering_parameters.for_export
    if platform == "cpu" and emulated is not None and not exports:
        return Target(platform_of(emulated.chip), [emulated.chip], emulated.device)
    devices, is_mixed = _split_among(ctx.module_context.axis_context)
    several = len(ctx.module_context.platforms) > 1
    return Target(platform, chips, None, devices > 1, devices, is_mixed, several)


def _split_among(context: Any) -> tuple[int, bool]:
    """Among how many devices XLA's partitioner splits what is lowered in this context of JAX's.

    And whether it leaves others to a shard_map.
    """
    manual = getattr(context, "manual_axes", None)
    if manual is None:
        return getattr(context, "num_devices", 1), False
    rest = math.prod(n for name, n in context.mesh.shape.items() if name not in manual)
    return rest, bool(manual)
