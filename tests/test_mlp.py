"""`mlp`: values and gradients in float64, the three functions that it is, how it is sharded.

`python tests/test_mlp.py` writes the table that tests hold each cell to.
"""

import dataclasses
import functools
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits_equal, assert_refused, collectives, quantizings, step, with_table
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from moe_oracle import Products, rounded

import jax_mx
from jax_mx import BF16, MXFP4, MXFP8, Product, Recipe, mlp
from jax_mx.products.arguments import RESIDUALS
from jax_mx.products.multiply import equations
from jax_mx.quantizing.facts.activations import GATED

P = PartitionSpec
DOCS = Path(__file__).parent.parent / "docs" / "sharding.md"
ARRAYS = ("y", "x", "w_gate_up", "w_down", "b_gate_up", "b_down")
RECIPES = {
    "mxfp8": MXFP8,
    "mxfp4": MXFP4,
    "hybrid": jax_mx.MXFP8_HYBRID,
    "square": Recipe(block=(32, 32)),
    "windows": Recipe(window=128, weight_window=(128, 128)),
    "rows": Recipe(window="row"),
    "two windows": Recipe(window="row", wgrad=Product(window=128)),
    "wgrad in bf16": Recipe(wgrad="bf16"),
    "bf16": BF16,
}
DTYPES = (jnp.bfloat16, jnp.float32, jnp.float16)
thorough = pytest.mark.thorough


def operands(rows=(40,), dtype=jnp.float32, d=64, i=96, n=72, seed=0):
    """x, both matrices, both biases, a gradient of the result."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) * 2.0 ** rng.integers(-2, 3, shape), dtype)

    w1, w2 = normal(d, 2 * i) / 8, normal(i, n) / 8
    return normal(*rows, d), w1, w2, normal(2 * i), normal(n), normal(*rows, n)


def with_gradients(f, *args):
    """y and the gradients of all arguments but the last one, which is y's."""
    return jax.jit(step(f))(*args)


def own(recipe, **options):
    return lambda x, w1, w2, b1, b2: mlp(
        x, w1, w2, b_gate_up=b1, b_down=b2, recipe=recipe, **options
    )


def three_functions(recipe, activation="swiglu", **options):
    def plus(y, bias):
        return (y.astype(jnp.float32) + bias.astype(jnp.float32)).astype(y.dtype)

    def product(x, w):
        return jax_mx.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), recipe=recipe)

    def call(x, w1, w2, b1, b2):
        gate_up = plus(product(x, w1), b1)
        return plus(product(jax_mx.gated(gate_up, activation, **options), w2), b2)

    return call


# ---- values ---
def oracle(recipe, residuals, x, w1, w2, b1, b2, dy):
    """y and every gradient, float64, with swiglu; floats between the steps are rounded."""
    products, dtype = Products(recipe, np.float32), np.float32
    gate_up = rounded(rounded(products.forward(x, w1), dtype) + b1, dtype)

    def parts(gate_up):
        gate, up = np.split(gate_up, 2, axis=-1)
        return gate, up, 1 / (1 + np.exp(-gate))

    gate, up, sigmoid = parts(gate_up)
    act = rounded(gate * sigmoid * up, dtype)
    y = rounded(products.forward(act, w2), dtype) + b2
    if residuals == "mx":
        q = jax_mx.quantize(jnp.asarray(gate_up, dtype), implementation="xla")
        gate, up, sigmoid = parts(np.asarray(q.dequantize(dtype), np.float64))
    dact = rounded(products.dgrad(dy, w2), dtype)
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    dgate_up = rounded(np.concatenate([dact * up * slope, dact * gate * sigmoid], -1), dtype)
    dw1, dw2 = products.wgrad(x, dgate_up), products.wgrad(act, dy)
    return y, products.dgrad(dgate_up, w1), dw1, dw2, dgate_up.sum(0), dy.sum(0)


@pytest.mark.parametrize(
    ("recipe", "residuals"),
    [
        ("mxfp8", "mx"),
        pytest.param("mxfp4", "inputs", marks=thorough),
        pytest.param("hybrid", "floats", marks=thorough),
        pytest.param("square", "mx", marks=thorough),
        pytest.param("windows", "mx", marks=thorough),
        pytest.param("two windows", "mx", marks=thorough),
        pytest.param("wgrad in bf16", "inputs", marks=thorough),
        pytest.param("bf16", "floats", marks=thorough),
    ],
)
def test_equals_the_formula(recipe, residuals):
    """By the norm; where a number lies at a tie of a code, it may be rounded the other way."""
    args = operands()
    got = with_gradients(own(RECIPES[recipe], residuals=residuals), *args)
    want = oracle(RECIPES[recipe], residuals, *(np.asarray(a, np.float64) for a in args))
    for name, a, b in zip(ARRAYS, got, want, strict=True):
        a = np.asarray(a, np.float64)
        assert np.linalg.norm(a - b) <= 2e-3 * np.linalg.norm(b), name


