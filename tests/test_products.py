"""`dot_general`, `matmul`, `einsum`: values and gradients against float64, shapes, messages."""

import copy
import dataclasses
import functools
import json
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    assert_bits_equal,
    assert_refused,
    assert_same_array,
    lowered_apart,
    quantizings,
    stand_in,
)

import jax_mx
from jax_mx import (
    MXFP4,
    MXFP4_E2M1,
    MXFP8,
    MXFP8_E4M3,
    MXFP8_HYBRID,
    Hadamard,
    Product,
    Recipe,
    Stochastic,
    dot_general,
    einsum,
    matmul,
)
from jax_mx.launch import store, targets, toolchains
from jax_mx.products import (
    contraction,
    decide,
    implementations,
    kernels,
    operand,
    primitives,
    recipes,
)
from jax_mx.products.arguments import is_exact
from jax_mx.products.contraction import Contraction, Numbers
from jax_mx.products.kernel_plans import ROWS
from jax_mx.products.recipes import RECIPES as NAMED
from jax_mx.quantizing.calling import called

KEY = jax.random.key(5)
RECIPES = {
    "mxfp8": MXFP8,
    "hybrid": MXFP8_HYBRID,
    "mxfp4": MXFP4,
    "square": Recipe(block=(32, 32)),
    "windows": Recipe(window=128, weight_window=(128, 128)),
    "rows": Recipe(window="row"),
    "two windows": Recipe(window="row", wgrad=Product(window=128)),
    "three windows": Recipe(window=256, weight_window=32, dgrad=Product(window="row"),
        wgrad=Product(window=32)),
    "wgrad in bf16": Recipe(wgrad="bf16"),
    "all in bf16": Recipe(forward="bf16", dgrad="bf16", wgrad="bf16"),
    "square mxfp4, dgrad in bf16": Recipe(MXFP4_E2M1, MXFP4_E2M1, block=(32, 32), dgrad="bf16"),
    "wgrad in mxfp8": Recipe("mxfp4_e2m1", "mxfp4_e2m1", "mxfp4_e2m1", wgrad="mxfp8_e4m3"),
    "rotated": Recipe("mxfp4_e2m1", "mxfp4_e2m1", "mxfp4_e2m1", scaling="even",
        forward=Product(hadamard=Hadamard(16)),
        wgrad=Product(hadamard=Hadamard(32, np.arange(32) % 3 - 1))),
    "gradients in mxfp4": jax_mx.mxfp4_backward(KEY),
    "turned by 64": Recipe(dgrad=Product(hadamard=Hadamard(64)),
        wgrad=Product(hadamard=Hadamard(64, [1, -1] * 32))),
}  # fmt: skip


def floats(shape, seed=0, dtype=np.float32):
    """Normal numbers over some binades, so that scales differ from block to block."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-3, 4, shape)
    return jnp.asarray(x, dtype)


# ---- the oracle: the definition, on operands as (B, rows, K) ---
def canonical(x, contracting, batch):
    """x as float64 (B, F, K), and how to bring such an array back."""
    free = [i for i in range(x.ndim) if i not in (*contracting, *batch)]
    order = (*batch, *free, *contracting)
    lengths = [[x.shape[i] for i in group] for group in (batch, free, contracting)]
    flat = np.asarray(x, np.float64).transpose(order).reshape([math.prod(n) for n in lengths])

    def back(y):
        y = y.reshape([n for group in lengths for n in group])
        return y.transpose(np.argsort(order))

    return flat, back


def taken(x, use, square, turn=False):
    """The operand of a product from x (B, F, K): quantized along K and dequantized, float64.

    With `turn`, x is (B, K, F): rounding at random depends on an element's place in x.
    """
    x = jnp.asarray(np.asarray(x), jnp.float32)
    if turn and use.rounding is None:
        x, turn = x.mT, False
    if use.format is None:
        return np.asarray(x.astype(jnp.bfloat16), np.float64)
    unit = max(32, use.hadamard.size if use.hadamard else 0)
    pads = [(0, 0), (0, -x.shape[1] % unit), (0, -x.shape[2] % unit)]
    options = {"hadamard": use.hadamard, "rounding": use.rounding, "window": use.window, **square}
    options |= {"axis": -2, "transpose": True} if turn else {}
    q = jax_mx.quantize(jnp.pad(x, pads), use.format, **options)
    free = x.shape[2 if turn else 1]
    return np.asarray(q.dequantize(jnp.float32), np.float64)[:, :free]


def oracle(lhs, rhs, numbers, recipe, dy=None):
    """y; or with dy, both gradients: each with its bound, by the float64 formula."""
    (lc, rc), (lb, rb) = numbers
    pairs = sorted(zip(rc, lc, strict=True))
    a, back_a = canonical(lhs, [c for _, c in pairs], lb)
    b, back_b = canonical(rhs, [c for c, _ in pairs], rb)
    scaling = {"scaling": recipe.scaling}
    block = {**scaling, "block": recipe.block}

    def product(left, right, back):
        if left.shape[-1] != right.shape[-1]:  # one of them is in bfloat16, without zero rows
            n = min(left.shape[-1], right.shape[-1])
            left, right = left[..., :n], right[..., :n]
        y, size = (np.einsum("bik,bjk->bij", f(left), f(right)) for f in (lambda x: x, np.abs))
        return back(y), back(size) * left.shape[-1] * np.finfo(np.float32).eps

    if dy is None:
        (x, _), (w, _) = (recipe.uses(name) for name in ("lhs", "rhs"))
        return product(taken(a, x, scaling), taken(b, w, block), lambda y: y)
    g = np.asarray(dy, np.float64).reshape(a.shape[0], a.shape[1], b.shape[1])
    (_, x), (_, w), (gd, gw) = (recipe.uses(name) for name in ("lhs", "rhs", "gradient"))
    return (
        product(taken(g, gd, scaling), taken(b, w, block, True), back_a),
        product(taken(g, gw, scaling, True), taken(a, x, scaling, True), back_b),
    )


def assert_within(got, want, label):
    """And NaN or infinite where, and only where, the float64 formula is."""
    value, bound = want
    got = np.asarray(got, np.float64).reshape(value.shape)
    odd = ~np.isfinite(value)
    got_odd = np.where(np.isfinite(got), 0, got)
    np.testing.assert_array_equal(got_odd, np.where(odd, value, 0), label)
    got, value, bound = (np.where(odd, 0, array) for array in (got, value, bound))
    error = np.abs(got - value)
    assert (error <= bound + 1e-30).all(), f"{label}: {(error - bound).max()} above the bound"


NUMBERS = (
    # lhs, rhs, dimension numbers
    ((7, 96), (96, 5), (((1,), (0,)), ((), ()))),
    ((64, 32), (40, 32), (((1,), (1,)), ((), ()))),
    ((32, 64), (32, 33), (((0,), (0,)), ((), ()))),
    ((2, 32, 64), (64, 96), (((2,), (0,)), ((), ()))),  # rows stay apart: 32 divides 32
    ((3, 5, 64), (64, 2, 16), (((2,), (0,)), ((), ()))),
    ((2, 3, 4, 8), (4, 8, 9), (((2, 3), (0, 1)), ((), ()))),
    ((2, 3, 4, 8), (8, 9, 4), (((2, 3), (2, 0)), ((), ()))),
    ((5, 7, 64), (5, 64, 3), (((2,), (1,)), ((0,), (0,)))),
    ((7, 5, 64), (64, 3, 5), (((2,), (0,)), ((1,), (2,)))),
    ((2, 3, 7, 32), (3, 2, 5, 32), (((3,), (3,)), ((0, 1), (1, 0)))),
    ((64,), (64, 4), (((0,), (0,)), ((), ()))),
    ((64,), (64,), (((0,), (0,)), ((), ()))),
    ((0, 64), (64, 5), (((1,), (0,)), ((), ()))),
    ((3, 64), (64, 0), (((1,), (0,)), ((), ()))),
    ((0, 3, 32), (0, 32, 4), (((2,), (1,)), ((0,), (0,)))),
)


def random_numbers(seed, sizes=(1, 3, 7, 32, 33)):
    """Shapes and dimension numbers of a random product with 32 | K."""
    rng = np.random.default_rng(seed)
    batch = [int(n) for n in rng.integers(1, 4, rng.integers(0, 3))]
    contracted = [(32,), (64,), (4, 8), (2, 32), (16, 3, 2)][rng.integers(5)]
    sides = []
    for _ in range(2):
        free = [int(n) for n in rng.choice(sizes, rng.integers(0, 3))]
        lengths = [*batch, *contracted, *free]
        order = rng.permutation(len(lengths))
        shape = tuple(lengths[i] for i in order)
        at = [int(i) for i in np.argsort(order)]
        sides.append((shape, at[len(batch) : len(batch) + len(contracted)], at[: len(batch)]))
    (left, lc, lb), (right, rc, rb) = sides
    return left, right, ((tuple(lc), tuple(rc)), (tuple(lb), tuple(rb)))


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *((name, NUMBERS[i % len(NUMBERS)]) for i, name in enumerate(RECIPES)),
        *(("mxfp8", case) for case in NUMBERS),
        *((list(RECIPES)[i % len(RECIPES)], random_numbers(i)) for i in range(40)),
    ],
    ids=str,
)
@pytest.mark.sampled(24)
def test_equals_the_formula(name, case):
    """Forward and both gradients, on the operands that `quantize` gives."""
    (left, right, numbers), recipe = case, RECIPES[name]
    check(floats(left, 1), floats(right, 2), numbers, recipe)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(48))
def test_equals_the_formula_with_nan(seed):
    """Every named recipe; odd and zero sizes, NaN and Inf in some elements."""
    name = [*NAMED][seed % len(NAMED)]
    left, right, numbers = random_numbers(100 + seed, (0, 1, 5, 31, 64) if seed % 3 else (1, 33))
    rng, operands = np.random.default_rng(seed), []
    for i, shape in enumerate((left, right)):
        x = np.array(floats(shape, seed + i))
        for bad in (np.nan, np.inf)[: int(rng.integers(0, 3))]:
            if x.size:
                x.flat[rng.integers(x.size)] = bad
        operands.append(jnp.asarray(x))
    check(*operands, numbers, NAMED[name])


def check(lhs, rhs, numbers, recipe):
    """The product and both gradients, against the oracle."""
    y, pull = jax.vjp(
        functools.partial(dot_general, dimension_numbers=numbers, recipe=recipe), lhs, rhs
    )
    want = jax.eval_shape(
        functools.partial(jax.lax.dot_general, dimension_numbers=numbers), lhs, rhs
    )
    assert (y.shape, y.dtype) == (want.shape, want.dtype)
    assert_within(y, oracle(lhs, rhs, numbers, recipe), "forward")
    dy = floats(y.shape, 3)
    for got, array, want, name in zip(
        pull(dy), (lhs, rhs), oracle(lhs, rhs, numbers, recipe, dy), ("lhs", "rhs"), strict=True
    ):
        assert (got.shape, got.dtype) == (array.shape, array.dtype)
        assert_within(got, want, f"gradient of {name}")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("implementation", [None, "dequantize", "xla", "scaled_dot"])
def test_small_integers_are_exact(dtype, implementation):
    """Every product and sum is exact, so a wrong index is a wrong bit."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.integers(-8, 9, s), dtype) for s in ((40, 96), (96, 33)))
    numbers = (((1,), (0,)), ((), ()))

    def f(x, w):
        return dot_general(
            x, w, numbers, preferred_element_type=jnp.float32, implementation=implementation
        )

    y, pull = jax.vjp(f, x, w)
    exact = [np.asarray(a, np.float64) for a in (x, w)]
    assert_bits_equal(y, np.float32(exact[0] @ exact[1]))
    dy = jnp.asarray(rng.integers(-4, 5, y.shape), jnp.float32)
    dx, dw = pull(dy)
    assert_bits_equal(dx, jnp.asarray(np.asarray(dy) @ exact[1].T, dtype))
    assert_bits_equal(dw, jnp.asarray(exact[0].T @ np.asarray(dy), dtype))


