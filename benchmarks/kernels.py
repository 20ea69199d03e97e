"""Calls of one kernel for products, whatever implementation is the fastest."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jax_mx.products.kernel_plans import (
    floats_plan_of,
    plan_of,
    rows_of_each,
    strips_of,
    wgrad_plan_of,
)
from jax_mx.products.primitives import by_plan
from jax_mx.quantizing.mxarray import MXArray


def by_kernel(
    x: Any,
    w: Any,
    sizes: jax.Array | None = None,
    *,
    implementation: str,
    sums: bool = False,
    **options: Any,
) -> jax.Array:
    """The product in bfloat16 of operands as they lie, with the tiles that their shapes ask for.

    Args:
      x: see `by_plan`.
      w: see `by_plan`.
      sizes: the rows of each group.
      implementation: the kernel's, or "xla", its reference.
      sums: whether the rows of each group are summed over.
      **options: `window`, `tiles`, `free`, see `ProductPlan`.
    """
    formats = tuple(q.format for q in (x, w) if isinstance(q, MXArray))
    dtype, grouped = jnp.dtype(jnp.bfloat16), sizes is not None
    if sums and formats:
        plan = wgrad_plan_of(formats, dtype, options["window"], implementation)
    elif sums:
        plan = floats_plan_of(x.dtype, dtype, grouped, implementation)
    else:
        groups = w.shape[0] if w.ndim == 3 else 1
        options["strips"] = strips_of(groups, w.shape[-1 if options.get("free") else -2])
        rows = rows_of_each(math.prod(x.shape[:-1]), groups)
        options |= {"grouped": grouped, "implementation": implementation}
        plan = plan_of(formats, dtype, rows, **options)
    return by_plan(plan, x, w, sizes)
