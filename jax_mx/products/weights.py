"""`quantize_weights`: the weights of a model, quantized once for all that a step multiplies."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_mx.formats.arrangements import check_contracted
from jax_mx.formats.checks import float_dtype, shown, whole
from jax_mx.formats.formats import BLOCK
from jax_mx.products.auto import resolved_for_weights
from jax_mx.products.operand import QuantizedWeight
from jax_mx.products.recipes import AUTO, Recipe
from jax_mx.quantizing.mxarray import MXArray

OP = "quantize_weights"


def quantize_weights(
    tree: Any,
    recipe: Recipe | str = AUTO,
    *,
    stacked: int = 0,
    select: Callable[[tuple, jax.Array], bool] | None = None,
) -> Any:
    """Quantizes all matrices of a pytree once, both ways, for all products of a step.

        weights = jax_mx.quantize_weights(params["layers"], stacked=1)
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, weights)

    Call the function outside of `jax.checkpoint` and of loops over microbatches. Floats are read
    once, as they are: float32 masters need no copy in bfloat16. Products take a `QuantizedWeight`
    with activations of any float type, and give results of that type. Gradients reach the floats,
    in their dtype, as `Recipe.quantize_weight` says. Until the step ends, codes and scales of
    both directions take 2.1 bytes an element in MXFP8. In square blocks they take 1.03, except on
    Blackwell, whose products read two arrays. On a mesh codes are split as the floats are; in each
    pass devices gather the codes of its direction.

    Args:
      tree: a pytree of parameters.
      recipe: of the products, see `dot_general`.
      stacked: the number of leading axes that count layers, for `jax.lax.scan`.
      select: tells from a path of `jax.tree_util` and an array whether this is a weight; None:
        every array that could be one is, also embedding tables. Leave these out by `select`.

    Returns:
      The tree with a `QuantizedWeight` in place of each array of floats (K, N), behind stacked
      axes, if 32 divides K. Products contract K. Other leaves stay: vectors, quantized leaves, and
      arrays with more axes, whose contracted axes `Recipe.quantize_weight` takes.

    Raises:
      TypeError: the recipe or stacked is of the wrong type, or a matrix has floats of another dtype
        than `quantize` takes.
      ValueError: the recipe is unknown, stacked is negative, or the size of the recipe's Hadamard
        transform does not divide a matrix's K.
    """
    try:
        axes = whole(stacked)
    except TypeError as error:
        raise TypeError(f"{OP}: stacked must be an int, got {shown(stacked)}") from error
    if axes < 0:
        raise ValueError(f"{OP}: stacked must be 0 or more, got {axes}")

    def quantized(path: tuple, leaf: Any) -> Any:
        if not _is_weight(leaf, axes) or not (select is None or select(path, leaf)):
            return leaf
        name = f"the leaf {jax.tree_util.keystr(path)}"
        float_dtype(OP, name, leaf.dtype)
        known = resolved_for_weights(OP, recipe, leaf)
        check_contracted(f"{OP}: {name}", leaf.shape, (-2,), known.units.forward)
        quantize = known.quantize_weight
        for _ in range(axes):
            quantize = jax.vmap(quantize)
        return quantize(leaf)

    resolved_for_weights(OP, recipe, None)  # refuses what is no recipe, of an empty tree too
    return jax.tree_util.tree_map_with_path(quantized, tree, is_leaf=_is_quantized)


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, MXArray | QuantizedWeight)


def _is_weight(leaf: Any, stacked: int) -> bool:
    """Whether a leaf is a matrix of floats, behind stacked axes, that blocks divide."""
    if _is_quantized(leaf) or getattr(leaf, "ndim", 0) != stacked + 2:
        return False
    return jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.shape[-2] % BLOCK == 0
