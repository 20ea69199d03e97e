"""Runs AMD kernels on a CPU. Needs what the extra `emulator` brings."""

from contextlib import AbstractContextManager


def emulate(arch: str, *, order: str = "lockstep") -> AbstractContextManager[None]:
    """Within this context, ops on the CPU run AMD's kernels, in an emulator of the chip.

    They lower to the same custom call as on ROCm; the same handler loads the real code object,
    picks the entry, packs the arguments and launches, through a stand-in for libamdhip64. Results
    are those bytes that the binary's instructions compute. What this cannot establish: timing, wait
    counters, cache and memory ordering, and how silicon rounds in its conversion instructions.

    What counts is where a program is lowered: one that was lowered within the context stays what
    it is; JAX traces and lowers a function again when it is called in another one.

    Args:
      arch: "gfx942" (MI300X, MI325X) or "gfx950" (MI350X, MI355X).
      order: how the waves of a workgroup take turns between barriers: "lockstep" (all take each
        instruction together), "serial" (one after the other), "reversed" (the last one first).

    Raises:
      ValueError: an unknown arch or order.
      ModuleNotFoundError: the extra is not installed.
    """
    from jax_mx.launch import targets
    from jax_mx.launch.chips import ARCHS
    from jax_mx.launch.toolchains import EMULATOR, install

    if arch not in ARCHS["flydsl"]:
        known = ", ".join(ARCHS["flydsl"])
        raise ValueError(f"emulate: arch {arch!r} is unknown; use one of {known}")
    try:
        from jax_mx.launch.emulation import hip
    except ModuleNotFoundError as error:
        message = f"emulate: this needs {error.name}; {install(*EMULATOR)}"
        raise ModuleNotFoundError(message, name=error.name) from error
    return targets.emulation(targets.Emulated(arch, hip.device(arch, order)))
