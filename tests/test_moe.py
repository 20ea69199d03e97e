"""`moe`: values and every gradient against loops over experts in float64, hard routings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits_equal, assert_refused
from moe_oracle import Layer

import jax_mx
from jax_mx import BF16, MXFP4, MXFP8, Recipe
from jax_mx.launch import _ffi

TOKENS, K, D, I, E = 40, 2, 64, 96, 4  # noqa: E741
RECIPES = {
    "mxfp8": MXFP8,
    "hybrid": jax_mx.MXFP8_HYBRID,
    "mxfp4": MXFP4,
    "windows": Recipe(window=128, weight_window=(128, 128)),
    "bf16": BF16,
    "wgrad in bf16": Recipe(wgrad="bf16"),
}
ROUTINGS = {
    "random": lambda rng: rng.integers(0, E, (TOKENS, K)),
    "some are none": lambda rng: rng.integers(-1, E + 1, (TOKENS, K)),
    "all to one": lambda rng: np.full((TOKENS, K), 2),
    "none": lambda rng: np.full((TOKENS, K), -1),
}


def operands(dtype=np.float32, routing="random", tokens=TOKENS, seed=0):
    """x, experts, weights, both matrices and biases, and a gradient of the result."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        x = rng.normal(size=shape) * 2.0 ** rng.integers(-2, 3, shape)
        return np.asarray(jnp.asarray(x, dtype).astype(jnp.float32))

    experts = ROUTINGS[routing](rng)[:tokens].astype(np.int32)
    weights = rng.random((tokens, K)).astype(np.float32)
    w1, w2 = normal(E, D, 2 * I) / 8, normal(E, I, D) / 8
    return (
        normal(tokens, D),
        experts,
        weights,
        w1,
        w2,
        normal(E, 2 * I),
        normal(E, D),
        normal(tokens, D),
    )


def layer(x, experts, weights, w1, w2, b1=None, b2=None, **options):
    return jax_mx.moe(x, experts, weights, w1, w2, b_gate_up=b1, b_down=b2, **options)


@functools.cache
def _both(options):
    @jax.jit
    def both(experts, dy, x, weights, *rest):
        f = lambda x, weights, *rest: layer(x, experts, weights, *rest, **dict(options))  # noqa: E731
        y, pull = jax.vjp(f, x, weights, *rest)
        return y, pull(dy)

    return both


def with_gradients(args, dtype=jnp.float32, **options):
    """y and the gradients of all floats, for the last of args as y's."""
    x, experts, weights, w1, w2, b1, b2, dy = (jnp.asarray(a) for a in args)
    x, w1, w2, b1, b2, dy = (a.astype(dtype) for a in (x, w1, w2, b1, b2, dy))
    return _both(tuple(sorted(options.items())))(experts, dy, x, weights, w1, w2, b1, b2)


def exact(args):
    return [a if a.dtype == np.int32 else np.asarray(a, np.float64) for a in args]


def assert_close(got, want, bound, label=""):
    """By the norm of all; a rounding in between may fall the other way."""
    got, want = (np.asarray(a, np.float64) for a in (got, want))
    far, size = np.linalg.norm(got - want), np.linalg.norm(want)
    assert far <= bound * size, f"{label}: off by {far / size:.3g} of its norm"


NAMES = ("x", "weights", "w_gate_up", "w_down", "b_gate_up", "b_down")


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("mxfp8", {}),
        ("mxfp4", {"activation": "gpt_oss", "interleaved": True, "residuals": "inputs"}),
        pytest.param("hybrid", {"residuals": "floats"}, marks=pytest.mark.thorough),
        pytest.param("windows", {"activation": "geglu"}, marks=pytest.mark.thorough),
        pytest.param("bf16", {"residuals": "floats"}, marks=pytest.mark.thorough),
        pytest.param("wgrad in bf16", {"activation": "reglu2"}, marks=pytest.mark.thorough),
    ],
)
def test_values_and_gradients(recipe, options):
    args = operands(routing="some are none")
    y, gradients = with_gradients(args, recipe=RECIPES[recipe], **options)
    layer_options = {"residuals": "mx", **options}
    want, wanted = Layer(RECIPES[recipe], **layer_options)(*exact(args))
    assert_close(y, want, 2e-3, "y")
    for name, got, expected in zip(NAMES, gradients, wanted, strict=True):
        assert_close(got, expected, 4e-3, name)


