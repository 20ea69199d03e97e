"""Generates text tokens with a Llama whose weights are in MX, as a checkpoint has them.

    python examples/serve.py FOLDER --prompt 1 15043 3186   # config.json and .safetensors files
    python examples/serve.py                 # of a small one with the same names, made here
    python examples/serve.py --size 8b       # of the shapes of Llama-3-8B, random: 5 GB of disk

Activations stay in bfloat16. On Hopper products of few tokens read codes and scales as they lie. A
checkpoint in floats becomes MX when it is loaded. Queries, keys and values are one product, and so
are gates and ups.
"""

import jax
import jax.numpy as jnp

import jax_mx

SIZES = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip


# ---- the model ---
def product(x, w):
    """x (..., K) times a weight (N, K), in MX or in bfloat16."""
    return jax_mx.einsum("...k,nk->...n", x, w, recipe="bf16")


def norm(x, weight):
    """RMS norm along the last axis."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt((x32**2).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * weight


def rotated(x, positions, theta):
    """(B, S, heads, D) turned by their positions (S,)."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * theta ** (-jnp.arange(half) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def attention(q, k, v, positions):
    """q (B, S, KV, heads of each, D) over all that the cache holds up to each position."""
    scores = jnp.einsum("bsgrd,bgtd->bgrst", q, k, preferred_element_type=jnp.float32)
    seen = jnp.arange(k.shape[2]) <= positions[:, None]
    scores = jnp.where(seen, scores * q.shape[-1] ** -0.5, -jnp.inf)
    return jnp.einsum("bgrst,bgtd->bsgrd", jax.nn.softmax(scores).astype(q.dtype), v)


def layer(config, w, cache, x, start):
    """A layer of tokens (B, S, width) from position `start` on; and its cache with them."""
    heads, groups, d = (
        config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    positions = start + jnp.arange(x.shape[1])
    qkv = product(norm(x, w["input_layernorm"]), w["qkv_proj"])
    qkv = qkv.reshape(*x.shape[:2], heads + 2 * groups, d)
    q, k, v = jnp.split(qkv, [heads, heads + groups], 2)
    theta = config.get("rope_theta", 500000.0)
    q, k = rotated(q, positions, theta), rotated(k, positions, theta)
    cache = [
        jax.lax.dynamic_update_slice_in_dim(old, jnp.swapaxes(new, 1, 2), start, 2)
        for old, new in zip(cache, (k, v), strict=True)
    ]
    q = q.reshape(*x.shape[:2], groups, heads // groups, d)
    y = attention(q, *cache, positions).reshape(*x.shape[:2], -1)
    x = x + product(y, w["o_proj"])
    gate, up = jnp.split(product(norm(x, w["post_attention_layernorm"]), w["gate_up_proj"]), 2, -1)
    return x + product(jax.nn.silu(gate) * up, w["down_proj"]), cache


def forward(config, model, cache, tokens, start):
    """The logits behind the last of tokens (B, S) from position `start` on; and the cache."""
    x, caches = model["embed"][tokens], []
    for w, old in zip(model["layers"], cache, strict=True):
        x, new = layer(config, w, old, x, start)
        caches.append(new)
    return product(norm(x[:, -1], model["norm"]), model["lm_head"]), caches


def empty_cache(config, batch, length):
    """Keys and values (B, KV, length, D) of each layer."""
    shape = batch, config["num_key_value_heads"], length, config["head_dim"]
    return [[jnp.zeros(shape, jnp.bfloat16)] * 2 for _ in range(config["num_hidden_layers"])]


def generate(config, model, cache, prompt, start, steps):
    """(B, steps) of the likeliest tokens behind a prompt (B, S), and the cache."""
    logits, cache = forward(config, model, cache, prompt, start)

    def step(carry, position):
        cache, logits = carry
        tokens = logits.argmax(-1).astype(jnp.int32)
        logits, cache = forward(config, model, cache, tokens[:, None], position)
        return (cache, logits), tokens

    positions = start + prompt.shape[1] + jnp.arange(steps)
    (cache, _), tokens = jax.lax.scan(step, (cache, logits), positions)
    return tokens.T, cache
