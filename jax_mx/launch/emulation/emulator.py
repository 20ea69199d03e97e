"""Executes AMD code objects for gfx942 and gfx950 (CDNA3 and CDNA4) in numpy.

All waves that stand at the same instruction take it together, so a register is an array: scalar
registers (registers, waves), vector registers (registers, waves, 64). An instruction is translated
once, when its address is first reached. An unknown instruction raises; nothing is guessed. There is
no time: no wait counters, hazards, caches or memory ordering.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from tinygrad.renderer.amd import decode_inst

from jax_mx.launch.code_object import CodeObject, Kernel
from jax_mx.launch.emulation import instructions as isa
from jax_mx.launch.emulation.instructions import F32, F64, I32, I64, U32, U64
from jax_mx.launch.emulation.memory import Fault, Global, Shared

ORDERS = ("lockstep", "serial", "reversed")  # how the waves of a workgroup run between barriers
VCC, EXEC, SCC, LITERAL = 106, 126, 253, 255
_ONE = 242  # the constant 1.0
VECTORS = 256  # the first vector register, in operands' numbering
LANES = 1 << 14  # at once; more do not stay in a CPU's cache
GARBAGE = 0xA5C3_96F1  # what registers hold before they are written
_FLOATS = {240: 0.5, 241: -0.5, 242: 1.0, 243: -1.0, 244: 2.0, 245: -2.0, 246: 4.0, 247: -4.0}
_LANE = np.arange(64)

Source = Callable[["Waves"], np.ndarray]
Step = Callable[["Waves"], None]


@dataclasses.dataclass(frozen=True)
class Space:
    """The common state of the waves in a piece of a launch."""

    memory: Global
    shared: Shared
    subnormals: int  # bits, where waves begin: float32 operands keep theirs, results keep theirs
    accumulators: int = 256  # the first of the vector registers that are called accumulators


class Waves:
    """Waves at a common instruction."""

    def __init__(
        self,
        space: Space,
        pc: int,
        workgroup: np.ndarray,
        scalar: np.ndarray,
        vector: np.ndarray,
    ):
        self.space = space
        self.pc = pc
        self.workgroup = workgroup  # (waves,)
        self.scalar = scalar  # uint32 (registers, waves)
        self.vector = vector  # uint32 (registers, waves, 64)
        self.scc = np.zeros(len(workgroup), bool)
        self.subnormals = space.subnormals
        self.look_at_exec()

    def look_at_exec(self) -> None:
        """Takes over a changed EXEC."""
        self.active = unpack(self.pair(EXEC))
        self.all_active = bool(self.active.all())

    def pair(self, register: int) -> np.ndarray:
        """Two scalar registers, uint64 (waves,)."""
        low, high = self.scalar[register], self.scalar[register + 1]
        return low.astype(U64) | high.astype(U64) << U64(32)

    def take(self, chosen: np.ndarray) -> Waves:
        """Some of the waves."""
        registers = self.scalar[:, chosen], self.vector[:, chosen]
        part = Waves(self.space, self.pc, self.workgroup[chosen], *registers)
        part.scc, part.subnormals = self.scc[chosen], self.subnormals
        return part

    @staticmethod
    def join(parts: Sequence[Waves]) -> Waves:
        """All waves of parts that stand at the same instruction."""
        if len(parts) == 1:
            return parts[0]
        joined = Waves(
            parts[0].space,
            parts[0].pc,
            np.concatenate([p.workgroup for p in parts]),
            np.concatenate([p.scalar for p in parts], axis=1),
            np.concatenate([p.vector for p in parts], axis=1),
        )
        joined.scc = np.concatenate([p.scc for p in parts])
        joined.subnormals = parts[0].subnormals
        if any(p.subnormals != joined.subnormals for p in parts):
            raise NotImplementedError("waves in different modes at one instruction")
        return joined


def unpack(masks: np.ndarray) -> np.ndarray:
    """Lane masks (waves,) as booleans (waves, 64)."""
    octets = np.ascontiguousarray(masks).view(np.uint8).reshape(-1, 8)
    return np.unpackbits(octets, axis=1, bitorder="little").view(bool)


def pack(lanes: np.ndarray) -> np.ndarray:
    """The inverse of `unpack`."""
    return np.packbits(lanes, axis=1, bitorder="little").view(U64)[:, 0]


@dataclasses.dataclass(frozen=True)
class Branch:
    """An instruction after which waves may part: `taken` says which go to `target`."""

    taken: Callable[[Waves], np.ndarray]
    target: int


END, BARRIER = object(), object()

# Instructions that were translated before, by what the translation depends on and their bytes.
_known: dict[tuple[str, int], dict[bytes, tuple[Any, int, str]]] = {}


class Emulator:
    """Runs the kernels of one code object.

    Attributes:
      code: the code object.
      executed: how many waves executed each instruction, by name, of all launches.
      limit: branches that a piece of a launch may take to the next barrier; beyond, it hangs.
    """

    def __init__(self, code: CodeObject, fnuz_negative_zero: int = 0):
        """`fnuz_negative_zero`: what gfx942 makes of a negative value that rounds to zero."""
        self.code = code
        self.fnuz_negative_zero = fnuz_negative_zero
        self.executed: Counter[str] = Counter()
        self.limit = 200_000
        self._steps: dict[int, tuple[Any, int, str]] = {}

    # ---- launch ---
    def launch(
        self,
        name: str,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: bytes,
        memory: Global,
        order: str = "lockstep",
        workgroups: Sequence[int] | None = None,
    ) -> None:
        """Runs kernel `name`.

        Args:
          name: of the kernel.
          grid: workgroups per axis.
          block: threads per axis.
          arguments: the kernel's argument block, as its metadata lays it out.
          memory: all there is.
          order: "lockstep": all waves of a workgroup take each instruction together; "serial":
            one after the other, each until it ends or waits at a barrier; "reversed": the last
            wave first.
          workgroups: numbers of those that run, counted x first; None: all.

        Raises:
          Fault: the kernel accessed what it must not, or did not end.
          NotImplementedError: it has an instruction, or needs a mode, that is not known here.
        """
        kernel, threads = self.code.kernels[name], math.prod(block)
        self._admit(kernel, block, arguments)
        if order not in ORDERS:
            raise ValueError(f"order {order!r} is unknown; use one of {', '.join(ORDERS)}")
        # To whole 16 bytes, as they lie in a queue: compilers load a little more than there is.
        block_of_arguments = np.full(-(-len(arguments) // 16) * 16, GARBAGE & 0xFF, np.uint8)
        block_of_arguments[: len(arguments)] = np.frombuffer(arguments, np.uint8)
        address = memory.add(block_of_arguments, name="the arguments")
        numbers = np.arange(math.prod(grid)) if workgroups is None else np.array(workgroups)
        at_once = max(LANES // threads, 1)
        for start in range(0, len(numbers), at_once):
            part = numbers[start : start + at_once]
            lds, mode = Shared(len(part), kernel.lds), kernel.float32_mode[1]
            space = Space(memory, lds, mode, kernel.accumulators)
            with np.errstate(all="ignore"):
                waves = self._start(kernel, space, address, grid, block, part)
                self.run(waves, order, -(-threads // 64))
        memory.buffers.pop()

    def _admit(self, kernel: Kernel, block: Sequence[int], arguments: bytes) -> None:
        rounding, subnormals = kernel.float32_mode
        wanted = tuple(kernel.metadata.get(".reqd_workgroup_size", block))
        if kernel.scratch or kernel.metadata.get(".uses_dynamic_stack"):
            raise NotImplementedError(f"{kernel.name} uses scratch memory")
        if kernel.properties & ~0x8:
            raise NotImplementedError(
                f"{kernel.name} wants more set up than its arguments' address"
            )
        if rounding != 0 or subnormals not in (0, 3):
            raise NotImplementedError(f"{kernel.name}: float32 mode {rounding}, {subnormals}")
        if kernel.float16_mode != (0, 3, 0):
            raise NotImplementedError(f"{kernel.name}: float16 mode {kernel.float16_mode}")
        if tuple(block) != wanted:
            raise Fault(f"{kernel.name} was compiled for workgroups of {wanted}, not {block}")
        if len(arguments) != kernel.arguments:
            raise Fault(f"{kernel.name} takes {kernel.arguments} bytes, not {len(arguments)}")

    def _start(
        self, kernel: Kernel, space: Space, arguments: int, grid, block, numbers: np.ndarray
    ) -> Waves:
        """All waves of these workgroups, as a chip starts them."""
        threads = math.prod(block)
        per_group = -(-threads // 64)
        group = np.repeat(np.arange(len(numbers)), per_group)
        wave = np.tile(np.arange(per_group), len(numbers))
        scalar = np.full((128, len(group)), GARBAGE, U32)
        user = 0
        if kernel.properties & 0x8:
            scalar[0], scalar[1] = arguments & 0xFFFFFFFF, arguments >> 32
            user = 2
        if kernel.user_sgprs != user:
            raise NotImplementedError(f"{kernel.name} has arguments preloaded")
        number = numbers[group]
        workgroup = (number % grid[0], number // grid[0] % grid[1], number // (grid[0] * grid[1]))
        for i, axis in enumerate(kernel.workgroup_ids):
            scalar[user + i] = workgroup[axis]
        registers = 8 * ((kernel.rsrc1 & 63) + 1)
        vector = np.full((registers, len(group), 64), GARBAGE, U32)
        thread = wave[:, None] * 64 + _LANE
        x, rest = thread % block[0], thread // block[0]
        vector[0] = x | rest % block[1] << 10 | rest // block[1] << 20
        exec_ = pack(thread < threads)
        scalar[EXEC], scalar[EXEC + 1] = exec_ & U64(0xFFFFFFFF), exec_ >> U64(32)
        return Waves(space, kernel.entry, group, scalar, vector)

    def run(self, waves: Waves, order: str = "lockstep", per_group: int = 1) -> None:
        """Runs waves, `per_group` of each workgroup, to their end."""
        lanes = [waves]
        if order != "lockstep":
            wave = np.arange(len(waves.workgroup)) % per_group
            indices = range(per_group) if order == "serial" else reversed(range(per_group))
            lanes = [waves.take(wave == i) for i in indices]
        groups = [[part] for part in lanes]
        while groups:
            groups = [waiting for group in groups if (waiting := self._until_barrier(group))]

    def _until_barrier(self, parts: list[Waves]) -> list[Waves]:
        """Runs parts until all their waves have ended or wait; returns those that wait.

        The part that is furthest behind goes on, so that parts meet again after a branch.
        """
        waiting: list[Waves] = []
        for _ in range(self.limit):
            if not parts:
                return [Waves.join([w for w in waiting if w.pc == pc]) for pc in
                        sorted({w.pc for w in waiting})]  # fmt: skip
            pc = min(part.pc for part in parts)
            front = Waves.join([part for part in parts if part.pc == pc])
            parts = [part for part in parts if part.pc != pc]
            ahead = min((part.pc for part in parts), default=math.inf)
            outcome = self._advance(front, ahead)
            if outcome is BARRIER:
                waiting.append(front)
            elif isinstance(outcome, Branch):
                taken = outcome.taken(front)
                stay = front if not taken.any() else None
                if taken.all():
                    front.pc = outcome.target
                    stay = front
                if stay is not None:
                    parts.append(stay)
                else:
                    gone = front.take(taken)
                    gone.pc = outcome.target
                    parts += [front.take(~taken), gone]
            elif outcome is not END:
                parts.append(front)
        raise Fault(f"the kernel did not end within {self.limit} branches")

    def _advance(self, waves: Waves, ahead: float) -> Any:
        """Runs waves until they end, branch, wait, or reach other waves that are `ahead`."""
        while True:
            pc = waves.pc
            if pc not in self._steps:
                self._steps[pc] = self._translate(pc)
            step, size, name = self._steps[pc]
            self.executed[name] += len(waves.workgroup)
            waves.pc = pc + size
            if step is END or step is BARRIER or isinstance(step, Branch):
                return step
            try:
                step(waves)
            except Fault as fault:
                raise Fault(f"{fault}, by {name} at {pc:#x}") from None
            except IndexError:
                raise Fault(f"a register that is not there, by {name} at {pc:#x}") from None
            if waves.pc >= ahead:
                return None

    # ---- translation ---
    def _translate(self, pc: int) -> tuple[Any, int, str]:
        """The function of the instruction at `pc`, its size and its name."""
        data = bytes(self.code.memory[pc : pc + 16])
        known = _known.setdefault((self.code.arch, self.fnuz_negative_zero), {})
        for size in (4, 8, 16):  # no instruction is the beginning of another
            if data[:size] in known:
                return known[data[:size]]
        try:
            inst = decode_inst(data, "cdna")
        except (ValueError, AssertionError) as error:
            raise NotImplementedError(f"no instruction at {pc:#x}: {data[:8].hex()}") from error
        name = inst.op_name.lower().removesuffix("_e32").removesuffix("_e64")
        form = type(inst).__name__.removesuffix("_LIT")
        translate = getattr(self, f"_{form.lower()}", None)
        try:
            if translate is None:
                raise KeyError(form)
            step = translate(name, inst, pc + inst.size())
        except (KeyError, IndexError, AttributeError) as error:
            raise NotImplementedError(
                f"the emulator does not know the instruction {name} ({form}) at {pc:#x}"
            ) from error
        except NotImplementedError as error:
            raise NotImplementedError(
                f"the emulator does not know this form of {name} ({form}) at {pc:#x}: {error}"
            ) from error
        if not isinstance(step, Branch):  # its target depends on where it is
            known[data[: inst.size()]] = step, inst.size(), name
        return step, inst.size(), name

    def _sopp(self, name: str, inst: Any, after: int) -> Any:
        target = after + 4 * ((inst.simm16 ^ 0x8000) - 0x8000)
        return {
            "s_endpgm": END,
            "s_barrier": BARRIER,
            "s_nop": _nothing,
            "s_sleep": _nothing,
            "s_waitcnt": _nothing,
            "s_branch": Branch(lambda w: np.ones(len(w.scc), bool), target),
            "s_cbranch_scc0": Branch(lambda w: ~w.scc, target),
            "s_cbranch_scc1": Branch(lambda w: w.scc, target),
            "s_cbranch_vccz": Branch(lambda w: w.pair(VCC) == 0, target),
            "s_cbranch_vccnz": Branch(lambda w: w.pair(VCC) != 0, target),
            "s_cbranch_execz": Branch(lambda w: w.pair(EXEC) == 0, target),
            "s_cbranch_execnz": Branch(lambda w: w.pair(EXEC) != 0, target),
        }[name]

    def _scalar_step(self, name: str, sources: list[Source], to: int) -> Step:
        _, op = isa.SCALAR[name]

        def step(w: Waves) -> None:
            value, scc, *exec_ = op(*(source(w) for source in sources), w.scc)
            if value is not None:
                write_scalar(w, to, value)
            if exec_:
                write_scalar(w, EXEC, exec_[0])
            if scc is not None:
                w.scc = np.broadcast_to(scc, w.scc.shape)

        return step

    def _sop2(self, name: str, inst: Any, _: int) -> Step:
        pair = (inst.ssrc0.offset, inst.ssrc1.offset)
        sources = self._scalars(isa.SCALAR[name][0], pair, inst)
        return self._scalar_step(name, sources, inst.sdst.offset)

    def _sopc(self, name: str, inst: Any, _: int) -> Step:
        pair = (inst.ssrc0.offset, inst.ssrc1.offset)
        return self._scalar_step(name, self._scalars(isa.SCALAR[name][0], pair, inst), -1)

    def _sop1(self, name: str, inst: Any, _: int) -> Step:
        kinds = isa.SCALAR[name][0].replace("X", "U")
        sources = self._scalars(kinds, (inst.ssrc0.offset, EXEC)[: len(kinds)], inst)
        return self._scalar_step(name, sources, inst.sdst.offset)

    def _sopk(self, name: str, inst: Any, _: int) -> Step:
        if name == "s_setreg_b32":
            return _set_mode(inst.simm16, _scalar_source("u", inst.sdst.offset, None))
        kinds, to = isa.SCALAR[name][0], inst.sdst.offset
        value = np.array([(inst.simm16 ^ 0x8000) - 0x8000], I32)
        if kinds[-1] == "u":
            value = value.astype(U32) & U32(0xFFFF)
        old = [_scalar_source(letter, to, None) for letter in kinds[:-1]]
        return self._scalar_step(name, [*old, lambda w: value], to)

    def _smem(self, name: str, inst: Any, _: int) -> Step:
        count = {"": 1, "x2": 2, "x4": 4, "x8": 8, "x16": 16}[name.removeprefix("s_load_dword")]
        _only(inst, imm=1, soffset_en=0)
        base, to = inst.sbase.offset, inst.sdata.offset
        offset = U64((inst.offset ^ 0x100000) - 0x100000 & 0xFFFFFFFFFFFFFFFF)

        def step(w: Waves) -> None:
            address = w.pair(base) + offset
            for i in range(count):
                (w.scalar[to + i],) = w.space.memory.load(address + U64(4 * i), 4)

        return step

    def _vector_step(self, name: str, sources: list[Source], to: int, carry: int = VCC) -> Step:
        _, op = isa.VECTOR[name]

        def step(w: Waves) -> None:
            result = computed(w, op, [source(w) for source in sources])
            if isinstance(result, tuple):
                result, mask = result
                if mask is not None:
                    write_mask(w, carry, mask)
            write_vector(w, to, result)

        return step

    def _vop1(self, name: str, inst: Any, _: int) -> Step:
        if name == "v_nop":
            return _nothing
        if name == "v_readfirstlane_b32":
            (source,) = self._vectors("u", (inst.src0.offset,), inst)
            return _first_lane(source, inst.vdst.offset % VECTORS)
        if name == "v_accvgpr_mov_b32":
            return _copy_accumulator(inst.src0.offset, True, inst.vdst.offset, True)
        if name == "v_swap_b32":
            return _swap(inst.src0.offset, inst.vdst.offset)
        if name in isa.SWAPS and self.code.arch == "gfx950":  # gfx942 has none
            return _swap_lanes(inst.src0.offset, inst.vdst.offset, isa.SWAPS[name])
        sources = self._vectors(isa.VECTOR[name][0], (inst.src0.offset,), inst)
        return self._vector_step(name, sources, inst.vdst.offset)

    def _vop2(self, name: str, inst: Any, _: int) -> Step:
        third = inst.vdst.offset if name == "v_fmac_f64" else VCC
        registers = (inst.src0.offset, inst.vsrc1.offset, third)
        sources = self._vectors(isa.VECTOR[name][0], registers, inst)
        return self._vector_step(name, sources, inst.vdst.offset)

    def _vopc(self, name: str, inst: Any, _: int) -> Step:
        registers = (inst.src0.offset, inst.vsrc1.offset)
        sources = self._vectors(isa.VECTOR[name][0], registers, inst)
        return self._vector_step(name, sources, VCC)

    def _vop3(self, name: str, inst: Any, _: int) -> Step:
        registers = (inst.src0.offset, inst.src1.offset, inst.src2.offset)
        if name in isa.TRUTH_TABLES:
            return self._truth_table(name, inst, registers)
        _only(inst, omod=0)
        if name == "v_readlane_b32":
            (source,) = self._vectors("u", registers[:1], inst)
            return _one_lane(source, _scalar_source("u", registers[1], None), registers, inst)
        if (name, self.code.arch) in isa.CONVERSIONS:
            return self._convert(name, inst, registers)
        kinds = isa.VECTOR[name][0]
        if any(registers[len(kinds) :]) or (inst.neg | inst.abs | inst.opsel) >> len(kinds):
            raise NotImplementedError("fields of a source that the instruction does not have")
        sources = self._vectors(kinds, registers, inst, inst.neg, inst.abs, inst.opsel)
        return self._vector_step(name + " clamp" * inst.clmp, sources, inst.vdst.offset)

    _vop3_sdst = _vop3

    def _vop3sd(self, name: str, inst: Any, _: int) -> Step:
        _only(inst, omod=0, neg=0, clmp=0)
        registers = (inst.src0.offset, inst.src1.offset, inst.src2.offset)
        sources = self._vectors(isa.VECTOR[name][0], registers, inst)
        return self._vector_step(name, sources, inst.vdst.offset, inst.sdst.offset)

    def _truth_table(self, name: str, inst: Any, registers: Sequence[int]) -> Step:
        """Any function of three bits; the fields of modifiers hold its table."""
        _only(inst, clmp=0, opsel=0)
        sources = self._vectors("uuu", registers, inst)
        table, mask = inst.omod << 6 | inst.abs << 3 | inst.neg, isa.TRUTH_TABLES[name]
        to = inst.vdst.offset

        def step(w: Waves) -> None:
            result = isa.truth_table(table, *(source(w) for source in sources))
            write_vector(w, to, result & mask | U32(GARBAGE) & ~mask)

        return step

    def _convert(self, name: str, inst: Any, registers: Sequence[int]) -> Step:
        """Two float32 to a byte or half of a register, or to all of it."""
        _only(inst, clmp=0)
        dtype = isa.CONVERSIONS[name, self.code.arch]
        sources = self._vectors("ff", registers[:2], inst, inst.neg, inst.abs)
        if "scale" in name:
            if registers[2] != _ONE or (inst.neg | inst.abs) >> 2:
                raise NotImplementedError("a scale other than 1.0")
            return self._convert_to_4_bits(dtype, sources, inst.vdst.offset, inst.opsel)
        if dtype.itemsize == 2:
            _only(inst, opsel=0)
            return self._convert_to_16_bits(dtype, sources, inst.vdst.offset)
        shift = U32(16 * (inst.opsel >> 3))
        to, keep = inst.vdst.offset, U32(0xFFFF0000 >> int(shift))
        fnuz = "fnuz" in dtype.name

        def code(x: np.ndarray) -> np.ndarray:
            out = x.astype(dtype).view(np.uint8)
            if fnuz:
                zero = (out == 0) & np.signbit(x)
                out = np.where(zero, np.uint8(self.fnuz_negative_zero), out)
            return out.astype(U32)

        def step(w: Waves) -> None:
            first, second = (code(source(w)) for source in sources)
            old = w.vector[to - VECTORS]
            write_vector(w, to, old & keep | (first | second << U32(8)) << shift)

        return step

    def _convert_to_4_bits(
        self, dtype: np.dtype, sources: list[Source], to: int, opsel: int
    ) -> Step:
        """To a byte, the first in the low nibble. It saturates; what a NaN becomes is garbage."""
        if opsel & 3:
            raise NotImplementedError(f"opsel={opsel}")
        shift = U32(8 * (opsel >> 2))

        def code(x: np.ndarray) -> np.ndarray:
            return np.where(np.isnan(x), GARBAGE & 15, x.astype(dtype).view(np.uint8)).astype(U32)

        def step(w: Waves) -> None:
            first, second = (code(source(w)) for source in sources)
            old = w.vector[to - VECTORS] & ~(U32(0xFF) << shift)
            write_vector(w, to, old | (first | second << U32(4)) << shift)

        return step

    def _convert_to_16_bits(self, dtype: np.dtype, sources: list[Source], to: int) -> Step:
        """To two halves of a word. Float16's subnormals stay: MODE has other bits for them."""

        def step(w: Waves) -> None:
            low, high = (np.broadcast_to(source(w), w.active.shape) for source in sources)
            small = any(_is_small(x, dtype)[w.active].any() for x in (low, high))
            if w.subnormals == 0 and small and dtype != np.float16:
                raise NotImplementedError("subnormals of bfloat16 where subnormals are flushed")
            low, high = (x.astype(dtype).view(np.uint16).astype(U32) for x in (low, high))
            write_vector(w, to, low | high << U32(16))

        return step

    def _vop3p_mfma(self, name: str, inst: Any, _: int) -> Step:
        """A product of matrices, in all lanes, whatever EXEC says."""
        _only(inst, abid=0, blgp=0, cbsz=0)
        if self.code.arch not in isa.MATRICES[name].archs:
            raise NotImplementedError(f"{self.code.arch} has no {name}")
        return self._matrix_step(isa.MATRICES[name], inst, ("", ""), lambda w: ((), ()))

    def _vop3px2(self, name: str, inst: Any, _: int) -> Step:
        """The same of codes with scales, of which each lane has one in a byte of a register."""
        _only(inst, x2encoding=0xD3AC, abid=1, neg=0, neg_hi=0)  # 1: it has scales
        if self.code.arch not in isa.MATRICES[name].archs:
            raise NotImplementedError(f"{self.code.arch} has no {name}")
        if inst._raw & _NO_FIELD:
            raise NotImplementedError("bits of no field")
        formats = tuple(isa.CODES[i] for i in (inst.cbsz, inst.blgp))
        sources = self._vectors("uu", (inst.scale_src0, inst.scale_src1), None)
        shifts = [8 * ((inst.opsel >> i & 1) + 2 * (inst.opsel_hi >> i & 1)) for i in range(2)]

        def scales(w: Waves) -> tuple:
            scale_words = (np.broadcast_to(source(w), w.active.shape) for source in sources)
            pairs = zip(scale_words, shifts, strict=True)
            return tuple(word >> U32(shift) & U32(0xFF) for word, shift in pairs)

        return self._matrix_step(isa.MATRICES[name], inst, formats, scales)

    def _matrix_step(
        self, matrix: isa.Matrix, inst: Any, formats: Sequence[str], scales: Callable
    ) -> Step:
        counts = [matrix.registers(format) for format in formats]
        sides = [
            (source.offset, bool(inst.acc >> i & 1), count)
            for i, (source, count) in enumerate(zip((inst.src0, inst.src1), counts, strict=True))
        ]
        total, to = inst.src2.offset, inst.vdst.offset
        constant = _constant(total, None, "u")
        size = matrix.side * matrix.side // 64

        def step(w: Waves) -> None:
            a, b = (_registers(w, *side) for side in sides)
            if constant is None:
                c = _registers(w, total, bool(inst.acc_cd), size)
            else:
                c = np.full((size, *w.active.shape), constant, U32)
            sums = matrix.multiplied((a, b), isa.f32(c), formats, scales(w))
            _registers(w, to, bool(inst.acc_cd), size)[...] = isa.bits(sums)

        return step

    def _vop3p(self, name: str, inst: Any, _: int) -> Step:
        """Two halves; which half of each source is a choice, and its sign."""
        if name in ("v_accvgpr_read", "v_accvgpr_write"):
            writes = name == "v_accvgpr_write"
            _only(inst, clmp=0, neg=0, neg_hi=0, opsel=0, opsel_hi=3, opsel_hi2=1)
            _unused(inst.src1, inst.src2)
            return _copy_accumulator(inst.src0.offset, not writes, inst.vdst.offset, writes)
        _only(inst, clmp=0)
        if name == "v_pk_mov_b32":
            return self._move_two(inst)
        base = isa.PACKED[name]
        kinds, op = isa.VECTOR[base]
        registers = (inst.src0.offset, inst.src1.offset, inst.src2.offset)[: len(kinds)]
        choose = (inst.opsel, inst.opsel_hi | inst.opsel_hi2 << 2)
        negate = (inst.neg, inst.neg_hi)
        halves = [
            [
                self._half(letter, register, choose[half] >> i & 1, negate[half] >> i & 1)
                for i, (letter, register) in enumerate(zip(kinds, registers, strict=True))
            ]
            for half in range(2)
        ]
        to = inst.vdst.offset

        def step(w: Waves) -> None:
            low, high = (computed(w, op, [source(w) for source in half]) for half in halves)
            if kinds[0] == "h":
                write_vector(w, to, low | high << U32(16))
            else:
                write_vector(w, to, low)
                write_vector(w, to + 1, high)

        return step

    def _move_two(self, inst: Any) -> Step:
        """A half of the first source, then one of the second; op_sel_hi says nothing here."""
        _only(inst, neg=0, neg_hi=0)
        registers, to = (inst.src0.offset, inst.src1.offset), inst.vdst.offset
        first, second = (
            self._half("u", r, inst.opsel >> i & 1, 0) for i, r in enumerate(registers)
        )

        def step(w: Waves) -> None:
            low, high = first(w), second(w).copy()  # the register itself, which `low` may go to
            write_vector(w, to, low)
            write_vector(w, to + 1, high)

        return step

    def _half(self, letter: str, register: int, high: int, negate: int) -> Source:
        if letter == "h":
            if negate or (register >= LITERAL - 15 and register < VECTORS):
                raise NotImplementedError("a sign or a float constant of a 16-bit pair")
            (source,) = self._vectors("u", (register,), None)
            shift = U32(16 * high)
            return lambda w: source(w) >> shift & U32(0xFFFF)
        # Constants have no second half: both halves are the constant.
        step = high if register < 128 or register >= VECTORS else 0
        (source,) = self._vectors(letter, (register + step,), None, negate)
        return source

    def _sdwa(self, name: str, inst: Any, _: int) -> Step:
        """Parts of registers."""
        _only(inst, clmp=0, omod=0)
        kinds, op = isa.VECTOR[name]
        parts = self._parts(kinds, inst)
        shift, mask = _SELECT[inst.dst_sel]
        to, keeps = inst.vdst.offset, inst.dst_unused == 2
        if inst.dst_unused == 1:
            raise NotImplementedError("SDWA that extends a sign")

        def step(w: Waves) -> None:
            result = _raw(computed(w, op, _with_carry(w, kinds, parts(w)))) & U32(mask)
            if mask != 0xFFFFFFFF:
                old = w.vector[to - VECTORS] & U32(~(mask << shift) & 0xFFFFFFFF)
                result = result << U32(shift) | (old if keeps else U32(0))
            write_vector(w, to, result)

        return step

    _vop1_sdwa = _vop2_sdwa = _sdwa

    def _vopc_sdwa_sdst(self, name: str, inst: Any, _: int) -> Step:
        """Compares parts of registers."""
        kinds, op = isa.VECTOR[name]
        parts, to = self._parts(kinds, inst), inst.sdst.offset if inst.sd else VCC
        return lambda w: write_vector(w, to, computed(w, op, _with_carry(w, kinds, parts(w))))

    def _parts(self, kinds: str, inst: Any) -> Callable[[Waves], list[np.ndarray]]:
        """The bits of SDWA's sources."""
        _only(inst, src0_sext=0, src1_sext=0, src0_neg=0, src0_abs=0, src1_neg=0, src1_abs=0)
        registers = [inst.vsrc0.offset - VECTORS * inst.s0]
        if len(kinds) > 1:
            registers.append(inst.vsrc1.offset - VECTORS * inst.s1)
        raw = self._vectors("u" * len(registers), registers, inst)
        selects = [_SELECT[s] for s in (inst.src0_sel, inst.src1_sel)][: len(raw)]
        pairs = list(zip(raw, selects, strict=True))
        return lambda w: [source(w) >> U32(shift) & U32(mask) for source, (shift, mask) in pairs]

    def _dpp(self, name: str, inst: Any, _: int) -> Step:
        """The first source comes from another lane."""
        _only(inst, row_mask=15, bank_mask=15, src0_neg=0, src0_abs=0, src1_neg=0, src1_abs=0)
        kinds, op = isa.VECTOR[name]
        lanes = _dpp_lanes(inst.dpp)
        registers = [inst.vsrc0.offset]
        if len(kinds) > 1:
            registers.append(inst.vsrc1.offset)
        sources = self._vectors("u" * len(registers), registers, inst)
        to, zero = inst.vdst.offset, bool(inst.bc)

        def step(w: Waves) -> None:
            first, *rest = (source(w) for source in sources)
            there = w.active[:, lanes]
            moved = np.where(there, first[:, lanes], U32(0))
            result = computed(w, op, _with_carry(w, kinds, [moved, *rest]))
            write_vector(w, to, result, None if zero else there)

        return step

    _vop1_dpp16 = _vop2_dpp16 = _dpp

    def _global(self, name: str, inst: Any, _: int) -> Step:
        _only(inst, sve=0)
        offset = U64((inst.offset ^ 0x1000) - 0x1000 & 0xFFFFFFFFFFFFFFFF)
        base, index = inst.saddr.offset, inst.addr.offset

        def address(w: Waves) -> np.ndarray:
            if base == 127:  # off
                whole = _vector_pair(w, index - VECTORS)
            else:
                whole = w.pair(base)[:, None] + w.vector[index - VECTORS].astype(U64)
            return (whole + offset)[w.active]

        access, width = name.removeprefix("global_").split("_", 1)
        _unused(inst.data if access == "load" else inst.vdst)
        if access == "load":
            size, part = isa.LOADS[width]
            to = _register(inst.vdst.offset, inst.acc)
            return lambda w: write_loaded(w, to(w), w.space.memory.load(address(w), size), part)
        size, part = isa.STORES[width] if access == "store" else {}[name]
        data = _register(inst.data.offset - VECTORS, inst.acc)
        return lambda w: w.space.memory.store(address(w), size, stored(w, data(w), size, part))

    def _ds(self, name: str, inst: Any, _: int) -> Step:
        _only(inst, gds=0)
        index = inst.addr.offset - VECTORS
        both = inst.offset0 | inst.offset1 << 8
        if not name.startswith(("ds_read", "ds_write")):
            _only(inst, acc=0)
        if name == "ds_bpermute_b32":
            return _gather_lanes(index, inst.data0.offset - VECTORS, inst.vdst.offset, both)
        if name == "ds_swizzle_b32":
            return _swizzle(index, inst.vdst.offset, both)
        access, width = name.removeprefix("ds_").split("_", 1)
        size, part = (isa.LOADS if access.startswith("read") else isa.STORES)[width]
        unit = size * (64 if access.endswith("st64") else 1)
        two = "2" in access
        offsets = [inst.offset0 * unit, inst.offset1 * unit] if two else [both]

        def places(w: Waves, offset: int) -> tuple[np.ndarray, np.ndarray]:
            group = np.broadcast_to(w.workgroup[:, None], w.active.shape)[w.active]
            return group, w.vector[index][w.active] + U32(offset)

        _unused(*(() if two and not access.startswith("read") else (inst.data1,)))
        if access.startswith("read"):
            to, count = _register(inst.vdst.offset, inst.acc), max(size // 4, 1)

            def read(w: Waves) -> None:
                loaded = [w.space.shared.load(*places(w, offset), size) for offset in offsets]
                for i, values in enumerate(loaded):
                    write_loaded(w, to(w) + i * count, values, part)

            return read
        data = [_register(d.offset - VECTORS, inst.acc) for d in (inst.data0, inst.data1)]

        def write(w: Waves) -> None:
            for register, offset in zip(data, offsets):  # noqa: B905
                values = stored(w, register(w), size, part)
                w.space.shared.store(*places(w, offset), size, values)

        return write

    # ---- operands ---
    def _scalars(self, kinds: str, registers: Sequence[int], inst: Any) -> list[Source]:
        return [
            _scalar_source(letter, register, getattr(inst, "literal", None))
            for letter, register in zip(kinds, registers, strict=True)
        ]

    def _vectors(
        self,
        kinds: str,
        registers: Sequence[int],
        inst: Any,
        negate: int = 0,
        magnitude: int = 0,
        select: int = 0,
    ) -> list[Source]:
        """Sources of a vector instruction; bit i of the last three is about source i."""
        literal = getattr(inst, "literal", None)
        sources = []
        for i, letter in enumerate(kinds):
            signs = (bool(negate >> i & 1), bool(magnitude >> i & 1))
            if any(signs) and letter not in "fF":
                raise NotImplementedError("the sign of an integer source")
            if select >> i & 1 and letter not in "he":
                raise NotImplementedError("half of a 32-bit source")
            source = _vector_source(letter, registers[i], literal, bool(select >> i & 1))
            sources.append(_signed(source, *signs) if any(signs) else source)
        return sources


# ---- registers ---
def write_scalar(w: Waves, register: int, value: np.ndarray) -> None:
    """One register, or two for 64 bits."""
    if register >= 128:
        raise Fault(f"write to scalar register {register}")
    if value.dtype.itemsize == 8:
        w.scalar[register] = (value & U64(0xFFFFFFFF)).astype(U32)
        w.scalar[register + 1] = (value >> U64(32)).astype(U32)
    else:
        w.scalar[register] = value
    if register in (EXEC - 1, EXEC, EXEC + 1):
        w.look_at_exec()


def _register(number: int, accumulates: int) -> Callable[[Waves], int]:
    """A vector register's number, which is that of an accumulator behind the plain ones."""
    return lambda w: number + w.space.accumulators * accumulates


def write_mask(w: Waves, register: int, lanes: np.ndarray) -> None:
    """A lane mask; the bits of inactive lanes become 0."""
    write_scalar(w, register, pack(np.broadcast_to(lanes, w.active.shape) & w.active))


def write_vector(
    w: Waves, register: int, value: np.ndarray, where: np.ndarray | None = None
) -> None:
    """The active lanes of one register, or of two for 64 bits; a mask goes to scalar registers."""
    if value.dtype == bool:
        return write_mask(w, register, value)
    if value.dtype.itemsize == 8:
        value = value.view(U64) if value.dtype == F64 else value
        write_vector(w, register, (value & U64(0xFFFFFFFF)).astype(U32), where)
        return write_vector(w, register + 1, (value >> U64(32)).astype(U32), where)
    if not 0 <= register - VECTORS < len(w.vector):
        raise Fault(f"write to vector register {register - VECTORS} of {len(w.vector)}")
    to, value = w.vector[register - VECTORS], _raw(value)
    if where is None and w.all_active:
        to[...] = value
    else:
        np.copyto(to, value, where=w.active if where is None else w.active & where)


def write_loaded(w: Waves, register: int, words: list[np.ndarray], part: str) -> None:
    """Words of the active lanes, as memory gave them."""
    for i, word in enumerate(words):
        if not 0 <= register - VECTORS + i < len(w.vector):
            raise Fault(f"write to vector register {register - VECTORS + i} of {len(w.vector)}")
        to = w.vector[register - VECTORS + i]
        if part == "low":
            word = to[w.active] & U32(0xFFFF0000) | word
        elif part == "high":
            word = to[w.active] & U32(0xFFFF) | word << U32(16)
        to[w.active] = word


def stored(w: Waves, register: int, size: int, part: str) -> list[np.ndarray]:
    """Words of the active lanes, for memory."""
    values = [w.vector[register + i][w.active] for i in range(max(size // 4, 1))]
    return [word >> U32(16) for word in values] if part == "high" else values


def _constant(register: int, literal: int | None, letter: str) -> int | None:
    """The bits of an operand that is one."""
    bits = 64 if letter in "UIF" else 32
    if 128 <= register <= 192:
        return register - 128
    if 193 <= register <= 208:
        return 192 - register & (1 << bits) - 1
    if register in _FLOATS and letter == "F":
        return int(np.array(_FLOATS[register], F64).view(U64))
    if register in _FLOATS and bits == 32:
        return int(np.array(_FLOATS[register], F32).view(U32))
    if register == LITERAL and literal is not None and letter == "F":
        return literal << 32  # the upper half of a float64
    # To 64 bits a literal is extended; how, shows in those with a sign only.
    if register == LITERAL and literal is not None and (bits == 32 or not literal >> 31):
        return literal
    if 128 <= register < VECTORS and register != SCC:
        raise NotImplementedError(f"operand {register}")
    return None


def _scalar_source(letter: str, register: int, literal: int | None) -> Source:
    bits = 64 if letter in "UIF" else 32
    value = _constant(register, literal, letter)
    if value is not None:
        constant = _typed(np.array([value], U64 if bits == 64 else U32), letter)
        return lambda w: constant
    if register == SCC:
        return lambda w: _typed(w.scc.astype(U32), letter)
    if bits == 64:
        return lambda w: _typed(w.pair(register), letter)
    return lambda w: _typed(w.scalar[register], letter)


def _vector_source(letter: str, register: int, literal: int | None, high: bool) -> Source:
    if letter == "m":
        return lambda w: unpack(w.pair(register))
    if register < VECTORS:
        if letter in "he" and 128 <= register and not 128 <= register <= 208:
            raise NotImplementedError("a float constant of 16 bits")
        scalar = _scalar_source("u" if letter in "he" else letter, register, literal)
        column: Source = lambda w: scalar(w)[:, None]  # noqa: E731
    elif letter in "UIF":
        pair: Source = lambda w: _vector_pair(w, register - VECTORS)  # noqa: E731
        return lambda w: _typed(pair(w), letter)
    else:
        column = lambda w: w.vector[register - VECTORS]  # noqa: E731
    if letter in "he":
        shift = U32(16 * high)
        return lambda w: _typed(column(w) >> shift & U32(0xFFFF), letter)
    return lambda w: _typed(column(w), letter)


def _vector_pair(w: Waves, index: int) -> np.ndarray:
    return w.vector[index].astype(U64) | w.vector[index + 1].astype(U64) << U64(32)


def _typed(x: np.ndarray, letter: str) -> np.ndarray:
    """These bits as the type of a signature's letter."""
    if letter == "e":
        return x.astype(np.uint16).view(np.float16)
    to = {"i": I32, "f": F32, "I": I64, "F": F64}.get(letter)
    return x if to is None or x.dtype == to else np.ascontiguousarray(x).view(to)


def _with_carry(w: Waves, kinds: str, bits: list[np.ndarray]) -> list[np.ndarray]:
    """A signature's sources from their bits; VCC is the lane mask that it may end with."""
    values = [_typed(x, letter) for x, letter in zip(bits, kinds.removesuffix("m"), strict=True)]
    return [*values, unpack(w.pair(VCC))] if kinds.endswith("m") else values


def _raw(x: np.ndarray) -> np.ndarray:
    """The bits of a result."""
    return x if x.dtype == U32 else np.ascontiguousarray(x).view(U32)


def _signed(source: Source, negate: bool, magnitude: bool) -> Source:
    def modified(w: Waves) -> np.ndarray:
        x = source(w)
        x = np.abs(x) if magnitude else x
        return -x if negate else x

    return modified


def computed(w: Waves, op: Callable, values: list[np.ndarray]) -> Any:
    """The result of `op` for these values, in the mode of the waves.

    Float64 of lanes that rest count as zeros: they are garbage, which `op` may refuse.
    """
    if not w.all_active and values[0].dtype == F64:
        values = [np.where(w.active, x, np.zeros((), x.dtype)) for x in values]
    if not w.subnormals & 1:
        values = [_flushed(x) for x in values]
    result = op(*values)
    if w.subnormals & 2:
        return result
    if op is np.multiply and result.dtype == F32:  # a subnormal's few bits may round up to 2^-126
        bits = (np.multiply(*(x.astype(F64) for x in values)) * 2.0**126).astype(F32)
        return np.where(np.abs(bits) < 1, np.copysign(F32(0), result), result)
    return result if isinstance(result, tuple) else _flushed(result)


def _set_mode(field: int, source: Source) -> Step:
    """s_setreg_b32 of two bits of MODE: whether float32 keep subnormals."""
    if field != 1 | 4 << 6 | (2 - 1) << 11:
        raise NotImplementedError(f"field {field:#x} of a hardware register")

    def step(w: Waves) -> None:
        mode = np.unique(source(w))
        if len(mode) != 1 or mode[0] not in (0, 2, 3):
            raise NotImplementedError(f"float32 modes {mode}")
        w.subnormals = int(mode[0])

    return step


def _is_small(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Where the number, which is not 0, is smaller than the dtype's normal ones."""
    return (x != 0) & (np.abs(x) < np.float64(ml_dtypes.finfo(dtype).smallest_normal))


def _flushed(x: np.ndarray) -> np.ndarray:
    """Subnormal float32 become zeros of their sign."""
    if x.dtype != F32:
        return x
    return np.where(np.abs(x) < np.finfo(F32).tiny, np.copysign(F32(0), x), x)


# ---- between lanes ---
_SELECT = [(0, 0xFF), (8, 0xFF), (16, 0xFF), (24, 0xFF), (0, 0xFFFF), (16, 0xFFFF), (0, 0xFFFFFFFF)]


def _dpp_lanes(control: int) -> np.ndarray:
    """The lane that each lane reads."""
    if control < 0x100:  # QUAD_PERM
        return _LANE & ~3 | control >> 2 * (_LANE & 3) & 3
    if 0x121 <= control <= 0x12F:  # ROW_ROR
        return _LANE & ~15 | _LANE - (control & 15) & 15
    if control in (0x140, 0x141):  # ROW_MIRROR, ROW_HALF_MIRROR
        return _LANE ^ (15 if control == 0x140 else 7)
    raise NotImplementedError(f"DPP control {control:#x}")


def _gather_lanes(index: int, data: int, to: int, offset: int) -> Step:
    """ds_bpermute_b32: each lane names the lane that it reads; an inactive one gives 0."""

    def step(w: Waves) -> None:
        lanes = (w.vector[index] + U32(offset) >> U32(2) & U32(63)).astype(np.int64)
        gathered = np.take_along_axis(w.vector[data], lanes, axis=1)
        there = np.take_along_axis(w.active, lanes, axis=1)
        write_vector(w, to, np.where(there, gathered, U32(0)))

    return step


def _swizzle(data: int, to: int, control: int) -> Step:
    """ds_swizzle_b32 in bit-mask mode: within 32 lanes, (lane & and) | or, ^ xor."""
    if control & 0x8000:
        raise NotImplementedError("ds_swizzle_b32 in quad mode")
    keep, set_, flip = (control >> shift & 31 for shift in (0, 5, 10))
    lanes = _LANE & 32 | (_LANE & keep | set_) ^ flip

    def step(w: Waves) -> None:
        write_vector(w, to, np.where(w.active[:, lanes], w.vector[data][:, lanes], U32(0)))

    return step


def _first_lane(source: Source, to: int) -> Step:
    """v_readfirstlane_b32: of the first active lane, of lane 0 where none is."""

    def step(w: Waves) -> None:
        values = np.broadcast_to(source(w), w.active.shape)
        write_scalar(w, to, values[np.arange(len(values)), w.active.argmax(1)])

    return step


def _swap(first: int, second: int) -> Step:
    """v_swap_b32: each of two vector registers gets the other's."""

    def step(w: Waves) -> None:
        values = [w.vector[register - VECTORS].copy() for register in (second, first)]
        write_vector(w, first, values[0])
        write_vector(w, second, values[1])

    return step


def _swap_lanes(first: int, second: int, step: int) -> Step:
    """v_permlane16_swap_b32 and v_permlane32_swap_b32: `isa.SWAPS` says which lanes swap."""
    other, lower = _LANE ^ step, _LANE & step == 0

    def swap(w: Waves) -> None:
        if (w.active != w.active[:, other]).any():
            raise NotImplementedError("a lane that swaps with one that rests")
        values = [w.vector[register - VECTORS][:, other] for register in (second, first)]
        write_vector(w, first, values[0], lower)
        write_vector(w, second, values[1], ~lower)

    return swap


def _one_lane(source: Source, lane: Source, registers: Sequence[int], inst: Any) -> Step:
    """v_readlane_b32: of the lane that a scalar says, active or not."""
    to = inst.vdst.offset % VECTORS

    def step(w: Waves) -> None:
        values = np.broadcast_to(source(w), w.active.shape)
        at = np.broadcast_to(lane(w), len(values)) & U32(63)
        write_scalar(w, to, values[np.arange(len(values)), at])

    return step


# ---- matrices ---
_NO_FIELD = 0xFF | 3 << 14 | 0x1FF << 50  # of an instruction with scales, in its first half


def _registers(w: Waves, register: int, accumulates: bool, count: int) -> np.ndarray:
    """Vector registers (count, waves, 64), themselves: plain ones, or accumulators behind them."""
    if register < VECTORS:
        raise NotImplementedError(f"operand {register} of matrices")
    first = _register(register - VECTORS, accumulates)(w)
    if first + count > len(w.vector):
        raise Fault(f"vector registers {first} to {first + count - 1} of {len(w.vector)}")
    return w.vector[first : first + count]


def _copy_accumulator(register: int, from_: bool, to: int, into: bool) -> Step:
    """v_accvgpr_read, _write and _mov_b32: between plain vector registers and accumulators."""
    constant = _constant(register, None, "u")

    def step(w: Waves) -> None:
        value = constant if constant is not None else _registers(w, register, from_, 1)[0]
        np.copyto(_registers(w, to, into, 1)[0], value, where=w.active)

    return step


def _unused(*registers: Any) -> None:
    """Raises where a field without use is not 0, as compilers leave it."""
    if any(register.offset % VECTORS for register in registers):
        raise NotImplementedError("a register in a field without use")


def _nothing(w: Waves) -> None:
    """Waits and no-ops: there is no time here."""


def _only(inst: Any, **fields: int) -> None:
    """Raises where a field has another value than the one that is implemented."""
    for name, value in fields.items():
        if getattr(inst, name, value) != value:
            raise NotImplementedError(f"{name}={getattr(inst, name)}")
