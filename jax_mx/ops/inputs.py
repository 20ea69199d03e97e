"""What may be quantized, and the sentence that everything else gets."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.arrays.checks import shown
from jax_mx.ops.mxarray import MXArray


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
