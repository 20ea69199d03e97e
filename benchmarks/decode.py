"""A decoding step of Llama-3-8B's shapes, weights in MX beside bfloat16.

The model is that of examples/serve.py: 32 layers and the logits, random weights, a KV cache of 512
tokens or, where `--there` wants more, of a multiple. Each row is one way and batch: milliseconds of
a token in one program that generates several, on the host's clock. "ratio" is to bfloat16 with
layers as a list; "bf16, scan" goes over stacked ones.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

import jax_mx
from benchmarks import program, timing
from benchmarks.runner import Args, Case, Row, repeats
from examples import random_llama, serve

TOKENS = 64  # that a program makes
WAYS: Mapping[str, str] = {
    "bf16": "",
    "bf16, scan": "",
    "mxfp8": "mxfp8_e4m3",
    "mxfp4": "mxfp4_e2m1",
}
show = Console(width=120).print


def options(add: Callable[..., Any]) -> None:
    """Batches, tokens, and what is shown."""
    add("--batches", type=int, nargs="+", default=[1, 8, 64])
    add("--there", type=int, default=100, help="tokens that are in the cache before")
    add("--layers", type=int, default=random_llama.SIZES["8b"]["num_hidden_layers"])
    add("--profile", action="store_true", help="print where the time goes, by kernel")
    add("--lower", action="store_true", help="only lower for CUDA, here")


def cases(args: Args) -> Iterator[Case]:
    """Every way for every batch."""
    sizes = random_llama.SIZES["tiny" if args.smoke else "8b"]
    config = sizes | ({} if args.smoke else {"num_hidden_layers": args.layers})
    for batch in args.batches:
        for way, format in WAYS.items():
            names = {"batch": batch, "way": way, "layers": config["num_hidden_layers"]}
            measure = functools.partial(measured, config, way, format, batch)
            yield Case(f"batch {batch}", way, names, measure, "bf16")


def model_of(config: Mapping[str, Any], format: str, key: jax.Array) -> dict[str, Any]:
    """A model's random weights (N, K), products' in a format, or in bfloat16."""
    width, d = config["hidden_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {
        "self_attn.qkv_proj": ((heads + 2 * groups) * d, width),
        "self_attn.o_proj": (width, heads * d),
        "mlp.gate_up_proj": (2 * config["intermediate_size"], width),
        "mlp.down_proj": (width, config["intermediate_size"]),
    }

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def weight(key: jax.Array, shape: tuple[int, int], format: str) -> Any:
        w = jax.random.normal(key, shape, jnp.bfloat16) * shape[-1] ** -0.5
        return jax_mx.quantize(w, format) if format else w

    ones = jnp.ones(width, jnp.bfloat16)
    norms = {"input_layernorm": ones, "post_attention_layernorm": ones}
    head, *keys = jax.random.split(key, config["num_hidden_layers"] + 1)
    table = config["vocab_size"], width
    return {
        "embed_tokens": weight(head, table, ""),
        "layers": [
            norms | {name: weight(key, shape, format) for name, shape in shapes.items()}
            for key in keys
        ],
        "norm": ones,
        "lm_head": weight(head, table, format),
    }


def scanned(
    config: Mapping[str, Any], model: Any, cache: Any, tokens: jax.Array, start: Any
) -> Any:
    """`serve.forward`, where layers and caches are stacked."""

    def layer(carry: Any, one: Any) -> Any:
        (y, x), (w, old) = carry, one
        y, x, (cache,) = serve.plain(config, y, x, serve.steps_of(config, w, old, position))
        return (y, x), cache

    x, position = model["embed_tokens"][tokens], jnp.array([start])
    (y, x), cache = jax.lax.scan(layer, (x, jnp.zeros_like(x)), (model["layers"], cache))
    return serve.plain(config, y[:, -1], x[:, -1], [(model["norm"], model["lm_head"])])[0], cache


def stacked(layers: list[Any]) -> Any:
    """Trees of arrays as one, of stacked arrays; the trees are emptied on the way."""
    leaves, trees = zip(*map(jax.tree.flatten, layers), strict=True)
    layers.clear()
    columns = [[*column] for column in zip(*leaves, strict=True)]
    del leaves
    return trees[0].unflatten([jnp.stack(columns.pop(0)) for _ in range(len(columns))])


def generator(config: Mapping[str, Any], forward: Callable[..., Any], there: int) -> Any:
    """A jitted program (model, cache, tokens) of so many steps; the cache is donated."""

    def generate(model: Any, cache: Any, tokens: jax.Array) -> Any:
        def step(carry: Any, position: jax.Array) -> Any:
            cache, tokens = carry
            with jax.numpy_dtype_promotion("standard"):  # which JAX's own attention wants
                logits, cache = forward(config, model, cache, tokens[:, None], position)
            return (cache, logits.argmax(-1).astype(jnp.int32)), None

        return jax.lax.scan(step, (cache, tokens), there + jnp.arange(TOKENS))[0]

    return jax.jit(generate, donate_argnums=1)


def measured(config: Mapping[str, Any], way: str, format: str, batch: int, args: Args) -> Row:
    """A row's numbers."""
    is_scan = way.endswith("scan")

    def arrays() -> Any:
        model = model_of(config, format, jax.random.key(0))
        cache = serve.empty_cache(config, batch, -(-(args.there + TOKENS) // 512) * 512)
        if is_scan:
            model["layers"], cache = stacked(model["layers"]), stacked(cache)
        return model, cache, jnp.zeros(batch, jnp.int32)

    program_of = generator(config, scanned if is_scan else serve.forward, args.there)
    try:
        if args.lower:
            return lowered(program_of, arrays)
        model, cache, tokens = arrays()
        return timed(f"{way}, batch {batch}", program_of, model, cache, tokens, args)
    finally:
        jax.clear_caches()  # a program holds memory of the device


def lowered(generate: Any, arrays: Callable[[], Any]) -> Row:
    """The seconds that it takes to trace and lower it for CUDA."""
    start = time.perf_counter()
    generate.trace(*jax.eval_shape(arrays)).lower(lowering_platforms=("cuda",))
    return {"lower_s": round(time.perf_counter() - start, 1)}


def timed(name: str, generate: Any, model: Any, cache: Any, tokens: jax.Array, args: Args) -> Row:
    """The row of a program that runs here."""
    start = time.perf_counter()
    compiled = generate.lower(model, cache, tokens).compile()
    row = {"weights_gb": round(timing.nbytes(model) / 2**30, 2)}
    row["compile_s"] = round(time.perf_counter() - start, 1)
    row["temp_gb"] = round(compiled.memory_analysis().temp_size_in_bytes / 2**30, 2)

    def call(_: Any) -> jax.Array:
        nonlocal cache, tokens
        cache, tokens = compiled(model, cache, tokens)
        return tokens

    times = []
    for _ in range(repeats(args, 9) + 2):
        start = time.perf_counter()
        jax.block_until_ready(call(None))
        times.append(1e3 * (time.perf_counter() - start) / TOKENS)
    if args.profile:
        for events in [*timing.profiles(call, [(None,)], 2).values()][:1]:
            show(program.kernel_table(name, program.kernels(events, 2 * TOKENS)))
    return {"ms": round(statistics.median(times[2:]), 3)} | row