@pytest.mark.parametrize("implementation", [None, "dequantize", "xla", "scaled_dot"])
def test_small_normal_numbers_count(implementation):
    """Also in a block with the smallest scale, 2^-127; but XLA takes that scale for 0."""
    x, w = jnp.full((32, 64), 2.0**-124), jnp.full((64, 32), 2.0**120)
    assert (jax_mx.quantize(x).scales.view(jnp.uint8) == 0).all()
    y = np.asarray(matmul(x, w, implementation=implementation))
    assert (y == 4).all() or (implementation == "scaled_dot" and (y == 0).all())


@pytest.mark.parametrize("lead", [((2, 32), ()), ((), (3,)), ((2, 3, 32), (5,))])
def test_scaled_dot_of_operands_of_different_ranks(lead):
    """lax.scaled_dot wants both of one rank."""
    rng = np.random.default_rng(0)
    (left, right), k = lead, 64
    x, w = (jnp.asarray(rng.integers(-8, 9, s), jnp.float32) for s in ((*left, k), (k, *right)))
    numbers = (((x.ndim - 1,), (0,)), ((), ()))
    got = dot_general(x, w, numbers, implementation="scaled_dot")
    assert_bits_equal(got, np.tensordot(np.asarray(x), np.asarray(w), 1).astype(np.float32))


