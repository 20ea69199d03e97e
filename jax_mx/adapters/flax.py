"""Products of flax' layers whose recipe rounds at random: a new key at each call.

A key that a layer holds, as in `functools.partial`, would round alike at every step and in every
layer. It is imported by name, `import jax_mx.adapters.flax`, as it needs flax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import linen, nnx

from jax_mx.products.recipes import Recipe

STREAM = "rounding"


class NnxProduct(nnx.Module):
    """A product for nnx' layers, with a new key at each call.

        dot = NnxProduct(jax_mx.dot_general, jax_mx.mxfp4_backward, rngs)
        layer = nnx.Linear(256, 512, dot_general=dot, rngs=rngs)

    Args:
      op: `jax_mx.dot_general` for `dot_general=`, `jax_mx.einsum` for `einsum_op=`.
      recipe: makes a recipe of a key, as `mxfp4_backward` does.
      rngs: `nnx.Rngs`, from whose stream "rounding" keys come, or "default" where it has none. Many
        layers may share one product.
    """

    def __init__(
        self, op: Callable[..., jax.Array], recipe: Callable[[jax.Array], Recipe], rngs: nnx.Rngs
    ):
        self.op, self.recipe = op, recipe
        self.keys = rngs[STREAM].fork()

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """The product."""
        return self.op(*args, recipe=self.recipe(self.keys()), **kwargs)


class LinenProduct(linen.Module):
    """A product for linen's layers, with a new key at each call.

        dot = functools.partial(LinenProduct, jax_mx.dot_general, jax_mx.mxfp4_backward)
        layer = nn.Dense(512, dot_general_cls=dot)
        y = layer.apply(params, x, rngs={"rounding": jax.random.fold_in(key, step)})

    Attributes:
      op: see `NnxProduct`.
      recipe: see `NnxProduct`.
    """

    op: Callable[..., jax.Array]
    recipe: Callable[[jax.Array], Recipe]

    @linen.compact
    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """The product."""
        return self.op(*args, recipe=self.recipe(self.make_rng(STREAM)), **kwargs)