def assert_right(got, want, residuals, is_bitwise: bool = True) -> None:
    """Bit for bit; but for the order in which the float32 gradient of a bias is summed."""
    for name, a, b in zip(ARRAYS, got, want, strict=True):
        if name == "b_gate_up" and residuals != "mx":
            np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-2, atol=1e-2)
        elif residuals == "mx" and name not in ("y", "w_down", "b_down"):
            continue
        elif is_bitwise:
            assert_bits_equal(a, b, name)
        else:
            np.testing.assert_allclose(np.float32(a), np.float32(b), 2e-3, 2e-3, err_msg=name)


@pytest.mark.parametrize(
    ("recipe", "rows", "dtype", "residuals"),
    [
        ("mxfp8", (7,), jnp.bfloat16, "inputs"),
        *(  # each recipe with half of the rows; types and residuals take turns
            pytest.param(recipe, rows, DTYPES[(i + j) % 3], RESIDUALS[j % 3], marks=thorough)
            for i, recipe in enumerate(RECIPES)
            for j, rows in enumerate(((64,), (7,), (2, 32), (3, 5), ()))
            if (i + j) % 2
        ),
    ],
)
def test_is_the_three_functions(recipe, rows, dtype, residuals):
    args = operands(rows, dtype, n=40)
    want = with_gradients(three_functions(RECIPES[recipe]), *args)
    got = with_gradients(own(RECIPES[recipe], residuals=residuals), *args)
    assert_right(got, want, residuals)


@pytest.mark.thorough
def test_gradients_of_float16():
    """Also where gate and up are kept in MX, which is read as float32."""
    args = operands((7,))
    got = with_gradients(own(MXFP8), *(a.astype(jnp.float16) for a in args))
    for name, a, b in zip(ARRAYS, got, with_gradients(own(MXFP8), *args), strict=True):
        a, b = (np.asarray(c, np.float64) for c in (a, b))
        assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(b), name
    assert {a.dtype for a in got} == {np.dtype(np.float16)}


@pytest.mark.parametrize(
    ("activation", "interleaved"),
    [("gpt_oss", True), *(pytest.param(n, False, marks=thorough) for n in ("relu2", "geglu_erf"))],
)
@pytest.mark.thorough
def test_other_activations(activation, interleaved):
    """With a gate and without, by turns and by halves: the three functions, bit for bit."""
    own_gate = 1 + (activation in GATED)
    x, w1, w2, b1, b2, dy = operands((7,), jnp.bfloat16, n=40)
    args = x, w1[:, : 96 * own_gate], w2, b1[: 96 * own_gate], b2, dy
    options = {"activation": activation, "interleaved": interleaved, "residuals": "floats"}
    want = with_gradients(three_functions(MXFP8, activation, interleaved=interleaved), *args)
    for name, a, b in zip(ARRAYS, with_gradients(own(MXFP8, **options), *args), want, strict=True):
        if name != "b_gate_up":
            assert_bits_equal(a, b, name)


@thorough
def test_a_weight_quantized_once_gives_the_same():
    x, w1, w2, *_, dy = operands((32,), jnp.bfloat16, n=64)

    def once(x, w1, w2):
        return mlp(x, MXFP8.quantize_weight(w1), MXFP8.quantize_weight(w2))

    for got, want in zip(*(with_gradients(f, x, w1, w2, dy) for f in (once, mlp)), strict=True):
        assert_bits_equal(got, want)


