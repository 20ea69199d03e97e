"""Sharded like a built-in: every op over meshes and modes, and a table of it, docs/sharding.md.

`python tests/test_sharding.py` writes what is expected; tests hold each cell to it.
"""

import contextlib
import dataclasses
import functools
import math
import re
import zlib
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    COLLECTIVE,
    assert_bits_equal,
    assert_same_array,
    mesh_for,
    mesh_of,
    mesh_shape,
    names_in,
    on_eight,
    on_two,
    only,
    random_bits,
    with_table,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx
from jax_mx.formats.layouts import SCALE_LAYOUTS
from jax_mx.launch import store, targets
from jax_mx.testing import emulate

pytestmark = pytest.mark.optimized

P = PartitionSpec
DOCS = Path(__file__).parent.parent / "docs" / "sharding.md"
SHAPE = {"e": 4, "m": 1024, "k": 512}  # experts, rows, columns
SQUARE = {"block": (32, 32)}
SIGNS = [*np.resize([1, 1, -1, 1, -1], 64)]


# ---- what is called, on which meshes, in which modes ---
@dataclasses.dataclass(frozen=True)
class Op:
    """A call on an array (e, m, k), or on the result of `operand`, and the axes of its arrays.

    Axes are written like "emk"; operands have axes of values and of scales.
    """

    call: Callable
    results: tuple[str, ...]  # with row-major scales
    tiled: tuple[str, ...] = ()  # in tiles: the axes of rows and columns; none: no such scales
    operand: Callable | None = None
    operands: tuple[str, ...] = ("emk",)
    operands_tiled: tuple[str, ...] = ()

    def axes(self, layout: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of the axes of operands and of results."""
        if layout == "row_major":
            return self.operands, self.results
        return self.operands_tiled or self.operands, self.tiled


def quantize(**options):
    return lambda x, layout: jax_mx.quantize(x, scale_layout=layout, **options)


def both(turn: bool):
    return lambda x, layout: jax_mx.quantize_both(x, scale_layout=layout, transpose=(False, turn))


def dequantize(**options):
    return lambda q, layout: q.dequantize(**options)


def step(x, layout):
    """fake_quantize and its derivative."""
    y, back = jax.vjp(
        lambda x: jax_mx.fake_quantize(x, "mxfp4_e2m1", scaling="floor", clip=True), x
    )
    return y, back(x)


OPS = {
    "quantize": Op(quantize(), ("emk",) * 2, ("emk",) * 2),
    "quantize, axis -2": Op(quantize(axis=-2), ("emk",) * 2, ("emk", "ekm")),
    "quantize, axis -2, transpose": Op(quantize(axis=-2, transpose=True), ("ekm", ) * 2, ("ekm",
        ) * 2),
    "quantize, axis -3": Op(lambda x, layout: quantize(axis=0)(jnp.swapaxes(x, 0, 1), layout),
        ("mek", ) * 2, ("mek", "ekm")),
    "quantize to MXFP4": Op(quantize(format="mxfp4_e2m1"), ("emk",) * 2, ("emk",) * 2),
    "quantize to MXFP4, Hadamard 64, shuffled values": Op(lambda x, layout: jax_mx.quantize(x,
        "mxfp4_e2m1", value_layout="shuffled_16x16", hadamard=jax_mx.Hadamard(64, SIGNS)), ("emk",
        ) * 2),
    "quantize_both to MXFP4, shuffled values": Op(lambda x, layout: jax_mx.quantize_both(x,
        "mxfp4_e2m1", scale_layout=layout, value_layouts=("shuffled_16x16", ) * 2), ("emk", "emk",
        "ekm", "ekm"), ("emk", "emk", "ekm", "ekm")),
    "quantize_both": Op(both(False), ("emk",) * 4, ("emk", "emk", "emk", "ekm")),
    "quantize_both, transpose": Op(both(True), ("emk", "emk", "ekm", "ekm"), ("emk", "emk", "ekm",
        "ekm")),
    "quantize, square": Op(lambda x, layout: jax_mx.quantize(x, **SQUARE), ("emk",) * 2),
    "quantize, square, transpose": Op(lambda x, layout: jax_mx.quantize(x, transpose=True,
        **SQUARE), ("ekm", ) * 2),
    "expand": Op(lambda q, layout: (q.expand(-1, layout), q.expand(-2, layout)), ("emk", ) * 4,
        ("emk", "emk", "emk", "ekm"), lambda x, layout: jax_mx.quantize(x, **SQUARE), ("emk",
        "emk")),
    "dequantize": Op(dequantize(), ("emk",), ("emk",), quantize(), ("emk",) * 2, ("emk",) * 2),
    "dequantize, transpose": Op(dequantize(transpose=True), ("ekm", ), ("ekm", ), quantize(),
        ("emk", ) * 2, ("emk", ) * 2),
    "dequantize, axis -2": Op(dequantize(), ("emk", ), ("emk", ), quantize(axis=-2), ("emk", ) * 2,
        ("emk", "ekm")),
    "fake_quantize and its gradient": Op(step, ("emk",) * 2),
}  # fmt: skip
FEW = (
    "quantize",
    "quantize, axis -2, transpose",
    "quantize_both to MXFP4, shuffled values",
    "quantize_both, transpose",
    "dequantize",
)
ROWS = [
    (name, layout)
    for layout in SCALE_LAYOUTS
    for name, op in OPS.items()
    if layout == "row_major" or (op.tiled if layout == "blocked_128x4" else name in FEW)
]

# The mesh axes that e, m and k are split over.
SPECS = {
    "nothing": P(None, None, None),
    "e over 2, m over 4: experts, data": P("expert", "data", None),
    "m over 8: FSDP": P(None, "data", None),
    "k over 8": P(None, None, "tensor"),
    "m over 2, k over 4: data, tensor": P(None, "data", "tensor"),
    "k over 2, m over 4: tensor, data": P(None, "tensor", "data"),
    "m over 8, two axes": P(None, ("data", "tensor"), None),
    "e, m, k over 2 each: experts, data, tensor": P("expert", "data", "tensor"),
    "e over 4, k over 2": P(("expert", "data"), None, "tensor"),
}
MODES = ("auto", "explicit", "shard_map", "shard_map, others auto", "shard_map, others explicit")


def arranged(spec: PartitionSpec, axes: str) -> PartitionSpec:
    """The spec of (e, m, k) for an array of other axes."""
    return P(*(spec["emk".index(axis)] for axis in axes))


def fitting(spec: PartitionSpec, shape, mesh) -> PartitionSpec:
    """The spec without what does not divide the shape."""
    shards = (math.prod(mesh.shape[n] for n in names_in(entry)) for entry in spec)
    pairs = zip(spec, shape, shards, strict=False)
    return P(*(None if length % n else entry for entry, length, n in pairs))


def stays(layout: str, spec: PartitionSpec, shape) -> bool:
    """Whether shards hold whole tiles, on a mesh of that shape."""
    unit = SCALE_LAYOUTS[layout].pad[0]  # of rows; of columns, times 32, it is as much
    assert unit == 32 * SCALE_LAYOUTS[layout].pad[1] or layout == "row_major"
    shards = [math.prod(shape[n] for n in names_in(entry)) for entry in spec]
    return layout == "row_major" or all(
        SHAPE[axis] % (n * unit) == 0 for axis, n in zip("mk", shards[1:], strict=True)
    )


# ---- cells ---
@functools.cache
def floats() -> np.ndarray:
    return random_bits(tuple(SHAPE.values()), jnp.bfloat16)


@functools.cache
def unsharded(name: str, layout: str):
    """(operand, results), on one device, by the reference."""
    op = OPS[name]
    with targets.emulation(None), jax.default_device(jax.devices("cpu")[0]):
        x = jnp.asarray(floats())
        if op.operand is not None:
            x = jax.jit(op.operand, static_argnums=1)(x, layout)
        return x, jax.tree.leaves(jax.jit(op.call, static_argnums=1)(x, layout))


def program(name: str, layout: str, mode: str, spec, devices):
    """(the mesh, the jitted call, its operand as sharded)."""
    op, (operand, _) = OPS[name], unsharded(name, layout)
    axis_type = AxisType.Explicit if "explicit" in mode else AxisType.Auto
    mesh = mesh_for(spec, devices, axis_type)
    before, after = op.axes(layout)

    def call(x):
        return jax.tree.leaves(op.call(x, layout))

    if mode.startswith("shard_map"):
        names = set(mesh.axis_names) if mode == "shard_map" else {mesh.axis_names[0]}
        leaves, treedef = jax.tree.flatten(operand)
        ins = [only(arranged(spec, axes), names) for axes in before]
        assert len(ins) == len(leaves)
        call = jax.shard_map(
            call,
            mesh=mesh,
            in_specs=(jax.tree.unflatten(treedef, ins),),
            out_specs=[only(arranged(spec, axes), names) for axes in after],
            axis_names=names,
        )
    leaves, treedef = jax.tree.flatten(operand)
    placed = []
    for leaf, axes in zip(leaves, before, strict=True):
        sharding = NamedSharding(mesh, fitting(arranged(spec, axes), leaf.shape, mesh))
        placed.append(jax.device_put(np.asarray(leaf), sharding))
    return mesh, jax.jit(call), jax.tree.unflatten(treedef, placed)


def largest(text: str) -> int:
    """How many elements the largest array of a compiled program has."""
    shapes = re.findall(r"\b[a-z]+[0-9]+[a-z0-9]*\[([0-9,]+)\]", text)
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


def check(name: str, layout: str, mode: str, spec, devices) -> None:
    """A cell: the unsharded bits; and where the table says so, nothing moved."""
    mesh, call, operand = program(name, layout, mode, spec, devices)
    with jax.set_mesh(mesh):
        compiled = call.lower(operand).compile()
        got = compiled(operand)
    whole = stays(layout, spec, mesh.shape)
    for i, (g, want) in enumerate(zip(got, unsharded(name, layout)[1], strict=True)):
        # Where JAX moves bfloat16 on CPU, see `table`, it does so as float32, and NaN has no bits.
        if g.dtype == jnp.bfloat16 and (mode == "shard_map, others explicit" or not whole):
            g, want = (jnp.where(jnp.isnan(a), jnp.nan, np.asarray(a)) for a in (g, want))
        assert_bits_equal(g, want, f"result {i}")
    if not whole:
        return
    text = compiled.as_text()
    collectives = [line for line in text.splitlines() if COLLECTIVE.search(line)]
    if mode == "shard_map, others explicit":  # JAX's own, see `table`
        assert all('op_name="jit(call)/shard_map"' in line for line in collectives), text
        return
    assert not collectives, text
    shards = math.prod(mesh.shape[n] for entry in spec for n in names_in(entry))
    assert largest(text) <= math.prod(SHAPE.values()) // shards, text
    for g, axes in zip(got, OPS[name].axes(layout)[1], strict=True):
        assert g.sharding.is_equivalent_to(NamedSharding(mesh, arranged(spec, axes)), g.ndim)
    # The call itself and tiles of scales turn an array of axis -3 (`OPS`, `quantize`). XLA puts
    # the output of NVIDIA's kernels into tiles of values.
    moves = name == "quantize, axis -3" or "shuffled values" in name
    if devices[0].platform != "cpu" and store.TARGET in text and not moves:
        assert not re.findall(r"= \S+ (?:copy|transpose)\(", text), text


# The reference computes on simulated devices, or AMD's kernels emulated there, or GPUs.
COMPUTERS = ("reference", "gfx950", pytest.param("gpu", marks=pytest.mark.gpu))


def lowered_to(computer: str):
    """The context for it."""
    return contextlib.nullcontext() if computer in ("reference", "gpu") else emulate(computer)


@pytest.fixture
def devices(request):
    """Eight CPU devices, or all GPUs if there are several; ops are lowered to what computes."""
    all_devices = jax.devices("gpu" if request.param == "gpu" else "cpu")
    if len(all_devices) < 2:
        pytest.skip("one GPU")
    with lowered_to(request.param):
        yield all_devices[: 1 << (len(all_devices).bit_length() - 1)]


def modes_of(layout: str, spec) -> list[str]:
    """All, but for shard_map where shards hold parts of tiles: it makes tiles of each shard."""
    whole = stays(layout, spec, mesh_shape(spec, 8))
    return [mode for mode in MODES if whole or "shard_map" not in mode]


# Every op on every spec, in modes that take turns; and some ops in all modes.
EVERYWHERE = (("quantize", "row_major"), ("quantize_both, transpose", "blocked_128x4"))


def cells():
    """On each computer; by default one in 25 of the reference's, one in 400 of the emulator's."""
    for i, (name, layout) in enumerate(ROWS):
        for j, (title, spec) in enumerate(SPECS.items()):
            modes = modes_of(layout, spec)
            for mode in modes if (name, layout) in EVERYWHERE else [modes[(i + j) % len(modes)]]:
                label = f"{name}-{layout}-{mode}-{title}"
                cell = (name, layout, mode, spec)
                rest = [pytest.mark.thorough] if zlib.crc32(label.encode()) % 25 else []
                yield pytest.param("reference", *cell, id=f"reference-{label}", marks=rest)
                yield pytest.param("gpu", *cell, id=f"gpu-{label}", marks=pytest.mark.gpu)
                # From the seventh spec on: of one that splits nothing, every device emulates all.
                rest = [pytest.mark.thorough] if (i + j - 7) % 400 else []
                yield pytest.param("gfx950", *cell, id=f"gfx950-{label}", marks=rest)


@pytest.mark.parametrize("devices,name,layout,mode,spec", [*cells()], indirect=["devices"])
def test_sharded_as_the_table_says(devices, name, layout, mode, spec):
    check(name, layout, mode, spec, devices)


# ---- what the table does not say ---
@pytest.mark.parametrize(
    "layout", ["row_major", pytest.param("blocked_128x4", marks=pytest.mark.thorough)]
)
def test_the_partitioner_splits_calls(layout):
    """The custom call itself, compiled for CPU devices, not run: at tiles, and never within."""
    on_eight(
        r"""
        from helpers import COLLECTIVE, EVERY, op_of, stand_ins_on_cpu

        stand_ins_on_cpu()
        mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
        layout = sys.argv[2]

        def lines_of(variant, rows, spec, whole):
            operand, call = op_of(variant, scale_layout=layout)
            x = jax.ShapeDtypeStruct((2, rows, 512), variant.dtype)
            placed = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
            f = jax.jit(lambda x: call(jax.lax.optimization_barrier(operand(x))))
            text = f.lower(placed).compile().as_text()
            lines = [t for t in text.splitlines() if 'target="jax_mx_launch"' in t]
            assert len(lines) == 1 + (variant.op == "dequantize")
            assert whole != bool(COLLECTIVE.search(text)), (variant, text)
            for line in lines:
                results = re.sub(r"\{[^}]*\}", "", line.partition(" custom-call(")[0])
                for shape in re.findall(r"\[([0-9,]+)\]", results):
                    yield tuple(map(int, shape.split(",")))

        for variant in EVERY:
            form = str(variant.form).partition("_")[0]
            if layout == "row_major":
                for shape in lines_of(variant, 1024, P(None, "b", "a"), True):
                    sides = [8, 256 if form in ("last", "second") else 8]
                    assert shape[0] == 2 and sorted(shape[1:3]) == sides, (variant, shape)
            elif not variant.form.is_square:  # 1024 x 512 over 4 x 2, and half a tile each
                for rows, spec, whole in ((1024, P(None, "b", "a"), 1), (256, P(None, "b"), 0)):
                    for shape in lines_of(variant, rows, spec, whole):
                        assert shape[:3] == (2, 2, 2) or not whole, (variant, shape)
                        assert shape[3:5] in ((128, 4), (4, 128), (4, 4), (1, 1)), shape
        """,
        layout,
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["row_major", "blocked_128x4"])
@pytest.mark.parametrize(
    "shape,spec",
    [
        ((64, 96), P(None, "a")),  # 3 blocks over 4
        ((64, 64), P(None, "a")),  # half a block each
        ((10, 64), P("a")),  # rows over 4, uneven
        ((384, 128), P("a")),  # 3 tiles over 4
        ((130, 160), P("a", None)),
    ],
)
def test_shards_that_split_blocks_and_uneven_ones_are_right(shape, spec, layout):
    mesh = mesh_of(4)
    x = random_bits(shape, np.float32)

    def call(x):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
        q = jax_mx.quantize(x, scale_layout=layout)
        return q, q.dequantize(jnp.float32)

    want = jax_mx.quantize(x, scale_layout=layout)
    q, y = jax.jit(call)(x)
    assert_same_array(q, want)
    assert_bits_equal(y, want.dequantize(jnp.float32))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", ["row_major", "blocked_128x4"])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_transformations_of_sharded_arrays(axis_type, layout):
    """vmap over any axis, nested and sharded; scan, map, while, cond: bits, and no collective."""
    mesh = mesh_of(2, 4, axis_type=axis_type)
    x = jnp.asarray(random_bits((4, 2, 512, 128), jnp.bfloat16))

    def one(x):
        return jax_mx.quantize(x, scale_layout=layout)

    def looped(x):
        def body(state):
            i, q = state
            return i + 1, jax.lax.cond(i > 1, one, lambda x: q, x[0])

        return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, one(x[0])))[1]

    def scanned(x):
        return jax.lax.scan(lambda c, x: (c, one(x)), 0, x)[1]

    def same(q):
        return q

    calls = {
        "leading": (jax.vmap(one), same),
        "nested": (jax.vmap(jax.vmap(one)), same),
        "second": (jax.vmap(one, in_axes=1, out_axes=1), same),
        "the other way": (
            jax.vmap(jax.vmap(one), in_axes=1),
            lambda q: jax.tree.map(lambda a: a.swapaxes(0, 1), q),
        ),
        "scan": (scanned, same),
        "map": (lambda x: jax.lax.map(one, x), same),
        "while": (looped, lambda q: jax.tree.map(lambda a: a[0], q)),
    }
    whole = one(x)
    for name, (call, expect) in calls.items():
        spec = P(None, "a", "b") if name in ("scan", "map", "while") else P("a", None, "b")
        with jax.set_mesh(mesh):
            sharded = jax.device_put(x, NamedSharding(mesh, spec))
            compiled = jax.jit(call).lower(sharded).compile()
            got = compiled(sharded)
        newer = jax.__version_info__ > (0, 10, 0)
        if axis_type == AxisType.Auto or newer:  # there vmap itself moves it
            assert not COLLECTIVE.search(compiled.as_text()), name
        assert_same_array(got, expect(whole), name)


def test_the_persistent_cache_hits_in_other_processes(tmp_path):
    """Sharded programs, the reference's and one with the custom call, which nobody runs here."""
    code = """
        from helpers import cached_in, stand_ins_on_cpu

        events = cached_in(sys.argv[2])
        mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
        x = jax.ShapeDtypeStruct((256, 512), "bfloat16", sharding=NamedSharding(mesh, P("a", "b")))

        def compiled(layout):
            jax.jit(lambda x: jax_mx.quantize(x, scale_layout=layout)).lower(x).compile()

        compiled("row_major")
        stand_ins_on_cpu()
        compiled("blocked_128x4")
        print(*(sum(what in event for event in events) for what in ("cache_hits", "cache_misses")))
    """
    counts = [on_eight(code, str(tmp_path))[0].split() for _ in range(3)]
    assert counts == [["0", "2"], ["2", "0"], ["2", "0"]]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("where", COMPUTERS)
def test_two_processes(where):
    """jax.distributed, four CPU devices or one GPU each: every shard is right, nothing moves."""
    code = """
        from helpers import COLLECTIVE, assert_bits_equal, random_bits
        from test_sharding import lowered_to

        where = sys.argv[3]
        local = 1 if where == "gpu" else 4
        assert jax.device_count() == 2 * local and jax.local_device_count() == local
        mesh = jax.make_mesh((2, local), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
        whole = random_bits((2, 512, 512), "bfloat16")
        turned = [P(None, "a", "b"), P(None, "b", "a")]
        for layout, specs in (("row_major", [P("a", "b")]), ("blocked_128x4", turned)):
            def call(x):
                q, r = jax_mx.quantize_both(x, scale_layout=layout)
                return q, r, q.dequantize(), jax_mx.fake_quantize(x)
            with jax.default_device(jax.local_devices()[0]):
                want = jax.tree.leaves(jax.jit(call)(jnp.asarray(whole)))
            for spec in specs:
                sharding = NamedSharding(mesh, spec)
                x = jax.make_array_from_callback(whole.shape, sharding, lambda at: whole[at])
                with lowered_to(where):
                    compiled = jax.jit(call).lower(x).compile()
                assert ("jax_mx_launch" in compiled.as_text()) == (where != "reference")
                assert not COLLECTIVE.search(compiled.as_text())
                for g, w in zip(jax.tree.leaves(compiled(x)), want, strict=True):
                    for shard in g.addressable_shards:
                        assert_bits_equal(shard.data, np.asarray(w)[shard.index])
    """
    if where == "gpu" and len(jax.devices("gpu")) < 2:
        pytest.skip("one GPU")
    on_two(code, where, platform="gpu" if where == "gpu" else "cpu")


# ---- the table ---
def table() -> list[str]:
    """The part of docs/sharding.md on what quantizes and what dequantizes."""
    shape = " x ".join(map(str, SHAPE.values()))
    lines = [
        f"For (e, m, k), {shape}, on eight devices: which calls leave an array and their results",
        "where they lie (yes), and which gather first, as shards do not hold whole tiles of scales",
        "(no; the bytes are right). *Yes* means, of the compiled program: no collective, no array",
        "larger than a shard, results that keep the spec; for values and scales alike.",
        "",
        f"Modes of the mesh: {'; '.join(MODES)}",
        "(with check_vma). The column is what each axis is split over; blocks run along k, or",
        "along m (axis -2; axis -3 of m, e, k), or both. Where a shard_map leaves other axes to",
        "explicit sharding, JAX gathers at its boundary, of x + 1 too; there *yes* means no other",
        "collective. Every call of every cell is a test, in one of the modes.",
        "",
        "Call a shard_map under jit: eagerly, JAX compiles a program for each op and each array",
        "that goes in or comes out, at every call; for an op of jax_mx no more than for its own.",
        "",
        "| scales | calls | " + " | ".join(SPECS) + " |",
        "|---|---|" + "---|" * len(SPECS),
    ]
    for layout in SCALE_LAYOUTS:
        calls = "; ".join(name for name, of in ROWS if of == layout)
        splits = [stays(layout, spec, mesh_shape(spec, 8)) for spec in SPECS.values()]
        marks = ["yes" if whole else "no" for whole in splits]
        lines.append(f"| {layout} | {calls} | {' | '.join(marks)} |")
    return lines


def test_the_table_is_current():
    text = DOCS.read_text()
    assert text == with_table(text, "ops", table()), "run python tests/test_sharding.py"


if __name__ == "__main__":
    DOCS.write_text(with_table(DOCS.read_text(), "ops", table()))
