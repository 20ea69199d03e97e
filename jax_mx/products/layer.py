"""The layer's derivative: two products, an activation between them, and moves around them.

One custom_vjp with floats at both ends, for `mlp` and `moe`. Forward:

    x --move, quantize--> --product--> gate, up --activation, quantize--> --product--> --move--> y

A kernel that quantizes an activation (`Gated`) writes no floats of it, and the residuals of the
backward pass are MX. A `Moves` says how rows reach the products and come back. `mlp` leaves rows
where they are; `moe` moves them to their experts' slots.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mx.arrays.sharding import is_explicit, spec_of
from jax_mx.facts.formats import MXFP8_E4M3
from jax_mx.ops.activations import Gated, made
from jax_mx.ops.mxarray import MXArray, floats_of
from jax_mx.ops.quantize import quantize
from jax_mx.ops.quantizing import WithSums
from jax_mx.products.derivative import MARK, Side, Static, once_derived, side_of
from jax_mx.products.multiply import Multiplication, Step
from jax_mx.products.operand import Unquantized
from jax_mx.products.recipes import Recipe

Recipes = tuple[Recipe, Recipe]  # of both products: where a weight brings signs, they differ
FormNumber = tuple[int, int]  # of a step: the number of an operand, and of its form


class Inputs(NamedTuple):
    """The arrays that gradients reach; None where there is none, or a weight is frozen.

    Attributes:
      x: floats, the rows.
      weights: a router's, (T, k); None in `mlp`.
      w_first: of gates and ups.
      w_second: of the result.
      b_first: the bias of the first product.
      b_second: the bias of the second product.
    """

    x: Any
    weights: Any
    w_first: Any
    w_second: Any
    b_first: Any
    b_second: Any


class Layer(NamedTuple):
    """The static part of a layer.

    Attributes:
      first: the first product.
      second: the second product.
      activation: its name, see `gated`.
      interleaved: whether gates and ups come by turns.
      residuals: the form in which both are kept: "mx", "floats" or "inputs".
      moves: of rows.
    """

    first: Static
    second: Static
    activation: str
    interleaved: bool
    residuals: str
    moves: Moves

    @property
    def op(self) -> str:
        """The public function."""
        return self.first.op

    def hidden(self, gate_up: jax.Array) -> Side:
        """The side of the activation's result."""
        if not is_explicit(jax.typeof(gate_up).sharding.mesh):
            return Side(self.second.dtype)
        spec = spec_of(made(self.op, gate_up, self.gated()))
        return Side(self.second.dtype, arranged=spec)

    def sides(self, given: Inputs) -> Inputs:
        """The sides of all that is given."""
        arranged: dict[str, Any] = {}
        if self.first.layout is not None:
            arranged = {"x": self.first.arranged.lhs, "w_first": self.first.arranged.rhs}
            arranged["w_second"] = self.second.arranged.rhs
        names = Inputs._fields
        return Inputs(*(side_of(arranged.get(n), x) for n, x in zip(names, given, strict=True)))

    def gated(self, scale: Any = None, gradient: Any = None) -> Gated:
        """The activation between both products, times the scale of each row; or its gradient."""
        own = Gated(self.activation, scale, interleaved=self.interleaved)
        return dataclasses.replace(own, gradient=gradient)


