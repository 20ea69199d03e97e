"""The one statement of the quantizers that NVIDIA has and AMD lacks.

AMD has every kernel for floats as they lie, except for `LACKS`. Kernels that also make the floats
(`Variant.source`) are NVIDIA's alone: XLA makes the floats on AMD, and a plain kernel quantizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from jax_mx.formats.windows import ROW, SQUARE

if TYPE_CHECKING:
    from jax_mx.quantizing.facts.variants import Variant

# By words for the documents: whether a variant is one of those.
LACKS: Mapping[str, Callable[[Variant], bool]] = {
    "windows of 256 for both directions at once": lambda v: v.window == 256 and v.form.is_both,
    "rows, activations and norms, whose floats XLA makes there": lambda v: bool(v.source),
    'the window "row" of float32': lambda v: v.window == ROW and v.dtype == "float32",
    "square blocks that are written both ways": lambda v: v.window == SQUARE,
    'the window "row" by one kernel': lambda v: v.finds_amaxes,
}


def lacking(variant: Variant) -> str:
    """The words of `LACKS` for a variant; empty where AMD has its kernel."""
    return next((lack for lack, has in LACKS.items() if has(variant)), "")
