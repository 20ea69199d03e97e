"""Launches of AMD's binaries in the emulator with no handler in between.

By the same launch facts, on memory that no array of a test could have: misaligned, or far apart.
"""

import functools
import math

import jax
import numpy as np
import pytest
from helpers import call, covering, op_of, operand, random_bits, with_zeros
from jax.extend.core import jaxpr_as_fun

from jax_mx.formats.directions import LAST
from jax_mx.formats.formats import BLOCK
from jax_mx.launch import store
from jax_mx.launch.chips import ARCHS
from jax_mx.launch.code_object import CodeObject
from jax_mx.launch.emulation.memory import Global
from jax_mx.shipping.shipped import SHIPPED

POISON = 0xA7
# Kernels of sources are in their own tests, as tests/test_rows.py.
FLYDSL = [v for v in SHIPPED if v.implementation == "flydsl" and not v.source]


def binaries_of(variants) -> list[tuple]:
    """(variant, arch) of each."""
    return [(variant, arch) for variant in variants for arch in ARCHS["flydsl"]]


def few(binaries) -> list[tuple]:
    """Some that have, between them, what all have: forms, dtypes, formats, archs.

    And some transform, some random rounding, some window; floats come out of some, of either way to
    cut the work.
    """

    def has(binary):
        variant, arch = binary
        traits = {variant.form, variant.dtype, *variant.formats, arch}
        for mode in variant.modes:
            there = {
                "hadamard": mode.hadamard > 0,
                "stochastic": mode.stochastic,
                "window": mode.window != BLOCK,
                "flat floats": mode.dequantized and variant.form == LAST,
                "tiled floats": mode.dequantized and variant.form != LAST,
            }
            traits |= {name for name, is_there in there.items() if is_there}
        return {(variant.op, trait) for trait in traits} | {(arch, variant.dtype)}

    return covering(binaries, has)


# Tests share these by default, as to compile a kernel takes longer than to test it.
FEW = few(sorted(binaries_of(FLYDSL), key=lambda binary: binary[1], reverse=True))


def each_binary(variants, turn: int | None = None):
    """Parametrizes by the binaries of variants of `FLYDSL`, by default of those in `FEW`.

    With a turn, 0 or 1, of every third one of these.
    """
    default = [entry for entry in FEW if entry[0] in variants]
    default = default if turn is None else default[turn::3]
    return pytest.mark.parametrize(
        "variant,arch",
        [
            pytest.param(
                *(variant, arch),
                id=f"{variant.name}-{arch}",
                marks=[pytest.mark.thorough] * ((variant, arch) not in default),
            )
            for variant, arch in binaries_of(variants)
        ],
    )


def every_binary(variants):
    """Parametrizes by the binaries of variants, which are compiled as they are asked for."""
    ids = [f"{variant.name}-{arch}" for variant, arch in binaries_of(variants)]
    return pytest.mark.parametrize("variant,arch", binaries_of(variants), ids=ids)


def bytes_of(tree) -> list[np.ndarray]:
    """The bytes of each array of a tree: of buffers, as views do not move any."""
    return [np.ascontiguousarray(leaf).reshape(-1).view(np.uint8) for leaf in jax.tree.leaves(tree)]


@functools.lru_cache(maxsize=64)
def example(variant, shape, **options) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The bytes of operands of some shape, and of what must come of them.

    With a scale for blocks of zeros there are some, the first, which lanes beyond the array read.
    """
    floats = random_bits(shape, variant.dtype, seed=len(shape))
    if "zero_scale" in options:
        floats = with_zeros(floats)
    return example_of(variant, floats, **options)


def example_of(variant, floats, **options) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """As `example`, of these floats."""
    x = operand(variant, floats, **options)
    operands = [x, *words_behind(variant, floats, **options)]
    return bytes_of(operands), bytes_of(jax.jit(call(variant, "xla", **options))(x))


def words_behind(variant, floats, **options) -> list[np.ndarray]:
    """The block data of a variant with preprocessing: a uint32 per block, as it lies."""
    if not variant.block_data:
        return []
    jaxpr = traced(variant, floats, **options)
    at, plan = plan_of(jaxpr)
    before, bound = jaxpr.eqns[:at], jaxpr.eqns[at]
    prefix = jaxpr.jaxpr.replace(eqns=before, outvars=bound.invars[1:])
    results = jaxpr_as_fun(jaxpr.replace(jaxpr=prefix))(floats)
    view = plan.view
    lead = bound.invars[0].aval.ndim - view.tail
    order = *range(lead), *(lead + i for i in view.operand)
    return [np.asarray(a).transpose(order) for a in results]


def traced(variant, abstract, **options):
    """A call's jaxpr, flat: without the functions that the public ops are jitted in."""
    with jax.disable_jit():
        return jax.make_jaxpr(call(variant, "flydsl", **options))(abstract)


def plan_of(jaxpr) -> tuple:
    """The equation of a call's jaxpr that binds a primitive of jax_mx, and its plan.

    The equation that computes amaxes of rows for it does not count.
    """
    ((at, plan),) = (
        (i, eqn.params["plan"])
        for i, eqn in enumerate(jaxpr.eqns)
        if "plan" in eqn.params and "amaxes" not in eqn.primitive.name
    )
    return at, plan


