"""Gated activations: `gated`, floats with a derivative, and `Gated`, for quantizers."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_mx import reference
from jax_mx.arrays.checks import float_dtype, floats, shown
from jax_mx.facts.activations import ACTIVATIONS


@partial(jax.tree_util.register_dataclass, data_fields=("weights",), meta_fields=("name",))
@dataclasses.dataclass(frozen=True, eq=False)
class Gated:
    """What is quantized is `gated(x, name, weights=weights)`, without the array in between.

    A pytree; the weights are data.

    Attributes:
      name: "swiglu".
      weights: see `gated`.
    """

    name: str = "swiglu"
    weights: jax.typing.ArrayLike | None = None

    def __post_init__(self):
        """Raises ValueError for another name."""
        _row("Gated", self.name)


def gated(
    gate_up: jax.typing.ArrayLike,
    activation: str = "swiglu",
    *,
    weights: jax.typing.ArrayLike | None = None,
) -> jax.Array:
    """silu(gate) * up * weight, what an MLP has between its products.

    Computed in float32 and rounded to gate_up's dtype at the end. From bfloat16 every
    implementation gives the same bits, within 1.02 units in the last place of the exact number:
    silu(gate) is rounded to 9 bits before it is multiplied, and a zero of its sign stands for each
    subnormal. Differentiable to gate_up and weights; the derivatives are those of the exact
    function, in float32.

    Args:
      gate_up: bfloat16, float16 or float32 (..., 2 K): all gates, then all ups.
      activation: "swiglu".
      weights: float32 (...,), by which rows are multiplied, as a router has them; or None.

    Returns:
      (..., K), of gate_up's dtype.

    Raises:
      TypeError, ValueError: another dtype, an odd length, an unknown name, weights of another
        shape.
    """
    op = "gated"
    given = floats(op, gate_up)
    x = jnp.asarray(given, float_dtype(op, "gate_up", given.dtype))
    _row(op, activation)
    return _gated(x, weights_of(op, x, weights), activation)


def weights_of(op: str, x: Any, weights: Any) -> jax.Array:
    """The weights of x's rows, checked; ones where there are none.

    Raises:
      TypeError, ValueError: x or the weights are no activation's.
    """
    shape = tuple(x.shape[:-1])
    if x.ndim == 0 or x.shape[-1] % 2:
        raise ValueError(
            f"{op}: an activation wants gates and ups, halves of the last axis, got the shape "
            f"{tuple(x.shape)}"
        )
    if weights is None:
        return jnp.ones(shape, jnp.float32)
    dtype = getattr(weights, "dtype", None)
    if dtype != jnp.float32 or tuple(weights.shape) != shape:
        found = shown(weights) if dtype is None else f"{dtype}{[*weights.shape]}"
        error = TypeError if dtype != jnp.float32 else ValueError
        raise error(f"{op}: weights must be float32{[*shape]}, one for each row, got {found}")
    return jnp.asarray(weights)


def _row(op: str, name: Any) -> None:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        allowed = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"{op}: activation must be {allowed}, got {shown(name)}")


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _gated(gate_up: jax.Array, weights: jax.Array, name: str) -> jax.Array:
    return reference.gated(gate_up, weights, name)


@_gated.defjvp
def _gated_jvp(name: str, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    def exact(gate_up, weights):
        gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
        return reference.PARTS[name](gate) * up * weights[..., None]

    _, tangent = jax.jvp(exact, primals, tangents)
    return _gated(*primals, name), tangent.astype(primals[0].dtype)


jax.export.register_pytree_node_serialization(
    Gated,
    serialized_name="jax_mx.Gated",
    serialize_auxdata=lambda aux: json.dumps(aux).encode(),
    deserialize_auxdata=lambda text: tuple(json.loads(text)),
)
