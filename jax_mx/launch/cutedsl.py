"""CuTeDSL: the base of entries, and from entries to a cubin. Needs no GPU and no driver.

The processes that compile import this module; a library does not.
"""

from __future__ import annotations

import io
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cutlass import Int32, Int64, cute

from jax_mx.launch import entry
from jax_mx.launch.chips import SHARED


class Kernel(entry.Entry):
    """An entry, and the host half that makes it be compiled; subclasses have the `kernel`.

    The kernel takes a tuple of pointers, operands' before results', and a tuple of scalars.
    """

    def arguments(self):
        """Stand-ins of the host function's arguments, to compile it."""
        pointers = tuple(
            cute.runtime.make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align)
            for dtype, align in zip(self.types, self.align, strict=True)
        )
        scalars = entry.json_of(self.scalars)
        return pointers, tuple((Int64 if size == 8 else Int32)(32) for size, _ in scalars)

    @cute.jit
    def __call__(self, pointers, scalars):  # noqa: D102
        # The real grid is the launch rule's.
        self.kernel(pointers, scalars).launch(
            grid=[1, 1, 1], block=[self.threads, 1, 1], cluster=[self.cluster, 1, 1]
        )


def compile_module(binary, arch: str) -> tuple[bytes, dict[str, Any]]:
    """A `ModuleBinary` for an arch: the cubin, and its manifest entry but for names and hashes."""
    entries = entry.entries_of(binary, arch)
    rules = lambda usage: entry.launches({entry.ONLY: entries}, usage)  # noqa: E731
    return compile_entries(binary.name, arch, entries, rules)


def compile_entries(
    name: str, arch: str, entries: Sequence[Any], launches: Callable[[Mapping[str, Any]], Mapping]
) -> tuple[bytes, dict[str, Any]]:
    """The cubin of some entries for an arch, and its manifest entry but for names and hashes.

    Args:
      name: of the binary; symbols are NAME_0, NAME_1 and so on.
      arch: for what.
      entries: ten at most: `Kernel`s, or what has its `arguments`, its call and a `kernel`.
      launches: gives the launch rules in JSON, by name, from what the compiler says per symbol.

    Raises:
      RuntimeError: the compiler gave no cubin, or its kernels are not the entries asked for.
    """
    for kernel in entries:
        type(kernel).kernel.set_name_prefix(
            name, remove_cutlass_symbol=True, keep_mangled_name=False
        )

    @cute.jit
    def launch_all(arguments):
        for kernel, its in zip(entries, arguments, strict=True):
            kernel(*its)

    # Without an existing dump folder the compiler returns the path of a file it never wrote.
    with tempfile.TemporaryDirectory() as folder:
        compiled = cute.compile(
            launch_all,
            [kernel.arguments() for kernel in entries],
            options=f"--gpu-arch {arch} --keep-cubin --dump-dir {folder}",
        )
    image = compiled.__cubin__
    if not isinstance(image, bytes) or image[:4] != b"\x7fELF":
        raise RuntimeError(f"{name}.{arch}: the compiler gave no cubin but {image!r}")
    usage = resource_usage(image)
    if len(usage) != len(entries) or len(entries) > 10:
        raise RuntimeError(f"{name}.{arch}: expected {len(entries)} entries, got {[*usage]}")
    rules = launches(usage)
    for launch in rules.values():
        for rule in launch["entries"]:
            check_shared(rule, arch)
    return image, {"launches": rules}


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

    The sections .nv.info and .nv.shared have the figures. Their records are a format byte, an
    attribute byte and either a 16-bit value or a length and that many bytes.
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
    usage = {name: facts for name, facts in usage.items() if not name.startswith("$")}
    for kernel, facts in usage.items():
        section = elf.get_section_by_name(f".nv.shared.{kernel}")
        facts["shared"] = section["sh_size"] if section else 0
    return usage


def _records(data: bytes):
    at = 0
    while at < len(data):
        format, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if format == 4:
            yield attribute, data[at : at + value]
            at += value
