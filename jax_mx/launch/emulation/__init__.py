"""Runs AMD kernels on a CPU. Needs what the extra `emulator` brings."""

from contextlib import AbstractContextManager


def emulate(arch: str, *, order: str = "lockstep") -> AbstractContextManager[None]:
    """Within this context, ops on the CPU run AMD's kernels, in an emulator of the chip.

        with emulate("gfx942"):
            y = jax.jit(f)(x)

    Ops lower to the same custom call as on ROCm. The same handler loads the code object, picks the
    entry, packs the arguments and launches, through a stand-in for libamdhip64. Results are the
    bytes that the binary's instructions compute. Emulation does not establish timing, wait
    counters, cache and memory ordering, nor how silicon rounds in its conversion instructions.

    A program that is lowered within the context stays as it is. JAX traces and lowers a function
    again when a caller is in another context.

    Args:
      arch: "gfx942" (MI300X, MI325X) or "gfx950" (MI350X, MI355X).
      order: the turns of a workgroup's waves between barriers: "lockstep" (all take each
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
