"""From a variant to a cubin and the facts that launch it. Needs no GPU and no driver."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

from jax_mx.formats.layouts import SCALE_LAYOUTS
from jax_mx.launch import entry
from jax_mx.launch.cutedsl import compile_entries
from jax_mx.quantizing.facts.variants import Variant, layouts_of


def compile_variant(
    variant: Variant, arch: str, layouts: Sequence[str] | None = None, **tuning: Any
) -> tuple[bytes, dict[str, Any]]:
    """The cubin of `variant` for `arch`, and its manifest entry but for names and hashes.

    `layouts` are the scale layouts to compile entries for, all that the variant has by default;
    `tuning` replaces what the kernel's own table says (benchmarks/sweep.py).

    Raises:
      RuntimeError: the compiler gave no cubin, or its kernels are not the entries asked for.
    """
    module = importlib.import_module(f"jax_mx.quantizing.kernels.cutedsl.{variant.op}")
    kernels = {  # per layout the entry for aligned operands, then the one that takes any
        name: [
            module.kernel_of(variant, arch, SCALE_LAYOUTS[name], a, **tuning) for a in (True, False)
        ]
        for name in layouts or layouts_of(variant, arch)
    }
    every = [kernel for entries in kernels.values() for kernel in entries]
    return compile_entries(variant.name, arch, every, functools.partial(entry.launches, kernels))
