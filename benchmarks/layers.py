"""A linear layer, forward and backward, in MX beside bfloat16 and beside plain XLA.

Each row is one shape (rows, in, out) and one way to compute y = x . w and both gradients from
floats, quantizing included: device time of a call, median of calls, on two operands in turn.
"ratio" is to bfloat16's time for that shape in the same run. First call: seconds for tracing and
compiling, with kernels at hand.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jax_mx
from benchmarks import timing
from benchmarks.runner import Args, Case, Timed
from jax_mx import MXFP4, MXFP8, Recipe

# (rows, in, out): the issue of products; Llama-3 70B: attention, MLP in, MLP out; DeepSeek-V3's
# dense MLP in and out, and one of its experts.
SHAPES = {
    "7168x4096": (16384, 7168, 4096),
    "llama attention": (8192, 8192, 8192),
    "llama mlp in": (8192, 8192, 28672),
    "llama mlp out": (8192, 28672, 8192),
    "deepseek mlp in": (8192, 7168, 18432),
    "deepseek mlp out": (8192, 18432, 7168),
    "deepseek expert": (8192, 7168, 2048),
}
Layer = Callable[[jax.Array, jax.Array], jax.Array]


# ---- the same recipe by plain XLA ---
def _xla_quantized(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """E4M3 codes and E8M0 scales of the last axis' blocks, scales rounded up, as XLA fuses it."""
    blocks = x.reshape(*x.shape[:-1], -1, 32).astype(jnp.float32)
    amax = jnp.max(jnp.abs(blocks), -1, keepdims=True)
    exponent = jnp.ceil(jnp.log2(jnp.maximum(amax, 2.0**-100) / 448))
    scale = jnp.exp2(exponent)
    codes = (blocks / scale).astype(jnp.float8_e4m3fn)
    return codes.reshape(x.shape), scale[..., 0].astype(jnp.float8_e8m0fnu)


def _scaled_dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """a (M, K) times b (N, K), both quantized by XLA."""
    (a, a_scale), (b, b_scale) = _xla_quantized(a), _xla_quantized(b)
    return jax.lax.scaled_dot(
        a,
        b,
        lhs_scale=a_scale,
        rhs_scale=b_scale,
        dimension_numbers=(((1,), (1,)), ((), ())),
        preferred_element_type=jnp.bfloat16,
    )


@jax.custom_vjp
def xla_layer(x: jax.Array, w: jax.Array) -> jax.Array:
    """The products of MXFP8 by XLA's own quantizer and jax.lax.scaled_dot."""
    return _scaled_dot(x, w.T)


def _xla_bwd(kept: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = kept
    return _scaled_dot(dy, w), _scaled_dot(x.T, dy.T)


xla_layer.defvjp(lambda x, w: (xla_layer(x, w), (x, w)), _xla_bwd)


# ---- ways ---
def both_ways(layer: Layer) -> Callable[..., Any]:
    """The layer's result and both gradients."""

    def run(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        y, pull = jax.vjp(layer, x, w)
        return y, pull(dy)

    return run


def microbatches(layer: Layer, prepare: Callable[[jax.Array], Any], n: int) -> Callable[..., Any]:
    """The layer on `n` parts of x one after the other, the weight prepared once."""

    def whole(x: jax.Array, w: jax.Array) -> jax.Array:
        ready = prepare(w)
        parts = x.reshape(n, -1, x.shape[-1])
        return jax.lax.map(lambda part: layer(part, ready), parts).reshape(x.shape[0], -1)

    return both_ways(whole)


def _mx(recipe: Recipe, implementation: str | None = None) -> Layer:
    return functools.partial(jax_mx.matmul, recipe=recipe, implementation=implementation)


ROWS = Recipe(window="row")
TILES = Recipe(window=256, weight_window=(128, 128))
WAYS: dict[str, Callable[..., Any]] = {
    "bf16": both_ways(jnp.matmul),
    "mxfp8": both_ways(_mx(MXFP8)),
    "mxfp8, rows": both_ways(_mx(ROWS)),
    "mxfp8, rows, fp8": both_ways(_mx(ROWS, "fp8")),
    "mxfp8, windows of 256": both_ways(_mx(Recipe(window=256), "cutedsl")),
    "mxfp8, 256, weights in tiles": both_ways(_mx(TILES, "cutedsl")),
    "mxfp4": both_ways(_mx(MXFP4)),
    "mxfp8, square weights": both_ways(_mx(Recipe(block=(32, 32)))),
    "XLA's quantizer, scaled_dot": both_ways(xla_layer),
    "bf16, 4 microbatches": microbatches(jnp.matmul, lambda w: w, 4),
    "mxfp8, 4 microbatches": microbatches(_mx(MXFP8), MXFP8.quantize_weight, 4),
    "mxfp8, 4 microbatches, weight dequantized": microbatches(
        _mx(MXFP8), functools.partial(MXFP8.quantize_weight, dequantized=True), 4
    ),
    "mxfp8, rows, 4 microbatches": microbatches(_mx(ROWS), ROWS.quantize_weight, 4),
}


def inputs(shape: tuple[int, int, int]) -> timing.Inputs:
    """x, w and the gradient of y, two of each."""
    m, k, n = shape

    def make(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        a, b, c = jax.random.split(key, 3)
        x = jax.random.normal(a, (m, k), jnp.bfloat16)
        w = jax.random.normal(b, (k, n), jnp.bfloat16) * k**-0.5
        return x, w, jax.random.normal(c, (m, n), jnp.bfloat16)

    keys = jax.random.split(jax.random.key(0), 2)
    return jax.block_until_ready([jax.jit(make)(key) for key in keys])


def about() -> dict[str, Any]:
    """The bytes that a layer keeps for its backward pass."""
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((16384, 7168), (7168, 4096)))

    def kept(layer: Layer) -> int:
        return timing.nbytes(jax.eval_shape(lambda x, w: jax.vjp(layer, x, w)[1], x, w))

    return {"kept": {"bf16": kept(jnp.matmul), "mxfp8": kept(_mx(MXFP8))}}


def _clock(time: timing.Timing) -> dict[str, str]:
    return {"clock": time.clock}


def cases(args: Args) -> Iterator[Case]:
    """Every way for every shape."""
    for name, shape in SHAPES.items():
        shape = (256, 256, 512) if args.smoke else shape
        for way, run in WAYS.items():
            base = "bf16, 4 microbatches" if "microbatches" in way else "bf16"
            make = functools.partial(inputs, shape)
            flop = 6 * math.prod(shape)
            measure = Timed(jax.jit(run), make, 20, flop=flop, more=_clock, first="first_s")
            names = {"name": name, "way": way, "shape": list(shape)}
            yield Case(name, way, names, measure, base)
