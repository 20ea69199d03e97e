"""`normed_matmul`: a residual sum, its norm, and a product with a frozen weight."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_mx.formats.checks import array_of, is_symbolic
from jax_mx.formats.formats import BLOCK
from jax_mx.formats.sharding import is_explicit
from jax_mx.launch.private import vary_alike
from jax_mx.norms.rms_norm import eps_of, rms_norm
from jax_mx.products.einsum import einsum
from jax_mx.products.primitives import products_p
from jax_mx.quantizing import derivatives
from jax_mx.quantizing.facts.product_kernels import DIRECT, PRODUCTS, normed_fits
from jax_mx.quantizing.mxarray import MXArray
from jax_mx.quantizing.plan import ProductPlan

_FORMATS = {p.formats[0] for p in PRODUCTS if p.op == "normed"}


def normed_matmul(
    x: jax.typing.ArrayLike,
    residual: jax.typing.ArrayLike,
    weight: jax.typing.ArrayLike,
    w: MXArray,
    *,
    eps: float = 1e-6,
) -> tuple[jax.Array, jax.Array]:
    """The product that begins a layer, of a token stream and of what the layer before adds to it.

        y, x = jax_mx.normed_matmul(x, residual, weight, w)

    It stands for these lines, and gives their bits where products are exact::

        y, _, x, _ = jax_mx.rms_norm(x, weight, eps=eps, residual=residual)
        y = jax_mx.einsum("...k,nk->...n", y, w, recipe="bf16")

    On Hopper one kernel computes all of it for up to four rows of bfloat16, of 16384 elements at
    most. The weight is in MXFP8 (E4M3) or MXFP4, in blocks of 32 along K, a multiple of 128.
    Elsewhere it is these lines. Its derivatives are theirs.

    Args:
      x: bfloat16, float16 or float32 (..., K).
      residual: of x's shape and dtype.
      weight: floats (K,), of the norm.
      w: (N, K), floats or an `MXArray` with its blocks along K.
      eps: see `rms_norm`.

    Returns:
      y (..., N), and x + residual (..., K).

    Raises:
      TypeError, ValueError: as `rms_norm` and `einsum` do.
    """
    op = "normed_matmul"
    x, residual, weight = (
        array_of(op, name, a) for name, a in (("x", x), ("residual", residual), ("weight", weight))
    )
    eps = eps_of(op, eps)
    in_steps = partial(_in_steps, eps=eps)
    if not _has_kernel(x, residual, weight, w):
        return in_steps(x, residual, weight, w)
    plan = ProductPlan("normed", (w.format,), x.dtype, False, DIRECT, eps=eps)
    rows = math.prod(x.shape[:-1])
    flat = (a.reshape(rows, -1) for a in (x, residual))
    arrays = [*flat, weight, w.values[None], w.scales[None]]
    operands = vary_alike(*map(jax.lax.stop_gradient, arrays))
    y, total = products_p["normed"].bind(*operands, plan=plan)
    outs = y.reshape(*x.shape[:-1], -1), total.reshape(x.shape)

    def tangents_of(_: Any, args: list, tangents: list) -> Any:
        moves = [jnp.zeros_like(a) if t is None else t for a, t in zip(args, tangents, strict=True)]
        return jax.jvp(lambda x, residual, weight: in_steps(x, residual, weight, w), args, moves)[1]

    y, total = derivatives.derived(outs, [x, residual, weight], tangents_of)
    return y, total


def _in_steps(
    x: jax.Array, residual: jax.Array, weight: jax.Array, w: Any, eps: float
) -> tuple[jax.Array, jax.Array]:
    """The lines that it stands for."""
    floats, _, total, _ = rms_norm(x, weight, eps=eps, residual=residual)
    assert total is not None  # there is a residual
    return einsum("...k,nk->...n", floats, w, recipe="bf16"), total


def _has_kernel(x: Any, residual: Any, weight: Any, w: Any) -> bool:
    """Whether kernels may serve these arrays, of shapes that fit each other."""
    if not isinstance(w, MXArray) or w.format not in _FORMATS:
        return False
    if any(a.dtype != jnp.bfloat16 for a in (x, residual, weight)):
        return False
    lies = w.ndim == 2 and w.axis == -1 and w.block == (BLOCK,)
    if not lies or w.scale_layout.is_tiled or w.value_layout.is_tiled:
        return False
    if not x.ndim or any(map(is_symbolic, (*x.shape, *w.shape))) or 0 in w.shape:
        return False
    length = x.shape[-1]
    fits = residual.shape == x.shape and weight.shape == (length,) and w.shape[1] == length
    fits = fits and normed_fits(math.prod(x.shape[:-1]), length)
    meshes = (jax.typeof(a).sharding.mesh for a in (x, residual, weight, w.values))
    return fits and not any(map(is_explicit, meshes))
