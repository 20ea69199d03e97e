"""Parts that both derivatives share: an operand's `Side`, a product's `Static`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_mx.formats.arrangements import Arrangement, Arrangements
from jax_mx.formats.formats import BLOCK
from jax_mx.formats.sharding import is_explicit, names_in, resharded, shards_of, spec_of, unsplit
from jax_mx.products.multiply import Multiplication
from jax_mx.products.operand import QuantizedWeight
from jax_mx.quantizing import derivatives
from jax_mx.quantizing.mxarray import FROZEN, MXArray

Pair = tuple[Any, Any]  # floats that gradients reach, and what is quantized already


# ---- derivatives of derivatives ---
once_derived_p = Primitive("mx_once_derived")  # the identity of the first operand
once_derived_p.def_abstract_eval(lambda x, *_, op: x)
once_derived_p.def_impl(lambda x, *_, op: x)
mlir.register_lowering(once_derived_p, lambda _, x, *__, op: [x])
batching.primitive_batchers[once_derived_p] = lambda args, dims, *, op: (
    once_derived_p.bind(*args, op=op),
    dims[0],
)
ad.primitive_jvps[once_derived_p] = lambda *_, op: derivatives.no_second(op)


def once_derived(op: str, x: Any, *others: Any) -> jax.Array:
    """The function returns x, and raises in any second derivative, by `others` too.

    Codes carry no derivative, so a second derivative would silently lack a part. The forward pass
    keeps a `MARK` that its inputs guard. The backward pass guards its gradient by that `MARK`. JAX
    deletes a guard without a reader; the kept `MARK` is one.
    """
    return once_derived_p.bind(x, *jax.tree.leaves(others), op=op)


MARK = np.zeros((), bool)


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


def gathered_for(lhs: Any, rhs: Any, layout: Arrangements, recipe: Any, placed: bool) -> Any:
    """The weights, gathered over each mesh axis that also splits rows of lhs: FSDP.

    One gather of floats replaces a gather for each direction. Where products read codes of both,
    which devices share by a rule (splitting.py), codes move instead, a byte an element.

    Args:
      lhs: the activations.
      rhs: the weights; what is quantized already stays as it is.
      layout: of the product.
      recipe: of the weights; None: they are gathered as floats.
      placed: whether the caller says how the result is split. Otherwise `jax.lax.dot_general`
        refuses such splits of columns, and the product keeps them.
    """
    if not isinstance(rhs, jax.Array):
        return rhs
    mesh: Any = jax.typeof(rhs).sharding.mesh
    if not is_explicit(mesh):
        return rhs
    uses = [] if recipe is None or mesh.manual_axes else recipe.uses("rhs")
    if uses and all(use.format is not None and use.window != BLOCK for use in uses):
        return rhs
    lhs = lhs.values if isinstance(lhs, MXArray) else lhs
    rows = {name for axis in layout.lhs.free_dims for name in shards_of(lhs, axis)[0]}
    free = () if placed else layout.rhs.free_dims
    return unsplit(rhs, rows, [axis for axis in range(rhs.ndim) if axis not in free])


def gathered_once(layout: Arrangements, dy: Any, lhs: Side | None, rhs: Side | None) -> jax.Array:
    """The result's gradient without splits over mesh axes that split what is contracted.

    Such a result was scattered. Here it is one gather of floats, else one for each direction. An
    axis that splits rows of lhs, too, is FSDP's: it scattered nothing.
    """
    if not is_explicit(jax.typeof(dy).sharding.mesh):
        return dy
    names = {
        name
        for side, arrangement in ((lhs, layout.lhs), (rhs, layout.rhs))
        if side is not None
        for axis in arrangement.contracted_dims
        for name in names_in(side.spec[axis])
    }
    if lhs is not None:
        names -= {name for axis in layout.lhs.free_dims for name in names_in(lhs.spec[axis])}
    return unsplit(dy, names, range(dy.ndim))


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
    def weight(self) -> Arrangement | None:
        """How rhs is arranged; None for a product over groups."""
        return None if self.layout is None else self.layout.rhs

    @property
    def arranged(self) -> Arrangements:
        """How operands of a dense product are arranged."""
        return cast(Arrangements, self.layout)

    def forward(self, lhs: tuple[int, int], rhs: tuple[int, int]) -> Multiplication:
        """The dense product itself, arranged."""
        layout, spec = self.arranged, None
        if self.out_sharding is not None:
            ndim = layout.lhs.batch + len(layout.lhs.free) + len(layout.rhs.free)
            spec = layout.result_spec(_spec_in(self.out_sharding, ndim))
        return self.multiplication(lhs, rhs, spec=spec, fast="forward" in self.fast)

    @property
    def unfollowed(self) -> Static:
        """The product where no gradient follows: nothing is quantized along rows."""
        if self.layout is None:
            return self
        return self._replace(layout=self.layout.unpadded(self.keeps_rows))

    def result(self, y: jax.Array) -> jax.Array:
        """The dense product as its caller wants it, without zero rows."""
        return placed(self.arranged.result(y), self.out_sharding)

    def dgrad(
        self,
        gradient: tuple[int, int],
        rhs: tuple[int, int],
        lhs: Side,
        like: tuple[int, int] | None = None,
    ) -> Multiplication:
        """The product for the gradient of a dense lhs; `like`: the form of lhs along rows."""
        spec = lhs.arranged
        if spec and self.arranged.lhs.swapped:  # of (B..., M..., K)
            *lead, k, m = spec
            spec = (*lead, m, k)
        options: dict[str, Any] = {"spec": spec, "fast": "dgrad" in self.fast}
        if like is not None:
            options["like"] = (*like, -2)
        return self.multiplication(gradient, rhs, lhs.dtype, **options)

    def lhs_gradient(self, dx: jax.Array, lhs: Side) -> jax.Array:
        """The result of `dgrad`, arranged as the caller's lhs."""
        side = self.arranged.lhs
        return side.restored(jnp.swapaxes(dx, -1, -2) if side.swapped else dx, lhs.spec)

    def wgrad(
        self,
        lhs: tuple[int, int],
        gradient: tuple[int, int],
        rhs: Side,
        like: tuple[int, int] | None = None,
    ) -> Multiplication:
        """The product for the gradient of a dense rhs, of two forms along rows.

        `like`: the form of rhs along its free axis.
        """
        layout = self.arranged
        order = (lhs, gradient) if layout.rhs.swapped else (gradient, lhs)
        summed = len(layout.lhs.free_out) - 1
        options: dict[str, Any] = {"spec": rhs.arranged, "summed": summed, "over_rows": True}
        options["fast"] = "wgrad" in self.fast
        if self.dtype.itemsize < rhs.dtype.itemsize:  # half the bytes, as of a bfloat16 weight
            options["moved"] = self.dtype
        if like is not None:
            options["like"] = (*like, -1 if layout.rhs.swapped else -2)
        return self.multiplication(*order, rhs.dtype, **options)

    def rhs_gradient(self, dw: jax.Array, rhs: Side) -> jax.Array:
        """The result of `wgrad`, arranged as the caller's rhs."""
        return self.arranged.rhs.restored(dw, rhs.spec)


def placed(y: jax.Array, out_sharding: Any) -> jax.Array:
    """y split as its caller wants it, if he says it; on explicit meshes and automatic ones."""
    if out_sharding is None:
        return y
    mesh: Any = jax.typeof(y).sharding.mesh
    if mesh.empty:  # operands that no mesh is known of
        mesh = getattr(out_sharding, "mesh", jax.sharding.get_abstract_mesh())
    if not is_explicit(mesh):
        return jax.lax.with_sharding_constraint(y, out_sharding)
    return resharded(y, _spec_in(out_sharding, y.ndim), mesh)


def _spec_in(out_sharding: Any, ndim: int) -> tuple:
    """The partition spec that a caller gives, by itself or with a mesh, an entry a dimension."""
    is_named = isinstance(out_sharding, jax.sharding.NamedSharding)
    spec = out_sharding.spec if is_named else out_sharding
    return (*spec, *[None] * (ndim - len(spec)))
