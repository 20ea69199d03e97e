"""Parts that both derivatives share: an operand's `Side`, a product's `Static`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from jax_mx.formats.arrangements import Arrangement, Arrangements, spec_in
from jax_mx.formats.sharding import is_explicit, spec_of
from jax_mx.products.contraction import ROWS, SUMS
from jax_mx.products.multiply import Multiplication
from jax_mx.products.operand import QuantizedWeight
from jax_mx.quantizing.mxarray import FROZEN, MXArray

Pair = tuple[Any, Any]  # floats that gradients reach, and what is quantized already


def values_of(op: str, args: Any, quantized: Any) -> Any:
    """The values of what `symbolic_zeros` hands to a forward pass.

    Args:
      op: for messages.
      args: a pytree of `jax.custom_derivatives.CustomVJPPrimal`.
      quantized: the operands' quantized parts among them. By an `MXArray` nothing is
        differentiated, also not where it was made of leaves that are. Forms of a `QuantizedWeight`
        stand beside floats, and may be.

    Raises:
      TypeError: an `MXArray` is differentiated by.
    """
    for part in quantized:
        is_asked = any(leaf.perturbed for leaf in jax.tree.leaves(part))
        if isinstance(part, MXArray) and is_asked:
            raise TypeError(f"{op}: {FROZEN}")
    return jax.tree.map(lambda primal: primal.value, args)


# ---- operands ---
def parts_of(x: Any) -> Pair:
    """The floats that gradients reach, and what is quantized already."""
    if isinstance(x, MXArray):
        return None, x
    if isinstance(x, QuantizedWeight):
        return x.floats, (x.contracted_form, x.free_form)
    return x, None


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Side:
    """The facts of an operand's floats that the backward pass needs: their type has them.

    Attributes:
      dtype: of the floats.
      spec: their partition spec, on a mesh with explicit axes.
      arranged: the partition spec of the arranged operand; () without a mesh with explicit axes.
    """

    dtype: np.dtype
    spec: tuple = ()
    arranged: tuple = ()


def side_of(side: Arrangement | None, x: Any) -> Side | None:
    """The side of an operand's floats; None where there are none."""
    if x is None:
        return None
    is_known = side is not None and is_explicit(jax.typeof(x).sharding.mesh)
    return Side(x.dtype, spec_of(x), spec_of(side.arranged(x)) if is_known else ())


def keeps_rows(rhs: Any, recipe: Any) -> bool:
    """Whether rhs has its zero rows also where no gradient follows.

    It has them as it was quantized before, or in square blocks.
    """
    if isinstance(rhs, MXArray | QuantizedWeight):
        return isinstance(rhs, QuantizedWeight)
    return recipe.blocks("rhs").square


# ---- the three products of a layer ---
class Static(NamedTuple):
    """The static part of a product.

    Attributes:
      op: the public function, for messages.
      layout: how operands are arranged; None for a product over groups.
      dtype: of the result.
      exact: see `contraction.Numbers`.
      implementation: see `contraction.Numbers`.
      out_sharding: of the result.
      chosen: the name of the recipe that "auto" became; None where the caller passed a recipe.
      fast: the products, of "forward", "dgrad" and "wgrad", that `Recipe.fast` names.
      keeps_rows: see the function `keeps_rows`; of a dense product.
    """

    op: str
    layout: Arrangements | None
    dtype: np.dtype
    exact: bool
    implementation: str | None
    out_sharding: Any = None
    chosen: Any = None
    fast: tuple[str, ...] = ()
    keeps_rows: bool = False

    def multiplication(
        self, lhs: tuple[int, int], rhs: tuple[int, int], dtype: Any = None, **options: Any
    ) -> Multiplication:
        """A product of these forms of a step's operands; `options`: see `Multiplication`."""
        if self.layout is not None:
            options["batch"] = self.layout.lhs.batch
        names = ("exact", "implementation", "chosen")
        shared: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.implementation is not None:
            shared["caller"] = self.op
        return Multiplication(lhs, rhs, dtype or self.dtype, **shared, **options)

    @property
    def arranged(self) -> Arrangements:
        """How operands of a dense product are arranged."""
        return cast(Arrangements, self.layout)

    def forward(self, lhs: tuple[int, int], rhs: tuple[int, int], align: int = 1) -> Multiplication:
        """The product itself, arranged; `align`: see `Numbers`, of a product over groups."""
        if self.layout is None:
            return self.multiplication(lhs, rhs, groups=ROWS, align=align)
        layout, spec = self.layout, None
        if self.out_sharding is not None:
            ndim = layout.lhs.batch + len(layout.lhs.free) + len(layout.rhs.free)
            spec = layout.result_spec(spec_in(self.out_sharding, ndim))
        return self.multiplication(lhs, rhs, spec=spec, fast="forward" in self.fast)

    @property
    def unfollowed(self) -> Static:
        """The product where no gradient follows: nothing is quantized along rows."""
        if self.layout is None:
            return self
        return self._replace(layout=self.layout.unpadded(self.keeps_rows))

    def dgrad(
        self,
        gradient: tuple[int, int],
        rhs: tuple[int, int],
        lhs: Side,
        like: tuple[int, int] | None = None,
        align: int = 1,
    ) -> Multiplication:
        """The product for the gradient of lhs; `like`: the form of a dense lhs along rows."""
        if self.layout is None:
            return self.multiplication(gradient, rhs, lhs.dtype, groups=ROWS, align=align)
        spec = lhs.arranged
        if spec and self.layout.lhs.swapped:  # of (B..., M..., K)
            *lead, k, m = spec
            spec = (*lead, m, k)
        options: dict[str, Any] = {"spec": spec, "fast": "dgrad" in self.fast}
        if like is not None:
            options["like"] = (*like, -2)
        return self.multiplication(gradient, rhs, lhs.dtype, **options)

    def wgrad(
        self,
        lhs: tuple[int, int],
        gradient: tuple[int, int],
        rhs: Side,
        like: tuple[int, int] | None = None,
        align: int = 1,
    ) -> Multiplication:
        """The product for the gradient of rhs, of two forms along rows.

        `like`: the form of a dense rhs along its free axis.
        """
        options: dict[str, Any] = {"over_rows": True}
        if self.layout is None:
            options |= {"groups": SUMS, "align": align}
            return self.multiplication(lhs, gradient, rhs.dtype, **options)
        layout = self.layout
        order = (lhs, gradient) if layout.rhs.swapped else (gradient, lhs)
        options |= {"spec": rhs.arranged, "summed": len(layout.lhs.free_out) - 1}
        options["fast"] = "wgrad" in self.fast
        if self.dtype.itemsize < rhs.dtype.itemsize:  # half the bytes, as of a bfloat16 weight
            options["moved"] = self.dtype
        if like is not None:
            options["like"] = (*like, -1 if layout.rhs.swapped else -2)
        return self.multiplication(*order, rhs.dtype, **options)
