"""Binaries with nothing to execute, which the handler takes for whole ones."""

import hashlib
import struct
from collections.abc import Mapping, Sequence

CUDA, AMD = 190, 224  # ELF machines
NULL, PROGBITS, NOTE = 0, 1, 7  # kinds of sections


def sha256(image: bytes) -> str:
    """Hexadecimal."""
    return hashlib.sha256(image).hexdigest()


def elf(machine: int, flags: int, sections: Sequence[tuple[int, bytes]]) -> bytes:
    """A 64-bit ELF file of sections (kind, contents), whose headers end the file."""
    body, headers = b"", struct.pack("<IIQQQQIIQQ", *[0] * 10)
    for section, contents in sections:
        headers += struct.pack(
            "<IIQQQQIIQQ", 0, section, 0, 0, 64 + len(body), len(contents), 0, 0, 1, 0
        )
        body += contents + b"\0" * (-len(contents) % 8)
    ident = b"\x7fELF\x02\x01\x01" + b"\0" * 9
    rest = (2, machine, 1, 0, 0, 64 + len(body), flags, 64, 56, 0, 64, len(headers) // 64, 0)
    return ident + struct.pack("<HHIQQQIHHHHHH", *rest) + body + headers


def cuda(name: str = "stand_in") -> bytes:
    """A cubin without kernels; different names, different contents."""
    return elf(CUDA, 0, [(PROGBITS, hashlib.sha256(name.encode()).digest() * 90)])


def amd(kernels: Mapping[str, Sequence[int]], mach: int) -> bytes:
    """A code object whose metadata has these kernels.

    Args:
      kernels: by symbol the sizes of the parameters; 8 bytes are a pointer, others values.
      mach: the chip, 0x4C for gfx942, 0x4F for gfx950.
    """
    import msgpack

    listed = []
    for symbol, sizes in kernels.items():
        args, end = [], 0
        for i, size in enumerate(sizes):
            value_kind = "global_buffer" if size == 8 and i < 3 else "by_value"
            at = -(-end // size) * size
            args.append({".offset": at, ".size": size, ".value_kind": value_kind})
            end = at + size
        names = {".name": symbol, ".symbol": f"{symbol}.kd", ".wavefront_size": 64}
        listed.append({".args": args, ".kernarg_segment_size": end, **names})
    text = msgpack.packb({"amdhsa.version": [1, 2], "amdhsa.kernels": listed})
    note = struct.pack("<III", 7, len(text), 32) + b"AMDGPU\0\0" + text
    return elf(AMD, mach, [(NOTE, note), (PROGBITS, bytes(range(256)))])
