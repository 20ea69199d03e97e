"""compute-sanitizer finds nothing in a sample of the kernels; jax_mx/verified says in which."""

import math
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import arch_here
from exact import to_attend
from helpers import (
    MADE,
    TILES,
    amaxes,
    by_kernel,
    bytes_of,
    fitting,
    in_tiles,
    op_of,
    random_bits,
    step_by_kernel,
)

import jax_mx
from jax_mx.formats.formats import BLOCK, MXFP4_E2M1, MXFP6_E2M3, MXFP8_E4M3, SCALE_DTYPE
from jax_mx.formats.layouts import ROW_MAJOR
from jax_mx.formats.windows import ROW
from jax_mx.norms.source import NormSource
from jax_mx.quantizing.calling import WithSums
from jax_mx.quantizing.facts.product_kernels import PRODUCTS
from jax_mx.quantizing.facts.sources import X
from jax_mx.quantizing.facts.variants import layouts_of, value_layouts_of
from jax_mx.quantizing.requantize import requantize
from jax_mx.quantizing.sources.codes import CodesSource
from jax_mx.quantizing.sources.gated_gradient import GradientSource
from jax_mx.quantizing.sources.rows import RowsSource
from jax_mx.shipping.shipped import SHIPPED

TOOLS = {
    "memcheck": ("--leak-check", "no"),
    "racecheck": (),
    "initcheck": (),
    "synccheck": (),
}
# In these, a warp's lanes write or read shared memory, meet, and one of them arrives at a barrier
# for all, which orders what the others did too (PTX: causality order is transitive). racecheck
# reports hazards between the scales' writers and readers of just these pairs.
UNSEEN_BY_RACECHECK = ("matmul_fp8", "wgrad_fp8")  # and products of free weights
CUTEDSL = [v for v in SHIPPED if v.implementation == "cutedsl"]
FORMS = [*dict.fromkeys((v.op, v.form) for v in CUTEDSL)]
# Every kernel class with every form; dtypes in turn, one with MXFP4, one with MXFP6; and every
# preprocessing.
SAMPLE = [
    v
    for i, (op, form) in enumerate(FORMS)
    for dtype, format in (
        ("bfloat16", MXFP8_E4M3),
        (("float32", "float16")[i % 2], MXFP8_E4M3),
        (("bfloat16", "float32", "float16")[i % 3], MXFP4_E2M1),
        *[("bfloat16", MXFP6_E2M3)] * (i % 4 == 0),
    )
    for v in [
        v
        for v in CUTEDSL
        if (v.op, v.form, v.dtype) == (op, form, dtype)
        and v.formats[0] == format
        and not (v.source or v.modes)
    ][:1]
] + [v for v in CUTEDSL if v.changes_elements and v.dtype == "bfloat16"]
SAMPLE += [
    v
    for v in CUTEDSL
    if v.source == RowsSource() and v.window == BLOCK and not v.gives_floats
    if {*v.formats} in ({MXFP8_E4M3}, {MXFP4_E2M1})
]
# Every form that gives floats in place of codes, of x and of its rows.
SAMPLE += [
    v
    for v in CUTEDSL
    if v.gives_floats and v.source in (X, RowsSource())
    if v.formats[0] in (MXFP8_E4M3, MXFP4_E2M1)
]
# Every form of what an activation gives, of its gradient, and of rows of codes.
MADE_SAMPLE = [
    v
    for v in CUTEDSL
    if v.dtype == "bfloat16" and {*v.formats} in ({MXFP8_E4M3}, {MXFP4_E2M1})
    if getattr(v.source, "activation", "") == "swiglu" or isinstance(v.source, CodesSource)
    if v.window == BLOCK
]
# Every form of what is normed, likewise.
NORMS_SAMPLE = [
    v
    for v in CUTEDSL
    if isinstance(v.source, NormSource)
    and v.window == BLOCK
    and {*v.formats} in ({MXFP8_E4M3}, {MXFP4_E2M1})
]
# Every kernel of products and of amaxes, with E4M3 and with MXFP4.
PRODUCTS_SAMPLE = [p for p in PRODUCTS if {*p.formats} in (set(), {MXFP8_E4M3}, {MXFP4_E2M1})]
PARTS = {
    "quantizers": SAMPLE,
    "made": MADE_SAMPLE,
    "norms": NORMS_SAMPLE,
    "products": PRODUCTS_SAMPLE,
}
SHAPES = {  # by how a form begins: tails of every tile; rows that 16 bytes do not divide
    "last": ((2, 160, 288), (1, 65, 96)),
    "second": ((2, 160, 288), (1, 96, 65), (2, 64, 521)),
    "both": ((2, 160, 288),),
    "square": ((2, 160, 288),),
}
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