@pytest.mark.parametrize(
    ("routing", "tokens"),
    [
        ("all to one", 7),
        pytest.param("none", 7, marks=pytest.mark.thorough),
        pytest.param("all to one", 1, marks=pytest.mark.thorough),
        pytest.param("none", 1, marks=pytest.mark.thorough),
    ],
)
def test_hard_routings(routing, tokens):
    args = operands(routing=routing, tokens=tokens)
    y, gradients = with_gradients(args)
    want, wanted = Layer(MXFP8)(*exact(args))
    assert_close(y, want, 2e-3, "y")
    for name, got, expected in zip(NAMES, gradients, wanted, strict=True):
        assert_close(got, expected, 4e-3, name)
        if not expected.any():
            assert not np.asarray(got).any(), name


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4", "windows"])
def test_graphs_are_replayed_with_other_routings(recipe):
    """One program, which XLA captures in graphs; what a routing gives does not depend on others."""
    seen, before = [], _ffi.counters()["captured"]
    for routing in (*ROUTINGS, *ROUTINGS):
        args = operands(routing=routing)
        replayed, plain = (
            with_gradients(args, jnp.bfloat16, recipe=RECIPES[recipe], **implementation)
            for implementation in ({}, {"implementation": "xla"})
        )
        for got, want in zip(jax.tree.leaves(replayed), jax.tree.leaves(plain), strict=True):
            assert_close(got, want, 1e-2, routing)
        seen.append(replayed)
    assert _ffi.counters()["captured"] > before
    for first, again in zip(seen[: len(ROUTINGS)], seen[len(ROUTINGS) :], strict=True):
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
            assert_bits_equal(a, b)


def test_no_tokens():
    args = operands()
    args = [a[:0] if i in (0, 1, 2, 7) else a for i, a in enumerate(args)]
    y, gradients = with_gradients(args)
    assert y.shape == (0, D)
    assert all(not np.asarray(g).any() for g in gradients)
    assert [g.shape for g in gradients] == [a.shape for i, a in enumerate(args[:7]) if i != 1]


@pytest.mark.thorough
def test_without_derivative_the_same_bytes():
    args = operands(routing="some are none")[:-1]
    y = layer(*map(jnp.asarray, args))
    both, _ = with_gradients((*args, np.zeros((TOKENS, D), np.float32)))
    assert_bits_equal(y, both)


@pytest.mark.parametrize(
    ("where", "recipe"),
    [
        ("x", "mxfp8"),
        ("dy", "mxfp8"),
        ("weights", "mxfp8"),
        *(
            pytest.param(where, recipe, marks=pytest.mark.thorough)
            for where in ("x", "dy", "weights")
            for recipe in RECIPES
            if recipe != "mxfp8"
        ),
    ],
)
def test_nan_stays_with_its_token(where, recipe):
    """In its row of results and gradients, and of its experts' gradients; all else keeps bits."""
    names = ("x", "experts", "weights", "w1", "w2", "b1", "b2", "dy")
    args, t = dict(zip(names, operands(), strict=True)), 5
    args["experts"] = np.where(np.arange(TOKENS)[:, None] == t, [[1, -1]], args["experts"])
    args["experts"] = args["experts"].astype(np.int32)
    is_nan = np.zeros(args[where].shape, bool)
    is_nan[t, 0 if where == "weights" else 3] = True
    options = {"recipe": RECIPES[recipe]}
    y, gradients = with_gradients([*args.values()], **options)
    args[where] = np.where(is_nan, np.float32(np.nan), args[where])
    y_with_nan, bad = with_gradients([*args.values()], **options)
    for name, got, want, row in zip(
        ("y", *NAMES), (y_with_nan, *bad), (y, *gradients), (t, t, t, 1, 1, 1, 1), strict=True
    ):
        got, want = np.asarray(got), np.asarray(want)
        assert_bits_equal(np.delete(got, row, 0), np.delete(want, row, 0), name)
        reached = np.isnan(got[row])
        if name == "weights":
            assert not reached[1], "a choice of no expert"
        expected = {"x": name != "b_down", "dy": name != "y", "weights": name != "weights"}
        assert reached.any() == expected[where], name
        if name == "b_down" and where == "dy":
            assert_bits_equal(np.delete(got[1], 3), np.delete(want[1], 3), name)


