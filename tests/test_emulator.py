"""The emulator by itself: each instruction against AMD's ISA manuals, memory, and waves."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("tinygrad")

from tinygrad.renderer.amd.dsl import DPP, EXEC_HI, SDWA, s, v
from tinygrad.runtime.autogen.amd.cdna import ins

from jax_mx.launch.emulation import instructions as isa
from jax_mx.launch.emulation.emulator import GARBAGE, Emulator, Space, Waves, unpack
from jax_mx.launch.emulation.memory import Fault, Global, Shared

U32, U64 = np.uint32, np.uint64
EXEC, CARRY = 126, 20  # registers: EXEC, and where tests put other masks
OUT = 20  # the vector register of results


def of_code(*code, arch="gfx950") -> Emulator:
    """An emulator of a kernel with these instructions."""
    image = b"".join(i.to_bytes() for i in (*code, ins.s_endpgm())) + bytes(16)
    return Emulator(SimpleNamespace(memory=image, arch=arch, kernels={}))


def execute(
    *code, vectors=None, scalars=None, exec_=(1 << 64) - 1, scc=False, flushes=False, arch="gfx950",
    memory=None, waves=1, order="lockstep",
) -> Waves:  # fmt: skip
    """The state after these instructions. Lists of values are one per lane, the last repeated."""
    emulator = of_code(*code, arch=arch)
    space = Space(memory or Global(), Shared(1, 1024), 0 if flushes else 3)
    scalar = np.full((128, waves), GARBAGE, U32)
    vector = np.full((32, waves, 64), GARBAGE, U32)
    for register, value in {**(scalars or {}), EXEC: exec_}.items():
        scalar[register], scalar[register + 1] = value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF
    for register, value in (vectors or {}).items():
        values = [value] if isinstance(value, int) else [*value]
        for lane, x in enumerate(values + values[-1:] * (64 - len(values))):
            vector[register, :, lane] = x & 0xFFFFFFFF
            if x >> 32:
                vector[register + 1, :, lane] = x >> 32 & 0xFFFFFFFF
    state = Waves(space, 0, np.zeros(waves, int), scalar, vector)
    state.scc = np.full(waves, scc)
    with np.errstate(all="ignore"):
        emulator.run(state, order, waves)
    return state


def f32(x: float) -> int:
    """The bits of a float32."""
    return int(np.float32(x).view(U32))


def f64(x: float) -> int:
    """The bits of a float64."""
    return int(np.float64(x).view(U64))


def bits16(x: float) -> int:
    """The bits of a float16."""
    return int(np.float16(x).view(np.uint16))


INF, NAN, TINY = f32(np.inf), f32(np.nan), 1  # TINY: the smallest subnormal
M1, ALL64 = (1 << 32) - 1, (1 << 64) - 1
BIG = 1 << 63

# ---- scalar: (sources, SCC before) -> (result, SCC after; None: kept) ---
SCALAR = {
    "s_mov_b32": [((5,), 1, 5, None)],
    "s_mov_b64": [((BIG | 3,), 0, BIG | 3, None)],
    "s_movk_i32": [((-2,), 0, 0xFFFFFFFE, None)],
    "s_addk_i32": [((7, -9), 1, 0xFFFFFFFE, 0), ((0x7FFFFFFF, 1), 0, 0x80000000, 1)],
    "s_mulk_i32": [((7, -2), 1, 0xFFFFFFF2, None), ((0x40000001, 4), 0, 4, None)],
    "s_brev_b32": [((0x12345678,), 0, 0x1E6A2C48, None)],
    "s_not_b32": [((0,), 0, M1, 1), ((M1,), 1, 0, 0)],
    "s_not_b64": [((0,), 0, (1 << 64) - 1, 1)],
    "s_add_u32": [((M1, 1), 0, 0, 1), ((2, 3), 1, 5, 0)],
    "s_addc_u32": [((M1, 0), 1, 0, 1), ((2, 3), 1, 6, 0), ((2, 3), 0, 5, 0)],
    "s_sub_u32": [((1, 2), 0, M1, 1), ((3, 2), 1, 1, 0)],
    "s_subb_u32": [((3, 2), 1, 0, 0), ((2, 2), 1, M1, 1)],
    "s_add_i32": [((0x7FFFFFFF, 1), 0, 0x80000000, 1), ((M1, 1), 1, 0, 0)],
    "s_sub_i32": [((0x80000000, 1), 0, 0x7FFFFFFF, 1), ((0, 1), 1, M1, 0)],
    "s_mul_i32": [((M1, 5), 1, M1 - 4, None)],
    "s_mul_hi_u32": [((M1, 16), 0, 15, None)],
    "s_mul_hi_i32": [((M1, 16), 1, M1, None), ((0x7FFFFFFF, 4), 0, 1, None)],
    "s_and_b32": [((6, 3), 0, 2, 1), ((4, 3), 1, 0, 0)],
    "s_or_b32": [((4, 3), 0, 7, 1), ((0, 0), 1, 0, 0)],
    "s_xor_b32": [((6, 3), 0, 5, 1), ((6, 6), 1, 0, 0)],
    "s_andn2_b32": [((7, 2), 0, 5, 1), ((2, 2), 1, 0, 0)],
    "s_and_b64": [((BIG | 6, BIG | 3), 0, BIG | 2, 1), ((BIG, 1), 1, 0, 0)],
    "s_or_b64": [((BIG, 1), 0, BIG | 1, 1)],
    "s_xor_b64": [((BIG | 1, 1), 0, BIG, 1), ((BIG, BIG), 1, 0, 0)],
    "s_andn2_b64": [((BIG | 1, 1), 0, BIG, 1), ((1, BIG | 1), 1, 0, 0)],
    "s_bcnt1_i32_b64": [((BIG | 5,), 0, 3, 1), ((0,), 1, 0, 0)],
    "s_bitcmp0_b32": [((4, 2), 1, None, 0), ((4, 33), 0, None, 1)],
    "s_bitcmp1_b32": [((4, 34), 0, None, 1), ((4, 1), 1, None, 0)],
    "s_lshl_b32": [((3, 33), 0, 6, 1), ((0x80000000, 1), 1, 0, 0)],
    "s_lshl1_add_u32": [((0x80000000, 3), 0, 3, 1)],
    "s_lshl2_add_u32": [((3, 1), 1, 13, 0), ((0x40000000, 0), 0, 0, 1)],
    "s_lshl3_add_u32": [((1, M1), 0, 7, 1)],
    "s_lshl4_add_u32": [((0x0FFFFFFF, 16), 0, 0, 1), ((1, 2), 1, 18, 0)],
    "s_lshr_b32": [((0x80000000, 31), 0, 1, 1), ((1, 1), 1, 0, 0)],
    "s_ashr_i32": [((0x80000000, 31), 0, M1, 1)],
    "s_lshl_b64": [((3, 63), 0, BIG, 1), ((BIG, 1), 1, 0, 0)],
    "s_lshr_b64": [((BIG, 63), 0, 1, 1)],
    "s_ashr_i64": [((BIG, 63), 0, (1 << 64) - 1, 1)],
    "s_bfe_u32": [((0xABCD, 8 << 16 | 4), 0, 0xBC, 1), ((0xF, 4 << 16 | 8), 1, 0, 0)],
    "s_min_i32": [((M1, 1), 0, M1, 1), ((1, 1), 1, 1, 0)],
    "s_min_u32": [((M1, 1), 1, 1, 0)],
    "s_max_i32": [((M1, 1), 1, 1, 0), ((2, 1), 0, 2, 1)],
    "s_max_u32": [((M1, 1), 0, M1, 1)],
    "s_cselect_b32": [((1, 2), 1, 1, None), ((1, 2), 0, 2, None)],
    "s_cselect_b64": [((BIG, 2), 1, BIG, None), ((BIG, 2), 0, 2, None)],
    "s_cmp_eq_u64": [((BIG | 1, BIG | 1), 0, None, 1), ((BIG, 0), 1, None, 0)],
    "s_cmp_lg_u64": [((BIG, 0), 0, None, 1)],
}
_COMPARE = {"eq": "010", "lg": "101", "gt": "001", "ge": "011", "lt": "100", "le": "110"}
for _name, _results in _COMPARE.items():  # of (1, 2), (2, 2), (-1, 2) unsigned
    for _kind, _pairs in (("u", ((1, 2), (2, 2), (M1, 2))), ("i", ((M1, 2), (2, 2), (3, 2)))):
        for _cmp in ("cmp", "cmpk"):
            SCALAR[f"s_{_cmp}_{_name}_{_kind}32"] = [
                (pair, 1 - int(bit), None, int(bit))
                for pair, bit in zip(_pairs, _results, strict=True)
            ]
SCALAR["s_cmpk_eq_u32"] += [((0xFFFF, 0xFFFF), 0, None, 1), ((M1, 0xFFFF), 1, None, 0)]
SCALAR["s_cmpk_eq_i32"] += [((M1, 0xFFFF), 0, None, 1), ((0xFFFF, 0xFFFF), 1, None, 0)]
COUNTS = ("s_bcnt1_i32_b64",)  # 32 bits of 64
WIDE = {name for name, (kinds, _) in isa.SCALAR.items() if "U" in kinds[:1] or "I" in kinds[:1]}


@pytest.mark.parametrize("name", SCALAR)
def test_scalar(name):
    make = getattr(ins, name)
    wide = name in WIDE
    for sources, before, result, after in SCALAR[name]:
        if name.split("_")[1].endswith("k"):  # a constant of 16 bits
            state = execute(make(sdst=s[8], simm16=sources[-1] & 0xFFFF), scalars={8: sources[0]},
                            scc=bool(before))  # fmt: skip
        else:
            shift = wide and name[2:5] in ("lsh", "ash")
            widths = [wide, wide and not shift][: len(sources)]
            operands = [
                s[4 + 2 * i : 5 + 2 * i] if w else s[4 + 2 * i] for i, w in enumerate(widths)
            ]
            names = {f"ssrc{i}": operand for i, operand in enumerate(operands)}
            if result is not None:
                names["sdst"] = s[8:9] if wide and name not in COUNTS else s[8]
            state = execute(make(**names), scalars={4 + 2 * i: x for i, x in enumerate(sources)},
                            scc=bool(before))  # fmt: skip
        if result is not None:
            got = int(state.pair(8)[0]) if wide and name not in COUNTS else int(state.scalar[8, 0])
            assert got == result, (sources, hex(got))
        assert int(state.scc[0]) == (before if after is None else after), sources


@pytest.mark.parametrize(
    "name,new",
    [("and", 0b1000), ("or", 0b11100), ("andn2", 0b10000)],
)
def test_saveexec(name, new):
    make = getattr(ins, f"s_{name}_saveexec_b64")
    state = execute(make(sdst=s[8:9], ssrc0=s[4:5]), ins.v_mov_b32_e32(vdst=v[OUT], src0=7),
                    scalars={4: 0b11000}, exec_=0b1100)  # fmt: skip
    if name == "andn2":
        new = 0b11000 & ~0b1100
    assert int(state.pair(8)[0]) == 0b1100 and int(state.pair(EXEC)[0]) == new and state.scc[0]
    assert (unpack(U64([new]))[0] == (state.vector[OUT, 0] == 7)).all()  # later writes obey it


# ---- vector: sources -> result, a lane each ---
VECTOR = {
    "v_mov_b32": [((9,), 9)],
    "v_mov_b64": [((BIG | 9,), BIG | 9)],
    "v_not_b32": [((0xF0F0F0F0,), 0x0F0F0F0F)],
    "v_add_u32": [((M1, 2), 1), ((2, 3), 5)],
    "v_add_u32 clamp": [((M1, 2), M1), ((2, 3), 5)],
    "v_sub_u32": [((2, 3), M1), ((5, 3), 2)],
    "v_sub_u32 clamp": [((2, 3), 0), ((5, 3), 2)],
    "v_subrev_u32": [((3, 2), M1), ((2, 9), 7)],
    "v_add_co_u32": [((M1, 2), 1, 1), ((2, 3), 5, 0)],
    "v_addc_co_u32": [((M1, 0, 1), 0, 1), ((2, 3, 1), 6, 0), ((2, 3, 0), 5, 0)],
    "v_add3_u32": [((M1, 2, 3), 4)],
    "v_xad_u32": [((6, 3, 8), 13), ((M1, 1, 3), 1)],
    "v_mul_lo_u32": [((0x10001, 0x10001), 0x20001), ((M1, 3), M1 - 2)],
    "v_mul_hi_u32": [((M1, 16), 15)],
    "v_mad_u64_u32": [((M1, M1, 1), M1 * M1 + 1, 0), ((M1, M1, ALL64), M1 * M1 - 1, 1)],
    "v_mad_i64_i32": [((M1, 3, 1), ALL64 - 1), ((5, 3, BIG), BIG + 15)],
    "v_and_b32": [((6, 3), 2)],
    "v_or_b32": [((6, 3), 7)],
    "v_xor_b32": [((6, 3), 5)],
    "v_or3_b32": [((1, 2, 8), 11)],
    "v_and_or_b32": [((6, 3, 8), 10)],
    "v_bfi_b32": [((0xFF00, 0x1234, 0xABCD), 0x12CD)],
    "v_bfrev_b32": [((1,), 0x80000000), ((0x12345678,), 0x1E6A2C48)],
    "v_bfe_u32": [((0xABCD, 4, 8), 0xBC), ((M1, 0, 0), 0), ((M1, 36, 33), 1)],
    "v_perm_b32": [
        ((0x77665544, 0x33221100, 0x07060504), 0x77665544),
        ((0x77665544, 0x33221100, 0x00010203), 0x00112233),
        ((0x77665544, 0x33221100, 0x0C0D0500), 0x00FF5500),
        ((0x80000000, 0x00008000, 0x0B0A0908), 0xFF0000FF),  # copies of signs
        ((0x00008000, 0x80000000, 0x0B0A0908), 0x00FFFF00),
    ],
    "v_alignbit_b32": [((0x12345678, 0x9ABCDEF0, 28), 0x23456789), ((1, 2, 32), 2)],
    "v_pack_b32_f16": [((0x53C00, 0x4BC00), 0xBC003C00)],
    "v_lshlrev_b32": [((33, 3), 6), ((31, 3), 0x80000000)],
    "v_lshrrev_b32": [((31, 0x80000000), 1)],
    "v_ashrrev_i32": [((31, 0x80000000), M1), ((4, 0x70), 7)],
    "v_lshlrev_b16": [((0x50011, 0x6C003), 0x8006)],
    "v_lshrrev_b16": [((0x50011, 0x6C003), 0x6001)],
    "v_lshlrev_b64": [((63, 3), BIG), ((65, 1), 2)],
    "v_lshrrev_b64": [((63, BIG), 1)],
    "v_ashrrev_i64": [((63, BIG), ALL64)],
    "v_lshl_or_b32": [((3, 4, 1), 0x31)],
    "v_lshl_add_u32": [((3, 4, 1), 0x31), ((0x80000001, 1, M1), 1)],
    "v_add_lshl_u32": [((3, 4, 1), 14)],
    "v_lshl_add_u64": [((BIG | 3, 1, 1), 7), ((1, 4, M1), M1 + 16),
        ((0xFFFF0000, 0, 0x10000), 1 << 32)],
    "v_min_u32": [((M1, 1), 1)],
    "v_max_u32": [((M1, 1), M1)],
    "v_min_i32": [((M1, 1), M1)],
    "v_max_i32": [((M1, 1), 1)],
    "v_min3_u32": [((5, M1, 3), 3)],
    "v_max3_u32": [((1, M1, 3), M1)],
    "v_max_u16": [((0x50001, 0x60002), 2)],
    "v_add_u16": [((0x5FFFF, 0x60002), 1)],
    "v_cndmask_b32": [((1, 2, 0), 1), ((1, 2, 1), 2)],
    "v_add_f32": [((f32(1.5), f32(2)), f32(3.5)), ((f32(2**24), f32(1)), f32(2**24)),
        ((TINY, TINY), 2)],
    "v_sub_f32": [((f32(1.5), f32(2)), f32(-0.5)), ((f32(2**24), f32(1)), f32(2**24 - 1))],
    "v_mul_f32": [((f32(1.5), f32(-2)), f32(-3)), ((f32(2**-126), f32(0.5)), 1 << 22),
                  ((INF, f32(-2)), INF | 1 << 31), ((f32(2**-100), f32(2**-49)), TINY)],
    "v_fma_f32": [
        ((f32(1 + 2**-23), f32(1 + 2**-23), f32(-1)), f32(2**-22 + 2**-46)),  # no rounding between
        ((f32(2**24), f32(1), f32(1)), f32(2**24)),  # a tie goes to the even one
        ((f32(2**24 + 2), f32(1), f32(1)), f32(2**24 + 4)),
        ((f32(2**-75), f32(2**-75), f32(0)), 0),  # half of TINY, a tie
        ((f32(2**-75), f32(2**-75), TINY), 2 * TINY),
        ((f32(2**-76), f32(2**-76), TINY), TINY),
        # Just above a tie, by less than float64 holds beside it.
        ((f32(2**24), f32(1), f32(1 + 2**-23)), f32(2**24 + 2)),
        ((f32(2**-40), f32(2**-40), f32(1 + 2**-23)), f32(1 + 2**-23)),
        ((INF, f32(0), f32(1)), NAN),
    ],
    "v_min_f32": [((f32(1), f32(-2)), f32(-2)), ((NAN, f32(3)), f32(3)), ((0, 1 << 31), 1 << 31)],
    "v_max_f32": [((f32(1), f32(-2)), f32(1)), ((f32(3), NAN), f32(3)), ((1 << 31, 0), 0)],
    "v_med3_f32": [((f32(5), f32(-2), f32(2)), f32(2)), ((f32(1), f32(-2), f32(2)), f32(1)),
        ((f32(-9), f32(-2), f32(2)), f32(-2)), ((NAN, f32(-2), f32(2)), f32(-2)),
        ((TINY, f32(-2), f32(2)), TINY)],
    "v_maximum3_f32": [((f32(5), f32(-2), f32(2)), f32(5)), ((f32(1), INF, f32(2)), INF),
        ((f32(1), NAN, INF), NAN), ((NAN, f32(1), f32(2)), NAN), ((f32(1), f32(2), NAN), NAN),
        ((f32(-9), f32(-2), TINY), TINY), ((1 << 31, 0, 1 << 31), 0)],
    "v_rcp_f32": [((f32(4),), f32(0.25)), ((f32(-0.5),), f32(-2)), ((0,), INF)],
    "v_exp_f32": [((f32(-3), ), f32(0.125)), ((0, ), f32(1)), ((1 << 31, ), f32(1)),
        ((0xFF800000, ), 0), ((INF, ), INF), ((NAN, ), NAN), ((f32(-127), ), 0),
        ((f32(0.5), ), f32(2**0.5) + 1), ((f32(0.25), ), f32(2**0.25) + 1),
        ((f32(0.75) + 1, ), f32(2.0**0.75) - 1)],
    "v_cvt_f32_u32": [((M1,), f32(2**32)), ((2**24 + 1,), f32(2**24)), ((3,), f32(3))],
    "v_cvt_u32_f32": [((f32(3.99),), 3), ((f32(-1),), 0), ((f32(2**33),), M1), ((NAN,), 0)],
    "v_cvt_f16_f32": [((f32(-1.5), ), bits16(-1.5)), ((f32(2049), ), bits16(2048)),
        ((f32(2051), ), bits16(2052)), ((f32(2**-25), ), 0), ((f32(3 * 2**-25), ), 2),
        ((f32(65520), ), bits16(np.inf)), ((INF, ), 0x7C00)],
    "v_cvt_f64_u32": [((M1,), f64(2**32 - 1)), ((3,), f64(3))],
    "v_cvt_f64_i32": [((M1,), f64(-1)), ((0x7FFFFFFF,), f64(2**31 - 1))],
    "v_cvt_f64_f32": [((f32(-1.5),), f64(-1.5)), ((TINY,), f64(2**-149)), ((INF,), f64(np.inf))],
    "v_cvt_f32_f64": [((f64(-1.5), ), f32(-1.5)), ((f64(2**24 + 1), ), f32(2**24)),
        ((f64(1e300), ), INF), ((f64(2**-149), ), TINY)],
    "v_cvt_i32_f64": [((f64(-2.9), ), M1 - 1), ((f64(3.9), ), 3), ((f64(1e12), ), 0x7FFFFFFF),
        ((f64(-1e12), ), 0x80000000), ((f64(np.nan), ), 0)],
    "v_add_f64": [((f64(1.5), f64(-3)), f64(-1.5)), ((f64(2**53), f64(1)), f64(2**53)),
        ((f64(2**53), f64(3)), f64(2**53 + 4))],
    "v_mul_f64": [((f64(1.5), f64(-3)), f64(-4.5)),
        ((f64(1 + 2**-52), f64(1 + 2**-52)), f64(1 + 2**-51))],
    "v_fma_f64": [
        ((f64(1 + 2**-52), f64(1 + 2**-52), f64(-1)), f64(2**-51 + 2**-104)),  # none between
        ((f64(2**53), f64(1), f64(1)), f64(2**53)),  # a tie goes to the even one
        ((f64(2**53 + 2), f64(1), f64(1)), f64(2**53 + 4)),
        # Just above a tie, and just below, by less than float64 holds beside it.
        ((f64(2**53), f64(1), f64(1 + 2**-52)), f64(2**53 + 2)),
        ((f64(2**53 + 2), f64(1), f64(1 - 2**-53)), f64(2**53 + 2)),
        ((f64(1 + 2**-30), f64(1 + 2**-23), f64(2**53)), f64(2**53 + 2)),
        ((f64(-0.0), f64(3), f64(0.0)), 0), ((f64(-0.0), f64(3), f64(-0.0)), BIG),
        ((f64(3), f64(5), f64(-15)), 0), ((f64(np.inf), f64(2), f64(1)), f64(np.inf)),
    ],
    "v_rndne_f64": [((f64(2.5),), f64(2)), ((f64(3.5),), f64(4)), ((f64(-0.5),), BIG)],
    "v_ldexp_f64": [((f64(1.5), 3), f64(12)), ((f64(-1.5), M1), f64(-0.75)),
        ((f64(1), 5000), f64(np.inf))],
    "v_rcp_f64": [((f64(4), ), f64(0.25) + (1 << 27)), ((f64(3), ), f64(1 / 3) - (1 << 27)),
        ((0, ), f64(np.inf)), ((f64(np.inf), ), 0)],
    "v_rsq_f64": [((f64(16), ), f64(0.25) + (1 << 27)), ((f64(3), ), f64(1 / 3**0.5) - (1 << 27)),
        ((0, ), f64(np.inf)), ((f64(np.inf), ), 0)],
    "v_cvt_f32_f16": [((bits16(-1.5) | 0xABCD0000, ), f32(-1.5)), ((1, ), f32(2**-24)),
        ((bits16(np.inf), ), INF)],
}  # fmt: skip
for _name, _results in {**_COMPARE, "ne": "101"}.items():
    for _kind, _low, _high in (
        ("u32", 1, M1), ("i32", M1, 1), ("u64", 1, BIG), ("i64", BIG, 1), ("u16", 0x70001, 0x6FFFF),
        ("f32", f32(-1), f32(1)), ("f64", f64(-1), f64(1)), ("f16", bits16(-1), bits16(1)),
    ):  # fmt: skip
        _cases = ((_low, _high), (_high, _high), (_high, _low))
        if _kind in ("f64", "f16") and _name in ("lg", "ne"):
            continue
        if (_name == "lg") == (_kind == "f32") or _name not in ("lg", "ne"):
            VECTOR[f"v_cmp_{_name}_{_kind}"] = [
                (pair, int(bit)) for pair, bit in zip(_cases, _results, strict=True)
            ]
for _name, _unordered in (("eq", 0), ("lg", 0), ("gt", 0), ("ge", 0), ("lt", 0), ("le", 0)):
    VECTOR[f"v_cmp_{_name}_f32"].append(((NAN, f32(1)), _unordered))
VECTOR |= {
    "v_cmp_neq_f32": [((NAN, NAN), 1), ((f32(1), f32(1)), 0), ((f32(1), f32(2)), 1)],
    "v_cmp_neq_f64": [
        ((f64(np.nan), f64(np.nan)), 1),
        ((f64(1), f64(1)), 0),
        ((f64(-0.0), 0), 0),
    ],
    "v_cmp_u_f32": [((NAN, f32(1)), 1), ((f32(1), f32(2)), 0)],
    "v_cmp_o_f32": [((NAN, f32(1)), 0), ((f32(1), f32(2)), 1)],
    **{
        f"v_cmp_n{name}_{suffix}": [
            ((of(np.nan), of(1)), 1),
            ((of(1), of(2)), less),
            ((of(2), of(2)), same),
            ((of(2), of(1)), more),
        ]
        for suffix, of in (("f32", f32), ("f16", bits16))
        for name, less, same, more in (
            ("lt", 0, 1, 1),
            ("le", 0, 0, 1),
            ("gt", 1, 1, 0),
            ("ge", 1, 0, 0),
        )
    },
}


def encodings(name: str):
    """The ways to write a vector instruction, as functions of sources that give it."""
    kinds = isa.VECTOR[name][0]
    base, _, clamp = name.partition(" ")
    compares = name.startswith("v_cmp")
    operands, at = [], 0
    for letter in kinds.replace("m", ""):
        operands.append(v[at : at + 1] if letter in "UIF" else v[at])
        at += 2
    wide = name.split("_")[-1] in ("b64", "i64", "u64") or "mad" in name
    wide = wide or (name.endswith("f64") and "cvt" not in name) or "cvt_f64" in name
    result = {"vdst": v[OUT : OUT + 1] if wide else v[OUT]}
    mask = s[CARRY : CARRY + 1]
    if compares:
        result = {"vdst": mask}
    for suffix in ("_e32", "_e64", ""):
        make = getattr(ins, base + suffix, None)
        if make is None or (clamp and suffix == "_e32"):
            continue
        e32 = suffix == "_e32"
        sources = {f"src{i}": operand for i, operand in enumerate(operands)}
        if e32 and len(operands) > 1:
            sources["vsrc1"] = sources.pop("src1")
        out = {} if compares and e32 else dict(result)
        if "m" in kinds and not e32:
            sources["src2"] = mask
        if not e32 and make.func is ins.VOP3SD:
            out["sdst"] = s[24:25]
        if clamp:
            out["clmp"] = 1
        yield make(**sources, **out), 106 if e32 else (CARRY if compares else 24)


@pytest.mark.parametrize("name", VECTOR)
def test_vector(name):
    kinds, cases = isa.VECTOR[name][0], VECTOR[name]
    columns = list(zip(*(case[0] for case in cases), strict=True))
    vectors = {2 * i: column for i, column in enumerate(columns) if kinds[i] != "m"}
    # 64-bit values whose high half is 0 leave garbage there otherwise.
    vectors |= {2 * i + 1: [x >> 32 for x in column] for i, column in enumerate(columns)
                if kinds[i] in "UIF"}  # fmt: skip
    scalars = {}
    if "m" in kinds:
        carry = sum(bit << lane for lane, bit in enumerate(columns[kinds.index("m")]))
        scalars = {106: carry, CARRY: carry}
    lanes = (1 << len(cases)) - 1
    tried = 0
    for instruction, mask in encodings(name):
        tried += 1
        state = execute(instruction, vectors=vectors, scalars=scalars, exec_=lanes)
        if name.startswith("v_cmp"):
            got = int(state.pair(mask)[0])
            assert got == sum(case[1] << lane for lane, case in enumerate(cases)), bin(got)
            continue
        for lane, case in enumerate(cases):
            low, high = int(state.vector[OUT, 0, lane]), int(state.vector[OUT + 1, 0, lane])
            wide = high != GARBAGE
            got = low | high << 32 if wide else low
            if case[1] == NAN:
                assert np.isnan(U32(got).view(np.float32))
            else:
                assert got == case[1], f"{case[0]}: {got:#x}"
            if len(case) > 2:
                assert int(state.pair(mask)[0]) >> lane & 1 == case[2]
        assert (state.vector[OUT, 0, len(cases) :] == GARBAGE).all()  # inactive lanes
    assert tried


def test_registers_are_swapped():
    state = execute(ins.v_swap_b32_e32(vdst=v[1], src0=v[2]), vectors={1: 5, 2: 7}, exec_=1)
    assert state.vector[1, 0, :2].tolist() == [7, 5] and state.vector[2, 0, :2].tolist() == [5, 7]


@pytest.mark.parametrize("step", isa.SWAPS.values())
def test_lanes_of_two_registers_are_swapped(step):
    """The result's lanes whose number has the bit, with the source's that lack it."""
    swap = getattr(ins, f"v_permlane{step}_swap_b32_e32")
    code, lanes = swap(vdst=v[1], src0=v[2]), np.arange(64)
    registers = {1: range(64), 2: range(100, 164)}
    state = execute(code, vectors=registers)
    upper = lanes & step != 0
    np.testing.assert_array_equal(state.vector[1, 0], np.where(upper, lanes - step + 100, lanes))
    np.testing.assert_array_equal(state.vector[2, 0], np.where(upper, lanes + 100, lanes + step))
    state = execute(swap(vdst=v[1], src0=v[1]), vectors=registers)
    np.testing.assert_array_equal(state.vector[1, 0], lanes ^ step)
    pair = 1 | 1 << step  # two lanes that swap; the others rest
    state = execute(code, vectors=registers, exec_=pair)
    some = [0, 1, step, step + 1]
    assert state.vector[1, 0, some].tolist() == [0, 1, 100, step + 1]
    assert state.vector[2, 0, some].tolist() == [step, 101, 100 + step, 101 + step]
    with pytest.raises(NotImplementedError, match="a lane that swaps with one that rests"):
        execute(code, vectors=registers, exec_=1)
    with pytest.raises(NotImplementedError, match=f"know the instruction v_permlane{step}"):
        execute(code, vectors=registers, arch="gfx942")


def test_a_float64_is_added_to():
    """And constants, literals and signs of such sources."""
    two, one = {0: f64(2), 2: f64(3)}, {0: f64(1.5)}
    add = ins.v_fmac_f64_e32(vdst=v[4:5], src0=v[0:1], vsrc1=v[2:3])
    state = execute(add, vectors=two | {4: f64(10)})
    assert int(state.vector[4, 0, 0]) | int(state.vector[5, 0, 0]) << 32 == f64(16)
    state = execute(add, vectors=two | {4: [f64(10), f64(2**600)]}, exec_=1)  # lane 1 rests
    assert int(state.vector[5, 0, 0]) == f64(16) >> 32
    out, x = v[OUT : OUT + 1], v[0:1]
    for code, want in (
        (ins.v_add_f64(vdst=out, src0=x, src1=0.5), 2.0),
        (ins.v_add_f64(vdst=out, src0=x, src1=x, neg=2), 0.0),
        (ins.v_mul_f64(vdst=out, src0=x, src1=-4.0, abs=2), 6.0),
    ):
        state = execute(code, vectors=one)
        got = int(state.vector[OUT, 0, 0]) | int(state.vector[OUT + 1, 0, 0]) << 32
        assert got == f64(want), code


# ---- two at once, parts of registers, other lanes ---
def test_packed_float32():
    """Two multiplications; op_sel takes either half of each source for either result."""
    pair = {0: [f32(2)], 1: [f32(3)], 2: [f32(5)], 3: [f32(7)], 4: [f32(1)], 5: [f32(-1)]}
    make, a, b, c = ins.v_pk_mul_f32, v[0:1], v[2:3], v[4:5]
    out = v[OUT : OUT + 1]
    for code, want in (
        (make(vdst=out, src0=a, src1=b), (10, 21)),
        (make(vdst=out, src0=a, src1=b, opsel=1, opsel_hi=2), (15, 14)),
        (make(vdst=out, src0=a, src1=b, neg=1, neg_hi=2), (-10, -21)),
        (make(vdst=out, src0=a, src1=s[8:9], opsel_hi=1), (22, 33)),
        (ins.v_pk_add_f32(vdst=out, src0=a, src1=b), (7, 10)),
        (ins.v_pk_fma_f32(vdst=out, src0=a, src1=b, src2=c), (11, 20)),
    ):
        state = execute(code, vectors=pair, scalars={8: f32(11), 9: f32(13)})
        got = state.vector[OUT : OUT + 2, 0, 0].view(np.float32)
        assert tuple(got) == want, code


def test_packed_moves():
    """op_sel takes either half of the first source for the first, of the second for the second."""
    four = {0: 10, 1: 11, 2: 12, 3: 13}
    for opsel, want in ((0, (10, 12)), (1, (11, 12)), (2, (10, 13)), (3, (11, 13))):
        code = ins.v_pk_mov_b32(vdst=v[OUT : OUT + 1], src0=v[0:1], src1=v[2:3], opsel=opsel)
        assert tuple(execute(code, vectors=four).vector[OUT : OUT + 2, 0, 0]) == want
    swap = ins.v_pk_mov_b32(vdst=v[0:1], src0=v[0:1], src1=v[0:1], opsel=1)
    assert tuple(execute(swap, vectors=four).vector[0:2, 0, 0]) == (11, 10)


def test_packed_16_bits():
    code = ins.v_pk_max_u16(vdst=v[OUT], src0=v[0], src1=v[1])
    assert execute(code, vectors={0: 0x50001, 1: 0x40002}).vector[OUT, 0, 0] == 0x50002
    code = ins.v_pk_max_u16(vdst=v[OUT], src0=v[0], src1=v[1], opsel=1, opsel_hi=2)
    assert execute(code, vectors={0: 0x50001, 1: 0x40002}).vector[OUT, 0, 0] == 0x40005


@pytest.mark.parametrize("name,dtype", [("fp8", "e4m3"), ("bf8", "e5m2")])
def test_conversions(name, dtype):
    """Each chip's own format; one half is written, the other stays."""
    values = {  # of 1, -0.75, the largest OCP value, then beyond it, -0
        ("gfx950", "fp8"): (0x38, 0xB4, 0x7E, 0x7F, 0x80),
        ("gfx942", "fp8"): (0x40, 0xBC, 0x80, 0x80, 0x00),  # NaN is 0x80, and 240 the largest
        ("gfx950", "bf8"): (0x3C, 0xBA, 0x7B, 0x7C, 0x80),
        ("gfx942", "bf8"): (0x40, 0xBE, 0x7F, 0x80, 0x00),
    }
    largest = 448.0 if name == "fp8" else 57344.0
    inputs = [f32(x) for x in (1, -0.75, largest, 2 * largest, -0.0)]
    make = getattr(ins, f"v_cvt_pk_{name}_f32")
    for arch in ("gfx942", "gfx950"):
        want = values[arch, name]
        for half, keep in ((0, 0x12340000), (1, 0x1234)):
            code = make(vdst=v[OUT], src0=v[0], src1=v[1], opsel=8 * half)
            vectors = {0: inputs, 1: inputs[1:], OUT: 0x12341234}
            got = execute(code, vectors=vectors, arch=arch).vector[OUT, 0]
            for lane in range(4):
                codes = want[lane] | want[lane + 1] << 8
                assert got[lane] == keep | codes << 16 * half, (arch, lane, hex(got[lane]))


