"""The AMD kernels: compiled here, executed in the emulator, compared with the reference.

There is no handler in between: `Binary` launches by the same facts that a handler will be given.
"""

import collections
import functools
import importlib.util
import math
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import GOLDEN_SETS, golden_input, op_of, random_bits

from jax_mx.formats import FLOAT_DTYPES, MXFP8_E4M3, MXFP8_E5M2, Scaling
from jax_mx.forms import FORMS
from jax_mx.layouts import SCALE_LAYOUTS
from jax_mx.variants import VARIANTS, Variant

pytest.importorskip("tinygrad")
pytest.importorskip("jax_mx.kernels")  # not in a wheel
if importlib.util.find_spec("flydsl") is None:  # only found: one process cannot hold both DSLs
    pytest.skip("flydsl is not installed", allow_module_level=True)

from tinygrad.renderer.amd import decode_inst

from jax_mx.kernels.build import entries_of
from jax_mx.kernels.flydsl.compile import compile_variant
from jax_mx.kernels.flydsl.gcn import bytes_moved, disassemble
from jax_mx.testing.code_object import ARCHS, CodeObject
from jax_mx.testing.emulator import ORDERS, Emulator
from jax_mx.testing.memory import Fault, Global

TESTED = [
    Variant(op, "flydsl", form, dtype, (format,) * len(FORMS[form].results))
    for op, form, dtype, format in (
        ("quantize", "last", "bfloat16", MXFP8_E4M3),
        ("quantize", "second_transposed", "float32", MXFP8_E5M2),
        ("quantize", "both_transposed", "bfloat16", MXFP8_E4M3),
        ("quantize", "square", "float16", MXFP8_E5M2),
        ("dequantize", "last", "bfloat16", MXFP8_E4M3),
        ("dequantize", "second", "float16", MXFP8_E5M2),
        ("dequantize", "last_transposed", "float32", MXFP8_E4M3),
        ("dequantize", "square_transposed", "bfloat16", MXFP8_E5M2),
    )
]


def layouts_of(variant: Variant) -> list[str]:
    return ["row_major"] if variant.form.startswith("square") else [*SCALE_LAYOUTS]


each_variant = pytest.mark.parametrize("variant", TESTED, ids=lambda v: v.name)
each_arch = pytest.mark.parametrize("arch", sorted(ARCHS.values()))