def test_fp8_products_of_rows():
    """The codes' product times both scales: the same floats as any other implementation's."""
    recipe = Recipe(window="row", gradient="mxfp8_e5m2")
    for shapes, numbers in (
        (((40, 96), (96, 33)), (((1,), (0,)), ((), ()))),
        (((2, 3, 40, 96), (3, 7, 96)), (((3,), (2,)), ((1,), (0,)))),
    ):
        x, w = (floats(shape, i) for i, shape in enumerate(shapes))
        results = []
        for implementation in ("fp8", "xla"):
            f = functools.partial(
                dot_general, dimension_numbers=numbers, recipe=recipe, implementation=implementation
            )
            y, pull = jax.vjp(f, x, w)
            results.append((y, *pull(floats(y.shape, 5))))
        for got, want in zip(*results, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    x, w = floats((40, 96)), floats((96, 33), 1)
    assert_refused(
        lambda: matmul(x, w, recipe=recipe, implementation="fp8", precision="highest"),
        NotImplementedError,
        "'fp8' sums with reduced precision, and the call asks for a higher one",
    )


def test_nan_stays_in_its_row():
    x = floats((64, 96)).at[5, 40].set(jnp.inf)
    w = floats((96, 32), 1).at[3, 7].set(jnp.nan)
    for implementation in ("xla", "dequantize", "scaled_dot"):
        y = np.asarray(matmul(x, w, implementation=implementation))
        bad = np.isnan(y)
        assert bad[5].all()
        assert bad[:, 7].all()
        assert bad.sum() == 32 + 64 - 1


# ---- operands that are quantized already ---
def test_a_frozen_operand_gets_no_gradient_and_the_other_is_right():
    rng = np.random.default_rng(0)  # small integers: any order of sums gives the same bits
    x, w = (jnp.asarray(rng.integers(-8, 9, s), jnp.float32) for s in ((40, 96), (96, 33)))
    numbers = (((1,), (0,)), ((), ()))
    q = jax_mx.quantize(w, axis=0)
    y, pull = jax.vjp(lambda x: dot_general(x, q, numbers), x)
    assert_bits_equal(y, dot_general(x, w, numbers))
    dy = floats(y.shape, 2)
    want = np.asarray(dy.astype(jnp.bfloat16), np.float64) @ np.asarray(q.dequantize(jnp.float32)).T
    np.testing.assert_allclose(pull(dy)[0], want, rtol=1e-5, atol=1e-4)
    q = jax_mx.quantize(x)
    y, pull = jax.vjp(lambda w: dot_general(q, w, numbers), w)
    assert_bits_equal(y, dot_general(x, w, numbers))
    want = np.asarray(q.dequantize(jnp.float32), np.float64).T @ np.asarray(dy.astype(jnp.bfloat16))
    np.testing.assert_allclose(pull(dy)[0], want, rtol=1e-5, atol=1e-4)
    both = dot_general(q, jax_mx.quantize(w, axis=0), numbers, preferred_element_type=jnp.float32)
    assert_bits_equal(both, y)
    assert dot_general(q, jax_mx.quantize(w, axis=0), numbers).dtype == jnp.bfloat16


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:.*by a key that is a constant of the program")
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_values(name):
    """Equal ones are one key of a cache, also from another process; keys are their own."""
    recipe = RECIPES[name]
    if not jax.tree.leaves(recipe):
        again = pickle.loads(pickle.dumps(recipe))
        assert again == recipe == copy.deepcopy(recipe)
        assert hash(again) == hash(recipe)
    assert recipe == jax.tree.map(lambda leaf: leaf, recipe)
    assert recipe != dataclasses.replace(recipe, gradient="mxfp6_e2m3")
    assert recipe != dataclasses.replace(recipe, wgrad=Product(hadamard=jax_mx.Hadamard(32)))
    assert (recipe.fold_in(1) == recipe.fold_in(2)) == (name != "gradients in mxfp4")
    traced = []

    @functools.partial(jax.jit, static_argnames="recipe")
    def f(x, w, recipe):
        traced.append(recipe)
        return jax_mx.matmul(x, w, recipe=recipe)

    x, w = floats((4, 64)), floats((64, 32))
    got, want = f(x, w, recipe), f(x, w, jax.tree.map(lambda leaf: leaf, recipe))
    assert_bits_equal(got, want)
    assert len(traced) == 1


@pytest.mark.parametrize("frozen", ["lhs", "rhs"])
def test_what_a_recipe_rotates_does_not_meet_what_is_frozen(frozen):
    """An MXArray was not rotated; transforms of gradients' products do not reach it."""
    x, w = floats((40, 96)), floats((96, 33), 1)
    q, numbers = (jax_mx.quantize(x), jax_mx.quantize(w, axis=0)), (((1,), (0,)), ((), ()))
    sides = (q[0], w) if frozen == "lhs" else (x, q[1])
    rotated, plain = Recipe(forward=Product(hadamard=Hadamard(16))), Recipe()
    sentence = f"matmul: {frozen} is quantized already, and the recipe rotates what"
    assert_refused(lambda: matmul(*sides, recipe=rotated), ValueError, sentence)
    once = rotated.quantize_weight(w, 0)
    if frozen == "lhs":
        assert_refused(lambda: matmul(q[0], once, recipe=rotated), ValueError, sentence)
    assert_bits_equal(matmul(*q, recipe=rotated), matmul(*q))
    backward = Recipe(dgrad=rotated.forward, wgrad=rotated.forward)

    def gradient(recipe):
        at = 1 if frozen == "lhs" else 0
        loss = lambda a: dot_general(*sides[:at], a, *sides[at + 1 :], numbers, recipe=recipe).sum()  # noqa: E731
        return jax.grad(loss)(sides[at])

    assert_bits_equal(gradient(backward), gradient(plain))


@pytest.mark.parametrize("layout", ["row_major", "blocked_128x4"])
@pytest.mark.parametrize("axis", [0, 1])
def test_frozen_weights_in_every_layout(layout, axis):
    x, w = floats((5, 96)), floats((160, 96) if axis else (96, 160), 1)
    q = jax_mx.quantize(w, "mxfp4_e2m1", axis=axis, scale_layout=layout)
    numbers = (((1,), (axis,)), ((), ()))
    want = dot_general(x, jax_mx.quantize(w, "mxfp4_e2m1", axis=axis), numbers)
    assert_bits_equal(dot_general(x, q, numbers), want)
    assert jax.grad(lambda x: dot_general(x, q, numbers).sum())(x).shape == x.shape


@pytest.mark.sampled(2, 1)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "square", "wgrad in bf16"])
def test_a_weight_quantized_once_gives_the_same(name):
    w, numbers, recipe = floats((96, 2, 16)), (((2,), (0,)), ((), ())), RECIPES[name]
    xs = floats((4, 2, 7, 96), 1)

    def loss(w, xs, once=False):
        rhs = recipe.quantize_weight(w, 0) if once else w

        def step(total, x):
            y = dot_general(x, rhs, numbers, recipe=recipe)
            return total + (y**2).sum(), None

        return jax.lax.scan(step, 0.0, xs)[0]

    results = [
        jax.value_and_grad(functools.partial(loss, once=once), (0, 1))(w, xs)
        for once in (False, True)
    ]
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    counted = quantizings(jax.grad(functools.partial(loss, once=True)), w, xs, within="scan")
    assert counted == (1 if "bf16" in name else 3)  # x one or both ways, y's gradient


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dequantized", [False, True])
@pytest.mark.parametrize("columns", [1, 40, 64])
def test_a_weight_quantized_once_beside_what_is_frozen(columns, dequantized):
    """Columns that 32 does not divide: the weight has zero ones, the frozen operand no rows."""
    x, w = (jnp.round(2 * floats(shape)) for shape in ((5, 64), (64, columns)))  # exact sums
    q = jax_mx.quantize(x)

    def f(rhs):
        return jax_mx.matmul(q, rhs)

    y, pull = jax.vjp(f, w)
    once = functools.partial(jax_mx.MXFP8.quantize_weight, dequantized=dequantized)
    got, back = jax.vjp(lambda w: f(once(w)), w)
    assert_bits_equal(got, y)
    assert_bits_equal(got, jax_mx.matmul(x, w))
    assert_bits_equal(back(y)[0], pull(y)[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "square", "wgrad in bf16"])
def test_a_weight_kept_dequantized_gives_the_same(name):
    """Bit for bit what "dequantize" gives, and no product dequantizes the weight again."""
    recipe, numbers = RECIPES[name], (((1,), (0,)), ((), ()))
    x, w = floats((40, 96)).astype(jnp.bfloat16), floats((96, 64), 1).astype(jnp.bfloat16)

    def f(x, w, dequantized):
        rhs = recipe.quantize_weight(w, 0, dequantized=dequantized)
        return dot_general(x, rhs, numbers, recipe=recipe, implementation="dequantize")

    results = [
        (y, *pull(jnp.ones_like(y)))
        for y, pull in (
            jax.vjp(functools.partial(f, dequantized=kept), x, w) for kept in (False, True)
        )
    ]
    for got, want in zip(*results, strict=True):
        assert_bits_equal(got, want)
    assert any(np.asarray(g, np.float32).any() for g in results[0][1:])
    weight = recipe.quantize_weight(w, 0, dequantized=True)
    forms = weight.contracted_form, weight.free_form
    assert [form.array.dtype for form in forms] == [jnp.bfloat16] * 2
    if name == "square":
        assert forms[0].array is forms[1].array
    assert_refused(
        lambda: recipe.quantize_weight(w, 0, dequantized=1), TypeError,
        "quantize_weight: dequantized must be a bool, got 1",
    )  # fmt: skip


@pytest.mark.parametrize("batch", [((0, 3), (2, 0)), ((3, 0), (0, 2))])
def test_batch_dimensions_in_any_order(batch):
    """A weight is quantized with them in the order in which the product names them."""
    x, w = floats((3, 8, 16, 2, 5)), floats((2, 16, 3, 20, 8), 1)
    numbers = ((2, 1), (1, 4)), batch
    got = dot_general(x, MXFP8.quantize_weight(w, (1, 4), batch[1]), numbers)
    np.testing.assert_allclose(got, dot_general(x, w, numbers), rtol=1e-5, atol=1e-5)