@pytest.mark.sampled(9, 4)
@pytest.mark.parametrize("residuals", ["mx", "floats", "inputs"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.thorough
def test_each_operand_has_a_dtype_of_its_own(dtype, residuals):
    """Results are of x's, gradients of that which they are for; values as near as dtypes are."""
    args = operands(routing="some are none")
    kinds = ("float16", "float32", "bfloat16")
    x, experts, weights, w1, w2, b1, b2, _ = (jnp.asarray(a) for a in args)
    x, rest = x.astype(dtype), [weights, w1, w2, b1, b2]
    start = kinds.index(dtype)
    arrays = [a.astype(kinds[(start + i) % 3]) for i, a in enumerate(rest)]

    @jax.jit
    def both(x, weights, *rest):
        f = lambda x, weights, *rest: layer(x, experts, weights, *rest, residuals=residuals)  # noqa: E731
        y, pull = jax.vjp(f, x, weights, *rest)
        return y, *pull(jnp.ones_like(y))

    got, want = both(x, *arrays), both(args[0], *rest)
    for name, a, operand, b in zip(("y", *NAMES), got, (x, x, *arrays), want, strict=True):
        assert (a.dtype, a.shape) == (operand.dtype, operand.shape), name
        assert_close(a, b, 0.05, name)


@pytest.mark.thorough
def test_frozen_weights_take_either_order():
    x, experts, weights, w1, w2, *_, dy = (jnp.asarray(a) for a in operands())
    want = layer(x, experts, weights, w1, w2)
    for transpose in (False, True):
        q1, q2 = (jax_mx.quantize(w, axis=-2, transpose=transpose) for w in (w1, w2))
        assert_bits_equal(layer(x, experts, weights, q1, q2), want)
    gradient = jax.grad(lambda x: (dy * layer(x, experts, weights, q1, q2)).sum())(x)
    floats = [q.dequantize(jnp.float32) for q in (q1.mT, q2.mT)]
    plain = jax.grad(lambda x: (dy * layer(x, experts, weights, *floats)).sum())(x)
    assert_close(gradient, plain, 0.08, "x")


def test_weights_quantized_once():
    args = operands()
    x, experts, weights, w1, w2, *_, dy = (jnp.asarray(a) for a in args)

    def loss(w1, w2, once):
        ws = [MXFP8.quantize_weight(w, 1, 0) for w in (w1, w2)] if once else (w1, w2)
        return (dy * layer(x, experts, weights, *ws)).sum()

    got, want = (jax.grad(functools.partial(loss, once=once), (0, 1))(w1, w2) for once in (1, 0))
    for a, b in zip(got, want, strict=True):
        assert_bits_equal(a, b)


@pytest.mark.thorough
def test_vmap_and_scan():
    x, experts, weights, w1, w2, *_ = (jnp.asarray(a) for a in operands(tokens=8))
    xs, ids = jnp.stack([x, -x]), jnp.stack([experts, experts[::-1]])
    f = lambda x, e: layer(x, e, weights, w1, w2)  # noqa: E731
    want = [f(*arguments) for arguments in zip(xs, ids, strict=True)]
    for y in (jax.vmap(f)(xs, ids), jax.lax.map(lambda arguments: f(*arguments), (xs, ids))):
        for got, expected in zip(y, want, strict=True):
            assert_bits_equal(got, expected)


@pytest.mark.parametrize("name", ["x", "weights", "w_down", "b_gate_up", "b_down", "dy"])
def test_second_derivatives_are_refused(name):
    """In bfloat16, too, where nothing is quantized: rows are gathered as bits."""
    names = ("x", "experts", "weights", "w1", "w2", "b1", "b2", "dy")
    args = dict(zip(names, (jnp.asarray(a) for a in operands(tokens=8)), strict=True))
    key = {"w_down": "w2", "b_gate_up": "b1", "b_down": "b2"}.get(name, name)

    def gradient(value):
        *arguments, dy = (args | {key: value}).values()
        y, pull = jax.vjp(lambda x: layer(x, *arguments[1:], recipe=BF16), arguments[0])
        return pull(y if name != "dy" else dy)[0].sum()

    with pytest.raises(NotImplementedError, match="moe: derivatives of derivatives"):
        jax.grad(gradient)(args[key])


def test_residuals_are_mx():
    x, experts, weights, w1, w2, *_ = (jnp.asarray(a) for a in operands())
    bf16 = [a.astype(jnp.bfloat16) for a in (x, w1, w2)]
    f = lambda x, w1, w2: layer(x, experts, weights, w1, w2)  # noqa: E731
    _, pull = jax.vjp(f, *bf16)
    for leaf in jax.tree.leaves(pull):
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > 1
        assert not is_float or leaf.ndim == 1, leaf.shape


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (
            {"x": np.zeros((40, 60), np.float32)},
            ValueError,
            "not a multiple of the block length 32",
        ),
        ({"x": np.zeros((40, 64), int)}, TypeError, "x"),
        ({"w1": np.zeros((4, 64), np.float32)}, ValueError, "must have three dimensions"),
        (
            {"w1": np.zeros((4, 32, 192), np.float32)},
            ValueError,
            "contracted axis 1 should have 64",
        ),
        ({"w1": np.zeros((4, 64, 96), np.float32)}, ValueError, "must be a multiple of 64"),
        ({"w2": np.zeros((3, 96, 64), np.float32)}, ValueError, "w_down has 3 matrices"),
        ({"experts": np.zeros((40, 2), np.float32)}, TypeError, "must be integers"),
        ({"weights": np.zeros((40, 3), np.float32)}, ValueError, "both must be (T, k), T = 40"),
        ({"b1": np.zeros((4, 96), np.float32)}, ValueError, "b_gate_up has the shape (4, 96)"),
        ({"activation": "tanh"}, ValueError, "activation"),
        ({"residuals": "all"}, ValueError, "residuals"),
        ({"recipe": Recipe(window="row")}, ValueError, "would span several groups' tokens"),
        ({"expert_axis": "expert"}, ValueError, "set one around the call"),
        ({"implementation": "fp8"}, ValueError, "implementation"),
    ],
)
def test_messages(change, error, sentence):
    names = ("x", "experts", "weights", "w1", "w2", "b1", "b2")
    args = dict(zip(names, operands()[:-1], strict=True)) | change
    assert_refused(lambda: layer(**args), error, sentence)