def test_conversions_round_to_nearest_even():
    """And keep subnormals: e4m3 has steps of 2^-9 below 2^-6."""
    step = 2.0**-9
    inputs = [f32(x) for x in (1.0625, 1.1875, 2.5 * step, 3.5 * step, step / 2, -step)]
    code = ins.v_cvt_pk_fp8_f32(vdst=v[OUT], src0=v[0], src1=v[0])
    got = execute(code, vectors={0: inputs}).vector[OUT, 0, :6] & 0xFF
    assert got.tolist() == [0x38, 0x3A, 0x02, 0x04, 0x00, 0x81]


def test_conversions_to_4_bits():
    """To nearest even, saturated, signs kept; opsel names the byte, of which the others stay.

    ROCm/aiter#974 shows that an MI355X does this, also for 0.25 and the number just above it.
    """
    values = [0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6.5, np.inf]
    values += [0.25000003, 0.3, 1.2500001, 5.000001, 1e-40]
    want = [0, 0, 2, 2, 4, 4, 6, 6, 7, 7, 1, 1, 3, 7, 0]
    inputs = [f32(x) for x in values]
    vectors = {0: inputs, 1: [x | BIG >> 32 for x in inputs], OUT: 0x12345678}
    for byte in range(4):
        fields = {"vdst": v[OUT], "src0": v[0], "src1": v[1], "opsel": 4 * byte}
        code = ins.v_cvt_scalef32_pk_fp4_f32(src2=1.0, **fields)
        got = execute(code, vectors=vectors).vector[OUT, 0]
        for lane, x in enumerate(want):
            keep = 0x12345678 & ~(0xFF << 8 * byte)
            assert got[lane] == keep | (x | (8 | x) << 4) << 8 * byte, (lane, hex(got[lane]))
        for other in ({"src2": 2.0}, {"src2": v[2]}, {"src2": 1.0, "neg": 4}):
            with pytest.raises(NotImplementedError):
                execute(ins.v_cvt_scalef32_pk_fp4_f32(**fields, **other), vectors=vectors)
        with pytest.raises(NotImplementedError):
            execute(code, vectors=vectors, arch="gfx942")


