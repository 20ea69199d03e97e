"""How many instructions a wave issues, from the disassembly of code objects.

Only vector instructions count, arithmetic and global memory: a compute unit has issue slots of
their own for scalars, LDS and branches. An instruction that takes four passes counts as four.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax_mx.facts.code_object import CodeObject
from jax_mx.kernels import paths

FOUR_PASSES = ("v_mul_lo_u32", "v_mul_hi_u32", "v_mul_hi_i32", "v_mad_u64_u32", "v_mad_i64_i32",
               "v_rcp_", "v_rcp_iflag_")  # fmt: skip
BRANCHES = ("s_cbranch", "s_branch")
BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "ushort": 2, "short": 2,
         "ubyte": 1, "sbyte": 1, "byte": 1}  # fmt: skip


def count_instructions(
    images: Sequence[bytes], arch: str, trips: Sequence[Mapping[str, int]]
) -> list[dict[str, paths.Counts | None]]:
    """Per image and kernel of it, how many instructions a wave issues, see `paths.count`."""
    del arch, trips  # a code object says the one itself; of the others there are none
    return [
        {name: _count(disassemble(code, name)) for name in code.kernels}
        for code in map(CodeObject, images)
    ]


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


def _successors(instructions: Sequence[tuple[int, str, int]]) -> list[set[int]] | None:
    """By instruction the numbers of those that may be next, or of the end; None: no telling."""
    place = {pc: at for at, (pc, _, _) in enumerate(instructions)}
    follow: list[set[int]] = []
    for at, (pc, name, to) in enumerate(instructions):
        if name.startswith(("s_setpc", "s_swappc", "s_call")):
            return None
        branches = name.startswith(BRANCHES)
        successors = {place[pc + 4 + 4 * to]} if branches else set()
        if name == "s_endpgm":
            successors = {len(instructions)}
        elif name != "s_branch":
            successors.add(at + 1)
        follow.append(successors)
    return follow


def _count(instructions: Sequence[tuple[int, str, int]]) -> paths.Counts | None:
    """The counts of one kernel."""
    end = len(instructions)
    follow = _successors(instructions)
    if follow is None:
        return None
    # Nodes as `paths` counts them: one a pass, none for what issues elsewhere.
    passes = [_passes(name) for _, name, _ in instructions]
    first = {at: 1 + sum(passes[:at]) for at in range(end) if passes[at]}
    total = 1 + sum(passes)

    def counted(starts: set[int]) -> set[int]:
        """The nodes that come next, past what is not counted."""
        found, seen, todo = set(), set(), [*starts]
        while todo:
            at = todo.pop()
            if at in seen:
                continue
            seen.add(at)
            if at == end:
                found.add(total)
            elif at in first:
                found.add(first[at])
            else:
                todo += follow[at]
        return found

    nodes, moved = [counted({0})], [0]  # a node before all, as the first may be a branch
    for at in range(end):
        for i in range(passes[at]):
            last = i == passes[at] - 1
            nodes.append(counted(follow[at]) if last else {len(nodes) + 1})
            moved.append(bytes_moved(instructions[at][1]) if last else 0)
    counts = paths.count(nodes, moved)
    return {**counts, "shortest": counts["shortest"] - 1, "longest": counts["longest"] - 1}


def _passes(name: str) -> int:
    if name.startswith(FOUR_PASSES):
        return 4
    return int(name.startswith(("v_", "global_")) and name != "v_nop")