@thorough
@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_frozen_weights_are_those_of_dot_general(first, second):
    """In either orientation; the other weight, and x, get their gradients."""
    x, w1, w2, *_, dy = operands((32,), jnp.bfloat16, n=64)
    if first:
        w1 = jax_mx.quantize(w1, axis=0)
    if second:
        w2 = jax_mx.quantize(w2, axis=0, transpose=True)
    trained = [w for w in (w1, w2) if not isinstance(w, jax_mx.MXArray)]

    def given(rest):
        rest = iter(rest)
        return [w if isinstance(w, jax_mx.MXArray) else next(rest) for w in (w1, w2)]

    def frozen(x, *rest):
        return mlp(x, *given(rest), residuals="inputs")

    def three(x, *rest):
        def product(x, w):
            at = w.axis % 2 if isinstance(w, jax_mx.MXArray) else 0
            return jax_mx.dot_general(x, w, (((1,), (at,)), ((), ())))

        weights = given(rest)
        return product(jax_mx.gated(product(x, weights[0])), weights[1])

    pair = (with_gradients(f, x, *trained, dy) for f in (frozen, three))
    for got, want in zip(*pair, strict=True):
        assert_bits_equal(got, want)


# ---- gates and ups of two weights ---
def apart(gate_up):
    """Gates and ups, halves of the last axis."""
    return tuple(jnp.split(gate_up, 2, axis=-1))


def of_pair(f, **options):
    """The layer with two weights and two biases, as `own` has it."""

    def call(x, w1, w2, b1, b2):
        return f(x, apart(w1), w2, b_gate_up=apart(b1), b_down=b2, **options)

    return call


def by_matmuls(x, w_gate_up, w_down, b_gate_up, b_down, recipe):
    """The same of three products, one after the other."""

    def plus(y, bias):
        return (y.astype(jnp.float32) + bias.astype(jnp.float32)).astype(y.dtype)

    gate, up = (
        plus(jax_mx.matmul(x, w, recipe=recipe), b)
        for w, b in zip(w_gate_up, b_gate_up, strict=True)
    )
    return plus(jax_mx.matmul(jax_mx.gated(gate, up=up), w_down, recipe=recipe), b_down)


@pytest.mark.parametrize(
    ("recipe", "rows", "dtype", "residuals"),
    [
        ("rows", (7,), jnp.bfloat16, None),
        ("mxfp8", (2, 32), jnp.bfloat16, "inputs"),
        *(
            pytest.param(recipe, ((64,), (3, 5))[i % 2], DTYPES[i % 3], residuals, marks=thorough)
            for i, recipe in enumerate(RECIPES)
            for residuals in RESIDUALS
        ),
    ],
)
def test_a_pair_of_weights_is_three_matmuls(recipe, rows, dtype, residuals):
    """The gradient of x is right in its dtype too.

    XLA's own products have no order of sums, which depends on what it fuses with them: of "bf16",
    with float16 around it, a sum next to a tie may round either way.
    """
    args, name, recipe = operands(rows, dtype, n=40), recipe, RECIPES[recipe]
    want = with_gradients(of_pair(functools.partial(by_matmuls, recipe=recipe)), *args)
    got = with_gradients(of_pair(mlp, recipe=recipe, residuals=residuals), *args)
    assert_right(got, want, residuals, name != "bf16" or dtype != jnp.float16)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kinds", [("once", "floats"), ("floats", "frozen"), ("once", "once")])
def test_a_pair_of_weights_of_any_kind(kinds):
    """Quantized once, frozen or floats; what is trained gets the gradient of three matmuls."""
    x, w1, w2, *_, dy = operands((7,), jnp.bfloat16, n=64)
    recipe = RECIPES["rows"]
    weight_of_kind = {
        "once": recipe.quantize_weight,
        "floats": lambda w: w,
        "frozen": lambda w: jax_mx.quantize(jax.lax.stop_gradient(w), axis=0, window="row"),
    }

    def layer_of(f):
        def call(x, gate, up, w2):
            pair = [weight_of_kind[name](w) for name, w in zip(kinds, (gate, up), strict=True)]
            return f(x, pair, w2)

        return call

    def matmuls(x, pair, w2):
        gate, up = (jax_mx.matmul(x, w, recipe=recipe) for w in pair)
        return jax_mx.matmul(jax_mx.gated(gate, up=up), w2, recipe=recipe)

    args = x, *apart(w1), w2, dy
    layers = (layer_of(f) for f in (functools.partial(mlp, recipe=recipe), matmuls))
    for got, want in zip(*(with_gradients(f, *args) for f in layers), strict=True):
        assert_bits_equal(got, want)