def placed(data: np.ndarray, align: int, keep: bool) -> np.ndarray:
    """A copy, or poison of its size, at an address that is aligned to `align` and no more."""
    room = np.full(len(data) + 128, POISON, np.uint8)
    skew = -room.__array_interface__["data"][0] % 64 + align
    window = room[skew : skew + len(data)]
    if keep:
        window[:] = data
    return window


def merged(shape, groups) -> tuple[int, ...]:
    """As launch rules see it: `merge` of ffi/launch.cc."""
    if len(shape) < len(groups):
        return shape
    alone, rest = shape[: len(shape) - len(groups)], shape[len(shape) - len(groups) :]
    products = [1] * (max(groups, default=-1) + 1)
    for length, group in zip(rest, groups, strict=True):
        products[group] *= length
    return (*alone, *products)


class Program:
    """A call of a variant's op, and the launch that its facts give for buffers of its shapes."""

    def __init__(self, variant, arch, shape, **options):
        make, _ = op_of(variant, **options)
        abstract = jax.eval_shape(make, jax.ShapeDtypeStruct(shape, variant.dtype))
        jaxpr = traced(variant, abstract, **options)
        at, plan = plan_of(jaxpr)
        bound, merge = jaxpr.eqns[at], plan.view.merge
        self.dims = [merged(var.aval.shape, merge) for var in (*bound.invars, *bound.outvars)]
        self.absent = [plan.signature.number(name) for name in plan.lacks]
        for i in self.absent:
            self.dims.insert(i, ())
        self.operands = len(bound.invars) + len(self.absent)
        self.shared = [
            i for i, array in enumerate(plan.signature.operands) if array.name == "weights"
        ]
        artifact = store.get(variant, arch)
        self.code = CodeObject(artifact.image)
        self.rule = artifact.attributes(plan.scale_layout.name, plan.scalars, carry=False)

    def extent(self, buffer: int, start: int, end: int) -> int:
        """As ffi/launch.cc has it; of buffer -1 the constant `start`."""
        return int(start) if buffer < 0 else math.prod(self.dims[buffer][start:end])

    def takes(self, entry: int) -> bool:
        """Whether an entry is for buffers of these shapes, if they are aligned."""
        rows = self.rule.get("divide", np.empty(0, np.int64)).reshape(-1, 5)
        return all(self.extent(*row[1:4]) % row[4] == 0 for row in rows if row[0] == entry)

    def align(self, entry: int) -> list[int]:
        """The number that must divide the address of each buffer."""
        return self.rule["align"].reshape(-1, len(self.dims))[entry].tolist()

    def launch(
        self, entry, memory, addresses, order="lockstep", part=1, emulator=None, late=False
    ) -> None:
        """Runs an entry on buffers at these addresses, or the last of `part` equal parts of it.

        With `late` the first workgroup is the last one.
        """
        symbol = self.rule["symbols"].split(",")[entry]
        sums = [{}, {}, {}]  # of each axis, products by the number of the summand
        for axis, *where, divisor, summand in self.rule["grid"].reshape(-1, 6).tolist():
            if axis // 3 == entry:
                of_axis = sums[axis % 3]
                of_axis[summand] = of_axis.get(summand, 1) * -(-self.extent(*where) // divisor)
        grid = [sum(terms.values()) if terms else 1 for terms in sums]
        scalars = self.rule["scalars"].reshape(-1, 4).tolist()
        values = [(8, address) for address in addresses]
        values += [(size, self.extent(*where)) for size, *where in scalars]
        kernel = self.code.kernels[symbol]
        block = bytearray(kernel.arguments)
        for parameter, (size, value) in zip(kernel.parameters, values, strict=True):
            assert parameter.size == size
            at = slice(parameter.offset, parameter.offset + size)
            block[at] = value.to_bytes(size, "little", signed=True)
        count = math.prod(grid)
        threads = self.rule["threads"].reshape(-1, 3)[entry].tolist()
        groups = None if part == 1 else range(count - count // part, count)
        groups = range(count)[::-1] if late else groups
        if count:
            from jax_mx.launch.emulation.emulator import Emulator  # which takes tinygrad

            emulator = emulator or Emulator(self.code)
            emulator.launch(symbol, grid, threads, bytes(block), memory, order, groups)

    def run(
        self, entry, operands, results, order="lockstep", slabs=1, emulator=None, late=False
    ) -> bool:
        """Whether `operands` give the bytes of `results`; all are as misaligned as may be.

        With `slabs`, these are the last slab of so many, of which no other exists.
        """
        memory, addresses, arrays, operands = Global(), [], [], [*operands]
        cleared = self.rule.get("scratch", np.empty(0, np.int64)).reshape(-1, 2)
        for i in self.absent:
            operands.insert(i, None)
        for i, (data, align) in enumerate(
            zip([*operands, *results], self.align(entry), strict=True)
        ):
            if data is None:
                arrays.append(None)
                addresses.append(0)
                continue
            arrays.append(placed(data, align, keep=i < self.operands))
            if [i, 1] in cleared.tolist():
                arrays[-1][:] = 0
            writable, at = i >= self.operands, None
            base = (0x7F00 + 64 * i << 32) + align % 16
            if slabs > 1 and i not in self.shared:
                at = base + (slabs - 1) * len(data)
            added = memory.add(arrays[-1], writable=writable, name=f"buffer {i}", address=at)
            addresses.append(added if at is None else base)
        self.launch(entry, memory, addresses, order, slabs, emulator, late)
        pairs = zip(arrays[self.operands :], results, strict=True)
        return all((got == want).all() for got, want in pairs)
