"""Whether MX takes a product, what is done if not, and operands of mixed types."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_refused, normal

import jax_mx

X, W = normal((8, 588)), normal((588, 64), 1)
pytestmark = pytest.mark.usefixtures("promoting")
PLAIN = (((1,), (0,)), ((), ()))


@pytest.mark.parametrize(
    ("lhs", "rhs", "dimensions", "call"),
    [
        (X, W, PLAIN, lambda x, w, **options: jax_mx.dot_general(x, w, PLAIN, **options)),
        (X, W, "ab,bc->ac", lambda x, w, **options: jax_mx.einsum("ab,bc->ac", x, w, **options)),
        (X[:, :64], X[0, :64], "...k,k->...k",
         lambda x, w, **options: jax_mx.einsum("...k,k->...k", x, w, **options)),
        (X, W[None], np.array([8]),
         lambda x, w, **options: jax_mx.ragged_dot(x, w, np.array([8]), **options)),
    ],
)  # fmt: skip
def test_why_not_and_fallback(lhs, rhs, dimensions, call):
    can, why_not = jax_mx.can_multiply(lhs, rhs, dimensions)
    assert not can
    assert_refused(lambda: call(lhs, rhs), ValueError, why_not)
    if isinstance(dimensions, str):
        want = jnp.einsum(dimensions, lhs, rhs)
    elif dimensions is PLAIN:
        want = lhs @ rhs
    else:
        want = jax.lax.ragged_dot(lhs, rhs, dimensions)
    np.testing.assert_allclose(call(lhs, rhs, fallback="floats"), want, rtol=1e-5, atol=1e-4)
    rounded = call(lhs, rhs, fallback="bf16")
    assert rounded.dtype == jnp.float32
    assert 0 < np.abs(rounded - want).max() < 0.5


def test_can():
    def like(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    frozen = jax_mx.quantize(W[:64], axis=0)
    weight = jax_mx.MXFP8.quantize_weight(W[:64])
    for lhs, rhs, dimensions in (
        (like(4, 64), like(64, 3, dtype=jnp.float32), PLAIN),
        (like(4, 64), like(2, 64, 3), like(2, dtype=jnp.uint32)),
        (like(2, 8, 4, 64), like(64, 3), "...a,ab->...b"),
        (like(4, 64), frozen, PLAIN),
        (like(4, 64), weight, "ab,bc->ac"),
    ):
        assert jax_mx.can_multiply(lhs, rhs, dimensions) == (True, "")
    for lhs, rhs, dimensions, sentence in (
        (like(4, 64, dtype=jnp.int8), like(64, 3), PLAIN, "lhs is int8"),
        (frozen, like(64, 3), PLAIN, "lhs has blocks"),
        (like(4, 64), like(2, 64, 3), like(2), "group_sizes are bfloat16"),
    ):
        can, why_not = jax_mx.can_multiply(lhs, rhs, dimensions)
        assert not can and sentence in why_not
    for numbers, lead in ((PLAIN, ()), ("ab,bc->ac", ()), (like(2, dtype=jnp.int32), (2,))):
        w, floats = like(*lead, 63, 3), {"recipe": "floats"}
        assert jax_mx.can_multiply(like(4, 63), w, numbers, **floats) == (True, "")
        can, why_not = jax_mx.can_multiply(like(4, 64), w, numbers, **floats)
        assert not can and "63" in why_not


@pytest.mark.parametrize("op", [pytest.param("mlp", marks=pytest.mark.thorough), "moe"])
def test_floats_of_a_layer_stay_as_they_are(op):
    """Rounded to bfloat16, it is off by 5e-3. Weights may be MX, or quantized by any recipe."""
    shapes = (24, 64), (2, 64, 192), (2, 96, 32)
    x, up, down = (normal(shape, seed) / 8 for seed, shape in enumerate(shapes))
    if op == "moe":
        down = jnp.concatenate([down, down], -1)
    experts, shares = jnp.arange(24)[:, None] % 2, jnp.full((24, 1), 0.5)

    def plain(x, up, down):
        y = []
        for one, two in zip(up, down, strict=True):
            gate, ups = jnp.split(jnp.dot(x, one, precision="highest"), 2, -1)
            y.append(jnp.dot(jax.nn.silu(gate) * ups, two, precision="highest"))
        return y[0] if op == "mlp" else jnp.where(experts == 0, *y) * shares

    @jax.jit
    def ours(x, up, down):
        if op == "mlp":
            return jax_mx.mlp(x, up[0], down[0], recipe="floats")
        return jax_mx.moe(x, experts, shares, up, down, recipe="floats")

    def both(f):
        y, pull = jax.vjp(f, x, up, down)
        return y, *pull(jnp.cos(y))

    def off(got, want):
        pairs = zip(*map(jax.tree.leaves, (got, want)), strict=True)
        return max(jnp.abs(a - b).max() / jnp.abs(b).max() for a, b in pairs)

    got, want = (jax.jit(lambda f=f: both(f))() for f in (ours, plain))
    assert off(got, want) < 1e-5
    q = jax_mx.quantize(up.swapaxes(1, 2))
    floats = q.dequantize(jnp.float32).swapaxes(1, 2)
    assert off(ours(x, q, down), plain(x, floats, down)) < 1e-5
    axes = {"contracting": 1, "batch": 0} if op == "moe" else {"contracting": 0}
    weight = jax_mx.MXFP8.quantize_weight(up if op == "moe" else up[0], **axes)
    assert off(ours(x, weight if op == "moe" else [weight], down), want[0]) < 1e-5


def test_fallback_does_not_hide_what_is_wrong():
    frozen = jax_mx.quantize(W[:64], axis=1)
    three, fitting = (X, W, W.T), (X[:, :64], W[:64])
    groups = X[:, :64], W[None, :64], jnp.array([8])
    assert jax_mx.einsum("ab,bc,cd->ad", *three, fallback="floats").shape == (8, 588)
    for call, error, sentence in (
        (lambda: jax_mx.matmul(X, W, recipe="fp8", fallback="floats"), ValueError, "'fp8' is unkn"),
        (lambda: jax_mx.matmul(X, W, implementation="a", fallback="floats"), ValueError, "'a' is"),
        (lambda: jax_mx.matmul(X, W, fallback="fp8"), ValueError, "fallback 'fp8' is unknown"),
        (lambda: jax_mx.matmul(*fitting, fallback="fp8"), ValueError, "'fp8' is unknown"),
        (lambda: jax_mx.einsum("ab,bc", *fitting, fallback="fp8"), ValueError, "'fp8' is unknown"),
        (lambda: jax_mx.ragged_dot(*groups, fallback="fp8"), ValueError, "'fp8' is unknown"),
        (lambda: jax_mx.matmul(X[:, :64], frozen, fallback="floats"), ValueError, "has blocks"),
        (lambda: jax_mx.einsum("ab,bc,cd->ad", *three), ValueError, "3 operands, this takes two"),
    ):
        assert_refused(call, error, sentence)


@pytest.mark.parametrize("types", [("bfloat16", "float32"), ("float16", "bfloat16")])
def test_mixed_types_as_jnp(types):
    x, w = X[:, :64].astype(types[0]), W[:64].astype(types[1])
    y = jax_mx.matmul(x, w, recipe="mxfp8")
    assert y.dtype == jnp.matmul(x, w).dtype == jnp.float32
    want = jax_mx.matmul(x.astype(jnp.float32), w.astype(jnp.float32), recipe="mxfp8")
    np.testing.assert_array_equal(y, want)
    gradients = jax.grad(lambda x, w: jax_mx.matmul(x, w, recipe="mxfp8").sum(), (0, 1))(x, w)
    assert [g.dtype for g in gradients] == [*map(jnp.dtype, types)]


def test_a_layer_takes_weights_of_another_type():
    x, up, down = X[:, :64].astype(jnp.bfloat16), W[:64] / 8, W[:32] / 8
    layer = jax.jit(lambda *args: jax.vjp(lambda *a: jax_mx.mlp(*a, recipe="bf16"), *args))
    y, pull = layer(x, up, down)
    assert [g.dtype.name for g in pull(y)] == ["bfloat16", "float32", "float32"]
    want, _ = layer(x, up.astype(jnp.bfloat16), down.astype(jnp.bfloat16))
    np.testing.assert_array_equal(y, want)


def test_weak_types_float64_and_ints():
    x = X[:, :64].astype(jnp.bfloat16)
    assert jax_mx.matmul(x, jnp.full((64, 32), 1.0)).dtype == jnp.bfloat16
    got = jax_mx.matmul(np.asarray(X[:, :64], np.float64), W[:64])
    np.testing.assert_array_equal(got, jax_mx.matmul(X[:, :64], W[:64]))
    got = jax_mx.dot_general(X[:, :64], W[:64], ((1, 0), ([], [])))
    np.testing.assert_array_equal(got, jax_mx.matmul(X[:, :64], W[:64]))


def test_ragged_dot_takes_what_jax_takes():
    x, w = X[:, :64], W[:64].reshape(1, 64, 64).repeat(2, 0)
    sizes = jnp.array([3, 4], jnp.int32)
    want = jax_mx.ragged_dot(x, w, sizes, preferred_element_type=jnp.bfloat16)
    for integers in (np.int64, np.uint32, np.int16, np.uint64):
        got = jax_mx.ragged_dot(x, w, np.asarray(sizes, integers), None, jnp.bfloat16, None)
        np.testing.assert_array_equal(got, want)
    huge = jax_mx.ragged_dot(x, w, np.array([3, 2**32 - 1], np.uint32))
    np.testing.assert_array_equal(huge, jax_mx.ragged_dot(x, w, jnp.array([3, 5], jnp.int32)))
    wide = jax_mx.ragged_dot(x, w, np.array([3, 2**40]))
    np.testing.assert_array_equal(wide, huge)
    call = lambda: jax_mx.ragged_dot(x, w, sizes, group_offset=jnp.array([0]))  # noqa: E731
    assert_refused(call, NotImplementedError, "group_offset must be None")