def test_a_pair_of_weights_reads_one_quantized_x():
    """Both ways from one read, and no array of gates and ups together."""
    x, w1, w2, *_ = operands((64,), jnp.bfloat16, n=64)
    f = jax.grad(lambda x, *ws: mlp(x, ws[:2], ws[2], recipe=RECIPES["rows"]).astype(jnp.float32)
                 .sum(), (0, 1, 2, 3))  # fmt: skip
    calls = [
        eqn
        for eqn in equations(jax.make_jaxpr(f)(x, *apart(w1), w2).jaxpr)
        if eqn.primitive.name == "mx_quantize_rows"
    ]
    # The calls quantize x, three weights, the array between, and the gradients of y, gates and ups.
    assert len(calls) == 8 and {eqn.params["plan"].op for eqn in calls} == {"quantize_both"}
    text = str(jax.make_jaxpr(f)(x, *apart(w1), w2))
    assert "64,192" not in text


def test_what_is_kept():
    """Nothing but MX: by default half of what bfloat16 keeps, and scales; by name in remat."""
    x, w1, w2, *_ = operands((64,), jnp.bfloat16, n=64)
    w1_bytes, gate_up = w1.nbytes, x.shape[0] * w1.shape[1] * 2
    for residuals in ("mx", "inputs"):
        f = functools.partial(mlp, residuals=residuals)
        _, pull = jax.vjp(f, x, w1, w2)
        kept = [leaf for leaf in jax.tree.leaves(pull) if hasattr(leaf, "nbytes")]
        assert all(leaf.dtype.itemsize == 1 for leaf in kept)
        floats = {"mx": gate_up, "inputs": x.nbytes + w1_bytes}[residuals]
        floats += x.nbytes + w1_bytes + w2.nbytes + gate_up // 2
        assert sum(leaf.nbytes for leaf in kept) <= 0.55 * floats
    policy = jax.checkpoint_policies.save_only_these_names(jax_mx.CHECKPOINT_NAME)
    ours, kept, again = (
        quantizings(jax.grad(lambda x, w1, w2, f=f: f(x, w1, w2).astype(jnp.float32).sum()), x, w1,
                    w2)
        for f in (mlp, jax.checkpoint(mlp, policy=policy), jax.checkpoint(mlp))
    )  # fmt: skip
    assert ours == kept < again


def test_activations_are_quantized_as_they_are_made():
    """One call reads gate and up, of all rows, and writes both arrays of codes."""
    x, w1, w2, *_ = operands((2, 32), jnp.bfloat16, n=64)
    text = str(jax.make_jaxpr(lambda *args: jax.vjp(mlp, *args)[0])(x, w1, w2))
    (call,) = [part for part in text.split("mx_quantize[")[1:] if "source=Source(swiglu)" in part]
    assert "op='quantize_both'" in call


def test_bad_calls_get_one_sentence():
    x, w1, w2, b1, *_ = operands(n=64)
    refused = assert_refused
    refused(lambda: mlp(jax_mx.quantize(x), w1, w2), TypeError, "mlp: x must be an array of floats")
    refused(lambda: mlp(x, w1[:32], w2), ValueError, "contracted axis 0 should have 64 elements")
    refused(lambda: mlp(x, w1[:, :96], w2), ValueError, "must be a multiple of 64, as swiglu")
    refused(lambda: mlp(x, w1, w2, activation="relu", interleaved=True), ValueError, "no gate")
    rotated = Recipe(forward=jax_mx.Product(hadamard=jax_mx.Hadamard(16)))
    frozen = jax_mx.quantize(w1, axis=0)
    refused(lambda: mlp(x, frozen, w2, recipe=rotated), ValueError, "the recipe rotates")
    refused(lambda: mlp(x, w1, w2[:64]), ValueError, "w_down has the shape (64, 64)")
    refused(lambda: mlp(x[:, :40], w1[:40], w2), ValueError, "not a multiple of the block length")
    refused(lambda: mlp(x, w1[None], w2), ValueError, "w_gate_up has the shape (1, 64, 192)")
    refused(lambda: mlp(x, w1.astype(jnp.int32), w2), TypeError, "w_gate_up is int32")
    refused(lambda: mlp(x, w1, w2, b_down=b1), ValueError, "b_down has the shape (192,)")
    refused(lambda: mlp(x, w1, w2, activation="tanh"), ValueError, "activation must be 'swiglu'")
    refused(lambda: mlp(x, w1, w2, residuals="all"), ValueError, "residuals")
    pair = apart(w1)
    refused(lambda: mlp(x, (*pair, w1), w2), ValueError, "w_gate_up has 3 weights, must be one or")
    refused(lambda: mlp(x, (pair[0], w1), w2), ValueError, "w_gate_up have [96, 192] columns")
    refused(lambda: mlp(x, (pair[0], "w"), w2), TypeError, "w_gate_up[1] must be an array")
    refused(lambda: mlp(x, pair, w2, interleaved=True), ValueError, "is the order in one weight")
    refused(lambda: mlp(x, pair, w2, activation="relu"), ValueError, "'relu' has no gate; pass one")
    refused(lambda: mlp(x, pair, w2, b_gate_up=b1), TypeError, "so b_gate_up must be a pair")
    signs = jax_mx.Hadamard.random(jax.random.key(0))
    turned = Recipe(forward=Product(hadamard=signs))
    twice = tuple(map(turned.quantize_weight, pair))
    refused(lambda: mlp(x, twice, w2, recipe=turned), ValueError, "both weights of w_gate_up bring")
    wrong = MXFP4.quantize_weight(w1)
    mlp_in_mxfp8 = functools.partial(mlp, recipe=MXFP8)
    refused(lambda: mlp_in_mxfp8(x, wrong, w2), ValueError, "was quantized by another recipe")
    along = jax_mx.quantize(w1)
    refused(lambda: mlp(x, along, w2), ValueError, "contracted axis 1 should have 64 elements")


