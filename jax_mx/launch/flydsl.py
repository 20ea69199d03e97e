"""FlyDSL: from entries to a code object. Needs no GPU, ROCm or torch.

The processes that compile import this module, before anything of FlyDSL; a library does not. They
cannot import CuTeDSL.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_mx.launch import entry
from jax_mx.launch.code_object import CodeObject

# A kernel's metadata must have 0 here: bytes of scratch memory, registers kept elsewhere.
SPILLS = ("private_segment_fixed_size", "vgpr_spill_count", "sgpr_spill_count")


def compile_module(binary, arch: str) -> tuple[bytes, dict[str, Any]]:
    """A `ModuleBinary` for an arch: the code object, and its manifest entry but for hashes."""
    with prepared(arch):
        entries = entry.entries_of(binary, arch)
        rules = lambda usage: entry.launches({entry.ONLY: entries}, usage)  # noqa: E731
        return compile_entries(binary.name, arch, entries, rules)


@contextlib.contextmanager
def prepared(arch: str) -> Iterator[None]:
    """Within it FlyDSL is imported, and compiles for an arch."""
    with tempfile.TemporaryDirectory() as folder:
        _prepare_process(Path(folder), arch)
        _forbid_unaligned_accesses()
        _forget_locations()
        yield


def compile_entries(
    name: str, arch: str, entries: Sequence[Any], launches: Callable[[Mapping[str, Any]], Mapping]
) -> tuple[bytes, dict[str, Any]]:
    """The code object of some entries, and its manifest entry but for hashes; in `prepared`.

    Args:
      name: of the binary; symbols are NAME_0, NAME_1 and so on.
      arch: for what.
      entries: ten at most: an `entry.Entry` each, or what has its attributes and a `kernel`.
      launches: gives the launch rules in JSON, by name, from what the compiler says per symbol.

    Raises:
      RuntimeError: the compiler gave no code object, or its kernels are not the entries asked for.
    """
    from jax_mx.launch.flydsl_host import compile_all

    symbols = [f"{name}_{i}" for i in range(len(entries))]
    image = _code_object(compile_all(f"{name}.{arch}", symbols, entries))
    usage = resource_usage(image)
    if sorted(usage) != symbols:
        raise RuntimeError(f"{name}.{arch}: expected {symbols}, got {sorted(usage)}")
    return image, {"launches": launches(usage)}


def resource_usage(image: bytes) -> dict[str, dict[str, Any]]:
    """Per kernel of a code object: registers, bytes of stack (spills) and of LDS, threads."""
    metadata = {symbol: kernel.metadata for symbol, kernel in CodeObject(image).kernels.items()}
    return {
        symbol: {
            "registers": facts[".vgpr_count"],
            "stack": sum(facts[f".{name}"] for name in SPILLS),
            "shared": facts[".group_segment_fixed_size"],
            "threads": facts[".reqd_workgroup_size"],
        }
        for symbol, facts in metadata.items()
    }


def _prepare_process(folder: Path, arch: str) -> None:
    """Sets FlyDSL's environment, in place of a ROCm installation and of torch.

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
    for name in (*names, *(f"{prefix}{n}" for prefix in ("int", "uint") for n in (8, 16, 32, 64))):
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
