"""Inputs that break quantizers, an oracle that shares nothing with the reference, comparison."""

import contextlib
import copy
import dataclasses
import itertools
import math
import os
import re
import socket
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import images
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from forks import Running
from jax.interpreters import mlir
from jax.sharding import AxisType, PartitionSpec

import jax_mx
from jax_mx.decoding import chain
from jax_mx.formats.directions import FORMS, LAST_TRANSPOSED, SECOND, Blocks
from jax_mx.formats.formats import BLOCK
from jax_mx.formats.layouts import ROW_MAJOR_VALUES, SCALE_LAYOUTS
from jax_mx.launch import rule as words
from jax_mx.launch import store, targets
from jax_mx.launch.chips import arch_of
from jax_mx.products import kernel_plans, primitives
from jax_mx.products.contraction import swapped_floats
from jax_mx.quantizing import primitive, quantizers, registry
from jax_mx.quantizing.amaxes import AMAX, amaxes_p
from jax_mx.quantizing.calling import called
from jax_mx.quantizing.facts.preprocessing import Preprocessing
from jax_mx.quantizing.facts.product_kernels import RESULTS, Binary
from jax_mx.quantizing.facts.signatures import signature_of
from jax_mx.quantizing.facts.sources import X
from jax_mx.quantizing.facts.variants import Variant, takes_zero_scale
from jax_mx.quantizing.plan import ProductPlan
from jax_mx.quantizing.planning import Options, planned
from jax_mx.quantizing.requantize import requantize
from jax_mx.quantizing.sources.codes import CodesSource
from jax_mx.quantizing.sources.gated import GatedSource
from jax_mx.quantizing.sources.gated_gradient import GradientSource
from jax_mx.quantizing.sources.gated_pair import GatedPairSource
from jax_mx.quantizing.sources.pair_gradient import PairGradientSource

GOLDEN = Path(__file__).parent / "golden"


def bytes_of(array) -> np.ndarray:
    """Its bytes, with a last dimension for the bytes of an element beyond the first."""
    array = np.asarray(array)
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat.reshape(*array.shape, array.dtype.itemsize)


def product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x * y of float32, by float64; zeros where 24 bits of it are less than 2^-126."""
    exact = x.astype(np.float64) * y.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        less = np.abs(exact * 2.0**126).astype(np.float32) < 1
        return np.where(less, np.copysign(0, exact), exact).astype(np.float32)


def step(f: Callable, wrt: Iterable[int] | None = None) -> Callable:
    """(*args, dy) -> f(*args) and its gradients, of all arguments or of these."""

    def call(*args):
        *args, dy = args
        at = range(len(args)) if wrt is None else wrt

        def of(*some):
            replaced = dict(zip(at, some, strict=True))
            return f(*(replaced.get(i, arg) for i, arg in enumerate(args)))

        y, pull = jax.vjp(of, *(args[i] for i in at))
        return (y, *pull(dy))

    return call


def settled(x: np.ndarray) -> np.ndarray:
    """Float32s, with zeros of their sign for subnormal ones."""
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x).astype(np.float32)


def by_kernel(x, w, sizes=None, *, sums=False, dtype="float32", implementation=None, **options):
    """The product of operands as they lie, by the kernel that their shapes ask for.

    Args:
      x: see `primitives.by_plan`.
      w: see `primitives.by_plan`.
      sizes: the rows of each group.
      sums: whether the rows of each group are summed over; MX arrays without windows are made
        floats first.
      dtype: of the result.
      implementation: the kernel's, or "xla", its reference; None: the kernel where there is one.
      **options: `window`, `tiles`, `free`, `narrow`, see `ProductPlan`; `tile`: the rows of a tile
        of x.
    """
    dtype, grouped = jnp.dtype(dtype), sizes is not None
    if sums and options.get("window", BLOCK) == BLOCK:
        x, w = (swapped_floats(a, isinstance(a, jax_mx.MXArray)) for a in (x, w))
    formats = tuple(q.format for q in (x, w) if isinstance(q, jax_mx.MXArray))
    if sums and formats:
        plan = kernel_plans.wgrad_plan_of(formats, dtype, options["window"], implementation)
    elif sums:
        plan = kernel_plans.floats_plan_of(x.dtype, dtype, grouped, implementation)
    else:
        groups = w.shape[0] if w.ndim == 3 else 1
        columns = w.shape[-1 if options.get("free") else -2]
        options["strips"] = kernel_plans.strips_of(groups, columns)
        rows = kernel_plans.rows_of_each(math.prod(x.shape[:-1]), groups)
        options |= {"grouped": grouped, "implementation": implementation}
        plan = kernel_plans.plan_of(formats, dtype, rows, **options)
    return primitives.by_plan(plan, x, w, sizes)


def step_by_kernel(*operands, product, implementation, **numbers):
    """The results of a step of a chain, by a kernel or by its reference.

    Its operands are x, a residual and weights if the step norms, an `MXArray` if it multiplies;
    an attention takes all of its signature. `numbers` are of its plan.
    """
    flat = []
    for a in operands:
        flat += [a.values[None], a.scales[None]] if isinstance(a, jax_mx.MXArray) else [a]
    options = {"implementation": implementation, "activation": product.activation, **numbers}
    plan = ProductPlan(
        product.op, product.formats, jnp.dtype(jnp.bfloat16), False, product.rows, **options
    )
    return jax.jit(partial(primitives.products_p[product.op].bind, plan=plan))(*flat)


def step_by_step(*operands, plan):
    """The results of a chain's steps, by a call for each."""
    return chain.walked(
        lambda *a, plan: primitives.products_p[plan.op].bind(*a, plan=plan), operands, plan
    )


