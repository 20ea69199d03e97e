"""From a variant to a cubin and the facts that launch it. Needs no GPU and no driver."""

from __future__ import annotations

import io
import math
import struct
import tempfile
from importlib.metadata import version
from typing import Any

from jax_mx.kernels.cutedsl.sass import count_instructions
from jax_mx.variants import Variant

__all__ = ["COMPILER", "compile_variant", "count_instructions"]

COMPILER = f"nvidia-cutlass-dsl {version('nvidia-cutlass-dsl')}"


def compile_variant(variant: Variant, arch: str, **tuning: Any) -> tuple[bytes, dict[str, Any]]:
    """The cubin of `variant` for `arch`, and its manifest entry but for names and hashes.

    `tuning` replaces what the kernel's own table says (benchmarks/sweep.py).

    Raises:
      RuntimeError: the compiler gave no cubin, or its kernels are not the entries asked for.
    """
    from cutlass import cute

    from jax_mx.kernels.cutedsl.quantize import kernel_of

    kernel = kernel_of(variant, **tuning)
    type(kernel).kernel.set_name_prefix(
        variant.name, remove_cutlass_symbol=True, keep_mangled_name=False
    )
    # Without an existing dump folder the compiler returns the path of a file it never wrote.
    with tempfile.TemporaryDirectory() as folder:
        compiled = cute.compile(
            kernel,
            *kernel.arguments(),
            options=f"--gpu-arch {arch} --keep-cubin --dump-dir {folder}",
        )
    image = compiled.__cubin__
    if not isinstance(image, bytes) or image[:4] != b"\x7fELF":
        raise RuntimeError(f"{variant.name}.{arch}: the compiler gave no cubin but {image!r}")
    usage = resource_usage(image)
    symbols = sorted(usage)  # NAME_0, NAME_1, in the order of their launch
    if len(symbols) != len(kernel.alignments):
        raise RuntimeError(f"{variant.name}.{arch}: expected {kernel.alignments}, got {symbols}")
    threads = {tuple(u.pop("threads")) for u in usage.values()}
    if threads != {tuple(kernel.launch["threads"])}:
        raise RuntimeError(f"{variant.name}.{arch}: compiled for {threads} threads")
    return image, {
        "symbols": symbols,
        "align": kernel.alignments,
        "divide": list(kernel.divide),
        **kernel.launch,
        "elements_per_thread": elements_per_thread(kernel),
        "usage": [usage[symbol] for symbol in symbols],
    }


def elements_per_thread(kernel: Any) -> int:
    """Of x, or of what x was made of."""
    known = getattr(kernel, "elements_per_thread", None)
    if known is None:  # TODO: a property of every kernel
        threads = math.prod(kernel.launch["threads"])
        known = getattr(kernel.tile, "blocks", 128 * 128 // 32) * 32 // threads
    return known


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
