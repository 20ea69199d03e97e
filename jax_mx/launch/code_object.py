"""AMD code objects: ELF files with kernels, their descriptors and their metadata.

As LLVM's "User Guide for AMDGPU Backend" describes them, code object version 3 and later. To read
one takes msgpack and pyelftools, which are imported when it is read.
"""

from __future__ import annotations

import dataclasses
import io
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elftools.elf.elffile import ELFFile

ARCHS = {0x4C: "gfx942", 0x4F: "gfx950"}  # EF_AMDGPU_MACH, the low byte of the ELF's flags


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One of a kernel's parameters: where it lies in the kernel's argument block."""

    offset: int
    size: int
    value_kind: str  # "global_buffer", "by_value" or one of the "hidden_..." that no launch passes


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An entry point: what a launch must know.

    The words of the descriptor are those that the command processor reads; `metadata` is what the
    compiler says of the kernel beside them.
    """

    name: str
    entry: int  # where its code begins
    lds: int  # bytes
    scratch: int  # bytes a lane
    arguments: int  # bytes
    rsrc1: int
    rsrc2: int
    rsrc3: int
    properties: int
    metadata: dict[str, Any]

    @property
    def parameters(self) -> list[Parameter]:
        """In the order of the source."""
        return [
            Parameter(p[".offset"], p[".size"], p[".value_kind"]) for p in self.metadata[".args"]
        ]

    @property
    def user_sgprs(self) -> int:
        """How many scalar registers are set before the launch."""
        return self.rsrc2 >> 1 & 31

    @property
    def workgroup_ids(self) -> list[int]:
        """The axes among x, y, z whose numbers follow the user's registers."""
        return [axis for axis in range(3) if self.rsrc2 >> 7 + axis & 1]

    @property
    def accumulators(self) -> int:
        """The first of the vector registers that instructions call accumulators."""
        return 4 * ((self.rsrc3 & 63) + 1)

    @property
    def float32_mode(self) -> tuple[int, int]:
        """How float32 rounds (0: to nearest even), and bits: subnormals in, subnormals out."""
        return self.rsrc1 >> 12 & 3, self.rsrc1 >> 16 & 3

    @property
    def float16_mode(self) -> tuple[int, int, int]:
        """The same of float16 (and float64), and whether what overflows is the largest value."""
        return self.rsrc1 >> 14 & 3, self.rsrc1 >> 18 & 3, self.rsrc1 >> 26 & 1


class CodeObject:
    """A loaded code object.

    Attributes:
      arch: the arch that it was compiled for.
      memory: its segments as they lie once loaded.
      kernels: by name.
    """

    def __init__(self, image: bytes):
        """Raises ValueError: the image is no code object for a chip that is known here."""
        from elftools.elf.elffile import ELFFile
        from elftools.elf.sections import SymbolTableSection

        elf = ELFFile(io.BytesIO(image))
        mach = elf["e_flags"] & 0xFF
        if elf["e_machine"] != "EM_AMDGPU" or mach not in ARCHS:
            raise ValueError(f"no code object for {', '.join(ARCHS.values())}: {elf['e_machine']}")
        self.arch = ARCHS[mach]
        loads = [s for s in elf.iter_segments() if s["p_type"] == "PT_LOAD"]
        self.memory = bytearray(max(s["p_vaddr"] + s["p_memsz"] for s in loads))
        for segment in loads:
            at = segment["p_vaddr"]
            self.memory[at : at + segment["p_filesz"]] = segment.data()
        symbols = {
            symbol.name: symbol["st_value"]
            for section in elf.iter_sections()
            if isinstance(section, SymbolTableSection)
            for symbol in section.iter_symbols()
        }
        self.kernels = {
            metadata[".name"]: self._kernel(metadata, symbols[metadata[".symbol"]])
            for metadata in _metadata(elf)["amdhsa.kernels"]
        }

    def _kernel(self, metadata: dict[str, Any], at: int) -> Kernel:
        lds, scratch, arguments, _, entry = struct.unpack_from("<IIIIq", self.memory, at)
        rsrc3, rsrc1, rsrc2, properties = struct.unpack_from("<IIIH", self.memory, at + 44)
        sizes = (at + entry, lds, scratch, arguments)
        return Kernel(metadata[".name"], *sizes, rsrc1, rsrc2, rsrc3, properties, metadata)


def _metadata(elf: ELFFile) -> dict[str, Any]:
    """The note NT_AMDGPU_METADATA."""
    import msgpack
    from elftools.elf.sections import NoteSection

    for section in elf.iter_sections():
        if isinstance(section, NoteSection):
            for note in section.iter_notes():
                if note["n_name"] == "AMDGPU":
                    return msgpack.unpackb(note["n_descdata"])
    raise ValueError("the code object has no metadata")
