"""Models of flax that tests train, each with `dot_general` as it comes, and text to train on."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx


# ---- perceptrons of every layer that takes a dot_general ---
class Linen(linen.Module):
    """Dense, DenseGeneral to and from heads."""

    dot_general: Any

    @linen.compact
    def __call__(self, x):
        """x: (batch, tokens, 64)."""
        options = {"dot_general": self.dot_general, "use_bias": True}
        h = linen.relu(linen.Dense(128, **options)(x))
        h = linen.DenseGeneral((4, 16), **options)(h)
        return x + linen.DenseGeneral(64, axis=(-2, -1), **options)(linen.relu(h))


class Nnx(nnx.Module):
    """Linear, LinearGeneral to heads, Einsum from heads."""

    def __init__(self, dot_general: Any, einsum: Any, rngs: nnx.Rngs):
        options = {"dot_general": dot_general, "rngs": rngs}
        self.up = nnx.Linear(64, 128, **options)
        self.heads = nnx.LinearGeneral(128, (4, 16), **options)
        self.down = nnx.Einsum("bshd,hdo->bso", (4, 16, 64), einsum_op=einsum, rngs=rngs)

    def __call__(self, x):
        """x: (batch, tokens, 64)."""
        return x + self.down(nnx.relu(self.heads(nnx.relu(self.up(x)))))


# ---- a transformer over bytes ---
WIDTH, HEADS, LAYERS, TOKENS, BATCH = 64, 4, 2, 32, 8


class Block(nnx.Module):
    """Attention and a perceptron; attention's own products stay floats, as recipes have it."""

    def __init__(self, dot_general: Any, rngs: nnx.Rngs):
        options = {"dot_general": dot_general, "rngs": rngs}
        options |= {"dtype": jnp.bfloat16, "use_bias": False}
        size = WIDTH // HEADS
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs, dtype=jnp.bfloat16) for _ in "ab"])
        self.qkv = nnx.LinearGeneral(WIDTH, (3, HEADS, size), **options)
        self.out = nnx.LinearGeneral((HEADS, size), WIDTH, axis=(-2, -1), **options)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, **options)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, **options)

    def __call__(self, x):
        """x: (batch, tokens, width)."""
        q, k, v = (self.qkv(self.norms[0](x))[:, :, i] for i in range(3))
        x = x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Transformer(nnx.Module):
    """Embeddings and the last product are floats, as published recipes have them."""

    def __init__(self, dot_general: Any, seed: int = 0):
        rngs = nnx.Rngs(seed)
        self.bytes = nnx.Embed(256, WIDTH, rngs=rngs)
        self.places = nnx.Embed(TOKENS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(dot_general, rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, text):
        """text: (batch, tokens) of bytes; returns logits."""
        x = self.bytes(text) + self.places(jnp.arange(text.shape[1]))
        x = x.astype(jnp.bfloat16)
        for block in self.blocks:
            x = block(x)
        return self.norm(x.astype(jnp.float32)) @ self.bytes.embedding[...].T


@functools.cache
def text() -> np.ndarray:
    """Sources of Python's argparse, which every Python has, as bytes."""
    import argparse

    return np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)


def batches(steps: int):
    """(steps, batch, tokens + 1) pieces of the text, the same every time."""
    starts = np.random.default_rng(0).integers(0, len(text()) - TOKENS - 1, (steps, BATCH))
    return jnp.asarray(text()[starts[..., None] + np.arange(TOKENS + 1)], jnp.int32)


def text_loss(model, pieces):
    """Mean cross entropy, in nats a byte."""
    logits = model(pieces[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, pieces[:, 1:]).mean()
