"""Generates tokens with a Llama whose weights are in MX, as a checkpoint on a disk has them.

    python examples/serve.py FOLDER --prompt 1 15043 3186   # config.json and .safetensors files
    python examples/serve.py                                # of a tiny one with random weights

`random_llama.py` writes a checkpoint of Llama-3-8B's shapes. One in floats is quantized to MXFP8.
"""

import argparse
import re
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

import jax_mx

sys.path.append(str(Path(__file__).parent))
import random_llama
from attention_kernels.function import attend

JOIN = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
RULES = {r".*(embed_tokens|lm_head).*": None, ".*": "mxfp8"}  # of a checkpoint in floats
FEW = 4  # tokens, up to which a kernel norms and multiplies at once
product = partial(jax_mx.einsum, "...k,nk->...n", recipe="bf16")  # x (..., K), w (N, K)


def normed_product(config, x, more, weight, w, activation=None):
    """The product of the RMS norm of x + more, perhaps of gates and ups; and the sum."""
    eps = config["rms_norm_eps"]
    if isinstance(w, jax_mx.MXArray) and x.size <= FEW * x.shape[-1]:
        return jax_mx.normed_matmul(x, more, weight, w, eps=eps, activation=activation)
    x = x + more
    x32 = x.astype(jnp.float32)
    factor = jax.lax.rsqrt((x32**2).mean(-1, keepdims=True) + eps)
    y = product((x32 * factor).astype(x.dtype) * weight, w)
    if activation:
        y = jax.nn.silu(y[..., : y.shape[-1] // 2]) * y[..., y.shape[-1] // 2 :]
    return y, x


def layer(config, w, cache, x, more, start):
    """A layer of a prompt (B, S, width) or a token, whose input is x + more, as its output is."""
    b, s, _ = x.shape
    qkv, x = normed_product(config, x, more, w["input_layernorm"], w["self_attn.qkv_proj"])
    qkv = qkv.reshape(b, s, -1, config["head_dim"])
    y, cache = attend(qkv, cache, start, config["rope_theta"])
    more = product(y.reshape(b, s, -1), w["self_attn.o_proj"])
    gates = w["post_attention_layernorm"], w["mlp.gate_up_proj"], "swiglu"
    y, x = normed_product(config, x, more, *gates)
    return x, product(y, w["mlp.down_proj"]), cache


def forward(config, model, cache, tokens, start):
    """The logits behind the last of tokens (B, S) from position `start` on; and the cache."""
    x, cache = model["embed_tokens"][tokens], [*cache]
    more = jnp.zeros_like(x)
    for i, w in enumerate(model["layers"]):
        x, more, cache[i] = layer(config, w, cache[i], x, more, start)
    end = model["norm"], model["lm_head"]
    return normed_product(config, x[:, -1], more[:, -1], *end)[0], cache


def empty_cache(config, batch, length):
    """Keys and values (B, length, 2 heads, D) of each layer."""
    shape = batch, length, 2 * config["num_key_value_heads"], config["head_dim"]
    return [jnp.zeros(shape, jnp.bfloat16) for _ in range(config["num_hidden_layers"])]


def generate(config, steps, model, prompt):
    """The likeliest tokens (B, steps) behind a prompt (B, S)."""
    length = prompt.shape[1]
    cache = empty_cache(config, prompt.shape[0], length + steps)

    def step(carry, position):
        tokens = carry[0].argmax(-1).astype(jnp.int32)
        return forward(config, model, carry[1], tokens[:, None], position), tokens

    first = forward(config, model, cache, prompt, 0)
    return jax.lax.scan(step, first, length + jnp.arange(steps))[1].T


def load(folder):
    """The config of a Llama, and its weights by layer."""
    config = random_llama.config_of(folder)
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
            random_llama.write(Path(tiny), "tiny")
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