# The sources whose floats' amaxes a kernel finds, by their words.
_MADE = (GatedSource(), GatedPairSource(), GradientSource(), PairGradientSource())
MADE = {str(source): source for source in _MADE}


def amaxes(x, *other, implementation: str, source=X, parts: int = 1):
    """The bits of the largest magnitudes of rows and of columns, for x (batch, rows, columns).

    Or of what a source makes of x (rows, columns) and other operands, which comes last; columns
    then have one in each of so many parts.
    """
    floats = "float32" if x.dtype == jnp.float32 else ""
    options = {"implementation": implementation, "floats": floats, "source": source, "parts": parts}
    plan = ProductPlan("amaxes", (), AMAX, False, 128, **options)
    return amaxes_p.bind(x, *other, plan=plan)


def assert_bits_equal(got, want, label: str = "") -> None:
    """Same shape, dtype and bits, NaN's included; names the first bad coordinate."""
    assert got.shape == want.shape, f"{label}: shape {got.shape}, expected {want.shape}"
    assert got.dtype == want.dtype, f"{label}: dtype {got.dtype}, expected {want.dtype}"
    got_bytes, want_bytes = bytes_of(got), bytes_of(want)
    bad = np.argwhere((got_bytes != want_bytes).any(-1))
    if len(bad):
        at = tuple(int(i) for i in bad[0])
        raise AssertionError(
            f"{label}: {len(bad)} of {got.size} differ, first at {at}: "
            f"0x{got_bytes[at][::-1].tobytes().hex()}, "
            f"expected 0x{want_bytes[at][::-1].tobytes().hex()}"
        )


def assert_same(got, want, label: str = "", floats: Callable = assert_bits_equal) -> None:
    """Trees of arrays are equal: MX arrays in each field, others as `floats` compares them."""
    is_mx = lambda leaf: isinstance(leaf, jax_mx.MXArray)  # noqa: E731
    leaves = (jax.tree.leaves(tree, is_leaf=is_mx) for tree in (got, want))
    for g, w in zip(*leaves, strict=True):
        (assert_same_array if is_mx(w) else floats)(g, w, label)


def assert_same_array(got, want, label: str = "") -> None:
    """Two MXArrays are equal in every byte and every static field."""
    for field in ("format", "axis", "scale_layout", "block", "value_layout", "window"):
        assert getattr(got, field) == getattr(want, field), f"{label} {field}"
    assert_bits_equal(got.scales, want.scales, f"{label} scales")
    assert_bits_equal(got.values, want.values, f"{label} values")


