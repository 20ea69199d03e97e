"""From a variant to a cubin and the facts that launch it. Needs no GPU and no driver."""

from __future__ import annotations

import functools
import importlib
import io
import struct
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from jax_mx.facts.chips import SHARED
from jax_mx.facts.layouts import SCALE_LAYOUTS
from jax_mx.facts.product_kernels import Binary, ProductKernel
from jax_mx.facts.variants import layouts_of
from jax_mx.kernels import entry
from jax_mx.kernels.cutedsl import products

COMPILER = f"nvidia-cutlass-dsl {version('nvidia-cutlass-dsl')}"


def compile_variant(
    variant: Binary, arch: str, layouts: Sequence[str] | None = None, **tuning: Any
) -> tuple[bytes, dict[str, Any]]:
    """The cubin of `variant` for `arch`, and its manifest entry but for names and hashes.

    `layouts` are the scale layouts to compile entries for, all that the variant has by default;
    `tuning` replaces what the kernel's own table says (benchmarks/sweep.py).

    Raises:
      RuntimeError: the compiler gave no cubin, or its kernels are not the entries asked for.
    """
    from cutlass import cute

    module = importlib.import_module(f"jax_mx.kernels.cutedsl.{variant.op}")

    if isinstance(variant, ProductKernel):
        every = module.entries(variant, arch, **tuning)
        launches = functools.partial(products.launches, every)
    else:  # per layout the entry for aligned operands, then the one that takes any
        kernels = {
            name: [
                module.kernel_of(variant, arch, SCALE_LAYOUTS[name], a, **tuning)
                for a in (True, False)
            ]
            for name in layouts or layouts_of(variant, arch)
        }
        every = [kernel for entries in kernels.values() for kernel in entries]
        launches = functools.partial(entry.launches, kernels)
    for kernel in every:
        type(kernel).kernel.set_name_prefix(
            variant.name, remove_cutlass_symbol=True, keep_mangled_name=False
        )

    @cute.jit
    def launch_all(arguments):
        for kernel, its in zip(every, arguments, strict=True):
            kernel(*its)

    # Without an existing dump folder the compiler returns the path of a file it never wrote.
    with tempfile.TemporaryDirectory() as folder:
        compiled = cute.compile(
            launch_all,
            [kernel.arguments() for kernel in every],
            options=f"--gpu-arch {arch} --keep-cubin --dump-dir {folder}",
        )
    image = compiled.__cubin__
    if not isinstance(image, bytes) or image[:4] != b"\x7fELF":
        raise RuntimeError(f"{variant.name}.{arch}: the compiler gave no cubin but {image!r}")
    usage = resource_usage(image)
    if len(usage) != len(every) or len(every) > 10:
        raise RuntimeError(f"{variant.name}.{arch}: expected {len(every)} entries, got {[*usage]}")
    found = launches(usage)
    for rules in found.values():
        for rule in rules["entries"]:
            check_shared(rule, arch)
    return image, {"launches": found}


def check_shared(rule: Mapping[str, Any], arch: str) -> None:
    """Insists that an entry's thread blocks fit on each chip of the arch.

    Raises:
      RuntimeError: they want more shared memory; a launch would fail.
    """
    reserved = 0 if arch in ("sm_80", "sm_89") else 1024  # by the system; counted as the kernel's
    wanted = rule["usage"]["shared"] - reserved + rule.get("shared", 0)
    if wanted > SHARED[arch]:
        raise RuntimeError(
            f"{rule['symbol']}.{arch}: wants {wanted} bytes of shared memory, some chips of this "
            f"arch have {SHARED[arch]}; give it a smaller tile in tuning/{arch}.py"
        )


def resource_usage(image: bytes) -> dict[str, dict[str, Any]]:
    """Per kernel of a cubin: registers, bytes of stack (spills) and of shared memory, threads.

    Read from the sections .nv.info and .nv.shared, whose records are format byte, attribute byte
    and either a 16-bit value or a length and that many bytes.
    """
    from elftools.elf.elffile import ELFFile

    elf = ELFFile(io.BytesIO(image))
    names = [s.name for s in elf.get_section_by_name(".symtab").iter_symbols()]
    usage: dict[str, dict[str, Any]] = {}
    for section in elf.iter_sections():
        if section.name.startswith(".nv.info"):
            kernel = section.name.removeprefix(".nv.info").removeprefix(".")
            for attribute, payload in _records(section.data()):
                if attribute == 0x2F:  # EIATTR_REGCOUNT: symbol, registers
                    symbol, count = struct.unpack("<II", payload)
                    usage.setdefault(names[symbol], {})["registers"] = count
                elif attribute == 0x11:  # EIATTR_FRAME_SIZE: symbol, bytes of stack
                    symbol, count = struct.unpack("<II", payload)
                    usage.setdefault(names[symbol], {})["stack"] = count
                elif attribute == 0x10 and kernel:  # EIATTR_REQNTID
                    threads = struct.unpack("<III", payload[:12])
                    usage.setdefault(kernel, {})["threads"] = threads
    # Functions of the compiler's own, which kernels call on some archs.
    usage = {name: found for name, found in usage.items() if not name.startswith("$")}
    for kernel, found in usage.items():
        section = elf.get_section_by_name(f".nv.shared.{kernel}")
        found["shared"] = section["sh_size"] if section else 0
    return usage


def _records(data: bytes):
    at = 0
    while at < len(data):
        kind, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind == 4:
            yield attribute, data[at : at + value]
            at += value