def test_quantized_weights_are_of_one_product():
    w = floats((64, 96))
    rhs = MXFP8.quantize_weight(w, 0)
    for call, error, sentence in (
        (lambda: matmul(floats((3, 64)), rhs, recipe="mxfp4"), ValueError,
         "matmul: rhs was quantized by another recipe"),
        (lambda: dot_general(rhs, rhs, (((0,), (0,)), ((), ()))), TypeError,
         "dot_general: lhs and rhs are weights; one must be the activations"),
        (lambda: MXFP8.quantize_weight(w, 2), ValueError,
         "quantize_weight: dimension 2 is out of range for rank 2"),
        (lambda: MXFP8.quantize_weight(w, (0, -2)), ValueError,
         "quantize_weight: contracting dimensions [0, 0] and batch dimensions [] name one twice"),
        (lambda: MXFP8.quantize_weight(w, 0, 0), ValueError, "and batch dimensions [0] name one"),
        (lambda: MXFP8.quantize_weight(w, True), TypeError,
         "quantize_weight: contracting and batch must be ints or sequences of them, got True and"),
        (lambda: MXFP8.quantize_weight(rhs), TypeError, "quantize_weight: w is quantized already"),
        (lambda: MXFP8.quantize_weight(jax_mx.quantize(w)), TypeError, "w is quantized already"),
        (lambda: MXFP8.fold_in(-1), ValueError, "fold_in: data must be from 0 to 2^32 - 1, got -1"),
        (lambda: MXFP8.fold_in(1.5), TypeError, "fold_in: data must be an integer, got 1.5"),
        (lambda: MXFP8.fold_in(jnp.ones(())), TypeError, "must be an integer, got float32"),
    ):  # fmt: skip
        assert_refused(call, error, sentence)
    wrong = MXFP8.quantize_weight(floats((32, 64)), 1)
    assert_refused(
        lambda: dot_general(floats((3, 32)), wrong, (((1,), (0,)), ((), ()))),
        ValueError,
        "dot_general: rhs was quantized for contracted dimensions [1] and batch dimensions []",
    )


def turned(seed):
    """A recipe that rotates in all products, by signs of this seed, as arrays of JAX."""
    turn = Product(hadamard=Hadamard.random(jax.random.key(seed)))
    return Recipe(forward=turn, dgrad=turn, wgrad=turn)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("product", ["matmul", "mlp", "ragged_dot", "moe"])
def test_signs_are_those_of_the_quantized_weight(product):
    """The other operand is rotated like the weight, whatever the signs of the product's recipe.

    Only wgrad, which does not read the weight, is rotated as the recipe says.
    """
    signs, other, third = map(turned, range(3))
    experts, weights = jnp.arange(24).reshape(12, 2) % 3, jnp.full((12, 2), 0.5)
    sizes = jnp.array([5, 0, 7], jnp.int32)
    lead = () if product in ("matmul", "mlp") else (3,)
    layer = {
        "matmul": lambda x, w1, w2, r: matmul(x, w1, recipe=r),
        "mlp": lambda x, w1, w2, r: jax_mx.mlp(x, w1, w2, recipe=r),
        "ragged_dot": lambda x, w1, w2, r: jax_mx.ragged_dot(x, w1, sizes, recipe=r),
        "moe": lambda x, w1, w2, r: jax_mx.moe(x, experts, weights, w1, w2, recipe=r),
    }[product]
    x, w1, w2 = floats((12, 64)), floats((*lead, 64, 64), 1), floats((*lead, 32, 64), 2)
    options = {"contracting": -2, "batch": range(len(lead))}

    @jax.jit  # signs are arguments, whose values nobody knows
    def both(x, w1, w2, first, second, recipe):
        def loss(x, w1, w2):
            once = first.quantize_weight(w1, **options), second.quantize_weight(w2, **options)
            return (layer(x, *once, recipe).astype(jnp.float32) ** 2).mean()

        return jax.value_and_grad(loss, (0, 1, 2))(x, w1, w2)

    want = both(x, w1, w2, signs, signs, signs)
    same = both(x, w1, w2, signs, signs, dataclasses.replace(other, wgrad=signs.wgrad))
    for got, one in zip(*map(jax.tree.leaves, (same, want)), strict=True):
        assert_bits_equal(got, one)
    # Each weight may have signs of its own, and the product's recipe others still.
    mixed = both(x, w1, w2, signs, third, other)
    for got, one in zip(*map(jax.tree.leaves, (mixed, want)), strict=True):
        error = np.linalg.norm(np.asarray(got - one)) / max(np.linalg.norm(np.asarray(one)), 1e-30)
        assert error < 0.1, f"{error} where quantizing twice differs by 0.05"


# ---- matmul and einsum ---
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("a", "b"),
    [((3, 64), (64, 5)), ((64,), (64, 5)), ((3, 64), (64,)), ((64,), (64,)), ((2, 3, 64), (64, 5)),
     ((3, 64), (2, 64, 5)), ((2, 3, 64), (2, 64, 5)), ((4, 1, 3, 64), (2, 64, 5)),
     ((2, 3, 64), (64,)), ((64,), (2, 64, 5)), ((*[1] * 27, 3, 64), (64, 5))],
)  # fmt: skip
def test_matmul_has_numpys_shapes(a, b):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.integers(-8, 9, s), jnp.float32) for s in (a, b))
    assert_bits_equal(matmul(x, w), jnp.matmul(x, w))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("subscripts", "a", "b"),
    [("bsd,dhk->bshk", (2, 3, 32), (32, 4, 8)), ("bshk,hkd->bsd", (2, 3, 4, 8), (4, 8, 5)),
     ("bqhd,bkhd->bhqk", (2, 3, 4, 32), (2, 5, 4, 32)), ("...d,df", (2, 3, 32), (32, 5)),
     ("...md,...df->...mf", (2, 4, 3, 32), (2, 4, 32, 5)), ("dm,df->fm", (32, 3), (32, 5)),
     ("md,df->m", (3, 32), (32, 5)), ("xmd , df -> mf", (2, 3, 32), (32, 5))],
)  # fmt: skip
def test_einsum_is_jaxs(subscripts, a, b):
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.integers(-2, 3, s), jnp.float32) for s in (a, b))
    assert_bits_equal(einsum(subscripts, x, w), jnp.einsum(subscripts, x, w))
    ours, jaxs = (
        jax.grad(lambda x, w, f=f: f(subscripts, x, w).sum(), (0, 1))(x, w)
        for f in (einsum, jnp.einsum)
    )
    for got, want in zip(ours, jaxs, strict=True):
        assert_bits_equal(got, want)


def test_einsum_sums_what_stands_in_one_operand():
    """NumPy's arrays and JAX's give the same."""
    x, w = np.asarray(floats((3, 5, 32))), floats((32, 4))
    want = einsum("ak,kn->an", x.sum(1), w)
    for array in (x, jnp.asarray(x)):
        assert_bits_equal(einsum("abk,kn->an", array, w), want)


@pytest.mark.thorough
def test_einsum_splits_its_result_in_any_order_of_letters():
    """On automatic meshes as on explicit ones, whether the result is transposed or not."""
    x, w = (jnp.round(2 * floats(shape)) for shape in ((8, 4, 64), (4, 64, 16)))  # sums are exact
    for axis_type in jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit:
        mesh = jax.make_mesh((2,), ("a",), axis_types=(axis_type,), devices=jax.devices()[:2])
        with jax.set_mesh(mesh):
            for subscripts in ("mbk,bkn->bmn", "mbk,bkn->nbm", "bkn,mbk->mnb"):
                operands = (x, w) if subscripts[0] == "m" else (w, x)
                split = jax.sharding.PartitionSpec("a")
                got = jax.jit(functools.partial(einsum, subscripts, out_sharding=split))(*operands)
                assert got.sharding.spec[0] == "a" and not any(got.sharding.spec[1:])
                assert_bits_equal(got, einsum(subscripts, *operands))


# ---- residuals and exports ---


def layer(w, x):
    return jnp.tanh(matmul(x, w))


def test_nothing_is_quantized_twice():
    x, w = floats((64, 64)), floats((64, 64), 1)

    def loss(w, policy=None, remat=False):
        f = jax.checkpoint(layer, policy=policy) if remat else layer
        return f(w, f(w, x)).sum()

    # The first layer's x has no gradient: w is quantized one way for it, x both ways, and so on.
    assert quantizings(jax.grad(loss), w) == 3 + 1 + 4 + 2
    kept = jax.checkpoint_policies.save_only_these_names(jax_mx.CHECKPOINT_NAME)
    full = quantizings(jax.grad(lambda w: loss(w, None, True)), w)
    saved = quantizings(jax.grad(lambda w: loss(w, kept, True)), w)
    assert full > saved == quantizings(jax.grad(loss), w)


def test_residuals_are_mx():
    """The backward pass keeps half the bytes of bfloat16, and the scales."""
    x, w = floats((128, 256), dtype=jnp.bfloat16), floats((256, 512), 1, jnp.bfloat16)
    _, pull = jax.vjp(matmul, x, w)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(pull) if hasattr(leaf, "nbytes"))
    assert kept <= 0.55 * (x.nbytes + w.nbytes)