# ---- what serves what ---
def through_codes(x, formats, dequantized, rows=None, activation=None, **options) -> tuple:
    """A result of `quantize` for each format, or of `quantize_both`; floats, where dequantized."""
    both = len(formats) == 2
    asked = Options(
        formats,
        transpose=(False, not dequantized[1]) if both else False,
        value_layouts=(ROW_MAJOR_VALUES,) * len(formats),
        preprocessing=tuple(Preprocessing(dequantized=floats) for floats in dequantized),
        **options,
    )
    data = ((None, None),) * len(formats)
    return called("quantize_both" if both else "quantize", asked, x, data, rows, activation)


def op_of(variant: Variant, **options) -> tuple[Callable, Callable]:
    """`(operand, call)`: the op of a variant, and how floats become what it takes.

    The floats that the op takes or gives have the shape of operand's argument; `options` are
    quantize's, wherever it is called, and what else the variant's preprocessing may be.
    """
    options = {**preprocessing(variant), **options}
    turn, form = variant.form.transposed, variant.form
    if variant.gives_floats:
        dequantized = tuple(mode.dequantized for mode in variant.modes)
        along = {} if form.is_both else {"axis": -2 if form.spans[0] else -1}
        fields = {"formats": variant.formats, "dequantized": dequantized, **along}
        return lambda x: x, partial(through_codes, **fields, **options)
    if form.is_both:
        pair = {"formats": variant.formats, "transpose": (False, turn)}
        return lambda x: x, partial(jax_mx.quantize_both, **pair, **options)
    axis = -2 if form.directions[0].blocks is Blocks.SECOND else -1  # of the floats
    if form.is_square:
        options["block"] = (BLOCK, BLOCK)
    elif turn and variant.op == "dequantize":
        axis = -3 - axis
    quantize = partial(jax_mx.quantize, format=variant.formats[0], axis=axis, **options)
    if isinstance(variant.source, CodesSource):
        make = partial(jax_mx.quantize, format=variant.source.format)
        return make, partial(requantize, transpose=turn, **quantize.keywords)
    if variant.op == "quantize":
        return lambda x: x, partial(quantize, transpose=turn)
    dequantize = partial(jax_mx.dequantize, dtype=variant.dtype, transpose=turn)
    return lambda x: quantize(jnp.swapaxes(x, -1, -2) if turn else x), dequantize


def preprocessing(
    variant: Variant, signs: bool = True, prescale: float | None = None, of: Callable = np.asarray
) -> dict:
    """The keywords of quantize that ask for what is compiled into the variant.

    Signs are what `of` makes of NumPy's: known when a call is traced, or jnp.asarray's.
    """
    options = {"hadamard": [], "rounding": []}
    if variant.window != BLOCK:
        return {"window": variant.window}
    for i, (size, stochastic, *_) in enumerate(variant.modes):
        minus = np.random.default_rng(size).random(size) < 0.5
        hadamard = jax_mx.Hadamard(size, of(minus) if signs else None) if size else None
        rounding = jax_mx.Stochastic(jax.random.key(7 + i), prescale) if stochastic else None
        options["hadamard"].append(hadamard)
        options["rounding"].append(rounding)
    return {
        name: values[0] if len(values) == 1 else tuple(values)
        for name, values in options.items()
        if any(values)
    }


def call(variant, implementation=None, **options):
    """The variant's op as a function of its operand that returns a list of arrays or MXArrays."""
    _, op = op_of(variant, **options)

    def run(operand, **more):
        results = op(operand, implementation=implementation, **more)
        return [*results] if isinstance(results, tuple) else [results]

    return run


def operand(variant, floats, **options):
    """The op's operand: the floats; for dequantize an MXArray of that shape, of any bytes."""
    if variant.op == "quantize":
        return jnp.asarray(floats)
    make, _ = op_of(variant, **options)
    rng = np.random.default_rng(len(floats.shape))
    return jax.tree.map(
        lambda like: jnp.asarray(rng.integers(0, 256, like.shape, np.uint8).view(like.dtype)),
        jax.eval_shape(make, jax.ShapeDtypeStruct(floats.shape, variant.dtype)),
    )


def assert_refused(call, error, sentence):
    """The call raises this error, in one line that says so."""
    with pytest.raises(error) as caught:
        call()
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- what a call comes to ---
COLLECTIVE = re.compile(
    r"\b(all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\("
)


_MOVED = re.compile(
    r"= ([^\n]*?) (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)"
    r"(?:-start)?\("
)


