"""Products as primitives.

Operands lie one after the other: x (T, K), W (G, N, K).
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
from jax.extend.core import Primitive

from jax_mx.formats.formats import BLOCK
from jax_mx.launch.calls import batched
from jax_mx.launch.private import unsplit, vary_alike
from jax_mx.norms import reference as norms
from jax_mx.products import reference
from jax_mx.quantizing.facts.product_kernels import DIRECT, FEWEST, normed_fits
from jax_mx.quantizing.plan import ProductPlan
from jax_mx.quantizing.primitive import Op, make_primitive, one_by_one


def _product_avals(*operands, plan: ProductPlan):
    """The abstract value of y (T, N)."""
    codes, scales = (operands[plan.signature.number(name)] for name in ("codes", "scales"))
    columns = scales.shape[2] * BLOCK if plan.free else codes.shape[1]
    shape = (operands[0].shape[0], columns)
    return [unsplit(f"mx_{plan.op}", operands, shape, plan.dtype)]


def _normed_avals(*operands, plan: ProductPlan):
    """The abstract values of y (T, N) and of the sum (T, K)."""
    x, codes = operands[0], operands[plan.signature.number("codes")]
    columns = codes.shape[1], x.shape[1]
    return [unsplit("mx_normed", operands, (x.shape[0], n), plan.dtype) for n in columns]


def _normed_reference(x, residual, weight, codes, scales, *, plan: ProductPlan):
    """In steps: the product may have a kernel."""
    total = norms.added(x, residual)
    floats, _ = norms.rms_norm(total, weight, plan.eps)
    rows = DIRECT if x.shape[0] <= DIRECT else FEWEST
    alone = dataclasses.replace(plan, op="matmul", rows=rows, eps=0.0)
    return [product([floats, codes, scales], alone), total]


def _batch_normed(primitive: Primitive, args, dims, *, plan: ProductPlan):
    """Entries of the batch become rows, where these are few and have one weight."""
    if any(d is not None for d in dims[2:]):
        return _batch_each(primitive, args, dims, plan=plan)
    args = batched(args, dims, range(2, len(args)))
    size, rows, length = args[0].shape
    flat = [*(a.reshape(size * rows, length) for a in args[:2]), *args[2:]]
    bind = primitive.bind if normed_fits(size * rows, length) else _normed_reference
    return [a.reshape(size, rows, -1) for a in bind(*flat, plan=plan)], [0, 0]


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


products_p = {
    name: make_primitive(name, op)
    for name, op in {
        "matmul": Op(_product_avals, reference.matmul, _batch_product),
        "normed": Op(_normed_avals, _normed_reference, _batch_normed),
        "matmul_fp8": Op(_product_avals, reference.matmul_fp8, _batch_product),
        "wgrad_fp8": Op(_wgrad_avals, reference.wgrad_fp8, _batch_each),
        "wgrad": Op(_floats_wgrad_avals, reference.wgrad, _batch_floats_wgrad),
    }.items()
}


def product(operands: Sequence[jax.Array], plan: ProductPlan) -> jax.Array:
    """Binds a product's primitive, all operands varying over the same manual axes."""
    (y,) = products_p[plan.op].bind(*vary_alike(*operands), plan=plan)
    return y