def test_export_of_any_batch_with_a_weight_inside():
    """XLA folds a constant into another order of dimensions where shapes have symbols."""
    x, w = floats((5, 64), dtype=jnp.bfloat16), floats((64, 64), 1, jnp.bfloat16)
    batch = jax.export.symbolic_shape("b")

    def f(x):
        y = matmul(x, w)
        return y, jax_mx.quantize(w, axis=0, transpose=True).dequantize(jnp.float32)

    exported = jax.export.export(jax.jit(f), disabled_checks=jax_mx.DISABLE_EXPORT_CHECKS)(
        jax.ShapeDtypeStruct((*batch, 64), x.dtype)
    )
    for got, want in zip(exported.call(x), f(x), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("recipe", [MXFP8, dataclasses.replace(MXFP8, window="row")], ids=str)
def test_gradients_of_any_batch_are_exported(recipe):
    x, w = floats((5, 64), dtype=jnp.bfloat16), floats((64, 64), 1, jnp.bfloat16)
    loss = lambda x, w: (matmul(x, w, recipe=recipe) ** 2).sum()  # noqa: E731
    both = jax.jit(jax.grad(loss, (0, 1)))
    any_batch = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b"), 64), x.dtype)
    exported = jax.export.export(both, disabled_checks=jax_mx.DISABLE_EXPORT_CHECKS)(any_batch, w)
    for got, want in zip(exported.call(x, w), both(x, w), strict=True):
        np.testing.assert_array_equal(got, want)


def test_what_a_program_takes_is_serialized():
    """Weights that are quantized once, and groups of tokens, are arguments of exported programs."""
    x, w = floats((8, 64)), jax_mx.MXFP8.quantize_weight(floats((64, 32), 1))
    groups = jax_mx.Groups.from_experts(np.array([[0], [2]]), 3)
    f = jax.jit(lambda x, w, groups: (matmul(x, w), groups))
    options = {"disabled_checks": jax_mx.DISABLE_EXPORT_CHECKS}
    exported = jax.export.deserialize(jax.export.export(f, **options)(x, w, groups).serialize())
    got, want = exported.call(x, w, groups), f(x, w, groups)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_array_equal(a, b)


# ---- messages ---
def test_bad_calls_get_one_sentence():
    x, w = floats((8, 64)), floats((64, 32))
    plain = (((1,), (0,)), ((), ()))
    for call, error, sentence in (
        (lambda: matmul(floats((8, 40)), floats((40, 8))), ValueError,
         "matmul: the contracted length is 40, not a multiple of the block length 32; pad "
         "both operands with zeros to 64"),
        (lambda: dot_general(x, w, (((), ()), ((), ()))), ValueError,
         "dot_general: no dimension is contracted"),
        (lambda: dot_general(x, w, (((0,), (0,)), ((), ()))), ValueError,
         "dot_general: contracted dimensions are [8] of lhs and [64] of rhs; they must agree"),
        (lambda: dot_general(x, w, (((2,), (0,)), ((), ()))), ValueError,
         "dimension_numbers name the dimensions [2] of lhs, which has the shape (8, 64)"),
        (lambda: dot_general(x, w, 3), TypeError, "dimension_numbers must be (("),
        (lambda: dot_general(x.astype(int), w, plain), TypeError, "dot_general: lhs is int32"),
        (lambda: dot_general("x", w, plain), TypeError, "dot_general: lhs must be an array"),
        (lambda: matmul(x, jax_mx.quantize(w, axis=1)), ValueError,
         "matmul: rhs has blocks along dimension 1, the product contracts dimension 0"),
        (lambda: matmul(x, w, recipe="mxfp9"), ValueError,
         "matmul: recipe 'mxfp9' is unknown; use a Recipe or one of 'auto', 'mxfp8'"),
        (lambda: matmul(x, w, recipe=MXFP8_E4M3), TypeError, "recipe must be a Recipe or one of"),
        (lambda: matmul(x, w, implementation="cublas"), ValueError,
         "implementation 'cublas' is unknown; use one of"),
        (lambda: matmul(x, w, preferred_element_type=jnp.int8), TypeError,
         "preferred_element_type is int8"),
        (lambda: matmul(x, w, implementation="fp8"), NotImplementedError,
         "matmul: 'fp8' wants one scale for each row"),
        (lambda: einsum("ii,ij->ij", w[:32], w[:32]), ValueError, "'i' stands twice in 'ii'"),
        (lambda: dot_general(x, w, (((1.5,), (0,)), ((), ()))), TypeError, "sequences of ints"),
        (lambda: einsum("ij,jk,kl", x, w), ValueError, "name 3 operands, this takes two"),
        (lambda: einsum("ij,jk->iz", x, w), ValueError, "must name operands' letters once"),
        (lambda: einsum("ijk,jk->i", x, w), ValueError, "do not fit an operand of 2 dimensions"),
        (lambda: einsum(3, x, w), TypeError, "einsum: subscripts must be a string, got 3"),
        (lambda: matmul(None, w), TypeError, "matmul: a must be an array, got None"),
        (lambda: einsum("ij,jk->ik", x, "w"), TypeError, "einsum: b must be an array, got 'w'"),
        (lambda: matmul(jnp.float32(1), w), ValueError, "must have dimensions, got scalars"),
        (lambda: Recipe("fp8"), ValueError, "Recipe: lhs 'fp8' is unknown"),
        (lambda: Recipe(wgrad="fp8"), ValueError, "Product: format 'fp8' is unknown"),
        (lambda: Recipe(forward=Product(rounding=Stochastic(KEY))), ValueError,
         "Recipe: forward has no gradient to round"),
        (lambda: Recipe(block=(32, 32), dgrad=Product(hadamard=Hadamard(16))), ValueError,
         "Recipe: dgrad.hadamard goes along one axis, square blocks of rhs span two"),
        (lambda: Product(rounding=KEY), TypeError,
         "Product: rounding must be None or a Stochastic, got"),
        (lambda: Product(hadamard=16), TypeError,
         "Product: hadamard must be None or a Hadamard, got 16"),
        (lambda: Product("bf16", rounding=Stochastic(KEY)), ValueError,
         "Product: rounding is of what is quantized, and format='bf16' quantizes nothing"),
        (lambda: Product("bf16", hadamard=Hadamard(16)), ValueError, "Product: hadamard is of"),
        (lambda: Product("bf16", window=256), ValueError, "Product: window is of what is"),
        (lambda: Product(window=64), ValueError, "Product: window must be 32, 128, 256, 'row'"),
        (lambda: Product(window=(128, 128)), ValueError, "Product: window is along one axis"),
        (lambda: Recipe(block=(32, 32), dgrad=Product(window=256)), ValueError,
         "Recipe: square blocks have a window of 32"),
        (lambda: Product(rounding=Stochastic(KEY, prescale=0.75)), ValueError,
         "Product: rounding has a prescale, by which gradients would be too small; leave it out"),
        (lambda: matmul(floats((8, 96)), floats((96, 8)),
                        recipe=Recipe(forward=Product(hadamard=Hadamard(64)))), ValueError,
         "matmul: the contracted length is 96, not a multiple of the size of the recipe's "
         "Hadamard transform, 64; pad both operands with zeros to 128"),
    ):  # fmt: skip
        assert_refused(call, error, sentence)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_hessian_by_a_weight(dtype):
    """XLA's CPU has no product of bfloat16 in float32, as its derivative once was."""
    x, w = jnp.ones((4, 32), dtype), jnp.ones((32, 3), dtype)
    hessian = jax.hessian(lambda w: (matmul(x, w, recipe="bf16") ** 2).sum())(w)
    want = 8 * np.einsum("kl,nm->knlm", np.ones((32, 32)), np.eye(3))
    np.testing.assert_array_equal(np.asarray(hessian, np.float64), want)


def small(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).integers(-1, 2, shape), jnp.float32)


def by_row(x, w):
    """The product over groups as JAX differentiates it as often as one likes."""
    return jnp.einsum("tk,tkn->tn", x, w[np.repeat([0, 2], [5, 15])])


