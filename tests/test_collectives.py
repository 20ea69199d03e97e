"""Collectives of MXArrays and gathered weights: the bytes of floats moved before, and what moves.

`python tests/test_collectives.py` writes the table that tests hold each cell to.
"""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_bits_equal,
    assert_refused,
    assert_same_array,
    collectives,
    mesh_of,
    on_two,
    random_bits,
    step,
    with_table,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx
from jax_mx import BF16, MXFP4, MXFP8, Recipe

P = PartitionSpec
ROWS = P("a")
DOCS = Path(__file__).parent.parent / "docs" / "sharding.md"
FORMATS = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1")


# On simulated devices, and on two GPUs.
ON_TWO = (pytest.mark.gpu, pytest.mark.skipif(len(jax.devices()) < 2, reason="wants two GPUs"))
PLATFORMS = ("cpu", pytest.param("gpu", marks=ON_TWO))


def in_shards(call, n, specs=ROWS, out=ROWS, platform="cpu"):
    mesh = mesh_of(n, devices=jax.devices(platform))
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=out))


# ---- the bytes of floats that were moved before they are quantized ---
MOVES = {
    "gather": (jax_mx.all_gather, jax.lax.all_gather, {"axis": 0, "tiled": True}),
    "gather rows": (jax_mx.all_gather, jax.lax.all_gather, {"axis": 1, "tiled": True}),
    "gather columns": (jax_mx.all_gather, jax.lax.all_gather, {"axis": -1, "tiled": True}),
    "gather beside": (jax_mx.all_gather, jax.lax.all_gather, {}),
    "gather inside": (jax_mx.all_gather, jax.lax.all_gather, {"axis": 2}),
    "exchange": (jax_mx.all_to_all, jax.lax.all_to_all,
        {"split_axis": 1, "concat_axis": 1, "tiled": True}),
    "rows to columns": (jax_mx.all_to_all, jax.lax.all_to_all,
        {"split_axis": 1, "concat_axis": 2, "tiled": True}),
    "columns to slabs": (jax_mx.all_to_all, jax.lax.all_to_all,
        {"split_axis": 2, "concat_axis": 0, "tiled": True}),
    "permute": (jax_mx.ppermute, jax.lax.ppermute, {}),
}  # fmt: skip
OPTIONS = {
    "": {},
    "rows": {"axis": -2},
    "transposed": {"axis": -2, "transpose": True},
    "square": {"block": (32, 32)},
    "blocked": {"scale_layout": "blocked_128x4"},
    "shuffled": {"scale_layout": "shuffled_32x8", "value_layout": "shuffled_16x16"},
    "blocked rows": {"scale_layout": "blocked_128x4", "axis": -2},
    "window": {"window": 128},
    "tiles": {"window": (128, 128)},
}


def unit_of(options: dict) -> int:
    """The number of elements that each part of an array holds whole."""
    units = {"blocked_128x4": 128, "shuffled_32x8": 256}
    return 128 if "window" in options else units.get(options.get("scale_layout"), 32)


def moves_of(move: str, n: int) -> tuple:
    """A move among n shards, of MX arrays, and of bfloat16 by bits: a CPU moves it as float32."""
    mx, floats, arguments = MOVES[move]
    if move == "permute":
        arguments = {"perm": [(i, (i + 1) % n) for i in range(n)]}

    def moved(x):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint16)
        y = floats(bits, "a", **arguments)
        return jax.lax.bitcast_convert_type(y, jnp.bfloat16)

    return functools.partial(mx, axis_name="a", **arguments), moved


def check_bytes(move: str, n: int, format: str, options: dict, platform: str = "cpu") -> None:
    """A move of what is quantized gives what is quantized after the same move."""
    mx, floats = moves_of(move, n)
    turned = options.get("transpose", False)  # q has the axes of x.swapaxes(-1, -2)
    expected = {k: v for k, v in options.items() if k != "transpose"}
    side = n * unit_of(options)
    x = jnp.asarray(random_bits((n, side, side), jnp.bfloat16))

    def first(x):
        return mx(jax_mx.quantize(x, format, **options))

    def after(x):
        return floats(jnp.swapaxes(x, -1, -2) if turned else x)

    moved = in_shards(after, n, platform=platform)(x)
    program = in_shards(first, n, platform=platform)
    got = program(x)
    assert_same_array(got, jax_mx.quantize(moved, format, **expected | {"axis": got.axis}))
    types = {dtype for _, dtype, _ in collectives(program.lower(x).compile().as_text())}
    assert types <= {"u8"} and (n == 1 or types)


