"""From a variant to a code object and the facts that launch it. Needs no GPU, ROCm or torch."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jax_mx.facts.code_object import CodeObject
from jax_mx.facts.layouts import SCALE_LAYOUTS
from jax_mx.facts.product_kernels import Binary, ProductKernel
from jax_mx.facts.variants import layouts_of
from jax_mx.kernels.entry import launches

COMPILER = f"flydsl {version('flydsl')}, ziglang {version('ziglang')}"

# What must be 0 of a kernel's metadata: bytes of scratch memory, registers kept elsewhere.
SPILLS = ("private_segment_fixed_size", "vgpr_spill_count", "sgpr_spill_count")


def compile_variant(
    variant: Binary, arch: str, layouts: Sequence[str] | None = None
) -> tuple[bytes, dict[str, Any]]:
    """The code object of `variant` for `arch`, and its manifest entry but for names and hashes.

    `layouts` are the scale layouts to compile entries for, all that the variant has by default.
    A process that did this cannot import CuTeDSL.

    Raises:
      RuntimeError: the compiler gave no code object, or its kernels are not the entries asked for.
    """
    with tempfile.TemporaryDirectory() as folder:
        _prepare_process(Path(folder), arch)
        from jax_mx.kernels.flydsl.kernel import compile_all

        _forbid_unaligned_accesses()
        _forget_locations()
        if isinstance(variant, ProductKernel):
            from jax_mx.kernels.flydsl import products

            every = products.entries(variant, arch)
            rules = functools.partial(products.launches, every)
        else:  # per layout the entry for aligned operands, then the one that takes any
            module = importlib.import_module(f"jax_mx.kernels.flydsl.{variant.op}")
            of = functools.partial(module.kernel_of, variant, arch)
            kernels = {
                name: [of(SCALE_LAYOUTS[name], aligned) for aligned in (True, False)]
                for name in layouts or layouts_of(variant, arch)
            }
            every = [kernel for entries in kernels.values() for kernel in entries]
            rules = functools.partial(launches, kernels)
        names = [f"{variant.name}_{i}" for i in range(len(every))]
        image = _code_object(compile_all(f"{variant.name}.{arch}", names, every))
    usage = resource_usage(image)
    if sorted(usage) != names:
        raise RuntimeError(f"{variant.name}.{arch}: expected {names}, got {sorted(usage)}")
    return image, {"launches": rules(usage)}


def resource_usage(image: bytes) -> dict[str, dict[str, Any]]:
    """Per kernel of a code object: registers, bytes of stack (spills) and of LDS, threads."""
    found = {symbol: kernel.metadata for symbol, kernel in CodeObject(image).kernels.items()}
    return {
        symbol: {
            "registers": facts[".vgpr_count"],
            "stack": sum(facts[f".{what}"] for what in SPILLS),
            "shared": facts[".group_segment_fixed_size"],
            "threads": facts[".reqd_workgroup_size"],
        }
        for symbol, facts in found.items()
    }


def _prepare_process(folder: Path, arch: str) -> None:
    """What FlyDSL reads of its environment, instead of a ROCm installation and of torch.

    It runs $ROCM_PATH/llvm/bin/ld.lld, and imports torch for the names of a few types.
    """
    linker = folder / "llvm" / "bin" / "ld.lld"
    linker.parent.mkdir(parents=True)
    linker.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang ld.lld "$@"\n')
    linker.chmod(0o755)
    os.environ |= {
        "ARCH": arch,  # of the code
        "FLYDSL_GPU_ARCH": arch,  # of helpers that ask for it
        "FLYDSL_RUNTIME_ENABLE_CACHE": "0",
        "FLYDSL_DEBUG_ENABLE_VERIFIER": "0",  # between passes: a sixth of its time
        "ROCM_PATH": str(folder),
    }
    if "torch" in sys.modules or importlib.util.find_spec("torch") is not None:
        return
    torch, cuda = types.ModuleType("torch"), types.ModuleType("torch.cuda")
    names = ("bool", "float16", "bfloat16", "float32", "float64")
    for name in (*names, *(f"{kind}{n}" for kind in ("int", "uint") for n in (8, 16, 32, 64))):
        setattr(torch, name, type(name, (), {})())
    torch.Tensor, cuda.Stream = type("Tensor", (), {}), type("Stream", (), {})
    torch.cuda, cuda.is_available = cuda, lambda: False
    sys.modules |= {"torch": torch, "torch.cuda": cuda}


def _forbid_unaligned_accesses() -> None:
    """Keeps LLVM from joining byte accesses to unaligned wide ones, as it may on Linux.

    Whether those work is a setting of the chip. FlyDSL has no option for LLVM's features.
    """
    from flydsl.compiler.backends.rocm import RocmBackend

    def options(opts: dict) -> str:
        opts = {**opts, "features": "-unaligned-access-mode"} if "features" in opts else opts
        return " ".join(f"{name}={value}" for name, value in opts.items())

    RocmBackend._format_pass_opts = staticmethod(options)


def _forget_locations() -> None:
    """Keeps FlyDSL from looking up each operation's line of Python: two fifths of its time."""
    from flydsl._mlir import ir
    from flydsl.expr import meta

    meta.capture_user_location = lambda: ir.Location.unknown()


def _code_object(compiled: Any) -> bytes:
    """The one code object of what FlyDSL compiled; it has no public way to it."""
    from flydsl._mlir import ir
    from flydsl._mlir.dialects import gpu

    images: list[bytes] = []

    def visit(op):
        if op.name == "gpu.binary":
            objects = ir.ArrayAttr(op.attributes["objects"])
            images.extend(bytes(gpu.ObjectAttr(o).object) for o in objects)
        return ir.WalkResult.ADVANCE

    context = ir.Context()
    context.load_all_available_dialects()
    with context:
        ir.Module.parse(compiled._keepalive.ir).operation.walk(visit)
    if len(images) != 1:
        raise RuntimeError(f"expected one code object, the compiler gave {len(images)}")
    return images[0]
