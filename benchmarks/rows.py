"""Quantizers in windows of rows: device time beside that of a copy, amaxes included.

A row of the output is one shape, dtype and way: along rows, along columns (transposed), or both; of
x itself, of gates and ups (in one array, or two), or of the gradient of both. "tbs" are terabytes a
second of operands and results, each moved once.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import jax_mx
from benchmarks import timing
from benchmarks.runner import Args, Case, Timed

# Llama-3 8B: activations, of attention and of the MLP, and its weights.
ACTIVATIONS = [(16384, 1024), (16384, 4096), (16384, 14336)]
WEIGHTS = [(4096, 4096), (4096, 14336), (14336, 4096)]
SMALL = (256, 512)
along = functools.partial(jax_mx.quantize, window="row")
down = functools.partial(along, axis=-2, transpose=True)
both = functools.partial(jax_mx.quantize_both, window="row", transpose=(False, True))


def _gated(quantize: Callable) -> Callable:
    return lambda x: quantize(x, activation=jax_mx.Gated("swiglu"))


def _pair(quantize: Callable) -> Callable:
    return lambda x, up: quantize(x, activation=jax_mx.Gated("swiglu", up=up))


def _gradient(x: jax.Array, dy: jax.Array) -> Any:
    return both(x, activation=jax_mx.Gated("swiglu", gradient=dy))


def _copy(*arrays: jax.Array) -> Any:
    return [a + jnp.ones((), a.dtype) for a in arrays]


# By the operands beside the floats' shape: how many columns each has of theirs, and the ways.
WAYS: Mapping[str, tuple[tuple[float, ...], Mapping[str, Callable]]] = {
    "x": ((1,), {"copy": _copy, "along": along, "down": down, "both": both}),
    "gates, ups": ((2,), {"copy": _copy, "along": _gated(along), "down": _gated(down)}),
    "gates; ups": ((1, 1), {"copy": _copy, "along": _pair(along), "down": _pair(down)}),
    "gradient": ((2, 1), {"copy": _copy, "both": _gradient}),
}


def cases(args: Args) -> Iterator[Case]:
    """A case for each operand, shape and dtype."""
    shapes = [(shape, "bfloat16") for shape in ACTIVATIONS]
    shapes += [(shape, dtype) for dtype in ("bfloat16", "float32") for shape in WEIGHTS]
    for source, (widths, ways) in WAYS.items():
        for shape, dtype in [(SMALL, "bfloat16")] if args.smoke else shapes:
            if source != "x" and shape not in (SMALL, ACTIVATIONS[-1]):
                continue
            for way, fn in ways.items():
                names = {"of": source, "shape": list(shape), "dtype": dtype, "way": way}
                make = functools.partial(_inputs, shape, widths, dtype)
                timed = Timed(jax.jit(fn), make, 20, more=functools.partial(_speed, fn, make))
                yield Case(f"{source} {shape} {dtype}", way, names, timed, base="copy")


def _inputs(shape: tuple, widths: tuple, dtype: str, count: int | None = None) -> timing.Inputs:
    shapes = [(shape[0], int(shape[1] * width)) for width in widths]

    def make(key: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(key, len(shapes))
        inputs = zip(keys, shapes, strict=True)
        return [jax.random.normal(k, s, jnp.float32).astype(dtype) for k, s in inputs]

    size = sum(map(math.prod, shapes)) * jnp.dtype(dtype).itemsize
    count = count or timing.rotation(size)
    return [tuple(make(jax.random.key(i))) for i in range(min(count, 4))]


def _speed(fn: Callable, make: Callable, took: timing.Timing) -> dict[str, float]:
    """Terabytes a second of what must be moved."""
    (operands,) = make(count=1)
    out = jax.eval_shape(fn, *operands)
    moved = timing.nbytes(operands) + timing.nbytes(out)
    return {"tbs": round(moved / took.us / 1e6, 2)}
