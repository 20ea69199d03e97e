"""Chips, and the archs that kernels are compiled for.

A chip is what a driver calls a device: "sm_90" (compute capability 9.0), "gfx950". An arch is what
a compiler targets. NVIDIA's "a" archs run on exactly one capability; an "f" arch runs on its family
(sm_100f: 10.0 and 10.3); a plain arch runs on its own capability and on later ones with the same
first number (sm_80: 8.0 to 8.9).
"""

from collections.abc import Mapping

# By the DSL that compiles for them: arch -> the chips that its binaries serve, with their products.
ARCHS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "cutedsl": {
        "sm_80": {"sm_80": "A100, A30", "sm_86": "A10, A40, RTX 30", "sm_87": "Orin"},
        "sm_89": {"sm_89": "L4, L40S, RTX 40"},
        "sm_90a": {"sm_90": "H100, H200"},
        "sm_100f": {"sm_100": "B200, GB200", "sm_103": "B300, GB300"},
        "sm_120f": {"sm_120": "RTX 50, RTX PRO", "sm_121": "DGX Spark"},
    },
    "flydsl": {
        "gfx942": {"gfx942": "MI300X, MI325X"},
        "gfx950": {"gfx950": "MI350X, MI355X"},
    },
}
# Bytes of shared memory that a thread block may have: on each chip of an arch as many at least.
# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": 8.6, 8.9 and 12.x
# have 99 KB, 8.0 163, 9.0 and 10.x 227. AMD's compiler knows the size of LDS.
SHARED: Mapping[str, int] = {
    "sm_80": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90a": 227 << 10,
    "sm_100f": 227 << 10,
    "sm_120f": 99 << 10,
}
# JAX's name of the platform that a DSL's kernels run on, as lowering has it.
PLATFORMS: Mapping[str, str] = {"cutedsl": "cuda", "flydsl": "rocm"}
DSLS: Mapping[str, str] = {platform: dsl for dsl, platform in PLATFORMS.items()}


def arch_of(chip: str) -> str | None:
    """The arch whose binaries serve a chip; None where there is none."""
    for archs in ARCHS.values():
        for arch, chips in archs.items():
            if chip in chips:
                return arch
    return None


def chips_of(dsl: str) -> list[str]:
    """Every chip that a DSL's kernels serve."""
    return [chip for chips in ARCHS[dsl].values() for chip in chips]


def dsl_of(arch: str) -> str:
    """The DSL that compiles for an arch.

    Raises:
      ValueError: no DSL does; names the archs there are.
    """
    for dsl, archs in ARCHS.items():
        if arch in archs:
            return dsl
    known = ", ".join(arch for archs in ARCHS.values() for arch in archs)
    raise ValueError(f"arch {arch!r} is unknown; use one of {known}")