SIZES, WS = jnp.array([5, 0, 15], jnp.int32), small((3, 32, 64), 1)
KN, Q = jax_mx.quantize(WS, axis=1), jax_mx.quantize(WS[0], axis=0)
NK = jax_mx.quantize(WS.swapaxes(1, 2), axis=2)
IN_BF16 = {  # a function of x and w, the same by JAX
    "ragged_dot": (lambda x, w: jax_mx.ragged_dot(x, w, SIZES, recipe="bf16"), by_row),
    "matmul": (lambda x, w: matmul(x, w[0], recipe="bf16"), lambda x, w: x @ w[0]),
    "frozen": (lambda x, w: matmul(x, Q, recipe="bf16"), lambda x, w: x @ WS[0]),
    "frozen left": (
        lambda x, w: jax_mx.einsum("kn,tk->tn", Q, x, recipe="bf16"), lambda x, w: x @ WS[0],
    ),
    "ragged_dot, frozen": (
        lambda x, w: jax_mx.ragged_dot(x, KN, SIZES, recipe="bf16"), lambda x, w: by_row(x, WS),
    ),
    "ragged_dot, frozen (G, N, K)": (
        lambda x, w: jax_mx.ragged_dot(x, NK, SIZES, recipe="bf16"), lambda x, w: by_row(x, WS),
    ),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", IN_BF16)
def test_bf16_has_all_derivatives(name):
    """Both modes, one in the other, exact: all that is rounded is a small integer."""
    x, w, moves = small((20, 32), 2), small((3, 32, 64), 3), (small((20, 32), 4), WS)

    def derivatives(f):
        loss = lambda x, w: (f(x, w) ** 2).sum()  # noqa: E731
        both = jax.grad(loss, (0, 1))
        along = lambda *args: sum((d * t).sum() for d, t in zip(both(*args), moves, strict=True))  # noqa: E731
        return (
            jax.jvp(f, (x, w), moves),
            jax.jvp(both, (x, w), moves),
            jax.grad(along, (0, 1))(x, w),
            jax.jacfwd(lambda x: loss(x, w))(x) if name == "matmul" else (),
        )

    got, want = (jax.jit(lambda f=f: derivatives(f))() for f in IN_BF16[name])
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_second_derivatives_are_refused():
    x, w = floats((32, 64)), floats((64, 32))
    with pytest.raises(NotImplementedError, match=r"^matmul: .* recipe='floats' has all"):
        jax.jvp(lambda x: matmul(x, w), (x,), (x,))
    sizes, up = jnp.array([20, 12], jnp.int32), floats((64, 64))
    for op, f in {
        "matmul": lambda x: matmul(x, w),
        "einsum": lambda x: jax_mx.einsum("tk,kn->tn", x, w),
        "ragged_dot": lambda x: jax_mx.ragged_dot(x, jnp.stack([w, w]), sizes),
        "mlp": lambda x: jax_mx.mlp(x, up, w[:32]),
    }.items():
        with pytest.raises(NotImplementedError, match=f"^{op}: derivatives "):
            jax.hessian(lambda x, f=f: f(x).sum())(x)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("op", ["matmul", "ragged_dot", "mlp", "moe"])
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_second_derivatives_by_a_quantized_weight_are_refused(op, wrap):
    """A penalty of the gradient, which reads no float of the weight."""
    x, up, stack = floats((32, 64)), floats((1, 64, 64)), {"contracting": 1, "batch": 0}
    sizes, experts, shares = jnp.array([32], jnp.int32), jnp.zeros((32, 1), jnp.int32), [[1.0]] * 32
    q = MXFP8.quantize_weight
    f, w = {
        "matmul": (lambda x, w: matmul(x, q(w)), up[0]),
        "ragged_dot": (lambda x, w: jax_mx.ragged_dot(x, q(w, **stack), sizes), up),
        "mlp": (lambda x, w: jax_mx.mlp(x, up[0], q(w)), up[0, :32]),
        "moe": (lambda x, w: jax_mx.moe(x, experts, shares, up, q(w, **stack)), up[:, :32]),
    }[op]

    def penalty(x, w):
        return (jax.grad(lambda x: wrap(f)(x, w).sum())(x) ** 2).sum()

    assert jnp.isfinite(penalty(x, w))
    with pytest.raises(NotImplementedError, match=f"{op}: derivatives of derivatives"):
        jax.grad(penalty, 1)(x, w)


def test_a_recipe_with_another_field():
    recipe = dataclasses.replace(MXFP8, window=256)
    assert recipe == Recipe(window=256)
    assert {use.window for name in ("lhs", "rhs") for use in recipe.uses(name)} == {256}
    assert dataclasses.replace(Recipe(weight_window=(128, 128)), weight_window=None) == MXFP8
    for name in ("forward", "dgrad", "wgrad"):
        call = functools.partial(Recipe, **{name: 3})
        assert_refused(call, TypeError, f"Recipe: {name} must be a Product, a format, 'bf16' or")
    assert_refused(lambda: MXFP8.fold_in(jnp.arange(2)), TypeError, "must be an integer, got int32")


def test_products_have_windows_of_their_own(monkeypatch):
    """Each operand's both forms; two windows are two reads, whose bytes are `quantize`'s."""
    recipe = Recipe(window="row", wgrad=Product(window=128))
    assert [use.window for use in recipe.uses("lhs")] == ["row", 128]
    assert [use.window for use in recipe.uses("rhs")] == ["row", "row"]
    assert [use.window for use in recipe.uses("gradient")] == ["row", 128]
    tiles = Recipe(wgrad=Product(window=256), weight_window=(128, 128))
    assert [use.window for use in tiles.uses("rhs")] == [(128, 128)] * 2
    asked = []
    monkeypatch.setattr(
        operand, "called", lambda op, *args, **kw: asked.append(op) or called(op, *args, **kw)
    )
    x = floats((256, 512))
    first, second = operand.Unquantized(x, recipe).forms()
    assert asked == ["quantize", "quantize"]
    assert_same_array(first.array, jax_mx.quantize(x, window="row"))
    down = jax_mx.quantize(x, axis=-2, transpose=True, window=128)
    assert_same_array(second.array, down)
    operand.Unquantized(x, Recipe(window="row")).forms()
    assert asked[2:] == ["quantize_both"]


def test_a_product_of_an_older_program_has_no_window():
    """Static fields that a serialized recipe lacks have their defaults."""
    assert recipes._from_json(Product, b"[null]") == (None, None, False)
    assert recipes._from_json(Recipe, json.dumps(["mxfp8_e4m3"] * 3).encode())[3:] == (
        jax_mx.RCEIL, 32, 32, None, None, "rhs"
    )  # fmt: skip


def test_a_recipe_is_a_tree_of_any_children():
    """Where None is a leaf, too, as Orbax has it."""
    weight = MXFP8.quantize_weight(floats((64, 32)))
    for tree in (MXFP8, jax_mx.mxfp4_backward(jax.random.key(0)), weight):
        named = jax.tree.map(lambda _: "a leaf", tree, is_leaf=lambda leaf: leaf is None)
        assert {*jax.tree.leaves(named)} == {"a leaf"}
        again = jax.tree.map(lambda leaf: leaf, tree)
        assert jax.tree.structure(again) == jax.tree.structure(tree)


# ---- precision ---
EXACT = ("high", "highest", "float32", "tensorfloat32", "F32_F32_F32", "BF16_BF16_F32")
FAST = (None, "default", "bfloat16", "ANY_F8_ANY_F8_F32_FAST_ACCUM", "F16_F16_F16")


@pytest.mark.parametrize("precision", [*EXACT, *FAST])
def test_what_asks_for_more_than_fp8_tensor_cores_give(precision):
    """By name, as JAX's own objects, as the default of a context; of dense and grouped products."""
    presets, sizes = jax.lax.DotAlgorithmPreset.__members__, jnp.array([20, 12], jnp.int32)
    same = presets.get(precision) or (precision and jax.lax.Precision(precision))
    x, w = floats((32, 256)), floats((256, 128))
    recipe = {"recipe": Recipe(window=256)}

    def asks(f, **options):
        (call,) = jax_mx.explain(lambda: f(**recipe, **options)).calls
        return call.key.how.endswith("highest precision")

    for f in (
        functools.partial(matmul, x, w),
        functools.partial(jax_mx.ragged_dot, x, jnp.stack([w, w]), sizes),
    ):
        with jax.default_matmul_precision(precision):
            assert asks(f) == (precision in EXACT)
        for asked in (precision, same, (precision, precision)):
            assert asks(f, precision=asked) == (precision in EXACT)


def test_an_algorithm_of_the_users_own():
    algorithm = functools.partial(jax.lax.DotAlgorithm, np.float32, np.float32)
    assert is_exact("", algorithm(np.float32)) and not is_exact("", algorithm(np.float16))
    fp8 = jnp.float8_e4m3fn
    assert not is_exact("", jax.lax.DotAlgorithm(fp8, fp8, np.float32))
    assert_refused(lambda: is_exact("op", 3), TypeError, "op: precision must be one of 'default'")


# ---- our own kernels as an implementation ---
def _contraction(shapes, numbers, recipe, dtype=jnp.bfloat16, **options):
    """A forward product, of a recipe's operands or, of `recipe` None, floats times MXFP8."""
    x, w = (jnp.zeros(shape, dtype) for shape in shapes)
    dims = [pair[0] - x.ndim for pair, x in zip(numbers[0], (x, w), strict=True)]
    sides = [x, w]
    if recipe is not None:
        sides[0] = jax_mx.quantize(x, recipe.lhs, axis=dims[0], window=recipe.window)
    window = recipe.uses("rhs")[0].window if recipe is not None else 32
    axis = -1 if window == (128, 128) else dims[1]
    sides[1] = jax_mx.quantize(w, "mxfp8_e4m3", axis=axis, window=window)
    return Contraction(Numbers(*numbers, np.dtype(jnp.bfloat16)), *sides, **options)


def _to_float32(contraction):
    numbers = dataclasses.replace(contraction.numbers, dtype=np.dtype(np.float32))
    return dataclasses.replace(contraction, numbers=numbers)


def _abstract(contraction):
    sides = jax.tree.map(jax.typeof, (contraction.lhs, contraction.rhs))
    return Contraction(contraction.numbers, *sides, unsplit=contraction.unsplit)


def _chosen(contraction, chip):
    return decide.decided(_abstract(contraction), "cuda", [chip]).name


PLAIN = (((1,), (1,)), ((), ()))


@pytest.mark.parametrize(
    ("recipe", "rows", "options", "name"),
    [
        (Recipe(window=256), 512, {}, "cutedsl"),
        (Recipe(window=128, weight_window=(128, 128)), 512, {}, "cutedsl"),
        (Recipe(window=256), 512, {"unsplit": "is not split"}, "dequantize"),
        (Recipe(window="row"), 512, {}, "cutedsl"),
        (Recipe(window="row"), 512, {"unsplit": "is not split"}, "fp8"),
        (MXFP8, 17, {}, "dequantize"),
        (MXFP8, 16, {}, "cutedsl"),
        (MXFP8, 16, {"unsplit": "is not split"}, "dequantize"),
        (None, 16, {}, "cutedsl"),
        (None, 17, {}, "dequantize"),
    ],
)
def test_the_rule_on_hopper(recipe, rows, options, name):
    product = _contraction(((rows, 512), (384, 512)), PLAIN, recipe, **options)
    assert _chosen(product, "sm_90") == name
    assert _chosen(product, "sm_80") == "dequantize"


@pytest.mark.parametrize(
    ("rows", "k", "n", "name"),
    [
        (1024, 7168, 2048, "cutedsl"),
        (1025, 7168, 2048, "dequantize"),
        (1024, 2880, 2880, "dequantize"),
        (16, 2880, 2880, "cutedsl"),
        (512, 16384, 4096, "cutedsl"),
        (512, 65536, 512, "dequantize"),  # as a narrow weight's gradient
        (16, 65536, 512, "cutedsl"),
    ],
)
@pytest.mark.parametrize("recipe", [MXFP8, None])
def test_kernels_read_codes_for_few_rows(recipe, rows, k, n, name):
    """More of them where the weight is large."""
    x = jax.eval_shape(lambda: jnp.zeros((rows, k), jnp.bfloat16))
    x = x if recipe is None else jax.eval_shape(jax_mx.quantize, x)
    w = jax.eval_shape(lambda: jax_mx.quantize(jnp.zeros((n, k), jnp.bfloat16)))
    product = Contraction(Numbers(*PLAIN, np.dtype(jnp.bfloat16)), x, w)
    assert decide.decided(product, "cuda", ["sm_90"]).name == name


@pytest.mark.parametrize(
    ("x", "w", "block", "name"),
    [
        ((16, 64), (64, 96), (32, 32), "r128_free"),
        ((16, 64), (96, 64), 32, "r16"),
        ((512, 64), (4096, 64), 32, "r128"),
        ((512, 64), (8192, 64), 32, "r256"),
    ],
)
def test_the_kernel_that_runs_is_the_one_that_was_asked_for(x, w, block, name, monkeypatch):
    """An installation may hold the one and lack the other."""
    monkeypatch.setattr(kernels, "_has_few_rows", lambda call: True)
    x = jax_mx.quantize(jnp.ones(x, jnp.bfloat16))
    w = jax_mx.quantize(jnp.ones(w, jnp.bfloat16), block=block)
    numbers = (((1,), (w.shape.index(64),)), ((), ()))
    numbers = Numbers(*numbers, np.dtype(np.float32))
    served = kernels.support(Contraction(numbers, x, w), ["sm_90"])
    (product,) = served.kernels
    assert product.name == f"matmul_mxfp8_e4m3_{name}"
    took, y = [], jnp.zeros((x.shape[0], w.size // 64))
    monkeypatch.setattr(primitives, "by_plan", lambda plan, *_: took.append(plan) or y)
    run = lambda x, w: kernels.run(Contraction(numbers, x, w), served)  # noqa: E731
    assert jax.eval_shape(run, x, w).shape == y.shape
    assert [plan.product("cutedsl").name for plan in took] == [product.name]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("shapes", "numbers", "recipe"),
    [
        (((40, 512), (48, 512)), PLAIN, Recipe(window=256)),
        (((40, 512), (256, 512)), PLAIN, Recipe(window=128, weight_window=(128, 128))),
        (((40, 512), (512, 256)), (((1,), (0,)), ((), ())),
         Recipe(window=128, weight_window=(128, 128))),
        (((3, 5, 256), (3, 40, 256)), (((2,), (2,)), ((0,), (0,))), Recipe(window=256)),
        (((2, 5, 256), (40, 256)), (((2,), (1,)), ((), ())), Recipe(window=128)),
        (((2, 5, 256), (40, 256)), (((2,), (1,)), ((), ())), Recipe(window="row")),
        (((2, 5, 256), (40, 256)), (((2,), (1,)), ((), ())), None),
        (((2, 5, 256), (40, 256)), (((2,), (1,)), ((), ())), MXFP8),
        (((3, 256, 5), (3, 256, 40)), (((1,), (1,)), ((0,), (0,))), Recipe(block=(32, 32))),
        (((40, 256), (256, 48)), (((1,), (0,)), ((), ())), MXFP4),
        (((256,), (40, 256)), (((0,), (1,)), ((), ())), MXFP4),
    ],
)  # fmt: skip
def test_kernels_take_any_arrangement(shapes, numbers, recipe, monkeypatch):
    """The steps before and after the kernel, with the reference in its place."""
    product = _to_float32(_contraction(shapes, numbers, recipe))
    assert kernels.support(product, ["sm_90"])
    rng = np.random.default_rng(0)

    def numbered(leaf):
        if leaf.dtype == jnp.float8_e8m0fnu:
            ones = jnp.full(leaf.shape, 127, jnp.uint8)  # equal ones, as windows want them
            return ones.view(leaf.dtype)
        return jnp.asarray(rng.integers(-4, 5, leaf.shape), leaf.dtype)

    lhs, rhs = jax.tree.map(numbered, (product.lhs, product.rhs))
    product = dataclasses.replace(product, lhs=lhs, rhs=rhs)
    monkeypatch.setattr(kernels, "NAME", "xla")
    want = _by_xla(product)
    for tile in (None, *ROWS):  # the reference takes any tiling, and kernels that they have
        served = kernels.support(product, ["sm_90"], tile=tile)
        assert_bits_equal(kernels.run(product, served), want)


def _by_xla(product):
    row = implementations.IMPLEMENTATIONS["xla"]
    return row.run(product, row.support(product, []))


@pytest.mark.parametrize(
    ("shapes", "numbers", "options"),
    [
        (((40, 48), (48, 64)), (((1,), (0,)), ((), ())), {}),
        (((3, 5, 7), (3, 7, 64)), (((2,), (1,)), ((0,), (0,))), {}),
        (((5, 48), (2, 48, 64)), (((1,), (1,)), ((), ())), {}),
        (((2, 5, 64), (64, 96)), (((2,), (0,)), ((), ())), {"block": (32, 32)}),
        (((5, 10), (64, 10)), PLAIN, {"axis": 0, "format": "mxfp4_e2m1"}),
    ],
)
def test_kernels_read_weights_whose_blocks_run_along_free_axes(
    shapes, numbers, options, monkeypatch
):
    """As they lie, square blocks too: codes are not transposed. The reference is in place."""
    x, w = floats(shapes[0], dtype=jnp.bfloat16), floats(shapes[1], 1)
    w = jax_mx.quantize(w, **{"format": "mxfp8_e4m3", **options})
    product = Contraction(Numbers(*numbers, np.dtype(np.float32)), x, w)
    (kernel,) = kernels.support(product, ["sm_90"]).kernels
    assert kernel.name == f"matmul_{w.format.name}_r128_free"
    monkeypatch.setattr(kernels, "NAME", "xla")
    got = kernels.run(product, kernels.support(product, ["sm_90"]))
    want = _by_xla(product)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    if shapes[1][0] == shapes[0][-1]:
        assert "transpose" not in str(
            jax.make_jaxpr(lambda w: contraction.matrix(w, 0, (), True)[0])(w)
        )


def test_processes_agree_on_what_multiplies(monkeypatch):
    """Without the DSL a process would dequantize where others have a kernel."""
    product = _abstract(_contraction(((16, 512), (384, 512)), PLAIN, MXFP8))
    target = targets.Target("cuda", ["sm_90"])
    assert decide.decide(product, target).implementation == "cutedsl"
    monkeypatch.setattr(toolchains, "_installed", lambda name: None)
    monkeypatch.setattr(store, "find", lambda variant, arch: None)
    assert decide.decide(product, target).implementation == "dequantize"
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(RuntimeError, match="all must take the same: install them everywhere"):
        decide.decide(product, target)
    numbers = dataclasses.replace(product.numbers, implementation="dequantize")
    named = dataclasses.replace(product, numbers=numbers)
    assert decide.decide(named, target).implementation == "dequantize"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 100, 300])
