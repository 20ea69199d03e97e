"""`Provider`: qwix chooses products of a flax model by its modules' paths, and they become MX.

The module is imported by name, `from jax_mx.adapters.qwix import Provider`, as it needs qwix. Two
inner names of qwix, which its own providers use too, tell a weight and end interception.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from qwix._src import interception
from qwix._src.utils import flax_util

from jax_mx.adapters.rules import Left, Rules, is_float, rules_of
from jax_mx.products.dot_general import dot_general, einsum, with_weight_first
from jax_mx.products.planning import swapped_numbers
from jax_mx.products.ragged_dot import ragged_dot
from jax_mx.products.recipes import AUTO

OP = "jax_mx.adapters.qwix.Provider"


class Provider(qwix.QuantizationProvider):
    """Products of a flax model, linen or nnx, in MX.

        provider = Provider({r"layers/.*": "mxfp8"})
        model = qwix.quantize_model(model, provider)  # of nnx: ..., provider, *inputs)

    It replaces `jax.lax.dot_general`, `jnp.einsum` and `jax.lax.ragged_dot` in modules whose path a
    pattern matches, where an operand is a parameter of the module: so attention's scores stay in
    floats. That operand is the recipe's rhs, the weight, on whichever side it stands. A product
    that MX cannot take stays in floats, and a warning says why, once.

    Args:
      rules: a recipe for each pattern, see `dot_general`. A pattern is a regular expression that
        matches the whole path, "layers/0/mlp/gate"; the first that does counts; None leaves its
        modules in floats, say a router. By default all modules follow "auto".

    Raises:
      TypeError, ValueError: rules are invalid.
    """

    def __init__(self, rules: Rules | None = None):
        rules = {".*": AUTO} if rules is None else rules
        self._recipes = {pattern.pattern: recipe for pattern, recipe in rules_of(OP, rules).items()}
        self._left = Left(OP)
        super().__init__([qwix.QuantizationRule(module_path=path) for path in self._recipes])

    def get_intercept_map(self) -> dict[str, Callable[..., Any]]:
        """The functions that stand for JAX's in the model."""
        return super().get_intercept_map() | {
            "jax.lax.dot_general": self.dot_general,
            "jax.numpy.einsum": self.einsum,
            "jax.lax.ragged_dot": self.ragged_dot,
        }

    def dot_general(
        self, lhs: Any, rhs: Any, dimension_numbers: Any, *args: Any, **kwargs: Any
    ) -> jax.Array:
        """jax.lax.dot_general as a rule has it."""
        recipe = self._recipe("dot_general", lhs, rhs)
        swaps = recipe is not None and _is_weight(lhs) and not _is_weight(rhs)
        numbers = swapped_numbers(dimension_numbers) if swaps else dimension_numbers
        if recipe is None or not self._can(recipe, numbers, *((rhs, lhs) if swaps else (lhs, rhs))):
            return _plain(jax.lax.dot_general)(lhs, rhs, dimension_numbers, *args, **kwargs)
        multiply = partial(with_weight_first, "dot_general") if swaps else dot_general
        return _plain(multiply)(lhs, rhs, dimension_numbers, *args, recipe=recipe, **kwargs)

    def einsum(self, subscripts: Any, *operands: Any, **kwargs: Any) -> jax.Array:
        """jnp.einsum as a rule has it."""
        recipe = self._recipe("einsum", *operands)
        asked = {name for name, value in kwargs.items() if value is not None}
        ours = asked <= {"precision", "preferred_element_type", "out_sharding", "optimize"}
        if recipe is None or not ours or not isinstance(subscripts, str):
            return _plain(jnp.einsum)(subscripts, *operands, **kwargs)
        text, taken = subscripts.replace(" ", ""), operands
        if len(operands) == 2 and _is_weight(operands[0]) and not _is_weight(operands[1]):
            sides, arrow, out = text.partition("->")
            text, taken = ",".join(reversed(sides.split(","))) + arrow + out, operands[::-1]
        if not self._can(recipe, text, *taken):
            return _plain(jnp.einsum)(subscripts, *operands, **kwargs)
        options = {name: kwargs[name] for name in asked - {"optimize"}}
        return _plain(einsum)(text, *taken, recipe=recipe, **options)

    def ragged_dot(
        self, lhs: Any, rhs: Any, group_sizes: Any, *args: Any, **kwargs: Any
    ) -> jax.Array:
        """jax.lax.ragged_dot as a rule has it; rhs counts as weights."""
        recipe = self._recipe("ragged_dot", lhs, rhs, is_weight=True)
        if recipe is None or not self._can(recipe, group_sizes, lhs, rhs):
            return _plain(jax.lax.ragged_dot)(lhs, rhs, group_sizes, *args, **kwargs)
        return _plain(ragged_dot)(lhs, rhs, group_sizes, *args, recipe=recipe, **kwargs)

    def _recipe(self, op: str, *operands: Any, is_weight: bool = False) -> Any:
        """The recipe of a product in the module that computes; None: it stays in floats."""
        rule, _ = self._get_current_rule_and_op_id(op)
        recipe = None if rule is None else self._recipes[rule.module_path]
        if recipe is None or not all(map(is_float, operands)):
            return None
        return recipe if is_weight or any(map(_is_weight, operands)) else None

    def _can(self, recipe: Any, options: Any, *operands: Any) -> bool:
        """Whether MX takes the product; tells if not."""
        path = "/".join(map(str, flax_util.get_current_module_path()))
        return _plain(self._left.takes)(recipe, options, *operands, where=path)


def _is_weight(x: Any) -> bool:
    """Whether an operand is a parameter of the module that computes."""
    return flax_util.find_param(x) is not None


def _plain(f: Callable[..., Any]) -> Callable[..., Any]:
    """f, in which nothing is replaced."""
    return interception.disable_interceptions(f)