def byte_cases():
    for i, options in enumerate(OPTIONS):
        for j, move in enumerate(MOVES):
            for n in (1, 2, 8) if (i + j) % 3 == 0 else (1, 2):
                few = (i + j) % 8 == 0 and n == 2
                marks = [] if few else [pytest.mark.thorough]
                format = "mxfp8_e4m3" if "window" in options or options == "tiles" else None
                format = format or FORMATS[(i + j) % len(FORMATS)]
                yield pytest.param(
                    move, n, format, options, marks=marks, id=f"{move}-{options}-{n}"
                )


def fits(move: str, options: str) -> bool:
    """Whether the move leaves tiles, square blocks and windows as they lie."""
    matrices = options in ("square", "tiles", "blocked", "shuffled", "blocked rows")
    return not (move == "gather inside" and matrices)


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize(("move", "n", "format", "options"), [*byte_cases()])
def test_moved_bytes_are_those_of_moved_floats(move, n, format, options):
    if not fits(move, options):
        with pytest.raises(ValueError, match=r"which (tiles|square blocks) span"):
            check_bytes(move, n, format, OPTIONS[options])
        return
    check_bytes(move, n, format, OPTIONS[options])


def cases_on_two_gpus():
    for i, move in enumerate(MOVES):
        for j, options in enumerate(("", "transposed", "square", "blocked rows", "tiles")):
            format = "mxfp8_e4m3" if options == "tiles" else FORMATS[(i + j) % len(FORMATS)]
            if fits(move, options):
                yield pytest.param(move, format, options, id=f"{move}-{options}")


@pytest.mark.gpu
@ON_TWO[1]
@pytest.mark.parametrize(("move", "format", "options"), [*cases_on_two_gpus()])
def test_moved_bytes_on_two_gpus(move, format, options):
    check_bytes(move, 2, format, OPTIONS[options], "gpu")


@pytest.mark.gpu
@ON_TWO[1]
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("before", [ROWS, P(None, "a"), P()], ids=str)
def test_resharded_bytes_on_two_gpus(axis_type, before):
    mesh = mesh_of(2, axis_type=axis_type, devices=jax.devices("gpu"))
    x = jnp.asarray(random_bits((256, 512), jnp.bfloat16))
    want = jax_mx.quantize(x)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(np.asarray(x), NamedSharding(mesh, before))
        for after in (ROWS, P(None, "a"), P()):
            got = jax.jit(lambda x, to=after: jax_mx.reshard(jax_mx.quantize(x), to))(sharded)
            assert got.values.sharding.is_equivalent_to(NamedSharding(mesh, after), 2)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                assert_bits_equal(a, b)


@pytest.mark.parametrize("move", ["exchange", "rows to columns", "columns to slabs"])
def test_nothing_is_exchanged(move):
    exchange = lambda x: jax_mx.all_to_all(jax_mx.quantize(x), "a", **MOVES[move][2])  # noqa: E731
    x = jnp.ones((4, 64, 64))
    q = in_shards(exchange, 2)(x[:, :0] if move == "columns to slabs" else x[:0])
    assert q.values.size == q.scales.size == 0


def test_nothing_is_gathered():
    gather = lambda x: jax_mx.all_gather(jax_mx.quantize(x), "a", axis=1, tiled=True)  # noqa: E731
    q = in_shards(gather, 2, P(None, "a"))(jnp.ones((0, 64, 64)))
    assert q.shape == (0, 64, 64)


def test_windows_that_do_not_stay_whole_are_given_up():
    """Codes stay; the array no longer says that scales agree over more than a block."""
    x = jnp.asarray(random_bits((64, 192), jnp.bfloat16))  # a window and a half in each shard
    for window, want in ((128, 32), ("row", 32)):
        q = in_shards(
            lambda x, w=window: jax_mx.all_gather(
                jax_mx.quantize(x, window=w), "a", axis=1, tiled=True
            ),
            2,
        )(x)
        assert q.window == want
    q = in_shards(lambda x: jax_mx.all_gather(jax_mx.quantize(x, window="row"), "a"), 2)(x)
    assert q.window == "row"


def q_of(shape=(64, 128), **options):
    return jax_mx.quantize(jnp.ones(shape, jnp.bfloat16), **options)


