"""The compilers of kernels: the distributions that the bytes of each DSL's binaries follow from.

Their versions are pinned, here and in pyproject.toml (a test compares both). Where others are
installed, kernels are not compiled on demand: they would be other kernels than those verified.
"""

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

COMPILERS: Mapping[str, Mapping[str, str]] = {
    "cutedsl": {"nvidia-cutlass-dsl": "4.8.1"},
    "flydsl": {"flydsl": "0.5.0", "ziglang": "0.17.1"},
}
# Beyond the DSL: what reads compiled binaries.
READERS: Mapping[str, tuple[str, ...]] = {
    "cutedsl": ("pyelftools",),
    "flydsl": ("pyelftools", "msgpack"),
}
# The emulator of AMD's kernels: tinygrad decodes instructions; its decoder is no public API.
EMULATOR = ("msgpack", "pyelftools", "tinygrad==0.14.0")


def install(*requirements: str) -> str:
    """The command that installs requirements; this package itself may not be on any index."""
    return f"pip install {' '.join(requirements)}"


def obstacle(dsl: str) -> str:
    """Why this machine cannot compile a DSL's kernels, and what to do; empty where it can."""
    if dsl == "flydsl" and platform.machine() != "x86_64":
        return f"flydsl compiles on x86_64 only, this machine is {platform.machine()}"
    pinned = (f"{name}=={version}" for name, version in COMPILERS[dsl].items())
    advice = install(*pinned, *READERS[dsl])
    for distribution, want in COMPILERS[dsl].items():
        installed = _installed(distribution)
        if installed != want:
            have = f"here is {installed}" if installed else "it is not installed"
            return f"to compile it takes {distribution} {want}, {have}; {advice}"
    for distribution in READERS[dsl]:
        if _installed(distribution) is None:
            return f"to compile it takes {distribution}, it is not installed; {advice}"
    return ""


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
