"""`is_weight`: which operand of a product the parameters of a flax module make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from jax_mx.launch.private import ShardingTypeError


def is_weight(x: Any, module: linen.Module | nnx.Module) -> bool:
    """Whether an operand is a parameter of a module, or made of its parameters alone.

    JAX's traces tell it in functions of jit, whatever made the operand. Elsewhere a cast, a
    transpose or another shape of a parameter counts. In a function that gets its operands from the
    module, all that has the shape of a parameter counts.
    """
    params = [*map(_inmost, _params(module))]
    x = _inmost(x)
    if any(x is param for param in params):
        return True
    if not isinstance(x, jax.core.Tracer):
        arrays = (param for param in params if not isinstance(param, jax.core.Tracer))
        return any(_is_form(x, param) for param in arrays)
    answer = _is_made_of(x, params) if hasattr(x, "parent") else None
    return any(x.shape == param.shape for param in params) if answer is None else answer


def array_of(x: Any) -> Any:
    """An operand as JAX takes it: what stands for an array, and NumPy's, as one."""
    if stands := getattr(x, "__jax_array__", None):
        return stands()
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def _params(module: linen.Module | nnx.Module) -> list[Any]:
    """The arrays that are a module's own parameters."""
    if isinstance(module, nnx.Module):
        return [*_raw_values(vars(module).values())]
    tree = module.variables.get("params", {})
    params = [linen.meta.unbox(x) for x in tree.values() if not isinstance(x, dict)]
    return [x for x in jax.tree.leaves(params) if hasattr(x, "shape")]


def _raw_values(attributes: Iterable[Any]) -> Iterator[Any]:
    """The arrays of parameters, also of those in lists and dictionaries."""
    for value in attributes:
        if isinstance(value, nnx.Param):
            yield value.get_raw_value()
        elif isinstance(value, list | tuple | nnx.List):
            yield from _raw_values(value)
        elif isinstance(value, dict | nnx.Dict):
            yield from _raw_values(value.values())


def _inmost(x: Any) -> Any:
    """An array without the derivatives and batches around it."""
    while isinstance(x, jax.core.Tracer):
        if hasattr(x, "primal"):
            x = x.primal
        elif hasattr(x, "batch_dim"):
            x = x.val
        else:
            break
    return x


def _is_made_of(x: Any, params: Sequence[Any]) -> bool | None:
    """Whether a value of a traced function depends on parameters and numbers alone.

    None: it depends on an argument of the function, and the parameters are of another one.
    """
    ids, seen, has_param = {*map(id, params)}, set[int](), False
    left = [x]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        parent = getattr(value, "parent", None)
        const = value.get_const() if parent is None and hasattr(value, "get_const") else None
        if id(value) in ids or id(_inmost(const)) in ids:
            has_param = True
        elif parent is not None:
            left += parent.in_tracers
        elif const is not None and jnp.size(const) > 1:  # perhaps a batch
            return False
        elif const is None:  # an argument
            traces = (getattr(param, "_trace", None) for param in params)
            return False if any(value._trace is trace for trace in traces) else None
    return has_param


def _is_form(x: Any, param: Any) -> bool:
    """Whether an array is a parameter, cast, transposed or in another shape."""
    if x.size != param.size or not jnp.issubdtype(x.dtype, jnp.floating):
        return False
    if not all(getattr(array, "is_fully_addressable", True) for array in (x, param)):
        return x.shape == param.shape
    try:
        with jax.ensure_compile_time_eval():
            flat, param = jnp.ravel(x), jnp.asarray(param)
            forms = (param, param.mT) if param.ndim > 1 else (param,)
            return any(bool((flat == jnp.ravel(form).astype(x.dtype)).all()) for form in forms)
    except ShardingTypeError:  # of a mesh with explicit axes
        return x.shape == param.shape
