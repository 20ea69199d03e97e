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
norm, rotated, empty_cache = (LLAMA[name] for name in ("norm", "rotated", "empty_cache"))
ATTENTION = "cudnn" if jax.default_backend() == "gpu" else "xla"
product = partial(jax_mx.einsum, "...k,nk->...n", recipe="bf16")  # x (..., K), w (N, K)


def chain(config, x, steps, residual):
    """`jax_mx.matmul_chain` for up to 16 tokens, one call; plain JAX for more, or for floats."""
    steps = [step if isinstance(step, tuple) else (None, step) for step in steps]
    if isinstance(steps[0][1], jax_mx.MXArray) and x.size // x.shape[-1] <= 16:
        return jax_mx.matmul_chain(x, steps, residual=residual, eps=config["rms_norm_eps"])
    for weight, w, *activation in steps:
        if weight is not None:
            residual = residual + x
            x = norm(config, residual, weight)
        x = product(x, w)
        if activation:
            gate, up = jnp.split(x, 2, -1)
            x = jax.nn.silu(gate) * up
    return x, residual


def attention(config, cache, qkv, start):
    """The attention of tokens (B, S) from position `start` on, of their products; and the cache."""
    (b, s, _), heads, d = qkv.shape, config["num_attention_heads"], config["head_dim"]
    positions, theta = (start + jnp.arange(s)).astype(jnp.float32), config["rope_theta"]
    q, k, v = jnp.split(qkv.reshape(b, s, -1, d), [heads, heads + config["num_key_value_heads"]], 2)
    put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=1)
    cache = [*map(put, cache, (rotated(k, positions, theta), v))]
    lengths = jnp.full(b, start + s, jnp.int32)
    attend = partial(jax.nn.dot_product_attention, key_value_seq_lengths=lengths)
    y = attend(rotated(q, positions, theta), *cache, is_causal=s > 1, implementation=ATTENTION)
    return y.reshape(b, s, -1), cache


def forward(config, model, cache, tokens, start):
    """The logits behind the last of tokens (B, S) from position `start` on; and the cache."""
    layers, x, cache = model["layers"], model["embed_tokens"][tokens], [*cache]
    ahead = [(w["input_layernorm"], w["self_attn.qkv_proj"]) for w in layers]
    ahead.append((model["norm"], model["lm_head"]))
    y, x = chain(config, x, ahead[:1], jnp.zeros_like(x))
    for i, w in enumerate(layers):
        y, cache[i] = attention(config, cache[i], y, start)
        y, x = (y[:, -1], x[:, -1]) if w is layers[-1] else (y, x)
        of_mlp = w["post_attention_layernorm"], w["mlp.gate_up_proj"], "swiglu"
        steps = [w["self_attn.o_proj"], of_mlp, w["mlp.down_proj"], ahead[i + 1]]
        y, x = chain(config, y, steps, x)
    return y, cache


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
    model = {"layers": [{} for _ in range(config["num_hidden_layers"])]}
    for name, w in params.items():
        number, name = re.findall(r"(?:model\.)?(?:layers\.(\d+)\.)?(.*)\.weight", name)[0]
        (model["layers"][int(number)] if number else model)[name] = w
    return config, {"lm_head": model["embed_tokens"], **model}  # tied where there is no other


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
