"""The instructions of a kernel, from the disassembly of its code object."""

from jax_mx.facts.code_object import CodeObject

BRANCHES = ("s_cbranch", "s_branch")
BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "ushort": 2, "short": 2,
         "ubyte": 1, "sbyte": 1, "byte": 1}  # fmt: skip


def disassemble(code: CodeObject, kernel: str) -> list[tuple[int, str, int]]:
    """The instructions of a kernel up to its last: address, name, signed 16-bit immediate."""
    entries = [*sorted(k.entry for k in code.kernels.values()), len(code.memory)]
    pc = code.kernels[kernel].entry
    limit = entries[entries.index(pc) + 1]
    found, target = [], pc
    while pc < limit:
        name, to, size = _decoded(bytes(code.memory[pc : pc + 16]))
        found.append((pc, name, to))
        pc += size
        if name.startswith(BRANCHES):
            target = max(target, pc + 4 * to)
        # Behind an end there may be code, from which a branch leads back, last of all.
        if name in ("s_endpgm", "s_branch") and target < pc:
            return found
    raise ValueError(f"{kernel} does not end")


# What was decoded before, by its bytes; no instruction is the beginning of another.
_known: dict[bytes, tuple[str, int, int]] = {}


def _decoded(data: bytes) -> tuple[str, int, int]:
    """Name, immediate of a branch, size of the instruction that these bytes begin with."""
    for size in (4, 8):
        if data[:size] in _known:
            return _known[data[:size]]
    from tinygrad.renderer.amd import decode_inst  # half a second, which compiling does not need

    inst = decode_inst(data, "cdna")
    name = inst.op_name.lower()
    to = ((inst.simm16 ^ 0x8000) - 0x8000) if name.startswith(BRANCHES) else 0
    _known[data[: inst.size()]] = name, to, inst.size()
    return name, to, inst.size()


def bytes_moved(name: str) -> int:
    """Per lane, from or to global memory."""
    if not name.startswith(("global_load_", "global_store_")):
        return 0
    return BYTES[name.split("_")[2]]