@pytest.mark.thorough
@pytest.mark.gpu
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer_is_silent(tool, part, record_property):
    if not Path(SANITIZER).exists():
        pytest.skip("no compute-sanitizer")
    # Every buffer its own allocation, or reads and writes between them would pass.
    env = {**os.environ, "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    # The handler asks the driver for one parameter too many, on purpose: an API error, no fault.
    options = ["--tool", tool, *TOOLS[tool], "--error-exitcode", "99", "--report-api-errors", "no"]
    done = subprocess.run(
        [SANITIZER, *options, sys.executable, __file__, tool, part],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "ran " in done.stdout
    for variant in sampled(tool, part):
        device = jax.devices()[0].device_kind
        record_property("executed", (variant.name, arch_here(), f"{device}, {tool}"))


def shapes_of(variant) -> tuple[tuple[int, ...], ...]:
    return SHAPES[str(variant.form).removesuffix("_transposed")]


def sampled(tool: str, part: str) -> list:
    """The binaries of a part that a tool is to find nothing in."""
    if part != "products" or tool != "racecheck":
        return PARTS[part]
    return [p for p in PRODUCTS_SAMPLE if p.op not in UNSEEN_BY_RACECHECK and not p.free]


def main(tool: str, part: str, only: str = "") -> None:
    """The program that runs below the sanitizer; it has only our kernels.

    `only`, for a call by hand, is an expression that variants' names must match.
    """
    ran = 0
    for variant in sampled(tool, part):
        if not re.search(only, variant.name):
            continue
        if part == "products":
            run_product(variant)
            ran += 1
            continue
        run = {"quantizers": run_quantizer, "made": run_made, "norms": run_norm}[part]
        for layout in layouts_of(variant, arch_here() or ""):
            for shape in shapes_of(variant):
                run(variant, layout, shape)
                ran += 1
    print("ran", ran)


def run_quantizer(variant, layout: str, shape: tuple[int, ...]) -> None:
    """Runs a quantizer on x, or on its rows; or dequantizes codes."""
    run_op(variant, layout, shape)
    if len(value_layouts_of("cutedsl", layout)) > 1 and shape == shapes_of(variant)[0]:
        for options in in_tiles(variant)[-1:]:
            run_op(variant, layout, TILES[0], **options)


def run_op(variant, layout: str, shape: tuple[int, ...], **options) -> None:
    if variant.source == RowsSource():
        shape = math.prod(shape[:-1]), shape[-1]
        options["rows"] = np.arange(shape[0], dtype=np.int32)[::-1] * 3 - 96
    make, op = op_of(variant, scale_layout=layout, **options)
    x = random_bits(fitting(variant, shape), variant.dtype)
    with jax.default_device(jax.devices("cpu")[0]):
        operand = jax.tree.map(np.asarray, make(jax.numpy.asarray(x)))
        want = jax.jit(partial(op, implementation="xla"))(operand)
    got = jax.jit(partial(op, implementation="cutedsl"))(operand)
    assert_same(got, want, variant.name, layout, shape)


def assert_same(got, want, *label) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (bytes_of(a) == bytes_of(b)).all(), label


def run_made(variant, layout: str, shape: tuple[int, ...]) -> None:
    """Runs an activation of x, its gradient, or rows of codes."""
    rows, length = math.prod(shape[:-1]), shape[-1]
    options = {} if variant.form.is_both or not variant.form.transposed else {"axis": -2}
    options |= {"scale_layout": layout} | ({"transpose": True} if "axis" in options else {})
    op = jax_mx.quantize_both if variant.form.is_both else jax_mx.quantize
    op = partial(op, format=variant.formats[0], **options)
    if variant.gives_floats:
        _, op = op_of(variant, **options)
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=(rows, n * length)).astype(jnp.bfloat16) for n in (2, 1))
    weights, source = rng.normal(size=rows).astype(np.float32), variant.source
    arguments: dict = {}
    if isinstance(source, CodesSource):
        length = -(-length // BLOCK) * BLOCK
        with jax.default_device(jax.devices("cpu")[0]):
            x = jax_mx.quantize(rng.normal(size=(rows, length)).astype(jnp.bfloat16))
        arguments = {"rows": np.arange(rows, dtype=np.int32)[::-1] * 3 - 96}
        op = partial(requantize, format=variant.formats[0], **options)
    elif isinstance(source, GradientSource):
        gated = jax_mx.Gated(interleaved=source.interleaved, gradient=dy)
        arguments = {"activation": WithSums(gated) if source.sums else gated}
    else:
        gated = jax_mx.Gated(weights=weights, interleaved=source.interleaved)
        arguments = {"activation": gated.of("quantize", x, floats=True) if source.floats else gated}
    with jax.default_device(jax.devices("cpu")[0]):
        want = jax.jit(lambda x, arguments: op(x, implementation="xla", **arguments))(x, arguments)
    got = jax.jit(lambda x, arguments: op(x, implementation="cutedsl", **arguments))(x, arguments)
    assert_same(got, want, variant.name, layout, shape)


def run_norm(variant, layout: str, shape: tuple[int, ...]) -> None:
    """Rows that are normed, with weights."""
    shape = math.prod(shape[:-1]), shape[-1]
    x = random_bits(shape, variant.dtype, seed=1)
    x = np.where(np.isfinite(x.astype(np.float32)), x, 1).astype(x.dtype)
    weight = np.random.default_rng(0).normal(size=shape[1]).astype(np.float32)
    options = {} if variant.form.is_both or not variant.form.transposed else {"axis": -2}
    options |= {"both": variant.form.is_both, "scale_layout": layout, "factors": True}
    options["floats"] = variant.source.floats
    if "axis" in options:
        options["transpose"] = True
    norm = partial(jax_mx.rms_norm, format=variant.formats[0], **options)
    if variant.source.added:
        norm = partial(norm, residual=x[::-1].copy())
    with jax.default_device(jax.devices("cpu")[0]):
        want = jax.jit(partial(norm, implementation="xla"))(x, weight)
    got = jax.jit(partial(norm, implementation="cutedsl"))(x, weight)
    assert_same(got, want, variant.name, layout, shape)


def run_product(product) -> None:
    """Several tiles, groups that are empty or end within a tile, all tails."""
    groups, n, k = 3, 264, 1120
    windows = BLOCK if product.window == ROW else product.window
    rng = np.random.default_rng(0)

    def codes(*shape):
        scales = np.full((*shape[:-1], shape[-1] // BLOCK), 127, np.uint8)
        (format,) = {*product.formats}
        values = rng.integers(-2, 3, shape).astype(format.storage)
        if format == MXFP4_E2M1:
            values = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), np.uint8)
        return jax_mx.MXArray(values, scales.view(SCALE_DTYPE), format, -1, ROW_MAJOR)

    with jax.default_device(jax.devices("cpu")[0]):
        options = {"window": product.window, "tiles": product.tiles, "free": product.free}
        options |= {"narrow": product.narrow} if product.op == "matmul" else {}
        op = partial(by_kernel, dtype=jnp.bfloat16, sums=product.op.startswith("wgrad"), **options)
        if product.op == "amaxes":
            source = MADE.get(product.source, X)
            shapes = [(320, 576), (320,), (320, 288)] if source else [(2, 320, 264)]
            dtypes = [product.floats or "bfloat16", "float32", "bfloat16"]
            arrays = zip(shapes, dtypes, source.operands, strict=False)
            args = tuple(random_bits(shape, dtype) for shape, dtype, _ in arrays)
            op = partial(amaxes, source=source)
        elif product.op == "wgrad":
            x, dy = (rng.integers(-2, 3, (300, m)).astype(product.floats) for m in (136, n))
            args = x, dy, np.array([140, 0, 150], np.int32)
        elif product.op == "wgrad_fp8":
            args = codes(140, k), codes(n, k), np.array([2 * windows, 0, windows], np.int32)
        elif product.op == "attention":
            rows = 3 * product.rows
            args = to_attend(rng, 12, (rows, 300, 4, 128), rng.integers(0, 300, rows), True)
            op = partial(step_by_kernel, product=product, scale=0.5)
        elif product.op in ("normed", "rms_norm") or product.activation:
            wide = 5376  # of which so many rows fill shared memory
            x = rng.integers(-2, 3, (max(product.rows - 1, 1), wide)).astype(jnp.bfloat16)
            norm = [] if product.op == "matmul" else [4 - x, np.ones(wide, jnp.bfloat16)]
            args = (x, *norm, *(codes(n, wide) for _ in product.formats))
            op = partial(step_by_kernel, product=product)
        elif product.op == "matmul_fp8":
            args = codes(300, k), codes(groups, n, k), np.array([140, 0, 150], np.int32)
        else:
            x = rng.integers(-2, 3, (product.rows * 2, k)).astype(jnp.bfloat16)
            w = codes(groups, k, 288) if product.free else codes(groups, n, k)
            args = x, w, np.array([product.rows + 3, 0, 9], np.int32)
        want = jax.jit(partial(op, implementation="xla"))(*args)
    got = jax.jit(partial(op, implementation="cutedsl"))(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a).astype(float), np.asarray(b).astype(float)
        np.testing.assert_array_equal(a, b, err_msg=product.name)


if __name__ == "__main__":
    main(*sys.argv[1:])
