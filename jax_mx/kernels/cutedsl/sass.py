"""How many instructions a warp issues, from the disassembly of cubins."""

from __future__ import annotations

import io
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import files
from pathlib import Path
from typing import Any

INSTRUCTION_BYTES = 16
# What leads elsewhere in a way that the code alone does not tell.
OPAQUE = {"BRX", "BRXU", "CALL", "JMP", "JMX", "JMXU", "RET"}
STORE_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


def count_instructions(
    images: Sequence[bytes], arch: str
) -> list[dict[str, dict[str, int] | None]]:
    """Per image and kernel of it, how many instructions a warp issues.

    "longest" is the longest path from entry to exit, an upper bound for every warp whose lanes do
    not part over an if and its else. "shortest" is the shortest of the paths that store the most
    bytes: the least that a warp issues which has all its elements. A loop's body counts once: where
    "loops", the counts are those of one trip. None stands for a kernel with branches that cannot be
    followed.

    One run of nvdisasm serves all images: its start takes 0.3 s, a kernel 20 ms.
    """
    from elftools.elf.elffile import ELFFile

    code = bytearray()
    places: list[dict[str, tuple[int, int]]] = []
    for image in images:
        places.append({})
        for section in ELFFile(io.BytesIO(image)).iter_sections():
            if section.name.startswith(".text."):
                kernel = section.name.removeprefix(".text.")
                places[-1][kernel] = (len(code), len(code) + section["sh_size"])
                code += section.data()
    instructions = _disassemble(bytes(code), arch)
    return [
        {
            kernel: _paths(
                instructions[start // INSTRUCTION_BYTES : end // INSTRUCTION_BYTES], start
            )
            for kernel, (start, end) in place.items()
        }
        for place in places
    ]


def _disassemble(code: bytes, arch: str) -> list[dict[str, Any]]:
    """The instructions of raw code, as nvdisasm names their parts."""
    found = [f for f in files("nvidia-cuda-nvdisasm") or () if f.name == "nvdisasm"]
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(code)
        name = arch.replace("sm_", "SM")
        command = [str(found[0].locate()), "--emit-json", "--binary", name, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nvdisasm {arch}: {done.stderr.strip()}")
    _, (section,) = json.loads(done.stdout)
    return section["sass-instructions"]


def _paths(instructions: Sequence[Mapping[str, Any]], base: int) -> dict[str, int] | None:
    """The two paths of `count_instructions` through the code that lies at `base`."""
    end = len(instructions)  # where every exit leads
    follow: dict[int, set[int]] = {end: set()}
    reached = [0]
    while reached:
        at = reached.pop()
        if at in follow:
            continue
        successors = _successors(instructions[at], at, end, base)
        if successors is None:
            return None
        follow[at] = successors
        reached += successors
    stored = {at: _bytes_stored(instructions[at]["opcode"]) for at in follow if at != end}
    count = dict.fromkeys(stored, 1)
    loops = False
    while True:
        try:
            order = tuple(TopologicalSorter(follow).static_order())
            break
        except CycleError as error:  # a loop: from here on one node, with all that a trip costs
            loops = True
            head, *rest = body = set(error.args[1])
            for table in (stored, count):
                table[head] = sum(table[at] for at in body)
            follow[head] = set().union(*(follow[at] for at in body)) - body
            for at in rest:
                del follow[at]
            for at, successors in follow.items():
                if successors & body:
                    follow[at] = successors - body | {head}
    longest, best = {end: 0}, {end: (0, 0)}
    for at in order:  # successors come first
        if at != end:
            longest[at] = count[at] + max((longest[i] for i in follow[at]), default=0)
            bytes_stored, less = max((best[i] for i in follow[at]), default=(0, 0))
            best[at] = bytes_stored + stored[at], less - count[at]
    entry = order[-1]
    return {"shortest": -best[entry][1], "longest": longest[entry], "loops": loops}


def _successors(instruction: Mapping[str, Any], at: int, end: int, base: int) -> set[int] | None:
    """Where a warp may go on; None if there is no telling."""
    opcode, *modifiers = instruction["opcode"].split(".")
    *conditions, target = instruction.get("operands", "").split(",")
    conditional = "predicate" in instruction
    if opcode in OPAQUE:
        return None
    if opcode == "EXIT":
        return {at + 1, end} if conditional else {end}
    # BRA.DIV leaves for code that serves warps whose lanes have diverged.
    if opcode == "BRA" and "DIV" not in modifiers:
        to = (int(target, 16) - base) // INSTRUCTION_BYTES
        return {at + 1, to} if conditional or conditions else {to}
    return {at + 1}


def _bytes_stored(opcode: str) -> int:
    """Per thread, in global memory."""
    name, *modifiers = opcode.split(".")
    if name != "STG":
        return 0
    return next((STORE_BYTES[m] for m in modifiers if m in STORE_BYTES), 4)