class Moves(ABC):
    """How rows reach a layer's products, which products run, how results return; a static value.

    A `place` says where rows are: None, or a pytree with `groups`, and the `scale` of each row.
    """

    keeps_activation: ClassVar[bool]  # along its rows, for the gradient of w_second

    @abstractmethod
    def enter(
        self, given: Inputs, quantized: tuple, routing: Any, recipe: Recipe, keep: bool
    ) -> tuple[Any, Any]:
        """The rows that the first product reads, and the place.

        Args:
          given: to the layer.
          quantized: the quantized parts of both weights, or None.
          routing: the experts of each row, or None.
          recipe: of the first product.
          keep: whether a backward pass follows.
        """

    @abstractmethod
    def operand(
        self, product: Static, rows: Any, place: Any, recipe: Recipe, wanted: tuple[bool, bool]
    ) -> Unquantized:
        """The operand of rows that the first product reads."""

    @abstractmethod
    def gradient(
        self, product: Static, dy: Any, place: Any, recipe: Recipe, weight: Side | None
    ) -> Unquantized:
        """The operand of the result's gradient, which both products of the backward pass read.

        Args:
          product: the second one.
          dy: the gradient.
          place: where rows are.
          recipe: of the second product.
          weight: of its weight, or None where that is frozen.
        """

    @abstractmethod
    def weight(self, product: Static, w: Any, quantized: Any, recipe: Recipe, dgrad: bool) -> Any:
        """The forms of a weight; `dgrad`: also the one for the gradient of rows."""

    @abstractmethod
    def forward(
        self, product: Static, operands: tuple[Any, Any], place: Any, last: bool
    ) -> Multiplication:
        """A product of a step's two operands; `last`: the second one of the layer."""

    @abstractmethod
    def dgrad(
        self, product: Static, gradient: FormNumber, weight: FormNumber, rows: Side, place: Any
    ) -> Multiplication:
        """The product for the gradient of rows."""

    @abstractmethod
    def wgrad(
        self, product: Static, rows: FormNumber, gradient: FormNumber, weight: Side, place: Any
    ) -> Multiplication:
        """The product for the gradient of a weight, both operands along rows."""

    @abstractmethod
    def biased(self, product: Static, y: jax.Array, bias: Any, place: Any) -> jax.Array:
        """The first product, and its bias."""

    @abstractmethod
    def leave(
        self, product: Static, y: jax.Array, given: Inputs, routing: Any, place: Any
    ) -> tuple[jax.Array, Any]:
        """The result as the caller wants it, and further residuals."""

    @abstractmethod
    def gradients(self, layer: Layer, kept: Kept, back: Back) -> Inputs:
        """The gradients, with the shapes, dtypes and shardings of the layer's inputs."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "place", "rows", "act", "gate_up", "w_first", "w_second", "bias", "recipes", "beside",
    ),
    meta_fields=("sides",),
)  # fmt: skip
@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """The residuals of a layer. A field is None where the backward pass reads nothing.

    Attributes:
      place: where rows are, see `Moves`.
      rows: form along rows, of what the first product read.
      act: the form along rows of the activation's result.
      gate_up: an `MXArray` or floats, arranged; or the form that they are computed from.
      w_first: the contracted form, kept only to compute gates and ups again; and the free form.
      w_second: its free form.
      bias: b_first, where gates and ups are computed again.
      recipes: of both products.
      beside: further residuals, of `Moves.leave`.
      sides: the `Side` of every input.
    """

    place: Any
    rows: Any
    act: Any
    gate_up: Any
    w_first: tuple[Any, Any]
    w_second: Any
    bias: Any
    recipes: Recipes
    beside: Any
    sides: Inputs


class Back(NamedTuple):
    """The products of the backward pass, arranged; None where nothing is wanted.

    Attributes:
      dy: the gradient of the result, as it was given.
      gate_up: gates and ups, which were kept or computed again.
      dact: the gradient of the activation's result.
      dx: of rows.
      dw_first: of the first weight.
      dw_second: of the second weight.
      sums: of the gradient of gates and ups, see `WithSums`.
    """

    dy: jax.Array
    gate_up: jax.Array
    dact: jax.Array
    dx: jax.Array
    dw_first: Any
    dw_second: Any
    sums: Any


@partial(jax.jit, static_argnums=0)
def layer(
    static: Layer, given: Inputs, quantized: tuple, routing: Any, recipes: Recipes
) -> jax.Array:
    """The layer, differentiable by what is given.

    Args:
      static: what of it is neither array nor key.
      given: its arrays.
      quantized: the quantized parts of both weights: an `MXArray`, both forms, or None.
      routing: the experts of each row, or None.
      recipes: of both products.
    """
    return _layer(static, given, quantized, routing, recipes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer(
    static: Layer, given: Inputs, quantized: tuple, routing: Any, recipes: Recipes
) -> jax.Array:
    first, second = (  # nothing is quantized along rows
        product.unfollowed(*each)
        for product, *each in zip(
            static[:2], (given.w_first, given.w_second), quantized, recipes, strict=True
        )
    )
    static = static._replace(first=first, second=second)
    return _forward(static, given, quantized, routing, recipes, keep=False)[0]


def _fwd(static: Layer, given: Inputs, quantized: tuple, routing: Any, recipes: Recipes) -> tuple:
    *floats, mark = once_derived(static.op, *given, MARK)
    y, kept = _forward(static, Inputs(*floats), quantized, routing, recipes, keep=True)
    return y, (kept, mark)


def _forward(
    static: Layer, given: Inputs, quantized: tuple, routing: Any, recipes: Recipes, keep: bool
) -> tuple[jax.Array, Any]:
    """The result; and the residuals, if a backward pass follows."""
    moves, products = static.moves, (static.first, static.second)
    x, place = moves.enter(given, quantized, routing, recipes[0], keep)
    ws = given.w_first, given.w_second
    first, second = (
        moves.weight(*each, keep) for each in zip(products, ws, quantized, recipes, strict=True)
    )
    trained = [keep and w is not None for w in ws]
    again = keep and static.residuals == "inputs"
    rows = moves.operand(static.first, x, place, recipes[0], (True, trained[0]))
    forms = ((0, 1), (1, 1), *(((0, 0), (1, 0)) if again else ()))
    step = Step((moves.forward(static.first, (rows, first), place, False),), forms)
    (gate_up,), (rows_kept, first_free, *inputs) = step((rows, first), sizes_of(place))
    gate_up = moves.biased(static.first, gate_up, given.b_first, place)
    wanted = (True, trained[1] and moves.keeps_activation)
    act = Unquantized(gate_up, recipes[1], None, static.gated(scale_of(place)), wanted=wanted)
    step = Step((moves.forward(static.second, (act, second), place, True),), ((0, 1), (1, 1)))
    (y,), (act_kept, second_free) = step((act, second), sizes_of(place))
    y, beside = moves.leave(static.second, y, given, routing, place)
    if not keep:
        return y, None
    if static.residuals == "mx":
        gate_up = quantize(gate_up, MXFP8_E4M3)
    return y, Kept(
        place,
        rows_kept,
        act_kept,
        inputs[0] if again else gate_up,
        (inputs[1] if again else None, first_free),
        second_free,
        given.b_first if again else None,
        recipes,
        beside,
        static.sides(given),
    )


def sizes_of(place: Any) -> Any:
    """The sizes of groups; None where there are none."""
    return None if place is None else place.groups.sizes


def scale_of(place: Any) -> Any:
    """The scale of each row between both products, or None."""
    return None if place is None else place.scale


def _bwd(static: Layer, residual: tuple[Kept, jax.Array], dy: jax.Array) -> tuple:
    kept, mark = residual
    dy, _ = once_derived(static.op, dy, mark)
    moves, sides, place = static.moves, kept.sides, kept.place
    first, second = kept.recipes
    w1, w2 = sides.w_first, sides.w_second
    gradient = moves.gradient(static.second, dy, place, second, w2)
    gate_up = _again(static, kept)
    act = kept.act
    if w2 is not None and not moves.keeps_activation:
        own = static.gated(scale_of(place))
        _, act = Unquantized(gate_up, second, None, own, wanted=(False, True)).forms()
    # The gradient of the result: by w_second^T, and along rows for that of w_second.
    products = [moves.dgrad(static.second, (0, 0), (2, 0), static.hidden(gate_up), place)]
    if w2 is not None:
        products.append(moves.wgrad(static.second, (1, 0), (0, 1), w2, place))
    operands = (gradient, (act,), (kept.w_second,))
    (dact, *dw2), _ = Step(tuple(products))(operands, sizes_of(place))
    # Through the activation, by its argument.
    own: Any = static.gated(scale_of(place), dact.astype(gate_up.dtype))
    own = own if sides.b_first is None else WithSums(own)
    how: dict[str, Any] = {"wanted": (True, w1 is not None), "frozen": (w1 is None, False)}
    gradient = Unquantized(gate_up, first, None, own, name="gradient", **how)
    products = [moves.dgrad(static.first, (0, 0), (2, 0), sides.x, place)]
    if w1 is not None:
        products.insert(0, moves.wgrad(static.first, (1, 0), (0, 1), w1, place))
    sums = () if sides.b_first is None else ((0, 2),)
    operands = (gradient, (kept.rows,), (kept.w_first[1],))
    (*dw1, dx), sums = Step(tuple(products), sums)(operands, sizes_of(place))
    back = Back(dy, gate_up, dact, dx, *(next(iter(each), None) for each in (dw1, dw2, sums)))
    return moves.gradients(static, kept, back), None, None, None


def _again(static: Layer, kept: Kept) -> jax.Array:
    """Gates and ups, arranged: as they were kept, or computed again."""
    if static.residuals != "inputs":
        return floats_kept(kept.gate_up, static.first.dtype)
    operands: Any = (kept.gate_up,), (kept.w_first[0],)
    product = static.moves.forward(static.first, operands, kept.place, False)
    (gate_up,), _ = Step((product,))(operands, sizes_of(kept.place))
    return static.moves.biased(static.first, gate_up, kept.bias, kept.place)


def floats_kept(gate_up: Any, dtype: np.dtype) -> jax.Array:
    """Gates and ups as floats."""
    if not isinstance(gate_up, MXArray):
        return gate_up
    # float16 may be too small for what was rounded up; what meets it is float32 then, too.
    return floats_of(gate_up, jnp.float32 if dtype == jnp.float16 else dtype)


_layer.defvjp(_fwd, _bwd)
