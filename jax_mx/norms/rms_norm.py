"""`rms_norm`: root mean square norms, as floats with a derivative and quantized."""

import itertools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.formats.checks import array_of, flag, shown
from jax_mx.formats.formats import Format
from jax_mx.formats.sharding import is_explicit, resharded, spec_of
from jax_mx.launch import private
from jax_mx.norms import reference
from jax_mx.norms.reference import settled
from jax_mx.norms.source import NormSource
from jax_mx.quantizing import derivatives
from jax_mx.quantizing.activations import Of
from jax_mx.quantizing.mxarray import MXArray
from jax_mx.quantizing.quantize import quantizer_of


class Normed(NamedTuple):
    """The results of `rms_norm`; None for each one that the caller did not ask for.

    Attributes:
      floats: (..., K), of x's dtype; a NaN has the bits that `MXArray.dequantize` gives it.
      quantized: an `MXArray`; or a pair, as `quantize_both` gives it.
      sum: x + residual, of x's dtype, with NaNs of the same bits.
      factors: float32 (...,), the factors of rows: 1 / sqrt(mean(x^2) + eps).
    """

    floats: jax.Array | None = None
    quantized: MXArray | tuple[MXArray, MXArray] | None = None
    sum: jax.Array | None = None
    factors: jax.Array | None = None


jax.export.register_namedtuple_serialization(Normed, serialized_name="jax_mx.Normed")


def rms_norm(
    x: jax.typing.ArrayLike,
    weight: jax.typing.ArrayLike | None = None,
    *,
    eps: float = 1e-6,
    residual: jax.typing.ArrayLike | None = None,
    format: Format | str | None = None,
    both: bool = False,
    floats: bool | None = None,
    factors: bool = False,
    **options: Any,
) -> Normed:
    """x / sqrt(mean(x^2) + eps) * weight along the last axis, as floats, codes, or both.

    The bits of the result are defined. They are within one unit in the last place of x's dtype of
    the exact number. An operand or a result that is subnormal in float32 is a zero of its sign::

        total = the sum of x^2, in this order: sums[j] of the squares of elements j, j + 2048,
            j + 4096 ..., one after the other; then neighbours among the 2048 are added, 0 and 1,
            2 and 3 ..., until one is left. In float32, where magnitudes less than 2^-63 count as
            0; of a float32 x in float64.
        factor = sqrt(K / (total + K eps)), in float64, eps as a float32
        y = (x * factor) * weight, in float32, for which the factor is rounded before; of a float32
            x in float64

    and y is rounded to x's dtype before it is quantized. A NaN in x makes its row NaN. A row with
    an infinity, or with squares beyond float32, becomes 0, and NaN where x is infinite.

    A call that returns floats has derivatives of floats, sum and factors to x, residual and weight,
    in any mode, any number of times. They are computed in float32 from sum and factors; only these
    are kept. Codes have no derivative.

    Args:
      x: bfloat16, float16 or float32 (..., K), K at least 1.
      weight: floats (K,), or None for ones.
      eps: a finite number, at least 0.
      residual: of x's shape and dtype, or None. The sum with x is computed in float32 and rounded
        to x's dtype; the function norms and returns it.
      format: of the quantized result, see `quantize`; None: the result is floats. The table under
        "Activations" in docs/formats.md lists the cases in which one kernel norms and quantizes. In
        other cases, with `rows` of the result, and on AMD, XLA norms first.
      both: whether `quantize_both` quantizes the result along its last two axes; otherwise
        `quantize` does along the last one.
      floats: whether the floats are returned; None: only without a format.
      factors: whether the factors of rows are returned.
      options: other keywords of `quantize` or `quantize_both`; `activation` is none of them. `rows`
        picks rows of the result; sum and factors have all rows.

    Returns:
      A `Normed`.

    Raises:
      TypeError: another dtype, or an argument of the wrong type.
      ValueError: shapes that do not fit, an eps that is negative or not finite, or floats=False in
        a call that has no other result.
    """
    op = "rms_norm"
    x = array_of(op, "x", x)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x has the shape {x.shape}; there must be elements in a row")
    if not isinstance(x.shape[-1], int):
        raise ValueError(
            f"{op}: x has the shape {x.shape}; the length of rows must be a number, as sums are in "
            "an order that it decides; make the others symbolic"
        )
    if weight is not None:
        weight = _array_in_shape(op, "weight", weight, (x.shape[-1],))
    if residual is not None:
        residual = _array_in_shape(op, "residual", residual, x.shape)
        if residual.dtype != x.dtype:
            raise TypeError(f"{op}: x is {x.dtype}, residual is {residual.dtype}; convert one")
    eps = eps_of(op, eps)
    quantizer = quantizer_of(op, format, both, options)
    wanted = format is None if floats is None else flag(op, "floats", floats)
    if not wanted and quantizer is None and residual is None and not flag(op, "factors", factors):
        raise ValueError(f"{op}: floats=False leaves no result; drop floats, or give a format")
    by_rows = options.get("rows") is not None  # of the result, whose padding is zeros
    x, residual, weight = _whole(x, residual, weight)
    leaves, tree = jax.tree.flatten((x, residual, weight))
    operands = tree.unflatten(private.vary_alike(*leaves) if len(leaves) > 1 else leaves)
    stop = jax.lax.stop_gradient if wanted else lambda y: y  # codes have no derivative
    y = quantized = None
    if quantizer is None or by_rows:
        y, total, factor = _normed(eps, None, *operands)
        quantized = None if quantizer is None else quantizer(stop(y))
    else:
        results = _quantized(*stop(operands), quantizer=quantizer, eps=eps, floats=wanted)
        quantized = results[:2] if both else results[0]
        factor, total, *kernel_y = results[1 + both :]
        if wanted:
            y, total, factor = _normed(eps, (*kernel_y, total, _plain(factor)), *operands)
    return Normed(
        y if wanted else None,
        quantized,
        None if residual is None else total,
        _plain(factor) if flag(op, "factors", factors) else None,
    )


