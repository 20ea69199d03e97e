"""Products as primitives.

Operands lie one after the other: x (T, K), W (G, N, K).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from jax_mx.formats.blocks import dequantize
from jax_mx.formats.formats import BLOCK
from jax_mx.formats.groups import clamped
from jax_mx.formats.views import padded
from jax_mx.launch.calls import batched
from jax_mx.launch.private import unsplit, vary_alike
from jax_mx.norms import reference as norms
from jax_mx.quantizing.facts.product_kernels import DIRECT, FEWEST, UNIT
from jax_mx.quantizing.plan import ProductPlan
from jax_mx.quantizing.primitive import Op, make_primitive, one_by_one
from jax_mx.quantizing.reference.activations import gated
from jax_mx.quantizing.reference.attention import attended


# ---- what they compute: operands as float32, sums in float32 ---
def matmul(x: jax.Array, codes: jax.Array, scales: jax.Array, *sizes, plan: Any) -> list:
    """y (T, N) = x (T, passes * K) @ W (G, N, K)^T; several passes of x are added.

    A free W is (G, K, N), and y = x @ W; each pass then has zeros up to a multiple of `UNIT`
    columns.
    """
    w = _floats(codes, scales, plan.formats[-1])
    if plan.free:
        w = w.mT
    length = w.shape[-1]
    wide = length + plan.free * (-length % UNIT)
    parts = x.astype(jnp.float32).reshape(x.shape[0], x.shape[1] // wide, wide)
    y = _product(parts.sum(1)[:, :length], w, *sizes).astype(plan.dtype)
    return [_active(y, plan.activation) if plan.activation else y]


def _active(y: jax.Array, activation: str) -> jax.Array:
    """The activation of a product's halves, after the product was rounded to bfloat16."""
    # Without it XLA leaves out the rounding.
    y = jax.lax.reduce_precision(y.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
    return gated(jnp.split(y.astype(jnp.bfloat16), 2, -1), None, activation)


def matmul_fp8(x_codes, x_scales, codes, scales, *sizes, plan: Any) -> list:
    """The same for an x (T, K) in MX; codes may lie in parts of K, (parts, N, K / parts)."""
    if plan.parts > 1:
        codes = codes.swapaxes(0, 1).reshape(1, codes.shape[1], -1)
    x = _floats(x_codes, x_scales, plan.formats[0])
    w = _floats(codes, scales, plan.formats[-1])
    return [_product(x, w, *sizes).astype(plan.dtype)]


def wgrad_fp8(x_codes, x_scales, codes, scales, sizes, *, plan: Any) -> list:
    """y (G, M, N): for each group x (M, K) @ W (N, K)^T over its part of K."""
    x = _floats(x_codes, x_scales, plan.formats[0])
    w = _floats(codes, scales, plan.formats[-1])
    return [_contracted(x.T, w.T, sizes).astype(plan.dtype)]


def wgrad(x, dy, *sizes, plan: Any) -> list:
    """y (G, K, N): for each group x (T, K)^T @ dy (T, N) over its rows, or (..., K, N) of all."""
    x, dy = x.astype(jnp.float32), dy.astype(jnp.float32)
    y = _contracted(x, dy, *sizes) if sizes else _dot("...tk,...tn->...kn", x, dy)
    return [y.astype(plan.dtype)]


def _contracted(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """For each group the product of its rows of x (T, M) and of w (T, N), (G, M, N)."""
    counts = clamped(sizes, x.shape[0])
    row = jnp.arange(x.shape[0])[:, None]

    def one(group):
        # Zeros in place of other groups' elements: no sum may meet their NaN.
        end, count = group
        in_group = (row < end) & (row >= end - count)
        return _dot("km,kn->mn", jnp.where(in_group, x, 0), jnp.where(in_group, w, 0))

    return jax.lax.map(one, (jnp.cumsum(counts), counts))


def _floats(codes: jax.Array, scales: jax.Array, format) -> jax.Array:
    """The dequantized floats of row-major codes and scales, float32."""
    blocks = codes.reshape(*scales.shape, BLOCK // format.codes_per_byte)
    floats = dequantize(blocks, scales[..., None], format, jnp.dtype(jnp.float32))
    return floats.reshape(*scales.shape[:-1], -1)


def _product(x: jax.Array, w: jax.Array, *sizes: jax.Array) -> jax.Array:
    """Float32 (T, N); rows that no group has are 0."""
    if not sizes:
        groups, n, k = w.shape
        y = _dot("gmk,gnk->gmn", x.reshape(groups, -1, k), w)
        return y.reshape(-1, n)
    counts = clamped(sizes[0], x.shape[0])
    ends = jnp.cumsum(counts)
    row = jnp.arange(x.shape[0])[:, None]

    def add(y, group):
        # A group after the other: no sum may meet another group's NaN.
        matrix, end, count = group
        in_group = (row < end) & (row >= end - count)
        return jnp.where(in_group, _dot("mk,nk->mn", x, matrix), y), None

    start = jnp.zeros_like(x, shape=(x.shape[0], w.shape[1]))
    return jax.lax.scan(add, start, (w, ends, counts))[0]


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(
        equation, a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


# ---- primitives ---
def _product_avals(*operands, plan: ProductPlan):
    """The abstract value of y (T, N)."""
    codes, scales = (operands[plan.signature.number(name)] for name in ("codes", "scales"))
    columns = scales.shape[2] * BLOCK if plan.free else codes.shape[1]
    columns //= 2 if plan.activation else 1
    shape = (operands[0].shape[0], columns)
    return [unsplit(f"mx_{plan.op}", operands, shape, plan.dtype)]


def _normed_avals(*operands, plan: ProductPlan):
    """The abstract values of y (T, N), with an activation (T, N / 2), and of the sum (T, K)."""
    x, codes = operands[0], operands[plan.signature.number("codes")]
    columns = codes.shape[1] // (2 if plan.activation else 1), x.shape[1]
    return [unsplit("mx_normed", operands, (x.shape[0], n), plan.dtype) for n in columns]


def _normed_reference(x, residual, weight, codes, scales, *, plan: ProductPlan):
    """In steps: the product may have a kernel."""
    floats, total = _rms_norm_reference(x, residual, weight, plan=plan)
    rows = DIRECT if x.shape[0] <= DIRECT else FEWEST
    alone = dataclasses.replace(plan, op="matmul", rows=rows, eps=0.0, activation="")
    y = product([floats, codes, scales], alone)
    y = _active(y, plan.activation) if plan.activation else y
    return [y, total]


def _rms_norm_avals(*operands, plan: ProductPlan):
    """The abstract values of y (T, K) and of the sum."""
    return [unsplit("mx_rms_norm", operands, operands[0].shape, plan.dtype) for _ in "ys"]


def _rms_norm_reference(x, residual, weight, *, plan: ProductPlan):
    total = norms.added(x, residual)
    return [norms.rms_norm(total, weight, plan.eps)[0], total]


def _attention_avals(*operands, plan: ProductPlan):
    """The abstract values of y (B, H D) and of the new keys and values."""
    x, keys, values, *_ = operands
    _, _, groups, depth = keys.shape
    shapes = (x.shape[0], x.shape[1] - 2 * groups * depth), keys.shape, values.shape
    return [unsplit("mx_attention", operands, shape, plan.dtype) for shape in shapes]


def _attention_reference(*operands, plan: ProductPlan):
    return attended(*operands, scale=plan.scale)


def _wgrad_avals(*operands, plan: ProductPlan):
    """The abstract value of y (G, M, N)."""
    names = ("x_codes", "codes", "group_sizes")
    x, codes, sizes = (operands[plan.signature.number(name)] for name in names)
    shape = (sizes.shape[0], x.shape[0], codes.shape[0])
    return [unsplit(f"mx_{plan.op}", operands, shape, plan.dtype)]


def _floats_wgrad_avals(*operands, plan: ProductPlan):
    """The abstract value of y (G, K, N), or without sizes (..., K, N)."""
    x, dy = (operands[plan.signature.number(name)] for name in ("x", "dy"))
    sizes = plan.signature.number("group_sizes")
    lead = operands[sizes].shape if plan.grouped else x.shape[:-2]
    shape = (*lead, x.shape[-1], dy.shape[-1])
    return [unsplit(f"mx_{plan.op}", operands, shape, plan.dtype)]


def _batch_each(primitive: Primitive, args, dims, *, plan: ProductPlan):
    """One call after the other."""
    return one_by_one(functools.partial(primitive.bind, plan=plan), args, dims)


def _batch_floats_wgrad(primitive: Primitive, args, dims, *, plan: ProductPlan):
    """Leading dimensions are batch dimensions; of groups there are none."""
    if plan.grouped:
        return _batch_each(primitive, args, dims, plan=plan)
    return primitive.bind(*batched(args, dims), plan=plan), [0]


def _batch_product(primitive: Primitive, args, dims, *, plan: ProductPlan):
    """Entries of the batch become groups; or more rows of x, where all have the same one matrix.

    With sizes of groups, one call after the other.
    """
    if plan.grouped:
        return _batch_each(primitive, args, dims, plan=plan)
    matrix = plan.signature.number("codes")  # from there on, W's arrays
    one = args[matrix].shape[0] == 1 and dims[matrix] is None and dims[matrix + 1] is None
    args = batched(args, dims, range(matrix, len(args)) if one else ())
    size, rows = args[0].shape[:2]
    ranks = [3 if array.name in ("codes", "scales") else 2 for array in plan.signature.operands]
    flat = [
        a.reshape(-1, *a.shape[2:]) if a.ndim > rank else a
        for a, rank in zip(args, ranks, strict=False)
    ]
    if plan.rows == DIRECT and one and flat[0].shape[0] > DIRECT:  # else W is read too often
        plan = dataclasses.replace(plan, rows=FEWEST, narrow=False)
    (y,) = primitive.bind(*flat, plan=plan)
    return [y.reshape(size, rows, y.shape[-1])], [0]


OPS = {
    "matmul": Op(_product_avals, matmul, _batch_product),
    "normed": Op(_normed_avals, _normed_reference, _batch_each),
    "rms_norm": Op(_rms_norm_avals, _rms_norm_reference, _batch_each),
    "attention": Op(_attention_avals, _attention_reference, _batch_each),
    "matmul_fp8": Op(_product_avals, matmul_fp8, _batch_product),
    "wgrad_fp8": Op(_wgrad_avals, wgrad_fp8, _batch_each),
    "wgrad": Op(_floats_wgrad_avals, wgrad, _batch_floats_wgrad),
}
products_p = {name: make_primitive(name, op) for name, op in OPS.items()}


def product(operands: Sequence[jax.Array], plan: ProductPlan) -> jax.Array:
    """Binds a product's primitive, all operands varying over the same manual axes."""
    (y,) = products_p[plan.op].bind(*vary_alike(*operands), plan=plan)
    return y


def run_once(y: jax.Array) -> jax.Array:
    """The result of a kernel's call, which a scan may keep for its backward pass and also read.

    Without a barrier XLA runs the call twice, a second time where the result is kept; products that
    are XLA's own it runs once. Gradients of weights want no barrier: a scan's body does not read
    them, and the kernel writes where they are kept.
    """
    return jax.lax.optimization_barrier(y)


# ---- calls by plans ---
@functools.partial(jax.jit, static_argnames="plan")
def by_plan(plan: ProductPlan, x: Any, w: Any, sizes: jax.Array | None = None) -> jax.Array:
    """The product that a plan says, of operands that have elements and fit it and each other.

    Args:
      plan: of `plan_of`, `wgrad_plan_of` or `floats_plan_of`.
      x: floats or, of "matmul_fp8", an `MXArray` (..., M, K); with sizes (T, K), rows sorted by
        group. "wgrad" has floats (..., R, M), "wgrad_fp8" an `MXArray` (M, R).
      w: an `MXArray` (N, K) or, for each group or entry of a batch a matrix, (G, N, K); of a free
        one (K, N) or (G, K, N). "wgrad" has floats (..., R, N), "wgrad_fp8" an `MXArray` (N, R).
      sizes: int32 (G,), how many rows each group has; "wgrad_fp8" always has sizes.

    Returns:
      (..., M, N); of gradients (G, M, N), without sizes (..., M, N).
    """
    grouped = [] if sizes is None else [sizes]
    if plan.op == "wgrad":
        m, n = x.shape[-1], w.shape[-1]
        # The copy engine wants rows of whole 16 bytes.
        floats = padded(x, (0, -m % 8)), padded(w, (0, -n % 8))
        return product([*floats, *grouped], plan)[..., :m, :n]
    if plan.op == "wgrad_fp8":
        return product([x.values, x.scales, w.values, w.scales, *grouped], plan)
    matrices = [a[None] if w.ndim == 2 else a for a in (w.values, w.scales)]
    lead = x.shape[:-1]
    if plan.op == "matmul_fp8":
        rows = [_flat(a) for a in (x.values, x.scales)]
    else:
        rows = [_in_parts(padded(_flat(x), (0, -x.shape[-1] % UNIT if plan.free else 0)))]
    y = product([*rows, *matrices, *grouped], plan)
    return y.reshape(*lead, w.shape[-1 if plan.free else -2])


def by_parts(
    plan: ProductPlan, x: jax.Array, x_scales: jax.Array, codes: jax.Array, scales: jax.Array
) -> jax.Array:
    """The product of a dense plan "matmul_fp8" of codes of w that lie in parts of K.

    Args:
      plan: of `plan_of`, for windows "row".
      x: codes (..., M, K).
      x_scales: (..., M, K / 32).
      codes: of w, (parts, N, K / parts).
      scales: of w, (N, K / 32).

    Returns:
      (..., M, N).
    """
    plan = dataclasses.replace(plan, parts=codes.shape[0])
    y = product([_flat(x), _flat(x_scales), codes, scales[None]], plan)
    return y.reshape(*x.shape[:-1], codes.shape[1])


def _flat(x: jax.Array) -> jax.Array:
    """All rows of an array in one matrix."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _in_parts(x: jax.Array) -> jax.Array:
    """x in bfloat16: of float16 (T, 2 K), two parts beside each other whose sum is x."""
    if x.dtype == jnp.bfloat16:
        return x
    # Not by a cast and back, which XLA may leave out.
    high = jax.lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
    low = jnp.where(jnp.isfinite(high), x.astype(jnp.float32) - high, 0)
    return jnp.concatenate([high, low], axis=-1).astype(jnp.bfloat16)
