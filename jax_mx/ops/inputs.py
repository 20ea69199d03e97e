"""What may be quantized, and the sentence that everything else gets."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.arrays.checks import shown
from jax_mx.ops.mxarray import MXArray


def rows_of(op: str, x: Any, rows: Any) -> Any:
    """rows, checked, for an x that `floats` has seen.

    Raises:
      TypeError, ValueError: they number no rows of x.
    """
    dtype, shape = getattr(rows, "dtype", None), getattr(rows, "shape", None)
    if dtype is None or shape is None or dtype != np.int32 or len(shape) != 1:
        found = shown(rows) if dtype is None else f"{dtype}{[*(shape or ())]}"
        error = ValueError if dtype == np.int32 else TypeError
        raise error(
            f"{op}: rows must be an int32 array of rank 1, the number of a row of x for each row "
            f"of the result, got {found}; jnp.asarray(rows, jnp.int32) makes one of integers"
        )
    if x.ndim != 2:
        raise ValueError(
            f"{op}: rows picks rows of a matrix, x has the shape {tuple(x.shape)}; reshape it to "
            "two dimensions"
        )
    return rows


def floats(op: str, x: Any) -> Any:
    """x, an array of JAX or NumPy, or what has a shape and a dtype of NumPy; lists become arrays.

    Raises:
      TypeError: it is none, and nothing that JAX takes for one.
    """
    if isinstance(x, MXArray):
        raise TypeError(
            f"{op}: x is an MXArray in {x.format.name} already; give floats, as x.dequantize() does"
        )
    dtype = getattr(x, "dtype", None)
    if isinstance(x, jax.Array) or isinstance(dtype, np.dtype):
        return x
    try:
        if dtype is None:
            return jnp.asarray(x)
    except (TypeError, ValueError):
        pass
    kind = type(x)
    name = shown(x) if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"
    way = "; jax.dlpack.from_dlpack(x) makes one of it" if hasattr(x, "__dlpack__") else ""
    raise TypeError(f"{op}: x is {name}, must be an array of floats of JAX or NumPy{way}")
