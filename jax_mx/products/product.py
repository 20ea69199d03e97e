"""The product as a JAX primitive.

Its lowering asks the table of implementations which one serves it on the chips of the program. So
the choice stands in the lowered program, and vmap, shard_map, scan and export treat the product as
they treat lax.dot_general. It has no derivative: dot_general.py has.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.lowering import primitive
from jax_mx.ops.mxarray import MXArray
from jax_mx.products.dot import Dims, Dot, Operand, call_of
from jax_mx.products.implementations import IMPLEMENTATIONS, Implementation, lowered


def _floats_like(x: Any) -> Any:
    """The abstract value of an operand as float32, sharded as its values are."""
    aval: Any = x.values if isinstance(x, MXArray) else x
    return aval.update(shape=x.shape, dtype=np.dtype(np.float32), weak_type=False)


def _avals(*leaves: Any, dot: Dot) -> list:
    call = call_of(dot, leaves)
    out, _ = jax.lax.dot_general_p.abstract_eval(
        _floats_like(call.lhs),
        _floats_like(call.rhs),
        dimension_numbers=dot.numbers,
        precision=None,
        preferred_element_type=dot.dtype,
        out_sharding=dot.out_sharding,
    )
    return [out]


def _batch(args: Any, dims: Any, *, dot: Dot) -> tuple[list, list]:
    """As lax.dot_general: where both operands are mapped, a batch dimension, else a free one."""
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    n = dot.tree.unflatten(range(len(args)))  # which leaf is whose
    mapped, moved = [], list(args)
    for side in n:
        leaves = jax.tree.leaves(side)
        mapped.append(any(dims[i] is not None for i in leaves))
        for i in leaves:
            if dims[i] is not None:
                moved[i] = jnp.moveaxis(args[i], dims[i], 0)
            elif mapped[-1]:
                moved[i] = jnp.broadcast_to(args[i], (size, *args[i].shape))
    shifts = [int(each) for each in mapped]

    def shifted(pair: tuple[Dims, Dims]) -> tuple[Dims, Dims]:
        left, right = (tuple(d + s for d in ds) for ds, s in zip(pair, shifts, strict=True))
        return left, right

    batch, contracting = shifted(dot.batch), shifted(dot.contracting)
    if all(mapped):
        batch, at = ((0, *batch[0]), (0, *batch[1])), 0
    elif mapped[0]:
        at = len(batch[0])
    else:
        lhs = call_of(dot, [jax.typeof(a) for a in args]).lhs
        at = len(lhs.shape) - len(contracting[0])
    sharding = dot.out_sharding
    if sharding is not None:
        spec = [*sharding.spec]
        spec.insert(at, None)
        sharding = sharding.update(spec=jax.sharding.PartitionSpec(*spec))
    own = dataclasses.replace(dot, batch=batch, contracting=contracting, out_sharding=sharding)
    return bind(own, moved), [at]


def _lower(given: str | None, ctx: Any, *leaves: Any, dot: Dot) -> Any:
    def run(served: Implementation, *leaves: Any) -> jax.Array:
        operands = dot.tree.unflatten(leaves)
        if any(0 in x.shape for x in operands):  # libraries divide by lengths, or read elements
            served = IMPLEMENTATIONS["xla"]
        return served.run(*operands, dot)

    return lowered(given, ctx, leaves, call_of(dot, ctx.avals_in), run)


_no_second = functools.partial(primitive.no_second, "dot_general")
dot_p = primitive.define("mx_dot_general", _avals, _lower, _batch, _no_second)


def bind(dot: Dot, leaves: Any) -> list[jax.Array]:
    """Binds the primitive, all leaves varying over the same manual axes."""
    return dot_p.bind(*primitive.vary_alike(*leaves), dot=dot)


def contracted(
    lhs: Operand,
    rhs: Operand,
    contracting: tuple[Dims, Dims],
    batch: tuple[Dims, Dims],
    dtype: np.dtype,
    *,
    exact: bool = False,
    out_sharding: Any = None,
    implementation: str | None = None,
) -> jax.Array:
    """The product of two operands; negative dimensions count from the end.

    Returns:
      (batch..., free of lhs..., free of rhs...), of `dtype`.
    """
    sides = [list(pair) for pair in zip(contracting, batch, strict=True)]
    for i, (x, dims) in enumerate(zip((lhs, rhs), sides, strict=True)):
        sides[i] = [tuple(d % x.ndim for d in group) for group in dims]
    (lc, lb), (rc, rb) = sides
    leaves, tree = jax.tree.flatten((lhs, rhs))
    dot = Dot(tree, (lc, rc), (lb, rb), np.dtype(dtype), exact, out_sharding, implementation)
    (out,) = bind(dot, leaves)
    return out