class Binary:
    """A compiled variant, and launches of it."""

    def __init__(self, variant: Variant, image: bytes, facts: dict):
        self.variant, self.image, self.facts = variant, image, facts
        self.code = CodeObject(image)
        self.emulator = Emulator(self.code)

    def shapes(self, shape, layout: str) -> list[tuple[int, ...]]:
        """Of the buffers for floats of this shape, as the form views them."""
        form = FORMS[self.variant.form]
        axis = -1 if self.variant.form.startswith("last") else -2
        view, _ = form.view(shape, (None,) * len(shape), axis)
        shapes = []
        for result, format in zip(form.results, self.variant.formats, strict=True):
            shapes.append(result.values_shape(view, format))
            shapes.append(result.scales_shape(view, SCALE_LAYOUTS[layout]))
        return [view, *shapes] if self.variant.op == "quantize" else [*shapes, view]

    @property
    def layouts(self) -> list[str]:
        """That there are entries for."""
        return [*self.facts["launches"]]

    def entry(self, layout: str, number: int) -> dict:
        """Of a layout the entry for aligned operands, 0, or for any, 1."""
        return self.facts["launches"][layout]["entries"][number]

    def takes(self, entry: int, shapes, layout: str) -> bool:
        """Whether an entry is for buffers of these shapes, if they are aligned."""
        divide = self.entry(layout, entry)["divide"]
        return all(extent(shapes, *where) % divisor == 0 for *where, divisor in divide)

    def launch(self, entry, shape, layout, scaling, memory, addresses, order, last_slab=False):
        """The launch rule; `last_slab`: only those workgroups."""
        shapes = self.shapes(shape, layout)
        names, facts = {}, self.entry(layout, entry)
        for i, format in enumerate(self.variant.formats):  # dequantize asks for none
            pair = Scaling(scaling).rounding(format)
            names |= zip((f"round_add_{i}", f"round_exception_{i}"), pair, strict=True)
        scalars = [
            (size, names[rule] if isinstance(rule, str) else extent(shapes, *rule))
            for size, rule in self.facts["launches"][layout]["scalars"]
        ]
        grid = [1, 1, 1]
        for axis, *where, divisor in facts["grid"]:
            grid[axis] *= -(-extent(shapes, *where) // divisor)
        symbol = facts["symbol"]
        kernel = self.code.kernels[symbol]
        values = [(8, address) for address in addresses] + scalars
        block = bytearray(kernel.arguments)
        for parameter, (size, value) in zip(kernel.parameters, values, strict=True):
            assert parameter.size == size
            at = slice(parameter.offset, parameter.offset + size)
            block[at] = value.to_bytes(size, "little", signed=True)
        groups = None
        if last_slab:
            groups = range(grid[0] - grid[0] // shape[0], grid[0])
        threads = facts["threads"]
        if math.prod(grid):
            self.emulator.launch(symbol, grid, threads, bytes(block), memory, order, groups)


def extent(shapes, buffer: int, start: int, end: int) -> int:
    """As ffi/launch.cc has it; of buffer -1 the constant `start`."""
    return start if buffer < 0 else math.prod(shapes[buffer][start:end])


@pytest.fixture(scope="module")
def binaries():
    """Each variant for each arch, compiled in other processes while tests run."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        jobs = [(variant, arch) for variant in TESTED for arch in sorted(ARCHS.values())]
        futures = {job: pool.submit(compile_variant, *job, layouts_of(job[0])) for job in jobs}

        @functools.cache
        def binary(variant, arch) -> Binary:
            return Binary(variant, *futures[variant, arch].result())

        yield binary


# ---- inputs, results ---
def floats(dtype, key) -> np.ndarray:
    """Random bits of a shape, or the golden sets."""
    if key != "golden":
        return random_bits(key, dtype, seed=len(key))
    with np.errstate(over="ignore", invalid="ignore"):
        sets = [golden_input(name).ravel().astype(FLOAT_DTYPES[dtype]) for name in GOLDEN_SETS]
    x = np.concatenate(sets)
    return np.ascontiguousarray(x[: len(x) // 2048 * 2048].reshape(-1, 64))


@functools.lru_cache(maxsize=64)
def expected(variant, key, layout, scaling):
    """The floats' shape, the bytes of the operands, and those of the results."""
    x = floats(variant.dtype, key)
    quantizes = variant.op == "quantize"
    options = {"scale_layout": layout} | ({"scaling": scaling} if quantizes else {})
    operand, op = op_of(variant, **options)
    taken = operand(jnp.asarray(x))
    if not quantizes:
        taken = any_bits(taken, seed=len(key))
    results = jax.jit(functools.partial(op, implementation="xla"))(taken)
    return x.shape, leaves_of(taken), leaves_of(results)


def leaves_of(tree) -> list[np.ndarray]:
    """The bytes of its arrays."""
    return [np.asarray(leaf).reshape(-1).view(np.uint8) for leaf in jax.tree.leaves(tree)]


def any_bits(array, seed: int):
    """An MXArray of its shape with any codes and scales, whether something is quantized to them."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.integers(0, 256, leaf.shape, np.uint8).view(leaf.dtype)), array
    )


def placed(data: np.ndarray, align: int, keep: bool) -> np.ndarray:
    """A copy, or poison of its size, at an address that is aligned to `align` and no more."""
    room = np.full(len(data) + 128, 0xA7, np.uint8)
    skew = -room.__array_interface__["data"][0] % 64 + align
    window = room[skew : skew + len(data)]
    if keep:
        window[:] = data
    return window


def results_of(
    binary, entry, key, layout, scaling, order, memory=None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Pairs: the bytes of a launch, and the right ones."""
    shape, given, want = expected(binary.variant, key, layout, scaling)
    memory, arrays, addresses = memory or Global(), [], []
    for i, data in enumerate([*given, *want]):
        reads = i < len(given)
        arrays.append(placed(data, binary.entry(layout, entry)["align"][i], keep=reads))
        addresses.append(memory.add(arrays[-1], writable=not reads, name=f"buffer {i}"))
    binary.launch(entry, shape, layout, scaling, memory, addresses, order)
    return list(zip(arrays[len(given) :], want, strict=True))


def check(binary, entry, key, layout, scaling="rceil", order="lockstep") -> None:
    for i, (got, want) in enumerate(results_of(binary, entry, key, layout, scaling, order)):
        bad = np.flatnonzero(got != want)
        where = f"entry {entry} {key} {layout} {scaling} {order}: result {i}"
        assert not len(bad), f"{where}: {len(bad)} of {len(got)} differ, first at {bad[:5]}"


EDGES = {  # tails, odd lengths, slabs, one block; for entry 0, then 1, then 0
    "last": [(2, 33, 96), (3, 129, 32), (1, 32)],
    "last_transposed": [(2, 144, 96), (3, 33, 160), (16, 32)],
    "second": [(2, 160, 144), (2, 96, 33), (32, 16)],
    "both": [(2, 96, 160), (2, 32, 288), (32, 32)],
    "square": [(2, 96, 160), (2, 32, 288), (32, 32)],
}


@each_variant
@each_arch
def test_bits(variant, arch, binaries):
    """Every entry with every layout; scalings and orders of the waves in turn."""
    binary, ran = binaries(variant, arch), set()
    form = variant.form
    for i, shape in enumerate(EDGES.get(form) or EDGES[form.removesuffix("_transposed")]):
        for j, layout in enumerate(binary.layouts):
            scaling = [*Scaling][(i + j) % len(Scaling)].value
            entry = i % 2
            assert entry or binary.takes(0, binary.shapes(shape, layout), layout)
            waits = binary.entry(layout, entry)["usage"]["shared"] > 0  # else no order is another
            order = ORDERS[(i + j) % len(ORDERS)] if waits else "lockstep"
            check(binary, entry, shape, layout, scaling, order)
            ran.add((entry, layout))
    assert len(ran) == len(binary.code.kernels)


@each_variant
@each_arch
def test_golden_inputs(variant, arch, binaries):
    """Ties, subnormals, NaN, infinities, the edges of each binade; with every scaling."""
    for scaling in Scaling if variant.op == "quantize" else (Scaling.FLOOR,):
        check(binaries(variant, arch), 0, "golden", "row_major", scaling.value)


@each_variant
@each_arch
def test_addresses_past_4_gib(variant, arch, binaries):
    """The last slab of a tensor of 2^33 elements, of which nothing else exists."""
    binary = binaries(variant, arch)
    slabs = (1 << 33) // (256 * 256)
    for entry, layout in enumerate((binary.layouts[0], binary.layouts[-1])):  # padding nothing
        _, given, want = expected(variant, (1, 256, 256), layout, "rceil")
        memory, outs, addresses = Global(), [], []
        for i, data in enumerate([*given, *want]):
            reads = i < len(given)
            align = binary.entry(layout, entry)["align"][i]
            outs.append(placed(data, align, keep=reads))
            base = (0x7F00 + 16 * i << 32) + align % 16
            at = base + (slabs - 1) * len(data)
            memory.add(outs[-1], writable=not reads, name=f"buffer {i}", address=at)
            addresses.append(base)
        shape = (slabs, 256, 256)
        binary.launch(entry, shape, layout, "rceil", memory, addresses, "lockstep", last_slab=True)
        for i, (got, right) in enumerate(zip(outs[len(given) :], want, strict=True)):
            assert (got == right).all(), f"result {i}: {np.flatnonzero(got != right)[:5]}"


def test_nothing_spills_and_nothing_ships(binaries):
    for variant in TESTED:
        for arch in ARCHS.values():
            entries = entries_of(binaries(variant, arch).facts)
            assert not any(entry["usage"]["stack"] for entry in entries), variant.name
    assert {variant.implementation for variant in VARIANTS} == {"cutedsl"}


@each_variant
@each_arch
def test_aligned_entries_move_16_bytes_a_lane(variant, arch, binaries):
    """All of x, the values and the floats; scales, of which a block has one byte, by less."""
    binary = binaries(variant, arch)
    floats = FLOAT_DTYPES[variant.dtype].itemsize
    quantizes = variant.op == "quantize"
    for layout in binary.layouts:
        entry = binary.entry(layout, 0)
        elements = entry["usage"]["elements_per_thread"]
        moved = collections.Counter()
        for _, name, _ in disassemble(binary.code, entry["symbol"]):
            size = bytes_moved(name)
            moved[name.split("_")[1], size >= 16] += size
        assert moved["load", True] == elements * (floats if quantizes else 1)
        assert moved["store", True] == elements * (len(variant.formats) if quantizes else floats)
        assert not moved["load" if quantizes else "store", False]
        # Alternatives, of which a lane takes one: a word, or its bytes.
        assert moved["store" if quantizes else "load", False] <= 8 * len(variant.formats)


class Segments(Global):
    """Counts the pieces of 64 bytes that accesses of 16 bytes a lane touch, and the fewest."""

    touched = least = 0

    def _find(self, addresses, size, what):
        if size == 16:
            self.touched += sum(len(np.unique(wave >> np.uint64(6)))
                                for wave in addresses.reshape(-1, 64))  # fmt: skip
            self.least += len(addresses) // 4
        return super()._find(addresses, size, what)


@each_variant
@each_arch
def test_aligned_entries_coalesce(variant, arch, binaries):
    """What a wave accesses at once are whole pieces of memory, of a tensor of whole tiles."""
    for layout in binaries(variant, arch).layouts:
        memory = Segments()
        for got, want in results_of(
            binaries(variant, arch), 0, (256, 256), layout, "rceil", "lockstep", memory
        ):
            assert (got == want).all()
        assert memory.touched == memory.least > 0


# ---- would these tests notice? ---
SAMPLE = 100  # changes of each kernel
UNOBSERVABLE = ("s_nop", "s_waitcnt")  # time, which the emulator does not model


@pytest.mark.parametrize(
    "variant,arch,cases",
    [
        (TESTED[0], "gfx950", [("row_major", "rceil"), ("blocked_128x4", "even")]),
        (TESTED[1], "gfx942", [("row_major", "rceil"), ("shuffled_32x8", "even")]),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_changed_bits_are_noticed(variant, arch, cases, binaries):
    """Single-bit changes of the code: other bytes come out, or the emulator faults or refuses."""
    original = binaries(variant, arch)
    binary = Binary(variant, original.image, original.facts)
    shape = (65, 96) if variant.form == "last" else (96, 80)

    def passes() -> bool:
        return all(
            (got == want).all()
            for case in cases
            for got, want in results_of(binary, 0, shape, *case, "serial")
        )

    assert passes()
    code, emulator = binary.code, binary.emulator
    emulator.limit = 300
    whole = dict(emulator._steps)
    bits = [
        (pc, bit) for pc, (_, size, name) in whole.items() for bit in range(8 * size)
        if name not in UNOBSERVABLE
    ]  # fmt: skip
    outcomes, survivors = collections.Counter(), []
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
            survivors.append(f"bit {bit} of {decode_inst(before, 'cdna')}")
        code.memory[pc : pc + 16] = before
    print(f"{variant.name}.{arch}: {dict(outcomes)}", *survivors, sep="\n")  # with pytest -s
    assert outcomes["survived"] < SAMPLE / 4