def collectives(text: str) -> Counter:
    """The collectives of a compiled program, counted by kind, type and number of elements."""
    counts = Counter()
    for types, op in _MOVED.findall(text):
        for dtype, shape in re.findall(r"([a-z]+[0-9]+[a-z0-9]*)\[([0-9,]*)\]", types):
            counts[op, dtype, math.prod(int(n) for n in shape.split(",") if n)] += 1
    return counts


def lowered(x, f=jax_mx.quantize, platform="cuda", **options) -> str:
    """The StableHLO of a call, for a platform that need not be here."""
    call = jax.jit(lambda x: f(x, **options))
    return call.trace(x).lower(lowering_platforms=(platform,)).as_text()


def call_attributes_in(text: str) -> str:
    """The line of a lowered program that has its one custom call."""
    (line,) = [line for line in text.splitlines() if f"@{store.TARGET}(" in line]
    return line


def quantizings(f, *args, within=None):
    """How many arrays a program quantizes, each direction counted; or loops of a name do."""
    count = 0

    def visit(jaxpr, inside=within is None):
        nonlocal count
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            quantizes = name in ("mx_quantize", "mx_quantize_rows")
            count += len(eqn.outvars) // 2 if quantizes and inside else 0
            for sub in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "jaxpr")):
                inner = getattr(sub, "jaxpr", sub)  # closed, or as remat has it before JAX 0.11
                if hasattr(inner, "eqns"):
                    visit(inner, inside or name == within)

    visit(jax.make_jaxpr(f)(*args).jaxpr)
    return count


@dataclasses.dataclass(frozen=True)
class InHand(store.Artifact):
    """A kernel that is in no folder: each call carries it."""

    def attributes(self, launch, scalars, carry):
        """The attributes of an export."""
        return super().attributes(launch, scalars, carry=True)


def stand_in(kernel: Binary, arch: str = "sm_90a") -> InHand:
    """A kernel without code, for programs that are lowered and compiled but must not run."""
    image = images.cuda()
    signature = kernel.signature if isinstance(kernel, Variant) else signature_of(kernel.op)
    count = len(signature.arrays)
    entry = words.Entry(f"{kernel.name}_0", (1,) * count, (32, 1, 1))
    rule = words.Launch(entries=(entry,)).to_json()
    facts = {
        "sha256": images.sha256(image),
        "launches": dict.fromkeys((*SCALE_LAYOUTS, *RESULTS, "uint32"), rule),
    }
    return InHand(facts, Path(), image)


_apart = jax.make_user_context(default_value=None)  # part of JAX's caches' keys


def lowered_apart(name: str | None = None):
    """Programs are lowered anew within, and are not those that others find.

    For what is patched under JAX: clearing its caches would cost all other programs. By a name
    they are found again, by whoever patches the same.
    """
    return _apart(object() if name is None else name)


@contextlib.contextmanager
def changed_kernels(change: Callable):
    """Programs that are lowered within it take kernels whose facts and image `change` changed."""
    get = store.get

    def changed(variant, arch):
        artifact = get(variant, arch)
        facts = copy.deepcopy(artifact.facts)
        return InHand(facts, artifact.folder, change(facts, artifact.image) or artifact.image)

    with pytest.MonkeyPatch.context() as patch, lowered_apart():
        patch.setattr(store, "get", changed)
        yield


@contextlib.contextmanager
def for_any_address():
    """Kernels are without their first entry, that of aligned arrays, so the other takes all."""
    get = store.get

    def without_the_first(kernel: Binary, arch: str):
        artifact = get(kernel, arch)
        facts = copy.deepcopy(artifact.facts)
        for rule in facts["launches"].values():
            del rule["entries"][0]
        return dataclasses.replace(artifact, facts=facts)

    with pytest.MonkeyPatch.context() as patch, lowered_apart("for any address"):
        patch.setattr(store, "get", without_the_first)
        yield


def plan_for(x, op: str = "quantize", **options):
    """The plan of a call of quantize on x; options as `jax_mx.quantize` has them."""
    for name, default in (("format", "mxfp8_e4m3"), ("value_layout", "row_major")):
        options[f"{name}s"] = (options.pop(name, default),)
    return planned(op, x, Options(**options))