def test_conversions_to_16_bits():
    """gfx950 has bfloat16 and pairs of float16: to nearest even, subnormals too."""
    for make, inputs, want in (
        (
            ins.v_cvt_pk_bf16_f32,
            [f32(-1.5), 0x3F808000, 0x3F818000, 0x00018000, INF],
            [0xBFC0, 0x3F80, 0x3F82, 0x0002, 0x7F80],
        ),
        (
            ins.v_cvt_pk_f16_f32,
            [f32(-1.5), 0x3F801000, 0x3F803000, f32(2.5 * 2.0**-24), f32(65520), INF],
            [0xBE00, 0x3C00, 0x3C02, 0x0002, 0x7C00, 0x7C00],
        ),
    ):
        code = make(vdst=v[OUT], src0=v[0], src1=v[1])
        got = execute(code, vectors={0: inputs, 1: inputs[1:]}, arch="gfx950").vector[OUT, 0]
        pairs = [a | b << 16 for a, b in itertools.pairwise(want)]
        assert got[: len(pairs)].tolist() == pairs
        with pytest.raises(NotImplementedError):
            execute(code, vectors={0: inputs, 1: inputs}, arch="gfx942")


# ---- matrices ---
ONES = {0: 0x38, 1: 0x3C, 4: 0x2}  # 1.0 in the formats of cbsz and blgp: e4m3, e5m2, e2m1
# By AMD's measurement, composable_kernel's test/mx_mfma_op: for the rows of a matrix that 16 or 32
# lanes have, the column of each of a lane's codes, and the lanes whose scale it has.
PLACES = {  # (side, bits): the column of code i of the g-th lanes
    (16, 8): lambda g, i: 16 * g + i % 16 + 64 * (i // 16),
    (16, 4): lambda g, i: 32 * g + i,
    (32, 8): lambda g, i: 16 * g + i % 16 + 32 * (i // 16),
    (32, 4): lambda g, i: 32 * g + i,
}
SCALED = {
    16: ins.v_mfma_scale_f32_16x16x128_f8f6f4,
    32: ins.v_mfma_scale_f32_32x32x64_f8f6f4,
}
A, B, C, D, SCALES = 0, 8, 16, 16, 48  # vector registers


def place_in(side: int, row: int, col: int) -> tuple[int, int]:
    """The register of D, and the lane, that have an element, by AMD's register layouts."""
    if side == 16:
        return row % 4, row // 4 * 16 + col
    return row // 8 * 4 + row % 4, row // 4 % 2 * 32 + col


def codes_at(vector, register: int, places, format: int) -> None:
    """1.0 into codes (lane, number) of registers, which are zeros otherwise."""
    vector[register : register + 8] = 0
    bits = 4 if format == 4 else 8
    for lane, i in places:
        word, shift = divmod(i * bits, 32)
        vector[register + word, 0, lane] |= U32(ONES[format] << shift)


def multiplied(side, formats, a, b, scales=(127, 127), total=0.0, **fields):
    """D, as rows and columns, of codes 1.0 at places of A and of B; a scale for all or by lane."""
    code = SCALED[side](
        vdst=v[D : D + side * side // 64 - 1], src0=v[A : A + 7 - 4 * (formats[0] == 4)],
        src1=v[B : B + 7 - 4 * (formats[1] == 4)], src2=v[C : C + side * side // 64 - 1],
        scale_src0=256 + SCALES, scale_src1=257 + SCALES, cbsz=formats[0], blgp=formats[1],
        **{"abid": 1, "x2encoding": 0xD3AC, **fields},
    )  # fmt: skip
    emulator = of_code(code)
    vector = np.full((64, 1, 64), GARBAGE, U32)
    for register, places, format in zip((A, B), (a, b), formats, strict=True):
        codes_at(vector, register, places, format)
    vector[C : C + 16] = f32(total)
    for i, scale in enumerate(scales):
        vector[SCALES + i, 0] = scale
    scalar = np.full((128, 1), GARBAGE, U32)
    scalar[EXEC] = scalar[EXEC + 1] = 0  # which it ignores
    state = Waves(Space(Global(), Shared(1, 0), 3), 0, np.zeros(1, int), scalar, vector)
    with np.errstate(all="ignore"):
        emulator.run(state)
    floats = state.vector[D : D + 16].view(np.float32)
    return np.array([
        [floats[r, 0, lane] for r, lane in (place_in(side, row, col) for col in range(side))]
        for row in range(side)
    ])  # fmt: skip


@pytest.mark.parametrize("formats", [(0, 0), (1, 4), (4, 0), (4, 4)])
@pytest.mark.parametrize("side", SCALED)
def test_matrices_of_codes(side, formats):
    """Two codes meet where they have the same column, and each has the scale of its block."""
    sides = [PLACES[side, 4 if format == 4 else 8] for format in formats]
    for lanes, codes in (((3, side + 5), (1, 2)), ((63, 2), (31, 17)), ((0, 63), (16, 31))):
        (a, b), (m, n) = zip(lanes, codes, strict=True), (lane % side for lane in lanes)
        columns = [of(lane // side, i) for of, (lane, i) in zip(sides, (a, b), strict=True)]
        # Each lane has a scale of its own, of which the block's counts.
        scales = np.arange(64) + 100, np.arange(64) + 90
        every = [(lane, i) for lane in range(n, 64, side) for i in range(32)]  # all of B's row
        blocks = [lane_scales[lane_row + side * (columns[0] // 32)] - 127.0
                  for lane_scales, lane_row in zip(scales, (m, n), strict=True)]  # fmt: skip
        want = np.zeros((side, side))
        want[m, n] = 2.0 ** sum(blocks)
        got = multiplied(side, formats, [a], every, scales)
        np.testing.assert_array_equal(got, want)
        got = multiplied(side, formats, [a], [b])
        assert (got != 0).sum() == (columns[0] == columns[1])
        assert (multiplied(side, formats, [a], [], total=0.5) == 0.5).all()


@pytest.mark.parametrize("side", SCALED)
def test_scales_of_matrices(side):
    """A byte of the register; 255 makes a row NaN, 0 is 2^-127."""
    row, col = [(5, 0)], [(7, 0)]
    for byte in range(4):
        scale_words = [0xFFFFFFFF ^ (0xFF ^ n) << 8 * byte for n in (0, 254)]
        picks = {"opsel": 3 * (byte & 1), "opsel_hi": 3 * (byte >> 1)}
        got = multiplied(side, (0, 0), row, col, scale_words, **picks)
        assert got[5, 7] == 1 and np.count_nonzero(got) == 1
    scale_words = np.full(64, 127), 127
    scale_words[0][5 + side] = 255  # of a block of zeros
    got = multiplied(side, (0, 0), row, col, scale_words)
    assert np.isnan(got[5]).all() and np.isnan(got).sum() == side


@pytest.mark.parametrize(
    "code,side,many",
    [(ins.v_mfma_f32_16x16x16_bf16, 16, 4), (ins.v_mfma_f32_32x32x8_bf16, 32, 4)],
)
def test_matrices_of_bfloat16(code, side, many):
    """A lane has four neighbours of a row; sums go to accumulators, and C is a constant."""
    rng = np.random.default_rng(side)
    depth = 64 // side * many
    a, b = (rng.integers(-4, 5, (side, depth)).astype(np.float32) for _ in range(2))
    emulator = of_code(
        code(vdst=v[0 : side * side // 64 - 1], src0=v[0:1], src1=v[2:3], src2=1.0, acc_cd=1),
        *(ins.v_accvgpr_read(vdst=v[4 + i], src0=v[i]) for i in range(side * side // 64)),
        arch="gfx942",
    )
    vector = np.full((64, 1, 64), GARBAGE, U32)
    for register, matrix in ((0, a), (2, b)):
        halves = matrix.view(U32) >> U32(16)
        for lane in range(64):
            lane_codes = halves[lane % side, many * (lane // side) :][:many]
            vector[register : register + 2, 0, lane] = lane_codes[::2] | lane_codes[1::2] << U32(16)
    scalar = np.full((128, 1), 0xFFFFFFFF, U32)
    space = Space(Global(), Shared(1, 0), 3, accumulators=40)
    state = Waves(space, 0, np.zeros(1, int), scalar, vector)
    emulator.run(state)
    floats, want = state.vector[4:20].view(np.float32), a @ b.T + 1
    for row, col in itertools.product(range(side), repeat=2):
        register, lane = place_in(side, row, col)
        assert floats[register, 0, lane] == want[row, col], (row, col)
    assert (state.vector[40, 0] == state.vector[4, 0]).all()


def test_accumulators():
    """Copies to and from them, in active lanes; loads and stores of memory."""
    data = np.array([5, 6, 7, 8], U32)
    out = np.zeros(64, U32)
    memory = Global()
    at, to = memory.add(data), memory.add(out, writable=True)
    code = [
        ins.v_accvgpr_write(vdst=v[1], src0=v[0]),
        ins.global_load_dword(vdst=v[2], addr=v[4], saddr=s[8:9], acc=1),
        ins.v_accvgpr_mov_b32_e32(vdst=v[3], src0=v[2]),
        ins.v_accvgpr_read(vdst=v[OUT], src0=v[3]),
        ins.v_accvgpr_read(vdst=v[OUT + 1], src0=v[1]),
        ins.global_store_dword(data=v[2], addr=v[5], saddr=s[10:11], acc=1),
    ]
    emulator = of_code(*code)
    vector = np.full((64, 1, 64), GARBAGE, U32)
    vector[0], vector[4], vector[5] = 9, np.arange(64) % 4 * 4, np.arange(64) * 4
    scalar = np.full((128, 1), 0xFFFFFFFF, U32)
    scalar[8:12, 0] = [at & M1, at >> 32, to & M1, to >> 32]
    scalar[EXEC, 0] = 0xFFFFFFF7
    space = Space(memory, Shared(1, 0), 3, accumulators=32)
    state = Waves(space, 0, np.zeros(1, int), scalar, vector)
    emulator.run(state)
    assert list(state.vector[OUT, 0, :5]) == [5, 6, 7, GARBAGE, 5]
    assert list(state.vector[OUT + 1, 0, 2:5]) == [9, GARBAGE, 9]
    assert list(state.vector[33:36, 0, 2]) == [9, 7, 7] and list(out[:5]) == [5, 6, 7, 0, 5]


def test_a_lane_by_its_number():
    code = ins.v_readlane_b32(vdst=v[30], src0=v[0], src1=s[8])
    state = execute(code, vectors={0: range(64)}, scalars={8: 64 + 7}, exec_=1)
    assert state.scalar[30, 0] == 7


def test_truth_table():
    """gfx950's v_bitop3: bit 4 * a + 2 * b + c of the table."""
    a, b, c = 0b11110000, 0b11001100, 0b10101010
    for table in (0xCA, 0xEC, 0x01, 0x80):
        fields = {"omod": table >> 6, "abs": table >> 3 & 7, "neg": table & 7}
        code = ins.v_bitop3_b32(vdst=v[OUT], src0=v[0], src1=v[1], src2=v[2], **fields)
        got = execute(code, vectors={0: a, 1: b, 2: c}).vector[OUT, 0, 0]
        assert got & 0xFF == table
        code = ins.v_bitop3_b16(vdst=v[OUT], src0=v[0], src1=v[1], src2=v[2], **fields)
        assert execute(code, vectors={0: a, 1: b, 2: c}).vector[OUT, 0, 0] & 0xFF == table


def test_parts_of_registers():
    """SDWA: bytes and halves of the sources, and of the result."""
    fields = {"src0": SDWA, "vdst": v[OUT], "vsrc0": v[0], "vsrc1": v[1]}
    full = {"dst_sel": 6, "src0_sel": 6, "src1_sel": 6}
    for change, want in (
        ({"src0_sel": 5, "src1_sel": 0}, 0x1122 + 0xDD),
        ({"src0_sel": 2, "src1_sel": 4}, 0x22 + 0xCCDD),
        ({"dst_sel": 1, "src0_sel": 0, "src1_sel": 0, "dst_unused": 0}, (0x44 + 0xDD & 0xFF) << 8),
        ({"dst_sel": 5, "src0_sel": 4, "src1_sel": 1, "dst_unused": 2}, (0x3344 + 0xCC) << 16 | 7),
    ):
        code = ins.v_add_u32_e32(**fields, **{**full, **change})
        got = execute(code, vectors={0: 0x11223344, 1: 0xAABBCCDD, OUT: 7}).vector[OUT, 0, 0]
        assert got == want, (change, hex(got))
    code = ins.v_cndmask_b32_e32(**fields, **{**full, "src0_sel": 0, "src1_sel": 3})
    got = execute(code, vectors={0: 0x44, 1: 0xAA000000}, scalars={106: 0b10}).vector[OUT, 0]
    assert got[0] == 0x44 and got[1] == 0xAA
    fields = {"src0": SDWA, "vsrc0": v[0], "vsrc1": v[1], "src0_sel": 2, "src1_sel": 5}
    for to in (106, 8):
        code = ins.v_cmp_eq_u16_e32(**fields, sd=int(to == 8), sdst=s[8:9])
        vectors = {0: [0x220000, 0x330000], 1: [0x22FFFF] * 2}
        assert int(execute(code, vectors=vectors, exec_=3).pair(to)[0]) == 1
    code = ins.v_cvt_f32_f16_e32(src0=SDWA, vdst=v[OUT], vsrc0=v[0], dst_sel=6, src0_sel=5)
    assert execute(code, vectors={0: bits16(1.5) << 16}).vector[OUT, 0, 0] == f32(1.5)


LANES = np.arange(64)


@pytest.mark.parametrize(
    "control,lanes",
    [
        (0xB1, LANES ^ 1),  # quad_perm [1, 0, 3, 2]
        (0x4E, LANES ^ 2),  # quad_perm [2, 3, 0, 1]
        (0x00, LANES & ~3),
        (0x140, LANES ^ 15),  # row_mirror
        (0x141, LANES ^ 7),  # row_half_mirror
        (0x128, LANES ^ 8),  # row_ror 8
        (0x121, LANES & ~15 | LANES - 1 & 15),
    ],
)
def test_dpp(control, lanes):
    """The first source of another lane; with bound_ctrl an inactive one gives 0."""
    fields = {"src0": DPP, "vdst": v[OUT], "vsrc0": v[0], "dpp": control}
    masks = {"row_mask": 15, "bank_mask": 15}
    vectors = {0: range(100, 164), 1: range(64)}
    code = ins.v_add_u32_e32(vsrc1=v[1], bc=1, **fields, **masks)
    assert (execute(code, vectors=vectors).vector[OUT, 0] == 100 + lanes + LANES).all()
    code = ins.v_cndmask_b32_e32(vsrc1=v[1], bc=1, **fields, **masks)
    got = execute(code, vectors=vectors, scalars={106: 0b10}).vector[OUT, 0]
    assert got[0] == 100 + lanes[0] and got[1] == 1
    active = ~(1 << 5) & ALL64
    code = ins.v_mov_b32_e32(bc=1, **fields, **masks)
    want = np.where(lanes == 5, 0, 100 + lanes)
    want[5] = GARBAGE
    assert (execute(code, vectors=vectors, exec_=active).vector[OUT, 0] == want).all()
    code = ins.v_mov_b32_e32(bc=0, **fields, **masks)
    want[lanes == 5] = GARBAGE
    assert (execute(code, vectors=vectors, exec_=active).vector[OUT, 0] == want).all()


def test_lanes_through_lds_hardware():
    code = ins.ds_swizzle_b32(vdst=v[OUT], addr=v[0], offset0=0x1F, offset1=0x40)  # lane ^ 16
    got = execute(code, vectors={0: range(64)}).vector[OUT, 0]
    assert (got == LANES ^ 16).all()
    code = ins.ds_bpermute_b32(vdst=v[OUT], addr=v[1], data0=v[0])
    vectors = {0: range(64), 1: [4 * (lane ^ 32) for lane in range(64)]}
    assert (execute(code, vectors=vectors).vector[OUT, 0] == LANES ^ 32).all()
    got = execute(code, vectors=vectors, exec_=ALL64 & ~1).vector[OUT, 0]
    assert got[32] == 0 and got[33] == 1  # lane 0 is inactive
    code = ins.v_readfirstlane_b32_e32(vdst=v[8], src0=v[0])
    assert execute(code, vectors={0: range(7, 71)}, exec_=0b1100).scalar[8, 0] == 9


# ---- control ---
@pytest.mark.parametrize(
    "name,values",
    [
        ("s_branch", [({}, True)]),
        ("s_cbranch_scc0", [({"scc": False}, True), ({"scc": True}, False)]),
        ("s_cbranch_scc1", [({"scc": False}, False), ({"scc": True}, True)]),
        ("s_cbranch_vccz", [({"scalars": {106: 0}}, True), ({"scalars": {106: BIG}}, False)]),
        ("s_cbranch_vccnz", [({"scalars": {106: 0}}, False), ({"scalars": {106: BIG}}, True)]),
        ("s_cbranch_execz", [({"exec_": 0}, True), ({"exec_": 2}, False)]),
        ("s_cbranch_execnz", [({"exec_": 0}, False), ({"exec_": 2}, True)]),
    ],
)
def test_branches(name, values):
    for state, taken in values:
        code = [
            ins.s_mov_b32(sdst=s[8], ssrc0=1),
            getattr(ins, name)(simm16=1),
            ins.s_mov_b32(sdst=s[8], ssrc0=2),
        ]
        assert execute(*code, **state).scalar[8, 0] == (1 if taken else 2)


def test_subnormals_are_flushed_where_the_mode_says_so():
    for name in ("v_mul_f32_e32", "v_add_f32_e32", "v_max_f32_e32"):
        code = getattr(ins, name)(vdst=v[OUT], src0=v[0], vsrc1=v[1])
        vectors = {0: [f32(2**-126), TINY | 1 << 31], 1: [f32(0.5), f32(1)]}
        kept, flushed = (
            execute(code, vectors=vectors, flushes=mode).vector[OUT, 0, :2]
            for mode in (False, True)
        )
        assert kept[0] != 0
        assert flushed[0] in (0, f32(0.5)) and flushed[1] in (1 << 31, f32(1)), name


def test_the_mode_of_float32():
    """MODE's bits 4 and 5: operands of what comes after keep subnormals, and results do."""
    vectors = {2: TINY, 3: 5, 4: f32(1), 5: f32(2**-126), 6: 0, 7: 1}
    two = {"vdst": v[OUT : OUT + 1], "src0": v[2:3], "src1": v[4:5]}
    for code, kept, flushed in (
        (ins.v_pk_mul_f32(**two), (TINY, 0), (0, 0)),
        (ins.v_pk_add_f32(**two), (f32(1), 1 << 23 | 5), (f32(1), 1 << 23)),
        (ins.v_pk_fma_f32(**two, src2=v[6:7]), (TINY, 1), (0, 0)),
        (ins.v_mov_b64_e32(vdst=v[OUT : OUT + 1], src0=v[2:3]), (TINY, 5), (TINY, 5)),
    ):
        for value, want in ((3, kept), (0, flushed)):
            mode = ins.s_setreg_b32(sdst=s[8], simm16=1 << 11 | 4 << 6 | 1)
            state = execute(mode, code, vectors=vectors, scalars={8: value}, flushes=value == 3)
            assert tuple(state.vector[OUT : OUT + 2, 0, 0]) == want, (code, value)
    # 2 keeps those of results alone.
    vectors = {0: [f32(2**-126), TINY], 1: [f32(0.5), f32(1)]}
    code = ins.v_mul_f32_e32(vdst=v[OUT], src0=v[0], vsrc1=v[1])
    state = execute(mode, code, vectors=vectors, scalars={8: 2})
    assert state.vector[OUT, 0, :2].tolist() == [1 << 22, 0]
    # Below the least normal number, though it would round up to it as a subnormal.
    vectors = {0: 0x00AAAAAA, 1: f32(0.75)}
    code = ins.v_mul_f32_e32(vdst=v[OUT], src0=v[0], vsrc1=v[1])
    assert execute(code, vectors=vectors).vector[OUT, 0, 0] == 1 << 23
    assert execute(code, vectors=vectors, flushes=True).vector[OUT, 0, 0] == 0


# ---- memory ---
def buffers(*arrays):
    """Global memory, and a pair of scalar registers for each array's address."""
    memory = Global()
    scalars = {4 + 2 * i: memory.add(a, writable=i > 0) for i, a in enumerate(arrays)}
    return memory, scalars


def test_buffers_cross_4_gib():
    memory = Global()
    for size in (64, 4096, 1 << 16):
        address = memory.add(np.zeros(size, np.uint8))
        assert address >> 32 != address + size - 1 >> 32


LOADS = [  # name, bytes read, what the register holds of 0x0807060504030201...
    ("ubyte", 1, 0x01), ("ushort", 2, 0x0201), ("dword", 4, 0x04030201),
    ("ubyte_d16", 1, 0x77770001), ("ubyte_d16_hi", 1, 0x00017777),
    ("short_d16", 2, 0x77770201), ("short_d16_hi", 2, 0x02017777),
    ("dwordx2", 8, 0x04030201), ("dwordx4", 16, 0x04030201),
]  # fmt: skip


@pytest.mark.parametrize("name,size,want", LOADS)
def test_global_loads(name, size, want):
    data = np.arange(1, 1025, dtype=np.uint8)
    memory, scalars = buffers(data)
    dwords = max(size // 4, 1)
    make = getattr(ins, f"global_load_{name}")
    out = v[OUT] if dwords == 1 else v[OUT : OUT + dwords - 1]
    vectors = {0: [16 * lane for lane in range(64)], OUT: 0x77777777}
    code = make(vdst=out, addr=v[0], saddr=s[4:5])
    state = execute(code, vectors=vectors, scalars=scalars, memory=memory)
    assert state.vector[OUT, 0, 0] == want
    whole = data.view(U32).reshape(64, 4)
    for word in range(dwords if size >= 4 else 0):
        assert (state.vector[OUT + word, 0] == whole[:, word]).all()
    # Addresses from a pair of registers, with an offset below zero.
    vectors |= {2: [scalars[4] + 16 * lane + 64 for lane in range(60)]}
    vectors |= {3: [x >> 32 for x in vectors[2]]}
    code = make(vdst=out, addr=v[2], saddr=EXEC_HI, offset=-64 & 0x1FFF)
    state = execute(code, vectors=vectors, scalars=scalars, memory=memory, exec_=(1 << 60) - 1)
    assert state.vector[OUT, 0, 0] == want


STORES = [
    ("byte", 1, "44"), ("byte_d16_hi", 1, "22"), ("short", 2, "4433"), ("short_d16_hi", 2, "2211"),
    ("dword", 4, "44332211"), ("dwordx2", 8, "4433221155555555"),
    ("dwordx4", 16, "44332211555555556666666677777777"),
]  # fmt: skip


@pytest.mark.parametrize("name,size,want", STORES)
def test_global_stores(name, size, want):
    source, target = np.zeros(16, np.uint8), np.full(1024, 0xEE, np.uint8)
    memory, scalars = buffers(source, target)
    dwords = max(size // 4, 1)
    data = v[8] if dwords == 1 else v[8 : 8 + dwords - 1]
    vectors = {0: [16 * lane for lane in range(64)]}
    vectors |= {8: 0x11223344, 9: 0x55555555, 10: 0x66666666, 11: 0x77777777}
    code = getattr(ins, f"global_store_{name}")(data=data, addr=v[0], saddr=s[6:7])
    execute(code, vectors=vectors, scalars=scalars, memory=memory, exec_=0b101)
    expected = np.full((64, 16), 0xEE, np.uint8)
    expected[[0, 2], :size] = np.frombuffer(bytes.fromhex(want), np.uint8)
    assert (target.reshape(64, 16) == expected).all()


def test_scalar_loads():
    data = np.arange(16, dtype=U32)
    memory, scalars = buffers(data)
    for count, suffix in ((1, ""), (2, "x2"), (4, "x4"), (8, "x8")):
        to = s[16] if count == 1 else s[16 : 16 + count - 1]
        code = getattr(ins, f"s_load_dword{suffix}")(sdata=to, sbase=s[4:5], offset=8, imm=1)
        state = execute(code, scalars=scalars, memory=memory)
        assert state.scalar[16 : 16 + count, 0].tolist() == list(range(2, 2 + count))


def test_bad_accesses_fault():
    source, target = np.zeros(256, np.uint8), np.zeros(256, np.uint8)
    memory, scalars = buffers(source, target)

    def run(make, offset, base, **operands):
        code = make(addr=v[0], saddr=s[base : base + 1], **operands)
        execute(code, vectors={0: [0, offset], 8: 0}, scalars=scalars, memory=memory, exec_=3)

    load, store = ins.global_load_dwordx4, ins.global_store_dword
    run(load, 240, 4, vdst=v[20:23])
    run(store, 252, 6, data=v[8])
    for make, offset, base, operands, message in (
        (load, 256, 4, {"vdst": v[20:23]}, "out of bounds"),
        (load, 244, 4, {"vdst": v[20:23]}, "out of bounds"),
        (load, 10, 4, {"vdst": v[20:23]}, "unaligned"),
        (store, 256, 6, {"data": v[8]}, "out of bounds"),
        (store, 2, 6, {"data": v[8]}, "unaligned"),
        (store, 0, 4, {"data": v[8]}, "which is an operand"),
        (ins.global_store_byte, 1 << 31, 6, {"data": v[8]}, "out of bounds"),
    ):
        with pytest.raises(Fault, match=message):
            run(make, offset, base, **operands)
    with pytest.raises(Fault, match="out of bounds"):
        execute(
            ins.s_load_dwordx2(sdata=s[16:17], sbase=s[4:5], offset=252, imm=1),
            scalars=scalars, memory=memory,
        )  # fmt: skip


LDS = [
    ("b8", 1, "u8"),
    ("b16", 2, "u16"),
    ("b32", 4, "b32"),
    ("b64", 8, "b64"),
    ("b128", 16, "b128"),
]


@pytest.mark.parametrize("write,size,read", LDS)
def test_lds(write, size, read):
    dwords = max(size // 4, 1)
    data, out = (v[r] if dwords == 1 else v[r : r + dwords - 1] for r in (8, OUT))
    code = [
        getattr(ins, f"ds_write_{write}")(addr=v[0], data0=data, offset0=32),
        getattr(ins, f"ds_read_{read}")(addr=v[1], vdst=out, offset0=32),
    ]
    lanes = range(0, 8 * size, size)
    vectors = {0: lanes, 1: [*reversed(lanes)]}
    vectors |= {8 + i: [100 + 10 * i + lane for lane in range(8)] for i in range(4)}
    state = execute(*code, vectors=vectors, exec_=0xFF)
    for i in range(dwords):
        assert state.vector[OUT + i, 0, :8].tolist() == [107 + 10 * i - lane for lane in range(8)]
    for address, message in ((1024 - 32, "out of bounds"), (1, "unaligned")):
        if size > 1 or address > 1:
            with pytest.raises(Fault, match=message):
                execute(code[0], vectors={**vectors, 0: address}, exec_=1)


def test_lds_two_at_once():
    code = [
        ins.ds_write2_b64(addr=v[0], data0=v[8:9], data1=v[10:11], offset0=1, offset1=3),
        ins.ds_read2_b32(addr=v[0], vdst=v[OUT : OUT + 1], offset0=2, offset1=7),
        ins.ds_read2st64_b32(addr=v[0], vdst=v[24:25], offset0=0, offset1=1),
        ins.ds_read_u16_d16_hi(addr=v[0], vdst=v[26], offset0=8),
        ins.ds_write_b8_d16_hi(addr=v[0], data0=v[8], offset0=8),
        ins.ds_read_u8_d16(addr=v[0], vdst=v[27], offset0=8),
        ins.ds_write_b16_d16_hi(addr=v[0], data0=v[8], offset0=32),
        ins.ds_read_u16(addr=v[0], vdst=v[28], offset0=32),
    ]
    vectors = {0: 0, 8: 0x80011, 9: 9, 10: 10, 11: 11, 26: 5, 27: 0xAAAA0000}
    state = execute(*code, vectors=vectors, exec_=1)
    assert state.vector[OUT : OUT + 2, 0, 0].tolist() == [0x80011, 11]
    assert state.vector[26, 0, 0] == 0x110005 and state.vector[27, 0, 0] == 0xAAAA0008
    assert state.vector[28, 0, 0] == 8


# ---- waves ---
@pytest.mark.parametrize("barrier", [True, False])
@pytest.mark.parametrize("order", ["lockstep", "serial", "reversed"])
def test_a_missing_barrier_shows_in_serial_order(order, barrier):
    """Two waves hand their number to each other through LDS."""
    memory, out = Global(), np.full(128, 0xEEEEEEEE, U32)
    address = memory.add(out, writable=True)
    code = [
        ins.v_mov_b32_e32(vdst=v[4], src0=256),  # the other wave's slots
        ins.v_lshlrev_b32_e32(vdst=v[2], src0=2, vsrc1=v[0]),
        ins.ds_write_b32(addr=v[2], data0=v[0]),
        ins.s_waitcnt(simm16=0),
        ins.s_sleep(simm16=2),
        *[ins.s_barrier()] * barrier,
        ins.v_xor_b32_e32(vdst=v[3], src0=v[4], vsrc1=v[2]),
        ins.ds_read_b32(addr=v[3], vdst=v[OUT]),
        ins.global_store_dword(data=v[OUT], addr=v[2], saddr=s[4:5]),
    ]
    emulator = of_code(*code)
    scalar = np.zeros((128, 2), U32)
    scalar[4], scalar[5] = address & 0xFFFFFFFF, address >> 32
    scalar[EXEC : EXEC + 2] = 0xFFFFFFFF
    vector = np.zeros((32, 2, 64), U32)
    vector[0] = np.arange(128).reshape(2, 64)
    space = Space(memory, Shared(1, 512), False)
    emulator.run(Waves(space, 0, np.zeros(2, int), scalar, vector), order, per_group=2)
    right = (out == np.arange(128) ^ 64).all()
    assert right == (barrier or order == "lockstep")


def test_waves_part_and_meet():
    """A loop of as many rounds as the wave has in s8, with a counter of its own."""
    code = [
        ins.s_mov_b32(sdst=s[9], ssrc0=0),
        ins.s_add_u32(sdst=s[9], ssrc0=s[9], ssrc1=3),
        ins.s_sub_u32(sdst=s[8], ssrc0=s[8], ssrc1=1),
        ins.s_cmp_lg_u32(ssrc0=s[8], ssrc1=0),
        ins.s_cbranch_scc1(simm16=-4 & 0xFFFF),
        ins.v_mov_b32_e32(vdst=v[1], src0=s[9]),
        ins.v_lshlrev_b32_e32(vdst=v[0], src0=2, vsrc1=v[0]),
        ins.global_store_dword(data=v[1], addr=v[0], saddr=s[4:5]),
    ]
    memory, out = Global(), np.zeros(5, U32)
    address = memory.add(out, writable=True)
    emulator = of_code(*code)
    scalar = np.zeros((128, 5), U32)
    scalar[4], scalar[5], scalar[8] = address & 0xFFFFFFFF, address >> 32, [1, 4, 2, 4, 3]
    scalar[EXEC] = 1
    vector = np.zeros((32, 5, 64), U32)
    vector[0] = np.arange(5)[:, None]
    emulator.run(Waves(Space(memory, Shared(5, 0), False), 0, np.arange(5), scalar, vector))
    assert out.tolist() == [3, 12, 6, 12, 9]
    assert emulator.executed["global_store_dword"] == 5


def test_what_is_unknown_raises():
    for code in (
        ins.v_sin_f32_e32(vdst=v[1], src0=v[0]),
        ins.s_memtime(sdata=s[4:5]),
        ins.scratch_load_dword(vdst=v[1], addr=v[0], saddr=s[4]),
        ins.v_add_f32_e64(vdst=v[1], src0=v[0], src1=v[0], clmp=1),
        ins.v_add_f32_e64(vdst=v[1], src0=v[0], src1=v[0], omod=1),
        ins.v_add_u32_e64(vdst=v[1], src0=v[0], src1=v[0], neg=1),
        ins.v_mov_b32_e32(vdst=v[1], src0=DPP, vsrc0=v[0], dpp=0x130, row_mask=15, bank_mask=15),
        ins.s_setreg_b32(sdst=s[8], simm16=1 << 11 | 6 << 6 | 1),  # float16's mode
        ins.s_setreg_b32(sdst=s[8], simm16=1 << 11 | 4 << 6 | 1),  # garbage
        ins.global_atomic_add(vdst=v[1], addr=v[0], saddr=s[4:5], data=v[2]),
    ):
        with pytest.raises(NotImplementedError, match=r"emulator does not know th|float32 modes"):
            execute(code, vectors={0: 0})
    with pytest.raises(NotImplementedError, match="no instruction"):
        emulator = Emulator(SimpleNamespace(memory=b"\xff" * 32, arch="gfx950", kernels={}))
        space = Space(Global(), Shared(1, 0), 3)
        emulator.run(Waves(space, 0, np.zeros(1, int), np.zeros((128, 1), U32),
                           np.zeros((8, 1, 64), U32)))  # fmt: skip


def test_every_instruction_has_expectations():
    saves = {name for name in isa.SCALAR if "saveexec" in name}
    assert set(isa.SWAPS) == {"v_permlane16_swap_b32", "v_permlane32_swap_b32"}
    assert set(SCALAR) | saves == set(isa.SCALAR)
    assert set(VECTOR) | {"v_fmac_f64"} == set(isa.VECTOR)  # by test_a_float64_is_added_to
    packed = {"v_pk_mul_f32", "v_pk_add_f32", "v_pk_fma_f32", "v_pk_max_u16"}
    assert set(isa.PACKED) == packed
    assert {name for name, _ in isa.CONVERSIONS} == {
        "v_cvt_scalef32_pk_fp4_f32",
        *(f"v_cvt_pk_{dtype}_f32" for dtype in ("fp8", "bf8", "bf16", "f16")),
    }
    assert set(isa.TRUTH_TABLES) == {"v_bitop3_b32", "v_bitop3_b16"}
    bfloat16 = {"v_mfma_f32_16x16x16_bf16", "v_mfma_f32_32x32x8_bf16"}
    assert set(isa.MATRICES) - bfloat16 == {
        "v_mfma_scale_f32_16x16x128_f8f6f4",
        "v_mfma_scale_f32_32x32x64_f8f6f4",
    }
    tested = {name for name, _, _ in LOADS} | {read for _, _, read in LDS}
    assert set(isa.LOADS) - tested == {"u16_d16_hi", "u8_d16"}  # test_lds_two_at_once
    tested = {name for name, _, _ in STORES} | {write for write, _, _ in LDS}
    assert set(isa.STORES) - tested == {"b8_d16_hi", "b16_d16_hi"}
