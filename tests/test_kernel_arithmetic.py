"""NVIDIA's kernels with preprocessing, by numpy, one thread at a time; a GPU runs the whole.

test_emulated.py executes AMD's as a whole.
"""

import inspect
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exact import changed, integers, wanted
from helpers import assert_bits_equal, hard_blocks, plan_for

from jax_mx.formats import blocks as reference
from jax_mx.formats.directions import LAST
from jax_mx.formats.formats import (
    BLOCK,
    MXFP4_E2M1,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    SCALE_NAN,
)
from jax_mx.quantizing import quantizers
from jax_mx.quantizing.facts.preprocessing import Preprocessing
from jax_mx.quantizing.facts.product_kernels import DIRECT, ProductKernel
from jax_mx.shipping.shipped import SHIPPED

FLAT = [
    v for v in SHIPPED if v.changes_elements and v.implementation == "cutedsl" and v.form == LAST
]
preprocessed = pytest.importorskip("jax_mx.quantizing.kernels.cutedsl.preprocessed")
convert = pytest.importorskip("jax_mx.quantizing.kernels.cutedsl.convert")


def floats(bits):
    return np.asarray(bits, np.uint32).view(np.float32)


def flushed(x):
    x = np.asarray(x, np.float32)
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def toward_zero(x):  # float64, exact
    near = x.astype(np.float32)
    return np.where(abs(near.astype(np.float64)) > abs(x), np.nextafter(near, np.float32(0)), near)


def ftz(f):
    """A binary operation as PTX has it: exact in float64 but for one rounding, and flushed."""

    def run(a, b):
        a, b = (flushed(v).astype(np.float64) for v in (a, b))
        exact = f(a, b)  # a sum or a product of float32, or a sum that rounds twice: see below
        tiny = abs(exact) < 2.0**-126  # before rounding
        return np.where(tiny, np.copysign(0, exact), exact.astype(np.float32)).astype(np.float32)

    return run


def added(a, b):
    """In float32, which is one rounding; float64 would round twice."""
    return flushed(flushed(a) + flushed(b))


def bytes_of(low, high, select):
    """By the digits of `select`, the lowest first, bytes of both."""
    both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    digits = [select >> 4 * i & 7 for i in range(4)]
    chosen = [(both >> np.uint64(8 * d) & np.uint64(255)) << np.uint64(8 * i)
              for i, d in enumerate(digits)]  # fmt: skip
    return sum(chosen[1:], chosen[0]).astype(np.uint32)


def halves(word):
    """The two bfloat16 of a word."""
    return np.ascontiguousarray(word).view(ml_dtypes.bfloat16)


def multiplied(a, b, c=None):
    """Two bfloat16 times two, plus two, rounded once: products of 16 bits and -0 are exact."""
    product = halves(a).astype(np.float32) * halves(b).astype(np.float32)
    if c is not None:
        product = product + halves(np.broadcast_to(c, a.shape)).astype(np.float32)
    return product.astype(ml_dtypes.bfloat16).view(np.uint32)


OPERATIONS = {
    "add.rn.ftz.f32": added,
    "sub.rn.ftz.f32": lambda a, b: added(a, -b),
    "mul.rn.ftz.f32": ftz(np.multiply),
    "fma.rn.ftz.f32": lambda a, b, c: added(a * b, c),  # b is 1 or -1
    "fma.rz.f32": lambda a, b, c: toward_zero(a.astype(np.float64) * b + c),
    "abs.f32": np.abs,
    "min.f32": np.fmin,
    "mov.f32": lambda a: a,
    "cvt.f32.f16": lambda a: np.asarray(a, np.uint16).view(np.float16).astype(np.float32),
    "mov.b32": lambda a: a,
    "add.u32": np.add,
    "max.u32": np.maximum,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "prmt.b32": lambda a, b, select: bytes_of(a, b, int(select)),
    "min.u16x2": lambda a, b: np.minimum(a.view(np.uint16), np.uint16(b & np.uint32(0xFFFF))).view(
        np.uint32
    ),
    "setp.ne.s32": np.not_equal,
    "setp.nan.f32": lambda a, b: np.isnan(a) | np.isnan(b),
    "setp.gt.f32": np.greater,
    "selp.b32": lambda a, b, condition: np.where(condition, a, b),
    "selp.f32": lambda a, b, condition: np.where(condition, a, b),
    "add.rn.f32": np.add,
    "sub.u32": np.subtract,
    "shr.u32": np.right_shift,
    "mul.rn.f16x2": lambda a, b: (a.view(np.float16) * np.float16(2.0**8)).view(np.uint32),
    "mul.rn.bf16x2": lambda a, b: multiplied(a, b),
    "fma.rn.bf16x2": lambda a, b, c: multiplied(a, b, c),
    "max.NaN.bf16x2": lambda a, b: np.maximum(halves(a), halves(b)).view(np.uint32),
    "shf.r.wrap.b32": lambda low, high, n: low >> n | high << (np.uint32(32) - n),
}


