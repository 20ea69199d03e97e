"""What an expert does between its two products: a table of functions of float32 numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

LIMIT = 7.0  # of gpt-oss: gate from above, up from both sides
SHARPNESS = 1.702  # likewise: sigmoid(1.702 x) x is close to GELU


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.gelu(gate, approximate=True) * up


def _geglu_erf(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.gelu(gate, approximate=False) * up


def _relu2(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(gate)) * up


def _gpt_oss(gate: jax.Array, up: jax.Array) -> jax.Array:
    gate, up = jnp.minimum(gate, LIMIT), jnp.clip(up, -LIMIT, LIMIT)
    return gate * jax.nn.sigmoid(SHARPNESS * gate) * (up + 1)


ACTIVATIONS: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "swiglu": _swiglu,  # silu(gate) up; arXiv 2002.05202
    "geglu": _geglu,  # gelu(gate) up, by tanh; likewise
    "geglu_erf": _geglu_erf,  # gelu(gate) up, exact
    "relu2": _relu2,  # relu(gate)^2 up; arXiv 2109.08668
    "gpt_oss": _gpt_oss,  # clamped, up + 1; openai/gpt-oss, gpt_oss/torch/model.py
}


def halves(gate_up: jax.Array, interleaved: bool) -> tuple[jax.Array, jax.Array]:
    """Gate and up, float32 (..., I) each.

    Args:
      gate_up: (..., 2 I): all gates, then all ups; or one of each by turns.
      interleaved: whether by turns, as gpt-oss has it.
    """
    floats = gate_up.astype(jnp.float32)
    if interleaved:
        pairs = floats.reshape(*floats.shape[:-1], -1, 2)
        return pairs[..., 0], pairs[..., 1]
    gate, up = jnp.split(floats, 2, axis=-1)
    return gate, up