@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp4_e2m1"])
def test_few_rows_of_codes_are_exact_on_a_gpu(rows, format):
    """Whichever implementation serves them, forward and to the gradient; integers are exact."""
    rng = np.random.default_rng(rows)
    x, dy = (rng.integers(-2, 3, (rows, n)).astype(np.float32) for n in (4096, 2560))
    w = rng.integers(-2, 3, (2560, 4096)).astype(np.float32)
    x[:, ::32], dy[:, ::32], w[:, ::32] = 2, 2, 2  # no element of a block is rounded
    weight = jax_mx.quantize(jnp.asarray(w, jnp.bfloat16), format)

    @jax.jit
    def both(x, dy):
        y, pull = jax.vjp(
            lambda x: dot_general(x, weight, PLAIN, preferred_element_type=jnp.float32), x
        )
        return y, *pull(dy)

    y, dx = both(jnp.asarray(x, jnp.bfloat16), jnp.asarray(dy))
    np.testing.assert_array_equal(y, x @ w.T)
    np.testing.assert_array_equal(dx, jnp.asarray(dy @ w).astype(jnp.bfloat16))


def test_a_frozen_weight_serves_both_products_as_it_lies():
    w = jax_mx.quantize(floats((96, 64)), "mxfp4_e2m1")
    f = jax.value_and_grad(lambda x: dot_general(x, w, PLAIN).astype(jnp.float32).sum())
    rows = jax_mx.explain(f, floats((16, 64), dtype=jnp.bfloat16), device="sm_90").calls
    assert all("96x64 along -1" in str(row.key) for row in rows)
    (row,) = (row for row in rows if "contracts 1:0" in row.key.how)
    assert row.chosen == "cutedsl"


