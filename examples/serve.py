"""Generates tokens with a Llama whose weights are in MX, as a checkpoint on a disk has them.

    python examples/serve.py FOLDER --prompt 1 15043 3186   # config.json and .safetensors files
    python examples/serve.py                                # of a tiny one with random weights

`random_llama.py` writes a checkpoint of Llama-3-8B's shapes. One in floats is quantized to MXFP8.
"""

import argparse
import re
import runpy
import tempfile
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

import jax_mx

LLAMA = runpy.run_path(f"{Path(__file__).parent}/random_llama.py")
JOIN = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
RULES = {r".*(embed_tokens|lm_head).*": None, ".*": "mxfp8"}  # of a checkpoint in floats
norm, attention, empty_cache = (LLAMA[name] for name in ("norm", "attention", "empty_cache"))
product = partial(jax_mx.einsum, "...k,nk->...n", recipe="bf16")  # x (..., K), w (N, K)


def steps_of(config, w, its, positions):
    """A layer as `jax_mx.matmul_chain` takes it."""
    powers = jnp.linspace(0, 1, config["head_dim"] // 2, False)
    angles = positions[:, None] * config["rope_theta"] ** -powers
    attend = jax_mx.CachedAttention(its[0], its[1], positions[0], jnp.cos(angles), jnp.sin(angles))
    of_mlp = w["post_attention_layernorm"], w["mlp.gate_up_proj"], "swiglu"
    of_attention = w["input_layernorm"], w["self_attn.qkv_proj"]
    return [of_attention, attend, w["self_attn.o_proj"], of_mlp, w["mlp.down_proj"]]


def plain(config, x, residual, steps):
    """The same as `jax_mx.matmul_chain`, in plain JAX: of weights in floats, of many tokens."""
    caches = []
    for step in steps:
        if isinstance(step, jax_mx.CachedAttention):
            x, cache = attention(step, x)
            caches.append(cache)
            continue
        weight, w, *activation = step if isinstance(step, tuple) else (None, step)
        if weight is not None:
            residual = residual + x
            x = norm(config, residual, weight)
        x = product(x, w)
        if activation:
            x = jax.nn.silu(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :]
    return x, residual, caches


def forward(config, model, cache, tokens, start):
    """The logits behind the last of tokens (B, S) from position `start` on; and the cache."""
    x, steps = model["embed_tokens"][tokens], []
    for w, its in zip(model["layers"], cache, strict=True):
        steps += steps_of(config, w, its, start + jnp.arange(tokens.shape[1]))
    last, zeros = [(model["norm"], model["lm_head"])], jnp.zeros_like(x)
    in_mx = [isinstance(w, jax_mx.MXArray) for w in (steps[-1], model["lm_head"])]
    if tokens.shape[1] == 1 and len(x) <= 16 and in_mx[0]:  # one call of all kernels
        steps, last = (steps + last, []) if in_mx[1] else (steps, last)
        y, x, cache = jax_mx.matmul_chain(x, steps, residual=zeros, eps=config["rms_norm_eps"])
    else:
        y, x, cache = plain(config, x, zeros, steps)
    return plain(config, y[:, -1], x[:, -1], last)[0], cache


def generate(config, steps, model, prompt):
    """The likeliest tokens (B, steps) behind a prompt (B, S)."""
    batch, length = prompt.shape
    cache = empty_cache(config, batch, length + steps)

    def step(carry, position):
        tokens = carry[0].argmax(-1).astype(jnp.int32)
        return forward(config, model, carry[1], tokens[:, None], position), tokens

    carry = forward(config, model, cache, prompt, 0)
    return jax.lax.scan(step, carry, length + jnp.arange(steps))[1].T


def load(folder):
    """The config of a Llama, and its weights by layer."""
    config = LLAMA["config_of"](folder)
    params = jax_mx.quantize_params(jax_mx.load_checkpoint(folder, join=JOIN), RULES)
    layers, model = [{} for _ in range(config["num_hidden_layers"])], {}
    for name, w in params.items():
        if not (parts := re.fullmatch(r"(?:model\.)?(?:layers\.(\d+)\.)?(.*)\.weight", name)):
            raise SystemExit(f"serve.py: a Llama has no {name!r}, which {folder} has")
        w = w if isinstance(w, jax_mx.MXArray) else w.astype(jnp.bfloat16)
        (layers[int(parts[1])] if parts[1] else model)[parts[2]] = w
    return config, {"lm_head": model["embed_tokens"], **model, "layers": layers}  # may be tied


def main() -> None:
    """Loads, generates, says how fast."""
    parser = argparse.ArgumentParser(description="Generates with a Llama in MX.")
    parser.add_argument("folder", nargs="?", help="default: a random one, made here")
    parser.add_argument("--prompt", type=int, nargs="+", default=[1, 2, 3], help="tokens")
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as tiny:
        if not options.folder:
            LLAMA["write"](Path(tiny), "tiny")
        config, model = load(options.folder or tiny)
    prompt = jnp.array([options.prompt], jnp.int32)
    run = jax.jit(partial(generate, config, options.steps)).lower(model, prompt).compile()
    for _ in range(2):  # the first run loads libraries
        start = time.perf_counter()
        tokens = jax.block_until_ready(run(model, prompt))[0].tolist()
        took = 1e3 * (time.perf_counter() - start) / options.steps
    print(f"{took:.2f} ms a token, prompt included; {tokens}")


if __name__ == "__main__":
    main()