def interpret(code, write_only_types, read_only_args, **_):
    """`cute.arch.inline_ptx`; registers are typed by what uses them."""
    registers = {f"$r{i}": np.asarray(a) for i, a in enumerate(read_only_args)}
    for line in re.sub(r"\{(\$\w+)\}", r"\1", code).strip("{} ").split(";"):
        predicate, name, rest = re.fullmatch(r"\s*(@\w+ )?([\w.]*) ?(.*?)\s*", line).groups()
        if name in ("", ".reg"):
            continue
        if "{" in rest:  # mov.b32 {low, high}, word
            low, high, word = re.findall(r"[\w$]+", rest)
            registers[low] = (registers[word] & np.uint32(0xFFFF)).astype(np.uint16)
            registers[high] = (registers[word] >> np.uint32(16)).astype(np.uint16)
            continue
        to, *names = rest.split(", ")
        taken = [read(registers, n, name) for n in names]
        result = OPERATIONS[name](*taken)
        if predicate:
            result = np.where(registers[predicate[1:-1]], result, registers[to])
        registers[to] = result
    out = [typed(registers[f"$w{i}"], t) for i, t in enumerate(write_only_types)]
    return out[0] if len(out) == 1 else out


def read(registers, name, operation):
    """An operand: a register in the operation's type, or a number."""
    dtype = (
        np.float32
        if re.search(r"(add|sub|mul|fma|abs|min|mov|setp|selp)\S*\.f32", operation)
        else None
    )
    if name.startswith("0f"):
        return floats(int(name[2:], 16))
    if name in registers:
        value = registers[name]
        if value.dtype.itemsize != 4:
            return value
        return value.view(dtype or np.uint32)
    return np.uint32(int(name, 0))


def typed(value, dtype):
    return np.asarray(value).view(np.float32 if dtype is np.float32 else np.uint32)


