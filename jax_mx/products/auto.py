"""`recipe="auto"`: the recipe that is known to be the fastest on the chips that a trace is for.

A call resolves it when it is traced. Then it is an ordinary recipe, which remembers what it became.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from jax_mx.arrays.checks import is_symbolic
from jax_mx.facts.chips import arch_of
from jax_mx.facts.formats import BLOCK
from jax_mx.lowering import targets
from jax_mx.ops.mxarray import MXArray
from jax_mx.products.operand import QuantizedWeight
from jax_mx.products.recipes import (
    AUTO,
    BF16,
    MXFP8,
    MXFP8_ROWS,
    MXFP8_WINDOWS,
    Chosen,
    Recipe,
    name_of,
    recipe_of,
)

# A product of fewer multiplications on a device stays in bfloat16 on Hopper: to quantize its
# operands takes longer than FP8 tensor cores save.
LEAST = 8 * 2**30


def resolved(
    op: str,
    recipe: Any,
    operands: Sequence[Any],
    work: Callable[[], Any],
    is_free: bool = True,
) -> Recipe:
    """The recipe of a dense product, for one that a caller passed.

    Args:
      op: for messages.
      recipe: a `Recipe`, a name of one, or "auto".
      operands: of the product: arrays, an `MXArray`, a `QuantizedWeight`.
      work: gives how many multiplications the product has.
      is_free: whether the caller names neither an implementation nor a precision.

    Raises:
      TypeError, ValueError: it is no recipe.
    """
    if not _is_auto(recipe):
        return recipe_of(op, recipe)
    if (own := _of_weight(operands)) is not None:
        return own
    chips = targets.chips_of_trace(operands)
    if not _are_hopper(chips):
        return _chosen(MXFP8, chips)
    if is_free and _is_small(work()):
        return _chosen(BF16, chips)
    frozen = [x for x in operands if isinstance(x, MXArray)]
    in_blocks = any(x.window == BLOCK or x.format.bits != 8 for x in frozen)
    return _chosen(MXFP8 if in_blocks or not is_free else MXFP8_ROWS, chips)


def resolved_for_groups(op: str, recipe: Any, operands: Sequence[Any]) -> Recipe:
    """The recipe of products over groups; see `resolved`."""
    if not _is_auto(recipe):
        return recipe_of(op, recipe)
    if (own := _of_weight(operands)) is not None:
        return own
    chips = targets.chips_of_trace(operands)
    frozen = [x for x in operands if isinstance(x, MXArray)]
    in_blocks = any(x.window == BLOCK or x.format.bits != 8 for x in frozen)
    is_wide = _are_hopper(chips) and not in_blocks
    return _chosen(MXFP8_WINDOWS if is_wide else MXFP8, chips)


def resolved_for_weights(op: str, recipe: Any, w: Any, grouped: bool = False) -> Recipe:
    """The recipe that quantizes weights once for many products; it does not say who chose it."""
    if grouped:
        found = resolved_for_groups(op, recipe, [w])
    else:
        found = resolved(op, recipe, [w], lambda: math.inf)
    return dataclasses.replace(found, chosen=None)


def _is_auto(recipe: Any) -> bool:
    return isinstance(recipe, str) and recipe == AUTO


def _of_weight(operands: Sequence[Any]) -> Recipe | None:
    """The recipe that a weight was quantized by."""
    return next((x.recipe for x in operands if isinstance(x, QuantizedWeight)), None)


def _chosen(recipe: Recipe, chips: Sequence[str]) -> Recipe:
    return dataclasses.replace(recipe, chosen=Chosen(name_of(recipe), " ".join(chips)))


def _are_hopper(chips: Sequence[str]) -> bool:
    return bool(chips) and all(arch_of(chip) == "sm_90a" for chip in chips)


def _is_small(work: Any) -> bool:
    """Whether a device has less than `LEAST` of the multiplications.

    A trace does not know how XLA will split them: among all devices of the mesh that is set.
    """
    if is_symbolic(work) or work == math.inf:
        return False
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    shards = math.prod(mesh.shape[name] for name, kind in kinds if kind != AxisType.Manual)
    return work < LEAST * shards
