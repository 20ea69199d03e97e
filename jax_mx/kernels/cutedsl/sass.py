"""How many instructions a warp issues, from the disassembly of cubins."""

from __future__ import annotations

import io
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import files
from pathlib import Path
from typing import Any

from jax_mx.kernels import paths

INSTRUCTION = 16  # bytes
# What leads elsewhere in a way that the code alone does not tell.
OPAQUE = {"BRX", "BRXU", "CALL", "JMP", "JMX", "JMXU", "RET"}
BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


def count_instructions(
    images: Sequence[bytes], arch: str, trips: Sequence[Mapping[str, int]]
) -> list[dict[str, paths.Counts | None]]:
    """Per image and kernel of it, how many instructions a warp issues, see `paths.count`.

    `trips` are those of each image's kernels. One run of nvdisasm serves all images: it takes 0.3 s
    to start, and 20 ms a kernel.
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
            kernel: _count(
                instructions[start // INSTRUCTION : end // INSTRUCTION], start, each[kernel]
            )
            for kernel, (start, end) in place.items()
        }
        for place, each in zip(places, trips, strict=True)
    ]


def _count(
    instructions: Sequence[Mapping[str, Any]], base: int, trips: int = 0
) -> paths.Counts | None:
    """The counts of a kernel whose code lies at `base`."""
    follow = [_successors(i, at, len(instructions), base) for at, i in enumerate(instructions)]
    return paths.count(follow, [_bytes_moved(i["opcode"]) for i in instructions], trips)


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
        to = (int(target, 16) - base) // INSTRUCTION
        return {at + 1, to} if conditional or conditions else {to}
    return {at + 1}


def _bytes_moved(opcode: str) -> int:
    """Per thread, from or to global memory."""
    name, *modifiers = opcode.split(".")
    if name not in ("LDG", "STG"):
        return 0
    return next((BYTES[m] for m in modifiers if m in BYTES), 4)
