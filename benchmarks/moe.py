"""An MoE layer in MX beside bfloat16, on one GPU, in one run.

    python -m benchmarks.moe [--case decode] [--only mxfp8] [--json out.json]

Each row is a case and one way to compute it: routing, gathering, quantizing, both products, the
activation and the combine; forward, or forward and backward with all gradients. The case "routing"
is only what sorts tokens by expert. Device time of a call, median of calls, operands rotating.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jax_mx
from benchmarks import report, timing
from jax_mx import BF16, MXFP8, Recipe

REST = 0.5  # seconds before each measurement: a hot chip is slower


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer.

    Attributes:
      name: for the table.
      tokens: T.
      k: experts of each token.
      experts: how many there are.
      width: D.
      inner: I.
      backward: whether gradients are computed too.
    """

    name: str
    tokens: int
    k: int
    experts: int
    width: int
    inner: int
    backward: bool = False

    @property
    def tflop(self) -> float:
        """Operations of the products, in 10^12."""
        each = 2 * self.tokens * self.k * 3 * self.width * self.inner / 1e12
        return each * (3 if self.backward else 1)


CASES = (
    Case("forward", 8192, 2, 8, 7168, 2048),
    Case("forward and backward", 8192, 2, 8, 7168, 2048, backward=True),
    Case("decode gpt-oss-120b", 64, 4, 128, 2880, 2880),
)
Layer = Callable[..., jax.Array]


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


def _moe(recipe: Recipe, implementation: str | None = None) -> Layer:
    return functools.partial(jax_mx.moe, recipe=recipe, implementation=implementation)


WINDOWS = Recipe(window=128, weight_window=(128, 128))
WAYS: dict[str, Layer] = {
    "bf16 lax.ragged_dot": plain,
    "bf16 Pallas": _moe(BF16, "pallas"),
    "mxfp8": _moe(MXFP8),
    "mxfp8, windows of 128, weights in tiles": _moe(WINDOWS),
    "mxfp8, windows of 256": _moe(Recipe(window=256)),
}


def frozen(format: str) -> Callable[..., Any]:
    """The layer on weights that are MX already, activations in bfloat16."""

    def make(w: jax.Array) -> jax_mx.MXArray:
        return jax_mx.quantize(w, format, axis=-2, transpose=True)

    return make


def with_gradients(layer: Layer) -> Callable[..., Any]:
    """The result and the gradients of x, the router's weights and both matrices."""

    def run(x: Any, experts: Any, weights: Any, w1: Any, w2: Any, dy: Any) -> Any:
        def own(x: Any, weights: Any, w1: Any, w2: Any) -> jax.Array:
            return layer(x, experts, weights, w1, w2)

        y, pull = jax.vjp(own, x, weights, w1, w2)
        return y, pull(dy)

    return run


def operands(case: Case, key: jax.Array, make: Callable | None = None) -> tuple:
    """x, experts, weights, both matrices; and the result's gradient if it is asked for."""
    keys = jax.random.split(key, 6)
    normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    experts = jax.lax.top_k(jax.random.uniform(keys[1], (case.tokens, case.experts)), case.k)[1]
    weights = jax.random.uniform(keys[2], experts.shape)
    w1 = normal(keys[3], (case.experts, case.width, 2 * case.inner)) * case.width**-0.5
    w2 = normal(keys[4], (case.experts, case.inner, case.width)) * case.inner**-0.5
    w1, w2 = (w.astype(jnp.bfloat16) for w in (w1, w2))
    if make:
        w1, w2 = make(w1), make(w2)
    found = normal(keys[0], (case.tokens, case.width)), experts, weights, w1, w2
    return (*found, normal(keys[5], (case.tokens, case.width))) if case.backward else found


def ways(case: Case) -> Iterator[tuple[str, Layer, Callable | None]]:
    """Name, layer, and what is done to the weights beforehand."""
    if case.tokens <= 64:
        for name in ("bf16 lax.ragged_dot", "bf16 Pallas"):
            yield name, WAYS[name], None
        for format in ("mxfp8_e4m3", "mxfp4_e2m1"):
            yield f"{format} weights", _moe(BF16), frozen(format)
        return
    for name, layer in WAYS.items():
        yield name, layer, None


# What sorts the ids of tokens' experts, (T, k), by expert: 131,072 of them, of 64 experts.
ROUTING = Case("routing", 16384, 8, 64, 0, 0)
SORTS: dict[str, Callable[[jax.Array], Any]] = {
    "jnp.argsort of the ids": lambda experts: jnp.argsort(experts.reshape(-1)),
    "Groups.from_experts": lambda experts: jax_mx.Groups.from_experts(experts, ROUTING.experts),
}


def measure_routing(only: str = "", case: Case = ROUTING) -> Iterator[dict]:
    """A row for each way to sort."""

    def ids(key: jax.Array) -> jax.Array:
        chances = jax.random.uniform(key, (case.tokens, case.experts))
        return jax.lax.top_k(chances, case.k)[1]

    inputs = [(ids(key),) for key in jax.random.split(jax.random.key(0), 4)]
    about = {"case": case.name, "tokens": case.tokens, "k": case.k, "experts": case.experts}
    for name, sort in SORTS.items():
        if only in name:
            us = timing.measure(jax.jit(sort), inputs, 20).us
            yield {**about, "way": name, "us": round(us, 1)}


def measure(case: Case, only: str = "") -> Iterator[dict]:
    """A row for each way."""
    for name, layer, make in ways(case):
        if only not in name:
            continue
        row: dict[str, Any] = {"case": case.name, **dataclasses.asdict(case), "way": name}
        del row["name"]
        try:
            own = jax.jit(functools.partial(operands, case, make=make))
            keys = jax.random.split(jax.random.key(0), 2)
            inputs = [jax.block_until_ready(own(key)) for key in keys]
            run = jax.jit(with_gradients(layer) if case.backward else layer)
            start = time.perf_counter()
            run.lower(*inputs[0]).compile()
            row["first_call_s"] = round(time.perf_counter() - start, 2)
            time.sleep(REST)
            us = timing.measure(run, inputs, 10).us
        except Exception as error:
            yield row | {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
            continue
        yield row | {"us": round(us, 1), "tflops": round(case.tflop / us * 1e6, 1)}


def main(argv: Sequence[str] | None = None) -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--case", default="", help="cases with this in their name")
    parser.add_argument("--only", default="", help="ways with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    rows = []
    for case in (ROUTING, *CASES):
        if args.case not in case.name:
            continue
        of_case = measure_routing(args.only) if case is ROUTING else measure(case, args.only)
        for row in of_case:
            rows.append(row)
            told = row.get("error") or f"{row['us']:10.1f} us"
            if "tflops" in row:
                told += f" {row['tflops']:7.0f} TF/s   first call {row['first_call_s']} s"
            print(f"{row['case']:22} {row['way']:40} {told}", flush=True)
            if args.json:
                report.write_record(args.json, "python -m benchmarks.moe", rows)


if __name__ == "__main__":
    main()
