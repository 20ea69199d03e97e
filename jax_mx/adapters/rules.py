"""Rules that say which products of a model become MX: a pattern of names, and a recipe."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jax_mx.formats.checks import depth, shown
from jax_mx.products.can_multiply import can_multiply
from jax_mx.products.recipes import Recipe, check_recipe

# A recipe for each pattern, the first that matches counts; None leaves a product in floats.
Rules = Mapping[str, Recipe | str | None]
MOST_NAMES = 5  # that a warning lists


def rules_of(op: str, rules: Any) -> dict[re.Pattern, Any]:
    """Rules with their patterns compiled.

    Raises:
      TypeError, ValueError: they are none, or name an unknown recipe.
    """
    if not isinstance(rules, Mapping):
        raise TypeError(f"{op}: rules must map patterns to recipes, got {shown(rules)}")
    compiled = {}
    for pattern, recipe in rules.items():
        if recipe is not None:
            check_recipe(op, recipe)
        try:
            compiled[re.compile(pattern)] = recipe
        except (TypeError, re.error) as error:
            raise ValueError(f"{op}: {pattern!r} is no regular expression: {error}") from error
    return compiled


def is_float(x: Any) -> bool:
    """Whether an operand's type is one that MX quantizes."""
    return getattr(x, "dtype", None) in (*map(jax.numpy.dtype, ("bfloat16", "float16", "float32")),)


class Left:
    """Tells once what stays in floats though it was chosen, and which patterns choose nothing."""

    def __init__(self, op: str):
        self._op, self._told = op, set[str]()

    def tell(self, operand: str, why: str) -> None:
        """Warns, the first time."""
        self._warn(f"{operand} stays in floats: {why}")

    def tell_unmatched(self, pattern: str, what: str, names: Iterable[str]) -> None:
        """Warns, the first time, that a pattern matches none of these names."""
        some = sorted({*names})
        there = ", ".join(map(repr, some[:MOST_NAMES])) + ", ..." * (len(some) > MOST_NAMES)
        self._warn(f"{pattern!r} matches no {what}; there is {there or 'none'}")

    def _warn(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            warnings.warn(f"{self._op}: {sentence}", UserWarning, stacklevel=depth())

    def takes(self, recipe: Any, options: Any, *operands: Any, where: str = "") -> bool:
        """Whether MX takes a product, see `can_multiply`; tells if not."""
        if len(operands) != 2:
            can, why_not = False, f"it has {len(operands)} operands, MX takes two"
        else:
            can, why_not = can_multiply(*operands, options, recipe=recipe)
        if not can:
            shapes = " times ".join(f"{x.dtype}{[*x.shape]}" for x in operands)
            self.tell(f"{shapes} in {where!r}" if where else shapes, why_not)
        return can
