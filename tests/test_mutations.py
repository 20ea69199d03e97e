"""Would the tests of test_emulated.py notice? Single-bit changes in kernels' code, as a sample.

A change is caught when results differ, or when the emulator faults or refuses what it now reads.
"""

import collections
from typing import Any

import numpy as np
import pytest

from jax_mx.kernels.shipped import SHIPPED

pytest.importorskip("tinygrad")

from emulation import Program, example
from tinygrad.renderer.amd import decode_inst

from jax_mx.testing.emulator import Emulator
from jax_mx.testing.memory import Fault

SAMPLE = 120  # changes of each kernel
UNOBSERVABLE = ("s_nop", "s_waitcnt")  # time, which the emulator does not model
CACHES = ("sc0", "sc1", "nt", "glc", "nv")  # nor these


def program_of(form, arch, shape, layout="row_major", scaling="rceil", preprocessed=False):
    """A bfloat16 variant's program, and the bytes of its operands and results."""
    of_form = (v for v in SHIPPED if (v.implementation, str(v.form)) == ("flydsl", form))
    variant = next(v for v in of_form if v.changes_elements == preprocessed and v.window == 32)
    options = {"scale_layout": layout, "scaling": scaling}
    return Program(variant, arch, shape, **options), example(variant, shape, **options)


def fields(data: bytes) -> dict[str, Any]:
    """The fields of the instruction that these bytes begin with."""
    inst = decode_inst(data, "cdna")
    return {name: getattr(inst, name) for name, _ in inst._fields} | {"op": inst.op_name.lower()}


def survivor_class(old: dict[str, Any], field: str) -> str:
    """Why a change may do nothing: the field of the instruction that it is in."""
    if field in CACHES:
        return "caches"
    if field == "op":
        return "another instruction, the same on these values"
    if field == "literal" or "offset" in field:
        return "a constant with room"
    if "dst" in field or "data" in field:
        return "a result that is not used"
    if field.startswith(("src", "vsrc", "ssrc", "sbase", "addr", "saddr")):
        return "another operand, the same on these values"
    return f"a field without use ({field})"


@pytest.mark.sampled(6)
@pytest.mark.every_binary
@pytest.mark.parametrize(
    "form,architecture,cases",
    [
        ("last", "gfx950", [((65, 96), "row_major"), ((65, 96), "row_major", "even")]),
        ("second_transposed", "gfx942",
         [((96, 80), "shuffled_32x8"), ((96, 80), "shuffled_32x8", "even")]),
    ],
)  # fmt: skip
def test_changed_bits_are_noticed(form, architecture, cases, capsys):
    programs = [program_of(form, architecture, *case) for case in cases]
    code = programs[0][0].code
    emulator = Emulator(code)

    def passes() -> bool:
        return all(p.run(0, *example, "serial", emulator=emulator) for p, example in programs)

    assert passes()
    emulator.limit = 300
    whole = dict(emulator._steps)  # what was executed, by its address
    bits = [
        (pc, bit) for pc, (_, size, name) in whole.items() for bit in range(8 * size)
        if name not in UNOBSERVABLE
    ]  # fmt: skip
    outcomes, survivors = collections.Counter(), collections.Counter()
    for i in np.random.default_rng(0).permutation(len(bits))[:SAMPLE]:
        pc, bit = bits[i]
        before = bytes(code.memory[pc : pc + 16])
        code.memory[pc + bit // 8] ^= 1 << bit % 8
        emulator._steps = {at: step for at, step in whole.items() if at != pc}
        try:
            outcome = "survived" if passes() else "other bytes"
        except Fault:
            outcome = "fault"
        except NotImplementedError:
            outcome = "refused"
        outcomes[outcome] += 1
        if outcome == "survived":
            old, new = fields(before), fields(bytes(code.memory[pc : pc + 16]))
            changed = [name for name in old if old[name] != new.get(name)]
            survivors[survivor_class(old, changed[0] if changed else "")] += 1
        code.memory[pc : pc + 16] = before
    rate = 1 - outcomes["survived"] / SAMPLE
    with capsys.disabled():
        print(f"\n{form} on {architecture}: {rate:.1%} of {SAMPLE} noticed, {dict(outcomes)}")
        print("survivors:", ", ".join(f"{n} {what}" for what, n in survivors.most_common()))
    assert rate > 0.8


@pytest.mark.sampled(8)
@pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    "form,preprocessed", [("second_transposed", False), ("both_transposed", True)]
)
def test_a_missing_barrier_is_noticed(form, preprocessed, architecture):
    """Each s_barrier of a kernel in turn becomes an s_nop; lock step alone would hide it."""
    how = (form, architecture, (96, 96))
    program, (operands, results) = program_of(*how, preprocessed=preprocessed)
    code, emulator = program.code, Emulator(program.code)
    assert program.run(0, operands, results, "serial", emulator=emulator)
    barriers = [pc for pc, (_, _, name) in emulator._steps.items() if name == "s_barrier"]
    assert barriers
    for pc in barriers:
        before = bytes(code.memory[pc : pc + 4])
        code.memory[pc : pc + 4] = bytes([0, 0, 0x80, 0xBF])  # s_nop 0
        noticed = [
            not program.run(0, operands, results, order, emulator=Emulator(code))
            for order in ("serial", "reversed")
        ]
        assert any(noticed), hex(pc)
        code.memory[pc : pc + 4] = before