@pytest.fixture(autouse=True)
def on_numpy(monkeypatch):
    """Threads are the last axis: neighbours share a block."""

    def exchange(value, offset):
        lanes = np.arange(value.shape[-1]) ^ offset
        return value[..., lanes]

    arch = SimpleNamespace(inline_ptx=interpret, shuffle_sync_bfly=exchange)
    stand_in = SimpleNamespace(arch=arch)
    for module in (preprocessed, convert):
        monkeypatch.setattr(module, "cute", stand_in)
        monkeypatch.setattr(module, "Uint32", lambda x: np.asarray(x).astype(np.uint32))
        monkeypatch.setattr(module, "Float32", np.float32)
        for name, value in vars(module).copy().items():
            if callable(value) and "loc" in inspect.signature(inspect.unwrap(value)).parameters:
                monkeypatch.setattr(module, name, inspect.unwrap(value))
    monkeypatch.setattr(preprocessed, "Int32", np.int32)
    monkeypatch.setattr(preprocessed, "cutlass", SimpleNamespace(select_=np.where))


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize(
    "variant,prescale,elements",  # 16 are what a thread holds
    [
        pytest.param(
            *(v, prescale, elements),
            id=f"{v.name}-{prescale}-{elements}",
            marks=[pytest.mark.thorough] if (elements, v.dtype) != (16, "bfloat16") else [],
        )
        for v in FLAT
        for prescale in (None, 0.75)
        for elements in (8, 16, 32)
        if v.modes[0].stochastic or prescale is None
    ],
)
def test_threads_compute_what_the_reference_does(variant, prescale, elements):
    (mode,) = variant.modes
    of_variant = mode, variant.dtype
    sharers, span = BLOCK // elements, mode.blocks
    x = hard_blocks(variant.dtype)
    x = x[: len(x) // span * span]
    rng = np.random.default_rng(1)
    block_words = [
        rng.integers(0, 2**32, (len(x), 1), np.uint32) for _ in range(variant.block_data)
    ]
    preprocessing = Preprocessing(mode.stochastic, prescale, mode.hadamard)
    in_rows = x.reshape(-1, BLOCK * span)
    plan = plan_for(in_rows, format=MXFP4_E2M1, scaling="even", preprocessing=(preprocessing,))
    views = [jnp.asarray(a).reshape(-1, span, a.shape[-1]) for a in (x, *block_words)]
    outs = jax.jit(partial(quantizers._quantize_reference, plan=plan))(*views)
    values, scales = (np.asarray(a).reshape(len(x), -1) for a in outs)

    threads = np.arange(sharers * span, dtype=np.int32)
    thread_place = preprocessed.Place(threads % sharers, sharers, elements, threads // sharers)
    held = x.view(np.uint32).reshape(len(x) // span, len(threads), -1)
    held = np.moveaxis(held, -1, 0)  # (words, blocks, threads)
    seeds = block_words[0]
    block_words = [np.repeat(word.reshape(-1, span), sharers, 1) for word in block_words]
    prescale = np.int32(np.float32(prescale or 0).view(np.int32))
    held = preprocessed.flip([*held], block_words[-1], thread_place) if mode.hadamard else [*held]
    unsettled = preprocessed.elements(*of_variant, held, thread_place, prescale)
    settled = [preprocessed.settled(*of_variant, value, prescale) for value in unsettled]
    factor = preprocessed.factor(*of_variant, prescale)
    noise = reference.noise(jnp.asarray(seeds), (-1,)) if mode.stochastic else None
    # Every block, with zeros where products are zero; and without, those that are not small.
    for values_of_threads, small in ((settled, True), (unsettled, False)):
        y = np.moveaxis(np.stack(values_of_threads), 0, -1).reshape(x.shape)
        amax = np.abs(preprocessed.finished(*of_variant, np.abs(y).max(-1), prescale))
        rows = np.flatnonzero(small | ~(amax < floats(preprocessed.SMALL)))
        assert len(rows) > 1000
        y = y * factor
        noisy = None if noise is None else noise[rows]
        quantize = jax.jit(partial(reference.quantize, format=MXFP4_E2M1, scaling=plan.scaling))
        got = quantize(jnp.asarray(y[rows]), noise=noisy)
        assert_bits_equal(got[0], values[rows])
        assert_bits_equal(got[1], scales[rows])
        if mode.stochastic:
            scale = scales.view(np.uint8).astype(np.uint32)
            nan = np.uint32(0x7FFFFFFF)  # the hardware's only one
            inverse = np.where(scale == SCALE_NAN, nan, (254 - scale) << np.uint32(23))
            by = floats(inverse) * factor
            codes = [np.where(np.isnan(by), floats(nan), v) for v in values_of_threads]
            codes = preprocessed.random_codes(codes, by, block_words[0], thread_place)
            codes = np.moveaxis(np.stack(codes), 0, -1).reshape(len(x), -1).astype("<u4", "C")
            assert_bits_equal(codes.view(np.uint8)[rows], values[rows])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_floats_cut_to_odd_round_as_they_are(arch):
    """To bfloat16 and from there to every code and tie, at each exponent that matters."""
    rng = np.random.default_rng(0)
    upper = np.arange(0x3000, 0x4120, dtype=np.uint32) << np.uint32(16)
    lower = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, rng.integers(0, 1 << 16, upper.shape, np.uint32)]
    bits = np.concatenate([upper | np.uint32(low) for low in lower])
    pairs = convert._two_to_odd(floats(bits[::2]), floats(bits[1::2]), arch)
    odd = np.stack([pairs << np.uint32(16), pairs & np.uint32(0xFFFF0000)], -1).ravel()
    want, got = (
        reference._encode(*reference._decode(jnp.asarray(b), 8, 23), 1, 1, 7) for b in (bits, odd)
    )
    np.testing.assert_array_equal(got, want)
    assert (odd == bits).sum() >= len(upper) / 2 and (odd != bits).any()


def test_codes_are_a_carry_of_the_noise():
    """At each end of it and around the carry, for every bfloat16 and others below 8."""
    rng = np.random.default_rng(0)
    bits = np.arange(0, 0x4100, dtype=np.uint32) << np.uint32(16)
    bits = np.concatenate([bits, bits | rng.integers(1, 1 << 16, bits.shape, np.uint32)])
    x = floats(bits).astype(np.float64)
    code = np.minimum(np.minimum(2 * x, x + 2), x / 2 + 4)
    carry = 2**16 - np.floor(code % 1 * 2**16).astype(np.int64)
    for noise in (0 * carry, 0 * carry + 0xFFFF, carry - 1, carry, rng.integers(0, 2**16, x.shape)):
        noise = np.clip(noise, 0, 0xFFFF).astype(np.uint32)
        decoded = reference._decode(jnp.asarray(bits), 8, 23)
        want = np.asarray(reference._encode(*decoded, 1, 1, 7, jnp.asarray(noise)))
        for sign in (0, 1):
            signed = floats(bits | np.uint32(sign << 31))
            got = preprocessed._code(signed, noise << np.uint32(12)) >> np.uint32(28)
            np.testing.assert_array_equal(got, want + 8 * sign)


STORED = {
    MXFP8_E4M3: ml_dtypes.float8_e4m3fn,
    MXFP8_E5M2: ml_dtypes.float8_e5m2,
    MXFP6_E2M3: ml_dtypes.float6_e2m3fn,
    MXFP6_E3M2: ml_dtypes.float6_e3m2fn,
}


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("format", STORED, ids=repr)
def test_codes_without_an_instruction_that_converts(format):
    """Every bfloat16, and others with more bits: one of each, and ties and their neighbours."""
    rng = np.random.default_rng(0)
    bits = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    lower = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, rng.integers(0, 1 << 16, bits.shape, np.uint32)]
    x = floats(np.concatenate([bits | np.uint32(low) for low in lower]))
    largest = np.float32(format.max)
    want = np.clip(x, -largest, largest).astype(STORED[format]).view(np.uint8)
    want = np.where(np.isnan(x), format.nan_code, want)
    to = convert.Conversion("bfloat16", format, "sm_80")
    got = convert.pack_four([*x.reshape(4, -1)], to)
    got = np.stack([got >> np.uint32(8 * i) & np.uint32(255) for i in range(4)]).ravel()
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("format", STORED, ids=repr)
def test_floats_of_codes_without_an_instruction_that_converts(format):
    codes = np.arange(1 << format.bits, dtype=np.uint8)
    packed = codes.view(np.uint32)
    got = convert.unpack_four(packed, convert.Conversion("bfloat16", format, "sm_80"))
    want = codes.view(STORED[format]).astype(np.float32)
    np.testing.assert_array_equal(np.stack(got, -1).ravel(), want)  # of NaN, that it is one
    assert (np.signbit(np.stack(got, -1).ravel()) == np.signbit(want))[~np.isnan(want)].all()


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_pairs_of_bfloat16_without_later_instructions():
    """sm_80 gives the products and the larger magnitudes of sm_90a, for every bfloat16."""
    pairs = np.arange(1 << 16, dtype=np.uint32).view(np.uint32)
    pairs = pairs | pairs[::-1] << np.uint32(16)
    for factor in (0x3F80, 0x0080, 0x7E80, 0x4000, 0x7FC0):
        by = np.full_like(pairs, factor * 0x10001)
        got, want = (convert._multiply_bf16x2(pairs, by, arch) for arch in ("sm_80", "sm_90a"))
        assert ((got == want) | np.isnan(halves(want)).reshape(-1, 2).all(-1)).all()
        magnitude = np.abs(halves(pairs).astype(np.float32))
        larger = np.maximum(magnitude, np.abs(halves(by).astype(np.float32)))
        got = halves(convert.larger_magnitude(pairs, by, "bfloat16", "sm_80")).astype(np.float32)
        np.testing.assert_array_equal(got, larger)


@pytest.mark.parametrize("factor", [0.75, 16**-0.5, 32**-0.5])
def test_no_product_rounds_up_to_the_least_normal_number(factor):
    """So it does not matter whether hardware finds a result subnormal before or after rounding."""
    significand = np.uint64(np.float32(factor).view(np.uint32) & 0x7FFFFF | 1 << 23)
    product = significand * np.arange(1 << 23, 1 << 24, dtype=np.uint64)
    for bits in (47, 48):  # those just below a power of two, by half a unit in the last place
        below = np.uint64(1 << bits) - product[product < 1 << bits]
        assert below.min() > 1 << (bits - 25)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_codes_of_four_bits_times_every_scale(monkeypatch):
    """As few rows of x meet them: each code at each place of a word, exact, 2^-127 and NaN too."""
    few = pytest.importorskip("jax_mx.products.cutedsl.matmul_few")
    numbers = {"max": np.maximum, "min": np.minimum, "select_": np.where}
    monkeypatch.setattr(few, "cutlass", SimpleNamespace(**numbers))
    monkeypatch.setattr(few, "cute", convert.cute)
    monkeypatch.setattr(few, "Int32", np.int32)
    monkeypatch.setattr(few, "Uint32", lambda x: np.asarray(x).astype(np.uint32))
    monkeypatch.setattr(few, "times", inspect.unwrap(few.times))
    codes = np.arange(16)[:, None] + np.arange(8)[None, :] & 15  # of 16 words
    packed = (codes << 4 * np.arange(8)).sum(1).astype(np.uint32)
    values = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    for scale in range(256):
        factors = few.factors_of_e2m1(np.full(16, scale))
        want = (values * 2.0 ** (scale - 127)).astype(ml_dtypes.bfloat16)
        want = np.full_like(want, np.nan) if scale == 255 else want
        for twice in (False, True) if scale <= 128 else (True,):
            got = few.scaled_e2m1(packed, factors[: 1 + twice])
            got = np.stack([halves(np.ascontiguousarray(w)).reshape(-1, 2) for w in got], 1)
            got = got.transpose(0, 2, 1).reshape(16, 8).astype(np.float32)
            np.testing.assert_array_equal(got, want.astype(np.float32))


class Bytes:
    """Global memory: words of lanes at addresses."""

    def __init__(self, *arrays):
        self.all = np.concatenate([np.ravel(a).view(np.uint8) for a in arrays])
        self.starts = np.cumsum([0, *(a.nbytes for a in arrays)])

    def words(self, address, count):
        at = np.broadcast_to(address, 32)[:, None] + np.arange(4 * count)
        return [*self.all[at].view(np.uint32).T]


def multiplied_by_warps(a, b, sums):
    """mma.m16n8k16 of 32 lanes' words of bfloat16, as the manual has them."""
    g, q = np.arange(32) // 4, np.arange(32) % 4
    left, right = np.zeros((16, 16)), np.zeros((16, 8))
    for i, word in enumerate(a):
        for h in range(2):
            left[g + 8 * (i % 2), 2 * q + h + 8 * (i // 2)] = halves(word)[h::2]
    for i, word in enumerate(b):
        for h in range(2):
            right[2 * q + h + 8 * i, g] = halves(word)[h::2]
    c = left @ right
    part = [c[g + 8 * (v // 2), 2 * q + v % 2].astype(np.float32) for v in range(4)]
    return part if sums is None else [x + y for x, y in zip(sums, part, strict=True)]


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
@pytest.mark.parametrize("format", [MXFP8_E4M3, MXFP4_E2M1, MXFP6_E3M2], ids=repr)
@pytest.mark.parametrize("parts", [1, 2])
def test_lanes_that_load_codes_add_up_the_product(format, parts, monkeypatch):
    """All that a warp does from memory to sums: exact, with scales of 2^-127 and NaN, too."""
    vector = pytest.importorskip("jax_mx.products.cutedsl.matmul_vector")
    few = pytest.importorskip("jax_mx.products.cutedsl.matmul_few")
    direct = vector.Direct(ProductKernel("matmul", "cutedsl", (format,), DIRECT), "sm_90a")
    direct.arch = "sm_80"  # whose conversions are integers
    rng, deep, rows, width = np.random.default_rng(0), 5, 3, 16
    k = deep * 128
    w = integers(rng, (width, k), format)
    scales = np.array(w.scales.view(np.uint8))
    scales[3, 7], scales[5, 19], scales[9], scales[11, ::5] = 255, 0, 0, 140
    x = rng.integers(-2, 3, (rows, parts * k)).astype(ml_dtypes.bfloat16)
    memory = Bytes(np.asarray(w.values), scales, x)
    lanes = np.arange(32)
    for module in (vector, few):
        for name in ("const_expr", "range_constexpr"):
            monkeypatch.setattr(module, name, {"const_expr": bool, "range_constexpr": range}[name])
        monkeypatch.setattr(module, "cute", convert.cute)
        monkeypatch.setattr(module, "Int32", np.int32)
        monkeypatch.setattr(module, "Int64", np.int64)
        monkeypatch.setattr(module, "Uint32", convert.Uint32)
        pair = {"max": np.maximum, "min": np.minimum, "select_": np.where}
        monkeypatch.setattr(module, "cutlass", SimpleNamespace(**pair))
    convert.cute.make_rmem_tensor = registers
    convert.cute.arch.vote_any_sync = np.any
    monkeypatch.setattr(few, "times", inspect.unwrap(few.times))
    monkeypatch.setattr(convert, "round_two", rounded_two)
    monkeypatch.setattr(convert, "bytes_of", bytes_of)
    monkeypatch.setattr(convert, "factor_of", powers_of)
    monkeypatch.setattr(vector, "product", multiplied_by_warps)
    monkeypatch.setattr(vector, "sixteen", lambda at: memory.words(at, 4))
    monkeypatch.setattr(vector, "vector", lambda at, _: memory.words(at, 1))

    def load_x(at, is_there, to):
        for j in range(to.shape[1]):
            at_j = np.where(is_there, at + 16 * j, 0)
            to[:, j] = np.where(is_there, memory.words(at_j, 4), 0)

    direct.load_x = load_x
    for name in ("load", "multiply", "of_bytes", "of_nibbles", "add_nibbles"):
        method = inspect.unwrap(getattr(vector.Direct, name))
        setattr(direct, name, partial(method, direct))
    line = [lanes // 4 + 8 * r for r in range(2)]
    start = [n * (k // BLOCK) for n in line]
    codes, held = registers((4, 2, direct.lines, direct.steps)), registers((2, direct.steps))
    y, acc = np.zeros((width, 8)), np.zeros((4, 32), np.float32)
    at = [SimpleNamespace(toint=lambda where=where: where) for where in memory.starts]
    for first in range(0, parts * deep, direct.steps):
        direct.load(*at[:2], start, codes, held, first, parts * deep, deep, lanes % 4)
        direct.multiply(acc, at[2], codes, held, 0, rows, first, parts * k, lanes)
    for v in range(4):
        y[lanes // 4 + 8 * (v // 2), 2 * (lanes % 4) + v % 2] = acc[v]
    if direct.per == 1:
        y[:, :4] += y[:, 4:]
    w = changed(w, scales=[(..., scales)])
    want = sum(wanted(part, w) for part in np.split(x.astype(np.float64), parts, 1))
    np.testing.assert_array_equal(y[:, :rows].T, want.astype(np.float32))


def registers(shape, *_):
    """Words that each of 32 lanes has."""
    return np.zeros((*shape, 32), np.uint32)


def powers_of(byte):
    """The float32 of scales' bytes."""
    return np.where(byte == 255, np.nan, 2.0 ** (byte.astype(np.float64) - 127)).astype(np.float32)


def rounded_two(low, high, dtype):
    """Two floats as a word of bfloat16."""
    assert dtype == "bfloat16"
    both = np.stack([low, high], -1).astype(ml_dtypes.bfloat16)
    return np.ascontiguousarray(both).view(np.uint32)[..., 0]
