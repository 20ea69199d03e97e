"""`partition` and `combine`: a tree of parameters, and the frozen weights in it."""

from typing import Any

import jax

from jax_mx.quantizing.mxarray import MXArray


def partition(tree: Any) -> tuple[Any, Any]:
    """Parts parameters into those that are trained, and frozen weights.

        trained, frozen = jax_mx.partition(params)
        state = optimizer.init(trained)
        gradients = jax.grad(lambda trained: loss(jax_mx.combine(trained, frozen)))(trained)

    An `MXArray` has no gradient. Optimizers that meet one among parameters would add NaN to its
    scales, so jax.grad of a tree with one raises. Trees without them go through optax, jax.grad and
    equinox as usual.

    Args:
      tree: any pytree.

    Returns:
      The tree with None for each `MXArray`, and the tree with None for all else.
    """
    trained = jax.tree.map(lambda x: None if _is_frozen(x) else x, tree, is_leaf=_is_frozen)
    frozen = jax.tree.map(lambda x: x if _is_frozen(x) else None, tree, is_leaf=_is_frozen)
    return trained, frozen


def combine(trained: Any, frozen: Any) -> Any:
    """The inverse of `partition`: a leaf that is None in one tree comes from the other.

    Args:
      trained: a pytree, with None where `frozen` has a value.
      frozen: the same the other way round; both may have None at one place.

    Returns:
      The tree of both.

    Raises:
      ValueError: the structures differ, or both have a value at one place.
    """

    def either(path: Any, a: Any, b: Any) -> Any:
        if a is not None and b is not None:
            raise ValueError(
                f"combine: both trees have a value at {jax.tree_util.keystr(path) or 'the root'}; "
                "put None in one of them, as partition does"
            )
        return b if a is None else a

    return jax.tree_util.tree_map_with_path(either, trained, frozen, is_leaf=_is_part)


def _is_frozen(x: Any) -> bool:
    return isinstance(x, MXArray)


def _is_part(x: Any) -> bool:
    return x is None or _is_frozen(x)
