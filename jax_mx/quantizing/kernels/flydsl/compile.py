"""From a variant to a code object and the facts that launch it. Needs no GPU, ROCm or torch."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

from jax_mx.formats.layouts import SCALE_LAYOUTS
from jax_mx.launch import entry
from jax_mx.launch.flydsl import compile_entries, prepared
from jax_mx.quantizing.facts.variants import Variant, layouts_of


def compile_variant(
    variant: Variant, arch: str, layouts: Sequence[str] | None = None
) -> tuple[bytes, dict[str, Any]]:
    """The code object of `variant` for `arch`, and its manifest entry but for names and hashes.

    `layouts` are the scale layouts to compile entries for, all that the variant has by default.
    A process that did this cannot import CuTeDSL.

    Raises:
      RuntimeError: the compiler gave no code object, or its kernels are not the entries asked for.
    """
    with prepared(arch):
        # Per layout the entry for aligned operands, then the one that takes any.
        module = importlib.import_module(f"jax_mx.quantizing.kernels.flydsl.{variant.op}")
        of = functools.partial(module.kernel_of, variant, arch)
        kernels = {
            name: [of(SCALE_LAYOUTS[name], aligned) for aligned in (True, False)]
            for name in layouts or layouts_of(variant, arch)
        }
        every = [kernel for entries in kernels.values() for kernel in entries]
        rules = functools.partial(entry.launches, kernels)
        return compile_entries(variant.name, arch, every, rules)
