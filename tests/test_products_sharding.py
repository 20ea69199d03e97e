"""Products are sharded as jax.lax.dot_general is: its results, types and collectives.

`python tests/test_products_sharding.py` writes the table that tests hold each cell to.
"""

import dataclasses
import functools
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_bits_equal,
    assert_refused,
    collectives,
    mesh_for,
    mesh_of,
    names_in,
    only,
    step,
    with_table,
)
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_mx
from jax_mx import MXFP4, MXFP8, Recipe, dot_general
from jax_mx.formats.formats import BLOCK
from jax_mx.launch.private import ShardingTypeError
from jax_mx.testing import emulate

pytestmark = pytest.mark.optimized

P = PartitionSpec
DOCS = Path(__file__).parent.parent / "docs" / "sharding.md"
LENGTHS = {"e": 8, "m": 256, "k": 256, "n": 256}  # batch, rows, contracted, columns


# ---- what is multiplied, and how it lies ---
@dataclasses.dataclass(frozen=True)
class Split:
    """Over which axes of the mesh x ([e], m, k), w ([e], k, n) and y ([e], m, n) are split."""

    x: PartitionSpec
    w: PartitionSpec
    y: PartitionSpec
    whole: bool = False  # whether w is gathered by its user, where XLA would see to it

    @property
    def batch(self) -> int:
        """How many batch dimensions there are."""
        return len(self.x) - 2

    @property
    def numbers(self):
        """The product's dimension numbers."""
        batch = (*range(self.batch),)
        return ((self.batch + 1,), (self.batch,)), (batch, batch)

    def shapes(self, unit: int = BLOCK):
        """The shapes of x, w and y, so that an eighth holds a unit."""
        lead = (LENGTHS["e"],) * self.batch
        letters = ("mk", "kn", "mn")
        return tuple((*lead, *(LENGTHS[n] * unit // BLOCK for n in two)) for two in letters)

    @property
    def gathered(self) -> dict[int, tuple[str, ...]]:
        """FSDP: by dimension of w the axes that split rows of x, too."""
        rows = names_in(self.x[-2])
        axes = {i: tuple(n for n in names_in(s) if n in rows) for i, s in enumerate(self.w)}
        return {i: names for i, names in axes.items() if names}

    @property
    def whole_w(self) -> PartitionSpec:
        """w's spec after these are gathered."""
        gone = {name for names in self.gathered.values() for name in names}
        kept = (tuple(n for n in names_in(s) if n not in gone) for s in self.w)
        return P(*(names or None for names in kept))

    @property
    def scattered(self) -> bool:
        """Whether the sums over shards are scattered: y is split as what is contracted was."""
        return any(name in self.summed for entry in self.y for name in names_in(entry))

    @property
    def summed(self) -> tuple[str, ...]:
        """The axes that split what is contracted."""
        return names_in(self.x[-1])


SPLITS = {
    "m over 8: data": Split(P("data", None), P(None, None), P("data", None)),
    "m, k of w over 8: FSDP": Split(P("data", None), P("data", None), P("data", None)),
    "m, n of w over 8: FSDP": Split(P("data", None), P(None, "data"), P("data", None)),
    "FSDP, w gathered before": Split(P("data", None), P("data", None), P("data", None), True),
    "n over 8: columns": Split(P(None, None), P(None, "tensor"), P(None, "tensor")),
    "k over 8: rows": Split(P(None, "tensor"), P("tensor", None), P(None, None)),
    "k, m of y over 8: rows, scattered": Split(
        P(None, "tensor"), P("tensor", None), P("tensor", None)
    ),
    "data and columns": Split(P("data", None), P(None, "tensor"), P("data", "tensor")),
    "data and rows": Split(P("data", "tensor"), P("tensor", None), P("data", None)),
    "FSDP and columns": Split(P("data", None), P("data", "tensor"), P("data", "tensor")),
    "FSDP and rows": Split(P("data", "tensor"), P("tensor", "data"), P("data", None)),
    "e over 8: experts": Split(*[P("expert", None, None)] * 3),
    "experts, data, columns": Split(
        P("expert", "data", None), P("expert", None, "tensor"), P("expert", "data", "tensor")
    ),
}
CALLS = {
    "MXFP8": MXFP8,
    "MXFP8, weights in 32 x 32": Recipe(block=(32, 32)),
    "MXFP8, windows of 128": Recipe(window=128, weight_window=(128, 128)),
    "MXFP4": MXFP4,
    "MXFP8, wgrad in bf16": Recipe(wgrad="bf16"),
    "MXFP8, a weight quantized before": MXFP8,
}
MODES = ("auto", "explicit", "shard_map", "shard_map, others auto")


def twice(split: Split, mode: str) -> bool:
    """Whether XLA gathers w, or y's gradient, for each direction that it is quantized in.

    It splits what quantizes and multiplies alone. On explicit meshes `dot_general` knows, in
    shard_map the caller does.
    """
    if "shard_map" in mode or split.whole:
        return False
    return bool(split.gathered) or split.scattered


def mark(name: str, split: Split) -> str:
    """The words of a cell in the table."""
    if not twice(split, "auto"):
        return "yes"
    return "twice" if "quantized before" in name and split.gathered else "auto: twice"


def unit(name: str) -> int:
    """The number of elements that each shard holds whole."""
    return 128 if "128" in name else BLOCK


# ---- programs ---
def product(name: str, split: Split, out_sharding=None):
    """(x, w) -> y; of "lax", jax.lax.dot_general."""
    numbers = split.numbers
    if name == "lax":
        return lambda x, w: jax.lax.dot_general(x, w, numbers, out_sharding=out_sharding)

    def mx(x, w):
        recipe = CALLS[name]
        if "quantized before" in name:
            w = recipe.quantize_weight(w, split.batch, range(split.batch))
        return dot_general(x, w, numbers, recipe=recipe, out_sharding=out_sharding)

    return mx


def in_shards(split: Split, f, names):
    """The product inside of a shard_map over these axes: what its caller gathers and sums."""

    def local(x, w):
        for axis, gathered in split.gathered.items():
            for name in gathered:
                if name in names:
                    w = jax.lax.all_gather(w, name, axis=axis, tiled=True)
        y = f(x, w)
        for name in split.summed:
            if name in names:
                at = [i for i, s in enumerate(split.y) if name in names_in(s)]
                y = (
                    jax.lax.psum_scatter(y, name, scatter_dimension=at[0], tiled=True)
                    if at
                    else jax.lax.psum(y, name)
                )
        return y

    return local


def program(name: str, split: Split, mode: str, size: int = BLOCK):
    """(the mesh, the jitted step, the abstract x, w and dy, so that an eighth holds `size`)."""
    axis_type = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    specs = (split.x, split.w, split.y)
    mesh = mesh_for(specs, jax.devices("cpu"), axis_type)
    if mode.startswith("shard_map"):
        names = {*mesh.axis_names} if mode == "shard_map" else {mesh.axis_names[0]}
        ins = [only(spec, names) for spec in specs]
        call = jax.shard_map(
            step(in_shards(split, product(name, split), names)),
            mesh=mesh,
            in_specs=(*ins,),
            out_specs=(ins[2], ins[0], ins[1]),
            axis_names=names,
        )
    else:
        out = NamedSharding(mesh, split.y)
        f = product(name, split, out if mode == "explicit" else None)
        if split.whole:
            whole = NamedSharding(mesh, split.whole_w)
            move = jax.sharding.reshard if mode == "explicit" else jax.lax.with_sharding_constraint
            inner = f
            f = lambda x, w: inner(x, move(w, whole))  # noqa: E731
        call = step(f)
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    outs = (shardings[2], *shardings[:2])
    operands = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)
        for shape, where in zip(split.shapes(size), shardings, strict=True)
    ]
    return mesh, jax.jit(call, out_shardings=outs), operands


@functools.cache
def lax_collectives(split: Split, mode: str, size: int) -> Counter:
    """The collectives of jax.lax.dot_general; in float32, as XLA's CPU compiler has bfloat16.

    The compiler dies of all-reduces in bfloat16 where a shard_map leaves axes to XLA.
    """
    mesh, call, operands = program("lax", split, mode, size)
    with jax.set_mesh(mesh):
        return collectives(call.lower(*operands).compile().as_text())


# ---- operands and what the results must be ---
@functools.cache
def inputs(shapes, exact: bool):
    """x, w and dy: small integers, of which every product and sum is exact; or any floats."""
    rng = np.random.default_rng(0)
    if exact:
        return [rng.integers(-2, 3, shape).astype(np.float32) for shape in shapes]
    sizes = (2.0 ** rng.integers(-3, 4, shape) for shape in shapes)
    return [np.float32(rng.normal(size=s) * n) for s, n in zip(shapes, sizes, strict=True)]


@functools.cache
def unsharded(name: str, batch: int, exact: bool):
    """The results on one device."""
    split = next(s for s in SPLITS.values() if s.batch == batch)
    operands = map(jnp.asarray, inputs(split.shapes(unit(name)), exact))
    return [np.asarray(y) for y in jax.jit(step(product(name, split)))(*operands)]


@functools.cache
def bounds(batch: int, size: int):
    """By which the floats may differ: twice eps32 * k * sum |a||b|, of operands 1/8 larger."""
    split = next(s for s in SPLITS.values() if s.batch == batch)
    x, w, dy = (np.abs(a) for a in inputs(split.shapes(size), False))
    flip = lambda a: np.swapaxes(a, -1, -2)  # noqa: E731
    pairs = ((x, w), (dy, flip(w)), (flip(x), dy))
    eps = 2.5 * np.finfo(np.float32).eps
    return [(a @ b) * a.shape[-1] * eps for a, b in pairs]


def check(name: str, split: Split, mode: str) -> None:
    """A cell: the unsharded results, where the caller wants them; lax.dot_general's collectives."""
    mesh, call, operands = program(name, split, mode, unit(name))
    with jax.set_mesh(mesh):
        compiled = call.lower(*operands).compile()
        for exact in (True, False):
            arrays = inputs((*(a.shape for a in operands),), exact)
            got = compiled(
                *(jax.device_put(a, b.sharding) for a, b in zip(arrays, operands, strict=True))
            )
            want = unsharded(name, split.batch, exact)
            for i, title in enumerate(("y", "gradient of x", "gradient of w")):
                if exact:
                    assert_bits_equal(got[i], want[i], title)
                else:
                    error = (
                        np.abs(np.asarray(got[i]) - want[i]) - bounds(split.batch, unit(name))[i]
                    )
                    assert error.max() <= 0, f"{title}: {error.max()} above the bound"
    moved, allowed = (
        collectives(compiled.as_text()),
        Counter(lax_collectives(split, mode, unit(name))),
    )
    if twice(split, mode) and (mode == "auto" or "twice" == mark(name, split)):
        allowed += Counter({key: n for key, n in allowed.items() if key[0] == "all-gather"})
    assert not (more := beyond(moved, allowed)), f"{more} are not among {allowed}"
    assert not split.summed or any(op in ("all-reduce", "reduce-scatter") for op, *_ in moved)


BYTES = {"u8": 1, "f32": 4}


def beyond(moved: Counter, allowed: Counter) -> list:
    """Collectives that are none of the allowed ones with fewer bytes.

    Codes bring their scales, a byte for each block; a scattered sum is less than a whole one.
    """
    rest, more = Counter(allowed), []
    moves = sorted(moved.elements(), key=lambda one: -one[2])
    for op, dtype, n in moves:
        of_codes = {("all-gather", "u8", n * codes) for codes in (BLOCK // 2, BLOCK, BLOCK**2)}
        if op == "all-gather" and dtype == "u8" and of_codes & {*moved}:
            continue
        kinds = {"reduce-scatter": ("reduce-scatter", "all-reduce")}.get(op, (op,))
        size = n * BYTES[dtype]
        fits = [one for one in rest if one[0] in kinds and one[2] * BYTES[one[1]] >= size]
        if fits:
            rest -= Counter([min(fits, key=lambda one: one[2])])
        else:
            more.append((op, dtype, n))
    return more


def cells():
    """Every call on every split, in modes that take turns; of MXFP8, in all modes."""
    for i, name in enumerate(CALLS):
        for j, (title, split) in enumerate(SPLITS.items()):
            for n, mode in enumerate(MODES):
                if name == "MXFP8" or (i + j) % len(MODES) == n:
                    rest = (
                        [] if (i == 0 and n == (j % 4) and j % 4 == 0) else [pytest.mark.thorough]
                    )
                    label = f"{name}-{mode}-{title}"
                    yield pytest.param(name, split, mode, id=label, marks=rest)


@pytest.mark.parametrize("name,split,mode", [*cells()])
def test_sharded_as_lax_dot_general(name, split, mode):
    check(name, split, mode)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("left", "right", "out"),
    [
        (P("data", "tensor"), P("tensor", None), P("data", None)),
        (P("data", None), P(None, "tensor"), None),
    ],
    ids=str,
)
def test_scaled_dot_on_explicit_meshes(mesh, left, right, out):
    """jax.lax.scaled_dot has no out_sharding; lax.dot_general gives the same types and bits."""
    x, w, _ = inputs(((256, 128), (128, 128), (256, 128)), True)
    x, w = (jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((x, left), (w, right)))
    numbers = (((1,), (0,)), ((), ()))
    scaled = functools.partial(dot_general, implementation="scaled_dot")
    steps = [
        jax.jit(step(functools.partial(f, dimension_numbers=numbers, out_sharding=out)))
        for f in (scaled, jax.lax.dot_general)
    ]
    dy = jax.lax.dot_general(x, w, numbers, out_sharding=out)
    for got, want in zip(*(f(x, w, dy // 8) for f in steps), strict=True):
        assert jax.typeof(got) == jax.typeof(want)
        assert_bits_equal(got, want)


@pytest.mark.sampled(10)
@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize(
    "title", ["m over 8: data", "k over 8: rows", "data and columns", "e over 8: experts"]
)
def test_kernels_are_split_too(title):
    """Lowered to calls of AMD's quantizers, which XLA cannot look into.

    Products are XLA's, as on meshes of AMD's chips: the emulated device counts as one.
    """
    split = SPLITS[title]
    with emulate("gfx950"), jax.default_matmul_precision("highest"):
        mesh, call, operands = program("MXFP8", split, "auto")
        with jax.set_mesh(mesh):
            text = call.lower(*operands).compile().as_text()
    assert "jax_mx_launch" in text
    assert collectives(text) <= lax_collectives(split, "auto", BLOCK)


# ---- meshes with explicit axes ---
@pytest.fixture
def mesh():
    kinds, devices = (AxisType.Explicit,) * 2, jax.devices("cpu")
    grid = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=kinds, devices=devices)
    with jax.set_mesh(grid):
        yield grid


@pytest.mark.parametrize(
    ("left", "right", "numbers", "out"),
    [  # as lhs and rhs are split, and the result if the caller says so
        ((P("data", "tensor"), P("tensor", None), ((1,), (0,)), P("data", None))),
        ((P("data", "tensor"), P("tensor", None), ((1,), (0,)), P("data", "tensor"))),
        ((P("data", None), P(None, "tensor"), ((1,), (0,)), None)),
        ((P("data", None), P("tensor", None), ((1,), (1,)), None)),
        ((P(None, "data"), P(None, "tensor"), ((0,), (0,)), None)),
        ((P("data", None), P("data", None), ((1,), (0,)), None)),
        ((P("data", None), P(None, "data"), ((1,), (0,)), P("data", None))),
        ((P("data", "tensor", None), P(None, None), ((2,), (0,)), None)),
        ((P("data", None, None), P(None, "tensor", None), ((2,), (0,)), None)),
        ((P("data", None, "tensor"), P("tensor", None), ((2,), (0,)), P("data", None, None))),
        ((P(("data", "tensor"), None), P(None, None), ((1,), (0,)), None)),
        # errors: in the same words
        ((P("data", "tensor"), P("tensor", None), ((1,), (0,)), None)),
        ((P("data", None), P(None, "data"), ((1,), (0,)), None)),
    ],
    ids=str,
)
def test_types_are_those_of_lax_dot_general(mesh, left, right, numbers, out):
    """The types of results and gradients, in a trace; nothing is run."""
    x, w = (
        jax.ShapeDtypeStruct((256,) * len(spec), jnp.float32, sharding=NamedSharding(mesh, spec))
        for spec in (left, right)
    )
    numbers = (numbers, ((), ()))

    def types(f):
        def step(x, w):
            y, pull = jax.vjp(lambda x, w: f(x, w, numbers, out_sharding=out), x, w)
            return (y, *pull(y))

        try:
            return [str(jax.typeof(a)) for a in jax.tree.leaves(jax.eval_shape(step, x, w))]
        except ShardingTypeError as error:
            return str(error).partition(" with inputs")[0].partition("Got")[0]

    assert types(dot_general) == types(jax.lax.dot_general)


def test_shards_that_split_blocks(mesh):
    """One sentence that names the operand; without a gradient, rows are not blocks."""

    def put(shape, *spec):
        return jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, P(*spec)))

    def gradients(x, w):
        return jax.grad(lambda x, w: jax_mx.matmul(x, w).sum(), (0, 1))(x, w)

    for x, w, sentence in (
        (put((64, 128), "tensor"), put((128, 64)), "64 rows of lhs are split over tensor in 4"),
        (put((40, 128), "tensor"), put((128, 64)), "40 rows of lhs are split over tensor in 4"),
        (put((64, 128)), put((128, 64), None, "tensor"), "64 columns of rhs are split over tensor"),
        (put((64, 64), None, "tensor"), put((64, 32), "tensor"), "64 contracted elements of lhs"),
        (
            put((64, 128), ("data", "tensor")),
            put((128, 64)),
            "64 rows of lhs are split over data x tensor in 8 shards of 8, which 32 does not",
        ),
    ):
        assert_refused(functools.partial(gradients, x, w), ShardingTypeError, sentence)
    y = jax.jit(jax_mx.matmul)(put((40, 128), "tensor"), put((128, 64)))
    assert str(jax.typeof(y)) == "float32[40@tensor,64]"
    assert_bits_equal(y, np.full((40, 64), 128, np.float32))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rows", [40, 64])
@pytest.mark.thorough
def test_rows_that_do_not_fill_blocks(rows):
    """Auto: gathered, the unsharded results; shard_map: zero rows in each shard."""
    x, w, dy = inputs(((rows, 128), (128, 64), (rows, 64)), True)
    mesh = mesh_of(8, names=("data",))
    want = step(jax_mx.matmul)(*map(jnp.asarray, (x, w, dy)))
    specs = (P("data"), P(), P("data"))
    out = (P("data"), *specs[:2])
    put = [
        jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((x, w, dy), specs, strict=True)
    ]
    local = jax.shard_map(step(jax_mx.matmul), mesh=mesh, in_specs=specs, out_specs=out)
    for call in (step(jax_mx.matmul), local):
        for got, exact in zip(jax.jit(call)(*put), want, strict=True):
            assert_bits_equal(got, exact)


# ---- the table ---
def table() -> list[str]:
    """The part of docs/sharding.md on products."""
    lines = ["| dot_general | " + " | ".join(SPLITS) + " |", "|---|" + "---|" * len(SPLITS)]
    for name in CALLS:
        lines.append(f"| {name} | " + " | ".join(mark(name, s) for s in SPLITS.values()) + " |")
    return lines


def test_the_table_is_current():
    text = DOCS.read_text()
    assert text == with_table(text, "products", table()), (
        "run python tests/test_products_sharding.py"
    )


if __name__ == "__main__":
    DOCS.write_text(with_table(DOCS.read_text(), "products", table()))