def test_numbers_of_experts_that_32_bits_do_not_hold():
    """They are no expert's, as others out of range."""
    x, w1, w2 = jnp.ones((32, 64)), jnp.ones((1, 64, 128)), jnp.ones((1, 64, 64))
    for dtype in (np.int64, np.uint64):
        experts = np.full((32, 1), 2**32, dtype)
        y = jax_mx.moe(x, experts, jnp.ones((32, 1)), w1, w2)
        np.testing.assert_array_equal(y, np.zeros((32, 64)))


def test_lists_and_any_order_of_bytes_are_arrays():
    """`moe` and `ragged_dot` take what other products take."""
    x, experts, weights, w1, w2, b1, b2, _ = operands()
    floats = (x, weights, w1, w2, b1, b2)
    want = layer(x, experts, weights, w1, w2, b1, b2)
    for arrays in ([a.astype(">f4") for a in floats], [a.tolist() for a in floats]):
        x, weights, w1, w2, b1, b2 = arrays
        assert_bits_equal(layer(x, experts, weights, w1, w2, b1, b2), want)
        sizes = jnp.full(E, 3, jnp.int32)
        want_rows = jax_mx.ragged_dot(floats[0], floats[2], sizes)
        assert_bits_equal(jax_mx.ragged_dot(x, w1, sizes), want_rows)
