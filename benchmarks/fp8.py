"""FP8 with one scale a tensor, as JAX users have it without us: what steps are compared with."""

from typing import Any

import jax
import jax.numpy as jnp
from flax.linen import fp8_ops

Scaled = tuple[jax.Array, jax.Array]  # codes, and the float32 scale of all of them


# ---- current scaling, in plain JAX ---
def _scaled(x: jax.Array, dtype: Any) -> Scaled:
    """x over a scale that makes its largest magnitude the dtype's."""
    amax = jnp.max(jnp.abs(x)).astype(jnp.float32)
    scale = jnp.maximum(amax, 1e-12) / float(jnp.finfo(dtype).max)
    return (x.astype(jnp.float32) / scale).astype(dtype), scale


def _product(a: Scaled, b: Scaled, contracted: tuple[Any, Any], dtype: Any) -> jax.Array:
    (a_codes, a_scale), (b_codes, b_scale) = a, b
    sums = jax.lax.dot_general(
        a_codes, b_codes, (contracted, ((), ())), preferred_element_type=jnp.float32
    )
    return (sums * (a_scale * b_scale)).astype(dtype)


@jax.custom_vjp
def current(x: jax.Array, w: jax.Array) -> jax.Array:
    """x (..., K) times w (K, N): E4M3 operands, E5M2 gradients, each scaled by its own amax."""
    return _current_fwd(x, w)[0]


def _current_fwd(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[Scaled, Scaled]]:
    kept = _scaled(x, jnp.float8_e4m3fn), _scaled(w, jnp.float8_e4m3fn)
    return _product(*kept, ((x.ndim - 1,), (0,)), x.dtype), kept


def _current_bwd(kept: tuple[Scaled, Scaled], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = kept
    scaled, last = _scaled(dy, jnp.float8_e5m2), dy.ndim - 1
    rows = tuple(range(last))
    dx = _product(scaled, w, ((last,), (1,)), dy.dtype)
    return dx, _product(x, scaled, (rows, rows), dy.dtype)


current.defvjp(_current_fwd, _current_bwd)


# ---- delayed scaling, flax's ---
OP = fp8_ops.Fp8DirectDotGeneralOp()
STATE = fp8_ops.OVERWRITE_WITH_GRADIENT  # gradients of such variables are their next values


def delayed_state() -> Any:
    """The scales and histories of a product before its first step."""
    x = jnp.zeros((1, 1), jnp.bfloat16)
    return OP.init(jax.random.key(0), x, x, (((1,), (0,)), ((), ())))[STATE]


def delayed(x: jax.Array, w: jax.Array, state: Any) -> jax.Array:
    """x (..., K) times w (K, N), scaled by what `state` holds of the steps before."""
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    y: Any = OP.apply({STATE: state}, x, w, dims)
    return y