def test_what_kernels_do_not_take_gets_one_sentence():
    shapes = ((40, 512), (48, 512))
    for product, sentence in (
        (_contraction(shapes, PLAIN, None, jnp.float32), "no float32"),
        (
            _contraction(
                shapes, PLAIN, Recipe(window=256), unsplit="is not split; use jax.shard_map"
            ),
            "use jax.shard_map",
        ),
    ):
        answer = kernels.support(product, ["sm_90"])
        assert not answer
        assert sentence in answer.reason
        assert "\n" not in answer.reason


def test_keys_of_shards():
    """Inside shard_map the recipe's keys may vary where no operand does."""
    recipe = Recipe(dgrad=Product(rounding=Stochastic(KEY)), gradient="mxfp4_e2m1")
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices("cpu")[:2])
    x, w, sizes = jnp.ones((32, 64)), jnp.ones((64, 32)), jnp.array([32], jnp.int32)

    def step(x, w):
        step_recipe = recipe.fold_in(jax.lax.axis_index("d"))
        dense = jax_mx.matmul(x, w, recipe=step_recipe).sum()
        return dense + jax_mx.ragged_dot(x, w[None], sizes, recipe=step_recipe).sum()

    one = jax.jit(jax.grad(step, (0, 1)))
    spec = jax.sharding.PartitionSpec()
    run = jax.shard_map(lambda x, w: jax.tree.map(lambda g: jax.lax.pmean(g, "d"), one(x, w)),
                        mesh=mesh, in_specs=(spec, spec), out_specs=spec)  # fmt: skip
    dx, dw = run(x, w)
    assert dx.shape == x.shape and dw.shape == w.shape


def test_mxfp4_backward_has_the_forward_product_of_mxfp8_and_gradients_right_in_the_mean():
    x, w = floats((64, 96), 1), floats((96, 32), 2)

    def both(recipe):
        y, pull = jax.vjp(lambda x, w: jax_mx.matmul(x, w, recipe=recipe), x, w)
        return y, *pull(y)

    keys = jax.random.split(KEY, 16)
    ys, *drawn = jax.jit(jax.vmap(lambda key: both(jax_mx.mxfp4_backward(key))))(keys)
    y, *exact = both(Recipe(dgrad="bf16", wgrad="bf16"))
    np.testing.assert_allclose(ys, np.broadcast_to(y, ys.shape), rtol=1e-5, atol=1e-4)
    for sample, want in zip(drawn, exact, strict=True):
        single, mean = (jnp.linalg.norm(g - want) for g in (sample[0], sample.mean(0)))
        assert mean < 0.75 * single  # what is left is the other operand's rounding, to nearest


def test_fast_accumulation_reaches_its_kernel(monkeypatch):
    """The forward product's in `MXFP8_ROWS_FAST`, others' where a recipe says so."""
    x, w = jnp.ones((256, 512), jnp.bfloat16), jnp.ones((512, 256), jnp.bfloat16)
    products = []

    def get(kernel, arch):
        if kernel.op == "matmul_fp8":
            products.append(kernel.fast)
        return stand_in(kernel, arch)

    monkeypatch.setattr(store, "get", get)
    monkeypatch.setenv("JAX_MX_ARCHS", "sm_90a")

    def fast_of(recipe):
        products.clear()

        def loss(x, w):
            return jax_mx.matmul(x, w, recipe=recipe).astype(jnp.float32).sum()

        with lowered_apart():
            both = jax.jit(jax.value_and_grad(loss, (0, 1)))
            both.trace(x, w).lower(lowering_platforms=("cuda",))
        return sorted(products)

    fast = Product(fast_accumulation=True)
    assert fast_of(jax_mx.MXFP8_ROWS) == [False] * 3
    assert fast_of("mxfp8_rows_fast") == [False, False, True]
    assert fast_of(Recipe(window="row", dgrad=fast, wgrad=fast)) == [False, True, True]
    assert fast_of(Recipe(lhs="mxfp8_e5m2", window="row", forward=fast)) == [False] * 3
    with pytest.raises(ValueError, match="fast_accumulation is of what is quantized"):
        Product("bf16", fast_accumulation=True)
