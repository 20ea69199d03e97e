"""An MoE layer in MX beside bfloat16, on one GPU, in one run.

Each row is a case and one way to compute it: routing, gathering, quantizing, both products, the
activation and the combine; forward, or forward and backward with all gradients. The case "routing"
is only what sorts tokens by expert. Device time of a call, median of calls, operands rotating.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import jax_mx
from benchmarks import timing
from benchmarks.runner import Args, Case, Timed
from jax_mx import BF16, MXFP8, Recipe

REST = 0.5  # seconds before each measurement: a hot chip is slower


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer's sizes: T tokens of width D, k experts of each token, I gates of an expert."""

    tokens: int
    k: int
    experts: int
    width: int
    inner: int
    backward: bool = False

    @property
    def flop(self) -> float:
        """Operations of the products."""
        return 6 * self.tokens * self.k * self.width * self.inner * (3 if self.backward else 1)

    @property
    def toy(self) -> Layer:
        """Sizes that a CPU has done soon."""
        few = {"tokens": min(self.tokens, 128), "experts": min(self.experts, 8)}
        return dataclasses.replace(self, **few, width=128, inner=128)


LAYERS = {
    "forward": Layer(8192, 2, 8, 7168, 2048),
    "forward and backward": Layer(8192, 2, 8, 7168, 2048, backward=True),
    "decode gpt-oss-120b": Layer(64, 4, 128, 2880, 2880),
}
# The sort of the tokens' experts, (T, k), by expert: 131,072 ids of 64 experts.
ROUTING = Layer(16384, 8, 64, 0, 0)
Call = Callable[..., jax.Array]


def plain(x: jax.Array, experts: jax.Array, weights: jax.Array, w1: Any, w2: Any) -> jax.Array:
    """The layer as one writes it in JAX: sort, gather, lax.ragged_dot, add up."""
    flat = experts.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=w1.shape[0]).astype(jnp.int32)
    token = order // experts.shape[1]
    gate, up = jnp.split(jax.lax.ragged_dot(x[token], w1, sizes), 2, axis=-1)
    y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, w2, sizes)
    y = y * weights.reshape(-1)[order].astype(y.dtype)[:, None]
    return jnp.zeros_like(x).at[token].add(y)


def _moe(recipe: Recipe, implementation: str | None = None) -> Call:
    return functools.partial(jax_mx.moe, recipe=recipe, implementation=implementation)


FLOATS: dict[str, Call] = {"bf16 lax.ragged_dot": plain, "bf16 Pallas": _moe(BF16, "pallas")}
WAYS: dict[str, Call] = {
    **FLOATS,
    "mxfp8": _moe(MXFP8),
    "mxfp8, windows of 128, weights in tiles": _moe(Recipe(window=128, weight_window=(128, 128))),
    "mxfp8, windows of 256": _moe(Recipe(window=256)),
}


def with_gradients(layer: Call) -> Callable[..., Any]:
    """The result and the gradients of x, the router's weights and both matrices."""

    def run(x: Any, experts: Any, weights: Any, w1: Any, w2: Any, dy: Any) -> Any:
        def own(x: Any, weights: Any, w1: Any, w2: Any) -> jax.Array:
            return layer(x, experts, weights, w1, w2)

        y, pull = jax.vjp(own, x, weights, w1, w2)
        return y, pull(dy)

    return run


def chosen(case: Layer, key: jax.Array) -> jax.Array:
    """The k experts of each token."""
    chances = jax.random.uniform(key, (case.tokens, case.experts))
    return jax.lax.top_k(chances, case.k)[1]


def operands(case: Layer, make: Callable | None, key: jax.Array) -> tuple:
    """x, experts, weights, both matrices; and the result's gradient if it is asked for."""
    keys = jax.random.split(key, 6)
    normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    experts = chosen(case, keys[1])
    weights = jax.random.uniform(keys[2], experts.shape)
    w1 = normal(keys[3], (case.experts, case.width, 2 * case.inner)) * case.width**-0.5
    w2 = normal(keys[4], (case.experts, case.inner, case.width)) * case.inner**-0.5
    w1, w2 = (w.astype(jnp.bfloat16) for w in (w1, w2))
    if make:
        w1, w2 = make(w1), make(w2)
    arrays = normal(keys[0], (case.tokens, case.width)), experts, weights, w1, w2
    return (*arrays, normal(keys[5], (case.tokens, case.width))) if case.backward else arrays


def rotating(make: Callable[[jax.Array], tuple], count: int) -> timing.Inputs:
    """Arguments from as many keys."""
    return jax.block_until_ready([make(key) for key in jax.random.split(jax.random.key(0), count)])


def ways(case: Layer) -> Iterator[tuple[str, Call, Callable | None]]:
    """Name, layer, and what is done to the weights beforehand."""
    few = case.tokens <= 64
    for name, layer in (FLOATS if few else WAYS).items():
        yield name, layer, None
    for format in ("mxfp8_e4m3", "mxfp4_e2m1") if few else ():
        frozen = functools.partial(jax_mx.quantize, format=format, axis=-2, transpose=True)
        yield f"{format} weights", _moe(BF16), frozen


def routing(args: Args) -> Iterator[Case]:
    """The ways to sort."""
    case = ROUTING if not args.smoke else ROUTING.toy
    about = {"case": "routing", "tokens": case.tokens, "k": case.k, "experts": case.experts}
    sorts: dict[str, Callable[[jax.Array], Any]] = {
        "jnp.argsort of the ids": lambda experts: jnp.argsort(experts.reshape(-1)),
        "Groups.from_experts": lambda experts: jax_mx.Groups.from_experts(experts, case.experts),
    }
    make = functools.partial(rotating, lambda key: (chosen(case, key),), 4)
    for name, sort in sorts.items():
        yield Case("routing", name, {**about, "way": name}, Timed(jax.jit(sort), make, 20))


def cases(args: Args) -> Iterator[Case]:
    """Routing, then every way of every layer."""
    yield from routing(args)
    for name, case in LAYERS.items():
        case = case.toy if args.smoke else case
        for way, layer, make in ways(case):
            fn = jax.jit(with_gradients(layer) if case.backward else layer)
            of_key = jax.jit(functools.partial(operands, case, make))
            inputs = functools.partial(rotating, of_key, 2)
            measure = Timed(fn, inputs, 10, flop=case.flop, rest=REST, first="first_call_s")
            yield Case(name, way, {"case": name, **dataclasses.asdict(case), "way": way}, measure)
