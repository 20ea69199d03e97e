"""AMD binaries access memory with aligned operands: 16 bytes a lane, side by side."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_mx.formats.formats import BLOCK, FLOAT_DTYPES, MXFP4_E2M1, MXFP8_E4M3
from jax_mx.launch import store
from jax_mx.quantizing.facts.variants import layouts_of

pytest.importorskip("tinygrad")
pytest.importorskip("jax_mx.quantizing.kernels")  # not in a wheel

from emulation import FLYDSL, Program, each_binary, words_behind
from helpers import call, operand, preprocessing

from jax_mx.launch.code_object import CodeObject
from jax_mx.launch.emulation.memory import Global

BRANCHES = ("s_cbranch", "s_branch")
BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "ushort": 2, "short": 2,
         "ubyte": 1, "sbyte": 1, "byte": 1}  # fmt: skip


def disassemble(code: CodeObject, kernel: str) -> list[tuple[int, str, int]]:
    """The instructions of a kernel up to its last: address, name, signed 16-bit immediate."""
    entries = [*sorted(k.entry for k in code.kernels.values()), len(code.memory)]
    pc = code.kernels[kernel].entry
    limit = entries[entries.index(pc) + 1]
    instructions, target = [], pc
    while pc < limit:
        name, to, size = _decoded(bytes(code.memory[pc : pc + 16]))
        instructions.append((pc, name, to))
        pc += size
        if name.startswith(BRANCHES):
            target = max(target, pc + 4 * to)
        # Behind an end there may be code, from which a branch leads back, last of all.
        if name in ("s_endpgm", "s_branch") and target < pc:
            return instructions
    raise ValueError(f"{kernel} does not end")


# Instructions decoded before, by their bytes; no instruction is the beginning of another.
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


@pytest.mark.every_binary
@each_binary(FLYDSL)
def test_accesses_are_16_bytes_a_lane(variant, arch):
    """Accesses to x, values and floats; scales, of which a block has one byte, take less."""
    artifact = store.get(variant, arch)
    code, quantizes = CodeObject(artifact.image), variant.op == "quantize"
    itemsize, count = FLOAT_DTYPES[variant.dtype].itemsize, len(variant.formats)
    packed = variant.formats[0].codes_per_byte
    if variant.gives_floats:
        count += sum(mode.dequantized for mode in variant.modes) * (itemsize * packed - 1)
    for launch in artifact.facts["launches"].values():
        entry = launch["entries"][0]
        elements = entry["usage"]["elements_per_thread"]
        moved = collections.Counter()
        for _, name, _ in disassemble(code, entry["symbol"]):
            size = bytes_moved(name)
            moved[name.split("_")[1], size == 16] += size
        floats, values = elements * itemsize, elements * count // packed
        assert moved["load", True] == (floats if quantizes else values)
        assert moved["store", True] == (values if quantizes else floats)
        data_bytes = 4 * variant.block_data * (elements // BLOCK)
        assert moved["load" if quantizes else "store", False] == data_bytes
        # Alternatives, of which a lane takes one: a word, or its bytes.
        assert moved["store" if quantizes else "load", False] <= 8 * count


class Segments(Global):
    """Counts the pieces of 64 bytes that accesses of 16 bytes a lane touch, and the fewest."""

    touched = least = 0

    def _find(self, addresses, size, access):
        if size == 16:
            waves = addresses.reshape(-1, 64) >> np.uint64(6)
            self.touched += sum(len(np.unique(wave)) for wave in waves)
            self.least += len(addresses) // 4
        return super()._find(addresses, size, access)


# Where anything lies, formats change by how many codes are in a byte.
ONE_FORMAT = [v for v in FLYDSL if {*v.formats} in ({MXFP8_E4M3}, {MXFP4_E2M1})]


@each_binary(ONE_FORMAT, 1)
def test_accesses_coalesce(variant, arch):
    """A wave accesses whole pieces of memory at once, of a tensor of whole tiles."""
    for layout in layouts_of(variant):
        options = {"scale_layout": layout, **preprocessing(variant, of=jnp.asarray)}
        program = Program(variant, arch, (256, 256), **options)
        memory, ones = Segments(), np.ones((256, 256), variant.dtype)
        x = operand(variant, ones, **options)
        results = jax.eval_shape(call(variant, "xla", **options), x)
        addresses, operands = [], [*jax.tree.leaves(x), *words_behind(variant, ones, **options)]
        for i, array in enumerate([*operands, *jax.tree.leaves(results)]):
            size = array.size * array.dtype.itemsize
            room = np.zeros(size + 64, np.uint8)
            skew = -room.__array_interface__["data"][0] % 64
            window = room[skew : skew + size]
            base = 0x7F00 + i << 32
            addresses.append(memory.add(window, writable=i >= len(operands), address=base))
        program.launch(0, memory, addresses)
        assert memory.touched == memory.least > 0, layout