def eps_of(op: str, eps: Any) -> float:
    """The number that a kernel takes.

    Raises:
      TypeError, ValueError: it is no number that is finite and at least 0.
    """
    if isinstance(eps, bool) or not isinstance(eps, int | float | np.integer | np.floating):
        raise TypeError(f"{op}: eps must be a number, got {shown(eps)}")
    if not 0 <= eps <= float(np.finfo(np.float32).max):  # Python compares with any int
        raise ValueError(f"{op}: eps must be finite and at least 0, got {eps}")
    return float(np.float32(eps))


def _array_in_shape(op: str, name: str, x: Any, shape: tuple[int, ...]) -> jax.Array:
    """An array of floats of this shape.

    Raises:
      TypeError, ValueError: it is none.
    """
    x = array_of(op, name, x)
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{op}: {name} has the shape {tuple(x.shape)}, must be {tuple(shape)}")
    return x


def _whole(x: Any, residual: Any, weight: Any) -> tuple[Any, Any, Any]:
    """The operands with whole rows, on a mesh with explicit axes."""
    operands = [a for a in (x, residual, weight) if a is not None]
    meshes = [m for m in (jax.typeof(a).sharding.mesh for a in operands) if is_explicit(m)]
    if not meshes:
        return x, residual, weight
    mesh = meshes[0]
    spec = (*spec_of(x)[:-1], None)
    pairs = ((x, spec), (residual, spec), (weight, (None,)))
    x, residual, weight = (a if a is None else resharded(a, to, mesh) for a, to in pairs)
    return x, residual, weight


def _plain(factor: jax.Array) -> jax.Array:
    """Factors of rows: kernels give one of 0 a sign, a NaN bits of its own, and subnormal ones."""
    size = jnp.abs(factor)
    size = jnp.where(size < np.finfo(np.float32).tiny, jnp.zeros_like(size), size)
    return jnp.where(jnp.isnan(factor), jnp.nan, size)


def _quantized(
    x: Any, residual: Any, weight: Any, quantizer: Any, eps: float, floats: bool
) -> tuple:
    """A quantizer's results, the factors of rows, x plus residual; and the floats, if wanted."""
    added = () if residual is None else (residual,)
    weights = _weights(weight, x.shape[-1])
    norm = Of(NormSource(eps, bool(added), floats), (*added, weights))
    results = [*quantizer(x, activation=norm)]
    y = [results.pop().reshape(x.shape)] if floats else []
    total = x if residual is None else results.pop().reshape(x.shape)
    return *results, total, *y


@partial(jax.jit, static_argnums=1)
def _weights(weight: Any, length: int) -> jax.Array:
    """In float32."""
    return jnp.ones(length, jnp.float32) if weight is None else settled(weight)


@partial(jax.jit, static_argnums=0)
def _normed(eps: float, known: Any, x: jax.Array, residual: Any, weight: Any) -> list[jax.Array]:
    """[y, the sum with the residual, the factors of rows], where a kernel has not given them."""
    leaves, tree = jax.tree.flatten((x, residual, weight))
    is_sum = residual is not None
    if known is None:
        x, residual, weight = tree.unflatten(map(jax.lax.stop_gradient, leaves))
        total = x if residual is None else reference.added(x, residual)
        y, factor = reference.rms_norm(total, weight, eps)
        known = y, total, factor[..., 0]

    def tangents_of(outs: list, args: list, tangents: list) -> list[jax.Array]:
        asked = [t is not None for t in tangents]

        def transposed(kept: tuple, *cotangents: jax.Array) -> list[jax.Array]:
            dx, dweight = _gradients(kept, cotangents)
            of_all = jax.tree.leaves((dx, dx if is_sum else None, dweight))
            return [*itertools.compress(of_all, asked)]

        kept = (*outs[1:], tree.unflatten(args)[-1])
        return derivatives.linear(transposed, kept, [t for t in tangents if t is not None], outs)

    return derivatives.derived(known, leaves, tangents_of)


def _gradients(kept: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, Any]:
    """The gradients of x, which a residual has too, and of the weight."""
    total, factor, weight = kept
    dy, dtotal, dfactor = (a.astype(jnp.float32) for a in cotangents)
    factor = factor[..., None]
    normal = total.astype(jnp.float32) * factor
    dnormal = dy
    if weight is not None:
        dnormal = dy * weight.astype(jnp.float32).reshape(*[1] * (dy.ndim - 1), -1)
    along = (dnormal * normal).mean(-1, keepdims=True)
    along = along + dfactor[..., None] * factor / total.shape[-1]
    dx = (dtotal + (dnormal - normal * along) * factor).astype(total.dtype)
    if weight is None:
        return dx, None
    return dx, (dy * normal).sum(range(dy.ndim - 1)).astype(weight.dtype)
