"""Would the tests of test_emulated.py notice? Single-bit changes in kernels' code, as a sample.

A change is caught when results differ, or when the emulator faults or refuses what it now reads.
"""

import collections
from typing import Any

import numpy as np
import pytest

from jax_mx.formats.formats import MXFP8_E4M3
from jax_mx.quantizing.facts.product_kernels import ProductKernel
from jax_mx.shipping.shipped import SHIPPED

pytest.importorskip("tinygrad")

from emulation import Program, example
from test_amd_products import exact_product
from tinygrad.renderer.amd import decode_inst

from jax_mx.launch.emulation.emulator import Emulator
from jax_mx.launch.emulation.memory import Fault

# Time, which the emulator does not model; branches past what no lane does.
UNOBSERVABLE = ("s_nop", "s_waitcnt", "s_cbranch_execz")
CACHES = ("sc0", "sc1", "nt", "glc", "nv")  # nor these


def program_of(form, arch, shape, layout="row_major", scaling="rceil", preprocessed=False):
    """A bfloat16 variant's program, and the bytes of its operands and results."""
    of_form = (v for v in SHIPPED if (v.implementation, str(v.form)) == ("flydsl", form))
    variant = next(v for v in of_form if v.changes_elements == preprocessed and v.window == 32)
    options = {"scale_layout": layout, "scaling": scaling}
    return Program(variant, arch, shape, **options), example(variant, shape, **options)


def runs_of(form, arch, cases) -> tuple:
    """The code of a form's kernel, or of a product's, and what says whether a case is right."""
    if form.endswith("fp8"):
        product = ProductKernel(form, "flydsl", (MXFP8_E4M3, MXFP8_E4M3), 128)
        pairs = [exact_product(product, arch, *case) for case in cases]

        def runs(program, want):
            return lambda order, emulator: (program.y(0, order, emulator) == want).all()

        return pairs[0][0].code, [runs(*pair) for pair in pairs]
    programs = [program_of(form, arch, *case) for case in cases]
    return programs[0][0].code, [
        lambda order, emulator, p=p, example=example: p.run(0, *example, order, emulator=emulator)
        for p, example in programs
    ]


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


@pytest.mark.sampled(2)
@pytest.mark.every_binary
@pytest.mark.parametrize(
    "form,architecture,changes,least,cases",
    [
        ("last", "gfx950", 120, 0.8, [((65, 96), "row_major"), ((65, 96), "row_major", "even")]),
        # Each of a product's 64 stores has a mask of its own, and most masks are the same.
        ("wgrad_fp8", "gfx942", 120, 0.8, [((130, 132, 288), [1, 0, 100, 170])]),
        ("matmul_fp8", "gfx950", 60, 0.7,
         [((130, 132, 288), [1, 0, 100]), ((33, 7, 544), [1, 0, 31])]),
        ("second_transposed", "gfx942", 120, 0.8,
         [((96, 80), "shuffled_32x8"), ((96, 80), "shuffled_32x8", "even")]),
    ],
)  # fmt: skip
def test_changed_bits_are_noticed(form, architecture, changes, least, cases, capsys):
    code, runs = runs_of(form, architecture, cases)
    emulator = Emulator(code)
    order = "lockstep" if form.endswith("fp8") else "serial"  # a third of the time

    def passes() -> bool:
        return all(run(order, emulator) for run in runs)

    assert passes()
    emulator.limit = 300
    whole = dict(emulator._steps)  # what was executed, by its address
    bits = [
        (pc, bit) for pc, (_, size, name) in whole.items() for bit in range(8 * size)
        if name not in UNOBSERVABLE
    ]  # fmt: skip
    outcomes, survivors = collections.Counter(), collections.Counter()
    for i in np.random.default_rng(0).permutation(len(bits))[:changes]:
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
    rate = 1 - outcomes["survived"] / changes
    with capsys.disabled():
        print(f"\n{form} on {architecture}: {rate:.1%} of {changes} noticed, {dict(outcomes)}")
        print("survivors:", ", ".join(f"{n} {mutation}" for mutation, n in survivors.most_common()))
    assert rate > least


@pytest.mark.sampled(8)
@pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])
@pytest.mark.parametrize(
    "form,case",
    [
        ("matmul_fp8", ((65, 70, 544), [1, 0, 60])),
        ("second_transposed", ((96, 96),)),
        ("both_transposed", ((96, 96), "row_major", "rceil", True)),
    ],
)
def test_a_missing_barrier_is_noticed(form, case, architecture):
    """Each s_barrier of a kernel in turn becomes an s_nop; lock step alone would hide it."""
    code, (run,) = runs_of(form, architecture, [case])
    emulator = Emulator(code)
    assert run("serial", emulator)
    barriers = [pc for pc, (_, _, name) in emulator._steps.items() if name == "s_barrier"]
    assert barriers
    for pc in barriers:
        before = bytes(code.memory[pc : pc + 4])
        code.memory[pc : pc + 4] = bytes([0, 0, 0x80, 0xBF])  # s_nop 0
        noticed = [not run(order, Emulator(code)) for order in ("serial", "reversed")]
        assert any(noticed), hex(pc)
        code.memory[pc : pc + 4] = before