# ---- sharding ---
@dataclasses.dataclass(frozen=True)
class Split:
    """Over which axes of the mesh x (m, d), w_gate_up (d, 2 i), w_down (i, n), y (m, n) lie."""

    x: PartitionSpec
    w1: PartitionSpec
    w2: PartitionSpec
    y: PartitionSpec
    interleaved: bool = False

    @property
    def gathers(self) -> bool:
        """FSDP: whether an axis splits both rows and weights."""
        return "data" in (*self.w1, *self.w2)

    @property
    def moves(self) -> bool:
        """Whether gates lie elsewhere than the ups that they meet."""
        return "tensor" in self.w1 and not self.interleaved

    @property
    def names(self) -> list[str]:
        """The mesh's axes."""
        return sorted({name for spec in (self.x, self.w1, self.w2) for name in spec if name})


SPLITS = {
    "m over 8: data": Split(P("data", None), P(), P(), P("data", None)),
    "m, d and i of weights over 8: FSDP": Split(*[P("data", None)] * 4),
    "i over 8: tensor": Split(P(), P(None, "tensor"), P("tensor", None), P()),
    "data and tensor": Split(
        P("data", None), P(None, "tensor"), P("tensor", None), P("data", None)
    ),
    "data and tensor, gates and ups by turns": Split(
        P("data", None), P(None, "tensor"), P("tensor", None), P("data", None), True
    ),
    "FSDP and tensor": Split(
        P("data", None), P("data", "tensor"), P("tensor", "data"), P("data", None)
    ),
}
MODES = ("auto", "explicit", "shard_map")
SIZE = 256


def mark(split: Split) -> str:
    """The words of a cell in the table."""
    notes = ["auto: twice"] * split.gathers + ["gates move, but in shard_map"] * split.moves
    return "; ".join(notes) or "yes"


@functools.cache
def inputs():
    x, w1, w2, *_, dy = operands((SIZE,), d=SIZE, i=SIZE, n=SIZE)
    return tuple(np.asarray(a) for a in (x, w1, w2, dy))


@functools.cache
def unsharded(interleaved):
    f = functools.partial(mlp, interleaved=interleaved)
    return [np.asarray(a) for a in jax.jit(step(f))(*inputs())]


def plain(x, w1, w2, interleaved=False):
    """The same of jax.lax.dot_general."""
    return jnp.dot(jax_mx.gated(jnp.dot(x, w1), interleaved=interleaved), w2)


def in_shards(split: Split):
    """The layer inside of shard_map: its caller gathers and sums; w_gate_up is (d, 2, i)."""

    def local(x, w1, w2):
        w1 = w1.reshape(w1.shape[0], -1)
        if split.gathers:
            at = 0 if "data" == split.w2[0] else 1
            w1, w2 = (
                jax.lax.all_gather(w, "data", axis=axis, tiled=True)
                for w, axis in ((w1, 0), (w2, at))
            )
        y = mlp(x, w1, w2, interleaved=split.interleaved)
        return jax.lax.psum(y, "tensor") if "tensor" in split.w1 else y

    return local


def mesh_lengths(split: Split) -> tuple[int, ...]:
    """The lengths of the mesh's axes, on eight devices."""
    return (8,) if len(split.names) == 1 else (2, 4)


