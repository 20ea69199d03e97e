"""What is compiled: `Variant`, the table of all that ships, and which one serves a plan.

Only what changes the code of a kernel is a field; scaling mode and sizes are run-time scalars.
Imports nothing of JAX: the kernels' build reads this table too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jax_mx.formats import FLOAT_DTYPES, MXFP8_E4M3, MXFP8_E5M2, Format

if TYPE_CHECKING:
    from jax_mx.plan import Plan


@dataclasses.dataclass(frozen=True)
class Variant:
    """One kernel's source-level choices. Each is compiled once for every arch of its DSL."""

    implementation: str
    op: str
    dtype: str
    format: Format

    @property
    def name(self) -> str:
        """Also the stem of the binary's file and of its entry points."""
        return f"{self.op}_{self.dtype}_{self.format.name}"


# An arch ending in "a" runs on exactly one compute capability: sm_90a on 9.0 (H100, H200),
# sm_100a on 10.0 (B200, GB200), sm_103a on 10.3 (B300, GB300), sm_120a on 12.0 (RTX 50, RTX PRO).
ARCHS: Mapping[str, tuple[str, ...]] = {"cutedsl": ("sm_90a", "sm_100a", "sm_103a", "sm_120a")}

VARIANTS: tuple[Variant, ...] = tuple(
    Variant("cutedsl", "quantize", dtype, format)
    for dtype in FLOAT_DTYPES
    for format in (MXFP8_E4M3, MXFP8_E5M2)
)


def device_arch(arch: str) -> str:
    """The chip that a binary for `arch` runs on, as a driver names it: "sm_90" for "sm_90a"."""
    return arch.rstrip("af") if arch.startswith("sm_") else arch


def choose(plan: Plan, implementation: str) -> Variant:
    """The variant of `implementation` that serves `plan`.

    Raises:
      NotImplementedError: there is none; says why.
    """
    mine = [v for v in VARIANTS if v.implementation == implementation and v.op == plan.op]
    if not mine:
        raise NotImplementedError(f"{plan.op}: {implementation} has no kernel; 'xla' serves it")
    for name, value, served in (
        ("format", plan.format.name, {v.format.name for v in mine}),
        ("dtype", plan.dtype.name, {v.dtype for v in mine}),
        ("axis", plan.axis, {-1}),
        ("scale_layout", plan.scale_layout.name, {"row_major"}),
    ):
        if value not in served:
            have = ", ".join(sorted(map(str, served)))
            raise NotImplementedError(
                f"{plan.op}: {implementation} has no kernel for {name} {value}, only for {have}; "
                "'xla' serves it"
            )
    return next(v for v in mine if (v.format, v.dtype) == (plan.format, plan.dtype.name))
