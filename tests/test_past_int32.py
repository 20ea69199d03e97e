"""Shapes of more elements and rows than int32 and uint32 count: a call works, or says so."""

import jax
import jax.numpy as jnp
import pytest

import jax_mx

KEY = jax.random.key(0)
INT = jnp.int32


def S(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def total(tree):
    return sum(leaf.astype(jnp.float32).sum() for leaf in jax.tree.leaves(tree))


def grad(f, *which):
    return jax.grad(lambda *args: total(f(*args)), which)


def arrays(rows):
    """Calls of an array of so many rows, with their arguments."""
    x, whole = S(rows, 64), S(rows // 64 * 64, 64)
    noise = {"rounding": jax_mx.Stochastic(KEY), "hadamard": jax_mx.Hadamard.random(KEY)}
    yield "quantize", jax_mx.quantize, x
    yield "quantize rows", lambda x: jax_mx.quantize(x, axis=0, window="row"), whole
    yield "quantize at random", lambda x: jax_mx.quantize(x, **noise), x
    yield "quantize squares", lambda x: jax_mx.quantize(x, block=(32, 32)).expand(), whole
    yield "quantize tiles", lambda x: jax_mx.quantize(x, scale_layout="blocked_128x4"), x
    yield "quantize_both", jax_mx.quantize_both, whole
    yield "rows", lambda x, rows: jax_mx.quantize(x, rows=rows), x, S(rows, dtype=INT)
    yield "fake_quantize", grad(jax_mx.fake_quantize, 0), x
    yield "hadamard", lambda x: jax_mx.hadamard(x, axis=0), whole
    yield "align", lambda x: jax_mx.align(jax_mx.quantize(x), 128), S(rows, 256)
    yield "rms_norm", grad(jax_mx.rms_norm, 0, 1), x, S(64)
    yield "gated", grad(lambda x: jax_mx.gated(x, format="mxfp8_e4m3", floats=True).floats, 0), x
    yield "pack", lambda x: jax_mx.pack_mxfp6(jax_mx.quantize(x, "mxfp6_e2m3")), x
    q = jax.eval_shape(jax_mx.quantize, x)
    yield "dequantize", lambda q: q.dequantize(), q
    for name, index in {"last": rows - 1, "first": -rows, "slice": slice(5, rows - 3)}.items():
        yield f"index {name}", lambda q, index=index: q[index], q
    yield "index array", lambda q: q[jnp.array([0, 5])], q
    yield "reshape", lambda q: q.reshape(1, rows, 64).swapaxes(0, 1), q
    yield "concatenate", lambda q: jax_mx.concatenate([q, jax_mx.stack([q, q])[0]]), q


def layers(rows):
    """Layers of so many rows, and of so many columns, with their gradients."""
    x, w, biases = S(rows, 64), S(64, 64), (S(64), S(64))
    whole = rows // 256 * 256
    for recipe in ("mxfp8", "mxfp8_rows", jax_mx.mxfp4_backward(KEY)):
        options = {"recipe": recipe}
        name = recipe if isinstance(recipe, str) else "backward"

        def matmul(x, w, options=options):
            return jax_mx.matmul(x, w, **options)

        def mlp(x, a, b, c, d, options=options):
            options = options | {"b_gate_up": c, "b_down": d, "activation": "silu"}
            return jax_mx.mlp(x, a, b, **options)

        yield f"matmul {name}", grad(matmul, 0, 1), x, w
        yield f"matmul contracted {name}", grad(matmul, 0, 1), S(64, whole), S(whole, 64)
        yield f"matmul columns {name}", grad(matmul, 0, 1), w, S(64, rows)
        yield f"mlp {name}", grad(mlp, 0, 1, 2, 3, 4), x, w, w, *biases
    sizes, stack = S(2, dtype=INT), S(2, 64, 64)
    yield "ragged_dot", jax_mx.ragged_dot, x, stack, sizes
    yield "ragged_dot gradients", grad(jax_mx.ragged_dot, 0, 1), x, stack, sizes
    yield "groups", lambda sizes: jax_mx.Groups.from_sizes(sizes, rows, align=32), sizes
    choices = S(rows, 2, dtype=INT), S(rows, 2)
    yield "moe", grad(jax_mx.moe, 0, 2, 3, 4), x, *choices, S(2, 64, 128), stack
    yield "quantize_weights", jax_mx.quantize_weights, {"a": S(whole, 64)}


REFUSALS = (ValueError, NotImplementedError, IndexError)


@pytest.mark.filterwarnings("ignore:.*key that is a constant of the program")
@pytest.mark.parametrize("rows", [2**31 - 32, 2**31 + 5, 2**32 + 33])
@pytest.mark.parametrize("calls", [arrays, layers])
def test_shapes_alone(calls, rows):
    refused = set()
    for name, call, *args in calls(rows):
        try:
            jax.eval_shape(call, *args)
        except REFUSALS as error:
            assert "int32" in str(error) and "\n" not in str(error), (name, error)
            refused.add(name.split()[0])
    assert refused <= {"index", "ragged_dot", "groups", "moe"}


def test_a_call_says_which_argument_is_too_long():
    rows = 2**31 + 32
    with pytest.raises(ValueError, match=rf"^ragged_dot: lhs has {rows} rows, more than int32"):
        jax.eval_shape(jax_mx.ragged_dot, S(rows, 64), S(2, 64, 32), S(2, dtype=INT))
    q = jax.eval_shape(jax_mx.quantize, S(rows, 64))
    with pytest.raises(IndexError, match=r"^MXArray\[\.\.\.\]: of the shape .* slice the array"):
        jax.eval_shape(lambda q: q[rows - 1], q)


@pytest.mark.filterwarnings("ignore:.*int64.*:UserWarning")
def test_an_index_that_is_an_array_past_int32():
    """JAX would take 2^31 and more for negative numbers."""
    q = jax.eval_shape(jax_mx.quantize, S(2**31 + 32, 64))
    take = lambda q, i: q[i]  # noqa: E731
    with pytest.raises(IndexError, match=r"^MXArray\[\.\.\.\]: of the shape .* slice the array"):
        jax.eval_shape(take, q, S(dtype=jnp.uint32))
    for dtype in (jnp.int32, jnp.uint16):
        assert jax.eval_shape(take, q, S(dtype=dtype)).shape == (64,)
    with jax.enable_x64(True):
        assert jax.eval_shape(take, q, S(dtype=jnp.uint32)).shape == (64,)


def test_a_bias_does_not_reach_rows_of_padding():
    """The mask of these has no numbers of rows; 33 rows and gradients along them."""
    x, w, bias = jnp.ones((33, 32)), jnp.ones((32, 32)), jnp.ones(32)

    def loss(x, w, bias):
        return jax_mx.mlp(x, w, w, b_gate_up=bias, activation="silu").sum()

    for got, want in zip(
        jax.grad(loss, (1, 2))(x, w, bias), jax.grad(loss, (1, 2))(x[:32], w, bias), strict=True
    ):
        assert jnp.allclose(got, want * 33 / 32, rtol=0.05)
