"""MXArrays with row-major scales go into JAX's own scaled products as they are.

Against float64 products of the dequantized arrays: exactly where every partial sum is a float32,
and elsewhere within what K float32 additions may lose, in any order and rounded either way.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_bits_equal

import jax_mx

pytestmark = pytest.mark.any_device
M, K, N = 96, 160, 64


def square(x, format, axis):
    return jax_mx.quantize(x, format, block=(32, 32)).expand(axis)


# How an operand is quantized, and along which axis it is contracted, before and after.
OPERANDS = {
    "last": (jax_mx.quantize, -1, -1),
    "second": (partial(jax_mx.quantize, axis=-2), -2, -2),
    "transposed": (partial(jax_mx.quantize, axis=-2, transpose=True), -2, -1),
    "square": (partial(square, axis=-1), -1, -1),
    "square second": (partial(square, axis=-2), -2, -2),
}
PRODUCTS = [
    ("last", "second"),  # forward
    ("last", "last"),
    ("last", "transposed"),
    ("second", "second"),  # along the tokens, as a weight's gradient is
    ("transposed", "transposed"),
    ("square", "square second"),
]


def scaled_dot(a, b, axis_a: int, axis_b: int):
    """In float32, contracting these axes of matrices or stacks of them."""
    batch = tuple(range(a.ndim - 2))
    axes = ((a.ndim + axis_a,), (b.ndim + axis_b,))
    return jax.lax.scaled_dot(
        a.values,
        b.values,
        lhs_scale=a.scales,
        rhs_scale=b.scales,
        dimension_numbers=(axes, (batch, batch)),
        preferred_element_type=jnp.float32,
    )


def scaled_matmul(a, b, axis_a: int, axis_b: int):
    """It takes stacks of matrices alone, and contracts their last axes."""
    assert (axis_a, axis_b) == (-1, -1)
    stacks = [x if a.ndim > 2 else x[None] for x in (a.values, b.values, a.scales, b.scales)]
    out = jax.nn.scaled_matmul(*stacks, preferred_element_type=jnp.float32)
    return out if a.ndim > 2 else out[0]


def floats(shape, axis: int, exact: bool, seed: int):
    """Normal; if exact, small integers times a power of two for each run of 32 along `axis`."""
    rng = np.random.default_rng(seed)
    if not exact:
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    runs = [*shape]
    runs[axis] //= 32
    power = np.repeat(rng.integers(-2, 3, runs), 32, axis=axis)
    return jnp.asarray(rng.integers(-7, 8, shape) * 2.0**power, jnp.bfloat16)


LAST = [pair for pair in PRODUCTS if all(OPERANDS[operand][2] == -1 for operand in pair)]
CASES = [*((scaled_dot, pair) for pair in PRODUCTS), *((scaled_matmul, pair) for pair in LAST)]


@pytest.mark.sampled(18)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "normal"])
@pytest.mark.parametrize("lead", [(), (3,)], ids=["2-D", "batched"])
@pytest.mark.parametrize("formats", [("mxfp8_e4m3",) * 2, ("mxfp8_e5m2", "mxfp8_e4m3")], ids=str)
@pytest.mark.parametrize("function,product", CASES)
def test_products(function, product, formats, lead, exact):
    if not hasattr(jax.lax if function is scaled_dot else jax.nn, function.__name__):
        pytest.skip(f"JAX {jax.__version__} has no {function.__name__}")
    arrays, axes, sides = [], [], []
    for seed, (operand, format, free) in enumerate(zip(product, formats, (M, N), strict=True)):
        quantize, before, after = OPERANDS[operand]
        shape = (*lead, free, K) if before == -1 else (*lead, K, free)
        x = floats(shape, before, exact, seed)
        q = jax.jit(partial(quantize, format=format))(x)
        side = np.moveaxis(np.asarray(q.dequantize(jnp.float32), np.float64), after, -1)
        if exact:
            np.testing.assert_array_equal(side, np.moveaxis(np.asarray(x, np.float64), before, -1))
        arrays.append(q)
        axes.append(after)
        sides.append(side)
    try:
        got = jax.jit(lambda a, b: function(a, b, *axes))(*arrays)
    except NotImplementedError as error:  # JAX 0.10 has scaled_matmul on GPUs alone
        pytest.skip(f"JAX {jax.__version__}: {str(error).splitlines()[0]}")
    assert got.dtype == jnp.float32
    left, right = sides[0], np.swapaxes(sides[1], -1, -2)
    want = left @ right
    if exact:
        assert_bits_equal(got, want.astype(np.float32))
    else:
        bound = K * 2.0**-23 * (np.abs(left) @ np.abs(right))
        assert (np.abs(np.asarray(got, np.float64) - want) <= bound).all()
