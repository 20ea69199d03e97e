"""Arrays without elements: a batch that is empty, a shard that has no token.

Each op gives what has no elements, or zeros where a sum has no terms: on the CPU, and lowered for
GPUs with stand-ins of kernels.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_mx
from jax_mx import Recipe
from jax_mx.formats.windows import WINDOWS

MATRICES = [(0, 64), (64, 0), (0, 0), (0, 32, 64), (2, 0, 64)]
FORMAT = {"format": "mxfp8_e4m3"}


def op_of(name: str, **options):
    return functools.partial(getattr(jax_mx, name), **options)


def bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def cases_of_matrices():
    """Names, functions and operands, of what takes one array."""
    for shape in MATRICES:
        x = bf16(*shape)
        for window in WINDOWS:
            if not isinstance(window, tuple):
                for name, axis in (("quantize", {"axis": -2}), ("quantize_both", {})):
                    yield f"{name} {shape} {window}", op_of(name, window=window, **axis), [x]
        yield f"fake_quantize {shape}", jax_mx.fake_quantize, [x]
        for both, floats in itertools.product((False, True), repeat=2):
            gated = op_of("gated", both=both, floats=floats, **FORMAT)
            yield f"gated {shape} {both} {floats}", gated, [x]
            if shape[-1]:
                norm = op_of("rms_norm", both=both, floats=floats, **FORMAT)
                yield f"rms_norm {shape} {both} {floats}", norm, [x]


def cases_of_products():
    """Products of matrices, forward and backward, each recipe with its implementations."""
    for t, k, n in ((0, 64, 64), (64, 0, 64), (64, 64, 0), (0, 0, 0)):
        for name, recipe in (
            *((name, Recipe()) for name in ("dequantize", "scaled_dot", "xla", None)),
            ("fp8", Recipe(window="row")),
            (None, Recipe(window=256)),
        ):
            f = op_of("matmul", implementation=name, recipe=recipe)
            title = f"matmul {t} {k} {n} {name} {recipe.window}"
            yield title, with_gradients(f), [bf16(t, k), bf16(k, n)]
            for batch in (0, 3):
                yield f"{batch} of {title}", jax.vmap(f), [bf16(batch, t, k), bf16(batch, k, n)]


def cases_of_experts():
    for t, e, d, i in ((0, 4, 64, 64), (64, 4, 0, 64), (64, 4, 64, 0)):
        sizes, routed = jax.ShapeDtypeStruct((e,), jnp.int32), (t, 2)
        ids, weights = (jax.ShapeDtypeStruct(routed, dtype) for dtype in (jnp.int32, jnp.float32))

        def moe(x, weights, w1, w2, ids):
            return jax_mx.moe(x, ids, weights, w1, w2)

        operands = [bf16(t, d), weights, bf16(e, d, 2 * i), bf16(e, i, d), ids]
        yield f"moe {t} {e} {d} {i}", with_gradients(moe, 4), operands
        ragged = with_gradients(jax_mx.ragged_dot)
        yield f"ragged_dot {t} {e} {d} {i}", ragged, [bf16(t, d), bf16(e, d, i), sizes]


def with_gradients(f, number=2):
    """A function for f's result and the gradients to its first operands."""

    def run(*args):
        differentiated, rest = args[:number], args[number:]
        y, pull = jax.vjp(lambda *differentiated: f(*differentiated, *rest), *differentiated)
        return y, *pull(jnp.ones_like(y))

    return run


CASES = {
    name: (f, operands)
    for name, f, operands in (*cases_of_matrices(), *cases_of_products(), *cases_of_experts())
}
LOWERED = [
    (name, platform)
    for name in CASES
    for platform in ("cuda", "rocm")
    if platform == "cuda" or "fp8" not in name.split()  # which gfx942 has not
]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", CASES)
def test_gives_nothing_or_zeros(name):
    f, operands = CASES[name]
    args = [jnp.ones(a.shape, a.dtype) for a in operands]
    for result in jax.tree.leaves(jax.jit(f)(*args)):
        if jnp.issubdtype(result.dtype, jnp.floating) and result.dtype.itemsize > 1:
            assert not np.asarray(result, np.float32).any()


@pytest.mark.sampled(7)
@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize(("name", "platform"), LOWERED)
def test_is_lowered(name, platform):
    f, operands = CASES[name]
    lowered = jax.jit(f).trace(*operands).lower(lowering_platforms=(platform,))
    assert "func.func" in lowered.as_text()