def compiled(split: Split, mode: str, f=mlp):
    """The program, and operands that lie as it wants them."""
    axis_type = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    lengths = mesh_lengths(split)
    mesh = jax.make_mesh(
        lengths, split.names, axis_types=(axis_type,) * len(lengths), devices=jax.devices("cpu")
    )
    specs, args = [split.x, split.w1, split.w2, split.y], [*inputs()]
    call = step(functools.partial(f, interleaved=split.interleaved))
    if mode == "shard_map":
        rows, columns = (*split.w1, None, None)[:2]
        args[1] = args[1].reshape((SIZE, SIZE, 2) if split.interleaved else (SIZE, 2, SIZE))
        specs[1] = P(rows, *((columns, None) if split.interleaved else (None, columns)))
        call = jax.shard_map(
            step(in_shards(split)), mesh=mesh, in_specs=(*specs,), out_specs=(specs[3], *specs[:3])
        )
    where = [NamedSharding(mesh, spec) for spec in specs]
    placed = [jax.device_put(a, s) for a, s in zip(args, where, strict=True)]
    with jax.set_mesh(mesh):
        program = jax.jit(call, out_shardings=(where[3], *where[:3])).lower(*placed).compile()
    return program, placed


@pytest.mark.parametrize(
    ("title", "mode"),
    [
        pytest.param(
            title, mode, marks=[] if (i, j) == (4, 0) else thorough,
            id=f"{title}-{mode}",
        )
        for i, title in enumerate(SPLITS)
        for j, mode in enumerate(MODES)
    ],
)  # fmt: skip
def test_sharded(title, mode):
    """A cell: one device's results, and no collective that the same products do not have."""
    split = SPLITS[title]
    program, placed = compiled(split, mode)
    for name, got, want in zip(
        ARRAYS[:4], program(*placed), unsharded(split.interleaved), strict=True
    ):
        got = np.asarray(got).reshape(want.shape)
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want), name
    moved = collectives(program.as_text())
    if mode == "shard_map":
        kinds = {"all-reduce"} | ({"all-gather", "reduce-scatter"} if split.gathers else set())
        assert {op for op, *_ in moved} <= kinds
        return
    allowed = Counter(collectives(compiled(split, "auto", plain)[0].as_text()))
    over = dict(zip(split.names, mesh_lengths(split), strict=True)).get("data", 1)
    for key in [*allowed]:
        op, dtype, size = key
        twice = op == "all-gather" and mode == "auto" and split.gathers
        allowed[key] *= 1 + (twice or op in ("collective-permute", "all-to-all"))
        if twice:  # codes and scales move for each direction, in place of floats
            allowed[op, "u8", size] = allowed[op, "u8", size // 32] = allowed[key]
        if op == "all-reduce" and mode == "auto" and split.gathers:
            allowed["reduce-scatter", dtype, size // over] = allowed[key]
    assert moved <= allowed, f"{moved - allowed} are not among {allowed}"
    moving = {"collective-permute", "all-to-all"} & {op for op, *_ in moved}
    assert bool(moving) == split.moves


def table() -> list[str]:
    """The part of docs/sharding.md on perceptrons."""
    cells = " | ".join(map(mark, SPLITS.values()))
    return [f"| mlp | {' | '.join(SPLITS)} |", "|---|" + "---|" * len(SPLITS), f"| | {cells} |"]


def test_the_table_is_current():
    text = DOCS.read_text()
    assert text == with_table(text, "mlp", table()), "run python tests/test_mlp.py"


if __name__ == "__main__":
    DOCS.write_text(with_table(DOCS.read_text(), "mlp", table()))


def test_operands_of_other_kinds():
    """Lists, byte orders and names that are none."""
    x, w1, w2, b1, *_ = operands((7,), n=64)
    want = mlp(x, w1, w2, b_gate_up=b1)
    other = [np.asarray(a).astype(">f4") for a in (x, w1, w2, b1)]
    assert_bits_equal(mlp(*other[:3], b_gate_up=other[3]), want)
    assert_refused(lambda: mlp(x, w1, w2, precision="hihgest"), ValueError, "precision 'hihgest'")
    assert_refused(
        lambda: mlp(x, w1, w2, b_down=[0.0] * 3), ValueError, "b_down has the shape (3,)"
    )
    assert_refused(lambda: mlp(x, None, w2), TypeError, "w_gate_up must be an array")
    assert_refused(lambda: mlp(x, w1, w2, b_down=jax_mx.quantize(w2)), TypeError, "b_down is an MX")