def kernels_for(plan, chips) -> dict[str, dict]:
    """The attribute `kernels` of the plan's custom call, with the binaries in it."""
    support = registry.chosen(plan, targets.platform_of(chips[0]), chips)
    (kernel,) = support.kernels
    return {
        chip: store.get(kernel, arch_of(chip)).attributes(
            plan.scale_layout.name, plan.scalars, carry=True
        )
        for chip in chips
    }


def zero_scales(variant: Variant) -> tuple[int, ...]:
    """The scales of zeros that a variant's kernel takes: 127 where each of its formats has it."""
    return (0, 127) if all(map(takes_zero_scale, variant.formats)) else (0,)


# ---- inputs ---
def fitting(variant: Variant, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape, of twice as many blocks where the variant's transforms span two."""
    if all(mode.blocks == 1 for mode in variant.modes):
        return shape
    axes = [axis for axis, blocked in zip((-2, -1), variant.form.spans, strict=True) if blocked]
    return tuple(n * 2 if i - len(shape) in axes else n for i, n in enumerate(shape))


# Both directions are whole tiles of values: odd counts of them, slabs.
TILES = [(3, 64, 192), (320, 64), (192, 192)]


def in_tiles(variant) -> list[dict]:
    """The options that ask for the variant's values in tiles: of either result, and of both."""
    if variant.op != "quantize" or variant.gives_floats:
        return []
    if variant.form == SECOND:  # blocks do not end a row
        return []
    if not variant.form.is_both:
        return [{"value_layout": "shuffled_16x16"}]
    layouts = ("row_major", "shuffled_16x16")
    second = layouts if variant.form.transposed else layouts[:1]
    return [{"value_layouts": pair} for pair in itertools.product(layouts, second)][1:]


def every_bfloat16() -> np.ndarray:
    """(2048, 64): all 65,536 patterns in order; then a permutation that mixes magnitudes."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    mixed = np.random.default_rng(0).permutation(codes)
    return np.concatenate([codes, mixed]).reshape(-1, 64).view(ml_dtypes.bfloat16)


def random_bits(shape: tuple[int, ...], dtype, seed: int = 0) -> np.ndarray:
    """Floats of uniformly random bits, NaN, infinities and subnormals included.

    Half of the blocks are finite, and have one exponent each with a spread of a few binades. So
    elements do not all vanish next to the block's largest.
    """
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    width = 8 * dtype.itemsize
    info = ml_dtypes.finfo(dtype)
    size = int(np.prod(shape))
    bits = rng.integers(0, 1 << width, size, dtype=np.uint64)
    blocks = max(size // BLOCK, 1)
    exponent = rng.integers(0, 2**info.nexp - 1, (blocks, 1))
    field = np.clip(exponent - rng.integers(0, 6, (blocks, BLOCK)), 0, 2**info.nexp - 2)
    field = np.where(rng.random((blocks, 1)) < 0.5, field, -1).reshape(-1)[:size]
    keep = (1 << (width - 1)) | ((1 << info.nmant) - 1)
    narrow = (bits & np.uint64(keep)) | (
        np.maximum(field, 0).astype(np.uint64) << np.uint64(info.nmant)
    )
    bits = np.where(field >= 0, narrow, bits)
    return bits.astype(f"uint{width}").view(dtype).reshape(shape)


def normal(shape: tuple[int, ...], seed: int = 0, dtype="float32") -> jax.Array:
    """Random numbers by NumPy: JAX's generator is a program to compile for each shape."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def hard_blocks(dtype) -> np.ndarray:
    """(2500, 32): any bits; of one binade and few; about the least normal number; zeros."""
    x = random_bits((2500, BLOCK), dtype, seed=3)
    if dtype != "float16":  # whose numbers are normal ones in float32
        bits = x.view(np.uint32 if dtype == "float32" else np.uint16)
        for some, kept in ((slice(1500, 2000), 0x80FF), (slice(2000, 2500), 0x87FF)):
            bits[some] &= bits.dtype.type(kept << 16 | 0xFFFF if bits.itemsize == 4 else kept)
    x[:40, ::2] = 0
    x[:20] = np.where(np.arange(BLOCK) % 3, -0.0, 0.0)
    return x


def with_zeros(floats: np.ndarray) -> np.ndarray:
    """The same with zeros of either sign in the first blocks, along either axis."""
    zeros = np.copysign(floats.dtype.type(0), floats)
    first = np.indices(floats.shape)[-2:].max(0) < BLOCK
    return np.where(first, zeros, floats)


def golden_input(name: str) -> np.ndarray:
    """A golden input set, float32."""
    with np.load(GOLDEN / "quantize.npz") as golden:
        return golden[f"input/{name}"].view(np.float32)


GOLDEN_SETS = ("special_blocks_f32", "ties_f32", "subnormal_f32")


def poison_memory() -> None:
    """Leaves freed device memory full of 0x55, so that an output that is not written shows."""
    if jax.default_backend() == "cpu":
        return
    junk = [jnp.full((1 << n,), 0x55, jnp.uint8) for n in range(8, 28)]
    jax.block_until_ready(junk)
    for array in junk:
        array.delete()


# ---- calls ---
# A variant of every op and form, with a kernel or not.
EVERY = [
    Variant(op, "cutedsl", form, "bfloat16", (jax_mx.MXFP8_E4M3,) * len(form.directions))
    for form in FORMS.values()
    for op in ("quantize", "dequantize")
    if (op, form) != ("quantize", LAST_TRANSPOSED) and not (op == "dequantize" and form.is_both)
]
# Calls that kernels along rows serve.
FP4 = "mxfp4_e2m1"
SIGNS = np.where(np.random.default_rng(0).random(64) < 0.5, -1, 1)
# A raw key, that of jax.random.key(7): an import must not start a backend.
ROUNDING = jax_mx.Stochastic(np.array([0, 7], np.uint32), 0.75)
SR, H16 = {"rounding": ROUNDING}, {"hadamard": jax_mx.Hadamard(16, SIGNS[:16])}
PAIR = {"rounding": (None, ROUNDING), "hadamard": (jax_mx.Hadamard(32, SIGNS[:32]), None)}
BY_ROWS = {  # how it is called, on which shape, how many results
    "second": ("quantize", SR | {"axis": -2}, (2, 96, 72), 1),
    "second_transposed": ("quantize", H16 | {"axis": -2, "transpose": True}, (2, 96, 72), 1),
    "second_transposed, tiles": (
        *("quantize", SR | H16 | {"axis": -2, "transpose": True, "scale_layout": "blocked_128x4"}),
        *((2, 160, 256), 1),
    ),
    "second_transposed, values": (
        *("quantize", H16 | {"axis": -2, "transpose": True, "value_layout": "shuffled_16x16"}),
        *((2, 128, 64), 1),
    ),
    "first of three": ("quantize", SR | H16 | {"axis": 0}, (64, 4, 40), 1),
    "both": ("quantize_both", SR | H16 | {"transpose": (False, False)}, (2, 64, 128), 2),
    "both_transposed": ("quantize_both", PAIR, (2, 64, 128), 2),
    "both_transposed, tiles": ("quantize_both", PAIR | {"scale_layout": "blocked_128x4"},
                               (256, 128), 2),
}  # fmt: skip


# ---- eight devices ---
MESH = ("expert", "data", "tensor")  # in this order a mesh has its axes


def mesh_shape(spec: object, n: int) -> dict[str, int]:
    """The sizes of a mesh of n devices, with the axes that specs name; at least one."""
    names = [name for name in MESH if name in str(spec)] or ["data"]
    sizes = {1: (n,), 2: (2, n // 2), 3: (2, 2, n // 4) if n > 2 else (2, 1, 1)}[len(names)]
    return dict(zip(names, sizes, strict=True))


def mesh_of(*lengths, names="ab", axis_type: AxisType = AxisType.Auto, devices=None):
    """A mesh of the CPU's devices, or of others; a string names an axis by each letter."""
    devices = (devices or jax.devices("cpu"))[: math.prod(lengths)]
    names, axis_types = tuple(names[: len(lengths)]), (axis_type,) * len(lengths)
    return jax.make_mesh(lengths, names, axis_types=axis_types, devices=devices)


def mesh_for(spec: object, devices, axis_type: AxisType):
    shape = mesh_shape(spec, len(devices))
    return mesh_of(*shape.values(), names=(*shape,), axis_type=axis_type, devices=devices)


def names_in(entry) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def only(spec: PartitionSpec, names) -> PartitionSpec:
    kept = (tuple(n for n in names_in(entry) if n in names) for entry in spec)
    return PartitionSpec(*(entry or None for entry in kept))


# The coordinator of jax.distributed rarely dies when all is done, by a race in gRPC's server, see
# grpc/grpc#27716. Nothing of ours is there any longer then.
GRPC_RACE = "Check failed: queue.Pop() == nullptr"


def on_eight(
    code: str, *args: str, processes: int = 1, devices: int = 8, platform: str = "cpu"
) -> list[str]:
    """Runs code in new processes at once, on simulated devices or on GPUs; what each prints.

    Once more where several were done and one died of `GRPC_RACE`.
    """
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = {**os.environ, "XLA_FLAGS": flags}
    if platform == "cpu":
        env["JAX_PLATFORMS"] = "cpu"
    prelude = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import functools, pathlib, re
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        import jax_mx
    """
    code = textwrap.dedent(prelude) + textwrap.dedent(code)
    ended = in_processes(processes, code, *args, env=env)
    if processes > 1 and any(GRPC_RACE in errors for _, _, errors in ended):
        ended = in_processes(processes, code, *args, env=env)
    for status, _, errors in ended:
        assert status == 0, errors[-3000:]
    return [out for _, out, _ in ended]


def in_processes(count: int, code: str, *args: str, env: dict[str, str]) -> list[tuple]:
    """Runs code in so many processes, each with its number: status, output and errors of each."""
    running = [Running(code, str(i), *args, env=env) for i in range(count)]
    try:
        return [process.wait(300) for process in running]
    finally:
        for process in running:
            process.kill()


def free_port() -> str:
    """A port of this machine that nobody uses."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def on_two(code: str, *args: str, devices: int = 4, platform: str = "cpu") -> None:
    """Code has no error in two processes of jax.distributed; `me` is the number of one."""
    start = """
        me = int(sys.argv[1])
        ids = {"local_device_ids": [me]} if GPU else {}
        jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, me, **ids)
    """
    start = textwrap.dedent(start).replace("GPU", str(platform == "gpu"))
    code = start + textwrap.dedent(code) + '\nprint("right")'
    out = on_eight(code, free_port(), *args, processes=2, devices=devices, platform=platform)
    assert [output.splitlines()[-1] for output in out] == ["right"] * 2  # Gloo talks, too


def cached_in(folder: str) -> list[str]:
    """Turns JAX's persistent cache on, for all programs; JAX's events from now on."""
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    return events


def stand_ins_on_cpu() -> None:
    """Lowers every variant to the call of its stand-in on the CPU, where nothing runs it."""

    def lowering(ctx, *operands, plan):
        kernel = registry.chosen(plan, "cuda", ()).kernels[0]
        kernels = {"sm_90": stand_in(kernel).attributes("row_major", {}, True)}
        return primitive._call(ctx, *operands, plan=plan, view=plan.view, kernels=kernels)

    for p in (quantizers.quantize_p, quantizers.dequantize_p):
        mlir.register_lowering(p, lowering, platform="cpu")


# ---- tables ---
def in_turn(rows: Iterable, columns: Iterable) -> list:
    """Every pair; by default each row with one of the columns, the next row with the next one."""
    rows, columns = [*rows], [*columns]
    return [
        pytest.param(
            *(row, column),
            id=f"{row}-{column}",
            marks=[pytest.mark.thorough] * (i % len(columns) != j),
        )
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]


def covering(items: Iterable, has: Callable) -> list:
    """Some of the items that have, between them, what all have: `has` gives a set for each."""
    items, some = [*items], []
    missing = set().union(*map(has, items))
    while missing:
        some.append(max(items, key=lambda item: len(missing & has(item))))
        missing -= has(some[-1])
    return some


def with_table(text: str, name: str, lines: Iterable[str]) -> str:
    """The text with the table of that name written anew."""
    pattern = rf"(<!-- {name}: [^>]*-->\n).*?(<!-- /{name} -->)"
    table = "\n".join(lines)
    text, count = re.subn(pattern, lambda m: f"{m[1]}{table}\n{m[2]}", text, flags=re.DOTALL)
    assert count == 1, name
    return text


def loaded_after(code: str) -> set[str]:
    """The modules of a new process that runs `code`."""
    code += "\nimport sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(run.stdout.split())
