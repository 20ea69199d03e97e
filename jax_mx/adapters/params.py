"""`quantize_params`: the weights of a model in floats become frozen ones by their names."""

from __future__ import annotations

import functools
from typing import Any

import jax

from jax_mx.adapters.rules import Left, Rules, is_float, rules_of
from jax_mx.formats.checks import shown
from jax_mx.launch.private import ShardingTypeError
from jax_mx.products.auto import resolved_for_weights
from jax_mx.products.operand import QuantizedWeight
from jax_mx.quantizing.mxarray import MXArray
from jax_mx.quantizing.quantize import quantize

OP = "quantize_params"


def quantize_params(params: Any, rules: Rules, *, axis: int = -1) -> Any:
    """Quantizes the weights of a model for serving whose names match a pattern.

        params = quantize_params(params, {r".*(embed|head|router|norm).*": None, ".*": "mxfp4"})
        y = jax_mx.einsum("bk,nk->bn", x, params["mlp.up"], recipe="bf16")

    The weights are frozen: an `MXArray` has no gradient. For training see `quantize_weights`.
    Arrays are quantized one after the other, in the direction of the forward product alone. Their
    devices and shardings stay.

    Args:
      params: a pytree of arrays, say a dictionary by name, or flax' state as a dictionary.
      rules: a recipe, or its name, for each pattern. Weights get the recipe's format, scaling,
        block and window of rhs in the forward product. A pattern is a regular expression for the
        whole path, "layers/0/mlp/up"; the first match counts. None and "bf16" leave an array in
        floats, as does a path without a match. Arrays that are stacked over layers, say norms
        (layers, D), count as weights: give them None.
      axis: the axis that products contract: -1 for weights (outputs, inputs), as PyTorch has them,
        -2 for kernels (inputs, outputs), as flax has them.

    Returns:
      The tree with an `MXArray` in place of each array of two dimensions or more with a recipe. An
      array that MX cannot take stays, and a warning says why. Other leaves stay.

    Raises:
      TypeError, ValueError: rules are invalid, axis is another, or a recipe rotates its operands.
    """
    if axis not in (-1, -2):
        raise ValueError(f"{OP}: axis must be -1 or -2, got {shown(axis)}")
    compiled, left = rules_of(OP, rules), Left(OP)
    matched, unmatched = list[str](), list[str]()

    def quantized(path: Any, leaf: Any) -> Any:
        if _is_quantized(leaf) or getattr(leaf, "ndim", 0) < 2 or not _is_inexact(leaf):
            return leaf
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        chosen = (recipe for pattern, recipe in compiled.items() if pattern.fullmatch(name))
        recipe = next(chosen, None)
        (unmatched if recipe is None else matched).append(name)
        if recipe is None:
            return leaf
        recipe = resolved_for_weights(OP, recipe, leaf)
        use, rule = recipe.uses("rhs")[0], recipe.blocks("rhs")
        if use.format is None:
            return leaf
        if not is_float(leaf):
            left.tell(repr(name), f"it is {leaf.dtype}, MX takes bfloat16, float16 and float32")
            return leaf
        if use.hadamard is not None:
            raise ValueError(
                f"{OP}: the recipe of {name!r} rotates what it is multiplied with, and a frozen "
                "array does not say so; take a recipe whose forward has no hadamard"
            )
        try:
            return _quantize(
                leaf,
                format=use.format,
                axis=axis,
                scaling=rule.scaling,
                block=recipe.block,
                window=use.window,
            )
        except (ValueError, ShardingTypeError) as error:
            left.tell(repr(name), str(error).removeprefix("quantize: "))
            return leaf

    result = jax.tree_util.tree_map_with_path(quantized, params, is_leaf=_is_quantized)
    if unmatched and not matched:
        _tell_unmatched(left, unmatched[0], params, compiled)
    return result


def _tell_unmatched(left: Left, name: str, params: Any, compiled: Any) -> None:
    """Warns that no array of the tree is or becomes MX, though some should."""
    leaves = jax.tree_util.tree_leaves(params, is_leaf=_is_quantized)
    if any(compiled.values()) and not any(map(_is_quantized, leaves)):
        why = "no pattern that has a recipe matches a path"
        left.tell(f"every array, such as {name!r},", why)


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, MXArray | QuantizedWeight)


def _is_inexact(leaf: Any) -> bool:
    """Whether its elements are floats of any width."""
    return jax.numpy.issubdtype(getattr(leaf, "dtype", None) or "int8", jax.numpy.floating)


_quantize = functools.partial(
    jax.jit, static_argnames=("format", "axis", "scaling", "block", "window")
)(quantize)
