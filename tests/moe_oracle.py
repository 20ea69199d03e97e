"""Grouped products and an MoE layer by loops over experts, in numpy, on float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import jax_mx
from jax_mx.quantizing import reference

LAST, FIRST = -1, -2  # which axis of a matrix a product contracts


def taken(x, axis, use, blocks, dtype):
    """The operand of a product, from a matrix that it contracts along an axis, float64.

    Zeros make up whole blocks along it; a Hadamard transform leaves something there.
    """
    x = np.asarray(x, np.float64)
    if use.format is None:
        floats = rounded(rounded(x, dtype), jnp.bfloat16)
        return np.pad(floats, [(0, -x.shape[0] % 32), (0, 0)]) if axis == FIRST else floats
    unit = max(32, use.hadamard.size if use.hadamard else 0)
    pads = [(0, -n % unit) for n in x.shape]
    block = (32, 32) if blocks.square else 32
    q = jax_mx.quantize(
        jnp.asarray(np.pad(x, pads), dtype), use.format,
        block=block, hadamard=use.hadamard, scaling=blocks.scaling, window=use.window,
        **({} if blocks.square else {"axis": axis, "transpose": axis == FIRST}),
        implementation="xla",
    )  # fmt: skip
    floats = np.asarray(q.dequantize(jnp.float32), np.float64)
    floats = floats.T if axis == FIRST and not blocks.square else floats
    return floats[:, : x.shape[1]] if axis == FIRST else floats[: x.shape[0]]


def rounded(x, dtype):
    return np.asarray(jnp.asarray(x, dtype), np.float64)


@functools.partial(jax.jit, static_argnums=(2, 3))
def activated(gate_up, scale, activation, interleaved):
    """The activation between the products, float32, times the weights of rows."""
    halves = reference.halves(gate_up, activation, interleaved)
    return reference.gated_exactly(halves, activation) * scale[:, None]


@functools.partial(jax.jit, static_argnums=(3, 4))
def activated_and_gradients(gate_up, scale, dact, activation, interleaved):
    """The same, and the gradients of gate_up and scale for that of the result."""
    f = functools.partial(activated, activation=activation, interleaved=interleaved)
    act, pull = jax.vjp(f, gate_up, scale)
    return act, *pull(dact)


@dataclasses.dataclass
class Products:
    """The three products of a recipe."""

    recipe: jax_mx.Recipe
    dtype: object

    def forward(self, x, w):
        (use, _), (w_use, _) = self.recipe.uses("lhs"), self.recipe.uses("rhs")
        a = taken(x, LAST, use, self.recipe.blocks("lhs"), self.dtype)
        return a @ taken(w, FIRST, w_use, self.recipe.blocks("rhs"), self.dtype)

    def dgrad(self, dy, w):
        (use, _), (_, w_use) = self.recipe.uses("gradient"), self.recipe.uses("rhs")
        a = taken(dy, LAST, use, self.recipe.blocks("gradient"), self.dtype)
        return a @ taken(w, LAST, w_use, self.recipe.blocks("rhs"), self.dtype).T

    def wgrad(self, x, dy):
        (_, x_use), (_, use) = self.recipe.uses("lhs"), self.recipe.uses("gradient")
        a = taken(x, FIRST, x_use, self.recipe.blocks("lhs"), self.dtype)
        return a.T @ taken(dy, FIRST, use, self.recipe.blocks("gradient"), self.dtype)


@dataclasses.dataclass
class Layer:
    """`moe` with everything in one place: values, and every gradient for the result's."""

    recipe: jax_mx.Recipe
    dtype: object = jnp.float32
    activation: str = "swiglu"
    interleaved: bool = False
    residuals: str = "mx"

    def __call__(self, x, experts, weights, w1, w2, b1, b2, dy):
        """(y, the gradients of x, weights, w1, w2, b1, b2), float64."""
        products, dtype = Products(self.recipe, self.dtype), self.dtype
        options = self.activation, self.interleaved
        y, dx = np.zeros((x.shape[0], w2.shape[2])), np.zeros(x.shape)
        gradients = [np.zeros(a.shape) for a in (weights, w1, w2, b1, b2)]
        dweights, dw1, dw2, db1, db2 = gradients
        for e in range(w1.shape[0]):
            t, j = np.nonzero(experts == e)
            if not len(t):
                continue
            scale, rows = weights[t, j], x[t]
            gate_up = rounded(products.forward(rows, w1[e]), dtype)
            gate_up = rounded(gate_up + b1[e], dtype)
            scales = np.float32(scale)
            act = rounded(activated(np.float32(gate_up), scales, *options), dtype)
            np.add.at(y, t, rounded(products.forward(act, w2[e]), dtype))
            np.add.at(y, t, scale[:, None] * b2[e])
            kept = gate_up
            if self.residuals == "mx":
                q = jax_mx.quantize(jnp.asarray(gate_up, dtype), implementation="xla")
                kept = np.asarray(q.dequantize(dtype), np.float64)
            dact = rounded(products.dgrad(dy[t], w2[e]), dtype)
            again, dgate_up, dscale = activated_and_gradients(
                np.float32(kept), scales, np.float32(dact), *options
            )
            dgate_up = rounded(dgate_up, dtype)
            dweights[t, j] = np.asarray(dscale) + dy[t] @ b2[e]
            dw2[e] = products.wgrad(rounded(again, dtype), dy[t])
            db2[e] = scale @ dy[t]
            np.add.at(dx, t, rounded(products.dgrad(dgate_up, w1[e]), dtype))
            dw1[e] = products.wgrad(rows, dgate_up)
            db1[e] = dgate_up.sum(0)
        return y, (dx, *gradients)