BLOCKED = {"scale_layout": "blocked_128x4"}
REFUSED = {
    "floats": (lambda: jax_mx.all_gather(jnp.ones((64, 64)), "a"), TypeError, "jax.lax.all_gather"),
    "permuted floats": (lambda: jax_mx.ppermute(jnp.ones((64, 64)), "a", [(0, 1)]), TypeError,
        "jax.lax.ppermute moves other arrays"),
    "axis": (lambda: jax_mx.all_gather(q_of(), "a", axis=3), ValueError, "axis 3 is out of range"),
    "inside of tiles": (lambda: jax_mx.all_gather(q_of(**BLOCKED), "a", axis=0, tiled=True),
        ValueError,
        "parts of 64 elements are joined, inside of a tile of 'blocked_128x4', which holds 128"),
    "inside of blocks": (lambda: jax_mx.all_to_all(q_of((64, 96)), "a", 1, 0, tiled=True),
        ValueError, "parts of 48 elements are cut off, inside of a block, which holds 32"),
    "parts": (lambda: jax_mx.all_to_all(q_of((65, 64)), "a", 0, 0, tiled=True), ValueError,
        "length 65, which 2 shards want to be a multiple of it"),
    "one a shard": (lambda: jax_mx.all_to_all(q_of((64, 64)), "a", 0, 0), ValueError,
        "length 64, which 2 shards want to be just it, or pass tiled=True"),
    "new axis": (lambda: jax_mx.all_gather(q_of(**BLOCKED), "a", axis=1), ValueError,
        "which tiles span; put it in front of them"),
    "reshard in shard_map": (lambda: jax_mx.reshard(q_of(), P("a")), ValueError,
        "move them with all_gather, all_to_all or ppermute"),
    "recipe": (lambda: jax_mx.gather_weight(jnp.ones((64, 64)), P("a"), "mx"), ValueError, "mx"),
    "no floats": (lambda: jax_mx.gather_weight(jnp.ones((64, 64), int), P("a")), TypeError,
        "gather_weight: w is"),
    "no spec": (lambda: jax_mx.gather_weight(jnp.ones((64, 64)), "a"), TypeError,
        "spec must be a PartitionSpec"),
    "long spec": (lambda: jax_mx.gather_weight(jnp.ones((64, 64)), P("a", None, None)), ValueError,
        "has 3 entries, the array 2 axes"),
    "no such axis": (lambda: jax_mx.gather_weight(jnp.ones((64, 64)), P("b")), ValueError,
        "names b; the mesh has a"),
    "cut blocks": (lambda: jax_mx.gather_weight(jnp.ones((48, 64)), P("a")), ValueError,
        "a part has 48 elements along dimension 0, which 32 does not divide"),
    "cut windows": (lambda: jax_mx.gather_weight(jnp.ones((64, 64)), P("a"),
        Recipe(window=128, weight_window=(128, 128))), ValueError,
        "which 128 does not divide, so that it would cut windows or transforms"),
    "behind another": (lambda: jax_mx.gather_weight(jnp.ones((64, 2, 64)), P(None, None, "a"),
        contracting=0), ValueError,
        "products see it behind dimension 1 as one; split dimension 1 instead"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_shard_map(name):
    call, error, sentence = REFUSED[name]

    def run(_):
        call()
        return jnp.zeros(())

    local = jax.shard_map(run, mesh=mesh_of(2), in_specs=P("a"), out_specs=P())
    assert_refused(lambda: jax.eval_shape(local, jnp.zeros(2)), error, sentence)


def test_refused_under_jit():
    w = jnp.ones((64, 64))
    q = jax_mx.quantize(w)
    assert_refused(lambda: jax_mx.reshard(q, P("a")), ValueError, "set one with jax.set_mesh")
    with jax.set_mesh(mesh_of(4)):
        assert_refused(lambda: jax_mx.reshard(w, P("a")), TypeError, "must be an MXArray")
        assert_refused(
            lambda: jax_mx.reshard(q, P(None, "a")), ValueError, "inside of a block, which holds 32"
        )
        odd = jax_mx.quantize(jnp.ones((3, 64)))
        for spec, sentence in (
            (P("a"), "axis -2 of length 3 would be split over a in 4 shards, which are not equal"),
            (P("a", "a"), "names an axis of the mesh twice"),
            (P(unreduced={"a"}), "asks for sums"),
        ):
            assert_refused(lambda s=spec: jax_mx.reshard(odd, s), ValueError, sentence)
        assert_refused(
            lambda: jax_mx.gather_weight(jnp.ones((64, 66)), P(None, "a")),
            ValueError,
            "4 parts of dimension 1, of length 66, are not equal",
        )
    mesh = mesh_of(2, 2, axis_type=AxisType.Explicit)
    for call in (jax_mx.reshard, jax_mx.gather_weight):
        assert_refused(
            lambda c=call: c(q if c is jax_mx.reshard else w, NamedSharding(mesh, P("a"))),
            ValueError,
            "is of a mesh with explicit axes, which is not set; set it with jax.set_mesh",
        )
    with jax.set_mesh(mesh):
        both = jax.device_put(w, NamedSharding(mesh, P(("a", "b"))))
        assert_refused(
            lambda: jax_mx.gather_weight(both, P("a")),
            ValueError,
            "spec names the last of the axes that split it",
        )


# ---- what moves: the table ---
SHAPE = (4, 512, 1024)  # of what is moved; a weight is (512, 1024)
Moves = dict[str, int]  # elements of the results on a device, by collective and type
WHOLE = 4 * 512 * 1024 * 33 // 32  # codes and scales of the array
WEIGHT = WHOLE // 4
FLOATS = 512 * 1024


def gathered(recipe=MXFP8, spec=ROWS):
    """A product and both gradients, of a weight that is split as spec says."""

    def f(x, w):
        return jax_mx.matmul(x, jax_mx.gather_weight(w, spec, recipe), recipe=recipe)

    return step(f)


def fsdp(w, y=ROWS):
    """Specs of x, w and dy, and of the results."""
    return (P("a"), w, y), (y, P("a"), w)


def moved(q, **arguments):
    return jax_mx.all_to_all(q, "a", tiled=True, **arguments)


def of_weight(codes: int) -> dict[str, Moves]:
    """The moves of a gathered weight and of its gradient."""
    local = {"all-gather u8": codes, "reduce-scatter f32": FLOATS // 2}
    return auto({"all-gather u8": codes, "all-reduce f32": FLOATS}, shard_map=local)


# By name: the call, specs of operands and of results, and what moves, by mode.
def auto(moves: Moves, **others: Moves) -> dict[str, Moves]:
    return {"auto": moves, "explicit": moves, **others}


CELLS: dict[str, tuple] = {
    "reshard, m over 2 to none": (lambda q: jax_mx.reshard(q, P()), (P(None, "a"), ), P(),
        auto({"all-gather u8": WHOLE})),
    "reshard, m over 4 to e over 4": (lambda q: jax_mx.reshard(q, P("b")), (P(None, "b"), ),
        P("b"), auto({"all-to-all u8": WHOLE // 4})),
    "reshard, k over 4 to m over 4": (lambda q: jax_mx.reshard(q, P(None, "b")),
        (P(None, None, "b"), ), P(None, "b"), auto({"all-to-all u8": WHOLE // 4})),
    "reshard, m over 2 x 4 to m over 2": (lambda q: jax_mx.reshard(q, P(None, "a")),
        (P(None, ("a", "b")), ), P(None, "a"), auto({"all-gather u8": WHOLE // 2})),
    "all_gather along m": (lambda q: jax_mx.all_gather(q, "a", axis=1, tiled=True),
        (P(None, "a"), ), P(), {"shard_map": {"all-gather u8": WHOLE}}),
    "all_to_all, m over 2 to e over 2": (lambda q: moved(q, split_axis=0, concat_axis=1),
        (P(None, "a"), ), P("a"), {"shard_map": {"all-to-all u8": WHOLE // 2}}),
    "ppermute, e over 2": (lambda q: jax_mx.ppermute(q, "a", [(0, 1), (1, 0)]), (P("a"), ), P("a"),
        {"shard_map": {"collective-permute u8": WHOLE // 2}}),
    "gather_weight, k over 2": (gathered(), *fsdp(P("a")), of_weight(2 * WEIGHT)),
    "gather_weight, n over 2": (
        gathered(spec=P(None, "a")), *fsdp(P(None, "a")), of_weight(2 * WEIGHT)),
    "gather_weight, square blocks, k over 2": (
        gathered(Recipe(block=(32, 32))), *fsdp(P("a")), of_weight(FLOATS * 1025 // 1024)),
    "gather_weight, MXFP4, k over 2": (
        gathered(MXFP4), *fsdp(P("a")), of_weight(FLOATS * 17 // 16)),
    "gather_weight, k over 2, columns over 4": (
        gathered(), *fsdp(P("a", "b"), P("a", "b")),
        auto({"all-gather u8": 2 * WEIGHT // 4,
              "all-reduce f32": FLOATS // 4 + 128 * 512})),  # of w's gradient, and of x's
}  # fmt: skip


@functools.cache
def operands(name: str):
    """The moved array, or x, w and dy of small integers, so that every sum is exact."""
    if "gather_weight" not in name:
        return (jnp.asarray(random_bits(SHAPE, jnp.bfloat16)),)
    rng, shapes = np.random.default_rng(0), ((256, 512), (512, 1024), (256, 1024))
    return tuple(jnp.asarray(rng.integers(-2, 3, s), jnp.float32) for s in shapes)


@functools.cache
def unmoved(name: str):
    """The results on one device, where nothing moves."""
    arrays = operands(name)
    if len(arrays) == 1:
        return jax_mx.quantize(*arrays)
    recipe = MXFP4 if "MXFP4" in name else Recipe(block=(32, 32)) if "square" in name else MXFP8
    return step(functools.partial(jax_mx.matmul, recipe=recipe))(*arrays)


def check_cell(name: str, mode: str) -> None:
    call, ins, outs, expected = CELLS[name]
    axis_type = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    shape = (2, 4) if '"b"' in repr(ins).replace("'", '"') else (2,)
    mesh = mesh_of(*shape, axis_type=axis_type)
    take = call
    if "gather_weight" not in name:
        take = lambda x: call(jax_mx.quantize(x))  # noqa: E731
    if mode == "shard_map":
        take = jax.shard_map(take, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=outs != P())
    where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), outs, is_leaf=is_spec)
    with jax.set_mesh(mesh):
        pairs = zip(operands(name), ins, strict=True)
        placed = [jax.device_put(np.asarray(x), NamedSharding(mesh, spec)) for x, spec in pairs]
        program = jax.jit(take, out_shardings=where if "gather_weight" in name else None)
        compiled = program.lower(*placed).compile()
        got = compiled(*placed)
    moved: Moves = {}
    for (op, dtype, size), count in collectives(compiled.as_text()).items():
        moved[f"{op} {dtype}"] = moved.get(f"{op} {dtype}", 0) + size * count
    assert moved == expected[mode]
    for a, want in zip(jax.tree.leaves(got), jax.tree.leaves(unmoved(name)), strict=True):
        if name != "ppermute, e over 2":
            assert_bits_equal(a, want)
    if "gather_weight" not in name:
        assert got.values.sharding.is_equivalent_to(NamedSharding(mesh, outs), 3)


def is_spec(x) -> bool:
    return isinstance(x, PartitionSpec)


def cells():
    for i, (name, (*_, expected)) in enumerate(CELLS.items()):
        for j, mode in enumerate(expected):
            marks = [pytest.mark.thorough] if (i + j) % 12 else []
            yield pytest.param(name, mode, id=f"{name}-{mode}", marks=marks)


@pytest.mark.parametrize(("name", "mode"), [*cells()])
def test_what_moves(name, mode):
    check_cell(name, mode)


def table() -> list[str]:
    """The part of docs/sharding.md on collectives."""
    lines = ["| call | auto, explicit | shard_map |", "|---|---|---|"]
    for name, (*_, expected) in CELLS.items():
        cells = []
        for mode in ("auto", "shard_map"):
            moves = expected.get(mode, {}).items()
            cells.append(", ".join(f"{op}: {size:,}" for op, size in moves))
        assert expected.get("auto") == expected.get("explicit")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def test_the_table_is_current():
    text = DOCS.read_text()
    assert text == with_table(text, "moves", table()), "run python tests/test_collectives.py"


# ---- gathered weights ---
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("shape", "spec", "recipe", "dims"),
    [
        ((128, 256), P("a"), MXFP8, {}),
        ((4, 64, 256), P(None, "a"), MXFP8, {"batch": 0}),
        ((4, 64, 256), P("a"), MXFP4, {"batch": 0}),
        ((64, 4, 32), P(None, "a"), Recipe(wgrad="bf16", dgrad="bf16"), {"contracting": 0}),
        ((2, 64, 128), P(None, None, "a"), Recipe(block=(32, 32)), {"contracting": (0, 1)}),
        ((256, 256), P("a"), Recipe(window=128, weight_window=(128, 128)), {}),
        ((64, 40), P("a"), MXFP8, {}),  # columns that 32 does not divide
    ],
    ids=str,
)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_gathered_forms_are_those_of_the_gathered_floats(shape, spec, recipe, dims, platform):
    mesh = mesh_of(2, devices=jax.devices(platform))
    w = jnp.asarray(random_bits(shape, jnp.bfloat16))
    want = jax.jit(functools.partial(recipe.quantize_weight, **dims))(w)

    def gather(w):
        return jax_mx.gather_weight(w, spec, recipe, **dims)

    local = jax.shard_map(gather, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False)
    assert_same_weight(jax.jit(local)(w), want)
    with jax.set_mesh(mesh):
        assert_same_weight(jax.jit(gather)(w), want)


def assert_same_weight(got, want):
    """The weight that `quantize_weight` gives, with forms that say that they were gathered."""
    names = ("contracted_form", "free_form")
    forms = {name: dataclasses.replace(getattr(want, name), gathered=True) for name in names}
    want = dataclasses.replace(want, **forms)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert got.floats.shape == want.floats.shape and got.floats.dtype == want.floats.dtype
    for form in names:
        leaves = (jax.tree.leaves(getattr(weight, form)) for weight in (got, want))
        pairs = zip(*leaves, strict=True)
        for a, b in pairs:
            assert_bits_equal(a, b, form)


def test_a_gathered_weight_of_a_scan_under_remat_trains():
    """Layers' weights, gathered one by one where they are used, forward and again backward."""
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.integers(-1, 2, (2, 64, 64)), jnp.float32)
    x = jnp.asarray(rng.integers(-1, 2, (64, 64)), jnp.float32)

    def loss(ws, x, gather):
        def layer(x, w):
            return jax_mx.matmul(x, gather(w)) / 8, None

        y = jax.lax.scan(jax.checkpoint(layer), x, ws)[0]
        return (y * x).sum()

    want = jax.jit(jax.grad(functools.partial(loss, gather=lambda w: w), (0, 1)))(w, x)

    def local(ws, x):
        gathering = functools.partial(loss, gather=lambda w: jax_mx.gather_weight(w, P("a")))
        return jax.grad(gathering, (0, 1))(ws, x)

    specs = (P(None, "a"), P("a"))
    got = in_shards(local, 2, specs, specs)(w, x)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_second_derivatives_are_refused():
    """In bfloat16, too, where floats move as bits."""

    def loss(w):
        w = jax_mx.gather_weight(w, P("a"), BF16)
        return (jax_mx.matmul(jnp.ones((32, 64)), w, recipe=BF16) ** 2).sum()

    with jax.set_mesh(mesh_of(2)), pytest.raises(NotImplementedError, match="of derivatives"):
        jax.grad(lambda w: (jax.grad(loss)(w) ** 2).sum())(jnp.ones((64, 64)))


# ---- other transformations ---
def whole_of(x):
    """Rows of all shards, quantized before."""
    return jax_mx.all_gather(jax_mx.quantize(x), "a", axis=0, tiled=True)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("move", MOVES)
def test_mapped_moves_in_a_loop(move, platform):
    mx, floats = moves_of(move, 2)
    x = jnp.asarray(random_bits((2, 128, 3, 128), jnp.bfloat16))
    mapped = jax.vmap(lambda x: mx(jax_mx.quantize(x)), 2, 1)

    def again(x):
        return jax.lax.scan(lambda _, x: (None, mapped(x)), None, jnp.stack([x, x]))[1]

    got = in_shards(again, 2, out=P(None, "a"), platform=platform)(x)
    moved = in_shards(jax.vmap(floats, 2, 1), 2, platform=platform)(x)
    want = jax.vmap(jax_mx.quantize, 1, 1)(moved)
    for i in range(2):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert_bits_equal(np.asarray(a)[i], np.asarray(b))


@pytest.mark.parametrize("platform", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_moves_of_one_shard(platform):
    x = jnp.asarray(random_bits((4, 64, 64), jnp.bfloat16))

    assert_same_array(in_shards(whole_of, 1, platform=platform)(x), jax_mx.quantize(x))
    with jax.default_device(jax.devices(platform)[0]):
        named = jax.jit(jax.vmap(whole_of, axis_name="a"))(x)
        assert_same_array(named[1], jax_mx.quantize(x.reshape(256, 64)))
        empty = jax.jit(jax.vmap(whole_of, axis_name="a"))(x[:, :0])
        assert empty.shape == (4, 0, 64)


def test_vmap_of_collectives():
    """Over a batch in shard_map; and over the very axis that has the name."""
    x = jnp.asarray(random_bits((2, 3, 64, 64), jnp.bfloat16))

    q = in_shards(lambda x: jax.vmap(whole_of)(x[0])[None], 2)(x)
    want = jax_mx.quantize(x.transpose(1, 0, 2, 3).reshape(3, 128, 64))
    for i in range(2):  # indexed by NumPy: XLA moves e8m0 as float32, where 2^-127 becomes NaN
        assert_same_array(jax.tree.map(lambda a, i=i: np.asarray(a)[i], q), want)
    named = jax.vmap(whole_of, axis_name="a")(x[:, 0])
    assert_same_array(named[1], jax_mx.quantize(x[:, 0].reshape(128, 64)))
    spread = jax.vmap(lambda x: jax_mx.reshard(jax_mx.quantize(x), P(None, "a")))
    with jax.set_mesh(mesh_of(2)):
        assert_same_array(jax.jit(spread)(x), jax_mx.quantize(x))


def test_exported_collectives():
    mesh, x = mesh_of(2), jnp.asarray(random_bits((64, 64), jnp.bfloat16))
    where = NamedSharding(mesh, P("a"))

    def call(x):
        q = jax_mx.quantize(x)
        local = jax.shard_map(whole_of, mesh=mesh, in_specs=P("a"), out_specs=P(), check_vma=False)
        return jax_mx.reshard(q, NamedSharding(mesh, P())), local(x)

    abstract = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
    exported = jax.export.export(jax.jit(call), platforms=["cpu"])(abstract)
    again = jax.export.deserialize(exported.serialize())
    for q in jax.jit(again.call)(jax.device_put(x, where)):
        assert_same_array(q, jax_mx.quantize(x))


@pytest.mark.thorough
def test_two_processes(tmp_path):
    """jax.distributed, four CPU devices each: the bytes of one device, and bytes that move."""
    code = """
        from helpers import assert_bits_equal, collectives, random_bits
        mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
        whole = random_bits((256, 256), "bfloat16")
        make = lambda spec: jax.make_array_from_callback(
            whole.shape, NamedSharding(mesh, spec), lambda at: whole[at])
        def resharded(spec):
            return lambda x: jax_mx.reshard(jax_mx.quantize(x), NamedSharding(mesh, spec))
        def weight(w):
            w = jax_mx.gather_weight(w, NamedSharding(mesh, P("a")))
            return w.contracted_form, w.free_form
        with jax.default_device(jax.local_devices()[0]):
            q = jax_mx.quantize(whole)
            own = jax_mx.MXFP8.quantize_weight(jnp.asarray(whole))
        calls = [
            (resharded(P()), P("a"), q),
            (resharded(P(None, "b")), P("b"), q),
            (weight, P("a"), (own.contracted_form, own.free_form)),
        ]
        for call, spec, want in calls:
            x = make(spec)
            compiled = jax.jit(call).lower(x).compile()
            moves = collectives(compiled.as_text())
            assert moves and {dtype for _, dtype, _ in moves} == {"u8"}, moves
            for g, w in zip(jax.tree.leaves(compiled(x)), jax.tree.leaves(want), strict=True):
                for shard in g.addressable_shards:
                    assert_bits_equal(shard.data, np.asarray(w)[shard.index])
        tensors, path = {"q": jax.jit(jax_mx.quantize)(make(P("a")))}, sys.argv[3]
        try:
            jax_mx.save_safetensors(tensors, path)
        except ValueError as error:
            assert "save_safetensors: 'q.values' lies on devices of several" in str(error)
        tensors = jax.device_put(tensors, NamedSharding(mesh, P()))  # as it says
        if me == 0:
            jax_mx.save_safetensors(tensors, path)
            assert_bits_equal(jax_mx.load_safetensors(path)["q"].values, np.asarray(q.values))
    """
    on_two(code, str(tmp_path / "file"))


if __name__ == "__main__":
    DOCS.write_text(with_table(DOCS.read_text(), "moves", table()))
